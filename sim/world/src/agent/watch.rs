//! The agent's watch over its NIC, which the product's code decides: a NIC that is stopped or in an endless loop is
//! ended soon, whether a move is under way or not, and one that gets no processor never.

use super::Agent;
use crate::fault::Halt;
use crate::machine::Machine;
use baton_moves::{ANSWER_LIMIT, Event};
use baton_supervision::{Limits, Process, Sample, Verdict, Watchdog, Worker};

/// Microseconds between two looks.
const PACE: u64 = 50_000;
/// When a NIC counts as hung, as in the agent.
const LIMITS: Limits = Limits { spinning: 100_000, stuck: 1_000_000, stopped: 150_000, resumed: None };
/// Microseconds within which a NIC that hangs has to be ended.
const SOON: u64 = 1_000_000;

/// The watch over one NIC process.
pub(super) struct Watch {
    watchdog: Watchdog,
    due: u64,
    rounds: u64,
}

impl Watch {
    /// Of a NIC that has just been started.
    pub fn new(now: u64) -> Watch {
        Watch { watchdog: Watchdog::new(LIMITS), due: now + PACE, rounds: 0 }
    }

    /// When the next look is due. While the NIC makes rounds nothing is seen, so that there is none.
    pub fn due(&self, machine: &Machine) -> Option<u64> {
        machine.nic_halted().map(|(_, since)| self.due.max(since))
    }
}

impl Agent {
    /// What time that has passed is to a move.
    pub(super) fn tick(&self, now: u64) -> Event {
        if self.watch.watchdog.is_excused(now, ANSWER_LIMIT) { Event::Excused } else { Event::Tick }
    }

    /// Looks at the NIC if that is due. True: it hangs, and is to be ended.
    pub(super) fn sees_hang(&mut self, machine: &mut Machine) -> bool {
        let now = machine.now.0;
        let Some((halt, since)) = machine.nic_halted() else { return false };
        let due = self.watch.due.max(since);
        if now < due {
            return false;
        }
        self.watch.due = now + PACE;
        if since + PACE > due {
            // The first look at this halt: until then it made rounds.
            self.watch.rounds += 1;
        }
        let used = if halt == Halt::Spins { now - since } else { 0 };
        let worker = Worker { rounds: self.watch.rounds, asleep: false, thread: Process::Runs, used: Some(used) };
        let process = if halt == Halt::Stopped { Process::Stopped } else { Process::Runs };
        let verdict = self.watch.watchdog.judge(&Sample { at: now, due, process, workers: vec![worker] });
        let hangs = matches!(verdict, Verdict::Hung(_));
        if hangs && halt == Halt::Starved {
            machine.failure = Some(format!("the NIC of host {} was ended, and got no processor: {verdict:?}", machine.number));
        }
        if !hangs && halt != Halt::Starved && now > since + SOON {
            machine.failure = Some(format!("the NIC of host {} hangs ({halt:?}), and nobody ends it", machine.number));
        }
        hangs
    }
}
