//! Longest waits of requests, and cost of short connections: an ordinary web server in the kernel and under
//! `baton run`, in turn.
//!
//! Client and server are on the two ends of a veth, Baton is beside the kernel, and all share this machine's cores.
//! Every round begins with a fresh server whose connections are all made at once, so that their moves are part of what
//! is measured.

use crate::bars::Bar;
use crate::status::StatusLine;
use anyhow::{Context, Result, ensure};
use baton_abi::layout::Counter;
use baton_bed::server::{Files, Program};
use baton_bed::statistics::quantile;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a, counter};
use baton_client::tool::Tool;
use baton_linux::events::{Poller, Trigger, monotonic_micros, thread_nanos};
use baton_linux::{process, socket};
use baton_protocol::program::Place;
use serde::Serialize;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Bytes of the file that is requested.
const LENGTH: usize = 256;
/// Connections of the measurement of short ones, each of which lasts for one request.
const SHORT: usize = 64;
/// Greatest p99 that the bars allow, over the kernel's.
const MOST: f64 = 1.5;
/// Least rate of short connections that the bars allow, over the kernel's.
const LEAST: f64 = 0.9;
/// Ports of the servers: in the kernel, and under Baton.
const PORTS: [u16; 2] = [8090, 8091];
/// Names of bars by the number of connections.
const BARS: [(usize, &str); 4] =
    [(64, "tail.p99_ratio_64"), (128, "tail.p99_ratio_128"), (512, "tail.p99_ratio_512"), (1024, "tail.p99_ratio_1024")];

/// What is measured.
#[derive(Clone, Debug)]
pub struct TailSettings {
    /// Numbers of connections.
    pub connections: Vec<usize>,
    /// Pairs of rounds for each number; the medians count.
    pub rounds: usize,
    /// Seconds of a round.
    pub seconds: f64,
    /// Whether times and rates have bounds, not only errors.
    pub judged: bool,
}

impl TailSettings {
    /// A few seconds in which only errors count.
    pub fn smoke() -> TailSettings {
        TailSettings { connections: vec![64], rounds: 1, seconds: 0.5, judged: false }
    }
}

impl Default for TailSettings {
    fn default() -> Self {
        TailSettings { connections: BARS.iter().map(|bar| bar.0).collect(), rounds: 5, seconds: 3.0, judged: true }
    }
}

/// One round, or the medians of several. Times in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Round {
    /// Requests answered per second.
    pub rate: f64,
    /// Median time from a request to its answer.
    pub p50: f64,
    /// 99th percentile, with the requests that could not be made while a request waited for longer than the average
    /// interval.
    pub p99: f64,
    /// Longest.
    pub max: f64,
    /// Connections that broke, and wrong answers.
    pub errors: f64,
    /// Segments that the clients' kernel retransmitted.
    pub retransmitted: f64,
    /// CPU per request, microseconds, of the client.
    pub client_cpu: f64,
    /// Of the server, with its agent.
    pub server_cpu: f64,
    /// Of the NIC (busy time).
    pub nic_cpu: f64,
    /// Connections on the NIC shortly before the end.
    pub on_nic: f64,
}

/// One load, in the kernel and under Baton.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Connections at a time.
    pub connections: usize,
    /// Whether each connection lasts for one request.
    pub short: bool,
    /// Medians in the kernel.
    pub kernel: Round,
    /// Medians under Baton.
    pub baton: Round,
    /// Median of the pairs' ratios, Baton over kernel.
    pub p99_ratio: f64,
    /// See `p99_ratio`.
    pub rate_ratio: f64,
}

/// The bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct TailReport {
    /// The server.
    pub server: String,
    /// Every load.
    pub rows: Vec<Row>,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
    /// Errors of all rounds under Baton, beyond the kernel's.
    pub errors: f64,
}

/// Runs every load.
///
/// # Errors
/// If the test bed or the server does not start, or Baton ends.
pub fn run(settings: &TailSettings, progress: impl Fn(&Row)) -> Result<TailReport> {
    let bed = TestbedSettings { beside: true, spin: 100, nic_cores: Vec::new(), agent_core: None, ..Default::default() };
    let bed = Testbed::new(&bed)?;
    let files = Files::new()?;
    files.add(0, LENGTH)?;
    let program = Program::find();
    let mut bench = Bench { tool: bed.tool()?, bed, files, program };
    let loads = settings.connections.iter().map(|connections| (*connections, false)).chain([(SHORT, true)]);
    let mut rows = Vec::new();
    for (connections, short) in loads {
        let row = bench.row(settings, connections, short)?;
        progress(&row);
        rows.push(row);
    }
    let bar = |row: &Row| match BARS.iter().find(|bar| bar.0 == row.connections) {
        _ if row.short => Some(Bar::least("short.rate_ratio", LEAST, row.rate_ratio)),
        Some((_, name)) => Some(Bar::most(name, MOST, row.p99_ratio)),
        None => None,
    };
    let errors = rows.iter().map(|row| (row.baton.errors - row.kernel.errors).max(0.0)).sum();
    let mut bars: Vec<Bar> = rows.iter().filter(|_| settings.judged).filter_map(bar).collect();
    bars.push(Bar::most("tail.errors", 0.0, errors));
    Ok(TailReport { server: bench.program.name().into(), rows, bars, errors })
}

/// A load's result in a few lines of text.
pub fn line(row: &Row) -> String {
    let what = if row.short { "short connections" } else { "connections" };
    let side = |name: &str, r: &Round| {
        format!(
            "{name} {:.0}/s p50 {:.2} p99 {:.2} max {:.1} ms, {} errors, {} retransmitted, µs/request: client {:.1} server {:.1} NIC {:.1}",
            r.rate,
            r.p50 / 1e3,
            r.p99 / 1e3,
            r.max / 1e3,
            r.errors,
            r.retransmitted,
            r.client_cpu,
            r.server_cpu,
            r.nic_cpu
        )
    };
    format!(
        "{} {what}: p99 {:.2}, rate {:.2} of the kernel's\n    {}\n    {}, {:.0} on the NIC",
        row.connections,
        row.p99_ratio,
        row.rate_ratio,
        side("kernel", &row.kernel),
        side("Baton ", &row.baton),
        row.baton.on_nic
    )
}

struct Bench {
    bed: Testbed,
    tool: Tool,
    files: Files,
    program: Program,
}

impl Bench {
    fn row(&mut self, settings: &TailSettings, connections: usize, short: bool) -> Result<Row> {
        let mut rounds: [Vec<Round>; 2] = Default::default();
        let (all, status) = (settings.rounds, StatusLine::new());
        for round in 1..=all {
            for (under_baton, rounds) in [false, true].into_iter().zip(&mut rounds) {
                let what = if short { "short connections" } else { "connections" };
                let side = if under_baton { "under Baton" } else { "in the kernel" };
                status.show(format_args!("{connections} {what}: round {round} of {all}, {side}"));
                rounds.push(self.round(settings.seconds, connections, short, under_baton)?);
            }
        }
        let ratio = |figure: fn(&Round) -> f64| {
            let pairs = rounds[0].iter().zip(&rounds[1]);
            quantile(&mut pairs.map(|(kernel, baton)| figure(baton) / figure(kernel).max(1e-9)).collect::<Vec<_>>(), 0.5)
        };
        Ok(Row {
            connections,
            short,
            p99_ratio: ratio(|round| round.p99),
            rate_ratio: ratio(|round| round.rate),
            kernel: medians(&rounds[0]),
            baton: medians(&rounds[1]),
        })
    }

    fn round(&mut self, seconds: f64, connections: usize, short: bool, under_baton: bool) -> Result<Round> {
        let address = SocketAddr::new(address_a(false), PORTS[usize::from(under_baton)]);
        let agent = self.bed.socket();
        let server = self.program.start(&self.bed.host_a, &self.files, address, under_baton.then_some(agent.as_path()))?;
        let statistics = self.tool.statistics()?;
        let agent_cpu = || process::cpu_nanos(statistics.agent_process).filter(|_| under_baton).unwrap_or(0);
        let retransmitted = || counter(&self.bed.host_b, "snmp", "Tcp:", "RetransSegs");
        let before = (server.cpu().context("the server has ended")?, agent_cpu(), retransmitted()?);
        let load = Load { server: address, connections, short, micros: (seconds * 1e6) as u64 };
        let (host, tool) = (&self.bed.host_b, &mut self.tool);
        let (done, on_nic) = std::thread::scope(|scope| -> Result<(Done, usize)> {
            let running = scope.spawn(|| host.run(|| Ok(load.run())));
            // Shortly before the end, while there are connections.
            std::thread::sleep(Duration::from_secs_f64(seconds * 0.95));
            let on_nic = if under_baton { count_on_nic(tool)? } else { 0 };
            let done = running.join().map_err(|_| anyhow::anyhow!("the load panicked"))???;
            Ok((done, on_nic))
        })?;
        let after = (server.cpu().context("the server has ended")?, agent_cpu(), retransmitted()?);
        let busy = |of: &[u64]| of.get(Counter::BusyNanoseconds as usize).copied().unwrap_or(0);
        let nic = busy(&self.tool.statistics()?.counters) - busy(&statistics.counters);
        drop(server);
        ensure!(done.requests > 0, "the server answered nothing");
        let each = |nanos: u64| nanos as f64 / 1e3 / done.requests as f64;
        Ok(Round {
            errors: done.errors as f64,
            retransmitted: (after.2 - before.2) as f64,
            client_cpu: each(done.cpu),
            server_cpu: each(after.0 - before.0 + after.1 - before.1),
            nic_cpu: if under_baton { each(nic) } else { 0.0 },
            on_nic: on_nic as f64,
            ..done.times(connections, short, seconds)
        })
    }
}

fn count_on_nic(tool: &mut Tool) -> Result<usize> {
    Ok(tool.connections()?.iter().filter(|info| info.place == Place::Nic).count())
}

fn medians(rounds: &[Round]) -> Round {
    let median = |figure: fn(&Round) -> f64| quantile(&mut rounds.iter().map(figure).collect::<Vec<_>>(), 0.5);
    Round {
        rate: median(|r| r.rate),
        p50: median(|r| r.p50),
        p99: median(|r| r.p99),
        max: median(|r| r.max),
        // Errors must not be hidden by a median.
        errors: rounds.iter().map(|r| r.errors).sum(),
        retransmitted: median(|r| r.retransmitted),
        client_cpu: median(|r| r.client_cpu),
        server_cpu: median(|r| r.server_cpu),
        nic_cpu: median(|r| r.nic_cpu),
        on_nic: median(|r| r.on_nic),
    }
}

/// A load: one request at a time on each connection.
struct Load {
    server: SocketAddr,
    connections: usize,
    short: bool,
    micros: u64,
}

struct Client {
    socket: TcpStream,
    /// When the request was sent, or its connection was begun.
    since: u64,
    asked: bool,
    received: usize,
    /// Bytes of the whole answer, once its head is known.
    expected: Option<usize>,
    head: Vec<u8>,
}

#[derive(Default)]
struct Done {
    /// Waiting times in microseconds.
    times: Vec<f64>,
    /// Waiting times of requests without an answer at the end.
    unanswered: Vec<f64>,
    requests: u64,
    errors: u64,
    cpu: u64,
}

impl Load {
    fn run(&self) -> Result<Done> {
        let poller = Poller::new()?;
        let mut done = Done::default();
        let (cpu, end) = (thread_nanos(), monotonic_micros() + self.micros);
        let mut clients = Vec::new();
        for at in 0..self.connections {
            clients.push(self.connect(&poller, at)?);
        }
        let (mut tokens, mut buffer) = (Vec::new(), vec![0u8; 16384]);
        while monotonic_micros() < end {
            poller.wait(Some(Duration::from_millis(10)), &mut tokens)?;
            for token in tokens.drain(..) {
                let client = &mut clients[token as usize];
                let over = match client.advance(self.short, &mut buffer, &mut done) {
                    Ok(over) => over,
                    Err(_) => {
                        done.errors += 1;
                        true
                    }
                };
                if over {
                    *client = self.connect(&poller, token as usize)?;
                }
            }
        }
        let now = monotonic_micros();
        done.unanswered = clients.iter().map(|client| (now - client.since) as f64).collect();
        done.cpu = thread_nanos() - cpu;
        Ok(done)
    }

    fn connect(&self, poller: &Poller, at: usize) -> Result<Client> {
        let socket: OwnedFd = socket::stream(self.server.is_ipv6(), 0)?;
        let socket = TcpStream::from(socket);
        socket.set_nonblocking(true)?;
        let since = monotonic_micros();
        match socket::connect(socket.as_fd(), self.server) {
            Err(error) if error.raw_os_error() != Some(115) => return Err(error).context("connecting"),
            _ => {}
        }
        poller.add(socket.as_fd(), at as u64, Trigger::Edge)?;
        Ok(Client { socket, since, asked: false, received: 0, expected: None, head: Vec::new() })
    }
}

impl Client {
    /// Whether the connection is over.
    fn advance(&mut self, short: bool, buffer: &mut [u8], done: &mut Done) -> io::Result<bool> {
        if !self.asked {
            return self.ask(short).map(|()| false);
        }
        loop {
            match socket::receive(self.socket.as_fd(), buffer) {
                Ok(0) if short && self.expected == Some(self.received) => {
                    self.answered(done);
                    return Ok(true);
                }
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.take(&buffer[..got])?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
            if !short && self.expected == Some(self.received) {
                self.answered(done);
                self.since = monotonic_micros();
                self.ask(short)?;
            }
        }
    }

    fn ask(&mut self, short: bool) -> io::Result<()> {
        let end = if short { "Connection: close\r\n\r\n" } else { "\r\n" };
        let request = format!("GET /0/{LENGTH} HTTP/1.1\r\nHost: a\r\n{end}");
        match socket::send(self.socket.as_fd(), request.as_bytes()) {
            // The edge of a connection that is not established yet.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Ok(sent) if sent == request.len() => {}
            Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) => return Err(error),
        }
        (self.asked, self.received, self.expected) = (true, 0, None);
        self.head.clear();
        Ok(())
    }

    fn take(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.received += bytes.len();
        if self.expected.is_none() {
            self.head.extend_from_slice(bytes);
            if let Some(end) = self.head.windows(4).position(|window| window == b"\r\n\r\n") {
                if !self.head.starts_with(b"HTTP/1.1 200") {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                self.expected = Some(end + 4 + LENGTH);
            }
        }
        if self.expected.is_some_and(|expected| self.received > expected) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    fn answered(&self, done: &mut Done) {
        done.requests += 1;
        done.times.push((monotonic_micros() - self.since) as f64);
    }
}

impl Done {
    /// Percentiles of the waiting times. A connection that waits long makes fewer requests, so its waiting would hardly
    /// count. Therefore, as in wrk, each waiting time longer than the usual interval between two requests of a
    /// connection also stands for the requests that could not be made meanwhile.
    fn times(&self, connections: usize, short: bool, seconds: f64) -> Round {
        let interval = (seconds * 1e6 * connections as f64 / self.requests.max(1) as f64).max(1.0);
        let mut all: Vec<f64> = self.times.iter().chain(&self.unanswered).copied().collect();
        if !short {
            for time in self.times.iter().chain(&self.unanswered) {
                let mut rest = time - interval;
                while rest > interval {
                    all.push(rest);
                    rest -= interval;
                }
            }
        }
        Round {
            rate: self.requests as f64 / seconds,
            p50: quantile(&mut all, 0.5),
            p99: quantile(&mut all, 0.99),
            max: quantile(&mut all, 1.0),
            ..Round::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One connection that waits for a second while nine others are answered every millisecond shows in the 99th
    /// percentile.
    #[test]
    fn a_starved_connection_counts() {
        let done = Done { times: [vec![1_000.0; 9_000], vec![1_000_000.0]].concat(), requests: 9_001, ..Done::default() };
        assert_eq!(done.times(10, true, 1.0).p99, 1_000.0);
        assert!(done.times(10, false, 1.0).p99 > 500_000.0);
    }
}
