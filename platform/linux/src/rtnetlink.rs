//! Routes, neighbours, links and addresses over rtnetlink.

use crate::netlink::{ACK, CREATE_EXCLUSIVE, CREATE_REPLACE, DUMP, Netlink, ROUTE, Request, attributes};
use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
/// Attribute of a link: its name.
const IFALIAS: u16 = 20;
const IFNAME: u16 = 3;
/// Bytes of an alternative name at most, with the zero behind it.
const ALTERNATIVE_SIZE: usize = 128;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;

pub(crate) fn family(address: &IpAddr) -> u8 {
    if address.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 }
}

pub(crate) fn bytes(address: &IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

pub(crate) fn parse(value: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(value).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()
}

pub(crate) fn word(value: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(value.try_into().ok()?))
}

/// The link address of a neighbour; None if the kernel has none that it would use.
///
/// # Errors
/// The failed system call's.
pub fn neighbour(netlink: &Netlink, interface: u32, address: IpAddr) -> io::Result<Option<[u8; 6]>> {
    let mut header = [0u8; 12];
    header[0] = family(&address);
    header[4..8].copy_from_slice(&interface.to_ne_bytes());
    let request = Request::new(RTM_GETNEIGH, 0, &header).attribute(1, &bytes(&address));
    let mut found = None;
    let answer = netlink.ask(request, |body| found = parse_neighbour(body).and_then(|(_, _, found)| found));
    match answer {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        other => other.map(|()| found),
    }
}

/// Parses a message about a neighbour: device, address, and the link address if the kernel would use one.
pub fn parse_neighbour(body: &[u8]) -> Option<(u32, IpAddr, Option<[u8; 6]>)> {
    let device = word(body.get(4..8)?)?;
    let state = u16::from_ne_bytes(body.get(8..10)?.try_into().ok()?);
    let of = |wanted| attributes(body, 12).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    // REACHABLE, STALE, DELAY, PROBE, NOARP, PERMANENT.
    let found = of(2).filter(|_| state & 0xde != 0).and_then(|value| value.try_into().ok());
    Some((device, of(1).and_then(parse)?, found))
}

/// A link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Index.
    pub index: u32,
    /// MAC address.
    pub address: [u8; 6],
    /// MTU in bytes of IP packet.
    pub mtu: u32,
    /// MTU for IPv6, which can be less; 0 without IPv6.
    pub mtu6: u32,
    /// Kind of link layer: [`ETHERNET`], [`LOOPBACK`] or another.
    pub kind: u16,
    /// Whether it is up.
    pub up: bool,
    /// Whether the link has a carrier: a cable is plugged in, or a veth's peer is up.
    pub carrier: bool,
    /// The device above it (its master).
    pub master: Master,
    /// The link is a VRF device (or another device that has a routing table of its own).
    pub vrf: bool,
    /// The kind of the link's other end, if that is software.
    pub wire: Wire,
}

/// Linux's flag of a link that has a carrier (`libc` has no name for it).
const IFF_LOWER_UP: u32 = 1 << 16;

/// The kind of a link's other end. Software hands over its frames as it has made them: large frames uncut, and
/// checksums not computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wire {
    /// Another link, of a veth pair.
    Veth,
    /// A process: the link is a TAP or a TUN.
    Tap,
    /// Something else, such as a cable.
    Other,
}

/// The device above a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Master {
    /// None: packets that it receives are the host's.
    None,
    /// A VRF: packets that it receives are the host's, with the VRF's routing table.
    Vrf,
    /// A bridge, a bond, …: packets that it receives count as received by the master.
    Other,
}

/// Link type with Ethernet headers.
pub const ETHERNET: u16 = 1;
/// Link type of the loopback device, whose Ethernet headers contain zeros.
pub const LOOPBACK: u16 = 772;

/// Looks up a link by its name, or an alternative one.
///
/// # Errors
/// `ENODEV` if there is none of this name.
pub fn link(netlink: &Netlink, name: &str) -> io::Result<LinkInfo> {
    const ALTERNATIVE: u16 = 53;
    let kind = if name.len() < libc::IFNAMSIZ { IFNAME } else { ALTERNATIVE };
    if name.len() >= ALTERNATIVE_SIZE {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    let mut terminated = name.as_bytes().to_vec();
    terminated.push(0);
    ask_for_link(netlink, Request::new(RTM_GETLINK, 0, &[0; 16]).attribute(kind, &terminated))
}

/// Looks up a link by index.
///
/// # Errors
/// `ENODEV` if there is none.
pub fn link_at(netlink: &Netlink, index: u32) -> io::Result<LinkInfo> {
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    ask_for_link(netlink, Request::new(RTM_GETLINK, 0, &header))
}

/// The name of a link.
///
/// # Errors
/// `ENODEV` if there is none with this index.
pub fn name_of(netlink: &Netlink, index: u32) -> io::Result<String> {
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut name = None;
    netlink.ask(Request::new(RTM_GETLINK, 0, &header), |body| {
        let found = attributes(body, 16).find(|(kind, _)| *kind == IFNAME).map(|(_, value)| value);
        name = found.map(|value| String::from_utf8_lossy(value).trim_end_matches('\0').to_string());
    })?;
    name.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
}

/// Gives a link an alias: a text that `ip link` shows, and that only a user with the right to change links can set.
///
/// # Errors
/// The failed system call's.
pub fn set_alias(netlink: &Netlink, index: u32, alias: &str) -> io::Result<()> {
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    netlink.ask(Request::new(RTM_NEWLINK, ACK, &header).attribute(IFALIAS, alias.as_bytes()), |_| {})
}

/// The aliases of all links of the namespace that have one.
///
/// # Errors
/// The failed system call's.
pub fn aliases(netlink: &Netlink) -> io::Result<Vec<String>> {
    let mut all = Vec::new();
    netlink.ask(Request::new(RTM_GETLINK, DUMP, &[0; 16]), |body| {
        let alias = attributes(body, 16).find(|(kind, _)| *kind == IFALIAS).map(|(_, value)| value);
        all.extend(alias.map(|alias| String::from_utf8_lossy(alias).trim_end_matches('\0').to_string()));
    })?;
    Ok(all)
}

/// All links of the namespace.
///
/// # Errors
/// The failed system call's.
pub fn links(netlink: &Netlink) -> io::Result<Vec<LinkInfo>> {
    let mut all = Vec::new();
    netlink.ask(Request::new(RTM_GETLINK, DUMP, &[0; 16]), |body| all.extend(parse_link(body)))?;
    Ok(all)
}

fn ask_for_link(netlink: &Netlink, request: Request) -> io::Result<LinkInfo> {
    let mut info = None;
    netlink.ask(request, |body| info = parse_link(body))?;
    info.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
}

/// Makes a link take frames at once when they are sent, without a queue of the kernel's in front of it.
///
/// # Errors
/// The failed system call's.
pub fn send_at_once(netlink: &Netlink, index: u32) -> io::Result<()> {
    const RTM_NEWQDISC: u16 = 36;
    const ROOT: u32 = u32::MAX;
    let mut header = [0u8; 20];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[12..16].copy_from_slice(&ROOT.to_ne_bytes());
    netlink.ask(Request::new(RTM_NEWQDISC, ACK | CREATE_REPLACE, &header).attribute(1, b"noqueue\0"), |_| {})
}

/// Frames that the host has sent by a link and that the link has dropped.
///
/// # Errors
/// `ENODEV` if there is no link with this index.
pub fn dropped_sends(netlink: &Netlink, index: u32) -> io::Result<u64> {
    const STATS64: u16 = 23;
    /// Offset of `tx_dropped` in `rtnl_link_stats64`.
    const DROPPED: usize = 7 * 8;
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut dropped = None;
    netlink.ask(Request::new(RTM_GETLINK, 0, &header), |body| {
        let counters = attributes(body, 16).find(|(kind, _)| *kind == STATS64);
        dropped = counters.and_then(|(_, all)| Some(u64::from_ne_bytes(all.get(DROPPED..DROPPED + 8)?.try_into().ok()?)));
    })?;
    dropped.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
}

fn parse_link(body: &[u8]) -> Option<LinkInfo> {
    const LINKINFO: u16 = 18;
    const AF_SPEC: u16 = 26;
    let flags = word(body.get(8..12)?)?;
    let mut info = LinkInfo {
        index: word(&body[4..8])?,
        address: [0; 6],
        mtu: 1500,
        mtu6: 0,
        kind: u16::from_ne_bytes([body[2], body[3]]),
        up: flags & libc::IFF_UP as u32 != 0,
        carrier: flags & IFF_LOWER_UP != 0,
        master: Master::None,
        vrf: false,
        wire: Wire::Other,
    };
    let mut slave_of_vrf = false;
    for (kind, value) in attributes(body, 16) {
        match kind {
            1 => info.address = value.try_into().unwrap_or_default(),
            4 => info.mtu = word(value).unwrap_or(1500),
            10 if word(value) != Some(0) => info.master = Master::Other,
            LINKINFO => {
                // IFLA_INFO_KIND and IFLA_INFO_SLAVE_KIND.
                let is = |wanted, named: &[u8]| attributes(value, 0).any(|(kind, name)| kind == wanted && name == named);
                (info.vrf, slave_of_vrf) = (is(1, b"vrf\0"), is(4, b"vrf\0"));
                if is(1, b"veth\0") {
                    info.wire = Wire::Veth;
                } else if is(1, b"tun\0") {
                    info.wire = Wire::Tap;
                }
            }
            AF_SPEC => info.mtu6 = ipv6_mtu(value).unwrap_or(0),
            _ => {}
        }
    }
    if slave_of_vrf {
        info.master = Master::Vrf;
    }
    Some(info)
}

/// The MTU among a link's IPv6 settings (IFLA_AF_SPEC, AF_INET6, IFLA_INET6_CONF).
fn ipv6_mtu(families: &[u8]) -> Option<u32> {
    const CONF: u16 = 2;
    const MTU: usize = 2;
    let (_, v6) = attributes(families, 0).find(|(family, _)| *family == libc::AF_INET6 as u16)?;
    let (_, settings) = attributes(v6, 0).find(|(kind, _)| *kind == CONF)?;
    word(settings.get(4 * MTU..4 * MTU + 4)?)
}

/// Whether a traffic control filter judges incoming frames at a link. Programs that Baton has attached (tcx) do not
/// count.
///
/// # Errors
/// The failed system call's.
pub fn has_ingress_filter(netlink: &Netlink, index: u32) -> io::Result<bool> {
    const RTM_GETTFILTER: u16 = 46;
    /// The parents of ingress filters: of clsact, and of the older ingress discipline.
    const PARENTS: [u32; 2] = [0xffff_fff2, 0xffff_0000];
    let mut found = false;
    for parent in PARENTS {
        let mut header = [0u8; 20];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        header[12..16].copy_from_slice(&parent.to_ne_bytes());
        match netlink.ask(Request::new(RTM_GETTFILTER, DUMP, &header), |_| found = true) {
            // There is no such discipline, or no traffic control in this kernel.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT | libc::EOPNOTSUPP)) => {}
            other => other?,
        }
    }
    Ok(found)
}

/// Links that have an IPv4 address.
///
/// # Errors
/// The failed system call's.
pub fn with_ipv4_address(netlink: &Netlink) -> io::Result<HashSet<u32>> {
    const RTM_GETADDR: u16 = 22;
    let mut found = HashSet::new();
    let header = [libc::AF_INET as u8, 0, 0, 0, 0, 0, 0, 0];
    netlink.ask(Request::new(RTM_GETADDR, DUMP, &header), |body| found.extend(body.get(4..8).and_then(word)))?;
    Ok(found)
}

/// The addresses of all links. Left out are addresses of the loopback network, and IPv6 link-local addresses, which are
/// valid on one link only.
///
/// # Errors
/// The failed system call's.
pub fn addresses(netlink: &Netlink) -> io::Result<Vec<IpAddr>> {
    let mut found: Vec<IpAddr> = addresses_of_links(netlink)?.into_iter().map(|(_, address)| address).collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// The addresses of [`addresses`], each with the index of its link.
///
/// # Errors
/// The failed system call's.
pub fn addresses_of_links(netlink: &Netlink) -> io::Result<Vec<(u32, IpAddr)>> {
    const RTM_GETADDR: u16 = 22;
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    let mut found = Vec::new();
    netlink.ask(Request::new(RTM_GETADDR, DUMP, &[0; 8]), |body| {
        let of = |wanted| attributes(body, 8).find(|(kind, _)| *kind == wanted).and_then(|(_, value)| parse(value));
        // Of a point-to-point link IFA_ADDRESS is the peer's.
        found.extend(body.get(4..8).and_then(word).zip(of(IFA_LOCAL).or_else(|| of(IFA_ADDRESS))));
    })?;
    let link_local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    found.retain(|(_, address)| !address.is_loopback() && !link_local(address));
    Ok(found)
}

/// The reverse path filter (`rp_filter`) of each link that has IPv4: 0 none, 1 strict, 2 loose.
///
/// # Errors
/// The failed system call's.
pub fn reverse_path_filters(netlink: &Netlink) -> io::Result<Vec<(u32, u32)>> {
    const RTM_GETNETCONF: u16 = 82;
    const INDEX: u16 = 1;
    const FILTER: u16 = 3;
    /// The index that stands for all links: a link's setting is the larger one of its own and this one's.
    const ALL: u32 = -1i32 as u32;
    let mut filters = Vec::new();
    netlink.ask(Request::new(RTM_GETNETCONF, DUMP, &[libc::AF_INET as u8, 0, 0, 0]), |body| {
        let of = |wanted| attributes(body, 4).find(|(kind, _)| *kind == wanted).and_then(|(_, value)| word(value));
        filters.extend(of(INDEX).zip(of(FILTER)));
    })?;
    let all = filters.iter().find(|(index, _)| *index == ALL).map_or(0, |(_, filter)| *filter);
    filters.retain(|(index, _)| (*index as i32) > 0);
    filters.iter_mut().for_each(|(_, filter)| *filter = all.max(*filter));
    Ok(filters)
}

/// Sets a link's MAC address and MTU and brings it up.
///
/// # Errors
/// The failed system call's.
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

/// Takes a link down.
///
/// # Errors
/// The failed system call's.
pub fn set_down(netlink: &Netlink, index: u32) -> io::Result<()> {
    /// The flag IFF_UP, as the only flag to be changed, cleared.
    const UP: u32 = 1;
    let mut header = [0u8; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[12..16].copy_from_slice(&UP.to_ne_bytes());
    netlink.ask(Request::new(RTM_NEWLINK, ACK, &header), |_| {})
}

fn address_request(kind: u16, flags: u16, index: u32, address: IpAddr, prefix: u8) -> Request {
    // IFA_F_NODAD: the test hosts' addresses can be used at once.
    let mut header = [family(&address), prefix, 2, 0, 0, 0, 0, 0];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    Request::new(kind, flags, &header).attribute(2, &bytes(&address)).attribute(1, &bytes(&address))
}

/// Makes a veth pair: `name` here, its peer `peer` in another namespace.
///
/// # Errors
/// The failed system call's.
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
/// The failed system call's.
pub fn add_address(netlink: &Netlink, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    netlink.ask(address_request(RTM_NEWADDR, ACK | CREATE_REPLACE, index, address, prefix), |_| {})
}

/// Adds an address of Baton's to a link. Its prefix is this host only, so no route to other hosts comes with it. It is
/// deprecated, so the kernel does not choose it as the source for sockets that name none. IPv6 does not probe for it.
///
/// # Errors
/// The failed system call's.
pub fn add_own_address(netlink: &Netlink, index: u32, address: IpAddr) -> io::Result<()> {
    put_own_address(netlink, index, address, u32::MAX)
}

/// Lets the kernel remove an address that [`add_own_address`] has added, after some seconds.
///
/// # Errors
/// The failed system call's.
pub fn expire_own_address(netlink: &Netlink, index: u32, address: IpAddr, seconds: u32) -> io::Result<()> {
    put_own_address(netlink, index, address, seconds)
}

fn put_own_address(netlink: &Netlink, index: u32, address: IpAddr, seconds: u32) -> io::Result<()> {
    const CACHEINFO: u16 = 6;
    const FLAGS: u16 = 8;
    /// IFA_F_NODAD and IFA_F_NOPREFIXROUTE.
    const ALONE: u32 = 0x02 | 0x200;
    // Lifetime as a preferred address: none; as a valid one; and two times that the kernel sets.
    let lifetimes: Vec<u8> = [0, seconds, 0, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    let request = address_request(RTM_NEWADDR, ACK | CREATE_REPLACE, index, address, whole(address));
    let request = request.attribute(CACHEINFO, &lifetimes).attribute(FLAGS, &ALONE.to_ne_bytes());
    netlink.ask(request.attribute(PROTOCOL, &[OWN]), |_| {})
}

/// The addresses that a Baton has added by [`add_own_address`], each with the index of its link.
///
/// # Errors
/// The failed system call's.
pub fn own_addresses(netlink: &Netlink) -> io::Result<Vec<(u32, IpAddr)>> {
    const RTM_GETADDR: u16 = 22;
    const ADDRESS: u16 = 1;
    let mut found = Vec::new();
    netlink.ask(Request::new(RTM_GETADDR, DUMP, &[0; 8]), |body| {
        let of = |wanted| attributes(body, 8).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let index = body.get(4..8).and_then(word).filter(|_| of(PROTOCOL) == Some(&[OWN]));
        found.extend(index.zip(of(ADDRESS).and_then(parse)));
    })?;
    Ok(found)
}

/// Removes an address that [`add_own_address`] has added.
///
/// # Errors
/// The failed system call's; none if there is no such address or link any more.
pub fn delete_own_address(netlink: &Netlink, index: u32, address: IpAddr) -> io::Result<()> {
    match delete_address(netlink, index, address, whole(address)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::ENODEV)) => Ok(()),
        other => other,
    }
}

/// IFA_PROTO: who has added an address (Linux 5.18). The number is Baton's.
const PROTOCOL: u16 = 11;
const OWN: u8 = 0xba;

/// Length of a prefix that is the whole address.
fn whole(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Removes an address from a link.
///
/// # Errors
/// The failed system call's.
pub fn delete_address(netlink: &Netlink, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    netlink.ask(address_request(RTM_DELADDR, ACK, index, address, prefix), |_| {})
}

/// Sets the link address of a neighbour permanently.
///
/// # Errors
/// The failed system call's.
pub fn set_neighbour(netlink: &Netlink, index: u32, address: IpAddr, link_address: [u8; 6]) -> io::Result<()> {
    const PERMANENT: u16 = 0x80;
    put_neighbour(netlink, index, address, link_address, PERMANENT)
}

/// Sets the link address of a neighbour from which a packet has come. The kernel verifies the address when it first
/// uses it.
///
/// # Errors
/// The failed system call's.
pub fn learn_neighbour(netlink: &Netlink, index: u32, address: IpAddr, link_address: [u8; 6]) -> io::Result<()> {
    const STALE: u16 = 0x04;
    put_neighbour(netlink, index, address, link_address, STALE)
}

fn put_neighbour(netlink: &Netlink, index: u32, address: IpAddr, link_address: [u8; 6], state: u16) -> io::Result<()> {
    let mut header = [0u8; 12];
    header[0] = family(&address);
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..10].copy_from_slice(&state.to_ne_bytes());
    let request =
        Request::new(RTM_NEWNEIGH, ACK | CREATE_REPLACE, &header).attribute(1, &bytes(&address)).attribute(2, &link_address);
    netlink.ask(request, |_| {})
}

/// Opens a route socket in the calling thread's network namespace.
///
/// # Errors
/// The failed system call's.
pub fn open() -> io::Result<Netlink> {
    Netlink::open(ROUTE)
}
