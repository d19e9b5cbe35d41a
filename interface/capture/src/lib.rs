//! Rings of captured frames: each worker of a NIC writes the frames that pass its wire into one of its own, and one
//! reader takes them out. The writer never waits: a frame for which there is no room is counted.
//!
//! The memory begins with a page of words, 128 bytes for each worker; the rings follow, one for each worker. A record
//! is a header of 24 bytes and the frame, or its beginning, rounded up to 8 bytes. Each side keeps its own position in
//! private memory and only publishes a copy. So a reader that writes nonsense only loses frames, and a writer's
//! nonsense is detected.
#![forbid(unsafe_code)]

use baton_shm::{Circle, Region};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most captures at a time.
pub const MOST_CAPTURES: usize = 4;

/// Most workers of a NIC with rings.
pub const MOST_WORKERS: usize = 32;

/// Bytes of a worker's ring: at a million headers a second it is full after 30 ms.
pub const RING: u32 = 4 << 20;

/// Bytes in front of the rings.
const WORDS: usize = 4096;
/// Bytes of a worker's words; in them the writer's position, the number of frames that it had no room for, and the
/// reader's position, in a cache line of its own.
const WORKER: usize = WORDS / MOST_WORKERS;
const HEAD: usize = 0;
const DROPPED: usize = 8;
/// Whether the worker has begun.
const BEGUN: usize = 16;
const TAIL: usize = 64;

/// Bytes of a record's header.
const HEADER: u32 = 24;

/// Most bytes of a frame in a record.
pub const LONGEST: u32 = 1 << 18;

const OUT: u32 = 1;
const KERNEL: u32 = 2;

/// Bytes of the memory for the rings of so many workers.
pub const fn bytes(workers: usize) -> usize {
    WORDS + workers * RING as usize
}

/// The metadata of a captured frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    /// When it passed, in microseconds of the monotonic clock: the beginning of the worker's round.
    pub at: u64,
    /// Bytes that it has on the wire.
    pub length: u32,
    /// It was sent to the wire, not received from there.
    pub out: bool,
    /// The frame is the kernel's: it belongs to no connection on the NIC.
    pub kernel: bool,
    /// Index of its network device; 0 where the NIC has one wire.
    pub interface: u32,
}

impl Seen {
    fn header(&self, captured: u32) -> [u8; HEADER as usize] {
        let mut header = [0; HEADER as usize];
        let flags = if self.out { OUT } else { 0 } | if self.kernel { KERNEL } else { 0 };
        header[..8].copy_from_slice(&self.at.to_le_bytes());
        for (place, word) in header[8..].chunks_exact_mut(4).zip([captured, self.length, flags, self.interface]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        header
    }

    /// Reads a header: the frame's metadata, and how many of its bytes follow.
    fn of(header: &[u8; HEADER as usize]) -> (Seen, u32) {
        let word = |at: usize| header[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        let at = u64::from(word(4)) << 32 | u64::from(word(0));
        let flags = word(16);
        let seen = Seen { at, length: word(12), out: flags & OUT != 0, kernel: flags & KERNEL != 0, interface: word(20) };
        (seen, word(8))
    }
}

/// Bytes that a record takes.
const fn record(captured: u32) -> u32 {
    HEADER + captured.next_multiple_of(8)
}

/// The part of a ring that both ends use.
#[derive(Debug)]
struct Ring {
    memory: Arc<Region>,
    bytes: Circle,
    words: usize,
}

impl Ring {
    fn new(memory: &Arc<Region>, worker: usize) -> Option<Ring> {
        if worker >= MOST_WORKERS {
            return None;
        }
        let bytes = memory.circle(u32::try_from(bytes(worker)).ok()?, RING)?;
        Some(Ring { memory: memory.clone(), bytes, words: worker * WORKER })
    }

    fn load(&self, word: usize) -> u32 {
        self.memory.word32(self.words + word).load(Ordering::Acquire)
    }

    fn store(&self, word: usize, value: u32) {
        self.memory.word32(self.words + word).store(value, Ordering::Release);
    }
}

/// The place of a record that was not published to the reader yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place(u32);

/// A ring's writing end.
#[derive(Debug)]
pub struct Writer {
    ring: Ring,
    head: u32,
    /// Place of the last record that was written since the last [`Writer::show`].
    last: Option<u32>,
}

impl Writer {
    /// The writing end of a worker's ring, which continues where the last one stopped. None if the memory has no ring
    /// for it.
    pub fn new(memory: &Arc<Region>, worker: usize) -> Option<Writer> {
        let ring = Ring::new(memory, worker)?;
        ring.store(BEGUN, 1);
        Some(Writer { head: ring.load(HEAD), ring, last: None })
    }

    /// Writes a frame, or its beginning, which the reader sees after [`Writer::show`]. None if there is no room; such
    /// frames are counted.
    pub fn push(&mut self, seen: &Seen, frame: &[u8]) -> Option<Place> {
        let frame = &frame[..frame.len().min(LONGEST as usize)];
        let captured = frame.len() as u32;
        let used = self.head.wrapping_sub(self.ring.load(TAIL));
        if used.checked_add(record(captured)).is_none_or(|used| used > RING) {
            self.ring.memory.words(self.ring.words + DROPPED, 1)[0].fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let place = self.head;
        self.ring.bytes.write(place, &seen.header(captured));
        self.ring.bytes.write(place.wrapping_add(HEADER), frame);
        self.head = place.wrapping_add(record(captured));
        self.last = Some(place);
        Some(Place(place))
    }

    /// Marks a frame that the reader has not seen yet as the kernel's. With `forget` it is removed instead, if it is
    /// the last one.
    pub fn is_kernels(&mut self, Place(place): Place, forget: bool) {
        if forget && self.last == Some(place) {
            (self.head, self.last) = (place, None);
            return;
        }
        let mut header = [0; HEADER as usize];
        self.ring.bytes.read(place, &mut header);
        let (seen, captured) = Seen::of(&header);
        self.ring.bytes.write(place, &Seen { kernel: true, ..seen }.header(captured));
    }

    /// Publishes all written records to the reader.
    pub fn show(&mut self) {
        if self.last.take().is_some() {
            self.ring.store(HEAD, self.head);
        }
    }
}

/// A ring that its writer has filled with nonsense.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged;

impl fmt::Display for Damaged {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("the NIC's ring of captured frames makes no sense")
    }
}

impl std::error::Error for Damaged {}

/// A ring's reading end.
#[derive(Debug)]
pub struct Reader {
    ring: Ring,
    tail: u32,
}

impl Reader {
    /// The reading end of a worker's ring. None if the memory has no ring for it.
    pub fn new(memory: &Arc<Region>, worker: usize) -> Option<Reader> {
        let ring = Ring::new(memory, worker)?;
        Some(Reader { tail: ring.load(TAIL), ring })
    }

    /// Takes the next frame; its bytes, or the first of them, replace those in `frame`. None if there is none.
    ///
    /// # Errors
    /// [`Damaged`]
    pub fn next(&mut self, frame: &mut Vec<u8>) -> Result<Option<Seen>, Damaged> {
        let there = self.ring.load(HEAD).wrapping_sub(self.tail);
        if there == 0 {
            return Ok(None);
        }
        let mut header = [0; HEADER as usize];
        self.ring.bytes.read(self.tail, &mut header);
        let (seen, captured) = Seen::of(&header);
        if there > RING || captured > LONGEST || record(captured) > there {
            return Err(Damaged);
        }
        frame.resize(captured as usize, 0);
        self.ring.bytes.read(self.tail.wrapping_add(HEADER), frame);
        self.tail = self.tail.wrapping_add(record(captured));
        self.ring.store(TAIL, self.tail);
        Ok(Some(seen))
    }

    /// Whether there is a writer, or was one.
    pub fn has_begun(&self) -> bool {
        self.ring.load(BEGUN) != 0
    }

    /// Number of frames that there was no room for.
    pub fn dropped(&self) -> u64 {
        self.ring.memory.words(self.ring.words + DROPPED, 1)[0].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(worker: usize) -> (Writer, Reader, Arc<Region>) {
        let memory = Arc::new(Region::private(bytes(2)).expect("memory"));
        let (writer, reader) = (Writer::new(&memory, worker).expect("a ring"), Reader::new(&memory, worker).expect("a ring"));
        (writer, reader, memory)
    }

    fn seen(at: u64) -> Seen {
        Seen { at: u64::MAX - at, length: 70_000, out: true, kernel: false, interface: 7 }
    }

    #[test]
    fn frames_come_out_as_they_went_in_around_the_rings_end() {
        let (mut writer, mut reader, memory) = ends(1);
        assert!(reader.has_begun() && !Reader::new(&memory, 0).expect("a ring").has_begun());
        let mut frame = Vec::new();
        let mut at = 0;
        // More than three times around.
        while at * 100 < 3 * u64::from(RING) {
            for length in [0u32, 1, 54, 1514] {
                at += 1;
                let bytes: Vec<u8> = (0..length).map(|byte| (u64::from(byte) + at) as u8).collect();
                assert!(writer.push(&seen(at), &bytes).is_some());
                assert_eq!(reader.next(&mut frame), Ok(None), "it was not shown");
                writer.show();
                assert_eq!(reader.next(&mut frame), Ok(Some(seen(at))));
                assert_eq!(frame, bytes);
            }
        }
        assert_eq!((reader.next(&mut frame), reader.dropped()), (Ok(None), 0));
    }

    #[test]
    fn a_reader_that_stands_still_costs_frames_which_are_counted() {
        let (mut writer, mut reader, memory) = ends(0);
        let bytes = [7; 100];
        let fit = u64::from(RING / record(100));
        for at in 0..fit + 5 {
            assert_eq!(writer.push(&seen(at), &bytes).is_some(), at < fit);
            writer.show();
        }
        let mut frame = Vec::new();
        for at in 0..fit {
            assert_eq!(reader.next(&mut frame), Ok(Some(seen(at))));
        }
        assert_eq!((reader.next(&mut frame), reader.dropped()), (Ok(None), 5));
        assert!(writer.push(&seen(1), &bytes).is_some(), "there is room again");
        writer.show();
        // The next NIC goes on there.
        let mut next = Writer::new(&memory, 0).expect("a ring");
        assert!(next.push(&seen(2), &bytes).is_some());
        next.show();
        assert_eq!(reader.next(&mut frame), Ok(Some(seen(1))));
        assert_eq!(reader.next(&mut frame), Ok(Some(seen(2))));
    }

    #[test]
    fn a_frame_of_the_kernels_is_marked_or_taken_back() {
        let (mut writer, mut reader, _) = ends(0);
        let first = writer.push(&seen(1), b"one").expect("room");
        let second = writer.push(&seen(2), b"two").expect("room");
        writer.is_kernels(first, true);
        writer.is_kernels(second, true);
        writer.push(&seen(3), b"three").expect("room");
        writer.show();
        let mut frame = Vec::new();
        // Another record follows the first one, so it is not removed.
        assert_eq!(reader.next(&mut frame), Ok(Some(Seen { kernel: true, ..seen(1) })));
        assert_eq!(reader.next(&mut frame), Ok(Some(seen(3))));
        assert_eq!(frame, b"three");
    }

    #[test]
    fn nonsense_of_either_side_stays_in_the_ring() {
        let (mut writer, mut reader, memory) = ends(0);
        for tail in [1, RING, u32::MAX, 1 << 31] {
            memory.word32(TAIL).store(tail, Ordering::Relaxed);
            let _ = writer.push(&seen(0), &[1; 64]);
        }
        let mut frame = Vec::new();
        memory.word32(HEAD).store(RING + 8, Ordering::Relaxed);
        assert_eq!(reader.next(&mut frame), Err(Damaged));
        memory.word32(HEAD).store(64, Ordering::Relaxed);
        for captured in [64, LONGEST + 1, u32::MAX] {
            reader.ring.bytes.write(0, &seen(0).header(captured));
            assert_eq!(reader.next(&mut frame), Err(Damaged));
        }
        assert!(Writer::new(&memory, 2).is_none() && Writer::new(&memory, MOST_WORKERS).is_none());
    }
}
