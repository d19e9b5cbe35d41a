//! The data that has been sent and not cumulatively acknowledged: a record per segment, with its SACK state (RFC 6675).

use crate::seq::{at_or_before, before};
use crate::time::Instant;
use alloc::collections::VecDeque;
use baton_image::nic;

/// The most segments in flight; the sender waits when there are as many. A connection may come with more.
pub(crate) const MAX_SEGMENTS: usize = 1 << 16;
/// Most entries of the timeline that are examined for the end of the reordering window.
const LOOKED_AT: usize = 64;
/// Most already SACKed segments that are passed over from each end of the range that a SACK block adds to the known
/// blocks. A peer may send blocks that never match a known one, and very many segments may be in flight.
const GONE_OVER: usize = 256;

pub(crate) use baton_image::nic::{EVER, LOST, PUSHED, RETRANSMITTED, SACKED, UNTIMED};

/// A sent segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub sent_at: Instant,
    pub seq: u32,
    /// Sequence numbers it takes, SYN and FIN counted.
    pub length: u16,
    pub flags: u8,
}

impl Sent {
    #[inline]
    pub fn end(&self) -> u32 {
        self.seq.wrapping_add(u32::from(self.length))
    }

    /// Whether the segment is in the network, as far as is known.
    fn is_undecided(&self) -> bool {
        self.flags & SACKED == 0 && (self.flags & LOST == 0 || self.flags & RETRANSMITTED != 0)
    }
}

/// The newest segment known to be delivered, by time of sending (RFC 8985 section 6.2).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Newest {
    pub sent_at: Instant,
    pub end: u32,
    /// Its round-trip time in microseconds, at least 1; 0 if there is no such segment yet.
    pub rtt: u64,
}

impl Newest {
    /// As an image holds it.
    pub fn to_image(self, now: Instant) -> Option<nic::Newest> {
        let Newest { sent_at, end, rtt } = self;
        (rtt > 0).then(|| nic::Newest { age: now.age(sent_at), end, rtt: u32::try_from(rtt).unwrap_or(u32::MAX) })
    }

    fn from_image(image: Option<nic::Newest>, now: Instant) -> Newest {
        image.map_or(Newest::default(), |nic::Newest { age, end, rtt }| Newest {
            sent_at: now.ago(age.into()),
            end,
            rtt: u64::from(rtt).max(1),
        })
    }
}

/// The changes that one acknowledgement has made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    pub now: Instant,
    /// Segments newly acknowledged or SACKed.
    pub delivered: u32,
    /// Segments newly SACKed.
    pub sacked: u32,
    /// Round-trip time of the latest segment that was sent only once, in microseconds.
    pub rtt: Option<u32>,
    /// A segment that was sent once, before `high_seq`, arrived.
    pub original_delivered: bool,
    /// A segment arrived at the peer after another one that was sent later.
    pub reordered: bool,
    /// The largest such reordering in bytes: from the segment's beginning to the end of the data that was SACKed behind
    /// it.
    pub reordered_by: u32,
    /// The peer reported a duplicate (RFC 2883).
    pub duplicate: bool,
}

impl Sample {
    /// A segment that was sent once has arrived: whether that is after one behind it.
    fn note_order(&mut self, sent: &Sent, highest_sacked: Option<u32>) {
        if let Some(highest) = highest_sacked.filter(|highest| before(sent.end(), *highest)) {
            self.reordered = true;
            self.reordered_by = self.reordered_by.max(highest.wrapping_sub(sent.seq));
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Scoreboard {
    queue: VecDeque<Sent>,
    pub sacked: u32,
    pub lost: u32,
    pub retransmitted: u32,
    /// Times of sending, each with the segment's end, in the order of the times, for loss detection. Entries of
    /// segments that have been SACKed, acknowledged, lost or sent again meanwhile are dropped when they are met, so
    /// that each entry is examined about once.
    ///
    /// It exists only from the first loss detection on, until all data that was in flight then is acknowledged: so each
    /// segment is written into it once by [`Scoreboard::write_timeline`], and not at all as long as nothing gets lost
    /// or overtaken.
    timeline: VecDeque<(Instant, u32)>,
    /// The end of the data that was in flight when the timeline was begun; `None` while there is no timeline.
    timeline_until: Option<u32>,
    /// SACK blocks of the last acknowledgements, all of whose segments are SACKed: a block that grew is not gone over
    /// again.
    blocks: [(u32, u32); 4],
    /// End of the highest segment that was SACKed, if any is.
    pub highest_sacked: Option<u32>,
    /// No segment before this one waits for retransmission.
    hint: u32,
    pub newest: Newest,
}

impl Scoreboard {
    pub fn clear(&mut self) {
        *self = Scoreboard::default();
    }

    /// Gives back memory that the lists do not use.
    pub fn shrink(&mut self) {
        self.queue.shrink_to_fit();
        self.timeline.shrink_to_fit();
    }

    /// The data in flight, in the form of an image. `fin` is the sequence number behind our FIN, if that was sent.
    pub fn to_image(&self, fin: Option<u32>, now: Instant) -> nic::Flight {
        // The timeline and the blocks are made anew from the queue, and the counts and the hint, too.
        let Scoreboard {
            queue,
            sacked: _,
            lost: _,
            retransmitted: _,
            timeline: _,
            timeline_until: _,
            blocks: _,
            highest_sacked: _,
            hint: _,
            newest: _,
        } = self;
        let mut flight = nic::Flight::default();
        for sent in queue {
            let with_fin = fin == Some(sent.end());
            // When something was sent that has arrived matters no more.
            let (age, fate) = if sent.flags & SACKED == 0 { (now.age(sent.sent_at), sent.flags) } else { (0, SACKED) };
            flight.push(sent.length - u16::from(with_fin), with_fin, age, fate);
        }
        flight
    }

    /// Restores the data in flight from an image, from `una` on; its runs have been checked.
    pub fn from_image(flight: &nic::Flight, newest: Option<nic::Newest>, una: u32, fin: Option<u32>, now: Instant) -> Scoreboard {
        let mut board = Scoreboard { hint: una, newest: Newest::from_image(newest, now), ..Scoreboard::default() };
        let mut seq = una;
        for nic::Run { length, segment, age, fate } in flight.runs().iter().copied() {
            let (end, sent_at) = (seq.wrapping_add(length), now.ago(age.into()));
            while seq != end {
                let left = end.wrapping_sub(seq);
                let length = left.min(segment.into());
                // A FIN shares the last record, as it did when it was sent.
                let length = if left == length + 1 && fin == Some(end) { left } else { length };
                board.queue.push_back(Sent { sent_at, seq, length: length as u16, flags: fate });
                board.count(fate);
                seq = seq.wrapping_add(length);
            }
            if fate & SACKED != 0 {
                board.highest_sacked = Some(end);
            }
        }
        board
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[inline]
    pub fn len(&self) -> u32 {
        self.queue.len() as u32
    }

    pub fn is_full(&self) -> bool {
        self.queue.len() >= MAX_SEGMENTS
    }

    /// Segments in the network (RFC 6675's pipe, in segments).
    #[inline]
    pub fn in_flight(&self) -> u32 {
        (self.len() + self.retransmitted).saturating_sub(self.sacked + self.lost)
    }

    #[inline]
    pub fn push(&mut self, seq: u32, length: u32, now: Instant, flags: u8) {
        self.queue.push_back(Sent { sent_at: now, seq, length: length as u16, flags });
        if self.timeline_until.is_some() {
            self.timeline.push_back((now, seq.wrapping_add(length)));
        }
    }

    /// The segment that was pushed last carries PSH.
    pub fn push_last(&mut self) {
        if let Some(last) = self.queue.back_mut() {
            last.flags |= PUSHED;
        }
    }

    pub fn front(&self) -> Option<&Sent> {
        self.queue.front()
    }

    pub fn back(&self) -> Option<&Sent> {
        self.queue.back()
    }

    fn deliver(newest: &mut Newest, sent: &Sent, min_rtt: u32, sample: &mut Sample) {
        let rtt = sample.now.since(sent.sent_at);
        if sent.flags & (EVER | UNTIMED) == EVER && rtt < u64::from(min_rtt) {
            // The acknowledgement is for the original, not for the retransmission (RFC 8985 section 6.2, step 2).
            return;
        }
        if sent.flags & EVER == 0 {
            sample.rtt = Some(rtt.min(u64::from(u32::MAX)) as u32);
        }
        if (sent.sent_at, 0) > (newest.sent_at, 0) || (sent.sent_at == newest.sent_at && before(newest.end, sent.end())) {
            *newest = Newest { sent_at: sent.sent_at, end: sent.end(), rtt: rtt.max(1) };
        }
    }

    /// A cumulative acknowledgement.
    pub fn acknowledge(&mut self, ack: u32, high_seq: u32, min_rtt: u32, sample: &mut Sample) {
        self.acknowledge_plain(ack, high_seq, min_rtt, sample);
        while let Some(first) = self.queue.front_mut() {
            if before(ack, first.end()) {
                if before(first.seq, ack) {
                    first.length -= ack.wrapping_sub(first.seq) as u16;
                    first.seq = ack;
                }
                break;
            }
            let sent = *first;
            self.queue.pop_front();
            if sent.flags & SACKED != 0 {
                self.sacked -= 1;
                continue;
            }
            self.uncount(sent.flags);
            sample.delivered += 1;
            if sent.flags & EVER == 0 {
                sample.original_delivered |= at_or_before(sent.end(), high_seq);
                sample.note_order(&sent, self.highest_sacked);
            }
            Self::deliver(&mut self.newest, &sent, min_rtt, sample);
        }
        if self.highest_sacked.is_some() {
            // Passed blocks are cleared, since the sequence space wraps around.
            self.blocks.iter_mut().filter(|block| at_or_before(block.1, ack)).for_each(|block| *block = (0, 0));
        }
        if self.sacked == 0 {
            self.highest_sacked = None;
        }
        if let Some(until) = self.timeline_until {
            self.shorten_timeline(ack, until);
        }
    }

    /// The acknowledged segments at the front that were sent once, as long as nothing was SACKed. Only the latest of
    /// them gives a round-trip sample, and the oldest shows whether any was sent before `high_seq`.
    #[inline]
    fn acknowledge_plain(&mut self, ack: u32, high_seq: u32, min_rtt: u32, sample: &mut Sample) {
        if self.highest_sacked.is_some() {
            return;
        }
        let mut latest = None;
        while let Some(first) = self.queue.front()
            && first.flags & !PUSHED == 0
            && at_or_before(first.end(), ack)
        {
            if latest.is_none() {
                sample.original_delivered |= at_or_before(first.end(), high_seq);
            }
            sample.delivered += 1;
            latest = self.queue.pop_front();
        }
        if let Some(latest) = latest {
            Self::deliver(&mut self.newest, &latest, min_rtt, sample);
        }
    }

    /// Drops acknowledged segments from the timeline, and the whole timeline once all data that was in flight at its
    /// beginning is acknowledged.
    #[cold]
    fn shorten_timeline(&mut self, ack: u32, until: u32) {
        if at_or_before(until, ack) && self.sacked == 0 && self.retransmitted == 0 {
            self.timeline.clear();
            self.timeline_until = None;
            return;
        }
        while self.timeline.front().is_some_and(|(_, end)| at_or_before(*end, ack)) {
            self.timeline.pop_front();
        }
        if self.timeline.len() > 2 * self.queue.len() + LOOKED_AT {
            self.write_timeline();
        }
    }

    /// Writes the timeline anew if there is one.
    fn rewrite_timeline(&mut self) {
        if self.timeline_until.is_some() {
            self.write_timeline();
        }
    }

    /// Writes the timeline from the segments in flight.
    fn write_timeline(&mut self) {
        self.timeline.clear();
        self.timeline.extend(self.queue.iter().filter(|sent| sent.is_undecided()).map(|sent| (sent.sent_at, sent.end())));
        self.timeline.make_contiguous().sort_by_key(|(sent_at, _)| *sent_at);
    }

    /// The segment that an entry of the timeline is for, if its fate is open.
    fn undecided(&self, (sent_at, end): (Instant, u32)) -> Option<usize> {
        let at = self.queue.partition_point(|sent| before(sent.end(), end));
        let sent = self.queue.get(at)?;
        (sent.end() == end && sent.sent_at == sent_at && sent.is_undecided()).then_some(at)
    }

    fn count(&mut self, flags: u8) {
        self.sacked += u32::from(flags & SACKED != 0);
        self.lost += u32::from(flags & LOST != 0);
        self.retransmitted += u32::from(flags & RETRANSMITTED != 0);
    }

    fn uncount(&mut self, flags: u8) {
        self.lost -= u32::from(flags & LOST != 0);
        self.retransmitted -= u32::from(flags & RETRANSMITTED != 0);
    }

    /// One SACK block. A large block that is not known is searched from its two ends only, since blocks grow there.
    /// Segments in the middle that it adds stay unmarked: they may be retransmitted in vain, until they are
    /// acknowledged.
    pub fn sack(&mut self, left: u32, right: u32, high_seq: u32, min_rtt: u32, sample: &mut Sample) {
        let known = self.blocks.iter().position(|(l, r)| l != r && at_or_before(left, *l) && at_or_before(*r, right));
        let (l, r) = known.map_or((right, right), |at| self.blocks[at]);
        // The parts in front of the known block, and behind it.
        let start = self.queue.partition_point(|sent| before(sent.seq, left));
        let front = self.sack_from(start, l, right, high_seq, min_rtt, sample);
        let start = self.queue.partition_point(|sent| at_or_before(sent.end(), r) || before(sent.seq, left));
        let behind = self.sack_from(start, right, right, high_seq, min_rtt, sample);
        if front && behind {
            self.blocks[..=known.unwrap_or(3)].rotate_right(1);
            self.blocks[0] = (left, right);
        }
    }

    /// SACKs the segments from index `start` on that begin before `stop` and end no later than `right`. False if some
    /// were not looked at: see [`GONE_OVER`].
    fn sack_from(&mut self, start: usize, stop: u32, right: u32, high_seq: u32, min_rtt: u32, sample: &mut Sample) -> bool {
        let (mut at, mut gone_over, mut whole) = (start, 0, true);
        while let Some(&sent) = self.queue.get(at) {
            if before(right, sent.end()) || !before(sent.seq, stop) {
                break;
            }
            at += 1;
            if sent.flags & SACKED != 0 {
                gone_over += 1;
                if gone_over == GONE_OVER {
                    let end = self.queue.partition_point(|sent| at_or_before(sent.end(), right) && before(sent.seq, stop));
                    let next = self.sacked_from_end(at, end);
                    (whole, at) = (next == at, next);
                }
                continue;
            }
            let nth = at - 1;
            self.uncount(sent.flags);
            sample.sacked += 1;
            sample.delivered += 1;
            self.sacked += 1;
            if sent.flags & EVER == 0 {
                sample.original_delivered |= at_or_before(sent.end(), high_seq);
                sample.note_order(&sent, self.highest_sacked);
            }
            Self::deliver(&mut self.newest, &sent, min_rtt, sample);
            self.queue[nth].flags = sent.flags & !(LOST | RETRANSMITTED) | SACKED;
            if self.highest_sacked.is_none_or(|highest| before(highest, sent.end())) {
                self.highest_sacked = Some(sent.end());
            }
        }
        whole
    }

    /// The first index from `first` on, before `end`, behind which there are no more than [`GONE_OVER`] segments that
    /// are SACKed. Each of the others that it passes is about to be.
    fn sacked_from_end(&self, first: usize, end: usize) -> usize {
        let (mut at, mut left) = (end, GONE_OVER);
        while at > first && left > 0 {
            at -= 1;
            left -= usize::from(self.queue[at].flags & SACKED != 0);
        }
        at
    }

    /// Marks segments as lost that were sent more than `window` microseconds before the newest delivered segment (RFC
    /// 8985 section 6.2, step 5). Returns how many are newly lost, and in how many microseconds the next segment will
    /// count as lost.
    pub fn detect_loss(&mut self, window: u64, now: Instant) -> (u32, Option<u64>) {
        let mut found = 0;
        let newest = self.newest;
        if newest.rtt == 0 {
            return (0, None);
        }
        if self.timeline_until.is_none() {
            self.timeline_until = self.queue.back().map(Sent::end);
            self.write_timeline();
        }
        let older =
            |(sent_at, end): (Instant, u32)| sent_at < newest.sent_at || (sent_at == newest.sent_at && before(end, newest.end));
        let due = |(sent_at, _): (Instant, u32)| sent_at.after(newest.rtt + window);
        while let Some(&entry) = self.timeline.front() {
            match self.undecided(entry) {
                Some(_) if !older(entry) => break,
                Some(_) if due(entry) > now => {
                    // The last of those that are older decides when all of them are due.
                    let olders = self.timeline.partition_point(|entry| older(*entry));
                    let near = self.timeline.range(..olders).rev().take(LOOKED_AT);
                    let last = near.copied().find(|entry| self.undecided(*entry).is_some()).unwrap_or(entry);
                    return (found, Some(due(last).since(now)));
                }
                Some(at) => {
                    self.mark_lost(at);
                    found += 1;
                }
                None => {}
            }
            self.timeline.pop_front();
        }
        (found, None)
    }

    fn mark_lost(&mut self, at: usize) {
        let sent = &mut self.queue[at];
        if sent.flags & RETRANSMITTED != 0 {
            sent.flags &= !RETRANSMITTED;
            self.retransmitted -= 1;
        }
        if sent.flags & LOST == 0 {
            sent.flags |= LOST;
            self.lost += 1;
        }
        if before(sent.seq, self.hint) || self.lost == 1 {
            self.hint = sent.seq;
        }
    }

    /// Marks the first segment lost (NewReno's partial acknowledgement, RFC 6582). Returns whether it was not before.
    pub fn mark_first_lost(&mut self) -> bool {
        match self.queue.front() {
            Some(first) if first.flags & (SACKED | LOST) == 0 => {
                self.mark_lost(0);
                true
            }
            _ => false,
        }
    }

    /// A retransmission time-out: everything that is not SACKed counts as lost (RFC 6298 section 5).
    /// With `forget`, SACKs do not count any more, since the peer may have dropped the data that it SACKed (RFC 2018
    /// section 8).
    pub fn mark_all_lost(&mut self, forget: bool) {
        if forget {
            self.blocks = Default::default();
        }
        for at in 0..self.queue.len() {
            if forget && self.queue[at].flags & SACKED != 0 {
                self.queue[at].flags &= !SACKED;
                self.sacked -= 1;
            }
            if self.queue[at].flags & SACKED == 0 {
                self.mark_lost(at);
            }
        }
        if self.sacked == 0 {
            self.highest_sacked = None;
        }
        if let Some(first) = self.queue.front() {
            self.hint = first.seq;
        }
    }

    /// A spurious time-out or recovery: nothing is lost any more.
    pub fn forget_losses(&mut self) {
        for sent in &mut self.queue {
            sent.flags &= !LOST;
        }
        self.lost = 0;
        self.rewrite_timeline();
    }

    /// The first segment that is lost and not retransmitted.
    pub fn next_lost(&mut self) -> Option<Sent> {
        if self.lost == 0 {
            return None;
        }
        let hint = self.hint;
        let start = self.queue.partition_point(|sent| before(sent.seq, hint));
        let found = self.queue.iter().skip(start).find(|sent| sent.flags & (LOST | RETRANSMITTED) == LOST).copied();
        self.hint = match found {
            Some(sent) => sent.seq,
            None => self.queue.back().map_or(hint, Sent::end),
        };
        found
    }

    /// The segment that begins at `seq` goes out again.
    pub fn retransmit(&mut self, seq: u32, now: Instant) {
        let at = self.queue.partition_point(|sent| before(sent.seq, seq));
        if let Some(sent) = self.queue.get_mut(at) {
            if sent.flags & RETRANSMITTED == 0 {
                self.retransmitted += 1;
            }
            sent.flags = sent.flags & !UNTIMED | RETRANSMITTED | EVER;
            sent.sent_at = now;
            let end = sent.end();
            if self.timeline_until.is_some() {
                self.timeline.push_back((now, end));
            }
        }
    }

    /// Splits segments that are longer than `mss` (the path MTU has shrunk), so that each fits a packet again.
    pub fn split(&mut self, mss: u32) {
        let mut room = (2 * MAX_SEGMENTS).saturating_sub(self.queue.len());
        // The queue is written anew: each insertion would move everything behind it, and any host on the path can cause
        // such a split as often as it likes.
        for mut rest in core::mem::take(&mut self.queue) {
            while u32::from(rest.length) > mss && room > 0 {
                room -= 1;
                self.count(rest.flags);
                self.queue.push_back(Sent { length: mss as u16, flags: rest.flags & !PUSHED, ..rest });
                rest = Sent { seq: rest.seq.wrapping_add(mss), length: rest.length - mss as u16, ..rest };
            }
            self.queue.push_back(rest);
        }
        self.blocks = Default::default();
        self.rewrite_timeline();
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// As many segments as there may be, cut in two. With an insertion for each, which moves half of the others, this
    /// takes a minute.
    #[test]
    fn what_is_in_flight_is_split_at_once() {
        let (done, finished) = channel();
        std::thread::spawn(move || {
            for round in 0..20u8 {
                let mut board = Scoreboard::default();
                let fate = [0, LOST, SACKED][usize::from(round % 3)] | PUSHED;
                for at in 0..MAX_SEGMENTS as u32 {
                    board.push(at * 90, 90, Instant(1), 0);
                }
                board.queue.iter_mut().for_each(|sent| sent.flags = fate);
                let counted = MAX_SEGMENTS as u32;
                (board.lost, board.sacked) = (u32::from(fate & LOST != 0) * counted, u32::from(fate & SACKED != 0) * counted);
                let before = [board.lost, board.sacked];
                board.split(50);
                assert_eq!([board.lost, board.sacked], before.map(|count| 2 * count));
                let parts = board.queue.iter().map(|sent| (sent.seq, sent.length, sent.flags & PUSHED));
                let expected = (0..counted).flat_map(|at| [(at * 90, 50u16, 0u8), (at * 90 + 50, 40, PUSHED)]);
                assert!(parts.eq(expected), "round {round}");
            }
            done.send(())
        });
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(()));
    }

    /// Two halves with a hole between them are SACKed and forgotten as blocks; then comes a block of all, and one that
    /// has grown at both ends. However many segments were SACKed before, the work for a block is bounded: segments that
    /// it adds in the middle are not searched.
    #[test]
    fn a_block_that_is_not_known_costs_no_look_at_all_that_it_covers() {
        const COUNT: u32 = 3000;
        let mut board = Scoreboard::default();
        let mut sample = Sample { now: Instant(9), ..Sample::default() };
        (0..COUNT).for_each(|at| board.push(at * 10, 10, Instant(1), 0));
        for (left, right) in [(50, 15_000), (15_010, 10 * COUNT)] {
            board.sack(left, right, 0, 0, &mut sample);
        }
        assert_eq!(board.sacked, COUNT - 6);
        for left in [100, 200, 300, 400] {
            board.sack(left, left + 10, 0, 0, &mut sample);
        }
        board.sack(50, 10 * COUNT, 0, 0, &mut sample);
        assert_eq!(board.sacked, COUNT - 6, "the hole is in the middle");
        (COUNT..COUNT + 20).for_each(|at| board.push(at * 10, 10, Instant(2), 0));
        board.sack(20, 10 * (COUNT + 20), 0, 0, &mut sample);
        assert_eq!(board.sacked, COUNT - 6 + 3 + 20, "both ends are");
        let open = board.queue.iter().filter(|sent| sent.flags & SACKED == 0).map(|sent| sent.seq);
        assert!(open.eq([0, 10, 15_000]));
        assert_eq!(sample.sacked, board.sacked);
    }

    /// Loss detection finds every segment that is open and older than the newest delivered one, whatever has happened
    /// to them before.
    #[test]
    fn nothing_open_escapes_loss_detection() {
        let mut random = 1u32;
        let mut draw = |below: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % below
        };
        for round in 0..300u32 {
            let mut board = Scoreboard::default();
            let (first, mut next, mut now) = (u32::MAX - 500 + round, u32::MAX - 500 + round, Instant(1000));
            let mut una = first;
            for _ in 0..200 {
                now = now.after(1 + u64::from(draw(3)));
                let mut sample = Sample { now, ..Sample::default() };
                match draw(8) {
                    0..=2 => {
                        for _ in 0..draw(5) {
                            board.push(next, 10, now, 0);
                            next = next.wrapping_add(10);
                        }
                    }
                    3 if next != una => {
                        una = una.wrapping_add(draw(next.wrapping_sub(una) / 4 + 1));
                        board.acknowledge(una, first, 0, &mut sample);
                    }
                    4 | 5 if next != una => {
                        let left = una.wrapping_add(draw(next.wrapping_sub(una)));
                        board.sack(left, left.wrapping_add(draw(next.wrapping_sub(left)) + 1), first, 0, &mut sample);
                    }
                    6 => {
                        if let Some(lost) = board.next_lost() {
                            board.retransmit(lost.seq, now);
                        }
                    }
                    7 if draw(10) == 0 => board.mark_all_lost(draw(2) == 0),
                    7 if draw(10) == 0 => board.forget_losses(),
                    _ => {
                        board.detect_loss(2, now);
                    }
                }
                let counted = |flag| board.queue.iter().filter(|sent| sent.flags & flag != 0).count() as u32;
                assert_eq!([board.sacked, board.lost, board.retransmitted], [SACKED, LOST, RETRANSMITTED].map(counted));
            }
            let newest = board.newest;
            let open = |sent: &&Sent| {
                let older = sent.sent_at < newest.sent_at || sent.sent_at == newest.sent_at && before(sent.end(), newest.end);
                sent.is_undecided() && older && newest.rtt > 0
            };
            let expected = board.queue.iter().filter(open).count() as u32;
            assert_eq!(board.detect_loss(0, Instant(u64::MAX)), (expected, None), "round {round}");
        }
    }
}
