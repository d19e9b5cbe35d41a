//! One connection over a long path: 1 Gb/s and 100 ms, with the NIC's TCP and the kernel's in turn, over the same
//! emulated link. The connection moves to its place right after it was opened, so that all windows grow there. Both run
//! CUBIC.

use crate::bars::Bar;
use anyhow::{Context, Result, anyhow};
use baton_bed::statistics;
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::{ConnectionId, Session};
use baton_linux::events::monotonic_micros;
use baton_linux::{interface, socket};
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use serde::Serialize;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Bits per second of the link, its one-way delay in microseconds, and its buffer: one bandwidth-delay product.
const RATE: u64 = 1_000_000_000;
const DELAY: u64 = 50_000;
const BUFFER: u64 = RATE / 8 * 2 * DELAY / 1_000_000;
/// Most frames that wait at a host's interface: a TAP does not hold its sender back.
const QUEUE: u16 = 30_000;
/// Most memory of a connection in bytes, on both hosts.
const MEMORY: &str = "4096 131072 67108864";

/// Settings.
#[derive(Clone, Copy, Debug)]
pub struct WanSettings {
    /// Seconds of each transfer, slow start included.
    pub seconds: f64,
    /// Rounds; the median of their ratios counts.
    pub rounds: usize,
}

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The program sends.
    Sending,
    /// The program receives.
    Receiving,
}

/// One transfer.
#[derive(Clone, Debug, Serialize)]
pub struct Transfer {
    /// The direction.
    pub way: Way,
    /// Whether the NIC had the connection.
    pub nic: bool,
    /// Mb/s, from the first byte on.
    pub rate: f64,
    /// Mb/s of each second.
    pub seconds: Vec<f64>,
}

/// All transfers, and the figures with bounds.
#[derive(Clone, Debug, Serialize)]
pub struct WanReport {
    /// In the order of measurement.
    pub transfers: Vec<Transfer>,
    /// Median of the rounds' ratios, NIC over kernel, with the program sending.
    pub sending_ratio: f64,
    /// With the program receiving.
    pub receiving_ratio: f64,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

fn bed() -> Result<Testbed> {
    let link = LinkSettings { rate: RATE, delay: DELAY, buffer: BUFFER, ..LinkSettings::default() };
    let bed = Testbed::new(&TestbedSettings { link, peer_queue: Some(QUEUE), ..TestbedSettings::default() })?;
    for host in [&bed.host_a, &bed.host_b] {
        host.run(|| {
            std::fs::write("/proc/sys/net/ipv4/tcp_rmem", MEMORY)?;
            std::fs::write("/proc/sys/net/ipv4/tcp_wmem", MEMORY)
        })?;
    }
    bed.host_a.run(|| interface::set_queue_length("baton0", QUEUE))?;
    Ok(bed)
}

/// What both sides do until the time is over: bytes of each second are counted where they arrive.
struct Clock {
    begun: u64,
    seconds: f64,
}

impl Clock {
    fn passed(&self) -> f64 {
        (monotonic_micros() - self.begun) as f64 / 1e6
    }

    fn is_over(&self) -> bool {
        self.passed() >= self.seconds
    }

    fn count(&self, bytes: &mut Vec<f64>, got: usize) {
        let at = self.passed() as usize;
        if bytes.len() <= at {
            bytes.resize(at + 1, 0.0);
        }
        bytes[at] += got as f64;
    }
}

/// Whether anything was transferred.
fn done(result: io::Result<usize>) -> Result<usize> {
    match result {
        Ok(count) => Ok(count),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error).context("the connection broke"),
    }
}

fn peer(stream: &TcpStream, way: Way, clock: &Clock) -> Result<Vec<f64>> {
    let mut buffer = vec![0x5a; 1 << 18];
    let mut bytes = Vec::new();
    while !clock.is_over() {
        let count = match way {
            Way::Sending => done(socket::receive(stream.as_fd(), &mut buffer))?,
            Way::Receiving => done(socket::send(stream.as_fd(), &buffer))?,
        };
        if count == 0 {
            std::thread::sleep(Duration::from_micros(500));
        } else if way == Way::Sending {
            clock.count(&mut bytes, count);
        }
    }
    Ok(bytes)
}

fn program(session: &mut Session, id: ConnectionId, way: Way, clock: &Clock) -> Result<Vec<f64>> {
    let mut buffer = vec![0x5a; 1 << 18];
    let (mut bytes, mut ready) = (Vec::new(), Vec::new());
    while !clock.is_over() {
        let count = match way {
            Way::Sending => done(session.send(id, &buffer))?,
            Way::Receiving => done(session.receive(id, &mut buffer))?,
        };
        if count == 0 {
            ready.clear();
            session.poll(Some(Duration::from_millis(1)), &mut ready)?;
        } else if way == Way::Receiving {
            clock.count(&mut bytes, count);
        }
    }
    Ok(bytes)
}

fn transfer(bed: &Testbed, way: Way, place: Place, seconds: f64) -> Result<Transfer> {
    let (servers, clients) = connect_pairs(bed, 1, false)?;
    let (server, client) = (servers.into_iter().next().context("a connection")?, &clients[0]);
    let mut session = Session::connect(&bed.socket())?;
    let id = session.adopt(OwnedFd::from(server))?;
    while let Err(error) = session.move_to(id, place) {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error).context("moving the connection to its place");
        }
    }
    let clock = Clock { begun: monotonic_micros(), seconds };
    let (there, here) = std::thread::scope(|scope| {
        let there = scope.spawn(|| peer(client, way, &clock));
        let here = program(&mut session, id, way, &clock);
        (there.join().unwrap_or_else(|_| Err(anyhow!("the peer panicked"))), here)
    });
    let mut bytes = if way == Way::Sending { there? } else { here? };
    let rate = bytes.iter().sum::<f64>() * 8.0 / 1e6 / seconds;
    bytes.iter_mut().for_each(|count| *count *= 8.0 / 1e6);
    // Resets the connection on close, so that nothing of it is under way when the next one begins.
    socket::set_bytes(client.as_fd(), 1, 13, &[1, 0, 0, 0, 0, 0, 0, 0])?;
    drop(clients);
    drop(session);
    std::thread::sleep(Duration::from_micros(6 * DELAY));
    Ok(Transfer { way, nic: place == Place::Nic, rate, seconds: bytes })
}

/// Measures, and calls `progress` with every transfer.
///
/// # Errors
/// If the test bed cannot be made, or a connection breaks.
pub fn run(settings: &WanSettings, mut progress: impl FnMut(&Transfer)) -> Result<WanReport> {
    let bed = bed()?;
    let mut transfers = Vec::new();
    let mut ratios = [Vec::new(), Vec::new()];
    for _ in 0..settings.rounds.max(1) {
        for (way, ratios) in [Way::Sending, Way::Receiving].into_iter().zip(&mut ratios) {
            let mut rates = [0.0; 2];
            for (place, rate) in [Place::Kernel, Place::Nic].into_iter().zip(&mut rates) {
                let measured = transfer(&bed, way, place, settings.seconds)?;
                progress(&measured);
                *rate = measured.rate;
                transfers.push(measured);
            }
            ratios.push(rates[1] / rates[0]);
        }
    }
    let [sending_ratio, receiving_ratio] = ratios.map(|mut ratios| statistics::quantile(&mut ratios, 0.5));
    let bars = vec![Bar::least("wan.rate_ratio", 0.95, sending_ratio.min(receiving_ratio))];
    Ok(WanReport { transfers, sending_ratio, receiving_ratio, bars })
}

/// A transfer in one line.
pub fn line(transfer: &Transfer) -> String {
    let seconds: Vec<String> = transfer.seconds.iter().map(|rate| format!("{rate:.0}")).collect();
    format!(
        "{:<9} {:<6} {:>6.1} Mb/s   by seconds {}",
        if transfer.way == Way::Sending { "sending" } else { "receiving" },
        if transfer.nic { "NIC" } else { "kernel" },
        transfer.rate,
        seconds.join(" ")
    )
}
