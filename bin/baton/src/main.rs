//! `baton`: moves established TCP connections between the kernel and an offload engine.
#![forbid(unsafe_code)]

mod addresses;
mod attach;
mod bed;
mod capture;
mod doctor;
mod environment;
mod filter;
mod front;
mod gain;
mod gain_file;
mod generate;
#[cfg(feature = "lab")]
mod lab;
mod list;
mod metrics;
mod mpi;
mod nic;
mod nic_messages;
mod nic_receive;
mod nics;
mod numbers;
mod page;
mod placement;
mod report;
mod run;
mod run_directory;
mod serve;
mod start;
mod stats;
mod status;
mod tools;
mod top;
mod topology;
mod units;
mod up;
mod up_config;
mod wind_down;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use metrics::MetricsArguments;
use std::io::Write;
use std::process::ExitCode;

const EXAMPLES: &str = "Examples:
  baton doctor                             what this machine can do for Baton
  baton run -- nginx -g 'daemon off;'      a program under Baton
  baton up &                               a Baton that stays, for all programs; `baton enable UNIT` makes a unit use it
  baton ls                                 the connections: where each is, and why
  baton move kernel :80                    those of a port, back to the kernel

`baton COMMAND --help` has examples of each; docs/reference/commands.md lists all by what they are for.";

/// What is said of a Baton without the feature `lab`.
const LEFT_OUT: &str = if cfg!(feature = "lab") {
    ""
} else {
    "\n\nThis Baton was compiled for `make demo`, without the commands that measure and test: bench, soak, sim, ttcp, ntttcp, rmpp, lab, \
     plan, load, options. `make build` makes the whole one: target/release/baton."
};

/// The end of `baton --help`.
fn help() -> String {
    format!("{EXAMPLES}{LEFT_OUT}")
}

#[derive(Parser)]
#[command(version, after_help = help(), about = "Moves established TCP connections of unmodified Linux programs out of the kernel and back.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Bed(bed::Bed),
    /// Starts a Baton that stays, for the programs of every network namespace on this machine.
    #[command(after_help = up::EXAMPLES)]
    Up(up::UpArguments),
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
    #[command(after_help = list::help())]
    Ls(list::ListArguments),
    /// Shows connections by what they carry, NICs and programs, on a terminal; moves connections by a key.
    #[command(after_help = top::help())]
    Top(top::TopArguments),
    /// Serves a page for a browser, at a Unix socket or on loopback: connections, NICs and programs, with plots over
    /// time.
    #[command(after_help = page::EXAMPLES)]
    Page(page::PageArguments),
    /// Writes the frames that a NIC sends and receives to a file for Wireshark (pcapng), or a line for each.
    #[command(after_help = capture::EXAMPLES)]
    Capture(capture::CaptureArguments),
    /// Moves connections of a running Baton: your own, or any as root.
    #[command(
        after_help = "Examples:\n  baton move nic all\n  baton move kernel :8080\n  baton move nic 0.3 10.0.0.2:4711\n  baton move nic --nic 1 :8080"
    )]
    Move(tools::MoveArguments),
    /// Shows and changes what the NIC of a running Baton does for the kernel's own connections, and which processors
    /// its workers run on.
    #[command(after_help = nic::EXAMPLES)]
    Nic(nic::NicArguments),
    /// Says whether a Baton is up (`baton up`), and what it has.
    #[command(after_help = status::EXAMPLES)]
    Status(status::StatusArguments),
    /// Counts moves, refusals and returns to the kernel, by program and reason, since the agent's start.
    #[command(after_help = stats::EXAMPLES)]
    Stats(stats::StatsArguments),
    /// Serves what is counted to Prometheus, in its text format and as OpenMetrics, at a Unix socket or on loopback.
    #[command(after_help = metrics::EXAMPLES)]
    Metrics(metrics::MetricsArguments),
    /// Writes one archive for a bug report: versions, settings, counters, events; no payload, no keys, no addresses.
    #[command(after_help = report::EXAMPLES)]
    Report(report::ReportArguments),
    /// Makes a systemd unit's program run under Baton: `baton run` stands before it from the next start on.
    #[command(after_help = units::ENABLE_EXAMPLES)]
    Enable(units::EnableArguments),
    /// Ends what `baton enable` did.
    #[command(after_help = units::DISABLE_EXAMPLES)]
    Disable(units::DisableArguments),
    /// Checks what this machine can do for Baton, and says what to do where something is missing; or which connections
    /// of a program that runs would move.
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArguments),
    #[cfg(feature = "lab")]
    #[command(flatten)]
    Lab(lab::Command),
    /// Writes manual pages and completions, for a package.
    #[command(hide = true, subcommand)]
    Generate(generate::Generate),
    /// Waits until what a `baton up` of this service has left has ended.
    #[command(hide = true)]
    WindDown,
    /// Looks at a program's sockets, for `baton doctor`.
    #[command(hide = true)]
    DoctorLook(doctor::look::LookArguments),
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
        Command::Bed(command) => bed::run(&command),
        #[cfg(feature = "lab")]
        Command::Lab(command) => lab::run(&command),
        Command::Up(arguments) => up::up(&up_config::with_file(arguments)?).map(|()| true),
        Command::Run(arguments) => run::run(&arguments).map(|()| true),
        Command::Mpi(arguments) => mpi::run(&arguments).map(|()| true),
        Command::Attach(arguments) => attach::attach(&arguments).map(|()| true),
        Command::Detach(arguments) => attach::detach(&arguments).map(|()| true),
        Command::Ls(arguments) => list::list(&arguments),
        Command::Top(arguments) => top::top(arguments).map(|()| true),
        Command::Page(arguments) => page::run(arguments).map(|()| true),
        Command::Capture(arguments) => capture::run(&arguments).map(|()| true),
        Command::Move(arguments) => tools::relocate(&arguments),
        Command::Nic(command) => nic::run(&command),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::DoctorLook(arguments) => doctor::look::run(&arguments).map(|()| true),
        Command::Status(arguments) => std::process::exit(status::run(&arguments)?),
        Command::Stats(arguments) => stats::run(&arguments).map(|()| true),
        Command::Metrics(arguments) => metrics::run(&arguments).map(|()| true),
        Command::Report(arguments) => report::run(&arguments).map(|()| true),
        Command::Enable(arguments) => units::enable(&arguments).map(|()| true),
        Command::Disable(arguments) => units::disable(&arguments).map(|()| true),
        Command::Generate(what) => generate::run(&what, Cli::command()).map(|()| true),
        Command::WindDown => wind_down::run().map(|()| true),
        Command::KeeperProcess => baton_keeper::run().map(|()| true),
        Command::AgentProcess => baton_agent::run().map(|()| true),
        Command::NicProcess => baton_control::run().map(|()| true),
        Command::HostTcpProcess => baton_control::host_tcp::run().map(|()| true),
        Command::NicOwnerProcess => baton_control::owner::run().map(|()| true),
    }
}

/// Makes output that cannot be written an error like others (`println!` panics): a full disk, for example.
fn explain_full_output() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| match panic.payload().downcast_ref::<String>() {
        Some(text) if text.starts_with("failed printing to stdout") => {
            let _ = writeln!(std::io::stderr(), "baton: {text}");
            std::process::exit(2);
        }
        _ => usual(panic),
    }));
}

/// What to type against an error of the system that any command can meet.
fn advice(error: &anyhow::Error) -> &'static str {
    /// Linux's error numbers for no memory, too many open files, a file that would be too large, a full file system and
    /// a full quota.
    const ENOMEM: i32 = 12;
    const EMFILE: i32 = 24;
    const EFBIG: i32 = 27;
    const ENOSPC: i32 = 28;
    const EDQUOT: i32 = 122;
    let is = |number| {
        let errors = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
        errors.filter_map(std::io::Error::raw_os_error).any(|found| found == number)
    };
    if is(ENOMEM) {
        ": raise the limit on address space with `ulimit -v unlimited` (`ulimit -v` shows it), or free memory"
    } else if is(EMFILE) {
        ": raise the limit on open files with `ulimit -n 1024` or more"
    } else if is(EFBIG) {
        ": raise the limit on the size of files with `ulimit -f unlimited`"
    } else if is(ENOSPC) || is(EDQUOT) {
        ": make room for it (`df -h` shows how full each file system is)"
    } else {
        ""
    }
}

/// The part of Baton that a process is, for its log; empty for a command.
fn part(command: &Command) -> &'static str {
    match command {
        Command::KeeperProcess => "keeper",
        Command::AgentProcess => "agent",
        Command::NicProcess => "nic",
        Command::HostTcpProcess => "host tcp",
        Command::NicOwnerProcess => "nic owner",
        _ => "",
    }
}

fn main() -> ExitCode {
    let matches = environment::heed(Cli::command()).get_matches();
    let command = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).command;
    if matches!(
        command,
        Command::Ls(_)
            | Command::Stats(_)
            | Command::Metrics(MetricsArguments { once: true, .. })
            | Command::Status(_)
            | Command::Doctor(_)
            | Command::Nic(_)
    ) {
        baton_linux::process::end_on_broken_pipe();
    }
    if matches!(
        command,
        Command::Up(_)
            | Command::KeeperProcess
            | Command::AgentProcess
            | Command::NicProcess
            | Command::HostTcpProcess
            | Command::NicOwnerProcess
    ) {
        baton_linux::files::lift_size_limit();
    }
    explain_full_output();
    let part = part(&command);
    // The log of `up` begins when its configuration file has been read.
    if !matches!(command, Command::Up(_)) {
        baton_log::begin(part, baton_log::Level::of_environment());
    }
    let ran = run(command);
    baton_log::finish();
    match ran {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // One of Baton's processes waits for nobody who reads its messages.
        Err(error) if !part.is_empty() => {
            baton_log::error!([] "{error:#}{}", advice(&error); "`baton doctor` names what is missing");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("baton: {error:#}{}", advice(&error));
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::{Command, CommandFactory};

    /// A command and all below it that its help shows, with their words: `baton nic show`.
    fn shown(command: &Command, words: String, all: &mut Vec<(String, String)>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            shown(below, format!("{words} {}", below.get_name()), all);
        }
        all.push((words, command.get_after_help().map(ToString::to_string).unwrap_or_default()));
    }

    fn all() -> Vec<(String, String)> {
        let mut all = Vec::new();
        shown(&Cli::command(), "baton".into(), &mut all);
        all
    }

    #[test]
    fn the_help_of_every_command_has_an_example_of_it() {
        for (words, help) in all() {
            let example = |line: &str| line.starts_with("  ") && line.contains("baton ");
            assert!(help.lines().any(example), "`{words} --help` has no example");
        }
    }

    #[test]
    fn every_command_is_in_the_reference() {
        let reference = include_str!("../../../docs/reference/commands.md");
        for (words, _) in all() {
            assert!(reference.contains(&words), "docs/reference/commands.md does not name `{words}`");
        }
    }
}
