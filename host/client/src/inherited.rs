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
use baton_ring::Token;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

/// Longest time that a child waits, with each of its agents: an agent that has died has a successor by then.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest time for one answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Tag of the request: that of no session that is opened, which may get the number of this connection later.
const TAG: u32 = u32::MAX >> 1;

/// Has a connection in the kernel, where it stays until no other process holds its socket. `agent`: the path of the
/// agent's socket. Returns false if that could not be had.
pub fn inherit(shared: &Shared, (number, token): (u32, Token), agent: &Path, fd: BorrowedFd<'_>) -> bool {
    let until = monotonic_micros() + PATIENCE.as_micros() as u64;
    loop {
        if kernel_hold::mark_in_kernel(shared, number, token) || ask(agent, fd).unwrap_or(false) {
            return true;
        }
        if monotonic_micros() >= until {
            return false;
        }
        // Waits: for another thread's operation on the connection, or for the next agent; neither is an event here.
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ask(agent: &Path, fd: BorrowedFd<'_>) -> std::io::Result<bool> {
    let (question, done) = (Request { tag: TAG, body: Ask::Inherit }, Answer { tag: TAG, body: Reply::Done });
    Channel::connect_within(agent, ANSWER)?.ask_briefly(&question, fd, &done, ANSWER)
}
