//! Allocation of session memory, in blocks of powers of two.

use std::collections::{BTreeMap, BTreeSet};

/// The smallest block: a page.
const MIN_ORDER: u32 = 12;

/// A buddy allocator over offsets.
#[derive(Debug)]
pub struct Heap {
    start: u64,
    bytes: u64,
    /// Free blocks by order.
    free: BTreeMap<u32, BTreeSet<u64>>,
}

impl Heap {
    /// A heap in which all of `start..end` is free.
    pub fn new(start: usize, end: usize) -> Heap {
        let mut heap = Heap { start: start as u64, bytes: (end - start) as u64, free: BTreeMap::new() };
        let mut at = 0u64;
        let length = (end - start) as u64;
        while length - at >= 1 << MIN_ORDER {
            let alignment = if at == 0 { 63 } else { at.trailing_zeros() };
            let order = alignment.min((length - at).ilog2());
            heap.free.entry(order).or_default().insert(at);
            at += 1 << order;
        }
        heap
    }

    /// Total bytes, free or not.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free.iter().map(|(order, blocks)| (blocks.len() as u64) << order).sum()
    }

    /// Takes a free block of at least `size` bytes, a power of two. Returns its offset and size.
    pub fn take(&mut self, size: u32) -> Option<(u32, u32)> {
        let order = size.max(1).next_power_of_two().ilog2().max(MIN_ORDER);
        let found = *self.free.range(order..).find(|(_, blocks)| !blocks.is_empty())?.0;
        let at = self.free.get_mut(&found)?.pop_first()?;
        for smaller in (order..found).rev() {
            self.free.entry(smaller).or_default().insert(at + (1 << smaller));
        }
        Some(((self.start + at) as u32, 1 << order))
    }

    /// Takes the block at this offset, of this size. False, with nothing taken, if it is no block or not free.
    pub fn reserve(&mut self, offset: u32, size: u32) -> bool {
        let Some(wanted) = u64::from(offset).checked_sub(self.start) else { return false };
        if !size.is_power_of_two() || size < 1 << MIN_ORDER || !wanted.is_multiple_of(size.into()) {
            return false;
        }
        // A block lies at a multiple of its size.
        let around = |order: u32| wanted >> order << order;
        let holds = |order: u32| wanted + u64::from(size) <= around(order) + (1 << order);
        let found = self
            .free
            .iter_mut()
            .find_map(|(order, blocks)| (holds(*order) && blocks.remove(&around(*order))).then_some((*order, around(*order))));
        let Some((mut order, mut block)) = found else { return false };
        while 1u64 << order > u64::from(size) {
            order -= 1;
            let upper = block + (1 << order);
            let other = if wanted >= upper { std::mem::replace(&mut block, upper) } else { upper };
            self.free.entry(order).or_default().insert(other);
        }
        true
    }

    /// Frees a block.
    pub fn give(&mut self, offset: u32, size: u32) {
        let mut at = u64::from(offset) - self.start;
        let mut order = size.ilog2();
        loop {
            let buddy = at ^ (1 << order);
            let blocks = self.free.entry(order).or_default();
            if !blocks.remove(&buddy) {
                blocks.insert(at);
                return;
            }
            at = at.min(buddy);
            order += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certain_block_can_be_taken() {
        let mut heap = Heap::new(4096, 4096 + (1 << 20));
        for (offset, size) in [(0, 4096), (4096, 0), (4096, 100), (8192, 8192), (4096 + (1 << 20), 4096), (u32::MAX, 1 << 31)] {
            assert!(!heap.reserve(offset, size), "{offset} {size}");
        }
        assert!(heap.reserve(4096 + (3 << 16), 1 << 16));
        assert!(!heap.reserve(4096 + (3 << 16), 1 << 16), "it is taken");
        let mut taken: Vec<_> = std::iter::from_fn(|| heap.take(1 << 16)).collect();
        assert_eq!(taken.len(), 15);
        assert!(!taken.contains(&(4096 + (3 << 16), 1 << 16)));
        taken.push((4096 + (3 << 16), 1 << 16));
        for (offset, size) in taken {
            heap.give(offset, size);
        }
        assert_eq!(heap.take(1 << 20), Some((4096, 1 << 20)));
    }

    #[test]
    fn blocks_split_and_join() {
        let mut heap = Heap::new(4096, 4096 + (1 << 20) + (1 << 16));
        let first = heap.take(1 << 20).unwrap();
        assert_eq!(first, (4096, 1 << 20));
        let small: Vec<_> = (0..16).map(|_| heap.take(100).unwrap()).collect();
        assert!(heap.take(100).is_none());
        for (offset, size) in small {
            assert_eq!(size, 4096);
            heap.give(offset, size);
        }
        assert!(heap.take(1 << 16).is_some(), "sixteen pages join to one block");
        heap.give(first.0, first.1);
        assert_eq!(heap.take(1 << 20), Some(first));
    }
}
