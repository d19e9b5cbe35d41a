//! NTttcp: throughput over kernel sockets, and its cost to this machine. It measures whatever NIC the route leads
//! through.

use crate::closed_loop::SetsAtEnd;
use crate::processor_trace::{self, Trace};
use anyhow::{Context, Result, bail, ensure};
use baton_abi::layout::Counter;
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::{process, socket};
use serde::Serialize;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct NtttcpSettings {
    /// Connections.
    pub connections: usize,
    /// Bytes of each send and receive.
    pub length: usize,
    /// Seconds that are measured.
    pub seconds: f64,
    /// Seconds before the measurement.
    pub warming: f64,
    /// The processor that this side's thread is bound to, if any.
    pub core: Option<usize>,
    /// Whether that processor's interrupts and processes are traced.
    pub traced: bool,
}

/// Figures of the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct NtttcpReport {
    /// Whether this side received.
    pub received: bool,
    /// Payload bytes.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
    /// Payload bits per second, in millions.
    pub megabits: f64,
    /// Payload bytes per frame in the payload's direction, by this kernel's counts of its interfaces' packets.
    pub average_frame: f64,
    /// Packets that all interfaces of this network namespace sent.
    pub packets_sent: u64,
    /// Packets that they received.
    pub packets_received: u64,
    /// Interrupts: those of Baton's NIC if there is one, else the machine's.
    pub interrupts: u64,
    /// Whether `interrupts` are the NIC's.
    pub of_the_nic: bool,
    /// Interrupts per second.
    pub interrupts_per_second: f64,
    /// Packets received per interrupt.
    pub packets_per_interrupt: f64,
    /// Runs of the deferred half (NET_RX soft interrupts) per second, of the machine.
    pub deferred_per_second: f64,
    /// Share of the machine's time in the interrupts' first half, in percent. None if this kernel does not account for
    /// it.
    pub first_half: Option<f64>,
    /// The same for the deferred half.
    pub deferred_half: Option<f64>,
    /// Cycles of the machine's busy time per payload byte, at its nominal frequency.
    pub cycles_per_byte: f64,
    /// What the bound processor did, if it was traced.
    #[serde(skip)]
    pub trace: Option<Trace>,
}

/// Counters of the machine and of this network namespace.
#[derive(Clone, Copy, Default)]
struct Counts {
    received: u64,
    sent: u64,
    interrupts: u64,
    deferred: u64,
    /// Clock ticks: busy (both halves included), first half, deferred half, all.
    busy: u64,
    first: u64,
    second: u64,
    all: u64,
}

fn numbers(line: &str) -> impl Iterator<Item = u64> + '_ {
    line.split_whitespace().filter_map(|word| word.parse().ok())
}

impl Counts {
    fn read(nic: Option<&Path>) -> Result<Counts> {
        let mut counts = Counts::default();
        let devices = std::fs::read_to_string("/proc/thread-self/net/dev").context("/proc/net/dev")?;
        for line in devices.lines().filter_map(|line| Some(line.split_once(':')?.1)) {
            let fields: Vec<u64> = numbers(line).collect();
            counts.received += fields.get(1).copied().unwrap_or(0);
            counts.sent += fields.get(9).copied().unwrap_or(0);
        }
        let stat = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let line = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name));
        let ticks: Vec<u64> = numbers(line("cpu ").unwrap_or_default()).collect();
        if let [user, nice, system, idle, wait, first, second, ..] = ticks[..] {
            (counts.first, counts.second) = (first, second);
            counts.busy = user + nice + system + first + second;
            counts.all = counts.busy + idle + wait;
        }
        counts.interrupts = numbers(line("intr ").unwrap_or_default()).next().unwrap_or(0);
        let soft = std::fs::read_to_string("/proc/softirqs").unwrap_or_default();
        let deferred = soft.lines().find_map(|line| line.trim_start().strip_prefix("NET_RX:"));
        counts.deferred = numbers(deferred.unwrap_or_default()).sum();
        if let Some(path) = nic {
            let counters = baton_client::tool::Tool::connect(path)?.statistics()?.counters;
            counts.interrupts = counters.get(Counter::Interrupts as usize).copied().unwrap_or(0);
        }
        Ok(counts)
    }
}

/// Nominal frequency of the processor, Hz. None if the system does not say.
pub fn frequency() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("cpu MHz"))?;
    Some(line.split(':').nth(1)?.trim().parse::<f64>().ok()? * 1e6)
}

/// Both sides: transfers bytes over the connections until the time is over. `move_some` is a send or a receive.
fn measure(
    settings: &NtttcpSettings,
    connections: &[TcpStream],
    received: bool,
    nic: Option<&Path>,
    mut move_some: impl FnMut(&TcpStream, &mut [u8]) -> io::Result<usize>,
) -> Result<NtttcpReport> {
    if let Some(core) = settings.core {
        ensure!(process::pin(0, core), "this process may not run on processor {core}");
    }
    let traced = settings.core.filter(|_| settings.traced);
    let poller = Poller::new()?;
    for (at, connection) in connections.iter().enumerate() {
        connection.set_nonblocking(true)?;
        poller.add(connection.as_fd(), at as u64, Trigger::Edge)?;
    }
    let mut buffer = vec![0x5a; settings.length];
    let mut tokens: Vec<u64> = (0..connections.len() as u64).collect();
    let begins = monotonic_micros() + (settings.warming * 1e6) as u64;
    let mut ends = u64::MAX;
    let (mut bytes, mut before, mut open) = (0u64, None, connections.len());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ending = SetsAtEnd(&over);
        let mut tracing = None;
        while monotonic_micros() < ends && open > 0 {
            for token in tokens.drain(..) {
                loop {
                    let now = monotonic_micros();
                    if before.is_none() && now >= begins {
                        tracing = traced.map(|core| processor_trace::begin(scope, core, &over)).transpose()?;
                        let now = monotonic_micros();
                        before = Some((Counts::read(nic)?, now, bytes));
                        ends = now + (settings.seconds * 1e6) as u64;
                    }
                    if now >= ends {
                        break;
                    }
                    match move_some(&connections[token as usize], &mut buffer) {
                        Ok(0) => {
                            open -= 1;
                            break;
                        }
                        Ok(count) => bytes += count as u64,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        // The other side's time is over.
                        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => {
                            open -= 1;
                            break;
                        }
                        Err(error) => return Err(error).context("the connection"),
                    }
                }
            }
            poller.wait(Some(Duration::from_millis(20)), &mut tokens)?;
        }
        let Some((before, began, had)) = before else { bail!("the connections ended before the warming-up was over") };
        let (after, seconds) = (Counts::read(nic)?, (monotonic_micros() - began) as f64 / 1e6);
        drop(ending);
        let trace = tracing.map(processor_trace::Tracing::end).transpose()?;
        Ok(NtttcpReport { trace, ..report(&before, &after, bytes - had, seconds, received, nic.is_some()) })
    })
}

fn report(before: &Counts, after: &Counts, bytes: u64, seconds: f64, received: bool, of_the_nic: bool) -> NtttcpReport {
    let of = |count: fn(&Counts) -> u64| count(after).saturating_sub(count(before));
    let (packets_received, packets_sent) = (of(|counts| counts.received), of(|counts| counts.sent));
    let (interrupts, all) = (of(|counts| counts.interrupts), of(|counts| counts.all).max(1) as f64);
    let share = |ticks: u64, ever: u64| (ever > 0).then(|| ticks as f64 / all * 100.0);
    // All cores together have this many ticks in `seconds`.
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let busy = of(|counts| counts.busy) as f64 / all * seconds * cores;
    NtttcpReport {
        received,
        bytes,
        seconds,
        megabits: bytes as f64 * 8.0 / seconds / 1e6,
        average_frame: bytes as f64 / (if received { packets_received } else { packets_sent }).max(1) as f64,
        packets_sent,
        packets_received,
        interrupts,
        of_the_nic,
        interrupts_per_second: interrupts as f64 / seconds,
        packets_per_interrupt: packets_received as f64 / interrupts.max(1) as f64,
        deferred_per_second: of(|counts| counts.deferred) as f64 / seconds,
        first_half: share(of(|counts| counts.first), after.first),
        deferred_half: share(of(|counts| counts.second), after.second),
        cycles_per_byte: busy * frequency().unwrap_or(0.0) / bytes.max(1) as f64,
        trace: None,
    }
}

/// Waits for the sender, and receives.
///
/// # Errors
/// If it cannot listen at the address, or the sender disconnects before the measurement.
pub fn receive(settings: &NtttcpSettings, address: SocketAddr, nic: Option<&Path>) -> Result<NtttcpReport> {
    let listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    let accepted: Vec<TcpStream> =
        (0..settings.connections).map(|_| listener.accept().map(|(stream, _)| stream)).collect::<io::Result<_>>()?;
    measure(settings, &accepted, true, nic, |stream, buffer| socket::receive(stream.as_fd(), buffer))
}

/// Connects to a receiver, waits for it for ten seconds, and sends.
///
/// # Errors
/// If there is none.
pub fn send(settings: &NtttcpSettings, address: SocketAddr, nic: Option<&Path>) -> Result<NtttcpReport> {
    let deadline = monotonic_micros() + 10_000_000;
    let connect = || loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && monotonic_micros() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.with_context(|| format!("no receiver at {address}; start `baton ntttcp receive` there first")),
        }
    };
    let connected = (0..settings.connections).map(|_| connect()).collect::<Result<Vec<TcpStream>>>()?;
    measure(settings, &connected, false, nic, |stream, buffer| socket::send(stream.as_fd(), buffer))
}

/// The report as a table, with NTttcp's names.
pub fn table(report: &NtttcpReport) -> String {
    let share = |share: Option<f64>| share.map_or("not accounted for by this kernel".into(), |share| format!("{share:.2} %"));
    let whose = if report.of_the_nic { "the NIC's" } else { "the machine's" };
    let packets = if report.received { "Payload bytes/packet received" } else { "Payload bytes/packet sent" };
    [
        ("Throughput (KB/s)".to_string(), format!("{:.3}", report.bytes as f64 / report.seconds / 1000.0)),
        ("Throughput (Mbit/s)".into(), format!("{:.3}", report.megabits)),
        (packets.into(), format!("{:.1}", report.average_frame)),
        ("Packets sent".into(), report.packets_sent.to_string()),
        ("Packets received".into(), report.packets_received.to_string()),
        ("Packets received/interrupt".into(), format!("{:.2}", report.packets_per_interrupt)),
        (format!("Interrupts/s ({whose})"), format!("{:.1}", report.interrupts_per_second)),
        ("Deferred halves/s".into(), format!("{:.1}", report.deferred_per_second)),
        ("Time in the first half".into(), share(report.first_half)),
        ("Time in the deferred half".into(), share(report.deferred_half)),
        ("Cycles/byte".into(), format!("{:.2}", report.cycles_per_byte)),
    ]
    .map(|(name, value)| format!("{name:<34}{value:>16}\n"))
    .concat()
        + &report.trace.as_ref().map(Trace::table).unwrap_or_default()
}
