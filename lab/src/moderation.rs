//! Interrupt moderation: what it costs a ping-pong and saves a bulk transfer, between two kernels, through the NIC. Off and adaptive in turn.

use crate::bars::Bar;
use crate::lro::{Receiver, send};
use crate::soak::connect_pairs;
use crate::statistics;
use crate::testbed::{Testbed, TestbedSettings};
use anyhow::{Context, Result, anyhow};
use baton_abi::layout::Counter;
use baton_kernel::events::{Poller, Trigger, monotonic_micros, monotonic_nanos};
use baton_kernel::socket;
use baton_moderation::Mode;
use serde::Serialize;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Exchanges that go by before they count, and that count.
const WARMING: usize = 500;
const EXCHANGES: usize = 4000;
/// Microseconds of a bulk transfer, and those before it counts.
const BULK: u64 = 500_000;

/// One way, once.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    /// How deliveries are moderated.
    pub mode: Mode,
    /// Median round trip of 64 bytes, microseconds.
    pub round_trip: f64,
    /// Gb/s of four connections.
    pub gigabits: f64,
    /// Frames to the kernel per interrupt.
    pub frames_per_interrupt: f64,
    /// Interrupts per MB.
    pub interrupts_per_mb: f64,
}

/// All rounds, and what has to hold.
#[derive(Clone, Debug, Serialize)]
pub struct ModerationReport {
    /// Each round of each way.
    pub rounds: Vec<Measured>,
    /// What has to hold.
    pub bars: Vec<Bar>,
}

fn bed(mode: Mode) -> Result<Testbed> {
    // The wire takes no large frames, so that a bulk transfer is many.
    let link = baton_control::LinkSettings { delay: 10, ..Default::default() };
    let offloads = baton_offloads::Offloads { moderation: mode, ..Default::default() };
    Testbed::new(&TestbedSettings { offloads, threaded_napi: true, link, ..TestbedSettings::default() })
}

/// Answers whatever comes until the stream ends.
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

fn round_trips(client: &TcpStream) -> Result<f64> {
    let poller = Poller::new()?;
    poller.add(client.as_fd(), 0, Trigger::Readable)?;
    let (mut buffer, mut tokens, mut samples) = ([0; 64], Vec::new(), Vec::new());
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
    Ok(statistics::quantile(&mut samples, 0.5))
}

fn ping_pong(mode: Mode) -> Result<f64> {
    let bed = bed(mode)?;
    let (servers, clients) = connect_pairs(&bed, 1, false)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| echo(&servers[0], &over));
        let measured = round_trips(&clients[0]);
        over.store(true, Ordering::Relaxed);
        server.join().map_err(|_| anyhow!("the echo panicked"))?.context("the echo")?;
        measured
    })
}

/// Gb/s, frames per interrupt, interrupts per MB.
fn bulk(mode: Mode) -> Result<[f64; 3]> {
    let bed = bed(mode)?;
    let (servers, clients) = connect_pairs(&bed, 4, false)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(&clients, false, &over));
        let measure = || -> Result<[f64; 3]> {
            let mut receiver = Receiver::new(&servers, false)?;
            receiver.run(monotonic_micros() + BULK / 2, u64::MAX)?;
            let counted = || anyhow::Ok(bed.tool()?.statistics()?.counters);
            let (before, had, started) = (counted()?, receiver.total(), monotonic_micros());
            receiver.run(started + BULK, u64::MAX)?;
            let (after, bytes) = (counted()?, (receiver.total() - had) as f64);
            let took = (monotonic_micros() - started) as f64;
            let count = |counter: Counter| (after[counter as usize] - before[counter as usize]) as f64;
            let interrupts = count(Counter::Interrupts).max(1.0);
            Ok([bytes * 8.0 / took / 1000.0, count(Counter::HostSent) / interrupts, interrupts / (bytes / 1e6)])
        };
        let measured = measure();
        over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        measured
    })
}

/// Runs so many rounds, off and adaptive in turn. `each` hears of every measurement.
///
/// # Errors
/// If a test bed cannot be made.
pub fn run(rounds: usize, mut each: impl FnMut(&Measured)) -> Result<ModerationReport> {
    let mut all = Vec::new();
    for _ in 0..rounds.max(1) {
        for mode in [Mode::Off, Mode::Adaptive] {
            let round_trip = ping_pong(mode)?;
            let [gigabits, frames_per_interrupt, interrupts_per_mb] = bulk(mode)?;
            let measured = Measured { mode, round_trip, gigabits, frames_per_interrupt, interrupts_per_mb };
            each(&measured);
            all.push(measured);
        }
    }
    let median = |mode: Mode, figure: fn(&Measured) -> f64| {
        statistics::quantile(&mut all.iter().filter(|one| one.mode == mode).map(figure).collect::<Vec<_>>(), 0.5)
    };
    let ratio = |figure| median(Mode::Adaptive, figure) / median(Mode::Off, figure);
    let bars = vec![
        Bar::most("moderation.pingpong_ratio", 1.1, ratio(|one| one.round_trip)),
        Bar::most("moderation.bulk_interrupts_ratio", 0.1, ratio(|one| one.interrupts_per_mb)),
    ];
    Ok(ModerationReport { rounds: all, bars })
}

/// A line of the table.
pub fn line(one: &Measured) -> String {
    format!(
        "{:<9} ping-pong {:>6.1} us   bulk {:>5.2} Gb/s, {:>5.1} frames an interrupt, {:>6.1} interrupts/MB",
        format!("{:?}", one.mode).to_lowercase(),
        one.round_trip,
        one.gigabits,
        one.frames_per_interrupt,
        one.interrupts_per_mb
    )
}
