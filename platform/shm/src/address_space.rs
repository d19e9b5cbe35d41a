//! The limit on a process's address space (RLIMIT_AS, `ulimit -v`).

use rustix::fs::{Mode, OFlags};
use std::os::fd::IntoRawFd;

/// Bytes of a limited address space that shared memory leaves to the program, for its malloc(3) and its threads'
/// stacks. If malloc(3) fails a program may end; if a session or a piece of its memory cannot be mapped, the program's
/// connections only stay in the kernel.
pub const RESERVE: u64 = 16 << 20;

/// Bytes of a page, which /proc counts.
const PAGE: u64 = 4096;

/// Bytes that this process may still map. None if there is no limit, or the kernel does not show how much is mapped.
pub fn left() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is live and has room for one rlimit. Where a seccomp filter forbids the call no limit is known.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    if limit.rlim_cur == libc::RLIM_INFINITY {
        return None;
    }
    let mut text = [0u8; 32];
    let file = rustix::fs::open(c"/proc/self/statm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let read = rustix::io::read(&file, &mut text);
    // SAFETY: the descriptor was opened here, and no other code uses it. It is not dropped, since that would call
    // close(3), which in a program is the preloaded library's function.
    unsafe { rustix::io::close(file.into_raw_fd()) };
    Some(limit.rlim_cur.saturating_sub(first_number(&text[..read.ok()?])? * PAGE))
}

/// Whether so many bytes can be mapped such that [`RESERVE`] is left.
pub fn has_room(bytes: usize) -> bool {
    left().is_none_or(|left| left >= bytes as u64 + RESERVE)
}

/// The number at the beginning of a text.
fn first_number(text: &[u8]) -> Option<u64> {
    let end = text.iter().position(|letter| !letter.is_ascii_digit())?;
    core::str::from_utf8(&text[..end]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_a_process_are_read() {
        assert_eq!(first_number(b"5231 1034 900 2 0 400 0\n"), Some(5231));
        assert_eq!(first_number(b"5231"), None, "it may go on");
        assert_eq!(first_number(b" 1"), None);
        assert_eq!(first_number(b""), None);
    }
}
