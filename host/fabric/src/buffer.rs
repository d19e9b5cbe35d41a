//! Memory of the program, as pointers and lengths that it gave.

use baton_messages::Buffer;
use std::ffi::c_void;

/// A buffer in one or several parts. The program leaves it in place until its operation has ended: libfabric demands
/// that of every buffer that it is given (fi_msg(3), fi_mr(3)).
#[derive(Debug)]
pub struct ProgramBuffer {
    parts: Parts,
    length: u64,
    /// The program has registered more than it has mapped: an access may meet an unmapped address.
    guarded: bool,
}

#[derive(Debug)]
enum Parts {
    One(*mut u8),
    Several(Vec<libc::iovec>),
}

// SAFETY: the pointers are only used to copy from and to the program's memory, which all of its threads share.
unsafe impl Send for ProgramBuffer {}

/// Of two addresses and a length: whether to copy from the program's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    FromProgram,
    ToProgram,
}

impl ProgramBuffer {
    /// The buffer of `length` bytes at `start`.
    ///
    /// # Safety
    /// It must be live memory until the last operation with it has ended, and not be written to by anybody else
    /// meanwhile.
    pub unsafe fn new(start: *mut c_void, length: usize) -> ProgramBuffer {
        ProgramBuffer { parts: Parts::One(start.cast()), length: length as u64, guarded: false }
    }

    /// A range of addresses that may be partly unmapped.
    ///
    /// # Safety
    /// As [`ProgramBuffer::new`], but for addresses that have no memory.
    pub unsafe fn guarded(start: *mut c_void, length: usize) -> ProgramBuffer {
        ProgramBuffer { parts: Parts::One(start.cast()), length: length as u64, guarded: true }
    }

    /// The buffer that the parts make up together. None if they are longer than memory can be.
    ///
    /// # Safety
    /// Each part as for [`ProgramBuffer::new`].
    pub unsafe fn from_parts(parts: &[libc::iovec]) -> Option<ProgramBuffer> {
        match parts {
            [] => Some(ProgramBuffer { parts: Parts::One(std::ptr::null_mut()), length: 0, guarded: false }),
            // SAFETY: this function's `# Safety`.
            [one] => Some(unsafe { Self::new(one.iov_base, one.iov_len) }),
            several => {
                let length = several.iter().try_fold(0u64, |sum, part| sum.checked_add(part.iov_len as u64))?;
                Some(ProgramBuffer { parts: Parts::Several(several.to_vec()), length, guarded: false })
            }
        }
    }

    /// Address of the `length` bytes at `at`, if they are in one part and certainly mapped.
    fn place(&self, at: u64, length: u64) -> Option<*mut u8> {
        let Parts::One(start) = self.parts else { return None };
        let inside = at.checked_add(length).is_some_and(|end| end <= self.length) && !start.is_null() && !self.guarded;
        inside.then(|| start.wrapping_add(at as usize))
    }

    /// Where it begins.
    pub fn start(&self) -> *mut c_void {
        match &self.parts {
            Parts::One(start) => start.cast(),
            Parts::Several(parts) => parts.first().map_or(std::ptr::null_mut(), |part| part.iov_base),
        }
    }

    /// A copy of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.length as usize];
        self.read(0, &mut bytes);
        bytes
    }

    /// Copies between the bytes from `at` on and `length` bytes at `other`.
    fn copy(&self, mut at: usize, mut other: *mut u8, mut length: usize, direction: Direction) {
        let Parts::Several(parts) = &self.parts else {
            let Parts::One(start) = self.parts else { return };
            return transfer(start.wrapping_add(at), other, length, direction, self.guarded);
        };
        for part in parts {
            if at >= part.iov_len {
                at -= part.iov_len;
                continue;
            }
            let here = length.min(part.iov_len - at);
            transfer(part.iov_base.cast::<u8>().wrapping_add(at), other, here, direction, false);
            (at, other, length) = (0, other.wrapping_add(here), length - here);
            if length == 0 {
                return;
            }
        }
    }
}

/// Copies `length` bytes between the program's memory and ours.
fn transfer(program: *mut u8, other: *mut u8, length: usize, direction: Direction, guarded: bool) {
    if length == 0 || guarded && transfer_guarded(program, other, length, direction) {
        return;
    }
    // SAFETY: `Buffer`'s methods are called with ranges inside the buffer, which whoever made it has promised to be
    // live; `other` is a slice of the caller, which is not the program's memory, so the two do not overlap.
    unsafe {
        match direction {
            Direction::FromProgram => std::ptr::copy_nonoverlapping(program, other, length),
            Direction::ToProgram => std::ptr::copy_nonoverlapping(other, program, length),
        }
    }
}

/// As [`transfer`], through the kernel, which skips unmapped addresses. False if the kernel does not allow it.
fn transfer_guarded(program: *mut u8, other: *mut u8, length: usize, direction: Direction) -> bool {
    let theirs = libc::iovec { iov_base: program.cast(), iov_len: length };
    let ours = libc::iovec { iov_base: other.cast(), iov_len: length };
    // SAFETY: the kernel checks both ranges, and fails for addresses that have no memory. `ours` is a live slice of the
    // caller.
    let moved = unsafe {
        match direction {
            Direction::FromProgram => libc::process_vm_readv(libc::getpid(), &ours, 1, &theirs, 1, 0),
            Direction::ToProgram => libc::process_vm_writev(libc::getpid(), &ours, 1, &theirs, 1, 0),
        }
    };
    moved >= 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
}

impl Buffer for ProgramBuffer {
    fn length(&self) -> u64 {
        self.length
    }

    fn read(&self, at: u64, out: &mut [u8]) {
        self.copy(at as usize, out.as_mut_ptr(), out.len(), Direction::FromProgram);
    }

    fn write(&mut self, at: u64, data: &[u8]) {
        self.copy(at as usize, data.as_ptr().cast_mut(), data.len(), Direction::ToProgram);
    }

    fn piece(&self, at: u64, length: u64) -> Option<&[u8]> {
        let start = self.place(at, length)?;
        // SAFETY: `place` has checked that the bytes lie in one part, which whoever made the buffer has promised to be
        // live, and not to be written to by anybody else while an operation uses it.
        Some(unsafe { std::slice::from_raw_parts(start, length as usize) })
    }

    fn piece_mut(&mut self, at: u64, length: u64) -> Option<&mut [u8]> {
        let start = self.place(at, length)?;
        // SAFETY: `place` has checked that the bytes lie in one part, which whoever made the buffer has promised to be
        // live; the operation that receives into the buffer is the only one that uses it, and `self` is borrowed
        // mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(start, length as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    #[test]
    fn parts_are_one_buffer() {
        let (mut a, mut b, mut c) = (*b"abc", *b"", *b"defgh");
        let parts = [part(&mut a), part(&mut b), part(&mut c)];
        // SAFETY: the arrays live until the end of the test.
        let mut buffer = unsafe { ProgramBuffer::from_parts(&parts) }.unwrap();
        assert_eq!((buffer.length(), buffer.to_vec().as_slice()), (8, b"abcdefgh".as_slice()));
        let mut out = [0; 4];
        buffer.read(2, &mut out);
        assert_eq!(&out, b"cdef");
        buffer.write(1, b"XYZ");
        assert_eq!(buffer.to_vec(), b"aXYZefgh");
        assert!(buffer.piece(0, 1).is_none());
        let mut whole = *b"abcdefgh";
        // SAFETY: the array lives until the end of the test.
        let mut buffer = unsafe { ProgramBuffer::new(whole.as_mut_ptr().cast(), 8) };
        buffer.piece_mut(2, 3).unwrap().fill(b'-');
        assert_eq!(buffer.piece(1, 5), Some(b"b---f".as_slice()));
        assert!(buffer.piece(4, 5).is_none() && buffer.piece(u64::MAX, 2).is_none());
    }

    #[test]
    fn guarded_memory_may_be_missing() {
        // SAFETY: the first page of the address space has no memory, which `guarded` allows.
        let mut nowhere = unsafe { ProgramBuffer::guarded(8 as *mut c_void, 100) };
        nowhere.write(0, &[1; 10]);
        let mut bytes = [5u8; 16];
        // SAFETY: the array lives until the end of the test.
        let mut here = unsafe { ProgramBuffer::guarded(bytes.as_mut_ptr().cast(), 16) };
        here.write(4, &[7, 8]);
        assert_eq!(here.to_vec()[3..7], [5, 7, 8, 5]);
    }
}
