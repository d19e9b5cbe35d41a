//! Placement by measured gain: connections that are alike, a *class*, are where they cost least.
//!
//! A class begins in the kernel, or where loads like it were measured to be better. When it carries something, it is
//! tried: turns of a quarter of a second with the whole class in one place, two turns to a pair, in random order. Each
//! turn says what a byte has cost, and how many were carried. The class changes its place when the pairs say with
//! confidence that the other one is better; then it rests. One class is tried at a time, since what a NIC costs is
//! shared by all that use it.

use crate::pairs::{EQUAL, Pairs};
use crate::starts::{Start, Starts};
use alloc::collections::BTreeMap;

/// Microseconds of a turn; of the time before it in which the class is in its place already, since a connection that
/// has moved begins slowly; and that a class gets to move.
const TURN: u64 = 250_000;
/// The same of a turn that has not carried [`LEAST_BYTES`] by then: on a busy machine that takes longer.
const LONGEST_TURN: u64 = 1_000_000;
const WARM: u64 = 50_000;
const LONGEST_MOVE: u64 = 2_000_000;

/// Microseconds between two looks: while a class moves, and while none is tried.
const MOVING: u64 = 20_000;
const QUIET: u64 = 500_000;

/// Most microseconds that a class is away from its place in a trial: 30 % of its first ten seconds. A trial also ends
/// after this many pairs.
const MOST_AWAY: u64 = 3_000_000;
const MOST_PAIRS: u32 = 10;

/// How long a class rests after a trial: from the first to the last, each twice the one before, and so that it is away
/// for at most one part of [`STEADY`] (2 %) of the time.
const FIRST_REST: u64 = 30_000_000;
const LAST_REST: u64 = 600_000_000;
const STEADY: u64 = 50;

/// Replaces [`STEADY`] for a class whose load changes, and for one whose first trial ended early but measured
/// something: it is away for at most one part in this many of the time (20 %).
const CHANGING: u64 = 5;

/// Rest of a class that could not be tried, since it did not carry enough.
const TOO_LITTLE: u64 = 5_000_000;

/// Bytes that a class has to carry in a turn, and in [`QUIET`], for the figures to mean something.
const LEAST_BYTES: u64 = 32 << 10;

/// The program's cost of a byte may change by this factor before the class counts as another load; and for so many
/// looks in a row.
const SHAPE: f64 = 2.5;
const LOOKS: u32 = 2;

/// A place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// In the kernel.
    Kernel,
    /// On a NIC.
    Nic,
}

impl Side {
    /// The other place.
    #[must_use]
    pub fn other(self) -> Side {
        match self {
            Side::Kernel => Side::Nic,
            Side::Nic => Side::Kernel,
        }
    }
}

/// What is known of a connection at a look.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Names it, for as long as it lives.
    pub key: u64,
    /// Number of its class.
    pub class: u32,
    /// Where it is.
    pub side: Side,
    /// Bytes that it has carried there, modulo 2³². None in the middle of a move.
    pub carried: Option<u32>,
}

/// CPU time, in nanoseconds since any point in time.
#[derive(Clone, Copy, Debug)]
pub struct Used<'a> {
    /// Of each process with connections of a class: its number, the class, the time.
    pub programs: &'a [(u32, u32, u64)],
    /// Of all NICs.
    pub nics: u64,
    /// Of the machine's interrupts.
    pub interrupts: u64,
}

/// Why a class is where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// It has not been measured yet.
    New,
    /// Nor has this one, but loads like it were: it begins where they belong.
    Start,
    /// It carries too little to be measured.
    Little,
    /// Not all of its connections could be moved.
    Stuck,
    /// Its trial had to end before it had an answer, and goes on later.
    Begun,
    /// It costs less there.
    Cheaper,
    /// It carries more there.
    Faster,
    /// There is no clear difference.
    Equal,
}

/// What a trial has found: in the kernel, and on the NIC.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Figures {
    /// Pairs of turns.
    pub pairs: u32,
    /// Nanoseconds of CPU for a byte.
    pub cost: [f64; 2],
    /// Bytes a second.
    pub rate: [f64; 2],
    /// Nanoseconds of the program for a byte.
    pub program: [f64; 2],
}

/// What is known of a class.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Where it belongs.
    pub home: Side,
    /// Whether it is being tried.
    pub trial: bool,
    /// Why it belongs there.
    pub why: Why,
    /// What the last trial has found.
    pub figures: Option<Figures>,
    /// How often it has changed its place.
    pub switches: u32,
    /// Connections in the kernel, and on NICs.
    pub on: [u32; 2],
    /// Microseconds until it may be tried.
    pub next: u64,
    /// Bytes that it has carried.
    pub bytes: u64,
}

/// Sums since the policy began.
#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    bytes: u64,
    /// Nanoseconds of the program.
    program: u64,
}

#[derive(Clone, Copy, Debug)]
struct Class {
    home: Side,
    why: Why,
    figures: Option<Figures>,
    switches: u32,
    on: [u32; 2],
    sums: Sums,
    /// When it may be tried, and how long it rests after that.
    next: u64,
    rest: u64,
    /// When it may be tried because it has changed its shape.
    next_shape: u64,
    /// The switch of another class may have it tried again. Once: two classes must not do so in turn.
    may_reopen: bool,
    /// Pairs of a trial that had to end before it had an answer.
    kept: Found,
    /// Nanoseconds of the program for a byte, as of the last trial; and looks in a row that differ.
    shape: Option<f64>,
    strange: u32,
    /// The sums at the last look without a trial, and whether much was carried up to then.
    looked: Sums,
    busy: bool,
    seen: u64,
}

impl Class {
    /// Puts a class, of which nothing is known but that a byte costs its program so many nanoseconds, where loads like
    /// it belong.
    fn begin(&mut self, starts: &Starts, program: f64) {
        let Some(on_nic) = starts.belongs_on_nic(self.home as usize, program) else { return };
        let home = if on_nic { Side::Nic } else { Side::Kernel };
        self.switches += u32::from(home != self.home);
        (self.home, self.why) = (home, Why::Start);
    }

    /// Whether a trial of it has pairs that are not kept yet.
    fn has_more(&self, trial: &Trial) -> bool {
        trial.found.figures.pairs > self.kept.figures.pairs
    }

    /// Whether a trial has brought it closer to its first answer: the next one may follow soon.
    fn comes_closer(&self, trial: &Trial) -> bool {
        self.has_more(trial) && self.shape.is_none()
    }
}

/// What a turn has measured.
#[derive(Clone, Copy, Default, Debug)]
struct Turn {
    cost: f64,
    rate: f64,
    program: f64,
}

/// What the pairs of a trial have found.
#[derive(Clone, Copy, Default, Debug)]
struct Found {
    cost: Pairs,
    rate: Pairs,
    /// Sums over the pairs.
    figures: Figures,
}

impl Found {
    fn add(&mut self, kernel: Turn, nic: Turn) {
        self.cost.add(nic.cost, kernel.cost);
        self.rate.add(nic.rate, kernel.rate);
        self.figures.pairs += 1;
        for (sums, of) in [
            (&mut self.figures.cost, [kernel.cost, nic.cost]),
            (&mut self.figures.rate, [kernel.rate, nic.rate]),
            (&mut self.figures.program, [kernel.program, nic.program]),
        ] {
            sums.iter_mut().zip(of).for_each(|(sum, of)| *sum += of);
        }
    }

    fn means(&self) -> Figures {
        let pairs = f64::from(self.figures.pairs.max(1));
        let Figures { pairs: number, cost, rate, program } = self.figures;
        let [cost, rate, program] = [cost, rate, program].map(|sums| sums.map(|sum| sum / pairs));
        Figures { pairs: number, cost, rate, program }
    }

    /// Which place is better, with confidence, and by what; differences are positive where the NIC's figure is larger.
    /// Never one that is slower, whatever it saves.
    fn decision(&self) -> Option<(Side, Why)> {
        let Found { cost, rate, .. } = self;
        if rate.is_below(-EQUAL) {
            Some((Side::Kernel, Why::Faster))
        } else if cost.is_above(EQUAL) {
            Some((Side::Kernel, Why::Cheaper))
        } else if cost.is_below(-EQUAL) && rate.mean() > -EQUAL {
            Some((Side::Nic, Why::Cheaper))
        } else if rate.is_above(EQUAL) && cost.mean() < EQUAL {
            Some((Side::Nic, Why::Faster))
        } else {
            None
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Moving { since: u64 },
    Warm { since: u64 },
    Measured { since: u64, from: Sums, shared: u64 },
}

#[derive(Debug)]
struct Trial {
    class: u32,
    /// Where the class is in the first turn of this pair, and whether this is the second one.
    first: Side,
    second: bool,
    phase: Phase,
    /// The first turn of this pair.
    turn: Turn,
    found: Found,
    began: u64,
    /// Since when it is away from home, and for how long it was before.
    away_since: Option<u64>,
    away: u64,
}

impl Trial {
    fn side(&self) -> Side {
        if self.second { self.first.other() } else { self.first }
    }

    /// For how long the class was away from home by now, microseconds.
    fn away_by(&self, now: u64) -> u64 {
        self.away + self.away_since.map_or(0, |since| now - since)
    }
}

/// Where a trial has led.
enum End {
    /// Nothing is clear yet.
    Open,
    /// It could not be finished.
    Failed(Why),
    Done,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    side: Side,
    carried: Option<u32>,
    seen: u64,
}

/// Classes, and what is known of them.
#[derive(Debug)]
pub struct Gain {
    classes: BTreeMap<u32, Class>,
    connections: BTreeMap<u64, Known>,
    programs: BTreeMap<(u32, u32), (u64, u64)>,
    /// CPU time of NICs and interrupts: as it was read last, and the sum of what it has grown by.
    read: Option<[u64; 2]>,
    shared: u64,
    trial: Option<Trial>,
    looks: u64,
    /// The time of the last look without a trial.
    quiet: u64,
    random: u64,
    /// For tests: what the NIC costs is multiplied by this, and what it carries divided.
    price: f64,
    /// What trials have found, of classes that are gone as well.
    starts: Starts,
}

impl Gain {
    /// Without any class. `seed` orders turns. For tests: as if whatever the NIC does cost, and took, `price` times as
    /// much; usually 1.
    pub fn new(seed: u64, price: f64) -> Gain {
        Gain {
            classes: BTreeMap::new(),
            connections: BTreeMap::new(),
            programs: BTreeMap::new(),
            read: None,
            shared: 0,
            trial: None,
            looks: 0,
            quiet: 0,
            random: seed | 1,
            price,
            starts: Starts::default(),
        }
    }

    /// With what was measured before.
    #[must_use]
    pub fn with_starts(self, starts: Starts) -> Gain {
        Gain { starts, ..self }
    }

    /// Where the connections of a class are to be now.
    pub fn place(&self, class: u32) -> Side {
        match &self.trial {
            Some(trial) if trial.class == class => trial.side(),
            _ => self.classes.get(&class).map_or(Side::Kernel, |class| class.home),
        }
    }

    /// Where a class belongs, and why. None of one that is not known.
    pub fn row(&self, class: u32, now: u64) -> Option<Row> {
        let trial = self.trial.as_ref().is_some_and(|trial| trial.class == class);
        let Class { home, why, figures, switches, on, sums, next, .. } = *self.classes.get(&class)?;
        Some(Row { home, trial, why, figures, switches, on, next: next.saturating_sub(now), bytes: sums.bytes })
    }

    /// Whether a class is known.
    pub fn knows(&self, class: u32) -> bool {
        self.classes.contains_key(&class)
    }

    /// Looks at all connections at `now`, microseconds. Returns when to look again.
    pub fn look(&mut self, now: u64, seen: &[Seen], used: Used<'_>) -> u64 {
        self.observe(now, seen, used);
        if let Some(mut trial) = self.trial.take() {
            match self.advance(&mut trial, now) {
                End::Open => self.trial = Some(trial),
                End::Failed(why) => self.fail(&trial, why, now),
                End::Done => self.conclude(&trial, now),
            }
        } else if now >= self.quiet + QUIET || self.looks == 1 {
            self.quiet = now;
            self.compare_shapes(now);
            self.begin_trial(now);
        }
        match self.trial.as_ref().map(|trial| trial.phase) {
            None => now + QUIET,
            Some(Phase::Moving { .. }) => now + MOVING,
            Some(Phase::Warm { since }) => since + WARM,
            Some(Phase::Measured { since, .. }) => (since + TURN).max(now + MOVING),
        }
    }

    fn observe(&mut self, now: u64, seen: &[Seen], used: Used<'_>) {
        self.looks += 1;
        let looks = self.looks;
        for class in self.classes.values_mut() {
            class.on = [0; 2];
        }
        for Seen { key, class, side, carried } in seen.iter().copied() {
            let class = self.classes.entry(class).or_insert(Class {
                home: Side::Kernel,
                why: Why::New,
                figures: None,
                switches: 0,
                on: [0; 2],
                sums: Sums::default(),
                next: now,
                rest: FIRST_REST,
                next_shape: now,
                may_reopen: false,
                kept: Found::default(),
                shape: None,
                strange: 0,
                looked: Sums::default(),
                busy: false,
                seen: 0,
            });
            class.on[side as usize] += 1;
            class.seen = looks;
            let known = self.connections.entry(key).or_insert(Known { side, carried, seen: looks });
            // Each place has a count of its own.
            if known.side == side
                && let (Some(before), Some(carried)) = (known.carried, carried)
            {
                class.sums.bytes += u64::from(carried.wrapping_sub(before));
            }
            *known = Known { side, carried, seen: looks };
        }
        for (process, class, nanos) in used.programs.iter().copied() {
            let (before, seen) = self.programs.entry((process, class)).or_insert((nanos, looks));
            if let Some(class) = self.classes.get_mut(&class) {
                class.sums.program += nanos.saturating_sub(*before);
            }
            (*before, *seen) = (nanos, looks);
        }
        let read = [used.nics, used.interrupts];
        let before = self.read.replace(read).unwrap_or(read);
        // A NIC that has been started anew counts from zero.
        self.shared += read.iter().zip(before).map(|(read, before)| read.saturating_sub(before)).sum::<u64>();
        self.connections.retain(|_, known| known.seen == looks);
        self.programs.retain(|_, (_, seen)| *seen == looks);
        // What a class was measured at is worth keeping while its connections come and go.
        self.classes.retain(|_, class| class.seen == looks || now < class.next.saturating_add(LAST_REST));
    }

    /// Finds classes whose load has become another one: a byte costs the program much more or less than in the trial.
    /// They, and new ones, begin where loads like them belong.
    fn compare_shapes(&mut self, now: u64) {
        for class in self.classes.values_mut() {
            let bytes = class.sums.bytes - class.looked.bytes;
            let program = class.sums.program - class.looked.program;
            class.looked = class.sums;
            let was_busy = core::mem::replace(&mut class.busy, bytes >= LEAST_BYTES);
            if !class.busy {
                continue;
            }
            let shape_now = program as f64 / bytes as f64;
            if class.why == Why::New && !was_busy {
                class.begin(&self.starts, shape_now);
            }
            let Some(shape) = class.shape.filter(|shape| *shape > 0.0) else { continue };
            let ratio = shape_now / shape;
            let strange = ratio > SHAPE || ratio * SHAPE < 1.0;
            class.strange = if strange { class.strange + 1 } else { 0 };
            if class.strange >= LOOKS && now >= class.next_shape {
                (class.strange, class.shape, class.next, class.rest) = (0, None, now, FIRST_REST);
                class.kept = Found::default();
                class.begin(&self.starts, shape_now);
            }
        }
    }

    fn begin_trial(&mut self, now: u64) {
        let ready = |(_, class): &(&u32, &Class)| class.busy && class.next <= now;
        let Some((&class, known)) = self.classes.iter().filter(ready).min_by_key(|(_, class)| class.next) else { return };
        let found = known.kept;
        self.trial = Some(Trial {
            class,
            first: self.draw(),
            second: false,
            phase: Phase::Moving { since: now },
            turn: Turn::default(),
            found,
            began: now,
            away_since: None,
            away: 0,
        });
    }

    /// A place, at random.
    fn draw(&mut self) -> Side {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        if self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 63 == 0 { Side::Kernel } else { Side::Nic }
    }

    fn advance(&mut self, trial: &mut Trial, now: u64) -> End {
        let Some(class) = self.classes.get(&trial.class).copied() else { return End::Failed(Why::Little) };
        let side = trial.side();
        if side != class.home {
            trial.away_since.get_or_insert(now);
        }
        match trial.phase {
            Phase::Moving { since } => {
                let [there, elsewhere] = [side, side.other()].map(|side| class.on[side as usize]);
                // Single ones may be in the middle of something.
                if there >= 9 * elsewhere && there > 0 {
                    trial.phase = Phase::Warm { since: now };
                } else if now >= since + LONGEST_MOVE {
                    return End::Failed(Why::Stuck);
                }
                End::Open
            }
            Phase::Warm { since } => {
                if now >= since + WARM {
                    trial.phase = Phase::Measured { since: now, from: class.sums, shared: self.shared };
                }
                End::Open
            }
            Phase::Measured { since, .. } if now < since + TURN => End::Open,
            Phase::Measured { since, from, shared } => {
                let bytes = class.sums.bytes - from.bytes;
                if bytes < LEAST_BYTES {
                    return if now < since + LONGEST_TURN { End::Open } else { End::Failed(Why::Little) };
                }
                let program = class.sums.program - from.program;
                let price = if side == Side::Nic { self.price } else { 1.0 };
                let turn = Turn {
                    cost: price * (program + self.shared - shared) as f64 / bytes as f64,
                    rate: bytes as f64 * 1e6 / (now - since) as f64 / price,
                    program: program as f64 / bytes as f64,
                };
                self.end_turn(trial, turn, &class, now)
            }
        }
    }

    fn end_turn(&mut self, trial: &mut Trial, turn: Turn, class: &Class, now: u64) -> End {
        trial.phase = Phase::Moving { since: now };
        if !core::mem::replace(&mut trial.second, true) {
            trial.turn = turn;
            return self.end_stay(trial, class, now);
        }
        let (kernel, nic) = if trial.first == Side::Kernel { (trial.turn, turn) } else { (turn, trial.turn) };
        trial.found.add(kernel, nic);
        (trial.first, trial.second) = (self.draw(), false);
        let end = self.end_stay(trial, class, now);
        if trial.found.decision().is_some() || trial.found.figures.pairs >= MOST_PAIRS { End::Done } else { end }
    }

    /// Counts how long the class was away, after a turn.
    fn end_stay(&mut self, trial: &mut Trial, class: &Class, now: u64) -> End {
        if trial.side() == class.home
            && let Some(since) = trial.away_since.take()
        {
            trial.away += now - since;
        }
        if trial.away_by(now) >= MOST_AWAY { End::Done } else { End::Open }
    }

    fn fail(&mut self, trial: &Trial, why: Why, now: u64) {
        let Some(class) = self.classes.get_mut(&trial.class) else { return };
        let away = trial.away_by(now);
        if class.comes_closer(trial) {
            class.next = now + TOO_LITTLE.max(CHANGING * away);
        } else {
            let rest = if why == Why::Little { TOO_LITTLE } else { class.rest };
            class.next = now + rest.max(STEADY * away);
            if why == Why::Stuck {
                class.rest = (2 * class.rest).min(LAST_REST);
            }
        }
        class.kept = trial.found;
        if class.figures.is_none() {
            class.why = why;
        }
        self.quiet = now;
    }

    /// Ends a trial that was away for too long before it had an answer.
    fn postpone(&mut self, trial: &Trial, now: u64) {
        let Some(class) = self.classes.get_mut(&trial.class) else { return };
        let away = trial.away_by(now);
        if class.comes_closer(trial) {
            class.next = now + CHANGING * away;
        } else {
            class.next = now + class.rest.max(STEADY * away);
        }
        if !class.has_more(trial) {
            class.rest = (2 * class.rest).min(LAST_REST);
        }
        class.kept = trial.found;
        if class.figures.is_none() {
            class.why = Why::Begun;
        }
        self.quiet = now;
    }

    /// Ends a trial: the class stays where it is, or changes its place.
    fn conclude(&mut self, trial: &Trial, now: u64) {
        let Some(class) = self.classes.get_mut(&trial.class) else { return };
        let away = trial.away_by(now);
        let decision = trial.found.decision();
        if decision.is_none() && trial.found.figures.pairs < MOST_PAIRS {
            self.postpone(trial, now);
            return;
        }
        let (home, why) = decision.unwrap_or((class.home, Why::Equal));
        let figures = trial.found.means();
        let switches = home != class.home;
        (class.home, class.why, class.figures) = (home, why, Some(figures));
        class.switches += u32::from(switches);
        class.next = now + class.rest.max(STEADY * away);
        class.next_shape = now + CHANGING * (now - trial.began);
        class.rest = (2 * class.rest).min(LAST_REST);
        class.shape = Some(figures.program[home as usize]);
        (class.strange, class.may_reopen, class.kept) = (0, true, Found::default());
        class.looked = class.sums;
        self.quiet = now;
        let over_kernel = |[kernel, nic]: [f64; 2]| nic / kernel;
        let (cost, rate) = (over_kernel(figures.cost), over_kernel(figures.rate));
        self.starts.note(Start { program: figures.program, cost, rate });
        if switches {
            for (_, other) in self.classes.iter_mut().filter(|(number, _)| **number != trial.class) {
                other.kept = Found::default();
                if core::mem::take(&mut other.may_reopen) {
                    other.next = other.next.min(now);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
