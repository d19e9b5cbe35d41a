//! The end of a session: agent and keeper are gone, in order or killed, and the control connection is hung up.
//!
//! After an orderly end every connection is in the kernel. After any other one those that the NIC had are lost: what they had received can
//! still be read, then they fail as after a reset. Nobody is left who could change the words of a connection's block; so the program does.

use crate::connection::Connection;
use crate::shared::{Shared, refresh};
use baton_abi::layout::Owner;
use baton_linux::events::monotonic_micros;
use baton_ring::Token;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Microseconds between two looks of a program that does not sleep.
const LOOK: u64 = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Ending {
    over: AtomicBool,
    /// When it was looked last, microseconds of the monotonic clock.
    looked: AtomicU64,
}

/// What a request fails with when there is nobody to answer it.
pub(crate) fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "Baton has ended; its connections are in the kernel")
}

impl Shared {
    /// Whether the session has ended, as far as anybody has noticed.
    #[inline(always)]
    pub fn has_ended(&self) -> bool {
        self.ending.over.load(Ordering::Acquire)
    }

    /// The descriptor that hangs up when the session ends. Whoever sleeps watches it, and calls [`Shared::notice_end`] then.
    pub fn hangs_up(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }

    /// Asks the kernel whether the session has ended. If so, each of its connections is in the kernel or has failed from now on.
    pub fn notice_end(&self, token: Token) -> bool {
        self.has_ended() || self.line.is_hung_up() && self.end(token)
    }

    /// As [`Shared::notice_end`], but asks rarely: for a program that never sleeps.
    #[cold]
    pub fn notice_end_sometimes(&self, token: Token) -> bool {
        let now = monotonic_micros();
        if !self.has_ended() && now.wrapping_sub(self.ending.looked.load(Ordering::Relaxed)) < LOOK {
            return false;
        }
        self.ending.looked.store(now, Ordering::Relaxed);
        self.notice_end(token)
    }

    /// False if this thread is in the middle of reading the session's events, in whose handler it is now.
    #[cold]
    fn end(&self, token: Token) -> bool {
        // What the NIC said last.
        self.catch_up(token);
        let Some(mut events) = self.events.lock(token) else { return false };
        if !self.has_ended() {
            let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
            for connection in connections.iter().flatten() {
                if connection.has_moved() && connection.owner() != Owner::Moving {
                    refresh(&mut events, connection);
                }
                connection.fail();
                self.listener.0(connection.number());
            }
            self.ending.over.store(true, Ordering::Release);
        }
        true
    }

    /// After the session's end, if none of its connections is lost: gives its memory back to the system. It reads as zero afterwards, so a
    /// thread that is late finds that nobody but the kernel has its connection.
    pub fn discard_memory(&self) {
        self.memory().discard(0, self.memory().len());
    }

    /// Whether the connection was lost with the NIC.
    pub fn has_lost(&self, connection: &Connection) -> bool {
        self.has_ended() && connection.owner() == Owner::Nic
    }
}
