//! Moves, refusals, returns and losses, by program and reason, for the agent's life.

use crate::traffic::Traffic;
use baton_protocol::events::{Histogram, ProgramCounts};
use std::collections::BTreeMap;

/// Most reasons of each kind that are counted separately.
const MOST_REASONS: usize = 64;

/// Most programs that are counted separately, and most of one user: a program may have any name.
const MOST_PROGRAMS: usize = 64;
const MOST_OF_USER: usize = 16;

/// The name under which all further programs are counted.
const OTHERS: &str = "other programs";

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Counted {
    /// A move to a NIC.
    ToNic,
    /// A move that did not take place.
    Refused,
    /// A connection that came back to the kernel.
    Returned,
    /// A connection that was lost.
    Lost,
}

/// What a connection has stood still for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Still {
    /// A move to a NIC.
    ToNic,
    /// A move to the kernel.
    ToKernel,
    /// A move to the kernel after its NIC's death.
    Recovery,
}

/// Counts of all programs and NICs. The user is None for programs of many users together.
#[derive(Default)]
pub(crate) struct Counts {
    by_program: BTreeMap<(Option<u32>, String), ProgramCounts>,
    /// By the NIC's number.
    by_nic: Vec<NicCounts>,
}

/// What is counted of a NIC and its predecessors.
#[derive(Clone, Default)]
pub(crate) struct NicCounts {
    /// What connections have carried on it.
    pub carried: Traffic,
    /// Its deaths by cause, one of [`DEATHS`](baton_protocol::program::DEATHS).
    pub deaths: BTreeMap<String, u64>,
}

impl Counts {
    /// Counts something of a program of `user`.
    pub fn note(&mut self, user: u32, program: &str, what: Counted, reason: &str) {
        let counts = self.of(user, program);
        match what {
            Counted::ToNic => counts.to_nic += 1,
            Counted::Refused => *counter(&mut counts.refused, reason) += 1,
            Counted::Returned => *counter(&mut counts.returned, reason) += 1,
            Counted::Lost => *counter(&mut counts.lost, reason) += 1,
        }
    }

    /// Counts what a connection of a program of `user` has carried on a NIC.
    pub fn note_carried(&mut self, user: u32, program: &str, (nic, traffic): (usize, Traffic)) {
        if traffic == Traffic::default() {
            return;
        }
        let counts = self.of(user, program);
        (counts.sent, counts.received) =
            (counts.sent.saturating_add(traffic.sent), counts.received.saturating_add(traffic.received));
        let of_nic = self.of_nic(nic);
        of_nic.carried = of_nic.carried.plus(traffic.sent, traffic.received);
    }

    /// Counts that a connection of a program of a user has stood still for so many microseconds.
    pub fn note_still(&mut self, (user, program): (u32, &str), still: Still, micros: u64) {
        let counts = self.of(user, program);
        let histogram = match still {
            Still::ToNic => &mut counts.to_nic_blackout,
            Still::ToKernel => &mut counts.to_kernel_blackout,
            Still::Recovery => &mut counts.recovery_blackout,
        };
        histogram.note(micros);
    }

    /// Counts a NIC's death.
    pub fn note_death(&mut self, nic: usize, cause: &'static str) {
        *self.of_nic(nic).deaths.entry(cause.into()).or_default() += 1;
    }

    fn of_nic(&mut self, nic: usize) -> &mut NicCounts {
        if self.by_nic.len() <= nic {
            self.by_nic.resize(nic + 1, NicCounts::default());
        }
        &mut self.by_nic[nic]
    }

    /// The counts of a NIC.
    pub fn nic(&self, nic: usize) -> NicCounts {
        self.by_nic.get(nic).cloned().unwrap_or_default()
    }

    /// The counts of a program of `user`.
    pub fn of(&mut self, user: u32, program: &str) -> &mut ProgramCounts {
        let key = (Some(user), program.to_owned());
        let is_full = || {
            let of_user = self.by_program.keys().filter(|(of, _)| *of == Some(user)).count();
            self.by_program.len() >= MOST_PROGRAMS || of_user >= MOST_OF_USER
        };
        let key = if !self.by_program.contains_key(&key) && is_full() { (None, OTHERS.to_owned()) } else { key };
        let (user, program) = key.clone();
        self.by_program.entry(key).or_insert_with(|| ProgramCounts { user, program, ..ProgramCounts::default() })
    }

    /// Notes how many connections there are at present: user, program, in the kernel, on NICs. A program may be there
    /// several times.
    pub fn note_connections<'a>(&mut self, present: impl Iterator<Item = (u32, &'a str, u32, u32)>) {
        self.by_program.values_mut().for_each(|counts| counts.connections = (0, 0));
        for (user, program, kernel, nic) in present.filter(|(_, _, kernel, nic)| kernel + nic > 0) {
            let connections = &mut self.of(user, program).connections;
            *connections = (connections.0 + kernel, connections.1 + nic);
        }
    }

    /// The counts of programs from this one on, as many as fit into so many bytes of a message.
    pub fn list(&self, from: u32, most_bytes: usize) -> Vec<ProgramCounts> {
        let mut bytes = 0;
        let fits = |counts: &&ProgramCounts| {
            bytes += bytes_of(counts);
            bytes <= most_bytes
        };
        self.by_program.values().skip(from as usize).take_while(fits).cloned().collect()
    }
}

/// Most bytes that a program's counts take besides its name and reasons: of four histograms, and of four numbers more.
const COUNTS_BYTES: usize = 10 * (4 * (Histogram::BOUNDS.len() + 2) + 8);

/// Most bytes that a program's counts take in a message.
fn bytes_of(counts: &ProgramCounts) -> usize {
    let reasons = [&counts.refused, &counts.returned, &counts.lost].into_iter().flat_map(|reasons| reasons.keys());
    COUNTS_BYTES + counts.program.len() + reasons.map(|reason| 24 + reason.len()).sum::<usize>()
}

/// Returns the counter of a reason, or that of all others once there are [`MOST_REASONS`]: a reason may be a program's
/// own text, and what is counted must stay bounded.
pub(crate) fn counter<'a>(counters: &'a mut BTreeMap<String, u64>, reason: &str) -> &'a mut u64 {
    let reason = if counters.len() < MOST_REASONS || counters.contains_key(reason) { reason } else { "other causes" };
    counters.entry(reason.into()).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_is_counted_by_program_and_reason() {
        let mut counts = Counts::default();
        for _ in 0..3 {
            counts.note(0, "nginx", Counted::Refused, "MPTCP");
        }
        counts.note(0, "nginx", Counted::ToNic, "asked to");
        counts.note(0, "nginx", Counted::Returned, "fork");
        counts.note(7, "nginx", Counted::Lost, "connect: refused");
        let list = counts.list(0, 1 << 16);
        assert_eq!(list.len(), 2, "by user, too");
        assert_eq!((list[0].user, list[0].to_nic, list[0].refused["MPTCP"], list[0].returned["fork"]), (Some(0), 1, 3, 1));
        assert_eq!((list[1].user, list[1].lost["connect: refused"]), (Some(7), 1));
    }

    #[test]
    fn programs_and_reasons_are_bounded() {
        let mut counts = Counts::default();
        for user in 0..100 {
            for program in 0..100 {
                counts.note(user, &format!("p{program}"), Counted::Returned, "fork");
            }
        }
        for reason in 0..10_000 {
            counts.note(0, "p0", Counted::Refused, &format!("reason {reason}"));
        }
        let list = counts.list(0, usize::MAX);
        assert_eq!(list.len(), MOST_PROGRAMS, "the others are one of them");
        assert_eq!(list.iter().filter(|counts| counts.user == Some(0)).count(), MOST_OF_USER);
        let others = list.iter().find(|counts| counts.user.is_none()).expect("others");
        assert_eq!(others.returned["fork"], 10_001 - MOST_PROGRAMS as u64, "nothing is left uncounted");
        let many = list.iter().find(|counts| counts.program == "p0" && counts.user == Some(0)).expect("counts");
        assert_eq!((many.refused.len(), many.refused.values().sum::<u64>()), (MOST_REASONS + 1, 10_000));
    }

    #[test]
    fn what_is_carried_counts_for_program_and_nic() {
        let mut counts = Counts::default();
        counts.note_carried(3, "nginx", (1, Traffic { sent: 5, received: 7 }));
        counts.note_carried(3, "redis", (1, Traffic { sent: 1, received: 0 }));
        counts.note_carried(3, "idle", (0, Traffic::default()));
        counts.note_death(1, "crashed");
        counts.note_death(1, "crashed");
        let list = counts.list(0, usize::MAX);
        assert_eq!(list.len(), 2, "nothing is not counted");
        assert_eq!((list[0].sent, list[0].received, list[1].sent), (5, 7, 1));
        counts.note_connections([(3, "nginx", 2, 3), (3, "nginx", 1, 0), (3, "new", 0, 1), (3, "none", 0, 0)].into_iter());
        let present = |counts: &Counts| counts.list(0, usize::MAX).iter().map(|one| one.connections).collect::<Vec<_>>();
        assert_eq!(present(&counts), [(0, 1), (3, 3), (0, 0)], "by name");
        counts.note_connections([(3, "new", 1, 0)].into_iter());
        assert_eq!(present(&counts), [(1, 0), (0, 0), (0, 0)]);
        assert_eq!(counts.nic(1).carried, Traffic { sent: 6, received: 7 });
        assert_eq!((counts.nic(1).deaths["crashed"], counts.nic(7).deaths.len()), (2, 0));
    }

    #[test]
    fn a_list_comes_in_parts() {
        let mut counts = Counts::default();
        for program in 0..10 {
            counts.note(0, &format!("p{program}"), Counted::Returned, &"x".repeat(160));
        }
        let mut seen = Vec::new();
        loop {
            let part = counts.list(seen.len() as u32, COUNTS_BYTES + 200);
            assert!(part.len() <= 1);
            if part.is_empty() {
                break;
            }
            seen.extend(part);
        }
        assert_eq!(seen.len(), 10);
    }
}
