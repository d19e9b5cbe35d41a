//! Two endpoints in virtual time: what TCP must do whatever the link does.

use baton_sim::Impairments;
use baton_sim::pair::Pair;
use baton_tcp::{Config, EndReason, Events, Instant, State};
use proptest::prelude::*;

const MINUTE: u64 = 60_000_000;

fn configs() -> [Config; 2] {
    [Config::default(); 2]
}

/// Sends both ways, closes both ways, and checks every byte.
fn exchange(mut pair: Pair, bytes: u64, mut each_step: impl FnMut(&mut Pair)) -> Pair {
    for end in &mut pair.ends {
        end.send(bytes, true);
    }
    let done = pair.run_until(60 * MINUTE, |pair| {
        each_step(pair);
        pair.ends.iter().all(|end| end.verified == bytes && end.events.contains(Events::FIN))
    });
    let states = [pair.ends[0].connection.state(), pair.ends[1].connection.state()];
    assert!(done, "stuck at {:?} in {states:?}: {} and {} bytes", pair.now, pair.ends[0].verified, pair.ends[1].verified);
    assert_eq!((pair.ends[0].mismatches, pair.ends[1].mismatches), (0, 0));
    pair
}

#[test]
fn a_clean_exchange_needs_no_retransmission() {
    let link = Impairments { delay: 1000, ..Impairments::default() };
    let mut pair = exchange(Pair::new(configs(), link, 3), 1_000_000, |_| {});
    assert_eq!(pair.ends[0].connection.retransmissions() + pair.ends[1].connection.retransmissions(), 0);
    assert!(pair.run_until(2 * MINUTE, |pair| pair.ends.iter().all(|end| end.connection.state() == State::Closed)));
    assert!(pair.ends.iter().all(|end| end.connection.end_reason().is_none()));
}

/// A full link with a small buffer is used well: CUBIC and recovery keep it busy.
#[test]
fn a_bottleneck_is_filled() {
    let link = Impairments { rate: 100_000_000, delay: 10_000, buffer: 250_000, ..Impairments::default() };
    let config = Config { receive_buffer: 1 << 22, ..Config::default() };
    let mut pair = Pair::new([config; 2], link, 5);
    let start = pair.now;
    pair.ends[0].send(50_000_000, true);
    assert!(pair.run_until(MINUTE, |pair| pair.ends[1].verified == 50_000_000));
    let seconds = pair.now.since(start) as f64 / 1e6;
    assert!(seconds < 4.8, "50 MB at 100 Mb/s should take about 4.2 s, took {seconds:.2} s");
}

#[test]
fn a_closed_window_is_probed_and_opens_again() {
    let mut pair = Pair::new(configs(), Impairments { delay: 100, ..Impairments::default() }, 9);
    pair.ends[1].reads = false;
    pair.ends[0].send(1_000_000, false);
    let started = pair.now;
    pair.run_until(30_000_000, |pair| pair.now.since(started) > 20_000_000);
    let held = pair.ends[1].connection.readable();
    assert!((200_000..=262_144).contains(&held), "the window should have filled, holds {held}");
    assert_eq!(pair.ends[0].connection.state(), State::Established, "a closed window is not a dead peer");
    pair.ends[1].reads = true;
    assert!(pair.run_until(MINUTE, |pair| pair.ends[1].verified == 1_000_000));
}

/// Segments that are no multiple of the window's unit must not make the advertised edge creep past the memory.
#[test]
fn the_window_never_exceeds_the_memory() {
    let mut pair = Pair::new([Config { receive_buffer: 1 << 21, ..Config::default() }; 2], Impairments::default(), 9);
    assert!(pair.run_until(MINUTE, |pair| pair.ends[1].connection.state() == State::Established));
    let (receiver, now) = (&mut pair.ends[1].connection, pair.now);
    let mut edge = 0;
    while edge < 2 << 20 {
        let segment = baton_tcp::Segment {
            seq: receiver.rcv_nxt(),
            ack: receiver.snd_una(),
            flags: baton_wire::Flags::ACK,
            window: 1000,
            options: baton_wire::TcpOptions { timestamps: Some((u32::MAX / 2, 0)), ..Default::default() },
            congestion_experienced: false,
            length: 1001,
        };
        let received = receiver.input(&segment, now);
        if received.place < 1001 {
            break;
        }
        while let Some(transmit) = receiver.poll_transmit(now, 0) {
            edge = transmit.ack.wrapping_add(u32::from(transmit.window) << 6).wrapping_sub(receiver.rcv_read());
            assert!(edge <= 1 << 21, "{edge} bytes were advertised");
        }
    }
}

#[test]
fn a_dead_peer_ends_in_a_time_out() {
    let config = Config { user_timeout: 5000, ..Config::default() };
    let mut pair = Pair::new([config; 2], Impairments { delay: 100, ..Impairments::default() }, 9);
    assert!(pair.run_until(MINUTE, |pair| pair.ends[1].connection.state() == State::Established));
    pair.ends[0].send(1000, false);
    let (mut now, sender) = (pair.now, &mut pair.ends[0].connection);
    assert!(sender.queue(1000));
    let started = now;
    while sender.state() != State::Closed && now.since(started) < MINUTE {
        while sender.poll_transmit(now, 0).is_some() {}
        now = sender.next_timeout();
        sender.on_timeout(now);
    }
    assert_eq!(sender.end_reason(), Some(EndReason::TimedOut));
    let waited = now.since(started);
    // From the first time-out on, as in Linux, and no longer.
    assert!((5_000_000..5_500_000).contains(&waited), "TCP_USER_TIMEOUT of 5 s, waited {waited} µs");
}

#[test]
fn keep_alive_probes_and_gives_up() {
    let config = Config { keepalive: true, keepalive_idle: 1, keepalive_interval: 1, keepalive_count: 2, ..Config::default() };
    let mut pair = Pair::new([config, Config::default()], Impairments { delay: 100, ..Impairments::default() }, 9);
    let started = pair.now;
    pair.run_until(MINUTE, |pair| pair.now.since(started) > 30_000_000);
    assert_eq!(pair.ends[0].connection.state(), State::Established, "the peer answers, so the connection lives");
    // Now the peer is gone.
    let sender = &mut pair.ends[0].connection;
    let (mut now, silent_from, mut probes) = (pair.now, pair.now, 0);
    while sender.state() != State::Closed {
        now = Instant(sender.next_timeout().0.max(now.0));
        sender.on_timeout(now);
        while sender.poll_transmit(now, 0).is_some() {
            probes += 1;
        }
        assert!(now.since(silent_from) < MINUTE);
    }
    assert_eq!(sender.end_reason(), Some(EndReason::TimedOut));
    assert!(now.since(silent_from) <= 4_000_000);
    assert_eq!(probes, 3, "two probes and the RST");
}

#[test]
fn reordering_alone_soon_costs_no_retransmission() {
    let link = Impairments { rate: 50_000_000, delay: 10_000, reorder: 20_000, hold: 5_000, ..Impairments::default() };
    let config = Config { receive_buffer: 1 << 21, ..Config::default() };
    let retransmissions =
        |bytes: u64| exchange(Pair::new([config; 2], link, 21), bytes, |_| {}).ends[0].connection.retransmissions();
    // The first round trips teach the sender how far the link reorders.
    let (early, all) = (retransmissions(10_000_000), retransmissions(20_000_000));
    let share = (all - early) as f64 / (10_000_000.0 / 1448.0);
    assert!(early < 60, "{early} segments were retransmitted before the sender knew of the reordering");
    assert!(share < 0.002, "{share:.4} of the segments were retransmitted without a loss");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the link does, both directions arrive whole, and moving the connection through an image at any moment
    /// changes nothing.
    #[test]
    fn every_byte_arrives_under_any_faults(
        seed in any::<u64>(),
        loss in 0u32..60_000, reorder in 0u32..50_000, duplicate in 0u32..30_000, corrupt in 0u32..10_000,
        delay in 0u64..30_000, hold in 0u64..20_000, moves in 0u64..200, buffer in 13u32..20,
        mtu in prop::sample::select(vec![576u32, 1280, 1500, 9000]),
    ) {
        let link = Impairments { delay, loss, reorder, hold, duplicate, corrupt, rate: 200_000_000, ..Impairments::default() };
        let config = Config { receive_buffer: 1 << buffer, mtu, nodelay: seed & 1 == 1, ..Config::default() };
        let mut rng = baton_sim::Rng::new(seed);
        exchange(Pair::new([config; 2], link, seed), 300_000, |pair| {
            if moves > 0 && rng.below(2000) < moves {
                let end = rng.below(2) as usize;
                let now = pair.now;
                let by_kernel = rng.below(2) == 0;
                pair.ends[end].move_through_image(by_kernel, now);
            }
        });
    }
}
