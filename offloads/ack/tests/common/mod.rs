//! Frames, and memory that survives the NIC.

mod memory;

use baton_device::{Checksum, Frame};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
pub use memory::Memory;

pub const KEY: [u64; 4] = [1, 2, 3, 4];
const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// The 4-tuple as the kernel sees it.
pub fn flow(ipv6: bool) -> Flow {
    if ipv6 {
        Flow { local: Endpoint::v6([0xfd; 16], 80), remote: Endpoint::v6([0xfe; 16], 40_000), device: 0 }
    } else {
        Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40_000), device: 0 }
    }
}

pub fn byte(seq: u32) -> u8 {
    (seq ^ seq >> 8 ^ seq >> 16) as u8
}

pub fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

#[derive(Clone, Copy, Default)]
pub struct Segment {
    pub seq: u32,
    pub ack: u32,
    pub flags: Flags,
    pub window: u16,
    pub options: TcpOptions,
    pub ecn: u8,
}

pub fn frame(flow: &Flow, from_kernel: bool, said: &Segment, length: usize, whole_sum: bool) -> Frame {
    let (source, destination) = if from_kernel { (OUR_MAC, PEER_MAC) } else { (PEER_MAC, OUR_MAC) };
    let template = Template::new(flow, &Link { source, destination, ttl: 64, ..Link::default() }, false);
    let Segment { seq, ack, flags, window, options, ecn } = *said;
    let header = Header { seq, ack, flags, window, options: &options, ecn, ident: 0 };
    let mut frame = Frame::with_capacity(MAX_HEADER + length);
    frame.set_length(MAX_HEADER + length);
    let headers = template.emit(&header, length, frame.bytes_mut());
    frame.set_length(headers + length);
    frame.bytes_mut()[headers..].iter_mut().enumerate().for_each(|(at, found)| *found = byte(seq.wrapping_add(at as u32)));
    if whole_sum {
        finish_checksum(frame.bytes_mut(), template.tcp_offset(), 16);
    } else {
        frame.checksum = Checksum::Partial { start: template.tcp_offset() as u16, offset: 16 };
    }
    frame
}

pub fn parse(frame: &Frame) -> TcpFrame {
    TcpFrame::parse(frame.bytes(), 0).expect("a segment")
}
