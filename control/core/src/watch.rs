//! The supervision of NICs: when they are checked, which one hangs and is to be ended, and how long connections stay
//! away from a NIC that dies again and again.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_supervision::{Cause, CrashLoop, LATE, Limits, Sample, Verdict, Watchdog};

/// Microseconds between two checks while there are sessions, and while there are none.
pub const PACE: u64 = 50_000;
const SLOW_PACE: u64 = 1_000_000;

/// The NIC with one number, and those before it.
#[derive(Debug, Default)]
struct Watched {
    /// By process number, a watchdog for each of its processes: the NIC itself, and its host's TCP.
    watchdogs: BTreeMap<u32, Watchdog>,
    /// How many times earlier NICs with this number were starved; and how many times they or this one hung.
    starved: u64,
    hung: u64,
    /// Why it hangs, if it does.
    cause: Option<Cause>,
    crash_loop: CrashLoop,
}

/// The watch over all NICs of an agent.
#[derive(Debug)]
pub struct Watch {
    of_nics: Vec<Watched>,
    /// Time of the next check, microseconds; 0 before the first one.
    due: u64,
    /// Up to this time, in microseconds, missed time was returned.
    missed_until: u64,
}

impl Watch {
    /// Over so many NICs.
    pub fn new(nics: usize) -> Watch {
        Watch { of_nics: (0..nics).map(|_| Watched::default()).collect(), due: 0, missed_until: 0 }
    }

    /// When the NICs are looked at next.
    pub fn due(&self) -> u64 {
        self.due
    }

    /// Begins a look at all NICs, if it is time. Returns when it was due.
    pub fn begin(&mut self, now: u64, has_sessions: bool) -> Option<u64> {
        let pace = if has_sessions { PACE } else { SLOW_PACE };
        (now >= self.due).then(|| core::mem::replace(&mut self.due, now + pace))
    }

    /// Evaluates the sample of a process of a NIC. Returns why the NIC is to be ended, if it is.
    pub fn judge(&mut self, nic: usize, process: u32, sample: &Sample) -> Option<Cause> {
        let watched = &mut self.of_nics[nic];
        let watchdog = watched.watchdogs.entry(process).or_insert_with(|| Watchdog::new(Limits::OF_NIC));
        let Verdict::Hung(cause) = watchdog.judge(sample) else { return None };
        watched.hung += 1;
        watched.cause = Some(cause);
        watched.cause
    }

    /// Why the present NIC with this number hangs, if it does.
    pub fn cause(&self, nic: usize) -> Option<Cause> {
        self.of_nics[nic].cause
    }

    /// The next NIC with this number has started.
    pub fn started(&mut self, nic: usize) {
        let (starved, hung) = self.counts(nic);
        let crash_loop = core::mem::take(&mut self.of_nics[nic].crash_loop);
        self.of_nics[nic] = Watched { starved, hung, crash_loop, ..Watched::default() };
    }

    /// The present NIC with this number has died at `now`. `by_itself`: it was not killed from outside (ignored if it
    /// hung); `present`: the connections that it had, or was about to get. Returns the connection that makes it die, if
    /// that is certain now.
    pub fn died(&mut self, nic: usize, now: u64, by_itself: bool, present: impl IntoIterator<Item = u64>) -> Option<u64> {
        let Watched { cause, crash_loop, .. } = &mut self.of_nics[nic];
        crash_loop.died(now, cause.map_or(by_itself, Cause::is_its_own), present)
    }

    /// For a connection that was on NIC `nic` when that died: returns for how many microseconds it must not go back
    /// there. None: it may, and counts as having gone back.
    pub fn keeps_away(&mut self, nic: usize, connection: u64, now: u64) -> Option<u64> {
        self.of_nics[nic].crash_loop.ask(connection, now).map(|until| until - now)
    }

    /// Times that NICs with this number were starved, and that they hung.
    pub fn counts(&self, nic: usize) -> (u64, u64) {
        let Watched { watchdogs, starved, hung, .. } = &self.of_nics[nic];
        (starved + watchdogs.values().map(Watchdog::starved).sum::<u64>(), *hung)
    }

    /// Whether a NIC, or its host's TCP, had no chance to answer in the last `period` microseconds.
    pub fn excuses(&self, nic: usize, now: u64, period: u64) -> bool {
        self.of_nics[nic].watchdogs.values().any(|watchdog| watchdog.is_excused(now, period))
    }

    /// Microseconds by which the agent is late with its next check at `now`, because it was stopped or got no
    /// processor: then its NICs may not have run either. The first 50 ms are not counted. Each microsecond is returned
    /// by one call only.
    pub fn take_missed(&mut self, now: u64) -> u64 {
        let from = self.missed_until.max(self.due.saturating_add(LATE));
        if self.due == 0 || now <= from || cfg!(feature = "sabotage-impatient-agent") {
            return 0;
        }
        self.missed_until = now;
        now - from
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_supervision::{Process, Worker};

    const NIC: u32 = 100;
    const HOST_TCP: u32 = 101;
    /// When the first look is due.
    const FIRST: u64 = 1_000_000;

    /// A watch over two NICs that have been looked at once.
    fn watch() -> Watch {
        let mut watch = Watch::new(2);
        assert_eq!((watch.take_missed(FIRST), watch.begin(FIRST - PACE, true)), (0, Some(0)), "no look was due");
        watch
    }

    /// A process whose only worker waits for a processor, and gets none.
    fn starves(at: u64) -> Sample {
        let worker = Worker { rounds: 1, asleep: false, thread: Process::Runs, used: Some(7) };
        Sample { at, due: at, process: Process::Runs, workers: [worker].into() }
    }

    fn is_stopped(at: u64) -> Sample {
        Sample { at, due: at, process: Process::Stopped, workers: Vec::new() }
    }

    #[test]
    fn nics_are_looked_at_at_their_pace() {
        let mut watch = watch();
        assert_eq!(watch.begin(FIRST - 1, true), None);
        assert_eq!((watch.due(), watch.begin(FIRST + 3, true)), (FIRST, Some(FIRST)));
        assert_eq!(watch.begin(FIRST + 3 + PACE, false), Some(FIRST + 3 + PACE));
        assert_eq!(watch.due(), FIRST + 3 + PACE + SLOW_PACE, "nobody waits for a NIC");
    }

    #[test]
    fn what_the_agent_has_missed_is_told_once() {
        let mut watch = watch();
        assert_eq!(watch.take_missed(FIRST), 0, "on time");
        assert_eq!(watch.take_missed(FIRST + LATE), 0, "a little late");
        assert_eq!(watch.take_missed(FIRST + LATE + 3_000_000), 3_000_000);
        assert_eq!(watch.take_missed(FIRST + LATE + 3_000_010), 10, "the look itself has not been made yet");
        let now = FIRST + LATE + 3_000_010;
        assert_eq!((watch.begin(now, true), watch.take_missed(now + PACE)), (Some(FIRST), 0));
        assert_eq!(watch.take_missed(now + PACE + LATE + 5), 5);
        assert_eq!(Watch::new(1).take_missed(u64::MAX), 0, "no look is due");
    }

    #[test]
    fn a_nic_that_hangs_is_ended_and_the_next_one_begins_anew() {
        let mut watch = watch();
        let mut at = FIRST;
        let cause = loop {
            // Its host's TCP does well.
            assert_eq!(watch.judge(1, HOST_TCP, &Sample { process: Process::Waits, ..is_stopped(at) }), None);
            match watch.judge(1, NIC, &is_stopped(at)) {
                Some(cause) => break cause,
                None => at += PACE,
            }
        };
        assert_eq!((cause, at - FIRST), (Cause::Stopped, Limits::OF_NIC.stopped));
        assert_eq!([0, 1].map(|nic| watch.cause(nic)), [None, Some(Cause::Stopped)]);
        watch.started(1);
        assert_eq!((watch.cause(1), watch.counts(1), watch.counts(0)), (None, (0, 1), (0, 0)));
        // The next NIC's process may have the same number.
        assert_eq!(watch.judge(1, NIC, &is_stopped(at + PACE)), None);
    }

    /// A NIC dies each time when it has a certain connection: the connection is found to be the cause, unless the NIC
    /// was stopped or killed from outside.
    #[test]
    fn a_connection_of_which_a_nic_dies_by_itself_is_found() {
        for (hangs, by_itself, of_it) in
            [(None, true, true), (None, false, false), (Some(Process::Runs), false, true), (Some(Process::Stopped), true, false)]
        {
            let (mut watch, mut now, mut guilty) = (watch(), FIRST, None);
            for _ in 0..10 {
                while let Some(wait) = watch.keeps_away(1, 7, now) {
                    now += wait;
                }
                if let Some(process) = hangs {
                    let spins = |used| Worker { rounds: 1, asleep: false, thread: Process::Runs, used: Some(used) };
                    let sample = |used| Sample { at: now + used, due: now + used, process, workers: [spins(used)].into() };
                    let cause = (0..8).find_map(|step| watch.judge(1, NIC, &sample(step * PACE)));
                    assert!(cause.is_some(), "{process:?}");
                    now += 8 * PACE;
                }
                guilty = guilty.or(watch.died(1, now, by_itself, [7]));
                watch.started(1);
            }
            assert_eq!(guilty, of_it.then_some(7), "{hangs:?} {by_itself}");
            assert_eq!(watch.keeps_away(0, 7, now), None, "another NIC");
        }
    }

    #[test]
    fn a_nic_without_a_processor_is_counted_and_excused() {
        let mut watch = watch();
        for at in [FIRST, FIRST + PACE, FIRST + 2 * PACE] {
            assert_eq!([NIC, HOST_TCP].map(|process| watch.judge(0, process, &starves(at))), [None; 2]);
        }
        assert_eq!((watch.counts(0), watch.counts(1)), ((2, 0), (0, 0)), "both processes");
        let now = FIRST + 3 * PACE;
        assert!(watch.excuses(0, now, 2 * PACE) && !watch.excuses(0, now, PACE) && !watch.excuses(1, now, 2 * PACE));
        watch.started(0);
        assert_eq!(watch.counts(0), (2, 0), "they are counted for all NICs with this number");
        assert!(!watch.excuses(0, now, 2 * PACE));
    }
}
