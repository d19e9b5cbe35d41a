//! State of a connection that only a NIC has, beside the image: one NIC writes it down, and another takes it up.

use crate::connection::{Agreed, Connection, Due, Receive, Send, State};
use crate::input::CHALLENGE_GAP;
use crate::recovery::Recovery;
use crate::scoreboard::Scoreboard;
use crate::seq::{at_or_before, before, clamp};
use crate::time::Instant;
use crate::timers::{SendTimer, Timers};
use baton_image::nic::{Flight, Receiving, Sending};
use baton_image::{NicState, TS_RECENT_LASTS};

/// Bytes that an image may count as received and not acknowledged, or acknowledged late: the largest window (RFC 7323
/// section 2.3).
const MOST_UNACKED: u32 = 1 << 30;

impl Connection {
    /// Writes down the state that an image leaves out. Ranges received out of order are passed separately
    /// ([`Connection::out_of_order`]).
    pub fn nic_state(&self, now: Instant) -> NicState {
        // No `..`, here and in the parts: a new field breaks the build until it is decided how it moves. What is left
        // out is in the image, or the host's to set, or measured anew (`tuning`), or over when a connection can move
        // (the rest of `opening`); one that its program has closed moves to the kernel only.
        let Connection {
            agreed: Agreed { mss: _, sack: _, timestamps: _, ecn: _ },
            state,
            due,
            send,
            receive,
            timers,
            cork: _,
            held: _,
            orphan: _,
            end_reason: _,
            reassembly,
            scoreboard,
            rtt,
            config: _,
            congestion,
            recovery,
            challenge_at,
            tuning: _,
            opening,
        } = self;
        let Send { nxt: _, end: _, wnd: _, max_wnd: _, small_end, wscale: _, fin_queued: _, cwr_pending, mss: _, una: _ } = *send;
        let Receive {
            nxt: _,
            adv: _,
            wl1: _,
            ts_recent: _,
            read: _,
            memory: _,
            capacity: _,
            step: _,
            last_ack,
            ts_offset: _,
            predicted: _,
            wscale: _,
            quick_acks,
            fin: _,
            ts_known,
            last_at,
            unacked,
            // The next NIC delays one acknowledgement more at most.
            pushed: _,
        } = *receive;
        let ended = *state == State::Closed;
        NicState {
            sending: Sending { small_end, cwr_pending, probe_due: due.contains(Due::PROBE), forced: due.contains(Due::FORCE) },
            receiving: Receiving {
                peer_isn: opening.peer_isn,
                unacked,
                last_ack,
                quick_acks,
                ts_known,
                silent_for: now.since(last_at),
                ack_due: due.contains(Due::ACK),
                echo: due.contains(Due::ECHO),
                duplicate: reassembly.duplicate,
                recent: reassembly.recent(),
                challenge_in: challenge_at.age(now),
            },
            timers: timers.to_image(now),
            congestion: congestion.to_image(rtt, now),
            recovery: recovery.to_image(now),
            newest: scoreboard.newest.to_image(now),
            flight: if ended { Flight::default() } else { scoreboard.to_image(self.fin_sent(), now) },
        }
    }

    /// Sequence number behind our FIN, if it was sent.
    fn fin_sent(&self) -> Option<u32> {
        (self.send.fin_queued && self.send.nxt == self.send.end.wrapping_add(1)).then_some(self.send.nxt)
    }

    /// Goes on where the NIC that wrote this down stopped. All of the image's own fields must be set before. The state
    /// comes from outside: the image has checked the segments in flight; every other number is bounded here, so that a
    /// wrong one harms this connection only, and no timer that must run is missing.
    pub(crate) fn take_up(&mut self, state: &NicState, now: Instant) {
        let NicState { sending, receiving, timers, congestion, recovery, newest, flight } = state;
        let (una, nxt) = (self.send.una, self.send.nxt);
        let within = |seq| clamp(seq, una, nxt);
        self.scoreboard = Scoreboard::from_image(flight, *newest, una, self.fin_sent(), now);
        let out = self.scoreboard.len();
        self.recovery = Recovery::from_image(recovery, self.recovery.reordering_seen, out, within, now);
        self.congestion.take_up(congestion, &mut self.rtt, now);
        self.congestion.round_end = within(self.congestion.round_end);
        self.take_up_sending(sending);
        self.take_up_receiving(receiving, now);
        self.take_up_timers(Timers::from_image(timers, now), now);
    }

    fn take_up_sending(&mut self, sending: &Sending) {
        let Sending { small_end, cwr_pending, probe_due, forced } = *sending;
        self.send.small_end = clamp(small_end, self.send.una, self.send.nxt);
        self.send.cwr_pending = cwr_pending && self.agreed.ecn;
        self.due.set(Due::PROBE, probe_due);
        self.due.set(Due::FORCE, forced);
    }

    fn take_up_receiving(&mut self, receiving: &Receiving, now: Instant) {
        let Receiving {
            peer_isn,
            unacked,
            last_ack,
            quick_acks,
            ts_known,
            silent_for,
            ack_due,
            echo,
            duplicate,
            recent,
            challenge_in,
        } = *receiving;
        let r = &mut self.receive;
        r.unacked = unacked.min(MOST_UNACKED);
        r.last_ack = if r.nxt.wrapping_sub(last_ack) > MOST_UNACKED { r.nxt } else { last_ack };
        r.pushed = r.last_ack;
        (r.quick_acks, r.last_at) = (quick_acks, now.ago(silent_for));
        r.ts_known = ts_known && self.agreed.timestamps && silent_for < TS_RECENT_LASTS;
        let adv = r.adv;
        self.reassembly.duplicate =
            duplicate.filter(|(left, right)| self.agreed.sack && before(*left, *right) && at_or_before(*right, adv));
        self.reassembly.set_recent(recent);
        self.due.set(Due::DUPLICATE, self.reassembly.duplicate.is_some());
        self.due.set(Due::ACK, ack_due);
        self.due.set(Due::ECHO, echo && self.agreed.ecn);
        self.challenge_at = now.after(u64::from(challenge_in).min(CHALLENGE_GAP));
        self.opening.peer_isn = peer_isn;
    }

    fn take_up_timers(&mut self, timers: Timers, now: Instant) {
        self.timers = timers;
        if matches!(self.timers.send, SendTimer::Off | SendTimer::Persist) && !self.scoreboard.is_empty() {
            self.rearm_send_timer(now);
        }
        if !self.config.keepalive || self.timers.keepalive_at == Instant::NEVER {
            self.resume_keepalive(now);
        }
        match self.state {
            State::Closed => self.stop_timers(Timers::default()),
            State::TimeWait if self.timers.time_wait_at == Instant::NEVER => self.enter_time_wait(now),
            State::TimeWait => {}
            _ => self.timers.time_wait_at = Instant::NEVER,
        }
    }

    /// Takes up ranges that were received out of order before the connection moved, given in ascending order, and a FIN
    /// behind them. Their bytes lie in receive memory. Ranges outside of the window are left out.
    pub fn hold(&mut self, ranges: impl Iterator<Item = (u32, u32)>, fin: Option<u32>) {
        let (next, edge) = (self.receive.nxt, self.receive.adv);
        let recent = self.reassembly.recent();
        let fits = |(left, right): &(u32, u32)| before(next, *left) && before(*left, *right) && at_or_before(*right, edge);
        for (left, right) in ranges.filter(fits) {
            self.reassembly.insert(left, right, crate::reassembly::most_ranges(self.receive.capacity));
        }
        if let Some(at) = fin.filter(|at| before(next, *at) && at_or_before(*at, edge)) {
            self.reassembly.insert_fin(at);
        }
        if recent != [0; 4] {
            self.reassembly.set_recent(recent);
        }
    }
}
