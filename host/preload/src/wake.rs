//! Functions on eventfds that wake threads, and the eventfd of an epoll set, which wakes the threads that sleep in the
//! set.

use crate::real;
use baton_linux::events::monotonic_micros;
use libc::{c_int, c_long};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Microseconds for which a thread sleeps at most if there is no descriptor to wake it by.
pub(crate) const WITHOUT_DESCRIPTOR: u64 = 10_000;

/// Makes an eventfd readable. Not a cancellation point.
pub(crate) fn signal(fd: c_int) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer is eight live bytes. The write can only fail if the eventfd is readable already.
    unsafe { real::syscall(libc::SYS_write, fd.into(), one.as_ptr() as c_long, 8, 0, 0, 0) };
}

/// Makes an eventfd unreadable.
pub(crate) fn clear(fd: c_int) {
    let mut count = [0u8; 8];
    // SAFETY: the buffer is eight live bytes. The read can only fail if the eventfd is unreadable already.
    unsafe { real::syscall(libc::SYS_read, fd.into(), count.as_mut_ptr() as c_long, 8, 0, 0, 0) };
}

/// A set's eventfd; none before it is needed.
#[derive(Default)]
pub(crate) struct Wake {
    eventfd: OnceLock<c_int>,
    /// When the eventfd was last needed, the program had no descriptor left for it.
    lacks: AtomicBool,
}

impl Wake {
    /// The eventfd, if there is one.
    pub fn get(&self) -> Option<c_int> {
        self.eventfd.get().copied()
    }

    /// The eventfd, which `make` makes if there is none. None if the program has no descriptor left: the next call
    /// tries again, and until then sleeping threads wake up by themselves from time to time. One thread at a time calls
    /// this.
    pub fn made(&self, make: impl FnOnce() -> c_int) -> Option<c_int> {
        if self.get().is_none() {
            let made = make();
            self.lacks.store(made < 0, Ordering::SeqCst);
            if made >= 0 {
                let _ = self.eventfd.set(made);
            }
        }
        self.get()
    }

    /// Until when a thread with this deadline may sleep before it has to look by itself.
    pub fn looks(&self, deadline: Option<u64>) -> Option<u64> {
        let look = self.lacks.load(Ordering::SeqCst).then(|| monotonic_micros() + WITHOUT_DESCRIPTOR);
        deadline.into_iter().chain(look).min()
    }

    /// Wakes threads.
    pub fn signal(&self) {
        if let Some(eventfd) = self.get() {
            signal(eventfd);
        }
    }

    /// Undoes [`Wake::signal`].
    pub fn clear(&self) {
        if let Some(eventfd) = self.get() {
            clear(eventfd);
        }
    }

    /// Prepares the object for the next set.
    pub fn renew(&self) {
        self.lacks.store(false, Ordering::SeqCst);
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A set that had no eventfd once gets one later; until then its threads look by themselves. The next set that has
    /// nothing to wake for does not look.
    #[test]
    fn without_a_descriptor_threads_look_by_themselves() {
        let wake = Wake::default();
        assert!(wake.looks(None).is_none() && wake.looks(Some(5)) == Some(5));
        assert!(wake.made(|| -1).is_none() && wake.get().is_none());
        assert!(wake.looks(None).is_some_and(|at| at >= WITHOUT_DESCRIPTOR) && wake.looks(Some(5)) == Some(5));
        wake.renew();
        assert!(wake.looks(None).is_none());
        assert!(wake.made(|| 100) == Some(100) && wake.made(|| 101) == Some(100));
        assert!(wake.looks(None).is_none());
    }
}
