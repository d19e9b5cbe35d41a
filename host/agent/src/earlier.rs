//! What earlier NICs of an agent have counted. A NIC counts in its memory from what it finds there, but for what it
//! counts in its own memory first: that would begin anew with each NIC. So the agent keeps the counts of a NIC that has
//! died, and the next one begins with none.

use baton_abi::layout::{COUNTERS, Counter, nic};
use baton_shm::Region;
use std::sync::atomic::Ordering;

/// Of each NIC and worker: the sums of its predecessors' counters.
#[derive(Default)]
pub(crate) struct Earlier(Vec<Vec<[u64; COUNTERS]>>);

/// Counters that say how much there is at present: the next NIC sets them.
const PRESENT: [Counter; 3] = [Counter::Connections, Counter::Held, Counter::Dormant];

impl Earlier {
    /// Takes over the counters of the workers of a NIC that has ended. Called before the next one of its number starts.
    pub fn take_over(&mut self, number: usize, workers: usize, memory: &Region) {
        if self.0.len() <= number {
            self.0.resize(number + 1, Vec::new());
        }
        let sums = &mut self.0[number];
        sums.resize(sums.len().max(workers), [0; COUNTERS]);
        for (worker, sums) in sums.iter_mut().enumerate().take(workers) {
            let words = memory.words(nic::counters(worker), COUNTERS);
            for (at, (sum, word)) in sums.iter_mut().zip(words).enumerate() {
                if PRESENT.iter().any(|present| *present as usize == at) {
                    continue;
                }
                *sum = sum.wrapping_add(word.swap(0, Ordering::Relaxed));
            }
        }
    }

    /// A worker's counters, with those of its predecessors.
    pub fn counters(&self, number: usize, worker: usize, memory: &Region) -> Vec<u64> {
        let earlier = self.0.get(number).and_then(|workers| workers.get(worker));
        let words = memory.words(nic::counters(worker), COUNTERS).iter().enumerate();
        words.map(|(at, word)| word.load(Ordering::Relaxed).wrapping_add(earlier.map_or(0, |earlier| earlier[at]))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_go_on_with_the_next_nic() {
        let memory = Region::private(nic::bytes(1).next_multiple_of(4096)).expect("memory");
        let word = |worker: usize, counter: Counter| &memory.words(nic::counters(worker), COUNTERS)[counter as usize];
        let mut earlier = Earlier::default();
        for (worker, frames) in [(0, 10), (1, 7)] {
            word(worker, Counter::WireReceived).store(frames, Ordering::Relaxed);
            word(worker, Counter::Connections).store(3, Ordering::Relaxed);
        }
        earlier.take_over(2, 2, &memory);
        let counters = |worker: usize| {
            let counters = earlier.counters(2, worker, &memory);
            (counters[Counter::WireReceived as usize], counters[Counter::Connections as usize])
        };
        assert_eq!((counters(0), counters(1)), ((10, 3), (7, 3)));
        // The next one counts anew.
        word(0, Counter::WireReceived).store(2, Ordering::Relaxed);
        word(0, Counter::Connections).store(1, Ordering::Relaxed);
        assert_eq!((counters(0), counters(1)), ((12, 1), (7, 3)));
        earlier.take_over(2, 2, &memory);
        let twice = earlier.counters(2, 0, &memory);
        assert_eq!(twice[Counter::WireReceived as usize], 12);
        assert_eq!(earlier.counters(0, 0, &memory)[Counter::WireReceived as usize], 0, "it is the memory of this NIC here");
    }
}
