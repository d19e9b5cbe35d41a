//! Network namespaces without names: they live as long as a process holds their descriptor or runs in them, so nothing
//! is left behind however a process ends.

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// A network namespace.
#[derive(Debug)]
pub struct Namespace {
    file: File,
}

fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: the callers' flags make new namespaces for the calling thread; none of them is CLONE_FILES, after which
    // descriptors that other threads own would not be this thread's any more.
    Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
}

fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

impl Namespace {
    /// The calling thread's namespace.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn current() -> io::Result<Namespace> {
        Ok(Namespace { file: File::open("/proc/thread-self/ns/net")? })
    }

    /// A process's namespace.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn of_process(process: u32) -> io::Result<Namespace> {
        Ok(Namespace { file: File::open(format!("/proc/{process}/ns/net"))? })
    }

    /// Makes a namespace with its loopback up. The calling thread stays in its own namespace.
    ///
    /// # Errors
    /// If this process has no right to make one; the error's message says what to do.
    pub fn new() -> io::Result<Namespace> {
        std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                unshare(UnshareFlags::NEWNET).map_err(|error| match error.raw_os_error() {
                    Some(libc::EPERM) => io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        "no right to make a network namespace: run as root, or inside `unshare -Urn`",
                    ),
                    _ => error,
                })?;
                let netlink = crate::rtnetlink::open()?;
                let lo = crate::rtnetlink::link(&netlink, "lo")?;
                crate::rtnetlink::set_up(&netlink, lo.index, None, None)?;
                Namespace::current()
            });
            made.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
        })
    }

    /// Moves the calling thread into this namespace.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn enter(&self) -> io::Result<()> {
        enter(self.file.as_fd())
    }

    /// Runs `work` in this namespace, on a thread of its own, and returns its result.
    ///
    /// # Panics
    /// If `work` does.
    ///
    /// # Errors
    /// If the namespace cannot be entered, or the errors of `work`.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter()?;
                work()
            });
            match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Starts a command in this namespace, as a child of the calling thread, with which it ends: it gets SIGTERM then.
    ///
    /// # Errors
    /// If the namespace cannot be entered, or the program does not start.
    pub fn spawn(&self, command: &mut Command) -> io::Result<std::process::Child> {
        let file = self.file.as_raw_fd();
        let begin = move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // SAFETY: the descriptor is open until the command has been started.
            enter(unsafe { BorrowedFd::borrow_raw(file) })
        };
        // SAFETY: between fork and exec the closure only makes system calls: no allocation, no locks.
        unsafe { command.pre_exec(begin) };
        command.spawn()
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes an ordinary user's process root of a new user namespace, so that it can make network namespaces. Does nothing
/// for root. Must be called before the process has threads.
///
/// # Errors
/// If user namespaces are switched off; the error's message says what to do.
pub fn become_root_if_needed() -> io::Result<()> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if user.is_root() {
        return Ok(());
    }
    unshare(UnshareFlags::NEWUSER).map_err(|error| {
        io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("neither root nor allowed to make a user namespace ({error}): run as root, or allow it with `sysctl kernel.unprivileged_userns_clone=1`"),
        )
    })?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// Mounts a /sys that shows the calling thread's network namespace, in a mount namespace of its own, for settings that
/// only /sys has.
///
/// # Errors
/// The failed system call's.
pub fn mount_own_sysfs() -> io::Result<()> {
    unshare(UnshareFlags::NEWNS)?;
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    Ok(rustix::mount::mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None)?)
}
