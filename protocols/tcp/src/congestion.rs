//! Congestion avoidance: slow start with HyStart's delay test, and CUBIC (RFC 9438). Windows are in segments, as in
//! Linux.

use crate::rtt::Rtt;
use crate::time::Instant;
use baton_image::nic;

/// RFC 6928.
pub(crate) const INITIAL_WINDOW: u32 = 10;
/// β of RFC 9438 section 4.6, as a fraction of 1024 (0.7).
const BETA: u64 = 717;
/// Fixed-point bits of fractional windows.
const SHIFT: u32 = 10;

/// Segments of the largest window: twice as many as may be in flight, since slow start doubles a window that is in use.
pub(crate) const MOST_WINDOW: u32 = 1 << 18;

/// A window in segments that came with an image, as far as it is believed.
pub(crate) fn window(segments: u32) -> u32 {
    segments.clamp(1, MOST_WINDOW)
}

/// A slow start threshold that came with an image, as far as it is believed.
pub(crate) fn threshold(segments: u32) -> u32 {
    if segments > MOST_WINDOW { u32::MAX } else { segments.max(2) }
}

#[derive(Clone, Debug)]
pub(crate) struct Cubic {
    pub cwnd: u32,
    pub ssthresh: u32,
    /// W_max in segments << SHIFT.
    w_max: u64,
    /// Start of the current epoch; NEVER between a reduction and the first growth.
    epoch: Instant,
    /// K in milliseconds.
    k: u64,
    /// W_cubic's plateau in this epoch, segments << SHIFT.
    origin: u64,
    /// W_est (section 4.3), segments << SHIFT.
    w_est: u64,
    /// Acknowledged segments not yet turned into growth, << SHIFT.
    credit: u64,
    /// HyStart: smallest round-trip time of this round, and what ends the round.
    round_min: u32,
    /// Smallest round-trip time of data. The handshake's does not count: Linux, too, begins congestion control when it
    /// is over.
    delay_min: u32,
    round_samples: u8,
    pub round_end: u32,
}

impl Cubic {
    pub fn new() -> Self {
        Cubic {
            cwnd: INITIAL_WINDOW,
            ssthresh: u32::MAX,
            w_max: 0,
            epoch: Instant::NEVER,
            k: 0,
            origin: 0,
            w_est: 0,
            credit: 0,
            round_min: u32::MAX,
            delay_min: u32::MAX,
            round_samples: 0,
            round_end: 0,
        }
    }

    /// As an image holds it, with the part of the round-trip times that the image's own fields leave out.
    pub fn to_image(&self, rtt: &Rtt, now: Instant) -> nic::Congestion {
        let Cubic {
            cwnd: _,
            ssthresh: _,
            w_max,
            epoch,
            k,
            origin,
            w_est,
            credit,
            round_min,
            delay_min,
            round_samples,
            round_end,
        } = *self;
        let Rtt { smoothed: _, variation: _, min: _, min_at, backoff } = *rtt;
        let fits = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        nic::Congestion {
            w_max: fits(w_max),
            epoch_age: (epoch != Instant::NEVER).then(|| now.since(epoch)),
            k: fits(k),
            origin: fits(origin),
            w_est: fits(w_est),
            credit: credit as u16,
            round_min,
            delay_min,
            round_samples,
            round_end,
            min_rtt_age: now.age(Instant(min_at)),
            backoff,
        }
    }

    /// Takes up the state that an image holds beside window and threshold. The caller has checked `round_end`.
    pub fn take_up(&mut self, image: &nic::Congestion, rtt: &mut Rtt, now: Instant) {
        let nic::Congestion {
            w_max,
            epoch_age,
            k,
            origin,
            w_est,
            credit,
            round_min,
            delay_min,
            round_samples,
            round_end,
            min_rtt_age,
            backoff,
        } = *image;
        *self = Cubic {
            cwnd: self.cwnd,
            ssthresh: self.ssthresh,
            w_max: w_max.into(),
            epoch: epoch_age.map_or(Instant::NEVER, |age| now.ago(age)),
            k: k.into(),
            origin: origin.into(),
            w_est: w_est.into(),
            credit: u64::from(credit) & ((1 << SHIFT) - 1),
            round_min,
            delay_min,
            round_samples,
            round_end,
        };
        (rtt.min_at, rtt.backoff) = (now.ago(min_rtt_age.into()).0, backoff);
    }

    pub fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// A congestion event: returns the new slow start threshold (sections 4.6 and 4.7). The window itself is the
    /// caller's.
    pub fn reduce(&mut self) -> u32 {
        self.epoch = Instant::NEVER;
        let cwnd = u64::from(self.cwnd) << SHIFT;
        // Fast convergence: a flow that lost ground releases more.
        self.w_max = if cwnd < self.w_max { cwnd * (1024 + BETA) / 2048 } else { cwnd };
        ((u64::from(self.cwnd) * BETA / 1024) as u32).max(2)
    }

    /// `acked` segments were delivered while the window was the limit.
    pub fn on_ack(&mut self, mut acked: u32, min_rtt: u32, now: Instant) {
        if self.in_slow_start() {
            let room = self.ssthresh - self.cwnd;
            let step = acked.min(room);
            self.cwnd += step;
            acked -= step;
            if acked == 0 {
                return;
            }
        }
        self.avoid(u64::from(acked), min_rtt, now);
    }

    fn avoid(&mut self, acked: u64, min_rtt: u32, now: Instant) {
        let cwnd = u64::from(self.cwnd) << SHIFT;
        if self.epoch == Instant::NEVER {
            self.epoch = now;
            self.w_est = cwnd;
            self.credit = 0;
            if self.w_max <= cwnd {
                self.k = 0;
                self.origin = cwnd;
            } else {
                // K = cbrt((W_max - cwnd) / C) seconds with C = 0.4 (section 4.2); in ms: cbrt(Δ * 2.5e9).
                self.k = cube_root(((self.w_max - cwnd) * 2_500_000_000) >> SHIFT);
                self.origin = self.w_max;
            }
        }
        let elapsed = (now.since(self.epoch) + u64::from(min_rtt)) / 1000;
        let target = self.cubic_at(elapsed);
        // Growth per acknowledged segment in 1/1024 segments: up to the target within a round trip, at most 1.5 times
        // (section 4.4).
        let mut growth = if target > cwnd { ((target - cwnd).min(cwnd / 2) << SHIFT) / cwnd } else { 10 };
        // Section 4.3, with α = 3(1 - β)/(1 + β) = 0.53 until the flow is back where it was, then 1.
        let alpha = if self.w_est < self.w_max { 542 } else { 1024 };
        self.w_est += ((acked << SHIFT) * alpha) / cwnd.max(1);
        if self.w_est > cwnd {
            growth = growth.max(((self.w_est - cwnd) << SHIFT) / cwnd);
        }
        self.credit += growth.min(512) * acked;
        self.cwnd += (self.credit >> SHIFT) as u32;
        self.credit &= (1 << SHIFT) - 1;
    }

    /// W_cubic(t), segments << SHIFT, for t in milliseconds (section 4.2, figure 1).
    fn cubic_at(&self, t: u64) -> u64 {
        let distance = t.abs_diff(self.k).min(200_000);
        // C * d³ with C = 0.4 and d in ms: segments << SHIFT.
        let cube = distance * distance * distance;
        let delta = if cube < 1 << 50 { (cube << SHIFT) / 2_500_000_000 } else { (cube / 2_500_000_000) << SHIFT };
        if t < self.k { self.origin.saturating_sub(delta) } else { self.origin + delta }
    }

    /// HyStart's delay test: leaves slow start when the round-trip time of a round has grown (as Linux does).
    pub fn on_rtt(&mut self, rtt: u32) {
        self.delay_min = self.delay_min.min(rtt);
        if !self.in_slow_start() || self.cwnd < 16 {
            return;
        }
        self.round_min = self.round_min.min(rtt);
        self.round_samples = self.round_samples.saturating_add(1);
        let threshold = self.delay_min.saturating_add((self.delay_min / 8).clamp(4_000, 16_000));
        if self.round_samples >= 8 && self.round_min > threshold {
            self.ssthresh = self.cwnd;
        }
    }

    /// A round trip is over; `next` ends the new one.
    pub fn next_round(&mut self, next: u32) {
        self.round_end = next;
        self.round_min = u32::MAX;
        self.round_samples = 0;
    }
}

/// Integer cube root, rounded down.
fn cube_root(value: u64) -> u64 {
    let mut low = 0u64;
    let mut high = 2_642_245; // cbrt(2^64)
    while low < high {
        let middle = (low + high).div_ceil(2);
        if u128::from(middle) * u128::from(middle) * u128::from(middle) <= u128::from(value) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cube_roots() {
        for (value, root) in [(0, 0), (1, 1), (7, 1), (8, 2), (26, 2), (27, 3), (1_000_000_000_000, 10_000)] {
            assert_eq!(cube_root(value), root);
        }
    }

    /// After a loss at W_max the window is back there after K = cbrt(W_max * 0.3 / 0.4) seconds (RFC 9438 section 4.2).
    #[test]
    fn the_window_returns_to_w_max_after_k() {
        let mut cubic = Cubic::new();
        cubic.cwnd = 1000;
        cubic.ssthresh = cubic.reduce();
        cubic.cwnd = cubic.ssthresh;
        assert_eq!(cubic.cwnd, 700);
        let (mut now, rtt) = (Instant(0), 100_000u32);
        let mut reached = None;
        for _ in 0..200 {
            for _ in 0..cubic.cwnd {
                cubic.on_ack(1, rtt, now);
            }
            now = now.after(u64::from(rtt));
            if cubic.cwnd >= 990 && reached.is_none() {
                reached = Some(now.0 / 1_000_000);
            }
        }
        let seconds = reached.expect("the window never came back");
        assert!((6..=10).contains(&seconds), "K = 9.08 s, came back after {seconds} s");
    }
}
