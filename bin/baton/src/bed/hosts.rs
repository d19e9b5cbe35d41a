//! `baton hosts`: two hosts and a Baton, for a program of the user's.

use super::workers::WorkerArguments;
use crate::addresses::{self, AddressArguments};
use crate::filter;
use crate::nics::{Chosen, PolicyArguments};
use anyhow::{Context, Result, anyhow, bail};
use baton_bed::testbed::{ControlPoint, Testbed, TestbedSettings, address_a, address_b};
use baton_linux::process;
use baton_offloads::Offloads;
use clap::Args;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

#[derive(Args)]
pub struct HostsArguments {
    /// A shell command to run on the second host. It is killed when the program on the first host has ended.
    #[arg(long, value_name = "COMMAND")]
    peer: Option<String>,
    /// MTU of both hosts.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=9000))]
    mtu: u32,
    #[command(flatten)]
    workers: WorkerArguments,
    /// Number of NICs. Between a kernel and its wire there is one; only NICs beside the kernel can be several
    /// (`baton up --nics`).
    #[arg(long, default_value_t = 1, value_name = "N")]
    nics: usize,
    /// How it is chosen which connections are on the NIC.
    #[arg(long, value_enum, value_name = "HOW")]
    choose: Option<Chosen>,
    #[command(flatten)]
    policy: PolicyArguments,
    /// A setting of the NIC's, as for `baton nic set`. Can be given several times.
    #[arg(long = "nic", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// A file with such settings in a table `[nic]`. Those of the command line are applied after it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    addresses: AddressArguments,
    /// The NIC belongs to an owner and filters frames by the rules of this file (see `baton nic filter --help`).
    #[arg(long, value_name = "FILE")]
    filter: Option<PathBuf>,
    /// As --filter; who has the key in this file can change the rules. BATON_FILTER_SOCKET is set for the programs.
    #[arg(long, value_name = "FILE")]
    filter_key: Option<PathBuf>,
    /// With a filter: the first host is a container, whose root has no rights over the NIC's owner. Needs root.
    #[arg(long)]
    contain: bool,
    /// The program to run on the first host, with BATON_SOCKET in its environment. Default: a shell.
    #[arg(last = true)]
    command: Vec<std::ffi::OsString>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    nic: BTreeMap<String, toml::Value>,
}

/// The NIC's offloads from the configuration file, then from the command line's settings, then from its options.
fn offloads(arguments: &HostsArguments) -> Result<Offloads> {
    let mut offloads = Offloads::default();
    if let Some(path) = &arguments.config {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let config: Config = toml::from_str(&text).map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let assignment = |(key, value): (String, toml::Value)| match value {
            toml::Value::String(text) => format!("{key}={text}"),
            toml::Value::Boolean(on) => format!("{key}={}", if on { "on" } else { "off" }),
            other => format!("{key}={other}"),
        };
        let all: Vec<String> = config.nic.into_iter().map(assignment).collect();
        offloads.set_all(all.iter().map(String::as_str)).map_err(|why| anyhow!("{}: {why}", path.display()))?;
    }
    offloads.set_all(arguments.settings.iter().map(String::as_str)).map_err(|why| anyhow!("{why}"))?;
    Ok(arguments.policy.apply(offloads))
}

/// The initial rules and key of the NIC's owner, if the NIC is to have one. Without a key no process can change the
/// rules.
fn control_point(arguments: &HostsArguments) -> Result<Option<ControlPoint>> {
    if arguments.filter.is_none() && arguments.filter_key.is_none() {
        if arguments.contain {
            bail!("--contain is for a NIC with a filter: add --filter or --filter-key");
        }
        return Ok(None);
    }
    let rules = arguments.filter.as_deref().map(filter::read_rules).transpose()?.unwrap_or_default();
    let key = match &arguments.filter_key {
        Some(path) => filter::read_key(path)?,
        None => {
            let mut key = vec![0; 32];
            process::random(&mut key).context("random numbers")?;
            key
        }
    };
    Ok(Some(ControlPoint { key, rules, contained: arguments.contain }))
}

/// Runs the program. Returns its exit status.
pub fn run(arguments: &HostsArguments) -> Result<u8> {
    if arguments.nics != 1 {
        bail!(
            "--nics {}: between a kernel and its wire there is one NIC; `baton up --nics` starts several beside the kernel",
            arguments.nics
        );
    }
    let mut settings = TestbedSettings { mtu: arguments.mtu, ..TestbedSettings::default() };
    arguments.workers.apply(&mut settings);
    settings.choose = arguments.choose.map_or(settings.choose, Chosen::choose);
    settings.offloads = offloads(arguments)?;
    let queues = usize::from(settings.offloads.rss.queues);
    if queues > settings.workers {
        bail!("queues={queues}: there are {} workers; see --workers", settings.workers);
    }
    settings.control_point = control_point(arguments)?;
    settings.addresses = arguments.addresses.addresses()?;
    settings.between_probes = arguments.addresses.between_probes();
    let bed = Testbed::new(&settings)?;
    if arguments.addresses.any() {
        addresses::settle(&mut bed.tool()?)?;
    }
    let shell = std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let command = if arguments.command.is_empty() { vec![shell] } else { arguments.command.clone() };
    if std::io::stderr().is_terminal() {
        eprintln!(
            "host A (here): {} {}, Baton's agent at {}\nhost B: {} {}",
            address_a(false),
            address_a(true),
            bed.socket().display(),
            address_b(false),
            address_b(true)
        );
    }
    let environment = |command: &mut Command| {
        command.env("BATON_SOCKET", bed.socket()).env("BATON_A", address_a(false).to_string());
        command.env("BATON_B", address_b(false).to_string());
        if settings.control_point.is_some() {
            command.env("BATON_FILTER_SOCKET", bed.filter_socket());
        }
    };
    let mut peer = None;
    if let Some(text) = &arguments.peer {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(text);
        environment(&mut command);
        process::inherit(&mut command, &[], true);
        command.process_group(0);
        peer = Some(bed.host_b.spawn(&mut command).context("starting the peer's command")?);
    }
    let mut program =
        bed.container.as_ref().map_or_else(|| Command::new(&command[0]), |container| container.command(&command[0]));
    program.args(&command[1..]);
    environment(&mut program);
    let child = match &bed.container {
        Some(_) => program.spawn(),
        None => bed.host_a.spawn(&mut program),
    };
    let mut child = child.with_context(|| format!("starting {}", command[0].display()))?;
    // Ctrl-C is for the program; the processes that were started here are ended after it.
    let _signals = process::signal_descriptor(&[libc::SIGINT, libc::SIGQUIT])?;
    let status = child.wait()?;
    if let Some(mut peer) = peer {
        let _ = process::signal_group(peer.id(), libc::SIGKILL);
        let _ = peer.wait();
    }
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
