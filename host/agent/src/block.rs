//! The agent's view of a connection's block in session memory, which the program has, too.

use baton_abi::layout::{Owner, block as layout, session};
use baton_linux::events;
use baton_shm::Region;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Times that a program's busy word is read in a row: most operations end within a microsecond.
const GLANCES: u32 = 200;

/// The agent's view of a connection's block in session memory.
#[derive(Clone)]
pub(crate) struct Block {
    memory: Arc<Region>,
    /// Number of the connection in its session.
    number: u32,
    /// Number of changes to the block, written there so that the program reads it again.
    moves: u32,
}

impl Block {
    /// Makes the view of a block, before [`Block::read_moves`].
    pub fn new(memory: Arc<Region>, connection: u32) -> Block {
        Block { memory, number: connection, moves: 0 }
    }

    /// Begins a connection's block: what an earlier one of this number has left means nothing any more. But for a
    /// thread that is late with that one, and has entered since nobody was found inside: it is waited for. Without its
    /// token it would leave in place of the thread that is inside then.
    pub fn begin(&self, owner: Owner) {
        for field in [layout::MOVES, layout::ERROR] {
            self.store(field, 0);
        }
        self.set_flags(0);
        self.take_shared_away();
        self.set_owner(owner);
    }

    /// Number of the connection in its session.
    pub fn number(&self) -> u32 {
        self.number
    }

    fn word(&self, field: usize) -> &AtomicU32 {
        self.memory.word32(session::block(self.number) + field)
    }

    pub fn load(&self, field: usize) -> u32 {
        self.word(field).load(Ordering::Acquire)
    }

    pub fn store(&self, field: usize, value: u32) {
        self.word(field).store(value, Ordering::Release);
    }

    /// Sets the flags, but for [`layout::FLAG_CLOSED`] and [`layout::FLAG_SHARED`], which its program may set at any
    /// moment.
    pub fn set_flags(&self, flags: u32) {
        const PROGRAMS: u32 = layout::FLAG_CLOSED | layout::FLAG_SHARED;
        let kept = |now: u32| Some(flags & !PROGRAMS | now & PROGRAMS);
        let _ = self.word(layout::FLAGS).fetch_update(Ordering::AcqRel, Ordering::Acquire, kept);
    }

    /// Whether its program has shut down receiving while the NIC had the connection.
    pub fn is_receiving_shut(&self) -> bool {
        self.load(layout::FLAGS) & layout::FLAG_RECEIVING_SHUT != 0
    }

    /// Notes that the kernel's socket is shut down by now, if its program has asked for that: it does not count for the
    /// next stay on the NIC. The program is kept out.
    pub fn note_receiving_shut(&self) {
        self.set_flags(self.load(layout::FLAGS) & !layout::FLAG_RECEIVING_SHUT);
    }

    /// Whether other processes may have the socket since the last search for them began: its program has forked.
    pub fn is_shared(&self) -> bool {
        self.load(layout::FLAGS) & layout::FLAG_SHARED != 0
    }

    /// Notes that a search begins for other processes that have the socket.
    pub fn take_shared_away(&self) {
        self.word(layout::FLAGS).fetch_and(!layout::FLAG_SHARED, Ordering::AcqRel);
    }

    /// Whether the connection's program has closed it.
    pub fn is_closed(&self) -> bool {
        self.load(layout::FLAGS) & layout::FLAG_CLOSED != 0
    }

    /// Notes whether the connection is closed.
    pub fn note_closed(&self, closed: bool) {
        if closed {
            self.word(layout::FLAGS).fetch_or(layout::FLAG_CLOSED, Ordering::AcqRel)
        } else {
            self.word(layout::FLAGS).fetch_and(!layout::FLAG_CLOSED, Ordering::AcqRel)
        };
    }

    /// The connection's word of [`session::WISHES`], and its bit there.
    fn wish_word(&self) -> (&AtomicU32, u32) {
        (self.memory.word32(session::WISHES + (self.number / 32 * 4) as usize), 1 << (self.number % 32))
    }

    /// Notes for the next agent whether the connection is wanted on the NIC. A program that changes this in its memory
    /// is served as if it had asked for it.
    pub fn note_wish(&self, wanted: bool) {
        let (word, bit) = self.wish_word();
        if wanted {
            word.fetch_or(bit, Ordering::AcqRel)
        } else {
            word.fetch_and(!bit, Ordering::AcqRel)
        };
    }

    /// Whether the connection is wanted on the NIC.
    pub fn wish(&self) -> bool {
        let (word, bit) = self.wish_word();
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Bytes a second that the connection has to carry to be on the NIC; 0 if it is wanted there whatever it carries.
    /// Its program may write any number here, as its rule might.
    pub fn hot_from(&self) -> u32 {
        self.memory.word32(session::hot_from(self.number)).load(Ordering::Acquire)
    }

    /// Notes that the connection is wanted on the NIC whatever it carries, if it is.
    pub fn need_not_be_hot(&self) {
        self.memory.word32(session::hot_from(self.number)).store(0, Ordering::Release);
    }

    /// Reads the number of changes, which somebody else may have written.
    pub fn read_moves(&mut self) {
        self.moves = self.load(layout::MOVES);
    }

    /// Counts a change, before it is made; [`Block::note_moves`] follows.
    pub fn count_move(&mut self) {
        self.moves = self.moves.wrapping_add(1);
    }

    /// Makes the program read the block again.
    pub fn note_moves(&self) {
        self.store(layout::MOVES, self.moves);
    }

    /// Notes that the connection has ended on the NIC, which has said how by events. A program that only sends reads
    /// none for as long as it has room, but notices a change.
    pub fn note_end(&mut self) {
        self.count_move();
        self.store(layout::ERROR, layout::ended_on_nic(self.moves));
        self.note_moves();
    }

    /// Sets the owner, and wakes the program's threads that wait for the end of a move.
    pub fn set_owner(&self, owner: Owner) {
        self.store(layout::OWNER, owner as u32);
        if owner != Owner::Moving {
            events::wake_all(self.word(layout::OWNER));
        }
    }

    /// Keeps the program out of the connection from now on. Returns false if the program is still inside an operation:
    /// [`Block::is_left`] is true once it has left.
    pub fn keep_out(&self) -> bool {
        self.set_owner(Owner::Moving);
        fence(Ordering::SeqCst);
        (0..GLANCES).any(|_| {
            let left = self.is_left();
            std::hint::spin_loop();
            left
        })
    }

    /// Whether the program, which is kept out, has left the operation that it was in.
    pub fn is_left(&self) -> bool {
        self.load(layout::BUSY) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program has shut down receiving, and its connection has ended on the NIC, or has left it: neither the next
    /// connection of this number nor the next stay is shut down for that.
    #[test]
    fn a_shutdown_is_of_one_stay() {
        let block = Block::new(Arc::new(Region::private(session::HEAP).expect("memory")), 3);
        let all = layout::FLAG_RECEIVING_SHUT | layout::FLAG_CORK | layout::FLAG_CLOSED;
        block.store(layout::FLAGS, all);
        assert!(block.is_receiving_shut());
        block.note_receiving_shut();
        assert_eq!(block.load(layout::FLAGS), layout::FLAG_CORK | layout::FLAG_CLOSED);
        block.store(layout::FLAGS, all);
        block.begin(Owner::Kernel);
        assert!(!block.is_receiving_shut() && block.is_closed(), "its program may say so at any moment");
    }

    /// A thread is late with a connection that another one has closed, and enters just when the next one gets the
    /// number.
    #[test]
    fn who_enters_late_is_waited_for() {
        let block = Block::new(Arc::new(Region::private(session::HEAP).expect("memory")), 3);
        block.store(layout::BUSY, 7);
        block.begin(Owner::Kernel);
        assert!(!block.keep_out() && !block.is_left());
        block.store(layout::BUSY, 0);
        assert!(block.is_left());
    }

    /// A program forks, whatever the agent writes meanwhile: that is known until other processes are searched for, or
    /// until another connection has the number.
    #[test]
    fn a_fork_is_known_until_a_search_begins() {
        let block = Block::new(Arc::new(Region::private(session::HEAP).expect("memory")), 3);
        block.begin(Owner::Kernel);
        block.store(layout::FLAGS, layout::FLAG_SHARED | layout::FLAG_CORK);
        block.set_flags(layout::FLAG_NODELAY);
        assert!(block.is_shared() && block.load(layout::FLAGS) & layout::FLAG_CORK == 0);
        block.take_shared_away();
        assert_eq!(block.load(layout::FLAGS), layout::FLAG_NODELAY);
        block.store(layout::FLAGS, layout::FLAG_SHARED);
        block.begin(Owner::Kernel);
        assert!(!block.is_shared());
    }
}
