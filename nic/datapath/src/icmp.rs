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
/// Smallest path MTU in bytes that a message can set: Linux's net.ipv4.route.min_pmtu, and RFC 8201 section 4.
const MIN_MTU_V4: u32 = 552;
const MIN_MTU_V6: u32 = 1280;

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Reads a "fragmentation needed" or "packet too big" message: the 4-tuple of the connection seen from this host, the sequence
/// number of the segment that was too big, and the MTU. None for any other frame, and for an MTU that is too small to be true.
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
            let mtu = Some(u32::from(be16(icmp, 6)?)).filter(|mtu| *mtu >= MIN_MTU_V4)?;
            Some((flow, sequence(inner, header)?, mtu))
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
            let mtu = Some(u32::from(be16(icmp, 4)?) << 16 | u32::from(be16(icmp, 6)?)).filter(|mtu| *mtu >= MIN_MTU_V6)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A message about a segment with sequence number 0x01020304 between ports 80 and 40000.
    fn message(v4: bool, mtu: u32) -> Vec<u8> {
        let ports = [0, 80, 0x9c, 0x40, 1, 2, 3, 4];
        let addresses: Vec<u8> = (0..32).collect();
        let [high, low] = [(mtu >> 16) as u16, mtu as u16].map(u16::to_be_bytes);
        let (ip, mut icmp) = if v4 {
            let inner = [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, PROTOCOL_TCP, 0, 0][..], &addresses[..8], &ports].concat();
            let icmp = [FRAGMENTATION_NEEDED, &[0, 0, 0, 0], &low, &inner].concat();
            let outer = [0x45, 0, 0, (20 + icmp.len()) as u8, 0, 0, 0, 0, 64, PROTOCOL_ICMP, 0, 0];
            ([&[8, 0][..], &outer, &addresses[..8]].concat(), icmp)
        } else {
            let inner = [&[0x60, 0, 0, 0, 0, 8, PROTOCOL_TCP, 64][..], &addresses, &ports].concat();
            let icmp = [&[PACKET_TOO_BIG, 0, 0, 0][..], &high, &low, &inner].concat();
            let outer = [0x60, 0, 0, 0, 0, icmp.len() as u8, PROTOCOL_ICMPV6, 64];
            ([&[0x86, 0xdd][..], &outer, &addresses].concat(), icmp)
        };
        let sum = if v4 {
            Sum::new()
        } else {
            checksum::pseudo_header(&addresses[..16], &addresses[16..], PROTOCOL_ICMPV6, icmp.len())
        };
        let sum = sum.bytes(&icmp).finish();
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        [&[0; ethernet::TYPE][..], &ip, &icmp].concat()
    }

    #[test]
    fn an_mtu_that_no_path_has_is_not_believed() {
        for (v4, least) in [(true, MIN_MTU_V4), (false, MIN_MTU_V6)] {
            let (flow, seq, mtu) = too_big(&message(v4, least)).expect("a message");
            assert_eq!((flow.local.port, flow.remote.port, seq, mtu, flow.is_v4()), (80, 40000, 0x0102_0304, least, v4));
            assert_eq!(too_big(&message(v4, least - 1)), None);
            let mut damaged = message(v4, 1400);
            *damaged.last_mut().expect("a byte") ^= 1;
            assert_eq!(too_big(&damaged), None);
        }
    }
}
