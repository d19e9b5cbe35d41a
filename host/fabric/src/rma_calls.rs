//! fi_rma(3): the calls that read and write memory of a peer.
//!
//! What libfabric's caller promises for each of them: the endpoint is not closed, a buffer has the length given and is
//! left alone until the operation has ended, and there are as many parts as the count says.

use crate::abi::{FidEp, MsgRma, RmaOps, caps, flags};
use crate::buffer::ProgramBuffer;
use crate::transfers::{Access, buffer, on};
use baton_messages::Buffer;
use std::ffi::{c_int, c_void};

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
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `length` bytes at `start` alone until the
    // operation has ended.
    unsafe { access(ep, || Ok(ProgramBuffer::new(start, length)), Remote { peer, address, key }, context, caps::READ) }
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
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `count` parts at `iov` alone until the operation
    // has ended.
    unsafe { access(ep, || buffer(iov, count), Remote { peer, address, key }, context, caps::READ) }
}

unsafe extern "C" fn readmsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, `message` is null or lives for the call, and what it describes is
    // left alone until the operation has ended.
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
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `length` bytes at `start` alone until the
    // operation has ended.
    unsafe {
        access(ep, || Ok(ProgramBuffer::new(start.cast_mut(), length)), Remote { peer, address, key }, context, caps::WRITE)
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
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `count` parts at `iov` alone until the operation
    // has ended.
    unsafe { access(ep, || buffer(iov, count), Remote { peer, address, key }, context, caps::WRITE) }
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, message: *const MsgRma, flags: u64) -> isize {
    // SAFETY: libfabric's caller has not closed `ep`, `message` is null or lives for the call, and what it describes is
    // left alone until the operation has ended.
    unsafe { access_message(ep, message, flags, caps::WRITE) }
}

/// Where a read or write goes: the peer, the address in its memory, and the key of that.
struct Remote {
    peer: u64,
    address: u64,
    key: u64,
}

/// A read or write with the endpoint's own flags.
///
/// # Safety
/// The promises of libfabric's caller (see above).
unsafe fn access(
    ep: *mut FidEp,
    buffer: impl FnOnce() -> Result<ProgramBuffer, c_int>,
    Remote { peer, address, key }: Remote,
    context: *mut c_void,
    direction: u64,
) -> isize {
    // SAFETY: this function's `# Safety`.
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (buffer()?, endpoint.default_flags(true));
            endpoint.access(Access { buffer, peer, address, key, data: None, context: Some(context), flags, direction })
        })
    }
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
    // SAFETY: libfabric's caller has not closed `ep`, and there are `length` bytes at `start`, which are copied before
    // the call returns.
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
    // SAFETY: libfabric's caller has not closed `ep`, and leaves the `length` bytes at `start` alone until the
    // operation has ended.
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
    // SAFETY: libfabric's caller has not closed `ep`, and there are `length` bytes at `start`, which are copied before
    // the call returns.
    unsafe {
        on(ep, |endpoint| {
            let buffer = ProgramBuffer::new(start.cast_mut(), length);
            let (data, context, flags, direction) = (Some(data), None, 0, caps::WRITE);
            endpoint.access(Access { buffer, peer, address, key, data, context, flags, direction })
        })
    }
}
