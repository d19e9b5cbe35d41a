//! Packets as packetdrill passes them: IPv4 or IPv6 without a link header.

use baton_tcp::segment::{Segment, Transmit};
use baton_wire::checksum::{Sum, pseudo_header};
use baton_wire::frame::{ETHERNET, TcpFrame};
use baton_wire::{Endpoint, Flags, Flow};

/// Kind numbers of TCP options that only a SYN carries and `wire` does not know: Fast Open (RFC 7413) and its
/// experimental form.
const FAST_OPEN: u8 = 34;
const EXPERIMENTAL: u8 = 254;
const FAST_OPEN_MAGIC: [u8; 2] = [0xf9, 0x89];

/// A Fast Open cookie option (RFC 7413 section 4.1.1); an empty cookie asks for one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CookieOption {
    /// The cookie's bytes.
    pub cookie: Vec<u8>,
    /// It came, or goes out, as experimental option 254 with a magic number.
    pub experimental: bool,
}

/// What an inbound packet is.
pub enum Inbound<'a> {
    /// A TCP segment, with its payload.
    Tcp(Box<TcpIn<'a>>),
    /// An ICMP error about a segment of this connection.
    Icmp(IcmpError),
    /// Something that this stack does not take.
    Other,
}

/// A received TCP segment.
pub struct TcpIn<'a> {
    /// The 4-tuple, this stack's end first.
    pub flow: Flow,
    /// Its header.
    pub segment: Segment,
    /// Its payload.
    pub payload: &'a [u8],
    /// Its Fast Open option, if any.
    pub cookie: Option<CookieOption>,
}

/// An ICMP error message about a TCP segment (RFC 792, RFC 4443).
pub struct IcmpError {
    /// The connection that the quoted segment is of.
    pub flow: Flow,
    /// Sequence number of the quoted segment.
    pub seq: u32,
    /// What it reports.
    pub what: IcmpKind,
}

/// What an ICMP error reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpKind {
    /// The packet was too large: the next hop's MTU in bytes.
    TooBig(u32),
    /// An error that ends an opening connection, with its errno.
    Hard(i32),
    /// An error that is only noted, with its errno.
    Soft(i32),
}

/// Reads an inbound packet.
pub fn parse(packet: &[u8]) -> Inbound<'_> {
    let Some(version) = packet.first().map(|byte| byte >> 4) else { return Inbound::Other };
    let protocol = match version {
        4 if packet.len() >= 20 => packet[9],
        6 if packet.len() >= 40 => packet[6],
        _ => return Inbound::Other,
    };
    match (version, protocol) {
        (_, 6) => parse_tcp(packet, version),
        (4, 1) => parse_icmp(packet, usize::from(packet[0] & 15) * 4, false).map_or(Inbound::Other, Inbound::Icmp),
        (6, 58) => parse_icmp(packet, 40, true).map_or(Inbound::Other, Inbound::Icmp),
        _ => Inbound::Other,
    }
}

fn parse_tcp(packet: &[u8], version: u8) -> Inbound<'_> {
    let kind: u16 = if version == 4 { 0x0800 } else { 0x86dd };
    let frame = [&[0u8; 12][..], &kind.to_be_bytes(), packet].concat();
    let Ok(tcp) = TcpFrame::parse(&frame, 0) else { return Inbound::Other };
    if !tcp.checksum_holds(&frame) {
        return Inbound::Other;
    }
    let header = tcp.tcp_offset - ETHERNET;
    let start = tcp.payload_offset - ETHERNET;
    let options = &packet[header + 20..start];
    Inbound::Tcp(Box::new(TcpIn {
        flow: tcp.flow,
        segment: Segment::from(&tcp),
        payload: &packet[start..start + tcp.payload_length],
        cookie: if tcp.flags.contains(Flags::SYN) { find_cookie(options) } else { None },
    }))
}

fn find_cookie(mut options: &[u8]) -> Option<CookieOption> {
    while let [kind, rest @ ..] = options {
        match *kind {
            0 => return None,
            1 => options = rest,
            kind => {
                let length = usize::from(*rest.first()?);
                let value = options.get(2..length)?;
                if kind == FAST_OPEN {
                    return valid_cookie(value, false);
                }
                if kind == EXPERIMENTAL && value.starts_with(&FAST_OPEN_MAGIC) {
                    return valid_cookie(&value[2..], true);
                }
                options = &options[length..];
            }
        }
    }
    None
}

/// RFC 7413 section 4.1.1: a cookie has 4 to 16 bytes and an even length; another one is as if it were not there.
fn valid_cookie(value: &[u8], experimental: bool) -> Option<CookieOption> {
    let fits = value.is_empty() || (4..=16).contains(&value.len()) && value.len().is_multiple_of(2);
    fits.then(|| CookieOption { cookie: value.to_vec(), experimental })
}

fn parse_icmp(packet: &[u8], at: usize, v6: bool) -> Option<IcmpError> {
    let message = packet.get(at..)?;
    let (kind, code) = (*message.first()?, *message.get(1)?);
    let quoted = message.get(8..)?;
    let word = |at: usize| Some(u32::from_be_bytes(message.get(at..at + 4)?.try_into().ok()?));
    let what = if v6 { classify_v6(kind, code, word(4)?) } else { classify_v4(kind, code, word(4)? & 0xffff) }?;
    let header = if v6 { 40 } else { usize::from(quoted.first()? & 15) * 4 };
    let tcp = quoted.get(header..header + 8)?;
    let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    let end = |at: usize, port: u16| -> Option<Endpoint> {
        Some(if v6 {
            Endpoint::v6(quoted.get(at..at + 16)?.try_into().ok()?, port)
        } else {
            Endpoint::v4(quoted.get(at..at + 4)?.try_into().ok()?, port)
        })
    };
    let (source, destination) = if v6 { (8, 24) } else { (12, 16) };
    let flow = Flow { local: end(source, port(0))?, remote: end(destination, port(2))?, device: 0 };
    Some(IcmpError { flow, seq: u32::from_be_bytes(tcp[4..8].try_into().ok()?), what })
}

/// RFC 1122 section 4.2.3.9: which messages are hard errors; Linux's icmp_err_convert for the numbers.
fn classify_v4(kind: u8, code: u8, mtu: u32) -> Option<IcmpKind> {
    Some(match (kind, code) {
        (3, 4) => IcmpKind::TooBig(mtu),
        (3, 2) => IcmpKind::Hard(libc::ENOPROTOOPT),
        (3, 3) => IcmpKind::Hard(libc::ECONNREFUSED),
        (3, 0 | 6 | 8 | 9 | 11) => IcmpKind::Soft(libc::ENETUNREACH),
        (3, _) | (11, _) => IcmpKind::Soft(libc::EHOSTUNREACH),
        (12, _) => IcmpKind::Hard(libc::EPROTO),
        _ => return None,
    })
}

fn classify_v6(kind: u8, code: u8, mtu: u32) -> Option<IcmpKind> {
    Some(match (kind, code) {
        (2, _) => IcmpKind::TooBig(mtu),
        (1, 4) => IcmpKind::Hard(libc::ECONNREFUSED),
        (1, 1 | 5 | 6) => IcmpKind::Hard(libc::EACCES),
        (1, 0) => IcmpKind::Soft(libc::ENETUNREACH),
        (1, _) | (3, _) => IcmpKind::Soft(libc::EHOSTUNREACH),
        (4, _) => IcmpKind::Hard(libc::EPROTO),
        _ => return None,
    })
}

/// Writes a segment as an IP packet. `cookie` goes into the options of a SYN.
pub fn emit(flow: &Flow, transmit: &Transmit, tos: u8, cookie: Option<&CookieOption>, payload: &[u8]) -> Vec<u8> {
    let mut options = write_options(transmit, cookie);
    while !options.len().is_multiple_of(4) {
        options.push(1);
    }
    let mut tcp = Vec::with_capacity(20 + options.len() + payload.len());
    tcp.extend(flow.local.port.to_be_bytes());
    tcp.extend(flow.remote.port.to_be_bytes());
    tcp.extend(transmit.seq.to_be_bytes());
    tcp.extend(transmit.ack.to_be_bytes());
    tcp.extend([((20 + options.len()) << 2) as u8, transmit.flags.0]);
    tcp.extend(transmit.window.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend(&options);
    tcp.extend(payload);
    let sum = if flow.is_v4() {
        pseudo_header(&flow.local.v4_bytes(), &flow.remote.v4_bytes(), 6, tcp.len())
    } else {
        pseudo_header(&flow.local.address, &flow.remote.address, 6, tcp.len())
    };
    let sum = sum.bytes(&tcp).finish();
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    let mut packet = ip_header(flow, tos & !3 | transmit.ecn, tcp.len());
    packet.extend(tcp);
    packet
}

fn ip_header(flow: &Flow, tos: u8, length: usize) -> Vec<u8> {
    if !flow.is_v4() {
        let word = 6u32 << 28 | u32::from(tos) << 20;
        let mut ip = word.to_be_bytes().to_vec();
        ip.extend((length as u16).to_be_bytes());
        ip.extend([6, 64]);
        ip.extend(flow.local.address);
        ip.extend(flow.remote.address);
        return ip;
    }
    let mut ip = vec![0x45, tos];
    ip.extend(((20 + length) as u16).to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
    ip.extend(flow.local.v4_bytes());
    ip.extend(flow.remote.v4_bytes());
    let sum = Sum::new().bytes(&ip).finish();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    ip
}

/// Options in the order in which Linux writes them, which scripts compare byte by byte.
fn write_options(transmit: &Transmit, cookie: Option<&CookieOption>) -> Vec<u8> {
    let options = &transmit.options;
    let mut out = Vec::with_capacity(40);
    if let Some(mss) = options.mss {
        out.extend([2, 4]);
        out.extend(mss.to_be_bytes());
    }
    if let Some((value, echo)) = options.timestamps {
        out.extend(if options.sack_permitted { [4, 2] } else { [1, 1] });
        out.extend([8, 10]);
        out.extend(value.to_be_bytes());
        out.extend(echo.to_be_bytes());
    } else if options.sack_permitted {
        out.extend([1, 1, 4, 2]);
    }
    if let Some(shift) = options.window_scale {
        out.extend([1, 3, 3, shift]);
    }
    let blocks = options.sack.as_slice();
    if !blocks.is_empty() {
        out.extend([1, 1, 5, 2 + 8 * blocks.len() as u8]);
        for (left, right) in blocks {
            out.extend(left.to_be_bytes());
            out.extend(right.to_be_bytes());
        }
    }
    if let Some(option) = cookie {
        let mut value = if option.experimental { FAST_OPEN_MAGIC.to_vec() } else { Vec::new() };
        value.extend(&option.cookie);
        out.extend([if option.experimental { EXPERIMENTAL } else { FAST_OPEN }, 2 + value.len() as u8]);
        out.extend(value);
    }
    out
}

/// The answer to a segment that belongs to no connection (RFC 9293 section 3.10.7.1). None for a RST.
pub fn reset_for(segment: &Segment) -> Option<Transmit> {
    if segment.flags.contains(Flags::RST) {
        return None;
    }
    Some(if segment.flags.contains(Flags::ACK) {
        Transmit { seq: segment.ack, flags: Flags::RST, ..Transmit::default() }
    } else {
        Transmit { ack: segment.end(), flags: Flags::RST | Flags::ACK, ..Transmit::default() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::TcpOptions;

    #[test]
    fn a_packet_reads_back_with_its_cookie() {
        for flow in [
            Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 },
            Flow { local: Endpoint::v6([0xfd; 16], 80), remote: Endpoint::v6([0xfe; 16], 4000), device: 0 },
        ] {
            let options = TcpOptions { mss: Some(1460), window_scale: Some(8), sack_permitted: true, ..TcpOptions::default() };
            let syn = Transmit { seq: 7, flags: Flags::SYN, window: 9, options, length: 3, ..Transmit::default() };
            for experimental in [false, true] {
                let cookie = CookieOption { cookie: vec![1, 2, 3, 4], experimental };
                let packet = emit(&flow, &syn, 0, Some(&cookie), b"abc");
                let Inbound::Tcp(tcp) = parse(&packet) else { panic!("not TCP") };
                assert_eq!((tcp.flow, tcp.payload, tcp.cookie), (flow.reversed(), &b"abc"[..], Some(cookie)));
                assert_eq!((tcp.segment.seq, tcp.segment.options), (7, options));
            }
        }
    }

    #[test]
    fn cookies_of_a_wrong_length_are_not_there() {
        for (length, taken) in [(0, true), (2, false), (4, true), (5, false), (16, true), (18, false)] {
            assert_eq!(valid_cookie(&vec![0; length], false).is_some(), taken, "{length}");
        }
    }
}
