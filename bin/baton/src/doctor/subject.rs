//! The subject that is watched: a process and its descendants, a unit, or the processes that listen at a port.

use anyhow::{Context, Result, bail};
use baton_linux::{process, reading};
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

/// Most processes that are watched.
const MOST: usize = 4096;
/// Time in which a process's descriptors are read.
const GLANCE: Duration = Duration::from_millis(200);

/// The subject that is watched.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Subject {
    /// These processes and what they start.
    Processes(Vec<u32>),
    /// The processes of a control group, by its path from the hierarchy's root.
    Group(String),
}

impl Subject {
    /// A process number, or a unit of systemd.
    ///
    /// # Errors
    /// If there is no such process or unit, with what to type.
    pub fn named(name: &str) -> Result<Subject> {
        if let Ok(number) = name.parse::<u32>() {
            if !process::first_thread_lives(number) {
                bail!("there is no process {number}");
            }
            return Ok(Subject::Processes(vec![number]));
        }
        if name.is_empty() || name.starts_with('-') {
            bail!("{name:?} is neither a process number nor a unit");
        }
        let show = |property: &str| {
            let property = format!("--property={property}");
            let ran = Command::new("systemctl").args(["show", &property, "--value", "--", name]).output();
            let ran = ran.with_context(|| {
                format!("{name} is no process number, and units need systemd: systemctl cannot be run; give a PID, or --port N")
            })?;
            if !ran.status.success() {
                let why = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
                bail!("{name} is no process number, and systemctl knows no such unit: {why}");
            }
            Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned())
        };
        match show("LoadState")?.as_str() {
            "loaded" => {}
            _ => bail!("there is no unit {name} (systemctl list-units lists them)"),
        }
        match show("ControlGroup")? {
            none if none.is_empty() => bail!("the unit {name} does not run: systemctl start {name}"),
            group => Ok(Subject::Group(group)),
        }
    }

    /// The processes that listen at a port in this network namespace.
    ///
    /// # Errors
    /// If nobody does, or the processes are other users'.
    pub fn listening(port: u16) -> Result<Subject> {
        let inodes: BTreeSet<u64> =
            ["tcp", "tcp6"].iter().flat_map(|table| listeners(&read(&format!("/proc/self/net/{table}")), port)).collect();
        if inodes.is_empty() {
            bail!("nobody listens at port {port} in this network namespace (ss -ltn lists who listens)");
        }
        let holds = |one: &u32| {
            let number = *one;
            let found = reading::within(number, GLANCE, move || process::sockets_of(number)).unwrap_or_default();
            found.iter().any(|(_, inode)| inodes.contains(inode))
        };
        let found: Vec<u32> = process::all().into_iter().filter(holds).collect();
        if found.is_empty() {
            bail!("the process that listens at port {port} cannot be seen: it is another user's; run baton doctor as root");
        }
        Ok(Subject::Processes(found))
    }

    /// Its processes now.
    pub fn processes(&self) -> Vec<u32> {
        let mut found = Vec::new();
        match self {
            Subject::Processes(first) => {
                let (mut next, mut seen) = (first.clone(), BTreeSet::new());
                while let Some(one) = next.pop() {
                    if seen.len() < MOST && process::first_thread_lives(one) && seen.insert(one) {
                        next.extend(process::children(one));
                    }
                }
                found.extend(seen);
            }
            Subject::Group(path) => add_group(&format!("/sys/fs/cgroup{path}"), &mut found),
        }
        found
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Adds the processes of a group's directory and of those in it.
fn add_group(directory: &str, found: &mut Vec<u32>) {
    found.extend(read(&format!("{directory}/cgroup.procs")).lines().filter_map(|line| line.parse::<u32>().ok()));
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if found.len() < MOST {
            add_group(&entry.path().to_string_lossy(), found);
        }
    }
}

/// The inodes of the listeners at a port, in a table as /proc/net/tcp.
fn listeners(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let inode = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = u16::from_str_radix(words.get(1)?.rsplit(':').next()?, 16).ok()?;
        (at == port && *words.get(3)? == LISTEN).then(|| words.get(9)?.parse().ok()).flatten()
    };
    table.lines().filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_said() {
        let error = |name: &str| Subject::named(name).expect_err("an error").to_string();
        assert_eq!(error("4194304"), "there is no process 4194304");
        assert!(error("--all").contains("neither a process number nor a unit"));
        let own = Subject::named(&std::process::id().to_string()).expect("this process");
        assert!(own.processes().contains(&std::process::id()));
    }

    #[test]
    fn listeners_are_found_by_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n\
            1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0\n";
        assert_eq!(listeners(table, 8080), [4711]);
        assert!(listeners(table, 80).is_empty());
    }
}
