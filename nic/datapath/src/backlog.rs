//! Messages to the agent that found its ring full. They wait here in order, and the NIC does not sleep until they are sent.

use baton_abi::{Message, Operation};
use baton_ring::Producer;
use baton_shm::RingWords;
use std::collections::VecDeque;

/// The waiting messages. Their number is bounded by the number of connections: each ends once and asks to be restored once, and
/// the agent has one command outstanding at a time.
#[derive(Default)]
pub(crate) struct Backlog(VecDeque<Message>);

impl Backlog {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends a message. A later `os_resource` replaces an earlier one, as a later `os_restore` of the same connection does.
    #[cold]
    pub fn add(&mut self, message: Message) {
        let same = |other: &&mut Message| other.operation == message.operation && other.cid == message.cid;
        match message.operation {
            Operation::OsResource | Operation::OsRestore => match self.0.iter_mut().find(same) {
                Some(other) => *other = message,
                None => self.0.push_back(message),
            },
            _ => self.0.push_back(message),
        }
    }

    /// Moves messages to the ring while it has room. Returns whether any was moved.
    pub fn flush(&mut self, ring: &mut Producer<RingWords>) -> bool {
        let mut any = false;
        while let Some(message) = self.0.front() {
            if ring.push(message.to_words()).is_err() {
                break;
            }
            self.0.pop_front();
            any = true;
        }
        any
    }
}
