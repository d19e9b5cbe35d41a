//! Opening a connection in the ways that are not the usual one.

use baton_sim::pair::arriving;
use baton_tcp::segment::Segment;
use baton_tcp::{Config, Connection, Events, Instant, State};
use baton_wire::{Flags, TcpOptions};

fn send(from: &mut Connection, now: Instant) -> Segment {
    arriving(&from.poll_transmit(now, 0).expect("a segment"))
}

/// RFC 9293 section 3.5, figure 8: two SYNs cross, and both ends are open after each SYN was acknowledged.
#[test]
fn two_ends_open_at_once() {
    let now = Instant(1_000_000);
    let mut ends = [Connection::connect(Config::default(), 100, 1, now), Connection::connect(Config::default(), 300, 2, now)];
    let syns = [send(&mut ends[0], now), send(&mut ends[1], now)];
    for at in 0..2 {
        assert!(ends[at].input(&syns[1 - at], now).events.is_empty());
        assert_eq!(ends[at].state(), State::SynReceived);
    }
    let answers = [send(&mut ends[0], now), send(&mut ends[1], now)];
    for at in 0..2 {
        assert_eq!(answers[at].flags, Flags::SYN | Flags::ACK);
        assert_eq!(ends[at].input(&answers[1 - at], now).events, Events::ESTABLISHED);
        assert_eq!(ends[at].state(), State::Established);
    }
    assert!(ends[0].queue(10));
    let data = loop {
        let data = send(&mut ends[0], now);
        if data.length > 0 {
            break data;
        }
    };
    assert_eq!(ends[1].input(&data, now).delivered, 10);
}

/// RFC 9293 section 3.10.7.3: an acknowledgement of what was never sent draws a RST, and the opening goes on.
#[test]
fn a_foreign_answer_to_a_syn_is_refused() {
    let now = Instant(1_000_000);
    let mut end = Connection::connect(Config::default(), 100, 1, now);
    send(&mut end, now);
    let foreign = Segment { seq: 7, ack: 5000, flags: Flags::SYN | Flags::ACK, window: 100, ..Segment::default() };
    end.input(&foreign, now);
    let reset = send(&mut end, now);
    assert_eq!((reset.seq, reset.flags), (5000, Flags::RST));
    assert_eq!(end.state(), State::SynSent);
    let right = Segment { ack: 101, ..foreign };
    assert_eq!(end.input(&right, now).events, Events::ESTABLISHED);
}

/// RFC 7413 section 4.2: data goes with the SYN, is taken at once, and what the server does not take goes again after
/// the handshake.
#[test]
fn data_in_a_syn_is_taken_or_sent_again() {
    for taken in [true, false] {
        let now = Instant(1_000_000);
        let mut client = Connection::connect(Config::default(), 100, 1, now);
        assert!(client.queue(500));
        client.send_data_in_syn(1000);
        let syn = send(&mut client, now);
        assert_eq!((syn.length, syn.flags), (500, Flags::SYN));
        let mut server = Connection::accept(Config::default(), &syn, 900, 2, now).expect("a plain SYN");
        if taken {
            assert_eq!(server.take_data_of_syn(syn.length).delivered, 500);
        }
        let answer = send(&mut server, now);
        assert_eq!(answer.ack, if taken { 601 } else { 101 });
        let received = client.input(&answer, now);
        assert_eq!((received.events, received.acked), (Events::ESTABLISHED, if taken { 500 } else { 0 }));
        let next = send(&mut client, now);
        assert_eq!(next.length, if taken { 0 } else { 500 });
        assert_eq!(client.cwnd(), 10, "a server without Fast Open is no congestion");
        let received = server.input(&next, now);
        assert_eq!((received.delivered, server.state()), (next.length, State::Established));
    }
}

/// Data that is queued into a closed window while nothing is in flight is probed for: the update that opens it may get
/// lost.
#[test]
fn data_for_a_closed_window_is_probed_for() {
    let now = Instant(1_000_000);
    let mut client = Connection::connect(Config::default(), 100, 1, now);
    send(&mut client, now);
    let closed = Segment { seq: 7, ack: 101, flags: Flags::SYN | Flags::ACK, window: 0, ..Segment::default() };
    client.input(&closed, now);
    while client.poll_transmit(now, 0).is_some() {}
    assert!(client.queue(10));
    assert!(client.poll_transmit(now, 0).is_none());
    let due = client.next_timeout();
    assert!(due < now.after(2_000_000), "no probe is due");
    client.on_timeout(due);
    assert_eq!(send(&mut client, due).seq, 100, "a probe");
}

/// RFC 9293 section 3.10.7.4: in SYN-RECEIVED, too, a segment outside of the window is answered with an
/// acknowledgement, and one that acknowledges what was never sent with a RST. Neither ends the handshake.
#[test]
fn a_handshake_answers_what_is_not_its_own_and_goes_on() {
    let now = Instant(1_000_000);
    let mut client = Connection::connect(Config::default(), 100, 1, now);
    let syn = send(&mut client, now);
    let mut server = Connection::accept(Config::default(), &syn, 900, 2, now).expect("a plain SYN");
    let answer = send(&mut server, now);
    let clock = answer.options.timestamps.map(|(clock, _)| (syn.options.timestamps.map_or(0, |(value, _)| value), clock));
    let options = TcpOptions { timestamps: clock, ..TcpOptions::default() };
    let right = Segment { seq: 101, ack: 901, flags: Flags::ACK, window: 500, options, ..Segment::default() };
    let old_clock = TcpOptions { timestamps: clock.map(|(value, echo)| (value.wrapping_sub(5000), echo)), ..options };
    for (nth, (what, segment)) in [
        ("data far beyond the window", Segment { seq: 101 + (1 << 20), length: 10, ..right }),
        ("an acknowledgement far beyond it", Segment { seq: 101 + (1 << 20), ..right }),
        ("an old FIN", Segment { seq: 50, flags: Flags::ACK | Flags::FIN, ..right }),
        ("an old timestamp", Segment { options: old_clock, length: 10, ..right }),
    ]
    .into_iter()
    .enumerate()
    {
        let now = now.after(nth as u64 * 600_000);
        server.input(&segment, now);
        let sent = server.poll_transmit(now, 0).unwrap_or_else(|| panic!("no answer to {what}"));
        assert_eq!((sent.seq, sent.ack, sent.flags, sent.length), (901, 101, Flags::ACK, 0), "{what}");
        assert!(server.poll_transmit(now, 0).is_none(), "one answer to {what}");
        assert_eq!(server.state(), State::SynReceived, "{what}");
    }
    for ack in [0, 900, 902, 77_777] {
        server.input(&Segment { ack, ..right }, now);
        let reset = send(&mut server, now);
        assert_eq!((reset.seq, reset.flags), (ack, Flags::RST));
        assert_eq!(server.state(), State::SynReceived);
    }
    let data = Segment { length: 10, ..right };
    let received = server.input(&data, now);
    assert_eq!((received.events, received.delivered), (Events::ESTABLISHED, 10));
    let due = server.poll_transmit(now, 0).expect("an acknowledgement");
    assert_eq!((due.ack, due.flags), (111, Flags::ACK));
}
