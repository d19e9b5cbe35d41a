//! Event queues, fi_eq(3). Connectionless endpoints and synchronous address vectors report no events there, but
//! programs open one nevertheless.

use crate::abi::{EqOps, Fid, FidEq, FidFabric, FidOps, class, errno};
use crate::object::{close, hand_out, missing, no_bind, no_control};
use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: close::<FidEq>,
    bind: no_bind,
    control: no_control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

static OPS: EqOps = EqOps { size: size_of::<EqOps>(), read, readerr, write: missing, sread, strerror };

/// fi_eq_open().
pub unsafe extern "C" fn open(_: *mut FidFabric, _: *mut c_void, out: *mut *mut FidEq, context: *mut c_void) -> c_int {
    let queue = FidEq { fid: Fid { class: class::EQ, context, ops: &FID_OPS }, ops: &OPS };
    // SAFETY: the object is a FidEq; `out` is the caller's place for it.
    unsafe { hand_out(queue, out) }
}

unsafe extern "C" fn read(_: *mut FidEq, _: *mut u32, _: *mut c_void, _: usize, _: u64) -> isize {
    -(errno::EAGAIN as isize)
}

unsafe extern "C" fn readerr(_: *mut FidEq, _: *mut c_void, _: u64) -> isize {
    -(errno::EAGAIN as isize)
}

/// Waits until the time limit, since no event ever comes.
unsafe extern "C" fn sread(_: *mut FidEq, _: *mut u32, _: *mut c_void, _: usize, timeout: c_int, _: u64) -> isize {
    match u64::try_from(timeout) {
        Ok(milliseconds) => std::thread::sleep(Duration::from_millis(milliseconds)),
        // Without a limit this would hang the program.
        Err(_) => return -(errno::ENOSYS as isize),
    }
    -(errno::EAGAIN as isize)
}

unsafe extern "C" fn strerror(_: *mut FidEq, _: c_int, _: *const c_void, _: *mut c_char, _: usize) -> *const c_char {
    c"no error".as_ptr()
}
