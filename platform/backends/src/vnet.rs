//! Descriptors that carry frames behind a `virtio_net_hdr`: a TAP with `IFF_VNET_HDR`, a packet socket with `PACKET_VNET_HDR`.
//! The header tells of partial checksums and of frames up to 64 KB that stand for many (Linux, `include/uapi/linux/virtio_net.h`).

use baton_device::{Capabilities, Checksum, Device, Frame, HEADROOM, NOWHERE, Segmentation};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

pub(crate) const HEADER: usize = 10;
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;

/// A TAP queue or a packet socket. The descriptor must not block.
#[derive(Debug)]
pub struct VnetDevice {
    fd: OwnedFd,
    segmentation: bool,
    hears: bool,
}

impl VnetDevice {
    /// Takes a descriptor. With `segmentation`, large frames are handed to the other side uncut.
    pub fn new(fd: OwnedFd, segmentation: bool) -> Self {
        VnetDevice { fd, segmentation, hears: true }
    }

    /// One that receives nothing, whose descriptor another receives from.
    pub fn send_only(self) -> Self {
        VnetDevice { hears: false, ..self }
    }

    /// The descriptor, to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Reads the header into the frame's fields. An unknown kind of segmentation is left to whoever looks at the packet's length.
pub(crate) fn decode(header: &[u8; HEADER], frame: &mut Frame) {
    frame.checksum = if header[0] & NEEDS_CSUM != 0 {
        Checksum::Partial { start: le16(header, 6), offset: le16(header, 8) }
    } else if header[0] & DATA_VALID != 0 {
        Checksum::Verified
    } else {
        Checksum::Unknown
    };
    let kind = header[1] & !GSO_ECN;
    frame.segmentation = (kind == GSO_TCPV4 || kind == GSO_TCPV6).then(|| Segmentation {
        size: le16(header, 4),
        headers: le16(header, 2),
        ipv6: kind == GSO_TCPV6,
        ecn: header[1] & GSO_ECN != 0,
    });
}

pub(crate) fn encode(frame: &Frame) -> [u8; HEADER] {
    let mut header = [0u8; HEADER];
    match frame.checksum {
        Checksum::Partial { start, offset } => {
            header[0] = NEEDS_CSUM;
            header[6..8].copy_from_slice(&start.to_le_bytes());
            header[8..10].copy_from_slice(&offset.to_le_bytes());
        }
        // DATA_VALID is the device's word on what it received; nobody has to believe ours.
        Checksum::Verified | Checksum::Unknown => {}
    }
    if let Some(s) = frame.segmentation {
        header[1] = if s.ipv6 { GSO_TCPV6 } else { GSO_TCPV4 } | if s.ecn { GSO_ECN } else { 0 };
        header[2..4].copy_from_slice(&s.headers.to_le_bytes());
        header[4..6].copy_from_slice(&s.size.to_le_bytes());
    }
    header
}

impl Device for VnetDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: if self.segmentation { 60_000 } else { 0 } }
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        if !self.hears {
            return false;
        }
        let room = &mut frame.room()[HEADROOM - HEADER..];
        // SAFETY: the buffer is `room.len()` bytes that we may write.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len()) };
        if got < HEADER as isize {
            return false;
        }
        let mut header = [0u8; HEADER];
        header.copy_from_slice(&room[..HEADER]);
        frame.set_length(got as usize - HEADER);
        decode(&header, frame);
        true
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        if frame.interface == NOWHERE {
            return false;
        }
        let header = encode(frame);
        let length = HEADER + frame.bytes().len();
        let room = &mut frame.room()[HEADROOM - HEADER..];
        room[..HEADER].copy_from_slice(&header);
        // SAFETY: the buffer holds at least `length` bytes.
        let sent = unsafe { libc::write(self.fd.as_raw_fd(), room.as_ptr().cast(), length) };
        sent == length as isize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive() {
        let mut frame = Frame::with_capacity(100);
        frame.fill(&[1; 60]);
        frame.checksum = Checksum::Partial { start: 34, offset: 16 };
        frame.segmentation = Some(Segmentation { size: 1448, headers: 66, ipv6: true, ecn: true });
        let header = encode(&frame);
        let mut copy = frame.clone();
        copy.checksum = Checksum::Unknown;
        copy.segmentation = None;
        decode(&header, &mut copy);
        assert_eq!((copy.checksum, copy.segmentation), (frame.checksum, frame.segmentation));
    }
}
