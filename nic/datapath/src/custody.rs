//! The slots: who gets the frames of a connection.

use crate::dormant::Dormant;
use crate::held::HeldFrames;
use crate::listeners::Opening;
use crate::offloaded::{Offloaded, Pending};
use crate::partial::Lent;
use baton_abi::Cid;
use baton_shm::Pooled;
use baton_wire::{Flow, FlowKey};

/// The reason why a command was refused. Its number crosses the interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Refusal {
    /// The slot is in another state than the command needs.
    WrongState = 1,
    /// The image does not decode, or contradicts itself or the slot.
    BadImage = 2,
    /// The memory in the parameters lies outside of the session's memory, or is too small for the image.
    BadMemory = 3,
    /// There is no such session.
    UnknownSession = 4,
    /// The slot is free, or holds a connection with another cid.
    NotYours = 5,
    /// This NIC has a connection with the same 4-tuple.
    AlreadyHere = baton_abi::ALREADY_HERE,
    /// The command is unknown, or one of its fields is invalid.
    BadCommand = 7,
    /// The kernel has not acknowledged all data that the NIC has acknowledged for it.
    NotYet = baton_abi::NOT_YET,
    /// The connection has ended, so there is nothing to restore.
    Ended = baton_abi::ENDED,
}

/// The owner of a connection.
pub(crate) enum Custody {
    /// The kernel; the NIC copies the frames that arrive.
    Mirrored,
    /// Nobody, on the way to the NIC: frames are held.
    Held,
    /// The NIC, which opens it.
    Opening(Box<Opening>),
    /// The NIC.
    Active(Pooled<Offloaded>),
    /// The NIC; nothing has happened for a while, and its state is small. Whatever happens wakes it up first.
    Dormant(Dormant),
    /// The host's TCP, to which the NIC has lent it.
    Lent(Box<Lent>),
    /// Nobody: the NIC has stopped the connection, to restore it or to resume it in other memory. Frames are held.
    Leaving(Pooled<Offloaded>),
}

/// An occupied slot: a connection on the NIC. It is a cache line, and all that a segment needs to find its connection.
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// The words of the 4-tuple that IPv4 has, and those of IPv6.
    key: [u64; 2],
    rest: Option<Box<[u64; 4]>>,
    pub custody: Custody,
    pub cid: Cid,
    /// It is in the worker's list of slots with events for their program.
    pub dirty: bool,
    /// Tick of its entry in the timing wheel; `u64::MAX` without one.
    pub scheduled: u64,
    /// Frames that wait for the end of a move.
    pub held: HeldFrames,
}

const _: () = assert!(size_of::<Option<Slot>>() == 64);

impl Slot {
    /// A slot without events and without an entry in the timing wheel.
    pub fn new(key: FlowKey, cid: Cid, custody: Custody) -> Slot {
        let (key, rest) = key.words();
        let rest = rest.map(Box::new);
        Slot { key, rest, custody, cid, dirty: false, scheduled: u64::MAX, held: HeldFrames::default() }
    }

    /// The key of its 4-tuple.
    pub fn key(&self) -> FlowKey {
        FlowKey::from_words(self.key, self.rest.as_deref().copied())
    }

    /// Whether its 4-tuple has this key.
    #[inline(always)]
    pub fn has_key(&self, key: &FlowKey) -> bool {
        let ([first, ports], rest) = key.words();
        self.key[0] == first && self.key[1] == ports && (rest.is_none() || self.rest.as_deref() == rest.as_ref())
    }

    /// The 4-tuple.
    pub fn flow(&self) -> Flow {
        Flow::from(&self.key())
    }

    /// Takes the events for its program, and returns them with the session's number.
    pub fn take_events(&mut self) -> Option<(u32, Pending)> {
        let offloaded = self.offloaded()?;
        Some((offloaded.session, std::mem::take(&mut offloaded.pending)))
    }

    /// The connection, if a program has it.
    #[inline(always)]
    pub fn offloaded(&mut self) -> Option<&mut Offloaded> {
        match &mut self.custody {
            Custody::Active(offloaded) => Some(offloaded),
            Custody::Lent(lent) => Some(&mut lent.offloaded),
            _ => None,
        }
    }

    /// Puts earlier events before those that wait for its program.
    pub fn prepend_events(&mut self, mut earlier: Pending) {
        if let Custody::Active(offloaded) = &mut self.custody {
            earlier.add(&offloaded.pending);
            offloaded.pending = earlier;
        }
    }
}
