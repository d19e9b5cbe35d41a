//! Messages that come: RTS, matching, how much is cleared, and how they end.

use super::messages::{Incoming, ReceiveState};
use super::{Completion, Delivered, Error, Limit, PeerId, Policy, Probed, Receive, ReceiveId, Request, Side};
use crate::counters::Drop;
use crate::handle;
use crate::interface::{Command, Half};
use crate::memory::{Memory, Region};
use crate::{WINDOW, before};
use baton_matching::{Arrival, Message, Post};
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, HoldReason, Kind, MAX_CLEARED, Rts, Status};

impl Policy {
    /// Posts a receive.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn post(&mut self, request: Request, now: u64, memory: &mut (impl Memory + ?Sized)) -> Result<ReceiveId, Limit> {
        self.check_room()?;
        self.check_region(&request.region)?;
        let entry = Receive { token: request.token, region: request.region, posted: None };
        let receive = self.receives.insert(entry).ok_or(Limit::Receives)?;
        let criteria = Self::criteria(request.source, request.context, request.tag, request.ignore);
        match self.matching.post(criteria, receive) {
            Ok(Post::Posted(id)) => {
                if let Some(entry) = self.receives.get_mut(receive) {
                    entry.posted = Some(id);
                }
            }
            Ok(Post::Matched(incoming)) => self.begin(incoming, receive, now, memory),
            Err(_) => {
                self.receives.remove(receive);
                return Err(Limit::Receives);
            }
        }
        Ok(ReceiveId(receive))
    }

    /// Takes a posted receive back: it completes with [`Error::Cancelled`]. False if it has matched a message, or has ended.
    pub fn cancel(&mut self, id: ReceiveId) -> bool {
        let Some(posted) = self.receives.get(id.0).and_then(|receive| receive.posted) else { return false };
        let cancelled = self.matching.cancel(posted).is_some();
        if cancelled {
            self.complete_receive(id.0, Err(Error::Cancelled));
        }
        cancelled
    }

    /// Finds the oldest unexpected message that a receive would get, and leaves it where it is (MPI_Probe).
    pub fn peek(&mut self, source: Option<PeerId>, context: u32, tag: u64, ignore: u64) -> Option<Probed> {
        let handle = self.matching.peek(&Self::criteria(source, context, tag, ignore))?;
        self.probed(handle)
    }

    /// Takes the oldest unexpected message that a receive would get, for [`Policy::receive_claimed`] (MPI_Mprobe).
    pub fn claim(&mut self, source: Option<PeerId>, context: u32, tag: u64, ignore: u64) -> Option<Probed> {
        let handle = self.matching.claim(&Self::criteria(source, context, tag, ignore))?;
        self.incoming.get_mut(handle)?.state = ReceiveState::Claimed;
        self.probed(handle)
    }

    /// Receives a message that was claimed (MPI_Mrecv).
    ///
    /// # Errors
    /// The limit that stands against it, or [`Limit::NoMessage`] if its sender has ended.
    pub fn receive_claimed(
        &mut self,
        message: u32,
        region: Region,
        token: u64,
        now: u64,
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<(), Limit> {
        self.check_room()?;
        self.check_region(&region)?;
        let claimed = self.incoming.get(message).is_some_and(|incoming| incoming.state == ReceiveState::Claimed);
        if !claimed {
            return Err(Limit::NoMessage);
        }
        let receive = self.receives.insert(Receive { token, region, posted: None }).ok_or(Limit::Receives)?;
        self.begin(message, receive, now, memory);
        Ok(())
    }

    fn probed(&self, handle: u32) -> Option<Probed> {
        let Incoming { peer, rts, .. } = self.incoming.get(handle)?;
        Some(Probed { message: handle, peer: PeerId(*peer), tag: rts.tag, data: rts.data, length: rts.length })
    }

    /// An RTS has come; `buffer` (its number, bytes in it) is ours now.
    pub(super) fn on_rts(
        &mut self,
        from: &Endpoint,
        header: &Header,
        rts: &Rts,
        buffer: (u16, u16),
        now: u64,
        memory: &mut (impl Memory + ?Sized),
    ) {
        let outcome = self.admit(from, header, now).and_then(|at| {
            self.advance_incoming_floor(at, header.packet);
            self.take_rts(at, header, rts, buffer, now, memory).map(|kept| (at, kept))
        });
        match outcome {
            Ok((at, kept)) => {
                if !kept {
                    self.free_buffers.push(buffer.0);
                }
                self.match_in_order(at, now, memory);
            }
            Err(reason) => {
                self.free_buffers.push(buffer.0);
                self.counters.drop(reason);
            }
        }
    }

    /// Takes up an RTS. Whether its buffer is kept.
    fn take_rts(
        &mut self,
        at: usize,
        header: &Header,
        rts: &Rts,
        (buffer, first): (u16, u16),
        now: u64,
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<bool, Drop> {
        let (number, peer) = (header.message, &self.peers[at]);
        let distance = number.wrapping_sub(peer.incoming_floor);
        if before(number, peer.incoming_floor) {
            return Err(Drop::Duplicate);
        }
        if distance >= WINDOW {
            return Err(Drop::Window);
        }
        if peer.finished >> distance & 1 == 1 {
            return Err(Drop::Duplicate);
        }
        let known = peer.received[(number % WINDOW) as usize];
        if self.incoming.get(known).is_some() {
            return self.repeated_rts(at, known, (buffer, first), now, memory);
        }
        let kept = peer.buffers < self.config.buffers_per_peer && self.free_to_keep();
        let message = Incoming {
            peer: at as u16,
            number,
            rts: *rts,
            first,
            buffer: Some(buffer),
            state: ReceiveState::Held,
            place: 0,
            receive: 0,
            region: Region::default(),
            packets: 0,
            placed: 0,
            limit: 0,
            grant: 0,
            attempts: 0,
            end: false,
            queued: false,
        };
        // Messages that come out of order may not take the room of those that they wait for.
        let in_order = number == peer.next_match;
        let room = in_order || self.held * 2 < self.incoming.slots();
        let Some(handle) = Some(message).filter(|_| room).and_then(|message| self.incoming.insert(message)) else {
            self.hold(at, number, rts.handle, HoldReason::Busy);
            return Err(Drop::Messages);
        };
        self.held += 1;
        self.peers[at].received[(number % WINDOW) as usize] = handle;
        self.peers[at].incoming += 1;
        self.peers[at].buffers += 1;
        if self.peers[at].incoming == 1 && self.peers[at].sends == 0 {
            self.watch(at, now);
        }
        if in_order {
            self.match_next(at, now, memory);
        }
        // Whatever has not matched now may wait long: only some of those keep their data.
        if !kept {
            self.free_buffer(handle);
        }
        Ok(true)
    }

    /// Whether another buffer can be kept: a quarter of them always stays with the data half, so that an RTS which matches gets
    /// through.
    fn free_to_keep(&self) -> bool {
        self.buffers_held() <= usize::from(self.config.buffer_count) * 3 / 4
    }

    /// Matches the peer's next message, which has come.
    fn match_next(&mut self, at: usize, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let peer = &mut self.peers[at];
        let handle = peer.received[(peer.next_match % WINDOW) as usize];
        peer.next_match = peer.next_match.wrapping_add(1);
        let Some(incoming) = self.incoming.get_mut(handle) else { return };
        incoming.state = ReceiveState::Unexpected;
        self.held -= 1;
        let message = Message { source: at as u32, context: incoming.rts.context, tag: incoming.rts.tag };
        match self.matching.arrive(message, handle) {
            Ok(Arrival::Matched(receive)) => {
                if let Some(entry) = self.receives.get_mut(receive) {
                    entry.posted = None;
                }
                self.begin(handle, receive, now, memory);
            }
            Ok(Arrival::Unexpected(place)) => incoming.place = place,
            // There are as many places for unexpected messages as incoming ones.
            Err(_) => {}
        }
    }

    /// Matches messages that came before one with a lower number.
    fn match_in_order(&mut self, at: usize, now: u64, memory: &mut (impl Memory + ?Sized)) {
        loop {
            let peer = &self.peers[at];
            let next = self.incoming.get(peer.received[(peer.next_match % WINDOW) as usize]);
            if next.is_none_or(|message| message.number != peer.next_match || message.state != ReceiveState::Held) {
                return;
            }
            self.match_next(at, now, memory);
        }
    }

    /// An RTS that has come before: the sender has not heard of it, or was asked for it.
    fn repeated_rts(
        &mut self,
        at: usize,
        handle: u32,
        (buffer, first): (u16, u16),
        now: u64,
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<bool, Drop> {
        let reordering = self.config.reordering;
        let timer = self.incoming_timer(handle);
        let Some(message) = self.incoming.get_mut(handle) else { return Ok(false) };
        let (number, sender) = (message.number, message.rts.handle);
        match message.state {
            ReceiveState::AwaitRts if first == message.first => {
                message.buffer = Some(buffer);
                self.peers[at].buffers += 1;
                self.place_first(handle, now, memory);
                return Ok(true);
            }
            ReceiveState::Unexpected | ReceiveState::Claimed => self.hold(at, number, sender, HoldReason::Unexpected),
            ReceiveState::Held => self.hold(at, number, sender, HoldReason::Busy),
            ReceiveState::Ended(_) => self.acknowledge(handle, now),
            // The sender has no CTS: it was lost, or the sender's NIC has forgotten it.
            ReceiveState::Receiving if message.limit > message.placed => self.timers.set(timer, now + reordering),
            _ => {}
        }
        Err(Drop::Duplicate)
    }

    fn hold(&mut self, at: usize, number: u32, sender: u32, reason: HoldReason) {
        self.control(at, Kind::Hold, |header| {
            (header.message, header.handle, header.count) = (number, sender, reason as u16);
        });
    }

    /// Gives a message to the receive that it has matched.
    fn begin(&mut self, handle: u32, receive: u32, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let Some(message) = self.incoming.get_mut(handle) else { return };
        message.receive = receive;
        if message.buffer.is_some() {
            return self.place_first(handle, now, memory);
        }
        message.state = ReceiveState::AwaitRts;
        self.ask_for_rts(handle, now);
    }

    fn ask_for_rts(&mut self, handle: u32, now: u64) {
        let Some(Incoming { peer, number, rts, attempts, .. }) = self.incoming.get(handle).copied() else { return };
        self.hold(peer.into(), number, rts.handle, HoldReason::Resend);
        let (timer, deadline) = (self.incoming_timer(handle), now + self.backoff(attempts));
        self.timers.set(timer, deadline);
    }

    /// Copies the RTS's bytes into the receive's region, and clears what follows.
    fn place_first(&mut self, handle: u32, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let (buffers, size) = (self.config.buffers, u64::from(self.config.buffer_size));
        let Some(message) = self.incoming.get_mut(handle) else { return };
        let region = self.receives.get(message.receive).map_or(Region::default(), |receive| receive.region);
        let first = u64::from(message.first).min(region.length);
        if let Some(buffer) = message.buffer {
            memory.copy(buffers + u64::from(buffer) * size, region.offset, first);
        }
        message.region = Region { offset: region.offset + first, length: region.length - first };
        let wanted = message.rest().min(message.region.length);
        message.packets = wanted.div_ceil(u64::from(message.rts.fragment)) as u32;
        (message.state, message.attempts) = (ReceiveState::Receiving, 0);
        let complete = message.packets == 0;
        self.free_buffer(handle);
        if complete { self.deliver(handle, now) } else { self.clear_more(handle, now) }
    }

    /// Clears the next packets of a message: n = min(16 packets, what is pinned, what the NIC has buffers for) (section 3). Without
    /// room for one, it waits its turn.
    fn clear_more(&mut self, handle: u32, now: u64) {
        let room = self.config.nic_buffers.saturating_sub(self.cleared_packets);
        let pinned = self.config.pinned.saturating_sub(self.cleared_bytes);
        let most = u32::from(self.config.grant);
        let Some(message) = self.incoming.get_mut(handle) else { return };
        let window = u32::from(MAX_CLEARED).saturating_sub(message.limit - message.placed);
        let pinned = u32::try_from(pinned / u64::from(message.rts.fragment)).unwrap_or(u32::MAX);
        let count = most.min(message.packets - message.limit).min(window);
        if count == 0 {
            return;
        }
        let count = count.min(room).min(pinned);
        if count == 0 {
            if !message.queued {
                message.queued = true;
                self.waiting.push_back(handle);
            }
            return;
        }
        let first = message.limit;
        message.limit += count;
        self.cleared_packets += count;
        self.cleared_bytes += u64::from(count) * u64::from(message.rts.fragment);
        self.clear(handle, first, count);
        let timer = self.incoming_timer(handle);
        self.timers.set(timer, now + self.config.timeout);
    }

    /// Clears messages that waited, while there is room.
    pub(super) fn clear_waiting(&mut self, now: u64) {
        while let Some(handle) = self.waiting.front().copied()
            && self.is_ready()
        {
            if let Some(message) = self.incoming.get_mut(handle)
                && message.queued
            {
                let bytes = self.cleared_bytes + u64::from(message.rts.fragment);
                if self.cleared_packets >= self.config.nic_buffers || bytes > self.config.pinned {
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

    /// Has packets cleared, with a grant of their own.
    fn clear(&mut self, handle: u32, first: u32, count: u32) {
        let command = self.clear_command(handle, first, count);
        self.commands.extend(command);
    }

    /// The command that clears packets.
    pub(super) fn clear_command(&mut self, handle: u32, first: u32, count: u32) -> Option<Command> {
        let message = self.incoming.get_mut(handle)?;
        message.grant = handle::next_generation(message.grant);
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
            count: count as u16,
            grant: message.grant,
        })
    }

    /// Takes note of how much of a message has been placed.
    fn progress(&mut self, handle: u32, placed: u32, now: u64) -> bool {
        let timer = self.incoming_timer(handle);
        let Some(message) = self.incoming.get_mut(handle).filter(|message| message.state == ReceiveState::Receiving) else {
            return false;
        };
        let placed = placed.clamp(message.placed, message.limit);
        if placed > message.placed {
            let count = placed - message.placed;
            self.cleared_packets -= count;
            self.cleared_bytes -= u64::from(count) * u64::from(message.rts.fragment);
            (message.placed, message.attempts) = (placed, 0);
            self.timers.set(timer, now + self.config.timeout);
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
            self.commands.push_back(Command::Release { handle, half: Half::Receiving, confirm: false });
            self.deliver(handle, now);
            self.clear_waiting(now);
        }
    }

    /// All that is wanted of a message is in its place: the receive completes.
    fn deliver(&mut self, handle: u32, now: u64) {
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

    fn complete_receive(&mut self, receive: u32, result: Result<Delivered, Error>) {
        if let Some(entry) = self.receives.remove(receive) {
            self.completions.push_back(Completion { token: entry.token, side: Side::Receive, result });
        }
    }

    /// Sends the ACK of a message that has ended, and again until the CLEANUP comes.
    fn acknowledge(&mut self, handle: u32, now: u64) {
        let Some(Incoming { peer, number, rts, state: ReceiveState::Ended(status), attempts, .. }) =
            self.incoming.get(handle).copied()
        else {
            return;
        };
        self.control(peer.into(), Kind::Ack, |header| {
            (header.message, header.handle, header.count) = (number, rts.handle, status as u16);
        });
        let (timer, deadline) = (self.incoming_timer(handle), now + self.backoff(attempts));
        self.timers.set(timer, deadline);
    }

    /// The message that a packet from a peer is about.
    fn received_message(&self, at: usize, header: &Header) -> Option<u32> {
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
                    self.clear(handle, first, count);
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
    fn abort(&mut self, handle: u32, now: u64) {
        self.give_up_receive(handle, Error::NoProgress);
        if let Some(message) = self.incoming.get(handle)
            && matches!(message.state, ReceiveState::Ended(_))
        {
            self.acknowledge(handle, now);
        }
    }

    /// Gives up a message: its receive fails, at once or when the data half does not place anything any more.
    pub(super) fn give_up_receive(&mut self, handle: u32, error: Error) {
        let Some(message) = self.incoming.get_mut(handle) else { return };
        let at = usize::from(message.peer);
        match message.state {
            ReceiveState::Receiving => {
                message.state = ReceiveState::Releasing(error);
                let (count, fragment) = (message.limit - message.placed, u64::from(message.rts.fragment));
                message.limit = message.placed;
                self.cleared_packets -= count;
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
                self.forget(handle);
            }
        }
    }

    pub(super) fn on_released(&mut self, handle: u32, half: Half, now: u64) {
        if half == Half::Sending {
            return self.on_released_send(handle, now);
        }
        let Some(message) = self.incoming.get_mut(handle) else { return };
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

    fn free_buffer(&mut self, handle: u32) {
        if let Some(message) = self.incoming.get_mut(handle)
            && let Some(buffer) = message.buffer.take()
        {
            self.peers[usize::from(message.peer)].buffers -= 1;
            self.free_buffers.push(buffer);
        }
    }

    fn incoming_timer(&self, handle: u32) -> usize {
        usize::from(self.config.sends) + handle::slot(handle)
    }
}
