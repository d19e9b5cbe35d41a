//! Commands of a program that waits for each to be taken ([`baton_abi::ANSWER`]). Sending takes longer than answering,
//! and the program would wait meanwhile. So a command is answered first, and its bytes are sent together with those of
//! commands that follow at once.

use super::Worker;
use super::programs::{Session, Taken};
use crate::counters::Counters;
use crate::custody::Custody;
use crate::offloaded::Offloaded;
use baton_abi::layout::{Counter, session};
use baton_abi::{Cid, Control, Message, OF_ALL, Operation};
use baton_device::Device;
use baton_tcp::Instant;
use core::sync::atomic::Ordering;

/// Most commands, and most bytes, that are sent together; the bytes of eight large frames.
const MESSAGES: u32 = 64;
const BYTES: u32 = 1 << 19;

/// Number of polls for the next command, some two microseconds, in which a program sees the answer and begins its next
/// send; and most polls while it copies that send's bytes.
const LOOKS: u32 = 100;
const COPYING_LOOKS: u32 = 800;

/// Most polls for all commands that are sent together, some 80 microseconds, since other programs wait meanwhile.
const ALL_LOOKS: u32 = 4000;

/// Microseconds for which bytes of a stream wait for the next message: about as long as a program that slept needs to
/// wake up and to copy.
const PUT_OFF: u64 = 40;

/// Microseconds after which an answer for which there was no room is tried again.
const AGAIN: u64 = 5000;

/// Microseconds after which the next command no longer counts as part of a stream.
const STREAM: u64 = 200;

/// The last message that was answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    at: Instant,
    /// The connection's slot, and how far it had received: a program that sends after it has received data may wait for
    /// more before it continues.
    index: u32,
    received: u32,
}

/// An answer for which the program's ring had no room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owed {
    cid: Cid,
    /// When it is tried again: the program does not wake the NIC when it reads its ring.
    pub at: Instant,
}

/// Queued bytes that wait for the next command.
#[derive(Clone, Copy, Debug)]
pub(super) struct PutOff {
    session: usize,
    /// The connection's slot.
    index: u32,
    until: Instant,
}

impl Session {
    /// Reports to the program that its messages so far have been read, of which the last that is to be answered was
    /// this connection's. Without room the next answer that finds some is for all connections: whose are owed then is
    /// not kept.
    pub(super) fn answer(&mut self, cid: Cid, counters: &Counters, now: Instant) {
        let whose = if self.owed.is_some() { OF_ALL } else { 0 };
        let message = Message::control(Operation::OsControl, Control::Taken, cid, whose, 0);
        if self.events.push(message.to_words()).is_err() {
            self.owed = Some(Owed { cid, at: now.after(AGAIN) });
            return;
        }
        self.owed = None;
        counters.add(Counter::ToProgramControl, 1);
        self.events.publish();
        self.unsignalled += 1;
    }

    /// Tries again to send an answer for which there was no room.
    #[inline]
    pub(super) fn answer_again(&mut self, counters: &Counters, now: Instant) {
        if let Some(owed) = self.owed
            && owed.at.0 <= now.0
        {
            self.answer(owed.cid, counters, now);
        }
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Ends the wait of bytes for a command of session `id`, and returns their connection's slot, if there are any.
    #[inline]
    pub(super) fn end_waiting(&mut self, id: usize) -> Option<u32> {
        self.programs.put_off.take_if(|put_off| put_off.session == id).map(|put_off| put_off.index)
    }

    /// Sends the waiting bytes if their time is over.
    #[cold]
    pub(super) fn send_put_off(&mut self, now: Instant) {
        if let Some(put_off) = self.programs.put_off.take_if(|put_off| put_off.until.0 <= now.0) {
            self.send_gathered(put_off.session, put_off.index, now);
        }
    }

    /// Called after a command that has queued bytes on the connection in slot `unsent`, and has been answered. Takes
    /// and answers commands that follow at once, and sends all bytes together, or lets them wait for more.
    #[cold]
    pub(super) fn gather(&mut self, id: usize, unsent: &mut Option<u32>, now: Instant) -> Taken {
        let mut looks = ALL_LOOKS;
        for _ in 1..MESSAGES {
            if !self.is_followed(id, *unsent, &mut looks) {
                break;
            }
            match self.take_messages(id, unsent, now) {
                Taken::Answered => {}
                other => return other,
            }
        }
        let Some(index) = unsent.take() else { return Taken::Answered };
        if self.goes_on(id, index, now) && self.programs.put_off.is_none() {
            self.programs.put_off = Some(PutOff { session: id, index, until: now.after(PUT_OFF) });
        } else {
            self.send_gathered(id, index, now);
        }
        Taken::Answered
    }

    /// Whether the next command comes at once, and there is room for it. Subtracts the polls that this takes from
    /// `looks`.
    fn is_followed(&self, id: usize, unsent: Option<u32>, looks: &mut u32) -> bool {
        let Some(session) = &self.programs.sessions[id] else { return false };
        let Some(offloaded) = unsent.and_then(|index| self.active(index)) else { return false };
        has_room(offloaded)
            && !session.sleeps()
            && (0..COPYING_LOOKS.min(*looks)).take_while(|look| *look < LOOKS || offloaded.is_entered()).any(|_| {
                *looks -= 1;
                core::hint::spin_loop();
                session.commands.has_message()
            })
    }

    /// Whether the command just answered is part of a stream that only the program's sleep, or another thread on its
    /// processor, has interrupted. Remembers the command.
    fn goes_on(&mut self, id: usize, index: u32, now: Instant) -> bool {
        let Some((received, has_room)) = self.active(index).map(|offloaded| (offloaded.tcp.rcv_nxt(), has_room(offloaded)))
        else {
            return false;
        };
        let Some(session) = self.programs.sessions[id].as_mut() else { return false };
        let last = session.answered.replace(Answered { at: now, index, received });
        has_room && last.is_some_and(|last| (last.index, last.received) == (index, received) && now.since(last.at) < STREAM)
    }

    fn active(&self, index: u32) -> Option<&Offloaded> {
        match &self.connections.slots.get(index as usize)?.as_ref()?.custody {
            Custody::Active(offloaded) => Some(offloaded),
            _ => None,
        }
    }

    /// Sends the queued bytes of the connection in slot `index`, and shows the program meanwhile that the
    /// NIC is sending.
    fn send_gathered(&mut self, id: usize, index: u32, now: Instant) {
        let note = |worker: &Self, sending: u32| {
            if let Some(Some(session)) = worker.programs.sessions.get(id) {
                session.memory.word32(session.area + session::NIC_SENDING).store(sending, Ordering::Relaxed);
            }
        };
        note(self, 1);
        self.send_queued(Some(index), now);
        self.output.flush(&self.counters);
        note(self, 0);
    }
}

/// Whether more bytes may be gathered.
fn has_room(offloaded: &Offloaded) -> bool {
    offloaded.tcp.unsent() < BYTES.min(offloaded.most_of_send_memory())
}
