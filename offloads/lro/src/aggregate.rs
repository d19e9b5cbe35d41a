//! Segments that have become one: what may be merged, and what the headers of the whole say.
//!
//! The first segment's headers stay, with lengths and checksums of the whole. FIN and PSH are the last one's. Where acknowledgement, window
//! and timestamps may differ ([`Mode::Reorder`]) acknowledgement, window and echo are those of the newest, the timestamp is the oldest's: that
//! is what a receiver has to echo that acknowledges several segments at once (RFC 7323 section 4.3).

use crate::counters::Reason;
use crate::{Mode, Settings};
use baton_device::{Checksum, Frame, Segmentation};
use baton_wire::frame::{ETHERNET, TCP, set_lengths};
use baton_wire::{Flags, TcpFrame};

/// An aggregate that is being made.
pub(crate) struct Aggregate {
    pub frame: Frame,
    /// The first segment.
    first: TcpFrame,
    /// Payload bytes of each segment but the last.
    pub size: usize,
    pub count: u32,
    /// Sequence number behind its last byte.
    pub end: u32,
    /// Identification numbers do not count up.
    fixed_ident: bool,
    /// Microseconds.
    pub since: u64,
}

/// Bits of the first words of an IP header that have to be the same, and how they lie.
fn network_fields(frame: &[u8], v4: bool) -> ([u8; 4], u8) {
    let ip = &frame[ETHERNET..];
    if v4 {
        // Type of service with its ECN bits, "don't fragment"; time to live.
        ([ip[0], ip[1], ip[6] & 0x40, 0], ip[8])
    } else {
        // Version, traffic class, flow label; hop limit.
        ([ip[0], ip[1], ip[2], ip[3]], ip[7])
    }
}

fn ident(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[ETHERNET + 4], frame[ETHERNET + 5]])
}

fn options<'a>(frame: &'a [u8], parsed: &TcpFrame) -> &'a [u8] {
    &frame[parsed.tcp_offset + TCP..parsed.payload_offset]
}

/// NOP, NOP, timestamps: the only options that may differ.
fn is_timestamps(options: &[u8]) -> bool {
    options.len() == 12 && options[..4] == [1, 1, 8, 10]
}

impl Aggregate {
    /// One of one segment, in a frame with room for more.
    pub fn new(frame: Frame, first: TcpFrame, now: u64) -> Aggregate {
        let (size, end) = (first.payload_length, first.seq.wrapping_add(first.payload_length as u32));
        Aggregate { frame, first, size, count: 1, end, fixed_ident: false, since: now }
    }

    /// Whether a segment may follow.
    pub fn takes(&self, frame: &[u8], parsed: &TcpFrame, settings: &Settings) -> bool {
        let own = self.frame.bytes();
        let first = &self.first;
        parsed.seq == self.end
            && parsed.payload_length <= self.size
            && self.fits(parsed.payload_length, settings)
            && own[..ETHERNET] == frame[..ETHERNET]
            && network_fields(own, first.flow.is_v4()) == network_fields(frame, first.flow.is_v4())
            && parsed.payload_offset == first.payload_offset
            // Reserved bits, and all flags but those that only the last segment has.
            && own[first.tcp_offset + 12] == frame[first.tcp_offset + 12]
            && (own[first.tcp_offset + 13] ^ parsed.flags.0) & !(Flags::FIN | Flags::PSH).0 == 0
            && match settings.mode {
                Mode::Reorder => self.options_may_follow(frame, parsed),
                _ => self.is_same_to_gro(frame, parsed),
            }
    }

    fn options_may_follow(&self, frame: &[u8], parsed: &TcpFrame) -> bool {
        let (own, other) = (options(self.frame.bytes(), &self.first), options(frame, parsed));
        own == other || is_timestamps(own) && is_timestamps(other)
    }

    /// What GRO compares besides.
    fn is_same_to_gro(&self, frame: &[u8], parsed: &TcpFrame) -> bool {
        let own = self.frame.bytes();
        let follows = !self.first.flow.is_v4() || {
            let ahead = ident(frame).wrapping_sub(ident(own));
            let fixed = self.fixed_ident || self.count == 1 && own[ETHERNET + 6] & 0x40 != 0 && ahead == 0;
            u32::from(ahead) == if fixed { 0 } else { self.count }
        };
        follows
            && (parsed.ack, parsed.window) == (self.first.ack, self.first.window)
            && options(own, &self.first) == options(frame, parsed)
    }

    /// Whether another aggregate may follow, whole.
    pub fn takes_all(&self, other: &Aggregate, settings: &Settings) -> bool {
        other.size == self.size
            && self.fits(other.payload().len(), settings)
            && self.takes(other.frame.bytes(), &other.first, settings)
    }

    /// What it carries so far.
    pub fn payload(&self) -> &[u8] {
        &self.frame.bytes()[self.first.payload_offset..]
    }

    /// Merges a segment that it [takes](Aggregate::takes).
    pub fn append(&mut self, frame: &[u8], parsed: &TcpFrame) {
        if self.first.flow.is_v4() && self.count == 1 {
            self.fixed_ident = ident(frame) == ident(self.frame.bytes());
        }
        self.extend(&frame[..parsed.payload_offset], parsed.payload(frame));
        self.count += 1;
    }

    /// Merges another aggregate that it takes as a [whole](Aggregate::takes_all).
    pub fn append_all(&mut self, other: &Aggregate) {
        self.extend(&other.frame.bytes()[..other.first.payload_offset], other.payload());
        self.count += other.count;
    }

    /// Appends a payload, and what the headers in front of it say that the whole has to say.
    fn extend(&mut self, headers: &[u8], payload: &[u8]) {
        let (length, tcp) = (self.frame.bytes().len(), self.first.tcp_offset);
        self.frame.set_length(length + payload.len());
        let own = self.frame.bytes_mut();
        own[length..].copy_from_slice(payload);
        own[tcp + 13] |= headers[tcp + 13] & (Flags::FIN | Flags::PSH).0;
        let ack = |bytes: &[u8]| u32::from_be_bytes([bytes[tcp + 8], bytes[tcp + 9], bytes[tcp + 10], bytes[tcp + 11]]);
        // Of segments that were put in order the last is not always the newest.
        if ack(headers).wrapping_sub(ack(own)) as i32 >= 0 {
            own[tcp + 8..tcp + 12].copy_from_slice(&headers[tcp + 8..tcp + 12]);
            own[tcp + 14..tcp + 16].copy_from_slice(&headers[tcp + 14..tcp + 16]);
            let (options, echo) = (tcp + TCP..self.first.payload_offset, tcp + TCP + 8..tcp + TCP + 12);
            if is_timestamps(&own[options.clone()]) && is_timestamps(&headers[options]) {
                own[echo.clone()].copy_from_slice(&headers[echo]);
            }
        }
        self.end = self.end.wrapping_add(payload.len() as u32);
    }

    /// The frame of one segment, and what it says.
    pub fn into_segment(self) -> (Frame, TcpFrame) {
        (self.frame, self.first)
    }

    /// Why nothing may follow a segment that came last.
    pub fn ends_with(&self, parsed: &TcpFrame, pushed: bool, settings: &Settings) -> Option<Reason> {
        let fin = parsed.flags.contains(Flags::FIN);
        let short = parsed.payload_length < self.size;
        let full = !self.has_room(settings);
        let reasons = [(fin, Reason::Fin), (pushed, Reason::Push), (short, Reason::Short), (full, Reason::Full)];
        reasons.into_iter().find(|(holds, _)| *holds).map(|(_, reason)| reason)
    }

    /// Whether another segment of the usual size would find room.
    pub fn has_room(&self, settings: &Settings) -> bool {
        self.fits(self.size, settings)
    }

    /// Whether so many more bytes find room.
    fn fits(&self, more: usize, settings: &Settings) -> bool {
        let length = self.frame.bytes().len() + more;
        length - ETHERNET <= settings.most.min(65_535) && length <= self.frame.capacity()
    }

    /// The frame as it goes out: one segment as it came, several with headers of their own.
    pub fn finish(mut self) -> Frame {
        if self.count == 1 {
            return self.frame;
        }
        let (tcp, v4) = (self.first.tcp_offset, self.first.flow.is_v4());
        set_lengths(self.frame.bytes_mut(), tcp);
        // Every checksum that went into this was checked: a kernel need not sum the bytes again.
        self.frame.checksum = Checksum::Partial { start: tcp as u16, offset: 16 };
        let headers = self.first.payload_offset as u16;
        self.frame.segmentation = Some(Segmentation { size: self.size as u16, headers, ipv6: !v4, ecn: false });
        self.frame
    }
}
