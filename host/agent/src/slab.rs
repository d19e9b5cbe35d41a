//! Numbered entries. Finding, allocating and freeing a number take a time that does not depend on how many there are.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::{Deref, DerefMut};

/// Entries by number. Dereferences to the slice of its places, some of which are empty.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<Option<T>>,
    /// Numbers of places that became empty. One that was filled since by [`Self::put`] is skipped when it comes up.
    free: BinaryHeap<Reverse<u32>>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { places: Vec::new(), free: BinaryHeap::new() }
    }
}

impl<T> Slab<T> {
    /// Returns the lowest free number.
    pub fn vacant(&mut self) -> u32 {
        while let Some(Reverse(number)) = self.free.peek().copied() {
            if matches!(self.places.get(number as usize), Some(None)) {
                return number;
            }
            self.free.pop();
        }
        self.places.len() as u32
    }

    /// Puts an entry at a number, in place of what is there.
    pub fn put(&mut self, number: u32, entry: T) {
        let at = number as usize;
        for skipped in self.places.len()..at {
            self.free.push(Reverse(skipped as u32));
        }
        if self.places.len() <= at {
            self.places.resize_with(at + 1, || None);
        }
        self.places[at] = Some(entry);
    }

    /// Removes an entry and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let entry = self.places.get_mut(number as usize)?.take()?;
        self.free.push(Reverse(number));
        Some(entry)
    }
}

impl<T> Deref for Slab<T> {
    type Target = [Option<T>];

    fn deref(&self) -> &[Option<T>] {
        &self.places
    }
}

impl<T> DerefMut for Slab<T> {
    fn deref_mut(&mut self) -> &mut [Option<T>] {
        &mut self.places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_number_is_given() {
        let mut slab = Slab::default();
        for entry in 0..4 {
            assert_eq!(slab.vacant(), entry);
            slab.put(entry, entry);
        }
        assert_eq!((slab.remove(2), slab.remove(0), slab.remove(0)), (Some(2), Some(0), None));
        assert_eq!(slab.vacant(), 0);
        slab.put(0, 10);
        assert_eq!(slab.vacant(), 2);
    }

    #[test]
    fn a_number_that_is_skipped_is_free() {
        let mut slab = Slab::default();
        slab.put(2, ());
        assert_eq!(slab.vacant(), 0);
        slab.put(0, ());
        slab.put(1, ());
        assert_eq!(slab.vacant(), 3);
        assert_eq!(slab.iter().flatten().count(), 3);
    }
}
