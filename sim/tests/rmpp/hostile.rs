//! What a hostile or broken peer can send: each packet forged or cut is counted and harmless, and what one peer can
//! take is capped.

use crate::worlds::{clean, config, readable, world};
use baton_rmpp::{Drop, Error, Outgoing, Region, Request};
use baton_sim::rmpp::{Carrier, Node, World, halves_on_nic};
use baton_sim::{Impairments, Rng, stream};
use baton_wire::rmpp::{Body, Cts, Header, Kind, Packet, PacketFlags, Rts, append_data, emit};

/// Incarnations of the endpoints of a world, as [`config`] sets them.
const INCARNATIONS: [u32; 2] = [100, 101];

/// A packet from endpoint 0 to endpoint 1, or back.
fn packet(world: &World, from: usize, header: Header, body: Body<'_>, data: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 1446];
    let written = emit(&header, &body, &mut out);
    let length = append_data(&mut out, written, data, &world.address(from), &world.address(1 - from));
    out.truncate(length);
    out
}

fn header(from: usize, kind: Kind) -> Header {
    Header::new(kind, [from as u16, 1 - from as u16], [INCARNATIONS[from], INCARNATIONS[1 - from]])
}

fn rts(world: &World, number: u32, floor: u32, length: u64) -> Vec<u8> {
    let header = Header { message: number, packet: floor, ..header(0, Kind::Rts) };
    let rts = Rts { length, tag: 0, data: number.into(), context: 0, handle: 0x1_0000 | number, fragment: 1000 };
    packet(world, 0, header, Body::Rts(rts, &[]), &[7; 200][..length.min(200) as usize])
}

/// Lets the receiver have a packet, and answer. No time passes.
fn forge(world: &mut World, from: usize, packet: &[u8]) {
    let frame = world.frame(from, 1 - from, packet);
    world.nodes[1 - from].receive(&frame);
    world.settle();
}

/// The packets that endpoint 1 sends to endpoint 0 are not taken by it but read here.
fn answers(node: &mut Node, world_address: [baton_wire::Endpoint; 2], now: u64) -> Vec<(Header, u32)> {
    let mut out = vec![0; 1446];
    let mut seen = Vec::new();
    loop {
        node.settle(now);
        let sent =
            node.nic.poll_transmit(&node.memory[..], &mut out).or_else(|| node.host.poll_transmit(&node.memory[..], &mut out));
        let Some(sent) = sent else { return seen };
        let packet = Packet::parse(&out[..sent.length], &world_address[1], &world_address[0]).unwrap();
        seen.push((packet.header, if let Body::Cts(cts) = packet.body { cts.handle } else { 0 }));
    }
}

/// A receiver with one receive of 10,000 bytes for a message of 5,200, of which it has cleared `grant` packets. Returns
/// its handle.
fn cleared(step: u8, grant: u16) -> (World, u32, u16) {
    let mut world = world(step, Carrier::Ethernet, clean(), 3, |config| config.grant = grant);
    let node = &mut world.nodes[1];
    let region = Region { offset: 0, length: 10_000 };
    let request = Request { source: None, context: 0, tag: 0, ignore: u64::MAX, region, token: 1 };
    node.policy.post(request, 0, &mut node.memory[..]).unwrap();
    world.nodes[1].settle(1);
    let frame = { world.frame(0, 1, &rts(&world, 1, 1, 5200)) };
    world.nodes[1].receive(&frame);
    let addresses = [world.address(0), world.address(1)];
    let seen = answers(&mut world.nodes[1], addresses, 1);
    let (cts, handle) = seen.into_iter().find(|(header, _)| header.kind == Kind::Cts).unwrap();
    assert_eq!((cts.packet, cts.count), (0, grant.min(5)));
    (world, handle, cts.grant)
}

fn data(world: &World, handle: u32, grant: u16, number: u32, length: usize) -> Vec<u8> {
    let header = Header { message: 1, handle, grant, packet: number, flags: PacketFlags::RSM, ..header(0, Kind::Data) };
    packet(world, 0, header, Body::Data(&[]), &vec![number as u8 + 1; length])
}

fn dropped(world: &World, node: usize, reason: Drop) -> u64 {
    let node = &world.nodes[node];
    [node.host.counters(), node.nic.counters(), node.policy.counters()].iter().map(|counters| counters.dropped(reason)).sum()
}

/// A sender that sends more than was cleared, pieces of another length, for other messages, or from another
/// incarnation, changes nothing in memory.
#[test]
fn a_sender_cannot_place_what_was_not_cleared() {
    for step in 0..3 {
        let (mut world, handle, grant) = cleared(step, 2);
        let deliver = |world: &mut World, packet: &[u8]| {
            let frame = world.frame(0, 1, packet);
            world.nodes[1].receive(&frame);
            world.nodes[1].settle(2);
        };
        let before = world.nodes[1].memory[200..].to_vec();
        let not_cleared = data(&world, handle, grant, 2, 1000);
        let far = data(&world, handle, grant, u32::MAX, 1000);
        let [short, long] = [999, 1001].map(|length| data(&world, handle, grant, 1, length));
        let other_message = data(&world, handle + 1, grant, 1, 1000);
        let mut stranger = header(0, Kind::Data);
        (stranger.message, stranger.handle, stranger.packet, stranger.from) = (1, handle, 1, 99);
        let stranger = packet(&world, 0, stranger, Body::Data(&[]), &[9; 1000]);
        for (bad, reason) in [
            (not_cleared, Drop::NotCleared),
            (far, Drop::NotCleared),
            (short, Drop::Length),
            (long, Drop::Length),
            (other_message, Drop::NoMessage),
            (stranger, Drop::Stranger),
        ] {
            let count = dropped(&world, 1, reason);
            deliver(&mut world, &bad);
            assert_eq!(dropped(&world, 1, reason), count + 1, "step {step}: {reason:?}");
            assert!(world.nodes[1].memory[200..] == before[..], "step {step}: {reason:?}");
        }
        // The same packets as they should be are placed.
        for number in 0..2 {
            let good = data(&world, handle, grant, number, 1000);
            deliver(&mut world, &good);
        }
        assert!(world.nodes[1].memory[200..1200].iter().all(|byte| *byte == 1));
        assert!(world.nodes[1].memory[1200..2200].iter().all(|byte| *byte == 2));
    }
}

/// A receiver that clears packets which the message does not have, clears twice, or for another message, gets nothing
/// for it.
#[test]
fn a_receiver_cannot_ask_for_more_than_there_is() {
    let mut world = world(2, Carrier::Udp4, clean(), 4, |_| ());
    let address = world.address(1);
    let peer = world.nodes[0].policy.open(address, 1).unwrap();
    let region = Region { offset: 0, length: 1366 + 3 * 1406 };
    world.nodes[0].policy.send(Outgoing { peer, context: 0, tag: 0, data: 0, region, token: 0 }, 0).unwrap();
    assert!(world.run_until(9_000, |world| world.nodes[1].policy.usage().1 == 1));
    let sent = world.nodes[0].nic.counters().sent;
    let cts = |world: &World, first: u32, count: u16, handle: u32, grant: u16| {
        let header = Header { message: 1, packet: first, count, grant, handle, ..header(1, Kind::Cts) };
        packet(world, 1, header, Body::Cts(Cts { handle: 77, ..Cts::default() }), &[])
    };
    // The first message of an endpoint has handle 0x10000.
    let handle = 0x10000;
    for (first, count, handle, reason) in [
        (0, 4, handle, Drop::ClearedTooMuch),
        (3, 1, handle, Drop::ClearedTooMuch),
        (u32::MAX - 64, 64, handle, Drop::ClearedTooMuch),
        (0, 1, handle + 1, Drop::NoMessage),
    ] {
        let before = dropped(&world, 0, reason);
        let bad = cts(&world, first, count, handle, 1);
        forge(&mut world, 1, &bad);
        assert_eq!(dropped(&world, 0, reason), before + 1, "{first} {count}");
    }
    assert_eq!(world.nodes[0].nic.counters().sent, sent);
    let good = cts(&world, 0, 3, handle, 5);
    forge(&mut world, 1, &good);
    // Three data packets and the END.
    assert_eq!(world.nodes[0].nic.counters().sent, sent + 4);
    let old = cts(&world, 0, 3, handle, 4);
    forge(&mut world, 1, &old);
    assert_eq!((dropped(&world, 0, Drop::OldGrant), world.nodes[0].nic.counters().sent), (1, sent + 4));
}

/// A flood of RTS from one peer: as many messages and buffers as it may have, not more; other peers' messages get in.
#[test]
fn an_rts_flood_is_capped() {
    let mut world = world(1, Carrier::Ethernet, clean(), 5, |config| (config.incoming, config.buffers_per_peer) = (100, 4));
    world.settle();
    for number in 1..1000 {
        let flood = rts(&world, number, 1, 100);
        forge(&mut world, 0, &flood);
    }
    let node = &world.nodes[1];
    assert_eq!((node.policy.usage().1, node.policy.buffers_held()), (64, 4));
    assert_eq!(dropped(&world, 1, Drop::Window), 999 - 64);
    // A floor that moves on gives the old ones up instead of keeping them.
    for number in 65..500 {
        let flood = rts(&world, number, number - 30, 100);
        forge(&mut world, 0, &flood);
    }
    assert!(world.nodes[1].policy.usage().1 <= 64 && world.nodes[1].policy.buffers_held() <= 4);
    // The flooder is gone: after the time of a dead peer nothing is left of it.
    world.nodes[0] = Node::new(config(0), halves_on_nic(0), world.address(0));
    world.set_impairments(baton_sim::Impairments { loss: 1_000_000, ..clean() });
    world.run_until(20_000_000, |_| false);
    assert_eq!(world.nodes[1].leftovers(), [0; 7]);
}

/// The same where the NIC matches: it takes up no more than the policy would, and of what is given up nothing stays
/// with it.
#[test]
fn an_rts_flood_is_capped_on_a_nic_that_matches() {
    let mut world = world(1, Carrier::Ethernet, clean(), 5, |config| {
        (config.incoming, config.buffers_per_peer) = (100, 4);
        (config.data_posted, config.data_unexpected) = (16, 90);
    });
    world.settle();
    // The first one makes the peer known, and is asked for again.
    for number in [1].into_iter().chain(1..1000) {
        let flood = rts(&world, number, 1, 100);
        forge(&mut world, 0, &flood);
        world.settle();
    }
    let node = &world.nodes[1];
    assert!(node.policy.matches_in_data());
    assert_eq!((node.policy.usage().1, node.policy.buffers_held()), (64, 4));
    for number in 65..500 {
        let flood = rts(&world, number, number - 30, 100);
        forge(&mut world, 0, &flood);
        world.settle();
    }
    let node = &world.nodes[1];
    assert!(node.policy.usage().1 <= 64 && node.policy.buffers_held() <= 4);
    assert!(node.policy.matches_in_data(), "what was given up has left room");
    world.nodes[0] = Node::new(config(0), halves_on_nic(0), world.address(0));
    world.set_impairments(baton_sim::Impairments { loss: 1_000_000, ..clean() });
    world.run_until(20_000_000, |_| false);
    assert_eq!(world.nodes[1].leftovers(), [0; 7]);
}

/// Hellos from many addresses take no place.
#[test]
fn hellos_and_strangers_take_no_place() {
    let mut world = world(2, Carrier::Udp6, clean(), 6, |_| ());
    for number in 0..1000u32 {
        let mut hello = header(0, Kind::Hello);
        (hello.from, hello.to, hello.source) = (number + 1, 0, number as u16);
        let hello = packet(&world, 0, hello, Body::Empty, &[]);
        forge(&mut world, 0, &hello);
        let mut ping = header(0, Kind::Ping);
        (ping.from, ping.to, ping.source) = (number + 1, 7, number as u16);
        let ping = packet(&world, 0, ping, Body::Empty, &[]);
        forge(&mut world, 0, &ping);
    }
    assert_eq!((world.nodes[1].policy.peers(), dropped(&world, 1, Drop::WrongIncarnation)), (0, 1000));
}

/// Random packets with good CRCs, from the peer of a transfer that is under way: whatever they say, the transfer ends
/// in delivery or an error, and nothing is left.
#[test]
fn random_packets_do_no_harm() {
    let mut errors = 0;
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        // The message takes about as long as the packets come, 12 ms.
        let slow = Impairments { rate: 40_000_000, ..clean() };
        let mut world = world((seed % 4) as u8, Carrier::Udp4, slow, seed, |config| config.dead = 2_000_000);
        let address = world.address(1);
        let peer = world.nodes[0].policy.open(address, 1).unwrap();
        let region = Region { offset: 0, length: 50_000 };
        stream::fill(1, 0, &mut world.nodes[0].memory[..50_000]);
        let node = &mut world.nodes[1];
        let request = Request { source: None, context: 0, tag: 0, ignore: u64::MAX, region, token: 1 };
        let id = node.policy.post(request, 0, &mut node.memory[..]).unwrap();
        world.nodes[0].policy.send(Outgoing { peer, context: 0, tag: 0, data: 0, region, token: 0 }, 0).unwrap();
        for _ in 0..60 {
            let from = rng.below(2) as usize;
            let kind = Kind::ALL[rng.below(14) as usize];
            let mut header = header(from, kind);
            let small = |rng: &mut Rng| rng.below(4) as u32;
            let handle = [0, 0x10000, 0x10001, 0x20000][rng.below(4) as usize];
            (header.message, header.handle, header.packet) = (small(&mut rng), handle, small(&mut rng));
            (header.grant, header.count) = (small(&mut rng) as u16, small(&mut rng) as u16);
            header.to = if kind == Kind::Hello { 0 } else { header.to };
            // A forger that knows both incarnations could end the association, or say that a message was delivered.
            if matches!(kind, Kind::Reset | Kind::Bye | Kind::ByeAck | Kind::Ack | Kind::Data | Kind::End) && rng.chance(700_000)
            {
                header.from = 1 + small(&mut rng);
            }
            let length = rng.below(300);
            let rts =
                Rts { length, tag: 0, data: 9, context: 0, handle: 1 + small(&mut rng), fragment: 1 + rng.below(1500) as u16 };
            let body = match kind {
                Kind::Rts => Body::Rts(rts, &[]),
                Kind::Cts => Body::Cts(Cts { handle, ..Cts::default() }),
                Kind::Data => Body::Data(&[]),
                _ => Body::Empty,
            };
            let bytes = if matches!(kind, Kind::Rts | Kind::Data) { vec![1; rng.below(length + 1) as usize] } else { Vec::new() };
            let header = if rng.chance(900_000) { readable(header) } else { header };
            let bad = packet(&world, from, header, body, &bytes);
            forge(&mut world, from, &bad);
            let pause = rng.below(400);
            world.run_until(pause, |_| false);
        }
        world.run_until(30_000_000, |world| world.nodes[0].completions.len() == 1);
        world.nodes[1].policy.cancel(id);
        // Forged messages that match nothing are there until their sender's window passes them or it is closed.
        for (at, peer) in [(0, peer), (1, baton_rmpp::PeerId(0))] {
            let now = world.now;
            world.nodes[at].policy.close(peer, now);
        }
        world.run_until(60_000_000, |world| world.nodes.iter().all(|node| node.leftovers() == [0; 7]));
        assert_eq!(world.nodes[0].completions.len(), 1, "seed {seed}");
        assert_eq!([0, 1].map(|at| world.nodes[at].leftovers()), [[0; 7]; 2], "seed {seed}");
        errors += u64::from(world.nodes[0].completions[0].result.is_err());
    }
    assert!(errors > 0 && errors < 300, "{errors}");
}

/// A peer that takes messages and never finishes them: the receive fails with a reason.
#[test]
fn a_peer_that_lives_and_sends_nothing_is_given_up() {
    let (mut world, _, _) = cleared(2, 2);
    let now = world.now;
    let mut completions = Vec::new();
    for tick in 0..4000 {
        let at = now + tick * 5_000;
        // It answers every question whether it lives.
        let pong = packet(&world, 0, header(0, Kind::Pong), Body::Empty, &[]);
        let frame = world.frame(0, 1, &pong);
        let node = &mut world.nodes[1];
        node.receive(&frame);
        node.settle(at);
        node.policy.on_timeout(at);
        let addresses = [Carrier::Ethernet.address(0), Carrier::Ethernet.address(1)];
        answers(node, addresses, at);
        completions.append(&mut node.completions);
    }
    assert_eq!(completions.len(), 1);
    assert_eq!(completions[0].result, Err(Error::NoProgress));
}

/// Each kind of packet, cut at every byte or with any bit wrong, is counted and changes nothing.
#[test]
fn damaged_packets_are_counted_and_change_nothing() {
    let (mut world, handle, grant) = cleared(2, 2);
    let before = world.nodes[1].leftovers();
    let memory = world.nodes[1].memory.clone();
    for kind in Kind::ALL {
        let mut header = header(0, kind);
        header.to = if kind == Kind::Hello { 0 } else { header.to };
        if matches!(kind, Kind::Rts | Kind::Cts | Kind::Data | Kind::End | Kind::Ack | Kind::Cleanup | Kind::Hold) {
            header.message = 1;
        }
        if matches!(kind, Kind::Cts | Kind::Data | Kind::End | Kind::Ack | Kind::Hold) {
            header.handle = handle;
        }
        (header.grant, header.count) = match kind {
            Kind::Cts => (1, 1),
            Kind::Data => (grant, 0),
            _ => (0, 0),
        };
        let rts = Rts { length: 50, tag: 0, data: 0, context: 0, handle: 5, fragment: 9 };
        let (body, data): (_, &[u8]) = match kind {
            Kind::Rts => (Body::Rts(rts, &[]), &[3; 20]),
            Kind::Cts => (Body::Cts(Cts { handle: 3, ..Cts::default() }), &[]),
            Kind::Data => (Body::Data(&[]), &[3; 20]),
            _ => (Body::Empty, &[]),
        };
        let good = packet(&world, 0, header, body, data);
        let refused = |world: &World| world.nodes[1].nic.counters().refused.iter().sum::<u64>();
        let count = refused(&world);
        let (source, now) = (world.address(0), world.now);
        let node = &mut world.nodes[1];
        for cut in 0..good.len() {
            node.nic.input(&source, &good[..cut], &mut node.memory[..]);
        }
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            node.nic.input(&source, &bad, &mut node.memory[..]);
        }
        node.settle(now);
        assert_eq!(refused(&world) - count, 9 * good.len() as u64, "{kind:?}");
        assert_eq!(world.nodes[1].leftovers(), before, "{kind:?}");
    }
    assert!(world.nodes[1].memory == memory);
}

/// Somebody who guesses the receiver's incarnation claims to be a newer one of its peer. That ends the association, as
/// a restart does, and once the true peer has noticed, messages go both ways again.
#[test]
fn a_false_newer_incarnation_does_not_shut_out_the_true_peer() {
    // The incarnations that somebody claims, above the true one: one, or two that lead around to it.
    let claims: [&[u32]; 2] = [&[1 << 20], &[(1 << 31) - 1, u32::MAX - 1]];
    // What endpoint 1 does with the association that it believes in: nothing, send, or wait for a message.
    for (seed, busy, claims) in (0..3)
        .flat_map(|step| [0, 1, 2].map(|busy| (step, busy)))
        .flat_map(|(step, busy)| claims.map(|claims| (step, busy, claims)))
    {
        let mut world = world(seed as u8, Carrier::Udp4, clean(), seed, |_| ());
        let peers = [0, 1].map(|at| {
            let address = world.address(1 - at);
            world.nodes[at].policy.open(address, 1 - at as u16).unwrap()
        });
        let region = Region { offset: 0, length: 20_000 };
        let send = |world: &mut World, at: usize, token| {
            let outgoing = Outgoing { peer: peers[at], context: 0, tag: 0, data: 0, region, token };
            let now = world.now;
            world.nodes[at].policy.send(outgoing, now).unwrap();
        };
        let receive = |world: &mut World, at: usize, source, token| {
            let (now, node) = (world.now, &mut world.nodes[at]);
            let request = Request { source, context: 0, tag: 0, ignore: u64::MAX, region, token };
            node.policy.post(request, now, &mut node.memory[..]).unwrap();
        };
        let end = |world: &mut World, at: usize, token| {
            let of = |world: &World| world.nodes[at].completions.iter().find(|completion| completion.token == token).copied();
            assert!(world.run_until(60_000_000, |world| of(world).is_some()), "step {seed}, {busy}: {token} does not end");
            of(world).unwrap().result.map(|_| ())
        };
        (0..20).for_each(|token| receive(&mut world, 1, None, 100 + token));
        (0..20).for_each(|token| receive(&mut world, 0, None, 100 + token));
        for at in 0..2 {
            send(&mut world, at, 1);
            assert_eq!(end(&mut world, at, 1), Ok(()));
        }
        // The first packet of each ends the association before, the second begins one.
        for above in claims.iter().flat_map(|above| [above, above]) {
            let header = Header { from: INCARNATIONS[0].wrapping_add(*above), ..header(0, Kind::Ping) };
            let false_one = packet(&world, 0, header, Body::Empty, &[]);
            forge(&mut world, 0, &false_one);
        }
        match busy {
            1 => send(&mut world, 1, 2),
            2 => receive(&mut world, 1, Some(peers[1]), 2),
            _ => {}
        }
        // The true peer notices when this does not get on.
        send(&mut world, 0, 3);
        let _ = end(&mut world, 0, 3);
        for token in 4..8 {
            send(&mut world, 0, token);
            assert_eq!(end(&mut world, 0, token), Ok(()), "step {seed}, {busy}: to the deceived");
        }
        send(&mut world, 1, 9);
        assert_eq!(end(&mut world, 1, 9), Ok(()), "step {seed}, {busy}: from the deceived");
    }
}

/// A peer that has restarted knows our incarnation before we know its new one, and begins a message. Then comes the
/// Reset by which we learn of the restart: the new message goes on.
#[test]
fn a_restart_is_learned_of_once() {
    let (mut world, _, _) = cleared(7, 4);
    let (now, node) = (world.now + 1, &mut world.nodes[1]);
    let region = Region { offset: 20_000, length: 10_000 };
    let request = Request { source: None, context: 0, tag: 0, ignore: u64::MAX, region, token: 2 };
    node.policy.post(request, now, &mut node.memory[..]).unwrap();
    let new = INCARNATIONS[0] + 1000;
    let reset = Header { from: new, packet: INCARNATIONS[0], ..header(0, Kind::Reset) };
    let reset = packet(&world, 0, reset, Body::Empty, &[]);
    forge(&mut world, 0, &reset);
    let restarted = world.nodes[1].completions.iter().filter(|ended| ended.result == Err(Error::PeerRestarted)).count();
    assert_eq!(restarted, 1, "what the old one had begun");
    let rts_header = Header { from: new, message: 1, packet: 1, ..header(0, Kind::Rts) };
    let rts = Rts { length: 5200, tag: 0, data: 1, context: 0, handle: 0x1_0001, fragment: 1000 };
    let rts = packet(&world, 0, rts_header, Body::Rts(rts, &[]), &[7; 200]);
    let frame = world.frame(0, 1, &rts);
    world.nodes[1].receive(&frame);
    let addresses = [world.address(0), world.address(1)];
    let seen = answers(&mut world.nodes[1], addresses, now);
    let kinds: Vec<Kind> = seen.iter().map(|(header, _)| header.kind).collect();
    assert!(kinds.contains(&Kind::Cts) && !kinds.contains(&Kind::Reset), "{kinds:?}");
}

/// A program sends to a peer, and waits for it, that has just failed; then it closes the peer. Both end.
#[test]
fn what_waits_for_a_peer_that_has_failed_ends_when_it_is_closed() {
    let mut failing = 0;
    for seed in 0..20 {
        let (mut world, _, _) = cleared(2, 4);
        world.nodes[1].lag = Some(Rng::new(seed));
        let address = world.address(0);
        let peer = world.nodes[1].policy.open(address, 0).unwrap();
        let bye = packet(&world, 0, header(0, Kind::Bye), Body::Empty, &[]);
        forge(&mut world, 0, &bye);
        let (now, node) = (world.now, &mut world.nodes[1]);
        let region = Region { offset: 0, length: 10 };
        let request = Request { source: Some(peer), context: 0, tag: 0, ignore: u64::MAX, region, token: 2 };
        node.policy.post(request, now, &mut node.memory[..]).unwrap();
        node.policy.send(Outgoing { peer, context: 0, tag: 0, data: 0, region, token: 3 }, now).unwrap();
        node.policy.close(peer, now);
        failing += node.policy.peers();
        let ended = |world: &World, token| {
            let mut of = world.nodes[1].completions.iter().filter(|completion| completion.token == token);
            of.next().is_some_and(|completion| completion.result == Err(Error::PeerClosed))
        };
        assert!(world.run_until(10_000_000, |world| ended(world, 2) && ended(world, 3)), "seed {seed}");
        assert_eq!(world.nodes[1].policy.peers(), 0, "seed {seed}");
    }
    assert!(failing > 0, "the data half had always released its messages");
}

/// An answer begins no association: nothing has been sent that it could be for. Whoever names an incarnation that the
/// peer does not have ends no message so, neither well nor badly.
#[test]
fn an_answer_before_the_association_is_dropped() {
    use Kind::*;
    let answers = [Kind::Cts, Data, Ack, Cleanup, Hold, Pong, Reset, ByeAck];
    for (step, kind) in (0..4).flat_map(|step| answers.map(|kind| (step, kind))) {
        let mut world = world(step, Carrier::Udp4, clean(), 1, |_| ());
        let address = world.address(1);
        let peer = world.nodes[0].policy.open(address, 1).unwrap();
        let region = Region { offset: 0, length: 100 };
        let now = world.now;
        world.nodes[0].policy.send(Outgoing { peer, context: 0, tag: 0, data: 0, region, token: 1 }, now).unwrap();
        // It names the first message, by number and by handle.
        let from = INCARNATIONS[1] + (1 << 20);
        let header = Header { from, message: 1, handle: 0x1_0000, packet: 1, ..header(1, kind) };
        let body = match kind {
            Kind::Cts => Body::Cts(baton_wire::rmpp::Cts { handle: 0x1_0000, ..Default::default() }),
            Data => Body::Data(&[]),
            _ => Body::Empty,
        };
        let forged = packet(&world, 1, header, body, &[]);
        forge(&mut world, 1, &forged);
        assert!(world.nodes[0].completions.is_empty(), "step {step}, {kind:?}: {:?}", world.nodes[0].completions);
        let (now, node) = (world.now, &mut world.nodes[1]);
        let request = Request { source: None, context: 0, tag: 0, ignore: u64::MAX, region, token: 2 };
        node.policy.post(request, now, &mut node.memory[..]).unwrap();
        assert!(world.run_until(60_000_000, |world| !world.nodes[0].completions.is_empty()), "step {step}, {kind:?}");
        assert!(world.nodes[0].completions[0].result.is_ok(), "step {step}, {kind:?}: {:?}", world.nodes[0].completions[0]);
    }
}

/// A message in pieces larger than all that may be pinned can never be cleared. It ends, and those behind it go on.
#[test]
fn a_message_in_pieces_that_cannot_be_pinned_holds_nobody_up() {
    for step in 0..4 {
        let mut world = world(step, Carrier::Udp4, clean(), 3, |config| config.pinned = 3000);
        let addresses = [0, 1].map(|at| world.address(1 - at));
        let peers = [0, 1].map(|at| world.nodes[at].policy.open(addresses[at], 1 - at as u16).unwrap());
        let region = Region { offset: 0, length: 20_000 };
        let now = world.now;
        let node = &mut world.nodes[1];
        for token in [1, 2] {
            let request = Request { source: None, context: 0, tag: 0, ignore: u64::MAX, region, token };
            node.policy.post(request, now, &mut node.memory[..]).unwrap();
        }
        world.settle();
        // The first one is forged: of endpoint 0's first incarnation, in one piece.
        let header = Header { message: 1, packet: 1, ..header(0, Kind::Rts) };
        let rts = Rts { length: 10_000, tag: 0, data: 9, context: 0, handle: 0x1_0001, fragment: 9000 };
        let forged = packet(&world, 0, header, Body::Rts(rts, &[]), &[]);
        forge(&mut world, 0, &forged);
        assert!(world.run_until(10_000_000, |world| !world.nodes[1].completions.is_empty()), "step {step}: it waits");
        assert_eq!(world.nodes[1].completions[0].result.map(|_| ()), Err(Error::NoProgress), "step {step}");
        // What the true endpoint 0 sends begins anew.
        let now = world.now;
        for token in [1, 2] {
            world.nodes[0].policy.send(Outgoing { peer: peers[0], context: 0, tag: 0, data: 0, region, token }, now).unwrap();
        }
        assert!(world.run_until(60_000_000, |world| world.nodes[1].completions.len() == 2), "step {step}: the other one waits");
        assert!(world.nodes[1].completions[1].result.is_ok(), "step {step}: {:?}", world.nodes[1].completions[1]);
    }
}
