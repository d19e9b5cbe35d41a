//! `baton metrics`: what is counted, for Prometheus.

mod exporter;
mod families;
mod look;
mod text;

use crate::run_directory;
use crate::serve::{self, listener::Address};
use crate::tools::SocketArgument;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use exporter::Exporter;
use families::Own;
pub use families::by_name;
use look::Looker;
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

/// Owner and group may scrape.
const MODE: u32 = 0o660;

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
    if let Address::Tcp(tcp) = &address
        && address.is_exposed()
        && !arguments.expose
    {
        bail!(
            "{tcp} can be reached from other machines, and would tell everybody there, without a password, which programs run \
             here and what they carry: listen at 127.0.0.1:{} and let a proxy with TLS and authentication pass it on, or say \
             --expose",
            tcp.port()
        );
    }
    serve::run("metrics", "/metrics", &address, MODE, Exporter::new(looker))
}
