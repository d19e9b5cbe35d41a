//! Messages of a service to the service manager that has started it (systemd's sd_notify protocol).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends lines such as `READY=1` to the service manager. Without one (no NOTIFY_SOCKET in the environment) it does
/// nothing. Never waits: a manager that reads nothing gets nothing.
///
/// # Errors
/// The failed system call's.
pub fn notify(lines: &str) -> io::Result<()> {
    match crate::process::variable("NOTIFY_SOCKET") {
        Some(socket) => send(&socket, lines),
        None => Ok(()),
    }
}

fn send(socket: &OsStr, lines: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    let datagrams = UnixDatagram::unbound()?;
    datagrams.set_nonblocking(true)?;
    datagrams.send_to_addr(lines.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_at_a_path_or_a_name_is_told() {
        let path = std::env::temp_dir().join(format!("baton-notify-{}", std::process::id()));
        let name = format!("baton-notify-{}", std::process::id());
        let at_path = UnixDatagram::bind(&path).expect("a socket");
        let at_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).expect("a name")).expect("a socket");
        send(path.as_os_str(), "READY=1").expect("to a path");
        send(OsStr::new(&format!("@{name}")), "STOPPING=1").expect("to a name");
        let mut got = [0; 16];
        let length = at_path.recv(&mut got).expect("a message");
        assert_eq!(&got[..length], b"READY=1");
        let length = at_name.recv(&mut got).expect("a message");
        assert_eq!(&got[..length], b"STOPPING=1");
        drop(at_path);
        std::fs::remove_file(&path).expect("its removal");
        assert!(send(path.as_os_str(), "READY=1").is_err());
    }
}
