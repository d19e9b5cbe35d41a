//! A local port that is free a moment late: the program has closed its socket, but agent and keeper did not close their
//! descriptors of it in time. A bind(2) that follows waits for them: without Baton it would succeed.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use baton_linux::events::{monotonic_micros, wait_while};

use crate::thread;

/// Time between two attempts. The kernel reports no event when a port becomes free.
const PAUSE: Duration = Duration::from_millis(2);

/// Until when a port may become free, in microseconds of the monotonic clock. Zero: none is late.
static LATE_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Number of sockets of which this was noted, modulo 2³².
static LATE: AtomicU32 = AtomicU32::new(0);

/// Notes that a closed socket's descriptors elsewhere are closed late.
pub fn note_late() {
    let limit = baton_client::LIMIT.as_micros() as u64;
    LATE_UNTIL.store(monotonic_micros().saturating_add(limit), Ordering::Relaxed);
    LATE.fetch_add(1, Ordering::Relaxed);
}

/// Calls bind(2); again while the address is in use and a port may become free.
pub fn bind(call: impl Fn() -> c_int) -> c_int {
    let errno = thread::errno();
    loop {
        let late = LATE.load(Ordering::Relaxed);
        let done = call();
        let until = LATE_UNTIL.load(Ordering::Relaxed);
        if done == 0 || until == 0 || thread::errno() != libc::EADDRINUSE {
            return done;
        }
        if monotonic_micros() >= until {
            // Somebody else has it. That is waited for once only.
            let _ = LATE_UNTIL.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
            return done;
        }
        // Waits: up to `PAUSE`, for descriptors of Baton's own processes; in all up to `LIMIT` since the close.
        wait_while(&LATE, late, PAUSE);
        thread::set_errno(errno);
    }
}
