//! ConnectionDescriptor: what is known of one connection.

use crate::aggregate::Aggregate;
use crate::held::Held;
use crate::{Push, Settings};
use baton_wire::{Flags, Name, TcpFrame};

/// Fixed point of the mean interval.
const SCALE: u64 = 256;
/// The mean is taken over so many arrivals.
const ARRIVALS: u64 = 8;
/// Microseconds between segments, in the mean, that a bulk transfer does not exceed.
const BULK: u64 = 50;
/// Segments of the last aggregate that it has at least.
const BULK_SEGMENTS: u32 = 4;

pub(crate) struct Flow {
    pub name: Name,
    /// Sequence number that is expected next, in 64 bits so that it does not wrap. None until a segment was seen.
    pub next: Option<u64>,
    pub aggregate: Option<Aggregate>,
    /// What is behind gaps.
    pub held: Held,
    /// Since when the first gap is waited for.
    pub gap_since: u64,
    pub last_arrival: u64,
    mean: u64,
    /// Segments of the aggregate that went out last.
    pub last_count: u32,
    /// Tick for which the wheel has it, `u64::MAX` if it has not.
    pub scheduled: u64,
}

impl Flow {
    pub fn new(name: Name, now: u64, settings: &Settings) -> Flow {
        Flow {
            name,
            next: None,
            aggregate: None,
            held: Held::default(),
            gap_since: 0,
            last_arrival: now,
            // Until it is known better it is not worth waiting for.
            mean: settings.quiet.0 * SCALE / 10,
            last_count: 0,
            scheduled: u64::MAX,
        }
    }

    /// A segment has come.
    pub fn arrived(&mut self, now: u64) {
        let interval = now.saturating_sub(self.last_arrival).min(1 << 20) * SCALE;
        self.mean = self.mean - self.mean / ARRIVALS + interval / ARRIVALS;
        self.last_arrival = now;
    }

    /// Whether a segment's PSH ends an aggregate.
    pub fn is_pushed(&self, parsed: &TcpFrame, settings: &Settings) -> bool {
        let counts = match settings.push {
            Push::Flush => true,
            Push::Bulk => !self.is_bulk(),
            Push::Ignore => false,
        };
        counts && parsed.flags.contains(Flags::PSH)
    }

    fn is_bulk(&self) -> bool {
        self.mean < BULK * SCALE && self.last_count.max(self.aggregate.as_ref().map_or(0, |open| open.count)) >= BULK_SEGMENTS
    }

    /// A sequence number in 64 bits: the one that is nearest to what is expected.
    pub fn unwrapped(&self, seq: u32) -> u64 {
        match self.next {
            Some(next) => next.wrapping_add_signed(i64::from(seq.wrapping_sub(next as u32) as i32)),
            // Far enough from zero for everything that may come before.
            None => 1 << 40 | u64::from(seq),
        }
    }

    /// When something has to go out, if anything is here.
    pub fn due(&self, settings: &Settings) -> Option<u64> {
        let wait = (10 * self.mean / SCALE).clamp(settings.quiet.0, settings.quiet.1);
        let quiet = self.aggregate.as_ref().map(|open| (self.last_arrival + wait).min(open.since + settings.age));
        let gap = (!self.held.is_empty()).then(|| self.gap_since + settings.gap);
        quiet.into_iter().chain(gap).min()
    }

    pub fn is_idle(&self) -> bool {
        self.aggregate.is_none() && self.held.is_empty()
    }
}
