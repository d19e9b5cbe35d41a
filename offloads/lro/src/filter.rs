//! The packet filter: the tests of the paper's Figure 6, by name. Whoever fails one goes to the kernel as he is.

use baton_device::{Checksum, Frame};
use baton_wire::frame::{ETHERNET, FrameError};
use baton_wire::{Flags, TcpFrame};

/// The tests, in the order in which they are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Test {
    /// It stands for one segment, not already for many.
    Single,
    /// IPv4 or IPv6 right behind the Ethernet header: no ARP, no VLAN tag.
    Ip,
    /// TCP right behind that: no UDP, no IPv6 extension header.
    Tcp,
    /// No fragment.
    Whole,
    /// Lengths and offsets lie inside the frame.
    WellFormed,
    /// No IPv4 options.
    NoIpOptions,
    /// No bytes behind the packet: padding of a short frame.
    NoPadding,
    /// Both checksums hold.
    Checksums,
    /// ACK is set; SYN, RST, URG and CWR are not.
    OrdinaryFlags,
    /// It carries data: no pure acknowledgement.
    Data,
}

impl Test {
    /// How many there are.
    pub const COUNT: usize = Test::Data as usize + 1;
}

/// What the filter says of a frame.
pub(crate) enum Verdict {
    /// It is none of a connection's.
    Foreign(Test),
    /// It is a connection's, but goes on as it is.
    Passes(TcpFrame, Test),
    /// It may be merged.
    Data(TcpFrame),
}

/// Flags that say more than that there is data.
const SPECIAL: Flags = Flags(Flags::SYN.0 | Flags::RST.0 | Flags::URG.0 | Flags::CWR.0);

pub(crate) fn examine(frame: &Frame) -> Verdict {
    if frame.segmentation.is_some() {
        return match TcpFrame::parse(frame.bytes()) {
            Ok(parsed) => Verdict::Passes(parsed, Test::Single),
            Err(_) => Verdict::Foreign(Test::Single),
        };
    }
    let bytes = frame.bytes();
    let parsed = match TcpFrame::parse(bytes) {
        Ok(parsed) => parsed,
        Err(FrameError::NotIp) => return Verdict::Foreign(Test::Ip),
        Err(FrameError::NotTcp) => return Verdict::Foreign(Test::Tcp),
        Err(FrameError::Fragment) => return Verdict::Foreign(Test::Whole),
        Err(FrameError::Malformed) => return Verdict::Foreign(Test::WellFormed),
        Err(FrameError::Checksum) => return Verdict::Foreign(Test::Checksums),
    };
    if parsed.flow.is_v4() && bytes[ETHERNET] != 0x45 {
        return Verdict::Passes(parsed, Test::NoIpOptions);
    }
    if parsed.payload_offset + parsed.payload_length != bytes.len() {
        return Verdict::Passes(parsed, Test::NoPadding);
    }
    if frame.checksum == Checksum::Unknown && !parsed.checksum_holds(bytes) {
        return Verdict::Foreign(Test::Checksums);
    }
    if parsed.flags.intersects(SPECIAL) || !parsed.flags.contains(Flags::ACK) {
        return Verdict::Passes(parsed, Test::OrdinaryFlags);
    }
    if parsed.payload_length == 0 {
        return Verdict::Passes(parsed, Test::Data);
    }
    Verdict::Data(parsed)
}
