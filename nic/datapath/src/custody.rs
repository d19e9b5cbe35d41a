//! Who has a connection's frames.

use crate::held::Held;
use crate::offloaded::{Offloaded, Pending};
use baton_abi::Cid;
use baton_wire::{Flow, Name};

/// Why a command was refused. The number crosses the interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Refusal {
    /// The slot is in another state than the command needs.
    WrongState = 1,
    /// The image does not decode, or contradicts itself or the slot.
    BadImage = 2,
    /// Memory parameters lie outside the session's memory.
    BadMemory = 3,
    /// The session is not known.
    UnknownSession = 4,
    /// The connection belongs to another session, or to nobody.
    NotYours = 5,
    /// The 4-tuple is on this NIC already.
    AlreadyHere = 6,
    /// The command makes no sense.
    BadCommand = 7,
    /// The kernel lacks something that the NIC has acknowledged for it.
    NotYet = baton_abi::NOT_YET,
}

/// Who has the connection.
pub(crate) enum Custody {
    /// The kernel; the NIC copies what comes.
    Mirrored,
    /// Nobody: frames wait.
    Held,
    /// The NIC.
    Active(Box<Offloaded>),
    /// Nobody again: the NIC has ended and waits to replay to the kernel.
    Leaving(Box<Offloaded>),
}

/// A connection's place on the NIC.
pub(crate) struct Slot {
    pub name: Name,
    pub cid: Cid,
    pub flow: Flow,
    pub custody: Custody,
    pub held: Held,
    /// Tick for which the wheel has it, `u64::MAX` if it has not.
    pub scheduled: u64,
    /// It is in the list of slots with something to tell their program.
    pub dirty: bool,
}

impl Slot {
    /// What its program is to be told, and in which session.
    pub fn take_news(&mut self) -> Option<(u32, Pending)> {
        let Custody::Active(offloaded) = &mut self.custody else { return None };
        Some((offloaded.session, std::mem::take(&mut offloaded.pending)))
    }

    /// Its program is to be told this first.
    pub fn give_news(&mut self, mut earlier: Pending) {
        if let Custody::Active(offloaded) = &mut self.custody {
            earlier.add(&offloaded.pending);
            offloaded.pending = earlier;
        }
    }
}
