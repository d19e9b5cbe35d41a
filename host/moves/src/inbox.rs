//! The NIC's messages, in the order in which they may be handled.

use crate::refusal::Refusal;
use alloc::collections::{BTreeMap, VecDeque};
use baton_abi::{ALREADY_HERE, Cid, Control, ENDED, EXCEEDED, Message, NOT_YET, Operation};

/// A message that is to be handled now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arrived {
    /// The answer to a command that was expected.
    Answer(Cid, Result<(), Refusal>),
    /// Anything else.
    Event(Message),
}

/// Messages of the NIC that have not been handled.
///
/// While a command about a connection is unanswered, other messages about its slot wait: what the NIC says of a
/// connection that it has just been handed comes before the answer, and concerns whoever has it then.
#[derive(Default, Debug)]
pub struct Inbox {
    queued: VecDeque<Message>,
    /// Messages about connections whose answer is due.
    waiting: VecDeque<Message>,
    /// Cid and kind of the command to which the answer is due, by slot.
    expected: BTreeMap<u32, (Cid, u16)>,
}

impl Inbox {
    /// Notes that a command has been sent whose answer is waited for. There is one at a time for a slot.
    pub fn expect(&mut self, command: &Message) {
        self.expected.insert(command.cid.slot(), (command.cid, command.kind));
    }

    /// Adds a message that the NIC has sent.
    pub fn add(&mut self, message: Message) {
        self.queued.push_back(message);
    }

    /// Whether [`Inbox::pop`] may return a message.
    pub fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// The next message to be handled.
    pub fn pop(&mut self) -> Option<Arrived> {
        while let Some(message) = self.queued.pop_front() {
            match self.expected.get(&message.cid.slot()) {
                None => return Some(Arrived::Event(message)),
                Some(command) => match answer_to(command, &message) {
                    Some(answer) => {
                        self.stop_waiting(message.cid);
                        return Some(Arrived::Answer(message.cid, answer));
                    }
                    None => self.waiting.push_back(message),
                },
            }
        }
        None
    }

    /// Takes out the answer to the command about this cid, if it has come.
    pub fn take_answer(&mut self, cid: Cid) -> Option<Result<(), Refusal>> {
        let command = self.expected.get(&cid.slot())?;
        let found = self.queued.iter().position(|message| answer_to(command, message).is_some())?;
        let answer = answer_to(command, &self.queued.remove(found)?)?;
        // Messages about it that came before are queued in front of those that came later.
        self.stop_waiting(cid);
        Some(answer)
    }

    /// No answer about the slot of this cid is waited for any more; the messages that have waited for it come next.
    pub fn stop_waiting(&mut self, cid: Cid) {
        self.expected.remove(&cid.slot());
        let of_slot = |message: &Message| message.cid.slot() == cid.slot();
        let (mut front, rest): (VecDeque<_>, VecDeque<_>) = self.waiting.drain(..).partition(of_slot);
        self.waiting = rest;
        front.append(&mut self.queued);
        self.queued = front;
    }

    /// The NIC has died: no answer comes any more.
    pub fn nic_died(&mut self) {
        self.expected.clear();
        self.waiting.append(&mut self.queued);
        core::mem::swap(&mut self.waiting, &mut self.queued);
    }

    /// A connection has got another cid: messages with the old one are about it.
    pub fn rename(&mut self, from: Cid, to: Cid) {
        let messages = self.queued.iter_mut().chain(&mut self.waiting);
        messages.filter(|message| message.cid == from).for_each(|message| message.cid = to);
    }

    /// Drops the messages for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&Message) -> bool) {
        self.queued.retain(&keep);
        self.waiting.retain(&keep);
    }
}

/// What a message says of a command (cid and kind) to which it is the answer. None if it is another message.
fn answer_to((cid, kind): &(Cid, u16), message: &Message) -> Option<Result<(), Refusal>> {
    let answers = message.operation == Operation::OsControl && message.cid == *cid && message.length == u32::from(*kind);
    match Control::from_number(message.kind).filter(|_| answers)? {
        Control::Done => Some(Ok(())),
        Control::Refused => Some(Err(match message.address {
            NOT_YET => Refusal::Acknowledged,
            ALREADY_HERE => Refusal::StillThere,
            ENDED => Refusal::Ended,
            EXCEEDED => Refusal::NoRoom,
            reason => Refusal::Refused(reason),
        })),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CID: Cid = Cid::new(3, 1);

    fn event(control: Control, cid: Cid) -> Message {
        Message::control(Operation::OsControl, control, cid, 0, 0)
    }

    fn answer(control: Control, to: Control, address: u32) -> Message {
        Message::control(Operation::OsControl, control, CID, address, to as u32)
    }

    #[test]
    fn what_the_nic_says_before_it_answers_is_handled_afterwards() {
        let mut inbox = Inbox::default();
        inbox.expect(&Message::control(Operation::NicControl, Control::Mirror, CID, 0, 0));
        let other = event(Control::Closed, Cid::new(4, 1));
        for message in [event(Control::Closed, CID), other, answer(Control::Done, Control::Mirror, 0)] {
            inbox.add(message);
        }
        assert_eq!(inbox.pop(), Some(Arrived::Event(other)));
        assert_eq!(inbox.pop(), Some(Arrived::Answer(CID, Ok(()))));
        assert_eq!(inbox.pop(), Some(Arrived::Event(event(Control::Closed, CID))));
        assert_eq!(inbox.pop(), None);
    }

    #[test]
    fn an_answer_is_found_behind_other_messages() {
        let mut inbox = Inbox::default();
        inbox.expect(&Message::control(Operation::NicControl, Control::Steal, CID, 0, 0));
        inbox.add(event(Control::Grow, CID));
        // The answer to another command.
        inbox.add(answer(Control::Refused, Control::Mirror, NOT_YET));
        assert_eq!(inbox.take_answer(CID), None);
        inbox.add(answer(Control::Refused, Control::Steal, ALREADY_HERE));
        assert_eq!(inbox.take_answer(CID), Some(Err(Refusal::StillThere)));
        assert_eq!(inbox.pop(), Some(Arrived::Event(event(Control::Grow, CID))));
    }

    #[test]
    fn nothing_waits_for_a_nic_that_has_died() {
        let mut inbox = Inbox::default();
        inbox.expect(&Message::new(Operation::NicHandoff, CID, 0, 0));
        inbox.add(event(Control::Closed, CID));
        assert_eq!(inbox.pop(), None);
        inbox.nic_died();
        let next = CID.next_generation();
        inbox.rename(CID, next);
        assert_eq!(inbox.pop(), Some(Arrived::Event(event(Control::Closed, next))));
    }
}
