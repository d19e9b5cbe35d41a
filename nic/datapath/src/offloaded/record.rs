//! A connection's recovery record, as its owner writes it.

use super::Offloaded;
use baton_abi::layout::{nic, scratch, slot as at};
use baton_abi::record;
use baton_tcp::Instant;
use core::sync::atomic::Ordering;

/// Offset of the first copy of the record, in words from the slot's beginning.
const RECORDS: usize = at::RECORDS / 8;

impl Offloaded {
    /// Publishes the recovery record. No segment may leave that the published record does not cover.
    #[inline(always)]
    pub fn publish(&mut self, now: Instant) {
        if self.ranges > 0 || self.tcp.has_out_of_order() {
            self.store_ranges();
        }
        self.publish_record(self.tcp.record(now), self.ranges);
    }

    /// [`Offloaded::publish`] for a connection with nothing out of order, whose timestamp clock stands at `clock`.
    #[inline(always)]
    pub fn publish_in_order(&mut self, clock: u32) {
        if self.ranges > 0 {
            self.store_ranges();
        }
        self.publish_record(self.tcp.record_with(clock), 0);
    }

    /// [`Offloaded::publish_in_order`] for one that has no ranges in its record either, and has changed in nothing that the record's
    /// last word holds since it was last published: state and congestion window. This takes fewer instructions.
    #[inline(always)]
    pub fn publish_usual(&mut self, clock: u32) {
        debug_assert!(!self.has_ranges());
        let published = self.published + 1;
        self.published = published;
        let words = &*self.record;
        let copy = RECORDS + (published & 1) as usize * record::WORDS;
        let torn = if cfg!(feature = "sabotage-tear-record") { record::WORDS / 3 } else { record::WORDS };
        self.tcp.record_words(clock, self.last_word, |at, word| {
            if at < torn {
                words[copy + at].store(word, Ordering::Relaxed);
            }
        });
        words[at::PUBLISHED / 8].store(published, Ordering::Release);
    }

    /// Whether the record has ranges out of order.
    #[inline(always)]
    pub fn has_ranges(&self) -> bool {
        self.ranges > 0
    }

    #[inline(always)]
    fn publish_record(&mut self, mut record: record::Record, ranges: u8) {
        record.ranges_table = self.ranges_table;
        record.ranges = ranges;
        let published = self.published + 1;
        self.published = published;
        let encoded = record.to_words();
        self.last_word = encoded[record::LAST_WORD];
        let words = &*self.record;
        let copy = if published & 1 == 0 { &words[RECORDS..] } else { &words[RECORDS + record::WORDS..] };
        let torn = if cfg!(feature = "sabotage-tear-record") { record::WORDS / 3 } else { record::WORDS };
        for (word, value) in copy.iter().zip(encoded).take(torn) {
            word.store(value, Ordering::Relaxed);
        }
        words[at::PUBLISHED / 8].store(published, Ordering::Release);
    }

    /// The valid table of out-of-order ranges, for [`Offloaded::continue_record`].
    pub fn ranges_table(&self) -> u32 {
        self.ranges_table.into()
    }

    /// Goes on with the record of another owner, whose valid table of out-of-order ranges is `ranges_table`: what is valid is not
    /// written.
    pub fn continue_record(&mut self, ranges_table: u32) {
        self.published = self.record[at::PUBLISHED / 8].load(Ordering::Acquire);
        self.ranges_table = ranges_table as u8 & 1;
        self.set_last_word();
    }

    /// Sets the last word of the record of a connection that has none of its own yet.
    pub(super) fn set_last_word(&mut self) {
        let record = record::Record { ranges_table: self.ranges_table, ..self.tcp.record_with(0) };
        self.last_word = record.to_words()[record::LAST_WORD];
    }

    /// Marks the slot as having no connection to recover.
    pub fn unpublish(&self) {
        self.record[at::PUBLISHED / 8].store(0, Ordering::Release);
    }

    /// Writes the out-of-order ranges, the first ones if there are many, to the table that is not valid, which becomes valid with the
    /// record. When the NIC dies, the others are sent again by the peer (RFC 2018 section 8).
    #[cold]
    fn store_ranges(&mut self) {
        self.ranges_table ^= 1;
        let base = nic::scratch(self.slot) + scratch::RANGES + usize::from(self.ranges_table) * scratch::RANGES_BYTES;
        let words = self.nic_memory.words(base, scratch::MOST_RANGES);
        self.ranges = 0;
        for (word, (left, right)) in words.iter().zip(self.tcp.out_of_order()) {
            word.store(u64::from(left) | u64::from(right) << 32, Ordering::Relaxed);
            self.ranges += 1;
        }
    }
}
