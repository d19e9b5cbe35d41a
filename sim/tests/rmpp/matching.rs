//! RMPP: matching by the NIC gives the pairs of a plain list, whatever waits in the rings, is lost, or dies, and
//! however often the NIC has no room, or may not match.

use crate::worlds::{clean, world};
use baton_rmpp::{Error, Outgoing, Region, Request, Side};
use baton_sim::rmpp::{Carrier, World};
use baton_sim::{Impairments, Rng};
use std::collections::BTreeMap;

/// Messages and receives of one run.
const COUNT: u64 = 120;
/// Kinds of wildcard: more than are hashed.
const MASKS: u64 = 10;

fn seeds(default: u64) -> u64 {
    std::env::var("BATON_RMPP_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(default)
}

/// A tag and the bits of it that a receive ignores.
type Criteria = (u64, u64);

/// The receive that each message gets, by MPI's rules: the oldest that accepts it. The order of posts and arrivals
/// among each other does not matter.
fn pairs(receives: &[Criteria], tags: &[u64]) -> BTreeMap<u64, u64> {
    let mut taken = vec![false; receives.len()];
    let mut pairs = BTreeMap::new();
    for (message, tag) in tags.iter().enumerate() {
        let accepts = |at: &usize| !taken[*at] && (receives[*at].0 ^ tag) & !receives[*at].1 == 0;
        if let Some(at) = (0..receives.len()).find(accepts) {
            taken[at] = true;
            pairs.insert(message as u64, at as u64);
        }
    }
    pairs
}

struct Run {
    world: World,
    rng: Rng,
    receives: Vec<Criteria>,
    tags: Vec<u64>,
    delivered: BTreeMap<u64, u64>,
    /// Times at which the NIC was seen to match, and the policy.
    seen: [u64; 2],
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut rng = Rng::new(seed);
        let faulty = rng.chance(500_000);
        let rate = if faulty { 30_000 } else { 0 };
        let impairments = Impairments { delay: 20, loss: rate, reorder: rate, hold: 100, duplicate: rate, ..clean() };
        let sizes = (1 + rng.below(COUNT), 1 + rng.below(64));
        let mut world = world(2, Carrier::Udp4, impairments, seed, |config| {
            (config.data_posted, config.data_unexpected) = (sizes.0 as u16, sizes.1 as u16);
        });
        world.nodes[1].lag = rng.chance(800_000).then(|| Rng::new(!seed));
        Run { world, rng, receives: Vec::new(), tags: Vec::new(), delivered: BTreeMap::new(), seen: [0; 2] }
    }

    fn send(&mut self) {
        let (tag, number) = (self.rng.below(4), self.tags.len() as u64);
        let address = self.world.address(1);
        let node = &mut self.world.nodes[0];
        let peer = node.policy.open(address, 1).expect("one peer");
        let region = Region { offset: 0, length: if number % 3 == 0 { 5_000 } else { 8 } };
        let outgoing = Outgoing { peer, context: 0, tag, data: number, region, token: number };
        if node.policy.send(outgoing, self.world.now).is_ok() {
            self.tags.push(tag);
        }
    }

    fn receive(&mut self) {
        // Bits that no tag has distinguish kinds of wildcard.
        let any = if self.rng.chance(300_000) { 3 } else { 0 };
        let criteria = (self.rng.below(4), any | self.rng.below(MASKS) << 8);
        let node = &mut self.world.nodes[1];
        let token = self.receives.len() as u64;
        let region = Region { offset: token * 5_000, length: 5_000 };
        let request = Request { source: None, context: 0, tag: criteria.0, ignore: criteria.1, region, token };
        if node.policy.post(request, self.world.now, &mut node.memory[..]).is_ok() {
            self.receives.push(criteria);
        }
    }

    fn collect(&mut self) {
        self.seen[usize::from(!self.world.nodes[1].policy.matches_in_data())] += 1;
        self.world.nodes[0].completions.clear();
        for completion in std::mem::take(&mut self.world.nodes[1].completions) {
            assert_eq!(completion.side, Side::Receive);
            let delivered = completion.result.expect("nothing fails");
            assert!(self.delivered.insert(delivered.data, completion.token).is_none(), "delivered twice");
        }
    }

    fn finish(&mut self) -> bool {
        let expected = pairs(&self.receives, &self.tags);
        for _ in 0..200_000 {
            self.collect();
            if self.delivered.len() >= expected.len() {
                break;
            }
            self.world.step();
        }
        assert_eq!(self.delivered, expected);
        true
    }
}

#[test]
fn pairs_are_those_of_a_plain_list() {
    let mut seen = [0; 2];
    for seed in 0..seeds(300) {
        let mut run = Run::new(seed);
        while (run.tags.len() as u64) < COUNT || (run.receives.len() as u64) < COUNT {
            match run.rng.below(100) {
                0..40 if (run.tags.len() as u64) < COUNT => run.send(),
                40..80 if (run.receives.len() as u64) < COUNT => run.receive(),
                80 => run.world.nodes[1].kill_nic(run.world.now),
                81 => {
                    let permitted = run.rng.chance(700_000);
                    run.world.nodes[1].policy.let_data_match(permitted);
                }
                _ => {
                    run.world.step();
                }
            }
            run.collect();
        }
        assert!(run.finish(), "seed {seed}");
        (0..2).for_each(|at| seen[at] += run.seen[at]);
    }
    assert!(seen.iter().all(|times| *times > 1000), "both sides have matched: {seen:?}");
}

/// Two endpoints that know each other, the NIC of the second of which matches, and has a receive of 100,000 bytes from
/// the first.
fn with_a_receive_on_the_nic() -> World {
    let impairments = Impairments { delay: 20, ..clean() };
    let mut world = world(2, Carrier::Udp4, impairments, 1, |config| (config.data_posted, config.data_unexpected) = (4, 4));
    let [address, other] = [0, 1].map(|node| world.address(node));
    let from = world.nodes[1].policy.open(address, 0).unwrap();
    let to = world.nodes[0].policy.open(other, 1).unwrap();
    for (token, length) in [(1, 10), (2, LONG)] {
        let (now, region) = (world.now, Region { offset: 0, length });
        let node = &mut world.nodes[1];
        let request = Request { source: Some(from), context: 0, tag: token, ignore: 0, region, token };
        node.policy.post(request, now, &mut node.memory[..]).unwrap();
        if token == 1 {
            let outgoing = Outgoing { peer: to, context: 0, tag: token, data: 0, region, token };
            world.nodes[0].policy.send(outgoing, now).unwrap();
            assert!(world.run_until(1_000_000, |world| !world.nodes[1].completions.is_empty()));
        }
    }
    assert!(world.run_until(1_000_000, |world| world.nodes[1].policy.matches_in_data()));
    world.settle();
    world.nodes[1].completions.clear();
    world
}

const LONG: u64 = 100_000;

/// Lets time pass for the second endpoint until the first one, from which nothing arrives, is dead.
fn outlive(world: &mut World) {
    for _ in 0..100 {
        world.now += 100_000;
        world.nodes[1].policy.on_timeout(world.now);
    }
}

/// The receive ends when its peer is dead, and the NIC has it no more.
#[test]
fn a_receive_on_the_nic_from_a_peer_that_dies_fails() {
    let mut world = with_a_receive_on_the_nic();
    outlive(&mut world);
    assert!(world.nodes[1].policy.poll_completion().is_none(), "the NIC may still match it");
    let now = world.now;
    let node = &mut world.nodes[1];
    node.settle(now);
    let ended = std::mem::take(&mut node.completions);
    assert_eq!(ended.iter().map(|end| (end.token, end.result)).collect::<Vec<_>>(), [(2, Err(Error::PeerDead))]);
    assert_eq!(node.leftovers()[2], 0, "and no receive is left");
    // The next one gets the message: the first one does not stand before it on the NIC. The sender does not know of its
    // death yet.
    let (from, region) = (node.policy.open(Carrier::Udp4.address(0), 0).unwrap(), Region { offset: 0, length: LONG });
    let request = Request { source: Some(from), context: 0, tag: 2, ignore: 0, region, token: 3 };
    node.policy.post(request, now, &mut node.memory[..]).unwrap();
    for token in [4, 5] {
        let (now, to) = (world.now, world.nodes[0].policy.open(Carrier::Udp4.address(1), 1).unwrap());
        world.nodes[0].policy.send(Outgoing { peer: to, context: 0, tag: 2, data: 0, region, token }, now).unwrap();
        assert!(world.run_until(20_000_000, |world| world.nodes[0].completions.iter().any(|end| end.token == token)));
    }
    assert!(world.nodes[1].completions.iter().any(|end| end.token == 3 && end.result.is_ok()));
}

/// The NIC has given a message to a receive whose peer is dead by then, and the policy is taking the matching back: the
/// receive's memory is the program's again only when the NIC has forgotten the message.
#[test]
fn a_receive_behind_a_refused_arrival_ends_when_nothing_is_placed_any_more() {
    let mut world = with_a_receive_on_the_nic();
    let (now, to) = (world.now, world.nodes[0].policy.open(Carrier::Udp4.address(1), 1).unwrap());
    let region = Region { offset: 0, length: LONG };
    world.nodes[0].policy.send(Outgoing { peer: to, context: 0, tag: 2, data: 0, region, token: 3 }, now).unwrap();
    world.nodes[0].settle(now);
    let mut packet = [0; 2000];
    let sender = &mut world.nodes[0];
    let rts = sender.nic.poll_transmit(&sender.memory[..], &mut packet).expect("its RTS");
    let frame = world.frame(0, 1, &packet[..rts.length]);
    world.nodes[1].receive(&frame);
    assert_eq!(world.nodes[1].nic.messages().0, 1, "the NIC has answered it");
    // More receives than the NIC has room for: the policy is to match.
    for token in 10..15 {
        let node = &mut world.nodes[1];
        let region = Region { offset: 500_000, length: 10 };
        let request = Request { source: None, context: 1, tag: token, ignore: 0, region, token };
        node.policy.post(request, now, &mut node.memory[..]).unwrap();
    }
    outlive(&mut world);
    let now = world.now;
    let node = &mut world.nodes[1];
    let arrived = node.nic.poll_event().expect("the NIC has reported it");
    node.policy.handle_event(&arrived, now, &mut node.memory[..]);
    let mut ended = false;
    while let Some(command) = node.policy.poll_command() {
        node.nic.handle_command(&command);
        while let Some(event) = node.nic.poll_event() {
            node.policy.handle_event(&event, now, &mut node.memory[..]);
        }
        while let Some(end) = node.policy.poll_completion() {
            assert_eq!((end.token, end.result), (2, Err(Error::PeerDead)));
            assert_eq!(node.nic.messages().0, 0, "the NIC may still write into its memory");
            ended = true;
        }
    }
    assert!(ended && !node.policy.matches_in_data());
}
