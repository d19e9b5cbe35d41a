//! Placement by heat: a NIC with room for a quarter of the connections, whose rates follow Zipf's law and change all at
//! once from time to time.

use crate::bars::Bar;
use crate::status::StatusLine;
use anyhow::{Context, Result, ensure};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, connect_pairs};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_linux::events::{monotonic_micros, thread_nanos};
use baton_linux::{process, socket};
use baton_offloads::{Limits, Offloads};
use baton_policy::{Demand, Heat, Place as At, Sample, WORTH};
use baton_protocol::program::Place;
use baton_sim::Rng;
use serde::Serialize;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Connections, and how many of them the NIC has room for.
const CONNECTIONS: usize = 1024;
const ROOM: usize = 256;
/// Requests a second on all connections together, whether they are answered or not, and bytes of a request and of its
/// answer.
const REQUESTS: u64 = 20_000;
const BYTES: usize = 200;

/// Microseconds in which the hottest have to be on the NIC, after the start and after a shift; those that follow, in
/// which moves of a steady load are counted; and between two looks at where connections are.
const SETTLING: u64 = 3_000_000;
const STEADY: u64 = 4_000_000;
const LOOK: u64 = 250_000;

/// Connections, on a NIC with room for a quarter of them, between which the policy decides on its own; whose they are;
/// and how often, each after as many microseconds.
const MANY: u64 = 10_000;
const USERS: u32 = 3;
const DECISIONS: u64 = 40;
const BETWEEN: u64 = 500_000;

/// The bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct HeatReport {
    /// Connections, and how many the NIC has room for.
    pub connections: usize,
    /// See there.
    pub room: usize,
    /// What the NIC's connections carry over what the hottest carry, three seconds after the start and after each shift
    /// of the rates.
    pub share: Vec<f64>,
    /// Moves a second in those three seconds, and in the steady seconds that follow.
    pub shift_moves: Vec<f64>,
    /// See there.
    pub steady_moves: Vec<f64>,
    /// The agent's processor time in the steady seconds, its moves included: share of a processor.
    pub agent: f64,
    /// Processor time that the policy takes to decide between ten thousand connections, twice a second: share of one.
    pub decision: f64,
    /// Requests that were answered, over those made.
    pub answered: f64,
    /// Commands of the agent's beyond what the NIC had announced.
    pub exceeded: u64,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// The load, shared by the threads.
struct Load {
    /// The rank of connection `n` is (n + shift) modulo their number.
    shift: AtomicUsize,
    ends: AtomicBool,
    made: AtomicU64,
    answered: AtomicU64,
}

impl Load {
    fn weight(&self, connection: usize) -> f64 {
        1.0 / (1 + (connection + self.shift.load(Ordering::Relaxed)) % CONNECTIONS) as f64
    }

    /// What a set of connections carries, over what the hottest carry.
    fn share(&self, connections: impl Iterator<Item = usize>) -> f64 {
        let best: f64 = (1..=ROOM).map(|rank| 1.0 / rank as f64).sum();
        connections.map(|connection| self.weight(connection)).sum::<f64>() / best
    }
}

/// Measures `shifts` shifts of the rates.
///
/// # Errors
/// If the test bed cannot be made, or a connection breaks.
pub fn run(shifts: usize) -> Result<HeatReport> {
    let limits = Limits { connections: Some(ROOM as u32), ..Limits::default() };
    let settings =
        TestbedSettings { beside: true, offloads: Offloads { limits, ..Offloads::default() }, ..TestbedSettings::default() };
    let status = StatusLine::new();
    status.show(format_args!("{CONNECTIONS} connections are made"));
    let bed = Testbed::new(&settings)?;
    let (servers, clients) = connect_pairs(&bed, CONNECTIONS, false)?;
    let load =
        Load { shift: AtomicUsize::new(0), ends: AtomicBool::new(false), made: AtomicU64::new(0), answered: AtomicU64::new(0) };
    let (load, socket) = (&load, bed.socket());
    std::thread::scope(|threads| {
        let program = threads.spawn(move || serve(&socket, servers, load));
        let peer = threads.spawn(move || ask(&clients, load));
        let measured = measure(&bed, load, shifts, &status);
        load.ends.store(true, Ordering::Relaxed);
        let joined = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| thread.join().unwrap_or_else(|_| Ok(()));
        joined(program).context("the program")?;
        joined(peer).context("its peers")?;
        measured
    })
}

/// The program: answers each request with as many bytes.
fn serve(socket: &std::path::Path, servers: Vec<TcpStream>, load: &Load) -> Result<()> {
    let mut session = Session::connect(socket)?;
    let mut ids = Vec::new();
    for server in servers {
        let id = session.adopt(OwnedFd::from(server))?;
        // Where there is no room it waits for some.
        let _ = session.move_to(id, Place::Nic);
        ids.push(id);
    }
    let (mut ready, mut owed) = (ids, vec![0usize; CONNECTIONS]);
    while !load.ends.load(Ordering::Relaxed) {
        for id in std::mem::take(&mut ready) {
            answer(&mut session, id, &mut owed[id as usize])?;
        }
        session.poll(Some(Duration::from_millis(100)), &mut ready)?;
    }
    Ok(())
}

/// Reads and answers what there is. `owed`: bytes that are still to be sent.
fn answer(session: &mut Session, id: ConnectionId, owed: &mut usize) -> Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match session.receive(id, &mut buffer) {
            Ok(0) => return Ok(()),
            Ok(bytes) => *owed += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error.into()),
        }
    }
    while *owed > 0 {
        match session.send(id, &buffer[..(*owed).min(buffer.len())]) {
            Ok(sent) => *owed -= sent,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The peers: each connection gets requests at its own rate, however late the answers come.
fn ask(clients: &[TcpStream], load: &Load) -> Result<()> {
    let sums: Vec<f64> = (1..=CONNECTIONS)
        .scan(0.0, |sum, rank| {
            *sum += 1.0 / rank as f64;
            Some(*sum)
        })
        .collect();
    let (mut rng, began) = (Rng::new(7), monotonic_micros());
    let (mut made, mut answered, mut buffer) = (0, 0, [0; 4096]);
    while !load.ends.load(Ordering::Relaxed) {
        let due = (monotonic_micros() - began) * REQUESTS / 1_000_000;
        while made < due {
            made += 1;
            let drawn = rng.below(1 << 30) as f64 / f64::from(1u32 << 30) * sums[CONNECTIONS - 1];
            let rank = sums.partition_point(|sum| *sum < drawn).min(CONNECTIONS - 1);
            let connection = (rank + CONNECTIONS - load.shift.load(Ordering::Relaxed)) % CONNECTIONS;
            let client = clients[connection].as_fd();
            match socket::send(client, &buffer[..BYTES]) {
                Ok(_) => {}
                // It is made nevertheless: nobody waits here. And the program ends with the load.
                Err(error) if error.kind() == ErrorKind::WouldBlock || load.ends.load(Ordering::Relaxed) => {}
                Err(error) => return Err(error.into()),
            }
            match read_all(client, &mut buffer) {
                Ok(bytes) => answered += bytes,
                // The program ends with the load.
                Err(_) if load.ends.load(Ordering::Relaxed) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        load.made.store(made, Ordering::Relaxed);
        load.answered.store(answered / BYTES as u64, Ordering::Relaxed);
        // Waits: until the next requests are due, some at a time.
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn read_all(client: std::os::fd::BorrowedFd<'_>, buffer: &mut [u8]) -> Result<u64> {
    let mut bytes = 0;
    loop {
        match socket::receive(client, buffer) {
            Ok(0) => anyhow::bail!("a connection was closed"),
            Ok(got) => bytes += got as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(bytes),
            Err(error) => return Err(error.into()),
        }
    }
}

fn measure(bed: &Testbed, load: &Load, shifts: usize, status: &StatusLine) -> Result<HeatReport> {
    let mut tool = bed.tool()?;
    let mut report = HeatReport {
        connections: CONNECTIONS,
        room: ROOM,
        share: Vec::new(),
        shift_moves: Vec::new(),
        steady_moves: Vec::new(),
        agent: 0.0,
        decision: decision(),
        answered: 0.0,
        exceeded: 0,
        bars: Vec::new(),
    };
    // The load has begun, and the NIC is full.
    while on_nic(&mut tool)?.len() < ROOM {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (mut agent, mut steady) = (0.0, 0);
    for shift in 0..=shifts {
        status.show(format_args!("shift {shift} of {shifts}"));
        load.shift.store(shift * 397 % CONNECTIONS, Ordering::Relaxed);
        let moves = phase(&mut tool, SETTLING)?;
        report.shift_moves.push(moves);
        report.share.push(load.share(on_nic(&mut tool)?.into_iter()));
        let process = tool.statistics()?.agent_process;
        let used = || process::cpu_nanos(process).context("the agent's processor time");
        let before = used()?;
        report.steady_moves.push(phase(&mut tool, STEADY)?);
        agent += (used()? - before) as f64 / 1e9;
        steady += STEADY;
    }
    status.clear();
    let statistics = tool.statistics()?;
    report.agent = agent / (steady as f64 / 1e6);
    report.exceeded = statistics.counters[Counter::Exceeded as usize];
    report.answered = load.answered.load(Ordering::Relaxed) as f64 / load.made.load(Ordering::Relaxed).max(1) as f64;
    ensure!(statistics.failed_moves + statistics.lost == 0, "connections were lost: {statistics:?}");
    let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    report.bars = vec![
        Bar::least("heat.share", 0.9, report.share.iter().copied().fold(f64::INFINITY, f64::min)),
        Bar::most("heat.moves_per_second", 50.0, most(&report.steady_moves)),
        Bar::most("heat.moves_per_second_in_a_shift", 200.0, most(&report.shift_moves)),
        Bar::most("heat.decision", 0.01, report.decision),
        Bar::most("heat.exceeded", 0.0, report.exceeded as f64),
    ];
    Ok(report)
}

/// What the policy's decisions take of a processor, with weights by Zipf's law that shift from time to time.
fn decision() -> f64 {
    let (mut heat, mut there, mut took) = (Heat::default(), vec![false; MANY as usize], 0);
    let mut carried = vec![0u32; MANY as usize];
    for decision in 1..=DECISIONS {
        let shift = decision / 10 * 3_970;
        let sample = |(key, carried): (u64, &mut u32)| {
            *carried = carried.wrapping_add((1_000_000_000 / (1 + (key + shift) % MANY)) as u32);
            let (place, pages) = if there[key as usize] { (At::Nic, 128) } else { (At::Waits, 0) };
            Sample { key, place, carried: Some(*carried), pages, hot_from: 0, worth: WORTH, user: key as u32 % USERS }
        };
        let samples: Vec<Sample> = (0..).zip(&mut carried).map(sample).collect();
        let free = (MANY / 4) as usize - there.iter().filter(|there| **there).count();
        let began = thread_nanos();
        let choice = heat.choose(decision * BETWEEN, &samples, Demand { free, swaps: free == 0, ..Demand::default() });
        took += thread_nanos() - began;
        choice.leave.iter().for_each(|key| there[*key as usize] = false);
        choice.come.iter().for_each(|key| there[*key as usize] = true);
    }
    took as f64 / 1e3 / (DECISIONS * BETWEEN) as f64
}

/// Lets a time pass, in microseconds. Returns the moves made a second.
fn phase(tool: &mut Tool, time: u64) -> Result<f64> {
    let (began, before) = (monotonic_micros(), tool.statistics()?.moves);
    while monotonic_micros() < began + time {
        // Waits: the load goes on, and is looked at when the time is over.
        std::thread::sleep(Duration::from_micros(LOOK));
    }
    Ok((tool.statistics()?.moves - before) as f64 / ((monotonic_micros() - began) as f64 / 1e6))
}

/// The connections that are on the NIC, by number.
fn on_nic(tool: &mut Tool) -> Result<Vec<usize>> {
    let there = tool.connections()?.into_iter().filter(|info| info.place == Place::Nic);
    Ok(there.map(|info| info.connection as usize).collect())
}
