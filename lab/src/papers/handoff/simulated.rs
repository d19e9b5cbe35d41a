//! The simulated machine of Table 1: a web server under SPECweb99 (Figure 9), and the same load on the prototype
//! (Figures 1 F, 7 and 8).

use super::host::{Faults, Timing};
use super::numbers as n;
use super::prototype::{Named, stacks, within};
use super::web::{Served, WebLoad, run};
use crate::bars::Bar;
use crate::papers::report::{Cell, Comparison, Report, Row, Table};
use crate::web_mix::{CLIENT_RATE, DYNAMIC};

/// Figure 9: HTTP throughput without handoff in Mb/s, with dynamic content and without.
const WITHOUT: [f64; 2] = [192.0, 307.0];
/// Rounds in which the server's cycles for a byte are found.
const ROUNDS: usize = 2;
/// The server's cycles for a byte before the first round.
const GUESS: f64 = 50.0;
/// Connections of Figure 9.
const CLIENTS: usize = 1024;

/// The simulated machine's cycles: an instruction takes one, and waits for its data.
pub const TIMING: Timing = Timing { instruction: 1.0, first: n::FIRST_LATENCY };

/// Runs of the web server on the simulated machine: default without and with handoff, static without and with.
pub struct Simulated {
    /// The server's own cycles for a byte of its answers, with dynamic content and without. They are calibrated.
    pub application: [f64; 2],
    /// The runs.
    pub runs: [Served; 4],
}

fn load(dynamic: f64, handoff: bool, application: f64, faults: Faults) -> WebLoad {
    let nic = n::TABLE_2[1][4] / n::NIC_INSTRUCTIONS;
    WebLoad { clients: CLIENTS, dynamic, handoff, timing: TIMING, clock: n::HOST_CLOCK, nic, application, faults }
}

/// Finds the server's cycles for a byte at which the machine without handoff has the paper's throughput.
fn calibrate(dynamic: f64, target: f64, faults: Faults) -> f64 {
    (0..ROUNDS).fold(GUESS, |application, _| {
        let served = run(&load(dynamic, false, application, faults.without()));
        let cycles = |rate: f64| 8.0 * n::HOST_CLOCK / (1e6 * rate);
        (application + cycles(target) - cycles(served.rate)).max(0.0)
    })
}

/// Runs the simulated machine.
pub fn measure(faults: Faults) -> Simulated {
    let application = [calibrate(DYNAMIC, WITHOUT[0], faults), calibrate(0.0, WITHOUT[1], faults)];
    let [default, fixed] = application;
    let runs = [(DYNAMIC, false, default), (DYNAMIC, true, default), (0.0, false, fixed), (0.0, true, fixed)];
    Simulated { application, runs: runs.map(|(dynamic, handoff, own)| run(&load(dynamic, handoff, own, faults))) }
}

/// The prototype with so many clients of SPECweb99.
pub fn on_prototype(clients: usize, handoff: bool, timing: Timing, application: f64, faults: Faults) -> Served {
    let nic = n::CYCLES_PER_SEGMENT / 2.0 / n::NIC_CLOCK;
    run(&WebLoad { clients, timing, clock: n::ATHLON_CLOCK, nic, ..load(DYNAMIC, handoff, application, faults) })
}

/// Figure 9.
pub fn figure_9(simulated: &Simulated, report: &mut Report) {
    let names = ["default, without", "default, handoff", "static, without", "static, handoff"];
    let named: Vec<Named> =
        simulated.runs.iter().zip(names).map(|(served, name)| Named { name, profile: served.profile }).collect();
    let runs: Vec<&Named> = named.iter().collect();
    report.figures.push(stacks(
        "Figure 9: cycles of a packet",
        "cycles",
        &runs,
        |tally| tally.cycles(TIMING),
        "The network stack alone.",
    ));
    report.figures.push(stacks("Figure 9: instructions of a packet", "instructions", &runs, |tally| tally.instructions, ""));
    report.figures.push(stacks("Figure 9: L2 misses of a packet", "misses", &runs, |tally| tally.memory, ""));
    let [default, with, fixed, fixed_with] = &simulated.runs;
    let papers = [Some(WITHOUT[0]), Some(222.0), Some(WITHOUT[1]), Some(391.0)];
    let row = |((served, name), paper): ((&Served, &str), Option<f64>)| {
        let rate = Cell { paper, ..Cell::model(served.rate) };
        let stack = served.profile.total().cycles(TIMING);
        let rest = [served.cycles, stack, 100.0 * served.busy[0], 100.0 * served.busy[1]].map(Cell::model);
        Row { name: name.into(), cells: std::iter::once(rate).chain(rest).collect() }
    };
    let columns = ["Mb/s", "cycles a packet", "the stack's", "host busy, %", "NIC busy, %"];
    report.tables.push(Table {
        title: "Figure 9 as numbers".into(),
        columns: columns.map(String::from).to_vec(),
        rows: simulated.runs.iter().zip(names).zip(papers).map(row).collect(),
        note: "Cycles of a packet are the whole system's, the server's own among them.".into(),
    });
    let rate = |name, what: &str, paper, served: &Served| {
        Comparison::new(name, format!("HTTP throughput, {what} (section 5.2)"), "Mb/s", paper, served.rate)
    };
    report.compare(rate("handoff.fig9.default_without", "default, without handoff", WITHOUT[0], default).calibrated(), 0.02);
    report.compare(rate("handoff.fig9.static_without", "static, without handoff", WITHOUT[1], fixed).calibrated(), 0.02);
    report.compare(rate("handoff.fig9.default", "default, with handoff", 222.0, with), 0.05);
    report.compare(rate("handoff.fig9.static", "static, with handoff", 391.0, fixed_with), 0.05);
    let change = |name, what: &str, paper, before: &Served, after: &Served| {
        let model = 100.0 * (after.cycles / before.cycles - 1.0);
        let why = "a server around select is always busy here: when the rest becomes cheaper it asks more often, and cycles fall only as \
                   throughput rises. The paper's fall more, so its host is idle at times with handoff";
        Comparison::new(name, format!("the system's cycles of a packet, {what} (section 5.2)"), "%", paper, model).because(why)
    };
    within(report, change("handoff.fig9.default_cycles", "default", -17.0, default, with), 4.0);
    within(report, change("handoff.fig9.static_cycles", "static", -31.0, fixed, fixed_with), 4.0);
    // The figure is of the network stack alone, and the text does not say whose cycles it means.
    let stack = |name, what: &str, paper, before: &Served, after: &Served| {
        let [before, after] = [before, after].map(|served| served.profile.total().cycles(TIMING));
        let model = 100.0 * (after / before - 1.0);
        Comparison::new(name, format!("the same if the stack's cycles are meant, {what} (section 5.2)"), "%", paper, model)
    };
    report.show(stack("handoff.fig9.default_stack", "default", -17.0, default, with));
    report.show(stack("handoff.fig9.static_stack", "static", -31.0, fixed, fixed_with));
    let most = simulated.runs.iter().map(|served| served.rate).fold(0.0, f64::max);
    report.bar(Bar::most("handoff.fig9.ceiling", CLIENTS as f64 * CLIENT_RATE / 1e6, most));
}
