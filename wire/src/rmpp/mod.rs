//! RMPP packets: the message passing protocol of "Experience in Offloading Protocol Processing to a Programmable NIC"
//! (Maccabe et al. 2002), section 3. The paper names the packets; the layout is ours, see `docs/reference/rmpp.md`.
//!
//! A packet is a header of [`HEADER`] bytes and a body that depends on its kind. It travels as the payload of an
//! Ethernet frame or of a UDP datagram ([`envelope`]). [`Packet::parse`] checks every field; what it refuses it names
//! ([`Refusal`]), for the caller to count.

pub mod envelope;
mod packet;
pub mod stream;

pub use envelope::{Envelope, EnvelopeError, Received};
pub use packet::{Body, Cts, Header, Offer, Packet, Refusal, Rts, append_data, emit, of_other_version, packet_length, seal};

use crate::flow::Endpoint;
use bitflags::bitflags;
#[cfg(any(not(feature = "hardware"), test))]
use crc::{CRC_32_ISCSI, Crc, Table};

/// Version of the layout, the first byte of every packet.
pub const VERSION: u8 = 3;
/// Bytes of the header of every packet.
pub const HEADER: usize = 40;
/// Bytes of an RTS packet's body in front of the message's first bytes.
pub const RTS_BODY: usize = 40;
/// Bytes of a CTS packet's body.
pub const CTS_BODY: usize = 20;
/// Most packets that one CTS may clear if they come as packets: the receiver keeps a bit for each in one integer. For
/// those that come by a stream it is [`stream::MAX_STREAMED`].
pub const MAX_CLEARED: u16 = 128;

/// Offsets in the header, in bytes.
pub(crate) mod at {
    pub const KIND: usize = 1;
    pub const FLAGS: usize = 2;
    pub const SOURCE: usize = 4;
    pub const DESTINATION: usize = 6;
    pub const FROM: usize = 8;
    pub const TO: usize = 12;
    pub const MESSAGE: usize = 16;
    pub const GRANT: usize = 20;
    pub const LENGTH: usize = 22;
    pub const PACKET: usize = 24;
    pub const COUNT: usize = 28;
    pub const RESERVED: usize = 30;
    pub const HANDLE: usize = 32;
    pub const CRC: usize = 36;
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// CRC32C (Castagnoli), the polynomial of iSCSI and SCTP, by tables: for where there is no std to ask the processor
/// what it can.
#[cfg(any(not(feature = "hardware"), test))]
static CRC32C: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);

/// CRC32C of two parts, one behind the other.
fn checksum(first: &[u8], second: &[u8]) -> u32 {
    #[cfg(feature = "hardware")]
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    #[cfg(not(feature = "hardware"))]
    let mut digest = CRC32C.digest();
    digest.update(first);
    digest.update(second);
    // The first one's is of 64 bits for any polynomial, of which 32 are in use here.
    #[cfg(feature = "hardware")]
    return digest.finalize() as u32;
    #[cfg(not(feature = "hardware"))]
    digest.finalize()
}

/// CRC32C over a pseudo-header (the addresses and ports of sender and receiver) and a packet, its own CRC field left
/// out. Ethernet and UDP without a checksum leave the sender's address unprotected, and an address with a wrong bit is
/// another peer.
pub(crate) fn crc32c(source: &Endpoint, destination: &Endpoint, packet: &[u8]) -> u32 {
    let mut head = [0; 2 * PSEUDO + at::CRC];
    for (to, endpoint) in head.chunks_exact_mut(PSEUDO).zip([source, destination]) {
        to[..16].copy_from_slice(&endpoint.address);
        to[16..].copy_from_slice(&endpoint.port.to_be_bytes());
    }
    head[2 * PSEUDO..].copy_from_slice(&packet[..at::CRC]);
    checksum(&head, &packet[HEADER..])
}

/// Bytes of an address and a port in the pseudo-header.
const PSEUDO: usize = 18;

/// What a packet is for. The first six are the paper's (section 3, Figure 2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Request to send: announces a message and carries its first bytes.
    Rts = 1,
    /// Clear to send: the receiver permits `count` data packets from `packet` on.
    Cts = 2,
    /// A piece of the message. The flag RSM asks for the next CTS.
    Data = 3,
    /// The sender has sent all of the message.
    End = 4,
    /// The receiver has the message; `count` is a [`Status`].
    Ack = 5,
    /// The sender knows that the message was delivered; the receiver may forget it.
    Cleanup = 6,
    /// The receiver has the RTS and will answer later; `count` is a [`HoldReason`].
    Hold = 7,
    /// Asks for the receiver's incarnation, before the first message.
    Hello = 8,
    /// Answers a Hello.
    Welcome = 9,
    /// Asks whether the peer is alive.
    Ping = 10,
    /// Answers a Ping.
    Pong = 11,
    /// The packet that this answers was for another incarnation.
    Reset = 12,
    /// The sender will send no more messages.
    Bye = 13,
    /// Answers a Bye.
    ByeAck = 14,
}

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Kind; 14] = {
        use Kind::*;
        [Rts, Cts, Data, End, Ack, Cleanup, Hold, Hello, Welcome, Ping, Pong, Reset, Bye, ByeAck]
    };

    /// The kind with this number.
    pub fn from_number(number: u8) -> Option<Kind> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

bitflags! {
    /// Flags of a packet.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct PacketFlags: u16 {
        /// Request to send more (the paper's RSM): the message goes on behind the cleared packets. Data packets only.
        const RSM = 1;
        /// The run that was sent unasked is taken ([`stream::MAX_UNASKED`]). In a CTS that names a stream only.
        const TAKEN = 2;
    }
}

/// How a message ended at the receiver, in an ACK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Status {
    /// All of it was delivered.
    Delivered = 0,
    /// The posted buffer was shorter; its beginning was delivered.
    Truncated = 1,
    /// The receiver gave the message up.
    Aborted = 2,
}

impl Status {
    /// The status with this number.
    pub fn from_number(number: u16) -> Option<Status> {
        [Status::Delivered, Status::Truncated, Status::Aborted].get(usize::from(number)).copied()
    }
}

/// Why a receiver does not clear a message yet, in a Hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum HoldReason {
    /// The RTS is kept until a receive matches.
    Unexpected = 0,
    /// There is no room for the RTS: send it again later.
    Busy = 1,
    /// The message has matched, but its first bytes were not kept: send the RTS again now.
    Resend = 2,
}

impl HoldReason {
    /// The reason with this number.
    pub fn from_number(number: u16) -> Option<HoldReason> {
        [HoldReason::Unexpected, HoldReason::Busy, HoldReason::Resend].get(usize::from(number)).copied()
    }
}
