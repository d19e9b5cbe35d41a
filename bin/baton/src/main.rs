//! `baton`: moves established TCP connections between the kernel and an offload engine.
#![forbid(unsafe_code)]

mod attach;
mod doctor;
mod hosts;
mod lab;
mod nic;
mod placement;
mod run;
mod start;
mod tools;
mod up;
mod workers;

use anyhow::{Context, Result};
use baton_control::LinkSettings;
use baton_lab::soak::{self, SoakSettings};
use baton_lab::testbed::TestbedSettings;
use clap::{Args, Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(version, about = "Moves established TCP connections of unmodified Linux programs out of the kernel and back.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Moves random connections at random moments under load, and checks every byte.
    #[command(
        after_help = "Examples:\n  baton soak --connections 64 --moves 10000 --json\n  baton soak --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --delay 5 --ipv6\n  baton soak --kill-nic 20"
    )]
    Soak(SoakArguments),
    /// Shows how connections of a server move to the NIC and back, and measures kernel and NIC.
    Demo {
        /// Directory of the report.
        #[arg(long, default_value = "target/demo")]
        output: std::path::PathBuf,
    },
    /// Starts a Baton that stays, for the programs of every network namespace on this machine.
    #[command(after_help = up::EXAMPLES)]
    Up(up::UpArguments),
    /// Makes two hosts (network namespaces) with a link and Baton on the first, and runs a program there.
    #[command(
        after_help = "Examples:\n  baton hosts -- ./my-server\n  baton hosts --peer 'sleep 1; curl http://$BATON_A:8080/' -- ./my-server --port 8080\n\nThe program finds the agent through BATON_SOCKET (libbaton does so by itself)."
    )]
    Hosts(hosts::HostsArguments),
    /// Runs a program whose connections go to the NIC when they are worth it.
    #[command(after_help = run::EXAMPLES)]
    Run(run::RunArguments),
    /// Offloads the connections of a program that runs already, until it is detached.
    #[command(after_help = attach::EXAMPLES)]
    Attach(attach::AttachArguments),
    /// Ends `baton attach` for a program; all its connections are in the kernel afterwards.
    #[command(after_help = "Examples:\n  baton detach 4711\n  baton detach --port 6379")]
    Detach(attach::DetachArguments),
    /// Lists the connections of a running Baton: where each is, how often it moved, and why it stays.
    #[command(after_help = "Examples:\n  baton ls\n  baton ls --json | jq '.[] | select(.place == \"nic\")'")]
    Ls(tools::ListArguments),
    /// Moves connections of a running Baton: your own, or any as root.
    #[command(after_help = "Examples:\n  baton move nic all\n  baton move kernel :8080\n  baton move nic 0.3 10.0.0.2:4711")]
    Move(tools::MoveArguments),
    /// Shows and changes what the NIC of a running Baton does for the kernel's own connections, and which processors its workers
    /// run on.
    #[command(after_help = nic::EXAMPLES)]
    Nic(nic::NicArguments),
    /// Checks what this machine can do for Baton, and says what to do where something is missing.
    #[command(after_help = "Examples:\n  baton doctor\n  baton doctor --json\n  baton doctor --cleanup")]
    Doctor(doctor::DoctorArguments),
    /// Measures one part, and compares it with its bounds.
    #[command(subcommand)]
    Bench(Bench),
    /// Measures TCP throughput over kernel sockets, and its costs: frames, interrupts, their halves, cycles.
    #[command(subcommand, after_help = lab::NTTTCP_EXAMPLES)]
    Ntttcp(lab::Ntttcp),
    /// Repeats calculations of the papers behind Baton.
    #[command(subcommand)]
    Lab(lab::Lab),
    /// Prints what a move does to every socket option, as Markdown.
    Options,
    #[command(hide = true)]
    BenchWorkload {
        #[arg(long)]
        connections: u32,
        #[arg(long)]
        size: u32,
        #[arg(long)]
        burst: u32,
        #[arg(long)]
        segments: u64,
    },
    #[command(hide = true)]
    BenchBypassWorkload {
        #[arg(long)]
        messages: u64,
        #[arg(long)]
        port: u16,
    },
    /// The processes of a running Baton, which start each other.
    #[command(hide = true)]
    KeeperProcess,
    #[command(hide = true)]
    AgentProcess,
    #[command(hide = true)]
    NicProcess,
}

#[derive(Subcommand)]
enum Bench {
    /// Cost of a received segment on a wire in memory: packets/s, cycles, instructions by layer.
    Datapath {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Instructions of a send and a receive in a program whose connection is on the NIC.
    Bypass {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Large receive: throughput and the receiver's CPU, without aggregation, with Linux's GRO, with the NIC's. Takes about six
    /// minutes.
    Lro {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Numbers of connections to measure.
        #[arg(long, value_delimiter = ',')]
        connections: Vec<usize>,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Write the plot here (SVG).
        #[arg(long, value_name = "FILE")]
        plot: Option<std::path::PathBuf>,
        /// Instead, receive this many GB with reordering, and compare every byte.
        #[arg(long, value_name = "GB", conflicts_with_all = ["connections", "rounds", "plot"])]
        verify: Option<f64>,
    },
    /// Moderation of interrupts and of doorbells to programs: a ping-pong and a bulk transfer, off and adaptive in turn.
    Moderation {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Receive-side scaling: a thousand connections with weights by Zipf's law over four workers, with the static table and the
    /// balanced one in turn. The weights move to other connections from time to time.
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
        #[arg(long, default_value_t = 1.0)]
        exponent: f64,
        /// How often the weights move to other connections, for each table.
        #[arg(long, default_value_t = 3)]
        shifts: usize,
    },
    /// One connection over 1 Gb/s and 100 ms, on the NIC and in the kernel in turn. Takes about a minute.
    Wan {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Rounds; the median counts.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Seconds of each transfer.
        #[arg(long, default_value_t = 5.0)]
        seconds: f64,
    },
    /// Longest waits of requests, and cost of short connections: a web server in the kernel and under Baton, in turn. Takes
    /// about three minutes.
    Tail {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Numbers of connections to measure.
        #[arg(long, value_delimiter = ',')]
        connections: Vec<usize>,
        /// Pairs of rounds; the medians count.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Seconds of a round.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
        /// Run for a few seconds, and only look for errors.
        #[arg(long, conflicts_with_all = ["connections", "rounds", "seconds"])]
        smoke: bool,
    },
    /// Goodput over lossy links with the NIC's TCP as sender, and with the kernel's. Takes about a quarter of an hour.
    Recovery {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Length of every cell, as a share of what its losses need.
        #[arg(long, default_value_t = 1.0)]
        scale: f64,
    },
}

fn bench(what: &Bench) -> Result<bool> {
    match what {
        Bench::Recovery { json, scale } => {
            baton_kernel::namespace::become_root_if_needed()?;
            let report = baton_lab::recovery::run(*scale, true)?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                println!("geometric mean of the ratios: {:.3}", report.geomean_ratio);
            }
            Ok(true)
        }
        Bench::Wan { json, rounds, seconds } => {
            baton_kernel::namespace::become_root_if_needed()?;
            let settings = baton_lab::wan::WanSettings { seconds: *seconds, rounds: *rounds };
            let report = baton_lab::wan::run(&settings, |one| eprintln!("{}", baton_lab::wan::line(one)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Moderation { json, rounds } => {
            baton_kernel::namespace::become_root_if_needed()?;
            let report = baton_lab::moderation::run(*rounds, |one| eprintln!("{}", baton_lab::moderation::line(one)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Rss { json, workers, flows, exponent, shifts } => {
            baton_kernel::namespace::become_root_if_needed()?;
            let (workers, flows) = (usize::from(*workers), usize::from(*flows));
            let settings = baton_lab::rss::RssSettings { workers, flows, exponent: *exponent, shifts: *shifts };
            let report = baton_lab::rss::run(&settings, |one| eprintln!("{}", baton_lab::rss::line(one)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Tail { json, connections, rounds, seconds, smoke } => {
            baton_kernel::namespace::become_root_if_needed()?;
            let mut settings = baton_lab::tail::TailSettings { rounds: *rounds, seconds: *seconds, ..Default::default() };
            if *smoke {
                settings = baton_lab::tail::TailSettings::smoke();
            } else if !connections.is_empty() {
                settings.connections.clone_from(connections);
            }
            let report = baton_lab::tail::run(&settings, |row| eprintln!("{}", baton_lab::tail::line(row)))?;
            print_bars(&report.bars, &report, *json)
        }
        Bench::Lro { json, connections, rounds, plot, verify } => {
            baton_kernel::namespace::become_root_if_needed()?;
            match verify {
                Some(gigabytes) => verify_lro(*gigabytes, *json),
                None => bench_lro(connections, *rounds, plot.as_deref(), *json),
            }
        }
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

fn bench_lro(connections: &[usize], rounds: usize, plot: Option<&std::path::Path>, json: bool) -> Result<bool> {
    let mut settings = baton_lab::lro::LroSettings { rounds, ..Default::default() };
    if !connections.is_empty() {
        settings.connections = connections.to_vec();
    }
    let report = baton_lab::lro::run(&settings, |cell| eprintln!("{}", baton_lab::lro::line(cell)))?;
    if let Some(path) = plot {
        std::fs::write(path, baton_lab::lro::plot(&report)?).with_context(|| format!("writing {}", path.display()))?;
    }
    print_bars(&report.bars, &report, json)
}

/// Prints a bench's report, or its bounds. Returns whether all are met.
fn print_bars(bars: &[baton_lab::bars::Bar], report: &impl serde::Serialize, json: bool) -> Result<bool> {
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

#[derive(Args)]
struct SoakArguments {
    /// Connections between the two hosts.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4000))]
    connections: u32,
    #[command(flatten)]
    workers: workers::WorkerArguments,
    /// Moves to make; an offload and a restore count as two.
    #[arg(long, default_value_t = 1000)]
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
    #[arg(long, default_value_t = 0.0)]
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
    /// MTU of the link, 576 to 9000.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=9000))]
    mtu: u32,
    /// Drop frames that come during a move, instead of holding them for the connection's next owner.
    #[arg(long)]
    drop_during_moves: bool,
    /// Put the NIC beside the kernel, on host A's interface, instead of between kernel and wire. The link is not impaired then.
    #[arg(long, conflicts_with_all = ["workers", "one_queue", "copy_engine", "loss", "reorder", "duplicate", "corrupt", "delay"])]
    beside: bool,
    /// Give host A a firewall that drops what its connection tracker finds invalid.
    #[arg(long)]
    firewall: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
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

fn soak(arguments: &SoakArguments) -> Result<bool> {
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
        drop_during_moves: arguments.drop_during_moves,
        beside: arguments.beside,
        firewall: arguments.firewall.then(|| STATEFUL_RULES.into()),
        ..TestbedSettings::default()
    };
    arguments.workers.apply(&mut bed);
    let settings = SoakSettings {
        connections: arguments.connections as usize,
        moves: arguments.moves,
        seed: arguments.seed,
        ipv6: arguments.ipv6,
        kill_nic: arguments.kill_nic,
        kill_agent: arguments.kill_agent,
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

fn run(command: Command) -> Result<bool> {
    match command {
        Command::Soak(arguments) => {
            baton_kernel::namespace::become_root_if_needed()?;
            soak(&arguments)
        }
        Command::Demo { output } => {
            baton_kernel::namespace::become_root_if_needed()?;
            let report = baton_lab::demo::run(&output)?;
            print!("{}", baton_lab::demo::table(&report));
            println!("\n  {}\n  {}", output.join("report.html").display(), output.join("demo.json").display());
            Ok(report.failures.is_empty())
        }
        Command::Up(arguments) => up::up(&arguments).map(|()| true),
        Command::Run(arguments) => run::run(&arguments).map(|()| true),
        Command::Attach(arguments) => attach::attach(&arguments).map(|()| true),
        Command::Detach(arguments) => attach::detach(&arguments).map(|()| true),
        Command::Ls(arguments) => tools::list(&arguments),
        Command::Move(arguments) => tools::relocate(&arguments),
        Command::Nic(command) => nic::run(&command),
        Command::Ntttcp(command) => lab::ntttcp(&command),
        Command::Lab(command) => lab::run(&command),
        Command::Doctor(arguments) => {
            baton_kernel::namespace::become_root_if_needed()?;
            doctor::run(&arguments)
        }
        Command::Hosts(arguments) => {
            baton_kernel::namespace::become_root_if_needed()?;
            let status = hosts::run(&arguments)?;
            if status > 1 {
                std::process::exit(i32::from(status));
            }
            Ok(status == 0)
        }
        Command::Bench(what) => bench(&what),
        Command::Options => {
            print!("{}", baton_lab::options::markdown());
            Ok(true)
        }
        Command::BenchWorkload { connections, size, burst, segments } => {
            let workload = baton_lab::datapath::Workload { connections, size, burst };
            baton_lab::datapath::run_workload(workload, segments).map(|_| true)
        }
        Command::BenchBypassWorkload { messages, port } => baton_lab::bypass::workload(messages, port).map(|()| true),
        Command::KeeperProcess => baton_keeper::run().map(|()| true),
        Command::AgentProcess => baton_agent::run().map(|()| true),
        Command::NicProcess => baton_control::run().map(|()| true),
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if matches!(command, Command::Ls(_) | Command::Options | Command::Doctor(_) | Command::Nic(_)) {
        baton_kernel::process::end_on_broken_pipe();
    }
    match run(command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::from(2)
        }
    }
}
