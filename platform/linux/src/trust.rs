//! Whether the process that listens at a path may be trusted: programs send it their descriptors, and use memory that
//! it shares with them.
//!
//! It must belong to root or to this process's own user: the kernel shows its user (SO_PEERCRED), whatever the path and
//! whichever user could create it. In a user namespace the users outside of it, the host's root too, are all shown as
//! one (65534, the overflow user). There the path decides: it must lead through directories that no user in the
//! namespace can write, or through a mount that only the namespace's root could make.

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The user that this process trusts beside root, set by [`believe`]; initially NOBODY, a number that the kernel gives
/// to no user.
static BELIEVED: AtomicU32 = AtomicU32::new(NOBODY);
const NOBODY: u32 = u32::MAX;

/// Mode bits: the group or others may write; only owners may remove entries.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The attributes of a path's component that show which users could have put it there.
#[derive(Clone, Copy, Debug)]
struct Component {
    owner: u32,
    mode: u32,
    /// Something is mounted there.
    mount: bool,
}

/// From now on this process trusts only listeners of this user and of root, even if its own user changes later: other
/// programs may run as that later user, too.
pub fn believe(user: u32) {
    BELIEVED.store(user, Ordering::Relaxed);
}

/// Whether this process believes a peer of user `peer` wherever it listens.
pub(crate) fn is_known(peer: u32) -> bool {
    believes(BELIEVED.load(Ordering::Relaxed), rustix::process::geteuid().as_raw(), peer)
}

fn believes(believed: u32, own: u32, peer: u32) -> bool {
    peer == 0 || peer == if believed == NOBODY { own } else { believed }
}

/// Checks that a path is a directory that only root and this user can write to or replace.
///
/// # Errors
/// If the path cannot be read, or is no such directory.
pub fn check_own(path: &Path) -> io::Result<()> {
    let refused = |what| Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    let metadata = std::fs::symlink_metadata(path)?;
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_dir() {
        return refused("it is not a directory");
    }
    if metadata.uid() != 0 && metadata.uid() != own {
        return refused("it is another user's");
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        return refused("others can write it");
    }
    // In a user namespace the directories above are of users outside of it.
    let inside = is_inside_of_another(&std::fs::read_to_string("/proc/self/uid_map")?);
    let overflow = if inside { overflow_user()? } else { NOBODY };
    let path = path.canonicalize()?;
    let components = path.ancestors().map(component).collect::<io::Result<Vec<_>>>()?;
    match leads_outside(components.into_iter().rev(), own, overflow) {
        true => Ok(()),
        false => refused("others can write a directory above it"),
    }
}

/// Whether a user id that the kernel has given may stand for any user outside of this process's user namespace.
pub fn is_anybody(user: u32) -> bool {
    let first = std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !is_inside_of_another(&map));
    !first && !overflow_user().is_ok_and(|overflow| user != overflow)
}

fn overflow_user() -> io::Result<u32> {
    std::fs::read_to_string("/proc/sys/kernel/overflowuid")?.trim().parse().map_err(io::Error::other)
}

/// The canonical path of a socket whose listener's user is outside of this user namespace, if the path shows that a
/// trusted user put it there. None if `peer` is not the number by which outside users are shown.
///
/// # Errors
/// If the path cannot be read.
pub(crate) fn named_from_outside(path: &Path, peer: u32) -> io::Result<Option<PathBuf>> {
    let overflow = overflow_user()?;
    if peer != overflow || !is_inside_of_another(&std::fs::read_to_string("/proc/self/uid_map")?) {
        return Ok(None);
    }
    let path = path.canonicalize()?;
    let components = path.ancestors().map(component).collect::<io::Result<Vec<_>>>()?;
    let own = rustix::process::geteuid().as_raw();
    Ok(leads_outside(components.into_iter().rev(), own, overflow).then_some(path))
}

fn component(path: &Path) -> io::Result<Component> {
    let status = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())?;
    let mount = status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    let metadata = std::fs::symlink_metadata(path)?;
    Ok(Component { owner: metadata.uid(), mode: metadata.mode(), mount })
}

/// Whether a user namespace with this map is not the first one, in which every user is itself.
fn is_inside_of_another(map: &str) -> bool {
    map.split_whitespace().collect::<Vec<_>>() != ["0", "0", "4294967295"]
}

/// Whether the components of a path, from the root to a socket, can have been put there only by users outside of the
/// namespace, by its root or by this user (`own`). Root and this user may choose any listener.
fn leads_outside(components: impl Iterator<Item = Component>, own: u32, overflow: u32) -> bool {
    // In a directory that every user can write, only entries of root or of this user are certain not to come from
    // another user.
    let mut shared = false;
    let mut last = None;
    for component in components {
        let known = component.owner == 0 || component.owner == own && own != overflow;
        let outside = component.owner == overflow && (component.mount || !shared);
        if !known && !outside {
            return false;
        }
        // A socket may be writable for other users: they need that to connect.
        if let Some(Component { mode, .. }) = last.replace(component)
            && mode & OTHERS_WRITE != 0
            && mode & STICKY == 0
            && !component.mount
        {
            return false;
        }
        shared = component.mode & OTHERS_WRITE != 0;
    }
    last.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that changes its user to `nobody` shares that user with other programs.
    #[test]
    fn who_is_believed_does_not_change_with_the_user() {
        assert!(believes(NOBODY, 1000, 1000) && believes(NOBODY, 1000, 0) && !believes(NOBODY, 1000, 1001));
        assert!(believes(1000, 1000, 1000) && believes(1000, 65_534, 1000) && believes(1000, 65_534, 0));
        assert!(!believes(0, 65_534, 65_534) && !believes(1000, 65_534, 65_534));
    }

    const OVERFLOW: u32 = 65_534;

    fn leads(components: &[(u32, u32, bool)]) -> bool {
        let components = components.iter().map(|(owner, mode, mount)| Component { owner: *owner, mode: *mode, mount: *mount });
        leads_outside(components, 1000, OVERFLOW)
    }

    #[test]
    fn only_what_nobody_inside_can_write_leads_outside() {
        let (root, run, socket) = ((0, 0o755, true), (0, 0o755, false), (OVERFLOW, 0o666, false));
        assert!(leads(&[root, run, (OVERFLOW, 0o711, true), socket]), "a mount in a directory of root's");
        assert!(leads(&[(OVERFLOW, 0o755, true), (OVERFLOW, 0o755, false), socket]), "the host's own directories");
        assert!(leads(&[root, (0, 0o1777, false), (OVERFLOW, 0o711, true), socket]), "a mount in /tmp");
        assert!(!leads(&[root, (0, 0o1777, false), (OVERFLOW, 0o711, false), socket]), "anybody's directory in /tmp");
        assert!(!leads(&[root, (OVERFLOW, 0o1777, false), (OVERFLOW, 0o711, false), socket]), "the same in the host's");
        assert!(!leads(&[root, (0, 0o777, false), run, socket]), "what everybody can exchange");
        assert!(!leads(&[root, (1001, 0o755, false), (OVERFLOW, 0o755, true), socket]), "another user's directory");
        assert!(leads(&[root, (1000, 0o755, false), (OVERFLOW, 0o755, true), socket]), "our own");
        assert!(!leads(&[root, (0, 0o1777, false), socket]), "anybody's socket");
    }

    #[test]
    fn the_first_user_namespace_has_nobody_outside() {
        assert!(!is_inside_of_another("         0          0 4294967295\n"));
        assert!(is_inside_of_another("0 100000 65536\n") && is_inside_of_another("0 0 1\n") && is_inside_of_another(""));
    }

    #[test]
    fn root_and_oneself_are_believed() {
        assert!(is_known(0) && is_known(rustix::process::geteuid().as_raw()));
        assert!(!is_known(u32::MAX - 1));
    }
}
