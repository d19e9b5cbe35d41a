//! The calling thread: its token and its errno.

use baton_ring::{MOST_TOKEN, Token};
use libc::c_int;
use std::sync::OnceLock;

/// A token that no other live thread of this process has, as long as their stacks span less than 128 GB: the address of
/// its control block, of which no two lie within 128 bytes.
#[inline(always)]
pub(crate) fn token() -> Token {
    #[cfg(target_arch = "x86_64")]
    {
        let block: usize;
        // SAFETY: the first word of the thread control block is its own address (System V ABI for x86-64, TLS variant
        // II).
        unsafe { std::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, preserves_flags, readonly, pure)) };
        (block >> 6) as u32 & MOST_TOKEN | 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        thread_local!(static HERE: u8 = const { 0 });
        HERE.with(|here| (std::ptr::from_ref(here) as usize >> 2) as u32 & MOST_TOKEN | 1)
    }
}

/// Sets errno and returns -1, the result of a failed call.
#[cold]
pub(crate) fn fail(number: c_int) -> isize {
    // SAFETY: `__errno_location` returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = number };
    -1
}

/// Sets errno.
pub(crate) fn set_errno(number: c_int) {
    fail(number);
}

/// Whether this process has no other thread, as far as the C library knows.
pub(crate) fn is_alone() -> bool {
    static AT: OnceLock<usize> = OnceLock::new();
    // SAFETY: the name is a NUL-terminated string literal.
    let at = *AT.get_or_init(|| unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) } as usize);
    // SAFETY: if found, the symbol is a byte of the C library's that lives as long as the process; a racing write does
    // not tear.
    at != 0 && unsafe { (at as *const u8).read_volatile() } != 0
}

/// The calling thread's errno.
pub(crate) fn errno() -> c_int {
    // SAFETY: `__errno_location` returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// errno of an error.
pub(crate) fn number(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(match error.kind() {
        std::io::ErrorKind::WouldBlock => libc::EAGAIN,
        _ => libc::EIO,
    })
}
