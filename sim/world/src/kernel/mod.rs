//! A host's kernel, as far as TCP sockets go: our own TCP behind sockets with Linux's rules. What repair mode gives,
//! takes and refuses is in [`repair`].

mod repair;
mod socket;

pub(crate) use socket::{Errno, Place, Socket};

use crate::port::Lane;
use baton_device::{Checksum, Frame};
use baton_sim::Rng;
use baton_tcp::{Config, Connection, Instant, Segment, State, Transmit};
use baton_wire::frame::{Link, MAX_HEADER, TCP_CHECKSUM, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use std::collections::{BTreeMap, VecDeque};

/// Largest number of bytes in a socket's send queue that a program can fill, Linux's default of tcp_wmem.
pub(crate) const SEND_BUFFER: usize = 87_040;

/// The number of a socket on its host, which stands for its descriptor.
pub(crate) type Descriptor = usize;

/// A host's kernel.
pub(crate) struct Kernel {
    address: [u8; 16],
    sockets: Vec<Option<Socket>>,
    by_flow: BTreeMap<Flow, Descriptor>,
    /// Connections that wait for accept, by port.
    listeners: BTreeMap<u16, VecDeque<Descriptor>>,
    /// The kernel's interface: to the NIC, or the wire on a host without one.
    outgoing: Lane,
    rng: Rng,
    next_port: u16,
    /// Whether there is a route to other hosts.
    pub routed: bool,
}

impl Kernel {
    pub fn new(address: [u8; 16], outgoing: Lane, seed: u64) -> Kernel {
        Kernel {
            address,
            sockets: Vec::new(),
            by_flow: BTreeMap::new(),
            listeners: BTreeMap::new(),
            outgoing,
            rng: Rng::new(seed),
            next_port: 40_000,
            routed: true,
        }
    }

    pub fn listen(&mut self, port: u16) {
        self.listeners.entry(port).or_default();
    }

    pub fn accept(&mut self, port: u16) -> Option<Descriptor> {
        let waiting = self.listeners.get_mut(&port)?;
        let ready = waiting.front().copied()?;
        let open = self.sockets[ready].as_ref().is_some_and(|socket| !matches!(socket.state(), State::SynReceived));
        if open { waiting.pop_front() } else { None }
    }

    pub fn connect(&mut self, remote: Endpoint, config: Config, now: Instant) -> Descriptor {
        let flow = Flow { local: Endpoint::v6(self.address, self.next_port), remote, device: 0 };
        self.next_port += 1;
        let isn = self.rng.next_u64() as u32;
        let tcp = Connection::connect(config, isn, self.rng.next_u64() as u32, now);
        self.add(Socket::new(flow, tcp, isn))
    }

    fn add(&mut self, socket: Socket) -> Descriptor {
        self.by_flow.insert(socket.flow(), self.sockets.len());
        self.sockets.push(Some(socket));
        self.sockets.len() - 1
    }

    /// The socket of a descriptor.
    ///
    /// # Panics
    /// If it is closed, which no caller's is.
    pub fn socket(&mut self, descriptor: Descriptor) -> &mut Socket {
        self.sockets[descriptor].as_mut().expect("the descriptor is open")
    }

    /// Receives a frame.
    pub fn input(&mut self, frame: &Frame, config: Config, now: Instant) {
        if let Some((flow, mtu)) = crate::icmp::read(frame.bytes()) {
            if let Some(socket) = self.by_flow.get(&flow).and_then(|at| self.sockets[*at].as_mut()) {
                socket.set_mtu(mtu, now);
            }
            return;
        }
        let Ok(parsed) = TcpFrame::parse(frame.bytes(), 0) else { return };
        if frame.checksum == Checksum::Unknown && !parsed.checksum_holds(frame.bytes()) {
            return;
        }
        if parsed.flow.local.address != self.address {
            return;
        }
        if let Some(at) = self.by_flow.get(&parsed.flow).copied() {
            if let Some(socket) = self.sockets[at].as_mut() {
                socket.input(&parsed, parsed.payload(frame.bytes()), now);
            }
            return;
        }
        self.open(&parsed, config, now);
    }

    /// A segment for no socket: a listener takes a SYN, all else draws a RST (RFC 9293 section 3.10.7.1).
    fn open(&mut self, parsed: &TcpFrame, config: Config, now: Instant) {
        let segment = Segment::from(parsed);
        if self.listeners.contains_key(&parsed.flow.local.port) && !parsed.flags.contains(Flags::ACK) {
            let isn = self.rng.next_u64() as u32;
            let offset = self.rng.next_u64() as u32;
            if let Some(tcp) = Connection::accept(config, &segment, isn, offset, now) {
                let at = self.add(Socket::new(parsed.flow, tcp, isn));
                self.listeners.entry(parsed.flow.local.port).or_default().push_back(at);
            }
            return;
        }
        if !parsed.flags.contains(Flags::RST) {
            let (seq, ack, flags) = match parsed.flags.contains(Flags::ACK) {
                true => (parsed.ack, 0, Flags::RST),
                false => (0, segment.end(), Flags::RST | Flags::ACK),
            };
            let reset = Transmit { seq, ack, flags, options: TcpOptions::default(), ..Transmit::default() };
            let template = Template::new(&parsed.flow, &link(), false);
            self.outgoing.push(build(&template, &reset, 0, |_, _| {}));
        }
    }

    /// Runs what is due, sends what can be sent, and drops sockets that are closed on both sides.
    pub fn run(&mut self, now: Instant) {
        for at in 0..self.sockets.len() {
            let Some(socket) = self.sockets[at].as_mut() else { continue };
            socket.run(now, &self.outgoing);
            if socket.is_over() {
                self.by_flow.remove(&socket.flow());
                self.sockets[at] = None;
            }
        }
    }

    /// When a socket's timer is due next.
    pub fn next_timeout(&self) -> u64 {
        self.sockets.iter().flatten().map(Socket::next_timeout).min().unwrap_or(u64::MAX)
    }
}

/// The link of every connection: all hosts are on one network.
pub(crate) fn link() -> Link {
    Link { source: [2, 0, 0, 0, 0, 1], destination: [2, 0, 0, 0, 0, 2], ttl: 64, ..Link::default() }
}

/// Builds a segment's frame with a full checksum. `fetch` writes its payload.
pub(crate) fn build(template: &Template, transmit: &Transmit, ident: u16, fetch: impl FnOnce(u32, &mut [u8])) -> Frame {
    let length = transmit.length as usize;
    let mut frame = Frame::with_capacity(MAX_HEADER + length);
    frame.set_length(MAX_HEADER + length);
    let headers = template.emit(&transmit.header(ident), length, frame.bytes_mut());
    frame.set_length(headers + length);
    fetch(transmit.seq, &mut frame.bytes_mut()[headers..]);
    finish_checksum(frame.bytes_mut(), template.tcp_offset(), TCP_CHECKSUM);
    frame
}
