//! What is in the archive. Everything that may not answer has a limit, and what did not is named.

use crate::list::events::Event;
use crate::tools::{SocketArgument, is_silent};
use anyhow::{Context, Result, bail};
use baton_client::tool::Tool;
use baton_linux::{process, reading};
use baton_protocol::program::{Ask, Reply, VERSION};
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, UNIX_EPOCH};

/// Files of the archive: name and text.
pub type Parts = Vec<(String, String)>;

/// Time that a command gets.
const LIMIT: Duration = Duration::from_secs(3);
/// Time in which a process's entries in /proc are read.
const GLANCE: Duration = Duration::from_millis(200);
/// Most bytes of a command's output, and of a file.
const MOST: u64 = 4 << 20;
/// Most processes that are described.
const PROCESSES: usize = 256;

/// The first file.
const README: &str = "A report of Baton, for whoever looks into a fault.

machine.json      versions, kernel, what it may do, TCP settings of this network namespace
doctor.json       baton doctor --json
config.toml       Baton's configuration, if there is one
processes.txt     Baton's processes: state, memory, limits on resources, control group
log.txt           the last lines of the service's log, if there is one
agent-N/          of each agent: statistics.json (counters of agent and NICs), stats.json (refusals and returns by reason),
                  connections.json (baton ls -e --json), nic-N.json (settings), addresses.json
missing.txt       what did not answer or could not be read

There are no bytes that connections have carried, no keys and no host name in it, unless the configuration or the log has them.
Addresses are replaced by numbers, the same address by the same number, unless `--addresses` was given.
";

/// The settings of the kernel that matter.
const SETTINGS: [&str; 16] = [
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_available_congestion_control",
    "net/ipv4/tcp_timestamps",
    "net/ipv4/tcp_sack",
    "net/ipv4/tcp_window_scaling",
    "net/ipv4/tcp_mtu_probing",
    "net/ipv4/tcp_retries2",
    "net/ipv4/tcp_syncookies",
    "net/ipv4/ip_unprivileged_port_start",
    "net/core/default_qdisc",
    "net/core/rmem_max",
    "net/core/wmem_max",
    "net/core/somaxconn",
    "kernel/yama/ptrace_scope",
];

/// Seconds since 1970.
pub fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

/// Date and time for a file's name, UTC.
pub fn date(now: u64) -> String {
    crate::status::date(now).trim_end_matches(" UTC").replace(['-', ':'], "").replace(' ', "-")
}

/// A short file's text.
fn read(path: impl AsRef<Path>) -> Option<String> {
    let mut text = Vec::new();
    std::fs::File::open(path).ok()?.take(MOST).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Everything, and what is missing.
pub fn everything(socket: &SocketArgument) -> (Parts, Vec<String>) {
    let program = std::env::current_exe();
    let doctor = std::thread::spawn(move || {
        let mut command = Command::new(program?);
        output(command.args(["doctor", "--json"]))
    });
    let mut journal = Command::new("journalctl");
    journal.args(["--unit", "baton", "--lines", "500", "--no-pager", "--quiet", "--no-hostname", "--output", "short-iso"]);
    let journal = std::thread::spawn(move || output(&mut journal));
    let (sockets, unwilling) = socket.find();
    let agents: Vec<_> = sockets
        .into_iter()
        .map(|(socket, process)| (socket.clone(), std::thread::spawn(move || agent(&socket, process))))
        .collect();

    let mut parts: Parts = vec![("README.txt".into(), README.into()), ("machine.json".into(), pretty(&machine()))];
    let mut missing: Vec<String> = unwilling.into_iter().map(is_silent).collect();
    match read("/etc/baton/config.toml") {
        Some(text) => parts.push(("config.toml".into(), text)),
        None => missing.push("config.toml: there is no /etc/baton/config.toml, or it cannot be read".into()),
    }
    let (text, unread) = processes();
    parts.push(("processes.txt".into(), text));
    missing.extend(unread);
    for (number, (socket, agent)) in agents.into_iter().enumerate() {
        let Ok((files, failed)) = agent.join() else { continue };
        parts.extend(files.into_iter().map(|(name, text)| (format!("agent-{number}/{name}"), text)));
        missing.extend(failed.map(|error| format!("agent-{number}: the agent at {}: {error:#}", socket.display())));
    }
    for (name, thread) in [("doctor.json", doctor), ("log.txt", journal)] {
        match thread.join() {
            Ok(Ok(text)) if text.trim().is_empty() => missing.push(format!("{name}: there is nothing")),
            Ok(Ok(text)) => parts.push((name.into(), text)),
            Ok(Err(error)) => missing.push(format!("{name}: {error:#}")),
            Err(_) => missing.push(format!("{name}: no thread")),
        }
    }
    let text = if missing.is_empty() { "nothing\n".into() } else { missing.join("\n") + "\n" };
    parts.push(("missing.txt".into(), text));
    (parts, missing)
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

/// What a command prints, if it ends in time. It is killed otherwise.
fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
    let out = child.stdout.take().context("its output")?;
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let read = out.take(MOST).read_to_end(&mut text);
        let _ = done.send(read.map(|_| text));
    });
    let text = is_done.recv_timeout(LIMIT);
    let _ = child.kill();
    // A process in the kernel may not end at once; nobody waits for it.
    let _ = child.try_wait();
    match text {
        Ok(text) => Ok(String::from_utf8_lossy(&text?).into_owned()),
        Err(_) => bail!("{name} has not ended within {} s", LIMIT.as_secs()),
    }
}

fn machine() -> Value {
    let trimmed = |path: &str| read(path).map(|text| text.trim().to_owned());
    let settings: serde_json::Map<_, _> =
        SETTINGS.iter().map(|name| (name.replace('/', "."), json!(trimmed(&format!("/proc/sys/{name}"))))).collect();
    let system = trimmed("/etc/os-release").unwrap_or_default();
    let named = |key: &str| {
        system.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).map(|value| value.trim_matches('"').to_owned())
    };
    let memory: Vec<_> = read("/proc/meminfo").unwrap_or_default().lines().take(3).map(str::to_owned).collect();
    let own = |line: &str| {
        let status = read("/proc/self/status").unwrap_or_default();
        status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':')).map(|text| text.trim().to_owned())
    };
    json!({
        "baton": env!("CARGO_PKG_VERSION"),
        "protocol": VERSION,
        "library": crate::run::find_library().map_err(|error| format!("{error:#}")).is_ok(),
        "time": date(now()),
        "kernel": trimmed("/proc/sys/kernel/osrelease"),
        "kernel_version": trimmed("/proc/sys/kernel/version"),
        "architecture": std::env::consts::ARCH,
        "system": named("PRETTY_NAME"),
        "machine": process::machine(),
        "processors_allowed": process::allowed_cpus(),
        "load": trimmed("/proc/loadavg"),
        "memory": memory,
        "user": process::user(),
        "capabilities": own("CapEff"),
        "settings": settings,
        "socket_variable": std::env::var_os("BATON_SOCKET").map(|path| path.to_string_lossy().into_owned()),
    })
}

/// Baton's processes, by name; and those that could not be read.
fn processes() -> (String, Vec<String>) {
    const LINES: [&str; 15] = [
        "Name",
        "State",
        "Pid",
        "PPid",
        "Uid",
        "FDSize",
        "VmPeak",
        "VmSize",
        "VmLck",
        "VmRSS",
        "VmSwap",
        "Threads",
        "CapEff",
        "Seccomp",
        "NoNewPrivs",
    ];
    let (mut text, mut missing) = (String::new(), Vec::new());
    let named = process::all().into_iter().filter(|one| process::name(*one).is_some_and(|name| name.starts_with("baton")));
    for one in named.take(PROCESSES) {
        let about = move || {
            let entry = |name: &str| read(format!("/proc/{one}/{name}"));
            let status = entry("status")?;
            let lines = status.lines().filter(|line| line.split_once(':').is_some_and(|(key, _)| LINES.contains(&key)));
            let mut text = lines.map(|line| format!("{line}\n")).collect::<String>();
            text += &format!("group: {}", entry("cgroup").unwrap_or_default());
            text += &format!("oom_score_adj: {}", entry("oom_score_adj").unwrap_or_default());
            Some(text + &entry("limits").unwrap_or_else(|| "limits: cannot be read\n".into()))
        };
        match reading::within(one, GLANCE, about) {
            Some(Some(about)) => text += &format!("{about}\n"),
            // It has ended.
            Some(None) => {}
            None => missing.push(format!("process {one}: it does not let anybody look")),
        }
    }
    if text.is_empty() {
        text = "no process of Baton's runs\n".into();
    }
    (text, missing)
}

/// What an agent says of itself, until it does not answer.
fn agent(socket: &Path, process: Option<u32>) -> (Parts, Option<anyhow::Error>) {
    let mut parts = vec![("socket.txt".into(), format!("{}\n", socket.display()))];
    let asked = ask(socket, process, &mut parts);
    (parts, asked.err())
}

fn ask(socket: &Path, process: Option<u32>, parts: &mut Parts) -> Result<()> {
    let mut tool = Tool::look(socket, process)?;
    let statistics = tool.statistics()?;
    let nics = statistics.nics.len() as u32;
    parts.push(("statistics.json".into(), pretty(&serde_json::to_value(&statistics)?)));
    parts.push(("stats.json".into(), pretty(&serde_json::to_value(tool.counts()?)?)));
    let list = tool.connections()?;
    let numbers: Vec<_> = list.iter().map(|info| (info.session, info.connection)).collect();
    let mut events = Event::by_connection(&tool.events(&numbers)?);
    let mut connections = Vec::new();
    for info in &list {
        let mut connection = serde_json::to_value(info)?;
        let its = events.remove(&(info.session, info.connection)).unwrap_or_default();
        connection["events"] = serde_json::to_value(its)?;
        connections.push(connection);
    }
    parts.push(("connections.json".into(), pretty(&Value::Array(connections))));
    for nic in 0..nics {
        if let Reply::Offloads(offloads) = tool.ask(Ask::Offloads { nic })? {
            let mut settings = serde_json::to_value(*offloads)?;
            leave_out_keys(&mut settings);
            parts.push((format!("nic-{nic}.json"), pretty(&settings)));
        }
    }
    if let Reply::Addresses(addresses) = tool.ask(Ask::Addresses { settled: false })? {
        parts.push(("addresses.json".into(), pretty(&serde_json::to_value(addresses)?)));
    }
    Ok(())
}

/// Removes what is called a key, at any depth: who knows the key of the distribution to workers can choose the worker.
fn leave_out_keys(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, value) in map.iter_mut() {
                if name.contains("key") || name.contains("secret") {
                    *value = Value::String("left out".into());
                } else {
                    leave_out_keys(value);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(leave_out_keys),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_left_out() {
        let mut value = json!({ "rss": { "key": [1, 2], "queues": 4 }, "list": [{ "secret": 7 }] });
        leave_out_keys(&mut value);
        assert_eq!(value, json!({ "rss": { "key": "left out", "queues": 4 }, "list": [{ "secret": "left out" }] }));
        let offloads = serde_json::to_value(baton_offloads::Offloads::default()).expect("settings");
        let mut without = offloads.clone();
        leave_out_keys(&mut without);
        assert!(without.to_string().contains("left out"), "the key's name has changed: {offloads}");
    }

    #[test]
    fn a_command_that_does_not_end_is_named() {
        let error = output(Command::new("sleep").arg("100")).expect_err("no end");
        assert!(error.to_string().contains("sleep has not ended within"), "{error:#}");
        assert_eq!(output(Command::new("echo").arg("text")).expect("text"), "text\n");
        assert!(output(&mut Command::new("/nowhere/program")).is_err());
    }
}
