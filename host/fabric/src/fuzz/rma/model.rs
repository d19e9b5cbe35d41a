//! What is known of the memory that peers reach, and how each read and write of it may end.

use crate::abi::{CqEntry, FidMr, caps, errno, flags};
use crate::fuzz::model::{UNTOUCHED, byte};
use std::ffi::c_int;

/// Registered memory.
pub struct Region {
    pub owner: (usize, u32),
    pub key: u64,
    /// Address of its first byte for peers.
    pub base: u64,
    pub access: u64,
    /// Null when it is closed.
    pub mr: *mut FidMr,
    /// The memory. It stays where it is.
    pub bytes: Vec<u8>,
    /// What it holds when all writes have ended; None where a write may or may not have been carried out.
    known: Vec<Option<u8>>,
}

impl Region {
    pub fn new(owner: (usize, u32), length: usize, access: u64, number: usize) -> Region {
        let bytes: Vec<u8> = (0..length).map(|at| byte(number, at) ^ 0x55).collect();
        let known = bytes.iter().copied().map(Some).collect();
        Region { owner, key: 0, base: 0, access, mr: std::ptr::null_mut(), bytes, known }
    }

    /// Where a range lies in it, if a peer may have that.
    pub fn find(&self, address: u64, length: usize, write: bool) -> Option<usize> {
        let needed = if write { caps::REMOTE_WRITE } else { caps::REMOTE_READ };
        let at = i128::from(address) - i128::from(self.base);
        let inside = at >= 0 && at + length as i128 <= self.bytes.len() as i128;
        (inside && self.access & needed != 0 && !self.mr.is_null()).then_some(at as usize)
    }

    fn forget(&mut self, at: usize, length: usize) {
        self.known[at..at + length].fill(None);
    }

    fn is_as_known(&self, at: usize, bytes: &[u8]) -> bool {
        self.known[at..at + bytes.len()].iter().zip(bytes).all(|(known, byte)| known.is_none_or(|known| known == *byte))
    }
}

/// How an operation ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Done,
    /// The peer does not allow it.
    Refused,
    /// What it needs is closed meanwhile.
    Either,
}

/// A read or write of a peer's memory.
pub struct Access {
    pub side: (usize, u32),
    pub target: (usize, u32),
    pub write: bool,
    pub key: u64,
    /// The region and the place in it, if there is one.
    pub place: Option<(usize, usize)>,
    /// Its memory. It stays where it is.
    pub buffer: Vec<u8>,
    pub length: usize,
    /// Success is reported.
    pub reported: bool,
    /// It has a context, by which its end is known.
    pub named: bool,
    /// It has immediate data, so the target gets a completion.
    pub data: bool,
    /// The target has got it.
    pub noticed: bool,
    pub fate: Fate,
    /// It does nothing any more.
    pub ended: bool,
    /// Its completion has come.
    pub told: bool,
}

impl Access {
    pub fn overlaps(&self, region: usize, at: usize, length: usize) -> bool {
        self.place.is_some_and(|(of, start)| of == region && start < at + length && at < start + self.length)
    }
}

#[derive(Default)]
pub struct Model {
    pub regions: Vec<Region>,
    /// By context less one.
    pub accesses: Vec<Access>,
    /// Failures of operations without a context, by the side that has asked.
    pub nameless: [usize; 2],
    /// How often each side was opened anew.
    pub lives: [u32; 2],
}

impl Model {
    fn lives(&self, side: (usize, u32)) -> bool {
        self.lives[side.0] == side.1
    }

    pub fn is_whole(&self, access: &Access) -> bool {
        self.lives(access.side) && self.lives(access.target)
    }

    /// Whether no operation that has not ended stands against a read or write of a range.
    pub fn is_free(&self, region: usize, at: usize, length: usize, write: bool) -> bool {
        let against = |access: &&Access| !access.ended && (write || access.write) && access.overlaps(region, at, length);
        !self.accesses.iter().any(|access| against(&access))
    }

    /// An operation has begun.
    pub fn begin(&mut self, access: Access) {
        if let (Some((region, at)), true) = (access.place, access.write) {
            let known = &mut self.regions[region].known[at..at + access.length];
            known.iter_mut().zip(&access.buffer).for_each(|(known, byte)| *known = Some(*byte));
        }
        self.accesses.push(access);
    }

    /// What these operations ask for may be there or not when they are carried out.
    fn doubt(&mut self, which: impl Fn(&Access) -> bool) {
        for access in self.accesses.iter_mut().filter(|access| !access.ended && which(access)) {
            access.fate = if access.fate == Fate::Done { Fate::Either } else { access.fate };
            if let (Some((region, at)), true) = (access.place, access.write) {
                self.regions[region].forget(at, access.length);
            }
        }
    }

    pub fn close_region(&mut self, region: usize) {
        self.regions[region].mr = std::ptr::null_mut();
        self.doubt(|access| access.place.is_some_and(|(of, _)| of == region));
    }

    /// A side is closed, and opened anew.
    pub fn close_side(&mut self, side: usize) {
        let closed = (side, self.lives[side]);
        self.lives[side] += 1;
        self.nameless[side] = 0;
        self.doubt(|access| access.side == closed || access.target == closed);
        self.accesses.iter_mut().filter(|access| access.side == closed).for_each(|access| access.ended = true);
    }

    /// A completion of a side's queue. `failed`: its error.
    pub fn complete(&mut self, side: (usize, u32), entry: &CqEntry, failed: Option<c_int>) {
        if entry.flags & caps::REMOTE_WRITE != 0 {
            assert_eq!(failed, None, "a write of a peer's fails here: {entry:?}");
            return self.notice(side, entry);
        }
        if entry.op_context.is_null() {
            assert!(failed.is_some(), "what has no context is reported: {entry:?}");
            self.nameless[side.0] += 1;
            return;
        }
        let at = entry.op_context.addr() - 1;
        let access = self.accesses.get(at).unwrap_or_else(|| panic!("no operation has this context: {entry:?}"));
        assert!(access.named && access.side == side, "whose operation {at} is: {entry:?}");
        assert!(!access.told, "{at} ends twice: {entry:?} {failed:?}");
        assert!(access.reported || failed.is_some(), "{at} is reported without being asked for");
        assert_eq!(entry.flags, caps::RMA | if access.write { caps::WRITE } else { caps::READ }, "{at}");
        match failed {
            Some(error) => self.fail(at, error),
            None => self.succeed(at, entry),
        }
        (self.accesses[at].ended, self.accesses[at].told) = (true, true);
    }

    fn succeed(&self, at: usize, entry: &CqEntry) {
        let access = &self.accesses[at];
        assert_ne!(access.fate, Fate::Refused, "{at} ends well, although nobody allows it");
        let Some((region, start)) = access.place else { return };
        assert!(access.write || entry.len == access.length, "{at}: {} bytes were read, of {}", entry.len, access.length);
        if access.ended {
            // The counters have reported it before, and other writes may have followed.
            return;
        }
        let found = if access.write { &self.regions[region].bytes[start..start + access.length] } else { &access.buffer[..] };
        assert!(
            self.regions[region].is_as_known(start, found),
            "{at}: the bytes that were {}",
            if access.write { "written" } else { "read" }
        );
    }

    fn fail(&mut self, at: usize, error: c_int) {
        let access = &self.accesses[at];
        let lost = matches!(error, errno::ETIMEDOUT | errno::ECONNRESET | errno::ECONNABORTED) && !self.is_whole(access);
        let refused = error == errno::EKEYREJECTED && access.fate != Fate::Done;
        assert!(lost || refused, "{at} fails with {error}, although it is {:?}", access.fate);
        let untouched = access.write || lost || access.buffer.iter().all(|byte| *byte == UNTOUCHED);
        assert!(untouched, "{at} is refused, and has read something");
    }

    /// A side has got the completion of a peer's write to its memory.
    fn notice(&mut self, side: (usize, u32), entry: &CqEntry) {
        assert_eq!(entry.flags, caps::RMA | caps::REMOTE_WRITE | flags::REMOTE_CQ_DATA);
        let at = entry.data as usize;
        let access = self.accesses.get_mut(at).unwrap_or_else(|| panic!("no write has brought {at}"));
        let told = std::mem::replace(&mut access.noticed, true);
        assert!(access.write && access.data && !told && access.target == side, "{at} is told of to {side:?}, before {told}");
        assert_ne!(access.fate, Fate::Refused, "{at} is told of, although nobody allows it");
        assert_eq!(entry.len, access.length, "{at}: the bytes that it has brought");
        // Once it has ended for its own side, another write may have followed.
        if let Some((region, start)) = access.place.filter(|_| !access.ended) {
            let region = &self.regions[region];
            assert!(region.is_as_known(start, &region.bytes[start..start + entry.len]), "{at} is told of before it is there");
        }
    }

    /// All operations of a side have ended, those that are not reported too.
    pub fn end_all(&mut self, side: (usize, u32)) {
        self.accesses.iter_mut().filter(|access| access.side == side).for_each(|access| access.ended = true);
    }

    /// Counts the operations that fit, of which those of [`Fate::Either`] may count or not.
    pub fn count(&self, fate: Fate, which: impl Fn(&Access) -> bool) -> std::ops::RangeInclusive<usize> {
        let count = |fate| self.accesses.iter().filter(|access| which(access) && access.fate == fate).count();
        let least = count(fate);
        least..=least + count(Fate::Either)
    }

    /// Everything has ended, and was read: each operation has had its completion, and memory is as it should be.
    pub fn check_end(&self) {
        for (at, access) in self.accesses.iter().enumerate().filter(|(_, access)| access.named && self.lives(access.side)) {
            assert!(access.told || !access.reported && access.fate != Fate::Refused, "{at} has no completion: {:?}", access.fate);
        }
        for (at, life) in self.lives.into_iter().enumerate() {
            let failed = self.nameless[at];
            let expected = self.count(Fate::Refused, |access| access.side == (at, life) && !access.named);
            assert!(expected.contains(&failed), "{failed} copies have failed at {at}, not {expected:?}");
        }
        for (number, region) in self.regions.iter().enumerate().filter(|(_, region)| self.lives(region.owner)) {
            assert!(region.is_as_known(0, &region.bytes), "the bytes of region {number}");
        }
        for (at, access) in self.accesses.iter().enumerate().filter(|(_, access)| access.write) {
            assert!(access.buffer.iter().enumerate().all(|(place, found)| *found == byte(at, place)), "the source of {at}");
        }
    }
}
