//! TTCP on this machine (`baton ttcp`): a program sends messages of one size through the kernel, with full offload and
//! a handshake for each message, and with partial offload with and without Nagle's rule.

use super::{SIZES, WAYS, crossover};
use crate::bars::Bar;
use crate::papers::Run;
use crate::papers::report::Report;
use crate::ttcp::program::Direction;
use crate::ttcp::{self, Cell, TtcpSettings};
use anyhow::{Context, Result};

/// TTCP's ways, in the order of the model's: native, full, partial without Nagle and with it.
const LIVE: [&str; WAYS.len()] = ["none", "full-handshake", "fast-path-no-nagle", "fast-path"];
/// Rounds, messages and bytes of a transfer at most; and the same of a short run, which has only some of the sizes.
const ROUNDS: usize = 3;
const MESSAGES: u64 = 20_000;
const BYTES: u64 = 32 << 20;
const SHORT: u64 = 1500;
const FEW: [usize; 3] = [1, 4096, 65_536];

fn settings(how: Run) -> TtcpSettings {
    let ways = LIVE.iter().filter_map(|name| ttcp::WAYS.into_iter().find(|way| way.name == *name)).collect();
    let sizes = if how.short { FEW.to_vec() } else { SIZES.map(|size| size as usize).to_vec() };
    let (rounds, messages) = if how.short { (1, SHORT) } else { (ROUNDS, MESSAGES) };
    TtcpSettings { sizes, ways, directions: vec![Direction::Transmit], rounds, messages, bytes: BYTES, ..TtcpSettings::default() }
}

/// Runs TTCP for some two minutes, and reports it.
///
/// # Errors
/// If the hosts cannot be made, or a transfer fails.
pub fn run(report: &mut Report, how: Run, say: &mut dyn FnMut(&str)) -> Result<()> {
    let settings = settings(how);
    let found = ttcp::run(&settings, |cell| say(&format!("inic: {}", ttcp::line(cell)))).context("ttcp")?;
    add(report, &settings.sizes, &found.cells);
    Ok(())
}

/// A figure's title, and what of a transfer it shows.
type Metric = (&'static str, fn(&Cell) -> f64);

/// A way's numbers, by size, of those that were measured.
fn curve(cells: &[Cell], way: &str, of: fn(&Cell) -> f64) -> Vec<(f64, f64)> {
    cells.iter().filter(|cell| cell.way == way).map(|cell| (cell.size as f64, of(cell))).collect()
}

/// Something of a transfer, for a MB.
fn per_megabyte(cell: &Cell, count: f64) -> f64 {
    count * 1e6 / cell.bytes.max(1) as f64
}

fn host(cell: &Cell) -> f64 {
    per_megabyte(cell, cell.figures.host_ms)
}

fn interrupts(cell: &Cell) -> f64 {
    per_megabyte(cell, cell.figures.events)
}

fn packets(cell: &Cell) -> f64 {
    per_megabyte(cell, cell.figures.packets)
}

/// Adds what was measured to a report.
fn add(report: &mut Report, sizes: &[usize], cells: &[Cell]) {
    let metrics: [Metric; 3] = [
        ("Bandwidth (ours)", |cell| cell.figures.megabits),
        ("Host's processor (ours)", host),
        ("Interrupts of the host (ours)", interrupts),
    ];
    for (title, of) in metrics {
        let figure = report.figures.iter_mut().find(|figure| figure.title == title);
        for (line, way) in figure.into_iter().flat_map(|figure| &mut figure.curves).zip(LIVE) {
            line.live = curve(cells, way, of);
        }
    }
    let values = |way: usize, of: fn(&Cell) -> f64| curve(cells, LIVE[way], of).iter().map(|point| point.1).collect::<Vec<_>>();
    let sizes: Vec<f64> = sizes.iter().map(|size| *size as f64).collect();
    let crosses = |of: fn(&Cell) -> f64| crossover(&sizes, &values(0, of), &values(1, of));
    let (processor, wakes) = (crosses(host), crosses(interrupts));
    report.measured(
        "inic.cpu_crossover",
        processor,
        "this machine's, ttcp's way full-handshake; none if the handshake is always cheaper",
    );
    report.measured("inic.interrupts_crossover_bytes", wakes, "wake-ups of the host's processes");
    for figure in report.figures.iter_mut().filter(|figure| figure.title == "Interrupts of the host (ours)") {
        figure.note = if wakes.is_finite() {
            format!("Live, native and full offload cross at {wakes:.0} bytes.")
        } else {
            "Live, native and full offload do not cross.".into()
        };
    }
    // Of the smallest and the largest size.
    let ends = |way: usize, of: fn(&Cell) -> f64| {
        let all = values(way, of);
        [all.first(), all.last()].map(|value| value.copied().unwrap_or(f64::NAN))
    };
    report.bar(Bar::least("inic.live.packets_without_nagle_over_with", 1.0, ends(2, packets)[0] / ends(3, packets)[0]));
    report.bar(Bar::most("inic.live.partial_below_native", 1.0, ends(3, host)[1] / ends(0, host)[1]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::report::{Comparison, Curve, Figure};
    use crate::ttcp::Figures;

    #[test]
    fn every_way_of_the_model_is_measured() {
        for short in [false, true] {
            let settings = settings(Run { short, ..Run::default() });
            assert_eq!(settings.ways.iter().map(|way| way.name).collect::<Vec<_>>(), LIVE);
            assert_eq!((settings.sizes.first(), settings.sizes.last()), (Some(&1), Some(&65_536)));
        }
    }

    #[test]
    fn what_was_measured_is_in_the_report() {
        let cell = |way: &'static str, size: usize, host_ms: f64, packets: f64| {
            let figures = Figures { megabits: 10.0, host_ms, events: host_ms, packets, ..Figures::default() };
            Cell { way, direction: Direction::Transmit, size, bytes: 1_000_000, figures, host_ratio: 1.0, events_ratio: 1.0 }
        };
        // A handshake costs twice as much with one byte, and half as much with 4096.
        let of = |way, hosts: [f64; 2], packets| {
            [1, 4096].into_iter().zip(hosts).map(move |(size, host)| cell(way, size, host, packets))
        };
        let cells: Vec<Cell> = of(LIVE[0], [4.0, 4.0], 1.0)
            .chain(of(LIVE[1], [8.0, 2.0], 1.0))
            .chain(of(LIVE[2], [1.0, 1.0], 9.0))
            .chain(of(LIVE[3], [1.0, 1.0], 3.0))
            .collect();
        let figure = |title: &str| Figure {
            title: title.into(),
            curves: LIVE.map(|way| Curve::new(way, Vec::new())).into(),
            ..Figure::default()
        };
        let figures = ["Bandwidth (ours)", "Host's processor (ours)", "Interrupts of the host (ours)"].map(figure).into();
        let mut report = Report { figures, ..Report::default() };
        report.show(Comparison::new("inic.cpu_crossover", "", "bytes", 1000.0, 890.0));
        report.show(Comparison::ours("inic.interrupts_crossover_bytes", "", "bytes", 970.0));
        add(&mut report, &[1, 4096], &cells);
        assert!(
            report.comparisons.iter().all(|one| one.live.is_some_and(|bytes| (bytes - 64.0).abs() < 0.1)),
            "{:?}",
            report.comparisons
        );
        assert_eq!(report.figures[1].curves[1].live, [(1.0, 8.0), (4096.0, 2.0)]);
        assert!(report.figures[2].note.contains("cross at 64 bytes"), "{}", report.figures[2].note);
        assert_eq!(report.bars.iter().map(|judged| judged.bar.value).collect::<Vec<_>>(), [3.0, 0.25]);
    }
}
