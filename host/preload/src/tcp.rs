//! A TCP socket of the program's: left to the kernel at first, and watched; then the agent knows it, and it moves.

use crate::epoll::Set;
use crate::process::{self, Session};
use crate::wait::Waiter;
use crate::{real, table, thread};
use baton_abi::layout::Owner;
use baton_client::Connection;
use baton_client::protocol::{Place, Until};
use baton_client::rules::When;
use libc::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const RELAXED: Ordering = Ordering::Relaxed;

/// In whose hands a socket is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Hands {
    /// The kernel's alone, until its plan says otherwise.
    Candidate = 0,
    /// The agent knows it: it may be on the NIC.
    Managed = 1,
    /// The kernel's for good.
    Refused = 2,
}

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
    hands: AtomicU8,
    link: OnceLock<Link>,
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
    accepted: AtomicBool,
    inherited: AtomicBool,
    /// It stays in the kernel for good, although the agent knows it.
    pinned: AtomicBool,
    /// Threads inside the kernel for it, where they may wait.
    inside: AtomicU32,
    /// Attempts to hand it to the agent that failed.
    attempts: AtomicU32,
    fds: Mutex<Vec<c_int>>,
    /// Waiters and sets.
    watchers: AtomicU32,
    waiters: Mutex<Vec<Arc<Waiter>>>,
    sets: Mutex<Vec<(&'static Set, c_int)>>,
}

static POOL: Mutex<Vec<&'static Tcp>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a descriptor is a TCP socket.
pub(crate) fn is_tcp(fd: c_int) -> bool {
    let (mut value, mut length) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
    const SO_PROTOCOL: c_int = 38;
    // SAFETY: room for one int.
    let done = unsafe { real::getsockopt(fd, libc::SOL_SOCKET, SO_PROTOCOL, (&raw mut value).cast(), &mut length) };
    done == 0 && value == libc::IPPROTO_TCP
}

/// A socket that this process has just made.
pub(crate) fn new(fd: c_int) -> &'static Tcp {
    let reused = locked(&POOL).pop();
    let tcp = reused.unwrap_or_else(|| {
        Box::leak(Box::new(Tcp {
            hands: AtomicU8::new(0),
            link: OnceLock::new(),
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
            accepted: AtomicBool::new(false),
            inherited: AtomicBool::new(false),
            pinned: AtomicBool::new(false),
            inside: AtomicU32::new(0),
            attempts: AtomicU32::new(0),
            fds: Mutex::default(),
            watchers: AtomicU32::new(0),
            waiters: Mutex::default(),
            sets: Mutex::default(),
        }))
    });
    tcp.put_into(Hands::Candidate);
    tcp.set_lowat(1);
    tcp.taken.store(0, RELAXED);
    tcp.stuck.store(0, RELAXED);
    tcp.plan.store(UNPLANNED, RELAXED);
    tcp.bytes.store(0, RELAXED);
    tcp.requests.store(0, RELAXED);
    tcp.receiving.store(false, RELAXED);
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
        // SAFETY: `put_into` stored a reference to the link, which is a part of this socket and never changes again.
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
        let link = self.link.get().filter(|_| hands == Hands::Managed);
        self.managed.store(link.map_or(std::ptr::null_mut(), |link| std::ptr::from_ref(link).cast_mut()), Ordering::Release);
        self.set_lowat(self.lowat.load(RELAXED));
        self.hands.store(hands as u8, Ordering::Release);
    }

    /// Whether the agent knows it.
    #[inline(always)]
    pub fn is_managed(&self) -> bool {
        !self.managed.load(Ordering::Acquire).is_null()
    }

    /// Whether it may be known to the agent one day.
    pub fn is_candidate(&self) -> bool {
        self.hands.load(Ordering::Acquire) == Hands::Candidate as u8
    }

    /// It is connected: what is to become of it?
    pub fn established(&'static self, fd: c_int, origin: Option<Origin>) {
        if let Some(origin) = origin {
            self.note_origin(origin);
        }
        if self.plan.load(RELAXED) == UNPLANNED {
            self.plan.store(planned(fd, self.origin()), RELAXED);
        }
        self.consider(fd);
    }

    /// It is being connected.
    pub fn note_origin(&self, origin: Origin) {
        self.accepted.store(origin == Origin::Accepted, RELAXED);
        self.plan.store(UNPLANNED, RELAXED);
    }

    /// Whoever closes it, this library will not see it: the agent lets go of it now.
    pub fn forget_connection(&'static self) {
        for fd in locked(&self.fds).clone() {
            self.remove_fd(fd);
        }
    }

    /// So many bytes have gone through the kernel.
    pub fn count(&'static self, fd: c_int, bytes: isize, sending: bool) {
        if bytes <= 0 {
            return;
        }
        if !sending {
            // Edges are told by the position in the stream, whoever had the connection when it was read. (What was only looked at
            // counts, too: that makes an edge too many, never one too few.)
            self.took(bytes as usize);
        }
        if !self.is_candidate() {
            return;
        }
        self.bytes.fetch_add(bytes as u64, RELAXED);
        if self.receiving.swap(!sending, RELAXED) && sending {
            self.requests.fetch_add(1, RELAXED);
        }
        if self.plan.load(RELAXED) == UNPLANNED {
            self.plan.store(planned(fd, self.origin()), RELAXED);
        }
        self.consider(fd);
    }

    fn origin(&self) -> Origin {
        if self.accepted.load(RELAXED) { Origin::Accepted } else { Origin::Connected }
    }

    fn consider(&'static self, fd: c_int) {
        let plan = self.plan.load(RELAXED);
        let due = match plan {
            NEVER | UNPLANNED => false,
            requests if requests & REQUESTS != 0 => u64::from(self.requests.load(RELAXED)) >= requests & !REQUESTS,
            bytes => self.bytes.load(RELAXED) >= bytes,
        };
        if due && self.inside.load(Ordering::Acquire) == 0 {
            self.hand_over(fd);
        }
    }

    /// Makes the socket known to the agent.
    #[cold]
    fn hand_over(&'static self, fd: c_int) {
        let attempt = self.attempts.fetch_add(1, RELAXED);
        // What failed is tried again ever more rarely.
        if attempt > 2 && !attempt.is_power_of_two() {
            return;
        }
        let Some(session) = process::open_session() else { return };
        if self.hands.compare_exchange(Hands::Candidate as u8, Hands::Refused as u8, Ordering::AcqRel, RELAXED).is_err() {
            return;
        }
        let errno = thread::errno();
        let connection = &self.link.get_or_init(|| Link { connection: session.shared.unnamed(), session }).connection;
        // SAFETY: the program's descriptor, during its own call on it.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let lowat = baton_kernel::socket::get(borrowed, libc::SOL_SOCKET, libc::SO_RCVLOWAT).unwrap_or(1);
        self.set_lowat(lowat.max(1) as u32);
        let registered = if tells_more_than_bytes(borrowed) {
            Err(std::io::Error::other("options that only the kernel knows"))
        } else {
            session.shared.register_as(connection, borrowed, self.inherited.load(RELAXED))
        };
        match registered {
            Ok(()) => {
                session.note_socket(connection.number(), Some(self));
                self.put_into(Hands::Managed);
                // Not with the list locked: whoever changes a set locks that first, then the list.
                let sets = locked(&self.sets).clone();
                sets.iter().for_each(|(set, _)| set.expect_news());
                if !process::plan().is_some_and(process::Plan::flips) {
                    let _ = session.shared.suggest(connection.number(), Place::Nic);
                }
            }
            // It may be able to move later: a connection that is just being made, for one.
            Err(_) => self.put_into(Hands::Candidate),
        }
        thread::fail(errno);
    }

    /// The connection goes to the kernel. A socket that the agent does not know is there.
    pub fn give_back(&self, reason: &str, until: Until) {
        if until == Until::Never && reason != FORK {
            self.pinned.store(true, RELAXED);
            let _ = self.hands.compare_exchange(Hands::Candidate as u8, Hands::Refused as u8, Ordering::AcqRel, RELAXED);
        }
        let Some((connection, session)) = self.managed() else { return };
        let errno = thread::errno();
        if connection.is_inside(thread::token()) {
            return;
        }
        // Not while another thread is inside an operation on it, which may have lost its core there. Should it not be possible at all, the
        // program's call will find the connection where it is.
        for _ in 0..ATTEMPTS {
            if session.shared.give_back(connection.number(), reason, until).is_ok() {
                break;
            }
        }
        session.shared.catch_up(thread::token());
        thread::fail(errno);
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
        let _ = self.hands.compare_exchange(Hands::Candidate as u8, Hands::Refused as u8, Ordering::AcqRel, RELAXED);
    }

    /// After a fork: it may move again when no other process has it.
    pub fn allow_again(&self) {
        if let Some((connection, session)) = self.managed()
            && !self.pinned.load(RELAXED)
        {
            let _ = session.shared.give_back(connection.number(), "", Until::Alone);
        }
    }

    /// Where it is, once it is not being moved. None for a socket that the agent does not know.
    pub fn settled_owner(&self) -> Option<Owner> {
        let (connection, _) = self.managed()?;
        loop {
            match connection.owner() {
                Owner::Moving => connection.wait_until_settled(),
                owner => return Some(owner),
            }
        }
    }

    /// The kernel may be asked to wait for this socket: then it cannot be handed over meanwhile.
    #[inline]
    pub fn inside_kernel(&self) -> Inside<'_> {
        self.inside.fetch_add(1, Ordering::AcqRel);
        Inside(self)
    }

    /// Something has happened to it: whoever waits looks again. Called with the session's events locked.
    #[inline]
    pub fn changed(&self) {
        if self.watchers.load(Ordering::Acquire) > 0 {
            self.tell_watchers();
        }
    }

    fn tell_watchers(&self) {
        for waiter in locked(&self.waiters).iter() {
            waiter.wake();
        }
        for (set, fd) in locked(&self.sets).iter() {
            set.mark(*fd);
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
        self.watchers.fetch_add(1, Ordering::AcqRel);
    }

    /// And does no more.
    pub fn remove_waiter(&self, waiter: &Arc<Waiter>) {
        self.remove_watchers(&self.waiters, |other| Arc::ptr_eq(other, waiter));
    }

    /// It is in an epoll set, under a descriptor.
    pub fn add_set(&self, set: &'static Set, fd: c_int) {
        locked(&self.sets).push((set, fd));
        self.watchers.fetch_add(1, Ordering::AcqRel);
    }

    /// It is no more.
    pub fn remove_set(&self, set: &'static Set, fd: c_int) {
        self.remove_watchers(&self.sets, |(other, of)| std::ptr::eq(*other, set) && *of == fd);
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
            return;
        }
        for (set, fd) in self.remove_watchers(&self.sets, |_| true) {
            set.forget(fd);
        }
        if let Some((connection, session)) = self.managed() {
            session.note_socket(connection.number(), None);
            let _ = session.shared.forget(connection, thread::token());
        }
        self.put_into(Hands::Refused);
        for waiter in self.remove_watchers(&self.waiters, |_| true) {
            waiter.wake();
        }
        // One that belongs to a session that was left is not used again.
        let current = process::session();
        if self.link.get().is_none_or(|link| current.is_some_and(|current| std::ptr::eq(link.session, current))) {
            locked(&POOL).push(self);
        }
    }
}

/// A call that may wait in the kernel.
pub(crate) struct Inside<'a>(&'a Tcp);

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

/// When a connection is to be handed over.
fn planned(fd: c_int, origin: Origin) -> u64 {
    let Some(plan) = process::plan() else { return NEVER };
    // SAFETY: the program's descriptor, during its own call on it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let needed = plan.rules.iter().any(baton_client::rules::Rule::needs_addresses);
    let addresses = if needed {
        let local = baton_kernel::socket::local_address(borrowed);
        let Ok(peer) = baton_kernel::socket::peer_address(borrowed) else { return UNPLANNED };
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
fn tells_more_than_bytes(fd: BorrowedFd<'_>) -> bool {
    let set = |level, option| baton_kernel::socket::get(fd, level, option).is_ok_and(|value| value != 0);
    set(6, 36)
        || set(1, 29)
        || set(1, 35)
        || set(1, 37)
        || set(1, 63)
        || set(1, 64)
        || set(1, 65)
        || baton_kernel::socket::get(fd, 1, 42).is_ok_and(|offset| offset >= 0)
}
