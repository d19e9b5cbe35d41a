//! UDP for programs: datagrams to the addresses and ports of their sockets go into the sockets' receive rings, and
//! datagrams in their send rings go to the wire. The front worker has all sockets. Fragments, errors and packets with
//! IP options go to the kernel, which has the same sockets.

use super::Worker;
use super::messages::{NO_LINK, complete_checksum, destination};
use crate::datagrams::{DatagramSettings, DatagramWay, Socket};
use crate::peers::{Call, FRONT};
use baton_abi::layout::Counter;
use baton_datagrams::{Direction, Reader, Record};
use baton_device::{Checksum, Device, Frame};
use baton_tcp::Instant;
use baton_wire::checksum::{Sum, pseudo_header};
use baton_wire::frame::{ETHERNET, IPV4, Link};
use baton_wire::offset::ipv4;
use baton_wire::rmpp::envelope::{Envelope, EnvelopeError, PROTOCOL_UDP, Received, UDP};
use baton_wire::{Endpoint, Flow};

/// Datagrams that a socket sends before the next one gets its turn.
const BATCH: usize = 64;

/// Batches that all sockets together send in one round, since a program may have many sockets, and other sources of
/// work wait meanwhile.
const ROUND: usize = 8;

/// Most datagrams that are still sent when a session's sockets end, for all of its sockets together. That is more than
/// a kernel's socket holds of the shortest ones, and more than a program that keeps to the interface leaves: every
/// round empties the rings. Further ones are lost.
const AT_END: usize = 8192;

/// Offset of the checksum in a UDP header.
const UDP_CHECKSUM: usize = 6;

impl<H: Device, W: Device> Worker<H, W> {
    /// Adds a UDP socket, or changes its settings. False if there is no such session, or its rings are not in its
    /// memory.
    pub fn add_datagrams(&mut self, settings: DatagramSettings) -> bool {
        let session = self.programs.sessions.get(settings.session as usize).and_then(Option::as_ref);
        let Some(memory) = session.map(|session| session.memory.clone()) else { return false };
        let (id, endpoints, peer) = (settings.id, settings.endpoints.clone(), settings.peer);
        if !self.datagrams.add(settings, &memory) {
            return false;
        }
        self.broadcast(|| Call::DatagramsAt(id, endpoints.clone(), peer));
        self.datagrams.note(id, &endpoints, peer);
        self.has_extras = true;
        // A NIC that has died may have taken the program's request for the doorbell without ringing it.
        if let Some(socket) = self.datagrams.sockets.get(&id).filter(|socket| !socket.receive.is_drained()) {
            socket.program_wish.take();
            self.datagrams.ringing.push(id);
        }
        true
    }

    /// Sets the route of a socket's datagrams to a host. False if there is no such socket, or it has too many routes.
    pub fn set_datagram_way(&mut self, id: u32, host: [u8; 16], way: Option<DatagramWay>) -> bool {
        self.datagrams.sockets.get_mut(&id).is_some_and(|socket| socket.set_way(host, way))
    }

    /// Gives a socket to the kernel: the datagrams in its send ring are sent, and, with `replay`, its unread datagrams
    /// go to the kernel.
    pub fn end_datagrams(&mut self, id: u32, replay: bool) {
        let mut left = AT_END;
        self.end_datagrams_within(id, replay, &mut left);
    }

    /// [`Worker::end_datagrams`] that sends at most `left` datagrams, and lowers `left` by those that it has sent. A
    /// program may continue to fill the ring while it is read, and several of its sockets may have the same ring.
    fn end_datagrams_within(&mut self, id: u32, replay: bool, left: &mut usize) {
        self.broadcast(|| Call::DatagramsAt(id, Vec::new(), None));
        *left -= self.send_datagrams(id, *left);
        let Some(socket) = self.datagrams.remove(id) else { return };
        if replay {
            self.replay_datagrams(&socket);
        }
        self.to_kernel.device.settle();
    }

    fn replay_datagrams(&mut self, socket: &Socket) {
        let Some(mut unread) = Reader::new(&socket.memory, &socket.settings.place, Direction::Receive) else { return };
        let link = Link { destination: socket.settings.host, ttl: 64, ..NO_LINK };
        for _ in 0..AT_END {
            let Some(record) = unread.peek() else { return };
            let local = socket.settings.endpoints.iter().find(|local| local.is_v4() == record.other.is_v4());
            if let Some(local) = local {
                let flow = Flow { local: record.other, remote: *local, device: 0 };
                if write_frame(&mut self.frame, &link, &flow, &record, &unread, 0) {
                    self.to_kernel.transmit(&mut self.frame, &self.counters);
                }
            }
            unread.pop(&record);
        }
    }

    /// Gives up the sockets of a session that has ended.
    pub(super) fn forget_datagrams(&mut self, session: u32) {
        let mut left = AT_END;
        for id in self.datagrams.of_session(session) {
            self.end_datagrams_within(id, false, &mut left);
        }
    }

    /// Handles a program's message about one of its sockets. False if it is not its own.
    pub(super) fn on_datagrams_message(&mut self, session: usize, id: u32) -> bool {
        let Some(socket) = self.datagrams.sockets.get_mut(&id) else { return true };
        if socket.settings.session as usize != session {
            return false;
        }
        if !std::mem::replace(&mut socket.listed, true) {
            self.datagrams.ready.push_back(id);
        }
        if !socket.receive.is_drained() && socket.program_wish.take() {
            self.datagrams.ringing.push(id);
        }
        true
    }

    /// Takes the frame from the wire if it carries a datagram for a program. Any other worker sends it to the front
    /// worker.
    pub(super) fn take_datagram(&mut self) -> bool {
        let whole = self.frame.segmentation.is_none();
        let local = destination(self.frame.bytes()).filter(|local| whole && self.datagrams.receives_at(local));
        let Some(local) = local else { return false };
        if self.is_front() {
            return self.receive_datagram(local);
        }
        let Some(crossbar) = &mut self.crossbar else { return false };
        // A full ring loses datagrams, as any full queue.
        if crossbar.peers.has_room(FRONT) {
            crossbar.peers.send(FRONT, Call::Datagram(self.frame.clone()));
        } else {
            self.counters.add(Counter::Dropped, 1);
        }
        true
    }

    /// In the front worker: handles a frame that another worker has received.
    pub(super) fn on_datagram(&mut self, frame: &Frame, now: Instant) {
        self.frame.copy_from(frame);
        if !self.take_datagram() {
            self.deliver_to_kernel(now);
        }
    }

    /// Puts the frame's datagram into its socket's ring. False if it is for the kernel.
    fn receive_datagram(&mut self, local: Endpoint) -> bool {
        let field = complete_checksum(&mut self.frame);
        let received = Received::parse(self.frame.bytes(), local.port);
        let socket = match &received {
            Ok(received) => self.datagrams.receiver(&Flow { local, remote: received.source, device: 0 }),
            Err(EnvelopeError::Checksum) => {
                self.counters.add(Counter::BadChecksum, 1);
                return true;
            }
            Err(_) => None,
        };
        let socket = socket.and_then(|id| self.datagrams.sockets.get_mut(&id));
        let (Some(socket), Ok(received)) = (socket, received) else {
            if let Some((at, field)) = field {
                self.frame.bytes_mut()[at..at + 2].copy_from_slice(&field);
            }
            return false;
        };
        let payload = &self.frame.bytes()[received.offset..][..received.length];
        if !socket.receive.push(&received.source, [payload].into_iter()) {
            self.counters.add(Counter::DatagramsDropped, 1);
            return true;
        }
        self.counters.add(Counter::DatagramsReceived, 1);
        if socket.program_wish.take() {
            self.datagrams.ringing.push(socket.settings.id);
        }
        true
    }

    /// Sends datagrams from the sockets' send rings: a batch of each, for as many sockets as a round allows; the others
    /// come first in the next round. Returns whether there was any.
    pub(super) fn poll_datagrams(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..self.datagrams.ready.len().min(ROUND) {
            let Some(id) = self.datagrams.ready.pop_front() else { break };
            let sent = self.send_datagrams(id, BATCH);
            worked |= sent > 0;
            let Some(socket) = self.datagrams.sockets.get_mut(&id) else { continue };
            if sent < BATCH {
                socket.own_wish.make();
                if socket.send.peek().is_none() {
                    socket.listed = false;
                    continue;
                }
            }
            self.datagrams.ready.push_back(id);
            worked = true;
        }
        worked
    }

    /// Sends up to `most` of a socket's datagrams. Returns how many were taken from its ring.
    fn send_datagrams(&mut self, id: u32, most: usize) -> usize {
        for taken in 0..most {
            let Some(socket) = self.datagrams.sockets.get_mut(&id) else { return taken };
            let Some(record) = socket.send.peek() else { return taken };
            let way = socket.ways.get(&record.other.address).copied();
            let port = socket.settings.endpoints.first().map_or(0, |endpoint| endpoint.port);
            let sent = way.filter(|_| record.other.port != 0 && port != 0).is_some_and(|way| {
                let flow = Flow { local: Endpoint { address: way.source, port }, remote: record.other, device: 0 };
                let frame = self.output.frame_mut(&self.counters);
                self.datagrams.ident = self.datagrams.ident.wrapping_add(1);
                let headers = Envelope::Udp(way.link, flow).header() - ETHERNET;
                let fits = headers + record.length as usize <= way.mtu as usize;
                fits && write_frame(frame, &way.link, &flow, &record, &socket.send, self.datagrams.ident)
            });
            socket.send.pop(&record);
            if sent {
                self.output.transmit(&self.counters);
            }
            self.counters.add(if sent { Counter::DatagramsSent } else { Counter::DatagramsDropped }, 1);
        }
        most
    }

    /// Calls `ring` for each socket whose program is to be woken.
    pub fn datagram_doorbells(&mut self, ring: impl FnMut(u32)) {
        self.datagrams.ringing.drain(..).for_each(ring);
    }
}

/// Writes the frame of a datagram. False if it has no room for it.
fn write_frame(frame: &mut Frame, link: &Link, flow: &Flow, record: &Record, ring: &Reader, ident: u16) -> bool {
    let envelope = Envelope::Udp(*link, *flow);
    let header = envelope.header();
    let length = header + record.length as usize;
    if length > frame.capacity() {
        return false;
    }
    frame.set_length(length);
    ring.read(record, 0, &mut frame.bytes_mut()[header..]);
    envelope.emit(frame.bytes_mut());
    if flow.is_v4() {
        allow_fragments(&mut frame.bytes_mut()[ETHERNET..], flow, ident);
    }
    (frame.checksum, frame.segmentation, frame.interface) = (Checksum::Unknown, None, link.interface);
    true
}

/// Makes an IPv4 packet one that may be fragmented on its way, since the kernel alone follows its path's MTU, and gives
/// its datagram a checksum.
fn allow_fragments(packet: &mut [u8], flow: &Flow, ident: u16) {
    let (ip, datagram) = packet.split_at_mut(IPV4);
    ip[ipv4::IDENT..ipv4::FRAGMENT].copy_from_slice(&ident.to_be_bytes());
    ip[ipv4::FRAGMENT] = 0;
    ip[ipv4::CHECKSUM..ipv4::SOURCE].fill(0);
    let sum = Sum::new().bytes(ip).finish();
    ip[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum.to_be_bytes());
    let sum = pseudo_header(&flow.local.v4_bytes(), &flow.remote.v4_bytes(), PROTOCOL_UDP, datagram.len());
    // 0 stands for no checksum (RFC 768).
    let sum = match sum.bytes(datagram).finish() {
        0 => 0xffff,
        sum => sum,
    };
    datagram[UDP_CHECKSUM..UDP].copy_from_slice(&sum.to_be_bytes());
}
