//! Addresses of the simulated machine's structures.

use baton_sim::Rng;

/// Bytes of a cache line.
pub const LINE: u64 = 64;

/// Numbers of the lines that a range of addresses touches.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    next: u64,
    end: u64,
}

impl Lines {
    /// Of `bytes` bytes at `address`, at least one.
    pub fn of(address: u64, bytes: u64) -> Lines {
        Lines { next: address / LINE, end: (address + bytes.max(1)).div_ceil(LINE) }
    }
}

impl Iterator for Lines {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let line = self.next;
        self.next += 1;
        (line < self.end).then_some(line)
    }
}

/// Gives out addresses, one behind the other.
#[derive(Clone, Debug)]
pub struct Layout {
    next: u64,
}

impl Default for Layout {
    /// Away from 0, and with room for a line behind the last.
    fn default() -> Self {
        Layout { next: 1 << 20 }
    }
}

impl Layout {
    /// An array of `count` objects of `bytes` bytes at a page's beginning.
    pub fn array(&mut self, bytes: u64, count: u64) -> Array {
        let base = self.next.next_multiple_of(4096);
        self.next = base + bytes * count;
        Array { base, bytes, count }
    }
}

/// Objects of the same size, one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Array {
    base: u64,
    bytes: u64,
    count: u64,
}

impl Array {
    /// The address of an object; their numbers go round, as in a ring.
    pub fn at(&self, number: u64) -> u64 {
        self.base + number % self.count * self.bytes
    }
}

/// The numbers below `count` in some order.
pub fn shuffled(rng: &mut Rng, count: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, rng.below(at as u64 + 1) as usize);
    }
    order
}
