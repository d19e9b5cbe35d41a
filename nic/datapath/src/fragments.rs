//! Reassembly of IP datagrams that carry TCP (RFC 791 section 3.2, RFC 8200 section 4.5). A router in front of a
//! smaller MTU cuts packets that are sent without DF, and only the first fragment has ports. Memory and time are
//! bounded; fragments of a datagram that does not become complete are passed on unchanged.

use baton_device::{Checksum, Frame};
use baton_tcp::Instant;
use baton_wire::checksum::Sum;
use baton_wire::frame::{
    ECN_CE, ECN_MASK, ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV4_FRAGMENT, IPV6, PROTOCOL_IPV6_FRAGMENT, PROTOCOL_TCP,
};
use baton_wire::offset::{ethernet, ipv4, ipv6};

/// Largest number of incomplete datagrams, and of fragments of each: as many as 64 KB have at the MTU of IPv6.
const DATAGRAMS: usize = 32;
const MAX_FRAGMENTS: usize = 64;
/// Microseconds after which an incomplete datagram is given up (Linux's net.ipv4.ipfrag_time).
const TIMEOUT: u64 = 30_000_000;
/// Bytes of the IPv6 Fragment header.
const FRAGMENT_BYTES: usize = 8;
/// Largest number of bytes behind a datagram's IP header.
const MAX_PAYLOAD: usize = 65_535 - IPV4;

/// Bits of the IPv4 fragment field: the offset in units of 8 bytes, and "more fragments".
const IPV4_OFFSET: usize = 0x1fff;
const IPV4_MORE_FRAGMENTS: usize = 0x2000;
/// Bits of the IPv6 fragment field: the offset in bytes, and "more fragments".
const IPV6_OFFSET: usize = 0xfff8;
const IPV6_MORE_FRAGMENTS: usize = 1;

/// Identifies the datagram that a fragment belongs to: addresses, identification, IP version; and the device for
/// link-local addresses, which another host may have on another link, else 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key([u8; 32], u32, u8, u32);

/// The headers of a fragment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    key: Key,
    /// Offsets in the frame of its first byte of TCP and of the end.
    start: usize,
    end: usize,
    /// Offset of these bytes in the datagram.
    offset: usize,
    /// The bit "more fragments": it is not the last one.
    more: bool,
}

fn be16(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?])))
}

/// Whether an address of IPv6 is link-local.
fn link_local(address: &[u8]) -> bool {
    address[0] == 0xfe && address[1] & 0xc0 == 0x80
}

impl Fragment {
    /// Reads a frame that was received by this device. None if it is not a fragment that carries TCP, or is damaged.
    pub fn parse(frame: &[u8], device: u32) -> Option<Fragment> {
        let ip = frame.get(ETHERNET..)?;
        let fragment = match be16(frame, ethernet::TYPE)? as u16 {
            ETHERTYPE_IPV4 => {
                let (header, total, field) =
                    (usize::from(ip.first()? & 15) * 4, be16(ip, ipv4::LENGTH)?, be16(ip, ipv4::FRAGMENT)?);
                let whole = field & usize::from(IPV4_FRAGMENT) == 0 || *ip.get(ipv4::PROTOCOL)? != PROTOCOL_TCP;
                if whole || header < IPV4 || total < header || Sum::new().bytes(ip.get(..header)?).finish() != 0 {
                    return None;
                }
                let mut addresses = [0; 32];
                addresses[..8].copy_from_slice(&ip[ipv4::SOURCE..IPV4]);
                let (key, offset) = (Key(addresses, be16(ip, ipv4::IDENT)? as u32, 4, 0), (field & IPV4_OFFSET) * 8);
                Fragment { key, start: ETHERNET + header, end: ETHERNET + total, offset, more: field & IPV4_MORE_FRAGMENTS != 0 }
            }
            ETHERTYPE_IPV6 => {
                let (length, field) = (be16(ip, ipv6::LENGTH)?, be16(ip, IPV6 + 2)?);
                if ip[ipv6::NEXT_HEADER] != PROTOCOL_IPV6_FRAGMENT || ip[IPV6] != PROTOCOL_TCP || length < FRAGMENT_BYTES {
                    return None;
                }
                let ident = u32::from_be_bytes(*ip.get(IPV6 + 4..)?.first_chunk()?);
                let addresses: [u8; 32] = *ip.get(ipv6::SOURCE..)?.first_chunk()?;
                let device = if addresses.chunks(16).any(link_local) { device } else { 0 };
                let (key, start) = (Key(addresses, ident, 6, device), ETHERNET + IPV6 + FRAGMENT_BYTES);
                Fragment {
                    key,
                    start,
                    end: ETHERNET + IPV6 + length,
                    offset: field & IPV6_OFFSET,
                    more: field & IPV6_MORE_FRAGMENTS != 0,
                }
            }
            _ => return None,
        };
        let length = fragment.end.checked_sub(fragment.start)?;
        let fits = fragment.end <= frame.len() && length > 0 && fragment.offset + length <= MAX_PAYLOAD;
        (fits && !(fragment.more && length % 8 != 0)).then_some(fragment)
    }

    fn length(&self) -> usize {
        self.end - self.start
    }

    /// Whether it is a complete datagram by itself.
    fn is_whole(&self) -> bool {
        self.offset == 0 && !self.more
    }
}

/// An incomplete datagram: its fragments in the order of their offsets, and when the first arrived.
struct Datagram {
    key: Key,
    since: Instant,
    fragments: Vec<(Fragment, Frame)>,
}

/// The result of taking a fragment.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The fragment waits for others, or was a duplicate.
    Waits,
    /// The fragment overlaps another one, or there are too many: the datagram is dropped (RFC 8200 section 4.5; RFC
    /// 5722).
    Dropped,
    /// The datagram is complete and was written to the frame.
    Whole,
}

/// The incomplete datagrams, the oldest first.
#[derive(Default)]
pub(crate) struct Fragments {
    datagrams: Vec<Datagram>,
}

impl Fragments {
    /// Takes a fragment. `given_up` is called with the frames of datagrams that have waited too long or must make room.
    pub fn take(&mut self, frame: &mut Frame, fragment: Fragment, now: Instant, mut given_up: impl FnMut(Frame)) -> Outcome {
        if fragment.is_whole() {
            // An IPv6 atomic fragment has nothing to do with others of the same identification (RFC 6946 section 4).
            let alone = Datagram { key: fragment.key, since: now, fragments: vec![(fragment, frame.clone())] };
            return if alone.write(frame) { Outcome::Whole } else { Outcome::Dropped };
        }
        let mut give_up = |datagram: Datagram| datagram.fragments.into_iter().for_each(|(_, frame)| given_up(frame));
        // The datagrams are in order of age.
        while self.datagrams.first().is_some_and(|oldest| now.since(oldest.since) > TIMEOUT) {
            give_up(self.datagrams.remove(0));
        }
        let at = self.datagrams.iter().position(|datagram| datagram.key == fragment.key).unwrap_or_else(|| {
            if self.datagrams.len() >= DATAGRAMS {
                give_up(self.datagrams.remove(0));
            }
            self.datagrams.push(Datagram { key: fragment.key, since: now, fragments: Vec::new() });
            self.datagrams.len() - 1
        });
        let datagram = &mut self.datagrams[at];
        match datagram.insert(fragment, frame) {
            Outcome::Waits if datagram.is_complete() => {
                let datagram = self.datagrams.remove(at);
                if datagram.write(frame) { Outcome::Whole } else { Outcome::Dropped }
            }
            Outcome::Waits => Outcome::Waits,
            other => {
                self.datagrams.remove(at);
                other
            }
        }
    }
}

impl Datagram {
    /// Inserts a fragment, unless it overlaps others.
    fn insert(&mut self, fragment: Fragment, frame: &Frame) -> Outcome {
        let at = self.fragments.partition_point(|(other, _)| other.offset < fragment.offset);
        if let Some((other, _)) = self.fragments.get(at)
            && (other.offset, other.length(), other.more) == (fragment.offset, fragment.length(), fragment.more)
        {
            return Outcome::Waits;
        }
        let end = fragment.offset + fragment.length();
        let behind_last = at > 0 && {
            let before = &self.fragments[at - 1].0;
            before.offset + before.length() > fragment.offset || !before.more
        };
        let before_next = self.fragments.get(at).is_some_and(|(next, _)| end > next.offset || !fragment.more);
        if behind_last || before_next || self.fragments.len() >= MAX_FRAGMENTS {
            return Outcome::Dropped;
        }
        self.fragments.insert(at, (fragment, frame.clone()));
        Outcome::Waits
    }

    /// Whether the fragments cover the datagram.
    fn is_complete(&self) -> bool {
        let mut next = 0;
        self.fragments
            .iter()
            .all(|(fragment, _)| std::mem::replace(&mut next, fragment.offset + fragment.length()) == fragment.offset)
            && self.fragments.last().is_some_and(|(last, _)| !last.more)
    }

    /// Writes the datagram as if it had never been fragmented. False if `out` has no room for it.
    fn write(&self, out: &mut Frame) -> bool {
        let Some(((first, front), (last, back))) = self.fragments.first().zip(self.fragments.last()) else { return false };
        let v6 = first.key.2 == 6;
        let headers = if v6 { first.start - FRAGMENT_BYTES } else { first.start };
        let length = headers + last.offset + last.length();
        if length > out.capacity() {
            return false;
        }
        out.set_length(length);
        let bytes = out.bytes_mut();
        bytes[..headers].copy_from_slice(&front.bytes()[..headers]);
        for (fragment, frame) in &self.fragments {
            bytes[headers + fragment.offset..][..fragment.length()].copy_from_slice(&frame.bytes()[fragment.start..fragment.end]);
        }
        let ip = &mut bytes[ETHERNET..headers];
        let behind = (length - ETHERNET) as u16;
        // RFC 3168 section 5.3: a congestion mark on any fragment marks the datagram.
        let marked = |frame: &Frame| {
            let ip = &frame.bytes()[ETHERNET..];
            if v6 { ip[1] >> 4 & ECN_MASK == ECN_CE } else { ip[ipv4::TOS] & ECN_MASK == ECN_CE }
        };
        let congested = self.fragments.iter().any(|(_, frame)| marked(frame));
        if v6 {
            ip[ipv6::LENGTH..ipv6::NEXT_HEADER].copy_from_slice(&(behind - IPV6 as u16).to_be_bytes());
            ip[ipv6::NEXT_HEADER] = PROTOCOL_TCP;
            ip[1] |= if congested { ECN_CE << 4 } else { 0 };
        } else {
            ip[ipv4::LENGTH..ipv4::IDENT].copy_from_slice(&behind.to_be_bytes());
            ip[ipv4::FRAGMENT..ipv4::TTL].fill(0);
            ip[ipv4::TOS] |= if congested { ECN_CE } else { 0 };
            ip[ipv4::CHECKSUM..ipv4::SOURCE].fill(0);
            let sum = Sum::new().bytes(ip).finish();
            ip[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum.to_be_bytes());
        }
        out.checksum = Checksum::Unknown;
        out.segmentation = None;
        out.interface = back.interface;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
    use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};

    /// A TCP segment of 1000 bytes without DF.
    fn segment(v6: bool) -> Vec<u8> {
        let flow = if v6 {
            Flow { local: Endpoint::v6([0xfd; 16], 443), remote: Endpoint::v6([0xfe; 16], 1), device: 0 }
        } else {
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40000), device: 0 }
        };
        let template = Template::new(&flow, &Link { ttl: 64, ..Link::default() }, false);
        let options = TcpOptions::default();
        let header = Header { seq: 5, ack: 6, flags: Flags::ACK, window: 7, options: &options, ecn: 2, ident: 9 };
        let mut frame = vec![0; MAX_HEADER + 1000];
        let headers = template.emit(&header, 1000, &mut frame);
        frame.truncate(headers + 1000);
        frame[headers..].iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        finish_checksum(&mut frame, template.tcp_offset(), 16);
        if !v6 {
            frame[20..22].fill(0);
            sum_again(&mut frame);
        }
        frame
    }

    fn sum_again(frame: &mut [u8]) {
        frame[24..26].fill(0);
        let sum = Sum::new().bytes(&frame[14..34]).finish();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }

    /// Makes a fragment of the bytes `from..to` behind the IP header.
    fn cut(whole: &[u8], from: usize, to: usize, ident: u8) -> Frame {
        let v6 = whole[12] == 0x86;
        let ip = if v6 { ETHERNET + IPV6 } else { ETHERNET + IPV4 };
        let more = ip + to < whole.len();
        let mut bytes = whole[..ip].to_vec();
        if v6 {
            bytes[18..20].copy_from_slice(&((to - from + 8) as u16).to_be_bytes());
            bytes[20] = PROTOCOL_IPV6_FRAGMENT;
            bytes.extend([PROTOCOL_TCP, 0]);
            bytes.extend((from as u16 | u16::from(more)).to_be_bytes());
            bytes.extend([0, 0, 0, ident]);
        } else {
            bytes[16..18].copy_from_slice(&((to - from + 20) as u16).to_be_bytes());
            bytes[18..20].copy_from_slice(&[0, ident]);
            bytes[20..22].copy_from_slice(&(from as u16 / 8 | u16::from(more) << 13).to_be_bytes());
            sum_again(&mut bytes);
        }
        bytes.extend_from_slice(&whole[ip + from..ip + to]);
        let mut frame = Frame::with_capacity(2048);
        frame.fill(&bytes);
        frame
    }

    struct Bench {
        fragments: Fragments,
        given_up: usize,
        now: Instant,
    }

    impl Bench {
        fn new() -> Bench {
            Bench { fragments: Fragments::default(), given_up: 0, now: Instant(1) }
        }

        fn take(&mut self, frame: &mut Frame) -> Outcome {
            let fragment = Fragment::parse(frame.bytes(), 0).expect("a fragment");
            self.fragments.take(frame, fragment, self.now, |_| self.given_up += 1)
        }
    }

    #[test]
    fn fragments_in_any_order_make_the_segment() {
        for v6 in [false, true] {
            let whole = segment(v6);
            let end = whole.len() - if v6 { 54 } else { 34 };
            for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
                let mut bench = Bench::new();
                let edges = [0, 8, 808, end];
                for (at, which) in order.into_iter().enumerate() {
                    let mut frame = cut(&whole, edges[which], edges[which + 1], 1);
                    // A duplicate changes nothing.
                    if at < 2 {
                        assert_eq!(bench.take(&mut frame.clone()), Outcome::Waits);
                    }
                    // The fragment of another datagram does not count.
                    assert_eq!(bench.take(&mut cut(&whole, edges[which], edges[which + 1], 10 + at as u8)), Outcome::Waits);
                    let outcome = bench.take(&mut frame);
                    assert_eq!(outcome, if at == 2 { Outcome::Whole } else { Outcome::Waits });
                    if at == 2 {
                        let mut expected = whole.clone();
                        if !v6 {
                            expected[19] = 1;
                            sum_again(&mut expected);
                        }
                        assert_eq!(frame.bytes(), expected);
                        assert!(TcpFrame::parse(frame.bytes(), 0).expect("a segment").checksum_holds(frame.bytes()));
                    }
                }
            }
        }
    }

    /// RFC 6946: an atomic fragment (a Fragment header on a whole datagram) does not affect other datagrams with its
    /// identification, nor they it.
    #[test]
    fn an_atomic_fragment_has_nothing_to_do_with_others() {
        let whole = segment(true);
        let end = whole.len() - 54;
        for first in [0, 808] {
            let mut bench = Bench::new();
            let mut parts = [cut(&whole, 0, 808, 1), cut(&whole, 808, end, 1)];
            parts.rotate_left(usize::from(first > 0));
            assert_eq!(bench.take(&mut parts[0]), Outcome::Waits);
            let mut atomic = cut(&whole, 0, end, 1);
            assert_eq!(bench.take(&mut atomic), Outcome::Whole);
            assert_eq!(atomic.bytes(), whole, "it is as if it had no Fragment header");
            assert_eq!(bench.take(&mut parts[1]), Outcome::Whole);
            assert_eq!(parts[1].bytes(), whole);
        }
    }

    #[test]
    fn overlaps_drop_the_datagram() {
        for (from, to) in [(0, 400), (392, 808), (400, 800), (808, 1016)] {
            let whole = segment(false);
            let mut bench = Bench::new();
            assert_eq!(bench.take(&mut cut(&whole, 0, 408, 1)), Outcome::Waits);
            assert_eq!(bench.take(&mut cut(&whole, 800, 1020, 1)), Outcome::Waits);
            assert_eq!(bench.take(&mut cut(&whole, from, to, 1)), Outcome::Dropped, "{from}..{to}");
            assert!(bench.fragments.datagrams.is_empty());
        }
    }

    #[test]
    fn memory_and_time_are_bounded() {
        let whole = segment(false);
        let mut bench = Bench::new();
        for ident in 0..DATAGRAMS as u8 + 5 {
            bench.take(&mut cut(&whole, 0, 8, ident));
        }
        assert_eq!((bench.fragments.datagrams.len(), bench.given_up), (DATAGRAMS, 5));
        bench.now = bench.now.after(TIMEOUT + 1);
        bench.take(&mut cut(&whole, 8, 16, 7));
        assert_eq!((bench.fragments.datagrams.len(), bench.given_up), (1, 5 + DATAGRAMS));
        let mut take = |at: usize| bench.take(&mut cut(&whole, 8 * at, 8 * at + 8, 7));
        assert!((2..=MAX_FRAGMENTS).all(|at| take(at) == Outcome::Waits));
        assert_eq!(take(MAX_FRAGMENTS + 1), Outcome::Dropped);
    }

    /// Every truncation and every single-byte change is read or refused without a panic.
    #[test]
    fn wrong_headers_are_refused() {
        for v6 in [false, true] {
            let good = cut(&segment(v6), 8, 408, 1);
            let mut bench = Bench::new();
            for length in 0..good.bytes().len() {
                assert!(Fragment::parse(&good.bytes()[..length], 0).is_none(), "cut at {length}");
            }
            for at in 0..80 {
                for value in [0u8, 0x0f, 0x7f, 0xff] {
                    let mut bad = good.clone();
                    bad.bytes_mut()[at] = value;
                    if let Some(fragment) = Fragment::parse(bad.bytes(), 0) {
                        bench.fragments.take(&mut bad, fragment, bench.now, |_| {});
                    }
                }
            }
        }
    }
}
