//! Matching by the data half, as the policy sees it: it keeps all receives and unexpected messages itself, too, passes
//! changes on to the data half, and takes note of the matches that the data half reports. See `data/matching.rs` for
//! why both sides agree.
//!
//! | stage | who matches | begins with | ends with |
//! |---|---|---|---|
//! | Policy | the policy | the data half has confirmed it | the data half has room, and is asked to drop each RTS |
//! | Asked | the policy, what was reported before the data half confirms | that | the confirmation |
//! | Ready | nobody | the confirmation | all commands given so far are taken |
//! | Informing | nobody | the list of what the data half must know is made | it is taken |
//! | Data | the data half | that | the data half has no room, or the sides differ |
//! | Leaving | the data half, what it matched before it confirms | the policy is to match | the confirmation |
//!
//! The confirmation that ends `Leaving` also says that the data half places no more data of messages that were refused.

use super::messages::{Incoming, ReceiveState};
use super::{Error, Policy, Receive};
use crate::WINDOW;
use crate::before;
use crate::counters::Drop;
use crate::data::fragment;
use crate::interface::{Arrived, Command, Half, Matcher};
use crate::memory::Memory;
use alloc::collections::VecDeque;
use baton_matching::{Arrival, Criteria, Message};
use baton_wire::rmpp::{Header, HoldReason, Rts};

/// Most handles that are lent for messages that the data half takes up.
const PLACES: usize = 32;

/// Microseconds for which the policy matches at least, once the data half had no room.
const REST: u64 = 100_000;

/// Which half matches: see the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Policy,
    Asked,
    Ready,
    Informing,
    Data,
    Leaving,
}

/// The policy's view of a data half that can match.
pub(super) struct Offloaded {
    stage: Stage,
    /// While leaving: the data half has confirmed it.
    confirmed: bool,
    /// The commands that a new data half must get before it matches.
    to_inform: VecDeque<Command>,
    /// Lent handles, and packets that it may clear by itself.
    places: usize,
    credit: u32,
    /// Until then the policy matches, microseconds. None: it has just begun to.
    rests_until: Option<u64>,
    /// Whether it may match at all: see [`Policy::let_data_match`].
    permitted: bool,
}

impl Offloaded {
    /// The initial state: there are no receives or messages, so the data half needs to know none.
    pub fn new() -> Offloaded {
        Offloaded {
            stage: Stage::Informing,
            confirmed: false,
            to_inform: VecDeque::new(),
            places: 0,
            credit: 0,
            rests_until: Some(0),
            permitted: true,
        }
    }

    /// Whether the data half may have matched, or refused, the RTS that it reports.
    fn data_matches(&self) -> bool {
        matches!(self.stage, Stage::Data | Stage::Leaving)
    }
}

impl Policy {
    /// Whether the data half matches, at this moment.
    pub fn matches_in_data(&self) -> bool {
        self.offloaded.as_ref().is_some_and(|offloaded| offloaded.stage == Stage::Data)
    }

    /// Sets whether the data half may match. It must not while packets of some peers come by another data half, which
    /// does not know which messages this one has matched.
    pub fn let_data_match(&mut self, permitted: bool) {
        let Some(offloaded) = &mut self.offloaded else { return };
        offloaded.permitted = permitted;
        if !permitted && matches!(offloaded.stage, Stage::Informing | Stage::Data) {
            self.leave();
        }
    }

    /// Handles and packets that the data half was lent.
    pub(super) fn lent(&self) -> (usize, u32) {
        self.offloaded.as_ref().map_or((0, 0), |offloaded| (offloaded.places, offloaded.credit))
    }

    /// Passes a command on to a data half that matches, or will.
    fn pass_on(&mut self, command: Command) {
        match self.offloaded.as_mut() {
            Some(offloaded) if offloaded.stage == Stage::Informing => offloaded.to_inform.push_back(command),
            Some(offloaded) if offloaded.stage == Stage::Data => self.commands.push(command),
            _ => {}
        }
    }

    /// A receive was posted here, and waits.
    pub(super) fn note_post(&mut self, receive: u32, criteria: Criteria) {
        let is_informed =
            self.offloaded.as_ref().is_some_and(|offloaded| matches!(offloaded.stage, Stage::Informing | Stage::Data));
        if is_informed && !self.fits_data() {
            self.leave();
        }
        let Some(Receive { region, .. }) = self.receives.get(receive).copied() else { return };
        let command = Self::post_command(receive, &criteria, region);
        self.pass_on(command);
    }

    fn post_command(receive: u32, criteria: &Criteria, region: crate::memory::Region) -> Command {
        let Criteria { source, context, tag, ignore } = *criteria;
        Command::Post { receive, source: source.map(|source| source as u16), context, tag, ignore, region }
    }

    /// Informs the data half that an unexpected message has got a receive, was claimed, or has been given up.
    pub(super) fn note_discard(&mut self, handle: u32) {
        self.pass_on(Command::Discard { handle });
    }

    /// Asks the data half to take a posted receive back, which then ends with `error`. Returns false if the policy
    /// decides alone.
    pub(super) fn cancel_in_data(&mut self, receive: u32, error: Error) -> bool {
        let Some(offloaded) = &self.offloaded else { return false };
        if matches!(offloaded.stage, Stage::Policy | Stage::Asked | Stage::Ready) {
            return false;
        }
        let Some(entry) = self.receives.get_mut(receive) else { return false };
        if entry.cancelling.replace(error).is_none() {
            self.pass_on(Command::Cancel { receive });
        }
        true
    }

    /// The data half has taken a receive back, if no message that it reported before has got it. While the policy is
    /// about to match, the receive ends with the confirmation: a message that was refused may still be placed until
    /// then.
    pub(super) fn on_cancelled(&mut self, receive: u32) {
        if self.offloaded.as_ref().is_some_and(|offloaded| offloaded.stage != Stage::Leaving) {
            self.end_cancelled(receive);
        }
    }

    fn end_cancelled(&mut self, receive: u32) {
        let ending = self.receives.get(receive).and_then(|entry| entry.posted.zip(entry.cancelling));
        if let Some((posted, error)) = ending {
            self.matching.cancel(posted);
            self.end_posted(receive, error);
        }
    }

    /// Completes the cancellations that the data half will not answer any more.
    fn finish_cancelling(&mut self) {
        let posted = self.matching.posted_in_order();
        posted.into_iter().for_each(|(_, receive)| self.end_cancelled(receive));
    }

    /// Whether a data half has room for all posted receives and unexpected messages, and finds them without a search.
    fn fits_data(&self) -> bool {
        self.matching.posted() <= self.config.data_posted.into()
            && self.matching.unexpected() <= self.config.data_unexpected.into()
            && self.matching.unhashed() == 0
    }

    /// Whether a data half may match, and has room for all that there is.
    fn may_inform_data(&self) -> bool {
        self.fits_data() && self.offloaded.as_ref().is_some_and(|offloaded| offloaded.permitted)
    }

    /// Lets the policy match from now on.
    fn leave(&mut self) {
        let Some(offloaded) = &mut self.offloaded else { return };
        (offloaded.stage, offloaded.confirmed, offloaded.rests_until) = (Stage::Leaving, false, None);
        offloaded.to_inform.clear();
        self.commands.push(Command::SetMatcher { matcher: Matcher::Policy });
    }

    /// Lets the data half match again if it has room for twice as many receives and messages as there are.
    pub(super) fn consider_data(&mut self, now: u64) {
        let Some(offloaded) = &mut self.offloaded else { return };
        let until = *offloaded.rests_until.get_or_insert(now + REST);
        if offloaded.stage != Stage::Policy || !offloaded.permitted || now < until {
            return;
        }
        let room = 2 * self.matching.posted() <= self.config.data_posted.into()
            && 2 * self.matching.unexpected() <= self.config.data_unexpected.into();
        if room && self.matching.unhashed() == 0 {
            self.commands.push(Command::SetMatcher { matcher: Matcher::Nobody });
            self.set_stage(Stage::Asked);
        }
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(offloaded) = &mut self.offloaded {
            offloaded.stage = stage;
        }
    }

    /// Handles the data half's confirmation of which half matches.
    pub(super) fn on_matcher(&mut self, matcher: Matcher) {
        let Some(offloaded) = &mut self.offloaded else { return };
        match (offloaded.stage, matcher) {
            (Stage::Asked, Matcher::Nobody) => self.set_stage(Stage::Ready),
            (Stage::Leaving, Matcher::Policy) => {
                offloaded.confirmed = true;
                self.finish_leaving();
            }
            _ => {}
        }
    }

    /// Lets the policy match once the data half has confirmed that it does not match any more and places no more data
    /// of refused messages: the policy has those messages' receives, and would give them to other messages or end them.
    pub(super) fn finish_leaving(&mut self) {
        let left = self.offloaded.as_ref().is_some_and(|offloaded| offloaded.stage == Stage::Leaving && offloaded.confirmed);
        let returning = |handle| self.incoming.get(handle).is_some_and(|message| message.state == ReceiveState::Returning);
        if !left || (0..self.incoming.slots()).filter_map(|slot| self.incoming.at(slot)).any(returning) {
            return;
        }
        self.finish_cancelling();
        self.take_back();
        self.set_stage(Stage::Policy);
    }

    /// Takes back the loan of a data half that is dead, or does not match any more.
    fn take_back(&mut self) {
        for slot in 0..self.incoming.slots() {
            if let Some(handle) = self.incoming.at(slot)
                && let Some(message) = self.incoming.get(handle)
                && message.state == ReceiveState::Lent
            {
                self.incoming.remove(handle);
            }
        }
        if let Some(offloaded) = &mut self.offloaded {
            (offloaded.places, offloaded.credit) = (0, 0);
        }
    }

    /// A new data half has taken the place of a dead one: it gets the receives and unexpected messages again.
    pub(super) fn restart_matching(&mut self) {
        if self.offloaded.is_none() {
            return;
        }
        self.finish_cancelling();
        self.take_back();
        if self.may_inform_data() {
            self.begin_informing();
        } else {
            self.commands.push(Command::SetMatcher { matcher: Matcher::Policy });
            self.set_stage(Stage::Policy);
        }
    }

    /// Makes the list of commands with what the data half must know. The commands given so far have been taken,
    /// or do not concern it.
    fn begin_informing(&mut self) {
        let mut to_inform = VecDeque::with_capacity(self.matching.unexpected() + self.matching.posted());
        for (Message { source, context, tag }, handle) in self.matching.unexpected_in_order() {
            to_inform.push_back(Command::Unexpected { handle, peer: source as u16, context, tag });
        }
        for (criteria, receive) in self.matching.posted_in_order() {
            let region = self.receives.get(receive).map_or_else(Default::default, |entry| entry.region);
            to_inform.push_back(Self::post_command(receive, &criteria, region));
        }
        self.defer_held();
        self.replay.peers = Some(0);
        if let Some(offloaded) = &mut self.offloaded {
            (offloaded.stage, offloaded.to_inform) = (Stage::Informing, to_inform);
        }
    }

    /// Forgets the messages that wait for one with a lower number: the data half takes none out of order, so they are
    /// asked for again behind that one.
    fn defer_held(&mut self) {
        for slot in 0..self.incoming.slots() {
            let Some(handle) = self.incoming.at(slot) else { continue };
            let Some(message) = self.incoming.get(handle).filter(|message| message.state == ReceiveState::Held).copied() else {
                continue;
            };
            self.free_buffer(handle);
            self.incoming.remove(handle);
            self.held -= 1;
            let (peer, at) = (&mut self.peers[usize::from(message.peer)], (message.number % WINDOW) as usize);
            peer.incoming -= 1;
            (peer.received[at], peer.early[at]) = (0, message.rts.handle);
        }
    }

    /// The next command that a data half needs before it matches.
    pub(super) fn poll_informing(&mut self) -> Option<Command> {
        if self.offloaded.as_ref()?.stage == Stage::Ready && self.commands.is_empty() {
            if !self.may_inform_data() {
                self.leave();
                return None;
            }
            self.begin_informing();
            return self.poll_replay().or_else(|| self.poll_informing());
        }
        let offloaded = self.offloaded.as_mut().filter(|offloaded| offloaded.stage == Stage::Informing)?;
        Some(offloaded.to_inform.pop_front().unwrap_or_else(|| {
            offloaded.stage = Stage::Data;
            Command::SetMatcher { matcher: Matcher::Data }
        }))
    }

    /// Bytes of message that the packets which the data half was lent may hold.
    pub(super) fn lent_bytes(&self) -> u64 {
        u64::from(self.lent().1) * u64::from(fragment(self.config.packet))
    }

    /// The most bytes that may be lent: whole packets in half of the memory that may be pinned, so that the policy can
    /// always clear a packet itself.
    pub(super) fn most_lent(&self) -> u64 {
        let fragment = u64::from(fragment(self.config.packet));
        if self.offloaded.is_some() { self.config.pinned / 2 / fragment * fragment } else { 0 }
    }

    /// Lends the data half what it needs to take up messages by itself: handles, and packets that it may clear, up to
    /// half of the NIC's buffers and half of the memory that may be pinned.
    pub(super) fn poll_loan(&mut self) -> Option<Command> {
        let pinned = self.most_lent().min(self.config.pinned.saturating_sub(self.cleared_bytes));
        let pinned = u32::try_from(pinned / u64::from(fragment(self.config.packet))).unwrap_or(u32::MAX);
        let room = self.config.nic_buffers.saturating_sub(self.cleared_packets).min(pinned);
        let offloaded = self.offloaded.as_mut().filter(|offloaded| offloaded.stage == Stage::Data)?;
        let wanted = (self.config.nic_buffers / 2).min(room).saturating_sub(offloaded.credit);
        if wanted >= self.config.grant.into() || wanted > 0 && offloaded.credit == 0 {
            offloaded.credit += wanted;
            return Some(Command::Credit { packets: wanted });
        }
        // All messages that it takes up may be unexpected.
        let places = PLACES.min(self.incoming.slots() / 4).max(1);
        let unexpected = usize::from(self.config.data_unexpected).saturating_sub(self.matching.unexpected());
        if unexpected == 0 {
            self.leave();
            return self.commands.pop();
        }
        if offloaded.places >= places.min(unexpected) {
            return None;
        }
        let handle = self.incoming.insert(Incoming::lent())?;
        offloaded.places += 1;
        Some(Command::Place { handle })
    }

    /// Whether an arrival is of the association as it is now, and of a receive that waits.
    fn is_current(&self, arrived: &Arrived) -> bool {
        let peer = self.peers.get(usize::from(arrived.peer));
        let current = peer.is_some_and(|peer| {
            peer.is_open() && [peer.local, peer.remote] == arrived.incarnations && peer.next_match == arrived.message
        });
        let waits = |receive| self.receives.get(receive).is_some_and(|entry: &Receive| entry.posted.is_some());
        current && arrived.receive.is_none_or(waits)
    }

    /// Handles that the data half has taken up a message.
    pub(super) fn on_arrived(&mut self, arrived: &Arrived, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let lent = self.incoming.get(arrived.handle).is_some_and(|message| message.state == ReceiveState::Lent);
        let Some(offloaded) = self.offloaded.as_mut().filter(|_| lent) else { return self.counters.drop(Drop::NoMessage) };
        offloaded.places -= 1;
        offloaded.credit = offloaded.credit.saturating_sub(arrived.count.into());
        if arrived.receive.is_none() && !self.posted_buffers.remove(arrived.buffer) {
            self.incoming.remove(arrived.handle);
            return self.counters.drop(Drop::NoBuffer);
        }
        if !self.is_current(arrived) {
            return self.refuse_arrival(arrived);
        }
        let at = usize::from(arrived.peer);
        self.peers[at].heard = now;
        self.advance_incoming_floor(at, arrived.floor);
        let mut message = Incoming::new(arrived.peer, arrived.message, &arrived.rts, arrived.first, arrived.buffer);
        message.buffer = message.buffer.filter(|_| arrived.receive.is_none());
        if let Some(entry) = self.incoming.get_mut(arrived.handle) {
            *entry = message;
        }
        self.note_incoming(at, arrived.message, arrived.handle, now);
        self.peers[at].next_match = arrived.message.wrapping_add(1);
        match arrived.receive {
            Some(receive) => self.on_matched(arrived, receive, now),
            None => self.on_unexpected(arrived, now, memory),
        }
        self.ask_for_early(at);
    }

    /// Refuses a message of a peer's association that has ended meanwhile. Its receive still waits in the policy, so
    /// the two halves differ and have to agree anew.
    fn refuse_arrival(&mut self, arrived: &Arrived) {
        self.counters.drop(Drop::Stale);
        if arrived.receive.is_none() {
            self.free_buffers.push(arrived.buffer);
        }
        if let Some(message) = self.incoming.get_mut(arrived.handle) {
            message.state = ReceiveState::Returning;
        }
        self.commands.push(Command::Release { handle: arrived.handle, half: Half::Receiving, confirm: true });
        if self.matches_in_data() {
            self.leave();
        }
    }

    /// The data half has given a message to a receive, and cleared its first packets.
    fn on_matched(&mut self, arrived: &Arrived, receive: u32, now: u64) {
        let handle = arrived.handle;
        let Some(entry) = self.receives.get_mut(receive) else { return };
        let (region, source) = (entry.region, entry.source);
        if let Some(posted) = entry.posted.take() {
            self.matching.cancel(posted);
        }
        self.await_no_longer(source);
        let Some(message) = self.incoming.get_mut(handle) else { return };
        message.receive = receive;
        message.take_region(region);
        let (packets, fragment) = (message.packets, u64::from(message.rts.fragment));
        if packets == 0 {
            return self.deliver(handle, now);
        }
        let count = u32::from(arrived.count).min(packets);
        (message.limit, message.grant) = (count, u16::from(count > 0));
        self.cleared_packets += count;
        self.cleared_bytes += u64::from(count) * fragment;
        if count == 0 {
            return self.clear_more(handle, now);
        }
        let timer = self.incoming_timer(handle);
        self.timers.set(timer, now + self.config.timeout);
    }

    /// Handles that the data half keeps a message as unexpected. A receive that was posted before the policy knew of
    /// the message gets it, in both halves.
    fn on_unexpected(&mut self, arrived: &Arrived, now: u64, memory: &mut (impl Memory + ?Sized)) {
        let (at, handle, rts) = (usize::from(arrived.peer), arrived.handle, &arrived.rts);
        let kept = self.peers[at].buffers < self.config.buffers_per_peer && self.free_to_keep();
        self.peers[at].buffers += 1;
        self.give_to_receive(at, handle, rts, now, memory);
        if !kept {
            self.free_buffer(handle);
        }
    }

    /// Gives a message to the receive that waits for it, or keeps it as unexpected.
    pub(super) fn give_to_receive(&mut self, at: usize, handle: u32, rts: &Rts, now: u64, memory: &mut (impl Memory + ?Sized)) {
        if let Some(incoming) = self.incoming.get_mut(handle) {
            incoming.state = ReceiveState::Unexpected;
        }
        match self.matching.arrive(Message { source: at as u32, context: rts.context, tag: rts.tag }, handle) {
            Ok(Arrival::Matched(receive)) => {
                if let Some(entry) = self.receives.get_mut(receive) {
                    entry.posted = None;
                    let source = entry.source;
                    self.await_no_longer(source);
                }
                self.begin(handle, receive, now, memory);
            }
            Ok(Arrival::Unexpected(place)) => {
                if let Some(incoming) = self.incoming.get_mut(handle) {
                    incoming.place = place;
                }
            }
            // There are as many places for unexpected messages as for incoming ones.
            Err(_) => {}
        }
    }

    /// Whether the data half has to match an RTS that it has passed on, because it did not know the peer or because an
    /// earlier message has not come. Such an RTS is asked for again, at once or after the earlier message has come.
    pub(super) fn defer_rts(&mut self, at: usize, header: &Header, rts: &Rts) -> bool {
        let next = self.peers[at].next_match;
        let ahead = header.message.wrapping_sub(next);
        if !self.offloaded.as_ref().is_some_and(Offloaded::data_matches) || before(header.message, next) || ahead >= WINDOW {
            return false;
        }
        if ahead == 0 {
            self.hold(at, header.message, rts.handle, HoldReason::Resend);
        } else {
            self.peers[at].early[(header.message % WINDOW) as usize] = rts.handle;
        }
        true
    }

    /// Asks again for the messages that came too early, now that the message with the lower number has come.
    fn ask_for_early(&mut self, at: usize) {
        let mut number = self.peers[at].next_match;
        loop {
            let sender = core::mem::take(&mut self.peers[at].early[(number % WINDOW) as usize]);
            if sender == 0 {
                return;
            }
            self.hold(at, number, sender, HoldReason::Resend);
            number = number.wrapping_add(1);
        }
    }
}

impl Incoming {
    /// A place that is lent to the data half.
    fn lent() -> Incoming {
        let rts = Rts { length: 0, tag: 0, data: 0, context: 0, handle: 0, fragment: 1 };
        let message = Incoming::new(0, 0, &rts, 0, 0);
        Incoming { buffer: None, state: ReceiveState::Lent, ..message }
    }
}
