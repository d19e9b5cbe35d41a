//! Closes a connection on the NIC after its program has closed it.
//!
//! Until the peer has acknowledged the FIN the connection keeps slot, memory and recovery record, so that the kernel
//! can close it if the NIC dies. After that it needs only an entry in the table of [`Closed`](crate::closed::Closed).

use super::Worker;
use super::opening::ANY_DEVICE;
use crate::closed;
use crate::custody::{Custody, Refusal};
use crate::listeners::Opening;
use crate::offloaded::Offloaded;
use baton_abi::layout::Counter;
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::{Checksum, Device};
use baton_shm::Pooled;
use baton_tcp::{Config, Connection, Events, Instant, Segment, State};
use baton_wire::{Flags, Flow, FlowKey, TcpFrame};

impl<H: Device, W: Device> Worker<H, W> {
    /// Sends the FIN of a connection whose program has closed it, and has read the bytes before `read`. If more have
    /// been received the peer is reset, as by Linux (RFC 2525 section 2.17).
    pub(super) fn close(&mut self, cid: Cid, read: u32, now: Instant) -> Result<u32, Refusal> {
        let session = match &self.occupant(cid)?.custody {
            Custody::Active(offloaded) => offloaded.session,
            _ => return Err(Refusal::WrongState),
        };
        self.drain_session(session as usize, now);
        let Some(slot) = self.connections.slots[cid.slot() as usize].as_mut() else { return Err(Refusal::NotYours) };
        let Custody::Active(offloaded) = &mut slot.custody else { return Err(Refusal::WrongState) };
        let offloaded = &mut **offloaded;
        let tcp = &mut offloaded.tcp;
        if matches!(tcp.state(), State::Closed | State::TimeWait) || !slot.held.is_empty() {
            // The agent has been notified of its end, or is to restore it.
            return Err(Refusal::WrongState);
        }
        offloaded.closing = true;
        // The program may have read more than it has reported. One that gives a wrong number harms only itself.
        let unread = tcp.rcv_read().wrapping_add(tcp.readable()) != read;
        let events = if unread { tcp.abort() } else { close_in_order(tcp) };
        self.output.send_all(offloaded, &self.counters, now);
        self.follow_up(cid.slot(), events);
        Ok(0)
    }

    /// Resets a connection whose socket has lost it. Its program gets the event of the end, as if it had aborted the
    /// connection.
    pub(super) fn abort(&mut self, cid: Cid, now: Instant) -> Result<u32, Refusal> {
        self.occupant(cid)?;
        let Some(slot) = self.connections.slots[cid.slot() as usize].as_mut() else { return Err(Refusal::NotYours) };
        let Custody::Active(offloaded) = &mut slot.custody else { return Err(Refusal::WrongState) };
        let offloaded = &mut **offloaded;
        if matches!(offloaded.tcp.state(), State::Closed | State::TimeWait) {
            // The agent has been notified of its end.
            return Err(Refusal::WrongState);
        }
        let events = offloaded.tcp.abort();
        offloaded.note_events(events);
        self.output.send_all(offloaded, &self.counters, now);
        self.follow_up(cid.slot(), events);
        Ok(0)
    }

    /// Processes a segment of a connection that its program has closed. Data resets the peer, as in Linux, since it can
    /// no longer be read.
    pub(super) fn on_segment_of_closing(&mut self, index: u32, segment: &Segment, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        let received = offloaded.tcp.input(segment, now);
        let mut events = received.events;
        if received.place > 0 {
            events |= offloaded.tcp.abort();
        }
        offloaded.note(&received);
        self.output.send_all(offloaded, &self.counters, now);
        self.follow_up(index, events);
    }

    /// Notifies the agent when a connection that its program has closed no longer needs slot and memory.
    #[cold]
    pub(super) fn follow_closing(&mut self, index: u32, events: Events) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &slot.custody else { return };
        let over = offloaded.tcp.state() == State::Closed || closed::is_over(offloaded.tcp.state());
        if over && events.intersects(Events::CLOSED | Events::ABORTED | Events::FIN_ACKED | Events::TIME_WAIT) {
            let cid = slot.cid;
            self.send_to_agent(Message::control(Operation::OsControl, Control::Closed, cid, 0, 0));
        }
    }

    /// Keeps what is left of a connection in FIN-WAIT-2 or TIME-WAIT whose program has closed it.
    pub(super) fn keep_closed(&mut self, offloaded: Pooled<Offloaded>, flow: Flow, now: Instant) {
        if offloaded.closing && closed::is_over(offloaded.tcp.state()) {
            let link = offloaded.image.link;
            self.closed.add(Box::new(Opening { tcp: offloaded.into_inner().tcp.into_inner(), flow, link }), now);
            self.wake_at(self.closed.due());
        }
    }

    /// Takes a segment from the wire that belongs to a connection in FIN-WAIT-2 or TIME-WAIT. False if it belongs to
    /// none, or begins the next connection of the 4-tuple (RFC 6191).
    #[cold]
    pub(super) fn take_closed(&mut self, parsed: &TcpFrame, now: Instant) -> bool {
        let Some(index) = self.closed.find(&FlowKey::from(&parsed.flow)) else { return false };
        if self.frame.checksum == Checksum::Unknown && !parsed.checksum_holds(self.frame.bytes()) {
            self.counters.add(Counter::BadChecksum, 1);
            return true;
        }
        let segment = Segment::from(parsed);
        let answer = self.listeners.secret.answer(&parsed.flow.by(ANY_DEVICE), &segment, &Config::default(), now);
        let Some(rest) = self.closed.get_mut(index) else { return false };
        let is_syn = segment.flags.contains(Flags::SYN) && !segment.flags.intersects(Flags::ACK | Flags::RST | Flags::FIN);
        if is_syn && rest.tcp.admits_successor(&segment, answer.isn) {
            self.closed.remove(index);
            return false;
        }
        let received = rest.tcp.input(&segment, now);
        if received.place > 0 {
            let _ = rest.tcp.abort();
        }
        self.output.send_handshake(rest, &self.counters, now);
        match rest.tcp.state() {
            State::Closed => self.closed.remove(index),
            State::TimeWait if segment.flags.contains(Flags::FIN) => self.closed.wait_again(index, now),
            _ => {}
        }
        true
    }

    /// When this end may open a connection with the 4-tuple; None if it may not. A connection in TIME-WAIT is forgotten
    /// for it.
    pub(super) fn reopen(&mut self, key: &FlowKey) -> Option<Instant> {
        let Some(index) = self.closed.overlapping(key) else { return Some(Instant(0)) };
        let at = self.closed.get_mut(index)?.tcp.reopens_at()?;
        self.closed.remove(index);
        Some(at)
    }

    /// Whether the frame from the kernel opens a connection whose 4-tuple cannot be used yet. The kernel sends its SYN
    /// again.
    #[cold]
    pub(super) fn is_too_early(&mut self, now: Instant) -> bool {
        let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.came_by()) else { return false };
        let Some(index) = self.closed.find(&FlowKey::from(&parsed.flow.reversed())) else { return false };
        if !parsed.flags.contains(Flags::SYN) {
            return false;
        }
        let at = self.closed.get_mut(index).and_then(|rest| rest.tcp.reopens_at());
        if at.is_none_or(|at| now < at) {
            return true;
        }
        self.closed.remove(index);
        false
    }
}

/// Queues the FIN of a connection of which everything has been read.
fn close_in_order(tcp: &mut Connection) -> Events {
    let _ = tcp.consumed(tcp.readable());
    tcp.close();
    // The program may have shut it down before.
    if closed::is_over(tcp.state()) { Events::FIN_ACKED } else { Events::empty() }
}
