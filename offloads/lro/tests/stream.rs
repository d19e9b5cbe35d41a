//! Merging never changes the byte stream: random sizes, flags, orders, duplicates and waits, several connections at
//! once.

use baton_device::{Checksum, Frame, MAX_FRAME};
use baton_lro::{Lro, LroSettings, Mode, Push};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// One segment of a connection, as its sender made it.
#[derive(Clone, Debug)]
struct Sent {
    connection: u8,
    offset: u32,
    length: u32,
    flags: u8,
    stamp: u32,
    ecn: u8,
    ident: u16,
}

fn flow(connection: u8) -> Flow {
    let port = 1000 + u16::from(connection);
    if connection.is_multiple_of(2) {
        Flow { local: Endpoint::v4([10, 0, 0, 2], port), remote: Endpoint::v4([10, 0, 0, 1], 80), device: 0 }
    } else {
        Flow { local: Endpoint::v6([0xfe; 16], port), remote: Endpoint::v6([0xfd; 16], 443), device: 0 }
    }
}

fn start(connection: u8) -> u32 {
    // The sequence numbers of one of the connections wrap early.
    u32::MAX - 5000 * u32::from(connection)
}

fn byte(connection: u8, offset: u32) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 13) as u8 ^ connection
}

fn frame(sent: &Sent) -> Frame {
    let template = Template::new(&flow(sent.connection).reversed(), &Link { ttl: 64, ..Link::default() }, true);
    let options = TcpOptions { timestamps: Some((sent.stamp, 9)), ..TcpOptions::default() };
    let seq = start(sent.connection).wrapping_add(sent.offset);
    let flags = Flags(sent.flags | Flags::ACK.0);
    let header = Header { seq, ack: 77, flags, window: 500, options: &options, ecn: sent.ecn, ident: sent.ident };
    let mut frame = Frame::with_capacity(MAX_FRAME);
    frame.set_length(MAX_HEADER + sent.length as usize);
    let headers = template.emit(&header, sent.length as usize, frame.bytes_mut());
    frame.set_length(headers + sent.length as usize);
    for at in 0..sent.length {
        frame.bytes_mut()[headers + at as usize] = byte(sent.connection, sent.offset + at);
    }
    assert!(finish_checksum(frame.bytes_mut(), template.tcp_offset(), 16));
    frame
}

/// The frames that came out, each checked.
#[derive(Default)]
struct Received {
    /// The frames as they would be on a wire, aggregates cut into segments.
    cut: Vec<Vec<u8>>,
    /// Payload bytes by connection and offset, and how often each arrived.
    bytes: BTreeMap<(u8, u32), (u8, u32)>,
    frames: usize,
    largest: usize,
}

impl Received {
    fn take(&mut self, frame: &mut Frame) {
        self.frames += 1;
        self.largest = self.largest.max(frame.bytes().len());
        if frame.segmentation.is_some() {
            let mut cut = baton_tso::cut(frame, false).expect("an aggregate can be cut");
            let mut out = Frame::with_capacity(MAX_FRAME);
            while cut.next(&mut out) {
                self.one(&out);
            }
        } else {
            if let Checksum::Partial { start, offset } = frame.checksum {
                assert!(finish_checksum(frame.bytes_mut(), start.into(), offset.into()));
            }
            self.one(frame);
        }
    }

    fn one(&mut self, frame: &Frame) {
        let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
        assert!(parsed.checksum_holds(frame.bytes()));
        let connection = (0..8).find(|connection| flow(*connection) == parsed.flow).expect("a connection");
        let offset = parsed.seq.wrapping_sub(start(connection));
        for (at, value) in parsed.payload(frame.bytes()).iter().enumerate() {
            let entry = self.bytes.entry((connection, offset + at as u32)).or_insert((*value, 0));
            assert_eq!(entry.0, *value, "two values at one place");
            entry.1 += 1;
        }
        self.cut.push(frame.bytes().to_vec());
    }
}

fn run(settings: LroSettings, sent: &[(Sent, u64)]) -> Received {
    let mut received = Received::default();
    let mut now = 1_000_000;
    let mut lro = Lro::new(settings, now);
    for (segment, wait) in sent {
        now += wait;
        if lro.next_tick() <= now {
            lro.expire(now, &mut |frame| received.take(frame));
        }
        let mut frame = frame(segment);
        lro.receive(&mut frame, now, &mut |frame| received.take(frame));
        assert!(frame.capacity() >= MAX_FRAME, "the caller gets a whole buffer back");
    }
    // Everything that waits goes out in time, without another frame.
    while let Some(at) = lro.next_expiry() {
        now = now.max(at) + 16;
        lro.expire(now, &mut |frame| received.take(frame));
    }
    assert_eq!((lro.held_bytes(), lro.counters().held), (0, 0));
    received
}

fn segments() -> impl Strategy<Value = Vec<(Sent, u64)>> {
    let one = (0u8..4, 1u32..1500, 0u8..12, any::<u8>(), 0u64..60, any::<prop::sample::Index>(), 0u8..20);
    proptest::collection::vec(one, 1..200).prop_map(|drawn| {
        let (mut offsets, mut idents) = ([0u32; 4], [0u16; 4]);
        let mut sent = Vec::new();
        for (connection, length, kind, ecn, wait, place, odd) in drawn {
            let offset = offsets[usize::from(connection)];
            // Mostly full segments, so that something is merged.
            let length = if kind < 9 { 1448 } else { length };
            offsets[usize::from(connection)] += length;
            let ident = idents[usize::from(connection)];
            idents[usize::from(connection)] += 1;
            let flags = match odd {
                0 => Flags::PSH.0,
                1 => Flags::ECE.0,
                2 => Flags::CWR.0,
                _ => 0,
            };
            let ecn = if ecn < 20 { 3 } else { 2 };
            let segment = Sent { connection, offset, length, flags, stamp: offset / 20_000, ecn, ident };
            let at = match odd {
                // The segment comes early, so all segments sent since then come late.
                3 | 4 => place.index(sent.len() + 1),
                _ => sent.len(),
            };
            if odd == 5 {
                sent.push((segment.clone(), 0));
            }
            sent.insert(at, (segment, wait));
        }
        sent
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Every byte comes out as often as it went in, with its value and at its sequence number.
    #[test]
    fn bytes_come_out_as_they_went_in(sent in segments(), reorder: bool, bulk: bool, few: bool, most in 3000usize..65_536) {
        let mode = if reorder { Mode::Reorder } else { Mode::InOrder };
        let push = if bulk { Push::Bulk } else { Push::Flush };
        let short = LroSettings { connections: 2, aggregates: 1, held_segments: 3, held_bytes: 9000, ..LroSettings::default() };
        let settings = LroSettings { mode, push, most, ..if few { short } else { LroSettings::default() } };
        let received = run(settings, &sent);
        let mut expected: BTreeMap<(u8, u32), (u8, u32)> = BTreeMap::new();
        for (segment, _) in &sent {
            for offset in segment.offset..segment.offset + segment.length {
                expected.entry((segment.connection, offset)).or_insert((byte(segment.connection, offset), 0)).1 += 1;
            }
        }
        prop_assert!(received.bytes == expected, "bytes differ");
        prop_assert!(received.largest <= most + 14 || received.largest <= 1448 + 100);
    }

    /// With GRO's rules, cutting the aggregates gives the very segments, in each connection's order.
    #[test]
    fn what_is_merged_in_order_can_be_undone(sent in segments()) {
        let received = run(LroSettings { mode: Mode::InOrder, ..LroSettings::default() }, &sent);
        for connection in 0..4u8 {
            let of = |frames: &[Vec<u8>]| -> Vec<Vec<u8>> {
                frames.iter().filter(|bytes| TcpFrame::parse(bytes, 0).is_ok_and(|parsed| parsed.flow == flow(connection))).cloned().collect()
            };
            let went_in: Vec<Vec<u8>> = sent.iter().map(|(segment, _)| frame(segment).bytes().to_vec()).collect();
            prop_assert!(of(&received.cut) == of(&went_in), "connection {connection} differs");
        }
    }
}

/// A bulk transfer whose segments come in disorder within the gap's time comes out in order, in large aggregates.
#[test]
fn disorder_is_put_in_order() {
    let mut sent: Vec<(Sent, u64)> = (0..2000u32)
        .map(|n| (Sent { connection: 0, offset: n * 1448, length: 1448, flags: 0, stamp: n / 500, ecn: 0, ident: n as u16 }, 2))
        .collect();
    for n in (10..1900).step_by(50) {
        let late = sent.remove(n);
        sent.insert(n + 30, late);
    }
    let in_order = run(LroSettings { mode: Mode::InOrder, ..LroSettings::default() }, &sent);
    let reordered = run(LroSettings { mode: Mode::Reorder, ..LroSettings::default() }, &sent);
    let disorder = |received: &Received| {
        let seqs: Vec<u32> = received.cut.iter().map(|bytes| TcpFrame::parse(bytes, 0).expect("a segment").seq).collect();
        seqs.windows(2).filter(|pair| pair[1].wrapping_sub(pair[0]) as i32 <= 0).count()
    };
    assert_eq!(disorder(&reordered), 0);
    assert!(disorder(&in_order) >= 30);
    assert!(reordered.frames < 60 && in_order.frames > 100, "{} and {} frames", reordered.frames, in_order.frames);
}

/// A missing segment is not waited for longer than set, and held memory stays below its cap.
#[test]
fn gaps_are_given_up() {
    let settings = LroSettings { mode: Mode::Reorder, held_bytes: 100_000, ..LroSettings::default() };
    let mut lro = Lro::new(settings, 0);
    let mut out = 0;
    let segment = |n: u32| Sent { connection: 0, offset: n * 1448, length: 1448, flags: 0, stamp: 0, ecn: 0, ident: n as u16 };
    lro.receive(&mut frame(&segment(0)), 0, &mut |_| out += 1);
    for n in 2..12 {
        lro.receive(&mut frame(&segment(n)), 10, &mut |_| out += 1);
    }
    assert_eq!(lro.counters().held, 10);
    lro.expire(settings.gap, &mut |_| out += 1);
    assert_eq!((lro.counters().held, out), (10, 1), "the first segment has gone out alone");
    lro.expire(settings.gap + 30, &mut |_| out += 1);
    assert_eq!((lro.counters().held, lro.counters().gaps, out), (0, 1, 2));
    // A flood stays below the cap.
    for n in 0..5000 {
        lro.receive(&mut frame(&segment(20 + 2 * n)), settings.gap + 40, &mut |_| out += 1);
        assert!(lro.held_bytes() <= 100_000);
    }
}

/// An [`Lro`] that does not see all segments does not wait for missing ones after a pause; without a pause it does.
#[test]
fn what_went_another_way_in_a_pause_is_not_waited_for() {
    const PAUSE: u64 = 750;
    let settings = LroSettings { mode: Mode::Reorder, ..LroSettings::default() };
    let segment = |n: u32| Sent { connection: 0, offset: n * 1448, length: 1448, flags: 0, stamp: 0, ecn: 0, ident: n as u16 };
    for (pause, held) in [(PAUSE - 1, 1), (PAUSE, 0)] {
        let mut lro = Lro::new(settings, 0).missing_some_after(PAUSE);
        lro.receive(&mut frame(&segment(0)), 0, &mut |_| ());
        lro.expire(400, &mut |_| ());
        lro.receive(&mut frame(&segment(9)), pause, &mut |_| ());
        assert_eq!(lro.counters().held, held, "after {pause} microseconds");
        // With something waiting it is a gap.
        lro.receive(&mut frame(&segment(12)), pause + PAUSE, &mut |_| ());
        assert_eq!(lro.counters().held, held + 1);
    }
}

/// A flood of out-of-order segments costs logarithmic time per segment, stays below its cap, and delays no other
/// connection's segments.
#[test]
fn floods_out_of_order_stay_cheap() {
    let settings = LroSettings { mode: Mode::Reorder, held_segments: 1 << 20, held_bytes: 64 << 20, ..LroSettings::default() };
    let mut lro = Lro::new(settings, 0);
    let mut order = 1u32;
    let mut flood = |lro: &mut Lro, count: u32| {
        let mut frames: Vec<Frame> = (0..count)
            .map(|_| {
                // Anywhere in two gigabytes, but never next.
                order = order.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let offset = 1000 + order % (1 << 30);
                frame(&Sent { connection: 0, offset, length: 1, flags: 0, stamp: 0, ecn: 0, ident: 0 })
            })
            .collect();
        let started = std::time::Instant::now();
        for frame in &mut frames {
            lro.receive(frame, 1, &mut |_| ());
        }
        // Waits: nothing; spans are compared below, with room for a disturbed machine.
        started.elapsed().as_nanos() as f64 / f64::from(count)
    };
    lro.receive(&mut frame(&Sent { connection: 0, offset: 0, length: 1, flags: 0, stamp: 0, ecn: 0, ident: 0 }), 0, &mut |_| ());
    let mut cost = |held: u64| {
        while lro.counters().held < held {
            let missing = (held - lro.counters().held).min(500) as u32;
            flood(&mut lro, missing);
        }
        // The best of some rounds, since other processes use this machine, too.
        (0..5).map(|_| flood(&mut lro, 100)).fold(f64::MAX, f64::min)
    };
    let (few, many) = (cost(100), cost(100_000));
    // The logarithm grows by two and a half, and cache misses come on top; with a list the factor would be a thousand.
    assert!(many < 50.0 * few, "a segment cost {few} ns with 100 held, {many} ns with 100000");
    // Other connections are about as fast as without the flood: their segments are not compared with the hundred
    // thousand, but they share the caches.
    let mut quiet = Lro::new(settings, 0);
    let mut times = [f64::MAX; 2];
    for round in 0..40 {
        for (lro, best) in [&mut quiet, &mut lro].into_iter().zip(&mut times) {
            let segment = |n: u32| {
                let offset = (200 * round + n) * 1448;
                frame(&Sent { connection: 1, offset, length: 1448, flags: 0, stamp: 0, ecn: 0, ident: n as u16 })
            };
            let mut frames: Vec<Frame> = (0..200).map(segment).collect();
            let started = std::time::Instant::now();
            frames.iter_mut().for_each(|frame| lro.receive(frame, 2, &mut |_| ()));
            // Waits: nothing; compared below, with room for a disturbed machine.
            *best = best.min(started.elapsed().as_nanos() as f64);
        }
    }
    assert!(times[1] < 10.0 * times[0], "another connection's 200 segments took {} ns alone, {} ns beside", times[0], times[1]);
    let mut others = 0;
    for n in 0..45 {
        let segment = Sent { connection: 2, offset: n * 1448, length: 1448, flags: 0, stamp: 0, ecn: 0, ident: n as u16 };
        lro.receive(&mut frame(&segment), 2, &mut |frame| others += frame.bytes().len());
    }
    assert!(others > 60_000, "{others} bytes of another connection came out");
    assert!(lro.held_bytes() <= settings.held_bytes);
}
