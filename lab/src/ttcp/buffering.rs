//! What buffering costs the NIC, from a message to the acknowledgement of its segments, by strategy: a copy in a chain
//! of small buffers, as BSD's mbufs are; references to the host's send memory, which is the NIC's own way; a list of
//! the host's pages. Each is a send queue below the real TCP, which makes the segments. Instructions are counted by
//! callgrind; the peer is not among them.

use super::cost::difference;
use anyhow::{Context, Result, ensure};
use baton_datapath::{References, SendQueue};
use baton_image::Image;
use baton_shm::Region;
use baton_tcp::{Connection, Instant, Segment, Transmit};
use baton_wire::{Endpoint, Flow};
use serde::Serialize;
use std::collections::VecDeque;
use std::hint::black_box;

/// Payload of a segment.
const SEGMENT: usize = 1448;
/// Bytes of the host's memory: sixteen of the largest messages.
const HOST: usize = 1 << 20;
/// Message sizes that are compared, in bytes, and messages of the smaller run: a whole number of segments.
const SIZES: [(usize, u64); 4] = [(1, 4 * 1448), (64, 2 * 1448), (1448, 256), (65_536, 24)];
/// Nothing is lost, so time stands still.
const NOW: Instant = Instant(1_000_000);

/// A send queue that is compared.
pub trait Compared: SendQueue {
    /// Bytes that it has copied to keep them. What is copied into frames comes on top.
    fn kept(&self) -> u64 {
        0
    }
}

/// Bytes of a small buffer.
const SMALL: usize = 256;
/// Small buffers of a connection: for twice the largest message.
const SMALL_BUFFERS: usize = 512;

/// A small buffer of a chain.
#[derive(Clone)]
struct Small {
    bytes: [u8; SMALL],
    length: u16,
    /// The next buffer of the chain, or of the free ones.
    next: u16,
}

/// A copy of the messages in a chain of small buffers. Small messages share a buffer.
struct Chain {
    buffers: Box<[Small]>,
    free: u16,
    first: u16,
    last: u16,
    /// Bytes of the first buffer that are acknowledged.
    done: usize,
    /// Where the next segment begins.
    at: (u16, usize),
    /// Sequence numbers of the first byte that is not acknowledged, and of the next segment.
    una: u32,
    sent: u32,
    kept: u64,
}

/// No buffer.
const NONE: u16 = u16::MAX;

impl Chain {
    fn new() -> Chain {
        let buffer = |at: usize| Small { bytes: [0; SMALL], length: 0, next: at as u16 + 1 };
        let mut buffers: Box<[Small]> = (0..SMALL_BUFFERS).map(buffer).collect();
        buffers[SMALL_BUFFERS - 1].next = NONE;
        Chain { buffers, free: 0, first: NONE, last: NONE, done: 0, at: (NONE, 0), una: 0, sent: 0, kept: 0 }
    }

    /// Appends a free buffer to the chain.
    fn extend(&mut self) -> bool {
        let new = self.free;
        if new == NONE {
            return false;
        }
        let buffer = &mut self.buffers[usize::from(new)];
        self.free = buffer.next;
        (buffer.length, buffer.next) = (0, NONE);
        match self.last {
            NONE => (self.first, self.at) = (new, (new, 0)),
            last => self.buffers[usize::from(last)].next = new,
        }
        self.last = new;
        true
    }
}

impl SendQueue for Chain {
    fn append(&mut self, host: &Region, address: u32, length: u32, seq: u32) -> bool {
        if self.first == NONE {
            (self.una, self.sent) = (seq, seq);
        }
        let (mut at, end) = (address as usize, address as usize + length as usize);
        while at < end {
            let full = self.last == NONE || usize::from(self.buffers[usize::from(self.last)].length) == SMALL;
            if full && !self.extend() {
                return false;
            }
            let buffer = &mut self.buffers[usize::from(self.last)];
            let from = usize::from(buffer.length);
            let piece = (end - at).min(SMALL - from);
            if host.read(at, &mut buffer.bytes[from..from + piece]).is_err() {
                return false;
            }
            buffer.length += piece as u16;
            self.kept += piece as u64;
            at += piece;
        }
        true
    }

    /// In their order only: nothing is sent again here.
    fn copy(&mut self, _: &Region, seq: u32, mut out: &mut [u8]) -> bool {
        if seq != self.sent {
            return false;
        }
        self.sent = seq.wrapping_add(out.len() as u32);
        while !out.is_empty() {
            let (at, from) = self.at;
            if at == NONE {
                return false;
            }
            let buffer = &self.buffers[usize::from(at)];
            let piece = out.len().min(usize::from(buffer.length) - from);
            if piece == 0 {
                if buffer.next == NONE {
                    return false;
                }
                self.at = (buffer.next, 0);
                continue;
            }
            let (here, rest) = out.split_at_mut(piece);
            here.copy_from_slice(&buffer.bytes[from..from + piece]);
            self.at.1 += piece;
            out = rest;
        }
        true
    }

    fn acknowledge(&mut self, una: u32) {
        let mut count = una.wrapping_sub(self.una) as usize;
        self.una = una;
        while count > 0 && self.first != NONE {
            let first = self.first;
            let buffer = &mut self.buffers[usize::from(first)];
            let left = usize::from(buffer.length) - self.done;
            if count < left {
                self.done += count;
                return;
            }
            count -= left;
            self.done = 0;
            self.first = buffer.next;
            buffer.next = self.free;
            self.free = first;
            if self.at.0 == first {
                self.at = (self.first, 0);
            }
            if self.first == NONE {
                self.last = NONE;
            }
        }
    }
}

impl Compared for Chain {
    fn kept(&self) -> u64 {
        self.kept
    }
}

impl Compared for References {}

/// Bytes of a page.
const PAGE: usize = 4096;

/// A run of bytes in host memory.
#[derive(Clone, Copy)]
struct Run {
    at: usize,
    length: usize,
}

/// Lists of the pages that messages lie in, which need not be neighbours, as a program's own memory is not for a
/// device. Each message has a list of its own.
struct Pages {
    runs: VecDeque<Run>,
    /// Bytes of the first run that are acknowledged.
    done: usize,
    /// Where the next segment begins: a run, and bytes of it.
    next: (usize, usize),
    /// Sequence numbers of the first byte that is not acknowledged, and of the next segment.
    una: u32,
    sent: u32,
}

impl Pages {
    /// A queue for `most` runs.
    fn new(most: usize) -> Pages {
        Pages { runs: VecDeque::with_capacity(most), done: 0, next: (0, 0), una: 0, sent: 0 }
    }
}

impl SendQueue for Pages {
    fn append(&mut self, _: &Region, address: u32, length: u32, seq: u32) -> bool {
        if self.runs.is_empty() {
            (self.una, self.sent) = (seq, seq);
        }
        let (mut at, end) = (address as usize, address as usize + length as usize);
        while at < end {
            let piece = (end - at).min(PAGE - at % PAGE);
            if self.runs.len() == self.runs.capacity() {
                return false;
            }
            self.runs.push_back(Run { at, length: piece });
            at += piece;
        }
        true
    }

    /// In their order only: nothing is sent again here.
    fn copy(&mut self, host: &Region, seq: u32, mut out: &mut [u8]) -> bool {
        if seq != self.sent {
            return false;
        }
        self.sent = seq.wrapping_add(out.len() as u32);
        while !out.is_empty() {
            let (index, from) = self.next;
            let Some(run) = self.runs.get(index) else { return false };
            let piece = out.len().min(run.length - from);
            if piece == 0 {
                if index + 1 == self.runs.len() {
                    return false;
                }
                self.next = (index + 1, 0);
                continue;
            }
            let (here, rest) = out.split_at_mut(piece);
            if host.read(run.at + from, here).is_err() {
                return false;
            }
            self.next.1 += piece;
            out = rest;
        }
        true
    }

    fn acknowledge(&mut self, una: u32) {
        let mut count = una.wrapping_sub(self.una) as usize;
        self.una = una;
        while let Some(first) = self.runs.front() {
            let left = first.length - self.done;
            if count < left {
                self.done += count;
                return;
            }
            count -= left;
            self.done = 0;
            self.runs.pop_front();
            self.next = if self.next.0 == 0 { (0, 0) } else { (self.next.0 - 1, self.next.1) };
        }
    }
}

impl Compared for Pages {}

/// A strategy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// A copy in a chain of small buffers.
    Chain,
    /// References to the host's send memory.
    Reference,
    /// A list of the host's pages.
    Pages,
}

impl Strategy {
    /// All of them.
    pub const ALL: [Strategy; 3] = [Strategy::Chain, Strategy::Reference, Strategy::Pages];

    /// Its name as an argument.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Chain => "chain",
            Strategy::Reference => "reference",
            Strategy::Pages => "pages",
        }
    }
}

/// What a message costs with a strategy.
#[derive(Clone, Debug, Serialize)]
pub struct Buffering {
    /// The strategy.
    pub strategy: Strategy,
    /// Bytes of a message.
    pub size: usize,
    /// Instructions of the NIC for a message.
    pub instructions: f64,
    /// Bytes that the NIC copies for a message.
    pub copied: f64,
}

/// Messages of one size on their way through a send queue, below the TCP of a connection whose peer has as much.
struct Stream<Q> {
    queue: Q,
    host: Region,
    near: Connection,
    far: Connection,
    frame: [u8; SEGMENT],
    /// Where the next message lies in host memory.
    at: usize,
    /// Segments that have left and not arrived, and bytes copied into frames.
    out: Vec<Segment>,
    fetched: u64,
}

fn segment_of(transmit: &Transmit) -> Segment {
    let Transmit { seq, ack, flags, window, options, length, .. } = *transmit;
    Segment { seq, ack, flags, window, options, length, ..Segment::default() }
}

impl<Q: Compared> Stream<Q> {
    fn new(queue: Q) -> Result<Stream<Q>> {
        let host = Region::private(HOST)?;
        let bytes: Vec<u8> = (0..HOST).map(|at| (at % 251) as u8).collect();
        host.write(0, &bytes).ok().context("the region is too short")?;
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 1024), device: 0 };
        let end = |flow| {
            // Small messages are joined, as Nagle's rule says.
            let image = Image { snd_wscale: 0, nodelay: false, ..Image::open(flow) };
            Connection::from_image(&image, None, 64 << 10, NOW)
        };
        let (near, far) = (end(flow), end(flow.reversed()));
        Ok(Stream { queue, host, near, far, frame: [0; SEGMENT], at: 0, out: Vec::new(), fetched: 0 })
    }

    /// Makes frames of what TCP sends, each looked at by `sent`.
    fn transmit(&mut self, sent: &mut impl FnMut(&[u8])) -> Result<()> {
        while let Some(transmit) = self.near.poll_transmit(NOW, 0) {
            if transmit.length > 0 {
                let frame = &mut self.frame[..transmit.length as usize];
                ensure!(self.queue.copy(&self.host, transmit.seq, frame), "bytes are missing");
                sent(frame);
                self.fetched += u64::from(transmit.length);
            }
            self.out.push(segment_of(&transmit));
        }
        Ok(())
    }

    /// Queues the next message, behind the last one in host memory, and sends what TCP lets go. Callgrind finds this
    /// and the next by the names.
    #[inline(never)]
    fn measured_message(&mut self, size: usize, sent: &mut impl FnMut(&[u8])) -> Result<()> {
        if self.at + size > HOST {
            self.at = 0;
        }
        let seq = self.near.snd_end();
        ensure!(self.near.queue(size as u32), "the connection is closed");
        ensure!(self.queue.append(&self.host, self.at as u32, size as u32, seq), "no room for a message");
        self.at += size;
        self.transmit(sent)
    }

    /// An acknowledgement arrives.
    #[inline(never)]
    fn measured_acknowledgement(&mut self, segment: &Segment, sent: &mut impl FnMut(&[u8])) -> Result<()> {
        self.near.input(segment, NOW);
        self.queue.acknowledge(self.near.snd_una());
        self.transmit(sent)
    }

    /// A message, and all that follows from it: the peer reads at once what arrives, and acknowledges as it does.
    fn message(&mut self, size: usize, sent: &mut impl FnMut(&[u8])) -> Result<()> {
        self.measured_message(size, sent)?;
        while !self.out.is_empty() {
            for segment in std::mem::take(&mut self.out) {
                self.far.input(&segment, NOW);
                let readable = self.far.readable();
                ensure!(readable == 0 || self.far.consumed(readable), "the peer cannot read");
                while let Some(transmit) = self.far.poll_transmit(NOW, 0) {
                    self.measured_acknowledgement(&segment_of(&transmit), sent)?;
                }
            }
        }
        Ok(())
    }

    /// Bytes copied so far.
    fn copied(&self) -> u64 {
        self.queue.kept() + self.fetched
    }
}

/// Runs messages through a queue. Returns the bytes that were copied.
fn run<Q: Compared>(queue: Q, size: usize, messages: u64) -> Result<u64> {
    let mut stream = Stream::new(queue)?;
    for _ in 0..messages {
        stream.message(size, &mut |segment: &[u8]| {
            black_box(segment);
        })?;
    }
    Ok(stream.copied())
}

/// Most runs that a queue holds: one for each byte that two segments have, and more.
const RUNS: usize = 4 * SEGMENT;

/// The work of `messages` messages. Returns the bytes that were copied.
///
/// # Errors
/// If a queue has no room, which is a mistake.
fn work(strategy: Strategy, size: usize, messages: u64) -> Result<u64> {
    match strategy {
        Strategy::Chain => run(Chain::new(), size, messages),
        Strategy::Reference => run(References::default(), size, messages),
        Strategy::Pages => run(Pages::new(RUNS), size, messages),
    }
}

/// The workload `STRATEGY/SIZE`.
///
/// # Errors
/// If there is no such strategy.
pub fn workload(name: &str, messages: u64) -> Result<()> {
    let (strategy, size) = name.split_once('/').context("a strategy and a size")?;
    let strategy = Strategy::ALL.into_iter().find(|one| one.name() == strategy).context("no such strategy")?;
    work(strategy, size.parse()?, messages).map(drop)
}

/// Compares all strategies at all sizes.
///
/// # Errors
/// If valgrind is missing, or a workload fails.
pub fn measure() -> Result<Vec<Buffering>> {
    let mut found = Vec::new();
    for strategy in Strategy::ALL {
        for (size, messages) in SIZES {
            let instructions = difference(&format!("{}/{size}", strategy.name()), messages, |_| "all")?.values().sum();
            let copied = work(strategy, size, messages)? as f64 / messages as f64;
            found.push(Buffering { strategy, size, instructions, copied });
        }
    }
    Ok(found)
}

/// A table in text: a line for each size, the strategies' instructions and bytes copied for a message.
pub fn table(found: &[Buffering]) -> String {
    let mut text = format!("{:<14}", "buffering of");
    Strategy::ALL.iter().for_each(|strategy| text += &format!(" {:>20}", strategy.name()));
    for (size, _) in SIZES {
        text += &format!("\n{size:>12} B");
        for one in found.iter().filter(|one| one.size == size) {
            text += &format!(" {:>9.1}, {:>7.0} B", one.instructions, one.copied);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every strategy makes the same segments of the same messages, and has room again when they are acknowledged.
    fn check(queue: impl Compared, size: usize, messages: u64) -> u64 {
        let mut stream = Stream::new(queue).unwrap();
        let (mut at, mut sent) = (0, 0);
        for _ in 0..messages {
            let mut look = |segment: &[u8]| {
                for byte in segment {
                    if at % size == 0 && at + size > HOST {
                        at = 0;
                    }
                    assert_eq!(*byte, (at % 251) as u8, "messages of {size} bytes, byte {sent} of the stream");
                    at += 1;
                    sent += 1;
                }
            };
            stream.message(size, &mut look).unwrap();
        }
        assert_eq!(sent + u64::from(stream.near.unsent()), size as u64 * messages);
        stream.copied()
    }

    #[test]
    fn all_strategies_send_the_same_bytes() {
        for (size, messages) in [(1, 20_000), (64, 40_000), (700, 5000), (1448, 2000), (5000, 700), (65_536, 64)] {
            let bytes = size as u64 * messages;
            assert!(check(Chain::new(), size, messages) > bytes, "a chain copies twice");
            assert!(check(References::default(), size, messages) <= bytes);
            assert!(check(Pages::new(RUNS), size, messages) <= bytes);
        }
    }
}
