//! What an agent lists of its connections while frames are captured: which connections there are, and their events.

use super::merge::{Flow, flow};
use crate::list::events::Event;
use baton_client::tool::Tool;
use baton_linux::events::{monotonic_micros, realtime_nanos};
use baton_protocol::program::ConnectionInfo;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(50);

/// Connections whose events are queried in turn at each look, besides connections that are new or have moved.
const IN_TURN: usize = 128;

/// What is new in the agent's lists.
pub enum Update {
    /// The agent has this connection.
    Has(Flow),
    /// Something has happened to a connection, at that time in nanoseconds since 1970.
    Happened(Flow, u64, String),
    /// This was the last look, which was asked for.
    Last,
}

/// A connection, and its events so far.
struct Known {
    serial: u64,
    moves: u32,
    flow: Flow,
    ends: String,
    reported: Vec<Dated>,
}

/// An event, and between which microseconds of the monotonic clock it was.
#[derive(Clone, PartialEq, Debug)]
struct Dated {
    text: String,
    between: (u64, u64),
}

/// Those of `events` that are not among `known`: each of these counts for one with its text, whose times may be its
/// own. `between` are the times of the request and of the answer that says how long ago they were.
fn new_ones(known: &mut Vec<Dated>, events: &[Event], between: (u64, u64), numbers: bool) -> Vec<Dated> {
    let mut rest = std::mem::take(known);
    let mut new = Vec::new();
    for event in events {
        let ago = event.ago_us();
        let dated = Dated { text: event.text(numbers), between: (between.0.saturating_sub(ago), between.1.saturating_sub(ago)) };
        let same = |old: &Dated| old.text == dated.text && old.between.0 <= dated.between.1 && dated.between.0 <= old.between.1;
        match rest.iter().position(same) {
            Some(at) => known.push(rest.remove(at)),
            None => {
                known.push(dated.clone());
                new.push(dated);
            }
        }
    }
    new
}

/// Looks at the connections of the agent at a path again and again, until nobody wants to know any more, or a last look
/// is asked for.
pub fn watch(socket: PathBuf) -> std::io::Result<(Receiver<Update>, Sender<()>)> {
    let (sender, receiver) = sync_channel(4096);
    let (ask, asked) = channel();
    // Not in the thread, which may begin late on a busy machine: what happens from now on counts.
    let began = monotonic_micros();
    std::thread::Builder::new().name("baton updates".into()).spawn(move || {
        let mut watcher = Watcher { known: HashMap::new(), turn: 0, began, numbers: false };
        let (mut tool, mut last) = (None, false);
        loop {
            let connected = tool.take().map_or_else(|| Tool::look(&socket, None), Ok);
            // An agent that has ended has a successor soon; if not, the capturing thread notices that.
            if let Ok(mut connected) = connected
                && let Ok(updates) = watcher.look(&mut connected)
            {
                tool = Some(connected);
                if !deliver(&sender, updates) {
                    return;
                }
            }
            if last {
                deliver(&sender, vec![Update::Last]);
                return;
            }
            match asked.recv_timeout(PERIOD) {
                Ok(()) => last = true,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    })?;
    Ok((receiver, ask))
}

fn deliver(sender: &SyncSender<Update>, updates: Vec<Update>) -> bool {
    updates.into_iter().all(|one| sender.send(one).is_ok())
}

struct Watcher {
    known: HashMap<(u32, u32), Known>,
    turn: usize,
    /// Microseconds of the monotonic clock.
    began: u64,
    numbers: bool,
}

fn flow_of(info: &ConnectionInfo) -> Option<Flow> {
    let end = |text: &str| text.parse::<SocketAddr>().ok().map(Into::into);
    Some(flow(end(&info.local)?, end(&info.peer)?))
}

impl Watcher {
    fn look(&mut self, tool: &mut Tool) -> anyhow::Result<Vec<Update>> {
        tool.begin_round();
        let loads = tool.traffic()?;
        let mut updates = Vec::new();
        let (mut unknown, mut changed) = (Vec::new(), Vec::new());
        for load in &loads {
            let key = (load.session, load.connection);
            match self.known.get_mut(&key) {
                Some(known) if known.serial == load.serial => {
                    if std::mem::replace(&mut known.moves, load.moves) != load.moves {
                        changed.push(key);
                    }
                }
                _ => unknown.push((key, load.serial, load.moves)),
            }
        }
        let keys: Vec<_> = unknown.iter().map(|(key, ..)| *key).collect();
        for info in tool.describe(&keys)? {
            let key = (info.session, info.connection);
            let found = unknown.iter().find(|(unknown, ..)| *unknown == key);
            let (Some(flow), Some(&(_, serial, moves))) = (flow_of(&info), found) else { continue };
            updates.push(Update::Has(flow));
            let ends = format!("{} - {}", info.local, info.peer);
            self.known.insert(key, Known { serial, moves, flow, ends, reported: Vec::new() });
            changed.push(key);
        }
        // One that has ended is of no interest any more.
        let there = |key: &(u32, u32)| loads.binary_search_by_key(key, |load| (load.session, load.connection)).is_ok();
        self.known.retain(|key, _| there(key));
        let begin = if self.turn < loads.len() { self.turn } else { 0 };
        self.turn = loads.len().min(begin + IN_TURN);
        let in_turn = loads[begin..self.turn].iter().map(|load| (load.session, load.connection));
        let in_turn: Vec<_> = in_turn.filter(|key| !changed.contains(key)).collect();
        changed.extend(in_turn);
        let asked = monotonic_micros();
        let lists = tool.events(&changed)?;
        let (answered, realtime) = (monotonic_micros(), realtime_nanos());
        for (key, events) in Event::by_connection(&lists) {
            let Some(known) = self.known.get_mut(&key) else { continue };
            for Dated { text, between } in new_ones(&mut known.reported, &events, (asked, answered), self.numbers) {
                // Earlier events belong to no packet that is captured.
                if between.1 >= self.began {
                    let at = realtime.saturating_sub((answered - between.0.min(answered)) * 1000);
                    updates.push(Update::Happened(known.flow, at, format!("{}: {text}", known.ends)));
                }
            }
        }
        Ok(updates)
    }
}
