//! ICMP messages about an offloaded connection's path MTU (RFC 1191, RFC 8201, RFC 4443). They also go to the kernel, which keeps
//! the MTU of the route.

use baton_wire::checksum::{self, Sum};
use baton_wire::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV6, PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP};
use baton_wire::offset::{ethernet, ipv4, ipv6, tcp};
use baton_wire::{Endpoint, Flow};

/// ICMP type "destination unreachable" and code "fragmentation needed and DF set" (RFC 792).
const FRAGMENTATION_NEEDED: &[u8] = &[3, 4];
/// ICMPv6 type "packet too big" (RFC 4443 section 3.2).
const PACKET_TOO_BIG: u8 = 2;

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Reads a "fragmentation needed" or "packet too big" message: the 4-tuple of the connection seen from this host, the sequence
/// number of the segment that was too big, and the MTU. None for any other frame.
pub(crate) fn too_big(frame: &[u8]) -> Option<(Flow, u32, u32)> {
    match be16(frame, ethernet::TYPE)? {
        ETHERTYPE_IPV4 if *frame.get(ETHERNET + ipv4::PROTOCOL)? == PROTOCOL_ICMP => {
            let end = ETHERNET + usize::from(be16(frame, ETHERNET + ipv4::LENGTH)?);
            let icmp = frame.get(ETHERNET + usize::from(frame[ETHERNET] & 15) * 4..end)?;
            if icmp.get(..2)? != FRAGMENTATION_NEEDED || Sum::new().bytes(icmp).finish() != 0 {
                return None;
            }
            let inner = icmp.get(8..)?;
            let header = usize::from(inner.first()? & 15) * 4;
            if inner.get(ipv4::PROTOCOL)? != &PROTOCOL_TCP {
                return None;
            }
            let address = |at: usize| <[u8; 4]>::try_from(inner.get(at..at + 4)?).ok();
            let (local, remote) = (address(ipv4::SOURCE)?, address(ipv4::DESTINATION)?);
            let flow =
                Flow { local: Endpoint::v4(local, be16(inner, header)?), remote: Endpoint::v4(remote, be16(inner, header + 2)?) };
            Some((flow, sequence(inner, header)?, u32::from(be16(icmp, 6)?)))
        }
        ETHERTYPE_IPV6 if *frame.get(ETHERNET + ipv6::NEXT_HEADER)? == PROTOCOL_ICMPV6 => {
            let icmp = frame.get(ETHERNET + IPV6..ETHERNET + IPV6 + usize::from(be16(frame, ETHERNET + ipv6::LENGTH)?))?;
            const SOURCE: usize = ETHERNET + ipv6::SOURCE;
            const DESTINATION: usize = ETHERNET + ipv6::DESTINATION;
            let pseudo = checksum::pseudo_header(
                frame.get(SOURCE..DESTINATION)?,
                frame.get(DESTINATION..ETHERNET + IPV6)?,
                PROTOCOL_ICMPV6,
                icmp.len(),
            );
            if icmp.first()? != &PACKET_TOO_BIG || pseudo.bytes(icmp).finish() != 0 {
                return None;
            }
            let mtu = u32::from(be16(icmp, 4)?) << 16 | u32::from(be16(icmp, 6)?);
            let inner = icmp.get(8..)?;
            if inner.get(ipv6::NEXT_HEADER)? != &PROTOCOL_TCP {
                return None;
            }
            let address = |at: usize| <[u8; 16]>::try_from(inner.get(at..at + 16)?).ok();
            let flow = Flow {
                local: Endpoint::v6(address(ipv6::SOURCE)?, be16(inner, IPV6)?),
                remote: Endpoint::v6(address(ipv6::DESTINATION)?, be16(inner, IPV6 + 2)?),
            };
            Some((flow, sequence(inner, IPV6)?, mtu))
        }
        _ => None,
    }
}

/// The sequence number in the first bytes of a TCP header at `header`.
fn sequence(inner: &[u8], header: usize) -> Option<u32> {
    Some(u32::from(be16(inner, header + tcp::SEQ)?) << 16 | u32::from(be16(inner, header + tcp::SEQ + 2)?))
}
