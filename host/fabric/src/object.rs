//! What all objects have in common: how C holds them, and functions that are missing.

use crate::abi::{Fid, errno};
use std::ffi::{c_int, c_void};

/// A negative error number, as functions of libfabric return it.
pub const fn failure(error: c_int) -> c_int {
    -error
}

/// Stands for every function that is not supported ([`crate::abi::Missing`]).
pub unsafe extern "C" fn missing() -> isize {
    -(errno::ENOSYS as isize)
}

/// fi_bind() of objects to which nothing is bound.
pub unsafe extern "C" fn no_bind(_: *mut Fid, _: *mut Fid, _: u64) -> c_int {
    failure(errno::EOPNOTSUPP)
}

/// fi_control() of objects that know no command.
pub unsafe extern "C" fn no_control(_: *mut Fid, _: c_int, _: *mut c_void) -> c_int {
    failure(errno::ENOSYS)
}

/// Gives an object to C. It begins with the structure that C knows.
///
/// # Safety
/// `T` must be `repr(C)` and begin with an `F`; `out` must be null or point to a place for a pointer.
pub unsafe fn hand_out<T, F>(object: T, out: *mut *mut F) -> c_int {
    if out.is_null() {
        return failure(errno::EINVAL);
    }
    // SAFETY: this function's `# Safety`.
    unsafe { *out = Box::into_raw(Box::new(object)).cast() };
    0
}

/// The object behind a pointer that C holds.
///
/// # Safety
/// `pointer` must come from [`hand_out`] with this `T`, and the object must not be closed yet.
pub unsafe fn object<'a, T, F>(pointer: *mut F) -> Option<&'a T> {
    // SAFETY: this function's `# Safety`. Objects are only reached by shared references: what changes in them is behind
    // locks.
    unsafe { pointer.cast::<T>().as_ref() }
}

/// Ends an object: fi_close().
///
/// # Safety
/// As [`object`]; C does not use the pointer any more.
pub unsafe extern "C" fn close<T>(fid: *mut Fid) -> c_int {
    if fid.is_null() {
        return failure(errno::EINVAL);
    }
    // SAFETY: this function's `# Safety`: the box is the one that `hand_out` gave away, and this is its last use.
    drop(unsafe { Box::from_raw(fid.cast::<T>()) });
    0
}

/// The attributes behind a pointer of C; None for null.
///
/// # Safety
/// Null, or a live structure of this type that nobody changes during the call.
pub unsafe fn attributes<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: this function's `# Safety`.
    unsafe { pointer.as_ref() }
}
