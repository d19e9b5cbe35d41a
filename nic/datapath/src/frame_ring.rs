//! A ring of frames in shared memory, with one producer and one consumer, between the NIC and the host's TCP.
//!
//! The indices count bytes and do not wrap at the ring's size. A frame is contiguous behind its header. If the rest of
//! the ring is too short for it, a header without a frame says that the next one is at the beginning.

use baton_abi::layout::host_tcp::{FRAMES_BYTES, FRAMES_DATA};
use baton_device::{Checksum, Frame, Parts, Segmentation};
use baton_shm::Region;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Offsets of the producer's and the consumer's index, and of the frames.
const HEAD: usize = 0;
const TAIL: usize = 64;
const DATA: usize = FRAMES_BYTES - FRAMES_DATA;
/// Bytes of a header; frames begin at multiples of it.
const HEADER: usize = 32;
/// Length in a header without a frame: the rest of the ring is not used.
const SKIP: u32 = u32::MAX;

/// A frame's metadata.
#[derive(Clone, Copy, Default)]
struct Header {
    length: u32,
    /// See [`FrameSender::send`].
    tag: u32,
    interface: u32,
    /// 0 for none, 1 for verified, 2 for partial; then its beginning and offset.
    checksum: [u16; 3],
    /// Bytes of a segment, 0 for none; bytes of headers; IPv6 and ECN as bits.
    segmentation: [u16; 3],
}

impl Header {
    fn of(frame: &Parts, tag: u32) -> Header {
        let checksum = match frame.checksum {
            Checksum::Unknown => [0; 3],
            Checksum::Verified => [1, 0, 0],
            Checksum::Partial { start, offset } => [2, start, offset],
        };
        let segmentation = frame.segmentation.map_or([0; 3], |cut| {
            [cut.size, cut.headers, u16::from(cut.ipv6) | u16::from(cut.ecn) << 1 | u16::from(cut.udp) << 2]
        });
        Header { length: frame.bytes().len() as u32, tag, interface: frame.interface, checksum, segmentation }
    }

    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        for (at, word) in [self.length, self.tag, self.interface].into_iter().enumerate() {
            bytes[4 * at..][..4].copy_from_slice(&word.to_le_bytes());
        }
        for (at, half) in self.checksum.into_iter().chain(self.segmentation).enumerate() {
            bytes[12 + 2 * at..][..2].copy_from_slice(&half.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER]) -> Header {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Header {
            length: word(0),
            tag: word(4),
            interface: word(8),
            checksum: [half(12), half(14), half(16)],
            segmentation: [half(18), half(20), half(22)],
        }
    }

    /// Sets a frame's offload state.
    fn apply(&self, frame: &mut Frame) {
        let [state, start, offset] = self.checksum;
        frame.checksum = match state {
            1 => Checksum::Verified,
            2 => Checksum::Partial { start, offset },
            _ => Checksum::Unknown,
        };
        let [size, headers, bits] = self.segmentation;
        frame.segmentation =
            (size > 0).then_some(Segmentation { size, headers, ipv6: bits & 1 != 0, ecn: bits & 2 != 0, udp: bits & 4 != 0 });
        frame.interface = self.interface;
    }
}

fn index(memory: &Region, at: usize) -> &AtomicU64 {
    &memory.words(at, 1)[0]
}

/// Bytes that a frame takes in the ring.
fn room_for(length: usize) -> u64 {
    (HEADER + length.next_multiple_of(HEADER)) as u64
}

/// The producing end.
pub(crate) struct FrameSender {
    memory: Arc<Region>,
    base: usize,
    head: u64,
}

impl FrameSender {
    /// The producing end of the ring at `base`.
    pub fn new(memory: Arc<Region>, base: usize) -> FrameSender {
        let head = index(&memory, base + HEAD).load(Ordering::Acquire);
        FrameSender { memory, base, head }
    }

    /// Sends a copy of a frame. `tag` is the cid of the connection with whose held frames it is to be kept, or 0. False
    /// if there is no room.
    pub fn send(&mut self, frame: &Parts, tag: u32) -> bool {
        let length = frame.bytes().len();
        let tail = index(&self.memory, self.base + TAIL).load(Ordering::Acquire);
        let place = self.head as usize % FRAMES_DATA;
        let rest = FRAMES_DATA - place;
        let skipped = if room_for(length) as usize > rest { rest as u64 } else { 0 };
        if self.head.wrapping_sub(tail) + skipped + room_for(length) > FRAMES_DATA as u64 {
            return false;
        }
        if skipped > 0 {
            self.write(place, &Header { length: SKIP, ..Header::default() }.to_bytes());
        }
        let place = (self.head + skipped) as usize % FRAMES_DATA;
        self.write(place, &Header::of(frame, tag).to_bytes());
        self.write(place + HEADER, frame.bytes());
        self.head += skipped + room_for(length);
        index(&self.memory, self.base + HEAD).store(self.head, Ordering::Release);
        true
    }

    fn write(&self, place: usize, bytes: &[u8]) {
        // Cannot fail: `send` has found the room inside the ring.
        let _ = self.memory.write(self.base + DATA + place, bytes);
    }
}

/// The consuming end.
pub(crate) struct FrameReceiver {
    memory: Arc<Region>,
    base: usize,
    tail: u64,
}

impl FrameReceiver {
    /// The consuming end of the ring at `base`.
    pub fn new(memory: Arc<Region>, base: usize) -> FrameReceiver {
        let tail = index(&memory, base + TAIL).load(Ordering::Acquire);
        FrameReceiver { memory, base, tail }
    }

    /// Whether a frame waits.
    #[inline]
    pub fn has_frame(&self) -> bool {
        self.waiting_to() != self.tail
    }

    /// Position behind the last frame sent so far, for [`FrameReceiver::receive_to`].
    pub fn waiting_to(&self) -> u64 {
        index(&self.memory, self.base + HEAD).load(Ordering::Acquire)
    }

    /// Receives the next frame before position `end` into `frame`. Returns its tag.
    pub fn receive_to(&mut self, end: u64, frame: &mut Frame) -> Option<u32> {
        while (end.wrapping_sub(self.tail) as i64) > 0 {
            let place = self.tail as usize % FRAMES_DATA;
            let mut bytes = [0; HEADER];
            let _ = self.memory.read(self.base + DATA + place, &mut bytes);
            let header = Header::from_bytes(&bytes);
            let length = header.length as usize;
            if header.length == SKIP {
                self.release((FRAMES_DATA - place) as u64);
                continue;
            }
            if place + HEADER + length > FRAMES_DATA {
                // A producer that follows this layout never writes this, so nothing in the ring can be trusted.
                self.tail = end;
                self.release(0);
                return None;
            }
            let fits = length <= frame.capacity();
            if fits {
                frame.set_length(length);
                let _ = self.memory.read(self.base + DATA + place + HEADER, frame.bytes_mut());
                header.apply(frame);
            }
            self.release(room_for(length));
            if fits {
                return Some(header.tag);
            }
        }
        None
    }

    fn release(&mut self, bytes: u64) {
        self.tail = self.tail.wrapping_add(bytes);
        index(&self.memory, self.base + TAIL).store(self.tail, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (FrameSender, FrameReceiver) {
        let memory = Arc::new(Region::private(4096 + FRAMES_BYTES).unwrap());
        (FrameSender::new(memory.clone(), 4096), FrameReceiver::new(memory, 4096))
    }

    /// Frames of all lengths come out as they went in, many times around the ring; a full ring refuses.
    #[test]
    fn frames_come_out_in_order_and_whole() {
        let (mut sender, mut receiver) = pair();
        let (mut sent, mut received, mut refused) = (0u32, 0u32, 0);
        let mut frame = Frame::with_capacity(1 << 16);
        let length_of = |number: u32| 1 + (number as usize * 7919) % 65_000;
        while received < 1000 {
            frame.fill(&vec![sent as u8; length_of(sent)]);
            frame.checksum = Checksum::Partial { start: 34, offset: sent as u16 };
            frame.segmentation =
                (sent % 2 == 0).then_some(Segmentation { size: 9, headers: 54, ipv6: true, ecn: false, udp: false });
            frame.interface = sent;
            if sender.send(&frame, sent) {
                sent += 1;
                continue;
            }
            refused += 1;
            let end = receiver.waiting_to();
            while let Some(tag) = receiver.receive_to(end, &mut frame) {
                assert_eq!((tag, frame.interface, frame.bytes().len()), (received, received, length_of(received)));
                assert!(frame.bytes().iter().all(|byte| *byte == received as u8));
                assert_eq!(frame.checksum, Checksum::Partial { start: 34, offset: received as u16 });
                assert_eq!(frame.segmentation.is_some(), received % 2 == 0);
                received += 1;
            }
            assert_eq!(received, sent);
        }
        assert!(refused > 3 && !receiver.has_frame());
    }

    #[test]
    fn frames_behind_a_position_wait() {
        let (mut sender, mut receiver) = pair();
        let mut frame = Frame::with_capacity(100);
        frame.fill(&[1; 60]);
        assert!(sender.send(&frame, 5));
        let end = receiver.waiting_to();
        assert!(sender.send(&frame, 6));
        assert_eq!(receiver.receive_to(end, &mut frame), Some(5));
        assert_eq!(receiver.receive_to(end, &mut frame), None);
        assert!(receiver.has_frame());
    }
}
