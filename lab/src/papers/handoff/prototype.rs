//! The prototype: Figures 1, 7 and 8, with the counters of an Athlon.

use super::host::{Data, Faults, LAYERS, Profile, Timing};
use super::microbenchmark::{C_CYCLES, Load, Measured, calibrate, run};
use super::nic::Messages;
use crate::bars::Bar;
use crate::papers::report::{Cell, Comparison, Curve, Figure, JudgedBar, Report, Row, Shape, Table};
use anyhow::Result;

/// A profile with a name.
pub struct Named {
    /// As the paper names it.
    pub name: &'static str,
    /// For each packet.
    pub profile: Profile,
}

/// What the microbenchmark gives.
pub struct Prototype {
    /// The timing that configuration C is calibrated at.
    pub timing: Timing,
    /// Configurations A to E of Figure 1.
    pub configurations: Vec<Named>,
    /// The first nine bars of Figure 7's groups.
    pub divided: Vec<Named>,
    /// Cycles of C, D, 256 connections without and with handoff where misses do not fetch the next line.
    pub plain: [f64; 4],
    /// Cycles of C, D, E, 256 connections without and with handoff on caches whose levels exclude each other.
    pub athlon: [f64; 5],
    /// Figure 8: sending without and with handoff, at the microbenchmark's rate; and as we do, on a saturated NIC.
    pub messages: [Measured; 3],
}

const COPIED: Data = Data { copied: true, summed: true };
const SUMMED: Data = Data { copied: false, summed: true };

/// Runs the microbenchmark in all its forms.
///
/// # Errors
/// If a NIC refuses a connection.
pub fn measure(faults: Faults) -> Result<Prototype> {
    let one = Load::os(1, faults);
    let many = Load::os(1024, faults);
    let named = |name, load: Load| -> Result<Named> { Ok(Named { name, profile: run(&load)?.profile }) };
    let same = |name, measured: &Measured| Named { name, profile: measured.profile };
    // What several figures show runs once.
    let (c, d, all_256) = (run(&one)?, run(&many)?, run(&Load::os(256, faults))?);
    let handed = run(&Load::shared(0, &[256], faults))?;
    let configurations = vec![
        named("A", Load { data: COPIED, ..one.clone() })?,
        named("B", Load { data: SUMMED, ..one })?,
        same("C", &c),
        same("D", &d),
        named("E", Load { latency: 20_000, ..many })?,
    ];
    // Calibrated without faults, so that they show.
    let whole = if faults == faults.without() { c.clone() } else { run(&Load::os(1, faults.without()))? };
    let timing = calibrate(&whole);
    let divided = vec![
        same("OS 1//NIC 0", &c),
        named("OS 0//NIC 1", Load::shared(0, &[1], faults))?,
        same("OS 256//NIC 0", &all_256),
        same("OS 0//NIC 256", &handed),
        named("OS 512//NIC 0", Load::os(512, faults))?,
        named("OS 256//NIC 256", Load::shared(256, &[256], faults))?,
        named("OS 0//NIC1 256//NIC2 256", Load::shared(0, &[256, 256], faults))?,
        same("OS 1024//NIC 0", &d),
        named("OS 768//NIC 256", Load::shared(768, &[256], faults))?,
    ];
    let unlike = Faults { no_prefetch: true, ..faults };
    let loads = |faults| [Load::os(1, faults), Load::os(1024, faults), Load::os(256, faults), Load::shared(0, &[256], faults)];
    let plain = cycles_of(loads(unlike))?;
    let [one, many, os, nic] = loads(Faults { exclusive: true, ..unlike });
    let late = Load { latency: 20_000, ..many.clone() };
    let athlon = cycles_of([one, many, late, os, nic])?;
    let ours = Load { paced: false, messages: Messages::Joined, ..Load::shared(0, &[256], faults) };
    let messages = [all_256, handed, run(&ours)?];
    Ok(Prototype { timing, configurations, divided, plain, athlon, messages })
}

/// Cycles of a packet of each load, on a processor that is calibrated with the caches of the first, which is
/// configuration C: without other faults, so that they show.
fn cycles_of<const N: usize>(loads: [Load; N]) -> Result<[f64; N]> {
    let Faults { no_prefetch, exclusive, .. } = loads[0].faults;
    let own =
        calibrate(&run(&Load { faults: Faults { no_prefetch, exclusive, ..loads[0].faults.without() }, ..loads[0].clone() })?);
    let mut all = [0.0; N];
    for (cycles, load) in all.iter_mut().zip(&loads) {
        *cycles = run(load)?.profile.total().cycles(own);
    }
    Ok(all)
}

/// A figure of stacks: for each run what each layer adds.
pub fn stacks(title: &str, y: &'static str, runs: &[&Named], of: impl Fn(&super::host::Tally) -> f64, note: &str) -> Figure {
    let names = runs.iter().map(|run| run.name.to_owned()).collect();
    let layer = |(layer, name): &(super::host::Layer, &str)| {
        let points = runs.iter().enumerate().map(|(at, run)| (at as f64, of(&run.profile.0[*layer as usize]))).collect();
        Curve::new(*name, points)
    };
    let curves = LAYERS.iter().map(layer).collect();
    Figure { title: title.into(), x: "configuration", y, shape: Shape::Stacks(names), curves, note: note.into() }
}

/// A table of the same runs: cycles, instructions, misses of a packet.
fn profiles(title: &str, runs: &[&Named], timing: Timing, papers: &[Option<f64>], note: &str) -> Table {
    let row = |(at, run): (usize, &&Named)| {
        let total = run.profile.total();
        let cycles = Cell { paper: papers.get(at).copied().flatten(), ..Cell::model(total.cycles(timing)) };
        let rest = [total.instructions, total.accesses(), total.second, total.memory].map(Cell::model);
        Row { name: run.name.into(), cells: std::iter::once(cycles).chain(rest).collect() }
    };
    let columns = ["cycles", "instructions", "data accesses", "L2 hits", "L2 misses"].map(String::from).to_vec();
    Table { title: title.into(), columns, rows: runs.iter().enumerate().map(row).collect(), note: note.into() }
}

impl Prototype {
    fn cycles(&self, runs: &[Named], name: &str) -> f64 {
        let found = runs.iter().find(|run| run.name == name);
        found.map_or(f64::NAN, |run| run.profile.total().cycles(self.timing))
    }

    /// By how many percent the second run takes more cycles than the first.
    fn change(&self, before: &str, after: &str) -> f64 {
        100.0 * (self.cycles(&self.divided, after) / self.cycles(&self.divided, before) - 1.0)
    }
}

/// A comparison whose bar is a distance from the paper's number, and not a ratio.
pub fn within(report: &mut Report, comparison: Comparison, distance: f64) {
    let value = comparison.model.unwrap_or(f64::NAN) - comparison.paper.unwrap_or(f64::NAN);
    let bound = if value < 0.0 { -distance } else { distance };
    let bar = Bar { name: comparison.name, value, bound, holds: value.abs() <= distance };
    report.bars.push(JudgedBar { bar, counted: !comparison.calibrated, known: None });
    report.comparisons.push(comparison);
}

/// Figure 1. `web` is configuration F.
pub fn figure_1(prototype: &Prototype, web: &Named, report: &mut Report) {
    let timing = prototype.timing;
    let runs: Vec<&Named> = prototype.configurations.iter().chain([web]).collect();
    let cycles = |name| prototype.cycles(&prototype.configurations, name);
    report.figures.push(stacks(
        "Figure 1: cycles of a packet by layer",
        "cycles",
        &runs,
        |tally| tally.cycles(timing),
        "A copied and summed, B zero-copy, C zero-copy and checksum offload, one connection each; D as C with 1024; E as D with 20 ms; F web server, 256.",
    ));
    report.figures.push(stacks(
        "Figure 1: data accesses of a packet by layer",
        "accesses",
        &runs,
        super::host::Tally::accesses,
        "",
    ));
    let papers = [Some(10_358.0), None, Some(C_CYCLES), Some(1.54 * C_CYCLES), Some(7374.0), None];
    let note = "The paper prints A, C and E, and D as 54 % more than C. The first level's hits are hidden behind instructions.";
    report.tables.push(profiles("Figure 1 as numbers, a packet", &runs, timing, &papers, note));
    report.show(Comparison::new("handoff.fig1.a", "configuration A (section 1)", "cycles", 10_358.0, cycles("A")).because(
        "a copy costs its misses here; on the Athlon a write of a line that is not there is read first, and then written back",
    ));
    within(
        report,
        Comparison::new("handoff.fig1.c", "configuration C (section 1)", "cycles", C_CYCLES, cycles("C")).calibrated(),
        1.0,
    );
    let few = "the model knows structures whose sizes the paper prints, and its caches fetch the next line: half of a connection's lines do not miss";
    within(
        report,
        Comparison::new("handoff.fig1.d_over_c", "1024 connections over one (section 2)", "", 1.54, cycles("D") / cycles("C"))
            .because(few),
        0.25,
    );
    within(
        report,
        Comparison::new("handoff.fig1.e_over_d", "20 ms of latency over none (section 2)", "", 1.12, cycles("E") / cycles("D")),
        0.1,
    );
    let [c, d, _, _] = prototype.plain;
    report.show(
        Comparison::new("handoff.fig1.d_over_c_plain", "the same if a miss does not fetch the next line", "", 1.54, d / c)
            .because("Table 1's prefetch is the simulator's; of the Athlon the paper does not say it"),
    );
    let [c, d, e, _, _] = prototype.athlon;
    let why = "what AMD says of the Athlon's caches; Table 1's, of the simulator, are inclusive here";
    let name = "the same without prefetch, and with levels that exclude each other";
    report.show(Comparison::new("handoff.fig1.d_over_c_athlon", name, "", 1.54, d / c).because(why));
    let name = "20 ms of latency over none, on such caches";
    report.show(Comparison::new("handoff.fig1.e_over_d_athlon", name, "", 1.12, e / d).because(why));
}

/// Figure 7. `web` is SPECweb99 with 64 clients, without and with handoff.
pub fn figure_7(prototype: &Prototype, web: &[Named], report: &mut Report) {
    let timing = prototype.timing;
    let runs: Vec<&Named> = prototype.divided.iter().chain(web).collect();
    report.figures.push(stacks("Figure 7: cycles of a packet", "cycles", &runs, |tally| tally.cycles(timing), ""));
    report.figures.push(stacks("Figure 7: instructions of a packet", "instructions", &runs, |tally| tally.instructions, ""));
    report.figures.push(stacks("Figure 7: L2 misses of a packet", "misses", &runs, |tally| tally.memory, ""));
    report.tables.push(profiles("Figure 7 as numbers, a packet", &runs, timing, &[], "The paper prints the changes only."));
    let change = |name, what, paper, before, after| {
        Comparison::new(name, format!("{what} (section 5.1)"), "%", paper, prototype.change(before, after))
    };
    for one in [
        change("handoff.fig7.one", "1 connection, on the NIC", -76.0, "OS 1//NIC 0", "OS 0//NIC 1"),
        change("handoff.fig7.all_256", "256 connections, all on the NIC", -84.0, "OS 256//NIC 0", "OS 0//NIC 256"),
        change("handoff.fig7.half_512", "512 connections, half on the NIC", -36.0, "OS 512//NIC 0", "OS 256//NIC 256"),
        change("handoff.fig7.quarter_1024", "1024 connections, 256 on the NIC", -16.0, "OS 1024//NIC 0", "OS 768//NIC 256"),
    ] {
        within(report, one, 8.0);
    }
    let [_, _, without, with] = prototype.plain;
    report.show(Comparison::new(
        "handoff.fig7.all_256_plain",
        "256 connections, all on the NIC, if a miss does not fetch the next line",
        "%",
        -84.0,
        100.0 * (with / without - 1.0),
    ));
    let [_, _, _, without, with] = prototype.athlon;
    let name = "256 connections, all on the NIC, if the levels of cache exclude each other, too";
    report.show(Comparison::new("handoff.fig7.all_256_athlon", name, "%", -84.0, 100.0 * (with / without - 1.0)));
    let tally = |name: &str| {
        let found = prototype.divided.iter().find(|run| run.name == name);
        found.map_or_else(Profile::default, |run| run.profile)
    };
    let misses = |name| tally(name).total().memory;
    // Section 5.1: "near zero", and the gain falls as fewer of the connections are on the NIC.
    report.bar(Bar::most("handoff.fig7.misses_all_256", 1.0, misses("OS 0//NIC 256")));
    report.bar(Bar::most(
        "handoff.fig7.two_nics_over_one",
        1.0,
        prototype.cycles(&prototype.divided, "OS 0//NIC1 256//NIC2 256")
            / prototype.cycles(&prototype.divided, "OS 256//NIC 256"),
    ));
    if let [without, with] = web {
        let cycles = |run: &Named| run.profile.total().cycles(timing);
        report.show(Comparison::new(
            "handoff.fig7.web",
            "SPECweb99 with 64 clients (section 5.1)",
            "%",
            -54.0,
            100.0 * (cycles(with) / cycles(without) - 1.0),
        ));
    }
}

/// Figure 8: the messages of a packet by kind. `web` is SPECweb99 without and with handoff.
pub fn figure_8(prototype: &Prototype, web: &[(&'static str, Vec<(&'static str, f64)>)], report: &mut Report) {
    let [without, with, ours] = &prototype.messages;
    let descriptors = |measured: &Measured| {
        vec![("transmit descriptor", measured.descriptors[0]), ("receive descriptor", measured.descriptors[1])]
    };
    let mut runs = vec![
        ("TCP send, without", descriptors(without)),
        ("TCP send, handoff", with.messages.clone()),
        ("TCP send, ours", ours.messages.clone()),
    ];
    runs.extend(web.iter().cloned());
    let mut kinds: Vec<&'static str> = Vec::new();
    for (kind, _) in runs.iter().flat_map(|(_, counts)| counts) {
        if !kinds.contains(kind) {
            kinds.push(kind);
        }
    }
    let number = |counts: &[(&'static str, f64)], kind: &str| {
        counts.iter().find(|(name, _)| *name == kind).map_or(0.0, |(_, number)| *number)
    };
    let curve = |kind: &&'static str| {
        Curve::new(*kind, runs.iter().enumerate().map(|(at, (_, counts))| (at as f64, number(counts, kind))).collect())
    };
    report.figures.push(Figure {
        title: "Figure 8: messages of a packet across the interconnect".into(),
        x: "load",
        y: "messages",
        shape: Shape::Stacks(runs.iter().map(|(name, _)| (*name).to_owned()).collect()),
        curves: kinds.iter().map(curve).collect(),
        note: "The first two send at 100 Mb/s. \"Ours\" is the client library's way on a NIC that is asked for more than it can: one message \
               stands for all that is written until the NIC has read it, one for all that is acknowledged in a round."
            .into(),
    });
    let bytes = |kind: &str| match kind {
        "receive descriptor" => 32.0,
        "ch_nic_handoff" | "ch_nic_restore" | "ch_os_restore" => 112.0,
        _ => 16.0,
    };
    let rows = runs.iter().map(|(name, counts)| {
        let messages: f64 = counts.iter().map(|(_, number)| number).sum();
        let volume: f64 = counts.iter().map(|(kind, number)| number * bytes(kind)).sum();
        Row { name: (*name).into(), cells: vec![Cell::model(messages), Cell::model(volume)] }
    });
    report.tables.push(Table {
        title: "Figure 8 as numbers, a packet".into(),
        columns: vec!["messages".into(), "bytes".into()],
        rows: rows.collect(),
        note: "Sizes as in section 5.1; a handoff is 16 bytes and the 96 that it needs at least.".into(),
    });
    let read =
        |name, what: &str, paper, model| Comparison::new(name, format!("{what}, a packet (Figure 8)"), "messages", paper, model);
    let pages = "the NIC reports whole pages: that it joins acknowledgements is said, how is not";
    for one in [
        read("handoff.fig8.transmit", "transmit descriptors without handoff", 1.0, without.descriptors[0]),
        read("handoff.fig8.receive", "receive descriptors without handoff", 0.5, without.descriptors[1]),
        read("handoff.fig8.send", "ch_nic_send", 0.5, number(&with.messages, "ch_nic_send")),
        read("handoff.fig8.ack", "ch_os_ack", 0.18, number(&with.messages, "ch_os_ack")).because(pages),
    ] {
        within(report, one, 0.05);
    }
    let what = "what the saturated NIC sends while our messages are counted (section 4.1)";
    report.show(Comparison::new("handoff.fig8.rate", what, "Mb/s", 110.0, ours.rate).calibrated());
    let all = |measured: &Measured| measured.messages.iter().map(|(_, number)| number).sum::<f64>();
    report.bar(Bar::most("handoff.fig8.ours", 0.68, all(ours)));
}
