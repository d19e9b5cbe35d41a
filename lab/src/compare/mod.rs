//! One server on several ways: in the kernel, on Baton's NIC, with another TCP. Compared are rate, waiting time, and
//! all CPU time that a request or a byte costs.
//!
//! The ways take turns, and each round has hosts, a server, and, if it is Baton's turn, a Baton of its own: in the
//! kernel's turn no frame passes a NIC, and none runs. CPU time is that of the client, the server, agent, attacher and
//! NIC, and of the kernel's threads that process frames; what else runs on the machine does not count. A NIC that polls
//! counts in full.

mod gain;
mod load;
mod programs;
mod round;
mod table;
mod way;
mod wrk;

pub use load::{WebClient, What};
pub use round::Round;
pub use table::text;
pub use way::Way;

use crate::bars::Bar;
use crate::status::StatusLine;
use anyhow::{Context, Result, ensure};
use baton_bed::server::Files;
use baton_bed::statistics::quantile;
use baton_bed::testbed::TestbedSettings;
use baton_linux::process;
use baton_protocol::program::ClassInfo;
use load::Load;
use programs::LENGTH;
use serde::Serialize;

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct CompareSettings {
    /// Rounds of each way; the medians count.
    pub rounds: usize,
    /// Seconds of a round that are measured.
    pub seconds: f64,
    /// Ways that take part, where there is a server for them. The kernel always does.
    pub ways: Vec<Way>,
    /// The web servers' clients: None for all.
    pub client: Option<WebClient>,
    /// Only loads of so many connections; None for all.
    pub connections: Option<usize>,
    /// Each round's hosts, but for what the way and the load say of them.
    pub bed: TestbedSettings,
}

/// One way's figures for a load, and what they are over the kernel's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Column {
    /// The way.
    pub way: Way,
    /// Medians of the rounds.
    pub medians: Round,
    /// Median of the rounds' ratios, this way's over the kernel's.
    pub rate_ratio: f64,
    /// See `rate_ratio`.
    pub p50_ratio: f64,
    /// See `rate_ratio`.
    pub p99_ratio: f64,
    /// See `rate_ratio`.
    pub machine_ratio: f64,
    /// See `rate_ratio`; of the server's CPU time alone.
    pub host_ratio: f64,
    /// Least and greatest of the rounds' ratios.
    pub rate_spread: [f64; 2],
    /// See `rate_spread`.
    pub machine_spread: [f64; 2],
    /// Where these ratios' medians lie with 95 % confidence: of rate, CPU time, and the waiting times' 99th percentile.
    pub rate_interval: [f64; 2],
    /// See `rate_interval`.
    pub machine_interval: [f64; 2],
    /// See `rate_interval`.
    pub p99_interval: [f64; 2],
}

/// One load.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The load.
    pub load: &'static str,
    /// Whether bytes count, and not requests: rates are Gb/s, CPU time is seconds per GB. Else requests/s and
    /// microseconds per request.
    pub bulk: bool,
    /// The ways, the kernel first.
    pub columns: Vec<Column>,
    /// The ways that failed, each with its error.
    pub failures: Vec<(Way, String)>,
}

/// A bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct CompareReport {
    /// Every load.
    pub rows: Vec<Row>,
    /// The figures with bounds, of the ways that took part.
    pub bars: Vec<Bar>,
}

impl CompareReport {
    /// Whether every way ran.
    pub fn is_whole(&self) -> bool {
        self.rows.iter().all(|row| row.failures.is_empty())
    }
}

/// Runs every load of a bench. A way that fails, as one does that this machine lacks something for, is left out from
/// then on, and is in the report with its error.
///
/// # Errors
/// If the kernel's turn fails: a program is not installed or does not start, or a connection breaks.
pub fn run(what: What, settings: &CompareSettings, progress: impl Fn(&Row)) -> Result<CompareReport> {
    process::raise_descriptor_limit();
    let files = Files::new()?;
    files.add(0, LENGTH)?;
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    let by_gain = settings.ways.contains(&Way::Gain);
    let mut loads = load::loads(what, by_gain);
    let fits = |load: &load::Load| settings.connections.is_none_or(|count| load.traffic.connections() == count);
    loads.retain(|load| load.traffic.is_of(settings.client) && fits(load));
    ensure!(!loads.is_empty(), "this bench has no load of so many connections, by this client");
    // Checked first: the other loads take minutes.
    if loads.iter().any(|load| load.traffic.is_by_wrk()) {
        wrk::check()?;
    }
    for load in loads {
        let row = compare(&load, settings, &files).with_context(|| load.name)?;
        bars.extend(gain::bars(&row, load.gain));
        // The bars of the NIC alone are not those of who may choose.
        for (name, way, figure, bar, bound) in load.bars.iter().filter(|_| !by_gain) {
            let column = row.columns.iter().find(|column| column.way == *way);
            bars.extend(column.map(|column| bar(name, *bound, figure(column))));
        }
        bars.extend(without_copies(&row).filter(|_| !by_gain));
        progress(&row);
        rows.push(row);
    }
    Ok(CompareReport { rows, bars })
}

/// What a program's sends from a buffer cost over those that the library copies, if both were measured.
fn without_copies(row: &Row) -> Option<Bar> {
    let machine = |way| row.columns.iter().find(|column| column.way == way).map(|column| column.medians.machine);
    let (buffers, library) = (machine(Way::Buffers)?, machine(Way::Library)?);
    Some(Bar::most("bulk_out.machine_ratio_buffers_to_library", 0.9, buffers / library.max(1e-9)))
}

/// Runs all rounds of a load.
fn compare(load: &Load, settings: &CompareSettings, files: &Files) -> Result<Row> {
    let chosen = |way: &&Way| **way == Way::Kernel || settings.ways.contains(way);
    let mut sides: Vec<(Way, Vec<Round>)> = load.ways().iter().filter(chosen).map(|way| (*way, Vec::new())).collect();
    let (all, status) = (settings.rounds.max(1), StatusLine::new());
    let mut failures = Vec::new();
    for round in 1..=all {
        let mut failed = Vec::new();
        for (way, rounds) in &mut sides {
            status.show(format_args!("{}: round {round} of {all}, {}", load.name, way.name()));
            match round::run(*way, load.traffic, files, settings) {
                Ok(round) => rounds.push(round),
                Err(error) if *way == Way::Kernel => return Err(error),
                Err(error) => failed.push((*way, format!("{error:#}"))),
            }
        }
        sides.retain(|(way, _)| failed.iter().all(|(other, _)| other != way));
        failures.append(&mut failed);
    }
    let kernel = sides.first().map(|(_, rounds)| rounds.clone()).unwrap_or_default();
    let columns = sides.iter().map(|(way, rounds)| Column::of(*way, rounds, &kernel)).collect();
    Ok(Row { load: load.name, bulk: load.traffic.is_bulk(), columns, failures })
}

impl Column {
    /// The figures of a way's rounds, over those of the kernel's rounds beside which they ran.
    fn of(way: Way, rounds: &[Round], kernel: &[Round]) -> Column {
        let ratios = |figure: fn(&Round) -> f64| {
            let pairs = rounds.iter().zip(kernel);
            pairs.map(|(way, kernel)| figure(way) / figure(kernel).max(1e-9)).collect::<Vec<_>>()
        };
        let ratio = |figure| quantile(&mut ratios(figure), 0.5);
        let spread = |figure| [0.0, 1.0].map(|end| quantile(&mut ratios(figure), end));
        let interval = |figure| interval(ratios(figure));
        Column {
            way,
            medians: Round::medians(rounds),
            rate_ratio: ratio(|round| round.rate),
            p50_ratio: ratio(|round| round.p50),
            p99_ratio: ratio(|round| round.p99),
            machine_ratio: ratio(|round| round.machine),
            host_ratio: ratio(|round| round.server),
            rate_spread: spread(|round| round.rate),
            machine_spread: spread(|round| round.machine),
            rate_interval: interval(|round| round.rate),
            machine_interval: interval(|round| round.machine),
            p99_interval: interval(|round| round.p99),
        }
    }
}

/// Where the median of such figures lies with 95 % confidence, whatever their distribution: from the one of a rank to
/// that of the same rank from the end. Of fewer than six it is from the least to the greatest, with less confidence.
fn interval(mut of: Vec<f64>) -> [f64; 2] {
    /// The chance that the median lies beyond one end.
    const BEYOND: f64 = 0.025;
    of.sort_by(f64::total_cmp);
    let [Some(least), Some(greatest)] = [of.first(), of.last()] else { return [0.0; 2] };
    let (mut ends, all) = ([*least, *greatest], of.len());
    // The chances that none, one, two … of them lie beyond the median.
    let (mut chance, mut sum) = (0.5f64.powi(all as i32), 0.0);
    for rank in 0..all / 2 {
        sum += chance;
        if sum > BEYOND {
            break;
        }
        ends = [of[rank], of[all - 1 - rank]];
        chance *= (all - rank) as f64 / (rank + 1) as f64;
    }
    ends
}

/// What requests and bulk data cost in the kernel and on the NIC of this machine, as a Baton measures it that places
/// connections by that. Each load gets at most the seconds of the settings.
///
/// # Errors
/// If no load could be run.
pub fn classes(settings: &CompareSettings) -> Result<Vec<ClassInfo>> {
    process::raise_descriptor_limit();
    let (files, status) = (Files::new()?, StatusLine::new());
    let (mut all, mut failed) = (Vec::new(), None);
    for (name, traffic) in load::TYPICAL {
        status.show(format_args!("{name}, in the kernel and on the NIC"));
        match round::classes(traffic, &files, settings) {
            Ok(mut classes) => all.append(&mut classes),
            Err(error) => failed = Some(error.context(name)),
        }
    }
    match failed {
        Some(error) if all.is_empty() => Err(error),
        _ => Ok(all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_copied_is_compared_with_what_is() {
        let column = |way, machine| Column { way, medians: Round { machine, ..Round::default() }, ..Column::default() };
        let row = |columns| Row { load: "load", bulk: true, columns, failures: Vec::new() };
        let both = row(vec![column(Way::Kernel, 1.0), column(Way::Library, 0.5), column(Way::Buffers, 0.4)]);
        let bar = without_copies(&both).expect("a bar");
        assert!(bar.holds && (bar.value - 0.8).abs() < 1e-9, "{bar:?}");
        assert!(without_copies(&row(vec![column(Way::Kernel, 1.0), column(Way::Library, 0.5)])).is_none());
    }

    #[test]
    fn an_interval_holds_the_median_with_confidence() {
        let of = |count: u32| interval((1..=count).rev().map(f64::from).collect());
        assert_eq!([of(0), of(1), of(5), of(6)], [[0.0, 0.0], [1.0, 1.0], [1.0, 5.0], [1.0, 6.0]]);
        // As in tables of the sign test.
        assert_eq!([of(8), of(9), of(12), of(20)], [[1.0, 8.0], [2.0, 8.0], [3.0, 10.0], [6.0, 15.0]]);
    }
}
