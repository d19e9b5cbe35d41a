//! Memory shared between processes: sealed, so that nobody can pull it away from under another's feet.

use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// An access outside the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfRegion;

/// A mapping of shared memory. Other processes may read and write it at any time.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    length: usize,
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping lives as long as the region, and all access goes through atomics or through copies that assume nothing
// about the bytes.
unsafe impl Send for Region {}
// SAFETY: as above; shared access from several threads is the same as from several processes.
unsafe impl Sync for Region {}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Nodes of memory, a bit each, as mbind(2) and set_mempolicy(2) want 1024 of them.
pub fn node_mask(node: Option<usize>) -> [u64; 16] {
    core::array::from_fn(|word| node.filter(|node| node / 64 == word).map_or(0, |node| 1 << (node % 64)))
}

impl Region {
    /// Makes a region of zero bytes: its memory cannot be shrunk, grown or unsealed by anyone who gets the descriptor.
    ///
    /// # Errors
    /// The system's, if it gives no memory or descriptor.
    pub fn create(name: &str, length: usize) -> io::Result<Region> {
        let name = std::ffi::CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the name is a C string that outlives the call.
        let raw = check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
        // SAFETY: memfd_create has just given us this descriptor.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: a call on our own descriptor.
        check(unsafe { libc::ftruncate(fd.as_raw_fd(), length as libc::off_t) })?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: as above.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Region::map(fd)
    }

    /// Maps a region that another process made. Refuses memory that is not sealed: its maker could take it away.
    ///
    /// # Errors
    /// `InvalidData` for unsealed memory, else the system's.
    pub fn map(fd: OwnedFd) -> io::Result<Region> {
        // SAFETY: a call on our own descriptor.
        let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "shared memory that is not sealed against shrinking"));
        }
        // SAFETY: stat is plain data, for which zero is a value.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: the descriptor is ours, the buffer has the right type.
        check(unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) })?;
        Region::map_pages(stat.st_size as usize, libc::MAP_SHARED, Some(fd))
    }

    /// Maps memory of the kernel's that has a fixed size, such as an array map's, of which a descriptor tells no length.
    ///
    /// # Errors
    /// The system's, if it has not so much.
    pub fn map_fixed(fd: OwnedFd, length: usize) -> io::Result<Region> {
        Region::map_pages(length.next_multiple_of(4096), libc::MAP_SHARED, Some(fd))
    }

    /// Has pages that nobody has touched yet come from a NUMA node, whoever touches them first, and moves those that this process alone uses
    /// (mbind(2), MPOL_PREFERRED).
    ///
    /// # Errors
    /// The system's, if it knows of no nodes, or not of this one.
    pub fn prefer_node(&self, node: usize) -> io::Result<()> {
        let nodes = node_mask(Some(node));
        const MOVE: libc::c_uint = 2;
        // SAFETY: mbind reads 1024 bits of the mask, and changes where the pages of our own mapping lie, not what is in them.
        let bound = unsafe {
            libc::syscall(libc::SYS_mbind, self.base.as_ptr(), self.length, libc::MPOL_PREFERRED, nodes.as_ptr(), 1024, MOVE)
        };
        check(bound as libc::c_int).map(|_| ())
    }

    /// A region that no other process sees, for tests and benches.
    ///
    /// # Errors
    /// The system's, if it gives no memory.
    pub fn private(length: usize) -> io::Result<Region> {
        Region::map_pages(length, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
    }

    fn map_pages(length: usize, flags: libc::c_int, fd: Option<OwnedFd>) -> io::Result<Region> {
        let raw = fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(core::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_NORESERVE, raw, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Region { base, length, fd })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The descriptor, if the memory can be shared.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// A pointer to `length` bytes at `at`, for system calls; None outside the region.
    #[inline]
    pub fn span(&self, at: usize, length: usize) -> Option<NonNull<u8>> {
        if at > self.length || length > self.length - at {
            return None;
        }
        // SAFETY: `at` is within the mapping.
        Some(unsafe { self.base.add(at) })
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`OutOfRegion`]; nothing is copied then.
    #[inline]
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), OutOfRegion> {
        let from = self.span(at, out.len()).ok_or(OutOfRegion)?;
        // SAFETY: the source is inside the mapping, the target is ours alone. The other side may write meanwhile: then some
        // bytes are old and some new, and every byte is a valid u8.
        unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`OutOfRegion`]; nothing is copied then.
    #[inline]
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        let to = self.span(at, bytes.len()).ok_or(OutOfRegion)?;
        // SAFETY: the target is inside the mapping and, since references to it are only ever to atomics, aliases nothing that
        // the compiler reasons about; the source is a live slice elsewhere.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// `length` bytes at `at`, which others may write at any time. None if they lie outside.
    pub fn bytes(&self, at: usize, length: usize) -> Option<&[AtomicU8]> {
        let base = self.span(at, length)?;
        // SAFETY: inside the mapping, and atomics may be shared with anyone.
        Some(unsafe { core::slice::from_raw_parts(base.as_ptr().cast(), length) })
    }

    /// `count` atomic words of 8 bytes at `at`.
    ///
    /// # Panics
    /// If they are not aligned or not inside: offsets come from the layout, not from the other side.
    #[inline]
    pub fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        assert!(at.is_multiple_of(8));
        let base = self.span(at, count * 8).expect("the layout lies inside the region");
        // SAFETY: inside the mapping, aligned to 8 (the mapping to a page), and atomics may be shared with anyone.
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
        // SAFETY: as in `words`, aligned to 4.
        unsafe { &*base.as_ptr().cast() }
    }

    /// A fixed number of words that keep the region alive: indexing them by a constant costs no check.
    pub fn shared_array<const N: usize>(self: &Arc<Self>, at: usize) -> WordArray<N> {
        let words: &[AtomicU64; N] = self.words(at, N).first_chunk().expect("as many words as were asked for");
        WordArray { words: NonNull::from(words), _region: self.clone() }
    }

    /// The words of a ring.
    pub fn ring(self: &Arc<Self>, at: usize) -> RingWords {
        self.shared_array(at)
    }

    /// `length` bytes at `at` as a circle. None if they lie outside, or their number is no power of two.
    pub fn circle(self: &Arc<Self>, at: u32, length: u32) -> Option<Circle> {
        let base = self.span(at as usize, length as usize)?;
        length.is_power_of_two().then(|| Circle { base, mask: length - 1, at, _region: self.clone() })
    }

    /// Gives the pages of a range back to the system; they read as zero afterwards.
    pub fn discard(&self, at: usize, length: usize) {
        if let Some(fd) = &self.fd {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: a call on our own descriptor; failing leaves the pages in place, which is harmless.
            unsafe { libc::fallocate(fd.as_raw_fd(), mode, at as libc::off_t, length as libc::off_t) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and nothing borrowed from the region outlives it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// A part of a region, a power of two long, in which every byte has its place: its sequence number modulo the length.
#[derive(Clone, Debug)]
pub struct Circle {
    base: NonNull<u8>,
    mask: u32,
    /// Where it lies in the region.
    at: u32,
    _region: Arc<Region>,
}

// SAFETY: bytes in a mapping that `_region` keeps alive, only ever copied from and to.
unsafe impl Send for Circle {}

impl Circle {
    /// Bytes that it has.
    pub fn length(&self) -> u32 {
        self.mask.wrapping_add(1)
    }

    /// Where the byte of a sequence number lies in the region.
    #[inline]
    pub fn offset_of(&self, seq: u32) -> u32 {
        self.at + (seq & self.mask)
    }

    /// Puts bytes at their places; of more than fit, the last ones stay.
    #[inline(always)]
    pub fn write(&self, seq: u32, bytes: &[u8]) {
        // SAFETY: `Region::circle` has seen that the circle lies in the region, which it keeps mapped.
        unsafe { write_around(self.base, self.mask, seq, bytes) };
    }

    /// Reads bytes back.
    pub fn read(&self, seq: u32, out: &mut [u8]) {
        // SAFETY: as in `write`.
        unsafe { read_around(self.base, self.mask, seq, out) };
    }
}

/// Bytes that a copy from or to `seq` on moves before it goes on at the front.
#[inline(always)]
fn before_end(mask: u32, seq: u32, length: usize) -> usize {
    length.min((mask - (seq & mask)) as usize + 1)
}

/// # Safety
/// `mask + 1` bytes from `base` on must be mapped.
#[inline(always)]
unsafe fn write_around(base: NonNull<u8>, mask: u32, mut seq: u32, mut bytes: &[u8]) {
    loop {
        let (piece, rest) = bytes.split_at(before_end(mask, seq, bytes.len()));
        // SAFETY: the place is inside the circle, and so are as many bytes as are left before its end; see `Region::write`.
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

/// # Safety
/// `mask + 1` bytes from `base` on must be mapped.
#[inline(always)]
unsafe fn read_around(base: NonNull<u8>, mask: u32, mut seq: u32, mut out: &mut [u8]) {
    loop {
        let (piece, rest) = out.split_at_mut(before_end(mask, seq, out.len()));
        // SAFETY: as in `write_around`; see `Region::read`.
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

/// A circle that can be exchanged for another one of the same region, at any time.
#[derive(Debug)]
pub struct MovableCircle {
    base: NonNull<u8>,
    /// Where it lies in the region, and above that its mask: in one word, so that they always belong together.
    place: AtomicU64,
    region: Arc<Region>,
}

// SAFETY: bytes in a mapping that `region` keeps alive, only ever copied from and to.
unsafe impl Send for MovableCircle {}
// SAFETY: as above.
unsafe impl Sync for MovableCircle {}

impl MovableCircle {
    /// One of a single byte, until it is moved.
    pub fn new(region: Arc<Region>) -> Self {
        MovableCircle { base: region.base, place: AtomicU64::new(0), region }
    }

    /// Stands for `length` bytes at `at` from now on. False, and it stays what it was, if they lie outside of the region or their number
    /// is no power of two.
    #[must_use]
    pub fn move_to(&self, at: u32, length: u32) -> bool {
        let fits = length.is_power_of_two() && self.region.span(at as usize, length as usize).is_some();
        if fits {
            self.place.store(u64::from(length - 1) << 32 | u64::from(at), Ordering::Relaxed);
        }
        fits
    }

    /// Where it lies in the region, and its mask.
    #[inline(always)]
    fn place(&self) -> (u32, u32) {
        let place = self.place.load(Ordering::Relaxed);
        (place as u32, (place >> 32) as u32)
    }

    /// Bytes that it has.
    #[inline(always)]
    pub fn length(&self) -> u32 {
        self.place().1.wrapping_add(1)
    }

    /// Where the byte of a sequence number lies in the region.
    pub fn offset_of(&self, seq: u32) -> u32 {
        let (at, mask) = self.place();
        at + (seq & mask)
    }

    /// Puts bytes that do not go around at their places, and says where that is in the region. None, and nothing is done, if they do.
    #[inline(always)]
    pub fn write_straight(&self, seq: u32, bytes: &[u8]) -> Option<u32> {
        let (at, mask) = self.place();
        let offset = seq & mask;
        if bytes.len() > (mask - offset) as usize + 1 {
            return None;
        }
        // SAFETY: `move_to` has seen that the circle lies in the region, and so many bytes are left before its end; see
        // `Region::write`.
        unsafe {
            let to = self.base.add(at as usize + offset as usize);
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len());
        }
        Some(at + offset)
    }

    /// Puts bytes at their places; of more than fit, the last ones stay.
    pub fn write(&self, seq: u32, bytes: &[u8]) {
        let (at, mask) = self.place();
        // SAFETY: `move_to` has seen that the circle lies in the region, which is kept mapped.
        unsafe { write_around(self.base.add(at as usize), mask, seq, bytes) };
    }

    /// Reads bytes back that do not go around. False, and nothing is done, if they do.
    #[inline(always)]
    #[must_use]
    pub fn read_straight(&self, seq: u32, out: &mut [u8]) -> bool {
        let (at, mask) = self.place();
        let offset = seq & mask;
        let straight = out.len() <= (mask - offset) as usize + 1;
        if straight {
            // SAFETY: as in `write_straight`; see `Region::read`.
            unsafe {
                let from = self.base.add(at as usize + offset as usize);
                core::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len());
            }
        }
        straight
    }

    /// Reads bytes back.
    pub fn read(&self, seq: u32, out: &mut [u8]) {
        let (at, mask) = self.place();
        // SAFETY: as in `write`.
        unsafe { read_around(self.base.add(at as usize), mask, seq, out) };
    }
}

/// A fixed number of words of a region that keep it mapped.
#[derive(Clone, Debug)]
pub struct WordArray<const N: usize> {
    words: NonNull<[AtomicU64; N]>,
    _region: Arc<Region>,
}

// SAFETY: atomics in a mapping that `_region` keeps alive.
unsafe impl<const N: usize> Send for WordArray<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for WordArray<N> {}

impl<const N: usize> Deref for WordArray<N> {
    type Target = [AtomicU64; N];

    #[inline(always)]
    fn deref(&self) -> &[AtomicU64; N] {
        // SAFETY: inside the mapping, which `_region` keeps alive.
        unsafe { self.words.as_ref() }
    }
}

impl<const N: usize> AsRef<[AtomicU64]> for WordArray<N> {
    #[inline(always)]
    fn as_ref(&self) -> &[AtomicU64] {
        &**self
    }
}

/// A fixed number of words of 4 bytes of a region, which they keep mapped. Where they lie can be changed.
#[derive(Debug)]
pub struct MovableWords<const N: usize> {
    words: AtomicPtr<[AtomicU32; N]>,
    region: Arc<Region>,
}

impl<const N: usize> MovableWords<N> {
    /// The words at `at`.
    ///
    /// # Panics
    /// As [`Region::words`].
    pub fn new(region: Arc<Region>, at: usize) -> Self {
        let words = MovableWords { words: AtomicPtr::new(core::ptr::null_mut()), region };
        words.move_to(at);
        words
    }

    /// Stands for the words at another place from now on.
    ///
    /// # Panics
    /// As [`Region::words`].
    pub fn move_to(&self, at: usize) {
        assert!(at.is_multiple_of(4));
        let place = self.region.span(at, N * 4).expect("the layout lies inside the region");
        self.words.store(place.as_ptr().cast(), Ordering::Release);
    }
}

impl<const N: usize> Deref for MovableWords<N> {
    type Target = [AtomicU32; N];

    #[inline(always)]
    fn deref(&self) -> &[AtomicU32; N] {
        // SAFETY: `move_to` put the address of that many words inside the mapping there, which `region` keeps alive.
        unsafe { &*self.words.load(Ordering::Acquire) }
    }
}

/// The words of one of the interface's rings.
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
        assert_eq!((around[0], around[17]), (0, 0), "nothing beside the circle is touched");
    }

    #[test]
    fn a_circle_moves_within_its_region() {
        let region = Arc::new(Region::private(4096).unwrap());
        let circle = MovableCircle::new(region.clone());
        assert!(!circle.move_to(0, 24) && !circle.move_to(4090, 16) && !circle.move_to(u32::MAX, 16));
        assert_eq!((circle.offset_of(0), circle.length()), (0, 1));
        assert!(circle.move_to(4080, 16));
        assert_eq!((circle.offset_of(0), circle.length()), (4080, 16));
        assert_eq!(circle.write_straight(30, b"abc"), None, "it would go around");
        assert_eq!(circle.write_straight(30, b"ab"), Some(4094));
        circle.write(30, b"abcdef");
        let mut out = [0u8; 6];
        assert!(!circle.read_straight(30, &mut out) && circle.read_straight(30, &mut out[..2]));
        assert_eq!(&out[..2], b"ab");
        circle.read(30, &mut out);
        assert_eq!(&out, b"abcdef");
        region.read(4080, &mut out).unwrap();
        assert_eq!(&out[..4], b"cdef");
    }

    #[test]
    fn shared_memory_is_sealed() {
        let region = Region::create("baton-test", 8192).unwrap();
        let copy = Region::map(region.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        region.write(5, b"hello").unwrap();
        let mut out = [0u8; 5];
        copy.read(5, &mut out).unwrap();
        assert_eq!(&out, b"hello");
        let raw = region.fd().unwrap().as_raw_fd();
        // SAFETY: a call on our own descriptor, which must fail.
        assert_eq!(unsafe { libc::ftruncate(raw, 0) }, -1);
    }
}
