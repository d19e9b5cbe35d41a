//! Starts processes of Baton's from a process that holds other users' descriptors.
//!
//! A new process gets a copy of the table of descriptors of the thread that starts it, and closes what is not meant for
//! it when it executes its program. Closing even a copy may block: a FUSE server is asked to flush its file, a socket
//! lingers. So the thread here starts all processes: its own table never holds a descriptor of another user. It gets
//! the descriptors for the new process by a socket. It also starts the process that makes a socket in another control
//! group and executes no program.

use crate::cgroup_socket;
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
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};

/// What the thread is to do.
#[derive(Serialize, Deserialize)]
enum Order {
    /// Start this program. Its descriptors come with the order and with as many further messages as they need.
    Start { argument: String, tied: bool, descriptors: usize },
    /// Make a socket of the control group whose directory comes with the order.
    Socket { v6: bool },
}

/// The answer to [`Order::Socket`]: None with the socket, else the system's error number.
type Made = Option<i32>;

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
    let starter = starter()?;
    let mut chunks = descriptors.chunks(MAX_DESCRIPTORS);
    let order = Order::Start { argument: argument.to_owned(), tied, descriptors: descriptors.len() };
    starter.orders.send(&order, chunks.next().unwrap_or_default())?;
    // With a byte: without one it would look as if this end were closed.
    chunks.try_for_each(|chunk| starter.orders.send(&0u8, chunk))?;
    starter.started.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?
}

/// Makes a TCP socket that belongs to a control group, of which `group` is the directory.
///
/// # Errors
/// The failed system call's; `ETIMEDOUT` if the group's processes do not run.
pub fn socket_of_group(group: BorrowedFd<'_>, v6: bool) -> io::Result<OwnedFd> {
    let starter = starter()?;
    starter.orders.send(&Order::Socket { v6 }, &[group])?;
    let (failed, made) = starter.orders.receive::<Made>()?;
    match (failed, made.into_iter().next()) {
        (None, Some(socket)) => Ok(socket),
        // This process has no room for it.
        (failed, _) => Err(io::Error::from_raw_os_error(failed.unwrap_or(libc::EMFILE))),
    }
}

fn starter() -> io::Result<MutexGuard<'static, Starter>> {
    begin()?;
    let starter = STARTER.get().ok_or(io::ErrorKind::NotFound)?;
    Ok(starter.lock().unwrap_or_else(PoisonError::into_inner))
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
            while serve(&orders, &child).is_some() {}
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
        // SAFETY: the call takes no pointers. It closes copies in this thread's own table, which no Rust value owns.
        check(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } as i32)
    };
    // No descriptor has so high a number, so this closes nothing and copies the whole table. Containers allow this call
    // where they forbid unshare(2).
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
/// since this process was started (an upgrade), by the kernel's link to it. So all processes of one Baton have the same
/// version, and a process that dies can be replaced even while a package manager is at work.
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
    // The name that lists of processes show. The kernel appends " (deleted)" to the path of a removed file.
    let path = path.as_os_str().as_bytes();
    command.arg0(OsStr::from_bytes(path.strip_suffix(b" (deleted)").unwrap_or(path)));
    Ok(command)
}

/// Carries out the next order. None if no more orders will come.
fn serve(orders: &Channel, started: &mpsc::Sender<io::Result<Child>>) -> Option<()> {
    let (order, mut descriptors) = orders.receive::<Order>().ok()?;
    match order {
        Order::Start { argument, tied, descriptors: all } => {
            while descriptors.len() < all {
                descriptors.extend(orders.receive::<u8>().ok()?.1);
            }
            started.send(spawn(&argument, &descriptors, tied)).ok()
        }
        Order::Socket { v6 } => {
            let group = descriptors.first().ok_or(io::Error::from_raw_os_error(libc::EMFILE));
            let made = group.and_then(|group| cgroup_socket::make(group.as_fd(), v6));
            answer(orders, &made)
        }
    }
}

/// Answers [`Order::Socket`]. None if no more orders will come.
fn answer(orders: &Channel, made: &io::Result<OwnedFd>) -> Option<()> {
    let number = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let failed: Made = made.as_ref().err().map(number);
    let socket: Vec<BorrowedFd<'_>> = made.iter().map(AsFd::as_fd).collect();
    // Linux limits a user's descriptors in flight, and descriptors that other programs of this user send count, too. So
    // a send may fail; the thread must not end because of that, since all processes that are tied to it would end.
    let sent = orders.send(&failed, &socket);
    sent.or_else(|error| orders.send(&Made::Some(number(&error)), &[])).ok()
}

fn spawn(argument: &str, descriptors: &[OwnedFd], tied: bool) -> io::Result<Child> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut command = own_command()?;
    command.arg(argument);
    process::inherit(&mut command, &borrowed, tied);
    if tied {
        process::with_sharing_priority(&mut command);
    }
    command.spawn()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::fs::File;
    use std::os::fd::AsRawFd;

    /// Set in a process that runs one test alone.
    const ALONE: &str = "BATON_TEST_RUNS_ALONE";

    /// Whether this process runs the test alone. If not, starts such a process, in which the test has to pass.
    fn is_alone(test: &str) -> bool {
        if std::env::var_os(ALONE).is_some() {
            return true;
        }
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let ran = command.args(["--exact", &format!("starter::tests::{test}")]).env(ALONE, "yes").output().expect("this test");
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains(" 1 passed"), "{said}");
        false
    }

    /// More descriptors than one message can carry. Runs alone, since the starter has all of them for a moment.
    #[test]
    fn a_process_gets_many_descriptors() {
        if !is_alone("a_process_gets_many_descriptors") {
            return;
        }
        let file = File::open("/dev/null").expect("a file");
        // The program that it starts is this test's, which runs none of this name.
        let started = start("no_test_has_this_name", &[file.as_fd(); MAX_DESCRIPTORS + 8], false);
        assert!(started.expect("a process").wait().expect("its end").success());
    }

    /// A user's programs have more descriptors in flight than Linux allows a user without capabilities: the caller that
    /// waits for a socket gets an error, and the thread goes on. Runs alone, since the limit holds for the whole
    /// process.
    #[test]
    fn a_socket_that_cannot_be_sent_ends_nothing() {
        const LIMIT: usize = 100;
        if !is_alone("a_socket_that_cannot_be_sent_ends_nothing") {
            return;
        }
        let file = File::open("/dev/null").expect("a file");
        let (way, _end) = Channel::pair().expect("two sockets");
        for _ in 0..=LIMIT / MAX_DESCRIPTORS {
            way.send(&0u8, &[file.as_fd(); MAX_DESCRIPTORS]).expect("they are on their way");
        }
        let limit = Rlimit { current: Some(LIMIT as u64), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).expect("a lower limit");
        process::drop_capabilities().expect("none left");
        let (orders, theirs) = Channel::pair().expect("two sockets");
        let refused = theirs.send(&0u8, &[file.as_fd()]).expect_err("too many are on their way");
        assert_eq!(refused.raw_os_error(), Some(libc::ETOOMANYREFS));
        assert!(answer(&theirs, &Ok(file.into())).is_some(), "the thread would end");
        let (failed, made) = orders.receive::<Made>().expect("an answer");
        assert_eq!((failed, made.len()), (Some(libc::ETOOMANYREFS), 0));
    }

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
