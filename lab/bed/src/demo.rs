//! The demonstration: a server whose connections move to the NIC and back under load, while every byte is checked.

use crate::http::{self, LoadCounters};
use crate::probe;
use crate::report;
use crate::server::{Files, Program, Server};
use crate::statistics::{Percentiles, quantile};
use crate::temporary::ResultFile;
use crate::testbed::{Testbed, TestbedSettings, address_a, without_baton};
use anyhow::{Context, Result, bail};
use baton_abi::layout::Counter;
use baton_client::tool::Tool;
use baton_linux::events::monotonic_micros;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply};
use baton_sim::{Rng, stream};
use serde::Serialize;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A figure of a server with its connections in the kernel, and of the same server with them on the NIC.
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

/// Figures and checks of the demonstration.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemoReport {
    /// Name of the server program.
    pub server: String,
    /// Requests answered per second.
    pub requests_per_second: Both<f64>,
    /// CPU of the server's process per request, with what it does inside the kernel.
    pub server_cpu_us_per_request: Both<f64>,
    /// Busy time of the NIC per request. Without Baton there is none.
    pub nic_cpu_us_per_request: Both<f64>,
    /// Busy time of all processors per request: kernel, server, NIC, agent, and the clients.
    pub machine_cpu_us_per_request: Both<f64>,
    /// From the request to the last byte of the answer.
    pub latency_us: Latency,
    /// Moves made.
    pub moves: u64,
    /// Body bytes checked.
    pub bytes_verified: u64,
    /// Bytes that were wrong.
    pub mismatches: u64,
    /// Connections that broke.
    pub resets_seen_by_peer: u64,
    /// Largest gap in the answers to a probe every 20 µs around a move, minus the usual gap.
    pub blackout_us: Percentiles,
    /// Number of times that the NIC was killed.
    pub nic_kills: u32,
    /// Connections that were on the NIC when it was killed and went on in the kernel.
    pub connections_recovered: u64,
    /// Rounds of the comparison, in order: place, requests per second, host CPU and NIC CPU per request.
    pub rounds: Vec<Round>,
    /// What an ordinary HTTP client fetched while its connection moved, if one is installed.
    pub http_client: Option<String>,
    /// Checks that failed.
    pub failures: Vec<String>,
}

/// One round of the comparison.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Round {
    /// Where the connections were.
    pub place: Place,
    /// Requests answered per second.
    pub requests_per_second: f64,
    /// CPU of the server's process per request.
    pub server_cpu_us: f64,
    /// Busy time of the NIC per request.
    pub nic_cpu_us: f64,
    /// Busy time of all processors per request.
    pub machine_cpu_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
}

const CONNECTIONS: usize = 64;
const LENGTH: usize = 256;
const PAIRS: usize = 5;
const ROUND: Duration = Duration::from_millis(1200);

const PORT: u16 = 8080;
/// What an ordinary client fetches: stream and length.
const LARGE: (u64, usize) = (424_242, 32 << 20);

/// A server, its load, and the host of the load.
struct Side<'a> {
    place: Place,
    host_b: &'a Namespace,
    server: Server,
    counters: LoadCounters,
    latencies: Mutex<Vec<u32>>,
}

struct Stage<'a> {
    bed: &'a Testbed,
    tool: Tool,
    /// Without Baton, and with it.
    sides: &'a [Side<'a>; 2],
    live: bool,
}

fn address() -> SocketAddr {
    SocketAddr::new(address_a(false), PORT)
}

/// Runs the demonstration and writes `demo.json` and `report.html` into `directory`.
///
/// # Errors
/// If it cannot be set up. Failed checks are in the report.
pub fn run(directory: &Path) -> Result<DemoReport> {
    std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    // Not after half a minute.
    let open = |name| ResultFile::open(&directory.join(name));
    let (json, page) = (open("demo.json")?, open("report.html")?);
    let program = Program::find();
    say(&format!(
        "Compared: {0} on a Linux host with a veth link and no Baton at all, and the same {0} under `baton run` behind a NIC
  (four hosts, all in namespaces of this process)",
        program.name()
    ));
    let files = Files::new()?;
    (0..http::KEYS).try_for_each(|key| files.add(key, LENGTH))?;
    files.add(LARGE.0, LARGE.1)?;
    // One thread for the receive work of each of Baton's hosts, so that host B's does not run on the NIC's account. The
    // comparison's link is as Linux sets it up.
    let settings = TestbedSettings { spin: 60, ..TestbedSettings::default() };
    let plain = without_baton(&settings)?;
    let bed = Testbed::new(&TestbedSettings { threaded_napi: true, ..settings })?;
    let side = |place: Place| -> Result<Side> {
        let (host_a, host_b, agent) = match place {
            Place::Kernel => (&plain[0], &plain[1], None),
            Place::Nic => (&bed.host_a, &bed.host_b, Some(bed.socket())),
        };
        let server = program.start(host_a, &files, address(), agent.as_deref())?;
        Ok(Side { place, host_b, server, counters: LoadCounters::default(), latencies: Mutex::default() })
    };
    let sides = [side(Place::Kernel)?, side(Place::Nic)?];
    let mut report = DemoReport { server: program.name().into(), ..DemoReport::default() };
    for thread in process::napi_threads("baton0").iter().chain(&process::napi_threads("eth0")) {
        process::pin(*thread as i32, process::cores() - 1);
    }
    let live = std::io::stdout().is_terminal();
    let mut stage = Stage { bed: &bed, tool: bed.tool()?, sides: &sides, live };
    std::thread::scope(|scope| -> Result<()> {
        let loads = sides.each_ref().map(|side| {
            let load = move || http::load(address(), CONNECTIONS, LENGTH, &side.counters, &side.latencies);
            scope.spawn(move || side.host_b.run(|| load().map_err(std::io::Error::other)))
        });
        let played = stage.play(&mut report);
        sides.iter().for_each(|side| side.counters.stop.store(true, Ordering::Relaxed));
        for load in loads {
            load.join().map_err(|_| anyhow::anyhow!("the load's thread panicked"))??;
        }
        played
    })?;
    for counters in sides.iter().map(|side| &side.counters) {
        report.bytes_verified += counters.bytes.load(Ordering::Relaxed);
        report.mismatches += counters.mismatches.load(Ordering::Relaxed);
        report.resets_seen_by_peer += counters.broken.load(Ordering::Relaxed);
    }
    drop(stage);
    drop(sides);
    say("A probe every 20 µs on a connection that moves 200 times: the longest gap in its answers");
    let cores = process::cores();
    let blackout = probe::measure(&bed, 200, false, (cores > 1).then_some(cores - 1), 0)?;
    report.blackout_us = blackout.blackout;
    report.moves += blackout.moves;
    conclude(&mut report);
    json.write(serde_json::to_string_pretty(&report)?.as_bytes())?;
    page.write(report::html(&report)?.as_bytes())?;
    Ok(report)
}

fn say(text: &str) {
    println!("\n▸ {text}");
}

impl Stage<'_> {
    fn play(&mut self, report: &mut DemoReport) -> Result<()> {
        say(&format!(
            "{CONNECTIONS} HTTP connections to each, {LENGTH} B answers, in turn (machine: all processors, clients included)"
        ));
        self.wait_for_connections(CONNECTIONS)?;
        for _ in 0..PAIRS {
            for side in self.sides {
                let round = self.measure(side)?;
                println!(
                    "  {:>6}  {:>8.0} requests/s   CPU per request: server {:>5.2} µs, NIC {:>5.2} µs, machine {:>5.2} µs   p50 {:>5.0} µs   p99 {:>6.0} µs",
                    name(round.place),
                    round.requests_per_second,
                    round.server_cpu_us,
                    round.nic_cpu_us,
                    round.machine_cpu_us,
                    round.p50_us,
                    round.p99_us
                );
                report.rounds.push(round);
            }
        }
        summarise(report);
        say("Random connections move at random moments, under full load");
        self.counters().active.store(true, Ordering::Relaxed);
        report.moves += self.move_at_random(2000)?;
        report.http_client = self.fetch_with_curl()?;
        say("The NIC is killed (SIGKILL) while it runs half of the connections");
        self.kill_nic(report)?;
        Ok(())
    }

    /// Of the load on the connections that move.
    fn counters(&self) -> &LoadCounters {
        &self.sides[1].counters
    }

    fn list(&mut self) -> Result<Vec<ConnectionInfo>> {
        self.tool.connections()
    }

    /// Waits until the connections that are to move are on the NIC. They get there with their first requests.
    fn wait_for_connections(&mut self, count: usize) -> Result<()> {
        let deadline = monotonic_micros() + 10_000_000;
        self.counters().active.store(true, Ordering::Relaxed);
        while self.list()?.iter().filter(|info| info.place == Place::Nic).count() < count {
            if monotonic_micros() > deadline {
                bail!("the clients' connections were not on the NIC within 10 s");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.counters().active.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn move_one(&mut self, info: &ConnectionInfo, to: Place) -> Result<bool> {
        let (session, connection) = (info.session, info.connection);
        for _ in 0..50 {
            match self.tool.ask(Ask::MoveAny { session, connection, to, nic: None })? {
                Reply::Done => return Ok(true),
                Reply::Stayed { transient: true, .. } => std::thread::sleep(Duration::from_millis(2)),
                Reply::Stayed { reason, .. } => bail!("connection {connection} stays: {reason}"),
                // It was closed meanwhile.
                _ => return Ok(false),
            }
        }
        bail!("connection {connection} could not be moved in fifty tries");
    }

    /// Nanoseconds that the server, its NIC and all processors have been busy so far.
    fn cpu(&mut self, side: &Side) -> Result<[u64; 3]> {
        let server = side.server.cpu().context("the server has ended")?;
        let nic = match side.place {
            Place::Kernel => 0,
            Place::Nic => self.tool.statistics()?.counters[Counter::BusyNanoseconds as usize],
        };
        Ok([server, nic, process::machine_nanos()?])
    }

    fn measure(&mut self, side: &Side) -> Result<Round> {
        let counters = &side.counters;
        counters.active.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(50));
        if let Ok(mut all) = side.latencies.lock() {
            all.clear();
        }
        counters.timing.store(true, Ordering::Relaxed);
        let before = self.cpu(side)?;
        let (requests, started) = (counters.requests.load(Ordering::Relaxed), monotonic_micros());
        std::thread::sleep(ROUND);
        let served = (counters.requests.load(Ordering::Relaxed) - requests).max(1) as f64;
        let seconds = (monotonic_micros() - started) as f64 / 1e6;
        let after = self.cpu(side)?;
        let [server_cpu_us, nic_cpu_us, machine_cpu_us] =
            std::array::from_fn(|at| after[at].saturating_sub(before[at]) as f64 / 1000.0 / served);
        counters.timing.store(false, Ordering::Relaxed);
        counters.active.store(false, Ordering::Relaxed);
        let mut times: Vec<f64> =
            side.latencies.lock().map(|all| all.iter().map(|time| f64::from(*time)).collect()).unwrap_or_default();
        Ok(Round {
            place: side.place,
            requests_per_second: served / seconds,
            server_cpu_us,
            nic_cpu_us,
            machine_cpu_us,
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
            if self.move_one(&places[at], to)? {
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

    /// Prints one line: a sign per connection that shows where it is.
    fn show(&self, places: &[ConnectionInfo], done: u64) {
        let row: String = places.iter().map(|info| if info.place == Place::Nic { '█' } else { '·' }).collect();
        let requests = self.counters().requests.load(Ordering::Relaxed);
        let wrong = self.counters().mismatches.load(Ordering::Relaxed);
        let end = if self.live { "\r" } else { "\n" };
        print!("  {row}  {done:>5} moves  {requests:>8} requests  {wrong} wrong bytes{end}");
        let _ = std::io::Write::flush(&mut std::io::stdout());
    }

    /// Lets an ordinary HTTP client fetch a large file while its connection moves.
    fn fetch_with_curl(&mut self) -> Result<Option<String>> {
        let (key, size) = (LARGE.0, LARGE.1 as u64);
        let before: Vec<(u32, u32)> = self.list()?.iter().map(|info| (info.session, info.connection)).collect();
        let mut command = Command::new("curl");
        let url = format!("http://{}/{key}/{size}", address());
        command.args(["--silent", "--show-error", "--noproxy", "*", "--max-time", "30", &url]).stdout(Stdio::piped());
        process::inherit(&mut command, &[], true);
        let Ok(mut curl) = self.bed.host_b.spawn(&mut command) else { return Ok(None) };
        let mut output = curl.stdout.take().context("curl's output")?;
        let (wrong, moves) = std::thread::scope(|scope| -> Result<(u64, u64)> {
            let check = scope.spawn(move || check_stream(&mut output, key, size));
            let mut moves = 0;
            let mut known = None;
            while !check.is_finished() {
                if known.is_none() {
                    known = self.list()?.into_iter().find(|info| !before.contains(&(info.session, info.connection)));
                }
                if let Some(info) = &known {
                    let to = if moves % 2 == 0 { Place::Kernel } else { Place::Nic };
                    match self.tool.ask(Ask::MoveAny { session: info.session, connection: info.connection, to, nic: None })? {
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
        let text = format!("curl fetched {} MB over a connection that moved {moves} times: every byte right", size >> 20);
        println!("  {text}");
        Ok(Some(text))
    }

    fn kill_nic(&mut self, report: &mut DemoReport) -> Result<()> {
        for info in self.list()?.iter().step_by(2) {
            // A connection that curl has closed stays where it is.
            let _ = self.move_one(info, Place::Nic);
        }
        let before = self.tool.statistics()?;
        let requests = self.counters().requests.load(Ordering::Relaxed);
        process::signal(before.nic_process, 9)?;
        while self.tool.statistics()?.nic_starts == before.nic_starts {
            std::thread::sleep(Duration::from_millis(1));
        }
        report.nic_kills = 1;
        // The load must continue on every connection.
        std::thread::sleep(Duration::from_millis(500));
        // The next NIC starts before the last of them has been recovered.
        let after = self.tool.statistics()?;
        report.connections_recovered = after.recovered;
        if after.lost > 0 {
            report.failures.push(format!("{} connections were lost with the NIC", after.lost));
        }
        let served = self.counters().requests.load(Ordering::Relaxed) - requests;
        println!("  {} connections went on in the kernel, {served} requests answered in the half second after", after.recovered);
        if after.recovered == 0 {
            report.failures.push("no connection was on the NIC when it was killed".into());
        }
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
    let (p50, p99) = (both(|r| r.p50_us), both(|r| r.p99_us));
    let (rps, server) = (both(|r| r.requests_per_second), both(|r| r.server_cpu_us));
    let (nic, machine) = (both(|r| r.nic_cpu_us), both(|r| r.machine_cpu_us));
    report.requests_per_second = rps;
    report.server_cpu_us_per_request = server;
    report.nic_cpu_us_per_request = nic;
    report.machine_cpu_us_per_request = machine;
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

/// The change from kernel to NIC, as text: empty where the kernel has nothing to compare with.
pub(crate) fn change(both: Both<f64>) -> String {
    if both.kernel > 0.0 { format!("{:+.0} %", (both.nic / both.kernel - 1.0) * 100.0) } else { String::new() }
}

/// The closing table.
pub fn table(report: &DemoReport) -> String {
    let r = report;
    let row = |label: &str, both: Both<f64>, digits: usize| {
        format!("  {label:<28} {:>12.digits$} {:>12.digits$} {:>11}\n", both.kernel, both.nic, change(both))
    };
    let mut text = format!("\n  {:<28} {:>12} {:>12} {:>11}\n", "", "kernel", "NIC", "change");
    text += &row("requests/s", r.requests_per_second, 0);
    text += &row("server CPU per request, µs", r.server_cpu_us_per_request, 2);
    text += &row("NIC CPU per request, µs", r.nic_cpu_us_per_request, 2);
    text += &row("machine CPU per request, µs", r.machine_cpu_us_per_request, 2);
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
