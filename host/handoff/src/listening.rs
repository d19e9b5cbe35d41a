//! A listening socket whose connections the NIC is to make: whether it can, and what the sockets of these connections
//! inherit.

use crate::examine::{state_name, system};
use crate::{shell, unenforced};
use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use baton_moves::Refusal;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const TCP: i32 = libc::IPPROTO_TCP;

/// Longest value of an option that is inherited, in bytes.
const LONGEST: usize = 16;

/// Options that a connection's socket inherits from its listener: SO_REUSEADDR, SO_KEEPALIVE, SO_OOBINLINE,
/// SO_PRIORITY, SO_LINGER, SO_RCVLOWAT, SO_RCVTIMEO, SO_SNDTIMEO, SO_BUSY_POLL; TCP_NODELAY, TCP_CORK, TCP_KEEPIDLE,
/// TCP_KEEPINTVL, TCP_KEEPCNT, TCP_SYNCNT, TCP_LINGER2, TCP_WINDOW_CLAMP, TCP_CONGESTION, TCP_USER_TIMEOUT,
/// TCP_NOTSENT_LOWAT; IP_TOS, IP_TTL, IPV6_UNICAST_HOPS, IPV6_TCLASS.
const INHERITED: [(i32, i32); 24] = [
    (1, 2),
    (1, 9),
    (1, 10),
    (1, 12),
    (1, 13),
    (1, 18),
    (1, 20),
    (1, 21),
    (1, 46),
    (6, 1),
    (6, 3),
    (6, 4),
    (6, 5),
    (6, 6),
    (6, 7),
    (6, 8),
    (6, 10),
    (6, 13),
    (6, 18),
    (6, 25),
    (0, 1),
    (0, 2),
    (41, 16),
    (41, 67),
];

/// SO_BUF_LOCK, its bits, and the options that it locks.
const BUF_LOCK: i32 = 72;
const LOCKED: [(i32, i32); 2] = [(1, libc::SO_SNDBUF), (2, libc::SO_RCVBUF)];

/// Options with which only the kernel can serve a listener: SO_REUSEPORT, SO_BINDTODEVICE, SO_MARK, TCP_DEFER_ACCEPT,
/// TCP_FASTOPEN, IP_TRANSPARENT, IPV6_TRANSPARENT.
const KERNEL_ONLY: [(i32, i32, &str); 7] = [
    (1, 15, "SO_REUSEPORT"),
    (1, 25, "SO_BINDTODEVICE"),
    (1, 36, "SO_MARK"),
    (6, 9, "TCP_DEFER_ACCEPT"),
    (6, 23, "TCP_FASTOPEN"),
    (0, 19, "IP_TRANSPARENT"),
    (41, 75, "IPV6_TRANSPARENT"),
];

/// A listening socket, as far as the NIC and the sockets of its connections need to know it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Listening {
    /// The kernel's number of the socket, the same for all its descriptors.
    pub cookie: u64,
    /// Its address and port.
    pub local: SocketAddr,
    /// It is an IPv6 socket.
    pub v6: bool,
    /// An IPv6 socket that also accepts connections by IPv4.
    pub dual: bool,
    /// Length of its accept queue, as the program has set it.
    pub backlog: u32,
    /// Options that differ from a new socket's: level, option, value.
    options: Vec<(i32, i32, Vec<u8>)>,
}

fn value(fd: BorrowedFd<'_>, level: i32, option: i32) -> Option<Vec<u8>> {
    let mut raw = [0u8; LONGEST];
    let length = socket::get_bytes(fd, level, option, &mut raw).ok()?;
    Some(raw[..length.min(LONGEST)].to_vec())
}

/// Checks whether the NIC can open a connection from a socket.
///
/// # Errors
/// Why only the kernel can.
pub fn check_unconnected(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    const CLOSED: u8 = 7;
    const FASTOPEN_CONNECT: (i32, i32, &str) = (6, 30, "TCP_FASTOPEN_CONNECT");
    if socket::get(fd, SOL_SOCKET, libc::SO_PROTOCOL).unwrap_or(0) != libc::IPPROTO_TCP {
        return Err(Refusal::NotTcp);
    }
    if !socket::is_of_this_namespace(fd).map_err(|error| system("SO_NETNS_COOKIE", &error))? {
        return Err(Refusal::OtherNamespace);
    }
    let info = TcpInfo::read(fd).map_err(|error| system("TCP_INFO", &error))?;
    if info.state != CLOSED || socket::peer_address(fd).is_ok() {
        return Err(Refusal::State(state_name(info.state)));
    }
    for (level, option, name) in KERNEL_ONLY.into_iter().chain([FASTOPEN_CONNECT]) {
        let set = |value: Vec<u8>| value.iter().any(|byte| *byte != 0);
        if (level, option) != TCP_FASTOPEN && value(fd, level, option).is_some_and(set) {
            return Err(Refusal::Option(name));
        }
    }
    unenforced::check(fd)
}

/// Concerns listeners only.
const TCP_FASTOPEN: (i32, i32) = (6, 23);

/// SO_DOMAIN and SO_ACCEPTCONN.
const DOMAIN: i32 = 39;
const ACCEPTCONN: i32 = 30;

impl Listening {
    /// Examines a listening socket.
    ///
    /// # Errors
    /// Why only the kernel can make its connections.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Listening, Refusal> {
        let get = |level, option| socket::get(fd, level, option).unwrap_or(0);
        if get(SOL_SOCKET, libc::SO_PROTOCOL) != libc::IPPROTO_TCP || get(SOL_SOCKET, ACCEPTCONN) == 0 {
            return Err(Refusal::NotTcp);
        }
        if !socket::is_of_this_namespace(fd).map_err(|error| system("SO_NETNS_COOKIE", &error))? {
            return Err(Refusal::OtherNamespace);
        }
        for (level, option, name) in KERNEL_ONLY {
            if value(fd, level, option).is_some_and(|value| value.iter().any(|byte| *byte != 0)) {
                return Err(Refusal::Option(name));
            }
        }
        if shell::read_filter(fd).is_ok_and(|filter| !filter.is_empty()) {
            return Err(Refusal::Option("SO_ATTACH_FILTER"));
        }
        unenforced::check(fd)?;
        let v6 = get(SOL_SOCKET, DOMAIN) == libc::AF_INET6;
        let dual = v6 && get(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == 0;
        let local = socket::local_address(fd).map_err(|error| system("getsockname", &error))?;
        let cookie = socket::cookie(fd).map_err(|error| system("SO_COOKIE", &error))?;
        let fresh = socket::stream(v6, 0).map_err(|error| system("socket", &error))?;
        Ok(Listening { cookie, local, v6, dual, backlog: backlog(fd), options: differing(fd, &fresh) })
    }

    /// Makes an unconnected socket with the options that it inherits.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        let fd = socket::stream(self.v6, 0)?;
        for (level, option, value) in &self.options {
            socket::set_bytes(fd.as_fd(), *level, *option, value)?;
        }
        Ok(fd)
    }

    /// An address of one of its connections, as its sockets show it: IPv4 addresses are mapped at an IPv6 socket.
    pub fn shown(&self, address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(v4) if self.v6 => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
            _ => address,
        }
    }

    /// Whether it accepts connections to an address of this host.
    pub fn accepts(&self, address: IpAddr) -> bool {
        let family = address.is_ipv6() == self.v6 || self.dual;
        let own = self.local.ip().to_canonical();
        family && (self.local.ip().is_unspecified() || own == address)
    }
}

/// The accept queue's length: tcpi_sacked of a listening socket.
fn backlog(fd: BorrowedFd<'_>) -> u32 {
    const SACKED: usize = 28;
    let mut raw = [0u8; SACKED + 4];
    match socket::get_bytes(fd, TCP, libc::TCP_INFO, &mut raw) {
        Ok(length) if length >= raw.len() => u32::from_ne_bytes([raw[SACKED], raw[SACKED + 1], raw[SACKED + 2], raw[SACKED + 3]]),
        _ => 1,
    }
}

/// The options of a socket that differ from those of a new one.
fn differing(fd: BorrowedFd<'_>, fresh: &OwnedFd) -> Vec<(i32, i32, Vec<u8>)> {
    let differs = |(level, option): (i32, i32)| {
        let own = value(fd, level, option)?;
        (value(fresh.as_fd(), level, option).as_ref() != Some(&own)).then_some((level, option, own))
    };
    let mut options: Vec<_> = INHERITED.into_iter().filter_map(differs).collect();
    let locks = socket::get(fd, SOL_SOCKET, BUF_LOCK).unwrap_or(0);
    for (_, option) in LOCKED.into_iter().filter(|(lock, _)| locks & lock != 0) {
        if let Ok(bytes) = socket::get(fd, SOL_SOCKET, option) {
            // The kernel returns twice what was set.
            options.push((SOL_SOCKET, option, (bytes / 2).to_ne_bytes().to_vec()));
        }
    }
    options
}
