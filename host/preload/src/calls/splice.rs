//! splice(2), which moves bytes past this library. The connection is restored to the kernel first. A connection that
//! has timed out on the NIC (TCP_USER_TIMEOUT, keep-alive) cannot be restored: its remaining bytes and its error are
//! read from the NIC.

use super::transfer::recvfrom;
use crate::kernel_only::leave_to_kernel;
use crate::whole::Whole;
use crate::{real, table, thread};
use baton_abi::layout::Owner;
use libc::{c_int, c_uint, off64_t, pollfd, size_t, ssize_t};

/// Most bytes that are written to a pipe at a time: a pipe that is writable has room for so many (PIPE_BUF).
const PIECE: usize = libc::PIPE_BUF;

/// Whether a connection has timed out on the NIC, and so cannot be restored.
fn has_ended_there(fd: c_int) -> bool {
    table::tcp(fd).is_some_and(|tcp| tcp.settled_owner() == Some(Owner::Nic))
}

fn is_pipe(fd: c_int) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: room for one status, for which zero is a value.
    let status = unsafe {
        libc::fstat(fd, status.as_mut_ptr());
        status.assume_init()
    };
    status.st_mode & libc::S_IFMT == libc::S_IFIFO
}

/// As splice(2), from a connection that has timed out on the NIC into a pipe.
fn from_the_end(from: c_int, to: c_int, length: size_t, flags: c_uint) -> ssize_t {
    let mut piece = [0u8; PIECE];
    let mut room = pollfd { fd: to, events: libc::POLLOUT, revents: 0 };
    let limit = if flags & libc::SPLICE_F_NONBLOCK != 0 { 0 } else { -1 };
    // SAFETY: one live pollfd.
    match unsafe { real::poll(&mut room, 1, limit) } {
        0 => return thread::fail(libc::EAGAIN),
        got if got < 0 => return -1,
        _ => {}
    }
    if room.revents & libc::POLLERR != 0 {
        // The pipe has no reader: this write fails as the program's own call would, before any byte is taken from the
        // connection.
        // SAFETY: a live byte.
        return unsafe { real::write(to, piece.as_ptr().cast(), 1) };
    }
    // A signal handler that jumps away between the two calls would lose the bytes.
    let _whole = Whole::begin();
    // SAFETY: a live buffer of this length.
    let received = unsafe {
        recvfrom(
            from,
            piece.as_mut_ptr().cast(),
            length.min(PIECE),
            libc::MSG_DONTWAIT,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
    if received <= 0 {
        return received;
    }
    // SAFETY: so many bytes are there.
    unsafe { real::write(to, piece.as_ptr().cast(), received as size_t) }
}

/// Intercepts the C library's `splice`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    for (fd, option) in [(from, libc::SO_RCVTIMEO), (to, libc::SO_SNDTIMEO)] {
        if let Err(number) = leave_to_kernel(fd, "splice", option, flags & libc::SPLICE_F_NONBLOCK != 0) {
            return thread::fail(number);
        }
    }
    if length > 0 && from_at.is_null() && to_at.is_null() && has_ended_there(from) && is_pipe(to) {
        return from_the_end(from, to, length, flags);
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::splice(from, from_at, to, to_at, length, flags) }
}
