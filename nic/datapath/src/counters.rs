//! The counters in NIC memory, where the agent and tools read them.

use baton_abi::layout::{COUNTERS, Counter, nic};
use baton_shm::{Region, WordArray};
use core::sync::atomic::Ordering;
use std::sync::Arc;

/// A worker's counters, of which it is the only writer.
pub(crate) struct Counters(WordArray<COUNTERS>);

impl Counters {
    pub fn new(memory: &Arc<Region>) -> Self {
        Counters(memory.shared_array(nic::counters(0)))
    }

    /// Makes these the counters of worker `worker`.
    pub fn move_to(&mut self, memory: &Arc<Region>, worker: usize) {
        self.0 = memory.shared_array(nic::counters(worker));
    }

    #[inline(always)]
    pub fn add(&self, counter: Counter, amount: u64) {
        let word = &self.0[counter as usize];
        word.store(word.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// Adds the same amount to several counters.
    #[inline(always)]
    pub fn add_to_each<const N: usize>(&self, counters: [Counter; N], amount: u64) {
        let words = &*self.0;
        for counter in counters {
            let word = &words[counter as usize];
            word.store(word.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
        }
    }

    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }

    pub fn set(&self, counter: Counter, value: u64) {
        self.0[counter as usize].store(value, Ordering::Relaxed);
    }
}
