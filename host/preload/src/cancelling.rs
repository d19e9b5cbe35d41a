//! Signals that come together with the C library's own one by which a thread is cancelled (glibc, pthread_cancel). The
//! kernel begins both handlers, and the program's runs first. In a call of this library's it would wait for ever: glibc
//! (2.36) lets no call return in a thread that is being cancelled until that other handler has run, unless the thread
//! is cancelled at any time, which no thread is in a part that stays whole ([`crate::whole`]). So the program's handler
//! comes after that one, which ends the thread, or returns.

use crate::real;
use libc::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// glibc's signal (SIGCANCEL).
const CANCEL: c_int = 32;

/// Bytes of a handler in which it may not yet have noted that the thread is cancelled, or looked for that.
const BEGINNING: usize = 256;

/// Bytes of the kernel's signal sets.
const SET_BYTES: c_long = 8;

/// Where the kernel has glibc's handler of that signal; 0 as long as that is not known.
static HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Where the kernel has it, or 0 if it has none yet. Asks once: meanwhile another signal may come.
#[inline(always)]
fn handler() -> usize {
    let known = HANDLER.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // The kernel's action: handler, flags, restorer, mask.
    let mut action = [0usize; 4];
    // SAFETY: room for an action, which the kernel fills in.
    unsafe { real::syscall(libc::SYS_rt_sigaction, CANCEL.into(), 0, action.as_mut_ptr() as c_long, SET_BYTES, 0, 0) };
    HANDLER.store(action[0], Ordering::Relaxed);
    action[0]
}

#[cfg(target_arch = "x86_64")]
fn place(context: &libc::ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize
}

#[cfg(target_arch = "aarch64")]
fn place(context: &libc::ucontext_t) -> usize {
    context.uc_mcontext.pc as usize
}

/// Whether a handler has interrupted that signal's handler at its beginning; or, while that waits, the beginning of
/// this library's handler, which is `ours`: several signals may have come at once.
///
/// # Safety
/// `context` is the kernel's, of a handler that runs.
#[inline(always)]
pub(crate) unsafe fn is_beginning(context: *mut c_void, mask: u64, ours: usize) -> bool {
    if mask >> (CANCEL - 1) & 1 == 0 {
        return false;
    }
    // SAFETY: this function's `# Safety`.
    let place = place(unsafe { &*context.cast::<libc::ucontext_t>() });
    [handler(), ours].into_iter().any(|start| start != 0 && place.wrapping_sub(start) < BEGINNING)
}
