//! The sockets API of unmodified programs, over the client library: this library is preloaded, and stands in front of the C library's
//! functions that have to do with sockets.
//!
//! Sockets stay the kernel's until a rule says that a connection is worth moving; then the agent hears of it, and from that moment no
//! thread of the program waits inside the kernel for that socket alone. What a program asks of a connection on the NIC is done here,
//! without a system call where possible; what only the kernel can do is done by the kernel, after the connection has gone back.
//!
//! Not seen from here: what the C library does inside itself (stdio on a socket: `fdopen` gives the connection back first), and system
//! calls that a program makes with instructions of its own.

mod calls;
mod custody;
mod epoll;
mod interest;
mod io;
mod options;
mod poll;
mod process;
mod readiness;
mod real;
mod table;
mod tcp;
mod thread;
mod wait;
mod worth;

/// The inode behind a descriptor, 0 if there is none.
fn fd_inode(fd: libc::c_int) -> u64 {
    // SAFETY: the program's descriptor, during its own call, or while it is asked about.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    baton_linux::socket::inode(borrowed).unwrap_or(0)
}
