//! Checks of files that other processes have opened.

use crate::socket::check;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// statfs(2)'s type of file systems whose reads and writes a program answers (FUSE).
const FUSE: libc::c_long = 0x6573_5546;

/// Whether a descriptor's file is on a disk or in memory. Writing to anything else (a pipe, a terminal, a FUSE file) can block
/// for as long as another process likes.
///
/// # Errors
/// The failed system call's.
pub fn is_plain(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: both structures are plain data, for which zero is a value.
    let (mut stat, mut system) = unsafe { (std::mem::zeroed::<libc::stat>(), std::mem::zeroed::<libc::statfs>()) };
    // SAFETY: the descriptor is open, and the buffers have the types that the calls write.
    unsafe {
        check(libc::fstat(fd.as_raw_fd(), &mut stat))?;
        check(libc::fstatfs(fd.as_raw_fd(), &mut system))?;
    }
    Ok(stat.st_mode & libc::S_IFMT == libc::S_IFREG && system.f_type as libc::c_long != FUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_pipe_is_no_plain_file() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(!is_plain(reader.as_fd()).unwrap());
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(is_plain(program.as_fd()).unwrap());
    }
}
