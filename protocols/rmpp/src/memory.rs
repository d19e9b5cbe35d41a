//! The memory that messages are sent from and received into, as both halves see it.

/// A part of the memory that host and NIC share, by its offset in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Region {
    /// Offset of its first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Memory that host and NIC share: an endpoint's message buffers, and its buffers for RTS packets. An implementation
/// must check every offset, since offsets come from the program or from the other process.
pub trait Memory {
    /// Copies from `offset` on into `out`. False, and nothing is copied, if that is outside the memory.
    fn read(&self, offset: u64, out: &mut [u8]) -> bool;
    /// Copies `data` to `offset`. False, and nothing is copied, if that is outside the memory.
    fn write(&mut self, offset: u64, data: &[u8]) -> bool;
    /// Copies `length` bytes inside the memory; the two parts do not overlap. Returns false, and copies nothing, if a
    /// part is outside.
    fn copy(&mut self, from: u64, to: u64, length: u64) -> bool;
}

impl Memory for [u8] {
    fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let from = usize::try_from(offset).ok().and_then(|offset| self.get(offset..offset.checked_add(out.len())?));
        from.is_some_and(|from| {
            out.copy_from_slice(from);
            true
        })
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let to = usize::try_from(offset).ok().and_then(|offset| self.get_mut(offset..offset.checked_add(data.len())?));
        to.is_some_and(|to| {
            to.copy_from_slice(data);
            true
        })
    }

    fn copy(&mut self, from: u64, to: u64, length: u64) -> bool {
        let size = self.len() as u64;
        let inside = |at: u64| at.checked_add(length).is_some_and(|end| end <= size);
        if inside(from) && inside(to) {
            self.copy_within(from as usize..(from + length) as usize, to as usize);
            return true;
        }
        false
    }
}
