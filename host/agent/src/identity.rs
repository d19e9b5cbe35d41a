//! By what the agent knows that a socket still has the connection that was registered.

use baton_linux::socket;
use baton_moves::Refusal;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

/// By what a connection's socket is known: its cookie, its address and its peer's.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    pub cookie: u64,
    pub ends: (SocketAddr, SocketAddr),
}

impl Identity {
    /// See [`Connection::check_socket`].
    ///
    /// # Errors
    /// Those.
    pub fn check(&self, fd: BorrowedFd<'_>) -> Result<(), Refusal> {
        if socket::cookie(fd).ok() != Some(self.cookie) {
            return Err(Refusal::Swapped);
        }
        let peer = socket::peer_address(fd).map_err(|_| Refusal::Closed("getpeername"))?;
        let local = socket::local_address(fd).map_err(|_| Refusal::Closed("getsockname"))?;
        self.is(&Identity { cookie: self.cookie, ends: (local, peer) }).then_some(()).ok_or(Refusal::Swapped)
    }

    /// Whether both are the same connection of the same socket.
    pub fn is(&self, other: &Identity) -> bool {
        // Scope and flow label are left out: options of the socket change them.
        let plain = |address: SocketAddr| (address.ip().to_canonical(), address.port());
        let plain = |ends: (SocketAddr, SocketAddr)| (plain(ends.0), plain(ends.1));
        self.cookie == other.cookie && plain(self.ends) == plain(other.ends)
    }
}

/// The address as a socket of IPv6 names it.
pub(crate) fn mapped(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    }
}
