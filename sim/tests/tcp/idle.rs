//! A connection that has carried nothing for weeks: the peer's timestamp clock has gone so far that its values compare
//! as older than the last one (RFC 7323 section 5.5).

use baton_image::{Image, NicState, Stay};
use baton_tcp::{Connection, Instant, Received, Segment};
use baton_wire::{Endpoint, Flags, Flow, TcpOptions};

const START: Instant = Instant(1_000_000);
const BUFFER: u32 = 1 << 16;
const SECOND: u64 = 1_000_000;
const DAY: u64 = 86_400 * SECOND;

/// The peer's clock at `now`, of which each tick lasts `tick` microseconds.
fn clock(now: Instant, tick: u64) -> u32 {
    (now.0 / tick) as u32
}

fn data(connection: &Connection, ahead: u32, now: Instant, tick: u64) -> Segment {
    let options = TcpOptions { timestamps: Some((clock(now, tick), 0)), ..TcpOptions::default() };
    let (seq, ack) = (connection.rcv_nxt().wrapping_add(ahead), connection.snd_una());
    Segment { seq, ack, flags: Flags::ACK, window: 500, options, length: 10, ..Segment::default() }
}

fn send_all(connection: &mut Connection, now: Instant) {
    while connection.poll_transmit(now, 0).is_some() {}
}

fn receive(connection: &mut Connection, ahead: u32, now: Instant, tick: u64) -> Received {
    let segment = data(connection, ahead, now, tick);
    let received = connection.input(&segment, now);
    send_all(connection, now);
    received
}

/// An open connection whose peer's timestamp is known.
fn open(tick: u64) -> Connection {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
    let image = Image { rcv_adv: 1, timestamps: true, ..Image::open(flow) };
    let mut connection = Connection::from_image(&image, None, BUFFER, START);
    send_all(&mut connection, START);
    assert_eq!(receive(&mut connection, 0, START, tick).delivered, 10);
    connection
}

fn written(connection: &Connection, now: Instant) -> (Image, NicState) {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
    (connection.to_image(&Image::open(flow), now).expect("an image"), connection.nic_state(now))
}

/// Twenty segments arrive, the first ones in another order if one was overtaken.
fn goes_on(connection: &mut Connection, overtaken: bool, from: Instant, tick: u64, what: &str) {
    let mut now = from;
    if overtaken {
        let first = data(connection, 10, now, tick);
        assert_eq!(connection.input(&first, now).place, 10, "{what}: what overtakes the first segment");
        now = now.after(1000);
    }
    for at in 0..20 {
        let delivered = receive(connection, 0, now, tick).delivered;
        assert!(delivered >= 10, "{what}: segment {at} is refused");
        now = now.after(2 * tick.max(1000));
    }
    // And what was sent before is refused again.
    let old = data(connection, 0, now.ago(10 * SECOND), tick);
    assert_eq!(connection.input(&old, now).place, 0, "{what}: an old segment is taken");
}

/// Clocks that tick every millisecond, as most do, every microsecond (Linux's with tcp_usec_ts), and every ten
/// milliseconds.
const IDLE: [(u64, &[u64]); 3] = [
    (1000, &[DAY, 20 * DAY, 24 * DAY, 25 * DAY, 30 * DAY, 49 * DAY, 51 * DAY, 80 * DAY, 400 * DAY]),
    (1, &[600 * SECOND, 2200 * SECOND, 3000 * SECOND, 4294 * SECOND, 5000 * SECOND, DAY, 25 * DAY]),
    (10_000, &[25 * DAY, 100 * DAY, 249 * DAY, 400 * DAY]),
];

#[test]
fn any_idle_time_is_survived() {
    for (tick, times) in IDLE {
        for (idle, overtaken) in times.iter().flat_map(|idle| [(*idle, false), (*idle, true)]) {
            let mut connection = open(tick);
            let what = format!("idle for {} s, ticks of {tick} µs, overtaken {overtaken}", idle / SECOND);
            goes_on(&mut connection, overtaken, START.after(idle), tick, &what);
        }
    }
}

/// The time that a connection has been idle moves with it, from NIC to NIC.
#[test]
fn idle_time_counts_on_after_a_move() {
    for (tick, times) in IDLE {
        for (idle, share) in times.iter().flat_map(|idle| [1, 5, 9].map(|share| (*idle, share))) {
            let (mut connection, moved_at) = (open(tick), START.after(idle / 10 * share));
            let (image, nic) = written(&connection, moved_at);
            connection = Connection::from_image(&image, Some(&nic), BUFFER, moved_at);
            send_all(&mut connection, moved_at);
            let what = format!("idle for {} s, moved after {share}/10 of it, ticks of {tick} µs", idle / SECOND);
            goes_on(&mut connection, false, START.after(idle), tick, &what);
        }
    }
}

/// A connection that was in the kernel for so long: the agent completes the kernel's image with what the NIC knew. The
/// kernel received something, or nothing, and does not say when.
#[test]
fn idle_time_counts_on_in_the_kernel() {
    for (tick, times) in IDLE {
        for (idle, received) in times.iter().flat_map(|idle| [(*idle, 0), (*idle, 10)]) {
            let connection = open(tick);
            let (image, nic) = written(&connection, START);
            let back = START.after(idle);
            let rcv_nxt = image.rcv_nxt.wrapping_add(received);
            let clock_then = image.ts_clock.wrapping_add((idle / 1000) as u32);
            let mut shown =
                Image { rcv_nxt, rcv_adv: rcv_nxt.wrapping_add(BUFFER / 2), ts_recent: 0, ts_clock: clock_then, ..image };
            let kept = Stay::new(image, Some(nic), START.0).complete(&mut shown, 0, back.0).expect("nothing was sent");
            let mut connection = Connection::from_image(&shown, Some(&kept), BUFFER, back);
            send_all(&mut connection, back);
            let what = format!("in the kernel for {} s, ticks of {tick} µs, {received} bytes received", idle / SECOND);
            goes_on(&mut connection, false, back, tick, &what);
        }
    }
}

/// A kernel that gets the connection is given no timestamp that its peer's next one cannot be compared with: it would
/// count it as new.
#[test]
fn the_kernel_gets_no_timestamp_that_is_too_old() {
    let connection = open(1000);
    for (idle, is_told) in [(SECOND, true), (1800 * SECOND, true), (2200 * SECOND, false), (30 * DAY, false)] {
        let (image, _) = written(&connection, START.after(idle));
        assert_eq!(image.ts_recent != 0, is_told, "after {} s", idle / SECOND);
    }
}

/// Where the host does not wear a connection's window down while it is idle (tcp_slow_start_after_idle), nor does a
/// NIC, also after another one had it.
#[test]
fn an_idle_connection_keeps_its_window_if_the_host_has_it_so() {
    for (worn_down, moves) in [(false, false), (false, true), (true, false), (true, true)] {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
        let image = Image { cwnd: 100, slow_start_after_idle: worn_down, sent_ago: Some(0), ..Image::open(flow) };
        let mut connection = Connection::from_image(&image, None, BUFFER, START);
        if moves {
            let (image, state) = written(&connection, START);
            connection = Connection::from_image(&image, Some(&state), BUFFER, START);
        }
        send_all(&mut connection, START);
        assert!(connection.queue(1000));
        send_all(&mut connection, START.after(60 * SECOND));
        assert_eq!(connection.cwnd(), if worn_down { 10 } else { 100 }, "moved {moves}");
    }
}
