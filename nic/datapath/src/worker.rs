//! The worker: its state and its round.

mod active_ack;
mod addresses;
mod agent;
mod ahead;
mod closing;
mod commands;
mod connections;
mod crossbar;
mod datagrams;
mod dormant;
mod frames;
mod gathering;
mod host_tcp;
mod lending;
mod messages;
mod opening;
mod peer_fin;
mod programs;
mod room;
mod to_kernel;

use crate::addresses::Addresses;
use crate::captures::CaptureSettings;
use crate::closed::Closed;
use crate::counters::Counters;
use crate::custody::Custody;
use crate::datagrams::Datagrams;
use crate::fragments::Fragments;
use crate::gate::Gate;
use crate::listeners::Listeners;
use crate::peers::Call;
use crate::resources::{Charges, Limits, Resources};
use crate::transmit::Output;
use agent::AgentLink;
use ahead::Ahead;
use baton_abi::layout::{Counter, nic, pulse, session};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_lro::Mode;
use baton_moderation::Moderator;
use baton_ring::{go_to_sleep, wake_up};
use baton_shm::{Region, Wide};
use baton_tcp::Instant;
use connections::Connections;
use core::sync::atomic::Ordering;
use crossbar::Crossbar;
pub use host_tcp::{HostWire, NoKernel};
use lending::HostTcp;
use programs::Programs;
use std::sync::Arc;
use to_kernel::ToKernel;

/// The settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerSettings {
    /// Number of this NIC among the agent's NICs, less than [`nic::MAX_NICS`].
    pub nic: usize,
    /// Largest number of offloaded connections; NIC memory must have as many slots.
    pub slots: usize,
    /// Key of the lookup table's hash; it must be random.
    pub hash_key: [u64; 4],
    /// Number of connections from which on frames are received ahead, so that their connections' state is prefetched
    /// together: as many as fill the caches of a core.
    pub many: u64,
    /// Number of frames taken from one device before the next source gets its turn; at least 1.
    pub batch: usize,
    /// Bytes of the frames' buffers.
    pub frame_bytes: usize,
    /// Acknowledge every segment at once.
    pub quick_ack: bool,
    /// Microseconds without traffic after which a connection becomes dormant: its state is kept in few bytes.
    pub dormant_after: u64,
    /// Drop frames that arrive while their connection is between two owners, instead of holding them for the next one.
    pub drop_during_moves: bool,
    /// Ask the host to take a connection back when its peer's FIN has come.
    pub return_at_fin: bool,
    /// Large receive for the kernel's connections.
    pub lro: baton_lro::LroSettings,
    /// When frames for the kernel are delivered.
    pub moderation: baton_moderation::Mode,
    /// When the doorbells of sleeping programs are rung.
    pub doorbells: baton_moderation::Mode,
    /// Active acknowledgements for what large receive holds.
    pub active_ack: bool,
    /// No frame passes until [`Worker::set_gate`] is called.
    pub closed: bool,
    /// The NIC is beside the kernel, which has network devices of its own: frames that are not the NIC's are not passed
    /// on.
    pub beside: bool,
    /// Limits of the NIC, beside its slots.
    pub limits: Limits,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        WorkerSettings {
            nic: 0,
            slots: 1024,
            hash_key: [0; 4],
            many: 4096,
            batch: 32,
            frame_bytes: MAX_FRAME,
            quick_ack: false,
            dormant_after: 2_000_000,
            drop_during_moves: false,
            return_at_fin: false,
            lro: baton_lro::LroSettings::default(),
            moderation: baton_moderation::Mode::Off,
            doorbells: baton_moderation::Mode::Off,
            active_ack: false,
            closed: false,
            beside: false,
            limits: Limits::default(),
        }
    }
}

/// The settings that can be changed at any time. By default there are neither offloads nor limits.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerOffloads {
    /// Large receive.
    pub lro: baton_lro::LroSettings,
    /// When frames for the kernel are delivered.
    pub moderation: baton_moderation::Mode,
    /// When the doorbells of sleeping programs are rung.
    pub doorbells: baton_moderation::Mode,
    /// Active acknowledgements.
    pub active_ack: bool,
    /// What the NIC has room for.
    pub limits: Limits,
    /// Drop frames that arrive while their connection is between two owners, instead of holding them for the next one.
    pub drop_during_moves: bool,
    /// Ask the host to take a connection back when its peer's FIN has come.
    pub return_at_fin: bool,
}

/// A worker between the kernel's interface `H` and the wire `W`.
pub struct Worker<H, W> {
    settings: WorkerSettings,
    connections: Connections,
    to_kernel: ToKernel<H>,
    output: Output<W>,
    programs: Programs,
    agent: AgentLink,
    resources: Resources,
    /// Present if there are several workers.
    crossbar: Option<Box<Crossbar>>,
    /// Present if there is a host's TCP to which connections can be lent.
    host_tcp: Option<Box<HostTcp>>,
    /// Present if this worker is the host's TCP.
    lender: Option<Box<host_tcp::Lender>>,
    fragments: Fragments,
    listeners: Listeners,
    closed: Closed,
    datagrams: Datagrams,
    addresses: Addresses,
    nic_memory: Arc<Region>,
    counters: Counters,
    /// The frame that is being processed.
    frame: Frame,
    /// Frames that follow it, with many connections.
    ahead: Ahead,
    /// The earliest time at which a connection, an aggregate or a delivery may be due, in microseconds.
    due: u64,
    /// Whether frames are received.
    started: bool,
    /// The frames that waited on the wire when this round's commands came have been received.
    is_drained: bool,
    /// Number of frames that may come from the wire before it is the other sources' turn; at least 1 between two
    /// rounds.
    turn: usize,
    /// Whether what runs for every frame runs in its wide form.
    wide: Option<Wide>,
    /// Whether any of the less usual things needs a check in each round: many connections, a gate, a host's TCP,
    /// sessions for messages, UDP sockets, events for which the agent's ring had no room, frames not received yet, or a
    /// wire whose device computes no checksums. So a usual round has one check for all of them.
    has_extras: bool,
    /// The processor that the worker runs on, plus one; 0 if not known.
    processor: u32,
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Makes a worker over NIC memory. If an earlier worker has used the memory the rings continue; its connections are
    /// the agent's to recover.
    pub fn new(host: H, wire: W, nic_memory: Arc<Region>, settings: WorkerSettings, now: Instant) -> Self {
        let (counters, agent) = (nic_memory.clone(), AgentLink::new(&nic_memory));
        Worker::assemble(host, wire, nic_memory, &counters, agent, settings, now)
    }

    /// Makes a worker whose counters lie in `counters`, at the place that NIC memory has for them.
    fn assemble(
        host: H,
        wire: W,
        nic_memory: Arc<Region>,
        counters: &Arc<Region>,
        agent: AgentLink,
        settings: WorkerSettings,
        now: Instant,
    ) -> Self {
        let counters = Counters::new(counters);
        counters.set(Counter::Connections, 0);
        counters.set(Counter::Dormant, 0);
        let gate = if settings.closed { Gate::Closed } else { Gate::Open };
        let succeeds = nic_memory.words(nic::pulse(0) + pulse::ROUNDS, 1)[0].load(Ordering::Relaxed) != 0;
        Worker {
            connections: Connections::new(settings.slots, settings.hash_key, now.0),
            to_kernel: ToKernel::new(host, settings.lro, settings.moderation, now.0),
            output: Output::new(wire, gate, settings.frame_bytes, !settings.quick_ack),
            programs: Programs::new(settings.slots),
            agent,
            resources: Resources::new(Arc::new(Charges::new(settings.slots)), settings.limits),
            crossbar: None,
            host_tcp: None,
            lender: None,
            fragments: Fragments::default(),
            listeners: Listeners::new(settings.hash_key, succeeds, now.0),
            closed: Closed::new(settings.hash_key),
            datagrams: Datagrams::default(),
            addresses: Addresses::None,
            nic_memory,
            counters,
            frame: Frame::with_capacity(settings.frame_bytes),
            ahead: Ahead::default(),
            due: now.0,
            started: false,
            is_drained: false,
            turn: settings.batch,
            wide: Wide::detect(),
            has_extras: true,
            processor: 0,
            settings,
        }
    }

    /// Begins to receive frames. Until then only commands are run: after a NIC's death the agent first steals the flows
    /// of the connections that it is about to restore, so that none of their frames reaches a kernel that has no state
    /// for them. Commands that were sent before this call run before the first frame.
    pub fn start(&mut self, now: Instant) {
        if room::serves_agent(self) {
            self.poll_commands(now);
        }
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
        let WorkerOffloads { lro, moderation, doorbells, active_ack, limits, drop_during_moves, return_at_fin } = *set;
        (self.settings.drop_during_moves, self.settings.return_at_fin) = (drop_during_moves, return_at_fin);
        self.resources.set(limits);
        if room::serves_agent(self) {
            room::advertise(self, true);
        }
        if doorbells != self.settings.doorbells {
            self.settings.doorbells = doorbells;
            self.programs.sessions.iter_mut().flatten().for_each(|session| session.moderator = Moderator::new(doorbells));
        }
        self.settings.active_ack = active_ack;
        if self.started || self.crossbar.is_some() {
            self.set_active_ack(active_ack, now);
        }
        self.settings.lro = baton_lro::LroSettings { hash_key: self.settings.lro.hash_key, ..lro };
        self.settings.moderation = moderation;
        self.to_kernel.set(self.settings.lro, moderation, &self.counters, now.0);
        self.due = now.0;
    }

    /// Announces the NIC's free room: at the first call, then every second while there are limits, and when the load of
    /// the workers changes it. To be called for the front worker once all have joined, then in each round. `busy` is
    /// the time, in nanoseconds, for which this worker has been busy so far; the others' counters say theirs.
    #[inline]
    pub fn review(&mut self, now: Instant, busy: u64) {
        room::review(self, now, busy);
    }

    /// Changes the gate between this worker and the wire, from the next frame on. The other workers' gates do not
    /// change.
    pub fn set_gate(&mut self, gate: Gate) {
        self.output.wire.set(gate);
        self.has_extras = true;
    }

    /// Makes the timers be checked at `due` microseconds at the latest.
    fn wake_at(&mut self, due: u64) {
        self.due = self.due.min(due);
    }

    /// Sets the processor that the worker runs on, so that programs can learn where their connections are processed.
    #[inline]
    pub fn set_processor(&mut self, processor: usize) {
        let processor = processor as u32 + 1;
        if std::mem::replace(&mut self.processor, processor) != processor {
            for slot in self.connections.slots.iter().flatten() {
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

    /// Number of frames received from the wire and sent to it so far.
    pub fn frames(&self) -> u64 {
        self.counters.get(Counter::WireReceived).wrapping_add(self.counters.get(Counter::WireSent))
    }

    /// The host's device.
    pub fn host(&mut self) -> &mut H {
        &mut self.to_kernel.device
    }

    /// The wire's device.
    pub fn wire(&mut self) -> &mut W {
        &mut self.output.wire.device
    }

    /// One round: frames from the wire, as long as it is its turn, else the other sources of work. Returns whether
    /// there was any.
    ///
    /// It is the wire's turn until no frame waits there, or a batch of them has come since the other sources had
    /// theirs. So frames that arrive back to back cost no checks of the other sources, which wait for one batch of
    /// frames at most.
    #[inline]
    pub fn poll(&mut self, now: Instant) -> bool {
        if self.has_extras || !self.to_kernel.device.is_ready() {
            return self.poll_any(now);
        }
        match self.wide {
            Some(wide) => wide.run(move || self.poll_usual(now)),
            None => self.poll_usual_narrow(now),
        }
    }

    /// [`Worker::poll`] for a worker without extras ([`Worker::has_extras`]).
    #[inline(always)]
    fn poll_usual(&mut self, now: Instant) -> bool {
        let received = self.poll_usual_wire(now);
        if received && self.turn > 0 {
            self.end_round(now);
            return true;
        }
        self.poll_others(now) | received
    }

    #[inline(never)]
    fn poll_usual_narrow(&mut self, now: Instant) -> bool {
        self.poll_usual(now)
    }

    #[inline(never)]
    fn poll_usual_wire_narrow(&mut self, now: Instant) -> bool {
        self.poll_usual_wire(now)
    }

    /// [`Worker::poll`] for any worker.
    #[inline(never)]
    fn poll_any(&mut self, now: Instant) -> bool {
        if self.has_extras {
            self.begin_extras(now);
        }
        let usual = self.started && self.output.is_usual() && self.to_kernel.device.is_ready();
        let received = match self.wide {
            Some(wide) if usual => {
                let worker = &mut *self;
                let many = worker.has_many();
                wide.run(move || if many { worker.poll_ahead(now) } else { worker.poll_usual_wire(now) })
            }
            _ if usual => self.poll_usual_wire_narrow(now),
            _ => self.started && self.poll_wire(now),
        };
        self.go_on(received, now)
    }

    /// Continues the round after the frames from the wire.
    #[inline(always)]
    fn go_on(&mut self, received: bool, now: Instant) -> bool {
        if received && self.turn > 0 && !self.has_extras {
            self.end_round(now);
            return true;
        }
        self.poll_others(now) | received
    }

    /// Gives the sources other than the wire their turn. Returns whether there was any work.
    #[inline(never)]
    fn poll_others(&mut self, now: Instant) -> bool {
        let mut worked = self.started && self.poll_host(now);
        // Before the programs' commands, so that a restriction by the agent applies to all that a program sends after
        // it.
        if self.agent.commands.has_message() {
            worked |= self.poll_commands(now);
        }
        worked |= self.poll_sessions(now);
        if self.programs.put_off.is_some() {
            self.send_put_off(now);
            worked = true;
        }
        if self.has_extras {
            worked |= self.poll_extras(now);
        }
        if self.due <= now.0 {
            worked |= self.poll_timers(now);
        }
        self.turn = self.settings.batch;
        self.end_round(now);
        worked
    }

    /// Sends what waits for the end of a round.
    #[inline(always)]
    fn end_round(&mut self, now: Instant) {
        self.output.flush(&self.counters);
        if !self.programs.dirty.is_empty() {
            self.send_events(now);
        }
    }

    /// Begins a round of a worker with extras ([`Worker::has_extras`]).
    #[cold]
    fn begin_extras(&mut self, now: Instant) {
        if self.output.wire.is_gated() {
            self.begin_gated_round(now);
        }
        if !self.agent.backlog.is_empty() {
            self.flush_backlog();
        }
    }

    /// Polls the extras ([`Worker::has_extras`]). Returns whether there was any work.
    #[cold]
    fn poll_extras(&mut self, now: Instant) -> bool {
        let mut worked = false;
        if self.host_tcp.is_some() {
            worked = self.poll_host_tcp(now);
        }
        if !self.datagrams.ready.is_empty() {
            worked |= self.poll_datagrams();
        }
        if !self.programs.message_ports.is_empty() {
            worked |= self.poll_messages();
        }
        let unusual = !self.started || !self.output.is_usual();
        let rest = unusual
            || self.has_many()
            || self.output.wire.is_gated()
            || self.host_tcp.is_some()
            || !self.agent.backlog.is_empty();
        self.has_extras = rest || !self.datagrams.is_empty() || !self.programs.message_ports.is_empty();
        worked
    }

    /// Runs all timers that are due. Returns whether a connection's was among them.
    #[cold]
    #[inline(never)]
    fn poll_timers(&mut self, now: Instant) -> bool {
        let mut worked = false;
        let mut expired = std::mem::take(&mut self.connections.expired);
        while let Some(tick) = self.connections.wheel.expire(now.0, &mut expired) {
            worked = true;
            for index in expired.drain(..) {
                self.on_tick(index, tick, now);
            }
        }
        self.connections.expired = expired;
        if self.settings.lro.mode != Mode::Off {
            self.to_kernel.expire_aggregates(&self.counters, now.0);
        }
        if self.started {
            self.expire_acknowledgements(now);
        }
        self.to_kernel.expire_delivery(&self.counters, now.0);
        self.look_for_idle(now);
        self.expire_handshakes(now);
        self.closed.expire(now);
        if self.started {
            self.poll_addresses(now);
        }
        // Before the start the kernel's answers would not be received.
        let active = self.to_kernel.active_ack.as_ref().filter(|_| self.started);
        let acknowledgements = active.map_or(u64::MAX, |active| active.next_tick());
        let to_kernel = self.to_kernel.lro.next_tick().min(self.to_kernel.delivery.due()).min(acknowledgements);
        let to_wire = self.listeners.due().min(self.closed.due()).min(self.addresses_due());
        self.due = self.connections.wheel.next_tick().min(to_kernel).min(to_wire).min(self.connections.rounds.due());
        worked
    }

    /// Announces that the worker is going to sleep. False if it must not, since something has arrived.
    pub fn prepare_sleep(&mut self) -> bool {
        self.output.flush(&self.counters);
        self.output.wire.captures.show();
        let mut idle =
            self.to_kernel.device.is_ready() && self.crossbar.as_mut().is_none_or(|crossbar| crossbar.peers.prepare_sleep());
        let front = self.is_front();
        if !front {
            // Events that the front worker had no room for.
            idle &= self.programs.dirty.is_empty();
        } else {
            go_to_sleep(self.nic_memory.word32(nic::SLEEPING));
            idle &= !self.agent.commands.has_message() && self.agent.backlog.is_empty();
            idle &= self.host_tcp.as_ref().is_none_or(|host| host.is_idle());
        }
        for session in self.programs.sessions.iter().flatten().filter(|session| session.is_served(front)) {
            go_to_sleep(session.memory.word32(session.area + session::NIC_SLEEPING));
            idle &= !session.has_commands();
        }
        idle &= self.programs.put_off.is_none() && !self.has_messages_waiting() && self.datagrams.ready.is_empty();
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
        let front = self.is_front();
        if front {
            wake_up(self.nic_memory.word32(nic::SLEEPING));
        }
        for session in self.programs.sessions.iter().flatten().filter(|session| session.is_served(front)) {
            wake_up(session.memory.word32(session.area + session::NIC_SLEEPING));
        }
    }

    /// Whether this is the front worker, which serves the rings of agent and programs.
    fn is_front(&self) -> bool {
        self.crossbar.as_ref().is_none_or(|crossbar| crossbar.peers.is_front())
    }

    /// When something is due for the NIC's own addresses, in microseconds; `u64::MAX` if nothing is. Before the start
    /// the answers would not be received.
    fn addresses_due(&self) -> u64 {
        if self.started { self.addresses.due() } else { u64::MAX }
    }

    /// When a timer is due next, in microseconds; None if none is set.
    pub fn next_timeout(&self) -> Option<u64> {
        let delivery = Some(self.to_kernel.delivery.due()).filter(|due| *due != u64::MAX);
        let acknowledgements =
            self.to_kernel.active_ack.as_ref().filter(|_| self.started).and_then(|active| active.next_expiry());
        let unsignalled = self.programs.sessions.iter().flatten().filter(|session| session.unsignalled > 0);
        let doorbells = unsignalled.filter_map(|session| session.moderator.due()).min();
        let owed = self.programs.sessions.iter().flatten().filter_map(|session| session.owed.map(|owed| owed.at.0)).min();
        let handshakes = self.listeners.due().min(self.closed.due()).min(self.addresses_due()).min(self.connections.rounds.due());
        let handshakes = handshakes.min(self.resources.reopens_at());
        let delivery = delivery.into_iter().chain(Some(handshakes).filter(|due| *due != u64::MAX));
        let others = self.to_kernel.lro.next_expiry().into_iter().chain(delivery).chain(doorbells).chain(owed);
        let others = others.chain(self.crossbar_due());
        let others = others.chain(self.output.wire.next_passing()).chain(self.agent.ring_due());
        self.connections.wheel.next_expiry().into_iter().chain(acknowledgements).chain(others).min()
    }
}

/// Begins a capture of the frames that pass between a NIC's workers and the wire, into rings in `memory`. False if
/// there are too many captures, or the memory has no ring for this worker.
pub fn capture<H: Device, W: Device>(worker: &mut Worker<H, W>, settings: CaptureSettings, memory: &Arc<Region>) -> bool {
    worker.broadcast(|| Call::Capture(settings, memory.clone()));
    let me = worker.crossbar.as_ref().map_or(0, |crossbar| crossbar.peers.me());
    let wire = &mut worker.output.wire;
    let begun = wire.captures.begin(settings, memory, me);
    wire.note_gated();
    worker.has_extras = true;
    begun
}

/// Ends the capture with this number.
pub fn end_capture<H: Device, W: Device>(worker: &mut Worker<H, W>, id: u32) {
    worker.broadcast(|| Call::EndCapture(id));
    let wire = &mut worker.output.wire;
    wire.captures.show();
    wire.captures.end(id);
    wire.note_gated();
}
