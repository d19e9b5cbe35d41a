//! An MPI program on this machine, over RMPP with the paper's protocol: nothing, receiving, and both halves on host A's
//! NIC, and the RSM sent early. Bandwidth and latency of a ping-pong, availability by polling interval.

use super::programs::MB;
use super::report::{FIGURE_7, FIGURE_8, FIGURE_10, FIGURE_11, WORKING};
use crate::bars::Bar;
use crate::messages::{Carrier, Load, MpiCell, MpiHosts, Offload};
use crate::papers::Run;
use crate::papers::report::{Cell, Curve, Figure, Report, Row, Table};
use anyhow::{Context, Result};

/// What is offloaded, as the model's curves have it.
const STEPS: [(&str, Offload); 3] = [("none", Offload::None), ("receive", Offload::Receive), ("both", Offload::Both)];
/// How the model's curves with both halves offloaded and the RSM so many packets early are called.
fn pre(early: u8) -> String {
    format!("Pre {early}")
}

/// What is run.
struct Plan {
    /// Bytes of the ping-pong's messages.
    lengths: &'static [u32],
    /// Packets before the last that the RSM is sent, beside 0.
    early: &'static [u8],
    /// Bytes of messages whose availability is measured, and microseconds of work between polls.
    working: &'static [u32],
    intervals: &'static [u32],
    /// Most round trips of a job.
    rounds: u32,
}

/// Of all jobs, each of a second or two.
const WHOLE: Plan = Plan {
    lengths: &[1_000, 10_000, 50_000, 100_000, 300_000, 1_000_000],
    early: &[5, 15],
    working: &[64 << 10, WORKING as u32],
    intervals: &[10, 100, 1_000, 3_000, 10_000],
    rounds: 200,
};
const SHORT: Plan = Plan { lengths: &[100_000], early: &[], working: &[64 << 10], intervals: &[100], rounds: 20 };
/// Bytes that a job sends one way, unless it has too few or too many round trips then.
const BYTES: u32 = 40_000_000;
const LEAST: u32 = 20;
/// Round trips beside work.
const WORKING_ROUNDS: u32 = 30;

/// Jobs that only wait, by the curve that they belong to; and those that work, with what is offloaded and the interval.
#[derive(Default)]
struct Jobs {
    waiting: Vec<(String, MpiCell)>,
    working: Vec<(&'static str, u32, MpiCell)>,
}

impl Jobs {
    /// Jobs that worked beside messages of a size, with this offloaded: the polling interval, and what came of it.
    fn beside(&self, name: &str, size: u32) -> Vec<(f64, &MpiCell)> {
        let of = self.working.iter().filter(|(step, _, cell)| *step == name && cell.size == size);
        of.map(|(_, interval, cell)| (f64::from(*interval), cell)).collect()
    }
}

/// Runs the program in all ways, for some two minutes, and reports it.
///
/// # Errors
/// If MPI or the provider is missing, the hosts cannot be made, or a job fails.
pub fn run(report: &mut Report, how: Run, say: &mut dyn FnMut(&str)) -> Result<()> {
    let plan = if how.short { SHORT } else { WHOLE };
    let hosts = MpiHosts::new(true).context("hosts for an MPI program")?;
    let steps = STEPS.iter().map(|(name, offload)| ((*name).to_owned(), Carrier::Paper(*offload, 0)));
    let early = plan.early.iter().map(|early| (pre(*early), Carrier::Paper(Offload::Both, *early)));
    let ways: Vec<(String, Carrier)> = steps.chain(early).collect();
    let mut jobs = Jobs::default();
    for size in plan.lengths {
        let rounds = (BYTES / size).clamp(LEAST, plan.rounds);
        for (name, carrier) in &ways {
            say(&format!("rmpp: ping-pong of {size} bytes, {name}"));
            let cell = hosts.run(*carrier, &Load { size: *size, rounds, work: 0 })?;
            jobs.waiting.push((name.clone(), cell));
        }
    }
    let points = plan.working.iter().flat_map(|size| plan.intervals.iter().map(|interval| (*size, *interval)));
    for (size, interval) in points {
        for (name, offload) in STEPS {
            say(&format!("rmpp: availability with {size} bytes, polled every {interval} µs, {name}"));
            let load = Load { size, rounds: WORKING_ROUNDS.min(plan.rounds), work: interval };
            jobs.working.push((name, interval, hosts.run(Carrier::Paper(offload, 0), &load)?));
        }
    }
    add(report, &jobs);
    Ok(())
}

/// Bandwidth in the paper's MB/s, from the mean.
fn bandwidth(cell: &MpiCell) -> f64 {
    f64::from(cell.size) / cell.mean_us * 1e6 / MB
}

fn available(cell: &MpiCell) -> f64 {
    cell.availability.unwrap_or(f64::NAN)
}

/// Gives curves of a figure their live points.
fn plot(report: &mut Report, title: &str, of: impl Fn(&str) -> Vec<(f64, f64)>) {
    let figure = report.figures.iter_mut().find(|figure| figure.title == title);
    figure.into_iter().flat_map(|figure| &mut figure.curves).for_each(|curve| curve.live = of(&curve.name));
}

/// Adds the jobs to a report.
fn add(report: &mut Report, jobs: &Jobs) {
    let rates = |name: &str| -> Vec<(f64, f64)> {
        let of = jobs.waiting.iter().filter(|(way, _)| way == name);
        of.map(|(_, cell)| (f64::from(cell.size), bandwidth(cell))).collect()
    };
    plot(report, FIGURE_7, rates);
    plot(report, FIGURE_8, |name| rates(if name == pre(0) { "both" } else { name }));
    let row = |(name, cell): &(String, MpiCell)| {
        let cells = [cell.least_us, cell.mean_us, cell.most_us, bandwidth(cell), cell.host_cpu_ms_per_mb];
        Row { name: format!("{name}, {} bytes", cell.size), cells: cells.map(Cell::live).into() }
    };
    report.tables.push(Table {
        title: "Figures 7 and 8, live: half a round trip of an MPI program".into(),
        columns: ["least, µs", "mean, µs", "most, µs", "MB/s", "host A, ms a MB"].map(String::from).into(),
        rows: jobs.waiting.iter().map(row).collect(),
        note: "MB/s are of 2²⁰ bytes and from the mean; those of the last column are 10⁶ bytes both ways.".into(),
    });
    let shares = |name: &str, size: u32| -> Vec<(f64, f64)> {
        jobs.beside(name, size).into_iter().map(|(_, cell)| (bandwidth(cell), available(cell))).collect()
    };
    plot(report, FIGURE_10, |name| shares(name, WORKING as u32));
    plot(report, FIGURE_11, |name| {
        let all = jobs.beside(name, WORKING as u32).into_iter();
        all.map(|(interval, cell)| (interval, bandwidth(cell) * available(cell))).collect()
    });
    let mut sizes: Vec<u32> = jobs.working.iter().map(|(_, _, cell)| cell.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let curves = STEPS
        .iter()
        .flat_map(|(name, _)| sizes.iter().map(move |size| (*name, *size)))
        .map(|(name, size)| Curve { live: shares(name, size), ..Curve::new(format!("{name}, {} KB", size >> 10), Vec::new()) });
    report.figures.push(Figure {
        title: "Figure 10, live: availability over bandwidth, by size".into(),
        x: "bandwidth, MB/s",
        y: "availability",
        curves: curves.collect(),
        ..Figure::default()
    });
    orders(report, jobs);
}

/// Which is larger: of the longest messages, and of the first that were worked beside.
fn orders(report: &mut Report, jobs: &Jobs) {
    let cpu = |name: &str| {
        let last = jobs.waiting.iter().rfind(|(way, _)| way == name);
        last.map_or(f64::NAN, |(_, cell)| cell.host_cpu_ms_per_mb)
    };
    let share = |name: &str| jobs.working.iter().find(|(step, _, _)| *step == name).map_or(f64::NAN, |one| available(&one.2));
    report.bar(Bar::most("rmpp.live.cpu_receive_over_none", 1.0, cpu("receive") / cpu("none")));
    report.bar(Bar::most("rmpp.live.cpu_both_over_none", 1.0, cpu("both") / cpu("none")));
    report.bar(Bar::least("rmpp.live.availability_both_over_none", 1.0, share("both") / share("none")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_in_the_report() {
        let cell = |size: u32, mean_us: f64, host_cpu_ms_per_mb: f64, availability| MpiCell {
            carrier: Carrier::Paper(Offload::Both, 0),
            encapsulation: "udp",
            nic: true,
            size,
            median_us: mean_us,
            least_us: mean_us / 2.0,
            mean_us,
            most_us: 2.0 * mean_us,
            mb_per_s: 0.0,
            host_cpu_ms_per_mb,
            kernel_cpu_ms_per_mb: 0.0,
            nic_cpu_ms_per_mb: 0.0,
            availability,
        };
        // A MB in a second, in half of one, and in a quarter.
        let waiting = STEPS.iter().zip([1e6, 5e5, 2.5e5]);
        let waiting = waiting.map(|((name, _), mean)| ((*name).to_owned(), cell(1 << 20, mean, mean / 1e6, None)));
        let working = STEPS.iter().zip([0.4, 0.6, 0.8]);
        let working = working.map(|((name, _), share)| (*name, 100, cell(WORKING as u32, 25e4, 1.0, Some(share))));
        let jobs = Jobs { waiting: waiting.collect(), working: working.collect() };
        let figure = |title: &str, names: &[&str]| Figure {
            title: title.into(),
            curves: names.iter().map(|name| Curve::new(*name, Vec::new())).collect(),
            ..Figure::default()
        };
        let steps = STEPS.map(|(name, _)| name);
        let figures = [figure(FIGURE_7, &steps), figure(FIGURE_8, &["Pre 0", "Pre 1"])];
        let figures = figures.into_iter().chain([figure(FIGURE_10, &steps), figure(FIGURE_11, &steps)]).collect();
        let mut report = Report { figures, ..Report::default() };
        add(&mut report, &jobs);
        let live = |figure: usize, curve: usize| report.figures[figure].curves[curve].live.clone();
        assert_eq!((live(0, 0), live(0, 2)), (vec![(1_048_576.0, 1.0)], vec![(1_048_576.0, 4.0)]));
        assert_eq!((live(1, 0), live(1, 1)), (live(0, 2), Vec::new()));
        assert_eq!((live(2, 1), live(3, 1)), (vec![(1.0, 0.6)], vec![(100.0, 0.6)]));
        assert_eq!(report.figures[4].curves.len(), 3);
        assert_eq!(report.tables[0].rows.len(), 3);
        assert!(report.holds() && report.bars.len() == 3, "{:?}", report.bars);
    }
}
