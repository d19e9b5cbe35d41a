//! Messages to send: numbers and the window, RTS and its time-out, ACK and CLEANUP.

use super::messages::{Outgoings, SendState};
use super::{Completion, Delivered, Error, Limit, Outgoing, Policy, Side};
use crate::counters::Drop;
use crate::data::{first_bytes, fragment};
use crate::handle;
use crate::interface::{Command, Half};
use crate::{WINDOW, before};
use baton_wire::rmpp::{Header, HoldReason, Kind, Rts, Status};

impl Policy {
    /// Sends a message. Its completion says that the receiver has it.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn send(&mut self, outgoing: Outgoing, now: u64) -> Result<(), Limit> {
        self.check_room()?;
        self.check_region(&outgoing.region)?;
        if outgoing.region.length / u64::from(fragment(self.config.packet)) >= u64::from(u32::MAX) {
            return Err(Limit::Memory);
        }
        let at = usize::from(outgoing.peer.0);
        if self.is_leaving(at) {
            return Err(Limit::NoPeer);
        }
        let first = outgoing.region.length.min(first_bytes(self.config.packet).into()) as u16;
        let message = Outgoings { outgoing, state: SendState::Waiting, number: 0, first, attempts: 0, next: 0 };
        let handle = self.outgoing.insert(message).ok_or(Limit::Sends)?;
        let last = self.peers[at].last_waiting;
        match self.outgoing.get_mut(last) {
            Some(last) => last.next = handle,
            None => self.peers[at].first_waiting = handle,
        }
        self.peers[at].last_waiting = handle;
        self.peers[at].sends += 1;
        if self.peers[at].sends == 1 && self.peers[at].is_open() && self.peers[at].incoming == 0 {
            self.watch(at, now);
        }
        self.greet(at, now);
        self.start_waiting(at, now);
        Ok(())
    }

    /// Gives numbers to messages that wait, and sends their RTS, as far as the window allows.
    pub(super) fn start_waiting(&mut self, at: usize, now: u64) {
        loop {
            let peer = &mut self.peers[at];
            let handle = peer.first_waiting;
            let room = peer.next_number.wrapping_sub(peer.floor) < WINDOW;
            let Some(message) = self.outgoing.get_mut(handle).filter(|_| peer.is_open() && room) else { return };
            peer.first_waiting = message.next;
            if message.next == 0 {
                peer.last_waiting = 0;
            }
            message.number = peer.next_number;
            message.state = SendState::Sent;
            peer.next_number = peer.next_number.wrapping_add(1);
            peer.sent[(message.number % WINDOW) as usize] = handle;
            self.push_send(handle);
            self.timers.set(handle::slot(handle), now + self.config.timeout);
        }
    }

    /// Has the data half send a message.
    pub(super) fn push_send(&mut self, handle: u32) {
        let Some(command) = self.send_command(handle) else { return };
        // The RTS carries the floor, so CLEANUPs to the same receiver that have not left are unnecessary.
        if let Some(message) = self.outgoing.get(handle).filter(|_| self.is_patient()) {
            self.commands.drop_cleanups(self.peers[usize::from(message.outgoing.peer.0)].address);
        }
        self.commands.push(command);
    }

    /// The command by which the data half sends a message.
    pub(super) fn send_command(&self, handle: u32) -> Option<Command> {
        let Outgoings { outgoing, number, first, .. } = self.outgoing.get(handle)?;
        let rts = Rts {
            length: outgoing.region.length,
            tag: outgoing.tag,
            data: outgoing.data,
            context: outgoing.context,
            handle,
            fragment: fragment(self.config.packet),
        };
        Some(Command::Send {
            handle,
            peer: outgoing.peer.0,
            message: *number,
            region: outgoing.region,
            first: *first,
            rts,
            early: self.config.early,
            floor: self.peers[usize::from(outgoing.peer.0)].floor,
        })
    }

    /// The message to a peer that a packet from it is about.
    fn sent_message(&mut self, at: usize, header: &Header) -> Option<u32> {
        let handle = self.peers[at].sent[(header.message % WINDOW) as usize];
        let message = self.outgoing.get(handle)?;
        let live = matches!(message.state, SendState::Sent | SendState::Held);
        (live && message.number == header.message && header.handle == handle).then_some(handle)
    }

    pub(super) fn on_ack(&mut self, at: usize, header: &Header, now: u64) {
        let (number, floor) = (header.message, self.peers[at].floor);
        let Some(handle) = self.sent_message(at, header) else {
            let done = self.peers[at].acknowledged >> (number.wrapping_sub(floor) % WINDOW) & 1 == 1;
            if before(number, floor) || before(number, self.peers[at].next_number) && done {
                // The receiver has missed our CLEANUP.
                return self.cleanup(at, number);
            }
            return self.counters.drop(Drop::NoMessage);
        };
        let peer = &mut self.peers[at];
        peer.sent[(number % WINDOW) as usize] = 0;
        peer.acknowledged |= 1 << (number.wrapping_sub(peer.floor));
        let run = peer.acknowledged.trailing_ones();
        peer.acknowledged = peer.acknowledged.checked_shr(run).unwrap_or(0);
        peer.floor = peer.floor.wrapping_add(run);
        self.cleanup(at, number);
        match Status::from_number(header.count) {
            Some(Status::Aborted) | None => {
                self.set_releasing(handle, Error::Aborted);
                self.release(at, handle, Half::Sending);
            }
            Some(status @ (Status::Delivered | Status::Truncated)) => {
                // The receiver has all bytes that it wants, so the data half need not read the message any more.
                self.commands.push(Command::Release { handle, half: Half::Sending, confirm: false });
                self.complete_send(handle, Ok(status), now);
            }
        }
        self.start_waiting(at, now);
    }

    fn cleanup(&mut self, at: usize, number: u32) {
        let floor = self.peers[at].floor;
        self.control(at, Kind::Cleanup, |header| (header.message, header.packet) = (number, floor));
    }

    pub(super) fn on_hold(&mut self, at: usize, header: &Header, now: u64) {
        let Some(handle) = self.sent_message(at, header) else { return self.counters.drop(Drop::NoMessage) };
        let floor = self.peers[at].floor;
        let Some(message) = self.outgoing.get_mut(handle) else { return };
        match HoldReason::from_number(header.count) {
            // The receiver will clear it or ask for the RTS again; keep-alive shows whether it still can.
            Some(HoldReason::Unexpected) => {
                message.state = SendState::Held;
                self.timers.stop(handle::slot(handle));
            }
            Some(HoldReason::Resend) => {
                (message.state, message.attempts) = (SendState::Sent, 0);
                self.timers.set(handle::slot(handle), now + self.config.timeout);
                self.commands.push(Command::Resend { handle, floor, anew: true });
            }
            Some(HoldReason::Busy) | None => {}
        }
    }

    /// No packet has come for a message in time: its RTS is sent again if the data half has seen no CTS, its END if all
    /// of it was sent.
    pub(super) fn send_timeout(&mut self, slot: usize, now: u64) {
        let Some(handle) = self.outgoing.at(slot) else { return };
        let Some(message) = self.outgoing.get_mut(handle).filter(|message| message.state == SendState::Sent) else { return };
        message.attempts = message.attempts.saturating_add(1);
        let (attempts, peer) = (message.attempts, usize::from(message.outgoing.peer.0));
        self.commands.push(Command::Resend { handle, floor: self.peers[peer].floor, anew: false });
        self.timers.set(slot, now + self.backoff(attempts));
    }

    fn set_releasing(&mut self, handle: u32, error: Error) {
        self.timers.stop(handle::slot(handle));
        if let Some(message) = self.outgoing.get_mut(handle) {
            message.state = SendState::Releasing(error);
        }
    }

    /// Ends a message: with an error, or because all of it was delivered.
    pub(super) fn complete_send(&mut self, handle: u32, outcome: Result<Status, Error>, now: u64) {
        let Some(message) = self.outgoing.remove(handle) else { return };
        self.timers.stop(handle::slot(handle));
        let Outgoing { peer, tag, data, region, token, .. } = message.outgoing;
        let length = region.length;
        let placed = |status| if status == Status::Truncated { 0 } else { length };
        let result = outcome.map(|status| Delivered { peer, tag, data, length, placed: placed(status) });
        self.completions.push_back(Completion { token, side: Side::Send, result });
        let at = usize::from(peer.0);
        self.peers[at].sends -= 1;
        self.farewell(at, now);
    }

    /// Takes back a message that waits for its peer's welcome, or for a number in the window: it completes with
    /// [`Error::Cancelled`]. Returns false if no waiting message has this token: the message has been sent.
    pub fn cancel_send(&mut self, token: u64, now: u64) -> bool {
        let waiting = |message: &&Outgoings| message.outgoing.token == token && message.state == SendState::Waiting;
        let found = (0..self.outgoing.slots())
            .filter_map(|slot| self.outgoing.at(slot))
            .find(|handle| self.outgoing.get(*handle).as_ref().is_some_and(waiting));
        let Some((handle, message)) = found.and_then(|handle| Some((handle, *self.outgoing.get(handle)?))) else { return false };
        let at = usize::from(message.outgoing.peer.0);
        let mut before = 0;
        let mut next = self.peers[at].first_waiting;
        while next != handle {
            let Some(other) = self.outgoing.get(next) else { return false };
            (before, next) = (next, other.next);
        }
        match self.outgoing.get_mut(before) {
            Some(before) => before.next = message.next,
            None => self.peers[at].first_waiting = message.next,
        }
        if self.peers[at].last_waiting == handle {
            self.peers[at].last_waiting = before;
        }
        self.complete_send(handle, Err(Error::Cancelled), now);
        true
    }

    /// Fails the messages that have no number yet.
    pub(super) fn fail_waiting(&mut self, at: usize, error: Error) {
        let mut handle = core::mem::take(&mut self.peers[at].first_waiting);
        self.peers[at].last_waiting = 0;
        while let Some(message) = self.outgoing.get(handle) {
            let next = message.next;
            // The peer is failing, so this ends no farewell, for which the time would matter.
            self.complete_send(handle, Err(error), 0);
            handle = next;
        }
    }

    /// Gives up a message of a peer that is failing.
    pub(super) fn give_up_send(&mut self, handle: u32, error: Error) {
        let Some(message) = self.outgoing.get(handle) else { return };
        let at = usize::from(message.outgoing.peer.0);
        if !matches!(message.state, SendState::Releasing(_)) {
            self.set_releasing(handle, error);
            self.release(at, handle, Half::Sending);
        }
    }

    pub(super) fn on_released_send(&mut self, handle: u32, now: u64) {
        let Some(message) = self.outgoing.get(handle) else { return };
        if let SendState::Releasing(error) = message.state {
            let at = usize::from(message.outgoing.peer.0);
            self.complete_send(handle, Err(error), now);
            self.released_one(at, now);
        }
    }
}
