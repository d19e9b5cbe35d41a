//! Ways to wait: eventfds as doorbells, epoll, futexes in shared memory, the monotonic clock.

use crate::socket::check;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A doorbell: an eventfd.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// Makes one.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn new() -> io::Result<Doorbell> {
        // SAFETY: no pointers are involved.
        let raw = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: the descriptor is new and ours.
        Ok(Doorbell(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// One that another process made.
    pub fn from_fd(fd: OwnedFd) -> Doorbell {
        Doorbell(fd)
    }

    /// A duplicate of its descriptor.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn try_clone(&self) -> io::Result<Doorbell> {
        self.0.try_clone().map(Doorbell)
    }

    /// Makes it readable, if it is not already.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight live bytes. The write can only fail if it is readable already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), 8) };
    }

    /// Makes it unreadable.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight live bytes. The read can only fail if it is unreadable already.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Doorbell> for OwnedFd {
    fn from(doorbell: Doorbell) -> OwnedFd {
        doorbell.0
    }
}

/// When a descriptor is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trigger {
    /// As long as it is readable.
    Readable,
    /// Each time it becomes readable or writable.
    Edge,
    /// As long as the other end is closed.
    HangUp,
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller(OwnedFd);

impl Poller {
    /// Makes one.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn new() -> io::Result<Poller> {
        // SAFETY: no pointers are involved.
        let raw = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor is new and ours.
        Ok(Poller(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Watches a descriptor; its events are reported as `token`.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64, trigger: Trigger) -> io::Result<()> {
        let events = match trigger {
            Trigger::Readable => libc::EPOLLIN,
            // The kernel reports EPOLLHUP without being asked.
            Trigger::HangUp => 0,
            Trigger::Edge => libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET,
        };
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: one live epoll_event.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event) }).map(|_| ())
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: EPOLL_CTL_DEL does not read the event.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), std::ptr::null_mut()) })
            .map(|_| ())
    }

    /// Waits up to `timeout` and appends the tokens of ready descriptors. An interruption by a signal counts as none ready.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn wait(&self, timeout: Option<Duration>, tokens: &mut Vec<u64>) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let spec = timeout
            .map(|limit| libc::timespec { tv_sec: limit.as_secs() as libc::time_t, tv_nsec: i64::from(limit.subsec_nanos()) });
        let limit = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: 64 live events, a live or null timespec, no signal mask.
        let count = unsafe {
            libc::syscall(libc::SYS_epoll_pwait2, self.0.as_raw_fd(), events.as_mut_ptr(), 64, limit, std::ptr::null::<u8>(), 8)
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        tokens.extend(events[..count as usize].iter().map(|event| event.u64));
        Ok(())
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps while a word in shared memory has the value `expected`, at most `limit`.
pub fn wait_while(word: &AtomicU32, expected: u32, limit: Duration) {
    let spec = libc::timespec { tv_sec: limit.as_secs() as libc::time_t, tv_nsec: i64::from(limit.subsec_nanos()) };
    // SAFETY: a live word and timespec; the function may return early.
    unsafe { libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAIT, expected, &spec) };
}

/// Wakes every thread that sleeps on a word in shared memory.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: a live word.
    unsafe { libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAKE, i32::MAX) };
}

/// Microseconds of the monotonic clock, the same in every process.
pub fn monotonic_micros() -> u64 {
    nanos(libc::CLOCK_MONOTONIC) / 1000
}

/// Nanoseconds of a clock.
fn nanos(clock: libc::clockid_t) -> u64 {
    let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one live timespec.
    unsafe { libc::clock_gettime(clock, &mut spec) };
    spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64
}

/// Nanoseconds of CPU time that the calling thread has used.
pub fn thread_nanos() -> u64 {
    nanos(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_nanos() -> u64 {
    nanos(libc::CLOCK_MONOTONIC)
}
