//! From a 4-tuple to a slot: open addressing under a keyed hash, so that nobody who does not know the key can pile up collisions.

use baton_wire::Flow;
use siphasher::sip::SipHasher13;

const EMPTY: u32 = u32::MAX;

/// The table. It is at most half full, so that a probe rarely goes further than its first cache line.
pub(crate) struct Lookup {
    /// (upper half of the hash, slot).
    entries: Box<[(u32, u32)]>,
    mask: usize,
    hasher: SipHasher13,
    used: usize,
}

impl Lookup {
    pub fn new(slots: usize, key: (u64, u64)) -> Self {
        let size = (slots * 2).next_power_of_two().max(16);
        Lookup {
            entries: vec![(0, EMPTY); size].into(),
            mask: size - 1,
            hasher: SipHasher13::new_with_keys(key.0, key.1),
            used: 0,
        }
    }

    #[inline]
    fn hash(&self, flow: &Flow) -> u64 {
        let ports = (u32::from(flow.local.port) << 16 | u32::from(flow.remote.port)).to_le_bytes();
        if flow.is_v4() {
            let mut name = [0u8; 12];
            name[..4].copy_from_slice(&flow.local.v4_bytes());
            name[4..8].copy_from_slice(&flow.remote.v4_bytes());
            name[8..].copy_from_slice(&ports);
            self.hasher.hash(&name)
        } else {
            let mut name = [0u8; 36];
            name[..16].copy_from_slice(&flow.local.address);
            name[16..32].copy_from_slice(&flow.remote.address);
            name[32..].copy_from_slice(&ports);
            self.hasher.hash(&name)
        }
    }

    /// The slot of a flow; `is` says whether a slot really is the flow's.
    #[inline]
    pub fn find(&self, flow: &Flow, is: impl Fn(u32) -> bool) -> Option<u32> {
        if self.used == 0 {
            return None;
        }
        let hash = self.hash(flow);
        let (tag, mut at) = ((hash >> 32) as u32, hash as usize & self.mask);
        loop {
            let (entry_tag, slot) = self.entries[at];
            if slot == EMPTY {
                return None;
            }
            if entry_tag == tag && is(slot) {
                return Some(slot);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Adds a flow that is not in the table.
    pub fn insert(&mut self, flow: &Flow, slot: u32) {
        let hash = self.hash(flow);
        let mut at = hash as usize & self.mask;
        while self.entries[at].1 != EMPTY {
            at = (at + 1) & self.mask;
        }
        self.entries[at] = ((hash >> 32) as u32, slot);
        self.used += 1;
    }

    /// Removes a flow's slot, and closes the gap so that no tombstones are needed. `flow_of` names the flow of another slot.
    pub fn remove(&mut self, flow: &Flow, slot: u32, flow_of: impl Fn(u32) -> Flow) {
        let mut at = self.hash(flow) as usize & self.mask;
        while self.entries[at].1 != slot {
            if self.entries[at].1 == EMPTY {
                return;
            }
            at = (at + 1) & self.mask;
        }
        self.used -= 1;
        let mut gap = at;
        loop {
            at = (at + 1) & self.mask;
            let (tag, other) = self.entries[at];
            if other == EMPTY {
                break;
            }
            let home = self.hash(&flow_of(other)) as usize & self.mask;
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
    use baton_wire::Endpoint;

    fn flow(n: u32) -> Flow {
        let local = Endpoint::v4([10, 0, 0, 1], 80);
        let remote = if n.is_multiple_of(2) {
            Endpoint::v4([10, 1, (n >> 8) as u8, n as u8], 1000 + n as u16)
        } else {
            Endpoint::v6([n as u8; 16], n as u16)
        };
        Flow { local, remote }
    }

    #[test]
    fn what_is_in_is_found_and_what_is_out_is_not() {
        let mut table = Lookup::new(256, (1, 2));
        for n in 0..256 {
            table.insert(&flow(n), n);
        }
        for n in (0..256).step_by(3) {
            table.remove(&flow(n), n, flow);
        }
        for n in 0..256 {
            let found = table.find(&flow(n), |slot| flow(slot) == flow(n));
            assert_eq!(found, (!n.is_multiple_of(3)).then_some(n));
        }
    }
}
