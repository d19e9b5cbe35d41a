//! Functions that make, name, duplicate and close descriptors, and those for options.

use super::stdio;
use crate::connecting;
use crate::listening::{self, Accepted};
use crate::sections::{self, Section};
use crate::table::{self, Change, File};
use crate::tcp::{self, Origin, Tcp};
use crate::thread::{self, fail};
use crate::waiting::Negative;
use crate::whole::Whole;
use crate::{faults, forks, leaving, options, ports, process, real, udp, unserved, worth};
use baton_abi::layout::Owner;
use baton_protocol::program::Until;
use libc::{c_int, c_uint, c_ulong, c_void, sockaddr, socklen_t};
use std::sync::atomic::Ordering;

fn note_new(fd: c_int) -> Option<&'static Tcp> {
    process::plan()?;
    faults::begin();
    let tcp = tcp::new(fd);
    table::put(fd, Some(File::Tcp(tcp)));
    Some(tcp)
}

/// Intercepts the C library's `socket`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    let fd = unsafe { real::socket(domain, kind, protocol) };
    let stream = kind & 0xf == libc::SOCK_STREAM && (protocol == 0 || protocol == libc::IPPROTO_TCP);
    if fd >= 0
        && let Some(_section) = Section::enter()
    {
        forget_stale(fd);
        udp::created(fd, domain, kind, protocol);
        unserved::made(protocol);
        if stream
            && (domain == libc::AF_INET || domain == libc::AF_INET6)
            && let Some(tcp) = note_new(fd)
        {
            tcp.note_nonblocking(kind & libc::SOCK_NONBLOCK != 0);
        }
    }
    fd
}

/// Stops tracking a number that the kernel gives out again: it was closed without this library's knowledge.
fn forget_stale(fd: c_int) {
    if table::get(fd).is_some() {
        table::put(fd, None);
    }
}

/// accept(2) and accept4(2): of what the NIC has made for the listener, then of what the kernel has, by `native`, the
/// program's own call.
///
/// # Safety
/// As for the C library's function.
unsafe fn accept_from(
    listener: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
    native: impl Fn() -> c_int,
) -> c_int {
    let known = table::tcp(listener).filter(|tcp| tcp.listens());
    let _whole = known.map(|_| Whole::begin_cancelable());
    let native = || if known.is_some() { leaving::asleep(&native) } else { native() };
    let (fd, made) = match known.and_then(|tcp| listening::accept(tcp, listener, native)) {
        None => (native(), None),
        Some(Accepted::Kernel(fd)) => (fd, None),
        Some(Accepted::Nic(fd, tcp, session, section)) => (fd, Some((tcp, session, section))),
    };
    if fd < 0 {
        return fd;
    }
    let section = Section::enter();
    if section.is_none() && made.is_none() {
        return fd;
    }
    forget_stale(fd);
    let listener = table::tcp(listener);
    let tcp = match &made {
        Some((tcp, ..)) => {
            table::put(fd, Some(File::Tcp(tcp)));
            Some(*tcp)
        }
        None if listener.is_some() => note_new(fd),
        None => match tcp::protocol(fd) {
            Some(libc::IPPROTO_TCP) => note_new(fd),
            Some(libc::IPPROTO_MPTCP) => {
                unserved::report_mptcp();
                None
            }
            _ => None,
        },
    };
    if let Some(tcp) = tcp {
        tcp.note_nonblocking(flags & libc::SOCK_NONBLOCK != 0);
        // An accepted socket inherits its listener's SO_RCVLOWAT, and the time limits.
        tcp.set_lowat(listener.map_or(1, Tcp::lowat));
        if let Some(listener) = listener {
            tcp.negative.copy(&listener.negative);
        }
        tcp.worth.begin(worth::of_listener(listener));
        match made {
            None => tcp.established(fd, Some(Origin::Accepted)),
            Some((_, session, _section)) => {
                tcp.note_origin(Origin::Accepted);
                tcp.made(session);
                if stdio::is_standard(fd) {
                    stdio::take_over(tcp);
                }
                // Perhaps since it was taken.
                let is_closed = process::is_closed_for_good();
                if is_closed {
                    tcp.give_back(process::why_closed(), Until::Never);
                }
                // SAFETY: the program's own arguments (`# Safety`); the descriptor is new, and the flags are its own.
                unsafe { listening::finish(tcp, fd, address, length, flags) };
                if is_closed {
                    // Nobody may see its end: nobody else may have it.
                    tcp.give_up_in_kernel();
                }
            }
        }
    }
    fd
}

/// Intercepts the C library's `accept`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { accept_from(fd, address, length, 0, || real::accept(fd, address, length)) }
}

/// Intercepts the C library's `accept4`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { accept_from(fd, address, length, flags, || real::accept4(fd, address, length, flags)) }
}

/// Dissolves the association of a socket, whose connection must be the kernel's: of one on the NIC that would be the
/// shell.
fn dissolve(tcp: &'static Tcp, native: impl Fn() -> c_int) -> c_int {
    /// How often it is asked for, each time as often as that may be refused.
    const ATTEMPTS: u32 = 10;
    for _ in 0..ATTEMPTS {
        tcp.give_back("connect", Until::Never);
        if let Some(done) = tcp.undisturbed(|owner| (owner != Some(Owner::Nic)).then(&native)) {
            return done;
        }
    }
    native()
}

/// connect(2) of a socket whose connection may move, which the kernel refuses at once. Made while it moves, the call
/// would connect the socket that the agent has just disconnected. None if the kernel may have to wait.
fn connect_again(tcp: &'static Tcp, address: *const sockaddr, length: socklen_t, native: impl Fn() -> c_int) -> Option<c_int> {
    if tcp.is_pinned() {
        return None;
    }
    // What the kernel refuses before it looks at the socket is the program's own call.
    let is_address = connecting::family(address, length).is_some();
    Some(tcp.undisturbed(|owner| match owner {
        // The shell of one that has ended is disconnected, and would connect.
        Some(Owner::Nic) if is_address => fail(libc::EISCONN) as c_int,
        _ => native(),
    }))
}

/// The result of a connect(2) on a connection that is there: the first one on a connection that the NIC was to open
/// succeeds. The kernel's socket, which did not open it, says EISCONN.
fn said_once(tcp: &Tcp, done: c_int, errno: c_int) -> c_int {
    let is_open = done == 0 || thread::errno() == libc::EISCONN;
    if is_open && tcp.connecting.swap(false, Ordering::Relaxed) {
        thread::set_errno(errno);
        return 0;
    }
    done
}

/// Intercepts the C library's `connect`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    let Some(tcp) = table::tcp(fd) else {
        // SAFETY: the program's own arguments (`# Safety`).
        let done = unsafe { real::connect(fd, address, length) };
        udp::changed(fd);
        unserved::connected(fd);
        return done;
    };
    let _whole = Whole::begin_cancelable();
    let Some(section) = Section::enter() else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { leaving::asleep(|| real::connect(fd, address, length)) };
    };
    let errno = thread::errno();
    // SAFETY: the program's own arguments (`# Safety`).
    if let Some(result) = unsafe { connecting::connect(tcp, fd, address, length) } {
        return result;
    }
    if length >= 2 && faults::read(address.cast::<u16>()) == Some(libc::AF_UNSPEC as u16) {
        tcp.connecting.store(false, Ordering::Relaxed);
        // SAFETY: the program's own arguments (`# Safety`). The call does not wait.
        return dissolve(tcp, || unsafe { real::connect(fd, address, length) });
    }
    // SAFETY: the program's own arguments (`# Safety`).
    let native = || unsafe { real::connect(fd, address, length) };
    // It waits for a thread that hands it over just now.
    let inside = tcp.enter_kernel();
    if inside.is_none()
        && let Some(done) = connect_again(tcp, address, length, native)
    {
        return said_once(tcp, done, errno);
    }
    drop(section);
    let done = said_once(tcp, leaving::asleep(native), errno);
    drop(inside);
    let Some(_section) = Section::enter() else { return done };
    if done == 0 || thread::errno() == libc::EINPROGRESS {
        tcp.note_connect();
        // The kernel has read this many bytes of it.
        let shown = (length as usize).min(size_of::<libc::sockaddr_in6>());
        // SAFETY: connect(2) has just read `length` bytes there, and the slice is not kept.
        tcp.worth.begin(worth::of_peer(unsafe { std::slice::from_raw_parts(address.cast(), shown) }));
    }
    if done == 0 {
        tcp.established(fd, Some(Origin::Connected));
    } else {
        tcp.note_origin(Origin::Connected);
    }
    done
}

/// Intercepts the C library's `bind`: during a move a connection's socket is disconnected for a moment, and would be
/// bound.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    let call = || undisturbed(fd, || unsafe { real::bind(fd, address, length) });
    let done = if table::tcp(fd).is_some() { ports::bind(call) } else { call() };
    if done == 0
        && let Some(tcp) = table::tcp(fd)
    {
        // The port follows the family, of IPv4 and IPv6.
        let port = faults::read(address.cast::<u16>().wrapping_add(1));
        tcp.bound.store(port.is_some_and(|port| port != 0), Ordering::Relaxed);
    }
    done
}

/// Intercepts the C library's `listen`: a listening socket is no connection, and never will be.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn listen(fd: c_int, most: c_int) -> c_int {
    // During a move a connection's socket is disconnected for a moment, and would listen.
    // SAFETY: no pointers are involved.
    let done = undisturbed(fd, || unsafe { real::listen(fd, most) });
    if done == 0
        && let Some(tcp) = table::tcp(fd)
        && let Some(_section) = Section::enter()
    {
        tcp.begin_listening();
        listening::refresh(tcp, fd);
    }
    done
}

/// Handles the closing of a descriptor, before it is closed. What is returned is to be kept until it is.
fn leave(fd: c_int) -> Option<Change> {
    leave_file(fd, table::get(fd))
}

/// As [`leave`], where the descriptor's entry has been looked up already. It does not wait for other threads that
/// change descriptors, so a thread may call it while it changes another one itself.
fn leave_file(fd: c_int, file: Option<File>) -> Option<Change> {
    let _section = Section::enter()?;
    udp::close(fd);
    match file {
        // A child of vfork closes its own copies only.
        Some(_) if !process::is_mine() => {}
        Some(File::Tcp(tcp)) => return tcp.remove_fd(fd),
        Some(File::Set(set)) => set.remove_fd(fd),
        Some(File::Ring(ring)) => ring.remove_fd(fd),
        None => {}
    }
    None
}

/// Intercepts the C library's `close`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    // A child of vfork(2) closes its own copies, and this library needs none of them there.
    if !forks::is_child_of_vfork() {
        let is_tracked = is_tracked(fd);
        let _whole = if is_tracked { Whole::begin_cancelable() } else { Whole::begin() };
        if is_tracked {
            if let Some(_change) = leave(fd) {
                // The socket has other descriptors, so this close(2) does not linger.
                // SAFETY: the program's own arguments (`# Safety`).
                return unsafe { real::close(fd) };
            }
        } else if process::session().is_some() && process::is_ours(fd) && process::is_mine() {
            return fail(libc::EBADF) as c_int;
        }
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::close(fd) }
}

/// Closes a range of descriptors, except this library's own.
///
/// # Safety
/// As closefrom(3): what the range refers to is not used any more.
unsafe fn close_all(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    if forks::is_child_of_vfork() {
        // As in `close`.
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::close_range(first, last, flags) };
    }
    let _whole = Whole::begin();
    let mut _changes = Vec::new();
    if flags & CLOSE_RANGE_CLOEXEC == 0 {
        let known = table::known(first, last).collect::<Vec<_>>();
        _changes = known.into_iter().filter_map(|(fd, file)| leave_file(fd, Some(file))).collect();
        udp::close_range(first, last);
    }
    if process::session().is_none() {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::close_range(first, last, flags) };
    }
    let mut from = first;
    let keeps = process::is_mine();
    let next = |from: c_uint| c_int::try_from(from).ok().filter(|_| keeps).and_then(process::next_of_ours);
    while let Some(ours) = next(from).map(|fd| fd as c_uint).filter(|ours| *ours <= last) {
        if ours > from {
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { real::close_range(from, ours - 1, flags) };
        }
        from = ours + 1;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    if from <= last { unsafe { real::close_range(from, last, flags) } } else { 0 }
}

/// Intercepts the C library's `close_range`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if first > last {
        // SAFETY: the program's own arguments; the kernel rejects the range.
        return unsafe { real::close_range(first, last, flags) };
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { close_all(first, last, flags) }
}

/// Intercepts the C library's `closefrom`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    if sections::is_withdrawn() {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::closefrom(first) };
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { close_all(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// Tracks another descriptor of the same file.
fn copied(fd: c_int, copy: c_int) -> c_int {
    copied_file(fd, copy, table::get(fd))
}

/// As [`copied`], where the entry of `fd` has been looked up already; see [`leave_file`].
fn copied_file(fd: c_int, copy: c_int, file: Option<File>) -> c_int {
    if copy < 0 || copy == fd {
        return copy;
    }
    udp::copied(fd, copy);
    if file.is_none() {
        return copy;
    }
    let Some(_section) = Section::enter() else { return copy };
    let foreign = !process::is_mine();
    match file {
        // A child of vfork duplicates it for the program that it executes.
        Some(File::Tcp(tcp)) if foreign => tcp.give_back("exec", Until::Alone),
        Some(File::Tcp(tcp)) => {
            tcp.add_fd(copy);
            table::put(copy, Some(File::Tcp(tcp)));
            if stdio::is_standard(copy) {
                stdio::take_over(tcp);
            }
        }
        Some(File::Set(set)) if !foreign => {
            set.add_fd(copy);
            table::put(copy, Some(File::Set(set)));
        }
        Some(File::Ring(ring)) if !foreign => {
            ring.add_fd();
            table::put(copy, Some(File::Ring(ring)));
        }
        _ => {}
    }
    copy
}

/// Intercepts the C library's `dup`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    copied(fd, unsafe { real::dup(fd) })
}

/// Intercepts the C library's `dup2`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    put_in_place(fd, to, || unsafe { real::dup2(fd, to) })
}

/// Intercepts the C library's `dup3`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    let native = || unsafe { real::dup3(fd, to, flags) };
    if flags & !libc::O_CLOEXEC == 0 { put_in_place(fd, to, native) } else { native() }
}

/// dup2(2) and dup3(2), by `native`.
fn put_in_place(fd: c_int, to: c_int, native: impl FnOnce() -> c_int) -> c_int {
    // What a child of vfork(2) replaces is its own copy.
    if fd == to || !is_tracked(fd) && (forks::is_child_of_vfork() || !is_tracked(to)) {
        return native();
    }
    let _whole = Whole::begin();
    // Before the change: two threads that exchange two numbers would wait for each other.
    let file = table::get(fd);
    // What the kernel refuses changes nothing.
    let is_taken = is_taken(fd, to);
    if is_taken
        && stdio::is_standard(to)
        && let Some(File::Tcp(tcp)) = file
    {
        // Not after it: other threads print meanwhile.
        stdio::take_over(tcp);
    }
    let _change = if is_taken { leave(to).or_else(|| Change::begin(to)) } else { None };
    copied_file(fd, native(), file)
}

/// Whether the kernel takes the arguments of dup2(2), in the process whose descriptors the table has; false if that
/// cannot be asked any more.
fn is_taken(fd: c_int, to: c_int) -> bool {
    let Some(_section) = Section::enter() else { return false };
    // SAFETY: F_GETFD takes no pointer.
    let is_open = || unsafe { real::fcntl(fd, libc::F_GETFD, 0) >= 0 };
    process::is_mine() && u64::try_from(to).is_ok_and(|to| to < process::most_descriptors()) && is_open()
}

fn is_tracked(fd: c_int) -> bool {
    table::get(fd).is_some() || udp::of(fd).is_some()
}

/// fcntl(2).
///
/// # Safety
/// As for the C library's function.
unsafe fn control(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    if command == libc::F_SETFL
        && argument as c_int & libc::O_ASYNC != 0
        && let Some(tcp) = table::tcp(fd)
        && let Some(_section) = Section::enter()
    {
        tcp.give_back("O_ASYNC", Until::Never);
    }
    // SAFETY: the program's own arguments (`# Safety`).
    let result = unsafe { real::fcntl(fd, command, argument) };
    if command == libc::F_SETFL
        && let Some(tcp) = table::tcp(fd)
    {
        tcp.note_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
        tcp.forget_waiting();
    }
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) { copied(fd, result) } else { result }
}

/// Intercepts the C library's `fcntl`. In the calling conventions that this library is built for, a variadic argument
/// is passed like a named one.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { control(fd, command, argument) }
}

/// Intercepts the C library's `fcntl64`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { control(fd, command, argument) }
}

/// Intercepts the C library's `ioctl`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(tcp) = table::tcp(fd) else {
        if request == libc::FIONREAD
            && let Some(length) = udp::next_length(fd)
        {
            // SAFETY: the request's argument is an int (`# Safety`).
            let written = unsafe { faults::write(argument.cast::<c_int>(), length) };
            return if written { 0 } else { fail(libc::EFAULT) as c_int };
        }
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::ioctl(fd, request, argument) };
    };
    let Some(_section) = Section::enter() else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::ioctl(fd, request, argument) };
    };
    if request == libc::FIOASYNC && faults::read(argument.cast::<c_int>().cast_const()).is_some_and(|on| on != 0) {
        tcp.give_back("O_ASYNC", Until::Never);
    }
    let done = match tcp.enter_kernel() {
        // SAFETY: the program's own arguments (`# Safety`).
        Some(_inside) => unsafe { real::ioctl(fd, request, argument) },
        // SAFETY: the program's own arguments (`# Safety`).
        None => unsafe { options::ioctl(tcp, fd, request, argument) },
    };
    if request == libc::FIONBIO {
        tcp.note_nonblocking(false);
        tcp.forget_waiting();
    }
    done
}

/// Notes an option that the kernel has just taken, if it is a time limit.
fn note_limit(negative: &Negative, level: c_int, option: c_int, value: *const c_void) {
    // A timeval begins with its seconds.
    negative.note(level, option, || faults::read(value.cast::<i64>()));
}

/// Intercepts the C library's `setsockopt`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    let Some(tcp) = table::tcp(fd) else {
        // SAFETY: the program's own arguments (`# Safety`).
        let done = unsafe { real::setsockopt(fd, level, option, value, length) };
        if done == 0
            && let Some(udp) = udp::of(fd)
        {
            note_limit(udp.negative(), level, option, value);
        }
        udp::changed(fd);
        return done;
    };
    let Some(_section) = Section::enter() else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::setsockopt(fd, level, option, value, length) };
    };
    let Some(inside) = tcp.enter_kernel() else {
        // SAFETY: the program's own arguments (`# Safety`).
        let done = unsafe { options::set(tcp, fd, level, option, value, length) };
        if done == 0 {
            note_limit(&tcp.negative, level, option, value);
        }
        tcp.forget_waiting();
        return done;
    };
    // SAFETY: the program's own arguments (`# Safety`).
    let done = unsafe { real::setsockopt(fd, level, option, value, length) };
    if done == 0 {
        note_limit(&tcp.negative, level, option, value);
    }
    tcp.forget_waiting();
    if done == 0 && (level, option) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        options::note_lowat(tcp, fd);
    }
    drop(inside);
    if done == 0 {
        listening::refresh(tcp, fd);
    }
    done
}

/// Intercepts the C library's `getsockopt`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    let (Some(tcp), Some(_section)) = (table::tcp(fd), Section::enter()) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::getsockopt(fd, level, option, value, length) };
    };
    let Some(inside) = tcp.enter_kernel() else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { options::get(tcp, fd, level, option, value, length) };
    };
    // SAFETY: the program's own arguments (`# Safety`).
    let done = unsafe { real::getsockopt(fd, level, option, value, length) };
    drop(inside);
    let zero = || faults::read(value.cast::<c_int>().cast_const()) == Some(0);
    // Programs ask this after a non-blocking connect, to learn whether it has succeeded.
    if done == 0 && (level, option) == (libc::SOL_SOCKET, libc::SO_ERROR) && zero() {
        tcp.established(fd, None);
    }
    done
}

/// Intercepts the C library's `getpeername`: a connection that has ended has no peer.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    if let Some(tcp) = table::tcp(fd)
        && let Some(_section) = Section::enter()
    {
        tcp.leave_if_over();
    }
    // SAFETY: the program's own arguments (`# Safety`).
    undisturbed(fd, || unsafe { real::getpeername(fd, address, length) })
}

/// Intercepts the C library's `getsockname`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    undisturbed(fd, || unsafe { real::getsockname(fd, address, length) })
}

/// Makes a call that does not wait at a time when no move is under way: during a move the socket has no address for a
/// moment.
fn undisturbed(fd: c_int, call: impl Fn() -> c_int) -> c_int {
    match (table::tcp(fd), Section::enter()) {
        (Some(tcp), Some(_section)) => tcp.undisturbed(|_| call()),
        _ => call(),
    }
}

/// Intercepts the C library's `shutdown`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    // SAFETY: no pointers are involved.
    let native = || unsafe { real::shutdown(fd, how) };
    let (Some(tcp), Some(_section)) = (table::tcp(fd), Section::enter()) else { return native() };
    if let Some(_inside) = tcp.enter_kernel() {
        return native();
    }
    tcp.leave_if_over();
    options::shutdown(tcp, fd, how)
}
