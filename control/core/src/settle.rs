//! What is done with a connection that is needed in the kernel: for example because its program closes it, or makes a
//! call that only the kernel can serve.

use crate::stage::Stage;

/// Attempts to restore a connection for an operation that only the kernel can do.
pub const ATTEMPTS: u8 = 2;

/// The next thing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settle {
    /// The operation: the connection is in the kernel, has ended, or could not be restored.
    Operate,
    /// The unread bytes of a connection that has ended are given up; then the operation.
    GiveUpUnread,
    /// Nothing now: this is decided again when the move in progress has ended.
    Wait,
    /// The move to the NIC is called off; this is decided again when it has ended.
    CallOff,
    /// The connection is restored, as one more attempt; this is decided again when that has ended.
    Restore {
        /// The restore continues even if the program does not leave the connection in time.
        forced: bool,
    },
}

/// What is done with a connection at this stage, after so many attempts to restore it. `stage` is None if the
/// connection no longer exists. `ends`: it has ended on the NIC, which has not answered yet. `forgets`: its program has
/// closed it.
pub fn settle(stage: Option<Stage>, ends: bool, forgets: bool, attempts: u8) -> Settle {
    match stage {
        None | Some(Stage::Kernel) => Settle::Operate,
        Some(Stage::Offloading) => Settle::CallOff,
        // The program may still read the received bytes.
        Some(Stage::Ended) if !forgets => Settle::Operate,
        Some(Stage::Ended) => Settle::GiveUpUnread,
        Some(Stage::Nic) if attempts < ATTEMPTS => Settle::Restore { forced: forgets },
        // Wait for the NIC's answer: then the request can be served, and the program keeps the received bytes.
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
