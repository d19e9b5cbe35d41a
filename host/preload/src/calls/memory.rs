//! Functions that lock the program's memory. Session memory stays unlocked: it takes the place of the kernel's socket
//! buffers, which mlockall(2) does not lock. The tables of descriptors stay unlocked too, since few of their pages are
//! used.

use crate::sections::Section;
use crate::{process, real, table, thread, udp};
use libc::c_int;

/// Unlocks the library's memory after an mlockall(2) or munlockall(2) of the program's. `locks_further`: the kernel now
/// locks later mappings (MCL_FUTURE).
fn changed(locks_further: bool) {
    let Some(_section) = Section::enter() else { return };
    let errno = thread::errno();
    if !process::is_mine() {
        return;
    }
    baton_client::keep_unlocked(locks_further);
    table::unlock();
    udp::unlock();
    if let Some(session) = process::session() {
        session.shared.unlock_memory();
    }
    thread::set_errno(errno);
}

/// Intercepts the C library's `mlockall`.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    // SAFETY: no pointers are involved.
    let done = unsafe { real::mlockall(flags) };
    if done == 0 {
        changed(flags & libc::MCL_FUTURE != 0);
    }
    done
}

/// Intercepts the C library's `munlockall`.
#[unsafe(no_mangle)]
pub extern "C" fn munlockall() -> c_int {
    // SAFETY: no arguments.
    let done = unsafe { real::munlockall() };
    if done == 0 {
        changed(false);
    }
    done
}
