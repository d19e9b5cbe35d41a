//! The keeper's watch over the agent: one that hangs is ended, and the next one takes over.

use baton_abi::layout::nic;
use baton_agent::Sampler;
use baton_linux::events::monotonic_micros;
use baton_linux::{process, report, tasks};
use baton_shm::{Pulse, Region};
use baton_supervision::{Cause, Limits, Verdict};
use std::time::Duration;

/// Microseconds between two looks at the agent.
const PACE: u64 = 250_000;

/// When an agent counts as hung. It has longer than a NIC: a round of its loop may be about all connections, programs do not wait for it,
/// and somebody may stop it together with its NIC for a moment.
const LIMITS: Limits = Limits { spinning: 2_000_000, stuck: 5_000_000, stopped: 2_000_000 };

/// The agent that is watched.
pub(crate) struct Watched<'a> {
    process: u32,
    memory: &'a Region,
    sampler: Sampler,
    due: u64,
    cause: Option<Cause>,
    /// Its main thread was seen to have ended, once and twice.
    ended: [bool; 2],
}

impl Watched<'_> {
    /// Of an agent that has just been started.
    pub fn new(process: u32, memory: &Region) -> Watched<'_> {
        Pulse::clear(memory, nic::AGENT_PULSE);
        Watched {
            process,
            memory,
            sampler: Sampler::new(process, LIMITS),
            due: monotonic_micros() + PACE,
            cause: None,
            ended: [false; 2],
        }
    }

    /// Time until the next look.
    pub fn wait(&self) -> Duration {
        Duration::from_micros(self.due.saturating_sub(monotonic_micros()))
    }

    /// Why the agent was to be ended.
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// Whether the agent has ended, as its channel does not show while one of its threads waits in the kernel.
    pub fn has_ended(&self) -> bool {
        self.ended == [true; 2]
    }

    /// Looks at the agent, if it is time. Returns whether it is to be ended now. One that is not ready yet takes over all connections of
    /// the last one, which may take as long as it likes; it counts as hung only when it is stopped.
    pub fn must_end(&mut self, ready: bool) -> bool {
        let now = monotonic_micros();
        if now < self.due {
            return false;
        }
        let due = std::mem::replace(&mut self.due, now + PACE);
        self.ended = [!process::lives(self.process), self.ended[0]];
        if self.cause.is_some() || self.ended[0] {
            return false;
        }
        let places = std::iter::once(nic::AGENT_PULSE).filter(|_| ready);
        if let Verdict::Hung(cause) = self.sampler.look(self.memory, places, due) {
            report!(
                "baton keeper: the agent (process {}) hangs and is ended: {cause}{}",
                self.process,
                tasks::account(self.process)
            );
            self.cause = Some(cause);
        }
        self.cause.is_some()
    }
}
