//! The commands that measure and test. Nothing else of this program uses the lab; without the feature `lab` they are
//! left out.

mod all;
pub mod bench;
mod load;
mod papers;
pub mod plan;
mod rmpp;
pub mod saving;
mod sim;
mod soak;
mod ttcp;

use crate::numbers::between;
use anyhow::Result;
use baton_bed::temporary::ResultFile;
use baton_lab::ntttcp::{self, NtttcpSettings};
use clap::{Args, Subcommand};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum Command {
    /// Moves random connections at random moments under load, and checks every byte.
    #[command(
        after_help = "Examples:\n  baton soak --connections 64 --moves 10000 --json\n  baton soak --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --delay 5 --ipv6\n  baton soak --kill-nic 20\n  baton soak --beside --kill-nic 20 --stop-nic 20\n  baton soak --beside --nic-connections 16 --link-down 10 --peer-fin return\n  baton soak --poison\n  baton soak --offload fast-path --loss 1 --transitions 10000\n  baton soak --rmpp --messages 10000 --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --kill-nic 20 --restart-peer 1"
    )]
    Soak(soak::SoakArguments),
    /// Simulates whole machines in virtual time: hosts, links, programs, moves, faults and deaths; and checks what must
    /// hold.
    #[command(
        after_help = "Examples:\n  baton sim --seeds 0..3000 --json\n  baton sim --seed 1725 --trace\n  baton sim --exhaustive\n  baton sim --walk fin-received,7:nic,12:agent --trace"
    )]
    Sim(sim::SimArguments),
    /// Measures one part, and compares it with its bounds.
    #[command(subcommand, after_help = bench::EXAMPLES)]
    Bench(bench::Bench),
    /// Measures TCP throughput over kernel sockets, and its costs: frames, interrupts, their halves, cycles.
    #[command(subcommand, after_help = NTTTCP_EXAMPLES)]
    Ntttcp(Ntttcp),
    /// Compares what a program's sends and receives cost in the kernel and on the NIC, over message sizes (TTCP).
    #[command(after_help = ttcp::EXAMPLES)]
    Ttcp(ttcp::TtcpArguments),
    /// The program that `baton ttcp` measures.
    #[command(hide = true)]
    TtcpProgram(ttcp::ProgramArguments),
    #[command(hide = true)]
    TtcpWorkload(ttcp::WorkloadArguments),
    /// Measures messages (RMPP) between two hosts of their own, with as much of it on the NIC as is wanted.
    #[command(subcommand, after_help = rmpp::EXAMPLES)]
    Rmpp(rmpp::Rmpp),
    /// Repeats the papers behind Baton: models that run the real code in virtual time, and each figure beside the
    /// paper's.
    #[command(subcommand, after_help = papers::EXAMPLES)]
    Lab(papers::Lab),
    /// Plans: what each degree of offload brings for a host, a NIC and a load, from small operations that are measured.
    #[command(after_help = plan::EXAMPLES)]
    Plan(plan::PlanArguments),
    /// Loads a server as many clients would, and says what each of them gets.
    #[command(subcommand, after_help = load::WEB_EXAMPLES)]
    Load(load::Load),
    /// Prints what a move does to every socket option, as Markdown.
    #[command(after_help = "Example:\n  baton options > docs/reference/socket-options.md")]
    Options,
    #[command(flatten)]
    Workload(bench::Workload),
}

/// Runs one of them. False if what it checks does not hold.
pub fn run(command: &Command) -> Result<bool> {
    match command {
        Command::Soak(arguments) => {
            baton_linux::namespace::become_root_if_needed()?;
            soak::run(arguments)
        }
        Command::Sim(arguments) => sim::run(arguments),
        Command::Bench(what) => bench::run(what),
        Command::Ntttcp(command) => ntttcp(command),
        Command::Ttcp(arguments) => ttcp::ttcp(arguments),
        Command::TtcpProgram(arguments) => ttcp::program(arguments),
        Command::TtcpWorkload(arguments) => ttcp::workload(arguments),
        Command::Rmpp(command) => {
            baton_linux::namespace::become_root_if_needed()?;
            rmpp::run(command)
        }
        Command::Lab(command) => papers::run(command),
        Command::Plan(arguments) => plan::run(arguments),
        Command::Load(command) => load::run(command),
        Command::Options => {
            baton_linux::process::end_on_broken_pipe();
            print!("{}", baton_lab::options::markdown());
            Ok(true)
        }
        Command::Workload(what) => bench::workload(what),
    }
}

const NTTTCP_EXAMPLES: &str = "Examples:
  baton ntttcp receive -P 8                      # on one machine
  baton ntttcp send 10.0.0.1 -P 8 -l 65536       # on the other
  baton hosts --peer 'baton ntttcp send $BATON_A' -- sh -c 'baton nic set lro=reorder; baton ntttcp receive --nic'
  baton ntttcp receive --core 0 --trace trace.json  # what interrupts and processes take of processor 0, by tenths of a second";

#[derive(Subcommand)]
pub enum Ntttcp {
    /// Waits for a sender, and receives.
    #[command(after_help = NTTTCP_EXAMPLES)]
    Receive {
        /// Address to listen at. Default: all.
        #[arg(long)]
        listen: Option<IpAddr>,
        #[command(flatten)]
        how: How,
    },
    /// Sends to a receiver.
    #[command(after_help = NTTTCP_EXAMPLES)]
    Send {
        /// The receiver's address.
        address: IpAddr,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Args)]
pub struct How {
    /// Connections; the same on both sides.
    #[arg(short = 'P', long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: u16,
    /// Bytes of each send and receive.
    #[arg(short, long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    length: u32,
    /// Seconds that are measured.
    #[arg(short = 't', long, default_value_t = 10.0, value_parser = between(0.1, 86_400.0))]
    seconds: f64,
    /// Seconds before the measurement.
    #[arg(short, long, default_value_t = 1.0, value_parser = between(0.0, 86_400.0))]
    warming: f64,
    #[arg(long, default_value_t = 5001, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Bind this side to a processor.
    #[arg(long, value_name = "N")]
    core: Option<usize>,
    /// Trace that processor by BPF, and write what the halves of interrupts and the processes take of it to this file:
    /// a JSON object for each tenth of a second.
    #[arg(long, value_name = "FILE", requires = "core")]
    trace: Option<PathBuf>,
    /// Count the interrupts of the Baton whose agent listens at BATON_SOCKET.
    #[arg(long)]
    nic: bool,
    /// Path of that agent's socket.
    #[arg(long, default_value_os_t = baton_client::agent_socket(), value_name = "PATH")]
    socket: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn ntttcp(command: &Ntttcp) -> Result<bool> {
    let (Ntttcp::Receive { how, .. } | Ntttcp::Send { how, .. }) = command;
    let settings = NtttcpSettings {
        connections: how.connections.into(),
        length: how.length as usize,
        seconds: how.seconds,
        warming: how.warming,
        core: how.core,
        traced: how.trace.is_some(),
    };
    // Before anything runs for it.
    let trace = how.trace.as_deref().map(ResultFile::open).transpose()?;
    let nic = how.nic.then_some(how.socket.as_path());
    let report = match command {
        Ntttcp::Receive { listen, .. } => {
            let address = SocketAddr::new(listen.unwrap_or(Ipv6Addr::UNSPECIFIED.into()), how.port);
            ntttcp::receive(&settings, address, nic)?
        }
        Ntttcp::Send { address, .. } => ntttcp::send(&settings, SocketAddr::new(*address, how.port), nic)?,
    };
    if let (Some(file), Some(traced)) = (trace, &report.trace) {
        file.write(traced.lines()?.as_bytes())?;
    }
    if how.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", ntttcp::table(&report));
    }
    Ok(true)
}
