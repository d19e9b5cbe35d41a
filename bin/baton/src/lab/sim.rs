//! `baton sim`: whole machines in virtual time (docs/internals/simulator.md).

use anyhow::{Context, Result, bail};
use baton_linux::events::monotonic_micros;
use baton_world::{Counts, Outcome, Walk, Walked};
use clap::{ArgGroup, Args};
use serde_json::{Value, json};
use std::ops::Range;

/// Seeds between two lines about how far the run has come.
const PROGRESS: u64 = 500;

#[derive(Args)]
#[command(group(ArgGroup::new("what").required(true).args(["seeds", "seed", "exhaustive", "walk"])))]
pub struct SimArguments {
    /// Runs the scenarios of these seeds: A..B, without B.
    #[arg(long, value_name = "A..B", value_parser = range)]
    seeds: Option<Range<u64>>,
    /// With --seeds: begin no further seed after this many seconds.
    #[arg(long, value_name = "N", requires = "seeds", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: Option<u64>,
    /// Runs the scenario of one seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs one connection with every crash after every action of a move there and back, and with every pair of
    /// crashes.
    #[arg(long)]
    exhaustive: bool,
    /// Runs one connection with these crashes, as --exhaustive prints them.
    #[arg(long, value_name = "TRAFFIC,N:WHO,…")]
    walk: Option<Walk>,
    /// With --exhaustive: of the second crashes of the pairs, every how many-th.
    #[arg(long, default_value_t = 1, requires = "exhaustive", value_parser = clap::value_parser!(u64).range(1..))]
    stride: u64,
    /// With --seed or --walk: print everything that happens.
    #[arg(long, conflicts_with_all = ["seeds", "exhaustive"])]
    trace: bool,
    /// Print one JSON object.
    #[arg(long, conflicts_with = "trace")]
    json: bool,
}

fn range(text: &str) -> Result<Range<u64>> {
    let (from, to) = text.split_once("..").context("not of the form A..B")?;
    let range = from.parse()?..to.parse()?;
    if range.is_empty() {
        bail!("there is no seed in {text}");
    }
    Ok(range)
}

/// Runs what was asked for. False if something did not hold.
pub fn run(arguments: &SimArguments) -> Result<bool> {
    // A panic of the simulated machine is a failure of its run, which is reported with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let begun = monotonic_micros();
    if let Some(seeds) = &arguments.seeds {
        let end = arguments.seconds.map_or(u64::MAX, |seconds| begun + 1_000_000 * seconds);
        return Ok(run_seeds(begun_before(seeds.clone(), end, monotonic_micros), arguments.json, begun));
    }
    if let Some(seed) = arguments.seed {
        return Ok(report(&baton_world::run(seed, arguments.trace), arguments.json, begun));
    }
    if let Some(walk) = &arguments.walk {
        return Ok(report(&baton_world::run_walk(walk, arguments.trace), arguments.json, begun));
    }
    let walked = baton_world::exhaustive(arguments.stride);
    Ok(report_walked(&walked, arguments.json, monotonic_micros() - begun))
}

/// The first of these seeds: those that are asked for before the time `end`, by the clock `now`.
fn begun_before(seeds: Range<u64>, end: u64, mut now: impl FnMut() -> u64) -> impl Iterator<Item = u64> {
    seeds.take_while(move |_| now() < end)
}

fn run_seeds(seeds: impl Iterator<Item = u64>, json: bool, begun: u64) -> bool {
    let mut done = 0;
    let summary = baton_world::run_seeds(seeds, |seed, failure| {
        done += 1;
        if let Some(failure) = failure {
            eprintln!("seed {seed}: {failure}");
        } else if !json && done % PROGRESS == 0 {
            eprintln!("{done} seeds");
        }
    });
    let failures: Vec<Value> = summary.failures.iter().map(|(seed, what)| json!({ "seed": seed, "what": what })).collect();
    let good = failures.is_empty();
    let mut object = counts(&summary.counts, monotonic_micros() - begun);
    object["seeds"] = summary.seeds.into();
    object["failures"] = failures.into();
    print(&object, json);
    good
}

/// Sums, and what they mean in real time, which has taken `micros`.
fn counts(counts: &Counts, micros: u64) -> Value {
    let seconds = micros.max(1) as f64 / 1e6;
    let per_hour = (counts.faults as f64 / seconds * 3600.0).round();
    json!({
        "faults": counts.faults,
        "link_faults": counts.link_faults,
        "deaths": counts.deaths,
        "connections": counts.connections,
        "bytes": counts.bytes,
        "moves": counts.moves,
        "actions": counts.actions,
        "simulated_seconds": counts.simulated as f64 / 1e6,
        "real_seconds": seconds,
        "simulated_over_real": (counts.simulated as f64 / 1e6 / seconds).round(),
        "faults_per_hour": per_hour,
    })
}

fn report(outcome: &Outcome, json: bool, begun: u64) -> bool {
    outcome.lines.iter().for_each(|line| println!("{line}"));
    let mut object = counts(&outcome.counts, monotonic_micros() - begun);
    object["hash"] = format!("{:016x}", outcome.hash).into();
    object["failure"] = outcome.failure.clone().into();
    print(&object, json);
    outcome.failure.is_none()
}

fn report_walked(walked: &Walked, json: bool, micros: u64) -> bool {
    let failures = walked.failures.iter().map(|(walk, what)| json!({ "walk": walk.to_string(), "what": what }));
    let object = json!({
        "crashes": walked.crashes,
        "pairs": walked.pairs,
        "deaths_at_frames": walked.points,
        "real_seconds": micros as f64 / 1e6,
        "failures": failures.collect::<Vec<_>>(),
    });
    print(&object, json);
    walked.failures.is_empty()
}

/// Prints an object as JSON, or a line for each of its fields.
fn print(object: &Value, json: bool) {
    match object.as_object() {
        Some(fields) if !json => {
            for (name, value) in fields {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                println!("{:<20} {text}", name.replace('_', " "));
            }
        }
        _ => println!("{object}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_is_begun_when_the_time_is_over() {
        let mut times = 1..;
        let begun: Vec<u64> = begun_before(7..100, 4, || times.next().unwrap_or(u64::MAX)).collect();
        assert_eq!(begun, [7, 8, 9]);
        let all: Vec<u64> = begun_before(7..10, u64::MAX, || 0).collect();
        assert_eq!(all, [7, 8, 9]);
    }
}
