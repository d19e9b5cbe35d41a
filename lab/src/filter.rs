//! Cost of the filter per packet, with few rules and with many: instructions that callgrind counts, as in
//! [`crate::datapath`].

use crate::bars::Bar;
use crate::datapath;
use crate::status::StatusLine;
use anyhow::{Result, bail};
use baton_filter::words::WORDS;
use baton_filter::{Direction, Filter, Installed, Table, Verdict, parse};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpOptions};
use serde::Serialize;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const KEY: [u64; 4] = [1, 2, 3, 4];
/// Bytes of a frame.
const FRAME: usize = 64;

/// Instructions of one set of rules.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    /// Number of rules.
    pub rules: u32,
    /// Instructions for a segment of a known flow.
    pub established: f64,
    /// Instructions for the first segment of a flow.
    pub new: f64,
}

/// The whole bench.
#[derive(Clone, Debug, Serialize)]
pub struct FilterReport {
    /// Both sets of rules.
    pub measured: [Measured; 2],
    /// The figures that have a bound.
    pub bars: Vec<Bar>,
}

/// Rules of five kinds; the last one is the one that matches.
fn rules(count: u32) -> Result<Vec<Installed>> {
    let rule = |at: u32| {
        let (a, b, port) = (at >> 8 & 255, at & 255, 1 + at % 8000);
        match at % 5 {
            _ if at + 1 == count => "in tcp dport 8080 ip daddr 10.0.0.1 accept".to_owned(),
            0 => format!("in tcp dport {port} ip saddr 172.{a}.{b}.0/24 drop"),
            1 => format!("in tcp ip saddr 192.168.{a}.{b} drop"),
            2 => format!("out udp dport {port} ip daddr 10.{a}.{b}.1 drop"),
            3 => format!("in tcp dport {} ip saddr 10.{a}.{b}.7 state new reject", port + 8080),
            _ => format!("in udp dport {port} ip saddr 10.{a}.{b}.0/24 limit 10mbit"),
        }
    };
    (0..count).map(|at| Ok(Installed { rule: parse(&rule(at))?, slot: at as u16 })).collect()
}

/// Judges one frame; callgrind finds this by its name.
#[inline(never)]
fn measured_judge(filter: &Filter, words: &[AtomicU64], direction: Direction, frame: &[u8], now: u64) -> Verdict {
    black_box(filter.judge(words, direction, frame, (1, FRAME as u64), (now, true)))
}

fn frame(port: u16, flags: Flags, out: bool, bytes: &mut [u8; MAX_HEADER]) -> usize {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 8080), remote: Endpoint::v4([10, 1, 2, 3], port), device: 0 };
    let template = Template::new(&if out { flow } else { flow.reversed() }, &Link { ttl: 64, ..Link::default() }, false);
    let options = TcpOptions::default();
    template.emit(&Header { seq: 1, ack: 1, flags, window: 512, options: &options, ecn: 0, ident: 0 }, 0, bytes)
}

/// Judges segments: of one known flow, or each the first of its flow.
///
/// # Errors
/// If one does not pass.
pub fn workload(count: u32, new: bool, segments: u64) -> Result<()> {
    let words: Vec<AtomicU64> = std::iter::repeat_with(|| AtomicU64::new(0)).take(WORDS).collect();
    let filter = Filter::new(Arc::new(Table::new(rules(count)?, 1, KEY)?), KEY);
    let mut bytes = [0; MAX_HEADER];
    for (flags, out) in [(Flags::SYN, false), (Flags::SYN | Flags::ACK, true), (Flags::ACK, false)] {
        let length = frame(999, flags, out, &mut bytes);
        let direction = if out { Direction::Out } else { Direction::In };
        filter.judge(&words, direction, &bytes[..length], (1, FRAME as u64), (1_000_000, true));
    }
    for at in 0..segments {
        let (port, flags) = if new { (1000 + (at % 60_000) as u16, Flags::SYN) } else { (999, Flags::ACK) };
        let length = frame(port, flags, false, &mut bytes);
        if measured_judge(&filter, &words, Direction::In, &bytes[..length], 1_000_000 + at) != Verdict::Pass {
            bail!("segment {at} did not pass");
        }
    }
    Ok(())
}

fn measure(rules: u32) -> Result<Measured> {
    let cost = |new: bool| {
        let count = |segments: u64| {
            let mut arguments = vec!["bench-filter-workload".to_owned(), "--rules".into(), rules.to_string()];
            arguments.extend(["--segments".into(), segments.to_string()]);
            arguments.extend(new.then(|| "--new".to_owned()));
            Ok::<u64, anyhow::Error>(datapath::count("*measured_judge*", &arguments, datapath::layer)?.values().sum())
        };
        const SEGMENTS: u64 = 4096;
        Ok::<f64, anyhow::Error>((count(3 * SEGMENTS)? - count(SEGMENTS)?) as f64 / (2 * SEGMENTS) as f64)
    };
    Ok(Measured { rules, established: cost(false)?, new: cost(true)? })
}

/// The whole bench.
///
/// # Errors
/// If valgrind is missing, or a segment does not pass.
pub fn run() -> Result<FilterReport> {
    let status = StatusLine::new();
    let measure = |rules| {
        status.show(format_args!("instructions of the filter with {rules} rules"));
        measure(rules)
    };
    let measured = [measure(10)?, measure(10_000)?];
    let bars = vec![
        Bar::most("filter.established_10000_over_10", 1.5, measured[1].established / measured[0].established),
        Bar::most("filter.new_10000_over_10", 1.5, measured[1].new / measured[0].new),
    ];
    Ok(FilterReport { measured, bars })
}
