//! An endpoint: the program's sends and receives, and how they end.

use crate::arena::{Arena, Buffer, NoPlace, Slot};
use crate::half::DataHalf;
use crate::multiple::Multiple;
use crate::opening::{self, Opened};
use crate::rma::{self, Regions};
use crate::settings::Settings;
use crate::spill::{KeptId, Spill, Taker};
use baton_linux::events::Poller;
use baton_rmpp::data::first_bytes;
use baton_rmpp::{Command, Delivered, Error, Event, Halves, Limit, PeerId, Policy, ReceiveId, Request, Side};
use baton_wire::Endpoint as Address;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;

/// Microseconds in which polls find nothing, after which replies leave that nobody waits for: longer than a short
/// message and its answer take.
const PATIENCE: u64 = 30;
/// Messages that may be acknowledged late: a quarter of those that a peer may have under way.
const MOST_REPLIES: usize = 16;
/// Rounds that one call of [`Endpoint::progress`] does at most.
const ROUNDS: usize = 16;

/// Messages of one channel never match receives of another: RMPP's context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Channel {
    /// Messages with a tag.
    Tagged = 0,
    /// Messages without.
    Plain = 1,
    /// Requests to read or write memory.
    Requests = 2,
    /// What is read or written.
    Contents = 3,
}

/// The program's name for an operation.
pub type Token = u64;

/// What a message is sent from.
#[derive(Debug)]
pub enum Payload<B> {
    /// The program's buffer, which it leaves alone until the completion.
    Borrowed(B),
    /// A copy: the program may use its buffer at once.
    Copied(Vec<u8>),
}

/// A message to send.
#[derive(Debug)]
pub struct Outgoing<B> {
    /// Whom it is for.
    pub peer: PeerId,
    /// Its channel.
    pub channel: Channel,
    /// Its tag.
    pub tag: u64,
    /// Passed to the receiver unread.
    pub data: u64,
    /// Its bytes.
    pub payload: Payload<B>,
    /// The caller's name for it, for a completion when the receiver has it; None for no completion.
    pub token: Option<Token>,
}

/// Which messages are meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Selector {
    /// Sender; None for any.
    pub peer: Option<PeerId>,
    /// Channel.
    pub channel: Channel,
    /// Tag.
    pub tag: u64,
    /// Bits of the tag that are not compared.
    pub ignore: u64,
}

/// A receive.
#[derive(Debug)]
pub struct Incoming<B> {
    /// What it is for.
    pub selector: Selector,
    /// Where the message goes.
    pub buffer: B,
    /// The caller's name for it.
    pub token: Token,
}

/// A message that was claimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim(Keeper);

/// Who has a claimed message, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Keeper {
    Protocol(u32),
    Spill(KeptId),
}

/// An unexpected message that was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// For [`Endpoint::receive_claimed`], if it was claimed.
    pub claim: Claim,
    /// Its sender.
    pub peer: PeerId,
    /// Its tag.
    pub tag: u64,
    /// What the sender passed on.
    pub data: u64,
    /// Its bytes.
    pub length: u64,
}

/// What a completion is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A message that was sent.
    Send,
    /// A receive.
    Receive,
    /// A message in a buffer for several: it lies at `at`. `last`: the buffer is the program's again.
    Part {
        /// Offset of the message in the buffer.
        at: u64,
        /// Whether the buffer receives nothing more.
        last: bool,
    },
    /// Memory of a peer was read.
    Read,
    /// Memory of a peer was written.
    Write,
    /// A peer has written to our memory, and passed on `data`.
    Written,
    /// A peer has read our memory.
    WasRead,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The caller's name for it; 0 for [`Kind::Written`] and [`Kind::WasRead`].
    pub token: Token,
    /// What it was.
    pub kind: Kind,
    /// What came of it.
    pub result: Result<Delivered, Error>,
}

/// Who gets the completion of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Nobody: a copy was sent.
    Silent,
    Send(Token),
    Receive(Token, ReceiveId),
    /// A claimed message, which cannot be cancelled.
    Claimed(Token),
    /// A message in a buffer for several.
    Part,
    /// An unexpected message that is taken out of the protocol's hands.
    Spilled(u32),
    /// An operation of the endpoint on its own behalf.
    Rma(rma::Step),
}

/// An endpoint.
pub struct Endpoint<B: Buffer> {
    pub(crate) policy: Policy,
    half: DataHalf,
    /// Whether a NIC may place messages before the policy knows of them.
    matches_on_nic: bool,
    /// Messages for which a NIC has found the receive.
    matched_on_nic: u64,
    /// Why there is no NIC, if one was to be used.
    without_nic: Option<String>,
    pub(crate) arena: Arena<B>,
    /// What operations are for, by their slot of the arena, which is RMPP's token.
    purposes: Vec<Option<Purpose>>,
    /// Messages that may be sent, and receives that may be posted; peers; bytes of a packet.
    limits: [u16; 2],
    peers: u16,
    packet: u16,
    pub(crate) multiple: Multiple,
    pub(crate) spill: Spill,
    pub(crate) rma: rma::Rma<B>,
    pub(crate) completions: VecDeque<Completion>,
    /// When replies leave that nobody waits for, in microseconds.
    replies_due: u64,
    /// Until then there is nothing to do unless a packet comes, in microseconds; 0: that is not known.
    pub(crate) idle_until: u64,
    /// Messages of which a copy was sent that did not arrive.
    lost: u64,
}

/// Builds hashers for keys that this process made itself: they need no secret.
pub(crate) type Keys = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;

impl<B: Buffer> Endpoint<B> {
    /// An endpoint that receives at the address of the settings. `regions` finds the program's memory that peers may
    /// reach; `random` is 32 random bytes; `now` is in microseconds of a clock that no earlier endpoint of this address
    /// was ahead of.
    ///
    /// # Errors
    /// The failed system call's, or `InvalidInput` for settings that contradict each other.
    pub fn new(settings: &Settings, regions: Box<dyn Regions<B>>, random: [u8; 32], now: u64) -> io::Result<Endpoint<B>> {
        let Opened { config, half, arena, without_nic } = opening::open(settings, random, now)?;
        let policy = Policy::new(config).map_err(|error| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("the settings contradict each other: {error:?}"))
        })?;
        Ok(Endpoint {
            policy,
            matches_on_nic: config.data_posted > 0,
            matched_on_nic: 0,
            half,
            without_nic,
            arena,
            purposes: Vec::new(),
            limits: [config.sends, config.receives],
            peers: config.peers,
            packet: config.packet,
            multiple: Multiple::default(),
            spill: Spill::new(config.hash_key),
            rma: rma::Rma::new(regions, now),
            completions: VecDeque::new(),
            replies_due: 0,
            idle_until: 0,
            lost: 0,
        })
    }

    /// Whether the data half is on the NIC.
    pub fn is_on_nic(&self) -> bool {
        self.half.is_on_nic()
    }

    /// What carries the data of long messages, in a word.
    pub fn encapsulation(&self) -> &'static str {
        if self.half.has_streams() { "stream" } else { "udp" }
    }

    /// Why the data half is not on the NIC, if it was to be.
    pub fn without_nic(&self) -> Option<&str> {
        self.without_nic.as_deref()
    }

    /// Address at which it receives.
    pub fn address(&self) -> SocketAddr {
        self.half.address()
    }

    /// The number of the peer at an address. If the table of peers is full, those may leave it that `is_needed` does
    /// not name.
    ///
    /// # Errors
    /// The table of peers is full.
    pub fn peer(&mut self, address: SocketAddr, is_needed: impl Fn(PeerId) -> bool) -> Result<PeerId, Limit> {
        let address = Address::from(address);
        let found = self.policy.open(address, 0);
        if found.is_ok() {
            return found;
        }
        // Messages and requests that were taken from the protocol name their peers by these numbers, and so do buffers
        // for several messages, which may have no receive posted just now.
        let taken = self.spill.peers().chain(self.rma.peers());
        let named = taken.chain(self.multiple.peers()).collect::<BTreeSet<PeerId>>();
        for peer in (0..self.peers).map(PeerId).filter(|peer| !named.contains(peer) && !is_needed(*peer)) {
            self.policy.disown(peer);
        }
        self.policy.open(address, 0)
    }

    /// Address of a peer.
    pub fn peer_address(&self, peer: PeerId) -> Option<SocketAddr> {
        self.policy.peer_address(peer).map(|(address, _)| SocketAddr::from(address))
    }

    /// Messages that were sent as copies and whose peers died before they had them.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Ends the association with every peer: what was sent to it is finished first.
    pub fn close_all(&mut self, now: u64) {
        for peer in 0..self.peers {
            if self.policy.peer_address(PeerId(peer)).is_some() {
                self.policy.close(PeerId(peer), now);
                self.exchange(now);
            }
        }
    }

    /// Whether there are peers that have not answered that they know of the end.
    pub fn has_peers(&self) -> bool {
        self.policy.peers() > 0
    }

    /// Bytes of message that fit into one packet. A message of that length needs nothing of its receiver but to take
    /// it.
    pub fn eager(&self) -> usize {
        usize::from(first_bytes(self.packet))
    }

    /// What the endpoint has counted: packets of both halves, those that were refused and dropped by reason, and
    /// datagrams that the socket did not take. For a log.
    pub fn report(&self) -> String {
        let policy = self.policy.counters();
        let (data, unsent, on_nic, deaths) = self.half.report();
        let matched = self.matched_on_nic;
        let nic = format!("packets on NICs {on_nic}, matched there {matched}, NICs that died {deaths}");
        format!("policy {policy:?}, data {data:?}, not sent {unsent}, lost copies {}, {nic}", self.lost)
    }

    /// What this host's data half has counted.
    #[cfg(test)]
    pub fn counters(&self) -> &baton_rmpp::Counters {
        self.half.report().0
    }

    /// The streams, which a test breaks.
    #[cfg(test)]
    pub fn streams(&self) -> &crate::streams::Streams {
        self.half.streams().expect("there are streams")
    }

    /// Makes the data half take no commands any more, as a NIC that hangs does.
    #[cfg(test)]
    pub fn stop_data_half(&mut self) {
        self.half.stopped = true;
    }

    /// Whether messages are still to be sent.
    pub fn is_sending(&self) -> bool {
        self.policy.usage().0 > 0
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The limit that stands against it; [`Limit::Sends`] and the like pass when others complete.
    pub fn send(&mut self, outgoing: Outgoing<B>, now: u64) -> Result<(), Limit> {
        let purpose = outgoing.token.map_or(Purpose::Silent, Purpose::Send);
        self.send_for(purpose, outgoing, now)
    }

    pub(crate) fn send_for(&mut self, purpose: Purpose, outgoing: Outgoing<B>, now: u64) -> Result<(), Limit> {
        self.make_room(now);
        self.begin_send(purpose, outgoing, now)?;
        self.transmit(now);
        Ok(())
    }

    /// As [`Endpoint::send_for`], and nothing else happens: [`Endpoint::transmit`] follows.
    pub(crate) fn begin_send(&mut self, purpose: Purpose, outgoing: Outgoing<B>, now: u64) -> Result<(), Limit> {
        let slot = self.arena.insert(match outgoing.payload {
            Payload::Borrowed(buffer) => Slot::Program(buffer),
            Payload::Copied(bytes) => Slot::Own(bytes),
        });
        let region = self.arena.outgoing(slot).map_err(|missing| {
            self.arena.remove(slot);
            limit_of(missing, Limit::Sends)
        })?;
        let message = baton_rmpp::Outgoing {
            peer: outgoing.peer,
            context: outgoing.channel as u32,
            tag: outgoing.tag,
            data: outgoing.data,
            region,
            token: slot.into(),
        };
        if let Err(limit) = self.policy.send(message, now) {
            self.arena.remove(slot);
            return Err(limit);
        }
        self.set_purpose(slot, purpose);
        Ok(())
    }

    /// Whether so many messages more may be sent, and as many received.
    pub(crate) fn has_room_for(&self, messages: usize) -> bool {
        let (sends, _, receives) = self.policy.usage();
        let [most_sends, most_receives] = self.limits;
        sends + messages <= most_sends.into() && receives + messages <= most_receives.into()
    }

    /// Posts a receive. The number returned is for [`Endpoint::cancel`].
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn receive(&mut self, incoming: Incoming<B>, now: u64) -> Result<u32, Limit> {
        let slot = self.arena.insert(Slot::Program(incoming.buffer));
        let (token, region) = (incoming.token, self.arena.whole(slot));
        if self.take_spilled(&incoming.selector, Taker::Receive { token, slot }) {
            return Ok(slot);
        }
        match self.post(incoming.selector, region, slot, now) {
            Ok(id) => {
                self.set_purpose(slot, Purpose::Receive(token, id));
                self.transmit(now);
                Ok(slot)
            }
            Err(limit) => {
                self.arena.remove(slot);
                Err(limit)
            }
        }
    }

    /// Posts a receive into a region of a slot. The slot's number is RMPP's token.
    pub(crate) fn post(
        &mut self,
        selector: Selector,
        region: baton_rmpp::Region,
        slot: u32,
        now: u64,
    ) -> Result<ReceiveId, Limit> {
        self.make_room(now);
        let region = self.place_for(slot, region)?;
        let request = Request {
            source: selector.peer,
            context: selector.channel as u32,
            tag: selector.tag,
            ignore: selector.ignore,
            region,
            token: slot.into(),
        };
        self.policy.post(request, now, &mut self.arena)
    }

    /// Where a message for a region of a slot is received.
    pub(crate) fn place_for(&mut self, slot: u32, region: baton_rmpp::Region) -> Result<baton_rmpp::Region, Limit> {
        let eager = (!self.matches_on_nic).then_some(self.eager() as u64);
        self.arena.incoming(slot, region, eager).map_err(|missing| limit_of(missing, Limit::Receives))
    }

    /// Notes what an operation is for that RMPP has accepted. Its completion is not looked at before.
    pub(crate) fn set_purpose(&mut self, slot: u32, purpose: Purpose) {
        let slot = slot as usize;
        if self.purposes.len() <= slot {
            self.purposes.resize(slot + 1, None);
        }
        self.purposes[slot] = Some(purpose);
    }

    /// Takes a send back that has not begun, by the caller's name for it. Its completion is [`Error::Cancelled`];
    /// false, and none comes, if it is on its way or has ended.
    pub fn cancel_send(&mut self, token: Token, now: u64) -> bool {
        let send = |purpose: &Option<Purpose>| matches!(purpose, Some(Purpose::Send(owner)) if *owner == token);
        let slot = self.purposes.iter().position(send);
        let cancelled = slot.is_some_and(|slot| self.policy.cancel_send(slot as u64, now));
        self.collect(now);
        cancelled
    }

    /// Takes a receive back, by its number and the caller's name for it. Its completion is [`Error::Cancelled`]; false,
    /// and none comes, if it has matched a message or has ended. Where the NIC matches it is asked: the completion
    /// comes with its answer, and is of a message if that was faster ([`Endpoint::outcome`]).
    pub fn cancel(&mut self, number: u32, token: Token, now: u64) -> bool {
        let cancelled = match self.purposes.get(number as usize) {
            Some(Some(Purpose::Receive(owner, id))) if *owner == token => self.policy.cancel(*id),
            _ => self.cancel_multiple(token),
        };
        self.collect(now);
        cancelled
    }

    /// How an operation has ended whose completion was not taken yet.
    pub fn outcome(&self, token: Token) -> Option<&Result<Delivered, Error>> {
        self.completions.iter().rev().find(|completion| completion.token == token).map(|completion| &completion.result)
    }

    /// Finds the oldest unexpected message that a receive would get. With `claim` it is taken, for
    /// [`Endpoint::receive_claimed`].
    ///
    /// # Errors
    /// A limit stands against that now: a message that was taken could be neither received nor discarded.
    pub fn probe(&mut self, selector: &Selector, claim: bool, now: u64) -> Result<Option<Found>, Limit> {
        if claim {
            self.make_room(now);
            if !self.policy.is_ready() {
                return Err(Limit::Commands);
            }
        }
        let Selector { peer, channel, tag, ignore } = *selector;
        let (keeper, found) = match self.spill.find(selector, claim) {
            Some((kept, found)) => (Keeper::Spill(kept), found),
            None => {
                let found = match claim {
                    true => self.policy.claim(peer, channel as u32, tag, ignore),
                    false => self.policy.peek(peer, channel as u32, tag, ignore),
                };
                let Some(found) = found else { return Ok(None) };
                (Keeper::Protocol(found.message), found)
            }
        };
        Ok(Some(Found { claim: Claim(keeper), peer: found.peer, tag: found.tag, data: found.data, length: found.length }))
    }

    /// Receives a message that was claimed. Without a token it is discarded.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn receive_claimed(&mut self, claim: Claim, buffer: Option<B>, token: Option<Token>, now: u64) -> Result<(), Limit> {
        let slot = self.arena.insert(buffer.map_or(Slot::Own(Vec::new()), Slot::Program));
        self.make_room(now);
        let begun = match claim.0 {
            Keeper::Spill(kept) => {
                let taker = token.map_or(Taker::Nobody, |token| Taker::Receive { token, slot });
                let given = self.give_spilled(kept, taker);
                if given && token.is_some() {
                    return Ok(());
                }
                self.arena.remove(slot);
                return if given { Ok(()) } else { Err(Limit::NoMessage) };
            }
            Keeper::Protocol(message) => {
                // What is discarded needs no place.
                let nowhere = Ok(baton_rmpp::Region::default());
                let region = token.map_or(nowhere, |_| self.place_for(slot, self.arena.whole(slot)));
                region.and_then(|region| self.policy.receive_claimed(message, region, slot.into(), now, &mut self.arena))
            }
        };
        if let Err(limit) = begun {
            self.arena.remove(slot);
            return Err(limit);
        }
        self.set_purpose(slot, token.map_or(Purpose::Silent, Purpose::Claimed));
        self.transmit(now);
        Ok(())
    }

    /// Receives, answers and sends what there is. Returns whether there was anything.
    pub fn progress(&mut self, now: u64) -> bool {
        let mut any = false;
        for _ in 0..ROUNDS {
            if self.half.renew() {
                self.policy.let_data_match(self.half.may_match());
                self.policy.restart(Halves::BOTH, now);
            }
            let received = self.half.receive(&mut self.arena);
            if !received && now < self.idle_until {
                break;
            }
            if !self.pass(now) && !received {
                self.idle_until = self.next_work();
                break;
            }
            any = true;
            // What has ended is what the program waits for: whether more has come is asked when it polls again.
            if !self.completions.is_empty() {
                break;
            }
        }
        if any {
            self.replies_due = now + PATIENCE;
        }
        any
    }

    /// When [`Endpoint::progress`] has something to do even if nothing is received, in microseconds.
    pub fn next_timeout(&self) -> Option<u64> {
        [self.policy.next_timeout(), self.half.next_retry()].into_iter().flatten().min()
    }

    /// Makes the next [`Endpoint::progress`] look at everything. To be called when the program has asked for something.
    pub fn expect_work(&mut self) {
        self.idle_until = 0;
    }

    /// When there is something to do even if no packet comes, once all there was is done. With a NIC its ring is to be
    /// looked at.
    fn next_work(&self) -> u64 {
        let replies = (!self.policy.has_no_commands()).then_some(self.replies_due);
        if self.half.is_on_nic() { 0 } else { [self.next_timeout(), replies].into_iter().flatten().min().unwrap_or(u64::MAX) }
    }

    /// Makes a poller watch what there may be to do for [`Endpoint::progress`].
    ///
    /// # Errors
    /// The failed system call's.
    pub fn watch(&self, poller: &Poller) -> io::Result<()> {
        self.half.watch(poller)
    }

    /// Announces that the caller is going to sleep. False if there is something to do. [`Endpoint::end_sleep`] follows.
    pub fn prepare_sleep(&mut self, now: u64) -> bool {
        self.replies_due = now;
        self.transmit(now);
        self.half.prepare_sleep()
    }

    /// The caller is awake; `tokens` are those of the poller.
    pub fn end_sleep(&mut self, tokens: &[u64]) {
        self.half.end_sleep(tokens);
    }

    /// The next completion.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// Passes commands and events between the halves until there are none. Returns whether there were any.
    pub(crate) fn exchange(&mut self, now: u64) -> bool {
        let mut any = false;
        while self.pass(now) {
            any = true;
        }
        any
    }

    /// Passes on those commands and events that there are. Returns whether there were any: then they may have caused
    /// others.
    fn pass(&mut self, now: u64) -> bool {
        let mut moved = false;
        while self.policy.is_ready()
            && let Some(event) = self.half.poll_event()
        {
            self.spill.observe(&event);
            self.matched_on_nic += u64::from(matches!(&event, Event::Arrived(arrived) if arrived.receive.is_some()));
            self.policy.handle_event(&event, now, &mut self.arena);
            moved = true;
        }
        self.policy.on_timeout(now);
        self.half.retry(now);
        moved |= self.transmit(now);
        moved |= self.answer_requests(now);
        moved |= self.spill(now);
        moved |= self.post_multiple(now);
        moved
    }

    /// Carries out the policy's commands, sends, and collects completions. Returns whether there were any.
    pub(crate) fn transmit(&mut self, now: u64) -> bool {
        let mut any = false;
        // Replies that nobody waits for leave many at a time, and not between a message and the program's answer.
        let many = self.completions.is_empty() && self.policy.acknowledgements() > MOST_REPLIES;
        let all = many || now >= self.replies_due;
        while self.half.has_room()
            && (all || !self.policy.is_patient())
            && let Some(command) = self.policy.poll_command()
        {
            self.half.handle_command(&command, now);
            if matches!(command, Command::SetPeer { .. } | Command::Control { .. }) {
                self.policy.let_data_match(self.half.may_match());
            }
            // An RTS leaves before the shorter packets behind it: so one system call takes them all.
            self.half.emit(&self.arena);
            any = true;
        }
        if !self.policy.is_patient() {
            self.replies_due = now + PATIENCE;
        }
        any |= self.half.transmit(&self.arena);
        any | self.collect(now)
    }

    /// Makes room for the commands of another call.
    pub(crate) fn make_room(&mut self, now: u64) {
        if !self.policy.is_ready() {
            self.replies_due = now;
            self.exchange(now);
        }
    }

    /// Takes completions from the policy to those that they are for.
    pub(crate) fn collect(&mut self, now: u64) -> bool {
        let mut any = false;
        self.expect_work();
        while let Some(completion) = self.policy.poll_completion() {
            let slot = completion.token as u32;
            if let Some(purpose) = self.purposes.get_mut(slot as usize).and_then(Option::take) {
                self.finish(purpose, slot, &completion, now);
            }
            any = true;
        }
        any
    }

    fn finish(&mut self, purpose: Purpose, slot: u32, completion: &baton_rmpp::Completion, now: u64) {
        let result = completion.result;
        if completion.side == Side::Receive
            && let Ok(delivered) = &result
        {
            self.arena.arrived(slot, delivered.placed);
        }
        // These two keep their buffer.
        match purpose {
            Purpose::Part => return self.finish_part(slot, result),
            Purpose::Spilled(handle) => return self.finish_spilled(handle, result),
            _ => {}
        }
        let buffer = self.arena.remove(slot);
        match purpose {
            Purpose::Silent => self.lost += u64::from(completion.side == Side::Send && result.is_err()),
            Purpose::Send(token) => self.completions.push_back(Completion { token, kind: Kind::Send, result }),
            Purpose::Receive(token, _) | Purpose::Claimed(token) => {
                self.completions.push_back(Completion { token, kind: Kind::Receive, result });
            }
            Purpose::Rma(step) => self.finish_rma(step, buffer, result, now),
            Purpose::Part | Purpose::Spilled(_) => {}
        }
    }
}

/// The limit that a message without a place in session memory runs into.
fn limit_of(missing: NoPlace, now: Limit) -> Limit {
    match missing {
        NoPlace::Now => now,
        NoPlace::Ever => Limit::Memory,
    }
}
