//! A connection's recovery record, as its owner writes it.

use super::Offloaded;
use baton_abi::layout::{nic, scratch};
use baton_abi::record;
use baton_recovery::{clear_records, published};
use baton_tcp::Instant;
use core::sync::atomic::Ordering;

impl Offloaded {
    /// Publishes the recovery record. No segment may leave that the published record does not cover.
    #[inline(always)]
    pub fn publish(&mut self, now: Instant) {
        if self.has_ranges() || self.tcp.has_out_of_order() {
            self.store_ranges();
        }
        self.publish_record(self.tcp.record(now), self.ranges);
    }

    /// Whether the record has ranges out of order.
    #[inline(always)]
    pub fn has_ranges(&self) -> bool {
        self.ranges > 0
    }

    /// [`Offloaded::publish`] for a connection with nothing out of order, whose timestamp clock stands at `clock`.
    #[inline(always)]
    pub fn publish_in_order(&mut self, clock: u32) {
        if self.has_ranges() {
            self.store_ranges();
        }
        self.publish_record(self.tcp.record_with(clock), 0);
    }

    /// Writes the words that a predicted segment has changed to the copy of the record that is not valid, whose other
    /// words [`Offloaded::prepare_other_copy`] has written. The connection's timestamp clock stands at `clock`.
    #[inline(always)]
    pub fn prepare_predicted(&self, clock: u32) {
        let copy = &self.record[record::copy(self.next)..][..record::WORDS];
        let torn = if cfg!(feature = "sabotage-tear-record") { record::PREDICTED - 1 } else { record::PREDICTED };
        for (word, value) in copy.iter().zip(self.tcp.predicted_record(clock)).take(torn) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Publishes what [`Offloaded::prepare_predicted`] has written: [`Offloaded::publish_in_order`] for a predicted
    /// segment.
    #[inline(always)]
    pub fn publish_predicted(&mut self) {
        let copy = &self.record[record::copy(self.next)..][..record::WORDS];
        copy[record::NUMBER].store(self.next, Ordering::Release);
        self.next += record::STEP;
    }

    #[inline(always)]
    fn publish_record(&mut self, mut record: record::Record, ranges: u8) {
        record.ranges_table = self.ranges_table;
        record.ranges = ranges;
        let encoded = record.to_words();
        let copy = &self.record[record::copy(self.next)..][..record::WORDS];
        let torn = if cfg!(feature = "sabotage-tear-record") { record::WORDS / 3 } else { record::NUMBER };
        for (word, value) in copy.iter().zip(encoded).take(torn) {
            word.store(value, Ordering::Relaxed);
        }
        copy[record::NUMBER].store(self.next, Ordering::Release);
        self.next += record::STEP;
        if ranges == 0 && self.receive.is_plain() && self.tcp.enable_prediction() {
            self.prepare_other_copy(&encoded);
            self.template.set_acknowledgement_seq(self.tcp.snd_nxt());
        }
    }

    /// Writes the words that predicted segments do not change to the copy of the record that is not valid.
    fn prepare_other_copy(&self, encoded: &[u64; record::NUMBER]) {
        let other = &self.record[record::copy(self.next)..];
        for (word, value) in other.iter().zip(encoded).skip(record::PREDICTED) {
            word.store(*value, Ordering::Relaxed);
        }
    }

    /// The valid table of out-of-order ranges, for [`Offloaded::continue_record`].
    pub fn ranges_table(&self) -> u32 {
        self.ranges_table.into()
    }

    /// Continues the record of another owner, whose valid table of out-of-order ranges is `ranges_table`: the valid
    /// copy and table are not overwritten.
    pub fn continue_record(&mut self, ranges_table: u32) {
        self.next = published(&*self.record) + record::STEP;
        self.ranges_table = ranges_table as u8 & 1;
    }

    /// Marks the slot as having no connection to recover.
    pub fn unpublish(&self) {
        clear_records(&*self.record);
    }

    /// Writes the out-of-order ranges, the first ones if there are many, to the table that is not valid, which becomes
    /// valid with the record. When the NIC dies, the others are sent again by the peer (RFC 2018 section 8).
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
