//! One direction of a link: rate, delay, a buffer, and faults. It does the work of Linux's netem where the kernel has
//! none.

use crate::rng::Rng;
use std::collections::BTreeMap;

/// The delays and faults that a link applies to frames. Probabilities are in parts per million, times in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impairments {
    /// Bits per second; 0 for no limit.
    pub rate: u64,
    /// One-way delay.
    pub delay: u64,
    /// Bytes that may wait for the rate; more are dropped at the tail. 0 for no limit.
    pub buffer: u64,
    /// Frames lost.
    pub loss: u32,
    /// Frames held back by `hold`.
    pub reorder: u32,
    /// How long a reordered frame is held back.
    pub hold: u64,
    /// Frames delivered twice.
    pub duplicate: u32,
    /// Frames with one bit flipped.
    pub corrupt: u32,
}

impl Impairments {
    /// Whether the link leaves frames as they are.
    pub fn is_clean(&self) -> bool {
        *self == Impairments::default()
    }
}

/// Something that a link can carry, such as a frame.
pub trait Carried: Clone {
    /// Its size on the wire in bytes.
    fn size(&self) -> usize;
    /// Flips one bit, chosen by `random`.
    fn corrupt(&mut self, random: u64);
}

impl Carried for Vec<u8> {
    fn size(&self) -> usize {
        self.len()
    }

    fn corrupt(&mut self, random: u64) {
        if !self.is_empty() {
            let bit = random as usize % (self.len() * 8);
            self[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// Counters of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames offered.
    pub offered: u64,
    /// Frames lost by chance.
    pub lost: u64,
    /// Frames dropped at the buffer's tail.
    pub overflowed: u64,
    /// Frames held back.
    pub reordered: u64,
    /// Frames duplicated.
    pub duplicated: u64,
    /// Frames corrupted.
    pub corrupted: u64,
}

/// One direction of a link.
#[derive(Clone, Debug)]
pub struct Link<T> {
    impairments: Impairments,
    rng: Rng,
    /// By time of delivery, then by order of entry.
    flying: BTreeMap<(u64, u64), T>,
    entered: u64,
    busy_until: u64,
    counters: Counters,
}

impl<T: Carried> Link<T> {
    /// A link; equal seeds give equal faults.
    pub fn new(impairments: Impairments, seed: u64) -> Self {
        let rng = Rng::new(seed);
        Link { impairments, rng, flying: BTreeMap::new(), entered: 0, busy_until: 0, counters: Counters::default() }
    }

    /// Sets the impairments for frames that are offered from now on.
    pub fn set_impairments(&mut self, impairments: Impairments) {
        self.impairments = impairments;
    }

    /// Offers a frame at `now` (microseconds).
    pub fn push(&mut self, mut frame: T, now: u64) {
        let i = self.impairments;
        self.counters.offered += 1;
        // All random numbers are drawn for every frame, so that the setting of one fault does not change which frames
        // the other faults hit.
        let (lost, held) = (self.rng.chance(i.loss), self.rng.chance(i.reorder));
        let (doubled, corrupted) = (self.rng.chance(i.duplicate), self.rng.chance(i.corrupt));
        let random = self.rng.next_u64();
        let mut leaves = now.max(self.busy_until);
        if i.rate > 0 {
            if i.buffer > 0 && (leaves - now) * i.rate / 8_000_000 + frame.size() as u64 > i.buffer.max(frame.size() as u64) {
                self.counters.overflowed += 1;
                return;
            }
            leaves += frame.size() as u64 * 8_000_000 / i.rate;
            self.busy_until = leaves;
        }
        if lost {
            self.counters.lost += 1;
            return;
        }
        if corrupted {
            frame.corrupt(random);
            self.counters.corrupted += 1;
        }
        let mut arrives = leaves + i.delay;
        if held {
            arrives += i.hold;
            self.counters.reordered += 1;
        }
        if doubled {
            self.counters.duplicated += 1;
            self.enter(arrives, frame.clone());
        }
        self.enter(arrives, frame);
    }

    fn enter(&mut self, arrives: u64, frame: T) {
        self.entered += 1;
        self.flying.insert((arrives, self.entered), frame);
    }

    /// The next frame that has arrived by `now`.
    pub fn pop(&mut self, now: u64) -> Option<T> {
        let first = self.flying.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    /// When the next frame arrives.
    pub fn next_arrival(&self) -> Option<u64> {
        self.flying.first_key_value().map(|(key, _)| key.0)
    }

    /// Counters so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_delay_and_buffer() {
        let settings = Impairments { rate: 8_000_000, delay: 500, buffer: 3000, ..Impairments::default() };
        let mut link = Link::new(settings, 1);
        for _ in 0..5 {
            link.push(vec![0u8; 1000], 0);
        }
        // 1 byte a microsecond: three fit the buffer at time 0, the fourth and fifth do not.
        assert_eq!(link.counters().overflowed, 2);
        assert_eq!(link.next_arrival(), Some(1500));
        assert!(link.pop(1499).is_none());
        assert!(link.pop(1500).is_some());
        assert!(link.pop(2500).is_some());
        assert!(link.pop(3500).is_some());
        assert!(link.pop(u64::MAX).is_none());
    }

    #[test]
    fn equal_seeds_lose_the_same_frames() {
        let settings = Impairments { loss: 100_000, ..Impairments::default() };
        let deliver = |seed| {
            let mut link = Link::new(settings, seed);
            (0..200u8).for_each(|n| link.push(vec![n], 0));
            std::iter::from_fn(|| link.pop(0)).collect::<Vec<_>>()
        };
        assert_eq!(deliver(7), deliver(7));
        assert_ne!(deliver(7), deliver(8));
        assert!((160..200).contains(&deliver(7).len()));
    }
}
