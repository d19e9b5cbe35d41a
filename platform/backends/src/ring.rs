//! The frames that a packet socket has received and is to send, in rings shared with the kernel
//! (`baton_linux::packet_ring`).

use crate::vnet::{self, VNET_HEADER};
use baton_device::{BEGINNING, Frame};
use baton_linux::packet_ring::{BYTES, OWN_WORD, SEND_SLOTS, SENDING, SLOT, SLOTS};
use baton_shm::Region;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `TP_STATUS_USER`: the slot holds a frame. `TP_STATUS_COPY`: the whole frame waits in the socket's queue.
const FILLED: u32 = 1;
const QUEUED: u32 = 2;

// Offsets in a slot: fields of `tpacket2_hdr`, and of the `sockaddr_ll` behind it (Linux,
// `include/uapi/linux/if_packet.h`).
const LENGTH: usize = 4;
const CAPTURED: usize = 8;
const FRAME_AT: usize = 12;
const NANOSECONDS: usize = 20;
const INTERFACE: usize = 32 + 4;
const HEADER: usize = 52;

/// A reader of the ring. The kernel's place in the ring cannot be asked for, so the reader's is kept in the ring
/// itself, for the next process that reads it: the number of its slot, and the nanoseconds of the time at which the
/// last frame came that it has released.
#[derive(Debug)]
pub(crate) struct ReceiveRing {
    memory: Arc<Region>,
    at: usize,
    /// Number of slots that the reader has given back to the kernel.
    taken: u64,
}

/// What the ring's next slot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// No frame waits.
    Nothing,
    /// A frame, which was copied.
    Frame,
    /// The frame, of this length in bytes, is in the socket's queue. Its beginning was copied, and the frame keeps its
    /// slot until [`ReceiveRing::release`].
    Queued(usize),
    /// A frame that was cut off, for which the socket's queue had no room.
    Lost,
}

/// Maps a socket's rings, the second one if it is for `sending`, too. None if the socket has none.
///
/// # Errors
/// The system's.
pub(crate) fn map(socket: OwnedFd, sending: bool) -> io::Result<Option<(ReceiveRing, Option<SendRing>)>> {
    match Region::map_fixed(socket, if sending { BYTES } else { SENDING }) {
        Ok(memory) => {
            let memory = Arc::new(memory);
            Ok(Some((ReceiveRing::over(memory.clone()), sending.then(|| SendRing::over(memory)))))
        }
        Err(error) if error.raw_os_error() == Some(EINVAL) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Linux's error number of a mapping that the socket does not have.
const EINVAL: i32 = 22;

impl ReceiveRing {
    fn over(memory: Arc<Region>) -> ReceiveRing {
        let own = memory.words(OWN_WORD, 1)[0].load(Ordering::Relaxed);
        let at = own as u32 as usize % SLOTS;
        // The last reader may have ended between its move to this slot and the release of the one before. So the slot
        // before is released here, if it still holds the frame that the last reader took. If the ring has wrapped
        // since, it holds a newer frame: releasing that would leave the kernel one slot ahead of the reader, who would
        // wait there until the kernel has come around.
        let before = (at + SLOTS - 1) % SLOTS * SLOT;
        if memory.word32(before + NANOSECONDS).load(Ordering::Acquire) == (own >> 32) as u32 {
            memory.word32(before).store(0, Ordering::Release);
        }
        ReceiveRing { memory, at, taken: 0 }
    }

    /// Takes the next frame into `frame`, or the beginning of one that is queued.
    #[inline]
    pub fn receive(&mut self, frame: &mut Frame) -> Next {
        let slot = self.at * SLOT;
        let status = self.memory.word32(slot).load(Ordering::Acquire);
        if status & FILLED == 0 {
            return Next::Nothing;
        }
        let next = self.take(slot, status, frame);
        if !matches!(next, Next::Queued(_)) {
            self.release();
        }
        next
    }

    /// Gives the slot of the last frame back to the kernel.
    #[inline]
    pub fn release(&mut self) {
        let slot = self.at * SLOT;
        let came_at = self.memory.word32(slot + NANOSECONDS).load(Ordering::Relaxed);
        self.at = (self.at + 1) % SLOTS;
        self.taken += 1;
        let own = self.at as u64 | u64::from(came_at) << 32;
        self.memory.words(OWN_WORD, 1)[0].store(own, Ordering::Relaxed);
        self.memory.word32(slot).store(0, Ordering::Release);
    }

    /// Number of frames taken out of the ring, and number of frames that have arrived in it so far.
    pub fn taken_and_come(&self) -> (u64, u64) {
        let is_filled = |further: &usize| {
            let slot = (self.at + further) % SLOTS * SLOT;
            self.memory.word32(slot).load(Ordering::Acquire) & FILLED != 0
        };
        (self.taken, self.taken + (0..SLOTS).take_while(is_filled).count() as u64)
    }

    /// Whether the queued frame whose slot was looked at last begins like `frame`, of which there are at most
    /// [`BEGINNING`] bytes.
    pub fn is_shown(&self, frame: &[u8]) -> bool {
        let slot = self.at * SLOT;
        let mut at = [0u8; 4];
        let _ = self.memory.read(slot + FRAME_AT, &mut at);
        let at = usize::from(u16::from_ne_bytes([at[0], at[1]]));
        let mut shown = [0u8; BEGINNING];
        shown.get_mut(..frame.len()).is_some_and(|shown| self.memory.read(slot + at, shown).is_ok() && shown == frame)
    }

    #[inline]
    fn take(&self, slot: usize, status: u32, frame: &mut Frame) -> Next {
        let mut header = [0u8; HEADER];
        let _ = self.memory.read(slot, &mut header);
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]));
        let (captured, at) = (word(CAPTURED) as usize, (word(FRAME_AT) & 0xffff) as usize);
        let (length, queued) = (word(LENGTH) as usize, status & QUEUED != 0);
        let copied = if queued { BEGINNING.min(captured) } else { captured };
        let inside = at >= HEADER + VNET_HEADER && at + captured <= SLOT;
        if !inside || !queued && captured < length || copied > frame.capacity() {
            return Next::Lost;
        }
        let mut offloads = [0u8; VNET_HEADER];
        let _ = self.memory.read(slot + at - VNET_HEADER, &mut offloads);
        frame.set_length(copied);
        let _ = self.memory.read(slot + at, frame.bytes_mut());
        vnet::decode(&offloads, frame);
        frame.interface = word(INTERFACE);
        if queued {
            let capacity = frame.capacity();
            frame.set_length(length.min(capacity));
            return Next::Queued(length);
        }
        Next::Frame
    }
}

/// `TP_STATUS_AVAILABLE`: the slot is free. `TP_STATUS_SEND_REQUEST`: its frame is to be sent. Other values: it is
/// being sent.
const FREE: u32 = 0;
const TO_SEND: u32 = 1;

/// Offset in a slot of a frame to be sent, its virtio header first; and of the writer's place, in the first slot.
const SENT_FROM: usize = 32;
const WRITER_AT: usize = SLOT - 4;

/// Largest frame in bytes that a slot has room for.
pub(crate) const MAX_SENT: usize = WRITER_AT - SENT_FROM - VNET_HEADER;

/// Most frames that are gathered.
const MOST_GATHERED: usize = 64;

/// A writer of frames to be sent, which the kernel sends when it is asked to. As with [`ReceiveRing`], the writer's
/// place is kept in the ring.
#[derive(Debug)]
pub(crate) struct SendRing {
    memory: Arc<Region>,
    at: usize,
    /// Number of frames before `at` that the kernel has not been asked to send.
    gathered: usize,
}

impl SendRing {
    fn over(memory: Arc<Region>) -> SendRing {
        let at = memory.word32(SENDING + WRITER_AT).load(Ordering::Relaxed) as usize % SEND_SLOTS;
        // The last writer may have ended between the frame in this slot and its move to the next one. The kernel has
        // not been asked to send that frame yet.
        let _ = memory.word32(Self::slot(at)).compare_exchange(TO_SEND, FREE, Ordering::AcqRel, Ordering::Relaxed);
        let mut ring = SendRing { memory, at, gathered: SEND_SLOTS - 1 };
        // Frames that the last writer gathered and did not send are lost.
        ring.sent();
        ring
    }

    fn slot(at: usize) -> usize {
        SENDING + at % SEND_SLOTS * SLOT
    }

    /// Gathers a frame of at most [`MAX_SENT`] bytes. False if there is no room.
    #[inline]
    pub fn gather(&mut self, header: &[u8; VNET_HEADER], frame: &[u8]) -> bool {
        let slot = Self::slot(self.at);
        if self.memory.word32(slot).load(Ordering::Acquire) != FREE {
            return false;
        }
        let _ = self.memory.write(slot + SENT_FROM, header);
        let _ = self.memory.write(slot + SENT_FROM + VNET_HEADER, frame);
        self.memory.word32(slot + LENGTH).store((VNET_HEADER + frame.len()) as u32, Ordering::Relaxed);
        self.memory.word32(slot).store(TO_SEND, Ordering::Release);
        self.move_to(self.at + 1);
        self.gathered += 1;
        true
    }

    fn move_to(&mut self, at: usize) {
        self.at = at % SEND_SLOTS;
        self.memory.word32(SENDING + WRITER_AT).store(self.at as u32, Ordering::Relaxed);
    }

    /// Whether frames wait for the kernel to be asked.
    pub fn has_gathered(&self) -> bool {
        self.gathered > 0
    }

    /// Whether as many were gathered as should be.
    pub fn is_full(&self) -> bool {
        self.gathered >= MOST_GATHERED
    }

    /// To be called after the kernel was asked to send. Takes back the frames that the kernel left in the ring, which
    /// are the latest ones. Returns their number.
    pub fn sent(&mut self) -> u64 {
        let mut left = 0;
        while left < self.gathered {
            let status = self.memory.word32(Self::slot(self.at + SEND_SLOTS - 1 - left));
            if status.load(Ordering::Acquire) != TO_SEND {
                break;
            }
            status.store(FREE, Ordering::Relaxed);
            left += 1;
        }
        self.move_to(self.at + SEND_SLOTS - left);
        self.gathered = 0;
        left as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> ReceiveRing {
        ReceiveRing::over(Arc::new(Region::private(BYTES).unwrap()))
    }

    /// Fills a slot as the kernel does for a frame of `length` bytes, of which it captured `captured`. Each frame has
    /// another time of arrival.
    fn fill(ring: &ReceiveRing, slot: usize, status: u32, length: u32, captured: u32, at: u16) {
        let came_at = 1 + slot as u32;
        let slot = slot % SLOTS * SLOT;
        let mut header = [0u8; HEADER];
        header[NANOSECONDS..][..4].copy_from_slice(&came_at.to_ne_bytes());
        header[LENGTH..][..4].copy_from_slice(&length.to_ne_bytes());
        header[CAPTURED..][..4].copy_from_slice(&captured.to_ne_bytes());
        header[FRAME_AT..][..2].copy_from_slice(&at.to_ne_bytes());
        header[INTERFACE..][..4].copy_from_slice(&7u32.to_ne_bytes());
        ring.memory.write(slot, &header).unwrap();
        ring.memory.word32(slot).store(status, Ordering::Release);
    }

    #[test]
    fn frames_come_in_order_around_the_ring_and_over_a_change_of_readers() {
        let mut ring = ring();
        let mut frame = Frame::with_capacity(3000);
        for number in 0..2 * SLOTS + 3 {
            assert_eq!(ring.receive(&mut frame), Next::Nothing);
            fill(&ring, number, FILLED, 60 + number as u32 % 900, 60 + number as u32 % 900, 96);
            assert_eq!(ring.receive(&mut frame), Next::Frame);
            assert_eq!((frame.length(), frame.interface), (60 + number % 900, 7));
        }
        fill(&ring, 2 * SLOTS + 3, FILLED, 60, 60, 96);
        let mut next = ReceiveRing::over(ring.memory);
        assert_eq!(next.receive(&mut frame), Next::Frame);
        assert_eq!(next.receive(&mut frame), Next::Nothing);
    }

    #[test]
    fn a_reader_that_ended_before_it_released_a_slot_leaves_no_gap() {
        let mut ring = ring();
        let mut frame = Frame::with_capacity(1000);
        for number in 0..2 * SLOTS {
            fill(&ring, number, FILLED, 60, 60, 96);
            assert_eq!(ring.receive(&mut frame), Next::Frame);
            ring.memory.word32(number % SLOTS * SLOT).store(FILLED, Ordering::Relaxed);
            ring = ReceiveRing::over(ring.memory);
            assert_eq!(ring.receive(&mut frame), Next::Nothing);
            assert_eq!(ring.memory.word32(number % SLOTS * SLOT).load(Ordering::Relaxed), 0);
        }
    }

    /// Between the end of one reader and the start of the next, more frames come than the ring has slots.
    #[test]
    fn a_ring_that_is_full_when_the_next_reader_comes_is_read_whole() {
        let mut ring = ring();
        let mut frame = Frame::with_capacity(1000);
        for first in [0, 5, SLOTS - 1, SLOTS] {
            while ring.at != first % SLOTS {
                fill(&ring, ring.at, FILLED, 60, 60, 96);
                assert_eq!(ring.receive(&mut frame), Next::Frame);
            }
            // The kernel goes on at the slot where it was, and finds no more free slots.
            (first..first + SLOTS).for_each(|number| fill(&ring, number, FILLED, 60, 60, 96));
            ring = ReceiveRing::over(ring.memory);
            assert_eq!(ring.taken_and_come(), (0, SLOTS as u64));
            (0..SLOTS).for_each(|number| assert_eq!(ring.receive(&mut frame), Next::Frame, "{number} from {first}"));
            assert_eq!(ring.receive(&mut frame), Next::Nothing);
        }
    }

    #[test]
    fn numbers_of_a_slot_are_checked() {
        let mut ring = ring();
        let mut frame = Frame::with_capacity(1000);
        fill(&ring, 0, FILLED | QUEUED, 60_000, 1900, 96);
        assert_eq!(ring.receive(&mut frame), Next::Queued(60_000));
        assert_eq!((frame.length(), frame.interface), (1000, 7));
        ring.release();
        let wrong = [(60, 50, 96), (60, 60, 61), (60, 60, 2000), (60, u32::MAX, 96), (60, 60, u16::MAX), (1500, 1500, 96)];
        for (number, (length, captured, at)) in wrong.into_iter().enumerate() {
            fill(&ring, 1 + number, FILLED, length, captured, at);
            assert_eq!(ring.receive(&mut frame), Next::Lost, "{length} {captured} {at}");
        }
        assert_eq!(ring.receive(&mut frame), Next::Nothing);
    }

    fn send_ring() -> SendRing {
        SendRing::over(Arc::new(Region::private(BYTES).unwrap()))
    }

    /// Marks `count` frames from slot `from` on as sent, as the kernel does when it is asked to send.
    fn send(ring: &SendRing, from: usize, count: usize) {
        (from..from + count).for_each(|at| ring.memory.word32(SendRing::slot(at)).store(FREE, Ordering::Release));
    }

    #[test]
    fn frames_that_the_kernel_left_are_taken_back() {
        let mut ring = send_ring();
        let mut at = 0;
        for round in 0..2 * SEND_SLOTS {
            let (count, sent) = (1 + round % 7, round % 5);
            (0..count).for_each(|_| assert!(ring.gather(&[0; VNET_HEADER], &[1; MAX_SENT])));
            send(&ring, at, sent.min(count));
            assert_eq!(ring.sent() as usize, count.saturating_sub(sent));
            at = (at + sent.min(count)) % SEND_SLOTS;
            assert_eq!((ring.at, ring.has_gathered()), (at, false));
        }
    }

    #[test]
    fn a_ring_without_room_refuses_and_the_next_writer_begins_where_the_kernel_is() {
        let mut ring = send_ring();
        (0..SEND_SLOTS - 1).for_each(|_| assert!(ring.gather(&[0; VNET_HEADER], &[1; 60])));
        send(&ring, 0, 5);
        let ring = SendRing::over(ring.memory);
        assert_eq!((ring.at, ring.gathered), (5, 0));
        // A frame that was written to its slot and not counted yet.
        ring.memory.word32(SendRing::slot(5)).store(TO_SEND, Ordering::Relaxed);
        let ring = SendRing::over(ring.memory);
        assert_eq!((ring.at, ring.memory.word32(SendRing::slot(5)).load(Ordering::Relaxed)), (5, FREE));
        // The kernel still sends these.
        (0..SEND_SLOTS).for_each(|at| ring.memory.word32(SendRing::slot(at)).store(2, Ordering::Relaxed));
        let mut ring = SendRing::over(ring.memory);
        assert!(!ring.gather(&[0; VNET_HEADER], &[1; 60]));
    }
}
