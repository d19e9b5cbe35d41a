//! What the agent does after the end of a move, and which moves it begins without a request.

use crate::stage::Stage;
use baton_moves::{Conclusion, Refusal};
use baton_supervision::{LONGEST_RETRY, Retry};

/// Microseconds after which a restore is tried again for a connection that has to leave the NIC and is still there.
const AGAIN: u64 = 1_000;

/// Microseconds after which a connection that had to leave the NIC, although it was requested to be there, is offloaded
/// again; and the longest time between two checks of a connection that is put off.
pub const LATER: u64 = 1_000_000;

/// Microseconds after which a connection that has left a NIC for another one is offloaded again: the kernel may have to
/// resolve the link address of the next hop first.
const ONWARD: u64 = 20_000;

/// The properties of a connection that decide about its next move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Where it is.
    pub stage: Stage,
    /// It may go to the NIC without a request.
    pub wanted: bool,
    /// It has to leave the NIC.
    pub must_return: bool,
    /// At its last move its program did not leave an operation in time.
    pub put_off: bool,
    /// It belongs to an attacher, which moves it when it is asked to.
    pub attached: bool,
    /// It has left a NIC because its route leads elsewhere, and may go to another NIC.
    pub onward: bool,
}

/// What the agent does after the end of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing, or something else has to happen first.
    Nothing,
    /// The connection is on the NIC: earlier refusals do not count any more.
    Arrived,
    /// The connection has left the NIC, as it had to: earlier refusals do not count any more. If it is wanted there, it
    /// is checked again after so many microseconds.
    Returned(Option<u64>),
    /// The socket has lost the connection: the NIC resets and drops it.
    Cut,
    /// It goes to the NIC again as soon as the crash-loop protection allows it.
    WhenLet,
    /// It is checked again after so many microseconds.
    Again(u64),
    /// It is tried again after a pause that doubles with each refusal, up to so many microseconds.
    Retry(u64),
}

impl Next {
    /// Records this in the connection's `retry`. Returns the microseconds after which the connection is checked again,
    /// or None. `wait`: microseconds for which the crash-loop protection keeps the connection off the NIC, if it does.
    pub fn after(self, retry: &mut Retry, wait: Option<u64>) -> Option<u64> {
        if matches!(self, Next::Arrived | Next::Returned(_)) {
            retry.clear();
        }
        match self {
            Next::Nothing | Next::Arrived | Next::Cut => None,
            Next::Returned(after) => after,
            Next::WhenLet => Some(wait.unwrap_or(0)),
            Next::Again(after) => Some(after),
            Next::Retry(longest) => Some(retry.refused(longest)),
        }
    }
}

/// What the agent does after a move with this conclusion, for a connection with these properties.
pub fn follow(conclusion: &Conclusion, connection: &Standing) -> Next {
    let Standing { stage, wanted, .. } = *connection;
    // Not after a growth: the restore that was requested meanwhile begins when the growth has ended.
    if connection.must_return && *conclusion != Conclusion::Grown {
        return match stage {
            Stage::Nic => Next::Again(AGAIN),
            _ if connection.onward => Next::Returned(Some(ONWARD)),
            _ => Next::Returned(wanted.then_some(LATER)),
        };
    }
    match conclusion {
        Conclusion::Moved if stage == Stage::Nic => Next::Arrived,
        Conclusion::Recovered if wanted => Next::WhenLet,
        // At once, instead of after the next poll, which would find the same.
        Conclusion::Stays(refusal) if refusal.is_of_lost_socket() && stage == Stage::Nic => Next::Cut,
        // An attacher stops its program for a move, so its move does not wait for the devices to be attached, but is
        // tried again later.
        Conclusion::Stays(Refusal::Attaching) if wanted && connection.attached && stage == Stage::Kernel => {
            Next::Retry(LONGEST_RETRY)
        }
        Conclusion::Stays(_) if cfg!(feature = "sabotage-lose-retry") => Next::Nothing,
        Conclusion::Stays(refusal) if wanted && cannot_go(conclusion, stage) && !refusal.is_for_good() => {
            // The reason may go away with the connection's next packet, or as soon as a process can be examined.
            let passes = matches!(refusal, Refusal::Unproved | Refusal::Unsearched);
            Next::Retry(if passes { LATER } else { LONGEST_RETRY })
        }
        _ => Next::Nothing,
    }
}

/// Whether a connection in the kernel cannot go to a NIC for a reason of its own: not because the NIC is full, the
/// connection is not hot enough, or an answer is awaited, which are handled elsewhere. If the reason can go away, the
/// connection is tried again later, at growing intervals.
pub fn cannot_go(conclusion: &Conclusion, stage: Stage) -> bool {
    let Conclusion::Stays(refusal) = conclusion else { return false };
    let waits = matches!(refusal, Refusal::Attaching | Refusal::Searching | Refusal::Full | Refusal::Cold);
    stage == Stage::Kernel && !waits && !refusal.is_overtaken()
}

/// A move without a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unasked {
    /// To the NIC.
    Offload,
    /// To the kernel.
    Restore,
}

/// The move, if any, that takes a connection to the place where it should be. `flips`: its group moves connections at
/// random. None for a connection whose program was inside an operation for too long at the last move.
pub fn unasked(connection: &Standing, flips: bool) -> Option<Unasked> {
    let put_off = connection.put_off && !connection.attached;
    match connection.stage {
        Stage::Kernel if connection.wanted && !put_off => Some(Unasked::Offload),
        Stage::Nic if (flips || connection.must_return) && !put_off => Some(Unasked::Restore),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_supervision::FIRST_RETRY;

    const KERNEL: Standing =
        Standing { stage: Stage::Kernel, wanted: true, must_return: false, put_off: false, attached: false, onward: false };
    const NIC: Standing = Standing { stage: Stage::Nic, ..KERNEL };
    const STAGES: [Stage; 4] = [Stage::Kernel, Stage::Offloading, Stage::Nic, Stage::Ended];

    fn stays(refusal: Refusal) -> Conclusion {
        Conclusion::Stays(refusal)
    }

    #[test]
    fn what_has_to_leave_the_nic_is_restored_until_it_has() {
        let must = |standing: Standing| Standing { must_return: true, ..standing };
        for conclusion in [stays(Refusal::Busy), stays(Refusal::NoRoute), Conclusion::Moved] {
            assert_eq!(follow(&conclusion, &must(NIC)), Next::Again(AGAIN), "{conclusion:?}");
        }
        assert_eq!(follow(&Conclusion::Moved, &must(KERNEL)), Next::Returned(Some(LATER)));
        assert_eq!(follow(&Conclusion::Recovered, &must(KERNEL)), Next::Returned(Some(LATER)));
        let unwanted = Standing { wanted: false, ..must(KERNEL) };
        assert_eq!(follow(&Conclusion::Moved, &unwanted), Next::Returned(None));
        let onward = Standing { onward: true, ..unwanted };
        assert_eq!(follow(&Conclusion::Moved, &onward), Next::Returned(Some(ONWARD)));
        let ended = Standing { stage: Stage::Ended, ..unwanted };
        assert_eq!(follow(&stays(Refusal::Ended), &ended), Next::Returned(None));
        assert_eq!(follow(&Conclusion::Grown, &must(NIC)), Next::Nothing, "it goes to the kernel next");
    }

    #[test]
    fn what_is_wanted_on_the_nic_is_tried_again_while_that_can_help() {
        for refusal in [Refusal::NoRoute, Refusal::Busy, Refusal::Shared, Refusal::Mptcp, Refusal::State("CLOSE-WAIT")] {
            let next = if refusal.is_for_good() { Next::Nothing } else { Next::Retry(LONGEST_RETRY) };
            assert_eq!(follow(&stays(refusal.clone()), &KERNEL), next, "{refusal}");
            assert_eq!(follow(&stays(refusal), &Standing { wanted: false, ..KERNEL }), Next::Nothing);
        }
        for refusal in [Refusal::Unproved, Refusal::Unsearched] {
            assert_eq!(follow(&stays(refusal), &KERNEL), Next::Retry(LATER));
        }
        for refusal in [Refusal::Full, Refusal::Cold, Refusal::Searching, Refusal::Attaching, Refusal::CalledOff] {
            assert_eq!(follow(&stays(refusal), &KERNEL), Next::Nothing);
        }
        let attached = Standing { attached: true, ..KERNEL };
        assert_eq!(follow(&stays(Refusal::Attaching), &attached), Next::Retry(LONGEST_RETRY));
        assert_eq!(follow(&Conclusion::Recovered, &KERNEL), Next::WhenLet);
        assert_eq!(follow(&Conclusion::Recovered, &Standing { wanted: false, ..KERNEL }), Next::Nothing);
    }

    #[test]
    fn tries_are_ever_rarer_until_the_connection_is_where_it_should_be() {
        let mut retry = Retry::default();
        let mut after = |next: Next| next.after(&mut retry, Some(77));
        assert_eq!([after(Next::Retry(LATER)), after(Next::Retry(LATER))], [Some(FIRST_RETRY), Some(2 * FIRST_RETRY)]);
        assert_eq!([Next::Again(AGAIN), Next::WhenLet].map(&mut after), [Some(AGAIN), Some(77)]);
        assert_eq!([Next::Nothing, Next::Cut].map(&mut after), [None; 2]);
        assert_eq!([Next::Retry(LATER), Next::Arrived].map(&mut after), [Some(4 * FIRST_RETRY), None]);
        assert_eq!([Next::Retry(LATER), Next::Returned(None)].map(&mut after), [Some(FIRST_RETRY), None], "it was there");
        assert_eq!([Next::Retry(LATER), Next::Returned(Some(ONWARD))].map(&mut after), [Some(FIRST_RETRY), Some(ONWARD)]);
        assert_eq!(Next::WhenLet.after(&mut retry, None), Some(0), "nothing keeps it away");
    }

    #[test]
    fn what_has_come_to_the_nic_or_lost_its_socket_there_is_told() {
        assert_eq!(follow(&Conclusion::Moved, &NIC), Next::Arrived);
        assert_eq!(follow(&Conclusion::Moved, &KERNEL), Next::Nothing, "it was asked to be there");
        for refusal in [Refusal::Swapped, Refusal::Closed("getpeername")] {
            assert_eq!(follow(&stays(refusal.clone()), &NIC), Next::Cut);
            assert_ne!(follow(&stays(refusal), &KERNEL), Next::Cut);
        }
        assert_eq!(follow(&stays(Refusal::Busy), &NIC), Next::Nothing);
        assert_eq!(follow(&Conclusion::Lost(Refusal::NicGone, true), &KERNEL), Next::Nothing);
    }

    /// A connection that cannot go for a reason of its own is tried again, and does not wait for room on the NIC
    /// meanwhile.
    #[test]
    fn who_cannot_go_does_not_wait_for_room() {
        let cannot = |refusal| cannot_go(&stays(refusal), Stage::Kernel);
        assert!([Refusal::NoRoute, Refusal::Unproved, Refusal::Mptcp].into_iter().all(cannot));
        let waits = [Refusal::Full, Refusal::Cold, Refusal::Searching, Refusal::Attaching];
        assert!(!waits.into_iter().any(cannot) && !cannot(Refusal::CalledOff));
        assert!(!cannot_go(&Conclusion::Moved, Stage::Nic) && !cannot_go(&stays(Refusal::NoRoute), Stage::Nic));
    }

    #[test]
    fn a_move_that_nobody_asks_for_leads_to_where_the_connection_should_be() {
        for stage in STAGES {
            for (wanted, must_return, flips) in
                [(false, false, false), (true, false, false), (false, true, false), (true, false, true)]
            {
                let standing = Standing { stage, wanted, must_return, ..KERNEL };
                let expected = match stage {
                    Stage::Kernel => wanted.then_some(Unasked::Offload),
                    Stage::Nic => (must_return || flips).then_some(Unasked::Restore),
                    Stage::Offloading | Stage::Ended => None,
                };
                assert_eq!(unasked(&standing, flips), expected, "{standing:?} {flips}");
                assert_eq!(unasked(&Standing { put_off: true, ..standing }, flips), None, "its program is slow");
                // Its program stands still while it moves.
                assert_eq!(unasked(&Standing { put_off: true, attached: true, ..standing }, flips), expected);
            }
        }
    }
}
