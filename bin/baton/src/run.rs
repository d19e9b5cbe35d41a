//! `baton run`: a program with the ring bypass preloaded.

use anyhow::{Context, Result, bail};
use baton_agent::AgentSettings;
use baton_client::protocol::{Answer, Ask, Flip, Reply, Request};
use baton_client::rules::{RUN_VARIABLE, Rule, Run, When};
use baton_control::{LinkSettings, NicSettings};
use baton_keeper::Devices;
use baton_kernel::control::Channel;
use baton_kernel::process;
use clap::Args;
use serde::Deserialize;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub const EXAMPLES: &str = "Examples:
  baton run -- nginx -g 'daemon off;'
  baton run --rule accepted,local-port=80 --rule never -- ./server
  baton run --config baton.toml -- redis-server
  baton run --flip 1..50 --flip-report report.json -- python3 -m http.server
  baton run --print-config > baton.toml

Without a Baton that runs already (BATON_SOCKET, or /run/baton/agent.sock) one is started for the program, and ends with it.
That needs root, and Linux 6.6 or later.";

/// The configuration file, as `--print-config` writes it.
const CONFIG: &str = include_str!("config.toml");

#[derive(Args)]
pub struct RunArguments {
    /// A rule: WHEN[,CONDITION=VALUE]... The first that fits a connection counts. WHEN is established, accepted, connected, bytes:N,
    /// requests:N or never; conditions are local-port, remote-port (80 or 8000-8999, several with +), local, remote (an address or
    /// network), program, cgroup.
    #[arg(long = "rule", value_name = "RULE")]
    rules: Vec<Rule>,
    /// A file with rules; see --print-config. Those of the command line come first.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Writes a configuration file with comments to the standard output.
    #[arg(long)]
    print_config: bool,
    /// Moves every connection to and fro at random intervals of so many milliseconds, for as long as it lives. For tests.
    #[arg(long, value_name = "MIN..MAX", value_parser = interval)]
    flip: Option<(u64, u64)>,
    /// Seed of the intervals.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A file for one line of JSON about what became of the connections.
    #[arg(long, value_name = "FILE")]
    flip_report: Option<PathBuf>,
    /// Where the agent listens, if one runs already.
    #[arg(long, env = "BATON_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Microseconds that the NIC of a Baton that is started for the program polls without work before it sleeps.
    #[arg(long, default_value_t = 100)]
    spin: u64,
    /// Where a Baton that is started for the program writes its messages.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(last = true)]
    command: Vec<OsString>,
}

fn interval(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("{text:?} is no interval; one looks like 1..50, in milliseconds");
    let (min, max) = text.split_once("..").ok_or_else(wrong)?;
    let millis = |text: &str| {
        let number = text.trim_start_matches('=').parse::<f64>().ok().filter(|number| (0.0..1e9).contains(number));
        number.map(|number| (number * 1000.0) as u64)
    };
    match (millis(min), millis(max)) {
        (Some(min), Some(max)) if min <= max && max > 0 => Ok((min, max)),
        _ => Err(wrong()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    rule: Vec<Rule>,
}

fn rules(arguments: &RunArguments) -> Result<Vec<Rule>> {
    let mut rules = arguments.rules.clone();
    if let Some(path) = &arguments.config {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let config: Config = toml::from_str(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
        rules.extend(config.rule);
    }
    if arguments.flip.is_some() {
        rules.push(Rule::all(When::Established));
    } else if rules.is_empty() {
        rules.push(Rule::all(When::Bytes(DEFAULT_BYTES)));
    }
    Ok(rules)
}

/// Bytes after which a connection is worth moving, if nobody says otherwise.
const DEFAULT_BYTES: u64 = 64 << 10;

/// Becomes the program.
pub fn run(arguments: &RunArguments) -> Result<()> {
    if arguments.print_config {
        print!("{CONFIG}");
        return Ok(());
    }
    if arguments.command.is_empty() {
        bail!("which program? `baton run -- PROGRAM [ARGUMENTS]`; see `baton run --help`");
    }
    let rules = rules(arguments)?;
    let library = find_library()?;
    let (socket, channel) = match running_agent(arguments)? {
        Some(found) => found,
        None => start_agent(arguments)?,
    };
    let group = make_group(arguments, &channel)?;
    drop(channel);
    let run = Run { socket, group, rules, flips: arguments.flip.is_some() };
    let mut preload = OsString::from(&library);
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(&arguments.command[0]);
    command.args(&arguments.command[1..]).env("LD_PRELOAD", preload).env(RUN_VARIABLE, serde_json::to_string(&run)?);
    let error = command.exec();
    eprintln!("baton: {}: {error}", arguments.command[0].display());
    std::process::exit(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 });
}

/// The library that is preloaded: beside this program, or where it is installed.
pub fn find_library() -> Result<PathBuf> {
    const NAME: &str = "libbaton_preload.so";
    let program = std::env::current_exe().context("finding this program's own path")?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    let places = [directory.join(NAME), directory.join("../lib/baton").join(NAME)];
    match places.iter().find(|place| place.exists()) {
        Some(place) => Ok(place.canonicalize()?),
        None => bail!("{NAME} is missing: neither {} nor {} is there", places[0].display(), places[1].display()),
    }
}

fn running_agent(arguments: &RunArguments) -> Result<Option<(PathBuf, Channel)>> {
    if let Some(path) = &arguments.socket {
        let channel = Channel::connect(path).with_context(|| format!("no agent at {}", path.display()))?;
        return Ok(Some((path.clone(), channel)));
    }
    let path = PathBuf::from(baton_client::DEFAULT_SOCKET);
    Ok(Channel::connect(&path).ok().map(|channel| (path, channel)))
}

/// Settings of a Baton beside the kernel.
pub fn beside_settings(socket: PathBuf, lingers: bool, spin: u64) -> Result<AgentSettings> {
    let mut key = [0u8; 32];
    process::random(&mut key).context("random numbers")?;
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|n| key[8 * at + n]));
    Ok(AgentSettings {
        socket,
        interface: None,
        session_bytes: SESSION_BYTES,
        lingers,
        core: None,
        patience: 500_000,
        crash: None,
        nic: NicSettings {
            slots: SLOTS,
            core: None,
            spin,
            segmentation: true,
            drop_during_moves: false,
            beside: true,
            link: LinkSettings::default(),
            hash_key: std::array::from_fn(word),
        },
    })
}

/// Connections that a NIC holds.
const SLOTS: usize = 4096;
/// Memory that a session may use.
const SESSION_BYTES: usize = 2 << 30;

fn start_agent(arguments: &RunArguments) -> Result<(PathBuf, Channel)> {
    let devices = Devices::beside(SLOTS).context("starting a Baton for this program")?;
    let directory = std::env::temp_dir().join(format!("baton-run-{}", std::process::id()));
    // One that is there already is somebody else's.
    std::fs::create_dir(&directory).with_context(|| format!("making {}", directory.display()))?;
    let socket = directory.join("agent.sock");
    let settings = beside_settings(socket.clone(), true, arguments.spin)?;
    let me = process::open_process(std::process::id()).context("pidfd_open")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(match &arguments.log {
        Some(path) => Stdio::from(File::create(path).with_context(|| format!("making {}", path.display()))?),
        None => Stdio::null(),
    });
    let launched = baton_keeper::launch(command, &settings, &devices, Some(me.as_fd()));
    let (mut starter, _) = launched.inspect_err(|_| drop(std::fs::remove_dir(&directory)))?;
    let _ = starter.wait();
    let channel = Channel::connect(&socket).context("the agent that was just started")?;
    Ok((socket, channel))
}

/// Tells the agent what is to be done with this program's connections.
fn make_group(arguments: &RunArguments, channel: &Channel) -> Result<u64> {
    let file = match &arguments.flip_report {
        Some(path) => Some(File::create(path).with_context(|| format!("making {}", path.display()))?),
        None => None,
    };
    let flip = arguments.flip.map(|(min, max)| Flip { min, max, seed: arguments.seed });
    let descriptors: Vec<_> = file.iter().map(AsFd::as_fd).collect();
    channel.send(&Request { tag: 1, body: Ask::Group { flip } }, &descriptors)?;
    match channel.receive::<Answer>()?.0.body {
        Reply::Grouped { group } => Ok(group),
        Reply::Failed { reason } => bail!(reason),
        other => bail!("the agent answers {other:?}; are both of the same version?"),
    }
}
