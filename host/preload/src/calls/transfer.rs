//! Functions that receive and send.

use crate::at_once::{Arguments, receive_at_once, send_at_once};
use crate::call::{Call, sum};
use crate::kernel_only::{self, Patience, leave_to_kernel};
use crate::sections::{self, Section};
use crate::tcp::Tcp;
use crate::wait::{self, Wait, Want};
use crate::{faults, io, leaving, options, readiness, real, table, thread, udp};
use baton_abi::layout::Owner;
use baton_protocol::program::Until;
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use std::sync::atomic::Ordering;

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
        pub unsafe extern "C-unwind" fn $name($fd: c_int, $buffer: *mut c_void, $length: size_t, $($extra: $type),*) -> ssize_t {
            let mut kept = Arguments::new($fd, $buffer, $length, $flags);
            kept.keep();
            // SAFETY: the program's own arguments (`# Safety`).
            if let Some(received) = unsafe { receive_at_once(&mut kept, $fd, $buffer, $length, $flags) } {
                return received;
            }
            let (fd, start, length, flags) = kept.all();
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { receive(fd, start, length, Some(flags)) }
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
pub unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    let mut kept = Arguments::new(fd, buffer, length, 0);
    kept.keep();
    // SAFETY: the program's own arguments (`# Safety`).
    if let Some(received) = unsafe { receive_at_once(&mut kept, fd, buffer, length, 0) } {
        return received;
    }
    let (fd, start, length, _) = kept.all();
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { receive(fd, start, length, None) }
}

/// Intercepts the C library's `__read_chk`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(fd: c_int, buffer: *mut c_void, length: size_t, _room: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { read(fd, buffer, length) }
}

/// Intercepts the C library's `recvfrom`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
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
        message.msg_namelen = faults::read(size).unwrap_or(0);
        // SAFETY: the program's own arguments (`# Safety`).
        let received = unsafe { udp::receive_message(Call::Flagged, udp, fd, &mut message, flags) };
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { with_address(received, address, size, message.msg_namelen) };
    }
    let Some(tcp) = table::tcp(fd) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::recvfrom(fd, buffer, length, flags, address, size) };
    };
    let mut kept = Arguments::new(fd, buffer, length, flags);
    kept.keep();
    // SAFETY: the program's own arguments (`# Safety`).
    let at_once = unsafe { receive_at_once(&mut kept, fd, buffer, length, flags) };
    // SAFETY: the program's own arguments (`# Safety`).
    let received = at_once.unwrap_or_else(|| unsafe { io::receive(Call::Flagged, tcp, fd, buffer, length, flags) });
    // A connected stream has no sender's address.
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { with_address(received, address, size, 0) }
}

/// The result of recvfrom(2) that has received so many bytes, after the length of the sender's address is written.
///
/// # Safety
/// As recvfrom(2).
unsafe fn with_address(received: ssize_t, address: *mut sockaddr, size: *mut socklen_t, length: socklen_t) -> ssize_t {
    if received < 0 || address.is_null() {
        return received;
    }
    match faults::read(size) {
        Some(room) if (room as c_int) < 0 => thread::fail(libc::EINVAL),
        // SAFETY: the program's own arguments (`# Safety`).
        Some(_) if unsafe { faults::write(size, length) } => received,
        _ => thread::fail(libc::EFAULT),
    }
}

/// The result of recvmsg(2), after the lengths and flags are written to the program's message.
///
/// # Safety
/// As recvmsg(2).
unsafe fn with_message(received: ssize_t, to: *mut msghdr, message: &msghdr) -> ssize_t {
    if received < 0 {
        return received;
    }
    let field = |offset| to.cast::<u8>().wrapping_add(offset);
    // SAFETY: the program's own message (`# Safety`).
    let written = unsafe {
        faults::write(field(std::mem::offset_of!(msghdr, msg_namelen)).cast(), message.msg_namelen)
            && faults::write(field(std::mem::offset_of!(msghdr, msg_controllen)).cast(), message.msg_controllen)
            && faults::write(field(std::mem::offset_of!(msghdr, msg_flags)).cast(), message.msg_flags)
    };
    if written { received } else { thread::fail(libc::EFAULT) }
}

/// Intercepts the C library's `__recvfrom_chk`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recvfrom_chk(
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
pub unsafe extern "C-unwind" fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
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

/// RWF_NOWAIT, a flag of preadv2 and pwritev2.
const NO_WAIT: c_int = 8;

/// Intercepts the C library's `preadv2`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    if let Err(number) = leave_to_kernel(fd, "preadv2", libc::SO_RCVTIMEO, flags & NO_WAIT != 0) {
        return thread::fail(number);
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::preadv2(fd, vectors, count, offset, flags) }
}

/// Intercepts the C library's `pwritev2`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    if let Err(number) = leave_to_kernel(fd, "pwritev2", libc::SO_SNDTIMEO, flags & NO_WAIT != 0) {
        return thread::fail(number);
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::pwritev2(fd, vectors, count, offset, flags) }
}

/// Intercepts the C library's `recvmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let (tcp, udp) = (table::tcp(fd), udp::of(fd));
    let known = if tcp.is_some() || udp.is_some() { faults::read(message) } else { None };
    let Some(mut own) = known else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::recvmsg(fd, message, flags) };
    };
    // SAFETY: the program's own arguments (`# Safety`); `own` is the header of its message.
    unsafe {
        let received = match (tcp, udp) {
            (Some(tcp), _) => io::receive_message(Call::Message, tcp, fd, &mut own, flags),
            (None, Some(udp)) => udp::receive_message(Call::Message, udp, fd, &mut own, flags),
            (None, None) => return real::recvmsg(fd, message, flags),
        };
        with_message(received, message, &own)
    }
}

/// Intercepts the C library's `recvmmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: *mut timespec,
) -> c_int {
    let (tcp, udp) = (table::tcp(fd), udp::of(fd));
    if tcp.is_none() && udp.is_none() {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::recvmmsg(fd, messages, count, flags, limit) };
    }
    if let Some(tcp) = tcp.filter(|_| flags & libc::MSG_ERRQUEUE == 0)
        && let Some(section) = Section::enter()
        && let Some(inside) = tcp.enter_kernel()
        && tcp.may_sleep(&inside, flags)
    {
        drop(section);
        // SAFETY: the program's own arguments (`# Safety`).
        let got = unsafe { real::recvmmsg(fd, messages, count, flags, limit) };
        drop(inside);
        let length = |at| faults::read(messages.wrapping_add(at)).map_or(0, |entry| entry.msg_len as ssize_t);
        tcp.count(fd, if got < 0 { -1 } else { (0..got as usize).map(length).sum() }, false);
        return got;
    }
    let started = crate::wait::now();
    let given = if limit.is_null() { None } else { Some(faults::read(limit)) };
    if given.is_some_and(|given| given.is_none_or(|limit| limit.tv_sec < 0 || !(0..1_000_000_000).contains(&limit.tv_nsec))) {
        // SAFETY: the program's own arguments (`# Safety`). The kernel refuses it.
        return unsafe { real::recvmmsg(fd, messages, count, flags, limit) };
    }
    let time = limit;
    let limit =
        given.flatten().map(|limit| (limit.tv_sec as u64).saturating_mul(1_000_000).saturating_add(limit.tv_nsec as u64 / 1000));
    // Linux, in do_recvmmsg: a pending error comes before what has arrived, and before the messages are looked at.
    let error = tcp.filter(|_| flags & libc::MSG_ERRQUEUE == 0).map_or(0, |tcp| options::take_error(tcp, fd));
    if error != 0 {
        return thread::fail(error) as c_int;
    }
    let (mut got, mut left) = (0, limit);
    // The limit is checked between messages (Linux, do_recvmmsg).
    while got < count && (got == 0 || left != Some(0)) {
        let only_first = flags & libc::MSG_WAITFORONE != 0 && got > 0;
        let flags = flags & !libc::MSG_WAITFORONE | if only_first { libc::MSG_DONTWAIT } else { 0 };
        let entry = messages.wrapping_add(got as usize);
        let known = faults::read(entry).map(|entry| entry.msg_hdr);
        let call = if got > 0 { Call::Further } else { Call::Several };
        let received = match (known, tcp, udp) {
            // SAFETY: the program's own arguments (`# Safety`).
            (Some(mut own), Some(tcp), _) => unsafe {
                let received = io::receive_message(call, tcp, fd, &mut own, flags);
                with_message(received, entry.cast(), &own)
            },
            // SAFETY: `own` is the header of the program's own message at `entry` (`# Safety`).
            (Some(mut own), None, Some(udp)) => unsafe {
                let received = udp::receive_message(call, udp, fd, &mut own, flags);
                with_message(received, entry.cast(), &own)
            },
            _ => thread::fail(libc::EFAULT),
        };
        // SAFETY: `entry` is one of the program's own messages (`# Safety`).
        if received < 0 || !unsafe { note_length(entry, received) } {
            if got == 0 {
                return -1;
            }
            break;
        }
        got += 1;
        left = limit.map(|limit| limit.saturating_sub(crate::wait::now() - started));
    }
    if got > 0
        && let Some(left) = left
    {
        let left = timespec { tv_sec: (left / 1_000_000) as i64, tv_nsec: (left % 1_000_000 * 1000) as i64 };
        // SAFETY: the program's own arguments (`# Safety`): Linux writes back the time that is left.
        if !unsafe { faults::write(time, left) } {
            return thread::fail(libc::EFAULT) as c_int;
        }
    }
    got as c_int
}

/// Intercepts the C library's `write`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    let mut kept = Arguments::new(fd, buffer.cast_mut(), length, 0);
    kept.keep();
    // SAFETY: the program's own arguments (`# Safety`).
    if unsafe { send_at_once(fd, buffer, length, 0) } {
        return kept.length() as ssize_t;
    }
    let (fd, start, length, _) = kept.all();
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { transmit(fd, start, length, None) }
}

/// Intercepts the C library's `send`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    let mut kept = Arguments::new(fd, buffer.cast_mut(), length, flags);
    kept.keep();
    // SAFETY: the program's own arguments (`# Safety`).
    if unsafe { send_at_once(fd, buffer, length, flags) } {
        return kept.length() as ssize_t;
    }
    let (fd, start, length, flags) = kept.all();
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { transmit(fd, start, length, Some(flags)) }
}

/// Intercepts the C library's `sendto`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    address: *const sockaddr,
    size: socklen_t,
) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    if address.is_null() && unsafe { send_at_once(fd, buffer, length, flags) } {
        return length as ssize_t;
    }
    if let Some(udp) = udp::of(fd) {
        let vector = iovec { iov_base: buffer.cast_mut(), iov_len: length };
        let mut message = message_of(&vector, 1);
        (message.msg_name, message.msg_namelen) = (address.cast_mut().cast(), size);
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { udp::send_message(Call::Flagged, udp, fd, &message, flags) };
    }
    // A send whose completion this library numbers must not be numbered by the kernel as well.
    let completes = flags & (libc::MSG_ZEROCOPY | libc::MSG_FASTOPEN) == libc::MSG_ZEROCOPY;
    match table::tcp(fd) {
        // SAFETY: the program's own arguments (`# Safety`). A connected stream ignores an address that the kernel can
        // read.
        Some(tcp) if address.is_null() || (tcp.is_managed() || completes) && io::takes_name(address.cast(), size) => unsafe {
            io::send(Call::Flagged, tcp, fd, buffer, length, flags)
        },
        Some(tcp) => {
            let inside = Section::enter().and_then(|_section| tcp.enter_kernel());
            if inside.is_none() && tcp.is_managed() && io::takes_name(address.cast(), size) {
                // Another thread has handed the connection over since: the kernel's socket may be the shell.
                // SAFETY: the program's own arguments (`# Safety`).
                return unsafe { io::send(Call::Flagged, tcp, fd, buffer, length, flags) };
            }
            // SAFETY: the program's own arguments (`# Safety`).
            let sent = unsafe { leaving::asleep(|| real::sendto(fd, buffer, length, flags, address, size)) };
            tcp.note_room(sent, || length);
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
pub unsafe extern "C-unwind" fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
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

/// Writes the length of one of several messages. False, with errno, if there is no such memory.
///
/// # Safety
/// As recvmmsg(2).
unsafe fn note_length(entry: *mut mmsghdr, length: ssize_t) -> bool {
    let place = entry.cast::<u8>().wrapping_add(std::mem::offset_of!(mmsghdr, msg_len));
    // SAFETY: the program's own message (`# Safety`).
    let written = unsafe { faults::write(place.cast(), length as c_uint) };
    if !written {
        thread::set_errno(libc::EFAULT);
    }
    written
}

/// Restores, for good, each connection whose descriptor this message passes to another process. Err with errno if that
/// is not possible, and the call has to fail.
fn give_back_passed(fd: c_int, message: *const msghdr, flags: c_int) -> Result<(), c_int> {
    /// More descriptors than a message can have.
    const MOST: usize = 1 << 16;
    if table::end() == 0 && udp::end() == 0 {
        return Ok(());
    }
    let Some(_section) = Section::enter() else { return Ok(()) };
    let Some(mut message) = faults::read(message).filter(|message| (1..=MOST).contains(&message.msg_controllen)) else {
        return Ok(());
    };
    // An array of words, since control headers are aligned to words.
    let mut control = vec![0u64; message.msg_controllen.div_ceil(8)];
    let length = message.msg_controllen;
    // SAFETY: the words have room for that many bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(control.as_mut_ptr().cast::<u8>(), length) };
    if crate::process::is_ours(fd) || !faults::read_all(message.msg_control.cast_const().cast(), bytes) {
        return Ok(());
    }
    let patience = || Patience::of(fd, libc::SO_SNDTIMEO, flags & libc::MSG_DONTWAIT != 0);
    message.msg_control = control.as_mut_ptr().cast();
    let message = &raw const message;
    // SAFETY: the message has a copy of its control buffer, in which the CMSG macros stay.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                let behind = length - (header as usize - control.as_ptr() as usize);
                let length = ((*header).cmsg_len as usize).min(behind).saturating_sub(libc::CMSG_LEN(0) as usize);
                for at in 0..length / size_of::<c_int>() {
                    let passed = data.add(at).read_unaligned();
                    match table::get(passed) {
                        Some(table::File::Tcp(tcp)) => kernel_only::leave(tcp, "SCM_RIGHTS", patience)?,
                        Some(table::File::Set(set)) => readiness::share(set),
                        Some(table::File::Ring(_)) | None => {}
                    }
                    udp::give_back(passed);
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    Ok(())
}

/// Intercepts the C library's `sendmsg`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let (tcp, udp) = (table::tcp(fd), udp::of(fd));
    let known = if tcp.is_some() || udp.is_some() { faults::read(message) } else { None };
    match (known, tcp, udp) {
        // SAFETY: the program's own arguments (`# Safety`).
        (Some(own), Some(tcp), _) => unsafe { io::send_message(Call::Message, tcp, fd, &own, flags) },
        // SAFETY: `own` is the header of the program's own message (`# Safety`).
        (Some(own), None, Some(udp)) => unsafe { udp::send_message(Call::Message, udp, fd, &own, flags) },
        _ => {
            if let Err(number) = give_back_passed(fd, message, flags) {
                return thread::fail(number);
            }
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
pub unsafe extern "C-unwind" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let (tcp, udp) = (table::tcp(fd), udp::of(fd));
    if tcp.is_none() && udp.is_none() {
        for at in 0..(count as usize).min(MOST_MESSAGES) {
            if let Err(number) = give_back_passed(fd, messages.wrapping_add(at).cast(), flags) {
                return thread::fail(number) as c_int;
            }
        }
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    let count = count.min(MOST_MESSAGES as c_uint);
    for at in 0..count {
        let entry = messages.wrapping_add(at as usize);
        let known = faults::read(entry).map(|entry| entry.msg_hdr);
        let sent = match (known, tcp, udp) {
            // SAFETY: the program's own arguments (`# Safety`).
            (Some(own), Some(tcp), _) => unsafe { io::send_message(Call::Several, tcp, fd, &own, flags) },
            // SAFETY: `own` is the header of the program's own message at `entry` (`# Safety`).
            (Some(own), None, Some(udp)) => unsafe { udp::send_message(Call::Several, udp, fd, &own, flags) },
            _ => thread::fail(libc::EFAULT),
        };
        // SAFETY: `entry` is one of the program's own messages (`# Safety`).
        if sent < 0 || !unsafe { note_length(entry, sent) } {
            return if at > 0 { at as c_int } else { -1 };
        }
    }
    count as c_int
}

/// Most messages that one call sends (Linux, UIO_MAXIOV).
const MOST_MESSAGES: usize = 1024;

/// sendfile(2) on a connection that the agent manages and that is in the kernel: the kernel's own call, without a copy.
/// The connection cannot move during the call, so this serves non-blocking sockets only. None if the connection is not
/// in the kernel, or the call may wait.
///
/// # Safety
/// As sendfile(2).
unsafe fn send_file_in_kernel(
    tcp: &'static Tcp,
    out: c_int,
    from: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> Option<ssize_t> {
    let (connection, session) = tcp.managed().filter(|_| tcp.is_nonblocking())?;
    let entered = session.shared.enter(connection, thread::token())?;
    if entered.owner != Owner::Kernel {
        return None;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    let sent = unsafe { real::sendfile(out, from, offset, count) };
    let number = thread::errno();
    drop(entered);
    if sent > 0 {
        connection.count_in_kernel(sent as u32);
    }
    if sent < 0 && number == libc::EAGAIN || sent >= 0 && (sent as usize) < count {
        // A program that waits for room now waits for an edge of EPOLLOUT.
        tcp.stuck.fetch_add(1, Ordering::AcqRel);
    }
    thread::set_errno(number);
    Some(sent)
}

/// sendfile(2), through a buffer while the NIC may have the connection.
///
/// # Safety
/// As sendfile(2).
unsafe fn send_file(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // The kernel refuses it.
    if let Some(tcp) = table::tcp(from)
        && let Some(_section) = Section::enter()
    {
        tcp.give_back("sendfile from a socket", Until::Never);
    }
    let (Some(tcp), Some(section)) = (table::tcp(out), Section::enter()) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::sendfile(out, from, offset, count) };
    };
    if let Some(inside) = tcp.enter_kernel() {
        drop(section);
        // SAFETY: the program's own arguments (`# Safety`).
        let sent = unsafe { real::sendfile(out, from, offset, count) };
        tcp.note_room(sent, || count);
        drop(inside);
        tcp.count(out, sent, true);
        return sent;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    if let Some(sent) = unsafe { send_file_in_kernel(tcp, out, from, offset, count) } {
        return sent;
    }
    if !offset.is_null() && faults::read(offset).is_none() || count > isize::MAX as usize {
        drop(section);
        // SAFETY: the program's own arguments (`# Safety`). The kernel refuses it.
        return unsafe { real::sendfile(out, from, offset, count) };
    }
    let mut buffer = vec![0u8; count.min(1 << 16)];
    let (mut done, mut wait) = (0usize, None);
    while done < count {
        if sections::is_withdrawn() {
            drop(section);
            // SAFETY: the program's own arguments (`# Safety`).
            return sum(done, unsafe { real::sendfile(out, from, offset, count - done) });
        }
        let most = buffer.len().min(count - done);
        // SAFETY: no pointers are involved.
        let own = || unsafe { libc::lseek64(from, 0, libc::SEEK_CUR) };
        let at = if offset.is_null() { own() } else { faults::read(offset).unwrap_or(-1) };
        if at < 0 {
            // Linux, in do_sendfile: a file without a position cannot be sent from.
            let bad = offset.is_null() && thread::errno() == libc::EBADF;
            return thread::fail(if bad { libc::EBADF } else { libc::EINVAL });
        }
        // SAFETY: `most` is at most the buffer's length.
        let got = unsafe { libc::pread64(from, buffer.as_mut_ptr().cast(), most, at) };
        if got <= 0 {
            if got < 0 && offset.is_null() && thread::errno() == libc::ESPIPE {
                thread::set_errno(libc::EINVAL);
            }
            return if done > 0 || got == 0 { done as ssize_t } else { -1 };
        }
        // A call that has sent something already waits here and not in `send`: any signal then ends it, also with
        // SA_RESTART.
        let flags = libc::MSG_NOSIGNAL | if done > 0 { libc::MSG_DONTWAIT } else { 0 };
        // SAFETY: pread has just written `got` bytes to the buffer.
        let sent = unsafe { io::send(Call::Flagged, tcp, out, buffer.as_ptr().cast(), got as usize, flags) };
        if sent < 0 && done > 0 && thread::errno() == libc::EAGAIN && !io::does_not_wait(tcp, out, 0) {
            let wait = wait.get_or_insert_with(|| Wait::new(wait::deadline(out, libc::SO_SNDTIMEO), section.begun));
            if wait::block(tcp, out, Want::Send, wait.after(done)).is_ok() {
                continue;
            }
        }
        if sent < 0 {
            if done > 0 {
                return done as ssize_t;
            }
            if thread::errno() == libc::EPIPE {
                // SAFETY: the calling thread exists. The kernel raises SIGPIPE here, too.
                unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
            }
            return -1;
        }
        done += sent as usize;
        // SAFETY: `offset` is null or the program's (`# Safety`).
        let noted = unsafe {
            if offset.is_null() {
                libc::lseek64(from, at + sent as off64_t, libc::SEEK_SET) >= 0
            } else {
                faults::write(offset, at + sent as off64_t)
            }
        };
        if !noted {
            return thread::fail(libc::EFAULT);
        }
        // A short send ends the call, unless it is short only because of MSG_DONTWAIT above: then the loop goes on and
        // waits for room.
        if (sent as usize) < got as usize && (flags & libc::MSG_DONTWAIT == 0 || io::does_not_wait(tcp, out, 0)) {
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
pub unsafe extern "C-unwind" fn sendfile(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { send_file(out, from, offset, count) }
}

/// Intercepts the C library's `sendfile64`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { send_file(out, from, offset, count) }
}
