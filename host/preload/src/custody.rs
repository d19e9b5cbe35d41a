//! Who has a socket, and how many threads are inside the kernel for it, in one word: neither can change unseen by the other.
//!
//! While a socket is a candidate any thread may call the kernel for it, and sleep there. From the moment the agent knows the socket no
//! thread may: the connection can leave the kernel at any time, and what a call finds then is the shell. The hand-over stands between:
//! it keeps further threads out and waits until those inside have left.

use baton_linux::events;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// In whose hands a socket is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Hands {
    /// The kernel's alone, until its plan says otherwise.
    Candidate = 0,
    /// The agent is being told: nobody may enter the kernel for it, and it is not known yet how that ends.
    HandingOver = 1,
    /// The agent knows it: it may be on the NIC.
    Managed = 2,
    /// The kernel's for good.
    Refused = 3,
}

/// The hands are in the highest bits, the number of threads inside below.
const SHIFT: u32 = 24;
const INSIDE: u32 = (1 << SHIFT) - 1;
/// Microseconds that a hand-over waits for other threads to leave the kernel. Those who may sleep there for long are not waited for.
const PATIENCE: u64 = 1_000;

fn hands(word: u32) -> Hands {
    match word >> SHIFT {
        0 => Hands::Candidate,
        1 => Hands::HandingOver,
        2 => Hands::Managed,
        _ => Hands::Refused,
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Custody(AtomicU32);

/// A thread that is inside the kernel for a socket; without a reference nobody counts it, since it is the kernel's for good.
pub(crate) struct Inside<'a>(Option<&'a Custody>);

impl Inside<'_> {
    /// Whether the socket stays in the kernel whatever happens.
    pub fn for_good(&self) -> bool {
        self.0.is_none()
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(custody) = self.0 {
            let before = custody.0.fetch_sub(1, Ordering::SeqCst);
            if hands(before) == Hands::HandingOver {
                events::wake_all(&custody.0);
            }
        }
    }
}

impl Custody {
    /// As it is just now.
    #[inline]
    pub fn hands(&self) -> Hands {
        hands(self.0.load(Ordering::SeqCst))
    }

    /// As it is once it is not being handed over.
    #[inline]
    pub fn settled(&self) -> Hands {
        loop {
            let word = self.0.load(Ordering::SeqCst);
            match hands(word) {
                Hands::HandingOver => events::wait_while(&self.0, word, Duration::from_millis(1)),
                hands => return hands,
            }
        }
    }

    /// Enters the kernel. None if the agent knows the socket.
    #[inline]
    pub fn enter(&self) -> Option<Inside<'_>> {
        loop {
            let word = self.0.load(Ordering::Acquire);
            match hands(word) {
                Hands::Candidate => {
                    if self.0.compare_exchange_weak(word, word + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                        return Some(Inside(Some(self)));
                    }
                }
                Hands::HandingOver => {
                    self.settled();
                }
                Hands::Managed => return None,
                Hands::Refused => return Some(Inside(None)),
            }
        }
    }

    /// Changes hands, whoever is inside; those who wait for the end of a hand-over go on.
    pub fn put(&self, to: Hands) {
        let change = |word: u32| Some(word & INSIDE | (to as u32) << SHIFT);
        let before = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).unwrap_or_default();
        if hands(before) == Hands::HandingOver {
            events::wake_all(&self.0);
        }
    }

    /// A candidate is the kernel's for good from now on.
    pub fn refuse(&self) {
        while self.settled() == Hands::Candidate && !self.change(Hands::Candidate, Hands::Refused) {}
    }

    fn change(&self, from: Hands, to: Hands) -> bool {
        let change = |word: u32| (hands(word) == from).then_some(word & INSIDE | (to as u32) << SHIFT);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).is_ok()
    }

    /// Begins to hand a candidate over: true with nobody inside and everybody else kept out, until [`Custody::put`]. False if it is no
    /// candidate, or somebody stays inside; only short calls are waited for, and only if `patient`.
    pub fn begin(&self, patient: bool) -> bool {
        if !patient && self.0.load(Ordering::SeqCst) & INSIDE != 0 || !self.change(Hands::Candidate, Hands::HandingOver) {
            return false;
        }
        let deadline = events::monotonic_micros() + PATIENCE;
        loop {
            let word = self.0.load(Ordering::SeqCst);
            if word & INSIDE == 0 {
                return true;
            }
            if !patient || events::monotonic_micros() >= deadline {
                self.put(Hands::Candidate);
                return false;
            }
            events::wait_while(&self.0, word, Duration::from_micros(PATIENCE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Threads enter and leave while others hand over and take back: nobody is inside while it is handed over, nor after that.
    #[test]
    fn nobody_is_inside_what_is_handed_over() {
        let custody = Custody::default();
        let (taken, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let inside = custody.enter();
                        assert!(inside.is_none() || !taken.load(Ordering::SeqCst), "inside what was handed over");
                    }
                });
            }
            for _ in 0..20_000 {
                if custody.begin(true) {
                    taken.store(true, Ordering::SeqCst);
                    std::hint::spin_loop();
                    custody.put(Hands::Managed);
                    assert!(custody.enter().is_none());
                    taken.store(false, Ordering::SeqCst);
                    custody.put(Hands::Candidate);
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }

    /// Whoever stays inside keeps the socket a candidate; one that is the kernel's for good is entered without being counted.
    #[test]
    fn somebody_inside_holds_it() {
        let custody = Custody::default();
        let inside = custody.enter().unwrap();
        assert!(!custody.begin(false) && !custody.begin(true) && custody.hands() == Hands::Candidate);
        drop(inside);
        assert!(custody.begin(false) && custody.hands() == Hands::HandingOver);
        custody.put(Hands::Candidate);
        let inside = custody.enter().unwrap();
        custody.refuse();
        assert!(custody.enter().unwrap().for_good() && !inside.for_good());
        drop(inside);
        custody.put(Hands::Candidate);
        assert!(custody.begin(false));
    }
}
