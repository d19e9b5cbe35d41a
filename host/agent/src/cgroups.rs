//! BPF programs at control groups, which judge what the groups' sockets send and receive. Nothing tells when one is attached or detached,
//! so the groups are looked at again and again, as long as connections of theirs are known here.

use baton_linux::events::monotonic_micros;
use baton_linux::process;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Microseconds between two looks.
const PERIOD: u64 = 50_000;

/// A group's path from the root of the unified hierarchy.
pub(crate) type Name = Arc<str>;

/// A group of a connection.
struct Group {
    directory: File,
    /// Numbers of the programs that its packets meet, ancestors' included.
    programs: Vec<u32>,
}

/// The groups of all connections.
#[derive(Default)]
pub(crate) struct Cgroups {
    groups: HashMap<Name, Group>,
    due: u64,
}

/// Where the unified hierarchy is mounted, if it is.
fn mount() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let found = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words.get(2) == Some(&"cgroup2"))?;
    Some(Path::new(found.get(1)?).to_owned())
}

impl Cgroups {
    /// The group that a process is in, and with it the sockets that it makes; from now on that is looked at. None if it cannot be.
    pub fn of(&mut self, process: u32) -> Option<Name> {
        let path = process::cgroup(process)?;
        if let Some((name, _)) = self.groups.get_key_value(path.as_str()) {
            return Some(name.clone());
        }
        let directory = File::open(mount()?.join(path.trim_start_matches('/'))).ok()?;
        let programs = baton_steering::cgroup_programs(directory.as_fd()).ok()?;
        let name: Name = path.into();
        self.groups.insert(name.clone(), Group { directory, programs });
        Some(name)
    }

    /// How long until they have to be looked at. None if there are none.
    pub fn wait(&self) -> Option<Duration> {
        (!self.groups.is_empty()).then(|| Duration::from_micros(self.due.saturating_sub(monotonic_micros())))
    }

    /// Groups whose programs have changed since the last look, if it is time for one.
    pub fn changed(&mut self) -> Vec<Name> {
        let now = monotonic_micros();
        if now < self.due {
            return Vec::new();
        }
        self.due = now + PERIOD;
        // Those that no connection names any more are let go.
        self.groups.retain(|name, _| Arc::strong_count(name) > 1);
        let mut changed = Vec::new();
        for (name, group) in &mut self.groups {
            // Of a group that was removed nothing is heard any more; its sockets keep what they had.
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
