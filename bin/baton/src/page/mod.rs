//! `baton page`: what `baton top` shows, with plots over time, for a browser.

mod site;
mod state;

use crate::run_directory;
use crate::serve::{self, listener::Address};
use crate::tools::SocketArgument;
use anyhow::{Result, bail};
use clap::Args;
use site::Page;
use state::State;
use std::path::PathBuf;

pub const EXAMPLES: &str = "Examples:
  baton page --listen 127.0.0.1:9465                    # then http://127.0.0.1:9465/
  baton page                                            # at a Unix socket
  ssh -N -L 9465:/run/baton/page.sock HOST              # then http://localhost:9465/ shows that host
  curl --unix-socket /run/baton/page.sock 'http://localhost/state?sort=rtt&filter=place+%3D+nic'

It runs until SIGINT or SIGTERM, beside any number of Batons, and goes on while one is restarted. It changes nothing. It looks once a second,
and only while somebody has the page open.

Who sees what: without --listen it listens at page.sock in /run/baton (an ordinary user: in XDG_RUNTIME_DIR). Whoever can reach a Unix socket
may connect, and sees connections of its own programs only; root sees all. On loopback the kernel does not say who a client is: everybody on
this machine sees there what the user sees who runs this command, so as root the connections of all users. Addresses that other machines
reach are refused: there is neither a password nor encryption. By ssh, as above, you see what is yours.

The report is the page of the last `baton bench all` by the same user, or --report FILE: what `baton bench all --page`, `baton lab --output`
or `baton demo` have written. Whoever can connect sees it.";

/// Everybody may connect to the Unix socket: who it is says the kernel.
const MODE: u32 = 0o666;

#[derive(Args)]
pub struct PageArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Where to listen: ADDRESS:PORT on loopback as 127.0.0.1:9465, or unix:PATH.
    #[arg(long, value_name = "WHERE")]
    listen: Option<Address>,
    /// The HTML report to show, in place of that of the last `baton bench all`.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// Where `baton bench all` leaves its page, if there is a directory for it.
pub fn last_report() -> Option<PathBuf> {
    Some(run_directory::lasting().ok()?.join("bench.html"))
}

/// `baton page`.
///
/// # Errors
/// If it cannot listen, or there is no such report.
pub fn run(arguments: PageArguments) -> Result<()> {
    let address = match arguments.listen {
        Some(address) => address,
        None => Address::Unix(run_directory::lasting()?.join("page.sock")),
    };
    check(&address)?;
    if let Some(report) = arguments.report.as_ref().filter(|report| site::modified(report).is_none()) {
        bail!(
            "--report {}: there is no such file, or it has more than 4 MiB; `baton bench all --page {}` makes it",
            report.display(),
            report.display()
        );
    }
    let report = arguments.report.or_else(last_report);
    serve::run("page", "/", &address, MODE, Page::new(State::new(arguments.socket), report))
}

fn check(address: &Address) -> Result<()> {
    match address {
        Address::Tcp(tcp) if address.is_exposed() => bail!(
            "{tcp} can be reached from other machines, and the page has neither a password nor encryption: listen at \
             127.0.0.1:{port}, and look from elsewhere by `ssh -N -L {port}:127.0.0.1:{port} HOST`",
            port = tcp.port()
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_are_kept_out() {
        let checked = |text: &str| check(&text.parse().expect("an address")).map_err(|error| error.to_string());
        for text in ["127.0.0.1:0", "[::1]:9465", "unix:/tmp/page.sock"] {
            assert_eq!(checked(text), Ok(()), "{text}");
        }
        for text in ["0.0.0.0:9465", "[::]:9465", "192.0.2.1:9465"] {
            assert!(checked(text).expect_err("refused").contains("ssh -N -L 9465:127.0.0.1:9465"), "{text}");
        }
    }
}
