//! Large receive of frames of several connections and of none, while its settings change: every byte comes out as often
//! as it went in, and what is not plain data comes out unchanged. With GRO's rules cutting the aggregates gives the
//! very frames in their order.
//!
//! A step is a frame, a change of settings, or a time that passes with all that becomes due in it.

use baton_device::{Checksum, Frame, MAX_FRAME};
use baton_fuzz::{Choice, World, note};
use baton_lro::{Lro, LroSettings, Mode, Push};
use baton_sim::frames::of_every_kind;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, FlowKey, TcpFrame, TcpOptions};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

const CONNECTIONS: usize = 5;
/// How often each frame is inside.
type Frames = HashMap<u64, i32, BuildHasherDefault<DefaultHasher>>;

struct Connection {
    flow: Flow,
    start: u32,
    /// Where the next segment begins, and its number.
    next: u32,
    ident: u16,
    /// The sum of what [`mark`] says of the ends of all ranges that are inside, less that of their beginnings: 0 if
    /// each byte has come out as often as it went in.
    inside: u64,
    /// Frames of data that are inside, in order.
    in_order: VecDeque<u64>,
    /// The newest acknowledgement, and the newest that went in and that came out.
    ack: u32,
    acks: [u32; 2],
}

struct Queue {
    lro: Lro,
    now: u64,
    frame: Frame,
    kinds: Vec<Vec<u8>>,
    model: Model,
}

struct Model {
    connections: Vec<Connection>,
    /// Frames that are not plain data, and how many of them are inside.
    others: Frames,
    others_inside: u64,
    /// Whether the data frames of a connection come out as they went in: without reordering and where every PSH ends an
    /// aggregate.
    keeps_order: bool,
    cut: Frame,
}

fn flow(number: usize) -> Flow {
    let port = 1000 + number as u16;
    if number.is_multiple_of(2) {
        Flow { local: Endpoint::v4([10, 0, 0, 2], port), remote: Endpoint::v4([10, 0, 0, 1], 80), device: 0 }
    } else {
        Flow { local: Endpoint::v6([0xfe; 16], port), remote: Endpoint::v6([0xfd; 16], 443), device: 0 }
    }
}

fn byte(number: usize, offset: u32) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 24) as u8 ^ number as u8
}

/// A number for a place of a stream.
fn mark(offset: u32) -> u64 {
    Choice::new(offset.into()).word()
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::default();
    bytes.hash(&mut hasher);
    hasher.finish()
}

fn settings(choice: &mut Choice) -> LroSettings {
    let mode = choice.of(&[Mode::Reorder, Mode::Reorder, Mode::InOrder, Mode::InOrder, Mode::Off]);
    LroSettings {
        mode,
        push: choice.of(&[Push::Flush, Push::Bulk, Push::Ignore]),
        connections: choice.of(&[1, 2, 8]),
        aggregates: choice.of(&[0, 1, 8]),
        most: choice.of(&[576, 3000, 20_000, 65_535]),
        quiet: choice.of(&[(30, 200), (1, 1), (0, 1000)]),
        age: choice.of(&[1, 500, 5000]),
        gap: choice.of(&[1, 1000, 20_000]),
        held_segments: choice.of(&[1, 3, 1024]),
        held_bytes: choice.of(&[2000, 9000, 1 << 20]),
        ..LroSettings::default()
    }
}

fn keeps_order(settings: &LroSettings) -> bool {
    settings.mode == Mode::Off || settings.mode == Mode::InOrder && settings.push == Push::Flush
}

impl Model {
    fn goes_in(&mut self, frame: &Frame, data: Option<(usize, u32, u32)>) {
        let Some((number, offset, length)) = data else {
            *self.others.entry(hash(frame.bytes())).or_default() += 1;
            self.others_inside += 1;
            return;
        };
        let connection = &mut self.connections[number];
        connection.acks[0] = connection.ack;
        connection.inside = connection.inside.wrapping_add(mark(offset + length)).wrapping_sub(mark(offset));
        if self.keeps_order {
            connection.in_order.push_back(hash(frame.bytes()));
        }
    }

    fn comes_out(&mut self, frame: &mut Frame) {
        if frame.segmentation.is_none() {
            if let Checksum::Partial { start, offset } = frame.checksum {
                assert!(finish_checksum(frame.bytes_mut(), start.into(), offset.into()));
            }
            return self.one(frame.bytes());
        }
        let mut out = std::mem::replace(&mut self.cut, Frame::with_capacity(0));
        let mut cut = baton_tso::cut(frame, false).expect("an aggregate can be cut");
        while cut.next(&mut out) {
            self.one(out.bytes());
        }
        self.cut = out;
    }

    fn one(&mut self, bytes: &[u8]) {
        let whole = hash(bytes);
        if let Some(inside) = self.others.get_mut(&whole)
            && *inside > 0
        {
            *inside -= 1;
            self.others_inside -= 1;
            return;
        }
        let parsed = TcpFrame::parse(bytes, 0).expect("a segment, since no other frame was like it");
        assert!(parsed.checksum_holds(bytes), "a wrong checksum");
        let number = self.connections.iter().position(|connection| connection.flow == parsed.flow).expect("a connection");
        let connection = &mut self.connections[number];
        let (offset, payload) = (parsed.seq.wrapping_sub(connection.start), parsed.payload(bytes));
        let right = payload.iter().enumerate().all(|(at, found)| *found == byte(number, offset + at as u32));
        assert!(right, "other bytes of connection {number} at {offset}");
        assert!(!payload.is_empty(), "a frame that did not go in");
        connection.inside = connection.inside.wrapping_sub(mark(offset + payload.len() as u32)).wrapping_add(mark(offset));
        connection.acks[1] = connection.acks[1].max(parsed.ack);
        if self.keeps_order {
            assert_eq!(connection.in_order.pop_front(), Some(whole), "connection {number}: another frame at {offset}");
        }
    }

    /// Where nothing is inside, the newest acknowledgement has come out, too.
    fn check_acknowledgements(&self) {
        for (number, Connection { inside, acks: [went_in, came_out], .. }) in self.connections.iter().enumerate() {
            assert!(
                *inside != 0 || went_in == came_out,
                "connection {number}: {went_in} went in, and at most {came_out} came out"
            );
        }
    }

    fn is_empty(&self) -> bool {
        self.others_inside == 0 && self.connections.iter().all(|connection| connection.inside == 0)
    }

    /// Nothing is inside.
    fn expect_empty(&mut self) {
        for (number, connection) in self.connections.iter().enumerate() {
            assert!(connection.inside == 0, "bytes of connection {number} are missing, or came twice");
            assert!(connection.in_order.is_empty());
            assert_eq!(
                connection.acks[1], connection.acks[0],
                "connection {number}: the newest acknowledgement did not come out"
            );
        }
        assert_eq!(self.others_inside, 0, "a frame is missing");
        self.others.clear();
    }
}

impl Queue {
    /// Writes a segment into the frame.
    fn emit(&mut self, number: usize, offset: u32, length: u32, choice: &mut Choice) {
        let acknowledges = self.lro.settings().mode == Mode::Reorder && number % 2 == 1;
        let connection = &mut self.model.connections[number];
        let template = Template::new(&connection.flow.reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let stamp = (offset / 20_000, 9);
        let mut options = TcpOptions { timestamps: Some(stamp), ..TcpOptions::default() };
        let (mut flags, mut window, mut ecn) = (Flags::ACK, 500, 2);
        match choice.below(40) {
            0..4 => flags = flags | Flags::PSH,
            4 => flags = flags | choice.of(&[Flags::FIN, Flags::RST, Flags::SYN, Flags::URG, Flags::ECE, Flags::CWR]),
            5 => ecn = 3,
            6 | 11 => connection.ack += choice.below(3) as u32,
            7 => window = 501,
            8 => options.timestamps = choice.of(&[None, Some((0, 0)), Some((stamp.0 + 1, 10))]),
            9 => options.sack.push(5, 9),
            10 => flags = Flags(flags.0 & !Flags::ACK.0),
            _ => {}
        }
        connection.ident = connection.ident.wrapping_add(1);
        connection.ack += u32::from(acknowledges);
        let ack = connection.ack;
        let seq = connection.start.wrapping_add(offset);
        let header = Header { seq, ack, flags, window, options: &options, ecn, ident: connection.ident };
        self.frame.set_length(MAX_HEADER + length as usize);
        let headers = template.emit(&header, length as usize, self.frame.bytes_mut());
        self.frame.set_length(headers + length as usize);
        self.frame.bytes_mut()[headers..].iter_mut().zip(offset..).for_each(|(found, offset)| *found = byte(number, offset));
        assert!(finish_checksum(self.frame.bytes_mut(), template.tcp_offset(), 16));
        self.frame.checksum = choice.of(&[Checksum::Unknown, Checksum::Verified]);
        (self.frame.segmentation, self.frame.interface) = (None, 0);
    }

    fn segment(&mut self, choice: &mut Choice) {
        let number = choice.below(CONNECTIONS as u64) as usize;
        let next = self.model.connections[number].next;
        let length = if choice.one_in(6) { choice.below(1449) as u32 } else { 1448 };
        let offset = match choice.below(20) {
            // In order; after a gap, which whole segments fill or not; again; anywhere.
            0..12 => next,
            12..14 => next + 1448 * (1 + choice.below(6) as u32),
            14 => next + choice.magnitude(14),
            15..19 => next.saturating_sub(choice.magnitude(14)),
            _ => choice.magnitude(26),
        };
        if offset == next || offset < 1 << 25 && choice.one_in(8) {
            self.model.connections[number].next = offset + length;
        }
        self.emit(number, offset, length, choice);
        let damaged = choice.one_in(30);
        if damaged {
            let at = 14 + choice.below(self.frame.bytes().len() as u64 - 14) as usize;
            let bit = choice.below(8);
            self.frame.bytes_mut()[at] ^= 1 << bit;
            self.frame.checksum = Checksum::Unknown;
            note!("{} connection {number}, damaged in bit {bit} of byte {at}: {offset} + {length}", self.now);
        } else {
            note!("{} connection {number}: {offset} + {length}", self.now);
        }
        let is_data = length > 0 && (!damaged || self.is_whole(number));
        self.receive(is_data.then_some((number, offset, length)));
    }

    /// Whether the damaged frame is still a segment of its connection, like any other: IPv6 has no checksum, and TCP's
    /// does not cover traffic class, flow label and hop limit. IPv4's own covers all of its header.
    fn is_whole(&self, number: usize) -> bool {
        let bytes = self.frame.bytes();
        TcpFrame::parse(bytes, 0).is_ok_and(|parsed| {
            parsed.flow == self.model.connections[number].flow
                && parsed.payload_offset + parsed.payload_length == bytes.len()
                && parsed.checksum_holds(bytes)
        })
    }

    fn receive(&mut self, data: Option<(usize, u32, u32)>) {
        let (model, now) = (&mut self.model, self.now);
        model.goes_in(&self.frame, data);
        self.lro.receive(&mut self.frame, now, &mut |frame| model.comes_out(frame));
        model.check_acknowledgements();
        assert!(self.frame.capacity() >= MAX_FRAME, "the caller gets a whole buffer back");
        assert!(self.lro.held_bytes() <= self.lro.settings().held_bytes, "more is held than set");
    }

    fn wait(&mut self, micros: u64) {
        self.now += micros;
        let (model, now) = (&mut self.model, self.now);
        self.lro.expire(now, &mut |frame| model.comes_out(frame));
        model.check_acknowledgements();
    }

    /// Everything goes out in time, without another frame.
    fn drain(&mut self) {
        let (begun, settings) = (self.now, *self.lro.settings());
        while let Some(at) = self.lro.next_expiry()
            && !self.model.is_empty()
        {
            self.now = self.now.max(at) + 16;
            self.wait(0);
            // A gap in each of the connections, and what lies behind it.
            let longest = (settings.gap + settings.age + settings.quiet.1 + 100) * (2 + settings.held_segments as u64);
            assert!(self.now - begun <= longest, "frames wait for {} µs: {settings:?}", self.now - begun);
        }
        assert_eq!((self.lro.held_bytes(), self.lro.counters().held), (0, 0));
        self.model.expect_empty();
    }
}

impl World for Queue {
    const LONGEST: u64 = 4000;

    fn new(word: u64) -> Queue {
        let mut choice = Choice::new(word);
        let settings = settings(&mut choice);
        note!("{settings:?}");
        let connection = |number: usize| Connection {
            flow: flow(number),
            // The sequence numbers of some of them wrap early.
            start: u32::MAX - 5000 * number as u32,
            next: 0,
            ident: 0,
            inside: 0,
            in_order: VecDeque::new(),
            ack: 77,
            acks: [77; 2],
        };
        let model = Model {
            connections: (0..CONNECTIONS).map(connection).collect(),
            others: Frames::default(),
            others_inside: 0,
            keeps_order: keeps_order(&settings),
            cut: Frame::with_capacity(MAX_FRAME),
        };
        let now = 1_000_000 + choice.below(1 << 40);
        let lro = Lro::new(settings, now);
        let lro = if choice.one_in(4) { lro.missing_some_after(choice.of(&[0, 750])) } else { lro };
        Queue { lro, now, frame: Frame::with_capacity(MAX_FRAME), kinds: of_every_kind(), model }
    }

    fn step(&mut self, word: u64) -> bool {
        let mut choice = Choice::new(word);
        match choice.below(64) {
            0..52 => self.segment(&mut choice),
            52 | 53 => {
                let kind = choice.below(self.kinds.len() as u64) as usize;
                self.frame.fill(&self.kinds[kind]);
                self.receive(None);
            }
            54 if choice.one_in(8) => {
                let (model, now, settings) = (&mut self.model, self.now, settings(&mut choice));
                note!("{now} {settings:?}");
                self.lro.set(settings, now, &mut |frame| model.comes_out(frame));
                self.model.expect_empty();
                self.model.keeps_order = keeps_order(&settings);
            }
            55 if choice.one_in(4) => {
                let (model, now) = (&mut self.model, self.now);
                let key = FlowKey::from(&flow(choice.below(CONNECTIONS as u64) as usize));
                self.lro.flush(&key, now, &mut |frame| model.comes_out(frame));
            }
            56 if choice.one_in(8) => self.drain(),
            _ => self.wait(u64::from(choice.magnitude(12))),
        }
        true
    }

    fn end(mut self) {
        self.drain();
    }
}

#[test]
fn every_byte_comes_out_as_often_as_it_went_in() {
    crate::fuzzer!("lro").run::<Queue>();
}
