//! Events for the agent for which its ring had no room. They wait here in order, and the NIC does not sleep until they
//! are sent.

use baton_abi::{Announcement, Control, FOR_AGENT, Message, Operation};
use baton_ring::Producer;
use baton_shm::RingWords;
use std::collections::VecDeque;

/// The waiting messages. Their number is bounded, however long the agent does not read: by the number of its commands
/// that need an answer, and by one event of each kind for each connection, session and address.
#[derive(Default)]
pub(crate) struct Backlog(VecDeque<Message>);

/// Whether a message answers a command: each command has its own answer.
fn is_answer(message: &Message) -> bool {
    matches!(Control::from_number(message.kind & !FOR_AGENT), Some(Control::Done | Control::Refused))
}

impl Backlog {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends a message. A later `os_resource` replaces an earlier one about the same resource, and a later
    /// `os_restore` an earlier one of the same connection; an event that is already waiting is not repeated.
    #[cold]
    pub fn add(&mut self, message: Message) {
        let resource = Announcement::from_message(&message).map(|announcement| announcement.resource);
        let same = |other: &&mut Message| match resource {
            None => other.operation == message.operation && other.cid == message.cid,
            Some(_) => Announcement::from_message(other).map(|announcement| announcement.resource) == resource,
        };
        match message.operation {
            Operation::OsResource | Operation::OsRestore => match self.0.iter_mut().find(same) {
                Some(other) => *other = message,
                None => self.0.push_back(message),
            },
            Operation::OsControl if !is_answer(&message) && self.0.contains(&message) => {}
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

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::{Cid, Resource};

    /// However often an address's state changes or a session breaks the rules while the agent does not read: there is
    /// one event of each. Each answer is an event of its own.
    #[test]
    fn events_that_repeat_take_no_more_room() {
        let mut backlog = Backlog::default();
        let event = |control, cid| Message::control(Operation::OsControl, control, Cid(cid), 0, 0);
        for at in 1..1000 {
            backlog.add(event(Control::Addresses, 0));
            backlog.add(event(Control::Detach, 0));
            backlog.add(Message::new(Operation::OsRestore, Cid(7), 0, 0));
            for resource in Resource::ALL {
                backlog.add(Announcement { number: at, resource, taken: at.into(), free: 1 }.to_message());
            }
        }
        assert_eq!(backlog.0.len(), 3 + Resource::ALL.len());
        (0..10).for_each(|_| backlog.add(event(Control::Done, 7)));
        assert_eq!(backlog.0.len(), 13 + Resource::ALL.len());
    }
}
