//! An endpoint shared by the program's threads, and a thread of its own that drives it while the program does not.
//!
//! While the program polls, the thread leaves the endpoint to it: two threads that look at the same socket would only
//! get into each other's way. It looks every [`LOOK`] whether the program still does; once that has not polled for
//! [`QUIET`], the thread waits for packets itself. So the endpoint answers its peers whatever the program does, at the
//! latest after both.

use crate::arena::Buffer;
use crate::endpoint::Endpoint;
use baton_linux::events::{Doorbell, Poller, Trigger, monotonic_micros};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Microseconds without a call of the program after which the thread takes over.
const QUIET: u64 = 300;
/// The same with a NIC: a program that looks now and then is not helped by a thread that is woken between.
const QUIET_WITH_NIC: u64 = 4000;
/// How often the thread looks whether the program still polls.
const LOOK: Duration = Duration::from_micros(1000);
/// The same with a NIC, which needs the endpoint less often.
const LOOK_WITH_NIC: Duration = Duration::from_micros(4000);
/// Microseconds in which polls find nothing, after which each offers the processor to others: the peer may need it to
/// go on. A reply that comes sooner finds the program polling.
const YIELD: u64 = 1000;
/// The same with a NIC, which is a process on one of the host's processors.
const YIELD_TO_NIC: u64 = 20;
/// A program that has polled more often than this, with fewer microseconds between than that, does nothing else: only
/// then is its processor offered.
const SPINS: u32 = 8;
const DENSE: u64 = 10;
/// Longest wait while something may time out.
const LONGEST: u64 = 10_000;
/// The thread does no more than this at once without letting the program in.
const WAKE: u64 = 0;

struct Shared<T> {
    state: Mutex<T>,
    /// When the program last called, in microseconds.
    polled: AtomicU64,
    /// When a poll last found something, in microseconds.
    moved: AtomicU64,
    /// Polls in a row with less than [`DENSE`] between them.
    spins: AtomicU32,
    /// The thread waits for packets, however long that takes.
    parked: AtomicBool,
    stop: AtomicBool,
    bell: Doorbell,
}

/// What a driver drives: an endpoint, and what its owner keeps beside it.
pub trait Driven: Send + 'static {
    /// The kind of buffers.
    type Buffer: Buffer;
    /// The endpoint.
    fn endpoint(&mut self) -> &mut Endpoint<Self::Buffer>;
    /// Takes the endpoint's completions to the program. Called with the lock held, after every call and every progress.
    fn deliver(&mut self);
}

/// An endpoint and its thread.
pub struct Driver<T: Driven> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Driven> Driver<T> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn start(mut state: T) -> io::Result<Driver<T>> {
        let bell = Doorbell::new()?;
        let poller = Poller::new()?;
        state.endpoint().watch(&poller)?;
        poller.add(bell.as_fd(), WAKE, Trigger::Readable)?;
        let idle = Poller::new()?;
        idle.add(bell.as_fd(), WAKE, Trigger::Readable)?;
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            polled: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            spins: AtomicU32::new(0),
            parked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            bell,
        });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("rmpp".into()).spawn(move || theirs.run(&poller, &idle))?;
        Ok(Driver { shared, thread: Some(thread) })
    }

    /// Calls the endpoint, and takes what that completes to the program.
    pub fn call<R>(&self, work: impl FnOnce(&mut T, u64) -> R) -> R {
        let now = monotonic_micros();
        let mut state = self.shared.lock();
        state.endpoint().expect_work();
        let result = work(&mut state, now);
        state.deliver();
        drop(state);
        self.shared.polled.store(now, Ordering::Relaxed);
        if self.shared.parked.swap(false, Ordering::AcqRel) {
            // It waits without a time limit, and may have to watch one now.
            self.shared.bell.ring();
        }
        result
    }

    /// Drives the endpoint, unless another thread is doing so.
    pub fn poll(&self) {
        let now = monotonic_micros();
        let last = self.shared.polled.swap(now, Ordering::Relaxed);
        let spins =
            if now.saturating_sub(last) < DENSE { self.shared.spins.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.shared.spins.store(spins, Ordering::Relaxed);
        let mut state = match self.shared.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let moved = state.endpoint().progress(now);
        let patience = if state.endpoint().is_on_nic() { YIELD_TO_NIC } else { YIELD };
        state.deliver();
        drop(state);
        if moved {
            self.shared.moved.store(now, Ordering::Relaxed);
        } else if spins > SPINS && now.saturating_sub(self.shared.moved.load(Ordering::Relaxed)) > patience {
            std::thread::yield_now();
        }
    }

    /// The program is about to wait: the thread takes over at once.
    pub fn leave(&self) {
        self.shared.polled.store(0, Ordering::Relaxed);
        self.shared.bell.ring();
    }
}

impl<T: Driven> Drop for Driver<T> {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(thread) = self.thread.take() {
            // It has no result; if it panicked, the endpoint ends all the same.
            let _ = thread.join();
        }
    }
}

impl<T: Driven> Shared<T> {
    /// Nothing in the state is left half done by a panic that its next user could not go on from.
    fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, poller: &Poller, idle: &Poller) {
        let mut tokens = Vec::new();
        let on_nic = self.lock().endpoint().is_on_nic();
        let (quiet, look) = if on_nic { (QUIET_WITH_NIC, LOOK_WITH_NIC) } else { (QUIET, LOOK) };
        while !self.stop.load(Ordering::Acquire) {
            tokens.clear();
            let now = monotonic_micros();
            let polled = self.polled.load(Ordering::Relaxed);
            // A failed wait would make a busy loop of this one, and nothing worse.
            let _ = if now.saturating_sub(polled) < quiet {
                idle.wait(Some(look), &mut tokens)
            } else {
                let (next, sleep) = self.drive(now);
                let limit = next.map(|at| Duration::from_micros(at.saturating_sub(now).clamp(1, LONGEST)));
                self.parked.store(limit.is_none(), Ordering::Release);
                let waited = poller.wait(if sleep { limit } else { Some(Duration::ZERO) }, &mut tokens);
                self.lock().endpoint().end_sleep(&tokens);
                waited
            };
            if tokens.contains(&WAKE) {
                self.bell.clear();
            }
        }
    }

    /// Drives the endpoint. Returns when it is to be driven again, and whether the thread may sleep until then.
    fn drive(&self, now: u64) -> (Option<u64>, bool) {
        let mut state = self.lock();
        state.endpoint().progress(now);
        let sleep = state.endpoint().prepare_sleep(now);
        state.deliver();
        (state.endpoint().next_timeout(), sleep)
    }
}
