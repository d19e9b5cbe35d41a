//! Neighbour discovery (RFC 4861): solicitations and advertisements, also those of duplicate address detection (RFC
//! 4862).

use crate::arp::Malformed;
use crate::checksum::pseudo_header;
use crate::frame::{ETHERNET, ETHERTYPE_IPV6, IPV6, PROTOCOL_ICMPV6};
use crate::offset::{ethernet, ipv6};

/// Bytes of the longest frame that is written here, Ethernet header included.
pub const NEIGHBOUR_FRAME: usize = ETHERNET + IPV6 + MESSAGE + OPTION;

/// Bytes of a message without options (RFC 4861 sections 4.3 and 4.4).
const MESSAGE: usize = 24;
/// Bytes of an option with a link address, and the unit of options' lengths.
const OPTION: usize = 8;
/// Offset of the target in a message.
const TARGET: usize = 8;
/// Offset of the checksum.
const CHECKSUM: usize = 2;

/// ICMPv6 types.
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Options with the sender's and the target's link address.
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
/// Flags of an advertisement.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
/// Hop limit of all these messages, so that none comes from another link.
const HOP_LIMIT: u8 = 255;

/// The multicast group of all nodes of a link.
pub const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The unspecified address, from which a host asks that has none yet.
pub const UNSPECIFIED: [u8; 16] = [0; 16];

/// What a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A question for the target's link address.
    Solicitation,
    /// The answer, or an announcement.
    Advertisement {
        /// It answers a solicitation.
        solicited: bool,
        /// It replaces what is known of the target.
        replaces: bool,
    },
}

/// A neighbour solicitation or advertisement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Which of the two.
    pub kind: Kind,
    /// MAC address that the frame comes from.
    pub source_mac: [u8; 6],
    /// Source of the packet.
    pub source: [u8; 16],
    /// Destination of the packet.
    pub destination: [u8; 16],
    /// The address that it is about.
    pub target: [u8; 16],
    /// Link address of a solicitation's sender, or of an advertisement's target.
    pub link_address: Option<[u8; 6]>,
}

/// The multicast group to which solicitations for an address are sent; its owner is a member (RFC 4291 section 2.7.1).
pub fn solicited_node(address: &[u8; 16]) -> [u8; 16] {
    let mut group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 0];
    group[13..].copy_from_slice(&address[13..]);
    group
}

/// The MAC address of an IPv6 multicast group (RFC 2464 section 7).
fn group_mac(group: &[u8; 16]) -> [u8; 6] {
    [0x33, 0x33, group[12], group[13], group[14], group[15]]
}

impl Neighbour {
    /// Reads a frame. None if it is no neighbour solicitation or advertisement, or hides behind extension headers,
    /// which hosts do not use here. `verified`: a device has verified the checksum.
    ///
    /// # Errors
    /// [`Malformed`] where RFC 4861 sections 7.1.1 and 7.1.2 want it to be discarded.
    pub fn parse(frame: &[u8], verified: bool) -> Option<Result<Neighbour, Malformed>> {
        let is_ipv6 = frame.get(ethernet::TYPE..ETHERNET)? == ETHERTYPE_IPV6.to_be_bytes();
        let ip = frame[ETHERNET..].first_chunk::<IPV6>().filter(|ip| is_ipv6 && ip[0] >> 4 == 6)?;
        let kind = *frame.get(ETHERNET + IPV6)?;
        if ip[ipv6::NEXT_HEADER] != PROTOCOL_ICMPV6 || kind != SOLICITATION && kind != ADVERTISEMENT {
            return None;
        }
        let length = usize::from(u16::from_be_bytes([ip[ipv6::LENGTH], ip[ipv6::LENGTH + 1]]));
        let message = frame[ETHERNET + IPV6..].get(..length);
        Some(message.ok_or(Malformed).and_then(|message| Neighbour::read(frame, ip, message, verified)))
    }

    fn read(frame: &[u8], ip: &[u8; IPV6], message: &[u8], verified: bool) -> Result<Neighbour, Malformed> {
        let address = |at: usize| -> [u8; 16] { core::array::from_fn(|n| ip[at + n]) };
        let (source, destination) = (address(ipv6::SOURCE), address(ipv6::DESTINATION));
        let target = *message.get(TARGET..MESSAGE).and_then(<[u8]>::first_chunk::<16>).ok_or(Malformed)?;
        let sum = || pseudo_header(&source, &destination, PROTOCOL_ICMPV6, message.len()).bytes(message).finish();
        if ip[ipv6::HOP_LIMIT] != HOP_LIMIT
            || message[1] != 0
            || !verified && sum() != 0
            || target[0] == 0xff
            || source[0] == 0xff
        {
            return Err(Malformed);
        }
        let (kind, option) = match message[0] {
            SOLICITATION => (Kind::Solicitation, SOURCE_LINK),
            _ => {
                let flags = message[4];
                let (solicited, replaces) = (flags & SOLICITED != 0, flags & OVERRIDE != 0);
                (Kind::Advertisement { solicited, replaces }, TARGET_LINK)
            }
        };
        let link_address = find_link_address(&message[MESSAGE..], option)?;
        let allowed = match kind {
            Kind::Solicitation if source == UNSPECIFIED => destination == solicited_node(&target) && link_address.is_none(),
            Kind::Solicitation => true,
            Kind::Advertisement { solicited, .. } => destination[0] != 0xff || !solicited,
        };
        let source_mac: [u8; 6] = core::array::from_fn(|n| frame[ethernet::SOURCE + n]);
        let from_group = source_mac[0] & 1 != 0 || link_address.is_some_and(|mac| mac[0] & 1 != 0);
        if !allowed || from_group {
            return Err(Malformed);
        }
        Ok(Neighbour { kind, source_mac, source, destination, target, link_address })
    }

    /// The question who has `target`, from a host that does not use it (RFC 4862 section 5.4.2).
    pub fn probe(mac: [u8; 6], target: [u8; 16]) -> Neighbour {
        Neighbour {
            kind: Kind::Solicitation,
            source_mac: mac,
            source: UNSPECIFIED,
            destination: solicited_node(&target),
            target,
            link_address: None,
        }
    }

    /// The announcement that `mac` has `address` (RFC 4861 section 7.2.6).
    pub fn announcement(mac: [u8; 6], address: [u8; 16]) -> Neighbour {
        Neighbour {
            kind: Kind::Advertisement { solicited: false, replaces: true },
            source_mac: mac,
            source: address,
            destination: ALL_NODES,
            target: address,
            link_address: Some(mac),
        }
    }

    /// The answer to a solicitation: `mac` has the target (RFC 4861 section 7.2.4). It goes to all nodes if it is not
    /// known who asks.
    pub fn answer(&self, mac: [u8; 6]) -> Neighbour {
        let mut answer = Neighbour::announcement(mac, self.target);
        if self.source != UNSPECIFIED {
            answer.destination = self.source;
            answer.kind = Kind::Advertisement { solicited: true, replaces: true };
        }
        answer
    }

    /// Writes the frame, and returns its length. `to`: MAC address of the receiver, unless it is a group.
    pub fn emit(&self, to: [u8; 6], out: &mut [u8; NEIGHBOUR_FRAME]) -> usize {
        let length = MESSAGE + self.link_address.map_or(0, |_| OPTION);
        out.fill(0);
        let destination = if self.destination[0] == 0xff { group_mac(&self.destination) } else { to };
        out[..6].copy_from_slice(&destination);
        out[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&self.source_mac);
        out[ethernet::TYPE..ETHERNET].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
        let (ip, message) = out[ETHERNET..].split_at_mut(IPV6);
        ip[0] = 0x60;
        ip[ipv6::LENGTH..ipv6::NEXT_HEADER].copy_from_slice(&(length as u16).to_be_bytes());
        (ip[ipv6::NEXT_HEADER], ip[ipv6::HOP_LIMIT]) = (PROTOCOL_ICMPV6, HOP_LIMIT);
        ip[ipv6::SOURCE..ipv6::DESTINATION].copy_from_slice(&self.source);
        ip[ipv6::DESTINATION..].copy_from_slice(&self.destination);
        let option = match self.kind {
            Kind::Solicitation => {
                message[0] = SOLICITATION;
                SOURCE_LINK
            }
            Kind::Advertisement { solicited, replaces } => {
                message[0] = ADVERTISEMENT;
                message[4] = if solicited { SOLICITED } else { 0 } | if replaces { OVERRIDE } else { 0 };
                TARGET_LINK
            }
        };
        message[TARGET..MESSAGE].copy_from_slice(&self.target);
        if let Some(mac) = self.link_address {
            message[MESSAGE..MESSAGE + 2].copy_from_slice(&[option, 1]);
            message[MESSAGE + 2..MESSAGE + OPTION].copy_from_slice(&mac);
        }
        let message = &mut message[..length];
        let sum = pseudo_header(&self.source, &self.destination, PROTOCOL_ICMPV6, length).bytes(message).finish();
        message[CHECKSUM..CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
        ETHERNET + IPV6 + length
    }
}

/// Looks for an option with an Ethernet address, and checks the lengths of all of them.
fn find_link_address(mut options: &[u8], wanted: u8) -> Result<Option<[u8; 6]>, Malformed> {
    let mut found = None;
    while let [kind, units, ..] = *options {
        let length = usize::from(units) * OPTION;
        if length == 0 || length > options.len() {
            return Err(Malformed);
        }
        if kind == wanted && length == OPTION {
            found = options[2..].first_chunk::<6>().copied();
        }
        options = &options[length..];
    }
    if options.is_empty() { Ok(found) } else { Err(Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const ADDRESS: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x12, 0x34, 0x56];
    const OTHER: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];

    fn question() -> Neighbour {
        Neighbour { source: OTHER, source_mac: THEIRS, link_address: Some(THEIRS), ..Neighbour::probe(THEIRS, ADDRESS) }
    }

    fn frame(neighbour: &Neighbour) -> ([u8; NEIGHBOUR_FRAME], usize) {
        let mut frame = [0; NEIGHBOUR_FRAME];
        let length = neighbour.emit(THEIRS, &mut frame);
        (frame, length)
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        for one in [
            question(),
            question().answer(OURS),
            Neighbour::probe(OURS, ADDRESS),
            Neighbour::probe(THEIRS, ADDRESS).answer(OURS),
            Neighbour::announcement(OURS, ADDRESS),
        ] {
            let (frame, length) = frame(&one);
            assert_eq!(Neighbour::parse(&frame[..length], false), Some(Ok(one)));
        }
    }

    #[test]
    fn groups_have_the_addresses_of_the_rfcs() {
        let (probe, _) = frame(&Neighbour::probe(OURS, ADDRESS));
        assert_eq!(probe[..6], [0x33, 0x33, 0xff, 0x12, 0x34, 0x56]);
        assert_eq!(probe[ETHERNET + ipv6::DESTINATION..][..16], [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0x12, 0x34, 0x56]);
        let (announcement, _) = frame(&Neighbour::announcement(OURS, ADDRESS));
        assert_eq!(announcement[..6], [0x33, 0x33, 0, 0, 0, 1]);
    }

    #[test]
    fn who_asks_without_an_address_is_answered_to_all() {
        let answer = Neighbour::probe(THEIRS, ADDRESS).answer(OURS);
        assert_eq!((answer.destination, answer.kind), (ALL_NODES, Kind::Advertisement { solicited: false, replaces: true }));
        let answer = question().answer(OURS);
        assert_eq!((answer.destination, answer.kind), (OTHER, Kind::Advertisement { solicited: true, replaces: true }));
        assert_eq!(frame(&answer).0[..6], THEIRS);
    }

    /// Whatever RFC 4861 wants to be discarded; a device that has verified the checksum does not change that.
    #[test]
    fn what_rfc_4861_discards_is_malformed() {
        let spoilt = |one: Neighbour, spoil: &dyn Fn(&mut [u8])| {
            let (mut frame, length) = frame(&one);
            spoil(&mut frame[..length]);
            Neighbour::parse(&frame[..length], true)
        };
        let message = ETHERNET + IPV6;
        let cases: [(&str, Neighbour, &dyn Fn(&mut [u8])); 9] = [
            ("hop limit", question(), &|frame| frame[ETHERNET + ipv6::HOP_LIMIT] = 254),
            ("code", question(), &|frame| frame[message + 1] = 1),
            ("target", question(), &|frame| frame[message + TARGET] = 0xff),
            ("option of no length", question(), &|frame| frame[message + MESSAGE + 1] = 0),
            ("option beyond the end", question(), &|frame| frame[message + MESSAGE + 1] = 2),
            ("from a group", question(), &|frame| frame[ethernet::SOURCE] = 1),
            ("probe to one host", Neighbour { destination: OTHER, ..Neighbour::probe(THEIRS, ADDRESS) }, &|_| {}),
            ("probe with a link address", Neighbour { link_address: Some(THEIRS), ..Neighbour::probe(THEIRS, ADDRESS) }, &|_| {}),
            ("solicited to all", Neighbour { destination: ALL_NODES, ..question().answer(OURS) }, &|_| {}),
        ];
        for (what, one, spoil) in cases {
            assert_eq!(spoilt(one, spoil), Some(Err(Malformed)), "{what}");
        }
        let (mut frame, length) = frame(&question());
        frame[message + TARGET + 15] ^= 1;
        assert_eq!(Neighbour::parse(&frame[..length], false), Some(Err(Malformed)), "checksum");
    }

    #[test]
    fn what_is_cut_off_is_malformed_or_nothing() {
        let (frame, length) = frame(&question());
        for cut in 0..length {
            let expected = if cut <= ETHERNET + IPV6 { None } else { Some(Err(Malformed)) };
            assert_eq!(Neighbour::parse(&frame[..cut], true), expected, "{cut} bytes");
        }
        // The length is the packet's, not the frame's.
        let mut short = frame;
        short[ETHERNET + ipv6::LENGTH + 1] = 20;
        assert_eq!(Neighbour::parse(&short[..length], true), Some(Err(Malformed)));
    }
}
