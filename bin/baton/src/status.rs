//! `baton status`: whether a Baton is up, for people and for scripts.

use anyhow::Result;
use baton_client::tool::Tool;
use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_protocol::program::{ConnectionInfo, Place};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub const EXAMPLES: &str = "Examples:
  baton status
  baton status --json | jq .connections
  baton status --wait 30 && baton run -- ./server

Exit status: 0 if one is up and answers within a second, 3 if none is up, 4 if one is up but does not answer; 2 for any other error.
Batons that `baton run` or `baton attach` have started are not meant: `baton ls` lists the connections of all.";

/// Exit status if no process listens.
const DOWN: i32 = 3;
/// Exit status if a process listens and does not answer.
const SILENT: i32 = 4;

/// Pause before the next look.
const AGAIN: Duration = Duration::from_millis(50);

#[derive(Args)]
pub struct StatusArguments {
    /// Path at which it is to be up. Without it: where BATON_SOCKET says, or /run/baton/agent.sock.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Wait for at most so many seconds until one is up and answers.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    wait: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Numbers of connections.
#[derive(Serialize, Default, Clone, Copy)]
struct Connections {
    nic: usize,
    kernel: usize,
}

#[derive(Serialize)]
struct Nic {
    number: usize,
    process: u32,
    workers: usize,
    /// Names, where there are several NICs.
    devices: Vec<String>,
    /// Connections that are on it.
    connections: usize,
}

/// The agent of a network namespace.
#[derive(Serialize)]
struct Agent {
    socket: PathBuf,
    process: u32,
    nics: Vec<Nic>,
    connections: Connections,
    moves: u64,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Status {
    /// `up`, `down` or `silent`.
    state: &'static str,
    socket: PathBuf,
    /// Seconds since 1970.
    since: Option<u64>,
    /// Why it is not up, or does not answer.
    reason: Option<String>,
    connections: Connections,
    agents: Vec<Agent>,
}

impl Status {
    fn exit(&self) -> i32 {
        match self.state {
            "up" => 0,
            "down" => DOWN,
            _ => SILENT,
        }
    }
}

/// Prints the state. Returns the exit status.
///
/// # Errors
/// If it cannot be printed.
pub fn run(arguments: &StatusArguments) -> Result<i32> {
    let path = arguments.socket.clone().unwrap_or_else(baton_client::agent_socket);
    let until = monotonic_micros() + u64::from(arguments.wait.unwrap_or(0)) * 1_000_000;
    let status = loop {
        let status = look(&path);
        if status.exit() == 0 || monotonic_micros() >= until {
            break status;
        }
        std::thread::sleep(AGAIN);
    };
    if arguments.json {
        println!("{}", serde_json::to_string(&status)?);
    } else {
        print(&status);
    }
    Ok(status.exit())
}

fn look(path: &Path) -> Status {
    let down = |state, reason| Status {
        state,
        socket: path.to_owned(),
        since: None,
        reason: Some(reason),
        connections: Connections::default(),
        agents: Vec::new(),
    };
    if !path.exists() {
        return down("down", format!("there is no {}", path.display()));
    }
    if !Channel::is_listened_at(path) {
        return down("down", format!("nobody listens at {}", path.display()));
    }
    // By the path that programs use, so `baton up` itself has to answer. Then those of each network namespace.
    let agents = ask(path).map(|first| {
        let others = sockets_of_namespaces(path).into_iter().filter_map(|socket| ask(&socket).ok());
        let mut agents: Vec<Agent> = others.filter(|other| other.process != first.process).collect();
        agents.insert(0, first);
        agents
    });
    match agents {
        Err(error) => down("silent", format!("{error:#}")),
        Ok(agents) => Status {
            state: "up",
            socket: path.to_owned(),
            // The socket is made at its start.
            since: std::fs::metadata(path).and_then(|socket| socket.modified()).ok().and_then(seconds),
            reason: None,
            connections: agents.iter().fold(Connections::default(), |all, one| Connections {
                nic: all.nic + one.connections.nic,
                kernel: all.kernel + one.connections.kernel,
            }),
            agents,
        },
    }
}

fn seconds(time: SystemTime) -> Option<u64> {
    time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs())
}

/// The sockets of the agents of a `baton up` at a path: that path and the number of a namespace.
fn sockets_of_namespaces(path: &Path) -> Vec<PathBuf> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_one = |other: &str| {
        other.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')).is_some_and(|number| number.parse::<u64>().is_ok())
    };
    let mut all: Vec<_> =
        entries.filter(|entry| entry.file_name().to_str().is_some_and(is_one)).map(|entry| entry.path()).collect();
    all.sort();
    all
}

fn ask(path: &Path) -> Result<Agent> {
    let mut tool = Tool::look(path, None)?;
    let statistics = tool.statistics()?;
    let list = tool.connections()?;
    let on_nics = || list.iter().filter(|info| info.place == Place::Nic);
    let of = |number: usize| on_nics().filter(|info: &&ConnectionInfo| info.nic.unwrap_or(0) as usize == number).count();
    let nics = statistics.nics.iter().enumerate().map(|(number, nic)| Nic {
        number,
        process: nic.process,
        workers: nic.workers.len(),
        devices: nic.devices.clone(),
        connections: of(number),
    });
    let nic = on_nics().count();
    Ok(Agent {
        socket: path.to_owned(),
        process: statistics.agent_process,
        nics: nics.collect(),
        connections: Connections { nic, kernel: list.len() - nic },
        moves: statistics.moves,
    })
}

fn print(status: &Status) {
    let path = status.socket.display();
    let reason = status.reason.as_deref().unwrap_or_default();
    match status.state {
        "up" => {}
        "down" => return println!("no Baton is up: {reason}; `baton up` or `systemctl start baton` starts one"),
        _ => return println!("a Baton is up at {path}, and does not answer: {reason}"),
    }
    let Connections { nic, kernel } = status.connections;
    let since = status.since.map(|since| format!(" since {} ({})", date(since), age(since))).unwrap_or_default();
    println!("a Baton is up at {path}{since}: {nic} connections on NICs, {kernel} in the kernel");
    for agent in &status.agents {
        for nic in &agent.nics {
            let devices = if nic.devices.is_empty() { String::new() } else { format!(", devices {}", nic.devices.join(", ")) };
            let (number, process, connections) = (nic.number, nic.process, nic.connections);
            println!("  NIC {number} of agent {}: process {process}, {connections} connections{devices}", agent.process);
        }
    }
}

/// How long ago that was, rounded.
fn age(since: u64) -> String {
    let passed = (UNIX_EPOCH + Duration::from_secs(since)).elapsed().map_or(0, |passed| passed.as_secs());
    match passed {
        0..120 => format!("{passed} s"),
        120..7200 => format!("{} min", passed / 60),
        7200..172_800 => format!("{} h", passed / 3600),
        _ => format!("{} days", passed / 86_400),
    }
}

/// Seconds since 1970 as a date and a time of day, UTC.
pub fn date(seconds: u64) -> String {
    let (mut days, of_day) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02}:{second:02} UTC", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_767_225_599, "2025-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn nobody_and_somebody_silent_are_told_apart() {
        let directory = std::env::temp_dir().join(format!("baton-status-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("agent.sock");
        assert_eq!(look(&path).exit(), DOWN);
        let listener = baton_linux::control::Listener::bind(&path).expect("a listener");
        std::fs::write(directory.join("agent.sock.12"), "").expect("a file");
        std::fs::write(directory.join("agent.sock.old"), "").expect("a file");
        assert_eq!(sockets_of_namespaces(&path), [directory.join("agent.sock.12")]);
        let silent = look(&path);
        assert_eq!(silent.exit(), SILENT);
        assert!(silent.reason.expect("a reason").contains("in time"));
        drop(listener);
        assert_eq!(look(&path).exit(), DOWN);
        std::fs::remove_dir_all(&directory).expect("its removal");
    }
}
