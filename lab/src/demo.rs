//! The demonstration: a server whose connections move to the NIC and back under load, while every byte is checked.

use crate::http::{self, LoadCounters};
use crate::probe;
use crate::report;
use crate::statistics::{Percentiles, quantile};
use crate::testbed::{Testbed, TestbedSettings, Tool, address_a};
use anyhow::{Context, Result, bail};
use baton_abi::layout::Counter;
use baton_client::protocol::{Ask, ConnectionInfo, Place, Reply};
use baton_kernel::events::monotonic_micros;
use baton_kernel::process;
use baton_sim::{Rng, stream};
use serde::Serialize;
use std::io::{BufRead, BufReader, IsTerminal};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A figure with everything in the kernel, and with everything on the NIC.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Both<T> {
    /// Connections in the kernel.
    pub kernel: T,
    /// Connections on the NIC.
    pub nic: T,
}

/// Latency percentiles.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    /// Median.
    pub p50: Both<f64>,
    /// 99th percentile.
    pub p99: Both<f64>,
}

/// What the demonstration measured and checked.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemoReport {
    /// Requests answered per second.
    pub requests_per_second: Both<f64>,
    /// CPU of the server's host per request: the server, its agent, and the kernel's receive thread.
    pub host_cpu_us_per_request: Both<f64>,
    /// Busy time of the NIC per request.
    pub nic_cpu_us_per_request: Both<f64>,
    /// From request to whole answer.
    pub latency_us: Latency,
    /// Moves made.
    pub moves: u64,
    /// Body bytes checked.
    pub bytes_verified: u64,
    /// Bytes that were wrong.
    pub mismatches: u64,
    /// Connections that broke.
    pub resets_seen_by_peer: u64,
    /// Largest gap in the answers to a probe every 20 µs around a move, less the usual gap.
    pub blackout_us: Percentiles,
    /// Times that the NIC was killed, and connections that it had then and that went on in the kernel.
    pub nic_kills: u32,
    /// See `nic_kills`.
    pub connections_recovered: u64,
    /// Whether each host's receive work ran in a thread of its own.
    pub threaded_napi: bool,
    /// Rounds of the comparison, in order: place, requests per second, host CPU and NIC CPU per request.
    pub rounds: Vec<Round>,
    /// What an ordinary HTTP client fetched while its connection moved, if there is one on this machine.
    pub http_client: Option<String>,
    /// Checks that did not hold.
    pub failures: Vec<String>,
}

/// One round of the comparison.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Round {
    /// Where the connections were.
    pub place: Place,
    /// Requests answered per second.
    pub requests_per_second: f64,
    /// CPU of the host per request.
    pub host_cpu_us: f64,
    /// Busy time of the NIC per request.
    pub nic_cpu_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
}

const CONNECTIONS: usize = 64;
const LENGTH: usize = 256;
const PAIRS: usize = 5;
const ROUND: Duration = Duration::from_millis(1200);

struct Stage<'a> {
    bed: &'a Testbed,
    tool: Tool,
    server: Child,
    session: u32,
    counters: &'a LoadCounters,
    latencies: &'a Mutex<Vec<u32>>,
    napi: Vec<u32>,
    live: bool,
}

fn start_server(bed: &Testbed, address: SocketAddr) -> Result<(Child, u32)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["demo-server", "--listen", &address.to_string(), "--agent"]).arg(bed.socket());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = bed.host_a.spawn(&mut command).context("starting the server")?;
    let mut line = String::new();
    BufReader::new(server.stdout.take().context("the server's output")?).read_line(&mut line)?;
    let session = line.trim().parse().context("the server did not start")?;
    Ok((server, session))
}

/// Runs the demonstration and writes `demo.json` and `report.html` into `directory`.
///
/// # Errors
/// If it cannot be set up. Checks that fail are in the report.
pub fn run(directory: &Path) -> Result<DemoReport> {
    std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    say("Two hosts, a link, and a NIC in front of host A (namespaces of this process; nothing outside is touched)");
    let bed = Testbed::new(&TestbedSettings { threaded_napi: true, spin: 60, ..TestbedSettings::default() })?;
    let address = SocketAddr::new(address_a(false), 8080);
    let (server, session) = start_server(&bed, address)?;
    let counters = LoadCounters::default();
    let latencies = Mutex::new(Vec::new());
    let mut report = DemoReport::default();
    let napi = process::napi_threads("baton0");
    report.threaded_napi = !napi.is_empty();
    for thread in napi.iter().chain(&process::napi_threads("eth0")) {
        process::pin(*thread as i32, process::cores() - 1);
    }
    let mut stage = Stage {
        bed: &bed,
        tool: bed.tool()?,
        server,
        session,
        counters: &counters,
        latencies: &latencies,
        napi,
        live: std::io::stdout().is_terminal(),
    };
    let result = std::thread::scope(|scope| -> Result<()> {
        let load = scope.spawn(|| {
            bed.host_b.run(|| http::load(address, CONNECTIONS, LENGTH, &counters, &latencies).map_err(std::io::Error::other))
        });
        let played = stage.play(&mut report, address);
        counters.stop.store(true, Ordering::Relaxed);
        let loaded = load.join().map_err(|_| anyhow::anyhow!("the load's thread panicked"))?;
        played.and(loaded.map_err(Into::into))
    });
    let _ = stage.server.kill();
    let _ = stage.server.wait();
    result?;
    say("A probe every 20 µs on a connection that moves 200 times: how long does it fall silent?");
    let cores = process::cores();
    let blackout = probe::measure(&bed, 200, false, (cores > 1).then_some(cores - 1), 0)?;
    report.blackout_us = blackout.blackout;
    report.moves += blackout.moves;
    report.bytes_verified += counters.bytes.load(Ordering::Relaxed);
    report.mismatches += counters.mismatches.load(Ordering::Relaxed);
    report.resets_seen_by_peer += counters.broken.load(Ordering::Relaxed);
    drop(stage);
    conclude(&mut report);
    write_results(&report, directory)?;
    Ok(report)
}

fn say(text: &str) {
    println!("\n▸ {text}");
}

impl Stage<'_> {
    fn play(&mut self, report: &mut DemoReport, address: SocketAddr) -> Result<()> {
        self.wait_for_connections(CONNECTIONS)?;
        say(&format!("{CONNECTIONS} HTTP connections, {LENGTH} B answers: kernel and NIC in turn, the server unaware"));
        for _ in 0..PAIRS {
            for place in [Place::Kernel, Place::Nic] {
                report.moves += self.move_all(place)?;
                let round = self.measure(place)?;
                println!(
                    "  {:>6}  {:>8.0} requests/s   host CPU {:>6.2} µs   NIC CPU {:>6.2} µs   p50 {:>5.0} µs   p99 {:>6.0} µs",
                    name(place),
                    round.requests_per_second,
                    round.host_cpu_us,
                    round.nic_cpu_us,
                    round.p50_us,
                    round.p99_us
                );
                report.rounds.push(round);
            }
        }
        summarise(report);
        say("Random connections move at random moments, under full load");
        report.moves += self.move_at_random(2000)?;
        report.http_client = self.fetch_with_curl(address)?;
        say("The NIC is killed (SIGKILL) while it runs half of the connections");
        self.kill_nic(report)?;
        Ok(())
    }

    fn list(&mut self) -> Result<Vec<ConnectionInfo>> {
        self.tool.connections()
    }

    fn wait_for_connections(&mut self, count: usize) -> Result<()> {
        let deadline = monotonic_micros() + 10_000_000;
        while self.list()?.len() < count {
            if monotonic_micros() > deadline {
                bail!("the clients did not connect within 10 s");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn move_one(&mut self, connection: u32, to: Place) -> Result<bool> {
        for _ in 0..50 {
            match self.tool.ask(Ask::MoveAny { session: self.session, connection, to })? {
                Reply::Done => return Ok(true),
                Reply::Stayed { transient: true, .. } => std::thread::sleep(Duration::from_millis(2)),
                Reply::Stayed { reason, .. } => bail!("connection {connection} stays: {reason}"),
                // It was closed meanwhile.
                _ => return Ok(false),
            }
        }
        bail!("connection {connection} could not be moved in fifty tries");
    }

    fn move_all(&mut self, to: Place) -> Result<u64> {
        let mut moved = 0;
        for connection in self.list()? {
            if connection.place != to {
                moved += u64::from(self.move_one(connection.connection, to)?);
            }
        }
        Ok(moved)
    }

    /// CPU nanoseconds of the server's host and of the NIC so far.
    fn cpu(&mut self) -> Result<(u64, u64)> {
        let statistics = self.tool.statistics()?;
        let mut host = process::cpu_nanos(self.server.id()).context("the server has ended")?;
        host += process::cpu_nanos(statistics.agent_process).unwrap_or(0);
        for thread in &self.napi {
            host += process::cpu_nanos(*thread).unwrap_or(0);
        }
        Ok((host, statistics.counters[Counter::BusyNanoseconds as usize]))
    }

    fn measure(&mut self, place: Place) -> Result<Round> {
        std::thread::sleep(Duration::from_millis(50));
        if let Ok(mut all) = self.latencies.lock() {
            all.clear();
        }
        self.counters.timing.store(true, Ordering::Relaxed);
        let (host, nic) = self.cpu()?;
        let (requests, started) = (self.counters.requests.load(Ordering::Relaxed), monotonic_micros());
        std::thread::sleep(ROUND);
        let served = (self.counters.requests.load(Ordering::Relaxed) - requests).max(1) as f64;
        let seconds = (monotonic_micros() - started) as f64 / 1e6;
        let (host_after, nic_after) = self.cpu()?;
        self.counters.timing.store(false, Ordering::Relaxed);
        let mut times: Vec<f64> =
            self.latencies.lock().map(|all| all.iter().map(|time| f64::from(*time)).collect()).unwrap_or_default();
        Ok(Round {
            place,
            requests_per_second: served / seconds,
            host_cpu_us: (host_after - host) as f64 / 1000.0 / served,
            nic_cpu_us: (nic_after - nic) as f64 / 1000.0 / served,
            p50_us: quantile(&mut times, 0.5),
            p99_us: quantile(&mut times, 0.99),
        })
    }

    fn move_at_random(&mut self, moves: u64) -> Result<u64> {
        let mut rng = Rng::new(7);
        let mut places: Vec<ConnectionInfo> = self.list()?;
        let mut done = 0;
        let mut shown = 0;
        while done < moves {
            let at = rng.below(places.len() as u64) as usize;
            let to = if places[at].place == Place::Nic { Place::Kernel } else { Place::Nic };
            if self.move_one(places[at].connection, to)? {
                places[at].place = to;
                done += 1;
            }
            std::thread::sleep(Duration::from_micros(rng.below(1500)));
            let now = monotonic_micros();
            if now - shown > 250_000 || done == moves {
                shown = now;
                self.show(&places, done);
            }
        }
        println!();
        Ok(done)
    }

    /// One line: a sign per connection, where it is.
    fn show(&self, places: &[ConnectionInfo], done: u64) {
        let row: String = places.iter().map(|info| if info.place == Place::Nic { '█' } else { '·' }).collect();
        let requests = self.counters.requests.load(Ordering::Relaxed);
        let wrong = self.counters.mismatches.load(Ordering::Relaxed);
        let end = if self.live { "\r" } else { "\n" };
        print!("  {row}  {done:>5} moves  {requests:>8} requests  {wrong} wrong bytes{end}");
        let _ = std::io::Write::flush(&mut std::io::stdout());
    }

    /// An ordinary HTTP client fetches 32 MB while its connection moves.
    fn fetch_with_curl(&mut self, address: SocketAddr) -> Result<Option<String>> {
        const SIZE: u64 = 32 << 20;
        let mut command = Command::new("curl");
        let url = format!("http://{address}/424242/{SIZE}");
        command.args(["--silent", "--show-error", "--noproxy", "*", "--max-time", "30", &url]).stdout(Stdio::piped());
        let Ok(mut curl) = self.bed.host_b.spawn(&mut command) else { return Ok(None) };
        let mut output = curl.stdout.take().context("curl's output")?;
        let before: Vec<u32> = self.list()?.iter().map(|info| info.connection).collect();
        let (wrong, moves) = std::thread::scope(|scope| -> Result<(u64, u64)> {
            let check = scope.spawn(move || check_stream(&mut output, 424_242, SIZE));
            let mut moves = 0;
            let mut known = None;
            while !check.is_finished() {
                // The newest connection is curl's, since all others were there before.
                if known.is_none() {
                    let listed = self.list()?;
                    known = listed
                        .iter()
                        .rev()
                        .find(|info| !before.contains(&info.connection))
                        .map(|info| info.connection)
                        .or_else(|| listed.last().map(|info| info.connection));
                }
                if let Some(connection) = known {
                    let to = if moves % 2 == 0 { Place::Nic } else { Place::Kernel };
                    match self.tool.ask(Ask::MoveAny { session: self.session, connection, to })? {
                        Reply::Done => moves += 1,
                        _ => std::thread::sleep(Duration::from_millis(1)),
                    }
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            let wrong = check.join().map_err(|_| anyhow::anyhow!("the checking thread panicked"))?;
            Ok((wrong, moves))
        })?;
        let status = curl.wait()?;
        if wrong > 0 || !status.success() {
            bail!("curl: {wrong} wrong bytes, {status}");
        }
        let text = format!("curl fetched {} MB over a connection that moved {moves} times: every byte right", SIZE >> 20);
        println!("  {text}");
        Ok(Some(text))
    }

    fn kill_nic(&mut self, report: &mut DemoReport) -> Result<()> {
        for info in self.list()?.iter().step_by(2) {
            self.move_one(info.connection, Place::Nic)?;
        }
        let before = self.tool.statistics()?;
        let requests = self.counters.requests.load(Ordering::Relaxed);
        process::signal(before.nic_process, 9)?;
        let after = loop {
            let now = self.tool.statistics()?;
            if now.nic_starts > before.nic_starts {
                break now;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        report.nic_kills = 1;
        report.connections_recovered = after.recovered;
        if after.lost > 0 {
            report.failures.push(format!("{} connections were lost with the NIC", after.lost));
        }
        // The load must go on, on every connection.
        std::thread::sleep(Duration::from_millis(500));
        let served = self.counters.requests.load(Ordering::Relaxed) - requests;
        println!("  {} connections went on in the kernel, {served} requests answered in the half second after", after.recovered);
        if served == 0 {
            report.failures.push("no request was answered after the NIC was killed".into());
        }
        Ok(())
    }
}

fn check_stream(input: &mut impl std::io::Read, key: u64, size: u64) -> u64 {
    let mut buffer = vec![0u8; 1 << 16];
    let (mut position, mut wrong) = (0, 0);
    while let Ok(got) = input.read(&mut buffer) {
        if got == 0 {
            break;
        }
        wrong += stream::mismatches(key, position, &buffer[..got]);
        position += got as u64;
    }
    wrong + size.abs_diff(position)
}

fn name(place: Place) -> &'static str {
    match place {
        Place::Kernel => "kernel",
        Place::Nic => "NIC",
    }
}

/// Medians over the rounds.
fn summarise(report: &mut DemoReport) {
    let median = |place: Place, figure: fn(&Round) -> f64| {
        let mut values: Vec<f64> = report.rounds.iter().filter(|round| round.place == place).map(figure).collect();
        quantile(&mut values, 0.5)
    };
    let both = |figure: fn(&Round) -> f64| Both { kernel: median(Place::Kernel, figure), nic: median(Place::Nic, figure) };
    let (rps, host, nic) = (both(|r| r.requests_per_second), both(|r| r.host_cpu_us), both(|r| r.nic_cpu_us));
    let (p50, p99) = (both(|r| r.p50_us), both(|r| r.p99_us));
    report.requests_per_second = rps;
    report.host_cpu_us_per_request = host;
    report.nic_cpu_us_per_request = nic;
    report.latency_us = Latency { p50, p99 };
}

fn conclude(report: &mut DemoReport) {
    let mut check = |holds: bool, text: String| {
        if !holds {
            report.failures.push(text);
        }
    };
    check(report.mismatches == 0, format!("{} bytes were wrong", report.mismatches));
    check(report.resets_seen_by_peer == 0, format!("{} connections broke", report.resets_seen_by_peer));
    check(report.bytes_verified > 0, "no byte was checked".into());
    check(report.moves >= 2000, format!("only {} moves were made", report.moves));
}

fn write_results(report: &DemoReport, directory: &Path) -> Result<()> {
    let json: PathBuf = directory.join("demo.json");
    std::fs::write(&json, serde_json::to_string_pretty(report)?).with_context(|| format!("writing {}", json.display()))?;
    let html = directory.join("report.html");
    std::fs::write(&html, report::html(report)?).with_context(|| format!("writing {}", html.display()))?;
    Ok(())
}

/// The closing table.
pub fn table(report: &DemoReport) -> String {
    let r = report;
    let row = |label: &str, both: Both<f64>, digits: usize| {
        let change = if both.kernel > 0.0 { (both.nic / both.kernel - 1.0) * 100.0 } else { 0.0 };
        format!("  {label:<28} {:>12.digits$} {:>12.digits$} {change:>+9.0} %\n", both.kernel, both.nic)
    };
    let sum = Both {
        kernel: r.host_cpu_us_per_request.kernel + r.nic_cpu_us_per_request.kernel,
        nic: r.host_cpu_us_per_request.nic + r.nic_cpu_us_per_request.nic,
    };
    let mut text = format!("\n  {:<28} {:>12} {:>12} {:>11}\n", "", "kernel", "NIC", "change");
    text += &row("requests/s", r.requests_per_second, 0);
    text += &row("host CPU per request, µs", r.host_cpu_us_per_request, 2);
    text += &row("NIC CPU per request, µs", r.nic_cpu_us_per_request, 2);
    text += &row("host + NIC, µs", sum, 2);
    text += &row("latency p50, µs", r.latency_us.p50, 0);
    text += &row("latency p99, µs", r.latency_us.p99, 0);
    let b = r.blackout_us;
    text += &format!("\n  blackout of a move           p50 {:.0} µs   p99 {:.0} µs   max {:.0} µs\n", b.p50, b.p99, b.max);
    text += &format!(
        "  {} moves, {} bytes verified, {} wrong, {} connections broken, ",
        r.moves, r.bytes_verified, r.mismatches, r.resets_seen_by_peer
    );
    text += &format!("{} recovered from a killed NIC\n", r.connections_recovered);
    for failure in &r.failures {
        text += &format!("  FAILED: {failure}\n");
    }
    text
}
