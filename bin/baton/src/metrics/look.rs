//! Looks at all selected Batons when a client asks, but at most once a second.

use super::families::{Baton, Family, Own, families};
use crate::list::looks::ask_each;
use crate::tools::SocketArgument;
use baton_client::tool::Tool;
use baton_client::{DEFAULT_SOCKET, named_socket};
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_protocol::events::ProgramCounts;
use baton_protocol::program::Statistics;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Most Batons that are listed: each has some hundred lines.
const MOST: usize = 16;

/// Microseconds for which a Baton that has ended is still listed, as down: longer than the usual five minutes after
/// which Prometheus takes a value for gone.
const REMEMBERED: u64 = 600_000_000;

/// Microseconds for which a look is good.
const FRESH: u64 = 1_000_000;

/// Looks at Batons.
pub struct Looker {
    argument: SocketArgument,
    /// When each was found last, microseconds of the monotonic clock.
    found: BTreeMap<PathBuf, u64>,
    /// The last look.
    seen: Option<Seen>,
}

/// The result of a look.
struct Seen {
    at: u64,
    batons: Vec<Baton>,
    took: f64,
    left_out: usize,
}

impl Looker {
    /// At the Batons that this argument means.
    pub fn new(argument: SocketArgument) -> Looker {
        Looker { argument, found: BTreeMap::new(), seen: None }
    }

    /// When the last look was, microseconds of the monotonic clock; 0 if there was none. It changes with each look.
    pub fn seen_at(&self) -> u64 {
        self.seen.as_ref().map_or(0, |seen| seen.at)
    }

    /// Looks, if the last look is too old.
    pub fn renew(&mut self) {
        let now = monotonic_micros();
        if self.seen.as_ref().is_none_or(|seen| now.saturating_sub(seen.at) >= FRESH) {
            self.seen = Some(self.look(now));
        }
    }

    /// The result of the last look, as metric families.
    pub fn families(&self, own: Own) -> Vec<Family> {
        let only = Some(process::user()).filter(|user| *user != 0);
        match &self.seen {
            Some(seen) => families(&seen.batons, Own { took: seen.took, left_out: seen.left_out, ..own }, only),
            None => families(&[], own, only),
        }
    }

    fn look(&mut self, began: u64) -> Seen {
        let (mut sockets, _) = self.argument.find();
        for (socket, _) in &sockets {
            self.found.insert(socket.clone(), began);
        }
        self.found.retain(|_, at| began.saturating_sub(*at) < REMEMBERED);
        let gone: Vec<_> =
            self.found.keys().filter(|socket| sockets.iter().all(|(found, _)| found != *socket)).cloned().collect();
        sockets.sort();
        let left_out = sockets.len().saturating_sub(MOST);
        sockets.truncate(MOST);
        let answers = ask_each(&sockets, |_, socket, process| ask(socket, process));
        let mut batons: Vec<Baton> =
            answers.into_iter().map(|(socket, answer)| Baton { socket: socket.to_owned(), answer: answer.ok() }).collect();
        batons.extend(gone.into_iter().map(|socket| Baton { socket, answer: None }));
        // The one of `baton up` is missed from the beginning.
        if batons.is_empty() {
            batons.push(Baton { socket: named_socket().unwrap_or_else(|| DEFAULT_SOCKET.into()), answer: None });
        }
        batons.truncate(MOST);
        let took = monotonic_micros().saturating_sub(began) as f64 / 1e6;
        Seen { at: began, batons, took, left_out }
    }
}

fn ask(socket: &Path, process: Option<u32>) -> anyhow::Result<(Statistics, Vec<ProgramCounts>)> {
    let mut tool = Tool::look(socket, process)?;
    let (statistics, counts) = (tool.statistics()?, tool.counts()?);
    // Between two parts of the list one may have come before another: each is to be there once.
    let counts: BTreeMap<_, _> = counts.into_iter().map(|one| ((one.user, one.program.clone()), one)).collect();
    Ok((statistics, counts.into_values().collect()))
}
