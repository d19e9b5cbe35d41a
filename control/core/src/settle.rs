//! What is done with a connection that somebody needs in the kernel: its program closes it, say, or calls for what only
//! the kernel can do.

use crate::stage::Stage;

/// Attempts to restore a connection for an operation that only the kernel can do.
pub const ATTEMPTS: u8 = 2;

/// What is done first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settle {
    /// The operation: the connection is in the kernel, has ended, or could not be restored.
    Operate,
    /// What its program has not read of a connection that has ended is given up; then the operation.
    GiveUpUnread,
    /// Nothing: when the move has ended that is under way it is settled again.
    Wait,
    /// Its move to the NIC is called off; it is settled again when that has ended.
    CallOff,
    /// It is restored, in one attempt more; it is settled again when that has ended.
    Restore {
        /// It does not stay on the NIC if its program does not leave it in time.
        forced: bool,
    },
}

/// What is done with a connection at this stage, after so many attempts to restore it. None: there is no connection any
/// more. `ends`: it has ended on the NIC, which has not answered yet. `forgets`: its program has closed it.
pub fn settle(stage: Option<Stage>, ends: bool, forgets: bool, attempts: u8) -> Settle {
    match stage {
        None | Some(Stage::Kernel) => Settle::Operate,
        Some(Stage::Offloading) => Settle::CallOff,
        // Its program may still read what it had received.
        Some(Stage::Ended) if !forgets => Settle::Operate,
        Some(Stage::Ended) => Settle::GiveUpUnread,
        Some(Stage::Nic) if attempts < ATTEMPTS => Settle::Restore { forced: forgets },
        // What is asked for then can be done: its program keeps what it has received.
        Some(Stage::Nic) if ends => Settle::Wait,
        Some(Stage::Nic) => Settle::Operate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Waits: for nothing. `ATTEMPTS` counts restores of a connection, not tries of this test.
    const MOST: u8 = ATTEMPTS;

    #[test]
    fn what_is_needed_in_the_kernel_is_restored_so_often_and_no_more() {
        for forgets in [false, true] {
            for attempts in 0..MOST {
                let restore = Settle::Restore { forced: forgets };
                assert_eq!(settle(Some(Stage::Nic), false, forgets, attempts), restore);
                assert_eq!(settle(Some(Stage::Nic), true, forgets, attempts), restore, "the NIC says that it has ended");
            }
            assert_eq!(settle(Some(Stage::Nic), false, forgets, MOST), Settle::Operate, "it is given up, or refused");
            assert_eq!(settle(Some(Stage::Nic), true, forgets, MOST), Settle::Wait);
        }
    }

    #[test]
    fn elsewhere_no_attempt_is_needed() {
        for (forgets, attempts) in [(false, 0), (true, 0), (false, MOST), (true, MOST)] {
            assert_eq!(settle(None, false, forgets, attempts), Settle::Operate);
            assert_eq!(settle(Some(Stage::Kernel), false, forgets, attempts), Settle::Operate);
            assert_eq!(settle(Some(Stage::Offloading), false, forgets, attempts), Settle::CallOff);
            let ended = if forgets { Settle::GiveUpUnread } else { Settle::Operate };
            assert_eq!(settle(Some(Stage::Ended), false, forgets, attempts), ended);
        }
    }
}
