//! The receive window: what is advertised, and when an update is worth a segment (RFC 9293 section 3.8.6).

use crate::connection::Connection;
use crate::seq::{before, later};

impl Connection {
    /// The window field for the next segment; moves the advertised right edge, which never goes back (RFC 9293, SHLD-14).
    #[inline]
    pub(crate) fn select_window(&mut self) -> u16 {
        let r = &mut self.receive;
        let reachable = r.read.wrapping_add(r.capacity);
        // Silly window avoidance (section 3.8.6.2.2): the edge moves by a segment or half the buffer, or not at all.
        let step = self.send.mss.min(r.capacity / 2);
        let edge = if before(r.adv, reachable) && reachable.wrapping_sub(r.adv) >= step { reachable } else { r.adv };
        let edge = later(edge, r.nxt);
        let scaled = edge.wrapping_sub(r.nxt) >> r.wscale;
        // Rounding down would take back a part of what was advertised, so round up where receive memory has the room; where it has
        // not, RFC 7323 section 2.4 allows the shrinking by less than a unit, and what was advertised is still accepted.
        let up = r.nxt.wrapping_add((scaled + 1) << r.wscale);
        let shrinks = before(r.nxt.wrapping_add(scaled << r.wscale), r.adv);
        let roomy = up.wrapping_sub(r.read) <= self.config.receive_buffer;
        let field = (scaled + u32::from(shrinks && roomy)).min(65535);
        r.adv = later(r.adv, r.nxt.wrapping_add(field << r.wscale));
        field as u16
    }

    /// After the program has read: a window update goes out if the edge can move far enough to matter.
    #[inline]
    pub(crate) fn after_read(&mut self) {
        let r = &mut self.receive;
        let offered = r.adv.wrapping_sub(r.nxt);
        let gain = r.read.wrapping_add(r.capacity).wrapping_sub(r.adv) as i32;
        if gain > 0 && offered < r.capacity / 2 && gain as u32 >= (r.capacity / 4).max(2 * self.send.mss).min(r.capacity / 2) {
            r.ack_now = true;
        }
    }
}
