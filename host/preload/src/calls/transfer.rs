//! Functions that receive and send.

use crate::call::{Call, sum};
use crate::sections::{self, Section};
use crate::{io, real, table, thread, udp};
use baton_protocol::program::Until;
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

/// Slow path of read and recv. `flags: None` means read(2).
///
/// # Safety
/// As recv(2).
#[inline(never)]
unsafe fn receive(fd: c_int, buffer: *mut c_void, length: size_t, flags: Option<c_int>) -> ssize_t {
    let call = if flags.is_some() { Call::Flagged } else { Call::Plain };
    if let Some(udp) = udp::of(fd).filter(|_| flags.is_some() || length > 0) {
        let vector = iovec { iov_base: buffer, iov_len: length };
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::receive_message(call, udp, fd, &mut message_of(&vector, 1), flags.unwrap_or(0)) };
    }
    match (table::tcp(fd), flags) {
        // read(2) of nothing returns 0, without waiting.
        (Some(_), None) if length == 0 => 0,
        // SAFETY: the program's own arguments (`# Safety`).
        (Some(tcp), _) => unsafe { io::receive(call, tcp, fd, buffer, length, flags.unwrap_or(0)) },
        // SAFETY: the program's own arguments (`# Safety`).
        (None, Some(flags)) => unsafe { real::recv(fd, buffer, length, flags) },
        // SAFETY: the program's own arguments (`# Safety`).
        (None, None) => unsafe { real::read(fd, buffer, length) },
    }
}

/// Slow path of write and send. `flags: None` means write(2).
///
/// # Safety
/// As send(2).
#[inline(never)]
unsafe fn transmit(fd: c_int, buffer: *const c_void, length: size_t, flags: Option<c_int>) -> ssize_t {
    let call = if flags.is_some() { Call::Flagged } else { Call::Plain };
    if let Some(udp) = udp::of(fd) {
        let vector = iovec { iov_base: buffer.cast_mut(), iov_len: length };
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::send_message(call, udp, fd, &message_of(&vector, 1), flags.unwrap_or(0)) };
    }
    match (table::tcp(fd), flags) {
        // SAFETY: the program's own arguments (`# Safety`).
        (Some(tcp), _) => unsafe { io::send(call, tcp, fd, buffer, length, flags.unwrap_or(0)) },
        // SAFETY: the program's own arguments (`# Safety`).
        (None, Some(flags)) => unsafe { real::send(fd, buffer, length, flags) },
        // SAFETY: the program's own arguments (`# Safety`).
        (None, None) => unsafe { real::write(fd, buffer, length) },
    }
}

macro_rules! receives {
    ($name:ident, $fd:ident, $buffer:ident, $length:ident, ($($extra:ident: $type:ty),*), $flags:ident) => {
        /// Intercepts the C library's function of this name.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($fd: c_int, $buffer: *mut c_void, $length: size_t, $($extra: $type),*) -> ssize_t {
            // SAFETY: the program's own arguments (`# Safety`).
            if let Some(received) = unsafe { io::receive_at_once($fd, $buffer, $length, $flags) } {
                return received;
            }
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { receive($fd, $buffer, $length, Some($flags)) }
        }
    };
}

receives!(recv, fd, buffer, length, (flags: c_int), flags);
receives!(__recv_chk, fd, buffer, length, (_room: size_t, flags: c_int), flags);

/// Intercepts the C library's `read`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    if let Some(received) = unsafe { io::receive_at_once(fd, buffer, length, 0) } {
        return received;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { receive(fd, buffer, length, None) }
}

/// Intercepts the C library's `__read_chk`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, length: size_t, _room: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { read(fd, buffer, length) }
}

/// Intercepts the C library's `recvfrom`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    address: *mut sockaddr,
    size: *mut socklen_t,
) -> ssize_t {
    if let Some(udp) = udp::of(fd) {
        let vector = iovec { iov_base: buffer, iov_len: length };
        let mut message = message_of(&vector, 1);
        message.msg_name = address.cast();
        // SAFETY: the program's own arguments (`# Safety`).
        message.msg_namelen = unsafe { size.as_ref() }.map_or(0, |size| *size);
        // SAFETY: the program's own arguments (`# Safety`).
        let received = unsafe { udp::receive_message(Call::Flagged, udp, fd, &mut message, flags) };
        // SAFETY: the program's own arguments (`# Safety`).
        if let Some(size) = unsafe { size.as_mut() }.filter(|_| received >= 0 && !address.is_null()) {
            *size = message.msg_namelen;
        }
        return received;
    }
    let Some(tcp) = table::tcp(fd) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::recvfrom(fd, buffer, length, flags, address, size) };
    };
    // SAFETY: the program's own arguments (`# Safety`).
    let at_once = unsafe { io::receive_at_once(fd, buffer, length, flags) };
    // SAFETY: the program's own arguments (`# Safety`).
    let received = at_once.unwrap_or_else(|| unsafe { io::receive(Call::Flagged, tcp, fd, buffer, length, flags) });
    if received >= 0 && !address.is_null() && !size.is_null() {
        // A connected stream has no sender's address.
        // SAFETY: the program's own arguments (`# Safety`).
        unsafe { *size = 0 };
    }
    received
}

/// Intercepts the C library's `__recvfrom_chk`.
///
/// # Safety
/// As for the C library's function.
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
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { recvfrom(fd, buffer, length, flags, address, size) }
}

fn message_of(vectors: *const iovec, count: usize) -> msghdr {
    let mut message = io::empty_message();
    message.msg_iov = vectors.cast_mut();
    message.msg_iovlen = count as _;
    message
}

/// Intercepts the C library's `readv`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    if let Some(udp) = udp::of(fd).filter(|_| (1..=1024).contains(&count)) {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::receive_message(Call::Vector, udp, fd, &mut message_of(vectors, count as usize), 0) };
    }
    match table::tcp(fd) {
        Some(tcp) if (1..=1024).contains(&count) => {
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { io::receive_message(Call::Vector, tcp, fd, &mut message_of(vectors, count as usize), 0) }
        }
        // SAFETY: the program's own arguments (`# Safety`).
        _ => unsafe { real::readv(fd, vectors, count) },
    }
}

/// Restores a connection for good.
fn leave_to_kernel(fd: c_int, reason: &str) {
    if let Some(tcp) = table::tcp(fd)
        && let Some(_section) = Section::enter()
    {
        tcp.give_back(reason, Until::Never);
    }
}

/// Intercepts the C library's `preadv2`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv2(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t {
    leave_to_kernel(fd, "preadv2");
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::preadv2(fd, vectors, count, offset, flags) }
}

/// Intercepts the C library's `pwritev2`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev2(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t {
    leave_to_kernel(fd, "pwritev2");
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::pwritev2(fd, vectors, count, offset, flags) }
}

/// Intercepts the C library's `recvmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    if let Some(udp) = udp::of(fd).filter(|_| !message.is_null()) {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::receive_message(Call::Message, udp, fd, &mut *message, flags) };
    }
    match (table::tcp(fd), message.is_null()) {
        // SAFETY: the program's own arguments (`# Safety`).
        (Some(tcp), false) => unsafe { io::receive_message(Call::Message, tcp, fd, &mut *message, flags) },
        // SAFETY: the program's own arguments (`# Safety`).
        _ => unsafe { real::recvmsg(fd, message, flags) },
    }
}

/// Intercepts the C library's `recvmmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, limit: *mut timespec) -> c_int {
    let (tcp, udp) = (table::tcp(fd), udp::of(fd));
    if tcp.is_none() && udp.is_none() {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::recvmmsg(fd, messages, count, flags, limit) };
    }
    let started = crate::wait::now();
    // SAFETY: the program's own arguments (`# Safety`).
    let limit = unsafe { limit.as_ref() };
    let limit = limit.map(|limit| limit.tv_sec as u64 * 1_000_000 + limit.tv_nsec as u64 / 1000);
    for at in 0..count {
        // The limit is checked between messages (Linux, do_recvmmsg).
        if at > 0 && limit.is_some_and(|limit| crate::wait::now() - started >= limit) {
            return at as c_int;
        }
        let only_first = flags & libc::MSG_WAITFORONE != 0 && at > 0;
        let flags = flags & !libc::MSG_WAITFORONE | if only_first { libc::MSG_DONTWAIT } else { 0 };
        // SAFETY: the program's own arguments (`# Safety`).
        let entry = unsafe { &mut *messages.add(at as usize) };
        let received = match (tcp, udp) {
            // SAFETY: the program's own arguments (`# Safety`).
            (Some(tcp), _) => unsafe { io::receive_message(Call::Several, tcp, fd, &mut entry.msg_hdr, flags) },
            // SAFETY: as above.
            (None, Some(udp)) => unsafe { udp::receive_message(Call::Several, udp, fd, &mut entry.msg_hdr, flags) },
            (None, None) => return at as c_int,
        };
        if received < 0 {
            return if at > 0 { at as c_int } else { -1 };
        }
        entry.msg_len = received as c_uint;
    }
    count as c_int
}

/// Intercepts the C library's `write`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    if unsafe { io::send_at_once(fd, buffer, length, 0) } {
        return length as ssize_t;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { transmit(fd, buffer, length, None) }
}

/// Intercepts the C library's `send`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    if unsafe { io::send_at_once(fd, buffer, length, flags) } {
        return length as ssize_t;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { transmit(fd, buffer, length, Some(flags)) }
}

/// Intercepts the C library's `sendto`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    address: *const sockaddr,
    size: socklen_t,
) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    if unsafe { io::send_at_once(fd, buffer, length, flags) } {
        return length as ssize_t;
    }
    if let Some(udp) = udp::of(fd) {
        let vector = iovec { iov_base: buffer.cast_mut(), iov_len: length };
        let mut message = message_of(&vector, 1);
        (message.msg_name, message.msg_namelen) = (address.cast_mut().cast(), size);
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::send_message(Call::Flagged, udp, fd, &message, flags) };
    }
    match table::tcp(fd) {
        // SAFETY: the program's own arguments (`# Safety`). A connected stream ignores the address.
        Some(tcp) if address.is_null() || tcp.is_managed() => unsafe { io::send(Call::Flagged, tcp, fd, buffer, length, flags) },
        Some(tcp) => {
            let inside = Section::enter().and_then(|_section| tcp.enter_kernel());
            // SAFETY: the program's own arguments (`# Safety`).
            let sent = unsafe { real::sendto(fd, buffer, length, flags, address, size) };
            drop(inside);
            tcp.count(fd, sent, true);
            sent
        }
        // SAFETY: the program's own arguments (`# Safety`).
        None => unsafe { real::sendto(fd, buffer, length, flags, address, size) },
    }
}

/// Intercepts the C library's `writev`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    if let Some(udp) = udp::of(fd).filter(|_| (1..=1024).contains(&count)) {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::send_message(Call::Vector, udp, fd, &message_of(vectors, count as usize), 0) };
    }
    match table::tcp(fd) {
        Some(tcp) if (1..=1024).contains(&count) => {
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { io::send_message(Call::Vector, tcp, fd, &message_of(vectors, count as usize), 0) }
        }
        // SAFETY: the program's own arguments (`# Safety`).
        _ => unsafe { real::writev(fd, vectors, count) },
    }
}

/// Restores connections whose descriptors a message passes to another process, for good.
///
/// # Safety
/// As sendmsg(2).
unsafe fn give_back_passed(fd: c_int, message: *const msghdr) {
    let Some(_section) = Section::enter() else { return };
    if message.is_null() || crate::process::is_ours(fd) {
        return;
    }
    // SAFETY: a non-null message is valid (`# Safety`), and the CMSG macros stay inside its control buffer.
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
                    udp::give_back(data.add(at).read_unaligned());
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Intercepts the C library's `sendmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if let Some(udp) = udp::of(fd).filter(|_| !message.is_null()) {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::send_message(Call::Message, udp, fd, &*message, flags) };
    }
    match (table::tcp(fd), message.is_null()) {
        // SAFETY: the program's own arguments (`# Safety`).
        (Some(tcp), false) => unsafe { io::send_message(Call::Message, tcp, fd, &*message, flags) },
        _ => {
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { give_back_passed(fd, message) };
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { real::sendmsg(fd, message, flags) }
        }
    }
}

/// Intercepts the C library's `sendmmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let (tcp, udp) = (table::tcp(fd), udp::of(fd));
    if tcp.is_none() && udp.is_none() {
        for at in 0..count as usize {
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { give_back_passed(fd, &raw const (*messages.add(at)).msg_hdr) };
        }
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    for at in 0..count {
        // SAFETY: the program's own arguments (`# Safety`).
        let entry = unsafe { &mut *messages.add(at as usize) };
        let sent = match (tcp, udp) {
            // SAFETY: the program's own arguments (`# Safety`).
            (Some(tcp), _) => unsafe { io::send_message(Call::Several, tcp, fd, &entry.msg_hdr, flags) },
            // SAFETY: as above.
            (None, Some(udp)) => unsafe { udp::send_message(Call::Several, udp, fd, &entry.msg_hdr, flags) },
            (None, None) => return at as c_int,
        };
        if sent < 0 {
            return if at > 0 { at as c_int } else { -1 };
        }
        entry.msg_len = sent as c_uint;
    }
    count as c_int
}

/// sendfile(2), through a buffer while the NIC may have the connection.
///
/// # Safety
/// As sendfile(2).
unsafe fn send_file(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    leave_to_kernel(from, "sendfile from a socket");
    let (Some(tcp), Some(section)) = (table::tcp(out), Section::enter()) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::sendfile(out, from, offset, count) };
    };
    if let Some(inside) = tcp.enter_kernel() {
        drop(section);
        // SAFETY: the program's own arguments (`# Safety`).
        let sent = unsafe { real::sendfile(out, from, offset, count) };
        drop(inside);
        tcp.count(out, sent, true);
        return sent;
    }
    let mut buffer = vec![0u8; count.min(1 << 16)];
    let mut done = 0usize;
    while done < count {
        if sections::is_withdrawn() {
            drop(section);
            // SAFETY: the program's own arguments (`# Safety`).
            return sum(done, unsafe { real::sendfile(out, from, offset, count - done) });
        }
        let most = buffer.len().min(count - done);
        // SAFETY: `offset` is null or the program's valid offset (`# Safety`).
        let at = if offset.is_null() { unsafe { libc::lseek64(from, 0, libc::SEEK_CUR) } } else { unsafe { *offset } };
        if at < 0 {
            return -1;
        }
        // SAFETY: `most` is at most the buffer's length.
        let got = unsafe { libc::pread64(from, buffer.as_mut_ptr().cast(), most, at) };
        if got <= 0 {
            return if done > 0 || got == 0 { done as ssize_t } else { -1 };
        }
        // SAFETY: pread has just written `got` bytes to the buffer.
        let sent = unsafe { io::send(Call::Flagged, tcp, out, buffer.as_ptr().cast(), got as usize, libc::MSG_NOSIGNAL) };
        if sent < 0 {
            if done > 0 {
                return done as ssize_t;
            }
            if thread::errno() == libc::EPIPE {
                // SAFETY: the calling thread exists. The kernel raises SIGPIPE likewise.
                unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
            }
            return -1;
        }
        done += sent as usize;
        // SAFETY: `offset` is null or the program's valid offset (`# Safety`).
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

/// Intercepts the C library's `sendfile`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { send_file(out, from, offset, count) }
}

/// Intercepts the C library's `sendfile64`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { send_file(out, from, offset, count) }
}

/// Intercepts the C library's `splice`.
///
/// # Safety
/// As for the C library's function.
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
        leave_to_kernel(fd, "splice");
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::splice(from, from_at, to, to_at, length, flags) }
}
