//! Limits on each user's share of an agent's resources, so that no user can take all of them. Root and the agent's own
//! user are not limited: they can end the agent, and raise its limits.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use baton_moves::Refusal;
use core::sync::atomic::{AtomicU64, Ordering};
use serde::{Deserialize, Serialize};

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

/// File descriptors that an agent keeps free for its own use: moves, the next NIC process and reads of /proc need some.
/// A request whose descriptor would leave fewer is refused, and its connection stays in the kernel.
const RESERVE: u64 = 32;

/// An agent that may have more descriptors than this also keeps as many free as can come with one message: the kernel
/// would close those for which the table has no room, in the agent's loop.
const ENOUGH: u64 = 1024;

/// Descriptors of the agent that an object of a user's takes, counted until this is dropped.
#[derive(Debug, Default)]
pub struct Taken {
    /// The user's count of all of them.
    all: Arc<AtomicU64>,
    count: u64,
}

impl Taken {
    /// Counts so many more.
    pub fn add(&mut self, more: u64) {
        self.count += more;
        self.all.fetch_add(more, Ordering::Relaxed);
    }

    /// Counts so many less.
    pub fn take_away(&mut self, less: u64) {
        let less = less.min(self.count);
        self.count -= less;
        self.all.fetch_sub(less, Ordering::Relaxed);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.take_away(self.count);
    }
}

/// A user's present use.
#[derive(Debug, Default)]
struct Has {
    /// Control connections.
    connections: u32,
    /// Open sessions.
    sessions: u32,
    /// Descriptors for connections, listeners, UDP sockets and reports.
    taken: Arc<AtomicU64>,
}

impl Has {
    fn is_nothing(&self) -> bool {
        self.connections == 0 && self.sessions == 0 && Arc::strong_count(&self.taken) == 1
    }
}

/// The present use of all users.
#[derive(Debug)]
pub struct Users {
    limits: Limits,
    own: u32,
    /// Most descriptors of the agent's, and those of them that it keeps free.
    descriptors: u64,
    reserve: u64,
    /// Most descriptors that an open session takes: its memory, a doorbell for each NIC, and its UDP socket if it is
    /// one for messages.
    of_session: u64,
    have: BTreeMap<u32, Has>,
}

impl Users {
    /// No user uses anything yet. The agent's user is `own`; it has so many NICs, and may have so many descriptors, of
    /// which at most `with_message` come with one message.
    pub fn new(limits: Limits, own: u32, nics: usize, (descriptors, with_message): (u64, u64)) -> Users {
        let reserve = RESERVE + if descriptors > ENOUGH { with_message } else { 0 };
        Users { limits, own, descriptors, reserve, of_session: 2 + nics as u64, have: BTreeMap::new() }
    }

    /// How many descriptors the agent has left beside a new one with this number, those that it keeps free and
    /// `besides`: the kernel gives out the lowest number that is free.
    ///
    /// # Errors
    /// If none is left.
    pub fn descriptors_left(&self, number: u64, besides: u64) -> Result<u64, Refusal> {
        match self.descriptors.saturating_sub(number + self.reserve + besides) {
            0 => Err(Refusal::NoDescriptors(self.descriptors)),
            left => Ok(left),
        }
    }

    fn may_have_any_number(&self, user: u32) -> bool {
        user == 0 || user == self.own
    }

    /// Counts descriptors that the agent needs for an object of a user's, until the result is dropped.
    pub fn take(&mut self, user: u32, count: u64) -> Taken {
        let mut taken = Taken { all: self.have.entry(user).or_default().taken.clone(), count: 0 };
        taken.add(count);
        taken
    }

    /// Checks whether a user may get one more descriptor while the agent has so many `left`. A user may have as many as
    /// are left for all others: so the first user gets at most half of all, the next one half of the rest, and some are
    /// always free for another user. Control connections are counted separately, so that a user at the limit can still
    /// list its connections.
    ///
    /// # Errors
    /// If the user has its share.
    pub fn may_take(&self, user: u32, left: u64) -> Result<(), Refusal> {
        let of = |has: &Has| u64::from(has.sessions) * self.of_session + has.taken.load(Ordering::Relaxed);
        if self.may_have_any_number(user) || self.have.get(&user).map_or(0, of) < left {
            Ok(())
        } else {
            Err(Refusal::ShareTaken(user))
        }
    }

    /// Counts a new control connection, while the agent has so many descriptors `left`: a user may have as many control
    /// connections as are left. `unclosed` of its earlier ones have ended, but their descriptors are not closed yet.
    ///
    /// # Errors
    /// If the user has as many as allowed.
    pub fn connects(&mut self, user: u32, left: u64, unclosed: u64) -> Result<(), String> {
        let unlimited = self.may_have_any_number(user);
        let most = u64::from(self.limits.sessions.saturating_add(TOOLS)).min(left.saturating_sub(unclosed));
        let Has { connections, .. } = self.have.entry(user).or_default();
        if u64::from(*connections) >= most && !unlimited {
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
        let Has { sessions, .. } = self.have.entry(user).or_default();
        if *sessions >= self.limits.sessions && !unlimited {
            let most = self.limits.sessions;
            return Err(format!("user {user} has {sessions} sessions, of {most} that each user may have (--sessions-per-user)"));
        }
        *sessions += 1;
        Ok(())
    }

    /// Uncounts a session that could not be opened.
    pub fn fails_to_open(&mut self, user: u32) {
        if let Some(has) = self.have.get_mut(&user) {
            has.sessions = has.sessions.saturating_sub(1);
        }
    }

    /// Uncounts a control connection, and its session if that was `open`.
    pub fn leaves(&mut self, user: u32, open: bool) {
        let Some(has) = self.have.get_mut(&user) else { return };
        has.connections = has.connections.saturating_sub(1);
        has.sessions = has.sessions.saturating_sub(u32::from(open));
        if has.is_nothing() {
            self.have.retain(|_, has| !has.is_nothing());
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
    use alloc::string::ToString;
    use alloc::vec::Vec;

    /// The agent's user, and more descriptors than these tests need.
    const OWN: u32 = 7;
    const MANY: u64 = 1000;

    impl Users {
        fn of_others(limits: Limits) -> Users {
            Users::new(limits, OWN, 1, (MANY, 253))
        }
    }

    #[test]
    fn no_user_takes_what_others_may_have() {
        let mut users = Users::of_others(Limits { sessions: 2, groups: 1 });
        for user in [1000, 1001] {
            for _ in 0..2 {
                users.connects(user, MANY, 0).unwrap();
                users.opens(user).unwrap();
            }
            let refused = users.opens(user).unwrap_err();
            assert!(refused.contains(&user.to_string()) && refused.contains("of 2"), "{refused}");
        }
        users.leaves(1000, true);
        assert_eq!((users.opens(1000).is_ok(), users.opens(1000).is_ok()), (true, false));
        for user in [0, OWN] {
            assert!((0..200).all(|_| users.connects(user, MANY, 0).is_ok() && users.opens(user).is_ok()));
        }
        assert!((0..TOOLS).all(|_| users.connects(1001, MANY, 0).is_ok()));
        assert!(users.connects(1001, MANY, 0).is_err());
        (0..2 + TOOLS).for_each(|at| users.leaves(1001, at < 2));
        assert!(!users.have.contains_key(&1001));
    }

    /// Users take descriptors until they are refused: there are some for the next one, and for tools of the first.
    #[test]
    fn no_user_takes_all_descriptors() {
        let mut users = Users::of_others(Limits::default());
        let mut taken: Vec<Taken> = Vec::new();
        let left = |taken: &[Taken]| MANY - taken.len() as u64;
        for (user, share) in [(1000, 500), (1001, 250), (1002, 125)] {
            let before = taken.len();
            while users.may_take(user, left(&taken)).is_ok() {
                taken.push(users.take(user, 1));
            }
            assert_eq!(taken.len() - before, share, "user {user}");
            assert_eq!(users.may_take(user, left(&taken)), Err(Refusal::ShareTaken(user)));
        }
        assert!(users.connects(1000, left(&taken), 0).is_ok());
        assert!([0, OWN].iter().all(|user| users.may_take(*user, 1).is_ok()));
        taken.drain(..500);
        assert!(users.may_take(1000, left(&taken)).is_ok());
        users.leaves(1000, false);
        assert!(!users.have.contains_key(&1000) && users.have.contains_key(&1001));
    }

    #[test]
    fn the_agent_keeps_some_descriptors_for_itself() {
        let users = Users::of_others(Limits::default());
        assert_eq!(users.descriptors_left(7, 16), Ok(MANY - 7 - 16 - RESERVE));
        assert_eq!(users.descriptors_left(MANY - RESERVE - 1, 0), Ok(1));
        assert_eq!(users.descriptors_left(MANY - RESERVE, 0), Err(Refusal::NoDescriptors(MANY)));
        assert_eq!(users.descriptors_left(MANY, MANY), Err(Refusal::NoDescriptors(MANY)));
        let users = Users::new(Limits::default(), OWN, 1, (2 * ENOUGH, 253));
        assert_eq!(users.descriptors_left(7, 0), Ok(2 * ENOUGH - 7 - RESERVE - 253));
    }

    /// Sessions count with all their descriptors, and control connections are counted separately.
    #[test]
    fn sessions_and_control_connections_have_a_share() {
        let mut users = Users::of_others(Limits::default());
        (0..10).for_each(|_| users.opens(1000).unwrap());
        assert!(users.may_take(1000, 31).is_ok() && users.may_take(1000, 30).is_err());
        let connected = (0..100).take_while(|at| users.connects(1000, 100 - at, 0).is_ok()).count();
        assert_eq!(connected, 50);
        assert!(users.connects(1000, 100, 49).is_ok() && users.connects(1000, 100, 49).is_err());
    }
}
