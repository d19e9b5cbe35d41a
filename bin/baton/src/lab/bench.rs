//! `baton bench`: one part of Baton measured against its bounds.

use super::all;
use crate::nics::{Chosen, PolicyArguments};
use crate::numbers::{MOST_SPIN, between, whole};
use anyhow::Result;
use baton_bed::temporary::ResultFile;
use baton_bed::testbed::TestbedSettings;
use baton_lab::compare::{self, CompareReport, CompareSettings, Way, WebClient, What};
use baton_lab::lro::LroSettings;
use baton_lab::smoltcp_server::{self, Service};
use baton_offloads::Offloads;
use baton_protocol::program::ClassInfo;
use clap::Subcommand;

/// Most rounds of a bench.
const MOST_ROUNDS: usize = 1000;

/// Examples of `baton bench`.
pub const EXAMPLES: &str = "Examples:
  baton bench all --page bench.html
  baton bench http --ways beside
  baton bench datapath --json

The exit status is 1 if a bound does not hold. What was measured, and on which machine: docs/figures.md.";

const COMPARE_EXAMPLES: &str = "Ways:
  beside    baton run, the NIC beside the kernel on the veth
  library   the same, the program written for the client library
  buffers   the same, sending from a buffer that the library does not copy
  inline    baton run, the NIC between the kernel's device and the wire; needs no right to load BPF programs
  attached  baton attach, with a map of sockets
  smoltcp   a program that contains smoltcp, on a TAP
  gain      as beside, with connections where they were measured to be better served (only if it is named, or with --choose gain)

Examples:
  baton bench rpc
  baton bench http --choose gain
  baton bench rpc --ways beside --rounds 9
  baton bench pingpong --ways inline,smoltcp --json      # as an ordinary user";

#[derive(Subcommand)]
pub enum Bench {
    /// Cost of a received segment on a wire in memory: packets/s, cycles, instructions by layer.
    #[command(after_help = "Examples:\n  baton bench datapath\n  baton bench datapath --json")]
    Datapath {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Instructions of a send and a receive in a program whose connection is on the NIC.
    #[command(after_help = "Examples:\n  baton bench bypass\n  baton bench bypass --json")]
    Bypass {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Cost of the NIC's filter per packet with 10 and with 10,000 rules, in instructions.
    #[command(after_help = "Examples:\n  baton bench filter\n  baton bench filter --json")]
    Filter {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Nanoseconds of an access of memory from each NUMA node to each, by a pointer chase, beside the distances that
    /// the firmware names (SLIT).
    #[command(after_help = "Examples:\n  baton bench memory\n  baton bench memory --json")]
    Memory {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Partial offload beside handoff and full offload: bulk transfers of a program over links that lose nothing, 0.1 %
    /// and 1 %: share of the segments on the fast path, goodput, the host's CPU.
    #[command(after_help = "Examples:\n  baton bench fastpath\n  baton bench fastpath --rounds 1 --megabytes 4")]
    Fastpath {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3, value_parser = whole(1, MOST_ROUNDS))]
        rounds: usize,
        /// Megabytes each way.
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
        megabytes: u32,
    },
    /// A web server (nginx, 256 bytes, 64 and 512 connections) in the kernel, under Baton on every way, in turn: rate,
    /// waiting times, all CPU time of a request. Asked by a client of the bench's own, then by wrk (64, 512, 1024).
    #[command(after_help = COMPARE_EXAMPLES)]
    Http {
        #[command(flatten)]
        how: Compare,
    },
    /// redis-server, the same: GET on 50 connections, one request at a time and 16.
    #[command(after_help = COMPARE_EXAMPLES)]
    Redis {
        #[command(flatten)]
        how: Compare,
    },
    /// One connection in bulk, the same and with smoltcp: into a program, and out of one.
    #[command(after_help = COMPARE_EXAMPLES)]
    Bulk {
        #[command(flatten)]
        how: Compare,
    },
    /// Messages of 64 bytes to a program that echoes them, the same, with smoltcp and with a program that is written
    /// for the client library: 64 and 1024 connections, one message at a time on each.
    #[command(after_help = COMPARE_EXAMPLES)]
    Rpc {
        #[command(flatten)]
        how: Compare,
    },
    /// A ping-pong of 64 bytes between two programs that never sleep, the same and with smoltcp. The NIC never sleeps
    /// either.
    #[command(after_help = COMPARE_EXAMPLES)]
    Pingpong {
        #[command(flatten)]
        how: Compare,
    },
    /// What one worker's TCP takes on a wire in memory: Gb/s in segments of 1448 bytes, segments/s of 64.
    #[command(after_help = "Examples:\n  baton bench wire\n  baton bench wire --rounds 9 --json")]
    Wire {
        #[command(flatten)]
        how: Rounds,
    },
    /// What a packet costs with a million connections over 1024, on a wire in memory, which takes 12 GB; and the memory
    /// of an idle connection.
    #[command(after_help = "Examples:\n  baton bench connections\n  baton bench connections --memory")]
    Connections {
        #[command(flatten)]
        how: Rounds,
        /// The memory alone.
        #[arg(long)]
        memory: bool,
    },
    /// Moves per second between kernel and NIC of connections under load, and how long one stands still for a move.
    #[command(after_help = "Examples:\n  baton bench moves\n  baton bench moves --moves 20000 --json")]
    Moves {
        #[command(flatten)]
        how: Rounds,
        /// Moves of a round.
        #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(100..))]
        moves: u64,
        #[command(flatten)]
        policy: PolicyArguments,
    },
    /// A NIC with room for 256 of 1024 connections, whose rates follow Zipf's law and change all at once: what it
    /// carries over what the hottest carry, and how many moves that takes.
    #[command(after_help = "Examples:\n  baton bench heat\n  baton bench heat --shifts 1")]
    Heat {
        /// Shifts of the rates, each seven seconds after the one before.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(0..=100))]
        shifts: u16,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Large receive in front of a veth that the kernel keeps (`baton nic attach`), over the veth alone: the receiver's
    /// CPU of a GB. And what a bulk connection that stays in the kernel gets beside a Baton, over without one.
    #[command(after_help = "Examples:\n  baton bench attach\n  baton bench attach --path tc")]
    Attach {
        #[command(flatten)]
        how: Rounds,
        /// Seconds of a round that are measured.
        #[arg(long, default_value_t = 2.0, value_parser = between(0.1, 3600.0))]
        seconds: f64,
        /// Where segments are taken: `xdp`, as on a card whose driver has it, or `tc`.
        #[arg(long, default_value = "xdp")]
        path: String,
    },
    /// All of these, one after the other: datapath, wire, rpc, pingpong, http, redis, bulk, moves, attach, connections.
    /// Takes about half an hour.
    #[command(after_help = "Examples:\n  baton bench all --page bench.html\n  baton bench all --rounds 1 --seconds 1")]
    All {
        #[command(flatten)]
        how: Compare,
        /// Write a page with all figures here (HTML).
        #[arg(long, value_name = "FILE")]
        page: Option<std::path::PathBuf>,
    },
    /// Large receive: throughput and the receiver's CPU, without aggregation, with Linux's GRO, with the NIC's. Takes
    /// about six minutes.
    #[command(
        after_help = "Examples:\n  baton bench lro\n  baton bench lro --connections 1,16 --reorder 0,1 --plot lro.svg\n  baton bench lro --verify 1"
    )]
    Lro {
        #[command(flatten)]
        how: LargeReceive,
    },
    /// Moderation of interrupts and of doorbells to programs: a ping-pong and a bulk transfer, off and adaptive in
    /// turn.
    #[command(after_help = "Examples:\n  baton bench moderation\n  baton bench moderation --rounds 1")]
    Moderation {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3, value_parser = whole(1, MOST_ROUNDS))]
        rounds: usize,
    },
    /// Messages (RMPP) of 1 MB, with nothing, receiving or both on the NIC in turn: host A's CPU, events, processor
    /// availability; and what asking early for the next packets gains on a link of 1 Gb/s with 100 us of round trip.
    #[command(after_help = "Examples:\n  baton bench rmpp\n  baton bench rmpp --mpi")]
    Rmpp {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Only what MPI programs get over RMPP, against Open MPI's TCP.
        #[arg(long)]
        mpi: bool,
    },
    /// Receive-side scaling: a thousand connections with weights by Zipf's law over four workers, with the static table
    /// and the balanced one in turn. The weights move to other connections from time to time.
    #[command(after_help = "Examples:\n  baton bench rss\n  baton bench rss --workers 2 --flows 100")]
    Rss {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Number of the NIC's workers.
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..=16))]
        workers: u8,
        /// Number of connections.
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=4000))]
        flows: u16,
        /// Zipf's exponent.
        #[arg(long, default_value_t = 1.0, value_parser = between(0.0, 10.0))]
        exponent: f64,
        /// How often the weights move to other connections, for each table.
        #[arg(long, default_value_t = 3, value_parser = whole(0, MOST_ROUNDS))]
        shifts: usize,
    },
    /// One connection over 1 Gb/s and 100 ms, on the NIC and in the kernel in turn. Takes about a minute.
    #[command(after_help = "Examples:\n  baton bench wan\n  baton bench wan --rounds 1 --seconds 10")]
    Wan {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3, value_parser = whole(1, MOST_ROUNDS))]
        rounds: usize,
        /// Seconds of each transfer.
        #[arg(long, default_value_t = 5.0, value_parser = between(0.1, 3600.0))]
        seconds: f64,
    },
    /// Longest waits of requests, and cost of short connections: a web server in the kernel and under Baton, in turn.
    /// Takes about three minutes.
    #[command(after_help = "Examples:\n  baton bench tail\n  baton bench tail --connections 64,512\n  baton bench tail --smoke")]
    Tail {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Numbers of connections to measure.
        #[arg(long, value_delimiter = ',', value_parser = whole(1, 4000))]
        connections: Vec<usize>,
        /// Pairs of rounds; the medians count.
        #[arg(long, default_value_t = 5, value_parser = whole(1, MOST_ROUNDS))]
        rounds: usize,
        /// Seconds of a round.
        #[arg(long, default_value_t = 3.0, value_parser = between(0.1, 3600.0))]
        seconds: f64,
        /// Run for a few seconds, and only look for errors.
        #[arg(long, conflicts_with_all = ["connections", "rounds", "seconds"])]
        smoke: bool,
    },
    /// Goodput over lossy links with the NIC's TCP as sender, and with the kernel's. Takes about a quarter of an hour.
    #[command(after_help = "Examples:\n  baton bench recovery\n  baton bench recovery --scale 0.1")]
    Recovery {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Length of every cell, as a share of what its losses need.
        #[arg(long, default_value_t = 1.0, value_parser = between(0.001, 100.0))]
        scale: f64,
    },
}

/// How a bench that compares ways of serving is run.
#[derive(clap::Args)]
pub struct Compare {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Rounds of each way; the medians count.
    #[arg(long, default_value_t = 5, value_parser = whole(1, MOST_ROUNDS))]
    pub rounds: usize,
    /// Seconds of a round that are measured.
    #[arg(long, default_value_t = 3.0, value_parser = between(0.1, 3600.0))]
    pub seconds: f64,
    /// Microseconds that the NIC polls without work before it sleeps.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(..=MOST_SPIN))]
    spin: u64,
    /// Ways that take turns with the kernel, where there is a server for them: beside, library, buffers, inline,
    /// attached, smoltcp, gain. Default: all but gain.
    #[arg(long, value_name = "WAY", value_delimiter = ',', value_parser = way)]
    ways: Vec<Way>,
    /// How it is chosen which connections are on the NIC. With `gain` the ways are beside and gain, if none is named,
    /// and the bounds are about gain: nowhere worse than the kernel, and nine tenths of what the NIC alone saves.
    #[arg(long, value_enum, value_name = "HOW")]
    choose: Option<Chosen>,
    /// Of web servers: the client that asks them. Default: both.
    #[arg(long, value_enum, value_name = "WHO")]
    client: Option<Asker>,
    /// Only the loads with so many connections. Default: all.
    #[arg(long, value_name = "N")]
    pub connections: Option<usize>,
    #[command(flatten)]
    policy: PolicyArguments,
}

/// Values of `--client`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Asker {
    /// The bench's own, which does as little as it can beside asking.
    Own,
    /// wrk (Debian's package of that name), with one thread.
    Wrk,
}

impl Asker {
    fn client(self) -> WebClient {
        match self {
            Asker::Own => WebClient::Own,
            Asker::Wrk => WebClient::Wrk,
        }
    }
}

/// A way by its name.
fn way(name: &str) -> Result<Way, String> {
    Way::ALL.into_iter().find(|way| way.name() == name).ok_or_else(|| {
        let names: Vec<&str> = Way::ALL.iter().map(|way| way.name()).collect();
        format!("the ways are {}", names.join(", "))
    })
}

impl Compare {
    /// Whether connections are placed by what is measured.
    pub fn chooses_gain(&self) -> bool {
        self.choose == Some(Chosen::Gain)
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways = self.ways.clone();
        if self.chooses_gain() {
            ways.extend([Way::Beside, Way::Gain].iter().filter(|way| **way == Way::Gain || self.ways.is_empty()));
        } else if ways.is_empty() {
            ways.extend(Way::ALL.iter().filter(|way| **way != Way::Gain));
        }
        ways
    }

    /// What NICs are set to do.
    pub fn offloads(&self) -> Offloads {
        self.policy.apply(Offloads::default())
    }

    /// Measures the loads of one bench.
    pub fn measure(&self, what: What) -> Result<CompareReport> {
        let bed = TestbedSettings { spin: self.spin, offloads: self.offloads(), ..TestbedSettings::default() };
        let (ways, client) = (self.ways(), self.client.map(Asker::client));
        let (rounds, seconds, connections) = (self.rounds, self.seconds, self.connections);
        let settings = CompareSettings { rounds, seconds, ways, client, connections, bed };
        compare::run(what, &settings, |row| eprint!("{}", compare::text(row)))
    }
}

/// How large receive is measured.
#[derive(clap::Args)]
pub struct LargeReceive {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Numbers of connections to measure.
    #[arg(long, value_delimiter = ',')]
    connections: Vec<usize>,
    /// Shares of segments that are held back for 200 us, in percent.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    reorder: Vec<f64>,
    /// Rounds; the median counts.
    #[arg(long, default_value_t = 3, value_parser = whole(1, MOST_ROUNDS))]
    rounds: usize,
    /// The NIC's workers. Several have queues of their own, among which a hash divides the connections. With several,
    /// or with --rate, there are no bounds.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    workers: u8,
    /// Most megabits per second that all connections together send, evenly. Without it: as fast as they can.
    #[arg(long, value_name = "MBITS")]
    rate: Option<f64>,
    /// Write the plot here (SVG).
    #[arg(long, value_name = "FILE")]
    plot: Option<std::path::PathBuf>,
    /// Instead, receive this many GB with reordering, and compare every byte.
    #[arg(long, value_name = "GB", value_parser = between(0.001, 1000.0), conflicts_with_all = ["connections", "reorder", "rounds", "workers", "rate", "plot"])]
    verify: Option<f64>,
}

impl LargeReceive {
    fn settings(&self) -> LroSettings {
        let mut settings =
            LroSettings { rounds: self.rounds, workers: self.workers.into(), rate: self.rate, ..LroSettings::default() };
        if !self.connections.is_empty() {
            settings.connections.clone_from(&self.connections);
        }
        if !self.reorder.is_empty() {
            settings.reorder.clone_from(&self.reorder);
        }
        settings
    }
}

/// Seconds that each load gets to be measured in both places: all of them together take less than twenty.
const LEARNING: f64 = 5.5;

/// `baton nic gain --measure`: what loads cost in both places of this machine.
pub fn measure_classes() -> Result<Vec<ClassInfo>> {
    baton_linux::namespace::become_root_if_needed()?;
    let bed = TestbedSettings { spin: 100, ..TestbedSettings::default() };
    compare::classes(&CompareSettings {
        rounds: 1,
        seconds: LEARNING,
        ways: vec![Way::Gain],
        client: None,
        connections: None,
        bed,
    })
}

/// How often a bench without a kernel's turn is run.
#[derive(clap::Args)]
pub struct Rounds {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Rounds; the median counts.
    #[arg(long, default_value_t = 3, value_parser = whole(1, MOST_ROUNDS))]
    rounds: usize,
}

fn compared(what: What, how: &Compare) -> Result<bool> {
    baton_linux::namespace::become_root_if_needed()?;
    let report = how.measure(what)?;
    Ok(print_bars(&report.bars, &report, how.json)? && report.is_whole())
}

/// `baton bench`. Returns whether all bounds are met.
pub fn run(what: &Bench) -> Result<bool> {
    match what {
        Bench::Http { how } => compared(What::Http, how),
        Bench::Redis { how } => compared(What::Redis, how),
        Bench::Bulk { how } => compared(What::Bulk, how),
        Bench::Rpc { how } => compared(What::Rpc, how),
        Bench::Pingpong { how } => compared(What::PingPong, how),
        Bench::Wire { how } => wire(how),
        Bench::Connections { how, memory } => {
            baton_linux::namespace::become_root_if_needed()?;
            if *memory {
                let report = baton_lab::connections::memory_alone()?;
                return print_bars(&report.bars, &report, how.json);
            }
            let report = baton_lab::connections::run(how.rounds)?;
            print_bars(&report.bars, &report, how.json)
        }
        Bench::Moves { how, moves, policy } => {
            baton_linux::namespace::become_root_if_needed()?;
            let (offloads, rounds) = (policy.apply(Offloads::default()), how.rounds as u64);
            let report = baton_lab::moves::run(*moves, rounds, offloads, |one| eprintln!("{}", baton_lab::moves::line(one)))?;
            print_bars(&report.bars, &report, how.json)
        }
        Bench::Heat { shifts, json } => heat(usize::from(*shifts), *json),
        Bench::Attach { how, seconds, path } => {
            baton_linux::namespace::become_root_if_needed()?;
            let report = baton_lab::front::run(how.rounds, *seconds, path, |line| eprintln!("{line}"))?;
            print_bars(&report.bars, &report, how.json)
        }
        Bench::All { how, page } => all::run(how, page.as_deref()),
        Bench::Recovery { json, scale } => {
            baton_linux::namespace::become_root_if_needed()?;
            let report = baton_lab::recovery::run(*scale, true)?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                println!("geometric mean of the ratios: {:.3}", report.geomean_ratio);
            }
            Ok(true)
        }
        Bench::Wan { json, rounds, seconds } => {
            baton_linux::namespace::become_root_if_needed()?;
            let settings = baton_lab::wan::WanSettings { seconds: *seconds, rounds: *rounds };
            let report = baton_lab::wan::run(&settings, |one| eprintln!("{}", baton_lab::wan::line(one)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Moderation { json, rounds } => {
            baton_linux::namespace::become_root_if_needed()?;
            let report = baton_lab::moderation::run(*rounds, |one| eprintln!("{}", baton_lab::moderation::line(one)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Rmpp { json, rounds, mpi } => {
            baton_linux::namespace::become_root_if_needed()?;
            let report = baton_lab::messages::bench(*rounds, *mpi, &|line| eprintln!("{line}"))?;
            Ok(print_bars(&report.bars, &report, *json)? && report.mismatches() == 0)
        }
        Bench::Rss { json, workers, flows, exponent, shifts } => {
            baton_linux::namespace::become_root_if_needed()?;
            let (workers, flows) = (usize::from(*workers), usize::from(*flows));
            let settings = baton_lab::rss::RssSettings { workers, flows, exponent: *exponent, shifts: *shifts };
            let report = baton_lab::rss::run(&settings, |one| eprintln!("{}", baton_lab::rss::line(one)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Tail { json, connections, rounds, seconds, smoke } => {
            baton_linux::namespace::become_root_if_needed()?;
            let mut settings = baton_lab::tail::TailSettings { rounds: *rounds, seconds: *seconds, ..Default::default() };
            if *smoke {
                settings = baton_lab::tail::TailSettings::smoke();
            } else if !connections.is_empty() {
                settings.connections.clone_from(connections);
            }
            let report = baton_lab::tail::run(&settings, |row| eprintln!("{}", baton_lab::tail::line(row)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Lro { how } => bench_lro(how),
        Bench::Bypass { json } => {
            let measured = baton_lab::bypass::run()?;
            if *json {
                println!("{}", serde_json::to_string(&measured)?);
            } else {
                println!("send of 64 bytes:    {:>6.1} instructions", measured.send);
                println!("receive of 64 bytes: {:>6.1} instructions", measured.receive);
            }
            Ok(true)
        }
        Bench::Fastpath { json, rounds, megabytes } => {
            let cells = baton_lab::fast_path::run(*megabytes, *rounds)?;
            if *json {
                println!("{}", serde_json::to_string(&cells)?);
                return Ok(true);
            }
            println!(
                "offload     loss %   Mb/s out    Mb/s in   host ns/KB   of that host's TCP   on the fast path   lent   back"
            );
            for cell in &cells {
                println!(
                    "{:<10} {:>7.1} {:>10.0} {:>10.0} {:>12.0} {:>20.0} {:>17.4} {:>6} {:>6}",
                    cell.offload,
                    cell.loss_percent,
                    cell.goodput_out,
                    cell.goodput_in,
                    cell.host_ns_per_kb,
                    cell.host_tcp_ns_per_kb,
                    cell.fast_path_share,
                    cell.lent,
                    cell.taken_back
                );
            }
            Ok(true)
        }
        Bench::Filter { json } => {
            let report = baton_lab::filter::run()?;
            for measured in report.measured.iter().filter(|_| !json) {
                let baton_lab::filter::Measured { rules, established, new } = measured;
                println!("{rules:>6} rules: {established:>6.1} instructions for a known flow, {new:>6.1} for a new one");
            }
            print_bars(&report.bars, &report, *json)
        }
        Bench::Memory { json } => memory(*json),
        Bench::Datapath { json } => {
            let report = baton_lab::datapath::run()?;
            if *json {
                println!("{}", serde_json::to_string(&report)?);
                return Ok(true);
            }
            for measured in &report.workloads {
                let w = measured.workload;
                println!(
                    "{:>5} connections, {:>4} B, bursts of {:>2}: {:>6.0} instructions, {:>6.0} cycles, {:.2} Mpackets/s",
                    w.connections,
                    w.size,
                    w.burst,
                    measured.instructions_per_packet,
                    measured.cycles_per_packet,
                    measured.packets_per_second / 1e6
                );
                for (layer, instructions) in &measured.layers {
                    println!("      {layer:<16} {instructions:>7.1}");
                }
            }
            Ok(true)
        }
    }
}

fn bench_lro(how: &LargeReceive) -> Result<bool> {
    let settings = how.settings();
    settings.check()?;
    baton_linux::namespace::become_root_if_needed()?;
    if let Some(gigabytes) = how.verify {
        return verify_lro(gigabytes, how.json);
    }
    let plot = how.plot.as_deref().map(ResultFile::open).transpose()?;
    let report = baton_lab::lro::run(&settings, |cell| eprintln!("{}", baton_lab::lro::line(cell)))?;
    if let Some(plot) = plot {
        plot.write(baton_lab::lro::plot(&report)?.as_bytes())?;
    }
    print_bars(&report.bars, &report, how.json)
}

fn wire(how: &Rounds) -> Result<bool> {
    let report = baton_lab::wire::run(how.rounds)?;
    print_bars(&report.bars, &report, how.json)
}

fn heat(shifts: usize, json: bool) -> Result<bool> {
    baton_linux::namespace::become_root_if_needed()?;
    let report = baton_lab::heat::run(shifts)?;
    print_bars(&report.bars, &report, json)
}

/// Prints a bench's report, or its bounds. Returns whether all are met.
pub fn print_bars(bars: &[baton_lab::bars::Bar], report: &impl serde::Serialize, json: bool) -> Result<bool> {
    if json {
        println!("{}", serde_json::to_string(report)?);
    } else {
        for bar in bars {
            println!("{:<32} {:>10.3}  (bound {})", bar.name, bar.value, bar.bound);
        }
    }
    Ok(bars.iter().all(|bar| bar.holds))
}

fn verify_lro(gigabytes: f64, json: bool) -> Result<bool> {
    let bytes = (gigabytes * 1e9) as u64;
    let mismatches = baton_lab::lro::verify(bytes)?;
    if json {
        println!("{}", serde_json::json!({ "bytes": bytes, "mismatches": mismatches }));
    } else {
        println!("{gigabytes} GB received, {mismatches} bytes differ");
    }
    Ok(mismatches == 0)
}

/// What benches and the demonstration run as processes of their own: workloads whose instructions are counted, and a
/// server.
#[derive(Subcommand)]
pub enum Workload {
    #[command(hide = true, name = "bench-workload")]
    Datapath {
        #[arg(long)]
        connections: u32,
        #[arg(long)]
        size: u32,
        #[arg(long)]
        burst: u32,
        #[arg(long)]
        segments: u64,
    },
    #[command(hide = true, name = "bench-filter-workload")]
    Filter {
        #[arg(long)]
        rules: u32,
        #[arg(long)]
        new: bool,
        #[arg(long)]
        segments: u64,
    },
    #[command(hide = true, name = "bench-bypass-workload")]
    Bypass {
        #[arg(long)]
        messages: u64,
        #[arg(long)]
        port: u16,
    },
    #[command(hide = true, name = "bench-host-workload")]
    Host {
        #[arg(long)]
        host: usize,
        #[arg(long)]
        nic: usize,
        #[arg(long)]
        packets: u64,
    },
    #[command(hide = true, name = "serve-echo")]
    ServeEcho {
        address: std::net::SocketAddr,
        /// Never sleep.
        #[arg(long)]
        spin: bool,
        /// Offer the processor to others instead.
        #[arg(long, requires = "spin")]
        shares: bool,
        /// By the client library, with the agent that listens at this path.
        #[arg(long, conflicts_with = "spin")]
        ring: Option<std::path::PathBuf>,
    },
    #[command(hide = true, name = "serve-source")]
    ServeSource {
        address: std::net::SocketAddr,
        /// The agent listens at this path.
        #[arg(long)]
        ring: std::path::PathBuf,
        /// From a buffer.
        #[arg(long)]
        buffers: bool,
    },
    #[command(hide = true, name = "serve-plan")]
    ServePlan { address: std::net::SocketAddr },
    #[command(hide = true, name = "serve-smoltcp")]
    ServeSmoltcp {
        address: std::net::SocketAddrV4,
        /// Connections at once.
        #[arg(long)]
        connections: usize,
        /// Take what comes, and send nothing.
        #[arg(long)]
        sink: bool,
        /// Connect here, and send.
        #[arg(long, conflicts_with = "sink")]
        source: Option<std::net::SocketAddrV4>,
        /// Never sleep.
        #[arg(long)]
        spin: bool,
    },
}

fn memory(json: bool) -> Result<bool> {
    let costs = baton_lab::memory_cost::measure()?;
    if json {
        println!("{}", serde_json::to_string(&costs)?);
    } else {
        print!("{}", costs.table());
    }
    Ok(true)
}

/// Runs one of them.
pub fn workload(what: &Workload) -> Result<bool> {
    match what {
        &Workload::Datapath { connections, size, burst, segments } => {
            let workload = baton_lab::datapath::Workload { connections, size, burst };
            baton_lab::datapath::run_workload(workload, segments).map(|_| true)
        }
        &Workload::Filter { rules, new, segments } => baton_lab::filter::workload(rules, new, segments).map(|()| true),
        &Workload::Host { host, nic, packets } => baton_lab::papers::handoff::workload(host, nic, packets).map(|()| true),
        &Workload::Bypass { messages, port } => baton_lab::bypass::workload(messages, port).map(|()| true),
        Workload::ServeEcho { address, ring: Some(agent), .. } => baton_lab::echo::run_on_ring(*address, agent).map(|()| true),
        Workload::ServeEcho { address, spin, shares, .. } => baton_lab::echo::run(*address, *spin, *shares).map(|()| true),
        Workload::ServeSource { address, ring, buffers } => baton_lab::source::run(*address, ring, *buffers).map(|()| true),
        &Workload::ServePlan { address } => baton_lab::planner::serve(address).map(|()| true),
        &Workload::ServeSmoltcp { address, connections, sink, source, spin } => {
            let service = match source {
                Some(to) => Service::Source(to),
                None if sink => Service::Sink,
                None => Service::Echo,
            };
            smoltcp_server::run(address, service, connections, spin).map(|()| true)
        }
    }
}
