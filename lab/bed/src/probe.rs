//! Blackout: for how long a connection carries nothing when it moves, as its peer sees it.
//!
//! A peer sends a small message every 20 µs on two connections, one that moves and one that does not; the program on
//! the other host answers each. The blackout of a move is the largest gap between answers around it, minus the usual
//! gap of the connection that stays. Peer and program take turns on one thread, so that the move is measured and not
//! the scheduler.

use crate::statistics::Percentiles;
use crate::testbed::{Testbed, connect_pairs};
use anyhow::{Result, bail};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_linux::events::monotonic_micros;
use baton_linux::{process, socket};
use baton_protocol::program::{Ask, Place, Reply};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Microseconds between probes.
const PACE: u64 = 20;
/// Bytes of a probe.
const PROBE: usize = 16;
/// Microseconds after a move's end that still belong to its window.
const AFTER: u64 = 3_000;

/// Figures of a probe run, in microseconds.
#[derive(Clone, Debug, Default)]
pub struct Blackout {
    /// Largest gap around each move, minus the median gap of the unmoved connection.
    pub blackout: Percentiles,
    /// Largest gap of the unmoved connection in the same windows.
    pub unmoved: Percentiles,
    /// Moves measured.
    pub moves: u64,
}

/// One probed connection: both its ends.
struct Probed {
    client: TcpStream,
    id: ConnectionId,
    /// Probes sent, and bytes echoed and answered.
    sent: u64,
    /// What the peer has still to send of the next probe.
    unsent: Vec<u8>,
    pending: Vec<u8>,
    echoed: u64,
    answered: u64,
    /// Times of answers.
    times: Vec<u64>,
}

impl Probed {
    /// One turn: the peer sends, the program answers, the peer reads the answers.
    fn turn(&mut self, session: &mut Session, now: u64) -> io::Result<()> {
        if self.unsent.is_empty() {
            self.unsent.resize(PROBE, 0);
            self.unsent[..8].copy_from_slice(&self.sent.to_le_bytes());
        }
        // A full queue means that the program has not answered for long; more probes would add nothing. It may have
        // room for a part.
        match socket::send(self.client.as_fd(), &self.unsent) {
            Ok(sent) => {
                self.unsent.drain(..sent);
                self.sent += u64::from(self.unsent.is_empty());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        self.answer(session)?;
        let mut answers = [0u8; 64 * PROBE];
        match socket::receive(self.client.as_fd(), &mut answers) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => {
                self.answered += got as u64;
                self.times.push(now);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn answer(&mut self, session: &mut Session) -> io::Result<()> {
        let mut buffer = [0u8; 64 * PROBE];
        match session.receive(self.id, &mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => self.pending.extend_from_slice(&buffer[..got]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if !self.pending.is_empty() {
            match session.send(self.id, &self.pending) {
                Ok(sent) => {
                    self.echoed += sent as u64;
                    self.pending.drain(..sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Largest gap between answers that overlaps a window.
    fn largest_gap(&self, from: u64, to: u64) -> f64 {
        let start = self.times.partition_point(|time| *time < from).saturating_sub(1);
        let gaps = self.times[start..].windows(2).take_while(|pair| pair[0] <= to).map(|pair| pair[1] - pair[0]);
        gaps.max().unwrap_or(0) as f64
    }
}

/// Measures `moves` moves of one connection, beside another that stays, over a link with a one-way delay of `delay`
/// microseconds.
///
/// # Errors
/// If a connection breaks or cannot be moved.
pub fn measure(bed: &Testbed, moves: u64, ipv6: bool, core: Option<usize>, delay: u64) -> Result<Blackout> {
    let (servers, clients) = connect_pairs(bed, 2, ipv6)?;
    let mut session = Session::connect(&bed.socket())?;
    let number = session.number();
    let ids = servers.into_iter().map(|server| session.adopt(OwnedFd::from(server))).collect::<io::Result<Vec<_>>>()?;
    let moving = ids[0];
    let mut probed: Vec<Probed> = clients
        .into_iter()
        .zip(ids)
        .map(|(client, id)| Probed {
            client,
            id,
            sent: 0,
            unsent: Vec::new(),
            pending: Vec::new(),
            echoed: 0,
            answered: 0,
            times: Vec::new(),
        })
        .collect();
    let stop = AtomicBool::new(false);
    let mut windows = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        let prober = scope.spawn(|| run_probes(&mut session, &mut probed, &stop, core));
        let moved = move_back_and_forth(bed, number, moving, moves, delay, &mut windows);
        stop.store(true, Ordering::Relaxed);
        prober.join().map_err(|_| anyhow::anyhow!("the probing thread panicked"))??;
        moved
    })?;
    let unmoved: Vec<f64> = windows.iter().map(|(from, to)| probed[1].largest_gap(*from, *to)).collect();
    let usual = Percentiles::of(unmoved.clone());
    let gaps = windows.iter().map(|(from, to)| (probed[0].largest_gap(*from, *to) - usual.p50).max(0.0)).collect();
    Ok(Blackout { blackout: Percentiles::of(gaps), unmoved: usual, moves: windows.len() as u64 })
}

fn run_probes(session: &mut Session, probed: &mut [Probed], stop: &AtomicBool, core: Option<usize>) -> Result<()> {
    if let Some(core) = core {
        process::pin(0, core);
    }
    process::sleep_exactly();
    let mut next = monotonic_micros();
    while !stop.load(Ordering::Relaxed) {
        let now = monotonic_micros();
        for connection in probed.iter_mut() {
            connection.turn(session, now)?;
        }
        next = (next + PACE).max(monotonic_micros());
        let left = next.saturating_sub(monotonic_micros());
        if left > 1 {
            std::thread::sleep(Duration::from_micros(left));
        }
    }
    Ok(())
}

fn move_back_and_forth(
    bed: &Testbed,
    session: u32,
    connection: ConnectionId,
    moves: u64,
    delay: u64,
    windows: &mut Vec<(u64, u64)>,
) -> Result<()> {
    let mut tool: Tool = bed.tool()?;
    std::thread::sleep(Duration::from_millis(50));
    let mut to = Place::Nic;
    while (windows.len() as u64) < moves {
        let from = monotonic_micros();
        match tool.ask(Ask::MoveAny { session, connection, to, nic: None })? {
            Reply::Done => {
                windows.push((from, monotonic_micros() + AFTER));
                to = if to == Place::Nic { Place::Kernel } else { Place::Nic };
            }
            Reply::Stayed { transient: true, .. } => {}
            other => bail!("the probed connection could not be moved: {other:?}"),
        }
        // Far enough apart that the windows of two moves do not overlap.
        std::thread::sleep(Duration::from_micros(2 * AFTER + 20 * delay));
    }
    Ok(())
}
