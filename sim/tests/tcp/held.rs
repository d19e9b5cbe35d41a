//! A partial segment that the program holds back, by MSG_MORE or TCP_CORK: what lets it go.

use baton_image::Image;
use baton_tcp::{Connection, Instant, Segment};
use baton_wire::{Endpoint, Flags, Flow};

const NOW: Instant = Instant(1_000_000);
const MILLI: u64 = 1000;

/// An open connection at rest.
fn connection() -> Connection {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
    let image =
        Image { rcv_adv: 60_001, snd_wnd: 60_000, max_window: 60_000, timestamps: false, srtt: 1000, ..Image::open(flow) };
    let mut connection = Connection::from_image(&image, None, 1 << 16, NOW);
    // A window update.
    let _ = sent(&mut connection, NOW);
    connection
}

/// The payloads of what is sent now.
fn sent(connection: &mut Connection, now: Instant) -> Vec<u32> {
    std::iter::from_fn(|| connection.poll_transmit(now, 0)).map(|transmit| transmit.length).collect()
}

/// The peer sends so many bytes, and acknowledges everything.
fn receive(connection: &mut Connection, length: u32, flags: Flags) {
    let window = 60_000;
    let segment = Segment { seq: connection.rcv_nxt(), ack: connection.snd_nxt(), flags, window, length, ..Segment::default() };
    connection.input(&segment, NOW);
}

/// Queues bytes with MSG_MORE, which wait.
fn hold(connection: &mut Connection) {
    assert!(connection.queue(100));
    connection.hold_back(true);
    assert_eq!(sent(connection, NOW), []);
}

/// Acknowledgements that this end sends by itself do not take along what is held back: the delayed one, and
/// the one that announces more room.
#[test]
fn acknowledgements_do_not_take_it_along() {
    let mut tcp = connection();
    tcp.set_quick_ack(false);
    hold(&mut tcp);
    receive(&mut tcp, 50, Flags::ACK);
    assert_eq!(sent(&mut tcp, NOW), [], "the acknowledgement is delayed");
    let delayed = tcp.next_timeout();
    assert!(delayed < NOW.after(100 * MILLI));
    tcp.on_timeout(delayed);
    assert_eq!(sent(&mut tcp, delayed), [0]);
    for _ in 0..30 {
        receive(&mut tcp, 1400, Flags::ACK);
        let _ = sent(&mut tcp, delayed);
    }
    assert!(tcp.consumed(30 * 1400 + 50));
    assert_eq!(sent(&mut tcp, delayed), [0], "more room");
    let last = NOW.after(200 * MILLI);
    tcp.on_timeout(NOW.after(199 * MILLI));
    assert_eq!(sent(&mut tcp, NOW.after(199 * MILLI)), []);
    tcp.on_timeout(last);
    assert_eq!(sent(&mut tcp, last), [100]);
}

/// What lets it go: the next bytes, an acknowledgement of earlier ones, a segment that is not the next one in order,
/// and TCP_NODELAY.
#[test]
fn others_let_it_go() {
    let mut tcp = connection();
    hold(&mut tcp);
    assert!(tcp.queue(10));
    tcp.hold_back(false);
    assert_eq!(sent(&mut tcp, NOW), [110]);
    hold(&mut tcp);
    receive(&mut tcp, 0, Flags::ACK);
    assert_eq!(sent(&mut tcp, NOW), [100], "an acknowledgement");
    receive(&mut tcp, 0, Flags::ACK);
    hold(&mut tcp);
    receive(&mut tcp, 10, Flags::ACK | Flags::FIN);
    assert_eq!(sent(&mut tcp, NOW)[0], 100, "a FIN");
    let mut tcp = connection();
    hold(&mut tcp);
    tcp.set_nodelay(true);
    assert_eq!(sent(&mut tcp, NOW), [100], "TCP_NODELAY");
}

/// TCP_NODELAY pushes what waits, under a cork, too; what is queued later waits under the cork again.
#[test]
fn nodelay_pushes_under_a_cork() {
    let mut tcp = connection();
    tcp.set_cork(true);
    assert!(tcp.queue(100));
    assert_eq!(sent(&mut tcp, NOW), []);
    tcp.set_nodelay(true);
    assert_eq!(sent(&mut tcp, NOW), [100]);
    assert!(tcp.queue(100));
    assert_eq!(sent(&mut tcp, NOW), []);
    tcp.set_cork(false);
    assert_eq!(sent(&mut tcp, NOW), [100]);
}
