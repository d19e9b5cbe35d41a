//! Two connections and a network that loses, reorders, repeats and forges segments, or holds them for weeks; both move
//! through their images, and their programs write, read and close when they like. Then the network is good again, and
//! everything arrives.
//!
//! A step is a segment that arrives, is lost, repeated or forged; a call of a program's; a move; or a time that passes
//! with all that becomes due in it.

use crate::end::{End, segment_of};
use baton_fuzz::{Choice, World, note};
use baton_tcp::{Config, Connection, EndReason, Instant, Segment, State, Transmit};
use baton_wire::{Flags, TcpOptions};
use std::collections::VecDeque;

const SECOND: u64 = 1_000_000;
const DAY: u64 = 86_400 * SECOND;
/// Segments under way in each direction; more push out the first.
const MOST_UNDER_WAY: usize = 200;
/// How long all may take with a good network, in microseconds and in events.
const PATIENCE: u64 = 4 * 3600 * SECOND;
const MOST_EVENTS: u32 = 100_000;
/// Bytes that a program lets wait in its send memory.
const SEND_MEMORY: u32 = 40_000;

struct Pair {
    ends: [End; 2],
    /// Segments from each end to the other, and some that were under way before.
    ways: [VecDeque<Segment>; 2],
    old: [Vec<Segment>; 2],
    now: Instant,
    /// Bytes that are given to the device at once.
    most: u32,
    /// A program, or an end without an answer, has given up: not all has to arrive.
    broken: bool,
    last: Choice,
}

fn config(choice: &mut Choice) -> Config {
    let receive_limit = choice.of(&[0, 0, 1 << 20, 1 << 30]);
    // A unit of the largest scale are 16 KB, and receive memory is more than a unit.
    let least = if receive_limit > 1 << 20 { 15 } else { 11 };
    Config {
        receive_buffer: 1 << (least + choice.below(3)),
        receive_limit,
        mtu: choice.of(&[296, 576, 1500, 1500, 9000]),
        max_segment: choice.of(&[0, 0, 0, 88, 536]),
        timestamps: !choice.one_in(4),
        sack: !choice.one_in(4),
        window_scaling: !choice.one_in(4),
        ecn: choice.one_in(2),
        nodelay: choice.one_in(2),
        slow_start_after_idle: choice.one_in(2),
        ..Config::default()
    }
}

impl Pair {
    /// Sends what an end has to send, and cuts what is larger than a segment.
    fn transmit(&mut self, at: usize) {
        let (now, most, way) = (self.now, self.most, &mut self.ways[at]);
        self.ends[at].send(most, now, |transmit| put(way, transmit));
        self.note_scales();
    }

    fn note_scales(&mut self) {
        let [first, second] = &mut self.ends;
        End::note_scales(first, second);
    }

    /// Lets the `nth` segment on the way from an end arrive at the other.
    fn arrive(&mut self, from: usize, nth: usize, choice: &mut Choice) {
        let Some(mut segment) = self.ways[from].remove(nth) else { return };
        if segment.length > 0 && choice.one_in(40) {
            segment.congestion_experienced = true;
        }
        if self.old[from].len() < 40 {
            self.old[from].push(segment);
        } else if choice.one_in(10) {
            let at = choice.below(40) as usize;
            self.old[from][at] = segment;
        }
        self.deliver(1 - from, &segment, choice.one_in(3));
    }

    fn deliver(&mut self, at: usize, segment: &Segment, fast: bool) {
        note!("{:?} at {at}: {segment:?}", self.now);
        if self.ends[at].is_closed() {
            return self.reset(at, segment);
        }
        if let Some(acknowledgement) = self.ends[at].receive(segment, None, fast, self.now) {
            self.ends[at].check_sent(&acknowledgement, self.now);
            put(&mut self.ways[at], &acknowledgement);
        }
        self.settle(at);
    }

    /// What a host without the connection answers.
    fn reset(&mut self, at: usize, segment: &Segment) {
        if segment.flags.contains(Flags::RST) {
            return;
        }
        let (seq, ack, flags) = match segment.flags.contains(Flags::ACK) {
            true => (segment.ack, 0, Flags::RST),
            false => (0, segment.end(), Flags::RST | Flags::ACK),
        };
        self.ways[at].push_back(Segment { seq, ack, flags, ..Segment::default() });
    }

    /// After anything that has happened to an end.
    fn settle(&mut self, at: usize) {
        self.transmit(at);
        let end = &self.ends[at];
        if end.is_closed() {
            end.may_have_ended(self.now);
            match end.tcp.end_reason() {
                None => {}
                Some(EndReason::TimedOut | EndReason::Aborted) => self.broken = true,
                Some(EndReason::Refused | EndReason::Reset) => assert!(self.ends[1 - at].is_closed(), "nobody has reset it"),
            }
        }
    }

    /// Lets time pass, and time-outs expire.
    fn wait(&mut self, micros: u64) {
        let until = self.now.after(micros);
        for expiries in 0.. {
            let next = [0, 1].map(|at| self.ends[at].tcp.next_timeout());
            let at = usize::from(next[1] < next[0]);
            if next[at] > until {
                break;
            }
            assert!(expiries < 20_000, "time-outs without an end: {:?}", self.ends[at].tcp);
            self.now = self.now.max(next[at]);
            self.expire(at);
        }
        self.now = until;
    }

    fn expire(&mut self, at: usize) {
        self.ends[at].tcp.on_timeout(self.now);
        let next = self.ends[at].tcp.next_timeout();
        assert!(next > self.now, "a time-out expires at once: {:?}", self.ends[at].tcp);
        self.ends[at].check(self.now);
        self.settle(at);
    }

    /// A segment of somebody who does not know the numbers: it changes nothing but what is answered.
    fn forge(&mut self, at: usize, choice: &mut Choice) {
        let tcp = &self.ends[at].tcp;
        let far =
            |from: u32, choice: &mut Choice| from.wrapping_add(1 << 21).wrapping_add(choice.below((1 << 32) - (1 << 22)) as u32);
        let opening = matches!(tcp.state(), State::SynSent | State::SynReceived);
        let flags =
            [Flags::ACK, Flags::ACK | Flags::PSH, Flags::ACK | Flags::FIN, Flags::RST, Flags::SYN, Flags::SYN | Flags::ACK];
        let flags = choice.of(&flags) | choice.of(&[Flags::default(), Flags::default(), Flags::ECE, Flags::CWR, Flags::URG]);
        let room = tcp.rcv_adv().wrapping_sub(tcp.rcv_nxt());
        let mut segment = Segment {
            seq: far(tcp.rcv_nxt(), choice),
            ack: choice.number(),
            flags,
            window: choice.number() as u16,
            options: options(choice),
            length: choice.magnitude(16),
            congestion_experienced: choice.one_in(2),
        };
        match choice.below(6) {
            0 if !opening => {
                // Nearly right: what is acknowledged was never sent, or is ancient.
                segment.seq = tcp.rcv_nxt().wrapping_add(choice.below(u64::from(room) + 1) as u32);
                segment.ack = far(tcp.snd_una(), choice);
                segment.flags = Flags::ACK | choice.of(&[Flags::default(), Flags::FIN, Flags::PSH]);
                // Within what was ever sent it would be an old one, which is taken.
                if tcp.snd_una().wrapping_sub(segment.ack) <= tcp.largest_window() {
                    return;
                }
            }
            1 if !opening && room > 0 => {
                // RFC 5961 section 3.2: a reset that is in the window, and not the next byte.
                segment.seq = tcp.rcv_nxt().wrapping_add(1 + choice.below(u64::from(room)) as u32);
                segment.flags = Flags::RST | choice.of(&[Flags::default(), Flags::ACK]);
            }
            2 if !opening => {
                segment.seq = choice.number();
                segment.flags = Flags::SYN | choice.of(&[Flags::default(), Flags::ACK, Flags::FIN]);
            }
            _ if opening => {
                segment.ack = far(tcp.snd_una(), choice);
                segment.flags = Flags::ACK | choice.of(&[Flags::default(), Flags::FIN, Flags::RST, Flags::SYN]);
            }
            _ => {}
        }
        note!("{:?} forged, at {at}: {segment:?}", self.now);
        if self.ends[at].is_closed() {
            return;
        }
        let before = (self.ends[at].tcp.state(), self.ends[at].tcp.snd_una(), self.ends[at].tcp.rcv_nxt());
        let window = self.ends[at].tcp.info().snd_wnd;
        self.ends[at].input(&segment, None, choice.one_in(2), self.now);
        let tcp = &self.ends[at].tcp;
        assert_eq!((tcp.state(), tcp.snd_una(), tcp.rcv_nxt()), before, "a blind segment counts: {segment:?}");
        assert_eq!(tcp.info().snd_wnd, window, "the window of a blind segment counts: {segment:?}");
        self.settle(at);
    }

    fn program(&mut self, at: usize, choice: &mut Choice) {
        let end = &mut self.ends[at];
        match choice.below(40) {
            0..16 => {
                let bytes = choice.magnitude(14);
                if end.waiting() + bytes <= SEND_MEMORY {
                    end.program_writes(bytes);
                }
            }
            16..34 => {
                let most = choice.of(&[1, 100, 1000, u32::MAX >> 1]);
                end.program_reads(most, !choice.one_in(4));
            }
            34..38 => end.changes(choice, self.now),
            38 => {
                if choice.one_in(4) && end.tcp.state() != State::SynSent {
                    end.tcp.shutdown();
                }
            }
            _ => match choice.below(16) {
                0 if end.tcp.state() != State::SynSent => {
                    end.orphan = true;
                    end.tcp.close();
                }
                1 if !end.is_closed() => {
                    self.broken = true;
                    end.tcp.abort();
                }
                _ => {}
            },
        }
        self.settle(at);
    }

    /// Weeks pass, in which nothing is under way, or a shorter time.
    fn pause(&mut self, choice: &mut Choice) {
        let quiet = self.ways.iter().all(VecDeque::is_empty) && self.ends.iter().all(|end| end.tcp.is_idle());
        let micros = match quiet {
            true => choice.of(&[40 * SECOND, 3000 * SECOND, 2 * DAY, 26 * DAY, 45 * DAY]),
            false => choice.of(&[SECOND, 10 * SECOND, 100 * SECOND, 2000 * SECOND]) / 4,
        };
        note!("{:?} {micros} µs pass", self.now);
        self.wait(micros);
        if micros >= DAY {
            // No segment is under way for so long (RFC 9293 section 3.4.2): its timestamp could seem to be newer than
            // today's.
            self.old.iter_mut().for_each(Vec::clear);
        }
    }

    /// Everything that is under way arrives in order, after a round trip.
    fn good_moment(&mut self, rounds: u64, choice: &mut Choice) {
        for _ in 0..rounds {
            for at in 0..2 {
                for _ in 0..self.ways[at].len() {
                    self.arrive(at, 0, choice);
                }
            }
            self.wait(choice.clone().below(3000));
        }
    }
}

fn put(way: &mut VecDeque<Segment>, transmit: &Transmit) {
    let whole = segment_of(transmit);
    let size = if transmit.segment_size > 0 { u32::from(transmit.segment_size) } else { transmit.length.max(1) };
    let mut at = 0;
    loop {
        let length = size.min(whole.length - at);
        let last = at + length == whole.length;
        let flags = if last { whole.flags } else { Flags(whole.flags.0 & !(Flags::FIN.0 | Flags::PSH.0)) };
        way.push_back(Segment { seq: whole.seq.wrapping_add(at), length, flags, ..whole });
        at += length;
        if last {
            break;
        }
    }
    while way.len() > MOST_UNDER_WAY {
        way.pop_front();
    }
}

fn options(choice: &mut Choice) -> TcpOptions {
    let mut options = TcpOptions {
        timestamps: choice.one_in(2).then(|| (choice.number(), choice.number())),
        window_scale: choice.one_in(4).then(|| choice.below(15) as u8),
        mss: choice.one_in(4).then(|| choice.number() as u16),
        sack_permitted: choice.one_in(4),
        ..TcpOptions::default()
    };
    if choice.one_in(3) {
        options.sack.push(choice.number(), choice.number());
    }
    options
}

impl World for Pair {
    const LONGEST: u64 = 1200;

    fn new(word: u64) -> Pair {
        let mut choice = Choice::new(word);
        let now = Instant(choice.of(&[1, 4_294_967_000_000, 5 * DAY, 1 << 50]) + choice.below(1 << 40));
        let configs = [config(&mut choice), config(&mut choice)];
        note!("{configs:?}");
        let isn = [0, 1].map(|_| if choice.one_in(3) { u32::MAX - choice.magnitude(16) } else { choice.number() });
        let mut client = End::new(Connection::connect(configs[0], isn[0], choice.number(), now), &configs[0], [7, 99], now);
        let mut syn = None;
        client.send(0, now, |transmit| syn = Some(*transmit));
        let syn = syn.expect("a SYN");
        let server = if choice.one_in(16) {
            Connection::connect(configs[1], isn[1], choice.number(), now)
        } else {
            Connection::accept(configs[1], &segment_of(&syn), isn[1], choice.number(), now).expect("a SYN makes a connection")
        };
        let both = server.state() == State::SynSent;
        let mut pair = Pair {
            ends: [client, End::new(server, &configs[1], [99, 7], now)],
            ways: Default::default(),
            old: Default::default(),
            now,
            most: choice.of(&[0, 0, 4000, 20_000]),
            broken: false,
            last: choice.clone(),
        };
        if both {
            put(&mut pair.ways[0], &syn);
        }
        pair.transmit(1);
        if !choice.one_in(4) {
            pair.good_moment(3, &mut choice);
        }
        pair
    }

    fn step(&mut self, word: u64) -> bool {
        let mut choice = Choice::new(word);
        let at = choice.below(2) as usize;
        let under_way = self.ways[at].len() as u64;
        match choice.below(64) {
            0..20 => self.arrive(at, 0, &mut choice),
            20..26 if under_way > 0 => {
                let nth = choice.below(under_way) as usize;
                self.arrive(at, nth, &mut choice);
            }
            26..29 if under_way > 0 => {
                self.ways[at].remove(choice.below(under_way) as usize);
            }
            29 => self.ways[at].clear(),
            30..32 if under_way > 0 => {
                let copy = self.ways[at][choice.below(under_way) as usize];
                self.deliver(1 - at, &copy, false);
            }
            32 if !self.old[at].is_empty() => {
                let old = choice.of(&self.old[at]);
                self.deliver(1 - at, &old, choice.one_in(2));
            }
            33..36 => self.forge(at, &mut choice),
            36..48 => self.program(at, &mut choice),
            // One that its program has closed moves to the kernel only, one that has ended nowhere.
            48..51 if !self.ends[at].orphan && !self.ends[at].is_closed() => {
                let by_kernel = choice.one_in(3);
                self.ends[at].moves(by_kernel, self.now);
                self.transmit(at);
            }
            51..58 => self.wait(u64::from(choice.magnitude(20))),
            58 => self.pause(&mut choice),
            59 => {
                let next = self.ends[at].tcp.next_timeout();
                if next != Instant::NEVER {
                    self.wait(next.since(self.now).min(200 * SECOND));
                }
            }
            60..63 => self.good_moment(2, &mut choice),
            _ => {}
        }
        !self.ends.iter().all(End::is_closed)
    }

    fn end(mut self) {
        let mut choice = self.last.clone();
        let (begun, round_trip) = (self.now, 1 + u64::from(choice.magnitude(20)));
        note!("{:?} from now on all is well", self.now);
        for way in &mut self.ways {
            way.clear();
        }
        let mut due: VecDeque<(Instant, usize, Segment)> = VecDeque::new();
        for at in 0..2 {
            // A window of one byte lets a byte a second pass.
            if self.ends[1 - at].waiting() > 500 {
                self.ends[at].tcp.limit_window(u32::MAX);
            }
            self.ends[at].tcp.set_cork(false);
        }
        for events in 0.. {
            for at in 0..2 {
                let end = &mut self.ends[at];
                end.program_reads(u32::MAX >> 1, true);
                if !matches!(end.tcp.state(), State::SynSent | State::SynReceived) {
                    end.tcp.shutdown();
                }
                self.settle(at);
                let arrives = self.now.after(round_trip / 2);
                due.extend(self.ways[at].drain(..).map(|segment| (arrives, at, segment)));
            }
            if self.ends.iter().all(End::is_closed) {
                break;
            }
            assert!(events < MOST_EVENTS, "it does not end: {}", self.states());
            let next = [0, 1].map(|at| self.ends[at].tcp.next_timeout());
            let arrival = due.front().map_or(Instant::NEVER, |(at, ..)| *at);
            let first = arrival.min(next[0]).min(next[1]);
            if first == Instant::NEVER && self.broken && self.ends.iter().any(End::is_closed) {
                // The other end has given up while nobody listened, and this one has nothing to say.
                break;
            }
            assert_ne!(first, Instant::NEVER, "nothing will ever happen: {}", self.states());
            self.now = self.now.max(first);
            assert!(self.now.since(begun) < PATIENCE, "it takes too long: {}", self.states());
            if arrival <= self.now {
                let (_, from, segment) = due.pop_front().expect("the first");
                self.deliver(1 - from, &segment, choice.one_in(3));
            } else {
                self.expire(usize::from(next[1] < next[0]));
            }
        }
        self.compare();
    }
}

impl Pair {
    fn states(&self) -> String {
        let [first, second] = [0, 1].map(|at| &self.ends[at].tcp);
        format!("{first:#?}\n{second:#?}")
    }

    /// All has arrived, if nobody has given up.
    fn compare(&mut self) {
        for at in 0..2 {
            self.ends[at].program_reads(u32::MAX >> 1, false);
            let (sent, read) = (self.ends[at].queued, self.ends[1 - at].read);
            assert!(read <= sent, "more has come than was sent");
            assert!(self.broken || read == sent, "of {sent} bytes {read} have come: {:?}", [0, 1].map(|at| &self.ends[at].tcp));
        }
    }
}

#[test]
fn everything_arrives_when_the_network_is_good_again() {
    crate::fuzzer!("tcp_pair").run::<Pair>();
}
