//! The receiving half: data packets are placed in the receiver's memory as they come (section 4.2).

use super::Data;
use crate::counters::Drop;
use crate::handle;
use crate::interface::{Command, Event};
use crate::memory::{Memory, Region};
use alloc::boxed::Box;
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, Kind, MAX_CLEARED, PacketFlags};

/// A message that is being received.
#[derive(Clone, Copy, Debug)]
struct Message {
    handle: u32,
    peer: u16,
    number: u32,
    region: Region,
    /// Bytes of the message behind the RTS's.
    rest: u64,
    fragment: u16,
    /// Data packets that are wanted.
    packets: u32,
    /// All packets before this one have been placed.
    base: u32,
    /// Bit i: packet `base + i` has been placed.
    placed: u64,
    /// The first packet that is not cleared.
    limit: u32,
    grant: u16,
    /// The RSM of the current grant has been reported.
    more_reported: bool,
    /// The current gap has been reported.
    gap_reported: bool,
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

    /// Forgets a message, if it is known.
    pub fn release(&mut self, handle: u32) {
        if self.find(handle).is_some() {
            self.messages[handle::slot(handle)] = None;
            self.count -= 1;
        }
    }

    /// Enters a message if it is new. None if its slot is another one's: the policy reuses a slot only after it has released it.
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

    /// Whether a data packet is one that was cleared and has not come before.
    fn check(&self, header: &Header, length: usize) -> Result<(), Drop> {
        if header.packet >= self.limit {
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
        let run = self.placed.trailing_ones();
        self.placed = self.placed.checked_shr(run).unwrap_or(0);
        self.base += run;
        if self.placed == 0 {
            self.gap_reported = false;
        }
        Ok(())
    }

    /// What the policy has to know after a data packet, whether it was placed or had come before.
    fn news(&mut self, header: &Header, placed: bool) -> Option<Event> {
        if self.base == self.packets {
            // Repeated for a packet that comes again: the sender has not heard that all is there.
            return placed.then_some(Event::Placed { handle: self.handle });
        }
        if header.flags.contains(PacketFlags::RSM) && header.grant == self.grant && !self.more_reported {
            self.more_reported = true;
            return Some(Event::More { handle: self.handle, placed: self.base });
        }
        if self.placed != 0 && !self.gap_reported {
            self.gap_reported = true;
            return Some(Event::Gap { handle: self.handle, placed: self.base });
        }
        None
    }
}

impl Data {
    /// Places a data packet. Its header names the message by handle, so there is nothing to search.
    pub(super) fn receive_data(
        &mut self,
        from: &Endpoint,
        header: &Header,
        data: &[u8],
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<(), Drop> {
        // What a packet makes known must reach the policy: without room for it the packet counts as lost.
        if self.events.len() + 1 >= self.config.events.into() {
            return Err(Drop::NoRoom);
        }
        let message = self.receiving.find(header.handle).ok_or(Drop::NoMessage)?;
        let peer = self.peers.get(usize::from(message.peer)).copied().flatten().ok_or(Drop::NoMessage)?;
        if !peer.sent(from, header) || header.message != message.number {
            return Err(Drop::Stranger);
        }
        let outcome = message.check(header, data.len()).and_then(|()| message.place(header.packet, data, memory));
        if matches!(outcome, Ok(()) | Err(Drop::Duplicate))
            && let Some(event) = message.news(header, outcome.is_ok())
        {
            self.report(event)?;
        }
        self.counters.placed += u64::from(outcome.is_ok());
        outcome
    }

    /// Clears packets of a message, and sends the CTS for those that have not been placed.
    pub(super) fn clear(&mut self, command: &Command) {
        let Command::Clear { handle, peer, message, sender, region, rest, fragment, packets, first, count, grant } = *command
        else {
            return;
        };
        let in_range = (1..=MAX_CLEARED).contains(&count) && first.checked_add(count.into()).is_some_and(|end| end <= packets);
        let Some(known) = self.peers.get(usize::from(peer)).copied().flatten().filter(|_| in_range && fragment > 0) else {
            return self.counters.drop(Drop::NoMessage);
        };
        let new = Message {
            handle,
            peer,
            number: message,
            region,
            rest,
            fragment,
            packets,
            base: first,
            placed: 0,
            limit: first,
            grant,
            more_reported: false,
            gap_reported: false,
        };
        let Some(entry) = self.receiving.enter(new) else { return self.counters.drop(Drop::NoMessage) };
        let end = first + u32::from(count);
        // A bit for each cleared packet, counted from the first that is missing.
        if end - end.min(entry.base) > u64::BITS {
            return self.counters.drop(Drop::ClearedTooMuch);
        }
        entry.grant = grant;
        entry.limit = entry.limit.max(end);
        entry.more_reported = false;
        if entry.base >= end {
            // All of it has come, and the policy did not know.
            let event = match entry.base == entry.packets {
                true => Event::Placed { handle },
                false => Event::More { handle, placed: entry.base },
            };
            entry.more_reported = true;
            self.events.push_back(event);
            return;
        }
        let first = first.max(entry.base);
        let mut header = Header::new(Kind::Cts, [self.config.endpoint, known.endpoint], [known.local, known.remote]);
        (header.message, header.grant, header.packet) = (message, grant, first);
        (header.count, header.handle) = ((end - first) as u16, sender);
        self.control.push_back((known.address, header, handle));
    }
}
