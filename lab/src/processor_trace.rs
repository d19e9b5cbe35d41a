//! A trace of one processor: what the halves of interrupts and the processes take of it, every tenth of a second.

use anyhow::{Context, Result, anyhow};
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_steering::{InterruptTrace, ProcessorTimes, RunTimes};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

/// Microseconds between two samples.
const INTERVAL: u64 = 100_000;

/// How often something ran, and for how long.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Runs {
    /// Times.
    pub count: u64,
    /// Microseconds in all.
    pub sum_us: f64,
    /// Microseconds of the longest.
    pub longest_us: f64,
}

impl Runs {
    fn from(times: RunTimes) -> Runs {
        Runs { count: times.count, sum_us: times.sum as f64 / 1e3, longest_us: times.longest as f64 / 1e3 }
    }

    /// Adds another's.
    pub fn add(&mut self, other: &Runs) {
        self.count += other.count;
        self.sum_us += other.sum_us;
        self.longest_us = self.longest_us.max(other.longest_us);
    }

    /// Microseconds of the mean.
    pub fn mean_us(&self) -> f64 {
        self.sum_us / self.count.max(1) as f64
    }
}

/// What a process did in its turns.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ProcessRuns {
    /// Its number; 0 is the idle loop.
    pub process: u32,
    /// Its name.
    pub name: String,
    /// Its turns, with the interrupts that came meanwhile.
    #[serde(flatten)]
    pub runs: Runs,
}

/// What the processor did in an interval.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Sample {
    /// Its end, milliseconds after the trace began.
    pub ms: f64,
    /// By half: `first half`, then soft interrupts by the kernel's names; those that came.
    pub halves: BTreeMap<&'static str, Runs>,
    /// NAPI's polls, the frames that they found, and most at once.
    pub polls: [u64; 3],
    /// By process; those that left the processor, whose time counts then.
    pub processes: Vec<ProcessRuns>,
}

impl Sample {
    fn new(ms: f64, times: ProcessorTimes) -> Sample {
        let halves = times.halves.into_iter().filter(|(_, times)| times.count > 0);
        let process = |(process, name, times)| ProcessRuns { process, name, runs: Runs::from(times) };
        Sample {
            ms,
            halves: halves.map(|(name, times)| (name, Runs::from(times))).collect(),
            polls: [times.polls.count, times.polls.sum, times.polls.longest],
            processes: times.processes.into_iter().map(process).collect(),
        }
    }

    /// Microseconds of a half.
    pub fn half(&self, name: &str) -> f64 {
        self.halves.get(name).map_or(0.0, |runs| runs.sum_us)
    }
}

/// The samples of a time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Trace {
    /// The processor.
    pub processor: usize,
    /// In their order.
    pub samples: Vec<Sample>,
}

impl Trace {
    /// Everything as one sample.
    pub fn total(&self) -> Sample {
        let mut total = Sample::default();
        let mut processes: BTreeMap<(u32, &str), Runs> = BTreeMap::new();
        for sample in &self.samples {
            total.ms = sample.ms;
            for (name, runs) in &sample.halves {
                total.halves.entry(*name).or_default().add(runs);
            }
            let [polls, frames, most] = sample.polls;
            total.polls = [total.polls[0] + polls, total.polls[1] + frames, total.polls[2].max(most)];
            for one in &sample.processes {
                processes.entry((one.process, one.name.as_str())).or_default().add(&one.runs);
            }
        }
        let process = |((process, name), runs): ((u32, &str), Runs)| ProcessRuns { process, name: name.to_owned(), runs };
        total.processes = processes.into_iter().map(process).collect();
        total.processes.sort_by(|one, other| other.runs.sum_us.total_cmp(&one.runs.sum_us));
        total
    }

    /// A JSON object a line: each sample.
    ///
    /// # Errors
    /// If a figure is none that JSON has.
    pub fn lines(&self) -> Result<String> {
        self.samples.iter().map(|sample| Ok(serde_json::to_string(sample)? + "\n")).collect()
    }

    /// The total as text.
    pub fn table(&self) -> String {
        let total = self.total();
        let mut text = format!(
            "\n{:<28}{:>10}{:>12}{:>12}{:>12}{:>8}\n",
            format!("Processor {}", self.processor),
            "count",
            "sum, ms",
            "mean, µs",
            "longest, µs",
            "%"
        );
        let mut line = |name: &str, runs: &Runs| {
            let share = runs.sum_us / total.ms / 10.0;
            let Runs { count, sum_us, longest_us } = runs;
            text +=
                &format!("{name:<28}{count:>10}{:>12.2}{:>12.2}{longest_us:>12.1}{share:>8.2}\n", sum_us / 1e3, runs.mean_us());
        };
        total.halves.iter().for_each(|(name, runs)| line(name, runs));
        total.processes.iter().for_each(|one| line(&format!("{} ({})", one.name, one.process), &one.runs));
        let [polls, frames, most] = total.polls;
        text + &format!("{polls} polls found {frames} frames, at most {most}\n")
    }
}

/// A trace under way.
pub struct Tracing<'scope> {
    processor: usize,
    thread: ScopedJoinHandle<'scope, Vec<Sample>>,
}

/// Begins to trace a processor, until `over`. A thread that keeps off it takes the samples.
///
/// # Errors
/// If this process may not load BPF programs, or this kernel lacks a tracepoint.
pub fn begin<'scope>(scope: &'scope Scope<'scope, '_>, processor: usize, over: &'scope AtomicBool) -> Result<Tracing<'scope>> {
    let trace = InterruptTrace::new(processor).with_context(|| format!("tracing processor {processor}"))?;
    let sample = move || {
        // Numbers that no processor has do not count.
        process::pin_to(&(0..1024).filter(|other| *other != processor).collect::<Vec<_>>());
        let (began, mut samples) = (monotonic_micros(), Vec::new());
        while !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(INTERVAL));
            samples.push(Sample::new((monotonic_micros() - began) as f64 / 1e3, trace.take()));
        }
        samples
    };
    Ok(Tracing { processor, thread: scope.spawn(sample) })
}

impl Tracing<'_> {
    /// What was traced. `over` must have been set.
    ///
    /// # Errors
    /// If the thread has panicked.
    pub fn end(self) -> Result<Trace> {
        let samples = self.thread.join().map_err(|_| anyhow!("the thread that traces panicked"))?;
        Ok(Trace { processor: self.processor, samples })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ms: f64, count: u64) -> Sample {
        let times = |count: u64| RunTimes { count, sum: 1000 * count, longest: 1000 };
        let processes = vec![(7, "server".to_owned(), times(count)), (0, "swapper/0".to_owned(), times(2 * count))];
        let polls = RunTimes { count, sum: 3 * count, longest: count };
        Sample::new(ms, ProcessorTimes { halves: vec![("first half", times(0)), ("NET_RX", times(count))], polls, processes })
    }

    #[test]
    fn samples_add_up() {
        let trace = Trace { processor: 1, samples: vec![sample(100.0, 4), sample(200.0, 6)] };
        let total = trace.total();
        let runs = |count: u64| Runs { count, sum_us: count as f64, longest_us: 1.0 };
        assert_eq!(total.halves, BTreeMap::from([("NET_RX", runs(10))]), "what did not come has no row");
        assert_eq!((total.ms, total.polls, total.half("NET_RX")), (200.0, [10, 30, 6], 10.0));
        let names: Vec<(u32, &str, Runs)> =
            total.processes.iter().map(|one| (one.process, one.name.as_str(), one.runs)).collect();
        assert_eq!(names, [(0, "swapper/0", runs(20)), (7, "server", runs(10))], "the longest first");
        assert!(trace.table().contains("server (7)") && trace.table().contains("10 polls found 30 frames, at most 6"));
        let lines: Vec<serde_json::Value> =
            trace.lines().unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[1]["halves"]["NET_RX"]["count"]), (2, &6.into()));
        assert_eq!(lines[0]["processes"][0]["sum_us"], 4.0);
    }
}
