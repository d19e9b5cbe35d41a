//! Moves under load: random connections at random moments, every byte checked on both sides.

mod ends;
mod faults;
mod link;

use crate::status::StatusLine;
use anyhow::{Result, bail};
use baton_abi::layout::Counter;
use baton_bed::probe;
use baton_bed::statistics::Percentiles;
use baton_bed::testbed::{Testbed, TestbedSettings, connect_pairs};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_linux::events::monotonic_micros;
use baton_linux::tcp_info::TcpInfo;
use baton_linux::{process, socket};
use baton_offloads::{Limits, Offloads};
use baton_protocol::program::{Ask, Place, Reply, Statistics};
use baton_sim::{Rng, stream};
use link::Link;
use serde::Serialize;
use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Settings of a soak.
#[derive(Clone, Debug)]
pub struct SoakSettings {
    /// Connections.
    pub connections: usize,
    /// Moves.
    pub moves: u64,
    /// Moves that are asked for at a time, no more than one of a connection.
    pub at_once: usize,
    /// Seed of all random choices.
    pub seed: u64,
    /// Use IPv6.
    pub ipv6: bool,
    /// Partial offload: the NIC keeps only the connections' fast path.
    pub fast_path: bool,
    /// With partial offload: go on until so many times a connection has left its fast path or come back to it.
    pub transitions: u64,
    /// Number of times to kill the NIC.
    pub kill_nic: u32,
    /// Number of times to kill the agent, and with it the NIC.
    pub kill_agent: u32,
    /// Number of times to take the link down, and up again.
    pub link_down: u32,
    /// Number of times to stop the NIC for good. With any, all faults are 4 s apart, and what follows each is measured.
    pub stop_nic: u32,
    /// Instead of random moves: all connections are wanted on the NIC, which crashes whenever the first one is there.
    pub poison: bool,
    /// In the end the peers send their FINs first, for which the NIC has a policy, and the program goes on to send.
    pub half_closes: bool,
    /// The test bed, with its link.
    pub bed: TestbedSettings,
    /// Print progress to standard error.
    pub progress: bool,
}

/// Results of a soak.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SoakReport {
    /// Connections used.
    pub connections: usize,
    /// Moves done.
    pub moves: u64,
    /// Times that a connection has left its fast path, and has come back to it (partial offload).
    pub transitions: u64,
    /// Share of the segments that the NIC processed itself, of those of all connections on it.
    pub fast_path_share: f64,
    /// Share of the moves at whose request bytes were in flight in both directions: written by one program, not read by
    /// the other.
    pub in_flight_share: f64,
    /// Moves of the connection that moved least.
    pub min_moves_per_connection: u64,
    /// Moves from one NIC to another, of those done.
    pub moves_between_nics: u64,
    /// Moves that were called off for a transient reason.
    pub deferred: u64,
    /// Bytes checked on both sides.
    pub bytes_verified: u64,
    /// Bytes that were wrong.
    pub mismatches: u64,
    /// Connections that the peer saw reset or broken.
    pub resets_seen_by_peer: u64,
    /// Moves that lost their connection.
    pub failed_moves: u64,
    /// Segments that the peer retransmitted although we had received them.
    pub spurious_retransmits_by_peer: u64,
    /// Times that the NIC was killed.
    pub kills: u32,
    /// Times that the link went down.
    pub link_downs: u32,
    /// Faults (deaths and stops) that were 4 s apart.
    pub faults: u32,
    /// Of the connections whose last requested place is the NIC: the share that is there 3 s after a fault, or at the
    /// end, or once a NIC with limits has none any more.
    pub back_on_nic: Option<f64>,
    /// Whether the connection that kills the NIC stays in the kernel, with that as the reason.
    pub poison_stays: Option<bool>,
    /// Connections that were on the NIC when it was killed, and went on in the kernel.
    pub connections_recovered: u64,
    /// Connections that were lost with the NIC.
    pub connections_lost: u64,
    /// Moves that the NIC was too full for.
    pub full: u64,
    /// Connections returned from a full NIC since others carried more.
    pub colder: u64,
    /// Commands of the agent's beyond what a NIC had announced.
    pub exceeded: u64,
    /// Connections that the NIC has given back since their peers' FINs had come, and those that it was to give back and
    /// still had a minute later.
    pub peer_fins: u64,
    /// See there.
    pub kept_after_fin: u64,
    /// Largest gap in the answers to a probe on a moving connection, minus the median gap of one that does not move;
    /// microseconds. With faults that are 4 s apart: of the streams, after each fault.
    pub blackout_us: Percentiles,
    /// The gaps of the connection that does not move.
    pub unmoved_gap_us: Percentiles,
    /// Moves per second, while the streams go on.
    pub moves_per_second: f64,
    /// The agent's CPU time of a move in microseconds, if no process was killed.
    pub agent_us_per_move: f64,
    /// Share of all processors' time that the streams take while nothing moves.
    pub load: f64,
    /// Seconds of the whole soak.
    pub seconds: f64,
}

impl SoakReport {
    /// Whether nothing was lost, wrong or reset.
    pub fn is_clean(&self) -> bool {
        let carries = self.faults == 0 || {
            let usual = self.unmoved_gap_us.max;
            self.blackout_us.p99 <= usual + LONGEST_USUAL_BLACKOUT && self.blackout_us.max <= usual + LONGEST_BLACKOUT
        };
        let is_back = self.back_on_nic.is_none_or(|share| share >= LEAST_BACK) && self.poison_stays != Some(false);
        carries
            && is_back
            && self.mismatches == 0
            && self.resets_seen_by_peer == 0
            && self.failed_moves == 0
            && self.connections_lost == 0
            && self.exceeded == 0
            && self.kept_after_fin == 0
    }
}

/// What may follow a fault: microseconds without progress for all but a hundredth of the connections, and for each of
/// them, beyond those of connections that do not move; and the share of connections that are on the NIC again.
const LONGEST_USUAL_BLACKOUT: f64 = 1e6;
const LONGEST_BLACKOUT: f64 = 3e6;
const LEAST_BACK: f64 = 0.9;

/// Milliseconds between two turns of a program.
const TURN: u64 = 2;
/// Bytes that each side of each connection writes and reads per turn.
const CHUNK: usize = 2048;
/// Microseconds that a soak goes on for transitions alone.
const LONGEST_WAIT: u64 = 600_000_000;
/// Microseconds in which what was refused has to be on a NIC that has no limits any more.
const LONGEST_RETURN: u64 = 60_000_000;
/// Bytes that a reader leaves unread, so that both directions carry something at any time.
const BACKLOG: u64 = 6 * CHUNK as u64;

/// One direction's progress, shared by its two ends.
#[derive(Default)]
struct Direction {
    written: AtomicU64,
    read: AtomicU64,
    /// When something was read last, and the longest time without that; microseconds.
    moved_at: AtomicU64,
    gap: AtomicU64,
}

/// State that both programs share.
struct Shared {
    stop: AtomicBool,
    /// Programs that may still write.
    writing: AtomicU32,
    /// Programs that have read all that was written for them.
    drained: AtomicU32,
    /// Connections whose program has read its peer's end, and whether it may end them.
    half_closed: AtomicUsize,
    may_end: AtomicBool,
    to_b: Vec<Direction>,
    to_a: Vec<Direction>,
    mismatches: AtomicU64,
    broken: AtomicU64,
}

impl Shared {
    fn new(connections: usize) -> Self {
        let directions = || (0..connections).map(|_| Direction::default()).collect();
        Shared {
            stop: AtomicBool::new(false),
            writing: AtomicU32::new(2),
            drained: AtomicU32::new(0),
            half_closed: AtomicUsize::new(0),
            may_end: AtomicBool::new(false),
            to_b: directions(),
            to_a: directions(),
            mismatches: AtomicU64::new(0),
            broken: AtomicU64::new(0),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The operations that a program needs of a connection, wherever it is.
trait Pipe {
    fn send(&mut self, at: usize, bytes: &[u8]) -> io::Result<usize>;
    fn receive(&mut self, at: usize, out: &mut [u8]) -> io::Result<usize>;
    /// Ends the sending side.
    fn shut_down(&mut self, at: usize) -> io::Result<()>;
}

struct Offloadable {
    session: Session,
    ids: Vec<ConnectionId>,
}

impl Pipe for Offloadable {
    fn send(&mut self, at: usize, bytes: &[u8]) -> io::Result<usize> {
        self.session.send(self.ids[at], bytes)
    }

    fn receive(&mut self, at: usize, out: &mut [u8]) -> io::Result<usize> {
        self.session.receive(self.ids[at], out)
    }

    fn shut_down(&mut self, at: usize) -> io::Result<()> {
        self.session.shutdown(self.ids[at])
    }
}

struct Plain {
    sockets: Vec<TcpStream>,
}

impl Pipe for Plain {
    fn send(&mut self, at: usize, bytes: &[u8]) -> io::Result<usize> {
        socket::send(self.sockets[at].as_fd(), bytes)
    }

    fn receive(&mut self, at: usize, out: &mut [u8]) -> io::Result<usize> {
        socket::receive(self.sockets[at].as_fd(), out)
    }

    fn shut_down(&mut self, at: usize) -> io::Result<()> {
        socket::shutdown_write(self.sockets[at].as_fd())
    }
}

/// One end's streams: writes its own, reads and checks the other's.
struct Streams<'a> {
    outgoing: &'a [Direction],
    incoming: &'a [Direction],
    /// Keys of the outgoing and incoming streams, plus the connection's number.
    keys: (u64, u64),
    alive: Vec<bool>,
    shared: &'a Shared,
    buffer: Vec<u8>,
}

impl<'a> Streams<'a> {
    fn new(shared: &'a Shared, server: bool, seed: u64) -> Self {
        let (outgoing, incoming) = if server { (&shared.to_b, &shared.to_a) } else { (&shared.to_a, &shared.to_b) };
        let keys = if server { (seed << 20, (seed << 20) + (1 << 40)) } else { ((seed << 20) + (1 << 40), seed << 20) };
        let alive = vec![true; outgoing.len()];
        Streams { outgoing, incoming, keys, alive, shared, buffer: vec![0; 1 << 16] }
    }

    /// One turn of one connection.
    fn turn(&mut self, pipe: &mut impl Pipe, at: usize, draining: bool) {
        if !self.alive[at] {
            return;
        }
        let result = self.read_some(pipe, at, draining).and_then(|()| if draining { Ok(()) } else { self.write_some(pipe, at) });
        match result {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => self.note_broken(at, &error),
        }
    }

    fn note_broken(&mut self, at: usize, error: &io::Error) {
        self.alive[at] = false;
        self.shared.broken.fetch_add(1, Ordering::Relaxed);
        eprintln!("connection {at} broke: {error}");
    }

    fn write_some(&mut self, pipe: &mut impl Pipe, at: usize) -> io::Result<()> {
        let direction = &self.outgoing[at];
        let written = direction.written.load(Ordering::Relaxed);
        if written - direction.read.load(Ordering::Relaxed) > 16 * BACKLOG {
            return Ok(());
        }
        let piece = &mut self.buffer[..CHUNK];
        stream::fill(self.keys.0 + at as u64, written, piece);
        // Counted before the other side can have read it.
        direction.written.store(written + CHUNK as u64, Ordering::Release);
        let sent = pipe.send(at, piece);
        let done = *sent.as_ref().unwrap_or(&0) as u64;
        direction.written.store(written + done, Ordering::Release);
        sent.map(|_| ())
    }

    fn read_some(&mut self, pipe: &mut impl Pipe, at: usize, draining: bool) -> io::Result<()> {
        let direction = &self.incoming[at];
        let read = direction.read.load(Ordering::Relaxed);
        let waiting = direction.written.load(Ordering::Acquire) - read.min(direction.written.load(Ordering::Acquire));
        let want = if draining { self.buffer.len() } else { waiting.saturating_sub(BACKLOG) as usize };
        if want == 0 {
            return Ok(());
        }
        let want = want.min(self.buffer.len());
        let got = pipe.receive(at, &mut self.buffer[..want])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let wrong = stream::mismatches(self.keys.1 + at as u64, read, &self.buffer[..got]);
        self.shared.mismatches.fetch_add(wrong, Ordering::Relaxed);
        direction.read.store(read + got as u64, Ordering::Release);
        let now = monotonic_micros();
        let last = direction.moved_at.swap(now, Ordering::Relaxed);
        if last != 0 {
            direction.gap.fetch_max(now.saturating_sub(last), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether everything that was written to this end has been read, and no more comes.
    fn drained(&self) -> bool {
        self.shared.writing.load(Ordering::Acquire) == 0
            && self.incoming.iter().zip(&self.alive).all(|(direction, alive)| {
                !alive || direction.read.load(Ordering::Acquire) >= direction.written.load(Ordering::Acquire)
            })
    }
}

/// Runs a program's turns until it has to stop, then until nothing is in flight any more.
fn run_program(pipe: &mut impl Pipe, streams: &mut Streams<'_>) {
    let connections = streams.alive.len();
    let mut next = monotonic_micros();
    let mut deadline = None;
    loop {
        let draining = streams.shared.stopped();
        if draining {
            let limit = *deadline.get_or_insert_with(|| {
                streams.shared.writing.fetch_sub(1, Ordering::AcqRel);
                monotonic_micros() + 30_000_000
            });
            if streams.drained() || monotonic_micros() > limit {
                return;
            }
        }
        for at in 0..connections {
            streams.turn(pipe, at, draining);
        }
        next += TURN * 1000;
        let now = monotonic_micros();
        next = next.max(now + 100);
        std::thread::sleep(Duration::from_micros(next - now));
    }
}

/// Runs a soak.
///
/// # Errors
/// If the test bed cannot be made or the agent dies. Errors of connections are in the report.
pub fn run(settings: &SoakSettings) -> Result<SoakReport> {
    let started = monotonic_micros();
    let bed = Testbed::new(&settings.bed)?;
    let (servers, clients) = connect_pairs(&bed, settings.connections, settings.ipv6)?;
    let open = if settings.fast_path { Session::connect_for_fast_path } else { Session::connect };
    let mut session = open(&bed.socket())?;
    let number = session.number();
    let ids = servers.into_iter().map(|server| session.adopt(OwnedFd::from(server))).collect::<io::Result<Vec<_>>>()?;
    let shared = Arc::new(Shared::new(settings.connections));
    let peers: Vec<TcpStream> = clients.iter().map(TcpStream::try_clone).collect::<io::Result<_>>()?;

    let link = (settings.link_down > 0).then(|| Link::of(&bed, settings.ipv6)).transpose()?;
    let mut report = SoakReport { connections: settings.connections, ..SoakReport::default() };
    std::thread::scope(|scope| -> Result<()> {
        let (seed, half_closes) = (settings.seed, settings.half_closes);
        let server = {
            let shared = shared.clone();
            let ids = ids.clone();
            scope.spawn(move || {
                let (mut pipe, mut streams) = (Offloadable { session, ids }, Streams::new(&shared, true, seed));
                run_program(&mut pipe, &mut streams);
                if half_closes {
                    ends::end_program(&mut pipe, &mut streams);
                }
                pipe
            })
        };
        let client = {
            let shared = shared.clone();
            scope.spawn(move || {
                let (mut pipe, mut streams) = (Plain { sockets: clients }, Streams::new(&shared, false, seed));
                run_program(&mut pipe, &mut streams);
                if half_closes {
                    ends::end_peers(&mut pipe, &mut streams);
                }
            })
        };
        let mut tool = bed.tool()?;
        let mut observer = bed.tool()?;
        let moved = Mover::new(settings, &shared, number, &ids, link).run(&mut tool, &mut observer, &mut report);
        let moved = moved.and_then(|()| await_transitions(settings, &mut tool, report.transitions));
        shared.stop.store(true, Ordering::Relaxed);
        let moved = moved.and_then(|()| {
            let observed = half_closes.then(|| ends::observe(settings, &mut tool, number, &shared, &mut report));
            observed.unwrap_or(Ok(()))
        });
        shared.may_end.store(true, Ordering::Release);
        let pipe = server.join().map_err(|_| anyhow::anyhow!("the server's thread panicked"))?;
        client.join().map_err(|_| anyhow::anyhow!("the client's thread panicked"))?;
        moved?;
        let statistics = tool.statistics()?;
        report.count(&statistics);
        report.count_transitions(&statistics);
        for peer in &peers {
            report.spurious_retransmits_by_peer += TcpInfo::read(peer.as_fd()).map_or(0, |info| u64::from(info.dsack_dups));
        }
        drop(pipe);
        Ok(())
    })?;
    report.mismatches = shared.mismatches.load(Ordering::Relaxed);
    report.resets_seen_by_peer = shared.broken.load(Ordering::Relaxed);
    for (name, directions) in [("host A", &shared.to_a), ("host B", &shared.to_b)] {
        for (at, direction) in directions.iter().enumerate() {
            let (written, read) = (direction.written.load(Ordering::Acquire), direction.read.load(Ordering::Acquire));
            if written > read {
                eprintln!("connection {at}: {} of {written} bytes never reached {name}", written - read);
            }
        }
    }
    for direction in shared.to_a.iter().chain(&shared.to_b) {
        let (written, read) = (direction.written.load(Ordering::Acquire), direction.read.load(Ordering::Acquire));
        report.bytes_verified += read;
        // Bytes that never arrived count as wrong.
        report.mismatches += written.saturating_sub(read);
    }
    if report.faults == 0 && !settings.poison {
        measure_blackout(settings, &bed, &mut report)?;
    }
    report.seconds = (monotonic_micros() - started) as f64 / 1e6;
    Ok(report)
}

/// Lets the streams go on until the connections have left their fast path and come back to it often enough. `before`
/// were counted by agents that have died.
fn await_transitions(settings: &SoakSettings, tool: &mut Tool, before: u64) -> Result<()> {
    let deadline = monotonic_micros() + LONGEST_WAIT;
    loop {
        let mut report = SoakReport::default();
        report.count_transitions(&tool.statistics()?);
        let transitions = before + report.transitions;
        if transitions >= settings.transitions {
            return Ok(());
        }
        if monotonic_micros() > deadline {
            bail!("{transitions} of {} transitions: a link with --loss or --reorder makes more", settings.transitions);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Measures the blackout apart from the streams, which would be measured with it.
fn measure_blackout(settings: &SoakSettings, bed: &Testbed, report: &mut SoakReport) -> Result<()> {
    let moves = (settings.moves / 10).clamp(20, 400);
    let measured = probe::measure(bed, moves, settings.ipv6, settings.bed.agent_core, settings.bed.link.delay)?;
    report.blackout_us = measured.blackout;
    report.unmoved_gap_us = measured.unmoved;
    Ok(())
}

/// Share of all processors' time in which they are busy, measured for a while.
fn busy_share(during: Duration) -> Result<f64> {
    let (before, since) = (process::machine_nanos()?, monotonic_micros());
    std::thread::sleep(during);
    let nanos = (monotonic_micros() - since) * 1000 * process::cores() as u64;
    Ok((process::machine_nanos()? - before) as f64 / nanos as f64)
}

/// Requests moves.
struct Mover<'a> {
    settings: &'a SoakSettings,
    shared: &'a Shared,
    session: u32,
    ids: &'a [ConnectionId],
    rng: Rng,
    places: Vec<Option<u32>>,
    moves: Vec<u64>,
    /// Connections whose last requested place is the NIC.
    wished: Vec<bool>,
    both_ways: u64,
    /// Requested moves: tag to connection and target.
    asked: HashMap<u32, (usize, Option<u32>)>,
    /// Present if it is to go down.
    link: Option<Link<'a>>,
}

impl<'a> Mover<'a> {
    fn new(
        settings: &'a SoakSettings,
        shared: &'a Shared,
        session: u32,
        ids: &'a [ConnectionId],
        link: Option<Link<'a>>,
    ) -> Self {
        Mover {
            settings,
            shared,
            session,
            ids,
            rng: Rng::new(settings.seed),
            places: vec![None; ids.len()],
            moves: vec![0; ids.len()],
            wished: vec![false; ids.len()],
            both_ways: 0,
            asked: HashMap::new(),
            link,
        }
    }

    fn run(mut self, tool: &mut Tool, observer: &mut Tool, report: &mut SoakReport) -> Result<()> {
        // Let the streams fill.
        std::thread::sleep(Duration::from_millis(200));
        if self.settings.poison {
            return self.run_poisoned(tool, report);
        }
        if self.settings.stop_nic > 0 {
            return self.run_with_faults(tool, observer, report);
        }
        report.load = busy_share(Duration::from_millis(300))?;
        let (agent, started) = (tool.statistics()?.agent_process, monotonic_micros());
        let agent_nanos = || process::cpu_nanos(agent).unwrap_or(0);
        let before = agent_nanos();
        let target = self.settings.moves;
        let in_parallel = self.ids.len().min(self.settings.at_once);
        let (mut shown, status) = (monotonic_micros(), StatusLine::new());
        let mut left = self.faults_left(report);
        let mut next_fault = if left > 0 { 1 + self.rng.below((target / (left + 1)).max(1) * 2) } else { u64::MAX };
        let mut done = 0;
        while done < target || left > 0 {
            while self.asked.len() < in_parallel && done + (self.asked.len() as u64) < target {
                self.ask_one(tool, self.ids.len())?;
            }
            if !self.asked.is_empty() {
                done += u64::from(self.take_answer(tool, report)?);
            }
            if left > 0 && done >= next_fault.min(target) {
                done += self.take_all_answers(tool, report)?;
                done += self.strike_once(tool, report)?;
                left = self.faults_left(report);
                let rest = target.saturating_sub(done);
                next_fault = done + 1 + self.rng.below((rest / (left + 1)).max(1) * 2).min(rest.saturating_sub(left + 2));
            }
            if self.settings.progress && monotonic_micros() - shown > 1_000_000 {
                shown = monotonic_micros();
                status.show(format_args!("{done} of {target} moves, {} deferred, {left} faults to come", report.deferred));
            }
        }
        status.clear();
        report.moves = done;
        report.agent_us_per_move = agent_nanos().saturating_sub(before) as f64 / 1e3 / done.max(1) as f64;
        report.moves_per_second = done as f64 * 1e6 / (monotonic_micros() - started).max(1) as f64;
        report.in_flight_share = self.both_ways as f64 / done.max(1) as f64;
        report.min_moves_per_connection = self.moves.iter().copied().min().unwrap_or(0);
        if self.settings.bed.offloads.limits != Limits::default() {
            self.lift_limits(tool, report)?;
        }
        Ok(())
    }

    /// Faults that are to come.
    fn faults_left(&self, report: &SoakReport) -> u64 {
        let SoakSettings { kill_nic, kill_agent, link_down, .. } = *self.settings;
        u64::from(kill_nic + kill_agent - report.kills) + u64::from(link_down - report.link_downs)
    }

    /// Kills a process, or takes the link down, whichever is left. Returns the number of moves done meanwhile.
    fn strike_once(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<u64> {
        let link_downs = u64::from(self.settings.link_down - report.link_downs);
        if link_downs > 0 && self.rng.below(self.faults_left(report)) < link_downs {
            return self.take_link_down(tool, report);
        }
        self.kill(tool, report)?;
        report.kills += 1;
        Ok(0)
    }

    /// Takes the NICs' limits away, and looks whether what was refused comes.
    fn lift_limits(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<()> {
        for nic in 0..self.settings.bed.nics as u32 {
            let offloads = Offloads { limits: Limits::default(), ..self.settings.bed.offloads };
            match tool.ask(Ask::SetOffloads { nic, offloads: Box::new(offloads) })? {
                Reply::Done => {}
                other => bail!("the limits of NIC {nic} stay: {other:?}"),
            }
        }
        let (wished, deadline) = (self.wished.iter().filter(|wished| **wished).count(), monotonic_micros() + LONGEST_RETURN);
        loop {
            let list = tool.connections()?;
            let is_there = |at: &usize| self.info(&list, *at).is_some_and(|info| info.place == Place::Nic);
            let there = (0..self.ids.len()).filter(|at| self.wished[*at] && is_there(at)).count();
            report.back_on_nic = Some(there as f64 / wished.max(1) as f64);
            if there == wished || monotonic_micros() > deadline {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks for the move of one of the first `among` connections.
    fn ask_one(&mut self, tool: &mut Tool, among: usize) -> Result<()> {
        let mut at = self.rng.below(among as u64) as usize;
        while self.asked.values().any(|(busy, _)| *busy == at) {
            at = (at + 1) % among;
        }
        let nic = self.next_place(at);
        let to = if nic.is_some() { Place::Nic } else { Place::Kernel };
        self.wished[at] = nic.is_some();
        let on_its_way =
            |direction: &Direction| direction.written.load(Ordering::Acquire) > direction.read.load(Ordering::Acquire);
        self.both_ways += u64::from(on_its_way(&self.shared.to_a[at]) && on_its_way(&self.shared.to_b[at]));
        // With one NIC none is named, as programs do.
        let named = nic.filter(|_| self.settings.bed.nics > 1);
        let tag = tool.send(Ask::MoveAny { session: self.session, connection: self.ids[at], to, nic: named })?;
        self.asked.insert(tag, (at, nic));
        Ok(())
    }

    /// Where a connection is to go: the kernel (None) or a NIC. From one of several NICs it goes to another one every
    /// other time.
    fn next_place(&mut self, at: usize) -> Option<u32> {
        let nics = self.settings.bed.nics as u32;
        match self.places[at] {
            None if nics == 1 => Some(0),
            None => Some(self.rng.below(nics.into()) as u32),
            Some(nic) if nics > 1 && self.rng.below(2) == 0 => Some((nic + 1) % nics),
            Some(_) => None,
        }
    }

    /// Handles an answer. Returns whether a move was done.
    fn take_answer(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<bool> {
        let answer = tool.receive()?;
        let Some((at, to)) = self.asked.remove(&answer.tag) else { bail!("unexpected answer from the agent: {answer:?}") };
        match answer.body {
            Reply::Done => {
                report.moves_between_nics += u64::from(self.places[at].is_some() && to.is_some());
                self.places[at] = to;
                self.moves[at] += 1;
                return Ok(true);
            }
            // Without a link there is no route, which is nothing that passes by itself.
            Reply::Stayed { transient, .. } if transient || report.link_downs > 0 => report.deferred += 1,
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => bail!("connection {at} could not be moved: {reason}"),
            other => bail!("unexpected answer from the agent: {other:?}"),
        }
        self.both_ways = self.both_ways.saturating_sub(1);
        Ok(false)
    }

    /// Kills the NIC or the agent at a random moment, and waits until the next one runs.
    fn kill(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<()> {
        std::thread::sleep(Duration::from_micros(self.rng.below(20_000)));
        let before = tool.statistics()?;
        if report.kills < self.settings.kill_nic {
            let nics = before.nics.len() as u64;
            let victim = if nics == 1 { 0 } else { self.rng.below(nics) as u32 };
            process::signal(before.nics[victim as usize].process, 9)?;
            while tool.statistics()?.nic_starts == before.nic_starts {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.places.iter_mut().filter(|place| **place == Some(victim)).for_each(|place| *place = None);
        } else {
            // Its counters die with it.
            report.count(&before);
            report.count_transitions(&before);
            process::signal(before.agent_process, 9)?;
            while tool.statistics()?.agent_process == before.agent_process {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.places.fill(None);
        }
        Ok(())
    }
}

impl SoakReport {
    /// Adds the NIC's counters of partial offload.
    fn count_transitions(&mut self, statistics: &Statistics) {
        let [lent, back, fast, slow] = [Counter::Lent, Counter::TakenBack, Counter::Segments, Counter::LentSegments]
            .map(|counter| statistics.counters.get(counter as usize).copied().unwrap_or(0));
        self.transitions += lent + back;
        self.fast_path_share = fast as f64 / (fast + slow).max(1) as f64;
    }

    fn count(&mut self, statistics: &Statistics) {
        self.failed_moves += statistics.failed_moves;
        self.connections_lost += statistics.lost;
        self.connections_recovered += statistics.recovered;
        self.full += statistics.full;
        self.colder += statistics.colder;
        self.exceeded += statistics.counters.get(Counter::Exceeded as usize).copied().unwrap_or(0);
    }
}
