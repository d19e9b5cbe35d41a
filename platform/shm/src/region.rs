//! Memory shared between processes, sealed so that no process can take it away while another uses it.

use crate::copy::copy_inline;
use crate::guarded;
use crate::pieces::{Pieces, exclude_from_dumps};
use core::ops::{Deref, Range};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An access lies outside of the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfRegion;

/// A mapping of shared memory. Other processes may read and write it at any time.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    /// Bytes that are mapped in any case.
    length: usize,
    fd: Option<OwnedFd>,
    /// The rest, if it is mapped by pieces.
    pieces: Option<Box<Pieces>>,
}

// SAFETY: the mapping is not bound to a thread, and it lives as long as the region. All accesses to it are atomic, or
// copies of bytes, for which any value is valid.
unsafe impl Send for Region {}
// SAFETY: all that changes through a shared reference is the mapping's bytes, which are reached as atomics or copied,
// for which any value is valid; other processes change them at any time, too.
unsafe impl Sync for Region {}

/// A set of at most one NUMA node, one bit each, in the form of 1024 bits that mbind(2) and set_mempolicy(2) take.
pub fn node_mask(node: Option<usize>) -> [u64; 16] {
    core::array::from_fn(|word| node.filter(|node| node / 64 == word).map_or(0, |node| 1 << (node % 64)))
}

impl Region {
    /// Makes a region of `length` zero bytes. Its memory is sealed: no process that gets the descriptor can shrink,
    /// grow or unseal it.
    ///
    /// # Errors
    /// The system's error, if it gives no memory or descriptor.
    pub fn create(name: &str, length: usize) -> io::Result<Region> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Region::map(fd)
    }

    /// Maps a region that another process has made. Refuses memory that is not sealed, since its maker could take it
    /// away.
    ///
    /// # Errors
    /// `InvalidData` for unsealed memory, else the system's error.
    pub fn map(fd: OwnedFd) -> io::Result<Region> {
        let length = Region::sealed_length(&fd)?;
        Region::map_pages(length, libc::MAP_SHARED, Some(fd))
    }

    /// As [`Region::map`], but maps only the first `first` bytes, which are whole pages, at once, and the others in
    /// pieces when they are first accessed. A piece that cannot be mapped counts as outside of the region. If no
    /// suitable addresses are free, the whole region is mapped.
    ///
    /// # Errors
    /// As [`Region::map`].
    pub fn map_by_pieces(fd: OwnedFd, first: usize) -> io::Result<Region> {
        let length = Region::sealed_length(&fd)?;
        match Pieces::begin(fd.as_fd(), length, first.min(length)) {
            Some((base, pieces)) => Ok(Region { base, length: first.min(length), fd: Some(fd), pieces: Some(Box::new(pieces)) }),
            None => Region::map_pages(length, libc::MAP_SHARED, Some(fd)),
        }
    }

    /// The length of memory that its maker cannot take away.
    fn sealed_length(fd: &OwnedFd) -> io::Result<usize> {
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "shared memory that is not sealed against shrinking"));
        }
        Ok(rustix::fs::fstat(fd)?.st_size as usize)
    }

    /// Maps `length` bytes of memory of the kernel's with a fixed size, such as that of a BPF array map, whose
    /// descriptor does not show its length.
    ///
    /// # Errors
    /// The system's error, if the memory is shorter.
    pub fn map_fixed(fd: OwnedFd, length: usize) -> io::Result<Region> {
        Region::map_pages(length.next_multiple_of(4096), libc::MAP_SHARED, Some(fd))
    }

    /// Prefers a NUMA node for the region's memory: pages that have not been touched yet come from this node, whichever
    /// thread touches them first, and pages that only this process uses move there (mbind(2), MPOL_PREFERRED).
    ///
    /// # Errors
    /// The system's error, for example if it has no NUMA nodes, or not this one.
    pub fn prefer_node(&self, node: usize) -> io::Result<()> {
        let nodes = node_mask(Some(node));
        const MPOL_MF_MOVE: libc::c_uint = 2;
        // SAFETY: mbind reads 1024 bits at `nodes`, which has 16 words of 64. It affects on which node the pages of
        // this mapping lie, not their contents.
        let bound = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.length,
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                1024,
                MPOL_MF_MOVE,
            )
        };
        if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes a region that no other process sees, for tests and benches.
    ///
    /// # Errors
    /// The system's error, if it gives no memory.
    pub fn private(length: usize) -> io::Result<Region> {
        Region::map_pages(length, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
    }

    fn map_pages(length: usize, flags: libc::c_int, fd: Option<OwnedFd>) -> io::Result<Region> {
        let raw = fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: without MAP_FIXED the kernel chooses an address that no other mapping has.
        let base = unsafe {
            libc::mmap(core::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_NORESERVE, raw, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Region { base, length, fd, pieces: None })
    }

    /// Begins to load the `length` bytes at offset `at`, 512 of them at most. They may lie outside.
    #[inline(always)]
    pub fn prefetch(&self, at: usize, length: u32) {
        crate::lines::each_line(self.base.as_ptr().wrapping_add(at), length, crate::lines::prefetch_line);
    }

    /// Asks for huge pages for a range that is not used yet, for each whole huge page in it: for large tables with
    /// accesses all over.
    pub fn advise_huge(&self, range: Range<usize>) {
        if let Some(base) = self.span(range.start, range.len()) {
            crate::lines::advise(base.as_ptr(), range.len());
        }
    }

    /// Keeps the bytes from `at` on out of core files.
    pub fn exclude_from_dumps(&self, at: usize) {
        if let Some(base) = self.span(at, self.length.saturating_sub(at)) {
            exclude_from_dumps(base.as_ptr(), self.length - at);
        }
    }

    /// Unlocks the region's mapped parts (mlockall(2)).
    pub fn unlock(&self) {
        match &self.pieces {
            Some(pieces) => pieces.unlock(self.base),
            // SAFETY: the region's own mapping. Whether its pages may be written to disk does not affect their content.
            None => drop(unsafe { libc::munlock(self.base.as_ptr().cast(), self.length) }),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.pieces.as_ref().map_or(self.length, |pieces| pieces.whole)
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The descriptor, if the memory can be shared with other processes.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// A pointer to the `length` bytes at `at`, for system calls; None if they lie outside of the region.
    #[inline]
    pub fn span(&self, at: usize, length: usize) -> Option<NonNull<u8>> {
        if at > self.length || length > self.length - at {
            return self.span_of_pieces(at, length);
        }
        // SAFETY: `at` is at most `self.length`, so that the result lies in the mapping or just behind it.
        Some(unsafe { self.base.add(at) })
    }

    #[cold]
    #[inline(never)]
    fn span_of_pieces(&self, at: usize, length: usize) -> Option<NonNull<u8>> {
        let reached = self.pieces.as_ref()?.reach(self.base, self.fd(), at, length);
        // SAFETY: the bytes are mapped now, at this distance from the base, and stay so.
        reached.then(|| unsafe { self.base.add(at) })
    }

    /// Copies the bytes at `at` out of the region.
    ///
    /// # Errors
    /// [`OutOfRegion`]; then nothing is copied.
    #[inline]
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), OutOfRegion> {
        let from = self.span(at, out.len()).ok_or(OutOfRegion)?;
        // SAFETY: `span` has checked that the source lies in the mapping; the target is borrowed mutably, so that they
        // do not overlap. The other side may write meanwhile: then some bytes are old and some new, and every byte is a
        // valid u8.
        unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes into the region at `at`.
    ///
    /// # Errors
    /// [`OutOfRegion`]; then nothing is copied.
    #[inline]
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        let to = self.span(at, bytes.len()).ok_or(OutOfRegion)?;
        // SAFETY: `span` has checked that the target lies in the mapping. References into the mapping are only ever to
        // atomics, so that no reference that the compiler relies on is written through; the source is a live slice
        // elsewhere.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The `length` bytes at `at`, which other processes may write at any time. None if they lie outside of the region.
    pub fn bytes(&self, at: usize, length: usize) -> Option<&[AtomicU8]> {
        let base = self.span(at, length)?;
        // SAFETY: `span` has checked that the bytes lie in the mapping, which `self` keeps alive; AtomicU8 has the
        // layout of u8, and atomics may be written by others at any time.
        Some(unsafe { core::slice::from_raw_parts(base.as_ptr().cast(), length) })
    }

    /// The `count` atomic words of 8 bytes at `at`.
    ///
    /// # Panics
    /// If they are not aligned or lie outside of the region. Offsets must come from the layout, not from the other
    /// process.
    #[inline]
    pub fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        assert!(at.is_multiple_of(8));
        let base = self.span(at, count * 8).expect("the layout lies inside the region");
        // SAFETY: `span` has checked that the words lie in the mapping, which `self` keeps alive; they are aligned to
        // 8, since the mapping is aligned to a page and `at` to 8; atomics may be written by others at any time.
        unsafe { core::slice::from_raw_parts(base.as_ptr().cast(), count) }
    }

    /// The atomic word of 4 bytes at `at`.
    ///
    /// # Panics
    /// As [`Region::words`].
    #[inline]
    pub fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4));
        let base = self.span(at, 4).expect("the layout lies inside the region");
        // SAFETY: `span` has checked that the word lies in the mapping, which `self` keeps alive; it is aligned to 4,
        // since the mapping is aligned to a page and `at` to 4; an atomic may be written by others at any time.
        unsafe { &*base.as_ptr().cast() }
    }

    /// The `N` words of 8 bytes at `at`, as an array that keeps the region alive. Indexing it by a constant needs no
    /// bounds check.
    pub fn shared_array<const N: usize>(self: &Arc<Self>, at: usize) -> WordArray<N> {
        let words: &[AtomicU64; N] = self.words(at, N).first_chunk().expect("as many words as were asked for");
        WordArray { words: NonNull::from(words), _region: self.clone() }
    }

    /// The words of the ring at `at`.
    pub fn ring(self: &Arc<Self>, at: usize) -> RingWords {
        self.shared_array(at)
    }

    /// The `length` bytes at `at` as a circular buffer. None if they lie outside of the region, or `length` is no power
    /// of two.
    pub fn circle(self: &Arc<Self>, at: u32, length: u32) -> Option<Circle> {
        let base = self.span(at as usize, length as usize)?;
        length.is_power_of_two().then(|| Circle { base, mask: length - 1, at, region: self.clone() })
    }

    /// Returns the pages of a range to the system; they read as zero afterwards.
    pub fn discard(&self, at: usize, length: usize) {
        if let Some(fd) = &self.fd {
            // The bytes that it clears are only reached through atomics and copies. A failure leaves the pages in
            // place, which is harmless.
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(fd, mode, at as u64, length as u64);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `map_pages` or `Pieces` made these mappings, and everything that refers to them borrows the region or
        // holds an `Arc` of it.
        unsafe {
            match &self.pieces {
                Some(pieces) => pieces.unmap(self.base),
                None => drop(libc::munmap(self.base.as_ptr().cast(), self.length)),
            }
        }
    }
}

/// A circular buffer in a region: each byte of a sequence lies at its sequence number modulo the length, which is a
/// power of two.
#[derive(Clone, Debug)]
pub struct Circle {
    base: NonNull<u8>,
    mask: u32,
    /// Offset of the buffer in the region.
    at: u32,
    region: Arc<Region>,
}

// SAFETY: `base` points into the mapping, which is not bound to a thread and which `region` keeps alive; its bytes are
// only copied from and to.
unsafe impl Send for Circle {}

impl Circle {
    /// Length in bytes.
    pub fn length(&self) -> u32 {
        self.mask.wrapping_add(1)
    }

    /// Offset in the region of the byte with this sequence number.
    #[inline]
    pub fn offset_of(&self, seq: u32) -> u32 {
        self.at + (seq & self.mask)
    }

    /// Writes bytes from sequence number `seq` on. If there are more bytes than fit, the last ones remain.
    #[inline(always)]
    pub fn write(&self, seq: u32, bytes: &[u8]) {
        let offset = seq & self.mask;
        if bytes.len() > (self.mask & !seq) as usize {
            return self.write_to_end(seq, bytes);
        }
        // SAFETY: `Region::circle` has checked that the `mask + 1` bytes at `base` lie in the region, which `region`
        // keeps mapped, and the bytes end before the last of them; see `Region::write` for concurrent writes.
        unsafe {
            let to = self.base.add(offset as usize);
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len());
        }
    }

    /// Begins to load the place of the byte with this sequence number, and the cache line behind it, into the cache.
    #[inline(always)]
    pub fn prefetch(&self, seq: u32) {
        let place = self.base.as_ptr().wrapping_add((seq & self.mask) as usize);
        crate::lines::prefetch_line(place);
        crate::lines::prefetch_line(place.wrapping_add(64));
    }

    /// [`Circle::write`] without a call where up to 2 KB do not reach the end of the buffer; see [`crate::Wide`].
    #[inline(always)]
    pub fn write_inline(&self, seq: u32, bytes: &[u8]) {
        let offset = seq & self.mask;
        if bytes.len() > (self.mask & !seq) as usize {
            return self.write_to_end(seq, bytes);
        }
        // SAFETY: `Region::circle` has checked that the `mask + 1` bytes at `base` lie in the region, which `region`
        // keeps mapped, and the bytes end before the last of them; see `Region::write` for concurrent writes.
        unsafe { copy_inline(bytes.as_ptr(), self.base.add(offset as usize).as_ptr(), bytes.len()) };
    }

    /// [`Circle::write`] of bytes that reach the end of the buffer.
    #[cold]
    #[inline(never)]
    fn write_to_end(&self, seq: u32, bytes: &[u8]) {
        // SAFETY: `Region::circle` has checked that the `mask + 1` bytes at `base` lie in the region, which `region`
        // keeps mapped; they are only reached by copies and atomics.
        unsafe { write_around(self.base, self.mask, seq, bytes) };
    }

    /// The places of the `length` bytes from sequence number `seq` on, which other processes may write at any time: in
    /// two pieces, the second of which is empty or at the buffer's beginning. None if more bytes are asked for than
    /// fit.
    pub fn places(&self, seq: u32, length: u32) -> Option<[&[AtomicU8]; 2]> {
        let first = before_end(self.mask, seq, length as usize);
        let rest = length as usize - first;
        if length.saturating_sub(1) > self.mask {
            return None;
        }
        Some([self.region.bytes(self.offset_of(seq) as usize, first)?, self.region.bytes(self.at as usize, rest)?])
    }

    /// Reads the bytes from sequence number `seq` on.
    pub fn read(&self, seq: u32, out: &mut [u8]) {
        // SAFETY: `Region::circle` has checked that the `mask + 1` bytes at `base` lie in the region, which `region`
        // keeps mapped; they are only reached by copies and atomics.
        unsafe { read_around(self.base, self.mask, seq, out) };
    }
}

/// Number of bytes that a copy at sequence number `seq` handles before it continues at the buffer's beginning.
#[inline(always)]
fn before_end(mask: u32, seq: u32, length: usize) -> usize {
    length.min((mask - (seq & mask)) as usize + 1)
}

/// Copies bytes into a circular buffer from sequence number `seq` on.
///
/// # Safety
/// The `mask + 1` bytes from `base` on must be mapped as long as this runs, and only be accessed by copies and atomics.
#[inline(always)]
unsafe fn write_around(base: NonNull<u8>, mask: u32, mut seq: u32, mut bytes: &[u8]) {
    loop {
        let (piece, rest) = bytes.split_at(before_end(mask, seq, bytes.len()));
        // SAFETY: `seq & mask` is at most `mask`, and `before_end` has cut the piece to the bytes left before the end,
        // so that the caller's `mask + 1` mapped bytes contain it; see `Region::write` for concurrent writes.
        unsafe {
            let to = base.add((seq & mask) as usize);
            core::ptr::copy_nonoverlapping(piece.as_ptr(), to.as_ptr(), piece.len());
        }
        if rest.is_empty() {
            return;
        }
        seq = seq.wrapping_add(piece.len() as u32);
        bytes = rest;
    }
}

/// Copies bytes out of a circular buffer from sequence number `seq` on.
///
/// # Safety
/// As for [`write_around`].
#[inline(always)]
unsafe fn read_around(base: NonNull<u8>, mask: u32, mut seq: u32, mut out: &mut [u8]) {
    loop {
        let (piece, rest) = out.split_at_mut(before_end(mask, seq, out.len()));
        // SAFETY: `seq & mask` is at most `mask`, and `before_end` has cut the piece to the bytes left before the end,
        // so that the caller's `mask + 1` mapped bytes contain it; see `Region::read` for concurrent writes.
        unsafe {
            let from = base.add((seq & mask) as usize);
            core::ptr::copy_nonoverlapping(from.as_ptr(), piece.as_mut_ptr(), piece.len());
        }
        if rest.is_empty() {
            return;
        }
        seq = seq.wrapping_add(piece.len() as u32);
        out = rest;
    }
}

/// An array of `N` words of 4 bytes of a region, and `CIRCLES` circular buffers there. All of them can be moved to
/// other places of the region at any time. They share one description of the region, since there may be very many of
/// them.
#[derive(Debug)]
pub struct MovableParts<const N: usize, const CIRCLES: usize> {
    words: AtomicPtr<[AtomicU32; N]>,
    /// Of each buffer the offset in the region in the upper half, the mask in the lower half: in one word, so that they
    /// always belong together.
    circles: [AtomicU64; CIRCLES],
    base: NonNull<u8>,
    region: Arc<Region>,
}

// SAFETY: `base` and `words` point into the mapping, which is not bound to a thread and which `region` keeps alive; its
// bytes are only copied from and to, or reached as atomics.
unsafe impl<const N: usize, const CIRCLES: usize> Send for MovableParts<N, CIRCLES> {}
// SAFETY: the fields that change, `words` and `circles`, are atomics, and so are the words in the mapping; its other
// bytes are only copied from and to.
unsafe impl<const N: usize, const CIRCLES: usize> Sync for MovableParts<N, CIRCLES> {}

impl<const N: usize, const CIRCLES: usize> MovableParts<N, CIRCLES> {
    /// Makes the array of the words at `at`, and buffers of a single byte at the region's beginning.
    ///
    /// # Panics
    /// As [`Region::words`].
    pub fn new(region: Arc<Region>, at: usize) -> Self {
        let (words, circles) = (AtomicPtr::new(core::ptr::null_mut()), core::array::from_fn(|_| AtomicU64::new(0)));
        let parts = MovableParts { words, circles, base: region.base, region };
        parts.move_words(at);
        parts
    }

    /// The region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Moves the array to the words at `at`.
    ///
    /// # Panics
    /// As [`Region::words`].
    pub fn move_words(&self, at: usize) {
        assert!(at.is_multiple_of(4));
        let place = self.region.span(at, N * 4).expect("the layout lies inside the region");
        self.words.store(place.as_ptr().cast(), Ordering::Release);
    }

    /// The words.
    #[inline(always)]
    pub fn words(&self) -> &[AtomicU32; N] {
        // SAFETY: `move_words` has stored the aligned address of `N` words inside the mapping, which `region` keeps
        // alive.
        unsafe { &*self.words.load(Ordering::Acquire) }
    }

    /// The buffer with this number, less than `CIRCLES`.
    #[inline(always)]
    pub fn circle(&self, number: usize) -> MovableCircle<'_> {
        MovableCircle { base: self.base, place: &self.circles[number], region: &self.region }
    }
}

/// A circular buffer that can be moved to another place of the same region at any time.
#[derive(Debug)]
pub struct MovableCircle<'a> {
    /// The beginning of the region in which `place` says where the buffer lies.
    base: NonNull<u8>,
    place: &'a AtomicU64,
    region: &'a Region,
}

impl MovableCircle<'_> {
    /// Moves the buffer to the `length` bytes at `at`. Returns false, and changes nothing, if they lie outside of the
    /// region or `length` is no power of two.
    #[must_use]
    pub fn move_to(&self, at: u32, length: u32) -> bool {
        let fits = length.is_power_of_two() && self.region.span(at as usize, length as usize).is_some();
        if fits {
            self.place.store(u64::from(at) << 32 | u64::from(length - 1), Ordering::Relaxed);
        }
        fits
    }

    /// Offset in the region, and mask.
    #[inline(always)]
    fn place(&self) -> (u32, u32) {
        let place = self.place.load(Ordering::Relaxed);
        ((place >> 32) as u32, place as u32)
    }

    /// Length in bytes.
    #[inline(always)]
    pub fn length(&self) -> u32 {
        self.place().1.wrapping_add(1)
    }

    /// Offset in the region of the byte with this sequence number.
    #[inline(always)]
    pub fn offset_of(&self, seq: u32) -> u32 {
        let (at, mask) = self.place();
        at + (seq & mask)
    }

    /// Begins to load the `length` bytes from sequence number `seq` on, 512 of them at most, to be read.
    #[inline(always)]
    pub fn prefetch(&self, seq: u32, length: u32) {
        let place = self.base.as_ptr().wrapping_add(self.offset_of(seq) as usize);
        crate::lines::each_line(place, length, crate::lines::prefetch_line);
    }

    /// Begins to load the `length` bytes from sequence number `seq` on, 512 of them at most, to be written.
    #[inline(always)]
    pub fn prefetch_to_write(&self, seq: u32, length: u32) {
        let place = self.base.as_ptr().wrapping_add(self.offset_of(seq) as usize);
        crate::lines::each_line(place, length, crate::lines::prefetch_line_to_write);
    }

    /// Writes bytes of a program's, at least one, from sequence number `seq` on if they do not wrap around, and returns
    /// their offset in the region. Returns None if they would, or cannot be read ([`guarded`]).
    #[inline(always)]
    pub fn write_straight(&self, seq: u32, bytes: &[u8]) -> Option<u32> {
        let (at, mask) = self.place();
        let offset = seq & mask;
        // Before the branch: it takes fewer instructions.
        let to = self.base.as_ptr().wrapping_add(at as usize).wrapping_add(offset as usize);
        if bytes.len().wrapping_sub(1) > (mask - offset) as usize {
            return None;
        }
        // SAFETY: `move_to` has checked that the buffer lies in the region, which `region` keeps mapped, and the bytes
        // end before the buffer does; see `Region::write` for concurrent writes.
        let written = unsafe { guarded::copy(bytes.as_ptr(), to, bytes.len()) };
        written.then_some(at + offset)
    }

    /// Writes bytes of a program's from sequence number `seq` on, not more than the buffer has. Returns false if they
    /// cannot be read ([`guarded`]).
    #[must_use]
    pub fn write(&self, seq: u32, bytes: &[u8]) -> bool {
        let (at, mask) = self.place();
        let (piece, rest) = bytes.split_at(before_end(mask, seq, bytes.len()));
        // SAFETY: `move_to` has checked that the buffer lies in the region, which `region` keeps mapped; `before_end`
        // cuts at its end, and the remaining bytes go to its beginning.
        unsafe {
            let base = self.base.add(at as usize);
            let to = base.add((seq & mask) as usize);
            let rest = &rest[..rest.len().min(mask as usize + 1)];
            guarded::copy(piece.as_ptr(), to.as_ptr(), piece.len()) && guarded::copy(rest.as_ptr(), base.as_ptr(), rest.len())
        }
    }

    /// Reads the bytes, at least one, from sequence number `seq` on into a program's memory. Returns whether they could
    /// be written there ([`guarded`]); None, with nothing done, if they would wrap around.
    #[inline(always)]
    #[must_use]
    pub fn read_straight(&self, seq: u32, out: &mut [u8]) -> Option<bool> {
        let (at, mask) = self.place();
        let offset = seq & mask;
        // Before the branch: it takes fewer instructions.
        let from = self.base.as_ptr().wrapping_add(at as usize).wrapping_add(offset as usize);
        if out.len().wrapping_sub(1) > (mask - offset) as usize {
            return None;
        }
        // SAFETY: `move_to` has checked that the buffer lies in the region, which `region` keeps mapped, and the bytes
        // end before the buffer does; see `Region::read` for concurrent writes.
        Some(unsafe { guarded::copy(from, out.as_mut_ptr(), out.len()) })
    }

    /// Reads the bytes from sequence number `seq` on into a program's memory, not more than the buffer has. Returns
    /// false if they cannot be written there ([`guarded`]).
    #[must_use]
    pub fn read(&self, seq: u32, out: &mut [u8]) -> bool {
        let (at, mask) = self.place();
        let first = before_end(mask, seq, out.len());
        let (piece, rest) = out.split_at_mut(first);
        // SAFETY: `move_to` has checked that the buffer lies in the region, which `region` keeps mapped; `before_end`
        // cuts at its end, and what is left begins at its beginning; see `Region::read` for concurrent writes.
        unsafe {
            let base = self.base.add(at as usize);
            let from = base.add((seq & mask) as usize);
            let most = rest.len().min(mask as usize + 1);
            let rest = &mut rest[..most];
            guarded::copy(from.as_ptr(), piece.as_mut_ptr(), piece.len())
                && guarded::copy(base.as_ptr(), rest.as_mut_ptr(), rest.len())
        }
    }
}

/// An array of `N` words of 8 bytes of a region, which it keeps mapped.
#[derive(Clone, Debug)]
pub struct WordArray<const N: usize> {
    words: NonNull<[AtomicU64; N]>,
    _region: Arc<Region>,
}

// SAFETY: `words` points to atomics in the mapping, which is not bound to a thread and which `_region` keeps alive.
unsafe impl<const N: usize> Send for WordArray<N> {}
// SAFETY: `words` points to atomics, which several threads may reach at once, and `_region` keeps their mapping alive.
unsafe impl<const N: usize> Sync for WordArray<N> {}

impl<const N: usize> Deref for WordArray<N> {
    type Target = [AtomicU64; N];

    #[inline(always)]
    fn deref(&self) -> &[AtomicU64; N] {
        // SAFETY: `Region::words` has checked that the words lie in the mapping and are aligned; `_region` keeps it
        // alive.
        unsafe { self.words.as_ref() }
    }
}

impl<const N: usize> AsRef<[AtomicU64]> for WordArray<N> {
    #[inline(always)]
    fn as_ref(&self) -> &[AtomicU64] {
        &**self
    }
}

/// The words of a ring of the interface.
pub type RingWords = WordArray<{ baton_abi::layout::RING_WORDS }>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_the_region_can_be_touched() {
        let region = Region::private(4096).unwrap();
        let mut out = [0u8; 8];
        assert_eq!(region.write(4090, b"123456"), Ok(()));
        assert_eq!(region.write(4090, b"1234567"), Err(OutOfRegion));
        assert_eq!(region.read(usize::MAX - 3, &mut out), Err(OutOfRegion));
        assert_eq!(region.read(4088, &mut out), Ok(()));
        assert_eq!(&out[2..], b"123456");
        [4090, usize::MAX - 3].into_iter().for_each(|at| region.prefetch(at, u32::MAX));
    }

    #[test]
    fn bytes_go_around_a_circle() {
        let region = Arc::new(Region::private(4096).unwrap());
        assert!(region.circle(0, 24).is_none() && region.circle(4090, 16).is_none());
        let circle = region.circle(64, 16).unwrap();
        assert_eq!(circle.offset_of(u32::MAX), 64 + 15);
        circle.write(u32::MAX - 2, b"abcdef");
        let mut out = [0u8; 6];
        circle.read(u32::MAX - 2, &mut out);
        assert_eq!(&out, b"abcdef");
        region.read(64, &mut out).unwrap();
        assert_eq!(&out[..3], b"def");
        let mut around = [0u8; 18];
        region.read(63, &mut around).unwrap();
        assert_eq!((around[0], around[17]), (0, 0), "nothing outside of the buffer is touched");
    }

    #[test]
    fn the_places_of_bytes_are_where_a_circle_reads_them() {
        let region = Arc::new(Region::private(4096).unwrap());
        let circle = region.circle(64, 16).unwrap();
        for (seq, length, first) in [(32, 16, 16), (35, 16, 13), (47, 2, 1), (u32::MAX, 5, 1), (33, 0, 0)] {
            let places = circle.places(seq, length).unwrap();
            assert_eq!(places.map(<[_]>::len), [first, length as usize - first]);
            let values = || (0..length).map(|at| (seq as u8).wrapping_add(7 * at as u8));
            places.into_iter().flatten().zip(values()).for_each(|(place, value)| place.store(value, Ordering::Relaxed));
            let mut out = vec![0; length as usize];
            circle.read(seq, &mut out);
            assert!(out.into_iter().eq(values()));
        }
        assert!(circle.places(0, 17).is_none() && circle.places(3, u32::MAX).is_none());
    }

    #[test]
    fn a_circle_moves_within_its_region() {
        let region = Arc::new(Region::private(4096).unwrap());
        let parts = MovableParts::<16, 2>::new(region.clone(), 64);
        let (other, circle) = (parts.circle(0), parts.circle(1));
        assert!(!circle.move_to(0, 24) && !circle.move_to(4090, 16) && !circle.move_to(u32::MAX, 16));
        assert_eq!((circle.offset_of(0), circle.length()), (0, 1));
        assert!(circle.move_to(4080, 16));
        assert_eq!((circle.offset_of(0), circle.length()), (4080, 16));
        assert_eq!(circle.write_straight(30, b"abc"), None, "it would wrap around");
        assert_eq!(circle.write_straight(30, b"ab"), Some(4094));
        assert!(circle.write(30, b"abcdef"));
        let mut out = [0u8; 6];
        assert_eq!((circle.read_straight(30, &mut out), circle.read_straight(30, &mut out[..2])), (None, Some(true)));
        assert_eq!(&out[..2], b"ab");
        assert!(circle.read(30, &mut out));
        assert_eq!(&out, b"abcdef");
        region.read(4080, &mut out).unwrap();
        assert_eq!(&out[..4], b"cdef");
        assert_eq!((other.offset_of(0), other.length()), (0, 1), "it has not moved");
    }

    #[test]
    fn words_move_within_their_region() {
        let region = Arc::new(Region::private(4096).unwrap());
        let parts = MovableParts::<16, 0>::new(region.clone(), 64);
        parts.words()[15].store(7, Ordering::Relaxed);
        assert_eq!(region.word32(64 + 60).load(Ordering::Relaxed), 7);
        parts.move_words(4096 - 64);
        parts.words()[15].store(8, Ordering::Relaxed);
        assert_eq!([64 + 60, 4092].map(|at| region.word32(at).load(Ordering::Relaxed)), [7, 8]);
        assert!(std::panic::catch_unwind(|| parts.move_words(4096 - 60)).is_err(), "they would end outside");
    }

    /// A region that is mapped in pieces is the same memory, and pieces that are not used take up no addresses.
    #[test]
    fn pieces_are_mapped_when_they_are_reached() {
        let region = Region::create("baton-test", (1 << 31) + 5 * 4096).unwrap();
        let copy = || region.fd().unwrap().try_clone_to_owned().unwrap();
        let pieces = Arc::new(Region::map_by_pieces(copy(), 8192).unwrap());
        assert_eq!(pieces.len(), region.len());
        assert_eq!(pieces.length, 8192, "there is a place for it");
        let mapped = || pieces.pieces.as_ref().unwrap().ranges();
        assert_eq!(mapped(), [(0, 8192)]);
        let places = [0, 8190, 8196, 300_000, 8192 + (1 << 18) - 2, 1 << 30, region.len() - 4];
        for at in places {
            assert_eq!(pieces.write(at, &(at as u32).to_le_bytes()), Ok(()));
        }
        let mut out = [0; 4];
        for at in places {
            region.read(at, &mut out).unwrap();
            assert_eq!(u32::from_le_bytes(out), at as u32);
        }
        assert_eq!(mapped().len(), 5, "the beginning, and four pieces: {:?}", mapped());
        assert_eq!(mapped().last().unwrap().1, region.len());
        assert_eq!(pieces.write(region.len() - 3, &out), Err(OutOfRegion));
        assert_eq!(pieces.read(usize::MAX, &mut out), Err(OutOfRegion));
        let circle = pieces.circle(8192 + (5 << 20), 1 << 20).unwrap();
        circle.write(u32::MAX - 1, b"abcd");
        region.read(8192 + (5 << 20), &mut out).unwrap();
        assert_eq!(&out[..2], b"cd");
        // Addresses that something else has.
        let taken = pieces.base.as_ptr() as usize + 8192 + (100 << 18);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a page where nothing is mapped.
        let other = unsafe { libc::mmap(taken as *mut _, 4096, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(other as usize, taken);
        let before = mapped().len();
        assert!(pieces.circle(8192 + (100 << 18), 4096).is_none() && mapped().len() == before);
        // A second region does not take the addresses of pieces that the first has not mapped yet, wherever the kernel
        // gives out addresses by then.
        let second = Region::map_by_pieces(copy(), 8192).unwrap();
        assert_eq!(second.length, 8192, "there is a place for it");
        let apart = (pieces.base.as_ptr() as usize).abs_diff(second.base.as_ptr() as usize);
        assert!(apart >= region.len(), "{apart:#x} bytes apart");
        drop((circle, pieces, second));
        let again = Region::map_by_pieces(copy(), 8192).unwrap();
        again.unlock();
        assert_eq!(again.read(1 << 30, &mut out), Ok(()));
        assert_eq!(u32::from_le_bytes(out), 1 << 30);
    }

    #[test]
    fn shared_memory_is_sealed() {
        let region = Region::create("baton-test", 8192).unwrap();
        let copy = Region::map(region.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        region.write(5, b"hello").unwrap();
        let mut out = [0u8; 5];
        copy.read(5, &mut out).unwrap();
        assert_eq!(&out, b"hello");
        assert_eq!(rustix::fs::ftruncate(region.fd().unwrap(), 0), Err(rustix::io::Errno::PERM));
    }
}
