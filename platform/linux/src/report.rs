//! Lines on standard error, from `baton run` and from the library that it preloads; Baton's own processes have a log
//! (`platform/log`), which ends here as well. Whoever reads the lines can neither hold a process up nor, by what it
//! does, have it write without end.

use crate::events::monotonic_micros;
use crate::files;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use std::fmt::Arguments;
use std::io;
use std::os::fd::AsFd;
use std::sync::Mutex;

/// Bytes that a pipe takes at once if it has room for any: PIPE_BUF of pipe(7).
const AT_ONCE: usize = 4096;

/// Lines that may be written one after the other.
const BURST: u64 = 200;

/// Time after which one more may be, microseconds.
const PER_LINE: u64 = 50_000;

/// How many lines may be written, and how many were not.
struct Allowance {
    /// When a whole burst may be written again, in microseconds of the monotonic clock.
    full_at: u64,
    left_out: u64,
}

impl Allowance {
    /// Whether a line may be written at this time, and how many were left out before it.
    fn take(&mut self, now: u64) -> Option<u64> {
        let full_at = self.full_at.max(now) + PER_LINE;
        if full_at > now + BURST * PER_LINE {
            self.left_out += 1;
            return None;
        }
        self.full_at = full_at;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Writes a line to standard error ([`crate::report!`]).
pub fn line(text: Arguments<'_>) {
    static ALLOWANCE: Mutex<Allowance> = Mutex::new(Allowance { full_at: 0, left_out: 0 });
    let mut allowance = ALLOWANCE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(left_out) = allowance.take(monotonic_micros()) else { return };
    let before = if left_out > 0 { format!("({left_out} lines were left out)\n") } else { String::new() };
    write_now(format!("{before}{text}\n").as_bytes());
}

/// Writes to standard error as far as that does not wait: neither for a reader nor for another thread, which may wait
/// for one with the lock of `std::io::stderr()`. Takes no memory and no lock.
pub fn write_now(text: &[u8]) {
    write(io::stderr(), text);
}

/// Whether a write does not wait, and there is still a reader: without one, the write would end a program (SIGPIPE).
fn is_ready(to: &impl AsFd) -> bool {
    let mut asked = [PollFd::new(to, PollFlags::OUT)];
    let found = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found == Ok(1) && asked[0].revents() == PollFlags::OUT
}

fn write(to: impl AsFd, text: &[u8]) {
    for part in text.chunks(AT_ONCE) {
        let has_room = is_ready(&to) && files::has_room(to.as_fd(), part.len());
        if !has_room || retry_on_intr(|| rustix::io::write(&to, part)) != Ok(part.len()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pipe that is not read does not block the writer.
    #[test]
    fn a_full_pipe_holds_nobody_up() {
        let (_reader, writer) = io::pipe().expect("a pipe");
        (0..1000).for_each(|_| write(&writer, &[b'x'; 3 * AT_ONCE]));
    }

    /// A pipe whose reader has ended is not written to; one with a reader and a file are.
    #[test]
    fn a_pipe_without_a_reader_is_not_ready() {
        let (reader, writer) = io::pipe().expect("a pipe");
        assert!(is_ready(&writer) && is_ready(&std::fs::File::options().write(true).open("/dev/null").expect("a file")));
        drop(reader);
        assert!(!is_ready(&writer));
    }

    /// A thread that has the lock of standard error, and may wait for its reader, does not hold another one up.
    #[test]
    fn the_lock_of_standard_error_holds_nobody_up() {
        let held = io::stderr().lock();
        std::thread::spawn(|| write_now(b"(of a test)\n")).join().expect("no panic");
        drop(held);
    }

    #[test]
    fn a_flood_is_left_out_and_counted() {
        let mut allowance = Allowance { full_at: 0, left_out: 0 };
        let now = 1_000_000;
        let written = (0..100_000).filter(|_| allowance.take(now).is_some()).count() as u64;
        assert_eq!(written, BURST);
        assert_eq!(allowance.take(now + PER_LINE), Some(100_000 - BURST));
        assert_eq!(allowance.take(now + PER_LINE), None);
        let later = now + 2 * BURST * PER_LINE;
        assert_eq!(allowance.take(later), Some(1));
        assert_eq!((0..BURST).filter(|_| allowance.take(later).is_some()).count() as u64, BURST - 1);
    }
}
