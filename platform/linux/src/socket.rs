//! Socket options and queries, as safe functions over a borrowed descriptor.

use baton_shm::Region;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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

/// Repeats a call while signals interrupt it.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
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

/// A socket address in the kernel's format.
pub struct RawAddress {
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
                // SAFETY: as above.
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
                // SAFETY: the family says that the storage contains this type.
                let raw = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
                Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let raw = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in6>() };
                let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
                Ok(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), raw.sin6_flowinfo, raw.sin6_scope_id).into())
            }
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, "not an IP socket")),
        }
    }
}

/// The socket's own address.
///
/// # Errors
/// The failed system call's, or `Unsupported` for a socket that is not IP.
pub fn local_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    address_from(fd, libc::getsockname)
}

/// The peer's address.
///
/// # Errors
/// As [`local_address`].
pub fn peer_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    address_from(fd, libc::getpeername)
}

type AddressCall = unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn address_from(fd: BorrowedFd<'_>, call: AddressCall) -> io::Result<SocketAddr> {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: the buffer is as long as it says.
    check(unsafe { call(fd.as_raw_fd(), storage.as_mut_ptr().cast(), &mut length) })?;
    // SAFETY: zeroed, then partly overwritten with plain data.
    RawAddress::parse(unsafe { storage.assume_init_ref() })
}

/// Binds to an address.
///
/// # Errors
/// The failed system call's.
pub fn bind(fd: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let raw = RawAddress::new(address);
    let (pointer, length) = raw.as_parts();
    // SAFETY: `raw` outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), pointer, length) }).map(|_| ())
}

/// Connects; in repair mode, only sets the peer.
///
/// # Errors
/// The failed system call's.
pub fn connect(fd: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let raw = RawAddress::new(address);
    let (pointer, length) = raw.as_parts();
    // SAFETY: `raw` outlives the call.
    check(unsafe { libc::connect(fd.as_raw_fd(), pointer, length) }).map(|_| ())
}

/// Dissolves the association of a socket (connect to AF_UNSPEC), and clears the error that this sets.
///
/// # Errors
/// The failed system call's.
pub fn disconnect(fd: BorrowedFd<'_>) -> io::Result<()> {
    let raw = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: a live sockaddr of the given length.
    check(unsafe { libc::connect(fd.as_raw_fd(), &raw, size_of::<libc::sockaddr>() as libc::socklen_t) })?;
    get(fd, libc::SOL_SOCKET, libc::SO_ERROR)?;
    Ok(())
}

/// Resets a connection and its peer. The next call fails with ECONNRESET, as after a reset by the peer; later ones return the
/// end of the stream.
///
/// # Errors
/// The failed system call's.
pub fn reset(fd: BorrowedFd<'_>) -> io::Result<()> {
    let raw = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: a live sockaddr of the given length.
    check(unsafe { libc::connect(fd.as_raw_fd(), &raw, size_of::<libc::sockaddr>() as libc::socklen_t) })?;
    // The kernel says that it has no peer any more, but shuts both directions down nevertheless.
    // SAFETY: no pointers are involved.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RDWR) };
    Ok(())
}

/// A range of a circular area of shared memory, as the one or two pieces that system calls need.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    pieces: [(*mut u8, usize); 2],
    _region: PhantomData<&'a Region>,
}

impl<'a> Pieces<'a> {
    /// `length` bytes of an area (offset, size) from the byte of sequence number `seq` on. The size is a power of two, and a
    /// byte lies at its sequence number modulo the size. None if the area lies outside the region or is too small.
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

    /// What remains after the first `count` bytes.
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
            // SAFETY: the piece lies in a mapped region, to whose bytes nobody holds references.
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
    // SAFETY: as above; nobody holds references into shared memory, only atomics and copies.
    check_size(unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message(&mut vectors), flags) })
}

/// Sends without waiting and without SIGPIPE.
///
/// # Errors
/// The failed system call's.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the pointer and length describe `bytes`.
    check_size(unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

/// Receives without waiting.
///
/// # Errors
/// The failed system call's.
pub fn receive(fd: BorrowedFd<'_>, out: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the pointer and length describe `out`.
    check_size(unsafe { libc::recv(fd.as_raw_fd(), out.as_mut_ptr().cast(), out.len(), libc::MSG_DONTWAIT) })
}

/// Shuts the sending side down.
///
/// # Errors
/// The failed system call's.
pub fn shutdown_write(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers are involved.
    check(unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) }).map(|_| ())
}

/// Makes a socket use CUBIC, with which comparisons are made, whatever the host's default is.
///
/// # Errors
/// The failed system call's.
pub fn use_cubic(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic")
}

/// Makes a stream socket of a protocol (0 for TCP, 262 for Multipath TCP), neither bound nor connected.
///
/// # Errors
/// The failed system call's.
pub fn stream(v6: bool, protocol: i32) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: no pointers are involved.
    let raw = check(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

fn status(fd: BorrowedFd<'_>) -> io::Result<libc::stat> {
    let mut status = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: room for one stat, which is plain data.
    check(unsafe { libc::fstat(fd.as_raw_fd(), status.as_mut_ptr()) })?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { status.assume_init() })
}

/// The inode of a descriptor's file, which identifies sockets in /proc.
///
/// # Errors
/// The failed system call's.
pub fn inode(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(status(fd)?.st_ino)
}

/// The user id of a socket's owner, which routing rules can match.
///
/// # Errors
/// The failed system call's.
pub fn owner(fd: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(status(fd)?.st_uid)
}

/// Sends one byte as urgent data.
///
/// # Errors
/// The failed system call's.
pub fn send_urgent(fd: BorrowedFd<'_>, byte: u8) -> io::Result<()> {
    // SAFETY: one live byte.
    check_size(unsafe { libc::send(fd.as_raw_fd(), (&raw const byte).cast(), 1, libc::MSG_OOB | libc::MSG_NOSIGNAL) }).map(|_| ())
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
    Ok(namespace(fd)? == namespace(stream(false, 0)?.as_fd())?)
}

/// The cookie of a socket's network namespace, which no other gets while the machine runs. For an accepted Unix socket it is the
/// peer's namespace.
///
/// # Errors
/// The failed system call's.
pub fn namespace(fd: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_NETNS_COOKIE: i32 = 71;
    let mut raw = [0u8; 8];
    get_bytes(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut raw)?;
    Ok(u64::from_ne_bytes(raw))
}

/// Makes close(2) reset the connection instead of closing it in order (SO_LINGER of 0).
///
/// # Errors
/// The failed system call's.
pub fn reset_on_close(fd: BorrowedFd<'_>) -> io::Result<()> {
    let on_for_no_time = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_LINGER, &on_for_no_time)
}

/// Queues bytes that the program has sent already, even more than the socket's buffer would take.
///
/// # Errors
/// The failed system call's.
pub fn send_beyond_limit(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    const SO_BUF_LOCK: i32 = 72;
    if bytes.is_empty() {
        return Ok(());
    }
    let lock = get(fd, libc::SOL_SOCKET, SO_BUF_LOCK)?;
    let queued = queue_bytes(fd, SIOCOUTQ)? as usize;
    let wanted = (queued + bytes.len()) * 2 + 65536;
    set(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, wanted.min(1 << 30) as i32)?;
    while !bytes.is_empty() {
        bytes = &bytes[send(fd, bytes)?..];
    }
    set(fd, libc::SOL_SOCKET, SO_BUF_LOCK, lock)
}
