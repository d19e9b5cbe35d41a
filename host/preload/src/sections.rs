//! Whether this library takes part in the program's calls, and which threads are inside it.
//!
//! A process that filters its system calls (seccomp) may be killed for any that it does not make itself. Once the
//! library has *withdrawn*, each intercepted function is the program's own call, with its arguments, and nothing else:
//! no system call before it, none after it, and no lock that might need one. Withdrawing waits for threads that are
//! inside the library: every part of it that may make a system call of its own is a [`Section`]. A thread that makes
//! the program's own call, and may sleep there, is in none.

use crate::forks;
use crate::signals::Mark;
use crate::wait;
use crate::whole::{self, Whole};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static WITHDRAWN: AtomicBool = AtomicBool::new(false);

/// Counters of threads inside sections. Each thread has one of them, which few others share, since sections are entered
/// often.
const COUNTERS: usize = 64;

#[repr(align(64))]
struct Counter(AtomicU32);

static INSIDE: [Counter; COUNTERS] = [const { Counter(AtomicU32::new(0)) }; COUNTERS];

#[inline]
fn counter() -> &'static AtomicU32 {
    // Tokens are multiples of a thread's stack apart, as a rule: all bits of the hash's top depend on them.
    &INSIDE[(crate::thread::token().wrapping_mul(0x9e37_79b9) >> 26) as usize % COUNTERS].0
}

/// Adds to the number of sections that this thread is in, which no handler changes meanwhile.
#[inline]
fn count(change: u32) {
    let sections = &whole::here().sections;
    sections.store(sections.load(Ordering::Relaxed).wrapping_add(change), Ordering::Relaxed);
}

/// Whether the library has withdrawn for good, or does so now.
#[inline(always)]
pub(crate) fn is_withdrawn() -> bool {
    WITHDRAWN.load(Ordering::Relaxed)
}

/// A thread that is inside the library until this is dropped.
///
/// No signal handler of the program's runs in it, but where it sleeps.
pub(crate) struct Section {
    counter: &'static AtomicU32,
    _whole: Whole,
    /// When it came in: handlers that have run since have interrupted the program's call.
    pub begun: Mark,
}

impl Section {
    /// None if the program's own call is all that may be made: the library has withdrawn, or this is a child of
    /// vfork(2), which must change nothing of what the library knows of its parent.
    #[inline]
    pub fn enter() -> Option<Section> {
        if is_withdrawn() || forks::is_child_of_vfork() {
            return None;
        }
        let whole = Whole::begin();
        let counter = counter();
        counter.fetch_add(1, Ordering::SeqCst);
        count(1);
        let section = Section { counter, _whole: whole, begun: Mark::now() };
        // Whoever withdraws sets the flag first, then looks at the counters.
        (!WITHDRAWN.load(Ordering::SeqCst)).then_some(section)
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        count(u32::MAX);
        self.counter.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Forgets the parent's threads, in a child that has copied its memory. Its own one is in some sections: a handler may
/// have forked.
pub(crate) fn forget_inherited() {
    INSIDE.iter().for_each(|counter| counter.0.store(0, Ordering::SeqCst));
    counter().store(whole::here().sections.load(Ordering::Relaxed), Ordering::SeqCst);
}

/// Lets no thread begin a section any more.
pub(crate) fn withdraw() {
    WITHDRAWN.store(true, Ordering::SeqCst);
}

/// Waits until no thread is inside. `wake` wakes those that sleep there. False if one still is after `patience`
/// microseconds.
pub(crate) fn await_none(patience: u64, wake: impl Fn()) -> bool {
    let deadline = wait::now() + patience;
    while INSIDE.iter().any(|counter| counter.0.load(Ordering::SeqCst) > 0) {
        if wait::now() >= deadline {
            return false;
        }
        wake();
        // Waits: sections are short, except those that have just been woken.
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
    true
}
