//! RMPP: matching by the NIC gives the pairs of a plain list, whatever waits in the rings, is lost, or dies, and however often the
//! NIC has no room.

mod rmpp_worlds;

use baton_rmpp::{Outgoing, Region, Request, Side};
use baton_sim::rmpp::{Carrier, World};
use baton_sim::{Impairments, Rng};
use rmpp_worlds::{clean, world};
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

/// The receive that each message gets, by MPI's rules: the oldest that accepts it. The order of posts and arrivals among each
/// other does not matter.
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
