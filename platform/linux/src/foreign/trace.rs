//! Marks descriptors of other users in a trace (ftrace, `trace_marker`), so that `scripts/foreign-calls` can list the
//! calls on them.

use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

/// The environment variable that holds the path of the `trace_marker` file to write to.
const VARIABLE: &str = "BATON_TRACE_FOREIGN";
/// The magic number of tracefs (`TRACEFS_MAGIC`). Files of any other file system are not written to.
const TRACEFS: u64 = 0x7472_6163;

/// The descriptor came from another user's process.
pub const FOREIGN: &str = "foreign";
/// The descriptor has left its `Foreign`: it counts as this process's own.
pub const OWN: &str = "own";

/// Writes `WHAT PROCESS DESCRIPTOR KIND USER` to the trace, if [`VARIABLE`] is set. `what` is [`FOREIGN`] or [`OWN`];
/// USER is the socket's owner, or `unknown` for anything else.
pub fn note(fd: BorrowedFd<'_>, what: &str) {
    static MARKER: OnceLock<Option<File>> = OnceLock::new();
    if let Some(mut marker) = MARKER.get_or_init(open).as_ref() {
        let kind = kind(fd);
        // fstat(2) of anything but a socket asks its file system, which may not answer.
        let user = if SOCKETS.contains(&kind) { crate::socket::owner(fd).ok() } else { None };
        let user = user.map_or("unknown".into(), |user| user.to_string());
        let line = format!("{what} {} {} {kind} {user}", std::process::id(), fd.as_raw_fd());
        // If the write fails, the descriptor's calls are missing from the list. The trace itself reports events that it
        // has lost.
        let _ = marker.write_all(line.as_bytes());
    }
}

/// The kinds of sockets among the results of [`kind`].
const SOCKETS: [&str; 4] = ["tcp", "udp", "unix", "socket"];

fn open() -> Option<File> {
    let marker = File::options().append(true).open(std::env::var_os(VARIABLE)?).ok()?;
    let is_marker = rustix::fs::fstatfs(&marker).is_ok_and(|status| status.f_type as u64 == TRACEFS);
    is_marker.then_some(marker)
}

/// The kind of a descriptor, found without a call that its file system would have to answer.
fn kind(fd: BorrowedFd<'_>) -> &'static str {
    match (socket_domain(fd), socket_type(fd)) {
        (Ok(AddressFamily::INET | AddressFamily::INET6), Ok(SocketType::STREAM)) => "tcp",
        (Ok(AddressFamily::INET | AddressFamily::INET6), Ok(SocketType::DGRAM)) => "udp",
        (Ok(AddressFamily::UNIX), _) => "unix",
        (Ok(_), _) => "socket",
        (Err(_), _) => match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
            Ok(link) if link.to_string_lossy().starts_with("/memfd:") => "memory",
            Ok(link) if link.is_absolute() => "file",
            _ => "anonymous",
        },
    }
}
