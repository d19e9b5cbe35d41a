//! `os_resource`: the NIC announces its free room, and the host keeps within it.
//!
//! This is flow control, like TCP's window. The NIC counts the total amount of a resource that it has ever admitted,
//! and announces that number and the amount that it has room for beyond it: their sum is the *edge*, modulo 2³². The
//! host counts in the same way the amounts that it has handed over, and never exceeds the edge of the last announcement
//! that it has read. A connection that ends makes no room until the NIC announces it. Announcements are numbered, and a
//! handoff names the last one that the host has read, so that the NIC can check whether the host keeps within it.

use crate::layout;
use crate::message::{Cid, Control, Message, Operation};

/// The resources that a NIC may run out of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Resource {
    /// Connections: one for each slot that a command fills.
    Connections = 1,
    /// Session memory of connections, in pages of [`PAGE`] bytes: the memory that is handed off with a connection, and
    /// what it gets in addition when it grows.
    Memory = 2,
    /// (address, length) pairs of send queues: a connection takes [`PAIRS`] with its slot.
    Pairs = 3,
}

/// Number of [`Resource`]s.
pub const RESOURCES: usize = 3;

/// Pairs that a connection takes.
pub const PAIRS: u32 = layout::PAIRS as u32;

/// Bytes of a page of [`Resource::Memory`].
pub const PAGE: u32 = 4096;

/// Largest number of a resource that is announced: half of what an edge can express.
pub const MOST: u32 = 1 << 30;

impl Resource {
    /// All of them.
    pub const ALL: [Resource; RESOURCES] = [Resource::Connections, Resource::Memory, Resource::Pairs];

    /// Its index in a table of all resources.
    pub const fn index(self) -> usize {
        self as usize - 1
    }

    /// The resource that a command to the NIC takes; a connection also takes its pairs.
    pub fn taken_by(command: &Message) -> Option<Resource> {
        let is = |control: Control| command.operation == Operation::NicControl && command.kind == control as u16;
        if is(Control::Mirror) || is(Control::Connect) {
            Some(Resource::Connections)
        } else if command.operation == Operation::NicHandoff || is(Control::Resume) {
            Some(Resource::Memory)
        } else {
            None
        }
    }

    fn from_number(number: u32) -> Option<Resource> {
        Resource::ALL.into_iter().find(|resource| *resource as u32 == number)
    }
}

/// The pages of a connection's receive and send memory, given their sizes in bytes.
pub const fn pages(receive: u32, send: u32) -> u32 {
    receive.div_ceil(PAGE) + send.div_ceil(PAGE)
}

/// One announcement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Announcement {
    /// Its number; the one after 65535 is 1.
    pub number: u16,
    /// What it is about.
    pub resource: Resource,
    /// Total amount that the NIC has admitted so far, modulo 2³².
    pub taken: u32,
    /// Amount that it has room for beyond that, at most [`MOST`]; 0 ends offloading.
    pub free: u32,
}

/// In the address field of the message the number is above the resource.
const NUMBER_SHIFT: u32 = 16;

/// The number named by commands that are not subject to announcements: those that steal the frames of a connection of
/// an earlier NIC again, to restore it.
pub const EXEMPT: u16 = 0;

impl Announcement {
    /// The largest total amount that may be admitted, modulo 2³².
    pub const fn edge(&self) -> u32 {
        self.taken.wrapping_add(self.free)
    }

    /// The message that carries it.
    pub const fn to_message(self) -> Message {
        let about = self.resource as u32 | (self.number as u32) << NUMBER_SHIFT;
        Message::new(Operation::OsResource, Cid(self.taken), about, self.free)
    }

    /// The announcement in a message; None if it is another message.
    pub fn from_message(message: &Message) -> Option<Announcement> {
        let Message { operation: Operation::OsResource, cid, address, length, .. } = *message else { return None };
        let (resource, number) = (Resource::from_number(address as u16 as u32)?, (address >> NUMBER_SHIFT) as u16);
        Some(Announcement { number, resource, taken: cid.0, free: length.min(MOST) })
    }
}

/// Whether `amount` more than `taken` is within the edge. All are modulo 2³².
pub const fn is_within(taken: u32, amount: u32, edge: u32) -> bool {
    edge.wrapping_sub(taken) as i32 >= 0 && edge.wrapping_sub(taken) >= amount
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_survives_its_message() {
        for resource in Resource::ALL {
            let announcement = Announcement { number: 65_535, resource, taken: u32::MAX - 1, free: 5 };
            assert_eq!(Announcement::from_message(&announcement.to_message()), Some(announcement));
            assert_eq!(announcement.edge(), 3);
        }
        assert_eq!(Announcement::from_message(&Message::new(Operation::OsResource, Cid(0), 9, 1)), None);
        assert_eq!(Announcement::from_message(&Message::new(Operation::OsRestore, Cid(0), 1, 1)), None);
    }

    #[test]
    fn edges_are_compared_modulo_their_width() {
        assert!(is_within(u32::MAX - 1, 5, 3) && !is_within(u32::MAX - 1, 6, 3));
        assert!(is_within(7, 0, 7) && !is_within(7, 1, 7));
        assert!(!is_within(8, 0, 7) && !is_within(8, 1, 7), "beyond the edge there is no room");
    }

    #[test]
    fn memory_is_counted_in_whole_pages() {
        assert_eq!(pages(4096, 4097), 3);
    }
}
