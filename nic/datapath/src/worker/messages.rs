//! Messages (RMPP) as one more engine of the worker: packets to the UDP port of a session for messages go to its data
//! half, which places them in session memory, answers them, and reports to the program only what its policy has to
//! decide.

use super::Worker;
use super::programs::Session;
use crate::messages::{MessageEndpoint, Messages};
use crate::peers::Call;
use baton_abi::layout::Counter;
use baton_device::{Checksum, Device, Frame, Segmentation};
use baton_shm::Region;
use baton_tcp::Instant;
use baton_wire::frame::{Link, finish_checksum};
use baton_wire::rmpp::envelope::{ETHERTYPE_RMPP, Envelope, Received, ethernet_address};
use baton_wire::{Endpoint, Flow};
use std::sync::Arc;

/// Packets that a session sends before the next source of work gets its turn.
const PACKETS: usize = 64;

/// Offset of the checksum field in a UDP header.
const UDP_CHECKSUM: usize = 6;

impl<H: Device, W: Device> Worker<H, W> {
    /// Adds a program's session for messages, at the worker whose turn it is.
    pub fn attach_messages(&mut self, id: u32, memory: Arc<Region>, endpoint: MessageEndpoint) {
        self.broadcast(|| Call::AttachMessages(id, memory.clone(), Box::new(endpoint)));
        self.attach_messages_here(id, memory, endpoint);
    }

    /// Records which session gets the packets to an address, and, in the session's worker, adds the session.
    pub(super) fn attach_messages_here(&mut self, id: u32, memory: Arc<Region>, endpoint: MessageEndpoint) {
        self.forget_session(id);
        self.programs.message_ports.push((endpoint.data.address, id));
        self.has_extras = true;
        self.programs.message_ports.sort_unstable();
        if self.owns_messages(id) {
            self.attach_here(id, memory.clone());
            if let Some(Some(session)) = self.programs.sessions.get_mut(id as usize) {
                session.messages = Some(Box::new(Messages::new(endpoint, memory)));
            }
        }
    }

    /// Lets a session for messages send to a host by `link`, or, without one, not at all. False if it has too many
    /// hosts; of a session of another worker it is not known.
    pub fn reach(&mut self, id: u32, host: [u8; 16], link: Option<Link>) -> bool {
        match &mut self.crossbar {
            Some(crossbar) if crossbar.peers.owner_of_messages(id) != crossbar.peers.me() => {
                let owner = crossbar.peers.owner_of_messages(id);
                crossbar.peers.send(owner, Call::Reach(id, host, link));
                true
            }
            _ => self.reach_here(id, host, link),
        }
    }

    pub(super) fn reach_here(&mut self, id: u32, host: [u8; 16], link: Option<Link>) -> bool {
        let session = self.programs.sessions.get_mut(id as usize).and_then(Option::as_mut);
        session.and_then(|session| session.messages.as_mut()).is_some_and(|messages| messages.reach(host, link))
    }

    /// Whether this worker handles the packets and rings of session `id`, if it is one for messages.
    fn owns_messages(&self, id: u32) -> bool {
        self.crossbar.as_ref().is_none_or(|crossbar| crossbar.peers.owner_of_messages(id) == crossbar.peers.me())
    }

    /// Forgets a session, of this worker or another.
    pub(super) fn forget_session(&mut self, id: u32) {
        self.forget_datagrams(id);
        self.wake_session(id);
        self.programs.sessions.get_mut(id as usize).and_then(Option::take);
        self.programs.message_ports.retain(|(_, other)| *other != id);
    }

    /// The session for messages that a frame is for.
    fn session_of_packet(&self) -> Option<u32> {
        let to = destination(self.frame.bytes())?;
        let ports = &self.programs.message_ports;
        let at = ports.binary_search_by_key(&to, |(address, _)| *address).ok()?;
        Some(ports[at].1)
    }

    /// With several workers: handles the frame from the wire if it carries a packet of this worker's session, or sends
    /// it to the session's worker. False if it is no such packet.
    pub(super) fn dispatch_packet(&mut self, now: Instant) -> bool {
        let Some(id) = self.session_of_packet() else { return false };
        if self.owns_messages(id) {
            self.on_packet(id, now);
            return true;
        }
        let Some(crossbar) = &mut self.crossbar else { return false };
        let owner = crossbar.peers.owner_of_messages(id);
        self.counters.add(Counter::Redirected, 1);
        // A full ring loses packets, as any full queue does: their sender sends them again.
        if crossbar.peers.has_room(owner) {
            crossbar.peers.send(owner, Call::Packet(id, self.frame.clone()));
        } else {
            self.counters.add(Counter::Dropped, 1);
        }
        true
    }

    /// Handles a frame from the wire for a session of this worker.
    pub(super) fn on_packet(&mut self, id: u32, now: Instant) {
        self.counters.add(Counter::WireReceived, 1);
        if !self.take_packet_of(id) {
            self.deliver_to_kernel(now);
        }
    }

    /// Gives the frame to the data half that it is for. False if it is for the kernel.
    #[inline(never)]
    pub(super) fn take_packet(&mut self) -> bool {
        self.session_of_packet().is_some_and(|id| self.take_packet_of(id))
    }

    fn take_packet_of(&mut self, id: u32) -> bool {
        let Some(Some(session)) = self.programs.sessions.get_mut(id as usize) else { return false };
        let Some(messages) = &mut session.messages else { return false };
        let field = complete_checksum(&mut self.frame);
        let bytes = self.frame.bytes();
        let local = messages.address();
        let taken = match Received::parse(bytes, local.port) {
            // Only a socket that is bound to a device knows which link the sender is on, so the packet is dropped; the
            // kernel's socket would report the link.
            Ok(Received { source, .. }) if local.port != 0 && source.is_link_local() && !local.is_link_local() => {
                self.counters.add(Counter::Dropped, 1);
                true
            }
            Ok(Received { source, offset, length }) => messages.receive(&source, &bytes[offset..offset + length]),
            Err(_) => {
                self.counters.add(Counter::BadChecksum, 1);
                true
            }
        };
        if let Some((at, field)) = field.filter(|_| !taken) {
            self.frame.bytes_mut()[at..at + 2].copy_from_slice(&field);
        }
        taken
    }

    /// Runs a batch of commands of a session for messages. Returns whether there was any.
    fn poll_message_commands(&mut self, id: usize) -> bool {
        let Some(Some(Session { commands, messages: Some(messages), .. })) = self.programs.sessions.get_mut(id) else {
            return false;
        };
        match messages.run_commands(commands) {
            Ok(round) => {
                messages.publish_counters();
                self.counters.add(Counter::BadMessages, round.bad);
                round.worked
            }
            Err(_) => {
                self.stop_session(id);
                self.programs.message_ports.retain(|(_, other)| *other as usize != id);
                true
            }
        }
    }

    /// Runs the commands of this worker's sessions for messages, and sends their packets and events, a bounded number
    /// of each. Returns whether there was any.
    pub(super) fn poll_messages(&mut self) -> bool {
        let mut worked = false;
        for at in 0..self.programs.message_ports.len() {
            // A session that breaks the interface is removed from the list meanwhile.
            let Some(id) = self.programs.message_ports.get(at).map(|(_, id)| *id as usize) else { break };
            worked |= self.poll_message_commands(id);
            let Some(Some(Session { events, unsignalled, messages: Some(messages), .. })) = self.programs.sessions.get_mut(id)
            else {
                continue;
            };
            let sent = messages.send_events(events);
            *unsignalled += sent;
            let mut packets = 0;
            while packets < PACKETS
                && let Some(sent) = self.output.send_packets(messages, PACKETS - packets, &self.counters)
            {
                packets += sent;
            }
            if sent > 0 || packets > 0 {
                messages.publish_counters();
                worked = true;
            }
        }
        worked
    }

    /// Whether a session for messages has something to do without a frame or a command.
    pub(super) fn has_messages_waiting(&mut self) -> bool {
        let mut sessions = self.programs.sessions.iter_mut().flatten();
        sessions.any(|Session { messages, events, .. }| messages.as_ref().is_some_and(|messages| messages.has_work(events)))
    }
}

impl<W: Device> crate::transmit::Output<W> {
    /// Sends the next packets of a session, `most` at most: a single one, or a run for one address, which the wire
    /// cuts. Returns how many there were; None if it has none.
    fn send_packets(&mut self, messages: &mut Messages, most: usize, counters: &crate::counters::Counters) -> Option<usize> {
        let local = messages.address();
        let header = envelope(NO_LINK, local, local).header();
        let cuts = local.port != 0 && self.wire.device.cuts_datagrams();
        let room = if cuts { self.wire.device.capabilities().segmentation as usize } else { 0 };
        let frame = self.frame_mut(counters);
        let length = (header + room).min(frame.capacity()).max(header + messages.packet());
        frame.set_length(length);
        let run = messages.transmit(&mut frame.bytes_mut()[header..], if cuts { most } else { 1 })?;
        let Some(link) = messages.link_to(&run.to) else {
            // The program has not asked for the route, or the agent has refused it.
            counters.add(Counter::Dropped, run.packets as u64);
            return Some(run.packets);
        };
        frame.set_length(header + run.length);
        let envelope = envelope(link, local, run.to);
        (frame.checksum, frame.segmentation, frame.interface) = (Checksum::Unknown, None, link.interface);
        if run.packets == 1 {
            envelope.emit(frame.bytes_mut());
        } else if let Some((start, offset)) = envelope.emit_partial(frame.bytes_mut()) {
            let (size, headers) = (run.segment as u16, header as u16);
            frame.checksum = Checksum::Partial { start: start as u16, offset: offset as u16 };
            frame.segmentation = Some(Segmentation { size, headers, ipv6: !local.is_v4(), ecn: false, udp: true });
        }
        self.transmit(counters);
        Some(run.packets)
    }
}

/// The headers from one endpoint to another. MAC addresses have port 0, which no UDP endpoint has.
fn envelope(link: Link, local: Endpoint, remote: Endpoint) -> Envelope {
    if local.port == 0 { Envelope::Ethernet(link) } else { Envelope::Udp(link, Flow { local, remote, device: 0 }) }
}

/// A header for computing lengths, which depend on the addresses alone.
pub(super) const NO_LINK: Link = Link { source: [0; 6], destination: [0; 6], ttl: 0, tos: 0, flow_label: 0, interface: 0 };

/// The address and port that a frame with a UDP datagram is for, or the MAC address of a raw RMPP frame. None for other
/// frames, fragments, and IPv6 with extension headers, which the kernel gets.
pub(super) fn destination(frame: &[u8]) -> Option<Endpoint> {
    const ETHERNET: usize = 14;
    const UDP: u8 = 17;
    let ip = frame.get(ETHERNET..)?;
    if frame[12..ETHERNET] == ETHERTYPE_RMPP.to_be_bytes() {
        return Some(ethernet_address(*frame.first_chunk()?));
    }
    let port = |udp: usize| Some(u16::from_be_bytes([*ip.get(udp + 2)?, *ip.get(udp + 3)?]));
    match (frame[12..ETHERNET].first_chunk()?, ip.first()? >> 4) {
        ([0x08, 0x00], 4) => {
            let header = usize::from(ip[0] & 0xf) * 4;
            // Neither "more fragments" nor an offset.
            let whole = ip.get(6)? & 0x3f == 0 && *ip.get(7)? == 0;
            if header < 20 || !whole || *ip.get(9)? != UDP {
                return None;
            }
            Some(Endpoint::v4(*ip.get(16..)?.first_chunk()?, port(header)?))
        }
        ([0x86, 0xdd], 6) if *ip.get(6)? == UDP => Some(Endpoint::v6(*ip.get(24..)?.first_chunk()?, port(40)?)),
        _ => None,
    }
}

/// Completes the checksum of a UDP frame so that it can be verified: a frame that a kernel on this machine has sent has
/// only the sum of the pseudo-header. Returns offset and old contents of the field if it was changed, since the kernel
/// would need the old contents.
pub(super) fn complete_checksum(frame: &mut Frame) -> Option<(usize, [u8; 2])> {
    let Checksum::Partial { start, offset } = frame.checksum else { return None };
    let at = usize::from(start) + usize::from(offset);
    if usize::from(offset) != UDP_CHECKSUM {
        return None;
    }
    let field = *frame.bytes().get(at..)?.first_chunk()?;
    if frame.bytes()[12] == 0x08 {
        // Over IPv4 0 stands for no checksum, and the packet has a CRC of its own.
        frame.bytes_mut()[at..at + 2].fill(0);
    } else {
        finish_checksum(frame.bytes_mut(), start.into(), offset.into());
    }
    Some((at, field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::checksum::pseudo_header;

    fn frame(from: Endpoint, to: Endpoint) -> Vec<u8> {
        let envelope = Envelope::Udp(NO_LINK, Flow { local: from, remote: to, device: 0 });
        let mut frame = vec![0; envelope.header() + 100];
        envelope.emit(&mut frame);
        frame
    }

    #[test]
    fn the_destination_is_read_from_whole_datagrams_only() {
        let (a, b) = (Endpoint::v4([10, 0, 0, 1], 5), Endpoint::v4([10, 0, 0, 2], 700));
        let v4 = frame(a, b);
        assert_eq!(destination(&v4), Some(b));
        let (a, b) = (Endpoint::v6([1; 16], 5), Endpoint::v6([2; 16], 700));
        assert_eq!(destination(&frame(a, b)), Some(b));
        for (at, value) in [(12, 0x88), (14, 0x55), (14, 0x41), (20, 0x20), (21, 1), (23, 6)] {
            let mut other = v4.clone();
            other[at] = value;
            assert_eq!(destination(&other), None, "byte {at}");
        }
        for length in 0..38 {
            assert_eq!(destination(&v4[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn a_partial_checksum_becomes_one_that_holds() {
        for (from, to) in [
            (Endpoint::v4([10, 0, 0, 1], 5), Endpoint::v4([10, 0, 0, 2], 700)),
            (Endpoint::v6([1; 16], 5), Endpoint::v6([2; 16], 700)),
        ] {
            let bytes = frame(from, to);
            let start = bytes.len() - 108;
            let mut sent = Frame::with_capacity(200);
            sent.fill(&bytes);
            let pseudo = pseudo_header(&from.address, &to.address, 17, 108).folded();
            sent.bytes_mut()[start + 6..start + 8].copy_from_slice(&pseudo.to_be_bytes());
            assert!(Received::parse(sent.bytes(), 700).is_err(), "the sum of the pseudo-header is no checksum");
            sent.checksum = Checksum::Partial { start: start as u16, offset: UDP_CHECKSUM as u16 };
            assert_eq!(complete_checksum(&mut sent), Some((start + 6, pseudo.to_be_bytes())));
            assert_eq!(Received::parse(sent.bytes(), 700).map(|received| received.source), Ok(from));
        }
    }
}
