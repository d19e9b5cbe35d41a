//! The lookup from a 4-tuple to a slot: open addressing with a keyed hash, so that an attacker who does not know the
//! key cannot produce collisions.

use alloc::boxed::Box;
use alloc::vec::Vec;
use baton_wire::FlowKey;
use core::mem::MaybeUninit;

/// In place of a slot: the entry is free.
const EMPTY: u32 = NO_SLOT;

/// Not the number of any slot.
pub const NO_SLOT: u32 = u32::MAX;

/// Stands for the 4-tuple found last while there is none: no slot has this one.
const NOTHING: ([u64; 2], u32) = ([0; 2], EMPTY);

/// Bits of the fraction of pi: with them a key that is not random, as in tests, still makes a hash.
const PI: [u64; 4] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];

/// A folded multiplication: both halves of the product of 128 bits as one.
#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// A search that has begun: see [`Lookup::begin`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Search {
    tag: u32,
    at: usize,
}

/// A hash table of slots. It is at most half full, so that a probe rarely goes beyond its first cache line.
pub struct Lookup {
    /// (upper half of the hash, slot or [`EMPTY`]).
    entries: Box<[(u32, u32)]>,
    mask: usize,
    key: [u64; 4],
    /// The words of the IPv4 4-tuple that [`Lookup::find_again`] has found last, and its slot.
    last: ([u64; 2], u32),
}

impl Lookup {
    /// Makes an empty table for `slots` slots. `hash_key` must be random.
    pub fn new(slots: usize, hash_key: [u64; 4]) -> Self {
        Lookup::prepared(slots, hash_key, |_| ())
    }

    /// As `new`, but passes the memory to `prepare` before it is used.
    pub fn prepared(slots: usize, hash_key: [u64; 4], prepare: impl FnOnce(&mut [MaybeUninit<(u32, u32)>])) -> Self {
        let size = (slots * 2).next_power_of_two().max(16);
        let mut entries = Vec::with_capacity(size);
        prepare(entries.spare_capacity_mut());
        entries.resize(size, (0, EMPTY));
        Lookup { entries: entries.into(), mask: size - 1, key: core::array::from_fn(|at| hash_key[at] ^ PI[at]), last: NOTHING }
    }

    #[inline(always)]
    fn hash(&self, key: &FlowKey) -> u64 {
        let [a, b, c, d] = self.key;
        let ([first, ports], rest) = key.words();
        let mut hash = fold(first ^ a, ports ^ b);
        if let Some(rest) = rest {
            hash = fold(hash ^ rest[0] ^ a, rest[1] ^ b);
            hash = fold(hash ^ rest[2] ^ a, rest[3] ^ b);
        }
        fold(hash ^ c, d)
    }

    /// Finds the slot of a 4-tuple. `is` says whether a slot has this 4-tuple. It is called for slots whose hash has
    /// the same upper half, and may be called with `u32::MAX`, which is no slot.
    #[inline(always)]
    pub fn find(&self, key: &FlowKey, is: impl Fn(u32) -> bool) -> Option<u32> {
        let hash = self.hash(key);
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

    /// Begins a search whose memory can be loaded meanwhile.
    #[inline(always)]
    pub fn begin(&self, key: &FlowKey) -> Search {
        let hash = self.hash(key);
        Search { tag: (hash >> 32) as u32, at: hash as usize & self.mask }
    }

    /// The memory that the search reads first.
    #[inline(always)]
    pub fn memory_of(&self, search: &Search) -> &impl Sized {
        &self.entries[search.at & self.mask]
    }

    /// Ends a search as [`Lookup::find`] does, but without a check of the slot: it may belong to another 4-tuple with
    /// the same hash. Returns [`NO_SLOT`] if there is none.
    #[inline(always)]
    pub fn end(&self, search: Search) -> u32 {
        let Search { tag, mut at } = search;
        loop {
            let (entry_tag, slot) = self.entries[at & self.mask];
            if entry_tag == tag || slot == EMPTY {
                return slot;
            }
            at += 1;
        }
    }

    /// [`Lookup::find`] for the IPv4 4-tuples of frames: the one that was found last is found again without a hash. The
    /// slot may belong to another 4-tuple with the same hash.
    #[inline(always)]
    pub fn find_again(&mut self, key: &FlowKey) -> Option<u32> {
        let (words, _) = key.words();
        let (last, slot) = self.last;
        if words[0] == last[0] && words[1] == last[1] {
            return Some(slot);
        }
        let slot = self.find(key, |_| true)?;
        self.last = (words, slot);
        Some(slot)
    }

    /// Adds a 4-tuple that is not in the table.
    pub fn insert(&mut self, key: &FlowKey, slot: u32) {
        self.last = NOTHING;
        let hash = self.hash(key);
        let mut at = hash as usize & self.mask;
        while self.entries[at].1 != EMPTY {
            at = (at + 1) & self.mask;
        }
        self.entries[at] = ((hash >> 32) as u32, slot);
    }

    /// Removes a 4-tuple and its slot, and moves later entries into the gap, so that no tombstones are needed. `key_of`
    /// gives the 4-tuple of another slot.
    pub fn remove(&mut self, key: &FlowKey, slot: u32, key_of: impl Fn(u32) -> FlowKey) {
        self.last = NOTHING;
        let mut at = self.hash(key) as usize & self.mask;
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
            let home = self.hash(&key_of(other)) as usize & self.mask;
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

    fn key(n: u32) -> FlowKey {
        let local = Endpoint::v4([10, 0, 0, 1], 80);
        let remote = if n.is_multiple_of(2) {
            Endpoint::v4([10, 1, (n >> 8) as u8, n as u8], 1000 + n as u16)
        } else {
            Endpoint::v6([n as u8; 16], n as u16)
        };
        FlowKey::from(&Flow { local, remote, device: 0 })
    }

    #[test]
    fn inserted_keys_are_found_and_removed_ones_are_not() {
        let mut table = Lookup::new(256, [1, 2, 3, 4]);
        for n in 0..256 {
            table.insert(&key(n), n);
        }
        for n in (0..256).step_by(3) {
            table.remove(&key(n), n, key);
        }
        for n in 0..256 {
            let found = table.find(&key(n), |slot| slot != EMPTY && key(slot) == key(n));
            assert_eq!(found, (!n.is_multiple_of(3)).then_some(n));
            if key(n).is_v4() {
                assert_eq!([table.find_again(&key(n)), table.find_again(&key(n))], [found; 2]);
            }
        }
    }
}
