//! This process: what it was told, its session with the agent, and what becomes of both when it forks.

use crate::tcp::Tcp;
use crate::{real, table, tcp};
use baton_client::protocol::{Opening, VERSION};
use baton_client::rules::{RUN_VARIABLE, Rule, Run};
use baton_client::{Listener, Shared};
use libc::c_int;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// What the program was started with.
pub(crate) struct Plan {
    run: Run,
    pub rules: Vec<Rule>,
    program: String,
}

/// A session, for as long as this process lives: it is never freed, only left by a fork.
pub(crate) struct Session {
    pub shared: Shared,
    pub fds: [c_int; 4],
    /// Sockets by connection number.
    by_number: Mutex<Vec<Option<&'static Tcp>>>,
}

static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
static SESSION: AtomicPtr<Session> = AtomicPtr::new(std::ptr::null_mut());
/// Whose session it is: a child of vfork shares this memory and is somebody else.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// No connection may go to the NIC now: the process forks, or has locked itself in.
static CLOSED: AtomicBool = AtomicBool::new(false);
static OPENING: Mutex<()> = Mutex::new(());

fn identity() -> u32 {
    std::process::id()
}

/// Reads what the program was started with, once; None if it is not run with Baton.
pub(crate) fn plan() -> Option<&'static Plan> {
    PLAN.get_or_init(|| {
        let text = std::env::var(RUN_VARIABLE).ok()?;
        let run: Run = match serde_json::from_str(&text) {
            Ok(run) => run,
            Err(error) => {
                eprintln!("baton: {RUN_VARIABLE} makes no sense ({error}); this program runs without Baton");
                return None;
            }
        };
        let program = std::fs::read_link("/proc/self/exe").ok();
        let program = program.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())).unwrap_or_default();
        let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let cgroup = cgroup.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default().to_owned();
        let rules: Vec<Rule> = run.rules.iter().filter(|rule| rule.fits_program(&program, &cgroup)).cloned().collect();
        Some(Plan { run, rules, program })
    })
    .as_ref()
}

impl Plan {
    /// Whether the agent moves connections by itself.
    pub fn flips(&self) -> bool {
        self.run.flips
    }
}

/// The session, if there is one.
#[inline(always)]
pub(crate) fn session() -> Option<&'static Session> {
    let session = SESSION.load(Ordering::Acquire);
    // SAFETY: sessions are never freed.
    if session.is_null() { None } else { Some(unsafe { &*session }) }
}

/// The session, which is opened if there is none.
pub(crate) fn open_session() -> Option<&'static Session> {
    if CLOSED.load(Ordering::Acquire) {
        return None;
    }
    if let Some(session) = session() {
        return is_mine().then_some(session);
    }
    let plan = plan()?;
    let _one = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(session) = session() {
        return Some(session);
    }
    let opening = Opening { version: VERSION, group: plan.run.group, program: plan.program.clone(), attacher: false };
    let listener = Listener(Box::new(|number| {
        if let Some(tcp) = session().and_then(|session| session.socket(number)) {
            tcp.changed();
        }
    }));
    match Shared::connect_above(&plan.run.socket, opening, listener, lowest_descriptor()) {
        Ok(shared) => {
            let fds = shared.descriptors();
            let made = Box::leak(Box::new(Session { shared, fds, by_number: Mutex::default() }));
            OWNER.store(identity(), Ordering::Release);
            SESSION.store(made, Ordering::Release);
            Some(made)
        }
        Err(_) => {
            // The agent is gone, or not to be reached from here: everything stays in the kernel.
            CLOSED.store(true, Ordering::Release);
            None
        }
    }
}

/// Where this library's descriptors begin: out of the way of programs that count on low numbers.
fn lowest_descriptor() -> c_int {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: room for one rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    (limit.rlim_cur.min(1 << 20) as c_int - 96).max(3)
}

/// The lowest number for a descriptor of this library's own.
pub(crate) fn lift(fd: c_int) -> c_int {
    // SAFETY: calls on a descriptor of our own.
    unsafe {
        let lifted = real::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest_descriptor() as libc::c_ulong);
        if lifted < 0 {
            return fd;
        }
        real::close(fd);
        lifted
    }
}

/// Whether this is the process that the session belongs to, and not a child of its vfork.
pub(crate) fn is_mine() -> bool {
    OWNER.load(Ordering::Acquire) == identity()
}

/// Whether a descriptor is this library's.
pub(crate) fn is_ours(fd: c_int) -> bool {
    session().is_some_and(|session| session.fds.contains(&fd)) || crate::wait::is_ours(fd) || crate::epoll::is_ours(fd)
}

impl Session {
    pub fn socket(&self, number: u32) -> Option<&'static Tcp> {
        *self.by_number.lock().unwrap_or_else(PoisonError::into_inner).get(number as usize)?
    }

    pub fn note_socket(&self, number: u32, tcp: Option<&'static Tcp>) {
        let mut sockets = self.by_number.lock().unwrap_or_else(PoisonError::into_inner);
        if sockets.len() <= number as usize {
            sockets.resize(number as usize + 1, None);
        }
        sockets[number as usize] = tcp;
    }

    fn sockets(&self) -> Vec<&'static Tcp> {
        self.by_number.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten().copied().collect()
    }
}

/// Gives every connection back to the kernel.
pub(crate) fn give_everything_back(reason: &str, until: baton_client::protocol::Until) {
    let Some(session) = session().filter(|_| is_mine()) else { return };
    for tcp in session.sockets() {
        tcp.give_back(reason, until);
    }
    crate::epoll::settle();
}

/// The process locks itself in (seccomp), or does what nobody here can follow: from now on everything stays in the kernel.
pub(crate) fn close_for_good(reason: &str) {
    CLOSED.store(true, Ordering::Release);
    give_everything_back(reason, baton_client::protocol::Until::Never);
}

extern "C" fn before_fork() {
    if session().is_some() && is_mine() {
        CLOSED.store(true, Ordering::Release);
        give_everything_back(tcp::FORK, baton_client::protocol::Until::Never);
    }
}

extern "C" fn parent_after_fork() {
    if let Some(session) = session().filter(|_| is_mine()) {
        for tcp in session.sockets() {
            tcp.allow_again();
        }
        CLOSED.store(false, Ordering::Release);
    }
}

extern "C" fn child_after_fork() {
    let Some(left) = session() else { return };
    SESSION.store(std::ptr::null_mut(), Ordering::Release);
    CLOSED.store(false, Ordering::Release);
    for fd in left.fds {
        // SAFETY: this copy of the descriptor is the child's.
        unsafe { real::close(fd) };
    }
    tcp::forget_pool();
    for (fd, file) in table::known(0, u32::MAX) {
        if let table::File::Tcp(_) = file {
            table::put(fd, Some(table::File::Tcp(tcp::inherited(fd))));
        }
    }
    crate::epoll::leave_inherited();
}

/// Whatever the program has when it starts: sockets that somebody opened for it.
fn take_inherited() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers: Vec<c_int> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for fd in numbers {
        if tcp::is_tcp(fd) && table::get(fd).is_none() {
            table::put(fd, Some(table::File::Tcp(tcp::inherited(fd))));
        }
    }
}

extern "C" fn at_start() {
    if plan().is_some() {
        // SAFETY: three functions that live as long as the process.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(parent_after_fork), Some(child_after_fork)) };
        take_inherited();
    }
}

extern "C" fn at_exit() {
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
