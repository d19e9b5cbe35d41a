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

/// Fast path of recv(2) into one buffer, whose arguments are `kept` as well. None, with nothing received and nothing
/// changed there, if it does not serve the call.
///
/// # Safety
/// As recv(2).
#[inline(always)]
pub(crate) unsafe fn receive_at_once(
    kept: &mut Arguments,
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
    // SAFETY: recv(2) requires a writable buffer of `length` bytes (`# Safety`). Where there is none, the slice is only
    // passed on to a guarded copy, and what has received nothing then goes the slow path, which knows null.
    let room = unsafe { std::slice::from_raw_parts_mut(start.cast(), length) };
    whole::begin();
    // The length is read from memory, so that no register is needed to keep the result across `whole::end`.
    match session.shared.receive_at_once(connection, token(), room) {
        Received::All => {}
        Received::Some(0) => {
            whole::end();
            return None;
        }
        Received::Some(received) => kept.set_length(received),
    }
    tcp.took(kept.length());
    whole::end();
    Some(kept.length() as ssize_t)
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
    fd: c_int,
    flags: c_int,
    start: *mut c_void,
    length: size_t,
}

impl Arguments {
    #[inline(always)]
    pub fn new(fd: c_int, start: *mut c_void, length: size_t, flags: c_int) -> Arguments {
        Arguments { fd, flags, start, length }
    }

    /// Writes them to memory. To be called where they stay: what is moved is copied.
    #[inline(always)]
    pub fn keep(&mut self) {
        // Volatile, so that the compiler has to write them, and to read them there.
        // SAFETY: to fields of this structure.
        unsafe {
            (&raw mut self.fd).write_volatile(self.fd);
            (&raw mut self.flags).write_volatile(self.flags);
            (&raw mut self.start).write_volatile(self.start);
            (&raw mut self.length).write_volatile(self.length);
        }
    }

    #[inline(always)]
    pub fn length(&self) -> size_t {
        // SAFETY: a field of this structure.
        unsafe { (&raw const self.length).read_volatile() }
    }

    #[inline(always)]
    pub fn set_length(&mut self, length: size_t) {
        // SAFETY: a field of this structure.
        unsafe { (&raw mut self.length).write_volatile(length) }
    }

    /// Descriptor, start, length and flags.
    #[inline(always)]
    pub fn all(&self) -> (c_int, *mut c_void, size_t, c_int) {
        // SAFETY: fields of this structure.
        unsafe {
            let (fd, flags) = ((&raw const self.fd).read_volatile(), (&raw const self.flags).read_volatile());
            (fd, (&raw const self.start).read_volatile(), self.length(), flags)
        }
    }
}
