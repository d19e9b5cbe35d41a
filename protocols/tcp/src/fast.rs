//! The fast path, for a connection whose TCP runs in two places: one place runs the fast path only, the other runs the
//! whole protocol and takes the connection over whenever it leaves the fast path. This module draws the line between
//! the two; both run the same code.

use crate::connection::{Connection, Due, State};
use crate::recovery::Phase;
use crate::segment::Segment;
use crate::time::Instant;
use crate::timers::SendTimer;
use baton_wire::{Flags, Plain};

impl Connection {
    /// Whether a plain segment belongs to the fast path: the next data in order, or an acknowledgement, of an open
    /// connection. A closed window does not, nor does a duplicate acknowledgement, which is the first sign of a loss.
    /// To be asked of a quiet connection.
    #[inline]
    pub fn is_fast(&self, segment: Plain) -> bool {
        let window = u32::from(segment.window) << self.send.wscale;
        let in_flight = self.send.una != self.send.nxt;
        let duplicate = segment.length == 0 && in_flight && segment.ack == self.send.una && window == self.send.wnd;
        self.expects(&segment) && window > 0 && !duplicate
    }

    /// Whether any segment belongs to the fast path: it must have no flags but ACK and PSH, no options but timestamps,
    /// and no congestion mark (RFC 3168).
    pub fn is_fast_segment(&self, segment: &Segment) -> bool {
        let options = &segment.options;
        let plain = segment.flags.0 & !Flags::PSH.0 == Flags::ACK.0
            && !segment.congestion_experienced
            && options.sack.is_empty()
            && options.mss.is_none()
            && options.window_scale.is_none()
            && !options.sack_permitted;
        plain && self.is_fast(segment.plain())
    }

    /// Whether the connection needs nothing but the fast path: it is open in both directions, nothing is out of order,
    /// lost or sent again, the peer's window is open, and no timer runs but those of ordinary data and
    /// acknowledgements.
    pub fn is_quiet(&self) -> bool {
        let board = &self.scoreboard;
        self.state == State::Established
            && !self.send.fin_queued
            && self.send.wnd > 0
            && !self.send.cwr_pending
            && self.reassembly.is_empty()
            && self.recovery.phase == Phase::Open
            && !self.recovery.probes()
            && board.sacked + board.lost + board.retransmitted == 0
            && self.rtt.backoff == 0
            && self.timers.probes == 0
            && matches!(self.timers.send, SendTimer::Off | SendTimer::Retransmit | SendTimer::TailLoss)
            && !self.due.intersects(Due::RESET | Due::PROBE | Due::FORCE | Due::ECHO | Due::DUPLICATE)
    }

    /// Whether a timer other than the fast path's own has expired at `now`. The fast path's own timer is that of the
    /// delayed acknowledgement.
    pub fn slow_timer_is_due(&self, now: Instant) -> bool {
        let timers = &self.timers;
        timers.send_at.min(timers.keepalive_at).min(timers.time_wait_at) <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Config;
    use alloc::format;
    use baton_abi::record::PREDICTED;
    use baton_wire::{Fields, TcpOptions};

    /// An open connection without timestamps, whose peer's next segment has sequence number 501, with `bytes` in flight
    /// from 101 on.
    fn open(bytes: u32) -> Connection {
        let now = Instant(0);
        let syn = Segment { seq: 500, flags: Flags::SYN, window: 1000, ..Segment::default() };
        let config = Config { timestamps: false, nodelay: true, ..Config::default() };
        let mut tcp = Connection::accept(config, &syn, 100, 0, now).expect("a plain SYN");
        assert!(!tcp.is_quiet(), "the handshake is not the fast path's");
        while tcp.poll_transmit(now, 0).is_some() {}
        tcp.input(&Segment { seq: 501, ack: 101, flags: Flags::ACK, window: 1000, ..Segment::default() }, now);
        tcp.queue(bytes);
        while tcp.poll_transmit(now, 0).is_some() {}
        tcp
    }

    fn segment() -> Segment {
        Segment { seq: 501, ack: 101, flags: Flags::ACK, window: 1000, length: 10, ..Segment::default() }
    }

    #[test]
    fn data_in_order_and_acknowledgements_are_fast() {
        let mut tcp = open(200);
        assert!(tcp.is_quiet() && tcp.is_fast_segment(&segment()));
        assert!(tcp.is_fast_segment(&Segment { flags: Flags::ACK | Flags::PSH, ..segment() }));
        let acknowledgement = Segment { ack: 201, length: 0, ..segment() };
        assert!(tcp.is_fast_segment(&acknowledgement));
        tcp.input(&acknowledgement, Instant(10));
        assert!(tcp.is_quiet(), "also while data is in flight");
        assert!(tcp.is_fast_segment(&Segment { window: 900, ..acknowledgement }), "a new window");
    }

    /// The short code path for data in order does the same as the general one, or nothing, in every state of the
    /// connection.
    #[test]
    fn the_short_way_does_what_the_general_one_does() {
        let (mut random, mut short, mut general) = (1u64, 0, 0);
        let mut draw = move |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for round in 0..400u32 {
            let mut now = Instant(1_000_000 * u64::from(round));
            let options =
                TcpOptions { timestamps: Some((round, 0)), window_scale: Some(round as u8 % 3), ..TcpOptions::default() };
            let syn = Segment { seq: 500, flags: Flags::SYN, window: 1000, options, ..Segment::default() };
            let config = Config { receive_buffer: 1 << (12 + round % 8), nodelay: true, ..Config::default() };
            let mut tcp = Connection::accept(config, &syn, 100, round, now).expect("a plain SYN");
            while tcp.poll_transmit(now, 0).is_some() {}
            let options = TcpOptions { timestamps: Some((round + 1, 1)), ..TcpOptions::default() };
            tcp.input(&Segment { seq: 501, ack: 101, flags: Flags::ACK, window: 1000, options, ..Segment::default() }, now);
            if draw(2) == 0 {
                tcp.set_quick_ack(draw(2) == 0);
            }
            let (mut value, mut seq) = (round + 1, 501u32);
            for _ in 0..40 {
                now = now.after(draw(100_000));
                value = value.wrapping_add(draw(3) as u32).wrapping_sub(u32::from(draw(20) == 0));
                let timestamps = (draw(30) > 0).then_some(if draw(40) == 0 { (0, 1) } else { (value, 1) });
                let ack = tcp.snd_una().wrapping_add((draw(20) == 0).into());
                let length = [0, 1, 100, 1448, 3000][draw(5) as usize];
                let from = seq.wrapping_sub(u32::from(draw(25) == 0));
                let (window, pushed) = ([0, 900, 1000][draw(12).min(2) as usize], draw(2) == 0);
                let plain = Plain { seq: from, ack, window, timestamps, length, pushed };
                if draw(3) > 0 {
                    tcp.enable_prediction();
                }
                let before = format!("{tcp:?}");
                let words = tcp.record_with(0).to_words();
                let mut other = tcp.clone();
                match Fields::of(&plain).and_then(|fields| other.predict_data(&fields, now, now.millis())) {
                    Some(acknowledgement) => {
                        assert!(tcp.expects(&plain), "{plain:?} {before}");
                        let predicted = tcp.predict(&plain, now);
                        assert!(!predicted.concerns_program());
                        assert_eq!(predicted.acknowledgement, Some(acknowledgement));
                        assert_eq!(format!("{other:?}"), format!("{tcp:?}"));
                        let clock = acknowledgement.timestamps.map_or(0, |(clock, _)| clock);
                        let record = tcp.record_with(clock).to_words();
                        assert_eq!(tcp.predicted_record(clock)[..], record[..PREDICTED]);
                        assert_eq!(words[PREDICTED..], record[PREDICTED..], "what is in both copies of the record");
                        short += 1;
                        seq = tcp.rcv_nxt();
                        // The prediction holds for the next segment, too.
                        if draw(2) == 0 {
                            let mut again = tcp.clone();
                            let predicted = again.receive.predicted;
                            assert!(again.enable_prediction());
                            assert_eq!(again.receive.predicted, predicted);
                            continue;
                        }
                    }
                    None => {
                        assert_eq!(format!("{other:?}"), before, "nothing is done");
                        tcp.input(&Segment::from(&plain), now);
                        general += 1;
                    }
                }
                tcp.disable_prediction();
                if draw(15) == 0 {
                    tcp.queue(draw(200) as u32);
                }
                if draw(30) == 0 {
                    tcp.input(&Segment { seq: seq.wrapping_add(5000), ..Segment::from(&plain) }, now);
                }
                if draw(3) > 0 {
                    while tcp.poll_transmit(now, 0).is_some() {}
                }
                seq = tcp.rcv_nxt();
                if draw(3) == 0 {
                    tcp.consumed(seq.wrapping_sub(tcp.rcv_read()) / 2);
                }
                while draw(10) == 0 && tcp.next_timeout() <= now {
                    tcp.on_timeout(now);
                }
            }
        }
        assert!(short > 500 && general > 500, "{short} {general}");
    }

    #[test]
    fn everything_else_is_not() {
        let tcp = open(200);
        let others = [
            Segment { flags: Flags::ACK | Flags::FIN, ..segment() },
            Segment { flags: Flags::RST, ..segment() },
            Segment { flags: Flags::ACK | Flags::URG, ..segment() },
            Segment { flags: Flags::ACK | Flags::ECE, ..segment() },
            Segment { congestion_experienced: true, ..segment() },
            Segment { seq: 511, ..segment() },
            Segment { seq: 491, ..segment() },
            Segment { ack: 302, ..segment() },
            Segment { window: 0, ..segment() },
            Segment { length: 0, ..segment() },
            Segment { options: TcpOptions { timestamps: Some((1, 2)), ..TcpOptions::default() }, ..segment() },
            Segment { options: TcpOptions { mss: Some(900), ..TcpOptions::default() }, ..segment() },
        ];
        for other in others {
            assert!(!tcp.is_fast_segment(&other), "{other:?}");
        }
    }

    #[test]
    fn what_follows_a_loss_or_precedes_the_end_is_not_quiet() {
        let mut tcp = open(200);
        tcp.input(&Segment { seq: 600, ..segment() }, Instant(10));
        assert!(!tcp.is_quiet(), "something is out of order");
        tcp.input(&Segment { length: 99, ..segment() }, Instant(20));
        while tcp.poll_transmit(Instant(20), 0).is_some() {}
        assert!(tcp.is_quiet(), "the hole is filled");
        let at = tcp.next_timeout();
        assert!(tcp.slow_timer_is_due(Instant(u64::MAX - 1)));
        let mut closing = tcp.clone();
        closing.shutdown();
        assert!(!closing.is_quiet());
        let mut now = at;
        while !tcp.slow_timer_is_due(now) {
            tcp.on_timeout(now);
            now = tcp.next_timeout();
        }
        tcp.on_timeout(now);
        while tcp.poll_transmit(now, 0).is_some() {}
        assert!(!tcp.is_quiet(), "something was sent again, or probed for");
    }
}
