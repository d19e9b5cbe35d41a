//! A listener whose accept queue is full, SYNs that come late, and an attacker who sends segments with the connection's
//! 4-tuple without knowing its numbers: data that was acknowledged to the peer reaches the program, and the blind
//! segments change nothing at all.

mod common;

use baton_active_ack::ActiveAck;
use baton_device::Frame;
use baton_wire::{Flags, TcpFrame, TcpOptions};
use common::{KEY, Memory, Segment, before, byte, flow, frame, parse};
use proptest::prelude::*;
use std::collections::VecDeque;

/// Sequence numbers of both ends before their SYNs, and the kernel's window field, unscaled.
const PEERS_START: u32 = 0xffff_f000;
const KERNELS_START: u32 = 0x7fff_ff00;
const SCALE: u8 = 4;

fn timestamps(value: u32, echo: u32) -> TcpOptions {
    TcpOptions { timestamps: Some((value, echo)), ..TcpOptions::default() }
}

/// The kernel's end, with the checks of RFC 9293 section 3.10.7.4, RFC 7323 section 5.3 and RFC 5961.
struct Kernel {
    /// None while the connection waits for room in the accept queue.
    established: bool,
    full: bool,
    rcv_nxt: u32,
    promised: u32,
    ts_recent: u32,
    snd_una: u32,
    snd_nxt: u32,
    value: u32,
    window: u32,
    read: Vec<u8>,
}

impl Kernel {
    fn say(&mut self, length: u32) -> (Segment, usize) {
        self.value += 1;
        let edge = self.rcv_nxt.wrapping_add(self.window >> SCALE << SCALE);
        if before(self.promised, edge) {
            self.promised = edge;
        }
        let window = (self.promised.wrapping_sub(self.rcv_nxt) >> SCALE) as u16;
        let options = timestamps(self.value, self.ts_recent);
        let said = Segment { seq: self.snd_nxt, ack: self.rcv_nxt, flags: Flags::ACK, window, options, ..Segment::default() };
        self.snd_nxt = self.snd_nxt.wrapping_add(length);
        (said, length as usize)
    }

    fn syn_ack(&mut self) -> (Segment, usize) {
        self.value += 1;
        let options = TcpOptions { window_scale: Some(SCALE), ..timestamps(self.value, self.ts_recent) };
        let (ack, flags) = (PEERS_START.wrapping_add(1), Flags::SYN | Flags::ACK);
        (Segment { seq: KERNELS_START, ack, flags, window: 60_000, options, ..Segment::default() }, 0)
    }

    /// The kernel's answer to a segment.
    fn receive(&mut self, parsed: &TcpFrame, payload: &[u8]) -> Option<(Segment, usize)> {
        if !self.established {
            if parsed.flags.contains(Flags::SYN) {
                return Some(self.syn_ack());
            }
            if self.full || parsed.ack != KERNELS_START.wrapping_add(1) {
                return None;
            }
            self.established = true;
        }
        let end = parsed.seq.wrapping_add(payload.len() as u32);
        let (value, _) = parsed.options.timestamps?;
        let in_window = !before(self.promised, parsed.seq) && !before(end, self.rcv_nxt);
        if !in_window || before(value, self.ts_recent) || parsed.flags.contains(Flags::SYN) {
            return Some(self.say(0));
        }
        let oldest = self.snd_una.wrapping_sub(65_535);
        if before(self.snd_nxt, parsed.ack) || before(parsed.ack, oldest) {
            return Some(self.say(0));
        }
        if before(self.snd_una, parsed.ack) {
            self.snd_una = parsed.ack;
        }
        if payload.is_empty() {
            return None;
        }
        if before(self.rcv_nxt, parsed.seq) {
            return Some(self.say(0));
        }
        self.ts_recent = value;
        let new = self.rcv_nxt.wrapping_sub(parsed.seq) as usize;
        self.read.extend_from_slice(&payload[new..]);
        self.rcv_nxt = end;
        Some(self.say(0))
    }
}

/// Two NICs that have to behave the same. Only the first one sees the blind segments.
struct Nics {
    nics: [ActiveAck<Memory>; 2],
    now: u64,
}

impl Nics {
    fn both(&mut self, mut run: impl FnMut(&mut ActiveAck<Memory>, u64, &mut Vec<Frame>, &mut Vec<Frame>)) -> [Vec<Frame>; 2] {
        let now = self.now;
        let [first, second] = self.nics.each_mut().map(|nic| {
            let mut out = [Vec::new(), Vec::new()];
            let [to_wire, to_kernel] = &mut out;
            run(nic, now, to_wire, to_kernel);
            out
        });
        let bytes =
            |frames: &[Vec<Frame>; 2]| frames.each_ref().map(|of| of.iter().map(|f| f.bytes().to_vec()).collect::<Vec<_>>());
        assert_eq!(bytes(&first), bytes(&second), "the blind segments have changed something");
        first
    }
}

struct World {
    nics: Nics,
    kernel: Kernel,
    to_kernel: VecDeque<Frame>,
    to_peer: VecDeque<Frame>,
    /// The peer: first unacknowledged and next sequence number, edge of the window, next number expected, timestamp to
    /// echo.
    una: u32,
    nxt: u32,
    may: u32,
    rcv_nxt: u32,
    ts_recent: u32,
    scaled: bool,
    acknowledged_at: u64,
    random: u64,
}

impl World {
    fn new(seed: u64, window: u32) -> World {
        let active = || ActiveAck::new(Memory::new(2), &[0, 1], KEY, true, 1000);
        let (first, ours) = (PEERS_START.wrapping_add(1), KERNELS_START.wrapping_add(1));
        let kernel = Kernel {
            established: false,
            full: true,
            rcv_nxt: first,
            promised: first.wrapping_add(60_000),
            ts_recent: 70,
            snd_una: ours,
            snd_nxt: ours,
            value: 5000,
            window,
            read: Vec::new(),
        };
        let mut world = World {
            nics: Nics { nics: [active(), active()], now: 1000 },
            kernel,
            to_kernel: VecDeque::new(),
            to_peer: VecDeque::new(),
            una: first,
            nxt: first,
            may: first,
            rcv_nxt: ours,
            ts_recent: 0,
            scaled: false,
            acknowledged_at: 1000,
            random: seed | 1,
        };
        world.syn();
        world.run();
        world
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % u64::from(limit)) as u32
    }

    fn syn(&mut self) {
        let options = TcpOptions { window_scale: Some(3), ..timestamps(70, 0) };
        let said = Segment { seq: PEERS_START, flags: Flags::SYN, window: 1000, options, ..Segment::default() };
        self.from_wire(&said, 0);
    }

    fn from_wire(&mut self, said: &Segment, length: usize) {
        let frame = frame(&flow(false).reversed(), false, said, length, true);
        let [acks, _] = self.nics.both(|nic, now, to_wire, _| nic.from_wire(&frame, now, &mut |ack| to_wire.push(ack.clone())));
        self.to_peer.extend(acks);
        self.to_kernel.push_back(frame);
    }

    fn from_kernel(&mut self, (said, length): (Segment, usize)) {
        let sent = frame(&flow(false), true, &said, length, true);
        let [to_wire, again] = self.nics.both(|nic, now, to_wire, to_kernel| {
            let mut frame = sent.clone();
            nic.from_kernel(&mut frame, now, &mut |frame| to_kernel.push(frame.clone()));
            to_wire.push(frame);
        });
        self.to_peer.extend(to_wire);
        self.to_kernel.extend(again);
    }

    /// Lets frames travel until none is in flight. Of the frames to the kernel, `lost` of 256 are lost.
    fn travel(&mut self, lost: u32) {
        for _ in 0..10_000 {
            if let Some(frame) = self.to_kernel.pop_front() {
                if self.below(256) >= lost {
                    let parsed = parse(&frame);
                    if let Some(answer) = self.kernel.receive(&parsed, parsed.payload(frame.bytes())) {
                        self.from_kernel(answer);
                    }
                }
            } else if let Some(frame) = self.to_peer.pop_front() {
                self.at_peer(&parse(&frame));
            } else {
                return;
            }
        }
        panic!("frames make frames for ever");
    }

    fn run(&mut self) {
        self.travel(0);
    }

    fn at_peer(&mut self, parsed: &TcpFrame) {
        let (value, _) = parsed.options.timestamps.expect("timestamps");
        let syn = parsed.flags.contains(Flags::SYN);
        if !before(value, self.ts_recent) {
            self.ts_recent = value;
        }
        if before(self.una, parsed.ack) {
            self.una = parsed.ack;
            self.acknowledged_at = self.nics.now;
        }
        let shift = if syn { 0 } else { SCALE };
        let edge = parsed.ack.wrapping_add(u32::from(parsed.window) << shift);
        if before(self.may, edge) {
            self.may = edge;
        }
        if parsed.seq == self.rcv_nxt && parsed.payload_length > 0 {
            self.rcv_nxt = self.rcv_nxt.wrapping_add(parsed.payload_length as u32);
        }
        if (parsed.payload_length > 0) || (syn && !self.scaled) {
            self.scaled |= syn;
            self.peer_says(self.nxt, 0);
        }
    }

    fn peer_says(&mut self, seq: u32, length: u32) {
        let options = timestamps(70 + (self.nics.now / 1000) as u32, self.ts_recent);
        let said = Segment { seq, ack: self.rcv_nxt, flags: Flags::ACK, window: 500, options, ..Segment::default() };
        self.from_wire(&said, length as usize);
    }

    fn peer_sends(&mut self) {
        let length = 1 + self.below(1400);
        if before(self.may, self.nxt.wrapping_add(length)) {
            return;
        }
        self.peer_says(self.nxt, length);
        self.nxt = self.nxt.wrapping_add(length);
    }

    fn pass(&mut self, micros: u64) {
        self.nics.now += micros;
        let [acks, again] = self.nics.both(|nic, now, to_wire, to_kernel| {
            nic.expire(now, &mut |frame| to_wire.push(frame.clone()), &mut |frame| to_kernel.push(frame.clone()));
        });
        self.to_peer.extend(acks);
        self.to_kernel.extend(again);
        if self.una != self.nxt && self.nics.now - self.acknowledged_at > 1_000_000 {
            self.acknowledged_at = self.nics.now;
            let mut seq = self.una;
            while before(seq, self.nxt) {
                let length = self.nxt.wrapping_sub(seq).min(1400);
                self.peer_says(seq, length);
                seq = seq.wrapping_add(length);
            }
        }
    }

    /// A segment of an attacker who does not know the numbers: at least one of them is wrong, or the timestamp is old.
    fn blind(&mut self) {
        let wild = |world: &mut World, from: u32| from.wrapping_add(1 << 20).wrapping_add(world.below(u32::MAX - (1 << 21)));
        let wrong = 1 + self.below(3);
        let seq = if wrong & 1 != 0 { wild(self, self.nxt) } else { self.nxt };
        let ack = if wrong & 2 != 0 { wild(self, self.kernel.snd_nxt) } else { self.rcv_nxt };
        let (value, echo, window) = (self.below(u32::MAX), self.below(u32::MAX), self.below(65_536) as u16);
        let options = match self.below(4) {
            0 => TcpOptions::default(),
            1 => TcpOptions { window_scale: Some(value as u8 % 15), mss: Some(window), ..timestamps(value, echo) },
            _ => timestamps(value, echo),
        };
        let length = if self.below(2) == 0 { 0 } else { 1 + self.below(1400) as usize };
        let ack_flag = Flags::ACK;
        let flags = [ack_flag, ack_flag, Flags::SYN, Flags::SYN | ack_flag, ack_flag | Flags::FIN, Flags::default()];
        let flags = flags[self.below(flags.len() as u32) as usize];
        let mut said = Segment { seq, ack, flags, window, options, ..Segment::default() };
        match self.below(8) {
            0 => (said.seq, said.flags) = (wild(self, self.nxt), Flags::RST | Flags::ACK),
            1 => (said.seq, said.flags) = (wild(self, self.nxt), Flags::RST),
            2 if self.kernel.established => {
                let old = self.kernel.ts_recent.wrapping_sub(1 + self.below(1 << 30));
                (said.seq, said.ack, said.options) = (self.nxt, self.rcv_nxt, timestamps(old, echo));
                said.flags = Flags::ACK;
            }
            _ => {}
        }
        let frame = frame(&flow(false).reversed(), false, &said, length, true);
        let now = self.nics.now;
        self.nics.nics[0].from_wire(&frame, now, &mut |_| panic!("a blind segment is answered: {said:?}", said = said.flags));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(std::env::var("BATON_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(200)))]

    #[test]
    fn what_is_acknowledged_arrives_and_blind_segments_change_nothing(
        seed in any::<u64>(), window in 3000u32..60_000, lost in prop_oneof![Just(0u32), 1u32..200], full in 0u32..200,
    ) {
        let mut world = World::new(seed, window);
        for round in 0..600 {
            if round == full {
                world.kernel.full = false;
            }
            match world.below(8) {
                0..3 => world.peer_sends(),
                3 => world.blind(),
                4 if world.kernel.established => {
                    let length = world.below(500);
                    let said = world.kernel.say(length);
                    world.from_kernel(said);
                }
                // The kernel repeats its SYN-ACK, or the network the peer's SYN.
                4 if world.below(2) == 0 => {
                    let said = world.kernel.syn_ack();
                    world.from_kernel(said);
                }
                4 if round < full => world.syn(),
                _ => {
                    let micros = world.below(20_000);
                    world.pass(u64::from(micros));
                }
            }
            if world.below(2) == 0 {
                world.travel(lost);
            }
        }
        for _ in 0..20_000 {
            if world.kernel.rcv_nxt == world.nxt && world.una == world.nxt {
                break;
            }
            world.pass(100_000);
            world.blind();
            world.run();
        }
        prop_assert_eq!((world.kernel.rcv_nxt, world.una), (world.nxt, world.nxt));
        let first = PEERS_START.wrapping_add(1);
        let right = world.kernel.read.iter().enumerate().all(|(at, found)| *found == byte(first.wrapping_add(at as u32)));
        prop_assert!(right, "the program gets other bytes");
        prop_assert!(lost > 0 || world.nics.nics[0].counters().sent > 0, "{:?}", world.nics.nics[0].counters());
    }
}

/// An accept queue that stays full for many repetitions of the SYN-ACK. The NIC makes no promise for a kernel that
/// keeps nothing.
#[test]
fn nothing_is_acknowledged_for_a_full_accept_queue() {
    let mut world = World::new(1, 30_000);
    for _ in 0..3 {
        (0..3).for_each(|_| world.peer_sends());
        world.run();
        let said = world.kernel.syn_ack();
        world.from_kernel(said);
        world.pass(1_000);
        world.run();
    }
    assert_eq!((world.una, world.nics.nics[0].counters().sent), (PEERS_START.wrapping_add(1), 0));
    assert_ne!(world.nxt, world.una);
    world.kernel.full = false;
    for _ in 0..100 {
        world.pass(100_000);
        world.run();
    }
    assert_eq!((world.kernel.rcv_nxt, world.una), (world.nxt, world.nxt));
}

/// A kernel without memory refuses each segment that it gets with a duplicate acknowledgement: these duplicates do not
/// cause a storm of deliveries.
#[test]
fn refused_data_is_not_delivered_again_for_each_duplicate() {
    let mut world = World::new(1, 60_000);
    world.kernel.full = false;
    world.peer_sends();
    world.run();
    let again = |world: &World| world.nics.nics[0].counters().redelivered;
    (0..20).for_each(|_| world.peer_sends());
    world.to_kernel.clear();
    for _ in 0..100 {
        let said = world.kernel.say(0);
        world.from_kernel(said);
        // The kernel keeps none of the segments that it gets.
        world.to_kernel.clear();
    }
    assert!((1..=20).contains(&again(&world)), "{} segments", again(&world));
    for _ in 0..100 {
        world.pass(100_000);
        world.run();
    }
    assert_eq!((world.kernel.rcv_nxt, world.una), (world.nxt, world.nxt));
}
