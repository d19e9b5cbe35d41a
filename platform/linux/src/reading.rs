//! Readings of other processes that may hold up the reader: in threads of their own, and only so many at a time.

use crate::process::{self, Undisturbed};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

/// Most readings of other processes that may be unfinished at a time.
const MOST_READING: usize = 1024;
/// Readings of one user's processes take at most this part (1/32) of the free places: 32 places if no other readings
/// run, and fewer the more run. So more than a hundred users are needed to leave no place for another user.
const PART_OF_FREE: usize = 32;

/// Whether one more process of a user may be read, while `its` processes of this user are being read, and `all` in all.
fn may_be_read(its: usize, all: usize) -> bool {
    its * PART_OF_FREE < MOST_READING.saturating_sub(all)
}

/// The processes whose entries are being read, each with its user, once that matters; None inside if it has ended.
static READING: Mutex<BTreeMap<u32, Option<Option<u32>>>> = Mutex::new(BTreeMap::new());

/// Enters a process, unless it is entered already, or too many are. Users are looked up only when there are more
/// entries than a single user may have: since all processes of a host are read again and again, each look-up would cost
/// much.
fn enter(reading: &mut BTreeMap<u32, Option<Option<u32>>>, process: u32, user_of: impl Fn(u32) -> Option<u32>) -> bool {
    let all = reading.len();
    if reading.contains_key(&process) {
        return false;
    }
    if may_be_read(all, all) {
        reading.insert(process, None);
        return true;
    }
    let (user, mut its) = (user_of(process), 0);
    for (other, known) in reading.iter_mut() {
        its += usize::from(*known.get_or_insert_with(|| user_of(*other)) == user);
    }
    let may = may_be_read(its, all);
    if may {
        reading.insert(process, Some(user));
    }
    may
}

/// While this lives something is read of another process, which may hold up the reader.
#[derive(Debug)]
pub(crate) struct Reading(u32);

impl Reading {
    /// None if an earlier reading of this process has not finished, or too many readings have not: of processes of the
    /// same user, or in all.
    pub fn begin(process: u32) -> Option<Reading> {
        let mut reading = READING.lock().unwrap_or_else(PoisonError::into_inner);
        let real_user = |process| process::users(process).map(|users| users[0]);
        enter(&mut reading, process, real_user).then(|| Reading(process))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READING.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Reads something about another process in a thread of its own, since that process may block the reader: a process in
/// execve(2) blocks any reader of the links of its descriptors, and stays in execve(2) if it has a file that does not
/// close. The result is sent to `to`. Returns whether the reading has begun: until it has finished, nothing else of
/// that process is read.
pub fn apart<T: Send + 'static>(process: u32, read: impl FnOnce() -> T + Send + 'static, to: mpsc::Sender<T>) -> bool {
    let Some(reading) = Reading::begin(process) else { return false };
    let act = move || {
        let result = read();
        drop(reading);
        let _ = to.send(result);
    };
    // The thread inherits the mask: a signal that this process waits for with a descriptor from now on must not be
    // delivered to a thread that is from before, where it would end the process.
    let _undisturbed = Undisturbed::begin();
    std::thread::Builder::new().name("reader".into()).stack_size(256 << 10).spawn(act).is_ok()
}

/// As [`apart`], but waits for the result and returns it. None if the reading has not finished within `limit`; its
/// thread goes on.
pub fn within<T: Send + 'static>(process: u32, limit: Duration, read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, is_done) = mpsc::channel();
    apart(process, read, done).then(|| is_done.recv_timeout(limit).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many users' processes block their readers, each with as many as a user may have: a process of a further
    /// user is still read.
    #[test]
    fn every_user_finds_a_reader() {
        let alone = (0..MOST_READING).take_while(|its| may_be_read(*its, *its)).count();
        assert_eq!(alone, 32);
        let mut all = 0;
        for user in 0..100 {
            let its = (0..MOST_READING).take_while(|its| may_be_read(*its, all + its)).count();
            assert!(its > 0, "user {user} finds {all} readings");
            all += its;
        }
        assert!(!may_be_read(0, MOST_READING));
    }

    /// To look up a process's user costs the reading of a file in /proc: so that is done only while many processes
    /// block their readers.
    #[test]
    fn users_are_looked_up_only_when_that_matters() {
        let (mut reading, asked) = (BTreeMap::new(), std::cell::Cell::new(0));
        let user_of = |process: u32| {
            asked.set(asked.get() + 1);
            Some(process / 1000)
        };
        assert!((0..31).all(|process| enter(&mut reading, process, user_of)) && asked.get() == 0);
        assert!(!enter(&mut reading, 7, user_of), "it is being read");
        // As many as one user may have; a second user may have as many.
        assert!(enter(&mut reading, 31, user_of) && !enter(&mut reading, 32, user_of) && enter(&mut reading, 1000, user_of));
        // The user of each process that is being read is looked up once.
        assert!(asked.get() <= 32 + 4, "{}", asked.get());
    }

    /// Ctrl-C is delivered to any thread that does not block it. The threads that read about other processes block it,
    /// also threads that were started before this process waited for the signal with a descriptor.
    #[test]
    fn a_thread_that_reads_of_another_process_takes_no_signal() {
        let mask = || std::fs::read_to_string("/proc/thread-self/status").ok();
        let status = within(std::process::id(), Duration::from_secs(60), mask).flatten().expect("its status");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("its mask");
        let blocked = u64::from_str_radix(blocked.trim(), 16).expect("a mask");
        for signal in process::ENDING {
            assert!(blocked & 1 << (signal - 1) != 0, "signal {signal} of {blocked:x}");
        }
    }
}
