//! The 4-tuple of a connection and its device, and the form of them that lookups hash and compare.

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

    /// Whether the address is link-local (RFC 4291 section 2.5.6): other hosts may have it on other links.
    #[inline]
    pub fn is_link_local(&self) -> bool {
        self.address[0] == 0xfe && self.address[1] & 0xc0 == 0x80
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

/// A connection's 4-tuple, seen from this host, and the device to which the connection is bound.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Flow {
    /// This host's end.
    pub local: Endpoint,
    /// The peer's end.
    pub remote: Endpoint,
    /// Index of the only device by which its frames come: its addresses are link-local, or its socket is bound to the
    /// device. Another connection may have the same 4-tuple by another device. 0: they may come by any, as by the one
    /// wire that the NIC has inline. Of a received frame: the device by which it came.
    pub device: u32,
}

impl Flow {
    /// Bytes of [`Flow::to_bytes`].
    pub const BYTES: usize = 40;

    /// The same connection seen from the other end.
    #[inline]
    pub fn reversed(self) -> Self {
        Flow { local: self.remote, remote: self.local, device: self.device }
    }

    /// The same 4-tuple with a device.
    #[inline]
    pub fn by(self, device: u32) -> Self {
        Flow { device, ..self }
    }

    /// Whether one of its addresses is link-local: such a flow has a device, if there are several.
    #[inline]
    pub fn is_link_local(&self) -> bool {
        self.local.is_link_local() || self.remote.is_link_local()
    }

    /// Whether the connection's packets are IPv4.
    #[inline]
    pub fn is_v4(&self) -> bool {
        self.remote.is_v4()
    }

    /// Encodes it as shared memory holds it: local and remote address, then local and remote port, then the device,
    /// little-endian.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.local.address);
        bytes[16..32].copy_from_slice(&self.remote.address);
        bytes[32..34].copy_from_slice(&self.local.port.to_le_bytes());
        bytes[34..36].copy_from_slice(&self.remote.port.to_le_bytes());
        bytes[36..].copy_from_slice(&self.device.to_le_bytes());
        bytes
    }

    /// Decodes one from shared memory. Any bytes are valid.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Flow {
        let address = |at: usize| core::array::from_fn(|n| bytes[at + n]);
        let port = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let device = u32::from_le_bytes(core::array::from_fn(|n| bytes[36 + n]));
        Flow { local: Endpoint::v6(address(0), port(32)), remote: Endpoint::v6(address(16), port(34)), device }
    }
}

/// A flow as the key of a lookup: its 4-tuple in words that are hashed and compared with few instructions, and its
/// device, which is only compared.
#[derive(Clone, Copy, Eq, Debug)]
pub struct FlowKey {
    /// IPv4: both addresses; IPv6: the first half of the local one.
    first: u64,
    /// Both ports; bit 63 is set for IPv6.
    ports: u64,
    /// IPv6: the rest of the addresses; IPv4: zero.
    rest: [u64; 3],
    /// Of a connection: [`Flow::device`]. Of a frame: the device by which it came.
    device: u32,
}

/// Set in [`FlowKey::ports`] of IPv6.
const V6: u64 = 1 << 63;

impl FlowKey {
    /// Makes the key from the fields of a received IPv4 packet: both addresses as one little-endian word, the source
    /// (the remote end) first, the word of source and destination port, and the device.
    #[inline(always)]
    pub fn v4(remote_local: u64, source_destination: u32, device: u32) -> FlowKey {
        FlowKey { first: remote_local, ports: u64::from(source_destination), rest: [0; 3], device }
    }

    /// Makes the key from the fields of a received IPv6 packet: each address as two little-endian words, the word of
    /// source and destination port, and the device.
    #[inline(always)]
    pub fn v6(local: [u64; 2], remote: [u64; 2], source_destination: u32, device: u32) -> FlowKey {
        FlowKey { first: local[0], ports: V6 | u64::from(source_destination), rest: [local[1], remote[0], remote[1]], device }
    }

    /// Whether the flow's packets are IPv4.
    #[inline(always)]
    pub fn is_v4(&self) -> bool {
        self.ports & V6 == 0
    }

    /// Index of the connection's device, 0 for any; or of that by which the frame came.
    #[inline(always)]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Whether a connection with this key gets a frame with the other one.
    #[inline(always)]
    pub fn admits(&self, frame: &FlowKey) -> bool {
        self.same_ends(frame) && (self.device == 0 || self.device == frame.device)
    }

    /// Whether there are frames that two connections with these keys would both get.
    #[inline]
    pub fn overlaps(&self, other: &FlowKey) -> bool {
        self.admits(other) || other.admits(self)
    }

    /// Compares word by word: comparing arrays would be a call to memcmp. For IPv4 two words decide.
    #[inline(always)]
    fn same_ends(&self, other: &FlowKey) -> bool {
        let rest = || (0..3).fold(0, |sum, at| sum | (self.rest[at] ^ other.rest[at])) == 0;
        self.first == other.first && self.ports == other.ports && (self.is_v4() || rest())
    }

    /// The words of the 4-tuple, which are hashed: two for IPv4; for IPv6 four more, of which the last is zero.
    #[inline(always)]
    pub fn words(&self) -> ([u64; 2], Option<[u64; 4]>) {
        let rest = [self.rest[0], self.rest[1], self.rest[2], 0];
        ([self.first, self.ports], (!self.is_v4()).then_some(rest))
    }

    /// The key that has these [`FlowKey::words`], and a device.
    pub fn from_words([first, ports]: [u64; 2], rest: Option<[u64; 4]>, device: u32) -> FlowKey {
        let [a, b, c, _] = rest.unwrap_or_default();
        FlowKey { first, ports, rest: [a, b, c], device }
    }

    /// All bytes of both addresses, in an order that does not matter to a checksum.
    pub(crate) fn address_words(&self) -> [u64; 4] {
        [self.first, self.rest[0], self.rest[1], self.rest[2]]
    }
}

impl PartialEq for FlowKey {
    #[inline(always)]
    fn eq(&self, other: &FlowKey) -> bool {
        self.same_ends(other) && self.device == other.device
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
            return FlowKey::v4(u64::from_le_bytes([a, b, c, d, e, f, g, h]), ports, flow.device);
        }
        let half = |address: &[u8; 16], at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&address[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let words = |address: &[u8; 16]| [half(address, 0), half(address, 8)];
        FlowKey::v6(words(&local.address), words(&remote.address), ports, flow.device)
    }
}

impl From<&FlowKey> for Flow {
    fn from(key: &FlowKey) -> Flow {
        let (local, remote, device) = (key.ports as u16, (key.ports >> 16) as u16, key.device);
        let [first, rest @ ..] = [key.first, key.rest[0], key.rest[1], key.rest[2]].map(u64::to_le_bytes);
        if key.is_v4() {
            let [a, b, c, d, e, f, g, h] = first;
            return Flow { local: Endpoint::v4([e, f, g, h], local), remote: Endpoint::v4([a, b, c, d], remote), device };
        }
        let address = |low: [u8; 8], high: [u8; 8]| core::array::from_fn(|at| if at < 8 { low[at] } else { high[at - 8] });
        let (local, remote) = (Endpoint::v6(address(first, rest[0]), local), Endpoint::v6(address(rest[1], rest[2]), remote));
        Flow { local, remote, device }
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.local, self.remote)?;
        if self.device == 0 { Ok(()) } else { write!(f, " by device {}", self.device) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flows() -> [Flow; 4] {
        let address = |first: u8| core::array::from_fn(|n| first + n as u8);
        let v4 = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([192, 168, 7, 250], 0xfedc), device: 0 };
        let v6 = Flow { local: Endpoint::v6(address(0x20), 0xabcd), remote: Endpoint::v6(address(0x90), 443), device: 0 };
        [v4, v4.reversed().by(7), v6.by(0x7fff_ffff), v6.reversed()]
    }

    #[test]
    fn a_flow_survives_its_bytes_and_its_key() {
        for flow in flows() {
            assert_eq!(Flow::from_bytes(&flow.to_bytes()), flow);
            let (words, rest) = FlowKey::from(&flow).words();
            assert_eq!(Flow::from(&FlowKey::from_words(words, rest, flow.device)), flow);
            assert_eq!(Flow::from(&FlowKey::from(&flow)), flow);
        }
    }

    /// A connection that is bound to no device gets frames from every one, one that is bound gets those of its own;
    /// nobody gets those of another 4-tuple.
    #[test]
    fn a_device_tells_connections_with_the_same_4_tuple_apart() {
        for flow in flows() {
            let key = |device| FlowKey::from(&flow.by(device));
            assert!(key(0).admits(&key(3)) && key(3).admits(&key(3)) && !key(3).admits(&key(4)) && !key(3).admits(&key(0)));
            assert!(key(0).overlaps(&key(3)) && key(3).overlaps(&key(0)) && !key(3).overlaps(&key(4)));
            assert!(key(3) != key(4) && key(3) == key(3) && key(3).words() == key(4).words());
            assert!(!key(0).admits(&FlowKey::from(&flow.reversed())));
        }
    }

    #[test]
    fn link_local_addresses_are_known() {
        let of = |first, second| {
            let mut address = [0; 16];
            address[..2].copy_from_slice(&[first, second]);
            Flow { local: Endpoint::v6([0xfd; 16], 1), remote: Endpoint::v6(address, 2), device: 3 }
        };
        let link_local = |first, second| of(first, second).is_link_local();
        assert!(link_local(0xfe, 0x80) && link_local(0xfe, 0xbf) && !link_local(0xfe, 0xc0) && !link_local(0xfd, 0x80));
        assert!(!flows().iter().any(Flow::is_link_local));
        assert!(of(0xfe, 0x80).reversed().is_link_local());
    }
}
