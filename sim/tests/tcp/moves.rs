//! A connection that moves from NIC to NIC goes on as if it had stayed, whatever the numbers that come with it.

use baton_image::nic::{self, Phase, SendTimer};
use baton_image::{Image, MAX_ENCODED, NicState, State as ImageState, Stay};
use baton_sim::pair::Pair;
use baton_sim::{Impairments, Rng};
use baton_tcp::{Config, Connection, Events, Instant, Segment, State};
use baton_wire::{Endpoint, Flags, Flow, SackBlocks, TcpOptions};
use proptest::prelude::*;

const NOW: Instant = Instant(1_000_000_000);
const MSS: u32 = 1448;
const BUFFER: u32 = 1 << 16;

fn flow() -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 }
}

/// Where both ends are at a moment: acknowledged, sent, received, the next timer, segments sent again.
type Position = (Instant, [(u32, u32, u32, Instant, u64); 2]);

/// Where both ends are after each event, until they have everything.
fn way(seed: u64, link: Impairments, moves: bool) -> Vec<Position> {
    // No more segments in flight than there are runs, so that every one keeps its own fate.
    let config = Config { receive_buffer: 1 << 15, ..Config::default() };
    let mut pair = Pair::new([config; 2], link, seed);
    pair.ends.iter_mut().for_each(|end| end.send(300_000, true));
    let (mut rng, mut way) = (Rng::new(seed), Vec::new());
    let done = pair.run_until(3_600_000_000, |pair| {
        let (end, now) = (rng.below(2) as usize, pair.now);
        way.push((now, [0, 1].map(|end| position(&pair.ends[end].connection))));
        if rng.below(4) == 0 && moves {
            pair.ends[end].move_through_image(false, now);
        }
        pair.ends.iter().all(|end| end.verified == 300_000 && end.events.contains(Events::FIN))
    });
    assert!(done, "stuck");
    way
}

fn position(connection: &Connection) -> (u32, u32, u32, Instant, u64) {
    (connection.snd_una(), connection.snd_nxt(), connection.rcv_nxt(), connection.next_timeout(), connection.retransmissions())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Both ends are where they would be without moves at every moment, with loss, reordering and duplication.
    #[test]
    fn moves_between_nics_change_nothing(
        seed in any::<u64>(), loss in 0u32..50_000, reorder in 0u32..50_000, duplicate in 0u32..30_000, delay in 0u64..30_000,
    ) {
        let link = Impairments { delay, loss, reorder, hold: 5_000, duplicate, rate: 50_000_000, ..Impairments::default() };
        let (moves, stays) = (way(seed, link, true), way(seed, link, false));
        let parted = moves.iter().zip(&stays).find(|(moves, stays)| moves != stays);
        prop_assert_eq!(parted, None);
        prop_assert_eq!(moves.len(), stays.len());
    }
}

/// A connection with ten segments in flight, of which the fifth and the last five are SACKed.
fn in_recovery() -> Connection {
    let mut connection = Connection::from_image(&Image::open(flow()), None, BUFFER, NOW);
    assert!(connection.queue(10 * MSS));
    while connection.poll_transmit(NOW, 0).is_some() {}
    acknowledge(&mut connection, 1, &[(4, 5)], NOW.after(100));
    while connection.poll_transmit(NOW.after(100), 0).is_some() {}
    acknowledge(&mut connection, 1, &[(5, 10), (4, 5)], NOW.after(200));
    connection
}

/// The peer acknowledges up to `ack`, and SACKs segments by their numbers from 0.
fn acknowledge(connection: &mut Connection, ack: u32, blocks: &[(u32, u32)], now: Instant) {
    let mut sack = SackBlocks::default();
    blocks.iter().for_each(|(first, end)| sack.push(1 + first * MSS, 1 + end * MSS));
    let options = TcpOptions { timestamps: Some((2, 0)), sack, ..TcpOptions::default() };
    let segment = Segment { seq: 1, ack, flags: Flags::ACK, window: 512, options, ..Segment::default() };
    connection.input(&segment, now);
}

/// Only what the peer lacks is sent again by the next NIC, as recovery allows.
#[test]
fn the_next_nic_knows_what_was_sacked_and_lost() {
    let (mut stays, now) = (in_recovery(), NOW.after(200));
    let image = stays.to_image(&Image::open(flow()), now).expect("an image");
    let mut moves = Connection::from_image(&image, Some(&stays.nic_state(now)), BUFFER, now);
    assert_eq!(moves.info(), stays.info());
    let sent = |connection: &mut Connection| -> Vec<_> { std::iter::from_fn(|| connection.poll_transmit(now, 0)).collect() };
    let (expected, found) = (sent(&mut stays), sent(&mut moves));
    assert!(expected.iter().any(|transmit| transmit.seq == 1) && expected.len() < 5, "{expected:?}");
    assert_eq!(found, expected);
    assert_eq!(moves.next_timeout(), stays.next_timeout());
}

/// What a kernel shows of a connection that it has from a NIC: numbers and queues, but no congestion state and no times
/// of segments.
fn shown_by_kernel(image: &Image) -> Image {
    let anew = Image { cwnd: 10, ssthresh: u32::MAX, srtt: 0, rttvar: 0, min_rtt: 0, reordering_seen: false, ..*image };
    Image { ts_recent: 0, sent_ago: Some(0), ..anew }
}

/// Three milliseconds in the kernel, in which nothing was sent: the next NIC is in the same recovery, and its timers
/// have gone on.
#[test]
fn a_short_stay_in_the_kernel_leaves_recovery_as_it_was() {
    let (mut stays, now, later) = (in_recovery(), NOW.after(200), NOW.after(3200));
    let image = stays.to_image(&Image::open(flow()), now).expect("an image");
    let mut shown = shown_by_kernel(&image);
    let kept = Stay::new(image, Some(stays.nic_state(now)), now.0).complete(&mut shown, 0, later.0);
    let mut moves = Connection::from_image(&shown, kept.as_ref(), BUFFER, later);
    assert_eq!((moves.info(), moves.next_timeout()), (stays.info(), stays.next_timeout()));
    let sent = |connection: &mut Connection| -> Vec<_> {
        let all = std::iter::from_fn(|| connection.poll_transmit(later, 0));
        all.map(|transmit| (transmit.seq, transmit.length)).filter(|(_, length)| *length > 0).collect()
    };
    let expected = sent(&mut stays);
    assert!(!expected.is_empty());
    assert_eq!(sent(&mut moves), expected);
}

/// From the kernel come 2500 bytes in flight and a FIN, sent 50 ms ago on a path of 100 ms.
fn adopted(sent_ago: Option<u32>) -> Connection {
    let image = Image {
        state: ImageState::FinWait1,
        snd_nxt: 2502,
        snd_end: 2501,
        srtt: 100_000,
        rttvar: 10_000,
        sent_ago,
        ..Image::open(flow())
    };
    Connection::from_image(&image, None, BUFFER, NOW)
}

/// The tail is probed two round trips after it was sent (RFC 8985 section 7.2), or soon if it is unknown when that was.
#[test]
fn the_time_since_data_was_sent_counts_for_the_next_owner() {
    let wait = |sent_ago| adopted(sent_ago).next_timeout().since(NOW);
    assert_eq!(wait(Some(50_000)), 152_000);
    assert_eq!(wait(Some(4_000_000_000)), 0, "a time that has passed is due at once");
    assert_eq!(wait(None), 10_000);
}

/// The FIN is a segment of its own, and the last data that is queued is pushed when it is sent again (RFC 9293
/// MUST-61).
#[test]
fn what_was_adopted_is_sent_again_as_the_kernel_sent_it() {
    let mut connection = adopted(Some(0));
    while connection.poll_transmit(NOW, 0).is_some() {}
    let mut sent_again = |acknowledged: Option<u32>| -> Vec<_> {
        let now = connection.next_timeout();
        match acknowledged {
            Some(ack) => acknowledge(&mut connection, ack, &[], now),
            None => drop(connection.on_timeout(now)),
        }
        let sent = std::iter::from_fn(|| connection.poll_transmit(now, 0));
        sent.map(|transmit| (transmit.seq, transmit.length, transmit.flags)).collect()
    };
    assert_eq!(sent_again(None), [(2501, 0, Flags::FIN | Flags::ACK)], "the probe is the FIN alone");
    assert_eq!(sent_again(None), [(1, MSS, Flags::ACK)], "the time-out");
    // Forward RTO-recovery (RFC 5682) would send new data now, of which there is none.
    let rest = [sent_again(Some(1 + MSS)), sent_again(None)].concat();
    assert_eq!(rest.first(), Some(&(1 + MSS, 2500 - MSS, Flags::ACK | Flags::PSH)), "{rest:?}");
}

/// Numbers that a NIC could have written, and others.
struct Forger(Rng);

impl Forger {
    fn number(&mut self) -> u32 {
        let near = [0, 1, 2, u32::MAX, u32::MAX - 1, 1 << 31, 1 << 30, 1 + 10 * MSS];
        match self.0.below(3) {
            0 => near[self.0.below(near.len() as u64) as usize],
            1 => self.0.below(20_000) as u32,
            _ => self.0.next_u64() as u32,
        }
    }

    fn long(&mut self) -> u64 {
        if self.flag() { self.number().into() } else { self.0.next_u64() }
    }

    fn flag(&mut self) -> bool {
        self.0.below(2) == 0
    }

    fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.flag().then(|| value(self))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.0.below(of.len() as u64) as usize]
    }

    fn timers(&mut self) -> nic::Timers {
        let sends = [SendTimer::Off, SendTimer::Retransmit, SendTimer::TailLoss, SendTimer::Reordering, SendTimer::Persist];
        nic::Timers {
            send: self.one_of(&sends),
            send_in: self.maybe(Self::number),
            ack_in: self.maybe(Self::number),
            keepalive_in: self.maybe(Self::long),
            time_wait_in: self.maybe(Self::number),
            unanswered_for: self.maybe(Self::long),
            probes: self.number() as u8,
        }
    }

    fn congestion(&mut self) -> nic::Congestion {
        nic::Congestion {
            w_max: self.number(),
            epoch_age: self.maybe(Self::long),
            k: self.number(),
            origin: self.number(),
            w_est: self.number(),
            credit: self.number() as u16,
            round_min: self.number(),
            delay_min: self.number(),
            round_samples: self.number() as u8,
            round_end: self.number(),
            min_rtt_age: self.number(),
            backoff: self.number() as u8,
        }
    }

    fn recovery(&mut self) -> nic::Recovery {
        nic::Recovery {
            phase: self.one_of(&[Phase::Open, Phase::Disorder, Phase::Reduced, Phase::Recovery, Phase::Loss]),
            high_seq: self.number(),
            undo: self.maybe(|forger| (forger.number(), forger.number())),
            undo_retransmits: self.number(),
            undo_counted: self.flag(),
            last_echo: self.maybe(Self::number),
            first_retransmit: self.maybe(Self::number),
            prior_cwnd: self.number(),
            prr_delivered: self.number(),
            prr_out: self.number(),
            forward_rto: self.flag(),
            reordering: self.number(),
            reorder_steps: self.number() as u8,
            reorder_persist: self.number() as u8,
            reorder_round: self.maybe(Self::number),
            probe: self.maybe(|forger| (forger.number(), forger.flag())),
            tail_probe_pending: self.flag(),
            duplicates: self.number(),
            limited: self.flag(),
            most_out: self.number(),
            usage_end: self.number(),
            retransmissions: self.number(),
            delivered: self.number(),
            sent_age: self.maybe(Self::long),
        }
    }

    /// Any state whose flight is of `bytes`.
    fn state(&mut self, bytes: u32) -> NicState {
        let mut flight = nic::Flight::default();
        let mut left = bytes;
        while left > 0 {
            let data = (1 + self.0.below(2000) as u32).min(left);
            let fate = self.one_of(&[0, nic::SACKED, nic::LOST, nic::LOST | nic::RETRANSMITTED | nic::EVER, nic::RETRANSMITTED]);
            let age = if self.flag() { 5 } else { self.number() };
            flight.push(data as u16, false, age, fate);
            left -= data;
        }
        NicState {
            sending: nic::Sending {
                small_end: self.number(),
                cwr_pending: self.flag(),
                probe_due: self.flag(),
                forced: self.flag(),
            },
            receiving: nic::Receiving {
                peer_isn: self.number(),
                unacked: self.number(),
                last_ack: self.number(),
                quick_acks: self.number() as u8,
                ts_known: self.flag(),
                silent_for: self.long(),
                ack_due: self.flag(),
                echo: self.flag(),
                duplicate: self.maybe(|forger| (forger.number(), forger.number())),
                recent: std::array::from_fn(|_| self.number()),
                challenge_in: self.number(),
            },
            timers: self.timers(),
            congestion: self.congestion(),
            recovery: self.recovery(),
            newest: self.maybe(|forger| nic::Newest { age: forger.number(), end: forger.number(), rtt: forger.number() }),
            flight,
        }
    }
}

/// What a forged image makes a connection send stays within its queue, and what it accepts within its window; the
/// connection ends or delivers all its bytes to a peer that acknowledges them.
fn lives_or_ends(seed: u64) {
    let mut forger = Forger(Rng::new(seed));
    let (queued, closes) = (forger.0.below(20_000) as u32, forger.flag());
    let sent = if queued == 0 { 0 } else { forger.0.below(u64::from(queued)) as u32 };
    let image = Image {
        state: if closes { ImageState::FinWait1 } else { ImageState::Established },
        snd_nxt: 1 + sent,
        snd_end: 1 + queued,
        timestamps: forger.flag(),
        sack: forger.flag(),
        ecn: forger.flag(),
        cwnd: forger.number(),
        ssthresh: forger.number(),
        srtt: forger.number(),
        rttvar: forger.number() >> 2,
        min_rtt: forger.number(),
        rcv_adv: 1 + 30_000,
        ..Image::open(flow())
    };
    let mut bytes = [0u8; MAX_ENCODED];
    let length = image.encode_with(Some(&forger.state(sent)), &mut bytes).expect("room");
    let (image, state) = Image::decode_with(&bytes[..length]).expect("what is in flight is the image's");
    let mut now = NOW;
    let mut connection = Connection::from_image(&image, state.as_ref(), BUFFER, now);
    let end = 1 + queued + u32::from(closes);
    let mut rounds = 0;
    while connection.snd_una() != end && connection.state() != State::Closed {
        rounds += 1;
        assert!(rounds < 2000, "{} of {queued} bytes are not acknowledged: {:?}", end - connection.snd_una(), connection.info());
        let mut reached = connection.snd_una();
        for burst in 0.. {
            assert!(burst < 1000, "it sends without end");
            let Some(transmit) = connection.poll_transmit(now, 3000) else { break };
            let behind = transmit.seq.wrapping_add(transmit.length) + u32::from(transmit.flags.contains(Flags::FIN));
            assert!(transmit.seq <= end && behind <= end, "{transmit:?}");
            assert!(connection.rcv_adv() <= connection.rcv_read() + BUFFER, "the window exceeds the memory");
            if transmit.seq <= reached {
                reached = reached.max(behind);
            }
        }
        now = now.after(forger.0.below(50_000));
        let advances = reached != connection.snd_una() && forger.0.below(4) > 0;
        if !advances {
            now = if connection.next_timeout() == Instant::NEVER { now } else { connection.next_timeout().max(now) };
            connection.on_timeout(now);
            continue;
        }
        let options = TcpOptions { timestamps: image.timestamps.then_some((2, 1)), ..TcpOptions::default() };
        let seq = connection.rcv_nxt();
        let length = forger.0.below(1400) as u32;
        let segment = Segment { seq, ack: reached, flags: Flags::ACK, window: 512, options, length, ..Segment::default() };
        let received = connection.input(&segment, now);
        assert!(received.place <= length);
        connection.consumed(connection.readable());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_forged_state_harms_its_own_connection_only(seed in any::<u64>()) {
        lives_or_ends(seed);
    }
}
