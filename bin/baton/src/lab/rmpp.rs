//! `baton rmpp`: messages between two hosts, measured.

use anyhow::Result;
use baton_bed::testbed::TestbedSettings;
use baton_lab::messages::{self, Conditions, Offload};
use baton_protocol::nic::LinkSettings;
use clap::{Args, Subcommand, ValueEnum};

pub const EXAMPLES: &str = "Examples:
  baton rmpp pingpong --offload both
  baton rmpp pingpong --offload both --match-on-nic 256
  baton rmpp pingpong --offload both --beside
  baton rmpp pingpong --offload both --encapsulation ethernet
  baton rmpp pingpong --offload none --coalesce --sizes 1000,1000000 --json
  baton rmpp availability --offload both --size 100000 --intervals 10,100,1000
  baton rmpp pingpong --offload both --rate 1000 --rtt 100 --rsm-lead 8 --sizes 1000000";

#[derive(Subcommand)]
pub enum Rmpp {
    /// Half a round trip of messages of each size: shortest, mean, longest.
    #[command(after_help = EXAMPLES)]
    Pingpong {
        #[command(flatten)]
        conditions: ConditionArguments,
        /// Sizes of messages in bytes.
        #[arg(long, value_delimiter = ',', default_values_t = SIZES, value_parser = clap::value_parser!(u64).range(0..=MOST))]
        sizes: Vec<u64>,
        /// Round trips of each size.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Print one JSON object per size.
        #[arg(long)]
        json: bool,
    },
    /// How much of its processor a program has that works while messages are on their way, by the interval in which it
    /// looks for their completion.
    #[command(after_help = EXAMPLES)]
    Availability {
        #[command(flatten)]
        conditions: ConditionArguments,
        /// Bytes of a message.
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=MOST))]
        size: u64,
        /// Microseconds of work between two polls.
        #[arg(long, value_delimiter = ',', default_values_t = INTERVALS, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        intervals: Vec<u64>,
        /// Messages to and fro at each interval.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Print one JSON object per interval.
        #[arg(long)]
        json: bool,
    },
}

const INTERVALS: [u64; 6] = [10, 100, 300, 1000, 3000, 10_000];

/// Largest message: its buffers lie in session memory.
const MOST: u64 = 64 << 20;

const SIZES: [u64; 9] = [0, 100, 1000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 4_000_000];

#[derive(Clone, Copy, ValueEnum)]
enum OffloadArgument {
    /// Both halves in the program.
    None,
    /// The receiving half on the NIC.
    Receive,
    /// Both halves on the NIC.
    Both,
}

#[derive(Clone, Copy, ValueEnum)]
enum EncapsulationArgument {
    /// UDP over IPv4, or IPv6 with --ipv6.
    Udp,
    /// Raw Ethernet frames of a type of their own. The NIC must be between kernel and wire.
    Ethernet,
}

#[derive(Args)]
pub struct ConditionArguments {
    /// What the NIC does.
    #[arg(long, default_value = "both")]
    offload: OffloadArgument,
    /// Packets before the last cleared one that the sender asks for the next CTS.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=15))]
    rsm_lead: u8,
    /// MTU of both hosts.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u16).range(576..=9000))]
    mtu: u16,
    /// Interrupt coalescing, of frames to the kernel and of doorbells to the program.
    #[arg(long)]
    coalesce: bool,
    /// Rate of the link in Mb/s; 0 for no limit.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    rate: u64,
    /// Round-trip time of the link in microseconds.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=20_000_000))]
    rtt: u64,
    /// Let the NIC match messages with receives: with room for so many posted ones.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=16384))]
    match_on_nic: u16,
    /// Over IPv6 instead of IPv4.
    #[arg(long)]
    ipv6: bool,
    /// What carries the packets.
    #[arg(long, default_value = "udp")]
    encapsulation: EncapsulationArgument,
    /// Put the NIC beside the kernel, on host A's interface. The link has neither rate nor delay then.
    #[arg(long, conflicts_with_all = ["rate", "rtt", "workers", "one_queue", "copy_engine"])]
    beside: bool,
    #[command(flatten)]
    workers: crate::bed::workers::WorkerArguments,
}

impl ConditionArguments {
    fn conditions(&self) -> Conditions {
        let offload = match self.offload {
            OffloadArgument::None => Offload::None,
            OffloadArgument::Receive => Offload::Receive,
            OffloadArgument::Both => Offload::Both,
        };
        // Room for all packets that may be cleared.
        let link = LinkSettings { rate: self.rate * 1_000_000, delay: self.rtt / 2, buffer: 8 << 20, ..LinkSettings::default() };
        let link = if self.rate + self.rtt > 0 { link } else { LinkSettings::default() };
        let mut bed = TestbedSettings::default();
        self.workers.apply(&mut bed);
        Conditions {
            offload,
            lead: self.rsm_lead,
            mtu: self.mtu,
            coalesce: self.coalesce,
            link,
            posted_on_nic: self.match_on_nic,
            ipv6: self.ipv6,
            ethernet: matches!(self.encapsulation, EncapsulationArgument::Ethernet),
            beside: self.beside,
            workers: bed.workers,
            card: bed.card,
            copy_engine: bed.copy_engine,
            ..Conditions::plain()
        }
    }
}

/// `baton rmpp`. Returns whether every byte was right.
pub fn run(command: &Rmpp) -> Result<bool> {
    match command {
        Rmpp::Pingpong { conditions, sizes, rounds, json } => ping_pong(&conditions.conditions(), sizes, *rounds, *json),
        Rmpp::Availability { conditions, size, intervals, rounds, json } => {
            availability(&conditions.conditions(), *size, intervals, *rounds, *json)
        }
    }
}

fn availability(conditions: &Conditions, size: u64, intervals: &[u64], rounds: u32, json: bool) -> Result<bool> {
    if !json {
        println!(
            "{:>11} {:>8} {:>12} {:>10} {:>10} {:>8} {:>7}",
            "interval us", "MB/s", "availability", "host ms/MB", "NIC ms/MB", "events/p", "copies"
        );
    }
    for interval in intervals {
        let r = messages::availability(conditions, size, *interval, rounds)?;
        if json {
            println!("{}", serde_json::to_string(&r)?);
            continue;
        }
        println!(
            "{:>11} {:>8.1} {:>12.3} {:>10.3} {:>10.3} {:>8.3} {:>7.2}",
            r.interval_us,
            r.megabytes,
            r.availability,
            r.host_cpu_ms_per_mb,
            r.nic_cpu_ms_per_mb,
            r.events_per_packet,
            r.copies_per_byte
        );
    }
    Ok(true)
}

fn ping_pong(conditions: &Conditions, sizes: &[u64], rounds: u32, json: bool) -> Result<bool> {
    let mut clean = true;
    if !json {
        println!(
            "{:>9} {:>9} {:>9} {:>9} {:>8}  {:>9} {:>8} {:>8} {:>7} {:>7}",
            "bytes", "min us", "mean us", "max us", "Mb/s", "host ms/MB", "NIC", "events/p", "irqs/p", "copies"
        );
    }
    for size in sizes {
        let r = messages::ping_pong(conditions, *size, rounds)?;
        clean &= r.mismatches == 0;
        if json {
            println!("{}", serde_json::to_string(&r)?);
            continue;
        }
        println!(
            "{:>9} {:>9.1} {:>9.1} {:>9.1} {:>8.1}  {:>9.3} {:>8.3} {:>8.3} {:>7.3} {:>7.2}",
            r.size,
            r.min_us,
            r.mean_us,
            r.max_us,
            r.megabits,
            r.host_cpu_ms_per_mb,
            r.nic_cpu_ms_per_mb,
            r.events_per_packet,
            r.interrupts_per_packet,
            r.copies_per_byte
        );
    }
    Ok(clean)
}
