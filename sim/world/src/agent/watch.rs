//! The agent's watch over its NIC, which the product's code decides: a NIC that is stopped or in an endless loop is
//! ended soon, whether a move is under way or not, and one that gets no processor never.

use super::Agent;
use crate::fault::Halt;
use crate::machine::Machine;
use baton_core::PACE;
use baton_moves::{ANSWER_LIMIT, Event};
use baton_supervision::{Limits, Process, Sample, Worker};

/// Longest stop of the agent after which its look may still be on time: up to that look, and as late as it may be.
const MOST_UNSEEN: u64 = 2 * PACE;
/// Microseconds within which a NIC that hangs has to be ended.
const SOON: u64 = 1_000_000;

/// The watch over the NIC.
pub(super) struct Watch {
    /// What the product decides.
    pub decides: baton_core::Watch,
    rounds: u64,
    /// Since when each look has found the NIC halted.
    halted_since: Option<u64>,
    /// Since when the agent has run without looks that were late, microseconds.
    runs_since: u64,
    /// How often, and how long in all, the agent was stopped, microseconds.
    stops: u64,
    stopped: u64,
}

/// When a command was given to a NIC, and how often and how long the agent had been stopped by then.
#[derive(Clone, Copy, Default)]
pub(super) struct Asked {
    at: u64,
    stops: u64,
    stopped: u64,
}

impl Watch {
    /// Of an agent that has just been started.
    pub fn new(now: u64) -> Watch {
        let decides = baton_core::Watch::new(1);
        Watch { decides, rounds: 0, halted_since: None, runs_since: now, stops: 0, stopped: 0 }
    }

    /// The next NIC has started.
    pub fn started(&mut self) {
        self.decides.started(0);
        self.halted_since = None;
    }

    /// When the next look is due. While the NIC makes rounds nothing is seen, so that there is one more only after it
    /// was halted.
    pub fn due(&self, machine: &Machine) -> Option<u64> {
        (machine.nic_halted().is_some() || self.halted_since.is_some()).then(|| self.decides.due())
    }

    /// To be noted when a command is given to the NIC at `now`.
    pub fn asked(&self, now: u64) -> Asked {
        Asked { at: now, stops: self.stops, stopped: self.stopped }
    }

    /// Most microseconds that the agent can believe to have run since `asked`. Of each stop it does not notice the
    /// first [`MOST_UNSEEN`], since its next look was not yet overdue.
    pub fn has_run_since(&self, asked: Asked, now: u64) -> u64 {
        (now - asked.at) - (self.stopped - asked.stopped) + (self.stops - asked.stops) * MOST_UNSEEN
    }
}

impl Agent {
    /// The agent goes on after it was stopped since `from`. If the keeper has resumed it, it resumes its NIC before
    /// anything else.
    pub fn goes_on(&mut self, machine: &mut Machine, from: u64, resumed: bool) {
        let now = machine.now.0;
        self.watch.stopped += now - from;
        if now - from > MOST_UNSEEN {
            self.watch.runs_since = now;
        }
        self.watch.stops += 1;
        // While the NIC runs no look is made here; the product would have made the last one shortly before the stop.
        if self.watch.halted_since.is_none() {
            self.watch.decides.begin(from, true);
        }
        let missed = self.watch.decides.take_missed(now);
        for connection in self.connections.values_mut() {
            connection.machine.excuse(missed);
        }
        if let Some(nic) = machine.card().nic.as_mut().filter(|_| resumed) {
            nic.resume(now);
        }
    }

    /// What time that has passed is to a move.
    pub(super) fn tick(&self, now: u64) -> Event {
        if self.watch.decides.excuses(0, now, ANSWER_LIMIT) { Event::Excused } else { Event::Tick }
    }

    /// Looks at the NIC if that is due. True: it hangs, and is to be ended.
    pub(super) fn sees_hang(&mut self, machine: &mut Machine) -> bool {
        let now = machine.now.0;
        let Some(due) = self.watch.decides.begin(now, true) else { return false };
        let Some((halt, since)) = machine.nic_halted() else {
            self.watch.halted_since = None;
            self.watch.rounds += 1;
            let workers = vec![Worker { rounds: self.watch.rounds, asleep: true, thread: Process::Waits, used: None }];
            self.watch.decides.judge(0, 0, &Sample { at: now, due, process: Process::Waits, workers });
            return false;
        };
        let seen = *self.watch.halted_since.get_or_insert(since);
        let used = if halt == Halt::Spins { now - since } else { 0 };
        let worker = Worker { rounds: self.watch.rounds, asleep: false, thread: Process::Runs, used: Some(used) };
        let process = if halt == Halt::Stopped { Process::Stopped } else { Process::Runs };
        let cause = self.watch.decides.judge(0, 0, &Sample { at: now, due, process, workers: vec![worker] });
        let hangs = cause.is_some();
        if hangs && halt == Halt::Starved {
            machine.failure = Some(format!("the NIC of host {} was ended, and got no processor: {cause:?}", machine.number));
        }
        let watched = now - seen.max(self.watch.runs_since);
        if hangs && halt == Halt::Stopped && watched < Limits::OF_NIC.stopped {
            machine.failure = Some(format!("the NIC of host {} was ended, and its agent was stopped, too", machine.number));
        }
        if !hangs && halt != Halt::Starved && watched > SOON {
            machine.failure = Some(format!("the NIC of host {} hangs ({halt:?}), and nobody ends it", machine.number));
        }
        hangs
    }
}
