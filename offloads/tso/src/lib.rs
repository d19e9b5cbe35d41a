//! Large sends (TCP segmentation offload): cuts a frame that stands for many segments into these, as hardware does. No
//! I/O: the caller sends each segment.
//!
//! Every segment has the headers of the frame, except for: lengths, sequence number, IPv4 identification (increasing),
//! FIN and PSH (in the last segment only), CWR (in the first segment only, RFC 3168 section 6.1.2), checksums.
#![no_std]
#![forbid(unsafe_code)]

use baton_device::{Checksum, Frame};
use baton_wire::frame::{ETHERNET, TCP_CHECKSUM, finish_checksum, set_lengths};
use baton_wire::offset::{ipv4, tcp};
use baton_wire::{Flags, TcpFrame};

/// Why a frame cannot be cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// It is not TCP directly behind an Ethernet and an IP header, or a length field is wrong.
    NotTcp,
    /// The segment size is zero, or the length of the headers exceeds the frame.
    BadSize,
}

/// An iteration over the segments of a frame.
pub struct Cut<'a> {
    frame: &'a Frame,
    parsed: TcpFrame,
    /// Payload bytes of a segment.
    size: usize,
    /// Payload bytes cut off so far.
    at: usize,
    /// Segments cut off so far.
    count: u16,
    partial: bool,
}

/// Prepares to cut a frame. With `partial` the segments get partial TCP checksums, for the wire to complete.
///
/// # Errors
/// If it cannot be cut. Nothing outside of the frame is read.
pub fn cut(frame: &Frame, partial: bool) -> Result<Cut<'_>, Refusal> {
    let segmentation = frame.segmentation.ok_or(Refusal::BadSize)?;
    let parsed = TcpFrame::parse(frame.bytes(), 0).map_err(|_| Refusal::NotTcp)?;
    // The length of the headers that the device gives is not needed, but a wrong one says that the other fields may be
    // wrong, too.
    if segmentation.size == 0 || usize::from(segmentation.headers) > parsed.payload_offset + parsed.payload_length {
        return Err(Refusal::BadSize);
    }
    Ok(Cut { frame, parsed, size: usize::from(segmentation.size), at: 0, count: 0, partial })
}

impl Cut<'_> {
    /// Writes the next segment into `out`. False if there is none left.
    ///
    /// # Panics
    /// If `out` has no room for the headers and one segment.
    pub fn next(&mut self, out: &mut Frame) -> bool {
        let TcpFrame { payload_offset, payload_length, .. } = self.parsed;
        if self.at >= payload_length && self.count > 0 {
            return false;
        }
        let length = self.size.min(payload_length - self.at);
        let from = payload_offset + self.at;
        out.set_length(payload_offset + length);
        let bytes = out.bytes_mut();
        bytes[..payload_offset].copy_from_slice(&self.frame.bytes()[..payload_offset]);
        bytes[payload_offset..].copy_from_slice(&self.frame.bytes()[from..from + length]);
        self.write_headers(bytes, length);
        let start = self.parsed.tcp_offset;
        if self.partial {
            out.checksum = Checksum::Partial { start: start as u16, offset: TCP_CHECKSUM as u16 };
        } else {
            finish_checksum(out.bytes_mut(), start, TCP_CHECKSUM);
            out.checksum = Checksum::Unknown;
        }
        out.segmentation = None;
        out.interface = self.frame.interface;
        self.at += length;
        self.count += 1;
        true
    }

    fn write_headers(&self, bytes: &mut [u8], length: usize) {
        let TcpFrame { tcp_offset, payload_length, seq, flags, flow, .. } = self.parsed;
        if flow.is_v4() {
            let ident = &mut bytes[ETHERNET + ipv4::IDENT..ETHERNET + ipv4::FRAGMENT];
            let next = u16::from_be_bytes([ident[0], ident[1]]).wrapping_add(self.count);
            ident.copy_from_slice(&next.to_be_bytes());
        }
        let mut own = flags.0;
        if self.at + length < payload_length {
            own &= !(Flags::FIN | Flags::PSH).0;
        }
        if self.count > 0 {
            own &= !Flags::CWR.0;
        }
        bytes[tcp_offset + tcp::SEQ..tcp_offset + tcp::ACK].copy_from_slice(&seq.wrapping_add(self.at as u32).to_be_bytes());
        bytes[tcp_offset + tcp::FLAGS] = own;
        set_lengths(bytes, tcp_offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use baton_device::Segmentation;
    use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
    use baton_wire::{Endpoint, Flow, TcpOptions};
    use proptest::prelude::*;
    use std::vec::Vec;

    fn flow(v6: bool) -> Flow {
        if v6 {
            Flow { local: Endpoint::v6([0xfd; 16], 443), remote: Endpoint::v6([0xfe; 16], 1), device: 0 }
        } else {
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40000), device: 0 }
        }
    }

    fn large(v6: bool, timestamps: bool, flags: Flags, payload: &[u8], size: u16) -> Frame {
        let template = Template::new(&flow(v6), &Link { ttl: 64, ..Link::default() }, timestamps);
        let options = TcpOptions { timestamps: timestamps.then_some((7, 8)), ..TcpOptions::default() };
        let header = Header { seq: u32::MAX - 1000, ack: 6, flags, window: 7, options: &options, ecn: 2, ident: 0xfffe };
        let mut frame = Frame::with_capacity(70_000);
        frame.set_length(MAX_HEADER + payload.len());
        let headers = template.emit(&header, payload.len(), frame.bytes_mut());
        frame.set_length(headers + payload.len());
        frame.bytes_mut()[headers..].copy_from_slice(payload);
        frame.segmentation = Some(Segmentation { size, headers: headers as u16, ipv6: v6, ecn: false, udp: false });
        frame
    }

    proptest! {
        /// The segments are valid TCP segments, their payloads make up the frame's, and the flags are in the right
        /// segments.
        #[test]
        fn segments_make_the_frame(v6: bool, timestamps: bool, flags: u8, length in 0usize..30_000, size in 1u16..9000, partial: bool) {
            let length = length.min(usize::from(size) * 100);
            let payload: Vec<u8> = (0..length).map(|n| (n * 7) as u8).collect();
            let flags = Flags(flags | Flags::ACK.0);
            let frame = large(v6, timestamps, flags, &payload, size);
            let mut cut = cut(&frame, partial).unwrap();
            let mut out = Frame::with_capacity(10_000);
            let (mut got, mut count) = (Vec::new(), 0u16);
            while cut.next(&mut out) {
                if let Checksum::Partial { start, offset } = out.checksum {
                    prop_assert!(partial && finish_checksum(out.bytes_mut(), start.into(), offset.into()));
                }
                let parsed = TcpFrame::parse(out.bytes(), 0).unwrap();
                prop_assert!(parsed.checksum_holds(out.bytes()));
                prop_assert_eq!(parsed.seq, (u32::MAX - 1000).wrapping_add(got.len() as u32));
                prop_assert_eq!((parsed.flow, parsed.ack, parsed.window, parsed.ecn), (flow(v6).reversed(), 6, 7, 2));
                prop_assert_eq!(parsed.options.timestamps, timestamps.then_some((7, 8)));
                if !v6 {
                    prop_assert_eq!(u16::from_be_bytes([out.bytes()[18], out.bytes()[19]]), 0xfffeu16.wrapping_add(count));
                }
                got.extend_from_slice(parsed.payload(out.bytes()));
                let last = got.len() == payload.len();
                let expected = flags.0 & !(if last { 0 } else { 0x09 }) & !(if count == 0 { 0 } else { 0x80 });
                prop_assert_eq!(parsed.flags.0, expected);
                prop_assert!(last || parsed.payload_length == usize::from(size));
                count += 1;
            }
            prop_assert_eq!(got, payload);
        }

        /// Whatever the frame's bytes and the device's lengths are, nothing is read or written outside of the frames.
        #[test]
        fn bad_headers_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), size: u16, headers: u16, ipv6: bool) {
            let mut frame = Frame::with_capacity(1000);
            frame.fill(&bytes);
            frame.segmentation = Some(Segmentation { size, headers, ipv6, ecn: false, udp: false });
            if let Ok(mut cut) = cut(&frame, false) {
                let mut out = Frame::with_capacity(1000);
                while cut.next(&mut out) {}
            }
        }
    }

    #[test]
    fn what_cannot_be_cut_says_why() {
        let frame = large(false, true, Flags::ACK, &[1; 100], 0);
        assert_eq!(cut(&frame, false).err(), Some(Refusal::BadSize));
        let mut frame = large(true, true, Flags::ACK, &[1; 100], 10);
        frame.bytes_mut()[12] = 0;
        assert_eq!(cut(&frame, false).err(), Some(Refusal::NotTcp));
    }
}
