//! What programs ask, and what they are told. Nothing that comes from them is believed: each message is copied once, its
//! connection must belong to the session, its addresses must lie in the session's memory.

use crate::custody::Custody;
use crate::offloaded::Pending;
use crate::worker::Worker;
use baton_abi::layout::{Counter, session};
use baton_abi::{Control, Message, Operation};
use baton_device::Device;
use baton_ring::Full;
use baton_tcp::{Events, Instant};

/// Messages taken from one session before the next has its turn.
const BATCH: usize = 64;

impl<H: Device, W: Device> Worker<H, W> {
    pub(crate) fn poll_sessions(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for id in 0..self.sessions.len() {
            worked |= self.poll_session(id, now);
        }
        worked
    }

    /// Takes up to a batch of a session's messages. Whether there was any.
    pub(crate) fn poll_session(&mut self, id: usize, now: Instant) -> bool {
        let mut worked = false;
        for _ in 0..BATCH {
            let Some(session) = self.sessions[id].as_mut() else { return worked };
            let Some(words) = session.commands.pop() else { break };
            worked = true;
            let understood = Message::from_words(words).is_some_and(|message| self.on_program_message(id, &message, now));
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

    fn on_program_message(&mut self, session: usize, message: &Message, now: Instant) -> bool {
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
            Operation::NicRecvd => offloaded.tcp.consumed(message.length),
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
        self.output.send_all(offloaded, &self.counters, now);
        self.after(index, events, now);
        understood
    }

    /// Tells every program with news, as far as its ring has room; the rest stays for the next round.
    pub(crate) fn tell_programs(&mut self) {
        let mut still_dirty = 0;
        for at in 0..self.dirty.len() {
            let index = self.dirty[at];
            if !self.tell_program(index) {
                self.dirty[still_dirty] = index;
                still_dirty += 1;
            }
        }
        self.dirty.truncate(still_dirty);
    }

    /// Whether everything could be told.
    fn tell_program(&mut self, index: u32) -> bool {
        let Some(slot) = self.slots[index as usize].as_mut() else { return true };
        let Custody::Active(offloaded) = &mut slot.custody else { return true };
        let Some(Some(session)) = self.sessions.get_mut(offloaded.session as usize) else { return true };
        if !session.events.has_room(4) {
            return false;
        }
        let base = offloaded.receive_base as u32;
        let told = tell(&mut session.events, slot.cid, base, &offloaded.pending);
        if told.is_ok() {
            offloaded.pending = Pending::default();
            slot.dirty = false;
        }
        session.events.publish();
        session.told = true;
        told.is_ok()
    }
}

fn tell(
    events: &mut baton_ring::Producer<baton_ring::Words>,
    cid: baton_abi::Cid,
    base: u32,
    pending: &Pending,
) -> Result<(), Full> {
    if pending.received > 0 {
        let address = base + pending.received_at;
        events.push(Message::new(Operation::OsRecv, cid, address, pending.received).to_words())?;
    }
    if pending.acked > 0 {
        events.push(Message::new(Operation::OsAck, cid, 0, pending.acked).to_words())?;
    }
    if pending.fin {
        events.push(Message::control(Operation::OsControl, Control::Fin, cid, 0, 0).to_words())?;
    }
    if let Some(error) = pending.closed {
        events.push(Message::control(Operation::OsControl, Control::Closed, cid, error, 0).to_words())?;
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
