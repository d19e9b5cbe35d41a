//! Events of connections, and counters of events by reason.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What has happened to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The NIC made it.
    Made,
    /// It was moved to a NIC.
    ToNic,
    /// It was moved to the kernel.
    ToKernel,
    /// A move to a NIC did not take place.
    StayedInKernel,
    /// A move to the kernel did not take place.
    StayedOnNic,
    /// Its NIC died.
    NicDied,
    /// The agent died, and its NICs with it.
    AgentDied,
    /// Its memory on the NIC grew: the power of two that receive and send memory have now, in bytes.
    Grown(u8, u8),
    /// It ended on the NIC.
    Ended,
    /// It was lost in a move.
    Lost,
}

impl What {
    /// Whether the event may repeat for the same reason, so that repetitions are counted.
    pub fn repeats(self) -> bool {
        matches!(self, What::StayedInKernel | What::StayedOnNic)
    }

    /// Whether the event has a duration.
    pub fn takes_time(self) -> bool {
        matches!(self, What::Made | What::ToNic | What::ToKernel | What::Grown(..))
    }
}

/// An event of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Happened {
    /// Microseconds since the event; since the last one, if it came several times.
    pub ago_us: u64,
    /// The kind of event.
    pub what: What,
    /// Number of the NIC that the event is about.
    pub nic: Option<u8>,
    /// The reason: an index in [`EventList::reasons`].
    pub reason: Option<u32>,
    /// The duration in microseconds of an event that has one; the number of repetitions of one that repeats.
    pub figure: u32,
}

/// The events of one connection, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// Its session.
    pub session: u32,
    /// Its number in the session.
    pub connection: u32,
    /// Its events.
    pub events: Vec<Happened>,
}

/// The events of several connections. Each reason is stored once, also if many events have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventList {
    /// Why things have happened.
    pub reasons: Vec<String>,
    /// The connections.
    pub histories: Vec<History>,
}

impl EventList {
    /// The number of a reason, which is added if it is not there.
    pub fn number_of(&mut self, reason: &str) -> u32 {
        let at = self.reasons.iter().position(|known| known == reason).unwrap_or_else(|| {
            self.reasons.push(reason.to_owned());
            self.reasons.len() - 1
        });
        at as u32
    }

    /// The text of an event's reason.
    pub fn reason(&self, event: &Happened) -> Option<&str> {
        self.reasons.get(event.reason? as usize).map(String::as_str)
    }
}

/// Counts of times by range.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Times up to each of [`Histogram::BOUNDS`] and above the one before it; the last are those above all.
    pub buckets: [u64; Histogram::BOUNDS.len() + 1],
    /// The sum of all, microseconds.
    pub sum_us: u64,
}

impl Histogram {
    /// Upper bounds, microseconds. A time that is equal to one lies below it.
    pub const BOUNDS: [u64; 17] =
        [10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000];

    /// Counts a time of so many microseconds.
    pub fn note(&mut self, micros: u64) {
        let at = Histogram::BOUNDS.partition_point(|bound| *bound < micros);
        self.buckets[at] += 1;
        self.sum_us = self.sum_us.saturating_add(micros);
    }

    /// How many times were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Adds another one's counts.
    pub fn add(&mut self, other: &Histogram) {
        self.buckets.iter_mut().zip(other.buckets).for_each(|(bucket, more)| *bucket += more);
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
    }
}

/// The counters of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramCounts {
    /// Its user; None for programs of several users that are counted together.
    pub user: Option<u32>,
    /// Its name.
    pub program: String,
    /// Its connections at present: in the kernel, and on NICs.
    pub connections: (u32, u32),
    /// Moves to a NIC.
    pub to_nic: u64,
    /// Moves that did not take place, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Connections that came back to the kernel, by reason.
    pub returned: BTreeMap<String, u64>,
    /// Connections that were lost in a move, by reason.
    pub lost: BTreeMap<String, u64>,
    /// Bytes that peers have acknowledged to its connections while these were on NICs.
    pub sent: u64,
    /// Bytes that its connections have received while they were on NICs.
    pub received: u64,
    /// Blackouts of its connections in moves to a NIC, from the steal on.
    pub to_nic_blackout: Histogram,
    /// Blackouts in moves to the kernel, from the NIC's command to stop on.
    pub to_kernel_blackout: Histogram,
    /// Blackouts after their NIC's death, from the time at which the agent noticed it.
    pub recovery_blackout: Histogram,
    /// Smoothed round-trip times of its connections on NICs, sampled when a connection is found to have carried data.
    pub rtt: Histogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_ranges() {
        let mut histogram = Histogram::default();
        for micros in [0, 10, 11, 2_500_000, 2_500_001] {
            histogram.note(micros);
        }
        assert_eq!((histogram.buckets[0], histogram.buckets[1]), (2, 1), "a bound belongs to what is below it");
        assert_eq!((histogram.buckets[16], histogram.buckets[17]), (1, 1));
        assert_eq!((histogram.count(), histogram.sum_us), (5, 5_000_022));
        let mut twice = histogram.clone();
        twice.add(&histogram);
        assert_eq!((twice.count(), twice.sum_us), (10, 10_000_044));
    }

    #[test]
    fn a_reason_is_told_once() {
        let mut list = EventList::default();
        let numbers = ["a", "b", "a"].map(|reason| list.number_of(reason));
        assert_eq!((numbers, list.reasons.len()), ([0, 1, 0], 2));
        let event = Happened { ago_us: 0, what: What::ToNic, nic: None, reason: Some(1), figure: 0 };
        assert_eq!(list.reason(&event), Some("b"));
        assert_eq!(list.reason(&Happened { reason: Some(7), ..event }), None, "an agent may send any number");
    }
}
