//! Raw Ethernet frames of one type at one device, for a program whose packets need no IP. It needs CAP_NET_RAW.

use crate::datagrams::Received;
use crate::rtnetlink;
use crate::socket::{check, check_size, set};
use baton_wire::Endpoint;
use baton_wire::rmpp::envelope::ethernet_address;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A packet socket without headers. Hosts are named by their MAC addresses, in the form of
/// [`baton_wire::rmpp::envelope::ethernet_address`].
#[derive(Debug)]
pub struct Frames {
    fd: OwnedFd,
    ethertype: u16,
    interface: u32,
    address: SocketAddr,
    out: Vec<u8>,
    input: Vec<u8>,
    dropped: u64,
}

/// Frames of a type at a device.
pub(crate) fn link_address(ethertype: u16, interface: u32) -> libc::sockaddr_ll {
    // SAFETY: sockaddr_ll is plain data, for which zero is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ethertype.to_be();
    address.sll_ifindex = interface as i32;
    address
}

const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_ll>() as libc::socklen_t;

impl Frames {
    /// A socket for frames of a type at a device, with at least `buffer` bytes of receive buffer if the system allows
    /// it, for up to `longest` bytes behind the Ethernet header.
    ///
    /// # Errors
    /// The failed system call's: EPERM without CAP_NET_RAW.
    pub fn bind(device: &str, ethertype: u16, buffer: usize, longest: usize) -> io::Result<Frames> {
        let link = rtnetlink::link(&rtnetlink::open()?, device)?;
        // With protocol 0 it receives nothing until it is bound.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, None)?;
        let wanted = i32::try_from(buffer).unwrap_or(i32::MAX);
        set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, wanted)?;
        set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, wanted)?;
        let to = link_address(ethertype, link.index);
        // SAFETY: the pointer and length describe `to`.
        check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const to).cast(), LENGTH) })?;
        let address = SocketAddr::from(ethernet_address(link.address));
        Ok(Frames { fd, ethertype, interface: link.index, address, out: vec![0; longest], input: vec![0; 1 << 16], dropped: 0 })
    }

    /// The device's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Frames that could not be sent.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Receives a frame, and passes the bytes behind its header, with any padding, to `each`. Returns 0 if no frame
    /// waits.
    pub fn receive(&mut self, each: &mut dyn FnMut(Received<'_>)) -> usize {
        let mut from = link_address(0, 0);
        let mut length = LENGTH;
        let (bytes, room) = (self.input.as_mut_ptr().cast(), self.input.len());
        // SAFETY: recvfrom(2) writes at most `room` bytes into `self.input`, and `length` bytes into `from`.
        let got = unsafe {
            libc::recvfrom(self.fd.as_raw_fd(), bytes, room, libc::MSG_DONTWAIT, (&raw mut from).cast(), &raw mut length)
        };
        let Ok(got) = check_size(got) else { return 0 };
        if from.sll_pkttype == libc::PACKET_HOST
            && let Some(mac) = from.sll_addr.first_chunk()
        {
            each(Received { from: SocketAddr::from(ethernet_address(*mac)), bytes: &self.input[..got] });
        }
        1
    }

    /// Room for the next frame's payload. [`Frames::push`] follows.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.out
    }

    /// Sends the `length` bytes that were written to [`Frames::room`]. A frame for which the device has no room is
    /// dropped.
    pub fn push(&mut self, to: SocketAddr, length: usize) {
        let mut address = link_address(self.ethertype, self.interface);
        address.sll_halen = 6;
        address.sll_addr[..6].copy_from_slice(&Endpoint::from(to).address[..6]);
        let bytes = &self.out[..length];
        // SAFETY: sendto(2) reads `bytes` and `address`, which live for the call.
        let sent = unsafe {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            libc::sendto(self.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags, (&raw const address).cast(), LENGTH)
        };
        self.dropped += u64::from(check_size(sent).is_err());
    }
}

impl AsFd for Frames {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Ethernet type and device that a packet socket is bound to.
///
/// # Errors
/// The failed system call's, or `InvalidInput` for another socket.
pub fn binding(fd: BorrowedFd<'_>) -> io::Result<(u16, u32)> {
    let mut address = link_address(0, 0);
    let mut length = LENGTH;
    // SAFETY: getsockname(2) writes at most `length` bytes into `address`.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut address).cast(), &raw mut length) })?;
    if i32::from(address.sll_family) != libc::AF_PACKET {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((u16::from_be(address.sll_protocol), address.sll_ifindex as u32))
}
