//! Messages that are being received: how much is cleared, how much was placed, and how they end.

use super::messages::{Incoming, ReceiveState};
use super::{Completion, Delivered, Error, PeerId, Policy, Side};
use crate::WINDOW;
use crate::counters::Drop;
use crate::handle;
use crate::interface::{Command, Half};
use baton_wire::rmpp::{Header, Kind, MAX_CLEARED, Status};

/// Packets of the longest message that the data half clears by itself: numbers of grants are compared modulo 2¹⁶, and
/// each packet may take one.
const LONGEST_ALONE: u32 = 1 << 14;

impl Policy {
    /// Clears the next packets of a message: n = min(16 packets, what is pinned, what the NIC has buffers for) (section
    /// 3). Without room for one, it waits its turn.
    pub(super) fn clear_more(&mut self, handle: u32, now: u64) {
        let room = self.config.nic_buffers.saturating_sub(self.cleared_packets + self.lent().1);
        let pinned = self.config.pinned.saturating_sub(self.cleared_bytes + self.lent_bytes());
        let longest = self.config.pinned - self.most_lent();
        let Some(message) = self.incoming.get_mut(handle) else { return };
        if u64::from(message.rts.fragment) > longest {
            // There will never be enough room for this message, and others would wait behind it.
            return self.abort(handle, now);
        }
        let ahead = if message.packets <= LONGEST_ALONE { self.config.ahead } else { 0 };
        let most = u32::from(self.config.grant).max(ahead);
        let window = u32::from(MAX_CLEARED).max(ahead).saturating_sub(message.limit - message.placed);
        let pinned = u32::try_from(pinned / u64::from(message.rts.fragment)).unwrap_or(u32::MAX);
        let count = most.min(message.packets - message.limit).min(window);
        if count == 0 {
            return;
        }
        // Packets that are cleared behind a full window do not raise the number in flight.
        let before = message.on_way();
        let full = room + before >= u32::from(MAX_CLEARED) && ahead > 0;
        let count = count.min(if full { count } else { room }).min(pinned);
        if count == 0 {
            if !message.queued {
                message.queued = true;
                self.waiting.push_back(handle);
            }
            return;
        }
        let first = message.limit;
        message.limit += count;
        self.cleared_packets += message.on_way() - before;
        self.cleared_bytes += u64::from(count) * u64::from(message.rts.fragment);
        let command = self.clear_command(handle, first, count, self.config.grant);
        command.into_iter().for_each(|command| self.commands.push(command));
        let (timer, limit) = (self.incoming_timer(handle), now + self.clearance(count));
        self.timers.set(timer, limit);
    }

    /// Clears messages that waited, while there is room.
    pub(super) fn clear_waiting(&mut self, now: u64) {
        let (lent, lent_bytes) = (self.lent().1, self.lent_bytes());
        while let Some(handle) = self.waiting.front().copied()
            && self.is_ready()
        {
            if let Some(message) = self.incoming.get_mut(handle)
                && message.queued
            {
                let bytes = self.cleared_bytes + lent_bytes + u64::from(message.rts.fragment);
                if self.cleared_packets + lent >= self.config.nic_buffers || bytes > self.config.pinned {
                    return;
                }
                message.queued = false;
                if message.state == ReceiveState::Receiving {
                    self.clear_more(handle, now);
                }
            }
            self.waiting.pop_front();
        }
    }

    /// The command that clears packets, `most` of them with the first CTS.
    pub(super) fn clear_command(&mut self, handle: u32, first: u32, count: u32, most: u16) -> Option<Command> {
        let message = self.incoming.get_mut(handle)?;
        let now = count.min(most.into());
        message.grant = handle::next_generation(message.grant.wrapping_add(message.grants_ahead));
        // Each clears one packet at least.
        message.grants_ahead = if self.config.ahead > 0 { count as u16 } else { 0 };
        Some(Command::Clear {
            handle,
            peer: message.peer,
            message: message.number,
            sender: message.rts.handle,
            region: message.region,
            rest: message.rest(),
            fragment: message.rts.fragment,
            packets: message.packets,
            first,
            count: now as u16,
            ahead: count - now,
            grant: message.grant,
        })
    }

    /// Takes note of how much of a message has been placed.
    pub(super) fn progress(&mut self, handle: u32, placed: u32, now: u64) -> bool {
        let timer = self.incoming_timer(handle);
        let Some(message) = self.incoming.get_mut(handle).filter(|message| message.state == ReceiveState::Receiving) else {
            return false;
        };
        let placed = placed.clamp(message.placed, message.limit);
        if placed > message.placed {
            let (count, before) = (placed - message.placed, message.on_way());
            (message.placed, message.attempts) = (placed, 0);
            let on_way = message.on_way();
            self.cleared_packets -= before - on_way;
            self.cleared_bytes -= u64::from(count) * u64::from(message.rts.fragment);
            let limit = now + self.clearance(on_way);
            self.timers.set(timer, limit);
        }
        true
    }

    pub(super) fn on_more(&mut self, handle: u32, placed: u32, now: u64) {
        if self.progress(handle, placed, now) {
            self.clear_more(handle, now);
            self.clear_waiting(now);
        }
    }

    /// A packet is missing. If it does not come soon, it is lost.
    pub(super) fn on_gap(&mut self, handle: u32, placed: u32, now: u64) {
        if self.progress(handle, placed, now) {
            let timer = self.incoming_timer(handle);
            self.timers.set(timer, now + self.config.reordering);
            self.clear_waiting(now);
        }
    }

    pub(super) fn on_placed(&mut self, handle: u32, now: u64) {
        let Some(message) = self.incoming.get(handle) else { return };
        if message.limit == message.packets && self.progress(handle, message.packets, now) {
            self.commands.push(Command::Release { handle, half: Half::Receiving, confirm: false });
            self.deliver(handle, now);
            self.clear_waiting(now);
        }
    }

    /// All that is wanted of a message is in its place: the receive completes.
    pub(super) fn deliver(&mut self, handle: u32, now: u64) {
        let timer = self.incoming_timer(handle);
        let Some(message) = self.incoming.get_mut(handle) else { return };
        let Incoming { rts, receive, peer, first, .. } = *message;
        let capacity = self.receives.get(receive).map_or(0, |entry| entry.region.length);
        let placed = rts.length.min(capacity);
        let status = if placed < rts.length { Status::Truncated } else { Status::Delivered };
        message.attempts = 0;
        let ended = message.end || status == Status::Truncated || rts.length == u64::from(first);
        message.state = if ended { ReceiveState::Ended(status) } else { ReceiveState::Placed(status) };
        let delivered = Delivered { peer: PeerId(peer), tag: rts.tag, data: rts.data, length: rts.length, placed };
        self.complete_receive(receive, Ok(delivered));
        if ended { self.acknowledge(handle, now) } else { self.timers.set(timer, now + self.config.timeout) }
    }

    pub(super) fn complete_receive(&mut self, receive: u32, result: Result<Delivered, Error>) {
        if let Some(entry) = self.receives.remove(receive) {
            self.completions.push_back(Completion { token: entry.token, side: Side::Receive, result });
        }
    }

    /// Sends the ACK of a message that has ended, and repeats it until the CLEANUP comes.
    pub(super) fn acknowledge(&mut self, handle: u32, now: u64) {
        let Some(Incoming { peer, number, rts, first, state: ReceiveState::Ended(status), attempts, .. }) =
            self.incoming.get(handle).copied()
        else {
            return;
        };
        self.awaited |= rts.length > u64::from(first) || attempts > 0;
        self.control(peer.into(), Kind::Ack, |header| {
            (header.message, header.handle, header.count) = (number, rts.handle, status as u16);
        });
        let (timer, deadline) = (self.incoming_timer(handle), now + self.backoff(attempts));
        self.timers.set(timer, deadline);
    }

    /// The message that a packet from a peer is about.
    pub(super) fn received_message(&self, at: usize, header: &Header) -> Option<u32> {
        let handle = self.peers[at].received[(header.message % WINDOW) as usize];
        self.incoming.get(handle).filter(|message| message.number == header.message).map(|_| handle)
    }

    pub(super) fn on_end(&mut self, at: usize, header: &Header, now: u64) {
        let Some(handle) = self.received_message(at, header) else { return self.counters.drop(Drop::NoMessage) };
        let (timer, reordering) = (self.incoming_timer(handle), self.config.reordering);
        let Some(message) = self.incoming.get_mut(handle) else { return };
        match message.state {
            ReceiveState::Receiving => {
                message.end = true;
                self.timers.set(timer, now + reordering);
            }
            ReceiveState::Placed(status) => {
                message.state = ReceiveState::Ended(status);
                self.acknowledge(handle, now);
            }
            ReceiveState::Ended(_) => self.acknowledge(handle, now),
            _ => {}
        }
    }

    pub(super) fn on_cleanup(&mut self, at: usize, header: &Header) {
        if let Some(handle) = self.received_message(at, header)
            && self.incoming.get(handle).is_some_and(|message| matches!(message.state, ReceiveState::Ended(_)))
        {
            self.forget(handle);
        }
        self.advance_incoming_floor(at, header.packet);
    }

    pub(super) fn receive_timeout(&mut self, slot: usize, now: u64) {
        let Some(handle) = self.incoming.at(slot) else { return };
        let most = self.config.attempts;
        let Some(message) = self.incoming.get_mut(handle) else { return };
        message.attempts = message.attempts.saturating_add(1);
        let (exhausted, attempts) = (message.attempts > most, message.attempts);
        match message.state {
            ReceiveState::AwaitRts | ReceiveState::Receiving if exhausted => self.abort(handle, now),
            ReceiveState::AwaitRts => self.ask_for_rts(handle, now),
            ReceiveState::Receiving => {
                let (first, count) = (message.placed, message.limit - message.placed);
                if count > 0 {
                    let command = self.clear_command(handle, first, count, MAX_CLEARED);
                    command.into_iter().for_each(|command| self.commands.push(command));
                } else {
                    // It waits for NIC buffers, not for its sender.
                    message.attempts = 0;
                }
                let (timer, deadline) = (self.incoming_timer(handle), now + self.backoff(attempts));
                self.timers.set(timer, deadline);
            }
            ReceiveState::Placed(status) => {
                // The END was lost.
                message.state = ReceiveState::Ended(status);
                self.acknowledge(handle, now);
            }
            // It is kept until the sender asks or confirms; a sender that is dead takes it along.
            ReceiveState::Ended(_) if exhausted => {}
            ReceiveState::Ended(_) => self.acknowledge(handle, now),
            _ => {}
        }
    }

    /// Gives up a message whose sender lives but does not send it.
    pub(super) fn abort(&mut self, handle: u32, now: u64) {
        self.give_up_receive(handle, Error::NoProgress);
        if let Some(message) = self.incoming.get(handle)
            && matches!(message.state, ReceiveState::Ended(_))
        {
            self.acknowledge(handle, now);
        }
    }

    /// Gives up a message: its receive fails, at once or when the data half places no more data of it.
    pub(super) fn give_up_receive(&mut self, handle: u32, error: Error) {
        let Some(message) = self.incoming.get_mut(handle) else { return };
        let at = usize::from(message.peer);
        match message.state {
            ReceiveState::Receiving => {
                message.state = ReceiveState::Releasing(error);
                let (count, fragment) = (message.limit - message.placed, u64::from(message.rts.fragment));
                self.cleared_packets -= message.on_way();
                message.limit = message.placed;
                self.cleared_bytes -= u64::from(count) * fragment;
                let timer = self.incoming_timer(handle);
                self.timers.stop(timer);
                self.release(at, handle, Half::Receiving);
            }
            ReceiveState::Releasing(_) => {}
            ReceiveState::AwaitRts => {
                let receive = message.receive;
                message.state = ReceiveState::Ended(Status::Aborted);
                message.attempts = 0;
                self.complete_receive(receive, Err(error));
                if error != Error::NoProgress {
                    self.forget(handle);
                }
            }
            _ => {
                self.matching.discard(message.place, handle);
                self.note_discard(handle);
                self.forget(handle);
            }
        }
    }

    pub(super) fn on_released(&mut self, handle: u32, half: Half, now: u64) {
        if half == Half::Sending {
            return self.on_released_send(handle, now);
        }
        let Some(message) = self.incoming.get_mut(handle) else { return };
        if message.state == ReceiveState::Returning {
            self.incoming.remove(handle);
            return self.finish_leaving();
        }
        let ReceiveState::Releasing(error) = message.state else { return };
        let (at, receive) = (usize::from(message.peer), message.receive);
        (message.state, message.attempts) = (ReceiveState::Ended(Status::Aborted), 0);
        self.complete_receive(receive, Err(error));
        if error == Error::NoProgress && self.peers[at].is_open() {
            self.acknowledge(handle, now);
        } else {
            self.forget(handle);
        }
        self.released_one(at, now);
        self.clear_waiting(now);
    }

    /// Forgets a message that has ended. Its number is remembered until the sender's floor has passed it.
    pub(super) fn forget(&mut self, handle: u32) {
        self.free_buffer(handle);
        let timer = self.incoming_timer(handle);
        self.timers.stop(timer);
        let Some(message) = self.incoming.remove(handle) else { return };
        self.held -= usize::from(message.state == ReceiveState::Held);
        let peer = &mut self.peers[usize::from(message.peer)];
        peer.incoming -= 1;
        let place = &mut peer.received[(message.number % WINDOW) as usize];
        if *place == handle {
            *place = 0;
            peer.finished |= 1 << message.number.wrapping_sub(peer.incoming_floor);
        }
    }

    pub(super) fn free_buffer(&mut self, handle: u32) {
        if let Some(message) = self.incoming.get_mut(handle)
            && let Some(buffer) = message.buffer.take()
        {
            self.peers[usize::from(message.peer)].buffers -= 1;
            self.free_buffers.push(buffer);
        }
    }

    pub(super) fn incoming_timer(&self, handle: u32) -> usize {
        usize::from(self.config.sends) + handle::slot(handle)
    }
}
