//! Interrupt moderation: whoever fills a queue asks here when to tell the consumer. Off, by time and count, or adaptively in the manner of
//! Linux's dynamic interrupt moderation (`lib/dim`): a small table of settings, and steps to the left or right in it as long as they bring
//! more bytes, then more packets, or fewer interrupts for the same.
//!
//! No I/O and no clock. Times in microseconds.
#![no_std]
#![forbid(unsafe_code)]

mod adaptive;

use adaptive::Adaptive;
use serde::{Deserialize, Serialize};

/// When the consumer is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// At once.
    #[default]
    Off,
    /// After so much time, or so many frames.
    Static {
        /// Microseconds since the first of them (`rx-usecs`).
        time: u32,
        /// Frames (`rx-frames`).
        frames: u32,
    },
    /// As it turns out to be best.
    Adaptive,
}

/// What was done so far: interrupts, and what they told of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Interrupts.
    pub interrupts: u64,
    /// Frames.
    pub frames: u64,
    /// Bytes.
    pub bytes: u64,
}

/// One queue's moderation.
#[derive(Debug)]
pub struct Moderator {
    mode: Mode,
    adaptive: Adaptive,
    /// What waits.
    frames: u32,
    bytes: u64,
    since: u64,
    counters: Counters,
}

impl Moderator {
    /// With nothing waiting.
    pub fn new(mode: Mode) -> Moderator {
        Moderator { mode, adaptive: Adaptive::default(), frames: 0, bytes: 0, since: 0, counters: Counters::default() }
    }

    /// Whether anything is ever held back.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.mode != Mode::Off
    }

    fn limits(&self) -> (u32, u32) {
        match self.mode {
            Mode::Off => (0, 1),
            Mode::Static { time, frames } => (time, frames.max(1)),
            Mode::Adaptive => self.adaptive.limits(),
        }
    }

    /// A frame waits. Whether its consumer is to be told now.
    pub fn queued(&mut self, bytes: usize, now: u64) -> bool {
        if self.frames == 0 {
            self.since = now;
        }
        self.frames += 1;
        self.bytes += bytes as u64;
        let (time, frames) = self.limits();
        self.frames >= frames || now >= self.since + u64::from(time)
    }

    /// When the consumer is to be told of what waits, if anything does.
    #[inline]
    pub fn due(&self) -> Option<u64> {
        (self.frames > 0).then(|| self.since + u64::from(self.limits().0))
    }

    /// The consumer has been told of everything that waited.
    pub fn told(&mut self, now: u64) {
        if self.frames == 0 {
            return;
        }
        self.counters.interrupts += 1;
        self.counters.frames += u64::from(self.frames);
        self.counters.bytes += self.bytes;
        (self.frames, self.bytes) = (0, 0);
        if self.mode == Mode::Adaptive {
            self.adaptive.sample(&self.counters, now);
        }
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The time and count that hold now.
    pub fn now_in_force(&self) -> (u32, u32) {
        self.limits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_count_are_kept() {
        let mut moderator = Moderator::new(Mode::Static { time: 50, frames: 4 });
        assert_eq!(moderator.due(), None);
        assert!(!moderator.queued(100, 1000));
        assert_eq!(moderator.due(), Some(1050));
        assert!(!moderator.queued(100, 1010) && !moderator.queued(100, 1020));
        assert!(moderator.queued(100, 1030), "the fourth frame");
        moderator.told(1030);
        assert!(!moderator.queued(100, 2000));
        assert!(moderator.queued(100, 2050), "fifty microseconds");
        moderator.told(2050);
        assert_eq!(moderator.counters(), Counters { interrupts: 2, frames: 6, bytes: 600 });
        assert!(Moderator::new(Mode::Off).queued(1, 0));
    }

    /// What a queue does with frames of 64 KB that come every `interval` microseconds for a second: interrupts, and the longest wait.
    fn second(moderator: &mut Moderator, interval: u64, bytes: usize, from: u64) -> (u64, u64) {
        let (before, mut longest, mut first) = (moderator.counters().interrupts, 0, None);
        for now in from..from + 1_000_000 {
            let arrives = (now - from).is_multiple_of(interval);
            let tell = arrives && {
                first = first.or(Some(now));
                moderator.queued(bytes, now)
            };
            if tell || moderator.due().is_some_and(|due| due <= now) {
                longest = longest.max(now - first.take().unwrap_or(now));
                moderator.told(now);
            }
        }
        (moderator.counters().interrupts - before, longest)
    }

    #[test]
    fn adaptive_batches_floods_and_hurries_single_frames() {
        let mut moderator = Moderator::new(Mode::Adaptive);
        second(&mut moderator, 4, 1500, 0);
        let (interrupts, longest) = second(&mut moderator, 4, 1500, 1_000_000);
        assert!(interrupts < 25_000 && longest <= 256, "{interrupts} interrupts for 250000 frames, {longest} µs");
        // The flood ends, and somebody plays ping-pong.
        second(&mut moderator, 100, 66, 2_000_000);
        let (interrupts, longest) = second(&mut moderator, 100, 66, 3_000_000);
        assert!(interrupts == 10_000 && longest <= 8, "{interrupts} interrupts, a frame waited for {longest} µs");
    }
}
