//! Tools for a running Baton: listing connections, and moving them.

use anyhow::{Context, Result, bail};
use baton_client::discovery::{self, Agent};
use baton_client::tool::Tool;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply, Statistics, Withdrawn};
use baton_protocol::texts::plain;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

#[derive(Args)]
pub struct SocketArgument {
    /// Where the agent listens. Without it: where BATON_SOCKET says, or every Baton on this machine for `ls`, else the
    /// only one that runs.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl SocketArgument {
    /// The sockets of all agents that are meant, and the processes that are to listen there where they are known.
    fn sockets(&self) -> Vec<(PathBuf, Option<u32>)> {
        match self.socket.clone().or_else(baton_client::named_socket) {
            Some(path) => vec![(path, None)],
            None => {
                let found = discovery::agents();
                for process in found.silent {
                    eprintln!("baton: process {process} calls itself an agent, and does not let anybody look at it");
                }
                found.agents.into_iter().map(|Agent { socket, process }| (socket, Some(process))).collect()
            }
        }
    }

    /// Connects to the agent that is meant.
    pub fn connect(&self) -> Result<Tool> {
        match &self.sockets()[..] {
            [] => bail!("no Baton runs here; `baton run -- PROGRAM` or `baton up` starts one"),
            [(socket, _)] => Tool::connect(socket),
            several => {
                let paths: Vec<_> = several.iter().map(|(path, _)| format!("\n    --socket {}", path.display())).collect();
                bail!("{} Batons run here; say which one:{}", several.len(), paths.concat())
            }
        }
    }
}

#[derive(Args)]
pub struct ListArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct MoveArguments {
    /// Where to.
    to: Target,
    /// Which connections: `all`, a local port as `:80`, a peer as `10.0.0.2:4711`, or session and number from
    /// `baton ls` as `0.3`.
    #[arg(required = true)]
    which: Vec<Filter>,
    /// To the NIC with this number, whatever device the connection's route leads to; from another NIC, too. Without it
    /// a connection goes to the NIC that has that device.
    #[arg(long, value_name = "N")]
    nic: Option<u32>,
    #[command(flatten)]
    socket: SocketArgument,
}

#[derive(Clone, Copy, ValueEnum)]
enum Target {
    Nic,
    Kernel,
}

/// Selects connections.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Filter {
    All,
    LocalPort(u16),
    Peer(SocketAddr),
    One { session: u32, connection: u32 },
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Filter::All);
        }
        if let Some(port) = text.strip_prefix(':') {
            return port.parse().map(Filter::LocalPort).map_err(|_| format!("{port:?} is not a port (1 to 65535)"));
        }
        if let Ok(peer) = text.parse() {
            return Ok(Filter::Peer(peer));
        }
        let one = text.split_once('.').and_then(|(session, number)| Some((session.parse().ok()?, number.parse().ok()?)));
        match one {
            Some((session, connection)) => Ok(Filter::One { session, connection }),
            None => Err("write `all`, a local port as `:80`, a peer as `10.0.0.2:4711`, or a connection as `0.3`".into()),
        }
    }
}

impl Filter {
    fn matches(&self, info: &ConnectionInfo) -> bool {
        let address = |text: &str| text.parse::<SocketAddr>().ok();
        match self {
            Filter::All => true,
            Filter::LocalPort(port) => address(&info.local).is_some_and(|local| local.port() == *port),
            Filter::Peer(peer) => address(&info.peer) == Some(*peer),
            Filter::One { session, connection } => (info.session, info.connection) == (*session, *connection),
        }
    }
}

fn connections(tool: &mut Tool) -> Result<Vec<ConnectionInfo>> {
    tool.connections()
}

/// Agents that are looked at at the same time.
const LOOKS: usize = 64;

/// An agent's connections, and its counters.
fn look(socket: &Path, process: Option<u32>) -> Result<(Vec<ConnectionInfo>, Statistics)> {
    let mut tool = Tool::look(socket, process)?;
    Ok((connections(&mut tool)?, tool.statistics()?))
}

/// The name of a process, if it can be read.
fn program(process: u32) -> String {
    baton_linux::process::name(process).map_or_else(|| "?".into(), |name| plain(&name))
}

/// What `baton ls --json` prints of a connection: also where its agent listens, for `--socket`.
#[derive(Serialize)]
struct Listed {
    socket: PathBuf,
    #[serde(flatten)]
    info: ConnectionInfo,
}

/// `baton ls`.
pub fn list(arguments: &ListArguments) -> Result<bool> {
    let mut all = Vec::new();
    let sockets = arguments.socket.sockets();
    // Many at once: one that does not answer holds up few of the others.
    let looks = sockets.chunks(LOOKS).flat_map(|sockets| {
        std::thread::scope(|scope| {
            let begun: Vec<_> =
                sockets.iter().map(|(socket, process)| (socket, scope.spawn(move || look(socket, *process)))).collect();
            begun.into_iter().map(|(socket, look)| (socket, look.join())).collect::<Vec<_>>()
        })
    });
    for (socket, listed) in looks {
        let listed = listed.unwrap_or_else(|_| bail!("no thread to look at it"));
        match listed.with_context(|| format!("looking at {}", socket.display())) {
            Ok((list, statistics)) => all.push((socket, list, statistics)),
            // One of several may end just now.
            Err(error) if sockets.len() > 1 => eprintln!("baton: {}: {error:#}", socket.display()),
            Err(error) => return Err(error),
        }
    }
    if arguments.json {
        let each =
            all.into_iter().flat_map(|(socket, list, _)| list.into_iter().map(|info| Listed { socket: socket.clone(), info }));
        println!("{}", serde_json::to_string(&each.collect::<Vec<_>>())?);
        return Ok(true);
    }
    if sockets.is_empty() {
        println!("no Baton runs here; `baton run -- PROGRAM` or `baton up` starts one");
    }
    for (number, (socket, list, statistics)) in all.iter().enumerate() {
        if all.len() > 1 {
            println!("{}{}", if number > 0 { "\n" } else { "" }, socket.display());
        }
        print_connections(list, statistics.nics.len());
        print_withdrawn(&statistics.withdrawn);
    }
    Ok(true)
}

/// Prints the programs that run on without Baton, and those of which some connections stay in the kernel.
fn print_withdrawn(programs: &VecDeque<Withdrawn>) {
    for Withdrawn { process, identity, program, reason, connections } in programs {
        if baton_linux::process::identity(*process) == Some(*identity) {
            match connections {
                0 => println!("{program}/{process} runs without Baton: {reason}"),
                count => println!("{program}/{process} has connections that stay in the kernel (asked {count} times): {reason}"),
            }
        }
    }
}

/// Prints the connections of an agent with this many NICs. Where there are several, a NIC has its number behind it.
fn print_connections(list: &[ConnectionInfo], nics: usize) {
    println!(
        "{:<7} {:<6} {:<6} {:>6} {:>8}  {:<22} {:<22} {:<20} WHY",
        "NUMBER", "PLACE", "MADE", "MOVES", "SINCE", "LOCAL", "PEER", "PROGRAM"
    );
    for info in list {
        let name = |place| if place == Place::Nic { "nic" } else { "kernel" };
        let (place, made) = (name(info.place), name(info.made_by));
        let place = info.nic.filter(|_| nics > 1).map_or(place.to_string(), |nic| format!("{place}{nic}"));
        let number = format!("{}.{}", info.session, info.connection);
        let program = format!("{}/{}", program(info.process), info.process);
        let since = age(info.for_us);
        println!(
            "{number:<7} {place:<6} {made:<6} {:>6} {since:>8}  {:<22} {:<22} {program:<20} {}",
            info.moves, info.local, info.peer, info.reason
        );
        let d = &info.detail;
        if let Some((times, now)) = info.lent {
            let has = if now { "the host's TCP has it now" } else { "on its fast path" };
            println!("        partial offload: {has}, lent {times} times");
        }
        if info.dormant {
            println!("        dormant: it has carried nothing for a while, and the NIC keeps its state in few bytes");
        }
        println!(
            "        {} rtt {:.3} ms, cwnd {}, mss {}, retransmitted {}; queues: unread {}, in flight {}, unsent {}",
            baton_handoff::examine::state_name(d.state),
            f64::from(d.srtt) / 1000.0,
            d.cwnd,
            d.mss,
            d.retransmitted,
            d.unread,
            d.in_flight,
            d.unsent
        );
    }
}

/// A duration, rounded for people.
fn age(micros: u64) -> String {
    match micros / 1000 {
        millis if millis < 1000 => format!("{millis} ms"),
        millis if millis < 600_000 => format!("{:.1} s", millis as f64 / 1000.0),
        millis => format!("{} min", millis / 60_000),
    }
}

/// `baton move`. Returns false if a connection stayed where it was.
pub fn relocate(arguments: &MoveArguments) -> Result<bool> {
    let mut tool = arguments.socket.connect()?;
    let list = connections(&mut tool)?;
    let meant: Vec<_> = list.iter().filter(|info| arguments.which.iter().any(|filter| filter.matches(info))).collect();
    if meant.is_empty() {
        bail!("none of the {} connections matches; `baton ls` lists them", list.len());
    }
    let nic = arguments.nic;
    let to = match arguments.to {
        Target::Nic => Place::Nic,
        Target::Kernel if nic.is_some() => bail!("--nic says to which NIC: `baton move nic --nic N …`"),
        Target::Kernel => Place::Kernel,
    };
    let mut stayed = 0;
    for info in &meant {
        let (session, connection) = (info.session, info.connection);
        match tool.ask(Ask::MoveAny { session, connection, to, nic }).context("moving a connection")? {
            Reply::Done => {}
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => {
                stayed += 1;
                eprintln!("{session}.{connection} {} -> {} stayed: {reason}", info.local, info.peer);
            }
            other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
        }
    }
    println!("{} moved, {stayed} stayed", meant.len() - stayed);
    Ok(stayed == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read() {
        assert_eq!("all".parse(), Ok(Filter::All));
        assert_eq!(":80".parse(), Ok(Filter::LocalPort(80)));
        assert_eq!("0.3".parse(), Ok(Filter::One { session: 0, connection: 3 }));
        assert_eq!("[::1]:5".parse(), Ok(Filter::Peer("[::1]:5".parse().unwrap())));
        assert!(":99999".parse::<Filter>().unwrap_err().contains("65535"));
        assert!("nginx".parse::<Filter>().unwrap_err().contains("0.3"));
    }
}
