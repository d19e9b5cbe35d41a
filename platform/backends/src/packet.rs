//! Packet sockets beside the kernel, for the beside shape: one that hears and speaks on every device, and the way to the kernel.

use crate::vnet::{self, HEADER, VnetDevice};
use baton_device::{Capabilities, Device, Frame, HEADROOM};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A packet socket that belongs to no device: frames say which they came from or go to. The descriptor must not block.
#[derive(Debug)]
pub struct PacketDevice {
    fd: OwnedFd,
    segmentation: bool,
}

impl PacketDevice {
    /// Takes a descriptor. With `segmentation`, large frames are handed to the device uncut.
    pub fn new(fd: OwnedFd, segmentation: bool) -> Self {
        PacketDevice { fd, segmentation }
    }

    /// The descriptor, to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Index of the loopback device in every network namespace.
const LOOPBACK: u32 = 1;

fn address(interface: u32) -> libc::sockaddr_ll {
    // SAFETY: sockaddr_ll is plain data, for which zero is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = interface as i32;
    address
}

impl Device for PacketDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: if self.segmentation { 60_000 } else { 0 } }
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        let mut from = address(0);
        let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        let room = &mut frame.room()[HEADROOM - HEADER..];
        // SAFETY: buffer and address are as long as they say.
        let got = unsafe {
            libc::recvfrom(self.fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), 0, (&raw mut from).cast(), &mut length)
        };
        if got < HEADER as isize {
            return false;
        }
        let mut header = [0u8; HEADER];
        header.copy_from_slice(&room[..HEADER]);
        frame.set_length(got as usize - HEADER);
        vnet::decode(&header, frame);
        frame.interface = from.sll_ifindex as u32;
        true
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let header = vnet::encode(frame);
        let length = HEADER + frame.bytes().len();
        let to = address(frame.interface);
        let room = &mut frame.room()[HEADROOM - HEADER..];
        room[..HEADER].copy_from_slice(&header);
        // SAFETY: the buffer holds at least `length` bytes, the address is as long as it says.
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

/// The kernel as seen from beside: what it sends of mirrored connections is heard by a packet socket, and what it is to receive goes
/// through an injector, a TAP whose frames count as received by the interface that they name.
#[derive(Debug)]
pub struct BesideKernel {
    outgoing: PacketDevice,
    injector: VnetDevice,
    mark: [u8; 2],
}

impl BesideKernel {
    /// Takes both descriptors. `mark` is how the source address of an injected frame begins; the interface's index follows.
    pub fn new(outgoing: OwnedFd, injector: OwnedFd, mark: [u8; 2]) -> Self {
        BesideKernel { outgoing: PacketDevice::new(outgoing, false), injector: VnetDevice::new(injector, true), mark }
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
        // What is sent on the loopback device is received there.
        if interface == LOOPBACK {
            return self.outgoing.transmit(frame);
        }
        let Some(source) = frame.bytes_mut().get_mut(6..12) else { return false };
        source[..2].copy_from_slice(&self.mark);
        source[2..].copy_from_slice(&interface.to_ne_bytes());
        self.injector.transmit(frame)
    }
}

/// Whichever way the kernel is reached.
#[derive(Debug)]
pub enum Kernel {
    /// A TAP that is the kernel's interface.
    Inline(VnetDevice),
    /// Beside it.
    Beside(BesideKernel),
}

impl Kernel {
    /// The descriptor, to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Kernel::Inline(device) => device.fd(),
            Kernel::Beside(device) => device.outgoing.fd(),
        }
    }
}

/// Whichever wire there is.
#[derive(Debug)]
pub enum Wire {
    /// One device.
    Inline(VnetDevice),
    /// All of the kernel's.
    Beside(PacketDevice),
}

impl Wire {
    /// The descriptor, to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Wire::Inline(device) => device.fd(),
            Wire::Beside(device) => device.fd(),
        }
    }
}

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
