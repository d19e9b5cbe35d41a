//! A lock that knows its holder: whoever asks for it again while holding it, from a signal handler, is told so instead of waiting for
//! itself.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

/// Who asks: a number that no two threads share at a time. Not 0.
pub type Token = u32;

/// A value behind a lock. It is meant to be held for a few instructions.
#[derive(Debug)]
pub struct Lock<T> {
    holder: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the lock alone, by one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The right to the value, until it is dropped.
pub struct Held<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Lock { holder: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock. None if the asker has it already.
    #[inline(always)]
    pub fn lock(&self, token: Token) -> Option<Held<'_, T>> {
        match self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Held { lock: self }),
            Err(holder) => self.wait(token, holder),
        }
    }

    #[cold]
    fn wait(&self, token: Token, mut holder: u32) -> Option<Held<'_, T>> {
        let mut spins = 0u32;
        while holder != token {
            spins += 1;
            // The holder may want this core.
            if spins.is_multiple_of(64) {
                std::thread::yield_now();
            } else {
                core::hint::spin_loop();
            }
            match self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Held { lock: self }),
                Err(other) => holder = other,
            }
        }
        None
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held, and this guard is borrowed mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
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
