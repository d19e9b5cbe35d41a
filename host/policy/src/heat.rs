//! Placement by heat: the busiest connections are on the NIC, colder ones wait in the kernel. (The handoff paper leaves
//! it to the operating system how much is offloaded; this is how ours decides.)
//!
//! A connection's heat is what it carries, in bytes a second, averaged over the last looks. A connection that waits
//! takes the place of one that is on the NIC only if it is clearly hotter, so that two of about the same heat do not
//! change places again and again; and only so many moves are made a second.
//!
//! Where it was measured how much CPU a byte saves on the NIC, the heat is multiplied by that: a full NIC has the
//! connections that save most CPU for a slot, and among equal loads the busiest. One user has at most half of the slots
//! while other users' connections wait.
//!
//! A connection may also have to be *hot enough* to be there at all, whatever room there is. It comes when it carries
//! so many bytes a second, and leaves again when it has carried less than half of that for some time.

use crate::budget::Budget;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// A waiting connection replaces one on the NIC only if it carries more than [`QUARTERS`] quarters of that one's rate,
/// and at least [`MARGIN`] bytes a second more.
const QUARTERS: u64 = 6;
const MARGIN: u64 = 1000;

/// What a byte is worth of which nothing was measured: a nanosecond of CPU, in the unit of [`Sample::worth`].
pub const WORTH: u32 = 1024;

/// One user has one part in so many of the slots at most, while others wait that carry [`MARGIN`].
const SHARE_PART: usize = 2;

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
    /// CPU time that a byte saves on the NIC, in nanoseconds by [`WORTH`].
    pub worth: u32,
    /// Whose it is.
    pub user: u32,
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
        let rate = |sample: &Sample| self.known.get(&sample.key).map_or(0, |known| known.rate);
        // Nanoseconds of CPU that it saves a second.
        let saves = |sample: &Sample| {
            let saves = u128::from(rate(sample)) * u128::from(sample.worth) / u128::from(WORTH);
            saves.min(u128::from(u64::MAX / 8)) as u64
        };
        let of = |place| samples.iter().filter(move |sample| sample.place == place);
        let mut there: Vec<&Sample> = of(Place::Nic).collect();
        there.sort_by_key(|sample| (saves(sample), sample.key));
        let is_hot = |sample: &&Sample| rate(sample) >= u64::from(sample.hot_from);
        let mut waiting: Vec<&Sample> = of(Place::Waits).filter(is_hot).collect();
        waiting.sort_by_key(|sample| (core::cmp::Reverse(saves(sample)), sample.key));
        let share = share(samples, there.len() + demand.free);
        let is_first = self.looks == 1;
        let used = |sample: &Sample| rate(sample).max(saves(sample));
        let has_share = |sample: &Sample| share == usize::MAX || is_first || used(sample) > MARGIN;
        let (waiting, within) = within_first(&waiting, &there, share, has_share);
        let leave = if is_first { Vec::new() } else { too_many(&there, demand.over) };
        if !leave.is_empty() {
            return Choice { leave, short: by_heat(&waiting), ..Choice::default() };
        }
        let (into_room, rest) = waiting.split_at(demand.free.min(waiting.len()));
        let is_cold = |sample: &&Sample| {
            sample.hot_from > 0 && self.known.get(&sample.key).is_some_and(|known| now.saturating_sub(known.warm) >= COLD)
        };
        let (cold, stay): (Vec<&Sample>, Vec<&Sample>) = there.iter().copied().partition(is_cold);
        let settled = |(sample, _): &(&Sample, bool)| {
            self.known.get(&sample.key).is_some_and(|known| now.saturating_sub(known.since) >= STAY || known.since == 0)
        };
        let swaps = demand.swaps && !is_first;
        let gives_way = |cold: &Sample, beyond: bool, hot: &Sample| {
            beyond && rate(hot) > MARGIN || 4 * saves(hot) > QUARTERS * saves(cold) + 4 * MARGIN
        };
        // A share is for those that use it.
        let may_take = |cold: &Sample, hot: &Sample| cold.user == hot.user || 2 * used(cold) <= MARGIN;
        let places: Vec<(&Sample, bool)> = beyond_first(&stay, &there, share).into_iter().filter(settled).collect();
        let within = within.saturating_sub(into_room.len());
        let pairs = if swaps { pair_up(&places, rest, within, gives_way, may_take) } else { Vec::new() };
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
        let mut placed = BTreeSet::new();
        for (cold, hot) in pairs.into_iter().take(left / 2) {
            left -= 2;
            choice.leave.push(cold);
            choice.come.push(hot);
            placed.insert(hot);
        }
        self.budget.spend(budget - left);
        choice.short = by_heat(rest);
        choice.short.retain(|key| !placed.contains(key));
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

/// Slots that one user may have while others wait for some: all of them if there are no others.
fn share(samples: &[Sample], slots: usize) -> usize {
    let several = samples.iter().any(|sample| sample.user != samples[0].user);
    if several { slots.div_ceil(SHARE_PART) } else { usize::MAX }
}

/// Number of connections of each user.
fn of_users(of: &[&Sample]) -> BTreeMap<u32, usize> {
    of.iter().fold(BTreeMap::new(), |mut users, sample| {
        *users.entry(sample.user).or_default() += 1;
        users
    })
}

/// Those that wait, in their order: the ones first whose users do not have their share yet, of those that `has_share`
/// accepts. And how many that are.
fn within_first<'a>(
    waiting: &[&'a Sample],
    there: &[&Sample],
    share: usize,
    has_share: impl Fn(&Sample) -> bool,
) -> (Vec<&'a Sample>, usize) {
    let mut users = of_users(there);
    let (mut all, beyond): (Vec<&'a Sample>, Vec<&'a Sample>) = waiting.iter().copied().partition(|sample| {
        let slots = users.entry(sample.user).or_default();
        *slots += 1;
        *slots <= share && has_share(sample)
    });
    let within = all.len();
    all.extend(beyond);
    (all, within)
}

/// Those that stay on the NIC, in their order: the coldest first of users that have more than their share, as many as
/// are beyond that, with true.
fn beyond_first<'a>(stay: &[&'a Sample], there: &[&Sample], share: usize) -> Vec<(&'a Sample, bool)> {
    let mut users = of_users(there);
    let (beyond, others): (Vec<&'a Sample>, Vec<&'a Sample>) = stay.iter().copied().partition(|sample| {
        let slots = users.entry(sample.user).or_default();
        let beyond = *slots > share;
        *slots -= usize::from(beyond);
        beyond
    });
    beyond.into_iter().map(|sample| (sample, true)).chain(others.into_iter().map(|sample| (sample, false))).collect()
}

/// Pairs each waiting connection with one on the NIC whose place it takes. The first `within` of `waiting` may replace
/// any that `gives_way`. The users of the others have their share already, so these replace only one that `may_take`
/// allows. Both lists are sorted: if the first candidate does not give way, none does. The number of pairs is bounded,
/// and so is the number of moves that begin at once.
fn pair_up(
    places: &[(&Sample, bool)],
    waiting: &[&Sample],
    within: usize,
    gives_way: impl Fn(&Sample, bool, &Sample) -> bool,
    may_take: impl Fn(&Sample, &Sample) -> bool,
) -> Vec<(u64, u64)> {
    const MOST: usize = 256;
    let most = MOST.max(places.len() / 5);
    let (within, beyond) = waiting.split_at(within.min(waiting.len()));
    let pairs = places.iter().zip(within).take_while(|((cold, beyond), hot)| gives_way(cold, *beyond, hot));
    let mut pairs: Vec<(u64, u64)> = pairs.take(most).map(|((cold, _), hot)| (cold.key, hot.key)).collect();
    let (left, mut taken, mut done) = (&places[pairs.len()..], BTreeSet::new(), BTreeSet::new());
    // Of each user: the first place that it may take still.
    let mut first: BTreeMap<u32, usize> = BTreeMap::new();
    for hot in beyond {
        if pairs.len() >= most {
            break;
        }
        if done.contains(&hot.user) {
            continue;
        }
        let at = first.entry(hot.user).or_default();
        while left.get(*at).is_some_and(|(cold, _)| !may_take(cold, hot) || taken.contains(&cold.key)) {
            *at += 1;
        }
        match left.get(*at) {
            Some((cold, _)) if gives_way(cold, false, hot) => {
                taken.insert(cold.key);
                pairs.push((cold.key, hot.key));
            }
            _ => _ = done.insert(hot.user),
        }
    }
    pairs
}

/// Those that have to be hot enough.
fn by_heat(of: &[&Sample]) -> Vec<u64> {
    of.iter().filter(|sample| sample.hot_from > 0).map(|sample| sample.key).collect()
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use core::time::Duration;

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
                Sample {
                    key: key as u64,
                    place,
                    carried: Some(*carried),
                    pages: 16,
                    hot_from: self.hot_from,
                    worth: WORTH,
                    user: 0,
                }
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
        let sample = |key, carried| Sample {
            key,
            place: Place::Nic,
            carried: Some(carried),
            pages: 10,
            hot_from: 0,
            worth: WORTH,
            user: 0,
        };
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
            let sample = |(key, place, bytes)| Sample {
                key,
                place,
                carried: carried(bytes),
                pages: 1,
                hot_from: 0,
                worth: WORTH,
                user: 0,
            };
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
            let sample =
                |(key, carried)| Sample { key, place: Place::Waits, carried, pages: 0, hot_from: 0, worth: WORTH, user: 0 };
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
                Sample { key, place: Place::Waits, carried, pages: 0, hot_from, worth: WORTH, user: 0 }
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

    /// Lets connections with these rates, worths and users run for twenty seconds on a NIC with so much room. Returns
    /// those that are there.
    fn settled(all: &[(u64, u32, u32)], room: usize) -> BTreeSet<u64> {
        let (mut heat, mut there) = (Heat::default(), BTreeSet::new());
        for look in 1..=40u64 {
            let sample = |(key, (rate, worth, user)): (usize, &(u64, u32, u32))| {
                let place = if there.contains(&(key as u64)) { Place::Nic } else { Place::Waits };
                let carried = Some((rate * look / 2) as u32);
                Sample { key: key as u64, place, carried, pages: 1, hot_from: 0, worth: *worth, user: *user }
            };
            let samples: Vec<Sample> = all.iter().enumerate().map(sample).collect();
            let free = room - there.len();
            let choice = heat.choose(look * 500_000, &samples, Demand { over: (0, 0), free, swaps: free == 0 });
            choice.leave.iter().for_each(|key| assert!(there.remove(key)));
            choice.come.iter().for_each(|key| assert!(there.insert(*key)));
            assert!(there.len() <= room);
        }
        there
    }

    /// Requests save more CPU for a byte than bulk data, which carries more bytes.
    #[test]
    fn those_are_there_that_save_most_for_a_slot() {
        let (bulk, requests) = ((1_000_000, WORTH / 10, 0), (100_000, 10 * WORTH, 0));
        let busier = (300_000, 10 * WORTH, 0);
        assert_eq!(settled(&[bulk, requests, bulk, requests, busier], 2), BTreeSet::from([1, 4]));
        let alike = [bulk, requests, busier].map(|(rate, _, user)| (rate, WORTH, user));
        assert_eq!(settled(&alike, 1), BTreeSet::from([0]));
    }

    #[test]
    fn one_user_has_half_of_the_slots_while_others_wait_for_some() {
        let of = |rate, user| (rate, WORTH, user);
        let greedy: Vec<_> = (1..=8).map(|at| of(1_000_000 * at, 1)).collect();
        let others = [of(10_000, 2), of(20_000, 3), of(30_000, 2)];
        let there = settled(&[greedy.clone(), others.to_vec()].concat(), 4);
        assert_eq!(there, BTreeSet::from([6, 7, 9, 10]), "its two hottest, and the others' two hottest");
        // Nobody else wants the room.
        let there = settled(&[greedy.clone(), others[..1].to_vec()].concat(), 4);
        assert_eq!(there, BTreeSet::from([5, 6, 7, 8]));
        // Who carries nothing takes nobody's place.
        assert_eq!(settled(&[greedy, alloc::vec![of(10, 2)]].concat(), 4).len(), 4);
    }

    /// Of users with their share very many wait that carry more than those that are there. If the place of each was
    /// looked for among all this would take a minute, in which the agent does nothing else.
    #[test]
    fn very_many_change_places_with_others_of_their_users() {
        const MANY: u64 = 300_000;
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let of = |key: u64, place| Sample {
                key,
                place,
                carried: None,
                pages: 1,
                hot_from: 0,
                worth: WORTH,
                user: (key % 2) as u32,
            };
            let there: Vec<Sample> = (0..MANY).map(|key| of(key, Place::Nic)).collect();
            let hot: Vec<Sample> = (MANY..2 * MANY).map(|key| of(key, Place::Waits)).collect();
            let places: Vec<(&Sample, bool)> = there.iter().map(|sample| (sample, false)).collect();
            let waiting: Vec<&Sample> = hot.iter().collect();
            done.send(pair_up(&places, &waiting, 0, |_, _, _| true, |cold, hot| cold.user == hot.user))
        });
        let pairs = finished.recv_timeout(Duration::from_secs(20)).expect("the pairs");
        assert_eq!((pairs.len() as u64, &pairs[..2]), (MANY / 5, &[(0, MANY), (1, MANY + 1)][..]));
        assert!(pairs.iter().all(|(cold, hot)| cold % 2 == hot % 2));
    }

    /// A server's connections, and another user's that were there before and are idle.
    #[test]
    fn a_share_that_nobody_uses_is_others() {
        let of = |rate, user| (rate, WORTH, user);
        let busy: Vec<_> = (1..=8).map(|at| of(1_000_000 * at, 1)).collect();
        let before = |rate| [alloc::vec![of(rate, 2); 4], busy.clone()].concat();
        assert_eq!(settled(&before(0), 4), BTreeSet::from([8, 9, 10, 11]));
        assert_eq!(settled(&before(5000), 4), BTreeSet::from([0, 1, 10, 11]), "they carry something");
    }
}
