//! The heap of a session's memory, from which the agent takes send and receive memory.

use baton_abi::layout::session;

/// Bytes of a unit of the heap.
const UNIT: u32 = 1 << 14;

/// Which units of a session's heap are taken.
pub(crate) struct Heap {
    taken: Vec<bool>,
}

impl Heap {
    /// The heap of session memory of this many bytes, with nothing taken.
    pub fn new(bytes: usize) -> Heap {
        Heap { taken: vec![false; (session::heap_end(bytes) - session::HEAP) / UNIT as usize] }
    }

    /// Takes `size` bytes, a power of two of at least a unit. Returns offset and size.
    pub fn take(&mut self, size: u32) -> Option<(u32, u32)> {
        let units = (size / UNIT) as usize;
        let first = (0..self.taken.len().saturating_sub(units - 1)).find(|at| !self.taken[*at..at + units].contains(&true))?;
        self.taken[first..first + units].fill(true);
        Some((session::HEAP as u32 + first as u32 * UNIT, size))
    }

    fn units(&mut self, (offset, size): (u32, u32)) -> &mut [bool] {
        let first = (offset as usize - session::HEAP) / UNIT as usize;
        &mut self.taken[first..first + (size / UNIT) as usize]
    }

    /// Takes a block that a connection has already.
    pub fn reserve(&mut self, block: (u32, u32)) {
        let units = self.units(block);
        assert!(!units.contains(&true), "two connections have the same memory");
        units.fill(true);
    }

    /// Gives a block back.
    pub fn give(&mut self, block: (u32, u32)) {
        let units = self.units(block);
        assert!(!units.contains(&false), "memory is given back twice");
        units.fill(false);
    }

    /// Whether nothing is taken.
    pub fn is_empty(&self) -> bool {
        !self.taken.contains(&true)
    }
}
