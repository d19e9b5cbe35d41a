//! The sockets API of unmodified programs, over the client library. This library is preloaded (LD_PRELOAD) and
//! intercepts the C library's functions that concern sockets.
//!
//! A socket stays the kernel's until a rule says that its connection is worth moving. Then the library registers it
//! with the agent, and from that moment no thread of the program waits inside the kernel for that socket alone. Calls
//! on a connection that is on the NIC are served here, without a system call where possible; what only the kernel can
//! do is done by the kernel, after the connection has been restored.
//!
//! Two kinds of calls are not intercepted: those that the C library makes internally (stdio on a socket: see
//! `calls/stdio.rs`), and system calls that a program makes with its own instructions.

mod again;
mod at_once;
mod call;
mod calls;
mod cancelling;
mod completions;
mod connecting;
mod epoll;
mod faults;
mod few;
mod filters;
mod forks;
mod handover;
mod heap;
mod interest;
mod io;
mod kernel_only;
mod leaving;
mod listening;
mod lookout;
mod messages;
mod options;
mod poll;
mod ports;
mod process;
mod readiness;
mod real;
mod rings;
mod sections;
mod short_lock;
mod signals;
mod starts;
mod table;
mod tcp;
mod thread;
mod udp;
mod unserved;
#[cfg(target_arch = "x86_64")]
mod unwinding;
mod wait;
mod waiter;
mod waiting;
mod wake;
mod whole;
mod worth;

/// Inode number of a descriptor's file, 0 if there is none.
fn fd_inode(fd: libc::c_int) -> u64 {
    // SAFETY: `fd` is open for the duration of this call: it comes from the program's own call on it, or from
    // /proc/self/fd.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    baton_linux::socket::inode(borrowed).unwrap_or(0)
}
