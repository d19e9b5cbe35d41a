//! Opening a connection: connect, and the answer to a SYN (RFC 9293 section 3.5, options of RFC 7323, 2018, 6691).

use crate::connection::{Agreed, Config, Connection, Due, EndReason, State};
use crate::scoreboard::Sample;
use crate::segment::{Events, Received, Segment, Transmit};
use crate::time::Instant;
use baton_wire::{Flags, TcpOptions};

/// The smallest shift with which 16 bits can name all of `capacity`.
fn scale_for(capacity: u32) -> u8 {
    let mut shift = 0;
    while shift < 14 && capacity >> shift > 65535 {
        shift += 1;
    }
    shift
}

impl Connection {
    /// Opens a connection actively. `isn` is the initial sequence number, which must be hard to guess (RFC 6528); so must `ts_offset`.
    pub fn connect(config: Config, isn: u32, ts_offset: u32, now: Instant) -> Connection {
        let mut connection = Connection::opening(config, isn, ts_offset, now);
        connection.state = State::SynSent;
        connection
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

    fn opening(config: Config, isn: u32, ts_offset: u32, now: Instant) -> Connection {
        let mut connection = Connection::new(config, Agreed::default(), now);
        connection.ts_offset = ts_offset;
        let s = &mut connection.send;
        (s.una, s.nxt, s.end, s.small_end) = (isn, isn, isn.wrapping_add(1), isn);
        connection.recovery.high_seq = isn;
        connection.receive.wscale = scale_for(config.receive_buffer);
        connection.receive.capacity = config.receive_buffer - (1 << connection.receive.wscale);
        connection
    }

    /// Takes the peer's SYN: its sequence number and options.
    fn agree(&mut self, syn: &Segment, now: Instant) {
        let options = &syn.options;
        self.agreed.mss = options.mss.unwrap_or(if self.config.ip_header == 40 { 1220 } else { 536 }).max(48);
        self.agreed.sack = options.sack_permitted;
        self.agreed.timestamps = options.timestamps.is_some();
        match options.window_scale {
            Some(shift) => self.send.wscale = shift,
            None => {
                self.receive.wscale = 0;
                self.receive.capacity = self.config.receive_buffer.min(65535);
            }
        }
        let r = &mut self.receive;
        r.nxt = syn.seq.wrapping_add(1);
        (r.read, r.adv, r.last_ack) = (r.nxt, r.nxt, r.nxt);
        r.last_at = now;
        if let Some((value, _)) = options.timestamps {
            (r.ts_recent, r.ts_known) = (value, true);
        }
        self.send.wnd = u32::from(syn.window);
        self.send.max_wnd = self.send.wnd;
        self.send.wl1 = syn.seq;
        self.set_mtu(self.config.mtu);
    }

    /// A segment while our SYN is out (section 3.10.7.3). Simultaneous open is not offered: nobody is known to use it.
    pub(crate) fn input_syn_sent(&mut self, segment: &Segment, now: Instant) -> Received {
        let mut received = Received::default();
        let acceptable = segment.flags.contains(Flags::ACK) && segment.ack == self.send.nxt && self.send.nxt != self.send.una;
        if segment.flags.contains(Flags::RST) {
            if acceptable {
                received.events = self.end(EndReason::Refused);
            }
            return received;
        }
        if !acceptable || !segment.flags.contains(Flags::SYN) {
            return received;
        }
        self.agree(segment, now);
        self.agreed.ecn = self.config.ecn && segment.flags.contains(Flags::ECE) && !segment.flags.contains(Flags::CWR);
        self.acknowledge_syn(segment, now);
        self.due |= Due::ACK;
        received.events = Events::ESTABLISHED;
        received
    }

    /// The acknowledgement of our SYN-ACK. Returns false if it acknowledges something else.
    pub(crate) fn complete_handshake(&mut self, segment: &Segment) -> bool {
        if segment.ack != self.send.una.wrapping_add(1) && crate::seq::before(segment.ack, self.send.una.wrapping_add(1)) {
            return false;
        }
        let now = self.receive.last_at;
        self.acknowledge_syn(segment, now);
        true
    }

    fn acknowledge_syn(&mut self, segment: &Segment, now: Instant) {
        let mut sample = Sample { now, ..Sample::default() };
        let isn_end = self.send.una.wrapping_add(1);
        self.scoreboard.acknowledge(isn_end, self.recovery.high_seq, 0, &mut sample);
        if let Some(rtt) = sample.rtt.filter(|rtt| *rtt > 0) {
            self.rtt.sample(rtt, now.0);
        }
        self.send.una = isn_end;
        self.send.small_end = isn_end;
        self.recovery.high_seq = isn_end;
        self.congestion.round_end = isn_end;
        let shift = if segment.flags.contains(Flags::SYN) { 0 } else { self.send.wscale };
        self.send.wnd = u32::from(segment.window) << shift;
        self.send.max_wnd = self.send.max_wnd.max(self.send.wnd);
        if self.send.fin_queued {
            self.state = State::FinWait1;
        } else {
            self.state = State::Established;
        }
        self.peer_alive();
        self.rearm_send_timer(now);
        self.start_keepalive(now);
    }

    pub(crate) fn poll_open(&mut self, now: Instant) -> Option<Transmit> {
        let isn = self.send.una;
        if self.scoreboard.is_empty() {
            self.scoreboard.push(isn, 1, now, 0);
            self.send.nxt = isn.wrapping_add(1);
            self.rearm_send_timer(now);
        } else {
            let lost = self.scoreboard.next_lost().is_some();
            if !lost && !self.due.take(Due::ACK) {
                return None;
            }
            self.scoreboard.retransmit(isn, now);
        }
        self.due.remove(Due::ACK);
        Some(self.emit_syn(isn, now))
    }

    fn emit_syn(&mut self, isn: u32, now: Instant) -> Transmit {
        let answering = self.state == State::SynReceived;
        let mss = (self.config.mtu - self.config.ip_header - 20) as u16;
        let scale = !answering || self.receive.wscale > 0 || self.send.wscale > 0;
        let window = self.receive.capacity.min(65535) as u16;
        let options = TcpOptions {
            mss: Some(mss),
            window_scale: scale.then_some(self.receive.wscale),
            sack_permitted: !answering || self.agreed.sack,
            timestamps: (!answering || self.agreed.timestamps).then(|| (self.ts_now(now), self.receive.ts_recent)),
            sack: Default::default(),
        };
        let mut flags = Flags::SYN;
        if answering {
            flags = flags | Flags::ACK;
            self.receive.adv = self.receive.nxt.wrapping_add(u32::from(window));
            if self.agreed.ecn {
                flags = flags | Flags::ECE;
            }
        } else if self.config.ecn {
            flags = flags | Flags::ECE | Flags::CWR;
        }
        Transmit { seq: isn, ack: if answering { self.receive.nxt } else { 0 }, flags, window, options, ..Transmit::default() }
    }
}
