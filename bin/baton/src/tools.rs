//! Tools for a running Baton: listing connections, and moving them.

use anyhow::{Context, Result, bail};
use baton_client::protocol::{Ask, ConnectionInfo, Place, Reply};
use baton_lab::testbed::Tool;
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Args)]
pub struct SocketArgument {
    /// Path of the agent's socket.
    #[arg(long, env = "BATON_SOCKET", default_value = baton_client::DEFAULT_SOCKET, value_name = "PATH")]
    socket: PathBuf,
}

impl SocketArgument {
    /// Connects to the agent.
    pub fn connect(&self) -> Result<Tool> {
        Tool::connect(&self.socket)
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
    /// Which connections: `all`, a local port as `:80`, a peer as `10.0.0.2:4711`, or session and number from `baton ls` as
    /// `0.3`.
    #[arg(required = true)]
    which: Vec<Filter>,
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

/// The name of a process, if it can be read.
fn program(process: u32) -> String {
    std::fs::read_to_string(format!("/proc/{process}/comm")).map_or_else(|_| "?".into(), |name| name.trim_end().to_string())
}

/// `baton ls`.
pub fn list(arguments: &ListArguments) -> Result<bool> {
    let list = connections(&mut arguments.socket.connect()?)?;
    if arguments.json {
        println!("{}", serde_json::to_string(&list)?);
        return Ok(true);
    }
    println!(
        "{:<7} {:<6} {:>6} {:>8}  {:<22} {:<22} {:<20} WHY",
        "NUMBER", "PLACE", "MOVES", "SINCE", "LOCAL", "PEER", "PROGRAM"
    );
    for info in &list {
        let place = if info.place == Place::Nic { "nic" } else { "kernel" };
        let number = format!("{}.{}", info.session, info.connection);
        let program = format!("{}/{}", program(info.process), info.process);
        let since = age(info.for_us);
        println!(
            "{number:<7} {place:<6} {:>6} {since:>8}  {:<22} {:<22} {program:<20} {}",
            info.moves, info.local, info.peer, info.reason
        );
        let d = &info.detail;
        println!(
            "        {} rtt {:.3} ms, cwnd {}, mss {}, retransmitted {}; queues: unread {}, in flight {}, unsent {}",
            baton_kernel::examine::state_name(d.state),
            f64::from(d.srtt) / 1000.0,
            d.cwnd,
            d.mss,
            d.retransmitted,
            d.unread,
            d.in_flight,
            d.unsent
        );
    }
    Ok(true)
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
    let to = match arguments.to {
        Target::Nic => Place::Nic,
        Target::Kernel => Place::Kernel,
    };
    let mut stayed = 0;
    for info in &meant {
        let (session, connection) = (info.session, info.connection);
        match tool.ask(Ask::MoveAny { session, connection, to }).context("moving a connection")? {
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
