//! A wire in memory, for tests and benches. Frames are passed on by exchanging buffers, without a copy.

use baton_device::{Capabilities, Device, Frame};
use std::cell::Cell;
use std::rc::Rc;

/// The frames in flight in one direction: a ring of buffers, which are exchanged for the caller's.
struct Queue {
    frames: Box<[Cell<Frame>]>,
    /// Greatest index of a frame; the number of frames is a power of two.
    mask: usize,
    head: Cell<usize>,
    tail: Cell<usize>,
}

/// One end of a memory wire.
pub struct MemoryDevice {
    incoming: Rc<Queue>,
    outgoing: Rc<Queue>,
    frame_bytes: usize,
    capabilities: Capabilities,
}

/// Makes the two ends of a wire that holds `depth` frames (rounded up to a power of two) of up to `frame_bytes` bytes
/// in each direction.
pub fn memory_pair(depth: usize, frame_bytes: usize, capabilities: Capabilities) -> (MemoryDevice, MemoryDevice) {
    let queue = || {
        let frames: Box<[_]> = (0..depth.next_power_of_two()).map(|_| Cell::new(Frame::with_capacity(frame_bytes))).collect();
        let mask = frames.len() - 1;
        Rc::new(Queue { frames, mask, head: Cell::new(0), tail: Cell::new(0) })
    };
    let (there, back) = (queue(), queue());
    let near = MemoryDevice { incoming: back.clone(), outgoing: there.clone(), frame_bytes, capabilities };
    (near, MemoryDevice { incoming: there, outgoing: back, frame_bytes, capabilities })
}

impl Queue {
    /// Exchanges the frame at an index of the ring; indices count without wrapping at its size.
    #[inline]
    fn exchange(&self, index: usize, frame: &mut Frame) {
        // SAFETY: `mask` is the greatest index. The cell is not shared between threads, no other reference to its
        // content exists, and `frame`, which is borrowed mutably, lies elsewhere.
        core::mem::swap(unsafe { &mut *self.frames.get_unchecked(index & self.mask).as_ptr() }, frame);
    }
}

impl Device for MemoryDevice {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    #[inline(always)]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        let queue = &*self.incoming;
        let tail = queue.tail.get();
        if queue.head.get() == tail {
            return false;
        }
        queue.tail.set(tail.wrapping_add(1));
        queue.exchange(tail, frame);
        true
    }

    fn taken_and_come(&self) -> (u64, u64) {
        (self.incoming.tail.get() as u64, self.incoming.head.get() as u64)
    }

    #[inline(always)]
    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let queue = &*self.outgoing;
        let head = queue.head.get();
        if head.wrapping_sub(queue.tail.get()) > queue.mask || frame.length() > self.frame_bytes {
            return false;
        }
        queue.exchange(head, frame);
        queue.head.set(head.wrapping_add(1));
        true
    }
}
