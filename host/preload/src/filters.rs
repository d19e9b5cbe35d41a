//! Filters of system calls (seccomp).
//!
//! Before the process sets one, every connection is restored and the library withdraws: see
//! [`sections`](crate::sections).
//!
//! A program may also be started under filters. If they let through what the library needs
//! ([`seccomp`](baton_linux::seccomp)) it goes on as usual, otherwise it is withdrawn from the start. The library
//! cannot find out by a call, since a filter may kill the process for it. So [`RUN_VARIABLE`] says what the filters let
//! through, and how many there are: `baton run` has tried the filters that it was started under, and a process that
//! sets a filter evaluates it for the programs that it executes.

use crate::{epoll, faults, messages, process, rings, sections, signals, starts, table, thread, udp, waiter};
use baton_client::preload;
use baton_client::rules::{RUN_VARIABLE, Run};
use baton_linux::process::Undisturbed;
use baton_linux::seccomp::{self, Instruction};
use baton_protocol::native::Native;
use libc::{c_char, c_long, iovec, sock_filter, sock_fprog};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Microseconds for which a withdrawal waits for threads inside the library. Threads that sleep there are woken.
const PATIENCE: u64 = 5_000_000;

/// Most instructions of a filter (Linux, BPF_MAXINSNS).
const MOST: usize = 4096;

/// The value of [`RUN_VARIABLE`] for programs that are executed after a second filter, which the library has not
/// evaluated. Null before the first filter.
static UNKNOWN: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// LD_PRELOAD for programs that are executed under filters which may not let through readlink(2): a path with parts
/// that only glibc's dynamic linker expands makes it call readlink(2). Null before the first filter, and if the path
/// has no such parts.
static PLAIN: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Sets a filter, by the program's own call, after the library has withdrawn. `filter` is null for the strict mode;
/// `report` names a program that has no session to the agent.
#[cold]
pub(crate) fn set(filter: *const sock_fprog, report: fn(), call: impl FnOnce() -> c_long) -> c_long {
    let plan = process::plan();
    if sections::is_withdrawn() {
        let done = call();
        if done >= 0 {
            report_programs(UNKNOWN.load(Ordering::Acquire), false);
        }
        return done;
    }
    // A child of vfork uses its parent's memory, and must not withdraw for it.
    let Some(plan) = plan.filter(|_| process::is_mine()) else { return call() };
    let errno = thread::errno();
    let judged = if filter.is_null() { Some(Judged::Lacks("every call but four")) } else { judge(filter) };
    let Some(judged) = judged else {
        // The kernel will refuse it. Libraries make such calls to find out which filters it supports.
        thread::set_errno(errno);
        return call();
    };
    let next = variable(&after(plan.run(), judged));
    UNKNOWN.store(variable(&Run { filters: 0, refused: None, ..plan.run().clone() }), Ordering::Release);
    let libraries = std::env::var_os(preload::VARIABLE).unwrap_or_default();
    if let Some((before, after)) = preload::around_token(libraries.as_bytes()) {
        PLAIN.store(kept(preload::VARIABLE, &[before, after].concat()), Ordering::Release);
    }
    withdraw(report);
    thread::set_errno(errno);
    let done = call();
    if done >= 0 {
        report_programs(next, matches!(judged, Judged::Enough));
    }
    done
}

/// What a filter that the process sets means for this library in the programs that it executes.
#[derive(Clone, Copy)]
enum Judged {
    Enough,
    /// The filter does not let this system call through.
    Lacks(&'static str),
    Unknown,
}

/// The configuration for a program that is executed under one more filter.
fn after(run: &Run, judged: Judged) -> Run {
    // Other threads may have other filters. The number of filters is passed on only if this library knows all of them.
    let known = seccomp::filters() == Some(run.filters);
    match judged {
        Judged::Enough if known => Run { filters: run.filters + 1, ..run.clone() },
        Judged::Enough | Judged::Unknown => run.clone(),
        Judged::Lacks(call) => Run { refused: Some(call.into()), ..run.clone() },
    }
}

/// [`RUN_VARIABLE`], in memory that stays.
fn variable(run: &Run) -> *mut c_char {
    serde_json::to_string(run).map_or(std::ptr::null_mut(), |text| kept(RUN_VARIABLE, text.as_bytes()))
}

/// An environment variable, in memory that stays.
fn kept(name: &str, value: &[u8]) -> *mut c_char {
    CString::new([name.as_bytes(), b"=", value].concat()).map_or(std::ptr::null_mut(), CString::into_raw)
}

/// Puts the variables for a program into the environment. Makes no system call.
fn report_programs(next: *mut c_char, is_known: bool) {
    starts::replace(RUN_VARIABLE, next);
    if !is_known {
        starts::replace(preload::VARIABLE, PLAIN.load(Ordering::Acquire));
    }
}

/// Result of reading the program's memory.
enum Look<T> {
    Seen(Vec<T>),
    /// The pointer is invalid: the kernel cannot read there either (EFAULT).
    Nowhere,
    /// The kernel refused the read for another reason.
    Refused,
}

/// Runs the program's filter on each system call that the library needs. None if the filter cannot be read or is too
/// long, so that the kernel will refuse it.
fn judge(filter: *const sock_fprog) -> Option<Judged> {
    let program: sock_fprog = match look(filter, 1) {
        Look::Seen(mut found) => found.pop()?,
        Look::Nowhere => return None,
        Look::Refused => return Some(Judged::Unknown),
    };
    let length = usize::from(program.len);
    if length > MOST {
        return None;
    }
    let instruction = |one: sock_filter| Instruction { code: one.code, jt: one.jt, jf: one.jf, k: one.k };
    Some(match look::<sock_filter>(program.filter, length) {
        Look::Seen(found) => match seccomp::judge(&found.into_iter().map(instruction).collect::<Vec<_>>()) {
            Ok(()) => Judged::Enough,
            Err(call) => Judged::Lacks(call),
        },
        Look::Nowhere => return None,
        Look::Refused => Judged::Unknown,
    })
}

/// Copies `count` values from an unchecked pointer. process_vm_readv(2) returns EFAULT where a load would raise
/// SIGSEGV, and needs no descriptor: a program that confines itself may be at its limit.
fn look<T: Copy>(from: *const T, count: usize) -> Look<T> {
    let bytes = count * size_of::<T>();
    let mut values: Vec<T> = Vec::with_capacity(count);
    let ours = iovec { iov_base: values.as_mut_ptr().cast(), iov_len: bytes };
    let theirs = iovec { iov_base: from.cast_mut().cast(), iov_len: bytes };
    // SAFETY: `ours` has room for `count` values: structures of the kernel's, of any bytes. The kernel checks the
    // program's pointer.
    unsafe {
        let copied = libc::process_vm_readv(libc::getpid(), &ours, 1, &theirs, 1, 0);
        if copied == bytes as isize {
            values.set_len(count);
            return Look::Seen(values);
        }
        let fault = copied >= 0 || thread::errno() == libc::EFAULT;
        if fault { Look::Nowhere } else { Look::Refused }
    }
}

/// Withdraws.
fn withdraw(report: fn()) {
    // A signal handler that uses a socket would wait for the withdrawal that it interrupts.
    let _undisturbed = Undisturbed::begin();
    // Opens a session while that is possible, so that the agent can be sent the reason why nothing moves.
    process::ask_while_possible();
    report();
    process::close_for_good(Native::Filters);
    sections::withdraw();
    let alone = sections::await_none(PATIENCE, waiter::wake_all);
    // Once more: a thread that was still inside may have begun to hand over or accept a connection before
    // `close_for_good`.
    process::give_everything_back(process::SECCOMP);
    if alone {
        leave();
    }
}

/// Removes the library's handlers, registrations and session from the process. No thread is inside the library.
fn leave() {
    faults::end();
    signals::end();
    process::end();
    epoll::release_all();
    for (fd, file) in table::known(0, u32::MAX) {
        if matches!(file, table::File::Tcp(_)) {
            table::put(fd, None);
        }
    }
    rings::forget_all();
    udp::forget_all();
    udp::close_all();
    waiter::close_all();
}

/// Whether there are filters that this library has not evaluated, because the program has set them by its own
/// instructions.
pub(crate) fn are_unknown() -> bool {
    process::plan().is_some_and(|plan| seccomp::filters().is_some_and(|filters| filters > plan.run().filters))
}

/// Withdraws from the start if the program was started under filters that, as far as known, do not let through the
/// calls that the library needs, and prints that. Until this is decided, it makes no system calls but those that the
/// dynamic linker makes, too.
pub(crate) fn withdraw_if_confined(run: &Run) -> bool {
    let confined = seccomp::filters().is_some_and(|filters| filters > run.filters);
    if confined {
        sections::withdraw();
        let why = match run.refused.as_deref() {
            // Without write(2) there is no way to print anything.
            Some("write") => return true,
            Some(call) => format!("does not allow {call}"),
            None => "is not known to allow what Baton needs".into(),
        };
        let line = format!("baton: this program runs without Baton: it was started under a seccomp filter that {why}\n");
        messages::say_under_filter(line.as_bytes());
    }
    confined
}
