//! Limits on what each user may have of an agent, so that none can take all of it. Root and the agent's own user are
//! not limited.

use baton_linux::process;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

/// Limits for each user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Open sessions: processes with connections.
    pub sessions: u32,
    /// Groups of sessions: programs that were started by `baton run` or `baton attach`.
    pub groups: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { sessions: 1024, groups: 256 }
    }
}

/// Control connections that a user may have besides its sessions'.
const TOOLS: u32 = 64;

/// What users have now.
#[derive(Debug)]
pub(crate) struct Users {
    limits: Limits,
    own: u32,
    /// Number of control connections and of open sessions, by user.
    have: HashMap<u32, (u32, u32), BuildHasherDefault<DefaultHasher>>,
}

impl Users {
    pub fn new(limits: Limits) -> Users {
        Users { limits, own: process::user(), have: HashMap::default() }
    }

    fn may_have_any_number(&self, user: u32) -> bool {
        user == 0 || user == self.own
    }

    /// Counts a new control connection.
    ///
    /// # Errors
    /// If the user has as many as allowed.
    pub fn connects(&mut self, user: u32) -> Result<(), String> {
        let unlimited = self.may_have_any_number(user);
        let most = self.limits.sessions.saturating_add(TOOLS);
        let (connections, _) = self.have.entry(user).or_default();
        if *connections >= most && !unlimited {
            return Err(format!("user {user} has {connections} connections to this agent, and may have no more"));
        }
        *connections += 1;
        Ok(())
    }

    /// Counts a session that is opened.
    ///
    /// # Errors
    /// If the user has as many as allowed.
    pub fn opens(&mut self, user: u32) -> Result<(), String> {
        let unlimited = self.may_have_any_number(user);
        let (_, sessions) = self.have.entry(user).or_default();
        if *sessions >= self.limits.sessions && !unlimited {
            let most = self.limits.sessions;
            return Err(format!("user {user} has {sessions} sessions, of {most} that each user may have (--sessions-per-user)"));
        }
        *sessions += 1;
        Ok(())
    }

    /// Uncounts a session that could not be opened.
    pub fn fails_to_open(&mut self, user: u32) {
        if let Some((_, sessions)) = self.have.get_mut(&user) {
            *sessions = sessions.saturating_sub(1);
        }
    }

    /// Uncounts a control connection, and its session if that was `open`.
    pub fn leaves(&mut self, user: u32, open: bool) {
        if let Some((connections, sessions)) = self.have.get_mut(&user) {
            *connections = connections.saturating_sub(1);
            *sessions = sessions.saturating_sub(u32::from(open));
            if (*connections, *sessions) == (0, 0) {
                self.have.remove(&user);
            }
        }
    }

    /// Returns the number of groups that a user may have.
    pub fn groups(&self, user: u32) -> u32 {
        if self.may_have_any_number(user) { u32::MAX } else { self.limits.groups }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_takes_what_others_may_have() {
        let mut users = Users { limits: Limits { sessions: 2, groups: 1 }, own: 7, have: HashMap::default() };
        for user in [1000, 1001] {
            for _ in 0..2 {
                users.connects(user).unwrap();
                users.opens(user).unwrap();
            }
            let refused = users.opens(user).unwrap_err();
            assert!(refused.contains(&user.to_string()) && refused.contains("of 2"), "{refused}");
        }
        users.leaves(1000, true);
        assert_eq!((users.opens(1000).is_ok(), users.opens(1000).is_ok()), (true, false));
        for user in [0, 7] {
            assert!((0..200).all(|_| users.connects(user).is_ok() && users.opens(user).is_ok()));
        }
        assert!((0..TOOLS).all(|_| users.connects(1001).is_ok()));
        assert!(users.connects(1001).is_err());
        (0..2 + TOOLS).for_each(|at| users.leaves(1001, at < 2));
        assert!(!users.have.contains_key(&1001));
    }
}
