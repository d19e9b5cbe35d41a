//! Functions that set what a signal does, for the signals that this library has a handler for itself.

use crate::{faults, real};
use libc::{c_int, sighandler_t};

/// Intercepts the C library's `sigaction`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { faults::change(signal, new, old).unwrap_or_else(|| real::sigaction(signal, new, old)) }
}

/// Sets a handler with these flags, as `signal` does. None if it is another signal.
fn set(signal: c_int, handler: sighandler_t, flags: c_int, blocks: bool) -> Option<sighandler_t> {
    // SAFETY: sigaction is plain data, for which zero is a value.
    let [mut new, mut old]: [libc::sigaction; 2] = unsafe { std::mem::zeroed() };
    (new.sa_sigaction, new.sa_flags) = (handler, flags);
    if blocks {
        // SAFETY: a live set.
        unsafe { libc::sigaddset(&mut new.sa_mask, signal) };
    }
    // SAFETY: two live actions.
    let done = unsafe { faults::change(signal, &new, &mut old) }?;
    Some(if done < 0 { libc::SIG_ERR } else { old.sa_sigaction })
}

macro_rules! signals {
    ($($name:ident, $flags:expr, $blocks:expr;)*) => {$(
        /// Intercepts the C library's function of this name.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(number: c_int, handler: sighandler_t) -> sighandler_t {
            // SAFETY: the program's own arguments (`# Safety`).
            set(number, handler, $flags, $blocks).unwrap_or_else(|| unsafe { real::$name(number, handler) })
        }
    )*};
}

signals! {
    signal, libc::SA_RESTART, true;
    bsd_signal, libc::SA_RESTART, true;
    ssignal, libc::SA_RESTART, true;
    sysv_signal, libc::SA_RESETHAND | libc::SA_NODEFER, false;
    __sysv_signal, libc::SA_RESETHAND | libc::SA_NODEFER, false;
}
