//! A process' rights, given up for good.

use crate::process;
use crate::socket::check;
use std::io;

/// Numbers of users that nobody has: between those of containers and those that some programs take for negative, and, where a container has
/// none of these, those that systemd gives to services for a while.
const FREE_USERS: [(u32, u32); 2] = [(0x7000_0000, 0x1000_0000), (61_184, 4_336)];

/// What became of a process that gave its user up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// It is this one now, of which there is no other process: `nobody` has many, and each may send the others signals.
    Own(u32),
    /// It may not change, or its namespace has no other.
    Same(u32),
}

/// Makes the calling process, which has one thread, that of a user of its own, in no group but that user's. Its parent's death still ends it
/// if it did before (`tied`).
///
/// # Errors
/// The system's, for what always works.
pub fn give_up_user(tied: bool) -> io::Result<User> {
    let mut random = [0u8; 4];
    process::random(&mut random)?;
    let random = u32::from_ne_bytes(random);
    // SAFETY: plain system calls.
    let parent = unsafe { libc::getppid() };
    // SAFETY: no pointers but an empty list. A namespace may forbid it, and has no groups to give up then.
    unsafe { libc::setgroups(0, std::ptr::null()) };
    let changed = FREE_USERS.into_iter().map(|(first, count)| first + random % count).find(|user| {
        // SAFETY: plain system calls.
        unsafe { libc::setresgid(*user, *user, *user) == 0 && libc::setresuid(*user, *user, *user) == 0 }
    });
    if tied {
        // A change of user has cleared it.
        // SAFETY: plain system calls.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            if libc::getppid() != parent {
                return Err(io::Error::other("the parent has ended"));
            }
        }
    }
    Ok(changed.map_or_else(|| User::Same(process::user()), User::Own))
}

/// Keeps the process' memory from everybody but root: no core, no debugger, no /proc/PID/mem.
///
/// # Errors
/// The system's.
pub fn hide_memory() -> io::Result<()> {
    // SAFETY: no pointers are involved.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }).map(|_| ())
}

/// Whether there are users besides this one in the process' user namespace.
pub fn has_other_users() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let ranges = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        Some((numbers.next()?.ok()?, numbers.nth(1)?.ok()?))
    });
    let ranges: Vec<(u64, u64)> = ranges.collect();
    FREE_USERS.iter().any(|(first, count)| {
        let (first, end) = (u64::from(*first), u64::from(*first) + u64::from(*count));
        ranges.iter().any(|(start, length)| *start <= first && end <= start + length)
    })
}

/// The version of Landlock that this kernel has, if it has any.
pub fn landlock_version() -> Option<u32> {
    const VERSION: libc::c_ulong = 1;
    // SAFETY: asked for its version the call takes no attributes.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, VERSION) };
    u32::try_from(version).ok()
}
