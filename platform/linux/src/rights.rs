//! Gives up a process's rights for good.

use crate::process;
use rustix::process::{DumpableBehavior, Gid, Signal, Uid, getppid, set_parent_process_death_signal};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::io;

/// Ranges (first, count) of user ids that are normally unused. The first lies between the ids of containers and those
/// that some programs take for negative numbers. The second, for containers whose namespace lacks the first, is the
/// range that systemd gives to services temporarily.
const FREE_USERS: [(u32, u32); 2] = [(0x7000_0000, 0x1000_0000), (61_184, 4_336)];

/// The user of a process after [`give_up_user`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// A user of its own, which no other process has. (`nobody` has many processes, and each may send signals to the
    /// others.)
    Own(u32),
    /// The user as before: the process may not change it, or its namespace has no other user.
    Same(u32),
}

/// Gives the calling process, which must have one thread, a user id of its own and no groups. If `tied`, its parent's
/// death still kills it afterwards.
///
/// # Errors
/// The failed system call's, for calls that should always work.
pub fn give_up_user(tied: bool) -> io::Result<User> {
    let mut random = [0u8; 4];
    process::random(&mut random)?;
    let random = u32::from_ne_bytes(random);
    let parent = getppid();
    // This may fail: a namespace can forbid it, and then the process has no supplementary groups to give up.
    let _ = set_thread_groups(&[]);
    let changed = FREE_USERS.into_iter().map(|(first, count)| first + random % count).find(|user| {
        let (user, group) = (Uid::from_raw(*user), Gid::from_raw(*user));
        set_thread_res_gid(group, group, group).is_ok() && set_thread_res_uid(user, user, user).is_ok()
    });
    if tied {
        // A change of user has cleared PR_SET_PDEATHSIG.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != parent {
            return Err(io::Error::other("the parent has ended"));
        }
    }
    Ok(changed.map_or_else(|| User::Same(process::user()), User::Own))
}

/// Hides the process's memory from everybody but root: no core dump, no debugger, no /proc/PID/mem.
///
/// # Errors
/// The failed system call's.
pub fn hide_memory() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Whether the process's user namespace has other users.
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

/// The version of Landlock in this kernel; None without Landlock.
pub fn landlock_version() -> Option<u32> {
    const VERSION: libc::c_ulong = 1;
    // SAFETY: with this flag the call takes no attributes, and a null pointer is allowed.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, VERSION) };
    u32::try_from(version).ok()
}
