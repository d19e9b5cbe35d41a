//! Socket options and ioctls of a connection that may be on the NIC.

use crate::io::give_way_to_move;
use crate::tcp::Tcp;
use crate::thread::{self, fail, token};
use crate::{faults, real};
use baton_abi::layout::Owner;
use baton_protocol::program::Until;
use libc::{c_int, c_ulong, c_void, socklen_t};
use std::os::fd::BorrowedFd;

const TCP_ZEROCOPY_RECEIVE: c_int = 35;

/// How an option is set on a connection that may be on the NIC.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// Set on the descriptor; the NIC gets the value if it acts on the option.
    Direct,
    /// Set for the NIC alone: SO_KEEPALIVE, since it sends keep-alive probes in place of the shell, and TCP_CORK, which
    /// servers set twice for each answer. A restore sets it on the socket.
    NicOnly,
    /// The connection is restored first, and may move again: the next offload reads the option.
    ReadAtHandoff,
    /// Only the kernel can do it: the connection is restored for good, for this reason.
    Never(&'static str),
}

fn meaning(level: c_int, option: c_int) -> Meaning {
    match (level, option) {
        (1, 9) | (6, 3) => Meaning::NicOnly,
        // SO_REUSEADDR, IP_TOS, IP_TTL, IPV6_TCLASS, IPV6_UNICAST_HOPS, IPV6_AUTOFLOWLABEL, TCP_WINDOW_CLAMP,
        // TCP_RTO_MIN_US, TCP_DELACK_MAX_US, TCP_MAXSEG, SO_BINDTODEVICE, SO_BINDTOIFINDEX, SO_MARK, SO_DONTROUTE.
        (1, 2 | 25 | 62 | 36 | 5) | (0, 1 | 2) | (41, 16 | 67 | 70) | (6, 10 | 45 | 46 | 2) => Meaning::ReadAtHandoff,
        _ if baton_handoff::unenforced::may_keep_in_kernel(level, option) => Meaning::ReadAtHandoff,
        (6, 31) => Meaning::Never("TCP_ULP"),
        (6, 14 | 32 | 38..=42) => Meaning::Never("signed segments"),
        (6, 19..=22) => Meaning::Never("TCP_REPAIR"),
        (6, 36) => Meaning::Never("TCP_INQ"),
        (1, 29 | 35 | 37 | 63..=65) => Meaning::Never("time stamps"),
        (1, 26 | 27 | 44 | 50) => Meaning::Never("socket filter"),
        (0, 4) => Meaning::Never("IP_OPTIONS"),
        _ => Meaning::Direct,
    }
}

/// setsockopt(2).
///
/// # Safety
/// As setsockopt(2).
pub(crate) unsafe fn set(
    tcp: &'static Tcp,
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    let meaning = meaning(level, option);
    match meaning {
        Meaning::Never(reason) => tcp.give_back(reason, Until::Never),
        Meaning::ReadAtHandoff => tcp.give_back("option", Until::Again),
        Meaning::Direct | Meaning::NicOnly => {}
    }
    let given = if length as c_int >= 4 { faults::read(value.cast::<c_int>()) } else { None };
    // SAFETY: this function's `# Safety` is setsockopt(2)'s.
    let native = || unsafe { real::setsockopt(fd, level, option, value, length) };
    let mut round = 0;
    let done = loop {
        let Some((connection, session)) = tcp.managed() else { break native() };
        let Some(entered) = session.shared.enter(connection, token()) else {
            if connection.is_inside(token()) {
                return fail(libc::EAGAIN) as c_int;
            }
            give_way_to_move(tcp, &mut round);
            continue;
        };
        if entered.owner != Owner::Nic {
            break native();
        }
        let done = if meaning == Meaning::NicOnly && given.is_some() { 0 } else { native() };
        if done == 0
            && let Some(given) = given
        {
            // SAFETY: the program's descriptor, open during its own call.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
            let queued = session.shared.option_was_set(connection, token(), borrowed, (level, option), given);
            if queued.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock) {
                // The command ring is full: the NIC has not read the earlier commands yet.
                drop(entered);
                give_way_to_move(tcp, &mut round);
                continue;
            }
        }
        break done;
    };
    if done == 0 && baton_client::limits_queue(level, option) {
        // There may be room now.
        tcp.rearm();
    }
    if done == 0 && (level, option) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        note_lowat(tcp, fd);
        tcp.changed();
        if let Some((connection, session)) = tcp.managed() {
            let ready = tcp.undisturbed(|owner| match owner {
                Some(Owner::Nic) => {
                    let readiness = session.shared.readiness(connection, token());
                    readiness.fin || readiness.unread >= crate::readiness::least(tcp, &readiness)
                }
                _ => crate::wait::reports_now(fd, libc::POLLIN),
            });
            if ready {
                tcp.rearm();
            }
        }
    }
    done
}

/// Records SO_RCVLOWAT after it was set: the value that the kernel made of it, which is at most half of the largest
/// receive memory.
pub(crate) fn note_lowat(tcp: &Tcp, fd: c_int) {
    tcp.set_lowat(kernels(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT).unwrap_or(1).max(1) as u32);
}

/// The kernel's value of an integer option, read without this library.
pub(crate) fn kernels(fd: c_int, level: c_int, option: c_int) -> Option<c_int> {
    let (mut value, mut length) = (0 as c_int, size_of::<c_int>() as socklen_t);
    // SAFETY: `value` and `length` are live and have room for one int.
    let done = unsafe { real::getsockopt(fd, level, option, (&raw mut value).cast(), &mut length) };
    (done == 0).then_some(value)
}

/// Takes the error that is pending on a connection, wherever it is: 0 if there is none.
pub(crate) fn take_error(tcp: &'static Tcp, fd: c_int) -> c_int {
    let (mut error, mut length) = (0 as c_int, size_of::<c_int>() as socklen_t);
    // SAFETY: `error` and `length` are live and have room for one int.
    unsafe { get(tcp, fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast(), &mut length) };
    error
}

/// getsockopt(2).
///
/// # Safety
/// As getsockopt(2).
pub(crate) unsafe fn get(
    tcp: &'static Tcp,
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    if (level, option) == (libc::IPPROTO_TCP, libc::TCP_INFO) {
        tcp.leave_if_over();
    }
    if (level, option) == (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        // The option maps pages of the kernel's receive queue. On a shell it would never return any data.
        tcp.give_back("TCP_ZEROCOPY_RECEIVE", Until::Never);
    }
    // During a move some options have values that the agent has set.
    let (done, owner) = tcp.undisturbed(|owner| {
        // SAFETY: this function's `# Safety` is getsockopt(2)'s.
        let done = unsafe { real::getsockopt(fd, level, option, value, length) };
        (done, owner)
    });
    if done == 0
        && owner == Some(Owner::Nic)
        && let Some((connection, session)) = tcp.managed()
    {
        let answer = match (level, option) {
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => i32::from(connection.keepalive()),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => i32::from(connection.cork()),
            // The shell's, for the program has not set it.
            (libc::IPPROTO_TCP, libc::TCP_REPAIR) => 0,
            (libc::SOL_SOCKET, libc::SO_INCOMING_CPU) => connection.processor().map_or(-1, |processor| processor as i32),
            (libc::SOL_SOCKET, libc::SO_ERROR) => connection.take_error() as i32,
            // The kernel would return the shell's segment size, which is the default of 536 bytes.
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => match session.shared.detail(connection.number()) {
                Ok(detail) if detail.mss > 0 => detail.mss as i32,
                _ => return done,
            },
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                // SAFETY: getsockopt has just written `*length` bytes to `value`.
                let info = unsafe { std::slice::from_raw_parts_mut(value.cast::<u8>(), *length as usize) };
                if let Ok(detail) = session.shared.detail(connection.number()) {
                    detail.overlay(info);
                }
                return done;
            }
            _ => return done,
        };
        // SAFETY: getsockopt has just written `*length` bytes to `value`; at most as many are copied.
        unsafe { std::ptr::copy_nonoverlapping((&raw const answer).cast::<u8>(), value.cast(), (*length as usize).min(4)) };
    }
    done
}

/// ioctl(2): FIONREAD, and SIOCOUTQ and SIOCOUTQNSD for what is not acknowledged or not sent yet.
///
/// # Safety
/// As ioctl(2).
pub(crate) unsafe fn ioctl(tcp: &'static Tcp, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    const SIOCOUTQNSD: c_ulong = 0x894b;
    // SAFETY: this function's `# Safety` is ioctl(2)'s.
    let native = || unsafe { real::ioctl(fd, request, argument) };
    if !matches!(request, libc::FIONREAD | libc::TIOCOUTQ | SIOCOUTQNSD) {
        return native();
    }
    if let Some((_, session)) = tcp.managed() {
        session.shared.catch_up(token());
    }
    // On the NIC: the counts are valid as long as the connection stays there.
    let count = tcp.undisturbed(|owner| match tcp.managed() {
        Some((connection, session)) if owner == Some(Owner::Nic) => {
            let state = session.shared.readiness(connection, token());
            Ok(if request == libc::FIONREAD { state.unread } else { state.queued })
        }
        _ => Err(native()),
    });
    let count = match (count, tcp.managed()) {
        (Err(done), _) => return done,
        // The NIC publishes how much of it has been sent in its record, which the agent reads.
        (Ok(queued), Some((connection, session))) if request == SIOCOUTQNSD => {
            session.shared.detail(connection.number()).map_or(0, |detail| detail.unsent.min(queued))
        }
        (Ok(count), _) => count,
    };
    // SAFETY: these requests take a pointer to an int (this function's `# Safety`).
    let written = unsafe { faults::write(argument.cast::<c_int>(), count as c_int) };
    if written { 0 } else { fail(libc::EFAULT) as c_int }
}

/// Bytes that the program has not read, wherever the connection is. None if FIONREAD fails.
pub(crate) fn unread(tcp: &'static Tcp, fd: c_int) -> Option<c_int> {
    let mut count: c_int = 0;
    // SAFETY: `count` is live and has room for the int that FIONREAD returns.
    let done = unsafe { ioctl(tcp, fd, libc::FIONREAD, (&raw mut count).cast()) };
    (done == 0).then_some(count)
}

/// Whether the kernel has the socket's connection: one on the NIC leaves a shell in repair mode.
pub(crate) fn is_kernels(fd: c_int) -> bool {
    kernels(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR) == Some(0)
}

/// shutdown(2).
pub(crate) fn shutdown(tcp: &'static Tcp, fd: c_int, how: c_int) -> c_int {
    let done = shut(tcp, fd, how);
    // As in Linux (inet_shutdown), edge-triggered registrations report again even if the call has failed.
    tcp.rearm();
    done
}

fn shut(tcp: &'static Tcp, fd: c_int, how: c_int) -> c_int {
    match how {
        // For good: a connection that receives no more gains little on the NIC.
        libc::SHUT_RD | libc::SHUT_RDWR => tcp.give_back("shutdown of receiving", Until::Never),
        libc::SHUT_WR => {}
        // The kernel refuses it before it looks at the socket (inet_shutdown).
        // SAFETY: no pointers are involved.
        _ => return unsafe { real::shutdown(fd, how) },
    }
    let mut round = 0;
    loop {
        // SAFETY: no pointers are involved.
        let native = || unsafe { real::shutdown(fd, how) };
        let Some((connection, session)) = tcp.managed() else { return native() };
        let Some(entered) = session.shared.enter(connection, token()) else {
            if connection.is_inside(token()) {
                return fail(libc::EAGAIN) as c_int;
            }
            give_way_to_move(tcp, &mut round);
            continue;
        };
        if entered.owner != Owner::Nic {
            return native();
        }
        if connection.ended().is_some() {
            return fail(libc::ENOTCONN) as c_int;
        }
        if how != libc::SHUT_WR {
            // The connection could not be restored, for example for lack of a route.
            connection.shut_receiving();
        }
        if how == libc::SHUT_RD || session.shared.readiness(connection, token()).shut {
            return 0;
        }
        match session.shared.shutdown(connection, token()) {
            Ok(()) => return 0,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                drop(entered);
                give_way_to_move(tcp, &mut round);
            }
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => return fail(libc::EAGAIN) as c_int,
            Err(error) => return fail(thread::number(&error)) as c_int,
        }
    }
}
