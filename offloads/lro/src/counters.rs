//! Counters of large receive.

use crate::filter::Test;

/// Why an aggregate went out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Reason {
    /// It had no room for another segment.
    Full,
    /// A segment with FIN.
    Fin,
    /// A segment with PSH.
    Push,
    /// A segment came that was shorter than the others: it can only be the aggregate's last one.
    Short,
    /// The next segment of the connection could not be appended.
    Other,
    /// No segment came for a while, or it reached its greatest age.
    Timeout,
    /// The caller flushed it.
    Requested,
}

impl Reason {
    /// Number of reasons.
    pub const COUNT: usize = Reason::Requested as usize + 1;
}

/// Counters. All of them only grow, except `held`.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Segments merged into aggregates of more than one segment.
    pub merged: u64,
    /// Aggregates of more than one segment.
    pub aggregates: u64,
    /// Bytes of the IP packets of these aggregates.
    pub bytes: u64,
    /// Frames that were passed on unchanged, by the test that they failed.
    pub failed: [u64; Test::COUNT],
    /// Data segments that were passed on alone.
    pub alone: u64,
    /// Segments that arrived out of order and were put in order.
    pub reordered: u64,
    /// Segments whose data had gone out or was held already.
    pub old: u64,
    /// Gaps whose missing segment was not waited for any longer.
    pub gaps: u64,
    /// Segments for which no descriptor, buffer or room was left.
    pub short_of_memory: u64,
    /// Aggregates that went out, single segments that had waited among them, by reason.
    pub flushed: [u64; Reason::COUNT],
    /// Segments held out of order at present.
    pub held: u64,
}
