//! Batches of work for which a program stands still: it stands still for a few milliseconds at a time, and then runs for as long
//! before the next one, however many connections it has.

use crate::Attacher;
use crate::relay::Joined;
use crate::searches::{Found, Searches};
use anyhow::Result;
use baton_linux::events::monotonic_micros;
use baton_linux::freeze::{self, Frozen};
use baton_linux::process;
use baton_protocol::program::{Place, Until};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Microseconds of standing still after which no further work is begun, and that the program runs at most before the next batch.
const PAUSE: u64 = 3_000;

/// Microseconds after which a process that did not stop is tried again.
const AGAIN: u64 = 5_000;

/// After this many failures in a row to stop a process, it is not waited for any more when attaching, nor searched for sockets
/// until it has new ones.
const ATTEMPTS: u32 = 100;

/// Searching a process's descriptors may take one part in this many of this process's time.
const LOOKING: u64 = 10;

/// Microseconds after which is looked what late searches have found.
const LATE: u64 = 50_000;

/// Microseconds that the searches may take with which an attacher starts.
const STARTING: u64 = 5_000_000;

/// Engines that are made while the program runs, for the next batch of moves.
const SPARE: usize = 8;

/// Microseconds without progress after which connections that do not leave the NIC are abandoned.
const DETACH_PATIENCE: u64 = 20_000_000;

/// Work that waits until its process can be stopped.
#[derive(Default)]
pub(crate) struct Work {
    /// Processes that may have sockets that are not registered.
    pub processes: BTreeSet<u32>,
    /// Searches of such processes.
    searches: Searches,
    /// When the attacher began, microseconds.
    pub begun: u64,
    /// Sockets that are not registered: process, descriptor, inode.
    found: VecDeque<(u32, i32, u64)>,
    /// Sockets whose state has changed.
    pub changed: BTreeSet<u32>,
    /// Restores, with their causes.
    pub postponed: BTreeMap<u32, Option<(String, Until)>>,
    /// Moves that the agent wants.
    pub wanted: BTreeMap<u32, Place>,
    /// The numbers after the last postponed and the last wanted move that were tried, so that all have their turn.
    next_postponed: u32,
    next_wanted: u32,
    /// Engines for offloads.
    pub engines: Vec<Joined>,
    /// Times before which no program stands still again, and before which no descriptors are searched.
    next_pause: u64,
    next_search: u64,
    /// Number of failures in a row to stop a process.
    pub failures: u32,
}

/// The processes that stand still.
pub(crate) struct Stopped {
    frozen: Frozen,
    processes: BTreeSet<u32>,
    since: u64,
    /// Time when the last of their threads had stopped.
    stopped: u64,
}

impl Work {
    /// Has a connection restored for a cause, unless that is going to happen anyway.
    pub fn postpone(&mut self, number: u32, (reason, until): (&str, Until)) {
        self.postponed.entry(number).or_insert_with(|| Some((reason.to_owned(), until)));
    }

    fn waits_for_pause(&self) -> bool {
        !(self.found.is_empty() && self.changed.is_empty() && self.postponed.is_empty() && self.wanted.is_empty())
    }
}

/// Takes the entry of a number, or the next one after it, and records where to go on.
fn take_next<T>(entries: &mut BTreeMap<u32, T>, next: &mut u32) -> Option<(u32, T)> {
    let number = *entries.range(*next..).next().or_else(|| entries.first_key_value())?.0;
    *next = number.wrapping_add(1);
    entries.remove_entry(&number)
}

impl Attacher {
    /// Whether the sockets that existed at the beginning have not all been examined yet, and moved if they are to move.
    pub(crate) fn is_starting(&self) -> bool {
        let work = &self.work;
        let moves = self.settings.flip.is_none() && !work.wanted.is_empty();
        let searches = !work.processes.is_empty() || work.searches.any_under_way();
        let searches = searches && monotonic_micros() < work.begun + STARTING;
        (moves || searches || !work.found.is_empty()) && work.failures < ATTEMPTS
    }

    /// How long there is nothing to do.
    pub(crate) fn until_next_batch(&self) -> Option<Duration> {
        let late = freeze::any_late().then(|| monotonic_micros() + AGAIN);
        let pause = (self.work.waits_for_pause() && !self.silent).then_some(self.work.next_pause);
        let searches = !self.work.processes.is_empty() || self.work.searches.any_under_way();
        let look = searches.then_some(self.work.next_search);
        let due = [late, pause, look, self.next_look()].into_iter().flatten().min()?;
        Some(Duration::from_micros(due.saturating_sub(monotonic_micros())))
    }

    /// Does what waits, for as long as a program may stand still.
    pub(crate) fn run_batch(&mut self) -> Result<()> {
        freeze::release_late();
        self.look_for_sockets();
        if self.silent || !self.work.waits_for_pause() || monotonic_micros() < self.work.next_pause {
            return Ok(());
        }
        while !self.work.wanted.is_empty() && self.work.engines.len() < SPARE {
            match Joined::new() {
                Ok(engine) => self.work.engines.push(engine),
                // The move will report the error.
                Err(_) => break,
            }
        }
        let begun = monotonic_micros();
        let failures = self.work.failures;
        // What does not succeed waits for the next batch.
        let mut postponed = self.work.postponed.len();
        let mut wanted = self.work.wanted.len();
        // Until its threads have stopped, the program runs.
        let stopped = |attacher: &Attacher| attacher.frozen.as_ref().map_or(begun, |stopped| stopped.stopped);
        while monotonic_micros() < stopped(self) + PAUSE && self.work.failures == failures && !self.silent {
            let work = &mut self.work;
            if let Some(number) = work.changed.pop_first() {
                self.state_changed(number)?;
            } else if postponed > 0
                && let Some((number, cause)) = take_next(&mut work.postponed, &mut work.next_postponed)
            {
                postponed -= 1;
                self.move_to_kernel(number, cause.as_ref().map(|(reason, until)| (reason.as_str(), *until)))?;
            } else if let Some(socket) = work.found.pop_front() {
                self.register_found(socket)?;
            } else if wanted > 0
                && let Some((number, to)) = take_next(&mut work.wanted, &mut work.next_wanted)
            {
                wanted -= 1;
                match to {
                    Place::Nic => self.move_to_nic(number)?,
                    Place::Kernel => self.move_to_kernel(number, None)?,
                }
            } else {
                break;
            }
        }
        self.thaw();
        let now = monotonic_micros();
        if self.work.failures == failures {
            self.work.failures = 0;
            self.work.next_pause = now + PAUSE.min(now - begun);
        } else {
            self.work.next_pause = now + AGAIN;
        }
        Ok(())
    }

    /// Searches processes for sockets that may be new. They run meanwhile.
    fn look_for_sockets(&mut self) {
        let work = &mut self.work;
        let begun = monotonic_micros();
        if begun < work.next_search || work.processes.is_empty() && !work.searches.any_under_way() {
            return;
        }
        let found = work.searches.search(&mut work.processes);
        let waiting: BTreeSet<u64> = work.found.iter().map(|(_, _, inode)| *inode).collect();
        let mut took = 0;
        for Found { process, sockets, took: this } in found {
            let new = sockets.into_iter().filter(|(_, inode)| !self.inodes.contains(inode) && !waiting.contains(inode));
            work.found.extend(new.map(|(fd, inode)| (process, fd, inode)));
            took += this;
        }
        let now = monotonic_micros();
        let wait = if work.searches.any_under_way() || !work.processes.is_empty() { LATE } else { 0 };
        work.next_search = now + wait.max(took * LOOKING).max((now - begun) * LOOKING);
    }

    /// Stops a process and registers a socket that was found.
    fn register_found(&mut self, (process, fd, inode): (u32, i32, u64)) -> Result<()> {
        if self.inodes.contains(&inode) {
            return Ok(());
        }
        if let Err(error) = self.stop_users(process) {
            if self.work.failures < ATTEMPTS {
                self.work.found.push_back((process, fd, inode));
            } else {
                self.note_stay(&format!("{error:#}"));
            }
            return Ok(());
        }
        self.discover(process, fd, inode)
    }

    /// Stops the processes that may use a connection's socket.
    pub(crate) fn stop_users(&mut self, process: u32) -> Result<()> {
        let stopped = self.stop(process);
        if stopped.is_err() {
            // Others that stand still must not wait for it.
            self.thaw();
            self.work.failures += 1;
        }
        stopped
    }

    fn stop(&mut self, process: u32) -> Result<()> {
        use anyhow::Context;
        let stopped = self.frozen.get_or_insert_with(|| Stopped {
            frozen: Frozen::default(),
            processes: BTreeSet::new(),
            since: monotonic_micros(),
            stopped: 0,
        });
        if stopped.processes.contains(&process) {
            return Ok(());
        }
        stopped.frozen.add(process).with_context(|| format!("stopping process {process}"))?;
        // A stopped process starts no further children.
        for child in process::children(process) {
            stopped.frozen.add(child).with_context(|| format!("stopping process {child}"))?;
        }
        stopped.processes.insert(process);
        stopped.stopped = monotonic_micros();
        Ok(())
    }

    /// Lets the programs go on.
    pub(crate) fn thaw(&mut self) {
        if let Some(Stopped { frozen, since, .. }) = self.frozen.take() {
            drop(frozen);
            self.pauses.push((monotonic_micros() - since) as u32);
        }
    }

    /// Restores every connection; meanwhile bytes of the others are copied.
    pub(crate) fn restore_everything(&mut self) -> Result<()> {
        let numbers = self.entries.iter().filter(|(_, entry)| entry.joined.is_some()).map(|(number, _)| *number);
        self.work.postponed = numbers.map(|number| (number, Some(("detached".to_owned(), Until::Never)))).collect();
        let (mut left, mut since) = (usize::MAX, monotonic_micros());
        while !self.work.postponed.is_empty() {
            self.work.found.clear();
            self.work.processes.clear();
            self.work.wanted.clear();
            self.round()?;
            let now = monotonic_micros();
            if self.work.postponed.len() < left {
                (left, since) = (self.work.postponed.len(), now);
            } else if now > since + DETACH_PATIENCE {
                anyhow::bail!("{left} connections do not leave the NIC; they end with this process");
            }
        }
        Ok(())
    }
}
