//! A connection's block in session memory, through which agent and program agree on whose the connection is.

use baton_abi::layout::{Owner, block, session};
use baton_shm::Region;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[derive(Clone)]
pub(crate) struct Block {
    pub memory: Arc<Region>,
    pub number: u32,
}

impl Block {
    pub fn load(&self, field: usize) -> u32 {
        self.memory.word32(session::block(self.number) + field).load(Ordering::Acquire)
    }

    pub fn store(&self, field: usize, value: u32) {
        self.memory.word32(session::block(self.number) + field).store(value, Ordering::Release);
    }

    pub fn owner(&self) -> Owner {
        Owner::from_number(self.load(block::OWNER))
    }

    pub fn set_owner(&self, owner: Owner) {
        self.store(block::OWNER, owner as u32);
    }

    /// Whether no thread of the program is inside an operation on the connection.
    pub fn is_left(&self) -> bool {
        self.load(block::BUSY) == 0
    }
}
