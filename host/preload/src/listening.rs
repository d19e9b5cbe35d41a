//! Listening sockets whose connections the NIC makes (`--offload full`).
//!
//! The listening socket stays the kernel's, and the kernel may have connections for it, too. What the NIC makes is
//! counted by a second socket, the *queue*: it is readable as long as a connection waits. Sets and polls watch it
//! beside the listener, as which it counts, and accept(2) looks there first. The agent is asked for the queue
//! when the process first waits for the listener: a process that only passes it on to others never gets one, and the
//! NIC makes no connections for it. Where the agent refuses or does not answer, and when the session has ended, it is
//! asked again when the process waits or accepts ([`Again`]): the kernel makes the connections meanwhile, so that a
//! process which waits in a set accepts one of those.

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
    /// It was asked: the process waits for the listener.
    begun: AtomicBool,
    again: Again,
}

impl Asking {
    /// Forgets what was asked for another socket.
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
                // Another thread has left it to the kernel meanwhile.
                close(tcp);
            }
        }
        None => tcp.asking.again.pause(),
    }
    thread::set_errno(errno);
    tcp.queue()
}

/// Begins to use a listener's queue: the sets that watch the listener watch it, too.
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
        // The session was left before the listener had its queue.
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
            // It has listened anew, after the agent had found that it did not any more.
            Ok((listener, fd)) if listener != queue.listener => begin(tcp, queue.session, listener, fd),
            // A listener that the NIC cannot serve any more is the kernel's; its queue stays empty.
            _ => {}
        }
        thread::set_errno(errno);
    }
}

fn drop_queue(tcp: &Tcp, queue: &'static Queue) {
    // The agent and other processes may have the same socket, so that its end here does not take it out of the sets.
    tcp.stop_watching_beside(queue.fd);
    OURS.lock().retain(|fd| *fd != queue.fd);
    // SAFETY: the queue's descriptor is this library's own, and nobody uses it any more.
    unsafe { real::close(queue.fd) };
}

/// Drops a queue by which nothing comes any more, unless another thread has.
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

/// Leaves a socket's connections to the kernel for good: what waits for them is not this process's alone, or does not
/// go through this library, so that nobody would have it watch a queue. Also of one that does not listen yet.
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

/// Drops all queues, since their session has ended. The next one is asked for them.
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

/// Whether a byte was read from a queue, so that a connection waits. An end means that the agent has no such listener
/// any more: the queue is dropped.
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

/// Whether this process may have another descriptor, with which a connection comes: the kernel, too, takes none from
/// its queue otherwise.
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
    // In a process that is closed for good, too: the NIC has made it, and it goes to the kernel then. A byte may stand
    // for no connection. The next one is read then: beside one that is left the agent writes none for the next
    // connection, and who waits for an edge would get none.
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
        // One that does not block is waited for elsewhere: the queue is asked for there first.
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
        // One that listens no more (shutdown) has hung up, and the kernel refuses the call.
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

/// Completes accept4(2) for a connection that the NIC has made: the descriptor's flags, and the peer's address, which
/// the socket does not have for a moment while the connection moves.
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
        // The queue would be watched there for other processes, too, and the next one, of the next session, not at all.
        // Where the parent's queue is watched, this process is woken for what only its own can give it.
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
        // What is watched beside a listener changes, and goes, with the listener.
        set.with_interest(|interest, kernel| {
            if let Some(slot) = interest.find(fd, File::Tcp(tcp)) {
                interest.watch_beside(kernel, slot, File::Tcp(tcp), queue.fd);
            }
        });
        if tcp.queue().is_none_or(|now| !std::ptr::eq(now, queue)) {
            // Another thread has dropped it meanwhile: the listener's next queue is to have its place.
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
