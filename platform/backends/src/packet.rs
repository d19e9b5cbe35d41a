//! Devices of a NIC beside the kernel: a packet socket that receives and sends on every network device, and the path to
//! the kernel.

use crate::large::Large;
use crate::ring::{self, MAX_SENT, Next, ReceiveRing, SendRing};
use crate::vnet::{self, MAX_GSO, VNET_HEADER, VnetDevice};
use baton_device::{Arrival, BEGINNING, Capabilities, Device, Frame, HEADROOM, Payload};
use baton_wire::frame::INJECT;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU8;

/// A packet socket that is bound to no network device: each frame carries the index of the device that it came from or
/// goes to. The descriptor must be non-blocking.
#[derive(Debug)]
pub struct PacketDevice {
    fd: OwnedFd,
    segmentation: bool,
    /// False once the kernel has refused a run of datagrams, as Linux before 6.2 does.
    takes_datagrams: bool,
    /// The ring of received frames, if the socket has one (`baton_linux::packet_ring`).
    received: Option<ReceiveRing>,
    /// The ring of frames to be sent, if the socket has one, and a second socket: it sends the frames for which the
    /// ring has no room.
    to_send: Option<(SendRing, OwnedFd)>,
    /// The interface that the gathered frames go to.
    gathered_for: u32,
    /// Gathered frames that were lost since the last flush.
    lost: u64,
    large: Box<Large>,
    /// Lengths of the large frame that is shown: of the whole frame, and of the options between the shown headers and
    /// its payload.
    shown: (usize, usize),
}

impl PacketDevice {
    /// Makes a device over a descriptor. With `segmentation`, large frames are sent uncut.
    pub fn new(fd: OwnedFd, segmentation: bool) -> Self {
        let (received, to_send, large, shown) = (None, None, Box::new(Large::new()), (0, 0));
        PacketDevice { fd, segmentation, takes_datagrams: true, received, to_send, gathered_for: 0, lost: 0, large, shown }
    }

    /// Receives through the socket's ring, if it has one. Only one process may do that at a time.
    ///
    /// # Errors
    /// If the ring cannot be mapped.
    pub fn over_ring(self) -> io::Result<Self> {
        let rings = ring::map(self.fd.try_clone()?, false)?;
        Ok(PacketDevice { received: rings.map(|rings| rings.0), ..self })
    }

    /// Makes the device receive and send through the socket's rings, if the socket has them. `plain` is a packet socket
    /// without a ring for frames to be sent.
    ///
    /// # Errors
    /// If the rings cannot be mapped.
    pub fn over_rings(self, plain: OwnedFd) -> io::Result<Self> {
        let Some((received, to_send)) = ring::map(self.fd.try_clone()?, true)? else { return Ok(self) };
        Ok(PacketDevice { received: Some(received), to_send: to_send.map(|ring| (ring, plain)), ..self })
    }

    /// Makes the kernel send the gathered frames.
    fn send_gathered(&mut self) {
        if let Some((ring, _)) = &mut self.to_send
            && ring.has_gathered()
        {
            // Frames that the kernel has not sent are still in the ring.
            send_ring(&self.fd, self.gathered_for);
            self.lost += ring.sent();
        }
    }

    /// Sends a frame at once, without the ring: the virtio header, the frame and the payload behind it.
    fn send_parts(&self, frame: &mut Frame, header: [u8; VNET_HEADER], payload: Payload<'_>) -> bool {
        let (interface, length) = (frame.interface, frame.length());
        let front = &mut frame.room()[HEADROOM - VNET_HEADER..][..VNET_HEADER + length];
        front[..VNET_HEADER].copy_from_slice(&header);
        let socket = self.to_send.as_ref().map_or(&self.fd, |(_, plain)| plain);
        send(socket, front, interface, payload)
    }

    /// Shows the large frame of so many bytes whose beginning the ring has put into `frame`, or receives it if its
    /// headers are not such that it can be shown. None if it is lost.
    fn show(&mut self, frame: &mut Frame, length: usize) -> Option<Arrival> {
        self.shown = (length, 0);
        if !Large::concerns(length) {
            return Some(Arrival::Large);
        }
        if let Some((payload, between)) = self.large.show(frame, length) {
            self.shown.1 = between;
            return Some(Arrival::Huge(payload));
        }
        self.receive_whole(frame, length).then_some(Arrival::Frame)
    }

    /// Receives the large frame that is shown, whole, or the first part of it. False if it is lost.
    fn receive_shown(&mut self, frame: &mut Frame) -> bool {
        let (length, capacity) = (self.shown.0, frame.capacity());
        frame.set_length(length.min(capacity));
        self.receive_whole(frame, length)
    }

    /// Receives the frame that the ring has shown, of `length` bytes; of a large frame, the first part. Returns false
    /// if the frame is lost.
    fn receive_whole(&mut self, frame: &mut Frame, length: usize) -> bool {
        let (here, beyond) = (frame.length(), length - frame.length());
        let front = &mut frame.room()[HEADROOM - VNET_HEADER..][..VNET_HEADER + here];
        let rest = self.large.shared_rest();
        // A frame that does not fit there either is cut off by the kernel, and lost.
        let rest = &rest[..beyond.min(rest.len())];
        let got = take_queued(&self.fd, &mut self.received, front, [rest, &[]]);
        got == Some(VNET_HEADER + length) && (!Large::concerns(length) || self.large.begin(frame, beyond))
    }

    /// The descriptor, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Takes the frame that the ring has shown from the socket's queue: its virtio header and beginning into `front`, the
/// rest into `payload`. Returns the bytes that were received, fewer or more than there is room for if it is not as the
/// ring has shown it.
///
/// A process that ended before it gave back the slot of a frame that it had received leaves a slot without a frame. So
/// frames that do not begin as the ring has shown are lost, until ring and queue are empty.
fn take_queued(fd: &OwnedFd, received: &mut Option<ReceiveRing>, front: &mut [u8], payload: Payload<'_>) -> Option<usize> {
    let ring = received.as_mut()?;
    let got = loop {
        let got = receive_parts(fd, front, payload);
        let beginning = &front[VNET_HEADER..];
        if got.is_none() || ring.is_shown(&beginning[..BEGINNING.min(beginning.len())]) {
            break got;
        }
    };
    ring.release();
    got
}

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

/// Receives the next frame of a socket's queue. The bytes for which `frame` has no room go to `rest`. Returns how many
/// did; None if no frame waits.
fn receive_queued(fd: &OwnedFd, frame: &mut Frame, rest: &[AtomicU8]) -> Option<usize> {
    let mut from = link_address(0);
    let room = &mut frame.room()[HEADROOM - VNET_HEADER..];
    let most = room.len();
    let (mut parts, _) = vnet::parts(room, [rest, &[]]);
    let mut message = message(&raw mut from, &mut parts);
    // SAFETY: recvmsg(2) writes an address to `from`, which is a `sockaddr_ll` of the size that the message says, and
    // into `parts`: the frame is borrowed mutably, and the bytes of `rest` are atomics.
    let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    let got = usize::try_from(got).ok().filter(|got| *got >= VNET_HEADER)?;
    let mut header = [0u8; VNET_HEADER];
    header.copy_from_slice(&frame.room()[HEADROOM - VNET_HEADER..HEADROOM]);
    frame.set_length(got.min(most) - VNET_HEADER);
    vnet::decode(&header, frame);
    frame.interface = from.sll_ifindex as u32;
    Some(got.saturating_sub(most))
}

impl Device for PacketDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: if self.segmentation { MAX_GSO } else { 0 } }
    }

    fn cuts_datagrams(&self) -> bool {
        self.segmentation && self.takes_datagrams
    }

    #[inline]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        loop {
            match self.receive_or_show(frame) {
                Arrival::Nothing => return false,
                Arrival::Frame => return true,
                Arrival::Large | Arrival::Huge(_) if self.receive_shown(frame) => return true,
                Arrival::Large | Arrival::Huge(_) => {}
            }
        }
    }

    #[inline]
    fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
        if self.large.has_left() && self.large.next(frame) {
            return Arrival::Frame;
        }
        loop {
            let Some(ring) = &mut self.received else {
                let Some(beyond) = receive_queued(&self.fd, frame, self.large.shared_rest()) else { return Arrival::Nothing };
                if !Large::concerns(frame.length()) || self.large.begin(frame, beyond) {
                    return Arrival::Frame;
                }
                continue;
            };
            match ring.receive(frame) {
                Next::Nothing => return Arrival::Nothing,
                Next::Frame => return Arrival::Frame,
                Next::Queued(length) => {
                    if let Some(arrival) = self.show(frame, length) {
                        return arrival;
                    }
                }
                Next::Lost => {}
            }
        }
    }

    fn taken_and_come(&self) -> (u64, u64) {
        let Some(ring) = &self.received else { return (0, u64::MAX) };
        let (taken, come) = ring.taken_and_come();
        // A large frame counts as taken when its last part has been taken.
        (taken - u64::from(self.large.has_left()), come)
    }

    fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
        let mut front = [0u8; VNET_HEADER + BEGINNING];
        let front = &mut front[..VNET_HEADER + headers + self.shown.1];
        let got = take_queued(&self.fd, &mut self.received, front, payload);
        got == Some(front.len() + payload[0].len() + payload[1].len())
    }

    fn transmits_apart(&self) -> bool {
        self.segmentation
    }

    fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
        let header = vnet::encode(frame);
        // Frames are sent in order.
        self.send_gathered();
        self.send_parts(frame, header, payload)
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let mut header = vnet::encode(frame);
        let length = frame.length();
        let small = frame.segmentation.is_none() && length <= MAX_SENT;
        if small {
            // The kernel then keeps the frame in one piece of memory, a copy.
            vnet::set_header_length(&mut header, length as u16);
        }
        if self.gathered_for != frame.interface || !small {
            // Frames are sent in order.
            self.send_gathered();
            self.gathered_for = frame.interface;
        }
        if small && let Some((ring, _)) = &mut self.to_send {
            let gathered = ring.gather(&header, frame.bytes());
            if ring.is_full() {
                self.send_gathered();
            }
            return gathered;
        }
        let datagrams = frame.segmentation.is_some_and(|segmentation| segmentation.udp);
        let sent = self.send_parts(frame, header, [&[], &[]]);
        if !sent && datagrams {
            self.takes_datagrams &= io::Error::last_os_error().kind() != io::ErrorKind::InvalidInput;
        }
        sent
    }

    #[inline]
    fn flush(&mut self) -> u64 {
        self.send_gathered();
        std::mem::take(&mut self.lost)
    }
}

/// Sends the frames in the socket's ring by an interface.
fn send_ring(fd: &OwnedFd, interface: u32) {
    let to = link_address(interface);
    // SAFETY: sendto(2) reads `to`, which lives for the call, and no bytes.
    unsafe {
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        libc::sendto(fd.as_raw_fd(), std::ptr::null(), 0, libc::MSG_DONTWAIT, (&raw const to).cast(), length)
    };
}

/// Sends a frame behind its virtio header to an interface: `front`, then `payload`.
fn send(fd: &OwnedFd, front: &mut [u8], interface: u32, payload: Payload<'_>) -> bool {
    let to = link_address(interface);
    let (mut parts, length) = vnet::parts(front, payload);
    let message = message(&to, &mut parts);
    // SAFETY: sendmsg(2) reads `to` and `parts`, which live for the call; these are memory that is borrowed for it.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT) };
    sent == length as isize
}

/// Receives the next frame of a socket's queue behind its virtio header into `front` and `payload`. Returns the length
/// received, header included; the kernel cuts off bytes that do not fit. Returns None if no frame waits.
fn receive_parts(fd: &OwnedFd, front: &mut [u8], payload: Payload<'_>) -> Option<usize> {
    let (mut parts, _) = vnet::parts(front, payload);
    let mut message = message(std::ptr::null(), &mut parts);
    // SAFETY: recvmsg(2) writes into `parts`: `front` is borrowed mutably, and the bytes of `payload` are atomics,
    // which other processes may write at any time.
    let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(got).ok()
}

/// The header of a message: to the address `to`, or, if `to` is null, for receiving without an address.
fn message(to: *const libc::sockaddr_ll, parts: &mut [libc::iovec; 3]) -> libc::msghdr {
    libc::msghdr {
        msg_name: to.cast_mut().cast(),
        msg_namelen: if to.is_null() { 0 } else { size_of::<libc::sockaddr_ll>() as libc::socklen_t },
        msg_iov: parts.as_mut_ptr(),
        msg_iovlen: parts.len(),
        msg_control: null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

/// The kernel as reached from beside it. A packet socket receives the segments of mirrored connections that the kernel
/// sends. Frames for the kernel go through an injector: a TAP at which a BPF program makes each frame count as received
/// by the interface whose index the frame carries.
#[derive(Debug)]
pub struct BesideKernel {
    outgoing: PacketDevice,
    injector: VnetDevice,
}

impl BesideKernel {
    /// Makes it of both.
    pub fn new(outgoing: PacketDevice, injector: OwnedFd) -> Self {
        BesideKernel { outgoing, injector: VnetDevice::new(injector, true) }
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
        let Some(source) = frame.bytes_mut().get_mut(6..12) else { return false };
        source[..2].copy_from_slice(&INJECT);
        // A frame sent on the loopback device is received there.
        if interface == LOOPBACK {
            // A caller that replays frames relies on the kernel having them when this returns.
            return self.outgoing.transmit(frame) && self.outgoing.flush() == 0;
        }
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

            fn cuts_datagrams(&self) -> bool {
                match self {
                    $name::Inline(device) => device.cuts_datagrams(),
                    $name::Beside(device) => device.cuts_datagrams(),
                }
            }

            fn receive(&mut self, frame: &mut Frame) -> bool {
                match self {
                    $name::Inline(device) => device.receive(frame),
                    $name::Beside(device) => device.receive(frame),
                }
            }

            fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
                match self {
                    $name::Inline(device) => device.receive_or_show(frame),
                    $name::Beside(device) => device.receive_or_show(frame),
                }
            }

            fn taken_and_come(&self) -> (u64, u64) {
                match self {
                    $name::Inline(device) => device.taken_and_come(),
                    $name::Beside(device) => device.taken_and_come(),
                }
            }

            fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
                match self {
                    $name::Inline(device) => device.receive_apart(headers, payload),
                    $name::Beside(device) => device.receive_apart(headers, payload),
                }
            }

            fn transmits_apart(&self) -> bool {
                match self {
                    $name::Inline(device) => device.transmits_apart(),
                    $name::Beside(device) => device.transmits_apart(),
                }
            }

            fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
                match self {
                    $name::Inline(device) => device.transmit_apart(frame, payload),
                    $name::Beside(device) => device.transmit_apart(frame, payload),
                }
            }

            fn transmit(&mut self, frame: &mut Frame) -> bool {
                match self {
                    $name::Inline(device) => device.transmit(frame),
                    $name::Beside(device) => device.transmit(frame),
                }
            }

            fn flush(&mut self) -> u64 {
                match self {
                    $name::Inline(device) => device.flush(),
                    $name::Beside(device) => device.flush(),
                }
            }
        }
    };
}
either!(Kernel);
either!(Wire);
