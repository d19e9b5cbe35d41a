//! Groups of sessions: a program and the processes that it starts. Their connections may be moved at random, and are
//! reported together.

use crate::connection::Connection;
use crate::counts::counter;
use baton_core::{Taken, Users};
use baton_linux::events::monotonic_micros;
use baton_linux::files;
use baton_linux::foreign::{self, Foreign};
use baton_log::warning;
use baton_moves::Refusal;
use baton_protocol::program::Flip;
use baton_protocol::report::{NOT_ASKED, Report};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Time for which a group without sessions is kept, in microseconds: a script's next command may come late.
const UNUSED: u64 = 3_600_000_000;

/// A group.
pub(crate) struct Group {
    user: u32,
    /// Number of open sessions, and the time since which there are none, in microseconds of the monotonic clock.
    sessions: u32,
    unused_since: u64,
    pub flip: Option<Flip>,
    pub report: Report,
    file: Option<Arc<ReportFile>>,
    /// The file's descriptor.
    _taken: Taken,
    random: u64,
}

impl Group {
    pub fn new(user: u32, flip: Option<Flip>, file: Option<Foreign>) -> Group {
        let random = flip.map_or(0, |flip| flip.seed);
        Group {
            user,
            sessions: 0,
            unused_since: monotonic_micros(),
            flip,
            report: Report::default(),
            file: file.map(|fd| Arc::new(ReportFile { fd, next: Mutex::default() })),
            _taken: Taken::default(),
            random,
        }
    }

    /// Counts its file's descriptor as its user's.
    pub fn count_as(&mut self, users: &mut Users) {
        self._taken = users.take(self.user, u64::from(self.has_file()));
    }

    /// Returns the time until a connection's next move, in microseconds, if its group moves them at random.
    pub fn interval(&mut self) -> Option<u64> {
        let flip = self.flip?;
        let random = splitmix(&mut self.random);
        // Requests have been checked; a group that the keeper holds from an earlier version may not have been.
        let (min, max) = (flip.min.clamp(1, Flip::LONGEST), flip.max.clamp(1, Flip::LONGEST));
        Some(min + random % (max.saturating_sub(min) + 1))
    }

    /// Counts a connection that its program needed in the kernel, for this reason.
    pub fn gave_back(&mut self, reason: &str) {
        *counter(&mut self.report.given_back, reason) += 1;
    }

    /// Counts a move that was refused.
    pub fn stayed(&mut self, refusal: &Refusal) {
        *counter(&mut self.report.stayed, &refusal.to_string()) += 1;
        match refusal {
            Refusal::Lost(..) => self.report.resets += 1,
            Refusal::System(..) => self.report.errors += 1,
            _ => {}
        }
    }

    /// Counts a connection that is removed, by its number of moves.
    pub fn forgotten(&mut self, connection: &Connection) {
        *self.report.connections_by_moves.entry(connection.made).or_default() += 1;
        if connection.made == 0 {
            let reason: &str = if connection.reason.is_empty() { NOT_ASKED } else { &connection.reason };
            let longest = counter(&mut self.report.unmoved, reason);
            *longest = (monotonic_micros().saturating_sub(connection.since) / 1000).max(*longest);
        }
    }

    /// Whether its report is written into a file.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Has the report written as one line into its file, in place of what is there, by a thread of its user: the file
    /// may be one of a server that does not answer. `then` is done when it is there; at once if there is no file.
    pub fn write(&mut self, then: Option<Box<dyn FnOnce() + Send>>) {
        let line = serde_json::to_string(&self.report);
        let (Some(file), Ok(line)) = (&self.file, line) else { return then.into_iter().for_each(|then| then()) };
        let mut next = file.next.lock().unwrap_or_else(PoisonError::into_inner);
        next.then.extend(then);
        // If one waits to be written, the file's thread finds this one in its place.
        if next.line.replace(line + "\n").is_none() {
            let file = file.clone();
            drop(next);
            foreign::run_for(self.user, move || file.write());
        }
    }
}

/// The file of a report.
struct ReportFile {
    fd: Foreign,
    next: Mutex<Next>,
}

/// What is to be written into it next, and what is to be done then.
#[derive(Default)]
struct Next {
    line: Option<String>,
    then: Vec<Box<dyn FnOnce() + Send>>,
}

impl ReportFile {
    fn write(&self) {
        let Next { line, then } = std::mem::take(&mut *self.next.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(line) = line
            && let Err(error) = files::replace(self.fd.as_fd(), line.as_bytes())
        {
            warning!([] "a report cannot be written: {error}"; "free space where `--flip-report` leads");
        }
        then.into_iter().for_each(|then| then());
    }
}

/// Returns the next pseudorandom number (Steele, Lea and Flood's SplitMix64).
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// All groups, by name.
#[derive(Default)]
pub(crate) struct Groups {
    groups: HashMap<u64, Group, std::hash::BuildHasherDefault<std::hash::DefaultHasher>>,
}

impl Groups {
    pub fn add(&mut self, name: u64, group: Group) {
        self.groups.insert(name, group);
    }

    /// Counts a session of the group that was opened.
    pub fn joined(&mut self, name: u64) {
        if let Some(group) = self.groups.get_mut(&name) {
            group.sessions += 1;
        }
    }

    /// Uncounts a session of the group that has ended.
    pub fn left(&mut self, name: u64) {
        if let Some(group) = self.groups.get_mut(&name) {
            group.sessions = group.sessions.saturating_sub(1);
            group.unused_since = monotonic_micros();
        }
    }

    /// Makes room for another group of a user, who may have `most`. Removes groups that have been unused for a long
    /// time, and the user's oldest unused one if there is no room otherwise. Returns the names of the removed groups.
    ///
    /// # Errors
    /// If all of the user's groups are in use.
    pub fn make_room(&mut self, user: u32, most: u32) -> Result<Vec<u64>, String> {
        let now = monotonic_micros();
        let unused = |group: &Group| group.sessions == 0;
        let old = self.groups.iter().filter(|(_, group)| unused(group) && group.unused_since + UNUSED < now);
        let mut ended: Vec<u64> = old.map(|(name, _)| *name).collect();
        ended.iter().for_each(|name| self.remove(*name));
        let mine = self.groups.iter().filter(|(_, group)| group.user == user);
        if mine.clone().count() >= most as usize {
            let oldest =
                mine.filter(|(_, group)| unused(group)).min_by_key(|(_, group)| group.unused_since).map(|(name, _)| *name);
            let Some(oldest) = oldest else {
                return Err(format!("user {user} has {most} groups of sessions, as many as each may (--groups-per-user)"));
            };
            self.remove(oldest);
            ended.push(oldest);
        }
        Ok(ended)
    }

    /// Removes a group. Its file, which may not close, is closed for its user, whoever's request makes room.
    fn remove(&mut self, name: u64) {
        if let Some(group) = self.groups.remove(&name) {
            let _user = foreign::on_behalf_of(group.user);
            drop(group);
        }
    }

    pub fn has(&self, name: u64) -> bool {
        self.groups.contains_key(&name)
    }

    pub fn get(&mut self, name: u64) -> Option<&mut Group> {
        self.groups.get_mut(&name)
    }

    /// Writes a group's report, after something of the group has ended. `then` is done when it has been written: see
    /// [`Group::write`].
    pub fn write(&mut self, name: u64, then: Option<Box<dyn FnOnce() + Send>>) {
        match self.get(name) {
            Some(group) => group.write(then),
            None => then.into_iter().for_each(|then| then()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Block;
    use baton_abi::layout::session;
    use baton_shm::Region;
    use baton_wire::{Endpoint, Flow};
    use std::fs::File;
    use std::os::fd::OwnedFd;

    /// Numbers that nobody has.
    const ITS: u32 = 4_000_000_002;
    const OTHER: u32 = 4_000_000_003;

    #[test]
    fn a_groups_file_is_closed_for_its_user() {
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock().expect("no panic");
        let waits = gate.clone();
        foreign::run_for(ITS, move || drop(waits.lock()));
        let mut groups = Groups::default();
        for name in 0..40 {
            let file = File::open("/dev/null").expect("a file");
            groups.add(name, Group::new(ITS, None, Some(Foreign::from(OwnedFd::from(file)))));
        }
        // In a request of another user's.
        let _other = foreign::on_behalf_of(OTHER);
        (0..40).for_each(|name| groups.remove(name));
        assert!(foreign::is_stuck(ITS) && !foreign::is_stuck(OTHER));
        drop(held);
    }

    /// No move was due for the first one.
    #[test]
    fn each_connection_that_never_moved_has_a_reason() {
        let end = |host| Endpoint::v4([10, 0, 0, host], 80);
        let flow = Flow { local: end(1), remote: end(2), device: 0 };
        let block = Block::new(Arc::new(Region::private(session::HEAP).expect("memory")), 0);
        let mut connection = Connection::new(None, flow, flow.local.into(), flow.remote.into(), block);
        let mut group = Group::new(0, None, None);
        group.forgotten(&connection);
        connection.reason = "fork".into();
        group.forgotten(&connection);
        assert!(group.report.unmoved.keys().eq(["fork", NOT_ASKED]), "{:?}", group.report);
    }

    #[test]
    fn groups_end_when_nobody_uses_them_and_room_is_needed() {
        let mut groups = Groups::default();
        let add = |groups: &mut Groups, name, user| {
            let ended = groups.make_room(user, 2);
            if ended.is_ok() {
                groups.add(name, Group::new(user, None, None));
            }
            ended
        };
        assert_eq!(
            (add(&mut groups, 1, 1000), add(&mut groups, 2, 1000), add(&mut groups, 3, 1001)),
            (Ok(vec![]), Ok(vec![]), Ok(vec![]))
        );
        groups.joined(1);
        assert_eq!(add(&mut groups, 4, 1000), Ok(vec![2]), "the one that is not used; not the other user's");
        groups.joined(4);
        let refused = add(&mut groups, 5, 1000).unwrap_err();
        assert!(refused.contains("user 1000 has 2 groups"), "{refused}");
        groups.left(1);
        assert_eq!(add(&mut groups, 5, 1000), Ok(vec![1]));
        if let Some(group) = groups.get(3) {
            group.unused_since = 0;
        }
        if monotonic_micros() > UNUSED {
            assert_eq!(groups.make_room(1000, 9), Ok(vec![3]), "it has not been used for long");
        }
    }
}
