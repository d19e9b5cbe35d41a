//! Where a connection is, as requests distinguish it.

use baton_moves::{Goal, Step};

/// Stage of a connection's life with the agent, derived from its move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// In the kernel.
    Kernel,
    /// Being offloaded: the move waits for the NIC's copy or for the program.
    Offloading,
    /// On the NIC, or being restored.
    Nic,
    /// It ended while it was on the NIC; only the shell is left.
    Ended,
}

impl Stage {
    /// Of a connection whose move has come to this step and goes there.
    pub fn of(step: Step, goal: Option<Goal>) -> Stage {
        match step {
            Step::Ended => Stage::Ended,
            step if step.is_on_nic() => Stage::Nic,
            Step::Kernel if goal.is_none() => Stage::Kernel,
            _ => Stage::Offloading,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_in_the_kernel_only_while_no_move_is_under_way() {
        assert_eq!(Stage::of(Step::Kernel, None), Stage::Kernel);
        assert_eq!(Stage::of(Step::Kernel, Some(Goal::Nic)), Stage::Offloading);
        for step in [Step::Reserved, Step::Covered, Step::Stolen, Step::Purged] {
            assert_eq!(Stage::of(step, Some(Goal::Kernel)), Stage::Offloading, "{step:?}");
        }
        for step in [Step::HandedOff, Step::Nic, Step::Left, Step::Grown, Step::Orphaned, Step::Sending, Step::Cleared] {
            assert_eq!(Stage::of(step, Some(Goal::Kernel)), Stage::Nic, "{step:?}");
        }
        assert_eq!(Stage::of(Step::Freed, Some(Goal::Kernel)), Stage::Offloading, "its slot is free already");
        assert_eq!(Stage::of(Step::Ended, None), Stage::Ended);
    }
}
