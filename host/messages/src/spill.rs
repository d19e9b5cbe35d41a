//! Unexpected messages that are taken out of the protocol's hands.
//!
//! A sender's numbers run at most [`baton_rmpp::WINDOW`] ahead of the oldest message that its receiver has not
//! acknowledged. If that one waits for a receive, the messages behind it, for which the program may be waiting, would
//! stop to come. So when half of a sender's window is used, the unexpected messages are received into memory of the
//! endpoint, and matched there: a receive looks first among them, since they are older than whatever the protocol has.

use crate::arena::{Arena, Buffer, Slot};
use crate::endpoint::{Completion, Endpoint, Kind, Purpose, Selector, Token};
use crate::opening::{INCOMING, RTS_BUFFERS};
use baton_matching::{Arrival, Criteria, Matching, Message};
use baton_rmpp::{Delivered, Error, Event, Memory, PeerId, Probed};

/// Messages of one sender behind the oldest that is not acknowledged, from which on unexpected ones are taken out.
const CROWD: u32 = baton_rmpp::WINDOW / 2;
/// Incoming messages of all senders from which on they are taken out: half of what the protocol keeps.
const BACKLOG: usize = INCOMING as usize / 2;
/// Messages that are kept.
const MESSAGES: usize = 32_768;
/// Bytes that they may have together.
const BYTES: u64 = 512 << 20;
/// Channels whose messages are taken out: those of the program.
const CHANNELS: [u32; 2] = [crate::endpoint::Channel::Tagged as u32, crate::endpoint::Channel::Plain as u32];

/// Who gets a message that was taken out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Taker {
    /// A receive, with its buffer's place in the arena.
    Receive { token: Token, slot: u32 },
    /// The buffer for several messages at this place.
    Part(u32),
    /// Nobody.
    Nobody,
}

/// A kept message, as a claim names it. Its number is used again once it is gone; its serial number is not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KeptId {
    handle: u32,
    serial: u64,
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    serial: u64,
    /// Its place in the matching.
    place: u32,
    /// Where it is kept.
    slot: u32,
    peer: PeerId,
    tag: u64,
    data: u64,
    length: u64,
    /// All of it has come.
    complete: bool,
    /// It has been matched before all of it has come.
    taker: Option<Taker>,
}

/// Unexpected messages of an endpoint.
pub(crate) struct Spill {
    matching: Matching,
    kept: Vec<Option<Kept>>,
    free: Vec<u32>,
    /// Number of messages kept so far.
    serials: u64,
    bytes: u64,
    /// Half of a sender's window is used.
    crowded: bool,
}

impl Spill {
    pub fn new(hash_key: [u64; 4]) -> Spill {
        let matching = Matching::new(1, MESSAGES, hash_key);
        Spill { matching, kept: Vec::new(), free: Vec::new(), serials: 0, bytes: 0, crowded: false }
    }

    /// Takes note of how far a sender is ahead, which every RTS says.
    pub fn observe(&mut self, event: &Event) {
        let ahead = match event {
            Event::Rts { header, .. } => header.message.wrapping_sub(header.packet),
            Event::Arrived(arrived) if arrived.receive.is_none() => arrived.message.wrapping_sub(arrived.floor),
            _ => return,
        };
        self.crowded |= ahead >= CROWD;
    }

    /// Messages that no receive has matched.
    pub fn unexpected(&self) -> usize {
        self.matching.unexpected()
    }

    /// The senders of the messages that are kept.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.kept.iter().flatten().map(|kept| kept.peer)
    }

    fn criteria(selector: &Selector) -> Criteria {
        let Selector { peer, channel, tag, ignore } = *selector;
        Criteria { source: peer.map(|peer| peer.0.into()), context: channel as u32, tag, ignore }
    }

    fn insert(&mut self, kept: Kept) -> u32 {
        self.serials += 1;
        let kept = Kept { serial: self.serials, ..kept };
        match self.free.pop() {
            Some(handle) => {
                self.kept[handle as usize] = Some(kept);
                handle
            }
            None => {
                self.kept.push(Some(kept));
                (self.kept.len() - 1) as u32
            }
        }
    }

    fn remove(&mut self, handle: u32) -> Option<Kept> {
        let kept = self.kept.get_mut(handle as usize)?.take()?;
        self.free.push(handle);
        self.bytes -= kept.length;
        Some(kept)
    }

    /// Finds the oldest message that a receive would get, and with `claim` takes it.
    pub fn find(&mut self, selector: &Selector, claim: bool) -> Option<(KeptId, Probed)> {
        let criteria = Self::criteria(selector);
        let handle = if claim { self.matching.claim(&criteria) } else { self.matching.peek(&criteria) }?;
        let Kept { serial, peer, tag, data, length, .. } = (*self.kept.get(handle as usize)?)?;
        Some((KeptId { handle, serial }, Probed { message: handle, peer, tag, data, length }))
    }
}

impl<B: Buffer> Endpoint<B> {
    /// Takes the unexpected messages out, if a sender or all of them together are far ahead. Returns whether there were
    /// any.
    pub(crate) fn spill(&mut self, now: u64) -> bool {
        let crowded = std::mem::take(&mut self.spill.crowded);
        if !crowded && self.policy.usage().1 < BACKLOG && !self.is_short_of_buffers() {
            return false;
        }
        let mut any = false;
        for context in CHANNELS {
            while self.has_room_for(1)
                && self.spill.unexpected() < MESSAGES
                && let Some(found) = self.policy.peek(None, context, 0, u64::MAX)
                && self.spill.bytes.saturating_add(found.length) <= BYTES
                && self.arena.has_place([found.length])
                && self.spill_oldest(context, now)
            {
                any = true;
                self.transmit(now);
            }
        }
        any
    }

    /// Whether unexpected messages hold so many buffers for RTS packets that one of two data halves might be left
    /// without.
    fn is_short_of_buffers(&self) -> bool {
        self.is_on_nic() && self.policy.buffers_held() > usize::from(RTS_BUFFERS) / 4
    }

    /// Takes the oldest unexpected message of a channel out. False if it cannot be.
    fn spill_oldest(&mut self, context: u32, now: u64) -> bool {
        let Some(found) = self.policy.claim(None, context, 0, u64::MAX) else { return false };
        let Probed { message, peer, tag, data, length } = found;
        // The peer's number stays its own as long as the message is kept.
        if let Some((address, endpoint)) = self.policy.peer_address(peer) {
            let _ = self.policy.open(address, endpoint);
        }
        let slot = self.arena.insert(Slot::Own(vec![0; length as usize]));
        let begun = self
            .place_for(slot, self.arena.whole(slot))
            .and_then(|region| self.policy.receive_claimed(message, region, slot.into(), now, &mut self.arena));
        if begun.is_err() {
            self.arena.remove(slot);
            return false;
        }
        let handle = self.spill.insert(Kept { serial: 0, place: 0, slot, peer, tag, data, length, complete: false, taker: None });
        self.spill.bytes += length;
        // There is room: that was asked before.
        let arrival = self.spill.matching.arrive(Message { source: peer.0.into(), context, tag }, handle);
        if let (Ok(Arrival::Unexpected(place)), Some(Some(kept))) = (arrival, self.spill.kept.get_mut(handle as usize)) {
            kept.place = place;
        }
        self.set_purpose(slot, Purpose::Spilled(handle));
        true
    }

    /// Gives the oldest kept message that `selector` accepts to `taker`. False if there is none.
    pub(crate) fn take_spilled(&mut self, selector: &Selector, taker: Taker) -> bool {
        if self.spill.unexpected() == 0 {
            return false;
        }
        let found = self.spill.find(selector, true);
        found.is_some_and(|(kept, _)| self.give_spilled(kept, taker))
    }

    /// Gives a kept message to `taker`, now or when all of it has come. False if there is no such message any more.
    pub(crate) fn give_spilled(&mut self, KeptId { handle, serial }: KeptId, taker: Taker) -> bool {
        let Some(Some(kept)) = self.spill.kept.get_mut(handle as usize) else { return false };
        if kept.serial != serial {
            return false;
        }
        kept.taker = Some(taker);
        if kept.complete {
            self.hand_over(handle, Ok(()));
        }
        true
    }

    /// All of a message has come, or its sender has ended before.
    pub(crate) fn finish_spilled(&mut self, handle: u32, result: Result<Delivered, Error>) {
        let Some(Some(kept)) = self.spill.kept.get_mut(handle as usize) else { return };
        match (result, kept.taker) {
            (Ok(_), None) => kept.complete = true,
            (Ok(_), Some(_)) => self.hand_over(handle, Ok(())),
            (Err(error), Some(_)) => self.hand_over(handle, Err(error)),
            (Err(_), None) => {
                // As if it had never been announced.
                let place = kept.place;
                self.spill.matching.discard(place, handle);
                if let Some(kept) = self.spill.remove(handle) {
                    self.arena.remove(kept.slot);
                }
            }
        }
    }

    /// Copies a message to whoever gets it, and forgets it.
    fn hand_over(&mut self, handle: u32, outcome: Result<(), Error>) {
        let Some(Kept { slot, peer, tag, data, length, taker: Some(taker), .. }) = self.spill.remove(handle) else { return };
        let region = match taker {
            Taker::Receive { slot, .. } => self.arena.whole(slot),
            Taker::Part(slot) => self.rest_of_multiple(slot),
            Taker::Nobody => Arena::<B>::region(slot, 0, 0),
        };
        let placed = length.min(region.length);
        if outcome.is_ok() && placed > 0 {
            self.arena.copy(Arena::<B>::region(slot, 0, placed).offset, region.offset, placed);
        }
        self.arena.remove(slot);
        let result = outcome.map(|()| Delivered { peer, tag, data, length, placed });
        match taker {
            Taker::Receive { token, slot } => {
                self.arena.remove(slot);
                self.completions.push_back(Completion { token, kind: Kind::Receive, result });
            }
            Taker::Part(slot) => self.finish_part(slot, result),
            Taker::Nobody => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::endpoint::{Channel, Outgoing, Payload};
    use crate::testing::{endpoint, with};
    use baton_linux::events::monotonic_micros;
    use baton_rmpp::Limit;
    use std::net::SocketAddr;

    const SELECTOR: Selector = Selector { peer: None, channel: Channel::Tagged, tag: 0, ignore: u64::MAX };

    /// Keeps a message of which not all has come.
    fn keep(end: &mut Endpoint<Vec<u8>>, tag: u64) -> u32 {
        let slot = end.arena.insert(Slot::Own(vec![tag as u8; 8]));
        let kept = Kept { serial: 0, place: 0, slot, peer: PeerId(0), tag, data: 0, length: 8, complete: false, taker: None };
        let handle = end.spill.insert(kept);
        end.spill.bytes += kept.length;
        let message = Message { source: 0, context: Channel::Tagged as u32, tag };
        let Ok(Arrival::Unexpected(place)) = end.spill.matching.arrive(message, handle) else { panic!("nothing is posted") };
        if let Some(Some(kept)) = end.spill.kept.get_mut(handle as usize) {
            kept.place = place;
        }
        handle
    }

    /// A claimed message whose sender has ended is gone; another one that is kept in its place is not given for it.
    #[test]
    fn a_claim_is_of_one_message_only() {
        let mut end = endpoint(100);
        let first = keep(&mut end, 1);
        let claim = end.probe(&SELECTOR, true, 0).expect("there is room").expect("a message").claim;
        end.finish_spilled(first, Err(Error::PeerDead));
        let second = keep(&mut end, 2);
        assert_eq!(first, second, "its number is used again");
        end.finish_spilled(second, Ok(Delivered { peer: PeerId(0), tag: 2, data: 0, length: 8, placed: 8 }));
        assert_eq!(end.receive_claimed(claim, Some(vec![0; 8]), Some(5), 0), Err(Limit::NoMessage));
        assert_eq!(end.receive_claimed(claim, None, None, 0), Err(Limit::NoMessage));
        let found = end.probe(&SELECTOR, true, 0).expect("there is room").expect("the other one is still there");
        assert_eq!((found.tag, end.receive_claimed(found.claim, Some(vec![0; 8]), Some(6), 0)), (2, Ok(())));
        let completion = end.poll_completion().expect("it has come");
        assert_eq!((completion.token, completion.result.expect("all of it").tag), (6, 2));
    }

    /// Peers that come and go do not fill the table for ever; one of which a message is kept goes by its number on.
    #[test]
    fn a_peer_that_is_needed_no_more_leaves_its_place() {
        let mut end = with(&Settings { peers: 2, stream: false, ..Settings::default() });
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let peers = [1, 2].map(|port| end.peer(address(port), |_| true).expect("there is room"));
        keep(&mut end, 1);
        assert_eq!((peers[0], end.peer(address(3), |_| true)), (PeerId(0), Err(Limit::Peers)));
        assert_eq!(end.peer(address(3), |_| false), Ok(peers[1]));
        assert_eq!(end.peer_address(peers[0]), Some(address(1)));
    }

    /// Sends a message to an address.
    fn send(end: &mut Endpoint<Vec<u8>>, to: SocketAddr, tag: u64) -> Result<(), Limit> {
        let peer = end.peer(to, |_| true)?;
        let payload = Payload::Copied(vec![1; 8]);
        end.send(Outgoing { peer, channel: Channel::Tagged, tag, data: 0, payload, token: None }, monotonic_micros())
    }

    /// No message is claimed while it could be neither received nor discarded: it would be lost.
    #[test]
    fn nothing_is_claimed_while_the_data_half_takes_nothing() {
        let mut ends = [endpoint(100), endpoint(100)];
        let (to, now) = (ends[1].address(), monotonic_micros());
        send(&mut ends[0], to, 3).expect("there is room");
        while ends[1].probe(&SELECTOR, false, now) == Ok(None) {
            assert!(monotonic_micros() < now + 20_000_000, "it does not come");
            for end in &mut ends {
                end.progress(monotonic_micros());
            }
        }
        let end = &mut ends[1];
        end.stop_data_half();
        let refused = (1..1000).find_map(|port| send(end, SocketAddr::from(([127, 0, 0, 1], port)), 0).err());
        assert_eq!((refused, end.probe(&SELECTOR, true, now)), (Some(Limit::Commands), Err(Limit::Commands)));
        assert_eq!(end.probe(&SELECTOR, false, now).map(|found| found.map(|found| found.tag)), Ok(Some(3)));
    }
}
