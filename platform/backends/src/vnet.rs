//! Devices over descriptors that carry frames behind a `virtio_net_hdr`: a TAP with `IFF_VNET_HDR`, a packet socket
//! with `PACKET_VNET_HDR`. The header describes partial checksums, and frames of up to 64 KB that stand for several
//! segments (Linux, `include/uapi/linux/virtio_net.h`). Larger ones are cut when they are received (`large.rs`).

use crate::large::Large;
use baton_device::{Capabilities, Checksum, Device, Frame, HEADROOM, NOWHERE, Payload, Segmentation};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU8;

/// Bytes of a `virtio_net_hdr`.
pub(crate) const VNET_HEADER: usize = 10;
// Its `flags`.
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
// Its `gso_type`.
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP: u8 = 5;
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const GSO_ECN: u8 = 0x80;

// Offsets of its fields.
const FLAGS: usize = 0;
const GSO_TYPE: usize = 1;
const HDR_LEN: usize = 2;
const GSO_SIZE: usize = 4;
const CSUM_START: usize = 6;
const CSUM_OFFSET: usize = 8;

/// Largest payload of a frame that is handed over uncut, in bytes: with the longest headers it fits an IP packet.
pub(crate) const MAX_GSO: u32 = 65_400;

/// A TAP queue or a packet socket. The descriptor must be non-blocking.
#[derive(Debug)]
pub struct VnetDevice {
    fd: OwnedFd,
    segmentation: bool,
    /// False once the kernel has refused a run of datagrams, as Linux before 6.2 does.
    takes_datagrams: bool,
    /// Whether frames are received from the descriptor.
    receives: bool,
    large: Box<Large>,
}

impl VnetDevice {
    /// Makes a device over a descriptor. With `segmentation`, large frames are sent uncut.
    pub fn new(fd: OwnedFd, segmentation: bool) -> Self {
        VnetDevice { fd, segmentation, takes_datagrams: true, receives: true, large: Box::new(Large::new()) }
    }

    /// Makes this device send only, since another device receives from the same descriptor.
    pub fn send_only(self) -> Self {
        VnetDevice { receives: false, ..self }
    }

    /// The descriptor, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Decodes the header into the offload state of a frame whose bytes have been received. An unknown `gso_type` is
/// ignored: the packet's parser checks its length anyway.
pub(crate) fn decode(header: &[u8; VNET_HEADER], frame: &mut Frame) {
    frame.checksum = if header[FLAGS] & NEEDS_CSUM != 0 {
        Checksum::Partial { start: le16(header, CSUM_START), offset: le16(header, CSUM_OFFSET) }
    } else if header[FLAGS] & DATA_VALID != 0 {
        Checksum::Verified
    } else {
        Checksum::Unknown
    };
    let kind = header[GSO_TYPE] & !GSO_ECN;
    let udp = kind == GSO_UDP;
    frame.segmentation = (kind == GSO_TCPV4 || kind == GSO_TCPV6 || udp).then(|| Segmentation {
        size: le16(header, GSO_SIZE),
        headers: le16(header, HDR_LEN),
        ipv6: kind == GSO_TCPV6 || udp && frame.bytes().get(12..14) == Some(&ETHERTYPE_IPV6),
        ecn: header[GSO_TYPE] & GSO_ECN != 0,
        udp,
    });
}

/// Encodes the frame's offload state.
pub(crate) fn encode(frame: &Frame) -> [u8; VNET_HEADER] {
    let mut header = [0u8; VNET_HEADER];
    match frame.checksum {
        Checksum::Partial { start, offset } => {
            header[FLAGS] = NEEDS_CSUM;
            header[CSUM_START..][..2].copy_from_slice(&start.to_le_bytes());
            header[CSUM_OFFSET..][..2].copy_from_slice(&offset.to_le_bytes());
        }
        // DATA_VALID is set by a device on received frames; the receiver of this frame need not trust ours.
        Checksum::Verified | Checksum::Unknown => {}
    }
    if let Some(s) = frame.segmentation {
        let tcp = if s.ipv6 { GSO_TCPV6 } else { GSO_TCPV4 } | if s.ecn { GSO_ECN } else { 0 };
        header[GSO_TYPE] = if s.udp { GSO_UDP } else { tcp };
        header[HDR_LEN..][..2].copy_from_slice(&s.headers.to_le_bytes());
        header[GSO_SIZE..][..2].copy_from_slice(&s.size.to_le_bytes());
    }
    header
}

/// Sets how many of the frame's bytes count as its headers.
pub(crate) fn set_header_length(header: &mut [u8; VNET_HEADER], length: u16) {
    header[HDR_LEN..][..2].copy_from_slice(&length.to_le_bytes());
}

impl Device for VnetDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: if self.segmentation { MAX_GSO } else { 0 } }
    }

    fn cuts_datagrams(&self) -> bool {
        self.segmentation && self.takes_datagrams
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        if !self.receives {
            return false;
        }
        loop {
            if self.large.has_left() && self.large.next(frame) {
                return true;
            }
            let room = &mut frame.room()[HEADROOM - VNET_HEADER..];
            let most = room.len();
            let mut parts = [IoSliceMut::new(room), IoSliceMut::new(self.large.rest())];
            let Ok(got @ VNET_HEADER..) = rustix::io::readv(&self.fd, &mut parts) else { return false };
            let (here, beyond) = (got.min(most), got.saturating_sub(most));
            let mut header = [0u8; VNET_HEADER];
            header.copy_from_slice(&frame.room()[HEADROOM - VNET_HEADER..HEADROOM]);
            frame.set_length(here - VNET_HEADER);
            decode(&header, frame);
            if !Large::concerns(here - VNET_HEADER) || self.large.begin(frame, beyond) {
                return true;
            }
        }
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        if frame.interface == NOWHERE {
            return false;
        }
        let header = encode(frame);
        let length = VNET_HEADER + frame.length();
        let room = &mut frame.room()[HEADROOM - VNET_HEADER..];
        room[..VNET_HEADER].copy_from_slice(&header);
        let written = rustix::io::write(&self.fd, &room[..length]);
        self.takes_datagrams &= header[GSO_TYPE] != GSO_UDP || written != Err(rustix::io::Errno::INVAL);
        written == Ok(length)
    }

    fn transmits_apart(&self) -> bool {
        self.segmentation
    }

    fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
        if frame.interface == NOWHERE {
            return false;
        }
        let header = encode(frame);
        let length = VNET_HEADER + frame.length();
        let front = &mut frame.room()[HEADROOM - VNET_HEADER..][..length];
        front[..VNET_HEADER].copy_from_slice(&header);
        let (parts, length) = parts(front, payload);
        // SAFETY: writev(2) reads `parts`, which live for the call; these are memory that is borrowed for it.
        let written = unsafe { libc::writev(self.fd.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
        written == length as isize
    }
}

/// The pieces of memory that a system call reads or writes one after the other, and their length in bytes.
pub(crate) fn parts(front: &mut [u8], payload: Payload<'_>) -> ([libc::iovec; 3], usize) {
    let place = |part: &[AtomicU8]| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    let first = libc::iovec { iov_base: front.as_mut_ptr().cast(), iov_len: front.len() };
    let parts = [first, place(payload[0]), place(payload[1])];
    (parts, parts.iter().map(|part| part.iov_len).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame whose payload lies in two pieces elsewhere is one frame on the wire.
    #[test]
    fn a_frame_in_parts_is_one_frame() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
        let (mut one, mut other) = (VnetDevice::new(one, true), VnetDevice::new(other, true));
        let bytes: Vec<u8> = (0..5000u32).map(|at| at as u8).collect();
        let elsewhere: Vec<AtomicU8> = bytes[66..].iter().map(|byte| AtomicU8::new(*byte)).collect();
        let mut frame = Frame::with_capacity(8192);
        let segmentation = Some(Segmentation { size: 1448, headers: 66, ipv6: false, ecn: false, udp: false });
        for at in [0, 1000, elsewhere.len()] {
            frame.fill(&bytes[..66]);
            frame.segmentation = segmentation;
            let (first, second) = elsewhere.split_at(at);
            assert!(one.transmits_apart() && one.transmit_apart(&mut frame, [first, second]));
            assert!(other.receive(&mut frame));
            assert!(frame.bytes() == bytes && frame.segmentation == segmentation);
            assert!(!other.receive(&mut frame), "one frame");
        }
        frame.fill(&bytes[..66]);
        frame.interface = NOWHERE;
        assert!(!one.transmit_apart(&mut frame, [&elsewhere, &[]]) && !other.receive(&mut frame));
    }

    #[test]
    fn headers_survive() {
        let mut frame = Frame::with_capacity(100);
        frame.fill(&[1; 60]);
        frame.checksum = Checksum::Partial { start: 34, offset: 16 };
        frame.segmentation = Some(Segmentation { size: 1448, headers: 66, ipv6: true, ecn: true, udp: false });
        let header = encode(&frame);
        let mut copy = frame.clone();
        copy.checksum = Checksum::Unknown;
        copy.segmentation = None;
        decode(&header, &mut copy);
        assert_eq!((copy.checksum, copy.segmentation), (frame.checksum, frame.segmentation));
        frame.segmentation = Some(Segmentation { size: 1400, headers: 42, ipv6: false, ecn: false, udp: true });
        decode(&encode(&frame), &mut copy);
        assert_eq!(copy.segmentation, frame.segmentation);
    }
}
