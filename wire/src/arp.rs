//! ARP for IPv4 over Ethernet (RFC 826), and the probes and announcements of RFC 5227.

use crate::frame::ETHERNET;
use crate::offset::ethernet;

/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// Bytes of an ARP frame, Ethernet header included.
pub const ARP_FRAME: usize = ETHERNET + 28;
/// Ethernet's broadcast address.
pub const BROADCAST: [u8; 6] = [0xff; 6];

/// Hardware type Ethernet, protocol type IPv4, and the lengths of their addresses.
const ETHERNET_AND_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
/// Operation codes.
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];

/// An ARP packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arp {
    /// A request, not a reply.
    pub is_request: bool,
    /// MAC address of the sender.
    pub sender_mac: [u8; 6],
    /// IPv4 address of the sender; all zeros in a probe.
    pub sender: [u8; 4],
    /// MAC address of the target, which a request does not know.
    pub target_mac: [u8; 6],
    /// IPv4 address of the target.
    pub target: [u8; 4],
}

/// The packet claims to be ARP or neighbour discovery, and no host may use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed;

impl Arp {
    /// Reads a frame. None if it is not ARP, or ARP for other networks or with other operations.
    ///
    /// # Errors
    /// [`Malformed`] if it is cut off, or comes from a group address.
    pub fn parse(frame: &[u8]) -> Option<Result<Arp, Malformed>> {
        if frame.get(ethernet::TYPE..ETHERNET)? != ETHERTYPE_ARP.to_be_bytes() {
            return None;
        }
        let Some(packet) = frame[ETHERNET..].first_chunk::<28>() else { return Some(Err(Malformed)) };
        let is_request = packet[6..8] == REQUEST;
        if packet[..6] != ETHERNET_AND_IPV4 || !is_request && packet[6..8] != REPLY {
            return None;
        }
        let mac = |at: usize| core::array::from_fn(|n| packet[at + n]);
        let address = |at: usize| core::array::from_fn(|n| packet[at + n]);
        let arp = Arp { is_request, sender_mac: mac(8), sender: address(14), target_mac: mac(18), target: address(24) };
        // RFC 1812 section 3.3.2: an answer that names a group's MAC address must not be believed.
        Some(if arp.sender_mac[0] & 1 == 0 { Ok(arp) } else { Err(Malformed) })
    }

    /// The question who has `target`, from a host that does not use it (RFC 5227 section 1.1).
    pub fn probe(mac: [u8; 6], target: [u8; 4]) -> Arp {
        Arp { is_request: true, sender_mac: mac, sender: [0; 4], target_mac: [0; 6], target }
    }

    /// The announcement that `mac` has `address` (RFC 5227 section 2.3).
    pub fn announcement(mac: [u8; 6], address: [u8; 4]) -> Arp {
        Arp { is_request: true, sender_mac: mac, sender: address, target_mac: [0; 6], target: address }
    }

    /// The answer to a request: `mac` has the address that was asked for.
    pub fn answer(&self, mac: [u8; 6]) -> Arp {
        Arp { is_request: false, sender_mac: mac, sender: self.target, target_mac: self.sender_mac, target: self.sender }
    }

    /// Writes the frame: a request to all, a reply to its target.
    pub fn emit(&self) -> [u8; ARP_FRAME] {
        let mut frame = [0; ARP_FRAME];
        frame[..6].copy_from_slice(if self.is_request { &BROADCAST } else { &self.target_mac });
        frame[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&self.sender_mac);
        frame[ethernet::TYPE..ETHERNET].copy_from_slice(&ETHERTYPE_ARP.to_be_bytes());
        let packet = &mut frame[ETHERNET..];
        packet[..6].copy_from_slice(&ETHERNET_AND_IPV4);
        packet[6..8].copy_from_slice(if self.is_request { &REQUEST } else { &REPLY });
        packet[8..14].copy_from_slice(&self.sender_mac);
        packet[14..18].copy_from_slice(&self.sender);
        packet[18..24].copy_from_slice(&self.target_mac);
        packet[24..].copy_from_slice(&self.target);
        frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];

    #[test]
    fn a_request_and_its_answer() {
        let request =
            Arp { is_request: true, sender_mac: THEIRS, sender: [10, 0, 0, 2], target_mac: [0; 6], target: [10, 0, 0, 1] };
        let frame = request.emit();
        // As RFC 826 lays it out.
        let expected =
            [&[0xff; 6][..], &THEIRS, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &THEIRS, &[10, 0, 0, 2], &[0; 6], &[10, 0, 0, 1]];
        assert!(frame.iter().eq(expected.into_iter().flatten()));
        assert_eq!(Arp::parse(&frame), Some(Ok(request)));
        let answer = request.answer(OURS);
        assert_eq!((answer.sender_mac, answer.sender, answer.target), (OURS, [10, 0, 0, 1], [10, 0, 0, 2]));
        let frame = answer.emit();
        assert_eq!((&frame[..6], Arp::parse(&frame)), (&THEIRS[..], Some(Ok(answer))));
    }

    #[test]
    fn what_is_cut_off_or_from_a_group_is_malformed() {
        let frame = Arp::announcement(OURS, [10, 0, 0, 1]).emit();
        for length in 0..frame.len() {
            let expected = if length < ETHERNET { None } else { Some(Err(Malformed)) };
            assert_eq!(Arp::parse(&frame[..length]), expected, "{length} bytes");
        }
        assert_eq!(Arp::parse(&Arp::announcement([1, 0, 0, 0, 0, 1], [10, 0, 0, 1]).emit()), Some(Err(Malformed)));
    }

    #[test]
    fn other_networks_and_operations_are_not_ours() {
        let frame = Arp::probe(OURS, [10, 0, 0, 1]).emit();
        for at in ETHERNET..ETHERNET + 8 {
            let mut other = frame;
            other[at] ^= 0x40;
            assert_eq!(Arp::parse(&other), None, "byte {at}");
        }
    }
}
