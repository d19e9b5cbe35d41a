//! One round: a load on one way, with fresh hosts, and what it cost.

use super::CompareSettings;
use super::load::Traffic;
use super::programs::{Client, Programs};
use super::way::{Hosts, Way};
use crate::closed_loop::Progress;
use anyhow::{Context, Result, bail, ensure};
use baton_abi::layout::Counter;
use baton_bed::server::{Files, Server};
use baton_bed::statistics::{Percentiles, quantile};
use baton_client::tool::Tool;
use baton_linux::events::{monotonic_micros, process_nanos};
use baton_linux::process;
use baton_protocol::program::{Ask, ClassInfo, Place, Reply};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Seconds before each measurement, or as many as it lasts if those are fewer: connections are made, and moved.
const WARMING: f64 = 1.0;
/// Seconds before it in which classes are measured, where connections are placed by that.
const LEARNING: f64 = 15.0;
/// Seconds before it after which no further connection is expected to move: moves are not what is measured.
const MOVING: f64 = 15.0;

/// A part of the CPU time: whose, and how much.
pub type Part = (&'static str, fn(&Round) -> f64);

/// One round, or the medians of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Round {
    /// Requests per second, or Gb/s.
    pub rate: f64,
    /// Median of the waiting times, milliseconds.
    pub p50: f64,
    /// Their 99th percentile.
    pub p99: f64,
    /// CPU time of all, microseconds per request or seconds per GB; then its parts.
    pub machine: f64,
    /// Of the client.
    pub client: f64,
    /// Of the server.
    pub server: f64,
    /// Of keeper and agent.
    pub agent: f64,
    /// Of the process that carries bytes between the NIC and a program that it is attached to.
    pub attacher: f64,
    /// Of the NIC's process.
    pub nic: f64,
    /// Time of the NIC's rounds that found work, waiting for a processor included: the rest of its CPU time went into
    /// polling.
    pub nic_busy: f64,
    /// Of the kernel's threads.
    pub kernel: f64,
    /// Connections on the NIC at the end.
    pub on_nic: f64,
}

impl Round {
    /// Whose CPU time `machine` is the sum of.
    pub const PARTS: [Part; 6] = [
        ("client", |round| round.client),
        ("server", |round| round.server),
        ("agent", |round| round.agent),
        ("attacher", |round| round.attacher),
        ("kernel's threads", |round| round.kernel),
        ("NIC", |round| round.nic),
    ];

    /// The median of each figure.
    pub(super) fn medians(rounds: &[Round]) -> Round {
        let median = |figure: fn(&Round) -> f64| quantile(&mut rounds.iter().map(figure).collect::<Vec<_>>(), 0.5);
        Round {
            rate: median(|r| r.rate),
            p50: median(|r| r.p50),
            p99: median(|r| r.p99),
            machine: median(|r| r.machine),
            client: median(|r| r.client),
            server: median(|r| r.server),
            agent: median(|r| r.agent),
            attacher: median(|r| r.attacher),
            nic: median(|r| r.nic),
            nic_busy: median(|r| r.nic_busy),
            kernel: median(|r| r.kernel),
            on_nic: median(|r| r.on_nic),
        }
    }

    /// What happened between two moments. `times` are waiting times in milliseconds.
    fn between(before: &Snapshot, after: &Snapshot, times: Percentiles, traffic: Traffic) -> Result<Round> {
        let (done, micros) = (after.done - before.done, (after.micros - before.micros) as f64);
        ensure!(done > 0, "the server answered nothing");
        // Nanoseconds per byte are seconds per GB.
        let unit = if traffic.is_bulk() { 1.0 } else { 1e3 };
        // An agent or a NIC may have been replaced meanwhile.
        let each = |of: fn(&Snapshot) -> u64| of(after).saturating_sub(of(before)) as f64 / done as f64 / unit;
        let mut round = Round {
            rate: if traffic.is_bulk() { done as f64 * 8.0 / 1e3 / micros } else { done as f64 * 1e6 / micros },
            p50: times.p50,
            p99: times.p99,
            machine: 0.0,
            client: each(|s| s.client),
            server: each(|s| s.server),
            agent: each(|s| s.agent),
            attacher: each(|s| s.attacher),
            nic: each(|s| s.nic),
            nic_busy: each(|s| s.nic_busy),
            kernel: each(|s| s.kernel),
            on_nic: after.on_nic as f64,
        };
        round.machine = Round::PARTS.iter().map(|(_, part)| part(&round)).sum();
        Ok(round)
    }
}

/// Runs one.
///
/// # Errors
/// If a program is not installed or does not start, or a connection breaks.
pub(super) fn run(way: Way, traffic: Traffic, files: &Files, settings: &CompareSettings) -> Result<Round> {
    let hosts = Hosts::new(way, traffic, settings)?;
    let programs = Programs { hosts: &hosts, files, way, traffic };
    let (server, client) = programs.start()?;
    let progress = Progress::default();
    let mut parties = Parties { tool: hosts.tool()?, server, attacher: None };
    let (before, after) = std::thread::scope(|scope| {
        let running = scope.spawn(|| hosts.client().run(|| Ok(client.run(&progress))));
        let measured = parties.measure(&programs, &progress, settings.seconds);
        progress.stop.store(true, Ordering::Relaxed);
        // wrk has to find the server until it has ended. Another client that waits for the server ends when that does;
        // so does an attacher.
        let _parties = Some(parties).filter(|_| matches!(client, Client::Wrk(_)));
        running.join().map_err(|_| anyhow::anyhow!("the load panicked"))???;
        measured
    })?;
    let own = progress.times.lock().map(|times| times.iter().map(|time| f64::from(*time) / 1e6).collect()).unwrap_or_default();
    let said = progress.waits.lock().ok().and_then(|waits| *waits);
    Round::between(&before, &after, said.unwrap_or_else(|| Percentiles::of(own)), traffic)
}

/// Runs a load under a Baton that measures what it costs in both places, until it knows or has had the time for that.
/// Returns what it says then.
///
/// # Errors
/// Those of [`run`].
pub(super) fn classes(traffic: Traffic, files: &Files, settings: &CompareSettings) -> Result<Vec<ClassInfo>> {
    let way = Way::Gain;
    let hosts = Hosts::new(way, traffic, settings)?;
    let programs = Programs { hosts: &hosts, files, way, traffic };
    let (server, client) = programs.start()?;
    let progress = Progress::default();
    let mut tool = hosts.tool()?.context("no agent")?;
    std::thread::scope(|scope| {
        let running = scope.spawn(|| hosts.client().run(|| Ok(client.run(&progress))));
        let classes = await_classes(&mut tool, settings.seconds);
        progress.stop.store(true, Ordering::Relaxed);
        // A client that waits for the server ends when that does.
        drop(server);
        running.join().map_err(|_| anyhow::anyhow!("the load panicked"))???;
        classes
    })
}

/// The classes of an agent, once one of them has been measured, or so many seconds later.
fn await_classes(tool: &mut Tool, seconds: f64) -> Result<Vec<ClassInfo>> {
    let deadline = monotonic_micros() + (seconds * 1e6) as u64;
    loop {
        let Reply::Gain(classes) = tool.ask(Ask::Gain)? else { bail!("the agent does not measure") };
        if classes.iter().any(|class| class.measured.is_some()) || monotonic_micros() > deadline {
            return Ok(classes);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// CPU times in nanoseconds, and what was done, at a moment.
struct Snapshot {
    micros: u64,
    done: u64,
    client: u64,
    server: u64,
    agent: u64,
    attacher: u64,
    nic: u64,
    nic_busy: u64,
    kernel: u64,
    on_nic: usize,
}

/// Whose CPU time counts, beside that of the client, which is this process's.
struct Parties {
    tool: Option<Tool>,
    /// Ended before the attacher, which gives its connections back then.
    server: Server,
    attacher: Option<Server>,
}

impl Parties {
    /// Waits until the load runs as it should, and measures a stretch of it.
    fn measure(&mut self, programs: &Programs<'_>, progress: &Progress, seconds: f64) -> Result<(Snapshot, Snapshot)> {
        std::thread::sleep(Duration::from_secs_f64(WARMING.min(seconds)));
        await_answers(progress, 0);
        if programs.way == Way::Attached {
            self.attacher = Some(programs.attach(&self.server)?);
        }
        if programs.way == Way::Gain {
            std::thread::sleep(Duration::from_secs_f64(LEARNING));
            if programs.traffic.is_by_wrk() {
                // Its waiting times are those of all that it has seen. Its next connections go where they belong.
                progress.anew.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_secs_f64(WARMING));
            }
        } else {
            self.await_moves(programs.traffic.connections())?;
        }
        let mut kernel = process::KernelThreads::new();
        progress.timing.store(true, Ordering::Relaxed);
        let before = self.snapshot(progress, &mut kernel)?;
        std::thread::sleep(Duration::from_secs_f64(seconds));
        // A short stretch on a busy machine may see no answer.
        await_answers(progress, before.done);
        let after = self.snapshot(progress, &mut kernel)?;
        Ok((before, after))
    }

    fn snapshot(&mut self, progress: &Progress, kernel: &mut process::KernelThreads) -> Result<Snapshot> {
        let statistics = self.tool.as_mut().map(Tool::statistics).transpose()?;
        let on_nic = self.count_on_nic()?;
        let busy = statistics.as_ref().and_then(|of| of.counters.get(Counter::BusyNanoseconds as usize).copied());
        let cpu = |process: Option<u32>| process.and_then(process::cpu_nanos).unwrap_or(0);
        Ok(Snapshot {
            micros: monotonic_micros(),
            done: progress.done.load(Ordering::Relaxed),
            client: process_nanos() + cpu(Some(progress.client_process.load(Ordering::Relaxed)).filter(|process| *process > 0)),
            server: self.server.cpu().context("the server has ended")?,
            agent: cpu(statistics.as_ref().map(|of| of.agent_process)),
            attacher: match &self.attacher {
                Some(attacher) => attacher.cpu().context("the attacher has ended")?,
                None => 0,
            },
            nic: cpu(statistics.as_ref().map(|of| of.nic_process)),
            nic_busy: busy.unwrap_or(0),
            kernel: kernel.nanos(),
            on_nic,
        })
    }

    /// Connections on the NIC, if there is one.
    fn count_on_nic(&mut self) -> Result<usize> {
        let Some(tool) = &mut self.tool else { return Ok(0) };
        Ok(tool.connections()?.iter().filter(|info| info.place == Place::Nic).count())
    }

    /// Waits until so many connections are on the NIC, or none has come for a while; then it says why they are not.
    fn await_moves(&mut self, connections: usize) -> Result<()> {
        let (mut most, mut since) = (0, monotonic_micros());
        while self.tool.is_some() {
            let now = self.count_on_nic()?;
            if now > most {
                (most, since) = (now, monotonic_micros());
            }
            if now >= connections {
                break;
            }
            if monotonic_micros() - since > (MOVING * 1e6) as u64 {
                eprintln!("{now} of {connections} connections are on the NIC; the others: {}", self.where_the_others_are()?);
                break;
            }
            if let Some(attacher) = &mut self.attacher {
                attacher.check().context("baton attach")?;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// How many connections are elsewhere, by place and reason.
    fn where_the_others_are(&mut self) -> Result<String> {
        let Some(tool) = &mut self.tool else { return Ok(String::new()) };
        let mut counts = BTreeMap::new();
        for info in tool.connections()?.into_iter().filter(|info| info.place != Place::Nic) {
            *counts.entry(format!("{:?}, {}, {} moves: {:?}", info.place, info.program, info.moves, info.reason)).or_insert(0) +=
                1;
        }
        Ok(counts.iter().map(|(what, count)| format!("{count} ({what})")).collect::<Vec<_>>().join(", "))
    }
}

/// Waits until more than so many answers have come, or no more time is left for that. The first comes when all
/// connections are made.
fn await_answers(progress: &Progress, done: u64) {
    let deadline = monotonic_micros() + (MOVING * 1e6) as u64;
    while progress.done.load(Ordering::Relaxed) <= done && monotonic_micros() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
}
