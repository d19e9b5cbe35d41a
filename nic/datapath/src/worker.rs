//! The worker: its state, its round, and the path of a frame.

use crate::active_ack::AckBuffers;
use crate::backlog::Backlog;
use crate::counters::Counters;
use crate::crossbar::Crossbar;
use crate::custody::{Custody, Slot};
use crate::delivery::Delivery;
use crate::fragments::Fragments;
use crate::icmp;
use crate::peers::{Call, FRONT};
use crate::transmit::Output;
use baton_abi::layout::{Counter, nic, session};
use baton_abi::{Control, Message, Operation, RestoreCause};
use baton_active_ack::ActiveAck;
use baton_device::{Checksum, Device, Frame, MAX_FRAME};
use baton_lro::{Lro, Mode};
use baton_moderation::Moderator;
use baton_ring::{Consumer, Producer, go_to_sleep, needs_doorbell, wake_up};
use baton_shm::{Region, RingWords};
use baton_tables::Lookup;
use baton_tcp::seq::{at_or_before, before};
use baton_tcp::{Events, Instant, Segment};
use baton_wire::{Flags, FlowKey, Plain, TcpFrame};
use std::sync::Arc;

/// The settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerSettings {
    /// Largest number of offloaded connections; NIC memory must have as many slots.
    pub slots: usize,
    /// Key of the lookup table's hash; it must be random.
    pub hash_key: [u64; 4],
    /// Number of frames taken from one device before the next source gets its turn.
    pub batch: usize,
    /// Bytes of the frames' buffers.
    pub frame_bytes: usize,
    /// Acknowledge every segment at once.
    pub quick_ack: bool,
    /// Drop frames that arrive while their connection is between two owners, instead of holding them for the next one.
    pub drop_during_moves: bool,
    /// Large receive for the kernel's connections.
    pub lro: baton_lro::LroSettings,
    /// When frames for the kernel are delivered.
    pub moderation: baton_moderation::Mode,
    /// When the doorbells of sleeping programs are rung.
    pub doorbells: baton_moderation::Mode,
    /// Active acknowledgements for what large receive holds.
    pub active_ack: bool,
    /// The NIC is beside the kernel, which has network devices of its own: frames that are not the NIC's are not passed on.
    pub beside: bool,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        WorkerSettings {
            slots: 1024,
            hash_key: [0; 4],
            batch: 32,
            frame_bytes: MAX_FRAME,
            quick_ack: false,
            drop_during_moves: false,
            lro: baton_lro::LroSettings::default(),
            moderation: baton_moderation::Mode::Off,
            doorbells: baton_moderation::Mode::Off,
            active_ack: false,
            beside: false,
        }
    }
}

/// The settings that can be changed at any time.
#[derive(Clone, Copy, Debug)]
pub struct WorkerOffloads {
    /// Large receive.
    pub lro: baton_lro::LroSettings,
    /// When frames for the kernel are delivered.
    pub moderation: baton_moderation::Mode,
    /// When the doorbells of sleeping programs are rung.
    pub doorbells: baton_moderation::Mode,
    /// Active acknowledgements.
    pub active_ack: bool,
}

/// Smallest path MTU in bytes that an ICMP message can set, Linux's net.ipv4.route.min_pmtu.
const MIN_PATH_MTU: u32 = 552;

/// Number of SACK blocks that fit into a header beside timestamps (RFC 2018 section 3).
const MAX_SACK_BLOCKS: usize = 3;

/// The timing wheel of the connections, with ticks of 128 microseconds.
pub(crate) type Wheel = baton_tables::Wheel<128>;

/// A program's session.
pub(crate) struct Session {
    /// Session memory.
    pub memory: Arc<Region>,
    pub commands: Consumer<RingWords>,
    pub events: Producer<RingWords>,
    /// Bytes published to the program since its last doorbell (each event counts as one more), and how many of them the moderator
    /// has accounted for.
    pub unsignalled: u64,
    pub moderated: u64,
    /// Decides when the doorbell of a sleeping program is rung.
    pub moderator: Moderator,
}

impl Session {
    /// Whether the doorbell has to be rung at `now`.
    fn should_ring(&mut self, now: Instant) -> bool {
        if !needs_doorbell(self.memory.word32(session::PROGRAM_SLEEPING)) {
            // A program that is awake reads its ring without a doorbell.
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
        }
        ring
    }
}

/// A worker between the kernel's interface `H` and the wire `W`.
pub struct Worker<H, W> {
    pub(crate) host: H,
    pub(crate) output: Output<W>,
    pub(crate) slots: Vec<Option<Slot>>,
    pub(crate) lookup: Lookup,
    pub(crate) wheel: Wheel,
    pub(crate) sessions: Vec<Option<Session>>,
    pub(crate) nic_memory: Arc<Region>,
    pub(crate) commands: Consumer<RingWords>,
    pub(crate) events: Producer<RingWords>,
    pub(crate) counters: Counters,
    /// Slots with events for their program; and those of them whose program's ring was full in this round.
    pub(crate) dirty: Vec<u32>,
    pub(crate) ring_full: Vec<u32>,
    pub(crate) connections: u64,
    pub(crate) lro: Lro,
    pub(crate) delivery: Delivery,
    pub(crate) fragments: Fragments,
    /// The earliest time at which a connection, an aggregate or a delivery may be due, in microseconds.
    due: u64,
    pub(crate) frame: Frame,
    expired: Vec<u32>,
    agent_unsignalled: bool,
    /// Messages to the agent that found its ring full.
    pub(crate) backlog: Backlog,
    pub(crate) started: bool,
    /// The processor that the worker runs on, plus one; 0 if not known.
    pub(crate) processor: u32,
    pub(crate) settings: WorkerSettings,
    /// Present if active acknowledgements are on, or were on since the start.
    pub(crate) active_ack: Option<Box<ActiveAck<AckBuffers>>>,
    /// This worker's active-acknowledgement buffers.
    pub(crate) own_buffers: Vec<usize>,
    /// Present if there are several workers.
    pub(crate) crossbar: Option<Box<Crossbar>>,
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Makes a worker over NIC memory. If an earlier worker has used the memory the rings continue; its connections are the
    /// agent's to recover.
    pub fn new(host: H, wire: W, nic_memory: Arc<Region>, settings: WorkerSettings, now: Instant) -> Self {
        let commands = Consumer::new(nic_memory.ring(nic::COMMANDS));
        let events = Producer::new(nic_memory.ring(nic::EVENTS));
        let counters = Counters::new(&nic_memory);
        counters.set(Counter::Connections, 0);
        Worker {
            host,
            output: Output::new(wire, settings.frame_bytes),
            slots: (0..settings.slots).map(|_| None).collect(),
            lookup: Lookup::new(settings.slots, settings.hash_key),
            wheel: Wheel::new(now.0),
            sessions: Vec::new(),
            nic_memory,
            commands,
            events,
            counters,
            dirty: Vec::with_capacity(settings.slots),
            ring_full: Vec::with_capacity(settings.slots),
            connections: 0,
            lro: Lro::new(settings.lro, now.0),
            delivery: Delivery::new(settings.moderation),
            fragments: Fragments::default(),
            due: now.0,
            frame: Frame::with_capacity(settings.frame_bytes),
            expired: Vec::new(),
            agent_unsignalled: false,
            backlog: Backlog::default(),
            started: false,
            processor: 0,
            settings,
            active_ack: None,
            own_buffers: Vec::new(),
            crossbar: None,
        }
    }

    /// Adds a program's session with a number of the caller's choice.
    pub fn attach(&mut self, id: u32, memory: Arc<Region>) {
        self.broadcast(|| Call::Attach(id, memory.clone()));
        self.attach_here(id, memory);
    }

    pub(crate) fn attach_here(&mut self, id: u32, memory: Arc<Region>) {
        let at = id as usize;
        if self.sessions.len() <= at {
            self.sessions.resize_with(at + 1, || None);
        }
        let commands = Consumer::new(memory.ring(session::COMMANDS));
        let events = Producer::new(memory.ring(session::EVENTS));
        let moderator = Moderator::new(self.settings.doorbells);
        self.sessions[at] = Some(Session { memory, commands, events, unsignalled: 0, moderated: 0, moderator });
    }

    /// Begins to receive frames. Until then only commands are served: after a NIC's death the agent first steals the flows of the
    /// connections that it is about to restore, so that none of their frames reaches a kernel that does not know them.
    pub fn start(&mut self, now: Instant) {
        self.broadcast(|| Call::Start);
        self.started = true;
        if self.crossbar.is_none() {
            self.take_ack_buffers(0, 1, now);
        }
        self.wake_at(now.0);
    }

    /// Changes the offloads. Frames that wait go to the kernel first.
    pub fn set_offloads(&mut self, set: &WorkerOffloads, now: Instant) {
        self.broadcast(|| Call::Offloads(Box::new(*set)));
        let WorkerOffloads { lro, moderation, doorbells, active_ack } = *set;
        if doorbells != self.settings.doorbells {
            self.settings.doorbells = doorbells;
            self.sessions.iter_mut().flatten().for_each(|session| session.moderator = Moderator::new(doorbells));
        }
        self.settings.active_ack = active_ack;
        if self.started || self.crossbar.is_some() {
            self.set_active_ack(active_ack, now);
        }
        self.settings.lro = baton_lro::LroSettings { hash_key: self.settings.lro.hash_key, ..lro };
        self.settings.moderation = moderation;
        let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
        self.lro.set(self.settings.lro, now.0, &mut |frame| delivery.deliver(frame, host, counters, now.0));
        delivery.flush(host, counters, now.0);
        delivery.set(moderation);
        self.due = now.0;
    }

    /// Sends all frames that wait for the kernel.
    pub(crate) fn flush_to_kernel(&mut self, now: Instant) {
        let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
        self.lro.flush_all(now.0, &mut |frame| delivery.deliver(frame, host, counters, now.0));
        delivery.flush(host, counters, now.0);
    }

    /// The earliest time at which a timer may be due, in microseconds.
    pub(crate) fn due(&self) -> u64 {
        self.due
    }

    /// Makes the timers be checked at `due` microseconds at the latest.
    pub(crate) fn wake_at(&mut self, due: u64) {
        self.due = self.due.min(due);
    }

    /// Sets the processor that the worker runs on, so that programs can learn where their connections are processed.
    #[inline]
    pub fn set_processor(&mut self, processor: usize) {
        let processor = processor as u32 + 1;
        if std::mem::replace(&mut self.processor, processor) != processor {
            for slot in self.slots.iter().flatten() {
                if let Custody::Active(offloaded) = &slot.custody {
                    offloaded.publish_processor(processor);
                }
            }
        }
    }

    /// Counts frames that the host device accepted and then lost.
    pub fn count_lost(&mut self, frames: u64) {
        self.counters.add(Counter::Dropped, frames);
    }

    /// The host's device.
    pub fn host(&mut self) -> &mut H {
        &mut self.host
    }

    /// The wire's device.
    pub fn wire(&mut self) -> &mut W {
        &mut self.output.wire
    }

    /// One round over all sources of work. Returns whether there was any.
    #[inline]
    pub fn poll(&mut self, now: Instant) -> bool {
        let mut worked = false;
        if !self.backlog.is_empty() {
            self.flush_backlog();
        }
        if self.started {
            worked = self.poll_wire(now);
            worked |= self.poll_host(now);
        }
        worked |= self.poll_sessions(now);
        if self.commands.has_message() {
            worked |= self.poll_commands(now);
        }
        if self.due <= now.0 {
            worked |= self.poll_timers(now);
        }
        if !self.dirty.is_empty() {
            self.send_events();
        }
        worked
    }

    /// Processes a batch of frames from the wire, unless the host device is busy. Returns whether there may be more to do.
    #[inline]
    pub(crate) fn poll_wire(&mut self, now: Instant) -> bool {
        if !self.host.is_ready() {
            return true;
        }
        for count in 0..self.settings.batch {
            if !self.output.wire.receive(&mut self.frame) {
                return count > 0;
            }
            self.on_wire_frame(now);
        }
        true
    }

    #[inline]
    fn poll_host(&mut self, now: Instant) -> bool {
        for count in 0..self.settings.batch {
            if !self.host.receive(&mut self.frame) {
                return count > 0;
            }
            self.on_host_frame(now);
        }
        true
    }

    /// The slot of a connection.
    #[inline(always)]
    pub(crate) fn find(&self, key: &FlowKey) -> Option<u32> {
        self.lookup.find(key, |slot| matches!(self.slots.get(slot as usize), Some(Some(found)) if found.key == *key))
    }

    /// The lookup layer: gives the frame from the wire to its connection, or to the kernel.
    #[inline]
    pub(crate) fn on_wire_frame(&mut self, now: Instant) {
        self.counters.add(Counter::WireReceived, 1);
        if !self.fast_path(now) {
            self.on_wire_frame_slow(now);
        }
    }

    /// The fast path: processes a plain segment that is the next one in order, from the frame to the acknowledgement. False, and
    /// nothing is done, for any other frame.
    #[inline(always)]
    fn fast_path(&mut self, now: Instant) -> bool {
        let bytes = self.frame.bytes();
        let verified = self.frame.checksum != Checksum::Unknown;
        let Some((key, plain, payload)) = Plain::parse(bytes, verified) else { return false };
        // The first slot with the same hash is nearly always the right one; the keys are compared below.
        let Some(index) = self.lookup.find(&key, |_| true) else { return false };
        let Some(Some(slot)) = self.slots.get_mut(index as usize) else { return false };
        if slot.key != key || !verified && !plain.checksum_holds(key, bytes) {
            return false;
        }
        let Custody::Active(offloaded) = &mut slot.custody else { return false };
        let offloaded = &mut **offloaded;
        let memory = &offloaded.receive;
        let predicted = offloaded.tcp.predict(&plain, now, |seq| memory.write(seq, payload));
        let Some(predicted) = predicted else { return false };
        self.counters.add(Counter::Segments, 1);
        if predicted.acked > 0 || predicted.events != Events::empty() {
            offloaded.note_acknowledged(predicted.acked, predicted.events);
        }
        if !payload.is_empty() {
            offloaded.note_delivered(plain.seq, plain.length);
        }
        match predicted.acknowledgement {
            Some(acknowledgement) => self.output.acknowledge(offloaded, &acknowledgement, &self.counters, now),
            None => self.output.send_all(offloaded, &self.counters, now),
        }
        if !slot.dirty && offloaded.pending.any() {
            slot.dirty = true;
            self.dirty.push(index);
        }
        if !offloaded.tcp.no_timer() || predicted.events != Events::empty() {
            self.follow_up(index, predicted.events);
        }
        true
    }

    /// The path of all other frames from the wire.
    #[cold]
    #[inline(never)]
    pub(crate) fn on_wire_frame_slow(&mut self, now: Instant) {
        if let Ok(parsed) = TcpFrame::parse(self.frame.bytes())
            && let Some(slot) = self.find(&FlowKey::from(&parsed.flow))
        {
            if self.frame.checksum == Checksum::Unknown && !parsed.checksum_holds(self.frame.bytes()) {
                self.counters.add(Counter::BadChecksum, 1);
                return;
            }
            self.on_segment(slot, &parsed, now);
            return;
        }
        if !self.take_fragment(now) {
            self.deliver_to_kernel(now);
        }
    }

    /// Delivers a frame from the wire that belongs to no offloaded connection to the kernel. ICMP messages about an offloaded
    /// connection's path MTU are used here, too.
    pub(crate) fn deliver_to_kernel(&mut self, now: Instant) {
        if self.connections > 0
            && let Some((flow, seq, mtu)) = icmp::too_big(self.frame.bytes())
        {
            self.on_too_big(&flow, seq, mtu, now);
        }
        if !self.settings.beside {
            self.acknowledge_for_kernel(now);
            let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
            self.lro.receive(&mut self.frame, now.0, &mut |frame| delivery.deliver(frame, host, counters, now.0));
            self.due = self.due.min(self.delivery.due());
        }
    }

    /// Sends a frame to the kernel without delay.
    fn send_to_host(&mut self) {
        if !self.settings.beside {
            crate::delivery::transmit(&mut self.frame, &mut self.host, &self.counters);
        }
    }

    /// Delivers the aggregates that are due, and updates large receive's counters.
    fn expire_aggregates(&mut self, now: Instant) {
        let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
        self.lro.expire(now.0, &mut |frame| delivery.deliver(frame, host, counters, now.0));
        let done = self.lro.counters();
        self.counters.set(Counter::Merged, done.merged);
        self.counters.set(Counter::Aggregates, done.aggregates);
        self.counters.set(Counter::AggregateBytes, done.bytes);
        self.counters.set(Counter::Reordered, done.reordered);
        self.counters.set(Counter::Held, done.held);
    }

    /// Processes a segment of the connection in slot `index`.
    fn on_segment(&mut self, index: u32, parsed: &TcpFrame, now: Instant) {
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        match &mut slot.custody {
            Custody::Active(offloaded) => {
                self.counters.add(Counter::Segments, 1);
                let segment = Segment::from(parsed);
                if let Some(cause) = needs_kernel(&segment, &offloaded.tcp) {
                    // One request is enough; the peer sends again what is not answered.
                    let first = slot.held.is_empty();
                    slot.held.push(parsed, &self.frame);
                    let cid = slot.cid;
                    if first {
                        self.send_to_agent(Message::new(Operation::OsRestore, cid, cause as u32, 0));
                    }
                    return;
                }
                if segment.length > 0 && before(offloaded.tcp.rcv_nxt(), segment.seq) {
                    self.counters.add(Counter::Disordered, 1);
                }
                let received = offloaded.tcp.input(&segment, now);
                if received.place > 0 {
                    let payload = &parsed.payload(self.frame.bytes())[received.skip as usize..][..received.place as usize];
                    offloaded.receive.write(received.place_seq, payload);
                }
                offloaded.note(&received);
                self.output.send_all(offloaded, &self.counters, now);
                self.follow_up(index, received.events);
            }
            Custody::Mirrored => {
                slot.held.push(parsed, &self.frame);
                self.send_to_host();
            }
            Custody::Held | Custody::Leaving(_) => {
                if self.settings.drop_during_moves || !slot.held.push(parsed, &self.frame) {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
        }
    }

    /// Does what follows every change of a connection: enters its time-out into the wheel, lists it if it has events, and
    /// notifies the agent.
    #[inline]
    pub(crate) fn follow_up(&mut self, index: u32, events: Events) {
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        let wanted = offloaded.tcp.next_timeout();
        if wanted != Instant::NEVER && Wheel::tick_of(wanted.0) < slot.scheduled {
            slot.scheduled = self.wheel.enter(index, wanted.0);
        }
        if offloaded.pending.any() && !slot.dirty {
            slot.dirty = true;
            self.dirty.push(index);
        }
        let wants_memory = offloaded.growth.has_request();
        if events.intersects(Events::CLOSED | Events::ABORTED | Events::TIME_WAIT) {
            let cid = slot.cid;
            if events.contains(Events::TIME_WAIT) {
                self.send_to_agent(Message::new(Operation::OsRestore, cid, RestoreCause::Ended as u32, 0));
            } else {
                self.send_to_agent(Message::control(Operation::OsControl, Control::Closed, cid, 0, 0));
            }
        }
        if wants_memory {
            self.request_memory(index);
        }
    }

    /// Processes a frame from the kernel: drops it if the NIC owns its connection, else sends it to the wire.
    #[inline(never)]
    pub(crate) fn on_host_frame(&mut self, now: Instant) {
        self.counters.add(Counter::HostReceived, 1);
        if self.connections > 0
            && let Ok(parsed) = TcpFrame::parse(self.frame.bytes())
            && let Some(index) = self.find(&FlowKey::from(&parsed.flow.reversed()))
            && let Some(slot) = self.slots[index as usize].as_mut()
        {
            if !matches!(slot.custody, Custody::Mirrored) {
                self.counters.add(Counter::Silenced, 1);
                return;
            }
            let covered = mirror_covers(slot, &parsed);
            let word = self.nic_memory.word32(nic::slot(index) + baton_abi::layout::slot::COVERED);
            word.store(u32::from(covered), core::sync::atomic::Ordering::Release);
        }
        if !self.settings.beside {
            self.raise_kernel_acknowledgement(now);
            self.output.forward(&mut self.frame, &self.counters);
        }
    }

    /// Lowers a connection's path MTU as an ICMP message says.
    fn on_too_big(&mut self, flow: &baton_wire::Flow, seq: u32, mtu: u32, now: Instant) {
        let Some(index) = self.find(&FlowKey::from(flow)) else { return };
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        if let Custody::Active(offloaded) = &mut slot.custody {
            // Only a segment in flight can have been too big (RFC 5927 section 7.2), and the MTU is only lowered.
            let tcp = &mut offloaded.tcp;
            let plausible = at_or_before(tcp.snd_una(), seq) && before(seq, tcp.snd_nxt());
            if plausible && mtu >= MIN_PATH_MTU && mtu < offloaded.image.mtu {
                offloaded.image.mtu = mtu;
                tcp.on_mtu_change(mtu, now);
                self.output.send_all(offloaded, &self.counters, now);
                self.follow_up(index, Events::empty());
            }
        }
    }

    /// Does everything that is due. Returns whether a connection was.
    #[cold]
    #[inline(never)]
    pub(crate) fn poll_timers(&mut self, now: Instant) -> bool {
        let mut worked = false;
        let mut expired = std::mem::take(&mut self.expired);
        while let Some(tick) = self.wheel.expire(now.0, &mut expired) {
            worked = true;
            for index in expired.drain(..) {
                self.on_tick(index, tick, now);
            }
        }
        self.expired = expired;
        if self.settings.lro.mode != Mode::Off {
            self.expire_aggregates(now);
        }
        if self.started {
            self.expire_acknowledgements(now);
        }
        if self.delivery.due() <= now.0 {
            self.delivery.flush(&mut self.host, &self.counters, now.0);
        }
        // Before the start the kernel's answers would not be received.
        let active = self.active_ack.as_ref().filter(|_| self.started);
        let acknowledgements = active.map_or(u64::MAX, |active| active.next_tick());
        self.due = self.wheel.next_tick().min(self.lro.next_tick()).min(self.delivery.due()).min(acknowledgements);
        worked
    }

    /// Runs the time-out of the connection in slot `index`, if its entry in the wheel is the one of `tick`.
    fn on_tick(&mut self, index: u32, tick: u64, now: Instant) {
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        if slot.scheduled != tick {
            return;
        }
        slot.scheduled = u64::MAX;
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        let mut events = Events::empty();
        if offloaded.tcp.next_timeout() <= now {
            events = offloaded.tcp.on_timeout(now);
            offloaded.note_events(events);
            self.output.send_all(offloaded, &self.counters, now);
        }
        self.follow_up(index, events);
    }

    /// Sends a message to the agent, through the front worker if this is another one.
    pub(crate) fn send_to_agent(&mut self, message: Message) {
        if let Some(crossbar) = &mut self.crossbar
            && !crossbar.peers.is_front()
        {
            return crossbar.peers.send(FRONT, Call::Agent(message));
        }
        if !self.backlog.is_empty() || self.events.push(message.to_words()).is_err() {
            self.backlog.add(message);
        }
        self.events.publish();
        self.agent_unsignalled = true;
    }

    /// Sends the messages that found the agent's ring full, as far as it has room.
    #[cold]
    pub(crate) fn flush_backlog(&mut self) {
        if self.backlog.flush(&mut self.events) {
            self.events.publish();
            self.agent_unsignalled = true;
        }
    }

    /// Calls `ring` for each session whose program sleeps and was sent events, unless moderation delays it. Returns whether
    /// messages were sent to the agent since the last call: then the caller rings its doorbell, too.
    pub fn doorbells(&mut self, now: Instant, mut ring: impl FnMut(u32)) -> bool {
        for (id, session) in self.sessions.iter_mut().enumerate() {
            if let Some(session) = session
                && session.unsignalled > 0
                && session.should_ring(now)
            {
                self.counters.add(Counter::Doorbells, 1);
                ring(id as u32);
            }
        }
        std::mem::take(&mut self.agent_unsignalled)
    }

    /// Announces that the worker is going to sleep. False if it must not, since something has arrived.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut idle = self.host.is_ready() && self.crossbar.as_mut().is_none_or(|crossbar| crossbar.peers.prepare_sleep());
        if !self.is_front() {
            // Events that the front worker had no room for.
            idle &= self.dirty.is_empty();
        } else {
            go_to_sleep(self.nic_memory.word32(nic::SLEEPING));
            idle &= !self.commands.has_message() && self.backlog.is_empty();
            for session in self.sessions.iter().flatten() {
                go_to_sleep(session.memory.word32(session::NIC_SLEEPING));
                idle &= !session.commands.has_message();
            }
        }
        if !idle {
            self.end_sleep();
        }
        idle
    }

    /// Announces that the worker is awake.
    pub fn end_sleep(&mut self) {
        if let Some(crossbar) = &self.crossbar {
            crossbar.peers.end_sleep();
        }
        if self.is_front() {
            wake_up(self.nic_memory.word32(nic::SLEEPING));
            for session in self.sessions.iter().flatten() {
                wake_up(session.memory.word32(session::NIC_SLEEPING));
            }
        }
    }

    /// Whether this is the front worker, which serves the rings of agent and programs.
    pub(crate) fn is_front(&self) -> bool {
        self.crossbar.as_ref().is_none_or(|crossbar| crossbar.peers.is_front())
    }

    /// When a timer is due next, in microseconds; None if none is set.
    pub fn next_timeout(&self) -> Option<u64> {
        let delivery = Some(self.delivery.due()).filter(|due| *due != u64::MAX);
        let acknowledgements = self.active_ack.as_ref().filter(|_| self.started).and_then(|active| active.next_expiry());
        let unsignalled = self.sessions.iter().flatten().filter(|session| session.unsignalled > 0);
        let doorbells = unsignalled.filter_map(|session| session.moderator.due()).min();
        let others = self.lro.next_expiry().into_iter().chain(delivery).chain(doorbells).chain(self.crossbar_due());
        self.wheel.next_expiry().into_iter().chain(acknowledgements).chain(others).min()
    }
}

/// Whether a segment has to be processed by the kernel, and why: it is held, the connection is restored, and the kernel gets the
/// segment. The kernel knows best what a reset means to the program and its socket. The NIC has no urgent data: a segment that
/// announces some goes to the kernel before any of its bytes is accepted.
pub(crate) fn needs_kernel(segment: &Segment, tcp: &baton_tcp::Connection) -> Option<RestoreCause> {
    if segment.flags.contains(Flags::RST) {
        return (segment.seq == tcp.rcv_nxt()).then_some(RestoreCause::Reset);
    }
    let current = at_or_before(tcp.rcv_nxt(), segment.end()) && at_or_before(segment.seq, tcp.rcv_adv());
    (segment.flags.contains(Flags::URG) && current).then_some(RestoreCause::Urgent)
}

/// Whether the mirrored frames cover everything that the kernel holds out of order, judged by an acknowledgement of the kernel's:
/// it reports no SACK block, or fewer than a header has room for, so that these are all, and the frames cover them.
fn mirror_covers(slot: &mut Slot, parsed: &TcpFrame) -> bool {
    if !parsed.flags.contains(Flags::ACK) {
        return false;
    }
    slot.held.acknowledged(parsed.ack);
    let blocks = parsed.options.sack.as_slice();
    let held = &slot.held;
    let beyond = || blocks.iter().filter(|block| before(parsed.ack, block.1));
    !held.overflowed && beyond().count() < MAX_SACK_BLOCKS && beyond().all(|block| held.covers(block.0, block.1))
}
