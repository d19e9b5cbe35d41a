//! Ethernet frames that carry TCP: a parser, and a template that writes a connection's headers.

use crate::checksum::{self, Sum};
use crate::flow::{Endpoint, Flow};
use crate::offset::{ethernet, ipv4, ipv6, tcp};
use crate::plain::{Acknowledgement, TIMESTAMPS};
use crate::tcp::{Flags, TcpOptions};

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
pub const IPV4: usize = 20;
/// Bytes of an IPv6 header.
pub const IPV6: usize = 40;
/// Bytes of a TCP header without options.
pub const TCP: usize = 20;
/// The longest header that [`Template::emit`] writes: Ethernet, IPv6, TCP with 40 bytes of options.
pub const MAX_HEADER: usize = ETHERNET + IPV6 + TCP + 40;
/// Offset of the checksum field in a TCP header, as frames with a partial checksum carry it.
pub const TCP_CHECKSUM: usize = tcp::CHECKSUM;
/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// IP protocol number of ICMP.
pub const PROTOCOL_ICMP: u8 = 1;
/// IP protocol number of TCP.
pub const PROTOCOL_TCP: u8 = 6;
/// Next-header number of the IPv6 Fragment header (RFC 8200 section 4.5).
pub const PROTOCOL_IPV6_FRAGMENT: u8 = 44;
/// IP protocol number of ICMPv6.
pub const PROTOCOL_ICMPV6: u8 = 58;
/// Bits of the IPv4 fragment field that are set in fragments only: "more fragments" and the offset.
pub const IPV4_FRAGMENT: u16 = 0x3fff;
/// The "don't fragment" bit in the first byte of the IPv4 fragment field.
pub const IPV4_DONT_FRAGMENT: u8 = 0x40;
/// The two ECN bits of an IPv4 type of service or an IPv6 traffic class.
pub const ECN_MASK: u8 = 3;
/// ECN field "congestion experienced" (RFC 3168 section 5).
pub const ECN_CE: u8 = 3;
/// First two bytes of the source address of a frame that a NIC beside the kernel gives to it: the index of the device
/// at which it is to count as received follows, unless it is sent on the loopback device.
pub const INJECT: [u8; 2] = [0x02, 0xba];

/// Why a frame is no TCP segment that the lookup can assign to a connection. Such frames are not errors: they go to the
/// kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameError {
    /// No IPv4 or IPv6 header follows the Ethernet header (ARP, VLAN tag, …).
    NotIp,
    /// No TCP header follows the IP header (UDP, IPv6 extension headers, …).
    NotTcp,
    /// An IPv4 fragment.
    Fragment,
    /// A length field or offset points outside the frame.
    Malformed,
    /// The IPv4 header's checksum is wrong.
    Checksum,
}

/// A TCP segment in an Ethernet frame, its fields in host order.
#[derive(Clone, Copy, Debug)]
pub struct TcpFrame {
    /// The flow as the receiver sees it: `local` is the destination, the device that by which it came.
    pub flow: Flow,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: Flags,
    /// Window field, unscaled.
    pub window: u16,
    /// Options.
    pub options: TcpOptions,
    /// ECN field of the IP header (RFC 3168 section 5): 0 Not-ECT, 1 ECT(1), 2 ECT(0), 3 CE.
    pub ecn: u8,
    /// Offset of the TCP header in the frame.
    pub tcp_offset: usize,
    /// Offset of the payload in the frame.
    pub payload_offset: usize,
    /// Bytes of payload.
    pub payload_length: usize,
}

#[inline]
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Bytes that an IP packet has by the length in its header: `field` of the `there` that the frame has of what the field
/// counts. A device with large receive may leave the field zero where there are more than it can say (above 64 KB);
/// otherwise 0 is a length like any other.
#[inline]
pub fn said_length(field: u16, there: usize) -> usize {
    if field == 0 && there > usize::from(u16::MAX) { there } else { field.into() }
}

impl TcpFrame {
    /// Reads an Ethernet frame that came by this device, 0 where there is one wire. The TCP checksum is not verified:
    /// see [`TcpFrame::checksum_holds`].
    ///
    /// # Errors
    /// The first reason why the frame is no TCP segment.
    #[inline]
    pub fn parse(frame: &[u8], device: u32) -> Result<TcpFrame, FrameError> {
        if frame.len() < ETHERNET + IPV4 + TCP {
            return Err(if frame.len() < ETHERNET { FrameError::Malformed } else { FrameError::NotIp });
        }
        match be16(frame, ethernet::TYPE) {
            ETHERTYPE_IPV4 => Self::parse_v4(frame, device),
            ETHERTYPE_IPV6 => Self::parse_v6(frame, device),
            _ => Err(FrameError::NotIp),
        }
    }

    #[inline]
    fn parse_v4(frame: &[u8], device: u32) -> Result<TcpFrame, FrameError> {
        let ip = &frame[ETHERNET..];
        let header = usize::from(ip[0] & 0x0f) * 4;
        let total = said_length(be16(ip, ipv4::LENGTH), ip.len());
        if ip[0] >> 4 != 4 || header < IPV4 {
            return Err(FrameError::Malformed);
        }
        if ip[ipv4::PROTOCOL] != PROTOCOL_TCP {
            return Err(FrameError::NotTcp);
        }
        if be16(ip, ipv4::FRAGMENT) & IPV4_FRAGMENT != 0 {
            return Err(FrameError::Fragment);
        }
        if total > ip.len() || total < header + TCP {
            return Err(FrameError::Malformed);
        }
        if Sum::new().bytes(&ip[..header]).finish() != 0 {
            return Err(FrameError::Checksum);
        }
        let address = |at: usize| [ip[at], ip[at + 1], ip[at + 2], ip[at + 3]];
        let (remote, local) = (address(ipv4::SOURCE), address(ipv4::DESTINATION));
        let tcp = ETHERNET + header;
        let flow =
            Flow { local: Endpoint::v4(local, be16(frame, tcp + 2)), remote: Endpoint::v4(remote, be16(frame, tcp)), device };
        Self::parse_tcp(frame, flow, tcp, ETHERNET + total, ip[ipv4::TOS] & ECN_MASK)
    }

    fn parse_v6(frame: &[u8], device: u32) -> Result<TcpFrame, FrameError> {
        let ip = &frame[ETHERNET..];
        if ip.len() < IPV6 + TCP || ip[0] >> 4 != 6 {
            return Err(FrameError::Malformed);
        }
        if ip[ipv6::NEXT_HEADER] != PROTOCOL_TCP {
            return Err(FrameError::NotTcp);
        }
        let length = said_length(be16(ip, ipv6::LENGTH), ip.len() - IPV6);
        if IPV6 + length > ip.len() || length < TCP {
            return Err(FrameError::Malformed);
        }
        let address = |at: usize| {
            let mut bytes = [0u8; 16];
            bytes.copy_from_slice(&ip[at..at + 16]);
            bytes
        };
        let tcp = ETHERNET + IPV6;
        let flow = Flow {
            local: Endpoint::v6(address(ipv6::DESTINATION), be16(frame, tcp + 2)),
            remote: Endpoint::v6(address(ipv6::SOURCE), be16(frame, tcp)),
            device,
        };
        // An IPv4-mapped address may not appear in a packet (RFC 4291 section 2.5.5.2), and would be taken for an IPv4
        // connection's.
        if flow.local.is_v4() || flow.remote.is_v4() {
            return Err(FrameError::NotTcp);
        }
        Self::parse_tcp(frame, flow, tcp, tcp + length, ip[1] >> 4 & ECN_MASK)
    }

    #[inline]
    fn parse_tcp(frame: &[u8], flow: Flow, at: usize, end: usize, ecn: u8) -> Result<TcpFrame, FrameError> {
        let segment = &frame[at..end];
        let header = usize::from(segment[tcp::DATA_OFFSET] >> 4) * 4;
        if header < TCP || header > segment.len() {
            return Err(FrameError::Malformed);
        }
        Ok(TcpFrame {
            flow,
            seq: be32(segment, tcp::SEQ),
            ack: be32(segment, tcp::ACK),
            flags: Flags(segment[tcp::FLAGS]),
            window: be16(segment, tcp::WINDOW),
            options: TcpOptions::parse(&segment[TCP..header]),
            ecn,
            tcp_offset: at,
            payload_offset: at + header,
            payload_length: segment.len() - header,
        })
    }

    /// The payload, as a part of `frame`, which must be the frame that this was parsed from.
    #[inline]
    pub fn payload<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        &frame[self.payload_offset..self.payload_offset + self.payload_length]
    }

    /// Whether the TCP checksum is right. To be asked only where no device has verified it.
    pub fn checksum_holds(&self, frame: &[u8]) -> bool {
        let end = self.payload_offset + self.payload_length;
        let segment = &frame[self.tcp_offset..end];
        pseudo(&self.flow.remote, &self.flow.local, segment.len()).bytes(segment).finish() == 0
    }
}

fn pseudo(source: &Endpoint, destination: &Endpoint, length: usize) -> Sum {
    if source.is_v4() {
        checksum::pseudo_header(&source.v4_bytes(), &destination.v4_bytes(), PROTOCOL_TCP, length)
    } else {
        checksum::pseudo_header(&source.address, &destination.address, PROTOCOL_TCP, length)
    }
}

/// The fields of a frame's Ethernet and IP headers that are the same for all frames of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Link {
    /// Source MAC address.
    pub source: [u8; 6],
    /// Destination MAC address.
    pub destination: [u8; 6],
    /// Time to live (IPv4) or hop limit (IPv6).
    pub ttl: u8,
    /// Type of service (IPv4) or traffic class (IPv6). Its two ECN bits are set per packet.
    pub tos: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Index of the host's network interface, if the NIC's wire covers several; else 0.
    pub interface: u32,
}

/// The fields of a segment's headers that differ from segment to segment.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: Flags,
    /// Window field, already scaled down.
    pub window: u16,
    /// Options.
    pub options: &'a TcpOptions,
    /// ECN field of the IP header.
    pub ecn: u8,
    /// IPv4 identification.
    pub ident: u16,
}

/// Bytes of the prepared acknowledgement: the longest one, rounded up so that it is copied with few instructions.
const PREPARED: usize = (ETHERNET + IPV6 + TCP + TIMESTAMPS).next_multiple_of(16);

/// The headers of a connection's outgoing frames, with all fields that do not change from segment to segment filled in.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Template {
    interface: u32,
    /// A pure acknowledgement with everything but its sequence numbers, window and timestamps filled in.
    acknowledgement: [u8; PREPARED],
    acknowledgement_length: u8,
    /// Offset of the TCP header: 34 for IPv4, 54 for IPv6.
    tcp: u8,
    /// Folded checksum of the pseudo-header with a length of 0.
    pseudo: u16,
    /// Folded sum of the fixed IPv4 header fields.
    ip_sum: u32,
    bytes: [u8; ETHERNET + IPV6 + TCP],
}

impl Template {
    /// Makes the template for a connection's outgoing frames. `timestamps` says whether its acknowledgements carry the
    /// timestamps option.
    pub fn new(flow: &Flow, link: &Link, timestamps: bool) -> Self {
        let mut bytes = [0u8; ETHERNET + IPV6 + TCP];
        bytes[..ethernet::SOURCE].copy_from_slice(&link.destination);
        bytes[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&link.source);
        let tcp = if flow.is_v4() {
            bytes[ethernet::TYPE..ETHERNET].copy_from_slice(&ETHERTYPE_IPV4.to_be_bytes());
            let ip = &mut bytes[ETHERNET..];
            ip[0] = 0x45;
            ip[ipv4::TOS] = link.tos & !ECN_MASK;
            ip[ipv4::FRAGMENT] = IPV4_DONT_FRAGMENT; // path MTU discovery is on
            ip[ipv4::TTL] = link.ttl;
            ip[ipv4::PROTOCOL] = PROTOCOL_TCP;
            ip[ipv4::SOURCE..ipv4::DESTINATION].copy_from_slice(&flow.local.v4_bytes());
            ip[ipv4::DESTINATION..IPV4].copy_from_slice(&flow.remote.v4_bytes());
            ETHERNET + IPV4
        } else {
            bytes[ethernet::TYPE..ETHERNET].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
            let ip = &mut bytes[ETHERNET..];
            let word = 6 << 28 | u32::from(link.tos & !ECN_MASK) << 20 | (link.flow_label & 0xf_ffff);
            ip[..4].copy_from_slice(&word.to_be_bytes());
            ip[ipv6::NEXT_HEADER] = PROTOCOL_TCP;
            ip[ipv6::HOP_LIMIT] = link.ttl;
            ip[ipv6::SOURCE..ipv6::DESTINATION].copy_from_slice(&flow.local.address);
            ip[ipv6::DESTINATION..IPV6].copy_from_slice(&flow.remote.address);
            ETHERNET + IPV6
        };
        bytes[tcp..tcp + 2].copy_from_slice(&flow.local.port.to_be_bytes());
        bytes[tcp + 2..tcp + 4].copy_from_slice(&flow.remote.port.to_be_bytes());
        let ip_sum = u32::from(Sum::new().bytes(&bytes[ETHERNET..ETHERNET + IPV4]).folded());
        let mut template = Template {
            interface: link.interface,
            bytes,
            acknowledgement: [0; PREPARED],
            acknowledgement_length: 0,
            tcp: tcp as u8,
            pseudo: pseudo(&flow.local, &flow.remote, 0).folded(),
            ip_sum,
        };
        template.prepare_acknowledgement(timestamps);
        template
    }

    fn prepare_acknowledgement(&mut self, timestamps: bool) {
        let options = TcpOptions { timestamps: timestamps.then_some((0, 0)), ..TcpOptions::default() };
        let header = Header { seq: 0, ack: 0, flags: Flags::ACK, window: 0, options: &options, ecn: 0, ident: 0 };
        let mut out = [0u8; MAX_HEADER];
        self.acknowledgement_length = self.emit_any(&header, 0, &mut out) as u8;
        self.acknowledgement.copy_from_slice(&out[..PREPARED]);
    }

    /// Index of the network interface that its frames leave through: see [`Link::interface`].
    #[inline]
    pub fn interface(&self) -> u32 {
        self.interface
    }

    /// Sets it.
    pub fn set_interface(&mut self, interface: u32) {
        self.interface = interface;
    }

    /// Offset of the TCP header in the frames that this template writes.
    #[inline]
    pub fn tcp_offset(&self) -> usize {
        usize::from(self.tcp)
    }

    /// Writes the headers of a segment with `payload` bytes of payload, which the caller appends, and returns their
    /// length. The TCP checksum field gets the sum of the pseudo-header, for a device (or [`finish_checksum`]) to
    /// complete.
    ///
    /// # Panics
    /// If `out` is shorter than [`MAX_HEADER`].
    #[inline(always)]
    pub fn emit(&self, header: &Header<'_>, payload: usize, out: &mut [u8]) -> usize {
        let out: &mut [u8; MAX_HEADER] = out.first_chunk_mut().expect("there is room for the longest header");
        if !self.is_prepared(header.options) {
            return self.emit_any(header, payload, out);
        }
        out[..PREPARED].copy_from_slice(&self.acknowledgement);
        if self.tcp_offset() == ETHERNET + IPV4 {
            self.fill::<{ ETHERNET + IPV4 }>(header, payload, out);
        } else {
            self.fill::<{ ETHERNET + IPV6 }>(header, payload, out);
        }
        usize::from(self.acknowledgement_length)
    }

    /// Whether a segment with these options is the prepared acknowledgement but for its numbers, flags and lengths.
    #[inline(always)]
    fn is_prepared(&self, options: &TcpOptions) -> bool {
        let timestamps = usize::from(self.acknowledgement_length) > self.tcp_offset() + TCP;
        options.has_timestamps_at_most() && options.timestamps.is_some() == timestamps
    }

    /// Turns the prepared acknowledgement in `out` into a segment; the TCP header is at offset `AT`.
    #[inline(always)]
    fn fill<const AT: usize>(&self, header: &Header<'_>, payload: usize, out: &mut [u8; MAX_HEADER]) {
        let Header { seq, ack, window, options, .. } = *header;
        Self::fill_acknowledgement::<AT>(&Acknowledgement { seq, ack, window, timestamps: options.timestamps }, out);
        let segment = usize::from(self.acknowledgement_length) - AT + payload;
        if AT == ETHERNET + IPV4 {
            self.emit_v4(header, segment, out);
        } else {
            out[ETHERNET + 1] |= header.ecn << 4;
            out[ETHERNET + ipv6::LENGTH..ETHERNET + ipv6::LENGTH + 2].copy_from_slice(&(segment as u16).to_be_bytes());
        }
        out[AT + tcp::FLAGS] = header.flags.0;
        out[AT + tcp::CHECKSUM..AT + tcp::URGENT].copy_from_slice(&self.pseudo_sum(segment).to_be_bytes());
    }

    /// Folded checksum of the pseudo-header of a segment of this many bytes.
    #[inline(always)]
    fn pseudo_sum(&self, segment: usize) -> u16 {
        Sum::new().word(self.pseudo).word((segment >> 16) as u16).word(segment as u16).folded()
    }

    /// [`Template::emit`] for any options.
    #[inline(never)]
    fn emit_any(&self, header: &Header<'_>, payload: usize, out: &mut [u8; MAX_HEADER]) -> usize {
        let at = self.tcp_offset();
        out[..ETHERNET + IPV6 + TCP].copy_from_slice(&self.bytes);
        let options = header.options.emit(&mut out[at + TCP..]);
        let segment = TCP + options + payload;
        if at == ETHERNET + IPV4 {
            self.emit_v4(header, segment, out);
        } else {
            out[ETHERNET + 1] |= header.ecn << 4;
            out[ETHERNET + ipv6::LENGTH..ETHERNET + ipv6::LENGTH + 2].copy_from_slice(&(segment as u16).to_be_bytes());
        }
        let t = &mut out[at..at + TCP];
        t[tcp::SEQ..tcp::ACK].copy_from_slice(&header.seq.to_be_bytes());
        t[tcp::ACK..tcp::DATA_OFFSET].copy_from_slice(&header.ack.to_be_bytes());
        t[tcp::DATA_OFFSET] = ((TCP + options) << 2) as u8;
        t[tcp::FLAGS] = header.flags.0;
        t[tcp::WINDOW..tcp::CHECKSUM].copy_from_slice(&header.window.to_be_bytes());
        t[tcp::CHECKSUM..tcp::URGENT].copy_from_slice(&self.pseudo_sum(segment).to_be_bytes());
        t[tcp::URGENT..TCP].copy_from_slice(&[0, 0]);
        at + TCP + options
    }

    /// Whether routers may fragment what is written from now on, over IPv4. Acknowledgements are smaller than any MTU
    /// (RFC 791 section 3.2: 68 bytes), so that they may have the same identification.
    pub fn allow_fragments(&mut self, allowed: bool) {
        let bits = if allowed { 0 } else { IPV4_DONT_FRAGMENT };
        if self.tcp_offset() == ETHERNET + IPV4 && self.bytes[ETHERNET + ipv4::FRAGMENT] != bits {
            self.bytes[ETHERNET + ipv4::FRAGMENT] = bits;
            self.ip_sum = u32::from(Sum::new().bytes(&self.bytes[ETHERNET..ETHERNET + IPV4]).folded());
            // Segments begin as the prepared acknowledgement.
            let seq: [u8; 4] = core::array::from_fn(|at| self.acknowledgement[self.tcp_offset() + tcp::SEQ + at]);
            self.prepare_acknowledgement(usize::from(self.acknowledgement_length) > self.tcp_offset() + TCP);
            self.set_acknowledgement_seq(u32::from_be_bytes(seq));
        }
    }

    /// Writes a pure acknowledgement and returns its length. The result is that of [`Template::emit`] with an IPv4
    /// identification of 0, which RFC 6864 section 4.1 allows in packets that cannot be fragmented.
    #[inline(always)]
    pub fn acknowledge(&self, ack: &Acknowledgement, out: &mut [u8; MAX_HEADER]) -> usize {
        out[..PREPARED].copy_from_slice(&self.acknowledgement);
        if self.tcp_offset() == ETHERNET + IPV4 {
            Self::fill_acknowledgement::<{ ETHERNET + IPV4 }>(ack, out);
        } else {
            Self::fill_acknowledgement::<{ ETHERNET + IPV6 }>(ack, out);
        }
        usize::from(self.acknowledgement_length)
    }

    /// Bytes from the beginning that [`Template::acknowledge_usual`] and [`Template::interface`] use.
    pub const HOT: usize = core::mem::offset_of!(Template, acknowledgement) + Template::FIXED;

    /// Bytes of an acknowledgement over IPv4 with timestamps up to the middle of these: all that is not written for
    /// each.
    const FIXED: usize = 60;

    /// Bytes of an acknowledgement over IPv4 with timestamps.
    pub const USUAL_ACKNOWLEDGEMENT: usize = ETHERNET + IPV4 + TCP + TIMESTAMPS;

    /// Sets the sequence number that [`Template::acknowledge_usual`] writes.
    pub fn set_acknowledgement_seq(&mut self, seq: u32) {
        let at = self.tcp_offset() + tcp::SEQ;
        self.acknowledgement[at..at + 4].copy_from_slice(&seq.to_be_bytes());
    }

    /// [`Template::acknowledge`] over IPv4 with timestamps, with fewer instructions. Its sequence number is the one
    /// that was prepared.
    #[inline(always)]
    pub fn acknowledge_usual(
        &self,
        ack: &Acknowledgement,
        timestamps: (u32, u32),
        out: &mut [u8; Template::USUAL_ACKNOWLEDGEMENT],
    ) {
        const AT: usize = ETHERNET + IPV4;
        debug_assert!(self.tcp_offset() == AT && usize::from(self.acknowledgement_length) == Template::USUAL_ACKNOWLEDGEMENT);
        debug_assert_eq!(self.acknowledgement[AT + tcp::SEQ..][..4], ack.seq.to_be_bytes());
        out[..Self::FIXED].copy_from_slice(&self.acknowledgement[..Self::FIXED]);
        Self::fill_rest::<AT>(&Acknowledgement { timestamps: Some(timestamps), ..*ack }, out);
    }

    #[inline(always)]
    fn fill_acknowledgement<const AT: usize>(ack: &Acknowledgement, out: &mut [u8]) {
        out[AT + tcp::SEQ..AT + tcp::ACK].copy_from_slice(&ack.seq.to_be_bytes());
        Self::fill_rest::<AT>(ack, out);
    }

    /// What follows the sequence number.
    #[inline(always)]
    fn fill_rest<const AT: usize>(ack: &Acknowledgement, out: &mut [u8]) {
        out[AT + tcp::ACK..AT + tcp::DATA_OFFSET].copy_from_slice(&ack.ack.to_be_bytes());
        out[AT + tcp::WINDOW..AT + tcp::CHECKSUM].copy_from_slice(&ack.window.to_be_bytes());
        if let Some((value, echo)) = ack.timestamps {
            out[AT + TCP + 4..AT + TCP + 8].copy_from_slice(&value.to_be_bytes());
            out[AT + TCP + 8..AT + TCP + 12].copy_from_slice(&echo.to_be_bytes());
        }
    }

    #[inline(always)]
    fn emit_v4(&self, header: &Header<'_>, segment: usize, out: &mut [u8; MAX_HEADER]) {
        let total = (IPV4 + segment) as u16;
        let ip = &mut out[ETHERNET..ETHERNET + IPV4];
        ip[ipv4::TOS] |= header.ecn;
        ip[ipv4::LENGTH..ipv4::IDENT].copy_from_slice(&total.to_be_bytes());
        ip[ipv4::IDENT..ipv4::FRAGMENT].copy_from_slice(&header.ident.to_be_bytes());
        let mut sum = self.ip_sum + u32::from(total) + u32::from(header.ident) + u32::from(header.ecn);
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        ip[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    }
}

/// Writes the header fields that depend on the length of a frame with a TCP segment: the IP packet's length, the IPv4
/// header checksum, and a partial TCP checksum (the sum of the pseudo-header) for a device to complete. `tcp` is the
/// offset of the TCP header; there must be no IPv6 extension headers.
///
/// # Panics
/// If the headers lie outside the frame.
pub fn set_lengths(frame: &mut [u8], tcp: usize) {
    let tcp_length = frame.len() - tcp;
    let (ip, segment) = frame[ETHERNET..].split_at_mut(tcp - ETHERNET);
    let sum = if ip[0] >> 4 == 4 {
        let total = (ip.len() + tcp_length) as u16;
        ip[ipv4::LENGTH..ipv4::IDENT].copy_from_slice(&total.to_be_bytes());
        ip[ipv4::CHECKSUM..ipv4::SOURCE].fill(0);
        let sum = Sum::new().bytes(ip).finish();
        ip[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum.to_be_bytes());
        checksum::pseudo_header(&ip[ipv4::SOURCE..ipv4::DESTINATION], &ip[ipv4::DESTINATION..IPV4], PROTOCOL_TCP, tcp_length)
    } else {
        ip[ipv6::LENGTH..ipv6::NEXT_HEADER].copy_from_slice(&(tcp_length as u16).to_be_bytes());
        checksum::pseudo_header(&ip[ipv6::SOURCE..ipv6::DESTINATION], &ip[ipv6::DESTINATION..IPV6], PROTOCOL_TCP, tcp_length)
    };
    segment[tcp::CHECKSUM..tcp::URGENT].copy_from_slice(&sum.folded().to_be_bytes());
}

/// Completes a partial checksum in software as a device does: sums the bytes from `start` to the end of the frame and
/// stores the result at `start + offset`. A sum of 0 is written as 0xffff, which is the same number: for UDP 0 stands
/// for no checksum (RFC 768), which IPv6 refuses. Returns false, and changes nothing, if the position lies outside the
/// frame.
pub fn finish_checksum(frame: &mut [u8], start: usize, offset: usize) -> bool {
    if start + offset + 2 > frame.len() {
        return false;
    }
    let sum = match Sum::new().bytes(&frame[start..]).finish() {
        0 => 0xffff,
        sum => sum,
    };
    frame[start + offset..start + offset + 2].copy_from_slice(&sum.to_be_bytes());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flows() -> [Flow; 2] {
        [
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40000), device: 0 },
            Flow { local: Endpoint::v6([0xfd; 16], 443), remote: Endpoint::v6([0xfe; 16], 1), device: 0 },
        ]
    }

    /// The sum of bytes that add up to 0xffff is 0.
    #[test]
    fn a_completed_checksum_is_never_zero() {
        let mut datagram = [0, 0, 0xab, 0xcd, 0x54, 0x32, 0, 0];
        assert!(finish_checksum(&mut datagram, 2, 4));
        assert_eq!(datagram[6..], [0xff, 0xff]);
        assert_eq!(Sum::new().bytes(&datagram[2..]).finish(), 0, "it holds");
        assert!(!finish_checksum(&mut datagram, 2, 5));
    }

    /// Segments with options that were prepared and with others, and acknowledgements.
    #[test]
    fn frames_that_may_be_fragmented_have_right_headers() {
        for timestamps in [None, Some((1, 2))] {
            let mut template = Template::new(&flows()[0], &Link { ttl: 64, ..Link::default() }, timestamps.is_some());
            template.set_acknowledgement_seq(77);
            let before = template.clone();
            template.allow_fragments(true);
            template.allow_fragments(false);
            assert_eq!((template.bytes, template.ip_sum), (before.bytes, before.ip_sum), "and not any more");
            assert_eq!(template.acknowledgement, before.acknowledgement);
            template.allow_fragments(true);
            let header = |out: &[u8]| {
                assert_eq!(out[ETHERNET + ipv4::FRAGMENT] & IPV4_DONT_FRAGMENT, 0);
                assert_eq!(Sum::new().bytes(&out[ETHERNET..ETHERNET + IPV4]).finish(), 0, "{timestamps:?}");
            };
            for timestamps in [None, Some((1, 2))] {
                let options = TcpOptions { timestamps, ..TcpOptions::default() };
                let mut out = [0u8; MAX_HEADER + 500];
                let sent = Header { seq: 5, ack: 6, flags: Flags::ACK, window: 7, options: &options, ecn: 0, ident: 9 };
                template.emit(&sent, 500, &mut out);
                header(&out);
            }
            let mut out = [0u8; MAX_HEADER];
            template.acknowledge(&Acknowledgement { seq: 5, ack: 6, window: 7, timestamps }, &mut out);
            header(&out);
            let at = ETHERNET + IPV4 + tcp::SEQ;
            assert_eq!(template.acknowledgement[at..at + 4], 77u32.to_be_bytes());
        }
    }

    #[test]
    fn a_written_frame_reads_back_and_its_checksums_hold() {
        for flow in flows() {
            let link = Link { ttl: 64, tos: 0x20, ..Link::default() };
            let template = Template::new(&flow, &link, true);
            let options = TcpOptions { timestamps: Some((1, 2)), ..TcpOptions::default() };
            let header =
                Header { seq: 5, ack: 6, flags: Flags::ACK | Flags::PSH, window: 7, options: &options, ecn: 2, ident: 0xfffe };
            let mut frame = [0u8; MAX_HEADER + 5];
            let length = template.emit(&header, 5, &mut frame);
            frame[length..length + 5].copy_from_slice(b"hello");
            let frame = &mut frame[..length + 5];
            assert!(finish_checksum(frame, template.tcp_offset(), TCP_CHECKSUM));
            let parsed = TcpFrame::parse(frame, 0).unwrap();
            assert_eq!(parsed.flow, flow.reversed());
            assert_eq!((parsed.seq, parsed.ack, parsed.window, parsed.ecn), (5, 6, 7, 2));
            assert_eq!(parsed.options, options);
            assert_eq!(parsed.payload(frame), b"hello");
            assert!(parsed.checksum_holds(frame));
            frame[length] ^= 1;
            assert!(!parsed.checksum_holds(frame));
        }
    }

    /// A length of 0 in the IP header is no length, but where the frame has more bytes than the field can say.
    #[test]
    fn a_packet_that_says_it_has_no_bytes_has_them_above_64_kb_alone() {
        for flow in flows() {
            let template = Template::new(&flow, &Link { ttl: 64, ..Link::default() }, false);
            let options = TcpOptions::default();
            let header = Header { seq: 5, ack: 6, flags: Flags::ACK, window: 7, options: &options, ecn: 0, ident: 1 };
            for (payload, is_known) in [(96, false), (65_000, false), (70_000, true)] {
                let mut frame = [0u8; MAX_HEADER + 70_000];
                let headers = template.emit(&header, 96, &mut frame);
                let frame = &mut frame[..headers + payload];
                let ip = &mut frame[ETHERNET..];
                if flow.local.is_v4() {
                    ip[ipv4::LENGTH..ipv4::IDENT].fill(0);
                    ip[10..12].fill(0);
                    let sum = Sum::new().bytes(&ip[..IPV4]).finish();
                    ip[10..12].copy_from_slice(&sum.to_be_bytes());
                } else {
                    ip[ipv6::LENGTH..ipv6::NEXT_HEADER].fill(0);
                }
                let length = TcpFrame::parse(frame, 0).map(|parsed| parsed.payload_length);
                assert_eq!(length, if is_known { Ok(payload) } else { Err(FrameError::Malformed) });
                let seen = crate::glance::Glance::at(frame, frame.len()).packet.and_then(|packet| packet.segment);
                assert_eq!(seen.map_or(0, |segment| segment.length as usize), if is_known { payload } else { 0 });
            }
        }
    }

    /// A segment that is made of the prepared acknowledgement is the one that is written field by field.
    #[test]
    fn prepared_and_written_segments_are_the_same() {
        for flow in flows() {
            for timestamps in [None, Some((0x0102_0304, 0x0506_0708))] {
                let template = Template::new(&flow, &Link { ttl: 64, tos: 0xb8, ..Link::default() }, timestamps.is_some());
                let options = TcpOptions { timestamps, ..TcpOptions::default() };
                assert!(template.is_prepared(&options));
                let header = Header {
                    seq: 7,
                    ack: 8,
                    flags: Flags::ACK | Flags::PSH,
                    window: 9,
                    options: &options,
                    ecn: 2,
                    ident: 0xfffe,
                };
                for payload in [0, 1, 1448, 65_000] {
                    let (mut prepared, mut written) = ([0u8; MAX_HEADER], [0u8; MAX_HEADER]);
                    let length = template.emit(&header, payload, &mut prepared);
                    assert_eq!(template.emit_any(&header, payload, &mut written), length);
                    assert_eq!(prepared[..length], written[..length]);
                }
            }
        }
    }

    /// Every truncation of a good frame and every change of a single byte is read or refused without a panic.
    #[test]
    fn lying_headers_are_refused() {
        for flow in flows() {
            let template = Template::new(&flow, &Link { ttl: 64, ..Link::default() }, true);
            let options = TcpOptions::default();
            let header = Header { seq: 1, ack: 2, flags: Flags::ACK, window: 3, options: &options, ecn: 0, ident: 0 };
            let mut frame = [0u8; MAX_HEADER + 8];
            let length = template.emit(&header, 8, &mut frame) + 8;
            for cut in 0..length {
                assert!(TcpFrame::parse(&frame[..cut], 0).is_err(), "cut at {cut}");
            }
            for at in 0..length {
                for value in [0u8, 0x0f, 0x7f, 0xff] {
                    let mut bad = frame;
                    bad[at] = value;
                    if let Ok(parsed) = TcpFrame::parse(&bad[..length], 0) {
                        assert!(parsed.payload(&bad[..length]).len() <= length);
                    }
                }
            }
        }
    }
}
