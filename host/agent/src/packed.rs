//! Where the memory of a connection lies in its session's.

use baton_abi::layout::session;
use baton_shm::Region;

/// Send and receive memory of a connection: (offset, size).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    pub receive: (u32, u32),
    pub send: (u32, u32),
}

/// A connection's memory in few bytes: of receive and of send memory the number of the page at which it begins, and the
/// power of two that its size is, in the lowest five bits.
#[derive(Clone, Copy)]
pub(crate) struct PackedMemory([u32; 2]);

const PAGE: u32 = 4096;

impl PackedMemory {
    /// None if one does not begin at a page, or its size is no power of two.
    pub fn new(memory: Memory) -> Option<PackedMemory> {
        let pack = |(offset, size): (u32, u32)| {
            let fits = offset.is_multiple_of(PAGE) && size.is_power_of_two();
            fits.then(|| (offset / PAGE) << 5 | size.trailing_zeros())
        };
        Some(PackedMemory([pack(memory.receive)?, pack(memory.send)?]))
    }

    pub fn unpacked(self) -> Memory {
        let [receive, send] = self.0.map(|packed| ((packed >> 5) * PAGE, 1 << (packed & 31)));
        Memory { receive, send }
    }
}

impl Memory {
    /// Whether both blocks lie in the heap of a session.
    pub fn fits(&self, session: &Region) -> bool {
        let inside = |(offset, size): (u32, u32)| {
            let end = offset as usize + size as usize;
            size.is_power_of_two() && offset as usize >= session::HEAP && end <= session::heap_end(session.len())
        };
        inside(self.receive) && inside(self.send)
    }
}
