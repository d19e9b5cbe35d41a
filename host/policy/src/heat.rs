//! Placement by heat: the busiest connections are on the NIC, colder ones wait in the kernel. (The handoff paper leaves
//! it to the operating system how much is offloaded; this is how ours decides.)
//!
//! A connection's heat is what it carries, in bytes a second, averaged over the last looks. A connection that waits
//! takes the place of one that is on the NIC only if it is clearly hotter, so that two of about the same heat do not
//! change places again and again; and only so many moves are made a second.

use crate::budget::Budget;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// A connection that waits must carry more than this many quarters of what the one carries that leaves for it, and this
/// many bytes a second more.
const QUARTERS: u64 = 6;
const MARGIN: u64 = 1000;

/// Microseconds for which a connection that has just come to the NIC stays there, unless the NIC has too many.
const STAY: u64 = 1_000_000;

/// Where a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the NIC.
    Nic,
    /// In the kernel, since the NIC has no room for it.
    Waits,
}

/// What is known of a connection at a look.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Names it, for as long as it lives.
    pub key: u64,
    /// Where it is.
    pub place: Place,
    /// Bytes that it has carried in that place, modulo 2³²; None if nobody counts.
    pub carried: Option<u32>,
    /// Pages of memory that it has on the NIC.
    pub pages: u32,
}

/// What the NIC needs.
#[derive(Clone, Copy, Default, Debug)]
pub struct Demand {
    /// Connections, and pages, that it has beyond its limits.
    pub over: (usize, u32),
    /// Connections that it has room for.
    pub free: usize,
    /// Whether hotter connections take the places of colder ones.
    pub swaps: bool,
}

/// What is to be moved.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Choice {
    /// From the NIC, the coldest first.
    pub leave: Vec<u64>,
    /// To the NIC, the hottest first: into free room, then as others leave.
    pub come: Vec<u64>,
}

/// What is remembered of a connection.
#[derive(Clone, Copy, Debug)]
struct Known {
    place: Place,
    carried: Option<u32>,
    /// Bytes a second.
    rate: u64,
    /// When it was seen first in its place.
    since: u64,
    /// Number of the look that has seen it last.
    seen: u64,
}

/// The heat of the connections of one NIC, and of those that wait for it.
#[derive(Default, Debug)]
pub struct Heat {
    known: BTreeMap<u64, Known>,
    budget: Budget,
    looks: u64,
    looked: u64,
}

impl Heat {
    /// Whether it has not looked yet. The first look finds what connections have carried so far, and only the next one
    /// how much they carry: nothing leaves the NIC before.
    pub fn is_new(&self) -> bool {
        self.looks == 0
    }

    /// Looks at all connections at `now`, microseconds, and decides what is to be moved.
    pub fn choose(&mut self, now: u64, samples: &[Sample], demand: Demand) -> Choice {
        self.observe(now, samples);
        let rate = |key: u64| self.known.get(&key).map_or(0, |known| known.rate);
        let of = |place| samples.iter().filter(move |sample| sample.place == place);
        let mut there: Vec<&Sample> = of(Place::Nic).collect();
        there.sort_by_key(|sample| (rate(sample.key), sample.key));
        let mut waiting: Vec<u64> = of(Place::Waits).map(|sample| sample.key).collect();
        waiting.sort_by_key(|key| (core::cmp::Reverse(rate(*key)), *key));
        let mut choice = Choice::default();
        let is_first = self.looks == 1;
        let (mut connections, mut pages) = if is_first { (0, 0) } else { demand.over };
        let mut coldest = there.into_iter().peekable();
        while (connections > 0 || pages > 0)
            && let Some(sample) = coldest.next()
        {
            choice.leave.push(sample.key);
            (connections, pages) = (connections.saturating_sub(1), pages.saturating_sub(sample.pages));
        }
        let into_room = if choice.leave.is_empty() { demand.free.min(waiting.len()) } else { 0 };
        choice.come.extend(waiting.drain(..into_room));
        if demand.swaps && choice.leave.is_empty() && !is_first {
            let settled = |sample: &&Sample| {
                self.known.get(&sample.key).is_some_and(|known| now.saturating_sub(known.since) >= STAY || known.since == 0)
            };
            let pairs = coldest.filter(settled).zip(waiting);
            let better = |(cold, hot): &(&Sample, u64)| 4 * rate(*hot) > QUARTERS * rate(cold.key) + 4 * MARGIN;
            let pairs: Vec<(u64, u64)> = pairs.take_while(better).map(|(cold, hot)| (cold.key, hot)).collect();
            let many = 10 * pairs.len() > of(Place::Nic).count();
            let moves = self.budget.moves(now, many).min(2 * pairs.len()) / 2 * 2;
            self.budget.spend(moves);
            for (cold, hot) in pairs.into_iter().take(moves / 2) {
                choice.leave.push(cold);
                choice.come.push(hot);
            }
        }
        choice
    }

    fn observe(&mut self, now: u64, samples: &[Sample]) {
        let elapsed = now.saturating_sub(self.looked).max(1);
        let first = self.looks == 0;
        self.looks += 1;
        self.looked = now;
        for Sample { key, place, carried, .. } in samples.iter().copied() {
            // What was there at the first look counts as settled.
            let since = if first { 0 } else { now };
            let new = Known { place, carried, rate: 0, since, seen: self.looks };
            let known = self.known.entry(key).or_insert(new);
            if known.place != place {
                // Each place has a count of its own.
                *known = Known { rate: known.rate, ..new };
            } else if known.seen + 1 == self.looks
                && let (Some(before), Some(carried)) = (known.carried, carried)
            {
                let rate = (u128::from(carried.wrapping_sub(before)) * 1_000_000 / u128::from(elapsed)) as u64;
                known.rate = (known.rate + rate).div_ceil(2);
            }
            (known.carried, known.seen) = (carried, self.looks);
        }
        let looks = self.looks;
        self.known.retain(|_, known| known.seen == looks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    /// Connections with a NIC of limited room, at which the policy looks every half second.
    struct World {
        heat: Heat,
        rates: Vec<u64>,
        carried: Vec<u32>,
        on_nic: BTreeSet<u64>,
        room: usize,
        now: u64,
        moves: usize,
    }

    impl World {
        fn new(rates: Vec<u64>, room: usize) -> World {
            let carried = alloc::vec![0; rates.len()];
            World { heat: Heat::default(), rates, carried, on_nic: BTreeSet::new(), room, now: 0, moves: 0 }
        }

        fn look(&mut self) -> Choice {
            self.now += 500_000;
            for (carried, rate) in self.carried.iter_mut().zip(&self.rates) {
                *carried = carried.wrapping_add((rate / 2) as u32);
            }
            let sample = |(key, carried): (usize, &u32)| {
                let place = if self.on_nic.contains(&(key as u64)) { Place::Nic } else { Place::Waits };
                Sample { key: key as u64, place, carried: Some(*carried), pages: 16 }
            };
            let samples: Vec<Sample> = self.carried.iter().enumerate().map(sample).collect();
            let over = (self.on_nic.len().saturating_sub(self.room), 0);
            let demand = Demand { over, free: self.room.saturating_sub(self.on_nic.len()), swaps: true };
            let choice = self.heat.choose(self.now, &samples, demand);
            choice.leave.iter().for_each(|key| assert!(self.on_nic.remove(key)));
            choice.come.iter().for_each(|key| assert!(self.on_nic.insert(*key)));
            self.moves += choice.leave.len() + choice.come.len();
            assert!(self.on_nic.len() <= self.room);
            choice
        }

        /// The bytes on the NIC over those of the hottest that would fit.
        fn share(&self) -> f64 {
            let mut rates = self.rates.clone();
            rates.sort_unstable_by(|one, other| other.cmp(one));
            let best: u64 = rates[..self.room].iter().sum();
            self.on_nic.iter().map(|key| self.rates[*key as usize]).sum::<u64>() as f64 / best as f64
        }
    }

    /// Rates by Zipf's law (s = 1), connection `first` the hottest.
    fn zipf(connections: usize, first: usize) -> Vec<u64> {
        (0..connections).map(|at| 10_000_000 / (1 + (at + connections - first) % connections) as u64).collect()
    }

    #[test]
    fn the_hottest_are_on_the_nic_within_three_seconds_of_the_start_and_of_a_shift() {
        let mut world = World::new(zipf(1024, 512), 256);
        (0..6).for_each(|_| _ = world.look());
        assert!(world.share() >= 0.9, "{}", world.share());
        for first in [100, 900, 300] {
            world.rates = zipf(1024, first);
            let before = world.moves;
            (0..6).for_each(|_| _ = world.look());
            assert!(world.share() >= 0.9, "{} after the shift to {first}", world.share());
            assert!(world.moves - before <= 3 * 200, "{} moves in three seconds", world.moves - before);
        }
    }

    #[test]
    fn a_steady_load_settles() {
        let mut world = World::new(zipf(1024, 512), 256);
        (0..40).for_each(|_| _ = world.look());
        let before = world.moves;
        (0..40).for_each(|_| _ = world.look());
        assert_eq!(world.moves, before);
        assert!(world.share() >= 0.95, "{}", world.share());
    }

    #[test]
    fn rates_that_vary_cause_few_moves() {
        let mut world = World::new(zipf(1024, 0), 256);
        let mut random = 88_172_645_463_325_252u64;
        let mut before = 0;
        for look in 0..100 {
            for (at, rate) in world.rates.iter_mut().enumerate() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // A fifth more or less than usual.
                *rate = 10_000_000 / (1 + at as u64) * (80 + random % 41) / 100;
            }
            world.look();
            if look == 40 {
                before = world.moves;
            }
        }
        let a_second = (world.moves - before) as f64 / 30.0;
        assert!(a_second <= 50.0, "{a_second} moves a second");
    }

    #[test]
    fn a_lowered_limit_returns_the_coldest_at_once() {
        let mut world = World::new(zipf(100, 0), 50);
        (0..8).for_each(|_| _ = world.look());
        world.room = 10;
        let choice = world.look();
        assert_eq!((choice.leave.len(), choice.come.len()), (40, 0));
        assert!(world.on_nic.iter().all(|key| *key < 12), "{:?}", world.on_nic);
        world.room = 0;
        assert_eq!(world.look().leave.len(), 10);
        assert_eq!(world.look(), Choice::default());
    }

    #[test]
    fn memory_beyond_its_limit_is_freed_by_the_coldest() {
        let mut heat = Heat::default();
        let sample = |key, carried| Sample { key, place: Place::Nic, carried: Some(carried), pages: 10 };
        heat.choose(0, &[sample(1, 0), sample(2, 0), sample(3, 0)], Demand::default());
        let demand = Demand { over: (0, 11), ..Demand::default() };
        let choice = heat.choose(1_000_000, &[sample(1, 900_000), sample(2, 5_000), sample(3, 100)], demand);
        assert_eq!(choice, Choice { leave: alloc::vec![3, 2], come: Vec::new() });
    }

    #[test]
    fn without_swaps_only_free_room_is_filled() {
        let mut heat = Heat::default();
        let samples = [(1, Place::Nic, 0), (2, Place::Waits, 0), (3, Place::Waits, 1 << 20)];
        let look = |heat: &mut Heat, now, free| {
            let carried = |carried: u32| Some(carried * (now / 1_000_000) as u32);
            let samples = samples.map(|(key, place, bytes)| Sample { key, place, carried: carried(bytes), pages: 1 });
            heat.choose(now, &samples, Demand { free, swaps: false, ..Demand::default() })
        };
        assert_eq!(
            [1_000_000, 2_000_000, 9_000_000].map(|now| look(&mut heat, now, 0)),
            [const { Choice { leave: Vec::new(), come: Vec::new() } }; 3]
        );
        assert_eq!(look(&mut heat, 10_000_000, 1).come, [3]);
    }

    #[test]
    fn what_nobody_counts_comes_last() {
        let mut heat = Heat::default();
        let samples = |count: u32| {
            [(1, Some(count)), (2, None)].map(|(key, carried)| Sample { key, place: Place::Waits, carried, pages: 0 })
        };
        heat.choose(0, &samples(0), Demand::default());
        let choice = heat.choose(1_000_000, &samples(10), Demand { free: 2, ..Demand::default() });
        assert_eq!(choice.come, [1, 2]);
    }
}
