//! The life of a tracked socket, from its creation to the closing of its last descriptor, with forks and ends of
//! sessions in between.

use super::{POOL, RELAXED, Tcp, UNPLANNED, locked};
use crate::completions::Completions;
use crate::handover::{HandOver, State};
use crate::listening::{self, Asking};
use crate::process::Session;
use crate::short_lock::Held;
use crate::waiting::{Negative, Waiting};
use crate::worth::{self, Worth};
use crate::{forks, options, ports, real, table, thread};
use baton_abi::layout::Owner;
use baton_protocol::program::Until;
use libc::c_int;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// How many sockets of the pool are tried before a new object is made.
const MOST_LATE: usize = 8;

/// How often this process has forked, counted before and after each fork.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Records that another process has, or is about to have, all sockets that exist now: see [`Tcp::is_shared`]. No
/// socket's object is written for that: there may be very many, and each page that is written around a fork is copied.
pub(crate) fn note_all_shared() {
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// Tracks a socket that this process has just made.
pub(crate) fn new(fd: c_int) -> &'static Tcp {
    let tcp = from_pool().unwrap_or_else(|| {
        Box::leak(Box::new(Tcp {
            handover: HandOver::default(),
            generation: AtomicU32::new(0),
            left: AtomicU32::new(u32::MAX),
            link: AtomicPtr::new(std::ptr::null_mut()),
            managed: AtomicPtr::new(std::ptr::null_mut()),
            plain: AtomicPtr::new(std::ptr::null_mut()),
            lowat: AtomicU32::new(1),
            taken: AtomicU32::new(0),
            stuck: AtomicU32::new(0),
            rearms: AtomicU32::new(0),
            connecting: AtomicBool::new(false),
            bound: AtomicBool::new(false),
            plan: AtomicU64::new(UNPLANNED),
            hot_from: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            requests: AtomicU32::new(0),
            receiving: AtomicBool::new(false),
            worth: Worth::default(),
            accepted: AtomicBool::new(false),
            inherited: AtomicBool::new(false),
            forks: AtomicU64::new(0),
            pinned: AtomicBool::new(false),
            asking_back: Mutex::default(),
            nonblocking: AtomicBool::new(false),
            waiting: Waiting::default(),
            negative: Negative::default(),
            completions: Completions::default(),
            attempts: AtomicU32::new(0),
            listens: AtomicBool::new(false),
            queue: AtomicPtr::new(std::ptr::null_mut()),
            asking: Asking::default(),
            fds: Mutex::default(),
            watchers: AtomicU32::new(0),
            waiters: Mutex::default(),
            sets: Mutex::default(),
        }))
    });
    tcp.generation.fetch_add(1, RELAXED);
    tcp.put_into(State::Candidate);
    tcp.set_lowat(1);
    tcp.nonblocking.store(false, RELAXED);
    tcp.waiting.forget();
    tcp.negative.clear();
    tcp.completions.forget(tcp.generation());
    tcp.taken.store(0, RELAXED);
    tcp.stuck.store(0, RELAXED);
    tcp.connecting.store(false, RELAXED);
    tcp.bound.store(false, RELAXED);
    tcp.plan.store(UNPLANNED, RELAXED);
    tcp.bytes.store(0, RELAXED);
    tcp.requests.store(0, RELAXED);
    tcp.receiving.store(false, RELAXED);
    tcp.worth.clear();
    tcp.accepted.store(false, RELAXED);
    tcp.inherited.store(false, RELAXED);
    tcp.forks.store(FORKS.load(Ordering::SeqCst), RELAXED);
    tcp.pinned.store(false, RELAXED);
    tcp.attempts.store(0, RELAXED);
    tcp.listens.store(false, RELAXED);
    tcp.queue.store(std::ptr::null_mut(), RELAXED);
    tcp.asking.forget();
    *locked(&tcp.fds) = vec![fd];
    tcp
}

/// An object from the pool that no thread is inside. A thread inside may get no processor for long, and would then
/// write to the next connection that the object represents.
fn from_pool() -> Option<&'static Tcp> {
    let mut pool = POOL.lock();
    let at = pool.iter().rev().take(MOST_LATE).position(|tcp| !tcp.is_entered())?;
    let at = pool.len() - 1 - at;
    Some(pool.swap_remove(at))
}

/// The sockets that a process has inherited, which other processes may hold, too. Two descriptors of one socket share
/// an entry. There may be very many sockets, and the program waits until all are tracked: hence the map.
#[derive(Default)]
pub(crate) struct Inherited(BTreeMap<u64, &'static Tcp>);

impl Inherited {
    /// Tracks a descriptor that the program has inherited at its start.
    pub fn of_starter(&mut self, fd: c_int) -> &'static Tcp {
        self.track(fd, crate::fd_inode(fd), |tcp| {
            tcp.listens.store(options::kernels(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Some(1), RELAXED);
            options::note_lowat(tcp, fd);
            tcp.leave_numbered_sends(fd);
        })
    }

    /// Tracks a descriptor in a child of fork, with the state that the parent had recorded.
    pub fn of_parent(&mut self, fd: c_int, parents: &'static Tcp) -> &'static Tcp {
        self.track(fd, std::ptr::from_ref(parents) as u64, |tcp| {
            tcp.listens.store(parents.listens(), RELAXED);
            tcp.set_lowat(parents.lowat());
            tcp.negative.copy(&parents.negative);
            tcp.completions.go_on_from(&parents.completions);
        })
    }

    /// `socket` identifies the socket: it is the same number for all of a socket's descriptors.
    fn track(&mut self, fd: c_int, socket: u64, describe: impl FnOnce(&Tcp)) -> &'static Tcp {
        if let Some(tcp) = self.0.get(&socket).copied() {
            locked(&tcp.fds).push(fd);
            return tcp;
        }
        let tcp = new(fd);
        tcp.inherited.store(true, RELAXED);
        describe(tcp);
        self.0.insert(socket, tcp);
        tcp
    }
}

/// Takes the pool's lock, for a fork.
pub(crate) fn hold() -> Vec<Held> {
    vec![POOL.hold()]
}

/// As [`Tcp::give_back`] for each of these sockets of a session, several at a time.
pub(crate) fn give_each_back(session: &'static Session, sockets: &[&'static Tcp], reason: &str, until: Until) {
    sockets.iter().for_each(|tcp| tcp.begin_to_leave(reason, until));
    ask_for_each(session, sockets, reason, until).into_iter().for_each(|tcp| tcp.give_back(reason, until));
}

/// As [`Tcp::allow_again`] for each of these sockets of a session, several at a time.
pub(crate) fn allow_each_again(session: &'static Session, sockets: &[&'static Tcp]) {
    ask_for_each(session, sockets, "", Until::Alone).into_iter().for_each(Tcp::allow_again);
}

/// Asks the agent once to restore each of these. Returns those that may still be on the NIC, and those for which the
/// agent was not asked.
fn ask_for_each(session: &'static Session, sockets: &[&'static Tcp], reason: &str, until: Until) -> Vec<&'static Tcp> {
    let (errno, token) = (thread::errno(), thread::token());
    // Locked in the order of their addresses, since another thread may do the same.
    let mut sockets = sockets.to_vec();
    sockets.sort_unstable_by_key(|tcp| std::ptr::from_ref(*tcp) as usize);
    sockets.dedup_by_key(|tcp| std::ptr::from_ref(*tcp) as usize);
    let (mut turns, mut asked, mut others) = (Vec::new(), BTreeMap::new(), Vec::new());
    for tcp in sockets {
        let turn = locked(&tcp.asking_back);
        // A socket that stays in the kernel for good must not be allowed to move again.
        let may_ask = until == Until::Never || !tcp.is_pinned();
        match tcp.managed() {
            Some((connection, of)) if may_ask && std::ptr::eq(of, session) && !connection.is_inside(token) => {
                asked.insert(connection.number(), tcp);
                turns.push(turn);
            }
            _ => others.push(tcp),
        }
    }
    if asked.is_empty() {
        // Without a request: it would wait for another thread that waits for the agent's answer.
        return others;
    }
    let numbers: Vec<u32> = asked.keys().copied().collect();
    match baton_client::give_back_each(&session.shared, &numbers, reason, until) {
        Ok(stay) => others.extend(stay.iter().filter_map(|number| asked.get(number).copied())),
        Err(_) => others.extend(asked.values().copied()),
    }
    drop(turns);
    session.shared.catch_up(token);
    thread::set_errno(errno);
    others
}

/// Empties the pool after a fork: its entries are linked to the parent's session.
pub(crate) fn forget_pool() {
    if let Some(mut pool) = POOL.try_lock() {
        pool.clear();
    }
}

/// Resets a socket whose connection is lost, and its peer. Further calls fail with ECONNRESET, as after a reset by the
/// peer.
fn reset(fd: c_int) {
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: a live sockaddr of the given length. The descriptor is open, since the list of its socket's descriptors
    // is locked. The second call shuts both directions although the socket has no peer any more.
    unsafe {
        real::connect(fd, &nowhere, size_of::<libc::sockaddr>() as libc::socklen_t);
        real::shutdown(fd, libc::SHUT_RDWR);
    }
}

impl Tcp {
    /// Records that another process has the descriptor, too. The connection moves only when the agent finds that this
    /// process alone has it.
    pub fn note_shared(&self) {
        self.inherited.store(true, Ordering::SeqCst);
    }

    /// Whether another process may have the descriptor, as far as this process knows: it was inherited, passed on, or
    /// this process has forked since the socket was made.
    pub(super) fn is_shared(&self) -> bool {
        self.inherited.load(Ordering::SeqCst) || self.forks.load(RELAXED) != FORKS.load(Ordering::SeqCst)
    }

    /// In a child: leaves the connection to the parent, whose session it is linked to. If a signal handler has forked,
    /// the interrupted call continues in the kernel here. Takes no lock and allocates nothing.
    pub fn leave_to_parent(&self) {
        let generation = self.generation();
        // Only once for a socket with several descriptors.
        if self.left.load(RELAXED) != generation.wrapping_sub(1) {
            self.put_into(State::Refused);
            self.link.store(std::ptr::null_mut(), RELAXED);
            self.left.store(generation, RELAXED);
            self.generation.store(generation.wrapping_add(1), RELAXED);
        }
    }

    /// Whether a descriptor of the socket is standard input, output or error, which the C library reads and writes past
    /// this library.
    pub(super) fn is_standard(&self) -> bool {
        locked(&self.fds).iter().copied().any(crate::calls::is_standard)
    }

    /// Its descriptors; none if another thread is about to change them.
    pub fn descriptors(&self) -> Vec<c_int> {
        self.fds.try_lock().map(|fds| fds.clone()).unwrap_or_default()
    }

    /// Stops tracking a socket that will be closed unseen by this library: unregisters it from the agent, and lets the
    /// kernel report its events in all sets.
    pub fn forget_connection(&'static self) {
        // Before the generation changes: threads that sleep in calls on the socket wake up by that, and read `left`.
        self.left.store(self.generation(), RELAXED);
        for (set, slot) in self.remove_watchers(&self.sets, |_| true) {
            set.release(slot, self);
        }
        // Not with the list locked: removing takes that lock.
        let fds = locked(&self.fds).clone();
        fds.into_iter().for_each(|fd| drop(self.remove(fd, false)));
    }

    /// As [`Tcp::forget_connection`], if the connection is in the kernel and this thread has not interrupted an
    /// operation on it.
    pub fn give_up_in_kernel(&'static self) {
        if let Some((connection, _)) = self.managed()
            && !connection.is_inside(thread::token())
            && self.settled_owner() != Some(Owner::Nic)
        {
            self.forget_connection();
        }
    }

    /// Leaves a session that has ended. A connection in the kernel becomes a candidate for the next session. A
    /// connection that was on the NIC is lost: its peer is reset, and the bytes that it had received can still be read.
    /// Returns whether it is lost.
    pub fn leave_session(&self) -> bool {
        let Some((connection, session)) = self.managed() else { return false };
        let lost = session.shared.has_lost(connection);
        if lost {
            // The lock keeps the descriptor open: a thread that closes it takes this lock first.
            if let Some(fd) = locked(&self.fds).first() {
                reset(*fd);
            }
        } else {
            self.attempts.store(0, RELAXED);
            self.put_into(if self.pinned.load(RELAXED) { State::Refused } else { State::Candidate });
        }
        self.changed();
        lost
    }

    /// Unregisters the connection, which is in the kernel, so that the agent closes its copy of the descriptor.
    pub fn end_care(&self) {
        if let Some((connection, session)) = self.managed() {
            let _ = session.shared.forget(connection, Duration::ZERO);
        }
    }

    /// Whether no other process has the descriptor, as far as this process knows. A socket that was passed on over a
    /// Unix socket is pinned, which counts as shared.
    fn is_this_processes_alone(&self) -> bool {
        !self.is_shared() && !self.is_pinned()
    }

    /// Lets it move again after a fork, once no other process holds it.
    pub fn allow_again(&self) {
        let Some((connection, session)) = self.managed() else { return };
        let _one = locked(&self.asking_back);
        if !self.pinned.load(RELAXED) {
            let _ = session.shared.give_back(connection.number(), "", Until::Alone);
        }
    }

    /// Has the connection in the kernel, in a child of vfork(2) that passes it on by this descriptor, until this
    /// process has it alone. Takes no lock and no memory.
    pub fn share_with_child(&self, fd: c_int) {
        // A hand-over that has begun is waited for a while: a later one sees it. Its thread may have ended.
        const LOOKS: u32 = 1000;
        self.note_shared();
        for _ in 0..LOOKS {
            if self.handover.state() != State::HandingOver {
                break;
            }
            self.handover.wait_a_little(super::A_LITTLE);
        }
        let (Some((connection, session)), Some(child)) = (self.managed(), forks::child()) else { return };
        // SAFETY: the child's descriptor, open during its own call.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        child.takes(&session.shared, connection.number(), borrowed);
    }

    /// Adds another descriptor of the same socket.
    pub fn add_fd(&self, fd: c_int) {
        locked(&self.fds).push(fd);
    }

    /// Handles the closing of one of several descriptors. As in the kernel, a registration under that descriptor stays
    /// in its set and can no longer be modified; from now on only the kernel reports it.
    pub(super) fn remove_number(&'static self, fd: c_int) {
        // Not with the list locked: the lock order is set first, then list.
        let sets = locked(&self.sets).clone();
        for (set, slot) in sets {
            if set.has_number(slot, fd, self) {
                self.give_back("closed descriptor in an epoll set", Until::Never);
                set.remove_number(slot, fd);
            }
        }
    }

    /// Handles the closing of a descriptor, before it is closed. With the last one the connection is restored and
    /// unregistered, so that the kernel's close has its usual effect. Otherwise the connection may be on the NIC: the
    /// caller keeps the returned mark until the kernel has closed the descriptor.
    pub fn remove_fd(&'static self, fd: c_int) -> Option<table::Change> {
        self.remove(fd, true)
    }

    /// As [`Tcp::remove_fd`]. With `closes` false the descriptor stays open and is only no longer tracked.
    fn remove(&'static self, fd: c_int, closes: bool) -> Option<table::Change> {
        let change = table::Change::begin_of(fd, self)?;
        let last = {
            let mut fds = locked(&self.fds);
            fds.retain(|other| *other != fd);
            fds.is_empty()
        };
        if !last {
            self.remove_number(fd);
            return Some(change);
        }
        listening::close(self);
        self.settle();
        self.generation.fetch_add(1, RELAXED);
        for (set, slot) in self.remove_watchers(&self.sets, |_| true) {
            set.forget(slot, self);
        }
        if let Some((connection, session)) = self.managed() {
            let _turn = worth::Turn::begin();
            session.note_socket(connection.number(), None);
            let lingers = options::kernels(fd, libc::SOL_SOCKET, libc::SO_LINGER).is_some_and(|on| on != 0);
            let sends_fin = closes && !lingers && self.is_this_processes_alone() && options::unread(self, fd) == Some(0);
            // The next socket can have the local port of one that was bound, or whose connection was never opened.
            let leaves_port = self.bound.load(RELAXED) || connection.was_not_opened();
            let within = match (lingers, leaves_port) {
                (true, _) => baton_client::LIMIT,
                (false, true) => baton_client::PORT_LIMIT,
                (false, false) => Duration::ZERO,
            };
            let is_free = session.shared.forget(connection, within).unwrap_or(false);
            if leaves_port && !is_free {
                ports::note_late();
            }
            if sends_fin && options::is_kernels(fd) {
                // The FIN leaves now. The kernel's close sends it only when agent and keeper have closed their
                // descriptors, too, which may be late; and not at all if bytes have come since the program called
                // close, before which the FIN would have left without Baton.
                let errno = thread::errno();
                // SAFETY: no pointers are involved; the program closes the descriptor only after this.
                unsafe { real::shutdown(fd, libc::SHUT_WR) };
                thread::set_errno(errno);
            }
        }
        self.worth.end();
        self.put_into(State::Refused);
        for waiter in self.remove_watchers(&self.waiters, |_| true) {
            waiter.wake();
        }
        drop(change);
        POOL.lock().push(self);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A send in the kernel that finds no room is counted, also before the hand-over: after it the NIC may have to
    /// report that there is room again.
    #[test]
    fn a_send_in_the_kernel_that_lacks_room_is_noted() {
        let tcp = new(-1);
        let noted = |sent, wanted| {
            let before = tcp.stuck.load(RELAXED);
            tcp.note_room(sent, || wanted);
            tcp.stuck.load(RELAXED) - before
        };
        thread::set_errno(libc::EPIPE);
        assert_eq!([noted(5, 5), noted(4, 5), noted(-1, 5)], [0, 1, 0]);
        thread::set_errno(libc::EAGAIN);
        assert_eq!(noted(-1, 5), 1);
        tcp.put_into(State::Refused);
        assert_eq!(noted(4, 5), 0, "the kernel alone reports it");
    }

    /// Another thread hands a socket over at the moment when this one checks whether to watch it.
    #[test]
    fn a_socket_is_watched_at_every_moment_from_its_hand_over_on() {
        const HAND_OVERS: u32 = 20_000;
        let tcp = new(-1);
        tcp.put_into(State::HandingOver);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..HAND_OVERS {
                    tcp.put_into(State::Managed);
                    tcp.put_into(State::HandingOver);
                }
            });
            (0..100 * HAND_OVERS).for_each(|_| assert!(tcp.may_leave_kernel()));
        });
        tcp.put_into(State::Refused);
        assert!(!tcp.may_leave_kernel());
    }

    /// A fork marks all existing sockets as shared, and writes to none of them. What is made later is this process's
    /// alone.
    #[test]
    fn a_fork_shares_all_sockets_by_one_word() {
        let earlier = [new(-1), new(-1)];
        earlier.iter().for_each(|tcp| tcp.note_nonblocking(true));
        assert!(earlier.iter().all(|tcp| !tcp.is_shared() && tcp.is_nonblocking()));
        note_all_shared();
        assert!(earlier.iter().all(|tcp| tcp.is_shared() && !tcp.is_nonblocking() && !tcp.is_this_processes_alone()));
        assert!(!earlier.iter().any(|tcp| tcp.inherited.load(RELAXED)), "none is written");
        let later = new(-1);
        assert!(!later.is_shared() && later.is_this_processes_alone());
        later.note_shared();
        assert!(later.is_shared());
    }
}
