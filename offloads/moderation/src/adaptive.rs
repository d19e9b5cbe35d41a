//! Dynamic interrupt moderation: a search for the best entry of a table of limits.

use crate::Counters;

/// Limits in microseconds and frames, from the shortest delay to the longest: net_dim's profile for receive queues
/// whose timer starts at the first frame.
const PROFILES: [(u32, u32); 5] = [(1, 256), (8, 256), (64, 256), (128, 256), (256, 256)];
/// Number of interrupts between two decisions; with fewer of them a decision is made after [`LONGEST`].
const EVENTS: u64 = 64;
/// Microseconds between two decisions at most.
const LONGEST: u64 = 100_000;
/// A change of at most one tenth counts as none.
const TENTH: u64 = 10;
/// Below this many frames per second, and this many bytes per frame, the traffic is requests and answers: delay then
/// costs latency and brings nothing.
const FEW_FRAMES: u64 = 20_000;
const SMALL_FRAME: u64 = 4096;

/// The direction of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tune {
    /// The search has ended here, and begins again when the rates change.
    Parked,
    /// Towards longer delays.
    Right,
    /// Towards shorter delays.
    Left,
}

/// Rates in the time between two decisions, per second.
#[derive(Clone, Copy, Default, Debug)]
struct Rates {
    bytes: u64,
    frames: u64,
    interrupts: u64,
}

/// The state of the search.
#[derive(Debug)]
pub(crate) struct Adaptive {
    /// Index into [`PROFILES`].
    profile: usize,
    tune: Tune,
    /// Steps since the search left [`Tune::Parked`].
    steps: u32,
    /// When the current measurement began, and the counters then.
    began: (u64, Counters),
    /// Rates of the last measurement.
    last: Option<Rates>,
}

impl Default for Adaptive {
    fn default() -> Self {
        Adaptive { profile: 0, tune: Tune::Right, steps: 0, began: (0, Counters::default()), last: None }
    }
}

/// Compares two rates; rates that differ by at most a tenth are equal.
fn compare(now: u64, before: u64) -> core::cmp::Ordering {
    if now.abs_diff(before) * TENTH <= before { core::cmp::Ordering::Equal } else { now.cmp(&before) }
}

impl Rates {
    /// Compares by bytes, then by frames (more is better), then by interrupts (fewer is better).
    fn against(&self, before: &Rates) -> core::cmp::Ordering {
        compare(self.bytes, before.bytes)
            .then(compare(self.frames, before.frames))
            .then(compare(before.interrupts, self.interrupts))
    }
}

impl Adaptive {
    /// Microseconds and frames of the current profile.
    pub fn limits(&self) -> (u32, u32) {
        PROFILES[self.profile]
    }

    /// Takes the counters after an interrupt at `now`, and decides once enough has been measured.
    pub fn sample(&mut self, counters: &Counters, now: u64) {
        let (since, before) = self.began;
        if since == 0 {
            self.began = (now, *counters);
            return;
        }
        let took = now.saturating_sub(since).max(1);
        if counters.interrupts - before.interrupts < EVENTS && took < LONGEST {
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
        if rates.frames < FEW_FRAMES && rates.bytes < SMALL_FRAME * rates.frames {
            // Requests and answers: each microsecond of delay would be latency.
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

    /// Makes one step in the current direction; parks at an end of the table.
    fn step(&mut self) {
        self.steps += 1;
        match self.tune {
            Tune::Right if self.profile + 1 < PROFILES.len() => self.profile += 1,
            Tune::Left if self.profile > 0 => self.profile -= 1,
            _ => self.tune = Tune::Parked,
        }
    }
}
