//! An ordered queue of numbered entries, from which any entry can be removed.

use crate::NONE;
use alloc::boxed::Box;
use alloc::vec;

/// Entries in the order in which they were added.
pub(crate) struct List {
    /// (previous, next) of each entry.
    links: Box<[(u32, u32)]>,
    first: u32,
    last: u32,
}

impl List {
    /// An empty list for entries numbered below `entries`.
    pub fn new(entries: usize) -> List {
        List { links: vec![(NONE, NONE); entries].into(), first: NONE, last: NONE }
    }

    /// Adds an entry that is not in the list at its end.
    pub fn push(&mut self, entry: u32) {
        self.links[entry as usize] = (self.last, NONE);
        match self.last {
            NONE => self.first = entry,
            last => self.links[last as usize].1 = entry,
        }
        self.last = entry;
    }

    /// Takes an entry out that is in the list.
    pub fn remove(&mut self, entry: u32) {
        let (previous, next) = self.links[entry as usize];
        match previous {
            NONE => self.first = next,
            previous => self.links[previous as usize].1 = next,
        }
        match next {
            NONE => self.last = previous,
            next => self.links[next as usize].0 = previous,
        }
    }

    /// The entries, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let mut at = self.first;
        core::iter::from_fn(move || {
            let entry = (at != NONE).then_some(at)?;
            at = self.links[entry as usize].1;
            Some(entry)
        })
    }
}
