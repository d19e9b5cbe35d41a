//! What the agent writes down before each step of a move, for the next agent: the content of the slots' journals, and
//! the cids of the slots' next occupants. It survives NIC and agent.

use baton_abi::Cid;
use baton_image::Image;
use baton_moves::Phase;
use std::collections::BTreeMap;

/// Send and receive memory of a connection: offset and size each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Memory {
    pub receive: (u32, u32),
    pub send: (u32, u32),
}

/// The bytes of a connection on the NIC, and from what it was made.
#[derive(Clone, Debug)]
pub(crate) struct OnNic {
    /// The image that was handed off.
    pub image: Image,
    pub memory: Memory,
    /// When it was handed off, microseconds.
    pub handed_off_at: u64,
}

/// An entry.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub phase: Phase,
    pub connection: u32,
    pub cid: Cid,
    /// Set from [`Phase::Copied`] on.
    pub on_nic: Option<OnNic>,
}

/// The entries by slot.
#[derive(Default)]
pub(crate) struct Journal {
    pub entries: BTreeMap<u32, Entry>,
    pub next_cids: BTreeMap<u32, Cid>,
}

impl Journal {
    /// The entry of the slot of a cid.
    pub fn entry(&mut self, cid: Cid) -> Option<&mut Entry> {
        self.entries.get_mut(&cid.slot())
    }

    /// The cid of a slot's next occupant: no agent uses one that another has used.
    pub fn next_cid(&self, slot: u32) -> Cid {
        self.next_cids.get(&slot).copied().unwrap_or(Cid::new(slot, 1))
    }
}
