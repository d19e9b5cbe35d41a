//! Memory for messages that counts the bytes which this process copies.

use baton_records::SessionMemory;
use baton_rmpp::Memory;
use std::cell::Cell;

/// An endpoint's memory.
#[derive(Debug)]
pub struct Counted {
    memory: SessionMemory,
    copied: Cell<u64>,
}

impl Counted {
    pub fn new(memory: SessionMemory) -> Counted {
        Counted { memory, copied: Cell::new(0) }
    }

    /// The memory without the counter, for the program's own accesses.
    pub fn memory(&mut self) -> &mut SessionMemory {
        &mut self.memory
    }

    /// Bytes that were copied so far.
    pub fn copied(&self) -> u64 {
        self.copied.get()
    }

    fn add(&self, bytes: u64) {
        self.copied.set(self.copied.get() + bytes);
    }
}

impl Memory for Counted {
    fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        self.add(out.len() as u64);
        self.memory.read(offset, out)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        self.add(data.len() as u64);
        self.memory.write(offset, data)
    }

    fn copy(&mut self, from: u64, to: u64, length: u64) -> bool {
        self.add(length);
        self.memory.copy(from, to, length)
    }
}
