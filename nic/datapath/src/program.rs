//! What programs ask, and what they are told. Nothing that comes from them is believed: each message is copied once, its
//! connection must belong to the session, its addresses must lie in the session's memory.

use crate::custody::Custody;
use crate::offloaded::Pending;
use crate::peers::Parcel;
use crate::worker::{Session, Worker};
use baton_abi::layout::{Counter, RING_MESSAGES, session};
use baton_abi::{Cid, Control, MORE, Message, Operation};
use baton_device::Device;
use baton_ring::Full;
use baton_tcp::{Events, Instant};

/// Messages taken from one session before the next has its turn.
const BATCH: usize = 64;

/// Batches that a full ring makes.
const FULL_RING: usize = RING_MESSAGES / BATCH;

impl<H: Device, W: Device> Worker<H, W> {
    #[inline]
    pub(crate) fn poll_sessions(&mut self, now: Instant) -> bool {
        let waiting = |session: &Option<Session>| session.as_ref().is_some_and(|session| session.commands.has_message());
        match self.sessions.iter().position(waiting) {
            Some(first) => self.poll_sessions_from(first, now),
            None => false,
        }
    }

    #[inline(never)]
    fn poll_sessions_from(&mut self, first: usize, now: Instant) -> bool {
        let mut worked = false;
        for id in first..self.sessions.len() {
            worked |= self.poll_session(id, now);
        }
        worked
    }

    /// Runs every command that session `id` has queued so far, at most as many as its ring holds: a program that goes on queueing does not
    /// keep the agent waiting. Only the front reads the sessions' rings, and does so before it passes a command on that needs this.
    pub(crate) fn hear_session_out(&mut self, id: usize, now: Instant) {
        for _ in 0..FULL_RING {
            if !self.is_front() || self.sessions.get(id).is_none_or(Option::is_none) || !self.poll_session(id, now) {
                return;
            }
        }
    }

    /// A program has broken the ring's rules: nothing is read from its session again, and the agent, which is told, takes its connections
    /// back.
    #[cold]
    fn cut_off(&mut self, id: usize) {
        self.counters.add(Counter::BadMessages, 1);
        self.broadcast(|| Parcel::Detach(id as u32));
        self.sessions[id] = None;
        self.tell_agent(Message::control(Operation::OsControl, Control::Detach, Cid(0), id as u32, 0));
    }

    /// Takes up to a batch of a session's messages. Whether there was any.
    pub(crate) fn poll_session(&mut self, id: usize, now: Instant) -> bool {
        let mut worked = false;
        for _ in 0..BATCH {
            let Some(session) = self.sessions[id].as_mut() else { return worked };
            let Some(words) = session.commands.pop() else {
                if session.commands.has_lied() {
                    self.cut_off(id);
                    return true;
                }
                break;
            };
            worked = true;
            let understood = Message::from_words(words).is_some_and(|message| match self.among {
                None => self.on_program_message(id, &message, now),
                Some(_) => self.route_ask(id, &message, now),
            });
            if !understood {
                self.counters.add(Counter::BadMessages, 1);
            }
        }
        if worked && let Some(session) = self.sessions[id].as_mut() {
            // The records of what these messages did are published: now they may be forgotten.
            session.commands.release();
        }
        worked
    }

    pub(crate) fn on_program_message(&mut self, session: usize, message: &Message, now: Instant) -> bool {
        let index = message.cid.slot();
        let memory = match &self.sessions[session] {
            Some(session) => session.memory.len(),
            None => return false,
        };
        let Some(Some(slot)) = self.slots.get_mut(index as usize) else { return false };
        if slot.cid != message.cid {
            return false;
        }
        let Custody::Active(offloaded) = &mut slot.custody else { return false };
        if offloaded.session as usize != session {
            return false;
        }
        let mut events = Events::empty();
        let understood = match message.operation {
            Operation::NicSend => {
                let (address, length) = (message.address as usize, message.length as usize);
                let inside = address >= session::HEAP && length > 0 && length <= 1 << 26 && address + length <= memory;
                let seq = offloaded.tcp.snd_end();
                inside && offloaded.tcp.queue(message.length) && {
                    let room = offloaded.add_pair(message.address, message.length, seq);
                    if !room {
                        // More pieces than were ever advertised: the program broke the interface, and loses the connection.
                        events |= offloaded.tcp.abort();
                    }
                    room
                }
            }
            Operation::NicRecvd => {
                let understood = offloaded.tcp.consumed(message.length);
                offloaded.receive.forget_before(offloaded.tcp.rcv_read());
                understood
            }
            Operation::NicPost => {
                let (address, length) = (message.address as usize, message.length as usize);
                let inside = address >= session::HEAP && length > 0 && length <= 1 << 30 && address + length <= memory;
                inside && offloaded.post(message.address, message.length)
            }
            Operation::NicControl => match control(offloaded, message, now) {
                Some(happened) => {
                    events |= happened;
                    true
                }
                None => false,
            },
            _ => false,
        };
        offloaded.note_events(events);
        if message.operation != Operation::NicSend || message.kind & MORE == 0 {
            self.output.send_all(offloaded, &self.counters, now);
        }
        self.after(index, events);
        understood
    }

    /// Tells every program with news, as far as its ring has room; the rest stays for the next round.
    #[inline(always)]
    pub(crate) fn tell_programs(&mut self) {
        while let Some(index) = self.dirty.pop() {
            if !self.tell_program(index) {
                self.untold.push(index);
            }
        }
        if !self.untold.is_empty() {
            std::mem::swap(&mut self.dirty, &mut self.untold);
        }
    }

    /// Whether everything could be told.
    #[inline(always)]
    fn tell_program(&mut self, index: u32) -> bool {
        let Some(slot) = self.slots[index as usize].as_mut() else { return true };
        let Custody::Active(offloaded) = &mut slot.custody else { return true };
        let Some(Some(session)) = self.sessions.get_mut(offloaded.session as usize) else { return true };
        let told = session.tell(slot.cid, &mut offloaded.pending);
        slot.dirty = told.is_err();
        told.is_ok()
    }
}

impl Session {
    /// Tells the program what is pending, as far as there is room.
    #[inline(always)]
    pub(crate) fn tell(&mut self, cid: baton_abi::Cid, pending: &mut Pending) -> Result<(), Full> {
        self.told += u64::from(pending.received) + 1;
        let told = tell(&mut self.events, cid, pending);
        self.events.publish();
        told
    }
}

/// Tells what is pending, and forgets each thing as it is told: a full ring leaves the rest for later.
#[inline(always)]
fn tell(events: &mut baton_ring::Producer<baton_shm::RingWords>, cid: baton_abi::Cid, pending: &mut Pending) -> Result<(), Full> {
    if pending.received > 0 {
        events.push(Message::new(Operation::OsRecv, cid, pending.received_at, pending.received).to_words())?;
        pending.received = 0;
    }
    if pending.acked > 0 {
        events.push(Message::new(Operation::OsAck, cid, 0, pending.acked).to_words())?;
        pending.acked = 0;
    }
    if pending.ended() { tell_end(events, cid, pending) } else { Ok(()) }
}

#[cold]
fn tell_end(
    events: &mut baton_ring::Producer<baton_shm::RingWords>,
    cid: baton_abi::Cid,
    pending: &mut Pending,
) -> Result<(), Full> {
    while pending.answers > 0 {
        events.push(Message::control(Operation::OsControl, Control::Posted, cid, pending.posted[0], 0).to_words())?;
        pending.posted.rotate_left(1);
        pending.answers -= 1;
    }
    if pending.fin {
        events.push(Message::control(Operation::OsControl, Control::Fin, cid, 0, 0).to_words())?;
        pending.fin = false;
    }
    if pending.closed {
        events.push(Message::control(Operation::OsControl, Control::Closed, cid, pending.error, 0).to_words())?;
        pending.closed = false;
    }
    Ok(())
}

/// `nic_ctrl` from a program: what happened, or None if it makes no sense.
fn control(offloaded: &mut crate::offloaded::Offloaded, message: &Message, now: Instant) -> Option<Events> {
    let tcp = &mut offloaded.tcp;
    match Control::from_number(message.kind)? {
        Control::Shutdown => tcp.shutdown(),
        Control::Abort => return Some(tcp.abort()),
        Control::NoDelay => tcp.set_nodelay(message.address != 0),
        Control::Cork => tcp.set_cork(message.address != 0),
        Control::UserTimeout => tcp.set_user_timeout(message.address),
        Control::KeepAlive => {
            let (on, idle) = (message.address >> 31 != 0, message.address & 0x7fff_ffff);
            tcp.set_keepalive(on, idle, message.length & 0xffff, message.length >> 16, now);
        }
        _ => return None,
    }
    Some(Events::empty())
}
