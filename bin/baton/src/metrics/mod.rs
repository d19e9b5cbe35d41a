//! `baton metrics`: what is counted, for Prometheus.

mod families;
mod http;
mod listener;
mod look;
mod server;
mod text;

use crate::run_directory;
use crate::tools::SocketArgument;
use anyhow::{Context, Result, bail};
use baton_linux::{process, service};
use clap::{Args, ValueEnum};
use families::Own;
use listener::{Address, Listener};
use look::Looker;
use server::Server;
use std::io::Write;
use std::os::fd::AsFd;
use text::{Format, render};

pub const EXAMPLES: &str = "Examples:
  baton metrics --once
  baton metrics --once --format openmetrics
  baton metrics
  baton metrics --listen 127.0.0.1:9464
  curl --unix-socket /run/baton/metrics.sock http://localhost/metrics

It runs until SIGINT or SIGTERM, beside any number of Batons, and goes on while one is restarted: baton_up says 0 then. Without --listen it
listens at metrics.sock in /run/baton (an ordinary user: in XDG_RUNTIME_DIR), which its user and group can use. Everybody on this machine can
read what it says on loopback. An ordinary user's says nothing about programs of others. Prometheus' configuration, a dashboard for Grafana
and alerts are in /usr/share/doc/baton/metrics, and in packaging/metrics of the source; docs/operate/metrics.md lists all names.";

#[derive(Args)]
pub struct MetricsArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Where to listen: ADDRESS:PORT on loopback as 127.0.0.1:9464, or unix:PATH.
    #[arg(long, value_name = "WHERE", conflicts_with = "once")]
    listen: Option<Address>,
    /// Let --listen be an address that other machines can reach. There is no password, and no encryption.
    #[arg(long, requires = "listen")]
    expose: bool,
    /// Print what there is now, and end.
    #[arg(long)]
    pub once: bool,
    /// The format that --once prints.
    #[arg(long, value_name = "FORMAT", default_value = "text", requires = "once")]
    format: Printed,
}

/// What `--once` prints.
#[derive(Clone, Copy, ValueEnum)]
enum Printed {
    /// Prometheus' text format, 0.0.4
    Text,
    /// OpenMetrics 1.0
    Openmetrics,
}

/// `baton metrics`.
///
/// # Errors
/// If it cannot listen.
pub fn run(arguments: &MetricsArguments) -> Result<()> {
    let mut looker = Looker::new(arguments.socket.clone());
    if arguments.once {
        let format = match arguments.format {
            Printed::Text => Format::Prometheus,
            Printed::Openmetrics => Format::OpenMetrics,
        };
        looker.renew();
        print!("{}", render(looker.families(Own::default()), format)?);
        return Ok(());
    }
    let address = match &arguments.listen {
        Some(address) => address.clone(),
        None => Address::Unix(run_directory::lasting()?.join("metrics.sock")),
    };
    // Before the socket is there, so that it is removed in any case.
    let signals = process::signal_descriptor(&process::ENDING).context("waiting for signals")?;
    let listener = Listener::new(&address, arguments.expose)?;
    let name = listener.name();
    let mut server = Server::new(listener, looker)?;
    println!("metrics at {name}");
    if let Err(error) = std::io::stdout().flush() {
        bail!("standard output: {error}");
    }
    if let Err(error) = service::notify("READY=1") {
        eprintln!("baton: the service manager at NOTIFY_SOCKET cannot be told: {error}");
    }
    server.run(signals.as_fd())
}
