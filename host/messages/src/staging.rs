//! The part of session memory in which messages lie that the NIC sends or receives: it reaches nothing else of the
//! program. A message that is sent is copied there first, and one that is received is copied from there to the
//! program's buffer.

use baton_client::heap::Heap;
use baton_rmpp::Region;

/// Longest message that can lie there, in bytes.
const LONGEST: u64 = 1 << 30;

/// Where a message lies in session memory.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// Its block.
    offset: u32,
    size: u32,
}

impl Staged {
    /// The first `length` bytes of the block.
    pub fn region(&self, length: u64) -> Region {
        Region { offset: self.offset.into(), length }
    }
}

/// The blocks of session memory.
#[derive(Debug)]
pub struct Staging {
    heap: Heap,
}

impl Staging {
    /// Blocks in `start..end` of session memory.
    pub fn new(start: u64, end: u64) -> Staging {
        Staging { heap: Heap::new(start as usize, end as usize) }
    }

    /// Whether a message of so many bytes ever has a place.
    pub fn can_hold(&self, length: u64) -> bool {
        length <= LONGEST.min(self.heap.bytes() / 2)
    }

    /// Takes a block for a message of so many bytes, if there is one.
    pub fn take(&mut self, length: u64) -> Option<Staged> {
        let size = u32::try_from(length).ok().filter(|_| self.can_hold(length))?;
        let (offset, size) = self.heap.take(size)?;
        Some(Staged { offset, size })
    }

    /// Gives a block back.
    pub fn give(&mut self, staged: Staged) {
        self.heap.give(staged.offset, staged.size);
    }
}
