//! A worker's sign of life in shared memory, for the process that supervises the worker's process.

use crate::Region;
use baton_abi::layout::pulse;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The state that a worker publishes: how many rounds it has made, and whether it sleeps.
pub struct Pulse {
    memory: Arc<Region>,
    at: usize,
    rounds: u64,
}

/// The state as a worker has published it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reading {
    /// Rounds that it and its predecessors have made.
    pub rounds: u64,
    /// Number of its thread; 0 while there is none.
    pub thread: u32,
    /// It sleeps until there is something to do.
    pub asleep: bool,
}

impl Pulse {
    /// The sign of life at this offset of the memory, of the thread with this number.
    pub fn begin(memory: Arc<Region>, at: usize, thread: u32) -> Pulse {
        let rounds = memory.words(at + pulse::ROUNDS, 1)[0].load(Ordering::Relaxed);
        let mut pulse = Pulse { memory, at, rounds };
        pulse.set_asleep(false);
        pulse.beat();
        pulse.memory.word32(pulse.at + pulse::THREAD).store(thread, Ordering::Release);
        pulse
    }

    /// A round has been made.
    #[inline]
    pub fn beat(&mut self) {
        self.rounds += 1;
        self.memory.words(self.at + pulse::ROUNDS, 1)[0].store(self.rounds, Ordering::Relaxed);
    }

    /// The worker goes to sleep, or is awake again. Also for waits that have a limit of their own.
    pub fn set_asleep(&self, asleep: bool) {
        self.memory.word32(self.at + pulse::ASLEEP).store(asleep.into(), Ordering::Release);
    }

    /// Reads the state published at this offset.
    pub fn read(memory: &Region, at: usize) -> Reading {
        // The number of rounds is read last: so a worker that has just made a further round counts as having made it.
        let thread = memory.word32(at + pulse::THREAD).load(Ordering::Acquire);
        let asleep = memory.word32(at + pulse::ASLEEP).load(Ordering::Acquire) != 0;
        Reading { rounds: memory.words(at + pulse::ROUNDS, 1)[0].load(Ordering::Acquire), thread, asleep }
    }

    /// There is no thread there any more: its process has ended.
    pub fn clear(memory: &Region, at: usize) {
        memory.word32(at + pulse::THREAD).store(0, Ordering::Release);
    }
}
