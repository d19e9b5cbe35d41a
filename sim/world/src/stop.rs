//! An agent whose process is stopped, and the keeper's watch over it, which the product's code decides: one that is
//! stopped goes on soon, and with it its NIC; one that is stopped again and again is ended.

use crate::fault::Scope;
use baton_supervision::{Limits, Process, Sample, Verdict, Watchdog};

/// Microseconds between two looks of the keeper, as in the product while there are sessions.
const PACE: u64 = 100_000;
/// Microseconds within which a stopped agent goes on: the limit, a look before it and one behind it.
const SOON: u64 = 400_000;
/// Microseconds within which it is ended if it is stopped again at once.
const AT_LAST: u64 = 2_500_000;
/// Most microseconds between the stop of a NIC and that of its agent by the same hand.
const LAG: u64 = 90_000;

/// What the keeper does with an agent.
pub(crate) enum Remedy {
    None,
    Resume,
    End,
}

/// What stops and watches one agent.
pub(crate) struct Stop {
    watchdog: Watchdog,
    /// The keeper's next look. While the agent runs nothing is seen, so that there is one more only after a stop.
    due: u64,
    /// From when until when the agent is stopped, unless it is resumed.
    agent: Option<(u64, u64)>,
    /// Until when the keeper is.
    keeper: u64,
    /// When the agent was last resumed by the keeper.
    resumed_at: Option<u64>,
}

impl Stop {
    /// Of an agent that has just been started.
    pub fn new() -> Stop {
        let watchdog = Watchdog::new(Limits::OF_AGENT);
        Stop { watchdog, due: u64::MAX, agent: None, keeper: 0, resumed_at: None }
    }

    /// Somebody stops the agent for this long, microseconds.
    pub fn begin(&mut self, scope: Scope, now: u64, time: u64) {
        if self.agent.is_none() {
            let from = now + if scope == Scope::Agent { 0 } else { time % LAG };
            self.agent = Some((from, now + time.max(LAG)));
            self.due = self.due.min(from + PACE);
            if scope == Scope::All {
                self.keeper = now + time;
            }
        }
    }

    /// Since when the agent is stopped, if it is.
    pub fn since(&self, now: u64) -> Option<u64> {
        self.agent.map(|(from, _)| from).filter(|from| *from <= now)
    }

    /// Whether the agent is stopped now.
    pub fn holds(&self, now: u64) -> bool {
        self.since(now).is_some()
    }

    /// When something happens next: a stop begins or ends, or the keeper looks.
    pub fn next(&self, now: u64) -> u64 {
        let (from, until) = self.agent.unwrap_or((u64::MAX, u64::MAX));
        let edge = if from > now { from } else { until };
        edge.min(self.due.max(self.keeper))
    }

    /// The keeper looks, if that is due. Returns what it does, or what is wrong.
    pub fn look(&mut self, now: u64) -> Result<Remedy, String> {
        if self.agent.is_some_and(|(_, until)| until <= now) {
            self.agent = None;
        }
        let stopped = self.agent.filter(|(from, _)| *from <= now);
        if now < self.due.max(self.keeper) {
            return Ok(Remedy::None);
        }
        let process = if stopped.is_some() { Process::Stopped } else { Process::Waits };
        let verdict = self.watchdog.judge(&Sample { at: now, due: self.due, process, workers: Vec::new() });
        self.due = if self.agent.is_some() { now + PACE } else { u64::MAX };
        let resumed = self.resumed_at.is_some_and(|at| now < at + AT_LAST);
        match verdict {
            Verdict::Resume => {
                (self.agent, self.resumed_at) = (None, Some(now));
                // To see that it runs.
                self.due = now + PACE;
                Ok(Remedy::Resume)
            }
            Verdict::Hung(cause) if !resumed => Err(format!("was ended, and nobody had resumed it: {cause:?}")),
            Verdict::Hung(_) => Ok(Remedy::End),
            _ => match stopped {
                // A keeper that was stopped, too, begins to count when it goes on.
                Some((from, _)) if !resumed && now > from.max(self.keeper) + SOON => {
                    Err("is stopped, and nobody resumes it".into())
                }
                Some((from, _)) if now > from.max(self.keeper) + AT_LAST => Err("is kept stopped, and nobody ends it".into()),
                _ => Ok(Remedy::None),
            },
        }
    }
}
