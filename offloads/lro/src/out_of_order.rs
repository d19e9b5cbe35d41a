//! The segments of a connection that are held behind gaps, as islands: segments that follow each other are merged when
//! they arrive, so that nothing has to be copied again when a gap is filled. The islands are in an ordered tree: the
//! place of a segment is found in time logarithmic in the number of islands, whatever an attacker sends.

use crate::aggregate::Aggregate;
use crate::counters::Reason;
use alloc::collections::BTreeMap;

/// Merged segments that follow each other.
pub(crate) struct Island {
    pub aggregate: Aggregate,
    /// The reason why no further segment may be appended; None if one may.
    pub sealed: Option<Reason>,
}

impl Island {
    /// Bytes of payload.
    pub fn length(&self) -> u64 {
        self.aggregate.payload().len() as u64
    }

    /// Bytes of its frame.
    pub fn bytes(&self) -> usize {
        self.aggregate.frame.length()
    }
}

/// The islands of one connection, by the (unwrapped) sequence number of their first byte.
#[derive(Default)]
pub(crate) struct OutOfOrder {
    islands: BTreeMap<u64, Island>,
    /// Segments in all islands.
    segments: usize,
}

/// How a segment relates to the islands.
pub(crate) enum Relation<'a> {
    /// Some of its bytes are held already.
    Overlaps,
    /// It directly follows this island.
    Follows(&'a mut Island),
    /// It begins a new island.
    Apart,
}

impl OutOfOrder {
    pub fn is_empty(&self) -> bool {
        self.islands.is_empty()
    }

    /// Number of segments in all islands.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// How the bytes `seq..end` relate to the islands.
    pub fn place(&mut self, seq: u64, end: u64) -> Relation<'_> {
        if self.islands.range(seq..end).next().is_some() {
            return Relation::Overlaps;
        }
        match self.islands.range_mut(..seq).next_back() {
            Some((start, island)) if seq < start + island.length() => Relation::Overlaps,
            Some((start, island)) if seq == start + island.length() => Relation::Follows(island),
            _ => Relation::Apart,
        }
    }

    /// Counts a segment that the caller has appended to an island.
    pub fn count(&mut self) {
        self.segments += 1;
    }

    /// Inserts a new island of one segment.
    pub fn insert(&mut self, seq: u64, island: Island) {
        self.islands.insert(seq, island);
        self.segments += 1;
    }

    /// Sequence number at which the first island begins.
    pub fn first(&self) -> Option<u64> {
        self.islands.first_key_value().map(|(seq, _)| *seq)
    }

    /// Removes the first island if it begins at `next` or before.
    pub fn pop(&mut self, next: u64) -> Option<(u64, Island)> {
        let first = self.islands.first_entry().filter(|first| *first.key() <= next)?;
        let (seq, island) = first.remove_entry();
        self.segments -= island.aggregate.count as usize;
        Some((seq, island))
    }
}
