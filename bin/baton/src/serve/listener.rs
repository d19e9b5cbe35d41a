//! Where requests come in: a Unix socket, or TCP.

use anyhow::{Context, Result, bail};
use baton_linux::{process, socket, trust};
use std::fs::Permissions;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where to listen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("unix: without a path; write unix:PATH".into()),
            Some(path) => Ok(Address::Unix(path.into())),
            None => text.parse().map(Address::Tcp).map_err(|_| {
                "write an address and a port as 127.0.0.1:9464 or [::1]:9464, or the path of a Unix socket as unix:PATH".into()
            }),
        }
    }
}

impl Address {
    /// Whether other machines can reach it.
    pub fn is_exposed(&self) -> bool {
        matches!(self, Address::Tcp(address) if !address.ip().is_loopback())
    }
}

/// Listens.
pub enum Listener {
    /// Its file is removed in the end.
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

/// A client.
pub enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Removes a socket that a killed process has left. A socket at which a process listens, or anything that is no socket,
/// stays.
fn clear(path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            bail!(
                "{} is there and is no socket: nothing is overwritten; name another path, as --listen unix:PATH",
                path.display()
            )
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(|| format!("removing {}, at which nobody listens any more", path.display()))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!("{} is another user's: name another path, as --listen unix:PATH", path.display())
        }
        _ => bail!("another process listens at {}: end it, or name another path, as --listen unix:PATH", path.display()),
    }
}

impl Listener {
    /// Listens at an address. `mode` is that of a Unix socket.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn new(address: &Address, mode: u32) -> Result<Listener> {
        match address {
            Address::Unix(path) => {
                clear(path)?;
                // Ours: it refuses descriptors, and with it all who connect.
                let listener = UnixListener::bind(path).with_context(|| {
                    format!("listening at {}: the directory must be there and be writable; or --listen unix:PATH", path.display())
                })?;
                std::fs::set_permissions(path, Permissions::from_mode(mode))?;
                listener.set_nonblocking(true)?;
                socket::refuse_descriptors(listener.as_fd());
                Ok(Listener::Unix(listener, path.clone()))
            }
            Address::Tcp(address) => {
                let listener = match TcpListener::bind(address) {
                    Err(error) if error.kind() == ErrorKind::AddrInUse => {
                        bail!(
                            "another process listens at {address} (`ss -ltnp sport = :{}` shows which): end it, or name another port",
                            address.port()
                        )
                    }
                    Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                        bail!("no interface here has the address {}: `ip address` lists those that there are", address.ip())
                    }
                    Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                        bail!("only root may listen at port {}: name one from 1024 on, as 9464", address.port())
                    }
                    bound => bound.with_context(|| format!("listening at {address}"))?,
                };
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }

    /// Where it listens, for people, and how this path is asked for there.
    pub fn name(&self, path: &str) -> String {
        match self {
            Listener::Unix(_, socket) => {
                format!("{} (curl --unix-socket {} http://localhost{path})", socket.display(), socket.display())
            }
            Listener::Tcp(listener) => {
                listener.local_addr().map_or_else(|error| error.to_string(), |address| format!("http://{address}{path}"))
            }
        }
    }

    /// The next client.
    ///
    /// # Errors
    /// `WouldBlock` if there is none, or the system's.
    pub fn accept(&self) -> io::Result<Stream> {
        let stream = match self {
            Listener::Unix(listener, _) => Stream::Unix(listener.accept()?.0),
            Listener::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
        };
        match &stream {
            Stream::Unix(stream) => stream.set_nonblocking(true)?,
            Stream::Tcp(stream) => stream.set_nonblocking(true)?,
        }
        Ok(stream)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener, _) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Stream {
    /// The user whose connections the client may see. At a Unix socket its own, by the kernel; on loopback, where the
    /// kernel says nothing, this process's. None if it cannot be told from other users.
    pub fn user(&self) -> Option<u32> {
        match self {
            Stream::Unix(stream) => socket::peer_user(stream.as_fd()).ok().filter(|user| !trust::is_anybody(*user)),
            Stream::Tcp(_) => Some(process::user()),
        }
    }

    /// Nothing more is sent.
    pub fn end_sending(&self) {
        // The client may be gone.
        let _ = match self {
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(buffer),
            Stream::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(buffer),
            Stream::Tcp(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: u32 = 0o660;

    #[test]
    fn addresses_are_read() {
        assert_eq!("unix:/run/a b".parse(), Ok(Address::Unix("/run/a b".into())));
        assert_eq!("[::1]:9464".parse(), Ok(Address::Tcp("[::1]:9464".parse().expect("an address"))));
        for text in ["", "unix:", "9464", ":9464", "localhost:9464", "127.0.0.1", "/run/baton/metrics.sock"] {
            assert!(text.parse::<Address>().expect_err("no address").contains("unix:PATH"), "{text}");
        }
    }

    #[test]
    fn only_loopback_is_not_exposed() {
        for (text, exposed) in [
            ("127.0.0.1:1", false),
            ("127.9.9.9:1", false),
            ("[::1]:1", false),
            ("unix:/a", false),
            ("0.0.0.0:1", true),
            ("[::]:1", true),
            ("192.0.2.1:1", true),
            // Loopback as well, but not by `is_loopback`: it can be written as 127.0.0.1.
            ("[::ffff:127.0.0.1]:1", true),
        ] {
            assert_eq!(text.parse::<Address>().expect("an address").is_exposed(), exposed, "{text}");
        }
    }

    #[test]
    fn errors_say_what_to_do() {
        let error = |text: &str| format!("{:#}", Listener::new(&text.parse().expect("an address"), MODE).err().expect("refused"));
        assert!(error("unix:/nowhere/metrics.sock").contains("directory"));
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        assert!(error(&taken.local_addr().expect("its address").to_string()).contains("ss -ltnp"));
    }

    /// On loopback a client counts as this process's user; at a Unix socket it has its own user.
    #[test]
    fn clients_have_users() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        assert!([Some(process::user()), None].contains(&Stream::Unix(one).user()));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        assert_eq!(Stream::Tcp(client).user(), Some(process::user()));
    }

    #[test]
    fn a_socket_that_was_left_is_replaced() {
        let path = std::env::temp_dir().join(format!("baton-serve-test-{}", std::process::id()));
        let address = Address::Unix(path.clone());
        drop(UnixListener::bind(&path).expect("a socket"));
        let listener = Listener::new(&address, MODE).expect("in place of the one that was left");
        assert_eq!(std::fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, MODE);
        let error = format!("{:#}", Listener::new(&address, MODE).err().expect("taken"));
        assert!(error.contains("another process listens"), "{error}");
        drop(listener);
        assert!(!path.exists(), "it is removed in the end");
        std::fs::write(&path, "text").expect("a file");
        let error = format!("{:#}", Listener::new(&address, MODE).err().expect("a file"));
        assert!(error.contains("is no socket"), "{error}");
        std::fs::remove_file(&path).expect("it is there");
    }
}
