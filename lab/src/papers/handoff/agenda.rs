//! What happens when, in virtual time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// What is to happen, by time; what was entered first at the same time comes first.
#[derive(Clone, Debug)]
pub struct Agenda<T> {
    order: BinaryHeap<Reverse<(u64, u64)>>,
    entries: HashMap<u64, T>,
    count: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Agenda { order: BinaryHeap::new(), entries: HashMap::new(), count: 0 }
    }
}

impl<T> Agenda<T> {
    /// Enters what happens at a time.
    pub fn enter(&mut self, time: u64, what: T) {
        self.order.push(Reverse((time, self.count)));
        self.entries.insert(self.count, what);
        self.count += 1;
    }

    /// The next that happens, and when.
    pub fn next(&mut self) -> Option<(u64, T)> {
        let Reverse((time, number)) = self.order.pop()?;
        Some((time, self.entries.remove(&number)?))
    }
}
