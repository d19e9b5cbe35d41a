//! A process that looks at a program's sockets one after the other. A program can block any process that makes calls on
//! its sockets. So this is a process of its own: if it is blocked, the process that watches it ends it and goes on
//! without that socket.

use super::subject::Subject;
use anyhow::{Context, Result};
use baton_agent::{Judged, Predictor};
use baton_linux::events::{monotonic_micros, thread_nanos};
use baton_linux::freeze::take_descriptor;
use baton_linux::namespace::Namespace;
use baton_linux::{process, socket};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::os::fd::AsFd;
use std::time::Duration;

/// Shortest pause between two looks, and how many times as long as a look it is: looking takes one part in so many of a
/// processor.
const PAUSE: Duration = Duration::from_millis(250);
const SHARE: u32 = 200;
/// The same of the pause after a socket, in its CPU time. Who looks does not run with less priority instead: while it
/// waits for a processor it may have a duplicate of a descriptor that the program closes, and no FIN would be sent
/// until then.
const SHARE_OF_NEW: u32 = 5;

/// Most connections that are looked at.
const MOST: usize = 100_000;

#[derive(Args)]
pub struct LookArguments {
    /// Processes.
    #[arg(long, value_delimiter = ',')]
    processes: Vec<u32>,
    /// A control group.
    #[arg(long)]
    group: Option<String>,
    /// Only connections with this local port.
    #[arg(long)]
    port: Option<u16>,
    /// Sockets that are left out, by inode.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<u64>,
    /// The firewall's rules are left out.
    #[arg(long)]
    without_rules: bool,
}

/// A line that it prints.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Line {
    /// So many sockets are new, and are looked at now.
    New(usize),
    /// It looks at this socket now.
    Begin(u64),
    /// It was closed before it could be looked at.
    Gone(u64),
    /// It has looked, and it is none of a connection.
    Other,
    /// It has looked: the connection would move; whether its socket is in blocking mode, which an attacher leaves
    /// alone.
    Moves(u64, bool),
    /// It has looked: the connection would stay, and why.
    Stays(u64, String),
    /// The descriptors of this process cannot be had: why.
    Closed(u32, String),
    /// All sockets have been looked at once more.
    Round,
}

impl Subject {
    /// The arguments that name it to the process.
    pub fn arguments(&self) -> Vec<String> {
        match self {
            Subject::Processes(list) => {
                let list: Vec<String> = list.iter().map(u32::to_string).collect();
                vec!["--processes".into(), list.join(",")]
            }
            Subject::Group(path) => vec!["--group".into(), path.clone()],
        }
    }
}

/// Prints its findings until the reader of the output has ended.
///
/// # Errors
/// If nobody reads, or the network namespace of the program cannot be entered.
pub fn run(arguments: &LookArguments) -> Result<()> {
    let subject = match &arguments.group {
        Some(group) => Subject::Group(group.clone()),
        None => Subject::Processes(arguments.processes.clone()),
    };
    if let Some(first) = subject.processes().first() {
        let link = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/net")).ok();
        if link(&first.to_string()) != link("self") {
            let entered = Namespace::of_process(*first).and_then(|namespace| namespace.enter());
            entered.context("entering the program's network namespace (run baton doctor as root)")?;
        }
    }
    let mut predictor = Predictor::new(arguments.without_rules).context("asking the kernel about routes and rules")?;
    let mut known: HashSet<u64> = arguments.skip.iter().copied().collect();
    let mut closed = HashSet::new();
    loop {
        let began = monotonic_micros();
        let processes = subject.processes();
        let mut holders = BTreeMap::<u64, Vec<(u32, i32)>>::new();
        for one in &processes {
            for (number, inode) in process::sockets_of(*one) {
                holders.entry(inode).or_default().push((*one, number));
            }
        }
        // A look at a socket costs time, so each socket is looked at only once.
        let took = since(began);
        holders.retain(|inode, _| known.len() < MOST && known.insert(*inode));
        say(&Line::New(holders.len()))?;
        for (inode, its) in holders {
            let began = thread_nanos();
            say(&Line::Begin(inode))?;
            let line = look(&mut predictor, inode, &its, arguments.port, &mut closed);
            say(&line)?;
            std::thread::sleep(Duration::from_nanos(thread_nanos() - began) * SHARE_OF_NEW);
        }
        say(&Line::Round)?;
        if processes.is_empty() {
            return Ok(());
        }
        std::thread::sleep(PAUSE.max(took * SHARE));
    }
}

/// Time since then, in microseconds of the monotonic clock.
fn since(then: u64) -> Duration {
    Duration::from_micros(monotonic_micros().saturating_sub(then))
}

fn say(line: &Line) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

/// Looks at a socket by a duplicate of its descriptor, which is closed at once.
fn look(predictor: &mut Predictor, inode: u64, holders: &[(u32, i32)], port: Option<u16>, closed: &mut HashSet<u32>) -> Line {
    let Some(&(process, number)) = holders.first() else { return Line::Other };
    let taken = process::open_process(process).and_then(|handle| take_descriptor(handle.as_fd(), number));
    let fd = match taken {
        Ok(fd) => fd,
        Err(error) if error.raw_os_error() == Some(libc::EPERM) && closed.insert(process) => {
            return Line::Closed(process, error.to_string());
        }
        Err(_) => return Line::Gone(inode),
    };
    // Another file may have the number by now.
    if socket::inode(fd.as_fd()).ok() != Some(inode) {
        return Line::Gone(inode);
    }
    if socket::peer_address(fd.as_fd()).is_err() {
        return Line::Other;
    }
    let local = socket::local_address(fd.as_fd()).ok();
    if port.is_some_and(|port| local.is_none_or(|local| local.port() != port)) {
        return Line::Other;
    }
    let shared = holders.iter().any(|(other, _)| *other != process);
    match predictor.judge(fd.as_fd(), process, shared) {
        Judged::NoConnection => Line::Other,
        Judged::Moves => Line::Moves(inode, socket::is_blocking(fd.as_fd()).unwrap_or(false)),
        Judged::Stays(why) => Line::Stays(inode, why),
    }
}
