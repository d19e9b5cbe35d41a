//! What goes over a stream: a TCP connection by which one endpoint sends the data of long messages to another. It
//! begins with a [`Greeting`], which says whose it is, and goes on with runs: a [`RunHeader`], then the bytes of
//! consecutive data packets without their headers. Nothing comes back by it.
//!
//! The CRCs here protect the fields alone. The bytes of messages have TCP's checksum, as those of MPI libraries over
//! TCP have.

use super::{Refusal, VERSION, be16, be32, be64, checksum};
use crate::flow::Endpoint;

/// Bytes of a [`Greeting`].
pub const GREETING: usize = 56;
/// Bytes of a [`RunHeader`].
pub const RUN: usize = 48;
/// Most packets that a CTS clears whose answer comes by a stream, and most that one run carries. At the receiver
/// nothing is kept for each.
pub const MAX_STREAMED: u16 = 4096;
/// Most packets of a run that is sent unasked: behind the RTS, before there is a CTS. The receiver takes it as a whole,
/// or not at all.
pub const MAX_UNASKED: u16 = MAX_STREAMED;

const KIND_GREETING: u8 = 1;
const KIND_RUN: u8 = 2;
const FLAG_END: u16 = 1;
/// Stands for no packet: packets are numbered below it.
const NO_PACKET: u32 = u32::MAX;

/// The first bytes of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Greeting {
    /// Endpoint that opens the stream, and the one that it is for.
    pub endpoints: [u16; 2],
    /// Their incarnations, in the same order.
    pub incarnations: [u32; 2],
    /// The opener's number for the stream, not 0.
    pub stream: u32,
    /// The number that the receiver has given the opener, from its CTS.
    pub peer: u16,
    /// What the receiver's CTS has said, so that nobody else opens a stream in the opener's name.
    pub key: u64,
    /// Address by which the opener sends and receives packets.
    pub address: Endpoint,
}

/// What stands in front of the bytes of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunHeader {
    /// Incarnation of the sender, and of the receiver.
    pub incarnations: [u32; 2],
    /// The stream's number: see [`Greeting::stream`].
    pub stream: u32,
    /// Number of the message.
    pub message: u32,
    /// The receiver's handle of the message. 0: the run is sent unasked.
    pub handle: u32,
    /// The grant that it answers; 0 if it is sent unasked.
    pub grant: u16,
    /// First data packet; 0 if it is sent unasked.
    pub first: u32,
    /// Packets, 1 to [`MAX_STREAMED`], or [`MAX_UNASKED`] if it is sent unasked.
    pub count: u16,
    /// The packet with which the sender asks for more (RSM).
    pub more: Option<u32>,
    /// With this run all of the message has been sent: it stands for an END.
    pub end: bool,
    /// Bytes that follow.
    pub length: u32,
}

/// Bytes that are checked before anything else: length, CRC, version and kind.
fn check<const N: usize>(bytes: &[u8; N], kind: u8) -> Result<(), Refusal> {
    if checksum(&bytes[..N - 4], &[]) != be32(bytes, N - 4) {
        return Err(Refusal::Checksum);
    }
    if bytes[0] != VERSION {
        return Err(Refusal::Version);
    }
    if bytes[1] != kind { Err(Refusal::Kind) } else { Ok(()) }
}

fn seal<const N: usize>(bytes: &mut [u8; N], kind: u8) {
    (bytes[0], bytes[1]) = (VERSION, kind);
    let crc = checksum(&bytes[..N - 4], &[]);
    bytes[N - 4..].copy_from_slice(&crc.to_be_bytes());
}

impl Greeting {
    /// Reads a greeting.
    ///
    /// # Errors
    /// The first reason to refuse it.
    pub fn parse(bytes: &[u8; GREETING]) -> Result<Greeting, Refusal> {
        check(bytes, KIND_GREETING)?;
        let mut address = [0; 16];
        address.copy_from_slice(&bytes[32..48]);
        let greeting = Greeting {
            endpoints: [be16(bytes, 4), be16(bytes, 6)],
            incarnations: [be32(bytes, 8), be32(bytes, 12)],
            stream: be32(bytes, 16),
            peer: be16(bytes, 20),
            key: be64(bytes, 24),
            address: Endpoint { address, port: be16(bytes, 48) },
        };
        if be16(bytes, 2) != 0 || be16(bytes, 22) != 0 || be16(bytes, 50) != 0 {
            return Err(Refusal::Flags);
        }
        if greeting.incarnations.contains(&0) {
            return Err(Refusal::Incarnation);
        }
        if greeting.stream == 0 { Err(Refusal::Value) } else { Ok(greeting) }
    }

    /// Writes it.
    pub fn emit(&self) -> [u8; GREETING] {
        let mut out = [0; GREETING];
        out[4..6].copy_from_slice(&self.endpoints[0].to_be_bytes());
        out[6..8].copy_from_slice(&self.endpoints[1].to_be_bytes());
        out[8..12].copy_from_slice(&self.incarnations[0].to_be_bytes());
        out[12..16].copy_from_slice(&self.incarnations[1].to_be_bytes());
        out[16..20].copy_from_slice(&self.stream.to_be_bytes());
        out[20..22].copy_from_slice(&self.peer.to_be_bytes());
        out[24..32].copy_from_slice(&self.key.to_be_bytes());
        out[32..48].copy_from_slice(&self.address.address);
        out[48..50].copy_from_slice(&self.address.port.to_be_bytes());
        seal(&mut out, KIND_GREETING);
        out
    }
}

impl RunHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// The first reason to refuse it.
    pub fn parse(bytes: &[u8; RUN]) -> Result<RunHeader, Refusal> {
        check(bytes, KIND_RUN)?;
        let (flags, more) = (be16(bytes, 2), be32(bytes, 36));
        let header = RunHeader {
            incarnations: [be32(bytes, 4), be32(bytes, 8)],
            stream: be32(bytes, 12),
            message: be32(bytes, 16),
            handle: be32(bytes, 20),
            grant: be16(bytes, 24),
            count: be16(bytes, 26),
            first: be32(bytes, 28),
            length: be32(bytes, 32),
            more: (more != NO_PACKET).then_some(more),
            end: flags & FLAG_END != 0,
        };
        if flags & !FLAG_END != 0 || be32(bytes, 40) != 0 {
            return Err(Refusal::Flags);
        }
        if header.incarnations.contains(&0) {
            return Err(Refusal::Incarnation);
        }
        let end = header.first.checked_add(header.count.into()).filter(|end| *end != NO_PACKET);
        let counted = (1..=MAX_STREAMED).contains(&header.count) && header.length >= header.count.into();
        let asks = header.more.is_none_or(|more| more >= header.first && end.is_some_and(|end| more < end));
        let answers = header.handle != 0 || (header.first, header.grant) == (0, 0) && header.count <= MAX_UNASKED;
        if [header.stream, header.message].contains(&0) || end.is_none() || !counted || !asks || !answers {
            return Err(Refusal::Value);
        }
        Ok(header)
    }

    /// Writes it.
    pub fn emit(&self) -> [u8; RUN] {
        let mut out = [0; RUN];
        out[2..4].copy_from_slice(&(if self.end { FLAG_END } else { 0 }).to_be_bytes());
        out[4..8].copy_from_slice(&self.incarnations[0].to_be_bytes());
        out[8..12].copy_from_slice(&self.incarnations[1].to_be_bytes());
        out[12..16].copy_from_slice(&self.stream.to_be_bytes());
        out[16..20].copy_from_slice(&self.message.to_be_bytes());
        out[20..24].copy_from_slice(&self.handle.to_be_bytes());
        out[24..26].copy_from_slice(&self.grant.to_be_bytes());
        out[26..28].copy_from_slice(&self.count.to_be_bytes());
        out[28..32].copy_from_slice(&self.first.to_be_bytes());
        out[32..36].copy_from_slice(&self.length.to_be_bytes());
        out[36..40].copy_from_slice(&self.more.unwrap_or(NO_PACKET).to_be_bytes());
        seal(&mut out, KIND_RUN);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETINGS: Greeting = Greeting {
        endpoints: [1, 2],
        incarnations: [3, 4],
        stream: 5,
        peer: 6,
        key: 7 << 40,
        address: Endpoint { address: [9; 16], port: 8 },
    };
    const HEADER: RunHeader = RunHeader {
        incarnations: [1, 2],
        stream: 3,
        message: 4,
        handle: 5,
        grant: 6,
        first: 7,
        count: 8,
        more: Some(14),
        end: true,
        length: 9000,
    };

    #[test]
    fn what_was_written_reads_back() {
        assert_eq!(Greeting::parse(&GREETINGS.emit()), Ok(GREETINGS));
        let unasked = RunHeader { handle: 0, grant: 0, first: 0, more: None, count: MAX_UNASKED, ..HEADER };
        for header in [HEADER, RunHeader { more: None, end: false, ..HEADER }, unasked] {
            assert_eq!(RunHeader::parse(&header.emit()), Ok(header));
        }
    }

    #[test]
    fn a_damaged_field_is_noticed() {
        let (greeting, header) = (GREETINGS.emit(), HEADER.emit());
        for bit in 0..8 * GREETING {
            let mut bad = greeting;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Greeting::parse(&bad), Err(Refusal::Checksum));
        }
        for bit in 0..8 * RUN {
            let mut bad = header;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(RunHeader::parse(&bad), Err(Refusal::Checksum));
        }
    }

    #[test]
    fn a_field_out_of_range_is_refused() {
        for (bad, reason) in [
            (RunHeader { count: 0, more: None, ..HEADER }, Refusal::Value),
            (RunHeader { count: MAX_STREAMED + 1, ..HEADER }, Refusal::Value),
            (RunHeader { first: u32::MAX - 8, more: None, ..HEADER }, Refusal::Value),
            (RunHeader { more: Some(15), ..HEADER }, Refusal::Value),
            (RunHeader { more: Some(6), ..HEADER }, Refusal::Value),
            (RunHeader { length: 7, ..HEADER }, Refusal::Value),
            (RunHeader { stream: 0, ..HEADER }, Refusal::Value),
            (RunHeader { handle: 0, ..HEADER }, Refusal::Value),
            (RunHeader { handle: 0, grant: 0, ..HEADER }, Refusal::Value),
            (RunHeader { handle: 0, grant: 1, first: 0, more: None, ..HEADER }, Refusal::Value),
            (RunHeader { handle: 0, grant: 0, first: 0, more: None, count: MAX_UNASKED + 1, ..HEADER }, Refusal::Value),
            (RunHeader { incarnations: [1, 0], ..HEADER }, Refusal::Incarnation),
        ] {
            assert_eq!(RunHeader::parse(&bad.emit()), Err(reason), "{bad:?}");
        }
        assert_eq!(Greeting::parse(&Greeting { stream: 0, ..GREETINGS }.emit()), Err(Refusal::Value));
        assert_eq!(Greeting::parse(&Greeting { incarnations: [0, 1], ..GREETINGS }.emit()), Err(Refusal::Incarnation));
    }
}
