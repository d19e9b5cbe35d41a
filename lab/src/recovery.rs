//! Recovery: goodput over lossy links, with the NIC's TCP as sender and with the kernel's, a kernel receiver, the same
//! links with the same seeds. Both run CUBIC.

use crate::status::StatusLine;
use anyhow::{Context, Result};
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::Session;
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use serde::Serialize;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Bits per second of every link.
const RATE: u64 = 100_000_000;
/// Loss events that a lossy cell should see on each side.
const LOSSES: f64 = 330.0;
/// Blocks that a run is cut into, for its variance.
const BLOCKS: usize = 12;

/// One cell of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Loss in percent.
    pub loss: f64,
    /// Round-trip time in milliseconds.
    pub rtt_ms: u64,
    /// Segments held back for a quarter of the round trip, in percent.
    pub reorder: f64,
    /// Connections that share the work, so that a lossy cell has enough losses in reasonable time.
    pub connections: usize,
    /// Goodput of the NIC's TCP, Mb/s.
    pub nic: f64,
    /// Goodput of the kernel's, Mb/s.
    pub kernel: f64,
    /// NIC over kernel.
    pub ratio: f64,
    /// Upper end of the ratio's 95 % interval.
    pub upper95: f64,
    /// Frames that the link lost on the NIC's run.
    pub losses: u64,
}

/// The table.
#[derive(Clone, Debug, Serialize)]
pub struct RecoveryReport {
    /// All cells.
    pub cells: Vec<Cell>,
    /// Geometric mean of the ratios.
    pub geomean_ratio: f64,
    /// Bits per second of the links.
    pub rate: u64,
}

/// A cell's conditions.
#[derive(Clone, Copy)]
struct Condition {
    loss: f64,
    rtt_ms: u64,
    reorder: f64,
}

impl Condition {
    fn connections(self) -> usize {
        match self.rtt_ms {
            0..=5 => 1,
            6..=50 => 4,
            _ => 16,
        }
    }

    /// Seconds until enough losses have happened, from the window that CUBIC reaches (RFC 9438 section 5) and the
    /// link's rate.
    fn seconds(self) -> f64 {
        let p = self.loss / 100.0;
        if p == 0.0 {
            return 12.0;
        }
        let rtt = self.rtt_ms as f64 / 1000.0;
        let window = (1.2 / p.sqrt()).max(1.054 * (rtt / p).powf(0.75));
        let link = RATE as f64 / 8.0 / 1514.0;
        let segments = (window / rtt * self.connections() as f64).min(link * 0.8);
        // In practice less than the formula's rate is reached, because of time-outs and the link's own buffer.
        (LOSSES / (segments * p) * 1.5).clamp(12.0, 180.0)
    }

    fn link(self) -> LinkSettings {
        let delay = self.rtt_ms * 500;
        LinkSettings {
            rate: RATE,
            delay,
            buffer: (RATE / 8 * self.rtt_ms / 1000).max(1514),
            loss: (self.loss * 10_000.0) as u32,
            reorder: (self.reorder * 10_000.0) as u32,
            hold: self.rtt_ms * 250,
            one_way: true,
            seed: 1 + self.rtt_ms * 1000 + (self.loss * 100.0) as u64,
            ..LinkSettings::default()
        }
    }
}

/// Bytes received per block, and losses, of one run.
fn run_one(condition: Condition, place: Place, seconds: f64) -> Result<(Vec<f64>, u64)> {
    // The NIC sleeps between frames, since many NICs share the cores.
    let settings = TestbedSettings {
        link: condition.link(),
        spin: 0,
        nic_cores: Vec::new(),
        agent_core: None,
        ..TestbedSettings::default()
    };
    let bed = Testbed::new(&settings)?;
    let (servers, clients) = connect_pairs(&bed, condition.connections(), false)?;
    let mut session = Session::connect(&bed.socket())?;
    let ids = servers.into_iter().map(|server| session.adopt(OwnedFd::from(server))).collect::<io::Result<Vec<_>>>()?;
    for id in &ids {
        while let Err(error) = session.move_to(*id, place) {
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error).context("moving a connection to its place");
            }
        }
    }
    let payload = vec![0x5a_u8; 1 << 16];
    let mut sink = vec![0u8; 1 << 18];
    let mut ready = Vec::new();
    let started = monotonic_micros();
    // The first block is for warming up and is not measured.
    let block = (seconds * 1e6 / BLOCKS as f64) as u64;
    let mut blocks = vec![0f64; BLOCKS + 1];
    loop {
        let at = ((monotonic_micros() - started) / block) as usize;
        if at > BLOCKS {
            break;
        }
        for id in &ids {
            while matches!(session.send(*id, &payload), Ok(sent) if sent > 0) {}
        }
        for client in &clients {
            while let Ok(got) = socket::receive(client.as_fd(), &mut sink) {
                if got == 0 {
                    break;
                }
                blocks[at] += got as f64;
            }
        }
        ready.clear();
        session.poll(Some(Duration::from_millis(2)), &mut ready)?;
    }
    let losses = bed.tool()?.statistics()?.counters[baton_abi::layout::Counter::LinkLost as usize];
    blocks.remove(0);
    let scale = 8.0 / block as f64;
    Ok((blocks.into_iter().map(|bytes| bytes * scale).collect(), losses))
}

fn mean_and_error(blocks: &[f64]) -> (f64, f64) {
    let count = blocks.len() as f64;
    let mean = blocks.iter().sum::<f64>() / count;
    let variance = blocks.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, (variance / count).sqrt())
}

fn run_cell(condition: Condition, scale: f64) -> Result<Cell> {
    let seconds = condition.seconds() * scale;
    let (nic, kernel) = std::thread::scope(|scope| {
        let nic = scope.spawn(|| run_one(condition, Place::Nic, seconds));
        let kernel = scope.spawn(|| run_one(condition, Place::Kernel, seconds));
        (nic.join(), kernel.join())
    });
    let panicked = |_| anyhow::anyhow!("a cell's thread panicked");
    let ((nic, losses), (kernel, _)) = (nic.map_err(panicked)??, kernel.map_err(panicked)??);
    let ((nic, nic_error), (kernel, kernel_error)) = (mean_and_error(&nic), mean_and_error(&kernel));
    let ratio = nic / kernel;
    let relative = ((nic_error / nic).powi(2) + (kernel_error / kernel).powi(2)).sqrt();
    Ok(Cell {
        loss: condition.loss,
        rtt_ms: condition.rtt_ms,
        reorder: condition.reorder,
        connections: condition.connections(),
        nic,
        kernel,
        ratio,
        upper95: ratio * (1.96 * relative).exp(),
        losses,
    })
}

/// Runs the table. `scale` shortens every cell; `progress` prints each finished cell to standard error.
///
/// # Errors
/// If a test bed cannot be made.
pub fn run(scale: f64, progress: bool) -> Result<RecoveryReport> {
    let mut conditions = Vec::new();
    for reorder in [0.0, 2.0] {
        for loss in [0.0, 0.1, 1.0, 3.0] {
            for rtt_ms in [1, 20, 100] {
                conditions.push(Condition { loss, rtt_ms, reorder });
            }
        }
    }
    let mut cells = Vec::new();
    // Cells of long round trips need little CPU, so two of them run at a time, the others alone.
    conditions.sort_by_key(|condition| condition.rtt_ms);
    let status = StatusLine::new();
    for group in conditions.chunks(2) {
        let (first, all) = (cells.len() + 1, conditions.len());
        status.show(format_args!("cells {first} and {} of {all}, round trip {} ms", first + 1, group[0].rtt_ms));
        let done: Vec<Result<Cell>> = std::thread::scope(|scope| {
            let running: Vec<_> = group.iter().map(|condition| scope.spawn(|| run_cell(*condition, scale))).collect();
            running.into_iter().map(|cell| cell.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a cell panicked")))).collect()
        });
        status.clear();
        for cell in done {
            let cell = cell?;
            if progress {
                eprintln!(
                    "loss {:>4} %  rtt {:>3} ms  reorder {} %:  NIC {:>6.2}  kernel {:>6.2} Mb/s  ratio {:.3}  (upper {:.3}, {} losses)",
                    cell.loss, cell.rtt_ms, cell.reorder, cell.nic, cell.kernel, cell.ratio, cell.upper95, cell.losses
                );
            }
            cells.push(cell);
        }
    }
    let geomean_ratio = (cells.iter().map(|cell| cell.ratio.ln()).sum::<f64>() / cells.len() as f64).exp();
    Ok(RecoveryReport { cells, geomean_ratio, rate: RATE })
}
