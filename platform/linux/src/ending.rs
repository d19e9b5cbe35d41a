//! Runs some last work when a signal asks the process to end.

use crate::process::{ENDING, Undisturbed};
use crate::socket::check;
use std::io::{self, Read};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Descriptor of the pipe that takes the signals' numbers; -1 before there is one.
static NOTIFIED: AtomicI32 = AtomicI32::new(-1);

/// Writes a signal's number into the pipe.
extern "C" fn note(signal: libc::c_int) {
    let number = signal as u8;
    // SAFETY: write(2) is async-signal-safe, and `number` is one byte that lives until it returns. errno is this
    // thread's, and is restored for the code that the signal has interrupted.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(NOTIFIED.load(Ordering::Relaxed), (&raw const number).cast(), 1);
        *libc::__errno_location() = errno;
    }
}

/// Starts a thread that does `work` when a signal of [`ENDING`] arrives, and then ends the process by that signal. A
/// signal that this process was started to ignore (`nohup`) stays ignored. A signal that all other threads block stays
/// pending, as without this. No signal gets blocked here, so programs that this process starts get the signals as
/// usual. To be called once.
///
/// # Errors
/// If there is no room for a pipe or a thread.
pub fn before_end(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (mut arrived, notified) = io::pipe()?;
    // It stays open for as long as the process lives: a handler may use it at any time.
    NOTIFIED.store(OwnedFd::from(notified).into_raw_fd(), Ordering::Relaxed);
    {
        // The new thread inherits this mask, so the signal interrupts another thread.
        let _undisturbed = Undisturbed::begin();
        std::thread::Builder::new().name("ending".into()).spawn(move || {
            let mut signal = [0];
            if arrived.read_exact(&mut signal).is_ok() {
                work();
                end_by(signal[0].into());
            }
        })?;
    }
    ENDING.into_iter().try_for_each(handle)
}

/// Has [`note`] handle a signal, unless it is ignored.
fn handle(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: an action is plain data, which the first call fills in and the second one reads. `note` makes
    // async-signal-safe calls only, and has the type of a handler without SA_SIGINFO.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        check(libc::sigaction(signal, std::ptr::null(), &mut action))?;
        if action.sa_sigaction == libc::SIG_IGN {
            return Ok(());
        }
        action.sa_sigaction = note as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        check(libc::sigaction(signal, &action, std::ptr::null_mut()))?;
    }
    Ok(())
}

/// Ends this process by a signal.
fn end_by(signal: libc::c_int) -> ! {
    // SAFETY: the default action takes no handler; the set is plain data, filled by sigemptyset before it is used.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::raise(signal);
    }
    // The first process of a PID namespace is not ended by its own signals.
    std::process::exit(128 + signal);
}
