//! The next connection of a 4-tuple that waits in TIME-WAIT (RFC 6191; RFC 9293 section 3.6.1).

use crate::connection::{Connection, State};
use crate::segment::Segment;
use crate::seq::before;
use crate::time::Instant;

/// Microseconds without a segment after which this end may use the 4-tuple anew: two ticks of a timestamp clock of 100
/// Hz, the slowest in use. (Linux's tcp_tw_reuse waits for a second, since it notes the time in seconds.)
const REOPENED_AFTER: u64 = 20_000;

impl Connection {
    /// Whether the peer's SYN may begin the next connection while this one is in TIME-WAIT: its timestamp, or else its
    /// sequence number, lies behind the last one received. `isn`: the sequence number that would answer it, which
    /// without timestamps must lie behind the last one sent.
    pub fn admits_successor(&self, syn: &Segment, isn: u32) -> bool {
        let r = &self.receive;
        let later = before(r.nxt, syn.seq);
        self.state == State::TimeWait
            && match syn.options.timestamps {
                Some((value, _)) if self.agreed.timestamps && r.ts_known => {
                    before(r.ts_recent, value) || value == r.ts_recent && later
                }
                _ => later && before(self.send.nxt, isn),
            }
    }

    /// When this end may open the next connection while this one is in TIME-WAIT; None if it has to wait until the end
    /// of that. From then on both timestamp clocks distinguish the segments of the two.
    pub fn reopens_at(&self) -> Option<Instant> {
        (self.state == State::TimeWait && self.agreed.timestamps).then(|| self.receive.last_at.after(REOPENED_AFTER))
    }
}
