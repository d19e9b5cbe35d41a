//! The end of a session: agent and keeper have ended, in order or killed, and the control connection is hung up.
//!
//! After an orderly end every connection is in the kernel. After any other end the connections on the NIC are lost: the
//! bytes that they had received can still be read, then they fail as after a reset. Since no agent is left to write the
//! words of a connection's block, the program writes them.

use crate::connection::Connection;
use crate::shared::Shared;
use baton_abi::layout::Owner;
use baton_linux::events::monotonic_micros;
use baton_ring::Token;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Microseconds between two checks by a program that does not sleep.
const LOOK: u64 = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Ending {
    over: AtomicBool,
    /// Time of the last check, microseconds of the monotonic clock.
    looked: AtomicU64,
}

/// The error of a request after the session's end.
pub(crate) fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "Baton has ended; its connections are in the kernel")
}

impl Shared {
    /// Whether the session has ended, as far as any thread has noticed.
    #[inline(always)]
    pub fn has_ended(&self) -> bool {
        self.ending.over.load(Ordering::Acquire)
    }

    /// The descriptor that hangs up when the session ends. Threads that sleep watch it, and call [`Shared::notice_end`]
    /// then.
    pub fn hangs_up(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }

    /// Asks the kernel whether the session has ended. If so, from now on each of its connections is in the kernel or
    /// has failed.
    pub fn notice_end(&self, token: Token) -> bool {
        self.has_ended() || self.line.is_hung_up() && self.end(token)
    }

    /// As [`Shared::notice_end`], but asks only now and then: for a program that never sleeps.
    #[cold]
    pub fn notice_end_sometimes(&self, token: Token) -> bool {
        let now = monotonic_micros();
        if !self.has_ended() && now.wrapping_sub(self.ending.looked.load(Ordering::Relaxed)) < LOOK {
            return false;
        }
        self.ending.looked.store(now, Ordering::Relaxed);
        self.notice_end(token)
    }

    /// Ends the session. False if this thread was interrupted while it read the session's events, and now runs a signal
    /// handler.
    #[cold]
    fn end(&self, token: Token) -> bool {
        // The NIC's last events.
        self.catch_up(token);
        let ended = self.with_events(token, |round| {
            if self.has_ended() {
                return;
            }
            let connections = std::mem::take(&mut round.events.known.connections);
            for connection in connections.iter().flatten() {
                if connection.has_moved() && connection.owner() != Owner::Moving {
                    round.refresh(connection);
                }
                connection.fail();
                round.concern(connection.number());
            }
            round.events.known.connections = connections;
            self.ending.over.store(true, Ordering::Release);
        });
        ended.is_some()
    }

    /// Gives the session's memory back to the system, if it has ended and no connection is lost. The memory reads as
    /// zero afterwards, so a late thread finds that the kernel has its connection.
    pub fn discard_memory(&self) {
        self.memory().discard(0, self.memory().len());
    }

    /// Whether the connection was lost with the NIC.
    pub fn has_lost(&self, connection: &Connection) -> bool {
        self.has_ended() && connection.owner() == Owner::Nic
    }
}
