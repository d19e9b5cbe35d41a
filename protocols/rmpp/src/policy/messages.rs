//! The messages that an endpoint sends and receives, in tables of fixed size.

use super::{Error, Outgoing};
use crate::handle;
use crate::memory::Region;
use alloc::boxed::Box;
use alloc::vec::Vec;
use baton_wire::rmpp::{MAX_CLEARED, Rts, Status};

/// A table of fixed size whose entries are named by [`handle`]s.
pub(super) struct Slab<T> {
    /// (generation, entry).
    entries: Box<[(u16, Option<T>)]>,
    free: Vec<u16>,
}

impl<T> Slab<T> {
    pub fn new(entries: usize) -> Slab<T> {
        Slab {
            entries: (0..entries).map(|_| (1, None)).collect(),
            free: (0..entries as u32).rev().map(|slot| slot as u16).collect(),
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.entries.len()
    }

    /// Enters something, if there is room. Returns its handle.
    pub fn insert(&mut self, entry: T) -> Option<u32> {
        let slot = usize::from(self.free.pop()?);
        self.entries[slot].1 = Some(entry);
        Some(handle::new(slot, self.entries[slot].0))
    }

    pub fn get(&self, handle: u32) -> Option<&T> {
        let (generation, entry) = self.entries.get(handle::slot(handle))?;
        entry.as_ref().filter(|_| handle::new(handle::slot(handle), *generation) == handle)
    }

    pub fn get_mut(&mut self, handle: u32) -> Option<&mut T> {
        let (generation, entry) = self.entries.get_mut(handle::slot(handle))?;
        let current = handle::new(handle::slot(handle), *generation);
        entry.as_mut().filter(|_| current == handle)
    }

    pub fn remove(&mut self, handle: u32) -> Option<T> {
        self.get(handle)?;
        let slot = handle::slot(handle);
        self.entries[slot].0 = handle::next_generation(self.entries[slot].0);
        self.free.push(slot as u16);
        self.entries[slot].1.take()
    }

    /// The handle of the message in a slot.
    pub fn at(&self, slot: usize) -> Option<u32> {
        let (generation, entry) = self.entries.get(slot)?;
        entry.is_some().then(|| handle::new(slot, *generation))
    }
}

/// The state of an outgoing message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SendState {
    /// It waits for the peer's welcome, or for a number in the window.
    Waiting,
    /// Its RTS was sent. Only the data half knows whether a CTS has answered it.
    Sent,
    /// The receiver keeps the RTS until a receive matches.
    Held,
    /// It has failed, and the data half may still read its memory.
    Releasing(Error),
}

/// An outgoing message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outgoings {
    pub outgoing: Outgoing,
    pub state: SendState,
    /// Its number, once it has one.
    pub number: u32,
    /// Bytes in its RTS.
    pub first: u16,
    pub attempts: u8,
    /// The next message that waits for the same peer, 0 for none.
    pub next: u32,
}

/// The state of an incoming message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReceiveState {
    /// No message yet: its handle is lent to a data half that matches.
    Lent,
    /// The data half has used this entry for a message that does not count any more, and may still use it.
    Returning,
    /// A message with a lower number has not come yet. Matching must wait for it, since a sender's messages match in
    /// their order.
    Held,
    /// No receive matches yet.
    Unexpected,
    /// A probe has claimed it.
    Claimed,
    /// The message has matched, but the data of its RTS was not kept: the RTS must come again.
    AwaitRts,
    /// Its data is arriving.
    Receiving,
    /// It has ended, and the sender is notified until it confirms with a CLEANUP.
    Ended(Status),
    /// All of its data was placed; its END has not come.
    Placed(Status),
    /// It has failed, and the data half may still write to its memory.
    Releasing(Error),
}

/// An incoming message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    pub peer: u16,
    pub number: u32,
    pub rts: Rts,
    /// Bytes that the RTS carried.
    pub first: u16,
    /// The buffer with those bytes, while they are kept.
    pub buffer: Option<u16>,
    pub state: ReceiveState,
    /// Its place among the unexpected messages, while it is one.
    pub place: u32,
    /// The receive that it has matched.
    pub receive: u32,
    /// Where the bytes behind the RTS's go.
    pub region: Region,
    /// Data packets that are wanted.
    pub packets: u32,
    /// All packets before this one are known to have been placed.
    pub placed: u32,
    /// First packet that is not cleared.
    pub limit: u32,
    pub grant: u16,
    /// Numbers behind it that the data half may have given to CTS of its own.
    pub grants_ahead: u16,
    pub attempts: u8,
    /// Its END has come.
    pub end: bool,
    /// It is in the queue of messages that wait for NIC buffers or pinned memory.
    pub queued: bool,
}

impl Incoming {
    /// A message whose RTS has come, with the message's first `first` bytes in `buffer`.
    pub fn new(peer: u16, number: u32, rts: &Rts, first: u16, buffer: u16) -> Incoming {
        Incoming {
            peer,
            number,
            rts: *rts,
            first,
            buffer: Some(buffer),
            state: ReceiveState::Held,
            place: 0,
            receive: 0,
            region: Region::default(),
            packets: 0,
            placed: 0,
            limit: 0,
            grant: 0,
            grants_ahead: 0,
            attempts: 0,
            end: false,
            queued: false,
        }
    }

    /// Sets where the message goes, the first bytes included: its beginning, if there is no room for all of it.
    pub fn take_region(&mut self, region: Region) {
        let first = u64::from(self.first).min(region.length);
        self.region = Region { offset: region.offset + first, length: region.length - first };
        let wanted = self.rest().min(self.region.length);
        self.packets = wanted.div_ceil(u64::from(self.rts.fragment)) as u32;
        (self.state, self.attempts) = (ReceiveState::Receiving, 0);
    }

    /// Number of packets that may be in flight: only this many of the cleared packets have a CTS.
    pub fn on_way(&self) -> u32 {
        (self.limit - self.placed).min(u32::from(MAX_CLEARED))
    }

    /// Bytes of the message behind the RTS's.
    pub fn rest(&self) -> u64 {
        self.rts.length - u64::from(self.first)
    }
}
