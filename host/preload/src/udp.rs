//! UDP sockets whose datagrams the NIC receives and sends (`--offload full`).
//!
//! The kernel's socket stays in use as well: a datagram is received from the NIC's ring or else from the socket, and
//! sent by the NIC or, if the NIC cannot, by the socket. Sets and polls watch the NIC's doorbell beside the socket,
//! with the program's own data. The agent is asked for the doorbell when the process first waits for the socket,
//! receives or sends, and the socket has a port. If it refuses for now, a later call asks again ([`Again`]).

use crate::again::Again;
use crate::call::Call;
use crate::process::{self, Session};
use crate::sections::{self, Section};
use crate::short_lock::{Held, ShortLock};
use crate::waiting::Negative;
use crate::whole::Whole;
use crate::{connecting, forks, leaving, real, table, tcp, thread, wait};
use baton_client::Datagrams;
use baton_ring::give_way;
use libc::{c_int, c_void, epoll_event, iovec, msghdr, pollfd, sockaddr, sockaddr_storage, socklen_t, ssize_t};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of descriptors that can be tracked; higher ones stay the kernel's.
const SIZE: usize = 1 << 20;

/// The UDP sockets by descriptor. Entries are never freed, as in [`crate::table`].
static SOCKETS: [AtomicPtr<Udp>; SIZE] = [const { AtomicPtr::new(std::ptr::null_mut()) }; SIZE];

/// Sockets that are closed, for new ones.
static POOL: ShortLock<Vec<&'static Udp>> = ShortLock::new(Vec::new());

/// Descriptors of doorbells.
static OURS: ShortLock<Vec<c_int>> = ShortLock::new(Vec::new());

/// Whether there are sockets that a child of vfork(2) uses, or passes on to the program that it executes. Giving one to
/// the kernel takes locks, which the child may not: its parent does it when the child has executed its program.
static PASSED: AtomicBool = AtomicBool::new(false);

/// One more than the highest descriptor ever tracked.
static END: AtomicU32 = AtomicU32::new(0);

/// One more than the highest descriptor ever tracked.
pub(crate) fn end() -> usize {
    END.load(Ordering::Relaxed) as usize
}

/// Number of datagrams from the ring after which the kernel's socket is tried, so that datagrams of the same host get
/// their turn.
const TURN: u32 = 64;

/// Microseconds between checks of a connected socket that only sends for an error that the kernel has received (ICMP).
const ERROR_CHECK: u64 = 100;

/// Microseconds for which a non-blocking sender waits for room, since the NIC empties the ring soon.
const ROOM: u64 = 10_000;

/// A UDP socket on the NIC, and the session that it is in.
#[derive(Clone)]
struct Taken {
    datagrams: Arc<Datagrams>,
    session: &'static Session,
}

/// A UDP socket.
#[derive(Default)]
pub(crate) struct Udp {
    taken: Mutex<Option<Taken>>,
    /// Whether `taken` is set, readable without the lock.
    is_taken: AtomicBool,
    /// When the agent may be asked for the rings.
    again: Again,
    /// Datagrams may wait in the kernel's socket from the time before the NIC took it.
    kernel_first: AtomicBool,
    received: AtomicU32,
    error_checked: AtomicU64,
    /// The peer that it is connected to.
    peer: Mutex<Option<SocketAddr>>,
    v6: AtomicBool,
    descriptors: AtomicU32,
    negative: Negative,
    /// A child of vfork(2) uses it, or passes it on ([`PASSED`]).
    passed: AtomicBool,
    /// The sets that watch it: the set, and the program's event.
    sets: Mutex<Vec<(c_int, epoll_event)>>,
}

/// Drops a socket's rings. Their descriptors are closed when no thread uses them any more, their memory is free when no
/// NIC uses it either.
fn drop_rings(taken: Option<Taken>) {
    if let Some(taken) = taken {
        let gone = taken.datagrams.descriptors().map(|fd| fd.as_raw_fd());
        OURS.lock().retain(|fd| !gone.contains(fd));
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The UDP socket behind a descriptor. In a child of vfork(2) it is noted that the child uses it, and this returns
/// None.
#[inline]
pub(crate) fn of(fd: c_int) -> Option<&'static Udp> {
    let found = entry(fd)?;
    if forks::is_child_of_vfork() {
        found.note_passed(fd);
        return None;
    }
    Some(found)
}

/// The entry of a descriptor; in a child of vfork(2) the parent's.
#[inline]
fn entry(fd: c_int) -> Option<&'static Udp> {
    let found = SOCKETS.get(fd as u32 as usize)?.load(Ordering::Acquire);
    // SAFETY: only pointers from `Box::leak` are stored, and nothing is ever freed.
    unsafe { found.as_ref() }
}

/// Sets the socket of a descriptor. Does nothing in a child of vfork(2).
fn put(fd: c_int, udp: Option<&'static Udp>) {
    if forks::is_child_of_vfork() {
        return;
    }
    if let Some(slot) = SOCKETS.get(fd as u32 as usize) {
        if udp.is_some() {
            END.fetch_max(fd as u32 + 1, Ordering::AcqRel);
        }
        slot.store(udp.map_or(std::ptr::null_mut(), |udp| std::ptr::from_ref(udp).cast_mut()), Ordering::Release);
    }
}

fn all() -> impl Iterator<Item = (c_int, &'static Udp)> {
    (0..END.load(Ordering::Acquire) as c_int).filter_map(|fd| Some((fd, entry(fd)?)))
}

/// The object of a closed socket. An object for which a thread is still asking the agent stays in the pool; that thread
/// will see that the socket was closed.
fn unused() -> Option<&'static Udp> {
    let mut pool = POOL.lock();
    let at = pool.iter().position(|udp| udp.taken.try_lock().is_ok())?;
    Some(pool.swap_remove(at))
}

/// Tracks a new socket, if it is a UDP socket and the NIC may have it.
pub(crate) fn created(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    put(fd, None);
    let udp = kind & 0xf == libc::SOCK_DGRAM && (protocol == 0 || protocol == libc::IPPROTO_UDP);
    let family = domain == libc::AF_INET || domain == libc::AF_INET6;
    if udp && family && process::plan().is_some_and(process::Plan::is_full) {
        let udp = unused().unwrap_or_else(|| Box::leak(Box::default()));
        udp.again.reset();
        udp.negative.clear();
        udp.passed.store(false, Ordering::Relaxed);
        udp.v6.store(domain == libc::AF_INET6, Ordering::Release);
        udp.descriptors.store(1, Ordering::Release);
        put(fd, Some(udp));
    }
}

/// Tracks another descriptor of the same socket.
pub(crate) fn copied(fd: c_int, copy: c_int) {
    if copy >= 0 && copy != fd {
        let udp = of(fd).filter(|_| Section::enter().is_some_and(|_section| process::is_mine()));
        if let Some(udp) = udp {
            udp.descriptors.fetch_add(1, Ordering::AcqRel);
        }
        put(copy, udp);
    }
}

/// Handles the closing of a descriptor, before it is closed.
pub(crate) fn close(fd: c_int) {
    let (Some(udp), Some(_section)) = (of(fd), Section::enter()) else { return };
    if !process::is_mine() {
        return;
    }
    put(fd, None);
    if udp.descriptors.fetch_sub(1, Ordering::AcqRel) == 1 {
        udp.leave(false);
        locked(&udp.sets).clear();
        POOL.lock().push(udp);
    }
}

/// Handles the closing of a range of descriptors.
pub(crate) fn close_range(first: u32, last: u32) {
    for (fd, _) in all().filter(|(fd, _)| (first..=last).contains(&(*fd as u32))).collect::<Vec<_>>() {
        close(fd);
    }
}

/// Handles the closing of an epoll set's descriptor `number`, which may be reused. `left` is another descriptor of the
/// set, if it has one.
pub(crate) fn set_closed(number: c_int, left: Option<c_int>) {
    for (_, udp) in all() {
        let mut sets = locked(&udp.sets);
        match left {
            Some(left) => sets.iter_mut().filter(|(set, _)| *set == number).for_each(|(set, _)| *set = left),
            None => sets.retain(|(set, _)| *set != number),
        }
    }
}

/// Gives a socket to the kernel for good, with what is unread: another process is about to have it.
pub(crate) fn give_back(fd: c_int) {
    if let Some(udp) = of(fd) {
        udp.leave(true);
    }
}

/// As [`give_back`], for the sockets that an executed program inherits ([`forks::is_inherited`]). In a child of
/// vfork(2) they are noted.
pub(crate) fn give_back_inherited(with_actions: bool) {
    let is_child = forks::is_child_of_vfork();
    if table::is_wiped() || !process::is_mine() && !is_child {
        // They are its parent's.
        return;
    }
    for (fd, udp) in all().filter(|(_, udp)| udp.is_taken.load(Ordering::Acquire)) {
        match forks::is_inherited(fd, with_actions) {
            true if is_child => udp.note_passed(fd),
            true => udp.leave(true),
            false => {}
        }
    }
}

/// Gives all sockets to the kernel for good, with what is unread.
pub(crate) fn give_everything_back() {
    all().for_each(|(_, udp)| udp.leave(true));
}

/// Gives the sockets to the kernel that a child of vfork(2) has used or passed on, in its parent.
pub(crate) fn give_back_passed() {
    let section = if PASSED.load(Ordering::Relaxed) { Section::enter() } else { None };
    if section.is_none() || table::is_wiped() || !process::is_mine() {
        return;
    }
    PASSED.store(false, Ordering::Relaxed);
    all().filter(|(_, udp)| udp.passed.swap(false, Ordering::Relaxed)).for_each(|(_, udp)| udp.leave(true));
}

/// Records that the session has ended: the kernel alone serves the sockets until there is another session.
pub(crate) fn leave_session() {
    for (_, udp) in all() {
        udp.is_taken.store(false, Ordering::Release);
        drop_rings(locked(&udp.taken).take());
    }
}

/// As [`table::unlock`](crate::table::unlock), for the table of these sockets.
pub(crate) fn unlock() {
    // SAFETY: this library's own memory, whose pages may be written to disk, which changes nothing of what they hold.
    unsafe { libc::munlock((&raw const SOCKETS).cast(), size_of_val(&SOCKETS)) };
}

/// Takes the locks of what is kept, for a fork.
pub(crate) fn hold() -> Vec<Held> {
    vec![POOL.hold(), OURS.hold()]
}

/// Closes the remaining doorbells. No thread may use them any more.
pub(crate) fn close_all() {
    wait::close_all(&OURS);
}

/// Stops tracking all sockets, in a child that may take no lock.
pub(crate) fn forget_all() {
    all().for_each(|(fd, _)| put(fd, None));
}

/// Whether a descriptor is a doorbell of a socket's.
pub(crate) fn is_ours(fd: c_int) -> bool {
    OURS.try_lock().is_some_and(|ours| ours.contains(&fd))
}

/// The lowest of them from `first` on.
pub(crate) fn next_of_ours(first: c_int) -> Option<c_int> {
    OURS.try_lock()?.iter().copied().filter(|fd| *fd >= first).min()
}

impl Taken {
    fn bell(&self) -> c_int {
        self.datagrams.bell().as_raw_fd()
    }
}

/// Moves a descriptor out of the program's way.
fn renumber(fd: OwnedFd) -> OwnedFd {
    // SAFETY: `lift` returns a descriptor that only this library has, in place of the one it was given.
    unsafe { OwnedFd::from_raw_fd(process::lift(fd.into_raw_fd())) }
}

/// Whether a later request may succeed after this error: the agent refuses for a while (`WouldBlock`), does not answer
/// (`TimedOut`), or the session has ended (the others) and another one can be opened.
fn may_pass(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, TimedOut, UnexpectedEof, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | NotConnected | BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn local_port(fd: c_int) -> u16 {
    // SAFETY: the program's descriptor, open during its own call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    baton_linux::socket::local_address(borrowed).map_or(0, |local| local.port())
}

impl Udp {
    /// Its negative time limits.
    pub(crate) fn negative(&self) -> &Negative {
        &self.negative
    }

    /// The socket's rings, if the NIC has or had the socket. Asks the agent for them if that is due.
    fn taken(&self, fd: c_int) -> Option<Taken> {
        if table::is_wiped() {
            // This child was made past the library: the rings are its parent's.
            return None;
        }
        if self.is_taken.load(Ordering::Acquire) {
            let taken = locked(&self.taken).clone();
            if taken.as_ref().is_none_or(|taken| !taken.datagrams.has_new_agent()) {
                return taken;
            }
        }
        if !self.again.is_due() {
            return None;
        }
        let errno = thread::errno();
        let taken = self.take(fd);
        thread::set_errno(errno);
        taken
    }

    #[cold]
    fn take(&self, fd: c_int) -> Option<Taken> {
        if local_port(fd) == 0 || process::is_closed() {
            return None;
        }
        let session = process::open_session()?;
        // SAFETY: the program's descriptor, open during its own call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let mut taken = locked(&self.taken);
        if !self.again.is_due() {
            // Another thread has just asked in vain.
            return None;
        }
        let datagrams = match &*taken {
            Some(taken) => taken.datagrams.clone(),
            None => {
                let receive = baton_linux::socket::get(borrowed, libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap_or(0) as u32;
                let Ok(datagrams) = Datagrams::new(&session.shared, receive, renumber) else {
                    // All rings are in use. Some may be free later, when the NIC no longer uses those of closed
                    // sockets.
                    self.again.pause();
                    return None;
                };
                OURS.lock().extend(datagrams.descriptors().map(|fd| fd.as_raw_fd()));
                Arc::new(datagrams)
            }
        };
        *locked(&self.peer) = baton_linux::socket::peer_address(borrowed).ok();
        match datagrams.serve(&session.shared, borrowed) {
            Ok(()) => {
                self.kernel_first.store(true, Ordering::Release);
                let found = Taken { datagrams, session };
                *taken = Some(found.clone());
                self.is_taken.store(true, Ordering::SeqCst);
                // Another thread may have given the socket to the kernel or closed it meanwhile, when `is_taken` was
                // not set yet.
                if !self.again.succeed() {
                    if self.is_taken.swap(false, Ordering::SeqCst) {
                        *taken = None;
                        drop(taken);
                        found.datagrams.end(&session.shared, true);
                        drop_rings(Some(found));
                    }
                    return None;
                }
                drop(taken);
                for (set, event) in locked(&self.sets).iter() {
                    watch_bell(*set, libc::EPOLL_CTL_ADD, found.bell(), *event);
                }
                Some(found)
            }
            Err(error) => {
                if may_pass(&error) {
                    self.again.pause()
                } else {
                    self.again.give_up()
                }
                *taken = None;
                drop(taken);
                drop_rings(Some(Taken { datagrams, session }));
                self.is_taken.store(false, Ordering::Release);
                None
            }
        }
    }

    /// Gives the socket to the kernel for good, and with `replay` what is unread.
    fn leave(&self, replay: bool) {
        self.again.give_up();
        let errno = thread::errno();
        let was_taken = self.is_taken.swap(false, Ordering::SeqCst);
        if was_taken {
            let taken = locked(&self.taken).clone();
            if let Some(taken) = taken {
                taken.datagrams.end(&taken.session.shared, replay);
            }
        }
        // Not waited for: a thread that has the lock may be asking the agent for the socket. It will see that the
        // socket was given up.
        let taken = if was_taken { Some(locked(&self.taken)) } else { self.taken.try_lock().ok() };
        drop_rings(taken.and_then(|mut taken| taken.take()));
        thread::set_errno(errno);
    }

    /// Notes that a child of vfork(2) uses the socket, unless this descriptor is another file in the child.
    #[cold]
    fn note_passed(&self, fd: c_int) {
        let errno = thread::errno();
        if !self.passed.load(Ordering::Relaxed) && tcp::protocol(fd) == Some(libc::IPPROTO_UDP) {
            self.passed.store(true, Ordering::Relaxed);
            PASSED.store(true, Ordering::Relaxed);
        }
        thread::set_errno(errno);
    }

    /// Sends the NIC the socket's present peer and options, after the program has connected it or changed an option.
    fn refresh(&self, fd: c_int) {
        let errno = thread::errno();
        if !self.again.is_given_up() || !self.is_taken.load(Ordering::Acquire) {
            self.again.reset();
        }
        let taken = if self.is_taken.load(Ordering::Acquire) { locked(&self.taken).clone() } else { None };
        if let Some(taken) = taken {
            // SAFETY: the program's descriptor, open during its own call.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
            *locked(&self.peer) = baton_linux::socket::peer_address(borrowed).ok();
            // Datagrams that are in the ring already are read before this matters, whether the NIC still serves the
            // socket or not.
            let _ = taken.datagrams.serve(&taken.session.shared, borrowed);
        }
        thread::set_errno(errno);
    }
}

/// Handles a changed option or peer of a socket.
pub(crate) fn changed(fd: c_int) {
    if let Some(udp) = of(fd)
        && let Some(_section) = Section::enter()
        && !table::is_wiped()
    {
        udp.refresh(fd);
    }
}

fn blocks(fd: c_int, flags: c_int) -> bool {
    // SAFETY: F_GETFL takes no pointer.
    flags & libc::MSG_DONTWAIT == 0 && unsafe { real::fcntl(fd, libc::F_GETFL, 0) } & libc::O_NONBLOCK == 0
}

/// recvmsg(2) of a UDP socket.
///
/// # Safety
/// As recvmsg(2).
pub(crate) unsafe fn receive_message(call: Call, udp: &Udp, fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
    let _whole = Whole::begin_cancelable();
    let special = flags & (libc::MSG_ERRQUEUE | libc::MSG_OOB) != 0;
    let section = Section::enter();
    let taken = if section.is_some() { udp.taken(fd).filter(|_| !special) } else { None };
    let (Some(mut section), Some(taken)) = (section, taken) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { leaving::asleep(|| call.receive(fd, message, flags)) };
    };
    let (deadline, mut has_slept) = (wait::deadline(fd, libc::SO_RCVTIMEO), false);
    loop {
        let turn = udp.received.fetch_add(1, Ordering::Relaxed) % TURN == TURN - 1;
        let kernel_first = turn || udp.kernel_first.load(Ordering::Acquire);
        if !kernel_first {
            // SAFETY: the program's own arguments (`# Safety`).
            if let Some(received) = unsafe { take_next(udp, &taken, message, flags) } {
                return received;
            }
        }
        // SAFETY: the program's own arguments (`# Safety`).
        let received = unsafe { real::recvmsg(fd, message, flags | libc::MSG_DONTWAIT) };
        if received >= 0 || thread::errno() != libc::EAGAIN {
            return received;
        }
        udp.kernel_first.store(false, Ordering::Release);
        if kernel_first {
            // SAFETY: the program's own arguments (`# Safety`).
            if let Some(received) = unsafe { take_next(udp, &taken, message, flags) } {
                return received;
            }
        }
        if !blocks(fd, flags) {
            return thread::fail(libc::EAGAIN);
        }
        if has_slept && wait::reports_now(fd, libc::POLLRDHUP) {
            // Another thread has shut the socket down: it stays readable, and the kernel's call returns 0 instead of
            // waiting.
            drop((taken, section));
            // SAFETY: the program's own arguments (`# Safety`).
            return unsafe { leaving::asleep(|| call.receive(fd, message, flags)) };
        }
        match wait::for_either(section, [fd, taken.bell()], deadline) {
            Some((again, slept)) => {
                (section, has_slept) = (again, true);
                if let Err(errno) = slept {
                    return thread::fail(errno);
                }
            }
            None => {
                if sections::is_withdrawn() {
                    // Not dropped: that could close descriptors, and after a withdrawal the library makes no system
                    // calls.
                    std::mem::forget(taken);
                }
                // SAFETY: the program's own arguments (`# Safety`).
                return unsafe { leaving::asleep(|| call.receive(fd, message, flags)) };
            }
        }
    }
}

/// Takes the next datagram from the ring. None if there is none.
///
/// # Safety
/// As recvmsg(2).
unsafe fn take_next(udp: &Udp, taken: &Taken, message: &mut msghdr, flags: c_int) -> Option<ssize_t> {
    let mut result = None;
    let only_look = flags & libc::MSG_PEEK != 0;
    taken.datagrams.receive(&taken.session.shared, thread::token(), only_look, |from, length, copy| {
        let mut skip = 0;
        for at in 0..message.msg_iovlen {
            // SAFETY: the program's message has that many vectors (`# Safety`).
            let vector = unsafe { &*message.msg_iov.add(at) };
            let room = vector.iov_len.min((length - skip) as usize);
            if room > 0 {
                // SAFETY: the vector names `iov_len` bytes of the program's (`# Safety`).
                copy(skip, unsafe { std::slice::from_raw_parts_mut(vector.iov_base.cast::<u8>(), room) });
            }
            skip += room as u32;
        }
        message.msg_flags = if skip < length { libc::MSG_TRUNC } else { 0 };
        message.msg_controllen = 0;
        if !message.msg_name.is_null() {
            // SAFETY: `msg_name` has `msg_namelen` bytes (`# Safety`).
            message.msg_namelen =
                unsafe { write_address(from, udp.v6.load(Ordering::Acquire), message.msg_name, message.msg_namelen) };
        }
        result = Some(if flags & libc::MSG_TRUNC != 0 { length } else { skip } as ssize_t);
    });
    result
}

/// Writes an address as a socket of this family shows it, as much as there is room for. Returns its length.
///
/// # Safety
/// `to` must point to `room` bytes.
unsafe fn write_address(address: SocketAddr, v6: bool, to: *mut c_void, room: socklen_t) -> socklen_t {
    // SAFETY: sockaddr_storage is plain data, for which zero is a value.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let length = if v6 {
        let ip = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        // SAFETY: the storage has room and alignment for every address.
        let out = unsafe { &mut *(&raw mut storage).cast::<libc::sockaddr_in6>() };
        out.sin6_family = libc::AF_INET6 as _;
        out.sin6_port = address.port().to_be();
        out.sin6_addr.s6_addr = ip.octets();
        size_of::<libc::sockaddr_in6>()
    } else {
        // SAFETY: the storage has room and alignment for every address.
        let out = unsafe { &mut *(&raw mut storage).cast::<libc::sockaddr_in>() };
        out.sin_family = libc::AF_INET as _;
        out.sin_port = address.port().to_be();
        if let IpAddr::V4(v4) = address.ip().to_canonical() {
            out.sin_addr.s_addr = u32::from(v4).to_be();
        }
        size_of::<libc::sockaddr_in>()
    };
    // SAFETY: `room` bytes at `to` (`# Safety`), of which at most the address's length is written.
    unsafe { std::ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast::<u8>(), length.min(room as usize)) };
    length as socklen_t
}

/// sendmsg(2) of a UDP socket.
///
/// # Safety
/// As sendmsg(2).
pub(crate) unsafe fn send_message(call: Call, udp: &Udp, fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
    let _whole = Whole::begin_cancelable();
    // SAFETY: the program's own arguments (`# Safety`).
    let by_nic = Section::enter().and_then(|_section| unsafe { send_by_nic(udp, fd, message, flags) });
    // SAFETY: the message is that of the program's sendmsg(2) (`# Safety`).
    by_nic.unwrap_or_else(|| unsafe { leaving::asleep(|| call.send(fd, message, flags)) })
}

/// Sends a datagram by the NIC. None if the kernel has to do it.
///
/// # Safety
/// As sendmsg(2).
unsafe fn send_by_nic(udp: &Udp, fd: c_int, message: &msghdr, flags: c_int) -> Option<ssize_t> {
    if flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) != 0 || message.msg_controllen != 0 || message.msg_iovlen > 1024 {
        return None;
    }
    let taken = udp.taken(fd).filter(|taken| taken.datagrams.is_on_nic())?;
    let peer = *locked(&udp.peer);
    if peer.is_some() && error_waits(udp, fd) {
        return None;
    }
    let to = if message.msg_name.is_null() {
        peer?
    } else {
        connecting::parse(message.msg_name.cast::<sockaddr>(), message.msg_namelen)?
    };
    let vectors: &[iovec] = match message.msg_iovlen {
        0 => &[],
        // SAFETY: the program's message has that many vectors (`# Safety`).
        count => unsafe { std::slice::from_raw_parts(message.msg_iov, count) },
    };
    let length: usize = vectors.iter().map(|vector| vector.iov_len).sum();
    let errno = thread::errno();
    let (datagrams, shared) = (&taken.datagrams, &taken.session.shared);
    // The kernel refuses an address of the other family.
    if udp.v6.load(Ordering::Acquire) == to.is_ipv4() || !datagrams.reaches(shared, to.ip(), length) {
        thread::set_errno(errno);
        return None;
    }
    let full = vectors.iter().filter(|vector| vector.iov_len > 0);
    // SAFETY: each vector names `iov_len` bytes of the program's (`# Safety`).
    let pieces = full.map(|vector| unsafe { std::slice::from_raw_parts(vector.iov_base.cast::<u8>(), vector.iov_len) });
    let canonical = SocketAddr::new(to.ip().to_canonical(), to.port());
    let (mut since, mut round) = (None, 0);
    while !datagrams.send(shared, thread::token(), canonical, pieces.clone()) {
        let waited = wait::now() - *since.get_or_insert_with(wait::now);
        if !datagrams.is_on_nic() {
            return None;
        }
        if waited > ROOM && !blocks(fd, flags) {
            return Some(thread::fail(libc::EAGAIN));
        }
        give_way(round);
        round += 1;
    }
    thread::set_errno(errno);
    Some(length as ssize_t)
}

/// Whether the kernel has received an error for the socket, which the next call reports.
fn error_waits(udp: &Udp, fd: c_int) -> bool {
    let now = wait::now();
    if now.saturating_sub(udp.error_checked.load(Ordering::Relaxed)) < ERROR_CHECK {
        return false;
    }
    udp.error_checked.store(now, Ordering::Relaxed);
    let errno = thread::errno();
    let waits = wait::reports_now(fd, libc::POLLERR);
    thread::set_errno(errno);
    waits
}

/// Bytes of the next datagram in the ring (FIONREAD). None if the kernel is to be asked.
pub(crate) fn next_length(fd: c_int) -> Option<c_int> {
    let udp = of(fd)?;
    let _section = Section::enter()?;
    let taken = udp.taken(fd)?;
    taken.datagrams.next_length().map(|length| length as c_int)
}

/// The doorbells of those of the program's descriptors that are UDP sockets on the NIC, each with the socket's index.
pub(crate) fn bells(fds: &[pollfd]) -> impl Iterator<Item = (usize, c_int)> {
    let wanted = fds.iter().enumerate().filter(|(_, entry)| entry.events & (libc::POLLIN | libc::POLLRDNORM) != 0);
    wanted.filter_map(|(at, entry)| {
        let udp = of(entry.fd)?;
        udp.error_checked.store(0, Ordering::Relaxed);
        Some((at, udp.taken(entry.fd)?.bell()))
    })
}

fn watch_bell(set: c_int, operation: c_int, bell: c_int, event: epoll_event) {
    // Not EPOLLOUT: this end of a doorbell is always writable.
    let mut event = epoll_event { events: event.events & !(libc::EPOLLOUT as u32), ..event };
    let errno = thread::errno();
    // SAFETY: one live event.
    unsafe {
        if real::epoll_ctl(set, operation, bell, &mut event) < 0 && operation == libc::EPOLL_CTL_MOD {
            real::epoll_ctl(set, libc::EPOLL_CTL_ADD, bell, &mut event);
        }
    }
    thread::set_errno(errno);
}

/// Makes an epoll set watch a socket's doorbell as it watches the socket.
///
/// # Safety
/// As epoll_ctl(2).
pub(crate) unsafe fn watch(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) {
    let Some(udp) = of(fd).filter(|_| !table::is_wiped()) else { return };
    let taken = udp.taken(fd);
    let mut sets = locked(&udp.sets);
    sets.retain(|(other, _)| *other != set);
    // SAFETY: the kernel has just accepted the event (`# Safety`).
    let event = if operation == libc::EPOLL_CTL_DEL || event.is_null() { None } else { Some(unsafe { *event }) };
    if let Some(event) = event {
        sets.push((set, event));
    }
    if let Some(taken) = taken {
        watch_bell(set, operation, taken.bell(), event.unwrap_or(epoll_event { events: 0, u64: 0 }));
    }
}
