//! What happens when, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What is to happen, by time; what was entered first at the same time comes first.
#[derive(Clone, Debug)]
pub struct Agenda<T> {
    /// Time, number of the entry, its place in `entries`.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    entries: Vec<Option<T>>,
    /// Places in `entries` that are empty.
    free: Vec<usize>,
    count: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Agenda { order: BinaryHeap::new(), entries: Vec::new(), free: Vec::new(), count: 0 }
    }
}

impl<T> Agenda<T> {
    /// Enters what happens at a time.
    pub fn enter(&mut self, time: u64, what: T) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[place] = Some(what);
        self.order.push(Reverse((time, self.count, place)));
        self.count += 1;
    }

    /// The next that happens, and when.
    pub fn next(&mut self) -> Option<(u64, T)> {
        let Reverse((time, _, place)) = self.order.pop()?;
        self.free.push(place);
        Some((time, self.entries[place].take()?))
    }
}
