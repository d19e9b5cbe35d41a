//! A lock that records its holder: a thread that asks for it again while it holds it, from a signal handler, gets None
//! instead of a deadlock.
//!
//! A thread that finds the lock taken tries for a moment, and then sleeps. The holder may be waiting for a processor
//! behind hundreds of threads: if these kept trying, it would wait for all of them. The thread that frees the lock
//! wakes all sleepers: if it woke only one, the others would wait until that one gets a processor, although the lock is
//! free.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Identifies a thread that takes the lock: a number that no two threads share at a time. Neither 0 nor greater than
/// [`MOST_TOKEN`].
pub type Token = u32;

/// The greatest token.
pub const MOST_TOKEN: Token = LEFT - 1;

/// Bits of a lock's word, beside the holder's token: threads sleep until the lock is free; threads have left work to
/// the holder.
const SLEEPERS: u32 = 1 << 31;
const LEFT: u32 = 1 << 30;

/// How many times a thread checks whether a lock is free before it sleeps.
const LOOKS: u32 = 128;

/// Rounds of [`give_way`] that keep the processor.
const AWAKE: u32 = 1024;

/// How long a later round, which gives up the processor, sleeps.
const NAP: Duration = Duration::from_micros(50);

/// Waits a little for another thread, in round `round`, counted from 0. Usually the other thread is done at once. But
/// it may wait for this processor, which it does not get from a thread with a real-time priority (SCHED_FIFO) that only
/// yields. So later rounds sleep.
#[cold]
pub fn give_way(round: u32) {
    match round {
        AWAKE.. => quietly(|| std::thread::sleep(NAP)),
        yields if yields % 64 == 63 => std::thread::yield_now(),
        _ => core::hint::spin_loop(),
    }
}

/// Makes system calls and keeps errno: a call's last locks may be taken and freed when errno already has the call's
/// result for the program.
fn quietly(calls: impl FnOnce()) {
    // SAFETY: the calling thread's errno, which lives as long as the thread.
    let before = unsafe { libc::__errno_location().read() };
    calls();
    // SAFETY: it is still this thread that runs, so it is the same errno.
    unsafe { libc::__errno_location().write(before) };
}

/// A value behind a lock that is meant to be held for few instructions.
#[derive(Debug)]
pub struct Lock<T> {
    /// The holder's token, [`SLEEPERS`] and [`LEFT`]; 0 if nobody holds it.
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
    /// Makes a free lock.
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

    /// Takes the lock if it is free. None if any thread holds it.
    #[inline]
    pub fn try_lock(&self, token: Token) -> Option<LockGuard<'_, T>> {
        let taken = self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().map(|_| LockGuard { lock: self })
    }

    /// Takes the lock. If another thread holds it, marks that there is work left for the holder and returns None: the
    /// holder's [`LockGuard::unlock`] then returns true. The holder may be this thread.
    #[inline(always)]
    pub fn lock_or_leave(&self, token: Token) -> Option<LockGuard<'_, T>> {
        match self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(LockGuard { lock: self }),
            Err(holder) => self.leave(token, holder),
        }
    }

    #[cold]
    fn leave(&self, token: Token, mut word: u32) -> Option<LockGuard<'_, T>> {
        loop {
            let wanted = if word == 0 { token } else { word | LEFT };
            match self.holder.compare_exchange(word, wanted, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return (word == 0).then(|| LockGuard { lock: self }),
                Err(other) => word = other,
            }
        }
    }

    #[cold]
    fn wait(&self, token: Token, mut word: u32) -> Option<LockGuard<'_, T>> {
        let mut looks = 0;
        loop {
            if word & MOST_TOKEN == token {
                return None;
            }
            if word == 0 {
                match self.holder.compare_exchange(0, token, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => return Some(LockGuard { lock: self }),
                    Err(other) => word = other,
                }
            } else if looks < LOOKS {
                looks += 1;
                core::hint::spin_loop();
                word = self.holder.load(Ordering::Relaxed);
            } else {
                word = self.sleep(word);
            }
        }
    }

    /// Sleeps as long as the lock is held by the holder in `word`, the value that was read last. Returns the present
    /// word, which may have any value.
    fn sleep(&self, word: u32) -> u32 {
        let slept_on = word | SLEEPERS;
        if word != slept_on
            && let Err(other) = self.holder.compare_exchange(word, slept_on, Ordering::Relaxed, Ordering::Relaxed)
        {
            return other;
        }
        let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: a live word of four bytes; no time-out and no second word are given. An error only means that it does
        // not sleep.
        quietly(|| unsafe {
            libc::syscall(libc::SYS_futex, self.holder.as_ptr(), wait, slept_on, core::ptr::null::<libc::timespec>());
        });
        self.holder.load(Ordering::Relaxed)
    }

    #[cold]
    #[inline(never)]
    fn wake_sleepers(&self) {
        let wake = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the address of a live word, which the kernel only compares with those that threads sleep on.
        quietly(|| unsafe {
            libc::syscall(libc::SYS_futex, self.holder.as_ptr(), wake, i32::MAX);
        });
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

impl<T> LockGuard<'_, T> {
    /// Releases the lock. Contains a full barrier. Returns whether other threads have left work to the holder
    /// ([`Lock::lock_or_leave`]); the thread that now does the work sees all of their earlier writes.
    #[inline(always)]
    pub fn unlock(self) -> bool {
        core::mem::ManuallyDrop::new(self).release() & LEFT != 0
    }

    #[inline(always)]
    fn release(&mut self) -> u32 {
        let word = self.lock.holder.swap(0, Ordering::SeqCst);
        // An exchange is a barrier for all memory on x86, and orders less elsewhere.
        #[cfg(not(target_arch = "x86_64"))]
        core::sync::atomic::fence(Ordering::SeqCst);
        if word & SLEEPERS != 0 {
            self.lock.wake_sleepers();
        }
        word
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.release();
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
        assert!(lock.lock(9).is_none() && lock.try_lock(8).is_none());
        drop(held);
        assert!(lock.try_lock(8).is_some() && lock.lock(MOST_TOKEN).is_some());
    }

    /// A thread that waits for the lock keeps its errno, also if the lock becomes free at the last moment, or if it
    /// naps.
    #[test]
    fn errno_stays_what_it_was() {
        const MINE: i32 = 4321;
        // SAFETY: the calling thread's errno.
        let errno = || unsafe { libc::__errno_location() };
        let lock = Lock::new(0u64);
        std::thread::scope(|scope| {
            for token in 1..=8 {
                let lock = &lock;
                scope.spawn(move || {
                    // SAFETY: the calling thread's errno.
                    unsafe { errno().write(MINE) };
                    for _ in 0..2_000 {
                        let mut held = lock.lock(token).unwrap();
                        (0..LOOKS).for_each(|_| *core::hint::black_box(&mut *held) += 1);
                        drop(held);
                        // SAFETY: errno of the thread that has set it above.
                        assert_eq!(unsafe { errno().read() }, MINE);
                    }
                    give_way(AWAKE);
                    // SAFETY: errno of the thread that has set it above.
                    assert_eq!(unsafe { errno().read() }, MINE);
                });
            }
        });
    }

    #[test]
    fn what_is_left_to_the_holder_is_told_once() {
        let lock = Lock::new(());
        let held = lock.lock_or_leave(1).unwrap();
        assert!(lock.lock_or_leave(2).is_none() && lock.lock_or_leave(1).is_none() && lock.lock(1).is_none());
        assert!(held.unlock());
        assert!(!lock.lock_or_leave(2).unwrap().unlock());
    }

    /// Each thread adds work, and does it or leaves it to the holder: no work is left when all threads have ended.
    #[test]
    fn nothing_that_is_left_is_lost() {
        let (lock, added) = (Lock::new(0u64), std::sync::atomic::AtomicU64::new(0));
        std::thread::scope(|scope| {
            for token in 1..=4 {
                let (lock, added) = (&lock, &added);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        added.fetch_add(1, Ordering::Relaxed);
                        while let Some(mut done) = lock.lock_or_leave(token) {
                            *done = added.load(Ordering::Relaxed);
                            if !done.unlock() {
                                break;
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(*lock.lock(9).unwrap(), 80_000);
    }

    /// Threads that wait for a lock sleep, and all continue when it is free.
    #[test]
    fn who_waits_for_long_sleeps() {
        let lock = Lock::new(0u64);
        let used = || {
            let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: one live timespec.
            unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut spec) };
            Duration::new(spec.tv_sec as u64, spec.tv_nsec as u32)
        };
        std::thread::scope(|scope| {
            let held = lock.lock(1).unwrap();
            let waits: Vec<_> = (2..18)
                .map(|token| {
                    let lock = &lock;
                    scope.spawn(move || {
                        *lock.lock(token).unwrap() += 1;
                        used()
                    })
                })
                .collect();
            // Until one of them sleeps.
            while lock.holder.load(Ordering::Relaxed) & SLEEPERS == 0 {
                std::thread::yield_now();
            }
            // Waits: for a time in which a thread that does not sleep uses the processor.
            std::thread::sleep(Duration::from_millis(200));
            drop(held);
            for one in waits {
                let used = one.join().unwrap();
                // Waits: compares processor time, of which a sleeping thread uses none, however busy the machine is.
                assert!(used < Duration::from_millis(50), "{used:?}");
            }
        });
        assert_eq!(*lock.lock(1).unwrap(), 16);
    }
}
