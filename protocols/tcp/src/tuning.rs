//! How much memory a connection can use: as much as its path holds. The receiver sees that its window will be the limit when half of it is
//! read within a round trip: in slow start the next one brings twice as much (Linux's dynamic right-sizing keeps the window at twice of what
//! was read, too). The sender sees it when its congestion window outgrows what the program may queue
//! (Linux's tcp_sndbuf_expand). The memory is the caller's, who asks now and then and gives more if it has more.

use crate::connection::{Connection, Due};
use crate::time::Instant;

/// Round trips that are shorter, in microseconds, need no larger window than a connection begins with: 256 KB fill a path of 4 Gb/s.
const SHORT: u32 = 500;
/// Send memory in bytes of a connection on a short path whose program fills what it has: the more there is, the less often the
/// program has to be woken to fill it again.
const SHORT_SEND: u32 = 1 << 22;
/// Memory grows by this factor, so that slow start is not waited for.
const FACTOR: u32 = 4;
/// No connection needs more.
const MOST: u32 = 1 << 30;

/// When the program had read the last two quarters of a window, the later first, and where it was then.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tuning {
    quarters: [Instant; 2],
    read: u32,
}

impl Connection {
    /// Bytes of receive memory that the connection could use, if that is more than it has.
    pub fn wanted_receive_memory(&mut self, now: Instant) -> Option<u32> {
        let (read, window) = (self.receive.read, self.receive.capacity);
        if read.wrapping_sub(self.tuning.read) < window / 4 {
            return None;
        }
        let [last, before_last] = self.tuning.quarters;
        self.tuning = Tuning { quarters: [now, last], read };
        let took = now.since(before_last);
        let round = u64::from(self.rtt.smoothed);
        let limited = self.is_long_path() && took <= round + round / 4;
        (limited && window < 65535 << self.receive.wscale).then(|| window.saturating_mul(FACTOR).min(MOST))
    }

    /// Bytes of send memory that the connection could use, if that is more than the `size` that it has.
    #[inline]
    pub fn wanted_send_memory(&self, size: u32) -> Option<u32> {
        let queued = self.send.end.wrapping_sub(self.send.una);
        let window = self.congestion.cwnd.saturating_mul(self.send.mss);
        if queued <= size / 2 || window <= size / 2 {
            return None;
        }
        if !self.is_long_path() {
            return (size < SHORT_SEND).then_some(SHORT_SEND);
        }
        // Twice the window, so that the program refills one while the other is in flight.
        Some(window.saturating_mul(FACTOR).min(MOST))
    }

    /// Whether the path's round trip is long enough to need more memory. The smallest one counts: a busy host makes others longer.
    pub fn is_long_path(&self) -> bool {
        let rtt = if self.rtt.min == 0 { self.rtt.smoothed } else { self.rtt.min };
        rtt >= SHORT
    }

    /// The connection has this much receive memory now, which holds all that it held. The window opens as far as that allows, and is no
    /// larger than `most`.
    pub fn set_receive_memory(&mut self, bytes: u32, most: u32) {
        self.config.receive_buffer = bytes;
        self.limit_window(most);
        self.due |= Due::ACK;
    }

    /// Windows that are advertised from now on are no larger than `most`.
    pub fn limit_window(&mut self, most: u32) {
        let shift = self.receive.wscale;
        // One unit is left free, so that a window can be rounded up; without a scale nothing is rounded.
        let unit = if shift == 0 { 0 } else { 1 << shift };
        self.receive.capacity = self.config.receive_buffer.saturating_sub(unit).min(65535 << shift).min(most);
    }
}
