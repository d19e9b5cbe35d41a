//! Chooses which connections are on a NIC that is full, and which of those that have to be hot enough. As long as the
//! NIC has room, a connection that is wanted there and need not be hot goes there at once. From the first refusal on,
//! until no connection waits for room any more, only connections that are chosen here go. A connection that has to be
//! hot goes only when it is chosen.

use crate::Key;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use baton_policy::{Choice, Demand, Heat, Sample};
use baton_supervision::LONGEST_RETRY;

/// Shortest time between two looks, in microseconds, and the least ratio of that time to the duration of a look: so
/// looks take at most a hundredth of a processor.
const BETWEEN: u64 = 500_000;
const PART: u64 = 100;

/// Microseconds from the first refusal to the first look, since many connections may arrive at once; and from there to
/// the second look, which knows the traffic of each.
const FIRST: u64 = 10_000;
const SECOND: u64 = 250_000;

/// Microseconds of a connection's turn, in which it may go to the NIC: an attacher has to stop its program first. A
/// connection that has not come gets its next turn that long after the last one, then after twice as long, and so on.
const TURN: u64 = 1_000_000;

/// Microseconds after which a connection that was to leave the NIC and has not counts as one that stays, for example
/// because its attacher does not act.
const SLOW: u64 = 2_000_000;

/// Decides which connections may take a slot of a NIC.
#[derive(Default)]
pub struct Gate {
    /// Serial numbers of the chosen connections.
    chosen: BTreeSet<u64>,
    /// Connections wait for room, so only chosen ones may take a slot.
    full: bool,
    /// Connections that were refused, and whether they have to be hot enough.
    refused: Vec<(Key, bool)>,
}

impl Gate {
    /// Whether a connection may take a slot, if there is one. `by_heat`: it has to be hot enough.
    pub fn admits(&self, key: Key, by_heat: bool) -> bool {
        self.chosen.contains(&key.2) || !self.full && !by_heat
    }

    /// Records that a connection was not admitted, or found no room.
    pub fn refuse(&mut self, key: Key, by_heat: bool) {
        self.refused.push((key, by_heat));
    }

    /// Takes over the refused connections of the NIC's predecessor that were not handled yet.
    pub fn inherit(&mut self, last: &mut Gate) {
        self.refused.append(&mut last.refused);
    }
}

/// Makes all other NICs forget the connections that NIC `nic` has refused since the last look. Because of a request or
/// a changed route these can go to `nic` only: if another NIC chose one of them, it would still go to `nic`, and the
/// other NIC's room would stay unused.
pub fn wait_for_one(placements: &mut [Placement], nic: usize, gate: &Gate) {
    for (_, placement) in placements.iter_mut().enumerate().filter(|(other, _)| *other != nic) {
        gate.refused.iter().for_each(|(key, _)| placement.forget(key.2));
    }
}

/// The state at a look, beside the connections' traffic.
#[derive(Clone, Copy, Default)]
pub struct Scene {
    /// Connections that need not be hot wait for room, or soon will.
    pub anybody_waits: bool,
    /// Connections that have to be hot are on the NIC, or moving to or from it.
    pub by_heat: bool,
}

/// The turns of a connection that has not come to the NIC in them, for example because its attacher does not act, or
/// its program does not leave an operation. Each turn may have cost another connection its place, so the turns become
/// ever rarer.
#[derive(Clone, Copy, Default)]
struct Turns {
    /// When the last one began.
    last: u64,
    /// How many there were.
    count: u8,
    /// Its attacher was asked to move it. No room is reserved until the attacher acts.
    asked: bool,
}

impl Turns {
    fn begin(&mut self, now: u64) {
        // The count stops where the pause has reached its maximum.
        (self.last, self.count, self.asked) = (now, self.count.saturating_add(1).min(8), false);
    }

    /// Whether the last turn is still running.
    fn goes_on(&self, now: u64) -> bool {
        now < self.last.saturating_add(TURN)
    }

    /// Microseconds from the beginning of the last turn to the next.
    fn pause(&self) -> u64 {
        (TURN << self.count.saturating_sub(1)).min(LONGEST_RETRY)
    }

    /// Whether the next turn may begin.
    fn may_begin(&self, now: u64) -> bool {
        now >= self.last.saturating_add(self.pause())
    }

    /// Whether the last turn was so long ago that it does not count any more.
    fn is_old(&self, now: u64) -> bool {
        now >= self.last.saturating_add(2 * LONGEST_RETRY)
    }
}

/// The state of one NIC's connections while it is full, or while some have to be hot enough.
#[derive(Default)]
pub struct Placement {
    heat: Heat,
    /// Connections that are wanted on the NIC and wait for room, or until they are hot enough, by serial number.
    waiting: BTreeMap<u64, Key>,
    /// Chosen connections that go there as soon as there is room, the hottest first.
    coming: VecDeque<Key>,
    /// By serial number, the turns of connections that had one and are not on the NIC.
    turns: BTreeMap<u64, Turns>,
    /// By serial number, since when a connection on the NIC is to leave it.
    leaving: BTreeMap<u64, u64>,
    /// Time of the next look.
    due: Option<u64>,
}

impl Placement {
    /// Takes over the connections that the gate has refused. Returns whether a look is due.
    pub fn is_due(&mut self, gate: &mut Gate, now: u64) -> bool {
        for (key, by_heat) in core::mem::take(&mut gate.refused) {
            self.waiting.insert(key.2, key);
            gate.chosen.remove(&key.2);
            gate.full |= !by_heat;
            self.due.get_or_insert(now + FIRST);
        }
        self.due.is_some_and(|due| due <= now)
    }

    /// When to look next.
    pub fn due(&self) -> Option<u64> {
        self.due
    }

    /// Makes the next look due at once, for example since the NIC's limits have changed.
    pub fn look_now(&mut self) {
        self.due = Some(0);
    }

    /// Connections that wait, or will wait when they have left the NIC. Without those that have just had their turn.
    pub fn waiting(&self, now: u64) -> Vec<Key> {
        let may_come = |serial: &u64| self.turns.get(serial).is_none_or(|turns| turns.may_begin(now));
        self.waiting.iter().filter(|(serial, _)| may_come(serial)).map(|(_, key)| *key).collect()
    }

    /// Records that a connection is on the NIC and stays there.
    pub fn has_come(&mut self, serial: u64) {
        self.turns.remove(&serial);
        self.leaving.remove(&serial);
    }

    /// Records which connections are to leave the NIC, for whatever reason, and are still there.
    pub fn note_still_leaving(&mut self, serials: &[u64], now: u64) {
        let before = core::mem::take(&mut self.leaving);
        self.leaving = serials.iter().map(|serial| (*serial, before.get(serial).copied().unwrap_or(now))).collect();
    }

    /// Whether a connection that is still on the NIC was to leave it long ago.
    pub fn leaves_slowly(&self, serial: u64, now: u64) -> bool {
        self.leaving.get(&serial).is_some_and(|since| now.saturating_sub(*since) >= SLOW)
    }

    /// Whether a connection waits.
    pub fn has(&self, serial: u64) -> bool {
        self.waiting.contains_key(&serial)
    }

    /// Records that a connection leaves the NIC: from now on it waits.
    pub fn note_leaving(&mut self, key: Key, now: u64) {
        self.waiting.insert(key.2, key);
        self.leaving.insert(key.2, now);
    }

    /// Forgets a connection that does not wait any more.
    pub fn forget(&mut self, serial: u64) {
        self.waiting.remove(&serial);
    }

    /// Decides which connections to move. The samples are of all connections on the NIC and of those that wait and may
    /// still come, by serial number.
    pub fn look(&mut self, gate: &mut Gate, samples: &[Sample], scene: Scene, demand: Demand, began: u64) -> Choice {
        // Earlier choices that have not come yet are decided again.
        self.coming.clear();
        let between = if self.heat.is_new() { SECOND } else { BETWEEN };
        let choice = self.heat.choose(began, samples, demand);
        self.coming.extend(choice.come.iter().filter_map(|serial| self.waiting.get(serial).copied()));
        self.turns.retain(|_, turns| !turns.is_old(began));
        let in_turn = self.turns.iter().filter(|(_, turns)| turns.goes_on(began)).map(|(serial, _)| *serial);
        gate.chosen = choice.come.iter().copied().chain(in_turn).collect();
        let is_short = demand.free == 0 && !choice.short.is_empty();
        gate.full = scene.anybody_waits || is_short || demand.over != (0, 0);
        if self.waiting.is_empty() && choice.leave.is_empty() && demand.over == (0, 0) && !scene.by_heat {
            *self = Placement { turns: core::mem::take(&mut self.turns), ..Placement::default() };
            return choice;
        }
        self.due = Some(began + between);
        choice
    }

    /// Records that the look that began at `began` has ended.
    pub fn looked(&mut self, began: u64, now: u64) {
        self.due = self.due.map(|due| now + due.saturating_sub(began).max(PART * now.saturating_sub(began)));
    }

    /// Number of connections that attachers were asked to move and that may still come in their turn. Counted once for
    /// all that wait, since there may be very many.
    pub fn asked(&self, now: u64) -> u32 {
        if self.coming.is_empty() {
            return 0;
        }
        self.turns.values().filter(|turns| turns.asked && turns.goes_on(now)).count() as u32
    }

    /// The next connection that is to go to the NIC, if the NIC has room: its turn begins.
    pub fn next(&mut self, has_room: bool, now: u64) -> Option<Key> {
        if !has_room {
            return None;
        }
        let key = loop {
            let key = self.coming.pop_front()?;
            // Since the look it may have been assigned to wait for another NIC.
            if self.has(key.2) {
                break key;
            }
        };
        self.turns.entry(key.2).or_default().begin(now);
        Some(key)
    }

    /// Records that a connection's attacher was asked to move it in its turn.
    pub fn note_asked(&mut self, serial: u64) {
        if let Some(turns) = self.turns.get_mut(&serial) {
            turns.asked = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use baton_policy::{Place, WORTH};

    fn sample(key: u64, place: Place, carried: u32) -> Sample {
        Sample { key, place, carried: Some(carried), pages: 1, hot_from: 0, worth: WORTH, user: 0 }
    }

    /// Some wait for room, and nobody has to be hot.
    const WAITING: Scene = Scene { anybody_waits: true, by_heat: false };

    #[test]
    fn after_a_refusal_only_the_chosen_come() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        assert!(gate.admits((1, 1, 7), false) && !placement.is_due(&mut gate, 5) && placement.due().is_none());
        gate.refuse((1, 1, 7), false);
        gate.refuse((1, 2, 8), false);
        assert!(!placement.is_due(&mut gate, 5) && placement.is_due(&mut gate, 5 + FIRST));
        assert!(!gate.admits((1, 1, 7), false) && !gate.admits((9, 9, 9), false));
        let waits = [sample(7, Place::Waits, 0), sample(8, Place::Waits, 0), sample(3, Place::Nic, 0)];
        let demand = Demand { free: 1, ..Demand::default() };
        assert_eq!(placement.look(&mut gate, &waits, WAITING, demand, 100_000).leave, [0; 0]);
        let mut next = |has_room| placement.next(has_room, 100_000);
        assert_eq!([next(false), next(true), next(true)], [None, Some((1, 1, 7)), None]);
        assert!(gate.admits((1, 1, 7), false) && !gate.admits((1, 2, 8), false));
    }

    #[test]
    fn who_was_refused_by_a_nic_that_died_waits_for_the_next_one() {
        let (mut placement, mut last, mut next) = (Placement::default(), Gate::default(), Gate::default());
        last.refuse((1, 1, 7), false);
        next.refuse((1, 2, 8), true);
        next.inherit(&mut last);
        assert!(placement.is_due(&mut next, 0) || placement.due().is_some());
        let mut waiting = placement.waiting(0);
        waiting.sort_unstable();
        assert_eq!(waiting, [(1, 1, 7), (1, 2, 8)]);
    }

    /// Two connections that wait for the first NIC come to wait for the second NIC, which is full, too. The first NIC's
    /// room then goes to connections that wait for it, and to any connection once none waits.
    #[test]
    fn whoever_waits_for_another_nic_takes_no_room_here() {
        let (mut placements, mut gates) = ([Placement::default(), Placement::default()], [Gate::default(), Gate::default()]);
        let keys = [(1, 1, 7), (1, 2, 8), (1, 3, 9)];
        let demand = Demand { free: 1, ..Demand::default() };
        keys.iter().for_each(|key| gates[0].refuse(*key, false));
        wait_for_one(&mut placements, 0, &gates[0]);
        placements[0].is_due(&mut gates[0], 0);
        let waits: Vec<Sample> = keys.iter().map(|key| sample(key.2, Place::Waits, 0)).collect();
        // The look has chosen one of those that are asked for elsewhere before any room is taken.
        placements[0].look(&mut gates[0], &waits, WAITING, demand, FIRST);
        keys[..2].iter().for_each(|key| gates[1].refuse(*key, false));
        wait_for_one(&mut placements, 1, &gates[1]);
        placements[1].is_due(&mut gates[1], FIRST);
        assert_eq!(placements[0].next(true, FIRST), None, "it would go to the second NIC");
        let waiting = |placement: &Placement| {
            let mut serials: Vec<u64> = placement.waiting(SECOND).iter().map(|key| key.2).collect();
            serials.sort_unstable();
            serials
        };
        assert_eq!(placements.each_ref().map(waiting), [vec![9], vec![7, 8]]);
        placements[0].look(&mut gates[0], &waits[2..], WAITING, demand, SECOND);
        assert_eq!(placements[0].next(true, SECOND), Some(keys[2]));
        placements[0].forget(9);
        placements[0].look(&mut gates[0], &[], Scene::default(), demand, 2 * SECOND);
        assert!(gates[0].admits((5, 5, 55), false) && !gates[1].admits((5, 5, 55), false));
        // One of them comes back to the first one, and finds it full again.
        gates[0].refuse(keys[0], false);
        wait_for_one(&mut placements, 0, &gates[0]);
        placements[0].is_due(&mut gates[0], 2 * SECOND);
        assert_eq!(placements.each_ref().map(waiting), [vec![7], vec![8]]);
    }

    #[test]
    fn when_nobody_waits_everybody_may_come() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        gate.refuse((1, 1, 7), false);
        placement.is_due(&mut gate, 0);
        placement.look(&mut gate, &[sample(7, Place::Waits, 0)], WAITING, Demand::default(), 0);
        assert!(!gate.admits((1, 3, 9), false) && placement.due().is_some());
        // It has been closed.
        placement.forget(7);
        placement.look(&mut gate, &[], Scene::default(), Demand::default(), 600_000);
        assert!(gate.admits((1, 3, 9), false) && placement.due().is_none());
    }

    /// The more there is to look at, the more rarely that is done.
    #[test]
    fn looking_takes_a_small_part_of_a_processor() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        placement.looked(0, 1);
        assert_eq!(placement.due(), None, "there is nothing to look at");
        gate.refuse((1, 1, 7), false);
        placement.is_due(&mut gate, 0);
        let mut began = 1_000_000;
        for (took, pause) in [(100, SECOND), (1_000, BETWEEN), (20_000, 20_000 * PART), (100, BETWEEN)] {
            placement.look(&mut gate, &[sample(7, Place::Waits, 0)], WAITING, Demand::default(), began);
            placement.looked(began, began + took);
            assert_eq!(placement.due(), Some(began + took + pause), "a look of {took} us");
            began += 10_000_000;
        }
    }

    /// The attacher of the hottest connection does not act: other connections get the room, and the attacher is asked
    /// at growing intervals.
    #[test]
    fn who_does_not_come_leaves_the_room_to_others() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        let (idle, other) = ((1, 1, 7), (2, 1, 8));
        [idle, other].into_iter().for_each(|key| gate.refuse(key, true));
        assert!(!placement.is_due(&mut gate, 0));
        let scene = Scene { by_heat: true, ..Scene::default() };
        let demand = Demand { free: 1, ..Demand::default() };
        let (mut asked, mut others) = (Vec::new(), 0);
        for now in (500_000..120_000_000).step_by(500_000) {
            let rate = |key: Key| if key == idle { 9u32 } else { 3 };
            let heat = |key: &Key| Sample { hot_from: 1000, ..sample(key.2, Place::Waits, rate(*key) * (now / 1000) as u32) };
            let samples: Vec<Sample> = placement.waiting(now).iter().map(heat).collect();
            placement.look(&mut gate, &samples, scene, demand, now);
            match placement.next(true, now) {
                Some(key) if key == idle => asked.push(now),
                Some(key) => {
                    assert_eq!(key, other);
                    placement.has_come(8);
                    others += 1;
                }
                None => {}
            }
            let may_come = asked.last().is_some_and(|turn| now < turn + TURN);
            assert_eq!(gate.admits(idle, true), may_come, "at {now}, asked at {asked:?}");
        }
        assert!((5..10).contains(&asked.len()), "{asked:?}");
        assert!(others > 200, "{others}");
        // It has come by itself, and may come again.
        placement.has_come(7);
        assert_eq!(placement.waiting(120_000_000).len(), 2);
    }

    /// Connections that attachers were asked to move will take room when they come: no more are asked for than there is
    /// room.
    #[test]
    fn no_more_are_asked_for_than_have_room() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        let keys = [(1, 1, 7), (1, 2, 8), (1, 3, 9)];
        keys.iter().for_each(|key| gate.refuse(*key, false));
        placement.is_due(&mut gate, 0);
        let waits: Vec<Sample> = keys.iter().map(|key| sample(key.2, Place::Waits, 0)).collect();
        placement.look(&mut gate, &waits, WAITING, Demand { free: 3, ..Demand::default() }, 0);
        let next = |placement: &mut Placement, room| {
            let key = placement.next(placement.asked(0) < room, 0)?;
            placement.note_asked(key.2);
            Some(key.2)
        };
        assert_eq!([next(&mut placement, 1), next(&mut placement, 1), next(&mut placement, 2)], [Some(7), None, Some(8)]);
        // One is there, and has its room.
        placement.has_come(7);
        assert_eq!((next(&mut placement, 1), placement.asked(0)), (None, 1));
        assert_eq!(placement.asked(TURN), 0, "its turn is over");
        assert_eq!(next(&mut placement, 2), Some(9));
    }

    #[test]
    fn who_does_not_leave_counts_as_staying_after_a_while() {
        let (mut placement, key) = (Placement::default(), (1, 1, 7));
        placement.note_leaving(key, 5);
        assert!(
            !placement.leaves_slowly(7, 4 + SLOW)
                && placement.leaves_slowly(7, 5 + SLOW)
                && !placement.leaves_slowly(8, 5 + SLOW)
        );
        placement.has_come(7);
        assert!(!placement.leaves_slowly(7, 5 + SLOW));
        placement.note_leaving(key, 5);
        // Another one has to leave, too, though not for others.
        placement.note_still_leaving(&[7, 8], 9);
        placement.note_still_leaving(&[7, 8], 11);
        let slow = |placement: &Placement, now| [7, 8].map(|serial| placement.leaves_slowly(serial, now));
        assert_eq!([5, 9].map(|since| slow(&placement, since + SLOW)), [[true, false], [true, true]]);
        // One has ended, or is in the kernel.
        placement.note_still_leaving(&[8], 13);
        assert_eq!(slow(&placement, 9 + SLOW), [false, true]);
    }

    /// A connection that has to be hot waits until it is, and does not keep others from coming. It is also checked
    /// while it is on the NIC.
    #[test]
    fn what_has_to_be_hot_comes_when_it_is() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        let key = (1, 1, 7);
        assert!(!gate.admits(key, true));
        gate.refuse(key, true);
        assert!(placement.is_due(&mut gate, 0) || placement.due().is_some() && placement.has(7));
        assert!(gate.admits((1, 2, 8), false) && !gate.admits(key, true));
        let hot = |place, carried| [Sample { hot_from: 1000, ..sample(7, place, carried) }];
        let demand = Demand { free: 9, ..Demand::default() };
        let nobody = Scene::default();
        placement.look(&mut gate, &hot(Place::Waits, 0), nobody, demand, 0);
        placement.look(&mut gate, &hot(Place::Waits, 500), nobody, demand, 1_000_000);
        assert!(placement.next(true, 1_000_000).is_none() && !gate.admits(key, true) && gate.admits((1, 2, 8), false));
        placement.look(&mut gate, &hot(Place::Waits, 5000), nobody, demand, 2_000_000);
        assert_eq!(placement.next(true, 2_000_000), Some(key));
        assert!(gate.admits(key, true) && gate.admits((1, 2, 8), false));
        placement.forget(7);
        let there = Scene { by_heat: true, ..nobody };
        for second in 3..30 {
            // It carries nothing any more.
            let choice = placement.look(&mut gate, &hot(Place::Nic, 0), there, demand, second * 1_000_000);
            assert!(placement.due().is_some());
            if !choice.cold.is_empty() {
                assert_eq!((choice.cold.as_slice(), choice.leave.len()), (&[7][..], 0));
                return;
            }
        }
        panic!("it has not become cold");
    }
}
