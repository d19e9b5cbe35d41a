//! How many moves a second, and how long a connection stands still for one: a soak over a link without faults, whose
//! streams load the machine, and its probed connection.

use crate::bars::Bar;
use crate::soak::{self, SoakReport, SoakSettings};
use crate::status::StatusLine;
use anyhow::{Result, ensure};
use baton_bed::statistics::quantile;
use baton_bed::testbed::TestbedSettings;
use baton_offloads::Offloads;
use serde::Serialize;

/// Connections that move.
const CONNECTIONS: usize = 64;
/// Moves that are asked for at a time. With fewer, agent and NIC wait for each other, and for the program, while there
/// is nothing else to do.
const AT_ONCE: usize = 32;

/// The bench's result: medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct MovesReport {
    /// Moves that were under way at a time.
    pub at_once: usize,
    /// Moves per second, either way.
    pub per_second: f64,
    /// Least and greatest of the rounds.
    pub per_second_spread: [f64; 2],
    /// The agent's CPU time of a move, in microseconds. Nothing else of a move is done by one process alone.
    pub agent_us_per_move: f64,
    /// Share of all processors' time that the streams alone take.
    pub load: f64,
    /// The gaps of a connection that does not move, median, in microseconds. They are subtracted from the blackout.
    pub unmoved_gap_us: f64,
    /// The same, 99th percentile. The machine's own part of the blackout's: what keeps probes or NIC from running.
    pub unmoved_gap_p99_us: f64,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// Measures `moves` moves in each round, with a NIC that is set so.
///
/// # Errors
/// If the test bed cannot be made, or a byte is lost or wrong.
pub fn run(moves: u64, rounds: u64, offloads: Offloads, progress: impl Fn(&SoakReport)) -> Result<MovesReport> {
    let mut reports = Vec::new();
    let (rounds, status) = (rounds.max(1), StatusLine::new());
    for seed in 1..=rounds {
        status.show(format_args!("{CONNECTIONS} connections move: round {seed} of {rounds}"));
        let settings = SoakSettings {
            connections: CONNECTIONS,
            moves,
            at_once: AT_ONCE,
            seed,
            ipv6: false,
            fast_path: false,
            transitions: 0,
            kill_nic: 0,
            kill_agent: 0,
            link_down: 0,
            stop_nic: 0,
            poison: false,
            half_closes: false,
            bed: TestbedSettings { seed, offloads, ..TestbedSettings::default() },
            progress: true,
        };
        let report = soak::run(&settings)?;
        status.clear();
        progress(&report);
        ensure!(report.is_clean(), "connections were lost or their bytes wrong: {report:?}");
        reports.push(report);
    }
    let all = |figure: fn(&SoakReport) -> f64| reports.iter().map(figure).collect::<Vec<_>>();
    let median = |figure: fn(&SoakReport) -> f64| quantile(&mut all(figure), 0.5);
    let per_second = median(|report| report.moves_per_second);
    Ok(MovesReport {
        at_once: AT_ONCE,
        per_second,
        per_second_spread: [0.0, 1.0].map(|share| quantile(&mut all(|report| report.moves_per_second), share)),
        agent_us_per_move: median(|report| report.agent_us_per_move),
        load: median(|report| report.load),
        unmoved_gap_us: median(|report| report.unmoved_gap_us.p50),
        unmoved_gap_p99_us: median(|report| report.unmoved_gap_us.p99),
        bars: vec![
            Bar::least("moves.per_second", 5000.0, per_second),
            Bar::most("moves.blackout_p50_us", 100.0, median(|report| report.blackout_us.p50)),
            Bar::most("moves.blackout_p99_us", 1000.0, median(|report| report.blackout_us.p99)),
        ],
    })
}

/// A round's result in a line.
pub fn line(report: &SoakReport) -> String {
    format!(
        "{AT_ONCE} at a time: {:.0} moves a second at a load of {:.0} %, agent's CPU {:.0} us a move, blackout p50 {:.0} p99 {:.0} us, unmoved p50 {:.0} p99 {:.0} us",
        report.moves_per_second,
        100.0 * report.load,
        report.agent_us_per_move,
        report.blackout_us.p50,
        report.blackout_us.p99,
        report.unmoved_gap_us.p50,
        report.unmoved_gap_us.p99
    )
}
