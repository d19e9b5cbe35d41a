//! What is known of how a socket's calls wait, so that a call that sleeps need not ask the kernel again: that they do
//! (O_NONBLOCK is not set), and that they do without a limit (SO_RCVTIMEO, SO_SNDTIMEO); and that sends with
//! MSG_ZEROCOPY are completed. Whatever the program does that may change one of these makes all of them unknown.

use std::sync::atomic::{AtomicU32, Ordering};

/// Something that is known, as bits.
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

/// Number of bits for facts. The others count how often they became unknown.
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

    /// Asks whether something holds, unless it is known, and remembers that it does. What another thread changes
    /// meanwhile stays unknown.
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

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Another thread sets a limit while this one has just seen that there is none.
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
