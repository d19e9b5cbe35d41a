//! What RFC 9293 and 5961 want answered, and how: one connection from an image, and segments made by hand.

use baton_image::Image;
use baton_tcp::{Connection, Events, Instant, Received, Segment, State, Transmit};
use baton_wire::{Endpoint, Flags, Flow, TcpOptions};

const NOW: Instant = Instant(1_000_000);
const BUFFER: u32 = 1 << 16;

fn image() -> Image {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
    Image { rcv_adv: 1, ..Image::open(flow) }
}

/// A connection that has said what it has to say.
fn connection(image: &Image, buffer: u32) -> Connection {
    let mut connection = Connection::from_image(image, None, buffer, NOW);
    while connection.poll_transmit(NOW, 0).is_some() {}
    connection
}

/// A segment of the peer's, whose clock stands at 2.
fn segment(seq: u32, length: u32, flags: Flags) -> Segment {
    let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
    Segment { seq, ack: 1, flags, window: 500, options, congestion_experienced: false, length }
}

fn answer(connection: &mut Connection, segment: &Segment, now: Instant) -> (Received, Option<Transmit>) {
    let received = connection.input(segment, now);
    (received, connection.poll_transmit(now, 0))
}

/// What the connection sends after this many microseconds without a segment.
fn wait(connection: &mut Connection, micros: u64) -> Option<Transmit> {
    let now = NOW.after(micros);
    connection.on_timeout(now);
    connection.poll_transmit(now, 0)
}

/// Fills the window with data that the program does not read. The next sequence number.
fn fill(connection: &mut Connection) -> u32 {
    loop {
        let seq = connection.rcv_nxt();
        let (received, _) = answer(connection, &segment(seq, 1000, Flags::ACK), NOW);
        if received.place < 1000 {
            return connection.rcv_nxt();
        }
    }
}

/// RFC 9293 section 3.8.6.1: a receiver whose window is closed answers a probe of one byte.
#[test]
fn a_byte_into_a_closed_window_is_answered() {
    let mut connection = connection(&image(), BUFFER);
    let next = fill(&mut connection);
    for _ in 0..3 {
        let (received, sent) = answer(&mut connection, &segment(next, 1, Flags::ACK | Flags::PSH), NOW);
        assert_eq!(received.place, 0);
        let sent = sent.expect("an answer to the probe");
        assert_eq!((sent.ack, sent.window, sent.length), (next, 0, 0));
    }
    // And once there is room, the byte is taken.
    assert!(connection.consumed(BUFFER / 2));
    assert!(connection.poll_transmit(NOW, 0).expect("a window update").window > 0);
    let (received, _) = answer(&mut connection, &segment(next, 1, Flags::ACK | Flags::PSH), NOW);
    assert_eq!((received.place, received.delivered), (1, 1));
}

/// A segment of which only a part fits is taken as far as it does, and answered at once.
#[test]
fn what_the_window_cuts_off_is_answered() {
    let mut connection = connection(&image(), BUFFER);
    connection.set_quick_ack(false);
    let next = fill(&mut connection);
    let (_, sent) = answer(&mut connection, &segment(next, 1000, Flags::ACK | Flags::FIN), NOW);
    assert_eq!(sent.expect("an answer").ack, next);
    assert!(!connection.fin_received(), "a FIN behind data that was cut off does not count");
}

/// A FIN alone may overtake the data in front of it, which then arrives in order.
#[test]
fn a_fin_that_came_too_early_counts_when_the_hole_is_filled() {
    for held in [0, 10] {
        let mut connection = connection(&image(), BUFFER);
        // 100 bytes are late; `held` bytes and the FIN are not.
        let (_, sent) = answer(&mut connection, &segment(101, held, Flags::ACK | Flags::FIN), NOW);
        assert!(sent.is_none(), "it may be reordering");
        assert_eq!(wait(&mut connection, 50).expect("an acknowledgement of the hole").ack, 1);
        assert_eq!(connection.fin_behind_hole(), Some(101 + held));
        let (received, sent) = answer(&mut connection, &segment(1, 100, Flags::ACK), NOW);
        assert!(received.events.contains(Events::FIN), "{held} bytes held");
        assert_eq!(received.delivered, 100 + held);
        assert_eq!(sent.expect("an acknowledgement of the FIN").ack, 102 + held);
        assert_eq!(connection.state(), State::CloseWait);
        assert_eq!(connection.readable(), 100 + held);
    }
}

/// Segments that overtake each other by less than 50 microseconds are no loss: no gap is reported to the peer.
#[test]
fn what_comes_a_little_late_is_no_gap() {
    let mut connection = connection(&image(), BUFFER);
    for pair in 0..3 {
        let next = 1 + 200 * pair;
        let (_, sent) = answer(&mut connection, &segment(next + 100, 100, Flags::ACK), NOW);
        assert!(sent.is_none() && wait(&mut connection, 49).is_none(), "an answer before it was waited");
        let (received, sent) = answer(&mut connection, &segment(next, 100, Flags::ACK), NOW.after(49));
        let sent = sent.expect("an acknowledgement of both");
        assert_eq!((received.delivered, sent.ack), (200, next + 200));
        assert_eq!(sent.options.sack.as_slice(), []);
    }
    assert!(wait(&mut connection, 100).is_none(), "there is nothing more to say");
}

/// A gap that stays is reported, and what comes behind it then is reported at once (RFC 5681 section 4.2). Without SACK
/// a peer counts the acknowledgements, so each goes out at once.
#[test]
fn a_gap_is_reported() {
    let mut with = connection(&image(), BUFFER);
    for seq in [101, 201] {
        let (_, sent) = answer(&mut with, &segment(seq, 100, Flags::ACK), NOW);
        assert!(sent.is_none(), "the first report waits");
    }
    let sent = wait(&mut with, 50).expect("a report");
    assert_eq!((sent.ack, sent.options.sack.as_slice()), (1, &[(101, 301)][..]));
    let (_, sent) = answer(&mut with, &segment(301, 100, Flags::ACK), NOW.after(60));
    assert_eq!(sent.expect("the next report").options.sack.as_slice(), [(101, 401)]);

    let mut without = connection(&Image { sack: false, ..image() }, BUFFER);
    for seq in [101, 201, 301] {
        let (_, sent) = answer(&mut without, &segment(seq, 100, Flags::ACK), NOW);
        assert_eq!(sent.expect("a duplicate acknowledgement").ack, 1);
    }
}

/// RFC 9293 section 3.10.7.4 and RFC 5961: what cannot be accepted is answered with where we are; without data not too
/// often.
#[test]
fn unacceptable_segments_are_answered() {
    let data = Flags::ACK | Flags::PSH;
    let far = 1 + (1 << 20);
    for (what, segment) in [
        ("data beyond the window", segment(far, 10, data)),
        ("an acknowledgement beyond the window", segment(far, 0, Flags::ACK)),
        ("old data", segment(1u32.wrapping_sub(100), 10, data)),
        ("an old FIN", segment(1u32.wrapping_sub(100), 0, Flags::ACK | Flags::FIN)),
        ("a keep-alive probe", segment(0, 0, Flags::ACK)),
        ("a keep-alive probe with a byte", segment(0, 1, Flags::ACK)),
        ("a SYN in the window", segment(10, 0, Flags::SYN)),
        ("a SYN at the window's edge", segment(1, 0, Flags::SYN | Flags::ACK)),
        ("a reset inside the window", segment(10, 0, Flags::RST)),
        ("an acknowledgement of what was never sent", Segment { ack: 1000, ..segment(1, 0, Flags::ACK) }),
        ("data with such an acknowledgement", Segment { ack: 1000, ..segment(1, 10, data) }),
        ("an ancient acknowledgement", Segment { ack: 1u32.wrapping_sub(1 << 20), ..segment(1, 0, Flags::ACK) }),
        ("a timestamp of long ago", {
            let options = TcpOptions { timestamps: Some((0x9000_0000, 1)), ..TcpOptions::default() };
            Segment { options, ..segment(1, 10, data) }
        }),
    ] {
        let mut connection = connection(&image(), BUFFER);
        connection.learn_timestamp(&self::segment(1, 0, Flags::ACK), NOW);
        let (received, sent) = answer(&mut connection, &segment, NOW);
        assert_eq!((received.place, received.delivered, received.acked), (0, 0, 0), "{what}");
        let sent = sent.unwrap_or_else(|| panic!("no answer to {what}"));
        assert_eq!((sent.seq, sent.ack, sent.length), (1, 1, 0), "{what}");
        assert_eq!(sent.flags.0, Flags::ACK.0, "{what}");
        let reported = sent.options.sack.as_slice();
        assert!(
            reported.iter().all(|(_, right)| right.wrapping_sub(1) as i32 <= 0),
            "{what} is reported as received: {reported:?}"
        );
        assert_eq!(connection.state(), State::Established, "{what}");
        // A flood of segments without data is not answered with another.
        let floods = segment.length == 0 && !segment.flags.contains(Flags::FIN);
        let again = (0..10).filter(|_| answer(&mut connection, &segment, NOW.after(1000)).1.is_some()).count();
        assert!(!floods || again == 0, "{what} was answered {again} times more within a millisecond");
    }
}

/// The timestamp of a segment that the connection's last owner has processed counts for PAWS, but not that of one which
/// the peer cannot have sent.
#[test]
fn a_timestamp_is_learned_of_what_the_peer_can_have_sent() {
    const FAR: u32 = 1 << 30;
    let options = TcpOptions { timestamps: Some((FAR, 1)), ..TcpOptions::default() };
    let old = Segment { options, ..segment(1u32.wrapping_sub(100), 100, Flags::ACK) };
    for (what, segment, learned) in [
        ("the last one", old, true),
        ("one a window ago", Segment { seq: 1u32.wrapping_sub(BUFFER), ..old }, true),
        ("an acknowledgement a window ago", Segment { ack: 1u32.wrapping_sub(1 << 15), ..old }, true),
        ("the peer's FIN", Segment { flags: Flags::ACK | Flags::FIN, length: 99, ..old }, true),
        ("data of long ago", Segment { seq: 1u32.wrapping_sub(FAR), ..old }, false),
        ("an ancient acknowledgement", Segment { ack: 1u32.wrapping_sub(FAR), ..old }, false),
        ("an acknowledgement of what was never sent", Segment { ack: 2, ..old }, false),
        ("no acknowledgement", Segment { flags: Flags::PSH, ..old }, false),
        ("a reset", Segment { flags: Flags::ACK | Flags::RST, ..old }, false),
    ] {
        let mut connection = connection(&image(), BUFFER);
        assert_eq!(connection.learn_timestamp(&segment, NOW), learned, "{what}");
        let (received, _) = answer(&mut connection, &self::segment(1, 10, Flags::ACK), NOW);
        assert_eq!(received.delivered, if learned { 0 } else { 10 }, "{what}: the peer's next segment");
    }
}

/// RFC 5961 section 3.2: a reset beyond the window is dropped without a word.
#[test]
fn a_reset_beyond_the_window_is_dropped() {
    let mut connection = connection(&image(), BUFFER);
    let (received, sent) = answer(&mut connection, &segment(1 + (1 << 20), 0, Flags::RST), NOW);
    assert_eq!((received.events, sent), (Events::empty(), None));
}

/// The peer's FIN comes again, since our acknowledgement was lost: it is acknowledged again, whoever has closed since.
#[test]
fn a_repeated_fin_is_acknowledged_again() {
    for closes in [false, true] {
        let mut connection = connection(&image(), BUFFER);
        let fin = segment(1, 0, Flags::ACK | Flags::FIN);
        let (received, _) = answer(&mut connection, &fin, NOW);
        assert!(received.events.contains(Events::FIN));
        if closes {
            connection.shutdown();
            while connection.poll_transmit(NOW, 0).is_some() {}
        }
        let (received, sent) = answer(&mut connection, &fin, NOW);
        assert_eq!(received.events, Events::empty());
        assert_eq!(sent.expect("an acknowledgement").ack, 2);
    }
}

/// A connection may come with more in flight than this host would ever have sent: every acknowledgement of it counts,
/// and all that is lost of it is sent again.
#[test]
fn any_amount_in_flight_is_taken_over() {
    for queue in [8 << 20, 64 << 20] {
        let came = Image { snd_nxt: 1 + queue, snd_end: 1 + queue, snd_wnd: 0xffff << 10, snd_wscale: 10, ..image() };
        let came = Image { max_window: came.snd_wnd, ..came };
        let mut connection = connection(&came, BUFFER);
        assert_eq!(connection.snd_nxt(), 1 + queue);
        let acknowledges = |ack| Segment { ack, window: 0xffff, ..segment(1, 0, Flags::ACK) };
        // Of a part, of nothing more for so long that it counts as lost, of the rest.
        let received = connection.input(&acknowledges(1 + queue / 2), NOW.after(5000));
        assert_eq!(received.acked, queue / 2);
        let mut now = NOW;
        while connection.snd_una() != 1 + queue {
            now = connection.next_timeout();
            assert!(now < NOW.after(60_000_000), "{} bytes are not sent again", 1 + queue - connection.snd_una());
            connection.on_timeout(now);
            while let Some(sent) = connection.poll_transmit(now, 0) {
                now = now.after(100);
                // What lies behind the hole the peer has no memory for.
                if sent.seq == connection.snd_una() {
                    let echo = sent.options.timestamps.map(|(clock, _)| (2, clock));
                    let options = TcpOptions { timestamps: echo, ..TcpOptions::default() };
                    connection.input(&Segment { options, ..acknowledges(sent.seq.wrapping_add(sent.length)) }, now);
                }
            }
        }
        assert_eq!(connection.snd_una(), 1 + queue);
        let image = connection.to_image(&came, now).expect("an image");
        assert_eq!((image.snd_una, image.snd_nxt), (1 + queue, 1 + queue));
    }
}

/// A peer that sends a timestamp of 0 and then its clock is accepted, as in Linux: 0 is not compared with, also when it
/// is later by the arithmetic of RFC 7323 section 5.2.
#[test]
fn a_timestamp_of_zero_keeps_no_later_one_out() {
    let mut connection = connection(&image(), BUFFER);
    connection.set_quick_ack(true);
    let stamped = |seq, value| {
        let options = TcpOptions { timestamps: Some((value, 1)), ..TcpOptions::default() };
        Segment { options, ..segment(seq, 10, Flags::ACK) }
    };
    for (seq, value, delivered) in [(1, 0, 10), (11, 0x9000_0000, 10), (21, 0x8000_0000, 0), (21, 0x9000_0001, 10)] {
        assert_eq!(answer(&mut connection, &stamped(seq, value), NOW).0.delivered, delivered, "timestamp {value:#x}");
    }
}

/// RFC 2883 section 4: a report of a duplicate is about data alone, which lies before RCV.NXT. A SYN or FIN is none;
/// and of what lies far ahead, where the sequence space wraps, nothing was received.
#[test]
fn a_duplicate_report_names_old_data_alone() {
    let data = Flags::ACK | Flags::PSH;
    let (old, half) = (1u32.wrapping_sub(100), 1u32 << 31);
    for (what, segment, reported) in [
        ("old data", segment(old, 10, data), Some((old, old.wrapping_add(10)))),
        ("old data with a FIN", segment(old, 10, data | Flags::FIN), Some((old, old.wrapping_add(10)))),
        ("an old FIN", segment(old, 0, Flags::ACK | Flags::FIN), None),
        ("an old SYN with data", segment(old, 10, Flags::SYN), None),
        ("data half the sequence space ahead", segment(half - 500, 1400, data), None),
        ("data and a FIN half the sequence space ahead", segment(half - 500, 1400, data | Flags::FIN), None),
    ] {
        let mut connection = connection(&image(), BUFFER);
        let (_, sent) = answer(&mut connection, &segment, NOW);
        let sent = sent.unwrap_or_else(|| panic!("no answer to {what}"));
        assert_eq!(sent.options.sack.as_slice().first().copied(), reported, "{what}");
    }
}

/// RFC 5961 section 4.2: a SYN is challenged whatever its sequence number and its data; section 7: not too often.
#[test]
fn a_syn_is_challenged_wherever_it_is() {
    for seq in [1, 10, 1u32.wrapping_sub(1000), 1 << 20, 1 << 31] {
        for flags in [Flags::SYN, Flags::SYN | Flags::ACK, Flags::SYN | Flags::ACK | Flags::FIN] {
            let mut connection = connection(&image(), BUFFER);
            let answers = (0..10).filter(|_| answer(&mut connection, &segment(seq, 10, flags), NOW).1.is_some()).count();
            assert_eq!(answers, 1, "{flags:?} at {seq}");
        }
    }
}

/// RFC 7323 section 5.3, R1: what has an old timestamp is dropped and answered. Only a bare acknowledgement may have
/// been overtaken within the last round trips.
#[test]
fn an_old_timestamp_is_answered_unless_the_segment_was_overtaken() {
    let stamped = |value, segment: Segment| {
        let options = TcpOptions { timestamps: Some((value, 1)), ..TcpOptions::default() };
        Segment { options, ..segment }
    };
    let plain = Segment { window: 400, ..segment(1, 0, Flags::ACK) };
    for (what, segment, is_answered) in [
        ("an acknowledgement that was overtaken", stamped(4_900, plain), false),
        ("one of long ago", stamped(4_000, plain), true),
        ("one of before the last time-out", stamped(4_600, plain), true),
        ("a FIN", stamped(4_900, segment(1, 0, Flags::ACK | Flags::FIN)), true),
        ("data", stamped(4_900, segment(1, 1, Flags::ACK)), true),
        ("a SYN", stamped(4_900, segment(1, 0, Flags::SYN)), true),
    ] {
        let image = Image { srtt: 1000, rttvar: 500, snd_wnd: 500 << 7, snd_wscale: 7, snd_wl1: 1, ..image() };
        let mut connection = connection(&image, BUFFER);
        let (_, sent) = answer(&mut connection, &stamped(5_000, self::segment(1, 0, Flags::ACK)), NOW);
        assert!(sent.is_none());
        let before = connection.info().snd_wnd;
        let (received, sent) = answer(&mut connection, &segment, NOW);
        assert_eq!((received.events, received.delivered), (Events::empty(), 0), "{what}");
        assert_eq!((sent.is_some(), connection.info().snd_wnd), (is_answered, before), "{what}");
        assert_eq!(connection.state(), State::Established, "{what}");
    }
}

/// Nothing can follow a FIN: data that claims to is dropped, and does not hide it (as in Linux).
#[test]
fn what_lies_behind_a_fin_is_dropped() {
    for (held, length) in [(501, 0), (501, 10), (5, 10), (11, 10)] {
        let mut connection = connection(&image(), BUFFER);
        answer(&mut connection, &segment(held, 100, Flags::ACK), NOW);
        let (received, sent) = answer(&mut connection, &segment(1, length, Flags::ACK | Flags::FIN), NOW);
        assert!(received.events.contains(Events::FIN), "data at {held}, FIN at {}", 1 + length);
        assert_eq!((received.delivered, sent.map(|sent| sent.ack)), (length, Some(2 + length)));
        assert_eq!((connection.state(), connection.out_of_order().count()), (State::CloseWait, 0));
    }
    // Nor does what comes after a FIN that waits behind a hole hide it.
    let mut connection = connection(&image(), BUFFER);
    answer(&mut connection, &segment(101, 10, Flags::ACK | Flags::FIN), NOW);
    answer(&mut connection, &segment(101, 500, Flags::ACK), NOW);
    let (received, sent) = answer(&mut connection, &segment(1, 100, Flags::ACK), NOW);
    assert!(received.events.contains(Events::FIN));
    assert_eq!((received.delivered, sent.map(|sent| sent.ack)), (110, Some(112)));
}

/// A connection that was reset has nothing more to report.
#[test]
fn a_reset_forgets_what_came_out_of_order() {
    let mut connection = connection(&image(), BUFFER);
    answer(&mut connection, &segment(101, 100, Flags::ACK), NOW);
    let (received, _) = answer(&mut connection, &segment(1, 0, Flags::RST), NOW);
    assert!(received.events.contains(Events::ABORTED));
    assert_eq!(connection.out_of_order().count(), 0);
}

/// RFC 2883 section 4: of a segment that is a duplicate in part, that part is reported, in front of the block that it
/// has become a part of; of two parts the first.
#[test]
fn a_partial_duplicate_is_reported() {
    for (what, seq, length, blocks) in [
        ("the beginning of what is held again", 50, 100, &[(101, 150), (50, 201)][..]),
        ("its end", 150, 100, &[(150, 201), (101, 250)]),
        ("all of it and more", 50, 300, &[(101, 201), (50, 350)]),
        ("a part of it", 120, 20, &[(120, 140), (101, 201)]),
        ("what adjoins it", 201, 100, &[(101, 301)]),
    ] {
        let mut connection = connection(&image(), BUFFER);
        answer(&mut connection, &segment(101, 100, Flags::ACK), NOW);
        wait(&mut connection, 50).expect("a report of the gap");
        let (_, sent) = answer(&mut connection, &segment(seq, length, Flags::ACK), NOW.after(100));
        assert_eq!(sent.expect("an answer").options.sack.as_slice(), blocks, "{what}");
    }
    // What was received in order, and what was held behind it: two parts.
    let mut connection = connection(&image(), BUFFER);
    answer(&mut connection, &segment(1, 100, Flags::ACK), NOW);
    answer(&mut connection, &segment(201, 100, Flags::ACK), NOW);
    let (_, sent) = answer(&mut connection, &segment(51, 400, Flags::ACK), NOW);
    let sent = sent.expect("an answer");
    assert_eq!((sent.ack, sent.options.sack.as_slice()), (451, &[(51, 101)][..]));
}

/// RFC 5961 section 3.2: a reset counts at RCV.NXT. One with the number of a FIN that has come counts, too, as in
/// Linux: macOS sends both when a program is ended abruptly, and may not answer a challenge.
#[test]
fn a_reset_with_the_number_of_the_fin_counts() {
    for (what, fin, behind, counts) in [
        ("at the FIN", true, 0, true),
        ("behind the FIN", true, 1, true),
        ("before the FIN", true, -1, false),
        ("before the next byte", false, -1, false),
        ("at the next byte", false, 0, true),
    ] {
        let mut connection = connection(&image(), BUFFER);
        let flags = if fin { Flags::ACK | Flags::FIN } else { Flags::ACK };
        answer(&mut connection, &segment(1, 100, flags), NOW);
        let reset = segment(101u32.wrapping_add_signed(behind), 0, Flags::RST | Flags::ACK);
        let (received, _) = answer(&mut connection, &reset, NOW);
        assert_eq!(received.events.contains(Events::ABORTED), counts, "{what}");
    }
}

/// RFC 2883 section 4 (4): the block behind the report of a duplicate is the one that the duplicate lies in, also where
/// another one has grown since. By that a sender knows that the first block is a report.
#[test]
fn the_block_that_a_duplicate_lies_in_follows_its_report() {
    for (what, seq, length) in [("all of it", 101, 100), ("a part of it", 120, 20)] {
        let mut connection = connection(&image(), BUFFER);
        answer(&mut connection, &segment(101, 100, Flags::ACK), NOW);
        answer(&mut connection, &segment(301, 100, Flags::ACK), NOW);
        wait(&mut connection, 50).expect("a report of the gap");
        let (_, sent) = answer(&mut connection, &segment(seq, length, Flags::ACK), NOW.after(100));
        let duplicate = (seq, seq + length);
        assert_eq!(sent.expect("an answer").options.sack.as_slice(), [duplicate, (101, 201), (301, 401)], "{what}");
    }
}

/// What is owed because of a gap is not paid by data that happens to leave first: beside data there are no SACK blocks,
/// and a segment with data is no duplicate acknowledgement (RFC 2018 section 4, RFC 5681 section 2).
#[test]
fn a_gap_is_reported_though_data_leaves_first() {
    for sack in [false, true] {
        let mut connection = connection(&Image { sack, max_window: 60_000, ..image() }, BUFFER);
        connection.input(&segment(101, 100, Flags::ACK), NOW);
        connection.queue(10);
        let data = connection.poll_transmit(NOW, 0).expect("data");
        assert_eq!((data.length, data.options.sack.as_slice().len()), (10, 0));
        let report = connection.poll_transmit(NOW, 0).or_else(|| wait(&mut connection, 50)).expect("a report");
        let blocks: &[_] = if sack { &[(101, 201)] } else { &[] };
        assert_eq!((report.ack, report.length, report.options.sack.as_slice()), (1, 0, blocks));
        assert_eq!(wait(&mut connection, 100), None, "it is reported once");
    }
    // An old segment comes again while data waits.
    let mut connection = connection(&image(), BUFFER);
    connection.input(&segment(1, 100, Flags::ACK), NOW);
    while connection.poll_transmit(NOW, 0).is_some() {}
    connection.input(&segment(1, 100, Flags::ACK), NOW);
    connection.queue(10);
    assert_eq!(connection.poll_transmit(NOW, 0).map(|data| data.length), Some(10));
    let report = connection.poll_transmit(NOW, 0).expect("a report");
    assert_eq!(report.options.sack.as_slice(), [(1, 101)]);
}
