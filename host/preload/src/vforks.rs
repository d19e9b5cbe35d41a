//! A child of vfork(2): it has its parent's memory, copies of its descriptors, and is there until it executes a program
//! or ends.
//!
//! POSIX allows it to do nothing else. Linux does, and language runtimes (Python's subprocess, Java) close, duplicate
//! and open descriptors in it: a number that this library knows as the parent's socket may soon be a file of the child's.
//! So nothing is tracked for a child ([`table`](crate::table), [`udp`](crate::udp)), its calls are the kernel's
//! ([`Section::enter`](crate::sections::Section::enter)), and what it does changes nothing of what is known of its
//! parent. What it needs of this library is that a connection which it passes on to the program that it executes is in
//! the kernel then, and that the environment of that program is right ([`starts`](crate::starts)).

use crate::sections::Section;
use crate::table::File;
use crate::{forks, process, tcp, thread, udp};
use baton_protocol::program::Until;
use libc::c_int;

/// Why a connection is restored.
const EXEC: &str = "exec";

/// Restores a connection that a child of vfork(2) uses by this descriptor, `file` for its parent, unless it is something
/// else for the child.
#[cold]
pub(crate) fn restore(fd: c_int, file: Option<File>) {
    let Some(File::Tcp(socket)) = file else { return };
    let errno = thread::errno();
    if tcp::is_tcp(fd)
        && let Some(_section) = Section::enter_anyhow()
    {
        socket.give_back(EXEC, Until::Alone);
    }
    thread::set_errno(errno);
}

/// Restores connections whose descriptors another program would inherit: those without FD_CLOEXEC.
pub(crate) extern "C-unwind" fn before_exec() {
    let Some(_section) = Section::enter_anyhow() else { return };
    let errno = thread::errno();
    let is_child = process::is_child_of_vfork();
    for (fd, tcp) in forks::stay_open(false) {
        if !is_child || tcp::is_tcp(fd) {
            tcp.give_back(EXEC, Until::Alone);
        }
    }
    udp::give_back_inherited();
    thread::set_errno(errno);
}

/// As [`before_exec`], for a child that the calling thread is about to make.
pub(crate) extern "C-unwind" fn before_vfork() {
    before_exec();
    process::note_vfork();
}
