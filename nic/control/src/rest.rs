//! Decides what a worker without work does: poll on, nap, or sleep until it is woken.
//!
//! A worker that sleeps is woken by the next frame or message, which costs the worker and the sender some microseconds
//! each. Under load more frames come soon in any case. So the worker naps for a short time instead, in which no sender
//! wakes it, and then handles all frames that have arrived at once; the programs and peers behind it get their frames
//! in batches, too. But a nap delays a load that waits for the worker's answer before it sends more. So the worker
//! continues to nap only while naps bring several frames each on average. Loads come in bursts, so a single nap with
//! few frames proves nothing: frames that earlier naps brought beyond the minimum are credited. After a nap that
//! brought nothing the worker sleeps.

/// Microseconds of a nap.
pub(crate) const NAP: u64 = 50;
/// Least number of frames that a nap must bring on average.
const ENOUGH: u64 = 3;
/// Most frames beyond [`ENOUGH`] that are credited to later naps.
const MOST_CREDIT: u64 = 8 * ENOUGH;
/// The period over which frames are counted while the worker polls or sleeps, and the longest average interval of
/// frames with which it tries a nap, microseconds.
const PERIOD: u64 = 250;
const INTERVAL: u64 = 25;
/// Microseconds until the next try after naps that brought too little: the first value, and the largest. Each try that
/// fails at once doubles the pause.
const LEAST_PAUSE: u64 = 500;
const MOST_PAUSE: u64 = 20_000;

/// Least microseconds of polling without work.
const LEAST_SPIN: u64 = 2;

/// What to do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Idle {
    /// Look for work again at once.
    Poll,
    /// Sleep for [`NAP`] at most, without being woken.
    Nap,
    /// Sleep until woken.
    Sleep,
}

/// A worker's recent load. Times are in microseconds.
#[derive(Debug)]
pub(crate) struct Rest {
    /// How long it polls without work at most, and now.
    longest_spin: u64,
    spin: u64,
    idle_since: u64,
    /// Whether there has been a round without work since then.
    idled: bool,
    /// Number of frames at the beginning of the last nap, or of the period.
    frames: u64,
    napping: bool,
    /// Frames that the naps have brought beyond [`ENOUGH`].
    credit: u64,
    period_began: u64,
    pause: u64,
    next_try: u64,
}

impl Rest {
    pub fn new(spin: u64, now: u64) -> Rest {
        Rest {
            longest_spin: spin,
            spin,
            idle_since: now,
            idled: false,
            frames: 0,
            napping: false,
            credit: 0,
            period_began: now,
            pause: LEAST_PAUSE,
            next_try: now,
        }
    }

    /// Records that there was work, or that the worker was woken for some. If the wait was short, the worker then polls
    /// for up to twice as long; after a long wait it polls for half as long as before.
    pub fn worked(&mut self, now: u64) {
        if std::mem::take(&mut self.idled) {
            let waited = now - self.idle_since;
            self.spin =
                if waited <= self.longest_spin / 2 { (self.spin - self.spin / 16).max(2 * waited) } else { self.spin / 2 };
            self.spin = self.spin.max(LEAST_SPIN).min(self.longest_spin);
        }
        self.idle_since = now;
    }

    /// What to do after a round without work. `frames` is the number of frames so far, in either direction.
    pub fn idle(&mut self, now: u64, frames: u64) -> Idle {
        self.idled = true;
        let fresh = frames.wrapping_sub(self.frames);
        if self.napping {
            self.frames = frames;
            if let Some(credit) = (self.credit + fresh).checked_sub(ENOUGH) {
                self.credit = credit.min(MOST_CREDIT);
                if self.credit == MOST_CREDIT {
                    self.pause = LEAST_PAUSE;
                }
                return if fresh == 0 { Idle::Sleep } else { Idle::Nap };
            }
            (self.napping, self.credit, self.period_began, self.next_try) = (false, 0, now, now + self.pause);
            self.pause = (2 * self.pause).min(MOST_PAUSE);
        } else if now - self.period_began >= PERIOD {
            let busy = fresh * INTERVAL >= now - self.period_began;
            (self.frames, self.period_began) = (frames, now);
            if busy && now >= self.next_try {
                self.napping = true;
                return Idle::Nap;
            }
        }
        if now - self.idle_since > self.spin { Idle::Sleep } else { Idle::Poll }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_load_the_worker_polls_and_then_sleeps() {
        let mut rest = Rest::new(100, 0);
        assert_eq!([10, 100, 101, 5000].map(|now| rest.idle(now, 0)), [Idle::Poll, Idle::Poll, Idle::Sleep, Idle::Sleep]);
        rest.worked(5000);
        assert_eq!(rest.idle(5040, 1), Idle::Poll);
    }

    #[test]
    fn polling_lasts_as_long_as_it_pays() {
        let (mut rest, mut now) = (Rest::new(100, 0), 0);
        // How long it polls before it sleeps, when work comes every `gap` microseconds.
        let mut polls = |gap: u64| {
            let mut sleeps = 0;
            for _ in 0..50 {
                sleeps = (1..=gap).find(|waited| rest.idle(now + waited, 0) == Idle::Sleep).unwrap_or(gap);
                now += gap;
                rest.worked(now);
            }
            sleeps
        };
        assert_eq!([polls(1000), polls(10), polls(25), polls(60)], [3, 10, 25, 3]);
    }

    /// The numbers of naps and of frames in a second of a load that has `most` frames under way at a time, each of
    /// which comes `delay` microseconds after the worker handled the one before.
    fn load(most: u64, delay: u64) -> (usize, u64) {
        let (mut rest, mut naps, mut frames, mut now) = (Rest::new(100, 0), 0, 0, 0);
        let mut arrivals: Vec<u64> = (0..most).map(|number| number * delay / most).collect();
        while now < 1_000_000 {
            let mut worked = false;
            for at in arrivals.iter_mut().filter(|at| **at <= now) {
                (*at, worked) = (now + delay, true);
                frames += 1;
            }
            if worked {
                rest.worked(now);
            } else if rest.idle(now, frames) == Idle::Nap {
                naps += 1;
                now += NAP;
            }
            now += 1;
        }
        (naps, frames)
    }

    #[test]
    fn a_load_of_many_gets_naps() {
        assert!(load(64, 300).0 > 10_000);
    }

    #[test]
    fn a_load_in_bursts_is_not_polled_for() {
        let (mut rest, mut frames, mut polls, mut now) = (Rest::new(100, 0), 0, 0, 0);
        // Bursts of 4 to 36 frames over 100 microseconds, a lull of 200 microseconds between them.
        for round in 0..1000 {
            for at in 0..4 {
                frames += 1 + round % 9;
                let next = 300 * round + 25 * (at + 1) + if at == 3 { 200 } else { 0 };
                now = now.max(300 * round + 25 * at);
                rest.worked(now);
                while now < next {
                    match rest.idle(now, frames) {
                        Idle::Poll => (polls, now) = (polls + 1, now + 1),
                        Idle::Nap => now += NAP,
                        Idle::Sleep => now = next,
                    }
                }
            }
        }
        assert!(polls < now / 20, "{polls} of {now}");
    }

    #[test]
    fn a_load_that_waits_for_each_answer_is_hardly_delayed() {
        let (naps, frames) = load(1, 9);
        assert!(naps < 60 && frames > 95_000, "{naps} {frames}");
    }

    #[test]
    fn naps_end_with_the_load() {
        let mut rest = Rest::new(100, 0);
        let mut frames = 0;
        for now in (0..10_000).step_by(60) {
            frames += 10;
            rest.worked(now);
            rest.idle(now, frames);
        }
        assert_ne!(rest.idle(10_000, frames), Idle::Nap);
        assert_eq!(rest.idle(10_101, frames), Idle::Sleep);
    }
}
