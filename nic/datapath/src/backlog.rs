//! Messages to the agent that found its ring full: they wait here, in their order, and the NIC does not sleep until they are told.

use baton_abi::{Message, Operation};
use baton_ring::Producer;
use baton_shm::RingWords;
use std::collections::VecDeque;

/// What waits. It is bounded by the connections: each ends once and asks for its return once, and the agent gives one command at a time.
#[derive(Default)]
pub(crate) struct Backlog(VecDeque<Message>);

impl Backlog {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps a message. Of the room that there is only the last word counts, and a connection that is to return is to return, however often
    /// that is said.
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

    /// Puts into the ring what it has room for. Whether that was anything.
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
