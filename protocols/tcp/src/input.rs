//! Segment arrival (RFC 9293 section 3.10.7), with RFC 5961's defences and PAWS (RFC 7323 section 5).

use crate::connection::{ALWAYS, Connection, Due, EndReason, NOT_PREDICTED, ONE_WAY, Send, State};
use crate::reassembly::most_ranges;
use crate::segment::{Events, Predicted, Received, Segment};
use crate::seq::{at_or_before, before, earlier, later};
use crate::time::Instant;
use crate::timers::DELAYED_ACK;
use baton_abi::record::pair;
use baton_image::TS_RECENT_LASTS;
use baton_wire::{Acknowledgement, Fields, Flags, Plain};

/// Microseconds for which a new gap may be reordering rather than a loss.
const REORDERING: u64 = 50;
/// Bytes of payload from which on a segment counts as full if the one in front of it is as long: less than any usual
/// path carries.
const SMALL: u32 = 500;
/// Microseconds within which two segments count as sent at once.
const AT_ONCE: u64 = 1_000;
/// Answers to unacceptable segments are at least this far apart (Linux's tcp_invalid_ratelimit).
pub(crate) const CHALLENGE_GAP: u64 = 500_000;

/// RFC 5961 section 5.2: whether the peer can have sent this acknowledgement. It must neither acknowledge data that was
/// never sent nor be too old.
fn may_acknowledge(send: &Send, ack: u32) -> bool {
    at_or_before(ack, send.nxt) && at_or_before(send.una.wrapping_sub(send.max_wnd), ack)
}

impl Connection {
    /// Processes one segment. The caller then does what [`Received`] says, and calls [`Connection::poll_transmit`] for
    /// answers.
    #[inline]
    pub fn input(&mut self, segment: &Segment, now: Instant) -> Received {
        let ordinary = segment.flags.0 & !Flags::PSH.0 == Flags::ACK.0;
        if ordinary && !segment.congestion_experienced && segment.options.sack.is_empty() {
            let plain = segment.plain();
            if self.expects(&plain) {
                let (acked, events) = self.take_expected(&plain, now);
                let Plain { seq, length, .. } = plain;
                return Received { skip: 0, place: length, place_seq: seq, delivered: length, acked, events };
            }
        }
        self.input_any(segment, now)
    }

    /// Van Jacobson's header prediction: processes a segment that [`Connection::expects`]. All of its payload lies in
    /// receive memory.
    #[inline(always)]
    pub fn predict(&mut self, segment: &Plain, now: Instant) -> Predicted {
        debug_assert!(self.expects(segment));
        let (acked, events) = self.take_expected(segment, now);
        // Still ESTABLISHED and nothing out of order: no need to look at these again.
        let quiet = self.nothing_but_acknowledgement();
        // The segment has timestamps if both ends have agreed on them.
        let timestamps = segment.timestamps.is_some();
        Predicted { acked, events, acknowledgement: quiet.then(|| self.acknowledge_now(timestamps, now)) }
    }

    /// Checks whether the next segment may be of the most usual kind: data with timestamps while the connection is
    /// open, nothing is in flight, out of order or waits to be sent, and everything is acknowledged. If so, notes that
    /// for [`Connection::predict_data`], which then checks only the segment, as Linux does with `pred_flags`.
    /// [`Connection::disable_prediction`] must be called before anything else is done to the connection.
    pub fn enable_prediction(&mut self) -> bool {
        let (send, receive) = (&self.send, &self.receive);
        let field = send.wnd >> send.wscale;
        let usual = send.una == send.nxt
            && send.una == send.end
            && receive.unacked == 0
            && receive.last_ack == receive.nxt
            && self.state == State::Established
            && self.due.is_empty()
            && self.agreed.timestamps
            && receive.ts_known
            && !send.fin_queued
            && self.reassembly.is_empty()
            && self.timers.probes | self.rtt.backoff == 0
            && self.timers.ack_at == Instant::NEVER
            // No later segment has set the window, and this segment's window is the same.
            && !before(receive.nxt, receive.wl1)
            && field > 0
            && field <= u32::from(u16::MAX)
            && field << send.wscale == send.wnd
            && send.wnd <= send.max_wnd
            && self.has_ordinary_window();
        debug_assert!(!usual || self.scoreboard.lost == 0, "nothing is in flight");
        self.receive.predicted = if usual { Fields::control_of(field as u16) } else { NOT_PREDICTED };
        usual
    }

    /// No segment is predicted any more.
    #[inline(always)]
    pub fn disable_prediction(&mut self) {
        self.receive.predicted = NOT_PREDICTED;
    }

    /// [`Connection::predict`] for the segment that [`Connection::enable_prediction`] has found possible, if that
    /// segment is to be acknowledged at once. Afterwards the next segment may be predicted, too. All of the payload has
    /// to be put into receive memory before the acknowledgement leaves. For any other segment returns None and does
    /// nothing. `clock` is the time in milliseconds.
    #[inline(always)]
    pub fn predict_data(&mut self, segment: &Fields, now: Instant, clock: u32) -> Option<Acknowledgement> {
        let Fields { control, numbers, value, length } = *segment;
        let (send, receive) = (&mut self.send, &mut self.receive);
        let (seq, ack) = (receive.nxt, send.una);
        let usual = control == receive.predicted
            && numbers == pair(ack, seq)
            && value != 0
            && !before(value, receive.ts_recent)
            // There is data, and not more than the window has room for.
            && length.wrapping_sub(1) < receive.adv.wrapping_sub(seq);
        if !usual {
            return None;
        }
        if receive.quick_acks != ALWAYS && !receive.takes_quick_ack() && length < 2 * send.mss {
            return None;
        }
        receive.last_at = now;
        receive.ts_recent = value;
        receive.nxt = seq.wrapping_add(length);
        receive.last_ack = receive.nxt;
        receive.wl1 = seq;
        let timestamps = Some((clock.wrapping_add(receive.ts_offset), value));
        Some(Acknowledgement { seq: ack, ack: seq.wrapping_add(length), window: self.next_window(), timestamps })
    }

    /// Whether the segment is the next one in order of an open connection with nothing out of order, and has nothing
    /// unusual. Any other segment must go to [`Connection::input`].
    #[inline(always)]
    pub fn expects(&self, segment: &Plain) -> bool {
        if segment.seq != self.receive.nxt || self.state != State::Established || !self.reassembly.is_empty() {
            return false;
        }
        if segment.timestamps.is_some() != self.agreed.timestamps {
            return false;
        }
        if let Some((value, _)) = segment.timestamps
            && self.receive.ts_known
            && before(value, self.receive.ts_recent)
        {
            return false;
        }
        let room = self.receive.adv.wrapping_sub(self.receive.nxt);
        let in_flight = self.send.nxt.wrapping_sub(self.send.una);
        segment.length <= room && segment.ack.wrapping_sub(self.send.una) <= in_flight
    }

    #[inline(always)]
    fn take_expected(&mut self, segment: &Plain, now: Instant) -> (u32, Events) {
        self.receive.last_at = now;
        if let Some((value, _)) = segment.timestamps {
            // The remaining condition of RFC 7323 section 4.3; the others have been checked.
            if segment.seq == self.receive.last_ack {
                self.receive.ts_recent = value;
                // Some hosts send 0 until they have a clock value; as in Linux, 0 is not used for comparisons.
                self.receive.ts_known = value != 0;
            }
        }
        let (acked, events) = self.process_plain_ack(segment, now);
        if segment.length > 0 {
            self.receive.nxt = segment.seq.wrapping_add(segment.length);
            self.schedule_ack(segment.length, segment.pushed, now);
        }
        (acked, events)
    }

    fn input_any(&mut self, segment: &Segment, now: Instant) -> Received {
        self.held = false;
        match self.state {
            State::Closed => return Received::default(),
            State::SynSent => return self.input_syn_sent(segment, now),
            _ => {}
        }
        if self.resets_with_fin(segment) {
            return Received { events: self.end(EndReason::Reset), ..Received::default() };
        }
        if self.too_old(segment, now) || !self.acceptable(segment) {
            if segment.flags.contains(Flags::SYN) && !segment.flags.contains(Flags::RST) {
                // RFC 5961 section 4.2: a SYN is challenged whatever its sequence number.
                self.challenge(now);
            } else if !segment.flags.contains(Flags::RST) {
                self.refuse(segment, now);
            }
            return Received::default();
        }
        if segment.flags.contains(Flags::RST) {
            return self.input_reset(segment, now);
        }
        if segment.flags.contains(Flags::SYN) {
            if self.state == State::SynReceived && segment.seq == self.opening.peer_isn {
                return self.input_second_syn(segment, now);
            }
            self.challenge(now);
            return Received::default();
        }
        if !segment.flags.contains(Flags::ACK) {
            return Received::default();
        }
        self.input_acceptable(segment, now)
    }

    fn input_acceptable(&mut self, segment: &Segment, now: Instant) -> Received {
        let mut received = Received::default();
        if self.state == State::SynReceived {
            if !self.complete_handshake(segment, now) {
                self.refuse_acknowledgement(segment.ack);
                return received;
            }
            received.events |= Events::ESTABLISHED;
        }
        if !may_acknowledge(&self.send, segment.ack) {
            self.challenge(now);
            return Received::default();
        }
        self.take_timestamp(segment.seq, segment.options.timestamps, now);
        self.timers.probes = 0;
        let (acked, events) = self.process_ack(segment, now);
        received.acked = acked;
        received.events |= events;
        if matches!(self.state, State::Closed) {
            return received;
        }
        self.note_ecn(segment);
        if segment.length > 0 || segment.flags.contains(Flags::FIN) {
            self.take_payload(segment, now, &mut received);
        }
        received
    }

    /// PAWS: whether the segment is a leftover of an earlier round of the sequence space.
    fn too_old(&self, segment: &Segment, now: Instant) -> bool {
        let r = &self.receive;
        match segment.options.timestamps {
            Some((value, _)) if self.agreed.timestamps && r.ts_known => {
                before(value, r.ts_recent)
                    && now.since(r.last_at) < TS_RECENT_LASTS
                    && !segment.flags.contains(Flags::RST)
                    && !self.was_overtaken(segment, r.ts_recent.wrapping_sub(value))
            }
            _ => false,
        }
    }

    /// Whether a segment whose timestamp is this many milliseconds too old is an acknowledgement that was overtaken in
    /// the network: it has no data that could be wrong, and its SACK blocks count. (Linux, tcp_disordered_ack_check,
    /// accepts only such acknowledgements that say nothing new; with that rule, a path that reorders and duplicates was
    /// slower by a tenth.)
    fn was_overtaken(&self, segment: &Segment, age: u32) -> bool {
        let plain = segment.length == 0 && segment.flags.0 & !Flags::PSH.0 == Flags::ACK.0;
        plain
            && segment.seq == self.receive.nxt
            // A time-out and a fifth.
            && u64::from(age) * 1000 <= self.rtt.timeout() / 5 * 6
    }

    /// The four cases of RFC 9293 table 6, in the lenient form that also lets retransmissions of old data be answered.
    fn acceptable(&self, segment: &Segment) -> bool {
        let r = &self.receive;
        // The left edge is the last acknowledgement sent, so that segments between it and rcv_nxt can still update the
        // window.
        !before(segment.end(), r.last_ack) && at_or_before(segment.seq, r.adv)
    }

    /// Answers an unacceptable segment with our state (section 3.10.7.4): at once if it carries data, else not too
    /// often.
    fn refuse(&mut self, segment: &Segment, now: Instant) {
        if segment.length > 0 || segment.flags.contains(Flags::FIN) {
            // Only data that is here is a duplicate: a report of more would be taken for an acknowledgement of it.
            // Before RCV.NXT also where the sequence space wraps.
            let (left, next) = (segment.seq, self.receive.nxt);
            if before(left, next) {
                self.report_duplicate(left, earlier(left.wrapping_add(segment.length), next));
            }
            self.due |= Due::ACK;
            if self.state == State::TimeWait {
                self.enter_time_wait(now);
            }
        } else {
            self.challenge(now);
        }
    }

    /// A challenge acknowledgement (RFC 5961), limited in rate.
    fn challenge(&mut self, now: Instant) {
        if self.challenge_at <= now {
            self.challenge_at = now.after(CHALLENGE_GAP);
            self.due |= Due::ACK;
        }
    }

    /// Whether it is a reset with the number of the peer's FIN. A host that ends a program abruptly may send both, and
    /// not answer a challenge (macOS); so it counts, as in Linux (tcp_reset_check), though RFC 5961 section 3.2 asks
    /// for RCV.NXT.
    fn resets_with_fin(&self, segment: &Segment) -> bool {
        segment.flags.contains(Flags::RST)
            && segment.seq == self.receive.nxt.wrapping_sub(1)
            && matches!(self.state, State::CloseWait | State::LastAck | State::Closing)
    }

    fn input_reset(&mut self, segment: &Segment, now: Instant) -> Received {
        // RFC 5961 section 3.2: only an exact match resets.
        if segment.seq != self.receive.nxt {
            self.challenge(now);
            return Received::default();
        }
        if self.state == State::TimeWait {
            // RFC 1337 section 3: it would end TIME-WAIT too early.
            return Received::default();
        }
        let events = self.end(EndReason::Reset);
        Received { events, ..Received::default() }
    }

    /// Takes over the timestamp of a segment that brings no new data, since the connection's last owner has processed
    /// the segment. Returns false, and takes nothing, if the peer cannot have sent the segment: it lies further back
    /// than a window, or its acknowledgement is impossible. Anybody can send segments with this 4-tuple, and half of
    /// all sequence numbers come before RCV.NXT. With the timestamp of a forged segment, PAWS would refuse all segments
    /// of the peer, here and in the kernel, which gets TS.Recent with the connection.
    pub fn learn_timestamp(&mut self, segment: &Segment, now: Instant) -> bool {
        let behind = self.receive.nxt.wrapping_sub(segment.seq);
        let acknowledges = segment.flags.contains(Flags::ACK) && may_acknowledge(&self.send, segment.ack);
        if behind > self.receive.memory || !acknowledges || segment.flags.contains(Flags::RST) {
            return false;
        }
        if self.agreed.timestamps {
            self.take_timestamp(segment.seq, segment.options.timestamps, now);
        }
        true
    }

    #[inline(always)]
    fn take_timestamp(&mut self, seq: u32, timestamps: Option<(u32, u32)>, now: Instant) {
        let r = &mut self.receive;
        if now.since(r.last_at) >= TS_RECENT_LASTS {
            // This also happens if the segment's own timestamp does not count, because the segment overtook the next
            // one in order.
            (r.ts_recent, r.ts_known) = (0, false);
        }
        r.last_at = now;
        if let Some((value, _)) = timestamps {
            // RFC 7323 section 4.3: from segments that cover the last acknowledgement sent.
            if at_or_before(seq, r.last_ack) && !(r.ts_known && before(value, r.ts_recent)) {
                r.ts_recent = value;
                r.ts_known = value != 0;
            }
        }
    }

    /// TS.Recent for the connection's next owner, which does not learn how old the value is; 0 if it is too old for
    /// comparisons.
    pub(crate) fn recent_timestamp(&self, now: Instant) -> u32 {
        let r = &self.receive;
        if now.since(r.last_at) < TS_RECENT_LASTS { r.ts_recent } else { 0 }
    }

    fn note_ecn(&mut self, segment: &Segment) {
        if !self.agreed.ecn {
            return;
        }
        if segment.flags.contains(Flags::CWR) {
            self.due.remove(Due::ECHO);
        }
        if segment.congestion_experienced {
            self.due |= Due::ECHO;
            self.due |= Due::ACK;
        }
    }

    pub(crate) fn take_payload(&mut self, segment: &Segment, now: Instant, received: &mut Received) {
        if self.receive.fin || matches!(self.state, State::TimeWait) {
            self.due |= Due::ACK;
            if self.state == State::TimeWait && segment.flags.contains(Flags::FIN) {
                // The peer's FIN again (section 3.10.7.4, eighth check).
                self.enter_time_wait(now);
            }
            return;
        }
        let next = self.receive.nxt;
        let skip = if before(segment.seq, next) { next.wrapping_sub(segment.seq) } else { 0 };
        if skip > 0 {
            self.report_duplicate(segment.seq, earlier(next, segment.seq.wrapping_add(segment.length)));
            self.due |= Due::ACK;
        }
        let seq = segment.seq.wrapping_add(skip);
        let whole_end = segment.seq.wrapping_add(segment.length);
        let end = if before(self.receive.adv, whole_end) { self.receive.adv } else { whole_end };
        let length = if before(seq, end) { end.wrapping_sub(seq) } else { 0 };
        // A FIN counts only if nothing in front of it was cut off.
        let fin = segment.flags.contains(Flags::FIN) && end == whole_end && at_or_before(next, whole_end);
        (received.skip, received.place, received.place_seq) = (skip.min(segment.length), length, seq);
        if end != whole_end {
            // Data beyond the window is dropped, and answered with an acknowledgement: a closed window is probed with a
            // byte of data (section 3.8.6.1).
            self.due |= Due::ACK;
        }
        if seq != next {
            self.take_out_of_order(seq, seq.wrapping_add(length), fin, now, received);
            return;
        }
        if fin {
            self.reassembly.insert_fin(whole_end);
        }
        if length > 0 {
            let in_order = self.receive.nxt.wrapping_add(length);
            if let Some((left, right)) = self.reassembly.overlap(next, in_order) {
                // RFC 2883 section 4: the segment fills a hole, and also repeats data that was held behind that hole.
                self.report_duplicate_too(left, right);
            }
            let reached = self.reassembly.advance(in_order);
            received.delivered = reached.wrapping_sub(next);
            self.receive.nxt = reached;
            if reached != in_order || !self.reassembly.is_empty() {
                self.due |= Due::ACK;
            }
            self.schedule_ack(length, segment.flags.contains(Flags::PSH), now);
        }
        if self.reassembly.fin_at() == Some(self.receive.nxt) {
            self.take_fin(now, received);
        }
    }

    fn take_out_of_order(&mut self, seq: u32, end: u32, fin: bool, now: Instant, received: &mut Received) {
        self.report_gap(now);
        if fin {
            self.reassembly.insert_fin(end);
        }
        if seq == end {
            received.place = 0;
            return;
        }
        let overlap = self.reassembly.overlap(seq, end);
        if let Some((left, right)) = overlap {
            // Also of a segment that brings something new (RFC 2883 section 4).
            self.report_duplicate(left, right);
        }
        if overlap == Some((seq, end)) {
            self.reassembly.touch_at(seq);
            received.place = 0;
        } else if !self.reassembly.insert(seq, end, most_ranges(self.receive.capacity)) {
            received.place = 0;
        }
    }

    /// A gap is acknowledged at once (RFC 5681 section 4.2), or, if SACK reports to the peer everything that it
    /// has missed until then, after [`REORDERING`]: segments that come by several processors overtake each other
    /// without any being lost.
    fn report_gap(&mut self, now: Instant) {
        let report_at = now.after(REORDERING);
        if self.agreed.sack && self.reassembly.is_empty() {
            self.timers.ack_at = self.timers.ack_at.min(report_at);
        } else if self.timers.ack_at > report_at {
            self.due |= Due::ACK;
        }
    }

    /// The peer's FIN is next in order (section 3.10.7.4, eighth check).
    fn take_fin(&mut self, now: Instant, received: &mut Received) {
        self.receive.fin = true;
        // Nothing can follow a FIN: data behind it is no part of the stream (as in Linux).
        self.reassembly.clear();
        self.receive.nxt = self.receive.nxt.wrapping_add(1);
        // A FIN is taken even where the window ends.
        self.receive.adv = later(self.receive.adv, self.receive.nxt);
        self.due |= Due::ACK;
        received.events |= Events::FIN;
        match self.state {
            State::Established | State::SynReceived => self.state = State::CloseWait,
            State::FinWait1 => self.state = State::Closing,
            State::FinWait2 => {
                self.enter_time_wait(now);
                received.events |= Events::TIME_WAIT;
            }
            _ => {}
        }
    }

    pub(crate) fn report_duplicate(&mut self, left: u32, right: u32) {
        if self.agreed.sack && before(left, right) {
            self.reassembly.duplicate = Some((left, right));
            self.due |= Due::DUPLICATE;
        }
    }

    /// [`Connection::report_duplicate`], unless another part of the same segment is reported.
    fn report_duplicate_too(&mut self, left: u32, right: u32) {
        if self.reassembly.duplicate.is_none() {
            self.report_duplicate(left, right);
        }
    }

    /// Delayed acknowledgement (RFC 5681 section 4.2): every second full segment, or after 40 ms. The peer's full
    /// segments may be smaller than ours: then the second of the same size is one.
    #[inline(always)]
    fn schedule_ack(&mut self, length: u32, pushed: bool, now: Instant) {
        let r = &mut self.receive;
        r.unacked += length;
        if r.quick_acks > ONE_WAY {
            r.quick_acks -= u8::from(r.quick_acks != ALWAYS);
            self.due |= Due::ACK;
        } else if r.unacked >= 2 * (if length < SMALL { self.send.mss } else { length.min(self.send.mss) }) {
            self.due |= Due::ACK;
        } else {
            self.delay_ack(length, pushed, now);
        }
    }

    /// Delays an acknowledgement, unless the peer seems to wait for it: by Nagle's rule the peer sends no partial
    /// segment until the last one is acknowledged.
    ///
    /// A partial segment that ends a write (PSH) may wait for the program's answer, but not if the program does not
    /// answer, nor a second one of them (as in Linux, tcp_cleanup_rbuf, but there the program has to read first). A
    /// segment that ends no write has more behind it, which waits if a partial one came before (in Linux anything
    /// beyond a full segment counts). If the peer has not sent that at once, it did not wait for an answer.
    ///
    /// Kept apart so that none of this is computed where it is not needed.
    #[inline(never)]
    fn delay_ack(&mut self, length: u32, pushed: bool, now: Instant) {
        let (r, ack_at) = (&mut self.receive, &mut self.timers.ack_at);
        let awaited = match pushed {
            true => before(r.last_ack, r.pushed) || r.quick_acks == ONE_WAY && length != self.send.mss,
            false => r.unacked > self.send.mss,
        };
        if pushed {
            r.pushed = r.nxt;
        }
        if awaited {
            self.due |= Due::ACK;
            if *ack_at < now.after(DELAYED_ACK - AT_ONCE) && self.reassembly.is_empty() {
                r.expect_no_answer();
            }
        } else if *ack_at == Instant::NEVER {
            *ack_at = now.after(DELAYED_ACK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::{Config, QUICK_ACKS};
    use crate::segment::Transmit;

    const MILLI: u64 = 1000;
    const MSS: u32 = 1448;

    fn random(seed: u64) -> impl FnMut(u32) -> u32 {
        let mut state = seed;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % below
        }
    }

    /// Two ends of an open connection without TCP_NODELAY, on a path without delay.
    struct Pair {
        /// The one that writes, and the one whose acknowledgements are judged.
        ends: [Connection; 2],
        now: Instant,
        /// Bytes that a device of the writer's takes at once.
        most: u32,
    }

    impl Pair {
        /// After the first acknowledgements, which are never delayed.
        fn new(most: u32) -> Pair {
            let now = Instant(1_000_000);
            let client = Connection::connect(Config::default(), 1000, 7, now);
            let mut pair = Pair { ends: [client.clone(), client], now, most };
            let syn = pair.ends[0].poll_transmit(now, 0).expect("a SYN");
            let syn = Segment { seq: syn.seq, flags: syn.flags, window: syn.window, options: syn.options, ..Segment::default() };
            pair.ends[1] = Connection::accept(Config::default(), &syn, 2000, 9, now).expect("a plain SYN");
            pair.exchange();
            for _ in 0..QUICK_ACKS {
                pair.now = pair.now.after(MILLI);
                pair.write(&[MSS]);
            }
            pair
        }

        /// Whose reader's program has answered what came.
        fn answering(most: u32) -> Pair {
            let mut pair = Pair::new(most);
            pair.write(&[100]);
            pair.answer();
            pair
        }

        /// Moves segments until neither end has any left. Returns how many pure acknowledgements the reader has sent.
        fn exchange(&mut self) -> u32 {
            let mut pure = 0;
            loop {
                let mut any = false;
                for from in 0..2 {
                    while let Some(sent) = self.ends[from].poll_transmit(self.now, self.most) {
                        any = true;
                        pure += u32::from(from == 1 && sent.length == 0 && sent.flags == Flags::ACK);
                        let Transmit { seq, ack, flags, window, options, length, .. } = sent;
                        let segment = Segment { seq, ack, flags, window, options, length, congestion_experienced: false };
                        let to = &mut self.ends[1 - from];
                        let received = to.input(&segment, self.now);
                        assert_eq!(received.place, length, "all of it fits");
                        assert!(to.consumed(received.delivered));
                        if from == 0 {
                            break;
                        }
                    }
                }
                if !any {
                    return pure;
                }
            }
        }

        /// The program writes these lengths one after the other. Returns what [`Pair::exchange`] does.
        fn write(&mut self, lengths: &[u32]) -> u32 {
            let mut pure = 0;
            for length in lengths {
                assert!(self.ends[0].queue(*length));
                pure += self.exchange();
            }
            pure
        }

        /// The reader's program answers.
        fn answer(&mut self) -> u32 {
            assert!(self.ends[1].queue(100));
            self.exchange()
        }

        /// Time passes, and timers that expire meanwhile do their work.
        fn wait(&mut self, micros: u64) {
            let until = self.now.after(micros);
            while let next = self.ends[0].next_timeout().min(self.ends[1].next_timeout())
                && next <= until
            {
                self.now = next;
                for end in &mut self.ends {
                    end.on_timeout(next);
                }
                self.exchange();
            }
            self.now = until;
        }

        fn all_came(&self) -> bool {
            self.ends[1].rcv_nxt() == self.ends[0].snd_end()
        }
    }

    /// A program that only receives: what its peer writes comes without time passing, whatever Nagle's rule holds back
    /// there until an acknowledgement comes.
    #[test]
    fn a_message_waits_for_no_acknowledgement() {
        for seed in 0..100 {
            let mut draw = random(seed);
            let mut pair = Pair::new(if draw(2) == 0 { 0 } else { 65536 });
            for _ in 0..100 {
                let most = [400, 3000, 20_000][draw(3) as usize];
                let lengths = [1 + draw(most), 1 + draw(3000)];
                pair.write(&lengths[..=draw(2) as usize]);
                assert!(pair.all_came(), "{lengths:?}");
                pair.wait(u64::from(draw(5)) * MILLI);
            }
        }
    }

    /// A program that answers each request: its answer is the acknowledgement of a request that came in one write.
    #[test]
    fn an_answer_is_the_acknowledgement() {
        for length in [1, 100, 499, 500, 1000, MSS, MSS + 100] {
            for most in [0, 65536] {
                let mut pair = Pair::answering(most);
                for _ in 0..100 {
                    pair.wait(MILLI);
                    let pure = pair.write(&[length]);
                    assert!(pair.all_came());
                    pair.wait(MILLI);
                    assert_eq!((pure, pair.answer()), (0, 0), "{length} bytes");
                }
            }
        }
    }

    /// Where a request is two writes, a full segment that does not end the second one shows that the peer has more,
    /// which waits until the first write is acknowledged.
    #[test]
    fn a_request_in_two_writes_does_not_wait() {
        for second in [MSS + 1, 2000, 2 * MSS - 1, 2 * MSS + 1, 4000, 10_000] {
            for most in [0, 65536] {
                let mut pair = Pair::answering(most);
                for _ in 0..100 {
                    pair.wait(MILLI);
                    pair.write(&[300, second]);
                    assert!(pair.all_came(), "{second} bytes behind the first");
                    pair.answer();
                }
            }
        }
    }

    /// A program that has stopped to answer: one acknowledgement was delayed in vain, and then none is.
    #[test]
    fn after_a_delay_in_vain_small_messages_are_acknowledged_at_once() {
        let mut pair = Pair::answering(0);
        pair.wait(MILLI);
        assert_eq!(pair.write(&[100, 100]), 0);
        assert!(!pair.all_came(), "as on Linux, where the program seems to answer");
        pair.wait(DELAYED_ACK);
        assert!(pair.all_came());
        for _ in 0..100 {
            pair.wait(MILLI);
            assert_eq!(pair.write(&[100]), 1);
        }
        pair.answer();
        pair.wait(MILLI);
        assert_eq!(pair.write(&[100]), 0, "it answers again");
    }

    /// The same if messages fill a full segment before the delay is over.
    #[test]
    fn fast_messages_wait_once() {
        let mut pair = Pair::answering(0);
        let waited = (0..1000).filter(|_| {
            pair.wait(MILLI);
            pair.write(&[100]);
            !pair.all_came()
        });
        assert!(waited.count() < (MSS / 100 + 2) as usize);
    }

    /// A peer with TCP_NODELAY may have only so many segments on their way, however small they are: every second one is
    /// acknowledged, also of a program that has answered before.
    #[test]
    fn every_second_write_is_acknowledged() {
        for length in [1, 36, 300, 1000, MSS - 1, MSS] {
            let mut pair = Pair::answering(0);
            pair.ends[0].set_nodelay(true);
            let pure: u32 = (0..100).map(|_| pair.write(&[length])).sum();
            assert!((50..=100).contains(&pure), "{pure} of 100 with {length} bytes");
        }
    }

    /// Bulk data is acknowledged every second segment, also where each segment is a write, and where small messages
    /// came between.
    #[test]
    fn every_second_full_segment_is_acknowledged() {
        let mut pair = Pair::new(0);
        assert_eq!(pair.write(&[1000 * MSS]), 500);
        assert_eq!(pair.write(&[MSS; 1000]), 500);
        assert_eq!(pair.write(&[100]), 1);
        assert_eq!(pair.write(&[1000 * MSS]), 500);
        pair.answer();
        assert_eq!(pair.write(&[1000 * MSS]), 500, "also of a program that answers");
    }
}
