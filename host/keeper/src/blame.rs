//! Whether agents die of what they are given. A program's state that ends two agents is set aside, so that all others go on.

/// What the next agent is not given any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Aside {
    Nothing,
    /// How groups' connections move, and their reports.
    Groups,
    /// A session, with all that is its.
    Session(u32),
    /// All sessions, and the journal of moves.
    Everything,
    /// Nothing helps.
    GiveUp,
}

/// Deaths in a row before an agent was ready that are followed by another try.
const HASTY_DEATHS: u32 = 5;

/// What the last deaths have shown.
#[derive(Debug, Default)]
pub(crate) struct Blame {
    hasty: u32,
    suspect: Option<u32>,
}

impl Blame {
    /// An agent has died: whether it had become ready, whether it ended by itself rather than by somebody's signal, and which session it
    /// was seeing to.
    pub fn judge(&mut self, ready: bool, by_itself: bool, session: Option<u32>) -> Aside {
        self.hasty = if ready { 0 } else { self.hasty + 1 };
        let suspect = session.filter(|_| by_itself);
        if suspect.is_some() && std::mem::replace(&mut self.suspect, suspect) == suspect {
            *self = Blame::default();
            return suspect.map_or(Aside::Nothing, Aside::Session);
        }
        self.suspect = suspect;
        match self.hasty {
            0 | 1 => Aside::Nothing,
            2 => Aside::Groups,
            HASTY_DEATHS.. => Aside::GiveUp,
            _ => Aside::Everything,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_ends_two_agents_is_set_aside() {
        let mut blame = Blame::default();
        assert_eq!(blame.judge(true, true, Some(3)), Aside::Nothing);
        assert_eq!(blame.judge(true, true, Some(4)), Aside::Nothing, "another one");
        assert_eq!(blame.judge(false, true, Some(4)), Aside::Session(4));
        assert_eq!(blame.judge(false, true, Some(4)), Aside::Nothing, "counted anew");
    }

    #[test]
    fn an_agent_that_was_killed_blames_nobody() {
        let mut blame = Blame::default();
        for _ in 0..10 {
            assert_eq!(blame.judge(true, false, Some(3)), Aside::Nothing);
        }
    }

    #[test]
    fn groups_are_set_aside_first_then_all_sessions() {
        let mut blame = Blame::default();
        let judged: Vec<Aside> = (0..5).map(|_| blame.judge(false, true, None)).collect();
        assert_eq!(judged, [Aside::Nothing, Aside::Groups, Aside::Everything, Aside::Everything, Aside::GiveUp]);
    }
}
