//! What many connections cost: a packet of one of a million, over one of 1024; and the memory of a connection that is
//! idle.
//!
//! The packets' wire is memory, as in [`crate::datapath`]; the connections are served in an order in which none comes
//! soon again.
//!
//! The idle connections are on the NIC of a test bed. [`WARM`] of them come first: what is allocated once for all
//! (rings, buffers, the heaps' first pages) is there after them, and what is freed again while a connection moves and
//! carries bytes lies free in the heaps. Then come [`BATCHES`] batches of [`BATCH`] connections each, far more than
//! have left free room. Each batch carries bytes, and is measured when all its connections are dormant. A connection's
//! bytes are what all batches have added, divided by their connections.
//!
//! Counted is the resident memory of keeper, agent, NIC and program that a file does not back: heaps, stacks and
//! anonymous mappings (`Pss_Anon`), and session and NIC memory (`Pss_Shmem`), a page that several processes map in
//! equal parts. Not counted are the pages of the program's file, which the system may drop; the kernel's memory for the
//! sockets; and the NIC's lookup and table of slots, which it allocates for all slots when it starts, 16 and 64 bytes
//! each, as far as they were touched by then.

use crate::bars::Bar;
use crate::datapath::{Bench, Workload};
use crate::status::StatusLine;
use anyhow::{Context, Result, ensure};
use baton_abi::layout::{Counter, nic, session};
use baton_bed::statistics::quantile;
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_linux::events::monotonic_micros;
use baton_linux::process::{self, raise_descriptor_limit};
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

/// Idle connections that come before those that are measured.
const WARM: usize = 1000;
/// Connections of a batch, and number of batches. All together fit into the first group of slots, whose pages are
/// ordinary ones, and are fewer than those from which a worker takes several frames at once, for which it allocates a
/// megabyte once for all.
const BATCH: usize = 1024;
const BATCHES: usize = 3;
const _: () = assert!(WARM + BATCHES * BATCH < 4096 && 4096 <= nic::GROUP);
/// Bytes that each of them has carried before, each way: more than its memory, so that all of that was used.
const CARRIED: usize = 512 << 10;
/// Microseconds for which all connections have been dormant when their memory counts as settled. The agent returns
/// pages that a connection does not use one or two seconds after its traffic, which wakes it up for two seconds at
/// least.
const SETTLED: u64 = 3_000_000;
/// Microseconds in which a batch must have settled. The agent returns the pages of 160 connections a second, and a NIC
/// makes each of them dormant again two to four seconds later.
const MOST_WAIT: u64 = 60_000_000;
/// What every connection has in shared memory: fewer bytes cannot be right.
const LEAST: usize = nic::SLOT_BYTES + session::BLOCK_BYTES;

/// The bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct ConnectionsReport {
    /// The larger number of connections: a million, or as many as there is memory for.
    pub many: u32,
    /// Nanoseconds a packet of 64 bytes at 1024 connections, medians; and at the larger number.
    pub nanos: [f64; 2],
    /// Least and greatest of the rounds' ratios.
    pub cost_spread: [f64; 2],
    /// The memory of idle connections.
    pub memory: IdleMemory,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// The memory alone.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// As in [`ConnectionsReport`].
    pub memory: IdleMemory,
    /// The figure with a bound.
    pub bars: Vec<Bar>,
}

/// Bytes of a connection on the NIC.
#[derive(Clone, Debug, Serialize)]
pub struct IdleMemory {
    /// Of one that has carried nothing, just after its move: the median batch.
    pub bytes_fresh: f64,
    /// Of one that has carried more than its memory holds, and is dormant: of each batch.
    pub batches: Vec<f64>,
    /// The same of all batches.
    pub bytes_idle: f64,
    /// Its parts: by process, bytes of the process's own, and of shared memory.
    pub by_process: Vec<(&'static str, [f64; 2])>,
}

/// Measures the memory alone. Needs root.
///
/// # Errors
/// If the NIC refuses a connection.
pub fn memory_alone() -> Result<MemoryReport> {
    let memory = idle_memory(&StatusLine::new())?;
    Ok(MemoryReport { bars: vec![bar(&memory)], memory })
}

fn bar(memory: &IdleMemory) -> Bar {
    Bar::most("connections.bytes_idle", 1024.0, memory.bytes_idle)
}

/// Measures both. Needs root.
///
/// # Errors
/// If the NIC refuses a connection.
pub fn run(rounds: usize) -> Result<ConnectionsReport> {
    let status = StatusLine::new();
    let memory = idle_memory(&status)?;
    let many = MANY.min(u32::try_from(available_memory()? * 3 / 4 / EACH).unwrap_or(MANY));
    status.show(format_args!("making {FEW} and {many} connections"));
    let mut benches = [Bench::with_buffers(FEW, BUFFER)?, Bench::with_buffers(many, BUFFER)?];
    let (mut nanos, mut next) = ([Vec::new(), Vec::new()], [0, 0]);
    // The first round is for the caches.
    let rounds = rounds.max(1);
    for round in 0..=rounds {
        for at in 0..2 {
            status.show(format_args!("packets of {} connections: round {round} of {rounds}", [FEW, many][at]));
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
        bars: vec![Bar::most("connections.cost_ratio_1m", 2.0, quantile(&mut ratios, 0.5)), bar(&memory)],
        memory,
    })
}

/// Bytes of memory that the system could still give.
fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).context("no MemAvailable in /proc/meminfo")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

fn idle_memory(status: &StatusLine) -> Result<IdleMemory> {
    let all = WARM + BATCHES * BATCH;
    let bed = Testbed::new(&TestbedSettings { slots: all, ..TestbedSettings::default() })?;
    raise_descriptor_limit();
    status.show(format_args!("memory of idle connections: making {all}"));
    let (mut servers, clients) = connect_pairs(&bed, all, false)?;
    let mut idlers = Idlers {
        session: Session::connect(&bed.socket())?,
        tool: bed.tool()?,
        // The bench's own memory is there before anything is measured.
        ids: vec![ConnectionId::MAX; all],
        on_nic: 0,
        status,
    };
    let mut fresh = Vec::new();
    let mut settled = Vec::new();
    for connections in std::iter::once(WARM).chain([BATCH; BATCHES]) {
        let clients = &clients[idlers.on_nic..][..connections];
        idlers.move_to_nic(servers.drain(..connections))?;
        fresh.push(idlers.memory()?);
        idlers.carry(clients)?;
        settled.push(idlers.settled_memory()?);
    }
    let added = |later: &Footprint, earlier: &Footprint| (later.bytes() - earlier.bytes()) / BATCH as f64;
    let batches: Vec<f64> = settled.windows(2).map(|pair| added(&pair[1], &pair[0])).collect();
    let mut fresh: Vec<f64> = fresh[1..].iter().zip(&settled).map(|(fresh, before)| added(fresh, before)).collect();
    let (first, last) = (&settled[0], &settled[BATCHES]);
    let each = |bytes: f64| bytes / (BATCHES * BATCH) as f64;
    let bytes_idle = each(last.bytes() - first.bytes());
    ensure!(
        bytes_idle >= LEAST as f64,
        "measured {bytes_idle} bytes for an idle connection ({batches:?}), but its slot and its block alone take {LEAST}: \
         the bench counts too little"
    );
    let by_process = last
        .0
        .iter()
        .zip(&first.0)
        .map(|((name, later), (_, earlier))| (*name, [0, 1].map(|kind| each(later[kind] - earlier[kind]))));
    Ok(IdleMemory { bytes_fresh: quantile(&mut fresh, 0.5), by_process: by_process.collect(), batches, bytes_idle })
}

/// A program whose connections become idle.
struct Idlers<'a> {
    session: Session,
    tool: Tool,
    /// The numbers of the connections, of which this many are on the NIC.
    ids: Vec<ConnectionId>,
    on_nic: usize,
    status: &'a StatusLine,
}

impl Idlers<'_> {
    /// Moves connections to the NIC.
    fn move_to_nic(&mut self, servers: impl Iterator<Item = TcpStream>) -> Result<()> {
        for server in servers {
            let id = self.session.adopt(OwnedFd::from(server))?;
            move_to_nic(&mut self.session, id)?;
            self.ids[self.on_nic] = id;
            self.on_nic += 1;
            self.show(self.on_nic, "on the NIC");
        }
        Ok(())
    }

    /// Says how many connections have got so far.
    fn show(&self, connections: usize, are: &str) {
        self.status.update(format_args!("memory of idle connections: {connections} of {} {are}", self.ids.len()));
    }

    /// Lets the connections that came last carry bytes to and from their clients.
    fn carry(&mut self, clients: &[TcpStream]) -> Result<()> {
        let last = &self.ids[..self.on_nic][self.on_nic - clients.len()..];
        for (at, (id, client)) in last.iter().zip(clients).enumerate() {
            carry(&mut self.session, *id, client)?;
            self.show(self.on_nic - clients.len() + at + 1, "have carried bytes");
        }
        Ok(())
    }

    /// The memory once all connections are dormant and stay so.
    fn settled_memory(&mut self) -> Result<Footprint> {
        let begin = monotonic_micros();
        let mut awake_at = begin;
        loop {
            self.session.poll(Some(Duration::from_millis(100)), &mut Vec::new())?;
            let dormant = self.tool.statistics()?.counters.get(Counter::Dormant as usize).copied().unwrap_or(0);
            let now = monotonic_micros();
            self.show(dormant as usize, "dormant");
            if dormant != self.on_nic as u64 {
                awake_at = now;
            } else if now - awake_at >= SETTLED {
                return self.memory();
            }
            ensure!(now - begin < MOST_WAIT, "of {} idle connections only {dormant} are dormant", self.on_nic);
        }
    }

    /// The memory of all processes now.
    fn memory(&mut self) -> Result<Footprint> {
        let statistics = self.tool.statistics()?;
        let keeper = process::parent(statistics.agent_process).context("the agent has ended")?;
        let processes = [
            ("keeper", keeper),
            ("agent", statistics.agent_process),
            ("NIC", statistics.nic_process),
            ("program", std::process::id()),
        ];
        processes.into_iter().map(|(name, process)| Ok((name, resident(process)?))).collect::<Result<_>>().map(Footprint)
    }
}

/// Bytes of each process's memory: its own, and its part of shared memory.
struct Footprint(Vec<(&'static str, [f64; 2])>);

impl Footprint {
    /// Bytes of all.
    fn bytes(&self) -> f64 {
        self.0.iter().flat_map(|(_, bytes)| bytes).sum()
    }
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

/// Resident bytes of a process that no file backs: its own, and its part of shared memory.
fn resident(process: u32) -> Result<[f64; 2]> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let bytes = |name: &str| -> Result<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name} in {path}"))?;
        Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
    };
    Ok([bytes("Pss_Anon:")?, bytes("Pss_Shmem:")?])
}
