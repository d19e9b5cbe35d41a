//! From a 4-tuple to a slot: open addressing under a keyed hash, so that nobody who does not know the key can pile up collisions.

use ahash::RandomState;
use alloc::boxed::Box;
use baton_wire::Name;
use core::hash::{BuildHasher, Hasher};

const EMPTY: u32 = u32::MAX;

/// The table. It is at most half full, so that a probe rarely goes further than its first cache line.
pub struct Lookup {
    /// (upper half of the hash, slot).
    entries: Box<[(u32, u32)]>,
    mask: usize,
    hasher: RandomState,
}

impl Lookup {
    /// An empty table for so many slots.
    pub fn new(slots: usize, key: [u64; 4]) -> Self {
        let size = (slots * 2).next_power_of_two().max(16);
        Lookup {
            entries: alloc::vec![(0, EMPTY); size].into(),
            mask: size - 1,
            hasher: RandomState::with_seeds(key[0], key[1], key[2], key[3]),
        }
    }

    #[inline(always)]
    fn hash(&self, name: &Name) -> u64 {
        let pair = |low: u64, high: u64| u128::from(low) | u128::from(high) << 64;
        let ([first, ports], rest) = name.words();
        let mut hasher = self.hasher.build_hasher();
        if let Some(rest) = rest {
            hasher.write_u128(pair(rest[0], rest[1]));
            hasher.write_u128(pair(rest[2], rest[3]));
        }
        hasher.write_u128(pair(first, ports));
        hasher.finish()
    }

    /// The slot of a flow; `is` says whether a slot, which may be none at all, really is the flow's.
    #[inline(always)]
    pub fn find(&self, name: &Name, is: impl Fn(u32) -> bool) -> Option<u32> {
        let hash = self.hash(name);
        let (tag, mut at) = ((hash >> 32) as u32, hash as usize & self.mask);
        loop {
            let (entry_tag, slot) = *self.entries.get(at)?;
            if entry_tag == tag && is(slot) {
                return Some(slot);
            }
            if slot == EMPTY {
                return None;
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Adds a flow that is not in the table.
    pub fn insert(&mut self, name: &Name, slot: u32) {
        let hash = self.hash(name);
        let mut at = hash as usize & self.mask;
        while self.entries[at].1 != EMPTY {
            at = (at + 1) & self.mask;
        }
        self.entries[at] = ((hash >> 32) as u32, slot);
    }

    /// Removes a flow's slot, and closes the gap so that no tombstones are needed. `name_of` names the flow of another slot.
    pub fn remove(&mut self, name: &Name, slot: u32, name_of: impl Fn(u32) -> Name) {
        let mut at = self.hash(name) as usize & self.mask;
        while self.entries[at].1 != slot {
            if self.entries[at].1 == EMPTY {
                return;
            }
            at = (at + 1) & self.mask;
        }
        let mut gap = at;
        loop {
            at = (at + 1) & self.mask;
            let (tag, other) = self.entries[at];
            if other == EMPTY {
                break;
            }
            let home = self.hash(&name_of(other)) as usize & self.mask;
            // The entry may move into the gap only if its home does not lie behind the gap.
            if (at.wrapping_sub(home) & self.mask) >= (at.wrapping_sub(gap) & self.mask) {
                self.entries[gap] = (tag, other);
                gap = at;
            }
        }
        self.entries[gap] = (0, EMPTY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::{Endpoint, Flow};

    fn name(n: u32) -> Name {
        let local = Endpoint::v4([10, 0, 0, 1], 80);
        let remote = if n.is_multiple_of(2) {
            Endpoint::v4([10, 1, (n >> 8) as u8, n as u8], 1000 + n as u16)
        } else {
            Endpoint::v6([n as u8; 16], n as u16)
        };
        Name::from(&Flow { local, remote })
    }

    #[test]
    fn what_is_in_is_found_and_what_is_out_is_not() {
        let mut table = Lookup::new(256, [1, 2, 3, 4]);
        for n in 0..256 {
            table.insert(&name(n), n);
        }
        for n in (0..256).step_by(3) {
            table.remove(&name(n), n, name);
        }
        for n in 0..256 {
            let found = table.find(&name(n), |slot| slot != EMPTY && name(slot) == name(n));
            assert_eq!(found, (!n.is_multiple_of(3)).then_some(n));
        }
    }
}
