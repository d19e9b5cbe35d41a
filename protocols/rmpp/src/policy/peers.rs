//! Peers: how an association begins and ends, incarnations, keep-alive.
//!
//! An association is named by an incarnation of each side. Both are in every packet, so a packet of an earlier
//! association is recognised. A Hello is answered without keeping anything; a peer takes a place in the table only when
//! it has shown, by naming our incarnation, that it received our answer.

use super::messages::ReceiveState;
use super::{Error, Limit, PeerId, Policy};
use crate::counters::Drop;
use crate::interface::{Command, Half};
use crate::{WINDOW, before};
use alloc::collections::VecDeque;
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, Kind};

/// For this many peers that were forgotten last, the addresses are kept: a newcomer that was answered before as many
/// peers were forgotten is still served.
const FORGOTTEN: usize = 64;

/// Our incarnations.
#[derive(Debug)]
pub(super) struct Incarnations {
    /// The last one given out.
    latest: u32,
    /// The incarnation that unknown peers get in answer to a Hello.
    base: u32,
    /// The peers that were forgotten last, the oldest first, each with the `base` that there was until then.
    forgotten: VecDeque<(u32, (Endpoint, u16))>,
}

impl Incarnations {
    /// They begin with `first`, and none is 0.
    pub fn new(first: u32) -> Incarnations {
        let first = first.max(1);
        Incarnations { latest: first, base: first, forgotten: VecDeque::with_capacity(FORGOTTEN) }
    }

    fn next(&mut self) -> u32 {
        self.latest = self.latest.wrapping_add(1).max(1);
        self.latest
    }

    /// Forgets a peer. The incarnation that unknown peers get changes, so that packets for the old association are
    /// recognised.
    fn forget(&mut self, peer: (Endpoint, u16)) {
        if self.forgotten.len() == FORGOTTEN {
            self.forgotten.pop_front();
        }
        self.forgotten.push_back((self.base, peer));
        self.base = self.next();
    }

    /// Whether an unknown peer may begin an association with this incarnation: the one that unknown peers get now, or
    /// one that they got earlier. The peer must not have been forgotten since that one was current: then it has had no
    /// association with it before. So when peers are forgotten to make room for newcomers, other newcomers that were
    /// answered at the same time do not fail.
    fn allows(&self, incarnation: u32, peer: (Endpoint, u16)) -> bool {
        let since = self.forgotten.iter().position(|(base, _)| *base == incarnation);
        let since = since.or_else(|| (incarnation == self.base).then_some(self.forgotten.len()));
        since.is_some_and(|since| self.forgotten.iter().skip(since).all(|(_, other)| *other != peer))
    }
}

/// The state of the association with a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum PeerState {
    /// The place in the table is free.
    #[default]
    Free,
    /// Known, without an association.
    Idle,
    /// A Hello was sent.
    Greeting,
    /// Messages go both ways.
    Open,
    /// The program has closed it: its messages are finished first, and then a Bye is sent.
    Closing,
    /// It has ended; the data half has not released all of its messages.
    Failing,
}

/// Whether an idle peer is asked if it lives, since other peers may need its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Doubt {
    #[default]
    None,
    /// It is to be asked.
    Begins,
    /// It is asked until it answers, or is dead.
    Asked,
}

/// A peer. Message numbers begin at 1 in each direction and are counted modulo 2³².
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub state: PeerState,
    pub address: Endpoint,
    pub endpoint: u16,
    /// Our incarnation towards it.
    pub local: u32,
    /// The peer's latest incarnation that knows `local`, 0 if none.
    pub remote: u32,
    /// The peer's first incarnation that knew `local`. Incarnations in the half of the number space before this one are
    /// not accepted: otherwise, after some forged ones, an old one that comes again would count as newer.
    oldest: u32,
    /// The incarnation whose association with `local` has ended, 0 if none.
    ended: u32,
    /// The program has opened it: it keeps its place.
    opened: bool,
    /// The program has closed it: its place becomes free.
    closed: bool,
    error: Error,
    /// `local` stays in use when the association ends, since the peer's next incarnation knows it.
    keep_local: bool,
    doubt: Doubt,
    /// When a packet of it last came to the policy, or something began.
    pub heard: u64,
    attempts: u8,
    /// Number of the next message to it, the lowest that it has not acknowledged, and which above that it has (bit i:
    /// floor + i).
    pub next_number: u32,
    pub floor: u32,
    pub acknowledged: u64,
    /// Messages to it, by number modulo the window.
    pub sent: [u32; WINDOW as usize],
    /// Number of messages to it that are not finished; and the first and the last of those without a number.
    pub sends: u32,
    pub first_waiting: u32,
    pub last_waiting: u32,
    /// Number of its next message to be matched, the lowest that it may send again, and which above that are finished.
    pub next_match: u32,
    pub incoming_floor: u32,
    pub finished: u64,
    /// Messages from it, by number modulo the window.
    pub received: [u32; WINDOW as usize],
    /// Senders' handles of messages that the data half is to match and that came too early, by number modulo the
    /// window.
    pub early: [u32; WINDOW as usize],
    /// Messages from it that are not forgotten, and buffers that they fill.
    pub incoming: u32,
    pub buffers: u16,
    /// Messages that the data half is asked to release.
    pub releasing: u32,
    /// Posted receives that only a message from it can match.
    pub awaited: u32,
}

impl Default for Peer {
    fn default() -> Peer {
        Peer {
            state: PeerState::Free,
            address: Endpoint::v4([0; 4], 0),
            endpoint: 0,
            local: 0,
            remote: 0,
            oldest: 0,
            ended: 0,
            opened: false,
            closed: false,
            error: Error::PeerClosed,
            keep_local: false,
            doubt: Doubt::None,
            heard: 0,
            attempts: 0,
            next_number: 1,
            floor: 1,
            acknowledged: 0,
            sent: [0; WINDOW as usize],
            sends: 0,
            first_waiting: 0,
            last_waiting: 0,
            next_match: 1,
            incoming_floor: 1,
            finished: 0,
            received: [0; WINDOW as usize],
            early: [0; WINDOW as usize],
            incoming: 0,
            buffers: 0,
            releasing: 0,
            awaited: 0,
        }
    }
}

impl Peer {
    /// Whether messages can go to and fro.
    pub fn is_open(&self) -> bool {
        matches!(self.state, PeerState::Open | PeerState::Closing)
    }

    /// Whether this incarnation of the peer has ended, as far as we know.
    fn is_past(&self, incarnation: u32) -> bool {
        let older = self.remote != 0 && (before(incarnation, self.remote) || before(incarnation, self.oldest));
        older || incarnation == self.ended
    }

    /// Whether a message of either direction is unfinished, or a receive waits for one.
    pub fn is_busy(&self) -> bool {
        self.sends > 0 || self.incoming > 0 || self.awaited > 0
    }

    /// Whether the peer has an association that the program did not ask for and that has no unfinished messages.
    fn is_idle(&self) -> bool {
        self.state == PeerState::Open && !self.opened && !self.is_busy()
    }

    /// The command that enters this peer in the data half, which has number `peer`.
    pub fn command(&self, peer: u16) -> Command {
        let Peer { address, endpoint, local, remote, next_match: next, incoming_floor: floor, .. } = *self;
        Command::SetPeer { peer, address, endpoint, local, remote, next, floor }
    }

    fn reset_numbers(&mut self) {
        (self.next_number, self.floor, self.acknowledged) = (1, 1, 0);
        (self.next_match, self.incoming_floor, self.finished) = (1, 1, 0);
        (self.sent, self.received, self.early) = ([0; WINDOW as usize], [0; WINDOW as usize], [0; WINDOW as usize]);
    }
}

/// Whether the sender of such a packet waits for an answer. Packets of all other kinds are answers themselves.
fn wants_answer(kind: Kind) -> bool {
    matches!(kind, Kind::Rts | Kind::End | Kind::Ping | Kind::Bye)
}

impl Policy {
    /// Enters a peer, or finds it. Nothing is sent until there is a message for it.
    ///
    /// # Errors
    /// If the table is full of peers that the program has opened, that have messages, or that have sent packets lately.
    pub fn open(&mut self, address: Endpoint, endpoint: u16) -> Result<PeerId, Limit> {
        if let Some(peer) = self.addresses.get(&(address, endpoint)) {
            self.peers[usize::from(*peer)].opened = true;
            return Ok(PeerId(*peer));
        }
        let peer = self.enter_peer(address, endpoint, self.incarnations.base).ok_or(Limit::Peers)?;
        self.peers[peer].opened = true;
        Ok(PeerId(peer as u16))
    }

    /// Undoes [`Policy::open`]: other peers may get this peer's place once it has no association, or is dead.
    pub fn disown(&mut self, peer: PeerId) {
        if let Some(peer) = self.peers.get_mut(usize::from(peer.0)) {
            peer.opened = false;
        }
    }

    /// Ends the association with a peer in order: messages to it are finished first, then it gets a Bye. Messages from
    /// it that are unfinished fail. Its number becomes free.
    pub fn close(&mut self, peer: PeerId, now: u64) {
        let at = usize::from(peer.0);
        let Some(entry) = self.peers.get_mut(at) else { return };
        entry.opened = false;
        entry.closed = true;
        match entry.state {
            PeerState::Open => {
                entry.state = PeerState::Closing;
                entry.attempts = 0;
                self.watch(at, now);
                self.farewell(at, now);
            }
            PeerState::Idle | PeerState::Greeting => self.fail(at, Error::PeerClosed, false, now),
            // Messages and receives that have begun since the association failed wait for the next association, which
            // will not come.
            PeerState::Failing => self.fail_all_waiting(at, Error::PeerClosed),
            PeerState::Free | PeerState::Closing => {}
        }
    }

    /// Address and endpoint of a peer.
    pub fn peer_address(&self, peer: PeerId) -> Option<(Endpoint, u16)> {
        let peer = self.peers.get(usize::from(peer.0)).filter(|peer| peer.state != PeerState::Free)?;
        Some((peer.address, peer.endpoint))
    }

    /// Whether nothing new may begin with a peer: no peer has this number, or the program has closed the peer. A closed
    /// peer's entry goes when its association has ended, whatever state it is in until then.
    pub(super) fn is_leaving(&self, at: usize) -> bool {
        self.peers.get(at).is_none_or(|peer| peer.state == PeerState::Free || peer.closed)
    }

    /// Peers in the table.
    pub fn peers(&self) -> usize {
        self.addresses.len()
    }

    /// Takes a place in the table: a free one, or that of a peer which is not needed. When few places are left, idle
    /// peers are asked whether they live: a peer that has vanished without a Bye would keep its place for ever. `local`
    /// is the incarnation that the new peer may know already; it is used even if a peer is forgotten to make room.
    fn enter_peer(&mut self, address: Endpoint, endpoint: u16, local: u32) -> Option<usize> {
        if 8 * (self.addresses.len() + 1) > 7 * self.peers.len() {
            for at in 0..self.peers.len() {
                if self.peers[at].is_idle() && self.peers[at].doubt == Doubt::None {
                    self.peers[at].doubt = Doubt::Begins;
                    let timer = self.peer_timer(at);
                    self.timers.set(timer, 0);
                }
            }
        }
        let free = |peer: &Peer| peer.state == PeerState::Free;
        let unneeded = |peer: &Peer| peer.state == PeerState::Idle && !peer.opened && !peer.is_busy();
        let place = self.peers.iter().position(free).or_else(|| {
            let place = self.peers.iter().position(unneeded)?;
            self.forget_peer(place);
            Some(place)
        })?;
        self.peers[place] = Peer { state: PeerState::Idle, address, endpoint, local, ..Peer::default() };
        self.addresses.insert((address, endpoint), place as u16);
        Some(place)
    }

    /// Frees a place.
    fn forget_peer(&mut self, at: usize) {
        let Peer { address, endpoint, .. } = self.peers[at];
        self.addresses.remove(&(address, endpoint));
        self.peers[at] = Peer::default();
        self.incarnations.forget((address, endpoint));
    }

    /// The peer that a packet is from, if it belongs to the current association, or begins one.
    pub(super) fn admit(&mut self, from: &Endpoint, header: &Header, now: u64) -> Result<usize, Drop> {
        let Some(at) = self.addresses.get(&(*from, header.source)).map(|at| usize::from(*at)) else {
            return self.admit_unknown(from, header, now);
        };
        let peer = &mut self.peers[at];
        if peer.state == PeerState::Failing {
            return Err(Drop::Stale);
        }
        if header.to != peer.local {
            self.refuse_incarnation(from, header);
            return Err(Drop::WrongIncarnation);
        }
        if peer.is_past(header.from) {
            self.doubt(at, header.kind);
            return Err(Drop::Stale);
        }
        if !peer.is_open() {
            // Nothing was sent that an answer could be for.
            if !wants_answer(header.kind) {
                return Err(Drop::NoMessage);
            }
            self.associate(at, header.from, now);
        } else if peer.remote != header.from {
            self.fail(at, Error::PeerRestarted, true, now);
            return Err(Drop::Stale);
        }
        // It lives: a doubt that has begun is over.
        (self.peers[at].heard, self.peers[at].doubt) = (now, Doubt::None);
        Ok(at)
    }

    /// Handles a packet of an incarnation that counts as ended. The packet that claimed a newer incarnation may have
    /// been forged. So the newer incarnation is asked for, and the true peer answers that it is another one.
    fn doubt(&mut self, at: usize, kind: Kind) {
        let peer = &self.peers[at];
        if peer.is_open() && wants_answer(kind) {
            let floor = peer.floor;
            self.control(at, Kind::Ping, |header| header.packet = floor);
        }
    }

    fn admit_unknown(&mut self, from: &Endpoint, header: &Header, now: u64) -> Result<usize, Drop> {
        if header.kind == Kind::Bye || !self.incarnations.allows(header.to, (*from, header.source)) {
            self.refuse_incarnation(from, header);
            return Err(Drop::WrongIncarnation);
        }
        // Only a message is worth a place.
        if header.kind != Kind::Rts {
            return Err(Drop::NoMessage);
        }
        let at = self.enter_peer(*from, header.source, header.to).ok_or(Drop::Peers)?;
        self.associate(at, header.from, now);
        Ok(at)
    }

    /// Answers a packet of an association that is no more, so that its sender learns of it.
    fn refuse_incarnation(&mut self, from: &Endpoint, header: &Header) {
        let reply = match header.kind {
            Kind::Rts | Kind::End | Kind::Ping => Kind::Reset,
            // A peer that sends its Bye again has missed the answer.
            Kind::Bye => Kind::ByeAck,
            _ => return,
        };
        // A ByeAck must look as if it came from the incarnation that was addressed; a Reset says which there is now.
        let known = self.addresses.get(&(*from, header.source)).map(|at| self.peers[usize::from(*at)].local);
        let local = if reply == Kind::ByeAck { header.to } else { known.unwrap_or(self.incarnations.base) };
        let mut answer = Header::new(reply, [self.config.endpoint, header.source], [local, header.from]);
        answer.packet = if reply == Kind::Reset { header.to } else { 0 };
        self.commands.push(Command::Control { to: *from, header: answer });
    }

    /// Answers a Hello, without keeping anything.
    pub(super) fn on_hello(&mut self, from: &Endpoint, header: &Header) {
        let known = self.addresses.get(&(*from, header.source)).map(|at| &self.peers[usize::from(*at)]);
        let local = match known {
            Some(peer) if peer.state == PeerState::Failing => return,
            Some(peer) => peer.local,
            None => self.incarnations.base,
        };
        let answer = Header::new(Kind::Welcome, [self.config.endpoint, header.source], [local, header.from]);
        self.commands.push(Command::Control { to: *from, header: answer });
    }

    /// A peer of another version cannot be talked to. Its Hello is answered, so that it learns that, too, from our
    /// version.
    pub(super) fn on_other_version(&mut self, from: &Endpoint, (source, incarnation): (u16, u32), hello: bool, now: u64) {
        if hello && incarnation != 0 {
            let header = Header::new(Kind::Reset, [self.config.endpoint, source], [self.incarnations.base, incarnation]);
            self.commands.push(Command::Control { to: *from, header });
        }
        if let Some(at) = self.addresses.get(&(*from, source)).map(|at| usize::from(*at))
            && self.peers[at].state == PeerState::Greeting
        {
            self.fail(at, Error::OtherVersion, false, now);
        }
    }

    pub(super) fn on_welcome(&mut self, from: &Endpoint, header: &Header, now: u64) -> Result<(), Drop> {
        let at = self.addresses.get(&(*from, header.source)).map(|at| usize::from(*at)).ok_or(Drop::NoMessage)?;
        let peer = &self.peers[at];
        if header.to != peer.local {
            return Err(Drop::WrongIncarnation);
        }
        if peer.state != PeerState::Greeting || peer.is_past(header.from) {
            return Err(Drop::Stale);
        }
        self.associate(at, header.from, now);
        Ok(())
    }

    pub(super) fn on_reset(&mut self, from: &Endpoint, header: &Header, now: u64) -> Result<(), Drop> {
        let at = self.addresses.get(&(*from, header.source)).map(|at| usize::from(*at)).ok_or(Drop::NoMessage)?;
        let peer = &self.peers[at];
        if !peer.is_open() || header.to != peer.local || header.packet != peer.remote {
            return Err(Drop::Stale);
        }
        // This is a newer incarnation than the one we knew: the peer has restarted, and may know our incarnation
        // already and have begun messages with it. If we took a new incarnation these would fail, and the peer would
        // take a new one in turn. If it is no newer one, the incarnation that we knew was forged.
        let restarted = header.from != peer.remote && !peer.is_past(header.from);
        self.fail(at, Error::PeerRestarted, restarted, now);
        Ok(())
    }

    /// Begins an association.
    fn associate(&mut self, at: usize, remote: u32, now: u64) {
        let peer = &mut self.peers[at];
        if peer.remote == 0 {
            peer.oldest = remote;
        }
        (peer.state, peer.remote, peer.heard, peer.attempts) = (PeerState::Open, remote, now, 0);
        peer.reset_numbers();
        let command = peer.command(at as u16);
        self.commands.push(command);
        self.watch(at, now);
        self.start_waiting(at, now);
    }

    /// Starts the keep-alive of a peer with which something begins.
    pub(super) fn watch(&mut self, at: usize, now: u64) {
        self.peers[at].heard = now;
        let timer = self.peer_timer(at);
        self.timers.set(timer, now + self.config.keepalive);
    }

    fn peer_timer(&self, at: usize) -> usize {
        usize::from(self.config.sends) + usize::from(self.config.incoming) + at
    }

    /// Asks an idle peer for its incarnation, as there is a message for it.
    pub(super) fn greet(&mut self, at: usize, now: u64) {
        let peer = &mut self.peers[at];
        if peer.state == PeerState::Idle {
            (peer.state, peer.heard, peer.attempts) = (PeerState::Greeting, now, 0);
            self.say_hello(at, now);
        }
    }

    fn say_hello(&mut self, at: usize, now: u64) {
        let peer = &self.peers[at];
        let header = Header::new(Kind::Hello, [self.config.endpoint, peer.endpoint], [peer.local, 0]);
        self.commands.push(Command::Control { to: peer.address, header });
        let deadline = now + self.backoff(peer.attempts);
        let timer = self.peer_timer(at);
        self.timers.set(timer, deadline);
    }

    pub(super) fn peer_timeout(&mut self, at: usize, now: u64) {
        let peer = &mut self.peers[at];
        let keepalive = self.config.keepalive;
        peer.doubt = match peer.doubt {
            Doubt::Begins if peer.is_idle() => {
                // It has almost as long to answer as one with messages.
                peer.heard = peer.heard.max(now.saturating_sub(keepalive));
                Doubt::Asked
            }
            Doubt::Asked if peer.is_idle() && now.saturating_sub(peer.heard) >= keepalive => Doubt::Asked,
            _ => Doubt::None,
        };
        let silent = now.saturating_sub(peer.heard);
        let leaving = peer.state == PeerState::Closing && peer.sends == 0;
        let asked = leaving || peer.is_busy() || peer.doubt == Doubt::Asked;
        if !asked || matches!(peer.state, PeerState::Free | PeerState::Idle | PeerState::Failing) {
            return;
        }
        if silent >= self.config.dead {
            return self.fail(at, Error::PeerDead, false, now);
        }
        if peer.state == PeerState::Greeting {
            peer.attempts = peer.attempts.saturating_add(1);
            return self.say_hello(at, now);
        }
        if leaving {
            peer.attempts += 1;
            return match peer.attempts > self.config.attempts {
                true => self.fail(at, Error::PeerClosed, false, now),
                false => self.farewell(at, now),
            };
        }
        let floor = peer.floor;
        if silent >= keepalive {
            self.control(at, Kind::Ping, |header| header.packet = floor);
        }
        let timer = self.peer_timer(at);
        self.timers.set(timer, now + keepalive);
    }

    /// Sends a Bye to a peer that is being closed, if all messages to it are finished.
    pub(super) fn farewell(&mut self, at: usize, now: u64) {
        let Peer { state, sends, floor, attempts, .. } = self.peers[at];
        if state == PeerState::Closing && sends == 0 {
            self.control(at, Kind::Bye, |header| header.packet = floor);
            let (timer, deadline) = (self.peer_timer(at), now + self.backoff(attempts));
            self.timers.set(timer, deadline);
        }
    }

    pub(super) fn on_bye(&mut self, at: usize, header: &Header, now: u64) {
        self.advance_incoming_floor(at, header.packet);
        self.control(at, Kind::ByeAck, |_| ());
        self.fail(at, Error::PeerClosed, false, now);
    }

    pub(super) fn on_bye_ack(&mut self, at: usize, now: u64) {
        if self.peers[at].state == PeerState::Closing && self.peers[at].sends == 0 {
            self.fail(at, Error::PeerClosed, false, now);
        }
    }

    /// Ends an association: every message of it fails, as soon as the data half has released it.
    pub(super) fn fail(&mut self, at: usize, error: Error, keep_local: bool, now: u64) {
        let peer = &mut self.peers[at];
        (peer.state, peer.error, peer.keep_local) = (PeerState::Failing, error, keep_local);
        let (sent, received) = (peer.sent, peer.received);
        // Messages that were never sent can go to the peer's next incarnation.
        if error != Error::PeerRestarted || self.peers[at].closed {
            self.fail_all_waiting(at, error);
        }
        for handle in sent {
            self.give_up_send(handle, error);
        }
        for handle in received {
            self.give_up_receive(handle, error);
        }
        self.finish_failing(at, now);
    }

    /// Fails everything that waits for an association with a peer: messages to it without a number, and receives that
    /// only its messages could match.
    fn fail_all_waiting(&mut self, at: usize, error: Error) {
        self.fail_waiting(at, error);
        self.fail_posted(at, error);
    }

    /// Completes the end of an association when nothing of it is left.
    pub(super) fn finish_failing(&mut self, at: usize, now: u64) {
        if self.peers[at].state != PeerState::Failing || self.peers[at].releasing > 0 {
            return;
        }
        self.commands.push(Command::DropPeer { peer: at as u16 });
        let timer = self.peer_timer(at);
        self.timers.stop(timer);
        if self.peers[at].closed {
            return self.forget_peer(at);
        }
        if self.peers[at].keep_local {
            self.peers[at].ended = self.peers[at].remote;
        } else {
            // A packet that names our new incarnation comes from the present peer, whatever incarnation an earlier
            // packet claimed.
            let local = self.incarnations.next();
            let peer = &mut self.peers[at];
            (peer.local, peer.remote, peer.ended) = (local, 0, 0);
        }
        let peer = &mut self.peers[at];
        peer.state = PeerState::Idle;
        peer.reset_numbers();
        if peer.first_waiting != 0 {
            self.greet(at, now);
        }
    }

    /// Notes that the data half has released a message of a peer.
    pub(super) fn released_one(&mut self, at: usize, now: u64) {
        self.peers[at].releasing -= 1;
        self.finish_failing(at, now);
    }

    /// Asks the data half to release a message, and to say so.
    pub(super) fn release(&mut self, at: usize, handle: u32, half: Half) {
        self.peers[at].releasing += 1;
        self.commands.push(Command::Release { handle, half, confirm: true });
    }

    /// Takes note that a peer will not send messages below `floor` again.
    pub(super) fn advance_incoming_floor(&mut self, at: usize, floor: u32) {
        let from = self.peers[at].incoming_floor;
        let steps = floor.wrapping_sub(from);
        if !before(from, floor) {
            return;
        }
        if steps > WINDOW {
            return self.counters.drop(Drop::Window);
        }
        for number in (0..steps).map(|step| from.wrapping_add(step)) {
            let handle = core::mem::take(&mut self.peers[at].received[(number % WINDOW) as usize]);
            match self.incoming.get(handle).map(|message| message.state) {
                None => {}
                Some(ReceiveState::Ended(_) | ReceiveState::Placed(_)) => self.forget(handle),
                // The sender has given up a message that we have not finished.
                Some(_) => self.give_up_receive(handle, Error::Aborted),
            }
        }
        let peer = &mut self.peers[at];
        peer.incoming_floor = floor;
        peer.finished = peer.finished.checked_shr(steps).unwrap_or(0);
        if before(peer.next_match, floor) {
            peer.next_match = floor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The incarnation that a newcomer was sent stays valid for a while, but not for a peer that has been forgotten
    /// since: that peer's packets belong to the association that has ended.
    #[test]
    fn an_earlier_incarnation_is_for_those_who_were_not_forgotten() {
        let mut known = Incarnations::new(5);
        let peer = |port| (Endpoint::v4([10, 0, 0, 1], port), 0);
        known.forget(peer(1));
        known.forget(peer(2));
        let allowed = |known: &Incarnations, incarnation| [1, 2, 3].map(|port| known.allows(incarnation, peer(port)));
        assert_eq!(allowed(&known, 5), [false, false, true]);
        assert_eq!(allowed(&known, 6), [true, false, true]);
        assert_eq!((allowed(&known, 4), allowed(&known, 7), allowed(&known, 8)), ([false; 3], [true; 3], [false; 3]));
        (0..FORGOTTEN).for_each(|_| known.forget(peer(4)));
        assert_eq!((allowed(&known, 6), allowed(&known, 7)), ([false; 3], [true; 3]));
    }
}
