//! Socket options and queries, as safe functions over a borrowed descriptor.

use baton_shm::Region;
use rustix::fs::fstat;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, Shutdown, SocketAddrAny, SocketFlags, SocketType};
use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Turns a system call's result of -1 into errno's error.
pub fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// As [`check`], for calls that return a length in bytes.
///
/// # Errors
/// The system's.
pub fn check_size(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sets an option from raw bytes.
///
/// # Errors
/// The failed system call's.
pub fn set_bytes(fd: BorrowedFd<'_>, level: i32, option: i32, value: &[u8]) -> io::Result<()> {
    // SAFETY: the pointer and length describe `value`, which outlives the call.
    let done = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    check(done).map(|_| ())
}

/// Sets an integer option.
///
/// # Errors
/// The failed system call's.
pub fn set(fd: BorrowedFd<'_>, level: i32, option: i32, value: i32) -> io::Result<()> {
    set_bytes(fd, level, option, &value.to_ne_bytes())
}

/// Reads an option into `out` and returns its length in bytes.
///
/// # Errors
/// The failed system call's.
pub fn get_bytes(fd: BorrowedFd<'_>, level: i32, option: i32, out: &mut [u8]) -> io::Result<usize> {
    let mut length = out.len() as libc::socklen_t;
    // SAFETY: the pointer and length describe `out`.
    let done = unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, out.as_mut_ptr().cast(), &mut length) };
    check(done).map(|_| length as usize)
}

/// Reads an integer option.
///
/// # Errors
/// The failed system call's.
pub fn get(fd: BorrowedFd<'_>, level: i32, option: i32) -> io::Result<i32> {
    let mut value = [0u8; 4];
    get_bytes(fd, level, option, &mut value)?;
    Ok(i32::from_ne_bytes(value))
}

/// An ioctl that returns a number of bytes (SIOCINQ, SIOCOUTQ, SIOCOUTQNSD).
///
/// # Errors
/// The failed system call's.
pub fn queue_bytes(fd: BorrowedFd<'_>, request: libc::c_ulong) -> io::Result<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: these requests write one int.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request as _, &mut value) })?;
    Ok(value.max(0) as u32)
}

/// Request for the number of unread bytes.
pub const SIOCINQ: libc::c_ulong = 0x541b;
/// Request for the number of unacknowledged and unsent bytes.
pub const SIOCOUTQ: libc::c_ulong = 0x5411;
/// Request for the number of unsent bytes.
pub const SIOCOUTQNSD: libc::c_ulong = 0x894b;

/// Whether this is a UDP socket of the calling thread's network namespace.
pub fn is_udp(fd: BorrowedFd<'_>) -> bool {
    let is = |option, value| get(fd, libc::SOL_SOCKET, option).is_ok_and(|found| found == value);
    is(libc::SO_TYPE, libc::SOCK_DGRAM) && is(libc::SO_PROTOCOL, libc::IPPROTO_UDP) && is_of_this_namespace(fd).unwrap_or(false)
}

/// Sends an empty datagram from a UDP socket, without waiting.
///
/// # Errors
/// The failed system call's.
pub fn send_empty(fd: BorrowedFd<'_>, to: SocketAddr) -> io::Result<()> {
    rustix::net::sendto(fd, &[], rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL, &to)?;
    Ok(())
}

/// The socket's own address.
///
/// # Errors
/// The failed system call's, or `Unsupported` for a socket that is not IP.
pub fn local_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    ip_address(rustix::net::getsockname(fd)?)
}

/// The peer's address.
///
/// # Errors
/// As [`local_address`].
pub fn peer_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    rustix::net::getpeername(fd)?.map_or_else(|| Err(not_ip()), ip_address)
}

fn not_ip() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "not an IP socket")
}

fn ip_address(address: SocketAddrAny) -> io::Result<SocketAddr> {
    SocketAddr::try_from(address).map(swap_flow_info).map_err(|_| not_ip())
}

/// Translates between std's IPv6 addresses, whose flow information is in network order, and rustix's, whose flow
/// information is in host order.
fn swap_flow_info(mut address: SocketAddr) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut address {
        v6.set_flowinfo(v6.flowinfo().to_be());
    }
    address
}

/// Binds to an address.
///
/// # Errors
/// The failed system call's.
pub fn bind(fd: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    Ok(rustix::net::bind(fd, &swap_flow_info(address))?)
}

/// As [`bind`], to a port that the kernel chooses now, also where the socket's program leaves that to connect(2)
/// (IP_BIND_ADDRESS_NO_PORT, an option of IPv6 sockets, too).
///
/// # Errors
/// The failed system call's.
pub fn bind_now(fd: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let later = get(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT)?;
    if later == 0 {
        return bind(fd, address);
    }
    set(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 0)?;
    let bound = bind(fd, address);
    set(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, later)?;
    bound
}

/// Listens, with room for so many connections that wait.
///
/// # Errors
/// The failed system call's.
pub fn listen(fd: BorrowedFd<'_>, backlog: i32) -> io::Result<()> {
    Ok(rustix::net::listen(fd, backlog)?)
}

/// Connects; in repair mode, only sets the peer.
///
/// # Errors
/// The failed system call's.
pub fn connect(fd: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    Ok(rustix::net::connect(fd, &swap_flow_info(address))?)
}

/// Dissolves the association of a socket (connect to AF_UNSPEC), and clears the error that this sets.
///
/// # Errors
/// The failed system call's.
pub fn disconnect(fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::net::connect_unspec(fd)?;
    get(fd, libc::SOL_SOCKET, libc::SO_ERROR)?;
    Ok(())
}

/// Resets a connection, and sends the peer a reset. The program's next call fails with ECONNRESET, as after a reset by
/// the peer; later calls return the end of the stream.
///
/// # Errors
/// The failed system call's.
pub fn reset(fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::net::connect_unspec(fd)?;
    // The kernel returns an error, since the socket has no peer any more, but shuts both directions down nevertheless.
    let _ = rustix::net::shutdown(fd, Shutdown::Both);
    Ok(())
}

/// A range of a circular area of shared memory, as the one or two pieces that system calls need.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    pieces: [(*mut u8, usize); 2],
    _region: PhantomData<&'a Region>,
}

impl<'a> Pieces<'a> {
    /// `length` bytes of an area (offset, size) from the byte of sequence number `seq` on. The size is a power of two,
    /// and a byte lies at its sequence number modulo the size. None if the area lies outside the region or is too
    /// small.
    pub fn of(region: &'a Region, area: (u32, u32), seq: u32, length: u32) -> Option<Pieces<'a>> {
        let (base, size) = (area.0 as usize, area.1);
        if !size.is_power_of_two() || length > size {
            return None;
        }
        let offset = seq & (size - 1);
        let first = length.min(size - offset);
        let piece = |at: usize, length: u32| Some((region.span(at, length as usize)?.as_ptr(), length as usize));
        let pieces = [piece(base + offset as usize, first)?, piece(base, length - first)?];
        Some(Pieces { pieces, _region: PhantomData })
    }

    /// Bytes of both pieces.
    pub fn length(&self) -> usize {
        self.pieces[0].1 + self.pieces[1].1
    }

    /// The pieces that remain after the first `count` bytes.
    pub fn skip(&self, count: usize) -> Pieces<'a> {
        let mut left = count;
        let pieces = self.pieces.map(|(start, length)| {
            let step = left.min(length);
            left -= step;
            (start.wrapping_add(step), length - step)
        });
        Pieces { pieces, ..*self }
    }

    /// The first `count` bytes.
    pub fn front(&self, count: usize) -> Pieces<'a> {
        let mut left = count;
        let pieces = self.pieces.map(|(start, length)| {
            let take = left.min(length);
            left -= take;
            (start, take)
        });
        Pieces { pieces, ..*self }
    }

    /// Copies bytes into the pieces, as many as fit.
    pub fn write(&self, bytes: &[u8]) {
        let (first, second) = bytes.split_at(bytes.len().min(self.pieces[0].1));
        for ((start, room), bytes) in self.pieces.into_iter().zip([first, second]) {
            // SAFETY: the piece lies in a mapped region, to whose bytes no references exist.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len().min(room)) };
        }
    }

    fn vectors(&self) -> [libc::iovec; 2] {
        self.pieces.map(|(start, length)| libc::iovec { iov_base: start.cast(), iov_len: length })
    }
}

/// A message header for the pieces.
fn message(vectors: &mut [libc::iovec; 2]) -> libc::msghdr {
    // SAFETY: msghdr is plain data, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = 2;
    message
}

/// Sends the pieces without SIGPIPE.
///
/// # Errors
/// The failed system call's.
pub fn send_pieces(fd: BorrowedFd<'_>, pieces: &Pieces<'_>, flags: i32) -> io::Result<usize> {
    let mut vectors = pieces.vectors();
    // SAFETY: the pieces lie in a mapped region, which their lifetime keeps mapped; the vectors live through the call.
    check_size(unsafe { libc::sendmsg(fd.as_raw_fd(), &message(&mut vectors), flags | libc::MSG_NOSIGNAL) })
}

/// Receives into the pieces.
///
/// # Errors
/// The failed system call's.
pub fn receive_pieces(fd: BorrowedFd<'_>, pieces: &Pieces<'_>, flags: i32) -> io::Result<usize> {
    let mut vectors = pieces.vectors();
    // SAFETY: the pieces lie in a mapped region, which their lifetime keeps mapped; the vectors live through the call.
    // No references into shared memory exist, only atomics and copies.
    check_size(unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message(&mut vectors), flags) })
}

/// Sends without waiting and without SIGPIPE.
///
/// # Errors
/// The failed system call's.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Receives without waiting.
///
/// # Errors
/// The failed system call's.
pub fn receive(fd: BorrowedFd<'_>, out: &mut [u8]) -> io::Result<usize> {
    let (_, length) = rustix::net::recv(fd, out, RecvFlags::DONTWAIT)?;
    Ok(length)
}

/// Shuts the sending side down.
///
/// # Errors
/// The failed system call's.
pub fn shutdown_write(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::net::shutdown(fd, Shutdown::Write)?)
}

/// Shuts the receiving side down: bytes that have been received can still be read, then comes the end of the stream.
///
/// # Errors
/// The failed system call's.
pub fn shutdown_read(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::net::shutdown(fd, Shutdown::Read)?)
}

/// Makes sends to a Unix socket fail if they bring descriptors; connections that a listener accepts inherit this. Linux
/// before 6.16 cannot do it: there the process that reads from the socket, or closes it, has to close the descriptors
/// that were sent. Returns whether this kernel can.
pub fn refuse_descriptors(fd: BorrowedFd<'_>) -> bool {
    const SO_PASSRIGHTS: i32 = 83;
    set(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, 0).is_ok()
}

/// Makes a socket use CUBIC, whatever the host's default is, so that comparisons are fair.
///
/// # Errors
/// The failed system call's.
pub fn use_cubic(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic")
}

/// Makes the kernel send at most so many bytes per second on a connection, evenly (SO_MAX_PACING_RATE).
///
/// # Errors
/// The failed system call's.
pub fn limit_rate(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &bytes.to_ne_bytes())
}

/// Whether a socket is in blocking mode.
///
/// # Errors
/// The failed system call's.
pub fn is_blocking(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(!rustix::fs::fcntl_getfl(fd)?.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Begins to connect, without waiting for the end of that.
///
/// # Errors
/// The failed system call's.
pub fn begin_connecting(fd: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let flags = fcntl_getfl(fd)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    let begun = connect(fd, address);
    fcntl_setfl(fd, flags)?;
    match begun {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(()),
        other => other,
    }
}

/// Makes a stream socket of a protocol (0 for TCP, 262 for Multipath TCP), neither bound nor connected.
///
/// # Errors
/// The failed system call's.
pub fn stream(v6: bool, protocol: i32) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    of_family(family as u16, libc::SOCK_STREAM as u32, protocol as u32)
}

/// Makes a socket of any family (`AF_INET`), type (`SOCK_STREAM`) and protocol, 0 for the family's own.
///
/// # Errors
/// The failed system call's.
pub fn of_family(family: u16, kind: u32, protocol: u32) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::from_raw(family), SocketType::from_raw(kind));
    let protocol = NonZeroU32::new(protocol).map(Protocol::from_raw);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?)
}

/// The inode of a descriptor's file, which identifies sockets in /proc.
///
/// # Errors
/// The failed system call's.
pub fn inode(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(fstat(fd)?.st_ino)
}

/// The user id of a socket's owner, which routing rules can match. Anything else is not asked: a file's server may
/// never answer.
///
/// # Errors
/// The failed system call's; `ENOTSOCK`.
pub fn owner(fd: BorrowedFd<'_>) -> io::Result<u32> {
    rustix::net::sockopt::socket_domain(fd)?;
    Ok(fstat(fd)?.st_uid)
}

/// User id of the process at the other end of a Unix socket, from the kernel: of the process that has connected or
/// listened.
///
/// # Errors
/// The failed system call's.
pub fn peer_user(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut raw = [0u8; 12];
    get_bytes(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut raw)?;
    Ok(u32::from_ne_bytes([raw[4], raw[5], raw[6], raw[7]]))
}

/// Sends one byte as urgent data.
///
/// # Errors
/// The failed system call's.
pub fn send_urgent(fd: BorrowedFd<'_>, byte: u8) -> io::Result<()> {
    rustix::net::send(fd, &[byte], SendFlags::OOB | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Index of the device that a socket is bound to, 0 for none: its program has bound it (SO_BINDTODEVICE), or its
/// addresses are link-local.
///
/// # Errors
/// The failed system call's.
pub fn device(fd: BorrowedFd<'_>) -> io::Result<u32> {
    const SO_BINDTOIFINDEX: i32 = 62;
    get(fd, libc::SOL_SOCKET, SO_BINDTOIFINDEX).map(|index| index as u32)
}

/// The socket's cookie: a number that the kernel gives to no other socket.
///
/// # Errors
/// The failed system call's.
pub fn cookie(fd: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_COOKIE: i32 = 57;
    let mut raw = [0u8; 8];
    get_bytes(fd, libc::SOL_SOCKET, SO_COOKIE, &mut raw)?;
    Ok(u64::from_ne_bytes(raw))
}

/// Whether a socket is in the calling thread's network namespace.
///
/// # Errors
/// The failed system call's; `ENOPROTOOPT` before Linux 5.14.
pub fn is_of_this_namespace(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(namespace(fd)? == own_namespace()?)
}

/// The cookie of the calling thread's network namespace; see [`namespace`].
///
/// # Errors
/// The failed system call's.
pub fn own_namespace() -> io::Result<u64> {
    namespace(stream(false, 0)?.as_fd())
}

/// The cookie of a socket's network namespace, which no other gets while the machine runs. For an accepted Unix socket
/// it is the peer's namespace.
///
/// # Errors
/// The failed system call's.
pub fn namespace(fd: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_NETNS_COOKIE: i32 = 71;
    let mut raw = [0u8; 8];
    get_bytes(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut raw)?;
    Ok(u64::from_ne_bytes(raw))
}

/// How often the SYN of a connection that the socket opens is sent again at most (TCP_SYNCNT).
///
/// # Errors
/// The failed system call's.
pub fn syn_retries(fd: BorrowedFd<'_>) -> io::Result<u32> {
    get(fd, libc::IPPROTO_TCP, libc::TCP_SYNCNT).map(|retries| retries as u32)
}

/// Milliseconds after which a connection ends whose segments are not acknowledged (TCP_USER_TIMEOUT), 0 for none.
///
/// # Errors
/// The failed system call's.
pub fn user_timeout(fd: BorrowedFd<'_>) -> io::Result<u32> {
    get(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT).map(|millis| millis as u32)
}

/// Whether close(2) does more than send a FIN: it waits, or resets the connection (SO_LINGER).
///
/// # Errors
/// The failed system call's.
pub fn lingers(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // The first of its two numbers.
    get(fd, libc::SOL_SOCKET, libc::SO_LINGER).map(|on| on != 0)
}

/// Makes close(2) reset the connection instead of closing it in order (SO_LINGER of 0).
///
/// # Errors
/// The failed system call's.
pub fn reset_on_close(fd: BorrowedFd<'_>) -> io::Result<()> {
    let on_for_no_time = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_LINGER, &on_for_no_time)
}
