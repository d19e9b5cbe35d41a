//! The 4-tuple of a connection, and the form of it that lookups hash and compare.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// One end of a connection. IPv4 addresses are stored IPv4-mapped (RFC 4291 section 2.5.5.2).
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

    /// Encodes the 4-tuple as shared memory holds it: local and remote address, then local and remote port, little-endian.
    pub fn to_bytes(&self) -> [u8; 36] {
        let mut bytes = [0; 36];
        bytes[..16].copy_from_slice(&self.local.address);
        bytes[16..32].copy_from_slice(&self.remote.address);
        bytes[32..34].copy_from_slice(&self.local.port.to_le_bytes());
        bytes[34..].copy_from_slice(&self.remote.port.to_le_bytes());
        bytes
    }

    /// Decodes a 4-tuple from shared memory. Any bytes are a valid 4-tuple.
    pub fn from_bytes(bytes: &[u8; 36]) -> Flow {
        let address = |at: usize| core::array::from_fn(|n| bytes[at + n]);
        let port = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Flow { local: Endpoint::v6(address(0), port(32)), remote: Endpoint::v6(address(16), port(34)) }
    }
}

/// A 4-tuple as the key of a lookup: in words that are hashed and compared with few instructions.
#[derive(Clone, Copy, Eq, Debug)]
pub struct FlowKey {
    /// IPv4: both addresses; IPv6: the first half of the local one.
    first: u64,
    /// Both ports; bit 63 is set for IPv6.
    ports: u64,
    /// IPv6: the rest of the addresses; IPv4: zero.
    rest: [u64; 3],
}

/// Set in [`FlowKey::ports`] of IPv6.
const V6: u64 = 1 << 63;

impl FlowKey {
    /// Makes the key from the fields of a received IPv4 packet: both addresses as one little-endian word, the source (the remote
    /// end) first, and the word of source and destination port.
    #[inline(always)]
    pub fn v4(remote_local: u64, source_destination: u32) -> FlowKey {
        FlowKey { first: remote_local, ports: u64::from(source_destination), rest: [0; 3] }
    }

    /// Makes the key from the fields of a received IPv6 packet: each address as two little-endian words, and the word of source
    /// and destination port.
    #[inline(always)]
    pub fn v6(local: [u64; 2], remote: [u64; 2], source_destination: u32) -> FlowKey {
        FlowKey { first: local[0], ports: V6 | u64::from(source_destination), rest: [local[1], remote[0], remote[1]] }
    }

    /// Whether the flow's packets are IPv4.
    #[inline(always)]
    pub fn is_v4(&self) -> bool {
        self.ports & V6 == 0
    }

    /// The words to be hashed: two for IPv4; for IPv6 four more, of which the last is zero.
    #[inline(always)]
    pub fn words(&self) -> ([u64; 2], Option<[u64; 4]>) {
        let rest = [self.rest[0], self.rest[1], self.rest[2], 0];
        ([self.first, self.ports], (!self.is_v4()).then_some(rest))
    }

    /// The key that has these [`FlowKey::words`].
    pub fn from_words([first, ports]: [u64; 2], rest: Option<[u64; 4]>) -> FlowKey {
        let [a, b, c, _] = rest.unwrap_or_default();
        FlowKey { first, ports, rest: [a, b, c] }
    }

    /// All bytes of both addresses, in an order that does not matter to a checksum.
    pub(crate) fn address_words(&self) -> [u64; 4] {
        [self.first, self.rest[0], self.rest[1], self.rest[2]]
    }
}

impl PartialEq for FlowKey {
    /// Compares word by word: comparing arrays would be a call to memcmp. For IPv4 two words decide.
    #[inline(always)]
    fn eq(&self, other: &FlowKey) -> bool {
        let rest = || (0..3).fold(0, |sum, at| sum | (self.rest[at] ^ other.rest[at])) == 0;
        self.first == other.first && self.ports == other.ports && (self.is_v4() || rest())
    }
}

impl From<&Flow> for FlowKey {
    #[inline]
    fn from(flow: &Flow) -> FlowKey {
        let (local, remote) = (&flow.local, &flow.remote);
        let ports = u32::from(remote.port) << 16 | u32::from(local.port);
        if flow.is_v4() {
            let [a, b, c, d] = remote.v4_bytes();
            let [e, f, g, h] = local.v4_bytes();
            return FlowKey::v4(u64::from_le_bytes([a, b, c, d, e, f, g, h]), ports);
        }
        let half = |address: &[u8; 16], at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&address[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let words = |address: &[u8; 16]| [half(address, 0), half(address, 8)];
        FlowKey::v6(words(&local.address), words(&remote.address), ports)
    }
}

impl From<&FlowKey> for Flow {
    fn from(key: &FlowKey) -> Flow {
        let (local, remote) = (key.ports as u16, (key.ports >> 16) as u16);
        let [first, rest @ ..] = [key.first, key.rest[0], key.rest[1], key.rest[2]].map(u64::to_le_bytes);
        if key.is_v4() {
            let [a, b, c, d, e, f, g, h] = first;
            return Flow { local: Endpoint::v4([e, f, g, h], local), remote: Endpoint::v4([a, b, c, d], remote) };
        }
        let address = |low: [u8; 8], high: [u8; 8]| core::array::from_fn(|at| if at < 8 { low[at] } else { high[at - 8] });
        Flow { local: Endpoint::v6(address(first, rest[0]), local), remote: Endpoint::v6(address(rest[1], rest[2]), remote) }
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.local, self.remote)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_survives_its_bytes() {
        let flow =
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v6(core::array::from_fn(|n| n as u8), 0xfedc) };
        assert_eq!(Flow::from_bytes(&flow.to_bytes()), flow);
    }

    #[test]
    fn a_flow_survives_its_key() {
        let address = |first: u8| core::array::from_fn(|n| first + n as u8);
        let v4 = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([192, 168, 7, 250], 0xfedc) };
        let v6 = Flow { local: Endpoint::v6(address(0x20), 0xabcd), remote: Endpoint::v6(address(0x90), 443) };
        for flow in [v4, v4.reversed(), v6, v6.reversed()] {
            let (words, rest) = FlowKey::from(&flow).words();
            assert_eq!(Flow::from(&FlowKey::from_words(words, rest)), flow);
            assert_eq!(Flow::from(&FlowKey::from(&flow)), flow);
        }
    }
}
