//! Reassembly of IP datagrams that carry TCP (RFC 791 section 3.2, RFC 8200 section 4.5): a router behind which the MTU is smaller cuts
//! what is sent without DF, and only the first fragment has ports. Memory and time are bounded; what does not become whole is handed on as
//! it came.

use crate::worker::Worker;
use baton_device::{Checksum, Device, Frame};
use baton_rss::From;
use baton_tcp::Instant;
use baton_wire::checksum::Sum;
use baton_wire::frame::{ETHERNET, IPV4, IPV6, PROTOCOL_TCP};

/// Datagrams that may be incomplete at a time, and fragments of each: as many as 64 KB have at an IPv6 MTU.
const DATAGRAMS: usize = 32;
const PIECES: usize = 64;
/// Microseconds after which an incomplete datagram is given up (Linux's net.ipv4.ipfrag_time).
const PATIENCE: u64 = 30_000_000;
/// IPv6's extension header of a fragment, and its length.
const FRAGMENT: u8 = 44;
const FRAGMENT_BYTES: usize = 8;
/// Bytes that a datagram may have behind its IP header.
const MOST: usize = 65_535 - IPV4;

/// Which datagram a fragment belongs to: addresses, identification, IP version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key([u8; 32], u32, u8);

/// What a fragment's headers say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    key: Key,
    /// Bytes of the frame in front of the TCP bytes, and behind the last of them.
    start: usize,
    end: usize,
    /// Where they belong in the datagram.
    offset: usize,
    /// It is not the last.
    more: bool,
}

fn be16(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?])))
}

impl Piece {
    /// Reads a frame. None if it is no fragment of TCP, or a damaged one.
    pub fn of(frame: &[u8]) -> Option<Piece> {
        let ip = frame.get(ETHERNET..)?;
        let piece = match be16(frame, 12)? {
            0x0800 => {
                let (header, total, field) = (usize::from(ip.first()? & 15) * 4, be16(ip, 2)?, be16(ip, 6)?);
                let whole = field & 0x3fff == 0 || *ip.get(9)? != PROTOCOL_TCP;
                if whole || header < IPV4 || total < header || Sum::new().bytes(ip.get(..header)?).finish() != 0 {
                    return None;
                }
                let mut addresses = [0; 32];
                addresses[..8].copy_from_slice(&ip[12..20]);
                let (key, offset) = (Key(addresses, be16(ip, 4)? as u32, 4), (field & 0x1fff) * 8);
                Piece { key, start: ETHERNET + header, end: ETHERNET + total, offset, more: field & 0x2000 != 0 }
            }
            0x86dd => {
                let (length, field) = (be16(ip, 4)?, be16(ip, IPV6 + 2)?);
                if ip[6] != FRAGMENT || ip[IPV6] != PROTOCOL_TCP || length < FRAGMENT_BYTES {
                    return None;
                }
                let ident = u32::from_be_bytes(*ip.get(IPV6 + 4..)?.first_chunk()?);
                let (key, start) = (Key(*ip.get(8..)?.first_chunk()?, ident, 6), ETHERNET + IPV6 + FRAGMENT_BYTES);
                Piece { key, start, end: ETHERNET + IPV6 + length, offset: field & !7, more: field & 1 != 0 }
            }
            _ => return None,
        };
        let length = piece.end.checked_sub(piece.start)?;
        let fits = piece.end <= frame.len() && length > 0 && piece.offset + length <= MOST;
        (fits && !(piece.more && length % 8 != 0)).then_some(piece)
    }

    fn length(&self) -> usize {
        self.end - self.start
    }
}

/// An incomplete datagram: its fragments in the order of their offsets.
struct Datagram {
    key: Key,
    since: Instant,
    pieces: Vec<(Piece, Frame)>,
}

/// What became of a fragment.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// It waits for others, or was a duplicate.
    Waits,
    /// It overlaps another: the datagram is gone (RFC 8200 section 4.5; RFC 5722).
    Dropped,
    /// The frame now holds the whole datagram.
    Whole,
}

/// The datagrams that are incomplete.
#[derive(Default)]
pub(crate) struct Fragments {
    datagrams: Vec<Datagram>,
}

impl Fragments {
    /// Takes a fragment; `given_up` gets the frames of datagrams that have waited for too long, or had to make room.
    pub fn take(&mut self, frame: &mut Frame, piece: Piece, now: Instant, mut given_up: impl FnMut(Frame)) -> Outcome {
        let mut give_up = |datagram: Datagram| datagram.pieces.into_iter().for_each(|(_, frame)| given_up(frame));
        // In order of age.
        while self.datagrams.first().is_some_and(|oldest| now.since(oldest.since) > PATIENCE) {
            give_up(self.datagrams.remove(0));
        }
        let at = self.datagrams.iter().position(|datagram| datagram.key == piece.key).unwrap_or_else(|| {
            if self.datagrams.len() >= DATAGRAMS {
                give_up(self.datagrams.remove(0));
            }
            self.datagrams.push(Datagram { key: piece.key, since: now, pieces: Vec::new() });
            self.datagrams.len() - 1
        });
        let datagram = &mut self.datagrams[at];
        match datagram.insert(piece, frame) {
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
    fn insert(&mut self, piece: Piece, frame: &Frame) -> Outcome {
        let at = self.pieces.partition_point(|(other, _)| other.offset < piece.offset);
        if let Some((other, _)) = self.pieces.get(at)
            && (other.offset, other.length(), other.more) == (piece.offset, piece.length(), piece.more)
        {
            return Outcome::Waits;
        }
        let end = piece.offset + piece.length();
        let behind_last = at > 0 && {
            let before = &self.pieces[at - 1].0;
            before.offset + before.length() > piece.offset || !before.more
        };
        let before_next = self.pieces.get(at).is_some_and(|(next, _)| end > next.offset || !piece.more);
        if behind_last || before_next || self.pieces.len() >= PIECES {
            return Outcome::Dropped;
        }
        self.pieces.insert(at, (piece, frame.clone()));
        Outcome::Waits
    }

    fn is_complete(&self) -> bool {
        let mut next = 0;
        self.pieces.iter().all(|(piece, _)| std::mem::replace(&mut next, piece.offset + piece.length()) == piece.offset)
            && self.pieces.last().is_some_and(|(last, _)| !last.more)
    }

    /// Writes the datagram as if it had never been cut. False if `out` has no room for it.
    fn write(&self, out: &mut Frame) -> bool {
        let Some(((first, front), (last, back))) = self.pieces.first().zip(self.pieces.last()) else { return false };
        let v6 = first.key.2 == 6;
        let headers = if v6 { first.start - FRAGMENT_BYTES } else { first.start };
        let length = headers + last.offset + last.length();
        if length > out.capacity() {
            return false;
        }
        out.set_length(length);
        let bytes = out.bytes_mut();
        bytes[..headers].copy_from_slice(&front.bytes()[..headers]);
        for (piece, frame) in &self.pieces {
            bytes[headers + piece.offset..][..piece.length()].copy_from_slice(&frame.bytes()[piece.start..piece.end]);
        }
        let ip = &mut bytes[ETHERNET..headers];
        let behind = (length - ETHERNET) as u16;
        // RFC 3168 section 5.3: congestion that one fragment met the datagram has met.
        let class_at = if v6 { 1 } else { 0 };
        let marked = |frame: &Frame| {
            let ip = &frame.bytes()[ETHERNET..];
            if v6 { ip[class_at] >> 4 & 3 == 3 } else { ip[1] & 3 == 3 }
        };
        let congested = self.pieces.iter().any(|(_, frame)| marked(frame));
        if v6 {
            ip[4..6].copy_from_slice(&(behind - IPV6 as u16).to_be_bytes());
            ip[6] = PROTOCOL_TCP;
            ip[1] |= if congested { 0x30 } else { 0 };
        } else {
            ip[2..4].copy_from_slice(&behind.to_be_bytes());
            ip[6..8].fill(0);
            ip[1] |= if congested { 3 } else { 0 };
            ip[10..12].fill(0);
            let sum = Sum::new().bytes(ip).finish();
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        out.checksum = Checksum::Unknown;
        out.segmentation = None;
        out.interface = back.interface;
        true
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Takes the frame if it is a fragment of a datagram that may be an offloaded connection's. The datagram goes the way of any frame once
    /// it is whole, whoever's it is. False if the frame is none.
    pub(crate) fn took_fragment(&mut self, now: Instant) -> bool {
        let connections = self.among.as_ref().map_or(self.connections, |among| among.peers.connections());
        if connections == 0 {
            return false;
        }
        let Some(piece) = Piece::of(self.frame.bytes()) else { return false };
        let mut given_up = Vec::new();
        let mut fragments = std::mem::take(&mut self.fragments);
        let outcome = fragments.take(&mut self.frame, piece, now, |frame| given_up.push(frame));
        self.fragments = fragments;
        if outcome == Outcome::Whole {
            if self.among.is_some() {
                self.sort_frame(From::Wire, now);
            } else {
                self.on_any_wire_frame(now);
            }
        }
        for frame in given_up {
            // The kernel may still get what is missing.
            self.frame.copy_from(&frame);
            self.pass_from_wire(now);
        }
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
            Flow { local: Endpoint::v6([0xfd; 16], 443), remote: Endpoint::v6([0xfe; 16], 1) }
        } else {
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40000) }
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

    /// The bytes `from..to` behind the IP header as a fragment.
    fn cut(whole: &[u8], from: usize, to: usize, ident: u8) -> Frame {
        let v6 = whole[12] == 0x86;
        let ip = if v6 { ETHERNET + IPV6 } else { ETHERNET + IPV4 };
        let more = ip + to < whole.len();
        let mut bytes = whole[..ip].to_vec();
        if v6 {
            bytes[18..20].copy_from_slice(&((to - from + 8) as u16).to_be_bytes());
            bytes[20] = FRAGMENT;
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
            let piece = Piece::of(frame.bytes()).expect("a fragment");
            self.fragments.take(frame, piece, self.now, |_| self.given_up += 1)
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
                    // Another datagram's is another's.
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
                        assert!(TcpFrame::parse(frame.bytes()).expect("a segment").checksum_holds(frame.bytes()));
                    }
                }
            }
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
        bench.now = bench.now.after(PATIENCE + 1);
        bench.take(&mut cut(&whole, 8, 16, 7));
        assert_eq!((bench.fragments.datagrams.len(), bench.given_up), (1, 5 + DATAGRAMS));
        let mut take = |at: usize| bench.take(&mut cut(&whole, 8 * at, 8 * at + 8, 7));
        assert!((2..=PIECES).all(|at| take(at) == Outcome::Waits));
        assert_eq!(take(PIECES + 1), Outcome::Dropped);
    }

    /// Every truncation and every single-byte change is read or refused without a panic.
    #[test]
    fn lying_headers_are_refused() {
        for v6 in [false, true] {
            let good = cut(&segment(v6), 8, 408, 1);
            let mut bench = Bench::new();
            for length in 0..good.bytes().len() {
                assert!(Piece::of(&good.bytes()[..length]).is_none(), "cut at {length}");
            }
            for at in 0..80 {
                for value in [0u8, 0x0f, 0x7f, 0xff] {
                    let mut bad = good.clone();
                    bad.bytes_mut()[at] = value;
                    if let Some(piece) = Piece::of(bad.bytes()) {
                        bench.fragments.take(&mut bad, piece, bench.now, |_| {});
                    }
                }
            }
        }
    }
}
