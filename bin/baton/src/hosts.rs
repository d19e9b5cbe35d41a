//! `baton hosts`: two hosts and a Baton, for a program of the user's.

use crate::workers::WorkerArguments;
use anyhow::{Context, Result};
use baton_kernel::process;
use baton_lab::testbed::{Testbed, TestbedSettings, address_a, address_b};
use clap::Args;
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[derive(Args)]
pub struct HostsArguments {
    /// A shell command to run on the second host meanwhile; it is ended when the first is done.
    #[arg(long, value_name = "COMMAND")]
    peer: Option<String>,
    /// MTU of both hosts.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=9000))]
    mtu: u32,
    #[command(flatten)]
    workers: WorkerArguments,
    /// The program to run on the first host, with BATON_SOCKET in its environment; a shell if there is none.
    #[arg(last = true)]
    command: Vec<std::ffi::OsString>,
}

/// Runs the program; its exit status.
pub fn run(arguments: &HostsArguments) -> Result<u8> {
    let mut settings = TestbedSettings { mtu: arguments.mtu, ..TestbedSettings::default() };
    arguments.workers.apply(&mut settings);
    let bed = Testbed::new(&settings)?;
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
    let mut program = Command::new(&command[0]);
    program.args(&command[1..]);
    environment(&mut program);
    let mut child = bed.host_a.spawn(&mut program).with_context(|| format!("starting {}", command[0].display()))?;
    // Ctrl-C is the program's: what ends here is ended after it.
    let _signals = process::hear_signals(&[libc::SIGINT, libc::SIGQUIT])?;
    let status = child.wait()?;
    if let Some(mut peer) = peer {
        let _ = process::signal_group(peer.id(), libc::SIGKILL);
        let _ = peer.wait();
    }
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
