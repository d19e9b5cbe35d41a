//! The receiving half: data packets are placed in the receiver's memory as they come (section 4.2).

use super::{Data, Peer};
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
    /// The first packet that is not cleared.
    limit: u32,
    /// The first packet that may not be cleared without the policy.
    until: u32,
    /// Most packets that a further CTS clears.
    step: u16,
    /// This side clears packets by itself, so it is ahead of what the policy knows.
    alone: bool,
    grant: u16,
    /// Nothing more is cleared before the policy says so: the RSM of the current grant has been reported.
    more_reported: bool,
    /// The policy knows that all packets before this one have been placed.
    reported: u32,
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

    /// The header of the CTS that clears `count` packets from `first` on.
    fn cts(&self, peer: &Peer, endpoint: u16, first: u32, count: u32) -> Header {
        let mut header = Header::new(Kind::Cts, [endpoint, peer.endpoint], [peer.local, peer.remote]);
        (header.message, header.grant, header.packet) = (self.number, self.grant, first);
        (header.count, header.handle) = (count as u16, self.sender);
        header
    }

    /// Packets that may be cleared behind those that are.
    fn further(&self) -> u32 {
        let window = u128::BITS.saturating_sub(self.limit - self.base);
        u32::from(self.step).min(self.until - self.limit).min(window)
    }

    /// What the policy has to know after a data packet, whether it was placed or had come before.
    fn news(&mut self, asked: Asked, placed: bool) -> Option<Event> {
        if self.base == self.packets {
            // Repeated for a packet that comes again: the sender does not know yet that all is there.
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

/// Whether a packet asks for more, and who answers that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Nothing,
    /// This side has.
    Answered,
    Policy,
}

/// Packets after which the policy learns how far a message is that this side clears by itself: its time-outs depend on it.
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
        // What a packet makes known must reach the policy: without room for it the packet counts as lost.
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
            let asked = match (asks, message.further()) {
                (false, _) => Asked::Nothing,
                (true, 0) if message.limit == message.until => Asked::Policy,
                // A packet is missing, which will be cleared again, with an RSM of its own.
                (true, 0) => Asked::Nothing,
                (true, count) => {
                    message.grant = handle::next_generation(message.grant);
                    let (first, message) = (message.limit, &mut *message);
                    message.limit += count;
                    let header = message.cts(&peer, self.config.endpoint, first, count);
                    self.control.push_back((peer.address, header, message.handle));
                    Asked::Answered
                }
            };
            if let Some(event) = message.news(asked, outcome.is_ok()) {
                self.report(event)?;
            }
        }
        self.counters.placed += u64::from(outcome.is_ok());
        outcome
    }

    /// Clears packets of a message, and sends the CTS for those that have not been placed. What lies behind the packets that this
    /// side has cleared only moves its limit, unless the RSM has come.
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
        };
        let Some(entry) = self.receiving.enter(new) else { return self.counters.drop(Drop::NoMessage) };
        entry.alone |= ahead > 0;
        (entry.until, entry.step) = (entry.until.max(until), entry.step.max(count));
        // An RSM on its way will go on. Where everything has been placed that was cleared, it may have been lost.
        if first > entry.limit || first == entry.limit && !entry.more_reported && entry.further() == 0 {
            return;
        }
        let from = first.max(entry.base);
        // A bit for each cleared packet, counted from the first that is missing.
        let end = (from + u32::from(count)).min(entry.until).min(entry.base + u128::BITS);
        if from >= end || entry.alone && first < entry.base {
            // More has come than the policy knows, perhaps all of it.
            let event = match entry.base == entry.packets {
                true => Event::Placed { handle },
                false => Event::More { handle, placed: entry.base },
            };
            entry.reported = entry.base;
            entry.more_reported |= from >= end;
            self.events.push_back(event);
            return;
        }
        (entry.grant, entry.more_reported) = (grant, false);
        entry.limit = entry.limit.max(end);
        let header = entry.cts(&known, self.config.endpoint, from, end - from);
        self.control.push_back((known.address, header, handle));
    }
}
