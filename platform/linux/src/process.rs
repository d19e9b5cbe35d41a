//! Processes: starting one with descriptors, giving up rights, processors, CPU time.

use crate::socket::check;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, CpuSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::DirEntryExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;

/// The first descriptor that [`inherit`] gives to a child.
pub const FIRST_DESCRIPTOR: i32 = 3;

/// Least number of open files that a process of Baton's needs.
const FEW_DESCRIPTORS: u64 = 1024;

/// Most descriptors that [`inherit`] passes.
const MOST_DESCRIPTORS: usize = 64;

/// The value of an environment variable. An empty value counts as not set.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Raises this process's limit on open files (`ulimit -n`) to [`FEW_DESCRIPTORS`], if it is lower and may be raised.
fn allow_few_descriptors() {
    // None is no limit.
    let Rlimit { current: Some(current), maximum } = getrlimit(Resource::Nofile) else { return };
    if current >= FEW_DESCRIPTORS {
        return;
    }
    let few = Some(FEW_DESCRIPTORS);
    let raised = Rlimit { current: few, maximum: maximum.map(|most| most.max(FEW_DESCRIPTORS)) };
    if setrlimit(Resource::Nofile, raised).is_err() {
        let allowed = Rlimit { current: maximum.map_or(few, |most| Some(most.min(FEW_DESCRIPTORS))), maximum };
        let _ = setrlimit(Resource::Nofile, allowed);
    }
}

/// Makes a command's process get these descriptors as 3, 4, …. If `tied`, it is killed when the thread that starts it
/// ends.
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
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls: no allocation, no locks.
    unsafe { command.pre_exec(work) };
}

/// Makes a command's process a child of init, in a session of its own. The process that is spawned, and can be waited
/// for, ends at once.
pub fn orphan(command: &mut Command) {
    let work = || {
        rustix::process::setsid()?;
        // SAFETY: the calls are async-signal-safe, and this forked process has one thread.
        unsafe {
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
pub fn open_process(process: u32) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(pid(process)?, rustix::process::PidfdFlags::empty())?)
}

/// A process number as rustix takes it. There is no process 0.
fn pid(process: u32) -> io::Result<Pid> {
    i32::try_from(process).ok().filter(|number| *number > 0).and_then(Pid::from_raw).ok_or(Errno::SRCH.into())
}

/// Takes an inherited descriptor.
///
/// # Errors
/// `EBADF` if there is none of this number.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD takes no pointer. The descriptor is owned by this call: the parent passed it to be taken once.
    unsafe {
        check(libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC))?;
        Ok(OwnedFd::from_raw_fd(number))
    }
}

/// Empties the capability bounding set, so that no program that is started later gets a capability back. Needs
/// CAP_SETPCAP, so call it before a change of user.
///
/// # Errors
/// The failed system call's.
pub fn drop_bounds() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    for capability in 0..64 {
        // It fails for numbers that this kernel does not have.
        let _ = rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << capability));
    }
    Ok(())
}

/// Gives up every capability for good.
///
/// # Errors
/// The failed system call's.
pub fn drop_capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    Ok(rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Binds a thread to one processor; 0 is the calling thread. Returns whether it worked.
pub fn pin(thread: i32, core: usize) -> bool {
    rustix::thread::sched_setaffinity(Pid::from_raw(thread), &cpu_set(&[core])).is_ok()
}

/// A set of processors. A number that does not fit into the set wraps around to another processor.
fn cpu_set(cores: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(core % CpuSet::MAX_CPU));
    set
}

/// Binds the calling thread, and the threads and processes that it starts, to several processors. Returns whether it
/// worked.
pub fn pin_to(cores: &[usize]) -> bool {
    rustix::thread::sched_setaffinity(None, &cpu_set(cores)).is_ok()
}

/// Moves the calling thread to a processor, if it may run there, without binding it: the kernel may move it again.
/// Returns whether it worked.
pub fn move_to(core: usize) -> bool {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return false };
    let moved = core < CpuSet::MAX_CPU && allowed.is_set(core) && pin(0, core);
    moved && rustix::thread::sched_setaffinity(None, &allowed).is_ok()
}

/// Makes short sleeps of the calling thread, and of threads that it starts, end when they should. By default the kernel
/// may add 50 microseconds.
pub fn wake_in_time() {
    // SAFETY: PR_SET_TIMERSLACK takes its argument, in nanoseconds, by value.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

/// Nice value of processes for whose work programs wait as for the kernel's own: only processes that are as urgent run
/// before them.
const URGENT: i32 = -15;

/// The nice value that this process had before [`raise_priority`].
static USUAL: OnceLock<i32> = OnceLock::new();

/// Makes the calling process, which has one thread, as urgent as the kernel's own work, if it has the right to. Returns
/// whether it worked.
pub fn raise_priority() -> bool {
    let before = rustix::process::getpriority_process(None);
    let raised = rustix::process::setpriority_process(None, URGENT).is_ok();
    if let (true, Ok(before)) = (raised, before) {
        let _ = USUAL.set(before);
    }
    raised
}

/// As [`raise_priority`], for a process that its parent ends, not a terminal: in a session of its own.
pub fn raise_priority_in_own_session() -> bool {
    let raised = raise_priority();
    let _ = in_own_session(URGENT.to_string().as_bytes());
    raised
}

/// Puts the calling process into a session of its own that has a nice value, given as text. Linux divides processor
/// time among sessions first (autogroups, sched(7)), and a process's own nice value counts only within its session. So
/// a process in the session of a busy terminal, or of a NIC with several workers, would have to share the time that
/// this session gets. Async-signal-safe.
///
/// # Errors
/// The failed system call's: for example if this process leads a session or a process group already, has no right to
/// the nice value, or the kernel has no autogroups.
fn in_own_session(nice: &[u8]) -> io::Result<()> {
    rustix::process::setsid()?;
    let file = rustix::fs::open(c"/proc/self/autogroup", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, nice)?;
    Ok(())
}

/// Nice value, relative to the programs', of a process that works for them on the same processors. If it were more
/// urgent it would leave the programs no time; if it were less urgent all programs would wait for it.
const SHARING: i32 = -5;

/// Makes a command's process, in a session of its own, a little more urgent than this one was before
/// [`raise_priority`].
pub fn with_sharing_priority(command: &mut Command) {
    let Some(usual) = USUAL.get().copied() else { return };
    let text = (usual + SHARING).to_string();
    // A process that stays as urgent as this one works nevertheless.
    let work = move || {
        let _ = in_own_session(text.as_bytes());
        let _ = rustix::process::setpriority_process(None, usual + SHARING);
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls: no allocation, no locks.
    unsafe { command.pre_exec(work) };
}

/// Makes the calling thread run only when no other thread wants the processor (SCHED_IDLE). Returns whether it worked.
pub fn run_last() -> bool {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the pointer is to a value that lives through the call.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) == 0 }
}

/// The processor that this thread runs on now. By libc, which reads it from memory that it shares with the kernel
/// (rseq).
#[inline]
pub fn current_cpu() -> usize {
    // SAFETY: the call takes no arguments.
    unsafe { libc::sched_getcpu() }.max(0) as usize
}

/// Makes new memory of the calling thread come from a NUMA node, as long as the node has some left; with None, from the
/// node where the thread runs. Returns whether the system knows NUMA nodes.
pub fn prefer_memory(node: Option<usize>) -> bool {
    let mask = baton_shm::node_mask(node);
    let mode = if node.is_some() { libc::MPOL_PREFERRED } else { libc::MPOL_DEFAULT };
    // SAFETY: set_mempolicy(2) reads as many bits as it is given, which the mask has.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), 1024) == 0 }
}

/// Processors that this thread may run on.
pub fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

/// The processors on which a process's threads ran last, for the threads whose names `counts` accepts.
///
/// # Errors
/// The failed system call's; `NotFound` if the process has ended.
pub fn last_cpus(process: u32, counts: impl Fn(&str) -> bool) -> io::Result<Vec<usize>> {
    let mut cpus = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(entry?.path().join("stat"))?;
        // Field 39, counted after the name, which is in parentheses and may contain any character (proc_pid_stat(5)).
        let (before, behind_name) = text.rsplit_once(')').unwrap_or_default();
        if !before.split_once('(').is_some_and(|(_, name)| counts(name)) {
            continue;
        }
        cpus.extend(behind_name.split_whitespace().nth(36).and_then(|cpu| cpu.parse::<usize>().ok()));
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

/// The effective user id.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The effective user of a process; root if it may not be traced by its own user.
///
/// # Errors
/// `NotFound` if there is no such process.
pub fn user_of(process: u32) -> io::Result<u32> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(format!("/proc/{process}"))?.uid())
}

/// Number of processors that this process may run on.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine in one line, to be printed with measurements: the number of processors, their model if the kernel names
/// it, and the kernel.
pub fn machine() -> String {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    let model = model.map_or("unknown model", |(_, model)| model.trim());
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{} processors ({model}), Linux {}", cores(), kernel.trim())
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

/// Gives this process a name (`/proc/PID/comm`), of which Linux keeps the first 15 bytes. Other threads that exist keep
/// their names.
///
/// # Errors
/// If /proc is not there.
pub fn set_name(name: &str) -> io::Result<()> {
    std::fs::write("/proc/self/comm", name)
}

/// The name of a process, which it chooses itself. None if it has ended.
pub fn name(process: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(name.trim_end_matches('\n').to_owned())
}

/// Number of the calling thread.
pub fn thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// Whether a process was ended from outside, by a signal that no process sends itself when it fails: SIGKILL, SIGTERM,
/// SIGINT, SIGHUP.
pub fn is_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    matches!(status.signal(), Some(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP))
}

/// How often the threads of a process have slept and were woken (`voluntary_ctxt_switches`). None if it has ended.
pub fn wakeups(process: u32) -> Option<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(format!("/proc/{process}/task")).ok()? {
        let text = std::fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        total += line.trim().parse::<u64>().ok()?;
    }
    Some(total)
}

/// Nanoseconds that all processors of the machine have been busy, programs, kernel and interrupts together; in steps of
/// 10 ms.
///
/// # Errors
/// If /proc/stat is not there or not as expected.
pub fn machine_nanos() -> io::Result<u64> {
    let [user, nice, system, _, _, interrupts, deferred, _] = processor_times("cpu")?;
    Ok(user + nice + system + interrupts + deferred)
}

/// Nanoseconds that all processors of the machine have spent in interrupts and in the work that interrupts have
/// deferred (softirq), in steps of 10 ms.
///
/// # Errors
/// If /proc/stat is not there or not as expected.
pub fn interrupt_nanos() -> io::Result<u64> {
    let [_, _, _, _, _, interrupts, deferred, _] = processor_times("cpu")?;
    Ok(interrupts + deferred)
}

/// Nanoseconds that a processor was idle, had been taken from this machine by its host, or ran programs whose nice
/// value is above 0; in steps of 10 ms. The kernel measures how long a processor is idle, but only samples what it does
/// when busy: so the elapsed time less this is more exact than the time that the kernel counts as busy.
///
/// # Errors
/// If /proc/stat is not there or not as expected, or there is no such processor.
pub fn spare_nanos(processor: usize) -> io::Result<u64> {
    let [_, nice, _, idle, waiting, _, _, stolen] = processor_times(&format!("cpu{processor}"))?;
    Ok(nice + idle + waiting + stolen)
}

/// The times in a line of /proc/stat, in nanoseconds.
fn processor_times(line: &str) -> io::Result<[u64; 8]> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let rest = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' ')).unwrap_or_default();
    let ticks: Vec<u64> = rest.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let Some(times) = ticks.first_chunk() else {
        let message = format!("the line {line} of /proc/stat is missing or has too few numbers");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    };
    // A tick of /proc is 10 ms on every architecture that Baton runs on.
    Ok(times.map(|ticks| ticks * 10_000_000))
}

/// Process numbers of the kernel's NAPI threads of an interface.
pub fn napi_threads(interface: &str) -> Vec<u32> {
    let wanted = format!("napi/{interface}-");
    processes(|name| wanted.starts_with(name) || name.starts_with(&wanted))
}

/// CPU time of the kernel's threads that process frames on behalf of the programs: for soft interrupts, and NAPI. Only
/// threads count that existed when this was made.
#[derive(Debug)]
pub struct KernelThreads(Vec<(u32, u64)>);

impl KernelThreads {
    /// The threads that there are now.
    pub fn new() -> KernelThreads {
        let threads = processes(|name| ["ksoftirqd/", "napi/"].iter().any(|of| name.starts_with(of)));
        KernelThreads(threads.into_iter().map(|thread| (thread, 0)).collect())
    }

    /// The CPU time that these threads have used so far, in nanoseconds. It never becomes less: a thread that has ended
    /// with its device counts with the time that it had used at the last call.
    pub fn nanos(&mut self) -> u64 {
        let now = |(thread, used): &mut (u32, u64)| {
            *used = cpu_nanos(*thread).unwrap_or(0).max(*used);
            *used
        };
        self.0.iter_mut().map(now).sum()
    }
}

impl Default for KernelThreads {
    fn default() -> KernelThreads {
        KernelThreads::new()
    }
}

/// Process numbers of programs with a fitting name, which has at most 15 bytes.
pub fn processes(fits: impl Fn(&str) -> bool) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.filter(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| fits(comm.trim()))).collect()
}

/// Moves a descriptor to the lowest free number that is at least `lowest`.
///
/// # Errors
/// The failed system call's; the descriptor is closed then.
pub fn lift(fd: OwnedFd, lowest: i32) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, lowest)?)
}

/// Gives a descriptor the number of another one, which is closed. Both happen at once, so the number is never free.
///
/// # Errors
/// The failed system call's; `fd` is then closed, and `other` is as it was.
pub fn put_in_place_of(fd: OwnedFd, mut other: OwnedFd) -> io::Result<OwnedFd> {
    rustix::io::dup3(fd, &mut other, rustix::io::DupFlags::CLOEXEC)?;
    Ok(other)
}

/// Raises the limit on this process's descriptors as far as allowed, and returns it.
pub fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    let now = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    now.unwrap_or(u64::MAX)
}

/// Gives the free pages of the heap back to the system. Takes longer the more free pieces there are; other threads that
/// allocate or free meanwhile wait.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it only changes which memory the allocator keeps for itself, under the allocator's own locks.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Fills a buffer with random bytes.
///
/// # Errors
/// The failed system call's.
pub fn random(out: &mut [u8]) -> io::Result<()> {
    let wanted = out.len();
    let got = rustix::rand::getrandom(out, rustix::rand::GetRandomFlags::empty())?;
    if got == wanted { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Sends a signal to the process of a descriptor, even if its number is another process's by now.
///
/// # Errors
/// The failed system call's: `ESRCH` if the process has ended.
pub fn signal_at(process: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(process, named(signal)?)?)
}

/// Sends a signal to a process that this process has started.
///
/// # Errors
/// The failed system call's.
pub fn signal(process: u32, signal: i32) -> io::Result<()> {
    Ok(rustix::process::kill_process(pid(process)?, named(signal)?)?)
}

/// Resumes a process that this process has started, if it was stopped (SIGSTOP). Nothing changes for a process that
/// runs.
///
/// # Errors
/// The failed system call's.
pub fn resume(process: u32) -> io::Result<()> {
    signal(process, libc::SIGCONT)
}

fn named(signal: i32) -> io::Result<Signal> {
    Signal::from_named_raw(signal).ok_or(Errno::INVAL.into())
}

/// Sends a signal to a process group whose leader this process has started.
///
/// # Errors
/// The failed system call's.
pub fn signal_group(leader: u32, signal: i32) -> io::Result<()> {
    Ok(rustix::process::kill_process_group(pid(leader)?, named(signal)?)?)
}

/// Makes sleeps of the calling thread end on time, instead of up to 50 µs later.
pub fn sleep_exactly() {
    // The unit is nanoseconds.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
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

/// Whether a process has the socket with this inode at this descriptor number. Makes no call on the file, whatever it
/// is.
pub fn has_socket(process: u32, number: i32, inode: u64) -> bool {
    let target = std::fs::read_link(format!("/proc/{process}/fd/{number}"));
    target.is_ok_and(|target| target.to_str() == Some(&*format!("socket:[{inode}]")))
}

/// Whether the socket with this inode, which a process has at this descriptor number, is in blocking mode. None if the
/// process does not have it at this number.
///
/// The call may block, if the process replaces the socket meanwhile by an epoll set whose lock one of its threads
/// holds: see [`crate::foreign::call_for`].
pub fn blocks(process: u32, number: i32, inode: u64) -> Option<bool> {
    if !has_socket(process, number, inode) {
        return None;
    }
    let about = std::fs::read_to_string(format!("/proc/{process}/fdinfo/{number}")).ok()?;
    let flags = about.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = i32::from_str_radix(flags.trim(), 8).ok()?;
    Some(flags & libc::O_NONBLOCK == 0)
}

/// The value in a line of a process's status file (proc_pid_status(5)). None if the process has ended. The file `stat`
/// is not used: reading it waits while the process is in execve(2) (Linux 6.18), and the process can stay there as long
/// as it likes by a file of its own.
fn status(process: u32, line: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let found = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
    found.map(|text| text.trim().to_owned())
}

/// Whether a process has not ended yet. It lives while any of its threads does: the first thread may have ended by
/// pthread_exit(3), or the process is being killed and the other threads take longer to end.
pub fn lives(process: u32) -> bool {
    first_thread_lives(process) || status(process, "Threads").is_some_and(|left| left.parse().is_ok_and(|left: u32| left > 1))
}

/// Whether the first thread of a process has not ended yet. Once it has, /proc shows none of the process's descriptors.
pub fn first_thread_lives(process: u32) -> bool {
    status(process, "State").is_some_and(|state| !state.starts_with(['Z', 'X']))
}

/// Whether the first thread of a process can still run program code: it has not ended, and is not ending. A thread that
/// is ending gives up its memory first and then closes its descriptors, which may take long.
pub fn first_thread_runs(process: u32) -> bool {
    first_thread_lives(process) && status(process, "VmSize").is_some()
}

/// The parent of a process; None if it has ended.
pub fn parent(process: u32) -> Option<u32> {
    status(process, "PPid")?.parse().ok()
}

/// The session of a process, in this process's namespace of numbers; None if it has ended, or this kernel has no such
/// namespaces.
pub(crate) fn session(process: u32) -> Option<u32> {
    status(process, "NSsid")?.split_whitespace().next()?.parse().ok()
}

/// The users of a process: real, effective, saved and for files. None if it has ended.
pub fn users(process: u32) -> Option<[u32; 4]> {
    let users: Vec<u32> = status(process, "Uid")?.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    users.try_into().ok()
}

/// A number that tells a process from a later process with the same process number; None if it has ended. 0 before
/// Linux 6.9, which has no such number.
pub fn identity(process: u32) -> Option<u64> {
    const PID_FS_MAGIC: rustix::fs::FsWord = 0x5049_4446;
    let process = open_process(process).ok()?;
    let has_numbers = rustix::fs::fstatfs(&process).is_ok_and(|system| system.f_type == PID_FS_MAGIC);
    if has_numbers { Some(rustix::fs::fstat(&process).ok()?.st_ino) } else { Some(0) }
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

/// All processes that this process may see.
pub fn all() -> Vec<u32> {
    listed().into_iter().map(|(process, _)| process).collect()
}

/// All processes that this one may see, each with the inode of its directory in /proc: a later process with the same
/// number has another one. The kernel may also give a process a new one, when it is short of memory.
pub(crate) fn listed() -> Vec<(u32, u64)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.ino()))).collect()
}

/// The control group of a process in the unified hierarchy, as a path from its root.
pub fn cgroup(process: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// The signals that ask a process to end.
pub const ENDING: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Reads the signals that wait at a descriptor of [`signal_descriptor`].
pub fn take_signals(signals: &OwnedFd) {
    // Room for one signalfd_siginfo; the descriptor does not block.
    let mut info = [0u8; 128];
    while rustix::io::read(signals, &mut info).is_ok_and(|got| got > 0) {}
}

/// A descriptor that becomes readable when one of these signals arrives. The signals are blocked, so they have no other
/// effect. If this process was started with SIGHUP ignored (`nohup`), that signal is left alone: once blocked, it would
/// arrive at the descriptor.
///
/// # Errors
/// The failed system call's.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    let ignored = |signal: i32| {
        // SAFETY: an action is plain data. Without a new one the call only fills in the current one.
        let (done, action) = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            (libc::sigaction(signal, std::ptr::null(), &mut action), action)
        };
        done == 0 && action.sa_sigaction == libc::SIG_IGN
    };
    // SAFETY: the set is plain data, filled by sigemptyset before it is used.
    let raw = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            if signal != libc::SIGHUP || !ignored(signal) {
                libc::sigaddset(&mut set, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?
    };
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// While this lives no signal is delivered to the calling thread, except for its own faults: a signal handler could
/// call functions that the thread is in the middle of.
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

/// Makes SIGPIPE end this process silently when it writes into a pipe that nobody reads any more, as programs in a
/// shell's pipeline do. (Rust ignores SIGPIPE.)
pub fn end_on_broken_pipe() {
    // SAFETY: the default action takes no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When a device goes, its thread ends: the time that this thread has used is not subtracted from the sum.
    #[test]
    fn what_a_thread_has_used_counts_when_it_has_ended() {
        let mut one = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell");
        let mut threads = KernelThreads(vec![(one.id(), 0)]);
        let mut before = 0;
        while before == 0 {
            before = threads.nanos();
        }
        one.kill().expect("it runs");
        one.wait().expect("its end");
        assert_eq!(cpu_nanos(one.id()), None);
        assert_eq!(threads.nanos(), before);
    }

    /// A program whose first thread has called pthread_exit(3) still lives.
    #[test]
    fn a_process_lives_as_long_as_its_last_thread() {
        let program = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); \
                       ctypes.CDLL(None).pthread_exit(None)";
        let mut command = std::process::Command::new("python3");
        let mut child = command.args(["-c", program]).stdin(std::process::Stdio::piped()).spawn().expect("python3");
        while first_thread_lives(child.id()) {}
        assert!(lives(child.id()));
        drop(child.stdin.take());
        while lives(child.id()) {}
        child.wait().expect("its end");
    }
}
