//! Socket diagnosis: what the kernel tells about a connection to nobody but an administrator.

use crate::netlink::{ACK, Netlink, Request, attributes};
use crate::tcp_info::TcpInfo;
use baton_wire::Flow;
use std::io;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const ANY_COOKIE: [u8; 8] = [0xff; 8];
/// Bytes of `struct inet_diag_msg`.
const ANSWER: usize = 72;
const INET_DIAG_MD5SIG: u16 = 18;
/// The keys come only with the answer's TCP_INFO.
const INET_DIAG_INFO_BIT: u8 = 2;

/// Whether a key of TCP MD5 (RFC 2385) is set on a connection's socket. `netlink` is of family [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The system's; `ENOENT` if there is no such connection here.
pub fn has_md5_key(netlink: &Netlink, flow: &Flow) -> io::Result<bool> {
    let mut found = false;
    netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &which(flow, ANY_COOKIE)), |body| {
        found = attributes(body, ANSWER).any(|(kind, value)| kind == INET_DIAG_MD5SIG && !value.is_empty());
    })?;
    Ok(found)
}

/// What the kernel knows of a connection, and its state. `netlink` is of family [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The system's; `ENOENT` if there is no such connection here.
pub fn information(netlink: &Netlink, flow: &Flow) -> io::Result<TcpInfo> {
    find(netlink, flow).map(|(info, _)| info)
}

/// A connection's TCP_INFO, and its socket's cookie.
fn find(netlink: &Netlink, flow: &Flow) -> io::Result<(TcpInfo, [u8; 8])> {
    const INET_DIAG_INFO: u16 = 2;
    const LISTEN: u8 = 10;
    const COOKIE: usize = 4 + 40;
    let mut found = None;
    netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &which(flow, ANY_COOKIE)), |body| {
        let raw = attributes(body, ANSWER).find(|(kind, _)| *kind == INET_DIAG_INFO);
        let cookie = body.get(COOKIE..COOKIE + 8).and_then(|bytes| bytes.try_into().ok());
        found = raw.map(|(_, value)| TcpInfo::parse(value)).zip(cookie);
    })?;
    // Where there is no connection the kernel answers with the listener.
    let found = found.filter(|(info, _)| info.state != LISTEN);
    found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// Ends a connection in the kernel, whoever holds its socket, as ss(8) does with `--kill`. `netlink` is of family
/// [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The system's; `ENOENT` if there is no such connection here, `EOPNOTSUPP` if this kernel cannot (CONFIG_INET_DIAG_DESTROY).
pub fn destroy(netlink: &Netlink, flow: &Flow) -> io::Result<()> {
    let (_, cookie) = find(netlink, flow)?;
    netlink.ask(Request::new(SOCK_DESTROY, ACK, &which(flow, cookie)), |_| {})
}

/// A request's header (`struct inet_diag_req_v2`) for one connection.
fn which(flow: &Flow, cookie: [u8; 8]) -> Vec<u8> {
    let v4 = flow.is_v4();
    let mut header = vec![if v4 { libc::AF_INET } else { libc::AF_INET6 } as u8, 6, INET_DIAG_INFO_BIT, 0];
    header.extend_from_slice(&u32::MAX.to_ne_bytes());
    header.extend_from_slice(&flow.local.port.to_be_bytes());
    header.extend_from_slice(&flow.remote.port.to_be_bytes());
    for end in [&flow.local, &flow.remote] {
        if v4 {
            header.extend_from_slice(&end.v4_bytes());
            header.extend_from_slice(&[0; 12]);
        } else {
            header.extend_from_slice(&end.address);
        }
    }
    // Any interface.
    header.extend_from_slice(&[0; 4]);
    header.extend_from_slice(&cookie);
    header
}
