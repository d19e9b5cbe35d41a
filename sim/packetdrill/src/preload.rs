//! getsockopt and sendfile for packetdrill itself, which calls the C library's functions, past its interface, for
//! TCP_INFO and for files. Preloaded, this library answers for its own descriptors and passes everything else on.

use crate::interface::{answer_getsockopt, answer_sendfile};
use core::ffi::{c_int, c_void};
use libc::{off_t, size_t, socklen_t, ssize_t};

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

/// The C library's `sendfile`.
///
/// # Safety
/// As for `sendfile`: `offset` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: the caller's promise for `offset` is this function's own.
    if let Some(result) = unsafe { answer_sendfile(to, from, offset, count) } {
        return result;
    }
    // SAFETY: the arguments are the caller's, passed on to the call that it made.
    unsafe { libc::syscall(libc::SYS_sendfile, to, from, offset, count) as ssize_t }
}
