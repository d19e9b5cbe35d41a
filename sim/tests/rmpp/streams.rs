//! Streams: long messages come by them where both ends have any, and what a hostile peer writes into one reaches
//! nothing but the packets that were cleared for it. Breaks, delays and restarts are in `faults.rs`.

use crate::worlds::{clean, config};
use baton_rmpp::{Drop, Intake, Memory, Outgoing, Region, Request, StreamId, StreamOrder};
use baton_sim::rmpp::{Carrier, Node, World, halves_on_nic};
use baton_sim::rmpp_streams::{StreamFaults, StreamNet};
use baton_sim::{Impairments, Rng, stream};
use baton_wire::rmpp::stream::{Greeting, RUN, RunHeader};
use baton_wire::rmpp::{Body, Cts, Header, Kind, Offer, Packet, Rts, append_data, emit};

const CLEAN: Impairments = Impairments { rate: 1_000_000_000, delay: 20, ..clean() };
const INCARNATIONS: [u32; 2] = [100, 101];

/// Endpoints whose data half is on their host; those for which `least` says so have streams.
fn world(least: &[Option<u64>], ahead: u32) -> World {
    let node = |(number, least): (usize, &Option<u64>)| {
        let config = baton_rmpp::Config { ahead, ..config(number as u16) };
        let mut node = Node::new(config, halves_on_nic(0), Carrier::Udp4.address(number));
        least.into_iter().for_each(|least| node.use_streams(StreamNet::settings(number, *least)));
        node
    };
    let mut world = World::new(least.iter().enumerate().map(node).collect(), Carrier::Udp4, CLEAN, 5);
    world.streams = Some(StreamNet::new(7, StreamFaults { delay: 30, notice: 100, ..StreamFaults::default() }));
    world
}

fn post(world: &mut World, at: usize, region: Region, token: u64) {
    let request = Request { source: None, context: 0, tag: token, ignore: 0, region, token };
    let now = world.now;
    let node = &mut world.nodes[at];
    node.policy.post(request, now, &mut node.memory[..]).unwrap();
}

fn send(world: &mut World, from: usize, to: usize, region: Region, token: u64) {
    let (address, now) = (world.address(to), world.now);
    let node = &mut world.nodes[from];
    let peer = node.policy.open(address, to as u16).unwrap();
    stream::fill(token, 0, &mut node.memory[region.offset as usize..][..region.length as usize]);
    node.policy.send(Outgoing { peer, context: 0, tag: token, data: 0, region, token }, now).unwrap();
}

/// Messages of several lengths, some at a time, in both directions. Returns bytes that came by streams.
fn exchange(world: &mut World) -> u64 {
    let mut expected = [0; 2];
    for (round, length) in [10u64, 9_000, 40_000, 150_000, 150_001, 9_999, 200_000].into_iter().enumerate() {
        for part in 0..2 {
            for from in 0..2 {
                let token = (round * 4 + part * 2 + from) as u64;
                let region = Region { offset: part as u64 * 200_000, length };
                post(world, 1 - from, Region { offset: 400_000 + part as u64 * 200_000, length }, token);
                send(world, from, 1 - from, region, token);
                expected[from] += length;
            }
        }
        let begin = world.now;
        assert!(world.run_until(10_000_000, |world| world.nodes.iter().all(|node| node.completions.len() == 4)), "{length}");
        assert!(world.now - begin < 9_000, "{length} bytes: something was cleared by a time-out");
        for node in &mut world.nodes {
            for completion in std::mem::take(&mut node.completions) {
                let delivered = completion.result.unwrap();
                assert_eq!(delivered.placed, length);
                if completion.side == baton_rmpp::Side::Receive {
                    let at = 400_000 + (completion.token % 4 / 2) as usize * 200_000;
                    assert_eq!(stream::mismatches(completion.token, 0, &node.memory[at..at + length as usize]), 0);
                }
            }
        }
    }
    assert!(world.run_until(10_000_000, |world| world.nodes.iter().all(|node| node.leftovers() == [0; 7])));
    let [a, b] = [0, 1].map(|node| *world.nodes[node].host.counters());
    assert_eq!([a.streamed[0], b.streamed[0]], [b.streamed[1], a.streamed[1]]);
    a.streamed[0] + b.streamed[0]
}

#[test]
fn long_messages_come_by_streams_where_both_ends_have_any() {
    for ahead in [0, 100, 2048] {
        let mut both = world(&[Some(5_000), Some(5_000)], ahead);
        let streamed = exchange(&mut both);
        assert!(streamed > 1_000_000, "ahead {ahead}: {streamed}");
        for node in &both.nodes {
            let dropped = [node.host.counters(), node.policy.counters()].map(|counters| counters.dropped);
            assert_eq!(dropped.as_flattened().iter().sum::<u64>(), 0, "{dropped:?}");
            assert_eq!((node.host.counters().streams, node.host.counters().streams_ended), (1, 0));
        }
        for least in [[None, Some(5_000)], [Some(5_000), None], [None, None]] {
            let mut one = world(&least, ahead);
            assert_eq!(exchange(&mut one), 0);
        }
    }
}

/// What several CTS have cleared before the stream takes any of it goes as one run; a CTS for what the stream was given
/// is not answered again, and one for packets before that is.
#[test]
fn a_sender_gives_a_stream_what_is_cleared_once() {
    let mut world = world(&[Some(5_000), None], 0);
    // The receiver is played by the test.
    world.streams = None;
    send(&mut world, 0, 1, Region { offset: 0, length: 100_000 }, 3);
    assert!(world.run_until(9_000, |world| world.nodes[1].policy.usage().1 == 1));
    let mut grant = 0;
    let mut clear = |world: &mut World, first: u32, count: u16, stream: u32| {
        grant += 1;
        let header = Header::new(Kind::Cts, [1, 0], [INCARNATIONS[1], INCARNATIONS[0]]);
        // The first message of an endpoint has handle 0x10000.
        let header = Header { message: 1, grant, packet: first, count, handle: 0x10000, ..header };
        let offer = Some(Offer { port: 9, peer: 5, key: 6 });
        let mut out = vec![0; 1446];
        let written = emit(&header, &Body::Cts(Cts { handle: 77, offer, stream }), &mut out);
        let length = append_data(&mut out, written, &[], &world.address(1), &world.address(0));
        let frame = world.frame(1, 0, &out[..length]);
        world.nodes[0].receive(&frame);
    };
    clear(&mut world, 0, 10, 0);
    let host = &mut world.nodes[0].host;
    let Some(StreamOrder::Open(id, to, greeting)) = host.poll_stream() else { panic!("it opens what was offered") };
    assert_eq!((to.port, Greeting::parse(&greeting).unwrap().key), (9, 6));
    let mut packet = vec![0; 1446];
    let memory = world.nodes[0].memory.clone();
    let packets = |world: &mut World, packet: &mut [u8]| {
        std::iter::from_fn(|| world.nodes[0].host.poll_transmit(&memory[..], packet)).filter(|sent| sent.length > 1000).count()
    };
    assert_eq!(packets(&mut world, &mut packet), 10);
    let run = |world: &mut World| {
        let host = &mut world.nodes[0].host;
        host.next_to_write()?;
        let outflow = host.outflow(id)?;
        host.stream_written(id, RUN + outflow.region.length as usize);
        let run = RunHeader::parse(&outflow.header.0).unwrap();
        Some((run.first, run.count, run.handle))
    };
    clear(&mut world, 10, 10, id.number);
    clear(&mut world, 20, 10, id.number);
    assert_eq!((run(&mut world), run(&mut world)), (Some((10, 20, 77)), None));
    clear(&mut world, 15, 15, id.number);
    assert_eq!(run(&mut world), None, "it was given that");
    clear(&mut world, 4, 26, id.number);
    assert_eq!((run(&mut world), packets(&mut world, &mut packet)), (Some((4, 26, 77)), 0));
    // The receiver reads another stream: packets.
    clear(&mut world, 30, 5, 0);
    assert_eq!((run(&mut world), packets(&mut world, &mut packet)), (None, 5));
}

/// A stream by which nothing comes any more, and of which nobody learns that it is dead, is given up.
#[test]
fn a_silent_stream_is_given_up() {
    let mut world = world(&[Some(5_000), Some(5_000)], 2048);
    exchange(&mut world);
    world.streams.as_mut().unwrap().set_faults(StreamFaults { delay: 1 << 40, notice: 1 << 41, ..StreamFaults::default() });
    let region = Region { offset: 0, length: 150_000 };
    post(&mut world, 1, region, 77);
    send(&mut world, 0, 1, region, 77);
    assert!(world.run_until(8_000_000, |world| world.nodes.iter().all(|node| node.completions.len() == 1)));
    assert!(world.nodes[1].completions[0].result.is_ok());
    assert_eq!(stream::mismatches(77, 0, &world.nodes[1].memory[..150_000]), 0);
}

/// A receiver, whose peer 0 is played by the test, and an honest peer 2.
struct Victim {
    world: World,
    number: u32,
    message: u32,
}

/// Where the messages of the hostile peer go, and packets of a message.
const REGION: Region = Region { offset: 100_000, length: 90_000 };
const FRAGMENT: u16 = 1000;
const LENGTH: u64 = 100_500;

impl Victim {
    fn new() -> Victim {
        let mut world = world(&[None, Some(5_000), Some(5_000)], 2048);
        // The hostile endpoint sends nothing by itself.
        world.nodes[0].memory.fill(0);
        Victim { world, number: 10, message: 0 }
    }

    fn packet(&mut self, header: Header, body: Body<'_>, data: &[u8]) {
        let mut out = vec![0; 1446];
        let written = emit(&header, &body, &mut out);
        let length = append_data(&mut out, written, data, &self.world.address(0), &self.world.address(1));
        let frame = self.world.frame(0, 1, &out[..length]);
        self.world.nodes[1].receive(&frame);
    }

    fn header(kind: Kind) -> Header {
        Header::new(kind, [0, 1], INCARNATIONS)
    }

    /// Packets of the receiver to the hostile peer.
    fn answers(&mut self) -> Vec<(Header, Cts)> {
        let mut out = vec![0; 1446];
        let mut seen = Vec::new();
        let addresses = [self.world.address(0), self.world.address(1)];
        let (now, node) = (self.world.now, &mut self.world.nodes[1]);
        loop {
            node.settle(now);
            let Some(sent) = node.host.poll_transmit(&node.memory[..], &mut out) else { return seen };
            if sent.to == addresses[0] {
                let packet = Packet::parse(&out[..sent.length], &addresses[1], &addresses[0]).unwrap();
                seen.push((packet.header, if let Body::Cts(cts) = packet.body { cts } else { Cts::default() }));
            }
        }
    }

    /// Announces a long message for which a receive waits. Returns the CTS.
    fn announce(&mut self) -> (Header, Cts) {
        self.announce_for(REGION);
        self.cts().expect("the message is cleared")
    }

    /// Announces a long message that has a receive of this region.
    fn announce_for(&mut self, region: Region) {
        self.message += 1;
        let number = self.message;
        post(&mut self.world, 1, region, number.into());
        let now = self.world.now;
        self.world.nodes[1].settle(now);
        // What was before is not waited for.
        let header = Header { message: number, packet: number, ..Self::header(Kind::Rts) };
        let rts = Rts { length: LENGTH, tag: number.into(), data: 0, context: 0, handle: 0x1_0000 | number, fragment: FRAGMENT };
        self.packet(header, Body::Rts(rts, &[]), &[7; 500]);
        self.world.nodes[1].settle(now);
    }

    fn cts(&mut self) -> Option<(Header, Cts)> {
        self.answers().into_iter().rfind(|(header, _)| header.kind == Kind::Cts)
    }

    fn greeting(&mut self, offer: Offer) -> Greeting {
        self.number += 1;
        let address = self.world.address(0);
        Greeting { endpoints: [0, 1], incarnations: INCARNATIONS, stream: self.number, peer: offer.peer, key: offer.key, address }
    }

    /// A stream, and a message that is cleared to come by it.
    fn attached(&mut self) -> (StreamId, Header, Cts) {
        let (_, cts) = self.announce();
        let greeting = self.greeting(cts.offer.unwrap());
        let from = self.world.address(0).address;
        let id = self.world.nodes[1].host.accept_stream(&from, &greeting.emit()).unwrap();
        let (header, cts) = self.announce();
        assert_eq!((cts.stream, header.packet), (id.number, 0));
        (id, header, cts)
    }

    fn run(id: StreamId, header: &Header, cts: &Cts) -> RunHeader {
        RunHeader {
            incarnations: INCARNATIONS,
            stream: id.number,
            message: header.message,
            handle: cts.handle,
            grant: header.grant,
            first: header.packet,
            count: header.count,
            more: None,
            end: false,
            length: u32::from(header.count) * u32::from(FRAGMENT),
        }
    }

    /// Gives the receiver bytes of a stream, as a socket would. False: it has closed the stream.
    fn feed(&mut self, id: StreamId, mut bytes: &[u8]) -> bool {
        let node = &mut self.world.nodes[1];
        while !bytes.is_empty() {
            let Some(intake) = node.host.intake(id) else { return false };
            let count = match intake {
                Intake::Header(missing) => missing.min(bytes.len()),
                Intake::Discard(most) => (most as usize).min(bytes.len()),
                Intake::Place(region) => (region.length as usize).min(bytes.len()),
                Intake::Wait => {
                    node.settle(1_000_000);
                    continue;
                }
                Intake::Hold => return true,
            };
            match intake {
                Intake::Header(_) => node.host.stream_header(id, &bytes[..count]),
                Intake::Place(region) => {
                    let inside = region.offset >= REGION.offset && region.offset + region.length <= REGION.offset + LENGTH;
                    assert!(inside, "{region:?}");
                    assert!(node.memory[..].write(region.offset, &bytes[..count]));
                    node.host.stream_placed(id, count as u64);
                }
                _ => node.host.stream_placed(id, count as u64),
            }
            bytes = &bytes[count..];
        }
        node.host.intake(id).is_some()
    }

    fn dropped(&self, reason: Drop) -> u64 {
        self.world.nodes[1].host.counters().dropped(reason)
    }

    /// Another peer's messages come as they should.
    fn others_go_on(&mut self, token: u64) {
        let region = Region { offset: 400_000, length: 120_000 };
        post(&mut self.world, 1, region, token);
        send(&mut self.world, 2, 1, Region { offset: 0, length: 120_000 }, token);
        let done = |world: &mut World| world.nodes[1].completions.iter().any(|one| one.token == token && one.result.is_ok());
        assert!(self.world.run_until(3_000_000, done));
        assert_eq!(stream::mismatches(token, 0, &self.world.nodes[1].memory[400_000..520_000]), 0);
        self.world.nodes[1].completions.retain(|one| one.token != token);
    }
}

#[test]
fn a_run_as_it_should_be_is_placed() {
    let mut victim = Victim::new();
    let (id, header, cts) = victim.attached();
    let run = RunHeader { more: Some(40), ..Victim::run(id, &header, &cts) };
    assert!(header.count > 64 && victim.feed(id, &[&run.emit()[..], &vec![9; run.length as usize]].concat()));
    let (further, _) = victim.cts().unwrap_or((header, cts));
    // All that the receive takes was cleared at once: it is shorter than the message.
    assert_eq!((u64::from(header.count), further), ((REGION.length - 500).div_ceil(1000), header));
    let memory = &victim.world.nodes[1].memory;
    let [begin, end] = [REGION.offset as usize, (REGION.offset + REGION.length) as usize];
    assert!(memory[begin..begin + 500].iter().all(|byte| *byte == 7) && memory[begin + 500..end].iter().all(|byte| *byte == 9));
    assert_ne!(memory[end], 9, "the last packet reaches behind the receive");
    let done = victim.world.nodes[1].completions.iter().filter(|completion| completion.result.is_ok()).count();
    assert_eq!(done, 1);
    victim.others_go_on(900);
}

#[test]
fn a_run_that_makes_no_sense_ends_the_stream_and_nothing_else() {
    let mut victim = Victim::new();
    type Change = fn(RunHeader) -> RunHeader;
    let bad: [(&str, Change, Drop); 11] = [
        ("more than is cleared", |run| RunHeader { count: run.count + 1, length: run.length + 1000, ..run }, Drop::NotCleared),
        ("behind what is cleared", |run| RunHeader { first: run.count.into(), ..run }, Drop::NotCleared),
        ("far behind", |run| RunHeader { first: u32::MAX - 5000, ..run }, Drop::NotCleared),
        ("longer than its packets", |run| RunHeader { length: run.length + 1, ..run }, Drop::Length),
        ("shorter than its packets", |run| RunHeader { length: run.length - 1, ..run }, Drop::Length),
        ("very long", |run| RunHeader { length: u32::MAX, ..run }, Drop::Length),
        ("another number for the handle", |run| RunHeader { message: run.message + 1, ..run }, Drop::Stranger),
        ("an old incarnation", |run| RunHeader { incarnations: [99, 101], ..run }, Drop::Stranger),
        ("an old incarnation of ours", |run| RunHeader { incarnations: [100, 99], ..run }, Drop::Stranger),
        ("another stream", |run| RunHeader { stream: run.stream + 1, ..run }, Drop::Stranger),
        ("no run", |run| RunHeader { count: 0, ..run }, Drop::Stranger),
    ];
    for (token, (what, change, reason)) in bad.into_iter().enumerate() {
        let (id, header, cts) = victim.attached();
        let before = victim.world.nodes[1].memory.clone();
        let count = victim.dropped(reason);
        let run = change(Victim::run(id, &header, &cts));
        assert!(!victim.feed(id, &[&run.emit()[..], &[0xee; 5000]].concat()), "{what}");
        assert_eq!(victim.dropped(reason), count + 1, "{what}");
        assert!(victim.world.nodes[1].memory == before, "{what}");
        assert_eq!(victim.world.nodes[1].host.poll_stream(), Some(StreamOrder::CloseIncoming(id)), "{what}");
        // What was cleared for the stream is cleared again, for packets.
        let (again, cts) = victim.cts().unwrap();
        assert_eq!((again.message, again.packet, cts.stream), (header.message, 0, 0), "{what}");
        assert!(again.count <= 128 && cts.offer.is_some());
        victim.others_go_on(1000 + token as u64);
    }
    for garbage in [vec![0; 200], vec![0xff; 200], b"GET / HTTP/1.1\r\n\r\n".repeat(10)] {
        let (id, ..) = victim.attached();
        let before = victim.world.nodes[1].memory.clone();
        assert!(!victim.feed(id, &garbage));
        assert!(victim.world.nodes[1].memory == before);
        victim.world.nodes[1].host.poll_stream();
    }
    // Cut off in its header, or in its bytes.
    for cut in [1, RUN - 1, RUN + 1, RUN + 2500] {
        let (id, header, cts) = victim.attached();
        let run = Victim::run(id, &header, &cts);
        assert!(victim.feed(id, &[&run.emit()[..], &[1; 5000]].concat()[..cut]));
        victim.world.nodes[1].host.incoming_ended(id);
        victim.world.nodes[1].host.poll_stream();
        let (again, cts) = victim.cts().unwrap();
        assert_eq!((again.packet, cts.stream), (if cut > RUN + 2000 { 2 } else { 0 }, 0), "cut at {cut}");
    }
}

/// Bytes of a message that has ended are read and forgotten; so is what comes a second time.
#[test]
fn a_late_run_writes_nothing() {
    let mut victim = Victim::new();
    let (id, header, cts) = victim.attached();
    let run = Victim::run(id, &header, &cts);
    let bytes = |value: u8| [&run.emit()[..], &vec![value; run.length as usize]].concat();
    assert!(victim.feed(id, &bytes(1)[..RUN + 3000]));
    // The message ends in the middle of its run: its sender has given it up.
    let floor = victim.message + 1;
    victim.packet(Header { packet: floor, ..Victim::header(Kind::Ping) }, Body::Empty, &[]);
    victim.answers();
    let before = victim.world.nodes[1].memory.clone();
    assert!(victim.feed(id, &bytes(2)[RUN + 3000..]));
    let count = victim.dropped(Drop::NoMessage);
    assert!(victim.feed(id, &bytes(3)), "another run of it");
    assert_eq!(victim.dropped(Drop::NoMessage), count + 1);
    assert!(victim.world.nodes[1].memory == before);
    // The stream goes on to be of use.
    let (header, cts) = victim.announce();
    let run = Victim::run(id, &header, &cts);
    assert!(victim.feed(id, &[&run.emit()[..], &vec![4; run.length as usize]].concat()));
    assert!(victim.world.nodes[1].memory[REGION.offset as usize + 500..][..80_000].iter().all(|byte| *byte == 4));
}

#[test]
fn a_stranger_cannot_open_a_peers_stream() {
    let mut victim = Victim::new();
    let (_, cts) = victim.announce();
    let good = victim.greeting(cts.offer.unwrap());
    let from = victim.world.address(0).address;
    let other = victim.world.address(2);
    let bad = [
        Greeting { key: good.key ^ 1, ..good },
        Greeting { key: 0, ..good },
        Greeting { peer: good.peer + 1, ..good },
        Greeting { peer: u16::MAX, ..good },
        Greeting { endpoints: [1, 1], ..good },
        Greeting { endpoints: [0, 2], ..good },
        Greeting { incarnations: [99, 101], ..good },
        Greeting { incarnations: [100, 100], ..good },
        Greeting { address: other, ..good },
    ];
    let host = &mut victim.world.nodes[1].host;
    for greeting in bad {
        assert!(host.accept_stream(&from, &greeting.emit()).is_err(), "{greeting:?}");
    }
    assert!(host.accept_stream(&other.address, &good.emit()).is_err(), "from another host");
    let mut damaged = good.emit();
    damaged[30] ^= 1;
    assert!(host.accept_stream(&from, &damaged).is_err());
    assert!(host.accept_stream(&from, &good.emit()).is_ok());
    assert!(host.accept_stream(&from, &good.emit()).is_err(), "twice");
    // A new one replaces it.
    let id = StreamId { peer: good.peer, number: good.stream };
    assert!(host.accept_stream(&from, &Greeting { stream: good.stream + 1, ..good }.emit()).is_ok());
    assert_eq!(host.poll_stream(), Some(StreamOrder::CloseIncoming(id)));
    assert!(host.intake(id).is_none());
}

/// A run that a sender writes behind its RTS, without having been asked.
fn unasked(id: StreamId, message: u32) -> RunHeader {
    RunHeader {
        incarnations: INCARNATIONS,
        stream: id.number,
        message,
        handle: 0,
        grant: 0,
        first: 0,
        count: 100,
        more: None,
        end: true,
        length: 100_000,
    }
}

#[test]
fn a_run_that_nobody_asked_for_is_placed_if_all_of_it_is_wanted_and_dropped_else() {
    let mut victim = Victim::new();
    let (id, header, cts) = victim.attached();
    let run = Victim::run(id, &header, &cts);
    assert!(victim.feed(id, &[&run.emit()[..], &vec![9; run.length as usize]].concat()));
    victim.answers();
    // Of a message that was never announced: it waits, and then stands in nobody's way.
    assert!(victim.feed(id, &unasked(id, 77).emit()));
    assert_eq!(victim.world.nodes[1].host.intake(id), Some(Intake::Hold));
    victim.announce();
    let before = victim.world.nodes[1].memory.clone();
    assert!(victim.feed(id, &vec![0xee; 100_000]));
    // Of one whose receive is shorter: all of it is dropped, and comes again.
    assert!(victim.feed(id, &[&unasked(id, victim.message).emit()[..], &vec![0xee; 100_000]].concat()));
    assert!(victim.world.nodes[1].memory == before);
    assert_eq!(victim.world.nodes[1].host.counters().unasked, [0, 2]);
    // Of one that is wanted.
    let whole = Region { length: LENGTH, ..REGION };
    victim.announce_for(whole);
    assert!(victim.feed(id, &[&unasked(id, victim.message).emit()[..], &vec![3; 100_000]].concat()));
    let memory = &victim.world.nodes[1].memory[REGION.offset as usize..][..LENGTH as usize];
    assert!(memory[..500].iter().all(|byte| *byte == 7) && memory[500..].iter().all(|byte| *byte == 3));
    assert_eq!(victim.world.nodes[1].host.counters().unasked, [1, 2]);
    let answers = victim.answers();
    assert!(answers.iter().all(|(header, _)| header.kind == Kind::Ack), "no CTS was needed: {answers:?}");
    // One that says something else than its RTS ends the stream, and nothing else.
    victim.announce_for(whole);
    let wrong = RunHeader { length: 100_001, ..unasked(id, victim.message) };
    assert!(!victim.feed(id, &[&wrong.emit()[..], &[0xee; 5000]].concat()));
    assert_eq!(victim.dropped(Drop::Length), 1);
    assert_eq!(victim.world.nodes[1].host.poll_stream(), Some(StreamOrder::CloseIncoming(id)));
    let (again, cts) = victim.cts().unwrap();
    assert_eq!((again.message, again.packet, cts.stream), (victim.message, 0, 0));
    victim.others_go_on(900);
}

/// A world whose endpoint 0 has a stream to endpoint 1 that is read.
fn opened() -> World {
    let mut world = world(&[Some(5_000), Some(5_000)], 2048);
    for token in 0..4 {
        let region = Region { offset: 0, length: 100_000 };
        post(&mut world, 1, Region { offset: 400_000, ..region }, token);
        send(&mut world, 0, 1, region, token);
        arrived(&mut world, token, 400_000);
    }
    world.run_until(1_000_000, |world| world.nodes.iter().all(|node| node.leftovers() == [0; 7]));
    world
}

/// A message of 100,000 bytes arrives, and its sender learns of that.
fn arrived(world: &mut World, token: u64, offset: usize) {
    let ended = |node: &Node| node.completions.iter().any(|one| one.token == token && one.result.is_ok());
    assert!(world.run_until(10_000_000, |world| world.nodes.iter().all(ended)), "{token}");
    assert_eq!(stream::mismatches(token, 0, &world.nodes[1].memory[offset..offset + 100_000]), 0);
    world.nodes.iter_mut().for_each(|node| node.completions.clear());
}

#[test]
fn the_data_of_a_message_for_which_a_receive_waits_comes_unasked() {
    let mut world = opened();
    let before = *world.nodes[1].host.counters();
    post(&mut world, 1, Region { offset: 400_000, length: 100_000 }, 10);
    send(&mut world, 0, 1, Region { offset: 0, length: 100_000 }, 10);
    let begin = world.now;
    arrived(&mut world, 10, 400_000);
    let after = *world.nodes[1].host.counters();
    assert_eq!((after.unasked, after.sent), ([before.unasked[0] + 1, 0], before.sent + 1), "an ACK, and no CTS");
    assert!(world.now - begin < 1_000, "nothing waited for a time-out: {}", world.now - begin);
}

#[test]
fn data_that_came_before_its_receive_waits_in_the_stream() {
    let mut world = opened();
    let before = *world.nodes[1].host.counters();
    send(&mut world, 0, 1, Region { offset: 0, length: 100_000 }, 10);
    world.run_until(50_000, |_| false);
    assert_eq!(world.nodes[1].host.counters().streamed, before.streamed);
    post(&mut world, 1, Region { offset: 400_000, length: 100_000 }, 10);
    arrived(&mut world, 10, 400_000);
    let [sent, received] = [0, 1].map(|node| *world.nodes[node].host.counters());
    assert_eq!(received.unasked, [before.unasked[0] + 1, 0]);
    assert_eq!(sent.streamed[1], received.streamed[0], "it was sent once");
}

#[test]
fn data_whose_receive_comes_later_than_anothers_makes_way() {
    let mut world = opened();
    let before = *world.nodes[1].host.counters();
    for token in [10, 11] {
        send(&mut world, 0, 1, Region { offset: (token - 10) * 100_000, length: 100_000 }, token);
    }
    post(&mut world, 1, Region { offset: 500_000, length: 100_000 }, 11);
    let ended = |world: &mut World| world.nodes.iter().all(|node| node.completions.iter().any(|one| one.token == 11));
    assert!(world.run_until(1_000_000, ended));
    assert_eq!(stream::mismatches(11, 0, &world.nodes[1].memory[500_000..600_000]), 0);
    post(&mut world, 1, Region { offset: 400_000, length: 100_000 }, 10);
    arrived(&mut world, 10, 400_000);
    assert_eq!(world.nodes[1].host.counters().unasked, [before.unasked[0], 1]);
    // Whoever posts late is asked for a while.
    for token in 12..15 {
        post(&mut world, 1, Region { offset: 400_000, length: 100_000 }, token);
        send(&mut world, 0, 1, Region { offset: 0, length: 100_000 }, token);
        arrived(&mut world, token, 400_000);
    }
    assert_eq!(world.nodes[1].host.counters().unasked, [before.unasked[0] + 1, 1]);
}

/// Headers with any fields: whatever is placed lies in the receive.
#[test]
fn any_header_reaches_the_receive_at_most() {
    let mut rng = Rng::new(11);
    let mut victim = Victim::new();
    let (mut id, mut header, mut cts) = victim.attached();
    let mut kept = 0;
    for round in 0..3000u32 {
        let mut any = |most: u64, usual: u32| if rng.chance(700_000) { usual } else { rng.below(most) as u32 };
        let good = Victim::run(id, &header, &cts);
        let count = any(5000, good.count.into());
        let first = any(200, good.first);
        let length = any(200_000, u32::from(count as u16) * 1000);
        let run = RunHeader {
            incarnations: [any(200, 100), any(200, 101)],
            message: any(200, good.message),
            handle: if round % 5 == 0 { 0 } else { any(1 << 17, good.handle) },
            grant: any(10, good.grant.into()) as u16,
            first,
            count: count as u16,
            more: (round % 2 == 0).then(|| any(200, first + 3)),
            end: round % 3 == 0,
            length,
            ..good
        };
        let before = victim.world.nodes[1].memory[..REGION.offset as usize].to_vec();
        let behind = victim.world.nodes[1].memory[(REGION.offset + REGION.length) as usize..1 << 20].to_vec();
        let bytes = [&run.emit()[..], &vec![round as u8; 3000]].concat();
        let open = victim.feed(id, &bytes);
        kept += u32::from(open);
        let memory = &victim.world.nodes[1].memory;
        assert!(
            memory[..REGION.offset as usize] == before && memory[(REGION.offset + REGION.length) as usize..1 << 20] == behind
        );
        victim.world.nodes[1].settle(1_000_000);
        if open {
            victim.world.nodes[1].host.incoming_ended(id);
        }
        while victim.world.nodes[1].host.poll_stream().is_some() {}
        victim.answers();
        // The next number is not beyond the window, as the message before is given up.
        (id, header, cts) = victim.attached();
    }
    assert!(kept > 100, "{kept}");
}
