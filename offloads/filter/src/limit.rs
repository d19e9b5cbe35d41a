//! Rate limits: a token bucket in one word, so that several workers can share it without a lock.
//!
//! The word holds the time at which the bucket is full again (the theoretical arrival time of the generic cell rate
//! algorithm, ITU-T I.371), in nanoseconds. A frame passes if the bucket holds any tokens at all, and takes as many as
//! it has bytes: so a frame that is larger than the burst passes, too, and later frames wait longer. So in any time t
//! at most rate · t + burst + one frame pass.
//!
//! Without tokens a frame waits until there are some, if no more than another burst waits already; else it is dropped.
//! So the limit looks to TCP like the queue of a slow link, and TCP does not lose whole windows.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// The unit in which a limit counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unit {
    /// Bytes of frames, Ethernet header included.
    Bytes,
    /// Frames.
    Packets,
}

/// A rate limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Limit {
    /// The unit in which the limit counts.
    pub unit: Unit,
    /// Bytes or packets per second; not 0.
    pub rate: u64,
    /// Bytes or packets that may pass at once after a pause; at least the number for which one nanosecond yields
    /// tokens.
    pub burst: u64,
}

/// Highest rate and largest burst: products with a billion must fit into 128 bits, times into 64.
pub(crate) const MOST: u64 = 1 << 40;

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

impl Limit {
    /// Least burst for a rate: the tokens of one nanosecond, which is the bucket's unit of time.
    pub(crate) fn least_burst(rate: u64) -> u64 {
        rate.div_ceil(SECOND).max(1)
    }

    /// Nanoseconds in which the rate yields `amount` tokens.
    fn nanos(&self, amount: u64) -> u64 {
        (u128::from(amount) * u128::from(SECOND) / u128::from(self.rate.max(1))).min(1 << 60) as u64
    }

    /// The time at which a frame that comes at `now` passes, both in microseconds: `now`, or later if it `can_wait`.
    /// Takes the frame's tokens. None if the frame exceeds the limit.
    pub fn admit(&self, bucket: &AtomicU64, packets: u64, bytes: u64, now: u64, can_wait: bool) -> Option<u64> {
        let amount = if self.unit == Unit::Bytes { bytes } else { packets };
        let (nanos, cost, burst) = (now.saturating_mul(1000), self.nanos(amount), self.nanos(self.burst).max(1));
        // There are no tokens while as much as the burst is lacking.
        let wait = |full_at: u64| (full_at.max(nanos) - nanos).checked_sub(burst);
        let take = |full_at: u64| {
            let passes = wait(full_at).is_none_or(|wait| can_wait && wait < burst);
            passes.then(|| full_at.max(nanos).saturating_add(cost))
        };
        let full_at = bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(wait(full_at).map_or(now, |wait| now + wait / 1000 + 1))
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            Unit::Packets => write!(out, "limit {}pps burst {}", self.rate, self.burst),
            Unit::Bytes => {
                let bits = self.rate * 8;
                let (number, unit) = [(1_000_000_000, "gbit"), (1_000_000, "mbit"), (1000, "kbit")]
                    .into_iter()
                    .find(|(size, _)| bits.is_multiple_of(*size))
                    .map_or((bits, "bit"), |(size, unit)| (bits / size, unit));
                let (burst, of) = [(1_000_000, "mb"), (1000, "kb")]
                    .into_iter()
                    .find(|(size, _)| self.burst.is_multiple_of(*size))
                    .map_or((self.burst, "b"), |(size, unit)| (self.burst / size, unit));
                write!(out, "limit {number}{unit} burst {burst}{of}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10 Mb/s offered three times as much, for ten seconds.
    #[test]
    fn a_limit_is_exact_and_its_burst_bounded() {
        let limit = Limit { unit: Unit::Bytes, rate: 1_250_000, burst: 64_000 };
        for can_wait in [false, true] {
            let bucket = AtomicU64::new(0);
            let (start, mut passed, mut last) = (5_000_000, 0, 0);
            for frame in 0..25_000u64 {
                let now = start + frame * 400;
                let Some(at) = limit.admit(&bucket, 1, 1500, now, can_wait) else { continue };
                assert!(at >= last && at <= now + if can_wait { 51_200 + 1 } else { 0 }, "{at} after {last}, at {now}");
                last = at;
                passed += 1500;
                let most = limit.rate * (at - start) / 1_000_000 + limit.burst + 1500;
                assert!(passed <= most, "{passed} of {most} bytes after frame {frame}");
            }
            assert!(passed + 3000 >= limit.rate * 10 + limit.burst, "{passed}");
        }
    }

    /// A bucket with the smallest burst still lets frames pass, one after the other.
    #[test]
    fn the_smallest_burst_lets_frames_pass() {
        for (unit, rate) in [(Unit::Bytes, 1_250_000_000), (Unit::Bytes, MOST), (Unit::Packets, MOST), (Unit::Packets, 3)] {
            let limit = Limit { unit, rate, burst: Limit::least_burst(rate) };
            for can_wait in [false, true] {
                let bucket = AtomicU64::new(0);
                let passed = (1..10).filter(|at| limit.admit(&bucket, 1, 1500, at * 1_000_000, can_wait) == Some(at * 1_000_000));
                assert_eq!(passed.count(), 9, "{limit}, {can_wait}");
            }
        }
    }

    #[test]
    fn packets_are_counted_and_large_frames_take_more() {
        let limit = Limit { unit: Unit::Packets, rate: 100, burst: 10 };
        let bucket = AtomicU64::new(0);
        let admits = |packets, now| limit.admit(&bucket, packets, 60, now, false).is_some();
        assert_eq!((0..50).filter(|_| admits(1, 1)).count(), 10);
        // Part of a token: one frame passes, and the next waits until that is paid back.
        assert!(admits(1, 9_000) && !admits(1, 10_000));
        // A frame that stands for 40 frames takes the tokens of 40.
        assert!(admits(40, 10_002));
        assert!(!admits(1, 410_000) && admits(1, 410_002));
    }
}
