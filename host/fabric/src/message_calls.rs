//! fi_msg(3): the calls for messages without a tag.
//!
//! What libfabric's caller promises for each of them: the endpoint is not closed, a buffer has the length given and is
//! left alone until the operation has ended, and there are as many parts as the count says.

use crate::abi::{FidEp, Msg, MsgOps, errno, flags};
use crate::transfers::{Call, Parts, receive, send as send_call};
use std::ffi::c_void;

/// struct fi_ops_msg of every endpoint.
pub static OPS: MsgOps =
    MsgOps { size: size_of::<MsgOps>(), recv, recvv, recvmsg, send, sendv, sendmsg, inject, senddata, injectdata };

unsafe extern "C" fn recv(
    ep: *mut FidEp,
    start: *mut c_void,
    length: usize,
    _desc: *mut c_void,
    source: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `length` bytes at `start` alone until the
    // operation has ended.
    unsafe { receive(ep, Call::new(Parts::One(start, length), source, Some(context))) }
}

unsafe extern "C" fn recvv(
    ep: *mut FidEp,
    iov: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    source: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `count` parts at `iov` alone until the operation
    // has ended.
    unsafe { receive(ep, Call::new(Parts::Several(iov, count), source, Some(context))) }
}

unsafe extern "C" fn send(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    _desc: *mut c_void,
    destination: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `length` bytes at `start` alone until the
    // operation has ended.
    unsafe { send_call(ep, Call::new(Parts::One(start.cast_mut(), length), destination, Some(context))) }
}

unsafe extern "C" fn sendv(
    ep: *mut FidEp,
    iov: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    destination: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `count` parts at `iov` alone until the operation
    // has ended.
    unsafe { send_call(ep, Call::new(Parts::Several(iov, count), destination, Some(context))) }
}

unsafe extern "C" fn inject(ep: *mut FidEp, start: *const c_void, length: usize, destination: u64) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and there are `length` bytes at `start`, which are copied before
    // the call returns.
    unsafe { send_call(ep, Call::new(Parts::One(start.cast_mut(), length), destination, None)) }
}

unsafe extern "C" fn senddata(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    _desc: *mut c_void,
    data: u64,
    destination: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `length` bytes at `start` alone until the
    // operation has ended.
    unsafe {
        send_call(ep, Call { data: Some(data), ..Call::new(Parts::One(start.cast_mut(), length), destination, Some(context)) })
    }
}

unsafe extern "C" fn injectdata(ep: *mut FidEp, start: *const c_void, length: usize, data: u64, destination: u64) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, and there are `length` bytes at `start`, which are copied before
    // the call returns.
    unsafe { send_call(ep, Call { data: Some(data), ..Call::new(Parts::One(start.cast_mut(), length), destination, None) }) }
}

/// The call that a structure describes; None for null.
///
/// # Safety
/// Null, or a structure that lives for the call.
unsafe fn described(message: *const Msg, flags: u64) -> Option<Call> {
    // SAFETY: this function's `# Safety`.
    let message = unsafe { message.as_ref() }?;
    let Msg { iov, iov_count, addr, context, data, .. } = *message;
    let data = (flags & flags::REMOTE_CQ_DATA != 0).then_some(data);
    Some(Call { data, flags: Some(flags), ..Call::new(Parts::Several(iov, iov_count), addr, Some(context)) })
}

unsafe extern "C" fn recvmsg(ep: *mut FidEp, message: *const Msg, flags: u64) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, `message` is null or lives for the call, and what it describes is
    // left alone until the operation has ended.
    unsafe { described(message, flags).map_or(-(errno::EINVAL as isize), |call| receive(ep, call)) }
}

unsafe extern "C" fn sendmsg(ep: *mut FidEp, message: *const Msg, flags: u64) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, `message` is null or lives for the call, and what it describes is
    // left alone until the operation has ended.
    unsafe { described(message, flags).map_or(-(errno::EINVAL as isize), |call| send_call(ep, call)) }
}
