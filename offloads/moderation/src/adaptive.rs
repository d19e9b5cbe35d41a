//! Dynamic interrupt moderation.

use crate::Counters;

/// Microseconds and frames, from eager to patient: net_dim's profile for receive queues that count from the event on.
const PROFILES: [(u32, u32); 5] = [(1, 256), (8, 256), (64, 256), (128, 256), (256, 256)];
/// Interrupts between two decisions.
const EVENTS: u64 = 64;
/// Changes of less than a tenth are none.
const TENTH: u64 = 10;
/// Frames per second below which small frames are not worth waiting for, and what is small.
const SLOW: u64 = 20_000;
const SMALL: u64 = 4096;

/// Which way the search goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tune {
    /// It was best here: stays until something changes.
    Parked,
    Right,
    Left,
}

/// Rates per second.
#[derive(Clone, Copy, Default, Debug)]
struct Rates {
    bytes: u64,
    frames: u64,
    interrupts: u64,
}

#[derive(Debug)]
pub(crate) struct Adaptive {
    profile: usize,
    tune: Tune,
    steps: u32,
    began: (u64, Counters),
    last: Option<Rates>,
}

impl Default for Adaptive {
    fn default() -> Self {
        Adaptive { profile: 0, tune: Tune::Right, steps: 0, began: (0, Counters::default()), last: None }
    }
}

/// Whether `now` is better than, worse than, or the same as `before`.
fn compare(now: u64, before: u64) -> core::cmp::Ordering {
    if now.abs_diff(before) * TENTH <= before { core::cmp::Ordering::Equal } else { now.cmp(&before) }
}

impl Rates {
    /// More bytes are better, then more frames, then fewer interrupts.
    fn against(&self, before: &Rates) -> core::cmp::Ordering {
        compare(self.bytes, before.bytes)
            .then(compare(self.frames, before.frames))
            .then(compare(before.interrupts, self.interrupts))
    }
}

impl Adaptive {
    pub fn limits(&self) -> (u32, u32) {
        PROFILES[self.profile]
    }

    /// The consumer has been told once more.
    pub fn sample(&mut self, counters: &Counters, now: u64) {
        let (since, before) = self.began;
        if since == 0 {
            self.began = (now, *counters);
            return;
        }
        let took = now.saturating_sub(since).max(1);
        if counters.interrupts - before.interrupts < EVENTS && took < 100_000 {
            return;
        }
        let rate = |now: u64, before: u64| (now - before) * 1_000_000 / took;
        let rates = Rates {
            bytes: rate(counters.bytes, before.bytes),
            frames: rate(counters.frames, before.frames),
            interrupts: rate(counters.interrupts, before.interrupts),
        };
        self.began = (now, *counters);
        self.decide(rates);
    }

    fn decide(&mut self, rates: Rates) {
        use core::cmp::Ordering::{Equal, Greater, Less};
        if rates.frames < SLOW && rates.bytes < SMALL * rates.frames {
            // Requests and answers: whatever they waited for would be their latency.
            (self.profile, self.tune, self.steps, self.last) = (0, Tune::Parked, 0, Some(rates));
            return;
        }
        let Some(last) = self.last.replace(rates) else { return self.step() };
        match (self.tune, rates.against(&last)) {
            (Tune::Parked, Equal) => {}
            (Tune::Parked, _) => {
                self.steps = 0;
                self.tune = if self.profile == 0 { Tune::Right } else { Tune::Left };
                self.step();
            }
            (_, Greater | Equal) if self.steps < 2 * PROFILES.len() as u32 => self.step(),
            (Tune::Right, Less) => {
                self.tune = Tune::Left;
                self.step();
            }
            (Tune::Left, Less) => {
                self.tune = Tune::Right;
                self.step();
                self.tune = Tune::Parked;
            }
            _ => self.tune = Tune::Parked,
        }
    }

    /// One step the way that is tried; at an end it stays.
    fn step(&mut self) {
        self.steps += 1;
        match self.tune {
            Tune::Right if self.profile + 1 < PROFILES.len() => self.profile += 1,
            Tune::Left if self.profile > 0 => self.profile -= 1,
            _ => self.tune = Tune::Parked,
        }
    }
}
