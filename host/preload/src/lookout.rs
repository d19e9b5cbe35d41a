//! Which of the threads that sleep for sockets watch the session's doorbell.
//!
//! If all did, each ring would wake all of them, of which most find nothing. So a few watch: whoever of them wakes up
//! reads the NIC's events, and wakes the threads that these concern. When the last one leaves while others sleep, one
//! of those is woken, and watches when it sleeps again. A thread whose signal handler runs for long counts as watching
//! meanwhile, so the others look by themselves now and then.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most threads that watch. One may get no processor for a while, where hundreds of threads want one.
const MOST: u64 = 4;

/// Microseconds after which a thread that sleeps without watching looks by itself.
pub(crate) const LOOK: u64 = 1_000_000;

/// Threads that watch, and in the upper half those that sleep without.
static ASLEEP: AtomicU64 = AtomicU64::new(0);
const WATCHER: u64 = 1;
const SLEEPER: u64 = 1 << 32;

fn watchers(asleep: u64) -> u64 {
    asleep & (SLEEPER - 1)
}

/// Gives a thread that is about to sleep its place: returns whether it watches. If not, it counts among the `others`
/// that can be woken together with it.
pub(crate) fn begin(others: &AtomicU32) -> bool {
    // Before it counts, so that it is found by whoever counts it.
    others.fetch_add(1, Ordering::SeqCst);
    let place = |asleep| Some(if watchers(asleep) < MOST { asleep + WATCHER } else { asleep + SLEEPER });
    let before = ASLEEP.fetch_update(Ordering::SeqCst, Ordering::SeqCst, place).unwrap_or_default();
    let watches = watchers(before) < MOST;
    if watches {
        others.fetch_sub(1, Ordering::SeqCst);
    }
    watches
}

/// Ends what [`begin`] has begun, in a thread that has slept. Returns whether one of those is to be woken that sleep
/// without watching.
pub(crate) fn end(others: &AtomicU32, watches: bool) -> bool {
    if !watches {
        others.fetch_sub(1, Ordering::SeqCst);
        // It may have been woken to watch, and returns to the program instead.
        let before = ASLEEP.fetch_sub(SLEEPER, Ordering::SeqCst);
        return watchers(before) == 0 && before >= 2 * SLEEPER;
    }
    let before = ASLEEP.fetch_sub(WATCHER, Ordering::SeqCst);
    watchers(before) == 1 && before >= SLEEPER
}

/// In a child of fork: nobody sleeps.
pub(crate) fn forget_inherited() {
    ASLEEP.store(0, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four watch. When they have left, one of the others is to be woken, which watches when it sleeps again.
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
