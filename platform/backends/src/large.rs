//! Frames of more than 64 KB (BIG TCP: a peer on this machine whose `gso_max_size` was raised). An IPv6 packet then has
//! no length, or one in a jumbo option (RFC 2675), an IPv4 packet has the length 0. Before anything else sees such a
//! frame it is cut into frames of ordinary length, each of whole segments. Only a receiver that takes the payload of
//! the whole frame into memory of its own ([`Large::show`]) gets it uncut.

use baton_device::{BEGINNING, Checksum, Frame, Segmentation};
use baton_wire::Flags;
use baton_wire::checksum::{Sum, pseudo_header};
use baton_wire::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV6, PROTOCOL_TCP, TCP};
use baton_wire::offset::{ethernet, ipv4, ipv6, tcp};
use std::sync::atomic::AtomicU8;

/// Bytes of the longest IP packet with a length field, and of the longest frame that has none with certainty.
const MOST_IP: usize = 65_535;
const LONGEST_IPV4: usize = ETHERNET + MOST_IP;
/// Bytes of a frame that a [`Frame`] has no room for. Linux makes none of more than 512 KB.
const REST: usize = 8 << 16;
/// Bytes in front of the room for payload: as many as the frame itself takes up.
const BEFORE: usize = 1 << 17;
/// Bytes of the longest headers: Ethernet, IPv4 with options or IPv6, TCP.
const HEADERS: usize = ETHERNET + 60 + 60;

/// A hop-by-hop header with nothing but a jumbo option.
const HOP_BY_HOP: u8 = 0;
const JUMBO: [u8; 3] = [0, 0xc2, 4];
const JUMBO_BYTES: usize = 8;

/// A large frame that is being cut.
#[derive(Debug)]
pub(crate) struct Large {
    /// The payload. The part that the frame itself has no room for is received behind the first [`BEFORE`] bytes.
    room: Box<[u8]>,
    /// The part of the payload that no frame has carried out yet.
    left: core::ops::Range<usize>,
    /// The headers for the next frame that is cut off.
    headers: [u8; HEADERS],
    /// Length of all headers, and length of the headers in front of TCP's, in bytes.
    lengths: (usize, usize),
    segmentation: Segmentation,
    interface: u32,
    /// The flags of the last segment.
    flags: u8,
}

/// What the headers of a long frame say.
enum Kind {
    /// The headers give the packet's length, as for IPv6 packets of up to 64 KB without a jumbo option.
    Ordinary,
    /// It has none. The payload begins at this offset.
    Large(usize),
    /// It is damaged, or cannot be cut.
    Damaged,
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Large {
    pub fn new() -> Large {
        Large {
            // Zero pages, until they are written to.
            room: vec![0; BEFORE + REST].into(),
            left: 0..0,
            headers: [0; HEADERS],
            lengths: (0, 0),
            segmentation: Segmentation { size: 0, headers: 0, ipv6: false, ecn: false, udp: false },
            interface: 0,
            flags: 0,
        }
    }

    /// Where bytes are received for which a frame has no room. Nothing of an earlier frame may be left.
    pub fn rest(&mut self) -> &mut [u8] {
        &mut self.room[BEFORE..]
    }

    /// The rest of the room, as atomic bytes: the form in which a device takes memory for payload.
    pub fn shared_rest(&mut self) -> &[AtomicU8] {
        let rest: *mut [u8] = self.rest();
        // SAFETY: an atomic byte has the size and alignment of a byte, and these bytes are borrowed exclusively as long
        // as the returned slice lives.
        unsafe { &*(rest as *const [AtomicU8]) }
    }

    /// Whether a frame of so many bytes may be a large one.
    #[inline(always)]
    pub fn concerns(length: usize) -> bool {
        length > LONGEST_IPV4
    }

    /// Whether a part of a frame is left.
    #[inline(always)]
    pub fn has_left(&self) -> bool {
        !self.left.is_empty()
    }

    /// Makes a frame that [`Large::concerns`] the first part of itself. So much of it is in `frame` as that has room
    /// for, and `beyond` bytes are in [`Large::rest`]. False if it is lost: it is damaged, or too long.
    #[cold]
    pub fn begin(&mut self, frame: &mut Frame, beyond: usize) -> bool {
        self.left = 0..0;
        let payload = match self.note_headers(frame, frame.length() + beyond) {
            Kind::Ordinary => return beyond == 0,
            Kind::Damaged => return false,
            Kind::Large(payload) => payload,
        };
        // The payload's beginning is in the frame, and its remainder in the rest.
        let here = &frame.bytes()[payload..];
        let Some(first) = BEFORE.checked_sub(here.len()) else { return false };
        self.room[first..BEFORE].copy_from_slice(here);
        self.left = first..BEFORE + beyond;
        self.next(frame)
    }

    /// Makes a frame that [`Large::concerns`], of `length` bytes, of which the first [`BEGINNING`] are in `frame`, the
    /// headers of a segment without payload. Returns the bytes of payload, and those of options that lie between
    /// headers and payload in the frame itself. Returns None, and leaves `frame` unchanged, if the whole frame has to
    /// be received first. No part of an earlier large frame may be left when this is called.
    #[cold]
    pub fn show(&mut self, frame: &mut Frame, length: usize) -> Option<(u32, usize)> {
        if frame.length() < HEADERS + JUMBO_BYTES {
            return None;
        }
        let Kind::Large(payload) = self.note_headers(frame, length) else { return None };
        if payload > BEGINNING {
            return None;
        }
        let headers = self.lengths.0;
        frame.set_length(headers);
        let bytes = frame.bytes_mut();
        bytes.copy_from_slice(&self.headers[..headers]);
        self.finish(bytes, 0);
        Some(((length - payload) as u32, payload - headers))
    }

    /// Notes the headers of a frame of `total` bytes.
    fn note_headers(&mut self, frame: &Frame, total: usize) -> Kind {
        let bytes = frame.bytes();
        let mut options = 0;
        let transport = match be16(bytes, ethernet::TYPE) {
            ETHERTYPE_IPV4 if be16(bytes, ETHERNET + ipv4::LENGTH) == 0 => {
                let header = usize::from(bytes[ETHERNET] & 15) * 4;
                if header < IPV4 || bytes[ETHERNET + ipv4::PROTOCOL] != PROTOCOL_TCP {
                    return Kind::Damaged;
                }
                ETHERNET + header
            }
            ETHERTYPE_IPV6 if be16(bytes, ETHERNET + ipv6::LENGTH) == 0 => {
                let next = bytes[ETHERNET + ipv6::NEXT_HEADER];
                let hop = &bytes[ETHERNET + IPV6..][..JUMBO_BYTES];
                let jumbo = next == HOP_BY_HOP && hop[0] == PROTOCOL_TCP && hop[1..4] == JUMBO;
                if !jumbo && next != PROTOCOL_TCP || jumbo && be32(hop, 4) as usize != total - ETHERNET - IPV6 {
                    return Kind::Damaged;
                }
                options = if jumbo { JUMBO_BYTES } else { 0 };
                ETHERNET + IPV6
            }
            _ => return Kind::Ordinary,
        };
        let header = usize::from(bytes[transport + options + tcp::DATA_OFFSET] >> 4) * 4;
        let (Some(segmentation), true) = (frame.segmentation, header >= TCP) else { return Kind::Damaged };
        // A frame whose checksum no device has verified, and nothing will complete, cannot be cut: its checksum covers
        // the whole frame.
        if segmentation.udp || segmentation.size == 0 || frame.checksum == Checksum::Unknown {
            return Kind::Damaged;
        }
        let headers = transport + header;
        self.headers[..transport].copy_from_slice(&bytes[..transport]);
        self.headers[transport..headers].copy_from_slice(&bytes[transport + options..][..header]);
        if options > 0 {
            self.headers[ETHERNET + ipv6::NEXT_HEADER] = PROTOCOL_TCP;
        }
        (self.lengths, self.interface) = ((headers, transport), frame.interface);
        self.segmentation = Segmentation { headers: headers as u16, ..segmentation };
        self.flags = self.headers[transport + tcp::FLAGS];
        let fits = headers + usize::from(segmentation.size) <= frame.capacity().min(self.longest());
        if fits { Kind::Large(headers + options) } else { Kind::Damaged }
    }

    /// Makes `frame` the next part of the frame that is being cut. False if nothing is left.
    #[cold]
    pub fn next(&mut self, frame: &mut Frame) -> bool {
        let ((headers, transport), size) = (self.lengths, usize::from(self.segmentation.size));
        // If no segment fits, this frame's buffer is smaller than the buffers into which frames are received.
        let most = (frame.capacity().min(self.longest()).saturating_sub(headers) / size.max(1)) * size;
        let length = most.min(self.left.len());
        if length == 0 {
            self.left = 0..0;
            return false;
        }
        let last = length == self.left.len();
        frame.set_length(headers + length);
        let bytes = frame.bytes_mut();
        bytes[..headers].copy_from_slice(&self.headers[..headers]);
        bytes[headers..].copy_from_slice(&self.room[self.left.start..][..length]);
        self.left.start += length;
        let ended = if last { 0 } else { (Flags::FIN | Flags::PSH).0 };
        bytes[transport + tcp::FLAGS] = self.flags & !ended;
        self.finish(bytes, length);
        frame.checksum = Checksum::Partial { start: transport as u16, offset: tcp::CHECKSUM as u16 };
        frame.segmentation = (length > size).then_some(self.segmentation);
        frame.interface = self.interface;
        // The headers for the next frame.
        let seq = be32(&self.headers, transport + tcp::SEQ).wrapping_add(length as u32);
        self.headers[transport + tcp::SEQ..][..4].copy_from_slice(&seq.to_be_bytes());
        self.flags &= !Flags::CWR.0;
        self.segmentation.ecn = false;
        true
    }

    /// Bytes of the longest frame that it may become.
    fn longest(&self) -> usize {
        ETHERNET + MOST_IP + if self.segmentation.ipv6 { IPV6 } else { 0 }
    }

    /// Writes lengths and checksums of a part with so many bytes of payload, and counts the identification of the next
    /// one.
    fn finish(&mut self, bytes: &mut [u8], payload: usize) {
        let (headers, transport) = self.lengths;
        let segment = headers - transport + payload;
        let ip = &mut bytes[ETHERNET..];
        let pseudo = if ip[0] >> 4 == 4 {
            let header = transport - ETHERNET;
            ip[ipv4::LENGTH..][..2].copy_from_slice(&((header + segment) as u16).to_be_bytes());
            ip[ipv4::CHECKSUM..][..2].fill(0);
            let sum = Sum::new().bytes(&ip[..header]).finish();
            ip[ipv4::CHECKSUM..][..2].copy_from_slice(&sum.to_be_bytes());
            let segments = payload.div_ceil(usize::from(self.segmentation.size)) as u16;
            let ident = be16(&self.headers, ETHERNET + ipv4::IDENT).wrapping_add(segments);
            self.headers[ETHERNET + ipv4::IDENT..][..2].copy_from_slice(&ident.to_be_bytes());
            pseudo_header(&ip[ipv4::SOURCE..][..4], &ip[ipv4::DESTINATION..][..4], PROTOCOL_TCP, segment)
        } else {
            ip[ipv6::LENGTH..][..2].copy_from_slice(&(segment as u16).to_be_bytes());
            pseudo_header(&ip[ipv6::SOURCE..][..16], &ip[ipv6::DESTINATION..][..16], PROTOCOL_TCP, segment)
        };
        bytes[transport + tcp::CHECKSUM..][..2].copy_from_slice(&pseudo.folded().to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_device::MAX_FRAME;
    use baton_wire::TcpFrame;

    const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9];

    fn byte(at: usize) -> u8 {
        (at ^ at >> 8 ^ at >> 16) as u8
    }

    /// The headers of a packet with so many bytes of payload, which has no length, as Linux makes it; and where TCP's
    /// begin.
    fn headers(ipv6: bool, jumbo: bool, payload: usize) -> (Vec<u8>, usize) {
        let mut bytes = vec![2; 12];
        if ipv6 {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, if jumbo { 0 } else { 6 }, 64]);
            bytes.extend([0xfd; 16]);
            bytes.extend([0xfe; 16]);
            if jumbo {
                bytes.extend([6, 0, 0xc2, 4]);
                bytes.extend((8 + 32 + payload as u32).to_be_bytes());
            }
        } else {
            bytes.extend([8, 0, 0x45, 0, 0, 0, 0xff, 0xfe, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        }
        let at = bytes.len();
        bytes.extend([0, 80, 0x9c, 0x40, 0xff, 0xff, 0, 0, 0, 0, 0, 5, 0x80, 0x99, 1, 0, 0, 0, 0, 0]);
        bytes.extend(TIMESTAMPS);
        (bytes, at)
    }

    /// Every part of a large frame, as it is received.
    fn cut(ipv6: bool, jumbo: bool, payload: usize, size: u16) -> Vec<Frame> {
        let (mut whole, at) = headers(ipv6, jumbo, payload);
        whole.extend((0..payload).map(byte));
        let mut large = Large::new();
        let mut frame = Frame::with_capacity(MAX_FRAME);
        let here = whole.len().min(frame.capacity());
        frame.fill(&whole[..here]);
        large.rest()[..whole.len() - here].copy_from_slice(&whole[here..]);
        frame.checksum = Checksum::Partial { start: at as u16, offset: 16 };
        frame.segmentation = Some(Segmentation { size, headers: at as u16 + 32, ipv6, ecn: true, udp: false });
        frame.interface = 5;
        let mut parts = Vec::new();
        if Large::concerns(whole.len()) && large.begin(&mut frame, whole.len() - here) {
            parts.push(frame.clone());
            while large.has_left() && large.next(&mut frame) {
                parts.push(frame.clone());
            }
        }
        parts
    }

    #[test]
    fn a_large_frame_becomes_several_whose_headers_hold() {
        for (ipv6, jumbo) in [(true, true), (true, false), (false, false)] {
            for (payload, size) in
                [(70_000, 1428), (190_000, 1428), (500_000, 8948), (524_000, 65_483), (65_520, 1), (131_072, 32_768)]
            {
                let parts = cut(ipv6, jumbo, payload, size);
                let mut at = 0;
                let mut ident = 0xfffe_u16;
                for (number, part) in parts.iter().enumerate() {
                    let parsed = TcpFrame::parse(part.bytes(), 0).expect("a segment");
                    let last = number + 1 == parts.len();
                    assert_eq!((parsed.seq, parsed.ack), (0xffff_0000_u32.wrapping_add(at as u32), 5));
                    assert_eq!(parsed.options.timestamps, Some((7, 9)));
                    let flags = 0x10 | if last { 9 } else { 0 } | if number == 0 { 0x80 } else { 0 };
                    assert_eq!(parsed.flags, Flags(flags), "part {number}");
                    assert!(parsed.payload(part.bytes()).iter().enumerate().all(|(of, found)| *found == byte(at + of)));
                    assert_eq!(parsed.payload_offset + parsed.payload_length, part.length());
                    assert!(last || parsed.payload_length % usize::from(size) == 0, "whole segments");
                    let pseudo = pseudo_header(
                        &parsed.flow.remote.address,
                        &parsed.flow.local.address,
                        6,
                        part.length() - parsed.tcp_offset,
                    );
                    let v4 = || pseudo_header(&[10, 0, 0, 1], &[10, 0, 0, 2], 6, part.length() - parsed.tcp_offset);
                    let sum = if ipv6 { pseudo } else { v4() };
                    assert_eq!(be16(part.bytes(), parsed.tcp_offset + 16), sum.folded());
                    let (start, headers) = (parsed.tcp_offset as u16, parsed.payload_offset as u16);
                    assert_eq!(part.checksum, Checksum::Partial { start, offset: 16 });
                    let segmentation = Segmentation { size, headers, ipv6, ecn: number == 0, udp: false };
                    assert_eq!(part.segmentation, (parsed.payload_length > size.into()).then_some(segmentation));
                    assert_eq!(part.interface, 5);
                    if !ipv6 {
                        assert_eq!(be16(part.bytes(), 18), ident);
                        ident = ident.wrapping_add(parsed.payload_length.div_ceil(size.into()) as u16);
                    }
                    at += parsed.payload_length;
                }
                assert_eq!(at, payload, "{ipv6} {jumbo} {size}: {} parts", parts.len());
            }
        }
    }

    #[test]
    fn a_large_frame_is_shown_as_a_segment_without_its_payload() {
        let payload = 200_000;
        for (ipv6, jumbo) in [(true, true), (true, false), (false, false)] {
            let (first, at) = headers(ipv6, jumbo, payload);
            let mut frame = Frame::with_capacity(MAX_FRAME);
            // As a ring shows it: behind its beginning, the frame has any bytes.
            frame.fill(&vec![0xee; MAX_FRAME]);
            frame.bytes_mut()[..first.len()].copy_from_slice(&first);
            frame.checksum = Checksum::Partial { start: at as u16, offset: 16 };
            frame.segmentation = Some(Segmentation { size: 1428, headers: at as u16 + 32, ipv6, ecn: false, udp: false });
            let mut large = Large::new();
            let between = if jumbo { JUMBO_BYTES } else { 0 };
            assert_eq!(large.show(&mut frame, first.len() + payload), Some((payload as u32, between)));
            assert!(!large.has_left());
            assert_eq!(frame.length(), first.len() - between);
            let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
            assert_eq!((parsed.seq, parsed.ack, parsed.payload_length), (0xffff_0000, 5, 0));
            assert_eq!((parsed.flags, parsed.options.timestamps), (Flags(0x99), Some((7, 9))));
        }
    }

    #[test]
    fn a_long_frame_whose_packet_has_a_length_is_not_shown() {
        let (mut first, at) = headers(true, false, 65_500);
        first[18..20].copy_from_slice(&65_532_u16.to_be_bytes());
        let mut frame = Frame::with_capacity(MAX_FRAME);
        frame.fill(&vec![0xee; first.len() + 65_500]);
        frame.bytes_mut()[..first.len()].copy_from_slice(&first);
        frame.checksum = Checksum::Partial { start: at as u16, offset: 16 };
        let length = frame.length();
        assert_eq!((Large::new().show(&mut frame, length), frame.length()), (None, length));
        assert_eq!(&frame.bytes()[..first.len()], first);
    }

    /// Whatever bytes the headers contain, each resulting frame is whole or lost.
    #[test]
    fn damaged_headers_are_lost_or_kept_as_they_are() {
        for at in 12..100 {
            for value in [0, 1, 4, 5, 6, 0x0f, 0x45, 0x60, 0xf0, 0xff] {
                for ipv6 in [false, true] {
                    let (mut whole, start) = headers(ipv6, ipv6, 70_000);
                    whole.resize(whole.len() + 70_000, 1);
                    whole[at] = value;
                    let mut frame = Frame::with_capacity(MAX_FRAME);
                    let here = frame.capacity();
                    frame.fill(&whole[..here]);
                    frame.checksum = Checksum::Partial { start: start as u16, offset: 16 };
                    frame.segmentation = Some(Segmentation { size: 1400, headers: 66, ipv6, ecn: false, udp: false });
                    let mut large = Large::new();
                    let mut shown = frame.clone();
                    if let Some((payload, between)) = large.show(&mut shown, whole.len()) {
                        assert_eq!(shown.length() + between + payload as usize, whole.len(), "byte {at} is {value}");
                    }
                    let mut parts = usize::from(large.begin(&mut frame, whole.len() - here));
                    while large.has_left() && large.next(&mut frame) {
                        parts += 1;
                    }
                    assert!(parts <= 2, "byte {at} is {value}: {parts} parts");
                }
            }
        }
    }
}
