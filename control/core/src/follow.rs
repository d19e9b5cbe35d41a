//! What follows the end of a move, and which moves begin although nobody asks for them then.

use crate::stage::Stage;
use baton_moves::{Conclusion, Refusal};
use baton_supervision::{LONGEST_RETRY, Retry};

/// Microseconds after which a connection that has to leave the NIC, and has not, is restored again.
const AGAIN: u64 = 1_000;

/// Microseconds after which a connection that had to leave the NIC, although a move there was requested, is offloaded
/// again; and most time between two looks at one that is put off.
pub const LATER: u64 = 1_000_000;

/// Microseconds after which a connection is offloaded again that has left a NIC for another one: the kernel may have to
/// find the link address of the next hop.
const ONWARD: u64 = 20_000;

/// A connection, as far as it counts for its next move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Where it is.
    pub stage: Stage,
    /// It may go to the NIC although nobody asks for that now.
    pub wanted: bool,
    /// It has to leave the NIC.
    pub must_return: bool,
    /// Its program did not leave an operation in time lately.
    pub put_off: bool,
    /// It is an attacher's, which moves it when it is asked to.
    pub attached: bool,
    /// It has left a NIC because its route leads elsewhere, and may go to another NIC.
    pub onward: bool,
}

/// What follows the end of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing, or something else that has to happen first.
    Nothing,
    /// It is on the NIC: refusals before do not count any more.
    Arrived,
    /// It has left the NIC, as it had to: refusals before do not count any more. If it is wanted there, it is looked at
    /// again after so many microseconds.
    Returned(Option<u64>),
    /// Its socket has the connection no more: the NIC gives that up.
    Cut,
    /// It goes to the NIC again as soon as the NIC's crash loop lets it.
    WhenLet,
    /// It is looked at again after so many microseconds.
    Again(u64),
    /// It is tried again after a pause that doubles with each refusal, up to so many microseconds.
    Retry(u64),
}

impl Next {
    /// Notes it in the connection's tries. Returns the microseconds after which the connection is looked at again, if
    /// it is. `wait`: for how many the NIC's crash loop keeps it away, if it does.
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

/// What follows a move that has ended like this, for a connection that stands so now.
pub fn follow(conclusion: &Conclusion, connection: &Standing) -> Next {
    let Standing { stage, wanted, .. } = *connection;
    // Not after a growth: what asked for the restore begins it when the growth has ended.
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
        // Sooner than the next poll, which would find the same.
        Conclusion::Stays(refusal) if refusal.is_of_lost_socket() && stage == Stage::Nic => Next::Cut,
        // An attacher's program stands still: its move is not queued until the devices are attached.
        Conclusion::Stays(Refusal::Attaching) if wanted && connection.attached && stage == Stage::Kernel => {
            Next::Retry(LONGEST_RETRY)
        }
        Conclusion::Stays(_) if cfg!(feature = "sabotage-lose-retry") => Next::Nothing,
        Conclusion::Stays(refusal) if wanted && cannot_go(conclusion, stage) && !refusal.is_for_good() => {
            // It may pass with the connection's next packet, or as soon as a process lets others look.
            let passes = matches!(refusal, Refusal::Unproved | Refusal::Unsearched);
            Next::Retry(if passes { LATER } else { LONGEST_RETRY })
        }
        _ => Next::Nothing,
    }
}

/// Whether a connection in the kernel cannot go to a NIC for another reason than that this is full, that it is not hot
/// enough, or that something is being found out, for which it waits elsewhere. It is tried again later, ever more
/// rarely, if that can pass.
pub fn cannot_go(conclusion: &Conclusion, stage: Stage) -> bool {
    let Conclusion::Stays(refusal) = conclusion else { return false };
    let waits = matches!(refusal, Refusal::Attaching | Refusal::Searching | Refusal::Full | Refusal::Cold);
    stage == Stage::Kernel && !waits && !refusal.is_overtaken()
}

/// A move that nobody asks for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unasked {
    /// To the NIC.
    Offload,
    /// To the kernel.
    Restore,
}

/// The move that takes a connection to where it is not and should be, if there is one. `flips`: its group moves
/// connections at random. One whose program was inside an operation for too long the last time stays.
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

    /// Who cannot go for another reason is tried again like any other, and waits for no room meanwhile.
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
