//! The programs' commands, and the events that are sent to them. No message from a program is trusted: each message is
//! copied once, its connection must belong to the session, its addresses must lie in the session's memory.

use super::Worker;
use super::gathering::{Answered, Owed, PutOff};
use crate::counters::Counters;
use crate::custody::Custody;
use crate::messages::Messages;
use crate::offloaded::{Offloaded, Pending};
use crate::partial::Path;
use crate::peers::Call;
use baton_abi::layout::{ANSWERED, Counter, RING_MESSAGES, session};
use baton_abi::{ANSWER, Cid, Control, FETCH, HOLD, MORE, Message, Operation, Resource, is_plain_send, join_sends};
use baton_device::Device;
use baton_moderation::{Mode as Moderation, Moderator};
use baton_ring::{Consumer, Full, Producer, has_sleeper, note_rung, wants_ring};
use baton_shm::{Region, RingWords};
use baton_tables::NO_SLOT;
use baton_tcp::{Events, Instant};
use baton_wire::Endpoint;
use core::ops::RangeInclusive;
use core::sync::atomic::{Ordering, fence};
use std::sync::Arc;

/// Number of messages taken from one session before the next one gets its turn.
const BATCH: usize = 64;

/// How many messages ahead of the one being run bytes are prefetched from the program's processor's cache.
const AHEAD: u64 = 4;

/// Largest number of bytes in one `nic_send`, and in one `nic_post`.
const MAX_SEND: usize = 1 << 26;
const MAX_POST: usize = 1 << 30;

/// Number of batches in a full ring.
const RING_BATCHES: usize = RING_MESSAGES / BATCH;

/// From so many bytes at once on a wake counts as one for bulk data: copying them costs the program more than waking
/// up.
const BULK: u64 = 32 << 10;

/// A program's session.
pub(super) struct Session {
    /// Session memory, and this NIC's area in it ([`session::area`]).
    pub memory: Arc<Region>,
    pub area: usize,
    pub commands: Consumer<RingWords>,
    pub events: Producer<RingWords>,
    /// Bytes published to the program since its last doorbell (each event counts as one more), and how many of them the
    /// moderator has accounted for.
    pub unsignalled: u64,
    pub moderated: u64,
    /// Position of the event ring up to which the moderator has counted events.
    pub counted: u64,
    /// Decides when the doorbell of a sleeping program is rung.
    pub moderator: Moderator,
    /// The NIC keeps only the fast path of its connections.
    pub fast_path: bool,
    /// Number of its connections that are lent to the host's TCP.
    pub lent: u32,
    /// The last message that its program waited for ([`ANSWER`]).
    pub answered: Option<Answered>,
    /// An answer for which its ring had no room.
    pub owed: Option<Owed>,
    /// Present in a session for messages, which has no connections.
    pub messages: Option<Box<Messages>>,
}

impl Session {
    /// Whether a worker reads this session's ring: the front worker those for connections, their owners those for
    /// messages.
    pub fn is_served(&self, front: bool) -> bool {
        front || self.messages.is_some()
    }

    /// Whether there are commands that can run now. (A program for messages that does not read its events must not keep
    /// the worker awake.)
    pub fn has_commands(&self) -> bool {
        self.commands.has_message() && self.messages.as_ref().is_none_or(|messages| messages.takes_commands())
    }

    /// Whether the doorbell has to be rung at `now`.
    fn should_ring(&mut self, now: Instant) -> bool {
        let position = self.events.position();
        self.moderator.got(position - std::mem::replace(&mut self.counted, position));
        if !wants_ring(self.memory.word32(session::PROGRAM_SLEEPING)) {
            // A program that is awake, or waking up since it was rung, reads its ring without a doorbell.
            (self.unsignalled, self.moderated) = (0, 0);
            self.moderator.signalled(now.0);
            return false;
        }
        let fresh = self.unsignalled - std::mem::replace(&mut self.moderated, self.unsignalled);
        let enough = !self.moderator.is_on() || fresh > 0 && self.moderator.queued(fresh as usize, now.0);
        let ring = enough || self.moderator.due().is_none_or(|due| due <= now.0);
        if ring {
            (self.unsignalled, self.moderated) = (0, 0);
            self.moderator.signalled(now.0);
            note_rung(self.memory.word32(session::PROGRAM_SLEEPING));
        }
        ring
    }
}

/// Bytes that a connection without pending events has received in this batch and that were not announced to its program
/// yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unannounced {
    /// Slot of the connection; [`NO_SLOT`] if there are no such bytes.
    slot: u32,
    session: u32,
    /// The message that announces them, as the ring holds it.
    message: [u64; 2],
    /// As [`crate::offloaded::Offloaded::fetches`].
    fetches: bool,
}

impl Unannounced {
    /// No bytes.
    pub const NONE: Unannounced = Unannounced { slot: NO_SLOT, session: 0, message: [0; 2], fetches: false };

    /// Whether they are the bytes of the connection in slot `index`: then no other connection has a held
    /// acknowledgement.
    #[inline(always)]
    pub fn is_of(&self, index: u32) -> bool {
        self.slot == index
    }

    /// Whether there are any.
    #[inline(always)]
    pub fn any(&self) -> bool {
        self.slot != NO_SLOT
    }

    /// Adds the `length` bytes from sequence number `seq` on of the connection in slot `index`. Returns the previous
    /// bytes if they belong to another connection.
    #[inline(always)]
    pub fn add(&mut self, index: u32, cid: Cid, offloaded: &Offloaded, seq: u32, length: u32) -> Option<Unannounced> {
        if self.is_of(index) {
            self.message[1] += u64::from(length) << 32;
            return None;
        }
        let earlier = self.any().then_some(*self);
        let message = Message::new(Operation::OsRecv, cid, offloaded.receive.offset_of(seq), length).to_words();
        *self = Unannounced { slot: index, session: offloaded.session, message, fetches: offloaded.fetches };
        earlier
    }

    /// Number of bytes.
    #[inline(always)]
    fn length(&self) -> u32 {
        (self.message[1] >> 32) as u32
    }
}

/// The result of a batch of a session's messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Taken {
    /// They were run, if there were any.
    Some,
    /// They were run, and the program is waiting for the last one to be taken ([`ANSWER`]).
    Answered,
    /// The session has ended.
    Stopped,
}

/// The programs' sessions, and the slots with events for them.
pub(super) struct Programs {
    /// The sessions, by their numbers.
    pub sessions: Vec<Option<Session>>,
    /// Slots with events for their program.
    pub dirty: Vec<u32>,
    /// Slots of `dirty` whose program's ring was full in this round.
    pub ring_full: Vec<u32>,
    /// Connections that have ended. The agent is notified of the end after the program.
    pub ended: Vec<Cid>,
    /// Slots for which a message with [`FETCH`] was read in this batch.
    pub fetched: Vec<u32>,
    /// Connections of messages in this batch that are to be answered.
    pub answers: Vec<Cid>,
    /// Queued bytes that wait for the next command.
    pub put_off: Option<PutOff>,
    /// Address and number of each session for messages, in order; of all workers' sessions.
    pub message_ports: Vec<(Endpoint, u32)>,
}

impl Programs {
    pub fn new(slots: usize) -> Programs {
        let (dirty, ring_full) = (Vec::with_capacity(slots), Vec::with_capacity(slots));
        let (fetched, answers) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let (sessions, ended, message_ports) = (Vec::new(), Vec::new(), Vec::new());
        Programs { sessions, dirty, ring_full, ended, fetched, answers, put_off: None, message_ports }
    }
}

/// The counter of programs' commands with this operation.
#[inline(always)]
fn of_program(operation: Operation) -> Counter {
    match operation {
        Operation::NicSend => Counter::ProgramSend,
        Operation::NicRecvd => Counter::ProgramRecvd,
        Operation::NicPost => Counter::ProgramPost,
        _ => Counter::ProgramControl,
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Adds a program's session with a number of the caller's choice.
    pub fn attach(&mut self, id: u32, memory: Arc<Region>) {
        self.broadcast(|| Call::Attach(id, memory.clone()));
        self.attach_here(id, memory);
    }

    pub(super) fn attach_here(&mut self, id: u32, memory: Arc<Region>) {
        let at = id as usize;
        if self.programs.sessions.len() <= at {
            self.programs.sessions.resize_with(at + 1, || None);
        }
        let area = session::area(self.settings.nic);
        let commands = Consumer::new(memory.ring(area + session::COMMANDS));
        let events = Producer::new(memory.ring(area + session::EVENTS));
        let moderator = Moderator::new(self.settings.doorbells);
        self.programs.sessions[at] = Some(Session {
            memory,
            area,
            commands,
            unsignalled: 0,
            moderated: 0,
            counted: events.position(),
            events,
            moderator,
            fast_path: false,
            lent: 0,
            answered: None,
            owed: None,
            messages: None,
        });
    }

    /// Calls `ring` for each session whose program sleeps and was sent events, unless moderation delays it, with the
    /// processor that the program says it ran on, unless it is woken for bulk data. Returns whether the agent's
    /// doorbell has to be rung, too: messages were sent to it, and moderation does not delay that.
    pub fn doorbells(&mut self, now: Instant, mut ring: impl FnMut(u32, Option<usize>)) -> bool {
        for (id, session) in self.programs.sessions.iter_mut().enumerate() {
            let Some(session) = session else { continue };
            session.answer_again(&self.counters, now);
            if session.unsignalled > 0
                && let bulk = session.unsignalled >= BULK
                && session.should_ring(now)
            {
                self.counters.add(Counter::Doorbells, 1);
                let processor = session.memory.word32(session::PROGRAM_PROCESSOR).load(Ordering::Relaxed);
                ring(id as u32, (processor as usize).checked_sub(1).filter(|_| !bulk));
            }
        }
        let rings = self.agent.should_ring(self.settings.doorbells != Moderation::Off, now.0);
        if rings {
            self.counters.add(Counter::AgentDoorbells, 1);
        }
        rings
    }

    /// Takes a batch of messages from each session that has some. Returns whether there was any.
    #[inline]
    pub(super) fn poll_sessions(&mut self, now: Instant) -> bool {
        let waiting = |session: &Option<Session>| {
            session.as_ref().is_some_and(|session| session.messages.is_none() && session.commands.has_message())
        };
        match self.programs.sessions.iter().position(waiting) {
            Some(first) => self.poll_sessions_from(first, now),
            None => false,
        }
    }

    #[inline(never)]
    fn poll_sessions_from(&mut self, first: usize, now: Instant) -> bool {
        let mut worked = false;
        // Checked once for all sessions, so that one session cannot take all of the room.
        let waits = self.host_tcp.as_deref_mut().is_some_and(|host| !host.takes_messages());
        for id in first..self.programs.sessions.len() {
            let lends = |session: &Option<Session>| session.as_ref().is_some_and(|session| session.lent > 0);
            if waits && self.programs.sessions.get(id).is_some_and(lends) {
                continue;
            }
            worked |= self.poll_session(id, now);
        }
        worked
    }

    /// Runs every command that session `id` has queued so far, at most as many as its ring holds, so that a program
    /// that goes on queueing does not keep the agent waiting. Only worker 0 reads the sessions' rings; it does so
    /// before it forwards an agent's command that depends on this.
    pub(super) fn drain_session(&mut self, id: usize, now: Instant) {
        for _ in 0..RING_BATCHES {
            if !self.is_front() || self.programs.sessions.get(id).is_none_or(Option::is_none) || !self.poll_session(id, now) {
                return;
            }
        }
    }

    /// Stops reading a session whose ring is corrupt, and asks the agent to take its connections back.
    #[cold]
    pub(super) fn stop_session(&mut self, id: usize) {
        self.counters.add(Counter::BadMessages, 1);
        self.forget_datagrams(id as u32);
        self.broadcast(|| Call::Detach(id as u32));
        self.wake_session(id as u32);
        self.programs.sessions[id] = None;
        self.send_to_agent(Message::control(Operation::OsControl, Control::Detach, Cid(0), id as u32, 0));
    }

    /// Takes a session's messages: up to a batch, or several where the program waits for each message to be taken.
    /// Returns whether there was any.
    pub(super) fn poll_session(&mut self, id: usize, now: Instant) -> bool {
        let Some(session) = self.programs.sessions[id].as_ref().filter(|session| session.messages.is_none()) else {
            return false;
        };
        let begun = session.commands.position();
        let mut unsent = self.end_waiting(id);
        let waited = unsent.is_some();
        let mut taken = self.take_messages(id, &mut unsent, now);
        if taken == Taken::Answered {
            taken = self.gather(id, &mut unsent, now);
        }
        if taken == Taken::Stopped {
            return true;
        }
        self.send_queued(unsent, now);
        let mut count = 0;
        if let Some(session) = self.programs.sessions[id].as_mut() {
            // The recovery records cover these messages now, so the ring need not hold them any longer.
            session.commands.release();
            count = session.commands.position().wrapping_sub(begun);
        }
        if !self.programs.fetched.is_empty() {
            self.fetch_more(now);
        }
        waited || count > 0
    }

    /// Takes up to a batch of a session's messages, and answers each that asks for it. `unsent` is the slot of the
    /// connection on which the last ones have queued bytes.
    pub(super) fn take_messages(&mut self, id: usize, unsent: &mut Option<u32>, now: Instant) -> Taken {
        let mut handshake = false;
        self.programs.answers.clear();
        for _ in 0..BATCH {
            let Some(session) = self.programs.sessions[id].as_mut() else { return Taken::Stopped };
            let Some(words) = session.commands.pop() else {
                if session.commands.is_corrupt() {
                    self.send_queued(unsent.take(), now);
                    self.programs.fetched.clear();
                    self.stop_session(id);
                    return Taken::Stopped;
                }
                break;
            };
            // With several workers the bytes are read by the connection's own worker, so there is no prefetch here.
            if self.crossbar.is_none()
                && let Some([first, second]) = session.commands.glance(AHEAD)
                && is_plain_send(first)
            {
                session.memory.prefetch(second as u32 as usize, (second >> 32) as u32);
            }
            let before = session.commands.position() - 1;
            let words = pop_more(&mut session.commands, words);
            let after = session.commands.position();
            let last_of_many = before / ANSWERED != after / ANSWERED;
            let accepted = Message::from_words(words).is_some_and(|message| {
                self.counters.add(of_program(message.operation), after - before);
                let flags = if message.operation == Operation::NicSend { message.kind } else { 0 };
                handshake = flags & ANSWER != 0;
                if last_of_many || handshake {
                    self.programs.answers.push(message.cid);
                }
                if flags & FETCH != 0 {
                    self.programs.fetched.push(message.cid.slot());
                }
                match self.crossbar {
                    _ if message.operation == Operation::NicControl && message.kind == Control::Datagrams as u16 => {
                        self.on_datagrams_message(id, message.address)
                    }
                    None => self.run_program_message(id, &message, unsent, now),
                    Some(_) => self.route_program_message(id, &message, now),
                }
            });
            if !accepted {
                self.counters.add(Counter::BadMessages, 1);
            }
        }
        if self.programs.answers.is_empty() {
            return Taken::Some;
        }
        // The program may be waiting for these answers, so they come before the segments.
        self.record_queued(*unsent, now);
        if let Some(session) = self.programs.sessions[id].as_mut() {
            session.commands.release();
            self.programs.answers.drain(..).for_each(|cid| session.answer(cid, &self.counters, now));
        }
        if handshake { Taken::Answered } else { Taken::Some }
    }

    /// Checks again for queued bytes on the connections in `fetched`: until their command was released, their programs
    /// may have queued more bytes without another command.
    #[cold]
    fn fetch_more(&mut self, now: Instant) {
        while let Some(index) = self.programs.fetched.pop() {
            self.take_up(index, now);
        }
    }

    /// Publishes the recovery record of the connection in slot `unsent`, if there is one.
    fn record_queued(&mut self, unsent: Option<u32>, now: Instant) {
        if let Some(Some(slot)) = unsent.and_then(|index| self.connections.slots.get_mut(index as usize))
            && let Custody::Active(offloaded) = &mut slot.custody
        {
            offloaded.publish(now);
        }
    }

    /// Sends the queued bytes of the connection in slot `unsent`, if there is one.
    pub(super) fn send_queued(&mut self, unsent: Option<u32>, now: Instant) {
        let Some(index) = unsent else { return };
        if let Some(Some(slot)) = self.connections.slots.get_mut(index as usize)
            && let Custody::Active(offloaded) = &mut slot.custody
        {
            self.output.send_all(offloaded, &self.counters, now);
            self.follow_up(index, Events::empty());
        }
    }

    /// Runs a program's message, and sends queued bytes. False if it is malformed or not allowed.
    pub(super) fn on_program_message(&mut self, session: usize, message: &Message, now: Instant) -> bool {
        let mut unsent = None;
        let accepted = self.run_program_message(session, message, &mut unsent, now);
        self.send_queued(unsent, now);
        accepted
    }

    /// Runs a program's message. False if it is malformed or not allowed. Bytes that are queued one message after the
    /// other on the same connection leave together: its slot is `unsent` until another message comes, or
    /// [`Worker::send_queued`] is called.
    fn run_program_message(&mut self, session: usize, message: &Message, unsent: &mut Option<u32>, now: Instant) -> bool {
        let index = message.cid.slot();
        // Bytes of a message with MORE or HOLD do not leave together with earlier bytes.
        let joins = message.operation == Operation::NicSend && message.kind & (MORE | HOLD) == 0 && *unsent == Some(index);
        if !joins {
            self.send_queued(unsent.take(), now);
        }
        let memory = match &self.programs.sessions[session] {
            Some(session) => session.memory.len(),
            None => return false,
        };
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        if slot.cid != message.cid && !cfg!(feature = "sabotage-skip-generation") {
            return false;
        }
        if let Custody::Dormant(_) = slot.custody
            && !(self.parameters(index)[0] as usize == session && self.wake_connection(index))
        {
            return false;
        }
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return false };
        let owner = match &slot.custody {
            Custody::Active(offloaded) => offloaded,
            Custody::Lent(lent) => &lent.offloaded,
            _ => return false,
        };
        if owner.session as usize != session {
            return false;
        }
        if owner.path != Path::Whole && self.lent_for(index, message, now) {
            return self.relay(index, message);
        }
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        let Custody::Active(offloaded) = &mut slot.custody else { return false };
        let mut events = Events::empty();
        let accepted = match message.operation {
            Operation::NicSend if message.kind & FETCH != 0 => {
                offloaded.fetches = true;
                offloaded.take_queued()
            }
            Operation::NicSend => {
                let (address, length) = (message.address as usize, message.length as usize);
                let inside = address >= session::HEAP && length > 0 && length <= MAX_SEND && address + length <= memory;
                let seq = offloaded.tcp.snd_end();
                inside && offloaded.has_room_to_send(message.length) && offloaded.tcp.queue(message.length) && {
                    let room = offloaded.add_pair(message.address, message.length, seq);
                    if !room {
                        // More pairs than were ever advertised: the program has broken the interface, and loses the
                        // connection.
                        events |= offloaded.tcp.abort();
                    }
                    room
                }
            }
            Operation::NicRecvd => {
                let accepted = offloaded.tcp.consumed(message.length);
                let read = offloaded.tcp.rcv_read();
                offloaded.receive.forget_before(read);
                accepted
            }
            Operation::NicPost => {
                let (address, length) = (message.address as usize, message.length as usize);
                let inside = address >= session::HEAP && length > 0 && length <= MAX_POST && address + length <= memory;
                // A connection with posted buffers keeps its scratch, and is never dormant.
                let short = self.resources.free(Resource::Memory) == 0;
                // Posted buffers cannot pass between NIC and host's TCP.
                inside
                    && offloaded.path == Path::Whole
                    && self.lender.is_none()
                    && offloaded.post(message.address, message.length, short)
            }
            Operation::NicControl => match control(offloaded, message, now) {
                Some(new_events) => {
                    events |= new_events;
                    true
                }
                None => false,
            },
            _ => false,
        };
        offloaded.note_events(events);
        let holds = message.operation == Operation::NicSend && message.kind & HOLD != 0;
        if message.operation == Operation::NicSend {
            offloaded.tcp.hold_back(holds);
            if events.is_empty() && !holds {
                if message.kind & MORE == 0 {
                    *unsent = Some(index);
                }
                return accepted;
            }
        }
        self.output.send_all(offloaded, &self.counters, now);
        self.follow_up(index, events);
        accepted
    }

    /// Reports received bytes to a program. If its ring is full, they are pending.
    #[inline(always)]
    pub(super) fn announce(&mut self, unannounced: &Unannounced, now: Instant) {
        let Some(Some(session)) = self.programs.sessions.get_mut(unannounced.session as usize) else { return };
        if session.announce(unannounced, &self.counters).is_err() {
            self.announce_later(unannounced);
        } else if unannounced.fetches {
            self.take_up(unannounced.slot, now);
        }
    }

    /// [`Worker::announce`], since another connection has received bytes.
    #[inline(never)]
    pub(super) fn announce_earlier(&mut self, unannounced: &Unannounced, now: Instant) {
        self.announce(unannounced, now);
    }

    /// [`Worker::announce`], if there are any, before anything else can happen to the connection. There are none
    /// afterwards.
    pub(super) fn announce_and_clear(&mut self, unannounced: &mut Unannounced, now: Instant) {
        let unannounced = std::mem::replace(unannounced, Unannounced::NONE);
        if unannounced.any() {
            self.announce(&unannounced, now);
        }
    }

    #[cold]
    fn announce_later(&mut self, unannounced: &Unannounced) {
        let index = unannounced.slot;
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        (offloaded.pending.received_at, offloaded.pending.received) = (unannounced.message[1] as u32, unannounced.length());
        slot.dirty = true;
        self.programs.dirty.push(index);
    }

    /// Sends the pending events of all connections to their programs, as far as the rings have room; the rest waits for
    /// the next round.
    #[inline(never)]
    pub(super) fn send_events(&mut self, now: Instant) {
        while let Some(index) = self.programs.dirty.pop() {
            let Some(slot) = self.connections.slots[index as usize].as_mut() else { continue };
            let cid = slot.cid;
            let Some(offloaded) = slot.offloaded() else { continue };
            if offloaded.pending.received == 0 {
                self.send_other_events(index, now);
                continue;
            }
            let Some(Some(session)) = self.programs.sessions.get_mut(offloaded.session as usize) else { continue };
            let fetches = offloaded.fetches;
            slot.dirty = session.send_received(cid, &mut offloaded.pending, &self.counters).is_err();
            if slot.dirty {
                self.programs.ring_full.push(index);
            } else if fetches {
                self.take_up(index, now);
            }
        }
        if !self.programs.ring_full.is_empty() {
            std::mem::swap(&mut self.programs.dirty, &mut self.programs.ring_full);
        }
        if !self.programs.ended.is_empty() {
            self.report_ended();
        }
    }

    /// Notifies the agent of connections that have ended. The agent then takes their slots, so their last events are
    /// sent before.
    #[cold]
    pub(super) fn report_ended(&mut self) {
        let ended = std::mem::take(&mut self.programs.ended);
        for cid in ended {
            if self.occupant(cid).is_ok_and(|slot| slot.dirty) {
                self.programs.ended.push(cid);
            } else {
                self.send_to_agent(Message::control(Operation::OsControl, Control::Closed, cid, 0, 0));
            }
        }
    }

    /// Sends what the program of a connection has queued without a message since the NIC last looked (see [`FETCH`]).
    /// The program looks for acknowledgements and released messages after it has queued, and the NIC for queued bytes
    /// after it has reported or released them, so one of them sees the other's.
    #[cold]
    fn take_up(&mut self, index: u32, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if !offloaded.fetches {
            // The slot is another session's connection, whose message was not allowed.
            return;
        }
        fence(Ordering::SeqCst);
        let end = offloaded.tcp.snd_end();
        if offloaded.take_queued() && offloaded.tcp.snd_end() != end {
            self.output.send_all(offloaded, &self.counters, now);
            self.follow_up(index, Events::empty());
            self.output.flush(&self.counters);
        }
    }

    /// Sends the pending events of a connection without received bytes. If acknowledgements are the only events, the
    /// program sleeps, and they free less send memory than it waits for, or it waits for its next message to be taken,
    /// the doorbell is not rung for them, unless the ring is full. A program that is about to sleep looks for
    /// acknowledgements once more. What the peer has acknowledged of a lent connection is known to the host's TCP only.
    #[inline(never)]
    fn send_other_events(&mut self, index: u32, now: Instant) {
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return };
        let (cid, active) = (slot.cid, matches!(slot.custody, Custody::Active(_)));
        let Some(offloaded) = slot.offloaded() else { return };
        let Some(Some(session)) = self.programs.sessions.get_mut(offloaded.session as usize) else { return };
        let (fetches, unsignalled) = (offloaded.fetches, session.unsignalled);
        let waits = || offloaded.frees_too_little() || session.answered.is_some() && session.commands.has_message();
        let silent = active && !offloaded.pending.has_rare() && session.sleeps() && waits();
        slot.dirty = session.send(cid, &mut offloaded.pending, &self.counters).is_err();
        if slot.dirty {
            self.programs.ring_full.push(index);
            return;
        }
        if silent {
            session.unsignalled = unsignalled;
        }
        if fetches {
            self.take_up(index, now);
        }
    }
}

impl Session {
    /// Whether the program seems to sleep.
    pub(super) fn sleeps(&self) -> bool {
        has_sleeper(self.memory.word32(session::PROGRAM_SLEEPING))
    }

    /// Reports received bytes to the program, if the ring has room.
    #[inline(always)]
    fn announce(&mut self, unannounced: &Unannounced, counters: &Counters) -> Result<(), Full> {
        // One number, which is added at once; it cannot wrap, as there are at most as many bytes as receive memory has.
        self.unsignalled += u64::from(unannounced.length().wrapping_add(1));
        counters.add(Counter::ToProgramRecv, 1);
        self.events.push_and_publish(unannounced.message, || ())
    }

    /// Sends pending events, of which received bytes are one, as far as the ring has room.
    #[inline(always)]
    fn send_received(&mut self, cid: Cid, pending: &mut Pending, counters: &Counters) -> Result<(), Full> {
        let received = std::mem::take(&mut pending.received);
        self.unsignalled += u64::from(received) + 1;
        let message = Message::new(Operation::OsRecv, cid, pending.received_at, received);
        let mut sent = self.events.push(message.to_words());
        if sent.is_err() {
            pending.received = received;
        } else {
            counters.add(Counter::ToProgramRecv, 1);
            if pending.any() {
                sent = send(&mut self.events, cid, pending, counters);
            }
        }
        self.events.publish();
        sent
    }

    /// Sends pending events, as far as the ring has room.
    pub(super) fn send(&mut self, cid: Cid, pending: &mut Pending, counters: &Counters) -> Result<(), Full> {
        self.unsignalled += u64::from(pending.received) + 1;
        let sent = send(&mut self.events, cid, pending, counters);
        self.events.publish();
        sent
    }
}

/// Adds to a message those that follow it in the ring, if they are sends of the same connection whose bytes follow each
/// other in memory, too.
#[inline]
fn pop_more(commands: &mut Consumer<RingWords>, [first, mut second]: [u64; 2]) -> [u64; 2] {
    if is_plain_send(first) {
        commands.pop_like(first, |next| {
            let joined = join_sends(second, next).filter(|joined| (joined >> 32) as usize <= MAX_SEND);
            second = joined.unwrap_or(second);
            joined.is_some()
        });
    }
    [first, second]
}

/// Sends pending events, and removes each from `pending` as it is sent: with a full ring the rest remains.
fn send(events: &mut Producer<RingWords>, cid: Cid, pending: &mut Pending, counters: &Counters) -> Result<(), Full> {
    if pending.received > 0 {
        events.push(Message::new(Operation::OsRecv, cid, pending.received_at, pending.received).to_words())?;
        counters.add(Counter::ToProgramRecv, 1);
        pending.received = 0;
    }
    if pending.acked > 0 {
        events.push(Message::new(Operation::OsAck, cid, 0, pending.acked).to_words())?;
        counters.add(Counter::ToProgramAck, 1);
        pending.acked = 0;
    }
    if pending.has_rare() { send_rare_events(events, cid, pending, counters) } else { Ok(()) }
}

/// Sends the events other than received and acknowledged bytes.
#[cold]
fn send_rare_events(events: &mut Producer<RingWords>, cid: Cid, pending: &mut Pending, counters: &Counters) -> Result<(), Full> {
    let mut push = |control, address| -> Result<(), Full> {
        events.push(Message::control(Operation::OsControl, control, cid, address, 0).to_words())?;
        counters.add(Counter::ToProgramControl, 1);
        Ok(())
    };
    while pending.answers > 0 {
        push(Control::Posted, pending.posted[0])?;
        pending.posted.rotate_left(1);
        pending.answers -= 1;
    }
    if pending.fin {
        push(Control::Fin, 0)?;
        pending.fin = false;
    }
    if pending.closed {
        push(Control::Closed, pending.error)?;
        pending.closed = false;
    }
    Ok(())
}

/// Runs a `nic_ctrl` of a program. Returns the connection's events, or None if the command is not allowed.
fn control(offloaded: &mut crate::offloaded::Offloaded, message: &Message, now: Instant) -> Option<Events> {
    /// Bit of the address field of [`Control::KeepAlive`].
    const KEEPALIVE_ON: u32 = 1 << 31;
    /// What Linux accepts for TCP_KEEPIDLE and TCP_KEEPINTVL, and for TCP_KEEPCNT.
    const KEEPALIVE_SECONDS: RangeInclusive<u32> = 1..=32_767;
    const KEEPALIVE_COUNT: RangeInclusive<u32> = 1..=127;
    if offloaded.fetches {
        // What was queued before this command is sent before it takes effect. A program that claims more than fits
        // harms only itself.
        offloaded.take_queued();
    }
    let tcp = &mut offloaded.tcp;
    match Control::from_number(message.kind)? {
        Control::Shutdown => tcp.shutdown(),
        Control::Abort => return Some(tcp.abort()),
        Control::NoDelay => tcp.set_nodelay(message.address != 0),
        Control::Cork => tcp.set_cork(message.address != 0),
        Control::UserTimeout if message.address <= i32::MAX as u32 => tcp.set_user_timeout(message.address),
        Control::KeepAlive => {
            let (on, idle) = (message.address & KEEPALIVE_ON != 0, message.address & !KEEPALIVE_ON);
            let (interval, count) = (message.length & 0xffff, message.length >> 16);
            if ![idle, interval].iter().all(|seconds| KEEPALIVE_SECONDS.contains(seconds)) || !KEEPALIVE_COUNT.contains(&count) {
                return None;
            }
            tcp.set_keepalive(on, idle, interval, count, now);
        }
        _ => return None,
    }
    Some(Events::empty())
}
