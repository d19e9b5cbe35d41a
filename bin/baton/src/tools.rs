//! Which Baton a tool means; and moving connections.

use anyhow::{Context, Result, bail};
use baton_client::discovery::{self, Agent};
use baton_client::tool::Tool;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply};
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// What a command says that needs a Baton where none runs: on standard error, and its exit status is 2.
pub const NO_BATON: &str = "no Baton runs here; `baton run -- PROGRAM` or `baton up` starts one";

#[derive(Args, Clone)]
pub struct SocketArgument {
    /// Path of an agent's socket. Without it: what BATON_SOCKET says; else every Baton on this machine for `ls`, `top`,
    /// `page`, `stats`, `metrics` and `report`, and for other commands the only one that runs.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl SocketArgument {
    /// The sockets of all agents that are meant, and the processes that are to listen there where they are known; then
    /// the processes that call themselves agents, and do not let anybody look.
    pub fn find(&self) -> (Vec<(PathBuf, Option<u32>)>, Vec<u32>) {
        match self.socket.clone().or_else(baton_client::named_socket) {
            Some(path) => (vec![(path, None)], Vec::new()),
            None => {
                let found = discovery::agents();
                let agents = found.agents.into_iter().map(|Agent { socket, process }| (socket, Some(process)));
                (agents.collect(), found.silent)
            }
        }
    }

    /// The same; processes that do not let anybody look are reported.
    pub fn sockets(&self) -> Vec<(PathBuf, Option<u32>)> {
        let (agents, silent) = self.find();
        silent.into_iter().for_each(|process| eprintln!("baton: {}", is_silent(process)));
        agents
    }

    /// Connects to the agent that is meant.
    pub fn connect(&self) -> Result<Tool> {
        Tool::connect(&self.only()?)
    }

    /// The socket of the only agent that is meant.
    pub fn only(&self) -> Result<PathBuf> {
        match &mut self.sockets()[..] {
            [] => bail!(NO_BATON),
            [(socket, _)] => Ok(std::mem::take(socket)),
            several => {
                let paths: Vec<_> = several.iter().map(|(path, _)| format!("\n    --socket {}", path.display())).collect();
                bail!("{} Batons run here; say which one:{}", several.len(), paths.concat())
            }
        }
    }
}

/// What is said of a process that does not let anybody look.
pub fn is_silent(process: u32) -> String {
    format!("process {process} calls itself an agent, and does not let anybody look at it")
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

/// Asks an agent to move a connection, to this NIC if one is named. Returns why it stayed, if it did.
///
/// # Errors
/// If the agent does not answer.
pub fn ask_to_move(tool: &mut Tool, (session, connection): (u32, u32), to: Place, nic: Option<u32>) -> Result<Option<String>> {
    match tool.ask(Ask::MoveAny { session, connection, to, nic }).context("moving a connection")? {
        Reply::Done => Ok(None),
        Reply::Stayed { reason, .. } | Reply::Failed { reason } => Ok(Some(reason)),
        other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
    }
}

/// `baton move`. Returns false if a connection stayed where it was.
pub fn relocate(arguments: &MoveArguments) -> Result<bool> {
    let mut tool = arguments.socket.connect()?;
    let list = tool.connections()?;
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
        if let Some(reason) = ask_to_move(&mut tool, (session, connection), to, nic)? {
            stayed += 1;
            eprintln!("{session}.{connection} {} -> {} stayed: {reason}", info.local, info.peer);
        }
    }
    println!("{} moved, {stayed} stayed", meant.len() - stayed);
    Ok(stayed == 0)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Where no agent listens.
    pub fn nowhere() -> SocketArgument {
        SocketArgument { socket: Some("/nowhere".into()) }
    }

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
