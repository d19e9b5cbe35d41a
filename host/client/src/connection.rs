//! One connection, as its program sees it: while the NIC has it, two pieces of memory and four numbers. Any thread may use it.

use baton_abi::Cid;
use baton_abi::layout::{Owner, block, session};
use baton_kernel::events;
use baton_ring::{MovableWords, Region, Token};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::Duration;

const RELAXED: Ordering = Ordering::Relaxed;
const UNHURT: u32 = u32::MAX;

/// A connection of a session.
#[derive(Debug)]
pub struct Connection {
    /// Its number in the session.
    number: AtomicU32,
    block: MovableWords<{ session::BLOCK_BYTES / 4 }>,
    /// The block's move counter when the rest was read.
    pub(crate) moves: AtomicU32,
    pub(crate) cid: AtomicU32,
    pub(crate) receive_base: AtomicU32,
    pub(crate) receive_mask: AtomicU32,
    pub(crate) send_base: AtomicU32,
    pub(crate) send_mask: AtomicU32,
    /// First unread, and behind the last received byte.
    pub(crate) read: AtomicU32,
    pub(crate) received: AtomicU32,
    /// First unacknowledged, and behind the last queued byte.
    pub(crate) acked: AtomicU32,
    pub(crate) queued: AtomicU32,
    pub(crate) fin: AtomicBool,
    pub(crate) shut: AtomicBool,
    /// The error number that it ended with on the NIC; 0 for none, [`UNHURT`] if it has not ended.
    error: AtomicU32,
}

/// What can be done with a connection on the NIC just now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness {
    /// Bytes unread.
    pub unread: u32,
    /// The peer has closed its sending side, and said so.
    pub fin: bool,
    /// Bytes that can be queued.
    pub room: u32,
    /// Bytes that the send memory has.
    pub send_memory: u32,
    /// The sending side is shut.
    pub shut: bool,
    /// It has ended, with this error number or 0.
    pub ended: Option<u32>,
}

/// The right to use a connection: its owner does not change until this is dropped.
#[derive(Debug)]
pub struct Entered<'a> {
    connection: &'a Connection,
    /// Who has it.
    pub owner: Owner,
}

impl Drop for Entered<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.connection.leave();
    }
}

impl Connection {
    /// One without a number yet: see [`crate::Shared::register`].
    pub(crate) fn unnamed(memory: Arc<Region>) -> Connection {
        let zero = AtomicU32::default;
        Connection {
            number: zero(),
            block: MovableWords::new(memory, session::block(0)),
            moves: zero(),
            cid: zero(),
            receive_base: zero(),
            receive_mask: zero(),
            send_base: zero(),
            send_mask: zero(),
            read: zero(),
            received: zero(),
            acked: zero(),
            queued: zero(),
            fin: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            error: AtomicU32::new(UNHURT),
        }
    }

    /// Stands for another connection from now on: whoever still holds a reference for the last one does no harm but to the program.
    pub(crate) fn rename(&self, number: u32) {
        self.number.store(number, RELAXED);
        self.block.move_to(session::block(number));
        self.cid.store(0, RELAXED);
        self.fin.store(false, RELAXED);
        self.shut.store(false, RELAXED);
        self.error.store(UNHURT, RELAXED);
        self.moves.store(self.moves(), Ordering::Release);
    }

    /// Its number in the session.
    pub fn number(&self) -> u32 {
        self.number.load(RELAXED)
    }

    #[inline(always)]
    fn word(&self, field: usize) -> &AtomicU32 {
        &self.block[field / 4]
    }

    #[inline(always)]
    pub(crate) fn load(&self, field: usize) -> u32 {
        self.word(field).load(Ordering::Acquire)
    }

    #[inline(always)]
    pub(crate) fn store(&self, field: usize, value: u32) {
        self.word(field).store(value, Ordering::Release);
    }

    /// Who has it just now.
    pub fn owner(&self) -> Owner {
        Owner::from_number(self.load(block::OWNER))
    }

    /// The moves that it has made, as the agent counts them.
    #[inline(always)]
    pub fn moves(&self) -> u32 {
        self.load(block::MOVES)
    }

    /// Enters an operation, after others' operations. None while it is being moved, or if this thread is inside already (from a
    /// signal handler).
    #[inline(always)]
    pub(crate) fn enter(&self, token: Token) -> Option<Entered<'_>> {
        let busy = self.word(block::BUSY);
        // The exchange is a full barrier: the owner is read after it.
        if busy.compare_exchange(0, token, Ordering::SeqCst, RELAXED).is_err() && !self.wait_for_turn(token) {
            return None;
        }
        match self.owner() {
            Owner::Moving | Owner::Nobody => {
                self.leave();
                None
            }
            owner => Some(Entered { connection: self, owner }),
        }
    }

    #[cold]
    fn wait_for_turn(&self, token: Token) -> bool {
        let busy = self.word(block::BUSY);
        let mut spins = 0u32;
        loop {
            match busy.compare_exchange(0, token, Ordering::SeqCst, RELAXED) {
                Ok(_) => return true,
                Err(holder) if holder == token => return false,
                Err(_) => {
                    spins += 1;
                    if spins.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
                }
            }
        }
    }

    /// Whether this thread is inside an operation on it.
    pub fn is_inside(&self, token: Token) -> bool {
        self.word(block::BUSY).load(RELAXED) == token
    }

    /// Leaves it, and tells an agent that waits for that.
    #[inline(always)]
    fn leave(&self) {
        let busy = self.word(block::BUSY);
        busy.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.load(block::OWNER) == Owner::Moving as u32 {
            events::wake_all(busy);
        }
    }

    /// Waits until it is not being moved any more, a short while at most.
    pub fn wait_until_settled(&self) {
        events::wait_while(self.word(block::OWNER), Owner::Moving as u32, Duration::from_millis(1));
    }

    #[inline(always)]
    pub(crate) fn name(&self) -> Cid {
        Cid(self.cid.load(RELAXED))
    }

    /// After a move: takes over what the agent wrote into the block. The caller holds the lock on the session's events.
    pub(crate) fn refresh(&self) {
        let moves = self.moves();
        let flags = self.load(block::FLAGS);
        let copy = |to: &AtomicU32, field| to.store(self.load(field), RELAXED);
        copy(&self.cid, block::CID);
        copy(&self.receive_base, block::RECEIVE_BASE);
        self.receive_mask.store(self.load(block::RECEIVE_SIZE).wrapping_sub(1), RELAXED);
        copy(&self.send_base, block::SEND_BASE);
        self.send_mask.store(self.load(block::SEND_SIZE).wrapping_sub(1), RELAXED);
        copy(&self.read, block::READ_SEQ);
        copy(&self.received, block::RECEIVE_SEQ);
        copy(&self.acked, block::ACKED_SEQ);
        copy(&self.queued, block::QUEUED_SEQ);
        self.fin.store(flags & 1 != 0, RELAXED);
        self.shut.store(flags & 2 != 0, RELAXED);
        self.moves.store(moves, Ordering::Release);
    }

    /// Whether a move has happened since [`Connection::refresh`].
    #[inline(always)]
    pub(crate) fn has_moved(&self) -> bool {
        self.moves() != self.moves.load(Ordering::Acquire)
    }

    /// The error number that it ended with on the NIC, 0 for none; None if it has not.
    #[inline(always)]
    pub fn ended(&self) -> Option<u32> {
        match self.error.load(RELAXED) {
            UNHURT => None,
            error => Some(error),
        }
    }

    pub(crate) fn set_ended(&self, error: u32) {
        self.error.store(error, RELAXED);
    }

    /// The error is told once, as by the kernel.
    pub fn take_error(&self) -> u32 {
        match self.error.load(RELAXED) {
            UNHURT | 0 => 0,
            error => {
                self.error.store(0, RELAXED);
                error
            }
        }
    }

    /// What can be done with it on the NIC.
    #[inline]
    pub(crate) fn readiness(&self) -> Readiness {
        let memory = self.send_mask.load(RELAXED).wrapping_add(1);
        let used = self.queued.load(RELAXED).wrapping_sub(self.acked.load(RELAXED));
        Readiness {
            unread: self.received.load(RELAXED).wrapping_sub(self.read.load(RELAXED)),
            fin: self.fin.load(RELAXED),
            room: memory.saturating_sub(used),
            send_memory: memory,
            shut: self.shut.load(RELAXED),
            ended: self.ended(),
        }
    }

    /// SO_KEEPALIVE as the program set it, while the NIC has the connection.
    pub fn keepalive(&self) -> bool {
        self.load(block::FLAGS) & 4 != 0
    }

    pub(crate) fn set_flag(&self, flag: u32, on: bool) {
        let flags = self.load(block::FLAGS);
        self.store(block::FLAGS, if on { flags | flag } else { flags & !flag });
    }
}
