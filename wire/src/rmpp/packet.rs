//! The header and bodies of RMPP packets: parser and writer.

use super::stream::MAX_STREAMED;
use super::{
    CTS_BODY, HEADER, HoldReason, Kind, MAX_CLEARED, PacketFlags, RTS_BODY, Status, VERSION, at, be16, be32, be64, crc32c,
};
use crate::flow::Endpoint;

/// Why a packet is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Refusal {
    /// Shorter than its header, or than its header says.
    Truncated,
    /// Another version of the layout.
    Version,
    /// The CRC32C over addresses, header and body does not match.
    Checksum,
    /// A kind that this version does not have.
    Kind,
    /// A flag that its kind does not have, or a reserved bit.
    Flags,
    /// A body that is too short or too long for its kind.
    Length,
    /// An incarnation of 0 where there must be one, or one where there must be none.
    Incarnation,
    /// A field out of its range.
    Value,
}

impl Refusal {
    /// Number of reasons.
    pub const COUNT: usize = 8;
}

/// The header of a packet, its fields in host order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the packet is for.
    pub kind: Kind,
    /// Flags.
    pub flags: PacketFlags,
    /// Endpoint that sent it; one host may have several.
    pub source: u16,
    /// Endpoint that it is for.
    pub destination: u16,
    /// Incarnation of its sender.
    pub from: u32,
    /// Incarnation of its receiver as the sender knows it; 0 in a Hello only.
    pub to: u32,
    /// Number of the message among those from its sender to its receiver; the first is 1. 0 in packets that concern no
    /// message.
    pub message: u32,
    /// CTS: the number of the grant. Data and END: the grant that they answer. 0 in other packets.
    pub grant: u16,
    /// Data: the packet's number in the message, from 0. CTS: the first packet cleared. END: number of data packets.
    /// RTS, CLEANUP, Ping and Bye: lowest message number that the receiver has not acknowledged (the *floor*). Reset:
    /// the incarnation that was addressed. 0 in other packets.
    pub packet: u32,
    /// CTS: number of packets cleared. ACK: a [`Status`]. Hold: a [`HoldReason`]. 0 in other packets.
    pub count: u16,
    /// The handle that the packet's receiver gave out: of the message for its sender (CTS, ACK, Hold), or for its
    /// receiver (Data, END). 0 in other packets.
    pub handle: u32,
}

impl Header {
    /// A header with the numbers of both ends set, and all else 0.
    pub fn new(kind: Kind, [source, destination]: [u16; 2], [from, to]: [u32; 2]) -> Header {
        let flags = PacketFlags::empty();
        Header { kind, flags, source, destination, from, to, message: 0, grant: 0, packet: 0, count: 0, handle: 0 }
    }
}

/// What an RTS says about its message: the header of the layers above RMPP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rts {
    /// Bytes of the message.
    pub length: u64,
    /// The bits that are matched: MPI's tag.
    pub tag: u64,
    /// 64 bits that go to the receiving program unread (libfabric: remote CQ data).
    pub data: u64,
    /// The context in which the tag is matched: MPI's communicator.
    pub context: u32,
    /// The sender's handle of the message, for the receiver's answers.
    pub handle: u32,
    /// Bytes of message in each data packet but the last.
    pub fragment: u16,
}

/// What a CTS says beside its header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cts {
    /// The receiver's handle of the message, for data packets, runs and END.
    pub handle: u32,
    /// How the sender can open a stream for the data of long messages; None if it cannot.
    pub offer: Option<Offer>,
    /// The sender's stream that the receiver reads: the answer goes by it. 0: by packets.
    pub stream: u32,
}

/// Where a stream is accepted, and what its [`super::stream::Greeting`] must say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// TCP port at the address that the CTS comes from; not 0.
    pub port: u16,
    /// The number that the receiver has given the sender.
    pub peer: u16,
    /// Known to receiver and sender alone.
    pub key: u64,
}

/// The body of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body<'a> {
    /// Nothing.
    Empty,
    /// An RTS and the message's first bytes.
    Rts(Rts, &'a [u8]),
    /// Where and how the cleared data comes.
    Cts(Cts),
    /// A piece of the message.
    Data(&'a [u8]),
}

/// A packet that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// Its header.
    pub header: Header,
    /// Its body.
    pub body: Body<'a>,
}

/// Bytes of the packet that begins here, as its header says: another one may follow it. None if there is no whole
/// header.
pub fn packet_length(bytes: &[u8]) -> Option<usize> {
    (bytes.len() >= HEADER).then(|| HEADER + usize::from(be16(bytes, at::LENGTH)))
}

impl<'a> Packet<'a> {
    /// Reads a packet that `source` has sent to `destination`. Bytes behind it are ignored: Ethernet pads short frames.
    ///
    /// # Errors
    /// The first reason to refuse it.
    pub fn parse(bytes: &'a [u8], source: &Endpoint, destination: &Endpoint) -> Result<Packet<'a>, Refusal> {
        if bytes.len() < HEADER {
            return Err(Refusal::Truncated);
        }
        let bytes = packet_length(bytes).and_then(|end| bytes.get(..end)).ok_or(Refusal::Truncated)?;
        if crc32c(source, destination, bytes) != be32(bytes, at::CRC) {
            return Err(Refusal::Checksum);
        }
        // Version, kind, source, sender's incarnation, length and CRC are where they are in every version, so a damaged
        // packet is none of another version, and its sender can be answered.
        if bytes[0] != VERSION {
            return Err(Refusal::Version);
        }
        let kind = Kind::from_number(bytes[at::KIND]).ok_or(Refusal::Kind)?;
        let flags = PacketFlags::from_bits(be16(bytes, at::FLAGS)).ok_or(Refusal::Flags)?;
        let expected = match kind {
            Kind::Data => PacketFlags::RSM,
            Kind::Cts => PacketFlags::TAKEN,
            _ => PacketFlags::empty(),
        };
        if be16(bytes, at::RESERVED) != 0 || !expected.contains(flags) {
            return Err(Refusal::Flags);
        }
        let header = Header {
            kind,
            flags,
            source: be16(bytes, at::SOURCE),
            destination: be16(bytes, at::DESTINATION),
            from: be32(bytes, at::FROM),
            to: be32(bytes, at::TO),
            message: be32(bytes, at::MESSAGE),
            grant: be16(bytes, at::GRANT),
            packet: be32(bytes, at::PACKET),
            count: be16(bytes, at::COUNT),
            handle: be32(bytes, at::HANDLE),
        };
        header.check()?;
        let body = Body::parse(&header, &bytes[HEADER..])?;
        Ok(Packet { header, body })
    }
}

/// Of a packet that was refused for its version: its sender's endpoint and incarnation, and whether it is a Hello.
pub fn of_other_version(bytes: &[u8]) -> Option<(u16, u32, bool)> {
    (bytes.len() >= HEADER).then(|| (be16(bytes, at::SOURCE), be32(bytes, at::FROM), bytes[at::KIND] == Kind::Hello as u8))
}

impl Header {
    /// Checks the fields whose range depends on the kind.
    fn check(&self) -> Result<(), Refusal> {
        if self.from == 0 || (self.to == 0) != (self.kind == Kind::Hello) {
            return Err(Refusal::Incarnation);
        }
        let of_message =
            matches!(self.kind, Kind::Rts | Kind::Cts | Kind::Data | Kind::End | Kind::Ack | Kind::Cleanup | Kind::Hold);
        let with_handle = matches!(self.kind, Kind::Cts | Kind::Data | Kind::End | Kind::Ack | Kind::Hold);
        let count_holds = match self.kind {
            Kind::Cts => (1..=MAX_STREAMED).contains(&self.count) && self.packet.checked_add(u32::from(self.count)).is_some(),
            Kind::Ack => Status::from_number(self.count).is_some(),
            Kind::Hold => HoldReason::from_number(self.count).is_some(),
            _ => self.count == 0,
        };
        let grant_holds = self.grant == 0 || matches!(self.kind, Kind::Cts | Kind::Data | Kind::End);
        if (self.message != 0) == of_message && (self.handle != 0) == with_handle && count_holds && grant_holds {
            Ok(())
        } else {
            Err(Refusal::Value)
        }
    }
}

impl<'a> Body<'a> {
    fn parse(header: &Header, bytes: &'a [u8]) -> Result<Body<'a>, Refusal> {
        match header.kind {
            Kind::Rts => Self::parse_rts(bytes),
            Kind::Cts if bytes.len() != CTS_BODY => Err(Refusal::Length),
            Kind::Cts => Self::parse_cts(header, bytes),
            Kind::Data if bytes.is_empty() => Err(Refusal::Length),
            Kind::Data => Ok(Body::Data(bytes)),
            _ if bytes.is_empty() => Ok(Body::Empty),
            _ => Err(Refusal::Length),
        }
    }

    fn parse_cts(header: &Header, bytes: &[u8]) -> Result<Body<'a>, Refusal> {
        let offer = Offer { port: be16(bytes, 4), peer: be16(bytes, 6), key: be64(bytes, 8) };
        let empty = Offer { port: 0, peer: 0, key: 0 };
        let cts = Cts { handle: be32(bytes, 0), offer: (offer != empty).then_some(offer), stream: be32(bytes, 16) };
        // Without an offer there is no stream, and without a stream only so many packets can come.
        let offered = cts.offer.map_or(cts.stream == 0, |offer| offer.port != 0);
        let counted = cts.stream != 0 || header.count <= MAX_CLEARED && !header.flags.contains(PacketFlags::TAKEN);
        if cts.handle != 0 && offered && counted { Ok(Body::Cts(cts)) } else { Err(Refusal::Value) }
    }

    fn parse_rts(bytes: &'a [u8]) -> Result<Body<'a>, Refusal> {
        let (fixed, first) = bytes.split_at_checked(RTS_BODY).ok_or(Refusal::Length)?;
        let rts = Rts {
            length: be64(fixed, 0),
            tag: be64(fixed, 8),
            data: be64(fixed, 16),
            context: be32(fixed, 24),
            handle: be32(fixed, 28),
            fragment: be16(fixed, 32),
        };
        if fixed[34..].iter().any(|byte| *byte != 0) {
            return Err(Refusal::Flags);
        }
        let rest = rts.length.checked_sub(first.len() as u64).ok_or(Refusal::Length)?;
        // Packets are counted in 32 bits.
        if rts.handle == 0 || rts.fragment == 0 || rest.div_ceil(u64::from(rts.fragment)) >= u64::from(u32::MAX) {
            return Err(Refusal::Value);
        }
        Ok(Body::Rts(rts, first))
    }
}

/// Writes header and fixed body of a packet, its length and CRC left to [`append_data`] or [`seal`]. Returns the bytes
/// written. The data of `Body::Rts` and `Body::Data` is not written.
///
/// # Panics
/// If `out` is shorter than [`HEADER`] + [`RTS_BODY`].
pub fn emit(header: &Header, body: &Body<'_>, out: &mut [u8]) -> usize {
    out[..HEADER].fill(0);
    out[0] = VERSION;
    out[at::KIND] = header.kind as u8;
    let mut put16 = |at: usize, value: u16| out[at..at + 2].copy_from_slice(&value.to_be_bytes());
    put16(at::FLAGS, header.flags.bits());
    put16(at::SOURCE, header.source);
    put16(at::DESTINATION, header.destination);
    put16(at::GRANT, header.grant);
    put16(at::COUNT, header.count);
    let mut put32 = |at: usize, value: u32| out[at..at + 4].copy_from_slice(&value.to_be_bytes());
    put32(at::FROM, header.from);
    put32(at::TO, header.to);
    put32(at::MESSAGE, header.message);
    put32(at::PACKET, header.packet);
    put32(at::HANDLE, header.handle);
    match body {
        Body::Empty | Body::Data(_) => HEADER,
        Body::Cts(cts) => {
            let offer = cts.offer.unwrap_or(Offer { port: 0, peer: 0, key: 0 });
            let body = &mut out[HEADER..HEADER + CTS_BODY];
            body[..4].copy_from_slice(&cts.handle.to_be_bytes());
            body[4..6].copy_from_slice(&offer.port.to_be_bytes());
            body[6..8].copy_from_slice(&offer.peer.to_be_bytes());
            body[8..16].copy_from_slice(&offer.key.to_be_bytes());
            body[16..20].copy_from_slice(&cts.stream.to_be_bytes());
            HEADER + CTS_BODY
        }
        Body::Rts(rts, _) => {
            let fixed = &mut out[HEADER..HEADER + RTS_BODY];
            fixed[..8].copy_from_slice(&rts.length.to_be_bytes());
            fixed[8..16].copy_from_slice(&rts.tag.to_be_bytes());
            fixed[16..24].copy_from_slice(&rts.data.to_be_bytes());
            fixed[24..28].copy_from_slice(&rts.context.to_be_bytes());
            fixed[28..32].copy_from_slice(&rts.handle.to_be_bytes());
            fixed[32..34].copy_from_slice(&rts.fragment.to_be_bytes());
            fixed[34..].fill(0);
            HEADER + RTS_BODY
        }
    }
}

/// Writes `data` behind what [`emit`] wrote, and completes the packet as [`seal`] does. Returns its length.
///
/// # Panics
/// If it does not fit into `out`, or is longer than 65,535 bytes.
pub fn append_data(out: &mut [u8], written: usize, data: &[u8], source: &Endpoint, destination: &Endpoint) -> usize {
    out[written..written + data.len()].copy_from_slice(data);
    seal(&mut out[..written + data.len()], source, destination);
    written + data.len()
}

/// Completes a packet from `source` to `destination` whose header and body have been written: its length and its CRC.
///
/// # Panics
/// If it is shorter than a header, or its body longer than 65,535 bytes.
pub fn seal(packet: &mut [u8], source: &Endpoint, destination: &Endpoint) {
    let body = u16::try_from(packet.len() - HEADER).expect("a body is shorter than 64 KB");
    packet[at::LENGTH..at::LENGTH + 2].copy_from_slice(&body.to_be_bytes());
    let crc = crc32c(source, destination, packet);
    packet[at::CRC..HEADER].copy_from_slice(&crc.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Endpoint = Endpoint { address: [1; 16], port: 2 };
    const DESTINATION: Endpoint = Endpoint { address: [3; 16], port: 4 };

    fn parse(bytes: &[u8]) -> Result<Packet<'_>, Refusal> {
        Packet::parse(bytes, &SOURCE, &DESTINATION)
    }

    /// One good packet of each kind.
    fn samples() -> impl Iterator<Item = ([u8; 128], usize)> {
        Kind::ALL.into_iter().map(|kind| {
            let mut header = Header::new(kind, [3, 4], [7, if kind == Kind::Hello { 0 } else { 8 }]);
            let mut data: &[u8] = &[];
            let body = match kind {
                Kind::Rts => {
                    data = b"first";
                    Body::Rts(Rts { length: 5000, tag: 9, data: 10, context: 11, handle: 12, fragment: 100 }, data)
                }
                Kind::Cts => Body::Cts(Cts { handle: 13, offer: Some(Offer { port: 1, peer: 2, key: 3 << 50 }), stream: 4 }),
                Kind::Data => {
                    data = b"piece";
                    header.flags = PacketFlags::RSM;
                    Body::Data(data)
                }
                _ => Body::Empty,
            };
            if matches!(kind, Kind::Rts | Kind::Cts | Kind::Data | Kind::End | Kind::Ack | Kind::Cleanup | Kind::Hold) {
                header.message = 5;
            }
            if matches!(kind, Kind::Cts | Kind::Data | Kind::End | Kind::Ack | Kind::Hold) {
                header.handle = 6;
            }
            if kind == Kind::Cts {
                (header.packet, header.count, header.grant) = (32, 16, 2);
            }
            let mut out = [0; 128];
            let written = emit(&header, &body, &mut out);
            let length = append_data(&mut out, written, data, &SOURCE, &DESTINATION);
            assert_eq!(parse(&out[..length]), Ok(Packet { header, body }));
            (out, length)
        })
    }

    /// RFC 3720 appendix B.4: CRC32C of 32 bytes of zeros. Here it covers the addresses and all but the packet's own
    /// CRC field.
    #[test]
    fn the_checksum_is_crc32c() {
        assert_eq!(super::super::CRC32C.checksum(&[0; 32]), 0x8a91_36aa);
        let nobody = Endpoint { address: [0; 16], port: 0 };
        let mut packet = [0u8; HEADER + 1];
        packet[at::CRC..HEADER].fill(0xff);
        assert_eq!(crc32c(&nobody, &nobody, &packet), super::super::CRC32C.checksum(&[0; 36 + HEADER - 4 + 1]));
    }

    #[test]
    fn another_address_is_refused() {
        for (packet, length) in samples() {
            for bit in 0..16 {
                let wrong = Endpoint { port: SOURCE.port ^ 1 << bit, ..SOURCE };
                assert_eq!(Packet::parse(&packet[..length], &wrong, &DESTINATION), Err(Refusal::Checksum));
            }
            assert_eq!(Packet::parse(&packet[..length], &DESTINATION, &SOURCE), Err(Refusal::Checksum));
        }
    }

    #[test]
    fn every_truncation_and_every_bit_error_is_refused() {
        for (packet, length) in samples() {
            for cut in 0..length {
                assert_eq!(parse(&packet[..cut]), Err(Refusal::Truncated), "cut at {cut}");
            }
            for bit in 0..length * 8 {
                let mut bad = packet;
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(parse(&bad[..length]).is_err(), "bit {bit}");
            }
        }
    }

    /// A forger computes the CRC: then the fields themselves are refused, or the packet is a good one of other content.
    #[test]
    fn forged_fields_are_refused_with_their_reason() {
        let mut reasons = [0u32; Refusal::COUNT];
        for (packet, length) in samples() {
            for at in 0..length {
                for value in [0u8, 1, 0x7f, 0xff] {
                    let mut bad = packet;
                    bad[at] = value;
                    let crc = crc32c(&SOURCE, &DESTINATION, &bad[..length]);
                    bad[at::CRC..HEADER].copy_from_slice(&crc.to_be_bytes());
                    if let Err(refusal) = parse(&bad[..length]) {
                        reasons[refusal as usize] += 1;
                    }
                }
            }
        }
        for refusal in [Refusal::Version, Refusal::Kind, Refusal::Flags, Refusal::Length, Refusal::Incarnation, Refusal::Value] {
            assert!(reasons[refusal as usize] > 0, "{refusal:?}");
        }
    }

    #[test]
    fn padding_behind_a_packet_is_ignored() {
        for (packet, length) in samples() {
            assert!(parse(&packet[..(length + 18).min(packet.len())]).is_ok());
        }
    }
}
