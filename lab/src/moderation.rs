//! Interrupt moderation: its cost to a ping-pong and its saving in a bulk transfer, between two kernels through the
//! NIC, and with the receiving program's connections on the NIC. Off and adaptive in turn, on the same connections.

use crate::bars::Bar;
use crate::lro::{Receiver, send};
use anyhow::{Context, Result, anyhow, bail};
use baton_abi::layout::Counter;
use baton_bed::statistics;
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::{ConnectionId, Session};
use baton_linux::events::{Poller, Trigger, monotonic_micros, monotonic_nanos};
use baton_linux::socket;
use baton_moderation::Mode;
use baton_offloads::Offloads;
use baton_protocol::program::{Ask, Place, Reply};
use serde::Serialize;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Exchanges of a block before the measurement, and measured ones; and blocks of each mode.
const WARMING: usize = 200;
const EXCHANGES: usize = 500;
const BLOCKS: usize = 8;
/// Microseconds of a bulk transfer, and those before its measurement.
const BULK: u64 = 500_000;
/// Number of its connections.
const CONNECTIONS: usize = 4;

const MODES: [Mode; 2] = [Mode::Off, Mode::Adaptive];

/// Who receives the moderated notifications.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Whom {
    /// The kernel, for frames of its connections: interrupts.
    Kernel,
    /// A program, for data on its connections that are on the NIC: doorbells.
    Program,
}

/// Figures of one receiver in one mode, in one round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    /// Who receives the notifications.
    pub whom: Whom,
    /// The moderation mode.
    pub mode: Mode,
    /// Median round trip of 64 bytes, microseconds.
    pub round_trip: f64,
    /// Gb/s of four connections.
    pub gigabits: f64,
    /// Frames per interrupt or doorbell.
    pub frames_each: f64,
    /// Interrupts or doorbells per MB.
    pub per_mb: f64,
}

/// All rounds, and the figures with bounds.
#[derive(Clone, Debug, Serialize)]
pub struct ModerationReport {
    /// Each round of each receiver and mode.
    pub rounds: Vec<Measured>,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

fn bed() -> Result<Testbed> {
    // The wire takes no large frames, so a bulk transfer consists of many.
    let link = baton_protocol::nic::LinkSettings { delay: 10, ..Default::default() };
    Testbed::new(&TestbedSettings { threaded_napi: true, link, ..TestbedSettings::default() })
}

fn set(bed: &Testbed, whom: Whom, mode: Mode) -> Result<()> {
    let offloads = match whom {
        Whom::Kernel => Offloads { moderation: mode, ..Offloads::default() },
        Whom::Program => Offloads { doorbells: mode, ..Offloads::default() },
    };
    match bed.tool()?.ask(Ask::SetOffloads { nic: 0, offloads: Box::new(offloads) })? {
        Reply::Done => Ok(()),
        other => bail!("moderation was not set: {other:?}"),
    }
}

/// The receiving program: the first connection is for the ping-pong, the others for the bulk transfer.
enum Program {
    InKernel(Vec<TcpStream>),
    OnNic(Box<Session>, Vec<ConnectionId>),
}

impl Program {
    fn new(whom: Whom, bed: &Testbed, servers: Vec<TcpStream>) -> Result<Program> {
        if whom == Whom::Kernel {
            return Ok(Program::InKernel(servers));
        }
        let mut session = Session::connect(&bed.socket())?;
        let ids = servers.into_iter().map(|server| session.adopt(OwnedFd::from(server))).collect::<io::Result<Vec<_>>>()?;
        ids.iter().try_for_each(|id| session.move_to(*id, Place::Nic)).context("moving to the NIC")?;
        Ok(Program::OnNic(Box::new(session), ids))
    }

    fn echo(&mut self, over: &AtomicBool) -> Result<()> {
        match self {
            Program::InKernel(servers) => echo(&servers[0], over),
            Program::OnNic(session, ids) => echo_on_nic(session, ids[0], over),
        }
    }

    /// Receives until a time. Returns bytes.
    fn receive(&mut self, until: u64) -> Result<u64> {
        match self {
            Program::InKernel(servers) => {
                let mut receiver = Receiver::new(&servers[1..], false)?;
                receiver.run(until, u64::MAX)?;
                Ok(receiver.total())
            }
            Program::OnNic(session, ids) => receive_on_nic(session, &ids[1..], until),
        }
    }
}

/// Answers all that arrives.
fn echo(server: &TcpStream, over: &AtomicBool) -> Result<()> {
    let poller = Poller::new()?;
    poller.add(server.as_fd(), 0, Trigger::Readable)?;
    let (mut buffer, mut tokens) = ([0; 4096], Vec::new());
    while !over.load(Ordering::Relaxed) {
        poller.wait(Some(Duration::from_millis(10)), &mut tokens)?;
        tokens.clear();
        match socket::receive(server.as_fd(), &mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => _ = socket::send(server.as_fd(), &buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn echo_on_nic(session: &mut Session, id: ConnectionId, over: &AtomicBool) -> Result<()> {
    let (mut buffer, mut ready) = ([0; 4096], Vec::new());
    while !over.load(Ordering::Relaxed) {
        session.poll(Some(Duration::from_millis(10)), &mut ready)?;
        ready.clear();
        match session.receive(id, &mut buffer) {
            Ok(count) => _ = session.send(id, &buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn receive_on_nic(session: &mut Session, ids: &[ConnectionId], until: u64) -> Result<u64> {
    let (mut buffer, mut ready, mut got) = (vec![0; 1 << 18], ids.to_vec(), 0);
    while monotonic_micros() < until {
        for id in ready.drain(..) {
            loop {
                match session.receive(id, &mut buffer) {
                    Ok(0) => return Err(anyhow!("the sender closed")),
                    Ok(count) => got += count as u64,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("the receiver"),
                }
            }
        }
        session.poll(Some(Duration::from_millis(10)), &mut ready)?;
    }
    Ok(got)
}

/// One block of exchanges, added to `samples` in microseconds.
fn round_trips(client: &TcpStream, samples: &mut Vec<f64>) -> Result<()> {
    let poller = Poller::new()?;
    poller.add(client.as_fd(), 0, Trigger::Readable)?;
    let (mut buffer, mut tokens) = ([0; 64], Vec::new());
    for number in 0..WARMING + EXCHANGES {
        let started = monotonic_nanos();
        socket::send(client.as_fd(), &[7; 64])?;
        let mut got = 0;
        while got < 64 {
            match socket::receive(client.as_fd(), &mut buffer) {
                Ok(0) => return Err(anyhow!("the echo ended")),
                Ok(count) => got += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poller.wait(Some(Duration::from_secs(10)), &mut tokens)?;
                    tokens.clear();
                }
                Err(error) => return Err(error.into()),
            }
        }
        if number >= WARMING {
            samples.push((monotonic_nanos() - started) as f64 / 1000.0);
        }
    }
    Ok(())
}

/// Median round trips in each of the modes, block by block in turn.
fn ping_pong(bed: &Testbed, whom: Whom, program: &mut Program, client: &TcpStream) -> Result<[f64; 2]> {
    let over = AtomicBool::new(false);
    let mut samples = [Vec::new(), Vec::new()];
    std::thread::scope(|scope| {
        let server = scope.spawn(|| program.echo(&over));
        let mut measure = || -> Result<()> {
            for block in 0..BLOCKS * MODES.len() {
                set(bed, whom, MODES[block % 2])?;
                round_trips(client, &mut samples[block % 2])?;
            }
            Ok(())
        };
        let measured = measure();
        over.store(true, Ordering::Relaxed);
        server.join().map_err(|_| anyhow!("the echo panicked"))?.context("the echo")?;
        measured
    })?;
    Ok(samples.map(|mut samples| statistics::quantile(&mut samples, 0.5)))
}

/// Gb/s, frames per interrupt or doorbell, and those per MB, in each of the modes.
fn bulk(bed: &Testbed, whom: Whom, program: &mut Program, clients: &[TcpStream]) -> Result<[[f64; 3]; 2]> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(clients, false, &over));
        let mut measure = |mode: Mode| -> Result<[f64; 3]> {
            set(bed, whom, mode)?;
            program.receive(monotonic_micros() + BULK / 2)?;
            let counted = || anyhow::Ok(bed.tool()?.statistics()?.counters);
            let (before, started) = (counted()?, monotonic_micros());
            let bytes = program.receive(started + BULK)? as f64;
            let (after, took) = (counted()?, (monotonic_micros() - started) as f64);
            let count = |counter: Counter| (after[counter as usize] - before[counter as usize]) as f64;
            let (notifications, frames) = match whom {
                Whom::Kernel => (Counter::Interrupts, Counter::HostSent),
                Whom::Program => (Counter::Doorbells, Counter::Segments),
            };
            let notifications = count(notifications).max(1.0);
            Ok([bytes * 8.0 / took / 1000.0, count(frames) / notifications, notifications / (bytes / 1e6)])
        };
        let measured = measure(MODES[0]).and_then(|off| Ok([off, measure(MODES[1])?]));
        over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        measured
    })
}

fn round(whom: Whom) -> Result<[Measured; 2]> {
    let bed = bed()?;
    let (servers, clients) = connect_pairs(&bed, 1 + CONNECTIONS, false)?;
    let mut program = Program::new(whom, &bed, servers)?;
    let round_trips = ping_pong(&bed, whom, &mut program, &clients[0])?;
    let bulks = bulk(&bed, whom, &mut program, &clients[1..])?;
    Ok(std::array::from_fn(|at| {
        let [gigabits, frames_each, per_mb] = bulks[at];
        Measured { whom, mode: MODES[at], round_trip: round_trips[at], gigabits, frames_each, per_mb }
    }))
}

/// Runs this many rounds. `each` is called with every measurement.
///
/// # Errors
/// If a test bed cannot be made.
pub fn run(rounds: usize, mut each: impl FnMut(&Measured)) -> Result<ModerationReport> {
    let mut all = Vec::new();
    for _ in 0..rounds.max(1) {
        for whom in [Whom::Kernel, Whom::Program] {
            let measured = round(whom)?;
            measured.iter().for_each(&mut each);
            all.push(measured);
        }
    }
    // Adaptive over off, in the same round; the median of the rounds.
    let ratio = |whom: Whom, figure: fn(&Measured) -> f64| {
        let rounds = all.iter().filter(|[off, _]| off.whom == whom);
        statistics::quantile(&mut rounds.map(|[off, adaptive]| figure(adaptive) / figure(off)).collect::<Vec<_>>(), 0.5)
    };
    let bars = vec![
        Bar::most("moderation.pingpong_ratio", 1.1, ratio(Whom::Kernel, |one| one.round_trip)),
        Bar::most("moderation.bulk_interrupts_ratio", 0.1, ratio(Whom::Kernel, |one| one.per_mb)),
        Bar::most("moderation.doorbell_pingpong_ratio", 1.1, ratio(Whom::Program, |one| one.round_trip)),
        // For comparison, without a bound: a program that is busy gets no doorbells.
        Bar::least("moderation.bulk_doorbells_ratio", 0.0, ratio(Whom::Program, |one| one.per_mb)),
    ];
    Ok(ModerationReport { rounds: all.into_iter().flatten().collect(), bars })
}

/// A line of the table.
pub fn line(one: &Measured) -> String {
    let what = match one.whom {
        Whom::Kernel => "interrupts",
        Whom::Program => "doorbells",
    };
    format!(
        "{what:<10} {:<9} ping-pong {:>6.1} us   bulk {:>5.2} Gb/s, {:>5.1} frames each, {:>6.1} {what}/MB",
        format!("{:?}", one.mode).to_lowercase(),
        one.round_trip,
        one.gigabits,
        one.frames_each,
        one.per_mb
    )
}
