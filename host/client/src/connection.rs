//! One connection, as its program sees it: the descriptor, and while the NIC has it, two pieces of memory and four numbers.

use baton_abi::Cid;
use baton_abi::layout::{Owner, block, session};
use baton_kernel::events;
use baton_ring::Region;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A connection's block in session memory.
#[derive(Debug)]
pub(crate) struct Block {
    memory: Arc<Region>,
    base: usize,
}

impl Block {
    pub fn new(memory: Arc<Region>, connection: u32) -> Self {
        Block { memory, base: session::block(connection) }
    }

    pub fn load(&self, field: usize) -> u32 {
        self.memory.word32(self.base + field).load(Ordering::Acquire)
    }

    pub fn store(&self, field: usize, value: u32) {
        self.memory.word32(self.base + field).store(value, Ordering::Release);
    }

    /// Enters an operation: the owner cannot change until [`Block::leave`]. None while the connection is being moved.
    #[inline]
    pub fn enter(&self) -> Option<Owner> {
        self.memory.word32(self.base + block::BUSY).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        match Owner::from_number(self.load(block::OWNER)) {
            Owner::Moving | Owner::Nobody => {
                self.leave();
                None
            }
            owner => Some(owner),
        }
    }

    /// Leaves it, and tells an agent that waits for that.
    #[inline]
    pub fn leave(&self) {
        let busy = self.memory.word32(self.base + block::BUSY);
        busy.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.load(block::OWNER) == Owner::Moving as u32 {
            events::wake_all(busy);
        }
    }
}

/// The NIC's side of a connection: sequence numbers index the memory.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Offload {
    pub cid: Cid,
    pub receive_base: usize,
    pub receive_mask: u32,
    pub send_base: usize,
    pub send_mask: u32,
    /// First unread, and behind the last received byte.
    pub read: u32,
    pub received: u32,
    /// First unacknowledged, and behind the last queued byte.
    pub acked: u32,
    pub queued: u32,
    pub fin: bool,
    pub shut: bool,
}

/// A connection of a session.
#[derive(Debug)]
pub(crate) struct Connection {
    pub fd: OwnedFd,
    pub block: Block,
    /// The block's move counter when `offload` was read.
    pub moves: u32,
    pub offload: Offload,
    /// The connection ended with this error number.
    pub error: Option<u32>,
    /// It is in the list of connections to look at.
    pub ready: bool,
}

impl Connection {
    /// After a move: takes over what the agent wrote into the block.
    pub fn refresh(&mut self) {
        let moves = self.block.load(block::MOVES);
        if moves == self.moves {
            return;
        }
        self.moves = moves;
        let b = &self.block;
        let flags = b.load(block::FLAGS);
        self.offload = Offload {
            cid: Cid(b.load(block::CID)),
            receive_base: b.load(block::RECEIVE_BASE) as usize,
            receive_mask: b.load(block::RECEIVE_SIZE).wrapping_sub(1),
            send_base: b.load(block::SEND_BASE) as usize,
            send_mask: b.load(block::SEND_SIZE).wrapping_sub(1),
            read: b.load(block::READ_SEQ),
            received: b.load(block::RECEIVE_SEQ),
            acked: b.load(block::ACKED_SEQ),
            queued: b.load(block::QUEUED_SEQ),
            fin: flags & 1 != 0,
            shut: flags & 2 != 0,
        };
    }
}
