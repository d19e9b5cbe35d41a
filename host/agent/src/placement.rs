//! Which connections a NIC has that is full. Without limits, and as long as there is room, whatever is wanted on the
//! NIC goes there at once. From the first refusal on, until nobody waits any more, only those go that are chosen here.

use baton_linux::events::monotonic_micros;
use baton_policy::{Choice, Demand, Heat, Sample};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Shortest time between two looks, in microseconds, and how many times as long as a look it is at least: looking takes
/// at most a hundredth of a processor.
const BETWEEN: u64 = 500_000;
const PART: u64 = 100;

/// Microseconds from the first refusal to the first look, since many connections may come at once; and to the second
/// one, which knows how much each carries.
const FIRST: u64 = 10_000;
const SECOND: u64 = 250_000;

/// Names a connection: session, number, and serial number, since session and number are reused.
type Key = (u32, u32, u64);

/// Who may take a slot of a NIC.
#[derive(Default)]
pub(crate) struct Gate {
    /// Serial numbers of those that may, while others wait; else all may.
    chosen: Option<BTreeSet<u64>>,
    /// Those that found no room.
    refused: Vec<Key>,
}

impl Gate {
    /// Whether a connection may take a slot, if there is one.
    pub fn admits(&self, key: Key) -> bool {
        self.chosen.as_ref().is_none_or(|chosen| chosen.contains(&key.2))
    }

    /// Notes that a connection found no room.
    pub fn refuse(&mut self, key: Key) {
        self.refused.push(key);
    }

    /// Takes over who found no room at the last NIC, and has not been taken up.
    pub fn inherit(&mut self, last: &mut Gate) {
        self.refused.append(&mut last.refused);
    }
}

/// What is known of one NIC's connections while it is full.
#[derive(Default)]
pub(crate) struct Placement {
    heat: Heat,
    /// Connections that are wanted on the NIC and wait for room, by serial number.
    waiting: BTreeMap<u64, Key>,
    /// Those that are to go there as soon as there is room, the hottest first.
    coming: VecDeque<Key>,
    /// When to look, in microseconds of the monotonic clock.
    due: Option<u64>,
}

impl Placement {
    /// Takes up who found no room. Returns whether it is time to look.
    pub fn is_due(&mut self, gate: &mut Gate, now: u64) -> bool {
        for key in std::mem::take(&mut gate.refused) {
            self.waiting.insert(key.2, key);
            gate.chosen.get_or_insert_default().remove(&key.2);
            self.due.get_or_insert(now + FIRST);
        }
        self.due.is_some_and(|due| due <= now)
    }

    /// Time until the next look.
    pub fn wait(&self) -> Option<Duration> {
        Some(Duration::from_micros(self.due?.saturating_sub(monotonic_micros())))
    }

    /// Has it look now: its NIC's limits have changed, say.
    pub fn look_now(&mut self) {
        self.due = Some(0);
    }

    /// Those that wait, or do so soon: they are on their way from the NIC.
    pub fn waiting(&self) -> Vec<Key> {
        self.waiting.values().copied().collect()
    }

    /// Notes that a connection leaves the NIC: it waits from then on.
    pub fn note_leaving(&mut self, key: Key) {
        self.waiting.insert(key.2, key);
    }

    /// Forgets a connection that does not wait any more.
    pub fn forget(&mut self, serial: u64) {
        self.waiting.remove(&serial);
    }

    /// Decides what is to be moved, given all connections that the NIC has and those that wait and still may come,
    /// which the samples name by their serial numbers. Returns the serial numbers of those that leave the NIC.
    pub fn look(&mut self, gate: &mut Gate, samples: &[Sample], demand: Demand, began: u64) -> Vec<u64> {
        // Whoever was chosen and is still here is chosen anew, or is not.
        self.coming.clear();
        let between = if self.heat.is_new() { SECOND } else { BETWEEN };
        let Choice { leave, come } = self.heat.choose(began, samples, demand);
        self.coming.extend(come.iter().filter_map(|serial| self.waiting.get(serial).copied()));
        if self.waiting.is_empty() && leave.is_empty() && demand.over == (0, 0) {
            *self = Placement::default();
            gate.chosen = None;
            return leave;
        }
        gate.chosen = Some(come.into_iter().collect());
        let now = monotonic_micros();
        self.due = Some(now + between.max(PART * now.saturating_sub(began)));
        leave
    }

    /// The next connection that is to go to the NIC, if that has room.
    pub fn next(&mut self, has_room: bool) -> Option<Key> {
        if has_room { self.coming.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_policy::Place;

    fn sample(key: u64, place: Place, carried: u32) -> Sample {
        Sample { key, place, carried: Some(carried), pages: 1 }
    }

    #[test]
    fn after_a_refusal_only_the_chosen_come() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        assert!(gate.admits((1, 1, 7)) && !placement.is_due(&mut gate, 5) && placement.wait().is_none());
        gate.refuse((1, 1, 7));
        gate.refuse((1, 2, 8));
        assert!(!placement.is_due(&mut gate, 5) && placement.is_due(&mut gate, 5 + FIRST));
        assert!(!gate.admits((1, 1, 7)) && !gate.admits((9, 9, 9)));
        let waits = [sample(7, Place::Waits, 0), sample(8, Place::Waits, 0), sample(3, Place::Nic, 0)];
        let demand = Demand { free: 1, ..Demand::default() };
        assert_eq!(placement.look(&mut gate, &waits, demand, 100_000), [0; 0]);
        assert_eq!([placement.next(false), placement.next(true), placement.next(true)], [None, Some((1, 1, 7)), None]);
        assert!(gate.admits((1, 1, 7)) && !gate.admits((1, 2, 8)));
    }

    #[test]
    fn who_was_refused_by_a_nic_that_died_waits_for_the_next_one() {
        let (mut placement, mut last, mut next) = (Placement::default(), Gate::default(), Gate::default());
        last.refuse((1, 1, 7));
        next.refuse((1, 2, 8));
        next.inherit(&mut last);
        assert!(placement.is_due(&mut next, 0) || placement.wait().is_some());
        let mut waiting = placement.waiting();
        waiting.sort_unstable();
        assert_eq!(waiting, [(1, 1, 7), (1, 2, 8)]);
    }

    #[test]
    fn when_nobody_waits_everybody_may_come() {
        let (mut placement, mut gate) = (Placement::default(), Gate::default());
        gate.refuse((1, 1, 7));
        placement.is_due(&mut gate, 0);
        placement.look(&mut gate, &[sample(7, Place::Waits, 0)], Demand::default(), 0);
        assert!(!gate.admits((1, 3, 9)) && placement.wait().is_some());
        // It has been closed.
        placement.forget(7);
        placement.look(&mut gate, &[], Demand::default(), 600_000);
        assert!(gate.admits((1, 3, 9)) && placement.wait().is_none());
    }
}
