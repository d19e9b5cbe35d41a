//! Looks at the connections of all selected Batons, again and again. Agents that do not answer are named.

use super::events::Event;
use super::row::{Baton, Key, Row};
use crate::tools::{SocketArgument, is_silent};
use anyhow::{Context, Result, bail};
use baton_client::tool::Tool;
use baton_linux::events::monotonic_micros;
use baton_linux::terminal::plain;
use baton_protocol::program::{Ask, ClassInfo, ConnectionInfo, Load, Reply, Statistics, Withdrawn};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, ScopedJoinHandle};

/// Most agents that are looked at at the same time.
const LOOKS: usize = 64;

/// What an agent has.
pub struct Seen {
    /// Its Baton.
    pub baton: Baton,
    /// Its connections, by number.
    pub rows: Vec<Row>,
    /// Its counters.
    pub statistics: Statistics,
}

impl Seen {
    /// The programs that run on without this Baton, or have connections that it does not have.
    pub fn withdrawn(&self) -> impl Iterator<Item = &Withdrawn> {
        let lives = |one: &&Withdrawn| baton_linux::process::identity(one.process) == Some(one.identity);
        self.statistics.withdrawn.iter().filter(lives)
    }
}

/// The name of a process, if it can be read.
pub fn name_of(process: u32) -> String {
    baton_linux::process::name(process).map_or_else(|| "?".into(), |name| plain(&name))
}

/// Names of processes, each read once.
#[derive(Default)]
pub struct Names(HashMap<u32, String>);

impl Names {
    /// The name of a process.
    pub fn of(&mut self, process: u32) -> String {
        self.0.entry(process).or_insert_with(|| name_of(process)).clone()
    }
}

/// Looks at an agent once. `events`: also at its connections' events.
fn look(number: usize, socket: &Path, process: Option<u32>, events: bool) -> Result<Seen> {
    let mut tool = Tool::look(socket, process)?;
    let (list, at, statistics) = (tool.connections()?, monotonic_micros(), tool.statistics()?);
    let numbers: Vec<_> = list.iter().filter(|_| events).map(|info| (info.session, info.connection)).collect();
    let mut events = Event::by_connection(&tool.events(&numbers)?);
    let mut names = Names::default();
    let row = |info: ConnectionInfo| {
        let name = names.of(info.process);
        let carried = info.detail.sent.zip(info.detail.received);
        let mut row = Row::new(number, info, name);
        row.note(at, carried);
        row.events = events.remove(&(row.info.session, row.info.connection)).unwrap_or_default();
        row
    };
    let rows = list.into_iter().map(row).collect();
    Ok(Seen { baton: Baton { socket: socket.to_owned(), nics: statistics.nics.len() }, rows, statistics })
}

/// Looks once at all agents that are meant, and at the events of their connections if wanted. None if there are none.
///
/// # Errors
/// If the only one does not answer.
pub fn look_at_all(argument: &SocketArgument, events: bool) -> Result<Option<Vec<Seen>>> {
    ask_all(argument, |number, socket, process| look(number, socket, process, events))
}

/// Asks all agents that are meant, many at a time: one that does not answer holds up few of the others. Of several
/// those that do not answer are only named. None if there are none.
///
/// # Errors
/// If the only one does not answer.
pub fn ask_all<T: Send>(
    argument: &SocketArgument,
    ask: impl Fn(usize, &Path, Option<u32>) -> Result<T> + Sync,
) -> Result<Option<Vec<T>>> {
    let sockets = argument.sockets();
    if sockets.is_empty() {
        return Ok(None);
    }
    let mut all = Vec::new();
    for (socket, seen) in ask_each(&sockets, ask) {
        match seen.with_context(|| format!("looking at {}", socket.display())) {
            Ok(seen) => all.push(seen),
            // One of several may end just now.
            Err(error) if sockets.len() > 1 => eprintln!("baton: {error:#}"),
            Err(error) => return Err(error),
        }
    }
    Ok(Some(all))
}

/// Asks the agents at these sockets, many at a time. `ask` gets the place in the list, the socket, and the process that
/// is to listen there.
pub fn ask_each<T: Send>(
    sockets: &[(PathBuf, Option<u32>)],
    ask: impl Fn(usize, &Path, Option<u32>) -> Result<T> + Sync,
) -> Vec<(&Path, Result<T>)> {
    let ask = &ask;
    let numbered: Vec<_> = sockets.iter().enumerate().collect();
    let looks = numbered.chunks(LOOKS).flat_map(|some| {
        std::thread::scope(|scope| {
            let begun: Vec<_> = some
                .iter()
                .map(|&(number, (socket, process))| {
                    (socket, Builder::new().spawn_scoped(scope, move || ask(number, socket, *process)))
                })
                .collect();
            begun.into_iter().map(|(socket, look)| (socket, look.map(ScopedJoinHandle::join))).collect::<Vec<_>>()
        })
    });
    let seen = |look: std::io::Result<std::thread::Result<Result<T>>>| match look {
        Ok(look) => look.unwrap_or_else(|_| bail!(PANICKED)),
        Err(error) => bail!("{NO_THREAD}: {error}"),
    };
    looks.map(|(socket, look)| (socket.as_path(), seen(look))).collect()
}

/// Why nothing is known of an agent: what it says is foreign.
const PANICKED: &str = "the look at it has ended with a panic, which is an error of this program's";
const NO_THREAD: &str = "no thread to look at it";

/// A Baton that is looked at again and again.
struct Watched {
    /// Of all that were ever found.
    number: usize,
    socket: PathBuf,
    process: Option<u32>,
    tool: Option<Tool>,
    /// By session and number.
    rows: HashMap<(u32, u32), Row>,
    statistics: Option<Statistics>,
    trouble: Option<String>,
    names: Names,
    /// Place in the agent's list of the connection that is described next.
    turn: usize,
}

/// Looks again and again at all Batons that are meant, for little: long descriptions only of connections that are new,
/// or asked for.
pub struct Watch {
    argument: SocketArgument,
    batons: Vec<Watched>,
    /// When it is found out next which Batons there are.
    search_at: u64,
    /// Batons found so far.
    found: usize,
    /// Processes that call themselves agents, but cannot be inspected.
    silent: Vec<u32>,
}

/// Connections whose details are asked for in one look, besides those on the screen.
const IN_TURN: usize = 256;

/// Time between two searches for Batons, microseconds.
const SEARCH: u64 = 5_000_000;

impl Watch {
    /// Of the Batons that are meant.
    pub fn new(argument: SocketArgument) -> Watch {
        Watch { argument, batons: Vec::new(), search_at: 0, found: 0, silent: Vec::new() }
    }

    /// Finds Batons that are new, and forgets those that are gone for good.
    fn search(&mut self, now: u64) {
        self.search_at = now + SEARCH;
        let (found, silent) = self.argument.find();
        self.silent = silent;
        self.batons.retain(|known| known.tool.is_some() || found.iter().any(|(socket, _)| *socket == known.socket));
        self.batons.iter_mut().for_each(|known| known.names = Names::default());
        for (socket, process) in found {
            match self.batons.iter_mut().find(|known| known.socket == socket) {
                Some(known) => known.process = process,
                None => {
                    let (rows, names, statistics, trouble, turn) = (HashMap::new(), Names::default(), None, None, 0);
                    let number = self.found;
                    self.found += 1;
                    self.batons.push(Watched { number, socket, process, tool: None, rows, statistics, trouble, names, turn });
                }
            }
        }
    }

    /// Looks at all of them, many at a time: one that does not answer holds up few of the others. An agent that has
    /// ended is tried again at the next look.
    pub fn refresh(&mut self) {
        let now = monotonic_micros();
        if now >= self.search_at || self.batons.iter().any(|baton| baton.tool.is_none()) {
            self.search(now);
        }
        self.each(Watched::look);
    }

    /// Calls `act` for all of them, many at a time. A failure with one Baton is a trouble of that Baton only: the look
    /// goes on with the others.
    fn each(&mut self, act: impl Fn(&mut Watched) + Sync) {
        let act = |baton: &mut Watched| {
            // What is left of it then is dropped.
            if catch_unwind(AssertUnwindSafe(|| act(baton))).is_err() {
                baton.lose(PANICKED);
            }
        };
        if let [only] = &mut self.batons[..] {
            return act(only);
        }
        let act = &act;
        for some in self.batons.chunks_mut(LOOKS) {
            let begun: Vec<bool> = std::thread::scope(|scope| {
                some.iter_mut().map(|baton| Builder::new().spawn_scoped(scope, move || act(baton)).is_ok()).collect()
            });
            some.iter_mut().zip(begun).filter(|(_, begun)| !begun).for_each(|(baton, _)| baton.lose(NO_THREAD));
        }
    }

    /// The classes of connections of all Batons that place them by measured gain, and what was measured, in the order
    /// of the Batons: of the same class each look finds the same one last.
    pub fn classes(&mut self) -> Vec<ClassInfo> {
        let answers = Mutex::new(Vec::new());
        self.each(|baton| {
            let Some(tool) = baton.tool.as_mut() else { return };
            tool.begin_round();
            // What goes wrong shows at the next look.
            if let Ok(Reply::Gain(classes)) = tool.ask(Ask::Gain) {
                answers.lock().unwrap_or_else(PoisonError::into_inner).push((baton.number, classes));
            }
        });
        let mut in_order = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
        in_order.sort_unstable_by_key(|(number, _)| *number);
        in_order.into_iter().flat_map(|(_, classes)| classes).collect()
    }

    /// Gets the long descriptions of these connections.
    pub fn describe(&mut self, keys: &[Key]) {
        self.each(|baton| {
            let number = baton.number;
            let wanted: Vec<_> =
                keys.iter().filter(|(of, ..)| *of == number).map(|(_, session, connection)| (*session, *connection)).collect();
            // What goes wrong shows at the next look.
            let Some(tool) = baton.tool.as_mut().filter(|_| !wanted.is_empty()) else { return };
            tool.begin_round();
            if let Ok(list) = tool.describe(&wanted) {
                baton.renew(list);
            }
        });
    }

    /// All connections, in no order.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.batons.iter().flat_map(|baton| baton.rows.values())
    }

    /// The connection with this key.
    pub fn row(&self, (number, session, connection): Key) -> Option<&Row> {
        self.batons.iter().find(|baton| baton.number == number)?.rows.get(&(session, connection))
    }

    /// Where the agent of the connection with this key listens.
    pub fn socket(&self, (number, ..): Key) -> Option<&Path> {
        self.batons.iter().find(|baton| baton.number == number).map(|baton| baton.socket.as_path())
    }

    /// The number of each Baton, as its rows have it, and its counters while its agent answers.
    pub fn batons(&self) -> impl Iterator<Item = (usize, Option<&Statistics>)> {
        self.batons.iter().map(|baton| (baton.number, baton.statistics.as_ref()))
    }

    /// What does not answer, and why.
    pub fn troubles(&self) -> Vec<String> {
        let troubles = self.batons.iter().filter_map(|baton| baton.trouble.clone());
        troubles.chain(self.silent.iter().map(|process| is_silent(*process))).collect()
    }
}

impl Watched {
    /// Takes new descriptions of connections.
    fn renew(&mut self, list: Vec<ConnectionInfo>) {
        for info in list {
            if let Some(row) = self.rows.get_mut(&(info.session, info.connection)) {
                row.renew(info);
            }
        }
    }

    /// Looks, and notes whether the agent has answered.
    fn look(&mut self) {
        match self.refresh() {
            Ok(()) => self.trouble = None,
            Err(error) => self.lose(&format!("{error:#}")),
        }
    }

    /// Notes that the agent gives no information, and why.
    fn lose(&mut self, why: &str) {
        (self.tool, self.statistics) = (None, None);
        self.rows.clear();
        self.trouble = Some(format!("{}: {why}", self.socket.display()));
    }

    fn refresh(&mut self) -> Result<()> {
        let mut tool = match self.tool.take() {
            Some(tool) => tool,
            None => Tool::look(&self.socket, self.process)?,
        };
        tool.begin_round();
        let (loads, now) = (tool.traffic()?, monotonic_micros());
        let statistics = tool.statistics()?;
        let unknown = self.take(&loads, now);
        for info in tool.describe(&unknown)? {
            let key = (info.session, info.connection);
            let mut row = Row::new(self.number, info, String::new());
            row.name = self.names.of(row.info.process);
            if let Ok(at) = loads.binary_search_by_key(&key, |load| (load.session, load.connection)) {
                row.serial = loads[at].serial;
                row.update(now, &loads[at]);
            }
            self.rows.insert(key, row);
        }
        // The details of the other connections are queried in turn, since lists may be sorted by them.
        let turn = if self.turn < loads.len() { self.turn } else { 0 };
        self.turn = loads.len().min(turn + IN_TURN);
        let next: Vec<_> = loads[turn..self.turn].iter().map(|load| (load.session, load.connection)).collect();
        self.renew(tool.describe(&next)?);
        (self.statistics, self.tool) = (Some(statistics), Some(tool));
        Ok(())
    }

    /// Updates known connections, and forgets those that have ended. Returns the connections that are not known yet.
    fn take(&mut self, loads: &[Load], now: u64) -> Vec<(u32, u32)> {
        let mut unknown = Vec::new();
        for load in loads {
            match self.rows.get_mut(&(load.session, load.connection)) {
                Some(row) if row.serial == load.serial => row.update(now, load),
                _ => unknown.push((load.session, load.connection)),
            }
        }
        if self.rows.len() + unknown.len() > loads.len() {
            let there = |key: &(u32, u32)| loads.binary_search_by_key(key, |load| (load.session, load.connection)).is_ok();
            self.rows.retain(|key, _| there(key));
        }
        unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::tests::nowhere;

    /// An agent may say anything.
    #[test]
    fn a_look_that_panics_is_a_trouble_of_one_agent() {
        let baton = |number: usize| Watched {
            number,
            socket: format!("/nowhere/{number}").into(),
            process: None,
            tool: None,
            rows: HashMap::new(),
            statistics: None,
            trouble: None,
            names: Names::default(),
            turn: 0,
        };
        for count in [1, 3] {
            let mut watch = Watch::new(nowhere());
            watch.batons = (0..count).map(baton).collect();
            watch.each(|baton| assert!(baton.number > 0, "as if the answer of agent {} were wrong", baton.number));
            let troubles = watch.troubles();
            assert_eq!(troubles.len(), 1, "{troubles:?}");
            assert!(troubles[0].starts_with("/nowhere/0: ") && troubles[0].contains("panic"), "{troubles:?}");
        }
    }
}
