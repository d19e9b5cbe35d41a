//! The doorbells between a program and the NIC: a pair of datagram sockets, one end each.
//!
//! An eventfd would be one object for both processes, and either could make the other block, by its flags or by filling
//! its count. With sockets each call says by itself that it must not block. Neither end accepts descriptors: the
//! process that clears its bell would have to close them, which may block. Datagram sockets do not report that the
//! other end is closed; both processes learn that by other means.

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Rings that an end can queue with its small buffer, and a few more.
const MOST: usize = 16;

/// One end. Ringing one end makes the other end readable.
#[derive(Debug)]
pub struct SessionBell(OwnedFd);

impl SessionBell {
    /// Both ends.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn pair() -> io::Result<(SessionBell, SessionBell)> {
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        for end in [&one, &other] {
            // Few rings fit: one unread ring is as good as many.
            set_socket_send_buffer_size(end, 1)?;
            crate::socket::refuse_descriptors(end.as_fd());
        }
        Ok((SessionBell(one), SessionBell(other)))
    }

    /// An end that was inherited or received.
    pub fn from_fd(fd: OwnedFd) -> SessionBell {
        SessionBell(fd)
    }

    /// A duplicate of this end's descriptor.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn try_clone(&self) -> io::Result<SessionBell> {
        self.0.try_clone().map(SessionBell)
    }

    /// Rings the other end, which stays readable until it is cleared.
    pub fn ring(&self) {
        // It may fail because the other end is readable already, or closed.
        let _ = rustix::net::send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Takes one ring from this end.
    pub fn take(&self) {
        let _ = rustix::net::recv(&self.0, &mut [0u8; 1], RecvFlags::DONTWAIT);
    }

    /// Clears this end.
    pub fn clear(&self) {
        let mut ring = [0u8; 1];
        for _ in 0..MOST {
            if rustix::net::recv(&self.0, &mut ring, RecvFlags::DONTWAIT).is_err() {
                return;
            }
        }
    }
}

impl AsFd for SessionBell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<SessionBell> for OwnedFd {
    fn from(bell: SessionBell) -> OwnedFd {
        bell.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Poller, Trigger};
    use std::time::Duration;

    fn rings(end: &SessionBell) -> bool {
        let poller = Poller::new().unwrap();
        poller.add(end.as_fd(), 0, Trigger::Readable).unwrap();
        let mut tokens = Vec::new();
        poller.wait(Some(Duration::ZERO), &mut tokens).unwrap();
        !tokens.is_empty()
    }

    #[test]
    fn each_end_rings_the_other() {
        let (here, there) = SessionBell::pair().unwrap();
        here.ring();
        assert!(rings(&there) && !rings(&here));
        there.ring();
        there.clear();
        here.clear();
        assert!(!rings(&there) && !rings(&here));
    }

    /// A process that clears or closes its end never has to close descriptors that were sent to it.
    #[test]
    fn no_end_takes_descriptors() {
        let (here, there) = SessionBell::pair().unwrap();
        // Linux before 6.16 cannot refuse them.
        let refuses = crate::socket::refuse_descriptors(here.as_fd());
        for end in [&here, &there] {
            assert_eq!(crate::control::try_send_bytes(end.as_fd(), &[1], &[end.as_fd()]).is_err(), refuses);
        }
        assert_eq!([rings(&here), rings(&there)], [!refuses; 2]);
        here.ring();
        assert!(rings(&there));
    }

    /// Neither flags nor a full buffer make either side block: this test would never end.
    #[test]
    fn nobody_waits_for_the_other_end() {
        let (here, there) = SessionBell::pair().unwrap();
        here.clear();
        for _ in 0..100_000 {
            here.ring();
        }
        there.clear();
        assert!(!rings(&there), "one clear takes all rings");
        drop(there);
        here.ring();
        here.clear();
        assert!(!rings(&here), "a closed end makes no noise");
    }
}
