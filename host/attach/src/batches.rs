//! Batches of work for which a program is stopped. It is stopped for a few milliseconds at a time, and then runs for as
//! long before the next batch, however many connections it has.

use crate::Attacher;
use crate::relay::Joined;
use crate::searches::{Found, Searches};
use anyhow::Result;
use baton_linux::events::monotonic_micros;
use baton_linux::freeze::{self, Frozen};
use baton_linux::process;
use baton_protocol::program::{Place, Until};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::PoisonError;
use std::time::Duration;

/// Microseconds for which a program may be stopped before no further work is begun, and the most that it then runs
/// before the next batch.
const PAUSE: u64 = 3_000;

/// Microseconds before the next try to stop a process that did not stop: the first pause, and the longest. The pause
/// doubles, since other programs' connections stand still during a try.
const AGAIN: u64 = 5_000;
const SELDOM: u64 = 1_000_000;

/// Microseconds after which the agent is asked again to end a connection, if it has refused for now.
const BUSY: u64 = 5_000;

/// Microseconds after which a process that did not stop, and was not tried again, is forgotten.
const FORGOTTEN: u64 = 60_000_000;

/// After this many consecutive failures to stop a process, attaching no longer waits for it.
const ATTEMPTS: u32 = 10;

/// Microseconds for which an attacher tries to stop its programs when the agent needs their descriptors. The agent
/// waits for three seconds.
pub(crate) const LENDING: u64 = 2_000_000;

/// Least microseconds between two checks of all connections and processes after events were lost.
const EVERYTHING: u64 = 1_000_000;

/// Searching processes' descriptors may take one part in this many of the attacher's time.
const LOOKING: u64 = 10;

/// Microseconds after which the results of late searches are collected.
const LATE: u64 = 50_000;

/// Longest delay of the next search in microseconds after the agent has refused sockets for now.
const REFUSED: u64 = 5_000_000;

/// Microseconds that the first searches of an attacher may take.
const STARTING: u64 = 5_000_000;

/// Number of engines that are made in advance, while the program runs, for the next batch of moves.
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
    /// Connections that have ended or were closed, and that the agent has refused to end for now; and when it is asked
    /// again. No program is stopped for that.
    pub over: BTreeSet<u32>,
    next_over: u64,
    /// Connections that could not be restored when the NIC died.
    pub lost_ones: BTreeSet<u32>,
    /// Restores, with their causes.
    pub postponed: BTreeMap<u32, Option<(String, Until)>>,
    /// Moves that the agent has asked for.
    pub wanted: BTreeMap<u32, Place>,
    /// The numbers after the last postponed and the last wanted move that were tried, so that all get their turn.
    next_postponed: u32,
    next_wanted: u32,
    /// Engines for offloads.
    pub engines: Vec<Joined>,
    /// Times before which no program is stopped again, and before which no descriptors are searched.
    next_pause: u64,
    next_search: u64,
    /// The agent has refused a socket for now since the last search, and how long the next search waits then.
    refused: bool,
    pub delay: u64,
    /// Processes that did not stop.
    restless: BTreeMap<u32, Restless>,
    /// Events were lost, so that all connections and processes have to be checked; and when that may be.
    pub lost: bool,
    next_everything: u64,
    /// Number of failures in a row to stop a process.
    failures: u32,
}

/// A process that did not stop: the number of consecutive failures, and when it is tried again.
#[derive(Default)]
struct Restless {
    failures: u32,
    next: u64,
}

/// The stopped processes.
pub(crate) struct Stopped {
    frozen: Frozen,
    processes: BTreeSet<u32>,
    since: u64,
    /// Time when the last of their threads had stopped.
    stopped: u64,
}

impl Work {
    /// Requests the restore of a connection for a cause, unless its restore was requested already.
    pub fn postpone(&mut self, number: u32, (reason, until): (&str, Until)) {
        self.postponed.entry(number).or_insert_with(|| Some((reason.to_owned(), until)));
    }

    /// Number of tasks that wait for a batch.
    fn waiting(&self) -> usize {
        self.found.len() + self.changed.len() + self.lost_ones.len() + self.postponed.len() + self.wanted.len()
    }

    /// Number of connections that a detach waits for: without that, bytes and FIN of connections that are closed and
    /// not ended yet would be lost.
    fn left(&self) -> usize {
        self.postponed.len() + self.over.len()
    }

    /// Schedules another request to the agent to end a connection, a little later.
    pub fn end_later(&mut self, number: u32, now: u64) {
        if self.over.is_empty() {
            self.next_over = now + BUSY;
        }
        self.over.insert(number);
    }

    /// Takes the connections that the agent is to be asked again to end now.
    pub fn take_over(&mut self, now: u64) -> BTreeSet<u32> {
        if now < self.next_over { BTreeSet::new() } else { std::mem::take(&mut self.over) }
    }

    /// Schedules another search of a process, since the agent has refused one of its sockets for now: at growing
    /// intervals, until the agent accepts one.
    pub fn search_later(&mut self, process: u32) {
        self.processes.insert(process);
        if !std::mem::replace(&mut self.refused, true) {
            self.delay = (2 * self.delay).clamp(LATE, REFUSED);
            self.next_search = self.next_search.max(monotonic_micros() + self.delay);
        }
    }

    /// Puts a process off that did not stop.
    fn put_off(&mut self, process: u32, now: u64) {
        // Forgets processes that have probably ended.
        self.restless.retain(|_, restless| now < restless.next + FORGOTTEN);
        let restless = self.restless.entry(process).or_default();
        restless.next = now + (AGAIN << restless.failures.min(16)).min(SELDOM);
        restless.failures += 1;
        self.failures += 1;
    }

    /// Whether a process did not stop, and is not to be tried yet.
    fn is_put_off(&self, process: u32, now: u64) -> bool {
        self.restless.get(&process).is_some_and(|restless| now < restless.next)
    }

    /// When the next of the processes that are put off may be tried.
    fn next_try(&self, now: u64) -> Option<u64> {
        self.restless.values().map(|restless| restless.next).filter(|next| *next > now).min()
    }
}

/// Takes the entry of a number, or the next one after it, and records where to continue.
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

    /// Time until the next batch; None if no work waits.
    pub(crate) fn until_next_batch(&self) -> Option<Duration> {
        let late = freeze::any_late().then(|| monotonic_micros() + AGAIN);
        let pause = (self.work.waiting() > 0 && !self.silent).then_some(self.work.next_pause);
        let over = (!self.work.over.is_empty() && !self.silent).then_some(self.work.next_over);
        let everything = self.work.lost.then_some(self.work.next_everything);
        let searches = !self.work.processes.is_empty() || self.work.searches.any_under_way();
        let look = searches.then_some(self.work.next_search);
        let due = [late, pause, over, look, everything, self.next_look()].into_iter().flatten().min()?;
        Some(Duration::from_micros(due.saturating_sub(monotonic_micros())))
    }

    /// Does waiting work, as long as a program may be stopped.
    pub(crate) fn run_batch(&mut self) -> Result<()> {
        freeze::release_late();
        self.look_at_everything();
        self.look_for_sockets();
        self.end_what_is_over()?;
        if self.silent || self.work.waiting() == 0 || monotonic_micros() < self.work.next_pause {
            // Programs may have been stopped for the agent while an answer of it was awaited: let them run.
            self.thaw();
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
        let mut failures = self.work.failures;
        let waiting = self.work.waiting();
        // Work that does not succeed waits for the next batch.
        let mut changed = std::mem::take(&mut self.work.changed);
        let mut lost_ones = std::mem::take(&mut self.work.lost_ones);
        let mut found = self.work.found.len();
        let mut postponed = self.work.postponed.len();
        let mut wanted = self.work.wanted.len();
        // The time is counted from when all threads have stopped: until then the program runs.
        let stopped = |attacher: &Attacher| attacher.frozen.as_ref().map_or(begun, |stopped| stopped.stopped);
        while monotonic_micros() < stopped(self) + PAUSE && self.work.failures <= failures && !self.silent {
            failures = self.work.failures;
            let work = &mut self.work;
            if let Some(number) = changed.pop_first() {
                self.state_changed(number)?;
            } else if let Some(number) = lost_ones.pop_first() {
                self.end_lost(number)?;
            } else if postponed > 0
                && let Some((number, cause)) = take_next(&mut work.postponed, &mut work.next_postponed)
            {
                postponed -= 1;
                if self.is_put_off(number) {
                    self.work.postponed.insert(number, cause);
                    continue;
                }
                self.move_to_kernel(number, cause.as_ref().map(|(reason, until)| (reason.as_str(), *until)))?;
            } else if found > 0
                && let Some(socket) = work.found.pop_front()
            {
                found -= 1;
                self.register_found(socket)?;
            } else if wanted > 0
                && let Some((number, to)) = take_next(&mut work.wanted, &mut work.next_wanted)
            {
                wanted -= 1;
                if self.is_put_off(number) {
                    self.work.wanted.insert(number, to);
                    continue;
                }
                match to {
                    Place::Nic => self.move_to_nic(number)?,
                    Place::Kernel => self.move_to_kernel(number, None)?,
                }
            } else {
                break;
            }
        }
        let failed = self.work.failures > failures;
        self.thaw();
        let work = &mut self.work;
        work.changed.append(&mut changed);
        work.lost_ones.append(&mut lost_ones);
        let now = monotonic_micros();
        let pause = now + PAUSE.min(now - begun);
        // If all work waits for processes that were put off, there is nothing to do before their next try.
        let stands_still = work.waiting() >= waiting && !failed;
        work.next_pause = if stands_still { work.next_try(now).unwrap_or(pause).max(pause) } else { pause };
        Ok(())
    }

    /// Schedules a check of every connection and every process, after events were lost.
    fn look_at_everything(&mut self) {
        let now = monotonic_micros();
        if !self.work.lost || now < self.work.next_everything {
            return;
        }
        self.work.lost = false;
        self.work.changed.extend(self.entries.keys());
        self.notified.lock().unwrap_or_else(PoisonError::into_inner).extend(self.entries.keys());
        // This waits for none of them, and only sockets of the selected ports are found.
        self.work.processes.extend(self.settings.target.candidates());
        self.work.next_everything = monotonic_micros() + EVERYTHING;
    }

    /// Searches processes for sockets that may be new. They run meanwhile.
    fn look_for_sockets(&mut self) {
        let work = &mut self.work;
        let begun = monotonic_micros();
        if begun < work.next_search || work.processes.is_empty() && !work.searches.any_under_way() {
            return;
        }
        work.refused = false;
        let found = work.searches.search(&mut work.processes);
        // No program is stopped for sockets of other ports.
        let selected = if found.is_empty() { None } else { self.settings.target.sockets() };
        let is_selected = |inode: &u64| selected.as_ref().is_none_or(|selected| selected.contains(inode));
        let waiting: BTreeSet<u64> = work.found.iter().map(|(_, _, inode)| *inode).collect();
        let mut took = 0;
        for Found { process, sockets, took: this } in found {
            let new = sockets
                .into_iter()
                .filter(|(_, inode)| !self.known.contains(*inode) && !waiting.contains(inode) && is_selected(inode));
            work.found.extend(new.map(|(fd, inode)| (process, fd, inode)));
            took += this;
        }
        let now = monotonic_micros();
        let wait = if work.searches.any_under_way() || !work.processes.is_empty() { LATE } else { 0 };
        work.next_search = now + wait.max(took * LOOKING).max((now - begun) * LOOKING);
    }

    /// Stops a process and registers a socket that was found.
    fn register_found(&mut self, (process, fd, inode): (u32, i32, u64)) -> Result<()> {
        if self.known.contains(inode) {
            return Ok(());
        }
        if self.stop_users(process).is_err() {
            self.work.found.push_back((process, fd, inode));
            return Ok(());
        }
        self.discover(process, fd, inode)
    }

    /// Whether a connection's process did not stop, and is not to be tried yet.
    fn is_put_off(&self, number: u32) -> bool {
        let process = self.entries.get(&number).map(|entry| entry.process);
        process.is_some_and(|process| self.work.is_put_off(process, monotonic_micros()))
    }

    /// Stops the processes that may use a connection's socket. A process that did not stop is not tried again at once.
    pub(crate) fn stop_users(&mut self, process: u32) -> Result<()> {
        if self.work.is_put_off(process, monotonic_micros()) {
            anyhow::bail!("process {process} did not stop");
        }
        let stopped = self.stop(process);
        if stopped.is_err() {
            // Other stopped programs must not wait for it.
            self.thaw();
            self.work.put_off(process, monotonic_micros());
        } else {
            self.work.failures = 0;
            self.work.restless.remove(&process);
        }
        stopped
    }

    /// Stops the users of a connection's socket for the agent, which restores connections of theirs; processes that are
    /// stopped already stay stopped. Returns whether all are stopped.
    pub(crate) fn stop_for_lending(&mut self, process: u32, until: u64) -> bool {
        loop {
            match self.stop(process) {
                Ok(()) => return true,
                Err(_) if monotonic_micros() >= until => return false,
                // The process may be traced by another one, which ends without an event: try again.
                Err(_) => std::thread::sleep(Duration::from_micros(AGAIN)),
            }
        }
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

    /// Lets the stopped programs run.
    pub(crate) fn thaw(&mut self) {
        if let Some(Stopped { frozen, since, .. }) = self.frozen.take() {
            drop(frozen);
            self.pauses.add((monotonic_micros() - since) as u32);
        }
    }

    /// Restores every connection, and has the agent end those that their programs have closed; meanwhile bytes of the
    /// others are copied.
    pub(crate) fn restore_everything(&mut self) -> Result<()> {
        let numbers = self.entries.iter().filter(|(_, entry)| entry.joined.is_some()).map(|(number, _)| *number);
        self.work.postponed = numbers.map(|number| (number, Some(("detached".to_owned(), Until::Never)))).collect();
        let (mut left, mut since) = (usize::MAX, monotonic_micros());
        while self.work.left() > 0 {
            self.work.found.clear();
            self.work.processes.clear();
            self.work.wanted.clear();
            self.round()?;
            let now = monotonic_micros();
            if self.work.left() < left {
                (left, since) = (self.work.left(), now);
            } else if now > since + DETACH_PATIENCE {
                anyhow::bail!("{left} connections do not leave the NIC; they end with this process");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that does not stop is tried at growing intervals, and does not delay others.
    #[test]
    fn a_process_that_does_not_stop_is_put_off() {
        let (mut work, mut now, mut times) = (Work::default(), 1_000_000, 0);
        let end = now + 60_000_000;
        while now < end {
            work.put_off(1, now);
            times += 1;
            assert!(work.is_put_off(1, now) && !work.is_put_off(2, now));
            let next = work.next_try(now).expect("a time");
            assert!((AGAIN..=SELDOM).contains(&(next - now)) && !work.is_put_off(1, next), "after {} microseconds", next - now);
            now = next;
        }
        assert!(times < 80, "{times} times in a minute");
        // It is forgotten when another process does not stop long after that.
        work.put_off(2, now + SELDOM + FORGOTTEN);
        assert_eq!(work.restless.len(), 1);
    }

    /// No program is stopped for connections that the agent has refused to end for now. The agent is asked again soon,
    /// even if it refuses others meanwhile, and a detach waits for that.
    #[test]
    fn no_program_stands_still_for_what_is_over() {
        let (mut work, begun) = (Work::default(), 1_000_000);
        assert_eq!((work.take_over(begun), work.left()), (BTreeSet::new(), 0));
        work.end_later(7, begun);
        work.end_later(9, begun + BUSY / 2);
        assert_eq!((work.waiting(), work.left()), (0, 2));
        assert_eq!(work.take_over(begun + BUSY - 1), BTreeSet::new());
        assert_eq!(work.take_over(begun + BUSY), BTreeSet::from([7, 9]));
        // One of them is refused once more.
        work.end_later(9, begun + BUSY);
        assert_eq!((work.left(), work.take_over(begun + 2 * BUSY - 1)), (1, BTreeSet::new()));
        assert_eq!((work.take_over(begun + 2 * BUSY), work.left()), (BTreeSet::from([9]), 0));
    }
}
