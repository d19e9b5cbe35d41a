//! A connection's send queue: the bytes that the program has announced and the peer has not acknowledged.

use baton_abi::layout;
use baton_device::Payload;
use baton_shm::Region;

/// A send queue. The NIC uses [`References`]; other implementations are for comparison.
pub trait SendQueue {
    /// Appends the `length` bytes at `address` in the session's memory, the first of which has sequence number `seq`.
    /// False without room.
    fn append(&mut self, memory: &Region, address: u32, length: u32, seq: u32) -> bool;

    /// Copies `out.len()` bytes from sequence number `seq` on. False if it does not have them.
    fn copy(&mut self, memory: &Region, seq: u32, out: &mut [u8]) -> bool;

    /// The peer has acknowledged all bytes before sequence number `una`.
    fn acknowledge(&mut self, una: u32);
}

/// A contiguous part of the send queue: where its bytes lie in the session's memory, and the sequence number of the
/// first.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pair {
    pub address: u32,
    pub length: u32,
    pub seq: u32,
}

/// The NIC's send queue: references to the program's memory, where the bytes stay until they are acknowledged. A ring;
/// the indices count without wrapping at its size.
#[derive(Clone, Debug, Default)]
pub struct References {
    pairs: [Pair; layout::PAIRS],
    first: u8,
    next: u8,
    /// The pair from which bytes were fetched last.
    fetched: u8,
}

const MASK: u8 = layout::PAIRS as u8 - 1;

impl References {
    /// Its pairs, the oldest first.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = Pair> + '_ {
        (0..self.next.wrapping_sub(self.first)).map(move |nth| self.pairs[usize::from(self.first.wrapping_add(nth) & MASK)])
    }

    /// Removes all.
    pub(crate) fn clear(&mut self) {
        (self.first, self.next) = (0, 0);
    }

    /// Appends bytes. Those that directly follow the last pair in memory extend it. False if the queue is full.
    pub(crate) fn add(&mut self, address: u32, length: u32, seq: u32) -> bool {
        if self.next != self.first {
            let index = usize::from(self.next.wrapping_sub(1) & MASK);
            let last = &mut self.pairs[index];
            if last.address.wrapping_add(last.length) == address && last.seq.wrapping_add(last.length) == seq {
                last.length += length;
                return true;
            }
        }
        if self.next.wrapping_sub(self.first) >= layout::PAIRS as u8 {
            return false;
        }
        let index = usize::from(self.next & MASK);
        self.pairs[index] = Pair { address, length, seq };
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Removes the pairs whose bytes all lie before `una`.
    pub(crate) fn drop_acked(&mut self, una: u32) {
        while self.first != self.next {
            let first = &self.pairs[usize::from(self.first & MASK)];
            if (una.wrapping_sub(first.seq.wrapping_add(first.length)) as i32) < 0 {
                break;
            }
            self.first = self.first.wrapping_add(1);
        }
    }

    /// Copies `out.len()` bytes from sequence number `seq` on: the NIC's DMA. False if the queue does not have them,
    /// which happens only if a program corrupts its own connection.
    #[inline(always)]
    pub(crate) fn fetch(&mut self, memory: &Region, seq: u32, out: &mut [u8]) -> bool {
        // Segments that follow each other nearly always lie in the same pair.
        let at = self.fetched;
        let pair = self.pairs[usize::from(at & MASK)];
        let skip = seq.wrapping_sub(pair.seq);
        let is_there = at.wrapping_sub(self.first) < self.next.wrapping_sub(self.first);
        if is_there && skip < pair.length && out.len() as u32 <= pair.length - skip {
            return memory.read((pair.address + skip) as usize, out).is_ok();
        }
        self.fetched = self.pair_of(seq);
        self.fetch_pieces(memory, seq, out)
    }

    /// Index of the pair that has the byte with this sequence number; any if none has.
    #[inline(never)]
    fn pair_of(&self, seq: u32) -> u8 {
        let holds = |at: &u8| {
            let pair = &self.pairs[usize::from(at & MASK)];
            seq.wrapping_sub(pair.seq) < pair.length
        };
        let mut pairs = (0..self.next.wrapping_sub(self.first)).map(|nth| self.first.wrapping_add(nth));
        pairs.find(holds).unwrap_or(self.first)
    }

    /// [`References::fetch`] from however many pairs the bytes lie in.
    #[inline(never)]
    pub(crate) fn fetch_pieces(&self, memory: &Region, seq: u32, mut out: &mut [u8]) -> bool {
        let copied = self.each_piece(seq, out.len() as u32, |at, length| {
            let (piece, rest) = core::mem::take(&mut out).split_at_mut(length);
            out = rest;
            memory.read(at, piece).ok()
        });
        copied.is_some()
    }

    /// The places of the `length` bytes from sequence number `seq` on. None if they lie in more than two pieces, or as
    /// in [`References::fetch`].
    pub(crate) fn places<'a>(&self, memory: &'a Region, seq: u32, length: u32) -> Option<Payload<'a>> {
        let mut places: Payload<'a> = [&[], &[]];
        let mut free = places.iter_mut();
        self.each_piece(seq, length, |at, length| {
            *free.next()? = memory.bytes(at, length)?;
            Some(())
        })?;
        Some(places)
    }

    /// Gives `each` offset and length of the pieces of session memory in which the `length` bytes from sequence number
    /// `seq` on lie, in order, until it returns None. None also if the queue does not have them.
    #[inline(always)]
    fn each_piece(&self, mut seq: u32, mut length: u32, mut each: impl FnMut(usize, usize) -> Option<()>) -> Option<()> {
        let mut index = self.first;
        while length > 0 {
            if index == self.next {
                return None;
            }
            let pair = self.pairs[usize::from(index & MASK)];
            let skip = seq.wrapping_sub(pair.seq);
            if skip < pair.length {
                let piece = length.min(pair.length - skip);
                each((pair.address + skip) as usize, piece as usize)?;
                seq = seq.wrapping_add(piece);
                length -= piece;
            }
            index = index.wrapping_add(1);
        }
        Some(())
    }
}

impl SendQueue for References {
    fn append(&mut self, _: &Region, address: u32, length: u32, seq: u32) -> bool {
        self.add(address, length, seq)
    }

    fn copy(&mut self, memory: &Region, seq: u32, out: &mut [u8]) -> bool {
        self.fetch(memory, seq, out)
    }

    fn acknowledge(&mut self, una: u32) {
        self.drop_acked(una);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_there_until_they_are_acknowledged() {
        let memory = Region::private(4096).unwrap();
        memory.write(0, &std::array::from_fn::<u8, 200, _>(|at| at as u8)).ok().unwrap();
        let mut queue = References::default();
        // Two pairs: the second piece follows the first in memory, the third does not.
        let start = u32::MAX - 9;
        let parts = [(100, 10), (110, 20), (0, 5)];
        let mut seq = start;
        for (address, length) in parts {
            assert!(queue.add(address, length, seq));
            seq = seq.wrapping_add(length);
        }
        assert_eq!(queue.pairs().map(|pair| (pair.address, pair.length)).collect::<Vec<_>>(), [(100, 30), (0, 5)]);
        let mut out = [0; 8];
        assert!(queue.fetch(&memory, start.wrapping_add(28), &mut out[..4]) && out[..4] == [128, 129, 0, 1]);
        assert!(!queue.fetch(&memory, start.wrapping_add(28), &mut out), "there are seven");
        queue.drop_acked(start.wrapping_add(29));
        assert!(queue.fetch(&memory, start.wrapping_add(29), &mut out[..1]) && out[0] == 129);
        queue.drop_acked(start.wrapping_add(30));
        assert!(!queue.fetch(&memory, start.wrapping_add(29), &mut out[..1]));
        assert!(queue.fetch(&memory, start.wrapping_add(31), &mut out[..4]) && out[..4] == [1, 2, 3, 4]);
        // As many as there are pairs, no two of which follow each other.
        queue.clear();
        let full = (0..).take_while(|at| queue.add(10 * at, 1, *at)).count();
        assert_eq!(full, layout::PAIRS);
    }
}
