//! The memory of an endpoint: the program's buffers, copies that the endpoint owns, and the buffers for RTS packets.
//!
//! RMPP names memory by offsets. Here an offset is the number of an operation in the upper bits and the place in that
//! operation's buffer in the lower ones, so a packet can only reach the buffer of an operation that runs, and every
//! access is checked against its length.
//!
//! With a NIC, the first slot is session memory, whose offsets are the NIC's own. The NIC reaches no other slot:
//! messages that it sends or receives lie in the first one meanwhile ([`crate::staging`]). A program that was lent a
//! part of session memory, and has its buffers there, needs no copies.

use crate::staging::{Staged, Staging};
use baton_records::SessionMemory;
use baton_rmpp::{Memory, Region};

/// Bits of an offset that say where in a buffer it is.
const PLACE_BITS: u32 = 44;
/// Longest buffer, in bytes.
pub const MAX_LENGTH: u64 = 1 << PLACE_BITS;
/// Bytes of address space that all buffers together have.
pub const SPACE: u64 = 1 << 63;
/// Bytes that are copied at a time between two slots: they stay in the processor's nearest cache.
const PIECE: usize = 16 << 10;

/// A buffer of the program, which may consist of several parts.
pub trait Buffer {
    /// Its bytes.
    fn length(&self) -> u64;
    /// Copies from `at` on into `out`. `at + out.len()` is at most [`Buffer::length`].
    fn read(&self, at: u64, out: &mut [u8]);
    /// Copies `data` to `at`. `at + data.len()` is at most [`Buffer::length`].
    fn write(&mut self, at: u64, data: &[u8]);
    /// The `length` bytes from `at` on, if they lie in one piece. None: they must be copied.
    fn piece(&self, at: u64, length: u64) -> Option<&[u8]>;
    /// As [`Buffer::piece`], to be written.
    fn piece_mut(&mut self, at: u64, length: u64) -> Option<&mut [u8]>;
}

/// The memory of one operation.
#[derive(Debug)]
pub enum Slot<B> {
    /// No operation has it.
    Free,
    /// The program's buffer.
    Program(B),
    /// A copy of the endpoint.
    Own(Vec<u8>),
    /// Memory that a NIC reaches too.
    Shared(SessionMemory),
}

impl<B: Buffer> Slot<B> {
    fn length(&self) -> u64 {
        match self {
            Slot::Free => 0,
            Slot::Program(buffer) => buffer.length(),
            Slot::Own(bytes) => bytes.len() as u64,
            Slot::Shared(memory) => memory.region().len() as u64,
        }
    }
}

/// A message of an operation that lies in session memory, and where it comes from or goes to.
#[derive(Clone, Copy, Debug)]
struct OnNic {
    staged: Staged,
    program: Region,
}

/// The buffers of all operations that run, by the operation's number.
#[derive(Debug)]
pub struct Arena<B> {
    slots: Vec<Slot<B>>,
    free: Vec<u32>,
    /// Copies go through this.
    scratch: Vec<u8>,
    /// With a NIC: the blocks of session memory, and what lies there, by slot.
    staging: Option<Staging>,
    on_nic: Vec<Option<OnNic>>,
}

impl<B: Buffer> Arena<B> {
    /// An arena whose first slot, number 0, is `first`. With `staging`, messages lie there while the NIC has them.
    pub fn new(first: Slot<B>, staging: Option<Staging>) -> Arena<B> {
        Arena { slots: vec![first], free: Vec::new(), scratch: vec![0; PIECE], staging, on_nic: Vec::new() }
    }

    /// Enters a buffer. Returns its number.
    pub fn insert(&mut self, slot: Slot<B>) -> u32 {
        match self.free.pop() {
            Some(number) => {
                self.slots[number as usize] = slot;
                number
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// Takes a buffer out.
    pub fn remove(&mut self, number: u32) -> Slot<B> {
        match self.slots.get_mut(number as usize) {
            Some(slot) if !matches!(slot, Slot::Free) => {
                let slot = std::mem::replace(slot, Slot::Free);
                self.free.push(number);
                self.unstage(number);
                slot
            }
            _ => Slot::Free,
        }
    }

    /// The region from which the message in a slot is sent. Err if it has no place in session memory: for ever, or now.
    pub fn outgoing(&mut self, number: u32) -> Result<Region, NoPlace> {
        let program = self.whole(number);
        if let Some(region) = self.in_session(program) {
            return Ok(region);
        }
        let region = self.stage(number, program)?;
        if region.offset != program.offset {
            self.copy(program.offset, region.offset, region.length);
        }
        Ok(region)
    }

    /// The region into which a message for `program`, a region of a slot, is received: [`Arena::arrived`] follows. What
    /// fits into an RTS, `eager` bytes, is placed by the policy itself, which is in this process; with None the NIC
    /// places all.
    pub fn incoming(&mut self, number: u32, program: Region, eager: Option<u64>) -> Result<Region, NoPlace> {
        match self.in_session(program) {
            Some(region) => Ok(region),
            None if eager.is_some_and(|eager| program.length <= eager) => Ok(program),
            None => self.stage(number, program),
        }
    }

    /// Where the program's own bytes lie in session memory, if it has them there: in the part that it was lent.
    fn in_session(&self, program: Region) -> Option<Region> {
        let Some(Slot::Shared(session)) = self.slots.first() else { return None };
        let (number, at) = self.locate(program.offset, program.length)?;
        let Slot::Program(buffer) = &self.slots[number] else { return None };
        let piece = buffer.piece(at, program.length)?;
        let offset = piece.as_ptr().addr().checked_sub(session.region().span(0, 0)?.addr().get())?;
        session.region().span(offset, piece.len())?;
        Some(Self::region(0, offset as u64, program.length))
    }

    /// Takes `placed` bytes that were received to where they belong.
    pub fn arrived(&mut self, number: u32, placed: u64) {
        if let Some(OnNic { staged, program }) = self.unstage(number) {
            self.copy(staged.region(placed).offset, program.offset, placed.min(program.length));
        }
    }

    /// Whether messages of these lengths have a place in session memory now; without a NIC they need none.
    pub fn has_place<const N: usize>(&mut self, lengths: [u64; N]) -> bool {
        let Some(staging) = &mut self.staging else { return true };
        let places = lengths.map(|length| staging.take(length));
        places.iter().flatten().for_each(|staged| staging.give(*staged));
        places.iter().all(Option::is_some)
    }

    /// Whether a message of so many bytes can ever have a place in session memory.
    pub fn can_hold(&self, length: u64) -> bool {
        self.staging.as_ref().is_none_or(|staging| staging.can_hold(length))
    }

    fn stage(&mut self, number: u32, program: Region) -> Result<Region, NoPlace> {
        // A buffer for several messages may have a block of a receive that ended with an error.
        self.unstage(number);
        let Some(staging) = &mut self.staging else { return Ok(program) };
        if !staging.can_hold(program.length) {
            return Err(NoPlace::Ever);
        }
        let staged = staging.take(program.length).ok_or(NoPlace::Now)?;
        let at = number as usize;
        if self.on_nic.len() <= at {
            self.on_nic.resize(at + 1, None);
        }
        self.on_nic[at] = Some(OnNic { staged, program });
        Ok(staged.region(program.length))
    }

    fn unstage(&mut self, number: u32) -> Option<OnNic> {
        let on_nic = self.on_nic.get_mut(number as usize)?.take()?;
        if let Some(staging) = &mut self.staging {
            staging.give(on_nic.staged);
        }
        Some(on_nic)
    }

    /// The region of `length` bytes from `at` on in slot `number`.
    pub fn region(number: u32, at: u64, length: u64) -> Region {
        Region { offset: u64::from(number) << PLACE_BITS | at, length }
    }

    /// The whole of a slot.
    pub fn whole(&self, number: u32) -> Region {
        Self::region(number, 0, self.slots.get(number as usize).map_or(0, Slot::length))
    }

    /// Copies between a buffer of the program in one piece and session memory, without a stop between. None: it is
    /// another copy.
    fn copy_shared(&mut self, source: (usize, u64), target: (usize, u64), length: u64) -> Option<bool> {
        let [first, second] = self.slots.get_disjoint_mut([source.0, target.0]).ok()?;
        match (first, second) {
            (Slot::Program(buffer), Slot::Shared(memory)) => {
                let piece = buffer.piece(source.1, length)?;
                Some(memory.write(target.1, piece))
            }
            (Slot::Shared(memory), Slot::Program(buffer)) => {
                let piece = buffer.piece_mut(target.1, length)?;
                Some(memory.read(source.1, piece))
            }
            _ => None,
        }
    }

    /// The bytes of a region, if they lie in one piece of this process's memory.
    pub fn piece(&self, region: &Region) -> Option<&[u8]> {
        let (number, at) = self.locate(region.offset, region.length)?;
        match &self.slots[number] {
            Slot::Program(buffer) => buffer.piece(at, region.length),
            Slot::Own(bytes) => bytes.get(at as usize..(at + region.length) as usize),
            Slot::Free | Slot::Shared(_) => None,
        }
    }

    /// As [`Arena::piece`], to be written.
    pub fn piece_mut(&mut self, region: &Region) -> Option<&mut [u8]> {
        let (number, at) = self.locate(region.offset, region.length)?;
        match &mut self.slots[number] {
            Slot::Program(buffer) => buffer.piece_mut(at, region.length),
            Slot::Own(bytes) => bytes.get_mut(at as usize..(at + region.length) as usize),
            Slot::Free | Slot::Shared(_) => None,
        }
    }

    /// Slot and place of an access, if it is inside.
    fn locate(&self, offset: u64, length: u64) -> Option<(usize, u64)> {
        let (number, at) = ((offset >> PLACE_BITS) as usize, offset & (MAX_LENGTH - 1));
        let end = at.checked_add(length)?;
        (end <= self.slots.get(number)?.length()).then_some((number, at))
    }
}

/// A message has no place in session memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoPlace {
    /// Until others have ended.
    Now,
    /// It is too long.
    Ever,
}

impl<B: Buffer> Memory for Arena<B> {
    fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let Some((number, at)) = self.locate(offset, out.len() as u64) else { return false };
        match &self.slots[number] {
            Slot::Free => {}
            Slot::Program(buffer) => buffer.read(at, out),
            Slot::Own(bytes) => out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]),
            Slot::Shared(memory) => return memory.read(at, out),
        }
        true
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let Some((number, at)) = self.locate(offset, data.len() as u64) else { return false };
        match &mut self.slots[number] {
            Slot::Free => {}
            Slot::Program(buffer) => buffer.write(at, data),
            Slot::Own(bytes) => bytes[at as usize..at as usize + data.len()].copy_from_slice(data),
            Slot::Shared(memory) => return memory.write(at, data),
        }
        true
    }

    fn copy(&mut self, from: u64, to: u64, length: u64) -> bool {
        let (Some(source), Some(target)) = (self.locate(from, length), self.locate(to, length)) else { return false };
        if let Some(copied) = self.copy_shared(source, target, length) {
            return copied;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let copied = (0..length).step_by(PIECE).all(|at| {
            let piece = &mut scratch[..(length - at).min(PIECE as u64) as usize];
            self.read(from + at, piece) && self.write(to + at, piece)
        });
        self.scratch = scratch;
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Buffer for Vec<u8> {
        fn length(&self) -> u64 {
            self.len() as u64
        }

        fn read(&self, at: u64, out: &mut [u8]) {
            out.copy_from_slice(&self[at as usize..at as usize + out.len()]);
        }

        fn write(&mut self, at: u64, data: &[u8]) {
            self[at as usize..at as usize + data.len()].copy_from_slice(data);
        }

        fn piece(&self, at: u64, length: u64) -> Option<&[u8]> {
            self.get(at as usize..(at + length) as usize)
        }

        fn piece_mut(&mut self, at: u64, length: u64) -> Option<&mut [u8]> {
            self.get_mut(at as usize..(at + length) as usize)
        }
    }

    #[test]
    fn an_access_reaches_only_its_own_slot() {
        let mut arena: Arena<Vec<u8>> = Arena::new(Slot::Own(vec![1; 8]), None);
        let (a, b) = (arena.insert(Slot::Program(vec![2; 4])), arena.insert(Slot::Own(vec![3; 4])));
        let at = |number, place| Arena::<Vec<u8>>::region(number, place, 0).offset;
        let mut out = [0; 4];
        assert!(arena.read(at(a, 0), &mut out) && out == [2; 4]);
        assert!(!arena.read(at(a, 1), &mut out), "one byte too far");
        assert!(!arena.read(at(a, MAX_LENGTH - 1), &mut out) && !arena.read(u64::MAX, &mut out));
        assert!(arena.copy(at(0, 4), at(b, 1), 3));
        assert!(arena.read(at(b, 0), &mut out) && out == [3, 1, 1, 1]);
        arena.remove(a);
        assert!(!arena.write(at(a, 0), &[9]), "the operation has ended");
        assert!(arena.write(at(a, 0), &[]));
    }

    #[test]
    fn a_message_lies_in_session_memory_while_the_nic_has_it() {
        let start = baton_abi::layout::session::HEAP as u64;
        let end = start + (1 << 20);
        let memory = SessionMemory::new(std::sync::Arc::new(baton_shm::Region::private(end as usize).unwrap()));
        let mut arena: Arena<Vec<u8>> = Arena::new(Slot::Shared(memory), Some(Staging::new(start, end)));
        let out = arena.insert(Slot::Program((0..100_000u32).map(|at| at as u8).collect()));
        let sent = arena.outgoing(out).unwrap();
        assert!(sent.offset + sent.length <= end && sent.length == 100_000);
        let back = arena.insert(Slot::Program(vec![0; 100_000]));
        let program = arena.whole(back);
        let received = arena.incoming(back, program, Some(1000)).unwrap();
        // The NIC moves the bytes, in session memory alone.
        assert!(arena.copy(sent.offset, received.offset, 90_000));
        arena.arrived(back, 90_000);
        let Slot::Program(bytes) = arena.remove(back) else { panic!("the program's buffer") };
        assert!(
            bytes[..90_000].iter().enumerate().all(|(at, byte)| *byte == at as u8)
                && bytes[90_000..].iter().all(|byte| *byte == 0)
        );
        let large = arena.insert(Slot::Program(vec![0; 1 << 19]));
        assert_eq!(arena.outgoing(large).map(|region| region.length), Ok(1 << 19));
        assert!(!arena.has_place([1 << 19]) && arena.can_hold(1 << 19) && !arena.can_hold(1 << 20));
        let another = arena.insert(Slot::Program(vec![0; 1 << 19]));
        assert_eq!(arena.outgoing(another), Err(NoPlace::Now));
        arena.remove(large);
        arena.remove(out);
        assert!(arena.outgoing(another).is_ok(), "what has ended gives its place back");
    }

    #[test]
    fn a_slot_is_used_again() {
        let mut arena: Arena<Vec<u8>> = Arena::new(Slot::Own(Vec::new()), None);
        let a = arena.insert(Slot::Own(vec![0; 3]));
        assert!(matches!(arena.remove(a), Slot::Own(bytes) if bytes.len() == 3));
        assert!(matches!(arena.remove(a), Slot::Free), "taken out once");
        assert_eq!(arena.insert(Slot::Own(vec![0; 5])), a);
        assert_eq!(arena.whole(a).length, 5);
    }
}
