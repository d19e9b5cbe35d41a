//! The host's TCP: a worker without devices, in a process of the host, which runs the connections that the NIC lends
//! it. Its frames and events go through the NIC, which alone serves the wire, the programs' rings and the agent.

use super::agent::AgentLink;
use super::frames::needs_kernel;
use super::{Worker, WorkerSettings};
use crate::custody::{Custody, Slot};
use crate::frame_ring::{FrameReceiver, FrameSender};
use crate::growth::Growth;
use crate::offloaded::Offloaded;
use crate::partial::{Arriving, State};
use baton_abi::layout::{RING_MESSAGES, host_tcp, nic};
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::{Capabilities, Device, Frame};
use baton_ring::{go_to_sleep, must_ring, wake_up};
use baton_shm::{Pooled, Region};
use baton_tcp::{Events, Instant, Segment};
use baton_wire::{FlowKey, TcpFrame};
use core::sync::atomic::Ordering;
use std::sync::Arc;

/// Number of consecutive segments of the fast path after which a quiet connection is given back.
const ENOUGH_IN_ORDER: u32 = 8;

/// The host's TCP has no interface of the kernel's.
#[derive(Debug)]
pub struct NoKernel;

impl Device for NoKernel {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: false, segmentation: 0 }
    }

    fn receive(&mut self, _: &mut Frame) -> bool {
        false
    }

    fn transmit(&mut self, _: &mut Frame) -> bool {
        true
    }
}

/// The wire of the host's TCP: the ring of frames to the NIC, which has the real one.
pub struct HostWire {
    frames: FrameSender,
    segmentation: u32,
}

impl Device for HostWire {
    fn capabilities(&self) -> Capabilities {
        // The NIC does the offloads that its wire's device does not.
        Capabilities { checksum: true, segmentation: self.segmentation }
    }

    /// Frames come with the NIC's messages.
    fn receive(&mut self, _: &mut Frame) -> bool {
        false
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        self.frames.send(frame, 0)
    }
}

/// The part of a worker that only the host's TCP has.
pub(super) struct Lender {
    memory: Arc<Region>,
    frames: FrameReceiver,
    /// Parts of a connection's state that have arrived before the image.
    arriving: Arriving,
    /// See [`Worker::is_broken`].
    broken: bool,
}

impl Worker<NoKernel, HostWire> {
    /// Makes the host's TCP over NIC memory and the memory `shared` with the NIC, which must have been connected with
    /// it before ([`Worker::set_host_tcp`]).
    pub fn host_tcp(nic_memory: Arc<Region>, shared: Arc<Region>, settings: WorkerSettings, now: Instant) -> Self {
        let segmentation = shared.word32(host_tcp::SEGMENTATION).load(Ordering::Acquire);
        let wire = HostWire { frames: FrameSender::new(shared.clone(), host_tcp::FRAMES_OUT), segmentation };
        let counters = Arc::new(Region::private(nic::COMMANDS).expect("memory for counters"));
        let mut worker = Worker::assemble(NoKernel, wire, nic_memory, &counters, AgentLink::of_host_tcp(&shared), settings, now);
        let frames = FrameReceiver::new(shared.clone(), host_tcp::FRAMES_IN);
        worker.lender = Some(Box::new(Lender { memory: shared, frames, arriving: Arriving::default(), broken: false }));
        worker
    }

    /// Forgets a session, whose connections have all been given back.
    pub fn detach_lent(&mut self, session: u32) {
        self.forget_session(session);
    }

    /// One round. Returns whether there was anything to do.
    pub fn poll_lent(&mut self, now: Instant) -> bool {
        let Some(lender) = &self.lender else { return false };
        // Read before the messages: all messages that precede these frames are then among those that are read next.
        let frames = lender.frames.waiting_to();
        let mut worked = !self.agent.backlog.is_empty();
        if worked {
            self.flush_backlog();
        }
        // At most as many as the ring holds, since programs may keep the NIC sending messages for ever.
        for _ in 0..RING_MESSAGES {
            let Some(words) = self.agent.commands.pop() else { break };
            self.agent.commands.release();
            worked = true;
            if let Some(message) = Message::from_words(words) {
                self.on_nic_message(&message, now);
            }
        }
        worked |= self.take_lent_frames(frames, now);
        if self.due <= now.0 {
            worked |= self.poll_timers(now);
        }
        self.output.flush(&self.counters);
        while let Some(index) = self.programs.dirty.pop() {
            self.report(index);
        }
        if !self.programs.ended.is_empty() {
            self.report_ended();
        }
        worked
    }

    /// Announces that the host's TCP is going to sleep. False if it must not, since something has arrived.
    pub fn prepare_sleep_lent(&mut self) -> bool {
        let Some(lender) = &self.lender else { return true };
        go_to_sleep(lender.memory.word32(host_tcp::SLEEPING));
        let idle = !self.agent.commands.has_message() && self.agent.backlog.is_empty() && !lender.frames.has_frame();
        if !idle {
            self.end_sleep_lent();
        }
        idle
    }

    /// Announces that the host's TCP is awake.
    pub fn end_sleep_lent(&mut self) {
        if let Some(lender) = &self.lender {
            wake_up(lender.memory.word32(host_tcp::SLEEPING));
        }
    }

    /// Whether the NIC sleeps and its doorbell must be rung. To be asked after every round that had something to do.
    pub fn must_wake_nic(&self) -> bool {
        must_ring(self.nic_memory.word32(nic::SLEEPING))
    }

    fn on_nic_message(&mut self, message: &Message, now: Instant) {
        let cid = message.cid;
        match (message.operation, Control::from_number(message.kind)) {
            (Operation::NicHandoff, _) => self.adopt(cid, now),
            (Operation::NicRestore, _) => {
                // All frames that the NIC has sent before.
                let end = self.lender.as_ref().map_or(0, |lender| lender.frames.waiting_to());
                self.take_lent_frames(end, now);
                self.give_back(cid, now);
            }
            (Operation::NicControl, Some(Control::Range | Control::FinBehindHole)) => {
                if let Some(lender) = &mut self.lender {
                    lender.arriving.take(message);
                }
            }
            (Operation::NicControl, Some(Control::Mtu)) if self.occupant(cid).is_ok() => {
                self.lower_mtu(cid.slot(), message.length, message.address, now);
            }
            _ => {
                let session = match self.occupant(cid) {
                    Ok(Slot { custody: Custody::Active(offloaded), .. }) => offloaded.session as usize,
                    _ => return,
                };
                self.on_program_message(session, message, now);
            }
        }
    }

    /// Takes a connection that the NIC lends.
    fn adopt(&mut self, cid: Cid, now: Instant) {
        if self.try_to_adopt(cid, now).is_none()
            && let Some(lender) = &mut self.lender
        {
            lender.broken = true;
        }
    }

    /// Whether the NIC has lent a connection that could not be taken, which breaks the interface's rules. The process
    /// must end then, and its connections are restored from the recovery records.
    pub fn is_broken(&self) -> bool {
        self.lender.as_ref().is_some_and(|lender| lender.broken)
    }

    fn try_to_adopt(&mut self, cid: Cid, now: Instant) -> Option<()> {
        let index = cid.slot();
        let lender = self.lender.as_mut()?;
        let (arrived, state) = (std::mem::take(&mut lender.arriving), State::read(&lender.memory, index)?);
        let session_memory = self.programs.sessions.get(state.session as usize)?.as_ref()?.memory.clone();
        if !state.memory.fits(&session_memory) || self.connections.slots.get(index as usize)?.is_some() {
            return None;
        }
        let (image, nic_memory) = (*state.image(), self.nic_memory.clone());
        let tcp = state.connection(arrived, now);
        let mut offloaded = Offloaded::new(tcp, &image, state.memory, state.session, session_memory, nic_memory, index)?;
        offloaded.growth = Growth::new(state.memory, state.limits, offloaded.flags_of_block());
        offloaded.continue_record(state.ranges_table);
        let key = FlowKey::from(&image.flow);
        self.connections.slots[index as usize] = Some(Slot::new(key, cid, Custody::Active(Pooled::new(offloaded))));
        self.connections.lookup.insert(&key, index);
        self.connections.count += 1;
        self.follow_up(index, Events::empty());
        self.wake_at(now.0);
        Some(())
    }

    /// Gives a connection back to the NIC, after all frames and events that were sent for it.
    fn give_back(&mut self, cid: Cid, now: Instant) {
        self.output.flush(&self.counters);
        self.report(cid.slot());
        let (Some(slot), Some(lender)) = (self.remove_slot(cid), &self.lender) else { return };
        let Custody::Active(offloaded) = &slot.custody else { return };
        let agent = &mut self.agent;
        let mut send = |control, address, length| {
            agent.send(Message::control(Operation::OsControl, control, cid, address, length));
        };
        let passed = offloaded.pass_on(&lender.memory, now, &mut send);
        send(Control::Returned, u32::from(passed), 0);
    }

    /// Sends the pending events of a connection to the NIC, which passes them on to the program.
    fn report(&mut self, index: u32) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        slot.dirty = false;
        let cid = slot.cid;
        let Some((_, pending)) = slot.take_events() else { return };
        if pending.received > 0 {
            self.agent.send(Message::new(Operation::OsRecv, cid, pending.received_at, pending.received));
        }
        if pending.acked > 0 {
            self.agent.send(Message::new(Operation::OsAck, cid, 0, pending.acked));
        }
        if pending.fin {
            self.agent.send(Message::control(Operation::OsControl, Control::Fin, cid, 0, 0));
        }
        if pending.closed {
            self.agent.send(Message::control(Operation::OsControl, Control::Closed, cid, pending.error, 0));
        }
    }

    /// Processes the frames before position `end` of the ring.
    fn take_lent_frames(&mut self, end: u64, now: Instant) -> bool {
        let mut worked = false;
        while let Some(lender) = &mut self.lender
            && lender.frames.receive_to(end, &mut self.frame).is_some()
        {
            worked = true;
            if let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.frame.interface)
                && let Some(index) = self.connections.find(&FlowKey::from(&parsed.flow))
            {
                self.on_lent_segment(index, &parsed, now);
            }
        }
        worked
    }

    /// Processes a segment of a connection that the NIC has lent, and offers to give it back when it is quiet. A
    /// segment that only the kernel can process is held by the NIC, for the kernel.
    fn on_lent_segment(&mut self, index: u32, parsed: &TcpFrame, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let (cid, segment) = (slot.cid, Segment::from(parsed));
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if needs_kernel(&segment, &offloaded.tcp).is_some() {
            self.output.wire.device.frames.send(&self.frame, cid.0);
            return self.offer(index);
        }
        if offloaded.in_order != u32::MAX {
            offloaded.in_order = if offloaded.tcp.is_fast_segment(&segment) { offloaded.in_order + 1 } else { 0 };
        }
        self.on_segment(index, parsed, now);
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if (ENOUGH_IN_ORDER..u32::MAX).contains(&offloaded.in_order) && offloaded.tcp.is_quiet() {
            self.offer(index);
        }
    }

    /// Offers to give a connection back.
    fn offer(&mut self, index: u32) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        offloaded.in_order = u32::MAX;
        self.agent.send(Message::control(Operation::OsControl, Control::Quiet, slot.cid, 0, 0));
    }
}
