//! What a program stands still for is done in batches: it stands still for a few milliseconds, and goes on for as long before it stands
//! still again, however many connections it has.

use crate::Attacher;
use crate::relay::Joined;
use anyhow::Result;
use baton_linux::events::monotonic_micros;
use baton_linux::freeze::{self, Frozen};
use baton_linux::process;
use baton_protocol::program::{Place, Until};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Microseconds of standing still after which nothing more is begun, and that a program has for itself then.
const PAUSE: u64 = 3_000;

/// Microseconds after which a process that did not stop is tried again.
const AGAIN: u64 = 5_000;

/// A process that did not stop so often in a row is not waited for when a program is attached to, nor asked for its sockets until it has
/// new ones.
const ATTEMPTS: u32 = 100;

/// Looking through a process' descriptors may take one part in so many of this process' time.
const LOOKING: u64 = 10;

/// Engines that are made while the program runs, for the next batch of moves.
const SPARE: usize = 8;

/// Microseconds without progress after which connections that do not leave the NIC are left behind.
const DETACH_PATIENCE: u64 = 20_000_000;

/// What waits until its process can be stopped.
#[derive(Default)]
pub(crate) struct Work {
    /// Processes that may have sockets that are not known.
    pub processes: BTreeSet<u32>,
    /// Sockets that are not known: process, descriptor, inode.
    found: VecDeque<(u32, i32, u64)>,
    /// Sockets whose state has changed.
    pub changed: BTreeSet<u32>,
    /// Moves to the kernel with their causes.
    pub postponed: BTreeMap<u32, Option<(String, Until)>>,
    /// Moves that the agent wants.
    pub wanted: BTreeMap<u32, Place>,
    /// The numbers after those of the last postponed move and of the last that was wanted: all have their turn.
    next_postponed: u32,
    next_wanted: u32,
    /// Engines for moves to the NIC.
    pub engines: Vec<Joined>,
    /// Not before this time does a program stand still again, and not before that one are descriptors looked through.
    rests_until: u64,
    looks_at: u64,
    /// How often in a row a process did not stop.
    pub failures: u32,
}

/// What stands still.
pub(crate) struct Still {
    frozen: Frozen,
    processes: BTreeSet<u32>,
    since: u64,
    /// When the last of its threads had come to stop.
    stopped: u64,
}

impl Work {
    fn waits_for_pause(&self) -> bool {
        !(self.found.is_empty() && self.changed.is_empty() && self.postponed.is_empty() && self.wanted.is_empty())
    }
}

/// Takes the entry at a number, or the next one behind it, and notes where it goes on.
fn take_next<T>(entries: &mut BTreeMap<u32, T>, next: &mut u32) -> Option<(u32, T)> {
    let number = *entries.range(*next..).next().or_else(|| entries.first_key_value())?.0;
    *next = number.wrapping_add(1);
    entries.remove_entry(&number)
}

impl Attacher {
    /// Whether the sockets that there were at the beginning have not all been looked at, and moved if they are to.
    pub(crate) fn has_begun_only(&self) -> bool {
        let work = &self.work;
        let moves = self.settings.flip.is_none() && !work.wanted.is_empty();
        (moves || !work.processes.is_empty() || !work.found.is_empty()) && work.failures < ATTEMPTS
    }

    /// How long there is nothing to do.
    pub(crate) fn until_next_batch(&self) -> Option<Duration> {
        let late = freeze::any_late().then(|| monotonic_micros() + AGAIN);
        let pause = self.work.waits_for_pause().then_some(self.work.rests_until);
        let look = (!self.work.processes.is_empty()).then_some(self.work.looks_at);
        let due = [late, pause, look].into_iter().flatten().min()?;
        Some(Duration::from_micros(due.saturating_sub(monotonic_micros())))
    }

    /// Does what waits, for as long as a program may stand still.
    pub(crate) fn do_a_batch(&mut self) -> Result<()> {
        freeze::release_late();
        self.look_for_sockets();
        if !self.work.waits_for_pause() || monotonic_micros() < self.work.rests_until {
            return Ok(());
        }
        while !self.work.wanted.is_empty() && self.work.engines.len() < SPARE {
            match Joined::new() {
                Ok(engine) => self.work.engines.push(engine),
                // The move will say so.
                Err(_) => break,
            }
        }
        let begun = monotonic_micros();
        let failures = self.work.failures;
        // What does not come about waits for the next batch.
        let mut postponed = self.work.postponed.len();
        let mut wanted = self.work.wanted.len();
        // Until its threads have come to stop the program runs.
        let stopped = |attacher: &Attacher| attacher.frozen.as_ref().map_or(begun, |still| still.stopped);
        while monotonic_micros() < stopped(self) + PAUSE && self.work.failures == failures {
            let work = &mut self.work;
            if let Some(number) = work.changed.pop_first() {
                self.state_changed(number)?;
            } else if postponed > 0
                && let Some((number, cause)) = take_next(&mut work.postponed, &mut work.next_postponed)
            {
                postponed -= 1;
                self.move_to_kernel(number, cause.as_ref().map(|(reason, until)| (reason.as_str(), *until)))?;
            } else if let Some(socket) = work.found.pop_front() {
                self.meet(socket)?;
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
            self.work.rests_until = now + PAUSE.min(now - begun);
        } else {
            self.work.rests_until = now + AGAIN;
        }
        Ok(())
    }

    /// Looks for new sockets of processes that may have some. They go on meanwhile.
    fn look_for_sockets(&mut self) {
        let begun = monotonic_micros();
        if self.work.processes.is_empty() || begun < self.work.looks_at {
            return;
        }
        let waiting: BTreeSet<u64> = self.work.found.iter().map(|(_, _, inode)| *inode).collect();
        for process in std::mem::take(&mut self.work.processes) {
            let sockets = process::sockets_of(process).into_iter();
            let new = sockets.filter(|(_, inode)| !self.inodes.contains(inode) && !waiting.contains(inode));
            self.work.found.extend(new.map(|(fd, inode)| (process, fd, inode)));
        }
        let now = monotonic_micros();
        self.work.looks_at = now + (now - begun) * LOOKING;
    }

    /// A socket that is not known: it is, as soon as its process has stopped.
    fn meet(&mut self, (process, fd, inode): (u32, i32, u64)) -> Result<()> {
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
            // Whoever else stands still does not wait for it.
            self.thaw();
            self.work.failures += 1;
        }
        stopped
    }

    fn stop(&mut self, process: u32) -> Result<()> {
        use anyhow::Context;
        let still = self.frozen.get_or_insert_with(|| Still {
            frozen: Frozen::default(),
            processes: BTreeSet::new(),
            since: monotonic_micros(),
            stopped: 0,
        });
        if still.processes.contains(&process) {
            return Ok(());
        }
        still.frozen.add(process).with_context(|| format!("stopping process {process}"))?;
        // It makes no more of them.
        for child in process::children(process) {
            still.frozen.add(child).with_context(|| format!("stopping process {child}"))?;
        }
        still.processes.insert(process);
        still.stopped = monotonic_micros();
        Ok(())
    }

    /// Programs go on.
    pub(crate) fn thaw(&mut self) {
        if let Some(Still { frozen, since, .. }) = self.frozen.take() {
            drop(frozen);
            self.pauses.push((monotonic_micros() - since) as u32);
        }
    }

    /// Every connection goes to the kernel; meanwhile the others' bytes are carried.
    pub(crate) fn bring_everything_back(&mut self) -> Result<()> {
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
