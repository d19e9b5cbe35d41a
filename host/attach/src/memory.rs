//! Bounded memory of an attacher that may run for any time.

use std::collections::BTreeSet;

/// Pauses that are remembered.
const PAUSES: usize = 1 << 16;
/// Most sockets that are remembered as not to be offloaded: more than a process usually has. If fewer were remembered
/// than exist, every search would examine all of them again, and stop the programs for it.
const OTHERS: usize = 1 << 20;

/// The times for which programs were stopped. All times are counted, and the latest are remembered.
#[derive(Default)]
pub(crate) struct Pauses {
    count: u64,
    longest: u32,
    latest: Vec<u32>,
}

impl Pauses {
    /// Adds one, in microseconds.
    pub fn add(&mut self, length: u32) {
        let place = (self.count % PAUSES as u64) as usize;
        match self.latest.get_mut(place) {
            Some(oldest) => *oldest = length,
            None => self.latest.push(length),
        }
        self.count += 1;
        self.longest = self.longest.max(length);
    }

    /// Their number.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest, in microseconds.
    pub fn longest(&self) -> u64 {
        self.longest.into()
    }

    /// Percentiles of the latest, in microseconds; 0 if there are none.
    pub fn percentiles<const N: usize>(&self, shares: [usize; N]) -> [u64; N] {
        let mut sorted = self.latest.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        shares.map(|share| sorted.get((sorted.len() * share / 100).min(last)).copied().unwrap_or(0).into())
    }
}

/// Sockets, by their inodes, that need not be examined again.
#[derive(Default)]
pub(crate) struct Known {
    registered: BTreeSet<u64>,
    /// Sockets that are not to be offloaded. The attacher does not notice when they are closed, and their inode numbers
    /// are reused some day: so when there are many, all are forgotten, and those that still exist are examined again.
    others: BTreeSet<u64>,
}

impl Known {
    pub fn contains(&self, inode: u64) -> bool {
        self.registered.contains(&inode) || self.others.contains(&inode)
    }

    /// Records a socket that is registered with the agent.
    pub fn register(&mut self, inode: u64) {
        self.registered.insert(inode);
    }

    /// Records a socket that is not to be offloaded.
    pub fn dismiss(&mut self, inode: u64) {
        if self.others.len() == OTHERS {
            self.others.clear();
        }
        self.others.insert(inode);
    }

    /// Forgets one that was registered.
    pub fn remove(&mut self, inode: u64) {
        self.registered.remove(&inode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_counted_and_the_latest_remembered() {
        let mut pauses = Pauses::default();
        assert_eq!((pauses.count(), pauses.longest(), pauses.percentiles([50, 100])), (0, 0, [0, 0]));
        pauses.add(70_000);
        (0..3 * PAUSES as u32 / 2).for_each(|length| pauses.add(length % 100));
        assert_eq!((pauses.count(), pauses.longest()), (3 * PAUSES as u64 / 2 + 1, 70_000));
        let [median, most] = pauses.percentiles([50, 100]);
        assert!((49..=51).contains(&median) && most == 99, "{median} {most}");
        assert_eq!(pauses.latest.len(), PAUSES);
    }

    #[test]
    fn of_sockets_that_are_not_offloaded_some_are_remembered() {
        let mut known = Known::default();
        known.register(7);
        (100..=100 + OTHERS as u64).for_each(|inode| {
            known.dismiss(inode);
            assert!(known.contains(inode) && known.contains(7) && known.others.len() <= OTHERS);
        });
        assert!(!known.contains(100));
        known.remove(7);
        assert!(!known.contains(7));
    }
}
