//! Control groups of the unified hierarchy (cgroup2), wherever that is mounted, and if it is not: `ip netns exec` hides
//! what is below /sys.

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

/// The root of the hierarchy as this process's control group namespace shows it: in a mount that is made here, or,
/// without the rights to mount, in one that exists already.
///
/// # Errors
/// The failed system call's.
pub fn root() -> io::Result<OwnedFd> {
    own_mount().or_else(|error| mounted_at().map_or(Err(error.into()), |path| Ok(File::open(path)?.into())))
}

fn own_mount() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// The mount point of the hierarchy, if it is mounted.
fn mounted_at() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let found = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words.get(2) == Some(&"cgroup2"))?;
    Some(PathBuf::from(*found.get(1)?))
}

/// Opens the directory of a group, by its path in [`crate::process::cgroup`].
///
/// # Errors
/// The failed system call's; `NotFound` if the group is outside of this process's control group namespace.
pub fn open(root: impl AsFd, path: &str) -> io::Result<OwnedFd> {
    if path.split('/').any(|part| part == "..") {
        return Err(io::ErrorKind::NotFound.into());
    }
    let below = path.trim_start_matches('/');
    let below = if below.is_empty() { "." } else { below };
    Ok(openat(root, below, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_outside_is_not_one_inside() {
        let root = File::open("/").expect("a directory");
        assert!(open(&root, "/").is_ok() && open(&root, "/proc").is_ok());
        // The parent of a root is the root itself.
        for outside in ["/..", "/../proc", "/proc/../proc"] {
            assert_eq!(open(&root, outside).expect_err("it is outside").kind(), io::ErrorKind::NotFound, "{outside}");
        }
        assert!(open(&root, "/no such group").is_err());
    }
}
