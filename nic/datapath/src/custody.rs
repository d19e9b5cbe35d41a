//! The slots: which owner receives a connection's frames.

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
    /// The command goes beyond what the NIC has announced room for.
    Exceeded = baton_abi::EXCEEDED,
}

/// The owner of a connection.
pub(crate) enum Custody {
    /// The kernel; the NIC copies the frames that arrive.
    Mirrored,
    /// Neither kernel nor NIC, during an offload: frames are held.
    Held,
    /// The NIC, which is opening the connection.
    Opening(Box<Opening>),
    /// The NIC.
    Active(Pooled<Offloaded>),
    /// The NIC; the connection has carried nothing for a while, and its state is kept in few bytes. The next frame,
    /// command or time-out wakes it up first.
    Dormant(Dormant),
    /// The host's TCP, to which the NIC has lent it.
    Lent(Box<Lent>),
    /// Neither: the NIC has stopped the connection, to restore it or to resume it in other memory. Frames are held.
    Leaving(Pooled<Offloaded>),
}

/// An occupied slot: a connection on the NIC. One cache line, with all that a segment needs to find its connection.
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// The words of the 4-tuple that IPv4 has, the second with the device ([`DEVICE`]), and those of IPv6.
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

/// Where the device is in the second word of a slot's key; the bits are zero in the word of a 4-tuple.
const DEVICE: u32 = 32;
/// Indices of devices have 31 bits.
const DEVICES: u64 = i32::MAX as u64;

/// The device of a key, at its place in a slot's key.
#[inline(always)]
fn with_device(key: &FlowKey) -> u64 {
    (u64::from(key.device()) & DEVICES) << DEVICE
}

impl Slot {
    /// A slot without events and without an entry in the timing wheel.
    pub fn new(key: FlowKey, cid: Cid, custody: Custody) -> Slot {
        let ([first, ports], rest) = key.words();
        let (key, rest) = ([first, ports | with_device(&key)], rest.map(Box::new));
        Slot { key, rest, custody, cid, dirty: false, scheduled: u64::MAX, held: HeldFrames::default() }
    }

    /// The key of its 4-tuple.
    pub fn key(&self) -> FlowKey {
        let [first, ports] = self.key;
        let device = ports >> DEVICE & DEVICES;
        FlowKey::from_words([first, ports ^ device << DEVICE], self.rest.as_deref().copied(), device as u32)
    }

    /// Whether a frame with this key belongs to the slot's connection: see [`FlowKey::admits`]. If the connection is
    /// bound to no device, its key has only the words of the 4-tuple, so its frames cost no comparison of devices.
    #[inline(always)]
    pub fn has_key(&self, key: &FlowKey) -> bool {
        let ([first, ports], rest) = key.words();
        self.key[0] == first
            && (self.key[1] == ports || self.key[1] == ports | with_device(key))
            && (rest.is_none() || self.rest.as_deref() == rest.as_ref())
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

    /// The connection's state, if it is running and a program has it.
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
