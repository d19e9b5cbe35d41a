//! ICMP messages of a router that a segment is too big for (RFC 1191).

use baton_device::Frame;
use baton_wire::checksum::Sum;
use baton_wire::{Endpoint, Flow};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
/// Type 3, code 4: fragmentation needed and DF set (RFC 792).
const FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
const ICMP_HEADER: usize = 8;
const PROTOCOL: usize = 9;
const ICMP: u8 = 1;
const TCP: u8 = 6;

/// The message about a frame that does not fit into `mtu` bytes, for its sender.
pub(crate) fn too_big(frame: &[u8], mtu: u16) -> Frame {
    let offending = &frame[ETHERNET..frame.len().min(ETHERNET + IPV4 + ICMP_HEADER)];
    let length = IPV4 + ICMP_HEADER + offending.len();
    let mut ip = vec![0x45, 0, (length >> 8) as u8, length as u8, 0, 0, 0, 0, 64, ICMP, 0, 0];
    // From the router, which needs no address of its own here, to the sender.
    ip.extend([10, 0, 0, 254]);
    ip.extend(&offending[12..16]);
    let sum = Sum::new().bytes(&ip).finish().to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let mut icmp = vec![FRAGMENTATION_NEEDED[0], FRAGMENTATION_NEEDED[1], 0, 0, 0, 0];
    icmp.extend(mtu.to_be_bytes());
    icmp.extend(offending);
    let sum = Sum::new().bytes(&icmp).finish().to_be_bytes();
    icmp[2..4].copy_from_slice(&sum);
    let bytes: Vec<u8> = [&[0; 12][..], &[8, 0], &ip, &icmp].concat();
    let mut message = Frame::with_capacity(bytes.len());
    message.fill(&bytes);
    message
}

/// Reads such a message: the 4-tuple of the connection seen from its receiver, and the MTU.
pub(crate) fn read(frame: &[u8]) -> Option<(Flow, u32)> {
    let ip = frame.get(ETHERNET..)?;
    let icmp = ip.get(IPV4..)?;
    let inner = icmp.get(ICMP_HEADER..)?;
    if frame[12..14] != [8, 0]
        || ip[PROTOCOL] != ICMP
        || icmp[..2] != FRAGMENTATION_NEEDED
        || Sum::new().bytes(icmp).finish() != 0
    {
        return None;
    }
    if *inner.get(PROTOCOL)? != TCP {
        return None;
    }
    let end = |address: usize, port: usize| -> Option<Endpoint> {
        let address = <[u8; 4]>::try_from(inner.get(address..address + 4)?).ok()?;
        let port = <[u8; 2]>::try_from(inner.get(port..port + 2)?).ok()?;
        Some(Endpoint::v4(address, u16::from_be_bytes(port)))
    };
    let flow = Flow { local: end(12, IPV4)?, remote: end(16, IPV4 + 2)? };
    Some((flow, u32::from(u16::from_be_bytes([icmp[6], icmp[7]]))))
}
