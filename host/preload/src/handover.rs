//! Whether a socket may be called in the kernel, and how many threads are inside the kernel for it, in one atomic word:
//! neither can change without the other being seen.
//!
//! While a socket is a candidate any thread may call the kernel for it, and sleep there. Once the agent manages the
//! socket no thread may: the connection can leave the kernel at any time, and a call would find the shell. Between the
//! two is the hand-over, which keeps further threads out and waits until those inside have left.

use baton_linux::events;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Who serves calls on a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum State {
    /// The kernel, until its rule hands it over.
    Candidate = 0,
    /// It is being registered with the agent: no thread may enter the kernel for it, and the result is not known yet.
    HandingOver = 1,
    /// The agent manages it: it may be on the NIC.
    Managed = 2,
    /// The kernel, for good.
    Refused = 3,
}

/// The state is in the highest 8 bits, the number of threads inside the kernel below.
const SHIFT: u32 = 24;
const INSIDE: u32 = (1 << SHIFT) - 1;
/// Microseconds that a hand-over waits for other threads to leave the kernel. It waits for short calls only, not for
/// those that may sleep for long.
const PATIENCE: u64 = 1_000;

fn state(word: u32) -> State {
    match word >> SHIFT {
        0 => State::Candidate,
        1 => State::HandingOver,
        2 => State::Managed,
        _ => State::Refused,
    }
}

/// State and count of a socket; see the module.
#[derive(Default)]
pub(crate) struct HandOver(AtomicU32);

/// A guard of a thread that is inside the kernel for a socket. Contains None if the socket is refused: threads are not
/// counted then.
pub(crate) struct Inside<'a>(Option<&'a HandOver>);

impl Inside<'_> {
    /// Whether the socket stays in the kernel for good.
    pub fn for_good(&self) -> bool {
        self.0.is_none()
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(handover) = self.0 {
            let before = handover.0.fetch_sub(1, Ordering::SeqCst);
            if state(before) == State::HandingOver {
                events::wake_all(&handover.0);
            }
        }
    }
}

impl HandOver {
    /// The present state.
    #[inline]
    pub fn state(&self) -> State {
        state(self.0.load(Ordering::SeqCst))
    }

    /// The state once no hand-over is under way.
    #[inline]
    pub fn settled(&self) -> State {
        loop {
            let word = self.0.load(Ordering::SeqCst);
            match state(word) {
                State::HandingOver => events::wait_while(&self.0, word, Duration::from_millis(1)),
                state => return state,
            }
        }
    }

    /// Waits at most `limit` until no hand-over is under way.
    pub fn wait_a_little(&self, limit: Duration) {
        let word = self.0.load(Ordering::SeqCst);
        if state(word) == State::HandingOver {
            events::wait_while(&self.0, word, limit);
        }
    }

    /// Enters the kernel. None if the agent manages the socket.
    #[inline]
    pub fn enter(&self) -> Option<Inside<'_>> {
        loop {
            let word = self.0.load(Ordering::Acquire);
            match state(word) {
                State::Candidate => {
                    if self.0.compare_exchange_weak(word, word + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                        return Some(Inside(Some(self)));
                    }
                }
                State::HandingOver => {
                    self.settled();
                }
                State::Managed => return None,
                State::Refused => return Some(Inside(None)),
            }
        }
    }

    /// Sets the state without regard to threads inside the kernel, and wakes threads that wait for the end of a
    /// hand-over.
    pub fn put(&self, to: State) {
        let change = |word: u32| Some(word & INSIDE | (to as u32) << SHIFT);
        let before = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).unwrap_or_default();
        if state(before) == State::HandingOver {
            events::wake_all(&self.0);
        }
    }

    /// Refuses a candidate: it stays in the kernel for good.
    pub fn refuse(&self) {
        while self.settled() == State::Candidate && !self.change(State::Candidate, State::Refused) {}
    }

    fn change(&self, from: State, to: State) -> bool {
        let change = |word: u32| (state(word) == from).then_some(word & INSIDE | (to as u32) << SHIFT);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).is_ok()
    }

    /// Begins the hand-over of a candidate. On true no thread is inside the kernel, and all are kept out until
    /// [`HandOver::put`]. False if the socket is no candidate, or a thread stays inside. Waits for threads inside only
    /// if `patient`, and only as long as short calls take.
    pub fn begin(&self, patient: bool) -> bool {
        if !patient && self.0.load(Ordering::SeqCst) & INSIDE != 0 || !self.change(State::Candidate, State::HandingOver) {
            return false;
        }
        let deadline = events::monotonic_micros() + PATIENCE;
        loop {
            let word = self.0.load(Ordering::SeqCst);
            if word & INSIDE == 0 {
                return true;
            }
            if !patient || events::monotonic_micros() >= deadline {
                self.put(State::Candidate);
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

    /// Sets a flag however a test ends.
    struct SetsAtEnd<'a>(&'a AtomicBool);

    impl Drop for SetsAtEnd<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Threads enter and leave while others hand over and take back: nobody is inside during a hand-over, nor after it.
    #[test]
    fn nobody_is_inside_what_is_handed_over() {
        let handover = HandOver::default();
        let (taken, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _over = SetsAtEnd(&over);
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let inside = handover.enter();
                        assert!(inside.is_none() || !taken.load(Ordering::SeqCst), "inside what was handed over");
                    }
                });
            }
            for _ in 0..20_000 {
                if handover.begin(true) {
                    taken.store(true, Ordering::SeqCst);
                    std::hint::spin_loop();
                    handover.put(State::Managed);
                    assert!(handover.enter().is_none());
                    taken.store(false, Ordering::SeqCst);
                    handover.put(State::Candidate);
                }
            }
        });
    }

    /// A thread inside prevents a hand-over; a refused socket is entered without being counted.
    #[test]
    fn somebody_inside_holds_it() {
        let handover = HandOver::default();
        let inside = handover.enter().unwrap();
        assert!(!handover.begin(false) && !handover.begin(true) && handover.state() == State::Candidate);
        drop(inside);
        assert!(handover.begin(false) && handover.state() == State::HandingOver);
        handover.put(State::Candidate);
        let inside = handover.enter().unwrap();
        handover.refuse();
        assert!(handover.enter().unwrap().for_good() && !inside.for_good());
        drop(inside);
        handover.put(State::Candidate);
        assert!(handover.begin(false));
    }
}
