//! A sender that forgets acknowledged data, a kernel that refuses segments at random, a NIC that dies: every byte
//! arrives, and the NIC sends nothing that the kernel has not promised.

mod common;

use baton_active_ack::ActiveAck;
use baton_device::Frame;
use baton_wire::{Flags, TcpOptions};
use common::{KEY, Memory, Segment, before, byte, flow, frame, parse};
use proptest::prelude::*;

/// Both ends and the NIC between them.
struct World {
    ipv6: bool,
    scale: u8,
    /// The kernel's first sequence number.
    isn: u32,
    memory: Memory,
    active: ActiveAck<Memory>,
    now: u64,
    /// The kernel: next sequence number expected, right edge that it has advertised, its timestamp, segments since its
    /// last acknowledgement, its buffer.
    rcv_nxt: u32,
    promised: u32,
    value: u32,
    delayed: u32,
    window: u32,
    /// Share of the segments that it refuses, in 256ths.
    refuses: u64,
    /// The sender: first unacknowledged and next sequence number, right edge that it knows, time of the last
    /// acknowledgement.
    una: u32,
    nxt: u32,
    may: u32,
    quiet_since: u64,
    /// Seen at the peer: the newest timestamp, the number of acknowledgements, and of segments sent again.
    newest_value: u32,
    acks: u32,
    sent_again: u32,
    random: u64,
}

impl World {
    fn new(seed: u64, start: u32, scale: u8, window: u32, refuses: u64, ipv6: bool) -> World {
        let memory = Memory::new(2);
        let isn = seed as u32;
        let active = ActiveAck::new(memory.clone(), &[0, 1], KEY, true, 1000);
        let mut world = World {
            ipv6,
            scale,
            isn,
            active,
            memory,
            now: 1000,
            rcv_nxt: start.wrapping_add(1),
            promised: start.wrapping_add(1),
            value: 5000,
            delayed: 0,
            window,
            refuses,
            una: start.wrapping_add(1),
            nxt: start.wrapping_add(1),
            may: start.wrapping_add(1),
            quiet_since: 1000,
            newest_value: 0,
            acks: 0,
            sent_again: 0,
            random: seed | 1,
        };
        // The peer's SYN, the kernel's SYN-ACK, and sometimes the kernel's first segment.
        let options = TcpOptions { window_scale: Some(3), timestamps: Some((70, 0)), ..TcpOptions::default() };
        let syn = Segment { seq: start, flags: Flags::SYN, window: 1000, options, ..Segment::default() };
        world.wire(frame(&flow(ipv6).reversed(), false, &syn, 0, true), false);
        let options = TcpOptions { window_scale: Some(scale), timestamps: Some((5000, 70)), ..TcpOptions::default() };
        let flags = Flags::SYN | Flags::ACK;
        let answer = Segment { seq: isn, ack: start.wrapping_add(1), flags, window: 1000, options, ..Segment::default() };
        let mut answer = frame(&flow(ipv6), true, &answer, 0, true);
        world.active.from_kernel(&mut answer, world.now, &mut |_| panic!("nothing is held"));
        // The first window is not scaled.
        (world.promised, world.may) = (start.wrapping_add(1001), start.wrapping_add(1001));
        world.newest_value = 5000;
        if seed & 2 == 0 {
            world.kernel_acknowledges(0);
        }
        world
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Sends a frame from the peer through the NIC to the kernel, which may refuse it.
    fn wire(&mut self, mut frame: Frame, data: bool) {
        let mut acks = Vec::new();
        self.active.from_wire(&frame, self.now, &mut |ack| acks.push(ack.clone()));
        acks.into_iter().for_each(|ack| self.at_peer(&ack));
        if data {
            self.at_kernel(&mut frame);
        }
    }

    fn at_kernel(&mut self, frame: &mut Frame) {
        if self.below(256) < self.refuses {
            return;
        }
        let parsed = parse(frame);
        assert_eq!(
            parsed.ack,
            self.isn.wrapping_add(1),
            "the kernel gets an acknowledgement of what it has not sent, or an old one"
        );
        let payload = parsed.payload(frame.bytes());
        let right = payload.iter().enumerate().all(|(at, found)| *found == byte(parsed.seq.wrapping_add(at as u32)));
        assert!(right, "the kernel gets other bytes");
        let end = parsed.seq.wrapping_add(payload.len() as u32);
        assert!(!before(self.promised, end), "the kernel gets more than its window has room for");
        if before(self.rcv_nxt, parsed.seq) {
            return self.kernel_acknowledges(end);
        }
        if !before(self.rcv_nxt, end) {
            return self.kernel_acknowledges(0);
        }
        self.rcv_nxt = end;
        self.delayed += 1;
        if self.delayed > 1 + self.below(3) as u32 {
            self.kernel_acknowledges(0);
        }
    }

    /// The kernel acknowledges; `sacked` is the end of a segment behind a gap, or 0.
    fn kernel_acknowledges(&mut self, sacked: u32) {
        self.delayed = 0;
        self.value += self.below(3) as u32;
        // Windows grow or stay, in units of the scale, and never shrink.
        let room = self.below(u64::from(self.window)) as u32 + self.window;
        let field = (room >> self.scale).min(0xffff);
        let edge = self.rcv_nxt.wrapping_add(field << self.scale);
        let field = if before(edge, self.promised) {
            self.promised.wrapping_sub(self.rcv_nxt).div_ceil(1 << self.scale).min(0xffff)
        } else {
            field
        };
        let edge = self.rcv_nxt.wrapping_add(field << self.scale);
        if before(self.promised, edge) {
            self.promised = edge;
        }
        let mut options = TcpOptions { timestamps: Some((self.value, 70)), ..TcpOptions::default() };
        if sacked != 0 {
            options.sack.push(sacked.wrapping_sub(1), sacked);
        }
        let said = Segment {
            seq: self.isn.wrapping_add(1),
            ack: self.rcv_nxt,
            flags: Flags::ACK,
            window: field as u16,
            options,
            ..Segment::default()
        };
        let whole_sum = self.below(2) == 0;
        let mut frame = frame(&flow(self.ipv6), true, &said, 0, whole_sum);
        let mut again = Vec::new();
        self.active.from_kernel(&mut frame, self.now, &mut |frame| again.push(frame.clone()));
        if whole_sum {
            assert!(parse(&frame).checksum_holds(frame.bytes()), "the checksum is wrong after a change");
        }
        self.at_peer(&frame);
        again.iter_mut().for_each(|frame| self.at_kernel(frame));
    }

    fn at_peer(&mut self, frame: &Frame) {
        let parsed = parse(frame);
        let edge = parsed.ack.wrapping_add(u32::from(parsed.window) << self.scale);
        assert!(!before(self.promised, edge), "a window that the kernel has not granted");
        assert!(!before(self.nxt, parsed.ack), "what was never sent is acknowledged");
        let (value, _) = parsed.options.timestamps.expect("timestamps");
        assert!(!before(value, self.newest_value), "timestamps run backwards");
        for (left, right) in parsed.options.sack.as_slice() {
            assert!(!before(*left, parsed.ack) && before(*left, *right), "a block that the acknowledgement covers");
        }
        assert_eq!(parsed.seq, self.isn.wrapping_add(1), "a sequence number that is not the kernel's next");
        // A peer ignores an acknowledgement older than the last one, and all else in that segment.
        assert!(!before(parsed.ack, self.una), "{} after {}", parsed.ack, self.una);
        self.newest_value = value;
        self.acks += 1;
        if before(self.una, parsed.ack) {
            self.una = parsed.ack;
            self.quiet_since = self.now;
        }
        if before(self.may, edge) {
            self.may = edge;
        }
    }

    fn peer_sends(&mut self) {
        let length = 1 + self.below(1400) as u32;
        self.send_next(length);
    }

    fn send_next(&mut self, length: u32) {
        let length = length.min(self.may.wrapping_sub(self.nxt));
        if length == 0 || before(self.may, self.nxt) {
            return;
        }
        let seq = self.nxt;
        self.nxt = seq.wrapping_add(length);
        self.send(seq, length);
    }

    fn send(&mut self, seq: u32, length: u32) {
        let options =
            TcpOptions { timestamps: Some((70 + (self.now / 1000) as u32, self.newest_value)), ..TcpOptions::default() };
        let said = Segment { seq, ack: self.isn.wrapping_add(1), flags: Flags::ACK, window: 500, options, ..Segment::default() };
        let frame = frame(&flow(self.ipv6).reversed(), false, &said, length as usize, true);
        self.wire(frame, true);
    }

    fn pass(&mut self, micros: u64) {
        self.now += micros;
        let (mut acks, mut again) = (Vec::new(), Vec::new());
        self.active.expire(self.now, &mut |frame| acks.push(frame.clone()), &mut |frame| again.push(frame.clone()));
        acks.into_iter().for_each(|ack| self.at_peer(&ack));
        again.iter_mut().for_each(|frame| self.at_kernel(frame));
        if self.delayed > 0 && self.below(4) == 0 {
            self.kernel_acknowledges(0);
        }
        // The sender keeps unacknowledged data, and nothing else.
        if self.una != self.nxt && self.now - self.quiet_since > 1_000_000 {
            let length = self.nxt.wrapping_sub(self.una).min(1400);
            self.quiet_since = self.now;
            self.sent_again += 1;
            self.send(self.una, length);
        }
    }

    fn nic_dies(&mut self) {
        self.active = ActiveAck::new(self.memory.clone(), &[0, 1], KEY, true, self.now);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(std::env::var("BATON_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(200)))]

    #[test]
    fn what_is_acknowledged_arrives(
        seed in any::<u64>(), start in prop_oneof![any::<u32>(), Just(u32::MAX - 3000)], scale in 0u8..9, window in 2000u32..60_000,
        refuses in prop_oneof![Just(0u64), 1u64..200], deaths in 0usize..4, ipv6 in any::<bool>(),
    ) {
        let mut world = World::new(seed, start, scale, window, refuses, ipv6);
        for round in 0..400 {
            if world.below(3) > 0 {
                world.peer_sends();
            } else {
                let micros = world.below(2000);
                world.pass(micros);
            }
            if round % 100 == 99 && round / 100 < deaths {
                world.nic_dies();
            }
        }
        for _ in 0..40_000 {
            if world.rcv_nxt == world.nxt && world.una == world.nxt {
                break;
            }
            world.pass(100_000);
        }
        prop_assert_eq!(world.rcv_nxt, world.nxt);
        prop_assert_eq!(world.una, world.nxt);
        prop_assert!(deaths > 0 || refuses > 0 || world.active.counters().sent > 0, "{:?}", world.active.counters());
    }
}

/// The kernel gets nothing for a long time, as when an aggregate waits: the sender goes on up to the window's edge, not
/// beyond, and sends nothing again.
#[test]
fn the_sender_goes_on_while_the_kernel_waits() {
    let mut world = World::new(1, 77, 4, 30_000, 256, false);
    let promised = world.promised;
    for _ in 0..200 {
        world.peer_sends();
        world.pass(300);
    }
    assert_eq!((world.nxt, world.una), (promised, promised), "all that the window has room for was sent and acknowledged");
    assert_eq!((world.rcv_nxt, world.sent_again), (78, 0));
    assert!(world.active.counters().sent > 10);
}

fn single(said: Segment, length: usize) -> (usize, World) {
    let mut world = World::new(1, 77, 4, 30_000, 256, false);
    let options = TcpOptions { timestamps: Some((75, 5000)), ..said.options };
    let frame = frame(&flow(false).reversed(), false, &Segment { options, ..said }, length, true);
    let acks = world.acks;
    world.nxt = world.nxt.wrapping_add(length as u32);
    world.wire(frame, false);
    for _ in 0..8 {
        world.active.expire(world.now, &mut |_| world.acks += 1, &mut |_| {});
        world.now += 300;
    }
    ((world.acks - acks) as usize, world)
}

#[test]
fn only_plain_data_in_order_is_acknowledged() {
    let plain = Segment { seq: 78, ack: 2, flags: Flags::ACK, window: 500, ..Segment::default() };
    assert_eq!(single(plain, 100).0, 1);
    for (what, said) in [
        ("a FIN", Segment { flags: Flags::ACK | Flags::FIN, ..plain }),
        ("urgent data", Segment { flags: Flags::ACK | Flags::URG, ..plain }),
        ("a smaller window of the sender's", Segment { flags: Flags::ACK | Flags::CWR, ..plain }),
        ("congestion", Segment { ecn: 3, ..plain }),
        ("a gap", Segment { seq: 79, ..plain }),
        ("an acknowledgement of what was never sent", Segment { ack: 3, ..plain }),
        ("an acknowledgement that is older than the last one", Segment { ack: 1, ..plain }),
        ("what came before", Segment { seq: 70, ..plain }),
    ] {
        assert_eq!(single(said, 100).0, 0, "{what}");
    }
}

/// A connection whose handshake was not seen, and a segment whose checksum is wrong, are left alone.
#[test]
fn strangers_and_damage_are_left_alone() {
    let mut active = ActiveAck::new(Memory::new(2), &[0, 1], KEY, true, 0);
    let said = Segment { seq: 78, ack: 901, flags: Flags::ACK, window: 500, ..Segment::default() };
    let mut kernels = frame(&flow(false), true, &Segment { seq: 901, ack: 78, ..said }, 0, true);
    let as_it_was = kernels.clone();
    active.from_kernel(&mut kernels, 0, &mut |_| panic!("nothing is held"));
    active.from_wire(&frame(&flow(false).reversed(), false, &said, 100, true), 0, &mut |_| panic!("its handshake was not seen"));
    assert_eq!(kernels.bytes(), as_it_was.bytes());

    let mut world = World::new(1, 77, 4, 30_000, 256, false);
    let mut damaged = frame(&flow(false).reversed(), false, &said, 100, true);
    damaged.bytes_mut()[80] ^= 1;
    world.active.from_wire(&damaged, world.now, &mut |_| panic!("it is damaged"));
    world.active.expire(world.now + 10_000, &mut |_| panic!("it is damaged"), &mut |_| {});
}

/// More connections than buffers: a buffer that holds data is not taken from its connection.
#[test]
fn places_are_used_again() {
    let mut active = ActiveAck::new(Memory::new(2), &[0, 1], KEY, true, 0);
    let syn = Segment { seq: 10, flags: Flags::SYN, window: 1000, ..Segment::default() };
    for port in 0..100 {
        let mut flow = flow(false);
        flow.remote.port = 1000 + port;
        active.from_wire(&frame(&flow.reversed(), false, &syn, 0, true), 0, &mut |_| {});
        let answer = Segment { seq: 900, ack: 11, flags: Flags::SYN | Flags::ACK, ..syn };
        active.from_kernel(&mut frame(&flow, true, &answer, 0, true), 0, &mut |_| {});
        let first = Segment { seq: 901, ack: 11, flags: Flags::ACK, ..syn };
        active.from_kernel(&mut frame(&flow, true, &first, 0, true), 0, &mut |_| {});
        let data = Segment { seq: 11, ack: 901, flags: Flags::ACK, ..syn };
        let mut acks = 0;
        active.from_wire(&frame(&flow.reversed(), false, &data, 100, true), 0, &mut |_| acks += 1);
        active.from_wire(&frame(&flow.reversed(), false, &Segment { seq: 111, ..data }, 100, true), 0, &mut |_| acks += 1);
        assert_eq!(acks, 1, "connection {port}");
        assert!(!active.end(&baton_wire::FlowKey::from(&flow)), "it holds something");
        let taken = Segment { seq: 901, ack: 211, flags: Flags::ACK, ..syn };
        active.from_kernel(&mut frame(&flow, true, &taken, 0, true), 0, &mut |_| {});
    }
}

/// The next NIC delivers the data that the last one has acknowledged to the kernel, and then goes on.
#[test]
fn the_next_nic_goes_on() {
    let mut world = World::new(0xf000_0001, 77, 4, 30_000, 256, false);
    for _ in 0..3 {
        // The kernel gets nothing, the NIC has everything.
        world.refuses = 256;
        let before_these = world.nxt;
        (0..4).for_each(|_| world.send_next(1000));
        assert_eq!((world.una, world.rcv_nxt), (world.nxt, before_these));
        world.nic_dies();
        world.refuses = 0;
        world.pass(200);
        (0..100).for_each(|_| world.pass(10_000));
        assert_eq!((world.rcv_nxt, world.sent_again), (world.nxt, 0));
    }
}
