//! Regions of which a process maps only the parts that it uses.
//!
//! Session memory is gigabytes, of which a program uses a small part. If all of it were mapped it would count as the
//! program's address space (RLIMIT_AS), be locked by mlockall(2) and be written into core files. So its beginning is
//! mapped at once, and the rest in pieces, each when it is first accessed. The addresses of unmapped pieces are not
//! reserved, since reserved addresses would count as well. They are far below the addresses that the kernel gives out;
//! a piece whose addresses have been taken nevertheless cannot be mapped. A piece is not mapped either if it would take
//! the last of a limited address space, which the program may need.

use crate::address_space;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of a piece: as many as a connection begins with in each direction.
const PIECE: usize = 1 << 18;

/// Bytes between the region's end and the addresses that the kernel gives out. The second, smaller distance is used if
/// the addresses at the first are taken: a sanitizer leaves its program only addresses near the top.
const DISTANCES: [usize; 2] = [1 << 44, 1 << 38];

/// Whether memory that is mapped from now on would be locked: see [`keep_unlocked`].
static LOCKING: AtomicBool = AtomicBool::new(false);

/// Notes whether the process locks memory that it maps from now on (mlockall(2), MCL_FUTURE). Pieces stay unlocked:
/// they hold what would otherwise be in the kernel's memory, which does not count as locked.
pub fn keep_unlocked(locking: bool) {
    LOCKING.store(locking, Ordering::Release);
}

/// The parts of a region that are mapped.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Bytes of the region, and of its beginning.
    pub whole: usize,
    first: usize,
    /// For each piece behind the beginning whether it is mapped.
    mapped: Box<[AtomicBool]>,
    /// Held while something is mapped.
    mapping: Mutex<()>,
}

/// Maps bytes of a descriptor at exactly this address.
fn map_at(address: usize, length: usize, fd: BorrowedFd<'_>, offset: usize) -> io::Result<NonNull<u8>> {
    let locking = LOCKING.load(Ordering::Acquire);
    let whole = libc::PROT_READ | libc::PROT_WRITE;
    let protection = if locking { libc::PROT_NONE } else { whole };
    // Without MAP_FIXED_NOREPLACE, for which a sanitizer takes address 0 where its program may have none at this one.
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    // SAFETY: a mapping where there is none: the address is a wish.
    let base = unsafe { libc::mmap(address as *mut _, length, protection, flags, fd.as_raw_fd(), offset as i64) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping that was just made. It is made readable after it is unlocked, so that no page of it is
    // filled.
    let unlocked = || unsafe { libc::munlock(base, length) == 0 && libc::mprotect(base, length, whole) == 0 };
    match NonNull::new(base.cast()) {
        Some(made) if base as usize == address && (!locking || unlocked()) => Ok(made),
        _ => {
            // SAFETY: the mapping that mmap(2) has just made here, whose address no other code knows.
            unsafe { libc::munmap(base, length) };
            Err(io::ErrorKind::AddrInUse.into())
        }
    }
}

/// Bytes between the beginnings of two regions of a process. None has more.
const STRIDE: usize = 1 << 33;

/// Number of regions that this process has made so far. A region that is not used any more may still be mapped.
static REGIONS: AtomicUsize = AtomicUsize::new(0);

/// An address that the kernel gave out when the first region was made. All regions' addresses are computed from this
/// one, so that no two overlap.
fn given_address() -> Option<usize> {
    static GIVEN: OnceLock<Option<usize>> = OnceLock::new();
    *GIVEN.get_or_init(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a page at an address of the kernel's choice, which no other code uses.
        unsafe {
            let page = libc::mmap(core::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0);
            (page != libc::MAP_FAILED && libc::munmap(page, 4096) == 0).then_some(page as usize)
        }
    })
}

/// An address far below the addresses that the kernel gives out, for the region with this number.
fn low_address(distance: usize, number: usize) -> Option<usize> {
    let below = distance + (1 + number % (distance / STRIDE)) * STRIDE;
    Some(given_address()?.checked_sub(below)? & !(STRIDE - 1))
}

impl Pieces {
    /// Maps the first `first` of the `whole` bytes of a descriptor. None if their addresses are not free.
    pub fn begin(fd: BorrowedFd<'_>, whole: usize, first: usize) -> Option<(NonNull<u8>, Pieces)> {
        let number = REGIONS.fetch_add(1, Ordering::Relaxed);
        let place = |distance| map_at(low_address(distance, number).filter(|_| whole <= STRIDE)?, first, fd, 0).ok();
        let base = DISTANCES.into_iter().find_map(place)?;
        let mapped = (0..(whole - first).div_ceil(PIECE)).map(|_| AtomicBool::new(false)).collect();
        let pieces = Pieces { whole, first, mapped, mapping: Mutex::default() };
        Some((base, pieces))
    }

    /// Maps the parts of the `length` bytes at `at` that are not mapped yet. Returns false if the bytes lie outside of
    /// the region, or cannot be mapped.
    pub fn reach(&self, base: NonNull<u8>, fd: Option<BorrowedFd<'_>>, at: usize, length: usize) -> bool {
        let Some(fd) = fd.filter(|_| at <= self.whole && length <= self.whole - at) else { return false };
        let piece = |at: usize| at.saturating_sub(self.first) / PIECE;
        let end = (at + length).saturating_sub(self.first).div_ceil(PIECE);
        let is_mapped = |piece: usize| self.mapped[piece].load(Ordering::Acquire);
        if (piece(at)..end).all(is_mapped) {
            return true;
        }
        // A signal handler that needed a piece would wait for the lock for ever.
        let mut before = MaybeUninit::uninit();
        // SAFETY: room for the mask, which the kernel fills in, and a mask that lives.
        unsafe {
            let mut all = MaybeUninit::uninit();
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
        }
        let one = self.mapping();
        let done = (piece(at)..end).all(|piece| is_mapped(piece) || self.map(base, fd, piece));
        drop(one);
        // SAFETY: `before` is the mask that pthread_sigmask(3) has filled in before the lock was taken.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut()) };
        done
    }

    fn mapping(&self) -> MutexGuard<'_, ()> {
        self.mapping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn map(&self, base: NonNull<u8>, fd: BorrowedFd<'_>, piece: usize) -> bool {
        let (from, to) = self.bounds(piece);
        if !address_space::has_room(to - from) {
            return false;
        }
        let Ok(made) = map_at(base.as_ptr() as usize + from, to - from, fd, from) else { return false };
        exclude_from_dumps(made.as_ptr(), to - from);
        self.mapped[piece].store(true, Ordering::Release);
        true
    }

    fn bounds(&self, piece: usize) -> (usize, usize) {
        let from = self.first + piece * PIECE;
        (from, (from + PIECE).min(self.whole))
    }

    /// The ranges that are mapped.
    pub fn ranges(&self) -> Vec<(usize, usize)> {
        let mapped = self.mapped.iter().enumerate().filter(|(_, mapped)| mapped.load(Ordering::Acquire));
        let pieces = mapped.map(|(piece, _)| self.bounds(piece));
        core::iter::once((0, self.first)).chain(pieces).collect()
    }

    /// Unlocks the mapped parts.
    pub fn unlock(&self, base: NonNull<u8>) {
        for (from, to) in self.ranges() {
            // SAFETY: a range of the region's own mappings. Whether its pages may be written to disk does not affect
            // their content.
            unsafe { libc::munlock(base.as_ptr().add(from).cast(), to - from) };
        }
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// Nobody may use the region any more.
    pub unsafe fn unmap(&self, base: NonNull<u8>) {
        for (from, to) in self.ranges() {
            // SAFETY: a range of the region's own mappings, which are not used any more (`# Safety`).
            unsafe { libc::munmap(base.as_ptr().add(from).cast(), to - from) };
        }
    }
}

/// Keeps memory out of core files.
pub(crate) fn exclude_from_dumps(base: *mut u8, length: usize) {
    // SAFETY: this changes what a core file contains, not the memory. If it fails, the memory stays in core files.
    unsafe { libc::madvise(base.cast(), length, libc::MADV_DONTDUMP) };
}
