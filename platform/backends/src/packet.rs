//! Devices of a NIC beside the kernel: a packet socket that receives and sends on every network device, and the path to the
//! kernel.

use crate::ring::{Next, ReceiveRing};
use crate::vnet::{self, MAX_GSO, VNET_HEADER, VnetDevice};
use baton_device::{Capabilities, Device, Frame, HEADROOM};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A packet socket that is bound to no network device: each frame carries the index of the device that it came from or goes to.
/// The descriptor must be non-blocking.
#[derive(Debug)]
pub struct PacketDevice {
    fd: OwnedFd,
    segmentation: bool,
    /// Received frames, if the socket has a ring (`baton_linux::packet_ring`).
    ring: Option<ReceiveRing>,
}

impl PacketDevice {
    /// Makes a device over a descriptor. With `segmentation`, large frames are sent uncut.
    pub fn new(fd: OwnedFd, segmentation: bool) -> Self {
        PacketDevice { fd, segmentation, ring: None }
    }

    /// Receives from the socket's ring, if it has one. Only one process may do that at a time.
    #[must_use]
    pub fn over_ring(self) -> Self {
        let ring = self.fd.try_clone().and_then(ReceiveRing::map).ok();
        PacketDevice { ring, ..self }
    }

    /// The descriptor, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Largest frame in bytes that the kernel keeps in one piece of memory. All of it then counts as headers, which saves the pages
/// that the kernel puts payload into, and the work of whoever parses the frame: a quarter of the cost of sending one.
const ONE_PIECE: usize = 2000;

/// Index of the loopback device in every network namespace.
const LOOPBACK: u32 = 1;

/// The link-layer address of an interface.
fn link_address(interface: u32) -> libc::sockaddr_ll {
    // SAFETY: `sockaddr_ll` consists of integers, for which zero is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = interface as i32;
    address
}

/// Receives the next frame of a socket's queue. False if none waits.
fn receive_queued(fd: &OwnedFd, frame: &mut Frame) -> bool {
    let mut from = link_address(0);
    let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    let room = &mut frame.room()[HEADROOM - VNET_HEADER..];
    // SAFETY: recvfrom(2) writes at most `room.len()` bytes at `room`, borrowed mutably from the frame, and at most `length`
    // bytes of address at `from`, which is a `sockaddr_ll` of that size.
    let got =
        unsafe { libc::recvfrom(fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), 0, (&raw mut from).cast(), &mut length) };
    if got < VNET_HEADER as isize {
        return false;
    }
    let mut header = [0u8; VNET_HEADER];
    header.copy_from_slice(&room[..VNET_HEADER]);
    frame.set_length(got as usize - VNET_HEADER);
    vnet::decode(&header, frame);
    frame.interface = from.sll_ifindex as u32;
    true
}

impl Device for PacketDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: if self.segmentation { MAX_GSO } else { 0 } }
    }

    #[inline]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        let Some(ring) = &mut self.ring else { return receive_queued(&self.fd, frame) };
        loop {
            match ring.receive(frame) {
                Next::Nothing => return false,
                Next::Frame => return true,
                Next::Queued(interface) => {
                    if receive_queued(&self.fd, frame) {
                        frame.interface = interface;
                        return true;
                    }
                }
                Next::Lost => {}
            }
        }
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let mut header = vnet::encode(frame);
        if frame.segmentation.is_none() && frame.bytes().len() <= ONE_PIECE {
            vnet::set_header_length(&mut header, frame.bytes().len() as u16);
        }
        let length = VNET_HEADER + frame.bytes().len();
        let to = link_address(frame.interface);
        let room = &mut frame.room()[HEADROOM - VNET_HEADER..];
        room[..VNET_HEADER].copy_from_slice(&header);
        // SAFETY: sendto(2) reads `length` bytes at `room`: the frame's length is at most its capacity, and the header lies in
        // the headroom in front of it. `to` is a `sockaddr_ll` of the size given.
        let sent = unsafe {
            libc::sendto(
                self.fd.as_raw_fd(),
                room.as_ptr().cast(),
                length,
                0,
                (&raw const to).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        sent == length as isize
    }
}

/// The kernel as reached from beside it. What it sends of mirrored connections is received by a packet socket. Frames for it go
/// through an injector: a TAP at which a BPF program makes each frame count as received by the interface whose index the frame
/// carries.
#[derive(Debug)]
pub struct BesideKernel {
    outgoing: PacketDevice,
    injector: VnetDevice,
    /// First bytes of the source address of an injected frame.
    mark: [u8; 2],
}

impl BesideKernel {
    /// Makes it of both. `mark` is the beginning of the source address of an injected frame; the index of the
    /// interface follows.
    pub fn new(outgoing: PacketDevice, injector: OwnedFd, mark: [u8; 2]) -> Self {
        BesideKernel { outgoing, injector: VnetDevice::new(injector, true), mark }
    }
}

impl Device for BesideKernel {
    fn capabilities(&self) -> Capabilities {
        self.injector.capabilities()
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        self.outgoing.receive(frame)
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let interface = frame.interface;
        // A frame sent on the loopback device is received there.
        if interface == LOOPBACK {
            return self.outgoing.transmit(frame);
        }
        let Some(source) = frame.bytes_mut().get_mut(6..12) else { return false };
        source[..2].copy_from_slice(&self.mark);
        source[2..].copy_from_slice(&interface.to_ne_bytes());
        self.injector.transmit(frame)
    }
}

/// The device to the kernel.
#[derive(Debug)]
pub enum Kernel {
    /// A TAP that is the kernel's interface.
    Inline(VnetDevice),
    /// A kernel with network devices of its own, beside the NIC.
    Beside(BesideKernel),
}

impl Kernel {
    /// The descriptor, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Kernel::Inline(device) => device.fd(),
            Kernel::Beside(device) => device.outgoing.fd(),
        }
    }
}

/// The device to the wire.
#[derive(Debug)]
pub enum Wire {
    /// One device.
    Inline(VnetDevice),
    /// All network devices of the kernel's.
    Beside(PacketDevice),
}

impl Wire {
    /// The descriptor, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Wire::Inline(device) => device.fd(),
            Wire::Beside(device) => device.fd(),
        }
    }
}

/// Implements [`Device`] for an enum of two devices.
macro_rules! either {
    ($name:ident) => {
        impl Device for $name {
            fn capabilities(&self) -> Capabilities {
                match self {
                    $name::Inline(device) => device.capabilities(),
                    $name::Beside(device) => device.capabilities(),
                }
            }

            fn receive(&mut self, frame: &mut Frame) -> bool {
                match self {
                    $name::Inline(device) => device.receive(frame),
                    $name::Beside(device) => device.receive(frame),
                }
            }

            fn transmit(&mut self, frame: &mut Frame) -> bool {
                match self {
                    $name::Inline(device) => device.transmit(frame),
                    $name::Beside(device) => device.transmit(frame),
                }
            }
        }
    };
}
either!(Kernel);
either!(Wire);
