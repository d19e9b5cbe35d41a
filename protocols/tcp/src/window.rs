//! The receive window: how much is advertised, and when an update is worth a segment (RFC 9293 section 3.8.6).

use crate::connection::{Connection, Due};

/// How far the edge moves at least where segments are larger: half the buffer (section 3.8.6.2.2), less the eighth by
/// which programs are late in reporting what they have read. Otherwise an edge that waits for the last piece would
/// never move.
fn large_enough(capacity: u32) -> u32 {
    capacity / 8 * 3
}

impl Connection {
    /// Silly window avoidance (section 3.8.6.2.2): the edge moves by a segment or a good part of the buffer, or not at
    /// all. To be called when either changes.
    pub(crate) fn set_window_step(&mut self) {
        self.receive.step = self.send.mss.min(large_enough(self.receive.capacity)).max(1);
    }

    /// Whether the advertised window fits the window field. According to an image, an earlier owner may have advertised
    /// more.
    #[inline(always)]
    pub(crate) fn has_ordinary_window(&self) -> bool {
        self.receive.adv.wrapping_sub(self.receive.nxt) <= 65535 << self.receive.wscale
    }

    /// The window field for the next segment; moves the advertised right edge, which never goes back (RFC 9293,
    /// SHLD-14).
    #[inline(always)]
    pub(crate) fn select_window(&mut self) -> u16 {
        if self.has_ordinary_window() { self.next_window() } else { u16::MAX }
    }

    /// [`Connection::select_window`] where what is advertised fits the field, as [`Connection::limit_window`] sees to
    /// for all that the edge may move to.
    #[inline(always)]
    pub(crate) fn next_window(&mut self) -> u16 {
        debug_assert!(self.has_ordinary_window());
        debug_assert_eq!(self.receive.step, self.send.mss.min(large_enough(self.receive.capacity)).max(1));
        let r = &mut self.receive;
        let limit = r.read.wrapping_add(r.capacity);
        let edge = if limit.wrapping_sub(r.adv) as i32 >= r.step as i32 { limit } else { r.adv };
        let offered = r.adv.wrapping_sub(r.nxt);
        let mut field = edge.wrapping_sub(r.nxt) >> r.wscale;
        let mut window = field << r.wscale;
        // Rounding down would take back a part of the advertised window, so round up if receive memory has the room. If
        // it has not, RFC 7323 section 2.4 allows the window to shrink by less than a unit, and data in the advertised
        // window is still accepted.
        if window < offered {
            let up = r.nxt.wrapping_add((field + 1) << r.wscale);
            if up.wrapping_sub(r.read) <= r.memory {
                (field, window) = (field + 1, (field + 1) << r.wscale);
            } else {
                window = offered;
            }
        }
        r.adv = r.nxt.wrapping_add(window);
        field as u16
    }

    /// After the program has read: a window update goes out if the edge can move far enough to matter. A peer that has
    /// sent its FIN sends nothing more, and may have forgotten the connection: it would answer with a reset.
    #[inline]
    pub(crate) fn after_read(&mut self) {
        let offered = self.receive.adv.wrapping_sub(self.receive.nxt);
        self.note_window(offered);
        let r = &mut self.receive;
        let gain = r.read.wrapping_add(r.capacity).wrapping_sub(r.adv) as i32;
        if gain > 0
            && offered < r.capacity / 2
            && gain as u32 >= (r.capacity / 4).max(2 * self.send.mss).min(large_enough(r.capacity))
            && !r.fin
        {
            self.due |= Due::ACK;
        }
    }
}
