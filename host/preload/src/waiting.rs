//! A cache of a socket's options that decide how its calls wait, so that a call that sleeps need not ask the kernel
//! each time: O_NONBLOCK is not set, SO_RCVTIMEO or SO_SNDTIMEO is not set, and SO_ZEROCOPY is set. Each call of the
//! program's that may change one of them clears the cache.

use libc::c_int;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// A known fact about a socket, as a bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fact(u32);

/// O_NONBLOCK is not set.
pub(crate) const BLOCKS: Fact = Fact(1);
/// SO_RCVTIMEO is 0.
pub(crate) const RECEIVES_FOR_EVER: Fact = Fact(2);
/// SO_SNDTIMEO is 0.
pub(crate) const SENDS_FOR_EVER: Fact = Fact(4);
/// SO_ZEROCOPY is set.
pub(crate) const COMPLETES: Fact = Fact(8);

/// Number of bits for facts. The other bits count how often the cache was cleared.
const BITS: u32 = 8;

/// The facts of a socket.
#[derive(Default)]
pub(crate) struct Waiting(AtomicU32);

impl Waiting {
    /// Forgets everything. To be called after the change.
    pub fn forget(&self) {
        let next = |known: u32| Some(((known >> BITS).wrapping_add(1)) << BITS);
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next);
    }

    /// Whether the fact holds. Calls `asks` if that is not known, and records a true answer, unless another thread has
    /// cleared the cache meanwhile.
    pub fn holds(&self, fact: Fact, asks: impl FnOnce() -> bool) -> bool {
        let known = self.0.load(Ordering::Acquire);
        if known & fact.0 != 0 {
            return true;
        }
        let holds = asks();
        if holds {
            let _ = self.0.compare_exchange(known, known | fact.0, Ordering::AcqRel, Ordering::Relaxed);
        }
        holds
    }
}

/// Which of a socket's time limits (SO_RCVTIMEO, SO_SNDTIMEO) are negative. With such a limit no call waits in Linux
/// (sock_set_timeout), but what can be read of it is 0, as of a limit that is not set.
#[derive(Default)]
pub(crate) struct Negative(AtomicU8);

impl Negative {
    /// The bit of an option; 0 of one that is no time limit.
    fn bit(level: c_int, option: c_int) -> u8 {
        /// The second numbers of both in Linux, for times of 64 bits.
        const SO_RCVTIMEO_NEW: c_int = 66;
        const SO_SNDTIMEO_NEW: c_int = 67;
        match option {
            libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW if level == libc::SOL_SOCKET => 1,
            libc::SO_SNDTIMEO | SO_SNDTIMEO_NEW if level == libc::SOL_SOCKET => 2,
            _ => 0,
        }
    }

    /// Notes an option that the kernel has just taken. `seconds` reads them from its value, if it is a time limit.
    pub fn note(&self, level: c_int, option: c_int, seconds: impl FnOnce() -> Option<i64>) {
        match Negative::bit(level, option) {
            0 => {}
            bit if seconds().is_some_and(|seconds| seconds < 0) => _ = self.0.fetch_or(bit, Ordering::AcqRel),
            bit => _ = self.0.fetch_and(!bit, Ordering::AcqRel),
        }
    }

    /// Whether this limit, SO_RCVTIMEO or SO_SNDTIMEO, is negative.
    pub fn has(&self, option: c_int) -> bool {
        self.0.load(Ordering::Acquire) & Negative::bit(libc::SOL_SOCKET, option) != 0
    }

    /// Those of a new socket.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Takes over those of another socket.
    pub fn copy(&self, other: &Negative) {
        self.0.store(other.0.load(Ordering::Acquire), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_negative_limit_is_known_until_another_one_is_set() {
        let negative = Negative::default();
        let set = |option, seconds| {
            negative.note(libc::SOL_SOCKET, option, || Some(seconds));
            [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO].map(|option| negative.has(option))
        };
        assert_eq!(set(libc::SO_RCVTIMEO, -1), [true, false]);
        assert_eq!(set(libc::SO_SNDTIMEO, i64::MIN), [true, true]);
        assert_eq!(set(libc::SO_LINGER, 1), [true, true]);
        assert_eq!(set(libc::SO_RCVTIMEO, 0), [false, true]);
        let accepted = Negative::default();
        accepted.copy(&negative);
        assert!(accepted.has(libc::SO_SNDTIMEO));
        accepted.clear();
        assert!(!accepted.has(libc::SO_SNDTIMEO));
    }

    #[test]
    fn a_fact_is_asked_for_once_until_it_may_have_changed() {
        let waiting = Waiting::default();
        assert!(!waiting.holds(BLOCKS, || false));
        assert!(waiting.holds(BLOCKS, || true), "what does not hold is not remembered");
        assert!(waiting.holds(BLOCKS, || unreachable!("it is known")));
        assert!(!waiting.holds(SENDS_FOR_EVER, || false), "each for itself");
        waiting.forget();
        assert!(!waiting.holds(BLOCKS, || false));
    }

    /// Another thread sets a time limit just after this one has seen that there is none: the old answer is not
    /// recorded.
    #[test]
    fn what_changes_meanwhile_is_not_remembered() {
        let waiting = Waiting::default();
        assert!(waiting.holds(RECEIVES_FOR_EVER, || {
            waiting.forget();
            true
        }));
        assert!(!waiting.holds(RECEIVES_FOR_EVER, || false));
    }
}
