//! The frames that a packet socket has received, in a ring shared with the kernel (`baton_linux::packet_ring`).

use crate::vnet::{self, VNET_HEADER};
use baton_device::Frame;
use baton_linux::packet_ring::{BYTES, OWN_WORD, SLOT, SLOTS};
use baton_shm::Region;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

/// `TP_STATUS_USER`: the slot holds a frame. `TP_STATUS_COPY`: the whole frame waits in the socket's queue.
const FILLED: u32 = 1;
const QUEUED: u32 = 2;

// Offsets in a slot: fields of `tpacket2_hdr`, and of the `sockaddr_ll` behind it (Linux, `include/uapi/linux/if_packet.h`).
const LENGTH: usize = 4;
const CAPTURED: usize = 8;
const FRAME_AT: usize = 12;
const INTERFACE: usize = 32 + 4;
const HEADER: usize = 52;

/// A reader of the ring. The kernel's place in the ring cannot be asked for, so the reader's is kept in the ring itself, for the
/// next process that reads it.
#[derive(Debug)]
pub(crate) struct ReceiveRing {
    memory: Region,
    at: usize,
}

/// What the ring's next slot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// No frame waits.
    Nothing,
    /// A frame, which was copied.
    Frame,
    /// The frame is in the socket's queue. It came from the interface with this index.
    Queued(u32),
    /// A frame that was cut off, for which the socket's queue had no room.
    Lost,
}

impl ReceiveRing {
    /// Maps a socket's ring.
    ///
    /// # Errors
    /// The system's; `EINVAL` if the socket has no ring.
    pub fn map(socket: OwnedFd) -> io::Result<ReceiveRing> {
        Ok(ReceiveRing::over(Region::map_fixed(socket, BYTES)?))
    }

    fn over(memory: Region) -> ReceiveRing {
        let at = memory.word32(OWN_WORD).load(Ordering::Relaxed) as usize % SLOTS;
        // The last reader may have ended between its move to this slot and the release of the one before.
        memory.word32((at + SLOTS - 1) % SLOTS * SLOT).store(0, Ordering::Release);
        ReceiveRing { memory, at }
    }

    /// Takes the next frame into `frame`.
    #[inline]
    pub fn receive(&mut self, frame: &mut Frame) -> Next {
        let slot = self.at * SLOT;
        let status = self.memory.word32(slot).load(Ordering::Acquire);
        if status & FILLED == 0 {
            return Next::Nothing;
        }
        let next = self.take(slot, status, frame);
        self.at = (self.at + 1) % SLOTS;
        self.memory.word32(OWN_WORD).store(self.at as u32, Ordering::Relaxed);
        self.memory.word32(slot).store(0, Ordering::Release);
        next
    }

    #[inline]
    fn take(&self, slot: usize, status: u32, frame: &mut Frame) -> Next {
        let mut header = [0u8; HEADER];
        let _ = self.memory.read(slot, &mut header);
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]));
        let interface = word(INTERFACE);
        if status & QUEUED != 0 {
            return Next::Queued(interface);
        }
        let (captured, at) = (word(CAPTURED) as usize, (word(FRAME_AT) & 0xffff) as usize);
        let inside = at >= HEADER + VNET_HEADER && at + captured <= SLOT;
        if !inside || captured < word(LENGTH) as usize || captured > frame.capacity() {
            return Next::Lost;
        }
        let mut offloads = [0u8; VNET_HEADER];
        let _ = self.memory.read(slot + at - VNET_HEADER, &mut offloads);
        frame.set_length(captured);
        let _ = self.memory.read(slot + at, frame.bytes_mut());
        vnet::decode(&offloads, frame);
        frame.interface = interface;
        Next::Frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> ReceiveRing {
        ReceiveRing::over(Region::private(BYTES).unwrap())
    }

    /// Does what the kernel does for a frame of `captured` bytes of `length`.
    fn fill(ring: &ReceiveRing, slot: usize, status: u32, length: u32, captured: u32, at: u16) {
        let slot = slot % SLOTS * SLOT;
        let mut header = [0u8; HEADER];
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
            assert_eq!((frame.bytes().len(), frame.interface), (60 + number % 900, 7));
        }
        fill(&ring, 2 * SLOTS + 3, FILLED, 60, 60, 96);
        let mut next = ReceiveRing::over(ring.memory);
        assert_eq!(next.receive(&mut frame), Next::Frame);
        assert_eq!(next.receive(&mut frame), Next::Nothing);
    }

    #[test]
    fn a_reader_that_ended_before_it_released_a_slot_leaves_no_gap() {
        let ring = ring();
        fill(&ring, 0, FILLED, 60, 60, 96);
        ring.memory.word32(OWN_WORD).store(1, Ordering::Relaxed);
        let ring = ReceiveRing::over(ring.memory);
        assert_eq!(ring.memory.word32(0).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn numbers_of_a_slot_are_checked() {
        let mut ring = ring();
        let mut frame = Frame::with_capacity(1000);
        fill(&ring, 0, FILLED | QUEUED, 60_000, 1900, 96);
        assert_eq!(ring.receive(&mut frame), Next::Queued(7));
        let wrong = [(60, 50, 96), (60, 60, 61), (60, 60, 2000), (60, u32::MAX, 96), (60, 60, u16::MAX), (1500, 1500, 96)];
        for (number, (length, captured, at)) in wrong.into_iter().enumerate() {
            fill(&ring, 1 + number, FILLED, length, captured, at);
            assert_eq!(ring.receive(&mut frame), Next::Lost, "{length} {captured} {at}");
        }
        assert_eq!(ring.receive(&mut frame), Next::Nothing);
    }
}
