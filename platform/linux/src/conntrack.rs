//! Connection tracking. An offloaded connection's segments bypass the host's tracker, whose window check would then drop the
//! segments after a restore as invalid. So the connection's entry is set to be liberal about windows; the system-wide setting is
//! not changed.

use crate::netlink::{ACK, Netlink, Request, attributes};
use baton_wire::Flow;
use std::io;

const IPCTNL_MSG_CT_NEW: u16 = 1 << 8;
const IPCTNL_MSG_CT_GET: u16 = 1 << 8 | 1;
const IPCTNL_MSG_CT_GET_STATS: u16 = 1 << 8 | 5;
/// Bytes of `struct nfgenmsg`.
const HEADER: usize = 4;
/// IP_CT_TCP_FLAG_BE_LIBERAL.
const BE_LIBERAL: u8 = 0x08;

/// Number of entries that the tracker has; 0 without a tracker. `netlink` is of family [`crate::netlink::NETFILTER`], as for all
/// functions here.
///
/// # Errors
/// The failed system call's.
pub fn entries(netlink: &Netlink) -> io::Result<u32> {
    const CTA_STATS_GLOBAL_ENTRIES: u16 = 1;
    let mut entries = None;
    let asked = netlink.ask(Request::new(IPCTNL_MSG_CT_GET_STATS, 0, &[0; HEADER]), |body| {
        let found = attributes(body, HEADER).find(|(kind, value)| *kind == CTA_STATS_GLOBAL_ENTRIES && value.len() == 4);
        entries = found.map(|(_, value)| u32::from_be_bytes([value[0], value[1], value[2], value[3]]));
    });
    match asked {
        Ok(()) => entries.ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(error) if is_absence(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Makes the tracker's entry of a connection liberal in both directions. Returns whether there was an entry.
///
/// # Errors
/// The failed system call's. A missing tracker or entry is no error.
pub fn be_liberal(netlink: &Netlink, flow: &Flow) -> io::Result<bool> {
    // The entry's key is its original direction, and it is not known who opened the connection.
    Ok(update(netlink, flow)? || update(netlink, &flow.reversed())?)
}

/// Whether this host translates the connection's addresses (NAT): then the wire's addresses are not the socket's.
///
/// # Errors
/// The failed system call's. A missing tracker or entry is no error.
pub fn is_translated(netlink: &Netlink, flow: &Flow) -> io::Result<bool> {
    /// IPS_SRC_NAT and IPS_DST_NAT.
    const TRANSLATED: u32 = 1 << 4 | 1 << 5;
    const CTA_STATUS: u16 = 3;
    let mut translated = false;
    // An entry is found by either of its directions, and one of them is the socket's.
    let found = netlink.ask(request_of(IPCTNL_MSG_CT_GET, 0, flow), |body| {
        let status = attributes(body, HEADER).find(|(kind, value)| *kind == CTA_STATUS && value.len() == 4);
        translated =
            status.is_some_and(|(_, value)| u32::from_be_bytes([value[0], value[1], value[2], value[3]]) & TRANSLATED != 0);
    });
    match found {
        Ok(()) => Ok(translated),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL))
}

/// A request about the entry of a connection, by one of its directions.
fn request_of(kind: u16, flags: u16, original: &Flow) -> Request {
    let v4 = original.is_v4();
    let family = if v4 { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let address = |request: Request, kind: u16, endpoint: &baton_wire::Endpoint| {
        if v4 { request.attribute(kind, &endpoint.v4_bytes()) } else { request.attribute(kind + 2, &endpoint.address) }
    };
    Request::new(kind, flags, &[family, 0, 0, 0]).nested(1, |tuple| {
        tuple.nested(1, |ip| address(address(ip, 1, &original.local), 2, &original.remote)).nested(2, |protocol| {
            protocol
                .attribute(1, &[6])
                .attribute(2, &original.local.port.to_be_bytes())
                .attribute(3, &original.remote.port.to_be_bytes())
        })
    })
}

fn update(netlink: &Netlink, original: &Flow) -> io::Result<bool> {
    let flags = [BE_LIBERAL, BE_LIBERAL];
    let request = request_of(IPCTNL_MSG_CT_NEW, ACK, original)
        .nested(4, |info| info.nested(1, |tcp| tcp.attribute(4, &flags).attribute(5, &flags)));
    match netlink.ask(request, |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}
