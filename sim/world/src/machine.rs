//! What a host has besides its agent: kernel, devices, NIC, and the memory that survives NIC and agent.

use crate::fault::Halt;
use crate::journal::{Entry, Journal};
use crate::kernel::Kernel;
use crate::nic::{End, Nic, SLOTS};
use crate::port::{Fuse, Lane, Port};
use crate::scenario::Offloads;
use crate::trace::{Happening, Trace};
use baton_abi::layout::{nic, session};
use baton_shm::Region;
use baton_tcp::{Config, Instant};
use baton_wire::{Flow, TcpFrame};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Frames that a queue of the devices holds, as a TAP's.
const QUEUE: usize = 500;
/// Bytes of a session's memory behind its blocks; a quarter is not the connections'.
const HEAP_BYTES: usize = 4 << 20;

/// A host without its agent.
pub(crate) struct Machine {
    pub number: usize,
    pub now: Instant,
    pub kernel: Kernel,
    /// Settings of the kernel's sockets.
    pub config: Config,
    /// Settings of the NICs.
    offloads: Offloads,
    pub card: Option<Card>,
    pub from_kernel: Lane,
    pub to_kernel: Lane,
    pub from_wire: Lane,
    pub to_wire: Lane,
    /// A failure that no oracle but the code itself has found.
    pub failure: Option<String>,
}

/// The NIC's memory and devices, which outlive any one NIC.
pub(crate) struct Card {
    pub memory: Arc<Region>,
    pub nic: Option<Nic>,
    pub fuse: Fuse,
    /// Session memory, by the session's number.
    pub sessions: Vec<Arc<Region>>,
    pub journal: Journal,
    /// Cids of all handoffs so far: none may come twice.
    pub handed_off: BTreeSet<u32>,
    /// No memory is given to connections that move to the NIC.
    pub memory_short: bool,
}

impl Machine {
    /// A host; `sessions` is the number of programs' sessions of its Baton, None for a host without one.
    pub fn new(
        number: usize,
        address: [u8; 16],
        sessions: Option<usize>,
        config: Config,
        offloads: Offloads,
        seed: u64,
    ) -> Machine {
        let lanes: [Lane; 4] = std::array::from_fn(|_| Lane::new(QUEUE));
        let [from_kernel, to_kernel, from_wire, to_wire] = lanes;
        let card = sessions.map(Card::new);
        let outgoing = if card.is_some() { from_kernel.clone() } else { to_wire.clone() };
        Machine {
            number,
            now: Instant(0),
            kernel: Kernel::new(address, outgoing, seed),
            config,
            offloads,
            card,
            from_kernel,
            to_kernel,
            from_wire,
            to_wire,
            failure: None,
        }
    }

    /// The parts of Baton.
    ///
    /// # Panics
    /// On a host without it, which has no agent.
    pub fn card(&mut self) -> &mut Card {
        self.card.as_mut().expect("a host with an agent has a NIC")
    }

    /// Starts a NIC on devices and memory. No frame flows yet.
    pub fn start_nic(&mut self, trace: &mut Trace) {
        let (host_in, host_out) = (self.from_kernel.clone(), self.to_kernel.clone());
        let (wire_in, wire_out) = (self.from_wire.clone(), self.to_wire.clone());
        let (now, offloads) = (self.now, self.offloads);
        let card = self.card();
        card.fuse.put_out();
        let host = Port { incoming: host_in, outgoing: host_out, fuse: card.fuse.clone() };
        let wire = Port { incoming: wire_in, outgoing: wire_out, fuse: card.fuse.clone() };
        // Commands that the last NIC left unread were meant for that NIC only.
        baton_ring::Consumer::new(card.memory.ring(nic::COMMANDS)).skip_all();
        card.nic = Some(Nic::start(&host, &wire, &card.memory, &card.sessions, offloads, now));
        trace.note(self.now.0, self.number, &Happening::Life("a NIC starts"));
    }

    /// Lets the NIC do what there is to do. It may die of it.
    pub fn run_nic(&mut self, trace: &mut Trace) {
        let now = self.now;
        let Some(nic) = self.card.as_mut().and_then(|card| card.nic.as_mut()) else { return };
        match nic.run(now) {
            Ok(()) => return,
            Err(End::Killed) => {}
            Err(End::Panicked(message)) => self.failure = Some(format!("the NIC of host {} panicked: {message}", self.number)),
        }
        self.kill_nic(trace);
    }

    /// Ends the NIC. Frames that it held are lost; its memory stays.
    pub fn kill_nic(&mut self, trace: &mut Trace) {
        let card = self.card();
        card.fuse.put_out();
        if card.nic.take().is_some() {
            trace.note(self.now.0, self.number, &Happening::Life("the NIC dies"));
        }
    }

    /// Whether the NIC's process has ever done nothing useful: it may be late with its answers.
    pub fn nic_has_been_halted(&self) -> bool {
        self.card.as_ref().and_then(|card| card.nic.as_ref()).is_some_and(Nic::has_been_halted)
    }

    /// Why the NIC's process does nothing useful now, and since when.
    pub fn nic_halted(&self) -> Option<(Halt, u64)> {
        self.card.as_ref()?.nic.as_ref()?.halted(self.now.0)
    }

    pub fn has_nic(&self) -> bool {
        self.card.as_ref().is_some_and(|card| card.nic.is_some())
    }

    /// Drops the frames of these connections that the kernel sent while there was no NIC, and sends all others.
    pub fn drop_stale_frames(&mut self, ours: &BTreeSet<Flow>) {
        while let Some(frame) = self.from_kernel.pop() {
            if !TcpFrame::parse(frame.bytes(), 0).is_ok_and(|parsed| ours.contains(&parsed.flow.reversed())) {
                self.to_wire.push(frame);
            }
        }
    }

    /// Lets kernel and NIC run until both have nothing to do at this time.
    pub fn run(&mut self, trace: &mut Trace) {
        loop {
            self.run_nic(trace);
            self.kernel.run(self.now);
            let mut received = false;
            let lane = if self.card.is_some() { &self.to_kernel } else { &self.from_wire };
            while let Some(frame) = lane.pop() {
                received = true;
                self.kernel.input(&frame, self.config, self.now);
            }
            if received {
                self.kernel.run(self.now);
            }
            if !received && (self.from_kernel.is_empty() || !self.frames_flow()) {
                return;
            }
        }
    }

    /// Whether a NIC takes frames from the devices' queues.
    fn frames_flow(&self) -> bool {
        self.card.as_ref().and_then(|card| card.nic.as_ref()).is_some_and(|nic| nic.flows(self.now))
    }

    /// When kernel or NIC have something to do next, microseconds.
    pub fn next_timeout(&self) -> u64 {
        let nic = self.card.as_ref().and_then(|card| card.nic.as_ref()).map_or(u64::MAX, Nic::next_timeout);
        self.kernel.next_timeout().min(nic)
    }
}

impl Card {
    fn new(sessions: usize) -> Card {
        let region = |bytes| Arc::new(Region::private(bytes).expect("memory for a simulated host"));
        Card {
            memory: region(nic::bytes(SLOTS)),
            nic: None,
            fuse: Fuse::default(),
            sessions: (0..sessions).map(|_| region(session::HEAP + HEAP_BYTES)).collect(),
            journal: Journal::default(),
            handed_off: BTreeSet::new(),
            memory_short: false,
        }
    }

    /// Adds or replaces the journal's entry of a slot.
    pub fn note(&mut self, entry: Entry) {
        self.journal.entries.insert(entry.cid.slot(), entry);
    }
}
