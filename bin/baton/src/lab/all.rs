//! `baton bench all`: the benches that compare with the kernel, or have a figure to reach, on one page.

use super::bench::Compare;
use anyhow::{Result, ensure};
use baton_bed::temporary::ResultFile;
use baton_lab::bars::Bar;
use baton_lab::compare::{Row, What};
use baton_lab::page::{self, Section};
use serde::Serialize;
use std::path::Path;

/// Moves of a round.
const MOVES: u64 = 5_000;
/// Bounds of `baton bench datapath`: instructions a segment of 1448 bytes with one connection and with 1024, and of 64
/// bytes.
const INSTRUCTIONS: [(&str, f64); 3] = [
    ("datapath.instr_per_segment_1", 450.0),
    ("datapath.instr_per_segment_1024", 450.0),
    ("datapath.instr_per_segment_64", 300.0),
];

/// Runs all of them. One that fails is on the page with its error, and the others go on. Returns whether all ran and
/// met their bounds.
pub fn run(how: &Compare, page: Option<&Path>) -> Result<bool> {
    ensure!(how.connections.is_none(), "--connections is for one bench, not for all");
    // Before this user becomes another one's root.
    let kept = crate::page::last_report();
    baton_linux::namespace::become_root_if_needed()?;
    // Opened first: the benches take half an hour.
    let page = page.map(ResultFile::open).transpose()?;
    let machine = baton_linux::process::machine();
    let programs = |what| {
        let report = how.measure(what)?;
        let rows = report.rows.clone();
        Ok(Part { rows, ..Part::of(Ok(report), |report| &report.bars)? })
    };
    if how.chooses_gain() {
        return report(how, page, kept.as_deref(), &machine, &by_gain(programs));
    }
    let sections = [
        section("datapath", "Instructions of a received segment on a wire in memory.", datapath()),
        section(
            "wire",
            "One worker's TCP on a wire in memory.",
            Part::of(baton_lab::wire::run(how.rounds), |report| &report.bars),
        ),
        section("rpc", "64 bytes and their echo on 64 and 1024 connections, one at a time on each.", programs(What::Rpc)),
        section("pingpong", "64 bytes and their echo on one connection; programs and NIC never sleep.", programs(What::PingPong)),
        section("http", "nginx and a file of 256 bytes, asked by the bench's own client and by wrk.", programs(What::Http)),
        section("redis", "redis GET on 50 connections, one at a time and 16.", programs(What::Redis)),
        section("bulk", "One connection, into a program and out of it.", programs(What::Bulk)),
        section(
            "moves",
            "Moves of 64 connections under load, and the blackout of one. Absolute figures.",
            Part::of(
                baton_lab::moves::run(MOVES, how.rounds as u64, how.offloads(), |one| {
                    eprintln!("{}", baton_lab::moves::line(one))
                }),
                |report| &report.bars,
            ),
        ),
        section(
            "attach",
            "Large receive in front of a veth that the kernel keeps, the receiver's CPU; a connection in the kernel beside a Baton.",
            Part::of(baton_lab::front::run(how.rounds, how.seconds, "xdp", |line| eprintln!("{line}")), |report| &report.bars),
        ),
        // Last: for a while after it has given 12 GB back, whatever runs on a virtual machine is held up for
        // milliseconds.
        section(
            "connections",
            "A packet with a million connections over one with 1024; bytes of an idle connection.",
            Part::of(baton_lab::connections::run(how.rounds), |report| &report.bars),
        ),
    ];
    report(how, page, kept.as_deref(), &machine, &sections)
}

/// The benches of loads that are placed where they were measured to be better served.
fn by_gain(programs: impl Fn(What) -> Result<Part>) -> [Section; 4] {
    [
        section(
            "http",
            "nginx and a file of 256 bytes, 64, 512 and 1024 connections of the bench's own client and of wrk.",
            programs(What::Http),
        ),
        section("redis", "redis GET on 50 connections, one at a time and 16.", programs(What::Redis)),
        section("rpc", "64 bytes and their echo on 64 and 1024 connections, one at a time on each.", programs(What::Rpc)),
        section("bulk", "One connection, into a program and out of it.", programs(What::Bulk)),
    ]
}

/// Writes the page, and prints the rest. Returns whether all ran and met their bounds.
fn report(how: &Compare, page: Option<ResultFile>, kept: Option<&Path>, machine: &str, sections: &[Section]) -> Result<bool> {
    let html = page::html(machine, sections);
    if let Some(page) = page {
        page.write(html.as_bytes())?;
    }
    if let Some(kept) = kept
        && let Err(error) = keep(kept, &html)
    {
        eprintln!("baton bench all: {}, for `baton page`: {error}", kept.display());
    }
    if how.json {
        let bars: Vec<&Bar> = sections.iter().flat_map(|section| &section.bars).collect();
        println!("{}", serde_json::json!({ "machine": machine, "bars": bars, "sections": sections }));
    } else {
        print!("{}", page::text(sections));
    }
    Ok(sections.iter().all(|section| {
        let ran = section.report.get("error").is_none() && section.rows.iter().all(|row| row.failures.is_empty());
        ran && section.bars.iter().all(|bar| bar.holds)
    }))
}

/// Puts a page in place of the last one, at once.
fn keep(path: &Path, page: &str) -> std::io::Result<()> {
    let new = path.with_extension("html.new");
    std::fs::write(&new, page)?;
    std::fs::rename(new, path)
}

/// A bench's bars, and all that it reports.
struct Part {
    bars: Vec<Bar>,
    rows: Vec<Row>,
    report: serde_json::Value,
}

impl Part {
    fn of<T: Serialize>(report: Result<T>, bars: impl Fn(&T) -> &Vec<Bar>) -> Result<Part> {
        let report = report?;
        Ok(Part { bars: bars(&report).clone(), rows: Vec::new(), report: serde_json::to_value(&report)? })
    }
}

fn section(name: &'static str, about: &'static str, part: Result<Part>) -> Section {
    let Part { bars, rows, report } = part.unwrap_or_else(|error| {
        eprintln!("baton bench {name}: {error:#}");
        Part { bars: Vec::new(), rows: Vec::new(), report: serde_json::json!({ "error": format!("{error:#}") }) }
    });
    Section { name, about, bars, rows, report }
}

fn datapath() -> Result<Part> {
    let report = baton_lab::datapath::run()?;
    let value = |name| report.bars.iter().find(|bar| bar.name == name).map_or(f64::MAX, |bar| bar.value);
    let bars = INSTRUCTIONS.map(|(name, bound)| Bar::most(name, bound, value(name))).to_vec();
    Ok(Part { bars, rows: Vec::new(), report: serde_json::to_value(&report)? })
}
