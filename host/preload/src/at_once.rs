//! The fast paths of calls that send from one buffer, or receive into one. They serve a connection on the NIC, if send
//! memory has room for the whole buffer, or receive memory has data.

use crate::io::PLAIN_SEND;
use crate::table::TcpEntry;
use crate::thread::token;
use crate::whole;
use baton_client::Received;
use libc::{c_int, c_void, size_t, ssize_t};

/// Fast path of send(2) of one buffer. False, with nothing sent, if it does not serve the call.
///
/// # Safety
/// As send(2).
#[inline(always)]
pub(crate) unsafe fn send_at_once(fd: c_int, start: *const c_void, length: size_t, flags: c_int) -> bool {
    // A send with MSG_MORE needs more than a plain command to the NIC.
    if flags & !(PLAIN_SEND & !libc::MSG_MORE) != 0 {
        return false;
    }
    branch();
    let Some((connection, session)) = TcpEntry::of(fd).and_then(|entry| entry.tcp().managed()) else { return false };
    // SAFETY: send(2) requires a readable buffer of `length` bytes (`# Safety`). Where there is none, the slice is only
    // passed on to a guarded copy, and what has sent nothing then goes the slow path, which knows null.
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), length) };
    whole::begin();
    // `whole::end` is in both branches, so that no instruction is needed to keep the result across it.
    if session.shared.send_at_once(connection, token(), bytes) {
        whole::end();
        return true;
    }
    whole::end();
    false
}

/// Fast path of recv(2) into one buffer, whose arguments are `kept` as well. None, with nothing received, if it does
/// not serve the call.
///
/// # Safety
/// As recv(2).
#[inline(always)]
pub(crate) unsafe fn receive_at_once(
    kept: &Arguments,
    fd: c_int,
    start: *mut c_void,
    length: size_t,
    flags: c_int,
) -> Option<ssize_t> {
    if flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) != 0 {
        return None;
    }
    branch();
    let tcp = TcpEntry::of(fd)?.tcp();
    let (connection, session) = tcp.plain()?;
    if length == 0 {
        return None;
    }
    // SAFETY: recv(2) requires a writable buffer of `length` bytes (`# Safety`). Where there is none, the slice is only
    // passed on to a guarded copy, and what has received nothing then goes the slow path, which knows null.
    let room = unsafe { std::slice::from_raw_parts_mut(start.cast(), length) };
    whole::begin();
    // `whole::end` is in both branches, and the length is read from memory, so that no register is needed to keep the
    // result across it.
    match session.shared.receive_at_once(connection, token(), room) {
        Received::All => {
            let length = kept.length;
            tcp.took(length);
            whole::end();
            Some(length as ssize_t)
        }
        Received::Some(received) => {
            tcp.took(received);
            whole::end();
            if received == 0 { None } else { Some(received as ssize_t) }
        }
    }
}

/// Keeps the compiler from computing the conditions before and after this at once, which takes more instructions than a
/// branch for each.
#[inline(always)]
fn branch() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no instruction.
    unsafe {
        std::arch::asm!("", options(nomem, nostack, preserves_flags));
    }
}

/// The arguments of a call for one buffer, kept in memory so that the fast path can use all registers. They are read
/// again only if the fast path does not serve the call.
pub(crate) struct Arguments {
    pub fd: c_int,
    pub flags: c_int,
    pub start: *mut c_void,
    pub length: size_t,
}

impl Arguments {
    #[inline(always)]
    pub fn keep(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: no instruction; the compiler has to write the arguments to memory, and to read them there.
        unsafe {
            std::arch::asm!("/* {} */", in(reg) std::ptr::from_mut(self), options(nostack, preserves_flags));
        }
    }
}
