//! Connection tracking. An offloaded connection's segments bypass the host's tracker, whose window check would then
//! drop the segments after a restore as invalid. So the connection's entry is set to be liberal about windows; the
//! system-wide setting is not changed. The tracker does not renew the entry for segments that it does not see, so the
//! entry would expire: the functions here renew it.

use crate::netlink::{ACK, Netlink, Request, attributes};
use baton_wire::Flow;
use std::io;

const IPCTNL_MSG_CT_NEW: u16 = 1 << 8;
const IPCTNL_MSG_CT_GET: u16 = 1 << 8 | 1;
const IPCTNL_MSG_CT_GET_STATS: u16 = 1 << 8 | 5;
/// Bytes of `struct nfgenmsg`.
const HEADER: usize = 4;
const CTA_PROTOINFO: u16 = 4;
const CTA_TIMEOUT: u16 = 7;
/// IP_CT_TCP_FLAG_BE_LIBERAL.
const BE_LIBERAL: u8 = 0x08;

/// Number of entries that the tracker has; 0 without a tracker. `netlink` is of family [`crate::netlink::NETFILTER`],
/// as for all functions here.
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

/// The tracker's entry of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Entry {
    /// This host translates the connection's addresses (NAT): then the wire's addresses are not the socket's.
    pub translated: bool,
    /// Seconds until the entry runs out.
    pub left: u32,
}

/// Makes the tracker's entry of a connection liberal in both directions, and lets it expire in `seconds`. Returns
/// whether there was an entry.
///
/// # Errors
/// The failed system call's. A missing tracker or entry is no error.
pub fn be_liberal(netlink: &Netlink, flow: &Flow, seconds: u32) -> io::Result<bool> {
    let flags = [BE_LIBERAL, BE_LIBERAL];
    let request = request_of(IPCTNL_MSG_CT_NEW, ACK, flow)
        .attribute(CTA_TIMEOUT, &seconds.to_be_bytes())
        .nested(CTA_PROTOINFO, |info| info.nested(1, |tcp| tcp.attribute(4, &flags).attribute(5, &flags)));
    match netlink.ask(request, |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if is_absence(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Finds the tracker's entry of a connection.
///
/// # Errors
/// The failed system call's. A missing tracker or entry is no error.
pub fn find(netlink: &Netlink, flow: &Flow) -> io::Result<Option<Entry>> {
    /// IPS_SRC_NAT and IPS_DST_NAT.
    const TRANSLATED: u32 = 1 << 4 | 1 << 5;
    const CTA_STATUS: u16 = 3;
    let mut entry = Entry::default();
    // An entry is found by either of its directions, and one of them is the socket's.
    let found = netlink.ask(request_of(IPCTNL_MSG_CT_GET, 0, flow), |body| {
        let number = |wanted| {
            let found = attributes(body, HEADER).find(|(kind, value)| *kind == wanted && value.len() == 4);
            found.map_or(0, |(_, value)| u32::from_be_bytes([value[0], value[1], value[2], value[3]]))
        };
        entry = Entry { translated: number(CTA_STATUS) & TRANSLATED != 0, left: number(CTA_TIMEOUT) };
    });
    match found {
        Ok(()) => Ok(Some(entry)),
        Err(error) if is_absence(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The time-outs of TCP connections that are in force in this thread's network namespace, in seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// The time-out of each state, by its number in TCP_INFO; 0 for states in which no connection is on a NIC.
    of_state: [u32; 12],
}

impl Timeouts {
    /// Reads them. None without a tracker.
    pub fn read() -> Option<Timeouts> {
        let read = |name| {
            let path = format!("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_{name}");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        let mut of_state = [0; 12];
        of_state[1] = read("established")?;
        of_state[4] = read("fin_wait")?;
        of_state[5] = of_state[4];
        of_state[6] = read("time_wait")?;
        of_state[8] = read("close_wait")?;
        of_state[9] = read("last_ack")?;
        // Both ends have sent a FIN: the tracker has no such state of its own.
        of_state[11] = of_state[9];
        Some(Timeouts { of_state })
    }

    /// The time-out of a state, by its number in TCP_INFO.
    pub fn of(&self, state: u8) -> u32 {
        match self.of_state.get(usize::from(state)) {
            Some(0) | None => self.of_state[1],
            Some(seconds) => *seconds,
        }
    }

    /// The shortest time-out of the states in which a connection can be on a NIC.
    pub fn shortest(&self) -> u32 {
        self.of_state.iter().copied().filter(|seconds| *seconds != 0).min().unwrap_or(1)
    }

    /// How long an entry is kept after its connection's end.
    pub fn after_end(&self) -> u32 {
        self.of_state[6]
    }
}

/// Most entries that are renewed by one call: their refusals have to fit into a socket's buffer.
pub const MOST_RENEWED: usize = 64;

/// Lets the entry of each connection expire in the given number of seconds from now. Calls `missing` with the index of
/// each connection that has no entry. Takes at most [`MOST_RENEWED`] at once.
///
/// # Errors
/// The failed system call's.
pub fn renew(netlink: &Netlink, entries: &[(Flow, u32)], missing: impl FnMut(usize)) -> io::Result<()> {
    let mut missing = missing;
    let request =
        |(flow, seconds): &(Flow, u32)| request_of(IPCTNL_MSG_CT_NEW, 0, flow).attribute(CTA_TIMEOUT, &seconds.to_be_bytes());
    let requests: Vec<Request> = entries.iter().map(request).collect();
    netlink.ask_all(&requests, |place, error| {
        if is_absence(error) {
            missing(place);
        }
    })
}

/// Ends a connection in the tracker, which has not seen its last segments: the entry expires in
/// `seconds`, and before that a new connection with the same addresses and ports may begin.
///
/// # Errors
/// The failed system call's. A missing entry is no error.
pub fn end(netlink: &Netlink, flow: &Flow, seconds: u32) -> io::Result<()> {
    const TIME_WAIT: u8 = 7;
    let request = request_of(IPCTNL_MSG_CT_NEW, ACK, flow)
        .attribute(CTA_TIMEOUT, &seconds.to_be_bytes())
        .nested(CTA_PROTOINFO, |info| info.nested(1, |tcp| tcp.attribute(1, &[TIME_WAIT])));
    match netlink.ask(request, |_| {}) {
        Err(error) if !is_absence(&error) => Err(error),
        _ => Ok(()),
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL))
}

/// A request about a connection's entry, which is named by one of its two directions.
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
