//! Stops every thread of a process for a moment, between two system calls, without the process or its parent seeing a
//! signal; and takes a descriptor out of a process.
//!
//! ptrace's SEIZE and INTERRUPT do this. If the process that stopped another dies, the kernel resumes the other.
//!
//! A call in which a thread was waiting is interrupted by the stop, and the kernel restarts most such calls. Calls that
//! the kernel would not restart are made to restart: without that, a receive on a socket in a BPF map of sockets would
//! return EAGAIN, and a receive with a time-out or epoll_wait would return EINTR.

use crate::foreign::Foreign;
use crate::socket::check;
use rustix::process::{Pid, PidfdGetfdFlags, WaitOptions, WaitStatus};
use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;

/// Microseconds after which a thread that has not stopped is not waited for: it may be inside vfork.
const PATIENCE: u64 = 50_000;

/// How often the processor is yielded before the wait for a thread sleeps, and how long each sleep is.
const YIELDS: u32 = 100;
const NAP: std::time::Duration = std::time::Duration::from_micros(50);

thread_local! {
    /// Threads that were asked to stop and had not stopped when their process was resumed: they will still stop, and
    /// have to be resumed then. Also threads that were killed while they were stopped: the kernel reports their end to
    /// no other process before this process has waited for them.
    static LATE: RefCell<Vec<i32>> = const { RefCell::new(Vec::new()) };
}

/// Whether threads that were asked to stop have not been resumed yet.
pub fn any_late() -> bool {
    LATE.with_borrow(|late| !late.is_empty())
}

/// Resumes threads that stopped too late. Returns whether others have not stopped yet: then the thread that froze them
/// must call this again soon.
pub fn release_late() -> bool {
    for number in LATE.take() {
        let mut thread = Thread { process: 0, number, stopped: false, signal: 0 };
        match thread.has_stopped() {
            Ok(false) => LATE.with_borrow_mut(|late| late.push(number)),
            Ok(true) if thread.stopped => thread.release(),
            _ => {}
        }
    }
    any_late()
}

/// Processes all of whose threads are stopped until this is dropped. It belongs to the thread that made it.
#[derive(Debug, Default)]
pub struct Frozen {
    threads: Vec<Thread>,
    _not_send: std::marker::PhantomData<*const ()>,
}

#[derive(Debug)]
struct Thread {
    process: u32,
    number: i32,
    stopped: bool,
    /// A signal that was being delivered to the thread.
    signal: i32,
}

fn ptrace(request: libc::c_uint, thread: i32, data: usize) -> io::Result<()> {
    // SAFETY: these requests (SEIZE, INTERRUPT, DETACH) take no pointers.
    let done = unsafe { libc::ptrace(request, thread, 0usize, data) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A thread's status if it has stopped or ended and that was not reported yet.
fn poll_status(thread: i32) -> io::Result<Option<WaitStatus>> {
    // __WALL: also threads that this process traces without being their parent, whatever signal they end with.
    let options = WaitOptions::NOHANG | WaitOptions::from_bits_retain(libc::__WALL as u32);
    Ok(rustix::process::waitpid(Pid::from_raw(thread), options)?.map(|(_, status)| status))
}

fn threads_of(process: u32) -> io::Result<Vec<i32>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task"))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

impl Frozen {
    /// Stops these processes.
    ///
    /// # Errors
    /// `EPERM` if this process may not stop one of them, or if one is traced already (by a debugger); `TimedOut` if a
    /// thread does not stop. After an error all of them are resumed.
    pub fn freeze(processes: &[u32]) -> io::Result<Frozen> {
        let mut frozen = Frozen::default();
        for process in processes {
            frozen.add(*process)?;
        }
        Ok(frozen)
    }

    /// Stops one more process. A process that has ended counts as stopped.
    ///
    /// # Errors
    /// As [`Frozen::freeze`]; threads that have stopped stay stopped, and the next call waits again for those that have
    /// not.
    pub fn add(&mut self, process: u32) -> io::Result<()> {
        for thread in self.threads.iter_mut().filter(|thread| thread.process == process && !thread.stopped) {
            thread.wait()?;
        }
        // Threads that were created meanwhile are found in the next round.
        loop {
            let Ok(threads) = threads_of(process) else { return Ok(()) };
            let new: Vec<i32> =
                threads.into_iter().filter(|number| self.threads.iter().all(|known| known.number != *number)).collect();
            if new.is_empty() {
                return Ok(());
            }
            let first = self.threads.len();
            for number in new {
                match ptrace(libc::PTRACE_SEIZE, number, 0) {
                    Ok(()) => {}
                    // It has just ended.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
                    // It did not stop the last time: the request is still pending.
                    Err(error) if error.raw_os_error() == Some(libc::EPERM) && take_late(number) => {}
                    // It has ended, and has not been waited for yet.
                    Err(error) if error.raw_os_error() == Some(libc::EPERM) && is_dead(number) => continue,
                    Err(error) => return Err(error),
                }
                let _ = ptrace(libc::PTRACE_INTERRUPT, number, 0);
                self.threads.push(Thread { process, number, stopped: false, signal: 0 });
            }
            for at in first..self.threads.len() {
                self.threads[at].wait()?;
            }
            if first == self.threads.len() {
                return Ok(());
            }
        }
    }
}

/// Removes a thread from the list of late threads, if it is on it.
fn take_late(number: i32) -> bool {
    LATE.with_borrow_mut(|late| late.extract_if(.., |other| *other == number).count() > 0)
}

/// Whether a thread has ended and has not been waited for yet.
fn is_dead(number: i32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{number}/status")) else { return true };
    let state = status.lines().find_map(|line| line.strip_prefix("State:")).map(str::trim);
    state.is_none_or(|state| state.starts_with(['Z', 'X']))
}

impl Thread {
    fn wait(&mut self) -> io::Result<()> {
        let deadline = crate::events::monotonic_micros() + PATIENCE;
        for look in 0u32.. {
            if self.has_stopped()? {
                break;
            }
            if crate::events::monotonic_micros() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("thread {} does not stop: it may be inside vfork", self.number),
                ));
            }
            // It stops as soon as it runs. Both kinds of waiting are short, and nothing shows which one it is in.
            if look < YIELDS { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
        Ok(())
    }

    /// Whether it has stopped, or ended.
    fn has_stopped(&mut self) -> io::Result<bool> {
        // An error: it has ended.
        let Ok(status) = poll_status(self.number) else { return Ok(true) };
        let Some(status) = status else { return Ok(false) };
        let Some(signal) = status.stopping_signal() else { return Ok(true) };
        self.stopped = true;
        // Not the stop that was asked for: its signal is delivered when the thread is resumed.
        if status.as_raw() >> 16 == 0 {
            self.signal = signal;
        }
        restart_call(self.number).map(|()| true)
    }

    /// Resumes it.
    fn release(&self) {
        if ptrace(libc::PTRACE_DETACH, self.number, self.signal as usize).is_err() {
            // It was killed: the kernel reports its end to its tracer before its parent, perhaps only in a moment.
            LATE.with_borrow_mut(|late| late.push(self.number));
        }
    }
}

/// Makes the kernel restart the call in which a stopped thread was waiting, if it would not do so by itself. It does so
/// by a return value that programs never see. If a signal handler runs in between, its flags decide as usual whether
/// the call ends.
#[cfg(target_arch = "x86_64")]
fn restart_call(thread: i32) -> io::Result<()> {
    const ERESTARTSYS: u64 = -512i64 as u64;
    const ERESTARTNOHAND: u64 = -514i64 as u64;
    const UNLIMITED: u64 = u32::MAX as u64;
    // SAFETY: plain data, for which zero is a value.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: room for the registers of this architecture.
    check(unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, 0usize, &raw mut registers) } as i32)?;
    let error = (registers.rax as i64).wrapping_neg();
    let ended_early = error == i64::from(libc::EAGAIN) || error == i64::from(libc::EINTR);
    let result = match registers.orig_rax as i64 {
        libc::SYS_read | libc::SYS_readv | libc::SYS_recvfrom | libc::SYS_recvmsg if ended_early => ERESTARTSYS,
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait
            if error == i64::from(libc::EINTR) && registers.r10 & UNLIMITED == UNLIMITED =>
        {
            ERESTARTNOHAND
        }
        libc::SYS_epoll_pwait2 if error == i64::from(libc::EINTR) && registers.r10 == 0 => ERESTARTNOHAND,
        _ => return Ok(()),
    };
    registers.rax = result;
    // SAFETY: the registers that were just read, except for the result.
    check(unsafe { libc::ptrace(libc::PTRACE_SETREGS, thread, 0usize, &raw const registers) } as i32).map(|_| ())
}

/// Not implemented on this architecture: processes that wait in a call cannot be frozen.
#[cfg(not(target_arch = "x86_64"))]
fn restart_call(_thread: i32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for thread in &mut self.threads {
            // Only a stopped thread can be resumed. For a thread that has ended there is nothing to do.
            match if thread.stopped { Ok(true) } else { thread.has_stopped() } {
                _ if thread.stopped => thread.release(),
                Ok(false) => LATE.with_borrow_mut(|late| late.push(thread.number)),
                _ => {}
            }
        }
    }
}

/// Duplicates a process's descriptor (pidfd_getfd), which may be of any file by the time of the call. `process` is a
/// pidfd.
///
/// # Errors
/// `EPERM` if the process may not be inspected, `EBADF` if it has no such descriptor, `ESRCH` if it has ended.
pub fn take_descriptor(process: BorrowedFd<'_>, number: i32) -> io::Result<Foreign> {
    Ok(rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec};
    use std::io::Read;
    use std::process::{Command, Stdio};

    /// A child of several threads counts; frozen, it does not, and its parent is not notified.
    #[test]
    fn a_frozen_process_stands_still_and_goes_on() {
        let script = "
import os, threading
def work():
    while True: os.write(1, b'x' * 4096)
for _ in range(3): threading.Thread(target=work, daemon=True).start()
work()";
        let mut child = Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("python3");
        let mut output = child.stdout.take().expect("its output");
        let mut buffer = vec![0; 1 << 20];
        while threads_of(child.id()).expect("its threads").len() < 4 {
            output.read_exact(&mut buffer[..1 << 16]).expect("it runs");
        }
        rustix::fs::fcntl_setfl(&output, rustix::fs::OFlags::NONBLOCK).expect("our own descriptor");
        for _ in 0..20 {
            let frozen = Frozen::freeze(&[child.id()]).expect("frozen");
            assert!(frozen.threads.len() >= 4);
            // Reads the bytes that were in the pipe; no more come after them.
            while output.read(&mut buffer).is_ok() {}
            assert_eq!(output.read(&mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            assert!(child.try_wait().expect("a child").is_none());
            drop(frozen);
            let mut readable = [PollFd::new(&output, PollFlags::IN)];
            let limit = Timespec { tv_sec: 5, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut readable, Some(&limit)), Ok(1), "it does not go on");
        }
        child.kill().expect("our child");
        child.wait().expect("our child");
        assert!(Frozen::freeze(&[child.id()]).expect("nothing to freeze").threads.is_empty());
    }
}
