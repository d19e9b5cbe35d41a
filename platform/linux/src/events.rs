//! Ways to wait: eventfds as doorbells, epoll, futexes in shared memory, the monotonic clock.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, poll};
use rustix::thread::futex;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
        Ok(Doorbell(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// A doorbell that another process made.
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
        // The write can only fail if it is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // The read can only fail if it is unreadable already.
        let _ = rustix::io::read(&self.0, &mut count);
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
    /// Ready as long as the other end is closed.
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
        Ok(Poller(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Watches a descriptor; its events are reported as `token`.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64, trigger: Trigger) -> io::Result<()> {
        let events = match trigger {
            Trigger::Readable => epoll::EventFlags::IN,
            // The kernel reports EPOLLHUP without being asked.
            Trigger::HangUp => epoll::EventFlags::empty(),
            Trigger::Edge => epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET,
        };
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), events)?)
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits up to `timeout` and appends the tokens of ready descriptors. An interruption by a signal counts as none
    /// ready.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn wait(&self, timeout: Option<Duration>, tokens: &mut Vec<u64>) -> io::Result<()> {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let limit = timeout.map(timespec);
        match epoll::wait(&self.0, &mut room, limit.as_ref()) {
            Ok((ready, _)) => tokens.extend(ready.iter().map(|event| event.data.u64())),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// As [`Poller::wait`], but also ends when one of `others` is readable. The epoll instance does not watch `others`:
    /// a watched descriptor costs a callback each time that it becomes readable or writable, even if no thread waits;
    /// for a socket of frames, that is a callback for each frame.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn wait_or(&self, others: [BorrowedFd<'_>; 2], timeout: Option<Duration>, tokens: &mut Vec<u64>) -> io::Result<()> {
        let mut waited = [self.as_fd(), others[0], others[1]].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut waited, timeout.map(timespec).as_ref()) {
            Ok(_) if waited[0].revents().is_empty() => Ok(()),
            Ok(_) => self.wait(Some(Duration::ZERO), tokens),
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn timespec(limit: Duration) -> Timespec {
    Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() }
}

/// Sleeps while a word in shared memory has the value `expected`, for at most `limit`. It may return early.
pub fn wait_while(word: &AtomicU32, expected: u32, limit: Duration) {
    let _ = futex::wait(word, futex::Flags::empty(), expected, Some(&timespec(limit)));
}

/// Wakes every thread that sleeps on a word in shared memory.
pub fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Microseconds of the monotonic clock, the same in every process.
pub fn monotonic_micros() -> u64 {
    nanos(libc::CLOCK_MONOTONIC) / 1000
}

/// Nanoseconds of a clock. The workers read clocks in every round, and libc already knows where the kernel has put its
/// vDSO; rustix would look that up in /proc.
fn nanos(clock: libc::clockid_t) -> u64 {
    let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one live timespec.
    unsafe { libc::clock_gettime(clock, &mut spec) };
    spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64
}

/// Nanoseconds of CPU time that all threads of a process have used, ended threads included. None if the process has
/// ended. The call never waits for the process, and needs no rights over it.
pub fn nanos_of(process: u32) -> Option<u64> {
    // As clock_getcpuclockid(3) makes it: the complement of the process number, then the clock of the scheduler.
    const CPUCLOCK_SCHED: i32 = 2;
    let process = i32::try_from(process).ok().filter(|process| *process > 0)?;
    let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one live timespec.
    let result = unsafe { libc::clock_gettime(!process << 3 | CPUCLOCK_SCHED, &mut spec) };
    (result == 0).then(|| spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64)
}

/// Nanoseconds of CPU time that the calling thread has used.
pub fn thread_nanos() -> u64 {
    nanos(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of CPU time that the process has used, its ended threads included.
pub fn process_nanos() -> u64 {
    nanos(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Nanoseconds since 1970, by the clock that can be set.
pub fn realtime_nanos() -> u64 {
    nanos(libc::CLOCK_REALTIME)
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_nanos() -> u64 {
    nanos(libc::CLOCK_MONOTONIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_a_watched_descriptor_or_another_one_ends_a_wait() {
        let bells = [(); 3].map(|()| Doorbell::new().unwrap());
        let poller = Poller::new().unwrap();
        poller.add(bells[0].as_fd(), 7, Trigger::Readable).unwrap();
        let wait = |limit| {
            let (mut tokens, began) = (Vec::new(), std::time::Instant::now());
            poller.wait_or([bells[1].as_fd(), bells[2].as_fd()], Some(limit), &mut tokens).unwrap();
            (tokens, began.elapsed() >= limit)
        };
        const LONG: Duration = Duration::from_secs(60);
        // Waits: for the time-out that is tested; no event comes, however long it takes.
        assert_eq!(wait(Duration::from_millis(2)), (vec![], true));
        for (bell, tokens) in bells.iter().zip([vec![7], vec![], vec![]]) {
            bell.ring();
            assert_eq!(wait(LONG), (tokens, false));
            bell.clear();
        }
    }
}
