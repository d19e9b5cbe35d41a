//! getsockopt for packetdrill itself: it asks for TCP_INFO with the C library's function, past its interface. Preloaded, this library
//! answers for its own descriptors and passes everything else on.

use crate::interface::answer_getsockopt;
use core::ffi::{c_int, c_void};
use libc::socklen_t;

/// The C library's `getsockopt`.
///
/// # Safety
/// As for `getsockopt`: `value` has room for `*length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int {
    // SAFETY: the caller's promise for `value` and `length` is this function's own.
    if let Some(result) = unsafe { answer_getsockopt(fd, level, name, value, length) } {
        return result;
    }
    // SAFETY: the arguments are the caller's, passed on to the call that it made.
    unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, name, value, length) as c_int }
}
