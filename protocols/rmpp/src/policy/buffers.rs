//! Which buffers for RTS packets the data half has.

use alloc::boxed::Box;

/// A set of buffers, by number.
pub(super) struct Buffers {
    here: Box<[bool]>,
    count: usize,
}

impl Buffers {
    /// None of `count` buffers.
    pub fn new(count: u16) -> Buffers {
        Buffers { here: alloc::vec![false; count.into()].into(), count: 0 }
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Adds a buffer that is not in the set.
    pub fn insert(&mut self, buffer: u16) {
        self.here[usize::from(buffer)] = true;
        self.count += 1;
    }

    /// Takes a buffer out. False if it is not in the set.
    pub fn remove(&mut self, buffer: u16) -> bool {
        let was = self.here.get_mut(usize::from(buffer)).is_some_and(core::mem::take);
        self.count -= usize::from(was);
        was
    }
}
