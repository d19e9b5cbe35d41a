//! What many connections cost: a packet of one of a million, over one of 1024; and the memory of a connection that is idle.
//!
//! The packets' wire is memory, as in [`crate::datapath`]; the connections are served in an order in which none comes soon again. The
//! idle connections are on the NIC of a test bed. All memory of keeper, agent, NIC and program counts that they have beside what they
//! had without these connections, after as many others had done the same and were idle; the kernel's memory for their sockets does not.

use crate::bars::Bar;
use crate::datapath::{Bench, Workload};
use crate::soak;
use crate::statistics::quantile;
use crate::testbed::{Testbed, TestbedSettings};
use anyhow::{Context, Result, ensure};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_linux::socket;
use baton_protocol::program::Place;
use serde::Serialize;
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// The numbers of connections that are compared.
const FEW: u32 = 1024;
const MANY: u32 = 1_000_000;
/// Bytes that a connection takes in this bench.
const EACH: u64 = 12 << 10;
/// Bytes of its receive and of its send memory there.
const BUFFER: u32 = 1 << 10;
/// Segments of a run.
const SEGMENTS: u64 = 2_000_000;
/// A step around the connections, a prime: each comes once before any comes again.
const STRIDE: usize = 7919;

/// Connections that are idle.
const IDLE: usize = 1024;
/// Bytes that each of them has carried before, each way: more than its memory, so that all of that was used.
const CARRIED: usize = 512 << 10;

/// Microseconds for which memory has not become less when it counts as settled: longer than a connection may be idle without giving
/// back what it does not use.
const SETTLED: u64 = 6_000_000;

/// The bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct ConnectionsReport {
    /// The larger number of connections: a million, or as many as there is memory for.
    pub many: u32,
    /// Nanoseconds a packet of 64 bytes at 1024 connections, medians; and at the larger number.
    pub nanos: [f64; 2],
    /// Least and greatest of the rounds' ratios.
    pub cost_spread: [f64; 2],
    /// Bytes of a connection on the NIC that has carried nothing.
    pub bytes_fresh: f64,
    /// Of one that has carried more than its memory holds, and is idle; by process.
    pub idle_by_process: Vec<(String, f64)>,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// The memory alone.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// As in [`ConnectionsReport`].
    pub bytes_fresh: f64,
    /// As in [`ConnectionsReport`].
    pub idle_by_process: Vec<(String, f64)>,
    /// The figure with a bound.
    pub bars: Vec<Bar>,
}

/// Measures the memory alone. Needs root.
///
/// # Errors
/// If the NIC refuses a connection.
pub fn memory_alone() -> Result<MemoryReport> {
    let Idle { fresh, used, by_process } = idle_memory()?;
    Ok(MemoryReport { bytes_fresh: fresh, idle_by_process: by_process, bars: vec![bar(used)] })
}

fn bar(used: f64) -> Bar {
    Bar::most("connections.bytes_idle", 1024.0, used)
}

/// Measures both. Needs root.
///
/// # Errors
/// If the NIC refuses a connection.
pub fn run(rounds: usize) -> Result<ConnectionsReport> {
    let idle = idle_memory()?;
    let many = MANY.min(u32::try_from(available_memory()? * 3 / 4 / EACH).unwrap_or(MANY));
    let mut benches = [Bench::with_buffers(FEW, BUFFER)?, Bench::with_buffers(many, BUFFER)?];
    let (mut nanos, mut next) = ([Vec::new(), Vec::new()], [0, 0]);
    // The first round is for the caches.
    for round in 0..=rounds.max(1) {
        for at in 0..2 {
            let workload = Workload { connections: [FEW, many][at], size: 64, burst: 16 };
            let mut spent = 0;
            for _ in 0..SEGMENTS / u64::from(workload.burst) {
                spent += benches[at].round(workload, STRIDE, &mut next[at])?;
            }
            if round > 0 {
                nanos[at].push(spent as f64 / SEGMENTS as f64);
            }
        }
    }
    let mut ratios: Vec<f64> = nanos[1].iter().zip(&nanos[0]).map(|(many, few)| many / few).collect();
    Ok(ConnectionsReport {
        many,
        cost_spread: [0.0, 1.0].map(|share| quantile(&mut ratios, share)),
        nanos: nanos.map(|mut nanos| quantile(&mut nanos, 0.5)),
        bytes_fresh: idle.fresh,
        idle_by_process: idle.by_process,
        bars: vec![Bar::most("connections.cost_ratio_1m", 2.0, quantile(&mut ratios, 0.5)), bar(idle.used)],
    })
}

/// Bytes of memory that the system could still give.
fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).context("no MemAvailable in /proc/meminfo")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

/// Bytes of an idle connection.
struct Idle {
    fresh: f64,
    used: f64,
    by_process: Vec<(String, f64)>,
}

fn idle_memory() -> Result<Idle> {
    let bed = Testbed::new(&TestbedSettings::default())?;
    let (mut servers, clients) = soak::connect_pairs(&bed, 2 * IDLE, false)?;
    let mut session = Session::connect(&bed.socket())?;
    let mut tool = bed.tool()?;
    // Whatever is allocated once for all, such as the pages of the rings, is there after as many connections have done the same.
    let measured = servers.split_off(IDLE);
    let ids = all_to_nic(&mut session, servers)?;
    carry_all(&mut session, &ids, &clients)?;
    let before = settled_memory(&mut session, &mut tool)?;
    let ids = all_to_nic(&mut session, measured)?;
    let fresh = memory(&mut tool)?;
    carry_all(&mut session, &ids, &clients[IDLE..])?;
    let used = settled_memory(&mut session, &mut tool)?;
    let each = |later: u64, earlier: u64| (later as f64 - earlier as f64) / ids.len() as f64;
    let all = |of: &[(String, u64)]| of.iter().map(|(_, bytes)| bytes).sum::<u64>();
    Ok(Idle {
        fresh: each(all(&fresh), all(&before)),
        used: each(all(&used), all(&before)),
        by_process: used
            .iter()
            .zip(&before)
            .map(|((name, later), (_, earlier))| (name.clone(), each(*later, *earlier)))
            .collect(),
    })
}

/// Moves connections to the NIC.
fn all_to_nic(session: &mut Session, servers: Vec<TcpStream>) -> Result<Vec<ConnectionId>> {
    let to_nic = |server| {
        let id = session.adopt(OwnedFd::from(server))?;
        move_to_nic(session, id)?;
        Ok(id)
    };
    servers.into_iter().map(to_nic).collect()
}

fn carry_all(session: &mut Session, ids: &[ConnectionId], clients: &[TcpStream]) -> Result<()> {
    ids.iter().zip(clients).try_for_each(|(id, client)| carry(session, *id, client))
}

fn move_to_nic(session: &mut Session, id: ConnectionId) -> Result<()> {
    loop {
        match session.move_to(id, Place::Nic) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            moved => return moved.context("moving an idle connection to the NIC"),
        }
    }
}

/// Sends bytes both ways and reads them.
fn carry(session: &mut Session, id: ConnectionId, client: &TcpStream) -> Result<()> {
    let (bytes, mut buffer) = (vec![0x5a; 1 << 14], vec![0; 1 << 16]);
    let done = |result: io::Result<usize>| match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        result => result,
    };
    // Sent, and received, by the program; sent, and received, by its peer.
    let (mut program, mut peer) = ([0; 2], [0; 2]);
    let deadline = monotonic_micros() + 10_000_000;
    while program[1] < peer[0] || peer[1] < program[0] || program[0] < CARRIED || peer[0] < CARRIED {
        if program[0] < CARRIED {
            program[0] += done(session.send(id, &bytes))?;
        }
        if peer[0] < CARRIED {
            peer[0] += done(socket::send(client.as_fd(), &bytes))?;
        }
        program[1] += done(session.receive(id, &mut buffer))?;
        peer[1] += done(socket::receive(client.as_fd(), &mut buffer))?;
        session.poll(Some(Duration::ZERO), &mut Vec::new())?;
        ensure!(monotonic_micros() < deadline, "a connection carries nothing: {program:?} {peer:?}");
    }
    Ok(())
}

/// Bytes of each process's memory once it has not become less for a while: what idle connections do not use goes back to the system.
fn settled_memory(session: &mut Session, tool: &mut Tool) -> Result<Vec<(String, u64)>> {
    let all = |of: &[(String, u64)]| of.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let mut least = memory(tool)?;
    let mut since = monotonic_micros();
    while monotonic_micros() - since < SETTLED {
        session.poll(Some(Duration::from_millis(100)), &mut Vec::new())?;
        let now = memory(tool)?;
        if all(&now) + (1 << 16) < all(&least) {
            since = monotonic_micros();
            least = now;
        }
    }
    Ok(least)
}

/// Bytes of each process's memory. What several have counts for each in part.
fn memory(tool: &mut Tool) -> Result<Vec<(String, u64)>> {
    let statistics = tool.statistics()?;
    let keeper = process::parent(statistics.agent_process).context("the agent has ended")?;
    let processes = [
        ("keeper", keeper),
        ("agent", statistics.agent_process),
        ("NIC", statistics.nic_process),
        ("program", std::process::id()),
    ];
    processes.into_iter().map(|(name, process)| Ok((name.to_owned(), proportional(process)?))).collect()
}

/// Bytes of a process's memory, of shared memory its share (`Pss`).
fn proportional(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).with_context(|| format!("no Pss in {path}"))?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}
