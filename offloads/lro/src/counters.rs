//! What was done, and why.

use crate::filter::Test;

/// Why an aggregate went out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Reason {
    /// It had no room for another segment.
    Full,
    /// FIN.
    Fin,
    /// PSH.
    Push,
    /// A segment shorter than the others, which can only be the last.
    Short,
    /// The next segment could not be merged with it.
    Other,
    /// No segment came for a while, or it was old enough.
    Time,
    /// Somebody asked for it.
    Asked,
}

/// Kinds of [`Reason`].
pub const REASONS: usize = Reason::Asked as usize + 1;

/// Counters. All only grow, but for `held`.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Segments that were merged into aggregates of more than one.
    pub merged: u64,
    /// Aggregates of more than one segment.
    pub aggregates: u64,
    /// IP bytes of those.
    pub bytes: u64,
    /// Frames that passed untouched, by the test that they failed.
    pub failed: [u64; Test::COUNT],
    /// Data segments that passed alone.
    pub alone: u64,
    /// Segments that came out of order and were put in order.
    pub reordered: u64,
    /// Segments that came when what they bring had gone out already.
    pub old: u64,
    /// Gaps that were given up.
    pub gaps: u64,
    /// Segments for which there was no descriptor, buffer or room left.
    pub short_of_memory: u64,
    /// Why aggregates went out.
    pub flushed: [u64; REASONS],
    /// Segments that are held out of order now.
    pub held: u64,
}
