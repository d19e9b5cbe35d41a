//! TCP connections whose calls never wait: each call moves the bytes that the kernel has, or has room for, and returns.

use crate::socket::set;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, ipproto};
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Milliseconds after which the kernel ends a connection whose bytes are not acknowledged (TCP_USER_TIMEOUT).
const PATIENCE: i32 = 3000;

/// Where connections are accepted.
#[derive(Debug)]
pub struct Listener(TcpListener);

/// The result of an attempt to read or write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moved {
    /// So many bytes, at least one.
    Bytes(usize),
    /// None now.
    Nothing,
    /// The connection has ended.
    Ended,
}

impl Listener {
    /// Listens at `address`, or, if its port is taken, at another port.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn bind(address: SocketAddr) -> io::Result<Listener> {
        let listen = |address: SocketAddr| {
            let socket = open(address.ip())?;
            rustix::net::bind(&socket, &address)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(Listener(TcpListener::from(socket)))
        };
        listen(address).or_else(|_: io::Error| listen(SocketAddr::new(address.ip(), 0)))
    }

    /// Its port.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.0.local_addr()?.port())
    }

    /// Its IP address.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn ip(&self) -> io::Result<IpAddr> {
        Ok(self.0.local_addr()?.ip())
    }

    /// The next connection that waits to be accepted, and its peer's address.
    pub fn accept(&self) -> Option<(Stream, SocketAddr)> {
        // An error concerns one connection only, or is temporary.
        let (socket, from) = self.0.accept().ok()?;
        socket.set_nonblocking(true).ok()?;
        Some((Stream(socket.into()), from))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?)
}

/// A TCP connection.
#[derive(Debug)]
pub struct Stream(OwnedFd);

impl Stream {
    /// Begins to connect from an address of this host. Until that has succeeded nothing can be written.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn connect(from: IpAddr, to: SocketAddr) -> io::Result<Stream> {
        let socket = open(from)?;
        rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
        set(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        set(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, PATIENCE)?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Stream(socket)),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes from two buffers, one after the other. A connection that is still being established takes no bytes.
    pub fn write(&self, first: &[u8], second: &[u8]) -> Moved {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let vectors = [IoSlice::new(first), IoSlice::new(second)];
        loop {
            match rustix::net::sendmsg(&self.0, &vectors, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Moved::Nothing,
                Ok(bytes) => return Moved::Bytes(bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return Moved::Nothing,
                Err(_) => return Moved::Ended,
            }
        }
    }

    /// Ends the connection in both directions.
    pub fn abort(&self) {
        // It has ended already if this fails.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }

    /// Reads bytes that have come into `out`, which must not be empty.
    pub fn read(&self, out: &mut [u8]) -> Moved {
        loop {
            match rustix::net::recv(&self.0, &mut *out, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Moved::Ended,
                Ok((bytes, _)) => return Moved::Bytes(bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Moved::Nothing,
                Err(_) => return Moved::Ended,
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn until<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            if let Some(result) = attempt() {
                return result;
            }
            assert!(Instant::now() < end, "nothing happens");
            std::thread::yield_now();
        }
    }

    #[test]
    fn bytes_arrive_and_an_end_is_seen() {
        let listener = Listener::bind(SocketAddr::new(LOOPBACK, 0)).unwrap();
        let port = listener.port().unwrap();
        assert!(Listener::bind(SocketAddr::new(LOOPBACK, port)).unwrap().port().unwrap() != port, "the port is taken");
        assert!(listener.accept().is_none());
        let near = Stream::connect(LOOPBACK, SocketAddr::new(LOOPBACK, port)).unwrap();
        let (far, from) = until(|| listener.accept());
        assert_eq!(from.ip(), LOOPBACK);
        let mut out = [0; 8];
        assert_eq!(far.read(&mut out), Moved::Nothing);
        assert_eq!(until(|| Some(near.write(b"abc", b"de")).filter(|moved| *moved != Moved::Nothing)), Moved::Bytes(5));
        assert_eq!(until(|| Some(far.read(&mut out)).filter(|moved| *moved != Moved::Nothing)), Moved::Bytes(5));
        assert_eq!(&out[..5], b"abcde");
        // More than the kernel takes.
        let large = vec![7; 64 << 20];
        assert!(matches!(near.write(&[], &large), Moved::Bytes(bytes) if bytes < large.len()));
        until(|| (near.write(&[], &large) == Moved::Nothing).then_some(()));
        drop(far);
        until(|| (near.write(&[], &large) == Moved::Ended).then_some(()));
    }

    #[test]
    fn a_port_without_listener_ends_the_stream() {
        let port = Listener::bind(SocketAddr::new(LOOPBACK, 0)).unwrap().port().unwrap();
        if let Ok(stream) = Stream::connect(LOOPBACK, SocketAddr::new(LOOPBACK, port)) {
            until(|| (stream.write(b"a", &[]) == Moved::Ended).then_some(()));
        }
    }
}
