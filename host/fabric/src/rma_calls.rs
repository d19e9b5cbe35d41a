//! fi_rma(3): the calls that read and write memory of a peer.
//!
//! What libfabric's caller promises for each of them: the endpoint is not closed, a buffer has the length given and is left alone
//! until the operation has ended, and there are as many parts as the count says.

use crate::abi::{FidEp, MsgRma, RmaOps, caps, flags};
use crate::buffer::ProgramBuffer;
use crate::transfers::{Access, buffer, on};
use baton_messages::Buffer;
use std::ffi::c_void;

/// struct fi_ops_rma of every endpoint.
pub static OPS: RmaOps =
    RmaOps { size: size_of::<RmaOps>(), read, readv, readmsg, write, writev, writemsg, inject, writedata, injectdata };

unsafe extern "C" fn read(
    ep: *mut FidEp,
    start: *mut c_void,
    length: usize,
    _desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (ProgramBuffer::new(start, length), endpoint.default_flags(true));
            let (data, context, direction) = (None, Some(context), caps::READ);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn readv(
    ep: *mut FidEp,
    iov: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (buffer(iov, count)?, endpoint.default_flags(true));
            let (data, context, direction) = (None, Some(context), caps::READ);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn readmsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: as for `access_message`.
    unsafe { access_message(ep, message, flags, caps::READ) }
}

unsafe extern "C" fn write(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    _desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (ProgramBuffer::new(start.cast_mut(), length), endpoint.default_flags(true));
            let (data, context, direction) = (None, Some(context), caps::WRITE);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn writev(
    ep: *mut FidEp,
    iov: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (buffer(iov, count)?, endpoint.default_flags(true));
            let (data, context, direction) = (None, Some(context), caps::WRITE);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: as for `access_message`.
    unsafe { access_message(ep, message, flags, caps::WRITE) }
}

/// A read or write that a structure describes. The peer's memory must be one part.
///
/// # Safety
/// The promises of libfabric's caller (see above).
unsafe fn access_message(ep: *mut FidEp, message: *const MsgRma, flags: u64, direction: u64) -> isize {
    // SAFETY: this function's `# Safety`.
    unsafe {
        on(ep, |endpoint| {
            let message = message.as_ref().ok_or(libc::EINVAL)?;
            let buffer = buffer(message.iov, message.iov_count)?;
            let remote = message.rma_iov.as_ref().filter(|_| message.rma_iov_count == 1).ok_or(libc::EINVAL)?;
            if remote.len as u64 != buffer.length() {
                return Err(libc::EINVAL);
            }
            let data = (flags & flags::REMOTE_CQ_DATA != 0).then_some(message.data);
            let (peer, address, key, context) = (message.addr, remote.addr, remote.key, Some(message.context));
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn inject(ep: *mut FidEp, start: *const c_void, length: usize, peer: u64, address: u64, key: u64) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let buffer = ProgramBuffer::new(start.cast_mut(), length);
            let (data, context, flags, direction) = (None, None, 0, caps::WRITE);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn writedata(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    _desc: *mut c_void,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (ProgramBuffer::new(start.cast_mut(), length), endpoint.default_flags(true));
            let (data, context, direction) = (Some(data), Some(context), caps::WRITE);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let buffer = ProgramBuffer::new(start.cast_mut(), length);
            let (data, context, flags, direction) = (Some(data), None, 0, caps::WRITE);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}
