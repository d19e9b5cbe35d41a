//! A peer whose window is closed or small (RFC 9293 section 3.8.6): how it is probed, for how long, and what leaves all
//! the same.

use baton_image::Image;
use baton_tcp::{Connection, EndReason, Instant, Segment, State};
use baton_wire::{Endpoint, Flags, Flow, TcpOptions};

const NOW: Instant = Instant(1_000_000);
const SECOND: u64 = 1_000_000;
const MINUTE: u64 = 60 * SECOND;
const DAY: u64 = 24 * 60 * MINUTE;
/// The largest retransmission time-out.
const LONGEST: u64 = 120 * SECOND;

/// An open connection whose peer's window is `window`, of which it once was 60,000 bytes.
fn connection(window: u32) -> Connection {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
    let image = Image {
        rcv_adv: 1,
        snd_wnd: window,
        max_window: 60_000,
        snd_wscale: 0,
        timestamps: false,
        srtt: 1000,
        rttvar: 500,
        ..Image::open(flow)
    };
    let mut connection = Connection::from_image(&image, None, 1 << 16, NOW);
    while connection.poll_transmit(NOW, 0).is_some() {}
    connection
}

fn acknowledgement(connection: &Connection, ack: u32, window: u32) -> Segment {
    Segment { seq: connection.rcv_nxt(), ack, flags: Flags::ACK, window: window as u16, ..Segment::default() }
}

/// What a peer does with each segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Peer {
    /// It answers, and has no room.
    Full,
    /// It answers, and has room for so many bytes.
    Small(u32),
    /// It is gone.
    Silent,
}

/// What was sent, and when.
type Sent = Vec<(Instant, u32, u32)>;

/// Plays the peer for `time`, or until the connection has ended. Returns when that was, and what was sent.
fn play(connection: &mut Connection, peer: Peer, time: u64) -> (Instant, Sent) {
    let (mut now, mut sent) = (NOW, Vec::new());
    let mut received = connection.snd_una();
    loop {
        while let Some(transmit) = connection.poll_transmit(now, 0) {
            sent.push((now, transmit.seq, transmit.length));
            let window = match peer {
                Peer::Silent => continue,
                Peer::Full => 0,
                Peer::Small(window) => {
                    assert!(transmit.length <= window, "{} bytes into a window of {window}", transmit.length);
                    if transmit.seq == received {
                        received = received.wrapping_add(transmit.length);
                    }
                    window
                }
            };
            let answer = acknowledgement(connection, received, window);
            connection.input(&answer, now.after(200));
        }
        let next = connection.next_timeout();
        if connection.state() == State::Closed || next == Instant::NEVER || next > NOW.after(time) {
            return (now, sent);
        }
        now = next;
        connection.on_timeout(now);
    }
}

#[test]
fn an_answering_peer_is_probed_for_as_long_as_the_program_waits_and_ever_less_often() {
    let mut waits = connection(0);
    waits.queue(5000);
    let (_, sent) = play(&mut waits, Peer::Full, 3 * DAY);
    assert_eq!((waits.state(), waits.end_reason()), (State::Established, None));
    let gaps: Vec<u64> = sent.windows(2).map(|pair| pair[1].0.since(pair[0].0)).collect();
    assert!(gaps.iter().take(9).zip(gaps.iter().skip(1)).all(|(gap, next)| *next == 2 * gap || *next == LONGEST), "{gaps:?}");
    assert!(gaps[10..].iter().all(|gap| *gap == LONGEST), "{gaps:?}");
    // And as soon as there is room the data goes.
    let now = waits.next_timeout();
    let opens = acknowledgement(&waits, 1, 60_000);
    waits.input(&opens, now);
    assert_eq!(waits.poll_transmit(now, 0).map(|transmit| transmit.seq), Some(1));
}

/// As Linux's orphans: while the peer answers until the interval is the longest, else for eight probes.
#[test]
fn a_closed_connection_ends_whatever_its_peer_does() {
    for (peer, bytes) in [(Peer::Full, 5000), (Peer::Silent, 5000), (Peer::Silent, 0)] {
        for shut_down_before in [false, true] {
            let mut closed = connection(0);
            closed.queue(bytes);
            if shut_down_before {
                closed.shutdown();
            }
            closed.close();
            let (end, sent) = play(&mut closed, peer, DAY);
            assert_eq!(
                (closed.state(), closed.end_reason()),
                (State::Closed, Some(EndReason::TimedOut)),
                "{peer:?}, {bytes} bytes"
            );
            assert!((20 * SECOND..10 * MINUTE).contains(&end.since(NOW)), "{peer:?}, {bytes} bytes: after {} µs", end.since(NOW));
            assert!(sent.len() <= 12, "{peer:?}: {} segments", sent.len());
        }
    }
}

/// Data in flight when the peer takes its window back is sent again, as probes; so is a FIN.
#[test]
fn a_window_that_is_taken_back_ends_only_what_is_closed() {
    for closed in [false, true] {
        let mut tcp = connection(5000);
        tcp.queue(3000);
        if closed {
            tcp.close();
        }
        let (end, sent) = play(&mut tcp, Peer::Full, 2 * DAY);
        assert_eq!(tcp.state() == State::Closed, closed);
        assert!(!closed || end.since(NOW) < 10 * MINUTE);
        assert!(sent.len() < 2 * 24 * 60, "{} segments", sent.len());
    }
}

/// TCP_USER_TIMEOUT also bounds how long data may wait for the window (tcp(7)), though its probes are answered.
#[test]
fn the_user_timeout_counts_while_the_window_is_closed() {
    for peer in [Peer::Full, Peer::Silent] {
        let mut tcp = connection(0);
        tcp.set_user_timeout(30_000);
        tcp.queue(10);
        let (end, _) = play(&mut tcp, peer, DAY);
        assert_eq!((tcp.state(), tcp.end_reason()), (State::Closed, Some(EndReason::TimedOut)), "{peer:?}");
        assert!((30 * SECOND..2 * MINUTE).contains(&end.since(NOW)), "{peer:?}: after {} µs", end.since(NOW));
    }
}

/// Without answers the connection ends, and keep-alive does not prolong it.
#[test]
fn probes_that_nobody_answers_end_the_connection() {
    for keepalive in [None, Some(1), Some(700)] {
        let mut tcp = connection(0);
        if let Some(idle) = keepalive {
            tcp.set_keepalive(true, idle, 75, 9, NOW);
        }
        tcp.queue(10);
        let (end, sent) = play(&mut tcp, Peer::Silent, DAY);
        assert_eq!((tcp.state(), tcp.end_reason()), (State::Closed, Some(EndReason::TimedOut)));
        assert!((5 * MINUTE..30 * MINUTE).contains(&end.since(NOW)), "after {} µs", end.since(NOW));
        assert_eq!(sent.len(), 15);
    }
}

/// RFC 9293 section 3.8.6.2.1: a window smaller than a segment and than half of the largest is filled after a second at
/// most.
#[test]
fn a_small_window_is_used() {
    for (window, before, nodelay, cork) in
        [(1, 60_000, false, false), (100, 60_000, true, false), (700, 60_000, false, true), (1447, 0, false, false)]
    {
        let mut tcp = connection(before);
        tcp.set_nodelay(nodelay);
        tcp.set_cork(cork);
        if before > 0 {
            for _ in 0..2 {
                let shrinks = Segment { length: 1, ..acknowledgement(&tcp, 1, window) };
                tcp.input(&shrinks, NOW);
            }
            assert_eq!(tcp.info().snd_wnd, window);
        }
        tcp.queue(60 * window);
        let first = tcp.snd_una();
        if before == 0 {
            // The window was closed for so long that probes are rare.
            let (_, sent) = play(&mut tcp, Peer::Full, 10 * MINUTE);
            assert!(sent.len() > 8);
            let now = tcp.next_timeout().ago(90 * SECOND);
            let opens = acknowledgement(&tcp, first, window);
            tcp.input(&opens, now);
            while tcp.poll_transmit(now, 0).is_some() {}
            assert!(tcp.next_timeout() <= now.after(SECOND), "waits for {} µs", tcp.next_timeout().since(now));
            continue;
        }
        let (end, sent) = play(&mut tcp, Peer::Small(window), MINUTE);
        assert_eq!(tcp.snd_una(), first.wrapping_add(60 * window), "window of {window}: {sent:?}");
        assert!(end.since(NOW) <= 60 * SECOND);
    }
}

/// RFC 9293 section 3.10.7.4: SND.UNA =< SEG.ACK. An acknowledgement that came late says nothing about the window now,
/// though its sequence number is new.
#[test]
fn the_window_of_an_old_acknowledgement_is_not_taken() {
    let mut tcp = connection(60_000);
    tcp.queue(2000);
    while tcp.poll_transmit(NOW, 0).is_some() {}
    let all = acknowledgement(&tcp, 2001, 50_000);
    tcp.input(&all, NOW);
    for (acknowledges, window, is_taken) in [(2001, 55_000, true), (1001, 7, false), (2001, 300, true)] {
        let before = tcp.info().snd_wnd;
        let data = Segment { length: 10, ..acknowledgement(&tcp, acknowledges, window) };
        assert_eq!(tcp.input(&data, NOW).delivered, 10, "its data counts");
        assert_eq!(tcp.info().snd_wnd, if is_taken { window } else { before });
    }
    let closes = Segment { seq: 21, ..acknowledgement(&tcp, 2001, 0) };
    tcp.input(&closes, NOW);
    assert_eq!(tcp.info().snd_wnd, 0, "one that closes the window counts as newer");
}

/// RFC 5681 section 4.2: every second full segment is acknowledged, as large as the peer makes them.
#[test]
fn every_second_full_segment_of_a_peer_with_small_ones_is_acknowledged() {
    for size in [500, 536, 1000, 1448] {
        let mut tcp = connection(60_000);
        tcp.set_quick_ack(false);
        let mut acknowledged = 0;
        for _ in 0..10 {
            let data = Segment { length: size, ..acknowledgement(&tcp, 1, 60_000) };
            tcp.input(&data, NOW);
            while tcp.poll_transmit(NOW, 0).is_some() {
                acknowledged += 1;
            }
        }
        assert_eq!(acknowledged, 5, "segments of {size}");
    }
}

/// RFC 9293 section 3.10.7.4: a FIN that comes again in TIME-WAIT is acknowledged, and makes it last from now on.
#[test]
fn a_fin_in_time_wait_makes_it_last() {
    let mut tcp = connection(60_000);
    tcp.shutdown();
    while tcp.poll_transmit(NOW, 0).is_some() {}
    let fin = Segment { flags: Flags::ACK | Flags::FIN, ..acknowledgement(&tcp, 2, 60_000) };
    tcp.input(&fin, NOW);
    while tcp.poll_transmit(NOW, 0).is_some() {}
    assert_eq!(tcp.state(), State::TimeWait);
    for nth in 1..10 {
        let now = NOW.after(nth * 50 * SECOND);
        tcp.on_timeout(now);
        assert_eq!(tcp.state(), State::TimeWait, "after {nth} repetitions");
        tcp.input(&fin, now);
        assert!(tcp.poll_transmit(now, 0).is_some(), "it is acknowledged");
    }
    assert_eq!(tcp.next_timeout(), NOW.after(9 * 50 * SECOND + MINUTE));
}

/// A host that slept for hours acknowledges: the round trip that this seems to be leaves the time-outs what they can
/// be.
#[test]
fn a_round_trip_of_hours_overflows_nothing() {
    for hours in [1, 2, 30, 1000] {
        for timestamps in [false, true] {
            let mut tcp = connection(60_000);
            let mut now = NOW;
            for _ in 0..4 {
                let end = tcp.snd_end().wrapping_add(100);
                tcp.queue(100);
                while tcp.poll_transmit(now, 0).is_some() {}
                now = now.after(hours * 60 * MINUTE);
                let options = TcpOptions { timestamps: timestamps.then_some((2, now.millis())), ..TcpOptions::default() };
                let answer = Segment { options, ..acknowledgement(&tcp, end, 60_000) };
                tcp.input(&answer, now);
            }
            let info = tcp.info();
            assert!(info.srtt <= LONGEST as u32 && info.rto <= LONGEST && info.rto >= info.srtt.into(), "{info:?}");
        }
    }
}

/// A FIN has a sequence number, and so needs room in the peer's window (RFC 9293 section 3.10.7.4: SND.UNA + SND.WND
/// bounds what is sent): a closed window is probed until it opens. Data in front of the FIN does not wait for room for
/// both.
#[test]
fn a_fin_waits_for_the_window() {
    for bytes in [0, 100] {
        let mut tcp = connection(bytes);
        tcp.queue(bytes);
        tcp.shutdown();
        let data = tcp.poll_transmit(NOW, 0);
        assert_eq!(
            data.map(|sent| (sent.seq, sent.length, sent.flags.contains(Flags::FIN))),
            (bytes > 0).then_some((1, bytes, false))
        );
        assert_eq!(tcp.poll_transmit(NOW, 0), None, "behind {bytes} bytes");
        let end = 1 + bytes;
        for _ in 0..2 {
            let full = acknowledgement(&tcp, end, 0);
            tcp.input(&full, NOW);
        }
        let mut now = NOW;
        for _ in 0..5 {
            now = tcp.next_timeout();
            assert!(now < NOW.after(MINUTE), "the window is not probed");
            tcp.on_timeout(now);
            while let Some(sent) = tcp.poll_transmit(now, 0) {
                assert!(!sent.flags.contains(Flags::FIN) && sent.length == 0, "{sent:?}");
                let full = acknowledgement(&tcp, end, 0);
                tcp.input(&full, now);
            }
        }
        let opens = acknowledgement(&tcp, end, 1);
        tcp.input(&opens, now);
        let fin = tcp.poll_transmit(now, 0).expect("the FIN");
        assert_eq!((fin.seq, fin.length, fin.flags.contains(Flags::FIN)), (end, 0, true));
    }
}
