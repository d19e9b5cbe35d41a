//! Route look-ups with all that the kernel uses for a socket's packets: mark, bound device, user, class, flow label,
//! protocol and ports. (Rules can match each of them, and ports select between equal paths.)

use crate::netlink::{Netlink, Request, attributes};
use crate::rtnetlink::{bytes, family, parse, word};
use crate::socket;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

const RTM_GETROUTE: u16 = 26;
/// The answer is the table's entry with all its paths, not the path that was chosen.
const RTM_F_FIB_MATCH: u32 = 0x2000;
/// Bytes before an answer's attributes.
const HEADER: usize = 12;

const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const RTA_METRICS: u16 = 8;
const RTA_MULTIPATH: u16 = 9;
const RTA_MARK: u16 = 16;
const RTA_VIA: u16 = 18;
const RTA_ENCAP: u16 = 22;
const RTA_UID: u16 = 25;
const RTA_IP_PROTO: u16 = 27;
const RTA_SPORT: u16 = 28;
const RTA_DPORT: u16 = 29;
const RTA_FLOWLABEL: u16 = 31;
const RTAX_MTU: u16 = 2;

const IPPROTO_TCP: u8 = 6;

/// Properties of a socket, besides its addresses, on which the route of its packets depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Routing {
    /// SO_MARK.
    pub mark: u32,
    /// The device that it is bound to (SO_BINDTODEVICE), 0 for none.
    pub device: u32,
    /// User id that it belongs to.
    pub user: u32,
    /// Type of service or traffic class.
    pub class: u8,
    /// IPv6 flow label, with the class bits in front, as a number in network order.
    pub flow_label: u32,
    /// IPV6_AUTOFLOWLABEL: a connection without a flow label of its own gets one that is computed from its addresses
    /// and ports.
    pub labels_itself: bool,
    /// SO_DONTROUTE: only peers on the link can be reached.
    pub on_link: bool,
}

impl Routing {
    /// Reads a socket's.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn of(fd: BorrowedFd<'_>, v4: bool, peer: SocketAddr) -> io::Result<Routing> {
        const SO_MARK: i32 = 36;
        const IPV6_AUTOFLOWLABEL: i32 = 70;
        let of_socket = |option| socket::get(fd, libc::SOL_SOCKET, option);
        let class = if v4 {
            socket::get(fd, libc::IPPROTO_IP, libc::IP_TOS)?
        } else {
            socket::get(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS)?
        };
        let flow_label = match peer {
            SocketAddr::V6(peer) if !v4 => u32::from_be(peer.flowinfo()),
            _ => 0,
        };
        Ok(Routing {
            mark: of_socket(SO_MARK)? as u32,
            device: socket::device(fd)?,
            user: socket::owner(fd)?,
            class: class.max(0) as u8,
            flow_label,
            labels_itself: !v4 && socket::get(fd, libc::IPPROTO_IPV6, IPV6_AUTOFLOWLABEL).unwrap_or(0) != 0,
            on_link: of_socket(libc::SO_DONTROUTE)? != 0,
        })
    }
}

/// The route to a connection's peer, as the kernel would choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the outgoing device.
    pub interface: u32,
    /// The next hop, if it is not the destination itself. It may be an IPv6 router of an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// The source address that it prefers.
    pub source: Option<IpAddr>,
    /// Path MTU in bytes of an IP packet, if the route or one of its exceptions has one; otherwise the device's MTU
    /// counts.
    pub mtu: Option<u32>,
    /// Packets get another header on this route (MPLS, segment routing, …).
    pub encapsulated: bool,
    /// The destination is this host.
    pub local: bool,
}

fn request(local: Option<SocketAddr>, peer: SocketAddr, routing: &Routing, flags: u32) -> Request {
    let destination = peer.ip().to_canonical();
    let length = if destination.is_ipv4() { 32 } else { 128 };
    let source = local.map(|local| local.ip().to_canonical());
    // The two lowest bits are ECN's and do not affect routing.
    let class = routing.class & 0xfc;
    let mut header = [family(&destination), length, if source.is_some() { length } else { 0 }, class, 0, 0, 0, 0, 0, 0, 0, 0];
    header[8..].copy_from_slice(&flags.to_ne_bytes());
    let mut request = Request::new(RTM_GETROUTE, 0, &header).attribute(RTA_DST, &bytes(&destination));
    if let Some((local, source)) = local.zip(source) {
        request = request.attribute(RTA_SRC, &bytes(&source)).attribute(RTA_IP_PROTO, &[IPPROTO_TCP]);
        request = request.attribute(RTA_SPORT, &local.port().to_be_bytes()).attribute(RTA_DPORT, &peer.port().to_be_bytes());
    }
    request = request.attribute(RTA_UID, &routing.user.to_ne_bytes());
    if routing.mark != 0 {
        request = request.attribute(RTA_MARK, &routing.mark.to_ne_bytes());
    }
    if routing.device != 0 {
        request = request.attribute(RTA_OIF, &routing.device.to_ne_bytes());
    }
    if routing.flow_label & 0xf_ffff != 0 && destination.is_ipv6() {
        request = request.attribute(RTA_FLOWLABEL, &(routing.flow_label & 0xf_ffff).to_be_bytes());
    }
    request
}

/// Looks up the route of a connection's packets.
///
/// # Errors
/// `ENETUNREACH` or `EHOSTUNREACH` without a route, `EINVAL` if the source is not this host's.
pub fn of_connection(netlink: &Netlink, local: SocketAddr, peer: SocketAddr, routing: &Routing) -> io::Result<Route> {
    ask(netlink, request(Some(local), peer, routing, 0))
}

fn ask(netlink: &Netlink, request: Request) -> io::Result<Route> {
    let mut route = Route { interface: 0, gateway: None, source: None, mtu: None, encapsulated: false, local: false };
    let mut kind = 0;
    netlink.ask(request, |body| {
        kind = body.get(7).copied().unwrap_or(0);
        for (attribute, value) in attributes(body, HEADER) {
            match attribute {
                RTA_OIF => route.interface = word(value).unwrap_or(0),
                RTA_GATEWAY => route.gateway = parse(value),
                // The attribute begins with the address's family.
                RTA_VIA => route.gateway = value.get(2..).and_then(parse),
                RTA_PREFSRC => route.source = parse(value),
                RTA_METRICS => {
                    let mtu = attributes(value, 0).find(|(metric, _)| *metric == RTAX_MTU);
                    route.mtu = mtu.and_then(|(_, value)| word(value)).filter(|mtu| *mtu != 0);
                }
                RTA_ENCAP => route.encapsulated = true,
                _ => {}
            }
        }
    })?;
    // Only RTN_UNICAST and RTN_LOCAL lead to a destination.
    route.local = kind == 2;
    if kind == 1 || kind == 2 { Ok(route) } else { Err(io::Error::from_raw_os_error(libc::ENETUNREACH)) }
}

/// Looks up the route to an address, for any source address.
///
/// # Errors
/// `ENETUNREACH` or `EHOSTUNREACH` without a route.
pub fn to(netlink: &Netlink, address: IpAddr) -> io::Result<Route> {
    ask(netlink, request(None, SocketAddr::new(address, 0), &Routing::default(), 0))
}

/// Whether an address belongs to this host.
///
/// # Errors
/// The failed system call's.
pub fn is_local(netlink: &Netlink, address: IpAddr) -> io::Result<bool> {
    match ask(netlink, request(None, SocketAddr::new(address, 0), &Routing::default(), 0)) {
        Ok(route) => Ok(route.local),
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL)) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Devices of all paths of a connection's route, if there are several: a strict reverse path filter accepts the peer's
/// packets at each of them.
///
/// # Errors
/// The failed system call's.
pub fn paths(netlink: &Netlink, local: SocketAddr, peer: SocketAddr, routing: &Routing) -> io::Result<Vec<u32>> {
    /// Bytes of `struct rtnexthop`, whose last word is the device.
    const NEXT_HOP: usize = 8;
    let mut devices = Vec::new();
    netlink.ask(request(Some(local), peer, routing, RTM_F_FIB_MATCH), |body| {
        for (attribute, value) in attributes(body, HEADER) {
            if attribute != RTA_MULTIPATH {
                continue;
            }
            let mut rest = value;
            while rest.len() >= NEXT_HOP {
                let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]])).max(NEXT_HOP);
                devices.extend(word(&rest[4..NEXT_HOP]));
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    })?;
    Ok(devices)
}
