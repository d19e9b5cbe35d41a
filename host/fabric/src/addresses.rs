//! Addresses of this host, and socket addresses as C has them.

use std::ffi::{CStr, c_char, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, ToSocketAddrs, UdpSocket};
use std::os::fd::AsRawFd;

/// An address of this host.
#[derive(Clone, Debug)]
pub struct Local {
    /// Name of its interface.
    pub interface: String,
    pub address: IpAddr,
    /// Bytes of a frame's payload.
    pub mtu: u32,
}

/// Bytes of struct sockaddr_in.
pub const LENGTH_V4: usize = size_of::<libc::sockaddr_in>();
/// Bytes of struct sockaddr_in6.
pub const LENGTH_V6: usize = size_of::<libc::sockaddr_in6>();
const MTU: u32 = 1500;

/// The addresses of interfaces that are up: IPv4 first, loopback last. Link-local ones of IPv6 are left out: they need
/// a scope, which means nothing to a peer.
pub fn all() -> Vec<Local> {
    let mut found = Vec::new();
    let mut list = std::ptr::null_mut::<libc::ifaddrs>();
    // SAFETY: getifaddrs() fills the pointer with a list, whose entries are live until freeifaddrs(); an address of a
    // family is a structure of that family.
    unsafe {
        if libc::getifaddrs(&mut list) != 0 {
            return found;
        }
        let mut next = list;
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            if entry.ifa_flags & libc::IFF_UP as u32 == 0 {
                continue;
            }
            if let Some(address) = read(entry.ifa_addr.cast(), LENGTH_V6).map(|address| address.ip()) {
                let interface = CStr::from_ptr(entry.ifa_name).to_string_lossy().into_owned();
                found.push(Local { mtu: mtu(&interface), interface, address });
            }
        }
        libc::freeifaddrs(list);
    }
    found.retain(|local| !matches!(local.address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    found.sort_by_key(|local| (local.address.is_loopback(), local.address.is_ipv6()));
    found
}

/// The MTU of an interface of this network namespace. /sys may be that of another one.
fn mtu(interface: &str) -> u32 {
    let Ok(socket) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)) else { return MTU };
    // SAFETY: ifreq is plain data, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays 0 and ends the name.
    for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(interface.bytes()) {
        *to = from as c_char;
    }
    // SAFETY: a live socket, and a request for the call to fill in; it fills in ifru_mtu if it succeeds.
    let found = unsafe {
        let filled = libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) == 0;
        filled.then_some(request.ifr_ifru.ifru_mtu)
    };
    found.and_then(|mtu| u32::try_from(mtu).ok()).unwrap_or(MTU)
}

/// The address from which this host sends to `peer`.
pub fn towards(peer: SocketAddr) -> Option<IpAddr> {
    let any = if peer.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a UDP socket only looks up the route.
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(SocketAddr::new(peer.ip(), peer.port().max(1))).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The address of a host and service, by name or number.
pub fn resolve(node: Option<&str>, service: Option<&str>, v6: Option<bool>) -> Option<SocketAddr> {
    let port = match service {
        None | Some("") => 0,
        Some(text) => text.parse().ok()?,
    };
    let node = node.unwrap_or("localhost");
    let mut addresses = (node, port).to_socket_addrs().ok()?;
    addresses.find(|address| v6.is_none_or(|v6| v6 == address.is_ipv6()))
}

/// The text behind a pointer of C; None for null, or if it is not UTF-8.
///
/// # Safety
/// Null, or a C string that lives as long as what is returned.
pub unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a str> {
    // SAFETY: this function's `# Safety`.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }).and_then(|text| text.to_str().ok())
}

/// The socket address behind a pointer of C, of at most `length` bytes.
///
/// # Safety
/// Null, or an address of its family.
pub unsafe fn read(pointer: *const c_void, length: usize) -> Option<SocketAddr> {
    if pointer.is_null() || length < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: this function's `# Safety`; C's arrays of addresses need not be aligned.
    unsafe {
        match i32::from(pointer.cast::<libc::sa_family_t>().read_unaligned()) {
            libc::AF_INET if length >= LENGTH_V4 => {
                let raw = pointer.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            libc::AF_INET6 if length >= LENGTH_V6 => {
                let raw = pointer.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
                Some(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), raw.sin6_flowinfo, raw.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// An address as C has it: the bytes of a sockaddr_in or sockaddr_in6.
pub fn to_bytes(address: SocketAddr) -> Vec<u8> {
    match address {
        SocketAddr::V4(v4) => {
            let mut bytes = vec![0; LENGTH_V4];
            bytes[..2].copy_from_slice(&(libc::AF_INET as libc::sa_family_t).to_ne_bytes());
            bytes[2..4].copy_from_slice(&v4.port().to_be_bytes());
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            bytes
        }
        SocketAddr::V6(v6) => {
            let mut bytes = vec![0; LENGTH_V6];
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as libc::sa_family_t).to_ne_bytes());
            bytes[2..4].copy_from_slice(&v6.port().to_be_bytes());
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back() {
        for text in ["10.1.2.3:4567", "[fd00::1]:80", "[fe80::1%7]:9"] {
            let address: SocketAddr = text.parse().unwrap();
            let bytes = to_bytes(address);
            // SAFETY: the bytes of an address.
            let read_back = |length| unsafe { read(bytes.as_ptr().cast(), length) };
            assert_eq!(read_back(bytes.len()), Some(address));
            assert_eq!((read_back(bytes.len() - 1), read_back(1)), (None, None));
        }
    }

    #[test]
    fn this_host_has_loopback_last() {
        let all = all();
        assert!(all.iter().any(|local| local.address.is_loopback() && local.mtu > 1500));
        let first_loopback = all.iter().position(|local| local.address.is_loopback()).unwrap();
        assert!(all[first_loopback..].iter().all(|local| local.address.is_loopback()));
        assert_eq!(towards("127.0.0.1:80".parse().unwrap()), Some(Ipv4Addr::LOCALHOST.into()));
    }
}
