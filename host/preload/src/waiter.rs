//! The eventfds by which sleeping threads are woken for sockets' events. They are kept for the next sleep.
//!
//! The eventfds count against the program's RLIMIT_NOFILE. So there are at most [`most`] of them, and threads that find
//! none free share: an event for one of them wakes all, and those that it does not concern sleep again. A shared
//! eventfd that was written is not given to further threads until every thread that slept on it has left; only then is
//! it made unreadable, so that none of them can miss the event.

use crate::few::Few;
use crate::process;
use crate::short_lock::{Held, ShortLock};
use crate::wait::{self, eventfd};
use crate::wake::{clear, signal};
use libc::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An eventfd and the threads that sleep on it.
pub(crate) struct Waiter {
    /// -1 if the program has no descriptor left: the thread then wakes up by itself from time to time.
    pub eventfd: c_int,
    /// The eventfd may have been written.
    signalled: AtomicBool,
    /// Threads that sleep on it, changed under the pool's lock.
    sleepers: AtomicU32,
    /// Those of them that do not watch the session's doorbell (`lookout.rs`).
    pub unwatching: AtomicU32,
    /// [`FORKS`] when it was made.
    forks: u32,
}

/// The waiters of one socket or set, which its events wake.
#[derive(Default)]
pub(crate) struct Waiters {
    count: AtomicU32,
    list: Mutex<Vec<Arc<Waiter>>>,
}

impl Waiters {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<Waiter>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, waiter: &Arc<Waiter>) {
        self.list().push(waiter.clone());
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes `add`.
    pub fn remove(&self, waiter: &Arc<Waiter>) {
        let mut list = self.list();
        if let Some(at) = list.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            list.swap_remove(at);
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub fn wake(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            let waiters: Few<_> = self.list().iter().cloned().collect();
            waiters.iter().for_each(|waiter| waiter.wake());
        }
    }
}

/// All waiters, and those that no thread sleeps on.
struct Pool {
    free: Vec<Arc<Waiter>>,
    all: Vec<Arc<Waiter>>,
    /// Index at which the search for a waiter to share begins next time.
    next: usize,
}

static POOL: ShortLock<Pool> = ShortLock::new(Pool { free: Vec::new(), all: Vec::new(), next: 0 });
static OURS: ShortLock<Vec<c_int>> = ShortLock::new(Vec::new());

/// Number of forks between the program's start and this process. A waiter with another number is another process's and
/// is not used here.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Takes the locks of what is kept, for a fork.
pub(crate) fn hold() -> Vec<Held> {
    vec![POOL.hold(), OURS.hold()]
}

/// In a child that may take no lock: marks the parent's waiters as inherited. The child's thread may be in a sleep with
/// one of them.
pub(crate) fn leave_inherited() {
    FORKS.fetch_add(1, Ordering::AcqRel);
}

/// Closes the parent's eventfds in a child of fork: a wake-up that one of the two reads would be lost for the other.
pub(crate) fn forget_inherited() {
    leave_inherited();
    if let Some(mut pool) = POOL.try_lock() {
        pool.free.clear();
        pool.all.clear();
    }
    close_all();
}

/// Wakes all threads that sleep.
pub(crate) fn wake_all() {
    // The list is copied and unlocked: a woken thread may need the lock.
    let all = POOL.lock().all.clone();
    all.iter().filter(|waiter| waiter.sleepers.load(Ordering::Relaxed) > 0).for_each(|waiter| waiter.wake());
}

/// Wakes a thread that sleeps without watching the session's doorbell, if there is one.
pub(crate) fn wake_one_that_does_not_watch() {
    let found = POOL.lock().all.iter().find(|waiter| waiter.unwatching.load(Ordering::SeqCst) > 0).cloned();
    if let Some(waiter) = found {
        waiter.wake();
    }
}

/// Closes all eventfds. Nobody may sleep any more.
pub(crate) fn close_all() {
    wait::close_all(&OURS);
}

/// Whether a descriptor is a waiter's eventfd.
pub(crate) fn is_ours(fd: c_int) -> bool {
    OURS.try_lock().is_some_and(|ours| ours.contains(&fd))
}

/// The lowest of them from `first` on.
pub(crate) fn next_of_ours(first: c_int) -> Option<c_int> {
    OURS.try_lock()?.iter().copied().filter(|fd| *fd >= first).min()
}

/// Most eventfds: a sixteenth of RLIMIT_NOFILE. More are made only if none of these can be shared at the moment.
fn most() -> usize {
    (process::most_descriptors() / 16).clamp(4, 4096) as usize
}

impl Pool {
    /// A waiter to share, whose eventfd was not written since its threads fell asleep.
    fn shared(&mut self) -> Option<Arc<Waiter>> {
        self.next = self.next.wrapping_add(1);
        let (before, after) = self.all.split_at(self.next.checked_rem(self.all.len()).unwrap_or(0));
        let unwritten =
            |waiter: &&Arc<Waiter>| waiter.sleepers.load(Ordering::Relaxed) > 0 && !waiter.signalled.load(Ordering::Acquire);
        after.iter().chain(before).find(unwritten).cloned()
    }

    fn add(&mut self, eventfd: c_int) -> Arc<Waiter> {
        let forks = FORKS.load(Ordering::Acquire);
        let (signalled, zero) = (AtomicBool::new(false), AtomicU32::default);
        let made = Arc::new(Waiter { eventfd, signalled, sleepers: zero(), unwatching: zero(), forks });
        if eventfd >= 0 {
            self.all.push(made.clone());
        }
        made
    }

    /// A waiter for one more thread. `make` makes an eventfd; it is called if there may be one more, or if no waiter
    /// can be shared.
    fn take(&mut self, most: impl Fn() -> usize, make: impl Fn() -> c_int) -> Arc<Waiter> {
        let waiter = match self.free.pop() {
            Some(free) => free,
            None if self.all.is_empty() || self.all.len() < most() => {
                let made = make();
                let instead = if made < 0 { self.shared() } else { None };
                instead.unwrap_or_else(|| self.add(made))
            }
            None => match self.shared() {
                Some(shared) => shared,
                None => self.add(make()),
            },
        };
        waiter.sleepers.fetch_add(1, Ordering::Relaxed);
        waiter
    }

    /// Undoes `take`. Returns the waiter if no thread sleeps on it any more and its eventfd has to be made unreadable.
    fn leave(&mut self, waiter: Arc<Waiter>) -> Option<Arc<Waiter>> {
        if waiter.sleepers.fetch_sub(1, Ordering::Relaxed) > 1 || waiter.eventfd < 0 {
            return None;
        }
        if waiter.signalled.load(Ordering::Acquire) {
            return Some(waiter);
        }
        self.free.push(waiter);
        None
    }
}

impl Waiter {
    pub fn take() -> Arc<Waiter> {
        let make = || {
            let fd = eventfd();
            if fd >= 0 {
                OURS.lock().push(fd);
            }
            fd
        };
        POOL.lock().take(most, make)
    }

    pub fn give(self: Arc<Waiter>) {
        if self.is_inherited() {
            return;
        }
        let written = POOL.lock().leave(self);
        if let Some(waiter) = written {
            // No other thread can get this waiter now: it is not in the free list, and only a waiter on which a thread
            // sleeps is shared.
            clear(waiter.eventfd);
            waiter.signalled.store(false, Ordering::Release);
            POOL.lock().free.push(waiter);
        }
    }

    /// Whether the waiter is the parent's, in a child of fork.
    pub fn is_inherited(&self) -> bool {
        self.forks != FORKS.load(Ordering::Acquire)
    }

    /// Records that the eventfd was found to be written. A late thread may write an eventfd that was cleared and given
    /// to others meanwhile: if it were not cleared again, none of them could sleep.
    pub fn note_written(&self) {
        self.signalled.store(true, Ordering::Release);
    }

    /// Wakes its threads.
    pub fn wake(&self) {
        self.signalled.store(true, Ordering::Release);
        signal(self.eventfd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads share when there may be no further eventfd, but none joins threads that are being woken; a waiter that
    /// all threads have left is free again.
    #[test]
    fn those_that_are_woken_leave_before_others_join() {
        let mut pool = Pool { free: Vec::new(), all: Vec::new(), next: 0 };
        let numbers = std::cell::Cell::new(100);
        let make = || numbers.replace(numbers.get() + 1);
        let (one, two, three) = (pool.take(|| 2, make), pool.take(|| 2, make), pool.take(|| 2, make));
        assert!(one.eventfd == 100 && two.eventfd == 101 && [100, 101].contains(&three.eventfd));
        one.signalled.store(true, Ordering::Release);
        two.signalled.store(true, Ordering::Release);
        let four = pool.take(|| 2, make);
        assert_eq!(four.eventfd, 102, "nobody joins those that are being woken");
        assert_eq!(pool.take(|| 2, || -1).eventfd, 102);
        let shared = three.eventfd;
        assert!(pool.leave(three).is_none(), "another one sleeps on it");
        let last = if shared == 100 { one } else { two };
        assert!(pool.leave(last).is_some_and(|waiter| waiter.eventfd == shared));
        assert!(pool.free.is_empty(), "it is readable still");
    }

    /// A late thread has written an eventfd that was cleared before.
    #[test]
    fn what_was_written_late_is_cleared() {
        let waiter = Waiter::take();
        let eventfd = waiter.eventfd;
        signal(eventfd);
        waiter.note_written();
        waiter.give();
        let mut entry = libc::pollfd { fd: eventfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one live entry.
        assert_eq!(unsafe { libc::poll(&raw mut entry, 1, 0) }, 0);
    }

    /// Without a descriptor there is a waiter nevertheless, which is not kept.
    #[test]
    fn without_descriptors_nothing_is_kept() {
        let mut pool = Pool { free: Vec::new(), all: Vec::new(), next: 0 };
        let none = pool.take(|| 2, || -1);
        assert!(none.eventfd == -1 && pool.leave(none).is_none() && pool.free.is_empty() && pool.all.is_empty());
    }
}
