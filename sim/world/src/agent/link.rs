//! The agent's rings to the NIC, and the slots.

use crate::journal::Journal;
use crate::machine::Machine;
use crate::nic::SLOTS;
use baton_abi::layout::nic;
use baton_abi::{Announcement, Cid, Message, Operation};
use baton_core::FreeSlots;
use baton_moves::{Inbox, Refusal, Room};
use baton_recovery::pages_of;
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use std::sync::Arc;

pub(crate) struct NicLink {
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    /// Answers and messages that have not been handled.
    pub inbox: Inbox,
    /// What the NIC has room for, as announced.
    pub room: Room,
    memory: Arc<Region>,
    free: FreeSlots,
}

impl NicLink {
    pub fn new(memory: &Arc<Region>, journal: &Journal) -> NicLink {
        NicLink {
            commands: Producer::new(memory.ring(nic::COMMANDS)),
            events: Consumer::new(memory.ring(nic::EVENTS)),
            inbox: Inbox::default(),
            room: Room::default(),
            memory: memory.clone(),
            free: FreeSlots::new(0, SLOTS as u32, (0..SLOTS as u32).map(|slot| journal.next_cid(slot))),
        }
    }

    pub fn take_slot(&mut self) -> Option<Cid> {
        if !self.room.has_connections(1) {
            return None;
        }
        let cid = self.free.take()?;
        self.room.promise_connection(cid.slot());
        Some(cid)
    }

    pub fn give_slot(&mut self, journal: &mut Journal, cid: Cid) {
        self.room.end(cid.slot());
        journal.next_cids.insert(cid.slot(), self.free.give(cid));
    }

    /// Removes a slot from the free ones, because a connection has it already.
    pub fn withhold(&mut self, cid: Cid) {
        self.free.withhold(cid);
    }

    pub fn free_slots(&self) -> usize {
        self.free.count()
    }

    /// The next NIC: it has announced what it has room for, behind what the last one has left in the ring.
    pub fn restarted(&mut self) {
        self.room = Room::default();
        self.receive();
    }

    /// Whether the ring has room for all commands of an action.
    pub fn has_room(&mut self) -> bool {
        self.commands.has_room(2)
    }

    /// Sends a command.
    pub fn post(&mut self, machine: &Machine, message: Message) -> Result<(), Refusal> {
        if !machine.has_nic() {
            return Err(Refusal::NicGone);
        }
        self.commands.push(message.to_words()).map_err(|_| Refusal::NoRoom)?;
        self.commands.publish();
        self.room.sent(&message, || pages_of(&self.memory, message.cid.slot()));
        Ok(())
    }

    /// Sends a command whose answer is waited for, within what the NIC has announced.
    pub fn ask(&mut self, machine: &Machine, message: Message) -> Result<(), Refusal> {
        self.post(machine, self.room.name(message))?;
        self.inbox.expect(&message);
        Ok(())
    }

    fn next_event(&mut self) -> Option<Message> {
        loop {
            let words = self.events.pop()?;
            self.events.release();
            match Message::from_words(words) {
                Some(message) if message.operation == Operation::OsResource => {
                    if let Some(announcement) = Announcement::from_message(&message) {
                        self.room.note(&announcement);
                    }
                }
                Some(message) => return Some(message),
                None => {}
            }
        }
    }

    /// Whether the NIC has sent messages.
    pub fn has_message(&self) -> bool {
        !self.inbox.is_empty() || self.events.has_message()
    }

    /// Moves the NIC's messages into the inbox.
    pub fn receive(&mut self) {
        while let Some(message) = self.next_event() {
            self.inbox.add(message);
        }
    }

    /// Commands that the NIC refuses, more than its ring of answers holds.
    pub fn flood(&mut self) {
        let absurd = Message::new(Operation::NicRestore, Cid::new(SLOTS as u32 - 1, 9999), 0, 0);
        while self.commands.push(absurd.to_words()).is_ok() {}
        self.commands.publish();
    }
}
