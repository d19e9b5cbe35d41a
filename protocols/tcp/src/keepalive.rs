//! Keep-alive (RFC 1122 section 4.2.3.6).

use crate::connection::{Config, Connection, Due, EndReason, State};
use crate::segment::Events;
use crate::time::Instant;

impl Connection {
    /// Sets keep-alive: seconds of silence, seconds between probes, probes.
    pub fn set_keepalive(&mut self, on: bool, idle: u32, interval: u32, count: u32, now: Instant) {
        let config = &mut self.config;
        config.keepalive = on;
        (config.keepalive_idle, config.keepalive_interval, config.keepalive_count) = (idle, interval, count);
        self.timers.probes = 0;
        self.start_keepalive(now);
    }

    /// Microseconds since the last acceptable segment.
    pub fn silent_for(&self, now: Instant) -> u64 {
        now.since(self.receive.last_at)
    }

    /// Whether the connection is idle: it is open, all that was sent is acknowledged, nothing is out of order or to be
    /// sent, and no timer runs but keep-alive.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Established | State::CloseWait | State::FinWait2)
            && self.send.una == self.send_limit()
            && self.scoreboard.is_empty()
            && self.reassembly.is_empty()
            && self.due.is_empty()
            && self.timers.send_at.min(self.timers.ack_at).min(self.timers.time_wait_at) == Instant::NEVER
    }

    pub(crate) fn start_keepalive(&mut self, now: Instant) {
        let runs = self.config.keepalive && !matches!(self.state, State::Closed | State::TimeWait);
        let idle = u64::from(self.config.keepalive_idle) * 1_000_000;
        self.timers.keepalive_at = if runs { now.after(idle) } else { Instant::NEVER };
    }

    /// Goes on with keep-alive where the last owner stopped: the peer may have been silent for some time, and may have
    /// been probed.
    pub(crate) fn resume_keepalive(&mut self, now: Instant) {
        self.start_keepalive(now);
        if self.timers.keepalive_at != Instant::NEVER {
            let Config { keepalive_idle, keepalive_interval, .. } = self.config;
            let seconds = u64::from(keepalive_idle) + u64::from(self.timers.probes) * u64::from(keepalive_interval);
            self.timers.keepalive_at = self.receive.last_at.after(seconds * 1_000_000).max(now);
        }
    }

    pub(crate) fn on_keepalive_timeout(&mut self, now: Instant) -> Events {
        // The timer is not moved by every segment; it is asked here when the last segment arrived.
        let idle = u64::from(self.config.keepalive_idle) * 1_000_000;
        let silent = now.since(self.receive.last_at);
        if !self.scoreboard.is_empty() || self.has_unsent() {
            // Retransmissions or window probes find out whether the peer is alive, and `probes` counts those.
            self.timers.keepalive_at = now.after(idle);
            return Events::empty();
        }
        if silent < idle {
            self.timers.probes = 0;
            self.timers.keepalive_at = self.receive.last_at.after(idle);
            return Events::empty();
        }
        let user_timeout = u64::from(self.config.user_timeout) * 1000;
        let out_of_probes = u32::from(self.timers.probes) >= self.config.keepalive_count;
        let over = if user_timeout > 0 { silent >= user_timeout && self.timers.probes > 0 } else { out_of_probes };
        if over {
            let events = self.end(EndReason::TimedOut);
            self.due |= Due::RESET;
            return events;
        }
        self.timers.probes = self.timers.probes.saturating_add(1);
        self.due |= Due::PROBE;
        self.timers.keepalive_at = now.after(u64::from(self.config.keepalive_interval) * 1_000_000);
        Events::empty()
    }
}
