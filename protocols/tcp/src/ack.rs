//! Acknowledgements: which bytes they free in the send queue, and the peer's window (RFC 9293 section 3.10.7.4, fifth
//! check).

use crate::connection::{Connection, State};
use crate::scoreboard::Sample;
use crate::segment::{Events, Segment};
use crate::seq::{at_or_before, before};
use crate::time::Instant;
use crate::timers::{TIME_WAIT, Timers};
use baton_wire::{Flags, Plain};

impl Connection {
    /// Processes the acknowledgement of an acceptable segment. Returns the bytes of send memory that it frees.
    pub(crate) fn process_ack(&mut self, segment: &Segment, now: Instant) -> (u32, Events) {
        let scale = if segment.flags.contains(Flags::SYN) { 0 } else { self.send.wscale };
        self.update_window(segment.seq, segment.ack, u32::from(segment.window) << scale);
        let advanced = before(self.send.una, segment.ack);
        if !advanced && self.scoreboard.is_empty() {
            self.peer_answers();
            return (0, Events::empty());
        }
        self.process_outstanding(segment, advanced, now)
    }

    /// Processes a plain segment's acknowledgement, with little work while nothing is in flight.
    #[inline(always)]
    pub(crate) fn process_plain_ack(&mut self, segment: &Plain, now: Instant) -> (u32, Events) {
        if self.send.una == self.send.nxt {
            self.update_window(segment.seq, segment.ack, u32::from(segment.window) << self.send.wscale);
            self.peer_answers();
            return (0, Events::empty());
        }
        self.process_general(*segment, now)
    }

    #[inline(never)]
    fn process_general(&mut self, segment: Plain, now: Instant) -> (u32, Events) {
        self.process_ack(&Segment::from(&segment), now)
    }

    /// Handles a segment that came while nothing was in flight. It answers probes; but while the peer's window is
    /// closed, answers neither shorten the intervals between probes nor restart TCP_USER_TIMEOUT (RFC 9293 section
    /// 3.8.6.1, as in Linux).
    #[inline(always)]
    fn peer_answers(&mut self) {
        if self.timers.probes > 0 || self.rtt.backoff > 0 {
            self.timers.probes = 0;
            if self.send.wnd > 0 || !self.has_unsent() {
                self.peer_alive();
            }
        }
    }

    fn process_outstanding(&mut self, segment: &Segment, advanced: bool, now: Instant) -> (u32, Events) {
        let mut sample = Sample { now, ..Sample::default() };
        self.recovery.last_echo = segment.options.timestamps.map(|(_, echo)| echo);
        if self.agreed.sack && !segment.options.sack.is_empty() {
            self.process_sack(segment, &mut sample);
        }
        let (freed, events) = if advanced { self.acknowledge(segment.ack, &mut sample) } else { (0, Events::empty()) };
        self.held &= !advanced;
        self.recovery.delivered = self.recovery.delivered.wrapping_add(sample.delivered);
        self.take_rtt(&sample, advanced, now);
        if self.agreed.ecn && segment.flags.contains(Flags::ECE) {
            self.enter_reduced();
        }
        let bare = segment.length == 0 && !segment.flags.intersects(Flags::FIN | Flags::SYN);
        if advanced || sample.sacked > 0 || sample.duplicate || bare {
            if advanced || sample.sacked > 0 {
                self.rearm_send_timer(now);
            }
            self.advance_recovery(&sample, advanced, now);
        }
        if events.contains(Events::TIME_WAIT) {
            self.enter_time_wait(now);
        }
        (freed, events)
    }

    fn acknowledge(&mut self, ack: u32, sample: &mut Sample) -> (u32, Events) {
        let fin_end = self.send.end.wrapping_add(1);
        let fin_acked = self.send.fin_queued && ack == fin_end && self.send.nxt == fin_end;
        let syn = matches!(self.state, State::SynSent | State::SynReceived);
        let freed = ack.wrapping_sub(self.send.una).wrapping_sub(u32::from(fin_acked)).wrapping_sub(u32::from(syn));
        self.scoreboard.acknowledge(ack, self.recovery.high_seq, self.rtt.min, sample);
        self.send.una = ack;
        if before(self.send.small_end, ack) {
            self.send.small_end = ack;
        }
        self.peer_alive();
        self.timers.probes = 0;
        let mut events = Events::empty();
        if fin_acked {
            events |= Events::FIN_ACKED;
            match self.state {
                State::FinWait1 => self.state = State::FinWait2,
                State::Closing => events |= Events::TIME_WAIT,
                // A program that has not closed the connection may still read, and unread bytes move with the
                // connection if its owner changes. So the connection waits as after a simultaneous close; RFC 9293
                // section 3.10.7.4 has
                // CLOSED at once, in which there is no connection to hand over.
                State::LastAck if !self.orphan => events |= Events::TIME_WAIT,
                State::LastAck => {
                    self.state = State::Closed;
                    self.stop_timers(Timers::default());
                    events |= Events::CLOSED;
                }
                _ => {}
            }
        }
        (freed, events)
    }

    pub(crate) fn enter_time_wait(&mut self, now: Instant) {
        self.state = State::TimeWait;
        self.stop_timers(Timers { time_wait_at: now.after(TIME_WAIT), ..Timers::default() });
    }

    fn process_sack(&mut self, segment: &Segment, sample: &mut Sample) {
        let blocks = segment.options.sack.as_slice();
        let (una, nxt) = (self.send.una, self.send.nxt);
        let (left, right) = blocks[0];
        // RFC 2883 section 4: below the acknowledgement, or inside the second block, the first block reports a
        // duplicate.
        let inside_second = blocks.get(1).is_some_and(|second| at_or_before(second.0, left) && at_or_before(right, second.1));
        let duplicate = before(left, segment.ack) && at_or_before(right, segment.ack) || inside_second;
        if duplicate {
            sample.duplicate = true;
            self.count_duplicate_report();
        }
        for (left, right) in blocks.iter().skip(usize::from(duplicate)) {
            let sane = before(*left, *right) && before(una, *right) && at_or_before(*right, nxt) && !before(*left, una);
            if sane {
                self.scoreboard.sack(*left, *right, self.recovery.high_seq, self.rtt.min, sample);
            }
        }
    }

    fn take_rtt(&mut self, sample: &Sample, advanced: bool, now: Instant) {
        let echoed = || {
            let echo = self.recovery.last_echo.filter(|echo| advanced && *echo != 0)?;
            let millis = self.ts_now(now).wrapping_sub(echo);
            (millis < 60_000).then(|| millis * 1000)
        };
        if let Some(rtt) = sample.rtt.or_else(echoed) {
            self.rtt.sample(rtt, now.0);
            self.congestion.on_rtt(rtt);
        }
        if at_or_before(self.congestion.round_end, self.send.una) && advanced {
            self.congestion.next_round(self.send.nxt);
        }
    }

    /// RFC 9293 section 3.10.7.4: the window moves with newer segments only, and not with an acknowledgement that
    /// another one has overtaken. Of two segments that acknowledge the same, the one with the larger window counts as
    /// newer, unless the other one closes the window (as in Linux).
    #[inline(always)]
    pub(crate) fn update_window(&mut self, seq: u32, ack: u32, window: u32) {
        let (send, wl1) = (&mut self.send, &mut self.receive.wl1);
        let newer = before(send.una, ack) || before(*wl1, seq) || (*wl1 == seq && (window > send.wnd || window == 0));
        if newer && !before(ack, send.una) {
            *wl1 = seq;
            send.wnd = window;
            send.max_wnd = send.max_wnd.max(window);
        }
    }
}
