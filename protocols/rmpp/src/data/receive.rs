//! The receiving half: data packets are placed in the receiver's memory as they come (section 4.2).

use super::stream::Streams;
use super::{Data, Peer, StreamId};
use crate::counters::Drop;
use crate::handle;
use crate::interface::{Command, Event};
use crate::memory::{Memory, Region};
use alloc::boxed::Box;
use baton_wire::Endpoint;
use baton_wire::rmpp::stream::{MAX_STREAMED, MAX_UNASKED, RunHeader};
use baton_wire::rmpp::{Cts, Header, Kind, MAX_CLEARED, PacketFlags};

/// The stream counts as dead after a message has been cleared anew this many times in a row while nothing came by the
/// stream.
const PATIENCE: u8 = 6;

/// A message that is being received.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    handle: u32,
    peer: u16,
    number: u32,
    /// The sender's handle.
    sender: u32,
    region: Region,
    /// Bytes of the message behind the RTS's.
    rest: u64,
    fragment: u16,
    /// Data packets that are wanted.
    packets: u32,
    /// All packets before this one have been placed.
    base: u32,
    /// Bit i: packet `base + i` has been placed.
    placed: u128,
    /// The first packet that has not been cleared.
    limit: u32,
    /// The first packet that only the policy may clear.
    until: u32,
    /// Most packets that a further CTS clears.
    step: u16,
    /// The data half clears packets by itself, so it has cleared more than the policy knows.
    alone: bool,
    grant: u16,
    /// The RSM of the current grant has been reported, so nothing more is cleared before the policy says so.
    more_reported: bool,
    /// The policy knows that all packets before this one have been placed.
    reported: u32,
    /// The current gap has been reported.
    gap_reported: bool,
    /// The stream by which cleared packets come; 0 if they come as packets.
    stream: u32,
    /// A run that the sender may have sent unasked is accepted.
    takes_unasked: bool,
    /// Packets that the stream has brought and that lie behind missing ones: from the first number up to, but without,
    /// the second.
    island: (u32, u32),
    /// Bytes that had come by the stream when the message was last cleared anew, and how often in a row that number had
    /// not grown.
    streamed: u64,
    stalled: u8,
}

/// The place in memory for the bytes of a run.
pub(super) struct Place {
    /// All bytes before this one have been placed. Bytes are counted from the first one behind the RTS's.
    pub from: u64,
    /// The region for the message, from that first byte on.
    pub region: Region,
}

/// The messages that are being received, by slot of their handle.
pub(super) struct Receiving {
    messages: Box<[Option<Message>]>,
    count: usize,
}

impl Receiving {
    pub fn new(messages: usize) -> Receiving {
        Receiving { messages: alloc::vec![None; messages].into(), count: 0 }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether no message is in a slot.
    pub fn is_free(&self, slot: usize) -> bool {
        self.messages.get(slot).is_some_and(Option::is_none)
    }

    fn find(&mut self, handle: u32) -> Option<&mut Message> {
        self.messages.get_mut(handle::slot(handle))?.as_mut().filter(|message| message.handle == handle)
    }

    /// Forgets a message, if it is known. Returns its peer, and the stream by which its data comes.
    pub fn release(&mut self, handle: u32) -> Option<(u16, u32)> {
        let message = *self.find(handle)?;
        self.messages[handle::slot(handle)] = None;
        self.count -= 1;
        Some((message.peer, message.stream))
    }

    /// The message of a run, if the message's data comes by that stream.
    pub fn of_run(&mut self, stream: StreamId, header: &RunHeader) -> Option<&mut Message> {
        let is_of = |message: &&mut Message| {
            (message.peer, message.stream, message.number) == (stream.peer, stream.number, header.message)
        };
        self.find(header.handle).filter(is_of)
    }

    /// Checks a run. Returns the offset at which it begins, in bytes from the first one behind the RTS's; None if its
    /// message has ended.
    ///
    /// # Errors
    /// The reason why the run is invalid.
    pub fn check_run(&mut self, stream: StreamId, header: &RunHeader) -> Result<Option<u64>, Drop> {
        let Some(message) = self.find(header.handle) else { return Ok(None) };
        if (message.peer, message.number) != (stream.peer, header.message) {
            return Err(Drop::Stranger);
        }
        if message.is_complete() {
            return Ok(None);
        }
        let end = header.first + u32::from(header.count);
        if message.stream != stream.number || end > message.limit {
            return Err(Drop::NotCleared);
        }
        let [begin, end] = [header.first, end].map(|packet| u64::from(packet) * u64::from(message.fragment));
        if end.min(message.rest).checked_sub(begin) != Some(header.length.into()) {
            return Err(Drop::Length);
        }
        Ok(Some(begin))
    }

    /// The first packet of a message that is not cleared.
    pub fn limit(&self, handle: u32) -> Option<u32> {
        let message = self.messages.get(handle::slot(handle))?.as_ref();
        message.filter(|message| message.handle == handle).map(|message| message.limit)
    }

    /// The place for the bytes of a run that was checked; None if its message does not want them any more.
    pub fn place(&self, stream: StreamId, header: &RunHeader) -> Option<Place> {
        let message = self.messages.get(handle::slot(header.handle))?.as_ref()?;
        let is_of = (message.handle, message.peer, message.stream, message.number)
            == (header.handle, stream.peer, stream.number, header.message);
        let cleared = header.first + u32::from(header.count) <= message.limit && !message.is_complete();
        let from = u64::from(message.base) * u64::from(message.fragment);
        (is_of && cleared).then_some(Place { from, region: message.region })
    }

    /// The messages whose data comes by a stream.
    pub fn of_stream(&self, peer: u16, stream: u32) -> impl Iterator<Item = u32> {
        let is_of = move |message: &&Message| (message.peer, message.stream) == (peer, stream);
        self.messages.iter().flatten().filter(is_of).map(|message| message.handle)
    }

    /// Enters a message if it is new. None if another message has its slot: the policy may reuse a slot only after it
    /// has released the former message.
    fn enter(&mut self, message: Message) -> Option<&mut Message> {
        let place = self.messages.get_mut(handle::slot(message.handle))?;
        if place.is_none() {
            self.count += 1;
            *place = Some(message);
        }
        place.as_mut().filter(|entry| entry.handle == message.handle)
    }
}

impl Message {
    /// Bytes that packet `packet` carries.
    fn length_of(&self, packet: u32) -> u64 {
        let at = u64::from(packet) * u64::from(self.fragment);
        u64::from(self.fragment).min(self.rest.saturating_sub(at))
    }

    /// Checks that a data packet was cleared and has not come before.
    fn check(&self, header: &Header, length: usize) -> Result<(), Drop> {
        // If packets come by a stream, more are cleared than there are bits.
        if header.packet >= self.limit || header.packet >= self.base.saturating_add(u128::BITS) {
            return Err(Drop::NotCleared);
        }
        if length as u64 != self.length_of(header.packet) {
            return Err(Drop::Length);
        }
        if header.packet < self.base || self.placed >> (header.packet - self.base) & 1 == 1 {
            return Err(Drop::Duplicate);
        }
        Ok(())
    }

    fn place(&mut self, packet: u32, data: &[u8], memory: &mut (impl Memory + ?Sized)) -> Result<(), Drop> {
        let at = u64::from(packet) * u64::from(self.fragment);
        let length = (data.len() as u64).min(self.region.length.saturating_sub(at)) as usize;
        let offset = self.region.offset.checked_add(at).ok_or(Drop::Memory)?;
        if !memory.write(offset, &data[..length]) {
            return Err(Drop::Memory);
        }
        self.placed |= 1 << (packet - self.base);
        self.go_on(self.base + self.placed.trailing_ones());
        if self.placed == 0 {
            self.gap_reported = false;
        }
        Ok(())
    }

    /// The header of the CTS that clears `count` packets from `first` on.
    fn cts(&self, peer: &Peer, endpoint: u16, first: u32, count: u32) -> Header {
        let mut header = Header::new(Kind::Cts, [endpoint, peer.endpoint], [peer.local, peer.remote]);
        (header.message, header.grant, header.packet) = (self.number, self.grant, first);
        (header.count, header.handle) = (count as u16, self.sender);
        if self.stream != 0 && self.takes_unasked {
            header.flags = PacketFlags::TAKEN;
        }
        header
    }

    /// The packets from `first` on, up to before `end`, have been placed by a stream. Returns how many had not been
    /// before.
    pub fn advance(&mut self, first: u32, end: u32) -> u32 {
        if end <= first.max(self.base) {
            return 0;
        }
        self.stalled = 0;
        let (from, to) = self.island;
        if first <= self.base {
            let before = self.base;
            self.go_on(end);
            return self.base - before;
        }
        // Packets before it are missing: they came as packets, and some were lost.
        let joins = (from..=to).contains(&first);
        match (from == to, joins) {
            (true, _) => self.island = (first, end),
            (_, true) => self.island.1 = end.max(to),
            // A stream brings a message's packets in their order.
            (false, false) => return 0,
        }
        self.island.1 - self.island.0 - (to - from)
    }

    /// All packets before `base` have been placed, and more that join them.
    fn go_on(&mut self, base: u32) {
        let mut base = base;
        while base > self.base {
            self.placed = self.placed.checked_shr(base - self.base).unwrap_or(0);
            self.base = base;
            base += self.placed.trailing_ones();
            if self.island.0 <= base && self.island.1 > self.island.0 {
                base = base.max(self.island.1);
                self.island = (0, 0);
            }
        }
        // When a stream ends, fewer packets are cleared again than were cleared before; packets that had come may lie
        // beyond the new limit.
        self.limit = self.limit.max(self.base);
    }

    /// Whether a stream has brought all packets up to this one.
    pub fn has_placed(&self, packet: u32) -> bool {
        self.base > packet || (self.island.0..self.island.1).contains(&packet)
    }

    /// Whether all of it has been placed.
    pub fn is_complete(&self) -> bool {
        self.base == self.packets
    }

    /// Bytes of each data packet but the last.
    pub fn fragment(&self) -> u64 {
        self.fragment.into()
    }

    /// Number of packets behind the limit that may still be cleared.
    fn further(&self) -> u32 {
        if self.stream != 0 {
            return (self.until - self.limit).min(MAX_STREAMED.into());
        }
        let window = u128::BITS.saturating_sub(self.limit - self.base);
        u32::from(self.step).min(self.until - self.limit).min(window)
    }

    /// The event that the policy has to get after a data packet, which was placed or had come before.
    fn event_for_policy(&mut self, asked: Asked, placed: bool) -> Option<Event> {
        if self.base == self.packets {
            // This is repeated for a packet that comes again: the sender does not know yet that all packets have come.
            return placed.then_some(Event::Placed { handle: self.handle });
        }
        let due = match asked {
            Asked::Nothing => false,
            Asked::Answered => self.base - self.reported >= REPORT,
            Asked::Policy => !core::mem::replace(&mut self.more_reported, true),
        };
        if due {
            self.reported = self.base;
            return Some(Event::More { handle: self.handle, placed: self.base });
        }
        if self.placed != 0 && !self.gap_reported {
            self.gap_reported = true;
            return Some(Event::Gap { handle: self.handle, placed: self.base });
        }
        None
    }
}

/// Whether a packet asks for more to be cleared, and which half answers that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Nothing,
    /// This side has.
    Answered,
    Policy,
}

/// Packets after which the policy learns how far a message is that this side clears by itself: its time-outs depend on
/// it.
const REPORT: u32 = 128;

impl Data {
    /// Places a data packet. Its header names the message by handle, so there is nothing to search.
    pub(super) fn receive_data(
        &mut self,
        from: &Endpoint,
        header: &Header,
        data: &[u8],
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<(), Drop> {
        // The events of a packet must reach the policy: without room for them the packet counts as lost.
        let most = usize::from(self.config.events);
        if self.events.len() + 1 >= most || self.control.len() >= most {
            return Err(Drop::NoRoom);
        }
        let message = self.receiving.find(header.handle).ok_or(Drop::NoMessage)?;
        let peer = self.peers.get(usize::from(message.peer)).copied().flatten().ok_or(Drop::NoMessage)?;
        if !peer.sent(from, header) || header.message != message.number {
            return Err(Drop::Stranger);
        }
        let outcome = message.check(header, data.len()).and_then(|()| message.place(header.packet, data, memory));
        if matches!(outcome, Ok(()) | Err(Drop::Duplicate)) {
            let asks = header.flags.contains(PacketFlags::RSM) && header.grant == message.grant && !message.more_reported;
            let (handle, complete) = (message.handle, message.is_complete());
            let asked = if asks { self.answer_more(handle, &peer) } else { Asked::Nothing };
            let event = self.receiving.find(handle).and_then(|message| message.event_for_policy(asked, outcome.is_ok()));
            if complete {
                self.leave_stream(handle);
            }
            if let Some(event) = event {
                self.report(event)?;
            }
        }
        self.counters.placed += u64::from(outcome.is_ok());
        outcome
    }

    /// Answers an RSM, or leaves that to the policy.
    fn answer_more(&mut self, handle: u32, peer: &Peer) -> Asked {
        self.join_stream(handle);
        let Some(message) = self.receiving.find(handle) else { return Asked::Nothing };
        match message.further() {
            0 if message.limit == message.until => Asked::Policy,
            // A packet is missing, which will be cleared again, with an RSM of its own.
            0 => Asked::Nothing,
            count => {
                message.grant = handle::next_generation(message.grant);
                let first = message.limit;
                message.limit += count;
                self.send_cts(handle, peer, first, count);
                Asked::Answered
            }
        }
    }

    /// Sends the CTS that clears `count` packets of a message from `first` on.
    fn send_cts(&mut self, handle: u32, peer: &Peer, first: u32, count: u32) {
        let Some(message) = self.receiving.find(handle) else { return };
        let header = message.cts(peer, self.config.endpoint, first, count);
        let cts = match &mut self.streams {
            Some(streams) => streams.cts(message.peer, peer, handle, message.rest, message.stream),
            None => Cts { handle, ..Cts::default() },
        };
        self.control.push_back((peer.address, header, cts));
    }

    /// Makes the data of a message that is long enough come by its peer's stream from the next CTS on, if there is a
    /// stream.
    fn join_stream(&mut self, handle: u32) {
        if let Some(message) = self.receiving.find(handle)
            && let Some(streams) = &mut self.streams
            && message.stream == 0
            && !message.is_complete()
        {
            message.stream = streams.carries(message.peer, message.rest);
            streams.await_message(message.peer, message.stream, true);
        }
    }

    /// Called when a message is cleared for the first time: accepts the run that its sender may have sent unasked,
    /// unless that run has come and was dropped, or reaches beyond the cleared packets. Returns whether the message's
    /// CTS waits until the stream has been read.
    fn take_unasked(&mut self, handle: u32) -> bool {
        let Some(message) = self.receiving.find(handle) else { return false };
        let Some(streams) = self.streams.as_mut().filter(|_| message.stream != 0 && !message.takes_unasked) else { return false };
        let all = message.rest.div_ceil(message.fragment.max(1).into());
        if u64::from(message.limit) >= all.min(MAX_UNASKED.into()) {
            message.takes_unasked = streams.take_unasked(message.peer, message.number, handle);
        }
        message.takes_unasked && all <= MAX_UNASKED.into() && streams.defer(handle)
    }

    /// Sends the CTS that have waited until the streams were read, for messages whose data has not come unasked.
    pub fn send_deferred(&mut self) {
        while let Some(handle) = self.streams.as_mut().and_then(Streams::deferred) {
            let message = self.receiving.find(handle).map(|message| (message.peer, message.base, message.limit));
            let Some((peer, first, limit)) = message else { continue };
            if let Some(peer) = self.peers.get(usize::from(peer)).copied().flatten().filter(|_| limit > first) {
                self.send_cts(handle, &peer, first, limit - first);
            }
        }
    }

    /// Notes that nothing more of a message will come by its stream.
    fn leave_stream(&mut self, handle: u32) {
        if let Some(message) = self.receiving.find(handle)
            && let Some(streams) = &mut self.streams
        {
            streams.await_message(message.peer, core::mem::take(&mut message.stream), false);
            streams.forget_unasked(message.peer, handle);
        }
    }

    /// Packets of a message have been placed by a stream; `asks`: the RSM is behind them.
    pub(super) fn take_up_placed(&mut self, handle: u32, asks: bool, placed: bool, peer: &Peer) {
        let asks = asks && self.receiving.find(handle).is_some_and(|message| !message.more_reported);
        let asked = if asks { self.answer_more(handle, peer) } else { Asked::Nothing };
        let Some(message) = self.receiving.find(handle) else { return };
        // The policy's time-outs depend on how far it is.
        let asked = if asked == Asked::Nothing { Asked::Answered } else { asked };
        let complete = message.is_complete();
        let event = if placed || asked == Asked::Policy { message.event_for_policy(asked, placed) } else { None };
        self.events.extend(event);
        if complete {
            self.leave_stream(handle);
        }
    }

    /// After the stream of a message has ended: clears again the data that has not come, which then comes as packets.
    pub(super) fn clear_again(&mut self, handle: u32, peer: &Peer) {
        let Some(message) = self.receiving.find(handle) else { return };
        (message.stream, message.island, message.takes_unasked) = (0, (0, 0), false);
        let count = u32::from(message.step.min(MAX_CLEARED)).min(message.until - message.base);
        if count > 0 {
            (message.limit, message.more_reported) = (message.base + count, false);
            message.grant = handle::next_generation(message.grant);
            let first = message.base;
            self.send_cts(handle, peer, first, count);
        }
    }

    /// Handles that the policy clears a message of a stream anew, since no progress was reported to it. Returns whether
    /// nothing else is to be done: a stream repeats nothing, so data that is arriving just goes on, and a stream that
    /// brings nothing is ended.
    fn waits_for_stream(&mut self, handle: u32, first: u32) -> bool {
        let Some(message) = self.receiving.find(handle).filter(|message| message.stream != 0 && first < message.limit) else {
            return false;
        };
        let peer = message.peer;
        let base = message.base;
        let (arriving, bytes) = self.arriving(peer, handle, base);
        let Some(message) = self.receiving.find(handle) else { return false };
        message.stalled = if message.streamed == bytes { message.stalled.saturating_add(1) } else { 0 };
        message.streamed = bytes;
        if message.stalled >= PATIENCE {
            self.end_incoming(peer.into());
            return true;
        }
        if arriving {
            message.reported = message.base;
            let placed = message.base;
            self.events.push_back(Event::More { handle, placed });
        }
        arriving
    }

    /// Clears packets of a message, and sends the CTS for those that have not been placed. If the policy clears packets
    /// behind those that the data half has cleared by itself, only the limit is moved, unless the RSM has come.
    pub(super) fn clear(&mut self, command: &Command) {
        let Command::Clear { handle, peer, message, sender, region, rest, fragment, packets, first, count, ahead, grant } =
            *command
        else {
            return;
        };
        let until = first.checked_add(count.into()).and_then(|end| end.checked_add(ahead));
        let in_range = (1..=MAX_CLEARED).contains(&count) && until.is_some_and(|until| until <= packets);
        let known = self.peers.get(usize::from(peer)).copied().flatten().filter(|_| in_range && fragment > 0);
        let (Some(known), Some(until)) = (known, until) else { return self.counters.drop(Drop::NoMessage) };
        let new = Message {
            handle,
            peer,
            number: message,
            sender,
            region,
            rest,
            fragment,
            packets,
            base: first,
            placed: 0,
            limit: first,
            until,
            step: count,
            grant,
            alone: false,
            more_reported: true,
            reported: first,
            gap_reported: false,
            stream: 0,
            takes_unasked: false,
            island: (0, 0),
            streamed: 0,
            stalled: 0,
        };
        let Some(entry) = self.receiving.enter(new) else { return self.counters.drop(Drop::NoMessage) };
        entry.alone |= ahead > 0;
        (entry.until, entry.step) = (entry.until.max(until), entry.step.max(count));
        self.join_stream(handle);
        let Some(entry) = self.receiving.find(handle) else { return };
        // An RSM that is still in flight will make the message go on. If all cleared packets have been placed, the RSM
        // may have been lost.
        if first > entry.limit || first == entry.limit && !entry.more_reported && entry.further() == 0 {
            return;
        }
        let from = first.max(entry.base);
        // A bit for each cleared packet, counted from the first that is missing.
        let end = match entry.stream {
            0 => (from + u32::from(count)).min(entry.until).min(entry.base + u128::BITS),
            // Data that comes by a stream needs no bits.
            _ => entry.until.min(from + u32::from(MAX_STREAMED)),
        };
        if from >= end || entry.alone && first < entry.base {
            // More packets have come than the policy knows, perhaps all.
            let event = match entry.base == entry.packets {
                true => Event::Placed { handle },
                false => Event::More { handle, placed: entry.base },
            };
            entry.reported = entry.base;
            entry.more_reported |= from >= end;
            self.events.push_back(event);
            return;
        }
        if self.waits_for_stream(handle, first) {
            return;
        }
        let Some(entry) = self.receiving.find(handle) else { return };
        (entry.grant, entry.more_reported) = (grant, false);
        entry.limit = entry.limit.max(end);
        if from > 0 || !self.take_unasked(handle) {
            self.send_cts(handle, &known, from, end - from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stream that brought a message has ended, so fewer packets are cleared again than had been before, and
    /// packets that had come lie beyond these. Once the first missing packet has come, clearing goes on behind the
    /// packets that have come, and not where it had begun.
    #[test]
    fn what_had_come_before_a_stream_ended_counts_as_cleared() {
        let mut message = Message {
            handle: 0x1_0000,
            peer: 0,
            number: 1,
            sender: 0x1_0000,
            region: Region { offset: 0, length: 1000 },
            rest: 1000,
            fragment: 100,
            packets: 10,
            base: 0,
            // Packets 1 to 4.
            placed: 0b11110,
            limit: 2,
            until: 10,
            step: 2,
            alone: false,
            grant: 1,
            more_reported: false,
            reported: 0,
            gap_reported: false,
            stream: 0,
            takes_unasked: false,
            island: (0, 0),
            streamed: 0,
            stalled: 0,
        };
        message.place(0, &[0; 100], &mut [0; 1000][..]).expect("it was cleared");
        assert_eq!((message.base, message.limit, message.further()), (5, 5, 2));
    }
}
