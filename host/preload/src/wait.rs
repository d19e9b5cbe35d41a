//! Waiting for the kernel and the NIC at once.
//!
//! A thread that waits for a socket has an eventfd, perhaps together with others (a [`Waiter`]), which is written when
//! something happens to the socket. The thread that is woken by the session's doorbell first reads the NIC's events and
//! passes them on to the other waiters.

use crate::few::Few;
use crate::process::Session;
use crate::sections::Section;
use crate::short_lock::ShortLock;
use crate::signals::Mark;
use crate::tcp::Tcp;
use crate::waiter::{self, Waiter, Waiters};
use crate::wake::WITHOUT_DESCRIPTOR;
use crate::{leaving, lookout, process, real, sections, table, thread, udp};
use baton_abi::layout::Owner;
use libc::{c_int, pollfd};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{Ordering, fence};

/// As [`WITHOUT_DESCRIPTOR`], for a thread that waits for more bytes than the kernel has and leaves those unread.
const FOR_MORE: u64 = 10_000;

/// Closes descriptors that a child of fork has inherited of this library's.
pub(crate) fn close_all(ours: &ShortLock<Vec<c_int>>) {
    // The list may still be locked, if a signal handler has interrupted the lock's holder and forked.
    let Some(mut ours) = ours.try_lock() else { return };
    for fd in std::mem::take(&mut *ours) {
        // SAFETY: this copy of the descriptor is the child's own.
        unsafe { real::close(fd) };
    }
}

/// A new eventfd, numbered out of the program's way.
pub(crate) fn eventfd() -> c_int {
    // SAFETY: no pointers are involved.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 { fd } else { process::lift(fd) }
}

/// Whether poll(2) reports this event for a socket now. It consumes neither data nor a pending error.
pub(crate) fn reports_now(fd: c_int, event: i16) -> bool {
    let mut poll = pollfd { fd, events: event, revents: 0 };
    // SAFETY: one live pollfd.
    unsafe { real::poll(&mut poll, 1, 0) == 1 && poll.revents & event != 0 }
}

/// Microseconds of the monotonic clock.
pub(crate) fn now() -> u64 {
    baton_linux::events::monotonic_micros()
}

/// The time `limit` microseconds from now, on the same clock. A limit beyond the clock's range gives a time that never
/// comes.
pub(crate) fn after(limit: u64) -> u64 {
    now().saturating_add(limit)
}

/// When a blocking call times out (SO_RCVTIMEO, SO_SNDTIMEO): microseconds of the monotonic clock.
pub(crate) fn deadline(fd: c_int, option: c_int) -> Option<u64> {
    let mut limit = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut length = size_of::<libc::timeval>() as libc::socklen_t;
    // SAFETY: `limit` and `length` are live and have room for one timeval.
    unsafe { real::getsockopt(fd, libc::SOL_SOCKET, option, (&raw mut limit).cast(), &mut length) };
    let micros = (limit.tv_sec as u64).saturating_mul(1_000_000).saturating_add(limit.tv_usec as u64);
    (micros > 0 || is_negative(fd, option)).then(|| after(micros))
}

/// Whether such a limit of a socket is negative, so that no call waits.
fn is_negative(fd: c_int, option: c_int) -> bool {
    let tcp = table::tcp(fd).map(|tcp| &tcp.negative);
    tcp.or_else(|| udp::of(fd).map(udp::Udp::negative)).is_some_and(|negative| negative.has(option))
}

/// A sleeping thread, counted in the session's memory if there is a session. A signal handler that interrupts it may
/// fork. In the child, in which the same call returns, session and count are the parent's and are left alone.
/// [`Sleeper::end`] must follow.
#[must_use]
pub(crate) struct Sleeper {
    session: Option<&'static Session>,
    owner: u32,
}

impl Sleeper {
    /// Counts the calling thread, which is about to sleep.
    pub fn begin(session: Option<&'static Session>) -> Sleeper {
        session.inspect(|session| session.shared.count_sleeper());
        Sleeper { session, owner: process::owner() }
    }

    /// Uncounts the thread. Returns the session, but not in a child that a signal handler has forked meanwhile.
    pub fn end(self) -> Option<&'static Session> {
        let session = self.session.filter(|_| process::is_still(self.owner));
        session.inspect(|session| session.shared.uncount_sleeper())
    }
}

/// What a thread waits for besides descriptors in the kernel: sockets that may be on the NIC, and epoll sets.
#[derive(Clone, Copy)]
pub(crate) struct Watched<'a> {
    pub sockets: &'a [&'a Tcp],
    pub sets: &'a [&'a Waiters],
}

/// Waits until the kernel has an event for `fds`, or a socket or set of `watched` has one. `ready` is checked once more
/// before sleeping. Results are in `fds` as by ppoll(2); errno if that fails. Without a session no connection is on the
/// NIC yet: a thread that hands one of these sockets over wakes this one. The number beside `fds` is the number of
/// entries in the program's own call.
pub(crate) fn sleep(
    session: Option<&'static Session>,
    watched: Watched<'_>,
    (fds, given): (&mut Few<pollfd>, usize),
    deadline: Option<u64>,
    mask: *const libc::sigset_t,
    ready: impl Fn() -> bool,
) -> Result<c_int, c_int> {
    // A thread that has noticed the session's end may not have been able to leave the session.
    session.inspect(|session| session.leave_if_known_over());
    let session = session.filter(|session| !session.shared.has_ended());
    let waiter = Waiter::take();
    let sleeper = Sleeper::begin(session);
    if let Some(session) = session {
        // Before the sockets have this waiter: otherwise its eventfd would be written for events that `ready` sees
        // anyway.
        session.shared.catch_up(thread::token());
    }
    watched.sockets.iter().for_each(|socket| socket.add_waiter(&waiter));
    watched.sets.iter().for_each(|set| set.add(&waiter));
    let programs = fds.len();
    fds.push(pollfd { fd: waiter.eventfd, events: libc::POLLIN, revents: 0 });
    // A thread without an eventfd polls the doorbell, but is not counted as a watcher: it could not be woken to become
    // one.
    let watches = session.filter(|_| waiter.eventfd >= 0).map(|_| lookout::begin(&waiter.unwatching));
    if let Some(session) = session {
        let bell = if watches == Some(false) { -1 } else { session.shared.bell().as_fd().as_raw_fd() };
        fds.push(pollfd { fd: bell, events: libc::POLLIN, revents: 0 });
        fds.push(pollfd { fd: session.shared.hangs_up().as_raw_fd(), events: 0, revents: 0 });
    }
    // Pairs with a thread that makes `ready` true and then looks for waiters.
    fence(Ordering::SeqCst);
    let result = if ready() {
        Ok(0)
    } else {
        let look = match waiter.eventfd {
            ..0 => Some(WITHOUT_DESCRIPTOR),
            _ => (watches == Some(false)).then_some(lookout::LOOK),
        };
        let look = look.map(|look| now() + look);
        let limit = deadline.into_iter().chain(look).min().map(|deadline| {
            let left = deadline.saturating_sub(now());
            libc::timespec { tv_sec: (left / 1_000_000) as i64, tv_nsec: (left % 1_000_000 * 1000) as i64 }
        });
        let got = leaving::asleep_again(|| ask_kernel(fds, given, limit.as_ref(), mask));
        if got < 0 { Err(thread::errno()) } else { Ok(got) }
    };
    // Not in a child of fork: no thread wakes this waiter there, and the locks may be held by a thread that exists only
    // in the parent.
    if !waiter.is_inherited() {
        watched.sockets.iter().for_each(|socket| socket.remove_waiter(&waiter));
        watched.sets.iter().for_each(|set| set.remove(&waiter));
    }
    // Nor is there another sleeping thread in a child of fork.
    if let Some(watches) = watches.filter(|_| !waiter.is_inherited())
        && lookout::end(&waiter.unwatching, watches)
    {
        waiter::wake_one_that_does_not_watch();
    }
    if result.is_ok() && fds[programs].revents != 0 {
        waiter.note_written();
    }
    waiter.give();
    if let Some(session) = sleeper.end() {
        if result.is_ok() && fds[programs + 1].revents != 0 {
            session.shared.clear_bell();
            session.shared.catch_up(thread::token());
        }
        if result.is_ok() && fds[programs + 2].revents != 0 {
            session.leave_if_over();
        }
    }
    fds.truncate(programs);
    result
}

/// ppoll(2) for these entries; the program's own call has `given` entries. The kernel refuses more entries than
/// RLIMIT_NOFILE. If the entries that this library has added exceed that, the kernel is asked once per descriptor, and
/// not for negative ones.
pub(crate) fn ask_kernel(fds: &mut [pollfd], given: usize, limit: Option<&libc::timespec>, mask: *const libc::sigset_t) -> c_int {
    let limit = limit.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a live slice of that length; `mask` is the program's own, or null.
    let ask = |fds: &mut [pollfd]| unsafe { real::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit, mask) };
    let got = ask(fds);
    if got >= 0 || thread::errno() != libc::EINVAL || given == fds.len() || given as u64 > process::most_descriptors() {
        return got;
    }
    let mut once: Vec<pollfd> = fds.iter().filter(|entry| entry.fd >= 0).copied().collect();
    once.sort_by_key(|entry| entry.fd);
    once.dedup_by(|other, kept| {
        let same = other.fd == kept.fd;
        kept.events |= if same { other.events } else { 0 };
        same
    });
    let got = ask(&mut once);
    if got < 0 {
        return got;
    }
    const ALWAYS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
    for entry in &mut *fds {
        let answer = once.binary_search_by_key(&entry.fd, |answer| answer.fd).map_or(0, |at| once[at].revents);
        entry.revents = answer & (entry.events | ALWAYS);
    }
    fds.iter().filter(|entry| entry.revents != 0).count() as c_int
}

/// What a call waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// This many bytes to receive, or as many as the NIC may have for the program, or the end of the stream.
    Receive(u32),
    /// As `Receive`, if fewer bytes are there already and stay unread (MSG_PEEK). poll(2) would return at once for
    /// those, so the kernel is asked from time to time.
    More(u32),
    /// Room to send.
    Send,
}

/// Whether a call's wait is over, for a connection on the NIC.
fn satisfied(tcp: &Tcp, want: Want) -> bool {
    let Some((connection, session)) = tcp.managed() else { return true };
    if connection.owner() != Owner::Nic {
        return false;
    }
    let state = session.shared.readiness(connection, thread::token());
    match want {
        // More than a part of the receive memory might never be there: the window stops short of it.
        Want::Receive(count) => state.unread >= count.min(state.receive_memory / 4).max(1) || state.fin || state.ended.is_some(),
        Want::More(count) => state.unread >= count || state.fin || state.ended.is_some(),
        Want::Send => {
            let has_room = state.is_writable() && session.shared.takes(connection, thread::token());
            has_room || state.shut || state.ended.is_some()
        }
    }
}

/// Counts a send that has found no room. Returns whether that was for want of the NIC's answer to the last one, which
/// has come now: programs expect that a socket with room takes more, also one that does not block.
pub(crate) fn answers_soon(tcp: &Tcp) -> bool {
    // Counted first: an answer that another thread has read before was no edge.
    tcp.stuck.fetch_add(1, Ordering::AcqRel);
    tcp.managed().is_some_and(|(connection, session)| session.shared.await_answer(connection, thread::token()))
}

/// Whether the connection is on the NIC, where so many bytes may never be unread at once.
pub(crate) fn never_has(tcp: &Tcp, bytes: usize) -> bool {
    tcp.managed().is_some_and(|(connection, session)| {
        let memory = || session.shared.readiness(connection, thread::token()).receive_memory as usize;
        connection.owner() == Owner::Nic && bytes > memory() / 4
    })
}

/// Whether a receive would not have to wait: there are bytes, the end, or an error.
pub(crate) fn is_readable(tcp: &Tcp, fd: c_int) -> bool {
    tcp.undisturbed(|owner| match owner {
        Some(Owner::Nic) => satisfied(tcp, Want::Receive(1)),
        _ => reports_now(fd, libc::POLLIN),
    })
}

/// Whether no more bytes will come. Not asked during a move, when the socket is disconnected for a moment.
pub(crate) fn has_ended(tcp: &Tcp, fd: c_int) -> bool {
    tcp.undisturbed(|owner| match (owner, tcp.managed()) {
        (Some(Owner::Nic), Some((connection, session))) => {
            let state = session.shared.readiness(connection, thread::token());
            state.fin || state.ended.is_some()
        }
        _ => reports_now(fd, libc::POLLRDHUP) || reports_now(fd, libc::POLLERR),
    })
}

/// A call that waits: how long, and what a signal does to it.
#[derive(Clone, Copy)]
pub(crate) struct Wait {
    /// Microseconds of the monotonic clock.
    pub deadline: Option<u64>,
    /// The call continues after handlers with SA_RESTART, since it has no time limit and has transferred nothing yet
    /// (Linux, sock_intr_errno).
    pub restarted: bool,
    /// When the call began.
    pub begun: Mark,
}

impl Wait {
    /// For a call that has transferred nothing yet.
    pub fn new(deadline: Option<u64>, begun: Mark) -> Wait {
        Wait { deadline, restarted: deadline.is_none(), begun }
    }

    /// Records that the call has transferred `done` bytes so far.
    pub fn after(&mut self, done: usize) -> &mut Wait {
        self.restarted = self.deadline.is_none() && done == 0;
        self
    }
}

/// Waits until one of two descriptors is readable, the kernel's and the NIC's. Ok with whether the NIC's has hung up.
/// Err with errno: EAGAIN after the deadline, EINTR after a signal whose handler does not restart calls. None if the
/// library has withdrawn meanwhile, or this is a child that a signal handler has forked: then the NIC's descriptor is
/// the parent's.
pub(crate) fn for_either(section: Section, fds: [c_int; 2], deadline: Option<u64>) -> Option<(Section, Result<bool, c_int>)> {
    let mut fds = fds.map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 });
    let left = deadline.map_or(-1, |deadline| deadline.saturating_sub(now()).div_ceil(1000).min(c_int::MAX as u64) as c_int);
    drop(section);
    let (before, owner) = (Mark::now(), process::owner());
    // SAFETY: two live entries.
    let got = unsafe { leaving::asleep_again(|| real::poll(fds.as_mut_ptr(), 2, left)) };
    let section = Section::enter()?;
    let slept = match got {
        0 => Err(libc::EAGAIN),
        -1 if thread::errno() == libc::EINTR && !before.is_over_by_kernel(deadline.is_none()) => Ok(false),
        -1 => Err(thread::errno()),
        _ => Ok(fds[1].revents & libc::POLLHUP != 0),
    };
    (slept.is_err() || process::is_still(owner)).then_some((section, slept))
}

/// Waits as a blocking call would. Err with errno: EAGAIN after the deadline, EINTR after a signal whose handler does
/// not restart the call, EBADF if another thread has closed the socket.
pub(crate) fn block(tcp: &Tcp, fd: c_int, want: Want, wait: &mut Wait) -> Result<(), c_int> {
    let owner = tcp.settled_owner();
    if owner == Some(Owner::Nic) && satisfied(tcp, want) {
        return Ok(());
    }
    let (generation, known) = (tcp.generation(), tcp.moves());
    let mut fds = Few::new();
    if owner != Some(Owner::Nic) {
        let events = match want {
            Want::Receive(_) => libc::POLLIN,
            Want::More(_) => libc::POLLRDHUP,
            Want::Send => libc::POLLOUT,
        };
        fds.push(pollfd { fd, events, revents: 0 });
    }
    let ready = || {
        tcp.moves() != known
            || tcp.generation() != generation
            || tcp.is_managed() && satisfied(tcp, want)
            || sections::is_withdrawn()
    };
    if wait.restarted {
        wait.begun.restart();
    }
    let (restarted, begun) = (wait.restarted, wait.begun);
    // Bytes that wait here for more would have been transferred natively: then no call goes on.
    let goes_on = || {
        let has_some = matches!(want, Want::Receive(2..)) && tcp.is_managed() && satisfied(tcp, Want::Receive(1));
        restarted && !has_some
    };
    // A handler may have run where this thread was awake, for another connection's sake.
    let is_interrupted = || begun.is_over(restarted);
    loop {
        let before = Mark::now();
        let look = (!fds.is_empty() && matches!(want, Want::More(_))).then(|| now() + FOR_MORE);
        let limit = wait.deadline.into_iter().chain(look).min();
        let slept =
            sleep(process::session(), Watched { sockets: &[tcp], sets: &[] }, (&mut fds, 1), limit, std::ptr::null(), || {
                ready() || is_interrupted()
            });
        if leaving::is_leaving() {
            return Err(libc::EINTR);
        }
        // If the connection was given to the kernel for good, the caller continues there.
        if tcp.generation() != generation && !tcp.is_left(generation) {
            return Err(libc::EBADF);
        }
        let over = || ready() || fds.first().is_some_and(|entry| entry.revents != 0);
        match slept {
            // This comes first: if the connection was given to the kernel, the caller would go to sleep there, although
            // a handler has run that ends the call.
            Ok(_) if is_interrupted() => return Err(libc::EINTR),
            Ok(_) if over() => return Ok(()),
            Ok(_) if wait.deadline.is_some_and(|deadline| now() >= deadline) => return Err(libc::EAGAIN),
            // Woken for another connection, or for fewer bytes than wanted: sleep again. If the connection is in the
            // kernel, or the session has ended, the caller tries instead.
            Ok(_) if tcp.settled_owner() == Some(Owner::Nic) && process::session().is_some_and(|s| !s.shared.has_ended()) => {}
            Ok(_) => return Ok(()),
            Err(libc::EINTR) if !before.is_over_by_kernel(goes_on()) => {
                // What the call transfers next is not cut short by a handler that has restarted it.
                wait.begun.restart();
                return Ok(());
            }
            Err(number) => return Err(number),
        }
    }
}
