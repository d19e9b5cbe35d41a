//! Every Baton that runs on this machine, those of `baton run` too: found in /proc, so that nothing has to be registered and nothing is left
//! behind by one that was killed.

use baton_protocol::keeper::AGENT_ARGUMENT;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// An agent that listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agent {
    /// Its process.
    pub process: u32,
    /// The path of its socket, as this process can reach it.
    pub socket: PathBuf,
}

/// The agents of this user, or of all users for root, by process. What ends meanwhile is left out.
pub fn agents() -> Vec<Agent> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<Agent> =
        processes.filter(|process| is_agent(*process)).filter_map(|process| agent(process).ok()?).collect();
    found.sort_by_key(|agent| agent.process);
    found
}

fn is_agent(process: u32) -> bool {
    let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).nth(1) == Some(AGENT_ARGUMENT.as_bytes())
}

/// The socket at which a process listens, if it does.
fn agent(process: u32) -> io::Result<Option<Agent>> {
    let mut inodes = HashSet::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))?.flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']'));
        inodes.extend(inode.map(str::to_owned));
    }
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
    // A path of ours has no control characters, which a terminal would act on.
    (flags == "00010000" && path.starts_with('/') && !path.contains(char::is_control)).then(|| Path::new(path))
}

/// A path of another process's mount namespace, as this process can reach it.
fn reachable(process: u32, path: &Path) -> PathBuf {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    if namespace("self") == namespace(&process.to_string()) {
        return path.to_owned();
    }
    Path::new(&format!("/proc/{process}/root")).join(path.strip_prefix("/").unwrap_or(path))
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
