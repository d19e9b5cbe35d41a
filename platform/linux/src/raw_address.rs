//! Socket addresses in the kernel's format, for messages whose other parts are raw, too.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// A socket address in the kernel's format.
pub(crate) struct RawAddress {
    storage: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl RawAddress {
    /// The kernel's form of an address.
    pub fn new(address: SocketAddr) -> Self {
        // SAFETY: sockaddr_storage is plain data, for which zero is a value.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let length = match address {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as _,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_storage is large and aligned enough for every address.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as _,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: sockaddr_storage is large and aligned enough for every address.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
                size_of::<libc::sockaddr_in6>()
            }
        };
        RawAddress { storage, length: length as libc::socklen_t }
    }

    /// Pointer and length, as system calls take them; the pointer is valid as long as this is.
    pub fn as_parts(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        ((&raw const self.storage).cast(), self.length)
    }

    pub(crate) fn parse(storage: &libc::sockaddr_storage) -> io::Result<SocketAddr> {
        match i32::from(storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: according to its family, the storage contains this type.
                let raw = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
                Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that the storage contains a sockaddr_in6, and the storage is aligned for
                // every address.
                let raw = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in6>() };
                let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
                Ok(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), raw.sin6_flowinfo, raw.sin6_scope_id).into())
            }
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, "not an IP socket")),
        }
    }
}
