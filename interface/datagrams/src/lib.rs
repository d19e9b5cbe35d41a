//! A UDP socket's datagrams in session memory: a receive ring from the NIC to the program, a send ring from the program
//! to the NIC.
//!
//! A ring holds records: a header of 24 bytes (length, port, address of the other end), then the datagram, rounded up
//! to 8 bytes. It has one writer and one reader. Each keeps its own position in private memory and only publishes a
//! copy: so a program that writes nonsense into shared memory only reads or sends nonsense, and the NIC stays within
//! the ring.

#![forbid(unsafe_code)]

use baton_abi::layout::datagrams as at;
use baton_shm::{Circle, Region};
use baton_wire::Endpoint;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Bytes of a record's header.
const HEADER: u32 = 24;

/// Longest datagram that an IPv4 packet has room for, in bytes.
pub const LONGEST: usize = 65_507;

/// Bytes that a datagram takes in a ring.
pub const fn record_bytes(length: u32) -> u32 {
    HEADER + length.next_multiple_of(8)
}

/// Where a socket's memory lies in session memory: a page of words, the receive ring, the send ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Offset of the page of words.
    pub base: u32,
    /// Bytes of the receive ring, a power of two.
    pub receive: u32,
    /// Bytes of the send ring, a power of two.
    pub send: u32,
}

impl Place {
    /// Bytes of all of it.
    pub const fn bytes(&self) -> u32 {
        at::BYTES as u32 + self.receive + self.send
    }

    const fn word(&self, offset: usize) -> usize {
        self.base as usize + offset
    }
}

/// Which of the two rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the NIC to the program.
    Receive,
    /// From the program to the NIC.
    Send,
}

/// The part of a ring that both ends use.
#[derive(Clone, Debug)]
struct Ring {
    memory: Arc<Region>,
    bytes: Circle,
    head: usize,
    tail: usize,
}

impl Ring {
    fn new(memory: &Arc<Region>, place: &Place, direction: Direction) -> Option<Ring> {
        memory.span(place.base as usize, place.bytes() as usize)?;
        let first = place.base + at::BYTES as u32;
        let (base, size, head, tail) = match direction {
            Direction::Receive => (first, place.receive, at::RECEIVE_HEAD, at::RECEIVE_TAIL),
            Direction::Send => (first + place.receive, place.send, at::SEND_HEAD, at::SEND_TAIL),
        };
        let bytes = memory.circle(base, size)?;
        Some(Ring { memory: memory.clone(), bytes, head: place.word(head), tail: place.word(tail) })
    }

    fn load(&self, word: usize) -> u32 {
        self.memory.word32(word).load(Ordering::Acquire)
    }

    fn store(&self, word: usize, value: u32) {
        self.memory.word32(word).store(value, Ordering::Release);
    }
}

/// A ring's writing end.
#[derive(Debug)]
pub struct Writer {
    ring: Ring,
    head: u32,
    limit: u32,
}

impl Writer {
    /// The writing end of a socket's ring, which continues where the last one stopped. At most `limit` bytes are in the
    /// ring at a time. None if the place is not inside of session memory.
    pub fn new(memory: &Arc<Region>, place: &Place, direction: Direction, limit: u32) -> Option<Writer> {
        let ring = Ring::new(memory, place, direction)?;
        let head = ring.load(ring.head);
        let limit = limit.min(ring.bytes.length());
        Some(Writer { ring, head, limit })
    }

    /// Whether a datagram of `length` bytes finds room. A datagram always does in an empty ring, as in the kernel.
    pub fn has_room(&self, length: usize) -> bool {
        let used = self.head.wrapping_sub(self.ring.load(self.ring.tail));
        let needed = record_bytes(length as u32);
        used.checked_add(needed).is_some_and(|after| after <= self.limit || used == 0 && needed <= self.ring.bytes.length())
    }

    /// Appends a datagram to or from `other`, in pieces. False if there is no room.
    pub fn push<'a>(&mut self, other: &Endpoint, pieces: impl Iterator<Item = &'a [u8]> + Clone) -> bool {
        let length: usize = pieces.clone().map(<[u8]>::len).sum();
        if length > LONGEST || !self.has_room(length) {
            return false;
        }
        let mut header = [0u8; HEADER as usize];
        header[..4].copy_from_slice(&(length as u32).to_le_bytes());
        header[4..6].copy_from_slice(&other.port.to_le_bytes());
        header[8..].copy_from_slice(&other.address);
        self.ring.bytes.write(self.head, &header);
        let mut place = self.head.wrapping_add(HEADER);
        for piece in pieces {
            self.ring.bytes.write(place, piece);
            place = place.wrapping_add(piece.len() as u32);
        }
        self.head = self.head.wrapping_add(record_bytes(length as u32));
        self.ring.store(self.ring.head, self.head);
        true
    }

    /// Whether the reader has read everything, by its published position.
    pub fn is_drained(&self) -> bool {
        self.ring.load(self.ring.tail) == self.head
    }
}

/// The next datagram of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The sender of a received datagram, or the destination of one to be sent.
    pub other: Endpoint,
    /// Its bytes.
    pub length: u32,
    at: u32,
}

/// A ring's reading end.
#[derive(Debug)]
pub struct Reader {
    ring: Ring,
    tail: u32,
}

impl Reader {
    /// The reading end of a socket's ring, which continues where the last one stopped. None if the place is not inside
    /// of session memory.
    pub fn new(memory: &Arc<Region>, place: &Place, direction: Direction) -> Option<Reader> {
        let ring = Ring::new(memory, place, direction)?;
        let tail = ring.load(ring.tail);
        Some(Reader { ring, tail })
    }

    /// The next datagram. If the ring's contents are inconsistent, it counts as empty until its writer appends further
    /// datagrams.
    pub fn peek(&self) -> Option<Record> {
        let there = self.ring.load(self.ring.head).wrapping_sub(self.tail);
        if there < HEADER || there > self.ring.bytes.length() {
            return None;
        }
        let mut header = [0u8; HEADER as usize];
        self.ring.bytes.read(self.tail, &mut header);
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let port = u16::from_le_bytes([header[4], header[5]]);
        let other = Endpoint::v6(core::array::from_fn(|n| header[8 + n]), port);
        let fits = length as usize <= LONGEST && record_bytes(length) <= there;
        fits.then_some(Record { other, length, at: self.tail.wrapping_add(HEADER) })
    }

    /// Reads a datagram's bytes from `skip` on.
    pub fn read(&self, record: &Record, skip: u32, out: &mut [u8]) {
        self.ring.bytes.read(record.at.wrapping_add(skip), out);
    }

    /// Removes the datagram that [`Reader::peek`] has returned.
    pub fn pop(&mut self, record: &Record) {
        self.tail = record.at.wrapping_add(record.length.next_multiple_of(8));
        self.ring.store(self.ring.tail, self.tail);
    }
}

/// A flag by which one end asks the other to be woken: see [`Wish::make`].
#[derive(Clone, Debug)]
pub struct Wish {
    memory: Arc<Region>,
    word: usize,
}

impl Wish {
    /// The program's flag, for datagrams in the receive ring, or the NIC's, for those in the send ring.
    pub fn new(memory: &Arc<Region>, place: &Place, direction: Direction) -> Wish {
        let offset = if direction == Direction::Receive { at::RECEIVE_WISH } else { at::SEND_WISH };
        Wish { memory: memory.clone(), word: place.word(offset) }
    }

    /// Asks to be woken when the ring has a datagram. The caller must check the ring once more after this.
    pub fn make(&self) {
        self.memory.word32(self.word).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Takes the other end's wish, after a datagram was put into the ring. Returns whether there was a wish.
    pub fn take(&self) -> bool {
        fence(Ordering::SeqCst);
        let word = self.memory.word32(self.word);
        word.load(Ordering::SeqCst) != 0 && word.swap(0, Ordering::SeqCst) != 0
    }

    /// Whether there is a wish.
    pub fn is_made(&self) -> bool {
        self.memory.word32(self.word).load(Ordering::SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { base: 4096, receive: 4096, send: 4096 };

    fn memory() -> Arc<Region> {
        Arc::new(Region::private(4096 + PLACE.bytes() as usize).unwrap())
    }

    fn ends(memory: &Arc<Region>, limit: u32) -> (Writer, Reader) {
        let direction = Direction::Receive;
        (Writer::new(memory, &PLACE, direction, limit).unwrap(), Reader::new(memory, &PLACE, direction).unwrap())
    }

    #[test]
    fn datagrams_arrive_whole_and_in_order_around_the_end() {
        let memory = memory();
        let (mut writer, mut reader) = ends(&memory, 4096);
        let (mut sent, mut received) = (0u32, 0u32);
        let datagram = |n: u32| -> Vec<u8> { (0..n * 37 % 900).map(|at| (at ^ n) as u8).collect() };
        while received < 1000 {
            let (bytes, from) = (datagram(sent), Endpoint::v4([10, 0, 0, sent as u8], sent as u16));
            let (front, back) = bytes.split_at(bytes.len() / 3);
            if writer.push(&from, [front, back].into_iter()) {
                sent += 1;
                continue;
            }
            assert!(sent > received, "an empty ring has room");
            let record = reader.peek().expect("a datagram");
            assert_eq!(record.other, Endpoint::v4([10, 0, 0, received as u8], received as u16));
            let mut out = vec![0; record.length as usize];
            reader.read(&record, 0, &mut out);
            assert_eq!(out, datagram(received));
            reader.pop(&record);
            received += 1;
        }
        // The next ends go on where these stopped.
        let (mut writer, mut reader) = ends(&memory, 4096);
        while let Some(record) = reader.peek() {
            reader.pop(&record);
            received += 1;
        }
        assert_eq!((received, writer.is_drained()), (sent, true));
        assert!(writer.push(&Endpoint::v4([1; 4], 1), [&[7u8; 8][..]].into_iter()) && reader.peek().is_some());
    }

    #[test]
    fn a_ring_is_bounded() {
        let memory = memory();
        let (mut writer, mut reader) = ends(&memory, 1000);
        let other = Endpoint::v4([1; 4], 1);
        let mut push = |bytes: usize| writer.push(&other, [&vec![0; bytes][..]].into_iter());
        assert!(!push(5000), "longer than the ring");
        assert!(push(3000), "an empty ring accepts one datagram beyond its limit");
        assert!(!push(0));
        let record = reader.peek().unwrap();
        reader.pop(&record);
        assert_eq!((0..100).filter(|_| push(76)).count(), 9, "of 104 bytes each");
    }

    /// With any contents of shared memory neither end leaves its ring, or loops for ever.
    #[test]
    fn nonsense_harms_nobody() {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as u32
        };
        let memory = memory();
        let (mut writer, mut reader) = ends(&memory, 4096);
        for _ in 0..20_000 {
            let at = PLACE.base as usize + 4 * (next() as usize % (PLACE.bytes() as usize / 4));
            memory.word32(at).store(next() >> (next() % 32), Ordering::Relaxed);
            for word in [at::RECEIVE_HEAD, at::RECEIVE_TAIL] {
                if next() % 4 == 0 {
                    memory.word32(PLACE.word(word)).store(next() >> (next() % 32), Ordering::Relaxed);
                }
            }
            let _ = writer.push(&Endpoint::v4([1; 4], 1), [&[7u8; 100][..next() as usize % 100]].into_iter());
            if let Some(record) = reader.peek() {
                assert!(record_bytes(record.length) <= PLACE.receive);
                let mut out = vec![0; record.length as usize];
                reader.read(&record, 0, &mut out);
                reader.pop(&record);
            }
        }
        assert!(Writer::new(&memory, &Place { base: 1 << 30, ..PLACE }, Direction::Send, 1).is_none());
        assert!(Reader::new(&memory, &Place { send: 1000, ..PLACE }, Direction::Send).is_none());
    }
}
