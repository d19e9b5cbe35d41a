//! Netlink requests and their answers, for routes, connection tracking, nftables, IPsec and socket diagnosis: a message
//! or two of each.

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;

/// Routes, links, addresses, neighbours.
pub const ROUTE: i32 = 0;
/// Socket diagnosis.
pub const SOCK_DIAG: i32 = 4;
/// IPsec.
pub const XFRM: i32 = 6;
/// The subsystems of netfilter, connection tracking among them.
pub const NETFILTER: i32 = 12;

pub(crate) const REQUEST: u16 = 1;
pub(crate) const ACK: u16 = 4;
pub(crate) const DUMP: u16 = 0x300;
pub(crate) const CREATE_REPLACE: u16 = 0x400 | 0x100;
pub(crate) const CREATE_EXCLUSIVE: u16 = 0x400 | 0x200;
/// Most bytes of answers that are received at once.
const ANSWER_BYTES: usize = 65536;
const NESTED: u16 = 0x8000;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// A request under construction.
pub struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A message of a type, with its family's fixed header.
    pub fn new(kind: u16, flags: u16, header: &[u8]) -> Self {
        let mut bytes = vec![0u8; 16];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | REQUEST).to_ne_bytes());
        bytes[8..12].copy_from_slice(&1u32.to_ne_bytes());
        bytes.extend_from_slice(header);
        let mut request = Request { bytes };
        request.pad();
        request
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Appends an attribute.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.bytes.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// Appends an attribute that contains others.
    #[must_use]
    pub fn nested(self, kind: u16, fill: impl FnOnce(Request) -> Request) -> Self {
        self.nested_behind(kind, &[], fill)
    }

    /// Appends an attribute that contains a fixed header, followed by others.
    #[must_use]
    pub fn nested_behind(mut self, kind: u16, header: &[u8], fill: impl FnOnce(Request) -> Request) -> Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(header);
        let mut filled = fill(self);
        let length = (filled.bytes.len() - start) as u16;
        filled.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        filled.bytes[start + 2..start + 4].copy_from_slice(&(kind | NESTED).to_ne_bytes());
        filled
    }
}

/// A netlink socket, in the network namespace in which it was opened.
pub struct Netlink {
    fd: OwnedFd,
}

impl Netlink {
    /// Opens a socket of one family.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn open(family: i32) -> io::Result<Netlink> {
        // None is protocol 0, the routes.
        let protocol = NonZeroU32::new(family as u32).map(Protocol::from_raw);
        let fd = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        Ok(Netlink { fd })
    }

    /// Sends a request and passes the body of every answer to `each`, until the kernel is done.
    ///
    /// # Errors
    /// The kernel's answer if it is an error, or the system's.
    pub fn ask(&self, mut request: Request, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let length = request.bytes.len() as u32;
        request.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        rustix::net::send(&self.fd, &request.bytes, SendFlags::empty())?;
        let flags = u16::from_ne_bytes([request.bytes[6], request.bytes[7]]);
        let several = flags & DUMP == DUMP;
        let acknowledged = flags & ACK != 0;
        // Not zeroed: that would take longer than most answers.
        let mut buffer = Vec::with_capacity(ANSWER_BYTES);
        loop {
            buffer.clear();
            rustix::net::recv(&self.fd, rustix::buffer::spare_capacity(&mut buffer), RecvFlags::empty())?;
            let mut rest = &buffer[..];
            while rest.len() >= 16 {
                let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
                let kind = u16::from_ne_bytes([rest[4], rest[5]]);
                if length < 16 || length > rest.len() {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let body = &rest[16..length];
                match kind {
                    ERROR => {
                        let code = i32::from_ne_bytes([body[0], body[1], body[2], body[3]]);
                        return if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-code)) };
                    }
                    DONE => return Ok(()),
                    _ => each(body),
                }
                rest = &rest[length.next_multiple_of(4).min(rest.len())..];
            }
            if !several && !acknowledged {
                return Ok(());
            }
        }
    }
}

impl Netlink {
    /// Sends several requests in one system call, and calls `refused` with the index and the error of each request that
    /// the kernel refused. The requests must be of kinds that have no other answer.
    ///
    /// # Errors
    /// The system's; it is then unknown which requests were carried out.
    pub fn ask_all(&self, requests: &[Request], mut refused: impl FnMut(usize, &io::Error)) -> io::Result<()> {
        let Some(last) = requests.len().checked_sub(1) else { return Ok(()) };
        let mut bytes = Vec::with_capacity(requests.iter().map(|request| request.bytes.len()).sum());
        for (place, request) in requests.iter().enumerate() {
            let start = bytes.len();
            bytes.extend_from_slice(&request.bytes);
            bytes[start..start + 4].copy_from_slice(&(request.bytes.len() as u32).to_ne_bytes());
            bytes[start + 8..start + 12].copy_from_slice(&(place as u32).to_ne_bytes());
            if place == last {
                // The kernel sends one acknowledgement, after the refusals of the other requests.
                let flags = u16::from_ne_bytes([bytes[start + 6], bytes[start + 7]]) | ACK;
                bytes[start + 6..start + 8].copy_from_slice(&flags.to_ne_bytes());
            }
        }
        rustix::net::send(&self.fd, &bytes, SendFlags::empty())?;
        let mut buffer = Vec::with_capacity(ANSWER_BYTES);
        loop {
            buffer.clear();
            rustix::net::recv(&self.fd, rustix::buffer::spare_capacity(&mut buffer), RecvFlags::empty())?;
            let mut rest = &buffer[..];
            while rest.len() >= 20 {
                let word = |at: usize| u32::from_ne_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
                let (length, place, code) = (word(0) as usize, word(8) as usize, word(16) as i32);
                if length < 20 || length > rest.len() || rest[4..6] != ERROR.to_ne_bytes() {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                if code != 0 {
                    refused(place, &io::Error::from_raw_os_error(-code));
                }
                if place == last {
                    return Ok(());
                }
                rest = &rest[length.next_multiple_of(4).min(rest.len())..];
            }
        }
    }
}

/// Route groups that report changes of links, neighbours, addresses, routes and rules, IPv4 and IPv6, and of links'
/// settings (rp_filter).
pub const ROUTE_CHANGES: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 1 << 18 | 1 << 23;
/// The route group that reports changes of links.
pub const LINK_CHANGES: u32 = 0x1;
/// The route group that reports changes of queueing disciplines and filters (tc).
pub const TRAFFIC_CONTROL_CHANGES: u32 = 0x8;
/// The groups that report changes of IPsec policies, and policies that expire.
pub const POLICY_CHANGES: u32 = 0x8 | 0x2;
/// The netfilter group that reports changes of nftables rules.
pub const RULE_CHANGES: u32 = 1 << 6;

/// A netlink socket that receives notifications of changes.
pub struct Changes {
    fd: OwnedFd,
}

impl Changes {
    /// Subscribes to groups of a family, in the calling thread's network namespace.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn listen(family: i32, groups: u32) -> io::Result<Changes> {
        let Netlink { fd } = Netlink::open(family)?;
        // The kernel chooses the port.
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, groups))?;
        Ok(Changes { fd })
    }

    /// Whether notifications are waiting to be read. The kernel reports a change before the call that made it returns.
    pub fn are_waiting(&self) -> bool {
        !matches!(rustix::net::recv(&self.fd, &mut [0u8], RecvFlags::DONTWAIT | RecvFlags::PEEK), Err(Errno::WOULDBLOCK))
    }

    /// Reads all waiting notifications. Returns whether there were any, or some were lost.
    pub fn any(&self) -> bool {
        let mut any = false;
        self.each(|_, _| any = true);
        any
    }

    /// Reads all waiting notifications, and calls `each` with the type and the body of each. If notifications were lost
    /// it calls `each` once with type 0 and an empty body.
    pub fn each(&self, mut each: impl FnMut(u16, &[u8])) {
        let mut buffer = [0u8; 16384];
        loop {
            // With MSG_TRUNC the length of a longer message is its full one.
            let length = match rustix::net::recv(&self.fd, &mut buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok((_, length)) => length,
                Err(Errno::WOULDBLOCK) => return,
                Err(Errno::INTR) => continue,
                Err(_) => usize::MAX,
            };
            let Some(mut rest) = buffer.get(..length) else {
                each(0, &[]);
                continue;
            };
            while rest.len() >= 16 {
                let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
                if length < 16 || length > rest.len() {
                    each(0, &[]);
                    break;
                }
                each(u16::from_ne_bytes([rest[4], rest[5]]), &rest[16..length]);
                rest = &rest[length.next_multiple_of(4).min(rest.len())..];
            }
        }
    }
}

impl std::os::fd::AsFd for Changes {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The attributes after a message's fixed header of `skip` bytes.
pub fn attributes(body: &[u8], skip: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = body.get(skip..).unwrap_or_default();
    std::iter::from_fn(move || {
        if rest.len() < 4 {
            return None;
        }
        let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]]));
        let kind = u16::from_ne_bytes([rest[2], rest[3]]) & 0x3fff;
        if length < 4 || length > rest.len() {
            return None;
        }
        let value = &rest[4..length];
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
        Some((kind, value))
    })
}
