//! Connections that their program holds in the kernel while it forks.
//!
//! There may be very many, and the fork waits until all are held. So each costs only some instructions on its block.
//! The blocks are contiguous in session memory, so the processor prefetches them, and a fork neither copies nor
//! write-protects that memory. Of the program's own memory only a list of numbers is written: its objects for the
//! connections are scattered over many pages, and each page that is written around a fork is copied.

use crate::shared::Shared;
use baton_abi::layout::{Owner, block, session};
use baton_linux::events;
use baton_ring::Token;
use baton_shm::Region;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Connections of a session that a thread holds in the kernel: no move of them begins until this is dropped. Dropping
/// it marks them, so that the agent learns that other processes may have their sockets.
///
/// A child of the fork must forget it (not drop it), since it shares the memory with its parent.
#[derive(Debug)]
pub struct KernelHold<'a> {
    memory: &'a Region,
    numbers: Vec<u32>,
}

/// Whether the kernel has the connection with this number.
pub fn is_in_kernel(shared: &Shared, number: u32) -> bool {
    owner(shared.memory(), number) == Owner::Kernel
}

fn word(memory: &Region, number: u32, field: usize) -> &AtomicU32 {
    memory.word32(session::block(number) + field)
}

fn owner(memory: &Region, number: u32) -> Owner {
    Owner::from_number(word(memory, number, block::OWNER).load(Ordering::Acquire))
}

/// Leaves the operations on these connections, and wakes an agent that waits for that.
fn leave(memory: &Region, numbers: &[u32]) {
    for number in numbers {
        word(memory, *number, block::BUSY).store(0, Ordering::Release);
    }
    // The agent, to move a connection, sets its owner first and then checks whether a thread is inside. So one barrier
    // is enough for all of these.
    fence(Ordering::SeqCst);
    for number in numbers {
        if owner(memory, *number) == Owner::Moving {
            events::wake_all(word(memory, *number, block::BUSY));
        }
    }
}

/// Notes of a connection that another process, which is there, has its socket, so that it does not move before the
/// agent has looked for such processes. Returns false if the kernel does not have it. Takes no lock and no memory, and
/// begins no operation: the process may be killed.
pub(crate) fn mark_in_kernel(memory: &Region, number: u32) -> bool {
    let is_there = || owner(memory, number) == Owner::Kernel;
    if !is_there() {
        return false;
    }
    mark(memory, number);
    // The agent, to move a connection, sets its owner first and then looks at the mark: it sees this one, or its move
    // is seen here.
    fence(Ordering::SeqCst);
    is_there()
}

fn hold(memory: &Region, number: u32, token: Token) -> bool {
    let busy = word(memory, number, block::BUSY);
    // The exchange is a full barrier, so the owner is read after it.
    if busy.compare_exchange(0, token, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return false;
    }
    let held = owner(memory, number) == Owner::Kernel;
    if !held {
        leave(memory, &[number]);
    }
    held
}

fn mark(memory: &Region, number: u32) {
    word(memory, number, block::FLAGS).fetch_or(block::FLAG_SHARED, Ordering::AcqRel);
}

impl<'a> KernelHold<'a> {
    /// A hold without connections yet.
    pub fn begin(shared: &'a Shared) -> KernelHold<'a> {
        KernelHold::on(shared.memory())
    }

    fn on(memory: &'a Region) -> KernelHold<'a> {
        KernelHold { memory, numbers: Vec::new() }
    }

    /// Holds the connection with this number: the calling thread is inside an operation on it from now on. Returns
    /// false, without holding it, if it is not in the kernel, or a thread is inside an operation on it.
    pub fn add(&mut self, number: u32, token: Token) -> bool {
        let held = hold(self.memory, number, token);
        if held {
            self.numbers.push(number);
        }
        held
    }
}

impl Drop for KernelHold<'_> {
    fn drop(&mut self) {
        // The mark is set after the fork: the agent clears it when it begins to search for other processes, and a
        // search before the fork would not find the child.
        for number in &self.numbers {
            mark(self.memory, *number);
        }
        leave(self.memory, &self.numbers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    const RELAXED: Ordering = Ordering::Relaxed;

    fn memory() -> Region {
        Region::private(session::HEAP).expect("memory")
    }

    fn is_marked(memory: &Region, number: u32) -> bool {
        word(memory, number, block::FLAGS).load(RELAXED) & block::FLAG_SHARED != 0
    }

    /// Connections in the kernel are held during a fork and marked for the agent. No others are held, and no thread is
    /// waited for.
    #[test]
    fn a_fork_holds_what_is_in_the_kernel() {
        let memory = memory();
        let set = |field, value| word(&memory, 3, field).store(value, RELAXED);
        let busy = || word(&memory, 3, block::BUSY).load(RELAXED);
        let mut hold = KernelHold::on(&memory);
        for owner in [Owner::Nobody, Owner::Nic, Owner::Moving] {
            set(block::OWNER, owner as u32);
            assert!(!hold.add(3, 7) && busy() == 0);
        }
        set(block::OWNER, Owner::Kernel as u32);
        set(block::BUSY, 8);
        assert!(!hold.add(3, 7) && busy() == 8);
        drop(hold);
        assert!(!is_marked(&memory, 3) && busy() == 8, "nothing was held");
        set(block::BUSY, 0);
        let mut hold = KernelHold::on(&memory);
        assert!(hold.add(3, 7) && busy() == 7);
        assert!(!hold.add(3, 7), "once");
        drop(hold);
        assert!(is_marked(&memory, 3) && busy() == 0);
        assert!([2, 4].iter().all(|other| !is_marked(&memory, *other) && word(&memory, *other, block::BUSY).load(RELAXED) == 0));
    }

    /// A child of vfork marks what is in the kernel, also while its parent is inside an operation, and is inside none
    /// itself.
    #[test]
    fn a_child_marks_and_holds_nothing() {
        let memory = memory();
        let set = |field, value| word(&memory, 3, field).store(value, RELAXED);
        for owner in [Owner::Nobody, Owner::Nic, Owner::Moving] {
            set(block::OWNER, owner as u32);
            assert!(!mark_in_kernel(&memory, 3) && !is_marked(&memory, 3));
        }
        set(block::OWNER, Owner::Kernel as u32);
        for busy in [0, 8] {
            set(block::BUSY, busy);
            set(block::FLAGS, 0);
            assert!(mark_in_kernel(&memory, 3) && is_marked(&memory, 3));
            assert_eq!(word(&memory, 3, block::BUSY).load(RELAXED), busy);
        }
    }

    /// The agent begins to search for other processes after a connection is held and before the child exists: that
    /// search must not count.
    #[test]
    fn a_search_before_the_child_is_there_does_not_count() {
        let memory = memory();
        word(&memory, 3, block::OWNER).store(Owner::Kernel as u32, RELAXED);
        let flags = word(&memory, 3, block::FLAGS);
        flags.store(block::FLAG_SHARED | block::FLAG_CORK, RELAXED);
        let mut hold = KernelHold::on(&memory);
        assert!(hold.add(3, 7));
        flags.fetch_and(!block::FLAG_SHARED, RELAXED);
        drop(hold);
        assert_eq!(flags.load(RELAXED), block::FLAG_SHARED | block::FLAG_CORK);
    }

    /// The agent may move a connection as soon as its operation is left: so all are marked before the first one is
    /// left.
    #[test]
    fn what_is_left_is_marked() {
        const ALL: u32 = session::MAX_CONNECTIONS as u32;
        let memory = memory();
        (0..ALL).for_each(|number| word(&memory, number, block::OWNER).store(Owner::Kernel as u32, RELAXED));
        let mut hold = KernelHold::on(&memory);
        assert!((0..ALL).all(|number| hold.add(number, 7)));
        let looks = Barrier::new(2);
        std::thread::scope(|scope| {
            let agent = scope.spawn(|| {
                looks.wait();
                while word(&memory, 0, block::BUSY).load(Ordering::Acquire) != 0 {
                    std::hint::spin_loop();
                }
                is_marked(&memory, ALL - 1)
            });
            looks.wait();
            drop(hold);
            assert!(agent.join().expect("no panic"), "the first one is left, and the last one not marked yet");
        });
    }

    /// All blocks of a session are held at once and left again; meanwhile only a number is kept for each.
    #[test]
    fn a_hold_takes_a_number_for_each_connection() {
        const ALL: u32 = session::MAX_CONNECTIONS as u32;
        let memory = memory();
        (0..ALL).for_each(|number| word(&memory, number, block::OWNER).store(Owner::Kernel as u32, RELAXED));
        let mut hold = KernelHold::on(&memory);
        assert!((0..ALL).all(|number| hold.add(number, 7)));
        assert!((0..ALL).all(|number| word(&memory, number, block::BUSY).load(RELAXED) == 7));
        assert_eq!(hold.numbers.len(), ALL as usize);
        assert_eq!(size_of_val(&hold.numbers[..]), 4 * ALL as usize);
        drop(hold);
        assert!((0..ALL).all(|number| word(&memory, number, block::BUSY).load(RELAXED) == 0 && is_marked(&memory, number)));
    }
}
