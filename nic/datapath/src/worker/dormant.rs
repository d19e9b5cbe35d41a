//! Connections that carry nothing for a while become dormant: they keep their slot, their entry in the lookup and their
//! keep-alive timer, and their state shrinks to a few hundred bytes ([`Dormant`]). The first frame, message, command or
//! time-out that concerns one wakes it up before it is processed, so neither program nor peer notices anything.
//!
//! The worker looks at a few slots at a time, one after the other, so that all are seen in the time after which a
//! connection counts as idle. While none is awake it does not look.

use super::Worker;
use crate::custody::Custody;
use crate::dormant::{Dormant, Place};
use crate::offloaded::Memory;
use baton_abi::layout::{Counter, nic, slot as at};
use baton_device::Device;
use baton_shm::Pooled;
use baton_tcp::Instant;
use core::sync::atomic::Ordering;

/// Slots that are checked in one round, and so the most connections that become dormant in a round.
const STEP: u32 = 64;

/// The worker's position in its search for idle connections.
pub(super) struct Rounds {
    /// The slot that is checked next, and the end of the slots that may have a connection.
    next: u32,
    end: u32,
    /// A connection was awake, or woke up, since the last pass over the slots began.
    awake: bool,
    /// Time of the next check, in microseconds; `u64::MAX` while none is awake.
    due: u64,
    /// Number of dormant connections.
    dormant: u64,
}

impl Rounds {
    pub const NONE: Rounds = Rounds { next: 0, end: 0, awake: false, due: u64::MAX, dormant: 0 };

    /// Time of the worker's next check, in microseconds; `u64::MAX` if none is needed.
    pub fn due(&self) -> u64 {
        self.due
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Number of its connections that are dormant, and whether others may become so.
    pub fn dormant(&self) -> (u64, bool) {
        (self.connections.rounds.dormant, self.connections.rounds.due != u64::MAX)
    }

    /// Notes that the connection in slot `index` is awake from now on.
    pub(super) fn note_awake(&mut self, index: u32) {
        let rounds = &mut self.connections.rounds;
        rounds.end = rounds.end.max(index + 1);
        rounds.awake = true;
        // The host's TCP keeps none dormant: connections are lent to it only as long as they are busy.
        if rounds.due == u64::MAX && self.lender.is_none() {
            rounds.due = 0;
            self.wake_at(0);
        }
    }

    /// Looks at the next slots, and makes the connections dormant that have carried nothing for long enough.
    pub(super) fn look_for_idle(&mut self, now: Instant) {
        if self.connections.rounds.due > now.0 {
            return;
        }
        let (begin, end) = (self.connections.rounds.next, self.connections.rounds.end);
        let behind = begin.saturating_add(STEP).min(end);
        for index in begin..behind {
            let sleeps = self.make_dormant(index, now);
            self.connections.rounds.awake |= !sleeps;
        }
        let rounds = &mut self.connections.rounds;
        rounds.next = behind;
        rounds.due = now.0 + self.settings.dormant_after / u64::from(end.div_ceil(STEP).max(1));
        if behind == end {
            rounds.next = 0;
            if !std::mem::take(&mut rounds.awake) {
                rounds.due = u64::MAX;
            }
        }
    }

    /// Makes the connection in slot `index` dormant if it is idle. False if it is awake.
    fn make_dormant(&mut self, index: u32, now: Instant) -> bool {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return true };
        let Custody::Active(offloaded) = &slot.custody else { return true };
        if slot.dirty || !slot.held.is_empty() {
            return false;
        }
        let Some(dormant) = Dormant::of(offloaded, self.settings.dormant_after, now) else { return false };
        let timeout = offloaded.tcp.next_timeout();
        slot.custody = Custody::Dormant(dormant);
        if timeout != Instant::NEVER && super::connections::Wheel::tick_of(timeout.0) < slot.scheduled {
            slot.scheduled = self.connections.wheel.enter(index, timeout.0);
        }
        self.count_dormant(index, true);
        true
    }

    /// Wakes the connection in slot `index` up, if it is dormant. False if it stays dormant since its session has
    /// ended.
    #[cold]
    #[inline(never)]
    pub(super) fn wake_connection(&mut self, index: u32) -> bool {
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return false };
        let Custody::Dormant(dormant) = &slot.custody else { return true };
        let [session, receive_base, receive_size, send_base, send_size, block] = self.parameters(index);
        let Some(Some(attached)) = self.programs.sessions.get(session as usize) else { return false };
        let place = Place {
            memory: Memory { receive_base, receive_size, send_base, send_size, block },
            limits: self.limits(index),
            session,
            session_memory: attached.memory.clone(),
            nic_memory: self.nic_memory.clone(),
            slot: index,
        };
        let Some(offloaded) = dormant.wake(slot.flow(), place) else { return false };
        offloaded.publish_processor(self.processor);
        if let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) {
            slot.custody = Custody::Active(Pooled::new(offloaded));
        }
        self.count_dormant(index, false);
        self.note_awake(index);
        true
    }

    /// Wakes up the connections of a session whose memory the worker is about to release: awake, they keep the memory
    /// until the agent takes them back.
    pub(super) fn wake_session(&mut self, session: u32) {
        for index in 0..self.connections.rounds.end {
            if matches!(self.connections.slots.get(index as usize), Some(Some(slot)) if matches!(slot.custody, Custody::Dormant(_)))
                && self.parameters(index)[0] == session
            {
                self.wake_connection(index);
            }
        }
    }

    /// Counts a connection that has become dormant or has woken up, and records that in its slot for `baton ls`.
    fn count_dormant(&mut self, index: u32, sleeps: bool) {
        let count = &mut self.connections.rounds.dormant;
        *count = if sleeps { *count + 1 } else { *count - 1 };
        self.counters.set(Counter::Dormant, *count);
        self.nic_memory.word32(nic::slot(index) + at::DORMANT).store(u32::from(sleeps), Ordering::Relaxed);
    }
}
