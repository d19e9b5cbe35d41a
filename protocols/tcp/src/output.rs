//! What to send next: resets, retransmissions, new data, FIN, probes, acknowledgements, in that order.

use crate::connection::{ALWAYS, Connection, Due, INTERACTIVE, State};
use crate::scoreboard::{EVER, PUSHED, UNTIMED};
use crate::segment::Transmit;
use crate::seq::{at_or_before, before, earlier};
use crate::time::Instant;
use crate::timers::{DELAYED_ACK, SendTimer};
use baton_wire::{Acknowledgement, Flags, SackBlocks, TcpOptions};

impl Connection {
    /// The next segment to send, if any. `most` is how many payload bytes the device takes at once (it cuts them into
    /// segments); anything below two segments means one segment at a time. Call until there is none.
    #[inline]
    pub fn poll_transmit(&mut self, now: Instant, most: u32) -> Option<Transmit> {
        if self.nothing_to_send() {
            return None;
        }
        // The acknowledgement that is due, if nothing else has to be sent, by itself or with it.
        if self.state == State::Established && self.reassembly.is_empty() && self.nothing_but_acknowledgement() {
            let Acknowledgement { seq, ack, window, timestamps } = self.acknowledge_now(self.agreed.timestamps, now);
            let options = TcpOptions { timestamps, ..TcpOptions::default() };
            return Some(Transmit { seq, ack, flags: Flags::ACK, window, options, ..Transmit::default() });
        }
        self.next_transmit(now, most)
    }

    /// Whether an acknowledgement is due, and neither data nor anything else that has to be sent with it. SACK blocks
    /// are not considered.
    #[inline(always)]
    pub(crate) fn nothing_but_acknowledgement(&self) -> bool {
        self.due == Due::ACK && !self.has_unsent() && self.scoreboard.lost == 0
    }

    /// Makes an acknowledgement. The caller says whether timestamps were agreed on.
    #[inline(always)]
    pub(crate) fn acknowledge_now(&mut self, timestamps: bool, now: Instant) -> Acknowledgement {
        let window = self.select_window();
        self.acknowledged();
        let timestamps = timestamps.then(|| (self.ts_now(now), self.receive.ts_recent));
        Acknowledgement { seq: self.send.nxt, ack: self.receive.nxt, window, timestamps }
    }

    /// A segment goes out, and with it all that was to be acknowledged.
    #[inline(always)]
    fn acknowledged(&mut self) {
        self.due.remove(Due::ACK);
        self.acknowledged_all();
    }

    /// The same where nothing was due.
    #[inline(always)]
    pub(crate) fn acknowledged_all(&mut self) {
        self.receive.unacked = 0;
        self.receive.last_ack = self.receive.nxt;
        self.timers.ack_at = Instant::NEVER;
    }

    /// The common case after a segment that needs no answer.
    #[inline]
    fn nothing_to_send(&self) -> bool {
        !self.due.intersects(Due::ACK | Due::PROBE | Due::FORCE | Due::RESET) && !self.has_unsent() && self.scoreboard.lost == 0
    }

    fn next_transmit(&mut self, now: Instant, most: u32) -> Option<Transmit> {
        if self.due.contains(Due::RESET) {
            return self.emit_refusal().or_else(|| Some(self.emit_reset(now)));
        }
        match self.state {
            State::SynSent | State::SynReceived => {
                let handshake = self.poll_open(now);
                // RFC 7413 section 4.2.2: the server may answer a SYN's data before the handshake is over.
                return if handshake.is_none() && self.opening.fast { self.poll_new(now, most) } else { handshake };
            }
            State::Closed => return None,
            _ => {}
        }
        if let Some(transmit) = self.poll_retransmission(now) {
            return Some(transmit);
        }
        if let Some(transmit) = self.poll_new(now, most) {
            return Some(transmit);
        }
        if self.due.take(Due::PROBE) {
            return Some(self.emit_probe(now));
        }
        self.due.remove(Due::FORCE);
        if self.due.take(Due::ACK) {
            return Some(self.emit_ack(now));
        }
        None
    }

    fn poll_retransmission(&mut self, now: Instant) -> Option<Transmit> {
        let in_flight = self.in_flight();
        let sent = if core::mem::take(&mut self.recovery.tail_probe_pending) {
            self.due.remove(Due::FORCE);
            *self.scoreboard.back()?
        } else if in_flight < self.congestion.cwnd {
            self.scoreboard.next_lost()?
        } else {
            return None;
        };
        self.scoreboard.retransmit(sent.seq, now);
        self.count_retransmission(now);
        self.count_sent_in_recovery(1);
        if self.timers.send == SendTimer::Off {
            self.rearm_retransmission(now);
        }
        let fin = self.send.fin_queued && sent.end() == self.send.end.wrapping_add(1);
        let length = u32::from(sent.length) - u32::from(fin);
        let flags = if fin { Flags::ACK | Flags::FIN } else { Flags::ACK };
        let flags = if sent.flags & PUSHED == 0 { flags } else { flags | Flags::PSH };
        Some(self.data(sent.seq, length, flags, now))
    }

    fn poll_new(&mut self, now: Instant, most: u32) -> Option<Transmit> {
        if !self.has_unsent() || !self.state_sends() || self.scoreboard.is_full() {
            return None;
        }
        let edge = self.send.una.wrapping_add(self.send.wnd).wrapping_add(u32::from(self.state == State::SynReceived));
        let unsent = self.send.end.wrapping_sub(self.send.nxt);
        let open = if before(self.send.nxt, edge) { edge.wrapping_sub(self.send.nxt) } else { 0 };
        if open > 0 {
            self.restart_after_idle(now);
        }
        // A SYN-ACK that is answered later takes no part of the window.
        let in_flight = self.in_flight() - u32::from(self.state == State::SynReceived);
        let forced = self.due.contains(Due::FORCE);
        // No burst is larger than half of the window, so that acknowledgements keep pacing the data that follows. A FIN
        // without data may exceed the congestion window (both as in Linux).
        let half = (self.congestion.cwnd / 2).max(1);
        let lone_fin = unsent == 0 && self.send.fin_queued;
        let slots = self.congestion.cwnd.saturating_sub(in_flight).min(half).max(u32::from(forced || lone_fin));
        if slots == 0 {
            self.note_usage(true);
            return None;
        }
        let send = &self.send;
        let batch = (most / send.mss).clamp(1, slots) * send.mss;
        let length = unsent.min(open).min(batch);
        let last = length == unsent;
        // A FIN has a sequence number, which the window must have room for; until then a closed window is probed.
        let fin = send.fin_queued && last && length < open;
        if length == 0 && !fin {
            self.watch_what_waits(now);
            return None;
        }
        if !self.worth_sending(length, unsent, send.fin_queued && last, forced) {
            // Full segments are sent; the partial one at the end waits.
            let full = length - length % self.send.mss;
            if full == 0 || full == length {
                self.watch_what_waits(now);
                return None;
            }
            return Some(self.send_new(full, false, false, now));
        }
        Some(self.send_new(length, fin, last, now))
    }

    /// Nagle (Minshall's variant), cork, and the sender's silly window avoidance (RFC 9293 sections 3.7.4 and
    /// 3.8.6.2.1).
    fn worth_sending(&self, length: u32, unsent: u32, ends: bool, forced: bool) -> bool {
        let partial = !length.is_multiple_of(self.send.mss) || length == 0;
        if !partial || ends || forced {
            return true;
        }
        if length < unsent {
            // The window ends here: the partial segment goes if it is at least half of the largest window, else it
            // waits for more.
            return length % self.send.mss >= self.send.max_wnd / 2;
        }
        if self.cork || self.held {
            return false;
        }
        self.config.nodelay || self.scoreboard.is_empty() || at_or_before(self.send.small_end, self.send.una)
    }

    fn send_new(&mut self, length: u32, fin: bool, push: bool, now: Instant) -> Transmit {
        let seq = self.send.nxt;
        let mss = self.send.mss;
        let mut at = 0;
        let mut segments = 0;
        while at < length || (fin && at == length) {
            let piece = (length - at).min(mss);
            let with_fin = fin && at + piece == length;
            self.scoreboard.push(seq.wrapping_add(at), piece + u32::from(with_fin), now, 0);
            segments += 1;
            at += piece;
            if with_fin {
                break;
            }
        }
        self.count_sent_in_recovery(segments);
        self.send.nxt = seq.wrapping_add(length + u32::from(fin));
        if !length.is_multiple_of(mss) {
            self.send.small_end = self.send.nxt;
        }
        self.recovery.last_sent = now;
        self.note_usage(false);
        self.answer_later(now);
        if self.timers.send != SendTimer::Reordering
            && (self.timers.send != SendTimer::Retransmit || segments == self.scoreboard.len())
        {
            self.rearm_send_timer(now);
        }
        self.due.remove(Due::FORCE);
        let mut flags = Flags::ACK;
        // Bursts that the device cuts into segments get PSH, too, so that the peer's large receive passes on each burst
        // as it is (as Linux does).
        if push && length > 0 {
            self.scoreboard.push_last();
        }
        if length > mss || push && length > 0 {
            flags = flags | Flags::PSH;
        }
        if fin {
            flags = flags | Flags::FIN;
        }
        if self.send.cwr_pending && length > 0 {
            self.send.cwr_pending = false;
            flags = flags | Flags::CWR;
        }
        let mut transmit = self.data(seq, length, flags, now);
        if length > mss {
            transmit.segment_size = mss as u16;
        }
        if self.agreed.ecn && length > 0 {
            transmit.ecn = 2;
        }
        transmit
    }

    /// After a pause longer than a time-out the window is worn down (RFC 5681 section 4.1, RFC 2861 as in Linux).
    fn restart_after_idle(&mut self, now: Instant) {
        if !self.scoreboard.is_empty() || self.recovery.last_sent == Instant(0) || !self.config.slow_start_after_idle {
            return;
        }
        let mut idle = now.since(self.recovery.last_sent);
        let timeout = self.rtt.base_timeout();
        let c = &mut self.congestion;
        let floor = c.cwnd.min(crate::congestion::INITIAL_WINDOW);
        while idle > timeout && c.cwnd > floor {
            c.ssthresh = c.ssthresh.max(c.cwnd / 4 * 3);
            c.cwnd = (c.cwnd / 2).max(floor);
            idle -= timeout;
        }
    }

    /// Data goes out shortly after data came in: the two answer each other.
    fn answer_later(&mut self, now: Instant) {
        let r = &mut self.receive;
        let came = r.nxt != self.opening.peer_isn.wrapping_add(1);
        if came && r.quick_acks != ALWAYS && now.since(r.last_at) < DELAYED_ACK {
            r.quick_acks = INTERACTIVE;
        }
    }

    pub(crate) fn emit_ack(&mut self, now: Instant) -> Transmit {
        self.data(self.send.nxt, 0, Flags::ACK, now)
    }

    /// A window or keep-alive probe: an old sequence number, which the peer must answer (RFC 1122 section 4.2.3.6).
    fn emit_probe(&mut self, now: Instant) -> Transmit {
        self.data(self.send.una.wrapping_sub(1), 0, Flags::ACK, now)
    }

    pub(crate) fn emit_reset(&mut self, now: Instant) -> Transmit {
        self.due.remove(Due::RESET);
        let mut transmit = self.data(self.send.nxt, 0, Flags::RST | Flags::ACK, now);
        transmit.window = 0;
        transmit
    }

    /// A segment with the connection's acknowledgement, window and options; the acknowledgement is then no longer owed.
    #[inline]
    pub(crate) fn data(&mut self, seq: u32, length: u32, flags: Flags, now: Instant) -> Transmit {
        let window = self.select_window();
        let timestamps = self.agreed.timestamps.then(|| (self.ts_now(now), self.receive.ts_recent));
        let mut options = TcpOptions { timestamps, ..TcpOptions::default() };
        if self.due.contains(Due::DUPLICATE) || !self.reassembly.is_empty() {
            options.sack = self.sack_blocks(length);
            self.acknowledged_beside_gap(length);
        } else {
            self.acknowledged();
        }
        let flags = if self.due.contains(Due::ECHO) { flags | Flags::ECE } else { flags };
        Transmit { seq, ack: self.receive.nxt, flags, window, options, length, segment_size: 0, ecn: 0 }
    }

    /// The same while there is a gap or a duplicate to report. A segment with data does not report these, and is no
    /// duplicate acknowledgement either (RFC 5681 section 2): so the report stays due.
    fn acknowledged_beside_gap(&mut self, length: u32) {
        let (is_due, ack_at) = (self.due.contains(Due::ACK), self.timers.ack_at);
        self.acknowledged();
        if length > 0 {
            self.timers.ack_at = ack_at;
            self.due |= if is_due { Due::ACK } else { Due::empty() };
        }
    }

    /// SACK blocks (RFC 2018), a duplicate report first (RFC 2883). None beside data: full segments leave no room.
    fn sack_blocks(&mut self, length: u32) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        if !self.agreed.sack || length > 0 {
            return blocks;
        }
        let room = if self.agreed.timestamps { 3 } else { 4 };
        self.due.remove(Due::DUPLICATE);
        if let Some((left, right)) = self.reassembly.duplicate.take() {
            blocks.push(left, right);
        }
        for (left, right) in self.reassembly.sack_blocks(room).as_slice() {
            blocks.push(*left, *right);
        }
        blocks.truncate(room);
        blocks
    }

    /// The path MTU has changed (ICMP, RFC 1191 and 8201, or the route): later segments fit it, and data in flight is
    /// cut to it and sent again.
    pub fn on_mtu_change(&mut self, mtu: u32, now: Instant) {
        let before_change = self.send.mss;
        self.set_mtu(mtu);
        if self.state == State::SynSent {
            // Data in the SYN made it too large: it goes out again at once, without (RFC 7413 section 4.1.3).
            if self.scoreboard.len() > 1 {
                self.scoreboard.mark_all_lost(false);
            }
            return;
        }
        if self.send.mss < before_change {
            self.scoreboard.split(self.send.mss);
            self.scoreboard.mark_all_lost(false);
            self.rearm_retransmission(now);
        }
    }

    /// Takes over data in flight that is known only as a range: it counts as sent at `sent_at`, and gives no round-trip
    /// sample. All of it is taken over, however much it is: an acknowledgement of data that counted as unsent would be
    /// refused for ever.
    pub(crate) fn adopt_in_flight(&mut self, sent_at: Instant) {
        let mss = self.send.mss;
        let data_end = earlier(self.send.nxt, self.send.end);
        let mut seq = self.send.una;
        while before(seq, data_end) {
            let next = earlier(seq.wrapping_add(mss), data_end);
            // The last data that is queued is pushed, also when it is sent again (RFC 9293 MUST-61).
            let pushed = if next == self.send.end { PUSHED } else { 0 };
            self.scoreboard.push(seq, next.wrapping_sub(seq), sent_at, EVER | UNTIMED | pushed);
            seq = next;
        }
        // The kernel sends a FIN by itself, unless data waits that can carry it.
        if before(seq, self.send.nxt) {
            self.scoreboard.push(seq, 1, sent_at, EVER | UNTIMED);
        }
    }
}
