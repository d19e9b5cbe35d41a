//! The timers of a connection, and the work when they expire.

use crate::connection::{Connection, Due, EndReason, State};
use crate::rtt::RTO_MAX;
use crate::segment::Events;
use crate::time::Instant;
use baton_image::{Silence, nic};

pub(crate) use baton_image::nic::SendTimer;

/// Delayed acknowledgement in microseconds (Linux's TCP_DELACK_MIN; RFC 9293 MUST-58 allows up to 500 ms).
pub(crate) const DELAYED_ACK: u64 = 40_000;
/// How long TIME-WAIT lasts (Linux's TCP_TIMEWAIT_LEN).
pub(crate) const TIME_WAIT: u64 = 60_000_000;
/// A corked partial segment goes out after this long, as in Linux.
const CORK_LIMIT: u64 = 200_000;
/// Longest wait for a window that has room for a whole segment: after it, as much as fits is sent (RFC 9293 section
/// 3.8.6.2.1, between 0.1 and 1 s). As in Linux, the wait is shorter if the retransmission time-out is shorter.
const OVERRIDE: u64 = 1_000_000;
/// Milliseconds for which the data of a connection that its program has closed is sent again: as long as by Linux,
/// eight times (tcp_orphan_retries).
const ORPHAN_MILLIS: u32 = 100_000;
/// Unanswered probes that end such a connection.
const ORPHAN_PROBES: u8 = 8;
/// The time-out from which Linux reckons how long tcp_retries2 retransmissions take, in microseconds (TCP_RTO_MIN), and
/// how often that doubles before it is [`RTO_MAX`].
const LEAST_RTO: u64 = 200_000;
const DOUBLINGS: u8 = 9;

/// The time in microseconds, from the first retransmission on, after which a connection ends: as long as `retries`
/// retransmissions take on a path with the shortest time-out (as in Linux, tcp_model_timeout).
fn time_of(retries: u8) -> u64 {
    let linear = u64::from(retries.saturating_sub(DOUBLINGS)) * RTO_MAX;
    ((2 << retries.min(DOUBLINGS)) - 1) * LEAST_RTO + linear
}

#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Timers {
    pub send_at: Instant,
    pub ack_at: Instant,
    pub keepalive_at: Instant,
    pub time_wait_at: Instant,
    /// When the oldest unanswered probe or retransmission was sent.
    pub silent_since: Instant,
    pub send: SendTimer,
    /// Keep-alive or window probes without an answer.
    pub probes: u8,
}

/// Microseconds after which a connection that came with data in flight probes for its loss, if no acknowledgement has
/// come.
const ADOPTED_PROBE: u64 = 10_000;

impl Default for Timers {
    fn default() -> Self {
        Timers {
            send: SendTimer::Off,
            send_at: Instant::NEVER,
            ack_at: Instant::NEVER,
            keepalive_at: Instant::NEVER,
            time_wait_at: Instant::NEVER,
            probes: 0,
            silent_since: Instant::NEVER,
        }
    }
}

impl Timers {
    /// As an image holds them.
    pub fn to_image(&self, now: Instant) -> nic::Timers {
        let Timers { send_at, ack_at, keepalive_at, time_wait_at, silent_since, send, probes } = *self;
        let short = |at: Instant| at.left(now).map(|left| u32::try_from(left).unwrap_or(u32::MAX));
        nic::Timers {
            send,
            send_in: short(send_at),
            ack_in: short(ack_at),
            keepalive_in: keepalive_at.left(now),
            time_wait_in: short(time_wait_at),
            unanswered_for: (silent_since != Instant::NEVER).then(|| now.since(silent_since)),
            probes,
        }
    }

    /// Timers that an image holds, each no longer than this host would ever set it.
    pub fn from_image(image: &nic::Timers, now: Instant) -> Timers {
        let nic::Timers { send, send_in, ack_in, keepalive_in, time_wait_in, unanswered_for, probes } = *image;
        let at = |left: Option<u32>, most: u64| now.when(left.map(|left| u64::from(left).min(most)));
        let runs = send != SendTimer::Off && send_in.is_some();
        Timers {
            send: if runs { send } else { SendTimer::Off },
            send_at: if runs { at(send_in, RTO_MAX) } else { Instant::NEVER },
            ack_at: at(ack_in, DELAYED_ACK),
            keepalive_at: now.when(keepalive_in),
            time_wait_at: at(time_wait_in, TIME_WAIT),
            silent_since: unanswered_for.map_or(Instant::NEVER, |age| now.ago(age)),
            probes,
        }
    }
}

impl Connection {
    /// When [`Connection::on_timeout`] wants to be called next.
    #[inline]
    pub fn next_timeout(&self) -> Instant {
        let t = &self.timers;
        t.send_at.min(t.ack_at).min(t.keepalive_at.min(t.time_wait_at))
    }

    /// Whether no timer runs, asked with less work than [`Connection::next_timeout`] is.
    #[inline(always)]
    pub fn no_timer(&self) -> bool {
        let t = &self.timers;
        t.send_at.0 & t.ack_at.0 & t.keepalive_at.0 & t.time_wait_at.0 == Instant::NEVER.0
    }

    /// Replaces all timers, and forgets what they wanted to send.
    pub(crate) fn stop_timers(&mut self, timers: Timers) {
        self.timers = timers;
        self.due.remove(Due::PROBE | Due::FORCE);
    }

    pub(crate) fn arm(&mut self, timer: SendTimer, at: Instant) {
        self.timers.send = timer;
        self.timers.send_at = if timer == SendTimer::Off { Instant::NEVER } else { at };
    }

    /// Runs the timers that have expired at `now`. Segments that they cause come out of [`Connection::poll_transmit`].
    pub fn on_timeout(&mut self, now: Instant) -> Events {
        let mut events = Events::empty();
        if self.timers.ack_at <= now {
            self.timers.ack_at = Instant::NEVER;
            self.due.set(Due::ACK, self.due.contains(Due::ACK) || self.receive.unacked > 0 || !self.reassembly.is_empty());
            if self.reassembly.is_empty() {
                // As in Linux, tcp_delack_timer_handler.
                self.receive.expect_no_answer();
            }
        }
        if self.timers.time_wait_at <= now {
            self.stop_timers(Timers::default());
            self.state = State::Closed;
            return Events::CLOSED;
        }
        if self.timers.send_at <= now {
            let timer = self.timers.send;
            self.arm(SendTimer::Off, now);
            events |= match timer {
                SendTimer::Off => Events::empty(),
                SendTimer::Retransmit => self.on_retransmission_timeout(now),
                SendTimer::TailLoss => {
                    self.send_tail_loss_probe(now);
                    Events::empty()
                }
                SendTimer::Reordering => {
                    self.on_reordering_timeout(now);
                    Events::empty()
                }
                SendTimer::Persist => self.on_persist_timeout(now),
            };
        }
        if self.timers.keepalive_at <= now {
            events |= self.on_keepalive_timeout(now);
        }
        events
    }

    fn on_retransmission_timeout(&mut self, now: Instant) -> Events {
        if self.scoreboard.is_empty() {
            return Events::empty();
        }
        let opening = matches!(self.state, State::SynSent | State::SynReceived);
        let tried = match opening {
            true => self.rtt.backoff >= self.config.syn_retries,
            false => now.since(self.timers.silent_since) >= time_of(self.config.retries),
        };
        // A peer that has closed its window, and still answers, is not dead: the retransmissions serve as probes (as in
        // Linux).
        let answers = self.send.wnd == 0 && !opening && now.since(self.receive.last_at) <= 2 * RTO_MAX;
        if self.gave_up(tried && !answers, now) {
            return self.end(EndReason::TimedOut);
        }
        self.enter_loss();
        self.rtt.backoff = self.rtt.backoff.saturating_add(1);
        self.arm(SendTimer::Retransmit, now.after(self.within_user_timeout(now)));
        Events::empty()
    }

    /// Whether this time-out exceeds a limit: the limit in time (RFC 5482), which always exists for a connection that
    /// its program has closed; or, without one, the limit in number (RFC 9293 R2), as `tried` says.
    fn gave_up(&mut self, tried: bool, now: Instant) -> bool {
        if self.timers.silent_since == Instant::NEVER {
            self.timers.silent_since = now;
        }
        let limit = if self.orphan && self.config.user_timeout == 0 { ORPHAN_MILLIS } else { self.config.user_timeout };
        let limit = u64::from(limit) * 1000;
        if limit > 0 { now.since(self.timers.silent_since) >= limit } else { tried }
    }

    /// Whether probing of the peer's closed window stops. If the program has closed the connection, not even answers
    /// keep it once the interval between probes has reached its maximum (Linux's tcp_probe_timer).
    fn gave_up_probing(&mut self, now: Instant) -> bool {
        let tried = self.timers.probes >= self.config.retries;
        if !self.orphan || self.config.user_timeout > 0 {
            return self.gave_up(tried, now);
        }
        self.rtt.timeout() >= RTO_MAX || self.timers.probes >= ORPHAN_PROBES
    }

    fn on_persist_timeout(&mut self, now: Instant) -> Events {
        if !self.has_unsent() || !self.scoreboard.is_empty() {
            return Events::empty();
        }
        if self.send.wnd > 0 {
            self.due |= Due::FORCE;
            return Events::empty();
        }
        if self.gave_up_probing(now) {
            return self.end(EndReason::TimedOut);
        }
        self.due |= Due::PROBE;
        self.timers.probes = self.timers.probes.saturating_add(1);
        self.rtt.backoff = self.rtt.backoff.saturating_add(1);
        self.arm(SendTimer::Persist, now.after(self.within_user_timeout(now)));
        Events::empty()
    }

    /// The time-out after one that got no answer, in microseconds, but no more than is left of TCP_USER_TIMEOUT: the
    /// connection ends when that has passed, and not at the first time-out after it (as in Linux,
    /// tcp_clamp_rto_to_user_timeout).
    fn within_user_timeout(&self, now: Instant) -> u64 {
        match u64::from(self.config.user_timeout) * 1000 {
            0 => self.rtt.timeout(),
            limit => self.rtt.timeout().min(limit.saturating_sub(now.since(self.timers.silent_since)).max(1)),
        }
    }

    /// Called when the peer has answered: time-outs start anew.
    #[inline]
    pub(crate) fn peer_alive(&mut self) {
        self.timers.silent_since = Instant::NEVER;
        self.rtt.backoff = 0;
    }

    /// Chooses the sending side's timer after a change: a probe of the tail, the retransmission time-out, or persist.
    pub(crate) fn rearm_send_timer(&mut self, now: Instant) {
        if self.scoreboard.is_empty() {
            if self.has_unsent() && self.state_sends() {
                if self.timers.send != SendTimer::Persist {
                    self.arm(SendTimer::Persist, now.after(self.longest_wait()));
                }
            } else {
                self.arm(SendTimer::Off, now);
            }
            return;
        }
        match self.tail_loss_timeout() {
            Some(wait) => self.arm(SendTimer::TailLoss, now.after(wait)),
            None => self.arm(SendTimer::Retransmit, now.after(self.rtt.timeout())),
        }
    }

    /// Data waits, and nothing is in flight whose acknowledgement would come: the persist timer runs (RFC 9293 section
    /// 3.8.6.1). The timer may have been set while the window was closed, for longer than data that now waits for more
    /// room, or for a cork, should wait.
    #[cold]
    pub(crate) fn watch_what_waits(&mut self, now: Instant) {
        match self.timers.send {
            SendTimer::Off => self.rearm_send_timer(now),
            SendTimer::Persist if self.send.wnd > 0 => {
                self.timers.send_at = self.timers.send_at.min(now.after(self.longest_wait()));
            }
            _ => {}
        }
    }

    /// Microseconds until data goes out that is held back, or until a closed window is probed.
    fn longest_wait(&self) -> u64 {
        if self.send.wnd == 0 {
            self.rtt.timeout()
        } else if (self.cork || self.held) && self.send.wnd >= self.send.mss {
            CORK_LIMIT
        } else {
            self.rtt.base_timeout().min(OVERRIDE)
        }
    }

    /// The connection's last owner may have waited for an acknowledgement already, for an unknown time, and a
    /// connection that moves often would never see a time-out. So a tail loss probe is sent soon.
    pub(crate) fn probe_what_was_adopted(&mut self, now: Instant) {
        let soon = now.after(ADOPTED_PROBE);
        if !self.scoreboard.is_empty() && self.timers.send_at > soon {
            self.arm(SendTimer::TailLoss, soon);
        }
    }

    /// How long the peer has not answered, as a kernel shows it that has received something.
    pub fn silence(&self, now: Instant) -> Silence {
        let Timers { silent_since, probes, .. } = self.timers;
        let unanswered_for = (silent_since != Instant::NEVER).then(|| now.since(silent_since));
        Silence { unanswered_for, backoff: self.rtt.backoff, probes, heard_ago: self.silent_for(now), received: u32::MAX }
    }

    /// Goes on with the time that had run for the last owner, which sent data last at `sent_at`.
    pub(crate) fn take_up_silence(&mut self, silence: &Silence, sent_at: Instant, now: Instant) {
        let Silence { unanswered_for, backoff, probes, heard_ago, received: _ } = *silence;
        self.receive.last_at = now.ago(heard_ago);
        self.timers.probes = probes;
        self.resume_keepalive(now);
        let Some(age) = unanswered_for else { return };
        self.rtt.backoff = backoff;
        self.timers.silent_since = now.ago(age);
        let timer = if self.scoreboard.is_empty() { SendTimer::Persist } else { SendTimer::Retransmit };
        if self.timers.send != SendTimer::Off {
            let due = sent_at.after(self.rtt.timeout()).min(now.after(self.within_user_timeout(now)));
            self.arm(timer, due.max(now));
        }
    }

    /// Whether the state lets data or a FIN out.
    pub(crate) fn state_sends(&self) -> bool {
        match self.state {
            State::Established | State::CloseWait | State::FinWait1 | State::LastAck | State::Closing => true,
            State::SynReceived => self.opening.fast,
            _ => false,
        }
    }
}
