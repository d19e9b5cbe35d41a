//! Finds every Baton that runs on this machine, those of `baton run` too. They are found in /proc, so nothing has to be
//! registered, and one that was killed leaves nothing behind.
//!
//! Any process may call itself an agent, and can delay a process that reads some of its entries. So agents are found by
//! name, which never waits, and not by command line, and their other entries are read within a bounded time.

use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_linux::{process, reading};
use baton_protocol::keeper::AGENT_NAME;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// An agent that listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agent {
    /// Its process.
    pub process: u32,
    /// The path of its socket, as this process can reach it.
    pub socket: PathBuf,
}

/// Time limit for examining all processes that call themselves agents.
const LIMIT: Duration = Duration::from_millis(500);

/// The agents that were found on this machine.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Found {
    /// The agents of this user, and the host's (`baton up`); of all users for root. By process.
    pub agents: Vec<Agent>,
    /// Processes that call themselves agents, and could not be examined in time.
    pub silent: Vec<u32>,
}

/// The agents of this machine. Those that end meanwhile are left out.
pub fn agents() -> Found {
    let named = process::all().into_iter().filter(|process| process::name(*process).as_deref() == Some(AGENT_NAME));
    let mut named: Vec<u32> = named.collect();
    // Other users' processes come last, so that they cannot use up the time.
    let ours = |process: u32| process::user_of(process).is_ok_and(|user| [0, process::user()].contains(&user));
    named.sort_by_key(|process| (!ours(*process), *process));
    let (mut found, until) = (Found::default(), monotonic_micros() + LIMIT.as_micros() as u64);
    for process in named {
        let left = Duration::from_micros(until.saturating_sub(monotonic_micros()));
        match reading::within(process, left, move || agent(process)) {
            Some(agent) => found.agents.extend(agent.ok().flatten()),
            None => found.silent.push(process),
        }
    }
    // Without root's rights root's processes cannot be examined. The agent at the usual path is open to all users.
    if process::user() != 0
        && let Some(agent) = usual(Path::new(crate::DEFAULT_SOCKET))
        && found.agents.iter().all(|other| other.socket != agent.socket)
    {
        found.agents.push(agent);
    }
    found.agents.sort_by_key(|agent| agent.process);
    found
}

/// The agent that listens at `path`, the path of `baton up`.
fn usual(path: &Path) -> Option<Agent> {
    let process = Channel::try_connect_to_anybody(path).and_then(|channel| channel.peer_process()).ok()?;
    Some(Agent { process, socket: path.to_owned() })
}

/// The socket at which a process listens, if it does.
fn agent(process: u32) -> io::Result<Option<Agent>> {
    let inodes: HashSet<String> = process::sockets_of(process).into_iter().map(|(_, inode)| inode.to_string()).collect();
    let table = fs::read_to_string(format!("/proc/{process}/net/unix"))?;
    let Some(path) = table.lines().find_map(|line| listening_at(line, &inodes)) else { return Ok(None) };
    Ok(Some(Agent { process, socket: reachable(process, path) }))
}

/// The path of a line of /proc/net/unix, if it is that of a listening socket with one of these inodes.
fn listening_at<'a>(line: &'a str, inodes: &HashSet<String>) -> Option<&'a Path> {
    // Num, RefCount, Protocol, Flags, Type, St, Inode, Path. Flags 00010000: it listens (SO_ACCEPTCON).
    let mut fields = line.splitn(8, char::is_whitespace).filter(|field| !field.is_empty());
    let flags = fields.nth(3)?;
    let rest = line.split_whitespace().nth(6).filter(|inode| inodes.contains(*inode))?;
    let path = line[line.rfind(rest)? + rest.len()..].trim_start();
    // Baton's paths have no control characters, which a terminal would act on.
    (flags == "00010000" && path.starts_with('/') && !path.contains(char::is_control)).then(|| Path::new(path))
}

/// A path of another process's mount namespace, as this process can reach it. A systemd service may have a namespace of
/// its own in which most of the host's paths are the same: then the path leads to the process from here, too.
fn reachable(process: u32, path: &Path) -> PathBuf {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    if namespace("self") == namespace(&process.to_string()) || listens_at(process, path) {
        return path.to_owned();
    }
    Path::new(&format!("/proc/{process}/root")).join(path.strip_prefix("/").unwrap_or(path))
}

/// Whether this process listens at a path of the caller's mount namespace.
fn listens_at(process: u32, path: &Path) -> bool {
    Channel::try_connect_to_anybody(path).and_then(|channel| channel.peer_process()).is_ok_and(|peer| peer == process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_are_recognised() {
        let inodes: HashSet<String> = ["243265".to_owned()].into();
        let line =
            |flags: &str, inode: &str, path: &str| format!("0000000000000000: 00000002 00000000 {flags} 0001 01 {inode} {path}");
        let found = |line: &str| listening_at(line, &inodes).map(Path::to_owned);
        assert_eq!(found(&line("00010000", "243265", "/run/a b/agent.sock")), Some("/run/a b/agent.sock".into()));
        assert_eq!(found(&line("00000000", "243265", "/run/agent.sock")), None);
        assert_eq!(found(&line("00010000", "24326", "/run/agent.sock")), None);
        assert_eq!(found(&line("00010000", "243265", "@abstract")), None);
        assert_eq!(found(&line("00010000", "243265", "/tmp/\u{1b}[2J/agent.sock")), None);
        assert_eq!(found("Num       RefCount Protocol Flags    Type St Inode Path"), None);
    }
}
