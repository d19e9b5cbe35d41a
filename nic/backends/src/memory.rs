//! A wire in memory, for tests and benches: frames change hands without being copied.

use baton_device::{Capabilities, Device, Frame};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

type Queue = Rc<RefCell<VecDeque<Frame>>>;

/// One end of a memory wire.
pub struct MemoryDevice {
    incoming: Queue,
    outgoing: Queue,
    spare: Vec<Frame>,
    depth: usize,
    frame_bytes: usize,
    capabilities: Capabilities,
}

/// Two ends of a wire that holds `depth` frames of up to `frame_bytes` each way.
pub fn memory_pair(depth: usize, frame_bytes: usize, capabilities: Capabilities) -> (MemoryDevice, MemoryDevice) {
    let queues: [Queue; 2] = std::array::from_fn(|_| Rc::new(RefCell::new(VecDeque::with_capacity(depth))));
    let end = |incoming: &Queue, outgoing: &Queue| MemoryDevice {
        incoming: incoming.clone(),
        outgoing: outgoing.clone(),
        spare: (0..depth + 1).map(|_| Frame::with_capacity(frame_bytes)).collect(),
        depth,
        frame_bytes,
        capabilities,
    };
    (end(&queues[0], &queues[1]), end(&queues[1], &queues[0]))
}

impl Device for MemoryDevice {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    #[inline]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        match self.incoming.borrow_mut().pop_front() {
            Some(received) => {
                self.spare.push(std::mem::replace(frame, received));
                true
            }
            None => false,
        }
    }

    #[inline]
    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let mut outgoing = self.outgoing.borrow_mut();
        if outgoing.len() >= self.depth || frame.bytes().len() > self.frame_bytes {
            return false;
        }
        let empty = self.spare.pop().unwrap_or_else(|| Frame::with_capacity(self.frame_bytes));
        outgoing.push_back(std::mem::replace(frame, empty));
        true
    }
}
