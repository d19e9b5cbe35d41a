//! Worlds of loads in virtual time whose classes the policy places.

use super::*;
use alloc::vec::Vec;

const SECOND: u64 = 1_000_000;

/// What a class is like: bytes a second, and nanoseconds of the program for a byte, in each place; and nanoseconds
/// of the NIC for a byte.
#[derive(Clone, Copy)]
struct Load {
    rate: [f64; 2],
    program: [f64; 2],
    nic: f64,
}

/// Bulk data that costs three quarters on the NIC; requests that cost a third more there, and are slower.
const BULK: Load = Load { rate: [1e9, 1e9], program: [0.4, 0.1], nic: 0.2 };
const REQUESTS: Load = Load { rate: [2e7, 1.4e7], program: [20.0, 14.0], nic: 14.0 };
const EVEN: Load = Load { rate: [1e8, 1e8], program: [3.0, 1.5], nic: 1.5 };

struct World {
    gain: Gain,
    loads: Vec<Load>,
    at: Vec<Side>,
    carried: Vec<f64>,
    program: Vec<f64>,
    nics: f64,
    /// Nanoseconds a second that the NIC costs as soon as anything is there.
    base: f64,
    now: u64,
    next: u64,
    noise: f64,
    random: u64,
    /// Microseconds for which each class was on the NIC.
    on_nic: Vec<u64>,
    /// Microseconds that a move takes, and since when each class moves.
    slow: u64,
    since: Vec<Option<u64>>,
}

impl World {
    fn new(loads: &[Load], seed: u64, noise: f64) -> World {
        let number = loads.len();
        World {
            gain: Gain::new(seed, 1.0),
            loads: loads.to_vec(),
            at: alloc::vec![Side::Kernel; number],
            carried: alloc::vec![0.0; number],
            program: alloc::vec![0.0; number],
            nics: 0.0,
            base: 0.0,
            now: SECOND,
            next: SECOND,
            noise,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            on_nic: alloc::vec![0; number],
            slow: 0,
            since: alloc::vec![None; number],
        }
    }

    /// A factor about 1.
    fn vary(&mut self) -> f64 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            sum += (self.random >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        }
        // The sum's deviation is 0.58.
        1.0 + self.noise * sum / 0.58
    }

    /// Lets the loads run until the policy wants to look, and looks.
    fn step(&mut self) {
        let seconds = (self.next - self.now) as f64 / 1e6;
        if self.at.contains(&Side::Nic) {
            self.nics += self.base * seconds;
        }
        for at in 0..self.loads.len() {
            let (load, side) = (self.loads[at], self.at[at]);
            let bytes = load.rate[side as usize] * seconds * self.vary();
            self.carried[at] += bytes;
            self.program[at] += bytes * load.program[side as usize] * self.vary();
            if side == Side::Nic {
                self.nics += bytes * load.nic * self.vary();
                self.on_nic[at] += self.next - self.now;
            }
        }
        self.now = self.next;
        let seen = |(at, carried): (usize, &f64)| Seen {
            key: at as u64,
            class: at as u32,
            side: self.at[at],
            carried: Some(*carried as u64 as u32),
        };
        let seen: Vec<Seen> = self.carried.iter().enumerate().map(seen).collect();
        let programs: Vec<_> = self.program.iter().zip(0..).map(|(nanos, at)| (at, at, *nanos as u64)).collect();
        let used = Used { programs: &programs, nics: self.nics as u64, interrupts: 0 };
        self.next = self.gain.look(self.now, &seen, used);
        assert!(self.next > self.now, "time goes on");
        for (at, side) in self.at.iter_mut().enumerate() {
            let to = self.gain.place(at as u32);
            if to == *side {
                self.since[at] = None;
            } else if self.now - *self.since[at].get_or_insert(self.now) >= self.slow {
                (*side, self.since[at]) = (to, None);
            }
        }
    }

    fn run(&mut self, micros: u64) {
        let end = self.now + micros;
        while self.now < end {
            self.step();
        }
    }

    fn row(&self, class: u32) -> Row {
        self.gain.row(class, self.now).expect("a class")
    }
}

/// Of so many seeds at most that many may take longer: by chance a place looks slower at first.
const SEEDS: u64 = 200;
const LATE: u64 = 4;

#[test]
fn each_load_goes_where_it_is_better_within_seconds() {
    let mut late = 0;
    for seed in 1..=SEEDS {
        let mut world = World::new(&[BULK], seed, 0.03);
        world.run(5 * SECOND);
        late += u64::from((world.row(0).home, world.row(0).why) != (Side::Nic, Why::Cheaper));
        let mut world = World::new(&[REQUESTS], seed, 0.03);
        world.run(10 * SECOND);
        assert_eq!(world.row(0).home, Side::Kernel);
        assert!(matches!(world.row(0).why, Why::Faster | Why::Cheaper), "{:?}", world.row(0));
        assert!(world.on_nic[0] <= 3 * SECOND, "{} us on the NIC", world.on_nic[0]);
    }
    assert!(late <= LATE, "{late} of {SEEDS}");
}

#[test]
fn a_slower_place_is_not_chosen_however_cheap() {
    for seed in 1..100 {
        let slow = Load { rate: [1e8, 0.9e8], program: [3.0, 0.5], nic: 0.5 };
        let mut world = World::new(&[slow], seed, 0.03);
        world.run(60 * SECOND);
        assert_eq!((world.row(0).home, world.row(0).switches), (Side::Kernel, 0), "{:?}", world.row(0));
    }
}

#[test]
fn two_equal_places_move_nothing() {
    let mut moved = 0;
    for seed in 1..=200 {
        let mut world = World::new(&[EVEN], seed, 0.05);
        world.run(600 * SECOND);
        moved += world.row(0).switches;
        assert!(world.row(0).switches > 0 || world.on_nic[0] < 20 * SECOND, "{} us away", world.on_nic[0]);
    }
    // By chance: there are more than a thousand trials.
    assert!(moved <= 2, "{moved} switches in 200 times ten minutes");
}

#[test]
fn a_price_is_seen() {
    for (price, home) in [(3.0, Side::Kernel), (0.1, Side::Nic)] {
        let mut world = World::new(&[EVEN], 7, 0.05);
        world.gain = Gain::new(7, price);
        world.run(5 * SECOND);
        assert_eq!(world.row(0).home, home);
    }
}

/// On a busy machine moves take so long that a trial must end before it has enough pairs: the next one goes on with
/// them.
#[test]
fn slow_moves_only_delay_an_answer() {
    for slow in [900_000, 1_600_000] {
        let mut late = 0;
        for (load, home, seed) in (1..=SEEDS).flat_map(|seed| [(BULK, Side::Nic, seed), (REQUESTS, Side::Kernel, seed)]) {
            let mut world = World::new(&[load], seed, 0.03);
            world.slow = slow;
            world.run(60 * SECOND);
            let row = world.row(0);
            late += u64::from(row.home != home || !matches!(row.why, Why::Faster | Why::Cheaper));
        }
        assert!(late <= 2 * LATE, "{late} of {}", 2 * SEEDS);
        let mut world = World::new(&[EVEN], 1, 0.05);
        world.slow = slow;
        world.run(60 * SECOND);
        assert!(world.on_nic[0] < 20 * SECOND, "{} us away", world.on_nic[0]);
        world.on_nic[0] = 0;
        world.run(600 * SECOND);
        assert!(world.on_nic[0] < 30 * SECOND, "{} us away", world.on_nic[0]);
    }
}

/// A turn that carries little goes on for longer.
#[test]
fn a_slow_class_gets_longer_turns() {
    let mut world = World::new(&[Load { rate: [9e4, 9e4], ..BULK }], 1, 0.03);
    world.run(30 * SECOND);
    assert_eq!((world.row(0).home, world.row(0).why), (Side::Nic, Why::Cheaper), "{:?}", world.row(0));
}

/// What the NIC costs is shared: whether one class is worth it there depends on the others.
#[test]
fn three_classes_with_shared_costs_settle() {
    let mut most = 0;
    for seed in 1..=1000 {
        let near = Load { rate: [1e8, 1e8], program: [2.0, 1.0], nic: 0.9 };
        let mut world = World::new(&[near, EVEN, BULK], seed, 0.1);
        // A tenth of a processor.
        world.base = 1e8;
        world.run(600 * SECOND);
        for class in 0..3 {
            most = most.max(world.row(class).switches);
        }
    }
    assert!(most <= 4, "{most} switches in ten minutes");
}

#[test]
fn a_change_of_the_load_is_seen_within_five_seconds() {
    let mut late = 0;
    for seed in 1..=SEEDS {
        let mut world = World::new(&[BULK], seed, 0.03);
        for (load, home) in [(BULK, Side::Nic), (REQUESTS, Side::Kernel), (BULK, Side::Nic)] {
            world.loads[0] = load;
            world.run(5 * SECOND);
            late += u64::from(world.row(0).home != home);
            world.run(25 * SECOND);
        }
    }
    assert!(late <= 3 * LATE, "{late} of {}", 3 * SEEDS);
}

#[test]
fn what_carries_nothing_is_not_tried() {
    let idle = Load { rate: [1e3, 1e3], ..EVEN };
    let mut world = World::new(&[idle], 3, 0.0);
    world.run(60 * SECOND);
    assert_eq!((world.on_nic[0], world.row(0).why), (0, Why::New));
}

#[test]
fn a_class_that_cannot_move_is_left_alone() {
    let mut gain = Gain::new(1, 1.0);
    let (mut now, mut carried, mut on_way) = (SECOND, 0u32, 0);
    while now < 300 * SECOND {
        carried = carried.wrapping_add(1 << 20);
        let seen = [Seen { key: 1, class: 1, side: Side::Kernel, carried: Some(carried) }];
        let next = gain.look(now, &seen, Used { programs: &[(1, 1, now * 500)], nics: 0, interrupts: 0 });
        on_way += u32::from(gain.place(1) == Side::Nic && next == now + MOVING);
        now = next;
    }
    assert_eq!(gain.row(1, now).expect("a class").why, Why::Stuck);
    assert!(on_way as u64 * MOVING < 30 * SECOND, "{on_way} looks while it was to move");
}

/// Moves fail now and then, as on a busy machine: what a trial has measured before counts in the next one, which
/// follows soon.
#[test]
fn moves_that_fail_only_delay_an_answer() {
    let mut gain = Gain::new(1, 0.1);
    let (mut now, mut carried, mut side, mut to, mut ways) = (SECOND, 0u32, Side::Kernel, Side::Kernel, 0u32);
    while gain.row(1, now).is_none_or(|row| row.switches == 0) {
        assert!(now < 60 * SECOND, "{:?}", gain.row(1, now));
        carried = carried.wrapping_add(1 << 20);
        let seen = [Seen { key: 1, class: 1, side, carried: Some(carried) }];
        now = gain.look(now, &seen, Used { programs: &[(1, 1, now * 500)], nics: 0, interrupts: 0 });
        let before = core::mem::replace(&mut to, gain.place(1));
        ways += u32::from((before, to) == (Side::Kernel, Side::Nic));
        // Each second way to the NIC leads nowhere.
        if to == Side::Kernel || ways % 2 == 1 {
            side = to;
        }
    }
    assert!(ways > 2, "no move has failed");
    assert_eq!(gain.row(1, now).expect("a class").why, Why::Cheaper);
}

/// What trials have found is where a class like those begins later, before it has been tried. A value that is wrong
/// lasts until its trial has an answer.
#[test]
fn a_new_class_begins_where_loads_like_it_belong() {
    let mut first = World::new(&[BULK, REQUESTS], 1, 0.03);
    first.run(60 * SECOND);
    assert_eq!(first.gain.starts.all().len(), 2);
    let wrong = Start { program: REQUESTS.program, cost: 0.5, rate: 1.2 };
    for (load, starts, home) in [
        (BULK, first.gain.starts.clone(), Side::Nic),
        (REQUESTS, first.gain.starts.clone(), Side::Kernel),
        (REQUESTS, Starts::new([wrong]), Side::Nic),
    ] {
        let mut world = World::new(&[load], 2, 0.03);
        world.gain = Gain::new(2, 1.0).with_starts(starts);
        world.run(SECOND);
        assert_eq!((world.row(0).home, world.row(0).why), (home, Why::Start));
        world.run(15 * SECOND);
        let belongs = if load.nic < 1.0 { Side::Nic } else { Side::Kernel };
        assert_eq!(world.row(0).home, belongs, "{:?}", world.row(0));
    }
}
