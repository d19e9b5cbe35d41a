//! A connection's name on the wire: its 4-tuple.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// One end of a connection. An IPv4 address is held IPv4-mapped (RFC 4291 section 2.5.5.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// Address in network order.
    pub address: [u8; 16],
    /// Port in host order.
    pub port: u16,
}

const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

impl Endpoint {
    /// An IPv4 endpoint from the four bytes of its address.
    #[inline]
    pub fn v4(address: [u8; 4], port: u16) -> Self {
        let mut mapped = [0u8; 16];
        mapped[..12].copy_from_slice(&MAPPED);
        mapped[12..].copy_from_slice(&address);
        Endpoint { address: mapped, port }
    }

    /// An IPv6 endpoint from the sixteen bytes of its address.
    #[inline]
    pub fn v6(address: [u8; 16], port: u16) -> Self {
        Endpoint { address, port }
    }

    /// Whether the address is IPv4-mapped, so that its packets are IPv4.
    #[inline]
    pub fn is_v4(&self) -> bool {
        self.address[..12] == MAPPED
    }

    /// The last four bytes of the address: all of it for IPv4.
    #[inline]
    pub fn v4_bytes(&self) -> [u8; 4] {
        [self.address[12], self.address[13], self.address[14], self.address[15]]
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        match address.ip() {
            IpAddr::V4(ip) => Endpoint::v4(ip.octets(), address.port()),
            IpAddr::V6(ip) => Endpoint::v6(ip.octets(), address.port()),
        }
    }
}

impl From<Endpoint> for SocketAddr {
    fn from(endpoint: Endpoint) -> Self {
        let ip = if endpoint.is_v4() {
            IpAddr::V4(Ipv4Addr::from(endpoint.v4_bytes()))
        } else {
            IpAddr::V6(Ipv6Addr::from(endpoint.address))
        };
        SocketAddr::new(ip, endpoint.port)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&SocketAddr::from(*self), f)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&SocketAddr::from(*self), f)
    }
}

/// A connection's 4-tuple, seen from this host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Flow {
    /// This host's end.
    pub local: Endpoint,
    /// The peer's end.
    pub remote: Endpoint,
}

impl Flow {
    /// The same connection seen from the other end.
    #[inline]
    pub fn reversed(self) -> Self {
        Flow { local: self.remote, remote: self.local }
    }

    /// Whether the connection's packets are IPv4.
    #[inline]
    pub fn is_v4(&self) -> bool {
        self.remote.is_v4()
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.local, self.remote)
    }
}
