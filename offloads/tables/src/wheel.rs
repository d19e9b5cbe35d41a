//! A timing wheel of slots. A slot is entered again only when its next time-out is earlier than its entry. When its
//! bucket expires, the caller asks the connection for its time-out, so that time-outs which only move later cost
//! nothing.

use alloc::vec::Vec;

/// Number of buckets; the wheel covers as many ticks.
const BUCKETS: usize = 8192;

/// A timing wheel whose buckets are `TICK` microseconds wide.
///
/// The entries of all buckets lie in one array, and each bucket is a list in it: so the wheel is a single allocation,
/// of 8 bytes times the largest number of entries that it has had at a time. A `Vec` for each bucket would mean
/// thousands of small allocations all over the heap, which would keep the heap's pages from going back to the system.
pub struct Wheel<const TICK: u64> {
    /// Of each bucket the entry that came last, or [`NONE`].
    buckets: Vec<u32>,
    entries: Vec<Entry>,
    /// The first free entry, or [`NONE`]; the other free entries are linked to it as in a bucket.
    free: u32,
    /// A bit for each bucket that has entries.
    occupied: [u64; BUCKETS / 64],
    /// The first bucket that has not expired, counted in ticks since time 0.
    next: u64,
}

/// A slot in a bucket, and the entry that came before it.
struct Entry {
    slot: u32,
    next: u32,
}

/// The end of a list.
const NONE: u32 = u32::MAX;

impl<const TICK: u64> Wheel<TICK> {
    /// Makes an empty wheel at time `now` in microseconds.
    pub fn new(now: u64) -> Self {
        let buckets = alloc::vec![NONE; BUCKETS];
        Wheel { buckets, entries: Vec::new(), free: NONE, occupied: [0; BUCKETS / 64], next: now / TICK }
    }

    /// Enters a slot for time `at` in microseconds, or for the end of the wheel if that is earlier. Returns the tick of
    /// the entry.
    pub fn enter(&mut self, slot: u32, at: u64) -> u64 {
        let tick = at.div_ceil(TICK).clamp(self.next, self.next + BUCKETS as u64 - 1);
        let bucket = tick as usize % BUCKETS;
        let entry = Entry { slot, next: self.buckets[bucket] };
        self.buckets[bucket] = match self.entries.get_mut(self.free as usize) {
            Some(place) => core::mem::replace(&mut self.free, core::mem::replace(place, entry).next),
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.occupied[bucket / 64] |= 1 << (bucket % 64);
        tick
    }

    /// The tick of an entry for time `at`, if the wheel covers it: to see whether an existing entry is early enough.
    #[inline]
    pub fn tick_of(at: u64) -> u64 {
        at.div_ceil(TICK)
    }

    /// Time of the next bucket in microseconds, whether it has entries or not.
    #[inline]
    pub fn next_tick(&self) -> u64 {
        self.next * TICK
    }

    /// Moves the slots of the next bucket that is due at `now` to `out`, and returns the bucket's tick. None if no
    /// bucket is due.
    pub fn expire(&mut self, now: u64, out: &mut Vec<u32>) -> Option<u64> {
        let due = now / TICK;
        while self.next <= due {
            let bucket = self.next as usize % BUCKETS;
            if self.occupied[bucket / 64] == 0 {
                // Skip the rest of an empty word at once.
                let step = 64 - (bucket % 64) as u64;
                self.next = (self.next + step).min(due + 1);
                continue;
            }
            self.next += 1;
            if self.occupied[bucket / 64] >> (bucket % 64) & 1 == 1 {
                self.occupied[bucket / 64] &= !(1 << (bucket % 64));
                self.empty(bucket, out);
                return Some(self.next - 1);
            }
        }
        None
    }

    /// Moves the slots of a bucket to `out`, in the order in which they came.
    fn empty(&mut self, bucket: usize, out: &mut Vec<u32>) {
        let first = out.len();
        let mut at = core::mem::replace(&mut self.buckets[bucket], NONE);
        while let Some(entry) = self.entries.get_mut(at as usize) {
            out.push(entry.slot);
            let next = core::mem::replace(&mut entry.next, self.free);
            (self.free, at) = (at, next);
        }
        out[first..].reverse();
    }

    /// Time of the next bucket with entries, in microseconds.
    pub fn next_expiry(&self) -> Option<u64> {
        let mut ahead = 0;
        while ahead < BUCKETS as u64 {
            let bucket = (self.next + ahead) as usize % BUCKETS;
            let word = self.occupied[bucket / 64] >> (bucket % 64);
            if word != 0 {
                return Some((self.next + ahead + u64::from(word.trailing_zeros())) * TICK);
            }
            ahead += 64 - (bucket % 64) as u64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_up_in_time_and_once() {
        let mut wheel = Wheel::<128>::new(1_000_000);
        wheel.enter(1, 1_000_500);
        wheel.enter(2, 1_100_000);
        wheel.enter(3, 9_000_000);
        assert!(wheel.next_expiry().unwrap() >= 1_000_500);
        let mut out = Vec::new();
        assert_eq!(wheel.expire(1_000_400, &mut out), None);
        wheel.expire(1_000_700, &mut out);
        assert_eq!(out, [1]);
        out.clear();
        while wheel.expire(1_100_200, &mut out).is_some() {}
        assert_eq!(out, [2]);
        out.clear();
        // A time beyond the wheel's end expires there, to be entered again.
        while wheel.expire(3_000_000, &mut out).is_some() {}
        assert_eq!(out, [3]);
    }

    #[test]
    fn slots_of_a_bucket_come_up_in_order_and_leave_their_places_to_others() {
        let mut wheel = Wheel::<128>::new(0);
        let mut out = Vec::new();
        for round in 0..100u64 {
            let at = round * 1000 + 500;
            for slot in 0..50 {
                wheel.enter(slot, at);
                wheel.enter(100 + slot, at + 300);
            }
            while wheel.expire(at + 600, &mut out).is_some() {}
            assert_eq!(out, (0..50).chain(100..150).collect::<Vec<u32>>());
            out.clear();
        }
        assert_eq!(wheel.entries.len(), 100);
        assert_eq!(wheel.next_expiry(), None);
    }

    #[test]
    fn the_next_entry_is_found_all_around_the_wheel() {
        for start in [0, 1, 63, 64, 8191, 8192, 12_345] {
            for ahead in [0, 1, 62, 64, 5000, 8190, 8191] {
                let mut wheel = Wheel::<1>::new(start);
                assert_eq!(wheel.next_expiry(), None);
                wheel.enter(1, start + ahead);
                assert_eq!(wheel.next_expiry(), Some(start + ahead));
            }
        }
    }
}
