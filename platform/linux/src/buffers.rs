//! The sizes of a socket's send and receive buffers: SO_SNDBUF and SO_RCVBUF, as the kernel has chosen them or the
//! program has fixed them.

use crate::socket::{SIOCOUTQ, get, queue_bytes, send, set};
use std::io;
use std::os::fd::BorrowedFd;

const SO_BUF_LOCK: i32 = 72;

/// One of a socket's two buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Holds bytes that the peer has not acknowledged yet.
    Send,
    /// Holds bytes that the program has not read yet.
    Receive,
}

impl Side {
    fn option(self) -> i32 {
        if self == Side::Send { libc::SO_SNDBUF } else { libc::SO_RCVBUF }
    }

    fn force(self) -> i32 {
        if self == Side::Send { libc::SO_SNDBUFFORCE } else { libc::SO_RCVBUFFORCE }
    }

    /// The bit of SO_BUF_LOCK (SOCK_SNDBUF_LOCK and SOCK_RCVBUF_LOCK).
    fn lock(self) -> i32 {
        if self == Side::Send { 1 } else { 2 }
    }
}

/// The size of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    side: Side,
    /// The size that getsockopt(2) returns, in bytes. It includes the kernel's own bookkeeping.
    pub size: u32,
    /// The program has set it: the kernel does not change it any more.
    pub fixed: bool,
}

impl Buffer {
    /// Reads the size of a socket's buffer.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn read(fd: BorrowedFd<'_>, side: Side) -> io::Result<Buffer> {
        let size = get(fd, libc::SOL_SOCKET, side.option())?.max(0) as u32;
        // Linux before 5.14 does not report them.
        let locks = get(fd, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0);
        Ok(Buffer { side, size, fixed: locks & side.lock() != 0 })
    }

    /// Gives the socket's buffer another size, in bytes as getsockopt(2) returns it, whatever the host's limits are.
    /// If the kernel was allowed to adapt the size, it still is.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn resize(&self, fd: BorrowedFd<'_>, size: u32) -> io::Result<()> {
        let locks = get(fd, libc::SOL_SOCKET, SO_BUF_LOCK)?;
        // The kernel doubles the value that is set.
        set(fd, libc::SOL_SOCKET, self.side.force(), size.div_ceil(2).min(1 << 30) as i32)?;
        set(fd, libc::SOL_SOCKET, SO_BUF_LOCK, locks)
    }

    /// Makes room for `bytes` more bytes, by enlarging the buffer if it is too small. `factor`: bytes of buffer that
    /// one byte may cost. Returns the buffer as it was, if its size was changed.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn make_room(fd: BorrowedFd<'_>, side: Side, bytes: usize, factor: usize) -> io::Result<Option<Buffer>> {
        let buffer = Buffer::read(fd, side)?;
        // A queue's bookkeeping counts against the buffer, too.
        let wanted = bytes * factor + bytes / 2 + 4096;
        if bytes == 0 || wanted <= buffer.size as usize / 2 {
            return Ok(None);
        }
        buffer.resize(fd, (2 * wanted).min(1 << 31) as u32)?;
        Ok(Some(buffer))
    }

    /// Gives the socket's buffer the size noted here. Bytes that are queued already stay; if they are more than that
    /// size, the buffer accepts nothing until they have become fewer.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn put_back(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.resize(fd, self.size)
    }
}

/// Queues bytes that the program has sent already, even more than the socket's buffer would take, which keeps its size.
///
/// # Errors
/// The failed system call's.
pub fn send_beyond_limit(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let queued = queue_bytes(fd, SIOCOUTQ)? as usize;
    let before = Buffer::make_room(fd, Side::Send, queued + bytes.len(), 1)?;
    while !bytes.is_empty() {
        bytes = &bytes[send(fd, bytes)?..];
    }
    before.map_or(Ok(()), |before| before.put_back(fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    /// A connection whose other end is never read.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let peer = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        let (socket, _) = listener.accept().expect("its other end");
        socket.set_nonblocking(true).expect("non-blocking");
        (socket, peer)
    }

    /// Bytes that the socket takes until it takes no more.
    fn fill(socket: &mut TcpStream) -> usize {
        let mut taken = 0;
        loop {
            match socket.write(&[0; 16_384]) {
                Ok(bytes) => taken += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return taken,
                Err(error) => panic!("the connection broke: {error}"),
            }
        }
    }

    #[test]
    fn what_goes_beyond_the_limit_makes_no_room_for_more() {
        for size in [None, Some(65_536)] {
            let (mut socket, _peer) = pair();
            if let Some(size) = size {
                set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, size).expect("a send buffer");
            }
            fill(&mut socket);
            let before = Buffer::read(socket.as_fd(), Side::Send).expect("its size");
            assert_eq!(before.fixed, size.is_some());
            send_beyond_limit(socket.as_fd(), &[0; 1_000_000]).expect("room");
            let after = Buffer::read(socket.as_fd(), Side::Send).expect("its size");
            assert_eq!((after.size, after.fixed), (before.size, before.fixed));
            // The last buffer of the queue may take some.
            assert!(fill(&mut socket) < 65_536, "a buffer of {size:?} bytes");
        }
    }
}
