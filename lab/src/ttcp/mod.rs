//! TTCP: a program on host A transmits to host B or receives from it, in messages of one size, through the kernel and
//! through the NIC in its variants. Everything that the same amount of data costs is counted.
//!
//! Host CPU is that of the program, the agent, the host's TCP and the kernel's thread that processes host A's received
//! frames; the NIC's is beside it. Events are the wake-ups of those processes: each is an interrupt or a doorbell that
//! a sleeper was woken by. All ways take turns, message size by message size; medians count.
//!
//! The kernel's turn is on the same two hosts, with the NIC as an ordinary card. A veth between two hosts is measured
//! for comparison, but does not tell their costs apart: whoever sends a frame does the work of receiving it, too.

pub mod buffering;
pub mod cost;
mod plots;
pub mod program;
mod report;

use anyhow::{Context, Result, bail, ensure};
use baton_abi::layout::Counter;
use baton_bed::statistics::quantile;
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, Testbed, TestbedSettings, address_b, without_baton};
use baton_client::rules::{Interface, Nagle, Offload};
use baton_client::tool::Tool;
use baton_linux::events::monotonic_micros;
use baton_linux::interface;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::Place;
use program::{Direction, Peer};
use serde::Serialize;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub use plots::svg;
pub use report::{TtcpReport, line};

/// Microseconds that a program has to connect, and its connection to get to the NIC.
const PATIENCE: u64 = 20_000_000;

/// How the program's data reach the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    /// Its name.
    pub name: &'static str,
    /// Who makes the connection; None for the kernel alone.
    pub offload: Option<Offload>,
    /// Two hosts with a veth between them, without a NIC.
    pub veth: bool,
    /// The message interface.
    pub interface: Interface,
    /// Where small sends are kept back.
    pub nagle: Nagle,
    /// The program sets TCP_NODELAY: nowhere.
    pub no_delay: bool,
}

/// All ways. The first is what the others are compared with.
pub const WAYS: [Way; 11] = [
    NONE,
    Way { name: "veth", veth: true, ..NONE },
    Way { name: "handoff", offload: Some(Offload::Handoff), ..NONE },
    FAST_PATH,
    Way { name: "fast-path-no-nagle", no_delay: true, ..FAST_PATH },
    FULL,
    Way { name: "full-handshake", interface: Interface::Handshake, ..FULL },
    Way { name: "full-aggregated", interface: Interface::Aggregated, nagle: Nagle::Host, ..FULL },
    Way { name: "full-nagle-host", nagle: Nagle::Host, ..FULL },
    Way { name: "full-handshake-nagle-host", interface: Interface::Handshake, nagle: Nagle::Host, ..FULL },
    Way { name: "full-aggregated-nagle-nic", interface: Interface::Aggregated, ..FULL },
];

/// The kernel alone.
const NONE: Way =
    Way { name: "none", offload: None, veth: false, interface: Interface::Batched, nagle: Nagle::Nic, no_delay: false };

/// Connections of which the NIC keeps the fast path.
const FAST_PATH: Way = Way { name: "fast-path", offload: Some(Offload::FastPath), ..NONE };

/// Connections that the NIC makes, with the usual interface.
const FULL: Way = Way { name: "full", offload: Some(Offload::Full), ..NONE };

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct TtcpSettings {
    /// Message sizes in bytes.
    pub sizes: Vec<usize>,
    /// The ways that are measured, in turn.
    pub ways: Vec<Way>,
    /// Directions of the data.
    pub directions: Vec<Direction>,
    /// Rounds; the medians count.
    pub rounds: usize,
    /// Most messages of a transfer, and most bytes: whichever is less. The same for all ways.
    pub messages: u64,
    /// See `messages`.
    pub bytes: u64,
    /// The kernels may hand over frames of 64 KB, all the way to the other kernel.
    pub segmentation: bool,
    /// Count the NIC's instructions, too; that needs valgrind.
    pub costs: bool,
    /// Path of the `baton` program, if it is not the running one.
    pub program: Option<PathBuf>,
}

impl Default for TtcpSettings {
    fn default() -> Self {
        TtcpSettings {
            sizes: vec![1, 4, 16, 64, 256, 512, 1024, 1448, 2048, 4096, 8192, 16_384, 65_536],
            ways: WAYS.to_vec(),
            directions: vec![Direction::Transmit, Direction::Receive],
            rounds: 5,
            messages: 100_000,
            bytes: 256 << 20,
            segmentation: true,
            costs: false,
            program: None,
        }
    }
}

/// What a transfer cost, or the medians of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Figures {
    /// Megabits per second.
    pub megabits: f64,
    /// CPU milliseconds of the host: program, agent, host's TCP, and the kernel's thread for received frames.
    pub host_ms: f64,
    /// Of these, the program's, with its system calls.
    pub program_ms: f64,
    /// CPU milliseconds of the NIC, with its polling.
    pub nic_ms: f64,
    /// Milliseconds that the NIC spent in rounds that found work.
    pub nic_busy_ms: f64,
    /// Wake-ups of the host's processes.
    pub events: f64,
    /// Messages that the program has sent to the NIC.
    pub messages: f64,
    /// Doorbells that the NIC has rung for the program.
    pub doorbells: f64,
    /// Wake-ups of the NIC.
    pub nic_wakeups: f64,
    /// Packets on the wire, in both directions.
    pub packets: f64,
}

impl Figures {
    fn median(of: &[Figures]) -> Figures {
        let median = |figure: fn(&Figures) -> f64| quantile(&mut of.iter().map(figure).collect::<Vec<_>>(), 0.5);
        Figures {
            megabits: median(|f| f.megabits),
            host_ms: median(|f| f.host_ms),
            program_ms: median(|f| f.program_ms),
            nic_ms: median(|f| f.nic_ms),
            nic_busy_ms: median(|f| f.nic_busy_ms),
            events: median(|f| f.events),
            messages: median(|f| f.messages),
            doorbells: median(|f| f.doorbells),
            nic_wakeups: median(|f| f.nic_wakeups),
            packets: median(|f| f.packets),
        }
    }
}

/// One way at one message size.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The way's name.
    pub way: &'static str,
    /// Direction of the data.
    pub direction: Direction,
    /// Bytes of a message.
    pub size: usize,
    /// Bytes of a transfer.
    pub bytes: u64,
    /// Medians of the rounds.
    #[serde(flatten)]
    pub figures: Figures,
    /// Host CPU over that of the kernel alone: the median of the rounds' ratios.
    pub host_ratio: f64,
    /// The same for events.
    pub events_ratio: f64,
}

/// Hosts on which a way is measured.
struct Hosts {
    bed: Option<(Testbed, Tool)>,
    bare: Option<[Namespace; 2]>,
    /// The kernel's threads for host A's received frames.
    kernel: Vec<u32>,
}

impl Hosts {
    /// Makes hosts; `made` makes them, and the kernel's threads that are new afterwards are theirs.
    fn new(settings: &TtcpSettings, with_baton: bool) -> Result<Hosts> {
        let others = process::napi_threads(INTERFACE_A);
        let bed = TestbedSettings {
            threaded_napi: true,
            segmentation: settings.segmentation,
            program: settings.program.clone(),
            ..Default::default()
        };
        let mut hosts = Hosts { bed: None, bare: None, kernel: Vec::new() };
        if with_baton {
            let bed = Testbed::new(&bed)?;
            let tool = bed.tool()?;
            hosts.bed = Some((bed, tool));
        } else {
            let bare = without_baton(&bed)?;
            if !settings.segmentation {
                for (host, name) in bare.iter().zip([INTERFACE_A, INTERFACE_B]) {
                    host.run(|| interface::set_segmentation(name, false)).context("turning TSO and GSO off")?;
                }
            }
            hosts.bare = Some(bare);
        }
        hosts.kernel = process::napi_threads(INTERFACE_A).into_iter().filter(|thread| !others.contains(thread)).collect();
        Ok(hosts)
    }

    fn pair(&self) -> [&Namespace; 2] {
        match (&self.bed, &self.bare) {
            (Some((bed, _)), _) => [&bed.host_a, &bed.host_b],
            (None, Some([a, b])) => [a, b],
            (None, None) => unreachable!("one of them is made"),
        }
    }

    /// Starts the program on host A.
    fn start(&self, settings: &TtcpSettings, way: Way, peer: SocketAddr, what: (Direction, usize, u64)) -> Result<Child> {
        let baton = settings.program.clone().map_or_else(std::env::current_exe, Ok)?;
        let mut command = Command::new(&baton);
        if let (Some((bed, _)), Some(offload)) = (&self.bed, way.offload) {
            command.arg("run").arg("--socket").arg(bed.socket()).args(["--rule", "established", "--eager"]);
            command.args(["--offload", offload.name(), "--interface", way.interface.name(), "--nagle", way.nagle.name(), "--"]);
            command.arg(&baton);
        }
        let (direction, size, bytes) = what;
        let direction = if direction == Direction::Transmit { "transmit" } else { "receive" };
        command.args(["ttcp-program", &peer.to_string(), direction, &size.to_string(), &bytes.to_string()]);
        command.args(way.no_delay.then_some("--no-delay"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        process::inherit(&mut command, &[], true);
        let child = self.pair()[0].spawn(&mut command).context("starting the program")?;
        // The NIC has the first processor. A program there would wait for it, and it for the program.
        process::pin(child.id() as i32, process::cores() - 1);
        Ok(child)
    }

    /// One transfer.
    fn transfer(&mut self, settings: &TtcpSettings, way: Way, direction: Direction, size: usize) -> Result<(u64, Figures)> {
        let bytes = (size as u64 * settings.messages).min(settings.bytes.max(size as u64));
        let listener = self.pair()[1].run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0)))?;
        let mut child = Running(self.start(settings, way, listener.local_addr()?, (direction, size, bytes))?);
        let mut peer = child.accept(&listener)?;
        if way.offload.is_some() {
            self.await_nic(&mut peer)?;
        }
        let program = child.0.id();
        let before = self.snapshot(program)?;
        peer.transfer(direction, size, bytes)?;
        let after = self.snapshot(program)?;
        peer.end()?;
        let status = child.0.wait()?;
        ensure!(status.success(), "the program failed ({status})");
        Ok((bytes, after.since(&before, bytes)))
    }

    /// Exchanges words with the program until its connection is on the NIC.
    fn await_nic(&mut self, peer: &mut Peer) -> Result<()> {
        let deadline = monotonic_micros() + PATIENCE;
        let Some((_, tool)) = &mut self.bed else { return Ok(()) };
        loop {
            peer.exchange()?;
            let connections = tool.connections()?;
            let here = peer.0.local_addr()?.to_string();
            let found = connections.iter().find(|info| info.peer == here);
            match found {
                Some(info) if info.place == Place::Nic => return Ok(()),
                _ if monotonic_micros() > deadline => bail!("the connection did not get to the NIC: {found:?}"),
                _ => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn snapshot(&mut self, program: u32) -> Result<Snapshot> {
        let cpu = |process: u32| process::cpu_nanos(process).unwrap_or(0);
        let wakeups = |process: u32| process::wakeups(process).unwrap_or(0);
        let mut snapshot = Snapshot { micros: monotonic_micros(), program: cpu(program), ..Snapshot::default() };
        snapshot.events = wakeups(program) + self.kernel.iter().map(|thread| wakeups(*thread)).sum::<u64>();
        snapshot.others = self.kernel.iter().map(|thread| cpu(*thread)).sum();
        snapshot.packets = packets(self.pair()[1])?;
        if let Some((_, tool)) = &mut self.bed {
            let statistics = tool.statistics()?;
            let counter = |counter: Counter| statistics.counters.get(counter as usize).copied().unwrap_or(0);
            for process in [statistics.agent_process, statistics.host_tcp_process].into_iter().filter(|process| *process > 0) {
                snapshot.others += cpu(process);
                snapshot.events += wakeups(process);
            }
            snapshot.nic = cpu(statistics.nic_process);
            snapshot.nic_wakeups = wakeups(statistics.nic_process);
            snapshot.nic_busy = counter(Counter::BusyNanoseconds);
            use Counter::{ProgramControl, ProgramPost, ProgramRecvd, ProgramSend};
            snapshot.messages = [ProgramSend, ProgramRecvd, ProgramPost, ProgramControl].map(counter).iter().sum();
            snapshot.doorbells = counter(Counter::Doorbells);
        }
        Ok(snapshot)
    }
}

/// Counts at one moment; times in nanoseconds.
#[derive(Clone, Copy, Default)]
struct Snapshot {
    micros: u64,
    program: u64,
    others: u64,
    nic: u64,
    nic_busy: u64,
    events: u64,
    messages: u64,
    doorbells: u64,
    nic_wakeups: u64,
    packets: u64,
}

impl Snapshot {
    fn since(&self, before: &Snapshot, bytes: u64) -> Figures {
        let of = |count: fn(&Snapshot) -> u64| count(self).saturating_sub(count(before)) as f64;
        Figures {
            megabits: bytes as f64 * 8.0 / of(|s| s.micros).max(1.0),
            host_ms: of(|s| s.program + s.others) / 1e6,
            program_ms: of(|s| s.program) / 1e6,
            nic_ms: of(|s| s.nic) / 1e6,
            nic_busy_ms: of(|s| s.nic_busy) / 1e6,
            events: of(|s| s.events),
            messages: of(|s| s.messages),
            doorbells: of(|s| s.doorbells),
            nic_wakeups: of(|s| s.nic_wakeups),
            packets: of(|s| s.packets),
        }
    }
}

/// Packets of a host's interface, received and sent.
fn packets(host: &Namespace) -> Result<u64> {
    let text = host.run(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(INTERFACE_B)?.strip_prefix(':'));
    let fields: Vec<u64> = line.context("no interface")?.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    Ok(fields.get(1).copied().unwrap_or(0) + fields.get(9).copied().unwrap_or(0))
}

/// The program, which is ended when this is dropped.
struct Running(Child);

impl Running {
    /// Waits until it has connected.
    fn accept(&mut self, listener: &TcpListener) -> Result<Peer> {
        listener.set_nonblocking(true)?;
        let deadline = monotonic_micros() + PATIENCE;
        loop {
            if let Ok((stream, _)) = listener.accept() {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(Duration::from_micros(PATIENCE)))?;
                return Ok(Peer(stream));
            }
            if let Some(status) = self.0.try_wait()? {
                bail!("the program ended before it had connected ({status})");
            }
            ensure!(monotonic_micros() < deadline, "the program has not connected");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures all cells.
///
/// # Errors
/// If a host cannot be made, a connection breaks or does not get to the NIC, or a byte is wrong.
pub fn run(settings: &TtcpSettings, mut progress: impl FnMut(&Cell)) -> Result<TtcpReport> {
    ensure!(!settings.ways.is_empty() && !settings.sizes.is_empty(), "nothing to measure: name a way and a message size");
    let mut bare = settings.ways.iter().any(|way| way.veth).then(|| Hosts::new(settings, false)).transpose()?;
    let mut baton = Hosts::new(settings, true)?;
    let mut cells = Vec::new();
    for &direction in &settings.directions {
        for &size in &settings.sizes {
            let mut rounds: Vec<Vec<Figures>> = vec![Vec::new(); settings.ways.len()];
            let mut bytes = 0;
            for _ in 0..settings.rounds.max(1) {
                for (way, rounds) in settings.ways.iter().zip(&mut rounds) {
                    let hosts = bare.as_mut().filter(|_| way.veth).unwrap_or(&mut baton);
                    let result = hosts.transfer(settings, *way, direction, size);
                    let (done, figures) =
                        result.with_context(|| format!("{} {direction:?}, messages of {size} bytes", way.name))?;
                    rounds.push(figures);
                    bytes = done;
                }
            }
            let kernel = settings.ways.iter().position(|way| way.name == WAYS[0].name);
            for (way, of) in settings.ways.iter().zip(&rounds) {
                let ratio = |figure: fn(&Figures) -> f64| {
                    let kernels = kernel.map_or(&[][..], |at| &rounds[at]);
                    quantile(&mut of.iter().zip(kernels).map(|(a, b)| figure(a) / figure(b).max(1e-3)).collect::<Vec<_>>(), 0.5)
                };
                let (host_ratio, events_ratio) = (ratio(|f| f.host_ms), ratio(|f| f.events));
                let cell = Cell { way: way.name, direction, size, bytes, figures: Figures::median(of), host_ratio, events_ratio };
                progress(&cell);
                cells.push(cell);
            }
        }
    }
    let mut report = TtcpReport::new(cells, if settings.costs { cost::measure()? } else { Vec::new() });
    if settings.costs {
        report.buffering = buffering::measure()?;
    }
    Ok(report)
}
