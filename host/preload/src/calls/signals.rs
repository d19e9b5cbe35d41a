//! Functions that set what a signal does.

use crate::{faults, real, signals};
use libc::{c_int, sighandler_t};
use std::sync::atomic::{AtomicU64, Ordering};

/// Signals for which siginterrupt(3) has asked that `signal` sets handlers without SA_RESTART, a bit each.
static INTERRUPT: AtomicU64 = AtomicU64::new(0);

/// Intercepts the C library's `sigaction`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { faults::change(signal, new, old).unwrap_or_else(|| signals::change(signal, new, old)) }
}

/// Intercepts the C library's `sigaction` under its other name.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { sigaction(signal, new, old) }
}

fn bit(signal: c_int) -> u64 {
    if (1..=64).contains(&signal) { 1 << (signal - 1) } else { 0 }
}

fn empty() -> libc::sigaction {
    // SAFETY: sigaction is plain data, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Sets a handler with these flags, as `signal` does. None if the arguments are invalid.
fn set(signal: c_int, handler: sighandler_t, flags: c_int, blocks: bool) -> Option<sighandler_t> {
    if bit(signal) == 0 || handler == libc::SIG_ERR {
        return None;
    }
    let [mut new, mut old] = [empty(), empty()];
    (new.sa_sigaction, new.sa_flags) = (handler, flags);
    if blocks {
        // SAFETY: a live set.
        unsafe { libc::sigaddset(&mut new.sa_mask, signal) };
    }
    // SAFETY: two live actions.
    let done = unsafe { sigaction(signal, &new, &mut old) };
    Some(if done < 0 { libc::SIG_ERR } else { old.sa_sigaction })
}

/// The flags of `signal`.
fn restarts(signal: c_int) -> c_int {
    if INTERRUPT.load(Ordering::Relaxed) & bit(signal) != 0 { 0 } else { libc::SA_RESTART }
}

fn once(_: c_int) -> c_int {
    libc::SA_RESETHAND | libc::SA_NODEFER
}

macro_rules! signals {
    ($($name:ident, $flags:ident, $blocks:expr;)*) => {$(
        /// Intercepts the C library's function of this name.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(number: c_int, handler: sighandler_t) -> sighandler_t {
            // SAFETY: the program's own arguments (`# Safety`). The C library refuses them.
            set(number, handler, $flags(number), $blocks).unwrap_or_else(|| unsafe { real::$name(number, handler) })
        }
    )*};
}

signals! {
    signal, restarts, true;
    bsd_signal, restarts, true;
    ssignal, restarts, true;
    sysv_signal, once, false;
    __sysv_signal, once, false;
}

/// Intercepts the C library's `siginterrupt`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn siginterrupt(number: c_int, interrupts: c_int) -> c_int {
    let mut action = empty();
    // SAFETY: room for an action.
    if unsafe { sigaction(number, std::ptr::null(), &mut action) } < 0 {
        return -1;
    }
    if interrupts != 0 {
        INTERRUPT.fetch_or(bit(number), Ordering::Relaxed);
        action.sa_flags &= !libc::SA_RESTART;
    } else {
        INTERRUPT.fetch_and(!bit(number), Ordering::Relaxed);
        action.sa_flags |= libc::SA_RESTART;
    }
    // SAFETY: a live action.
    unsafe { sigaction(number, &action, std::ptr::null_mut()) }
}

/// sigset(3)'s action that blocks the signal instead.
const SIG_HOLD: sighandler_t = 2;

/// Intercepts the C library's `sigset`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t {
    if bit(number) == 0 || handler == libc::SIG_ERR {
        // SAFETY: the program's own arguments (`# Safety`). The C library refuses them.
        return unsafe { real::sigset(number, handler) };
    }
    let (mut action, mut last) = (empty(), empty());
    let [mut set, mut before] = [action.sa_mask, action.sa_mask];
    action.sa_sigaction = handler;
    let holds = handler == SIG_HOLD;
    let next = if holds { std::ptr::null() } else { std::ptr::from_ref(&action) };
    // SAFETY: live sets and actions.
    unsafe {
        libc::sigaddset(&mut set, number);
        if !holds && sigaction(number, next, &mut last) < 0 {
            return libc::SIG_ERR;
        }
        libc::sigprocmask(if holds { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK }, &set, &mut before);
        if libc::sigismember(&before, number) == 1 {
            return SIG_HOLD;
        }
        if holds && sigaction(number, next, &mut last) < 0 {
            return libc::SIG_ERR;
        }
    }
    last.sa_sigaction
}
