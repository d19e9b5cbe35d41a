//! `baton nic`: the offloads for the kernel's own connections, under ethtool's names; and the filter.

use crate::addresses;
use crate::filter::{self, FilterArguments};
use crate::front::{self, AttachArguments, DetachArguments};
use crate::gain::{self, GainArguments};
use crate::metrics;
use crate::nic_messages;
use crate::nic_receive;
use crate::placement::{self, PlacementArguments};
use crate::tools::SocketArgument;
use anyhow::{Result, anyhow, bail};
use baton_abi::layout::Counter;
use baton_client::tool::Tool;
use baton_offloads::Offloads;
use baton_protocol::program::{Ask, NicStatistics, Reply, Statistics};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

pub const EXAMPLES: &str = "Examples:
  baton nic show
  baton nic show --nic 1
  baton nic set lro=reorder tso=on adaptive-rx=on
  baton nic set rx-usecs=50 rx-frames=16
  baton nic set queues=2 rss-key=symmetric rss-indir=balanced
  baton nic set connections=256 memory=64M processor=80
  baton nic gain
  baton nic filter add in tcp dport 22 drop
  baton nic attach eth0
  baton nic --explain-placement --workers 4 --interface eth0

`attach` puts large receive in front of a device of the kernel's, whether a Baton runs or not; all others need one. Which settings there are,
and where they apply: `baton nic set --help`, docs/reference/settings.md.";

const SHOW_EXAMPLES: &str = "Examples:
  baton nic show
  baton nic show --nic 1
  baton nic show --json | jq .counters

What each counter is: docs/operate/ls.md.";

const SET_EXAMPLES: &str = "Examples:
  baton nic set connections=256 memory=64M processor=80
  baton nic set --nic 1 when-full=refuse
  baton nic set lro=reorder tso=on adaptive-rx=on
  baton nic set rx-usecs=50 rx-frames=16
  baton nic set queues=2 rss-key=symmetric rss-indir=balanced

These can always be set: connections, memory, pairs, processor, when-full, during-moves, peer-fin, route-change, adaptive-bell, bell-usecs,
bell-frames. The others are for a NIC between the kernel and the wire (`baton hosts`). Where the NIC is beside the kernel, the kernel's
devices do what they are about: see `ethtool -K` and `-C`. Values: docs/reference/settings.md.";

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub struct NicArguments {
    #[command(flatten)]
    placement: PlacementArguments,
    #[command(subcommand)]
    command: Option<NicCommand>,
}

#[derive(Subcommand)]
pub enum NicCommand {
    /// Prints the settings, and the counters so far.
    #[command(after_help = SHOW_EXAMPLES)]
    Show(ShowArguments),
    /// Changes settings at once, under load too.
    #[command(after_help = SET_EXAMPLES)]
    Set(SetArguments),
    /// Prints what classes of connections were measured to cost in the kernel and on the NIC (`--choose gain`).
    #[command(after_help = gain::EXAMPLES)]
    Gain(GainArguments),
    /// Merges the segments that a device receives for the kernel's connections (large receive), until it is detached.
    /// Needs root.
    #[command(after_help = front::EXAMPLES)]
    Attach(AttachArguments),
    /// Ends `baton nic attach` for a device; it receives as before.
    #[command(after_help = "Example:\n  baton nic detach eth0")]
    Detach(DetachArguments),
    /// Shows and changes the rules about frames, of a NIC that belongs to somebody else than its host.
    #[command(after_help = filter::EXAMPLES)]
    Filter(FilterArguments),
}

#[derive(Args)]
pub struct ShowArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Only the NIC with this number, of several. Without it: the first one's settings, the sums of all counters, and a
    /// line for each.
    #[arg(long, value_name = "N")]
    nic: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct SetArguments {
    /// `connections`, `memory`, `processor`, `when-full`, `tso`, `lro`, `adaptive-rx`, …; `baton nic show` lists them.
    #[arg(required = true, value_name = "KEY=VALUE")]
    settings: Vec<String>,
    #[command(flatten)]
    socket: SocketArgument,
    /// Only of the NIC with this number, of several. Without it: of all.
    #[arg(long, value_name = "N")]
    nic: Option<u32>,
}

pub fn run(arguments: &NicArguments) -> Result<bool> {
    match &arguments.command {
        Some(NicCommand::Show(arguments)) => show(arguments),
        Some(NicCommand::Set(arguments)) => set(arguments),
        Some(NicCommand::Gain(arguments)) => gain::show(arguments),
        Some(NicCommand::Attach(arguments)) => front::attach(arguments),
        Some(NicCommand::Detach(arguments)) => front::detach(arguments).map(|()| true),
        Some(NicCommand::Filter(arguments)) => filter::run(arguments),
        None => placement::explain(&arguments.placement),
    }
}

fn current(tool: &mut Tool, nic: u32) -> Result<Offloads> {
    match tool.ask(Ask::Offloads { nic })? {
        Reply::Offloads(offloads) => Ok(*offloads),
        Reply::Failed { reason } => bail!("{reason}"),
        other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
    }
}

fn set(arguments: &SetArguments) -> Result<bool> {
    let mut tool = arguments.socket.connect()?;
    let nics: Vec<u32> = match arguments.nic {
        Some(nic) => vec![nic],
        None => (0..tool.statistics()?.nics.len() as u32).collect(),
    };
    for nic in nics {
        let mut offloads = current(&mut tool, nic)?;
        offloads.set_all(arguments.settings.iter().map(String::as_str)).map_err(|why| anyhow!("{why}"))?;
        match tool.ask(Ask::SetOffloads { nic, offloads: Box::new(offloads) })? {
            Reply::Done => {}
            Reply::Failed { reason } => bail!("{reason}"),
            other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
        }
    }
    Ok(true)
}

/// Counters of the offloads, with their meaning.
const FIGURES: [(Counter, &str); 35] = [
    (Counter::WireReceived, "frames from the wire"),
    (Counter::HostSent, "frames to the kernel"),
    (Counter::Interrupts, "interrupts (bursts to the kernel)"),
    (Counter::InterruptNanoseconds, "ns in the interrupts' first half"),
    (Counter::Doorbells, "doorbells rung for programs"),
    (Counter::DoorbellNanoseconds, "ns of ringing them"),
    (Counter::AgentDoorbells, "doorbells rung for the agent"),
    (Counter::BusyNanoseconds, "ns of the NIC's own polling that found work"),
    (Counter::SynPrioritized, "connection set-ups that the copy engine sent first"),
    (Counter::Made, "connections made by the NIC"),
    (Counter::SynCookies, "SYNs answered with a cookie"),
    (Counter::AcceptQueueFull, "SYNs dropped at a full accept queue"),
    (Counter::Segments, "segments processed by the NIC's TCP"),
    (Counter::Unpredicted, "of them in order, but not predicted"),
    (Counter::PeerFins, "connections given back since their peer's FIN had come"),
    (Counter::Dormant, "connections that are dormant now (idle, their state in few bytes)"),
    (Counter::Lent, "connections lent to the host's TCP (left their fast path)"),
    (Counter::TakenBack, "connections taken back from it"),
    (Counter::LentSegments, "segments given to the host's TCP"),
    (Counter::DatagramsReceived, "UDP datagrams received for programs"),
    (Counter::DatagramsSent, "UDP datagrams sent for programs"),
    (Counter::DatagramsDropped, "UDP datagrams dropped at a full socket"),
    (Counter::BadResolution, "frames of ARP and neighbour discovery that no host may use"),
    (Counter::Merged, "segments merged"),
    (Counter::Aggregates, "aggregates"),
    (Counter::Reordered, "segments put in order"),
    (Counter::Alone, "data segments that were not merged with others"),
    (Counter::Old, "segments with data that the kernel had, or large receive held"),
    (Counter::Gaps, "missing segments that were not waited for any longer"),
    (Counter::Unhoused, "segments that large receive had no room for"),
    (Counter::Cut, "large frames cut into segments"),
    (Counter::CutSegments, "segments cut from them"),
    (Counter::Uncut, "large frames refused"),
    (Counter::Exceeded, "commands beyond what was announced"),
    (Counter::TooBusy, "times that the processor was too busy for further connections"),
];

/// Of each worker: nanoseconds of rounds that found work, frames, connections, buckets that it has given to other
/// workers.
fn workers(workers: &[Vec<u64>]) -> impl Iterator<Item = [u64; 4]> + '_ {
    const FIGURES: [Counter; 4] = [Counter::BusyNanoseconds, Counter::WireReceived, Counter::Connections, Counter::Buckets];
    workers.iter().map(|counters| FIGURES.map(|figure| count(counters, figure)))
}

fn count(counters: &[u64], counter: Counter) -> u64 {
    counters.get(counter as usize).copied().unwrap_or(0)
}

/// The counters by the names that they have for Prometheus, as JSON.
fn named(counters: &[u64]) -> Value {
    metrics::by_name(counters).collect()
}

fn workers_in_json(all: &[Vec<u64>]) -> Value {
    workers(all).map(|[busy, frames, connections, buckets]| {
        json!({ "busy_seconds": busy as f64 / 1e9, "frames": frames, "connections": connections, "buckets_given": buckets })
    }).collect()
}

/// One NIC, as JSON.
fn nic_in_json(number: usize, nic: &NicStatistics) -> Value {
    let NicStatistics { process, devices, counters, workers, starved, hung, .. } = nic;
    json!({
        "nic": number, "process": process, "devices": devices, "counters": named(counters), "workers": workers_in_json(workers),
        "messages": nic_messages::to_json(counters), "large_receive": nic_receive::to_json(counters),
        "starved": starved, "hung": hung,
    })
}

fn show(arguments: &ShowArguments) -> Result<bool> {
    let mut tool = arguments.socket.connect()?;
    let offloads = current(&mut tool, arguments.nic.unwrap_or(0))?;
    let statistics = tool.statistics()?;
    let addresses = addresses::list(&mut tool)?;
    let one = arguments.nic.and_then(|nic| statistics.nics.get(nic as usize));
    let (counters, workers) = one.map_or((&statistics.counters, &statistics.workers), |one| (&one.counters, &one.workers));
    let mean = count(counters, Counter::AggregateBytes) as f64 / count(counters, Counter::Aggregates).max(1) as f64;
    if arguments.json {
        let settings: Value = offloads.list().into_iter().map(|(key, value)| (key.to_string(), Value::from(value))).collect();
        let nics = statistics.nics.iter().enumerate().filter(|(nic, _)| arguments.nic.is_none_or(|only| only as usize == *nic));
        let nics: Value = nics.map(|(number, nic)| nic_in_json(number, nic)).collect();
        let shown = json!({
            "settings": settings, "counters": named(counters), "mean_aggregate_bytes": mean,
            "workers": workers_in_json(workers), "nics": nics, "messages": nic_messages::to_json(counters), "addresses": addresses::to_json(&addresses),
            "too_full": statistics.full, "colder": statistics.colder, "dropped": statistics.dropped,
            "large_receive": nic_receive::to_json(counters),
        });
        println!("{shown}");
        return Ok(true);
    }
    for (key, value) in offloads.list() {
        println!("{key:<20} {value}");
    }
    println!();
    for (counter, what) in FIGURES {
        println!("{:>14}  {what}", count(counters, counter));
    }
    println!("{mean:>14.0}  bytes per aggregate, mean");
    let per_interrupt = count(counters, Counter::HostSent) as f64 / count(counters, Counter::Interrupts).max(1) as f64;
    println!("{per_interrupt:>14.1}  frames per interrupt, mean");
    let nics = statistics.nics.iter().enumerate().filter(|(nic, _)| arguments.nic.is_none_or(|only| only as usize == *nic));
    let [starved, hung] = nics.fold([0, 0], |[starved, hung], (_, nic)| [starved + nic.starved, hung + nic.hung]);
    println!("{starved:>14}  times that a worker wanted to run and got no processor");
    println!("{hung:>14}  NICs ended since they hung");
    println!("{:>14}  moves to the NIC that it was too full for", statistics.full);
    println!("{:>14}  connections returned from it since others carried more", statistics.colder);
    println!("{:>14}  connections reset since it was full or their route changed", statistics.dropped);
    nic_receive::print(counters);
    nic_messages::print(counters);
    if statistics.nics.len() > 1 {
        print_nics(&statistics, arguments.nic);
    } else if workers.len() > 1 {
        print_workers(workers);
    }
    addresses::print(&addresses);
    Ok(true)
}

fn print_workers(all: &[Vec<u64>]) {
    println!("\nworker   busy s   frames from the wire   connections on the NIC   buckets given away");
    for (worker, [busy, frames, connections, buckets]) in workers(all).enumerate() {
        println!("{worker:>6} {:>8.2} {frames:>22} {connections:>24} {buckets:>20}", busy as f64 / 1e9);
    }
}

/// A line for each NIC, or for the only one that is wanted.
fn print_nics(statistics: &Statistics, only: Option<u32>) {
    println!("\nnic  process   busy s   frames from the wire   connections   devices");
    for (number, nic) in statistics.nics.iter().enumerate() {
        if only.is_some_and(|only| only as usize != number) {
            continue;
        }
        let [busy, frames, connections] =
            [Counter::BusyNanoseconds, Counter::WireReceived, Counter::Connections].map(|figure| count(&nic.counters, figure));
        let devices = if nic.devices.is_empty() { "none".into() } else { nic.devices.join(" ") };
        let busy = busy as f64 / 1e9;
        println!("{number:>3} {:>8} {busy:>8.2} {frames:>22} {connections:>13}   {devices}", nic.process);
    }
}
