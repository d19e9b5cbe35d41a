//! Placement by heat: the busiest connections are on the NIC, colder ones wait in the kernel. (The handoff paper leaves
//! it to the operating system how much is offloaded; this is how ours decides.)
//!
//! A connection's heat is what it carries, in bytes a second, averaged over the last looks. A connection that waits
//! takes the place of one that is on the NIC only if it is clearly hotter, so that two of about the same heat do not
//! change places again and again; and only so many moves are made a second.
//!
//! A connection may also have to be *hot enough* to be there at all, whatever room there is. It comes when it carries
//! so many bytes a second, and leaves again when it has carried less than half of that for some time.

use crate::budget::Budget;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// A connection that waits must carry more than this many quarters of what the one carries that leaves for it, and this
/// many bytes a second more.
const QUARTERS: u64 = 6;
const MARGIN: u64 = 1000;

/// Microseconds for which a connection that has just come to the NIC stays there, unless the NIC has too many.
const STAY: u64 = 1_000_000;

/// A connection that has to be hot enough leaves the NIC when it has carried less than one part in this many of that
/// for so many microseconds.
const COLD_PART: u64 = 2;
const COLD: u64 = 5_000_000;

/// Where a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the NIC.
    Nic,
    /// In the kernel, since the NIC has no room for it or it is not hot enough.
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
    /// Bytes a second that it has to carry to be on the NIC; 0 if it is wanted there whatever it carries.
    pub hot_from: u32,
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
    /// From the NIC, the coldest first: it has too many, or others take their places.
    pub leave: Vec<u64>,
    /// From the NIC, since they are not hot enough any more.
    pub cold: Vec<u64>,
    /// To the NIC, the hottest first: into free room, then as others leave.
    pub come: Vec<u64>,
    /// Those that had to be hot enough, are, and wait nevertheless: the NIC has no room for them.
    pub short: Vec<u64>,
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
    /// When it was in the kernel last, or hot enough to stay on the NIC.
    warm: u64,
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
        let is_hot = |sample: &&Sample| rate(sample.key) >= u64::from(sample.hot_from);
        let mut waiting: Vec<&Sample> = of(Place::Waits).filter(is_hot).collect();
        waiting.sort_by_key(|sample| (core::cmp::Reverse(rate(sample.key)), sample.key));
        let is_first = self.looks == 1;
        let leave = if is_first { Vec::new() } else { too_many(&there, demand.over) };
        if !leave.is_empty() {
            return Choice { leave, short: by_heat(&waiting), ..Choice::default() };
        }
        let (into_room, rest) = waiting.split_at(demand.free.min(waiting.len()));
        let is_cold = |sample: &&Sample| {
            sample.hot_from > 0 && self.known.get(&sample.key).is_some_and(|known| now.saturating_sub(known.warm) >= COLD)
        };
        let (cold, stay): (Vec<&Sample>, Vec<&Sample>) = there.iter().copied().partition(is_cold);
        let settled = |sample: &&&Sample| {
            self.known.get(&sample.key).is_some_and(|known| now.saturating_sub(known.since) >= STAY || known.since == 0)
        };
        let swaps = demand.swaps && !is_first;
        let better = |(cold, hot): &(u64, u64)| 4 * rate(*hot) > QUARTERS * rate(*cold) + 4 * MARGIN;
        let pairs = stay.iter().filter(settled).zip(rest).map(|(cold, hot)| (cold.key, hot.key));
        let pairs: Vec<(u64, u64)> = if swaps { pairs.take_while(better).collect() } else { Vec::new() };
        let mut left = 0;
        if swaps || samples.iter().any(|sample| sample.hot_from > 0) {
            let misplaced = cold.len() + by_heat(into_room).len() + pairs.len();
            left = self.budget.moves(now, 10 * misplaced > there.len());
        }
        let budget = left;
        let mut choice = Choice::default();
        choice.cold.extend(cold.iter().take(left).map(|sample| sample.key));
        left -= choice.cold.len();
        for sample in into_room {
            // What is wanted on the NIC in any case goes into free room at once.
            if sample.hot_from == 0 || left > 0 {
                left -= usize::from(sample.hot_from > 0);
                choice.come.push(sample.key);
            }
        }
        for (cold, hot) in pairs.into_iter().take(left / 2) {
            left -= 2;
            choice.leave.push(cold);
            choice.come.push(hot);
        }
        self.budget.spend(budget - left);
        choice.short = by_heat(&rest[choice.leave.len()..]);
        choice
    }

    fn observe(&mut self, now: u64, samples: &[Sample]) {
        let elapsed = now.saturating_sub(self.looked).max(1);
        let first = self.looks == 0;
        self.looks += 1;
        self.looked = now;
        for Sample { key, place, carried, hot_from, .. } in samples.iter().copied() {
            // What was there at the first look counts as settled.
            let since = if first { 0 } else { now };
            let new = Known { place, carried, rate: 0, since, warm: now, seen: self.looks };
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
            if place == Place::Waits || COLD_PART * known.rate >= u64::from(hot_from) {
                known.warm = now;
            }
        }
        let looks = self.looks;
        self.known.retain(|_, known| known.seen == looks);
    }
}

/// The coldest of those on the NIC, without which it is within its limits: the connections, and pages, beyond those.
fn too_many(coldest: &[&Sample], (mut connections, mut pages): (usize, u32)) -> Vec<u64> {
    let mut leave = Vec::new();
    for sample in coldest {
        if connections == 0 && pages == 0 {
            break;
        }
        leave.push(sample.key);
        (connections, pages) = (connections.saturating_sub(1), pages.saturating_sub(sample.pages));
    }
    leave
}

/// Those that have to be hot enough.
fn by_heat(of: &[&Sample]) -> Vec<u64> {
    of.iter().filter(|sample| sample.hot_from > 0).map(|sample| sample.key).collect()
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
        hot_from: u32,
        now: u64,
        moves: usize,
    }

    impl World {
        fn new(rates: Vec<u64>, room: usize) -> World {
            let carried = alloc::vec![0; rates.len()];
            World { heat: Heat::default(), rates, carried, on_nic: BTreeSet::new(), room, hot_from: 0, now: 0, moves: 0 }
        }

        /// Looks for so many seconds. Returns the most moves of one of them.
        fn run(&mut self, seconds: usize) -> usize {
            let second = |world: &mut World| {
                let before = world.moves;
                (0..2).for_each(|_| _ = world.look());
                world.moves - before
            };
            (0..seconds).map(|_| second(self)).max().unwrap_or(0)
        }

        fn look(&mut self) -> Choice {
            self.now += 500_000;
            for (carried, rate) in self.carried.iter_mut().zip(&self.rates) {
                *carried = carried.wrapping_add((rate / 2) as u32);
            }
            let sample = |(key, carried): (usize, &u32)| {
                let place = if self.on_nic.contains(&(key as u64)) { Place::Nic } else { Place::Waits };
                Sample { key: key as u64, place, carried: Some(*carried), pages: 16, hot_from: self.hot_from }
            };
            let samples: Vec<Sample> = self.carried.iter().enumerate().map(sample).collect();
            let over = (self.on_nic.len().saturating_sub(self.room), 0);
            let free = self.room.saturating_sub(self.on_nic.len());
            let demand = Demand { over, free, swaps: free == 0 };
            let choice = self.heat.choose(self.now, &samples, demand);
            choice.leave.iter().chain(&choice.cold).for_each(|key| assert!(self.on_nic.remove(key)));
            choice.come.iter().for_each(|key| assert!(self.on_nic.insert(*key)));
            self.moves += choice.leave.len() + choice.cold.len() + choice.come.len();
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
        let sample = |key, carried| Sample { key, place: Place::Nic, carried: Some(carried), pages: 10, hot_from: 0 };
        heat.choose(0, &[sample(1, 0), sample(2, 0), sample(3, 0)], Demand::default());
        let demand = Demand { over: (0, 11), ..Demand::default() };
        let choice = heat.choose(1_000_000, &[sample(1, 900_000), sample(2, 5_000), sample(3, 100)], demand);
        assert_eq!(choice, Choice { leave: alloc::vec![3, 2], ..Choice::default() });
    }

    #[test]
    fn without_swaps_only_free_room_is_filled() {
        let mut heat = Heat::default();
        let samples = [(1, Place::Nic, 0), (2, Place::Waits, 0), (3, Place::Waits, 1 << 20)];
        let look = |heat: &mut Heat, now, free| {
            let carried = |carried: u32| Some(carried * (now / 1_000_000) as u32);
            let sample = |(key, place, bytes)| Sample { key, place, carried: carried(bytes), pages: 1, hot_from: 0 };
            let samples = samples.map(sample);
            heat.choose(now, &samples, Demand { free, swaps: false, ..Demand::default() })
        };
        for now in [1_000_000, 2_000_000, 9_000_000] {
            assert_eq!(look(&mut heat, now, 0), Choice::default());
        }
        assert_eq!(look(&mut heat, 10_000_000, 1).come, [3]);
    }

    #[test]
    fn what_nobody_counts_comes_last() {
        let mut heat = Heat::default();
        let samples = |count: u32| {
            let sample = |(key, carried)| Sample { key, place: Place::Waits, carried, pages: 0, hot_from: 0 };
            [(1, Some(count)), (2, None)].map(sample)
        };
        heat.choose(0, &samples(0), Demand::default());
        let choice = heat.choose(1_000_000, &samples(10), Demand { free: 2, ..Demand::default() });
        assert_eq!(choice.come, [1, 2]);
    }

    #[test]
    fn only_the_hot_come_however_much_room_there_is() {
        let mut world = World::new(zipf(1000, 0), 1000);
        world.hot_from = 100_000;
        let most = world.run(10);
        // 10 MB a second over the rank: the first hundred carry as much. The last of them come late: the average rises
        // to what they carry.
        assert!(world.on_nic.iter().all(|key| *key < 100) && world.on_nic.len() >= 95, "{:?}", world.on_nic);
        assert!(most <= 200, "{most} moves in a second");
        let before = world.moves;
        assert_eq!(world.run(20), 0, "a steady load settles: {before} moves, then {}", world.moves);
    }

    #[test]
    fn who_is_there_stays_while_it_carries_half() {
        let mut world = World::new(alloc::vec![200_000, 200_000, 99_000], 10);
        world.hot_from = 100_000;
        world.run(5);
        assert_eq!(world.on_nic, BTreeSet::from([0, 1]));
        world.rates = alloc::vec![60_000, 40_000, 99_000];
        world.run(3);
        assert_eq!(world.on_nic, BTreeSet::from([0, 1]), "it has not been cold for long");
        world.run(6);
        assert_eq!(world.on_nic, BTreeSet::from([0]));
        world.rates = alloc::vec![60_000, 99_000, 99_000];
        assert_eq!(world.run(20), 0, "what carries less than that does not come, and what carries half of it stays");
    }

    #[test]
    fn rates_around_what_is_asked_for_cause_few_moves() {
        let mut world = World::new(alloc::vec![100_000; 200], 1000);
        world.hot_from = 100_000;
        let mut random = 88_172_645_463_325_252u64;
        for _ in 0..120 {
            for rate in &mut world.rates {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // From idle to twice as much, at each look.
                *rate = random % 200_001;
            }
            world.look();
        }
        assert!(world.moves <= 250, "{} moves of 200 connections in a minute: nearly all come, and stay", world.moves);
    }

    #[test]
    fn the_hot_move_so_often_a_second_at_most() {
        let mut world = World::new(alloc::vec![0; 2000], 2000);
        world.hot_from = 1000;
        for hot in [0..1000u64, 1000..2000] {
            world.rates = (0..2000).map(|at| if hot.contains(&at) { 50_000 } else { 0 }).collect();
            let most = world.run(30);
            assert!((100..=200).contains(&most), "{most} moves in a second");
            assert_eq!(world.on_nic, hot.collect());
        }
    }

    #[test]
    fn on_a_full_nic_the_hottest_of_the_hot_are_there() {
        let mut world = World::new(zipf(1024, 512), 64);
        world.hot_from = 10_000;
        world.run(8);
        assert!(world.on_nic.len() == 64 && world.share() >= 0.9, "{}", world.share());
        world.rates = zipf(1024, 100);
        let most = world.run(10);
        assert!(world.share() >= 0.9 && most <= 200, "{} after the shift, {most} moves in a second", world.share());
        let choice = world.look();
        assert!(!choice.short.is_empty() && choice.short.iter().all(|key| !world.on_nic.contains(key)));
    }

    /// Without room for all, those that are wanted in any case and those that are only when they are hot are alike,
    /// once they are hot.
    #[test]
    fn what_is_wanted_in_any_case_does_not_have_to_be_hot() {
        let mut heat = Heat::default();
        let look = |heat: &mut Heat, now: u64, free| {
            let sample = |(key, rate, hot_from): (u64, u64, u32)| {
                let carried = Some((rate * now / 1_000_000) as u32);
                Sample { key, place: Place::Waits, carried, pages: 0, hot_from }
            };
            let samples = [(1, 10, 0), (2, 5000, 10_000), (3, 50_000, 10_000), (4, 20_000, 10_000)].map(sample);
            heat.choose(now, &samples, Demand { free, ..Demand::default() })
        };
        assert_eq!(look(&mut heat, 1_000_000, 4).come, [1]);
        (2..6).for_each(|second| _ = look(&mut heat, second * 1_000_000, 0));
        let choice = look(&mut heat, 6_000_000, 1);
        assert_eq!((choice.come.as_slice(), choice.short.as_slice()), (&[3][..], &[4][..]));
        assert_eq!(look(&mut heat, 7_000_000, 4).come, [3, 4, 1]);
    }
}
