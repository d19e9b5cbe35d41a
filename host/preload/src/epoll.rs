//! Epoll sets with sockets that may be on the NIC.
//!
//! The program's epoll set stays the kernel's. It reports events of connections in the kernel; the set's [`Interest`]
//! decides which of these the program gets, and adds those of connections on the NIC. The kernel's set also contains
//! the session's doorbell and an eventfd of the set, so that a thread that sleeps in the set is woken by either.
//!
//! A child of fork shares the kernel's set with its parent. It changes nothing there of its own accord, and only
//! translates what the kernel reports ([`leave_inherited`]).
//!
//! Locks are taken in this order: a set's `inner`, the session's events, a socket's list of sets, a set's `marked`.

mod own;

use self::own::{bell_data, end_data, is_own, only_programs, wake_data};
use crate::interest::{self, Interest, Place, Progress, World};
use crate::process::Session;
use crate::sections::Section;
use crate::short_lock::{Held, ShortLock};
use crate::signals::Mark;
use crate::tcp::Tcp;
use crate::wait::Sleeper;
use crate::wake::Wake;
use crate::{faults, leaving, listening, process, readiness, real, table, thread, udp, wait, whole};
use baton_abi::layout::Owner;
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLEXCLUSIVE, EPOLLIN, c_int, epoll_event};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// The program's own call, which writes events there, with a limit in microseconds.
type Native<'a> = &'a dyn Fn(&mut [epoll_event], Option<u64>) -> c_int;

/// How many times an epoll_wait or a poll with a time limit of zero waits for moves to end, a millisecond each time.
pub(crate) const SETTLING_ROUNDS: u32 = 50;

/// A file in a set.
#[derive(Clone, Copy)]
pub(crate) enum File {
    Tcp(&'static Tcp),
    Set(&'static Set),
}

impl PartialEq for File {
    fn eq(&self, other: &File) -> bool {
        match (self, other) {
            (File::Tcp(one), File::Tcp(other)) => std::ptr::eq(*one, *other),
            (File::Set(one), File::Set(other)) => std::ptr::eq(*one, *other),
            _ => false,
        }
    }
}

#[derive(Default)]
pub(crate) struct Inner {
    pub interest: Interest<File>,
    /// The doorbell that was added to the kernel's set: its session's.
    pub bell: Option<c_int>,
    /// The set's eventfd was added to it.
    pub wakes: bool,
}

/// An epoll set. Never freed; reused for one descriptor after another.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Set {
    pub inner: Mutex<Inner>,
    /// Slots of sockets whose events may have changed.
    marked: Mutex<Vec<u32>>,
    pub any_marked: AtomicBool,
    pub wake: Wake,
    pub sleepers: AtomicU32,
    /// Threads that poll the set itself, and the sets that contain it.
    pub watchers: readiness::Watchers,
    /// The set belongs to the process from which this one was forked, or to several. A thread of the parent may have
    /// held the set's locks during the fork; in this process those are never released.
    inherited: AtomicBool,
    /// A thread of the parent held `inner` during the fork: this process cannot read what the set contains.
    unknown: AtomicBool,
    pub fds: Mutex<Vec<c_int>>,
}

static POOL: ShortLock<Vec<&'static Set>> = ShortLock::new(Vec::new());
static OURS: ShortLock<Vec<c_int>> = ShortLock::new(Vec::new());

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the locks of this file's lists, for a fork.
pub(crate) fn hold() -> Vec<Held> {
    vec![POOL.hold(), OURS.hold()]
}

/// Forgets the parent's sets that are not in use, and closes its sets' eventfds, in a child of fork.
pub(crate) fn forget_inherited() {
    if let Some(mut pool) = POOL.try_lock() {
        pool.clear();
    }
    wait::close_all(&OURS);
}

/// Whether a descriptor is a set's eventfd.
pub(crate) fn is_ours(fd: c_int) -> bool {
    OURS.try_lock().is_some_and(|ours| ours.contains(&fd))
}

/// The lowest descriptor of a set's eventfd from `first` on.
pub(crate) fn next_of_ours(first: c_int) -> Option<c_int> {
    OURS.try_lock()?.iter().copied().filter(|fd| *fd >= first).min()
}

/// Handles a set that has just been made.
pub(crate) fn created(epfd: c_int) -> c_int {
    if epfd >= 0 && process::plan().is_some() {
        let _whole = whole::Whole::begin();
        table::put(epfd, None);
        known_set(epfd);
    }
    epfd
}

/// The set behind a descriptor; begins to track it.
fn known_set(epfd: c_int) -> &'static Set {
    if let Some(set) = table::set_of(epfd) {
        return set;
    }
    let set = POOL.lock().pop().unwrap_or_else(|| Box::leak(Box::<Set>::default()));
    *locked(&set.fds) = vec![epfd];
    table::put(epfd, Some(table::File::Set(set)));
    set
}

/// epoll_ctl(2).
///
/// # Safety
/// As epoll_ctl(2).
pub(crate) unsafe fn control(epfd: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: this function's `# Safety` is epoll_ctl(2)'s.
    let native = || unsafe { real::epoll_ctl(epfd, operation, fd, event) };
    let file = match table::get(fd) {
        Some(table::File::Tcp(tcp)) => File::Tcp(tcp),
        Some(table::File::Set(set)) => File::Set(set),
        Some(table::File::Ring(_)) | None => return native(),
    };
    let given = match operation {
        // It has no event, and its pointer is often null.
        EPOLL_CTL_DEL => None,
        EPOLL_CTL_ADD | EPOLL_CTL_MOD if epfd != fd => match faults::read(event.cast_const()) {
            Some(event) => Some((event.events, event.u64)),
            None => return native(),
        },
        _ => return native(),
    };
    // In a process that is closed for good nothing moves any more: a set that is waited for past this library must not
    // get registrations with the library's data.
    let is_known = table::set_of(epfd).is_some();
    if table::tcp(epfd).is_some() || !is_known && process::is_closed_for_good() {
        return native();
    }
    let is_foreign = !process::is_mine() || table::set_of(epfd).is_some_and(Set::is_inherited);
    if is_foreign {
        // With one set shared by two processes, only the kernel can report to both.
        if let File::Tcp(tcp) = file {
            tcp.give_back("epoll set of several processes", baton_protocol::program::Until::Never);
        }
        return native();
    }
    known_set(epfd).control(epfd, operation, fd, file, given)
}

/// The kernel's set.
pub(crate) struct Kernel {
    epfd: c_int,
    /// What could not be determined of the sets inside this one.
    pub doubt: readiness::Doubt,
}

impl Kernel {
    pub fn of(epfd: c_int) -> Kernel {
        Kernel { epfd, doubt: readiness::Doubt::default() }
    }
}

impl World for Kernel {
    type File = File;

    fn place(&mut self, file: File) -> (Place, u32) {
        let File::Tcp(tcp) = file else { return (Place::Set, 0) };
        let unmanaged = if tcp.is_being_handed_over() { Place::Moving } else { Place::Kernel };
        let Some((connection, _)) = tcp.managed() else { return (unmanaged, 0) };
        let place = match connection.owner() {
            Owner::Nic => Place::Nic,
            Owner::Moving => Place::Moving,
            _ => Place::Kernel,
        };
        (place, connection.moves())
    }

    fn on_nic(&mut self, file: File) -> u32 {
        match file {
            File::Tcp(tcp) => readiness::events(tcp),
            File::Set(set) => readiness::of_set(set, &mut self.doubt),
        }
    }

    fn beside_kernel(&mut self, file: File) -> u32 {
        if matches!(file, File::Tcp(tcp) if tcp.completions.are_pending()) { libc::EPOLLERR as u32 } else { 0 }
    }

    fn progress(&mut self, file: File, fd: c_int) -> Progress {
        let tcp = match file {
            File::Tcp(tcp) => tcp,
            File::Set(set) => return Progress { received: set.watchers.arrivals.load(Ordering::Acquire), ..Progress::default() },
        };
        Progress {
            received: readiness::position(tcp, fd),
            stuck: tcp.stuck.load(Ordering::Acquire),
            rearms: tcp.rearms.load(Ordering::Acquire),
            completions: tcp.completions.made(),
        }
    }

    fn may_move(&mut self, file: File) -> bool {
        match file {
            File::Tcp(tcp) => tcp.may_move() || tcp.completions.are_ours() == Some(true),
            File::Set(_) => true,
        }
    }

    fn set_is_ready(&mut self, file: File) -> bool {
        matches!(file, File::Set(set) if readiness::in_kernel(set, &mut self.doubt))
    }

    fn report(&mut self, out: &mut [epoll_event]) -> usize {
        // Without the program's signal mask: the kernel's epoll_pwait does not deliver signals either when it has
        // events to report.
        ask(self.epfd, out, Some(0), std::ptr::null()).max(0) as usize
    }

    fn register(&mut self, operation: c_int, fd: c_int, events: u32, data: u64) -> bool {
        let mut event = epoll_event { events, u64: data };
        // SAFETY: one live event.
        unsafe { real::epoll_ctl(self.epfd, operation, fd, &mut event) == 0 }
    }
}

impl Set {
    /// In a child of fork: records that the set is shared with the parent.
    pub fn inherit(&self) {
        let is_held = matches!(self.inner.try_lock(), Err(TryLockError::WouldBlock));
        self.unknown.store(is_held, Ordering::Relaxed);
        self.inherited.store(true, Ordering::Relaxed);
    }

    pub fn is_inherited(&self) -> bool {
        self.inherited.load(Ordering::Relaxed)
    }

    fn control(&'static self, epfd: c_int, operation: c_int, fd: c_int, file: File, given: Option<(u32, u64)>) -> c_int {
        let mut inner = locked(&self.inner);
        let kernel = &mut Kernel::of(epfd);
        let Some(given) = given else {
            let (done, slot) = inner.interest.delete(kernel, fd, file);
            if let Some(slot) = slot {
                self.forget_in(file, slot);
            }
            return if done { 0 } else { -1 };
        };
        let known = inner.interest.find(fd, file);
        let Some(slot) = inner.interest.set(kernel, operation, fd, file, given) else { return -1 };
        match file {
            File::Tcp(tcp) => {
                if known.is_none() {
                    tcp.add_set(self, slot);
                }
                if tcp.is_managed() || tcp.completions.are_ours() == Some(true) {
                    self.join_bell(&mut inner, epfd);
                    // The connection may have moved before this set was added to the socket.
                    inner.interest.enqueue(slot);
                    drop(inner);
                    self.announce();
                }
            }
            File::Set(other) => {
                if known.is_none() {
                    readiness::add_parent(other, self, slot);
                }
                self.join_bell(&mut inner, epfd);
                // The set may have had something to report before.
                inner.interest.enqueue(slot);
                drop(inner);
                self.announce();
            }
        }
        0
    }

    /// Adds the session's doorbell, its control connection and the set's eventfd to the kernel's set; without a session
    /// the eventfd alone.
    fn join_bell(&self, inner: &mut Inner, epfd: c_int) {
        if self.is_inherited() {
            // Another process would get this library's data from the shared set, and could not clear the doorbell or
            // the eventfd.
            return;
        }
        if !inner.wakes {
            inner.wakes = self.register_wake(epfd);
        }
        let Some(session) = process::session() else { return };
        let bell = session.shared.bell().as_fd().as_raw_fd();
        if inner.bell == Some(bell) {
            return;
        }
        inner.bell = Some(bell);
        self.register_own(epfd);
    }

    /// Adds the session's doorbell and control connection to the kernel's set.
    pub fn register_own(&self, epfd: c_int) {
        let kernel = &mut Kernel::of(epfd);
        if let Some(session) = process::session() {
            let bell = session.shared.bell().as_fd().as_raw_fd();
            kernel.register(EPOLL_CTL_ADD, bell, (EPOLLIN | EPOLLEXCLUSIVE) as u32, bell_data());
            // A hang-up stays pending, so every thread that sleeps in this set sees it.
            kernel.register(EPOLL_CTL_ADD, session.shared.hangs_up().as_raw_fd(), 0, end_data());
        }
    }

    /// Adds the set's eventfd to the kernel's set. False if there is none. The caller has `inner`.
    pub fn register_wake(&self, epfd: c_int) -> bool {
        let wake = self.wake.made(|| {
            let fd = wait::eventfd();
            OURS.lock().extend((fd >= 0).then_some(fd));
            fd
        });
        let Some(wake) = wake else { return false };
        Kernel::of(epfd).register(EPOLL_CTL_ADD, wake, EPOLLIN as u32, wake_data());
        true
    }

    /// Prepares the set for a socket that may go to the NIC from now on.
    pub fn prepare_for_nic(&self) {
        let epfd = locked(&self.fds).first().copied();
        if let Some(epfd) = epfd {
            self.join_bell(&mut locked(&self.inner), epfd);
            // A thread that fell asleep in the set before the session was opened is not counted as a sleeper, so
            // `alert` would not wake it.
            self.wake.signal();
            readiness::tell(self);
            readiness::prepare_parents(self);
        }
    }

    /// Marks a socket's slot, since the socket's events may have changed. The caller holds the lock of the session's
    /// events.
    pub fn mark(&self, slot: u32) {
        locked(&self.marked).push(slot);
        // A thread that is about to sleep counts itself first, then reads this flag.
        self.any_marked.store(true, Ordering::SeqCst);
        self.announce();
    }

    /// Wakes threads that sleep in the set.
    pub fn alert(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake.signal();
        }
    }

    /// Wakes the threads that sleep in the set, and those that wait for the set itself.
    fn announce(&self) {
        self.alert();
        readiness::tell(self);
    }

    /// Runs a change with the interest list and one of the set's descriptors.
    pub fn with_interest(&self, change: impl FnOnce(&mut Interest<File>, &mut Kernel)) {
        let epfd = locked(&self.fds).first().copied();
        change(&mut locked(&self.inner).interest, &mut Kernel::of(epfd.unwrap_or(-1)));
    }

    /// Adds a descriptor of this library's beside a socket, with the events and flags of the program's registration of
    /// the socket.
    pub fn watch_beside(&self, slot: u32, tcp: &'static Tcp, ours: c_int) {
        self.with_interest(|interest, kernel| interest.watch_beside(kernel, slot, File::Tcp(tcp), ours));
    }

    /// Undoes [`Set::watch_beside`].
    pub fn stop_watching_beside(&self, ours: c_int) {
        self.with_interest(|interest, kernel| interest.stop_watching_beside(kernel, ours));
    }

    /// For a set inherited from the parent: whether a descriptor was watched beside this one at the time of the fork.
    pub fn has_beside(&self, fd: c_int) -> bool {
        !self.unknown.load(Ordering::Relaxed) && locked(&self.inner).interest.has_beside(fd)
    }

    /// Removes a socket that is about to be closed for good.
    pub fn forget(&'static self, slot: u32, tcp: &'static Tcp) {
        self.with_interest(|interest, kernel| interest.forget(kernel, slot, File::Tcp(tcp)));
    }

    /// Removes a socket that stays in the kernel from now on.
    pub fn release(&'static self, slot: u32, tcp: &'static Tcp) {
        self.with_interest(|interest, kernel| {
            interest.settle(kernel, slot);
            interest.release(kernel, slot, File::Tcp(tcp));
        });
    }

    /// Gives the kernel the program's own registration of a socket under this descriptor.
    pub fn release_number(&'static self, fd: c_int, tcp: &'static Tcp) {
        if self.is_inherited() {
            return;
        }
        let slot = locked(&self.inner).interest.find(fd, File::Tcp(tcp));
        if let Some(slot) = slot {
            tcp.remove_set(self, slot);
            self.release(slot, tcp);
        }
    }

    /// Replaces every registration by the program's own, and stops tracking the set, since it is waited for past this
    /// library.
    pub fn leave_to_kernel(&'static self) {
        if self.is_inherited() {
            return;
        }
        let fds = locked(&self.fds).clone();
        if let (Some(epfd), Some(session)) = (fds.first(), process::session()) {
            self.leave(session, *epfd);
        }
        let files: Vec<(u32, File)> = locked(&self.inner).interest.files().collect();
        self.with_interest(|interest, kernel| {
            interest.release_all(kernel);
            self.remove_wake(kernel.epfd);
        });
        files.into_iter().for_each(|(slot, file)| self.forget_in(file, slot));
        fds.into_iter().for_each(|fd| table::put(fd, None));
    }

    /// Removes the library's own descriptors from the kernel's set once more: another thread may have added them again
    /// while [`Set::leave_to_kernel`] ran. By now the set counts as shared ([`Set::inherit`]), so none is added after
    /// this.
    pub fn leave_to_several(&self, epfd: c_int) {
        if let Some(session) = process::session() {
            self.leave(session, epfd);
        }
        let mut inner = locked(&self.inner);
        self.remove_wake(epfd);
        inner.wakes = false;
    }

    /// Removes this set from a file's list of sets.
    fn forget_in(&'static self, file: File, slot: u32) {
        match file {
            File::Tcp(tcp) => tcp.remove_set(self, slot),
            File::Set(other) => readiness::remove_parent(other, self, slot),
        }
    }

    /// Removes the set's eventfd from the kernel's set.
    fn remove_wake(&self, epfd: c_int) {
        if let Some(wake) = self.wake.get() {
            // SAFETY: EPOLL_CTL_DEL does not read the event.
            unsafe { real::epoll_ctl(epfd, EPOLL_CTL_DEL, wake, std::ptr::null_mut()) };
        }
    }

    /// Removes a session from the kernel's set.
    fn leave(&self, session: &Session, epfd: c_int) {
        if locked(&self.inner).bell.take().is_some() {
            for fd in [session.shared.bell().as_fd(), session.shared.hangs_up()] {
                // SAFETY: EPOLL_CTL_DEL does not read the event.
                unsafe { real::epoll_ctl(epfd, EPOLL_CTL_DEL, fd.as_raw_fd(), std::ptr::null_mut()) };
            }
        }
    }

    /// Whether a socket is registered under this descriptor.
    pub fn has_number(&self, slot: u32, fd: c_int, tcp: &'static Tcp) -> bool {
        locked(&self.inner).interest.find(fd, File::Tcp(tcp)) == Some(slot)
    }

    /// Handles the closing of one of several descriptors of a socket.
    pub fn remove_number(&self, slot: u32, fd: c_int) {
        self.with_interest(|interest, kernel| {
            interest.settle(kernel, slot);
            interest.remove_number(slot, fd);
        });
    }

    /// Adds another descriptor of the same set.
    pub fn add_fd(&self, fd: c_int) {
        if !self.is_inherited() {
            locked(&self.fds).push(fd);
        }
    }

    /// Handles the closing of a descriptor of the set, before it is closed.
    pub fn remove_fd(&'static self, fd: c_int) {
        table::put(fd, None);
        if self.is_inherited() {
            // The lock is not taken: a thread of the parent may have held it during the fork.
            return;
        }
        let mut fds = locked(&self.fds);
        fds.retain(|other| *other != fd);
        let left = fds.first().copied();
        drop(fds);
        udp::set_closed(fd, left);
        if left.is_some() {
            return readiness::remove_number(self, fd);
        }
        readiness::leave_parents(self);
        let inner = std::mem::take(&mut *locked(&self.inner));
        inner.interest.files().for_each(|(slot, file)| self.forget_in(file, slot));
        locked(&self.marked).clear();
        self.wake.renew();
        POOL.lock().push(self);
    }

    /// Queues marked sockets for a check.
    pub fn take_marks(&self, inner: &mut Inner, epfd: c_int) {
        if !self.any_marked.swap(false, Ordering::SeqCst) {
            return;
        }
        self.join_bell(inner, epfd);
        // The list is taken out first, since checking a socket may mark others, which locks the list.
        let marked = std::mem::take(&mut *locked(&self.marked));
        for slot in marked {
            let kernel = &mut Kernel::of(epfd);
            inner.interest.settle(kernel, slot);
            inner.interest.enqueue(slot);
            if self.watchers.has_parents() && inner.interest.has_new_events(kernel, slot) {
                self.watchers.arrivals.fetch_add(1, Ordering::AcqRel);
            }
        }
    }

    /// Whether a kernel event's data is this library's own; if so, notes which registration it is.
    fn own(&self, data: u64, bell: &mut bool, end: &mut bool) -> bool {
        *bell |= data == bell_data();
        *end |= data == end_data();
        if data == wake_data() {
            self.wake.clear();
        }
        is_own(data)
    }

    /// epoll_wait(2) and its variants, with a limit in microseconds.
    pub(crate) fn wait(
        &'static self,
        epfd: c_int,
        out: &mut [epoll_event],
        limit: Option<u64>,
        mask: *const libc::sigset_t,
        native: Native<'_>,
    ) -> c_int {
        let native: Native<'_> = &|out, left| leaving::asleep_again(|| native(out, left));
        if self.is_inherited() {
            return self.wait_inherited(out, limit, native);
        }
        let Some(mut section) = Section::enter() else { return native(out, limit) };
        let deadline = limit.map(wait::after);
        let (mut rounds, begun, owner) = (0, Mark::now(), process::owner());
        loop {
            let mut session = process::session();
            if let Some(session) = session {
                session.shared.catch_up(thread::token());
            }
            let mut inner = locked(&self.inner);
            self.take_marks(&mut inner, epfd);
            let kernel = &mut Kernel::of(epfd);
            let (mut bell, mut end) = (false, limit == Some(0) && session.is_some_and(Session::is_over));
            let mut count = inner.interest.gather(kernel, out, |data| self.own(data, &mut bell, &mut end));
            let mut moving = inner.interest.moving.or(kernel.doubt.moving.map(File::Tcp));
            let mut renewed = false;
            if count == 0 {
                drop(inner);
                let until = if moving.is_some() { Some(0) } else { deadline };
                let got = if until == Some(0) || limit == Some(0) {
                    ask(epfd, out, Some(0), mask)
                } else {
                    let (got, still) = self.sleep(section, session, out, native, deadline);
                    session = still;
                    match Section::enter() {
                        Some(again) => section = again,
                        None => return go_on(out, got, deadline, native, programs_own),
                    }
                    readiness::pass_on(session);
                    got
                };
                if got < 0 {
                    return got;
                }
                if self.is_inherited() {
                    // The set is shared with another process by now; or a signal handler has forked, this is the child,
                    // and the events are the parent's.
                    drop(section);
                    if !process::is_still(owner) {
                        return thread::fail(libc::EINTR) as c_int;
                    }
                    return go_on(out, got, deadline, native, programs_own);
                }
                inner = locked(&self.inner);
                count = inner.interest.take_in(kernel, out, got as usize, |data| self.own(data, &mut bell, &mut end));
                moving = moving.or(inner.interest.moving).or(kernel.doubt.moving.map(File::Tcp));
                renewed = inner.interest.renewed || kernel.doubt.renewed;
            }
            // A socket that is marked by now may have written the eventfd before this thread cleared it: then other
            // threads have to be woken again.
            let left = inner.interest.has_queued() && count > 0 || self.any_marked.load(Ordering::SeqCst);
            let ended = std::mem::take(&mut inner.interest.ended);
            drop(inner);
            // The end may have been noticed where a set's lock was held, so that the session could not be left there.
            end |= !ended.is_empty() || session.is_some_and(|session| session.shared.has_ended());
            ended.into_iter().for_each(leave_queue);
            if bell && let Some(session) = session {
                session.shared.clear_bell();
                session.shared.catch_up(thread::token());
            }
            if end && let Some(session) = session {
                session.leave_if_over();
            }
            if left {
                // The kernel likewise wakes the next thread while anything may be ready.
                self.alert();
            }
            if count > 0 {
                return count as c_int;
            }
            if let (Some(File::Tcp(tcp)), true) = (moving, limit != Some(0) || rounds < SETTLING_ROUNDS) {
                rounds += 1;
                tcp.wait_a_little();
            } else if renewed && rounds < SETTLING_ROUNDS {
                // The kernel answered before the registrations were brought in line: ask again.
                rounds += 1;
                continue;
            } else if limit == Some(0) && !readiness::is_marked(self, session) {
                return 0;
            }
            if limit != Some(0) && deadline.is_some_and(|deadline| wait::now() >= deadline) {
                return 0;
            }
            if limit != Some(0) && begun.is_over(false) {
                // A signal handler has run while this thread was awake to handle another socket's events.
                return thread::fail(libc::EINTR) as c_int;
            }
        }
    }

    /// Makes the program's own call, which sleeps in the kernel's set. Returns its result, and the session as
    /// [`Sleeper::end`] does.
    fn sleep(
        &self,
        section: Section,
        session: Option<&'static Session>,
        out: &mut [epoll_event],
        native: Native<'_>,
        deadline: Option<u64>,
    ) -> (c_int, Option<&'static Session>) {
        // A thread that marks a socket, or adds a socket that has moved already, reads this count. So this thread
        // counts itself also if there is no session yet.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let sleeper = Sleeper::begin(session);
        let pending =
            self.any_marked.load(Ordering::SeqCst) || session.is_some_and(|session| session.shared.has_events(thread::token()));
        let left = if pending { Some(0) } else { left_until(self.wake.looks(deadline)) };
        drop(section);
        let got = native(out, left);
        let errno = thread::errno();
        let session = sleeper.end();
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        thread::fail(errno);
        (got, session)
    }

    /// epoll_wait in a child of fork: the kernel's set is its parent's, too.
    fn wait_inherited(&self, out: &mut [epoll_event], limit: Option<u64>, native: Native<'_>) -> c_int {
        let deadline = limit.map(wait::after);
        let got = native(out, limit);
        let data_of = |data| {
            if !interest::is_token(data) {
                return programs_own(data);
            }
            let is_known = !self.unknown.load(Ordering::Relaxed);
            is_known.then(|| locked(&self.inner).interest.translate(data)).flatten()
        };
        go_on(out, got, deadline, native, data_of)
    }
}

/// Handles the hang-up of a descriptor that is watched beside a file: a listener's queue.
fn leave_queue(file: File) {
    if let File::Tcp(tcp) = file {
        listening::leave_ended(tcp);
    }
}

/// The data of an event if it comes from a registration of the program's. After the library has withdrawn, events of
/// the library's registrations are dropped: each registration was replaced by the program's own, and the kernel checked
/// the file's readiness when that happened.
fn programs_own(data: u64) -> Option<u64> {
    (!is_own(data) && !interest::is_token(data)).then_some(data)
}

/// Finishes an epoll_wait that has `got` events, for a set of which the kernel alone reports from now on.
fn go_on(
    out: &mut [epoll_event],
    got: c_int,
    deadline: Option<u64>,
    native: Native<'_>,
    data_of: impl Fn(u64) -> Option<u64>,
) -> c_int {
    let is_over = || deadline.is_some_and(|deadline| wait::now() >= deadline);
    only_programs(out, got, data_of, is_over, |out| native(out, left_until(deadline)))
}

/// Microseconds until a deadline.
fn left_until(deadline: Option<u64>) -> Option<u64> {
    deadline.map(|deadline| deadline.saturating_sub(wait::now()))
}

/// epoll_pwait(2) until `deadline` (microseconds of the monotonic clock; 0 is in the past).
fn ask(epfd: c_int, out: &mut [epoll_event], deadline: Option<u64>, mask: *const libc::sigset_t) -> c_int {
    let left = match deadline {
        None => -1,
        Some(0) => 0,
        Some(deadline) => deadline.saturating_sub(wait::now()).div_ceil(1000).min(c_int::MAX as u64) as c_int,
    };
    // SAFETY: `out` is a live slice of that length; `mask` is the program's own, or null.
    let mut ask = || unsafe { real::epoll_pwait(epfd, out.as_mut_ptr(), out.len() as c_int, left, mask) };
    // With a mask the call may deliver signals.
    if mask.is_null() { ask() } else { leaving::asleep(ask) }
}

/// Handles inherited sets in a child of fork. The child shares them with the parent and changes nothing in them. Their
/// sockets stay in the kernel, since only the kernel can report to both processes.
pub(crate) fn leave_inherited() {
    for (_, file) in table::known(0, u32::MAX) {
        let table::File::Set(set) = file else { continue };
        set.inherit();
        // If a thread of the parent held this lock during the fork, it is never released in this process, which then
        // cannot read what the set contains.
        if let Ok(inner) = set.inner.try_lock() {
            for (_, file) in inner.interest.files() {
                if let File::Tcp(parents) = file {
                    parents.descriptors().into_iter().filter_map(table::tcp).for_each(Tcp::stay);
                }
            }
        }
    }
}

/// Brings the kernel's registrations of every set in line with where connections are, for a child that is about to
/// inherit the sets.
pub(crate) fn settle() {
    for (epfd, file) in table::known(0, u32::MAX) {
        if let table::File::Set(set) = file
            && !set.is_inherited()
        {
            let mut inner = locked(&set.inner);
            set.take_marks(&mut inner, epfd);
            let slots: Vec<u32> = inner.interest.files().map(|(slot, _)| slot).collect();
            slots.into_iter().for_each(|slot| {
                inner.interest.settle(&mut Kernel::of(epfd), slot);
            });
        }
    }
}

/// Withdrawal: in every set that this process does not share, replaces the kernel's registrations by the program's own,
/// and removes this library's. The caller is the only thread inside.
pub(crate) fn release_all() {
    for (epfd, file) in table::known(0, u32::MAX) {
        let table::File::Set(set) = file else { continue };
        if set.is_inherited() {
            continue;
        }
        locked(&set.inner).interest.release_all(&mut Kernel::of(epfd));
        set.remove_wake(epfd);
        table::put(epfd, None);
    }
    wait::close_all(&OURS);
}

/// Removes a session that has ended from every set.
pub(crate) fn leave(session: &Session) {
    for (epfd, file) in table::known(0, u32::MAX) {
        if let table::File::Set(set) = file
            && !set.is_inherited()
        {
            set.leave(session, epfd);
        }
    }
}
