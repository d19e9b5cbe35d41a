//! Partial offload on the NIC: connections of which the NIC runs only the fast path. A connection that leaves it is
//! lent to the host's TCP. Until it is back, its frames and its program's messages go there, and the agent's commands
//! wait.
//!
//! The order is kept: the NIC sends the state before anything else, and nothing more once it has recalled the
//! connection. Frames and messages that arrive after that are held until the state is back.

use super::programs::Session;
use super::{Worker, peer_fin};
use crate::custody::Custody;
use crate::frame_ring::{FrameReceiver, FrameSender};
use crate::offloaded::Offloaded;
use crate::partial::{Arriving, Lent, Path, State};
use baton_abi::layout::{Counter, host_tcp, nic, slot};
use baton_abi::{Cid, Control, FOR_AGENT, Message, Operation};
use baton_device::{Checksum, Device};
use baton_ring::{Consumer, Producer, must_ring};
use baton_shm::{Region, RingWords};
use baton_tcp::{Events, Instant};
use baton_wire::TcpFrame;
use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

/// Largest number of messages from the host's TCP that are handled in a round.
const BATCH: usize = 256;

/// Room in the ring to the host's TCP, in messages, that is needed before programs' commands are read: a batch from
/// many programs, which may also cause connections to be lent.
const TURN: u64 = 1024;

/// Largest number of a program's messages that wait for a connection to come back, which takes some microseconds.
const MOST_WAITING: usize = 1 << 16;

/// The NIC's end of the memory that it shares with the host's TCP.
pub(super) struct HostTcp {
    memory: Arc<Region>,
    commands: Producer<RingWords>,
    /// Messages for which the ring had no room.
    overflow: VecDeque<Message>,
    events: Consumer<RingWords>,
    frames_in: FrameSender,
    frames_out: FrameReceiver,
    /// What has come ahead of a connection's state.
    arriving: Arriving,
    /// A message or frame was sent since the doorbell was last checked.
    unsignalled: bool,
}

impl HostTcp {
    fn new(memory: Arc<Region>) -> HostTcp {
        HostTcp {
            commands: Producer::new(memory.ring(host_tcp::COMMANDS)),
            overflow: VecDeque::new(),
            events: Consumer::new(memory.ring(host_tcp::EVENTS)),
            frames_in: FrameSender::new(memory.clone(), host_tcp::FRAMES_IN),
            frames_out: FrameReceiver::new(memory.clone(), host_tcp::FRAMES_OUT),
            arriving: Arriving::default(),
            unsignalled: false,
            memory,
        }
    }

    fn send(&mut self, message: Message) {
        self.overflow.push_back(message);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(message) = self.overflow.front() {
            if self.commands.push(message.to_words()).is_err() {
                break;
            }
            self.overflow.pop_front();
        }
        self.commands.publish();
        self.unsignalled = true;
    }

    /// Whether there is room for the programs' commands of a round. Programs may send without end, and the host's TCP
    /// takes longer for a message than the NIC for passing it on: without room the commands stay in the programs'
    /// rings. Besides, frames must not overtake messages that wait here: meanwhile the frames of all lent connections
    /// would be dropped.
    pub fn takes_messages(&mut self) -> bool {
        self.overflow.is_empty() && self.commands.has_room(TURN)
    }

    /// Whether no message or frame has come from the host's TCP, and none waits to be sent to it.
    pub fn is_idle(&self) -> bool {
        self.overflow.is_empty() && !self.events.has_message() && !self.frames_out.has_frame()
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Connects the worker, which must be the only one, with a host's TCP by memory that the two share.
    pub fn set_host_tcp(&mut self, memory: Arc<Region>) {
        let segmentation = self.output.wire.device.capabilities().segmentation;
        memory.word32(host_tcp::SEGMENTATION).store(segmentation, Ordering::Release);
        self.host_tcp = Some(Box::new(HostTcp::new(memory)));
        self.has_extras = true;
    }

    /// Keeps only the fast path of a session's connections from now on. False if there is no such session, or no host's
    /// TCP.
    pub fn keep_fast_path(&mut self, session: u32) -> bool {
        let Some(Some(session)) = self.programs.sessions.get_mut(session as usize) else { return false };
        session.fast_path = self.host_tcp.is_some();
        session.fast_path
    }

    /// Whether the host's TCP sleeps and was sent something: then its doorbell must be rung.
    pub fn must_wake_host_tcp(&mut self) -> bool {
        let Some(host) = self.host_tcp.as_deref_mut() else { return false };
        std::mem::take(&mut host.unsignalled) && must_ring(host.memory.word32(host_tcp::SLEEPING))
    }

    /// Lends a connection to the host's TCP. False, and nothing is done, if it cannot be.
    #[cold]
    #[inline(never)]
    pub(super) fn lend(&mut self, index: u32, now: Instant) -> bool {
        let Some(host) = self.host_tcp.as_deref_mut() else { return false };
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        let Custody::Active(offloaded) = &slot.custody else { return false };
        let (cid, shared) = (slot.cid, host.memory.clone());
        let part = |control, address, length| Message::control(Operation::NicControl, control, cid, address, length);
        if !offloaded.pass_on(&shared, now, |control, address, length| host.send(part(control, address, length))) {
            return false;
        }
        host.send(Message::new(Operation::NicHandoff, cid, 0, 0));
        if let Custody::Active(offloaded) = std::mem::replace(&mut slot.custody, Custody::Held) {
            if let Some(session) = session_of(&mut self.programs.sessions, &offloaded) {
                session.lent += 1;
            }
            let lent = Lent { offloaded, recalled: false, commands: Vec::new(), messages: Vec::new() };
            slot.custody = Custody::Lent(Box::new(lent));
        }
        self.counters.add(Counter::Lent, 1);
        self.note_transition(index);
        true
    }

    /// Counts in the slot, for `baton ls`, that a connection was lent or has come back.
    fn note_transition(&self, index: u32) {
        let word = self.nic_memory.word32(nic::slot(index) + slot::LENT);
        word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Lends a connection whose state is not that of the fast path, unless a frame is held that only the kernel can
    /// process.
    pub(super) fn lend_unless_quiet(&mut self, index: u32, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return };
        if let Custody::Active(offloaded) = &slot.custody
            && offloaded.is_on_fast_path()
            && slot.held.is_empty()
            && !offloaded.tcp.is_quiet()
        {
            self.lend(index, now);
        }
    }

    /// Changes a connection's path to `to`, if it is `from` now.
    pub(super) fn set_path(&mut self, index: u32, from: Path, to: Path) {
        if let Some(Some(slot)) = self.connections.slots.get_mut(index as usize)
            && let Custody::Active(offloaded) = &mut slot.custody
            && offloaded.path == from
        {
            offloaded.path = to;
        }
    }

    /// Gives the frame from the wire to the host's TCP, or holds it if its connection was recalled.
    pub(super) fn give_to_host_tcp(&mut self, index: u32, parsed: &TcpFrame) {
        let Some(host) = self.host_tcp.as_deref_mut() else { return };
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Lent(lent) = &slot.custody else { return };
        if self.frame.checksum == Checksum::Unknown {
            // The caller has verified the checksum.
            self.frame.checksum = Checksum::Verified;
        }
        let taken = if lent.recalled {
            slot.held.push(parsed, &self.frame)
        } else {
            // Frames must not overtake messages.
            host.unsignalled = true;
            host.overflow.is_empty() && host.frames_in.send(&self.frame, 0)
        };
        self.counters.add(if taken { Counter::LentSegments } else { Counter::Dropped }, 1);
    }

    /// Whether a program's message is for the host's TCP: its connection is lent, or leaves its fast path with this
    /// message.
    pub(super) fn lent_for(&mut self, index: u32, message: &Message, now: Instant) -> bool {
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return false };
        let control = Control::from_number(message.kind).filter(|_| message.operation == Operation::NicControl);
        match &slot.custody {
            Custody::Lent(_) => true,
            Custody::Active(offloaded) => {
                let ends = matches!(control, Some(Control::Shutdown | Control::Abort));
                ends && offloaded.is_on_fast_path() && self.lend(index, now)
            }
            _ => false,
        }
    }

    /// Sends a program's message to the host's TCP, which checks its numbers. False if a program may not send such a
    /// message there, or if too many wait.
    pub(super) fn relay(&mut self, index: u32, message: &Message) -> bool {
        is_of_program(message) && self.pass_on(index, message)
    }

    /// Sends a message about a connection that is lent, or keeps it until the connection is back.
    fn pass_on(&mut self, index: u32, message: &Message) -> bool {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        let (Custody::Lent(lent), Some(host)) = (&mut slot.custody, self.host_tcp.as_deref_mut()) else { return false };
        if !lent.recalled {
            host.send(*message);
            return true;
        }
        let room = lent.messages.len() < MOST_WAITING;
        if room {
            lent.messages.push(*message);
        }
        room
    }

    /// Passes a path MTU from an ICMP message on to the host's TCP, if the connection is lent, or lends it: segments
    /// were lost, which the fast path does not handle.
    pub(super) fn pass_on_mtu(&mut self, index: u32, seq: u32, mtu: u32, now: Instant) -> bool {
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return false };
        let lent = match &slot.custody {
            Custody::Lent(_) => true,
            Custody::Active(offloaded) => offloaded.is_on_fast_path() && self.lend(index, now),
            _ => false,
        };
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return false };
        let cid = slot.cid;
        lent && self.pass_on(index, &Message::control(Operation::NicControl, Control::Mtu, cid, mtu, seq))
    }

    /// Whether an agent's command has to wait until the connection is back, for which it is recalled.
    pub(super) fn waits_for_return(&mut self, message: &Message) -> bool {
        let index = message.cid.slot();
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        let cid = slot.cid;
        let Custody::Lent(lent) = &mut slot.custody else { return false };
        if cid != message.cid {
            return false;
        }
        lent.commands.push(*message);
        self.recall(index);
        true
    }

    /// Asks the host's TCP for a connection.
    fn recall(&mut self, index: u32) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        if let (Custody::Lent(lent), Some(host)) = (&mut slot.custody, self.host_tcp.as_deref_mut())
            && !lent.recalled
        {
            lent.recalled = true;
            host.send(Message::new(Operation::NicRestore, slot.cid, 0, 0));
        }
    }

    /// Takes the frames and messages of the host's TCP. Returns whether there was any.
    #[inline(never)]
    pub(super) fn poll_host_tcp(&mut self, now: Instant) -> bool {
        let mut worked = self.send_for_host_tcp();
        for _ in 0..BATCH {
            let Some(host) = self.host_tcp.as_deref_mut() else { break };
            if !host.overflow.is_empty() {
                host.flush();
            }
            let Some(words) = host.events.pop() else { break };
            host.events.release();
            worked = true;
            if let Some(message) = Message::from_words(words) {
                self.on_host_message(&message, now);
            }
        }
        worked
    }

    /// Sends the frames of the host's TCP to the wire, and holds those that it has left to the kernel.
    fn send_for_host_tcp(&mut self) -> bool {
        let Some(mut host) = self.host_tcp.take() else { return false };
        let end = host.frames_out.waiting_to();
        let mut worked = false;
        while let Some(tag) = host.frames_out.receive_to(end, &mut self.frame) {
            worked = true;
            if tag == 0 {
                self.output.forward(&mut self.frame, &self.counters);
            } else if let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.frame.interface)
                && let Some(Some(slot)) = self.connections.slots.get_mut(Cid(tag).slot() as usize)
                && slot.cid == Cid(tag)
            {
                slot.held.push(&parsed, &self.frame);
            }
        }
        self.host_tcp = Some(host);
        worked
    }

    fn on_host_message(&mut self, message: &Message, now: Instant) {
        if message.kind & FOR_AGENT != 0 {
            let message = Message { kind: message.kind & !FOR_AGENT, ..*message };
            if (message.operation, Control::from_number(message.kind)) == (Operation::OsControl, Some(Control::Closed)) {
                return self.programs.ended.push(message.cid);
            }
            return self.send_to_agent(message);
        }
        let index = message.cid.slot();
        let Ok(slot) = self.occupant(message.cid) else { return };
        let Custody::Lent(lent) = &mut slot.custody else { return };
        let pending = &mut lent.offloaded.pending;
        match (message.operation, Control::from_number(message.kind)) {
            (Operation::OsRecv, _) => {
                if pending.received == 0 {
                    pending.received_at = message.address;
                }
                pending.received += message.length;
            }
            (Operation::OsAck, _) => pending.acked += message.length,
            (Operation::OsControl, Some(Control::Fin)) => pending.fin = true,
            (Operation::OsControl, Some(Control::Closed)) => (pending.closed, pending.error) = (true, message.address),
            (Operation::OsControl, Some(Control::Quiet)) => return self.recall(index),
            (Operation::OsControl, Some(Control::Returned)) => return self.take_back(index, message.address != 0, now),
            (Operation::OsControl, Some(Control::Range | Control::FinBehindHole)) => {
                if let Some(host) = self.host_tcp.as_deref_mut() {
                    host.arriving.take(message);
                }
                return;
            }
            _ => return,
        }
        let fin = pending.fin && Control::from_number(message.kind) == Some(Control::Fin);
        if !slot.dirty {
            slot.dirty = true;
            self.programs.dirty.push(index);
        }
        if fin {
            peer_fin::came(self, message.cid);
        }
    }

    /// Takes a connection back, and then runs the commands and messages that have waited. `goes_on`: it has not ended.
    fn take_back(&mut self, index: u32, goes_on: bool, now: Instant) {
        // Its frames leave before frames that are sent from here.
        self.send_for_host_tcp();
        let Some(host) = self.host_tcp.as_deref_mut() else { return };
        let (arrived, state) = (std::mem::take(&mut host.arriving), State::read(&host.memory, index));
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Lent(lent) = std::mem::replace(&mut slot.custody, Custody::Held) else { return };
        let Lent { mut offloaded, commands, messages, .. } = *lent;
        match state.filter(|state| goes_on && state.image().flow == slot.flow()) {
            Some(state) => offloaded.go_on(&state, arrived, now),
            // The connection has ended, and its program has got that event.
            None => {
                offloaded.tcp.abort();
                offloaded.tcp.forget_reset();
            }
        }
        offloaded.path = if commands.is_empty() { Path::Fast } else { Path::Pinned };
        let (session, frames) = (offloaded.session as usize, slot.held.take());
        if let Some(session) = session_of(&mut self.programs.sessions, &offloaded) {
            session.lent = session.lent.saturating_sub(1);
        }
        slot.custody = Custody::Active(offloaded);
        self.counters.add(Counter::TakenBack, 1);
        self.note_transition(index);
        self.note_awake(index);
        for message in messages {
            self.on_program_message(session, &message, now);
        }
        for frame in frames {
            self.frame.copy_from(&frame);
            self.on_wire_frame_slow(now);
        }
        for command in commands {
            self.run_command(&command, now);
        }
        self.set_path(index, Path::Pinned, Path::Fast);
        self.lend_unless_quiet(index, now);
        self.follow_up(index, Events::empty());
    }
}

/// A connection's session. None if the session has ended, even if another session has its number by now.
fn session_of<'a>(sessions: &'a mut [Option<Session>], offloaded: &Offloaded) -> Option<&'a mut Session> {
    let session = sessions.get_mut(offloaded.session as usize)?.as_mut()?;
    Arc::ptr_eq(&session.memory, &offloaded.session_memory).then_some(session)
}

/// Whether a message is one of those that a program may send of a connection. All others are the NIC's own on this
/// ring.
fn is_of_program(message: &Message) -> bool {
    use Control::{Abort, Cork, KeepAlive, NoDelay, Shutdown, UserTimeout};
    match message.operation {
        Operation::NicSend | Operation::NicRecvd => true,
        Operation::NicControl => {
            matches!(Control::from_number(message.kind), Some(Shutdown | Abort | NoDelay | Cork | KeepAlive | UserTimeout))
        }
        _ => false,
    }
}
