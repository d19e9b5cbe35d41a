//! Opening a connection: connect, the answer to a SYN, and both at once (RFC 9293 section 3.5, options of RFC 7323,
//! 2018, 6691), with data in the SYN where the caller has a Fast Open cookie (RFC 7413).

use crate::connection::{Agreed, Config, Connection, Due, EndReason, INTERACTIVE, State};
use crate::recovery::Phase;
use crate::scoreboard::Sample;
use crate::segment::{Events, Received, Segment, Transmit};
use crate::seq::{at_or_before, before, later};
use crate::time::Instant;
use baton_wire::{Flags, TcpOptions};

/// State that only the handshake needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opening {
    /// The peer's initial sequence number.
    pub peer_isn: u32,
    /// The SYN that came had data which was taken: data may leave before our SYN is acknowledged.
    pub fast: bool,
    /// Bytes of data that our SYN may carry.
    syn_data: u32,
    /// Our timestamp clock when the first SYN left.
    first_ts: u32,
    /// The peer asks for our SYN-ACK once more.
    resend: bool,
    /// How often the SYN or SYN-ACK was sent again.
    pub syn_retransmissions: u8,
    /// A RST goes out with this sequence number, since a segment acknowledged it although it was never sent.
    refused_ack: Option<u32>,
}

/// The smallest shift with which 16 bits can name all of `capacity`.
fn scale_for(capacity: u32) -> u8 {
    let mut shift = 0;
    while shift < 14 && capacity >> shift > 65535 {
        shift += 1;
    }
    shift
}

impl Connection {
    /// Opens a connection actively. `isn` is the initial sequence number, which must be hard to guess (RFC 6528); so
    /// must `ts_offset`.
    pub fn connect(config: Config, isn: u32, ts_offset: u32, now: Instant) -> Connection {
        let mut connection = Connection::opening(config, isn, ts_offset, now);
        connection.state = State::SynSent;
        // TCP_USER_TIMEOUT counts from the SYN (in Linux, tcp_connect).
        connection.timers.silent_since = now;
        connection
    }

    /// Lets the SYN carry up to `most` of the bytes that are queued before it leaves (RFC 7413 section 4.2.1). The
    /// payload of that transmission begins behind the SYN's own sequence number. The caller adds the option with the
    /// cookie.
    pub fn send_data_in_syn(&mut self, most: u32) {
        self.opening.syn_data = most;
    }

    /// Answers a SYN that came to a listener. None if the segment is not a plain SYN.
    pub fn accept(config: Config, syn: &Segment, isn: u32, ts_offset: u32, now: Instant) -> Option<Connection> {
        if !syn.flags.contains(Flags::SYN) || syn.flags.intersects(Flags::ACK | Flags::RST | Flags::FIN) {
            return None;
        }
        let mut connection = Connection::opening(config, isn, ts_offset, now);
        connection.state = State::SynReceived;
        connection.agree(syn, now);
        let asks_ecn = syn.flags.contains(Flags::ECE | Flags::CWR);
        connection.agreed.ecn = config.ecn && asks_ecn;
        Some(connection)
    }

    /// Takes the data of the SYN that [`Connection::accept`] was called with, since its cookie is good (RFC 7413
    /// section 4.2.2), and lets data be sent before the handshake is over. Returns which bytes the caller has to put
    /// into receive memory.
    pub fn take_data_of_syn(&mut self, length: u32) -> Received {
        let place = length.min(self.receive.capacity);
        let place_seq = self.receive.nxt;
        self.receive.nxt = place_seq.wrapping_add(place);
        (self.receive.last_ack, self.receive.pushed) = (self.receive.nxt, self.receive.nxt);
        self.receive.adv = self.receive.nxt;
        self.opening.fast = true;
        Received { place, place_seq, delivered: place, ..Received::default() }
    }

    fn opening(config: Config, isn: u32, ts_offset: u32, now: Instant) -> Connection {
        let mut connection = Connection::new(config, Agreed::default(), now);
        connection.receive.ts_offset = ts_offset;
        let s = &mut connection.send;
        (s.una, s.nxt, s.end, s.small_end) = (isn, isn, isn.wrapping_add(1), isn);
        connection.recovery.high_seq = isn;
        let limit = config.receive_limit.max(config.receive_buffer);
        connection.receive.wscale = if config.window_scaling { scale_for(limit) } else { 0 };
        connection.limit_window(u32::MAX);
        connection
    }

    /// Takes the peer's SYN: its sequence number and options.
    fn agree(&mut self, syn: &Segment, now: Instant) {
        let options = &syn.options;
        self.opening.peer_isn = syn.seq;
        self.agreed.mss = options.mss.unwrap_or(if self.config.ip_header == 40 { 1220 } else { 536 }).max(48);
        self.agreed.sack = options.sack_permitted && self.config.sack;
        self.agreed.timestamps = options.timestamps.is_some() && self.config.timestamps;
        match options.window_scale.filter(|_| self.config.window_scaling) {
            Some(shift) => self.send.wscale = shift,
            None => {
                self.receive.wscale = 0;
                self.limit_window(u32::MAX);
            }
        }
        let r = &mut self.receive;
        r.nxt = syn.seq.wrapping_add(1);
        (r.read, r.adv, r.last_ack, r.pushed) = (r.nxt, r.nxt, r.nxt, r.nxt);
        r.last_at = now;
        if let Some((value, _)) = options.timestamps {
            (r.ts_recent, r.ts_known) = (value, value != 0);
        }
        self.send.wnd = u32::from(syn.window);
        self.send.max_wnd = self.send.wnd;
        self.receive.wl1 = syn.seq;
        self.set_mtu(self.config.mtu);
    }

    /// A segment while our SYN is out (section 3.10.7.3).
    pub(crate) fn input_syn_sent(&mut self, segment: &Segment, now: Instant) -> Received {
        let mut received = Received::default();
        let has_ack = segment.flags.contains(Flags::ACK);
        let acceptable = has_ack && before(self.send.una, segment.ack) && at_or_before(segment.ack, self.send.nxt);
        // An echo of a timestamp that this end never sent belongs to another connection (Linux checks it like the
        // acknowledgement).
        let echo =
            segment.options.timestamps.map(|(_, echo)| echo).filter(|echo| has_ack && self.config.timestamps && *echo != 0);
        let foreign = echo.is_some_and(|echo| before(echo, self.opening.first_ts) || before(self.ts_now(now), echo));
        if has_ack && (!acceptable || foreign) {
            if !segment.flags.contains(Flags::RST) {
                self.refuse_acknowledgement(segment.ack);
            }
            return received;
        }
        if segment.flags.contains(Flags::RST) {
            if acceptable {
                received.events = self.end(EndReason::Refused);
            }
            return received;
        }
        if !segment.flags.contains(Flags::SYN) {
            return received;
        }
        self.agree(segment, now);
        let ecn = if has_ack { Flags::ECE } else { Flags::ECE | Flags::CWR };
        let answers = segment.flags.contains(ecn) && segment.flags.contains(Flags::CWR) != has_ack;
        self.agreed.ecn = self.config.ecn && answers;
        if !has_ack {
            // Both ends opened at once (section 3.5, figure 8): our SYN goes out again, as an answer to the peer's.
            self.state = State::SynReceived;
            self.opening.resend = true;
            self.due |= Due::ACK;
            return received;
        }
        let freed = self.acknowledge_syn(segment, now);
        self.due |= Due::ACK;
        received.events = Events::ESTABLISHED;
        received.acked = freed;
        if segment.length > 0 || segment.flags.contains(Flags::FIN) {
            let behind_syn =
                Segment { seq: segment.seq.wrapping_add(1), flags: Flags(segment.flags.0 & !Flags::SYN.0), ..*segment };
            self.receive.adv = self.receive.nxt.wrapping_add(self.receive.capacity.min(65535));
            self.take_payload(&behind_syn, now, &mut received);
        }
        received
    }

    /// Handles the peer's SYN once more while this end waits for the acknowledgement of its own: the peer has not got
    /// our answer, or both ends have opened at the same time and this is the peer's answer.
    pub(crate) fn input_second_syn(&mut self, segment: &Segment, now: Instant) -> Received {
        self.due |= Due::ACK;
        self.opening.resend = true;
        let mut received = Received::default();
        let completes =
            segment.flags.contains(Flags::ACK) && before(self.send.una, segment.ack) && at_or_before(segment.ack, self.send.nxt);
        if completes {
            received.acked = self.acknowledge_syn(segment, now);
            self.report_duplicate(segment.seq, segment.seq.wrapping_add(1));
        }
        Received { events: if completes { Events::ESTABLISHED } else { Events::empty() }, ..received }
    }

    /// The acknowledgement of our SYN-ACK. Returns false if it acknowledges something else.
    pub(crate) fn complete_handshake(&mut self, segment: &Segment, now: Instant) -> bool {
        let acceptable = before(self.send.una, segment.ack) && at_or_before(segment.ack, self.send.nxt);
        if acceptable {
            let syn_only = Segment { ack: self.send.una.wrapping_add(1), ..*segment };
            self.acknowledge_syn(&syn_only, now);
        }
        acceptable
    }

    /// Answers an acknowledgement of data that was never sent with a RST at that number (sections 3.10.7.3 and
    /// 3.10.7.4).
    pub(crate) fn refuse_acknowledgement(&mut self, ack: u32) {
        self.opening.refused_ack = Some(ack);
        self.due |= Due::RESET;
    }

    /// The RST for such an acknowledgement; the connection stays as it is.
    pub(crate) fn emit_refusal(&mut self) -> Option<Transmit> {
        let seq = self.opening.refused_ack.take()?;
        self.due.remove(Due::RESET);
        Some(Transmit { seq, flags: Flags::RST, ..Transmit::default() })
    }

    /// Our SYN is acknowledged, and the data in it as far as the segment says. Returns the bytes of send memory that
    /// are free now.
    fn acknowledge_syn(&mut self, segment: &Segment, now: Instant) -> u32 {
        let mut sample = Sample { now, ..Sample::default() };
        let isn_end = self.send.una.wrapping_add(1);
        self.scoreboard.acknowledge(segment.ack, self.recovery.high_seq, 0, &mut sample);
        if let Some(rtt) = sample.rtt {
            self.rtt.sample(rtt.max(1), now.0);
        }
        // A SYN and the data in it count as one.
        self.recovery.delivered += sample.delivered.min(1);
        self.send.una = segment.ack;
        self.send.small_end = later(self.send.small_end, segment.ack);
        let shift = if segment.flags.contains(Flags::SYN) { 0 } else { self.send.wscale };
        self.send.wnd = u32::from(segment.window) << shift;
        self.send.max_wnd = self.send.max_wnd.max(self.send.wnd);
        self.state = if self.send.fin_queued { State::FinWait1 } else { State::Established };
        self.begin_transfer(segment.ack);
        if self.has_unsent() {
            self.receive.quick_acks = INTERACTIVE;
        }
        self.peer_alive();
        self.rearm_send_timer(now);
        self.start_keepalive(now);
        segment.ack.wrapping_sub(isn_end)
    }

    /// Congestion control starts (RFC 6928); a handshake that took more than one retransmission starts with one segment
    /// (RFC 5681 section 3.1, with Linux's tolerance for one that was early). Data that was in our SYN and was not
    /// acknowledged goes out again: that says nothing about the network (RFC 7413 section 4.1.3).
    fn begin_transfer(&mut self, acknowledged: u32) {
        let lossy = self.opening.syn_retransmissions > 1;
        self.congestion.cwnd = if lossy { 1 } else { crate::congestion::INITIAL_WINDOW };
        self.congestion.ssthresh = u32::MAX;
        self.congestion.round_end = acknowledged;
        self.recovery.begin(acknowledged);
        if self.state != State::SynReceived && !self.opening.fast && !self.scoreboard.is_empty() {
            self.scoreboard.split(self.send.mss);
            self.scoreboard.mark_all_lost(false);
            self.recovery.phase = Phase::Loss;
            self.recovery.high_seq = self.send.nxt;
        }
    }

    pub(crate) fn poll_open(&mut self, now: Instant) -> Option<Transmit> {
        let isn = self.send.una;
        if self.scoreboard.is_empty() {
            self.opening.first_ts = self.ts_now(now);
            let data = self.send.end.wrapping_sub(isn.wrapping_add(1)).min(self.opening.syn_data);
            self.scoreboard.push(isn, 1, now, 0);
            if data > 0 {
                self.scoreboard.push(isn.wrapping_add(1), data, now, 0);
                self.scoreboard.push_last();
            }
            self.send.nxt = isn.wrapping_add(1 + data);
            self.rearm_send_timer(now);
            return Some(Transmit { length: data, ..self.emit_syn(isn, now) });
        }
        let lost = self.scoreboard.next_lost().is_some_and(|sent| sent.seq == isn);
        let acknowledges = self.due.take(Due::ACK);
        if !core::mem::take(&mut self.opening.resend) && !lost {
            // An unacceptable segment is answered with an acknowledgement (section 3.10.7.4).
            return (acknowledges && self.state == State::SynReceived).then(|| self.emit_ack(now));
        }
        self.scoreboard.retransmit(isn, now);
        self.opening.syn_retransmissions = self.opening.syn_retransmissions.saturating_add(u8::from(lost));
        Some(self.emit_syn(isn, now))
    }

    fn emit_syn(&mut self, isn: u32, now: Instant) -> Transmit {
        let answering = self.state == State::SynReceived;
        let room = self.config.mtu.saturating_sub(self.config.ip_header + 20);
        let mss = if self.config.max_segment == 0 { room } else { room.min(self.config.max_segment) };
        let scale = if answering { self.receive.wscale > 0 || self.send.wscale > 0 } else { self.config.window_scaling };
        let window = self.receive.capacity.min(65535) as u16;
        let timestamps = if answering { self.agreed.timestamps } else { self.config.timestamps };
        let options = TcpOptions {
            mss: Some(mss as u16),
            window_scale: scale.then_some(self.receive.wscale),
            sack_permitted: if answering { self.agreed.sack } else { self.config.sack },
            timestamps: timestamps.then(|| (self.ts_now(now), self.receive.ts_recent)),
            sack: Default::default(),
        };
        let mut flags = Flags::SYN;
        if answering {
            flags = flags | Flags::ACK;
            self.receive.adv = later(self.receive.adv, self.receive.nxt.wrapping_add(u32::from(window)));
            if self.agreed.ecn {
                flags = flags | Flags::ECE;
            }
        } else if self.config.ecn && self.opening.syn_retransmissions < 2 {
            // RFC 3168 section 6.1.1.1: a path may drop SYNs because they ask for ECN.
            flags = flags | Flags::ECE | Flags::CWR;
        }
        Transmit { seq: isn, ack: if answering { self.receive.nxt } else { 0 }, flags, window, options, ..Transmit::default() }
    }
}
