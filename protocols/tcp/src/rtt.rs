//! Round-trip time and retransmission time-out (RFC 6298), with Linux's floor of 200 ms on the variance term.

/// Smallest variance term of the time-out in microseconds.
const RTO_FLOOR: u32 = 200_000;
/// Largest time-out (RFC 6298 section 2.5 allows a maximum of at least 60 s).
pub(crate) const RTO_MAX: u64 = 120_000_000;

/// Round-trip estimator; all values in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rtt {
    pub smoothed: u32,
    pub variation: u32,
    /// Smallest of the last five minutes or so; 0 when unknown.
    pub min: u32,
    /// The window of `min`: when it was set, in microseconds.
    pub min_at: u64,
    /// Doublings of the time-out since the last progress.
    pub backoff: u8,
}

impl Rtt {
    /// Takes a sample. A sample longer than the longest time-out, for example from a host that slept, counts as that
    /// time-out; so the estimate cannot overflow.
    pub fn sample(&mut self, rtt: u32, now: u64) {
        let rtt = rtt.clamp(1, RTO_MAX as u32);
        if self.min == 0 || rtt <= self.min || now.saturating_sub(self.min_at) > 300_000_000 {
            self.min = rtt;
            self.min_at = now;
        }
        if self.smoothed == 0 {
            self.smoothed = rtt;
            self.variation = rtt / 2;
            return;
        }
        let deviation = rtt.abs_diff(self.smoothed);
        self.variation = self.variation - self.variation / 4 + deviation / 4;
        self.smoothed = self.smoothed - self.smoothed / 8 + rtt / 8;
    }

    /// The time-out without back-off.
    pub fn base_timeout(&self) -> u64 {
        if self.smoothed == 0 {
            return 1_000_000;
        }
        u64::from(self.smoothed) + u64::from((self.variation * 4).max(RTO_FLOOR))
    }

    pub fn timeout(&self) -> u64 {
        (self.base_timeout() << self.backoff.min(16)).min(RTO_MAX)
    }
}
