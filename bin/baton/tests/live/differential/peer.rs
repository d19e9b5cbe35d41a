//! One peer of one connection, as a script plays it, and what is seen of the connection's answers.

use super::script::{Offer, SEGMENT, Segment};
use super::stage::{CLOSED, FENCE, endpoint, peers};
use baton_bed::testbed::{MAC_A, MAC_B, address_a};
use baton_device::{Checksum, Frame, Segmentation};
use baton_sim::stream;
use baton_wire::frame::{ETHERNET, Header, IPV6, Link, MAX_HEADER, TCP_CHECKSUM, Template};
use baton_wire::{Flags, Flow, TcpFrame, TcpOptions};

/// Key of the peer's byte stream.
pub const KEY: u64 = 77;

/// What a connection has answered since the last step, and how far it has come. Numbers are relative to the first byte
/// of each side.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    /// What its SYN-ACK offers.
    pub offered: Offered,
    /// There was an answer: anything but data that was sent before, and probes.
    pub answered: bool,
    /// Sequence number and acknowledgement of a reset.
    pub reset: Option<(i32, Option<i32>)>,
    /// The end of what it has sent, its FIN included.
    pub sent: i32,
    pub fin: bool,
    /// What it acknowledges.
    pub acknowledged: i32,
    /// Its last acknowledgement's SACK blocks.
    pub sacked: Vec<(i32, i32)>,
    /// Its last window is open.
    pub open: bool,
    /// The right edge of its window has moved to the left.
    pub shrunk: bool,
}

/// Options of a SYN-ACK.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offered {
    mss: Option<u16>,
    /// There is a window scale; each side chooses its own.
    scales: bool,
    sack: bool,
    timestamps: bool,
}

pub struct Peer {
    template: Template,
    offer: Offer,
    first: u32,
    /// Sequence number of the connection's SYN; none before it has come.
    theirs: Option<u32>,
    /// The next byte to be sent, relative to `first` + 1.
    next: u32,
    clock: u32,
    /// The connection's last timestamp.
    echo: u32,
    scale: u8,
    right: Option<u32>,
    /// The connection has sent data again.
    pub resent: bool,
    /// It has done so since the last step.
    pub resent_now: bool,
    pub seen: Seen,
}

fn link() -> Link {
    Link { source: MAC_B, destination: MAC_A, ttl: 64, ..Link::default() }
}

/// Writes a segment to a closed port, which is answered with a reset of this sequence number.
pub fn fence(number: u32, frame: &mut Frame) {
    let flow = Flow { local: endpoint(peers(false), FENCE), remote: endpoint(address_a(false), CLOSED), device: 0 };
    let template = Template::new(&flow, &link(), false);
    let options = TcpOptions::default();
    write(
        &template,
        frame,
        &Header { seq: 0, ack: number, flags: Flags::ACK, window: 0, options: &options, ecn: 0, ident: 1 },
        0,
        0,
    );
}

/// Writes a segment with `length` bytes of the stream from `position` on. More than [`SEGMENT`] bytes are a large
/// frame, as a host hands it to a device that cuts it and completes its checksum.
fn write(template: &Template, frame: &mut Frame, header: &Header<'_>, position: u64, length: usize) {
    frame.set_length(MAX_HEADER + 40 + length);
    let headers = template.emit(header, length, frame.bytes_mut());
    frame.set_length(headers + length);
    // What lies before the stream's first byte has the positions before 2^32.
    let before = length.min((1u64 << 32).saturating_sub(position) as usize);
    stream::fill(KEY, position, &mut frame.bytes_mut()[headers..][..before]);
    stream::fill(KEY, 0, &mut frame.bytes_mut()[headers..][before..]);
    let at = template.tcp_offset();
    if length > usize::from(SEGMENT) {
        let ipv6 = at == ETHERNET + IPV6;
        frame.checksum = Checksum::Partial { start: at as u16, offset: TCP_CHECKSUM as u16 };
        frame.segmentation = Some(Segmentation { size: SEGMENT, headers: headers as u16, ipv6, ecn: false, udp: false });
    } else {
        baton_wire::frame::finish_checksum(frame.bytes_mut(), at, TCP_CHECKSUM);
        frame.checksum = Checksum::Unknown;
        frame.segmentation = None;
    }
}

fn signed(number: u32) -> i32 {
    number as i32
}

impl Peer {
    /// `flow` as the peer sees it.
    pub fn new(flow: &Flow, offer: Offer, first: u32) -> Peer {
        let template = Template::new(flow, &link(), false);
        Peer {
            template,
            offer,
            first,
            theirs: None,
            next: 0,
            clock: first ^ 0x5555,
            echo: 0,
            scale: 0,
            right: None,
            resent: false,
            resent_now: false,
            seen: Seen::default(),
        }
    }

    /// Whether the connection has answered the SYN.
    pub fn is_answered(&self) -> bool {
        self.theirs.is_some()
    }

    fn write(&self, frame: &mut Frame, header: &Header<'_>, position: u64, length: usize) {
        write(&self.template, frame, header, position, length);
    }

    /// Writes the SYN.
    pub fn syn(&self, frame: &mut Frame) {
        let Offer { mss, scale, sack, timestamps } = self.offer;
        let timestamps = timestamps.then_some((self.clock, 0));
        let options = TcpOptions { mss, window_scale: scale, sack_permitted: sack, timestamps, ..TcpOptions::default() };
        let header = Header { seq: self.first, ack: 0, flags: Flags::SYN, window: 65_535, options: &options, ecn: 0, ident: 1 };
        self.write(frame, &header, 0, 0);
    }

    /// Where the connection's RCV.NXT is, as far as it has acknowledged, relative to what the peer would send next.
    pub fn expected(&self) -> i32 {
        signed((self.seen.acknowledged as u32).wrapping_sub(self.next))
    }

    /// Writes a segment, and notes what the peer has sent with it.
    pub fn segment(&mut self, segment: &Segment, frame: &mut Frame) {
        self.instead(segment, Some(segment), frame);
    }

    /// The same, but what is written is another segment, with the data of this one. Returns whether there is one.
    pub fn instead(&mut self, segment: &Segment, other: Option<&Segment>, frame: &mut Frame) -> bool {
        self.clock = self.clock.wrapping_add(1);
        let at = self.next.wrapping_add(segment.at as u32);
        if let Some(other) = other {
            self.emit(other, u64::from(at), frame);
        }
        let end = at.wrapping_add(u32::from(segment.length) + u32::from(segment.flags.contains(Flags::FIN)));
        // A peer goes on behind what it has sent; what lies behind a gap it sends again later.
        if segment.at <= 0 && signed(end.wrapping_sub(self.next)) > 0 {
            self.next = end;
        }
        other.is_some()
    }

    /// Writes a segment whose data is the stream's from `position` on.
    fn emit(&self, segment: &Segment, position: u64, frame: &mut Frame) {
        let clock = self.clock.wrapping_add(segment.clock as u32);
        let timestamps = (self.offer.timestamps && !segment.bare).then_some((clock, self.echo));
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let at = self.next.wrapping_add(segment.at as u32);
        let has_ack = segment.flags.contains(Flags::ACK);
        let ack = self.theirs.unwrap_or(0).wrapping_add(1).wrapping_add(self.seen.sent as u32).wrapping_add(segment.ack as u32);
        let header = Header {
            seq: self.first.wrapping_add(1).wrapping_add(at),
            ack: if has_ack { ack } else { 0 },
            flags: segment.flags,
            window: segment.window,
            options: &options,
            ecn: 0,
            ident: 1,
        };
        self.write(frame, &header, position, usize::from(segment.length));
    }

    /// A reset that ends the connection whatever its state.
    pub fn reset(&self, frame: &mut Frame) {
        let options = TcpOptions::default();
        let seq = self.first.wrapping_add(1).wrapping_add(self.seen.acknowledged as u32);
        self.write(frame, &Header { seq, ack: 0, flags: Flags::RST, window: 0, options: &options, ecn: 0, ident: 1 }, 0, 0);
    }

    /// The right edge of the connection's window, relative to the first byte.
    pub fn edge(&self) -> i32 {
        self.right.map_or(i32::MAX, |edge| signed(edge.wrapping_sub(self.first.wrapping_add(1))))
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        self.seen.answered = false;
        self.seen.reset = None;
        self.seen.shrunk = false;
        self.resent_now = false;
    }

    /// Forgets what was answered, but for how far the connection has come.
    pub fn forget_answers(&mut self) {
        self.begin();
        self.seen.sacked.clear();
    }

    /// Takes a segment of the connection's.
    pub fn take(&mut self, parsed: &TcpFrame) {
        if parsed.flags.contains(Flags::SYN) {
            self.theirs.get_or_insert(parsed.seq);
            let TcpOptions { mss, window_scale, sack_permitted: sack, timestamps, .. } = parsed.options;
            self.seen.offered = Offered { mss, scales: window_scale.is_some(), sack, timestamps: timestamps.is_some() };
            self.scale = window_scale.filter(|_| self.offer.scale.is_some()).unwrap_or(0);
            self.echo = timestamps.map_or(0, |(value, _)| value);
            return;
        }
        let Some(theirs) = self.theirs else { return };
        let relative = |seq: u32| signed(seq.wrapping_sub(theirs.wrapping_add(1)));
        let mine = |ack: u32| signed(ack.wrapping_sub(self.first.wrapping_add(1)));
        let has_ack = parsed.flags.contains(Flags::ACK);
        if parsed.flags.contains(Flags::RST) {
            self.seen.reset = Some((relative(parsed.seq), has_ack.then(|| mine(parsed.ack))));
            self.seen.answered = true;
            return;
        }
        if let Some((value, _)) = parsed.options.timestamps {
            self.echo = value;
        }
        let fin = parsed.flags.contains(Flags::FIN);
        let end = relative(parsed.seq) + parsed.payload_length as i32 + i32::from(fin);
        let (is_new, is_old) = (end > self.seen.sent, relative(parsed.seq) < self.seen.sent);
        self.seen.answered |= is_new || !is_old;
        self.resent_now |= is_old && (parsed.payload_length > 0 || fin);
        self.resent |= self.resent_now;
        self.seen.sent = self.seen.sent.max(end);
        self.seen.fin |= fin;
        if has_ack {
            // Whoever restores a connection acknowledges once more what it had before the peer's FIN.
            self.seen.answered |= mine(parsed.ack) > self.seen.acknowledged;
            self.seen.acknowledged = self.seen.acknowledged.max(mine(parsed.ack));
            // The NIC's segments with data have no SACK blocks: an acknowledgement with them goes out as well. The
            // kernel's may have the same once more. Probes have none, nor has a FIN that goes out by itself.
            let sacked: Vec<_> = parsed.options.sack.as_slice().iter().map(|&(left, right)| (mine(left), mine(right))).collect();
            let more = sacked.len() > self.seen.sacked.len();
            let says_something = more || sacked.iter().any(|block| !self.seen.sacked.contains(block));
            if says_something || parsed.payload_length == 0 && !is_old && !fin {
                self.seen.sacked = sacked;
            }
            self.seen.open = parsed.window != 0;
            let edge = parsed.ack.wrapping_add(u32::from(parsed.window) << self.scale);
            let last = self.right.replace(edge).unwrap_or(edge);
            // An edge that a scaled window cannot express is rounded.
            self.seen.shrunk |= signed(last.wrapping_sub(edge)) >= 1 << self.scale;
        }
    }
}
