//! An aggregate: the rules by which segments are merged, and the headers of the result.
//!
//! The headers are those of the first segment, with lengths and checksums of the whole. FIN and PSH are the last
//! segment's. Where acknowledgement, window and timestamps may differ ([`Mode::Reorder`]), acknowledgement, window and
//! timestamp echo are those of the newest segment. The timestamp value is the oldest segment's: a receiver that
//! acknowledges several segments at once has to echo that one (RFC 7323 section 4.3).

use crate::counters::Reason;
use crate::{LroSettings, Mode};
use baton_device::{Checksum, Frame, Segmentation};
use baton_wire::frame::{ETHERNET, IPV4_DONT_FRAGMENT, TCP, TCP_CHECKSUM, set_lengths};
use baton_wire::offset::{ipv4, ipv6, tcp};
use baton_wire::{Flags, TcpFrame};

/// An aggregate under construction.
pub(crate) struct Aggregate {
    pub frame: Frame,
    /// Headers of the first segment.
    first: TcpFrame,
    /// Bytes of payload of each segment but the last.
    pub size: usize,
    /// Number of segments.
    pub count: u32,
    /// Sequence number behind the last byte.
    pub end: u32,
    /// All segments have the same IPv4 identification, instead of increasing ones.
    fixed_ident: bool,
    /// When it was opened, in microseconds.
    pub since: u64,
}

/// The fields of the IP header that must be the same in all segments of an aggregate.
fn network_fields(frame: &[u8], v4: bool) -> ([u8; 4], u8) {
    let ip = &frame[ETHERNET..];
    if v4 {
        // Version and header length, type of service with its ECN bits, "don't fragment"; TTL.
        ([ip[0], ip[ipv4::TOS], ip[ipv4::FRAGMENT] & IPV4_DONT_FRAGMENT, 0], ip[ipv4::TTL])
    } else {
        // Version, traffic class, flow label; hop limit.
        ([ip[0], ip[1], ip[2], ip[3]], ip[ipv6::HOP_LIMIT])
    }
}

fn ident(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[ETHERNET + ipv4::IDENT], frame[ETHERNET + ipv4::IDENT + 1]])
}

fn options<'a>(frame: &'a [u8], parsed: &TcpFrame) -> &'a [u8] {
    &frame[parsed.tcp_offset + TCP..parsed.payload_offset]
}

/// Whether the options are NOP, NOP, timestamps, which is the only option whose value may differ between segments.
fn is_timestamps(options: &[u8]) -> bool {
    options.len() == 12 && options[..4] == [1, 1, 8, 10]
}

impl Aggregate {
    /// Makes an aggregate of one segment, in a frame with room for more.
    pub fn new(frame: Frame, first: TcpFrame, now: u64) -> Aggregate {
        let (size, end) = (first.payload_length, first.seq.wrapping_add(first.payload_length as u32));
        Aggregate { frame, first, size, count: 1, end, fixed_ident: false, since: now }
    }

    /// Whether a segment may be appended.
    pub fn takes(&self, frame: &[u8], parsed: &TcpFrame, settings: &LroSettings) -> bool {
        let own = self.frame.bytes();
        let first = &self.first;
        parsed.seq == self.end
            && parsed.payload_length <= self.size
            && self.fits(parsed.payload_length, settings)
            && own[..ETHERNET] == frame[..ETHERNET]
            && network_fields(own, first.flow.is_v4()) == network_fields(frame, first.flow.is_v4())
            && parsed.payload_offset == first.payload_offset
            // Reserved bits and flags must be equal, but for the flags that only the last segment has.
            && own[first.tcp_offset + tcp::DATA_OFFSET] == frame[first.tcp_offset + tcp::DATA_OFFSET]
            && (own[first.tcp_offset + tcp::FLAGS] ^ parsed.flags.0) & !(Flags::FIN | Flags::PSH).0 == 0
            && match settings.mode {
                Mode::Reorder => self.options_may_follow(frame, parsed),
                _ => self.is_same_to_gro(frame, parsed),
            }
    }

    fn options_may_follow(&self, frame: &[u8], parsed: &TcpFrame) -> bool {
        let (own, other) = (options(self.frame.bytes(), &self.first), options(frame, parsed));
        own == other || is_timestamps(own) && is_timestamps(other)
    }

    /// Whether the further fields that Linux's GRO compares are equal: IPv4 identification, acknowledgement, window,
    /// options.
    fn is_same_to_gro(&self, frame: &[u8], parsed: &TcpFrame) -> bool {
        let own = self.frame.bytes();
        let follows = !self.first.flow.is_v4() || {
            let ahead = ident(frame).wrapping_sub(ident(own));
            let fixed =
                self.fixed_ident || self.count == 1 && own[ETHERNET + ipv4::FRAGMENT] & IPV4_DONT_FRAGMENT != 0 && ahead == 0;
            u32::from(ahead) == if fixed { 0 } else { self.count }
        };
        follows
            && (parsed.ack, parsed.window) == (self.first.ack, self.first.window)
            && options(own, &self.first) == options(frame, parsed)
    }

    /// Whether another aggregate may be appended as a whole.
    pub fn takes_all(&self, other: &Aggregate, settings: &LroSettings) -> bool {
        other.size == self.size
            && self.fits(other.payload().len(), settings)
            && self.takes(other.frame.bytes(), &other.first, settings)
    }

    /// The payload so far.
    pub fn payload(&self) -> &[u8] {
        &self.frame.bytes()[self.first.payload_offset..]
    }

    /// Appends a segment for which [`Aggregate::takes`] holds.
    pub fn append(&mut self, frame: &[u8], parsed: &TcpFrame) {
        if self.first.flow.is_v4() && self.count == 1 {
            self.fixed_ident = ident(frame) == ident(self.frame.bytes());
        }
        self.extend(&frame[..parsed.payload_offset], parsed.payload(frame));
        self.count += 1;
    }

    /// Appends an aggregate for which [`Aggregate::takes_all`] holds.
    pub fn append_all(&mut self, other: &Aggregate) {
        self.extend(&other.frame.bytes()[..other.first.payload_offset], other.payload());
        self.count += other.count;
    }

    /// Appends a payload, and updates the own headers from `headers`, which were in front of it.
    fn extend(&mut self, headers: &[u8], payload: &[u8]) {
        let (length, at) = (self.frame.length(), self.first.tcp_offset);
        self.frame.set_length(length + payload.len());
        let own = self.frame.bytes_mut();
        own[length..].copy_from_slice(payload);
        own[at + tcp::FLAGS] |= headers[at + tcp::FLAGS] & (Flags::FIN | Flags::PSH).0;
        let ack = |bytes: &[u8]| u32::from_be_bytes(core::array::from_fn(|n| bytes[at + tcp::ACK + n]));
        // In segments that were put in order the last one need not have the newest acknowledgement.
        if ack(headers).wrapping_sub(ack(own)) as i32 >= 0 {
            let (ack, window) = (at + tcp::ACK..at + tcp::DATA_OFFSET, at + tcp::WINDOW..at + tcp::CHECKSUM);
            own[ack.clone()].copy_from_slice(&headers[ack]);
            own[window.clone()].copy_from_slice(&headers[window]);
            let (options, echo) = (at + TCP..self.first.payload_offset, at + TCP + 8..at + TCP + 12);
            if is_timestamps(&own[options.clone()]) && is_timestamps(&headers[options]) {
                own[echo.clone()].copy_from_slice(&headers[echo]);
            }
        }
        self.end = self.end.wrapping_add(payload.len() as u32);
    }

    /// The frame and the headers of an aggregate of one segment.
    pub fn into_segment(self) -> (Frame, TcpFrame) {
        (self.frame, self.first)
    }

    /// The reason why no segment may follow the one appended last; None if one may.
    pub fn ends_with(&self, parsed: &TcpFrame, pushed: bool, settings: &LroSettings) -> Option<Reason> {
        let fin = parsed.flags.contains(Flags::FIN);
        let short = parsed.payload_length < self.size;
        let full = !self.has_room(settings);
        let reasons = [(fin, Reason::Fin), (pushed, Reason::Push), (short, Reason::Short), (full, Reason::Full)];
        reasons.into_iter().find(|(holds, _)| *holds).map(|(_, reason)| reason)
    }

    /// Whether another segment of the same size would fit.
    pub fn has_room(&self, settings: &LroSettings) -> bool {
        self.fits(self.size, settings)
    }

    /// Whether `more` bytes of payload fit.
    fn fits(&self, more: usize, settings: &LroSettings) -> bool {
        let length = self.frame.length() + more;
        length - ETHERNET <= settings.most.min(65_535) && length <= self.frame.capacity()
    }

    /// The finished frame: a single segment as it was received, several with headers of their own.
    pub fn finish(mut self) -> Frame {
        if self.count == 1 {
            return self.frame;
        }
        let (at, v4) = (self.first.tcp_offset, self.first.flow.is_v4());
        set_lengths(self.frame.bytes_mut(), at);
        // The checksums of all segments were verified, so the kernel need not sum the bytes again.
        self.frame.checksum = Checksum::Partial { start: at as u16, offset: TCP_CHECKSUM as u16 };
        let headers = self.first.payload_offset as u16;
        self.frame.segmentation = Some(Segmentation { size: self.size as u16, headers, ipv6: !v4, ecn: false, udp: false });
        self.frame
    }
}
