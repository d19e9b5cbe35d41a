//! When a connection on the NIC counts as idle, so that the pages of its memory are returned to the system.

use crate::connection::Connection;
use crate::record::read_record;
use crate::traffic::Traffic;
use baton_abi::Record;
use baton_abi::layout::{block, nic};
use baton_image::Image;
use baton_linux::events::monotonic_micros;
use baton_shm::Region;

/// Milliseconds without traffic after which pages are returned: of a connection that has used at least [`MUCH`] bytes,
/// and of another one.
const PATIENCE: [u32; 2] = [1_000, 10_000];
/// Bytes sent and received since the last return that are worth a return soon.
const MUCH: u32 = 1 << 16;

/// What a connection has carried, and since when it has carried nothing.
#[derive(Clone, Copy, Default)]
pub(crate) struct Idleness {
    /// Sequence numbers up to which bytes had been received and acknowledged at the last poll, and the time at which
    /// these were seen first, in milliseconds of the monotonic clock, modulo 2³².
    seen: (u32, u32),
    since: u32,
    /// Bytes received and acknowledged since the memory last had no pages. The pages of the handoff itself count as
    /// one.
    used: u32,
}

/// Milliseconds of a time in microseconds, modulo 2³²: 49 days.
fn millis(micros: u64) -> u32 {
    (micros / 1000) as u32
}

impl Idleness {
    /// Of a connection that is handed off with an image.
    pub fn new(image: &Image) -> Idleness {
        let begins = (image.read_seq(), image.snd_una);
        Idleness { seen: begins, since: millis(monotonic_micros()), used: 1 }
    }

    /// Notes that the pages of a connection that rests with this image were returned.
    pub fn note_returned(&mut self, image: &Image) {
        (self.seen, self.used) = ((image.rcv_nxt, image.snd_una), 0);
    }

    /// Notes that what follows this sequence number is received once more, elsewhere.
    pub fn recede(&mut self, read: u32) {
        self.seen.0 = read;
    }

    /// Notes what has been received and acknowledged at `now`.
    fn note(&mut self, seen: (u32, u32), now: u64) {
        if self.seen != seen {
            let carried = seen.0.wrapping_sub(self.seen.0).saturating_add(seen.1.wrapping_sub(self.seen.1));
            (self.seen, self.since, self.used) = (seen, millis(now), self.used.saturating_add(carried));
        }
    }

    /// As [`Idleness::note`]. Returns whether pages are to be returned, if they are empty.
    fn is_due(&mut self, seen: (u32, u32), now: u64) -> bool {
        self.note(seen, now);
        let now = millis(now);
        self.used > 0 && now.wrapping_sub(self.since) >= PATIENCE[usize::from(self.used < MUCH)]
    }
}

impl Connection {
    /// Whether its pages should be returned now: it has used some, or has some of its handoff, its queues are empty,
    /// and it has carried nothing for a while. This is read while program and NIC go on, so it is only a hint: what is
    /// empty shows when the connection rests.
    ///
    /// Also notes what it has carried since the last time, with its round-trip time.
    pub fn is_idle(&mut self, nic_memory: &Region, now: u64, carried_now: &mut (Traffic, u32)) -> bool {
        let settled = self.goal().is_none() && !self.closed && !self.opening;
        let Some(cid) = self.cid.filter(|_| settled) else { return false };
        let Some(record) = read_record(nic_memory, nic::slot(cid.slot())) else { return false };
        // A FIN occupies a sequence number, and no byte.
        let unread = record.rcv_nxt.wrapping_sub(self.block.load(block::READ_SEQ));
        let unacknowledged = self.block.load(block::QUEUED_SEQ).wrapping_sub(record.snd_una);
        let empty = unread <= 1 && unacknowledged.wrapping_add(1) <= 1 && record.ranges == 0;
        let (seen, carried) = ((record.rcv_nxt, record.snd_una), self.carried_on_nic(&record));
        let Some(on_nic) = self.running() else { return false };
        let is_due = on_nic.idleness.is_due(seen, now);
        *carried_now = (carried.since(self.traffic), record.srtt);
        self.traffic = carried;
        is_due && empty
    }

    /// Counts what the connection has carried up to these sequence numbers, received and acknowledged, since the last
    /// time. That is polled, so no 4 GiB pass in between.
    pub fn count_to(&mut self, seen: (u32, u32)) {
        let Some(on_nic) = &mut self.on_nic else { return };
        let traffic = self.traffic.after(on_nic.idleness.seen, seen);
        on_nic.idleness.note(seen, monotonic_micros());
        let more = traffic.since(std::mem::replace(&mut self.traffic, traffic));
        if let Some(cid) = self.cid.filter(|_| more != Traffic::default()) {
            let (nic, uncounted) = &mut self.extra().uncounted;
            (*nic, *uncounted) = (cid.nic(), uncounted.plus(more.sent, more.received));
        }
    }

    /// Bytes acknowledged by the peer and received since the agent has the connection, which is on the NIC with this
    /// record.
    pub fn carried_on_nic(&self, record: &Record) -> Traffic {
        let seen = self.on_nic.as_ref().map(|on_nic| on_nic.idleness.seen);
        seen.map_or(self.traffic, |seen| self.traffic.after(seen, (record.rcv_nxt, record.snd_una)))
    }
}

/// Counts what a connection has carried, up to what its record on the NIC with this memory says: before that is
/// invalidated.
pub(crate) fn count_now(connection: &mut Connection, nic_memory: &Region) {
    let record = connection.cid.and_then(|cid| read_record(nic_memory, nic::slot(cid.slot())));
    if let Some(record) = record {
        connection.count_to((record.rcv_nxt, record.snd_una));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_returned_once_for_what_was_used() {
        let mut idleness = Idleness { seen: (10, 20), since: 0, used: 0 };
        assert!(!idleness.is_due((10, 20), 100_000_000), "nothing was used");
        let much = (10u32.wrapping_sub(5), 20 + MUCH);
        assert!(!idleness.is_due(much, 101_000_000) && !idleness.is_due(much, 101_999_999), "it may go on");
        assert!(idleness.is_due(much, 102_000_000));
        idleness.used = 0;
        assert!(!idleness.is_due(much, 200_000_000), "they are returned");
        let little = (much.0, much.1 + 1);
        assert!(!idleness.is_due(little, 201_000_000) && !idleness.is_due(little, 202_000_000));
        assert!(idleness.is_due(little, 211_000_000));
    }

    #[test]
    fn a_connection_that_carries_nothing_returns_the_pages_of_its_handoff_once() {
        let mut idleness = Idleness { seen: (10, 20), since: 5_000, used: 1 };
        assert!(!idleness.is_due((10, 20), 14_999_999));
        assert!(idleness.is_due((10, 20), 15_000_000));
        idleness.used = 0;
        assert!(!idleness.is_due((10, 20), 100_000_000));
    }
}
