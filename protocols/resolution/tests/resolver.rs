//! The NIC's own addresses from the first probe to the defence, and under any frames.

use baton_resolution::{MOST_ADDRESSES, MOST_ANSWERS, Own, Received, Resolver, SOURCES, Speaker, State, Timing};
use baton_wire::arp::Arp;
use baton_wire::neighbour::{ALL_NODES, Kind, NEIGHBOUR_FRAME, Neighbour};
use proptest::prelude::*;
use std::net::IpAddr;

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];
const V4: [u8; 4] = [10, 0, 0, 50];
const V6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x50];
const PEER_V4: [u8; 4] = [10, 0, 0, 2];
const PEER_V6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
const START: u64 = 5_000_000;

fn resolver(speaker: Speaker) -> Resolver {
    Resolver::new(OURS, speaker, Timing::default(), 12345)
}

/// A resolver that uses both addresses and has sent all announcements, and the time.
fn used() -> (Resolver, u64) {
    let mut resolver = resolver(Speaker::Here);
    resolver.add(V4.into(), true, START);
    resolver.add(V6.into(), true, START);
    let (_, now) = run(&mut resolver);
    (resolver, now)
}

/// Polls until nothing is due. Returns the frames that were sent, each with its time, and the time at the end.
fn run(resolver: &mut Resolver) -> (Vec<(u64, Vec<u8>)>, u64) {
    let (mut sent, mut now) = (Vec::new(), START);
    while resolver.due() != u64::MAX {
        now = resolver.due();
        resolver.poll(now, &mut |frame| sent.push((now, frame.to_vec())));
    }
    (sent, now)
}

fn receive(resolver: &mut Resolver, frame: &[u8], now: u64) -> (Received, Vec<Vec<u8>>) {
    let mut sent = Vec::new();
    let received = resolver.receive(frame, false, now, &mut |frame| sent.push(frame.to_vec()));
    (received, sent)
}

fn own(resolver: &Resolver, address: impl Into<IpAddr>) -> Own {
    let address = address.into();
    *resolver.own().iter().find(|own| own.address == address).expect("the address")
}

fn question(mac: [u8; 6]) -> Vec<u8> {
    Arp { is_request: true, sender_mac: mac, sender: PEER_V4, target_mac: [0; 6], target: V4 }.emit().to_vec()
}

fn frame(neighbour: &Neighbour) -> Vec<u8> {
    let mut out = [0; NEIGHBOUR_FRAME];
    let length = neighbour.emit(OURS, &mut out);
    out[..length].to_vec()
}

fn question_v6(mac: [u8; 6]) -> Vec<u8> {
    frame(&Neighbour { source: PEER_V6, link_address: Some(mac), ..Neighbour::probe(mac, V6) })
}

#[test]
fn an_address_is_probed_for_then_announced() {
    for address in [IpAddr::from(V4), V6.into()] {
        let mut resolver = resolver(Speaker::Here);
        resolver.add(address, false, START);
        assert_eq!(own(&resolver, address).state, State::Probing);
        let (sent, now) = run(&mut resolver);
        let times: Vec<u64> = sent.iter().map(|(at, _)| *at).collect();
        assert_eq!(times.len(), 5, "three probes, two announcements");
        assert!((START..=START + 1_000_000).contains(&times[0]));
        for pair in times[..3].windows(2) {
            assert!((1_000_000..=2_000_000).contains(&(pair[1] - pair[0])), "{times:?}");
        }
        assert_eq!((times[3] - times[2], times[4] - times[3]), (2_000_000, 2_000_000));
        assert_eq!((own(&resolver, address).state, resolver.take_changed()), (State::Used, true));
        assert!(!resolver.take_changed() && now == times[4]);
        let counters = own(&resolver, address).counters;
        assert_eq!((counters.probes, counters.announcements), (3, 2));
        if address.is_ipv4() {
            assert_eq!(sent[0].1, Arp::probe(OURS, V4).emit());
            assert_eq!(sent[4].1, Arp::announcement(OURS, V4).emit());
        } else {
            assert_eq!(sent[0].1, frame(&Neighbour::probe(OURS, V6)));
            assert_eq!(sent[4].1, frame(&Neighbour::announcement(OURS, V6)));
        }
    }
}

#[test]
fn nic_after_nic_announces_at_once_and_does_not_probe() {
    let mut resolver = resolver(Speaker::Here);
    resolver.add(V4.into(), true, START);
    assert_eq!(resolver.due(), START);
    let (sent, _) = run(&mut resolver);
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(|(_, frame)| *frame == Arp::announcement(OURS, V4).emit()));
}

#[test]
fn questions_are_answered_once_it_is_in_use() {
    let mut probing = resolver(Speaker::Here);
    probing.add(V4.into(), false, START);
    probing.add(V6.into(), false, START);
    assert_eq!(receive(&mut probing, &question(THEIRS), START), (Received::Own, vec![]));
    assert_eq!(receive(&mut probing, &question_v6(THEIRS), START), (Received::Own, vec![]));
    assert!(probing.own().iter().all(|own| own.state == State::Probing), "a question is no claim");
    let (mut resolver, now) = used();
    let answer = Arp { is_request: false, sender_mac: OURS, sender: V4, target_mac: THEIRS, target: PEER_V4 };
    assert_eq!(receive(&mut resolver, &question(THEIRS), now), (Received::Own, vec![answer.emit().to_vec()]));
    let (received, sent) = receive(&mut resolver, &question_v6(THEIRS), now);
    let answer = Neighbour::parse(&sent[0], false).expect("a message").expect("a good one");
    assert_eq!((received, answer.destination, answer.link_address), (Received::Own, PEER_V6, Some(OURS)));
    assert_eq!(answer.kind, Kind::Advertisement { solicited: true, replaces: true });
    // A host that probes for an address which is in use gets an answer: by ARP, and for IPv6 as an advertisement to all
    // nodes.
    let (_, sent) = receive(&mut resolver, &Arp::probe(THEIRS, V4).emit(), now);
    assert_eq!(Arp::parse(&sent[0]).map(|arp| arp.map(|arp| (arp.sender, arp.target))), Some(Ok((V4, [0; 4]))));
    let (_, sent) = receive(&mut resolver, &frame(&Neighbour::probe(THEIRS, V6)), now);
    assert_eq!(Neighbour::parse(&sent[0], false).expect("a message").expect("a good one").destination, ALL_NODES);
    assert_eq!((own(&resolver, V4).counters.answers, own(&resolver, V6).counters.answers), (2, 2));
    assert_eq!(own(&resolver, V4).counters.conflicts + own(&resolver, V6).counters.conflicts, 0);
}

#[test]
fn questions_for_others_are_the_kernels() {
    let (mut resolver, now) = used();
    let other = Arp { target: [10, 0, 0, 51], ..Arp::probe(THEIRS, V4) };
    assert_eq!(receive(&mut resolver, &other.emit(), now), (Received::Other, vec![]));
    let other = frame(&Neighbour::probe(THEIRS, PEER_V6));
    assert_eq!(receive(&mut resolver, &other, now), (Received::Other, vec![]));
    assert_eq!(receive(&mut resolver, &[0; 60], now), (Received::Other, vec![]));
    assert_eq!(receive(&mut resolver, &[], now), (Received::Other, vec![]));
}

/// The kernel asks for its neighbours from the address; the answers are its own.
#[test]
fn answers_to_the_kernels_questions_are_the_kernels() {
    let (mut resolver, now) = used();
    let answer = Arp { is_request: false, sender_mac: THEIRS, sender: PEER_V4, target_mac: OURS, target: V4 };
    assert_eq!(receive(&mut resolver, &answer.emit(), now), (Received::Other, vec![]));
    let asked = Neighbour { source: V6, source_mac: OURS, link_address: Some(OURS), ..Neighbour::probe(OURS, PEER_V6) };
    let answer = Neighbour { destination: V6, ..asked.answer(THEIRS) };
    assert_eq!(receive(&mut resolver, &frame(&answer), now), (Received::Other, vec![]));
}

/// An answer, an announcement, or a probe of another host's.
#[test]
fn an_address_that_another_host_has_is_not_used() {
    let claims = [
        Arp { sender: V4, target: PEER_V4, ..Arp::announcement(THEIRS, V4) }.emit().to_vec(),
        Arp { is_request: false, sender_mac: THEIRS, sender: V4, target_mac: OURS, target: [0; 4] }.emit().to_vec(),
        Arp::probe(THEIRS, V4).emit().to_vec(),
        frame(&Neighbour::announcement(THEIRS, V6)),
        frame(&Neighbour::probe(THEIRS, V6)),
    ];
    for claim in claims {
        let mut resolver = resolver(Speaker::Here);
        resolver.add(V4.into(), false, START);
        resolver.add(V6.into(), false, START);
        assert_eq!(receive(&mut resolver, &claim, START), (Received::Own, vec![]));
        assert!(resolver.take_changed());
        let taken: Vec<_> = resolver.own().iter().filter(|own| own.state == State::Taken).collect();
        assert_eq!((taken.len(), taken[0].rival, taken[0].counters.conflicts), (1, THEIRS, 1));
        // The resolver sends nothing more for the address, and leaves questions about it to the kernel.
        let lost = taken[0].address;
        let (sent, _) = run(&mut resolver);
        assert_eq!(sent.len(), 5);
        assert_eq!(receive(&mut resolver, &claim, START).0, Received::Other);
        assert_eq!(own(&resolver, lost).counters.announcements, 0);
    }
}

#[test]
fn what_was_sent_here_and_comes_back_is_no_conflict() {
    let mut resolver = resolver(Speaker::Here);
    resolver.add(V4.into(), false, START);
    resolver.add(V6.into(), false, START);
    for own in [Arp::probe(OURS, V4).emit().to_vec(), frame(&Neighbour::probe(OURS, V6))] {
        assert_eq!(receive(&mut resolver, &own, START), (Received::Own, vec![]));
    }
    assert!(resolver.own().iter().all(|own| own.state == State::Probing && own.counters.conflicts == 0));
}

#[test]
fn an_address_in_use_is_defended_at_a_bounded_rate() {
    for (claim, defence) in [
        (Arp::announcement(THEIRS, V4).emit().to_vec(), Arp::announcement(OURS, V4).emit().to_vec()),
        (frame(&Neighbour::announcement(THEIRS, V6)), frame(&Neighbour::announcement(OURS, V6))),
    ] {
        let (mut resolver, now) = used();
        let mut defended = Vec::new();
        for at in (now..now + 60_000_000).step_by(1000) {
            let (_, sent) = receive(&mut resolver, &claim, at);
            assert!(sent.iter().all(|frame| *frame == defence));
            defended.extend(sent.iter().map(|_| at - now));
        }
        assert_eq!(defended, [0, 10_000_000, 20_000_000, 30_000_000, 40_000_000, 50_000_000]);
        assert!(resolver.own().iter().all(|own| own.state == State::Used), "connections are bound to it");
        assert_eq!(resolver.own().iter().map(|own| own.counters.conflicts).sum::<u64>(), 60_000);
    }
}

/// A host that floods uses up its own share of the answers, and no other's.
#[test]
fn a_flood_costs_a_bounded_number_of_answers() {
    let (mut resolver, now) = used();
    let now = now.next_multiple_of(1_000_000);
    let answered = (0..1_000_000).filter(|at| !receive(&mut resolver, &question(THEIRS), now + at).1.is_empty()).count();
    assert_eq!(answered, usize::from(MOST_ANSWERS));
    let honest = receive(&mut resolver, &question([2, 0, 0, 0, 0, 3]), now + 999_999);
    assert_eq!(honest.1.len(), 1);
    assert_eq!(own(&resolver, V4).counters.unanswered, 1_000_000 - u64::from(MOST_ANSWERS));
    assert_eq!(receive(&mut resolver, &question(THEIRS), now + 1_000_000).1.len(), 1, "the next second");
}

/// However many MAC addresses a flood forges.
#[test]
fn a_forged_flood_costs_a_bounded_number_of_answers() {
    let (mut resolver, now) = used();
    let now = now.next_multiple_of(1_000_000);
    let flood = (0..500_000u32).map(|n| question([[2, 9].as_slice(), &n.to_be_bytes()].concat().try_into().expect("six bytes")));
    let answered = flood.filter(|frame| !receive(&mut resolver, frame, now).1.is_empty()).count();
    assert_eq!(answered, SOURCES * usize::from(MOST_ANSWERS), "every share is used up, and no more");
}

#[test]
fn where_the_kernel_answers_this_end_only_probes_and_defends() {
    let mut resolver = resolver(Speaker::Kernel);
    resolver.add(V4.into(), false, START);
    let (sent, now) = run(&mut resolver);
    assert_eq!(sent.len(), 5);
    assert_eq!(receive(&mut resolver, &question(THEIRS), now), (Received::Own, vec![]));
    assert_eq!(receive(&mut resolver, &Arp::announcement(THEIRS, V4).emit(), now).1.len(), 1);
}

#[test]
fn another_mac_address_is_announced_and_addresses_can_go() {
    let (mut resolver, now) = used();
    resolver.set_mac(OURS, now);
    assert_eq!(resolver.due(), u64::MAX);
    resolver.set_mac(THEIRS, now);
    let (sent, _) = run(&mut resolver);
    assert!(sent.len() == 4 && sent.iter().all(|(_, frame)| frame[6..12] == THEIRS));
    resolver.keep_only(&[V6.into()]);
    assert_eq!(resolver.own().len(), 1);
    assert_eq!(receive(&mut resolver, &question([2, 0, 0, 0, 0, 9]), now).0, Received::Other);
    resolver.keep_only(&[]);
    assert!(resolver.is_empty() && resolver.due() == u64::MAX);
    (0..100).for_each(|last| resolver.add(IpAddr::from([10, 0, 0, last]), false, now));
    assert_eq!(resolver.own().len(), MOST_ADDRESSES);
}

/// A frame that is nearly one about the addresses, with bytes changed and an end cut off; or any bytes.
fn forged() -> impl Strategy<Value = Vec<u8>> {
    let real = prop_oneof![
        Just(question(THEIRS)),
        Just(question_v6(THEIRS)),
        Just(Arp::announcement(THEIRS, V4).emit().to_vec()),
        Just(frame(&Neighbour::announcement(THEIRS, V6))),
        Just(frame(&Neighbour::probe(THEIRS, V6))),
    ];
    let changed =
        (real, proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), any::<prop::sample::Index>());
    let changed = changed.prop_map(|(mut frame, changes, end)| {
        changes.into_iter().for_each(|(at, value)| {
            let at = at.index(frame.len());
            frame[at] = value;
        });
        frame.truncate(if end.index(3) == 0 { end.index(frame.len()) } else { frame.len() });
        frame
    });
    prop_oneof![4 => changed, 1 => proptest::collection::vec(any::<u8>(), 0..200)]
}

proptest! {
    /// Whatever frames come, and however often: an address in use stays in use, no second has more answers than all
    /// shares together allow, and at most one frame is sent for each frame received.
    #[test]
    fn any_frames_are_bounded_and_harmless(frames in proptest::collection::vec(forged(), 1..400), verified in any::<bool>()) {
        let (mut resolver, now) = used();
        let now = now.next_multiple_of(1_000_000);
        let mut answers = 0;
        for (at, frame) in frames.iter().enumerate() {
            let mut sent = 0;
            let received = resolver.receive(frame, verified, now + at as u64, &mut |_| sent += 1);
            prop_assert!(sent <= 1 && (sent == 0 || received == Received::Own));
            answers += sent;
        }
        prop_assert!(resolver.own().iter().all(|own| own.state == State::Used));
        prop_assert!(answers <= SOURCES * usize::from(MOST_ANSWERS) + 2, "answers, and one defence of each address");
        prop_assert!(resolver.due() == u64::MAX);
    }

    /// After probing, whatever frames came, the address is in use or taken; it is taken only if there was a conflict.
    #[test]
    fn probing_ends_in_use_or_taken(frames in proptest::collection::vec((forged(), 0..10_000_000u64), 0..40), seed in any::<u64>()) {
        let mut resolver = Resolver::new(OURS, Speaker::Here, Timing::default(), seed);
        resolver.add(V4.into(), false, START);
        resolver.add(V6.into(), false, START);
        let mut frames = frames;
        frames.sort_by_key(|(_, at)| *at);
        for (frame, at) in frames {
            while resolver.due() <= START + at {
                let due = resolver.due();
                resolver.poll(due, &mut |_| {});
            }
            resolver.receive(&frame, false, START + at, &mut |_| {});
        }
        run(&mut resolver);
        for own in resolver.own() {
            prop_assert!(own.state != State::Probing);
            prop_assert!(own.state == State::Used || own.counters.conflicts > 0);
        }
    }
}
