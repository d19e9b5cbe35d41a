//! `baton plan`: what each degree of offload brings for a host, a NIC and a load.

use super::bench::print_bars;
use crate::numbers::between;
use crate::tools::SocketArgument;
use anyhow::{Context, Result, bail};
use baton_abi::layout::Counter;
use baton_bed::server::Files;
use baton_bed::temporary::ResultFile;
use baton_client::tool::Tool;
use baton_lab::planner::costs::{Host, Nic};
use baton_lab::planner::load::{Load, Size};
use baton_lab::planner::record::{Carried, exchanges_of_nic};
use baton_lab::planner::{self, Row, check, measure};
use baton_linux::events::monotonic_micros;
use baton_linux::process::cpu_nanos;
use baton_protocol::program;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const EXAMPLES: &str = "Examples:
  baton plan --load web.toml                          # measures this machine first, in some ten seconds
  baton plan --save here.toml                         # only measures
  baton plan --host here.toml --nic here.toml --load web.toml --json
  baton plan --host here.toml --nic here.toml --load record --seconds 30
  baton plan --check --rounds 3

A load:
  connections = 512
  depth = 4                                           # requests that a client sends at once; 1
  program = 3000                                      # the program's own work for a request, ns; 0
  sizes = [{ request = 64, answer = 4096 }]           # several with `share`

docs/operate/plan.md has all of it, and what the result leaves out.";

#[derive(Args)]
pub struct PlanArguments {
    /// The host: `measured`, or a file that --save wrote.
    #[arg(long, default_value = "measured", value_name = "FILE|measured")]
    host: String,
    /// The NIC, the same.
    #[arg(long, default_value = "measured", value_name = "FILE|measured")]
    nic: String,
    /// The load (TOML); or `record`: what the connections on the NIC of a Baton carry now.
    #[arg(long, value_name = "FILE|record", required_unless_present_any = ["save", "check"])]
    load: Option<PathBuf>,
    /// At most so many connections on the NIC.
    #[arg(long, value_name = "N")]
    connections: Option<u32>,
    /// Write what was measured here.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Run loads that were not measured, and compare with what is predicted for them. Takes some minutes.
    #[arg(long, conflicts_with_all = ["load", "save", "host", "nic", "connections"])]
    check: bool,
    /// With --check: rounds.
    #[arg(long, default_value_t = 3, requires = "check", value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Seconds that are recorded (10), or with --check measured in each run (1).
    #[arg(long, value_name = "N", value_parser = between(0.1, 3600.0))]
    seconds: Option<f64>,
    #[command(flatten)]
    socket: SocketArgument,
    /// With --check: only loads whose names contain one of these: http, redis, rpc, bulk, deep, zipf, long.
    #[arg(long, value_delimiter = ',', requires = "check", value_name = "NAME")]
    only: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What --save writes.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    host: Option<Host>,
    nic: Option<Nic>,
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("in {}", path.display()))
}

/// Host and NIC that --save wrote.
///
/// # Errors
/// If the file is none of these, or contradicts itself.
pub fn parameters_in(path: &Path) -> Result<(Host, Nic)> {
    let File { host, nic } = read(path)?;
    let missing = |what: &str| format!("{} has no table [{what}]: baton plan --save FILE writes one", path.display());
    let (host, nic) = (host.with_context(|| missing("host"))?, nic.with_context(|| missing("nic"))?);
    host.check().and_then(|()| nic.check()).with_context(|| format!("in {}", path.display()))?;
    Ok((host, nic))
}

/// Host and NIC: read from files, and measured where none is named.
fn parameters(arguments: &PlanArguments) -> Result<(Host, Nic)> {
    let from =
        |name: &str| -> Result<Option<File>> { if name == "measured" { Ok(None) } else { read(Path::new(name)).map(Some) } };
    let (host, nic) = (from(&arguments.host)?, from(&arguments.nic)?);
    let measured = if host.is_none() || nic.is_none() {
        baton_linux::namespace::become_root_if_needed()?;
        Some(measure::measure(&Files::new()?, &|line| eprintln!("{line}"))?)
    } else {
        None
    };
    let missing = |what: &str, name: &str| format!("{name} has no table [{what}]: baton plan --save FILE writes one");
    let host = match (host, &measured) {
        (Some(file), _) => file.host.with_context(|| missing("host", &arguments.host))?,
        (None, Some((host, _))) => host.clone(),
        (None, None) => bail!("no host"),
    };
    let nic = match (nic, measured) {
        (Some(file), _) => file.nic.with_context(|| missing("nic", &arguments.nic))?,
        (None, Some((_, nic))) => nic,
        (None, None) => bail!("no NIC"),
    };
    host.check().with_context(|| format!("--host {}", arguments.host))?;
    nic.check().with_context(|| format!("--nic {}", arguments.nic))?;
    Ok((host, nic))
}

/// What the connections on a Baton's NIC carry in so many seconds.
fn record(tool: &mut Tool, seconds: f64) -> Result<Carried> {
    let look = |tool: &mut Tool| -> Result<_> {
        let connections = tool.traffic()?;
        let processes: BTreeSet<u32> = tool.connections()?.iter().map(|info| info.process).collect();
        let cpu: u64 = processes.iter().filter_map(|process| cpu_nanos(*process)).sum();
        Ok((connections, cpu, tool.statistics()?.counters, monotonic_micros()))
    };
    let (before, cpu_before, counters_before, began) = look(tool)?;
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let (after, cpu_after, counters_after, ended) = look(tool)?;
    // A NIC counts segments only while it has a connection, so one that came or went meanwhile is left out.
    let key = |one: &program::Load| (one.session, one.connection, one.serial, one.moves);
    let then: HashMap<_, _> =
        before.iter().filter(|one| one.place == program::Place::Nic).map(|one| (key(one), one.carried)).collect();
    let program = cpu_after.saturating_sub(cpu_before);
    let mut carried = Carried { seconds: (ended - began) as f64 / 1e6, program, ..Carried::default() };
    for one in after.iter().filter(|one| one.place == program::Place::Nic) {
        let (Some((sent, received)), Some(Some(then))) = (one.carried, then.get(&key(one))) else { continue };
        let (sent, received) = (sent.saturating_sub(then.0), received.saturating_sub(then.1));
        carried.sent += sent;
        carried.received += received;
        carried.connections += u32::from(sent + received > 0);
    }
    let of = |counters: &[u64], counter: Counter| counters.get(counter as usize).copied().unwrap_or(0);
    let count = |counter| of(&counters_after, counter).saturating_sub(of(&counters_before, counter));
    let segments = [count(Counter::Segments), count(Counter::WireSent)];
    carried.exchanges = exchanges_of_nic(segments, carried.received, carried.sent);
    Ok(carried)
}

/// The rows as a table.
fn table(rows: &[Row]) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<10} {:>7} {:>11} {:>8} {:>8} {:>11} {:>6} {:>11} {:>6}",
        "DEGREE", "ON NIC", "PROGRAM µs", "NIC µs", "PEER µs", "MACHINE µs", "CPU", "REQUESTS/s", "BUSY"
    )];
    for row in rows {
        let Row { degree, on_nic, program, nic, peer, machine, over_none, rate, processors, note } = row;
        lines.push(
            format!(
                "{:<10} {on_nic:>7} {program:>11.2} {nic:>8.2} {peer:>8.2} {machine:>11.2} {over_none:>6.2} {rate:>11.0} {processors:>6.2}  {note}",
                degree.name()
            )
            .trim_end()
            .to_owned(),
        );
    }
    lines
}

/// `baton plan`.
pub fn run(arguments: &PlanArguments) -> Result<bool> {
    if arguments.check {
        baton_linux::namespace::become_root_if_needed()?;
        let report =
            check::run(arguments.rounds.into(), arguments.seconds.unwrap_or(1.0), &arguments.only, &|line| eprintln!("{line}"))?;
        if !arguments.json {
            report.lines().iter().for_each(|line| println!("{line}"));
        }
        return print_bars(&report.bars, &report, arguments.json);
    }
    let save = arguments.save.as_deref().map(ResultFile::open).transpose()?;
    let records = arguments.load.as_deref() == Some(Path::new("record"));
    let file = arguments.load.as_deref().filter(|_| !records);
    let mut load: Option<Load> = file.map(read).transpose()?;
    // Before anything is measured for it.
    load.iter().try_for_each(Load::check)?;
    let carried = if records { Some(record(&mut arguments.socket.connect()?, arguments.seconds.unwrap_or(10.0))?) } else { None };
    let (host, nic) = parameters(arguments)?;
    if let Some(carried) = carried {
        load = Some(carried.load("recorded", &nic.offloaded.program)?);
    }
    if let Some(save) = save {
        save.write(toml::to_string(&File { host: Some(host.clone()), nic: Some(nic.clone()) })?.as_bytes())?;
    }
    let Some(load) = load else { return Ok(true) };
    let rows = planner::plan(&host, &nic, &load, arguments.connections)?;
    if arguments.json {
        println!("{}", serde_json::json!({ "host": host, "nic": nic, "load": load, "rows": rows }));
        return Ok(true);
    }
    table(&rows).iter().for_each(|line| println!("{line}"));
    if records {
        let Size { request, answer, .. } = load.sizes[0];
        println!(
            "\nrecorded: {} connections, {:.0} exchanges/s of {request:.0} and {answer:.0} bytes, {:.1} µs of the program's own work for each",
            load.connections,
            load.rate.unwrap_or(0.0),
            load.program / 1e3
        );
    }
    println!("\nCPU µs of a request; CPU: over none; BUSY: processors at that rate.");
    Ok(true)
}
