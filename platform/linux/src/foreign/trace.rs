//! Says in a trace of the kernel's which descriptors are another user's, so that `scripts/foreign-calls` can list the calls on them.

use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

/// The environment's variable with the path of the trace's `trace_marker`.
const VARIABLE: &str = "BATON_TRACE_FOREIGN";
/// The file system of such files (`TRACEFS_MAGIC`): nothing else is written to.
const TRACEFS: u64 = 0x7472_6163;

/// The descriptor is another user's from now on.
pub const FOREIGN: &str = "foreign";
/// It has become this process's own.
pub const OWN: &str = "own";

/// Writes a line for a descriptor: what it is from now on, the process, the descriptor, its kind, and the user who has made it, if that can
/// be told. Does nothing unless a trace is asked for.
pub fn note(fd: BorrowedFd<'_>, what: &str) {
    static MARKER: OnceLock<Option<File>> = OnceLock::new();
    if let Some(mut marker) = MARKER.get_or_init(open).as_ref() {
        let kind = kind(fd);
        // Of anything but a socket the file would be asked.
        let user = if SOCKETS.contains(&kind) { crate::socket::owner(fd).ok() } else { None };
        let user = user.map_or("unknown".into(), |user| user.to_string());
        let line = format!("{what} {} {} {kind} {user}", std::process::id(), fd.as_raw_fd());
        // A trace that has no room has lost lines, which its reader is told.
        let _ = marker.write_all(line.as_bytes());
    }
}

/// Kinds that are sockets.
const SOCKETS: [&str; 4] = ["tcp", "udp", "unix", "socket"];

fn open() -> Option<File> {
    let marker = File::options().append(true).open(std::env::var_os(VARIABLE)?).ok()?;
    let is_marker = rustix::fs::fstatfs(&marker).is_ok_and(|status| status.f_type as u64 == TRACEFS);
    is_marker.then_some(marker)
}

/// What it is, without asking its file.
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
