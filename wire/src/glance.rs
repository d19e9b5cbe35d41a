//! What the headers of a frame say that may have been cut off behind them: for those who look at frames, and process
//! none.

use crate::flow::Endpoint;
use crate::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV6, said_length};
use crate::tcp::Flags;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const ETHERTYPE_VLAN: u16 = 0x8100;
/// Bytes of a TCP header without options, and of the headers of UDP and ICMP.
const TCP_HEADER: usize = 20;
const SHORT_HEADER: usize = 8;

/// The ends of a packet, and what it carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// Where it comes from.
    pub source: Endpoint,
    /// Where it goes.
    pub destination: Endpoint,
    /// Its segment, if it is one of TCP; else UDP has the ports.
    pub segment: Option<Segment>,
}

/// What a TCP header says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: Flags,
    /// Window, not scaled.
    pub window: u16,
    /// Bytes of payload in the whole frame.
    pub length: u32,
}

/// What the headers of a frame say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Glance {
    /// Bytes up to the payload: of a frame that is no IP packet all that are there.
    pub headers: usize,
    /// Offset of the IP header, if it has one.
    pub network: Option<usize>,
    /// Its ends, if TCP or UDP carry it.
    pub packet: Option<Packet>,
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

fn long(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(word(bytes, at)?) << 16 | u32::from(word(bytes, at + 2)?))
}

/// The IP header at an offset, from which on the frame has `there` bytes: where it ends, the protocol that follows,
/// both addresses, and the bytes that the header says the packet has. None if it is no whole one, or of a fragment that
/// does not have the next header.
fn network(bytes: &[u8], at: usize, kind: u16, there: usize) -> Option<(usize, u8, [[u8; 16]; 2], usize)> {
    let mut ends = [[0; 16]; 2];
    if kind == ETHERTYPE_IPV4 {
        let header = usize::from(bytes.get(at)? & 15) * 4;
        if header < IPV4 || word(bytes, at + 6)? & 0x1fff != 0 {
            return None;
        }
        for (end, offset) in ends.iter_mut().zip([12, 16]) {
            end[10..12].fill(0xff);
            end[12..].copy_from_slice(bytes.get(at + offset..at + offset + 4)?);
        }
        return Some((at + header, bytes[at + 9], ends, said_length(word(bytes, at + 2)?, there)));
    }
    for (end, offset) in ends.iter_mut().zip([8, 24]) {
        end.copy_from_slice(bytes.get(at + offset..at + offset + 16)?);
    }
    let length = said_length(word(bytes, at + 4)?, there.saturating_sub(IPV6));
    Some((at + IPV6, bytes[at + 6], ends, length + IPV6))
}

impl Glance {
    /// Looks at a frame of `length` bytes, of which `bytes` are there.
    pub fn at(bytes: &[u8], length: usize) -> Glance {
        let tagged = word(bytes, 12) == Some(ETHERTYPE_VLAN);
        let begin = if tagged { ETHERNET + 4 } else { ETHERNET };
        let other = Glance { headers: bytes.len(), network: None, packet: None };
        let Some(kind) = word(bytes, begin - 2).filter(|kind| [ETHERTYPE_IPV4, ETHERTYPE_IPV6].contains(kind)) else {
            return other;
        };
        let least = if kind == ETHERTYPE_IPV4 { IPV4 } else { IPV6 };
        let only_network = Glance { headers: (begin + least).min(bytes.len()), network: Some(begin), packet: None };
        let there = length.saturating_sub(begin);
        let Some((at, protocol, ends, total)) = network(bytes, begin, kind, there) else { return only_network };
        let end = begin + total.min(there);
        let headers = match protocol {
            TCP => bytes.get(at + 12).map_or(TCP_HEADER, |offset| usize::from(offset >> 4) * 4).max(TCP_HEADER),
            UDP | ICMP | ICMPV6 => SHORT_HEADER,
            _ => 0,
        };
        let glance = Glance { headers: (at + headers).min(bytes.len()), ..only_network };
        let ports = word(bytes, at).zip(word(bytes, at + 2));
        let Some((from, to)) = ports.filter(|_| [TCP, UDP].contains(&protocol)) else { return glance };
        let [source, destination] = ends;
        let segment = || {
            Some(Segment {
                seq: long(bytes, at + 4)?,
                ack: long(bytes, at + 8)?,
                flags: Flags(*bytes.get(at + 13)?),
                window: word(bytes, at + 14)?,
                length: end.saturating_sub(at + headers) as u32,
            })
        };
        let segment = if protocol == TCP { segment() } else { None };
        let (source, destination) = (Endpoint { address: source, port: from }, Endpoint { address: destination, port: to });
        Glance { packet: Some(Packet { source, destination, segment }), ..glance }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Flow;
    use crate::frame::{Header, Link, MAX_HEADER, Template};
    use crate::tcp::TcpOptions;

    fn segment(flow: &Flow, frame: &mut [u8; MAX_HEADER + 100]) -> usize {
        let options = TcpOptions { timestamps: Some((1, 2)), ..TcpOptions::default() };
        let header = Header { seq: 5, ack: 7, flags: Flags::ACK, window: 9, options: &options, ecn: 0, ident: 0 };
        let template = Template::new(flow, &Link { ttl: 64, ..Link::default() }, true);
        template.emit(&header, 100, (&mut frame[..MAX_HEADER]).try_into().expect("room"))
    }

    #[test]
    fn a_segment_is_read_also_if_it_was_cut_behind_its_headers() {
        let ends = |last| Endpoint { address: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last], port: 80 };
        let v4 = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
        for flow in [v4, Flow { local: ends(1), remote: ends(2), device: 0 }] {
            let mut frame = [0; MAX_HEADER + 100];
            let headers = segment(&flow, &mut frame);
            for there in [headers, headers + 100] {
                let glance = Glance::at(&frame[..there], headers + 100);
                assert_eq!((glance.headers, glance.network), (headers, Some(ETHERNET)));
                let packet = glance.packet.expect("a packet");
                assert_eq!((packet.source, packet.destination), (flow.local, flow.remote));
                let segment = packet.segment.expect("a segment");
                assert_eq!((segment.seq, segment.ack, segment.window, segment.length), (5, 7, 9, 100));
            }
            // Whatever is missing.
            for there in 0..headers {
                let glance = Glance::at(&frame[..there], headers + 100);
                assert!(glance.headers <= there && glance.packet.is_none_or(|packet| packet.source == flow.local));
            }
        }
    }

    #[test]
    fn of_what_is_no_ip_packet_all_are_headers() {
        let mut arp = [0; 60];
        arp[12..14].copy_from_slice(&[8, 6]);
        assert_eq!(Glance::at(&arp, 60), Glance { headers: 60, network: None, packet: None });
    }

    #[test]
    fn of_a_datagram_eight_bytes_follow_the_ip_header() {
        let mut frame = [0; 100];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[17] = 86;
        frame[23] = UDP;
        let glance = Glance::at(&frame, 100);
        assert!(glance.headers == 42 && glance.packet.is_some_and(|packet| packet.segment.is_none()));
        // A later fragment has no ports.
        frame[21] = 1;
        assert_eq!(Glance::at(&frame, 100), Glance { headers: 34, network: Some(14), packet: None });
    }
}
