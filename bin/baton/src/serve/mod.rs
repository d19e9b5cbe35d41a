//! A small HTTP server, for `baton metrics` and `baton page`: at a Unix socket or on loopback, in one thread.

pub mod http;
pub mod listener;
pub mod server;

use anyhow::{Context, Result, bail};
use baton_linux::{process, service};
use listener::{Address, Listener};
use server::{Server, Site};
use std::io::Write;
use std::os::fd::AsFd;

/// Serves a site until a signal asks this process to end. `what` is its name, `path` where a client begins; `mode` is
/// that of a Unix socket.
///
/// # Errors
/// If it cannot listen.
pub fn run(what: &str, path: &str, address: &Address, mode: u32, site: impl Site) -> Result<()> {
    // Before the socket is there, so that it is removed in any case.
    let signals = process::signal_descriptor(&process::ENDING).context("waiting for signals")?;
    let listener = Listener::new(address, mode)?;
    let name = listener.name(path);
    let mut server = Server::new(listener, site)?;
    println!("{what} at {name}");
    if let Err(error) = std::io::stdout().flush() {
        bail!("standard output: {error}");
    }
    if let Err(error) = service::notify("READY=1") {
        baton_log::warning!(
            [] "nothing can be sent to the service manager at NOTIFY_SOCKET: {error}";
            "let this process reach that socket, or its unit does not count as started"
        );
    }
    server.run(signals.as_fd())
}
