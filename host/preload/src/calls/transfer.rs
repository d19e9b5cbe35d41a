//! Receiving and sending.

use crate::{io, real, table, thread};
use baton_protocol::program::Until;
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

/// What is not as plain as can be; without flags it is read(2).
#[inline(never)]
unsafe fn receive(fd: c_int, buffer: *mut c_void, length: size_t, flags: Option<c_int>) -> ssize_t {
    match (table::tcp(fd), flags) {
        // SAFETY: the caller's promise.
        (Some(tcp), Some(flags)) => unsafe { io::receive(tcp, fd, buffer, length, flags) },
        // Reading nothing tells nothing.
        (Some(_), None) if length == 0 => 0,
        // SAFETY: the caller's promise.
        (Some(tcp), None) => unsafe { io::receive(tcp, fd, buffer, length, 0) },
        // SAFETY: the caller's promise.
        (None, Some(flags)) => unsafe { real::recv(fd, buffer, length, flags) },
        // SAFETY: the caller's promise.
        (None, None) => unsafe { real::read(fd, buffer, length) },
    }
}

/// What is not as plain as can be; without flags it is write(2).
#[inline(never)]
unsafe fn transmit(fd: c_int, buffer: *const c_void, length: size_t, flags: Option<c_int>) -> ssize_t {
    match (table::tcp(fd), flags) {
        // SAFETY: the caller's promise.
        (Some(tcp), flags) => unsafe { io::send(tcp, fd, buffer, length, flags.unwrap_or(0)) },
        // SAFETY: the caller's promise.
        (None, Some(flags)) => unsafe { real::send(fd, buffer, length, flags) },
        // SAFETY: the caller's promise.
        (None, None) => unsafe { real::write(fd, buffer, length) },
    }
}

macro_rules! receives {
    ($name:ident, $fd:ident, $buffer:ident, $length:ident, ($($extra:ident: $type:ty),*), $flags:ident) => {
        /// See the C library.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($fd: c_int, $buffer: *mut c_void, $length: size_t, $($extra: $type),*) -> ssize_t {
            // SAFETY: the caller's promise.
            if let Some(received) = unsafe { io::receive_at_once($fd, $buffer, $length, $flags) } {
                return received;
            }
            // SAFETY: the caller's promise.
            unsafe { receive($fd, $buffer, $length, Some($flags)) }
        }
    };
}

receives!(recv, fd, buffer, length, (flags: c_int), flags);
receives!(__recv_chk, fd, buffer, length, (_room: size_t, flags: c_int), flags);

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    if let Some(received) = unsafe { io::receive_at_once(fd, buffer, length, 0) } {
        return received;
    }
    // SAFETY: the caller's promise.
    unsafe { receive(fd, buffer, length, None) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, length: size_t, _room: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { read(fd, buffer, length) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    address: *mut sockaddr,
    size: *mut socklen_t,
) -> ssize_t {
    let Some(tcp) = table::tcp(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { real::recvfrom(fd, buffer, length, flags, address, size) };
    };
    // SAFETY: the caller's promise.
    let at_once = unsafe { io::receive_at_once(fd, buffer, length, flags) };
    // SAFETY: the caller's promise.
    let received = at_once.unwrap_or_else(|| unsafe { io::receive(tcp, fd, buffer, length, flags) });
    if received >= 0 && !address.is_null() && !size.is_null() {
        // A connected stream names no sender.
        // SAFETY: the caller's promise.
        unsafe { *size = 0 };
    }
    received
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    _room: size_t,
    flags: c_int,
    address: *mut sockaddr,
    size: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { recvfrom(fd, buffer, length, flags, address, size) }
}

fn message_of(vectors: *const iovec, count: usize) -> msghdr {
    let mut message = io::empty_message();
    message.msg_iov = vectors.cast_mut();
    message.msg_iovlen = count as _;
    message
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    match table::tcp(fd) {
        Some(tcp) if (1..=1024).contains(&count) => {
            // SAFETY: the caller's promise.
            unsafe { io::receive_message(tcp, fd, &mut message_of(vectors, count as usize), 0) }
        }
        // SAFETY: the caller's promise.
        _ => unsafe { real::readv(fd, vectors, count) },
    }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv2(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t {
    if let Some(tcp) = table::tcp(fd) {
        tcp.give_back("preadv2", Until::Never);
    }
    // SAFETY: the caller's promise.
    unsafe { real::preadv2(fd, vectors, count, offset, flags) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev2(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t {
    if let Some(tcp) = table::tcp(fd) {
        tcp.give_back("pwritev2", Until::Never);
    }
    // SAFETY: the caller's promise.
    unsafe { real::pwritev2(fd, vectors, count, offset, flags) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    match (table::tcp(fd), message.is_null()) {
        // SAFETY: the caller's promise.
        (Some(tcp), false) => unsafe { io::receive_message(tcp, fd, &mut *message, flags) },
        // SAFETY: the caller's promise.
        _ => unsafe { real::recvmsg(fd, message, flags) },
    }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, limit: *mut timespec) -> c_int {
    let Some(tcp) = table::tcp(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { real::recvmmsg(fd, messages, count, flags, limit) };
    };
    let started = crate::wait::now();
    // SAFETY: the caller's promise.
    let limit = unsafe { limit.as_ref() };
    let limit = limit.map(|limit| limit.tv_sec as u64 * 1_000_000 + limit.tv_nsec as u64 / 1000);
    for at in 0..count {
        // The limit is looked at between one message and the next (Linux, do_recvmmsg).
        if at > 0 && limit.is_some_and(|limit| crate::wait::now() - started >= limit) {
            return at as c_int;
        }
        let only_first = flags & libc::MSG_WAITFORONE != 0 && at > 0;
        let flags = flags & !libc::MSG_WAITFORONE | if only_first { libc::MSG_DONTWAIT } else { 0 };
        // SAFETY: the caller's promise.
        let entry = unsafe { &mut *messages.add(at as usize) };
        // SAFETY: the caller's promise.
        let received = unsafe { io::receive_message(tcp, fd, &mut entry.msg_hdr, flags) };
        if received < 0 {
            return if at > 0 { at as c_int } else { -1 };
        }
        entry.msg_len = received as c_uint;
    }
    count as c_int
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    if unsafe { io::send_at_once(fd, buffer, length, 0) } {
        return length as ssize_t;
    }
    // SAFETY: the caller's promise.
    unsafe { transmit(fd, buffer, length, None) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    if unsafe { io::send_at_once(fd, buffer, length, flags) } {
        return length as ssize_t;
    }
    // SAFETY: the caller's promise.
    unsafe { transmit(fd, buffer, length, Some(flags)) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    address: *const sockaddr,
    size: socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    if unsafe { io::send_at_once(fd, buffer, length, flags) } {
        return length as ssize_t;
    }
    match table::tcp(fd) {
        // SAFETY: the caller's promise. A connected stream does not look at the address.
        Some(tcp) if address.is_null() || tcp.is_managed() => unsafe { io::send(tcp, fd, buffer, length, flags) },
        Some(tcp) => {
            let inside = tcp.enter_kernel();
            // SAFETY: the caller's promise.
            let sent = unsafe { real::sendto(fd, buffer, length, flags, address, size) };
            drop(inside);
            tcp.count(fd, sent, true);
            sent
        }
        // SAFETY: the caller's promise.
        None => unsafe { real::sendto(fd, buffer, length, flags, address, size) },
    }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    match table::tcp(fd) {
        Some(tcp) if (1..=1024).contains(&count) => {
            // SAFETY: the caller's promise.
            unsafe { io::send_message(tcp, fd, &message_of(vectors, count as usize), 0) }
        }
        // SAFETY: the caller's promise.
        _ => unsafe { real::writev(fd, vectors, count) },
    }
}

/// Descriptors that a message passes to another process: their connections stay in the kernel from now on.
unsafe fn give_back_passed(fd: c_int, message: *const msghdr) {
    if message.is_null() || crate::process::is_ours(fd) {
        return;
    }
    // SAFETY: the caller's promise; the macros walk within the control buffer.
    unsafe {
        if (*message).msg_controllen == 0 {
            return;
        }
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                let length = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                for at in 0..length / size_of::<c_int>() {
                    if let Some(tcp) = table::tcp(data.add(at).read_unaligned()) {
                        tcp.give_back("SCM_RIGHTS", Until::Never);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    match (table::tcp(fd), message.is_null()) {
        // SAFETY: the caller's promise.
        (Some(tcp), false) => unsafe { io::send_message(tcp, fd, &*message, flags) },
        _ => {
            // SAFETY: the caller's promise.
            unsafe { give_back_passed(fd, message) };
            // SAFETY: the caller's promise.
            unsafe { real::sendmsg(fd, message, flags) }
        }
    }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let Some(tcp) = table::tcp(fd) else {
        for at in 0..count as usize {
            // SAFETY: the caller's promise.
            unsafe { give_back_passed(fd, &raw const (*messages.add(at)).msg_hdr) };
        }
        // SAFETY: the caller's promise.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    };
    for at in 0..count {
        // SAFETY: the caller's promise.
        let entry = unsafe { &mut *messages.add(at as usize) };
        // SAFETY: the caller's promise.
        let sent = unsafe { io::send_message(tcp, fd, &entry.msg_hdr, flags) };
        if sent < 0 {
            return if at > 0 { at as c_int } else { -1 };
        }
        entry.msg_len = sent as c_uint;
    }
    count as c_int
}

/// sendfile(2): through a buffer, while the NIC may have the connection.
unsafe fn send_file(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    if let Some(from) = table::tcp(from) {
        from.give_back("sendfile from a socket", Until::Never);
    }
    let Some(tcp) = table::tcp(out) else {
        // SAFETY: the caller's promise.
        return unsafe { real::sendfile(out, from, offset, count) };
    };
    if let Some(inside) = tcp.enter_kernel() {
        // SAFETY: the caller's promise.
        let sent = unsafe { real::sendfile(out, from, offset, count) };
        drop(inside);
        tcp.count(out, sent, true);
        return sent;
    }
    let mut buffer = vec![0u8; count.min(1 << 16)];
    let mut done = 0usize;
    while done < count {
        let most = buffer.len().min(count - done);
        // SAFETY: a buffer of that length; the program's offset, if there is one.
        let at = if offset.is_null() { unsafe { libc::lseek64(from, 0, libc::SEEK_CUR) } } else { unsafe { *offset } };
        if at < 0 {
            return -1;
        }
        // SAFETY: as above.
        let got = unsafe { libc::pread64(from, buffer.as_mut_ptr().cast(), most, at) };
        if got <= 0 {
            return if done > 0 || got == 0 { done as ssize_t } else { -1 };
        }
        // SAFETY: so many bytes are in the buffer.
        let sent = unsafe { io::send(tcp, out, buffer.as_ptr().cast(), got as usize, libc::MSG_NOSIGNAL) };
        if sent < 0 {
            if done > 0 {
                return done as ssize_t;
            }
            if thread::errno() == libc::EPIPE {
                // SAFETY: what the kernel does to a thread that writes to nobody.
                unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
            }
            return -1;
        }
        done += sent as usize;
        // SAFETY: the program's offset, or the file's own.
        unsafe {
            if offset.is_null() {
                libc::lseek64(from, at + sent as off64_t, libc::SEEK_SET);
            } else {
                *offset = at + sent as off64_t;
            }
        }
        if (sent as usize) < got as usize {
            break;
        }
    }
    done as ssize_t
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { send_file(out, from, offset, count) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { send_file(out, from, offset, count) }
}

/// See the C library.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    for fd in [from, to] {
        if let Some(tcp) = table::tcp(fd) {
            tcp.give_back("splice", Until::Never);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { real::splice(from, from_at, to, to_at, length, flags) }
}
