//! Large receive in front of a device that the kernel keeps (`baton nic attach`): what it spares the receiver. And what a Baton
//! beside the kernel costs a connection that it leaves alone.
//!
//! One connection in bulk over a veth between two hosts, the two ways in turn. The receiver's part is all that happens on one
//! processor: its program runs there, and the kernel's receiving (receive packet steering). The sender and, in its turn, the
//! attached process are on another. Programs whose nice value is above 0 do not count. The sender cuts its segments itself, and
//! GRO is off, as on a card without large receive. It sends at the same rate in both turns: a processor that is never idle takes
//! fewer interrupts, and where the rates differ that would be compared.

use crate::bars::Bar;
use crate::statistics::quantile;
use crate::testbed::{INTERFACE_A, INTERFACE_B, Testbed, TestbedSettings, address_a, counter, without_baton};
use anyhow::{Context, Result, anyhow, ensure};
use baton_linux::events::monotonic_micros;
use baton_linux::namespace::{Namespace, mount_own_sysfs};
use baton_linux::{interface, process};
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
/// Bytes of a read or write.
const PIECE: usize = 1 << 17;

/// One round, or the medians of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Round {
    /// Payload that the receiver got, Gb/s.
    pub gigabits: f64,
    /// CPU seconds per GB of the receiver's processor: all the time that it is not idle.
    pub receiver: f64,
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
    /// Gb/s of a connection in the kernel without a Baton, and beside one: medians.
    pub other_traffic: [f64; 2],
    /// Their ratio, beside over without: least and greatest of the pairs.
    pub other_spread: [f64; 2],
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// Measures so many pairs of rounds of each.
///
/// # Errors
/// If the machine has one processor only, or the hosts cannot be made.
pub fn run(rounds: usize, seconds: f64, progress: impl Fn(&str)) -> Result<FrontReport> {
    ensure!(process::cores() > 1, "two processors are needed: one is the receiver's alone");
    let rounds = rounds.max(1);
    let (mut device, mut others) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    {
        let hosts = without_baton(&TestbedSettings::default())?;
        prepare(&hosts)?;
        for round in 0..rounds {
            for (way, rounds) in device.iter_mut().enumerate() {
                let attached = (way == 1).then(|| Attached::new(&hosts[0])).transpose()?;
                let measured =
                    bulk([&hosts[0], &hosts[1]], seconds, Some(RATE), attached.as_ref().map(|attached| attached.0.id()))?;
                progress(&line(round, ["plain", "attached"][way], &measured));
                rounds.push(measured);
            }
        }
    }
    let without = without_baton(&TestbedSettings::default())?;
    let bed = Testbed::new(&TestbedSettings { beside: true, ..TestbedSettings::default() })?;
    for round in 0..rounds {
        for (way, rounds) in others.iter_mut().enumerate() {
            let hosts = if way == 0 { [&without[0], &without[1]] } else { [&bed.host_a, &bed.host_b] };
            let measured = bulk(hosts, seconds, None, None)?;
            progress(&line(round, ["no Baton", "beside a Baton"][way], &measured));
            rounds.push(measured);
        }
    }
    Ok(report(&device, &others))
}

fn report(device: &[Vec<Round>; 2], others: &[Vec<Round>; 2]) -> FrontReport {
    let ratios = |[first, second]: &[Vec<Round>; 2], figure: fn(&Round) -> f64| {
        first.iter().zip(second).map(|(one, other)| figure(other) / figure(one).max(1e-9)).collect::<Vec<_>>()
    };
    let spread = |mut ratios: Vec<f64>| [0.0, 1.0].map(|share| quantile(&mut ratios, share));
    let receivers = ratios(device, |round| round.receiver);
    let rates = ratios(others, |round| round.gigabits);
    let [plain, attached] = [medians(&device[0]), medians(&device[1])];
    let other_traffic = [medians(&others[0]).gigabits, medians(&others[1]).gigabits];
    FrontReport {
        plain,
        attached,
        device_spread: spread(receivers.clone()),
        other_traffic,
        other_spread: spread(rates.clone()),
        bars: vec![
            Bar::most("lro.device_ratio", 0.6, quantile(&mut receivers.clone(), 0.5)),
            Bar::least("other_traffic.ratio", 0.97, quantile(&mut rates.clone(), 0.5)),
        ],
    }
}

fn medians(rounds: &[Round]) -> Round {
    let median = |figure: fn(&Round) -> f64| quantile(&mut rounds.iter().map(figure).collect::<Vec<_>>(), 0.5);
    Round {
        gigabits: median(|round| round.gigabits),
        receiver: median(|round| round.receiver),
        attached: median(|round| round.attached),
        machine: median(|round| round.machine),
        again: median(|round| round.again),
    }
}

fn line(round: usize, way: &str, measured: &Round) -> String {
    let Round { gigabits, receiver, attached, machine, again } = measured;
    format!(
        "round {round}, {way}: {gigabits:.2} Gb/s; CPU of a GB, s: receiver {receiver:.3}, attached process {attached:.3}, \
         machine {machine:.3}; {again:.3} % sent again"
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
    fn new(host: &Namespace) -> Result<Attached> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["nic", "attach", INTERFACE_A]).stdout(Stdio::piped());
        // A process inherits the processors of the thread that starts it, and ends with that thread.
        let processors = process::allowed_cpus();
        process::pin(0, SENDER);
        let child = host.spawn(&mut command);
        process::pin_to(&processors);
        let mut attached = Attached(child.context("starting baton nic attach")?);
        let mut said = String::new();
        BufReader::new(attached.0.stdout.take().context("its output")?).read_line(&mut said)?;
        ensure!(said.starts_with("attached to"), "baton nic attach ended at once");
        Ok(attached)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
    let (before, after) = std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(client, rate, &over));
        let receiver = scope.spawn(|| receive(server, &bytes));
        std::thread::sleep(Duration::from_secs_f64(WARMING));
        let before = Snapshot::take(&bytes, attached, b);
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let after = Snapshot::take(&bytes, attached, b);
        over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        receiver.join().map_err(|_| anyhow!("the receiver panicked"))??;
        Ok::<_, anyhow::Error>((before?, after?))
    })?;
    let got = (after.bytes - before.bytes).max(1) as f64;
    // Nanoseconds per byte are seconds per GB.
    let each = |of: fn(&Snapshot) -> u64| of(&after).saturating_sub(of(&before)) as f64 / got;
    let segments = (after.segments[0] - before.segments[0]).max(1);
    Ok(Round {
        gigabits: got * 8.0 / 1e3 / (after.micros - before.micros) as f64,
        receiver: each(|snapshot| snapshot.micros * 1000) - each(|snapshot| snapshot.spare),
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
