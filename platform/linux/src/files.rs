//! Checks of files that other processes have opened, locks, and the limit on the size of files.

use rustix::fs::{FileType, FlockOperation, flock, fstat, fstatfs, ftruncate};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

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

/// What distinguishes a descriptor's file from any other that is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// Its type (S_IFMT of its mode).
    kind: u32,
}

impl Identity {
    /// Whether it is a socket, or a file on a disk or in memory.
    pub fn is_socket_or_file(self) -> bool {
        matches!(self.kind, libc::S_IFSOCK | libc::S_IFREG)
    }
}

/// The identity of a descriptor's file; None if the descriptor is not open. Takes no memory, and makes the C library's
/// call, as the dynamic linker does: a filter that lets a program start lets this through.
pub fn identity(fd: BorrowedFd<'_>) -> Option<Identity> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `found` is live and has room for what is written.
    if unsafe { libc::fstat(fd.as_raw_fd(), found.as_mut_ptr()) } < 0 {
        return None;
    }
    // SAFETY: the call has succeeded, and has written all of it.
    let found = unsafe { found.assume_init() };
    Some(Identity { device: found.st_dev, inode: found.st_ino, kind: found.st_mode & libc::S_IFMT })
}

/// Locks a file or directory for as long as it is open here (flock(2)). False if it is locked by somebody who has
/// opened it as well.
///
/// # Errors
/// The failed system call's: some file systems have no locks.
pub fn try_lock(fd: BorrowedFd<'_>) -> io::Result<bool> {
    match flock(fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Lifts this process's limit on the size of files (`ulimit -f`) as far as allowed: shared memory counts as a file.
/// A write beyond a limit that remains fails, and does not end the process (SIGXFSZ). For processes of Baton's own.
pub fn lift_size_limit() {
    if setrlimit(Resource::Fsize, Rlimit { current: None, maximum: None }).is_err() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Fsize);
        let _ = setrlimit(Resource::Fsize, Rlimit { current: maximum, maximum });
    }
    // SAFETY: ignoring a signal takes no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Whether a write of so many bytes stays within this process's limit on the size of files. One beyond it would end the
/// process (SIGXFSZ), which may be a program that has written nothing itself.
pub(crate) fn has_room(fd: BorrowedFd<'_>, bytes: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is live and has room for one rlimit. Where the call is not allowed (the NIC's seccomp filter) no
    // limit is known.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    let is_within = |size: i64| (size as u64).saturating_add(bytes as u64) <= limit.rlim_cur;
    fstat(fd).is_ok_and(|stat| !FileType::from_raw_mode(stat.st_mode).is_file() || is_within(stat.st_size))
}

/// If the old text is longer than the new one by up to this many bytes, the rest is overwritten with spaces; a longer
/// one is cut first.
const PADDING: u64 = 64 << 10;

/// Puts this text in place of what a file contains. A reader between two of its system calls, or after this process was
/// killed in the middle, finds the whole old text or the whole new one, maybe with spaces behind it. A reader during
/// one of the calls may find bytes of both: the kernel does not lock reads against writes.
///
/// # Errors
/// The failed system call's; `InvalidInput` for anything but a file on a disk or in memory.
pub fn replace(fd: BorrowedFd<'_>, text: &[u8]) -> io::Result<()> {
    if !is_plain(fd)? {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file on a disk or in memory"));
    }
    for step in steps(fstat(fd)?.st_size.max(0) as u64, text) {
        match step {
            Step::Write(offset, bytes) => write_all(fd, &bytes, offset)?,
            Step::Cut(length) => ftruncate(fd, length)?,
        }
    }
    Ok(())
}

/// A system call that changes a file.
enum Step {
    /// Writes these bytes at an offset.
    Write(u64, Vec<u8>),
    /// Makes the file so long.
    Cut(u64),
}

/// The steps that put a text in place of one of `before` bytes. The new text is padded to the old one's length where
/// needed, since a write changes the bytes before it changes the file's length.
fn steps(before: u64, text: &[u8]) -> Vec<Step> {
    let length = text.len() as u64;
    let (kept, mut steps) = if before > length + PADDING { (length, vec![Step::Cut(length)]) } else { (before, Vec::new()) };
    if kept < length {
        steps.push(Step::Write(kept, vec![b' '; (length - kept) as usize]));
    }
    let mut padded = text.to_vec();
    padded.resize(kept.max(length) as usize, b' ');
    steps.extend([Step::Write(0, padded), Step::Cut(length)]);
    steps
}

/// Writes all of these bytes at an offset.
fn write_all(fd: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match rustix::io::pwrite(fd, &bytes[at..], offset + at as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => at += written,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// Between two system calls a reader finds the old text or the new one, whatever their lengths; of a very long old
    /// text it may find only the beginning.
    #[test]
    fn a_reader_finds_no_rest_of_a_longer_text() {
        let long = "x".repeat(PADDING as usize + 100);
        let texts = ["a longer text, of which nothing may stay\n", "short\n", "", &long];
        for (old, new) in texts.iter().flat_map(|old| texts.map(|new| (*old, new))) {
            let mut file = old.as_bytes().to_vec();
            for step in steps(old.len() as u64, new.as_bytes()) {
                match step {
                    Step::Write(offset, bytes) => {
                        let end = file.len().max(offset as usize + bytes.len());
                        file.resize(end, 0);
                        file[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                    }
                    Step::Cut(length) => file.resize(length as usize, 0),
                }
                let found = std::str::from_utf8(&file).unwrap().trim_end();
                let is_cut = old.len() as u64 > new.len() as u64 + PADDING && old.starts_with(found);
                assert!(found == old.trim_end() || found == new.trim_end() || is_cut, "{found:.80}");
            }
            assert_eq!(file, new.as_bytes(), "and no spaces in the end");
        }
    }

    #[test]
    fn a_text_is_in_place_of_another() {
        let file = std::fs::File::from(rustix::fs::memfd_create("report", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        for text in ["a longer text, of which nothing may stay", "short"] {
            replace(file.as_fd(), text.as_bytes()).unwrap();
            let mut found = [0; 100];
            let length = rustix::io::pread(&file, &mut found, 0).unwrap();
            assert_eq!(&found[..length], text.as_bytes());
        }
    }

    /// A duplicate is the same file, and another pipe is not. What is neither a socket nor a file is known as such.
    #[test]
    fn a_file_is_known_by_its_identity() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (other, _writer) = std::io::pipe().unwrap();
        let copy = writer.try_clone().unwrap();
        let of = |fd: BorrowedFd<'_>| identity(fd).unwrap();
        assert_eq!(of(writer.as_fd()), of(copy.as_fd()));
        assert_ne!(of(reader.as_fd()), of(other.as_fd()));
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(of(socket.as_fd()).is_socket_or_file() && of(program.as_fd()).is_socket_or_file());
        assert!(!of(reader.as_fd()).is_socket_or_file());
    }

    #[test]
    fn a_pipe_is_no_plain_file() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(!is_plain(reader.as_fd()).unwrap());
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(is_plain(program.as_fd()).unwrap());
    }
}
