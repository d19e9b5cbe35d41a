//! A spin lock that records its holder: a thread that asks for it again while it holds it, from a signal handler, gets
//! None instead of a deadlock.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Identifies a thread that takes the lock: a number that no two threads share at a time. Not 0.
pub type Token = u32;

/// Rounds of [`give_way`] that keep the processor.
const AWAKE: u32 = 1024;

/// How long one that does not keep it sleeps.
const NAP: Duration = Duration::from_micros(50);

/// Waits a little for another thread, which is about to do something: round `round`, counted from 0. Most are done at
/// once. But the other one may wait for this processor, and does not get it from a thread of a real-time priority
/// (SCHED_FIFO) that only yields. So later rounds sleep.
#[cold]
pub fn give_way(round: u32) {
    match round {
        AWAKE.. => std::thread::sleep(NAP),
        yields if yields % 64 == 63 => std::thread::yield_now(),
        _ => core::hint::spin_loop(),
    }
}

/// A value behind a spin lock, which is meant to be held for a few instructions.
#[derive(Debug)]
pub struct Lock<T> {
    holder: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a `LockGuard`, and `holder` lets one exist at a time, so that threads hand
// the value on (hence `T: Send`) but never share it.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Access to the value of a [`Lock`], which is released when this is dropped.
pub struct LockGuard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    /// Makes a lock that nobody holds.
    pub const fn new(value: T) -> Self {
        Lock { holder: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock. None if the thread of `token` holds it already.
    #[inline(always)]
    pub fn lock(&self, token: Token) -> Option<LockGuard<'_, T>> {
        match self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(LockGuard { lock: self }),
            Err(holder) => self.wait(token, holder),
        }
    }

    #[cold]
    fn wait(&self, token: Token, mut holder: u32) -> Option<LockGuard<'_, T>> {
        let mut round = 0u32;
        while holder != token {
            give_way(round);
            round = round.saturating_add(1);
            match self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(LockGuard { lock: self }),
                Err(other) => holder = other,
            }
        }
        None
    }
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: a guard exists only while `holder` is its thread's, so that no other guard refers to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: a guard exists only while `holder` is its thread's, so that no other guard refers to the value; and
        // this one is borrowed mutably, so that no reference made through it is alive.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.lock.holder.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_none_waits_for_itself() {
        let lock = Lock::new(0u64);
        std::thread::scope(|scope| {
            for token in 1..=4 {
                let lock = &lock;
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        *lock.lock(token).unwrap() += 1;
                    }
                });
            }
        });
        let held = lock.lock(9).unwrap();
        assert_eq!(*held, 40_000);
        assert!(lock.lock(9).is_none());
    }
}
