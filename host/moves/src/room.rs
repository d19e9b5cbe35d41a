//! What a NIC has room for, as its host knows it: see [`baton_abi::resource`]. The host never goes beyond what the NIC
//! has announced.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_abi::resource::{EXEMPT, PAIRS, RESOURCES, is_within};
use baton_abi::{Announcement, Message, Resource};

/// What a slot has been promised, of what has not been sent to the NIC yet.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Promise {
    connection: bool,
    pages: u32,
}

/// The announcements of one NIC, and what has been taken of them.
#[derive(Default, Debug)]
pub struct Room {
    edges: [u32; RESOURCES],
    taken: [u32; RESOURCES],
    /// The last announcement.
    number: u16,
    /// By slot; and their sums.
    promises: BTreeMap<u32, Promise>,
    promised: [u32; RESOURCES],
    /// Pages that each slot's connection has on the NIC.
    pages: Vec<u32>,
}

impl Room {
    /// Notes an announcement.
    pub fn note(&mut self, announcement: &Announcement) {
        let at = announcement.resource.index();
        self.edges[at] = announcement.edge();
        self.number = announcement.number;
    }

    /// Whether there is room for so much more.
    pub fn has(&self, resource: Resource, amount: u32) -> bool {
        let at = resource.index();
        is_within(self.taken[at], self.promised[at].saturating_add(amount), self.edges[at])
            || cfg!(feature = "sabotage-exceed-room")
    }

    /// Whether there is room for so many more connections, but for their memory.
    pub fn has_connections(&self, count: u32) -> bool {
        self.has(Resource::Connections, count) && self.has(Resource::Pairs, count.saturating_mul(PAIRS))
    }

    /// What the NIC has last announced to be free, less what has been promised since.
    pub fn free(&self, resource: Resource) -> u32 {
        let at = resource.index();
        let left = self.edges[at].wrapping_sub(self.taken[at]);
        if (left as i32) < 0 { 0 } else { left.saturating_sub(self.promised[at]) }
    }

    /// Promises a slot a connection. It has to have room, unless the NIC makes that connection itself.
    pub fn promise_connection(&mut self, slot: u32) {
        let mut promise = self.promises.remove(&slot).unwrap_or_default();
        let more = u32::from(!promise.connection);
        self.promised[0] += more;
        self.promised[2] += more * PAIRS;
        promise.connection = true;
        self.promises.insert(slot, promise);
    }

    /// Promises the connection in a slot memory of so many pages, instead of what it has. False if there is no room.
    pub fn promise_memory(&mut self, slot: u32, pages: u32) -> bool {
        let more = pages.saturating_sub(self.pages.get(slot as usize).copied().unwrap_or(0));
        let mut promise = self.promises.get(&slot).copied().unwrap_or_default();
        self.promised[1] -= promise.pages;
        if !self.has(Resource::Memory, more) {
            self.promised[1] += promise.pages;
            return false;
        }
        self.promised[1] += more;
        promise.pages = more;
        self.promises.insert(slot, promise);
        true
    }

    /// Takes a promise of memory back.
    pub fn keep_memory(&mut self, slot: u32) {
        if let Some(promise) = self.promises.get_mut(&slot) {
            self.promised[1] -= core::mem::take(&mut promise.pages);
        }
    }

    /// Notes that a slot is free.
    pub fn end(&mut self, slot: u32) {
        self.drop_promise(slot, Promise { connection: true, pages: u32::MAX });
        if let Some(pages) = self.pages.get_mut(slot as usize) {
            *pages = 0;
        }
    }

    /// A command as it is to be sent: it names the announcement that it keeps to.
    pub fn name(&self, command: Message) -> Message {
        if Resource::taken_by(&command).is_some() { Message { length: self.number.into(), ..command } } else { command }
    }

    /// Notes that a command has been sent. `pages`: those of the memory that the connection's parameters name, which
    /// are asked for only if the command takes memory.
    pub fn sent(&mut self, command: &Message, pages: impl FnOnce() -> u32) {
        let slot = command.cid.slot();
        match Resource::taken_by(command) {
            None | Some(Resource::Pairs) => {}
            Some(Resource::Connections) => {
                self.taken[0] = self.taken[0].wrapping_add(1);
                self.taken[2] = self.taken[2].wrapping_add(PAIRS);
                self.drop_promise(slot, Promise { connection: true, pages: 0 });
            }
            Some(Resource::Memory) => {
                let now = pages();
                if self.pages.len() <= slot as usize {
                    self.pages.resize(slot as usize + 1, 0);
                }
                let before = core::mem::replace(&mut self.pages[slot as usize], now);
                self.taken[1] = self.taken[1].wrapping_add(now.saturating_sub(before));
                self.drop_promise(slot, Promise { connection: false, pages: u32::MAX });
            }
        }
    }

    fn drop_promise(&mut self, slot: u32, what: Promise) {
        let Some(promise) = self.promises.get_mut(&slot) else { return };
        if what.connection && core::mem::take(&mut promise.connection) {
            self.promised[0] -= 1;
            self.promised[2] -= PAIRS;
        }
        let pages = promise.pages.min(what.pages);
        promise.pages -= pages;
        self.promised[1] -= pages;
        if *promise == Promise::default() {
            self.promises.remove(&slot);
        }
    }
}

const _: () = assert!(EXEMPT == 0, "a command that is not named is exempt");
const _: () = assert!(Resource::Connections.index() == 0 && Resource::Memory.index() == 1 && Resource::Pairs.index() == 2);

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::{Cid, Control, Operation};

    fn announced(connections: u32, pages: u32) -> Room {
        let mut room = Room::default();
        let pairs = (0, Resource::Pairs, 100 * PAIRS);
        for (number, resource, free) in [pairs, (1, Resource::Connections, connections), (2, Resource::Memory, pages)] {
            room.note(&Announcement { number, resource, taken: 0, free });
        }
        room
    }

    fn mirror(slot: u32) -> Message {
        Message::control(Operation::NicControl, Control::Mirror, Cid::new(slot, 1), 0, 0)
    }

    #[test]
    fn without_an_announcement_there_is_no_room() {
        assert!(!Room::default().has(Resource::Connections, 1));
    }

    #[test]
    fn what_is_promised_is_not_promised_again() {
        let mut room = announced(2, 100);
        room.promise_connection(7);
        room.promise_connection(7);
        assert!(room.has(Resource::Connections, 1));
        room.promise_connection(8);
        assert!(!room.has(Resource::Connections, 1));
        // One is not made after all, the other one is.
        room.end(7);
        assert_eq!(room.name(mirror(8)).length, 2, "the last announcement is named");
        room.sent(&mirror(8), || 0);
        assert_eq!(room.free(Resource::Connections), 1);
        room.end(8);
        assert_eq!(room.free(Resource::Connections), 1, "what ends makes room when the NIC says so");
        let later = Announcement { number: 3, resource: Resource::Connections, taken: 1, free: 2 };
        room.note(&later);
        assert_eq!(room.free(Resource::Connections), 2);
    }

    #[test]
    fn a_connection_takes_its_pairs() {
        let mut room = announced(10, 100);
        room.note(&Announcement { number: 3, resource: Resource::Pairs, taken: 0, free: 2 * PAIRS + PAIRS / 2 });
        assert!(room.has_connections(1));
        room.promise_connection(7);
        room.promise_connection(8);
        assert!(room.has(Resource::Connections, 1) && !room.has_connections(1));
        room.end(8);
        assert!(room.has_connections(1));
        room.sent(&mirror(7), || 0);
        assert_eq!(room.free(Resource::Pairs), PAIRS + PAIRS / 2);
    }

    #[test]
    fn growth_takes_what_is_more() {
        let mut room = announced(2, 100);
        let handoff = Message::new(Operation::NicHandoff, Cid::new(3, 1), 0, 0);
        assert!(room.promise_memory(3, 60) && !room.promise_memory(4, 41) && room.promise_memory(4, 40));
        room.end(4);
        room.sent(&handoff, || 60);
        assert!(!room.promise_memory(3, 101) && room.promise_memory(3, 100) && !room.has(Resource::Memory, 1));
        room.keep_memory(3);
        assert!(room.promise_memory(3, 90));
        room.sent(&Message::control(Operation::NicControl, Control::Resume, Cid::new(3, 1), 0, 0), || 90);
        assert_eq!(room.free(Resource::Memory), 10);
        assert!(room.promise_memory(3, 20), "less than it has is always there");
    }
}
