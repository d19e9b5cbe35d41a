//! "Implementation of TCP large receive offload on a multi-core NPU platform" (Li, Chen, Su): Figure 13, and what
//! sections V.B and V.C report of the copy engine's stack and of active acknowledgements.

mod acknowledging;
mod frames;
mod live;
mod requests;
mod setting_up;
mod throughput;

use crate::bars::Bar;
use crate::papers::report::{
    Absent, Cell, Comparison, Contradiction, Curve, Figure, Parameter, Report, Row, Shape, Source, Table,
};
use crate::papers::sabotage::Sabotage;
use crate::papers::{Document, Run};
use anyhow::Result;
use requests::Order;
use setting_up::CONNECTIONS;
use throughput::{SEGMENT, Settings, spread};

/// The document.
pub const DOCUMENT: Document = Document {
    word: "lro",
    figures: 13,
    tables: 0,
    quick,
    live: live::run,
    needs: None,
    sabotages: &[Sabotage::OneQueue, Sabotage::NoAggregation],
};

/// Numbers of connections, as far as the paper says: 1 to 64.
const COUNTS: [usize; 9] = [1, 2, 4, 8, 12, 16, 24, 32, 64];
/// The same of a short run.
const FEW: [usize; 3] = [1, 8, 64];
/// The client's first port, of several runs: which workers get connections is chance.
const PORTS: [u16; 3] = [40_000, 45_171, 52_013];
/// The paper's level, Gb/s.
const LEVEL: f64 = 4.75;
/// Microseconds after which a SYN is sent again (RFC 6298).
const SYN_TIMEOUT: u64 = 1_000_000;
/// Titles of what a live run adds to.
const SET_UPS: &str = "Section V.B: 64 connections are set up at once";
const SET_UP_TIMES: &str = "Section V.B: when SYNs reach the host (ours)";
const DOWNLOADS: &str = "Section V.C: active acknowledgements";

fn settings(sabotage: Option<Sabotage>) -> Settings {
    Settings {
        workers: 13,
        frame: 30.9,
        link: 10_000.0,
        copy: (2.0, 0.001),
        host: (5.0, 0.000_25),
        round_trip: 50.0,
        window: 256 << 10,
        merges: sabotage != Some(Sabotage::NoAggregation),
        one_queue: sabotage == Some(Sabotage::OneQueue),
    }
}

fn parameters(settings: &Settings, download: &acknowledging::Settings) -> Vec<Parameter> {
    use Source::{Assumed, Calibrated, Paper};
    let pcie = "PCI Express 1.1, four lanes";
    vec![
        Parameter::new("receiving threads", settings.workers as f64, "", Paper("section VI")),
        Parameter::new("wire", settings.link, "Mb/s", Paper("section VII")),
        Parameter::new("largest aggregate", 65_535.0, "bytes", Paper("section IV.D")),
        Parameter::new("an aggregate's wait", 10.0, "mean intervals", Paper("section IV.E")),
        Parameter::new("thread, a frame", settings.frame, "µs", Calibrated("4.75 Gb/s at 64 connections (Figure 13)")),
        Parameter::new("copy, each", settings.copy.0, "µs", Assumed("a request and its answer")),
        Parameter::new("copy", 1.0 / settings.copy.1, "MB/s", Assumed(pcie)),
        Parameter::new("host, a packet", settings.host.0, "µs", Assumed("interrupt, stack and call: 15,000 cycles at 2.93 GHz")),
        Parameter::new("host, copies", 1.0 / settings.host.1, "MB/s", Assumed("a copy to the program")),
        Parameter::new("round trip", settings.round_trip, "µs", Assumed("back to back")),
        Parameter::new("window", settings.window as f64, "bytes", Assumed("four aggregates")),
        Parameter::new("SYN's time-out", SYN_TIMEOUT as f64 / 1e6, "s", Assumed("RFC 6298")),
        Parameter::new("V.C: initial window", 10.0, "segments", Assumed("RFC 6928, Linux since 2.6.39")),
        Parameter::new("V.C: one way", download.delay as f64, "µs", Assumed("a campus")),
        Parameter::new("V.C: download", f64::from(download.bytes), "bytes", Assumed("a file")),
    ]
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

/// Figure 13.
fn throughputs(settings: Settings, short: bool, report: &mut Report) {
    let (counts, choices) = if short { (&FEW[..], &PORTS[..1]) } else { (&COUNTS[..], &PORTS[..]) };
    let plain = Settings { merges: false, ..settings };
    let runs = |settings: Settings| -> Vec<(f64, f64, f64)> {
        let run = |count: usize| {
            let all: Vec<_> = choices.iter().map(|ports| throughput::run(settings, *ports, count)).collect();
            (count as f64, mean(all.iter().map(|one| one.gigabits)), mean(all.iter().map(|one| one.segments)))
        };
        counts.iter().map(|count| run(*count)).collect()
    };
    let (merged, alone) = (runs(settings), runs(plain));
    let thread = SEGMENT as f64 * 8.0 / settings.frame / 1000.0;
    let occupied = |count: &usize| {
        let busy = choices.iter().map(|ports| {
            let mut workers = spread(&settings, *ports, *count);
            workers.sort_unstable();
            workers.dedup();
            workers.len() as f64 * thread
        });
        (*count as f64, mean(busy))
    };
    let rates = |runs: &[(f64, f64, f64)]| runs.iter().map(|one| (one.0, one.1)).collect::<Vec<_>>();
    let sizes = |runs: &[(f64, f64, f64)]| runs.iter().map(|one| (one.0, one.2)).collect::<Vec<_>>();
    let curves = vec![
        Curve::new("plain NIC", rates(&alone)),
        Curve { level: Some(LEVEL), ..Curve::new("large receive", rates(&merged)) },
        Curve::new("threads that the hash occupies", counts.iter().map(occupied).collect()),
    ];
    let x = "connections";
    let title = "Figure 13: throughput by connections".into();
    let note = "The paper's line is a picture; its text has the level. Means of three choices of ports.".into();
    report.figures.push(Figure { title, x, y: "Gb/s", shape: Shape::Lines, curves, note });
    let curves = vec![Curve::new("plain NIC", sizes(&alone)), Curve::new("large receive", sizes(&merged))];
    let title = "Segments in a packet that the host gets (ours)".into();
    report.figures.push(Figure { title, x, y: "segments", curves, ..Figure::default() });
    let of =
        |runs: &[(f64, f64, f64)], count: usize| runs.iter().find(|one| one.0 as usize == count).map_or(f64::NAN, |one| one.1);
    let level = Comparison::new("lro.throughput_64", "throughput of 64 connections (Figure 13)", "Gb/s", LEVEL, of(&merged, 64));
    report.compare(level.calibrated(), 0.05);
    let [low, high] = [f64::min, f64::max].map(|pick| alone.iter().map(|one| one.1).reduce(pick).unwrap_or(f64::NAN));
    report.bar(Bar::most("lro.plain_flat", 1.05, high / low));
    report.bar(Bar::least("lro.rises", 1.0, of(&merged, 8) / of(&merged, 1)));
    // Twice the connections bring less at the end than at the beginning.
    let doubled = |from: usize| of(&merged, 2 * from) / of(&merged, from);
    report.bar(Bar::most("lro.levels_off", 1.0, doubled(32) / doubled(1)));
    report.bar(Bar::least("lro.over_plain", 1.0, of(&merged, 64) / of(&alone, 64)));
}

/// Of connections that were set up at these times, in order, or never: those that were later than the first SYN's
/// time-out, or never; those that were never; when the last of the others was, in milliseconds.
fn set_up_figures(all: &[Option<u64>]) -> [f64; 3] {
    let count = |of: &dyn Fn(&Option<u64>) -> bool| all.iter().filter(|one| of(one)).count() as f64;
    let last = all.iter().flatten().max().map_or(f64::NAN, |last| *last as f64 / 1000.0);
    [count(&|one| one.is_none_or(|at| at >= SYN_TIMEOUT)), count(&|one| one.is_none()), last]
}

/// Section V.B.
fn set_ups(settings: &Settings, report: &mut Report) {
    let numbers = setting_up::Settings {
        workers: if settings.one_queue { 1 } else { settings.workers },
        copy: settings.copy,
        round_trip: 100,
        timeout: SYN_TIMEOUT,
    };
    let runs = Order::BOTH.map(|(name, order)| (name, setting_up::run(numbers, order)));
    let curve = |(name, all): &(&str, Vec<Option<u64>>)| {
        // One that was never established is left out, since it has no time.
        let times = all.iter().enumerate().filter_map(|(at, one)| Some((at as f64 + 1.0, (*one)? as f64 / 1e3)));
        Curve::new(*name, times.collect())
    };
    let title = SET_UP_TIMES.into();
    let curves = runs.iter().map(curve).collect();
    let note = "The first SYN's time-out is 1 s. A connection that is not drawn was never set up in 4 s.".into();
    report.figures.push(Figure { title, x: "connections", y: "ms", shape: Shape::LogLogLines, curves, note });
    let row =
        |(name, all): &(&str, Vec<Option<u64>>)| Row { name: (*name).into(), cells: set_up_figures(all).map(Cell::model).into() };
    report.tables.push(Table {
        title: SET_UPS.into(),
        columns: ["later than 1 s, or never", "never in 4 s", "the last of the others, ms"].map(String::from).into(),
        rows: runs.iter().map(row).collect(),
        note: "The paper: with the stack \"only a few connections can conduct data transmission normally\".".into(),
    });
    let [stack, turns] = runs.map(|(_, all)| set_up_figures(&all)[0]);
    report.bar(Bar::least("lro.stack_late", CONNECTIONS as f64 / 2.0 + 1.0, stack));
    report.bar(Bar::most("lro.turns_late", 0.0, turns));
}

/// Section V.C.
fn downloads(download: acknowledging::Settings, report: &mut Report) {
    let runs = [false, true].map(|active| acknowledging::run(acknowledging::Settings { active, ..download }));
    let [off, on] = &runs;
    let names = ["active ACK off", "active ACK on"];
    let megabytes = |points: &[(f64, f64)]| points.iter().map(|(x, y)| (*x, y / 1e6)).collect();
    let curves = names.iter().zip(&runs).map(|(name, run)| Curve::new(*name, megabytes(&run.progress))).collect();
    let title = "Section V.C: a download, aggregates of 64 KB without a time-out (ours)".into();
    report.figures.push(Figure { title, x: "ms", y: "MB received", shape: Shape::Lines, curves, note: String::new() });
    let row = |(name, run): (&&str, &acknowledging::Outcome)| {
        let cells = [run.spurious as f64, run.by_nic as f64, run.megabits].map(Cell::model).into();
        Row { name: (**name).into(), cells }
    };
    report.tables.push(Table {
        title: DOWNLOADS.into(),
        columns: ["spurious retransmissions", "acknowledgements of the NIC", "Mb/s"].map(String::from).into(),
        rows: names.iter().zip(&runs).map(row).collect(),
        note: "Nothing is lost: what is sent again was only held. The paper's NIC drops it, ours passes it on and with it what waits.".into(),
    });
    report.bar(Bar::least("lro.spurious_off", 1.0, off.spurious as f64));
    report.bar(Bar::most("lro.spurious_on", 0.0, on.spurious as f64));
    report.bar(Bar::least("lro.goodput_on_over_off", 1.0, on.megabits / off.megabits));
}

fn quick(how: Run) -> Result<Report> {
    let settings = settings(how.sabotage);
    let download = acknowledging::Settings { bytes: 8 << 20, delay: 250, link: 10_000, active: false, merges: settings.merges };
    let contradiction = |place, printed: &str, but: &str| Contradiction { place, printed: printed.into(), but: but.into() };
    let mut report = Report {
        word: "lro",
        title: "Implementation of TCP large receive offload on a multi-core NPU platform",
        about: "Thirteen receiving threads in virtual time: the real hash spreads connections, the real large receive merges their frames, the \
                real copy engine brings them to a host. V.B is the engine against a stack; V.C our TCP behind large receive and the real \
                active acknowledgements.",
        parameters: parameters(&settings, &download),
        contradictions: vec![
            contradiction(
                "abstract",
                "\"we achieved % performance gain\"",
                "the number is missing, as are two of the text's figure numbers",
            ),
            contradiction(
                "section V.C",
                "a window of 0xFFFF lets the sender \"transmit data faster\"",
                "65,535 bytes are less than what Linux advertises with a scale, and no receiver granted them",
            ),
        ],
        absent: vec![
            Absent { what: "Figures 1 to 11", why: "drawings; what they show is in docs/internals/offloads.md" },
            Absent { what: "Figure 12", why: "a drawing of two hosts" },
        ],
        ..Report::default()
    };
    throughputs(settings, how.short, &mut report);
    set_ups(&settings, &mut report);
    downloads(download, &mut report);
    Ok(report)
}
