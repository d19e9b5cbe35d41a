//! `baton plan --check`: loads that were not measured for the planner, run in the kernel and on the NIC, beside what
//! it predicts.

use super::costs::{Host, Nic};
use super::load::{Load, Size};
use super::measure::{Bed, Used, Way, address, measure};
use super::traffic::Traffic;
use super::{Degree, plan};
use crate::bars::Bar;
use crate::closed_loop;
use crate::web_mix::{DYNAMIC, Mix};
use anyhow::{Context, Result};
use baton_bed::server::{Files, Program};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;

/// Bytes of the file that a web server is asked for.
const FILE: usize = 256;
/// Bytes of a long answer, and of what is sent in bulk before the other side says something.
const LONG: f64 = 1_048_576.0;
const BULK: f64 = 16.0 * LONG;
/// Requests that the Zipf mix is made of.
const MIXED: usize = 2000;

/// What a load is served by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Served {
    /// The planner's own program.
    Own,
    /// A web server.
    Web,
    /// redis-server.
    Redis,
}

/// A load, and the names of its bars in the kernel and on the NIC.
struct Case {
    names: [&'static str; 2],
    served: Served,
    load: Load,
}

/// Sizes as in SPECweb99's mix, as shares of some thousand requests.
fn zipf() -> Vec<Size> {
    let mut mix = Mix::new(128, DYNAMIC, 1);
    let mut counts = BTreeMap::<u64, u32>::new();
    (0..MIXED).for_each(|_| *counts.entry(mix.request().bytes()).or_default() += 1);
    counts.into_iter().map(|(bytes, count)| Size { share: count.into(), request: 350.0, answer: bytes as f64 + 250.0 }).collect()
}

fn cases() -> Vec<Case> {
    let case = |names, served, load| Case { names, served, load };
    let own = |names, load| case(names, Served::Own, load);
    // A web server makes two calls more for a request than the planner's program (strace of nginx: TCP_CORK on and off,
    // sendfile; it does not read a second time).
    let web = |connections| Load { calls: 2.0, ..Load::closed("http", connections, 1.0, 36.0, 490.0) };
    vec![
        case(["plan.http_64.none", "plan.http_64.handoff"], Served::Web, web(64)),
        case(["plan.http_512.none", "plan.http_512.handoff"], Served::Web, web(512)),
        case(["plan.redis.none", "plan.redis.handoff"], Served::Redis, Load::closed("redis GET", 50, 1.0, 22.0, 9.0)),
        case(
            ["plan.redis_16.none", "plan.redis_16.handoff"],
            Served::Redis,
            Load::closed("redis GET by 16", 50, 16.0, 22.0, 9.0),
        ),
        own(["plan.rpc_64.none", "plan.rpc_64.handoff"], Load::closed("rpc", 64, 1.0, 64.0, 64.0)),
        own(["plan.rpc_1024.none", "plan.rpc_1024.handoff"], Load::closed("rpc", 1024, 1.0, 64.0, 64.0)),
        own(["plan.bulk_in.none", "plan.bulk_in.handoff"], Load::closed("bulk in", 1, 1.0, BULK, 64.0)),
        own(["plan.bulk_out.none", "plan.bulk_out.handoff"], Load::closed("bulk out", 1, 1.0, 64.0, BULK)),
        own(["plan.deep.none", "plan.deep.handoff"], Load::closed("4 KB answers, depth 4", 512, 4.0, 64.0, 4096.0)),
        own(["plan.zipf.none", "plan.zipf.handoff"], Load { sizes: zipf(), ..Load::closed("a Zipf mix", 128, 1.0, 1.0, 1.0) }),
        own(["plan.long.none", "plan.long.handoff"], Load::closed("1 MB answers", 16, 1.0, 64.0, LONG)),
    ]
}

/// A load in one place. Times are CPU microseconds of a request, the whole machine's.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// The load.
    pub load: String,
    /// Its connections.
    pub connections: u32,
    /// Where its connections are.
    pub degree: Degree,
    /// As predicted, the mean of all rounds.
    pub predicted: f64,
    /// As measured, the same.
    pub measured: f64,
    /// Predicted over measured, the mean of all rounds.
    pub ratio: f64,
    /// The 95 % interval of that mean.
    pub interval: [f64; 2],
    /// Segments that the NIC sent again, for each request: nobody planned them.
    pub again: f64,
    /// The part of each party: what, predicted, measured.
    pub parts: Vec<(&'static str, f64, f64)>,
}

/// What is saved of the machine's CPU by the handoff of all connections, in percent of the kernel's.
#[derive(Clone, Debug, Serialize)]
pub struct Saving {
    /// The load.
    pub load: String,
    /// Its connections.
    pub connections: u32,
    /// As predicted.
    pub predicted: f64,
    /// As measured.
    pub measured: f64,
}

/// A check's result.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// The host of the last round.
    pub host: Host,
    /// Its NIC.
    pub nic: Nic,
    /// Each load in each place.
    pub rows: Vec<Checked>,
    /// Each load's saving.
    pub savings: Vec<Saving>,
    /// Loads that were left out, and why.
    pub left_out: Vec<String>,
    /// The end of each interval that is further from 1.
    pub bars: Vec<Bar>,
}

impl CheckReport {
    /// Lines for people.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "{:<22} {:>5} {:<8} {:>12} {:>12} {:>6}  {:<13}",
            "load", "conns", "degree", "predicted µs", "measured µs", "ratio", "95 %"
        )];
        for row in &self.rows {
            let Checked { load, connections, degree, predicted, measured, ratio, interval: [low, high], again, parts } = row;
            let again = if *again < 0.005 { String::new() } else { format!(", {again:.2} segments sent again") };
            let parts: Vec<String> = parts.iter().map(|(what, ours, theirs)| format!("{what} {ours:.1}/{theirs:.1}")).collect();
            lines.push(format!(
                "{load:<22} {connections:>5} {:<8} {predicted:>12.2} {measured:>12.2} {ratio:>6.2}  {low:.2} … {high:.2}  {}{again}",
                degree.name(),
                parts.join(", ")
            ));
        }
        for Saving { load, connections, predicted, measured } in &self.savings {
            lines.push(format!(
                "{load}, {connections} connections: saves {predicted:.0} % as predicted, {measured:.0} % as measured"
            ));
        }
        lines.extend(self.left_out.iter().cloned());
        lines
    }
}

/// Student's factor of a 95 % interval for the mean of so many rounds.
fn student(rounds: usize) -> f64 {
    const TABLE: [f64; 9] = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26];
    rounds.checked_sub(2).map_or(f64::INFINITY, |at| TABLE.get(at).copied().unwrap_or(2.2))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The 95 % interval of the mean of some values; without end for one.
fn interval(values: &[f64]) -> [f64; 2] {
    let (mean, count) = (mean(values), values.len() as f64);
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    let half = if values.len() < 2 { f64::INFINITY } else { student(values.len()) * (variance / count).sqrt() };
    [mean - half, mean + half]
}

/// The words of a load's program.
fn words(served: Served, files: &Files) -> Result<Vec<OsString>> {
    Ok(match served {
        Served::Own => {
            vec![std::env::current_exe()?.into_os_string(), "serve-plan".into(), address().to_string().into()]
        }
        Served::Web => Program::find().command(files, address(), false)?,
        Served::Redis => {
            let (ip, port) = (address().ip().to_string(), address().port().to_string());
            let words =
                ["redis-server", "--save", "", "--appendonly", "no", "--protected-mode", "no", "--port", &port, "--bind", &ip];
            words.map(OsString::from).into()
        }
    })
}

/// A request in the form of the program, and bytes of its answer; none for the planner's own.
fn fixed(served: Served, bed: &Bed) -> Result<Option<(Vec<u8>, u64)>> {
    let ask = |request: &[u8], complete: fn(&[u8]) -> Option<usize>| -> Result<u64> {
        let answer = bed.client().run(|| Ok(closed_loop::answer_length(address(), request, complete)))??;
        Ok(answer as u64)
    };
    Ok(match served {
        Served::Own => None,
        Served::Web => {
            let request = format!("GET /0/{FILE} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes();
            let answer = ask(&request, |answer| {
                let head = answer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
                (answer.len() == head + FILE).then_some(answer.len())
            })?;
            Some((request, answer))
        }
        Served::Redis => {
            ask(b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$3\r\nabc\r\n", |answer| answer.ends_with(b"\r\n").then_some(answer.len()))?;
            let get = b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n".to_vec();
            let answer = ask(&get, |answer| answer.ends_with(b"abc\r\n").then_some(answer.len()))?;
            Some((get, answer))
        }
    })
}

/// A load on a way, for some seconds.
fn run_case(case: &Case, way: Way, files: &Files, seconds: f64) -> Result<Used> {
    let mut bed = Bed::with(way, files, &words(case.served, files)?)?;
    let Load { connections, depth, sizes, .. } = &case.load;
    let fixed = fixed(case.served, &bed)?;
    let traffic = Traffic { connections: *connections as usize, depth: *depth as usize, sizes: sizes.clone(), calls: 0, fixed };
    bed.measure(&traffic, seconds)
}

/// CPU microseconds of program, NIC and peer for a request.
type Parts = [f64; 3];

/// One load in one place, in all rounds: predicted and measured parts of each, and segments sent again.
#[derive(Default)]
struct Rounds(Vec<(Parts, Parts)>, Vec<f64>);

impl Rounds {
    fn checked(&self, load: &Load, degree: Degree) -> Checked {
        let sum = |parts: &Parts| parts.iter().sum::<f64>();
        let ratios: Vec<f64> = self.0.iter().map(|(ours, theirs)| sum(ours) / sum(theirs)).collect();
        let mean_of = |of: &dyn Fn(&(Parts, Parts)) -> f64| mean(&self.0.iter().map(of).collect::<Vec<_>>());
        let part = |(at, what)| (what, mean_of(&|round| round.0[at]), mean_of(&|round| round.1[at]));
        Checked {
            load: load.name.clone(),
            connections: load.connections,
            degree,
            predicted: mean_of(&|round| sum(&round.0)),
            measured: mean_of(&|round| sum(&round.1)),
            ratio: mean(&ratios),
            interval: interval(&ratios),
            again: mean(&self.1),
            parts: ["program", "NIC", "peer"].into_iter().enumerate().map(part).collect(),
        }
    }
}

/// Measures host and NIC, and runs each load in each place, so many rounds of so many seconds. Only the program's own
/// time for a request is taken from the load's run in the kernel, as `--load record` does.
///
/// # Errors
/// If this machine lacks something; a load whose program is not installed is left out.
pub fn run(rounds: usize, seconds: f64, only: &[String], progress: &dyn Fn(&str)) -> Result<CheckReport> {
    let files = Files::new()?;
    files.add(0, FILE)?;
    let (mut parameters, mut left_out) = (None, Vec::new());
    let wanted = |case: &Case| only.is_empty() || only.iter().any(|name| case.names[0].contains(name.as_str()));
    let mut cases: Vec<(Case, [Rounds; 2])> =
        cases().into_iter().filter(wanted).map(|case| (case, [Rounds::default(), Rounds::default()])).collect();
    for round in 1..=rounds.max(1) {
        progress(&format!("round {round} of {rounds}"));
        let (host, nic) = measure(&files, progress)?;
        let mut failed = Vec::new();
        for (case, results) in &mut cases {
            if let Err(error) = compare(case, results, &host, &nic, &files, seconds) {
                failed.push(case.names[0]);
                left_out.push(format!("{} did not run: {error:#}", case.load.name));
            }
        }
        cases.retain(|(case, _)| !failed.contains(&case.names[0]));
        parameters = Some((host, nic));
    }
    let (host, nic) = parameters.context("no round")?;
    let (mut rows, mut savings, mut bars) = (Vec::new(), Vec::new(), Vec::new());
    for (case, results) in &cases {
        let both = [0, 1].map(|at| results[at].checked(&case.load, [Degree::None, Degree::Handoff][at]));
        for (name, row) in case.names.iter().zip(&both) {
            let furthest = row.interval.into_iter().max_by(|one, other| (one - 1.0).abs().total_cmp(&(other - 1.0).abs()));
            bars.push(Bar::near_one(name, 0.15, furthest.unwrap_or(f64::NAN)));
        }
        let saving = |of: fn(&Checked) -> f64| 100.0 * (1.0 - of(&both[1]) / of(&both[0]));
        savings.push(Saving {
            load: case.load.name.clone(),
            connections: case.load.connections,
            predicted: saving(|row| row.predicted),
            measured: saving(|row| row.measured),
        });
        rows.extend(both);
    }
    Ok(CheckReport { host, nic, rows, savings, left_out, bars })
}

/// One round of a load.
fn compare(case: &Case, results: &mut [Rounds; 2], host: &Host, nic: &Nic, files: &Files, seconds: f64) -> Result<()> {
    let kernel = run_case(case, Way::Kernel, files, seconds)?;
    let offloaded = run_case(case, Way::Offloaded, files, seconds)?;
    let load = Load { program: kernel.own, ..case.load.clone() };
    let rows = plan(host, nic, &load, None)?;
    for (at, (degree, used)) in [(Degree::None, kernel), (Degree::Handoff, offloaded)].into_iter().enumerate() {
        let row = rows.iter().find(|row| row.degree == degree).context("a row of each degree")?;
        let measured = [used.program, used.nic + used.others, used.peer].map(|nanos| nanos / 1e3);
        results[at].1.push(used.again);
        results[at].0.push(([row.program, row.nic, row.peer], measured));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_students() {
        let [low, high] = interval(&[0.9, 1.0, 1.1]);
        assert!((low - 0.7517).abs() < 1e-3 && (high - 1.2483).abs() < 1e-3, "{low} {high}");
        assert_eq!(interval(&[1.0]), [f64::NEG_INFINITY, f64::INFINITY]);
    }

    #[test]
    fn every_case_is_a_load_that_can_be_and_has_names_of_its_own() {
        let mut names: Vec<&str> = cases().iter().flat_map(|case| case.names).collect();
        cases().iter().for_each(|case| case.load.check().unwrap());
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
