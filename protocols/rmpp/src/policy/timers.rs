//! Deadlines of numbered timers: a binary heap of fixed size in which a timer can be moved.

use alloc::boxed::Box;
use alloc::vec::Vec;

/// A timer that is not in the heap.
const OUT: u32 = u32::MAX;

/// The timers.
pub(super) struct Timers {
    /// (deadline in microseconds, timer), the earliest first.
    heap: Vec<(u64, u32)>,
    /// Where each timer is in the heap.
    places: Box<[u32]>,
}

impl Timers {
    /// Timers with the numbers below `count`; none of them runs yet.
    pub fn new(count: usize) -> Timers {
        Timers { heap: Vec::with_capacity(count), places: alloc::vec![OUT; count].into() }
    }

    /// Starts a timer, or moves its deadline.
    pub fn set(&mut self, timer: usize, deadline: u64) {
        let mut at = self.places[timer] as usize;
        if self.places[timer] == OUT {
            at = self.heap.len();
            self.heap.push((deadline, timer as u32));
            self.places[timer] = at as u32;
        }
        self.heap[at].0 = deadline;
        self.settle(at);
    }

    /// Stops a timer, if it runs.
    pub fn stop(&mut self, timer: usize) {
        let at = self.places[timer];
        if at != OUT {
            self.places[timer] = OUT;
            self.heap.swap_remove(at as usize);
            if let Some((_, moved)) = self.heap.get(at as usize) {
                self.places[*moved as usize] = at;
                self.settle(at as usize);
            }
        }
    }

    /// The earliest deadline.
    pub fn next(&self) -> Option<u64> {
        self.heap.first().map(|(deadline, _)| *deadline)
    }

    /// Stops and returns a timer whose deadline has come.
    pub fn pop(&mut self, now: u64) -> Option<usize> {
        let (deadline, timer) = *self.heap.first()?;
        (deadline <= now).then(|| {
            self.stop(timer as usize);
            timer as usize
        })
    }

    /// Moves the entry at `at` to where it belongs.
    fn settle(&mut self, mut at: usize) {
        while at > 0 && self.heap[at].0 < self.heap[(at - 1) / 2].0 {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        loop {
            let children = (2 * at + 1)..(2 * at + 3).min(self.heap.len());
            match children.min_by_key(|child| self.heap[*child].0) {
                Some(child) if self.heap[child].0 < self.heap[at].0 => {
                    self.swap(at, child);
                    at = child;
                }
                _ => return,
            }
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.places[self.heap[a].1 as usize] = a as u32;
        self.places[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_of_their_deadlines() {
        let mut timers = Timers::new(64);
        for timer in 0..64 {
            timers.set(timer, (timer as u64 * 37) % 64);
        }
        for timer in (0..64).step_by(3) {
            timers.stop(timer);
        }
        for timer in (1..64).step_by(3) {
            timers.set(timer, 1000 - timer as u64);
        }
        let mut fired = Vec::new();
        while let Some(timer) = timers.pop(2000) {
            fired.push(timer);
        }
        let mut expected: Vec<usize> = (2..64).step_by(3).collect();
        expected.sort_by_key(|timer| (timer * 37) % 64);
        expected.extend((1..64).step_by(3).rev());
        assert_eq!(fired, expected);
    }

    #[test]
    fn a_timer_does_not_fire_early() {
        let mut timers = Timers::new(1);
        timers.set(0, 10);
        assert_eq!((timers.pop(9), timers.next(), timers.pop(10), timers.next()), (None, Some(10), Some(0), None));
    }
}
