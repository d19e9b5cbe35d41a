//! Socket diagnosis (sock_diag): what the kernel reports about a connection to administrators only.

use crate::netlink::{ACK, DUMP, Netlink, Request, attributes};
use crate::route::Routing;
use crate::tcp_info::TcpInfo;
use baton_wire::{Endpoint, Flow};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const LISTEN: u8 = 10;
const ANY_COOKIE: [u8; 8] = [0xff; 8];
/// Bytes of `struct inet_diag_msg`.
const ANSWER: usize = 72;
const INET_DIAG_MD5SIG: u16 = 18;
/// The kernel sends the keys only together with TCP_INFO, for which it waits for the socket's lock.
const INET_DIAG_INFO_BIT: u8 = 1 << 1;
const INET_DIAG_TOS: u16 = 5;
const INET_DIAG_TCLASS: u16 = 6;
const INET_DIAG_SKMEMINFO: u16 = 7;
/// Extension bits for these three.
const INET_DIAG_FURTHER_BITS: u8 = 1 << 4 | 1 << 5 | 1 << 6;

thread_local! {
    /// This thread's socket for diagnosis.
    static OWN: std::cell::OnceCell<Netlink> = const { std::cell::OnceCell::new() };
}

/// Calls `run` with a netlink socket of family [`crate::netlink::SOCK_DIAG`], which this thread keeps for the next
/// call.
///
/// # Errors
/// The failed system call's, and those of `run`.
pub fn with_own<T>(run: impl FnOnce(&Netlink) -> io::Result<T>) -> io::Result<T> {
    OWN.with(|own| match own.get() {
        Some(netlink) => run(netlink),
        None => {
            let netlink = Netlink::open(crate::netlink::SOCK_DIAG)?;
            run(own.get_or_init(|| netlink))
        }
    })
}

/// Whether a TCP MD5 key (RFC 2385) is set on a connection's socket. `netlink` is of family
/// [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's; `ENOENT` if there is no such connection here.
pub fn has_md5_key(netlink: &Netlink, flow: &Flow) -> io::Result<bool> {
    let mut found = false;
    netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &request_with_info(flow, ANY_COOKIE)), |body| {
        found = attributes(body, ANSWER).any(|(kind, value)| kind == INET_DIAG_MD5SIG && !value.is_empty());
    })?;
    Ok(found)
}

/// TCP_INFO of the connection of a socket, by its cookie. `netlink` is of family [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's; `ENOENT` if there is no such connection here, `ESTALE` if it is another socket's.
pub fn information(netlink: &Netlink, flow: &Flow, cookie: u64) -> io::Result<TcpInfo> {
    find(netlink, flow, Some(cookie)).map(|(info, _)| info)
}

/// The state of a connection, and whether any process still has its socket. `netlink` is of family
/// [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's; `ENOENT` if there is no such connection here.
pub fn state_and_holder(netlink: &Netlink, flow: &Flow) -> io::Result<(u8, bool)> {
    /// The inode in `struct inet_diag_msg`; 0 once the last descriptor is closed.
    const INODE: usize = 68;
    const STATE: usize = 1;
    let mut found = None;
    netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &request_header(flow, ANY_COOKIE)), |body| {
        if let (Some(state), Some(inode)) = (body.get(STATE), body.get(INODE..INODE + 4)) {
            found = Some((*state, inode != [0; 4]));
        }
    })?;
    // Where there is no connection the kernel answers with the listener.
    found.filter(|(state, _)| *state != LISTEN).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// Whether sockets use a local address, and how.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Use {
    /// No socket is bound to it.
    Nobody,
    /// Only connections that their programs have closed, and that the kernel ends.
    Closing,
    /// Sockets of programs.
    Programs,
}

/// Finds out whether TCP and UDP sockets that are bound to a local address use it. `netlink` is of family
/// [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's.
pub fn users_of(netlink: &Netlink, address: IpAddr) -> io::Result<Use> {
    const TIME_WAIT: u32 = 6;
    const UDP: u8 = 17;
    const TCP: u8 = 6;
    let wanted = Endpoint::from(SocketAddr::new(address, 0)).address;
    let mut found = Use::Nobody;
    // An IPv6 socket may have an IPv4 address.
    for (family, protocol) in [libc::AF_INET, libc::AF_INET6].into_iter().flat_map(|family| [(family, TCP), (family, UDP)]) {
        let mut header = vec![family as u8, protocol, 0, 0];
        header.extend_from_slice(&(!(1u32 << TIME_WAIT)).to_ne_bytes());
        header.extend_from_slice(&[0; 48]);
        netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, DUMP, &header), |body| found = found.max(use_of(body, &wanted)))?;
    }
    Ok(found)
}

/// How the socket with this description uses an address.
fn use_of(body: &[u8], wanted: &[u8; 16]) -> Use {
    /// The local address in `struct inet_diag_msg`, and the inode, 0 once the last descriptor is closed.
    const SOURCE: usize = 8;
    const INODE: usize = 68;
    let Some(source) = body.get(SOURCE..SOURCE + 16).and_then(<[u8]>::first_chunk::<16>) else { return Use::Nobody };
    let is_v4 = body.first() == Some(&(libc::AF_INET as u8));
    let local = if is_v4 { Endpoint::v4([source[0], source[1], source[2], source[3]], 0).address } else { *source };
    match body.get(INODE..INODE + 4) {
        _ if local != *wanted => Use::Nobody,
        Some([0, 0, 0, 0]) => Use::Closing,
        _ => Use::Programs,
    }
}

/// TCP_INFO of a connection, and its socket's cookie.
fn find(netlink: &Netlink, flow: &Flow, cookie: Option<u64>) -> io::Result<(TcpInfo, [u8; 8])> {
    const INET_DIAG_INFO: u16 = 2;
    const COOKIE: usize = 4 + 40;
    let mut found = None;
    netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &request_with_info(flow, cookie_bytes(cookie))), |body| {
        let raw = attributes(body, ANSWER).find(|(kind, _)| *kind == INET_DIAG_INFO);
        let cookie = body.get(COOKIE..COOKIE + 8).and_then(|bytes| bytes.try_into().ok());
        found = raw.map(|(_, value)| TcpInfo::parse(value)).zip(cookie);
    })?;
    // Where there is no connection the kernel answers with the listener.
    let found = found.filter(|(info, _)| info.state != LISTEN);
    found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// Both ends of every TCP connection of this network namespace, by their sockets' cookies, as the sockets name them. No
/// socket's lock is waited for. `netlink` is of family [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's.
pub fn all_ends(netlink: &Netlink) -> io::Result<HashMap<u64, (SocketAddr, SocketAddr)>> {
    let mut all = HashMap::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut header = vec![family as u8, 6, 0, 0];
        header.extend_from_slice(&(!(1u32 << LISTEN)).to_ne_bytes());
        header.extend_from_slice(&[0; 48]);
        netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, DUMP, &header), |body| all.extend(ends_of(body)))?;
    }
    Ok(all)
}

/// Cookie and ends of the connection that a `struct inet_diag_msg` is about.
fn ends_of(body: &[u8]) -> Option<(u64, (SocketAddr, SocketAddr))> {
    const PORTS: usize = 4;
    const ADDRESSES: usize = 8;
    const COOKIE: usize = 4 + 40;
    let is_v4 = *body.first()? == libc::AF_INET as u8;
    let end = |at: usize| {
        let port = u16::from_be_bytes(*body.get(PORTS + 2 * at..)?.first_chunk()?);
        let address = body.get(ADDRESSES + 16 * at..)?;
        let ip = if is_v4 { IpAddr::from(*address.first_chunk::<4>()?) } else { IpAddr::from(*address.first_chunk::<16>()?) };
        Some(SocketAddr::new(ip, port))
    };
    let word = |at: usize| Some(u64::from(u32::from_ne_bytes(*body.get(at..)?.first_chunk()?)));
    Some((word(COOKIE)? | word(COOKIE + 4)? << 32, (end(0)?, end(1)?)))
}

/// A connection's socket as socket diagnosis describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Described {
    /// Its [`Routing`], without SO_DONTROUTE and flow label, which are not reported.
    pub routing: Routing,
    /// How many segments it has dropped.
    pub drops: u32,
    /// Whether a process has a descriptor of the socket.
    pub held: bool,
    /// Linux's number of the connection's state.
    pub state: u8,
    /// Bytes that its program has not read.
    pub unread: u32,
    /// Bytes that its peer has not acknowledged.
    pub unacknowledged: u32,
}

/// Describes a connection's socket, without waiting for its lock. `netlink` is of family [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's; `ENOENT` if there is no such connection here, `ESTALE` if it is another socket's than the
/// one with this cookie.
pub fn describe(netlink: &Netlink, flow: &Flow, cookie: u64) -> io::Result<Described> {
    const DROPS: usize = 4 * 8;
    const STATE: usize = 1;
    const INTERFACE: usize = 4 + 36;
    const RECEIVE_QUEUE: usize = 56;
    const SEND_QUEUE: usize = 60;
    const USER: usize = 64;
    const INODE: usize = 68;
    const INET_DIAG_MARK: u16 = 15;
    let class = if flow.is_v4() { INET_DIAG_TOS } else { INET_DIAG_TCLASS };
    let mut found = None;
    let request = Request::new(SOCK_DIAG_BY_FAMILY, 0, &request_header(flow, cookie_bytes(Some(cookie))));
    netlink.ask(request, |body| {
        let native = |at: usize| body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
        let attribute = |wanted| attributes(body, ANSWER).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let mark = attribute(INET_DIAG_MARK).and_then(|value| value.try_into().ok()).map_or(0, u32::from_ne_bytes);
        let class = attribute(class).and_then(|value| value.first().copied()).unwrap_or(0);
        let memory = attribute(INET_DIAG_SKMEMINFO).and_then(|memory| memory.get(DROPS..DROPS + 4));
        let drops = memory.and_then(|drops| drops.try_into().ok()).map_or(0, u32::from_ne_bytes);
        let (Some(device), Some(user), Some(inode)) = (native(INTERFACE), native(USER), native(INODE)) else { return };
        let routing = Routing { mark, device, user, class, ..Routing::default() };
        let (unread, unacknowledged) = (native(RECEIVE_QUEUE).unwrap_or(0), native(SEND_QUEUE).unwrap_or(0));
        let state = body.get(STATE).copied().unwrap_or(0);
        found = Some(Described { routing, drops, held: inode != 0, state, unread, unacknowledged });
    })?;
    found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// Whether the socket with this cookie listens at an address and port. `netlink` is of family
/// [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's.
pub fn is_listening(netlink: &Netlink, local: SocketAddr, cookie: u64) -> io::Result<bool> {
    let local = Endpoint::from(local);
    let nobody = if local.is_v4() { Endpoint::v4([0; 4], 0) } else { Endpoint::v6([0; 16], 0) };
    let flow = Flow { local, remote: nobody, device: 0 };
    match netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, 0, &request_header(&flow, cookie_bytes(Some(cookie)))), |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A cookie in the form of requests: two words, the low one first.
fn cookie_bytes(cookie: Option<u64>) -> [u8; 8] {
    let Some(cookie) = cookie else { return ANY_COOKIE };
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&(cookie as u32).to_ne_bytes());
    bytes[4..].copy_from_slice(&((cookie >> 32) as u32).to_ne_bytes());
    bytes
}

/// Destroys a connection in the kernel, whichever process has its socket, as ss(8) does with `--kill`. With a cookie,
/// only the connection of the socket that has this cookie. `netlink` is of family
/// [`crate::netlink::SOCK_DIAG`].
///
/// # Errors
/// The failed system call's; `ENOENT` if there is no such connection here, `EOPNOTSUPP` if this kernel cannot
/// (CONFIG_INET_DIAG_DESTROY).
pub fn destroy(netlink: &Netlink, flow: &Flow, cookie: Option<u64>) -> io::Result<()> {
    let (_, cookie) = find(netlink, flow, cookie)?;
    netlink.ask(Request::new(SOCK_DESTROY, ACK, &request_header(flow, cookie)), |_| {})
}

/// As [`request_header`], for TCP_INFO.
fn request_with_info(flow: &Flow, cookie: [u8; 8]) -> Vec<u8> {
    const EXTENSIONS: usize = 2;
    let mut header = request_header(flow, cookie);
    header[EXTENSIONS] |= INET_DIAG_INFO_BIT;
    header
}

/// A request's header (`struct inet_diag_req_v2`) for one connection.
fn request_header(flow: &Flow, cookie: [u8; 8]) -> Vec<u8> {
    let v4 = flow.is_v4();
    let mut header = vec![if v4 { libc::AF_INET } else { libc::AF_INET6 } as u8, 6, INET_DIAG_FURTHER_BITS, 0];
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
    // The kernel finds a socket that is bound to a device by that device only.
    header.extend_from_slice(&flow.device.to_ne_bytes());
    header.extend_from_slice(&cookie);
    header
}
