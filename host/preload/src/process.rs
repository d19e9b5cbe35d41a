//! This process: its configuration, its session with the agent, and what happens to both when it forks.

use crate::sections::{self, Section};
use crate::tcp::Tcp;
use crate::{faults, filters, forks, messages, real, starts, table, tcp, thread, wait};
use baton_abi::layout::session::{HEAP, MAX_CONNECTIONS};
use baton_client::address_space::{self, RESERVE};
use baton_client::rules::{Offload, RUN_VARIABLE, Rule, Run};
use baton_client::{DESCRIPTORS, Listener, Shared};
use baton_linux::control::Channel;
use baton_linux::process::{Undisturbed, variable};
use baton_linux::trust;
use baton_protocol::native::Native;
use baton_protocol::program::{Answer, Ask, Opening, Request, Until};
use libc::c_int;
use std::collections::VecDeque;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

/// The configuration that the program was started with.
pub(crate) struct Plan {
    run: Run,
    pub rules: Vec<Rule>,
    program: String,
}

/// A session. It is never freed while this process lives, only abandoned by a fork.
pub(crate) struct Session {
    pub shared: Shared,
    pub fds: [c_int; DESCRIPTORS],
    /// Sockets by connection number. Read for every event of the NIC's, so without a lock.
    by_number: Box<[AtomicPtr<Tcp>]>,
}

static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
static SESSION: AtomicPtr<Session> = AtomicPtr::new(std::ptr::null_mut());
/// Process id to which memory and session belong: a child of vfork shares both but must not use them.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// No connection of this process may be offloaded any more: the process has set a seccomp filter, or makes calls that
/// this library cannot see.
static CLOSED: AtomicBool = AtomicBool::new(false);
/// This process was made past the library, or by a call after which it may not lock or allocate: it has no plan, so all
/// that it opens stays in the kernel.
static UNPREPARED: AtomicBool = AtomicBool::new(false);
/// Why the process was closed for good ([`CLOSED`]), and whether that was reported to the agent.
static WHY: OnceLock<Native> = OnceLock::new();
static SAID: AtomicBool = AtomicBool::new(false);
static OPENING: Mutex<()> = Mutex::new(());
/// The last session that ended. The next one reuses its descriptors' numbers, so that none of them becomes the
/// program's while a late thread may still use it.
static LEFT: AtomicPtr<Session> = AtomicPtr::new(std::ptr::null_mut());
/// Time (microseconds of the monotonic clock) before which no attempt is made to reach the agent.
static NOT_BEFORE: AtomicU64 = AtomicU64::new(0);

/// The cause for restoring connections before a process filters its system calls.
pub(crate) const SECCOMP: &str = "seccomp";

/// Microseconds between attempts to reach the agent.
const AGAIN: u64 = 1_000_000;

/// The least RLIMIT_NOFILE for a session: below that the library's own descriptors would be too large a part of it.
const LEAST_DESCRIPTORS: u64 = 48;

/// Longest time that a program waits for the agent's answer to a notification.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

fn identity() -> u32 {
    std::process::id()
}

/// Reads the configuration once; None if the program does not run under Baton.
pub(crate) fn plan() -> Option<&'static Plan> {
    if UNPREPARED.load(Ordering::Relaxed) || sections::is_withdrawn() || table::is_wiped() {
        return None;
    }
    PLAN.get_or_init(|| {
        let text = variable(RUN_VARIABLE)?;
        let run: Run = match serde_json::from_slice(text.as_bytes()) {
            Ok(run) => run,
            Err(error) => {
                let line = format!(
                    "baton: cannot read {RUN_VARIABLE} ({error}): this program runs without Baton; start it with `baton run`, which sets that variable\n"
                );
                messages::say(line.as_bytes());
                return None;
            }
        };
        messages::remember(&run);
        // The program may become a user that others are, too.
        trust::believe(run.user);
        if filters::withdraw_if_confined(&run) {
            return None;
        }
        let program = std::fs::read_link("/proc/self/exe").ok();
        let program = program.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())).unwrap_or_default();
        let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let cgroup = cgroup.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default().to_owned();
        // A program may have been started by a link with another name.
        let started_as = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let names = [program.as_str(), started_as.trim_end_matches('\n')];
        let fits = |rule: &&Rule| names.iter().any(|name| rule.fits_program(name, &cgroup));
        let rules: Vec<Rule> = run.rules.iter().filter(fits).cloned().collect();
        Some(Plan { run, rules, program })
    })
    .as_ref()
}

impl Plan {
    /// The configuration that `baton run` has passed on.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// The program's name: that of its file.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Whether the agent moves connections at random.
    pub fn flips(&self) -> bool {
        self.run.flips
    }

    /// Whether the NIC makes the program's connections where it can.
    pub fn is_full(&self) -> bool {
        self.run.offload == Offload::Full
    }

    /// Whether connections are handed over as soon as their rule matches, even if the move does not pay: for tests of
    /// moves.
    pub fn is_eager(&self) -> bool {
        self.run.flips || self.run.eager
    }
}

/// The process that this memory belongs to.
pub(crate) fn owner() -> u32 {
    OWNER.load(Ordering::Acquire)
}

/// Whether this is still the process in which [`owner`] returned `before`. A signal handler may have forked in between:
/// then the interrupted call returns in the child, too.
pub(crate) fn is_still(before: u32) -> bool {
    owner() == before && !table::is_wiped()
}

/// The session, if there is one.
#[inline(always)]
pub(crate) fn session() -> Option<&'static Session> {
    let session = SESSION.load(Ordering::Acquire);
    // SAFETY: sessions are never freed.
    if session.is_null() { None } else { Some(unsafe { &*session }) }
}

/// The session; opens one if there is none.
pub(crate) fn open_session() -> Option<&'static Session> {
    if is_closed() { None } else { open(|| Some(hold_opening())) }
}

/// As [`open_session`], but does not wait: None if another thread is opening the session.
pub(crate) fn open_session_at_once() -> Option<&'static Session> {
    let hold = || match OPENING.try_lock() {
        Ok(one) => Some(one),
        Err(TryLockError::Poisoned(one)) => Some(one.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    if is_closed() { None } else { open(hold) }
}

/// Reports to the agent, over `channel`, why this program or one of its connections stays in the kernel. Returns
/// whether the agent has answered.
pub(crate) fn say(plan: &Plan, channel: &Channel, why: Native) -> bool {
    let request = Request { tag: 1, body: Ask::Native { program: Some(plan.program().to_owned()), why } };
    channel.send(&request, &[]).and_then(|()| channel.receive_within::<Answer>(PATIENCE)).is_ok()
}

/// As [`say`], in the session if there is one, else over a connection for this message only: a session would keep
/// descriptors and be of no other use. After an agent that has not answered, no attempt is made for [`AGAIN`].
pub(crate) fn tell(why: Native) -> bool {
    if !is_mine() {
        return false;
    }
    if let Some(session) = session().filter(|session| !session.is_over()) {
        return session.shared.report_native(why).is_ok();
    }
    let Some(plan) = plan() else { return false };
    if wait::now() < NOT_BEFORE.load(Ordering::Acquire) {
        return false;
    }
    // A signal handler that never returns would leave the channel's descriptor open in the program.
    let _undisturbed = Undisturbed::begin();
    let reported = Channel::connect_within(&plan.run.socket, PATIENCE).is_ok_and(|channel| say(plan, &channel, why));
    if !reported {
        NOT_BEFORE.store(wait::now() + AGAIN, Ordering::Release);
    }
    reported
}

/// Reports to the agent, once, why no connection moves any more. Called when a hand-over would be due.
#[cold]
pub(crate) fn report_closed() {
    let Some(why) = WHY.get() else { return };
    if SAID.swap(true, Ordering::AcqRel) {
        return;
    }
    let errno = thread::errno();
    if !tell(why.clone()) {
        SAID.store(false, Ordering::Release);
    }
    thread::set_errno(errno);
}

fn open(hold: impl FnOnce() -> Option<MutexGuard<'static, ()>>) -> Option<&'static Session> {
    if let Some(session) = session() {
        if !is_mine() {
            return None;
        }
        if !session.shared.notice_end_sometimes(thread::token()) {
            return Some(session);
        }
        session.leave();
    }
    let plan = plan()?;
    if wait::now() < NOT_BEFORE.load(Ordering::Acquire) {
        return None;
    }
    if let Some((why, reported)) = what_is_scarce() {
        report_scarce(why, reported);
        NOT_BEFORE.store(wait::now() + AGAIN, Ordering::Release);
        return None;
    }
    // A signal handler that forks here would wait for ever for the lock that its own thread holds.
    let _undisturbed = Undisturbed::begin();
    let _one = hold()?;
    if let Some(session) = session() {
        return Some(session);
    }
    // Another thread may have tried in vain while this one waited for the lock.
    if wait::now() < NOT_BEFORE.load(Ordering::Acquire) {
        return None;
    }
    let opening = Opening {
        group: plan.run.group,
        program: plan.program.clone(),
        fast_path: plan.run.offload == Offload::FastPath,
        ..Opening::alone()
    };
    let listener = Listener(Box::new(|number| {
        if let Some(tcp) = session().and_then(|session| session.socket(number)) {
            tcp.changed();
        }
    }));
    let mut places: VecDeque<c_int> = left().into_iter().flat_map(|left| left.fds).filter(|fd| *fd >= 0).collect();
    // The previous session's descriptor numbers, or high ones that the program does not expect to get.
    let renumber = |fd| match places.pop_front() {
        Some(place) => {
            LEFT.store(std::ptr::null_mut(), Ordering::Release);
            // SAFETY: the number belongs to a session that has ended and never closes it itself.
            baton_linux::process::put_in_place_of(fd, unsafe { OwnedFd::from_raw_fd(place) })
        }
        None => baton_linux::process::lift(fd, lowest_descriptor()),
    };
    let opened = Shared::connect_with(&plan.run.socket, opening, listener, renumber);
    if left().is_none() {
        for place in places {
            // SAFETY: the number belongs to a session that has ended and never closes it itself.
            drop(unsafe { OwnedFd::from_raw_fd(place) });
        }
    }
    match opened {
        Ok(mut shared) => {
            shared.use_interface(plan.run.interface, plan.run.nagle);
            shared.wait_until_writable();
            let fds = shared.descriptors();
            let by_number = (0..MAX_CONNECTIONS).map(|_| AtomicPtr::default()).collect();
            let made = Box::leak(Box::new(Session { shared, fds, by_number }));
            OWNER.store(identity(), Ordering::Release);
            SESSION.store(made, Ordering::Release);
            Some(made)
        }
        Err(error) => {
            // Any other error means that the agent has ended or cannot be reached: everything stays in the kernel for
            // now.
            if matches!(error.kind(), std::io::ErrorKind::Other | std::io::ErrorKind::InvalidData) {
                static SAID: std::sync::Once = std::sync::Once::new();
                let line = format!("baton: this program's connections stay in the kernel: {error}\n");
                SAID.call_once(|| messages::say(line.as_bytes()));
            }
            NOT_BEFORE.store(wait::now() + AGAIN, Ordering::Release);
            None
        }
    }
}

/// The resource of which this process has too little for a session, as a message, and the id of the process that has
/// reported it to the agent (0 if none has).
#[cold]
fn what_is_scarce() -> Option<(String, &'static AtomicU32)> {
    static FEW: AtomicU32 = AtomicU32::new(0);
    static NARROW: AtomicU32 = AtomicU32::new(0);
    let most = most_descriptors();
    if most < LEAST_DESCRIPTORS {
        let why = format!("its program may have only {most} descriptors, and Baton would need some of them (ulimit -n)");
        return Some((why, &FEW));
    }
    let left = {
        // A signal handler that never returns would leave a descriptor open in the program.
        let _undisturbed = Undisturbed::begin();
        address_space::left().filter(|left| *left < HEAP as u64 + RESERVE)?
    };
    let why = format!(
        "address space: its program may map only {} KB more, and Baton leaves {} KB to it: raise the limit (ulimit -v)",
        left >> 10,
        RESERVE >> 10
    );
    Some((why, &NARROW))
}

/// Reports to the agent, once, which resource this process lacks for a session.
#[cold]
fn report_scarce(why: String, reported: &AtomicU32) {
    if reported.swap(identity(), Ordering::AcqRel) == identity() {
        return;
    }
    let errno = thread::errno();
    if !tell(Native::Refused(why)) {
        reported.store(0, Ordering::Release);
    }
    thread::set_errno(errno);
}

/// Keeps other threads from opening or leaving a session. The caller blocks signals, or is about to fork.
pub(crate) fn hold_opening() -> MutexGuard<'static, ()> {
    OPENING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a child: makes this process the owner of its copy of the memory, and closes its copies of the parent's session's
/// descriptors. Takes no lock and allocates nothing.
pub(crate) fn become_owner() {
    OWNER.store(identity(), Ordering::Release);
    SAID.store(false, Ordering::Release);
    let parents = session().or_else(left);
    SESSION.store(std::ptr::null_mut(), Ordering::Release);
    LEFT.store(std::ptr::null_mut(), Ordering::Release);
    for fd in parents.into_iter().flat_map(|session| session.fds).filter(|fd| *fd >= 0) {
        // SAFETY: this copy of the descriptor is the child's own.
        unsafe { real::close(fd) };
    }
}

/// Leaves all sockets that this process opens to the kernel. Takes no lock and allocates nothing.
pub(crate) fn give_up_plan() {
    UNPREPARED.store(true, Ordering::SeqCst);
    CLOSED.store(true, Ordering::SeqCst);
}

/// Opens the session of a program that has a TCP socket, before the program changes its root, namespaces or user:
/// afterwards it may not reach the agent, or the agent may take it for another user. A program without TCP sockets gets
/// none.
#[cold]
pub(crate) fn ask_while_possible() {
    let Some(_section) = Section::enter() else { return };
    let errno = thread::errno();
    let has_tcp = || table::known(0, u32::MAX).any(|(_, file)| matches!(file, table::File::Tcp(_)));
    if session().is_none() && is_mine() && has_tcp() {
        open_session();
    }
    thread::set_errno(errno);
}

/// Whether no connection may be offloaded any more.
pub(crate) fn is_closed_for_good() -> bool {
    CLOSED.load(Ordering::SeqCst)
}

/// The cause for restoring a connection of a process that is closed for good.
pub(crate) fn why_closed() -> &'static str {
    WHY.get().map_or(SECCOMP, Native::cause)
}

/// Whether no connection may be offloaded now.
pub(crate) fn is_closed() -> bool {
    is_closed_for_good() || forks::are_under_way()
}

/// The last session that ended, unless another one has been opened since.
fn left() -> Option<&'static Session> {
    let left = LEFT.load(Ordering::Acquire);
    // SAFETY: sessions are never freed.
    if left.is_null() { None } else { Some(unsafe { &*left }) }
}

/// The lowest number for this library's descriptors. Low numbers are left to the program, which may expect to get them.
/// Very high ones are avoided: they make the kernel's table of descriptors longer, which select(2), fork(2) and
/// close_range(2) walk through, and an `fd_set` has no bits from FD_SETSIZE on.
fn lowest_descriptor() -> c_int {
    (most_descriptors().min(libc::FD_SETSIZE as u64) as c_int - 96).max(3)
}

/// How many descriptors the program may have.
pub(crate) fn most_descriptors() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: `limit` is live and has room for one rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    limit.rlim_cur
}

/// Moves a descriptor of this library's to a high number.
pub(crate) fn lift(fd: c_int) -> c_int {
    // SAFETY: `fd` is this library's own, and nobody else uses its number.
    unsafe {
        let lifted = real::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest_descriptor() as libc::c_ulong);
        if lifted < 0 {
            return fd;
        }
        real::close(fd);
        lifted
    }
}

/// Whether this process owns this memory, and is not a child of its vfork.
pub(crate) fn is_mine() -> bool {
    OWNER.load(Ordering::Acquire) == identity()
}

/// Whether this process uses its parent's memory: a child of vfork.
pub(crate) fn is_borrowed() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != identity()
}

/// Whether a descriptor is this library's own.
pub(crate) fn is_ours(fd: c_int) -> bool {
    fd >= 0 && session().or_else(left).is_some_and(|session| session.fds.contains(&fd))
        || crate::waiter::is_ours(fd)
        || crate::listening::is_ours(fd)
        || crate::udp::is_ours(fd)
        || crate::epoll::is_ours(fd)
}

/// The lowest of this library's descriptors from `first` on.
pub(crate) fn next_of_ours(first: c_int) -> Option<c_int> {
    let of_session = session().or_else(left).into_iter().flat_map(|session| session.fds).filter(|fd| *fd >= first).min();
    let others =
        [crate::waiter::next_of_ours, crate::listening::next_of_ours, crate::udp::next_of_ours, crate::epoll::next_of_ours];
    others.into_iter().filter_map(|next| next(first)).chain(of_session).min()
}

/// The socket in an entry of [`Session::by_number`].
fn found(place: &AtomicPtr<Tcp>) -> Option<&'static Tcp> {
    // SAFETY: null, or from a `&'static` reference (`note_socket`).
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

impl Session {
    pub fn socket(&self, number: u32) -> Option<&'static Tcp> {
        found(self.by_number.get(number as usize)?)
    }

    pub fn note_socket(&self, number: u32, tcp: Option<&'static Tcp>) {
        if let Some(place) = self.by_number.get(number as usize) {
            let tcp = tcp.map_or(std::ptr::null_mut(), |tcp| std::ptr::from_ref(tcp).cast_mut());
            place.store(tcp, Ordering::Release);
        }
    }

    /// Whether the session has ended, as far as known; asks the kernel only now and then.
    pub fn is_over(&self) -> bool {
        self.shared.notice_end_sometimes(thread::token())
    }

    /// Abandons the session if it has ended; see [`Session::leave`].
    #[cold]
    pub fn leave_if_over(&'static self) {
        if self.shared.notice_end(thread::token()) {
            self.leave();
        }
    }

    /// Abandons the session if some thread has noticed its end. That thread may have held a lock and could not abandon
    /// it itself.
    #[inline]
    pub fn leave_if_known_over(&'static self) {
        if self.shared.has_ended() {
            self.leave();
        }
    }

    /// Abandons a session that has ended, or that the program leaves: its sockets are the kernel's until another
    /// session is opened, and connections that were on the NIC are lost. The caller must not hold the lock of a set or
    /// a socket.
    #[cold]
    pub fn leave(&'static self) {
        let this = std::ptr::from_ref(self).cast_mut();
        {
            let _undisturbed = Undisturbed::begin();
            // The lock's holder is opening a session, or abandoning this one.
            let Ok(_one) = OPENING.try_lock() else { return };
            if SESSION.load(Ordering::Acquire) != this {
                return;
            }
            crate::epoll::leave(self);
            crate::listening::leave();
            crate::udp::leave_session();
            LEFT.store(this, Ordering::Release);
            SESSION.store(std::ptr::null_mut(), Ordering::Release);
        }
        let mut lost = false;
        for tcp in self.sockets() {
            lost |= tcp.leave_session();
        }
        // If the session has not ended, the program has left it, and agent and NIC may still read its memory.
        if !lost && self.shared.has_ended() {
            self.shared.discard_memory();
        }
        crate::epoll::settle();
    }

    /// The sockets of all its connections.
    pub fn sockets(&self) -> Vec<&'static Tcp> {
        self.numbered_sockets().map(|(_, tcp)| tcp).collect()
    }

    /// The sockets of all its connections, with the connections' numbers.
    pub fn numbered_sockets(&self) -> impl Iterator<Item = (u32, &'static Tcp)> {
        (0u32..).zip(&self.by_number[..]).filter_map(|(number, place)| Some((number, found(place)?)))
    }
}

/// Restores every connection to the kernel.
pub(crate) fn give_everything_back(reason: &str) {
    give_others_back(reason, |_, _| false);
}

/// As [`give_everything_back`], but skips connections for which `stays` (session, number) is true. Returns the others.
pub(crate) fn give_others_back(reason: &str, stays: impl Fn(&Shared, u32) -> bool) -> Vec<&'static Tcp> {
    if !is_mine() {
        return Vec::new();
    }
    // Waits for hand-overs that other threads have begun, so that their connections are restored, too.
    for (_, file) in table::known(0, u32::MAX) {
        if let table::File::Tcp(tcp) = file {
            tcp.settle();
        }
    }
    let Some(session) = session() else { return Vec::new() };
    let moves = |(number, tcp): (u32, &'static Tcp)| (!stays(&session.shared, number)).then_some(tcp);
    let others: Vec<&'static Tcp> = session.numbered_sockets().filter_map(moves).collect();
    tcp::give_each_back(session, &others, reason, Until::Never);
    crate::udp::give_everything_back();
    crate::epoll::settle();
    others
}

/// Restores all connections for good, since the process makes calls that this library cannot see.
pub(crate) fn close_for_good(why: Native) {
    let Some(_section) = Section::enter() else { return };
    let closed = CLOSED.swap(true, Ordering::SeqCst);
    give_everything_back(why.cause());
    // An io_uring may close sockets unseen by this library. The peer gets a FIN then only if the agent has no copy of
    // the descriptor, so the agent gives them up.
    if why == Native::IoUring
        && is_mine()
        && let Some(session) = session()
    {
        session.sockets().into_iter().for_each(Tcp::give_up_in_kernel);
    }
    // A withdrawal reports this itself. A process without a session reports it when a hand-over would be due.
    if !closed && why != Native::Filters && WHY.set(why).is_ok() && is_mine() && session().is_some() {
        report_closed();
    }
}

/// Withdrawal: ends the session, and closes all descriptors of this library's. No other thread is inside.
pub(crate) fn end() {
    if let Some(session) = session() {
        session.sockets().into_iter().for_each(Tcp::end_care);
        let _ = session.shared.report_withdrawal(Native::Filters);
        session.leave();
    }
    let fds = left().into_iter().flat_map(|left| left.fds).filter(|fd| *fd >= 0);
    LEFT.store(std::ptr::null_mut(), Ordering::Release);
    for fd in fds {
        // SAFETY: the session has ended, and nobody uses its descriptors any more.
        unsafe { real::close(fd) };
    }
}

/// Tracks the sockets that the program has inherited from the process that started it.
fn take_inherited() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<c_int> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut inherited = tcp::Inherited::default();
    for fd in numbers {
        if tcp::is_tcp(fd) && table::get(fd).is_none() {
            faults::begin();
            table::put(fd, Some(table::File::Tcp(inherited.of_starter(fd))));
        }
    }
}

extern "C" fn at_start() {
    starts::restore();
    if plan().is_some() {
        OWNER.store(identity(), Ordering::Release);
        real::find_all();
        thread::is_alone();
        table::begin();
        forks::register();
        take_inherited();
    }
}

extern "C" fn at_exit() {
    let Some(_section) = Section::enter() else { return };
    if let Some(session) = session().filter(|_| is_mine()) {
        CLOSED.store(true, Ordering::Release);
        let _ = session.shared.say_goodbye();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = at_start;

#[used]
#[unsafe(link_section = ".fini_array")]
static EXIT: extern "C" fn() = at_exit;
