//! Sends with MSG_ZEROCOPY: whether kernel or library numbers them, and when they are complete
//! ([`crate::completions`]).

use super::{NEVER, RELAXED, Tcp, locked};
use crate::sections::Section;
use crate::waiting::COMPLETES;
use crate::{options, process};
use libc::c_int;

const SO_DOMAIN: c_int = 39;
const SO_ZEROCOPY: c_int = 60;

impl Tcp {
    /// Whether the flag means anything: SO_ZEROCOPY is set.
    pub fn completes_sends(&self, fd: c_int) -> bool {
        self.waits(COMPLETES, || options::kernels(fd, libc::SOL_SOCKET, SO_ZEROCOPY) == Some(1))
    }

    /// Whether this library copies these sends and completes them, since the connection may go to the NIC. Decided at
    /// the first such send. A connection of which the kernel has numbered a send stays in the kernel, since only the
    /// kernel knows the next number.
    pub fn copies_sends(&self, fd: c_int) -> bool {
        if let Some(ours) = self.completions.are_ours() {
            return ours;
        }
        self.make_plan(fd);
        let stays = process::is_closed_for_good() || self.is_pinned() || !self.may_move() || self.plan.load(RELAXED) == NEVER;
        let is_ipv6 = options::kernels(fd, libc::SOL_SOCKET, SO_DOMAIN) == Some(libc::AF_INET6);
        let ours = self.completions.decide(!stays, is_ipv6);
        if ours {
            // The socket's sets get their eventfds, since this library has to wake threads in them for completions,
            // also before there is a session. The list is copied and unlocked: the lock order is set first, then list.
            let sets = locked(&self.sets).clone();
            sets.iter().for_each(|(set, _)| set.prepare_for_nic());
        }
        ours
    }

    /// Completes a copied send of the socket with this generation. The caller is in no section.
    pub fn complete_send(&self, generation: u32) {
        self.completions.add(generation);
        if let Some(_section) = Section::enter() {
            self.changed();
        }
    }

    /// For an inherited socket: lets the kernel number these sends, since an earlier program may have made some.
    pub fn leave_numbered_sends(&self, fd: c_int) {
        if self.completes_sends(fd) {
            self.completions.decide(false, false);
        }
    }
}
