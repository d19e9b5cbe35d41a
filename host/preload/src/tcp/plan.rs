//! When a socket is due to be handed over to the agent.

use super::{NEVER, Origin, RELAXED, REQUESTS, Tcp, UNPLANNED};
use crate::handover::State;
use crate::sections::Section;
use crate::worth::{self, Moment};
use crate::{options, process, thread};
use baton_client::rules::When;
use libc::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

impl Tcp {
    /// Counts bytes that have gone through the kernel, and hands the connection over if that makes it due.
    pub fn count(&'static self, fd: c_int, bytes: isize, sending: bool) {
        if bytes <= 0 {
            return;
        }
        if !sending {
            // Edges are found by the position in the stream, so bytes that were read in the kernel count, too. (Peeked
            // bytes are counted as well, which can cause an edge too many, never one too few.)
            self.took(bytes as usize);
        }
        if self.handover.state() != State::Candidate {
            return;
        }
        let Some(_section) = Section::enter() else { return };
        self.bytes.fetch_add(bytes as u64, RELAXED);
        if self.receiving.swap(!sending, RELAXED) && sending {
            self.requests.fetch_add(1, RELAXED);
        }
        self.make_plan(fd);
        self.consider(fd, if sending { Moment::Sent } else { Moment::Received });
    }

    /// Counts a send in the kernel that returned `sent`, if it had no room for all `wanted` bytes: the program may then
    /// wait for an edge, and the NIC may have to report it. Called before the socket may be handed over.
    pub fn note_room(&self, sent: isize, wanted: impl FnOnce() -> usize) {
        let is_short = match sent {
            ..0 => thread::errno() == libc::EAGAIN,
            _ => self.may_move() && self.plan.load(RELAXED) != NEVER && (sent as usize) < wanted(),
        };
        if is_short {
            self.stuck.fetch_add(1, Ordering::AcqRel);
        }
    }

    pub(super) fn origin(&self) -> Origin {
        if self.accepted.load(RELAXED) { Origin::Accepted } else { Origin::Connected }
    }

    /// Decides when it is to be handed over, unless that is decided.
    pub(super) fn make_plan(&self, fd: c_int) {
        if self.plan.load(RELAXED) == UNPLANNED {
            let (plan, hot_from) = planned(fd, self.origin());
            self.hot_from.store(hot_from, RELAXED);
            self.plan.store(plan, RELAXED);
        }
    }

    pub(super) fn consider(&'static self, fd: c_int, moment: Moment) {
        let plan = self.plan.load(RELAXED);
        let due = match plan {
            NEVER | UNPLANNED => false,
            requests if requests & REQUESTS != 0 => u64::from(self.requests.load(RELAXED)) >= requests & !REQUESTS,
            bytes => self.bytes.load(RELAXED) >= bytes,
        };
        let ripe = || {
            process::plan().is_some_and(process::Plan::is_eager)
                || self.worth.is_ripe(self.origin(), moment, self.requests.load(RELAXED), self.bytes.load(RELAXED))
        };
        if due && ripe() {
            let _turn = worth::Turn::begin();
            self.hand_over(fd);
        }
    }
}

/// When to hand a connection over (see [`NEVER`]), and how many bytes per second it then has to carry to be on the NIC.
fn planned(fd: c_int, origin: Origin) -> (u64, u32) {
    let Some(plan) = process::plan() else { return (NEVER, 0) };
    // SAFETY: the program's descriptor, open during its own call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let needed = plan.rules.iter().any(baton_client::rules::Rule::needs_addresses);
    let addresses = if needed {
        let local = baton_linux::socket::local_address(borrowed);
        let Ok(peer) = baton_linux::socket::peer_address(borrowed) else { return (UNPLANNED, 0) };
        local.ok().map(|local| (local, peer))
    } else {
        None
    };
    let fits = |rule: &&baton_client::rules::Rule| addresses.is_none_or(|(local, peer)| rule.fits(local, peer));
    let plan = match plan.rules.iter().find(fits).map(|rule| rule.when) {
        Some(When::Hot(rate)) => return (0, rate),
        None | Some(When::Never) => NEVER,
        Some(When::Established) => 0,
        Some(When::Accepted) => {
            if origin == Origin::Accepted {
                0
            } else {
                NEVER
            }
        }
        Some(When::Connected) => {
            if origin == Origin::Connected {
                0
            } else {
                NEVER
            }
        }
        Some(When::Bytes(count)) => count & !REQUESTS,
        Some(When::Requests(count)) => count | REQUESTS,
    };
    (plan, 0)
}

/// Whether options are set by which a receive returns more than bytes (TCP_INQ, the time-stamping family). Only the
/// kernel can do that.
pub(super) fn receives_more_than_bytes(fd: c_int) -> bool {
    let value = |level, option| options::kernels(fd, level, option);
    let set = |level, option| value(level, option).is_some_and(|value| value != 0);
    set(6, 36)
        || set(1, 29)
        || set(1, 35)
        || set(1, 37)
        || set(1, 63)
        || set(1, 64)
        || set(1, 65)
        || value(1, 42).is_some_and(|offset| offset >= 0)
}
