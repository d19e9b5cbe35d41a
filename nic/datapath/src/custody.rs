//! Who has a connection's frames, and the frames that wait while it moves.

use crate::offloaded::{Offloaded, Pending};
use baton_abi::Cid;
use baton_device::Frame;
use baton_tcp::seq::{at_or_before, before};
use baton_wire::{Flags, Flow, Name, TcpFrame};

/// Frames that are held for one connection at most, and their bytes; what comes beyond is dropped, as by any full queue.
const HELD_FRAMES: usize = 4096;
const HELD_BYTES: usize = 8 << 20;

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

/// Frames that wait for the end of a move.
#[derive(Default)]
pub(crate) struct Held {
    frames: Vec<(Span, Frame)>,
    bytes: usize,
    /// How many of the frames the kernel has got, too.
    mirrored: usize,
    /// A frame was dropped: the copy has holes.
    pub overflowed: bool,
}

/// What a held frame covers.
#[derive(Clone, Copy)]
struct Span {
    seq: u32,
    end: u32,
}

impl Held {
    /// Keeps a copy. False if there was no room.
    pub fn push(&mut self, parsed: &TcpFrame, frame: &Frame) -> bool {
        let fin = u32::from(parsed.flags.contains(Flags::FIN));
        let end = parsed.seq.wrapping_add(parsed.payload_length as u32).wrapping_add(fin);
        if self.frames.len() >= HELD_FRAMES || self.bytes + frame.bytes().len() > HELD_BYTES {
            self.overflowed = true;
            return false;
        }
        self.bytes += frame.bytes().len();
        self.frames.push((Span { seq: parsed.seq, end }, frame.clone()));
        true
    }

    /// Drops what the kernel has acknowledged by `ack`.
    pub fn acknowledged(&mut self, ack: u32) {
        self.frames.retain(|(span, _)| before(ack, span.end));
        self.bytes = self.frames.iter().map(|(_, frame)| frame.bytes().len()).sum();
    }

    /// Whether the copies hold every byte of a range.
    pub fn covers(&self, mut left: u32, right: u32) -> bool {
        // Frames may lie in any order: go over them until a round brings nothing more.
        while before(left, right) {
            let reach = self.frames.iter().filter(|(span, _)| at_or_before(span.seq, left) && before(left, span.end));
            match reach.map(|(span, _)| span.end).max_by_key(|end| end.wrapping_sub(left)) {
                Some(end) => left = end,
                None => return false,
            }
        }
        true
    }

    /// From here on the kernel gets nothing.
    pub fn stolen(&mut self) {
        self.mirrored = self.frames.len();
    }

    /// Drops the frames that the kernel has got.
    pub fn forget_mirrored(&mut self) {
        let mirrored = std::mem::take(&mut self.mirrored);
        self.frames.drain(..mirrored);
    }

    /// Takes all frames.
    pub fn take(&mut self) -> impl Iterator<Item = Frame> + use<> {
        self.bytes = 0;
        std::mem::take(&mut self.frames).into_iter().map(|(_, frame)| frame)
    }
}
