//! Epoll sets with sockets that may be on the NIC.
//!
//! The kernel's set stays as the program made it, and says what there is to say of connections in the kernel. While a connection is on
//! the NIC its registration is there with no events, and what it would say is worked out here. The session's bell and an eventfd of
//! the set's own are in the kernel's set, too, so that a thread that sleeps in it wakes for either.

use crate::process::Session;
use crate::tcp::Tcp;
use crate::{process, readiness, real, table, thread, wait};
use baton_abi::layout::Owner;
use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLERR, EPOLLET, EPOLLEXCLUSIVE, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT,
};
use libc::{EPOLLPRI, EPOLLRDHUP, c_int, epoll_event};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Table<K, V> = HashMap<K, V, std::hash::BuildHasherDefault<std::hash::DefaultHasher>>;

/// The data of this library's own registrations: addresses of its own, which no program has a reason to use.
static BELL: u8 = 0;
static WAKE: u8 = 1;

fn bell_data() -> u64 {
    std::ptr::from_ref(&BELL) as u64
}

fn wake_data() -> u64 {
    std::ptr::from_ref(&WAKE) as u64
}

/// What the kernel is told besides what the program asks: it reports those always.
const ALWAYS: u32 = (EPOLLERR | EPOLLHUP) as u32;

/// A socket in a set.
#[derive(Clone, Copy, Debug)]
struct Registration {
    events: u32,
    data: u64,
    /// It has fired, and waits to be armed again (EPOLLONESHOT).
    spent: bool,
    /// The kernel's registration has no events.
    muted: bool,
    /// It was just given back to the kernel, which may report again what was reported before.
    rearmed: bool,
    /// Bytes that had come when receiving was last reported; None if it was not since the registration.
    seen: Option<u32>,
    /// The end of the stream was reported.
    seen_end: bool,
    /// How often a send had found no room when sending was last reported.
    seen_stuck: Option<u32>,
    /// The socket's nudges that have been reported.
    seen_nudges: u32,
    /// It is in the list of those to look at.
    queued: bool,
    /// Moves that the connection had made when the kernel last reported it.
    moves: u32,
}

#[derive(Default)]
struct Inner {
    /// By descriptor, ordered so that nothing depends on hashing.
    sockets: BTreeMap<c_int, Registration>,
    by_data: Table<u64, Vec<c_int>>,
    /// Sets in this set: descriptor, data, events.
    nested: BTreeMap<c_int, (u64, u32)>,
    /// To be looked at.
    queue: VecDeque<c_int>,
    /// The bell of this session is in the kernel's set.
    bell: Option<c_int>,
}

/// An epoll set. It lives for ever, for one descriptor after another.
#[repr(align(64))]
pub(crate) struct Set {
    inner: Mutex<Inner>,
    /// Sockets to which something has happened.
    marked: Mutex<Vec<c_int>>,
    any_marked: AtomicBool,
    wake: c_int,
    sleepers: AtomicU32,
    /// Somebody looks at the set itself: it is in another set, or polled.
    watched: AtomicBool,
    fds: Mutex<Vec<c_int>>,
}

static POOL: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());
static OURS: Mutex<Vec<c_int>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a descriptor is a set's eventfd.
pub(crate) fn is_ours(fd: c_int) -> bool {
    OURS.try_lock().is_ok_and(|ours| ours.contains(&fd))
}

/// The set behind a descriptor, known from now on.
fn known_set(epfd: c_int) -> &'static Set {
    if let Some(set) = table::set_of(epfd) {
        return set;
    }
    let set = locked(&POOL).pop().unwrap_or_else(|| {
        let wake = wait::eventfd();
        locked(&OURS).push(wake);
        Box::leak(Box::new(Set {
            inner: Mutex::default(),
            marked: Mutex::default(),
            any_marked: AtomicBool::new(false),
            wake,
            sleepers: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            fds: Mutex::default(),
        }))
    });
    *locked(&set.fds) = vec![epfd];
    set.watched.store(false, Ordering::Release);
    table::put(epfd, Some(table::File::Set(set)));
    set
}

/// epoll_ctl(2).
///
/// # Safety
/// As epoll_ctl(2).
pub(crate) unsafe fn control(epfd: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    match table::get(fd) {
        // SAFETY: the caller's promise.
        Some(table::File::Tcp(tcp)) => unsafe { known_set(epfd).control_socket(epfd, operation, fd, tcp, event) },
        Some(table::File::Set(_)) => {
            // SAFETY: the caller's promise.
            let done = unsafe { real::epoll_ctl(epfd, operation, fd, event) };
            if done == 0 {
                // SAFETY: the kernel has just read it, or needed none.
                let given = unsafe { event.as_ref() }.map(|event| (event.u64, event.events));
                known_set(epfd).note_nested(operation, fd, given);
            }
            done
        }
        // SAFETY: the caller's promise.
        None => unsafe { real::epoll_ctl(epfd, operation, fd, event) },
    }
}

fn kernel_control(epfd: c_int, operation: c_int, fd: c_int, events: u32, data: u64) -> c_int {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: one live event.
    unsafe { real::epoll_ctl(epfd, operation, fd, &mut event) }
}

impl Inner {
    fn remove_data(&mut self, data: u64, fd: c_int) {
        if let Some(fds) = self.by_data.get_mut(&data) {
            fds.retain(|other| *other != fd);
            if fds.is_empty() {
                self.by_data.remove(&data);
            }
        }
    }

    fn enqueue(&mut self, fd: c_int) {
        if let Some(registration) = self.sockets.get_mut(&fd)
            && !registration.queued
        {
            registration.queued = true;
            self.queue.push_back(fd);
        }
    }
}

impl Set {
    unsafe fn control_socket(
        &'static self,
        epfd: c_int,
        operation: c_int,
        fd: c_int,
        tcp: &'static Tcp,
        event: *mut epoll_event,
    ) -> c_int {
        let mut inner = locked(&self.inner);
        // SAFETY: the program's event, or null.
        let given = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
        // SAFETY: the caller's promise. The kernel judges what is asked, whoever has the connection.
        let done = unsafe { real::epoll_ctl(epfd, operation, fd, event) };
        if done != 0 {
            return done;
        }
        if let Some(old) = inner.sockets.get(&fd).copied() {
            inner.remove_data(old.data, fd);
            if operation == EPOLL_CTL_DEL {
                inner.sockets.remove(&fd);
                tcp.remove_set(self, fd);
            }
        }
        let (EPOLL_CTL_ADD | EPOLL_CTL_MOD, Some((events, data))) = (operation, given) else { return done };
        if operation == EPOLL_CTL_ADD {
            tcp.remove_set(self, fd);
            tcp.add_set(self, fd);
        }
        let registration = Registration {
            events,
            data,
            spent: false,
            muted: false,
            rearmed: false,
            seen: None,
            seen_end: false,
            seen_stuck: None,
            seen_nudges: tcp.nudges.load(Ordering::Acquire),
            queued: false,
            moves: tcp.managed().map_or(0, |(connection, _)| connection.moves()),
        };
        inner.sockets.insert(fd, registration);
        inner.by_data.entry(data).or_default().push(fd);
        if tcp.is_managed() {
            self.join_bell(&mut inner, epfd);
            inner.enqueue(fd);
            self.settle_one(&mut inner, epfd, fd, tcp);
            drop(inner);
            self.alert();
        }
        done
    }

    fn note_nested(&'static self, operation: c_int, fd: c_int, given: Option<(u64, u32)>) {
        let mut inner = locked(&self.inner);
        match (operation, given, table::set_of(fd)) {
            (EPOLL_CTL_ADD | EPOLL_CTL_MOD, Some(given), Some(other)) => {
                inner.nested.insert(fd, given);
                other.watched.store(true, Ordering::Release);
            }
            _ => {
                inner.nested.remove(&fd);
            }
        }
    }

    /// The bell and the set's eventfd are in the kernel's set.
    fn join_bell(&self, inner: &mut Inner, epfd: c_int) {
        let Some(session) = process::session() else { return };
        let bell = session.shared.bell().as_fd().as_raw_fd();
        if inner.bell == Some(bell) {
            return;
        }
        inner.bell = Some(bell);
        kernel_control(epfd, EPOLL_CTL_ADD, bell, (EPOLLIN | EPOLLEXCLUSIVE) as u32, bell_data());
        kernel_control(epfd, EPOLL_CTL_ADD, self.wake, EPOLLIN as u32, wake_data());
    }

    /// A socket of the set may go to the NIC from now on.
    pub fn expect_news(&self) {
        if let Some(epfd) = locked(&self.fds).first().copied() {
            self.join_bell(&mut locked(&self.inner), epfd);
        }
    }

    /// Something has happened to a socket of the set. Called with the session's events locked.
    pub fn mark(&self, fd: c_int) {
        locked(&self.marked).push(fd);
        self.any_marked.store(true, Ordering::Release);
        self.alert();
    }

    /// Whoever sleeps in the set, or looks at it from outside, is to look again.
    fn alert(&self) {
        if self.sleepers.load(Ordering::Acquire) > 0 || self.watched.load(Ordering::Acquire) {
            wait::signal(self.wake);
        }
    }

    /// A descriptor of a socket is about to be closed for good: the kernel's registration goes, whoever else holds the socket.
    pub fn forget(&'static self, fd: c_int) {
        let epfd = locked(&self.fds).first().copied();
        let mut inner = locked(&self.inner);
        if let Some(old) = inner.sockets.remove(&fd) {
            inner.remove_data(old.data, fd);
            if let Some(epfd) = epfd {
                // SAFETY: DEL takes no event.
                unsafe { real::epoll_ctl(epfd, EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
            }
        }
    }

    /// Another descriptor of the same set.
    pub fn add_fd(&self, fd: c_int) {
        locked(&self.fds).push(fd);
    }

    /// A descriptor of the set is about to be closed.
    pub fn remove_fd(&'static self, fd: c_int) {
        table::put(fd, None);
        let mut fds = locked(&self.fds);
        fds.retain(|other| *other != fd);
        if !fds.is_empty() {
            return;
        }
        drop(fds);
        let inner = std::mem::take(&mut *locked(&self.inner));
        for fd in inner.sockets.keys() {
            if let Some(tcp) = table::tcp(*fd) {
                tcp.remove_set(self, *fd);
            }
        }
        locked(&self.marked).clear();
        wait::clear(self.wake);
        locked(&POOL).push(self);
    }

    /// Brings the kernel's registration of a socket in line with who has the connection.
    fn settle_one(&self, inner: &mut Inner, epfd: c_int, fd: c_int, tcp: &Tcp) {
        let on_nic = tcp.settled_owner() == Some(Owner::Nic);
        let Some(registration) = inner.sockets.get_mut(&fd) else { return };
        if registration.muted == on_nic {
            return;
        }
        registration.muted = on_nic;
        registration.rearmed = !on_nic;
        // What has fired is silent until it is armed again; the kernel would report some events even so, but does so only once.
        let events = match () {
            () if on_nic => registration.events & EPOLLET as u32,
            () if registration.spent => registration.events & EPOLLET as u32 | EPOLLONESHOT as u32,
            () => registration.events,
        };
        if registration.events & EPOLLEXCLUSIVE as u32 != 0 {
            // An exclusive registration cannot be modified.
            // SAFETY: DEL takes no event.
            unsafe { real::epoll_ctl(epfd, EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
            let events = if on_nic { 0 } else { registration.events };
            kernel_control(epfd, EPOLL_CTL_ADD, fd, events, registration.data);
        } else {
            kernel_control(epfd, EPOLL_CTL_MOD, fd, events, registration.data);
        }
    }

    /// Takes in what has happened: marked sockets are to be looked at, and those that have moved are registered accordingly.
    fn take_marks(&self, inner: &mut Inner, epfd: c_int) {
        if !self.any_marked.swap(false, Ordering::AcqRel) {
            return;
        }
        self.join_bell(inner, epfd);
        for fd in std::mem::take(&mut *locked(&self.marked)) {
            if let Some(tcp) = table::tcp(fd) {
                self.settle_one(inner, epfd, fd, tcp);
                inner.enqueue(fd);
            }
        }
    }

    /// Moves what is ready among sockets on the NIC into `out`.
    fn collect(&self, inner: &mut Inner, epfd: c_int, out: &mut [epoll_event]) -> usize {
        let (mut count, mut again) = (0, Vec::new());
        for _ in 0..inner.queue.len() {
            if count == out.len() {
                break;
            }
            let Some(fd) = inner.queue.pop_front() else { break };
            let Some(registration) = inner.sockets.get_mut(&fd) else { continue };
            registration.queued = false;
            let Some(tcp) = table::tcp(fd) else { continue };
            if !registration.muted || registration.spent {
                continue;
            }
            if tcp.settled_owner() != Some(Owner::Nic) {
                // It has come back just now: the kernel is asked next.
                self.settle_one(inner, epfd, fd, tcp);
                continue;
            }
            let events = readiness::events(tcp) & (registration.events | ALWAYS);
            if events == 0 || registration.is_edge() && !registration.has_edge(tcp, fd, events) {
                continue;
            }
            registration.reported(tcp, fd, events);
            out[count] = epoll_event { events, u64: registration.data };
            count += 1;
            if !registration.is_edge() && !registration.spent {
                again.push(fd);
            }
        }
        // Level-triggered ones are looked at again, behind the others.
        again.into_iter().for_each(|fd| inner.enqueue(fd));
        if inner.queue.is_empty() {
            wait::clear_if(self.watched.load(Ordering::Acquire), self.wake);
        }
        count
    }

    /// What the kernel reported, without what is ours, and without what it should not have said. Whether the bell was among it.
    fn sift(&self, inner: &mut Inner, events: &mut [epoll_event], count: usize) -> (usize, bool) {
        let (mut kept, mut bell) = (0, false);
        for at in 0..count {
            let mut event = events[at];
            let data = event.u64;
            if data == bell_data() {
                bell = true;
                continue;
            }
            if data == wake_data() {
                wait::clear(self.wake);
                continue;
            }
            let fd = inner.by_data.get(&data).and_then(|fds| fds.first().copied());
            let genuine = match fd.and_then(|fd| Some((fd, inner.sockets.get_mut(&fd)?, table::tcp(fd)?))) {
                Some((fd, registration, tcp)) => registration.may_report(tcp, fd, &mut event),
                None => inner.nested_is_ready(data),
            };
            if genuine {
                events[kept] = event;
                kept += 1;
            }
        }
        (kept, bell)
    }

    /// epoll_wait(2) and its kin.
    pub(crate) fn wait(
        &'static self,
        epfd: c_int,
        out: &mut [epoll_event],
        limit: Option<u64>,
        mask: *const libc::sigset_t,
    ) -> c_int {
        let deadline = limit.map(|limit| wait::now() + limit);
        loop {
            let session = process::session();
            if let Some(session) = session {
                session.shared.catch_up(thread::token());
            }
            let mut inner = locked(&self.inner);
            self.take_marks(&mut inner, epfd);
            let ready = self.collect(&mut inner, epfd, out);
            drop(inner);
            let awake = ready > 0 || limit == Some(0);
            let got = self.ask_kernel(session, epfd, &mut out[ready..], if awake { Some(0) } else { deadline }, mask);
            if got < 0 {
                return if ready > 0 { ready as c_int } else { got };
            }
            let mut inner = locked(&self.inner);
            if self.any_marked.load(Ordering::Acquire) {
                self.take_marks(&mut inner, epfd);
            }
            let (kept, bell) = self.sift(&mut inner, &mut out[ready..], got as usize);
            drop(inner);
            if bell && let Some(session) = session {
                session.shared.bell().clear();
                session.shared.catch_up(thread::token());
            }
            if ready + kept > 0 {
                return (ready + kept) as c_int;
            }
            if limit == Some(0) && !self.any_marked.load(Ordering::Acquire)
                || deadline.is_some_and(|deadline| wait::now() >= deadline)
            {
                return 0;
            }
        }
    }

    fn ask_kernel(
        &self,
        session: Option<&Session>,
        epfd: c_int,
        out: &mut [epoll_event],
        deadline: Option<u64>,
        mask: *const libc::sigset_t,
    ) -> c_int {
        if out.is_empty() {
            return 0;
        }
        let left =
            |deadline: Option<u64>| deadline.map_or(-1, |deadline| deadline.saturating_sub(wait::now()).div_ceil(1000) as c_int);
        let ask = |out: &mut [epoll_event], limit| {
            // SAFETY: so many live events; the caller's mask.
            unsafe { real::epoll_pwait(epfd, out.as_mut_ptr(), out.len() as c_int, limit, mask) }
        };
        let (Some(session), false) = (session, deadline == Some(0)) else {
            return ask(out, left(deadline));
        };
        self.sleepers.fetch_add(1, Ordering::AcqRel);
        session.shared.count_sleeper();
        let news = session.shared.has_news(thread::token()) || self.any_marked.load(Ordering::Acquire);
        let got = ask(out, if news { 0 } else { left(deadline) });
        session.shared.uncount_sleeper();
        self.sleepers.fetch_sub(1, Ordering::AcqRel);
        got
    }

    /// Whether anything is ready, for whoever looks at the set from outside.
    pub fn is_ready(&'static self) -> bool {
        let Some(epfd) = locked(&self.fds).first().copied() else { return false };
        if let Some(session) = process::session() {
            session.shared.bell().clear();
            session.shared.catch_up(thread::token());
        }
        let mut inner = locked(&self.inner);
        self.take_marks(&mut inner, epfd);
        let here = inner.queue.iter().any(|fd| {
            let (Some(registration), Some(tcp)) = (inner.sockets.get(fd), table::tcp(*fd)) else { return false };
            let events = readiness::events(tcp) & (registration.events | ALWAYS);
            let edge = || !registration.is_edge() || registration.has_edge(tcp, *fd, events);
            registration.muted && !registration.spent && events != 0 && edge()
        });
        if here {
            return true;
        }
        drop(inner);
        wait::clear(self.wake);
        let mut poll = libc::pollfd { fd: epfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one live pollfd.
        unsafe { real::poll(&mut poll, 1, 0) == 1 }
    }

    /// Somebody polls the set itself.
    pub fn watch(&self) {
        self.watched.store(true, Ordering::Release);
    }
}

impl Inner {
    /// Whether what the kernel says under some data may be said: only of a set in this set must be found out.
    fn nested_is_ready(&self, data: u64) -> bool {
        match self.nested.iter().find(|(_, (known, _))| *known == data) {
            Some((fd, _)) => table::set_of(*fd).is_none_or(Set::is_ready),
            None => true,
        }
    }
}

impl Registration {
    fn is_edge(&self) -> bool {
        self.events & EPOLLET as u32 != 0
    }

    /// Bytes that have come for the socket, ever, and whether the stream has ended.
    fn position(tcp: &Tcp, fd: c_int) -> u32 {
        let taken = tcp.taken.load(Ordering::Relaxed);
        match tcp.managed() {
            Some((connection, session)) if connection.owner() == Owner::Nic => {
                taken.wrapping_add(session.shared.readiness(connection, thread::token()).unread)
            }
            _ => {
                let mut unread: c_int = 0;
                // SAFETY: FIONREAD writes one int.
                unsafe { real::ioctl(fd, libc::FIONREAD, (&raw mut unread).cast()) };
                taken.wrapping_add(unread.max(0) as u32)
            }
        }
    }

    /// Whether an edge-triggered registration has something new to say.
    fn has_edge(&self, tcp: &Tcp, fd: c_int, events: u32) -> bool {
        let end = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR) as u32 != 0;
        if end && !self.seen_end || self.seen_nudges != tcp.nudges.load(Ordering::Acquire) {
            return true;
        }
        if events & EPOLLIN as u32 != 0 && self.seen != Some(Self::position(tcp, fd)) && !(end && self.seen_end) {
            return true;
        }
        events & EPOLLOUT as u32 != 0 && self.seen_stuck != Some(tcp.stuck.load(Ordering::Acquire))
    }

    /// Notes what has been reported.
    fn reported(&mut self, tcp: &Tcp, fd: c_int, events: u32) {
        if self.is_edge() {
            self.seen_nudges = tcp.nudges.load(Ordering::Acquire);
            if events & (EPOLLIN | EPOLLPRI) as u32 != 0 {
                self.seen = Some(Self::position(tcp, fd));
            }
            self.seen_end |= events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR) as u32 != 0;
            if events & EPOLLOUT as u32 != 0 {
                self.seen_stuck = Some(tcp.stuck.load(Ordering::Acquire));
            }
        }
        self.spent = self.events & EPOLLONESHOT as u32 != 0;
    }

    /// Whether the kernel's report counts: not of a connection that the NIC has, and not a second time of what was reported before the
    /// connection came back.
    fn may_report(&mut self, tcp: &Tcp, fd: c_int, event: &mut epoll_event) -> bool {
        if self.muted || self.spent || tcp.settled_owner() == Some(Owner::Nic) {
            return false;
        }
        if let Some((connection, _)) = tcp.managed()
            && connection.moves() != self.moves
        {
            self.moves = connection.moves();
            // Moving makes the kernel say again what it has said.
            self.rearmed = true;
            // It may have been reported in the middle of a move, when its socket was none for a moment.
            let mut poll = libc::pollfd { fd, events: (self.events & 0xffff) as i16, revents: 0 };
            // SAFETY: one live pollfd.
            unsafe { real::poll(&mut poll, 1, 0) };
            event.events &= poll.revents as u16 as u32;
            if event.events == 0 {
                return false;
            }
        }
        let events = event.events;
        if std::mem::take(&mut self.rearmed) && self.is_edge() && !self.has_edge(tcp, fd, events) {
            return false;
        }
        if tcp.is_managed() || self.is_edge() || self.events & EPOLLONESHOT as u32 != 0 {
            self.reported(tcp, fd, events);
        }
        true
    }
}

/// In a child that has inherited sets: they are its parent's, too, and nothing is changed in them from here. The sockets in them stay in
/// the kernel, which alone can tell both.
pub(crate) fn leave_inherited() {
    for (epfd, file) in table::known(0, u32::MAX) {
        let table::File::Set(set) = file else { continue };
        // Whoever held this lock in the parent does not exist here: then nothing is known of the set.
        if let Ok(inner) = set.inner.try_lock() {
            inner.sockets.keys().filter_map(|fd| table::tcp(*fd)).for_each(Tcp::stay);
        }
        table::put(epfd, None);
    }
    if let Ok(mut pool) = POOL.try_lock() {
        pool.clear();
    }
}

/// Every set is brought in line with where connections are: for a child that is about to inherit them.
pub(crate) fn settle() {
    for (epfd, file) in table::known(0, u32::MAX) {
        if let table::File::Set(set) = file {
            let mut inner = locked(&set.inner);
            set.take_marks(&mut inner, epfd);
        }
    }
}
