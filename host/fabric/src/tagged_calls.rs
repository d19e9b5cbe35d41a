//! fi_tagged(3): the calls for messages with a tag.
//!
//! What libfabric's caller promises for each of them: the endpoint is not closed, a buffer has the length given and is left alone
//! until the operation has ended, and there are as many parts as the count says.

use crate::abi::{FidEp, MsgTagged, TaggedOps};
use crate::buffer::ProgramBuffer;
use crate::transfers::{Receive, Send, buffer, on};
use std::ffi::c_void;

/// struct fi_ops_tagged of every endpoint.
pub static OPS: TaggedOps =
    TaggedOps { size: size_of::<TaggedOps>(), recv, recvv, recvmsg, send, sendv, sendmsg, inject, senddata, injectdata };

unsafe extern "C" fn recv(
    ep: *mut FidEp,
    start: *mut c_void,
    length: usize,
    _desc: *mut c_void,
    source: u64,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (ProgramBuffer::new(start, length), endpoint.default_flags(false));
            endpoint.receive(Receive { buffer, source, tag: Some((tag, ignore)), context, flags })
        })
    }
}

unsafe extern "C" fn recvv(
    ep: *mut FidEp,
    iov: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    source: u64,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (buffer(iov, count)?, endpoint.default_flags(false));
            endpoint.receive(Receive { buffer, source, tag: Some((tag, ignore)), context, flags })
        })
    }
}

unsafe extern "C" fn recvmsg(ep: *mut FidEp, message: *const MsgTagged, flags: u64) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let message = message.as_ref().ok_or(libc::EINVAL)?;
            let buffer = buffer(message.iov, message.iov_count)?;
            let tag = Some((message.tag, message.ignore));
            endpoint.receive(Receive { buffer, source: message.addr, tag, context: message.context, flags })
        })
    }
}

unsafe extern "C" fn send(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    _desc: *mut c_void,
    destination: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (ProgramBuffer::new(start.cast_mut(), length), endpoint.default_flags(true));
            endpoint.send(Send { buffer, destination, tag: Some(tag), data: None, context: Some(context), flags })
        })
    }
}

unsafe extern "C" fn sendv(
    ep: *mut FidEp,
    iov: *const libc::iovec,
    _desc: *mut *mut c_void,
    count: usize,
    destination: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (buffer(iov, count)?, endpoint.default_flags(true));
            endpoint.send(Send { buffer, destination, tag: Some(tag), data: None, context: Some(context), flags })
        })
    }
}

unsafe extern "C" fn sendmsg(ep: *mut FidEp, message: *const MsgTagged, flags: u64) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let message = message.as_ref().ok_or(libc::EINVAL)?;
            let buffer = buffer(message.iov, message.iov_count)?;
            let data = (flags & crate::abi::flags::REMOTE_CQ_DATA != 0).then_some(message.data);
            let (destination, context) = (message.addr, Some(message.context));
            endpoint.send(Send { buffer, destination, tag: Some(message.tag), data, context, flags })
        })
    }
}

unsafe extern "C" fn inject(ep: *mut FidEp, start: *const c_void, length: usize, destination: u64, tag: u64) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let buffer = ProgramBuffer::new(start.cast_mut(), length);
            endpoint.send(Send { buffer, destination, tag: Some(tag), data: None, context: None, flags: 0 })
        })
    }
}

unsafe extern "C" fn senddata(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    _desc: *mut c_void,
    data: u64,
    destination: u64,
    tag: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (ProgramBuffer::new(start.cast_mut(), length), endpoint.default_flags(true));
            endpoint.send(Send { buffer, destination, tag: Some(tag), data: Some(data), context: Some(context), flags })
        })
    }
}

unsafe extern "C" fn injectdata(
    ep: *mut FidEp,
    start: *const c_void,
    length: usize,
    data: u64,
    destination: u64,
    tag: u64,
) -> isize {
    // SAFETY: the promises of libfabric's caller (see above).
    unsafe {
        on(ep, |endpoint| {
            let buffer = ProgramBuffer::new(start.cast_mut(), length);
            endpoint.send(Send { buffer, destination, tag: Some(tag), data: Some(data), context: None, flags: 0 })
        })
    }
}
