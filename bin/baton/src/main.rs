//! `baton`: moves established TCP connections between the kernel and an offload engine.
#![forbid(unsafe_code)]

mod addresses;
mod attach;
mod doctor;
mod filter;
mod front;
mod lab;
mod mpi;
mod nic;
mod nics;
mod placement;
mod run;
mod run_directory;
mod start;
mod tools;
mod topology;
mod up;

use anyhow::Result;
use clap::{Parser, Subcommand};
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
        after_help = "Examples:\n  baton soak --connections 64 --moves 10000 --json\n  baton soak --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --delay 5 --ipv6\n  baton soak --kill-nic 20\n  baton soak --beside --kill-nic 20 --stop-nic 20\n  baton soak --poison\n  baton soak --offload fast-path --loss 1 --transitions 10000\n  baton soak --rmpp --messages 10000 --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --kill-nic 20 --restart-peer 1"
    )]
    Soak(lab::soak::SoakArguments),
    /// Simulates whole machines in virtual time: hosts, links, programs, moves, faults and deaths; and checks what must hold.
    #[command(
        after_help = "Examples:\n  baton sim --seeds 0..3000 --json\n  baton sim --seed 1725 --trace\n  baton sim --exhaustive\n  baton sim --walk fin-received,7:nic,12:agent --trace"
    )]
    Sim(lab::sim::SimArguments),
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
        after_help = "Examples:\n  baton hosts -- ./my-server\n  baton hosts --peer 'sleep 1; curl http://$BATON_A:8080/' -- ./my-server --port 8080\n  baton hosts --address 10.77.0.50/24 --address fd00:ba70::50/64 -- sh\n\nThe program finds the agent through BATON_SOCKET (libbaton does so by itself)."
    )]
    Hosts(lab::hosts::HostsArguments),
    /// Runs a program whose connections go to the NIC when they are worth it.
    #[command(after_help = run::EXAMPLES)]
    Run(run::RunArguments),
    /// Runs an MPI launcher whose ranks talk over RMPP, by the libfabric provider rmpp.
    #[command(after_help = mpi::EXAMPLES)]
    Mpi(mpi::MpiArguments),
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
    #[command(
        after_help = "Examples:\n  baton move nic all\n  baton move kernel :8080\n  baton move nic 0.3 10.0.0.2:4711\n  baton move nic --nic 1 :8080"
    )]
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
    Bench(lab::bench::Bench),
    /// Measures TCP throughput over kernel sockets, and its costs: frames, interrupts, their halves, cycles.
    #[command(subcommand, after_help = lab::NTTTCP_EXAMPLES)]
    Ntttcp(lab::Ntttcp),
    /// Compares what a program's sends and receives cost in the kernel and on the NIC, over message sizes (TTCP).
    #[command(after_help = lab::ttcp::EXAMPLES)]
    Ttcp(lab::ttcp::TtcpArguments),
    /// The program that `baton ttcp` measures.
    #[command(hide = true)]
    TtcpProgram(lab::ttcp::ProgramArguments),
    #[command(hide = true)]
    TtcpWorkload(lab::ttcp::WorkloadArguments),
    /// Measures messages (RMPP) between two hosts of their own, with as much of it on the NIC as is wanted.
    #[command(subcommand, after_help = lab::rmpp::EXAMPLES)]
    Rmpp(lab::rmpp::Rmpp),
    /// Repeats calculations of the papers behind Baton.
    #[command(subcommand)]
    Lab(lab::Lab),
    /// Prints what a move does to every socket option, as Markdown.
    Options,
    #[command(flatten)]
    Workload(lab::bench::Workload),
    /// The processes of a running Baton, which start each other.
    #[command(hide = true)]
    KeeperProcess,
    #[command(hide = true)]
    AgentProcess,
    #[command(hide = true)]
    NicProcess,
    #[command(hide = true)]
    HostTcpProcess,
    #[command(hide = true)]
    NicOwnerProcess,
}

fn run(command: Command) -> Result<bool> {
    match command {
        Command::Soak(arguments) => {
            baton_linux::namespace::become_root_if_needed()?;
            lab::soak::run(&arguments)
        }
        Command::Sim(arguments) => lab::sim::run(&arguments),
        Command::Demo { output } => {
            baton_linux::namespace::become_root_if_needed()?;
            lab::demo(&output)
        }
        Command::Up(arguments) => up::up(&arguments).map(|()| true),
        Command::Run(arguments) => run::run(&arguments).map(|()| true),
        Command::Mpi(arguments) => mpi::run(&arguments).map(|()| true),
        Command::Attach(arguments) => attach::attach(&arguments).map(|()| true),
        Command::Detach(arguments) => attach::detach(&arguments).map(|()| true),
        Command::Ls(arguments) => tools::list(&arguments),
        Command::Move(arguments) => tools::relocate(&arguments),
        Command::Nic(command) => nic::run(&command),
        Command::Ntttcp(command) => lab::ntttcp(&command),
        Command::Ttcp(arguments) => lab::ttcp::ttcp(&arguments),
        Command::TtcpWorkload(arguments) => lab::ttcp::workload(&arguments),
        Command::TtcpProgram(arguments) => lab::ttcp::program(&arguments),
        Command::Lab(command) => lab::run(&command),
        Command::Rmpp(command) => {
            baton_linux::namespace::become_root_if_needed()?;
            lab::rmpp::run(&command)
        }
        Command::Doctor(arguments) => {
            baton_linux::namespace::become_root_if_needed()?;
            doctor::run(&arguments)
        }
        Command::Hosts(arguments) => {
            baton_linux::namespace::become_root_if_needed()?;
            let status = lab::hosts::run(&arguments)?;
            if status > 1 {
                std::process::exit(i32::from(status));
            }
            Ok(status == 0)
        }
        Command::Bench(what) => lab::bench::run(&what),
        Command::Workload(what) => lab::bench::workload(&what),
        Command::Options => {
            lab::options();
            Ok(true)
        }
        Command::KeeperProcess => baton_keeper::run().map(|()| true),
        Command::AgentProcess => baton_agent::run().map(|()| true),
        Command::NicProcess => baton_control::run().map(|()| true),
        Command::HostTcpProcess => baton_control::host_tcp::run().map(|()| true),
        Command::NicOwnerProcess => baton_control::owner::run().map(|()| true),
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if matches!(command, Command::Ls(_) | Command::Options | Command::Doctor(_) | Command::Nic(_)) {
        baton_linux::process::end_on_broken_pipe();
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
