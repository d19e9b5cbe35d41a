//! ICMP messages about a connection on the NIC: about its path MTU (RFC 1191, RFC 8201, RFC 4443), and, while it is
//! opened, that its peer cannot be reached (RFC 1122 section 4.2.3.9). They also go to the kernel, which keeps the MTU
//! of the route.

use baton_wire::checksum::{self, Sum};
use baton_wire::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV6, PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP};
use baton_wire::offset::{ethernet, ipv4, ipv6, tcp};
use baton_wire::{Endpoint, Flow};

/// The content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The segment was too big for a link with this MTU.
    TooBig(u32),
    /// The segment did not reach the peer; with Linux's error number.
    Unreachable(u32),
}

/// A message about a segment that this host has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    /// The connection, as seen from this host.
    pub flow: Flow,
    /// The segment's sequence number.
    pub seq: u32,
    pub report: Report,
}

const EACCES: u32 = 13;
const EPROTO: u32 = 71;
const ENOPROTOOPT: u32 = 92;
const ENETUNREACH: u32 = 101;
const ECONNREFUSED: u32 = 111;
const EHOSTDOWN: u32 = 112;
const EHOSTUNREACH: u32 = 113;
const ENONET: u32 = 64;

/// ICMP's types "destination unreachable", "time exceeded", "parameter problem" (RFC 792), and the code "fragmentation
/// needed".
const UNREACHABLE: u8 = 3;
const TIME_EXCEEDED: u8 = 11;
const PARAMETER_PROBLEM: u8 = 12;
const FRAGMENTATION_NEEDED: u8 = 4;

/// Linux's error for each code of "destination unreachable" (RFC 792, RFC 1122, RFC 1812); 0 for the fourth code, which
/// is no error.
const ERRORS: [u32; 16] = [
    ENETUNREACH,
    EHOSTUNREACH,
    ENOPROTOOPT,
    ECONNREFUSED,
    0,
    95, // EOPNOTSUPP
    ENETUNREACH,
    EHOSTDOWN,
    ENONET,
    ENETUNREACH,
    EHOSTUNREACH,
    ENETUNREACH,
    EHOSTUNREACH,
    EHOSTUNREACH,
    EHOSTUNREACH,
    EHOSTUNREACH,
];

/// ICMPv6's types (RFC 4443 section 3), and Linux's error for each code of the first.
const UNREACHABLE_6: u8 = 1;
const TOO_BIG_6: u8 = 2;
const TIME_EXCEEDED_6: u8 = 3;
const PARAMETER_PROBLEM_6: u8 = 4;
const ERRORS_6: [u32; 7] = [ENETUNREACH, EACCES, EHOSTUNREACH, EHOSTUNREACH, ECONNREFUSED, EACCES, EACCES];

/// Smallest path MTU in bytes that a message can set (Linux's net.ipv4.route.min_pmtu): one that says less, or 0 as
/// routers do that are older than RFC 1191, stands for this. What is sent may be fragmented then
/// ([`Offloaded::set_mtu`](crate::offloaded::Offloaded::set_mtu)).
pub(crate) const MIN_MTU: u32 = 552;
/// The same for IPv6, where a message that says less is dropped (RFC 8201 section 4).
const MIN_MTU_6: u32 = 1280;

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Reads a message about a TCP segment, which came by this device. None for any other frame, and over IPv6 for an MTU
/// that is too small to be true.
pub(crate) fn about(frame: &[u8], device: u32) -> Option<About> {
    match be16(frame, ethernet::TYPE)? {
        ETHERTYPE_IPV4 if *frame.get(ETHERNET + ipv4::PROTOCOL)? == PROTOCOL_ICMP => about_v4(frame, device),
        ETHERTYPE_IPV6 if *frame.get(ETHERNET + ipv6::NEXT_HEADER)? == PROTOCOL_ICMPV6 => about_v6(frame, device),
        _ => None,
    }
}

fn about_v4(frame: &[u8], device: u32) -> Option<About> {
    let end = ETHERNET + usize::from(be16(frame, ETHERNET + ipv4::LENGTH)?);
    let icmp = frame.get(ETHERNET + usize::from(frame[ETHERNET] & 15) * 4..end)?;
    let report = match (*icmp.first()?, *icmp.get(1)?) {
        (UNREACHABLE, FRAGMENTATION_NEEDED) => Report::TooBig(MIN_MTU.max(be16(icmp, 6)?.into())),
        (UNREACHABLE, code) => Report::Unreachable(*ERRORS.get(usize::from(code))?),
        (TIME_EXCEEDED, _) => Report::Unreachable(EHOSTUNREACH),
        (PARAMETER_PROBLEM, _) => Report::Unreachable(EPROTO),
        _ => return None,
    };
    if Sum::new().bytes(icmp).finish() != 0 {
        return None;
    }
    let inner = icmp.get(8..)?;
    let header = usize::from(inner.first()? & 15) * 4;
    if inner.get(ipv4::PROTOCOL)? != &PROTOCOL_TCP {
        return None;
    }
    let address = |at: usize| <[u8; 4]>::try_from(inner.get(at..at + 4)?).ok();
    let (local, remote) = (address(ipv4::SOURCE)?, address(ipv4::DESTINATION)?);
    let (local, remote) = (Endpoint::v4(local, be16(inner, header)?), Endpoint::v4(remote, be16(inner, header + 2)?));
    let flow = Flow { local, remote, device };
    Some(About { flow, seq: sequence(inner, header)?, report })
}

fn about_v6(frame: &[u8], device: u32) -> Option<About> {
    let icmp = frame.get(ETHERNET + IPV6..ETHERNET + IPV6 + usize::from(be16(frame, ETHERNET + ipv6::LENGTH)?))?;
    const SOURCE: usize = ETHERNET + ipv6::SOURCE;
    const DESTINATION: usize = ETHERNET + ipv6::DESTINATION;
    let report = match (*icmp.first()?, *icmp.get(1)?) {
        (TOO_BIG_6, _) => {
            let mtu = u32::from(be16(icmp, 4)?) << 16 | u32::from(be16(icmp, 6)?);
            Report::TooBig(Some(mtu).filter(|mtu| *mtu >= MIN_MTU_6)?)
        }
        (UNREACHABLE_6, code) => Report::Unreachable(*ERRORS_6.get(usize::from(code))?),
        (TIME_EXCEEDED_6, _) => Report::Unreachable(EHOSTUNREACH),
        (PARAMETER_PROBLEM_6, _) => Report::Unreachable(EPROTO),
        _ => return None,
    };
    let addresses = (frame.get(SOURCE..DESTINATION)?, frame.get(DESTINATION..ETHERNET + IPV6)?);
    if checksum::pseudo_header(addresses.0, addresses.1, PROTOCOL_ICMPV6, icmp.len()).bytes(icmp).finish() != 0 {
        return None;
    }
    let inner = icmp.get(8..)?;
    if inner.get(ipv6::NEXT_HEADER)? != &PROTOCOL_TCP {
        return None;
    }
    let address = |at: usize| <[u8; 16]>::try_from(inner.get(at..at + 16)?).ok();
    let flow = Flow {
        local: Endpoint::v6(address(ipv6::SOURCE)?, be16(inner, IPV6)?),
        remote: Endpoint::v6(address(ipv6::DESTINATION)?, be16(inner, IPV6 + 2)?),
        device,
    };
    Some(About { flow, seq: sequence(inner, IPV6)?, report })
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
            let icmp = [&[UNREACHABLE, FRAGMENTATION_NEEDED, 0, 0, 0, 0][..], &low, &inner].concat();
            let outer = [0x45, 0, 0, (20 + icmp.len()) as u8, 0, 0, 0, 0, 64, PROTOCOL_ICMP, 0, 0];
            ([&[8, 0][..], &outer, &addresses[..8]].concat(), icmp)
        } else {
            let inner = [&[0x60, 0, 0, 0, 0, 8, PROTOCOL_TCP, 64][..], &addresses, &ports].concat();
            let icmp = [&[TOO_BIG_6, 0, 0, 0][..], &high, &low, &inner].concat();
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
        for (v4, least) in [(true, MIN_MTU), (false, MIN_MTU_6)] {
            let About { flow, seq, report } = about(&message(v4, least), 0).expect("a message");
            assert_eq!((flow.local.port, flow.remote.port, seq, flow.is_v4()), (80, 40000, 0x0102_0304, v4));
            assert_eq!(report, Report::TooBig(least));
            for less in [0, 1, 68, 296, least - 1] {
                let report = about(&message(v4, less), 0).map(|about| about.report);
                assert_eq!(report, v4.then_some(Report::TooBig(MIN_MTU)), "an MTU of {less}");
            }
            let mut damaged = message(v4, 1400);
            *damaged.last_mut().expect("a byte") ^= 1;
            assert!(about(&damaged, 0).is_none());
        }
    }
}
