//! Access of RMPP to session memory.

use baton_abi::layout::session;
use baton_rmpp::Memory;
use baton_shm::Region;
use std::sync::Arc;

/// Bytes that are copied at a time inside the memory.
const PIECE: usize = 4096;

/// The heap of a session's memory. Offsets are those in session memory; the part in front of the heap (rings,
/// connection blocks) cannot be accessed. The other side may change any byte at any time.
#[derive(Clone, Debug)]
pub struct SessionMemory(Arc<Region>);

impl SessionMemory {
    /// The heap of this session memory.
    pub fn new(memory: Arc<Region>) -> SessionMemory {
        SessionMemory(memory)
    }

    /// The session's memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.0
    }

    /// The offset of `length` bytes at `offset`, if they lie in the heap.
    fn place(&self, offset: u64, length: u64) -> Option<usize> {
        let end = offset.checked_add(length)?;
        (offset >= session::HEAP as u64 && end <= self.0.len() as u64).then_some(offset as usize)
    }
}

impl Memory for SessionMemory {
    fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        out.is_empty() || self.place(offset, out.len() as u64).is_some_and(|at| self.0.read(at, out).is_ok())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        data.is_empty() || self.place(offset, data.len() as u64).is_some_and(|at| self.0.write(at, data).is_ok())
    }

    fn copy(&mut self, from: u64, to: u64, length: u64) -> bool {
        if length > 0 && (self.place(from, length).is_none() || self.place(to, length).is_none()) {
            return false;
        }
        let mut piece = [0; PIECE];
        (0..length).step_by(PIECE).all(|at| {
            let piece = &mut piece[..(length - at).min(PIECE as u64) as usize];
            self.read(from + at, piece) && self.write(to + at, piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_heap_is_reached() {
        let bytes = session::HEAP + 8192;
        let mut memory = SessionMemory::new(Arc::new(Region::private(bytes).unwrap()));
        let heap = session::HEAP as u64;
        assert!(memory.write(heap, &[7; 100]) && memory.copy(heap, heap + 5000, 100));
        let mut out = [0; 100];
        assert!(memory.read(heap + 5000, &mut out) && out == [7; 100]);
        for offset in [0, heap - 1, heap + 8192 - 99, u64::MAX] {
            assert!(!memory.read(offset, &mut out) && !memory.write(offset, &out), "{offset}");
            assert!(!memory.copy(heap, offset, 100) && !memory.copy(offset, heap, 100), "{offset}");
        }
        assert!(memory.read(u64::MAX, &mut []), "a message without bytes lies anywhere");
    }
}
