//! A connection whose socket the program gets that a child of vfork(2) executes.
//!
//! The child has its parent's memory. A lock that it takes would stay locked if it were killed, and a thread of its
//! parent's that has one may have ended with the parent. So it takes neither a lock nor memory of the heap, and asks
//! the agent over a connection of its own.

use crate::kernel_hold;
use crate::shared::Shared;
use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_protocol::program::{Answer, Ask, Reply, Request};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest time that a child waits, for all its connections together: an agent that has died has a successor by then.
const PATIENCE: Duration = Duration::from_secs(3);

/// Longest time for one answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Pauses between tries, each twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Tag of the request: that of no session that is opened, which may get the number of this connection later.
const TAG: u32 = u32::MAX >> 1;

/// A child of vfork(2).
#[derive(Clone, Copy)]
pub struct Child<'a> {
    /// The path of its agent's socket.
    pub agent: &'a Path,
    /// When its patience ends, by the monotonic clock in microseconds; 0 as long as it has not begun to wait.
    pub until: &'a AtomicU64,
}

impl Child<'_> {
    /// Has a connection in the kernel, where it stays until no other process holds its socket, of which the child has
    /// this descriptor. Returns false if that could not be had.
    pub fn takes(self, shared: &Shared, number: u32, fd: BorrowedFd<'_>) -> bool {
        let mut pause = PAUSE;
        loop {
            if kernel_hold::mark_in_kernel(shared.memory(), number) || self.asks(number, fd).unwrap_or(false) {
                return true;
            }
            if self.is_out_of_patience() {
                return false;
            }
            // Waits: for the end of a move, or for the next agent; neither is an event here.
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn is_out_of_patience(self) -> bool {
        let now = monotonic_micros();
        if self.until.load(Ordering::Relaxed) == 0 {
            self.until.store(now + PATIENCE.as_micros() as u64, Ordering::Relaxed);
        }
        now >= self.until.load(Ordering::Relaxed)
    }

    fn asks(self, connection: u32, fd: BorrowedFd<'_>) -> std::io::Result<bool> {
        let (question, done) = (Request { tag: TAG, body: Ask::Inherit { connection } }, Answer { tag: TAG, body: Reply::Done });
        Channel::connect_within(self.agent, ANSWER)?.ask_briefly(&question, fd, &done, ANSWER)
    }
}
