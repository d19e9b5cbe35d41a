//! What carries RMPP packets: Ethernet frames of a type of their own, and UDP datagrams over IPv4 and IPv6.

use crate::checksum::{Sum, pseudo_header};
use crate::flow::{Endpoint, Flow};
use crate::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV4_DONT_FRAGMENT, IPV4_FRAGMENT, IPV6, Link};
use crate::offset::{ethernet, ipv4, ipv6};

/// EtherType of RMPP in raw frames: "local experimental 1" of IEEE 802.
pub const ETHERTYPE_RMPP: u16 = 0x88b5;
/// UDP port of RMPP unless another is set, from the range that IANA assigns to nobody.
pub const UDP_PORT: u16 = 51_717;
/// IP protocol number of UDP.
pub const PROTOCOL_UDP: u8 = 17;
/// Bytes of a UDP header.
pub const UDP: usize = 8;

/// Offsets in the UDP header (RFC 768), in bytes.
mod udp {
    pub const LENGTH: usize = 4;
    pub const CHECKSUM: usize = 6;
}

/// Why a frame carries no RMPP packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EnvelopeError {
    /// Neither RMPP's EtherType nor UDP to its port: the frame is somebody else's.
    NotRmpp,
    /// An IPv4 fragment.
    Fragment,
    /// A length field points outside the frame, or fields contradict each other.
    Malformed,
    /// The checksum of the IPv4 header or of UDP is wrong.
    Checksum,
}

/// Where a received packet came from, and where it lies in its frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// Address of the sender: its IP address and UDP port, or its MAC address in the first six bytes and port 0. A MAC
    /// address is no IP address: the bytes behind it are zero, and IPv6 addresses of that form are refused.
    pub source: Endpoint,
    /// Offset of the packet in the frame.
    pub offset: usize,
    /// Bytes from there to the end of what carries it.
    pub length: usize,
}

/// The address of a host that is known by its MAC address.
pub fn ethernet_address(mac: [u8; 6]) -> Endpoint {
    let mut address = [0; 16];
    address[..6].copy_from_slice(&mac);
    Endpoint { address, port: 0 }
}

/// Headers that carry packets from one host to another.
#[derive(Clone, Copy, Debug)]
pub enum Envelope {
    /// Raw frames between the two MAC addresses of the link.
    Ethernet(Link),
    /// UDP over IPv4 or IPv6.
    Udp(Link, Flow),
}

impl Envelope {
    /// Bytes that [`Envelope::emit`] writes.
    pub fn header(&self) -> usize {
        match self {
            Envelope::Ethernet(_) => ETHERNET,
            Envelope::Udp(_, flow) if flow.is_v4() => ETHERNET + IPV4 + UDP,
            Envelope::Udp(..) => ETHERNET + IPV6 + UDP,
        }
    }

    /// Bytes of packet that fit into one frame, for a link that carries `mtu` bytes behind the Ethernet header.
    pub fn room(&self, mtu: usize) -> usize {
        mtu.saturating_sub(self.header() - ETHERNET)
    }

    /// Writes the headers in front of a packet, which lies in `frame` from [`Envelope::header`] on to its end.
    ///
    /// # Panics
    /// If the frame is shorter than its headers, or longer than IP can say.
    pub fn emit(&self, frame: &mut [u8]) {
        self.emit_headers(frame);
        // Over IPv4 the CRC32C has to do: 0 stands for no checksum. IPv6 does not do without (RFC 8200 section 8.1).
        if let Envelope::Udp(_, flow) = self
            && !flow.is_v4()
        {
            let at = self.header() - UDP;
            let sum = pseudo_header(&flow.local.address, &flow.remote.address, PROTOCOL_UDP, frame.len() - at);
            let sum = match sum.bytes(&frame[at..]).finish() {
                0 => 0xffff,
                sum => sum,
            };
            frame[at + udp::CHECKSUM..at + UDP].copy_from_slice(&sum.to_be_bytes());
        }
    }

    /// As [`Envelope::emit`], but in the field of UDP's checksum is the sum of the pseudo-header, for a device that
    /// cuts the frame into datagrams or completes the checksum. Returns where the sum begins, and the field's offset
    /// from there; None for raw Ethernet.
    ///
    /// # Panics
    /// As [`Envelope::emit`].
    pub fn emit_partial(&self, frame: &mut [u8]) -> Option<(usize, usize)> {
        self.emit_headers(frame);
        let Envelope::Udp(_, flow) = self else { return None };
        let at = self.header() - UDP;
        let length = frame.len() - at;
        let sum = match flow.is_v4() {
            true => pseudo_header(&flow.local.v4_bytes(), &flow.remote.v4_bytes(), PROTOCOL_UDP, length),
            false => pseudo_header(&flow.local.address, &flow.remote.address, PROTOCOL_UDP, length),
        };
        frame[at + udp::CHECKSUM..at + UDP].copy_from_slice(&sum.folded().to_be_bytes());
        Some((at, udp::CHECKSUM))
    }

    /// Writes the headers, without UDP's checksum.
    fn emit_headers(&self, frame: &mut [u8]) {
        let (Envelope::Ethernet(link) | Envelope::Udp(link, _)) = self;
        frame[..ethernet::SOURCE].copy_from_slice(&link.destination);
        frame[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&link.source);
        let ethertype = match self {
            Envelope::Ethernet(_) => ETHERTYPE_RMPP,
            Envelope::Udp(_, flow) if flow.is_v4() => ETHERTYPE_IPV4,
            Envelope::Udp(..) => ETHERTYPE_IPV6,
        };
        frame[ethernet::TYPE..ETHERNET].copy_from_slice(&ethertype.to_be_bytes());
        if let Envelope::Udp(link, flow) = self {
            let (ip, datagram) = frame[ETHERNET..].split_at_mut(self.header() - ETHERNET - UDP);
            let length = u16::try_from(ip.len() + datagram.len()).expect("a packet fits into an IP packet");
            datagram[..2].copy_from_slice(&flow.local.port.to_be_bytes());
            datagram[2..4].copy_from_slice(&flow.remote.port.to_be_bytes());
            let of_datagram = datagram.len() as u16;
            datagram[udp::LENGTH..udp::CHECKSUM].copy_from_slice(&of_datagram.to_be_bytes());
            datagram[udp::CHECKSUM..UDP].fill(0);
            if flow.is_v4() {
                emit_v4(link, flow, length, ip);
            } else {
                emit_v6(link, flow, length - IPV6 as u16, ip);
            }
        }
    }
}

fn emit_v4(link: &Link, flow: &Flow, length: u16, ip: &mut [u8]) {
    ip.fill(0);
    ip[0] = 0x45;
    ip[ipv4::TOS] = link.tos;
    ip[ipv4::LENGTH..ipv4::IDENT].copy_from_slice(&length.to_be_bytes());
    ip[ipv4::FRAGMENT] = IPV4_DONT_FRAGMENT;
    ip[ipv4::TTL] = link.ttl;
    ip[ipv4::PROTOCOL] = PROTOCOL_UDP;
    ip[ipv4::SOURCE..ipv4::DESTINATION].copy_from_slice(&flow.local.v4_bytes());
    ip[ipv4::DESTINATION..IPV4].copy_from_slice(&flow.remote.v4_bytes());
    let sum = Sum::new().bytes(ip).finish();
    ip[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum.to_be_bytes());
}

fn emit_v6(link: &Link, flow: &Flow, length: u16, ip: &mut [u8]) {
    let word = 6 << 28 | u32::from(link.tos) << 20 | (link.flow_label & 0xf_ffff);
    ip[..4].copy_from_slice(&word.to_be_bytes());
    ip[ipv6::LENGTH..ipv6::NEXT_HEADER].copy_from_slice(&length.to_be_bytes());
    ip[ipv6::NEXT_HEADER] = PROTOCOL_UDP;
    ip[ipv6::HOP_LIMIT] = link.ttl;
    ip[ipv6::SOURCE..ipv6::DESTINATION].copy_from_slice(&flow.local.address);
    ip[ipv6::DESTINATION..IPV6].copy_from_slice(&flow.remote.address);
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

impl Received {
    /// Finds the RMPP packet in an Ethernet frame. `port` is the UDP port at which packets are received.
    ///
    /// # Errors
    /// Why there is none.
    pub fn parse(frame: &[u8], port: u16) -> Result<Received, EnvelopeError> {
        if frame.len() < ETHERNET {
            return Err(EnvelopeError::Malformed);
        }
        match be16(frame, ethernet::TYPE) {
            ETHERTYPE_RMPP => {
                let mac = *frame[ethernet::SOURCE..].first_chunk().expect("the length was checked");
                Ok(Received { source: ethernet_address(mac), offset: ETHERNET, length: frame.len() - ETHERNET })
            }
            ETHERTYPE_IPV4 => Self::parse_v4(frame, port),
            ETHERTYPE_IPV6 => Self::parse_v6(frame, port),
            _ => Err(EnvelopeError::NotRmpp),
        }
    }

    fn parse_v4(frame: &[u8], port: u16) -> Result<Received, EnvelopeError> {
        let ip = &frame[ETHERNET..];
        if ip.len() < IPV4 || ip[0] >> 4 != 4 {
            return Err(EnvelopeError::Malformed);
        }
        if ip[ipv4::PROTOCOL] != PROTOCOL_UDP {
            return Err(EnvelopeError::NotRmpp);
        }
        let (header, total) = (usize::from(ip[0] & 0x0f) * 4, usize::from(be16(ip, ipv4::LENGTH)));
        if header < IPV4 || total < header + UDP || total > ip.len() {
            return Err(EnvelopeError::Malformed);
        }
        if be16(ip, ipv4::FRAGMENT) & IPV4_FRAGMENT != 0 {
            return Err(EnvelopeError::Fragment);
        }
        if Sum::new().bytes(&ip[..header]).finish() != 0 {
            return Err(EnvelopeError::Checksum);
        }
        let datagram = &ip[header..total];
        let address = |at: usize| [ip[at], ip[at + 1], ip[at + 2], ip[at + 3]];
        let (source, destination) = (address(ipv4::SOURCE), address(ipv4::DESTINATION));
        let sum = pseudo_header(&source, &destination, PROTOCOL_UDP, datagram.len());
        let from = Endpoint::v4(source, be16(datagram, 0));
        Self::parse_udp(datagram, port, from, sum, ETHERNET + header)
    }

    fn parse_v6(frame: &[u8], port: u16) -> Result<Received, EnvelopeError> {
        let ip = &frame[ETHERNET..];
        if ip.len() < IPV6 || ip[0] >> 4 != 6 {
            return Err(EnvelopeError::Malformed);
        }
        if ip[ipv6::NEXT_HEADER] != PROTOCOL_UDP {
            return Err(EnvelopeError::NotRmpp);
        }
        let length = usize::from(be16(ip, ipv6::LENGTH));
        if length < UDP || IPV6 + length > ip.len() {
            return Err(EnvelopeError::Malformed);
        }
        let datagram = &ip[IPV6..IPV6 + length];
        let (source, destination) = (&ip[ipv6::SOURCE..ipv6::DESTINATION], &ip[ipv6::DESTINATION..IPV6]);
        let sum = pseudo_header(source, destination, PROTOCOL_UDP, length);
        let from = Endpoint::v6(*source.first_chunk().expect("an address has 16 bytes"), be16(datagram, 0));
        // These would be taken for an IPv4 or a MAC address.
        if from.is_v4() || from.address[6..] == [0; 10] {
            return Err(EnvelopeError::Malformed);
        }
        if be16(datagram, udp::CHECKSUM) == 0 {
            return Err(EnvelopeError::Checksum);
        }
        Self::parse_udp(datagram, port, from, sum, ETHERNET + IPV6)
    }

    fn parse_udp(datagram: &[u8], port: u16, source: Endpoint, pseudo: Sum, at: usize) -> Result<Received, EnvelopeError> {
        if be16(datagram, 2) != port {
            return Err(EnvelopeError::NotRmpp);
        }
        if usize::from(be16(datagram, udp::LENGTH)) != datagram.len() || source.port == 0 {
            return Err(EnvelopeError::Malformed);
        }
        if be16(datagram, udp::CHECKSUM) != 0 && pseudo.bytes(datagram).finish() != 0 {
            return Err(EnvelopeError::Checksum);
        }
        Ok(Received { source, offset: at + UDP, length: datagram.len() - UDP })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelopes() -> [Envelope; 3] {
        let link = Link { source: [2, 0, 0, 0, 0, 1], destination: [2, 0, 0, 0, 0, 2], ttl: 64, ..Link::default() };
        let v4 = Flow { local: Endpoint::v4([10, 0, 0, 1], 9), remote: Endpoint::v4([10, 0, 0, 2], UDP_PORT), device: 0 };
        let v6 = Flow { local: Endpoint::v6([0xfd; 16], 9), remote: Endpoint::v6([0xfe; 16], UDP_PORT), device: 0 };
        [Envelope::Ethernet(link), Envelope::Udp(link, v4), Envelope::Udp(link, v6)]
    }

    fn frame(envelope: &Envelope) -> ([u8; 128], usize) {
        let mut frame = [0u8; 128];
        let length = envelope.header() + 41;
        frame[envelope.header()..length].fill(0x5a);
        envelope.emit(&mut frame[..length]);
        (frame, length)
    }

    #[test]
    fn what_was_written_reads_back() {
        for envelope in envelopes() {
            let (frame, length) = frame(&envelope);
            let received = Received::parse(&frame[..length], UDP_PORT).unwrap();
            let source = match envelope {
                Envelope::Ethernet(link) => ethernet_address(link.source),
                Envelope::Udp(_, flow) => flow.local,
            };
            assert_eq!(received, Received { source, offset: envelope.header(), length: 41 });
            assert_eq!(envelope.room(1500) + envelope.header(), 1500 + ETHERNET);
        }
    }

    #[test]
    fn other_frames_are_somebody_elses() {
        let [_, v4, v6] = envelopes();
        for envelope in [v4, v6] {
            let (frame, length) = frame(&envelope);
            assert_eq!(Received::parse(&frame[..length], 53), Err(EnvelopeError::NotRmpp));
        }
        assert_eq!(Received::parse(&[0; 60], UDP_PORT), Err(EnvelopeError::NotRmpp));
    }

    #[test]
    fn lying_headers_are_refused() {
        let [_, v4, v6] = envelopes();
        for envelope in [v4, v6] {
            let (good, length) = frame(&envelope);
            for cut in 0..length {
                assert!(Received::parse(&good[..cut], UDP_PORT).is_err(), "cut at {cut}");
            }
            for at in 0..length {
                for value in [0u8, 0x0f, 0x7f, 0xff] {
                    let mut bad = good;
                    bad[at] = value;
                    if let Ok(received) = Received::parse(&bad[..length], UDP_PORT) {
                        assert!(received.offset + received.length <= length);
                    }
                }
            }
        }
        // IPv6 without a UDP checksum, and both with a wrong one.
        let (mut bad, length) = frame(&v6);
        let at = ETHERNET + IPV6 + udp::CHECKSUM;
        bad[at..at + 2].fill(0);
        assert_eq!(Received::parse(&bad[..length], UDP_PORT), Err(EnvelopeError::Checksum));
        bad[at] = 1;
        assert_eq!(Received::parse(&bad[..length], UDP_PORT), Err(EnvelopeError::Checksum));
    }
}
