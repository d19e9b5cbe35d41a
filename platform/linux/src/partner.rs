//! A second UDP socket at the address of a first one, connected to the peer to which most datagrams go at the time.
//!
//! For a connected socket the kernel keeps the route, so datagrams need no look-up when they are sent or received by
//! it. That saves a sixth of the time that a short datagram and its answer take. Datagrams of that peer come by the
//! connected socket, all others by the first.

use crate::socket::set;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// Sends in a row to one address after which the socket is connected to it: to connect takes as long as some sends.
const STREAK: u32 = 64;

/// The second socket. Until this socket is connected it has no address, so no datagram comes by it.
#[derive(Debug)]
pub struct Partner {
    socket: UdpSocket,
    /// Address of both sockets.
    address: SocketAddr,
    bound: bool,
    peer: Option<SocketAddr>,
    /// The destination of the latest sends, if it was not the peer, and how many sends in a row went there.
    candidate: SocketAddr,
    streak: u32,
    /// The kernel refused: it is not tried again.
    refused: bool,
}

impl Partner {
    /// Makes a second socket for one that is bound to `address`.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn new(address: SocketAddr) -> io::Result<Partner> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = UdpSocket::from(rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?);
        Ok(Partner { socket, address, bound: false, peer: None, candidate: address, streak: 0, refused: false })
    }

    /// Whether a datagram to `to` is to be sent by this socket. Counts the send, and may connect the socket to `to`;
    /// `first` is the first socket.
    pub fn sends_to(&mut self, to: SocketAddr, first: &UdpSocket) -> bool {
        if self.peer != Some(to) {
            self.streak = if self.candidate == to { self.streak + 1 } else { 1 };
            self.candidate = to;
            if self.streak < STREAK || self.refused {
                return false;
            }
            self.refused = self.connect(to, first).is_err();
        }
        self.streak = 0;
        self.peer == Some(to)
    }

    fn connect(&mut self, to: SocketAddr, first: &UdpSocket) -> io::Result<()> {
        if !self.bound {
            // Two sockets can only have one address if both allow it, and belong to one user. The first allows it no
            // longer than necessary: another program of the user could take its datagrams.
            let allow = |socket: BorrowedFd<'_>, value| set(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, value);
            allow(first.as_fd(), 1)?;
            let bound = allow(self.socket.as_fd(), 1).and_then(|()| Ok(rustix::net::bind(&self.socket, &self.address)?));
            allow(first.as_fd(), 0)?;
            bound?;
            self.bound = true;
        }
        self.socket.connect(to)?;
        self.peer = Some(to);
        Ok(())
    }

    /// Whether datagrams can come by this socket.
    pub fn is_bound(&self) -> bool {
        self.bound
    }
}

impl AsFd for Partner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
