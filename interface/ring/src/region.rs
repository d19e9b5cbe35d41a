//! Memory shared between processes: sealed, so that nobody can pull it away from under another's feet.

use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64};
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

    /// Words that keep the region alive, for a ring.
    pub fn shared_words(self: &Arc<Self>, at: usize, count: usize) -> Words {
        let words = NonNull::from(self.words(at, count));
        Words { words, _region: self.clone() }
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

/// Words of a region that keep it mapped.
#[derive(Clone, Debug)]
pub struct Words {
    words: NonNull<[AtomicU64]>,
    _region: Arc<Region>,
}

// SAFETY: atomics in a mapping that `_region` keeps alive.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: inside the mapping, which `_region` keeps alive.
        unsafe { self.words.as_ref() }
    }
}

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
