//! ICMP messages that concern an offloaded connection's path MTU (RFC 1191, RFC 8201, RFC 4443). They still go to the kernel,
//! which keeps the route's MTU.

use baton_wire::checksum::{self, Sum};
use baton_wire::{Endpoint, Flow};

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// The flow, seen from this host, sequence number and MTU that a "fragmentation needed" or "packet too big" is about.
pub(crate) fn too_big(frame: &[u8]) -> Option<(Flow, u32, u32)> {
    match be16(frame, 12)? {
        0x0800 if *frame.get(23)? == 1 => {
            let end = 14 + usize::from(be16(frame, 16)?);
            let icmp = frame.get(14 + usize::from(frame[14] & 15) * 4..end)?;
            if icmp.first()? != &3 || icmp.get(1)? != &4 || Sum::new().bytes(icmp).finish() != 0 {
                return None;
            }
            let inner = icmp.get(8..)?;
            let header = usize::from(inner.first()? & 15) * 4;
            if inner.get(9)? != &6 {
                return None;
            }
            let address = |at: usize| <[u8; 4]>::try_from(inner.get(at..at + 4)?).ok();
            let (local, remote) = (address(12)?, address(16)?);
            let flow =
                Flow { local: Endpoint::v4(local, be16(inner, header)?), remote: Endpoint::v4(remote, be16(inner, header + 2)?) };
            Some((flow, sequence(inner, header)?, u32::from(be16(icmp, 6)?)))
        }
        0x86dd if *frame.get(20)? == 58 => {
            let icmp = frame.get(54..54 + usize::from(be16(frame, 18)?))?;
            let pseudo = checksum::pseudo_header(frame.get(22..38)?, frame.get(38..54)?, 58, icmp.len());
            if icmp.first()? != &2 || pseudo.bytes(icmp).finish() != 0 {
                return None;
            }
            let mtu = u32::from(be16(icmp, 4)?) << 16 | u32::from(be16(icmp, 6)?);
            let inner = icmp.get(8..)?;
            if inner.get(6)? != &6 {
                return None;
            }
            let address = |at: usize| <[u8; 16]>::try_from(inner.get(at..at + 16)?).ok();
            let flow =
                Flow { local: Endpoint::v6(address(8)?, be16(inner, 40)?), remote: Endpoint::v6(address(24)?, be16(inner, 42)?) };
            Some((flow, sequence(inner, 40)?, mtu))
        }
        _ => None,
    }
}

fn sequence(inner: &[u8], header: usize) -> Option<u32> {
    Some(u32::from(be16(inner, header + 4)?) << 16 | u32::from(be16(inner, header + 6)?))
}
