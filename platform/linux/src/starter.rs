//! Starts processes of Baton's from a process that holds other users' descriptors.
//!
//! A new process gets a copy of the table of descriptors of the thread that starts it, and closes what is not meant for
//! it when it executes its program. Closing even a copy may wait for whoever is behind it: a FUSE server that is asked
//! to flush its file, a socket that lingers. So the thread here, which has a table of its own that never holds such a
//! descriptor, starts them. It gets what the new process is to have by a socket.

use crate::control::{Channel, MAX_DESCRIPTORS};
use crate::process;
use crate::socket::check;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};

/// What is to be started. Its descriptors come with it and with as many further messages as they need.
#[derive(Serialize, Deserialize)]
struct Order {
    argument: String,
    tied: bool,
    descriptors: usize,
}

struct Starter {
    orders: Channel,
    started: mpsc::Receiver<io::Result<Child>>,
}

static STARTER: OnceLock<Mutex<Starter>> = OnceLock::new();

/// Starts the thread. It has to be done before this process receives the first descriptor of another process's; the new
/// processes get the calling thread's signal mask and priority.
///
/// # Errors
/// If there is no room for a thread or a socket.
pub fn begin() -> io::Result<()> {
    if STARTER.get().is_none() {
        // Another thread may have been faster: its own is as good.
        let _ = STARTER.set(Mutex::new(Starter::new()?));
    }
    Ok(())
}

/// Starts this program once more, with one argument and these descriptors as 3, 4, …. A `tied` process is killed when
/// this one ends, and is a little more urgent than programs ([`process::with_sharing_priority`]).
///
/// # Errors
/// If it cannot be started.
pub fn start(argument: &str, descriptors: &[BorrowedFd<'_>], tied: bool) -> io::Result<Child> {
    begin()?;
    let Some(starter) = STARTER.get() else { return Err(io::ErrorKind::NotFound.into()) };
    let starter = starter.lock().unwrap_or_else(PoisonError::into_inner);
    let mut chunks = descriptors.chunks(MAX_DESCRIPTORS);
    let order = Order { argument: argument.to_owned(), tied, descriptors: descriptors.len() };
    starter.orders.send(&order, chunks.next().unwrap_or_default())?;
    chunks.try_for_each(|chunk| starter.orders.send(&(), chunk))?;
    starter.started.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?
}

impl Starter {
    fn new() -> io::Result<Starter> {
        let (orders, theirs) = Channel::pair()?;
        let (begun, has_begun) = mpsc::channel();
        let (child, started) = mpsc::channel();
        let number = theirs.as_fd().as_raw_fd();
        std::thread::Builder::new().name("starter".into()).spawn(move || {
            let own = take_own_table(number);
            let orders = own.map_err(|error| begun.send(Err(error))).ok()?;
            begun.send(Ok(())).ok()?;
            // It ends with its process.
            while child.send(next(&orders).ok()?).is_ok() {}
            Some(())
        })?;
        has_begun.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))??;
        Ok(Starter { orders, started })
    }
}

/// Gives the calling thread a table of descriptors of its own, with the standard ones and a channel.
fn take_own_table(channel: i32) -> io::Result<Channel> {
    const FIRST: u32 = process::FIRST_DESCRIPTOR as u32;
    let close = |first: u32, last: u32, flags: u32| {
        // SAFETY: the call takes no pointers. What it closes are copies in this thread's own table, which nobody owns.
        check(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } as i32)
    };
    // Nothing has the number from which on this would close something: the table is copied whole. In containers this is
    // allowed where unshare(2) is not.
    close(u32::MAX, u32::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    let channel = channel as u32;
    if channel > FIRST {
        close(FIRST, channel - 1, 0)?;
    }
    close(channel + 1, u32::MAX, 0)?;
    // SAFETY: the descriptor is open in this thread's table, of which nothing else owns one.
    Ok(Channel::from_fd(unsafe { OwnedFd::from_raw_fd(channel as i32) }))
}

/// A command that runs this program's own file once more: by its path, or, if that file has been replaced or removed
/// since this process was started (an upgrade), by the kernel's link to it. So all processes of a Baton are of one
/// version, and one that dies is replaced while a package manager is at work.
///
/// # Errors
/// If /proc is not there.
pub fn own_command() -> io::Result<Command> {
    const RUNNING: &str = "/proc/self/exe";
    let path = std::env::current_exe()?;
    let identity = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino()));
    let running = identity(Path::new(RUNNING))?;
    if identity(&path).is_ok_and(|there| there == running) {
        return Ok(Command::new(path));
    }
    let mut command = Command::new(RUNNING);
    // What lists of processes show. The kernel marks the path of a file that is gone.
    let path = path.as_os_str().as_bytes();
    command.arg0(OsStr::from_bytes(path.strip_suffix(b" (deleted)").unwrap_or(path)));
    Ok(command)
}

/// Starts what the next order says. The error is the channel's.
fn next(orders: &Channel) -> io::Result<io::Result<Child>> {
    let (order, mut descriptors) = orders.receive::<Order>()?;
    while descriptors.len() < order.descriptors {
        descriptors.extend(orders.receive::<()>()?.1);
    }
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    Ok(own_command().and_then(|mut command| {
        command.arg(&order.argument);
        process::inherit(&mut command, &borrowed, order.tied);
        if order.tied {
            process::with_sharing_priority(&mut command);
        }
        command.spawn()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn its_thread_has_none_of_the_process_s_descriptors() {
        begin().expect("a starter");
        let _later = File::open("/dev/null").expect("a file");
        let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
        let starter = tasks
            .filter_map(Result::ok)
            .find(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "starter\n"))
            .expect("its thread");
        let descriptors = || std::fs::read_dir(starter.path().join("fd")).expect("descriptors").filter_map(Result::ok);
        let numbers: Vec<i32> = descriptors().filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect();
        assert!(numbers.iter().filter(|number| **number >= process::FIRST_DESCRIPTOR).count() == 1, "{numbers:?}");
        // The process goes on to have its own.
        assert!(File::open("/dev/null").expect("another file").as_raw_fd() >= process::FIRST_DESCRIPTOR);
    }
}
