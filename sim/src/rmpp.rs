//! RMPP endpoints in virtual time: policy on the host, data halves on host or NIC, links with faults between them.

use crate::Rng;
use crate::link::{Impairments, Link};
use crate::rmpp_streams::StreamNet;
use baton_rmpp::interface::WORDS;
use baton_rmpp::{Command, Completion, Config, Data, DataConfig, Disposition, Event, Half, Halves, Policy, StreamConfig};
use baton_wire::frame::Link as FrameLink;
use baton_wire::rmpp::{Envelope, Received, envelope};
use baton_wire::{Endpoint, Flow};
use std::collections::VecDeque;

/// Events of a data half that may wait to be taken.
const EVENTS: u16 = 256;

/// What carries the packets of a world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carrier {
    /// Ethernet frames of RMPP's own type.
    Ethernet,
    /// UDP over IPv4.
    Udp4,
    /// UDP over IPv6.
    Udp6,
}

impl Carrier {
    /// Address of the host of endpoint `node` of a world.
    pub fn address(self, node: usize) -> Endpoint {
        let number = node as u8 + 1;
        match self {
            Carrier::Ethernet => envelope::ethernet_address(mac(node)),
            Carrier::Udp4 => Endpoint::v4([10, 0, 0, number], envelope::UDP_PORT),
            Carrier::Udp6 => Endpoint::v6([number; 16], envelope::UDP_PORT),
        }
    }
}

/// Which halves of the data half a NIC has at one of the paper's steps (section 4).
pub fn halves_on_nic(step: u8) -> Halves {
    Halves { receiving: step >= 1, sending: step >= 2 }
}

/// An endpoint: its policy, and the data half divided between host and NIC.
pub struct Node {
    /// Its policy.
    pub policy: Policy,
    /// The halves on the host.
    pub host: Data,
    /// The halves on the NIC.
    pub nic: Data,
    /// The memory of program and endpoint.
    pub memory: Vec<u8>,
    /// Completions that have not been looked at.
    pub completions: Vec<Completion>,
    /// Frames that held no packet.
    pub bad_frames: u64,
    /// If set: commands and events wait in the rings for random times.
    pub lag: Option<Rng>,
    commands: VecDeque<[u64; WORDS]>,
    events: VecDeque<[u64; WORDS]>,
    config: Config,
    on_nic: Halves,
    address: Endpoint,
}

/// Records that a ring holds.
const RING: usize = 64;

impl Node {
    /// An endpoint at an address, of which the NIC has these halves, and the host the others.
    pub fn new(config: Config, on_nic: Halves, address: Endpoint) -> Node {
        let on_host = Halves { receiving: !on_nic.receiving, sending: !on_nic.sending };
        Node {
            policy: Policy::new(config).expect("the settings of a world hold"),
            host: Data::new(config.data(on_host, address, EVENTS)),
            nic: Data::new(config.data(on_nic, address, EVENTS)),
            memory: vec![0; config.memory as usize],
            completions: Vec::new(),
            bad_frames: 0,
            lag: None,
            commands: VecDeque::new(),
            events: VecDeque::new(),
            config,
            on_nic,
            address,
        }
    }

    /// Lets the data of long messages come and go by streams. Both halves must be the host's.
    pub fn use_streams(&mut self, streams: StreamConfig) {
        let config = self.config.data(Halves::BOTH, self.address, EVENTS);
        self.host = Data::new(DataConfig { streams: Some(streams), ..config });
    }

    /// Its address.
    pub fn address(&self) -> Endpoint {
        self.address
    }

    /// Kills the NIC and starts the next one: what it knew is gone.
    pub fn kill_nic(&mut self, now: u64) {
        self.nic = Data::new(self.config.data(self.on_nic, self.address, EVENTS));
        self.commands.clear();
        self.events.clear();
        self.policy.restart(self.on_nic, now);
    }

    /// Whether the next record waits in its ring.
    fn lags(&mut self) -> bool {
        self.lag.as_mut().is_some_and(|rng| rng.chance(200_000))
    }

    /// Whether records wait in the rings, or for room there.
    fn has_records(&self) -> bool {
        self.lag.is_some() && (!self.commands.is_empty() || !self.events.is_empty() || self.nic.has_event())
    }

    /// Carries commands and events between the halves until there are none. They cross as words, as over a ring.
    pub fn settle(&mut self, now: u64) {
        loop {
            let mut idle = true;
            while self.commands.len() < RING
                && self.host.has_room()
                && let Some(command) = self.policy.poll_command()
            {
                idle = false;
                self.issue(&command);
            }
            while self.nic.has_room()
                && !self.lags()
                && let Some(words) = self.commands.pop_front()
            {
                idle = false;
                self.nic.handle_command(&Command::from_words(&words).expect("a command reads back"));
            }
            while self.events.len() < RING
                && let Some(event) = self.nic.poll_event()
            {
                idle = false;
                self.events.push_back(event.to_words());
            }
            while self.policy.is_ready()
                && let Some(event) = self.host.poll_event()
            {
                idle = false;
                self.policy.handle_event(&event, now, &mut self.memory[..]);
            }
            while self.policy.is_ready()
                && !self.lags()
                && let Some(words) = self.events.pop_front()
            {
                idle = false;
                let event = Event::from_words(&words).expect("an event reads back");
                self.policy.handle_event(&event, now, &mut self.memory[..]);
            }
            if idle || self.lags() {
                break;
            }
        }
        self.completions.extend(std::iter::from_fn(|| self.policy.poll_completion()));
    }

    /// Gives a command to the half on the host, or puts it into the NIC's ring.
    fn issue(&mut self, command: &Command) {
        let on_nic = |half| if half == Half::Receiving { self.on_nic.receiving } else { self.on_nic.sending };
        if command.half().is_none_or(on_nic) {
            self.commands.push_back(command.to_words());
        }
        if command.half().is_none_or(|half| !on_nic(half)) {
            self.host.handle_command(command);
        }
    }

    /// Handles a frame from the wire: the NIC sees it first.
    pub fn receive(&mut self, frame: &[u8]) {
        let Ok(received) = Received::parse(frame, envelope::UDP_PORT) else {
            self.bad_frames += 1;
            return;
        };
        let packet = &frame[received.offset..received.offset + received.length];
        let memory = &mut self.memory[..];
        if self.nic.input(&received.source, packet, memory) == Disposition::PassUp {
            self.host.input(&received.source, packet, memory);
        }
    }

    /// What is left of messages: in the policy, in the data halves, and buffers and clearances that have not come back.
    pub fn leftovers(&self) -> [usize; 7] {
        let (sends, incoming, receives) = self.policy.usage();
        let ((host_in, host_out), (nic_in, nic_out)) = (self.host.messages(), self.nic.messages());
        let (packets, bytes) = self.policy.cleared();
        let in_data = host_in + host_out + nic_in + nic_out;
        [sends, incoming, receives, in_data, self.policy.buffers_held(), packets as usize, bytes as usize]
    }
}

/// Endpoints, a link from each to each, and a clock in microseconds.
pub struct World {
    /// The endpoints.
    pub nodes: Vec<Node>,
    /// The time.
    pub now: u64,
    /// Streams, if endpoints use any.
    pub streams: Option<StreamNet>,
    carrier: Carrier,
    links: Vec<Vec<Link<Vec<u8>>>>,
}

impl World {
    /// A world of these endpoints.
    pub fn new(nodes: Vec<Node>, carrier: Carrier, impairments: Impairments, seed: u64) -> World {
        let count = nodes.len();
        let link = |from: usize, to: usize| Link::new(impairments, seed ^ ((from * count + to) as u64) << 32);
        let links = (0..count).map(|from| (0..count).map(|to| link(from, to)).collect()).collect();
        World { nodes, now: 1_000_000, streams: None, carrier, links }
    }

    /// Address of an endpoint's host.
    pub fn address(&self, node: usize) -> Endpoint {
        self.carrier.address(node)
    }

    /// The headers of frames from one endpoint to another.
    pub fn envelope(&self, from: usize, to: usize) -> Envelope {
        let link = FrameLink { source: mac(from), destination: mac(to), ttl: 64, ..FrameLink::default() };
        match self.carrier {
            Carrier::Ethernet => Envelope::Ethernet(link),
            _ => Envelope::Udp(link, Flow { local: self.address(from), remote: self.address(to), device: 0 }),
        }
    }

    /// A frame with a packet, from one endpoint to another.
    pub fn frame(&self, from: usize, to: usize, packet: &[u8]) -> Vec<u8> {
        let envelope = self.envelope(from, to);
        let mut frame = vec![0; envelope.header()];
        frame.extend_from_slice(packet);
        envelope.emit(&mut frame);
        frame
    }

    /// Changes what the links do from now on. What is under way arrives.
    pub fn set_impairments(&mut self, impairments: Impairments) {
        self.links.iter_mut().flatten().for_each(|link| link.set_impairments(impairments));
    }

    /// Lets every endpoint do what it can do at this time, and puts its packets on the links.
    pub fn settle(&mut self) {
        self.send_packets();
        while let Some(streams) = &mut self.streams
            && streams.pump(&mut self.nodes, self.now)
        {
            self.send_packets();
        }
    }

    fn send_packets(&mut self) {
        for from in 0..self.nodes.len() {
            self.nodes[from].settle(self.now);
            let mut packet = vec![0; self.nodes[from].config.packet.into()];
            while let Some((to, length)) = self.transmit(from, &mut packet) {
                let frame = self.frame(from, to, &packet[..length]);
                self.links[from][to].push(frame, self.now);
                self.nodes[from].settle(self.now);
            }
        }
    }

    /// The next packet of an endpoint: for whom, and its length.
    fn transmit(&mut self, from: usize, packet: &mut [u8]) -> Option<(usize, usize)> {
        loop {
            let node = &mut self.nodes[from];
            let nic = node.nic.poll_transmit(&node.memory[..], packet);
            let outbound = nic.or_else(|| node.host.poll_transmit(&node.memory[..], packet))?;
            // A packet for somebody who is not in this world is lost.
            if let Some(to) = (0..self.nodes.len()).find(|to| self.address(*to) == outbound.to) {
                return Some((to, outbound.length));
            }
        }
    }

    /// Jumps to the next arrival or time-out and lets it happen. False if nothing will happen any more.
    pub fn step(&mut self) -> bool {
        self.settle();
        let arrivals = self.links.iter().flatten().filter_map(Link::next_arrival);
        // What waits in a ring is looked at again a microsecond later.
        let lagging = self.nodes.iter().any(Node::has_records).then_some(self.now + 1);
        let timers = self.nodes.iter().filter_map(|node| node.policy.next_timeout());
        let streams = self.streams.as_ref().and_then(StreamNet::next);
        let Some(next) = arrivals.chain(timers).chain(lagging).chain(streams).min() else {
            return false;
        };
        self.now = self.now.max(next);
        for from in 0..self.nodes.len() {
            for to in 0..self.nodes.len() {
                while let Some(frame) = self.links[from][to].pop(self.now) {
                    self.nodes[to].receive(&frame);
                    self.nodes[to].settle(self.now);
                }
            }
        }
        for node in &mut self.nodes {
            node.policy.on_timeout(self.now);
        }
        true
    }

    /// Runs until `done` holds or `limit` microseconds have passed. Whether it held.
    pub fn run_until(&mut self, limit: u64, mut done: impl FnMut(&mut World) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            self.settle();
            if done(self) {
                return true;
            }
            if self.now > end || !self.step() {
                self.settle();
                return done(self);
            }
        }
    }
}

fn mac(node: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, node as u8 + 1]
}
