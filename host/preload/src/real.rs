//! The C library's own versions of the functions that this library intercepts.

use libc::{c_char, c_int, c_long, c_uint, c_ulong, c_void, nfds_t, off64_t, pid_t, size_t, sockaddr, socklen_t, ssize_t};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Looks up the next definition of a symbol after this library's. Aborts if there is none: the program's call cannot be
/// served.
#[cold]
fn find(name: &'static std::ffi::CStr, at: &AtomicUsize) -> usize {
    // SAFETY: the name is NUL-terminated, and RTLD_NEXT is a valid handle.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
    if found == 0 {
        // SAFETY: abort has no preconditions.
        unsafe { libc::abort() };
    }
    at.store(found, Ordering::Relaxed);
    found
}

macro_rules! real {
    ($($name:ident = $symbol:literal: fn($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
    /// Where they are; 0 for each that was not looked up yet.
    mod at {
        use std::sync::atomic::AtomicUsize;
        $(#[allow(non_upper_case_globals, reason = "named as its function")] pub(super) static $name: AtomicUsize = AtomicUsize::new(0);)*
    }

    /// Looks all of them up. A signal handler could not: it may interrupt the dynamic linker.
    pub(crate) fn find_all() {
        $(
            // SAFETY: the name is NUL-terminated, and RTLD_NEXT is a valid handle. What is not there is not called.
            at::$name.store(unsafe { libc::dlsym(libc::RTLD_NEXT, $symbol.as_ptr()) } as usize, Ordering::Relaxed);
        )*
    }

    $(
        /// The C library's function of this name.
        ///
        /// # Safety
        /// As the C library's.
        #[inline(always)]
        pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
            let at = match at::$name.load(Ordering::Relaxed) {
                0 => find($symbol, &at::$name),
                at => at,
            };
            // SAFETY: `find` returned the C library's function of this name, which has this type.
            let function: unsafe extern "C-unwind" fn($($type),*) -> $result = unsafe { std::mem::transmute(at) };
            // SAFETY: this function's `# Safety` demands what the C library's function needs.
            unsafe { function($($arg),*) }
        }
    )*};
}

real! {
    socket = c"socket": fn(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    accept = c"accept": fn(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    accept4 = c"accept4": fn(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int;
    connect = c"connect": fn(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    bind = c"bind": fn(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    listen = c"listen": fn(fd: c_int, most: c_int) -> c_int;
    getsockname = c"getsockname": fn(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    getpeername = c"getpeername": fn(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    close = c"close": fn(fd: c_int) -> c_int;
    dup = c"dup": fn(fd: c_int) -> c_int;
    dup2 = c"dup2": fn(fd: c_int, to: c_int) -> c_int;
    dup3 = c"dup3": fn(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl = c"fcntl": fn(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    ioctl = c"ioctl": fn(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
    read = c"read": fn(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t;
    readv = c"readv": fn(fd: c_int, vectors: *const libc::iovec, count: c_int) -> ssize_t;
    preadv2 = c"preadv2": fn(fd: c_int, vectors: *const libc::iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    recv = c"recv": fn(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t;
    recvfrom = c"recvfrom": fn(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int, address: *mut sockaddr, size: *mut socklen_t) -> ssize_t;
    recvmsg = c"recvmsg": fn(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> ssize_t;
    recvmmsg = c"recvmmsg": fn(fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int, limit: *mut libc::timespec) -> c_int;
    write = c"write": fn(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t;
    writev = c"writev": fn(fd: c_int, vectors: *const libc::iovec, count: c_int) -> ssize_t;
    pwritev2 = c"pwritev2": fn(fd: c_int, vectors: *const libc::iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    send = c"send": fn(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t;
    sendto = c"sendto": fn(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int, address: *const sockaddr, size: socklen_t) -> ssize_t;
    sendmsg = c"sendmsg": fn(fd: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t;
    sendmmsg = c"sendmmsg": fn(fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int;
    sendfile = c"sendfile64": fn(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t;
    splice = c"splice": fn(from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, length: size_t, flags: c_uint) -> ssize_t;
    shutdown = c"shutdown": fn(fd: c_int, how: c_int) -> c_int;
    getsockopt = c"getsockopt": fn(fd: c_int, level: c_int, option: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int;
    setsockopt = c"setsockopt": fn(fd: c_int, level: c_int, option: c_int, value: *const c_void, length: socklen_t) -> c_int;
    poll = c"poll": fn(fds: *mut libc::pollfd, count: nfds_t, limit: c_int) -> c_int;
    ppoll = c"ppoll": fn(fds: *mut libc::pollfd, count: nfds_t, limit: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    select = c"select": fn(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, except: *mut libc::fd_set, limit: *mut libc::timeval) -> c_int;
    pselect = c"pselect": fn(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, except: *mut libc::fd_set, limit: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    epoll_create = c"epoll_create": fn(size: c_int) -> c_int;
    epoll_create1 = c"epoll_create1": fn(flags: c_int) -> c_int;
    epoll_ctl = c"epoll_ctl": fn(set: c_int, operation: c_int, fd: c_int, event: *mut libc::epoll_event) -> c_int;
    epoll_wait = c"epoll_wait": fn(set: c_int, events: *mut libc::epoll_event, most: c_int, limit: c_int) -> c_int;
    epoll_pwait = c"epoll_pwait": fn(set: c_int, events: *mut libc::epoll_event, most: c_int, limit: c_int, mask: *const libc::sigset_t) -> c_int;
    fdopen = c"fdopen": fn(fd: c_int, mode: *const c_char) -> *mut libc::FILE;
    vdprintf = c"vdprintf": fn(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    vdprintf_checked = c"__vdprintf_chk": fn(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    close_range = c"close_range": fn(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom = c"closefrom": fn(first: c_int) -> ();
    execve = c"execve": fn(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    execvpe = c"execvpe": fn(file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    fexecve = c"fexecve": fn(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    execveat = c"execveat": fn(fd: c_int, path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char, flags: c_int) -> c_int;
    posix_spawn = c"posix_spawn": fn(process: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    posix_spawnp = c"posix_spawnp": fn(process: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int;
    add_dup2 = c"posix_spawn_file_actions_adddup2": fn(actions: *mut c_void, fd: c_int, to: c_int) -> c_int;
    system = c"system": fn(command: *const c_char) -> c_int;
    popen = c"popen": fn(command: *const c_char, mode: *const c_char) -> *mut libc::FILE;
    chroot = c"chroot": fn(path: *const c_char) -> c_int;
    unshare = c"unshare": fn(flags: c_int) -> c_int;
    setns = c"setns": fn(fd: c_int, kind: c_int) -> c_int;
    setuid = c"setuid": fn(user: libc::uid_t) -> c_int;
    seteuid = c"seteuid": fn(user: libc::uid_t) -> c_int;
    setreuid = c"setreuid": fn(real: libc::uid_t, effective: libc::uid_t) -> c_int;
    setresuid = c"setresuid": fn(real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t) -> c_int;
    clone = c"clone": fn(function: extern "C" fn(*mut c_void) -> c_int, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: *mut c_void, storage: *mut c_void, child: *mut c_void) -> c_int;
    fork_without_handlers = c"_Fork": fn() -> pid_t;
    register_at_fork = c"__register_atfork": fn(before: Option<unsafe extern "C" fn()>, parent: Option<unsafe extern "C" fn()>, child: Option<unsafe extern "C" fn()>, object: *mut c_void) -> c_int;
    sigaction = c"sigaction": fn(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    signal = c"signal": fn(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    bsd_signal = c"bsd_signal": fn(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    ssignal = c"ssignal": fn(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    sysv_signal = c"sysv_signal": fn(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    __sysv_signal = c"__sysv_signal": fn(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    siglongjmp = c"siglongjmp": fn(to: *mut c_void, value: c_int) -> !;
    longjmp_checked = c"__longjmp_chk": fn(to: *mut c_void, value: c_int) -> !;
    sigset = c"sigset": fn(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    mlockall = c"mlockall": fn(flags: c_int) -> c_int;
    munlockall = c"munlockall": fn() -> c_int;
    prctl = c"prctl": fn(operation: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
    syscall = c"syscall": fn(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
}

/// The address of the C library's function, for a jump to it.
pub(crate) fn address(name: &'static std::ffi::CStr) -> usize {
    find(name, &AtomicUsize::new(0))
}
