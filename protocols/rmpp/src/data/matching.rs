//! Matching in the data half, which the paper's section 7 leaves as future work: the data half answers an RTS that
//! matches a posted receive with a CTS, and reports that to the policy afterwards.
//!
//! The policy handles the same posts and, by [`Event::Arrived`], the same arrivals, each in the same order. Only the
//! interleaving differs: for the policy posts come earlier and arrivals later. The resulting pairs are the same: if a
//! post and an arrival that are neighbours change places, either each still gets the partner that it got before, or
//! they are each other's only possible partner, which they are after the change, too. So both sides agree without
//! asking each other. A cancellation must not change places with an arrival; so it counts only when the data half has
//! answered it.

use super::{Data, Receiving};
use crate::counters::Drop;
use crate::interface::{Arrived, Command, Event, Matcher};
use crate::memory::{Memory, Region};
use crate::{WINDOW, before, handle};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_matching::{Arrival, Criteria, Matching, Message, Post, PostedId};
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, Rts};

/// Most packets that one CTS clears here, and that may be lent in all.
const GRANT: u32 = 16;
const MAX_CREDIT: u32 = 1 << 16;

/// Sizes of a matching data half's tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatchConfig {
    /// Receives that may be posted at the same time.
    pub posted: u16,
    /// Unexpected messages.
    pub unexpected: u16,
    /// Slots that handles of receives name.
    pub receives: u32,
    /// Key of the hash. It must be random: peers choose their messages' tags.
    pub hash_key: [u64; 4],
}

/// A receive that is posted.
#[derive(Clone, Copy, Debug)]
struct Posted {
    receive: u32,
    id: PostedId,
    region: Region,
}

/// Posted receives and unexpected messages.
pub(super) struct DataMatching {
    matcher: Matcher,
    matching: Matching,
    /// By slot of the receive's handle.
    posted: Box<[Option<Posted>]>,
    /// Handle and place of each unexpected message, by slot of the handle.
    unexpected: Box<[Option<(u32, u32)>]>,
    /// Peers by address and endpoint.
    peers: BTreeMap<(Endpoint, u16), u16>,
    /// Handles that are lent.
    places: Vec<u32>,
    /// Packets that may be cleared without asking.
    credit: u32,
}

impl DataMatching {
    pub fn new(config: &MatchConfig, incoming: usize) -> DataMatching {
        DataMatching {
            // A data half that replaces a dead one knows no receives and messages yet.
            matcher: Matcher::Nobody,
            matching: Matching::new(config.posted.into(), config.unexpected.into(), config.hash_key),
            posted: alloc::vec![None; config.receives as usize].into(),
            unexpected: alloc::vec![None; incoming].into(),
            peers: BTreeMap::new(),
            places: Vec::with_capacity(incoming),
            credit: 0,
        }
    }

    pub fn is_matching(&self) -> bool {
        self.matcher == Matcher::Data
    }

    /// A peer has got a number, or has lost it.
    pub fn set_peer(&mut self, peer: u16, before: Option<(Endpoint, u16)>, now: Option<(Endpoint, u16)>) {
        if let Some(before) = before.filter(|before| self.peers.get(before) == Some(&peer)) {
            self.peers.remove(&before);
        }
        if let Some(now) = now {
            self.peers.insert(now, peer);
        }
    }

    fn set(&mut self, matcher: Matcher) {
        self.matcher = matcher;
        if matcher != Matcher::Data {
            self.clear();
        }
        if matcher == Matcher::Policy {
            self.places.clear();
            self.credit = 0;
        }
    }

    fn clear(&mut self) {
        if self.matching.posted() > 0 {
            for posted in self.posted.iter_mut().filter_map(Option::take) {
                self.matching.cancel(posted.id);
            }
        }
        if self.matching.unexpected() > 0 {
            for (handle, place) in self.unexpected.iter_mut().filter_map(Option::take) {
                self.matching.discard(place, handle);
            }
        }
    }

    /// Posts a receive. Refuses posts that the policy must not ask for: beyond the room, in a slot that is taken, or
    /// with more kinds of wildcards than are hashed, since such receives would have to be searched.
    fn post(&mut self, receive: u32, criteria: Criteria, region: Region) -> Result<(), Drop> {
        let slot = handle::slot(receive);
        let free = self.posted.get(slot).is_some_and(Option::is_none);
        if !free || !self.matching.hashes(&criteria) {
            return Err(Drop::NoRoom);
        }
        match self.matching.post(criteria, slot as u32) {
            Ok(Post::Posted(id)) => self.posted[slot] = Some(Posted { receive, id, region }),
            Ok(Post::Matched(handle)) => self.unexpected[handle::slot(handle)] = None,
            Err(_) => return Err(Drop::NoRoom),
        }
        Ok(())
    }

    fn cancel(&mut self, receive: u32) {
        let place = self.posted.get_mut(handle::slot(receive));
        if let Some(place) = place
            && let Some(posted) = place.take_if(|posted| posted.receive == receive)
        {
            self.matching.cancel(posted.id);
        }
    }

    /// Enters an unexpected message, whose place the policy keeps.
    fn enter(&mut self, handle: u32, message: Message) -> Result<(), Drop> {
        let free = self.unexpected.get(handle::slot(handle)).is_some_and(Option::is_none);
        if !free {
            return Err(Drop::NoMessage);
        }
        match self.matching.arrive(message, handle) {
            Ok(Arrival::Unexpected(place)) => self.unexpected[handle::slot(handle)] = Some((handle, place)),
            Ok(Arrival::Matched(slot)) => self.posted[slot as usize] = None,
            Err(_) => return Err(Drop::Messages),
        }
        Ok(())
    }

    fn discard(&mut self, handle: u32) {
        let place = self.unexpected.get_mut(handle::slot(handle));
        if let Some(place) = place
            && let Some((handle, place)) = place.take_if(|(of, _)| *of == handle)
        {
            self.matching.discard(place, handle);
        }
    }

    fn lend(&mut self, handle: u32) -> Result<(), Drop> {
        if self.places.len() == self.unexpected.len() || handle::slot(handle) >= self.unexpected.len() {
            return Err(Drop::NoRoom);
        }
        self.places.push(handle);
        Ok(())
    }

    /// The handle that the next message takes, if its slot is free.
    fn next_place(&self, receiving: &Receiving) -> Result<u32, Drop> {
        let place = *self.places.last().ok_or(Drop::Messages)?;
        let slot = handle::slot(place);
        (receiving.is_free(slot) && self.unexpected[slot].is_none()).then_some(place).ok_or(Drop::Messages)
    }
}

impl Data {
    /// Carries out a command that concerns matching.
    pub(super) fn handle_match_command(&mut self, command: &Command) {
        let Some(matching) = &mut self.matching else { return self.counters.drop(Drop::NoRoom) };
        let done = match *command {
            Command::SetMatcher { matcher } => {
                matching.set(matcher);
                if matcher != Matcher::Data {
                    self.events.push_back(Event::Matcher(matcher));
                }
                Ok(())
            }
            Command::Post { receive, source, context, tag, ignore, region } => {
                let criteria = Criteria { source: source.map(u32::from), context, tag, ignore };
                matching.post(receive, criteria, region)
            }
            Command::Cancel { receive } => {
                matching.cancel(receive);
                self.events.push_back(Event::Cancelled { receive });
                Ok(())
            }
            Command::Unexpected { handle, peer, context, tag } => {
                matching.enter(handle, Message { source: peer.into(), context, tag })
            }
            Command::Discard { handle } => {
                matching.discard(handle);
                Ok(())
            }
            Command::Place { handle } => matching.lend(handle),
            Command::Credit { packets } => {
                matching.credit = matching.credit.saturating_add(packets).min(MAX_CREDIT);
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(reason) = done {
            self.counters.drop(reason);
        }
    }

    /// Matches an RTS, if the data half matches now and the RTS is its peer's next one. Returns false if the RTS goes
    /// to the policy.
    ///
    /// # Errors
    /// The reason why the RTS is dropped. Its sender sends it again.
    pub(super) fn match_rts(
        &mut self,
        from: &Endpoint,
        header: &Header,
        rts: Rts,
        first: &[u8],
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<bool, Drop> {
        let Some(matching) = &mut self.matching else { return Ok(false) };
        match matching.matcher {
            Matcher::Policy => return Ok(false),
            Matcher::Nobody => return Err(Drop::NoRoom),
            Matcher::Data => {}
        }
        let Some(at) = matching.peers.get(&(*from, header.source)).copied() else { return Ok(false) };
        let Some(peer) = self.peers.get_mut(usize::from(at)).and_then(Option::as_mut) else { return Ok(false) };
        if !peer.sent(from, header) || header.message != peer.next {
            return Ok(false);
        }
        let floor = if before(peer.floor, header.packet) { header.packet } else { peer.floor };
        // This is the window that the policy allows, too: it bounds how much one peer can fill.
        if floor.wrapping_sub(peer.floor) > WINDOW || before(peer.next, floor) || peer.next.wrapping_sub(floor) >= WINDOW {
            return Ok(false);
        }
        let most = usize::from(self.config.events);
        if self.events.len() + 1 >= most || self.control.len() >= most {
            return Err(Drop::NoRoom);
        }
        let place = matching.next_place(&self.receiving)?;
        let mut arrived = Arrived {
            peer: at,
            incarnations: [peer.local, peer.remote],
            message: header.message,
            floor,
            handle: place,
            receive: None,
            rts,
            first: first.len() as u16,
            buffer: 0,
            count: 0,
        };
        match matching.matching.arrive(Message { source: at.into(), context: rts.context, tag: rts.tag }, place) {
            Err(_) => return Err(Drop::Messages),
            Ok(Arrival::Unexpected(entry)) => {
                let kept = self.buffers.last().copied().ok_or(Drop::NoBuffer);
                let kept = kept.and_then(|buffer| self.config.keep(buffer, first, memory).map(|()| buffer));
                arrived.buffer = match kept {
                    Ok(buffer) => buffer,
                    Err(reason) => {
                        matching.matching.discard(entry, place);
                        return Err(reason);
                    }
                };
                self.buffers.pop();
                matching.unexpected[handle::slot(place)] = Some((place, entry));
            }
            Ok(Arrival::Matched(slot)) => {
                let posted = matching.posted[slot as usize].take().ok_or(Drop::NoMessage)?;
                arrived.receive = Some(posted.receive);
                arrived.count = self.answer(&arrived, &posted.region, first, memory)?;
            }
        }
        self.take_up(arrived, floor);
        Ok(true)
    }

    /// Notes that a message has been taken up, and reports that to the policy.
    fn take_up(&mut self, arrived: Arrived, floor: u32) {
        if let Some(matching) = &mut self.matching {
            matching.places.pop();
            matching.credit -= u32::from(arrived.count);
        }
        if let Some(Some(peer)) = self.peers.get_mut(usize::from(arrived.peer)) {
            (peer.next, peer.floor) = (peer.next.wrapping_add(1), floor);
        }
        self.events.push_back(Event::Arrived(arrived));
    }

    /// Places the first bytes of a message that has matched, and sends its CTS if more bytes are wanted. Returns how
    /// many packets were cleared. Only the policy sends the ACK: a message that the policy does not know of yet would
    /// be lost if the data half died, so its sender must still be ready to send it again.
    fn answer(
        &mut self,
        arrived: &Arrived,
        region: &Region,
        first: &[u8],
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<u16, Drop> {
        let Arrived { peer, message, handle, rts, .. } = *arrived;
        let length = (first.len() as u64).min(region.length) as usize;
        // The program has given a region that it does not have.
        let offset = region.offset.checked_add(length as u64).ok_or(Drop::Memory)?;
        if !memory.write(region.offset, &first[..length]) {
            return Err(Drop::Memory);
        }
        let behind = Region { offset, length: region.length - length as u64 };
        let rest = rts.length - first.len() as u64;
        let packets = rest.min(behind.length).div_ceil(u64::from(rts.fragment)) as u32;
        // The loan counts packets of this side's length; longer packets only the policy can clear.
        let usual = rts.fragment <= super::fragment(self.config.packet);
        let credit = self.matching.as_ref().filter(|_| usual).map_or(0, |matching| matching.credit);
        let count = GRANT.min(packets).min(credit) as u16;
        if count > 0 {
            self.clear(&Command::Clear {
                handle,
                peer,
                message,
                sender: rts.handle,
                region: behind,
                rest,
                fragment: rts.fragment,
                packets,
                first: 0,
                count,
                ahead: 0,
                grant: 1,
            });
        }
        Ok(count)
    }
}
