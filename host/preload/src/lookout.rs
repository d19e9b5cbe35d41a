//! Which of the threads that sleep for sockets also poll the session's doorbell (*watch* it).
//!
//! If all did, each ring would wake all of them, and most would find nothing. So only a few watch. The watcher that
//! wakes up reads the NIC's events, and wakes the threads that these concern. When the last watcher leaves while other
//! threads sleep, one of them is woken, and watches when it sleeps again. A watcher whose signal handler runs for long
//! still counts as watching, so the other threads look at the events by themselves now and then.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most threads that watch. More than one, since a watcher may get no processor for a while among hundreds of threads.
const MOST: u64 = 4;

/// Microseconds after which a thread that sleeps without watching looks by itself.
pub(crate) const LOOK: u64 = 1_000_000;

/// Lower half: threads that watch. Upper half: threads that sleep without watching.
static ASLEEP: AtomicU64 = AtomicU64::new(0);
const WATCHER: u64 = 1;
const SLEEPER: u64 = 1 << 32;

fn watchers(asleep: u64) -> u64 {
    asleep & (SLEEPER - 1)
}

/// Decides whether a thread that is about to sleep watches, and returns it. A thread that does not watch is counted in
/// `others`, the counter of its eventfd.
pub(crate) fn begin(others: &AtomicU32) -> bool {
    // Before it is counted in `ASLEEP`: a thread that sees it there must find its eventfd by this counter.
    others.fetch_add(1, Ordering::SeqCst);
    let place = |asleep| Some(if watchers(asleep) < MOST { asleep + WATCHER } else { asleep + SLEEPER });
    let before = ASLEEP.fetch_update(Ordering::SeqCst, Ordering::SeqCst, place).unwrap_or_default();
    let watches = watchers(before) < MOST;
    if watches {
        others.fetch_sub(1, Ordering::SeqCst);
    }
    watches
}

/// Undoes [`begin`], in a thread that has slept. Returns whether the caller has to wake a thread that sleeps without
/// watching.
pub(crate) fn end(others: &AtomicU32, watches: bool) -> bool {
    if !watches {
        others.fetch_sub(1, Ordering::SeqCst);
        // This thread may have been woken to become the watcher, but returns to the program: then another one has to.
        let before = ASLEEP.fetch_sub(SLEEPER, Ordering::SeqCst);
        return watchers(before) == 0 && before >= 2 * SLEEPER;
    }
    let before = ASLEEP.fetch_sub(WATCHER, Ordering::SeqCst);
    watchers(before) == 1 && before >= SLEEPER
}

/// In a child of fork: no thread sleeps.
pub(crate) fn forget_inherited() {
    ASLEEP.store(0, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four threads watch. When all of them have left, one of the others is woken, and watches when it sleeps again.
    #[test]
    fn somebody_watches_while_anybody_sleeps() {
        let others = AtomicU32::new(0);
        let watching: Vec<bool> = (0..7).map(|_| begin(&others)).collect();
        assert_eq!(watching, [true, true, true, true, false, false, false]);
        assert_eq!(others.load(Ordering::SeqCst), 3);
        let woken: Vec<bool> = (0..4).map(|_| end(&others, true)).collect();
        assert_eq!(woken, [false, false, false, true]);
        assert!(end(&others, false), "the one that was woken does not sleep again: the next one is to be woken");
        assert!(end(&others, false) && begin(&others));
        assert!(!end(&others, false) && !end(&others, true));
        assert_eq!((others.load(Ordering::SeqCst), ASLEEP.load(Ordering::SeqCst)), (0, 0));
    }
}
