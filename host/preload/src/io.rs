//! Receiving and sending on a socket that may be on the NIC.
//!
//! Calls for one buffer try the fast path first ([`crate::at_once`]). These functions also wait where the call would.

use crate::call::{Call, sum};
use crate::handover::Inside;
use crate::kernel_only::{self, Patience};
use crate::process::Session;
use crate::sections::{self, Section};
use crate::tcp::Tcp;
use crate::thread::{self, fail, token};
use crate::wait::{self, Wait, Want};
use crate::waiting::{BLOCKS, RECEIVES_FOR_EVER, SENDS_FOR_EVER};
use crate::whole::Whole;
use crate::{faults, leaving, real};
use baton_abi::layout::Owner;
use baton_protocol::program::Until;
use baton_ring::give_way;
use libc::{c_int, c_void, iovec, msghdr, size_t, socklen_t, ssize_t};

/// Flags with which the NIC can send.
pub(crate) const PLAIN_SEND: c_int =
    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_EOR | libc::MSG_CONFIRM | libc::MSG_DONTROUTE;
/// Flags with which bytes can be received from the NIC.
const PLAIN_RECEIVE: c_int =
    libc::MSG_DONTWAIT | libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_TRUNC | libc::MSG_CMSG_CLOEXEC | libc::MSG_NOSIGNAL;

/// Most bytes that a call transfers (Linux, MAX_RW_COUNT).
const MOST: usize = 0x7fff_f000;

/// Most pieces of a message (Linux, UIO_MAXIOV).
const MOST_PIECES: usize = 1024;

/// An address without memory, in place of null, which no slice may have.
const NOWHERE: usize = 1;

/// The program's buffer as a slice. The buffer may not be mapped, so it is accessed only by guarded copies
/// ([`crate::faults`]).
///
/// # Safety
/// Where there is memory, it must be the program's, for the call that it makes.
#[inline(always)]
unsafe fn bytes<'a>(start: *const c_void, length: size_t) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    let start = if start.is_null() { std::ptr::without_provenance(NOWHERE) } else { start };
    // SAFETY: this function's `# Safety`.
    unsafe { std::slice::from_raw_parts(start.cast(), length) }
}

/// As [`bytes`], to write to.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn bytes_mut<'a>(start: *mut c_void, length: size_t) -> &'a mut [u8] {
    if length == 0 {
        return &mut [];
    }
    let start = if start.is_null() { std::ptr::without_provenance_mut(NOWHERE) } else { start };
    // SAFETY: this function's `# Safety`.
    unsafe { std::slice::from_raw_parts_mut(start.cast(), length) }
}

/// Whether a buffer is outside the addresses of user space, so that the kernel refuses it at once.
pub(crate) fn is_outside(start: *const c_void, length: usize) -> bool {
    const END: usize = (1 << 47) - 4096;
    (start as usize).checked_add(length).is_none_or(|end| end > END)
}

/// Most bytes of an address (Linux, sockaddr_storage).
const MOST_NAME: socklen_t = 128;

/// Whether the kernel accepts this address argument, which it then ignores.
pub(crate) fn takes_name(name: *const c_void, length: socklen_t) -> bool {
    let mut copy = [0u8; MOST_NAME as usize];
    name.is_null() || length <= MOST_NAME && faults::read_all(name.cast(), &mut copy[..length as usize])
}

/// A copy of the message whose vectors were read from the program's memory and limited as the kernel does it, and those
/// vectors. None if the kernel would refuse it before it looks at the socket.
fn import(message: &msghdr) -> Option<(msghdr, Vec<iovec>)> {
    let count = message.msg_iovlen;
    if count > MOST_PIECES {
        return None;
    }
    if !message.msg_name.is_null() && (message.msg_namelen as i32) < 0 {
        return None;
    }
    let mut pieces = vec![iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; count];
    if !faults::read_all(message.msg_iov, &mut pieces) || pieces.iter().any(|piece| piece.iov_len > isize::MAX as usize) {
        return None;
    }
    let mut left = MOST;
    for piece in &mut pieces {
        let whole = if count == 1 { piece.iov_len.min(MOST) } else { piece.iov_len };
        if is_outside(piece.iov_base, whole) {
            return None;
        }
        piece.iov_len = whole.min(left);
        left -= piece.iov_len;
    }
    let imported = msghdr { msg_iov: pieces.as_mut_ptr(), ..*message };
    Some((imported, pieces))
}

/// A message with one vector.
fn message_of(vector: &mut iovec) -> msghdr {
    let mut message = empty_message();
    message.msg_iov = vector;
    message.msg_iovlen = 1;
    message
}

/// Slow path of write(2) and send(2), of one buffer.
///
/// # Safety
/// As send(2).
#[inline(never)]
pub(crate) unsafe fn send(
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    start: *const c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    let _whole = Whole::begin_cancelable();
    let mut vector = iovec { iov_base: start.cast_mut(), iov_len: length };
    let message = message_of(&mut vector);
    let Some(section) = Section::enter() else {
        // SAFETY: `message` describes the buffer that send(2) requires (`# Safety`).
        return unsafe { leaving::asleep(|| call.send(fd, &message, flags)) };
    };
    if flags & !PLAIN_SEND != 0 {
        // SAFETY: `message` describes the buffer that send(2) requires (`# Safety`).
        return unsafe { send_inside(section, call, tcp, fd, &message, flags) };
    }
    if length > MOST {
        drop(section);
        // SAFETY: `message` describes the buffer that send(2) requires (`# Safety`), of which the `MOST` bytes at
        // `start` are a part. The kernel refuses it, or cuts it.
        return unsafe {
            match call {
                Call::Plain if is_outside(start, length) => leaving::asleep(|| call.send(fd, &message, flags)),
                _ => send(call, tcp, fd, start, MOST, flags),
            }
        };
    }
    let inside = tcp.enter_kernel();
    if length > 0 && inside.as_ref().is_some_and(|inside| !tcp.may_sleep(inside, flags)) {
        // SAFETY: send(2) requires a readable buffer of `length` bytes (`# Safety`).
        let sent = unsafe { real::send(fd, start, length, flags | libc::MSG_DONTWAIT) };
        tcp.note_room(sent, || length);
        drop(inside);
        tcp.count(fd, sent, true);
        if sent == length as ssize_t || sent < 0 && thread::errno() != libc::EAGAIN {
            return sent;
        }
        // SAFETY: `message` describes the buffer that send(2) requires (`# Safety`).
        return unsafe { send_rest(section, call, tcp, fd, &message, flags, (sent.max(0) as usize, true)) };
    }
    // SAFETY: `message` describes the buffer that send(2) requires (`# Safety`).
    unsafe { send_as_it_is(section, inside, call, tcp, fd, &message, flags) }
}

#[cold]
fn send_failed(number: c_int, flags: c_int) -> ssize_t {
    if number == libc::EPIPE && flags & libc::MSG_NOSIGNAL == 0 {
        // SAFETY: the calling thread exists. The kernel raises SIGPIPE here, too.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
    }
    fail(number)
}

pub(crate) fn empty_message() -> msghdr {
    // SAFETY: msghdr is plain data, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// The parts of a message's buffers after the first `done` bytes.
fn remaining(message: &msghdr, mut done: usize) -> impl Iterator<Item = iovec> {
    // SAFETY: `import` has made the message, with `msg_iovlen` vectors of this library's.
    (0..message.msg_iovlen).map(|at| unsafe { *message.msg_iov.add(at) }).filter_map(move |vector| {
        let skip = done.min(vector.iov_len);
        done -= skip;
        let length = vector.iov_len - skip;
        (length > 0).then(|| iovec { iov_base: vector.iov_base.wrapping_byte_add(skip), iov_len: length })
    })
}

/// A message that describes what is left after `done` bytes, and its vectors.
fn rest_of(message: &msghdr, done: usize) -> (msghdr, Vec<iovec>) {
    let mut vectors: Vec<_> = remaining(message, done).collect();
    let mut rest = *message;
    rest.msg_iov = vectors.as_mut_ptr();
    rest.msg_iovlen = vectors.len() as _;
    (rest, vectors)
}

fn total(message: &msghdr) -> usize {
    // SAFETY: `import` has made the message, with `msg_iovlen` vectors of this library's.
    (0..message.msg_iovlen).map(|at| unsafe { (*message.msg_iov.add(at)).iov_len }).sum()
}

/// Total length in bytes of the vectors of a message of the program's.
fn length_of(message: &msghdr) -> usize {
    let piece = |at| faults::read(message.msg_iov.cast_const().wrapping_add(at)).map_or(0, |piece| piece.iov_len);
    (0..message.msg_iovlen).map(piece).fold(0, usize::saturating_add)
}

/// Whether a call fails where it would have to wait.
pub(crate) fn does_not_wait(tcp: &Tcp, fd: c_int, flags: c_int) -> bool {
    if flags & libc::MSG_DONTWAIT != 0 || tcp.is_nonblocking() {
        return true;
    }
    !tcp.waits(BLOCKS, || {
        // SAFETY: F_GETFL takes no pointer.
        let nonblocking = unsafe { real::fcntl(fd, libc::F_GETFL, 0) } & libc::O_NONBLOCK != 0;
        tcp.note_nonblocking(nonblocking);
        !nonblocking
    })
}

/// [`wait::deadline`] of a connection's call. Does not ask the kernel if it is known that the socket has no time limit.
fn deadline_of(tcp: &Tcp, fd: c_int, option: c_int) -> Option<u64> {
    let fact = if option == libc::SO_SNDTIMEO { SENDS_FOR_EVER } else { RECEIVES_FOR_EVER };
    let mut limit = None;
    tcp.waits(fact, || {
        limit = wait::deadline(fd, option);
        limit.is_none()
    });
    limit
}

/// The result of one attempt.
pub(crate) enum Attempt {
    Done(usize),
    Failed(c_int),
    /// The connection is being moved, or the ring has no room for a command to the NIC: try again a little later.
    Moving,
}

fn attempt(result: std::io::Result<usize>) -> Attempt {
    match result {
        Ok(count) => Attempt::Done(count),
        Err(error) => Attempt::Failed(thread::number(&error)),
    }
}

pub(crate) fn native(result: ssize_t) -> Attempt {
    if result < 0 { Attempt::Failed(thread::errno()) } else { Attempt::Done(result as usize) }
}

/// Slow path of writev(2) and sendmsg(2).
///
/// # Safety
/// As sendmsg(2).
#[inline(never)]
pub(crate) unsafe fn send_message(call: Call, tcp: &'static Tcp, fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
    let _whole = Whole::begin_cancelable();
    match Section::enter() {
        // SAFETY: this function's `# Safety` is sendmsg(2)'s.
        Some(section) => unsafe { send_inside(section, call, tcp, fd, message, flags) },
        // SAFETY: this function's `# Safety` is sendmsg(2)'s.
        None => unsafe { leaving::asleep(|| call.send(fd, message, flags)) },
    }
}

/// # Safety
/// As sendmsg(2).
unsafe fn send_inside(section: Section, call: Call, tcp: &'static Tcp, fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
    if flags & libc::MSG_ZEROCOPY != 0 {
        let completes = tcp.completes_sends(fd);
        if !completes || tcp.copies_sends(fd) {
            let generation = tcp.generation();
            // SAFETY: this function's `# Safety` is sendmsg(2)'s.
            let sent = unsafe { send_inside(section, call, tcp, fd, message, flags & !libc::MSG_ZEROCOPY) };
            if completes && sent > 0 {
                tcp.complete_send(generation);
            }
            return sent;
        }
    }
    if flags & !PLAIN_SEND != 0 {
        let patience = || Patience::of(fd, libc::SO_SNDTIMEO, flags & libc::MSG_DONTWAIT != 0);
        if let Err(number) = kernel_only::leave(tcp, unusual_send(flags), patience) {
            return fail(number);
        }
    } else if message.msg_controllen > 0 {
        tcp.give_back("control message", Until::Again);
    }
    let inside = tcp.enter_kernel();
    // SAFETY: this function's `# Safety` is sendmsg(2)'s.
    unsafe { send_as_it_is(section, inside, call, tcp, fd, message, flags) }
}

/// Makes the program's own call if it may sleep in the kernel, else waits here.
///
/// # Safety
/// As sendmsg(2).
unsafe fn send_as_it_is(
    section: Section,
    inside: Option<Inside<'_>>,
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    message: &msghdr,
    flags: c_int,
) -> ssize_t {
    if inside.as_ref().is_some_and(|inside| tcp.may_sleep(inside, flags) || flags & !PLAIN_SEND != 0) {
        drop(section);
        // SAFETY: this function's `# Safety` is sendmsg(2)'s.
        let sent = unsafe { leaving::asleep(|| call.send(fd, message, flags)) };
        tcp.note_room(sent, || length_of(message));
        drop(inside);
        tcp.count(fd, sent, true);
        return sent;
    }
    drop(inside);
    // SAFETY: this function's `# Safety` is sendmsg(2)'s.
    unsafe { send_rest(section, call, tcp, fd, message, flags, (0, false)) }
}

/// sendmsg(2) of what lies after the first `done` bytes, without waiting inside the kernel. `stuck`: there was no room
/// for it just now.
///
/// # Safety
/// As sendmsg(2).
unsafe fn send_rest(
    section: Section,
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    message: &msghdr,
    flags: c_int,
    (mut done, mut stuck): (usize, bool),
) -> ssize_t {
    let taken = takes_name(message.msg_name, message.msg_namelen.min(MOST_NAME));
    let Some((imported, _pieces)) = import(message).filter(|_| taken) else {
        drop(section);
        // SAFETY: this function's `# Safety` is sendmsg(2)'s. The kernel refuses it, wherever the connection is.
        return unsafe { leaving::asleep(|| call.send(fd, message, flags)) };
    };
    let message = &imported;
    let wanted = total(message);
    if matches!(call, Call::Vector) && wanted == 0 {
        // Linux, in do_iter_write, as for readv(2).
        return 0;
    }
    let (mut wait, generation, begun, mut rounds) = (None, tcp.generation(), section.begun, 0);
    loop {
        let is_left = tcp.is_left(generation);
        if tcp.generation() != generation && !is_left {
            return fail(libc::EBADF);
        }
        if is_left || sections::is_withdrawn() {
            let (rest, _vectors) = if done > 0 { rest_of(message, done) } else { (*message, Vec::new()) };
            drop(section);
            // SAFETY: this function's `# Safety` is sendmsg(2)'s.
            return sum(done, unsafe { leaving::asleep(|| call.send(fd, &rest, flags)) });
        }
        let attempt = if std::mem::take(&mut stuck) {
            Attempt::Failed(libc::EAGAIN)
        } else {
            // SAFETY: this function's `# Safety` is sendmsg(2)'s.
            unsafe { try_send(tcp, fd, message, done, flags) }
        };
        match attempt {
            Attempt::Moving => {
                if is_interrupted_here(tcp) {
                    return fail(libc::EAGAIN);
                }
                give_way_to_move(tcp, &mut rounds);
                continue;
            }
            Attempt::Done(sent) => {
                done += sent;
                if done >= wanted {
                    return done as ssize_t;
                }
            }
            Attempt::Failed(libc::EAGAIN) => {}
            Attempt::Failed(_) if done > 0 => return done as ssize_t,
            Attempt::Failed(number) => {
                leave_if_lost(tcp);
                return send_failed(number, flags);
            }
        }
        if wait::answers_soon(tcp) {
            continue;
        }
        if does_not_wait(tcp, fd, flags) {
            if done == 0 && tcp.has_ended_just_now() {
                continue;
            }
            return if done > 0 { done as ssize_t } else { fail(libc::EAGAIN) };
        }
        let wait = wait.get_or_insert_with(|| Wait::new(deadline_of(tcp, fd, libc::SO_SNDTIMEO), begun));
        if let Err(number) = wait::block(tcp, fd, Want::Send, wait.after(done)) {
            return if done > 0 { done as ssize_t } else { fail(number) };
        }
    }
}

fn unusual_send(flags: c_int) -> &'static str {
    if flags & libc::MSG_OOB != 0 {
        "MSG_OOB"
    } else if flags & libc::MSG_ZEROCOPY != 0 {
        "MSG_ZEROCOPY"
    } else if flags & libc::MSG_FASTOPEN != 0 {
        "MSG_FASTOPEN"
    } else {
        "unknown send flag"
    }
}

/// Leaves the session if this call has failed because the session has ended, which resets the peers of all lost
/// connections. There may be no sleeping thread that would do it.
#[cold]
fn leave_if_lost(tcp: &Tcp) {
    if let Some((_, session)) = tcp.managed() {
        session.leave_if_known_over();
    }
}

/// Whether this thread was interrupted in the middle of an operation on the connection, and now runs a signal handler.
fn is_interrupted_here(tcp: &Tcp) -> bool {
    tcp.managed().is_some_and(|(connection, _)| connection.is_inside(token()))
}

/// Waits until a move has ended, or a little if another thread closes the connection or the command ring is full: that
/// thread may need this one's processor, and the NIC may have ended.
#[cold]
pub(crate) fn give_way_to_move(tcp: &Tcp, rounds: &mut u32) {
    let _ = tcp.settled_owner() == Some(Owner::Nic) && tcp.has_ended_just_now();
    give_way(*rounds);
    *rounds = rounds.saturating_add(1);
}

/// One attempt to send what lies after the first `done` bytes, without waiting.
///
/// # Safety
/// As sendmsg(2).
unsafe fn try_send(tcp: &'static Tcp, fd: c_int, message: &msghdr, done: usize, flags: c_int) -> Attempt {
    // SAFETY: `rest` has the vectors of a message that meets sendmsg(2)'s requirements (`# Safety`).
    let native = || unsafe {
        // What ends the connection in the middle of a call is left for the next call (Linux, tcp_sendmsg_locked).
        if done > 0 && wait::reports_now(fd, libc::POLLHUP) {
            return Attempt::Failed(libc::EIO);
        }
        let (rest, _vectors) = rest_of(message, done);
        native(real::sendmsg(fd, &rest, flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL))
    };
    let Some((connection, session)) = tcp.managed() else {
        let Some(inside) = tcp.enter_kernel() else { return Attempt::Moving };
        let sent = native();
        drop(inside);
        if let Attempt::Done(count) = sent {
            tcp.count(fd, count as isize, true);
        }
        return sent;
    };
    let Some(entered) = session.shared.enter(connection, token()) else { return Attempt::Moving };
    if entered.owner != Owner::Nic {
        let sent = native();
        if let Attempt::Done(count) = sent {
            connection.count_in_kernel(count as u32);
        }
        return sent;
    }
    if connection.is_unmapped() {
        drop(entered);
        return leave_unmapped(tcp, session);
    }
    if done > 0 && session.shared.readiness(connection, token()).ended.is_some() {
        return Attempt::Failed(libc::EIO);
    }
    let left: usize = remaining(message, done).map(|vector| vector.iov_len).sum();
    // SAFETY: sendmsg(2) requires readable buffers (`# Safety`).
    let pieces = remaining(message, done).map(|vector| unsafe { bytes(vector.iov_base, vector.iov_len) });
    attempt(session.shared.send_pieces(connection, token(), (left, flags & libc::MSG_MORE != 0), pieces))
}

/// Slow path of read(2) and recv(2), into one buffer.
///
/// # Safety
/// As recv(2).
#[inline(never)]
pub(crate) unsafe fn receive(
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    start: *mut c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    let _whole = Whole::begin_cancelable();
    let mut vector = iovec { iov_base: start, iov_len: length };
    let mut message = message_of(&mut vector);
    if flags & libc::MSG_ERRQUEUE != 0 {
        // SAFETY: `message` describes the buffer that recv(2) requires (`# Safety`).
        return unsafe { receive_errors(call, tcp, fd, &mut message, flags) };
    }
    let Some(section) = Section::enter() else {
        // SAFETY: `message` describes the buffer that recv(2) requires (`# Safety`).
        return unsafe { leaving::asleep(|| call.receive(fd, &mut message, flags)) };
    };
    if flags & !PLAIN_RECEIVE != 0 {
        // SAFETY: `message` describes the buffer that recv(2) requires (`# Safety`).
        return unsafe { receive_inside(section, call, tcp, fd, &mut message, flags) };
    }
    if length > MOST {
        drop(section);
        // SAFETY: `message` describes the buffer that recv(2) requires (`# Safety`), of which the `MOST` bytes at
        // `start` are a part. The kernel refuses it, or cuts it.
        return unsafe {
            match call {
                Call::Plain if is_outside(start, length) => leaving::asleep(|| call.receive(fd, &mut message, flags)),
                _ => receive(call, tcp, fd, start, MOST, flags),
            }
        };
    }
    let inside = tcp.enter_kernel();
    if flags & libc::MSG_WAITALL == 0 && tcp.lowat() == 1 && inside.as_ref().is_some_and(|inside| !tcp.may_sleep(inside, flags)) {
        // SAFETY: recv(2) requires a writable buffer of `length` bytes (`# Safety`).
        let received = unsafe { real::recv(fd, start, length, flags | libc::MSG_DONTWAIT) };
        drop(inside);
        tcp.count(fd, received, false);
        if received >= 0 || thread::errno() != libc::EAGAIN {
            return received;
        }
        // SAFETY: `message` describes the buffer that recv(2) requires (`# Safety`).
        return unsafe { receive_rest(section, call, tcp, fd, &mut message, flags, true) };
    }
    // SAFETY: `message` describes the buffer that recv(2) requires (`# Safety`).
    unsafe { receive_as_it_is(section, inside, call, tcp, fd, &mut message, flags) }
}

/// Slow path of readv(2) and recvmsg(2).
///
/// # Safety
/// As recvmsg(2).
#[inline(never)]
pub(crate) unsafe fn receive_message(call: Call, tcp: &'static Tcp, fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
    let _whole = Whole::begin_cancelable();
    if flags & libc::MSG_ERRQUEUE != 0 {
        // SAFETY: this function's `# Safety` is recvmsg(2)'s.
        return unsafe { receive_errors(call, tcp, fd, message, flags) };
    }
    match Section::enter() {
        // SAFETY: this function's `# Safety` is recvmsg(2)'s.
        Some(section) => unsafe { receive_inside(section, call, tcp, fd, message, flags) },
        // SAFETY: this function's `# Safety` is recvmsg(2)'s.
        None => unsafe { leaving::asleep(|| call.receive(fd, message, flags)) },
    }
}

/// recvmsg(2) with MSG_ERRQUEUE, which never waits: returns what the kernel has queued, else the completions that only
/// this library knows of.
///
/// # Safety
/// As recvmsg(2).
unsafe fn receive_errors(call: Call, tcp: &Tcp, fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: this function's `# Safety` is recvmsg(2)'s.
    let received = unsafe { leaving::asleep(|| call.receive(fd, message, flags)) };
    if received >= 0 || thread::errno() != libc::EAGAIN {
        return received;
    }
    let Some(completed) = tcp.completions.take() else { return received };
    let room = if message.msg_control.is_null() { 0 } else { message.msg_controllen };
    let control = completed.control(room);
    // SAFETY: recvmsg(2) requires a writable control buffer of `room` bytes (`# Safety`); these are at most as many.
    let written = unsafe { faults::write_all(message.msg_control.cast::<u8>(), control.bytes()) };
    message.msg_controllen = if written { control.taken } else { 0 };
    if !message.msg_name.is_null() {
        message.msg_namelen = 0;
    }
    let cut = if control.is_cut { libc::MSG_CTRUNC } else { 0 };
    message.msg_flags = flags & libc::MSG_CMSG_CLOEXEC | libc::MSG_ERRQUEUE | cut;
    0
}

/// # Safety
/// As recvmsg(2).
unsafe fn receive_inside(
    section: Section,
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    message: &mut msghdr,
    flags: c_int,
) -> ssize_t {
    if flags & !PLAIN_RECEIVE != 0 {
        let reason = if flags & libc::MSG_OOB != 0 { "MSG_OOB" } else { "unknown receive flag" };
        let patience = || Patience::of(fd, libc::SO_RCVTIMEO, flags & libc::MSG_DONTWAIT != 0);
        if let Err(number) = kernel_only::leave(tcp, reason, patience) {
            return fail(number);
        }
    }
    let inside = tcp.enter_kernel();
    // SAFETY: this function's `# Safety` is recvmsg(2)'s.
    unsafe { receive_as_it_is(section, inside, call, tcp, fd, message, flags) }
}

/// Makes the program's own call if it may sleep in the kernel, else waits here.
///
/// # Safety
/// As recvmsg(2).
unsafe fn receive_as_it_is(
    section: Section,
    inside: Option<Inside<'_>>,
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    message: &mut msghdr,
    flags: c_int,
) -> ssize_t {
    if flags & !PLAIN_RECEIVE != 0 || inside.as_ref().is_some_and(|inside| tcp.may_sleep(inside, flags)) {
        drop(section);
        // SAFETY: this function's `# Safety` is recvmsg(2)'s.
        let received = unsafe { leaving::asleep(|| call.receive(fd, message, flags)) };
        drop(inside);
        tcp.count(fd, received, false);
        return received;
    }
    drop(inside);
    // SAFETY: this function's `# Safety` is recvmsg(2)'s.
    unsafe { receive_rest(section, call, tcp, fd, message, flags, false) }
}

/// recvmsg(2), without waiting inside the kernel. `nothing`: no data waited just now.
///
/// # Safety
/// As recvmsg(2).
unsafe fn receive_rest(
    section: Section,
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    message: &mut msghdr,
    flags: c_int,
    nothing: bool,
) -> ssize_t {
    let Some((mut imported, _pieces)) = import(message) else {
        drop(section);
        // SAFETY: this function's `# Safety` is recvmsg(2)'s. The kernel refuses it, wherever the connection is.
        return unsafe { leaving::asleep(|| call.receive(fd, message, flags)) };
    };
    if matches!(call, Call::Vector) && total(&imported) == 0 {
        // Linux, in do_iter_read: readv(2) of nothing is not passed on to the socket.
        return 0;
    }
    // SAFETY: `imported` is the message of recvmsg(2) (`# Safety`) with vectors of this library's, which `_pieces`
    // keeps.
    let received = unsafe { receive_imported(section, call, tcp, fd, &mut imported, flags, nothing) };
    (message.msg_namelen, message.msg_controllen, message.msg_flags) =
        (imported.msg_namelen, imported.msg_controllen, imported.msg_flags);
    received
}

/// As [`receive_rest`], for a message that is imported.
///
/// # Safety
/// As recvmsg(2).
unsafe fn receive_imported(
    section: Section,
    call: Call,
    tcp: &'static Tcp,
    fd: c_int,
    message: &mut msghdr,
    flags: c_int,
    mut nothing: bool,
) -> ssize_t {
    let room = total(message);
    let (lowat, peeks) = (tcp.lowat() as usize, flags & libc::MSG_PEEK != 0);
    let wanted = if flags & libc::MSG_WAITALL != 0 { room } else { lowat.min(room) }.max(1);
    let (mut done, mut wait, generation, begun, mut rounds) = (0, None, tcp.generation(), section.begun, 0);
    let is_further = matches!(call, Call::Further);
    // `over`: the error that ended a wait. A last attempt, with MSG_DONTWAIT, then receives what is there.
    let (mut flags, mut over) = (flags, None);
    loop {
        let is_left = tcp.is_left(generation);
        if tcp.generation() != generation && !is_left {
            return fail(libc::EBADF);
        }
        if is_left || sections::is_withdrawn() {
            if let Some(number) = over {
                // The program's own call cannot be made: it may have no flags, and would wait again.
                return if done > 0 { done as ssize_t } else { fail(number) };
            }
            done = if peeks { 0 } else { done };
            let (mut rest, _vectors) = if done > 0 { rest_of(message, done) } else { (*message, Vec::new()) };
            drop(section);
            // SAFETY: this function's `# Safety` is recvmsg(2)'s.
            let received = unsafe { leaving::asleep(|| call.receive(fd, &mut rest, flags)) };
            (message.msg_namelen, message.msg_controllen, message.msg_flags) =
                (rest.msg_namelen, rest.msg_controllen, rest.msg_flags);
            return sum(done, received);
        }
        // A peek gets the same bytes again, so only the end of the stream shows that no more will come.
        let last = peeks && done > 0 && wait::has_ended(tcp, fd);
        let attempt = if std::mem::take(&mut nothing) {
            Attempt::Failed(libc::EAGAIN)
        } else {
            // SAFETY: this function's `# Safety` is recvmsg(2)'s.
            unsafe { try_receive(tcp, fd, message, done, flags, done > 0 || is_further) }
        };
        match attempt {
            Attempt::Moving => {
                if is_interrupted_here(tcp) {
                    return fail(libc::EAGAIN);
                }
                give_way_to_move(tcp, &mut rounds);
                continue;
            }
            Attempt::Done(0) => return done as ssize_t,
            Attempt::Done(received) => {
                done = if peeks { received } else { done + received };
                if done >= wanted || room == 0 || last {
                    return done as ssize_t;
                }
            }
            Attempt::Failed(libc::EAGAIN) => {}
            Attempt::Failed(_) if done > 0 => return done as ssize_t,
            Attempt::Failed(number) => {
                leave_if_lost(tcp);
                return fail(number);
            }
        }
        if does_not_wait(tcp, fd, flags) {
            if done == 0 && tcp.has_ended_just_now() {
                continue;
            }
            return if done > 0 { done as ssize_t } else { fail(over.unwrap_or(libc::EAGAIN)) };
        }
        let wait = wait.get_or_insert_with(|| Wait::new(deadline_of(tcp, fd, libc::SO_RCVTIMEO), begun));
        let most = |bytes: usize| bytes.min(1 << 17) as u32;
        if peeks && wait::never_has(tcp, wanted) && !is_interrupted_here(tcp) && tcp.restore("MSG_PEEK", Until::Never) {
            continue;
        }
        let want = if peeks && done > 0 { Want::More(most(wanted)) } else { Want::Receive(most(wanted - done)) };
        if let Err(number) = wait::block(tcp, fd, want, wait.after(done)) {
            (flags, over) = (flags | libc::MSG_DONTWAIT, Some(number));
        }
        if room == 0 && wait::is_readable(tcp, fd) {
            // A receive of no bytes waits for data, the end or an error, and consumes nothing (Linux,
            // tcp_recvmsg_locked). A move also ends the wait, but not the call.
            return 0;
        }
    }
}

/// One attempt to receive from the kernel into the buffers after the first `from` bytes, without waiting. `more`: the
/// call has received something already.
///
/// # Safety
/// As recvmsg(2).
unsafe fn receive_from_kernel(fd: c_int, message: &mut msghdr, from: usize, flags: c_int, more: bool) -> Attempt {
    if more && wait::reports_now(fd, libc::POLLERR) {
        // The error is left for the program's next call.
        return Attempt::Failed(libc::EIO);
    }
    let (mut rest, _vectors) = rest_of(message, from);
    // SAFETY: `rest` has the vectors of a message that meets recvmsg(2)'s requirements (`# Safety`).
    let received = unsafe { real::recvmsg(fd, &mut rest, (flags | libc::MSG_DONTWAIT) & !libc::MSG_WAITALL) };
    message.msg_namelen = rest.msg_namelen;
    message.msg_controllen = rest.msg_controllen;
    message.msg_flags = rest.msg_flags;
    native(received)
}

/// Restores a connection whose memory cannot be mapped into the program's address space (RLIMIT_AS).
#[cold]
fn leave_unmapped(tcp: &Tcp, session: &Session) -> Attempt {
    if session.shared.has_ended() {
        return Attempt::Failed(libc::EIO);
    }
    tcp.give_back("address space", Until::Never);
    Attempt::Moving
}

/// One attempt to receive into the buffers after the first `done` bytes, without waiting. `more`: the call has received
/// something already.
///
/// # Safety
/// As recvmsg(2).
unsafe fn try_receive(tcp: &'static Tcp, fd: c_int, message: &mut msghdr, done: usize, flags: c_int, more: bool) -> Attempt {
    let peek = flags & libc::MSG_PEEK != 0;
    let from = if peek { 0 } else { done };
    let Some((connection, session)) = tcp.managed() else {
        let Some(inside) = tcp.enter_kernel() else { return Attempt::Moving };
        // SAFETY: this function's `# Safety` is recvmsg(2)'s.
        let received = unsafe { receive_from_kernel(fd, message, from, flags, more) };
        drop(inside);
        if let (Attempt::Done(count), false) = (&received, peek) {
            tcp.count(fd, *count as isize, false);
        }
        return received;
    };
    let Some(entered) = session.shared.enter(connection, token()) else { return Attempt::Moving };
    if entered.owner != Owner::Nic {
        // SAFETY: this function's `# Safety` is recvmsg(2)'s.
        let received = unsafe { receive_from_kernel(fd, message, from, flags, more) };
        if let (Attempt::Done(count), false) = (&received, peek) {
            tcp.took(*count);
            connection.count_in_kernel(*count as u32);
        }
        return received;
    }
    if connection.is_unmapped() {
        drop(entered);
        return leave_unmapped(tcp, session);
    }
    if !message.msg_name.is_null() {
        message.msg_namelen = 0;
    }
    message.msg_controllen = 0;
    // Linux, too, returns this flag of the call in the message.
    message.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    // After so many bytes there is nothing but the error that ended the connection.
    let only_error = |bytes: usize| {
        let state = session.shared.readiness(connection, token());
        state.ended.is_some() && !state.fin && state.unread as usize <= bytes
    };
    if more && only_error(0) {
        // The program never gets this error number: the caller returns the bytes that it has.
        return Attempt::Failed(libc::EIO);
    }
    if remaining(message, from).next().is_none() {
        // No bytes are asked for: the result only says whether a call would wait.
        return attempt(session.shared.peek(connection, token(), 0, &mut [0]).map(|_| 0));
    }
    let mut received = 0;
    for vector in remaining(message, from) {
        if received > 0 && only_error(received) {
            break;
        }
        // The bytes are consumed only when all vectors are filled: if a copy fails nothing is lost, as in the kernel.
        let result = if flags & libc::MSG_TRUNC != 0 {
            session.shared.available(connection, token(), received as u32, vector.iov_len)
        } else {
            // SAFETY: recvmsg(2) requires writable buffers (`# Safety`).
            let room = unsafe { bytes_mut(vector.iov_base, vector.iov_len) };
            session.shared.peek(connection, token(), received as u32, room)
        };
        match result {
            Ok(count) => {
                received += count;
                if count < vector.iov_len {
                    break;
                }
            }
            Err(error) if received == 0 || error.raw_os_error() == Some(libc::EFAULT) => {
                return Attempt::Failed(thread::number(&error));
            }
            Err(_) => break,
        }
    }
    if !peek && received > 0 {
        if session.shared.consume(connection, token(), received as u32).is_err() {
            // A report to the NIC of what was read is due, and the command ring is full. No edge would follow EAGAIN.
            return Attempt::Moving;
        }
        tcp.took(received);
    }
    Attempt::Done(received)
}
