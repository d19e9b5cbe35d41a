//! Rate limits: a token bucket in one word, so that several workers can share it without a lock.
//!
//! The word holds the time at which the bucket is full again (the theoretical arrival time of the generic cell rate algorithm, ITU-T
//! I.371), in nanoseconds. A frame passes if the bucket holds any tokens at all, and takes as many as it has bytes: a frame that is
//! larger than the burst passes, too, and those after it wait longer. So in any time t at most rate · t + burst + one frame pass.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// What a limit counts.
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
    /// What is counted.
    pub unit: Unit,
    /// Bytes or packets per second; not 0.
    pub rate: u64,
    /// Bytes or packets that may pass at once after a pause; not 0.
    pub burst: u64,
}

/// Highest rate and largest burst: products with a billion must fit into 128 bits, times into 64.
pub(crate) const MOST: u64 = 1 << 40;

impl Limit {
    /// Nanoseconds in which `amount` tokens come.
    fn nanos(&self, amount: u64) -> u64 {
        (u128::from(amount) * 1_000_000_000 / u128::from(self.rate.max(1))).min(1 << 60) as u64
    }

    /// Whether a frame passes at `now`, microseconds. It takes its tokens if so.
    pub fn admits(&self, bucket: &AtomicU64, packets: u64, bytes: u64, now: u64) -> bool {
        let amount = if self.unit == Unit::Bytes { bytes } else { packets };
        let (now, cost, burst) = (now.saturating_mul(1000), self.nanos(amount), self.nanos(self.burst));
        let take = |full_at: u64| {
            let full_at = full_at.max(now);
            // Tokens lack for full_at - now nanoseconds' worth; with the whole burst lacking there are none.
            (full_at - now < burst).then_some(full_at.saturating_add(cost))
        };
        bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
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
        let bucket = AtomicU64::new(0);
        let (start, mut passed) = (5_000_000, 0);
        for frame in 0..25_000u64 {
            let now = start + frame * 400;
            passed += if limit.admits(&bucket, 1, 1500, now) { 1500 } else { 0 };
            let most = limit.rate * (now - start) / 1_000_000 + limit.burst + 1500;
            assert!(passed <= most, "{passed} of {most} bytes after frame {frame}");
        }
        assert!(passed + 1500 >= limit.rate * 10 + limit.burst - 2000, "{passed}");
    }

    #[test]
    fn packets_are_counted_and_large_frames_take_more() {
        let limit = Limit { unit: Unit::Packets, rate: 100, burst: 10 };
        let bucket = AtomicU64::new(0);
        let passed = (0..50).filter(|_| limit.admits(&bucket, 1, 60, 1)).count();
        assert_eq!(passed, 10);
        // Part of a token: one frame passes, and the next waits until that is paid back.
        assert!(limit.admits(&bucket, 1, 60, 9_000));
        assert!(!limit.admits(&bucket, 1, 60, 10_000));
        // A frame that stands for 40 takes the tokens of 40.
        assert!(limit.admits(&bucket, 40, 60_000, 10_002));
        assert!(!limit.admits(&bucket, 1, 60, 410_000));
        assert!(limit.admits(&bucket, 1, 60, 410_002));
    }
}
