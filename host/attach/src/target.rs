//! The target of an attacher: which programs' connections it offloads.

use crate::searches::{Found, search_all};
use baton_linux::process;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Selects connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Connections of a process and of its descendants.
    Process(u32),
    /// Connections of any process with this local port.
    Port(u16),
    /// Connections of the processes of a control group and of the groups in it, by its path from the hierarchy's root.
    Cgroup(String),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Process(number) => write!(f, "process {number}"),
            Target::Port(port) => write!(f, "port {port}"),
            Target::Cgroup(path) => write!(f, "control group {path}"),
        }
    }
}

impl Target {
    /// Whether connections of a process may be selected.
    pub(crate) fn covers(&self, process: u32) -> bool {
        match self {
            Target::Process(root) => descends(process, *root),
            // Not an agent or a keeper: they have sockets of programs, and could not answer while they were stopped.
            Target::Port(_) => process != std::process::id() && !is_batons(process),
            Target::Cgroup(path) => process::cgroup(process).is_some_and(|group| is_in(&group, path)) && !is_batons(process),
        }
    }

    /// Whether a connection with this local port is selected, if its process is.
    pub(crate) fn fits(&self, local_port: u16) -> bool {
        !matches!(self, Target::Port(port) if *port != local_port)
    }

    /// The inodes of the sockets that are selected by their port; None if all sockets of a selected process may be.
    pub(crate) fn sockets(&self) -> Option<BTreeSet<u64>> {
        match self {
            Target::Port(port) => Some(sockets_at(*port)),
            Target::Process(_) | Target::Cgroup(_) => None,
        }
    }

    /// Processes that have, or may come to have, selected connections.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let port = match self {
            Target::Port(port) => *port,
            _ => return self.candidates(),
        };
        let sockets = sockets_at(port);
        let found = search_all(process::all()).into_iter();
        let holds = |of: &Found| of.sockets.iter().any(|(_, inode)| sockets.contains(inode));
        found.filter(holds).map(|of| of.process).filter(|process| self.covers(*process)).collect()
    }

    /// Processes that may have selected connections, without examining their descriptors.
    pub(crate) fn candidates(&self) -> Vec<u32> {
        process::all().into_iter().filter(|process| self.covers(*process) && process::first_thread_lives(*process)).collect()
    }

    /// The reason why there is nothing to attach to; None if there is a process.
    pub(crate) fn absence(&self, processes: &[u32]) -> Option<String> {
        match self {
            Target::Process(number) if !PathBuf::from(format!("/proc/{number}")).exists() => {
                Some(format!("there is no process {number}"))
            }
            Target::Port(port) if processes.is_empty() => {
                Some(format!("no process here listens at port {port}, or has a connection from it; `ss -tnlp` shows them"))
            }
            Target::Cgroup(path) if processes.is_empty() => Some(format!(
                "no process is in control group {path:?}; `cat /proc/PID/cgroup` shows a process' group, as in /system.slice/nginx.service"
            )),
            _ => None,
        }
    }
}

/// Whether a process has a name of Baton's processes: it is not attached to.
fn is_batons(process: u32) -> bool {
    process::name(process).is_some_and(|name| name.starts_with("baton-"))
}

fn descends(mut process: u32, root: u32) -> bool {
    // A limit for the depth of the process tree.
    for _ in 0..64 {
        if process == root {
            return true;
        }
        match process::parent(process) {
            Some(parent) if parent > 1 => process = parent,
            _ => return false,
        }
    }
    false
}

fn is_in(group: &str, path: &str) -> bool {
    let path = path.trim_end_matches('/');
    group == path || group.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'))
}

/// Inodes of the TCP sockets with a local port, listeners included.
fn sockets_at(port: u16) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let local = fields.get(1).and_then(|local| u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok());
            if local == Some(port)
                && let Some(inode) = fields.get(9).and_then(|inode| inode.parse().ok())
            {
                found.insert(inode);
            }
        }
    }
    found.remove(&0);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_contain_themselves_and_what_is_below() {
        assert!(is_in("/a/b", "/a/b") && is_in("/a/b/c", "/a/b/") && is_in("/a", "/"));
        assert!(!is_in("/a/bc", "/a/b") && !is_in("/a", "/a/b"));
    }

    #[test]
    fn processes_descend_from_their_parents() {
        let me = std::process::id();
        assert!(descends(me, me));
        assert!(descends(me, process::parent(me).expect("a parent")));
        assert!(!descends(process::parent(me).expect("a parent"), me));
        assert!(Target::Process(u32::MAX - 1).absence(&[]).expect("absent").contains("no process"));
    }
}
