//! The memory that the provider has lent, and its blocks.
//!
//! Blocks are powers of two, at least a page, and are found by their address. What keeps track of them lies in ordinary
//! memory: the NIC reaches only the blocks' contents. Small allocations made meanwhile go to the C library, so the lock
//! is taken once.

use crate::fork;
use baton_client::heap::Heap;
use rustix::fs::FallocateFlags;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of the smallest and largest blocks there. Copying a smaller message costs less than managing a block.
const LEAST: usize = 64 << 10;
const MOST: usize = 1 << 30;
/// Every block begins at a multiple of this.
pub const ALIGNMENT: usize = 4096;
/// The pages of a freed block of so many bytes go back to the system.
const GIVEN_BACK: usize = 4 << 20;

static LENT: OnceLock<Lent> = OnceLock::new();

pub struct Lent {
    start: usize,
    length: usize,
    fd: OwnedFd,
    /// Offset of the lent part in the shared memory.
    at: u64,
    blocks: Mutex<Blocks>,
    /// No more blocks are allocated, since this is a child of the process that the memory was lent to.
    closed: AtomicBool,
}

pub struct Blocks {
    heap: Heap,
    /// Size of each block that is in use, by its offset.
    sizes: BTreeMap<u32, u32>,
}

/// Begins to give out blocks of `length` bytes at `start`, the part from `at` on of the memory behind `fd`.
///
/// # Safety
/// See [`crate::rmpp_memory_lend`].
pub unsafe fn lend(start: *mut u8, length: usize, fd: BorrowedFd<'_>, at: u64) -> bool {
    let Ok(fd) = fd.try_clone_to_owned() else { return false };
    let length = length.min(u32::MAX as usize) & !(ALIGNMENT - 1);
    let blocks = Mutex::new(Blocks { heap: Heap::new(0, length), sizes: BTreeMap::new() });
    let lent = Lent { start: start.expose_provenance(), length, fd, at, blocks, closed: AtomicBool::new(false) };
    let usable = start.addr().is_multiple_of(ALIGNMENT) && length >= LEAST && LENT.get().is_none() && fork::watch();
    usable && LENT.set(lent).is_ok()
}

/// Takes a block of `size` bytes. None if the C library has to allocate it.
pub fn take(size: usize) -> Option<NonNull<u8>> {
    let lent = LENT.get().filter(|lent| (LEAST..=MOST).contains(&size) && !lent.closed.load(Ordering::Relaxed))?;
    let mut blocks = lent.lock();
    let (offset, bytes) = blocks.heap.take(size as u32)?;
    blocks.sizes.insert(offset, bytes);
    NonNull::new(lent.place(offset))
}

/// As [`take`]; the block is zero.
pub fn take_cleared(size: usize) -> Option<NonNull<u8>> {
    let block = take(size)?;
    let lent = LENT.get()?;
    if size < GIVEN_BACK || !lent.discard(block.addr().get() - lent.start, size) {
        // SAFETY: the block was just taken, and has at least `size` bytes.
        unsafe { block.write_bytes(0, size) };
    }
    Some(block)
}

/// Gives a block back. False if it is not of the lent memory.
pub fn give(block: *mut u8) -> bool {
    let Some((lent, offset)) = find(block) else { return false };
    let mut blocks = lent.lock();
    // Freeing an address that is no block has no effect, and does not harm other blocks.
    let Some(bytes) = blocks.sizes.remove(&offset) else { return true };
    if lent.closed.load(Ordering::Relaxed) {
        return true;
    }
    if bytes as usize >= GIVEN_BACK {
        lent.discard(offset as usize, bytes as usize);
    }
    blocks.heap.give(offset, bytes);
    true
}

/// Bytes of a block. None if it is not of the lent memory.
pub fn size_of(block: *mut u8) -> Option<usize> {
    let (lent, offset) = find(block)?;
    lent.lock().sizes.get(&offset).map(|bytes| *bytes as usize)
}

/// The lent memory, and a block's offset in it.
fn find(block: *mut u8) -> Option<(&'static Lent, u32)> {
    let lent = LENT.get()?;
    let offset = block.addr().checked_sub(lent.start).filter(|offset| *offset < lent.length)?;
    Some((lent, offset as u32))
}

/// The lent memory, unless its blocks are this process's own.
pub fn shared() -> Option<&'static Lent> {
    LENT.get().filter(|lent| !lent.closed.load(Ordering::Relaxed))
}

impl Lent {
    pub fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, offset: u32) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start + offset as usize)
    }

    /// Stops allocating blocks: those in use are now private copies of this process.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Blocks in use: where each lies, its bytes, and its offset in the shared memory.
    pub fn used<'a>(&'a self, blocks: &'a Blocks) -> impl Iterator<Item = (*mut u8, usize, u64)> + 'a {
        blocks.sizes.iter().map(|(offset, bytes)| (self.place(*offset), *bytes as usize, self.at + u64::from(*offset)))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the pages of a range to the system; they read as zero afterwards. It keeps errno, as free(3) does, since
    /// rustix makes the system call without the C library. False if that is not possible.
    fn discard(&self, offset: usize, length: usize) -> bool {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.fd, mode, self.at + offset as u64, length as u64).is_ok()
    }
}
