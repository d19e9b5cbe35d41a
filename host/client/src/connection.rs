//! One connection, as its program sees it: while the NIC has it, two pieces of memory and four numbers. Any thread may use it.

use baton_abi::Cid;
use baton_abi::layout::{Owner, block, session};
use baton_kernel::events;
use baton_ring::{MovableCircle, MovableWords, Region, Token};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const RELAXED: Ordering = Ordering::Relaxed;
const UNHURT: u32 = u32::MAX;
/// Bytes that a program may have read before the NIC hears of it: an eighth of the largest window without scaling, which the NIC's
/// window updates reckon with.
const LATE: u32 = 1 << 13;
/// Input or output error: what the agent says of memory makes no sense.
const EIO: u32 = 5;

/// Connection reset by peer.
const ECONNRESET: u32 = 104;

/// A connection of a session.
#[derive(Debug)]
pub struct Connection {
    /// Its number in the session.
    number: AtomicU32,
    block: MovableWords<{ session::BLOCK_BYTES / 4 }>,
    /// The block's move counter when the rest was read.
    pub(crate) moves: AtomicU32,
    pub(crate) cid: AtomicU32,
    pub(crate) receive_memory: MovableCircle,
    pub(crate) send_memory: MovableCircle,
    /// First unread, and behind the last received byte.
    pub(crate) read: AtomicU32,
    pub(crate) received: AtomicU32,
    /// How far the NIC knows that the program has read, and where it has to hear of it again.
    pub(crate) told_read: AtomicU32,
    pub(crate) tell_at: AtomicU32,
    /// Behind the last queued byte, and behind the last one that there is room for: a send memory behind what is acknowledged.
    pub(crate) queued: AtomicU32,
    pub(crate) room_ends: AtomicU32,
    /// Answers to posted buffers that nobody has looked at: the first sequence number that the NIC puts into each.
    pub(crate) posted: Mutex<VecDeque<u32>>,
    pub(crate) fin: AtomicBool,
    pub(crate) shut: AtomicBool,
    /// It is shut, or it has ended: nothing can be sent.
    pub(crate) stopped: AtomicBool,
    /// The error number that it ended with on the NIC; 0 for none, [`UNHURT`] if it has not ended.
    error: AtomicU32,
}

/// What can be done with a connection on the NIC just now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness {
    /// Bytes unread.
    pub unread: u32,
    /// Bytes that the receive memory has.
    pub receive_memory: u32,
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

/// A connection's block, of which the place is looked up once.
#[derive(Clone, Copy)]
pub(crate) struct Inside<'a>(&'a [AtomicU32; session::BLOCK_BYTES / 4]);

impl<'a> Inside<'a> {
    #[inline(always)]
    fn word(self, field: usize) -> &'a AtomicU32 {
        &self.0[field / 4]
    }

    /// Leaves; a full barrier and [`Inside::tell_mover`] must follow.
    #[inline(always)]
    pub(crate) fn step_out(self) {
        self.word(block::BUSY).store(0, Ordering::Release);
    }

    /// Tells an agent that waits for somebody to leave.
    #[inline(always)]
    pub(crate) fn tell_mover(self) {
        if self.word(block::OWNER).load(Ordering::Acquire) == Owner::Moving as u32 {
            events::wake_all(self.word(block::BUSY));
        }
    }
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
            block: MovableWords::new(memory.clone(), session::block(0)),
            moves: zero(),
            cid: zero(),
            receive_memory: MovableCircle::new(memory.clone()),
            send_memory: MovableCircle::new(memory),
            read: zero(),
            told_read: zero(),
            tell_at: zero(),
            received: zero(),
            queued: zero(),
            room_ends: zero(),
            posted: Mutex::default(),
            fin: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
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
        self.stopped.store(false, RELAXED);
        self.error.store(UNHURT, RELAXED);
        // As it was when the agent began to count. It may have moved since, and that has to be seen.
        self.moves.store(0, Ordering::Release);
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
            Owner::Moving => {
                self.leave();
                None
            }
            // A connection that the agent has let go is the kernel's.
            owner => Some(Entered { connection: self, owner }),
        }
    }

    /// Enters an operation, if the NIC has the connection, nobody else is inside, and no move has happened since
    /// [`Connection::refresh`]. [`Inside::step_out`] must follow then.
    #[inline(always)]
    pub(crate) fn step_in(&self, token: Token) -> Option<Inside<'_>> {
        // The exchange is a full barrier: the owner is read after it.
        let block = Inside(&self.block);
        if block.word(block::BUSY).compare_exchange(0, token, Ordering::SeqCst, RELAXED).is_err() {
            return None;
        }
        let settled = block.word(block::OWNER).load(Ordering::Acquire) == Owner::Nic as u32
            && block.word(block::MOVES).load(Ordering::Acquire) == self.moves.load(Ordering::Acquire);
        if !settled {
            self.leave();
            return None;
        }
        Some(block)
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
        let block = Inside(&self.block);
        block.step_out();
        fence(Ordering::SeqCst);
        block.tell_mover();
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
        let size = self.load(block::RECEIVE_SIZE);
        let receives = self.receive_memory.move_to(self.load(block::RECEIVE_BASE), size);
        let sends = self.send_memory.move_to(self.load(block::SEND_BASE), self.load(block::SEND_SIZE));
        // One that was never on the NIC has no memory.
        if size > 0 && !(receives && sends) {
            self.set_ended(EIO);
        }
        copy(&self.read, block::READ_SEQ);
        self.note_told(self.load(block::READ_SEQ));
        copy(&self.received, block::RECEIVE_SEQ);
        copy(&self.queued, block::QUEUED_SEQ);
        self.room_ends.store(self.load(block::ACKED_SEQ).wrapping_add(self.send_memory.length()), RELAXED);
        self.posted.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.fin.store(flags & 1 != 0, RELAXED);
        self.set_shut(flags & 2 != 0);
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

    /// Whether no more bytes will come than are known of.
    pub(crate) fn is_over(&self) -> bool {
        self.fin.load(Ordering::Acquire) || self.error.load(Ordering::Acquire) != UNHURT
    }

    pub(crate) fn set_ended(&self, error: u32) {
        self.error.store(error, Ordering::Release);
        self.stopped.store(true, RELAXED);
    }

    /// Agent and NIC are gone for good: if it was not in the kernel it has failed now. What it had received can be read, unless it was
    /// being moved.
    pub(crate) fn fail(&self) {
        match self.owner() {
            Owner::Kernel | Owner::Nobody => return,
            Owner::Nic => {}
            Owner::Moving => {
                self.moves.store(self.moves(), Ordering::Release);
                self.received.store(self.read.load(RELAXED), RELAXED);
                self.store(block::OWNER, Owner::Nic as u32);
                events::wake_all(self.word(block::OWNER));
            }
        }
        if self.ended().is_none() {
            self.set_ended(ECONNRESET);
        }
    }

    pub(crate) fn set_shut(&self, shut: bool) {
        self.shut.store(shut, RELAXED);
        self.stopped.store(shut || self.ended().is_some(), RELAXED);
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
        // In this order: what another thread reads meanwhile may count as unread, never the other way round.
        let read = self.read.load(Ordering::Acquire);
        Readiness {
            unread: self.received.load(RELAXED).wrapping_sub(read),
            receive_memory: self.receive_memory.length(),
            fin: self.fin.load(RELAXED),
            room: self.room(),
            send_memory: self.send_memory.length(),
            shut: self.shut.load(RELAXED),
            ended: self.ended(),
        }
    }

    /// First unread sequence number.
    pub(crate) fn read_seq(&self) -> u32 {
        self.read.load(RELAXED)
    }

    /// The program has read up to here.
    #[inline(always)]
    pub(crate) fn note_read(&self, block: Inside<'_>, read: u32) {
        self.read.store(read, RELAXED);
        block.word(block::READ_SEQ).store(read, Ordering::Release);
    }

    /// The NIC has been told that the program has read up to here.
    pub(crate) fn note_told(&self, read: u32) {
        self.told_read.store(read, RELAXED);
        self.tell_at.store(read.wrapping_add((self.receive_memory.length() / 8).min(LATE)), RELAXED);
    }

    /// The program has queued up to here.
    #[inline(always)]
    pub(crate) fn note_queued(&self, block: Inside<'_>, queued: u32) {
        self.queued.store(queued, RELAXED);
        block.word(block::QUEUED_SEQ).store(queued, Ordering::Release);
    }

    /// The block, for whoever has entered.
    #[inline(always)]
    pub(crate) fn inside(&self) -> Inside<'_> {
        Inside(&self.block)
    }

    /// Bytes that can be queued. What is restored from the kernel may be more than the memory holds.
    #[inline(always)]
    pub(crate) fn room(&self) -> u32 {
        let room = self.room_ends.load(RELAXED).wrapping_sub(self.queued.load(RELAXED));
        if room as i32 > 0 { room } else { 0 }
    }

    /// SO_KEEPALIVE as the program set it, while the NIC has the connection.
    pub fn keepalive(&self) -> bool {
        self.load(block::FLAGS) & block::FLAG_KEEPALIVE != 0
    }

    /// The processor that its frames are processed on, while the NIC has it; None if the NIC has not said so yet.
    pub fn processor(&self) -> Option<u32> {
        self.load(block::PROCESSOR).checked_sub(1)
    }

    pub(crate) fn set_flag(&self, flag: u32, on: bool) {
        let flags = self.load(block::FLAGS);
        self.store(block::FLAGS, if on { flags | flag } else { flags & !flag });
    }
}
