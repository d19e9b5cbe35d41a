//! Connection tracking: an offloaded connection's segments bypass the host's tracker, whose window check would drop what follows
//! after a restore as invalid. One entry is told to be liberal about windows; the system-wide setting is not ours to change.

use crate::netlink::{ACK, NETFILTER, Netlink, Request};
use baton_wire::Flow;
use std::io;

const IPCTNL_MSG_CT_NEW: u16 = 1 << 8;
/// IP_CT_TCP_FLAG_BE_LIBERAL.
const BE_LIBERAL: u8 = 0x08;

/// Makes the tracker's entry of a connection liberal in both directions. Whether there was an entry.
///
/// # Errors
/// The system's; no tracker, or no entry, is none.
pub fn be_liberal(flow: &Flow) -> io::Result<bool> {
    let Ok(netlink) = Netlink::open(NETFILTER) else { return Ok(false) };
    // The entry is named by its original direction, and we do not know who opened the connection.
    Ok(update(&netlink, flow)? || update(&netlink, &flow.reversed())?)
}

fn update(netlink: &Netlink, original: &Flow) -> io::Result<bool> {
    let v4 = original.is_v4();
    let family = if v4 { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let address = |request: Request, kind: u16, endpoint: &baton_wire::Endpoint| {
        if v4 { request.attribute(kind, &endpoint.v4_bytes()) } else { request.attribute(kind + 2, &endpoint.address) }
    };
    let flags = [BE_LIBERAL, BE_LIBERAL];
    let request = Request::new(IPCTNL_MSG_CT_NEW, ACK, &[family, 0, 0, 0])
        .nested(1, |tuple| {
            tuple.nested(1, |ip| address(address(ip, 1, &original.local), 2, &original.remote)).nested(2, |protocol| {
                protocol
                    .attribute(1, &[6])
                    .attribute(2, &original.local.port.to_be_bytes())
                    .attribute(3, &original.remote.port.to_be_bytes())
            })
        })
        .nested(4, |info| info.nested(1, |tcp| tcp.attribute(4, &flags).attribute(5, &flags)));
    match netlink.ask(request, |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL)) => Ok(false),
        Err(error) => Err(error),
    }
}
