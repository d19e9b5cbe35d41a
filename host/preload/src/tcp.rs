//! A TCP socket of the program's. At first the socket is left to the kernel and its traffic is counted; once its rule
//! matches, the agent manages it, and its connection can move.

mod lifecycle;
mod plan;
mod watchers;
mod zero_copy;

pub(crate) use lifecycle::{Inherited, allow_each_again, forget_pool, give_each_back, hold, new, note_all_shared};

use crate::completions::Completions;
use crate::epoll::Set;
use crate::handover::{HandOver, Inside, State};
use crate::listening::{Asking, Queue};
use crate::process::{self, Session};
use crate::sections::Section;
use crate::short_lock::ShortLock;
use crate::waiter::Waiter;
use crate::waiting::{Fact, Negative, Waiting};
use crate::worth::{Moment, Worth};
use crate::{options, ports, thread};
use baton_abi::layout::Owner;
use baton_client::{Connection, note_hot_from};
use baton_linux::process::Undisturbed;
use baton_protocol::native::Native;
use baton_protocol::program::{Place, Until};
use baton_ring::give_way;
use libc::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const RELAXED: Ordering = Ordering::Relaxed;

/// When to hand a connection over: after this many bytes, or, with the highest bit set, this many requests.
const NEVER: u64 = u64::MAX;
const REQUESTS: u64 = 1 << 63;
const UNPLANNED: u64 = u64::MAX - 1;

/// How many times the agent is asked to restore a connection. Each time the agent waits 20 ms for the program's threads
/// to leave their operations.
const ATTEMPTS: u32 = 20;

/// Longest sleep while a thread waits for the end of a move. The end of the move wakes the thread at once; after this
/// time it checks whether the agent has ended. If this were much shorter, threads that wait for many moves would take
/// the processors from the agent, which makes the moves.
const MOVES: Duration = Duration::from_millis(10);

/// As `MOVES`, for a thread that waits for other connections at the same time.
const A_LITTLE: Duration = Duration::from_millis(1);

/// Reason for restoring connections while the process forks. They may move again afterwards.
pub(crate) const FORK: &str = "fork";
/// Reason for restoring connections while another program is started.
pub(crate) const START: &str = "spawn";
/// Whether it was reported to the agent that this process has connections on which a receive returns more than bytes.
/// That is done once.
static REPORTED_RECEIVES: AtomicBool = AtomicBool::new(false);

/// How a socket came to be connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    Accepted,
    Connected,
}

/// The [`Connection`] that represents a socket in a session. The same object serves the socket's connections one after
/// another.
struct Link {
    connection: Arc<Connection>,
    session: &'static Session,
}

/// A TCP socket. Never freed; reused for one descriptor after another.
#[repr(align(64))]
pub(crate) struct Tcp {
    handover: HandOver,
    /// Generation: counts the connections that this object has represented. A late thread of a closed connection sees
    /// that the generation has changed.
    generation: AtomicU32,
    /// The last generation that was given to the kernel for good while its descriptors stayed open.
    left: AtomicU32,
    /// Link to the session that the socket was in last; null if none.
    link: AtomicPtr<Link>,
    /// The same link while the agent manages the socket, else null.
    managed: AtomicPtr<Link>,
    /// As `managed`, but null also if SO_RCVLOWAT is above 1.
    plain: AtomicPtr<Link>,
    /// SO_RCVLOWAT in bytes.
    lowat: AtomicU32,
    /// Bytes that the program has received in total (wraps).
    pub taken: AtomicU32,
    /// Number of sends that found no room.
    pub stuck: AtomicU32,
    /// Number of calls after which the kernel reports a socket's events again, even if it has reported them before.
    pub rearms: AtomicU32,
    /// The NIC was asked to open the connection, and no connect(2) has returned success yet. Once it is established the
    /// next connect(2) succeeds, as in Linux (SS_CONNECTING).
    pub connecting: AtomicBool,
    /// The program has chosen its port, which is free for another socket when this one is closed.
    pub bound: AtomicBool,
    plan: AtomicU64,
    /// Bytes per second that the connection has to carry to be on the NIC; 0 if its traffic does not matter.
    hot_from: AtomicU32,
    bytes: AtomicU64,
    requests: AtomicU32,
    receiving: AtomicBool,
    /// Data for the decision whether a move pays.
    pub worth: Worth,
    accepted: AtomicBool,
    /// Other processes may have the socket, too: this process has inherited it, or has started a program.
    inherited: AtomicBool,
    /// Number of forks when the socket was made: see [`note_all_shared`].
    forks: AtomicU64,
    /// The connection stays in the kernel for good, although the agent manages it.
    pinned: AtomicBool,
    /// Held while the agent is asked to restore it, so that such requests reach the agent one after the other.
    /// Otherwise one that allows further moves could be sent after the one that forbids them.
    asking_back: Mutex<()>,
    /// Whether it was O_NONBLOCK when a call last read the flags. Only a hint: a call that sleeps in the kernel
    /// nevertheless only delays the hand-over.
    nonblocking: AtomicBool,
    /// What is known of the options by which the socket's calls wait.
    waiting: Waiting,
    /// Which of the socket's time limits are negative.
    pub negative: Negative,
    /// Completions of sends with MSG_ZEROCOPY.
    pub completions: Completions,
    /// Failed attempts to register it with the agent.
    attempts: AtomicU32,
    /// The socket listens.
    listens: AtomicBool,
    /// The queue of connections that the NIC makes for it; null if the NIC makes none.
    queue: AtomicPtr<Queue>,
    /// The state of asking the agent for that queue.
    pub asking: Asking,
    fds: Mutex<Vec<c_int>>,
    /// Number of waiters and sets.
    watchers: AtomicU32,
    waiters: Mutex<Vec<Arc<Waiter>>>,
    /// Epoll sets that the socket is in, with its slot in each.
    sets: Mutex<Vec<(&'static Set, u32)>>,
}

static POOL: ShortLock<Vec<&'static Tcp>> = ShortLock::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The protocol of a descriptor, if it is a socket's.
pub(crate) fn protocol(fd: c_int) -> Option<c_int> {
    const SO_PROTOCOL: c_int = 38;
    options::kernels(fd, libc::SOL_SOCKET, SO_PROTOCOL)
}

/// Whether a descriptor is a TCP socket's.
pub(crate) fn is_tcp(fd: c_int) -> bool {
    protocol(fd) == Some(libc::IPPROTO_TCP)
}

impl Tcp {
    /// The connection and its session, if the agent manages the socket.
    #[inline(always)]
    pub fn managed(&self) -> Option<(&Connection, &'static Session)> {
        self.linked(&self.managed)
    }

    /// Whether any thread is inside an operation on the socket's present or last connection.
    fn is_entered(&self) -> bool {
        self.linked(&self.link).is_some_and(|(connection, _)| connection.is_entered())
    }

    /// As `managed`, if a receive returns with a single byte.
    #[inline(always)]
    pub fn plain(&self) -> Option<(&Connection, &'static Session)> {
        self.linked(&self.plain)
    }

    #[inline(always)]
    fn linked(&self, pointer: &AtomicPtr<Link>) -> Option<(&Connection, &'static Session)> {
        let link = pointer.load(Ordering::Acquire);
        if link.is_null() {
            return None;
        }
        // SAFETY: `link_to` made the link, which is never freed nor changed.
        let link = unsafe { &*link };
        Some((&link.connection, link.session))
    }

    /// Sets SO_RCVLOWAT: bytes, at least 1.
    pub fn set_lowat(&self, lowat: u32) {
        self.lowat.store(lowat, Ordering::Release);
        let link = if lowat > 1 { std::ptr::null_mut() } else { self.managed.load(Ordering::Acquire) };
        self.plain.store(link, Ordering::Release);
    }

    /// SO_RCVLOWAT in bytes.
    pub fn lowat(&self) -> u32 {
        self.lowat.load(RELAXED)
    }

    fn put_into(&self, state: State) {
        let link = if state == State::Managed { self.link.load(Ordering::Acquire) } else { std::ptr::null_mut() };
        self.managed.store(link, Ordering::Release);
        self.set_lowat(self.lowat.load(RELAXED));
        self.handover.put(state);
    }

    /// Whether the agent manages it.
    #[inline(always)]
    pub fn is_managed(&self) -> bool {
        !self.managed.load(Ordering::Acquire).is_null()
    }

    /// Whether a thread is handing the socket over: the agent may then be moving it already, although it does not count
    /// as managed here yet. To be called before [`Tcp::is_managed`]: if neither holds, the kernel's answer is valid.
    pub fn is_being_handed_over(&self) -> bool {
        self.handover.state() == State::HandingOver
    }

    /// Whether the connection may go to the NIC during a call that begins to wait for it now: the agent manages it, or
    /// another thread may hand it over. Both are in one word that is read once. With two reads a hand-over that ends in
    /// between would be missed, and the call would wait in the kernel for the shell.
    pub fn may_leave_kernel(&self) -> bool {
        match self.handover.state() {
            State::Managed | State::HandingOver => true,
            State::Candidate => self.plan.load(RELAXED) != NEVER && !thread::is_alone(),
            State::Refused => false,
        }
    }

    /// Enters the kernel for a call; None if the agent manages the socket, whose connection may then be on the NIC. A
    /// hand-over waits until the guard is dropped: see [`Tcp::may_sleep`].
    #[inline]
    pub fn enter_kernel(&self) -> Option<Inside<'_>> {
        self.handover.enter()
    }

    /// Whether a call may sleep inside the kernel, although that keeps the socket from being handed over. It may if the
    /// socket stays in the kernel anyway, if no other thread could hand it over, or if the call is not expected to
    /// sleep.
    pub fn may_sleep(&self, inside: &Inside<'_>, flags: c_int) -> bool {
        inside.for_good()
            || flags & libc::MSG_DONTWAIT != 0
            || thread::is_alone()
            || self.nonblocking.load(RELAXED)
            || self.plan.load(RELAXED) == NEVER
    }

    /// Records O_NONBLOCK; see [`Tcp::may_sleep`].
    pub fn note_nonblocking(&self, nonblocking: bool) {
        self.nonblocking.store(nonblocking, RELAXED);
    }

    /// Forgets how its calls wait, after the program may have changed it.
    pub fn forget_waiting(&self) {
        self.waiting.forget();
    }

    /// Whether `fact` holds for the socket's calls. Calls `asks` if that is not known, and always if another process
    /// shares the socket and could have changed it.
    pub fn waits(&self, fact: Fact, asks: impl FnOnce() -> bool) -> bool {
        if self.is_shared() { asks() } else { self.waiting.holds(fact, asks) }
    }

    /// Whether O_NONBLOCK is known to be set. False if another process shares the socket and could have changed it.
    pub fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(RELAXED) && !self.is_shared()
    }

    /// The present generation: it changes when the descriptor is closed and the entry reused.
    pub fn generation(&self) -> u32 {
        self.generation.load(RELAXED)
    }

    /// Whether the connection of this generation was given to the kernel for good and is no longer tracked. Calls that
    /// other threads have begun continue in the kernel.
    pub fn is_left(&self, generation: u32) -> bool {
        self.generation() != generation && self.left.load(RELAXED) == generation
    }

    /// Notes that it is connected, and hands it over if its rule says so.
    pub fn established(&'static self, fd: c_int, origin: Option<Origin>) {
        let Some(_section) = Section::enter() else { return };
        if let Some(origin) = origin {
            self.note_origin(origin);
        }
        self.make_plan(fd);
        self.consider(fd, Moment::Made);
    }

    /// Notes that it is being connected.
    pub fn note_origin(&self, origin: Origin) {
        self.accepted.store(origin == Origin::Accepted, RELAXED);
        self.plan.store(UNPLANNED, RELAXED);
    }

    /// The link to a session; makes one for each session that the socket enters. Links are never freed.
    fn link_to(&self, session: &'static Session) -> &'static Link {
        let link = self.link.load(Ordering::Acquire);
        // SAFETY: made below, and never freed.
        if let Some(link) = unsafe { link.as_ref() }
            && std::ptr::eq(link.session, session)
        {
            return link;
        }
        let link = Box::leak(Box::new(Link { connection: session.shared.unregistered(), session }));
        self.link.store(link, Ordering::Release);
        link
    }

    /// Registers the socket with the agent.
    #[cold]
    fn hand_over(&'static self, fd: c_int) {
        let Some(_section) = Section::enter() else { return };
        if self.is_standard() {
            return;
        }
        if process::is_closed_for_good() {
            return process::report_closed();
        }
        // This thread does not wait for another one that is opening the session, or waits for the agent's answer: among
        // hundreds of threads on few processors each would wait for all others. The connection works in the kernel
        // meanwhile, and its next operation tries again.
        let Some(session) = process::open_session_at_once() else { return };
        let attempt = self.attempts.fetch_add(1, RELAXED);
        // After failures the attempts become ever rarer: at powers of two.
        if attempt > 2 && !attempt.is_power_of_two() {
            return;
        }
        let errno = thread::errno();
        // A signal handler that uses the socket here would wait for ever for the operation that it interrupted.
        let undisturbed = Undisturbed::begin();
        if !locked(&self.fds).contains(&fd) || !self.handover.begin(!thread::is_alone()) {
            return thread::set_errno(errno);
        }
        if process::is_closed() || self.is_standard() {
            // Closed since the first check: for example, another thread is about to fork.
            return self.handover.put(State::Candidate);
        }
        let connection = &self.link_to(session).connection;
        // SAFETY: the program's descriptor, open during its own call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        options::note_lowat(self, fd);
        let registered = if plan::receives_more_than_bytes(fd) {
            if !REPORTED_RECEIVES.swap(true, Ordering::Relaxed) {
                let _ = session.shared.report_native(Native::ReceivesMore);
            }
            Err(std::io::Error::other("options that only the kernel knows"))
        } else {
            session.shared.register_as(connection, borrowed, self.is_shared(), thread::token())
        };
        match registered {
            Ok(()) => {
                session.note_socket(connection.number(), Some(self));
                self.put_into(State::Managed);
                // A thread that begins to wait after the fence sees that the connection may move; one that waits
                // already is woken by `changed`.
                fence(Ordering::SeqCst);
                self.changed();
                // Not with the list locked: the lock order is set first, then list.
                let sets = locked(&self.sets).clone();
                sets.iter().for_each(|(set, _)| set.prepare_for_nic());
                if !process::plan().is_some_and(process::Plan::flips) {
                    note_hot_from(&session.shared, connection.number(), self.hot_from.load(RELAXED));
                    session.shared.suggest(connection.number(), Place::Nic);
                }
                if session.shared.has_ended() {
                    // The session was left before this socket was in its list, and leaving it has missed the socket.
                    self.leave_session();
                }
            }
            // A later attempt may succeed: for example, the connection is still being established.
            Err(error) => {
                if error.kind() == std::io::ErrorKind::ResourceBusy {
                    self.attempts.fetch_sub(1, RELAXED);
                }
                self.put_into(State::Candidate);
            }
        }
        drop(undisturbed);
        thread::set_errno(errno);
    }

    /// Makes the NIC open its connection to `peer`. Returns false if only the kernel can.
    pub fn open_by_nic(&'static self, fd: c_int, peer: std::net::SocketAddr) -> bool {
        let Some(session) = process::open_session() else { return false };
        let undisturbed = Undisturbed::begin();
        if !locked(&self.fds).contains(&fd) || !self.handover.begin(!thread::is_alone()) {
            return false;
        }
        if process::is_closed() || self.is_standard() {
            self.handover.put(State::Candidate);
            return false;
        }
        // SAFETY: the program's descriptor, open during its own call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let begun = session.shared.open_connection(&self.connection_of(session), borrowed, peer, thread::token());
        if begun.is_err() {
            self.put_into(State::Candidate);
            return false;
        }
        self.note_origin(Origin::Connected);
        self.made(session);
        self.connecting.store(true, RELAXED);
        // Events that were reported so far belong to no connection or to an earlier one.
        self.rearm();
        // Not with the list locked: the lock order is set first, then list.
        let sets = locked(&self.sets).clone();
        sets.iter().for_each(|(set, _)| set.prepare_for_nic());
        drop(undisturbed);
        true
    }

    /// Unregisters the socket after the NIC could not open its connection, so that it can open another one. Like a
    /// socket in the kernel it reports again that it is not connected.
    pub fn forget_failed(&'static self) {
        if let Some((connection, session)) = self.managed() {
            session.note_socket(connection.number(), None);
            // A socket that is closed now leaves its port to the next one at once.
            if !session.shared.forget(connection, baton_client::PORT_LIMIT).unwrap_or(false) {
                ports::note_late();
            }
            self.connecting.store(false, RELAXED);
            self.put_into(State::Candidate);
            self.rearm();
        }
    }

    /// Restores the connection to the kernel, if that is possible now. Does nothing for a socket that the agent does
    /// not manage.
    pub fn give_back(&self, reason: &str, until: Until) {
        self.restore(reason, until);
    }

    /// As [`Tcp::give_back`]. Returns false if the connection could not be restored and is still on the NIC.
    pub fn restore(&self, reason: &str, until: Until) -> bool {
        self.begin_to_leave(reason, until);
        // The agent refuses while another thread is inside an operation, and that thread may have been preempted there.
        (0..ATTEMPTS).any(|_| self.restore_once(reason, until))
    }

    /// Prepares a restore, before the agent is asked for it.
    fn begin_to_leave(&self, reason: &str, until: Until) {
        let passes = reason == FORK || reason == START;
        if until == Until::Never && !passes {
            self.pinned.store(true, RELAXED);
            self.handover.refuse();
        }
        // Before the wait below: a hand-over that begins later sees the mark.
        if until == Until::Alone || passes {
            self.note_shared();
        }
        self.settle();
    }

    /// One attempt of [`Tcp::restore`]. True also if there is nothing to wait for: the session has ended, or this
    /// thread is in a signal handler that has interrupted an operation on the connection, which keeps it where it is.
    pub fn restore_once(&self, reason: &str, until: Until) -> bool {
        let Some((connection, session)) = self.managed() else { return true };
        if connection.is_inside(thread::token()) {
            return true;
        }
        let errno = thread::errno();
        let restored = {
            let _one = locked(&self.asking_back);
            let until = if self.pinned.load(RELAXED) { Until::Never } else { until };
            session.shared.give_back(connection.number(), reason, until)
        };
        let done = restored.is_ok() || session.shared.notice_end(thread::token());
        session.shared.catch_up(thread::token());
        thread::fail(errno);
        done
    }

    /// Restores the connection if both directions have ended: the kernel then reports the remaining events.
    pub fn leave_if_over(&self) {
        if self.settled_owner() != Some(Owner::Nic) {
            return;
        }
        let Some((connection, session)) = self.managed() else { return };
        session.shared.catch_up(thread::token());
        let readiness = session.shared.readiness(connection, thread::token());
        if readiness.fin && readiness.shut {
            self.give_back("end of both streams", Until::Never);
        }
    }

    /// Whether it stays in the kernel for good, although the agent manages it.
    pub fn is_pinned(&self) -> bool {
        self.pinned.load(RELAXED)
    }

    /// Records that the socket listens, and will never be a connection.
    pub fn begin_listening(&self) {
        self.listens.store(true, Ordering::Release);
        self.stay();
    }

    /// Whether it listens.
    pub fn listens(&self) -> bool {
        self.listens.load(Ordering::Acquire)
    }

    /// The queue of connections that the NIC makes for it.
    pub fn queue(&self) -> Option<&'static Queue> {
        let queue = self.queue.load(Ordering::Acquire);
        // SAFETY: `set_queue` stores references that live for ever, or null.
        unsafe { queue.as_ref() }
    }

    /// Sets its queue. Returns the last one.
    pub fn set_queue(&self, queue: Option<&'static Queue>) -> Option<&'static Queue> {
        let queue = queue.map_or(std::ptr::null_mut(), |queue| std::ptr::from_ref(queue).cast_mut());
        let last = self.queue.swap(queue, Ordering::AcqRel);
        // SAFETY: `set_queue` stores references that live for ever, or null.
        unsafe { last.as_ref() }
    }

    /// Removes the socket's queue, if it is still `queue`. Returns whether it was.
    pub fn forget_queue(&self, queue: &'static Queue) -> bool {
        let queue = std::ptr::from_ref(queue).cast_mut();
        self.queue.compare_exchange(queue, std::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The [`Connection`] that represents this socket's connection in a session.
    pub fn connection_of(&self, session: &'static Session) -> Arc<Connection> {
        self.link_to(session).connection.clone()
    }

    /// Records that this is the socket of a connection that the NIC has made, which the session has registered already.
    pub fn made(&'static self, session: &'static Session) {
        session.note_socket(self.link_to(session).connection.number(), Some(self));
        self.put_into(State::Managed);
        self.changed();
        if session.shared.has_ended() {
            // The session was left before this socket was in its list, and leaving it has missed the socket.
            self.leave_session();
        }
    }

    /// Keeps the socket in the kernel for good: it is never registered with the agent.
    pub fn stay(&self) {
        self.handover.refuse();
    }

    /// Checks whether the session has ended, which loses a connection on the NIC; true only if that was not known
    /// before. For calls that do not wait, and so would not notice it.
    #[cold]
    pub fn has_ended_just_now(&self) -> bool {
        let Some((connection, session)) = self.managed() else { return false };
        let known = session.shared.has_ended();
        connection.owner() == Owner::Nic && session.shared.notice_end_sometimes(thread::token()) && !known
    }

    /// Number of moves of its connection; None unless the agent manages it.
    pub fn moves(&self) -> Option<u32> {
        self.managed().map(|(connection, _)| connection.moves())
    }

    /// Waits until no hand-over of it is under way.
    pub fn settle(&self) {
        self.handover.settled();
    }

    /// Waits until the connection is neither being moved nor handed over, and returns where it is. None for a socket
    /// that the agent does not manage.
    pub fn settled_owner(&self) -> Option<Owner> {
        self.settle();
        let (connection, session) = self.managed()?;
        loop {
            match connection.owner() {
                Owner::Moving => {
                    connection.wait_until_settled(MOVES);
                    session.shared.notice_end_sometimes(thread::token());
                }
                owner => return Some(owner),
            }
        }
    }

    /// Makes a call to the kernel, which must not wait, at a time when no move is under way. The call gets the
    /// connection's owner, if the agent manages it.
    pub fn undisturbed<T>(&self, call: impl Fn(Option<Owner>) -> T) -> T {
        let mut round = 0u32;
        loop {
            if let Some(_inside) = self.enter_kernel() {
                return call(None);
            }
            let Some((connection, session)) = self.managed() else { continue };
            if let Some(entered) = session.shared.enter(connection, thread::token()) {
                // The owner at entry. The agent may have set the word to moving since; it then waits for this operation
                // to end.
                return call(Some(entered.owner));
            }
            if connection.is_inside(thread::token()) {
                // A signal handler that has interrupted an operation of its own thread. That operation keeps the
                // connection where it is.
                return call(Some(connection.owner()));
            }
            self.settled_owner();
            // A connection that another thread is closing cannot be entered until it is closed: give that thread the
            // processor.
            give_way(round);
            round = round.saturating_add(1);
        }
    }

    /// Whether it may ever be on the NIC.
    pub fn may_move(&self) -> bool {
        self.handover.state() != State::Refused
    }

    /// Waits until the connection is neither being handed over nor moved, at most a millisecond for each.
    pub fn wait_a_little(&self) {
        self.handover.wait_a_little(A_LITTLE);
        if let Some((connection, session)) = self.managed() {
            connection.wait_until_settled(A_LITTLE);
            session.shared.notice_end_sometimes(thread::token());
        }
    }

    /// Counts bytes that the program has received.
    #[inline(always)]
    pub fn took(&self, bytes: usize) {
        self.taken.store(self.taken.load(RELAXED).wrapping_add(bytes as u32), RELAXED);
    }
}
