//! Large receive in front of a device that the kernel keeps (`baton nic attach`): what it spares the receiver. And what
//! a Baton beside the kernel costs a connection that it leaves alone.
//!
//! One connection in bulk over a veth between two hosts, the two ways in turn. The receiver's part is all that happens
//! on one processor: its program runs there, and its kernel's receiving (receive packet steering). The sender and, in
//! its turn, the attached process are on another. The sender cuts its segments itself, and GRO is off, as on a card
//! without large receive. It sends at the same rate in both turns.
//!
//! The receiver's CPU is what it takes from other work: a program that runs when nothing else wants the processor looks
//! at the clock all the time, and adds up when it could not. That is exact, where the kernel's ticks see a sample, and
//! interrupts only by chance. Before that the same is measured of a processor that is idle otherwise, by the kernel's
//! account of idle time: each interrupt ends it for longer than its work takes, so there the number of interrupts is
//! what counts.

use crate::bars::Bar;
use anyhow::{Context, Result, anyhow, ensure};
use baton_bed::statistics::quantile;
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, Testbed, TestbedSettings, address_a, counter, without_baton};
use baton_client::Session;
use baton_linux::events::{monotonic_micros, monotonic_nanos};
use baton_linux::namespace::{Namespace, mount_own_sysfs};
use baton_linux::{interface, process};
use baton_protocol::program::Place;
use serde::Serialize;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Processors of the sender, and of the receiver.
const SENDER: usize = 0;
const RECEIVER: usize = 1;
/// Seconds before each measurement.
const WARMING: f64 = 0.5;
/// Gb/s that are sent where the receiver's CPU is compared.
const RATE: f64 = 2.5;
/// Longest time without a chance to send that is made up for, in microseconds.
const LATE: f64 = 10_000.0;
/// Seconds before the watcher is asked what it missed.
const SETTLING: f64 = 0.05;
/// Most nanoseconds between two looks at the clock if nothing else runs.
const GLANCE: u64 = 250;
/// Bytes of a read or write.
const PIECE: usize = 1 << 17;

/// One round, or the medians of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Round {
    /// Payload that the receiver got, Gb/s.
    pub gigabits: f64,
    /// CPU seconds per GB that the receiver's processor is kept from other work.
    pub receiver: f64,
    /// The same where there is no other work: all the time that it is not idle.
    pub otherwise_idle: f64,
    /// Of the attached process, with what the kernel does while it writes; 0 without one.
    pub attached: f64,
    /// Of the whole machine.
    pub machine: f64,
    /// Segments that were sent again, in percent.
    pub again: f64,
}

/// The bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct FrontReport {
    /// Medians of the veth alone.
    pub plain: Round,
    /// Medians with large receive in front of it.
    pub attached: Round,
    /// The receiver's CPU per GB, attached over plain: least and greatest of the pairs.
    pub device_spread: [f64; 2],
    /// The same ratio where its processor is idle otherwise: median of the pairs.
    pub otherwise_idle_ratio: f64,
    /// Gb/s of a connection in the kernel without a Baton, beside one, and beside one that has another connection:
    /// medians.
    pub other_traffic: [f64; 3],
    /// The ratio of the second to the first: least and greatest of the pairs.
    pub other_spread: [f64; 2],
    /// The ratio of the third to the first: median of the pairs.
    pub connected_ratio: f64,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// Measures so many pairs of rounds of each, with segments taken at `path` (`baton nic attach path=...`).
///
/// # Errors
/// If the machine has one processor only, or the hosts cannot be made.
pub fn run(rounds: usize, seconds: f64, path: &str, progress: impl Fn(&str)) -> Result<FrontReport> {
    ensure!(process::cores() > 1, "two processors are needed: one is the receiver's alone");
    let rounds = rounds.max(1);
    let (mut device, mut others) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new(), Vec::new()]);
    {
        let hosts = without_baton(&TestbedSettings::default())?;
        prepare(&hosts)?;
        for round in 0..rounds {
            for (way, rounds) in device.iter_mut().enumerate() {
                let attached = (way == 1).then(|| Attached::new(&hosts[0], path)).transpose()?;
                let measured =
                    bulk([&hosts[0], &hosts[1]], seconds, Some(RATE), attached.as_ref().map(|attached| attached.0.id()))?;
                progress(&line(round, ["plain", "attached"][way], &measured));
                rounds.push(measured);
            }
        }
    }
    let without = without_baton(&TestbedSettings::default())?;
    let beside = || Testbed::new(&TestbedSettings { beside: true, ..TestbedSettings::default() });
    let (idle, connected) = (beside()?, beside()?);
    let _connection = quiet_connection(&connected)?;
    for round in 0..rounds {
        for (way, rounds) in others.iter_mut().enumerate() {
            let hosts = match way {
                0 => [&without[0], &without[1]],
                1 => [&idle.host_a, &idle.host_b],
                _ => [&connected.host_a, &connected.host_b],
            };
            let measured = bulk(hosts, seconds, None, None)?;
            let way = ["no Baton", "beside a Baton", "beside a Baton with a connection"][way];
            progress(&format!("round {round}, {way}: {:.2} Gb/s; {:.3} % sent again", measured.gigabits, measured.again));
            rounds.push(measured);
        }
    }
    Ok(report(&device, &others))
}

/// A connection on the NIC of a bed, over which nothing is sent. It is there until this is dropped.
fn quiet_connection(bed: &Testbed) -> Result<(Session, TcpStream)> {
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 0)))?;
    let address = listener.local_addr()?;
    let client = bed.host_b.run(|| TcpStream::connect(address))?;
    let mut session = Session::connect(&bed.socket())?;
    let id = session.adopt(listener.accept()?.0.into())?;
    session.move_to(id, Place::Nic)?;
    ensure!(session.place(id) == Some(Place::Nic), "a connection did not move");
    Ok((session, client))
}

/// Least, median and greatest of the pairs' ratios, second over first.
fn ratios(first: &[Round], second: &[Round], figure: fn(&Round) -> f64) -> [f64; 3] {
    let mut ratios: Vec<f64> = first.iter().zip(second).map(|(one, other)| figure(other) / figure(one).max(1e-9)).collect();
    [0.0, 0.5, 1.0].map(|share| quantile(&mut ratios, share))
}

fn report([plain, attached]: &[Vec<Round>; 2], others: &[Vec<Round>; 3]) -> FrontReport {
    let receivers = ratios(plain, attached, |round| round.receiver);
    let rate = |round: &Round| round.gigabits;
    let [without, beside, connected] = others;
    let rates = ratios(without, beside, rate);
    FrontReport {
        plain: medians(plain),
        attached: medians(attached),
        device_spread: [receivers[0], receivers[2]],
        otherwise_idle_ratio: ratios(plain, attached, |round| round.otherwise_idle)[1],
        other_traffic: [without, beside, connected].map(|rounds| medians(rounds).gigabits),
        other_spread: [rates[0], rates[2]],
        connected_ratio: ratios(without, connected, rate)[1],
        bars: vec![Bar::most("lro.device_ratio", 0.6, receivers[1]), Bar::least("other_traffic.ratio", 0.97, rates[1])],
    }
}

fn medians(rounds: &[Round]) -> Round {
    let median = |figure: fn(&Round) -> f64| quantile(&mut rounds.iter().map(figure).collect::<Vec<_>>(), 0.5);
    Round {
        gigabits: median(|round| round.gigabits),
        receiver: median(|round| round.receiver),
        otherwise_idle: median(|round| round.otherwise_idle),
        attached: median(|round| round.attached),
        machine: median(|round| round.machine),
        again: median(|round| round.again),
    }
}

fn line(round: usize, way: &str, measured: &Round) -> String {
    let Round { gigabits, receiver, otherwise_idle, attached, machine, again } = measured;
    format!(
        "round {round}, {way}: {gigabits:.2} Gb/s; CPU of a GB, s: receiver {receiver:.3} (otherwise idle {otherwise_idle:.3}), \
         attached process {attached:.3}, machine {machine:.3}; {again:.3} % sent again"
    )
}

/// Sets the devices up: see above.
fn prepare([a, b]: &[Namespace; 2]) -> Result<()> {
    b.run(|| interface::set_segmentation(INTERFACE_B, false)).context("turning segmentation off")?;
    a.run(|| interface::set_gro(INTERFACE_A, false)).context("turning GRO off")?;
    let steer = || {
        mount_own_sysfs()?;
        std::fs::write(format!("/sys/class/net/{INTERFACE_A}/queues/rx-0/rps_cpus"), format!("{:x}", 1 << RECEIVER))
    };
    a.run(steer).context("receive packet steering (CONFIG_RPS)")
}

/// `baton nic attach` on host A, on the sender's processor.
struct Attached(Child);

impl Attached {
    fn new(host: &Namespace, path: &str) -> Result<Attached> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["nic", "attach", INTERFACE_A, &format!("path={path}")]).stdout(Stdio::piped());
        // A process inherits the processors of the thread that starts it, and ends with that thread.
        let processors = process::allowed_cpus();
        process::pin(0, SENDER);
        let child = host.spawn(&mut command);
        process::pin_to(&processors);
        let mut attached = Attached(child.context("starting baton nic attach")?);
        let mut said = String::new();
        BufReader::new(attached.0.stdout.take().context("its output")?).read_line(&mut said)?;
        ensure!(said.starts_with("attached to"), "baton nic attach ended at once");
        ensure!(said.contains(&format!("path={path}")), "segments are taken elsewhere: {said}");
        Ok(attached)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that runs on the receiver's processor when nothing else wants it, and looks at the clock all the time:
/// where it could not, something else ran, in an interrupt or not.
#[derive(Default)]
struct Watcher {
    /// Nanoseconds that it missed.
    missed: AtomicU64,
    over: AtomicBool,
}

impl Watcher {
    fn watch(&self) -> Result<()> {
        process::pin(0, RECEIVER);
        ensure!(process::run_last(), "no right to run last (SCHED_IDLE)");
        let mut last = monotonic_nanos();
        while !self.over.load(Ordering::Relaxed) {
            let now = monotonic_nanos();
            if now - last > GLANCE {
                self.missed.fetch_add(now - last, Ordering::Relaxed);
            }
            last = now;
        }
        Ok(())
    }

    /// The seconds per GB that it misses beside a connection.
    fn measure(seconds: f64, bytes: &AtomicU64) -> Result<f64> {
        let watcher = Watcher::default();
        std::thread::scope(|scope| {
            let watching = scope.spawn(|| watcher.watch());
            std::thread::sleep(Duration::from_secs_f64(SETTLING));
            let now = || [&watcher.missed, bytes].map(|count| count.load(Ordering::Relaxed));
            let before = now();
            std::thread::sleep(Duration::from_secs_f64(seconds));
            let after = now();
            watcher.over.store(true, Ordering::Relaxed);
            watching.join().map_err(|_| anyhow!("the watcher panicked"))??;
            Ok((after[0] - before[0]) as f64 / (after[1] - before[1]).max(1) as f64)
        })
    }
}

/// CPU times in nanoseconds and counts at a moment.
struct Snapshot {
    micros: u64,
    bytes: u64,
    spare: u64,
    attached: u64,
    machine: u64,
    segments: [u64; 2],
}

impl Snapshot {
    fn take(bytes: &AtomicU64, attached: Option<u32>, sender: &Namespace) -> Result<Snapshot> {
        let segments = |name| counter(sender, "snmp", "Tcp:", name);
        Ok(Snapshot {
            segments: [segments("OutSegs")?, segments("RetransSegs")?],
            spare: process::spare_nanos(RECEIVER)?,
            machine: process::machine_nanos()?,
            attached: attached.and_then(process::cpu_nanos).unwrap_or(0),
            bytes: bytes.load(Ordering::Relaxed),
            micros: monotonic_micros(),
        })
    }
}

/// One round of a connection from the second host to the first, at most at `rate` Gb/s.
fn bulk([a, b]: [&Namespace; 2], seconds: f64, rate: Option<f64>, attached: Option<u32>) -> Result<Round> {
    let listener = a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 0)))?;
    let address = listener.local_addr()?;
    let client = b.run(|| TcpStream::connect(address))?;
    let (server, _) = listener.accept()?;
    let (bytes, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let (before, after, missed) = std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(client, rate, &over));
        let receiver = scope.spawn(|| receive(server, &bytes));
        std::thread::sleep(Duration::from_secs_f64(WARMING));
        let before = Snapshot::take(&bytes, attached, b);
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let after = Snapshot::take(&bytes, attached, b);
        let missed = if rate.is_some() { Watcher::measure(seconds, &bytes) } else { Ok(0.0) };
        over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        receiver.join().map_err(|_| anyhow!("the receiver panicked"))??;
        Ok::<_, anyhow::Error>((before?, after?, missed?))
    })?;
    let got = (after.bytes - before.bytes).max(1) as f64;
    // Nanoseconds per byte are seconds per GB.
    let each = |of: fn(&Snapshot) -> u64| of(&after).saturating_sub(of(&before)) as f64 / got;
    let segments = (after.segments[0] - before.segments[0]).max(1);
    Ok(Round {
        gigabits: got * 8.0 / 1e3 / (after.micros - before.micros) as f64,
        receiver: missed,
        otherwise_idle: each(|snapshot| snapshot.micros * 1000) - each(|snapshot| snapshot.spare),
        attached: each(|snapshot| snapshot.attached),
        machine: each(|snapshot| snapshot.machine),
        again: 100.0 * (after.segments[1] - before.segments[1]) as f64 / segments as f64,
    })
}

fn send(mut client: TcpStream, rate: Option<f64>, over: &AtomicBool) -> Result<()> {
    process::pin(0, SENDER);
    process::wake_in_time();
    let piece = vec![0x5a; PIECE];
    let mut due = monotonic_micros() as f64;
    while !over.load(Ordering::Relaxed) {
        client.write_all(&piece).context("the sender")?;
        if let Some(rate) = rate {
            let now = monotonic_micros() as f64;
            due = due.max(now - LATE) + PIECE as f64 * 8.0 / 1e3 / rate;
            std::thread::sleep(Duration::from_secs_f64((due - now).max(0.0) / 1e6));
        }
    }
    Ok(())
}

fn receive(mut server: TcpStream, bytes: &AtomicU64) -> Result<()> {
    process::pin(0, RECEIVER);
    let mut buffer = vec![0; PIECE];
    loop {
        match server.read(&mut buffer).context("the receiver")? {
            0 => return Ok(()),
            got => bytes.fetch_add(got as u64, Ordering::Relaxed),
        };
    }
}
