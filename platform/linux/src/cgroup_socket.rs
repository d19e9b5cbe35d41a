//! A socket of another control group: BPF programs attached to the group judge the socket's system calls, as for the
//! sockets of the group's programs.

use crate::socket::check;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// How long the group's process may take: a group can be frozen, or have no processor time left.
const PATIENCE: Duration = Duration::from_millis(20);

/// Words of 8 bytes in `struct clone_args` up to the control group.
const CLONE_WORDS: usize = 11;
const CLONE_PIDFD: u64 = 0x1000;
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// Makes a TCP socket that belongs to a control group, of which `group` is the directory. A socket belongs to the group
/// of the process that makes it, so a process in that group is started to make it, does nothing else and ends. It gets
/// copies of the calling thread's descriptors and closes them at its end, which may block. So this is called by the
/// starter's thread, which has no descriptors of other users.
///
/// # Errors
/// The failed system call's; `ETIMEDOUT` if the group's processes do not run.
pub(crate) fn make(group: BorrowedFd<'_>, v6: bool) -> io::Result<OwnedFd> {
    let mut ends = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the array takes the two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
    // SAFETY: the kernel has just made both for this process, and nothing else owns them.
    let [ours, theirs] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    let mut pidfd: libc::c_int = -1;
    let mut arguments = [0u64; CLONE_WORDS];
    arguments[0] = CLONE_PIDFD | CLONE_INTO_CGROUP;
    arguments[1] = (&raw mut pidfd) as u64;
    arguments[10] = group.as_raw_fd() as u64;
    // SAFETY: without CLONE_VM this is a fork; the arguments are as long as said, and the pidfd's place is live.
    let process = unsafe { libc::syscall(libc::SYS_clone3, arguments.as_mut_ptr(), size_of_val(&arguments)) };
    if process == 0 {
        // SAFETY: this is the new process. It makes system calls only, and takes no lock that a thread of the old
        // process may have held.
        unsafe { give_socket(theirs.as_raw_fd(), v6) }
    }
    if process < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for this process.
    let child = unsafe { OwnedFd::from_raw_fd(pidfd) };
    drop(theirs);
    let received = is_readable(&ours).and_then(|readable| match readable {
        true => take_socket(&ours),
        false => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
    });
    end(&child);
    received
}

/// Makes a socket, sends it, and ends the process.
///
/// # Safety
/// Only for a process that was forked just now.
unsafe fn give_socket(channel: i32, v6: bool) -> ! {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: plain system calls; every pointer is to a local variable.
    unsafe {
        let made = libc::syscall(libc::SYS_socket, family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) as i32;
        let mut byte = [0u8; 1];
        let mut piece = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = Control::new();
        control.header.cmsg_level = libc::SOL_SOCKET;
        control.header.cmsg_type = libc::SCM_RIGHTS;
        control.header.cmsg_len = Control::USED as _;
        control.descriptor = made;
        let mut message = control.message(&mut piece);
        if made >= 0 {
            libc::syscall(libc::SYS_sendmsg, channel, &raw mut message, libc::MSG_NOSIGNAL);
        }
        loop {
            libc::syscall(libc::SYS_exit_group, 0);
        }
    }
}

/// Room for one descriptor beside a message, laid out as CMSG_DATA expects it.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    descriptor: i32,
    _padding: i32,
}

impl Control {
    const USED: usize = size_of::<libc::cmsghdr>() + size_of::<i32>();

    fn new() -> Control {
        // SAFETY: numbers only.
        Control { header: unsafe { zeroed() }, descriptor: -1, _padding: 0 }
    }

    fn message(&mut self, piece: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: null pointers and numbers.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = piece;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut *self).cast();
        message.msg_controllen = size_of::<Control>() as _;
        message
    }
}

fn is_readable(fd: &OwnedFd) -> io::Result<bool> {
    let mut watched = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    check(unsafe { libc::poll(&raw mut watched, 1, PATIENCE.as_millis() as i32) }).map(|ready| ready > 0)
}

fn take_socket(channel: &OwnedFd) -> io::Result<OwnedFd> {
    let mut byte = [0u8; 1];
    let mut piece = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control::new();
    let mut message = control.message(&mut piece);
    // SAFETY: the message points at a live buffer and at live room for one descriptor.
    let got = check(unsafe {
        libc::recvmsg(channel.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as libc::c_int
    })?;
    let has_one = got == 1 && message.msg_controllen >= Control::USED && control.header.cmsg_type == libc::SCM_RIGHTS;
    if !has_one {
        // The process could make none.
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    // SAFETY: the kernel has just put it into this process's table, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(control.descriptor) })
}

/// Ends the process and takes its status, unless it takes too long to end: then it stays a zombie until this process
/// ends.
fn end(child: &OwnedFd) {
    // SAFETY: a pidfd, a signal, no more.
    let _ = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, child.as_raw_fd(), libc::SIGKILL, 0usize, 0) };
    if is_readable(child).unwrap_or(false) {
        // SAFETY: the structure receives information on the child, which has ended.
        let _ = unsafe {
            let mut status: libc::siginfo_t = zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::__WALL;
            libc::waitid(libc::P_PIDFD, child.as_raw_fd() as libc::id_t, &raw mut status, options)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    fn group(name: &str) -> Option<std::path::PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?.split(' ').nth(1)?;
        let path = std::path::Path::new(mount).join(format!("baton-{name}-{}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => Some(path),
            Err(error) => {
                eprintln!("skipped: no control group can be made: {error}");
                assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
                None
            }
        }
    }

    #[test]
    fn a_socket_of_another_group_is_made_there() {
        let Some(path) = group("socket") else { return };
        let directory = File::open(&path).expect("the group");
        for v6 in [false, true] {
            let socket = make(directory.as_fd(), v6).expect("a socket");
            let domain = crate::socket::get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_DOMAIN).expect("its family");
            assert_eq!(domain, if v6 { libc::AF_INET6 } else { libc::AF_INET });
        }
        // No process is left in the group.
        assert_eq!(fs::read_to_string(path.join("cgroup.procs")).expect("its processes"), "");
        fs::remove_dir(&path).expect("the group is empty");
    }

    #[test]
    fn a_frozen_group_is_not_waited_for() {
        let Some(path) = group("frozen") else { return };
        let directory = File::open(&path).expect("the group");
        fs::write(path.join("cgroup.freeze"), "1").expect("frozen");
        assert_eq!(make(directory.as_fd(), false).expect_err("nothing runs there").raw_os_error(), Some(libc::ETIMEDOUT));
        fs::remove_dir(&path).expect("the group is empty");
    }
}
