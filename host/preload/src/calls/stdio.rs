//! The C library's own input and output on sockets. The C library reads and writes past this library, so the connection
//! is restored first. It stays in the kernel for good if it was used by fdopen or dprintf, and otherwise as long as it
//! is standard input, output or error.

use crate::kernel_only::{self, Patience};
use crate::sections::Section;
use crate::tcp::Tcp;
use crate::{real, table, thread};
#[cfg(target_arch = "x86_64")]
use baton_protocol::program::Until;
use libc::{c_char, c_int, c_void};

/// The cause that `baton ls` shows.
const STDIO: &str = "stdio";

/// Whether the C library has a stream on this descriptor from the start: standard input, output or error.
pub(crate) fn is_standard(fd: c_int) -> bool {
    (0..=libc::STDERR_FILENO).contains(&fd)
}

/// Restores a connection that has become standard input, output or error. (A connection that is not handed over yet
/// will not be: see `Tcp::is_standard`.)
pub(super) fn take_over(tcp: &Tcp) {
    tcp.settle();
    if tcp.is_managed() {
        // This fails only if the thread is leaving this call by a jump or by its end, or another thread has closed the
        // socket.
        let _ = await_kernel(tcp);
    }
}

/// Restores a connection, and waits until it is in the kernel: once the C library reads or writes, this library cannot
/// make it wait.
fn await_kernel(tcp: &Tcp) -> Result<(), c_int> {
    kernel_only::leave(tcp, STDIO, || Patience::Always)
}

/// Restores a connection, but does not wait for that: a thread that is cancelled where it sleeps could not go past the
/// frame of a function with a variable number of arguments ([`crate::calls::jumps`]).
#[cfg(target_arch = "x86_64")]
fn leave_to_library(fd: c_int) {
    if let Some(tcp) = table::tcp(fd)
        && let Some(_section) = Section::enter()
    {
        tcp.give_back(STDIO, Until::Never);
    }
}

/// Intercepts the C library's `fdopen`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE {
    if let Some(tcp) = table::tcp(fd)
        && let Some(_section) = Section::enter()
    {
        if let Err(number) = await_kernel(tcp) {
            thread::set_errno(number);
            return std::ptr::null_mut();
        }
        // fclose(3) is not intercepted either: the library would not see the descriptor's end.
        tcp.forget_connection();
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::fdopen(fd, mode) }
}

/// Intercepts the C library's `vdprintf`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    if let Some(Err(number)) = table::tcp(fd).map(await_kernel) {
        return thread::fail(number) as c_int;
    }
    // SAFETY: the program's own arguments (`# Safety`). A va_list is passed as a pointer.
    unsafe { real::vdprintf(fd, format, list) }
}

/// Intercepts the C library's `vdprintf` as compilers call it with _FORTIFY_SOURCE.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    if let Some(Err(number)) = table::tcp(fd).map(await_kernel) {
        return thread::fail(number) as c_int;
    }
    // SAFETY: the program's own arguments (`# Safety`). A va_list is passed as a pointer.
    unsafe { real::vdprintf_checked(fd, flag, format, list) }
}

#[cfg(target_arch = "x86_64")]
mod jumps {
    //! Functions with a variable number of arguments.

    use super::leave_to_library;

    crate::calls::jumps! {
        dprintf = c"dprintf", DPRINTF, prepare_dprintf(fd: libc::c_int), leave_to_library(fd);
        __dprintf_chk = c"__dprintf_chk", DPRINTF_CHECKED, prepare_dprintf_checked(fd: libc::c_int), leave_to_library(fd);
    }
}
