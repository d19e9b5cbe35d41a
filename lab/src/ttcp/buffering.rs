//! What buffering costs the NIC, from a message to the acknowledgement of its segments, by strategy: a copy in a chain
//! of small buffers, as BSD's mbufs are; a reference to the host's send memory, which is Baton's own way; a list of the
//! host's pages. Each is a send queue without a protocol. Segments have an MTU's payload. Instructions are counted by
//! callgrind.

use super::cost::difference;
use anyhow::{Context, Result, ensure};
use baton_shm::Region;
use serde::Serialize;
use std::collections::VecDeque;
use std::hint::black_box;

/// Payload of a segment.
const SEGMENT: usize = 1448;
/// Segments that one acknowledgement covers.
const ACKNOWLEDGED: usize = 2;
/// Bytes of the host's memory: sixteen of the largest messages.
const HOST: usize = 1 << 20;
/// Message sizes that are compared, in bytes, and messages of the smaller run: a whole number of segments.
const SIZES: [(usize, u64); 4] = [(1, 4 * 1448), (64, 2 * 1448), (1448, 256), (65_536, 24)];

/// A send queue: messages that lie in host memory, of which segments are made. Bytes stay until they are acknowledged.
pub trait SendQueue {
    /// Appends the message of `length` bytes at `at` in host memory. False without room.
    fn queue(&mut self, host: &Region, at: usize, length: usize) -> bool;
    /// Copies the next bytes that have not been sent into a frame. False if there are fewer.
    fn fetch(&mut self, host: &Region, out: &mut [u8]) -> bool;
    /// The peer has acknowledged the next `count` bytes.
    fn acknowledge(&mut self, count: usize);
    /// Bytes that it has copied so far.
    fn copied(&self) -> u64;
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
    copied: u64,
}

/// No buffer.
const NONE: u16 = u16::MAX;

impl Chain {
    fn new() -> Chain {
        let buffer = |at: usize| Small { bytes: [0; SMALL], length: 0, next: at as u16 + 1 };
        let mut buffers: Box<[Small]> = (0..SMALL_BUFFERS).map(buffer).collect();
        buffers[SMALL_BUFFERS - 1].next = NONE;
        Chain { buffers, free: 0, first: NONE, last: NONE, done: 0, at: (NONE, 0), copied: 0 }
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
    fn queue(&mut self, host: &Region, mut at: usize, length: usize) -> bool {
        let end = at + length;
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
            self.copied += piece as u64;
            at += piece;
        }
        true
    }

    fn fetch(&mut self, _: &Region, mut out: &mut [u8]) -> bool {
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
            self.copied += piece as u64;
            out = rest;
        }
        true
    }

    fn acknowledge(&mut self, mut count: usize) {
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

    fn copied(&self) -> u64 {
        self.copied
    }
}

/// A run of bytes in host memory.
#[derive(Clone, Copy)]
struct Run {
    at: usize,
    length: usize,
}

/// Runs of bytes in host memory, in order, and how far they have been sent and acknowledged.
struct Runs {
    runs: VecDeque<Run>,
    /// Bytes of the first run that are acknowledged.
    done: usize,
    /// Where the next segment begins: a run, and bytes of it.
    next: (usize, usize),
    copied: u64,
}

impl Runs {
    /// A queue for `most` runs.
    fn new(most: usize) -> Runs {
        Runs { runs: VecDeque::with_capacity(most), done: 0, next: (0, 0), copied: 0 }
    }

    fn push(&mut self, run: Run) -> bool {
        let room = self.runs.len() < self.runs.capacity();
        if room {
            self.runs.push_back(run);
        }
        room
    }

    fn fetch(&mut self, host: &Region, mut out: &mut [u8]) -> bool {
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
            self.copied += piece as u64;
            out = rest;
        }
        true
    }

    fn acknowledge(&mut self, mut count: usize) {
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

/// References to the host's send memory, which stays where it is: one for each message, or for several that follow each
/// other there.
struct References(Runs);

impl SendQueue for References {
    fn queue(&mut self, _: &Region, at: usize, length: usize) -> bool {
        if let Some(last) = self.0.runs.back_mut().filter(|last| last.at + last.length == at) {
            last.length += length;
            return true;
        }
        self.0.push(Run { at, length })
    }

    fn fetch(&mut self, host: &Region, out: &mut [u8]) -> bool {
        self.0.fetch(host, out)
    }

    fn acknowledge(&mut self, count: usize) {
        self.0.acknowledge(count);
    }

    fn copied(&self) -> u64 {
        self.0.copied
    }
}

/// Bytes of a page.
const PAGE: usize = 4096;

/// Lists of the pages that messages lie in, which need not be neighbours, as a program's own memory is not for a
/// device. Each message has a list of its own.
struct Pages(Runs);

impl SendQueue for Pages {
    fn queue(&mut self, _: &Region, mut at: usize, length: usize) -> bool {
        let end = at + length;
        while at < end {
            let piece = (end - at).min(PAGE - at % PAGE);
            if !self.0.push(Run { at, length: piece }) {
                return false;
            }
            at += piece;
        }
        true
    }

    fn fetch(&mut self, host: &Region, out: &mut [u8]) -> bool {
        self.0.fetch(host, out)
    }

    fn acknowledge(&mut self, count: usize) {
        self.0.acknowledge(count);
    }

    fn copied(&self) -> u64 {
        self.0.copied
    }
}

/// A strategy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// A copy in a chain of small buffers.
    Chain,
    /// A reference to the host's send memory.
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

/// Messages of one size on their way through a send queue.
struct Stream<Q> {
    queue: Q,
    host: Region,
    frame: [u8; SEGMENT],
    /// Where the next message lies in host memory.
    at: usize,
    unsent: usize,
    /// Bytes sent since the last acknowledgement, and their segments.
    unacknowledged: (usize, usize),
}

impl<Q: SendQueue> Stream<Q> {
    fn new(queue: Q) -> Result<Stream<Q>> {
        let host = Region::private(HOST)?;
        let bytes: Vec<u8> = (0..HOST).map(|at| (at % 251) as u8).collect();
        host.write(0, &bytes).ok().context("the region is too short")?;
        Ok(Stream { queue, host, frame: [0; SEGMENT], at: 0, unsent: 0, unacknowledged: (0, 0) })
    }

    /// Queues the next message, behind the last one in host memory. What there is in full segments leaves, each looked
    /// at by `sent`; the rest of a message that is longer than one does, too. Callgrind finds it by its name.
    #[inline(never)]
    fn measured_message(&mut self, size: usize, mut sent: impl FnMut(&[u8])) -> Result<()> {
        if self.at + size > HOST {
            self.at = 0;
        }
        ensure!(self.queue.queue(&self.host, self.at, size), "no room for a message");
        self.at += size;
        self.unsent += size;
        while self.unsent >= SEGMENT || self.unsent > 0 && size > SEGMENT {
            let length = self.unsent.min(SEGMENT);
            ensure!(self.queue.fetch(&self.host, &mut self.frame[..length]), "bytes are missing");
            sent(&self.frame[..length]);
            self.unsent -= length;
            let (bytes, segments) = self.unacknowledged;
            self.unacknowledged = (bytes + length, segments + 1);
            if segments + 1 == ACKNOWLEDGED {
                self.queue.acknowledge(bytes + length);
                self.unacknowledged = (0, 0);
            }
        }
        Ok(())
    }
}

/// Runs messages through a queue. Returns the bytes that it has copied.
fn run<Q: SendQueue>(queue: Q, size: usize, messages: u64) -> Result<u64> {
    let mut stream = Stream::new(queue)?;
    for _ in 0..messages {
        stream.measured_message(size, |segment| {
            black_box(segment);
        })?;
    }
    Ok(stream.queue.copied())
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
        Strategy::Reference => run(References(Runs::new(RUNS)), size, messages),
        Strategy::Pages => run(Pages(Runs::new(RUNS)), size, messages),
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
    fn check(queue: impl SendQueue, size: usize, messages: u64) -> u64 {
        let mut stream = Stream::new(queue).unwrap();
        let (mut at, mut sent) = (0, 0);
        for _ in 0..messages {
            stream
                .measured_message(size, |segment| {
                    for byte in segment {
                        if at % size == 0 && at + size > HOST {
                            at = 0;
                        }
                        assert_eq!(*byte, (at % 251) as u8, "messages of {size} bytes, byte {sent} of the stream");
                        at += 1;
                        sent += 1;
                    }
                })
                .unwrap();
        }
        assert_eq!(sent as u64 + stream.unsent as u64, size as u64 * messages);
        stream.queue.copied()
    }

    #[test]
    fn all_strategies_send_the_same_bytes() {
        for (size, messages) in [(1, 20_000), (64, 40_000), (700, 5000), (1448, 2000), (5000, 700), (65_536, 64)] {
            let bytes = size as u64 * messages;
            assert!(check(Chain::new(), size, messages) > bytes, "a chain copies twice");
            assert!(check(References(Runs::new(RUNS)), size, messages) <= bytes);
            assert!(check(Pages(Runs::new(RUNS)), size, messages) <= bytes);
        }
    }
}
