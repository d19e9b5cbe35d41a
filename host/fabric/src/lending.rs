//! Lending session memory to the library that has been preloaded for it (`host/fabric/memory`).

use crate::libfabric::{Level, log};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

type Take = unsafe extern "C" fn(*mut c_void, usize, c_int, u64) -> bool;

/// Lends so many bytes, which are zero: the part from `at` on of the memory behind `fd`. They stay mapped if this
/// returns true; false if the library is not there, or has memory already.
pub fn lend(start: NonNull<u8>, length: usize, fd: BorrowedFd<'_>, at: u64) -> bool {
    // SAFETY: a C string, and a valid handle.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"rmpp_memory_lend".as_ptr()) };
    let lent = NonNull::new(found).is_some_and(|found| {
        // SAFETY: the function of this name has this type. The caller keeps the memory mapped, and gives it to nobody
        // else.
        unsafe { std::mem::transmute::<*mut c_void, Take>(found.as_ptr())(start.as_ptr().cast(), length, fd.as_raw_fd(), at) }
    });
    if lent {
        log(Level::Info, &format!("{} MB of the NIC's memory for large blocks is lent to malloc(3)", length >> 20));
    }
    lent
}
