//! A queue of times at which something is due.

use alloc::collections::BinaryHeap;
use core::cmp::Reverse;

/// Keys, for example of connections, each with a time at which it is due. A key may be in it several times. No entry is
/// removed before its time: the caller that takes a key checks whether there is still anything to do.
#[derive(Clone, Debug)]
pub struct Timers<K>(BinaryHeap<Reverse<(u64, K)>>);

impl<K: Ord> Default for Timers<K> {
    fn default() -> Timers<K> {
        Timers(BinaryHeap::new())
    }
}

impl<K: Ord> Timers<K> {
    /// Adds `key`, due at this time.
    pub fn add(&mut self, at: u64, key: K) {
        self.0.push(Reverse((at, key)));
    }

    /// Takes the first key that is due at `now`, with its time.
    pub fn take(&mut self, now: u64) -> Option<(u64, K)> {
        if !self.is_due(now) {
            return None;
        }
        self.0.pop().map(|Reverse(first)| first)
    }

    /// Whether [`Timers::take`] returns one.
    pub fn is_due(&self, now: u64) -> bool {
        self.due().is_some_and(|at| at <= now)
    }

    /// When the first key is due.
    pub fn due(&self) -> Option<u64> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_comes_in_the_order_of_its_times() {
        let mut timers = Timers::default();
        assert_eq!((timers.due(), timers.take(u64::MAX)), (None, None));
        for (at, key) in [(30, 'c'), (10, 'a'), (20, 'b'), (10, 'd')] {
            timers.add(at, key);
        }
        assert_eq!((timers.due(), timers.take(9)), (Some(10), None));
        assert_eq!([timers.take(20), timers.take(20), timers.take(20)], [Some((10, 'a')), Some((10, 'd')), Some((20, 'b'))]);
        assert!(timers.take(20).is_none() && !timers.is_due(29) && timers.is_due(30));
        assert_eq!(timers.take(u64::MAX), Some((30, 'c')));
        assert_eq!(timers.due(), None);
    }

    #[test]
    fn a_name_may_be_there_several_times() {
        let mut timers = Timers::default();
        [5, 3].into_iter().for_each(|at| timers.add(at, 1));
        assert_eq!([timers.take(9), timers.take(9), timers.take(9)], [Some((3, 1)), Some((5, 1)), None]);
    }
}
