//! A load like SPECweb99's on any web server that serves the file set: clients that ask for files as
//! [`crate::web_mix`] chooses them, receive no faster than their lines carry, and compare every byte.

mod answer;
mod client;
pub mod files;
mod tally;
mod url;

pub use tally::{Described, Fault, Report};
pub use url::Url;

use crate::status::StatusLine;
use crate::web_mix::{Mix, Request};
use answer::Answer;
use anyhow::{Context, Result, anyhow, bail, ensure};
use baton_linux::events::monotonic_micros;
use baton_linux::process::raise_descriptor_limit;
use client::Worker;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tally::Tally;

/// Bits per second that a client of an unlimited load needs to conform, and what share of a limited one's rate.
const LEAST: f64 = 320e3;
const LEAST_SHARE: f64 = 0.8;
/// Descriptors that the process has besides its connections, at most.
const OTHERS: u64 = 64;
/// How long each of the server's first answers is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which requests share a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// As in SPECweb99: 70 % of the requests are on connections that carry 5 to 15 each.
    Mix,
    /// All of a client's, as long as the server keeps the connection.
    Always,
    /// None.
    Never,
}

impl Keep {
    /// Requests of the next connection.
    fn requests(self, mix: &mut Mix) -> u64 {
        match self {
            Keep::Mix => mix.requests(),
            Keep::Always => u64::MAX,
            Keep::Never => 1,
        }
    }
}

/// A load.
#[derive(Clone, Debug)]
pub struct WebLoad {
    /// Where the file set is served.
    pub url: Url,
    /// Clients, each with one connection at a time.
    pub connections: usize,
    /// Threads that run them.
    pub threads: usize,
    /// Seconds that it lasts.
    pub seconds: f64,
    /// Bits per second that a client receives at most; [`f64::INFINITY`] for any number.
    pub rate: f64,
    /// Share of requests whose answer a program is to make.
    pub dynamic: f64,
    /// The program's path on the server. What it is asked for, the path of a file, stands behind a question mark; it
    /// answers with that file's bytes.
    pub dynamic_path: Option<String>,
    /// Directories of the file set.
    pub directories: usize,
    /// Which requests share a connection.
    pub keep: Keep,
    /// Decides which files are asked for.
    pub seed: u64,
}

impl WebLoad {
    /// Checks what cannot be.
    fn check(&self) -> Result<()> {
        ensure!(self.connections > 0 && self.threads > 0, "at least one connection and one thread");
        ensure!((0.1..=86_400.0).contains(&self.seconds), "{} seconds: from 0.1 to 86400", self.seconds);
        ensure!(self.rate >= 1e3, "a rate of {} bits per second: at least 1k", self.rate);
        ensure!((0.0..=1.0).contains(&self.dynamic), "a dynamic share of {}: from 0 to 1", self.dynamic);
        ensure!(
            (1..=files::MOST_DIRECTORIES).contains(&self.directories),
            "{} directories: from 1 to {}",
            self.directories,
            files::MOST_DIRECTORIES
        );
        if self.dynamic > 0.0 {
            ensure!(self.dynamic_path.is_some(), "dynamic requests need the path of a program that answers them");
        }
        if let Some(path) = &self.dynamic_path {
            let fits = path.starts_with('/') && path.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '?' | '#'));
            ensure!(fits, "the program's path {path:?} must begin with /, and have no space, ? or #");
        }
        let limit = raise_descriptor_limit();
        ensure!(
            limit >= self.connections as u64 + OTHERS,
            "{} connections need a limit on open files of {}, and it is {limit}: raise it (ulimit -n)",
            self.connections,
            self.connections as u64 + OTHERS
        );
        Ok(())
    }

    /// Bits per second from which on a client conforms.
    fn least(&self) -> f64 {
        if self.rate.is_finite() { self.rate * LEAST_SHARE } else { LEAST }
    }

    /// What is asked for: path and query.
    fn target(&self, request: &Request) -> String {
        let file = format!("{}/{}", self.url.prefix, files::path(request));
        match &self.dynamic_path {
            Some(program) if request.dynamic => format!("{program}?{file}"),
            _ => file,
        }
    }

    /// A request as it is sent. `last`: the connection is not needed after it.
    fn text(&self, request: &Request, last: bool) -> String {
        let close = if last { "Connection: close\r\n" } else { "" };
        let (target, host) = (self.target(request), &self.url.authority);
        format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: baton-load\r\nAccept: */*\r\n{close}\r\n")
    }
}

/// What the threads' clients have done so far, for whoever measures a stretch of a load.
#[derive(Default, Debug)]
pub(crate) struct Progress {
    /// Requests that were answered whole.
    pub requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    /// Whether the load is to end before its time.
    pub stop: AtomicBool,
}

/// Asks for one file on a connection of its own, and returns the answer as soon as its head has come.
fn first_answer(load: &WebLoad, server: SocketAddr, request: &Request) -> Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&server, PATIENCE).with_context(|| format!("connecting to {server}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(load.text(request, true).as_bytes())?;
    let (mut answer, mut buffer) = (Answer::default(), [0u8; 4096]);
    let until = monotonic_micros() + PATIENCE.as_micros() as u64;
    while answer.status() == 0 {
        let got = match stream.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            got => got.context("waiting for the server's first answer")?,
        };
        ensure!(monotonic_micros() < until, "the server has not answered within {} s", PATIENCE.as_secs());
        ensure!(got > 0, "the server closed the connection before it answered");
        answer.body(&mut &buffer[..got]).map_err(|what| anyhow!(what))?;
    }
    Ok(answer)
}

/// Checks that the server has the file set's first and last directory, and the program.
fn probe(load: &WebLoad, server: SocketAddr) -> Result<()> {
    let file = |directory, dynamic| Request { directory, class: 0, file: 0, dynamic };
    let program = load.dynamic > 0.0;
    for request in [Some(file(0, false)), Some(file(load.directories - 1, false)), program.then(|| file(0, true))] {
        let Some(request) = request else { continue };
        let target = load.target(&request);
        let answer = first_answer(load, server, &request).with_context(|| format!("asking {server} for {target}"))?;
        match answer.status() {
            200 => {}
            404 if request.dynamic => bail!("the server has no program at {target} (404): see --dynamic-path"),
            404 => bail!(
                "the server has no {target} (404): `baton load web --make-files DIRECTORY --directories {}` makes the files, \
                 and the server is to serve that directory at {}",
                load.directories,
                load.url
            ),
            status => bail!("the server answers {status} to {target}"),
        }
        if let Some(length) = answer.length()
            && length != request.bytes()
        {
            bail!("{target} has {length} bytes, and in the file set {}: the server serves something else", request.bytes());
        }
    }
    Ok(())
}

/// Runs a load, and shows on standard error how far it is.
///
/// # Errors
/// If it cannot be, or the server has no such files. What goes wrong later is counted.
pub fn run(load: &WebLoad) -> Result<Report> {
    observed(load, &Progress::default())
}

/// The same, for whoever looks at its progress, or ends it.
///
/// # Errors
/// As [`run`].
pub(crate) fn observed(load: &WebLoad, progress: &Progress) -> Result<Report> {
    load.check()?;
    let server = load.url.resolve()?;
    probe(load, server)?;
    let begun = monotonic_micros();
    let end = begun + (load.seconds * 1e6) as u64;
    let tallies = std::thread::scope(|scope| -> Result<Vec<Tally>> {
        let threads = load.threads.min(load.connections);
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                // So that each thread has clients that begin early and late.
                let clients = (thread..load.connections).step_by(threads).collect();
                scope.spawn(move || Worker::new(load, server, clients, progress)?.run(begun, end))
            })
            .collect();
        let status = StatusLine::new();
        while workers.iter().any(|worker| !worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
            status.update(line(load, progress, monotonic_micros() - begun));
        }
        workers.into_iter().map(|worker| worker.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    })?;
    let described = Described {
        url: load.url.to_string(),
        connections: load.connections,
        directories: load.directories,
        rate: load.rate.is_finite().then_some(load.rate),
        least: load.least(),
        dynamic: load.dynamic,
        seconds: (monotonic_micros() - begun) as f64 / 1e6,
    };
    Ok(Report::new(described, &tallies))
}

/// How far a load is after so many microseconds.
fn line(load: &WebLoad, progress: &Progress, elapsed: u64) -> String {
    let seconds = elapsed.max(1) as f64 / 1e6;
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    format!(
        "{seconds:.0} of {:.0} s: {:.0} requests/s, {:.1} Mb/s, {} errors",
        load.seconds,
        of(&progress.requests) as f64 / seconds,
        of(&progress.bytes) as f64 * 8e-6 / seconds,
        of(&progress.errors)
    )
}

#[cfg(test)]
mod tests;
