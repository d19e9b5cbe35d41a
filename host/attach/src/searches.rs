//! Searches for the sockets of processes, each in a thread of its own: a process can delay a reader of its entries in
//! /proc, and reading the entries of a process with many descriptors takes long. The attacher waits only a short time
//! for a search, and uses late results when they come.

use baton_linux::events::monotonic_micros;
use baton_linux::{process, reading};
use std::collections::BTreeSet;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

/// Time for which a search is waited for.
const LIMIT: Duration = Duration::from_millis(50);

/// Time in which even a process with very many descriptors has been searched.
const PATIENCE: Duration = Duration::from_secs(1);

/// A process's sockets: their numbers and inodes.
pub(crate) struct Found {
    pub process: u32,
    pub sockets: Vec<(i32, u64)>,
    /// Microseconds that the search took.
    pub took: u64,
}

/// Searches, of which some may not have ended.
pub(crate) struct Searches {
    /// The function that searches a process.
    sockets_of: fn(u32) -> Vec<(i32, u64)>,
    /// How long a search is waited for.
    limit: Duration,
    to: Sender<Found>,
    from: Receiver<Found>,
    /// The processes that are being searched.
    under_way: BTreeSet<u32>,
}

impl Default for Searches {
    fn default() -> Self {
        Searches::by(process::sockets_of, LIMIT)
    }
}

impl Searches {
    fn by(sockets_of: fn(u32) -> Vec<(i32, u64)>, limit: Duration) -> Self {
        let (to, from) = mpsc::channel();
        Searches { sockets_of, limit, to, from, under_way: BTreeSet::new() }
    }

    /// Begins to search these processes, and waits a short time for the results. Returns all results since the last
    /// call. Processes that cannot be searched now stay in `processes`: an earlier search of the process has not ended,
    /// or too many searches have not.
    pub fn search(&mut self, processes: &mut BTreeSet<u32>) -> Vec<Found> {
        let mut awaited = BTreeSet::new();
        processes.retain(|process| {
            let begun = self.begin(*process);
            if begun {
                awaited.insert(*process);
            }
            !begun
        });
        self.under_way.extend(&awaited);
        self.take(awaited, self.limit)
    }

    fn begin(&self, process: u32) -> bool {
        let sockets_of = self.sockets_of;
        let search = move || {
            let begun = monotonic_micros();
            let sockets = sockets_of(process);
            Found { process, sockets, took: monotonic_micros() - begun }
        };
        reading::apart(process, search, self.to.clone())
    }

    /// Takes the results, after waiting for these searches.
    fn take(&mut self, mut awaited: BTreeSet<u32>, limit: Duration) -> Vec<Found> {
        let until = monotonic_micros() + limit.as_micros() as u64;
        let mut all = Vec::new();
        loop {
            let left = if awaited.is_empty() { 0 } else { until.saturating_sub(monotonic_micros()) };
            let Ok(found) = self.from.recv_timeout(Duration::from_micros(left)) else { return all };
            self.under_way.remove(&found.process);
            awaited.remove(&found.process);
            all.push(found);
        }
    }

    /// Whether searches are still running.
    pub fn any_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }
}

/// Searches all these processes. A process that delays its search for too long counts as having no sockets.
pub(crate) fn search_all(processes: Vec<u32>) -> Vec<Found> {
    let mut searches = Searches::default();
    let mut all = Vec::new();
    for process in processes {
        all.extend(searches.search(&mut BTreeSet::from([process])));
    }
    let late = searches.under_way.clone();
    all.extend(searches.take(late, PATIENCE));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, Mutex};

    /// Numbers that no process has.
    const LATE: u32 = u32::MAX - 1;
    const QUICK: u32 = u32::MAX - 2;

    static MAY_END: Mutex<bool> = Mutex::new(false);
    static CHANGED: Condvar = Condvar::new();

    fn sockets_of(process: u32) -> Vec<(i32, u64)> {
        if process == LATE {
            drop(CHANGED.wait_while(MAY_END.lock().expect("no panic"), |may| !*may).expect("no panic"));
        }
        vec![(3, process.into())]
    }

    fn processes(found: &[Found]) -> Vec<u32> {
        found.iter().map(|of| of.process).collect()
    }

    /// A search that takes longer than the wait does not delay others, is not begun twice at once, and its result is
    /// not lost.
    #[test]
    fn what_comes_late_is_used() {
        let mut searches = Searches::by(sockets_of, Duration::ZERO);
        assert!(searches.search(&mut BTreeSet::from([LATE])).is_empty());
        searches.limit = Duration::from_secs(60);
        let mut both = BTreeSet::from([LATE, QUICK]);
        assert_eq!(processes(&searches.search(&mut both)), [QUICK]);
        assert_eq!(both, BTreeSet::from([LATE]), "it is searched again after this search");
        assert!(searches.any_under_way());
        *MAY_END.lock().expect("no panic") = true;
        CHANGED.notify_all();
        let late = searches.take(BTreeSet::from([LATE]), Duration::from_secs(60));
        assert_eq!((processes(&late), late[0].sockets.as_slice()), (vec![LATE], [(3, LATE.into())].as_slice()));
        assert!(!searches.any_under_way());
        assert_eq!(processes(&searches.search(&mut both)), [LATE]);
        assert!(both.is_empty());
    }
}
