//! What a fork does to this library.
//!
//! - Before it every connection is restored, and nothing is handed over until it is done. For one that is in the kernel
//!   the agent is not asked: the forking thread is inside an operation on it, which keeps it there, and notes in its
//!   block afterwards that its socket may have more than one process. Both processes have the sockets then: a
//!   connection may move when the agent finds that its process alone has it.
//! - There may be very many sockets. A page that is written around a fork is copied, so the parent writes none of what
//!   it knows of each: one count says which sockets there were ([`tcp::note_all_shared`](crate::tcp::note_all_shared)),
//!   and the blocks are in session memory, which is shared ([`KernelHold`]).
//! - The forking thread holds the locks of what the library keeps for its next use, of its memory, and the one for
//!   opening a session. So the child finds them free, and what they guard whole. It waits for their holders, unless it
//!   is one itself ([`short_lock`](crate::short_lock)).
//! - So no handler of anybody else's (pthread_atfork) may run while it holds them: one that makes or closes a socket,
//!   or sleeps on one, would wait for its own thread. This library's are registered before all others ([`register`]):
//!   the C library calls the first ones last before a fork, and first after it.
//! - The child has a session and eventfds of its own. What it has inherited of its parent's is closed.
//! - Once the library has withdrawn ([`sections`]) it does nothing of this.
//! - A child of clone(2), `_Fork` or `syscall` may run at a moment at which another thread has any lock, malloc's too.
//!   It takes none, and leaves everything to the kernel: [`after_unprepared`].
//! - A child that was made past this library (instructions of the program's own, the C library's function by dlsym)
//!   finds an empty [`table`], and leaves everything to the kernel, too. What its parent has on the NIC stays there.
//!
//! A child of vfork(2) has its parent's memory, copies of its descriptors, and is there until it executes a program or
//! ends. POSIX allows it to do nothing else. Linux does, and language runtimes (Python's subprocess, Java) close,
//! duplicate and open descriptors in it: a number that this library knows as the parent's socket may soon be a file of
//! the child's. So nothing is tracked for a child ([`table`], [`udp`]), its calls are the kernel's
//! ([`Section::enter`]), and what it does changes nothing of what is known of its parent. What it needs of this library
//! is that a connection which it passes on to the program that it executes is in the kernel then, and that the
//! environment of that program is right ([`starts`]). It may be killed at any time, and its parent may end while it is
//! there: so it takes no lock, and waits for no thread ([`baton_client::Child`]). UDP sockets that it passes on are
//! given to the kernel by its parent, once it has executed its program ([`udp::give_back_passed`]).

use crate::sections::{self, Section};
use crate::short_lock::Held;
use crate::tcp::Tcp;
use crate::whole::MEMORY;
use crate::{epoll, listening, lookout, process, real, rings, signals, starts, table, tcp, thread, udp, waiter, whole};
use baton_client::{KernelHold, is_in_kernel};
use baton_linux::process::Undisturbed;
use baton_protocol::program::Until;
use libc::c_int;
use std::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The C library calls [`before`], [`after_in_parent`] and [`after_in_child`].
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Number of forks and starts of programs that are under way: no connection may be handed over meanwhile.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

/// The locks that are held during a fork.
#[derive(Default)]
struct Locks {
    short: Vec<Held>,
    opening: Option<MutexGuard<'static, ()>>,
    /// A signal handler that forks too would wait for these locks for ever.
    undisturbed: Option<Undisturbed>,
    section: Option<Section>,
    /// Connections that are in the kernel: this thread is inside operations on them. A child leaves them alone, since
    /// they are in memory that both have.
    held: Option<KernelHold<'static>>,
    /// Those that were restored.
    restored: Vec<&'static Tcp>,
}

struct Place(UnsafeCell<Locks>);

// SAFETY: only the thread that holds the lock for opening a session uses it, and that lock is a part of it.
unsafe impl Sync for Place {}

static LOCKS: Place = Place(UnsafeCell::new(Locks {
    short: Vec::new(),
    opening: None,
    undisturbed: None,
    section: None,
    held: None,
    restored: Vec::new(),
}));

/// The thread that has been through [`before`] and forks now; 0 if there is none.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// Whether this thread has been through [`before`]. So has a child's.
fn is_prepared() -> bool {
    FORKING.load(Ordering::SeqCst) == thread::token()
}

/// Has the C library prepare this one for forks. Called before anybody else's handlers are registered, and before this
/// library knows whether it serves the program: until then its own do nothing.
pub(crate) fn register() {
    if !REGISTERED.swap(true, Ordering::SeqCst) {
        // SAFETY: three functions that live as long as the process.
        unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    }
}

/// Whether the process forks now, or starts a program.
pub(crate) fn are_under_way() -> bool {
    UNDER_WAY.load(Ordering::SeqCst) > 0
}

/// Sees to it that every connection is in the kernel until the fork is done. Returns those that are held there, and
/// those that were restored.
fn keep_in_kernel() -> (Option<KernelHold<'static>>, Vec<&'static Tcp>) {
    let address = |tcp: &'static Tcp| std::ptr::from_ref(tcp) as usize;
    // First what takes long: other threads use meanwhile what is in the kernel.
    let mut restored = process::give_others_back(tcp::FORK, is_in_kernel);
    let Some(session) = process::session() else { return (None, restored) };
    let mut known: BTreeSet<usize> = restored.iter().copied().map(address).collect();
    loop {
        let mut held = KernelHold::begin(&session.shared);
        let sockets = session.numbered_sockets().filter(|&(_, tcp)| !known.contains(&address(tcp)));
        let late: Vec<&'static Tcp> =
            sockets.filter_map(|(number, tcp)| (!held.add(number, thread::token())).then_some(tcp)).collect();
        if late.is_empty() {
            return (Some(held), restored);
        }
        // They have moved since, or a thread was inside an operation on them.
        drop(held);
        tcp::give_each_back(session, &late, tcp::FORK, Until::Never);
        epoll::settle();
        known.extend(late.iter().copied().map(address));
        restored.extend(late);
    }
}

/// Prepares for a fork.
pub(crate) extern "C" fn before() {
    let Some(section) = Section::enter() else { return };
    if !process::is_mine() {
        return;
    }
    starts::share();
    let undisturbed = Undisturbed::begin();
    UNDER_WAY.fetch_add(1, Ordering::SeqCst);
    // Before the child is there: a thread that closes a socket then must not end the connection for both.
    tcp::note_all_shared();
    let opening = process::hold_opening();
    FORKING.store(thread::token(), Ordering::SeqCst);
    let (held, restored) = if process::is_closed_for_good() { (None, Vec::new()) } else { keep_in_kernel() };
    let locks = [tcp::hold(), waiter::hold(), epoll::hold(), listening::hold(), udp::hold()];
    let short = locks.into_iter().flatten().collect();
    let (opening, undisturbed, section) = (Some(opening), Some(undisturbed), Some(section));
    // SAFETY: this thread holds the lock for opening a session.
    unsafe { *LOCKS.0.get() = Locks { short, opening, undisturbed, section, held, restored } };
    MEMORY.hold();
}

/// Releases what [`before`] has taken.
fn release() {
    // SAFETY: `before` has taken the lock for opening a session, in this thread. Nothing of it is left there when it is
    // released.
    let Locks { short, opening, undisturbed, section, .. } = unsafe { std::mem::take(&mut *LOCKS.0.get()) };
    FORKING.store(0, Ordering::SeqCst);
    drop(short);
    drop(opening);
    drop(undisturbed);
    drop(section);
}

/// Goes on in the parent.
pub(crate) extern "C" fn after_in_parent() {
    if !is_prepared() || !process::is_mine() {
        return;
    }
    // First: whoever has another lock that is waited for below may want memory.
    MEMORY.release();
    // SAFETY: `before` has taken the lock for opening a session, in this thread.
    let locks = unsafe { &mut *LOCKS.0.get() };
    let (held, restored) = (std::mem::take(&mut locks.held), std::mem::take(&mut locks.restored));
    drop(held);
    // Also what other threads have made since.
    tcp::note_all_shared();
    if let (false, Some(session)) = (process::is_closed_for_good(), process::session()) {
        tcp::allow_each_again(session, &restored);
    }
    UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    release();
}

/// Goes on in a child of fork.
pub(crate) extern "C" fn after_in_child() {
    if !is_prepared() {
        return;
    }
    MEMORY.release();
    // SAFETY: this process has one thread, which has been through `before`.
    let held = unsafe { std::mem::take(&mut (*LOCKS.0.get()).held) };
    std::mem::forget(held);
    table::restore();
    forget_vforks();
    process::become_owner();
    // What has closed its parent for good holds for the child, too: filters and rings are inherited.
    UNDER_WAY.store(0, Ordering::SeqCst);
    sections::forget_inherited();
    signals::forget_inherited();
    release();
    // The sets that are noted at pooled sockets are the parent's.
    tcp::forget_pool();
    listening::forget_inherited();
    waiter::forget_inherited();
    lookout::forget_inherited();
    epoll::forget_inherited();
    let mut inherited = tcp::Inherited::default();
    for (fd, file) in table::known(0, u32::MAX) {
        if let table::File::Tcp(parents) = file {
            parents.leave_to_parent();
            table::put(fd, Some(table::File::Tcp(inherited.of_parent(fd, parents))));
        }
    }
    epoll::leave_inherited();
    rings::inherit();
}

/// Goes on in a child that was made otherwise: everything is the kernel's. Takes no lock and no memory.
pub(crate) fn after_unprepared() {
    // A parent that withdraws now has not set its filter yet.
    if sections::is_withdrawn() && !is_prepared() {
        return;
    }
    table::restore();
    forget_vforks();
    UNDER_WAY.store(0, Ordering::SeqCst);
    process::become_owner();
    process::give_up_plan();
    // Without it the system call was made by `syscall`.
    let prepared = is_prepared();
    FORKING.store(0, Ordering::SeqCst);
    if prepared {
        MEMORY.release()
    } else {
        MEMORY.abandon()
    }
    sections::forget_inherited();
    signals::forget_inherited();
    waiter::leave_inherited();
    // SAFETY: this process has one thread.
    let locks = unsafe { &mut *LOCKS.0.get() };
    std::mem::forget(std::mem::take(&mut locks.held));
    let (undisturbed, section) = if prepared { (locks.undisturbed.take(), locks.section.take()) } else { (None, None) };
    for (fd, file) in table::known(0, u32::MAX) {
        match file {
            table::File::Tcp(parents) => {
                parents.leave_to_parent();
                table::put(fd, None);
            }
            table::File::Set(set) => set.inherit(),
            table::File::Ring(_) => {}
        }
    }
    udp::forget_all();
    drop(undisturbed);
    drop(section);
}

/// Numbers of descriptors that file actions of posix_spawn(3) have ever duplicated: a bit for each, the last one for
/// all from there on.
static DUPLICATED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// The word and the bit of a descriptor's number.
fn duplicated(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?.min(DUPLICATED.len() * 64 - 1);
    Some((&DUPLICATED[number / 64], 1 << (number % 64)))
}

/// Notes that a file action duplicates a descriptor.
pub(crate) fn note_duplicated(fd: c_int) {
    if let Some((word, bit)) = duplicated(fd) {
        word.fetch_or(bit, Ordering::SeqCst);
    }
}

/// Whether a file action may duplicate what has this number.
fn may_be_duplicated(fd: c_int) -> bool {
    duplicated(fd).is_some_and(|(word, bit)| word.load(Ordering::SeqCst) & bit != 0)
}

/// The tracked sockets that a program inherits, each with a descriptor ([`is_inherited`]).
pub(crate) fn stay_open(with_actions: bool) -> impl Iterator<Item = (c_int, &'static Tcp)> {
    table::known(0, u32::MAX).filter_map(move |(fd, file)| match file {
        table::File::Tcp(tcp) if is_inherited(fd, with_actions) => Some((fd, tcp)),
        _ => None,
    })
}

/// Whether a program that is executed has this descriptor: it has no FD_CLOEXEC, or an action duplicates it, where the
/// program is started `with_actions`.
pub(crate) fn is_inherited(fd: c_int, with_actions: bool) -> bool {
    // SAFETY: F_GETFD takes no pointer.
    with_actions && may_be_duplicated(fd) || (unsafe { real::fcntl(fd, libc::F_GETFD, 0) } & libc::FD_CLOEXEC) == 0
}

/// Whether sockets have ever been tracked.
fn has_sockets() -> bool {
    table::end() > 0 || udp::end() > 0
}

/// Connections that a new process inherits, restored several at a time. Until this is dropped they stay: the agent
/// would find this process alone with them until the new one is there.
pub(crate) struct Passed(Vec<&'static Tcp>);

impl Passed {
    pub fn begin(with_actions: bool) -> Passed {
        if is_child_of_vfork() {
            restore_inherited(with_actions);
        }
        let Some(_section) = Section::enter() else { return Passed(Vec::new()) };
        let errno = thread::errno();
        let passed: Vec<&'static Tcp> = stay_open(with_actions).map(|(_, tcp)| tcp).collect();
        match process::session() {
            Some(session) => tcp::give_each_back(session, &passed, tcp::START, Until::Never),
            None => passed.iter().for_each(|tcp| tcp.give_back(tcp::START, Until::Never)),
        }
        udp::give_back_inherited(with_actions);
        if process::is_mine() && with_actions {
            // A set can be among what they pass on.
            epoll::settle();
        }
        thread::set_errno(errno);
        Passed(passed)
    }
}

impl Drop for Passed {
    /// Lets them move again, once no other process has them: all that were restored, since another thread may have set
    /// FD_CLOEXEC of some meanwhile.
    fn drop(&mut self) {
        let Some(_section) = Section::enter() else { return };
        let errno = thread::errno();
        // What has closed the process meanwhile holds.
        if let (false, Some(session)) = (process::is_closed_for_good(), process::session()) {
            tcp::allow_each_again(session, &self.0);
        }
        thread::set_errno(errno);
    }
}

/// While this lives nothing is handed over: a program is being started, which inherits descriptors. Those that it
/// inherits have been restored.
pub(crate) struct Start {
    with_actions: bool,
    passed: Option<Passed>,
    /// The process that has begun it. A handler may fork meanwhile. 0 in a child that has its parent's memory, where
    /// nothing may be counted: it may be killed.
    owner: u32,
}

impl Start {
    pub fn begin(with_actions: bool) -> Start {
        if !sections::is_withdrawn() && has_sockets() && process::is_borrowed() {
            restore_inherited(with_actions);
            return Start { with_actions, passed: None, owner: 0 };
        }
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
        Start { with_actions, passed: Some(Passed::begin(with_actions)), owner: process::owner() }
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        if !process::is_still(self.owner) {
            // A child counts none of its parent's.
            std::mem::forget(self.passed.take());
            return;
        }
        drop(self.passed.take());
        // Also what other threads have made since.
        if let Some(_section) = Section::enter() {
            stay_open(self.with_actions).for_each(|(_, tcp)| tcp.note_shared());
        }
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Why connections are restored before a program is executed.
const EXEC: &str = "exec";

/// Restores a connection that a child of vfork(2) uses by this descriptor, `file` for its parent, unless it is
/// something else for the child.
#[cold]
pub(crate) fn restore_for_child(fd: c_int, file: Option<table::File>) {
    let Some(table::File::Tcp(socket)) = file else { return };
    let errno = thread::errno();
    // In no section: a child that is killed there would stay in it for its parent's thread.
    if !sections::is_withdrawn() && tcp::is_tcp(fd) {
        socket.share_with_child(fd);
    }
    thread::set_errno(errno);
}

/// Restores connections whose descriptors another program would inherit ([`is_inherited`]).
pub(crate) fn restore_inherited(with_actions: bool) {
    let is_child = is_child_of_vfork();
    // As in `restore_for_child`.
    let section = if is_child { None } else { Section::enter() };
    if sections::is_withdrawn() || section.is_none() && !is_child {
        return;
    }
    let errno = thread::errno();
    for (fd, tcp) in stay_open(with_actions) {
        match is_child {
            false => tcp.give_back(EXEC, Until::Alone),
            true if tcp::is_tcp(fd) => tcp.share_with_child(fd),
            true => {}
        }
    }
    udp::give_back_inherited(with_actions);
    thread::set_errno(errno);
}

/// Prepares for the calling process's becoming another program, which has its number: as long as the agent does not
/// know that, it would find the process alone with a connection. What is returned is to be kept until the call comes
/// back.
pub(crate) fn before_exec() -> Option<Start> {
    // Then no system call of this library's may be made, which a filter that it does not know may forbid.
    if sections::is_withdrawn() || !has_sockets() {
        return None;
    }
    Some(Start::begin(false))
}

/// Whether the calling thread is a child of vfork(2): what this library knows by descriptors is true for its parent's
/// only.
#[inline]
pub(crate) fn is_child_of_vfork() -> bool {
    whole::here().vforks.load(Ordering::Relaxed) > 0 && process::is_borrowed()
}

/// A vfork(2) that is under way. One of a signal handler's may come in between.
pub(crate) struct Vfork {
    /// None in a child of another one.
    start: Option<Start>,
    /// Until when the child waits for agents ([`baton_client::Child`]).
    until: AtomicU64,
    /// How many others are under way in this thread's memory, and the last one of them.
    others: u32,
    last: *mut Vfork,
}

/// Prepares for a child that the calling thread is about to make by vfork(2), which has its memory.
pub(crate) extern "C-unwind" fn before_vfork() {
    let here = whole::here();
    let (start, until) = (before_exec().filter(|start| start.owner > 0), AtomicU64::new(0));
    let (others, last) = (here.vforks.load(Ordering::Relaxed), here.vfork.load(Ordering::Relaxed));
    here.vfork.store(Box::into_raw(Box::new(Vfork { start, until, others, last })), Ordering::Relaxed);
    here.vforks.store(others + 1, Ordering::Relaxed);
    table::forbid_fast();
}

/// The child has executed a program, or ended.
pub(crate) extern "C-unwind" fn after_vfork() {
    let here = whole::here();
    let vfork = here.vfork.load(Ordering::Relaxed);
    if vfork.is_null() {
        // In a child that a handler has forked meanwhile.
        return;
    }
    // SAFETY: `before_vfork` has put it there, in this thread or, where that has died, in a child of it; nobody else
    // takes it out.
    let Vfork { start, others, last, .. } = *unsafe { Box::from_raw(vfork) };
    here.vfork.store(last, Ordering::Relaxed);
    table::allow_fast(here.vforks.swap(others, Ordering::Relaxed).saturating_sub(others));
    if start.is_some() {
        udp::give_back_passed();
    }
    drop(start);
}

/// What the calling child of vfork(2) asks agents with.
pub(crate) fn child() -> Option<baton_client::Child<'static>> {
    // SAFETY: `before_vfork` has put it there, and it stays until the child is gone.
    let vfork = unsafe { whole::here().vfork.load(Ordering::Relaxed).as_ref() }?;
    Some(baton_client::Child { agent: &process::plan()?.run().socket, until: &vfork.until })
}

/// Forgets what its parent's thread was about to do, in a child.
fn forget_vforks() {
    let here = whole::here();
    here.vforks.store(0, Ordering::Relaxed);
    here.vfork.store(std::ptr::null_mut(), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number counts for itself; from the last one on all count together.
    #[test]
    fn what_an_action_duplicates_is_known_by_its_number() {
        for (noted, others) in [(300, [299, 301, 1023]), (5000, [301, 1022, 299])] {
            assert!(!may_be_duplicated(noted));
            note_duplicated(noted);
            assert!(may_be_duplicated(noted) && !others.into_iter().any(may_be_duplicated));
        }
        assert!(may_be_duplicated(300) && may_be_duplicated(1023) && may_be_duplicated(c_int::MAX));
        note_duplicated(-1);
        assert!(!may_be_duplicated(-1) && !may_be_duplicated(0));
    }
}
