//! Memory that survives the NIC.

use baton_active_ack::{ENTRY_BYTES, Store};
use std::cell::RefCell;
use std::rc::Rc;

/// Buffers in memory that its copies share.
#[derive(Clone)]
pub struct Memory(Rc<RefCell<Vec<u8>>>);

impl Memory {
    pub fn new(buffers: usize) -> Memory {
        Memory(Rc::new(RefCell::new(vec![0; buffers * ENTRY_BYTES])))
    }
}

impl Store for Memory {
    fn buffers(&self) -> usize {
        self.0.borrow().len() / ENTRY_BYTES
    }

    fn write(&self, buffer: usize, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= ENTRY_BYTES);
        self.0.borrow_mut()[buffer * ENTRY_BYTES + at..][..bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, buffer: usize, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.0.borrow()[buffer * ENTRY_BYTES + at..][..out.len()]);
    }

    fn publish(&self, buffer: usize, at: usize, word: u64) {
        self.write(buffer, at, &word.to_le_bytes());
    }
}
