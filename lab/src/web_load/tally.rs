//! What clients count, and the report that is made of it.

use crate::web_mix::{CLASSES, Request};
use baton_bed::statistics::Percentiles;
use serde::Serialize;
use std::collections::BTreeMap;

/// Most samples that are kept of a time.
const KEPT: usize = 1 << 18;

/// Times of requests in milliseconds. Of many, each second one or fourth one, ... is kept, so that a long run needs no
/// more memory than a short one.
#[derive(Clone, Debug)]
pub struct Samples {
    kept: Vec<f64>,
    /// One of so many is kept.
    every: u64,
    seen: u64,
    most: f64,
}

impl Default for Samples {
    fn default() -> Samples {
        Samples { kept: Vec::new(), every: 1, seen: 0, most: 0.0 }
    }
}

impl Samples {
    /// Adds one.
    pub fn add(&mut self, milliseconds: f64) {
        self.most = self.most.max(milliseconds);
        if self.seen.is_multiple_of(self.every) {
            if self.kept.len() == KEPT {
                let mut at = 0;
                self.kept.retain(|_| {
                    at += 1;
                    at % 2 == 1
                });
                self.every *= 2;
            }
            self.kept.push(milliseconds);
        }
        self.seen += 1;
    }

    /// Percentiles of several threads' samples, which have had about the same number each.
    fn percentiles<'a>(all: impl Iterator<Item = &'a Samples> + Clone) -> Percentiles {
        let most = all.clone().map(|samples| samples.most).fold(0.0, f64::max);
        let every = all.clone().map(|samples| samples.every).max().unwrap_or(1);
        // Each thread's at the same density.
        let evenly = |samples: &'a Samples| samples.kept.iter().copied().step_by((every / samples.every) as usize);
        Percentiles { max: most, ..Percentiles::of(all.flat_map(evenly).collect()) }
    }
}

/// What went wrong in one way.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Fault {
    /// What went wrong.
    pub what: String,
    /// How often.
    pub count: u64,
    /// One of the requests; None if no connection could be made.
    pub example: Option<String>,
}

/// What a thread's clients have counted.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Requests that were answered whole.
    pub requests: u64,
    /// Those of them whose answer a program was to make.
    pub dynamic: u64,
    /// The same by the file's class.
    pub classes: [u64; CLASSES.len()],
    /// Bytes of all answers, with their heads.
    pub bytes: u64,
    /// Connections that were made.
    pub opened: u64,
    /// Connections that the server closed while they had no request.
    pub closed_idle: u64,
    /// Bytes that were not the file's.
    pub wrong_bytes: u64,
    /// From a request to its answer's first byte.
    pub first_byte: Samples,
    /// From a request to the moment at which the client's line has carried its answer.
    pub answer: Samples,
    /// Clients that got enough.
    pub conforming: usize,
    faults: BTreeMap<String, (u64, Option<String>)>,
}

impl Tally {
    /// A request was answered whole, after so many milliseconds each.
    pub fn answered(&mut self, request: &Request, first_byte: f64, answer: f64) {
        self.requests += 1;
        self.dynamic += u64::from(request.dynamic);
        self.classes[request.class] += 1;
        self.first_byte.add(first_byte);
        self.answer.add(answer);
    }

    /// Something went wrong.
    pub fn fault(&mut self, what: String, example: Option<String>) {
        self.faults.entry(what).or_insert((0, example)).0 += 1;
    }
}

/// What a load was.
#[derive(Clone, Debug, Serialize)]
pub struct Described {
    /// The server.
    pub url: String,
    /// Clients, each with one connection at a time.
    pub connections: usize,
    /// Directories of the file set.
    pub directories: usize,
    /// Bits per second that a client receives at most; None for any number.
    pub rate: Option<f64>,
    /// Bits per second from which on a client conforms.
    pub least: f64,
    /// Share of requests whose answer a program is to make.
    pub dynamic: f64,
    /// Seconds that were measured.
    pub seconds: f64,
}

/// What a load has found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The load.
    #[serde(flatten)]
    pub load: Described,
    /// Clients that got at least the least rate from their first connection to the end, and fewer errors than one in a
    /// hundred requests.
    pub conforming: usize,
    /// Requests that were answered whole.
    pub requests: u64,
    /// The same per second.
    pub requests_per_second: f64,
    /// Megabits per second of all answers, with their heads.
    pub megabits: f64,
    /// From a request to its answer's first byte, in milliseconds.
    pub first_byte_ms: Percentiles,
    /// From a request to the moment at which the client's line has carried its answer, in milliseconds.
    pub answer_ms: Percentiles,
    /// Requests by the file's class.
    pub classes: [u64; CLASSES.len()],
    /// Requests whose answer a program was to make.
    pub dynamic_requests: u64,
    /// Connections that were made.
    pub opened: u64,
    /// Connections that the server closed while they had no request.
    pub closed_idle: u64,
    /// Bytes that were not the file's.
    pub wrong_bytes: u64,
    /// What went wrong, as a number.
    pub errors: u64,
    /// The same by kind.
    pub faults: Vec<Fault>,
}

impl Report {
    /// Makes it of what the threads have counted.
    pub fn new(load: Described, tallies: &[Tally]) -> Report {
        let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum::<u64>();
        let mut faults = BTreeMap::<&str, (u64, &Option<String>)>::new();
        for (what, (count, example)) in tallies.iter().flat_map(|tally| &tally.faults) {
            faults.entry(what).or_insert((0, example)).0 += count;
        }
        let mut faults: Vec<Fault> = faults
            .into_iter()
            .map(|(what, (count, example))| Fault { what: what.to_owned(), count, example: example.clone() })
            .collect();
        faults.sort_by_key(|fault| std::cmp::Reverse(fault.count));
        let mut classes = [0; CLASSES.len()];
        for tally in tallies {
            classes.iter_mut().zip(tally.classes).for_each(|(all, one)| *all += one);
        }
        let requests = sum(|tally| tally.requests);
        Report {
            conforming: tallies.iter().map(|tally| tally.conforming).sum(),
            requests,
            requests_per_second: requests as f64 / load.seconds,
            megabits: sum(|tally| tally.bytes) as f64 * 8.0 / 1e6 / load.seconds,
            first_byte_ms: Samples::percentiles(tallies.iter().map(|tally| &tally.first_byte)),
            answer_ms: Samples::percentiles(tallies.iter().map(|tally| &tally.answer)),
            classes,
            dynamic_requests: sum(|tally| tally.dynamic),
            opened: sum(|tally| tally.opened),
            closed_idle: sum(|tally| tally.closed_idle),
            wrong_bytes: sum(|tally| tally.wrong_bytes),
            errors: faults.iter().map(|fault| fault.count).sum(),
            faults,
            load,
        }
    }

    /// Whether requests were answered, and all of them rightly.
    pub fn is_clean(&self) -> bool {
        self.requests > 0 && self.errors == 0
    }

    /// As lines of text.
    pub fn lines(&self) -> Vec<String> {
        let Report { load, .. } = self;
        let line = |name: &str, value: String| format!("{name:<16} {value}");
        let times = |times: &Percentiles| format!("p50 {:.2}   p99 {:.2}   max {:.2} ms", times.p50, times.p99, times.max);
        let percent = |count: u64| 100.0 * count as f64 / self.requests.max(1) as f64;
        let [first, second, third, fourth] = self.classes.map(percent);
        let mut lines = vec![
            line("server", format!("{}, {} connections, {:.1} s", load.url, load.connections, load.seconds)),
            line("requests/s", format!("{:.1}", self.requests_per_second)),
            line("Mb/s", format!("{:.2}", self.megabits)),
            line(
                "conforming",
                format!("{} of {} connections (at least {:.0} kb/s)", self.conforming, load.connections, load.least / 1e3),
            ),
            line("first byte", times(&self.first_byte_ms)),
            line("whole answer", times(&self.answer_ms)),
            line(
                "requests",
                format!(
                    "{}, by class {first:.1} {second:.1} {third:.1} {fourth:.1} %, dynamic {:.1} %",
                    self.requests,
                    percent(self.dynamic_requests)
                ),
            ),
            line("TCP connections", format!("{} made, {} closed by the server between requests", self.opened, self.closed_idle)),
            line("errors", format!("{}, {} wrong bytes", self.errors, self.wrong_bytes)),
        ];
        for Fault { what, count, example } in &self.faults {
            lines.push(format!("  {count:>8} {what}: {}", example.as_deref().unwrap_or("no connection")));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described() -> Described {
        Described {
            url: "http://a".to_owned(),
            connections: 2,
            directories: 1,
            rate: Some(400e3),
            least: 320e3,
            dynamic: 0.0,
            seconds: 2.0,
        }
    }

    #[test]
    fn many_samples_are_thinned_out_evenly() {
        let mut samples = Samples::default();
        let many = 5 * KEPT;
        (0..many).for_each(|at| samples.add(at as f64));
        assert!(samples.kept.len() <= KEPT && samples.kept.len() > KEPT / 2, "{}", samples.kept.len());
        let mut few = Samples::default();
        (0..many).step_by(8).for_each(|at| few.add(at as f64));
        let found = Samples::percentiles([samples, few].iter());
        assert!((found.p50 / many as f64 - 0.5).abs() < 0.01 && (found.p99 / many as f64 - 0.99).abs() < 0.01, "{found:?}");
        assert_eq!(found.max, (many - 1) as f64);
        assert_eq!(Samples::percentiles([].iter()).p50, 0.0);
    }

    #[test]
    fn threads_are_added_up() {
        let request = Request { directory: 0, class: 1, file: 0, dynamic: true };
        let mut tally = Tally { bytes: 1_000_000, conforming: 1, ..Tally::default() };
        tally.answered(&request, 1.0, 20.0);
        tally.fault("status 404".to_owned(), Some("/dir00000/class1_0".to_owned()));
        let mut other = tally.clone();
        other.fault("status 404".to_owned(), Some("/another".to_owned()));
        other.fault("refused".to_owned(), None);
        let report = Report::new(described(), &[tally, other]);
        assert_eq!((report.requests, report.dynamic_requests, report.classes, report.conforming), (2, 2, [0, 2, 0, 0], 2));
        assert_eq!((report.requests_per_second, report.megabits), (1.0, 8.0));
        assert_eq!((report.errors, report.is_clean()), (4, false));
        let first = Fault { what: "status 404".to_owned(), count: 3, example: Some("/dir00000/class1_0".to_owned()) };
        assert_eq!(report.faults[0], first);
        let text = report.lines().join("\n");
        for part in ["2 of 2 connections (at least 320 kb/s)", "by class 0.0 100.0 0.0 0.0 %", "refused: no connection"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn nothing_answered_is_not_clean() {
        let report = Report::new(described(), &[Tally::default()]);
        assert!(!report.is_clean() && report.requests_per_second == 0.0 && report.answer_ms.p99 == 0.0);
    }
}
