//! When to repeat a request that the agent has refused or not answered: after pauses that begin with a second and
//! double. Each request to an agent that does not answer costs the program most of a second.

use crate::wait;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Microseconds of the first pause.
const FIRST: u64 = 1_000_000;

/// Doublings of the pause: it is 16 s at most.
const DOUBLINGS: u32 = 4;

/// When a request is due again, and how many attempts have failed so far.
#[derive(Default)]
pub(crate) struct Again {
    /// Microseconds of the monotonic clock; 0 for at once, `u64::MAX` for never.
    not_before: AtomicU64,
    failures: AtomicU32,
}

impl Again {
    /// Whether the request may be made now.
    #[inline]
    pub fn is_due(&self) -> bool {
        match self.not_before.load(Ordering::Acquire) {
            0 => true,
            u64::MAX => false,
            not_before => wait::now() >= not_before,
        }
    }

    /// Allows a request at once, and forgets the failures so far.
    pub fn reset(&self) {
        self.failures.store(0, Ordering::Release);
        self.not_before.store(0, Ordering::Release);
    }

    /// Records that an attempt has succeeded. False if [`Again::give_up`] was called meanwhile.
    pub fn succeed(&self) -> bool {
        self.failures.store(0, Ordering::Release);
        let reset = |not_before: u64| (not_before != u64::MAX).then_some(0);
        self.not_before.fetch_update(Ordering::SeqCst, Ordering::SeqCst, reset).is_ok()
    }

    /// Records that an attempt has failed: the next one is due after a pause, unless [`Again::give_up`] was called
    /// meanwhile.
    pub fn pause(&self) {
        self.pause_from(wait::now());
    }

    fn pause_from(&self, now: u64) {
        let failures = self.failures.fetch_add(1, Ordering::AcqRel);
        let pause = |not_before: u64| (not_before != u64::MAX).then_some(now + (FIRST << failures.min(DOUBLINGS)));
        let _ = self.not_before.fetch_update(Ordering::SeqCst, Ordering::SeqCst, pause);
    }

    /// Forbids further requests, until [`Again::reset`].
    pub fn give_up(&self) {
        self.not_before.store(u64::MAX, Ordering::SeqCst);
    }

    /// Whether further requests are forbidden.
    pub fn is_given_up(&self) -> bool {
        self.not_before.load(Ordering::Acquire) == u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_meanwhile_stays_so() {
        let again = Again::default();
        again.pause_from(0);
        assert!(again.succeed() && again.is_due());
        again.give_up();
        again.pause_from(0);
        assert!(!again.succeed() && again.is_given_up());
    }

    #[test]
    fn pauses_double_until_it_succeeds() {
        let again = Again::default();
        let pauses: Vec<u64> = (0..7)
            .map(|_| {
                again.pause_from(0);
                again.not_before.load(Ordering::Relaxed) / FIRST
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 16, 16]);
        again.reset();
        assert!(again.is_due());
        again.pause_from(0);
        assert_eq!(again.not_before.load(Ordering::Relaxed), FIRST);
    }

    #[test]
    fn what_is_given_up_is_due_after_a_reset() {
        let again = Again::default();
        again.give_up();
        assert!(again.is_given_up() && !again.is_due());
        again.reset();
        assert!(!again.is_given_up() && again.is_due());
    }
}
