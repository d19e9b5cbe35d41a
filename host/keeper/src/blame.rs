//! Decides whether agents die of the state that they are given. State that ends two agents is withheld from the next
//! one, so that everything else goes on.

/// State that the next agent is not given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Withhold {
    Nothing,
    /// How groups' connections move at random, and their reports.
    Groups,
    /// A session, with all its connections.
    Session(u32),
    /// All sessions, and the journal of moves.
    Everything,
    /// Nothing that could be withheld is left.
    GiveUp,
}

/// The keeper gives up after this many deaths in a row of agents that were not ready yet.
const HASTY_DEATHS: u32 = 5;

/// The recent deaths.
#[derive(Debug, Default)]
pub(crate) struct Blame {
    hasty: u32,
    suspect: Option<u32>,
}

impl Blame {
    /// Records an agent's death: whether it had become ready, whether it ended by itself rather than by a signal from
    /// outside, and which session it was serving.
    pub fn judge(&mut self, ready: bool, by_itself: bool, session: Option<u32>) -> Withhold {
        self.hasty = if ready { 0 } else { self.hasty + 1 };
        let suspect = session.filter(|_| by_itself);
        if suspect.is_some() && std::mem::replace(&mut self.suspect, suspect) == suspect {
            *self = Blame::default();
            return suspect.map_or(Withhold::Nothing, Withhold::Session);
        }
        self.suspect = suspect;
        match self.hasty {
            0 | 1 => Withhold::Nothing,
            2 => Withhold::Groups,
            HASTY_DEATHS.. => Withhold::GiveUp,
            _ => Withhold::Everything,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_ends_two_agents_is_withheld() {
        let mut blame = Blame::default();
        assert_eq!(blame.judge(true, true, Some(3)), Withhold::Nothing);
        assert_eq!(blame.judge(true, true, Some(4)), Withhold::Nothing, "another one");
        assert_eq!(blame.judge(false, true, Some(4)), Withhold::Session(4));
        assert_eq!(blame.judge(false, true, Some(4)), Withhold::Nothing, "counted anew");
    }

    #[test]
    fn a_killed_agent_is_no_evidence() {
        let mut blame = Blame::default();
        for _ in 0..10 {
            assert_eq!(blame.judge(true, false, Some(3)), Withhold::Nothing);
        }
    }

    #[test]
    fn groups_are_withheld_first_then_all_sessions() {
        let mut blame = Blame::default();
        let judged: Vec<Withhold> = (0..5).map(|_| blame.judge(false, true, None)).collect();
        assert_eq!(judged, [Withhold::Nothing, Withhold::Groups, Withhold::Everything, Withhold::Everything, Withhold::GiveUp]);
    }
}
