//! Arriving messages: RTS, their order, matching, and the program's receives.

use super::messages::{Incoming, ReceiveState};
use super::{Error, Limit, PeerId, Policy, Probed, Receive, ReceiveId, Request};
use crate::counters::Drop;
use crate::memory::{Memory, Region};
use crate::{WINDOW, before};
use baton_matching::Post;
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, HoldReason, Kind, Rts};

impl Policy {
    /// Posts a receive.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn post(&mut self, request: Request, now: u64, memory: &mut (impl Memory + ?Sized)) -> Result<ReceiveId, Limit> {
        self.check_room()?;
        self.check_region(&request.region)?;
        let source = request.source.map(|peer| peer.0);
        // Its number is about to be free, or is already, and then another peer's.
        if source.is_some_and(|peer| self.is_leaving(peer.into())) {
            return Err(Limit::NoPeer);
        }
        let entry = Receive { token: request.token, region: request.region, source, ..Receive::default() };
        let receive = self.receives.insert(entry).ok_or(Limit::Receives)?;
        let criteria = Self::criteria(request.source, request.context, request.tag, request.ignore);
        match self.matching.post(criteria, receive) {
            Ok(Post::Posted(id)) => {
                if let Some(entry) = self.receives.get_mut(receive) {
                    entry.posted = Some(id);
                }
                self.await_peer(source, now);
                self.note_post(receive, criteria);
            }
            Ok(Post::Matched(incoming)) => {
                self.note_discard(incoming);
                self.begin(incoming, receive, now, memory);
            }
            Err(_) => {
                self.receives.remove(receive);
                return Err(Limit::Receives);
            }
        }
        Ok(ReceiveId(receive))
    }

    /// Takes a posted receive back: it completes with [`Error::Cancelled`]. False if it has matched a message, or has
    /// ended. Where the data half matches, a message may still be faster: then the receive completes with that.
    pub fn cancel(&mut self, id: ReceiveId) -> bool {
        let Some(posted) = self.receives.get(id.0).and_then(|receive| receive.posted) else { return false };
        if self.cancel_in_data(id.0, Error::Cancelled) {
            return true;
        }
        let cancelled = self.matching.cancel(posted).is_some();
        if cancelled {
            self.end_posted(id.0, Error::Cancelled);
        }
        cancelled
    }

    /// Ends a receive that has been taken out of the matching.
    pub(super) fn end_posted(&mut self, receive: u32, error: Error) {
        let source = self.receives.get(receive).and_then(|receive| receive.source);
        self.await_no_longer(source);
        self.complete_receive(receive, Err(error));
    }

    /// Notes that a posted receive waits for a certain peer. The peer's keep-alive runs as long as a receive waits for
    /// it.
    fn await_peer(&mut self, source: Option<u16>, now: u64) {
        let Some(at) = source.map(usize::from) else { return };
        let idle = !self.peers[at].is_busy();
        self.peers[at].awaited += 1;
        if idle && self.peers[at].is_open() {
            self.watch(at, now);
        }
    }

    /// Notes that a receive no longer waits for a certain peer.
    pub(super) fn await_no_longer(&mut self, source: Option<u16>) {
        if let Some(peer) = source.and_then(|at| self.peers.get_mut(usize::from(at))) {
            peer.awaited = peer.awaited.saturating_sub(1);
        }
    }

    /// Fails the posted receives that only a message of this peer could match. Receives that the data half has end only
    /// once it has given them up, so that nothing is placed in their memory afterwards.
    pub(super) fn fail_posted(&mut self, at: usize, error: Error) {
        for slot in 0..self.receives.slots() {
            if self.peers[at].awaited == 0 {
                return;
            }
            let Some(receive) = self.receives.at(slot) else { continue };
            let entry = self.receives.get_mut(receive).filter(|entry| entry.source == Some(at as u16));
            let Some((entry, posted)) = entry.and_then(|entry| entry.posted.map(|posted| (entry, posted))) else { continue };
            let source = entry.source.take();
            self.await_no_longer(source);
            if !self.cancel_in_data(receive, error) && self.matching.cancel(posted).is_some() {
                self.complete_receive(receive, Err(error));
            }
        }
    }

    /// Finds the oldest unexpected message that a receive would get, and leaves it where it is (MPI_Probe).
    pub fn peek(&mut self, source: Option<PeerId>, context: u32, tag: u64, ignore: u64) -> Option<Probed> {
        let handle = self.matching.peek(&Self::criteria(source, context, tag, ignore))?;
        self.probed(handle)
    }

    /// Takes the oldest unexpected message that a receive would get, for [`Policy::receive_claimed`] (MPI_Mprobe).
    pub fn claim(&mut self, source: Option<PeerId>, context: u32, tag: u64, ignore: u64) -> Option<Probed> {
        let handle = self.matching.claim(&Self::criteria(source, context, tag, ignore))?;
        self.note_discard(handle);
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
        let receive = self.receives.insert(Receive { token, region, ..Receive::default() }).ok_or(Limit::Receives)?;
        self.begin(message, receive, now, memory);
        Ok(())
    }

    pub(super) fn probed(&self, handle: u32) -> Option<Probed> {
        let Incoming { peer, rts, .. } = self.incoming.get(handle)?;
        Some(Probed { message: handle, peer: PeerId(*peer), tag: rts.tag, data: rts.data, length: rts.length })
    }

    /// Handles an RTS that has come. `buffer` (its number, and the bytes in it) belongs to the policy now.
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
            if self.defer_rts(at, header, rts) {
                return Ok((at, false));
            }
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
    pub(super) fn take_rts(
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
        debug_assert!(!before(number, peer.next_match), "a message that was matched and has ended is known");
        let kept = peer.buffers < self.config.buffers_per_peer && self.free_to_keep();
        let message = Incoming::new(at as u16, number, rts, first, buffer);
        // Messages that come out of order must not take the room of the messages for which they wait.
        let in_order = number == peer.next_match;
        let room = in_order || self.held * 2 < self.incoming.slots();
        let Some(handle) = Some(message).filter(|_| room).and_then(|message| self.incoming.insert(message)) else {
            self.hold(at, number, rts.handle, HoldReason::Busy);
            return Err(Drop::Messages);
        };
        self.held += 1;
        self.note_incoming(at, number, handle, now);
        self.peers[at].buffers += 1;
        if in_order {
            self.match_next(at, now, memory);
        }
        // A message that has not matched now may wait long: only some of these keep their data in buffers.
        if !kept {
            self.free_buffer(handle);
        }
        Ok(true)
    }

    /// Enters an incoming message into its peer's window.
    pub(super) fn note_incoming(&mut self, at: usize, number: u32, handle: u32, now: u64) {
        self.peers[at].received[(number % WINDOW) as usize] = handle;
        self.peers[at].incoming += 1;
        if self.peers[at].incoming == 1 && self.peers[at].sends == 0 {
            self.watch(at, now);
        }
    }

    /// Whether another buffer can be kept: a quarter of them always stays with the data half, so that an RTS which
    /// matches gets through.
    pub(super) fn free_to_keep(&self) -> bool {
        self.buffers_held() <= usize::from(self.config.buffer_count) * 3 / 4
    }

    /// Matches the peer's next message, whose RTS has come.
    pub(super) fn match_next(&mut self, at: usize, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let peer = &mut self.peers[at];
        let handle = peer.received[(peer.next_match % WINDOW) as usize];
        peer.next_match = peer.next_match.wrapping_add(1);
        let Some(rts) = self.incoming.get(handle).map(|incoming| incoming.rts) else { return };
        self.held -= 1;
        self.give_to_receive(at, handle, &rts, now, memory);
    }

    /// Matches messages that came before one with a lower number.
    pub(super) fn match_in_order(&mut self, at: usize, now: u64, memory: &mut (impl Memory + ?Sized)) {
        loop {
            let peer = &self.peers[at];
            let next = self.incoming.get(peer.received[(peer.next_match % WINDOW) as usize]);
            if next.is_none_or(|message| message.number != peer.next_match || message.state != ReceiveState::Held) {
                return;
            }
            self.match_next(at, now, memory);
        }
    }

    /// Handles an RTS that has come before: the answer did not reach the sender, or the sender was asked for the RTS
    /// again.
    pub(super) fn repeated_rts(
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

    pub(super) fn hold(&mut self, at: usize, number: u32, sender: u32, reason: HoldReason) {
        self.control(at, Kind::Hold, |header| {
            (header.message, header.handle, header.count) = (number, sender, reason as u16);
        });
    }

    /// Gives a message to the receive that it has matched.
    pub(super) fn begin(&mut self, handle: u32, receive: u32, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let Some(message) = self.incoming.get_mut(handle) else { return };
        message.receive = receive;
        if message.buffer.is_some() {
            return self.place_first(handle, now, memory);
        }
        message.state = ReceiveState::AwaitRts;
        self.ask_for_rts(handle, now);
    }

    pub(super) fn ask_for_rts(&mut self, handle: u32, now: u64) {
        let Some(Incoming { peer, number, rts, attempts, .. }) = self.incoming.get(handle).copied() else { return };
        self.hold(peer.into(), number, rts.handle, HoldReason::Resend);
        let (timer, deadline) = (self.incoming_timer(handle), now + self.backoff(attempts));
        self.timers.set(timer, deadline);
    }

    /// Copies the RTS's bytes into the receive's region, and clears the packets that follow.
    pub(super) fn place_first(&mut self, handle: u32, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let (buffers, size) = (self.config.buffers, u64::from(self.config.buffer_size));
        let Some(message) = self.incoming.get_mut(handle) else { return };
        let region = self.receives.get(message.receive).map_or(Region::default(), |receive| receive.region);
        let first = u64::from(message.first).min(region.length);
        if let Some(buffer) = message.buffer {
            memory.copy(buffers + u64::from(buffer) * size, region.offset, first);
        }
        message.take_region(region);
        let complete = message.packets == 0;
        self.free_buffer(handle);
        if complete { self.deliver(handle, now) } else { self.clear_more(handle, now) }
    }
}
