//! `baton run`: a program with the ring bypass preloaded.

use crate::placement::Where;
use crate::start::{FlipArguments, StartArguments};
use anyhow::{Context, Result, bail};
use baton_client::preload;
use baton_client::rules::{Interface, Nagle, Offload, RUN_VARIABLE, Rule, Run, When};
use baton_client::tool::Tool;
use baton_linux::control::Channel;
use baton_linux::executable::{self, Start};
use baton_linux::{files, process, report};
use baton_protocol::native::Native;
use baton_protocol::program::{Answer, Ask, Reply, Request};
use clap::Args;
use serde::Deserialize;
use std::ffi::{CString, OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const EXAMPLES: &str = "Examples:
  baton run -- nginx -g 'daemon off;'
  baton run --rule accepted,local-port=80 --rule never -- ./server
  baton run --rule established,local-port=80 --rule hot:500K -- ./server
  baton run --config baton.toml -- redis-server
  baton run --flip 1..50 --flip-report report.json -- python3 -m http.server
  baton run --print-config > baton.toml
  baton run --place near-nic -- redis-server
  baton run --offload full -- nginx -g 'daemon off;'
  baton run --address 10.1.0.50/24 --offload full -- nginx -g 'daemon off;'
  baton run --offload fast-path -- redis-server
  baton run --interface aggregated -- ./logger
  baton run --nagle host -- ./logger
  baton run --nics 2 --device eth0 --device eth1 -- nginx -g 'daemon off;'
  baton run --choose gain -- nginx -g 'daemon off;'
  baton run --if-up -- ./server

If no Baton runs (at BATON_SOCKET, or /run/baton/agent.sock), one is started for the program, and ends with it: that needs root,
and Linux 6.6 or later. The program has BATON_SOCKET in its environment, so that `baton ls` in a shell shows its Baton.";

/// The configuration file, as `--print-config` writes it.
const CONFIG: &str = include_str!("config.toml");

#[derive(Args)]
pub struct RunArguments {
    /// A rule: WHEN[,CONDITION=VALUE]... The first that matches a connection counts. WHEN is established, accepted,
    /// connected, bytes:N, requests:N, hot[:N] or never; hot is whenever it carries N bytes a second (with K, M or G;
    /// if left out 1M), until it carries much less. Conditions are local-port, remote-port (80 or 8000-8999, several
    /// with +), local, remote (an address or network), program, cgroup.
    #[arg(long = "rule", value_name = "RULE")]
    rules: Vec<Rule>,
    /// A file with rules; see --print-config. Those of the command line come first.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a configuration file with comments.
    #[arg(long)]
    print_config: bool,
    /// Who makes the program's connections, and what of them the NIC has: handoff (the kernel, and they move to the NIC
    /// by the rules), fast-path (the same, but the NIC keeps only data in order and acknowledgements, and the host's
    /// own TCP has the rest) or full (the NIC itself, where it can).
    #[arg(long, value_enum, default_value_t = Offloading::Handoff, value_name = "WHAT")]
    offload: Offloading,
    /// How sends cross to the NIC: handshake (each is acknowledged by the NIC before the next), batched (a ring), or
    /// aggregated (small ones are joined on the host while earlier ones are unacknowledged).
    #[arg(long, value_enum, default_value_t = Crossing::Batched, value_name = "HOW")]
    interface: Crossing,
    /// Where Nagle's rule keeps small sends back: nic (they cross, and its TCP joins them) or host (they stay in memory
    /// until the peer has acknowledged what came before, and cross as one). Default: host with --interface aggregated,
    /// else nic.
    #[arg(long, value_enum, value_name = "WHERE")]
    nagle: Option<NagleAt>,
    /// Hand connections over as soon as their rule matches, even short ones and many at once, which costs the program
    /// time. For tests.
    #[arg(long)]
    eager: bool,
    #[command(flatten)]
    flip: FlipArguments,
    #[command(flatten)]
    start: StartArguments,
    /// Where the program's threads run: anywhere, or near the NIC, on processors of its node that it does not use
    /// itself.
    #[arg(long, value_enum, default_value_t = Where::Anywhere, value_name = "WHERE")]
    place: Where,
    /// Start the program without Baton if none is up that takes it, instead of starting one for it.
    #[arg(long)]
    if_up: bool,
    /// The name by which the program is called (its argument 0), if that is not its path.
    #[arg(long, value_name = "NAME")]
    argv0: Option<OsString>,
    /// The program and its arguments.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Values of `--offload`.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Offloading {
    Handoff,
    FastPath,
    Full,
}

/// Values of `--interface`.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Crossing {
    Handshake,
    Batched,
    Aggregated,
}

/// Values of `--nagle`.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum NagleAt {
    Nic,
    Host,
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
    if arguments.flip.is_on() {
        rules.push(Rule::all(When::Established));
    } else if rules.is_empty() {
        rules.push(Rule::all(When::Bytes(DEFAULT_BYTES)));
    }
    Ok(rules)
}

/// Bytes after which a connection is handed over if there is no rule.
const DEFAULT_BYTES: u64 = 64 << 10;

/// Becomes the program (execve). Returns only on an error.
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
    let filters = match baton_linux::seccomp::filters().unwrap_or_default() {
        0 => 0,
        filters => match baton_linux::seccomp::try_calls() {
            Ok(()) => filters,
            Err(call) => {
                report!("baton: this program runs without Baton: the seccomp filter here does not allow {call}");
                become_program(&mut program(arguments))
            }
        },
    };
    if arguments.if_up
        && let Some(why) = arguments.start.why_none()
    {
        report!("baton: this program runs without Baton: {why}");
        become_program(&mut program(arguments))
    }
    let (socket, channel) = arguments.start.agent(arguments.place)?;
    // A container's program may have found an agent of the host's, whose user it is not shown: the path counts then.
    let user = channel.peer_user().ok().filter(|user| *user == process::user()).unwrap_or(0);
    let group = match arguments.flip.make_group(&channel) {
        // An agent of another version, for example: while a package is upgraded, or in a container of an older image.
        Err(why) if arguments.if_up => {
            report!("baton: this program runs without Baton: {why:#}");
            become_program(&mut program(arguments))
        }
        made => made?,
    };
    let offload = match arguments.offload {
        Offloading::Handoff => Offload::Handoff,
        Offloading::FastPath => partial_offload(&channel)?,
        Offloading::Full => full_offload(&channel)?,
    };
    let interface = match arguments.interface {
        Crossing::Handshake => Interface::Handshake,
        Crossing::Batched => Interface::Batched,
        Crossing::Aggregated => Interface::Aggregated,
    };
    let (name, starts) = how_it_starts(&arguments.command[0]);
    if let Starts::Natively(why) = &starts {
        say_natively(&channel, name, why.clone())?;
    }
    drop(channel);
    let nagle = match arguments.nagle {
        None => Nagle::usual(interface),
        Some(NagleAt::Nic) => Nagle::Nic,
        Some(NagleAt::Host) => Nagle::Host,
    };
    if interface == Interface::Aggregated || nagle == Nagle::Host {
        check_joining(&socket, interface, offload)?;
    }
    // For tools that the program calls, `baton ls` in a shell for example.
    let named = socket.clone();
    let run = Run {
        socket,
        user,
        group,
        rules,
        flips: arguments.flip.is_on(),
        eager: arguments.eager,
        offload,
        interface,
        nagle,
        filters,
        refused: None,
        error: files::identity(std::io::stderr().as_fd()),
    };
    let mut command = program(arguments);
    command.env("BATON_SOCKET", named).env(RUN_VARIABLE, serde_json::to_string(&run)?);
    let mut libraries = preload::value(std::env::var_os(preload::VARIABLE).as_deref(), &library);
    if let Starts::Behind(first) = starts
        && !preload::names(libraries.as_bytes(), first.as_bytes())
    {
        let mut kept = OsString::from(preload::VARIABLE);
        kept.push("=");
        kept.push(&libraries);
        command.env(preload::RESTORED, kept);
        let mut all = first;
        all.push(":");
        all.push(libraries);
        libraries = all;
    }
    command.env(preload::VARIABLE, libraries);
    become_program(&mut command)
}

/// What a program needs to be served, or why it cannot be.
enum Starts {
    Usually,
    /// This library has to come before Baton's.
    Behind(OsString),
    /// It runs natively.
    Natively(Native),
}

/// How a program starts, and its name for messages.
fn how_it_starts(program: &OsStr) -> (String, Starts) {
    let unknown = || (String::new(), Starts::Usually);
    let Ok(name) = CString::new(program.as_bytes()) else { return unknown() };
    let path = std::env::var_os("PATH");
    let Some(found) = executable::search(&name, path.as_deref().map(OsStr::as_bytes)) else { return unknown() };
    let (script, start) = executable::of_path(None, found.as_c_str());
    let name = OsStr::from_bytes(script.as_ref().unwrap_or(&found).as_bytes()).display().to_string();
    let starts = match start {
        Start::Musl(linker) => Starts::Natively(Native::Musl(OsStr::from_bytes(linker.as_bytes()).display().to_string())),
        Start::Static => Starts::Natively(Native::Static),
        Start::Go => Starts::Natively(Native::Go),
        Start::Sanitized(first) => Starts::Behind(OsStr::from_bytes(first.as_bytes()).to_owned()),
        Start::Glibc | Start::Unknown => Starts::Usually,
    };
    (name, starts)
}

/// Says that a program runs natively, here and in `baton ls`: this process becomes it.
fn say_natively(channel: &Channel, name: String, why: Native) -> Result<()> {
    report!("baton: {name} runs without Baton: {why}");
    let program = Path::new(&name).file_name().map(|name| name.display().to_string());
    channel.send(&Request { tag: 1, body: Ask::Native { program, why } }, &[])?;
    channel.receive::<Answer>()?;
    Ok(())
}

fn program(arguments: &RunArguments) -> Command {
    let mut command = Command::new(&arguments.command[0]);
    command.args(&arguments.command[1..]);
    if let Some(name) = &arguments.argv0 {
        command.arg0(name);
    }
    command
}

/// Returns only on an error.
fn become_program(command: &mut Command) -> ! {
    let error = command.exec();
    report!("baton: {}: {error}", command.get_program().display());
    std::process::exit(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 });
}

/// Fails if this NIC cannot look for sends that the program has joined in memory.
fn check_joining(socket: &Path, interface: Interface, offload: Offload) -> Result<()> {
    let (what, instead) = match interface {
        Interface::Aggregated => ("--interface aggregated", "--interface batched"),
        _ => ("--nagle host", "--nagle nic"),
    };
    if offload == Offload::FastPath {
        bail!("{what} needs a NIC that has all of a connection, not --offload fast-path: use {instead}");
    }
    let workers = Tool::connect(socket)?.statistics()?.nics.iter().map(|nic| nic.workers.len()).max().unwrap_or(0);
    if workers > 1 {
        bail!("{what} needs a NIC with one worker, and this one has {workers}: use {instead}");
    }
    Ok(())
}

/// Full offload; says so if the NIC cannot make connections now. The program runs nevertheless: the kernel makes them.
fn full_offload(channel: &Channel) -> Result<Offload> {
    channel.send(&Request { tag: 1, body: Ask::MakesConnections }, &[])?;
    if let Reply::Stayed { reason, .. } = channel.receive::<Answer>()?.0.body {
        report!("baton: --offload full: the kernel makes this program's connections, and they are handed off: {reason}");
    }
    Ok(Offload::Full)
}

/// Partial offload; says so if the NIC cannot do that now. The program runs nevertheless: the NIC has all of its
/// connections.
fn partial_offload(channel: &Channel) -> Result<Offload> {
    channel.send(&Request { tag: 1, body: Ask::KeepsFastPath }, &[])?;
    if let Reply::Stayed { reason, .. } = channel.receive::<Answer>()?.0.body {
        report!("baton: --offload fast-path: the NIC has all of this program's connections: {reason}");
    }
    Ok(Offload::FastPath)
}

/// Finds the library to preload: next to this program, or where it is installed.
pub fn find_library() -> Result<PathBuf> {
    const NAME: &str = preload::LIBRARY;
    let program = std::env::current_exe().context("finding this program's own path")?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    let places = [directory.join(NAME), directory.join("../lib/baton").join(NAME)];
    match places.iter().find(|place| place.exists()) {
        Some(place) => Ok(place.canonicalize()?),
        None => bail!(
            "{NAME} is missing: neither {} nor {} is there; `make` builds it beside this program, so copy both",
            places[0].display(),
            places[1].display()
        ),
    }
}
