//! Receive-side scaling: many connections of very different weight (Zipf's law) over several workers, while the weights
//! move to other connections. With a fixed table, and with the balanced one.
//!
//! The load is counted in frames, not in time, so that it does not matter how many cores the workers have.

use crate::bars::Bar;
use anyhow::{Context, Result, anyhow, bail};
use baton_abi::layout::Counter;
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings, counter};
use baton_client::{ConnectionId, Session};
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_offloads::Offloads;
use baton_protocol::program::{Ask, Place, Reply};
use baton_rss::Indirection;
use baton_sim::Rng;
use serde::Serialize;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a message; one is a segment.
const MESSAGE: usize = 512;

/// Messages per second, over all connections.
const RATE: u64 = 25_000;

/// One of this many connections is on the NIC.
const ON_NIC: usize = 4;

/// Microseconds after a shift that are not measured, and that are.
const SETTLING: u64 = 1_000_000;
const COUNTED: u64 = 1_000_000;

/// Settings of a bench.
#[derive(Clone, Copy, Debug)]
pub struct RssSettings {
    /// The NIC's workers.
    pub workers: usize,
    /// Connections.
    pub flows: usize,
    /// Zipf's exponent.
    pub exponent: f64,
    /// Number of shifts (the weights move to other connections) with each table.
    pub shifts: usize,
}

/// Figures of a table after a shift.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The indirection table: `even` or `balanced`.
    pub table: String,
    /// Number of the shift.
    pub shift: usize,
    /// Frames of each worker in the measured second.
    pub frames: Vec<u64>,
    /// Load of the busiest worker over the mean.
    pub imbalance: f64,
    /// Buckets that changed hands since the shift.
    pub moved: u64,
    /// Frames that came to a worker after their bucket had left it, or before it had arrived.
    pub passed: u64,
}

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct RssReport {
    /// Connections.
    pub flows: usize,
    /// Those on the NIC.
    pub on_nic: usize,
    /// Each shift with each table.
    pub shifts: Vec<Measured>,
    /// Messages that were sent.
    pub messages: u64,
    /// Messages for which a connection had no room.
    pub refused: u64,
    /// Segments that overtook earlier ones, at either kernel or at the NIC's connections.
    pub reordered: u64,
    /// Segments that the peer retransmitted: tail loss probes, where an acknowledgement was slow.
    pub retransmitted: u64,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// The weights: connections by rank.
struct Weights {
    cumulative: Vec<f64>,
    order: Vec<usize>,
}

impl Weights {
    fn new(flows: usize, exponent: f64) -> Weights {
        let mut sum = 0.0;
        let cumulative = (1..=flows).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Weights { cumulative: cumulative.collect(), order: (0..flows).collect() }
    }

    /// Gives the ranks to other connections.
    fn shift(&mut self, random: &mut Rng) {
        for at in (1..self.order.len()).rev() {
            self.order.swap(at, random.below(at as u64 + 1) as usize);
        }
    }

    fn choose(&self, random: &mut Rng) -> usize {
        let total = self.cumulative.last().copied().unwrap_or(1.0);
        let point = random.below(1 << 53) as f64 / (1u64 << 53) as f64 * total;
        self.order[self.cumulative.partition_point(|sum| *sum <= point).min(self.order.len() - 1)]
    }
}

#[derive(Default)]
struct Sending {
    over: AtomicBool,
    /// Number of shifts that have been asked for.
    shifts: AtomicU64,
    sent: AtomicU64,
    refused: AtomicU64,
}

/// Sends messages at the rate until it is over.
fn send(clients: &[TcpStream], settings: &RssSettings, sending: &Sending) -> Result<()> {
    let mut random = Rng::new(7);
    let mut weights = Weights::new(clients.len(), settings.exponent);
    let (started, mut done, mut shifts) = (monotonic_micros(), 0, 0);
    while !sending.over.load(Ordering::Relaxed) {
        while shifts < sending.shifts.load(Ordering::Relaxed) {
            weights.shift(&mut random);
            shifts += 1;
        }
        let due = (monotonic_micros() - started) * RATE / 1_000_000;
        // A sender that was held up does not catch up.
        done = done.max(due.saturating_sub(RATE / 100));
        while done < due {
            done += 1;
            let at = weights.choose(&mut random);
            match socket::send(clients[at].as_fd(), &[at as u8; MESSAGE]) {
                Ok(_) => sending.sent.fetch_add(1, Ordering::Relaxed),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sending.refused.fetch_add(1, Ordering::Relaxed),
                Err(error) => return Err(error).context("the sender"),
            };
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}

/// Reads all that arrives, wherever the connections are.
fn receive(session: &mut Session, over: &AtomicBool) -> Result<()> {
    let (mut ready, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while !over.load(Ordering::Relaxed) {
        session.poll(Some(Duration::from_millis(10)), &mut ready)?;
        for id in ready.drain(..) {
            loop {
                match session.receive(id, &mut buffer) {
                    Ok(0) => bail!("the sender closed"),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("the receiver"),
                }
            }
        }
    }
    Ok(())
}

struct Bench<'a> {
    bed: &'a Testbed,
    settings: &'a RssSettings,
    sending: &'a Sending,
}

impl Bench<'_> {
    fn set(&self, indirection: Indirection) -> Result<()> {
        let rss = baton_rss::RssSettings { indirection, ..baton_rss::RssSettings::default() };
        match self.bed.tool()?.ask(Ask::SetOffloads { nic: 0, offloads: Box::new(Offloads { rss, ..Offloads::default() }) })? {
            Reply::Done => Ok(()),
            other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
        }
    }

    fn counters(&self) -> Result<Vec<Vec<u64>>> {
        Ok(self.bed.tool()?.statistics()?.workers)
    }

    fn shift(&self, indirection: Indirection, shift: usize) -> Result<Measured> {
        let first = self.counters()?;
        self.sending.shifts.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(SETTLING));
        let before = self.counters()?;
        std::thread::sleep(Duration::from_micros(COUNTED));
        let after = self.counters()?;
        let grown = |since: &[Vec<u64>], counter: Counter| -> Vec<u64> {
            since.iter().zip(&after).map(|(before, after)| after[counter as usize] - before[counter as usize]).collect()
        };
        let frames = grown(&before, Counter::WireReceived);
        let mean = frames.iter().sum::<u64>() as f64 / frames.len() as f64;
        let imbalance = frames.iter().max().copied().unwrap_or(0) as f64 / mean.max(1.0);
        let sum = |counter| grown(&first, counter).iter().sum();
        let (moved, passed) = (sum(Counter::Buckets), sum(Counter::Redirected));
        Ok(Measured { table: indirection.to_string(), shift, frames, imbalance, moved, passed })
    }

    fn run(&self, each: &mut impl FnMut(&Measured)) -> Result<Vec<Measured>> {
        let mut all = Vec::new();
        for shift in 0..self.settings.shifts.max(1) {
            // In turn, so that both run on the machine in the same state.
            for indirection in [Indirection::Even, Indirection::Balanced] {
                self.set(indirection)?;
                let measured = self.shift(indirection, shift)?;
                each(&measured);
                all.push(measured);
            }
        }
        Ok(all)
    }
}

/// Runs the bench; `each` is called with every shift's figures.
///
/// # Errors
/// If the test bed cannot be made, or a connection breaks.
pub fn run(settings: &RssSettings, mut each: impl FnMut(&Measured)) -> Result<RssReport> {
    let card =
        TestbedSettings { workers: settings.workers, card: true, nic_cores: Vec::new(), agent_core: None, ..Default::default() };
    let bed = Testbed::new(&card)?;
    let (servers, clients) = connect_pairs(&bed, settings.flows, false)?;
    let mut session = Session::connect(&bed.socket())?;
    let ids =
        servers.into_iter().map(|server| session.adopt(OwnedFd::from(server))).collect::<io::Result<Vec<ConnectionId>>>()?;
    let moved: Vec<ConnectionId> = ids.iter().copied().step_by(ON_NIC).collect();
    for id in &moved {
        session.move_to(*id, Place::Nic).context("moving a connection to the NIC")?;
    }
    let disordered = || -> Result<[u64; 2]> {
        let of = |host, row, name| counter(host, if row == "Tcp:" { "snmp" } else { "netstat" }, row, name);
        let nic: u64 = bed.tool()?.statistics()?.counters[Counter::Disordered as usize];
        let kernels = of(&bed.host_a, "TcpExt:", "TCPOFOQueue")? + of(&bed.host_b, "TcpExt:", "TCPOFOQueue")?;
        Ok([kernels + nic, of(&bed.host_b, "Tcp:", "RetransSegs")?])
    };
    let before = disordered()?;
    let sending = Sending::default();
    let bench = Bench { bed: &bed, settings, sending: &sending };
    let shifts = std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(&clients, settings, &sending));
        let receiver = scope.spawn(|| receive(&mut session, &sending.over));
        let shifts = bench.run(&mut each);
        sending.over.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        receiver.join().map_err(|_| anyhow!("the receiver panicked"))??;
        shifts
    })?;
    let after = disordered()?;
    let worst = |table: &str| {
        let of = shifts.iter().filter(|one| one.table == table).map(|one| one.imbalance);
        of.fold(0.0, f64::max)
    };
    let (reordered, retransmitted) = (after[0] - before[0], after[1] - before[1]);
    let bars = vec![
        Bar::most("rss.imbalance", 1.2, worst("balanced")),
        Bar::most("rss.reordered", 0.0, reordered as f64),
        Bar::least("rss.imbalance_static_over_balanced", 1.0, worst("even") / worst("balanced")),
    ];
    Ok(RssReport {
        flows: settings.flows,
        on_nic: moved.len(),
        shifts,
        messages: sending.sent.load(Ordering::Relaxed),
        refused: sending.refused.load(Ordering::Relaxed),
        reordered,
        retransmitted,
        bars,
    })
}

/// A line of the table.
pub fn line(one: &Measured) -> String {
    let total = one.frames.iter().sum::<u64>().max(1) as f64;
    let shares: Vec<String> = one.frames.iter().map(|frames| format!("{:>4.1} %", *frames as f64 * 100.0 / total)).collect();
    format!(
        "shift {}  {:<9} busiest over mean {:>5.3}   [{}]   {:>3} buckets moved, {} frames forwarded",
        one.shift,
        one.table,
        one.imbalance,
        shares.join("  "),
        one.moved,
        one.passed
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_zipfs() {
        let weights = Weights::new(1000, 1.0);
        let mut random = Rng::new(1);
        let mut chosen = vec![0u32; 1000];
        (0..100_000).for_each(|_| chosen[weights.choose(&mut random)] += 1);
        // The first of a thousand has 1 / H(1000) = 13.4 %, the tenth a tenth of that.
        assert!((12_800..14_000).contains(&chosen[0]), "{}", chosen[0]);
        assert!((1_150..1_550).contains(&chosen[9]), "{}", chosen[9]);
    }
}
