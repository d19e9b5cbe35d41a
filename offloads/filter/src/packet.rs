//! The fields of a frame that rules can match. All numbers in a frame come from outside, so lengths are checked before
//! they are used.

use crate::rule::{Class, PROTOCOL_UDP};
use baton_wire::Flags;
use baton_wire::frame::{
    ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV4_FRAGMENT, IPV6, PROTOCOL_IPV6_FRAGMENT, PROTOCOL_TCP, TCP, said_length,
};
use baton_wire::offset::{ethernet, ipv4, ipv6, tcp};

/// The direction of a frame, seen from the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the wire.
    In,
    /// To the wire.
    Out,
}

/// Which part of its datagram a packet carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// All of it.
    Whole,
    /// The first fragment, with the transport header; the datagram's identification.
    First(u32),
    /// A later fragment, which has no transport header.
    Later(u32),
}

/// What a TCP segment says about its connection; [`Step::Continues`] for everything else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// SYN without ACK: a new connection.
    Opens,
    /// Nothing that begins or ends one.
    Continues,
    /// FIN: its sender sends no more data.
    Closes,
    /// RST.
    Resets,
}

/// The fields of a frame. Addresses are left-aligned in 128 bits, also IPv4 addresses. Fields that a frame does not
/// have are zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// Kind of packet.
    pub class: Class,
    /// IP protocol: for IPv6 the type of the first header that is no extension header.
    pub protocol: Option<u8>,
    /// Source address.
    pub source: u128,
    /// Destination address.
    pub destination: u128,
    /// Source port of TCP or UDP.
    pub source_port: u16,
    /// Destination port of TCP or UDP.
    pub destination_port: u16,
    /// Whether it is a fragment.
    pub part: Part,
    /// What a TCP segment says about its connection.
    pub step: Step,
    /// Offset of the IP header in the frame.
    pub ip: usize,
    /// Offset of the transport header in the frame.
    pub transport: usize,
    /// Offset of the end of the packet in the frame.
    pub end: usize,
}

/// The frame's headers are damaged, cut off, or made to hide ports (RFC 1858, RFC 3128, RFC 8200 section 4.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Malformed;

/// EtherTypes of VLAN tags (IEEE 802.1Q and 802.1ad), and how many of them a frame may have.
const VLAN: [u16; 2] = [0x8100, 0x88a8];
const MAX_TAGS: usize = 2;
const TAG: usize = 4;

/// Extension headers of IPv6 that are skipped: hop-by-hop options, routing, destination options; and most of them.
const EXTENSIONS: [u8; 3] = [0, 43, 60];
const MAX_EXTENSIONS: usize = 8;
/// Bytes of an IPv6 Fragment header.
const FRAGMENT_BYTES: usize = 8;
/// Bytes of a UDP header.
const UDP: usize = 8;

fn be16(bytes: &[u8], at: usize) -> Result<u16, Malformed> {
    let bytes = bytes.get(at..at + 2).ok_or(Malformed)?;
    Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
}

fn be32(bytes: &[u8], at: usize) -> Result<u32, Malformed> {
    Ok(u32::from(be16(bytes, at)?) << 16 | u32::from(be16(bytes, at + 2)?))
}

impl Packet {
    /// Reads a frame.
    #[inline]
    pub(crate) fn parse(frame: &[u8]) -> Result<Packet, Malformed> {
        let (mut kind, mut ip) = (be16(frame, ethernet::TYPE)?, ETHERNET);
        let mut tags = 0;
        while VLAN.contains(&kind) {
            tags += 1;
            if tags > MAX_TAGS {
                return Err(Malformed);
            }
            (kind, ip) = (be16(frame, ip + 2)?, ip + TAG);
        }
        match kind {
            ETHERTYPE_IPV4 => Self::parse_v4(frame, ip),
            ETHERTYPE_IPV6 => Self::parse_v6(frame, ip),
            other => Ok(Packet { ip, transport: frame.len(), end: frame.len(), ..Packet::empty(Class::Other(other)) }),
        }
    }

    /// A packet of this class without any other fields.
    pub fn empty(class: Class) -> Packet {
        Packet {
            class,
            protocol: None,
            source: 0,
            destination: 0,
            source_port: 0,
            destination_port: 0,
            part: Part::Whole,
            step: Step::Continues,
            ip: 0,
            transport: 0,
            end: 0,
        }
    }

    #[inline]
    fn parse_v4(frame: &[u8], at: usize) -> Result<Packet, Malformed> {
        let ip = frame.get(at..).filter(|ip| ip.len() >= IPV4).ok_or(Malformed)?;
        let (header, total) = (usize::from(ip[0] & 15) * 4, said_length(be16(ip, ipv4::LENGTH)?, ip.len()));
        if ip[0] >> 4 != 4 || header < IPV4 || total < header || total > ip.len() {
            return Err(Malformed);
        }
        let field = be16(ip, ipv4::FRAGMENT)?;
        let ident = u32::from(be16(ip, ipv4::IDENT)?);
        let offset = field & (IPV4_FRAGMENT >> 1);
        let part = match (offset, field & IPV4_FRAGMENT) {
            (_, 0) => Part::Whole,
            (0, _) => Part::First(ident),
            _ => Part::Later(ident),
        };
        let address = |at: usize| be32(ip, at).map(|address| u128::from(address) << 96);
        let packet = Packet {
            protocol: Some(ip[ipv4::PROTOCOL]),
            source: address(ipv4::SOURCE)?,
            destination: address(ipv4::DESTINATION)?,
            part,
            ip: at,
            transport: at + header,
            end: at + total,
            ..Packet::empty(Class::V4)
        };
        packet.with_transport(frame, usize::from(offset) * 8)
    }

    fn parse_v6(frame: &[u8], at: usize) -> Result<Packet, Malformed> {
        let ip = frame.get(at..).filter(|ip| ip.len() >= IPV6).ok_or(Malformed)?;
        let end = at + IPV6 + said_length(be16(ip, ipv6::LENGTH)?, ip.len() - IPV6);
        if ip[0] >> 4 != 6 || end > frame.len() {
            return Err(Malformed);
        }
        let address = |at: usize| -> Result<u128, Malformed> {
            let bytes = ip.get(at..at + 16).and_then(|bytes| bytes.first_chunk()).ok_or(Malformed)?;
            Ok(u128::from_be_bytes(*bytes))
        };
        let (mut next, mut transport, mut part, mut offset) = (ip[ipv6::NEXT_HEADER], at + IPV6, Part::Whole, 0);
        let mut headers = 0;
        loop {
            if EXTENSIONS.contains(&next) && offset == 0 {
                let length = (usize::from(*frame.get(transport + 1).ok_or(Malformed)?) + 1) * 8;
                (next, transport) = (frame[transport], transport + length);
            } else if next == PROTOCOL_IPV6_FRAGMENT && part == Part::Whole {
                let field = be16(frame, transport + 2)?;
                let ident = be32(frame, transport + 4)?;
                offset = usize::from(field & 0xfff8);
                part = if offset > 0 { Part::Later(ident) } else { Part::First(ident) };
                // RFC 6946: a fragment that is the whole datagram is no fragment.
                if field & 0xfff9 == 0 {
                    part = Part::Whole;
                }
                (next, transport) = (frame[transport], transport + FRAGMENT_BYTES);
            } else {
                break;
            }
            headers += 1;
            if headers > MAX_EXTENSIONS || transport > end {
                return Err(Malformed);
            }
        }
        let packet = Packet {
            protocol: Some(next),
            source: address(ipv6::SOURCE)?,
            destination: address(ipv6::DESTINATION)?,
            part,
            ip: at,
            transport,
            end,
            ..Packet::empty(Class::V6)
        };
        packet.with_transport(frame, offset)
    }

    /// Reads the transport header, if the packet contains it. `offset` is the offset of a fragment in its datagram, in
    /// bytes.
    #[inline(always)]
    fn with_transport(mut self, frame: &[u8], offset: usize) -> Result<Packet, Malformed> {
        let needed = match self.protocol {
            Some(PROTOCOL_TCP) => TCP,
            Some(PROTOCOL_UDP) => UDP,
            _ => return Ok(self),
        };
        if offset > 0 {
            // A fragment that reaches back into the header could change ports that were checked in the first.
            return if offset < needed { Err(Malformed) } else { Ok(self) };
        }
        if self.transport + needed > self.end {
            return Err(Malformed);
        }
        (self.source_port, self.destination_port) = (be16(frame, self.transport)?, be16(frame, self.transport + 2)?);
        if self.protocol == Some(PROTOCOL_TCP) {
            let flags = Flags(frame[self.transport + tcp::FLAGS]);
            self.step = if flags.contains(Flags::RST) {
                Step::Resets
            } else if flags.contains(Flags::SYN) && !flags.contains(Flags::ACK) {
                Step::Opens
            } else if flags.contains(Flags::FIN) {
                Step::Closes
            } else {
                Step::Continues
            };
        }
        Ok(self)
    }

    /// Whether flows are kept of such packets: TCP and UDP.
    pub(crate) fn has_flow(&self) -> bool {
        matches!(self.protocol, Some(PROTOCOL_TCP | PROTOCOL_UDP))
    }
}
