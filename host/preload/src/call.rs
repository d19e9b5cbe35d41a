//! The program's own system calls to receive and to send.

use crate::real;
use libc::{c_int, msghdr, ssize_t};

/// The system call that the program made. A call that is passed on to the kernel must have the same number: a process
/// under a seccomp filter may be killed for an equivalent one, such as recvmsg(2) for read(2).
#[derive(Clone, Copy)]
pub(crate) enum Call {
    /// read(2), write(2): one buffer, no flags.
    Plain,
    /// recv(2), recvfrom(2), send(2), sendto(2): one buffer.
    Flagged,
    /// readv(2), writev(2): no flags.
    Vector,
    /// recvmsg(2), sendmsg(2).
    Message,
    /// One message of recvmmsg(2), sendmmsg(2).
    Several,
    /// A message of recvmmsg(2) after the first one: an error of the connection is left for the program's next call.
    Further,
}

impl Call {
    /// The program's own call, to receive.
    ///
    /// # Safety
    /// As recvmsg(2); for one buffer the message has one vector.
    pub unsafe fn receive(self, fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the message's buffers are those of the program's call (`# Safety`); calls for one buffer have one
        // vector.
        unsafe {
            match self {
                Call::Plain => real::read(fd, (*message.msg_iov).iov_base, (*message.msg_iov).iov_len),
                Call::Flagged => {
                    let (vector, name) = (*message.msg_iov, message.msg_name.cast());
                    let size = if message.msg_name.is_null() { std::ptr::null_mut() } else { &raw mut message.msg_namelen };
                    real::recvfrom(fd, vector.iov_base, vector.iov_len, flags, name, size)
                }
                Call::Vector => real::readv(fd, message.msg_iov, message.msg_iovlen as c_int),
                Call::Message => real::recvmsg(fd, message, flags),
                Call::Several | Call::Further => {
                    let mut one = libc::mmsghdr { msg_hdr: *message, msg_len: 0 };
                    let got = real::recvmmsg(fd, &mut one, 1, flags, std::ptr::null_mut());
                    *message = one.msg_hdr;
                    if got < 0 { got as ssize_t } else { one.msg_len as ssize_t }
                }
            }
        }
    }

    /// The program's own call, to send.
    ///
    /// # Safety
    /// As sendmsg(2); for one buffer the message has one vector.
    pub unsafe fn send(self, fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
        // SAFETY: the message's buffers are those of the program's call (`# Safety`); calls for one buffer have one
        // vector.
        unsafe {
            match self {
                Call::Plain => real::write(fd, (*message.msg_iov).iov_base, (*message.msg_iov).iov_len),
                Call::Flagged => {
                    let vector = *message.msg_iov;
                    real::sendto(fd, vector.iov_base, vector.iov_len, flags, message.msg_name.cast(), message.msg_namelen)
                }
                Call::Vector => real::writev(fd, message.msg_iov, message.msg_iovlen as c_int),
                Call::Message => real::sendmsg(fd, message, flags),
                Call::Several | Call::Further => {
                    let mut one = libc::mmsghdr { msg_hdr: *message, msg_len: 0 };
                    let sent = real::sendmmsg(fd, &mut one, 1, flags);
                    if sent < 0 { sent as ssize_t } else { one.msg_len as ssize_t }
                }
            }
        }
    }
}

/// The result of a call that had transferred `done` bytes before the program's own call went on with the rest.
pub(crate) fn sum(done: usize, rest: ssize_t) -> ssize_t {
    if rest >= 0 {
        done as ssize_t + rest
    } else if done > 0 {
        done as ssize_t
    } else {
        rest
    }
}
