//! The frames of all network devices, as a packet socket shows them (packet(7)): received frames before any filter has
//! judged them, and frames that were given to the devices to be sent.

use crate::interface::receive_at;
use crate::socket::{self, check_size};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Bytes of frames that wait to be read.
const WAITING: usize = 16 << 20;

/// A frame of a network device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceFrame {
    /// When the kernel saw it, in nanoseconds since 1970.
    pub at: u64,
    /// Its bytes.
    pub length: u32,
    /// It was sent by this host.
    pub out: bool,
    /// Index of the device.
    pub interface: u32,
}

/// Opens a socket on all devices of the calling thread's network namespace.
///
/// # Errors
/// The failed system call's.
pub fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    // With protocol 0 it receives nothing until it is bound.
    let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    socket::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    set_socket_recv_buffer_size_force(&fd, WAITING)?;
    receive_at(fd.as_fd(), 0)?;
    Ok(fd)
}

/// The reading end of such a socket.
#[derive(Debug)]
pub struct DeviceFrames {
    fd: OwnedFd,
    dropped: u64,
}

/// A control message with room for a timestamp: its alignment is that of cmsghdr.
#[repr(C, align(8))]
struct Control([u8; 64]);

impl DeviceFrames {
    /// Over a socket that [`open`] has opened.
    pub fn from_fd(fd: OwnedFd) -> DeviceFrames {
        DeviceFrames { fd, dropped: 0 }
    }

    /// Takes the next frame; its bytes, as many as `frame` has room for, are in front there. None if none waits.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn next(&self, frame: &mut [u8]) -> io::Result<Option<DeviceFrame>> {
        // SAFETY: sockaddr_ll and msghdr consist of integers and pointers, for which zero is a valid value.
        let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) = unsafe { std::mem::zeroed() };
        let mut control = Control([0; 64]);
        let mut part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<Control>());
        // SAFETY: the message describes `from`, `frame` and `control`, which are borrowed mutably and live for the
        // call.
        let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_TRUNC | libc::MSG_DONTWAIT) };
        let length = match check_size(got) {
            Ok(length) => length as u32,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => return Ok(None),
            Err(error) => return Err(error),
        };
        // There is only one control message: a header of 16 bytes, then seconds and nanoseconds.
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| control.0[at + byte]));
        let at = word(16).wrapping_mul(1_000_000_000).wrapping_add(word(24));
        let out = from.sll_pkttype == libc::PACKET_OUTGOING;
        Ok(Some(DeviceFrame { at, length, out, interface: from.sll_ifindex as u32 }))
    }

    /// Number of frames that there was no room for.
    pub fn dropped(&mut self) -> u64 {
        const PACKET_STATISTICS: i32 = 6;
        // struct tpacket_stats: the numbers of frames and of dropped frames since the last query.
        let mut statistics = [0u32; 2];
        let mut length = size_of_val(&statistics) as libc::socklen_t;
        // SAFETY: the pointers describe `statistics` and its length, which live for the call.
        let read = unsafe {
            let (fd, to) = (self.fd.as_raw_fd(), (&raw mut statistics).cast());
            libc::getsockopt(fd, libc::SOL_PACKET, PACKET_STATISTICS, to, &raw mut length)
        };
        if read == 0 {
            self.dropped += u64::from(statistics[1]);
        }
        self.dropped
    }
}

impl AsFd for DeviceFrames {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
