//! The readiness of connections on the NIC, and of epoll(7) sets with such connections.
//!
//! Events (poll, epoll) of a connection are computed as the kernel's tcp_poll does (Linux, net/ipv4/tcp.c).
//!
//! A set may be watched itself: by poll and select, and by other sets. This file passes on its events of connections on
//! the NIC: a mark in a set also marks each set that contains it, and wakes the threads that poll it. The kernel
//! reports the events of the kernel's set. But the kernel's set is also readable because of this library's own
//! registrations, and because of sockets in the middle of a move. So the kernel's answer counts only after both were
//! checked ([`in_kernel`]).

use crate::epoll::{File, Kernel, Set, locked};
use crate::process::{self, Session};
use crate::tcp::Tcp;
use crate::waiter::Waiters;
use crate::{listening, real, table, thread, wait};
use baton_abi::layout::Owner;
use baton_client::Readiness;
use baton_protocol::program::Until;
use libc::{EPOLL_CTL_DEL, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM, POLLIN, c_int, pollfd};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes that make a connection on the NIC readable: SO_RCVLOWAT, capped at half of the receive memory as the kernel
/// caps it (tcp_set_rcvlowat), since more might never fit.
pub(crate) fn least(tcp: &Tcp, state: &Readiness) -> u32 {
    tcp.lowat().min(state.receive_memory / 2).max(1)
}

/// Position in the stream: bytes that have arrived in total; the end of the stream counts as one more.
pub(crate) fn position(tcp: &Tcp, fd: c_int) -> u32 {
    let taken = tcp.taken.load(Ordering::Relaxed);
    match tcp.managed() {
        Some((connection, session)) if connection.owner() == Owner::Nic => {
            let readiness = session.shared.readiness(connection, thread::token());
            taken.wrapping_add(readiness.unread).wrapping_add(u32::from(readiness.fin))
        }
        _ => {
            let mut unread: c_int = 0;
            // SAFETY: FIONREAD writes one int, and `unread` is live.
            unsafe { real::ioctl(fd, libc::FIONREAD, (&raw mut unread).cast()) };
            taken.wrapping_add(unread.max(0) as u32).wrapping_add(u32::from(wait::reports_now(fd, libc::POLLRDHUP)))
        }
    }
}

/// Pending events of a connection on the NIC, as epoll bits (equal to poll's).
pub(crate) fn events(tcp: &Tcp) -> u32 {
    let Some((connection, session)) = tcp.managed() else { return 0 };
    let state = session.shared.readiness(connection, thread::token());
    let mut events = 0;
    let ended = state.ended.is_some();
    if ended || state.fin && state.shut {
        events |= EPOLLHUP;
    }
    if ended || state.fin {
        events |= EPOLLIN | EPOLLRDNORM | EPOLLRDHUP;
    }
    if state.unread >= least(tcp, &state) {
        events |= EPOLLIN | EPOLLRDNORM;
    }
    let has_room = || session.shared.takes(connection, thread::token());
    if ended || state.shut || state.is_writable() && has_room() {
        events |= EPOLLOUT | EPOLLWRNORM;
    }
    if state.ended.is_some_and(|error| error != 0) || tcp.completions.are_pending() {
        events |= EPOLLERR;
    }
    events as u32
}

/// Events of a set that has something to report.
const READY: u32 = (EPOLLIN | EPOLLRDNORM) as u32;

/// How many times the kernel is asked again after registrations were changed because of moves.
const ROUNDS: u32 = 4;

/// The threads and sets that watch a set.
#[derive(Default)]
pub(crate) struct Watchers {
    waiters: Waiters,
    /// The sets that contain it, with its slot in each; and their number.
    count: AtomicU32,
    parents: Mutex<Vec<(&'static Set, u32)>>,
    /// Counts the NIC's events that an edge-triggered registration of this set reports.
    pub(crate) arrivals: AtomicU32,
}

impl Watchers {
    /// Whether another set contains it.
    pub(crate) fn has_parents(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }
}

/// Wakes the threads that poll a set, and marks it in the sets that contain it, since it has a new event. The caller
/// may hold the lock of the session's events.
pub(crate) fn tell(set: &Set) {
    set.watchers.waiters.wake();
    if set.watchers.has_parents() {
        locked(&set.watchers.parents).iter().for_each(|(parent, slot)| parent.mark(*slot));
    }
}

/// Prepares the sets that contain this set for connections on the NIC.
pub(crate) fn prepare_parents(set: &Set) {
    // The list is copied and unlocked: in the lock order a set's interest comes before this list.
    let parents = locked(&set.watchers.parents).clone();
    parents.iter().for_each(|(parent, _)| parent.prepare_for_nic());
}

/// The waiters that are woken at each event of the set.
pub(crate) fn waiters(set: &Set) -> &Waiters {
    &set.watchers.waiters
}

/// Records that `parent`, whose lock is held, now contains this set. Does nothing for a set that several processes
/// share, of which the kernel alone reports.
pub(crate) fn add_parent(set: &'static Set, parent: &'static Set, slot: u32) {
    if set.is_inherited() {
        return;
    }
    locked(&set.watchers.parents).push((parent, slot));
    if set.watchers.count.fetch_add(1, Ordering::SeqCst) == 0 {
        // Events up to now count as reported: only later ones are new to the outer set.
        set.with_interest(|interest, kernel| {
            let slots: Vec<u32> = interest.files().map(|(slot, _)| slot).collect();
            slots.into_iter().for_each(|slot| _ = interest.has_new_events(kernel, slot));
        });
    }
}

/// Undoes [`add_parent`].
pub(crate) fn remove_parent(set: &Set, parent: &Set, slot: u32) {
    if set.is_inherited() {
        return;
    }
    let mut parents = locked(&set.watchers.parents);
    if let Some(at) = parents.iter().position(|(other, at)| std::ptr::eq(*other, parent) && *at == slot) {
        parents.swap_remove(at);
        set.watchers.count.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Handles the closing of one of several descriptors of a set. As in the kernel, a registration under that descriptor
/// stays.
pub(crate) fn remove_number(set: &'static Set, fd: c_int) {
    let parents = locked(&set.watchers.parents).clone();
    for (parent, slot) in parents {
        parent.with_interest(|interest, _| _ = interest.remove_number(slot, fd));
    }
}

/// Handles the closing of a set's last descriptor, before it is closed. If another process has a descriptor of it, the
/// kernel continues to report it.
pub(crate) fn leave_parents(set: &'static Set) {
    let parents = std::mem::take(&mut *locked(&set.watchers.parents));
    set.watchers.count.fetch_sub(parents.len() as u32, Ordering::AcqRel);
    for (parent, slot) in parents {
        parent.with_interest(|interest, kernel| interest.release(kernel, slot, File::Set(set)));
    }
}

/// Gives a set, and those in it, to the kernel: another process is about to share it, and only the kernel can report to
/// several processes.
pub(crate) fn share(set: &'static Set) {
    if set.is_inherited() {
        return;
    }
    let files: Vec<File> = locked(&set.inner).interest.files().map(|(_, file)| file).collect();
    for file in files {
        match file {
            File::Tcp(tcp) => {
                tcp.give_back("epoll set of several processes", Until::Never);
                listening::leave_for_good(tcp);
            }
            File::Set(inner) => share(inner),
        }
    }
    // Read only after the restores: they may take long, and a descriptor that is closed meanwhile may be reused.
    let fds = locked(&set.fds).clone();
    let Some(epfd) = fds.first().copied() else { return };
    set.leave_to_kernel();
    set.inherit();
    set.leave_to_several(epfd);
    fds.into_iter().for_each(|fd| table::put(fd, Some(table::File::Set(set))));
}

/// Whether a set was marked since it was last checked, for example because of a move while the kernel was asked.
pub(crate) fn is_marked(set: &Set, session: Option<&Session>) -> bool {
    if let Some(session) = session {
        session.shared.catch_up(thread::token());
    }
    set.any_marked.load(Ordering::SeqCst)
}

/// Reads the session's events, in a thread that returns from a set. The doorbell wakes one of the threads that sleep in
/// sets (EPOLLEXCLUSIVE). That may have been this thread without its seeing so: its array may have had no room for the
/// doorbell's event, or it is leaving the call by a jump. Other threads still wait for the events that the doorbell was
/// rung for. The doorbell is cleared, too, since the NIC does not ring it again before that, and this thread may never
/// sleep again.
pub(crate) fn pass_on(session: Option<&Session>) {
    let errno = thread::errno();
    if let Some(session) = session {
        baton_client::catch_up_for_others(&session.shared, thread::token());
    }
    thread::set_errno(errno);
}

/// Why a set may have events that were not found.
#[derive(Clone, Copy, Default)]
pub(crate) struct Doubt {
    /// A connection that is being moved, whose events cannot be read yet.
    pub moving: Option<&'static Tcp>,
    /// A registration was changed because of a move; the kernel's set may report its events only from now on.
    pub renewed: bool,
}

/// Events of a set that are due to connections on the NIC.
pub(crate) fn of_set(set: &'static Set, doubt: &mut Doubt) -> u32 {
    if set.is_inherited() {
        return 0;
    }
    let Some(epfd) = locked(&set.fds).first().copied() else { return 0 };
    let mut inner = locked(&set.inner);
    let renewed = std::mem::take(&mut inner.interest.renewed);
    set.take_marks(&mut inner, epfd);
    let mut kernel = Kernel::of(epfd);
    let is_ready = inner.interest.is_ready(&mut kernel);
    let found = kernel.doubt;
    let moving = inner.interest.moving.and_then(|file| if let File::Tcp(tcp) = file { Some(tcp) } else { None });
    doubt.moving = doubt.moving.or(found.moving).or(moving);
    doubt.renewed |= found.renewed || inner.interest.renewed;
    inner.interest.renewed |= renewed;
    if is_ready { READY } else { 0 }
}

/// Adds a set and those in it to a list, except those that several processes share: nothing is changed in these, and
/// their locks may be held by a thread that exists only in the parent.
fn list(set: &'static Set, all: &mut Vec<(&'static Set, c_int)>) {
    if set.is_inherited() {
        return;
    }
    let epfd = locked(&set.fds).first().copied();
    let (Some(epfd), false) = (epfd, all.iter().any(|(other, _)| std::ptr::eq(*other, set))) else { return };
    all.push((set, epfd));
    let children: Vec<File> = locked(&set.inner).interest.files().map(|(_, file)| file).collect();
    for file in children {
        if let File::Set(child) = file {
            list(child, all);
        }
    }
}

/// Whether the kernel's set has events of the program's descriptors. The caller may hold the lock of a set that this
/// one is in.
pub(crate) fn in_kernel(set: &'static Set, doubt: &mut Doubt) -> bool {
    if set.is_inherited() {
        // The kernel has just reported this set as readable. It is asked once more if a descriptor of the set is known.
        let epfd = set.fds.try_lock().ok().and_then(|fds| fds.first().copied());
        return epfd.is_none_or(|epfd| wait::reports_now(epfd, POLLIN));
    }
    let mut all = Vec::new();
    list(set, &mut all);
    let Some((_, epfd)) = all.first().copied() else { return false };
    for _ in 0..ROUNDS {
        let session = process::session();
        calm(session, &all);
        let (is_readable, is_disturbed) = look(session, epfd, &all);
        if !is_readable {
            return false;
        }
        let mut is_changed = false;
        for (set, epfd) in &all {
            let mut inner = locked(&set.inner);
            set.take_marks(&mut inner, *epfd);
            let (changed, found) = inner.interest.settle_all(&mut Kernel::of(*epfd));
            is_changed |= changed;
            if let Some(File::Tcp(tcp)) = found {
                doubt.moving = Some(tcp);
                return false;
            }
        }
        if !is_changed {
            return if is_disturbed { look_without(epfd, &all) } else { true };
        }
    }
    true
}

/// Clears the doorbell, and the eventfds of those sets in which no thread sleeps.
fn calm(session: Option<&'static Session>, all: &[(&'static Set, c_int)]) {
    if let Some(session) = session {
        session.shared.clear_bell();
        session.shared.catch_up(thread::token());
    }
    for (set, _) in all {
        if set.sleepers.load(Ordering::SeqCst) == 0 {
            set.wake.clear();
            // A thread that has fallen asleep since the check may have needed the signal that was just cleared.
            set.alert();
        }
    }
}

/// Whether the kernel's set is readable, and whether this library's registrations are.
fn look(session: Option<&'static Session>, epfd: c_int, all: &[(&'static Set, c_int)]) -> (bool, bool) {
    let entry = |fd, events| pollfd { fd, events, revents: 0 };
    let mut fds = vec![entry(epfd, POLLIN)];
    if let Some(session) = session {
        fds.push(entry(session.shared.hangs_up().as_raw_fd(), 0));
        fds.push(entry(session.shared.bell().as_fd().as_raw_fd(), POLLIN));
    }
    fds.extend(all.iter().filter_map(|(set, _)| set.wake.get()).map(|wake| entry(wake, POLLIN)));
    // SAFETY: a live array of that length.
    unsafe { real::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 0) };
    if let (Some(session), true) = (session, fds.get(1).is_some_and(|entry| entry.revents != 0)) {
        // Only noted: here the caller may hold a set's lock. The waiting thread leaves the session afterwards.
        session.shared.notice_end(thread::token());
    }
    (fds[0].revents != 0, fds[1..].iter().any(|entry| entry.revents != 0))
}

/// Whether the kernel's set is readable without this library's registrations.
fn look_without(epfd: c_int, all: &[(&'static Set, c_int)]) -> bool {
    for (set, epfd) in all {
        let inner = locked(&set.inner);
        let of_session = inner.bell.zip(process::session());
        let of_session = of_session.map(|(bell, session)| [bell, session.shared.hangs_up().as_raw_fd()]);
        for fd in of_session.into_iter().flatten().chain(set.wake.get()) {
            // SAFETY: EPOLL_CTL_DEL does not read the event.
            unsafe { real::epoll_ctl(*epfd, EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
        }
    }
    let is_readable = wait::reports_now(epfd, POLLIN);
    for (set, epfd) in all {
        let inner = locked(&set.inner);
        if inner.bell.is_some() {
            set.register_own(*epfd);
        }
        if inner.wakes {
            set.register_wake(*epfd);
        }
    }
    is_readable
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    /// A thread of the parent held all locks of a set during the fork, so in the child they are never released. The
    /// child uses the set without them: the kernel reports its events.
    #[test]
    fn a_set_of_the_parents_is_used_without_its_locks() {
        let new = || -> &'static Set { Box::leak(Box::<Set>::default()) };
        let (parents, own) = (new(), new());
        let _held = (locked(&parents.inner), locked(&parents.fds), locked(&parents.watchers.parents));
        parents.inherit();
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            let mut doubt = Doubt::default();
            add_parent(parents, own, 0);
            assert!(of_set(parents, &mut doubt) == 0 && in_kernel(parents, &mut doubt));
            remove_parent(parents, own, 0);
            parents.leave_to_kernel();
            done.send(())
        });
        is_done.recv_timeout(Duration::from_secs(20)).expect("it waits for a lock");
    }
}
