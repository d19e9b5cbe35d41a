//! Checks of files that other processes have opened, and the limit on the size of files.

use rustix::fs::{FileType, fstat, fstatfs, ftruncate};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
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

/// Lifts this process's limit on the size of files (`ulimit -f`) as far as allowed: shared memory counts as a file.
/// What exceeds the limit nevertheless fails, and does not end the process (SIGXFSZ). For processes of Baton's own.
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
pub fn has_room(fd: BorrowedFd<'_>, bytes: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is live and has room for one rlimit. Where the call is not allowed (the NIC's filter) none is
    // known.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    let is_within = |size: i64| (size as u64).saturating_add(bytes as u64) <= limit.rlim_cur;
    fstat(fd).is_ok_and(|stat| !FileType::from_raw_mode(stat.st_mode).is_file() || is_within(stat.st_size))
}

/// Most bytes by which an old text may be longer and is overwritten with spaces; one that is longer still is cut first.
const PADDING: u64 = 64 << 10;

/// Puts this text in place of what a file contains. Whoever reads it meanwhile, or after this process was killed
/// meanwhile, finds the old text or the new one, behind which there may be spaces: no rest of a longer old one, and not
/// only the beginning of a longer new one. Of texts longer than a page a reader may find old and new pages: the kernel
/// writes them one by one.
///
/// # Errors
/// The failed system call's; `InvalidInput` for what is not on a disk or in memory.
pub fn replace(fd: BorrowedFd<'_>, text: &[u8]) -> io::Result<()> {
    if !is_plain(fd)? {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file on a disk or in memory"));
    }
    let length = text.len() as u64;
    let mut before = fstat(fd)?.st_size.max(0) as u64;
    if before > length + PADDING {
        ftruncate(fd, length)?;
        before = length;
    }
    // Both texts are as long while one replaces the other: a write changes the bytes before it changes the length.
    write_all(fd, &vec![b' '; length.saturating_sub(before) as usize], before)?;
    let mut padded = text.to_vec();
    padded.resize(before.max(length) as usize, b' ');
    write_all(fd, &padded, 0)?;
    Ok(ftruncate(fd, length)?)
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

    /// A reader finds the old text or the new one, whatever their lengths are.
    #[test]
    fn a_reader_finds_no_rest_of_a_longer_text() {
        let texts = ["a longer text, of which nothing may stay\n", "short\n"];
        let file = std::fs::File::from(rustix::fs::memfd_create("report", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        replace(file.as_fd(), texts[0].as_bytes()).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (0..20_000).for_each(|round| replace(file.as_fd(), texts[round % 2].as_bytes()).unwrap());
            });
            while !writer.is_finished() {
                let mut found = [0; 100];
                let length = rustix::io::pread(&file, &mut found, 0).unwrap();
                let found = std::str::from_utf8(&found[..length]).unwrap().trim_end();
                assert!(texts.iter().any(|text| text.trim_end() == found), "{found:?}");
            }
        });
        let mut left = [0; 100];
        assert_eq!(rustix::io::pread(&file, &mut left, 0).unwrap(), texts[1].len(), "and no spaces in the end");
    }

    #[test]
    fn a_pipe_is_no_plain_file() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(!is_plain(reader.as_fd()).unwrap());
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(is_plain(program.as_fd()).unwrap());
    }
}
