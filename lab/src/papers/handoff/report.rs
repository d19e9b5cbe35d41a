//! The paper's figures and tables as numbers, beside the paper's own.

use super::host::Faults;
use super::numbers as n;
use super::prototype::{Named, Prototype, figure_1, figure_7, figure_8};
use super::simulated::{Simulated, figure_9};
use super::{counted, firmware, prototype, simulated};
use crate::papers::Run;
use crate::papers::report::{Absent, Cell, Comparison, Contradiction, Parameter, Report, Row, Source, Table};
use crate::papers::sabotage::Sabotage;
use anyhow::{Context, Result};

/// Bars that count and do not hold, and why. docs/papers/handoff.md says more.
const MISSED: [(&str, &str); 2] = [
    (
        "handoff.fig1.d_over_c",
        "without handoff the model misses less often: it knows the structures whose sizes the paper prints",
    ),
    (
        "handoff.fig9.static_cycles",
        "a server around select is always busy here, since it asks anew at once when the rest becomes cheaper: cycles fall only \
         as throughput rises",
    ),
];

fn parameters(prototype: &Prototype, simulated: &Simulated) -> Vec<Parameter> {
    use Source::{Assumed, Calibrated, Paper};
    let row = |name: &str, value: f64, unit, source| Parameter::new(name, value, unit, source);
    let count = |name: &str, value: u64, unit, source| Parameter::new(name, value as f64, unit, source);
    vec![
        count("socket", n::SOCKET, "bytes", Paper("section 2")),
        count("inpcb", n::INPCB, "bytes", Paper("section 2")),
        count("tcpcb", n::TCPCB, "bytes", Paper("section 2")),
        count("timer", n::CALLOUT, "bytes", Paper("section 2: five are 120")),
        count("a packet in C", n::PACKET, "instructions", Paper("section 2")),
        row("data accesses", n::ACCESSES, "an instruction", Paper("section 2: half of 4600 micro-operations")),
        count("TCP", n::TCP, "instructions", Paper("Table 2: the NIC runs FreeBSD's TCP")),
        count("IP and Ethernet", n::IP_AND_ETHERNET, "instructions", Paper("Table 2")),
        count(
            "driver, a message",
            n::DRIVER_MESSAGE,
            "instructions",
            Assumed("as the NIC's end of the interface (Table 2, Handoff)"),
        ),
        count("bypass, a message", n::BYPASS, "instructions", Paper("section 5.1: less than 140")),
        count("system call", n::SYSTEM_CALL, "instructions", Assumed("the paper has the division in a picture only")),
        count("driver, a packet", n::DRIVER, "instructions", Assumed("what is left of a packet in C")),
        count("page", n::PAGE, "bytes", Paper("section 5.1, of sent data; taken for acknowledged data, too")),
        count("select, a connection", n::SELECT, "instructions", Assumed("Flash waits with select")),
        row("instruction on the Athlon", prototype.timing.instruction, "cycles", Calibrated("Figure 1 C, 4295 cycles")),
        row("first level, simulated", n::FIRST_LATENCY, "cycles", Paper("Table 1")),
        row("second level", n::SECOND_LATENCY, "cycles", Paper("Table 1")),
        row("memory", n::MEMORY_LATENCY, "cycles", Paper("Table 1; of the Athlon: over 200")),
        count("descriptors of a ring", n::RING, "", Assumed("FreeBSD's driver for the Tigon")),
        count("buckets of the lookup", n::BUCKETS, "", Assumed("FreeBSD's TCBHASHSIZE")),
        count("buckets of timers", n::WHEEL, "", Assumed("of FreeBSD's callout wheel, 10 ms each")),
        count("one-way delay", n::DELAY, "µs", Assumed("a cable and two interrupts")),
        count("send buffer", n::SEND_SPACE.into(), "bytes", Assumed("FreeBSD's tcp_sendspace")),
        row("NIC, a segment and its ACK", n::CYCLES_PER_SEGMENT, "cycles", Calibrated("section 4.1, 110 Mb/s")),
        row("server, a byte, default", simulated.application[0], "cycles", Calibrated("Figure 9, default: 192 Mb/s")),
        row("server, a byte, static", simulated.application[1], "cycles", Calibrated("Figure 9, static: 307 Mb/s")),
    ]
}

fn table_1() -> Table {
    let row = |name: &str, paper: f64, model: f64| Row { name: name.into(), cells: vec![Cell::both(paper, model)] };
    let kilobytes = |bytes: usize| bytes as f64 / 1024.0;
    Table {
        title: "Table 1: the simulated machine".into(),
        columns: vec!["value".into()],
        rows: vec![
            row("host's clock, MHz", 2000.0, n::HOST_CLOCK / 1e6),
            row("first level, KB", 64.0, kilobytes(n::FIRST.bytes)),
            row("first level, ways", 2.0, n::FIRST.ways as f64),
            row("first level, cycles", 3.0, n::FIRST_LATENCY),
            row("second level, KB", 256.0, kilobytes(n::SECOND.bytes)),
            row("second level, ways", 16.0, n::SECOND.ways as f64),
            row("second level, cycles", 17.0, n::SECOND_LATENCY),
            row("memory, cycles", 240.0, n::MEMORY_LATENCY),
            row("NIC, million instructions/s", 450.0, n::NIC_INSTRUCTIONS / 1e6),
        ],
        note: "Lines of 64 bytes; the second level fetches the next line on a miss. Memory has no limit of bandwidth here."
            .into(),
    }
}

fn table_2(report: &mut Report) {
    let row = |name: &str, at: usize| {
        let printed = n::TABLE_2[at];
        let sum: f64 = printed[..4].iter().sum();
        let parts = printed[..4].iter().map(|part| Cell::paper(*part));
        Row { name: name.into(), cells: parts.chain([Cell::both(printed[4], sum)]).collect() }
    };
    let share = |name: &str, at: usize| {
        let sum: f64 = n::TABLE_2[at][..4].iter().sum();
        let parts = n::TABLE_2[at][..4].iter().map(|part| Cell::paper(100.0 * part / sum));
        Row { name: name.into(), cells: parts.collect() }
    };
    report.tables.push(Table {
        title: "Table 2: the firmware, a packet".into(),
        columns: ["handoff", "TCP", "IP and Ethernet", "other", "total, and the sum"].map(String::from).to_vec(),
        rows: vec![row("cycles", 0), row("instructions", 1), share("cycles, %", 0), share("instructions, %", 1)],
        note: "`baton bench datapath` counts our NIC's instructions by layer.".into(),
    });
    let [one, two] = [1, 2].map(firmware::throughput);
    report.compare(
        Comparison::new("handoff.tab2.one_core", "one processor of the NIC (section 4.1)", "Mb/s", 110.0, one).calibrated(),
        0.02,
    );
    report.compare(Comparison::new("handoff.tab2.two_cores", "both processors (section 4.1)", "Mb/s", 200.0, two), 0.2);
}

fn contradictions() -> Vec<Contradiction> {
    let segment = 8.0 * f64::from(n::SEGMENT);
    let by_table = n::NIC_CLOCK / (2.0 * n::TABLE_2[0][4]) * segment / 1e6;
    let of_450 = n::NIC_INSTRUCTIONS / n::TABLE_2[1][4];
    let full = 2.0 * 1e9 / (8.0 * 1538.0);
    let [default, fixed] = [(192.0, 0.17), (307.0, 0.31)].map(|(without, less): (f64, f64)| without / (1.0 - less));
    vec![
        Contradiction {
            place: "Table 2",
            printed: "3144 instructions".into(),
            but: format!("its four parts are {}", n::TABLE_2[1][..4].iter().sum::<f64>()),
        },
        Contradiction {
            place: "section 3.3",
            printed: "\"the six commands exported by the NIC\"".into(),
            but: "Figure 4 lists seven".into(),
        },
        Contradiction {
            place: "section 1",
            printed: "7374 cycles with 1024 connections".into(),
            but: format!("section 2 has D 54 % above C, which is {:.0}; 7374 is E, with 20 ms of latency", 1.54 * 4295.0),
        },
        Contradiction {
            place: "section 4.1",
            printed: "110 Mb/s on one saturated core".into(),
            but: format!(
                "Table 2's 6773 cycles a packet, as many sent as received (section 5.1), are {by_table:.0} Mb/s at 88 MHz"
            ),
        },
        Contradiction {
            place: "section 5.2",
            printed: "17 % fewer cycles a packet, 222 Mb/s; 31 %, 391 Mb/s".into(),
            but: format!(
                "on a processor that is always busy these are {default:.0} and {fixed:.0} Mb/s, the latter above the ceiling of 410"
            ),
        },
        Contradiction {
            place: "section 4.1",
            printed: "450 million instructions/s for full-duplex Gigabit".into(),
            but: format!("with 3144 a packet that is {of_450:.0} packets/s, and {full:.0} data packets pass, without their ACKs"),
        },
    ]
}

/// Runs the models.
///
/// # Errors
/// If a NIC refuses a connection.
pub fn run(how: Run) -> Result<Report> {
    let Run { sabotage, short, callgrind } = how;
    let faults = Faults {
        large_state: sabotage == Some(Sabotage::LargeState),
        lookup_misses: sabotage == Some(Sabotage::LookupMisses),
        short,
        ..Faults::default()
    };
    let prototype = prototype::measure(faults)?;
    let simulated = simulated::measure(faults);
    let timing = prototype.timing;
    let web = |clients, handoff| simulated::on_prototype(clients, handoff, timing, simulated.application[0], faults);
    let (at_256, at_64) = (web(256, false), [web(64, false), web(64, true)]);
    let mut report = Report {
        word: "handoff",
        title: "TCP offload through connection handoff",
        about: "The real TCP and the real NIC behind its messages say what happens when; a list of what FreeBSD's layers execute and touch \
                then, over simulated caches, says what it costs. Profiles of the web server run the same TCP on both sides.",
        parameters: parameters(&prototype, &simulated),
        contradictions: contradictions(),
        absent: vec![
            Absent { what: "Figures 2, 3 and 6", why: "drawings of the stack, its structures and a connection's life" },
            Absent { what: "Figures 4 and 5", why: "lists of commands: interface/abi/src/message.rs has them" },
        ],
        ..Report::default()
    };
    figure_1(&prototype, &Named { name: "F", profile: at_256.profile }, &mut report);
    let names = ["SPECweb, OS 64//NIC 0", "SPECweb, OS 0//NIC 64"];
    let web: Vec<Named> = at_64.iter().zip(names).map(|(served, name)| Named { name, profile: served.profile }).collect();
    figure_7(&prototype, &web, &mut report);
    let [without, with] = &at_64;
    figure_8(
        &prototype,
        &[("SPECweb, without", without.messages.clone()), ("SPECweb, handoff", with.messages.clone())],
        &mut report,
    );
    report.tables.push(table_1());
    table_2(&mut report);
    figure_9(&simulated, &mut report);
    if callgrind {
        counted::run(&mut report).context("our own code")?;
    }
    MISSED.iter().for_each(|(name, why)| report.explain(name, why));
    Ok(report)
}
