//! Routes, neighbours, links and addresses.

use crate::netlink::{ACK, CREATE_EXCLUSIVE, CREATE_REPLACE, DUMP, Netlink, ROUTE, Request, attributes};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;

/// Where the kernel would send a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the outgoing interface.
    pub interface: u32,
    /// The next hop, if it is not the destination itself.
    pub gateway: Option<IpAddr>,
    /// The source address it prefers.
    pub source: Option<IpAddr>,
}

fn family(address: &IpAddr) -> u8 {
    if address.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 }
}

fn bytes(address: &IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn parse(value: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(value).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()
}

fn word(value: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(value.try_into().ok()?))
}

/// Asks which way packets from `source` to `destination` go.
///
/// # Errors
/// `ENETUNREACH` or `EHOSTUNREACH` without a route, `EINVAL` if the source is not this host's.
pub fn route_to(netlink: &Netlink, destination: IpAddr, source: Option<IpAddr>) -> io::Result<Route> {
    let size = if destination.is_ipv4() { 32 } else { 128 };
    let header = [family(&destination), size, if source.is_some() { size } else { 0 }, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut request = Request::new(RTM_GETROUTE, 0, &header).attribute(1, &bytes(&destination));
    if let Some(source) = source {
        request = request.attribute(2, &bytes(&source));
    }
    let mut route = Route { interface: 0, gateway: None, source: None };
    let mut kind = 0;
    netlink.ask(request, |body| {
        kind = body.get(7).copied().unwrap_or(0);
        for (attribute, value) in attributes(body, 12) {
            match attribute {
                4 => route.interface = word(value).unwrap_or(0),
                5 => route.gateway = parse(value),
                7 => route.source = parse(value),
                _ => {}
            }
        }
    })?;
    // RTN_UNICAST and RTN_LOCAL lead somewhere.
    if kind == 1 || kind == 2 { Ok(route) } else { Err(io::Error::from_raw_os_error(libc::ENETUNREACH)) }
}

/// The link address of a neighbour, if the kernel knows one that it would use.
///
/// # Errors
/// The system's.
pub fn neighbour(netlink: &Netlink, interface: u32, address: IpAddr) -> io::Result<Option<[u8; 6]>> {
    let mut header = [0u8; 12];
    header[0] = family(&address);
    header[4..8].copy_from_slice(&interface.to_ne_bytes());
    let request = Request::new(RTM_GETNEIGH, 0, &header).attribute(1, &bytes(&address));
    let mut found = None;
    let answer = netlink.ask(request, |body| {
        let state = u16::from_ne_bytes([body[8], body[9]]);
        // REACHABLE, STALE, DELAY, PROBE, NOARP, PERMANENT.
        if state & 0xde != 0 {
            found = attributes(body, 12).find(|(kind, _)| *kind == 2).and_then(|(_, value)| value.try_into().ok());
        }
    });
    match answer {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        other => other.map(|()| found),
    }
}

/// Whether an address is one of this host's.
///
/// # Errors
/// The system's.
pub fn is_local(netlink: &Netlink, address: IpAddr) -> io::Result<bool> {
    const RTM_GETADDR: u16 = 22;
    let header = [family(&address), 0, 0, 0, 0, 0, 0, 0];
    let wanted = bytes(&address);
    let mut found = false;
    netlink.ask(Request::new(RTM_GETADDR, DUMP, &header), |body| {
        found |= attributes(body, 8).any(|(kind, value)| (kind == 1 || kind == 2) && value == wanted);
    })?;
    Ok(found)
}

/// A link's index, MAC address and MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Index.
    pub index: u32,
    /// MAC address.
    pub address: [u8; 6],
    /// MTU in bytes of IP packet.
    pub mtu: u32,
    /// Kind of link layer: [`ETHERNET`], [`LOOPBACK`] or another.
    pub kind: u16,
}

/// A link with Ethernet headers.
pub const ETHERNET: u16 = 1;
/// The loopback device, whose Ethernet headers hold zeros.
pub const LOOPBACK: u16 = 772;

/// Looks a link up by name.
///
/// # Errors
/// `ENODEV` if there is none of this name.
pub fn link(netlink: &Netlink, name: &str) -> io::Result<LinkInfo> {
    let mut terminated = name.as_bytes().to_vec();
    terminated.push(0);
    ask_for_link(netlink, Request::new(RTM_GETLINK, 0, &[0; 16]).attribute(3, &terminated))
}

/// Looks a link up by index.
///
/// # Errors
/// `ENODEV` if there is none.
pub fn link_at(netlink: &Netlink, index: u32) -> io::Result<LinkInfo> {
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    ask_for_link(netlink, Request::new(RTM_GETLINK, 0, &header))
}

fn ask_for_link(netlink: &Netlink, request: Request) -> io::Result<LinkInfo> {
    let mut info = LinkInfo { index: 0, address: [0; 6], mtu: 1500, kind: 0 };
    netlink.ask(request, |body| {
        info.kind = u16::from_ne_bytes([body[2], body[3]]);
        info.index = word(&body[4..8]).unwrap_or(0);
        for (kind, value) in attributes(body, 16) {
            match kind {
                1 => info.address = value.try_into().unwrap_or_default(),
                4 => info.mtu = word(value).unwrap_or(1500),
                _ => {}
            }
        }
    })?;
    Ok(info)
}

/// Sets a link's MAC address and MTU and brings it up.
///
/// # Errors
/// The system's.
pub fn set_up(netlink: &Netlink, index: u32, address: Option<[u8; 6]>, mtu: Option<u32>) -> io::Result<()> {
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    if let Some(address) = address {
        netlink.ask(Request::new(RTM_NEWLINK, ACK, &header).attribute(1, &address), |_| {})?;
    }
    header[8..12].copy_from_slice(&1u32.to_ne_bytes());
    header[12..16].copy_from_slice(&1u32.to_ne_bytes());
    let mut request = Request::new(RTM_NEWLINK, ACK, &header);
    if let Some(mtu) = mtu {
        request = request.attribute(4, &mtu.to_ne_bytes());
    }
    netlink.ask(request, |_| {})
}

fn address_request(kind: u16, flags: u16, index: u32, address: IpAddr, prefix: u8) -> Request {
    // IFA_F_NODAD: the test hosts' addresses are usable at once.
    let mut header = [family(&address), prefix, 2, 0, 0, 0, 0, 0];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    Request::new(kind, flags, &header).attribute(2, &bytes(&address)).attribute(1, &bytes(&address))
}

/// Makes a veth pair: `name` here, its peer `peer` in another namespace.
///
/// # Errors
/// The system's.
pub fn add_veth(netlink: &Netlink, name: &str, peer: &str, peer_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let terminated = |name: &str| [name.as_bytes(), &[0]].concat();
    let namespace = peer_namespace.as_raw_fd().to_ne_bytes();
    let request =
        Request::new(RTM_NEWLINK, ACK | CREATE_EXCLUSIVE, &[0; 16]).attribute(3, &terminated(name)).nested(18, |info| {
            info.attribute(1, b"veth").nested(2, |data| {
                // VETH_INFO_PEER begins with a link header of its own.
                data.nested_behind(1, &[0; 16], |link| link.attribute(3, &terminated(peer)).attribute(28, &namespace))
            })
        });
    netlink.ask(request, |_| {})
}

/// Adds an address to a link.
///
/// # Errors
/// The system's.
pub fn add_address(netlink: &Netlink, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    netlink.ask(address_request(RTM_NEWADDR, ACK | CREATE_REPLACE, index, address, prefix), |_| {})
}

/// Takes an address off a link.
///
/// # Errors
/// The system's.
pub fn delete_address(netlink: &Netlink, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    netlink.ask(address_request(RTM_DELADDR, ACK, index, address, prefix), |_| {})
}

/// Says which link address a neighbour has, for good.
///
/// # Errors
/// The system's.
pub fn set_neighbour(netlink: &Netlink, index: u32, address: IpAddr, link_address: [u8; 6]) -> io::Result<()> {
    let mut header = [0u8; 12];
    header[0] = family(&address);
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..10].copy_from_slice(&0x80u16.to_ne_bytes());
    let request =
        Request::new(RTM_NEWNEIGH, ACK | CREATE_REPLACE, &header).attribute(1, &bytes(&address)).attribute(2, &link_address);
    netlink.ask(request, |_| {})
}

/// A route socket in the calling thread's network namespace.
///
/// # Errors
/// The system's.
pub fn open() -> io::Result<Netlink> {
    Netlink::open(ROUTE)
}
