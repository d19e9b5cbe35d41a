//! The common implementation of the many forms of send, receive, read and write.

use crate::abi::{ADDR_UNSPEC, CqEntry, FidEp, caps, errno, flags};
use crate::buffer::ProgramBuffer;
use crate::completion_queue::Event;
use crate::endpoint::{Endpoint, EndpointShared};
use crate::info::{INJECT, PARTS};
use crate::object::object;
use crate::operations::{HAS_DATA, Operation, State};
use baton_messages::{Buffer, Channel, Found, Incoming, Limit, MAX_LENGTH, Outgoing, Payload, Remote, Selector, Transfer};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

/// A message that C sends.
pub struct Send {
    pub buffer: ProgramBuffer,
    pub destination: u64,
    /// The tag, for tagged messages.
    pub tag: Option<u64>,
    pub data: Option<u64>,
    /// None for the inject calls, which have no completion.
    pub context: Option<*mut c_void>,
    pub flags: u64,
}

/// A receive that C posts.
pub struct Receive {
    pub buffer: ProgramBuffer,
    pub source: u64,
    /// The tag and the bits of it to ignore, for tagged messages.
    pub tag: Option<(u64, u64)>,
    pub context: *mut c_void,
    pub flags: u64,
}

/// A read or write of a peer's memory that C asks for.
pub struct Access {
    pub buffer: ProgramBuffer,
    pub peer: u64,
    pub address: u64,
    pub key: u64,
    pub data: Option<u64>,
    pub context: Option<*mut c_void>,
    pub flags: u64,
    /// caps::READ or caps::WRITE.
    pub direction: u64,
}

/// A result as C has it.
fn result(outcome: Result<(), c_int>) -> isize {
    outcome.map_or_else(|error| -(error as isize), |()| 0)
}

fn errno_of(limit: Limit) -> c_int {
    match limit {
        Limit::Sends | Limit::Receives | Limit::Completions | Limit::Commands => errno::EAGAIN,
        Limit::Peers => errno::ENOMEM,
        Limit::Memory => errno::EMSGSIZE,
        Limit::NoPeer => errno::EADDRNOTAVAIL,
        Limit::NoMessage => errno::ENOMSG,
    }
}

/// The endpoint behind C's pointer, if it is enabled.
///
/// # Safety
/// C's pointer to an endpoint that is not closed.
pub unsafe fn endpoint<'a>(ep: *mut FidEp) -> Result<&'a EndpointShared, c_int> {
    // SAFETY: this function's `# Safety`.
    let shared = &*unsafe { object::<Endpoint, _>(ep) }.ok_or(errno::EINVAL)?.shared;
    if shared.enabled.load(Ordering::Acquire) { Ok(shared) } else { Err(errno::EOPBADSTATE) }
}

/// The buffer of `count` parts.
///
/// # Safety
/// There are `count` parts at `iov`, and each is as [`ProgramBuffer::new`] demands.
pub unsafe fn buffer(iov: *const libc::iovec, count: usize) -> Result<ProgramBuffer, c_int> {
    if count > PARTS || iov.is_null() && count > 0 {
        return Err(errno::EINVAL);
    }
    // SAFETY: this function's `# Safety`. An empty slice needs no parts.
    let parts = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(iov, count) } };
    // SAFETY: each part is as `ProgramBuffer::new` demands (`# Safety`).
    unsafe { ProgramBuffer::from_parts(parts) }.ok_or(errno::EINVAL)
}

/// Memory as C gives it.
#[derive(Clone, Copy)]
pub enum Parts {
    One(*mut c_void, usize),
    Several(*const libc::iovec, usize),
}

/// The common arguments of the forms of send and receive.
pub struct Call {
    pub parts: Parts,
    /// Source or destination.
    pub peer: u64,
    /// The tag and the bits of it to ignore, for tagged messages.
    pub tag: Option<(u64, u64)>,
    pub data: Option<u64>,
    /// None for the inject calls, which have no completion.
    pub context: Option<*mut c_void>,
    /// None: the endpoint's own.
    pub flags: Option<u64>,
}

impl Call {
    /// A call without tag and data.
    pub fn new(parts: Parts, peer: u64, context: Option<*mut c_void>) -> Call {
        Call { parts, peer, tag: None, data: None, context, flags: None }
    }

    /// # Safety
    /// The parts are as [`ProgramBuffer::new`] and [`buffer`] demand.
    unsafe fn buffer(&self) -> Result<ProgramBuffer, c_int> {
        // SAFETY: this function's `# Safety`.
        unsafe {
            match self.parts {
                Parts::One(start, length) => Ok(ProgramBuffer::new(start, length)),
                Parts::Several(iov, count) => buffer(iov, count),
            }
        }
    }
}

/// Any form of send.
///
/// # Safety
/// C's pointer to an endpoint that is not closed; the parts are as [`ProgramBuffer::new`] and [`buffer`] demand.
pub unsafe fn send(ep: *mut FidEp, call: Call) -> isize {
    // SAFETY: this function's `# Safety`.
    unsafe {
        on(ep, |endpoint| {
            let own = if call.context.is_some() { endpoint.default_flags(true) } else { 0 };
            let (buffer, flags) = (call.buffer()?, call.flags.unwrap_or(own));
            let (destination, tag, data, context) = (call.peer, call.tag.map(|(tag, _)| tag), call.data, call.context);
            endpoint.send(Send { buffer, destination, tag, data, context, flags })
        })
    }
}

/// Any form of receive.
///
/// # Safety
/// As [`send`].
pub unsafe fn receive(ep: *mut FidEp, call: Call) -> isize {
    // SAFETY: this function's `# Safety`.
    unsafe {
        on(ep, |endpoint| {
            let (buffer, flags) = (call.buffer()?, call.flags.unwrap_or_else(|| endpoint.default_flags(false)));
            let context = call.context.unwrap_or(std::ptr::null_mut());
            endpoint.receive(Receive { buffer, source: call.peer, tag: call.tag, context, flags })
        })
    }
}

/// Runs a call of C on an endpoint.
///
/// # Safety
/// C's pointer to an endpoint that is not closed.
pub unsafe fn on(ep: *mut FidEp, call: impl FnOnce(&EndpointShared) -> Result<(), c_int>) -> isize {
    // SAFETY: this function's `# Safety`.
    result(unsafe { endpoint(ep) }.and_then(call))
}

impl EndpointShared {
    /// The flags of calls that have none of their own.
    pub fn default_flags(&self, sending: bool) -> u64 {
        if sending { &self.transmit_flags } else { &self.receive_flags }.load(Ordering::Relaxed)
    }

    /// Sends a message.
    pub fn send(&self, send: Send) -> Result<(), c_int> {
        let Send { buffer, destination, tag, data, context, flags } = send;
        let injected = context.is_none() || flags & flags::INJECT != 0;
        check_length(&buffer, injected)?;
        // A copy that fits into one packet needs its receiver for nothing: the program may go on at once. Whoever wants
        // to know that the receiver has it says so.
        let strict = flags & (flags::DELIVERY_COMPLETE | flags::MATCH_COMPLETE) != 0;
        let copied = injected || !strict && buffer.length() <= self.eager as u64;
        let kind = if tag.is_some() { caps::TAGGED } else { caps::MSG };
        self.call(|state, now| {
            let peer = state.peer(destination)?;
            let reported = context.is_some() && State::is_reported(&state.transmit, flags);
            let context = context.unwrap_or(std::ptr::null_mut());
            let operation = Operation { context, buffer: std::ptr::null_mut(), flags: caps::SEND | kind, reported, number: 0 };
            let token = (!copied || strict).then(|| state.enter(operation));
            let outgoing = Outgoing {
                peer,
                channel: if tag.is_some() { Channel::Tagged } else { Channel::Plain },
                tag: tag.unwrap_or(0),
                data: data.map_or(0, |data| HAS_DATA | data & 0xffff_ffff),
                payload: if copied { Payload::Copied(buffer.to_vec()) } else { Payload::Borrowed(buffer) },
                token,
            };
            match (state.endpoint.send(outgoing, now), token) {
                (Ok(()), None) => state.end_at_once(&operation),
                (Ok(()), Some(_)) => {}
                (Err(limit), token) => {
                    token.and_then(|token| state.operations.remove(&token));
                    return Err(errno_of(limit));
                }
            }
            Ok(())
        })
    }

    /// Posts a receive, or looks for a message that has come.
    pub fn receive(&self, receive: Receive) -> Result<(), c_int> {
        let Receive { buffer, source, tag, context, flags } = receive;
        check_length(&buffer, false)?;
        let directed = source != ADDR_UNSPEC && self.caps & caps::DIRECTED_RECV != 0;
        let (channel, kind) = if tag.is_some() { (Channel::Tagged, caps::TAGGED) } else { (Channel::Plain, caps::MSG) };
        let (tag, ignore) = tag.unwrap_or((0, u64::MAX));
        self.call(|state, now| {
            let peer = directed.then(|| state.peer(source)).transpose()?;
            let selector = Selector { peer, channel, tag, ignore };
            let reported = State::is_reported(&state.receive, flags);
            let operation = Operation { context, buffer: buffer.start(), flags: caps::RECV | kind, reported, number: 0 };
            if flags & flags::PEEK != 0 {
                return peek(state, &selector, &operation, flags, now);
            }
            if flags & flags::CLAIM != 0 {
                return receive_claimed(state, buffer, &operation, flags, now);
            }
            let token = state.enter(operation);
            let incoming = Incoming { selector, buffer, token };
            if flags & caps::MULTI_RECV != 0 {
                let minimum = self.min_multi_recv.load(Ordering::Relaxed) as u64;
                state.endpoint.receive_multiple(incoming, minimum, now);
                return Ok(());
            }
            match state.endpoint.receive(incoming, now) {
                Ok(number) => {
                    // It may have ended already, and then is not known any more.
                    state.operations.entry(token).and_modify(|operation| operation.number = number);
                    Ok(())
                }
                Err(limit) => {
                    state.operations.remove(&token);
                    Err(errno_of(limit))
                }
            }
        })
    }

    /// Reads or writes a peer's memory.
    pub fn access(&self, access: Access) -> Result<(), c_int> {
        let Access { buffer, peer, address, key, data, context, flags, direction } = access;
        // What is read is copied nowhere else: the flag, which may be one for all calls, says nothing of it.
        let injected = direction == caps::WRITE && (context.is_none() || flags & flags::INJECT != 0);
        if self.caps & caps::RMA == 0 {
            return Err(errno::EOPNOTSUPP);
        }
        if injected && buffer.length() > INJECT as u64 {
            return Err(errno::EMSGSIZE);
        }
        self.call(|state, now| {
            let remote = Remote { peer: state.peer(peer)?, key, address };
            let reported = context.is_some() && State::is_reported(&state.transmit, flags);
            let context = context.unwrap_or(std::ptr::null_mut());
            let kind = caps::RMA | direction;
            let token = state.enter(Operation { context, buffer: std::ptr::null_mut(), flags: kind, reported, number: 0 });
            let payload = if injected { Payload::Copied(buffer.to_vec()) } else { Payload::Borrowed(buffer) };
            let data = data.map_or(0, |data| HAS_DATA | data & 0xffff_ffff);
            let transfer = Transfer { remote, payload, data, token: Some(token) };
            let begun = match direction {
                caps::READ => state.endpoint.read(transfer, now),
                _ => state.endpoint.write(transfer, now),
            };
            begun.map_err(|limit| {
                state.operations.remove(&token);
                errno_of(limit)
            })
        })
    }
}

/// Whether there is a message as long as a buffer (fi_ep_attr: max_msg_size, fi_tx_attr: inject_size).
fn check_length(buffer: &ProgramBuffer, injected: bool) -> Result<(), c_int> {
    let most = if injected { INJECT as u64 } else { MAX_LENGTH };
    if buffer.length() > most { Err(errno::EMSGSIZE) } else { Ok(()) }
}

/// FI_PEEK: reports whether a message has come, with FI_CLAIM takes it for its context, with FI_DISCARD drops it.
fn peek(state: &mut State, selector: &Selector, operation: &Operation, flags: u64, now: u64) -> Result<(), c_int> {
    state.endpoint.progress(now);
    let takes = flags & (flags::CLAIM | flags::DISCARD) != 0;
    let Some(found) = state.endpoint.probe(selector, takes, now).map_err(errno_of)? else {
        state.fail(operation, errno::ENOMSG);
        return Ok(());
    };
    if flags & flags::DISCARD != 0 {
        state.endpoint.receive_claimed(found.claim, None, None, now).map_err(errno_of)?;
    } else if flags & flags::CLAIM != 0 {
        state.claims.insert(operation.context as usize, found.claim);
    }
    let Found { data, length, tag, peer, .. } = found;
    let has_data = data & HAS_DATA != 0;
    let entry = CqEntry {
        op_context: operation.context,
        flags: operation.flags | if has_data { flags::REMOTE_CQ_DATA } else { 0 },
        len: length as usize,
        buf: std::ptr::null_mut(),
        data: if has_data { data & 0xffff_ffff } else { 0 },
        tag: if operation.flags & caps::TAGGED != 0 { tag } else { 0 },
    };
    let source = state.place_of(peer);
    state.report(operation, Event::Done(entry, source));
    Ok(())
}

/// FI_CLAIM without FI_PEEK: receives, or with FI_DISCARD drops, the message that was claimed with this context.
fn receive_claimed(state: &mut State, buffer: ProgramBuffer, operation: &Operation, flags: u64, now: u64) -> Result<(), c_int> {
    let claim = state.claims.remove(&(operation.context as usize)).ok_or(errno::EINVAL)?;
    if flags & flags::DISCARD != 0 {
        match state.endpoint.receive_claimed(claim, None, None, now) {
            // What its sender took back is as good as discarded.
            Ok(()) | Err(Limit::NoMessage) => state.end_at_once(operation),
            Err(limit) => {
                state.claims.insert(operation.context as usize, claim);
                return Err(errno_of(limit));
            }
        }
        return Ok(());
    }
    let token = state.enter(*operation);
    state.endpoint.receive_claimed(claim, Some(buffer), Some(token), now).map_err(|limit| {
        state.operations.remove(&token);
        if limit != Limit::NoMessage {
            // The program may try again.
            state.claims.insert(operation.context as usize, claim);
        }
        errno_of(limit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::side::{Side, Target};
    use baton_fuzz::Choice;

    /// FI_INJECT in the flags for all calls limits what is written, and not what is read.
    #[test]
    fn only_what_is_written_is_injected() {
        // SAFETY: tests of this program read the environment by the standard library only, which has a lock for it.
        unsafe { std::env::set_var("FI_RMPP_NIC", "never") };
        // They live longer than the endpoint.
        let mut bytes = vec![0u8; 2 * INJECT];
        let rights = caps::MSG | caps::RMA | caps::SEND | caps::RECV | caps::READ | caps::WRITE;
        let mut side = Side::with(rights, 0, 0, &mut Choice::new(0));
        let peer = side.insert(side.address, Target::Side(0, 0));
        // SAFETY: the side's endpoint, which is open.
        let endpoint = &unsafe { object::<Endpoint, _>(side.ep) }.expect("an endpoint").shared;
        let mut access = |direction| {
            // SAFETY: all of the bytes, which nobody else uses until the endpoint is closed.
            let buffer = unsafe { ProgramBuffer::new(bytes.as_mut_ptr().cast(), bytes.len()) };
            let (data, context) = (None, Some(std::ptr::null_mut()));
            endpoint.access(Access { buffer, peer, address: 0, key: 1, data, context, flags: flags::INJECT, direction })
        };
        assert_eq!((access(caps::WRITE), access(caps::READ)), (Err(errno::EMSGSIZE), Ok(())));
    }
}
