//! A program's view of one connection: while it is on the NIC, receive memory, send memory and four sequence numbers.
//! Any thread may use it.

use baton_abi::Cid;
use baton_abi::layout::{Owner, block, session};
use baton_linux::events;
use baton_ring::{Token, give_way};
use baton_shm::{MovableCircle, MovableParts, Region};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

const RELAXED: Ordering = Ordering::Relaxed;
const ALIVE: u32 = u32::MAX;
/// Bytes that a program may read before a command reports them to the NIC: an eighth of the largest window without
/// scaling, less if the window is kept smaller ([`block::REPORT_SHIFT`]). The NIC's window updates assume this value.
const REPORT_EVERY: u32 = 1 << 13;
/// Input or output error: the agent has described memory that is not in the session.
const EIO: u32 = 5;

/// Bit of `state`: threads that wait for room wait until the connection is writable, so acknowledgements that free less
/// need not wake them.
const PATIENT: u8 = 1;
/// Bit of `state`: a thread is changing the connection's fields ([`Connection::change`]).
const CHANGING: u8 = 2;

/// The value of `moves` for a connection that its program has closed. No block's counter has this value, so the
/// connection always counts as moved.
const LEAVING: u32 = u32::MAX;

/// Bit of [`Connection::unused`]: nothing can be sent any more. As large as the largest send memory, so that a fast
/// path which subtracts it finds no room.
const STOPPED: u32 = 1 << 30;

/// Connection reset by peer.
const ECONNRESET: u32 = 104;

/// A connection of a session.
#[derive(Debug)]
pub struct Connection {
    /// Its number in the session.
    number: AtomicU32,
    /// Its block, its receive memory and its send memory.
    memory: MovableParts<{ session::BLOCK_BYTES / 4 }, 2>,
    /// The block's move counter when the other fields were read from it; [`LEAVING`] once its program has closed it.
    pub(crate) moves: AtomicU32,
    pub(crate) cid: AtomicU32,
    /// First unread sequence number, and the one after the last received byte.
    pub(crate) read: AtomicU32,
    pub(crate) received: AtomicU32,
    /// The sequence number up to which reads were reported to the NIC, and the one from which on the next
    /// report is due.
    pub(crate) reported_read: AtomicU32,
    pub(crate) report_at: AtomicU32,
    /// The sequence number after the last queued byte, and the one up to which there is room: the acknowledged one plus
    /// the size of send memory.
    pub(crate) queued: AtomicU32,
    pub(crate) room_ends: AtomicU32,
    /// Bytes of send memory that may not be filled, since SO_SNDBUF is less, and [`STOPPED`].
    unused: AtomicU32,
    pub(crate) fin: AtomicBool,
    pub(crate) shut: AtomicBool,
    /// Index in the command ring behind the last command that the NIC has to acknowledge before the next send.
    pub(crate) given: AtomicU64,
    /// The sequence number up to which bytes were announced to the NIC ([`baton_abi::FETCH`]), and whether any were
    /// since the last move.
    pub(crate) announced: AtomicU32,
    pub(crate) announces: AtomicBool,
    /// The error number with which the connection ended on the NIC; 0 for none, [`ALIVE`] if it has not ended.
    error: AtomicU32,
    /// The lower 16 bits of `queued` when bytes last arrived: bytes queued since then are taken for the answer.
    asked_at: AtomicU16,
    /// [`PATIENT`] and [`CHANGING`].
    state: AtomicU8,
    /// log2 of the bytes that the program may read before it reports them to the NIC. 0 if the connection's memory
    /// cannot be mapped in the program's address space: then every read is to be reported, so the fast path serves
    /// none.
    report_shift: AtomicU8,
}

// With its `Arc`'s counters and the allocator's 8 bytes a connection takes 128 bytes.
const _: () = assert!(size_of::<Connection>() <= 104);

/// What can be done with a connection on the NIC now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness {
    /// Unread bytes.
    pub unread: u32,
    /// Size of receive memory in bytes.
    pub receive_memory: u32,
    /// The peer's FIN has been received, and all data before it.
    pub fin: bool,
    /// Bytes that can still be queued.
    pub room: u32,
    /// Most bytes that may be queued: the size of send memory, or less by SO_SNDBUF.
    pub most_queued: u32,
    /// Bytes that were queued and that the peer has not acknowledged.
    pub queued: u32,
    /// The sending side is shut down.
    pub shut: bool,
    /// It has ended, with this error number or 0.
    pub ended: Option<u32>,
}

impl Readiness {
    /// Whether a third of what may be queued is free, as Linux requires (sk_stream_is_writeable).
    pub fn is_writable(&self) -> bool {
        self.room >= writable_room(self.most_queued)
    }
}

/// Least free bytes with which a connection is writable that may queue `most_queued` bytes.
fn writable_room(most_queued: u32) -> u32 {
    (most_queued / 3).max(1)
}

/// A thread's operation on a connection: until this is dropped the connection's owner does not change.
#[derive(Debug)]
pub struct Entered<'a> {
    block: Inside<'a>,
    /// The connection's owner.
    pub owner: Owner,
}

/// A connection's block, checked once to be inside the memory. A thread leaves the same block that it has entered, even
/// if the object represents another connection by then, which another thread may be inside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inside<'a>(&'a [AtomicU32; session::BLOCK_BYTES / 4]);

impl<'a> Inside<'a> {
    #[inline(always)]
    fn word(self, field: usize) -> &'a AtomicU32 {
        &self.0[field / 4]
    }

    /// Leaves the operation; a full barrier and [`Inside::wake_mover`] must follow.
    #[inline(always)]
    pub(crate) fn step_out(self) {
        self.word(block::BUSY).store(0, Ordering::Release);
    }

    /// Leaves the operation, and wakes an agent that waits for that.
    #[inline(always)]
    pub(crate) fn leave(self) {
        self.step_out();
        fence(Ordering::SeqCst);
        self.wake_mover();
    }

    /// As [`Inside::leave`], where a fast path does not serve a call.
    #[cold]
    #[inline(never)]
    pub(crate) fn leave_unserved(self) {
        self.leave();
    }

    /// Wakes an agent that waits for the program to leave.
    #[inline(always)]
    pub(crate) fn wake_mover(self) {
        if self.word(block::OWNER).load(Ordering::Acquire) == Owner::Moving as u32 {
            events::wake_all(self.word(block::BUSY));
        }
    }
}

/// Waits until the thread that is inside this block has left, and enters it by the busy word. False if that thread is
/// the calling one.
#[cold]
fn wait_for_turn(busy: &AtomicU32, token: Token) -> bool {
    let mut round = 0u32;
    loop {
        match busy.compare_exchange(0, token, Ordering::SeqCst, RELAXED) {
            Ok(_) => return true,
            Err(holder) if holder == token => return false,
            Err(_) => {
                give_way(round);
                round = round.saturating_add(1);
            }
        }
    }
}

/// The right to change a connection's fields.
struct Changing<'a>(&'a Connection);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!CHANGING, Ordering::Release);
    }
}

impl Drop for Entered<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.block.leave();
    }
}

impl Connection {
    /// A connection without a number yet: see [`crate::Shared::register`]. With `patient`, threads that wait for room
    /// to send wait until [`Readiness::is_writable`].
    pub(crate) fn unregistered(memory: Arc<Region>, patient: bool) -> Connection {
        let zero = AtomicU32::default;
        Connection {
            number: zero(),
            memory: MovableParts::new(memory, session::block(0)),
            moves: zero(),
            cid: zero(),
            read: zero(),
            reported_read: zero(),
            report_at: zero(),
            received: zero(),
            queued: zero(),
            room_ends: zero(),
            unused: zero(),
            fin: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            given: AtomicU64::new(0),
            announced: zero(),
            announces: AtomicBool::new(false),
            error: AtomicU32::new(ALIVE),
            asked_at: AtomicU16::new(0),
            state: AtomicU8::new(if patient { PATIENT } else { 0 }),
            report_shift: AtomicU8::new(REPORT_EVERY.ilog2() as u8),
        }
    }

    /// Makes this represent another connection from now on. No thread may be inside the previous one. A late thread may
    /// still hold a reference for the previous connection and be reading the block: this waits until it has finished
    /// ([`Connection::change`]).
    pub(crate) fn set_number(&self, number: u32) {
        let _alone = self.change();
        self.number.store(number, RELAXED);
        self.memory.move_words(session::block(number));
        self.cid.store(0, RELAXED);
        self.fin.store(false, RELAXED);
        self.shut.store(false, RELAXED);
        self.error.store(ALIVE, RELAXED);
        self.unused.store(0, RELAXED);
        // The agent's counter starts at 0. If the connection has moved since, the difference shows it.
        self.moves.store(0, Ordering::Release);
    }

    /// Stops reading and using the block, until this object represents another connection. The block may soon be that
    /// of the next connection with this number, already on the NIC: its events must not be counted here, where they
    /// would be lost, nor this connection's numbers be used with it. Called before the agent can give the number away;
    /// the result is for [`Connection::stay`].
    pub(crate) fn begin_leaving(&self) -> u32 {
        let _alone = self.change();
        self.moves.swap(LEAVING, Ordering::AcqRel)
    }

    /// Undoes [`Connection::begin_leaving`], which returned `moves`: the agent has refused to forget the connection.
    pub(crate) fn stay(&self, moves: u32) {
        self.moves.store(moves, Ordering::Release);
    }

    /// Whether its program has closed it ([`Connection::begin_leaving`]).
    pub(crate) fn is_leaving(&self) -> bool {
        self.moves.load(Ordering::Acquire) == LEAVING
    }

    /// Waits until no other thread changes the fields. Without this a late thread could read the block while another
    /// thread makes this object represent the next connection, and a mixture of both would count as up to date.
    fn change(&self) -> Changing<'_> {
        let mut round = 0;
        while self.state.fetch_or(CHANGING, Ordering::Acquire) & CHANGING != 0 {
            give_way(round);
            round += 1;
        }
        Changing(self)
    }

    /// Its number in the session.
    pub fn number(&self) -> u32 {
        self.number.load(RELAXED)
    }

    #[inline(always)]
    pub(crate) fn receive_memory(&self) -> MovableCircle<'_> {
        self.memory.circle(0)
    }

    #[inline(always)]
    pub(crate) fn send_memory(&self) -> MovableCircle<'_> {
        self.memory.circle(1)
    }

    /// Prefetches the `length` bytes that have arrived, and the send memory for the answer, which is expected to be as
    /// long as the last one: the NIC's processor has used both last.
    #[inline(always)]
    pub(crate) fn prefetch_memory(&self, length: u32) {
        let queued = self.queued.load(RELAXED);
        let answer = (queued as u16).wrapping_sub(self.asked_at.load(RELAXED));
        self.asked_at.store(queued as u16, RELAXED);
        self.receive_memory().prefetch(self.received.load(RELAXED), length);
        self.send_memory().prefetch_to_write(queued, answer.into());
    }

    #[inline(always)]
    fn word(&self, field: usize) -> &AtomicU32 {
        &self.memory.words()[field / 4]
    }

    #[inline(always)]
    pub(crate) fn load(&self, field: usize) -> u32 {
        self.word(field).load(Ordering::Acquire)
    }

    #[inline(always)]
    pub(crate) fn store(&self, field: usize, value: u32) {
        self.word(field).store(value, Ordering::Release);
    }

    /// Its present owner.
    pub fn owner(&self) -> Owner {
        Owner::from_number(self.load(block::OWNER))
    }

    /// Number of moves that it has made, counted by the agent.
    #[inline(always)]
    pub fn moves(&self) -> u32 {
        self.load(block::MOVES)
    }

    /// Enters an operation, after other threads' operations. None while the connection is being moved, or if this
    /// thread is inside already (it runs a signal handler).
    #[inline(always)]
    pub(crate) fn enter(&self, token: Token) -> Option<Entered<'_>> {
        let block = self.inside();
        let busy = block.word(block::BUSY);
        // The exchange is a full barrier, so the owner is read after it.
        if busy.compare_exchange(0, token, Ordering::SeqCst, RELAXED).is_err() && !wait_for_turn(busy, token) {
            return None;
        }
        match Owner::from_number(block.word(block::OWNER).load(Ordering::Acquire)) {
            Owner::Moving => {
                block.leave();
                None
            }
            // `Nobody`: the agent has forgotten the connection, which is in the kernel.
            owner => Some(Entered { block, owner }),
        }
    }

    /// Enters an operation if the NIC has the connection, no thread is inside, and no move has happened since
    /// [`Connection::refresh`]. [`Inside::step_out`] must follow then.
    #[inline(always)]
    pub(crate) fn step_in(&self, token: Token) -> Option<Inside<'_>> {
        // The exchange is a full barrier, so the owner is read after it.
        let block = self.inside();
        if block.word(block::BUSY).compare_exchange(0, token, Ordering::SeqCst, RELAXED).is_err() {
            return None;
        }
        let settled = block.word(block::OWNER).load(Ordering::Acquire) == Owner::Nic as u32
            && block.word(block::MOVES).load(Ordering::Acquire) == self.moves.load(Ordering::Acquire);
        if !settled {
            block.leave_unserved();
            return None;
        }
        Some(block)
    }

    /// Whether any thread is inside an operation on it.
    pub fn is_entered(&self) -> bool {
        self.word(block::BUSY).load(RELAXED) != 0
    }

    /// Whether this thread is inside an operation on it.
    pub fn is_inside(&self, token: Token) -> bool {
        self.word(block::BUSY).load(RELAXED) == token
    }

    /// Waits until no move is under way, or until `limit` has passed. The end of a move ends the wait at once.
    pub fn wait_until_settled(&self, limit: Duration) {
        events::wait_while(self.word(block::OWNER), Owner::Moving as u32, limit);
    }

    #[inline(always)]
    pub(crate) fn cid(&self) -> Cid {
        Cid(self.cid.load(RELAXED))
    }

    /// Reads the block again after a move, unless the program has closed the connection. Returns whether it was read.
    /// The caller holds the lock of the session's events.
    pub(crate) fn refresh(&self) -> bool {
        let _alone = self.change();
        if self.is_leaving() {
            return false;
        }
        let moves = self.moves();
        let error = self.load(block::ERROR);
        // The counter has changed because the connection has ended on the NIC, not because it has moved. So the counts
        // from the NIC's events stay valid, and the last event says how it ended.
        if error == block::ended_on_nic(moves) && self.moves.load(RELAXED).wrapping_add(1) == moves {
            if self.ended().is_some() {
                self.moves.store(moves, Ordering::Release);
            }
            return false;
        }
        let flags = self.load(block::FLAGS);
        let copy = |to: &AtomicU32, field| to.store(self.load(field), RELAXED);
        copy(&self.cid, block::CID);
        let size = self.load(block::RECEIVE_SIZE);
        let receives = self.receive_memory().move_to(self.load(block::RECEIVE_BASE), size);
        let send_size = self.load(block::SEND_SIZE);
        let sends = send_size <= STOPPED && self.send_memory().move_to(self.load(block::SEND_BASE), send_size);
        let is_inside = |base, size| {
            let (base, size) = (self.load(base) as usize, self.load(size));
            size.is_power_of_two() && base + size as usize <= self.memory.region().len()
        };
        let lacks = size > 0 && !(receives && sends);
        let unmapped =
            lacks && is_inside(block::RECEIVE_BASE, block::RECEIVE_SIZE) && is_inside(block::SEND_BASE, block::SEND_SIZE);
        // A connection that was never on the NIC has no memory. During a move the agent may have written only some of
        // these words: then it is no error, and the block is read again later.
        if lacks && !unmapped && self.owner() != Owner::Moving && self.moves() == moves {
            self.set_ended(EIO);
        }
        copy(&self.read, block::READ_SEQ);
        let usual = (self.receive_memory().length() / 8).clamp(2, REPORT_EVERY).ilog2();
        let set = flags >> block::REPORT_SHIFT & block::REPORT_MASK;
        let shift = if set == 0 { usual } else { set.min(usual) };
        self.report_shift.store(if unmapped { 0 } else { shift as u8 }, RELAXED);
        self.note_reported(self.load(block::READ_SEQ));
        // RECEIVE_SEQ is written at the handoff only, READ_SEQ whenever the program reads. So RECEIVE_SEQ may be the
        // smaller one when the connection is back in the kernel: then no bytes are unread on the NIC.
        let (read, received) = (self.load(block::READ_SEQ), self.load(block::RECEIVE_SEQ));
        let is_behind = (received.wrapping_sub(read) as i32) < 0;
        self.received.store(if is_behind { read } else { received }, RELAXED);
        copy(&self.queued, block::QUEUED_SEQ);
        self.room_ends.store(self.load(block::ACKED_SEQ).wrapping_add(self.send_memory().length()), RELAXED);
        self.apply_most_queued(block::most_queued(flags));
        self.fin.store(flags & (block::FLAG_FIN_RECEIVED | block::FLAG_RECEIVING_SHUT) != 0, RELAXED);
        if error != 0 && error & block::ENDED_ON_NIC == 0 {
            self.set_ended(error);
        }
        self.set_shut(flags & 2 != 0);
        self.announces.store(false, RELAXED);
        // It was an index in the ring of the NIC that has or had the connection, which another NIC's may reach late.
        self.given.store(0, RELAXED);
        self.moves.store(moves, Ordering::Release);
        true
    }

    /// Limits the bytes that may be queued from now on, as SO_SNDBUF does on an open connection. The NIC sees the
    /// limit, too, and asks for more memory when the program has filled what there is. The caller has entered.
    pub fn limit_queue(&self, most: u32) {
        let bits = block::queue_bits(most);
        let set = |flags: u32| Some(flags & !(block::QUEUE_MASK << block::QUEUE_SHIFT) | bits);
        let _ = self.word(block::FLAGS).fetch_update(Ordering::AcqRel, Ordering::Acquire, set);
        self.apply_most_queued(block::most_queued(bits));
    }

    fn apply_most_queued(&self, most: u32) {
        let length = self.send_memory().length();
        let most = length.min(most);
        let _ = self.unused.fetch_update(RELAXED, RELAXED, |unused| Some(unused & STOPPED | (length - most)));
        self.store(
            block::QUIET_ABOVE,
            if self.state.load(RELAXED) & PATIENT != 0 { most.saturating_sub(writable_room(most)) } else { 0 },
        );
    }

    /// Whether it has moved since [`Connection::refresh`].
    #[inline(always)]
    pub(crate) fn has_moved(&self) -> bool {
        self.moves() != self.moves.load(Ordering::Acquire)
    }

    /// The error number that it ended with on the NIC, 0 for none; None if it has not ended.
    #[inline(always)]
    pub fn ended(&self) -> Option<u32> {
        match self.error.load(RELAXED) {
            ALIVE => None,
            error => Some(error),
        }
    }

    /// Whether no more bytes will arrive than are known already.
    pub(crate) fn is_over(&self) -> bool {
        self.fin.load(Ordering::Acquire) || self.error.load(Ordering::Acquire) != ALIVE
    }

    pub(crate) fn set_ended(&self, error: u32) {
        self.error.store(error, Ordering::Release);
        self.stop(true);
    }

    /// Handles the death of agent and NIC: a connection that was not in the kernel has failed. The bytes that it had
    /// received can still be read, unless it was being moved.
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
        self.stop(shut || self.ended().is_some() || self.is_unmapped());
    }

    /// Whether its memory cannot be mapped in the program's address space, so that the program can only have the
    /// connection restored.
    pub fn is_unmapped(&self) -> bool {
        self.report_shift.load(RELAXED) == 0
    }

    /// Returns the error and clears it, as SO_ERROR does.
    pub fn take_error(&self) -> u32 {
        match self.error.load(RELAXED) {
            ALIVE | 0 => 0,
            error => {
                self.error.store(0, RELAXED);
                error
            }
        }
    }

    /// What can be done with it on the NIC.
    #[inline]
    pub(crate) fn readiness(&self) -> Readiness {
        // `read` first: bytes that another thread reads meanwhile may then count as unread, but unread bytes never as
        // read.
        let read = self.read.load(Ordering::Acquire);
        let length = self.send_memory().length();
        let acknowledged = self.room_ends.load(RELAXED).wrapping_sub(length);
        Readiness {
            unread: self.received.load(RELAXED).wrapping_sub(read),
            receive_memory: self.receive_memory().length(),
            fin: self.fin.load(RELAXED),
            room: self.room(),
            most_queued: length.saturating_sub(self.unused.load(RELAXED) & !STOPPED),
            queued: self.queued.load(RELAXED).wrapping_sub(acknowledged),
            shut: self.shut.load(RELAXED),
            ended: self.ended(),
        }
    }

    /// First unread sequence number.
    pub(crate) fn read_seq(&self) -> u32 {
        self.read.load(RELAXED)
    }

    /// Records that the program has read up to `read`.
    #[inline(always)]
    pub(crate) fn note_read(&self, block: Inside<'_>, read: u32) {
        self.read.store(read, RELAXED);
        block.word(block::READ_SEQ).store(read, Ordering::Release);
    }

    /// Records that reads up to `read` were reported to the NIC.
    pub(crate) fn note_reported(&self, read: u32) {
        self.reported_read.store(read, RELAXED);
        self.report_at.store(read.wrapping_add(1 << self.report_shift.load(RELAXED)), RELAXED);
    }

    /// Records that the program has queued up to `queued`.
    #[inline(always)]
    pub(crate) fn note_queued(&self, block: Inside<'_>, queued: u32) {
        self.queued.store(queued, RELAXED);
        block.word(block::QUEUED_SEQ).store(queued, Ordering::Release);
    }

    /// The block, for a caller that has entered.
    #[inline(always)]
    pub(crate) fn inside(&self) -> Inside<'_> {
        Inside(self.memory.words())
    }

    /// Bytes that can be queued. (More bytes may be queued than are allowed, if the kernel's queue was larger at the
    /// handoff, or if SO_SNDBUF was made smaller.)
    #[inline(always)]
    pub(crate) fn room(&self) -> u32 {
        self.signed_room().max(0) as u32
    }

    /// As [`Connection::room`]; below 0 where more is queued than fits.
    #[inline(always)]
    fn signed_room(&self) -> i32 {
        self.room_without(self.unused.load(RELAXED) & !STOPPED)
    }

    /// As [`Connection::signed_room`]; not above 0 where nothing can be sent any more.
    #[inline(always)]
    pub(crate) fn room_unless_stopped(&self) -> i32 {
        self.room_without(self.unused.load(RELAXED))
    }

    #[inline(always)]
    fn room_without(&self, unused: u32) -> i32 {
        self.room_ends.load(RELAXED).wrapping_sub(unused).wrapping_sub(self.queued.load(RELAXED)) as i32
    }

    /// Whether nothing can be sent any more: the sending side is shut, or the connection has ended.
    pub(crate) fn is_stopped(&self) -> bool {
        self.unused.load(RELAXED) & STOPPED != 0
    }

    fn stop(&self, stopped: bool) {
        if stopped {
            self.unused.fetch_or(STOPPED, RELAXED);
        } else {
            self.unused.fetch_and(!STOPPED, RELAXED);
        }
    }

    /// Whether the NIC is opening it.
    pub fn is_opening(&self) -> bool {
        self.load(block::FLAGS) & block::FLAG_OPENING != 0
    }

    /// Whether the NIC could not open the connection: it has ended, and never had memory.
    pub fn was_not_opened(&self) -> bool {
        self.ended().is_some() && self.load(block::RECEIVE_SIZE) == 0
    }

    /// SO_KEEPALIVE as the program set it, while the NIC has the connection.
    pub fn keepalive(&self) -> bool {
        self.load(block::FLAGS) & block::FLAG_KEEPALIVE != 0
    }

    /// TCP_CORK as the program set it, while the NIC has the connection.
    pub fn cork(&self) -> bool {
        self.load(block::FLAGS) & block::FLAG_CORK != 0
    }

    /// Whether the peer has acknowledged all bytes before `queued`, as far as is known.
    #[inline(always)]
    pub(crate) fn is_quiet(&self, queued: u32) -> bool {
        self.room_ends.load(RELAXED) == queued.wrapping_add(self.send_memory().length())
    }

    /// TCP_NODELAY as the program set it, while the NIC has the connection.
    pub(crate) fn nodelay(&self) -> bool {
        self.load(block::FLAGS) & block::FLAG_NODELAY != 0
    }

    /// The processor that processes its frames, while the NIC has it; None until the NIC has reported it.
    pub fn processor(&self) -> Option<u32> {
        self.load(block::PROCESSOR).checked_sub(1)
    }

    /// Counts bytes that the program has sent or received in the kernel: when the NIC is full, the agent chooses by
    /// these counts which connections get a place. If several threads count at the same time, or the connection moves
    /// meanwhile, some bytes may not be counted.
    pub fn count_in_kernel(&self, bytes: u32) {
        self.store(block::TRAFFIC, self.load(block::TRAFFIC).wrapping_add(bytes));
    }

    /// Records that the program has shut down receiving. The stream ends after the bytes that are unread now, and the
    /// kernel's socket is shut down when the connection is restored. The caller has entered; the NIC has it.
    pub fn shut_receiving(&self) {
        self.set_flag(block::FLAG_RECEIVING_SHUT, true);
        self.fin.store(true, Ordering::Release);
    }

    /// Records whether the program has closed the connection. The agent may die before it reads the request to forget
    /// it; the next agent reads this flag.
    pub(crate) fn note_closed(&self, closed: bool) {
        self.set_flag(block::FLAG_CLOSED, closed);
    }

    pub(crate) fn set_flag(&self, flag: u32, on: bool) {
        // Atomically, since the agent may change other flags at the same time.
        let flags = self.word(block::FLAGS);
        if on {
            flags.fetch_or(flag, Ordering::AcqRel)
        } else {
            flags.fetch_and(!flag, Ordering::AcqRel)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When a late thread leaves a connection, the object represents the next one, and another thread is inside that.
    /// The late thread leaves the block that it has entered.
    #[test]
    fn a_late_thread_leaves_what_it_has_entered() {
        let memory = Arc::new(Region::private(session::HEAP).expect("memory"));
        let busy = |number| memory.word32(session::block(number) + block::BUSY).load(RELAXED);
        let connection = Connection::unregistered(memory.clone(), false);
        connection.set_number(3);
        let late = connection.enter(7).expect("nobody is inside");
        connection.set_number(4);
        let inside = connection.enter(8).expect("nobody is inside");
        drop(late);
        assert_eq!((busy(3), busy(4)), (0, 8));
        drop(inside);
        assert_eq!((busy(3), busy(4)), (0, 0));
    }

    /// A connection's block is read while the agent writes the words that say where its memory is: words that do not
    /// fit together then do not fail the connection.
    #[test]
    fn what_is_half_written_ends_no_connection() {
        let memory = Arc::new(Region::private(session::HEAP).expect("memory"));
        let set = |field, value| memory.word32(session::block(3) + field).store(value, RELAXED);
        let connection = Connection::unregistered(memory.clone(), false);
        connection.set_number(3);
        let beyond = session::HEAP as u32;
        for (field, value) in [(block::RECEIVE_BASE, beyond), (block::RECEIVE_SIZE, 1 << 16), (block::MOVES, 1)] {
            set(field, value);
        }
        set(block::OWNER, Owner::Moving as u32);
        connection.refresh();
        assert_eq!(connection.ended(), None);
        set(block::OWNER, Owner::Nic as u32);
        connection.refresh();
        assert_eq!(connection.ended(), Some(EIO), "the agent has written all, and there is no such memory");
    }
}
