//! ICMP messages of a router that a segment is too big for (RFC 1191, RFC 8201).

use baton_device::Frame;
use baton_wire::checksum::{self, Sum};
use baton_wire::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV6, PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP};
use baton_wire::offset::{ethernet, ipv4, ipv6};
use baton_wire::{Endpoint, Flow};

/// Type 3, code 4: fragmentation needed and DF set (RFC 792).
const FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
/// Type 2, code 0: packet too big (RFC 4443 section 3.2).
const PACKET_TOO_BIG: [u8; 2] = [2, 0];
const HEADER: usize = 8;
/// Bytes of the TCP header that a message quotes: the ports and the sequence number.
const QUOTED: usize = 8;
/// Offset of the checksum in an ICMP header.
const CHECKSUM: usize = 2;

/// The message about a frame that does not fit into `mtu` bytes, for its sender.
pub(crate) fn too_big(frame: &[u8], mtu: u16) -> Frame {
    let v4 = ethertype(frame) == Some(ETHERTYPE_IPV4);
    let bytes = if v4 { too_big_v4(frame, mtu) } else { too_big_v6(frame, mtu) };
    let mut message = Frame::with_capacity(bytes.len());
    message.fill(&bytes);
    message
}

fn too_big_v4(frame: &[u8], mtu: u16) -> Vec<u8> {
    let offending = &frame[ETHERNET..frame.len().min(ETHERNET + IPV4 + QUOTED)];
    let length = IPV4 + HEADER + offending.len();
    let mut ip = vec![0x45, 0, (length >> 8) as u8, length as u8, 0, 0, 0, 0, 64, PROTOCOL_ICMP, 0, 0];
    // From the router, which needs no address of its own here, to the sender.
    ip.extend([10, 0, 0, 254]);
    ip.extend(&offending[ipv4::SOURCE..ipv4::DESTINATION]);
    let sum = Sum::new().bytes(&ip).finish();
    put(&mut ip, ipv4::CHECKSUM, sum);
    let mut icmp = vec![FRAGMENTATION_NEEDED[0], FRAGMENTATION_NEEDED[1], 0, 0, 0, 0];
    icmp.extend(mtu.to_be_bytes());
    icmp.extend(offending);
    let sum = Sum::new().bytes(&icmp).finish();
    put(&mut icmp, CHECKSUM, sum);
    [&[0; ethernet::TYPE][..], &ETHERTYPE_IPV4.to_be_bytes(), &ip, &icmp].concat()
}

fn too_big_v6(frame: &[u8], mtu: u16) -> Vec<u8> {
    let offending = &frame[ETHERNET..frame.len().min(ETHERNET + IPV6 + QUOTED)];
    let length = (HEADER + offending.len()) as u16;
    let mut ip = vec![0x60, 0, 0, 0];
    ip.extend(length.to_be_bytes());
    ip.extend([PROTOCOL_ICMPV6, 64]);
    ip.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 254]);
    ip.extend(&offending[ipv6::SOURCE..ipv6::DESTINATION]);
    let mut icmp = vec![PACKET_TOO_BIG[0], PACKET_TOO_BIG[1], 0, 0, 0, 0];
    icmp.extend(mtu.to_be_bytes());
    icmp.extend(offending);
    let sum = pseudo(&ip, icmp.len()).bytes(&icmp).finish();
    put(&mut icmp, CHECKSUM, sum);
    [&[0; ethernet::TYPE][..], &ETHERTYPE_IPV6.to_be_bytes(), &ip, &icmp].concat()
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The sum over the pseudo-header of an ICMPv6 message of `length` bytes.
fn pseudo(ip: &[u8], length: usize) -> Sum {
    checksum::pseudo_header(&ip[ipv6::SOURCE..ipv6::DESTINATION], &ip[ipv6::DESTINATION..IPV6], PROTOCOL_ICMPV6, length)
}

fn ethertype(frame: &[u8]) -> Option<u16> {
    be16(frame, ethernet::TYPE)
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Reads such a message: the 4-tuple of the connection seen from its receiver, and the MTU.
pub(crate) fn read(frame: &[u8]) -> Option<(Flow, u32)> {
    let ip = frame.get(ETHERNET..)?;
    if ethertype(frame)? == ETHERTYPE_IPV4 { read_v4(ip) } else { read_v6(ip) }
}

fn read_v4(ip: &[u8]) -> Option<(Flow, u32)> {
    let icmp = ip.get(IPV4..)?;
    let inner = icmp.get(HEADER..)?;
    let right = ip[ipv4::PROTOCOL] == PROTOCOL_ICMP && icmp[..2] == FRAGMENTATION_NEEDED && Sum::new().bytes(icmp).finish() == 0;
    if !right || *inner.get(ipv4::PROTOCOL)? != PROTOCOL_TCP {
        return None;
    }
    let end = |address: usize, port: usize| Some(Endpoint::v4(inner.get(address..)?.first_chunk().copied()?, be16(inner, port)?));
    let flow = Flow { local: end(ipv4::SOURCE, IPV4)?, remote: end(ipv4::DESTINATION, IPV4 + 2)?, device: 0 };
    Some((flow, u32::from(be16(icmp, 6)?)))
}

fn read_v6(ip: &[u8]) -> Option<(Flow, u32)> {
    let icmp = ip.get(IPV6..)?;
    let inner = icmp.get(HEADER..)?;
    let right = ip[ipv6::NEXT_HEADER] == PROTOCOL_ICMPV6
        && icmp[..2] == PACKET_TOO_BIG
        && pseudo(ip, icmp.len()).bytes(icmp).finish() == 0;
    if !right || *inner.get(ipv6::NEXT_HEADER)? != PROTOCOL_TCP {
        return None;
    }
    let end = |address: usize, port: usize| Some(Endpoint::v6(inner.get(address..)?.first_chunk().copied()?, be16(inner, port)?));
    let flow = Flow { local: end(ipv6::SOURCE, IPV6)?, remote: end(ipv6::DESTINATION, IPV6 + 2)?, device: 0 };
    Some((flow, u32::from(be16(icmp, 6)?)))
}
