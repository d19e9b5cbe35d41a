//! Moves, refusals, returns and losses, by program and reason, for the agent's life.

use baton_protocol::events::ProgramCounts;
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

/// Counts of all programs. The user is None for those of many users together.
#[derive(Default)]
pub(crate) struct Counts {
    by_program: BTreeMap<(Option<u32>, String), ProgramCounts>,
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

    fn of(&mut self, user: u32, program: &str) -> &mut ProgramCounts {
        let key = (Some(user), program.to_owned());
        let is_full = || {
            let of_user = self.by_program.keys().filter(|(of, _)| *of == Some(user)).count();
            self.by_program.len() >= MOST_PROGRAMS || of_user >= MOST_OF_USER
        };
        let key = if !self.by_program.contains_key(&key) && is_full() { (None, OTHERS.to_owned()) } else { key };
        let (user, program) = key.clone();
        self.by_program.entry(key).or_insert_with(|| ProgramCounts { user, program, ..ProgramCounts::default() })
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

/// Most bytes that a program's counts take in a message.
fn bytes_of(counts: &ProgramCounts) -> usize {
    let reasons = [&counts.refused, &counts.returned, &counts.lost].into_iter().flat_map(|reasons| reasons.keys());
    64 + counts.program.len() + reasons.map(|reason| 24 + reason.len()).sum::<usize>()
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
    fn a_list_comes_in_parts() {
        let mut counts = Counts::default();
        for program in 0..10 {
            counts.note(0, &format!("p{program}"), Counted::Returned, &"x".repeat(160));
        }
        let mut seen = Vec::new();
        loop {
            let part = counts.list(seen.len() as u32, 600);
            assert!(part.len() <= 2);
            if part.is_empty() {
                break;
            }
            seen.extend(part);
        }
        assert_eq!(seen.len(), 10);
    }
}
