//! Control connections between Baton's processes: messages that may carry descriptors, over Unix sockets that keep message
//! boundaries. They are used in programs with signals of their own: calls that a signal interrupts are repeated.

use crate::socket::{check, check_size, uninterrupted};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Most bytes of a message.
const MAX_MESSAGE: usize = 65536;
/// Most descriptors of a message.
const MAX_DESCRIPTORS: usize = 32;

/// A time limit of zero.
const NOW: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };

/// One end of a control connection.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

fn unix_socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are involved.
    let raw = check(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

fn unix_address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: sockaddr_un is plain data, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket's path is longer than 107 bytes"));
    }
    for (slot, byte) in address.sun_path.iter_mut().zip(bytes) {
        *slot = *byte as libc::c_char;
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

impl Channel {
    /// Makes two connected ends.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn pair() -> io::Result<(Channel, Channel)> {
        let mut raw = [0; 2];
        // SAFETY: room for two descriptors.
        check(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, raw.as_mut_ptr()) })?;
        // SAFETY: both descriptors are new and ours.
        let ends = raw.map(|fd| Channel { fd: unsafe { OwnedFd::from_raw_fd(fd) } });
        Ok(ends.into())
    }

    /// Connects to a listener.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn connect(path: &Path) -> io::Result<Channel> {
        let fd = unix_socket()?;
        let (address, length) = unix_address(path)?;
        // SAFETY: the pointer and length describe `address`.
        uninterrupted(|| check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) }))?;
        Ok(Channel { fd })
    }

    /// An end that was inherited or received.
    pub fn from_fd(fd: OwnedFd) -> Channel {
        Channel { fd }
    }

    /// Sends a message and descriptors.
    ///
    /// # Errors
    /// The failed system call's; `InvalidInput` for a message that is too long.
    pub fn send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(message, descriptors, 0)
    }

    /// As [`Channel::send`], but `WouldBlock` if the other end does not read.
    ///
    /// # Errors
    /// See there.
    pub fn try_send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(message, descriptors, libc::MSG_DONTWAIT)
    }

    fn send_with<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>], flags: i32) -> io::Result<()> {
        let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
        if bytes.len() > MAX_MESSAGE || descriptors.len() > MAX_DESCRIPTORS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "control message too long"));
        }
        let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: msghdr is plain data, for which zero is a value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &mut vector;
        header.msg_iovlen = 1;
        let mut control = [0u64; 32];
        if !descriptors.is_empty() {
            let raw: Vec<libc::c_int> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
            let size = size_of_val(raw.as_slice());
            header.msg_control = control.as_mut_ptr().cast();
            // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
            header.msg_controllen = unsafe { libc::CMSG_SPACE(size as u32) } as usize;
            // SAFETY: the control buffer is aligned, zeroed and larger than one message of MAX_DESCRIPTORS.
            unsafe {
                let first = libc::CMSG_FIRSTHDR(&header);
                (*first).cmsg_level = libc::SOL_SOCKET;
                (*first).cmsg_type = libc::SCM_RIGHTS;
                (*first).cmsg_len = libc::CMSG_LEN(size as u32) as usize;
                std::ptr::copy_nonoverlapping(raw.as_ptr().cast::<u8>(), libc::CMSG_DATA(first), size);
            }
        }
        // SAFETY: header, vector, bytes and control live through the call.
        let send = || check_size(unsafe { libc::sendmsg(self.fd.as_raw_fd(), &header, flags | libc::MSG_NOSIGNAL) });
        uninterrupted(send).map(|_| ())
    }

    /// Receives a message and its descriptors, waiting for one.
    ///
    /// # Errors
    /// `UnexpectedEof` when the other end is gone, `InvalidData` for what is not a message, else the system's.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<OwnedFd>)> {
        self.receive_with(0)
    }

    /// As [`Channel::receive`], but `WouldBlock` if none waits.
    ///
    /// # Errors
    /// See there.
    pub fn try_receive<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<OwnedFd>)> {
        self.receive_with(libc::MSG_DONTWAIT)
    }

    fn receive_with<T: DeserializeOwned>(&self, flags: i32) -> io::Result<(T, Vec<OwnedFd>)> {
        let mut bytes = vec![0u8; MAX_MESSAGE];
        let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: msghdr is plain data, for which zero is a value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        let mut control = [0u64; 32];
        header.msg_iov = &mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control);
        // SAFETY: header, vector, bytes and control live through the call.
        let receive = || check_size(unsafe { libc::recvmsg(self.fd.as_raw_fd(), &mut header, flags | libc::MSG_CMSG_CLOEXEC) });
        let got = uninterrupted(receive)?;
        let descriptors = received_descriptors(&header);
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let message = postcard::from_bytes(&bytes[..got]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok((message, descriptors))
    }

    /// Whether the other end is closed. Messages that were sent before may still wait here.
    pub fn is_hung_up(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one live pollfd.
        let ready = unsafe { libc::syscall(libc::SYS_ppoll, &raw mut poll, 1, &NOW, std::ptr::null::<u8>(), 8) };
        ready == 1 && poll.revents & (libc::POLLHUP | libc::POLLERR) != 0
    }

    /// User id of the process at the other end, from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn peer_user(&self) -> io::Result<u32> {
        let mut raw = [0u8; 12];
        crate::socket::get_bytes(self.fd.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, &mut raw)?;
        Ok(u32::from_ne_bytes([raw[4], raw[5], raw[6], raw[7]]))
    }

    /// Process id at the other end, from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn peer_process(&self) -> io::Result<u32> {
        let mut raw = [0u8; 12];
        crate::socket::get_bytes(self.fd.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, &mut raw)?;
        Ok(u32::from_ne_bytes([raw[0], raw[1], raw[2], raw[3]]))
    }
}

/// Takes every descriptor of a received message, so that none leaks whatever the message contains.
fn received_descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    // SAFETY: the header was filled by recvmsg, whose control messages CMSG_FIRSTHDR and CMSG_NXTHDR walk within bounds; a
    // SCM_RIGHTS message holds descriptors that are new and ours.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while !message.is_null() {
            if (*message).cmsg_level == libc::SOL_SOCKET && (*message).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(message).cast::<libc::c_int>();
                let bytes = (*message).cmsg_len - libc::CMSG_LEN(0) as usize;
                for at in 0..bytes / size_of::<libc::c_int>() {
                    descriptors.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                }
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    descriptors
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> OwnedFd {
        channel.fd
    }
}

/// A listener for control connections. Dropping it removes its path.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: std::path::PathBuf,
    /// Closed for a moment when this process has no other descriptor left, to turn a client away.
    spare: Mutex<Option<OwnedFd>>,
}

/// A descriptor that is kept in reserve.
fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(Into::into)
}

impl Listener {
    /// Listens at a path that must not exist, or be a socket without a listener.
    ///
    /// # Errors
    /// `AddrInUse` if another process listens there, else the system's.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        if path.exists() {
            if Channel::connect(path).is_ok() {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("another agent listens at {}", path.display())));
            }
            std::fs::remove_file(path)?;
        }
        let fd = unix_socket()?;
        let (address, length) = unix_address(path)?;
        // SAFETY: the pointer and length describe `address`.
        check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) })?;
        // Any process that can reach the path may connect: a program that gives up its user keeps its connections. What each may
        // do is decided by what it sends.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        // SAFETY: a call on our own descriptor.
        check(unsafe { libc::listen(fd.as_raw_fd(), 64) })?;
        Ok(Listener { fd, path: path.to_owned(), spare: Mutex::new(spare()) })
    }

    /// Waits for the next connection and accepts it. If this process has no descriptor left, the connection is closed instead,
    /// and an error returned.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn accept(&self) -> io::Result<Channel> {
        let accepted = self.accept_one();
        if accepted.as_ref().is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))) {
            let mut kept = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            *kept = None;
            drop(self.accept_one());
            *kept = spare();
        }
        accepted
    }

    fn accept_one(&self) -> io::Result<Channel> {
        let raw = uninterrupted(|| {
            // SAFETY: the peer's address is not asked for.
            check(unsafe { libc::accept4(self.fd.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC) })
        })?;
        // SAFETY: the descriptor is new and ours.
        Ok(Channel { fd: unsafe { OwnedFd::from_raw_fd(raw) } })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
