//! The answer to a packet that a filter refuses: a TCP reset, or ICMP's "communication administratively prohibited".

use crate::TcpFrame;
use crate::checksum::{Sum, pseudo_header};
use crate::frame::{
    ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, IPV4, IPV6, Link, MAX_HEADER, PROTOCOL_ICMP, PROTOCOL_ICMPV6, TCP_CHECKSUM,
    Template, finish_checksum,
};
use crate::offset::{ethernet, ipv4, ipv6};
use crate::tcp::{Flags, TcpOptions};

/// The longest answer.
pub const MAX_REFUSAL: usize = ETHERNET + IPV6 + ICMP + MAX_QUOTED;

/// Bytes of an ICMP header.
const ICMP: usize = 8;
/// Most bytes of the refused packet that an ICMP message quotes; RFC 792 wants its header and 8 more, RFC 4443 as many
/// as fit.
const MAX_QUOTED: usize = 128;
/// Time to live, or hop limit, of an answer.
const TTL: u8 = 64;
/// ICMP type "destination unreachable" and code 13 (RFC 1812 section 5.2.7.1); of ICMPv6: type 1, code 1 (RFC 4443
/// section 3.1).
const PROHIBITED: [u8; 2] = [3, 13];
const PROHIBITED_V6: [u8; 2] = [1, 1];
/// ICMP's error messages, which are not answered (RFC 1122 section 3.2.2); ICMPv6's are those below 128.
const ICMP_ERRORS: [u8; 5] = [3, 4, 5, 11, 12];

/// Writes the answer to a frame, as from its receiver to its sender, and returns its length. None if there must be
/// none: to a reset, an ICMP error, a later fragment, something sent to several hosts, a frame without a readable IP
/// packet.
pub fn refuse(frame: &[u8], out: &mut [u8; MAX_REFUSAL]) -> Option<usize> {
    let (destination, source) = (frame.first_chunk::<6>()?, frame.get(ethernet::SOURCE..)?.first_chunk::<6>()?);
    if destination[0] & 1 != 0 || source[0] & 1 != 0 {
        return None;
    }
    if let Ok(segment) = TcpFrame::parse(frame, 0) {
        let link = Link { source: *destination, destination: *source, ttl: TTL, ..Link::default() };
        return reset(&segment, &link, out);
    }
    let kind = u16::from_be_bytes(*frame.get(ethernet::TYPE..)?.first_chunk()?);
    out[..6].copy_from_slice(source);
    out[6..12].copy_from_slice(destination);
    out[ethernet::TYPE..ETHERNET].copy_from_slice(&kind.to_be_bytes());
    match kind {
        ETHERTYPE_IPV4 => prohibited_v4(&frame[ETHERNET..], out),
        ETHERTYPE_IPV6 => prohibited_v6(&frame[ETHERNET..], out),
        _ => None,
    }
}

/// Writes the reset that answers a segment to a closed port (RFC 9293 section 3.10.7.1).
fn reset(segment: &TcpFrame, link: &Link, out: &mut [u8; MAX_REFUSAL]) -> Option<usize> {
    if segment.flags.contains(Flags::RST) {
        return None;
    }
    let length = segment.payload_length as u32
        + u32::from(segment.flags.contains(Flags::SYN))
        + u32::from(segment.flags.contains(Flags::FIN));
    let (seq, ack, flags) = match segment.flags.contains(Flags::ACK) {
        true => (segment.ack, 0, Flags::RST),
        false => (0, segment.seq.wrapping_add(length), Flags::RST | Flags::ACK),
    };
    let template = Template::new(&segment.flow, link, false);
    let options = TcpOptions::default();
    let header = Header { seq, ack, flags, window: 0, options: &options, ecn: 0, ident: 0 };
    let length = template.emit(&header, 0, &mut out[..MAX_HEADER]);
    finish_checksum(&mut out[..length], template.tcp_offset(), TCP_CHECKSUM);
    Some(length)
}

fn prohibited_v4(ip: &[u8], out: &mut [u8; MAX_REFUSAL]) -> Option<usize> {
    let header = usize::from(ip.first()? & 15) * 4;
    let later = ip.get(ipv4::FRAGMENT..)?.first_chunk().map(|field| u16::from_be_bytes(*field) & 0x1fff)? != 0;
    let total = usize::from(u16::from_be_bytes(*ip.get(ipv4::LENGTH..)?.first_chunk()?));
    let (source, destination) = (ip.get(ipv4::SOURCE..)?.first_chunk::<4>()?, ip.get(ipv4::DESTINATION..)?.first_chunk::<4>()?);
    let is_error = ip[ipv4::PROTOCOL] == PROTOCOL_ICMP && ICMP_ERRORS.contains(ip.get(header)?);
    // Multicast and broadcast addresses, and "this host".
    let several = source[0] >= 224 || destination[0] >= 224 || source[0] == 0;
    if header < IPV4 || total < header || total > ip.len() || later || is_error || several {
        return None;
    }
    let quoted = &ip[..total.min(MAX_QUOTED)];
    let length = IPV4 + ICMP + quoted.len();
    let answer = &mut out[ETHERNET..ETHERNET + length];
    answer[..IPV4 + ICMP].fill(0);
    answer[0] = 0x45;
    answer[ipv4::LENGTH..ipv4::IDENT].copy_from_slice(&(length as u16).to_be_bytes());
    (answer[ipv4::TTL], answer[ipv4::PROTOCOL]) = (TTL, PROTOCOL_ICMP);
    answer[ipv4::SOURCE..ipv4::DESTINATION].copy_from_slice(destination);
    answer[ipv4::DESTINATION..IPV4].copy_from_slice(source);
    let sum = Sum::new().bytes(&answer[..IPV4]).finish();
    answer[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum.to_be_bytes());
    answer[IPV4..IPV4 + 2].copy_from_slice(&PROHIBITED);
    answer[IPV4 + ICMP..].copy_from_slice(quoted);
    let sum = Sum::new().bytes(&answer[IPV4..]).finish();
    answer[IPV4 + 2..IPV4 + 4].copy_from_slice(&sum.to_be_bytes());
    Some(ETHERNET + length)
}

fn prohibited_v6(ip: &[u8], out: &mut [u8; MAX_REFUSAL]) -> Option<usize> {
    let (source, destination) = (ip.get(ipv6::SOURCE..)?.first_chunk::<16>()?, ip.get(ipv6::DESTINATION..)?.first_chunk::<16>()?);
    let total = IPV6 + usize::from(u16::from_be_bytes(*ip.get(ipv6::LENGTH..)?.first_chunk()?));
    let is_error = ip[ipv6::NEXT_HEADER] == PROTOCOL_ICMPV6 && *ip.get(IPV6)? < 128;
    let several = source[0] == 0xff || destination[0] == 0xff || *source == [0; 16];
    if total > ip.len() || is_error || several {
        return None;
    }
    let quoted = &ip[..total.min(MAX_QUOTED)];
    let length = ICMP + quoted.len();
    let answer = &mut out[ETHERNET..ETHERNET + IPV6 + length];
    answer[..IPV6 + ICMP].fill(0);
    answer[0] = 0x60;
    answer[ipv6::LENGTH..ipv6::NEXT_HEADER].copy_from_slice(&(length as u16).to_be_bytes());
    (answer[ipv6::NEXT_HEADER], answer[ipv6::HOP_LIMIT]) = (PROTOCOL_ICMPV6, TTL);
    answer[ipv6::SOURCE..ipv6::DESTINATION].copy_from_slice(destination);
    answer[ipv6::DESTINATION..IPV6].copy_from_slice(source);
    let (header, icmp) = answer.split_at_mut(IPV6);
    icmp[..2].copy_from_slice(&PROHIBITED_V6);
    icmp[ICMP..].copy_from_slice(quoted);
    let sum = pseudo_header(&header[ipv6::SOURCE..ipv6::DESTINATION], &header[ipv6::DESTINATION..], PROTOCOL_ICMPV6, length);
    let sum = sum.bytes(icmp).finish();
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    Some(ETHERNET + IPV6 + length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Endpoint, Flow};

    fn flows() -> [Flow; 2] {
        [
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40000), device: 0 },
            Flow { local: Endpoint::v6([0xfd; 16], 443), remote: Endpoint::v6([0xfe; 16], 1), device: 0 },
        ]
    }

    fn segment(flow: &Flow, flags: Flags) -> ([u8; MAX_HEADER + 5], usize) {
        let link = Link { source: [2, 0, 0, 0, 0, 1], destination: [2, 0, 0, 0, 0, 2], ttl: 64, ..Link::default() };
        let template = Template::new(flow, &link, false);
        let options = TcpOptions::default();
        let mut frame = [0; MAX_HEADER + 5];
        let header = Header { seq: 1000, ack: 2000, flags, window: 7, options: &options, ecn: 0, ident: 9 };
        let length = template.emit(&header, 5, &mut frame) + 5;
        finish_checksum(&mut frame[..length], template.tcp_offset(), TCP_CHECKSUM);
        (frame, length)
    }

    #[test]
    fn segments_are_reset_with_the_numbers_of_rfc_9293() {
        for flow in flows() {
            for (flags, expected) in [
                (Flags::SYN, (0, 1006, Flags::RST | Flags::ACK)),
                (Flags::ACK, (2000, 0, Flags::RST)),
                (Flags::FIN | Flags::ACK, (2000, 0, Flags::RST)),
            ] {
                let (frame, length) = segment(&flow, flags);
                let mut out = [0; MAX_REFUSAL];
                let length = refuse(&frame[..length], &mut out).expect("an answer");
                let answer = TcpFrame::parse(&out[..length], 0).expect("a segment");
                assert!(answer.checksum_holds(&out[..length]));
                assert_eq!((answer.seq, answer.ack, answer.flags), expected);
                assert_eq!((answer.flow.local, answer.flow.remote), (flow.local, flow.remote));
                assert_eq!((&out[..6], &out[6..12]), (&[2, 0, 0, 0, 0, 1][..], &[2, 0, 0, 0, 0, 2][..]));
            }
            let (frame, length) = segment(&flow, Flags::RST);
            assert_eq!(refuse(&frame[..length], &mut [0; MAX_REFUSAL]), None);
        }
    }

    #[test]
    fn other_packets_are_answered_by_icmp() {
        for flow in flows() {
            let (mut frame, length) = segment(&flow, Flags::ACK);
            let (next, at) = if flow.is_v4() { (ETHERNET + ipv4::PROTOCOL, 34) } else { (ETHERNET + ipv6::NEXT_HEADER, 54) };
            frame[next] = 17;
            let mut out = [0; MAX_REFUSAL];
            let answered = refuse(&frame[..length], &mut out).expect("an answer");
            let icmp = &out[at..answered];
            assert_eq!(icmp[..2], if flow.is_v4() { PROHIBITED } else { PROHIBITED_V6 });
            assert_eq!(icmp[ICMP..], frame[ETHERNET..length]);
            let sum = match flow.is_v4() {
                true => Sum::new().bytes(icmp),
                false => pseudo_header(&out[22..38], &out[38..54], PROTOCOL_ICMPV6, icmp.len()).bytes(icmp),
            };
            assert_eq!(sum.finish(), 0);
            // Not an ICMP error, nor what is sent to several, nor what is cut off.
            assert_eq!(refuse(&out[..answered], &mut [0; MAX_REFUSAL]), None);
            for cut in 0..length {
                assert_eq!(refuse(&frame[..cut], &mut [0; MAX_REFUSAL]), None, "cut at {cut}");
            }
            frame[0] |= 1;
            assert_eq!(refuse(&frame[..length], &mut [0; MAX_REFUSAL]), None);
        }
    }

    #[test]
    fn no_frame_makes_it_panic() {
        for flow in flows() {
            let (frame, length) = segment(&flow, Flags::SYN);
            for at in 0..length {
                for value in 0..=255 {
                    let mut bad = frame;
                    bad[at] = value;
                    refuse(&bad[..length], &mut [0; MAX_REFUSAL]);
                }
            }
        }
    }
}
