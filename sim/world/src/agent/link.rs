//! The agent's rings to the NIC, and the slots.

use crate::journal::Journal;
use crate::machine::Machine;
use crate::nic::SLOTS;
use crate::trace::Trace;
use baton_abi::layout::nic;
use baton_abi::{Cid, Control, Message, NOT_YET, Operation};
use baton_moves::Refusal;
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Rounds in which a NIC that lives has answered.
const ROUNDS: usize = 8;

pub(crate) struct NicLink {
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    /// Messages that the NIC sent without a command.
    pub inbox: VecDeque<Message>,
    /// Connections that the NIC has room for, as advertised.
    room: u32,
    /// Free slots, with the cid of their next occupant.
    free: BTreeMap<u32, Cid>,
}

impl NicLink {
    pub fn new(memory: &Arc<Region>, journal: &Journal) -> NicLink {
        NicLink {
            commands: Producer::new(memory.ring(nic::COMMANDS)),
            events: Consumer::new(memory.ring(nic::EVENTS)),
            inbox: VecDeque::new(),
            room: SLOTS as u32,
            free: (0..SLOTS as u32).map(|slot| (slot, journal.next_cid(slot))).collect(),
        }
    }

    pub fn take_slot(&mut self) -> Option<Cid> {
        if self.room == 0 { None } else { self.free.pop_last().map(|(_, cid)| cid) }
    }

    pub fn give_slot(&mut self, journal: &mut Journal, cid: Cid) {
        journal.next_cids.insert(cid.slot(), cid.next_generation());
        self.free.insert(cid.slot(), cid.next_generation());
    }

    /// Removes a slot from the free ones, because a connection has it already.
    pub fn withhold(&mut self, cid: Cid) {
        self.free.remove(&cid.slot());
    }

    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// The next NIC: it has advertised nothing yet.
    pub fn restarted(&mut self) {
        self.room = SLOTS as u32;
    }

    /// Sends a command and waits for its answer.
    pub fn command(&mut self, machine: &mut Machine, message: Message, trace: &mut Trace) -> Result<u32, Refusal> {
        if !machine.has_nic() {
            return Err(Refusal::NicGone);
        }
        if self.commands.push(message.to_words()).is_err() {
            return Err(Refusal::NoRoom);
        }
        self.commands.publish();
        for _ in 0..ROUNDS {
            machine.run_nic(trace);
            if let Some(answer) = self.find_answer(&message) {
                return answer;
            }
            if !machine.has_nic() {
                return Err(Refusal::NicGone);
            }
        }
        machine.failure = Some(format!("the NIC of host {} does not answer {message:?}", machine.number));
        Err(Refusal::NicGone)
    }

    pub fn control(
        &mut self,
        machine: &mut Machine,
        control: Control,
        cid: Cid,
        value: u32,
        trace: &mut Trace,
    ) -> Result<u32, Refusal> {
        self.command(machine, Message::control(Operation::NicControl, control, cid, value, 0), trace)
    }

    fn find_answer(&mut self, message: &Message) -> Option<Result<u32, Refusal>> {
        while let Some(answer) = self.next_event() {
            let answers = answer.cid == message.cid && answer.length == u32::from(message.kind);
            match (answer.operation, Control::from_number(answer.kind)) {
                (Operation::OsControl, Some(Control::Done)) if answers => return Some(Ok(answer.address)),
                (Operation::OsControl, Some(Control::Refused)) if answers && answer.address == NOT_YET => {
                    return Some(Err(Refusal::Acknowledged));
                }
                (Operation::OsControl, Some(Control::Refused)) if answers => return Some(Err(Refusal::Refused(answer.address))),
                _ => self.inbox.push_back(answer),
            }
        }
        None
    }

    fn next_event(&mut self) -> Option<Message> {
        loop {
            let words = self.events.pop()?;
            self.events.release();
            match Message::from_words(words) {
                Some(Message { operation: Operation::OsResource, length, .. }) => self.room = length,
                Some(message) => return Some(message),
                None => {}
            }
        }
    }

    /// Whether the NIC has sent messages without a command.
    pub fn has_message(&self) -> bool {
        !self.inbox.is_empty() || self.events.has_message()
    }

    /// Moves the NIC's messages into the inbox.
    pub fn listen(&mut self) {
        while let Some(message) = self.next_event() {
            self.inbox.push_back(message);
        }
    }

    /// Commands that the NIC refuses, more than its ring of answers holds.
    pub fn flood(&mut self) {
        let absurd = Message::new(Operation::NicRestore, Cid::new(SLOTS as u32 - 1, 9999), 0, 0);
        while self.commands.push(absurd.to_words()).is_ok() {}
        self.commands.publish();
    }
}
