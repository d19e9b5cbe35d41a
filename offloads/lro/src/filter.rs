//! The packet filter: the tests of the paper's Figure 6. A frame that fails one goes to the kernel unchanged.

use baton_device::{Checksum, Frame};
use baton_wire::frame::{ETHERNET, FrameError};
use baton_wire::{Flags, TcpFrame};

/// The tests, in the order in which they are applied. Each names a property that a frame must have to pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Test {
    /// The frame is one segment, and does not stand for several already.
    Single,
    /// IPv4 or IPv6 directly behind the Ethernet header: no ARP, no VLAN tag.
    Ip,
    /// TCP directly behind the IP header: no UDP, no IPv6 extension header.
    Tcp,
    /// Not a fragment.
    Whole,
    /// All lengths and offsets in its headers lie inside the frame.
    WellFormed,
    /// No IPv4 options.
    NoIpOptions,
    /// No bytes behind the IP packet, such as the padding of a short frame.
    NoPadding,
    /// The IPv4 header checksum and the TCP checksum are right.
    Checksums,
    /// ACK is set; SYN, RST, URG and CWR are not.
    OrdinaryFlags,
    /// It carries data: not a pure acknowledgement.
    Data,
}

impl Test {
    /// Number of tests.
    pub const COUNT: usize = Test::Data as usize + 1;
}

/// The result of the filter.
pub(crate) enum Verdict {
    /// The frame belongs to no connection, or is damaged.
    Foreign(Test),
    /// A segment that is not merged, with the test that it failed.
    Passes(TcpFrame, Test),
    /// A data segment that may be merged.
    Data(TcpFrame),
}

/// Segments with any of these flags end aggregation and go to the kernel unchanged.
const NEVER_AGGREGATED: Flags = Flags::SYN.union(Flags::RST).union(Flags::URG).union(Flags::CWR);

/// First byte of an IPv4 header without options: version 4, five words.
const IPV4_NO_OPTIONS: u8 = 0x45;

/// Applies the tests to a frame.
pub(crate) fn examine(frame: &Frame) -> Verdict {
    if frame.segmentation.is_some() {
        return match TcpFrame::parse(frame.bytes(), 0) {
            Ok(parsed) => Verdict::Passes(parsed, Test::Single),
            Err(_) => Verdict::Foreign(Test::Single),
        };
    }
    let bytes = frame.bytes();
    let parsed = match TcpFrame::parse(bytes, 0) {
        Ok(parsed) => parsed,
        Err(FrameError::NotIp) => return Verdict::Foreign(Test::Ip),
        Err(FrameError::NotTcp) => return Verdict::Foreign(Test::Tcp),
        Err(FrameError::Fragment) => return Verdict::Foreign(Test::Whole),
        Err(FrameError::Malformed) => return Verdict::Foreign(Test::WellFormed),
        Err(FrameError::Checksum) => return Verdict::Foreign(Test::Checksums),
    };
    if parsed.flow.is_v4() && bytes[ETHERNET] != IPV4_NO_OPTIONS {
        return Verdict::Passes(parsed, Test::NoIpOptions);
    }
    if parsed.payload_offset + parsed.payload_length != bytes.len() {
        return Verdict::Passes(parsed, Test::NoPadding);
    }
    if frame.checksum == Checksum::Unknown && !parsed.checksum_holds(bytes) {
        return Verdict::Foreign(Test::Checksums);
    }
    if parsed.flags.intersects(NEVER_AGGREGATED) || !parsed.flags.contains(Flags::ACK) {
        return Verdict::Passes(parsed, Test::OrdinaryFlags);
    }
    if parsed.payload_length == 0 {
        return Verdict::Passes(parsed, Test::Data);
    }
    Verdict::Data(parsed)
}
