//! Processes: starting one with descriptors, giving up rights, processors, CPU time.

use crate::socket::check;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The first descriptor that [`inherit`] gives to a child.
pub const FIRST_DESCRIPTOR: i32 = 3;

/// Least number of open files that a process of Baton's needs.
const FEW_DESCRIPTORS: libc::rlim_t = 1024;

/// Most descriptors that [`inherit`] passes.
const MOST_DESCRIPTORS: usize = 64;

/// Raises this process's limit on open files (`ulimit -n`) to [`FEW_DESCRIPTORS`], if it is lower and may be raised.
fn allow_few_descriptors() {
    // SAFETY: one live rlimit; the calls are async-signal-safe, so they are allowed between fork and exec.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && limit.rlim_cur < FEW_DESCRIPTORS {
            let most = limit.rlim_max.max(FEW_DESCRIPTORS);
            let allowed = libc::rlimit { rlim_cur: FEW_DESCRIPTORS.min(limit.rlim_max), rlim_max: limit.rlim_max };
            if libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: FEW_DESCRIPTORS, rlim_max: most }) != 0 {
                libc::setrlimit(libc::RLIMIT_NOFILE, &allowed);
            }
        }
    }
}

/// Makes a command's process get these descriptors as 3, 4, …. If `tied`, it is killed when the thread that starts it ends.
pub fn inherit(command: &mut Command, descriptors: &[BorrowedFd<'_>], tied: bool) {
    let raw: Vec<i32> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let work = move || {
        allow_few_descriptors();
        // First to numbers above the targets, then to the targets: dup2 clears close-on-exec.
        let mut moved = [0i32; MOST_DESCRIPTORS];
        for (at, fd) in raw.iter().enumerate() {
            // SAFETY: no pointers; fcntl is async-signal-safe.
            moved[at] = check(unsafe { libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR + MOST_DESCRIPTORS as i32) })
                // The kernel calls a number beyond the limit an invalid argument.
                .map_err(|error| match error.raw_os_error() {
                    Some(libc::EINVAL) => io::Error::from_raw_os_error(libc::EMFILE),
                    _ => error,
                })?;
        }
        for (at, fd) in moved[..raw.len()].iter().enumerate() {
            // SAFETY: no pointers; dup2 is async-signal-safe.
            check(unsafe { libc::dup2(*fd, FIRST_DESCRIPTOR + at as i32) })?;
        }
        if tied {
            // SAFETY: no pointers; prctl is a plain system call.
            check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls: no allocation, no locks.
    unsafe { command.pre_exec(work) };
}

/// Makes a command's process a child of init, in a session of its own. The process that is spawned, and can be waited for, ends
/// at once.
pub fn orphan(command: &mut Command) {
    let work = || {
        // SAFETY: the calls are async-signal-safe, and this forked process has one thread.
        unsafe {
            check(libc::setsid())?;
            match libc::fork() {
                -1 => Err(io::Error::last_os_error()),
                0 => Ok(()),
                _ => libc::_exit(0),
            }
        }
    };
    // SAFETY: between fork and exec the closure only makes system calls: no allocation, no locks.
    unsafe { command.pre_exec(work) };
}

/// Opens a pidfd, which becomes readable when the process has ended.
///
/// # Errors
/// The failed system call's; `ESRCH` if there is no such process.
pub fn open_process(process: u32) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: no pointers are involved.
    let raw = check(unsafe { libc::syscall(libc::SYS_pidfd_open, process as libc::pid_t, 0) } as i32)?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(raw) })
}

/// Takes an inherited descriptor.
///
/// # Errors
/// `EBADF` if there is none of this number.
pub fn inherited(number: i32) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: F_GETFD takes no pointer. The descriptor is owned by this call: the parent passed it to be taken once.
    unsafe {
        check(libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC))?;
        Ok(std::os::fd::OwnedFd::from_raw_fd(number))
    }
}

/// Empties the capability bounding set, so that no program that is started later gets a capability back. Needs CAP_SETPCAP, so
/// call it before a change of user.
///
/// # Errors
/// The failed system call's.
pub fn drop_bounds() -> io::Result<()> {
    // SAFETY: no pointers are involved.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        for capability in 0..64 {
            // It fails for numbers that this kernel does not have.
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
    }
    Ok(())
}

/// Gives up every capability for good.
///
/// # Errors
/// The failed system call's.
pub fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header { version: 0x2008_0522, pid: 0 };
    let none = [[0u32; 3]; 2];
    // SAFETY: a live header and two live, empty sets of version 3.
    check(unsafe { libc::syscall(libc::SYS_capset, &header, &none) } as i32).map(|_| ())
}

/// Binds a thread to one processor; 0 is the calling thread. Returns whether it worked.
pub fn pin(thread: i32, core: usize) -> bool {
    // SAFETY: cpu_set_t is plain data; CPU_SET writes inside it for cores below 1024.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core % 1024, &mut set);
        libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &set) == 0
    }
}

/// Binds the calling thread, and what it starts, to several processors. Returns whether it worked.
pub fn pin_to(cores: &[usize]) -> bool {
    // SAFETY: as in `pin`.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cores.iter().for_each(|core| libc::CPU_SET(core % 1024, &mut set));
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) == 0
    }
}

/// The processor that this thread runs on now.
#[inline]
pub fn current_cpu() -> usize {
    // SAFETY: the call takes no arguments.
    unsafe { libc::sched_getcpu() }.max(0) as usize
}

/// Makes new memory of the calling thread come from a node, as far as it has any; with None, from the node where the thread
/// runs. Returns whether the system knows nodes.
pub fn prefer_memory(node: Option<usize>) -> bool {
    let mask = baton_shm::node_mask(node);
    let mode = if node.is_some() { libc::MPOL_PREFERRED } else { libc::MPOL_DEFAULT };
    // SAFETY: set_mempolicy(2) reads as many bits as it is given, which the mask has.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), 1024) == 0 }
}

/// Processors that this thread may run on.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: cpu_set_t is plain data; CPU_ISSET reads inside it for cores below 1024.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..1024).filter(|core| libc::CPU_ISSET(*core, &set)).collect()
    }
}

/// The processors on which a process's threads ran last.
///
/// # Errors
/// The failed system call's; `NotFound` if the process has ended.
pub fn last_cpus(process: u32) -> io::Result<Vec<usize>> {
    let mut cpus = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(entry?.path().join("stat"))?;
        // Field 39, counted after the name, which may contain any character (proc_pid_stat(5)).
        let behind_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        cpus.extend(behind_name.split_whitespace().nth(36).and_then(|cpu| cpu.parse::<usize>().ok()));
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

/// The effective user id.
pub fn user() -> u32 {
    // SAFETY: the call takes no arguments.
    unsafe { libc::geteuid() }
}

/// Number of processors that this process may run on.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Nanoseconds of CPU time that a process or thread has used, from its schedstat. None if it has ended.
pub fn cpu_nanos(process: u32) -> Option<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(format!("/proc/{process}/task")).ok()? {
        let text = std::fs::read_to_string(entry.ok()?.path().join("schedstat")).ok()?;
        total += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(total)
}

/// Process numbers of the kernel's NAPI threads of an interface.
pub fn napi_threads(interface: &str) -> Vec<u32> {
    let wanted = format!("napi/{interface}-");
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|comm| wanted.starts_with(comm.trim()) || comm.starts_with(&wanted))
        })
        .collect()
}

/// Moves a descriptor to the lowest free number that is at least `lowest`.
///
/// # Errors
/// The failed system call's; the descriptor is closed then.
pub fn lift(fd: std::os::fd::OwnedFd, lowest: i32) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: no pointers are involved.
    let raw = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, lowest) })?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(raw) })
}

/// Gives a descriptor the number of another one, which is closed. The number is free at no moment.
///
/// # Errors
/// The failed system call's; then the descriptor is closed, and the other unchanged.
pub fn put_in_place_of(fd: std::os::fd::OwnedFd, other: std::os::fd::OwnedFd) -> io::Result<std::os::fd::OwnedFd> {
    // SAFETY: both descriptors are owned, so the second one's number is ours before and after the call.
    check(unsafe { libc::syscall(libc::SYS_dup3, fd.as_raw_fd(), other.as_raw_fd(), libc::O_CLOEXEC) } as i32)?;
    Ok(other)
}

/// Raises the limit on this process's descriptors as far as allowed, and returns it.
pub fn raise_descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: one live rlimit.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raised) == 0 { raised.rlim_cur } else { limit.rlim_cur }
    }
}

/// Fills a buffer with random bytes.
///
/// # Errors
/// The failed system call's.
pub fn random(out: &mut [u8]) -> io::Result<()> {
    // SAFETY: the pointer and length describe `out`.
    let got = unsafe { libc::getrandom(out.as_mut_ptr().cast(), out.len(), 0) };
    if got == out.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a process other than these holds a socket, by its inode: as far as /proc shows it to this process.
pub fn others_hold(inode: u64, except: &[u32]) -> bool {
    let holds = |process: &u32| sockets_of(*process).iter().any(|(_, other)| *other == inode);
    all().iter().filter(|process| !except.contains(process)).any(holds)
}

/// Sends a signal to a process that this one has started.
///
/// # Errors
/// The failed system call's.
pub fn signal(process: u32, signal: i32) -> io::Result<()> {
    // SAFETY: no pointers are involved.
    check(unsafe { libc::kill(process as i32, signal) }).map(|_| ())
}

/// Sends a signal to a process group whose leader this process has started.
///
/// # Errors
/// The failed system call's.
pub fn signal_group(leader: u32, signal: i32) -> io::Result<()> {
    // SAFETY: no pointers are involved.
    check(unsafe { libc::kill(-(leader as i32), signal) }).map(|_| ())
}

/// Makes sleeps of the calling thread end on time, instead of up to 50 µs later.
pub fn sleep_exactly() {
    // SAFETY: no pointers are involved.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

/// Number and inode of a process's sockets.
pub fn sockets_of(process: u32) -> Vec<(i32, u64)> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    let inode = |entry: &std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    entries.flatten().filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, inode(&entry)?))).collect()
}

/// Whether a process has not ended yet.
pub fn lives(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X'])))
}

/// The parent of a process; None if it has ended.
pub fn parent(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// The children of a process.
pub fn children(process: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let mut children = Vec::new();
    for thread in threads.flatten() {
        match std::fs::read_to_string(thread.path().join("children")) {
            Ok(text) => children.extend(text.split_whitespace().filter_map(|number| number.parse::<u32>().ok())),
            // Kernels without CONFIG_PROC_CHILDREN lack the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return all().into_iter().filter(|other| parent(*other) == Some(process)).collect();
            }
            Err(_) => {}
        }
    }
    children
}

/// All processes that this one may see.
pub fn all() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The control group of a process in the unified hierarchy, as a path from its root.
pub fn cgroup(process: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// The signals that ask a process to end.
pub const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Reads the signals that wait at a descriptor of [`signal_descriptor`].
pub fn take_signals(signals: &std::os::fd::OwnedFd) {
    let mut info = [0u8; 128];
    // SAFETY: room for one signalfd_siginfo; the descriptor does not block.
    while unsafe { libc::read(signals.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) } > 0 {}
}

/// A descriptor that becomes readable when one of these signals arrives. The signals are blocked, so they have no other effect.
///
/// # Errors
/// The failed system call's.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: the set is plain data, filled by sigemptyset before it is used.
    let raw = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?
    };
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(raw) })
}

/// While this lives no signal is delivered to the calling thread, except faults of its own: a signal handler could call into
/// whatever the thread is in the middle of.
#[derive(Debug)]
pub struct Undisturbed {
    before: libc::sigset_t,
    /// Not Send: the mask is this thread's.
    _here: std::marker::PhantomData<*const ()>,
}

impl Undisturbed {
    /// Blocks signals from now on.
    pub fn begin() -> Undisturbed {
        // SAFETY: both sets are plain data; sigfillset fills the first, the call the second.
        let before = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut set);
            for own in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS] {
                libc::sigdelset(&mut set, own);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
            before
        };
        Undisturbed { before, _here: std::marker::PhantomData }
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // SAFETY: `before` was filled by pthread_sigmask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// Makes SIGPIPE end this process silently when it writes into a pipe that nobody reads any more, as programs in a shell's
/// pipeline do. (Rust ignores SIGPIPE.)
pub fn end_on_broken_pipe() {
    // SAFETY: the default action takes no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
