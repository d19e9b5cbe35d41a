//! The doorbells between a program and the NIC: a pair of datagram sockets, one end each.
//!
//! An eventfd would be one object for both processes, and either could make the other block, by its flags or by filling its
//! count. Here each call says by itself that it must not block. Datagram sockets do not report that the other end is closed;
//! both sides learn that elsewhere.

use crate::socket::{check, set};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Rings that an end can queue with its small buffer, and a few more.
const MOST: usize = 16;

/// One end. Ringing it makes the other end readable, and the other way round.
#[derive(Debug)]
pub struct SessionBell(OwnedFd);

impl SessionBell {
    /// Both ends.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn pair() -> io::Result<(SessionBell, SessionBell)> {
        let mut raw = [0; 2];
        // SAFETY: room for two descriptors.
        check(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0, raw.as_mut_ptr()) })?;
        // SAFETY: both descriptors are new and ours.
        let ends = raw.map(|fd| SessionBell(unsafe { OwnedFd::from_raw_fd(fd) }));
        for end in &ends {
            // Few rings fit: one unread ring is as good as many.
            set(end.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, 1)?;
        }
        Ok(ends.into())
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
        // SAFETY: one live byte. It may fail because the other end rings already, or is closed.
        unsafe { libc::send(self.0.as_raw_fd(), [1u8].as_ptr().cast(), 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    }

    /// Clears this end.
    pub fn clear(&self) {
        let mut ring = [0u8; 1];
        for _ in 0..MOST {
            // SAFETY: room for one byte.
            let got = unsafe { libc::recv(self.0.as_raw_fd(), ring.as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) };
            if got < 0 {
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
