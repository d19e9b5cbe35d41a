//! The classifier and the filter against the plainest list of rules: the first that matches decides.

use baton_filter::words::{UNMATCHED, UNREADABLE, WORDS, counted};
use baton_filter::{Action, Class, Direction, Filter, Installed, Matches, Packet, Ports, Prefix, Rule, State, Table, Verdict};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const SEEDS: [u64; 4] = [1, 2, 3, 4];

fn installed(rules: &[Rule]) -> Vec<Installed> {
    rules.iter().enumerate().map(|(slot, rule)| Installed { rule: *rule, slot: slot as u16 }).collect()
}

fn words() -> Vec<AtomicU64> {
    std::iter::repeat_with(|| AtomicU64::new(0)).take(WORDS).collect()
}

fn direction() -> impl Strategy<Value = Direction> {
    prop_oneof![Just(Direction::In), Just(Direction::Out)]
}

fn class() -> impl Strategy<Value = Class> {
    prop_oneof![4 => Just(Class::V4), 3 => Just(Class::V6), 1 => Just(Class::Other(0x806)), 1 => Just(Class::Other(0x88b5))]
}

fn state() -> impl Strategy<Value = State> {
    prop_oneof![Just(State::New), Just(State::Established)]
}

/// Few addresses, that differ in few bits, so that rules and packets meet.
fn address(class: Class) -> impl Strategy<Value = u128> {
    (0u128..8, 0u128..4).prop_map(move |(high, low)| match class {
        Class::V4 => (10 << 24 | high << 16 | low) << 96,
        Class::V6 => 0xfd << 120 | high << 64 | low,
        Class::Other(_) => 0,
    })
}

fn prefix(class: Class) -> impl Strategy<Value = Prefix> {
    let lengths = if class == Class::V4 { vec![0u8, 8, 15, 16, 31, 32] } else { vec![0, 8, 62, 64, 127, 128] };
    (address(class), prop::sample::select(lengths))
        .prop_map(|(address, length)| Prefix { address: address & Prefix::mask(length), length })
}

fn ports() -> impl Strategy<Value = Ports> {
    prop_oneof![8 => (0u16..8).prop_map(|port| (port, port)), 2 => (0u16..8, 0u16..8), 1 => (0u16..4, 60_000u16..=65_535)]
        .prop_map(|(one, other)| Ports { first: one.min(other), last: one.max(other) })
}

fn matches() -> impl Strategy<Value = Matches> {
    let transport = (prop::option::of(ports()), prop::option::of(ports()), prop::sample::select(vec![6u8, 17]));
    let addresses = class().prop_flat_map(|class| {
        let ip = !matches!(class, Class::Other(_));
        let prefix = move || prop::option::of(prefix(class)).prop_map(move |prefix| prefix.filter(|_| ip));
        (Just(class), prefix(), prefix())
    });
    (prop::option::of(direction()), any::<[bool; 3]>(), addresses, transport, prop::option::of(state())).prop_map(
        |(direction, [with_class, with_protocol, with_ports], (class, source, destination), (from, to, protocol), state)| {
            let ip = !matches!(class, Class::Other(_));
            let protocol = (ip && with_protocol).then_some(protocol);
            let ports = protocol.is_some() && with_ports;
            Matches {
                direction,
                class: (with_class || source.is_some() || destination.is_some()).then_some(class),
                protocol,
                source,
                destination,
                source_ports: from.filter(|_| ports),
                destination_ports: to.filter(|_| ports),
                state: state.filter(|_| protocol.is_some()),
            }
        },
    )
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![10 => Just(Action::Accept), 10 => Just(Action::Drop), 1 => Just(Action::Count)]
}

fn packet() -> impl Strategy<Value = Packet> {
    class()
        .prop_flat_map(|class| (Just(class), address(class), address(class)))
        .prop_flat_map(|(class, source, destination)| {
            let ports = (0u16..9, 0u16..9);
            (Just((class, source, destination)), ports, prop::sample::select(vec![6u8, 17, 1]))
        })
        .prop_map(|((class, source, destination), (source_port, destination_port), protocol)| {
            let ip = !matches!(class, Class::Other(_));
            let with_ports = ip && protocol != 1;
            Packet {
                class,
                protocol: ip.then_some(protocol),
                source,
                destination,
                source_port: if with_ports { source_port } else { 0 },
                destination_port: if with_ports { destination_port } else { 0 },
                ip: 14,
                transport: 34,
                end: 54,
                ..Packet::empty(class)
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// 2000 sets of rules and 200,000 packets.
    #[test]
    fn the_classifier_finds_what_a_list_finds(
        rules in prop::collection::vec((matches(), action()), 0..40),
        packets in prop::collection::vec((packet(), direction(), state()), 100),
    ) {
        let mut rules: Vec<Rule> = rules.into_iter().map(|(matches, action)| Rule { matches, action }).collect();
        let mut counts = 0;
        rules.retain(|rule| rule.action != Action::Count || { counts += 1; counts <= 16 });
        let table = Table::new(installed(&rules), 1, SEEDS).expect("few rules");
        for (packet, direction, state) in packets {
            let state = matches!(packet.protocol, Some(6 | 17)).then_some(state);
            let first = rules.iter().position(|rule| {
                rule.action != Action::Count && rule.matches.matches(direction, &packet, state)
            });
            prop_assert_eq!(table.find(direction, &packet, state).map(usize::from), first, "{:?} {:?} {:?}", packet, direction, state);
        }
    }
}

/// An IPv4 frame of UDP from 10.0.0.`from` to 10.0.0.`to`.
fn udp(from: (u8, u16), to: (u8, u16)) -> Vec<u8> {
    let mut frame = vec![0; 14 + 20 + 8 + 16];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&44u16.to_be_bytes());
    frame[23] = 17;
    frame[26..30].copy_from_slice(&[10, 0, 0, from.0]);
    frame[30..34].copy_from_slice(&[10, 0, 0, to.0]);
    frame[34..36].copy_from_slice(&from.1.to_be_bytes());
    frame[36..38].copy_from_slice(&to.1.to_be_bytes());
    frame
}

fn filter(text: &str, generation: u32) -> Filter {
    let rules = baton_filter::parse_all(text).expect("rules");
    Filter::new(Arc::new(Table::new(installed(&rules), generation, SEEDS).expect("few rules")), SEEDS)
}

#[test]
fn only_answers_come_in() {
    let words = words();
    let first = filter("in udp state established accept\nout udp accept\ndrop", 1);
    let (out, back) = (udp((1, 5), (2, 53)), udp((2, 53), (1, 5)));
    let judge = |filter: &Filter, direction, frame: &[u8]| filter.judge(&words, direction, frame, (1, 58), (1_000_000, true));
    assert_eq!(judge(&first, Direction::In, &back), Verdict::Drop);
    assert_eq!(judge(&first, Direction::Out, &out), Verdict::Pass);
    for _ in 0..3 {
        assert_eq!(judge(&first, Direction::In, &back), Verdict::Pass);
        assert_eq!(judge(&first, Direction::Out, &out), Verdict::Pass);
    }
    assert_eq!(counted(&words, 0).packets, 3);
    assert_eq!((counted(&words, 1).packets, counted(&words, 1).bytes), (4, 4 * 58));
    // Another table applies to the next frame, though the flow is known.
    let second = filter("in udp sport 53 drop\ndrop", 2);
    assert_eq!(judge(&second, Direction::In, &back), Verdict::Drop);
    assert_eq!(judge(&second, Direction::Out, &out), Verdict::Drop);
}

#[test]
fn fragments_share_the_verdict_of_the_first() {
    let words = words();
    let filter = filter("in udp dport 53 accept\ndrop", 1);
    let fragment = |ident: u8, offset: u16, port: u16| {
        let mut frame = udp((2, 9), (1, port));
        frame[19] = ident;
        frame[20..22].copy_from_slice(&(offset / 8 | if offset < 160 { 0x2000 } else { 0 }).to_be_bytes());
        frame
    };
    let judge = |frame: &[u8]| filter.judge(&words, Direction::In, frame, (1, 58), (1_000_000, true));
    assert_eq!(judge(&fragment(1, 24, 0)), Verdict::Drop, "its first fragment is not known");
    assert_eq!(judge(&fragment(1, 0, 53)), Verdict::Pass);
    assert_eq!(judge(&fragment(1, 24, 0)), Verdict::Pass);
    assert_eq!(judge(&fragment(1, 160, 0)), Verdict::Pass);
    assert_eq!(judge(&fragment(2, 0, 54)), Verdict::Drop);
    assert_eq!(judge(&fragment(2, 24, 53)), Verdict::Drop);
    assert_eq!(counted(&words, 0).packets, 3);
    assert_eq!(counted(&words, UNREADABLE).packets, 2);
}

/// Every truncation and many changes of frames are judged without a panic, and truncated frames are dropped.
#[test]
fn damaged_frames_are_dropped() {
    let words = words();
    let filter = filter("in udp dport 53 accept\nin tcp dport 1 accept\nin arp accept", 1);
    let good = udp((2, 9), (1, 53));
    let mut v6 = vec![0; 14 + 40 + 8 + 20];
    v6[12..14].copy_from_slice(&[0x86, 0xdd]);
    v6[14] = 0x60;
    v6[18..20].copy_from_slice(&28u16.to_be_bytes());
    v6[20] = 44;
    v6[54] = 6;
    let judge = |frame: &[u8]| filter.judge(&words, Direction::In, frame, (1, frame.len() as u64), (1_000_000, true));
    for frame in [&good, &v6] {
        for length in 0..frame.len() {
            assert_eq!(judge(&frame[..length]), Verdict::Drop, "cut at {length}");
        }
        for at in 12..frame.len() {
            for value in 0..=255 {
                let mut bad = frame.clone();
                bad[at] = value;
                judge(&bad);
            }
        }
    }
    assert_eq!(counted(&words, UNMATCHED).packets > 0, true);
}
