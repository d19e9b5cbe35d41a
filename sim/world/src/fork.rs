//! A program that forks: parent and child have the same socket until one of them closes it.

use crate::agent::{Answer, Request};
use crate::kernel::Descriptor;
use crate::program::Hosted;

/// When a program forks, and what happens then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fork {
    /// Bytes sent and received after which it does.
    pub at: u64,
    /// The child goes on with the connection, in this session; None: the parent does.
    pub heir: Option<u32>,
    /// How long the other one keeps its descriptor, microseconds.
    pub lasts: u64,
}

/// The process that has the socket and does not use it.
pub(crate) struct Holder {
    descriptor: Descriptor,
    /// Its connection's number with the agent, if it has registered it: the parent has.
    pub registration: Option<u32>,
    until: u64,
    /// The agent that was asked to forget it.
    asked: u32,
}

impl Holder {
    /// Forks: from now on another process has the descriptor, too.
    pub fn new(descriptor: Descriptor, registration: Option<u32>, until: u64, hosted: &mut Hosted<'_>) -> Holder {
        hosted.machine.kernel.socket(descriptor).inherit();
        Holder { descriptor, registration, until, asked: u32::MAX }
    }

    /// When it does something next, microseconds.
    pub fn wake(&self) -> u64 {
        self.until
    }

    /// Closes the descriptor when its time has come, after the agent has forgotten it. Returns whether it has.
    pub fn close(&mut self, hosted: &mut Hosted<'_>) -> bool {
        let now = hosted.machine.now.0;
        if self.until > now {
            return false;
        }
        let forgotten = |answer: &Answer| matches!(answer, Answer::Forgotten { .. });
        if let Some(number) = self.registration
            && hosted.take_answer(number, forgotten).is_none()
        {
            hosted.ask(number, Request::Forget, &mut self.asked);
            self.until = now + PAUSE;
            return false;
        }
        hosted.machine.kernel.socket(self.descriptor).close(false);
        true
    }
}

/// Time between two looks for the agent's answer, microseconds.
const PAUSE: u64 = 1_000;
