//! Signals that arrive together with SIGCANCEL, by which glibc cancels a thread (pthread_cancel). The kernel sets up
//! both handlers, and the program's runs first. If the program's handler called this library it would wait for ever: in
//! a thread that is being cancelled, glibc (2.36) lets no call return before SIGCANCEL's handler has run, unless the
//! thread's cancellation is asynchronous, which it never is in a part that stays whole ([`crate::whole`]). So this
//! library runs the program's handler after SIGCANCEL's, which either ends the thread or returns.

use crate::real;
use libc::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// glibc's signal (SIGCANCEL).
const CANCEL: c_int = 32;

/// Length in bytes of the beginning of a handler: within it, SIGCANCEL's handler may not have recorded the cancellation
/// yet, nor this library's handler looked for it.
const BEGINNING: usize = 256;

/// Bytes of the kernel's signal sets.
const SET_BYTES: c_long = 8;

/// The address of glibc's handler for SIGCANCEL; 0 as long as that is not known.
static HANDLER: AtomicUsize = AtomicUsize::new(0);

/// The address of glibc's handler, or 0 if none is installed yet. Asks the kernel only until it is known.
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

/// Whether a handler has interrupted SIGCANCEL's handler at its beginning; or, with SIGCANCEL's handler set up below
/// it, the beginning of this library's handler `ours`, since several signals may have arrived at once.
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
