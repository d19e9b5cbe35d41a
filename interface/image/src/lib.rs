//! The connection image: the state of a connection that moves at handoff and at restore, and that a recovery builds.
//!
//! Every field belongs to one class, with the terms of TCP Chimney: *constant* fields never change after the handoff;
//! *cached* fields belong to the host, which may update them; *delegated* fields belong to the owner that runs the
//! connection, and are returned at restore. The payload of the queues is not in the image: it lies in the session's
//! memory.
//!
//! [`Image`] has the state that both a kernel and a NIC can take over. [`NicState`], the state that only a NIC's TCP
//! has, follows it in images that a NIC writes; it is not part of the agent's and the NIC's own copies of the image.
//! During a stay in the kernel the agent keeps it ([`Stay`]).
//!
//! Sequence numbers are modulo 2³², times are in microseconds and sizes in bytes unless a field says otherwise.
#![no_std]
#![forbid(unsafe_code)]

mod codec;
pub mod nic;
mod short;
mod silence;
mod stay;

use baton_wire::Flow;
use baton_wire::frame::Link;
use codec::{Field, Reader, Writer};

pub use codec::ImageError;
pub use nic::NicState;
pub use short::MAX_SHORT;
pub use silence::Silence;
pub use stay::Stay;

/// Microseconds after which TS.Recent proves no segment old: half of the round of a clock that ticks every microsecond,
/// the fastest in use (Linux's TCP_PAWS_WRAP). RFC 7323 section 5.5 has 24 days, for clocks of a millisecond. No
/// segment is on its way for so long.
pub const TS_RECENT_LASTS: u64 = i32::MAX as u64;

/// Version of the encoding; an image of another version is refused.
pub const VERSION: u16 = 5;
/// The first bytes of an encoded image.
pub const MAGIC: [u8; 4] = *b"BTNI";
/// Largest length of an encoded image, in bytes.
pub const MAX_ENCODED: usize = 768;

/// Most bytes that a queue or an advertised window may have: the largest window (RFC 7323 section 2.3), rounded up.
const MAX_QUEUE: u32 = 1 << 30;
/// Largest shift of a window (RFC 7323 section 2.3).
const MAX_WINDOW_SCALE: u8 = 14;
/// Smallest maximum segment size in bytes that is accepted, as Linux's TCP_MIN_SND_MSS.
pub const MIN_MSS: u16 = 48;
/// Smallest MTU of IPv4 in bytes (RFC 791 section 3.2).
const MIN_MTU: u32 = 68;

/// The owner of a field while the connection is offloaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Fixed at handoff, never returned.
    Constant,
    /// The host's, which may update it while the connection is offloaded.
    Cached,
    /// The NIC's while offloaded; returned at restore.
    Delegated,
}

/// The states in which a connection can be moved (RFC 9293 section 3.3.2), with Linux's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum State {
    /// Both directions open.
    #[default]
    Established = 1,
    /// Our FIN is queued or sent; it is not acknowledged.
    FinWait1 = 4,
    /// Our FIN is acknowledged; the peer's has not been received.
    FinWait2 = 5,
    /// The peer's FIN has been received; we have not closed.
    CloseWait = 8,
    /// The peer's FIN was received before we closed; our FIN is not acknowledged.
    LastAck = 9,
    /// The two FINs crossed; ours is not acknowledged.
    Closing = 11,
    /// Both FINs are acknowledged; old segments are being waited out.
    TimeWait = 6,
    /// The connection has ended.
    Closed = 7,
}

impl State {
    /// The state with this number (Linux's), if an image can have it.
    pub fn from_number(number: u8) -> Option<State> {
        Some(match number {
            1 => State::Established,
            4 => State::FinWait1,
            5 => State::FinWait2,
            6 => State::TimeWait,
            7 => State::Closed,
            8 => State::CloseWait,
            9 => State::LastAck,
            11 => State::Closing,
            _ => return None,
        })
    }

    /// Whether our FIN has been queued (it may not have been sent yet).
    pub fn fin_queued(self) -> bool {
        matches!(self, State::FinWait1 | State::FinWait2 | State::LastAck | State::Closing | State::TimeWait)
    }

    /// Whether the peer's FIN has been received in order.
    pub fn fin_received(self) -> bool {
        matches!(self, State::CloseWait | State::LastAck | State::Closing | State::TimeWait)
    }

    /// Whether our FIN has been acknowledged.
    pub fn fin_acknowledged(self) -> bool {
        matches!(self, State::FinWait2 | State::TimeWait)
    }
}

macro_rules! image {
    ($($(#[doc = $doc:literal])* $class:ident $name:ident: $type:ty,)*) => {
        /// The state of a connection that no owner runs: between its export and its import.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct Image { $($(#[doc = $doc])* pub $name: $type,)* }

        /// Name and class of every field, in the order of the encoding.
        pub const FIELDS: &[(&str, Class)] = &[$((stringify!($name), Class::$class),)*];

        impl Image {
            fn write_fields(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
                // No `..`: a new field breaks this line until it is encoded.
                let Image { $($name,)* } = self;
                $($name.write(out)?;)*
                Ok(())
            }

            fn read_fields(input: &mut Reader<'_>) -> Result<Image, ImageError> {
                Ok(Image { $($name: Field::read(input)?,)* })
            }
        }
    };
}

image! {
    /// The 4-tuple.
    Constant flow: Flow,
    /// Shift of the windows that the peer advertises.
    Constant snd_wscale: u8,
    /// Shift of the windows that we advertise.
    Constant rcv_wscale: u8,
    /// SACK was negotiated.
    Constant sack: bool,
    /// Timestamps were negotiated.
    Constant timestamps: bool,
    /// ECN was negotiated.
    Constant ecn: bool,
    /// The peer's maximum segment size (its MSS option), options not subtracted.
    Constant mss: u16,
    /// Link addresses, TTL and traffic class of outgoing frames.
    Cached link: Link,
    /// Path MTU: bytes of an IP packet.
    Cached mtu: u32,
    /// Nagle's algorithm is off (TCP_NODELAY).
    Cached nodelay: bool,
    /// Partial segments are held back (TCP_CORK).
    Cached cork: bool,
    /// Keep-alive is on (SO_KEEPALIVE).
    Cached keepalive: bool,
    /// Idle time in seconds before the first keep-alive probe.
    Cached keepalive_idle: u32,
    /// Seconds between keep-alive probes.
    Cached keepalive_interval: u32,
    /// Number of unanswered keep-alive probes after which the connection ends.
    Cached keepalive_count: u32,
    /// TCP_USER_TIMEOUT in milliseconds, 0 for the default.
    Cached user_timeout: u32,
    /// How long its data is retransmitted without TCP_USER_TIMEOUT: the host's tcp_retries2 (RFC 9293's R2).
    Cached retries: u8,
    /// The connection's state.
    Delegated state: State,
    /// Oldest sequence number sent and not acknowledged.
    Delegated snd_una: u32,
    /// Next sequence number to be sent for the first time; a sent FIN counts.
    Delegated snd_nxt: u32,
    /// Sequence number behind the last byte that the program has written; a queued FIN does not count.
    Delegated snd_end: u32,
    /// The peer's window in bytes.
    Delegated snd_wnd: u32,
    /// Sequence number of the segment that last updated the window.
    Delegated snd_wl1: u32,
    /// Largest window in bytes that the peer has ever advertised.
    Delegated max_window: u32,
    /// Next sequence number expected; a received FIN counts.
    Delegated rcv_nxt: u32,
    /// Right edge (sequence number) of the window that we have advertised.
    Delegated rcv_adv: u32,
    /// Number of bytes that are acknowledged and not yet read by the program.
    Delegated unread: u32,
    /// The peer's timestamp to echo (TS.Recent, RFC 7323 section 4.3); 0 if unknown.
    Delegated ts_recent: u32,
    /// Our timestamp clock in milliseconds, at the moment of the image.
    Delegated ts_clock: u32,
    /// Congestion window in segments.
    Delegated cwnd: u32,
    /// Slow start threshold in segments.
    Delegated ssthresh: u32,
    /// Smoothed round-trip time; 0 if none was measured.
    Delegated srtt: u32,
    /// Round-trip time variation.
    Delegated rttvar: u32,
    /// Smallest round-trip time seen; 0 if none was measured.
    Delegated min_rtt: u32,
    /// Reordering was seen on the path from the peer.
    Delegated reordering_seen: bool,
    /// Microseconds since data was last sent or retransmitted; `None` if unknown.
    Delegated sent_ago: Option<u32>,
    /// The time for which the peer has not answered, as far as the kernel shows it. For a NIC it is in [`NicState`].
    Delegated silence: Silence,
    /// The congestion window decays while nothing is sent (RFC 2861): the host's tcp_slow_start_after_idle.
    Cached slow_start_after_idle: bool,
}

impl Image {
    /// A connection that has just been opened, with the usual options and sequence numbers that start at 1, for tests
    /// and benches.
    pub fn open(flow: Flow) -> Image {
        Image {
            flow,
            snd_wscale: 7,
            rcv_wscale: 0,
            sack: true,
            timestamps: true,
            ecn: false,
            mss: 1460,
            link: Link { ttl: 64, ..Link::default() },
            mtu: 1500,
            nodelay: true,
            cork: false,
            keepalive: false,
            keepalive_idle: 7200,
            keepalive_interval: 75,
            keepalive_count: 9,
            user_timeout: 0,
            retries: 15,
            slow_start_after_idle: true,
            state: State::Established,
            snd_una: 1,
            snd_nxt: 1,
            snd_end: 1,
            snd_wnd: 65535,
            snd_wl1: 1,
            max_window: 65535,
            rcv_nxt: 1,
            rcv_adv: 1 + 60_000,
            unread: 0,
            ts_recent: 1,
            ts_clock: 1,
            cwnd: 10,
            ssthresh: u32::MAX,
            srtt: 100,
            rttvar: 10,
            min_rtt: 100,
            reordering_seen: false,
            sent_ago: None,
            silence: Silence::default(),
        }
    }

    /// Encodes the image with its header and digest into `out`, and returns its length in bytes.
    ///
    /// # Errors
    /// [`ImageError::Truncated`] if `out` is too short.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, ImageError> {
        self.encode_with(None, out)
    }

    /// As [`Image::encode`], with the NIC's own state if there is any.
    ///
    /// # Errors
    /// [`ImageError::Truncated`] if `out` is too short.
    pub fn encode_with(&self, nic: Option<&NicState>, out: &mut [u8]) -> Result<usize, ImageError> {
        let mut writer = Writer::new(out);
        writer.bytes(&MAGIC)?;
        VERSION.write(&mut writer)?;
        0u16.write(&mut writer)?;
        self.write_fields(&mut writer)?;
        nic.copied().write(&mut writer)?;
        let length = writer.length() + 4;
        writer.patch_length(length as u16);
        let sum = codec::digest(writer.written());
        sum.write(&mut writer)?;
        Ok(length)
    }

    /// Decodes an image and checks it with [`Image::check`]. The NIC's own state is left out.
    ///
    /// # Errors
    /// What is wrong with the bytes; the caller leaves the connection where it was.
    pub fn decode(bytes: &[u8]) -> Result<Image, ImageError> {
        Image::read(bytes).map(|(image, _)| image)
    }

    /// As [`Image::decode`], with the NIC's own state if the image has it. Its segments in flight are checked against
    /// the image; its other numbers are bounded by the TCP that takes them over.
    ///
    /// # Errors
    /// What is wrong with the bytes; the caller leaves the connection where it was.
    pub fn decode_with(bytes: &[u8]) -> Result<(Image, Option<NicState>), ImageError> {
        let (image, nic) = Image::read(bytes)?;
        nic.map_or(Ok(()), |nic| nic.check(&image))?;
        Ok((image, nic))
    }

    fn read(bytes: &[u8]) -> Result<(Image, Option<NicState>), ImageError> {
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = Field::read(&mut reader)?;
        if magic != MAGIC {
            return Err(ImageError::NotAnImage);
        }
        let version: u16 = Field::read(&mut reader)?;
        if version != VERSION {
            return Err(ImageError::Version { found: version, known: VERSION });
        }
        let length = usize::from(<u16 as Field>::read(&mut reader)?);
        if length > bytes.len() || length < 12 {
            return Err(ImageError::Truncated);
        }
        let image = Image::read_fields(&mut reader)?;
        let nic = Field::read(&mut reader)?;
        if reader.position() + 4 != length {
            return Err(ImageError::Length { found: length, expected: reader.position() + 4 });
        }
        let covered = reader.position();
        let sum: u32 = Field::read(&mut reader)?;
        if sum != codec::digest(&bytes[..covered]) {
            return Err(ImageError::Digest);
        }
        image.check()?;
        Ok((image, nic))
    }

    /// Checks the relations between the fields, so that no forged image can make the NIC run outside its buffers.
    ///
    /// # Errors
    /// The first relation that does not hold.
    pub fn check(&self) -> Result<(), ImageError> {
        let fail = |what| Err(ImageError::Inconsistent(what));
        let in_flight = self.snd_nxt.wrapping_sub(self.snd_una);
        let queued = self.snd_end.wrapping_sub(self.snd_una);
        let fin = u32::from(self.state.fin_queued());
        if self.state.fin_acknowledged() {
            if self.snd_una != self.snd_end.wrapping_add(1) || self.snd_nxt != self.snd_una {
                return fail("the FIN is acknowledged, but the send queue is not empty");
            }
        } else if queued > MAX_QUEUE || in_flight > queued + fin {
            return fail("snd_nxt is outside of [snd_una, snd_end]");
        }
        if self.rcv_adv.wrapping_sub(self.rcv_nxt) > MAX_QUEUE {
            return fail("the advertised window ends before rcv_nxt");
        }
        if self.unread > MAX_QUEUE {
            return fail("more unread bytes than a buffer can hold");
        }
        if self.snd_wscale > MAX_WINDOW_SCALE || self.rcv_wscale > MAX_WINDOW_SCALE {
            return fail("window scale above 14");
        }
        if self.mss < MIN_MSS || self.mtu < MIN_MTU {
            return fail("the segment size or the MTU is below its minimum");
        }
        if self.flow.local.is_v4() != self.flow.remote.is_v4() {
            return fail("the two ends have different address families");
        }
        Ok(())
    }

    /// Bytes in the send queue, sent and unsent.
    pub fn send_queue(&self) -> u32 {
        if self.state.fin_acknowledged() { 0 } else { self.snd_end.wrapping_sub(self.snd_una) }
    }

    /// Sequence number of the first byte that the program has not read. A received FIN occupies the number behind the
    /// last byte, and is not counted.
    pub fn read_seq(&self) -> u32 {
        self.rcv_nxt.wrapping_sub(u32::from(self.state.fin_received())).wrapping_sub(self.unread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::Endpoint;

    pub(crate) fn sample() -> Image {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
        Image {
            rcv_wscale: 8,
            keepalive: true,
            snd_una: u32::MAX - 5,
            snd_nxt: 10,
            snd_end: 200,
            rcv_nxt: 77,
            rcv_adv: 7777,
            unread: 12,
            ts_clock: 2,
            srtt: 1000,
            min_rtt: 900,
            ..Image::open(flow)
        }
    }

    #[test]
    fn an_image_survives_its_encoding() {
        let mut bytes = [0u8; MAX_ENCODED];
        let length = sample().encode(&mut bytes).unwrap();
        assert_eq!(Image::decode(&bytes[..length]), Ok(sample()));
        assert!(length >= 96, "the paper's handoff message has at least 96 bytes, ours {length}");
    }

    #[test]
    fn truncated_and_forged_images_are_refused() {
        let mut bytes = [0u8; MAX_ENCODED];
        let length = sample().encode(&mut bytes).unwrap();
        for cut in 0..length {
            assert!(Image::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..length {
            let mut forged = bytes;
            forged[at] ^= 0x41;
            assert!(Image::decode(&forged[..length]).is_err(), "byte {at}");
        }
        let mut out_of_window = sample();
        out_of_window.snd_nxt = out_of_window.snd_end.wrapping_add(1);
        let length = out_of_window.encode(&mut bytes).unwrap();
        assert!(matches!(Image::decode(&bytes[..length]), Err(ImageError::Inconsistent(_))));
    }

    #[test]
    fn every_field_has_a_class_and_a_name_of_its_own() {
        for (at, (name, _)) in FIELDS.iter().enumerate() {
            assert!(FIELDS[..at].iter().all(|(other, _)| other != name));
        }
        assert!(FIELDS.iter().any(|(name, class)| *name == "snd_nxt" && *class == Class::Delegated));
    }
}
