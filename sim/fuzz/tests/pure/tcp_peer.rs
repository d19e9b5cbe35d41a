//! A peer that does anything it can, in virtual time: segments that are valid, odd or forged, windows that open, shrink
//! and close, weeks of silence; while the connection moves, its path MTU changes and its program does what it wants.
//! Then either the peer answers as it should, and all that is queued gets through; or the program closes, and the
//! connection ends, whatever the peer does.
//! A step is a segment of the peer's, a call of the program's, a move, or a time that passes with all that becomes due
//! in it.

use baton_fuzz::{Choice, World, note};
use baton_image::Image;
use baton_tcp::{Config, Connection, Instant, Received, Secret, Segment, State, Transmit};
use baton_wire::{Endpoint, Flags, Flow, SackBlocks, TcpOptions};

const SECOND: u64 = 1_000_000;
const DAY: u64 = 86_400 * SECOND;
/// The largest retransmission time-out, and for how many of these nothing may move.
const LONGEST: u64 = 120 * SECOND;
const PATIENCE: u64 = 6 * LONGEST;
const SECRET: [u64; 2] = [3, 5];

struct Play {
    rng: Choice,
    /// Decides how it ends.
    last: Choice,
    tcp: Connection,
    now: Instant,
    /// Microseconds of a tick of the peer's timestamp clock, and its count at time 0.
    tick: u64,
    clock: u32,
    timestamps: bool,
    /// Shift of the peer's windows, and of ours.
    scales: [u8; 2],
    /// The peer's right edge as far as it was ever advertised.
    furthest: u32,
    /// Our right edge when it was last advertised.
    edge: Option<u32>,
    /// Behind the last byte that the peer has sent into our window.
    peers_end: u32,
    /// The program has closed, or time passed that may end the connection.
    may_end: bool,
}

fn flow() -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 }
}

fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

fn later(a: u32, b: u32) -> u32 {
    if before(a, b) { b } else { a }
}

impl Play {
    /// A connection whose handshake the peer could not disturb, and which, if its SYN-ACK was a cookie, was made from
    /// the last segment.
    fn open(word: u64) -> Play {
        let mut rng = Choice::new(word);
        let now = Instant([1, 4_294_967_000_000, 5 * DAY, 1 << 50, rng.below(1 << 45)][rng.below(5) as usize] + SECOND);
        let config = Config {
            receive_buffer: 1 << (12 + rng.below(7)),
            receive_limit: [0, 1 << 20, 1 << 30][rng.below(3) as usize],
            mtu: [576, 1280, 1500, 9000][rng.below(4) as usize],
            timestamps: rng.below(4) > 0,
            sack: rng.below(4) > 0,
            window_scaling: rng.below(4) > 0,
            ecn: rng.below(2) == 0,
            nodelay: rng.below(2) == 0,
            ..Config::default()
        };
        let (tick, clock) = ([1, 1000, 10_000][rng.below(3) as usize], rng.word() as u32);
        let value = |now: Instant| ((now.0 / tick) as u32).wrapping_add(clock);
        let options = TcpOptions {
            mss: [None, Some(200), Some(536), Some(1460), Some(8960)][rng.below(5) as usize],
            window_scale: [None, Some(0), Some(3), Some(14)][rng.below(4) as usize],
            sack_permitted: rng.below(2) == 0,
            timestamps: (rng.below(2) == 0).then(|| (value(now), 0)),
            ..TcpOptions::default()
        };
        let flags = if rng.below(2) == 0 { Flags::SYN } else { Flags::SYN | Flags::ECE | Flags::CWR };
        let syn = Segment { seq: rng.word() as u32, flags, window: rng.word() as u16, options, ..Segment::default() };
        let cookie = rng.below(2) == 0;
        let secret = Secret::new(SECRET);
        let with = if cookie { config.of_cookie(&syn) } else { config };
        let numbers = secret.answer(&flow(), &syn, &with, now);
        let mut tcp = Connection::accept(with, &syn, numbers.isn, numbers.ts_offset, now).expect("a SYN");
        let said = tcp.poll_transmit(now, 0).expect("an answer");
        let offers = said.options;
        assert!(offers.window_scale.is_none() || options.window_scale.is_some(), "a scale nobody asked for");
        assert!(offers.timestamps.is_none() || options.timestamps.is_some(), "timestamps nobody asked for");
        assert!(!offers.sack_permitted || options.sack_permitted, "SACK nobody asked for");
        let timestamps = offers.timestamps.is_some();
        for _ in 0..rng.below(6) {
            let blind = Segment {
                seq: syn.seq.wrapping_add(rng.word() as u32 >> rng.below(32)),
                ack: said.seq.wrapping_add(2 + (rng.word() as u32 >> rng.below(31))),
                flags: [Flags::ACK, Flags::ACK | Flags::FIN, Flags::ACK | Flags::PSH][rng.below(3) as usize],
                length: rng.below(3) as u32,
                ..Segment::default()
            };
            tcp.input(&blind, now);
            let answers = std::iter::from_fn(|| tcp.poll_transmit(now, 0)).count();
            assert!(answers <= 2 && tcp.state() == State::SynReceived, "{blind:?} ends the handshake");
        }
        let echo = timestamps.then(|| (value(now), offers.timestamps.map_or(0, |(clock, _)| clock)));
        let (seq, ack) = (syn.seq.wrapping_add(1), said.seq.wrapping_add(1));
        let last = TcpOptions { timestamps: echo, ..TcpOptions::default() };
        let last = Segment { seq, ack, flags: Flags::ACK, window: rng.word() as u16, options: last, ..Segment::default() };
        if cookie {
            let (again, numbers) = secret.syn_of(&flow(), &last, now).expect("a cookie");
            let with = config.of_cookie(&again);
            tcp = Connection::accept(with, &again, numbers.isn, numbers.ts_offset, now).expect("a SYN");
            let repeated = tcp.poll_transmit(now, 0).expect("an answer").options;
            let says = |options: &TcpOptions| (options.window_scale, options.sack_permitted, options.timestamps.is_some());
            assert_eq!(says(&repeated), says(&offers), "the cookie holds what the SYN-ACK says");
        }
        tcp.input(&last, now);
        assert_eq!(tcp.state(), State::Established);
        let scales = offers.window_scale.map_or([0, 0], |ours| [options.window_scale.unwrap_or(0), ours]);
        let furthest = ack.wrapping_add(u32::from(last.window) << scales[0]);
        note!("{config:?}");
        let last = rng.clone();
        let peers_end = tcp.rcv_nxt();
        Play { rng, last, tcp, now, tick, clock, timestamps, scales, furthest, edge: None, peers_end, may_end: false }
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.rng.one_in(one_in)
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        self.rng.of(values)
    }

    /// The peer's next segment as it should be, with nothing in it.
    fn segment(&self) -> Segment {
        let value = ((self.now.0 / self.tick) as u32).wrapping_add(self.clock);
        let options = TcpOptions { timestamps: self.timestamps.then_some((value, 0)), ..TcpOptions::default() };
        let (seq, ack) = (self.tcp.rcv_nxt(), self.tcp.snd_una());
        Segment { seq, ack, flags: Flags::ACK, options, ..Segment::default() }
    }

    /// Feeds a segment and checks what comes of it.
    fn input(&mut self, segment: &Segment) -> Received {
        let una = self.tcp.snd_una();
        let valid = !before(segment.ack, una) && !before(self.tcp.snd_nxt(), segment.ack);
        if !before(segment.seq, self.tcp.rcv_nxt()) && !before(self.tcp.rcv_adv(), segment.seq) {
            self.peers_end = later(self.peers_end, segment.end());
        }
        let received = self.tcp.input(segment, self.now);
        if valid {
            self.furthest = later(self.furthest, segment.ack.wrapping_add(u32::from(segment.window) << self.scales[0]));
        }
        let end = received.place_seq.wrapping_add(received.place).wrapping_sub(self.tcp.rcv_read());
        assert!(received.place == 0 || end <= self.tcp.receive_memory(), "beyond receive memory");
        assert!(received.skip + received.place <= segment.length);
        self.check();
        received
    }

    /// What must hold at any time.
    fn check(&self) {
        let tcp = &self.tcp;
        assert!(!before(tcp.snd_nxt(), tcp.snd_una()), "{tcp:?}");
        assert!(tcp.readable() <= tcp.receive_memory(), "{tcp:?}");
        if tcp.state() == State::Closed {
            assert!(self.may_end, "it has ended: {:?}", tcp.end_reason());
            assert_eq!(tcp.next_timeout(), Instant::NEVER);
        }
        let info = tcp.info();
        assert!(info.rto <= LONGEST && info.sacked + info.lost <= info.unacked, "{info:?}");
    }

    /// What the connection sends now.
    fn sent(&mut self) -> Vec<Transmit> {
        let mut sent = Vec::new();
        while let Some(transmit) = self.tcp.poll_transmit(self.now, self.rng.below(3) as u32 * 20_000) {
            let end = transmit.seq.wrapping_add(transmit.length);
            assert!(transmit.length == 0 || !before(self.furthest, end), "{transmit:?} is beyond the window");
            if transmit.flags.contains(Flags::ACK) && !transmit.flags.intersects(Flags::RST | Flags::SYN) {
                let edge = transmit.ack.wrapping_add(u32::from(transmit.window) << self.scales[1]);
                // RFC 7323 section 2.4: less than a unit may be lost by rounding.
                let kept = self.edge.is_none_or(|before| (edge.wrapping_sub(before) as i32) > -(1 << self.scales[1]));
                assert!(kept, "the window shrinks from {:?} to {edge}: {:?}", self.edge, self.tcp);
                self.edge = Some(self.edge.map_or(edge, |before| later(before, edge)));
            }
            sent.push(transmit);
            assert!(sent.len() < 50_000, "it never stops sending: {:?}", self.tcp);
        }
        sent
    }

    /// Lets time pass to `end`, and time-outs expire, while the peer is silent.
    fn wait(&mut self, micros: u64) {
        let end = self.now.after(micros);
        for expiries in 0.. {
            self.sent();
            let next = self.tcp.next_timeout();
            if next > end {
                break;
            }
            assert!(expiries < 20_000, "time-outs without an end: {:?}", self.tcp);
            self.now = Instant(self.now.0.max(next.0));
            self.tcp.on_timeout(self.now);
            assert!(self.tcp.next_timeout() > self.now || self.tcp.state() == State::Closed, "{:?}", self.tcp);
            self.check();
        }
        self.now = end;
    }

    fn peer_acts(&mut self) {
        let mut segment = self.segment();
        let (una, nxt) = (self.tcp.snd_una(), self.tcp.snd_nxt());
        let out = u64::from(nxt.wrapping_sub(una)) + 1;
        segment.ack = match self.rng.below(12) {
            0 => una.wrapping_sub(self.rng.below(70_000) as u32),
            1 => nxt.wrapping_add(self.rng.below(70_000) as u32),
            2 => self.rng.word() as u32,
            3..6 => una,
            6 => nxt,
            _ => una.wrapping_add(self.rng.below(out) as u32),
        };
        segment.seq = match self.rng.below(8) {
            0 => segment.seq.wrapping_sub(self.rng.below(5000) as u32),
            1 => segment.seq.wrapping_add(self.rng.below(5000) as u32),
            2 => self.tcp.rcv_adv().wrapping_add(self.rng.below(4) as u32).wrapping_sub(2),
            _ => segment.seq,
        };
        segment.window = self.one_of(&[0, 0, 1, 2, 10, 100, 535, 1000, 5000, 65_535]);
        segment.length = self.one_of(&[0, 0, 0, 1, 10, 500, 536, 1448, 8000, 60_000]);
        let flags = [Flags::PSH, Flags::ECE, Flags::CWR, Flags::URG, Flags::SYN, Flags::ACK, Flags::ACK, Flags::ACK];
        segment.flags = segment.flags | self.one_of(&flags);
        segment.congestion_experienced = self.chance(10);
        if self.chance(20) && segment.seq != self.tcp.rcv_nxt() {
            segment.flags = Flags::RST;
        }
        if self.chance(4) {
            let mut sack = SackBlocks::default();
            for _ in 0..=self.rng.below(4) {
                let left = una.wrapping_add(self.rng.below(out) as u32).wrapping_sub(self.rng.below(2) as u32 * 100);
                sack.push(left, left.wrapping_add(self.rng.below(5000) as u32));
            }
            segment.options.sack = sack;
        }
        // A timestamp that is too new would keep out what follows, and the peer has itself to blame.
        segment.options.timestamps = segment.options.timestamps.and_then(|(value, _)| match self.rng.below(10) {
            0 => None,
            1 => Some((0, 0)),
            2 => Some((value.wrapping_sub(self.rng.below(1 << 30) as u32), self.rng.word() as u32)),
            _ => Some((value, self.now.millis().wrapping_sub(self.rng.below(1000) as u32))),
        });
        note!("{:?} {segment:?}", self.now);
        self.input(&segment);
    }

    fn moves(&mut self) {
        let Some(image) = self.tcp.to_image(&Image::open(flow()), self.now) else { return };
        let nic = (self.rng.below(2) == 0).then(|| self.tcp.nic_state(self.now));
        let (ranges, fin): (Vec<_>, _) = (self.tcp.out_of_order().collect(), self.tcp.fin_behind_hole());
        let memory = self.tcp.receive_memory();
        self.tcp = Connection::from_image(&image, nic.as_ref(), memory, self.now);
        self.tcp.hold(ranges.into_iter(), fin);
    }

    fn program_acts(&mut self) {
        match self.rng.below(8) {
            0..3 => {
                let bytes = self.one_of(&[1, 100, 1448, 10_000, 60_000]);
                let queued = self.tcp.snd_end().wrapping_sub(self.tcp.snd_una());
                let _ = queued + bytes < 1 << 20 && self.tcp.queue(bytes);
            }
            3..5 => {
                let bytes = self.rng.below(u64::from(self.tcp.readable()) + 1) as u32;
                assert!(self.tcp.consumed(bytes));
            }
            5 => {
                let nodelay = self.chance(2);
                self.tcp.set_nodelay(nodelay);
            }
            6 => {
                let cork = self.chance(2);
                self.tcp.set_cork(cork);
            }
            _ => {
                let mtu = self.one_of(&[552, 576, 1400, 1500, 9000]);
                self.tcp.on_mtu_change(mtu, self.now);
            }
        }
        self.check();
    }

    /// From now on the peer acknowledges what it gets after a round trip, has `window` bytes of room, and sends what it
    /// should.
    fn get_through(&mut self, window: u32) {
        let unit = 1 << self.scales[0];
        let field = (window / unit).clamp(1, 65_535) as u16;
        let (mut expected, rtt) = (self.tcp.snd_una(), 1 + self.rng.below(SECOND));
        let mut answers: Vec<(Instant, u32)> = vec![(self.now, expected)];
        let (mut una, mut moved_at) = (expected, self.now);
        self.tcp.set_cork(false);
        for _ in 0..2000 {
            let readable = self.tcp.readable();
            assert!(self.tcp.consumed(readable));
            for transmit in self.sent() {
                let room = expected.wrapping_add(u32::from(field) * unit);
                let end = transmit.seq.wrapping_add(transmit.length);
                let end = if before(room, end) { room } else { end };
                if !before(expected, transmit.seq) && before(expected, end) {
                    expected = end;
                }
                answers.push((self.now.after(rtt), expected));
            }
            let arrival = answers.iter().map(|(at, _)| *at).min().unwrap_or(Instant::NEVER);
            let next = arrival.min(self.tcp.next_timeout());
            if next == Instant::NEVER {
                break;
            }
            self.now = Instant(self.now.0.max(next.0));
            let due: Vec<_> = answers.extract_if(.., |(at, _)| *at <= self.now).collect();
            for (_, ack) in due {
                // The peer's own data comes along, first what it has sent before: only a newer segment says how large
                // its window is now.
                let room = self.tcp.rcv_adv().wrapping_sub(self.tcp.rcv_nxt());
                let again =
                    if before(self.tcp.rcv_nxt(), self.peers_end) { self.peers_end.wrapping_sub(self.tcp.rcv_nxt()) } else { 0 };
                let segment = Segment { ack, window: field, length: room.min(again.max(10)), ..self.segment() };
                let received = self.input(&segment);
                assert!(received.delivered >= segment.length, "{segment:?} is not taken: {:?}", self.tcp);
            }
            if self.tcp.next_timeout() <= self.now {
                self.tcp.on_timeout(self.now);
            }
            self.check();
            let (is, end) = (self.tcp.snd_una(), self.tcp.snd_end());
            if is != una || is == end {
                (una, moved_at) = (is, self.now);
            }
            assert!(self.now.since(moved_at) <= PATIENCE, "stuck with a window of {window} for {PATIENCE} µs: {:?}", self.tcp);
            if is == end {
                return;
            }
        }
    }

    /// The program closes. The peer answers with a closed window, or not at all.
    fn closes(&mut self, answers: bool) {
        self.may_end = true;
        let readable = self.tcp.readable();
        assert!(self.tcp.consumed(readable));
        self.tcp.close();
        let closed_at = self.now;
        while !matches!(self.tcp.state(), State::Closed | State::TimeWait | State::FinWait2) {
            if !self.sent().is_empty() && answers {
                let segment = Segment { window: 0, ..self.segment() };
                self.now = self.now.after(100);
                self.input(&segment);
                continue;
            }
            let next = self.tcp.next_timeout();
            assert!(next < Instant::NEVER, "it waits for nothing: {:?}", self.tcp);
            self.now = Instant(self.now.0.max(next.0));
            assert!(self.now.since(closed_at) < 1800 * SECOND, "it does not end: {:?}", self.tcp);
            self.tcp.on_timeout(self.now);
            self.check();
        }
    }
}

impl World for Play {
    const LONGEST: u64 = 600;

    fn new(word: u64) -> Play {
        Play::open(word)
    }

    fn step(&mut self, word: u64) -> bool {
        self.rng = Choice::new(word);
        match self.rng.below(20) {
            0..9 => self.peer_acts(),
            9..14 => self.program_acts(),
            14 => self.moves(),
            15 => {
                if self.tcp.snd_una() != self.tcp.snd_end() && !self.chance(20) {
                    self.get_through(60_000);
                }
                // Silence of minutes may end what has something to send.
                let micros = self.one_of(&[SECOND, 40 * SECOND, 3000 * SECOND, DAY, 26 * DAY, 45 * DAY]);
                note!("{:?} silence of {micros}", self.now);
                self.may_end |= self.tcp.snd_una() != self.tcp.snd_end();
                self.wait(micros);
                self.may_end &= self.tcp.state() == State::Closed;
            }
            _ => {
                let micros = 1 << self.rng.below(20);
                self.wait(micros);
            }
        }
        self.sent();
        self.tcp.state() != State::Closed
    }

    fn end(mut self) {
        self.rng = self.last.clone();
        self.may_end = false;
        if self.chance(2) {
            let window = self.one_of(&[1, 7, 100, 700, 1447, 1448, 5000, 60_000, 1 << 20]);
            self.get_through(window);
        }
        if self.tcp.state() != State::Closed {
            let answers = self.chance(2);
            self.closes(answers);
        }
    }
}

#[test]
fn whatever_a_peer_does_a_connection_goes_on_or_ends() {
    crate::fuzzer!("tcp_peer").run::<Play>();
}
