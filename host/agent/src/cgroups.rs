//! BPF programs attached to control groups, which filter what the groups' sockets send and receive. The kernel does not notify of
//! attaching or detaching, so the groups are polled as long as the agent has connections of theirs.

use baton_linux::events::monotonic_micros;
use baton_linux::process;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Polling period, in microseconds.
const PERIOD: u64 = 50_000;

/// A control group's path from the root of the unified hierarchy.
pub(crate) type Name = Arc<String>;

/// A control group that connections belong to.
struct Group {
    directory: File,
    /// Ids of the BPF programs that its packets pass, including those of its ancestors.
    programs: Vec<u32>,
}

/// The control groups of all connections.
#[derive(Default)]
pub(crate) struct Cgroups {
    groups: HashMap<Name, Group>,
    due: u64,
}

/// Returns the mount point of the unified hierarchy (cgroup2), if it is mounted.
fn mount() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let found = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words.get(2) == Some(&"cgroup2"))?;
    Some(Path::new(found.get(1)?).to_owned())
}

impl Cgroups {
    /// Returns the control group of a process, and thereby of the sockets that it makes, and polls it from now on. None if it
    /// cannot be read.
    pub fn of(&mut self, process: u32) -> Option<Name> {
        let path = process::cgroup(process)?;
        if let Some((name, _)) = self.groups.get_key_value(&path) {
            return Some(name.clone());
        }
        let directory = File::open(mount()?.join(path.trim_start_matches('/'))).ok()?;
        let programs = baton_steering::cgroup_programs(directory.as_fd()).ok()?;
        let name: Name = path.into();
        self.groups.insert(name.clone(), Group { directory, programs });
        Some(name)
    }

    /// Time until the next poll. None if there are no groups.
    pub fn wait(&self) -> Option<Duration> {
        (!self.groups.is_empty()).then(|| Duration::from_micros(self.due.saturating_sub(monotonic_micros())))
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
            // A removed group cannot be queried any more; its sockets keep the programs they had.
            if let Ok(programs) = baton_steering::cgroup_programs(group.directory.as_fd())
                && programs != group.programs
            {
                group.programs = programs;
                changed.push(name.clone());
            }
        }
        changed
    }
}
