//! Large receive: throughput and the receiver's CPU per gigabyte, for frames of 1500 bytes on the wire and 1 to 64
//! connections, without aggregation, with the kernel's GRO, and with the NIC's two modes, interleaved.
//!
//! The receiving host's kernel work is in a thread of its own (threaded NAPI on the TAP). Otherwise the NIC's writes
//! would do it, and could not be separated from the NIC's work. Every cell has the same emulated link, also those
//! without reordering; its cost is the NIC's.

use crate::bars::Bar;
use anyhow::{Context, Result, anyhow, ensure};
use baton_abi::layout::Counter;
use baton_bed::statistics;
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{self, Testbed, TestbedSettings};
use baton_linux::events::{Poller, Trigger, monotonic_micros, thread_nanos};
use baton_linux::{process, socket};
use baton_lro::{Mode, Push};
use baton_offloads::Offloads;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Statistics;
use baton_sim::stream;
use plotters::prelude::*;
use serde::Serialize;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Microseconds before a cell's measurement.
const WARMING: u64 = 300_000;

/// Least rounds of the cells with bounds, and the shares of segments held back in them, in percent.
const BAR_ROUNDS: usize = 9;
const BAR_REORDER: [f64; 2] = [0.0, 1.0];

/// Gb/s at which the paper's large receive levels off (Figure 13), on its hardware.
const PAPER: f64 = 4.75;

/// What aggregates segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Nothing.
    Plain,
    /// The kernel.
    Gro,
    /// The NIC, by GRO's rules.
    InOrder,
    /// The NIC, with reordering.
    Reorder,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 4] = [Way::Plain, Way::Gro, Way::InOrder, Way::Reorder];

    fn name(self) -> &'static str {
        match self {
            Way::Plain => "plain NIC",
            Way::Gro => "Linux GRO",
            Way::InOrder => "Baton in-order",
            Way::Reorder => "Baton reorder",
        }
    }

    fn settings(self) -> baton_lro::LroSettings {
        let (mode, push) = match self {
            Way::Plain | Way::Gro => (Mode::Off, Push::Flush),
            Way::InOrder => (Mode::InOrder, Push::Bulk),
            Way::Reorder => (Mode::Reorder, Push::Bulk),
        };
        baton_lro::LroSettings { mode, push, ..baton_lro::LroSettings::default() }
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct LroSettings {
    /// Numbers of connections.
    pub connections: Vec<usize>,
    /// Shares of segments that are held back, in percent.
    pub reorder: Vec<f64>,
    /// Microseconds of a cell.
    pub length: u64,
    /// Rounds over all cells; the median of each is reported.
    pub rounds: usize,
    /// The NIC's workers. Several have queues of their own, among which a hash divides the connections.
    pub workers: usize,
    /// Megabits per second that all connections together send at most; None for as fast as they can.
    pub rate: Option<f64>,
}

impl LroSettings {
    /// Checks what cannot be.
    ///
    /// # Errors
    /// The message says which setting is wrong.
    pub fn check(&self) -> Result<()> {
        ensure!(self.connections.iter().all(|connections| (1..=4000).contains(connections)), "connections: from 1 to 4000");
        ensure!(self.reorder.iter().all(|share| (0.0..=100.0).contains(share)), "shares held back: from 0 to 100 percent");
        ensure!((1..=16).contains(&self.workers), "{} workers: from 1 to 16", self.workers);
        if let Some(rate) = self.rate {
            ensure!((0.1..=100_000.0).contains(&rate), "a rate of {rate} Mb/s: from 0.1 to 100000");
        }
        Ok(())
    }

    /// Whether the figures with bounds are measured: they are about one worker and senders without a limit.
    fn is_bounded(&self) -> bool {
        self.workers == 1 && self.rate.is_none()
    }
}

impl Default for LroSettings {
    fn default() -> Self {
        LroSettings {
            connections: vec![1, 2, 4, 8, 16, 32, 64],
            reorder: vec![0.0, 1.0, 5.0],
            length: 700_000,
            rounds: 1,
            workers: 1,
            rate: None,
        }
    }
}

/// One cell's figures.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cell {
    /// What aggregates segments.
    pub way: Way,
    /// Connections.
    pub connections: usize,
    /// Segments held back, in percent.
    pub reorder: f64,
    /// Payload that the receiver's program got, Gb/s.
    pub gigabits: f64,
    /// CPU seconds per GB (10⁹ bytes) of the receiver's program.
    pub program_cpu: f64,
    /// CPU seconds per GB of the receiver's kernel thread.
    pub kernel_cpu: f64,
    /// CPU seconds per GB of the NIC.
    pub nic_cpu: f64,
    /// Mean IP bytes of the NIC's aggregates; 0 if it makes none.
    pub mean_aggregate: f64,
    /// Frames that the NIC gave to the kernel, per MB.
    pub frames_per_mb: f64,
    /// Segments that the sender retransmitted, in percent of those on the wire.
    pub retransmitted: f64,
    /// Frames that the NIC's busiest worker received, over the workers' mean.
    pub busiest: f64,
}

impl Cell {
    fn receiver_cpu(&self) -> f64 {
        self.program_cpu + self.kernel_cpu
    }
}

/// The table.
#[derive(Clone, Debug, Serialize)]
pub struct LroReport {
    /// The NIC's workers.
    pub workers: usize,
    /// Megabits per second that all connections together send at most.
    pub rate: Option<f64>,
    /// All cells.
    pub cells: Vec<Cell>,
    /// The figures with bounds; none with several workers or a limited rate.
    pub bars: Vec<Bar>,
}

/// Most frames that wait at the sender's interface.
const QUEUE: u16 = 4096;

/// The sender's memory for a connection in bytes, which limits its data in flight: enough for the link many times over,
/// while all connections together fit into the interface's queue. A TAP does not hold its senders back as a card's
/// driver does, and the receiver is measured here, not how much a queue loses, nor how the sender recovers.
fn window(connections: usize) -> usize {
    (700_000 / connections).max(128 << 10)
}

fn bed(way: Way, connections: usize, reorder: f64, workers: usize) -> Result<Testbed> {
    let link = LinkSettings { delay: 50, reorder: (reorder * 10_000.0) as u32, hold: 200, seed: 3, ..LinkSettings::default() };
    let one = TestbedSettings::default();
    // One worker has a processor of its own; several run where there is one.
    let nic_cores = if workers == 1 { one.nic_cores.clone() } else { Vec::new() };
    Testbed::new(&TestbedSettings {
        workers,
        card: workers > 1,
        nic_cores,
        link,
        // The moderation is the same for all, as a card's driver would have it.
        offloads: Offloads { lro: way.settings(), moderation: baton_moderation::Mode::Adaptive, ..Offloads::default() },
        gro: way == Way::Gro,
        threaded_napi: true,
        peer_queue: Some(QUEUE),
        peer_sysctls: vec![("ipv4/tcp_wmem", format!("4096 16384 {}", window(connections)))],
        spin: 20,
        ..one
    })
}

/// Sends as fast as it can until `over`. Keys of the streams are the connections' indexes.
pub(crate) fn send(clients: &[TcpStream], verified: bool, over: &AtomicBool) -> Result<()> {
    process::pin(0, 0);
    let poller = Poller::new()?;
    for (at, client) in clients.iter().enumerate() {
        poller.add(client.as_fd(), at as u64, Trigger::Edge)?;
    }
    let mut piece = vec![0x5a_u8; 1 << 16];
    let mut sent = vec![0u64; clients.len()];
    let mut tokens: Vec<u64> = (0..clients.len() as u64).collect();
    while !over.load(Ordering::Relaxed) {
        for token in tokens.drain(..) {
            let at = token as usize;
            loop {
                if verified {
                    stream::fill(at as u64, sent[at], &mut piece);
                }
                match socket::send(clients[at].as_fd(), &piece) {
                    Ok(count) => sent[at] += count as u64,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("the sender"),
                }
                if over.load(Ordering::Relaxed) {
                    return Ok(());
                }
            }
        }
        poller.wait(Some(Duration::from_millis(10)), &mut tokens)?;
    }
    Ok(())
}

/// The receiver's program: reads all that arrives, and checks it if `verified`.
pub(crate) struct Receiver<'a> {
    servers: &'a [TcpStream],
    poller: Poller,
    buffer: Vec<u8>,
    tokens: Vec<u64>,
    got: Vec<u64>,
    verified: bool,
    mismatches: u64,
}

impl<'a> Receiver<'a> {
    pub fn new(servers: &'a [TcpStream], verified: bool) -> Result<Receiver<'a>> {
        let poller = Poller::new()?;
        for (at, server) in servers.iter().enumerate() {
            poller.add(server.as_fd(), at as u64, Trigger::Readable)?;
        }
        let (buffer, got) = (vec![0; 1 << 18], vec![0; servers.len()]);
        Ok(Receiver { servers, poller, buffer, tokens: Vec::new(), got, verified, mismatches: 0 })
    }

    pub fn total(&self) -> u64 {
        self.got.iter().sum()
    }

    /// Runs until a time, or until this many bytes have arrived.
    pub fn run(&mut self, until: u64, bytes: u64) -> Result<()> {
        while monotonic_micros() < until && self.total() < bytes {
            self.poller.wait(Some(Duration::from_millis(10)), &mut self.tokens)?;
            for token in std::mem::take(&mut self.tokens) {
                let at = token as usize;
                match socket::receive(self.servers[at].as_fd(), &mut self.buffer) {
                    Ok(0) => return Err(anyhow!("the sender closed")),
                    Ok(count) => {
                        if self.verified {
                            self.mismatches += stream::mismatches(at as u64, self.got[at], &self.buffer[..count]);
                        }
                        self.got[at] += count as u64;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error).context("the receiver"),
                }
            }
        }
        Ok(())
    }
}

/// Nanoseconds of CPU that a host's interface and the NIC have used so far, and what the NIC has counted.
fn used(bed: &Testbed, napi: &[u32]) -> Result<([u64; 2], Statistics)> {
    let statistics = bed.tool()?.statistics()?;
    let kernel = napi.iter().filter_map(|thread| process::cpu_nanos(*thread)).sum();
    let nic = process::cpu_nanos(statistics.nic_process).context("the NIC has ended")?;
    Ok(([kernel, nic], statistics))
}

/// Frames that the busiest worker received between two looks, over the workers' mean.
fn busiest(before: &Statistics, after: &Statistics) -> f64 {
    let frames = |counters: &Vec<u64>| counters[Counter::WireReceived as usize];
    let of: Vec<u64> = before.workers.iter().zip(&after.workers).map(|(before, after)| frames(after) - frames(before)).collect();
    let mean = of.iter().sum::<u64>() as f64 / of.len().max(1) as f64;
    of.iter().max().copied().unwrap_or(0) as f64 / mean.max(1.0)
}

fn run_cell(way: Way, connections: usize, reorder: f64, settings: &LroSettings) -> Result<Cell> {
    let bed = bed(way, connections, reorder, settings.workers)?;
    let (servers, clients) = connect_pairs(&bed, connections, false)?;
    if let Some(rate) = settings.rate {
        let bytes = (rate * 1e6 / 8.0 / connections as f64).max(1.0) as u64;
        clients.iter().try_for_each(|client| socket::limit_rate(client.as_fd(), bytes)).context("limiting the sender's rate")?;
    }
    let napi = process::napi_threads("baton0");
    if napi.is_empty() {
        return Err(anyhow!("the kernel has no NAPI thread for the TAP: is /sys/class/net/NAME/threaded writable?"));
    }
    napi.iter().for_each(|thread| _ = process::pin(*thread as i32, 1));
    let retransmitted = || testbed::counter(&bed.host_b, "snmp", "Tcp:", "RetransSegs");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(&clients, false, &over));
        let measured = scope.spawn(|| -> Result<Cell> {
            process::pin(0, 1);
            let mut receiver = Receiver::new(&servers, false)?;
            receiver.run(monotonic_micros() + WARMING, u64::MAX)?;
            let (before, earlier) = used(&bed, &napi)?;
            let (program, again) = (thread_nanos(), retransmitted()?);
            let (started, had) = (monotonic_micros(), receiver.total());
            receiver.run(started + settings.length, u64::MAX)?;
            let (took, bytes) = ((monotonic_micros() - started) as f64, (receiver.total() - had) as f64);
            let (program, again) = (thread_nanos() - program, retransmitted()? - again);
            let (after, later) = used(&bed, &napi)?;
            let count = |counter: Counter| (later.counters[counter as usize] - earlier.counters[counter as usize]) as f64;
            let per_gigabyte = |nanos: u64| nanos as f64 / bytes;
            Ok(Cell {
                way,
                connections,
                reorder,
                gigabits: bytes * 8.0 / took / 1000.0,
                program_cpu: per_gigabyte(program),
                kernel_cpu: per_gigabyte(after[0] - before[0]),
                nic_cpu: per_gigabyte(after[1] - before[1]),
                mean_aggregate: count(Counter::AggregateBytes) / count(Counter::Aggregates).max(1.0),
                frames_per_mb: count(Counter::HostSent) / (bytes / 1e6),
                retransmitted: again as f64 / count(Counter::WireReceived).max(1.0) * 100.0,
                busiest: busiest(&earlier, &later),
            })
        });
        let measured = measured.join().map_err(|_| anyhow!("the receiver panicked"));
        over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        measured?
    })
}

/// Receives this many bytes over four connections with reordering, and compares every one. Returns how many differ.
///
/// # Errors
/// If the test bed cannot be made.
pub fn verify(bytes: u64) -> Result<u64> {
    let bed = bed(Way::Reorder, 4, 1.0, 1)?;
    let (servers, clients) = connect_pairs(&bed, 4, false)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(&clients, true, &over));
        let received = Receiver::new(&servers, true).and_then(|mut receiver| {
            receiver.run(u64::MAX, bytes)?;
            Ok(receiver.mismatches)
        });
        over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        received
    })
}

/// Medians, figure by figure, of the same cell's rounds.
fn median(cells: &[Cell]) -> Cell {
    let of = |figure: fn(&Cell) -> f64| statistics::quantile(&mut cells.iter().map(figure).collect::<Vec<_>>(), 0.5);
    Cell {
        gigabits: of(|cell| cell.gigabits),
        program_cpu: of(|cell| cell.program_cpu),
        kernel_cpu: of(|cell| cell.kernel_cpu),
        nic_cpu: of(|cell| cell.nic_cpu),
        mean_aggregate: of(|cell| cell.mean_aggregate),
        frames_per_mb: of(|cell| cell.frames_per_mb),
        retransmitted: of(|cell| cell.retransmitted),
        busiest: of(|cell| cell.busiest),
        ..cells[0]
    }
}

/// The figures with bounds. Both cells of a ratio are from one round, a few seconds apart, and the median of the rounds
/// counts: the machine's speed changes from minute to minute.
fn bars(rounds: &[Vec<Cell>]) -> Vec<Bar> {
    let in_rounds = |figure: &dyn Fn(&[Cell]) -> Option<f64>| {
        let mut found: Vec<f64> = rounds.iter().filter_map(|cells| figure(cells)).collect();
        (!found.is_empty()).then(|| statistics::quantile(&mut found, 0.5))
    };
    let cell = |cells: &[Cell], way: Way, reorder: f64| {
        cells.iter().find(|cell| (cell.way, cell.connections, cell.reorder) == (way, 1, reorder)).copied()
    };
    let cpu_over = |below: Way| {
        in_rounds(&|cells| Some(cell(cells, Way::Reorder, 0.0)?.receiver_cpu() / cell(cells, below, 0.0)?.receiver_cpu()))
    };
    let keep = |way: Way| in_rounds(&|cells| Some(cell(cells, way, 1.0)?.gigabits / cell(cells, way, 0.0)?.gigabits));
    let most = |name, bound, value: Option<f64>| value.map(|value| Bar::most(name, bound, value));
    let least = |name, bound, value: Option<f64>| value.map(|value| Bar::least(name, bound, value));
    [
        most("lro.cpu_ratio_plain", 0.5, cpu_over(Way::Plain)),
        most("lro.cpu_ratio_gro", 0.9, cpu_over(Way::Gro)),
        least("lro.reorder_keep", 0.9, keep(Way::Reorder)),
        least("lro.mean_aggregate", 40_000.0, in_rounds(&|cells| Some(cell(cells, Way::Reorder, 0.0)?.mean_aggregate))),
        // For comparison, without a bound.
        least("lro.reorder_keep_gro", 0.0, keep(Way::Gro)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The cells of one round. Those of one way, with and without reordering, are near each other in time, and so are those
/// of all ways without reordering.
fn round(shares: &[f64], connections: &[usize], settings: &LroSettings, each: &mut impl FnMut(&Cell)) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for &connections in connections {
        let mut ways = Way::ALL;
        for &reorder in shares {
            for way in ways {
                let cell = run_cell(way, connections, reorder, settings)?;
                each(&cell);
                cells.push(cell);
            }
            ways.reverse();
        }
    }
    Ok(cells)
}

/// Runs the table. `each` is called with every cell when it is done.
///
/// # Errors
/// If a test bed cannot be made.
pub fn run(settings: &LroSettings, mut each: impl FnMut(&Cell)) -> Result<LroReport> {
    let mut rounds = Vec::new();
    for _ in 0..settings.rounds.max(1) {
        rounds.push(round(&settings.reorder, &settings.connections, settings, &mut each)?);
    }
    let bounded = if settings.is_bounded() { BAR_ROUNDS } else { 0 };
    let one: Vec<usize> = settings.connections.iter().copied().filter(|connections| *connections == 1).collect();
    for _ in rounds.len()..bounded {
        rounds.push(round(&BAR_REORDER, &one, settings, &mut each)?);
    }
    let median_of = |first: &Cell| {
        let same = |cell: &&Cell| (cell.way, cell.connections, cell.reorder) == (first.way, first.connections, first.reorder);
        median(&rounds.iter().flatten().filter(same).copied().collect::<Vec<Cell>>())
    };
    let cells = rounds[0].iter().map(median_of).collect();
    let bars = if settings.is_bounded() { bars(&rounds) } else { Vec::new() };
    Ok(LroReport { workers: settings.workers, rate: settings.rate, cells, bars })
}

/// A line of the table.
pub fn line(cell: &Cell) -> String {
    let workers =
        if cell.busiest > 1.0 { format!(", the busiest worker {:.2} times the mean", cell.busiest) } else { String::new() };
    format!(
        "{:<15} {:>3} connections  {:>3} % held back  {:>6.2} Gb/s  CPU s/GB: program {:.3}  kernel {:.3}  NIC {:.3}   aggregates of {:>5.1} KB, {:>5.1} frames/MB, {:.2} % retransmitted{workers}",
        cell.way.name(),
        cell.connections,
        cell.reorder,
        cell.gigabits,
        cell.program_cpu,
        cell.kernel_cpu,
        cell.nic_cpu,
        cell.mean_aggregate / 1000.0,
        cell.frames_per_mb,
        cell.retransmitted
    )
}

/// Plots throughput over the number of connections, as the paper's Figure 13 does, without reordering.
///
/// # Errors
/// If it cannot be drawn.
pub fn plot(report: &LroReport) -> Result<String> {
    const COLOURS: [RGBColor; 4] =
        [RGBColor(0x8a, 0x8f, 0x98), RGBColor(0xd9, 0x77, 0x06), RGBColor(0x0d, 0x94, 0x88), RGBColor(0x1f, 0x6f, 0xeb)];
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (640, 380)).into_drawing_area();
        let fail = |error: DrawingAreaErrorKind<io::Error>| anyhow!("drawing: {error}");
        root.fill(&WHITE).map_err(fail)?;
        let cells: Vec<&Cell> = report.cells.iter().filter(|cell| cell.reorder == 0.0).collect();
        let top = cells.iter().map(|cell| cell.gigabits).fold(1.0, f64::max) * 1.15;
        let most = cells.iter().map(|cell| cell.connections).max().unwrap_or(1) as f64;
        let mut chart = ChartBuilder::on(&root)
            .caption("TCP receive throughput, 1500-byte frames", ("sans-serif", 16))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(52)
            .build_cartesian_2d((1.0..most.max(2.0)).log_scale().base(2.0), 0.0..top)
            .map_err(fail)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .x_desc("connections")
            .y_desc("Gb/s")
            .draw()
            .map_err(fail)?;
        let level = LineSeries::new([(1.0, PAPER), (most.max(2.0), PAPER)], BLACK.mix(0.4).stroke_width(1));
        chart
            .draw_series(level)
            .map_err(fail)?
            .label("where the paper's levels off")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], BLACK.mix(0.4)));
        for (way, colour) in Way::ALL.into_iter().zip(COLOURS) {
            let points: Vec<(f64, f64)> =
                cells.iter().filter(|cell| cell.way == way).map(|cell| (cell.connections as f64, cell.gigabits)).collect();
            chart
                .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))
                .map_err(fail)?
                .label(way.name())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
            chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, colour.filled()))).map_err(fail)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE)
            .border_style(BLACK)
            .draw()
            .map_err(fail)?;
        root.present().map_err(fail)?;
    }
    Ok(svg)
}
