//! Functions that start programs or enter seccomp: the connections are restored first.

use crate::forks::{self, Passed, Start, after_vfork, before_vfork};
use crate::sections::{self, Section};
use crate::starts::{self, Strings, Target};
use crate::{filters, kernel_only, process, real, rings, table, thread, unserved};
use baton_protocol::native::Native;
use baton_protocol::program::Until;
use libc::{c_char, c_int, c_long, c_ulong, c_void, pid_t};

macro_rules! confines {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// Intercepts the C library's function of this name, after which the agent may be out of reach.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> c_int {
            // SAFETY: the program's own arguments (`# Safety`).
            unserved::confine(|| unsafe { real::$name($($argument),*) })
        }
    )*};
}

confines! {
    chroot(path: *const c_char);
    unshare(flags: c_int);
    setns(fd: c_int, kind: c_int);
    setuid(user: libc::uid_t);
    seteuid(user: libc::uid_t);
    setreuid(real: libc::uid_t, effective: libc::uid_t);
    setresuid(real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t);
}

/// Becomes another program, by `call` with the environment that this one needs.
///
/// # Safety
/// `target` and `environment` are as the call needs them.
unsafe fn execute(target: Target, environment: Strings, call: impl FnOnce(Strings) -> c_int) -> c_int {
    // It comes back where the program cannot be executed.
    let _start = forks::before_exec();
    // SAFETY: `# Safety`.
    unsafe { starts::execute(target, environment, call) }
}

/// Intercepts the C library's `execve`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { execute(Target::Path(path), environment, |environment| real::execve(path, arguments, environment)) }
}

/// Intercepts the C library's `execv`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { execve(path, arguments, starts::environment()) }
}

/// Intercepts the C library's `execvpe`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { execute(Target::Name(file), environment, |environment| real::execvpe(file, arguments, environment)) }
}

/// Intercepts the C library's `execvp`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { execvpe(file, arguments, starts::environment()) }
}

/// Intercepts the C library's `fexecve`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { execute(Target::File(fd), environment, |environment| real::fexecve(fd, arguments, environment)) }
}

/// Intercepts the C library's `execveat`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execveat(
    fd: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        execute(Target::At(fd, path, flags), environment, |environment| real::execveat(fd, path, arguments, environment, flags))
    }
}

/// Intercepts the C library's `posix_spawn_file_actions_adddup2`: a program that is started with these actions gets the
/// descriptor, whether it has FD_CLOEXEC or not.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int {
    forks::note_duplicated(fd);
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::add_dup2(actions, fd, to) }
}

/// Intercepts the C library's `posix_spawn`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn(
    process: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    let with_actions = !actions.is_null();
    let _start = Start::begin(with_actions);
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        starts::execute(Target::Path(path), environment.cast(), |environment| {
            real::posix_spawn(process, path, actions, attributes, arguments, environment.cast())
        })
    }
}

/// Intercepts the C library's `posix_spawnp`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawnp(
    process: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    let with_actions = !actions.is_null();
    let _start = Start::begin(with_actions);
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        starts::execute(Target::Name(file), environment.cast(), |environment| {
            real::posix_spawnp(process, file, actions, attributes, arguments, environment.cast())
        })
    }
}

/// Intercepts the C library's `system`, whose own spawn is not intercepted.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn system(command: *const c_char) -> c_int {
    let _passed = (!command.is_null()).then(|| Passed::begin(false));
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::system(command) }
}

/// Intercepts the C library's `popen`, whose own spawn is not intercepted.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    let _start = Start::begin(false);
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::popen(command, mode) }
}

/// Intercepts the C library's `prctl`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn prctl(operation: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    let call = || unsafe { real::prctl(operation, a, b, c, d) };
    match (operation, a as u32) {
        (libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) => {
            filters::set(std::ptr::null(), unserved::filters_itself, || call().into()) as c_int
        }
        // Libraries ask by a call without a filter whether there may be one.
        (libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER) if b != 0 => {
            filters::set(b as *const _, unserved::filters_itself, || call().into()) as c_int
        }
        _ => call(),
    }
}

/// Whether a system call's first argument is no descriptor, or one that the call only reads or that this library itself
/// passes on.
fn is_harmless(number: c_long) -> bool {
    matches!(number, libc::SYS_futex | libc::SYS_epoll_pwait2 | libc::SYS_gettid | libc::SYS_getrandom | libc::SYS_fstat)
}

/// Restores a connection for good, before a system call of the program's own on its socket. One that moves bytes waits
/// for that.
fn before_raw(number: c_long, fd: c_int) -> Result<(), c_int> {
    const RAW: &str = "raw system call";
    match number {
        libc::SYS_read | libc::SYS_readv | libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg => {
            kernel_only::leave_to_kernel(fd, RAW, libc::SO_RCVTIMEO, false)
        }
        libc::SYS_write | libc::SYS_writev | libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => {
            kernel_only::leave_to_kernel(fd, RAW, libc::SO_SNDTIMEO, false)
        }
        _ => {
            if let Some(tcp) = table::tcp(fd)
                && let Some(_section) = Section::enter()
            {
                tcp.give_back(RAW, Until::Never);
            }
            Ok(())
        }
    }
}

/// Whether seccomp(2) with these arguments filters system calls. Libraries ask by it which filters there are, without
/// one.
fn sets_filter(operation: c_long, flags: c_long, filter: c_long) -> bool {
    match operation as u32 {
        libc::SECCOMP_SET_MODE_STRICT => flags == 0 && filter == 0,
        libc::SECCOMP_SET_MODE_FILTER => filter != 0,
        _ => false,
    }
}

/// Whether a child that this system call makes has memory of its own.
fn has_own_memory(number: c_long, argument: c_long) -> bool {
    let flags = match number {
        libc::SYS_fork => 0,
        libc::SYS_clone => argument as c_int,
        _ => libc::CLONE_VM,
    };
    flags & libc::CLONE_VM == 0
}

/// What a child of clone(2) is to run.
struct Started {
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
}

extern "C" fn start(started: *mut c_void) -> c_int {
    forks::after_unprepared();
    // SAFETY: `clone` passes one of its own, of which this process has a copy: it shares no memory with its parent.
    let started = unsafe { &*started.cast::<Started>() };
    (started.function)(started.argument)
}

/// Intercepts the C library's `clone`. A variadic argument is passed like a named one, as in `fcntl`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn clone(
    function: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    storage: *mut c_void,
    child: *mut c_void,
) -> c_int {
    if flags & libc::CLONE_VM != 0 {
        let has = |flag| flags & flag != 0;
        if has(libc::CLONE_THREAD) {
            // It is no process of its own.
        } else if has(libc::CLONE_FILES) {
            // It has its parent's descriptors, which a program that it executes gets.
            forks::restore_inherited(false);
        } else if has(libc::CLONE_VFORK) && !has(libc::CLONE_SETTLS) {
            before_vfork();
            // SAFETY: the program's own arguments (`# Safety`).
            let made = unsafe { real::clone(function, stack, flags, argument, parent, storage, child) };
            after_vfork();
            return made;
        } else {
            // One that runs beside its parent, or has other memory of threads, cannot be told from its parent.
            process::close_for_good(Native::RawFork);
        }
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::clone(function, stack, flags, argument, parent, storage, child) };
    }
    if flags & libc::CLONE_FILES != 0 {
        process::close_for_good(Native::RawFork);
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::clone(function, stack, flags, argument, parent, storage, child) };
    }
    let mut started = Started { function, argument };
    forks::before();
    // SAFETY: the program's own arguments (`# Safety`), but for the function: `started` lives as long as the child's
    // copy of this stack.
    let made = unsafe { real::clone(start, stack, flags, (&raw mut started).cast(), parent, storage, child) };
    forks::after_in_parent();
    made
}

/// Intercepts the C library's `_Fork`, which calls no handlers.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _Fork() -> pid_t {
    forks::before();
    // SAFETY: no arguments.
    let child = unsafe { real::fork_without_handlers() };
    match child {
        0 => forks::after_unprepared(),
        _ => forks::after_in_parent(),
    }
    child
}

/// A handler of forks.
type AtFork = Option<unsafe extern "C" fn()>;

/// Intercepts the C library's `__register_atfork`, by which pthread_atfork(3) registers handlers. Libraries that are
/// begun before this one register theirs, too: this one's come first.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __register_atfork(before: AtFork, parent: AtFork, child: AtFork, object: *mut c_void) -> c_int {
    forks::register();
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::register_at_fork(before, parent, child, object) }
}

/// Intercepts the C library's `syscall`: a system call on a socket without the function for it.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    if sections::is_withdrawn() && !matches!(number, libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_seccomp) {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::syscall(number, a, b, c, d, e, f) };
    }
    match number {
        // SAFETY: the program's own arguments (`# Safety`).
        libc::SYS_io_uring_setup => return rings::set_up(b as *const _, || unsafe { real::syscall(number, a, b, c, d, e, f) }),
        libc::SYS_io_uring_enter => {
            return rings::enter(a as c_int, b as u32, c as u32, d as u32, |count, least, flags| {
                let [count, least, flags] = [count, least, flags].map(c_long::from);
                // SAFETY: the program's own arguments (`# Safety`), but for the numbers of entries to submit and to
                // wait for, and the flags.
                unsafe { real::syscall(number, a, count, least, flags, e, f) }
            });
        }
        libc::SYS_io_uring_register => rings::register(b as u32, c as *const _, d as u32),
        libc::SYS_seccomp if sets_filter(a, b, c) => {
            // SAFETY: the program's own arguments (`# Safety`).
            return filters::set(c as *const _, unserved::filters_itself, || unsafe { real::syscall(number, a, b, c, d, e, f) });
        }
        libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
            process::close_for_good(Native::RawFork);
            // SAFETY: the program's own arguments (`# Safety`).
            let child = unsafe { real::syscall(number, a, b, c, d, e, f) };
            if child == 0 && has_own_memory(number, a) {
                forks::after_unprepared();
            }
            return child;
        }
        libc::SYS_execve => {
            // SAFETY: the program's own arguments (`# Safety`).
            let call = |environment: Strings| unsafe { real::syscall(number, a, b, environment as _, d, e, f) as c_int };
            // SAFETY: path, arguments and environment are those of the program's execve(2) (`# Safety`).
            return unsafe { execute(Target::Path(a as _), c as _, call) }.into();
        }
        libc::SYS_execveat => {
            // SAFETY: the program's own arguments (`# Safety`).
            let call = |environment: Strings| unsafe { real::syscall(number, a, b, c, environment as _, e, f) as c_int };
            // SAFETY: path, arguments and environment are those of the program's execveat(2) (`# Safety`).
            return unsafe { execute(Target::At(a as _, b as _, e as _), d as _, call) }.into();
        }
        // libuv closes this way, to have no cancellation point.
        // SAFETY: the program's own arguments (`# Safety`).
        libc::SYS_close => return unsafe { super::descriptors::close(a as c_int) }.into(),
        // SAFETY: the program's own arguments (`# Safety`).
        libc::SYS_epoll_ctl => return unsafe { super::events::epoll_ctl(a as _, b as _, c as _, d as _) }.into(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the program's own arguments (`# Safety`).
        libc::SYS_epoll_wait => return unsafe { super::events::epoll_wait(a as _, b as _, c as _, d as _) }.into(),
        // SAFETY: the program's own arguments (`# Safety`).
        libc::SYS_epoll_pwait => return unsafe { super::events::epoll_pwait(a as _, b as _, c as _, d as _, e as _) }.into(),
        _ if is_harmless(number) => {}
        _ => {
            if let Err(errno) = before_raw(number, c_int::try_from(a).unwrap_or(-1)) {
                return thread::fail(errno) as c_long;
            }
        }
    }
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::syscall(number, a, b, c, d, e, f) }
}

macro_rules! uses_io_uring {
    ($($name:ident = $symbol:literal($($argument:ident),*);)*) => {$(
        /// Intercepts liburing, which enters its rings by instructions of its own: from here on everything stays in the
        /// kernel.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($argument: usize),*) -> c_int {
            process::close_for_good(Native::IoUring);
            type Function = unsafe extern "C" fn($(uses_io_uring!(@type $argument)),*) -> c_int;
            // SAFETY: the symbol is liburing's function of this type.
            let function = unsafe { std::mem::transmute::<usize, Function>(real::address($symbol)) };
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { function($($argument),*) }
        }
    )*};
    (@type $argument:ident) => { usize };
}

uses_io_uring! {
    io_uring_queue_init = c"io_uring_queue_init"(entries, ring, flags);
    io_uring_queue_init_params = c"io_uring_queue_init_params"(entries, ring, parameters);
}

#[cfg(target_arch = "x86_64")]
mod variadic {
    //! Functions that return twice, or take a variable number of arguments.

    use super::{Strings, after_vfork, before_vfork, execve, execvpe, starts, thread};
    use libc::{c_char, c_int};

    /// Intercepts the C library's `vfork`. It makes the system call itself, since it has something to do when the child
    /// is gone. The child returns first, and may write to the stack from here on: what its parent needs after it is in
    /// registers, of which each process has its own.
    ///
    /// # Safety
    /// As for the C library's function.
    #[unsafe(no_mangle)]
    #[unsafe(naked)]
    pub unsafe extern "C" fn vfork() -> libc::pid_t {
        std::arch::naked_asm!(
            ".cfi_startproc",
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            "call {before}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            // The system call leaves rdi as it is. 16 is the number of the return address for those who unwind the
            // stack, 5 is rdi.
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            ".cfi_register 16, 5",
            "mov eax, {vfork}",
            "syscall",
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_offset 16, -8",
            "test eax, eax",
            "jz 2f",
            "push rax",
            ".cfi_adjust_cfa_offset 8",
            "call {after}",
            "mov rdi, [rsp]",
            "call {result}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "2:",
            "ret",
            ".cfi_endproc",
            before = sym before_vfork,
            after = sym after_vfork,
            result = sym vfork_result,
            vfork = const libc::SYS_vfork,
        )
    }

    /// What the C library's function returns for this result of the system call.
    extern "C-unwind" fn vfork_result(made: libc::c_long) -> libc::pid_t {
        if made < 0 { thread::fail(-made as c_int) as libc::pid_t } else { made as libc::pid_t }
    }

    extern "C-unwind" fn list(path: *const c_char, arguments: Strings) -> c_int {
        // SAFETY: the path and the list are the program's own arguments of execl(3); the environment is the process's.
        unsafe { execve(path, arguments, starts::environment()) }
    }

    extern "C-unwind" fn list_searched(file: *const c_char, arguments: Strings) -> c_int {
        // SAFETY: the file and the list are the program's own arguments of execlp(3); the environment is the process's.
        unsafe { execvpe(file, arguments, starts::environment()) }
    }

    extern "C-unwind" fn list_with_environment(path: *const c_char, arguments: Strings) -> c_int {
        // SAFETY: the path and the list are the program's own arguments of execle(3): the environment follows the null
        // that ends the list.
        unsafe {
            let mut end = arguments;
            while !(*end).is_null() {
                end = end.add(1);
            }
            execve(path, arguments, (*end.add(1)).cast())
        }
    }

    /// Functions whose arguments behind the first are a list that null ends. Those in registers are put before those on
    /// the stack, in place of the return address, which goes before them for as long as the call lasts.
    macro_rules! lists {
        ($($name:ident = $with:ident;)*) => {$(
            /// Intercepts the C library's function of this name.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub extern "C" fn $name() {
                std::arch::naked_asm!(
                    // 16 is the number of the return address for those who unwind the stack, 0 and 1 are rax and rdx.
                    ".cfi_startproc",
                    "pop rax",
                    ".cfi_adjust_cfa_offset -8",
                    ".cfi_register 16, 0",
                    "sub rsp, 40",
                    ".cfi_adjust_cfa_offset 40",
                    "mov [rsp + 0], rsi",
                    "mov [rsp + 8], rdx",
                    "mov [rsp + 16], rcx",
                    "mov [rsp + 24], r8",
                    "mov [rsp + 32], r9",
                    "mov rsi, rsp",
                    "push rax",
                    ".cfi_adjust_cfa_offset 8",
                    ".cfi_offset 16, -48",
                    "call {with}",
                    "pop rdx",
                    ".cfi_adjust_cfa_offset -8",
                    ".cfi_register 16, 1",
                    "add rsp, 40",
                    ".cfi_adjust_cfa_offset -40",
                    "push rdx",
                    ".cfi_adjust_cfa_offset 8",
                    ".cfi_offset 16, -8",
                    "ret",
                    ".cfi_endproc",
                    with = sym $with,
                )
            }
        )*};
    }

    lists! {
        execl = list;
        execlp = list_searched;
        execle = list_with_environment;
    }
}
