//! What is held behind gaps: islands of segments that follow each other, made one as they come, so that nothing has to be copied once more when
//! a gap is filled. An ordered tree: finding a segment's place costs the logarithm of the islands, whatever an attacker sends.

use crate::aggregate::Aggregate;
use crate::counters::Reason;
use alloc::collections::BTreeMap;

/// Segments that follow each other.
pub(crate) struct Island {
    pub aggregate: Aggregate,
    /// Why nothing more may be appended.
    pub sealed: Option<Reason>,
}

impl Island {
    /// Payload bytes.
    pub fn length(&self) -> u64 {
        self.aggregate.payload().len() as u64
    }

    /// All of its frame.
    pub fn bytes(&self) -> usize {
        self.aggregate.frame.bytes().len()
    }
}

/// The islands of one connection, by the sequence number of their first byte.
#[derive(Default)]
pub(crate) struct Held {
    islands: BTreeMap<u64, Island>,
    segments: usize,
}

/// Where a segment belongs.
pub(crate) enum Place<'a> {
    /// Some of its bytes are here already.
    Overlaps,
    /// It follows this island.
    Follows(&'a mut Island),
    /// It is the first of a new one.
    Apart,
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.islands.is_empty()
    }

    /// Segments in all of them.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Where bytes from `seq` to `end` belong.
    pub fn place(&mut self, seq: u64, end: u64) -> Place<'_> {
        if self.islands.range(seq..end).next().is_some() {
            return Place::Overlaps;
        }
        match self.islands.range_mut(..seq).next_back() {
            Some((start, island)) if seq < start + island.length() => Place::Overlaps,
            Some((start, island)) if seq == start + island.length() => Place::Follows(island),
            _ => Place::Apart,
        }
    }

    /// A segment has been appended to an island.
    pub fn count(&mut self) {
        self.segments += 1;
    }

    /// A new island, of one segment.
    pub fn insert(&mut self, seq: u64, island: Island) {
        self.islands.insert(seq, island);
        self.segments += 1;
    }

    /// Where the first one begins.
    pub fn first(&self) -> Option<u64> {
        self.islands.first_key_value().map(|(seq, _)| *seq)
    }

    /// Takes out the first one, if it begins at `next` or before.
    pub fn pop(&mut self, next: u64) -> Option<(u64, Island)> {
        let first = self.islands.first_entry().filter(|first| *first.key() <= next)?;
        let (seq, island) = first.remove_entry();
        self.segments -= island.aggregate.count as usize;
        Some((seq, island))
    }
}
