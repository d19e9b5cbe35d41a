//! Unmodified programs on a NIC beside the kernel, compared with the kernel alone: rate, waiting time, and all CPU time that a
//! request or a byte costs.
//!
//! Client and server are on the two ends of a veth. Kernel and Baton take turns, each round with a fresh server. In the kernel's
//! turn the NIC has nothing: no frame passes it. CPU time is that of the client, the server, agent and NIC, and of the kernel's
//! threads that process frames; what else runs on the machine does not count. A NIC that polls counts in full.

use crate::bars::Bar;
use crate::closed_loop::{self, Progress, Requests};
use crate::server::{Files, Program, Server};
use crate::statistics::{Percentiles, quantile};
use crate::status::StatusLine;
use crate::testbed::{Testbed, TestbedSettings, address_a, address_b};
use anyhow::{Context, Result, ensure};
use baton_abi::layout::Counter;
use baton_client::tool::Tool;
use baton_linux::events::{monotonic_micros, process_nanos};
use baton_linux::process;
use baton_protocol::program::Place;
use serde::Serialize;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of the file that a web server is asked for.
const LENGTH: usize = 256;
/// Seconds before each measurement: connections are made, and moved.
const WARMING: f64 = 1.0;
/// Most seconds that the connections have for their moves before it: moves are not what is measured.
const MOVING: f64 = 15.0;
/// Bytes of a message and of its echo.
const MESSAGE: usize = 64;
/// Connections to redis-server, as redis-benchmark has.
const REDIS_CONNECTIONS: usize = 50;
/// Microseconds that a NIC polls that is not to sleep.
const NEVER_SLEEPS: u64 = 10_000_000;
/// Ports of the servers: in the kernel, and under Baton.
const PORTS: [u16; 2] = [8092, 8093];

/// A program that receives in bulk, and one that sends: with the C library's calls, which Baton's library stands in front of.
const SINK: &str = "
import socket, sys
connection = socket.create_server((sys.argv[1], int(sys.argv[2]))).accept()[0]
buffer = bytearray(131072)
while connection.recv_into(buffer): pass
";
const SOURCE: &str = "
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b'cubic')
buffer = bytes(131072)
while True: connection.sendall(buffer)
";

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// A web server (nginx, or Python's http.server) and a file of 256 bytes, at 64 and 512 connections.
    Http,
    /// redis-server, GET on 50 connections, one request at a time and 16.
    Redis,
    /// One connection in bulk, into a program and out of it.
    Bulk,
    /// Messages of 64 bytes to a program that echoes them, on 64 and 1024 connections, one at a time on each. The program is an unmodified
    /// one, and in one more row one that uses the client library under Baton.
    Rpc,
    /// The same on one connection, between two programs that never sleep. The kernel's have a core each. Baton's NIC never sleeps
    /// either and has a core, so that both programs share the other one, and offer it to each other.
    PingPong,
}

/// Settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct BesideSettings {
    /// Pairs of rounds for each load; the medians count.
    pub rounds: usize,
    /// Seconds of a round that are measured.
    pub seconds: f64,
    /// Microseconds that the NIC polls without work.
    pub spin: u64,
}

/// One round, or the medians of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Round {
    /// Requests per second, or Gb/s.
    pub rate: f64,
    /// Median of the waiting times, milliseconds.
    pub p50: f64,
    /// Their 99th percentile.
    pub p99: f64,
    /// CPU time of all, microseconds per request or seconds per GB; then its parts.
    pub machine: f64,
    /// Of the client.
    pub client: f64,
    /// Of the server.
    pub server: f64,
    /// Of keeper and agent.
    pub agent: f64,
    /// Of the NIC's process.
    pub nic: f64,
    /// Time of the NIC's rounds that found work, waiting for a processor included: the rest of its CPU time went into polling.
    pub nic_busy: f64,
    /// Of the kernel's threads.
    pub kernel: f64,
    /// Connections on the NIC at the end.
    pub on_nic: f64,
}

/// One load, in the kernel and under Baton.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The load.
    pub load: &'static str,
    /// Its unit: a request or a GB.
    pub unit: &'static str,
    /// Medians in the kernel.
    pub kernel: Round,
    /// Medians under Baton.
    pub baton: Round,
    /// Median of the pairs' ratios, Baton over kernel.
    pub rate_ratio: f64,
    /// See `rate_ratio`.
    pub p50_ratio: f64,
    /// See `rate_ratio`.
    pub p99_ratio: f64,
    /// See `rate_ratio`.
    pub machine_ratio: f64,
    /// See `rate_ratio`; of the server's CPU time alone.
    pub host_ratio: f64,
    /// Least and greatest of the pairs' ratios.
    pub rate_spread: [f64; 2],
    /// See `rate_spread`.
    pub machine_spread: [f64; 2],
}

/// A bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct BesideReport {
    /// Every load.
    pub rows: Vec<Row>,
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// A figure of a row that has a bound.
type Figure = (&'static str, fn(&Row) -> f64, fn(&'static str, f64, f64) -> Bar, f64);

struct Load {
    name: &'static str,
    traffic: Traffic,
    bars: Vec<Figure>,
}

#[derive(Clone, Copy)]
enum Traffic {
    Http {
        connections: usize,
    },
    Redis {
        depth: usize,
    },
    Bulk {
        into: bool,
    },
    Rpc {
        connections: usize,
    },
    /// The same, and under Baton the program uses the client library.
    Ring {
        connections: usize,
    },
    PingPong,
}

fn loads(what: What) -> Vec<Load> {
    let (rate, p99, machine) = (|row: &Row| row.rate_ratio, |row: &Row| row.p99_ratio, |row: &Row| row.machine_ratio);
    let (p50, host) = (|row: &Row| row.p50_ratio, |row: &Row| row.host_ratio);
    let load = |name, traffic, bars: &[Figure]| Load { name, traffic, bars: bars.to_vec() };
    match what {
        What::Http => vec![
            load(
                "http, 64 connections",
                Traffic::Http { connections: 64 },
                &[("http.machine_ratio_64", machine, Bar::most, 0.8), ("http.rate_ratio_64", rate, Bar::least, 1.15)],
            ),
            load(
                "http, 512 connections",
                Traffic::Http { connections: 512 },
                &[
                    ("http.machine_ratio_512", machine, Bar::most, 0.8),
                    ("http.rate_ratio_512", rate, Bar::least, 1.15),
                    ("http.p99_ratio_512", p99, Bar::most, 1.0),
                ],
            ),
        ],
        What::Redis => vec![
            load("redis GET", Traffic::Redis { depth: 1 }, &[("redis.machine_ratio_p1", machine, Bar::most, 0.8)]),
            load(
                "redis GET, pipelined by 16",
                Traffic::Redis { depth: 16 },
                &[("redis.machine_ratio_p16", machine, Bar::most, 0.9)],
            ),
        ],
        What::Bulk => vec![
            load(
                "bulk in",
                Traffic::Bulk { into: true },
                &[("bulk_in.rate_ratio", rate, Bar::least, 1.0), ("bulk_in.machine_ratio", machine, Bar::most, 1.0)],
            ),
            load(
                "bulk out",
                Traffic::Bulk { into: false },
                &[("bulk_out.rate_ratio", rate, Bar::least, 1.0), ("bulk_out.machine_ratio", machine, Bar::most, 0.9)],
            ),
        ],
        What::Rpc => vec![
            load("rpc, 64 connections", Traffic::Rpc { connections: 64 }, &[("rpc.machine_ratio_64", machine, Bar::most, 0.65)]),
            load(
                "rpc, 1024 connections",
                Traffic::Rpc { connections: 1024 },
                &[("rpc.machine_ratio_1024", machine, Bar::most, 0.65)],
            ),
            load(
                "rpc, 1024 connections, client library",
                Traffic::Ring { connections: 1024 },
                &[("rpc.host_ratio_1024", host, Bar::most, 0.1)],
            ),
        ],
        What::PingPong => vec![load("ping-pong", Traffic::PingPong, &[("pingpong.p50_ratio", p50, Bar::most, 0.6)])],
    }
}

/// Runs every load of a bench.
///
/// # Errors
/// If a program is not installed or does not start, or a connection breaks.
pub fn run(what: What, settings: &BesideSettings, progress: impl Fn(&Row)) -> Result<BesideReport> {
    process::raise_descriptor_limit();
    let (spin, nic_cores) = if what == What::PingPong { (NEVER_SLEEPS, vec![0]) } else { (settings.spin, Vec::new()) };
    let bed = TestbedSettings { beside: true, spin, nic_cores, agent_core: None, ..Default::default() };
    let bed = Testbed::new(&bed)?;
    let files = Files::new()?;
    files.add(0, LENGTH)?;
    let mut bench = Bench { tool: bed.tool()?, bed, files };
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for load in loads(what) {
        let row = bench.row(&load, settings)?;
        bars.extend(load.bars.iter().map(|(name, figure, bar, bound)| bar(name, *bound, figure(&row))));
        progress(&row);
        rows.push(row);
    }
    Ok(BesideReport { rows, bars })
}

/// A load's result in a few lines of text.
pub fn line(row: &Row) -> String {
    let side = |name: &str, r: &Round| {
        format!(
            "{name} {:>9.2} p50 {:>7.4} p99 {:>7.3} ms, CPU per {} {:>6.3}: client {:.3} server {:.3} agent {:.3} NIC {:.3} kernel {:.3}",
            r.rate, r.p50, r.p99, row.unit, r.machine, r.client, r.server, r.agent, r.nic, r.kernel
        )
    };
    format!(
        "{}: rate {:.2}, p50 {:.2}, p99 {:.2}, CPU {:.2} ({:.2} to {:.2}) of the kernel's, the server's {:.2}\n    {}\n    {}, {:.0} on the NIC, \
         which was busy {:.3}",
        row.load,
        row.rate_ratio,
        row.p50_ratio,
        row.p99_ratio,
        row.machine_ratio,
        row.machine_spread[0],
        row.machine_spread[1],
        row.host_ratio,
        side("kernel", &row.kernel),
        side("Baton ", &row.baton),
        row.baton.on_nic,
        row.baton.nic_busy
    )
}

struct Bench {
    bed: Testbed,
    tool: Tool,
    files: Files,
}

/// CPU times in nanoseconds, and what was done, at a moment.
struct Snapshot {
    micros: u64,
    done: u64,
    client: u64,
    server: u64,
    agent: u64,
    nic: u64,
    nic_busy: u64,
    kernel: u64,
}

impl Bench {
    fn row(&mut self, load: &Load, settings: &BesideSettings) -> Result<Row> {
        let mut rounds: [Vec<Round>; 2] = Default::default();
        let (all, status) = (settings.rounds.max(1), StatusLine::new());
        for round in 1..=all {
            for (under_baton, rounds) in [false, true].into_iter().zip(&mut rounds) {
                let side = if under_baton { "under Baton" } else { "in the kernel" };
                status.show(format_args!("{}: round {round} of {all}, {side}", load.name));
                rounds.push(self.round(load.traffic, settings.seconds, under_baton).with_context(|| load.name)?);
            }
        }
        let ratios = |figure: fn(&Round) -> f64| {
            let pairs = rounds[0].iter().zip(&rounds[1]);
            pairs.map(|(kernel, baton)| figure(baton) / figure(kernel).max(1e-9)).collect::<Vec<_>>()
        };
        let ratio = |figure| quantile(&mut ratios(figure), 0.5);
        let spread = |figure| [0.0, 1.0].map(|end| quantile(&mut ratios(figure), end));
        Ok(Row {
            load: load.name,
            unit: if matches!(load.traffic, Traffic::Bulk { .. }) { "GB, s" } else { "request, µs" },
            rate_ratio: ratio(|round| round.rate),
            p50_ratio: ratio(|round| round.p50),
            p99_ratio: ratio(|round| round.p99),
            machine_ratio: ratio(|round| round.machine),
            host_ratio: ratio(|round| round.server),
            rate_spread: spread(|round| round.rate),
            machine_spread: spread(|round| round.machine),
            kernel: medians(&rounds[0]),
            baton: medians(&rounds[1]),
        })
    }

    fn round(&mut self, traffic: Traffic, seconds: f64, under_baton: bool) -> Result<Round> {
        let progress = Progress::default();
        let connections = match traffic {
            Traffic::Http { connections } | Traffic::Rpc { connections } | Traffic::Ring { connections } => connections,
            Traffic::Redis { .. } => REDIS_CONNECTIONS,
            Traffic::Bulk { .. } | Traffic::PingPong => 1,
        };
        let (mut server, client) = self.start(traffic, under_baton)?;
        let host = &self.bed.host_b;
        let tool = &mut self.tool;
        let measured = std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                if let Client::PingPong(_, shares) = client {
                    process::pin(0, usize::from(shares));
                }
                host.run(|| Ok(client.run(&progress)))
            });
            std::thread::sleep(Duration::from_secs_f64(WARMING));
            await_answers(&progress);
            if under_baton {
                await_moves(tool, connections)?;
            }
            let measured = measure(tool, &mut server, &progress, seconds, under_baton);
            progress.stop.store(true, Ordering::Relaxed);
            // A client that waits for the server ends when that does.
            drop(server);
            running.join().map_err(|_| anyhow::anyhow!("the load panicked"))???;
            measured
        });
        let (before, after, on_nic) = measured?;
        let bulk = matches!(traffic, Traffic::Bulk { .. });
        let times = progress.times.lock().map(|times| times.iter().map(|time| f64::from(*time) / 1e6).collect());
        let (done, micros) = (after.done - before.done, (after.micros - before.micros) as f64);
        ensure!(done > 0, "the server answered nothing");
        // Nanoseconds per byte are seconds per GB. A thread of the kernel's may have ended meanwhile.
        let each =
            |of: fn(&Snapshot) -> u64| of(&after).saturating_sub(of(&before)) as f64 / done as f64 / if bulk { 1.0 } else { 1e3 };
        let parts = [each(|s| s.client), each(|s| s.server), each(|s| s.agent), each(|s| s.nic), each(|s| s.kernel)];
        let [client, server, agent, nic, kernel] = parts;
        let times = Percentiles::of(times.unwrap_or_default());
        Ok(Round {
            rate: if bulk { done as f64 * 8.0 / 1e3 / micros } else { done as f64 * 1e6 / micros },
            p50: times.p50,
            p99: times.p99,
            machine: parts.iter().sum(),
            client,
            server,
            agent,
            nic,
            nic_busy: each(|s| s.nic_busy),
            kernel,
            on_nic,
        })
    }

    /// Starts a program that echoes. One that spins has a core of its own in the kernel, and shares it with the client under Baton.
    fn start_echo(&self, address: SocketAddr, agent: Option<&Path>, spin: bool) -> Result<Server> {
        let mut words = vec![std::env::current_exe()?.into_os_string(), "serve-echo".into(), address.to_string().into()];
        words.extend(spin.then(|| OsString::from("--spin")));
        words.extend((spin && agent.is_some()).then(|| OsString::from("--shares")));
        let mut server = Server::start(&self.bed.host_a, &words, self.files.root(), agent)?;
        server.listens(&self.bed.host_a, address).context("the program that echoes")?;
        if spin {
            server.pin(1);
        }
        Ok(server)
    }

    /// Starts a program that echoes by the client library.
    fn start_ring(&self, address: SocketAddr, agent: &Path) -> Result<Server> {
        let program = std::env::current_exe()?.into_os_string();
        let words = [program, "serve-echo".into(), address.to_string().into(), "--ring".into(), agent.into()];
        let mut server = Server::start(&self.bed.host_a, &words, self.files.root(), None)?;
        server.listens(&self.bed.host_a, address).context("the program that echoes by the client library")?;
        Ok(server)
    }

    /// Starts the server, and prepares the client.
    fn start(&self, traffic: Traffic, under_baton: bool) -> Result<(Server, Client)> {
        let address = SocketAddr::new(address_a(false), PORTS[usize::from(under_baton)]);
        let socket = self.bed.socket();
        let agent = under_baton.then_some(socket.as_path());
        let (host_a, host_b) = (&self.bed.host_a, &self.bed.host_b);
        let requests = |connections, depth, request: Vec<u8>, complete: fn(&[u8]) -> Option<usize>| {
            let answer = host_b.run(|| Ok(closed_loop::answer_length(address, &request, complete)))??;
            Ok::<_, anyhow::Error>(Client::Requests(address, Requests { connections, depth, request, answer }))
        };
        match traffic {
            Traffic::Http { connections } => {
                let server = Program::find().start(host_a, &self.files, address, agent)?;
                let request = format!("GET /0/{LENGTH} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes();
                Ok((server, requests(connections, 1, request, http_answer)?))
            }
            Traffic::Redis { depth } => {
                let words = [
                    "redis-server",
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                    "--protected-mode",
                    "no",
                    "--port",
                    &address.port().to_string(),
                    "--bind",
                ];
                let words = words.into_iter().map(OsString::from).chain([address.ip().to_string().into()]).collect::<Vec<_>>();
                let mut server = Server::start(host_a, &words, self.files.root(), agent)?;
                server.listens(host_a, address).context("redis-server (Debian's package of that name)")?;
                let request = |words: &[&str]| {
                    let words = words
                        .iter()
                        .fold(format!("*{}\r\n", words.len()), |all, word| all + &format!("${}\r\n{word}\r\n", word.len()));
                    words.into_bytes()
                };
                let set = request(&["SET", "key", "abc"]);
                host_b
                    .run(|| Ok(closed_loop::answer_length(address, &set, |answer| answer.ends_with(b"\r\n").then_some(0))))??;
                let answer = |answer: &[u8]| (answer.ends_with(b"abc\r\n")).then_some(answer.len());
                Ok((server, requests(REDIS_CONNECTIONS, depth, request(&["GET", "key"]), answer)?))
            }
            Traffic::Rpc { connections } | Traffic::Ring { connections } => {
                let server = match agent {
                    Some(agent) if matches!(traffic, Traffic::Ring { .. }) => self.start_ring(address, agent)?,
                    _ => self.start_echo(address, agent, false)?,
                };
                let message = vec![0x5a; MESSAGE];
                Ok((server, requests(connections, 1, message, |answer| (answer.len() >= MESSAGE).then_some(answer.len()))?))
            }
            Traffic::PingPong => Ok((self.start_echo(address, agent, true)?, Client::PingPong(address, under_baton))),
            Traffic::Bulk { into } => {
                let here = SocketAddr::new(address_b(false), address.port());
                let (script, at) = if into { (SINK, address) } else { (SOURCE, here) };
                let words = ["python3".into(), "-c".into(), script.into(), at.ip().to_string(), at.port().to_string()];
                let words = words.map(OsString::from);
                // The source connects at once.
                let client =
                    if into { Client::Sends(address) } else { Client::Receives(host_b.run(|| TcpListener::bind(here))?) };
                Ok((Server::start(host_a, &words, self.files.root(), agent)?, client))
            }
        }
    }
}

/// The length of a whole answer with a body of [`LENGTH`] bytes.
fn http_answer(answer: &[u8]) -> Option<usize> {
    let head = answer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    (answer.len() == head + LENGTH).then_some(answer.len())
}

/// The other end of the link.
enum Client {
    Requests(SocketAddr, Requests),
    /// With whether it shares its core with the server.
    PingPong(SocketAddr, bool),
    Sends(SocketAddr),
    Receives(TcpListener),
}

impl Client {
    /// Runs until it has to stop. The server may end after that.
    fn run(&self, progress: &Progress) -> Result<()> {
        self.work(progress).or_else(|error| if progress.stop.load(Ordering::Relaxed) { Ok(()) } else { Err(error) })
    }

    fn work(&self, progress: &Progress) -> Result<()> {
        match self {
            Client::Requests(server, requests) => requests.run(*server, progress),
            Client::PingPong(server, shares) => closed_loop::ping_pong(*server, MESSAGE, *shares, progress),
            Client::Sends(server) => {
                let deadline = monotonic_micros() + 20_000_000;
                let stream = loop {
                    match TcpStream::connect(server) {
                        Ok(stream) => break stream,
                        Err(error) => ensure!(monotonic_micros() < deadline, "the server does not listen: {error}"),
                    }
                    std::thread::sleep(Duration::from_millis(10));
                };
                closed_loop::bulk(stream, true, progress)
            }
            Client::Receives(listener) => closed_loop::bulk(listener.accept()?.0, false, progress),
        }
    }
}

fn count_on_nic(tool: &mut Tool) -> Result<usize> {
    Ok(tool.connections()?.iter().filter(|info| info.place == Place::Nic).count())
}

/// Waits until all connections are made and the first answer has come, or no more time is left for that.
fn await_answers(progress: &Progress) {
    let deadline = monotonic_micros() + (MOVING * 1e6) as u64;
    while progress.done.load(Ordering::Relaxed) == 0 && monotonic_micros() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until so many connections are on the NIC, or no more time is left for that.
fn await_moves(tool: &mut Tool, connections: usize) -> Result<()> {
    let deadline = monotonic_micros() + (MOVING * 1e6) as u64;
    while count_on_nic(tool)? < connections && monotonic_micros() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Measures a stretch of the traffic.
fn measure(
    tool: &mut Tool,
    server: &mut Server,
    progress: &Progress,
    seconds: f64,
    under_baton: bool,
) -> Result<(Snapshot, Snapshot, f64)> {
    let kernel = process::kernel_threads();
    let statistics = tool.statistics()?;
    let of = |process: u32| process::cpu_nanos(process).filter(|_| under_baton).unwrap_or(0);
    let busy = |tool: &mut Tool| {
        let counters = tool.statistics()?.counters;
        Ok::<_, anyhow::Error>(counters.get(Counter::BusyNanoseconds as usize).copied().unwrap_or(0))
    };
    let snapshot = |tool: &mut Tool, server: &Server| {
        Ok::<_, anyhow::Error>(Snapshot {
            micros: monotonic_micros(),
            done: progress.done.load(Ordering::Relaxed),
            client: process_nanos(),
            server: server.cpu().context("the server has ended")?,
            agent: of(statistics.agent_process),
            nic: of(statistics.nic_process),
            nic_busy: busy(tool)?,
            kernel: kernel.iter().filter_map(|thread| process::cpu_nanos(*thread)).sum(),
        })
    };
    progress.timing.store(true, Ordering::Relaxed);
    let before = snapshot(tool, server)?;
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let after = snapshot(tool, server)?;
    let on_nic = if under_baton { count_on_nic(tool)? } else { 0 };
    Ok((before, after, on_nic as f64))
}

fn medians(rounds: &[Round]) -> Round {
    let median = |figure: fn(&Round) -> f64| quantile(&mut rounds.iter().map(figure).collect::<Vec<_>>(), 0.5);
    Round {
        rate: median(|r| r.rate),
        p50: median(|r| r.p50),
        p99: median(|r| r.p99),
        machine: median(|r| r.machine),
        client: median(|r| r.client),
        server: median(|r| r.server),
        agent: median(|r| r.agent),
        nic: median(|r| r.nic),
        nic_busy: median(|r| r.nic_busy),
        kernel: median(|r| r.kernel),
        on_nic: median(|r| r.on_nic),
    }
}
