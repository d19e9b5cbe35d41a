//! The paper's ConnectionDescriptor: the state of one connection.

use crate::aggregate::Aggregate;
use crate::out_of_order::OutOfOrder;
use crate::{LroSettings, Push};
use baton_wire::{Flags, FlowKey, TcpFrame};

/// Scale of the fixed-point mean interval.
const SCALE: u64 = 256;
/// The mean is taken over about this many arrivals.
const ARRIVALS: u64 = 8;
/// Largest mean interval between the segments of a bulk transfer, in microseconds.
const BULK: u64 = 50;
/// Smallest number of segments in the current or last aggregate of a bulk transfer.
const BULK_SEGMENTS: u32 = 4;

/// One connection.
pub(crate) struct Descriptor {
    pub key: FlowKey,
    /// Next sequence number expected, unwrapped to 64 bits. None until a segment has arrived.
    pub next: Option<u64>,
    /// The open aggregate.
    pub aggregate: Option<Aggregate>,
    /// The segments behind gaps.
    pub held: OutOfOrder,
    /// When the wait for the first gap began, in microseconds.
    pub gap_since: u64,
    /// When the last segment arrived, in microseconds.
    pub last_arrival: u64,
    /// Mean interval between segments, in microseconds times [`SCALE`].
    mean: u64,
    /// Number of segments of the aggregate that went out last.
    pub last_count: u32,
    /// Tick of its entry in the timing wheel, `u64::MAX` without one.
    pub scheduled: u64,
}

impl Descriptor {
    pub fn new(key: FlowKey, now: u64, settings: &LroSettings) -> Descriptor {
        Descriptor {
            key,
            next: None,
            aggregate: None,
            held: OutOfOrder::default(),
            gap_since: 0,
            last_arrival: now,
            // The wait is the shortest one until enough segments have arrived to know the interval.
            mean: settings.quiet.0 * SCALE / 10,
            last_count: 0,
            scheduled: u64::MAX,
        }
    }

    /// Updates the mean interval at the arrival of a segment.
    pub fn arrived(&mut self, now: u64) {
        let interval = now.saturating_sub(self.last_arrival).min(1 << 20) * SCALE;
        self.mean = self.mean - self.mean / ARRIVALS + interval / ARRIVALS;
        self.last_arrival = now;
    }

    /// Whether a segment's PSH ends an aggregate.
    pub fn is_pushed(&self, parsed: &TcpFrame, settings: &LroSettings) -> bool {
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

    /// Unwraps a sequence number to the 64-bit value nearest to the expected one.
    pub fn unwrapped(&self, seq: u32) -> u64 {
        match self.next {
            Some(next) => next.wrapping_add_signed(i64::from(seq.wrapping_sub(next as u32) as i32)),
            // So far from zero that earlier sequence numbers do not become negative.
            None => 1 << 40 | u64::from(seq),
        }
    }

    /// When the open aggregate or the held segments have to go out, in microseconds; None without any.
    pub fn due(&self, settings: &LroSettings) -> Option<u64> {
        let wait = (10 * self.mean / SCALE).clamp(settings.quiet.0, settings.quiet.1);
        let quiet = self.aggregate.as_ref().map(|open| (self.last_arrival + wait).min(open.since + settings.age));
        let gap = (!self.held.is_empty()).then(|| self.gap_since + settings.gap);
        quiet.into_iter().chain(gap).min()
    }

    /// Whether neither an open aggregate nor held segments exist.
    pub fn is_idle(&self) -> bool {
        self.aggregate.is_none() && self.held.is_empty()
    }
}
