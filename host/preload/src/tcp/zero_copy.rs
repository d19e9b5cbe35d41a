//! Sends with MSG_ZEROCOPY: who numbers them, and when they are complete ([`crate::completions`]).

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

    /// Whether these sends are copied, and this library completes them: the connection may be on the NIC. This is
    /// decided at the first one. A socket of which the kernel has numbered one stays there, since only the kernel knows
    /// the next number.
    pub fn copies_sends(&self, fd: c_int) -> bool {
        if let Some(ours) = self.completions.are_ours() {
            return ours;
        }
        self.make_plan(fd);
        let stays = process::is_closed_for_good() || self.is_pinned() || !self.may_move() || self.plan.load(RELAXED) == NEVER;
        let is_ipv6 = options::kernels(fd, libc::SOL_SOCKET, SO_DOMAIN) == Some(libc::AF_INET6);
        let ours = self.completions.decide(!stays, is_ipv6);
        if ours {
            // Threads that sleep in the sets that it is in are woken by this library, before there is a session, too.
            // Not with the list locked: the lock order is set first, then list.
            let sets = locked(&self.sets).clone();
            sets.iter().for_each(|(set, _)| set.prepare_for_nic());
        }
        ours
    }

    /// Completes such a send, whose bytes are copied, of the socket of this generation. The caller is in no section.
    pub fn complete_send(&self, generation: u32) {
        self.completions.add(generation);
        if let Some(_section) = Section::enter() {
            self.changed();
        }
    }

    /// Leaves these sends to the kernel, for a socket that this program has inherited: the one before may have made
    /// some.
    pub fn leave_numbered_sends(&self, fd: c_int) {
        if self.completes_sends(fd) {
            self.completions.decide(false, false);
        }
    }
}
