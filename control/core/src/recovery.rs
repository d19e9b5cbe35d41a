//! The recovery from a NIC's death, in the order that its connections need.

use baton_moves::Event;

/// A step of the recovery. The connections that the NIC had, or was about to get, are driven by events; their moves
/// decide what each does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// The NIC's processes are ended.
    EndNic,
    /// Each connection gets the event that the NIC has died, and keeps its program out.
    TellDeath,
    /// The programs' queued commands are dropped, since their blocks have the same information.
    ForgetCommands,
    /// The next NIC starts. No frame flows yet.
    StartNic,
    /// Each connection has the next NIC hold its frames.
    TellStart,
    /// The next NIC has confirmed that for all: from here on none of their frames reaches the kernel.
    AwaitAnswers,
    /// Frames that the kernel has sent for them meanwhile are dropped.
    DropStaleFrames,
    /// Frames flow, those of other connections too.
    LetFramesFlow,
    /// Each connection continues to the kernel.
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

    /// The event that each connection gets in this step.
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

    /// A connection of a NIC that has died waits for each of the steps, and is in the kernel after the last one.
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
