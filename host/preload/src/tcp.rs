//! A TCP socket of the program's: left to the kernel at first, and watched; then the agent knows it, and it moves.

use crate::custody::{Custody, Hands, Inside};
use crate::epoll::Set;
use crate::process::{self, Session};
use crate::wait::Waiter;
use crate::worth::{self, Moment, Worth};
use crate::{options, real, table, thread};
use baton_abi::layout::Owner;
use baton_client::Connection;
use baton_client::rules::When;
use baton_linux::process::Undisturbed;
use baton_protocol::program::{Place, Until};
use libc::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

const RELAXED: Ordering = Ordering::Relaxed;

/// Plans: after so many bytes; with the highest bit after so many requests.
const NEVER: u64 = u64::MAX;
const REQUESTS: u64 = 1 << 63;
const UNPLANNED: u64 = u64::MAX - 1;

/// A connection that is to be given back is asked for so often; the agent waits 20 ms each time for the program's threads to leave it.
const ATTEMPTS: u32 = 20;

/// Why connections go back while the process forks; they may move again afterwards.
pub(crate) const FORK: &str = "fork";

/// How a socket came to be connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    Accepted,
    Connected,
}

/// What stands for one of the socket's connections after another with the agent.
struct Link {
    connection: Arc<Connection>,
    session: &'static Session,
}

/// A TCP socket. It lives for ever, for one descriptor after another.
#[repr(align(64))]
pub(crate) struct Tcp {
    custody: Custody,
    /// Counts the connections that it has stood for: a thread that is late with a closed one sees that.
    lives: AtomicU32,
    /// For the session that it was in last; null if it was in none.
    link: AtomicPtr<Link>,
    /// The link while the agent knows the socket, else null.
    managed: AtomicPtr<Link>,
    /// The same, but null also if SO_RCVLOWAT is above 1.
    plain: AtomicPtr<Link>,
    /// Its SO_RCVLOWAT.
    lowat: AtomicU32,
    /// Bytes that the program has taken, ever.
    pub taken: AtomicU32,
    /// How often a send found no room.
    pub stuck: AtomicU32,
    /// How often the program did what makes the kernel say anew what a socket is ready for.
    pub nudges: AtomicU32,
    plan: AtomicU64,
    bytes: AtomicU64,
    requests: AtomicU32,
    receiving: AtomicBool,
    /// Whether a move pays just now.
    pub worth: Worth,
    accepted: AtomicBool,
    inherited: AtomicBool,
    /// It stays in the kernel for good, although the agent knows it.
    pinned: AtomicBool,
    /// It was O_NONBLOCK when a call last asked. Only a hint: a call that sleeps in the kernel all the same is in nobody's way but the
    /// hand-over's.
    nonblocking: AtomicBool,
    /// Attempts to hand it to the agent that failed.
    attempts: AtomicU32,
    fds: Mutex<Vec<c_int>>,
    /// Waiters and sets.
    watchers: AtomicU32,
    waiters: Mutex<Vec<Arc<Waiter>>>,
    /// With the slot that it has in each.
    sets: Mutex<Vec<(&'static Set, u32)>>,
}

static POOL: Mutex<Vec<&'static Tcp>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a socket whose connection is lost as if its peer had reset it, and resets the peer. The kernel then says ECONNRESET, too.
fn reset(fd: c_int) {
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: a live sockaddr of the given length; the descriptor is open, since its socket's list is locked. The second call shuts both
    // sides although the socket has no peer any more.
    unsafe {
        real::connect(fd, &nowhere, size_of::<libc::sockaddr>() as libc::socklen_t);
        real::shutdown(fd, libc::SHUT_RDWR);
    }
}

/// Whether a descriptor is a TCP socket.
pub(crate) fn is_tcp(fd: c_int) -> bool {
    const SO_PROTOCOL: c_int = 38;
    options::kernels(fd, libc::SOL_SOCKET, SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

/// A socket that this process has just made.
pub(crate) fn new(fd: c_int) -> &'static Tcp {
    let reused = locked(&POOL).pop();
    let tcp = reused.unwrap_or_else(|| {
        Box::leak(Box::new(Tcp {
            custody: Custody::default(),
            lives: AtomicU32::new(0),
            link: AtomicPtr::new(std::ptr::null_mut()),
            managed: AtomicPtr::new(std::ptr::null_mut()),
            plain: AtomicPtr::new(std::ptr::null_mut()),
            lowat: AtomicU32::new(1),
            taken: AtomicU32::new(0),
            stuck: AtomicU32::new(0),
            nudges: AtomicU32::new(0),
            plan: AtomicU64::new(UNPLANNED),
            bytes: AtomicU64::new(0),
            requests: AtomicU32::new(0),
            receiving: AtomicBool::new(false),
            worth: Worth::default(),
            accepted: AtomicBool::new(false),
            inherited: AtomicBool::new(false),
            pinned: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            attempts: AtomicU32::new(0),
            fds: Mutex::default(),
            watchers: AtomicU32::new(0),
            waiters: Mutex::default(),
            sets: Mutex::default(),
        }))
    });
    tcp.lives.fetch_add(1, RELAXED);
    tcp.put_into(Hands::Candidate);
    tcp.set_lowat(1);
    tcp.nonblocking.store(false, RELAXED);
    tcp.taken.store(0, RELAXED);
    tcp.stuck.store(0, RELAXED);
    tcp.plan.store(UNPLANNED, RELAXED);
    tcp.bytes.store(0, RELAXED);
    tcp.requests.store(0, RELAXED);
    tcp.receiving.store(false, RELAXED);
    tcp.worth.clear();
    tcp.accepted.store(false, RELAXED);
    tcp.inherited.store(false, RELAXED);
    tcp.pinned.store(false, RELAXED);
    tcp.attempts.store(0, RELAXED);
    *locked(&tcp.fds) = vec![fd];
    tcp
}

/// A socket that others may hold, too.
pub(crate) fn inherited(fd: c_int) -> &'static Tcp {
    // Two descriptors of one socket are one socket.
    let inode = |fd| crate::fd_inode(fd);
    let same = table::known(0, u32::MAX).find_map(|(other, file)| match file {
        table::File::Tcp(tcp) if other < fd && tcp.inherited.load(RELAXED) && inode(other) == inode(fd) => Some(tcp),
        _ => None,
    });
    if let Some(tcp) = same {
        locked(&tcp.fds).push(fd);
        return tcp;
    }
    // Not from the pool: what is there belongs to this process' own session.
    let tcp = new(fd);
    tcp.inherited.store(true, RELAXED);
    options::note_lowat(tcp, fd);
    tcp
}

/// After a fork the pool's sockets belong to the parent's session.
pub(crate) fn forget_pool() {
    if let Ok(mut pool) = POOL.try_lock() {
        pool.clear();
    }
}

impl Tcp {
    /// The connection and its session, if the agent knows the socket.
    #[inline(always)]
    pub fn managed(&self) -> Option<(&Connection, &'static Session)> {
        self.linked(&self.managed)
    }

    /// The same, if any byte is worth receiving.
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
        // SAFETY: `link_to` made the link, which lives for ever and never changes.
        let link = unsafe { &*link };
        Some((&link.connection, link.session))
    }

    /// SO_RCVLOWAT, at least 1.
    pub fn set_lowat(&self, lowat: u32) {
        self.lowat.store(lowat, Ordering::Release);
        let link = if lowat > 1 { std::ptr::null_mut() } else { self.managed.load(Ordering::Acquire) };
        self.plain.store(link, Ordering::Release);
    }

    /// See [`Tcp::set_lowat`].
    pub fn lowat(&self) -> u32 {
        self.lowat.load(RELAXED)
    }

    fn put_into(&self, hands: Hands) {
        let link = if hands == Hands::Managed { self.link.load(Ordering::Acquire) } else { std::ptr::null_mut() };
        self.managed.store(link, Ordering::Release);
        self.set_lowat(self.lowat.load(RELAXED));
        self.custody.put(hands);
    }

    /// Whether the agent knows it.
    #[inline(always)]
    pub fn is_managed(&self) -> bool {
        !self.managed.load(Ordering::Acquire).is_null()
    }

    /// Whether another thread may make it known to the agent while this one waits for it.
    pub fn may_be_handed_over(&self) -> bool {
        matches!(self.custody.hands(), Hands::Candidate | Hands::HandingOver)
            && self.plan.load(RELAXED) != NEVER
            && !thread::is_alone()
    }

    /// Enters the kernel for a call; None if the agent knows the socket, which may then be on the NIC. The hand-over waits until the guard
    /// is dropped: see [`Tcp::may_sleep`].
    #[inline]
    pub fn enter_kernel(&self) -> Option<Inside<'_>> {
        self.custody.enter()
    }

    /// Whether a call may sleep in the kernel, and so keep the socket there: it would stay there anyway, nobody else could hand it over
    /// meanwhile, or the call does not sleep as far as is known.
    pub fn may_sleep(&self, inside: &Inside<'_>, flags: c_int) -> bool {
        inside.for_good()
            || flags & libc::MSG_DONTWAIT != 0
            || thread::is_alone()
            || self.nonblocking.load(RELAXED)
            || self.plan.load(RELAXED) == NEVER
    }

    /// See [`Tcp::may_sleep`].
    pub fn note_nonblocking(&self, nonblocking: bool) {
        self.nonblocking.store(nonblocking, RELAXED);
    }

    /// Which of the connections that it has stood for it stands for now.
    pub fn life(&self) -> u32 {
        self.lives.load(RELAXED)
    }

    /// It is connected: what is to become of it?
    pub fn established(&'static self, fd: c_int, origin: Option<Origin>) {
        if let Some(origin) = origin {
            self.note_origin(origin);
        }
        if self.plan.load(RELAXED) == UNPLANNED {
            self.plan.store(planned(fd, self.origin()), RELAXED);
        }
        self.consider(fd, Moment::Made);
    }

    /// It is being connected.
    pub fn note_origin(&self, origin: Origin) {
        self.accepted.store(origin == Origin::Accepted, RELAXED);
        self.plan.store(UNPLANNED, RELAXED);
    }

    /// Whoever closes it, this library will not see it: the agent lets go of it now, and in the sets that it is in the kernel speaks for
    /// it.
    pub fn forget_connection(&'static self) {
        for (set, slot) in self.remove_watchers(&self.sets, |_| true) {
            set.release(slot, self);
        }
        for fd in locked(&self.fds).clone() {
            self.remove_fd(fd);
        }
    }

    /// So many bytes have gone through the kernel.
    pub fn count(&'static self, fd: c_int, bytes: isize, sending: bool) {
        if bytes <= 0 {
            if bytes < 0 && sending && thread::errno() == libc::EAGAIN {
                self.stuck.fetch_add(1, Ordering::AcqRel);
            }
            return;
        }
        if !sending {
            // Edges are told by the position in the stream, whoever had the connection when it was read. (What was only looked at
            // counts, too: that makes an edge too many, never one too few.)
            self.took(bytes as usize);
        }
        if self.custody.hands() != Hands::Candidate {
            return;
        }
        self.bytes.fetch_add(bytes as u64, RELAXED);
        if self.receiving.swap(!sending, RELAXED) && sending {
            self.requests.fetch_add(1, RELAXED);
        }
        if self.plan.load(RELAXED) == UNPLANNED {
            self.plan.store(planned(fd, self.origin()), RELAXED);
        }
        self.consider(fd, if sending { Moment::Sent } else { Moment::Received });
    }

    fn origin(&self) -> Origin {
        if self.accepted.load(RELAXED) { Origin::Accepted } else { Origin::Connected }
    }

    fn consider(&'static self, fd: c_int, moment: Moment) {
        let plan = self.plan.load(RELAXED);
        let due = match plan {
            NEVER | UNPLANNED => false,
            requests if requests & REQUESTS != 0 => u64::from(self.requests.load(RELAXED)) >= requests & !REQUESTS,
            bytes => self.bytes.load(RELAXED) >= bytes,
        };
        let ripe = || {
            process::plan().is_some_and(process::Plan::is_eager)
                || self.worth.is_ripe(self.origin(), moment, self.requests.load(RELAXED), self.bytes.load(RELAXED))
        };
        if due && ripe() {
            let _turn = worth::Turn::begin();
            self.hand_over(fd);
        }
    }

    /// What stands for its connections in a session. Each session that the socket comes to is a link more, for ever.
    fn link_to(&self, session: &'static Session) -> &'static Link {
        let link = self.link.load(Ordering::Acquire);
        // SAFETY: made below, and never freed.
        if let Some(link) = unsafe { link.as_ref() }
            && std::ptr::eq(link.session, session)
        {
            return link;
        }
        let link = Box::leak(Box::new(Link { connection: session.shared.unnamed(), session }));
        self.link.store(link, Ordering::Release);
        link
    }

    /// Makes the socket known to the agent.
    #[cold]
    fn hand_over(&'static self, fd: c_int) {
        let Some(session) = process::open_session() else { return };
        let attempt = self.attempts.fetch_add(1, RELAXED);
        // What failed is tried again ever more rarely.
        if attempt > 2 && !attempt.is_power_of_two() {
            return;
        }
        let errno = thread::errno();
        // A handler of the program's that uses the socket would wait for the end of what it interrupted.
        let undisturbed = Undisturbed::begin();
        if !locked(&self.fds).contains(&fd) || !self.custody.begin(!thread::is_alone()) {
            return thread::set_errno(errno);
        }
        if process::is_closed() {
            // Since we asked: another thread is about to fork, for one.
            return self.custody.put(Hands::Candidate);
        }
        let connection = &self.link_to(session).connection;
        // SAFETY: the program's descriptor, during its own call on it.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        options::note_lowat(self, fd);
        let registered = if tells_more_than_bytes(fd) {
            Err(std::io::Error::other("options that only the kernel knows"))
        } else {
            session.shared.register_as(connection, borrowed, self.inherited.load(RELAXED))
        };
        match registered {
            Ok(()) => {
                session.note_socket(connection.number(), Some(self));
                self.put_into(Hands::Managed);
                // Who begins to wait from now on knows that it may move; who waits already is told.
                fence(Ordering::SeqCst);
                self.changed();
                // Not with the list locked: whoever changes a set locks that first, then the list.
                let sets = locked(&self.sets).clone();
                sets.iter().for_each(|(set, _)| set.expect_news());
                if !process::plan().is_some_and(process::Plan::flips) {
                    let _ = session.shared.suggest(connection.number(), Place::Nic);
                }
                if session.shared.has_ended() {
                    // It was left before this socket was among its own.
                    self.leave_session();
                }
            }
            // It may be able to move later: a connection that is just being made, for one.
            Err(_) => self.put_into(Hands::Candidate),
        }
        drop(undisturbed);
        thread::set_errno(errno);
    }

    /// The connection goes to the kernel. A socket that the agent does not know is there.
    pub fn give_back(&self, reason: &str, until: Until) {
        if until == Until::Never && reason != FORK {
            self.pinned.store(true, RELAXED);
            self.custody.refuse();
        }
        self.settle();
        let Some((connection, session)) = self.managed() else { return };
        let errno = thread::errno();
        if connection.is_inside(thread::token()) {
            return;
        }
        // Not while another thread is inside an operation on it, which may have lost its core there. Should it not be possible at all, the
        // program's call will find the connection where it is.
        if until == Until::Alone || reason == FORK {
            self.inherited.store(true, RELAXED);
        }
        for _ in 0..ATTEMPTS {
            if session.shared.give_back(connection.number(), reason, until).is_ok() || session.shared.notice_end(thread::token())
            {
                break;
            }
        }
        session.shared.catch_up(thread::token());
        thread::fail(errno);
    }

    /// Its session has ended. In the kernel it is a candidate again, for the next session; one that the NIC had is lost: its peer learns that,
    /// and what it had received can still be read. Whether it is lost.
    pub fn leave_session(&self) -> bool {
        let Some((connection, session)) = self.managed() else { return false };
        let lost = session.shared.has_lost(connection);
        if lost {
            // Whoever closes a descriptor takes this lock first.
            if let Some(fd) = locked(&self.fds).first() {
                reset(*fd);
            }
        } else {
            self.attempts.store(0, RELAXED);
            self.put_into(if self.pinned.load(RELAXED) { Hands::Refused } else { Hands::Candidate });
        }
        self.changed();
        lost
    }

    /// Both sides have said that they send no more: what is left of the connection is the kernel's to tell.
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

    /// It stays in the kernel, and the agent never hears of it.
    pub fn stay(&self) {
        self.custody.refuse();
    }

    /// After a fork: it may move again when no other process has it.
    pub fn allow_again(&self) {
        if let Some((connection, session)) = self.managed()
            && !self.pinned.load(RELAXED)
        {
            let _ = session.shared.give_back(connection.number(), "", Until::Alone);
        }
    }

    /// Whether its connection has been found to be lost just now: for calls that would not wait.
    #[cold]
    pub fn has_ended_just_now(&self) -> bool {
        let Some((connection, session)) = self.managed() else { return false };
        let known = session.shared.has_ended();
        connection.owner() == Owner::Nic && session.shared.notice_end_sometimes(thread::token()) && !known
    }

    /// The moves that its connection has made, and None as long as the agent does not know it.
    pub fn moves(&self) -> Option<u32> {
        self.managed().map(|(connection, _)| connection.moves())
    }

    /// Waits until it is not being handed over.
    pub fn settle(&self) {
        self.custody.settled();
    }

    /// Where it is, once it is not being moved nor handed over. None for a socket that the agent does not know.
    pub fn settled_owner(&self) -> Option<Owner> {
        self.settle();
        let (connection, session) = self.managed()?;
        loop {
            match connection.owner() {
                Owner::Moving => {
                    connection.wait_until_settled();
                    session.shared.notice_end_sometimes(thread::token());
                }
                owner => return Some(owner),
            }
        }
    }

    /// A call to the kernel that does not wait, and not in the middle of a move. It is told who has the connection, if the agent knows it.
    pub fn undisturbed<T>(&self, call: impl Fn(Option<Owner>) -> T) -> T {
        loop {
            if let Some(_inside) = self.enter_kernel() {
                return call(None);
            }
            let Some((connection, session)) = self.managed() else { continue };
            if let Some(entered) = session.shared.enter(connection, thread::token()) {
                // As it was then: an agent that waits for the end of this has set it to moving since.
                return call(Some(entered.owner));
            }
            if connection.is_inside(thread::token()) {
                // In a signal handler, in the middle of another operation: nothing moves.
                return call(Some(connection.owner()));
            }
            self.settled_owner();
        }
    }

    /// Whether it may ever be on the NIC.
    pub fn may_move(&self) -> bool {
        self.custody.hands() != Hands::Refused
    }

    /// Waits until it is not being moved, a millisecond at most.
    pub fn wait_a_little(&self) {
        if let Some((connection, session)) = self.managed() {
            connection.wait_until_settled();
            session.shared.notice_end_sometimes(thread::token());
        }
    }

    /// Something has happened to it: whoever waits looks again. Called with the session's events locked.
    #[inline]
    pub fn changed(&self) {
        if self.watchers.load(Ordering::SeqCst) > 0 {
            self.tell_watchers();
        }
    }

    fn tell_watchers(&self) {
        for waiter in locked(&self.waiters).iter() {
            waiter.wake();
        }
        for (set, slot) in locked(&self.sets).iter() {
            set.mark(*slot);
        }
    }

    /// What the socket is ready for is news again, even where it was reported before.
    pub fn nudge(&self) {
        self.nudges.fetch_add(1, Ordering::AcqRel);
        self.changed();
    }

    /// The program has taken so many bytes.
    #[inline(always)]
    pub fn took(&self, bytes: usize) {
        self.taken.store(self.taken.load(RELAXED).wrapping_add(bytes as u32), RELAXED);
    }

    /// Somebody waits.
    pub fn add_waiter(&self, waiter: &Arc<Waiter>) {
        locked(&self.waiters).push(waiter.clone());
        self.watchers.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes [`Tcp::add_waiter`].
    pub fn remove_waiter(&self, waiter: &Arc<Waiter>) {
        self.remove_watchers(&self.waiters, |other| Arc::ptr_eq(other, waiter));
    }

    /// It is in an epoll set, in a slot.
    pub fn add_set(&self, set: &'static Set, slot: u32) {
        locked(&self.sets).push((set, slot));
        self.watchers.fetch_add(1, Ordering::AcqRel);
    }

    /// It is no more.
    pub fn remove_set(&self, set: &'static Set, slot: u32) {
        self.remove_watchers(&self.sets, |(other, at)| std::ptr::eq(*other, set) && *at == slot);
    }

    fn remove_watchers<T>(&self, list: &Mutex<Vec<T>>, which: impl Fn(&T) -> bool) -> Vec<T> {
        let removed: Vec<T> = locked(list).extract_if(.., |watcher| which(watcher)).collect();
        self.watchers.fetch_sub(removed.len() as u32, Ordering::AcqRel);
        removed
    }

    /// Another descriptor for the same socket.
    pub fn add_fd(&self, fd: c_int) {
        locked(&self.fds).push(fd);
    }

    /// A descriptor is about to be closed, and there are others. What is registered under it stays in its set, as in the kernel, which
    /// alone can go on with that: nobody can modify it any more.
    fn lose_number(&'static self, fd: c_int) {
        for (set, slot) in locked(&self.sets).clone() {
            if set.has_number(slot, fd, self) {
                self.give_back("closed descriptor in an epoll set", Until::Never);
                set.lose_number(slot, fd);
            }
        }
    }

    /// A descriptor is about to be closed. With the last one the connection becomes the kernel's alone, so that closing it means what it
    /// always meant.
    pub fn remove_fd(&'static self, fd: c_int) {
        let last = {
            let mut fds = locked(&self.fds);
            fds.retain(|other| *other != fd);
            fds.is_empty()
        };
        table::put(fd, None);
        if !last {
            self.lose_number(fd);
            return;
        }
        self.settle();
        self.lives.fetch_add(1, RELAXED);
        for (set, slot) in self.remove_watchers(&self.sets, |_| true) {
            set.forget(slot, self);
        }
        if let Some((connection, session)) = self.managed() {
            let _turn = worth::Turn::begin();
            session.note_socket(connection.number(), None);
            let _ = session.shared.forget(connection, thread::token());
        }
        self.worth.end();
        self.put_into(Hands::Refused);
        for waiter in self.remove_watchers(&self.waiters, |_| true) {
            waiter.wake();
        }
        locked(&POOL).push(self);
    }
}

/// When a connection is to be handed over.
fn planned(fd: c_int, origin: Origin) -> u64 {
    let Some(plan) = process::plan() else { return NEVER };
    // SAFETY: the program's descriptor, during its own call on it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let needed = plan.rules.iter().any(baton_client::rules::Rule::needs_addresses);
    let addresses = if needed {
        let local = baton_linux::socket::local_address(borrowed);
        let Ok(peer) = baton_linux::socket::peer_address(borrowed) else { return UNPLANNED };
        local.ok().map(|local| (local, peer))
    } else {
        None
    };
    let fits = |rule: &&baton_client::rules::Rule| addresses.is_none_or(|(local, peer)| rule.fits(local, peer));
    match plan.rules.iter().find(fits).map(|rule| rule.when) {
        None | Some(When::Never) => NEVER,
        Some(When::Established) => 0,
        Some(When::Accepted) => {
            if origin == Origin::Accepted {
                0
            } else {
                NEVER
            }
        }
        Some(When::Connected) => {
            if origin == Origin::Connected {
                0
            } else {
                NEVER
            }
        }
        Some(When::Bytes(count)) => count & !REQUESTS,
        Some(When::Requests(count)) => count | REQUESTS,
    }
}

/// Options by which receiving tells more than bytes, which the kernel alone can do: TCP_INQ, and the time-stamping family.
fn tells_more_than_bytes(fd: c_int) -> bool {
    let value = |level, option| options::kernels(fd, level, option);
    let set = |level, option| value(level, option).is_some_and(|value| value != 0);
    set(6, 36)
        || set(1, 29)
        || set(1, 35)
        || set(1, 37)
        || set(1, 63)
        || set(1, 64)
        || set(1, 65)
        || value(1, 42).is_some_and(|offset| offset >= 0)
}
