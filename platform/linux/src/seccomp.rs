//! Filters of system calls (seccomp): how many this process has, and whether they allow the calls that a program under
//! Baton needs. These calls are a fixed list, [`CALLS`]; the default profiles of Docker and podman and systemd's
//! `@system-service` allow all of them.

use crate::socket::check;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A system call of the list, with arguments for which it does nothing.
struct Call {
    name: &'static str,
    number: libc::c_long,
    arguments: [u64; 6],
    /// The error with which the call fails if no filter stops it; 0 if it succeeds.
    error: i32,
}

macro_rules! calls {
    ($($(#[$only:meta])? $name:ident = $number:ident($($argument:expr),*) -> $error:expr;)*) => {
        &[$($(#[$only])? Call {
            name: stringify!($name),
            number: libc::$number,
            arguments: six(&[$($argument as i64 as u64),*]),
            error: $error,
        }),*]
    };
}

const fn six(given: &[u64]) -> [u64; 6] {
    let (mut all, mut at) = ([0; 6], 0);
    while at < given.len() {
        all[at] = given[at];
        at += 1;
    }
    all
}

/// An address that can be mapped, and is not.
const NOWHERE: u64 = 4096;

/// All system calls that the preloaded library makes for itself.
const CALLS: &[Call] = calls! {
    write = SYS_write(-1) -> libc::EBADF;
    read = SYS_read(-1) -> libc::EBADF;
    close = SYS_close(-1) -> libc::EBADF;
    openat = SYS_openat(-1, 0, libc::O_CLOEXEC) -> libc::EFAULT;
    fstat = SYS_fstat(-1) -> libc::EBADF;
    statx = SYS_statx(-1) -> libc::EFAULT;
    lseek = SYS_lseek(-1) -> libc::EBADF;
    pread64 = SYS_pread64(-1) -> libc::EBADF;
    getdents64 = SYS_getdents64(-1) -> libc::EBADF;
    #[cfg(target_arch = "x86_64")]
    readlink = SYS_readlink(0, 0, 1) -> libc::EFAULT;
    readlinkat = SYS_readlinkat(-1, 0, 0, 1) -> libc::EFAULT;
    fallocate = SYS_fallocate(-1, 0, 0, 1) -> libc::EBADF;
    mmap = SYS_mmap(0, 0, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, -1) -> libc::EBADF;
    munmap = SYS_munmap() -> libc::EINVAL;
    mprotect = SYS_mprotect(0, 0, libc::PROT_READ) -> 0;
    munlock = SYS_munlock(0, 0) -> 0;
    madvise = SYS_madvise(0, 0, libc::MADV_DONTNEED) -> 0;
    fcntl = SYS_fcntl(-1, libc::F_DUPFD_CLOEXEC) -> libc::EBADF;
    dup3 = SYS_dup3(-1, 5, libc::O_CLOEXEC) -> libc::EBADF;
    socket = SYS_socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) -> 0;
    socketpair = SYS_socketpair(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) -> libc::EFAULT;
    connect = SYS_connect(-1) -> libc::EBADF;
    getsockname = SYS_getsockname(-1) -> libc::EBADF;
    getpeername = SYS_getpeername(-1) -> libc::EBADF;
    getsockopt = SYS_getsockopt(-1, libc::SOL_SOCKET, libc::SO_PEERCRED) -> libc::EBADF;
    setsockopt = SYS_setsockopt(-1, libc::SOL_SOCKET, libc::SO_SNDBUF) -> libc::EBADF;
    sendto = SYS_sendto(-1) -> libc::EBADF;
    recvfrom = SYS_recvfrom(-1) -> libc::EBADF;
    sendmsg = SYS_sendmsg(-1) -> libc::EBADF;
    recvmsg = SYS_recvmsg(-1) -> libc::EBADF;
    shutdown = SYS_shutdown(-1) -> libc::EBADF;
    ioctl = SYS_ioctl(-1, libc::FIONREAD) -> libc::EBADF;
    accept4 = SYS_accept4(-1) -> libc::EBADF;
    #[cfg(target_arch = "x86_64")]
    poll = SYS_poll() -> 0;
    ppoll = SYS_ppoll(0, u32::MAX) -> libc::EINVAL;
    epoll_ctl = SYS_epoll_ctl(-1, libc::EPOLL_CTL_DEL) -> libc::EBADF;
    #[cfg(target_arch = "x86_64")]
    epoll_wait = SYS_epoll_wait(-1, NOWHERE, 1) -> libc::EBADF;
    epoll_pwait = SYS_epoll_pwait(-1, NOWHERE, 1) -> libc::EBADF;
    eventfd2 = SYS_eventfd2(0, 1 << 30) -> libc::EINVAL;
    futex = SYS_futex(NOWHERE, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) -> 0;
    sched_yield = SYS_sched_yield() -> 0;
    clock_nanosleep = SYS_clock_nanosleep(libc::CLOCK_MONOTONIC) -> libc::EFAULT;
    clock_gettime = SYS_clock_gettime(libc::CLOCK_MONOTONIC) -> libc::EFAULT;
    getpid = SYS_getpid() -> 0;
    gettid = SYS_gettid() -> 0;
    geteuid = SYS_geteuid() -> 0;
    tgkill = SYS_tgkill(-1, -1) -> libc::EINVAL;
    rt_sigprocmask = SYS_rt_sigprocmask(0, 0, 0, 8) -> 0;
    rt_tgsigqueueinfo = SYS_rt_tgsigqueueinfo(-1, -1) -> libc::EFAULT;
    rt_sigaction = SYS_rt_sigaction(1, 0, 0, 8) -> 0;
    prlimit64 = SYS_prlimit64(0, libc::RLIMIT_NOFILE) -> 0;
    sched_getaffinity = SYS_sched_getaffinity() -> libc::EINVAL;
    getrandom = SYS_getrandom() -> 0;
};

/// Number of filters that this process has. None if /proc does not show it. Makes only system calls that the dynamic
/// linker makes, too, since a filter may kill the process for any other call.
pub fn filters() -> Option<u32> {
    // SAFETY: the path is NUL-terminated.
    let fd = unsafe { libc::open(c"/proc/self/status".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: `fd` was just opened here, and no one else uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let (mut text, mut length) = ([0u8; 4096], 0);
    while length < text.len() {
        let room = &mut text[length..];
        // SAFETY: `room` is a live slice of that length.
        match unsafe { libc::read(fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len()) } {
            got @ 1.. => length += got as usize,
            _ => break,
        }
    }
    count(std::str::from_utf8(&text[..length]).ok()?)
}

/// The number of filters in the text of /proc/PID/status.
fn count(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?.trim().parse().ok()
}

/// Tries each call of the list in a process of its own.
///
/// # Errors
/// The name of the first call that this process's filters do not allow; "fork" if no other process can be started.
pub fn try_calls() -> Result<(), &'static str> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors, which no other code uses. The child makes system calls only.
    let (reader, child) = unsafe {
        if check(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC)).is_err() {
            return Err("pipe2");
        }
        let (reader, writer) = (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]));
        match libc::fork() {
            -1 => return Err("fork"),
            0 => try_and_exit(writer.as_raw_fd()),
            child => (reader, child),
        }
    };
    let mut last = None;
    let mut byte = 0u8;
    // SAFETY: the buffer is one live byte.
    while unsafe { libc::read(reader.as_raw_fd(), (&raw mut byte).cast(), 1) } == 1 {
        last = Some(byte);
    }
    let mut status = 0;
    // SAFETY: the child is this process's own, and `status` is live.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) } == child;
    if ended && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 {
        return Ok(());
    }
    Err(last.and_then(|at| CALLS.get(usize::from(at))).map_or("fork", |call| call.name))
}

/// Tries each call, after its index is in the pipe.
fn try_and_exit(pipe: i32) -> ! {
    for (at, call) in CALLS.iter().enumerate() {
        let at = at as u8;
        let [a, b, c, d, e, f] = call.arguments;
        // SAFETY: the buffer is one live byte; with its arguments the call reads and writes no memory of this process.
        let result = unsafe {
            libc::write(pipe, (&raw const at).cast(), 1);
            libc::syscall(call.number, a, b, c, d, e, f)
        };
        let error = if result == -1 { io::Error::last_os_error().raw_os_error().unwrap_or(-1) } else { 0 };
        if error != call.error {
            // SAFETY: ends this process, which was forked for that.
            unsafe { libc::_exit(1) };
        }
    }
    // SAFETY: ends this process, which was forked to try the calls and has tried all of them.
    unsafe { libc::_exit(0) }
}

/// An instruction of a filter, as the kernel takes it.
#[derive(Clone, Copy)]
pub struct Instruction {
    /// What it does.
    pub code: u16,
    /// Instructions that are left out if its condition holds.
    pub jt: u8,
    /// Instructions that are left out if it does not hold.
    pub jf: u8,
    /// Its operand.
    pub k: u32,
}

/// Checks that a filter allows every call of the list.
///
/// # Errors
/// The name of the first call that the filter does not allow.
pub fn judge(filter: &[Instruction]) -> Result<(), &'static str> {
    match CALLS.iter().find(|call| run(filter, &data(call)) != Some(libc::SECCOMP_RET_ALLOW)) {
        Some(refused) => Err(refused.name),
        None => Ok(()),
    }
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// `struct seccomp_data` of a call, in words.
fn data(call: &Call) -> [u32; 16] {
    let mut words = [0; 16];
    (words[0], words[1]) = (call.number as u32, ARCHITECTURE);
    for (at, argument) in call.arguments.iter().enumerate() {
        // Little-endian, as both architectures are.
        (words[4 + 2 * at], words[5 + 2 * at]) = (*argument as u32, (argument >> 32) as u32);
    }
    words
}

/// The verdict that a filter returns for a call. None if the kernel would not accept the filter (seccomp_check_filter
/// in Linux lists the allowed instructions).
fn run(filter: &[Instruction], data: &[u32; 16]) -> Option<u32> {
    let (mut at, mut a, mut x, mut memory) = (0usize, 0u32, 0u32, [0u32; 16]);
    loop {
        let Instruction { code, jt, jf, k } = *filter.get(at)?;
        at += 1;
        let slot = k as usize;
        let operand = if code & 0x08 != 0 { x } else { k };
        match code {
            // BPF_LD and BPF_LDX: of the data, constants, memory, and the data's length.
            0x20 => a = *data.get(slot / 4).filter(|_| slot.is_multiple_of(4))?,
            0x00 => a = k,
            0x01 => x = k,
            0x60 => a = *memory.get(slot)?,
            0x61 => x = *memory.get(slot)?,
            0x80 => a = 64,
            0x81 => x = 64,
            // BPF_ST, BPF_STX.
            0x02 => *memory.get_mut(slot)? = a,
            0x03 => *memory.get_mut(slot)? = x,
            // BPF_ALU.
            0x04 | 0x0c => a = a.wrapping_add(operand),
            0x14 | 0x1c => a = a.wrapping_sub(operand),
            0x24 | 0x2c => a = a.wrapping_mul(operand),
            0x34 | 0x3c => a = a.checked_div(operand)?,
            0x44 | 0x4c => a |= operand,
            0x54 | 0x5c => a &= operand,
            0x64 | 0x6c => a = a.wrapping_shl(operand),
            0x74 | 0x7c => a = a.wrapping_shr(operand),
            0x84 => a = a.wrapping_neg(),
            0xa4 | 0xac => a ^= operand,
            // BPF_JMP.
            0x05 => at += slot,
            0x15 | 0x1d => at += usize::from(if a == operand { jt } else { jf }),
            0x25 | 0x2d => at += usize::from(if a > operand { jt } else { jf }),
            0x35 | 0x3d => at += usize::from(if a >= operand { jt } else { jf }),
            0x45 | 0x4d => at += usize::from(if a & operand != 0 { jt } else { jf }),
            // BPF_RET, BPF_MISC.
            0x06 => return Some(k),
            0x16 => return Some(a),
            0x07 => x = a,
            0x87 => a = x,
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn one(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
        Instruction { code, jt, jf, k }
    }

    /// A filter that allows the calls of the list except those with these names.
    fn without(names: &[&str]) -> Vec<Instruction> {
        let mut filter = vec![one(0x20, 0, 0, 0)];
        for call in CALLS.iter().filter(|call| !names.contains(&call.name)) {
            filter.extend([one(0x15, 0, 1, call.number as u32), one(0x06, 0, 0, libc::SECCOMP_RET_ALLOW)]);
        }
        filter.push(one(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
        filter
    }

    #[test]
    fn a_filter_is_judged_by_what_it_lets_through() {
        assert_eq!(judge(&without(&[])), Ok(()));
        assert_eq!(judge(&without(&["sendmsg", "getrandom"])), Err("sendmsg"));
        assert_eq!(judge(&[]), Err("write"), "no filter at all");
    }

    /// A filter that checks arguments: it refuses Unix sockets (systemd's RestrictAddressFamilies=).
    #[test]
    fn arguments_count() {
        let filter = [
            one(0x20, 0, 0, 0),
            one(0x15, 0, 3, libc::SYS_socket as u32),
            one(0x20, 0, 0, 16),
            one(0x15, 0, 1, libc::AF_UNIX as u32),
            one(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | 97),
            one(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        assert_eq!(judge(&filter), Err("socket"));
    }

    #[test]
    fn filters_are_counted() {
        assert_eq!(count("Name:\tcat\nSeccomp:\t2\nSeccomp_filters:\t3\n"), Some(3));
        assert_eq!(count("Name:\tcat\nSeccomp:\t2\n"), None);
        assert!(filters().is_some());
    }

    /// With its arguments, each call of the list has the result that the list gives.
    #[test]
    fn without_a_filter_every_call_is_allowed() {
        assert_eq!(try_calls(), Ok(()));
    }
}
