//! The commands on a test bed that a user starts with: the demonstration, and two hosts for programs of one's own.

mod hosts;
pub mod workers;

use anyhow::Result;
pub use baton_bed::temporary;
use clap::Subcommand;
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub enum Bed {
    /// Shows how connections of a server move to the NIC and back, and measures kernel and NIC.
    #[command(after_help = "Examples:\n  baton demo\n  baton demo --output /tmp/demo")]
    Demo {
        /// Directory of the report.
        #[arg(long, default_value = "target/demo")]
        output: PathBuf,
    },
    /// Makes two hosts (network namespaces) with a link and Baton on the first, and runs a program there.
    #[command(
        after_help = "Examples:\n  baton hosts -- ./my-server\n  baton hosts --peer 'sleep 1; curl http://$BATON_A:8080/' -- ./my-server --port 8080\n  baton hosts --address 10.77.0.50/24 --address fd00:ba70::50/64 -- sh\n\nThe program finds the agent through BATON_SOCKET (libbaton does so by itself)."
    )]
    Hosts(Box<hosts::HostsArguments>),
    /// The web server of the demonstration where nginx is not installed.
    #[command(hide = true)]
    ServeFiles { address: std::net::SocketAddr, root: PathBuf },
}

/// Runs one of them. False if what it checks does not hold.
pub fn run(command: &Bed) -> Result<bool> {
    match command {
        Bed::Demo { output } => {
            baton_linux::namespace::become_root_if_needed()?;
            demo(output)
        }
        Bed::Hosts(arguments) => {
            baton_linux::namespace::become_root_if_needed()?;
            let status = hosts::run(arguments)?;
            if status > 1 {
                std::process::exit(i32::from(status));
            }
            Ok(status == 0)
        }
        Bed::ServeFiles { address, root } => baton_bed::small_server::run(*address, root).map(|()| true),
    }
}

/// `baton demo`. False if a byte was wrong or a connection broke.
fn demo(output: &Path) -> Result<bool> {
    let report = baton_bed::demo::run(output)?;
    print!("{}", baton_bed::demo::table(&report));
    println!("\n  {}\n  {}", output.join("report.html").display(), output.join("demo.json").display());
    Ok(report.failures.is_empty())
}
