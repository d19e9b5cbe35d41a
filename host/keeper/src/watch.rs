//! The keeper's watch over the agent: one that hangs is ended, and the next one takes over. One that is stopped goes on
//! first.

use baton_abi::layout::nic;
use baton_agent::Sampler;
use baton_linux::events::monotonic_micros;
use baton_linux::{process, tasks};
use baton_log::{info, warning};
use baton_shm::{Pulse, Region};
use baton_supervision::{Cause, Limits, Verdict, Watchdog};
use std::io;
use std::process::{Child, ExitStatus};
use std::time::Duration;

/// Microseconds between two looks at the agent while there are sessions, and without.
const PACE: u64 = 100_000;
const SLOW_PACE: u64 = 250_000;

/// Between two looks at a process that ends, and the time that it may take to close its descriptors, in microseconds.
const PAUSE: Duration = Duration::from_millis(2);
const CLOSING: u64 = 1_000_000;

/// Waits until a child has ended, and takes its status. None if it does nothing more, but has not ended: a thread of it
/// waits in the kernel for something that somebody else holds, or for a file that does not close.
///
/// # Errors
/// The failed system call's.
pub fn await_end(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let mut ending = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let now = monotonic_micros();
        if !process::first_thread_lives(child.id()) || ending.is_some_and(|since| now > since + CLOSING) {
            return child.try_wait();
        }
        if !process::first_thread_runs(child.id()) {
            ending.get_or_insert(now);
        }
        std::thread::sleep(PAUSE);
    }
}

/// What is to be done with an agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Remedy {
    None,
    /// It is stopped and to be resumed, with all that may have been stopped with it.
    Resume,
    End,
}

/// The agent that is watched.
pub(crate) struct Watched<'a> {
    process: u32,
    memory: &'a Region,
    sampler: Sampler,
    watchdog: Watchdog,
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
            sampler: Sampler::default(),
            watchdog: Watchdog::new(Limits::OF_AGENT),
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

    /// Looks at the agent, if it is time. Returns what is to be done now. One that is not ready yet takes over all
    /// connections of the last one, which may take as long as it likes; it counts as hung only when it is stopped.
    pub fn look(&mut self, ready: bool, has_sessions: bool) -> Remedy {
        let now = monotonic_micros();
        if now < self.due {
            return Remedy::None;
        }
        let pace = if has_sessions { PACE } else { SLOW_PACE };
        let due = std::mem::replace(&mut self.due, now + pace);
        self.ended = [!process::first_thread_runs(self.process), self.ended[0]];
        if self.cause.is_some() || self.ended[0] {
            return Remedy::None;
        }
        let places = std::iter::once(nic::AGENT_PULSE).filter(|_| ready);
        match self.watchdog.judge(&self.sampler.look(self.process, self.memory, places, due)) {
            Verdict::Hung(cause) => {
                let process = self.process;
                warning!(
                    [] "the agent (process {process}) hangs and is ended: {cause}";
                    "if it comes again, send what `baton report` writes"
                );
                info!([] "what the agent's threads were doing: {}", tasks::account(process));
                self.cause = Some(cause);
                Remedy::End
            }
            Verdict::Resume => {
                warning!(
                    [] "the agent (process {}) is stopped (SIGSTOP), and resumed", self.process;
                    "do not stop it: meanwhile no connection moves, and one whose NIC has died stands still"
                );
                Remedy::Resume
            }
            _ => Remedy::None,
        }
    }
}
