//! Socket diagnosis: what the kernel tells about a connection to nobody but an administrator.

use crate::netlink::{Netlink, Request, attributes};
use baton_wire::Flow;
use std::io;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
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
    // Any interface, no cookie.
    header.extend_from_slice(&[0; 4]);
    header.extend_from_slice(&[0xff; 8]);
    let mut found = false;
    netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &header), |body| {
        found = attributes(body, ANSWER).any(|(kind, value)| kind == INET_DIAG_MD5SIG && !value.is_empty());
    })?;
    Ok(found)
}
