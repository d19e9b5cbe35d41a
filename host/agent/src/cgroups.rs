//! BPF programs attached to control groups, which judge what the groups' sockets send and receive, and what is done
//! with them. The kernel does not notify of attaching or detaching, so the groups are polled as long as the agent has
//! connections of theirs.

use baton_handoff::shell;
use baton_linux::events::monotonic_micros;
use baton_linux::{cgroups, process, starter};
use baton_moves::Refusal;
use baton_steering::{Group as Programs, programs_of};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Polling period, in microseconds.
const PERIOD: u64 = 50_000;
/// Age up to which an answer is used by a move, in microseconds: as long as one takes, and less than a poll's.
const FRESH: u64 = 10_000;

/// A control group's path from the root of the unified hierarchy.
pub(crate) type Name = Arc<String>;

/// A control group that connections belong to.
struct Group {
    /// None if it cannot be opened: whatever judges its connections is not known.
    directory: Option<OwnedFd>,
    /// The BPF programs of its sockets, including those of its ancestors.
    programs: Programs,
    /// Why its connections have to stay in the kernel, if they have to.
    keeps: Option<&'static str>,
    /// Why they would have to, and whether a connect(2) is judged, if that has changed since the last poll; and when
    /// that was found out, in microseconds of the monotonic clock.
    latest: Option<(Option<&'static str>, bool)>,
    asked: u64,
    /// Sockets that belong to it, IPv4 and IPv6, by which its programs are asked.
    probes: [Option<OwnedFd>; 2],
}

impl Group {
    fn new(directory: Option<OwnedFd>, programs: Programs) -> Group {
        Group { directory, keeps: programs.keeps(), programs, latest: None, asked: 0, probes: [None, None] }
    }

    /// Opens the group with this path. None if nobody could attach programs, or this process may not ask which there
    /// are: as root of a user namespace it may not.
    fn open(root: &mut Option<OwnedFd>, path: &str) -> Option<Group> {
        match Group::programs_at(root, path) {
            Ok((directory, programs)) => Some(Group::new(Some(directory), programs)),
            Err(error) => is_unseen(&error).then(|| Group::new(None, Programs::default())),
        }
    }

    fn programs_at(root: &mut Option<OwnedFd>, path: &str) -> io::Result<(OwnedFd, Programs)> {
        let root = match root {
            Some(root) => root,
            None => root.insert(cgroups::root()?),
        };
        let directory = match cgroups::open(&*root, path) {
            Ok(directory) => directory,
            // Whoever may not ask about any group's programs knows nothing less of this one.
            Err(error) => return programs_of(root.as_fd()).and(Err(error)),
        };
        let programs = programs_of(directory.as_fd())?;
        Ok((directory, programs))
    }

    /// Why its connections have to stay in the kernel as of the last poll, if they have to.
    fn refusal(&self) -> Option<Refusal> {
        if self.directory.is_none() { Some(Refusal::GroupUnseen) } else { self.keeps.map(|why| Refusal::Group(why.into())) }
    }

    /// Why its connections have to stay in the kernel, if they have to, and whether a connect(2) is judged: as it was
    /// [`FRESH`] ago or later. A change is left to the next poll, too, which has the connections on the NIC return.
    fn judges(&mut self) -> (Option<&'static str>, bool) {
        let now = monotonic_micros();
        if let Some(directory) = &self.directory
            && now.saturating_sub(self.asked) > FRESH
        {
            self.asked = now;
            // A removed group cannot be queried any more; its sockets keep the programs they had.
            let changed = programs_of(directory.as_fd()).ok().filter(|programs| *programs != self.programs);
            self.latest = changed.map(|programs| (programs.keeps(), !programs.connects.is_empty()));
        }
        self.latest.unwrap_or((self.keeps, !self.programs.connects.is_empty()))
    }

    /// Asks the programs that judge a connect(2) about one to this peer.
    fn may_connect(&mut self, peer: SocketAddr) -> Result<(), Refusal> {
        let directory = self.directory.as_ref().ok_or(Refusal::GroupUnseen)?;
        let place = &mut self.probes[usize::from(peer.is_ipv6())];
        let probe = match place {
            Some(probe) => probe,
            None => {
                let made = starter::socket_of_group(directory.as_fd(), peer.is_ipv6());
                place
                    .insert(made.map_err(|error| Refusal::Group(format!("that could not be asked about a connect(2): {error}")))?)
            }
        };
        shell::try_connecting(probe.as_fd(), peer)
            .map_err(|error| Refusal::Group(format!("that refuse a connect(2), as a move makes one: {error}")))
    }
}

/// The control groups of all connections.
#[derive(Default)]
pub(crate) struct Cgroups {
    groups: HashMap<Name, Group>,
    /// The root of their hierarchy, once it was opened.
    root: Option<OwnedFd>,
    due: u64,
}

/// Whether this error means that there is a group of which nothing can be known: it is outside of this process's
/// control group namespace, or has more programs than can be read. Others come of a kernel that has no such programs,
/// and of a process that may not ask.
fn is_unseen(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::StorageFull)
}

impl Cgroups {
    /// Returns the control group of a process, and thereby of the sockets that it makes, and polls it from now on. None
    /// if there is none, or nobody could attach programs to it, or this process may not ask about them.
    pub fn of(&mut self, process: u32) -> Option<Name> {
        let path = process::cgroup(process)?;
        if let Some((name, _)) = self.groups.get_key_value(&path) {
            return Some(name.clone());
        }
        let group = Group::open(&mut self.root, &path)?;
        let name: Name = path.into();
        self.groups.insert(name.clone(), group);
        Some(name)
    }

    /// Time until the next poll. None if there are no groups.
    pub fn wait(&self) -> Option<Duration> {
        (!self.groups.is_empty()).then(|| Duration::from_micros(self.due.saturating_sub(monotonic_micros())))
    }

    /// Checks that a group's programs let a connection go to the NIC and come back: what they judge is judged there,
    /// too.
    ///
    /// # Errors
    /// Which programs keep it in the kernel.
    pub fn let_go(&mut self, name: Option<&Name>, peer: SocketAddr) -> Result<(), Refusal> {
        let Some(group) = name.and_then(|name| self.groups.get_mut(name)) else { return Ok(()) };
        if group.directory.is_none() {
            return Err(Refusal::GroupUnseen);
        }
        match group.judges() {
            (Some(why), _) => Err(Refusal::Group(why.into())),
            (None, true) => group.may_connect(peer),
            (None, false) => Ok(()),
        }
    }

    /// Why the connections of a group have to stay in the kernel, if they have to.
    pub fn keeps(&self, name: &Name) -> Option<Refusal> {
        self.groups.get(name)?.refusal()
    }

    /// Checks that a group's programs let a connection come back to the kernel, whose socket is connected for that.
    ///
    /// # Errors
    /// If they do not.
    pub fn let_back(&mut self, name: Option<&Name>, peer: SocketAddr) -> Result<(), Refusal> {
        let Some(group) = name.and_then(|name| self.groups.get_mut(name)) else { return Ok(()) };
        if group.judges().1 { group.may_connect(peer) } else { Ok(()) }
    }

    /// Checks that a group's programs let a NIC make the connections of its listeners, whose peers are not known yet.
    ///
    /// # Errors
    /// Which programs do not.
    pub fn let_listen(&self, name: &Name) -> Result<(), Refusal> {
        let Some(group) = self.groups.get(name) else { return Ok(()) };
        match group.refusal() {
            Some(refusal) => Err(refusal),
            None if group.programs.connects.is_empty() => Ok(()),
            None => Err(Refusal::Group("that judge a connect(2)".into())),
        }
    }

    /// Returns groups whose programs have changed since the last poll; empty if the next poll is not due yet.
    pub fn changed(&mut self) -> Vec<Name> {
        let now = monotonic_micros();
        if now < self.due {
            return Vec::new();
        }
        self.due = now + PERIOD;
        // Groups that no connection refers to any more are dropped.
        self.groups.retain(|name, _| Arc::strong_count(name) > 1);
        let mut changed = Vec::new();
        for (name, group) in &mut self.groups {
            let Some(directory) = &group.directory else {
                // Whoever runs its program may have moved it, or this process, elsewhere.
                if let Some(seen) = Group::open(&mut self.root, name).filter(|group| group.directory.is_some()) {
                    *group = seen;
                    changed.push(name.clone());
                }
                continue;
            };
            // A removed group cannot be queried any more; its sockets keep the programs they had.
            if let Ok(programs) = programs_of(directory.as_fd())
                && programs != group.programs
            {
                (group.keeps, group.latest) = (programs.keeps(), None);
                group.programs = programs;
                changed.push(name.clone());
            }
        }
        changed
    }
}
