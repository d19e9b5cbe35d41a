//! The worker: its state, its round, and the way of a frame.

use crate::acknowledged::Places;
use crate::among::Among;
use crate::backlog::Backlog;
use crate::counters::Counters;
use crate::custody::{Custody, Slot};
use crate::delivery::Delivery;
use crate::fragments::Fragments;
use crate::icmp;
use crate::peers::{FRONT, Parcel};
use crate::transmit::Output;
use baton_abi::layout::{Counter, nic, session};
use baton_abi::{Control, Message, Operation, RestoreCause};
use baton_active_ack::Active;
use baton_device::{Checksum, Device, Frame, MAX_FRAME};
use baton_lro::{Lro, Mode};
use baton_moderation::Moderator;
use baton_ring::{Consumer, Producer, go_to_sleep, needs_doorbell, wake_up};
use baton_shm::{Region, RingWords};
use baton_tables::Lookup;
use baton_tcp::seq::{at_or_before, before};
use baton_tcp::{Events, Instant, Segment};
use baton_wire::{Flags, Name, Plain, TcpFrame};
use std::sync::Arc;

/// What a worker is configured with.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Connections that it can hold; NIC memory must have as many slots.
    pub slots: usize,
    /// Key of the lookup table's hash: random.
    pub hash_key: [u64; 4],
    /// Frames taken from a device before the next source has its turn.
    pub batch: usize,
    /// Bytes of the frames' buffers.
    pub frame_bytes: usize,
    /// Acknowledge every segment at once.
    pub quick_ack: bool,
    /// Frames that come while their connection is between two owners are dropped instead of kept for the next one.
    pub drop_during_moves: bool,
    /// Large receive, for what is the kernel's.
    pub lro: baton_lro::Settings,
    /// When frames that are the kernel's go to it.
    pub moderation: baton_moderation::Mode,
    /// When programs that sleep are told.
    pub doorbells: baton_moderation::Mode,
    /// Acknowledge for the kernel what large receive holds for it.
    pub active_ack: bool,
    /// The kernel has devices of its own, and the NIC hears its connections' frames beside it: nothing is passed on.
    pub beside: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            slots: 1024,
            hash_key: [0; 4],
            batch: 32,
            frame_bytes: MAX_FRAME,
            quick_ack: false,
            drop_during_moves: false,
            lro: baton_lro::Settings::default(),
            moderation: baton_moderation::Mode::Off,
            doorbells: baton_moderation::Mode::Off,
            active_ack: false,
            beside: false,
        }
    }
}

/// What can be set at any time.
#[derive(Clone, Copy, Debug)]
pub struct Offloads {
    /// Large receive.
    pub lro: baton_lro::Settings,
    /// Moderation of what the kernel is given.
    pub moderation: baton_moderation::Mode,
    /// Moderation of what programs are told.
    pub doorbells: baton_moderation::Mode,
    /// Active acknowledgements.
    pub active_ack: bool,
}

/// Time-outs of connections, in buckets of 128 microseconds.
pub(crate) type Wheel = baton_tables::Wheel<128>;

/// A program's session, as the worker sees it.
pub(crate) struct Session {
    pub memory: Arc<Region>,
    pub commands: Consumer<RingWords>,
    pub events: Producer<RingWords>,
    /// What was published that its doorbell has not been rung for, in bytes, each piece of news one more; and how much of it was looked at.
    pub told: u64,
    pub seen: u64,
    /// When the doorbell of a program that sleeps is rung.
    pub moderator: Moderator,
}

impl Session {
    /// Whether the doorbell is to be rung now.
    fn is_to_ring(&mut self, now: Instant) -> bool {
        if !needs_doorbell(self.memory.word32(session::PROGRAM_SLEEPING)) {
            // A program that is awake looks by itself.
            (self.told, self.seen) = (0, 0);
            self.moderator.told(now.0);
            return false;
        }
        let fresh = self.told - std::mem::replace(&mut self.seen, self.told);
        let enough = !self.moderator.is_on() || fresh > 0 && self.moderator.queued(fresh as usize, now.0);
        let ring = enough || self.moderator.due().is_none_or(|due| due <= now.0);
        if ring {
            (self.told, self.seen) = (0, 0);
            self.moderator.told(now.0);
        }
        ring
    }
}

/// One worker between the kernel's interface `H` and the wire `W`.
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
    /// Connections with something to tell their program, and those whose program's ring was full.
    pub(crate) dirty: Vec<u32>,
    pub(crate) untold: Vec<u32>,
    pub(crate) connections: u64,
    pub(crate) lro: Lro,
    pub(crate) delivery: Delivery,
    pub(crate) fragments: Fragments,
    /// When a time-out of a connection's, of an aggregate's or of a delivery may be due, in microseconds.
    due: u64,
    pub(crate) frame: Frame,
    expired: Vec<u32>,
    agent_told: bool,
    /// Messages that found the agent's ring full: none is lost.
    pub(crate) backlog: Backlog,
    pub(crate) started: bool,
    /// The processor that it runs on, plus one; 0 while nobody has said.
    pub(crate) processor: u32,
    pub(crate) settings: Settings,
    /// Set if it acknowledges for the kernel, or has.
    pub(crate) active: Option<Box<Active<Places>>>,
    /// Where it may keep what it acknowledges.
    pub(crate) own_places: Vec<usize>,
    /// Set if there are other workers.
    pub(crate) among: Option<Box<Among>>,
}

impl<H: Device, W: Device> Worker<H, W> {
    /// A worker over NIC memory that another worker may have used before: its rings go on, its connections are the agent's to recover.
    pub fn new(host: H, wire: W, nic_memory: Arc<Region>, settings: Settings, now: Instant) -> Self {
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
            untold: Vec::with_capacity(settings.slots),
            connections: 0,
            lro: Lro::new(settings.lro, now.0),
            delivery: Delivery::new(settings.moderation),
            fragments: Fragments::default(),
            due: now.0,
            frame: Frame::with_capacity(settings.frame_bytes),
            expired: Vec::new(),
            agent_told: false,
            backlog: Backlog::default(),
            started: false,
            processor: 0,
            settings,
            active: None,
            own_places: Vec::new(),
            among: None,
        }
    }

    /// Adds a program's session under a number of the caller's choice.
    pub fn attach(&mut self, id: u32, memory: Arc<Region>) {
        self.broadcast(|| Parcel::Attach(id, memory.clone()));
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
        self.sessions[at] = Some(Session { memory, commands, events, told: 0, seen: 0, moderator });
    }

    /// Lets frames flow. Until then only commands are served: after a NIC's death the agent first steals the flows whose
    /// connections it is about to restore, so that none of their frames meets a kernel that does not know them.
    pub fn start(&mut self, now: Instant) {
        self.broadcast(|| Parcel::Start);
        self.started = true;
        if self.among.is_none() {
            self.take_places(0, 1, now);
        }
        self.wake_at(now.0);
    }

    /// Other offloads for the kernel's connections from now on. What has waited goes to the kernel first.
    pub fn set_offloads(&mut self, set: &Offloads, now: Instant) {
        self.broadcast(|| Parcel::Offloads(Box::new(*set)));
        let Offloads { lro, moderation, doorbells, active_ack } = *set;
        if doorbells != self.settings.doorbells {
            self.settings.doorbells = doorbells;
            self.sessions.iter_mut().flatten().for_each(|session| session.moderator = Moderator::new(doorbells));
        }
        self.settings.active_ack = active_ack;
        if self.started || self.among.is_some() {
            self.set_active_ack(active_ack, now);
        }
        self.settings.lro = baton_lro::Settings { hash_key: self.settings.lro.hash_key, ..lro };
        self.settings.moderation = moderation;
        let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
        self.lro.set(self.settings.lro, now.0, &mut |frame| delivery.give(frame, host, counters, now.0));
        delivery.flush(host, counters, now.0);
        delivery.set(moderation);
        self.due = now.0;
    }

    /// Everything that waits goes to the kernel.
    pub(crate) fn flush_to_kernel(&mut self, now: Instant) {
        let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
        self.lro.flush_all(now.0, &mut |frame| delivery.give(frame, host, counters, now.0));
        delivery.flush(host, counters, now.0);
    }

    pub(crate) fn due(&self) -> u64 {
        self.due
    }

    /// Something may be due then.
    pub(crate) fn wake_at(&mut self, due: u64) {
        self.due = self.due.min(due);
    }

    /// Says which processor the worker runs on, so that programs can learn where their connections are.
    #[inline]
    pub fn set_processor(&mut self, processor: usize) {
        let processor = processor as u32 + 1;
        if std::mem::replace(&mut self.processor, processor) != processor {
            for slot in self.slots.iter().flatten() {
                if let Custody::Active(offloaded) = &slot.custody {
                    offloaded.tell_processor(processor);
                }
            }
        }
    }

    /// Counts frames that the host did not take after all.
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

    /// One round over all sources. Whether there was anything to do.
    #[inline]
    pub fn poll(&mut self, now: Instant) -> bool {
        let mut worked = false;
        if !self.backlog.is_empty() {
            self.tell_the_rest();
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
            self.tell_programs();
        }
        worked
    }

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

    #[inline(always)]
    pub(crate) fn find(&self, name: &Name) -> Option<u32> {
        self.lookup.find(name, |slot| matches!(self.slots.get(slot as usize), Some(Some(found)) if found.name == *name))
    }

    /// The lookup layer: a frame from the wire goes to its connection, or to the kernel.
    #[inline]
    pub(crate) fn on_wire_frame(&mut self, now: Instant) {
        self.counters.add(Counter::WireReceived, 1);
        if !self.predicted(now) {
            self.on_any_wire_frame(now);
        }
    }

    /// The short way of the next segment in order, from the frame to the acknowledgement. False, and nothing is done, if the frame
    /// is another one.
    #[inline(always)]
    fn predicted(&mut self, now: Instant) -> bool {
        let bytes = self.frame.bytes();
        let verified = self.frame.checksum != Checksum::Unknown;
        let Some((name, plain, payload)) = Plain::parse(bytes, verified) else { return false };
        // The first slot with the name's hash is nearly always the right one; names are compared below.
        let Some(index) = self.lookup.find(&name, |_| true) else { return false };
        let Some(Some(slot)) = self.slots.get_mut(index as usize) else { return false };
        if slot.name != name || !verified && !plain.checksum_holds(name, bytes) {
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
            self.after(index, predicted.events);
        }
        true
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn on_any_wire_frame(&mut self, now: Instant) {
        if let Ok(parsed) = TcpFrame::parse(self.frame.bytes())
            && let Some(slot) = self.find(&Name::from(&parsed.flow))
        {
            if self.frame.checksum == Checksum::Unknown && !parsed.checksum_holds(self.frame.bytes()) {
                self.counters.add(Counter::BadChecksum, 1);
                return;
            }
            self.on_segment(slot, &parsed, now);
            return;
        }
        if !self.took_fragment(now) {
            self.pass_from_wire(now);
        }
    }

    /// A frame from the wire that is no offloaded connection's: the kernel's, and what routers say of connections is ours, too.
    pub(crate) fn pass_from_wire(&mut self, now: Instant) {
        if self.connections > 0
            && let Some((flow, seq, mtu)) = icmp::too_big(self.frame.bytes())
        {
            self.on_too_big(&flow, seq, mtu, now);
        }
        if !self.settings.beside {
            self.acknowledge_actively(now);
            let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
            self.lro.receive(&mut self.frame, now.0, &mut |frame| delivery.give(frame, host, counters, now.0));
            self.due = self.due.min(self.delivery.due());
        }
    }

    /// A frame to the kernel that must not wait.
    fn pass_to_host(&mut self) {
        if !self.settings.beside {
            crate::delivery::transmit(&mut self.frame, &mut self.host, &self.counters);
        }
    }

    fn expire_aggregates(&mut self, now: Instant) {
        let (host, counters, delivery) = (&mut self.host, &self.counters, &mut self.delivery);
        self.lro.expire(now.0, &mut |frame| delivery.give(frame, host, counters, now.0));
        let done = self.lro.counters();
        self.counters.set(Counter::Merged, done.merged);
        self.counters.set(Counter::Aggregates, done.aggregates);
        self.counters.set(Counter::AggregateBytes, done.bytes);
        self.counters.set(Counter::Reordered, done.reordered);
        self.counters.set(Counter::Held, done.held);
    }

    fn on_segment(&mut self, index: u32, parsed: &TcpFrame, now: Instant) {
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        match &mut slot.custody {
            Custody::Active(offloaded) => {
                self.counters.add(Counter::Segments, 1);
                let segment = Segment::from(parsed);
                if let Some(cause) = kernels_business(&segment, &offloaded.tcp) {
                    // One request is enough; the peer repeats what it hears no answer to.
                    let first = slot.held.is_empty();
                    slot.held.push(parsed, &self.frame);
                    let cid = slot.cid;
                    if first {
                        self.tell_agent(Message::new(Operation::OsRestore, cid, cause as u32, 0));
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
                self.after(index, received.events);
            }
            Custody::Mirrored => {
                slot.held.push(parsed, &self.frame);
                self.pass_to_host();
            }
            Custody::Held | Custody::Leaving(_) => {
                if self.settings.drop_during_moves || !slot.held.push(parsed, &self.frame) {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
        }
    }

    /// What follows every change of a connection: timers, and what its program and the agent must know.
    #[inline]
    pub(crate) fn after(&mut self, index: u32, events: Events) {
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
        let asks = offloaded.growth.asks();
        if events.intersects(Events::CLOSED | Events::ABORTED | Events::TIME_WAIT) {
            let cid = slot.cid;
            if events.contains(Events::TIME_WAIT) {
                self.tell_agent(Message::new(Operation::OsRestore, cid, RestoreCause::Ended as u32, 0));
            } else {
                self.tell_agent(Message::control(Operation::OsControl, Control::Closed, cid, 0, 0));
            }
        }
        if asks {
            self.ask_for_memory(index);
        }
    }

    /// A frame from the kernel: silence if the NIC owns its connection, else out to the wire.
    #[inline(never)]
    pub(crate) fn on_host_frame(&mut self, now: Instant) {
        self.counters.add(Counter::HostReceived, 1);
        if self.connections > 0
            && let Ok(parsed) = TcpFrame::parse(self.frame.bytes())
            && let Some(index) = self.find(&Name::from(&parsed.flow.reversed()))
            && let Some(slot) = self.slots[index as usize].as_mut()
        {
            if !matches!(slot.custody, Custody::Mirrored) {
                self.counters.add(Counter::Silenced, 1);
                return;
            }
            let covered = judge_mirror(slot, &parsed);
            let word = self.nic_memory.word32(nic::slot(index) + baton_abi::layout::slot::COVERED);
            word.store(u32::from(covered), core::sync::atomic::Ordering::Release);
        }
        if !self.settings.beside {
            self.hear_kernels_acknowledgement(now);
            self.output.forward(&mut self.frame, &self.counters);
        }
    }

    fn on_too_big(&mut self, flow: &baton_wire::Flow, seq: u32, mtu: u32, now: Instant) {
        let Some(index) = self.find(&Name::from(flow)) else { return };
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        if let Custody::Active(offloaded) = &mut slot.custody {
            // Only what is in flight can have been too big (RFC 5927 section 7.2), and only smaller than now.
            let tcp = &mut offloaded.tcp;
            let plausible = at_or_before(tcp.snd_una(), seq) && before(seq, tcp.snd_nxt());
            if plausible && mtu >= 552 && mtu < offloaded.image.mtu {
                offloaded.image.mtu = mtu;
                tcp.on_mtu_change(mtu, now);
                self.output.send_all(offloaded, &self.counters, now);
                self.after(index, Events::empty());
            }
        }
    }

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
        // Before frames flow nobody would hear what the kernel answers.
        let active = self.active.as_ref().filter(|_| self.started);
        let acknowledgements = active.map_or(u64::MAX, |active| active.next_tick());
        self.due = self.wheel.next_tick().min(self.lro.next_tick()).min(self.delivery.due()).min(acknowledgements);
        worked
    }

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
        self.after(index, events);
    }

    pub(crate) fn tell_agent(&mut self, message: Message) {
        if let Some(among) = &mut self.among
            && !among.peers.is_front()
        {
            return among.peers.send(FRONT, Parcel::Agent(message));
        }
        if !self.backlog.is_empty() || self.events.push(message.to_words()).is_err() {
            self.backlog.add(message);
        }
        self.events.publish();
        self.agent_told = true;
    }

    /// Tells the agent what its ring had no room for.
    #[cold]
    pub(crate) fn tell_the_rest(&mut self) {
        if self.backlog.flush(&mut self.events) {
            self.events.publish();
            self.agent_told = true;
        }
    }

    /// Sessions whose program sleeps although it was told something, as far as moderation does not wait for more, and whether the agent does:
    /// the caller rings their doorbells.
    pub fn doorbells(&mut self, now: Instant, mut ring: impl FnMut(u32)) -> bool {
        for (id, session) in self.sessions.iter_mut().enumerate() {
            if let Some(session) = session
                && session.told > 0
                && session.is_to_ring(now)
            {
                self.counters.add(Counter::Doorbells, 1);
                ring(id as u32);
            }
        }
        std::mem::take(&mut self.agent_told)
    }

    /// Announces that the worker is going to sleep. False if something has come meanwhile; it then must not.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut idle = self.host.is_ready() && self.among.as_mut().is_none_or(|among| among.peers.prepare_sleep());
        if !self.is_front() {
            // News that the front has had no room for.
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

    /// The worker is awake.
    pub fn end_sleep(&mut self) {
        if let Some(among) = &self.among {
            among.peers.end_sleep();
        }
        if self.is_front() {
            wake_up(self.nic_memory.word32(nic::SLEEPING));
            for session in self.sessions.iter().flatten() {
                wake_up(session.memory.word32(session::NIC_SLEEPING));
            }
        }
    }

    /// Whether it serves the agent's ring and the programs'.
    pub(crate) fn is_front(&self) -> bool {
        self.among.as_ref().is_none_or(|among| among.peers.is_front())
    }

    /// When a timer wants the worker next, in microseconds of its clock.
    pub fn next_timeout(&self) -> Option<u64> {
        let delivery = Some(self.delivery.due()).filter(|due| *due != u64::MAX);
        let acknowledgements = self.active.as_ref().filter(|_| self.started).and_then(|active| active.next_expiry());
        let told = self.sessions.iter().flatten().filter(|session| session.told > 0);
        let doorbells = told.filter_map(|session| session.moderator.due()).min();
        let others = self.lro.next_expiry().into_iter().chain(delivery).chain(doorbells).chain(self.among_due());
        self.wheel.next_expiry().into_iter().chain(acknowledgements).chain(others).min()
    }
}

/// Why a segment is held while the connection goes back to the kernel, which then gets it. What a reset means to the program and its socket
/// the kernel knows best, and the NIC has no urgent data: a segment that announces some goes there before a byte of it is taken in.
pub(crate) fn kernels_business(segment: &Segment, tcp: &baton_tcp::Connection) -> Option<RestoreCause> {
    if segment.flags.contains(Flags::RST) {
        return (segment.seq == tcp.rcv_nxt()).then_some(RestoreCause::Reset);
    }
    let current = at_or_before(tcp.rcv_nxt(), segment.end()) && at_or_before(segment.seq, tcp.rcv_adv());
    (segment.flags.contains(Flags::URG) && current).then_some(RestoreCause::Urgent)
}

/// While mirroring, the kernel's own acknowledgements tell whether it holds anything out of order that the copy lacks: it does not
/// if it reports no SACK block, or few enough to be all, and the copy has them.
fn judge_mirror(slot: &mut Slot, parsed: &TcpFrame) -> bool {
    if !parsed.flags.contains(Flags::ACK) {
        return false;
    }
    slot.held.acknowledged(parsed.ack);
    let blocks = parsed.options.sack.as_slice();
    let held = &slot.held;
    let beyond = || blocks.iter().filter(|block| before(parsed.ack, block.1));
    !held.overflowed && beyond().count() < 3 && beyond().all(|block| held.covers(block.0, block.1))
}
