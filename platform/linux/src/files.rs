//! Checks of files that other processes have opened.

use rustix::fs::{FileType, fstat, fstatfs, ftruncate};
use std::io;
use std::os::fd::BorrowedFd;

/// statfs(2)'s type of file systems whose reads and writes a program answers (FUSE).
const FUSE: u64 = 0x6573_5546;

/// Whether a descriptor's file is on a disk or in memory. Writing to anything else (a pipe, a terminal, a FUSE file)
/// can block for as long as another process likes.
///
/// # Errors
/// The failed system call's.
pub fn is_plain(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let kind = FileType::from_raw_mode(fstat(fd)?.st_mode);
    Ok(kind.is_file() && fstatfs(fd)?.f_type as u64 != FUSE)
}

/// Puts these bytes in place of what a file contains.
///
/// # Errors
/// The failed system call's; `InvalidInput` for what is not on a disk or in memory.
pub fn replace(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    if !is_plain(fd)? {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file on a disk or in memory"));
    }
    let mut at = 0;
    while at < bytes.len() {
        match rustix::io::pwrite(fd, &bytes[at..], at as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => at += written,
        }
    }
    Ok(ftruncate(fd, bytes.len() as u64)?)
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
