//! Listening sockets whose connections the NIC makes (`--offload full`).
//!
//! The listening socket stays the kernel's, and the kernel may have connections for it, too. A second socket, the
//! *queue*, is readable as long as a connection that the NIC has made waits to be accepted. Sets and polls watch the
//! queue beside the listener and report it as the listener, and accept(2) looks there first. The agent is asked for the
//! queue
//! when the process first waits for the listener: a process that only passes the listener on to others never gets a
//! queue, and the NIC makes no connections for it. If the agent refuses or does not answer, or the session has ended,
//! it is asked again when the process next waits or accepts ([`Again`]). Meanwhile the kernel makes the connections, so
//! a process that waits in a set sooner or later accepts one and asks again.

use crate::again::Again;
use crate::epoll::{File, Set};
use crate::process::{self, Session};
use crate::sections::Section;
use crate::short_lock::{Held, ShortLock};
use crate::tcp::{self, Tcp};
use crate::{forks, real, table, thread, wait};
use libc::{c_int, epoll_event, pollfd, sockaddr, socklen_t};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The queue of a listener. Never freed.
pub(crate) struct Queue {
    fd: c_int,
    listener: u32,
    session: &'static Session,
}

/// How the agent is asked for a listener's queue.
#[derive(Default)]
pub(crate) struct Asking {
    /// The agent was asked, since the process waits for the listener.
    begun: AtomicBool,
    again: Again,
}

impl Asking {
    /// Starts again for another socket.
    pub fn forget(&self) {
        self.begun.store(false, Ordering::Release);
        self.again.reset();
    }
}

/// A connection that was accepted.
pub(crate) enum Accepted {
    /// The kernel's: a descriptor, or -1 with errno.
    Kernel(c_int),
    /// One that the NIC has made: its descriptor and its socket, which is in this session; and the section in which it
    /// was taken.
    Nic(c_int, &'static Tcp, &'static Session, Section),
}

/// Descriptors of queues.
static OURS: ShortLock<Vec<c_int>> = ShortLock::new(Vec::new());

/// Whether a descriptor is a queue's.
pub(crate) fn is_ours(fd: c_int) -> bool {
    OURS.try_lock().is_some_and(|ours| ours.contains(&fd))
}

/// The lowest of them from `first` on.
pub(crate) fn next_of_ours(first: c_int) -> Option<c_int> {
    OURS.try_lock()?.iter().copied().filter(|fd| *fd >= first).min()
}

/// The queue of a listener that the process is about to wait for; asks the agent for it if that is due.
fn queue_of(tcp: &'static Tcp, fd: c_int) -> Option<&'static Queue> {
    if !process::plan().is_some_and(process::Plan::is_full) {
        return None;
    }
    match tcp.queue() {
        None if tcp.asking.again.is_due() => ask(tcp, fd),
        known => known,
    }
}

#[cold]
fn ask(tcp: &'static Tcp, fd: c_int) -> Option<&'static Queue> {
    let errno = thread::errno();
    tcp.asking.begun.store(true, Ordering::Release);
    let session = process::open_session();
    // SAFETY: the program's descriptor, open during its own call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let listened = session.and_then(|session| Some((session, session.shared.listen(borrowed).ok()?)));
    match listened {
        Some((session, (listener, queue))) => {
            begin(tcp, session, listener, queue);
            if !tcp.asking.again.succeed() {
                // Another thread has given the listener to the kernel for good meanwhile.
                close(tcp);
            }
        }
        None => tcp.asking.again.pause(),
    }
    thread::set_errno(errno);
    tcp.queue()
}

/// Begins to use a listener's queue, and adds it to the sets that watch the listener.
fn begin(tcp: &'static Tcp, session: &'static Session, listener: u32, queue: OwnedFd) {
    let fd = process::lift(queue.into_raw_fd());
    OURS.lock().push(fd);
    if let Some(last) = tcp.set_queue(Some(Box::leak(Box::new(Queue { fd, listener, session })))) {
        // Another thread has asked at the same time.
        drop_queue(tcp, last);
    }
    tcp.watch_beside(fd);
    if session.shared.has_ended()
        && let Some(queue) = tcp.set_queue(None)
    {
        // The session was left before the listener had its queue, so leaving it has not dropped this queue.
        drop_queue(tcp, queue);
    }
}

/// Reports changed options of a listener, which its connections inherit, to the agent.
pub(crate) fn refresh(tcp: &'static Tcp, fd: c_int) {
    if let Some(queue) = tcp.queue()
        && let Some(_section) = Section::enter()
    {
        let errno = thread::errno();
        // SAFETY: the program's descriptor, open during its own call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        match queue.session.shared.listen(borrowed) {
            // The socket listens again, after the agent had found that it no longer listened: it has another queue.
            Ok((listener, fd)) if listener != queue.listener => begin(tcp, queue.session, listener, fd),
            // A listener that the NIC cannot serve any more is the kernel's; its queue stays empty.
            _ => {}
        }
        thread::set_errno(errno);
    }
}

fn drop_queue(tcp: &Tcp, queue: &'static Queue) {
    // The agent and other processes may have the queue open, so that closing it here would not remove it from the epoll
    // sets.
    tcp.stop_watching_beside(queue.fd);
    OURS.lock().retain(|fd| *fd != queue.fd);
    // SAFETY: the queue's descriptor is this library's own, and nobody uses it any more.
    unsafe { real::close(queue.fd) };
}

/// Drops a queue that has ended, unless another thread has done so.
fn drop_ended(tcp: &Tcp, queue: &'static Queue) {
    if tcp.forget_queue(queue) {
        tcp.asking.again.pause();
        drop_queue(tcp, queue);
    }
}

/// Drops a listener's queue if it has hung up: the agent has ended, or has no such listener any more.
pub(crate) fn leave_ended(tcp: &Tcp) {
    if let Some(queue) = tcp.queue().filter(|queue| wait::reports_now(queue.fd, libc::POLLHUP)) {
        drop_ended(tcp, queue);
    }
}

/// Handles the closing of a listener's last descriptor.
pub(crate) fn close(tcp: &Tcp) {
    if let Some(queue) = tcp.set_queue(None) {
        let errno = thread::errno();
        drop_queue(tcp, queue);
        let _ = queue.session.shared.stop_listening(queue.listener);
        thread::set_errno(errno);
    }
}

/// Leaves a listener's connections to the kernel for good, since this library cannot add a queue where they are waited
/// for: in an epoll set of several processes, or in a call past this library. Also for a socket that does not listen
/// yet.
pub(crate) fn leave_for_good(tcp: &Tcp) {
    tcp.asking.again.give_up();
    close(tcp);
}

fn listeners() -> impl Iterator<Item = &'static Tcp> {
    table::known(0, u32::MAX).filter_map(|(_, file)| match file {
        table::File::Tcp(tcp) if tcp.queue().is_some() => Some(tcp),
        _ => None,
    })
}

/// Drops all queues, since their session has ended. The agent is asked for new ones in the next session.
pub(crate) fn leave() {
    for tcp in listeners() {
        if let Some(queue) = tcp.set_queue(None) {
            drop_queue(tcp, queue);
        }
    }
}

/// Takes the lock of the queues, for a fork.
pub(crate) fn hold() -> Vec<Held> {
    vec![OURS.hold()]
}

/// Drops the parent's queues in a child of fork: the child has a session of its own.
pub(crate) fn forget_inherited() {
    wait::close_all(&OURS);
}

/// Reads one byte from a queue: each stands for a waiting connection. False if there is none. At the end of the stream
/// the agent has no such listener any more, and the queue is dropped.
fn take_byte(tcp: &Tcp, queue: &'static Queue) -> bool {
    let mut byte = 0u8;
    let errno = thread::errno();
    // SAFETY: the buffer is one live byte.
    let got = unsafe { real::recv(queue.fd, (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
    if got == 0 {
        drop_ended(tcp, queue);
    }
    thread::set_errno(errno);
    got == 1
}

/// Whether this process may open one more descriptor, which an accepted connection needs. Without one the kernel takes
/// no connection from its queue either.
fn has_descriptor_left(queue: &Queue) -> bool {
    let errno = thread::errno();
    // SAFETY: F_DUPFD_CLOEXEC takes a number.
    let copy = unsafe { real::fcntl(queue.fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy >= 0 {
        // SAFETY: the descriptor was made above, and nobody else knows it.
        unsafe { real::close(copy) };
    }
    thread::set_errno(errno);
    copy >= 0
}

fn take(listener: &Tcp, queue: &'static Queue) -> Option<(c_int, &'static Tcp)> {
    let is_its = || listener.queue().is_some_and(|now| std::ptr::eq(now, queue));
    // Also in a process that is closed for good: the connection exists on the NIC, and is then restored. If a byte
    // stands for no connection, the next byte is read at once: as long as a byte is left in the queue the agent writes
    // no further one, and a program that waits for an edge would get none.
    while !forks::are_under_way() && is_its() && take_byte(listener, queue) {
        let errno = thread::errno();
        let mut made = None;
        let accepted = queue.session.shared.accept(queue.listener, thread::token(), |fd| {
            let fd = fd.into_raw_fd();
            let tcp = tcp::new(fd);
            made = Some((fd, tcp));
            tcp.connection_of(queue.session)
        });
        thread::set_errno(errno);
        match accepted {
            Ok(None) => {}
            Ok(Some(())) => return made,
            Err(_) => return None,
        }
    }
    None
}

/// accept(2) from a listener: a connection that the NIC has made, or what `native` gets from the kernel. None if the
/// NIC makes none for this process.
pub(crate) fn accept(tcp: &'static Tcp, fd: c_int, native: impl Fn() -> c_int) -> Option<Accepted> {
    if !process::plan().is_some_and(process::Plan::is_full) {
        return None;
    }
    let mut section = Section::enter()?;
    // SAFETY: F_GETFL takes no pointer.
    let blocks = unsafe { real::fcntl(fd, libc::F_GETFL, 0) } & libc::O_NONBLOCK == 0;
    let mut deadline = None;
    loop {
        // A non-blocking listener is waited for in poll or epoll, which ask for the queue first.
        let asks = blocks || tcp.asking.begun.load(Ordering::Acquire);
        let Some(queue) = (if asks { queue_of(tcp, fd) } else { tcp.queue() }) else {
            drop(section);
            return Some(Accepted::Kernel(native()));
        };
        let deadline = *deadline.get_or_insert_with(|| wait::deadline(fd, libc::SO_RCVTIMEO));
        if !has_descriptor_left(queue) {
            drop(section);
            return Some(Accepted::Kernel(native()));
        }
        if let Some((fd, tcp)) = take(tcp, queue) {
            return Some(Accepted::Nic(fd, tcp, queue.session, section));
        }
        // A socket that no longer listens (shutdown) reports POLLHUP, and the kernel refuses the call.
        if !blocks || wait::reports_now(fd, libc::POLLIN | libc::POLLHUP) {
            drop(section);
            return Some(Accepted::Kernel(native()));
        }
        if tcp.queue().is_none_or(|now| !std::ptr::eq(now, queue)) {
            continue;
        }
        match wait::for_either(section, [fd, queue.fd], deadline) {
            Some((again, Ok(hung_up))) => {
                section = again;
                if hung_up {
                    queue.session.leave_if_over();
                }
            }
            Some((_, Err(errno))) => return Some(Accepted::Kernel(thread::fail(errno) as c_int)),
            None => return Some(Accepted::Kernel(native())),
        }
    }
}

/// Completes accept4(2) for a connection that the NIC has made: sets the descriptor's flags and returns the peer's
/// address. While a connection moves its socket has no peer for a moment, so the address is read when no move is under
/// way.
///
/// # Safety
/// As accept4(2).
pub(crate) unsafe fn finish(tcp: &Tcp, fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) {
    let errno = thread::errno();
    // SAFETY: neither command takes a pointer; the last call has the program's own arguments (`# Safety`).
    unsafe {
        if flags & libc::SOCK_CLOEXEC == 0 {
            real::fcntl(fd, libc::F_SETFD, 0);
        }
        if flags & libc::SOCK_NONBLOCK != 0 {
            let now = real::fcntl(fd, libc::F_GETFL, 0);
            real::fcntl(fd, libc::F_SETFL, (now | libc::O_NONBLOCK) as libc::c_ulong);
        }
        if !address.is_null() {
            tcp.undisturbed(|_| real::getpeername(fd, address, length));
        }
    }
    thread::set_errno(errno);
}

/// The queues of those of the program's descriptors that are listeners, each with the listener's index.
pub(crate) fn queues(fds: &[pollfd]) -> Vec<(usize, c_int)> {
    let wanted = |entry: &&pollfd| entry.events & (libc::POLLIN | libc::POLLRDNORM) != 0;
    let listeners = fds.iter().enumerate().filter(|(_, entry)| wanted(entry));
    let queue = |(at, entry): (usize, &pollfd)| {
        let tcp = table::tcp(entry.fd).filter(|tcp| tcp.listens())?;
        Some((at, queue_of(tcp, entry.fd)?.fd))
    };
    listeners.filter_map(queue).collect()
}

/// Makes an epoll set watch a listener's queue as it watches the listener. In a set that other processes have, too, the
/// listener is the kernel's, unless the parent's queue is watched there.
///
/// # Safety
/// As epoll_ctl(2).
pub(crate) unsafe fn watch(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) {
    let Some(tcp) = table::tcp(fd) else { return };
    let is_of_several = |set: &Set| set.is_inherited() && !set.has_beside(fd);
    if process::is_mine() && table::set_of(set).is_some_and(is_of_several) {
        // In a set of several processes a queue would wake the other processes, too, and the queue of the next session
        // could not be added. If the parent's queue is watched in the set, this process is woken by it as well, and
        // looks into its own queue.
        if operation != libc::EPOLL_CTL_DEL {
            leave_for_good(tcp);
        }
        return;
    }
    if !tcp.listens() {
        return;
    }
    let queue = if operation == libc::EPOLL_CTL_DEL { tcp.queue() } else { queue_of(tcp, fd) };
    let Some(queue) = queue else { return };
    let errno = thread::errno();
    if let Some(set) = table::set_of(set).filter(|set| !set.is_inherited() && process::is_mine()) {
        // The registration beside the listener is modified and removed together with the listener's.
        set.with_interest(|interest, kernel| {
            if let Some(slot) = interest.find(fd, File::Tcp(tcp)) {
                interest.watch_beside(kernel, slot, File::Tcp(tcp), queue.fd);
            }
        });
        if tcp.queue().is_none_or(|now| !std::ptr::eq(now, queue)) {
            // Another thread has dropped this queue meanwhile: watch the listener's next queue instead.
            set.stop_watching_beside(queue.fd);
            if let Some(next) = tcp.queue() {
                tcp.watch_beside(next.fd);
            }
        }
        return thread::set_errno(errno);
    }
    // SAFETY: this function's `# Safety` is epoll_ctl(2)'s.
    unsafe {
        let done = real::epoll_ctl(set, operation, queue.fd, event);
        if done < 0 && operation == libc::EPOLL_CTL_MOD {
            // The listener was added before it had a queue.
            real::epoll_ctl(set, libc::EPOLL_CTL_ADD, queue.fd, event);
        }
    }
    thread::set_errno(errno);
}
