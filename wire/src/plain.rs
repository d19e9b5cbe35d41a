//! Plain segments, read and written with few instructions: no IP options, no flags but ACK and PSH, no TCP options but
//! timestamps, no congestion mark (CE). Nearly every segment of an open connection is plain; [`crate::TcpFrame`] reads
//! all others.

use crate::checksum::Sum;
use crate::flow::FlowKey;
use crate::frame::{ECN_CE, ECN_MASK, ETHERNET, IPV4, IPV6, PROTOCOL_TCP, TCP};
use crate::offset::{ethernet, ipv4, ipv6, tcp};
use crate::tcp::Flags;

/// The timestamps option (RFC 7323 appendix A) as one word: NOP, NOP, kind 8, length 10.
const TIMESTAMPS_WORD: u32 = 0x0101_080a;
/// Bytes of the timestamps option with its padding.
pub(crate) const TIMESTAMPS: usize = 12;

/// The 32-bit word from the EtherType on, its last byte cleared: IPv4, version 4, header length 5 (no options).
const IPV4_NO_OPTIONS: u32 = 0x0800_4500;
/// The bit of [`ECN_CE`], in the same word, that ECT(0) does not have.
const ECN_CE_BIT: u32 = 1;
/// The 32-bit word from the EtherType on, its last 12 bits cleared: IPv6, version 6.
const IPV6_WORD: u32 = 0x86dd_6000;
/// Bits of the 32-bit word at the IPv4 fragment field: "more fragments" and the offset, then (behind the TTL) the
/// protocol.
const FRAGMENT_AND_PROTOCOL: u32 = 0x3fff_00ff;
/// Bytes 12 and 13 of a TCP header of 32 bytes (timestamps, no other option) with ACK as its only flag.
const ACK_WITH_TIMESTAMPS: u16 = 0x8010;
/// Bytes 12 and 13 of a TCP header of 20 bytes with ACK as its only flag.
const ACK_WITHOUT_OPTIONS: u16 = 0x5010;

/// The fields of a plain segment, in host order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Window field, unscaled.
    pub window: u16,
    /// Timestamp value and echo reply (RFC 7323 section 3).
    pub timestamps: Option<(u32, u32)>,
    /// Bytes of payload.
    pub length: u32,
    /// PSH is set: the payload ends what the peer has written so far.
    pub pushed: bool,
}

/// The fields of a [`Usual`] frame's segment as header prediction compares them, in host order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields {
    /// Data offset and flags without PSH, and in the lower half the window field: see [`Fields::control_of`].
    pub control: u32,
    /// Sequence number, and in the lower half the acknowledgement number.
    pub numbers: u64,
    /// Timestamp value.
    pub value: u32,
    /// Bytes of payload.
    pub length: u32,
}

impl Fields {
    /// The bit of PSH in [`Fields::control`], which no segment has there.
    pub const PSH: u32 = (Flags::PSH.0 as u32) << 16;

    /// [`Fields::control`] of a plain segment with timestamps and this window field.
    pub const fn control_of(window: u16) -> u32 {
        (ACK_WITH_TIMESTAMPS as u32) << 16 | window as u32
    }

    /// Those of a plain segment; None without timestamps.
    pub fn of(plain: &Plain) -> Option<Fields> {
        let Plain { seq, ack, window, timestamps, length, pushed: _ } = *plain;
        let numbers = u64::from(seq) << 32 | u64::from(ack);
        timestamps.map(|(value, _)| Fields { control: Fields::control_of(window), numbers, value, length })
    }
}

/// Bytes of headers of a [`Usual`] frame.
const USUAL: usize = ETHERNET + IPV4 + TCP + TIMESTAMPS;

/// A frame that seems to be of the most usual kind: a plain segment over IPv4 with timestamps, its checksums verified
/// by a device. Its data offset and its flags have not been looked at: [`Usual::fields`] has them beside the window,
/// where header prediction compares all at once. Its fields are read where they are used.
#[derive(Clone, Copy, Debug)]
pub struct Usual<'a> {
    head: &'a [u8; USUAL],
    payload: &'a [u8],
}

impl<'a> Usual<'a> {
    const TCP: usize = ETHERNET + IPV4;
    /// Bytes of headers in front of the payload.
    pub const HEADERS: usize = USUAL;

    /// Reads a frame as [`Plain::parse`] does. None for any that cannot be of the most usual kind.
    #[inline(always)]
    pub fn parse(frame: &'a [u8]) -> Option<Usual<'a>> {
        let head: &[u8; USUAL] = frame.first_chunk()?;
        // ECT(1) is left to others with CE, of which it has one bit.
        let usual = be32(head, ethernet::TYPE) & (0xffff_ff00 | ECN_CE_BIT) == IPV4_NO_OPTIONS
            && be32(head, ETHERNET + ipv4::FRAGMENT) & FRAGMENT_AND_PROTOCOL == u32::from(PROTOCOL_TCP)
            && be32(head, Self::TCP + TCP) == TIMESTAMPS_WORD;
        if !usual {
            return None;
        }
        // A packet shorter than its headers wraps around, and then has more than the frame.
        let length = usize::from(be16(head, ETHERNET + ipv4::LENGTH)).wrapping_sub(USUAL - ETHERNET);
        let payload = frame[USUAL..].get(..length)?;
        Some(Usual { head, payload })
    }

    /// The flow's key; the destination is the local end. The frame came by this device.
    #[inline(always)]
    pub fn key(&self, device: u32) -> FlowKey {
        FlowKey::v4(le64(self.head, ETHERNET + ipv4::SOURCE), be32(self.head, Self::TCP), device)
    }

    /// What header prediction compares.
    #[inline(always)]
    pub fn fields(&self) -> Fields {
        Fields {
            control: be32(self.head, Self::TCP + tcp::DATA_OFFSET) & !Fields::PSH,
            numbers: be64(self.head, Self::TCP + tcp::SEQ),
            value: be32(self.head, Self::TCP + TCP + 4),
            length: self.payload.len() as u32,
        }
    }

    /// The segment, if it is plain.
    #[inline(always)]
    pub fn plain(&self) -> Option<Plain> {
        let head = self.head;
        let (plain, pushed) = without_push(be16(head, Self::TCP + tcp::DATA_OFFSET));
        let plain = plain == ACK_WITH_TIMESTAMPS;
        plain.then(|| Plain {
            seq: be32(head, Self::TCP + tcp::SEQ),
            ack: be32(head, Self::TCP + tcp::ACK),
            window: be16(head, Self::TCP + tcp::WINDOW),
            timestamps: Some((be32(head, Self::TCP + TCP + 4), be32(head, Self::TCP + TCP + 8))),
            length: self.payload.len() as u32,
            pushed,
        })
    }

    /// The payload.
    #[inline(always)]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

/// Bytes 12 and 13 of a TCP header without PSH, and whether that was set.
#[inline(always)]
fn without_push(control: u16) -> (u16, bool) {
    let push = u16::from(Flags::PSH.0);
    (control & !push, control & push != 0)
}

/// The `N` bytes at `at`, as one load: assembled byte by byte, the compiler loads them one by one where only some are
/// used.
#[inline(always)]
fn load<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("the caller has checked the length")
}

#[inline(always)]
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(load(bytes, at))
}

#[inline(always)]
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(load(bytes, at))
}

#[inline(always)]
fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(load(bytes, at))
}

#[inline(always)]
fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(load(bytes, at))
}

impl Plain {
    /// Reads a frame that came by this device. Returns the flow's key (the destination is the local end), the segment,
    /// and its payload; None if the segment is not plain or the frame is damaged. `verified` says that a device has
    /// checked the checksums: then the IPv4 header's is not computed.
    #[inline(always)]
    pub fn parse(frame: &[u8], verified: bool, device: u32) -> Option<(FlowKey, Plain, &[u8])> {
        let link: &[u8; ETHERNET + IPV4 + TCP] = frame.first_chunk()?;
        // EtherType, then version and header length of IP.
        match be32(link, ethernet::TYPE) & 0xffff_ff00 {
            IPV4_NO_OPTIONS => Self::parse_v4(frame, link, verified, device),
            word if word & 0xffff_f000 == IPV6_WORD => Self::parse_v6(frame, device),
            _ => None,
        }
    }

    #[inline(always)]
    fn parse_v4<'a>(
        frame: &'a [u8],
        head: &[u8; ETHERNET + IPV4 + TCP],
        verified: bool,
        device: u32,
    ) -> Option<(FlowKey, Plain, &'a [u8])> {
        // TCP, and not a fragment. Packets with a congestion mark (CE) are left to the full parser.
        let ordinary = be32(head, ETHERNET + ipv4::FRAGMENT) & FRAGMENT_AND_PROTOCOL == u32::from(PROTOCOL_TCP)
            && head[ETHERNET + ipv4::TOS] & ECN_MASK != ECN_CE;
        let end = ETHERNET + usize::from(be16(head, ETHERNET + ipv4::LENGTH));
        if !ordinary || !verified && Sum::new().bytes(&head[ETHERNET..ETHERNET + IPV4]).finish() != 0 {
            return None;
        }
        let key = FlowKey::v4(le64(head, ETHERNET + ipv4::SOURCE), be32(head, ETHERNET + IPV4), device);
        let (plain, payload) = Self::parse_tcp(frame.get(..end)?, ETHERNET + IPV4)?;
        Some((key, plain, payload))
    }

    #[inline(always)]
    fn parse_v6(frame: &[u8], device: u32) -> Option<(FlowKey, Plain, &[u8])> {
        let head: &[u8; ETHERNET + IPV6 + TCP] = frame.first_chunk()?;
        if head[ETHERNET + ipv6::NEXT_HEADER] != PROTOCOL_TCP || head[ETHERNET + 1] >> 4 & ECN_MASK == ECN_CE {
            return None;
        }
        let end = ETHERNET + IPV6 + usize::from(be16(head, ETHERNET + ipv6::LENGTH));
        let address = |at: usize| [le64(head, ETHERNET + at), le64(head, ETHERNET + at + 8)];
        let key = FlowKey::v6(address(ipv6::DESTINATION), address(ipv6::SOURCE), be32(head, ETHERNET + IPV6), device);
        let (plain, payload) = Self::parse_tcp(frame.get(..end)?, ETHERNET + IPV6)?;
        Some((key, plain, payload))
    }

    /// Reads the TCP header at offset `at`. `frame` ends where the IP packet ends.
    #[inline(always)]
    fn parse_tcp(frame: &[u8], at: usize) -> Option<(Plain, &[u8])> {
        let head = frame.get(at..at + TCP)?;
        // Data offset and reserved bits, then the flags; PSH may be set or not.
        let (control, pushed) = without_push(be16(head, tcp::DATA_OFFSET));
        let (headers, timestamps) = match control {
            ACK_WITH_TIMESTAMPS => {
                let options = frame.get(at + TCP..at + TCP + TIMESTAMPS)?;
                if be32(options, 0) != TIMESTAMPS_WORD {
                    return None;
                }
                (TCP + TIMESTAMPS, Some((be32(options, 4), be32(options, 8))))
            }
            ACK_WITHOUT_OPTIONS => (TCP, None),
            _ => return None,
        };
        let payload = &frame[at + headers..];
        let (seq, ack, window) = (be32(head, tcp::SEQ), be32(head, tcp::ACK), be16(head, tcp::WINDOW));
        Some((Plain { seq, ack, window, timestamps, length: payload.len() as u32, pushed }, payload))
    }

    /// Offsets of the TCP header and of the payload in the segment's frame.
    fn offsets(&self, key: FlowKey) -> (usize, usize) {
        let tcp = if key.is_v4() { ETHERNET + IPV4 } else { ETHERNET + IPV6 };
        (tcp, tcp + if self.timestamps.is_some() { TCP + TIMESTAMPS } else { TCP })
    }

    /// Bytes of headers in front of the payload, Ethernet included.
    pub fn headers(&self, key: FlowKey) -> usize {
        self.offsets(key).1
    }

    /// Whether the TCP checksum is right. To be asked only where no device has verified it.
    #[cold]
    pub fn checksum_holds(self, key: FlowKey, frame: &[u8]) -> bool {
        let (tcp, payload) = self.offsets(key);
        let segment = &frame[tcp..payload + self.length as usize];
        key.pseudo_header(segment.len()).bytes(segment).finish() == 0
    }
}

/// A pure acknowledgement: the fields that [`crate::frame::Template::acknowledge`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledgement {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Window field, already scaled down.
    pub window: u16,
    /// Timestamp value and echo reply.
    pub timestamps: Option<(u32, u32)>,
}

impl FlowKey {
    /// The sum over the pseudo-header of a segment of `length` bytes. It does not depend on which end is the source.
    fn pseudo_header(&self, length: usize) -> Sum {
        let sum = Sum::new().word(u16::from(PROTOCOL_TCP)).word((length >> 16) as u16).word(length as u16);
        self.address_words().iter().fold(sum, |sum, word| sum.bytes(&word.to_le_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
    use crate::{Endpoint, Flow, TcpFrame, TcpOptions};

    fn flows() -> [Flow; 2] {
        [
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 200, 3, 2], 40000), device: 0 },
            Flow { local: Endpoint::v6(core::array::from_fn(|n| n as u8), 443), remote: Endpoint::v6([0xfe; 16], 1), device: 0 },
        ]
    }

    fn segment(flow: &Flow, flags: Flags, timestamps: Option<(u32, u32)>, ecn: u8, ident: u16, out: &mut [u8]) -> usize {
        let template = Template::new(flow, &Link { ttl: 64, tos: 0x20, ..Link::default() }, true);
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let header = Header { seq: 0xfedc_ba98, ack: 6, flags, window: 7, options: &options, ecn, ident };
        let length = template.emit(&header, 5, out);
        out[length..length + 5].copy_from_slice(b"hello");
        assert!(finish_checksum(&mut out[..length + 5], template.tcp_offset(), 16));
        length + 5
    }

    /// Plain segments read the same in both parsers, also those whose checksum is wrong.
    #[test]
    fn plain_segments_read_alike_in_both_parsers() {
        for flow in flows() {
            for ident in (0..=u16::MAX).step_by(7) {
                let timestamps = (ident % 2 == 0).then_some((9, 10));
                let flags = if ident % 3 == 0 { Flags::ACK } else { Flags::ACK | Flags::PSH };
                let mut frame = [0u8; MAX_HEADER + 5];
                let length = segment(&flow, flags, timestamps, 2, ident, &mut frame);
                let frame = &mut frame[..length];
                let whole = TcpFrame::parse(frame, 0).unwrap();
                let (key, plain, payload) = Plain::parse(frame, false, 0).unwrap();
                assert_eq!(key, FlowKey::from(&whole.flow));
                assert_eq!((plain.seq, plain.ack, plain.window), (whole.seq, whole.ack, whole.window));
                assert_eq!((plain.timestamps, plain.pushed), (whole.options.timestamps, whole.flags.contains(Flags::PSH)));
                assert_eq!(payload, b"hello");
                assert_eq!(&frame[plain.headers(key)..], payload);
                let usual = Usual::parse(frame);
                assert_eq!(usual.is_some(), flow.is_v4() && timestamps.is_some());
                if let Some(usual) = usual {
                    assert_eq!((usual.key(0), usual.plain(), usual.payload()), (key, Some(plain), payload));
                    assert_eq!(Some(usual.fields()), Fields::of(&plain));
                }
                assert!(plain.checksum_holds(key, frame));
                frame[length - 1] ^= 4;
                assert!(!plain.checksum_holds(key, frame));
            }
        }
    }

    #[test]
    fn what_is_not_plain_is_left_to_the_whole_parser() {
        for flow in flows() {
            let mut frame = [0u8; MAX_HEADER + 5];
            for flags in [Flags::SYN, Flags::ACK | Flags::FIN, Flags::ACK | Flags::RST, Flags::ACK | Flags::ECE, Flags::PSH] {
                let length = segment(&flow, flags, Some((1, 2)), 0, 0, &mut frame);
                assert!(Plain::parse(&frame[..length], false, 0).is_none(), "{flags:?}");
                if let Some(usual) = Usual::parse(&frame[..length]) {
                    assert!(usual.plain().is_none(), "{flags:?}");
                    assert_ne!(usual.fields().control, Fields::control_of(7), "{flags:?}");
                }
            }
            let length = segment(&flow, Flags::ACK, None, 3, 0, &mut frame);
            assert!(Plain::parse(&frame[..length], false, 0).is_none(), "marked");
            let length = segment(&flow, Flags::ACK, Some((1, 2)), 0, 0, &mut frame);
            for cut in 0..length {
                assert!(Plain::parse(&frame[..cut], true, 0).is_none(), "cut at {cut}");
                assert!(Usual::parse(&frame[..cut]).is_none(), "cut at {cut}");
            }
            // With any single byte changed, both parsers read the same, or this one refuses.
            for at in 0..length {
                for value in 0..=255u8 {
                    let mut bad = frame;
                    bad[at] = value;
                    if let Some(usual) = Usual::parse(&bad[..length]) {
                        let plain = usual.plain();
                        assert_eq!(plain.is_some(), usual.fields().control >> 16 == Fields::control_of(0) >> 16);
                        if let Some(plain) = plain {
                            let parsed = Plain::parse(&bad[..length], true, 0);
                            assert_eq!(parsed, Some((usual.key(0), plain, usual.payload())), "byte {at} = {value}");
                            assert_eq!(Some(usual.fields()), Fields::of(&plain));
                        }
                    }
                    if let Some((key, plain, payload)) = Plain::parse(&bad[..length], false, 0) {
                        let whole = TcpFrame::parse(&bad[..length], 0).unwrap();
                        assert_eq!((key, plain.seq), (FlowKey::from(&whole.flow), whole.seq), "byte {at} = {value}");
                        assert_eq!(payload, whole.payload(&bad[..length]));
                    }
                }
            }
        }
    }

    #[test]
    fn a_plain_acknowledgement_is_the_frame_that_the_general_writer_makes() {
        for flow in flows() {
            for timestamps in [None, Some((11, 12))] {
                let mut template = Template::new(&flow, &Link { ttl: 64, tos: 0x20, ..Link::default() }, timestamps.is_some());
                let options = TcpOptions { timestamps, ..TcpOptions::default() };
                let header = Header { seq: 5, ack: 6, flags: Flags::ACK, window: 7, options: &options, ecn: 0, ident: 0 };
                let (mut general, mut plain) = ([0u8; MAX_HEADER], [0xffu8; MAX_HEADER]);
                let length = template.emit(&header, 0, &mut general);
                let ack = Acknowledgement { seq: 5, ack: 6, window: 7, timestamps };
                assert_eq!(template.acknowledge(&ack, &mut plain), length);
                assert_eq!(plain[..length], general[..length]);
                template.set_acknowledgement_seq(5);
                if let Some(timestamps) = timestamps.filter(|_| flow.is_v4()) {
                    let mut usual = [0xffu8; Template::USUAL_ACKNOWLEDGEMENT];
                    template.acknowledge_usual(&ack, timestamps, &mut usual);
                    assert_eq!(usual[..], general[..length]);
                }
                // What is prepared for one way changes nothing of the other.
                template.set_acknowledgement_seq(9);
                assert_eq!(template.acknowledge(&ack, &mut plain), length);
                assert_eq!(plain[..length], general[..length]);
            }
        }
    }
}
