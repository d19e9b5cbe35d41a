//! `baton soak`: connections that move at random moments through a faulty link, every byte checked.

use crate::nics::PolicyArguments;
use crate::numbers::between;
use anyhow::Result;
use baton_bed::testbed::TestbedSettings;
use baton_lab::messages::{self, Conditions, Offload};
use baton_lab::soak::{self, SoakSettings};
use baton_protocol::nic::LinkSettings;
use clap::Args;

#[derive(Args)]
pub struct SoakArguments {
    /// Connections between the two hosts.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4000))]
    connections: u32,
    #[command(flatten)]
    workers: crate::bed::workers::WorkerArguments,
    /// Moves to make; an offload and a restore count as two.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    moves: u64,
    /// Seed of every random choice.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Frames lost each way, in percent.
    #[arg(long, default_value_t = 0.0, value_parser = percent)]
    loss: f64,
    /// Frames held back each way, in percent.
    #[arg(long, default_value_t = 0.0, value_parser = percent)]
    reorder: f64,
    /// Frames duplicated each way, in percent.
    #[arg(long, default_value_t = 0.0, value_parser = percent)]
    duplicate: f64,
    /// Frames corrupted each way, in percent.
    #[arg(long, default_value_t = 0.0, value_parser = percent)]
    corrupt: f64,
    /// One-way delay in milliseconds.
    #[arg(long, default_value_t = 0.0, value_parser = between(0.0, 10_000.0))]
    delay: f64,
    /// Use IPv6.
    #[arg(long)]
    ipv6: bool,
    /// Kill the NIC this many times, at random moments.
    #[arg(long, default_value_t = 0)]
    kill_nic: u32,
    /// Kill the agent, and with it the NIC, this many times, at random moments.
    #[arg(long, default_value_t = 0)]
    kill_agent: u32,
    /// Take the link down this many times, at random moments and for up to a second: at host A, which has no route
    /// then, or at host B.
    #[arg(long, default_value_t = 0, conflicts_with_all = ["rmpp", "stop_nic", "poison"])]
    link_down: u32,
    /// Stop the NIC for good (SIGSTOP) this many times, at random moments. All faults are 4 s apart then, and the
    /// report says how long connections carried nothing, and how many of those that are wanted on the NIC are there 3 s
    /// later.
    #[arg(long, default_value_t = 0, conflicts_with = "rmpp")]
    stop_nic: u32,
    /// Instead of random moves: all connections are wanted on the NIC, which crashes whenever the first one is there.
    #[arg(long, conflicts_with_all = ["rmpp", "stop_nic", "kill_nic", "kill_agent", "nics"])]
    poison: bool,
    /// MTU of the link, 576 to 9000.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=9000))]
    mtu: u32,
    /// What the NIC has of the connections: handoff (all) or fast-path (data in order and acknowledgements; the host's
    /// TCP has the rest).
    #[arg(long, value_enum, default_value_t = Offloading::Handoff, value_name = "WHAT", conflicts_with_all = ["workers", "one_queue", "rmpp"])]
    offload: Offloading,
    /// With --offload fast-path: go on until so many times a connection has left its fast path or come back to it.
    #[arg(long, default_value_t = 0)]
    transitions: u64,
    // With --peer-fin the peers send their FINs first in the end, and the program reads all ends and goes on to send.
    #[command(flatten)]
    policy: PolicyArguments,
    /// Put the NIC beside the kernel, on host A's interface, instead of between kernel and wire. The link is not
    /// impaired then.
    #[arg(long, conflicts_with_all = ["workers", "one_queue", "copy_engine", "loss", "reorder", "duplicate", "corrupt", "delay"])]
    beside: bool,
    /// With --beside: number of NICs. Connections move between them, too, and each death is one NIC's.
    #[arg(long, default_value_t = 1, requires = "beside", conflicts_with = "rmpp", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    nics: u8,
    /// Give host A a firewall that drops what its connection tracker finds invalid.
    #[arg(long)]
    firewall: bool,
    /// Send messages (RMPP) of random sizes both ways instead, with both halves of their data path on the NIC.
    #[arg(long, conflicts_with_all = ["connections", "moves", "during_moves", "peer_fin", "firewall"])]
    rmpp: bool,
    /// With --rmpp: messages, both directions together.
    #[arg(long, default_value_t = 10_000, requires = "rmpp", value_parser = clap::value_parser!(u64).range(2..))]
    messages: u64,
    /// With --rmpp: let the NIC match messages with receives, with room for so many posted ones.
    #[arg(long, default_value_t = 0, requires = "rmpp", value_parser = clap::value_parser!(u16).range(0..=16384))]
    match_on_nic: u16,
    /// With --rmpp: start the peer anew this many times, in the middle of its messages.
    #[arg(long, default_value_t = 0, requires = "rmpp", value_parser = clap::value_parser!(u32).range(0..=100))]
    restart_peer: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Values of `--offload`.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Offloading {
    Handoff,
    FastPath,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=100.0).contains(&value) => Ok(value),
        _ => Err("write a percentage from 0 to 100".into()),
    }
}

fn ppm(percent: f64) -> u32 {
    (percent * 10_000.0).round() as u32
}

/// Firewall rules that drop what the connection tracker finds invalid, as many hosts have them.
const STATEFUL_RULES: &str =
    "table inet filter { chain input { type filter hook input priority 0; policy accept; ct state invalid drop; }
  chain output { type filter hook output priority 0; policy accept; ct state invalid drop; }
}\n";

/// `baton soak --rmpp`. Returns whether every message came, right, once and in order, and nothing was left over.
fn run_messages(arguments: &SoakArguments, bed: &TestbedSettings) -> Result<bool> {
    // Room for all packets that may be cleared.
    let link = LinkSettings { buffer: 8 << 20, ..bed.link };
    let link = if link.loss + link.reorder + link.duplicate + link.corrupt > 0 || link.delay > 0 {
        link
    } else {
        LinkSettings::default()
    };
    let mtu = u16::try_from(arguments.mtu)?;
    let conditions = Conditions {
        offload: Offload::Both,
        mtu,
        link,
        seed: arguments.seed,
        posted_on_nic: arguments.match_on_nic,
        ipv6: arguments.ipv6,
        beside: arguments.beside,
        workers: bed.workers,
        card: bed.card,
        copy_engine: bed.copy_engine,
        ..Conditions::plain()
    };
    let settings = messages::SoakSettings {
        conditions,
        messages: arguments.messages,
        kill_nic: arguments.kill_nic,
        kill_agent: arguments.kill_agent,
        restart_peer: arguments.restart_peer,
    };
    let report = messages::soak(&settings)?;
    let text = if arguments.json { serde_json::to_string(&report)? } else { serde_json::to_string_pretty(&report)? };
    println!("{text}");
    Ok(report.is_clean(&settings))
}

/// `baton soak`. Returns whether every byte was right and no connection broke.
pub fn run(arguments: &SoakArguments) -> Result<bool> {
    let delay = (arguments.delay * 1000.0) as u64;
    let link = LinkSettings {
        delay,
        loss: ppm(arguments.loss),
        reorder: ppm(arguments.reorder),
        hold: (delay / 2).max(200),
        duplicate: ppm(arguments.duplicate),
        corrupt: ppm(arguments.corrupt),
        seed: arguments.seed,
        ..LinkSettings::default()
    };
    let impaired = arguments.delay + arguments.loss + arguments.reorder + arguments.duplicate + arguments.corrupt > 0.0;
    let mut bed = TestbedSettings {
        mtu: arguments.mtu,
        link: if impaired { link } else { LinkSettings { seed: arguments.seed, ..LinkSettings::default() } },
        seed: arguments.seed,
        beside: arguments.beside,
        nics: arguments.nics.into(),
        firewall: arguments.firewall.then(|| STATEFUL_RULES.into()),
        ..TestbedSettings::default()
    };
    arguments.workers.apply(&mut bed);
    bed.offloads = arguments.policy.apply(bed.offloads);
    if arguments.rmpp {
        return run_messages(arguments, &bed);
    }
    let settings = SoakSettings {
        connections: arguments.connections as usize,
        moves: arguments.moves,
        at_once: 8,
        seed: arguments.seed,
        ipv6: arguments.ipv6,
        fast_path: arguments.offload == Offloading::FastPath,
        transitions: arguments.transitions,
        kill_nic: arguments.kill_nic,
        kill_agent: arguments.kill_agent,
        link_down: arguments.link_down,
        stop_nic: arguments.stop_nic,
        half_closes: arguments.policy.has_peer_fin(),
        poison: arguments.poison,
        bed,
        progress: !arguments.json,
    };
    let report = soak::run(&settings)?;
    if arguments.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(report.is_clean())
}
