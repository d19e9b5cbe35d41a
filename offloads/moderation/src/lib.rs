//! Interrupt moderation: decides when the producer of a queue signals the consumer (an interrupt, a doorbell). Off, by
//! time and count, or adaptively in the manner of Linux's dynamic interrupt moderation (`lib/dim`): a small table of
//! limits in which the search steps to the left or right as long as that brings more bytes, else more packets, else
//! fewer interrupts for the same; or at the end of a burst.
//!
//! No I/O and no clock. Times are in microseconds.
#![no_std]
#![forbid(unsafe_code)]

mod adaptive;

use adaptive::Adaptive;
use serde::{Deserialize, Serialize};

/// When the consumer is signalled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// At every frame.
    #[default]
    Off,
    /// After a time or a number of frames, whichever comes first.
    Static {
        /// Microseconds since the first waiting frame (`rx-usecs`).
        time: u32,
        /// Number of waiting frames (`rx-frames`).
        frames: u32,
    },
    /// By limits that follow the traffic.
    Adaptive,
    /// Under load at the end of a burst: once nothing more has come for [`LULL`], after [`LONGEST`] at the latest.
    /// Otherwise at every frame. Under load means that the consumer has got at least [`LOAD`] frames since it was last
    /// signalled: such a consumer sleeps only for short times, and waking it costs more than the delay of a few frames.
    /// A consumer that gets a single request and answers it is never kept waiting.
    Burst,
}

/// How long no frame must have come for a burst to count as ended, and how long a burst lasts at most, in microseconds
/// ([`Mode::Burst`]).
pub const LULL: u64 = 3;
/// See [`LULL`].
pub const LONGEST: u32 = 20;
/// Frames since the last signal from which on bursts are waited for ([`Mode::Burst`]).
pub const LOAD: u64 = 4;

/// Numbers of interrupts, and of the frames and bytes that they signalled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Interrupts.
    pub interrupts: u64,
    /// Frames.
    pub frames: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The moderation of one queue.
#[derive(Debug)]
pub struct Moderator {
    mode: Mode,
    adaptive: Adaptive,
    /// Frames and bytes that have not been signalled, and when the first of them was queued.
    frames: u32,
    bytes: u64,
    since: u64,
    /// When the last of them was queued.
    last: u64,
    /// Frames since the last signal, including frames that the consumer got while it was awake.
    got: u64,
    counters: Counters,
}

impl Moderator {
    /// Makes a moderator with nothing waiting.
    pub fn new(mode: Mode) -> Moderator {
        Moderator {
            mode,
            adaptive: Adaptive::default(),
            frames: 0,
            bytes: 0,
            since: 0,
            last: 0,
            got: 0,
            counters: Counters::default(),
        }
    }

    /// Whether signals are ever delayed.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.mode != Mode::Off
    }

    /// Microseconds after which, and number of frames at which the consumer is signalled.
    fn limits(&self) -> (u32, u32) {
        match self.mode {
            Mode::Off => (0, 1),
            Mode::Static { time, frames } => (time, frames.max(1)),
            Mode::Adaptive => self.adaptive.limits(),
            Mode::Burst if self.got < LOAD => (0, 1),
            Mode::Burst => (LONGEST, u32::MAX),
        }
    }

    /// Counts `frames` frames that the consumer has got, whether it is awake or to be signalled ([`Mode::Burst`]).
    #[inline]
    pub fn got(&mut self, frames: u64) {
        self.got = self.got.saturating_add(frames);
    }

    /// Counts a frame of `bytes` bytes that was queued at `now`. Returns whether the consumer is to be signalled now.
    pub fn queued(&mut self, bytes: usize, now: u64) -> bool {
        if self.frames == 0 {
            self.since = now;
        }
        self.frames += 1;
        self.bytes += bytes as u64;
        self.last = now;
        let (time, frames) = self.limits();
        self.frames >= frames || now >= self.since + u64::from(time)
    }

    /// When the consumer is to be signalled at the latest; None if nothing waits.
    #[inline]
    pub fn due(&self) -> Option<u64> {
        let lull = if self.mode == Mode::Burst { self.last + LULL } else { u64::MAX };
        (self.frames > 0).then(|| lull.min(self.since + u64::from(self.limits().0)))
    }

    /// Notes that the consumer has been signalled for all frames that waited.
    pub fn signalled(&mut self, now: u64) {
        if self.frames == 0 {
            return;
        }
        self.counters.interrupts += 1;
        self.counters.frames += u64::from(self.frames);
        self.counters.bytes += self.bytes;
        (self.frames, self.bytes, self.got) = (0, 0, 0);
        if self.mode == Mode::Adaptive {
            self.adaptive.sample(&self.counters, now);
        }
    }

    /// Counters of the signals so far.
    pub fn counters(&self) -> Counters {
        self.counters
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
        moderator.signalled(1030);
        assert!(!moderator.queued(100, 2000));
        assert!(moderator.queued(100, 2050), "fifty microseconds");
        moderator.signalled(2050);
        assert_eq!(moderator.counters(), Counters { interrupts: 2, frames: 6, bytes: 600 });
        assert!(Moderator::new(Mode::Off).queued(1, 0));
    }

    #[test]
    fn a_burst_is_waited_for_under_load_only() {
        let mut moderator = Moderator::new(Mode::Burst);
        for now in [1000, 2000] {
            moderator.got(LOAD - 1);
            assert!(moderator.queued(100, now), "a few requests are not kept waiting");
            moderator.signalled(now);
        }
        let mut burst = |from: u64, until: u64| {
            moderator.got(LOAD);
            let signal = (from..).find(|now| {
                let arrives = *now < until && now % 2 == 0;
                arrives && moderator.queued(100, *now) || moderator.due().is_some_and(|due| due <= *now)
            });
            moderator.signalled(signal.unwrap());
            signal.unwrap() - from
        };
        assert_eq!([burst(3000, 3001), burst(4000, 4010), burst(5000, 5500)], [LULL, 8 + LULL, u64::from(LONGEST)]);
        moderator.got(1);
        assert!(moderator.queued(100, 6000), "the load has ended");
    }

    /// Sends frames of `bytes` bytes, one every `interval` microseconds, for a second; returns the number of interrupts
    /// and the longest wait.
    fn second(moderator: &mut Moderator, interval: u64, bytes: usize, from: u64) -> (u64, u64) {
        let (before, mut longest, mut first) = (moderator.counters().interrupts, 0, None);
        for now in from..from + 1_000_000 {
            let arrives = (now - from).is_multiple_of(interval);
            let signal = arrives && {
                first = first.or(Some(now));
                moderator.queued(bytes, now)
            };
            if signal || moderator.due().is_some_and(|due| due <= now) {
                longest = longest.max(now - first.take().unwrap_or(now));
                moderator.signalled(now);
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
        // The flood ends; requests and answers follow.
        second(&mut moderator, 100, 66, 2_000_000);
        let (interrupts, longest) = second(&mut moderator, 100, 66, 3_000_000);
        assert!(interrupts == 10_000 && longest <= 8, "{interrupts} interrupts, a frame waited for {longest} µs");
    }
}
