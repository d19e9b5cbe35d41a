//! The memory of an endpoint: the program's buffers, copies that the endpoint owns, and the buffers for RTS packets.
//!
//! RMPP names memory by offsets. Here an offset is the number of an operation in the upper bits and the place in that operation's
//! buffer in the lower ones, so a packet can only reach the buffer of an operation that runs, and every access is checked against
//! its length.

use baton_rmpp::{Memory, Region};

/// Bits of an offset that say where in a buffer it is.
const PLACE_BITS: u32 = 44;
/// Longest buffer, in bytes.
pub const MAX_LENGTH: u64 = 1 << PLACE_BITS;
/// Bytes of address space that all buffers together have.
pub const SPACE: u64 = 1 << 63;

/// A buffer of the program, which may consist of several parts.
pub trait Buffer {
    /// Its bytes.
    fn length(&self) -> u64;
    /// Copies from `at` on into `out`. `at + out.len()` is at most [`Buffer::length`].
    fn read(&self, at: u64, out: &mut [u8]);
    /// Copies `data` to `at`. `at + data.len()` is at most [`Buffer::length`].
    fn write(&mut self, at: u64, data: &[u8]);
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
}

impl<B: Buffer> Slot<B> {
    fn length(&self) -> u64 {
        match self {
            Slot::Free => 0,
            Slot::Program(buffer) => buffer.length(),
            Slot::Own(bytes) => bytes.len() as u64,
        }
    }
}

/// The buffers of all operations that run, by the operation's number.
#[derive(Debug)]
pub struct Arena<B> {
    slots: Vec<Slot<B>>,
    free: Vec<u32>,
    /// Copies go through this.
    scratch: Vec<u8>,
}

impl<B: Buffer> Arena<B> {
    /// An arena whose first slot, number 0, is `first`.
    pub fn new(first: Vec<u8>) -> Arena<B> {
        Arena { slots: vec![Slot::Own(first)], free: Vec::new(), scratch: Vec::new() }
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
                self.free.push(number);
                std::mem::replace(slot, Slot::Free)
            }
            _ => Slot::Free,
        }
    }

    /// The region of `length` bytes from `at` on in slot `number`.
    pub fn region(number: u32, at: u64, length: u64) -> Region {
        Region { offset: u64::from(number) << PLACE_BITS | at, length }
    }

    /// The whole of a slot.
    pub fn whole(&self, number: u32) -> Region {
        Self::region(number, 0, self.slots.get(number as usize).map_or(0, Slot::length))
    }

    /// Slot and place of an access, if it is inside.
    fn locate(&self, offset: u64, length: u64) -> Option<(usize, u64)> {
        let (number, at) = ((offset >> PLACE_BITS) as usize, offset & (MAX_LENGTH - 1));
        let end = at.checked_add(length)?;
        (end <= self.slots.get(number)?.length()).then_some((number, at))
    }
}

impl<B: Buffer> Memory for Arena<B> {
    fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let Some((number, at)) = self.locate(offset, out.len() as u64) else { return false };
        match &self.slots[number] {
            Slot::Free => {}
            Slot::Program(buffer) => buffer.read(at, out),
            Slot::Own(bytes) => out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]),
        }
        true
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let Some((number, at)) = self.locate(offset, data.len() as u64) else { return false };
        match &mut self.slots[number] {
            Slot::Free => {}
            Slot::Program(buffer) => buffer.write(at, data),
            Slot::Own(bytes) => bytes[at as usize..at as usize + data.len()].copy_from_slice(data),
        }
        true
    }

    fn copy(&mut self, from: u64, to: u64, length: u64) -> bool {
        if self.locate(from, length).is_none() || self.locate(to, length).is_none() {
            return false;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(length as usize, 0);
        let copied = self.read(from, &mut scratch) && self.write(to, &scratch);
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
    }

    #[test]
    fn an_access_reaches_only_its_own_slot() {
        let mut arena: Arena<Vec<u8>> = Arena::new(vec![1; 8]);
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
    fn a_slot_is_used_again() {
        let mut arena: Arena<Vec<u8>> = Arena::new(Vec::new());
        let a = arena.insert(Slot::Own(vec![0; 3]));
        assert!(matches!(arena.remove(a), Slot::Own(bytes) if bytes.len() == 3));
        assert!(matches!(arena.remove(a), Slot::Free), "taken out once");
        assert_eq!(arena.insert(Slot::Own(vec![0; 5])), a);
        assert_eq!(arena.whole(a).length, 5);
    }
}
