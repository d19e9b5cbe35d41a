//! NTttcp on this machine, as the paper measured: one processor has the NIC, the kernel's receiving and the program,
//! the other one the sender. What each takes is traced by BPF.

use super::{DEFERRED, FIGURE_2, FIRST, PROCESSES_TABLE, SUMMARY};
use crate::memory_cost::{self, MemoryCosts};
use crate::ntttcp::{self, NtttcpReport, NtttcpSettings};
use crate::papers::Run;
use crate::papers::report::{Cell, Report, Row, Table};
use crate::processor_trace::{Runs, Sample, Trace};
use anyhow::{Context, Result, anyhow, ensure};
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, Testbed, TestbedSettings, address_a};
use baton_linux::process;
use baton_moderation::Mode;
use baton_offloads::Offloads;
use std::net::SocketAddr;

/// The receiver's port.
const PORT: u16 = 5001;
/// Seconds that are measured; of a short run.
const SECONDS: f64 = 20.0;
const SHORT: f64 = 1.0;
/// Bytes of a receive.
const LENGTH: usize = 65_536;
/// Processes that have a row.
const ROWS: usize = 8;

/// Runs NTttcp, and reports it.
///
/// # Errors
/// If the hosts cannot be made, this process may not load BPF programs, or the transfer fails.
pub fn run(report: &mut Report, how: Run, say: &mut dyn FnMut(&str)) -> Result<()> {
    let seconds = if how.short { SHORT } else { SECONDS };
    let cores = process::allowed_cpus();
    ensure!(cores.len() > 1, "one processor is measured while another one sends: this process may run on one only");
    let (core, other) = (cores[0], cores[1]);
    // The paper's moderation, as the model has it; frames of the wire's size; nothing is merged.
    let moderation = Mode::Static { time: super::DELAY, frames: super::AT_FRAMES };
    let known = [INTERFACE_A, INTERFACE_B].map(process::napi_threads);
    let bed = Testbed::new(&TestbedSettings {
        segmentation: false,
        offloads: Offloads { moderation, ..Offloads::default() },
        gro: false,
        threaded_napi: true,
        spin: 0,
        nic_cores: vec![core],
        agent_core: Some(other),
        ..TestbedSettings::default()
    })?;
    for ((interface, core), known) in [(INTERFACE_A, core), (INTERFACE_B, other)].into_iter().zip(known) {
        let threads = process::napi_threads(interface).into_iter().filter(|thread| !known.contains(thread));
        threads.for_each(|thread| _ = process::pin(thread as i32, core));
    }
    let nic = bed.tool()?.statistics()?.nic_process;
    say(&format!("numa: NTttcp on processor {core} for {seconds} s"));
    let address = SocketAddr::new(address_a(false), PORT);
    let settings =
        |core, traced| NtttcpSettings { connections: 1, length: LENGTH, seconds, warming: 1.0, core: Some(core), traced };
    let (agent, host_a, host_b) = (bed.socket(), &bed.host_a, &bed.host_b);
    let (received, sent) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| host_a.run(|| Ok(ntttcp::receive(&settings(core, true), address, Some(agent.as_path())))));
        let sent = host_b.run(|| Ok(ntttcp::send(&settings(other, false), address, None)));
        (receiving.join().map_err(|_| anyhow!("the receiver panicked")), sent)
    });
    sent?.context("the sender")?;
    add(report, &received??.context("the receiver")?, nic)?;
    say("numa: a pointer chase from each node to each");
    report.tables.push(by_node(&memory_cost::measure().context("the cost of memory")?));
    Ok(())
}

/// What an access costs by node, the firmware's distance in the paper's place.
fn by_node(costs: &MemoryCosts) -> Table {
    let rows = costs.nodes.iter().zip(&costs.nanos).zip(&costs.distances);
    let row = |((node, nanos), distances): ((&usize, &Vec<f64>), &Vec<Option<u32>>)| {
        let cells = nanos.iter().map(|nanos| Cell::live(*nanos));
        let slit = distances.iter().map(|distance| distance.map_or_else(Cell::default, |distance| Cell::live(distance.into())));
        Row { name: format!("from node {node}"), cells: cells.chain(slit).collect() }
    };
    let to = costs.nodes.iter().map(|node| format!("to node {node}, ns"));
    Table {
        title: "Memory by node, live: an access of a pointer chase (ours)".into(),
        columns: to.chain(costs.nodes.iter().map(|node| format!("to node {node}, SLIT"))).collect(),
        rows: rows.map(row).collect(),
        note: String::new(),
    }
}

/// Who of a sample's processes delivers frames to the kernel, which is an interrupt's first half here; and who is the
/// deferred half, beside its soft interrupt.
fn is_first(number: u32, nic: u32) -> bool {
    number == nic
}

fn is_deferred(name: &str) -> bool {
    name.starts_with("napi/")
}

/// The halves of a sample: the NIC's process and devices' interrupts; NAPI's threads and the soft interrupt of
/// receiving.
fn halves(sample: &Sample, nic: u32) -> [Runs; 2] {
    let half = |soft: &str, counts: &dyn Fn(u32, &str) -> bool| {
        let mut sum = sample.halves.get(soft).copied().unwrap_or_default();
        sample.processes.iter().filter(|one| counts(one.process, &one.name)).for_each(|one| sum.add(&one.runs));
        sum
    };
    [half("first half", &|number, _| is_first(number, nic)), half("NET_RX", &|_, name| is_deferred(name))]
}

/// Percent of the processor.
fn share(sum_us: f64, ms: f64) -> f64 {
    sum_us / ms / 10.0
}

/// Adds what was measured to a report.
fn add(report: &mut Report, received: &NtttcpReport, nic: u32) -> Result<()> {
    let trace = received.trace.as_ref().context("there is no trace")?;
    let total = trace.total();
    let kilobytes = received.bytes as f64 / received.seconds / 1000.0;
    let (frame, packets, interrupts) = (received.average_frame, received.packets_per_interrupt, received.interrupts_per_second);
    let sent = received.packets_sent as f64;
    let rows = [
        kilobytes,
        received.megabits,
        frame,
        sent,
        received.packets_received as f64,
        packets,
        interrupts,
        received.cycles_per_byte,
    ];
    report.measured_rows(SUMMARY, &rows.map(|value| vec![value]));
    let [first, deferred] = halves(&total, nic);
    let cells = |runs: &Runs| vec![runs.count as f64, runs.longest_us / 1e3, runs.mean_us() / 1e3, runs.sum_us / 1e3];
    report.measured_rows(DEFERRED, &[cells(&deferred)]);
    report.measured_rows(FIRST, &[cells(&first)]);
    let own = std::process::id();
    let of = |counts: &dyn Fn(u32) -> bool| -> f64 {
        total.processes.iter().filter(|one| counts(one.process)).map(|one| one.runs.sum_us).sum()
    };
    // The paper's are of both processors, and its other one is idle.
    let [idle, program] = [0, own].map(|wanted| share(of(&|number| number == wanted), total.ms) / 2.0);
    report.measured_rows(PROCESSES_TABLE, &[vec![50.0 + idle], vec![program]]);
    plot(report, trace, nic);
    report.tables.push(own_processes(trace.processor, &total));
    for (name, runs, what) in [
        ("numa.trace.deferred", &deferred, "NAPI's thread and soft interrupt on this machine's processor, without the program's"),
        ("numa.trace.first", &first, "the NIC's process, which delivers frames, and devices' interrupts"),
    ] {
        report.measured(name, share(runs.sum_us, total.ms), what);
    }
    report.measured("numa.trace.throughput", received.megabits, "a TAP, and frames of 1500 bytes");
    report.measured("numa.trace.interrupts", interrupts, "the NIC's deliveries");
    report.measured("numa.trace.frames_each", packets, "the same moderation");
    Ok(())
}

/// Gives Figure 2 its live points: each second's, or of shorter runs each sample's.
fn plot(report: &mut Report, trace: &Trace, nic: u32) {
    let Some(figure) = report.figures.iter_mut().find(|figure| figure.title == FIGURE_2) else { return };
    let mut began = 0.0;
    let points: Vec<(f64, [f64; 3])> = trace
        .samples
        .iter()
        .map(|sample| {
            let (ms, at) = (sample.ms - began, began / 1e3);
            began = sample.ms;
            let [first, deferred] = halves(sample, nic).map(|runs| share(runs.sum_us, ms));
            let idle: f64 = sample.processes.iter().filter(|one| one.process == 0).map(|one| one.runs.sum_us).sum();
            // A long turn counts where it ends.
            (at, [(100.0 - share(idle, ms)).max(0.0), deferred, first])
        })
        .collect();
    for (at, curve) in figure.curves.iter_mut().enumerate().take(3) {
        curve.live = points.iter().map(|(second, values)| (*second, values[at])).collect();
    }
}

/// The processes that took most of the processor.
fn own_processes(processor: usize, total: &Sample) -> Table {
    let row = |name: String, runs: &Runs| {
        let cells =
            [runs.count as f64, runs.longest_us / 1e3, runs.mean_us() / 1e3, runs.sum_us / 1e3, share(runs.sum_us, total.ms)];
        Row { name, cells: cells.map(Cell::live).into() }
    };
    let halves = total.halves.iter().map(|(name, runs)| row((*name).to_owned(), runs));
    let processes = total.processes.iter().take(ROWS).map(|one| row(format!("{} ({})", one.name, one.process), &one.runs));
    Table {
        title: format!("Tables 2 to 4, live: processor {processor}"),
        columns: ["count", "longest, ms", "mean, ms", "sum, ms", "%"].map(String::from).into(),
        rows: halves.chain(processes).collect(),
        note: "Halves by the kernel's names, then processes. What interrupts a process counts in both.".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::report::{Comparison, Curve, Figure};
    use crate::processor_trace::ProcessRuns;
    use std::collections::BTreeMap;

    #[test]
    fn halves_and_processes_are_in_the_papers_tables() {
        let runs = |count, sum_us| Runs { count, sum_us, longest_us: 500.0 };
        let process = |process, name: &str, runs| ProcessRuns { process, name: name.into(), runs };
        let own = std::process::id();
        let sample = |ms| Sample {
            ms,
            halves: BTreeMap::from([("NET_RX", runs(10, 1000.0)), ("first half", runs(5, 100.0))]),
            polls: [10, 30, 5],
            processes: vec![
                process(0, "swapper/0", runs(1, 20_000.0)),
                process(own, "baton", runs(20, 30_000.0)),
                process(u32::MAX, "baton", runs(30, 10_000.0)),
                process(3, "napi/baton0-1", runs(40, 39_000.0)),
            ],
        };
        let trace = Trace { processor: 0, samples: vec![sample(100.0), sample(200.0)] };
        let row = |columns| Row { name: String::new(), cells: vec![Cell::model(1.0); columns] };
        let table = |title: &str, rows, columns| Table {
            title: title.into(),
            columns: vec![String::new(); columns],
            rows: vec![row(columns); rows],
            ..Table::default()
        };
        let tables = vec![table(SUMMARY, 8, 1), table(DEFERRED, 5, 4), table(FIRST, 5, 4), table(PROCESSES_TABLE, 4, 1)];
        let curves = ["processor", "deferred", "first"].map(|name| Curve::new(name, Vec::new())).into();
        let figures = vec![Figure { title: FIGURE_2.into(), curves, ..Figure::default() }];
        let mut report = Report { tables, figures, ..Report::default() };
        report.show(Comparison::new("numa.trace.deferred", "", "%", 61.6, 62.0));
        let received = NtttcpReport {
            received: true,
            bytes: 1_000_000,
            seconds: 0.2,
            megabits: 40.0,
            average_frame: 1448.0,
            packets_sent: 300,
            packets_received: 600,
            interrupts: 300,
            of_the_nic: true,
            interrupts_per_second: 1500.0,
            packets_per_interrupt: 2.0,
            deferred_per_second: 0.0,
            first_half: None,
            deferred_half: None,
            cycles_per_byte: 100.0,
            trace: Some(trace),
        };
        add(&mut report, &received, u32::MAX).unwrap();
        let live = |table: usize, row: usize| -> Vec<f64> {
            report.tables[table].rows[row].cells.iter().filter_map(|cell| cell.live).collect()
        };
        assert_eq!((live(0, 0), live(0, 6), live(0, 7)), (vec![5000.0], vec![1500.0], vec![100.0]));
        // NAPI's thread and the soft interrupt; the NIC and devices.
        assert_eq!(live(1, 0), [100.0, 0.5, 0.8, 80.0]);
        assert_eq!((live(2, 0)[0], live(2, 0)[3]), (70.0, 20.2));
        assert_eq!((live(3, 0), live(3, 1)), (vec![60.0], vec![15.0]));
        assert_eq!(report.comparisons[0].live, Some(40.0));
        let figure = &report.figures[0];
        assert_eq!(figure.curves[0].live, [(0.0, 80.0), (0.1, 80.0)]);
        assert_eq!(figure.curves[1].live[1], (0.1, 40.0));
        assert_eq!(report.tables[4].rows.len(), 6);
    }

    #[test]
    fn a_row_has_what_each_nodes_memory_costs_and_how_far_it_is() {
        let costs =
            MemoryCosts { nodes: vec![0, 1], nanos: vec![vec![80.0, 140.0]; 2], distances: vec![vec![Some(10), None]; 2] };
        let table = by_node(&costs);
        assert_eq!(table.columns, ["to node 0, ns", "to node 1, ns", "to node 0, SLIT", "to node 1, SLIT"]);
        let live: Vec<Option<f64>> = table.rows[1].cells.iter().map(|cell| cell.live).collect();
        assert_eq!(live, [Some(80.0), Some(140.0), Some(10.0), None]);
    }
}
