//! The recovery from a NIC's death, in the order that its connections need.

use baton_moves::Event;

/// A step of it. The connections that the NIC had, or was about to get, are driven by events; what they do then is
/// their moves' affair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// The NIC is ended: nothing of it goes on.
    EndNic,
    /// Each connection learns that it has died, and keeps its program out.
    TellDeath,
    /// What programs have queued for it is dropped: their blocks say the same.
    ForgetCommands,
    /// The next NIC starts. No frame flows yet.
    StartNic,
    /// Each connection has the next NIC hold its frames.
    TellStart,
    /// That has been answered for all: from here on no frame of theirs meets the kernel.
    AwaitAnswers,
    /// What the kernel has sent of them meanwhile is dropped.
    DropStaleFrames,
    /// Frames flow, those of other connections too.
    LetFramesFlow,
    /// Each connection goes on to the kernel.
    TellFlow,
}

impl Recovery {
    /// All steps, in order.
    pub const STEPS: [Recovery; 9] = {
        use Recovery::*;
        if cfg!(feature = "sabotage-frames-first") {
            [EndNic, TellDeath, ForgetCommands, StartNic, LetFramesFlow, TellFlow, TellStart, AwaitAnswers, DropStaleFrames]
        } else {
            [EndNic, TellDeath, ForgetCommands, StartNic, TellStart, AwaitAnswers, DropStaleFrames, LetFramesFlow, TellFlow]
        }
    };

    /// What happens to each connection in this step.
    pub fn event(self) -> Option<Event> {
        match self {
            Recovery::TellDeath => Some(Event::NicDied),
            Recovery::TellStart => Some(Event::NicStarted),
            Recovery::TellFlow => Some(Event::FramesFlow),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_moves::{Move, Outcome, Step};

    /// A connection of a NIC that has died is in the kernel when the last step is made, and waits for each before.
    #[test]
    fn a_connection_goes_to_the_kernel_in_these_steps() {
        let mut machine = Move::resting_at(Step::Nic);
        let mut seen = [Step::Kernel; Recovery::STEPS.len()];
        for (at, step) in Recovery::STEPS.into_iter().enumerate() {
            let mut next = step.event().and_then(|event| machine.on(event, 0));
            while next.is_some() {
                next = machine.on(Event::Outcome(Outcome::Done), 0);
            }
            seen[at] = machine.step();
        }
        use Step::{Barred, Kernel, Nic, Retaken};
        assert_eq!(seen, [Nic, Barred, Barred, Barred, Retaken, Retaken, Retaken, Retaken, Kernel]);
        assert!(!machine.waits());
    }
}
