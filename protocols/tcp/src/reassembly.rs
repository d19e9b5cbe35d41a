//! Ranges received behind a hole. The bytes lie at their place in receive memory already; only the ranges are kept
//! here.

use crate::seq::{at_or_before, before, earlier, later};
use alloc::collections::VecDeque;
use baton_wire::SackBlocks;

/// Ranges that every connection can have.
const BASE: usize = 64;
/// Receive window in bytes that allows one range more: a full buffer on the path may drop every other segment of a
/// window.
const BYTES_PER_RANGE: u32 = 2048;
/// Most ranges of any connection. An insertion moves at most half of them: 64 KB.
const MOST: usize = 1 << 14;

/// Most ranges of a connection with a receive window of so many bytes. A segment that would make one more is not
/// accepted, so that the work per packet and the memory are bounded.
pub(crate) fn most_ranges(window: u32) -> usize {
    (BASE + (window / BYTES_PER_RANGE) as usize).min(MOST)
}

/// Ordered, disjoint, non-adjacent ranges of sequence numbers.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct Reassembly {
    /// Ranges, and one more for a FIN: one word for the check that every segment makes.
    waiting: u32,
    ranges: VecDeque<(u32, u32)>,
    /// Left edges of the ranges that grew last, newest first (RFC 2018 section 4).
    recent: [u32; 4],
    /// A FIN came behind a hole: the sequence number it has.
    fin_at: Option<u32>,
    /// A duplicate to be reported (RFC 2883).
    pub(crate) duplicate: Option<(u32, u32)>,
}

impl Reassembly {
    /// Bytes from the beginning that every segment uses.
    pub(crate) const HOT: usize = size_of::<u32>();

    /// Whether nothing waits behind a hole, neither bytes nor a FIN.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Gives back memory that the list of ranges does not use.
    pub(crate) fn shrink(&mut self) {
        self.ranges.shrink_to_fit();
    }

    /// The sequence number of a FIN that came behind a hole.
    pub fn fin_at(&self) -> Option<u32> {
        self.fin_at
    }

    /// A FIN came behind a hole: it has this sequence number. Of several the first one counts.
    pub fn insert_fin(&mut self, at: u32) {
        self.fin_at = Some(self.fin_at.map_or(at, |held| earlier(held, at)));
        self.count();
    }

    /// Left edges of the ranges that grew last, newest first.
    pub(crate) fn recent(&self) -> [u32; 4] {
        self.recent
    }

    /// Sets them, of a connection that has moved.
    pub(crate) fn set_recent(&mut self, recent: [u32; 4]) {
        self.recent = recent;
    }

    fn count(&mut self) {
        self.waiting = self.ranges.len() as u32 + u32::from(self.fin_at.is_some());
    }

    /// The ranges in order: first sequence number, and the one behind the last.
    pub fn ranges(&self) -> impl DoubleEndedIterator<Item = (u32, u32)> + ExactSizeIterator + '_ {
        self.ranges.iter().copied()
    }

    /// Adds a range that begins behind `rcv_nxt`. Returns false if that would be one more than `most`.
    pub fn insert(&mut self, left: u32, right: u32, most: usize) -> bool {
        let first = self.ranges.partition_point(|range| before(range.1, left));
        let last = self.ranges.partition_point(|range| at_or_before(range.0, right));
        if first == last {
            if self.ranges.len() >= most {
                return false;
            }
            self.ranges.insert(first, (left, right));
        } else {
            let merged = (earlier(self.ranges[first].0, left), later(self.ranges[last - 1].1, right));
            self.ranges[first] = merged;
            self.ranges.drain(first + 1..last);
        }
        self.touch(self.ranges[first].0);
        self.count();
        true
    }

    /// The first part of a range that is held already.
    pub fn overlap(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let at = self.ranges.partition_point(|range| at_or_before(range.1, left));
        let held = self.ranges.get(at).filter(|held| before(held.0, right))?;
        Some((later(held.0, left), earlier(held.1, right)))
    }

    /// Forgets all ranges.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.fin_at = None;
        self.count();
    }

    /// Index of the range that contains a sequence number.
    fn range_at(&self, seq: u32) -> Option<usize> {
        let at = self.ranges.partition_point(|range| at_or_before(range.1, seq));
        self.ranges.get(at).is_some_and(|range| at_or_before(range.0, seq)).then_some(at)
    }

    /// Called when `rcv_nxt` has moved to `next`: drops the ranges that it has passed, and returns how far it moves on
    /// through ranges that touch it, but not beyond a FIN.
    pub fn advance(&mut self, mut next: u32) -> u32 {
        let mut passed = 0;
        for range in &self.ranges {
            if before(next, range.0) {
                break;
            }
            next = later(next, range.1);
            passed += 1;
        }
        self.ranges.drain(..passed);
        self.count();
        self.fin_at.map_or(next, |fin| earlier(fin, next))
    }

    /// The ranges as SACK blocks: first the one that grew last, then the others by age.
    pub fn sack_blocks(&self, room: usize) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        let mut used = [usize::MAX; 4];
        for left in self.recent {
            if let Some(at) = self.range_at(left)
                && !used.contains(&at)
            {
                used[blocks.as_slice().len()] = at;
                blocks.push(self.ranges[at].0, self.ranges[at].1);
            }
        }
        blocks.truncate(room);
        blocks
    }

    /// A duplicate of the data at `seq` has come: its range is reported first (RFC 2883 section 4).
    pub(crate) fn touch_at(&mut self, seq: u32) {
        if let Some(at) = self.range_at(seq) {
            self.touch(self.ranges[at].0);
        }
    }

    /// The range that begins at `left` has grown last. An entry is dropped if its range was merged into another
    /// entry's, or was passed: it would take the place of a range that exists.
    fn touch(&mut self, left: u32) {
        let mut recent = [left; 4];
        let mut used = [usize::MAX; 4];
        used[0] = self.range_at(left).unwrap_or(usize::MAX);
        let mut count = 1;
        for seq in self.recent {
            if let Some(at) = self.range_at(seq)
                && count < recent.len()
                && !used.contains(&at)
            {
                (recent[count], used[count]) = (seq, at);
                count += 1;
            }
        }
        self.recent = recent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_and_advance() {
        let mut r = Reassembly::default();
        assert!(r.insert(10, 20, 64));
        assert!(r.insert(30, 40, 64));
        assert!(r.insert(u32::MAX - 5, 2, 64));
        assert!(r.ranges().eq([(u32::MAX - 5, 2), (10, 20), (30, 40)]));
        assert!(r.insert(20, 30, 64));
        assert!(r.ranges().eq([(u32::MAX - 5, 2), (10, 40)]));
        for (left, right, overlap) in [
            (12, 40, Some((12, 40))),
            (12, 41, Some((12, 40))),
            (5, 12, Some((10, 12))),
            (2, 10, None),
            (40, 50, None),
            (u32::MAX - 9, 20, Some((u32::MAX - 5, 2))),
        ] {
            assert_eq!(r.overlap(left, right), overlap, "{left}..{right}");
        }
        assert_eq!(r.sack_blocks(3).as_slice(), [(10, 40), (u32::MAX - 5, 2)]);
        assert_eq!(r.advance(u32::MAX - 5), 2);
        assert_eq!(r.advance(12), 40);
        assert!(r.is_empty());
    }

    /// RFC 2018 section 4: as many blocks as fit, of the ranges that grew last, also when one was merged with another
    /// or passed in between.
    #[test]
    fn ranges_that_are_gone_take_no_place_in_a_report() {
        let mut merged = Reassembly::default();
        for (left, right) in [(499, 999), (2399, 2409), (3999, 4000), (1498, 2498), (3898, 3998)] {
            assert!(merged.insert(left, right, 64));
        }
        assert_eq!(merged.sack_blocks(4).as_slice(), [(3898, 3998), (1498, 2498), (3999, 4000), (499, 999)]);
        assert_eq!(merged.sack_blocks(3).as_slice(), [(3898, 3998), (1498, 2498), (3999, 4000)]);
        let mut passed = Reassembly::default();
        for (left, right) in [(30, 40), (50, 60), (70, 80), (10, 20)] {
            assert!(passed.insert(left, right, 64));
        }
        assert_eq!(passed.advance(10), 20);
        assert!(passed.insert(90, 100, 64));
        assert_eq!(passed.sack_blocks(4).as_slice(), [(90, 100), (70, 80), (50, 60), (30, 40)]);
        assert!(passed.insert(25, 35, 64), "a range that grows to the left");
        assert_eq!(passed.sack_blocks(4).as_slice(), [(25, 40), (90, 100), (70, 80), (50, 60)]);
    }

    #[test]
    fn the_number_of_ranges_is_capped() {
        let mut r = Reassembly::default();
        for i in 0..64 {
            assert!(r.insert(i * 10, i * 10 + 5, 64));
        }
        assert!(!r.insert(10_000, 10_001, 64));
        assert!(r.insert(5, 10, 64), "a range that fills a hole needs no room");
    }

    /// A window of which every other segment of 1448 bytes was lost.
    #[test]
    fn a_window_with_a_hole_beside_every_segment_has_room() {
        for window in [1 << 16, 1 << 20, 1 << 24] {
            let mut r = Reassembly::default();
            for at in (0..window).step_by(2 * 1448) {
                assert!(r.insert(at + 1448, at + 2 * 1448, most_ranges(window)));
            }
        }
    }
}
