//! The NIC's limits, and how it announces its free room to the host: see [`baton_abi::resource`].
//!
//! If a limit is lowered below what is in use, the NIC ends no connection: it announces no room, and the host takes
//! back the excess.

use baton_abi::resource::{EXEMPT, MOST, PAIRS, RESOURCES, is_within};
use baton_abi::{Announcement, Resource};
use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

/// Number of past announcements that a command may name: more than the agent can have left unread in its ring.
const KEPT: usize = 2 * baton_abi::layout::RING_MESSAGES;

/// Length of the periods over which the processor's load is measured, microseconds.
const PERIOD: u64 = 100_000;
/// Microseconds after which everything is announced again although nothing has changed, while there are limits.
const REPEAT: u64 = 1_000_000;
/// Percent by which the load has to fall below its limit before there is room again.
const HYSTERESIS: u64 = 10;

/// The limits of a NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Connections.
    pub connections: u32,
    /// Pages of session memory that its connections have.
    pub pages: u32,
    /// (address, length) pairs of their send queues.
    pub pairs: u32,
    /// Percent of its workers' time: while they are busier than that, no further connection is accepted. 100 for no
    /// limit.
    pub processor: u32,
}

impl Default for Limits {
    /// No limit except the number of slots.
    fn default() -> Self {
        Limits { connections: u32::MAX, pages: u32::MAX, pairs: u32::MAX, processor: 100 }
    }
}

/// The NIC's resources that each slot uses. All workers share this.
pub(crate) struct Charges {
    /// 0 for a free slot, else its pages plus one.
    slots: Vec<AtomicU32>,
    /// Connections and pages.
    used: [AtomicU32; 2],
}

impl Charges {
    pub fn new(slots: usize) -> Charges {
        Charges { slots: (0..slots).map(|_| AtomicU32::new(0)).collect(), used: [const { AtomicU32::new(0) }; 2] }
    }

    /// Charges a slot with a connection of so many pages, instead of what it had.
    pub fn set(&self, slot: u32, pages: u32) {
        self.change(slot, pages.min(MOST) + 1);
    }

    /// Pages that a slot is charged with.
    pub fn pages(&self, slot: u32) -> u32 {
        self.slots.get(slot as usize).map_or(0, |word| word.load(Ordering::Acquire).saturating_sub(1))
    }

    /// Notes that a slot is free.
    pub fn end(&self, slot: u32) {
        self.change(slot, 0);
    }

    fn change(&self, slot: u32, now: u32) {
        let Some(word) = self.slots.get(slot as usize) else { return };
        let before = word.swap(now, Ordering::AcqRel);
        let [connections, pages] = &self.used;
        connections.fetch_add(u32::from(now > 0).wrapping_sub(u32::from(before > 0)), Ordering::AcqRel);
        pages.fetch_add(now.saturating_sub(1).wrapping_sub(before.saturating_sub(1)), Ordering::AcqRel);
    }

    fn used(&self, resource: Resource) -> u32 {
        let [connections, pages] = self.used.each_ref().map(|used| used.load(Ordering::Acquire));
        match resource {
            Resource::Connections => connections,
            Resource::Memory => pages,
            Resource::Pairs => connections.saturating_mul(PAIRS),
        }
    }
}

/// The limits of a NIC, its announcements, and what the host has taken. Only the front worker has this.
pub(crate) struct Resources {
    pub charges: Arc<Charges>,
    limits: Limits,
    /// The processor is busier than its limit allows.
    too_busy: bool,
    /// Beginning of the period in which the load is measured, and microseconds for which workers had been busy by then.
    measured: (u64, u64),
    /// When everything was last announced although nothing had changed.
    repeated: u64,
    taken: [u32; RESOURCES],
    /// The edges last announced, and the number of that announcement.
    announced: [u32; RESOURCES],
    number: u16,
    /// The edges in force with each of the last announcements, at its number modulo [`KEPT`].
    edges: Vec<[u32; RESOURCES]>,
}

impl Resources {
    pub fn new(charges: Arc<Charges>, limits: Limits) -> Resources {
        Resources {
            charges,
            limits,
            too_busy: false,
            measured: (0, 0),
            repeated: 0,
            taken: [0; RESOURCES],
            announced: [0; RESOURCES],
            number: 0,
            edges: vec![[0; RESOURCES]; KEPT],
        }
    }

    pub fn set(&mut self, limits: Limits) {
        self.limits = limits;
        self.too_busy &= limits.processor < 100;
    }

    /// The free amount of a resource.
    pub fn free(&self, resource: Resource) -> u32 {
        let slots = self.charges.slots.len() as u32;
        let limit = match resource {
            Resource::Connections if self.too_busy => 0,
            Resource::Connections => self.limits.connections.min(slots) + u32::from(cfg!(feature = "sabotage-announce-more")),
            Resource::Memory => self.limits.pages,
            Resource::Pairs => self.limits.pairs.min(slots.saturating_mul(PAIRS)),
        };
        limit.saturating_sub(self.charges.used(resource)).min(MOST)
    }

    /// Whether there is room for another connection, its memory not counted.
    pub fn has_connection(&self) -> bool {
        self.free(Resource::Connections) > 0 && self.free(Resource::Pairs) >= PAIRS
    }

    /// Takes `amount` of a resource for a command that names announcement `named`; for connections also their pairs.
    /// Returns whether that announcement allows it.
    pub fn take(&mut self, resource: Resource, amount: u32, named: u16) -> bool {
        let beside = resource != Resource::Connections || self.take_one(Resource::Pairs, amount.wrapping_mul(PAIRS), named);
        self.take_one(resource, amount, named) && beside
    }

    fn take_one(&mut self, resource: Resource, amount: u32, named: u16) -> bool {
        let at = resource.index();
        let before = self.taken[at];
        self.taken[at] = before.wrapping_add(amount);
        if named == EXEMPT {
            return true;
        }
        // Numbers wrap, and skip 0: from the last one back to `named`.
        let age = self.number.wrapping_sub(named).wrapping_sub(u16::from(named > self.number));
        usize::from(age) < KEPT && is_within(before, amount, self.edges[usize::from(named) % KEPT][at])
    }

    /// Whether anything has been announced yet.
    #[inline(always)]
    pub fn has_announced(&self) -> bool {
        self.number != 0
    }

    /// What is to be announced now: what has changed, or everything.
    pub fn announcements(&mut self, all: bool) -> impl Iterator<Item = Announcement> + use<> {
        let due = Resource::ALL.map(|resource| {
            let (taken, free) = (self.taken[resource.index()], self.free(resource));
            let changed = taken.wrapping_add(free) != self.announced[resource.index()];
            (all || changed).then(|| self.announce(resource, taken, free))
        });
        due.into_iter().flatten()
    }

    fn announce(&mut self, resource: Resource, taken: u32, free: u32) -> Announcement {
        self.number = self.number.checked_add(1).unwrap_or(1);
        let announcement = Announcement { number: self.number, resource, taken, free };
        self.announced[resource.index()] = announcement.edge();
        self.edges[usize::from(self.number) % KEPT] = self.announced;
        announcement
    }

    /// When the load has to be measured even if nothing happens, since there is no room because of the load; `u64::MAX`
    /// for never.
    pub fn reopens_at(&self) -> u64 {
        if self.too_busy { self.measured.0 + PERIOD } else { u64::MAX }
    }

    /// When the load is measured next, or all is announced again, in microseconds; None without a limit.
    pub fn due(&self) -> Option<u64> {
        let measures = (self.limits.processor < 100).then_some(self.measured.0 + PERIOD);
        let repeats = (self.limits != Limits::default()).then_some(self.repeated + REPEAT);
        measures.into_iter().chain(repeats).min()
    }

    /// Whether all is to be announced at `now`, microseconds, though nothing has changed.
    pub fn repeats(&mut self, now: u64) -> bool {
        let repeats = self.limits != Limits::default() && now >= self.repeated + REPEAT;
        if repeats {
            self.repeated = now;
        }
        repeats
    }

    /// Records for how many microseconds `workers` workers have been busy by `now`. Returns whether they have just
    /// become too busy.
    pub fn measure(&mut self, now: u64, busy: u64, workers: u64) -> bool {
        let (begin, before) = self.measured;
        if now < begin + PERIOD {
            return false;
        }
        self.measured = (now, busy);
        let percent = 100 * busy.saturating_sub(before) / (workers.max(1) * (now - begin));
        let limit = u64::from(self.limits.processor);
        // The first period begins with the first measurement.
        let is_too_busy = if self.too_busy { percent + HYSTERESIS > limit } else { percent > limit };
        let becomes = is_too_busy && !self.too_busy && begin > 0;
        self.too_busy = is_too_busy && begin > 0;
        becomes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(connections: u32, pages: u32) -> Resources {
        Resources::new(Arc::new(Charges::new(64)), Limits { connections, pages, ..Limits::default() })
    }

    /// The host: what it has taken, and the edges that it knows.
    #[derive(Default)]
    struct Host {
        taken: [u32; RESOURCES],
        edges: [u32; RESOURCES],
        number: u16,
    }

    impl Host {
        fn read(&mut self, announcements: impl Iterator<Item = Announcement>) -> usize {
            let before = self.number;
            for announcement in announcements {
                self.edges[announcement.resource.index()] = announcement.edge();
                self.number = announcement.number;
            }
            usize::from(self.number.wrapping_sub(before))
        }

        fn may(&self) -> bool {
            let has = |resource: Resource, amount| is_within(self.taken[resource.index()], amount, self.edges[resource.index()]);
            has(Resource::Connections, 1) && has(Resource::Pairs, PAIRS)
        }

        /// Takes connections, each with its number of a slot, while it may. Returns how many.
        fn fill(&mut self, nic: &mut Resources) -> u32 {
            let mut slots = 0;
            while self.may() {
                (self.taken[0], self.taken[2]) = (self.taken[0] + 1, self.taken[2] + PAIRS);
                assert!(nic.take(Resource::Connections, 1, self.number));
                nic.charges.set(slots, 0);
                slots += 1;
                assert_eq!(self.read(nic.announcements(false)), 0, "what was announced holds");
            }
            slots
        }
    }

    #[test]
    fn a_host_that_keeps_to_announcements_fills_the_nic_and_no_more() {
        let mut nic = resources(3, 100);
        let mut host = Host::default();
        assert_eq!(host.read(nic.announcements(true)), RESOURCES);
        assert_eq!(host.fill(&mut nic), 3);
        assert_eq!((nic.charges.used(Resource::Connections), nic.free(Resource::Connections)), (3, 0));
        nic.charges.end(1);
        nic.charges.end(1);
        assert_eq!(host.read(nic.announcements(false)), 2, "a connection, and its pairs");
        assert!(host.may());
    }

    #[test]
    fn pairs_are_taken_with_connections() {
        let mut nic = resources(10, 100);
        nic.set(Limits { pairs: 2 * PAIRS + PAIRS / 2, ..nic.limits });
        let mut host = Host::default();
        host.read(nic.announcements(true));
        assert_eq!((host.fill(&mut nic), nic.has_connection()), (2, false));
        assert_eq!((nic.free(Resource::Connections), nic.free(Resource::Pairs)), (8, PAIRS / 2));
        assert!(!nic.take(Resource::Connections, 1, host.number), "beyond the pairs that it announced");
        nic.set(Limits { pairs: u32::MAX, ..nic.limits });
        host.taken[0] += 1;
        host.taken[2] += PAIRS;
        assert_eq!(host.read(nic.announcements(false)), 2);
        assert!(host.may() && nic.has_connection());
    }

    #[test]
    fn a_host_that_does_not_is_noticed() {
        let mut nic = resources(1, 100);
        let number = nic.announcements(true).map(|announcement| announcement.number).max().unwrap();
        assert!(nic.take(Resource::Connections, 1, number));
        assert!(!nic.take(Resource::Connections, 1, number), "one more than it announced");
        assert!(nic.take(Resource::Connections, 1, EXEMPT));
        assert!(!nic.take(Resource::Memory, 1, number + 1), "an announcement that was never made");
    }

    #[test]
    fn an_announcement_holds_for_whoever_names_it_after_the_limit_was_lowered() {
        let mut nic = resources(2, 100);
        let before = nic.announcements(true).map(|announcement| announcement.number).max().unwrap();
        nic.set(Limits { connections: 0, ..nic.limits });
        let lowered: Vec<Announcement> = nic.announcements(false).collect();
        assert_eq!(lowered.iter().map(|announcement| announcement.free).collect::<Vec<_>>(), [0]);
        assert!(nic.take(Resource::Connections, 1, before), "it was on its way");
        nic.charges.set(0, 0);
        assert!(!nic.take(Resource::Connections, 1, lowered[0].number));
    }

    #[test]
    fn numbers_wrap() {
        let mut nic = resources(64, 1 << 20);
        let mut number = 0;
        for _ in 0..70_000 {
            for announcement in nic.announcements(true) {
                number = announcement.number;
                assert_ne!(number, EXEMPT);
            }
            assert!(nic.take(Resource::Memory, 1, number));
        }
        assert!(!nic.take(Resource::Connections, 1, number.wrapping_sub(KEPT as u16 + 1)), "it is forgotten");
    }

    #[test]
    fn growth_is_charged_with_what_a_connection_has_in_the_end() {
        let nic = resources(64, 100);
        nic.charges.set(5, 0);
        nic.charges.set(5, 30);
        nic.charges.set(5, 80);
        assert_eq!(nic.free(Resource::Memory), 20);
        nic.charges.end(5);
        assert_eq!((nic.free(Resource::Memory), nic.free(Resource::Connections)), (100, 64));
    }

    #[test]
    fn limits_are_announced_again_and_again() {
        let mut nic = resources(3, 100);
        let second = 1_000_000;
        assert_eq!([5 * second, 6 * second - 1, 6 * second].map(|now| nic.repeats(now)), [true, false, true]);
        assert_eq!(nic.due(), Some(7 * second));
        nic.set(Limits::default());
        assert!(nic.due().is_none() && !nic.repeats(9 * second));
    }

    #[test]
    fn a_busy_processor_announces_no_room_until_it_is_clearly_less_busy() {
        let mut nic = resources(10, 100);
        nic.set(Limits { processor: 50, ..nic.limits });
        let (mut now, mut busy) = (1_000_000, 0);
        let mut period = |nic: &mut Resources, percent: u64| {
            (now, busy) = (now + PERIOD, busy + PERIOD * percent / 100);
            (nic.measure(now, busy, 1), nic.free(Resource::Connections))
        };
        period(&mut nic, 90);
        assert_eq!([40, 51, 60].map(|percent| period(&mut nic, percent)), [(false, 10), (true, 0), (false, 0)]);
        assert_eq!([45, 40, 50].map(|percent| period(&mut nic, percent)), [(false, 0), (false, 10), (false, 10)]);
    }
}
