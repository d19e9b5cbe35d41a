//! `baton ttcp`.

use anyhow::{Result, bail};
use baton_bed::temporary::ResultFile;
use baton_lab::ttcp::program::Direction;
use baton_lab::ttcp::{TtcpSettings, WAYS, buffering, cost, line, run, svg};
use std::path::PathBuf;

pub const EXAMPLES: &str = "Examples:
  baton ttcp
  baton ttcp --sizes 1,64,1448,65536 --ways none,full --json
  baton ttcp --direction transmit --plot .            # writes ttcp-transmit.svg here

Ways: none (the kernel, with the NIC as an ordinary card), veth (the kernel on two hosts with a veth, without a NIC), handoff,
fast-path and full (--offload of `baton run`, a ring), and full with the message interfaces handshake and aggregated (--interface
of `baton run`), each with Nagle's rule where it usually is, or as named in the other place (--nagle of `baton run`); and
fast-path-no-nagle, whose program sets TCP_NODELAY. Ratios are to none. Host CPU is that of program, agent and the kernel's thread for received frames, for the same
amount of data; the NIC's is shown beside it.";

#[derive(clap::Args)]
pub struct TtcpArguments {
    /// Message sizes in bytes, 1 to 1048576. Default: 13 sizes from 1 to 65536.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sizes: Vec<u32>,
    /// What is measured, in turn. Default: all.
    #[arg(long, value_delimiter = ',')]
    ways: Vec<String>,
    /// Direction of the data, as the program sees it. Default: both.
    #[arg(long, value_enum)]
    direction: Option<Towards>,
    /// Rounds; the medians count.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Most messages of a transfer. (A transfer has at most 256 MB, too.)
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,
    /// Without TSO and GSO on either side: every frame is at most an MTU long.
    #[arg(long)]
    no_segmentation: bool,
    /// Count the NIC's instructions, too: for a packet by function, and for a message by buffering strategy; needs
    /// valgrind.
    #[arg(long, visible_alias = "cost")]
    costs: bool,
    /// Write the figures to this directory: ttcp-transmit.svg, ttcp-receive.svg.
    #[arg(long, value_name = "DIRECTORY")]
    plot: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Values of `--direction`.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Towards {
    Transmit,
    Receive,
}

fn settings(arguments: &TtcpArguments) -> Result<TtcpSettings> {
    let mut settings = TtcpSettings {
        rounds: arguments.rounds as usize,
        messages: arguments.messages,
        costs: arguments.costs,
        segmentation: !arguments.no_segmentation,
        ..TtcpSettings::default()
    };
    if !arguments.sizes.is_empty() {
        settings.sizes = arguments.sizes.iter().map(|size| *size as usize).collect();
    }
    if let Some(direction) = arguments.direction {
        settings.directions = vec![if direction == Towards::Transmit { Direction::Transmit } else { Direction::Receive }];
    }
    if !arguments.ways.is_empty() {
        settings.ways.clear();
        for name in &arguments.ways {
            let Some(way) = WAYS.iter().find(|way| way.name == name) else {
                bail!("--ways {name:?}: use some of {}", WAYS.map(|way| way.name).join(", "));
            };
            settings.ways.push(*way);
        }
    }
    Ok(settings)
}

/// Runs it. False if a bound is not kept.
pub fn ttcp(arguments: &TtcpArguments) -> Result<bool> {
    let settings = settings(arguments)?;
    baton_linux::namespace::become_root_if_needed()?;
    let open = |direction: Direction| -> Result<Option<ResultFile>> {
        let name = if direction == Direction::Transmit { "ttcp-transmit.svg" } else { "ttcp-receive.svg" };
        arguments.plot.as_ref().map(|directory| ResultFile::open(&directory.join(name))).transpose()
    };
    let plots = settings.directions.iter().map(|direction| open(*direction)).collect::<Result<Vec<_>>>()?;
    let report = run(&settings, |cell| eprintln!("{}", line(cell)))?;
    for (direction, plot) in settings.directions.iter().zip(plots) {
        if let Some(plot) = plot {
            plot.write(svg(&report, *direction)?.as_bytes())?;
        }
    }
    if arguments.costs {
        eprintln!("{}\n{}", cost::table(&report.costs), buffering::table(&report.buffering));
    }
    super::bench::print_bars(&report.bars, &report, arguments.json)
}

/// The program that is measured.
#[derive(clap::Args)]
pub struct ProgramArguments {
    peer: std::net::SocketAddr,
    direction: Towards,
    size: usize,
    bytes: u64,
    /// It sets TCP_NODELAY.
    #[arg(long)]
    no_delay: bool,
}

/// Instructions that `baton ttcp --costs` counts.
#[derive(clap::Args)]
pub struct WorkloadArguments {
    /// A packet, or a buffering strategy and a message size with a slash between them.
    packet: String,
    packets: u64,
}

/// Runs them.
pub fn workload(arguments: &WorkloadArguments) -> Result<bool> {
    let workload = if arguments.packet.contains('/') { buffering::workload } else { cost::workload };
    workload(&arguments.packet, arguments.packets).map(|()| true)
}

/// Runs that program.
pub fn program(arguments: &ProgramArguments) -> Result<bool> {
    let direction = if arguments.direction == Towards::Transmit { Direction::Transmit } else { Direction::Receive };
    let ProgramArguments { peer, size, bytes, no_delay, .. } = *arguments;
    baton_lab::ttcp::program::run(peer, direction, size, bytes, no_delay).map(|()| true)
}
