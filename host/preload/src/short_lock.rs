//! Locks of pools, and of lists of this library's own descriptors. The holder of such a lock waits for nothing but the
//! allocator, a system call that returns at once, or another of these locks; two of them are taken in the order in
//! which a fork takes all.
//!
//! A fork waits until it has each: a child that found one locked could never take it. The holder may be slow, because
//! it was preempted or its control group has no processor time left. But the holder may also be the forking thread
//! itself, if a signal handler has interrupted it and forks. To tell the two apart each thread counts the locks that it
//! has or waits for. It counts a lock before it tries to take it, so the count is right wherever a signal interrupts
//! it.

use crate::{thread, wait, whole};
use baton_ring::{Lock, LockGuard, give_way};
use std::any::Any;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

/// Microseconds for which a fork waits for a lock that its own thread may hold.
const PATIENCE: u64 = 100_000;

/// A lock that is held during a fork.
pub(crate) type Held = Option<Box<dyn Any>>;

/// A lock that is never held for long.
pub(crate) struct ShortLock<T>(Lock<T>);

/// Access to the locked value. The fields are dropped in this order, so the thread counts the lock until it is free.
#[clippy::has_significant_drop]
pub(crate) struct Guard<'a, T> {
    guard: LockGuard<'a, T>,
    _counted: Counted,
}

/// One of the locks that the calling thread has or waits for.
struct Counted(PhantomData<*const ()>);

/// Adds to the number of these locks, which no other thread changes.
fn count(change: u32) {
    let locks = &whole::here().short_locks;
    locks.store(locks.load(Ordering::Relaxed).wrapping_add(change), Ordering::Relaxed);
}

impl Counted {
    fn begin() -> Counted {
        count(1);
        Counted(PhantomData)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        count(u32::MAX);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> ShortLock<T> {
    /// Makes a lock that nobody holds.
    pub const fn new(value: T) -> ShortLock<T> {
        ShortLock(Lock::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        let counted = Counted::begin();
        for round in 0.. {
            if let Some(guard) = self.0.lock(thread::token()) {
                return Guard { guard, _counted: counted };
            }
            // Among thousands of threads two may have the same token.
            give_way(round);
        }
        unreachable!("it waits for as long as it takes")
    }

    /// None if somebody holds it.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let counted = Counted::begin();
        self.0.try_lock(thread::token()).map(|guard| Guard { guard, _counted: counted })
    }
}

impl<T: 'static> ShortLock<T> {
    /// Takes it for a fork. None if its holder is the calling thread.
    pub fn hold(&'static self) -> Held {
        let may_be_mine = whole::here().short_locks.load(Ordering::Relaxed) > 0;
        let limit = wait::now() + PATIENCE;
        let mut round = 0u32;
        loop {
            match self.0.try_lock(thread::token()) {
                Some(guard) => return Some(Box::new(guard)),
                None if may_be_mine && wait::now() >= limit => return None,
                None => give_way(round),
            }
            round = round.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Another thread holds the lock for longer than a fork waits for a lock of its own thread: the fork waits until it
    /// is free.
    #[test]
    fn a_fork_waits_for_another_threads_lock() {
        static LOCK: ShortLock<u32> = ShortLock::new(0);
        static FREED: AtomicBool = AtomicBool::new(false);
        let (locked, is_locked) = channel();
        let holder = std::thread::spawn(move || {
            let guard = LOCK.lock();
            locked.send(()).expect("a receiver");
            // Waits: a holder that gets no processor time, for three times the fork's patience with its own thread.
            std::thread::sleep(Duration::from_micros(3 * PATIENCE));
            FREED.store(true, Ordering::SeqCst);
            drop(guard);
        });
        is_locked.recv().expect("a holder");
        let held = LOCK.hold();
        assert!(held.is_some() && FREED.load(Ordering::SeqCst));
        assert!(LOCK.try_lock().is_none(), "the fork has it");
        drop(held);
        holder.join().expect("its end");
        assert!(LOCK.try_lock().is_some());
    }

    /// A signal handler that forks has interrupted its own thread while it held the lock: the fork continues without
    /// the lock.
    #[test]
    fn a_fork_does_not_wait_for_its_own_lock() {
        static LOCK: ShortLock<u32> = ShortLock::new(0);
        static OTHER: ShortLock<u32> = ShortLock::new(0);
        let guard = LOCK.lock();
        assert!(LOCK.hold().is_none());
        assert!(OTHER.hold().is_some());
        drop(guard);
        assert!(LOCK.hold().is_some());
        assert!(LOCK.hold().is_some(), "it is free again");
    }
}
