//! A short encoding, for an image that is kept for a long time while its connection is idle: only bytes that differ
//! from those of a usual connection are written. The 4-tuple is not written, since it is stored beside the image.
//!
//! The form is read by the program that wrote it, or by the next one of the same version: it has a digest and no
//! version.

use crate::codec::{self, Field, Reader, Writer};
use crate::nic::{Congestion, Newest, Receiving, Recovery, Sending};
use crate::{Image, ImageError, MAX_ENCODED, NicState};
use baton_wire::Flow;

/// Bytes that one mask covers, and bytes that a mask of masks covers.
const GROUP: usize = 8;
const GROUPS: usize = GROUP * 8;
/// Largest length of the short form, in bytes.
pub const MAX_SHORT: usize = BASE + MAX_ENCODED + MAX_ENCODED / GROUP + MAX_ENCODED / GROUPS;
/// Bytes in front of the masks: two sequence numbers, from which the usual image is made, the digest, and flags for the
/// parts that follow.
const BASE: usize = 13;
const _: () = assert!(MAX_ENCODED.is_multiple_of(GROUPS));

/// The fields of an image and of the NIC's own state, without header and digest; zeros follow them.
type Plain = [u8; MAX_ENCODED];

/// The direction of converting fields that usually are close to another field.
#[derive(Clone, Copy)]
enum Turn {
    /// The field becomes its distance from the other one, with the sign in the lowest bit, so that a short distance has
    /// few nonzero bytes.
    Relative,
    /// The distance becomes the field again.
    Absolute,
}

impl Turn {
    fn u64(self, field: &mut u64, other: u64) {
        *field = match self {
            Turn::Relative => {
                let distance = field.wrapping_sub(other) as i64;
                (distance << 1 ^ distance >> 63) as u64
            }
            Turn::Absolute => other.wrapping_add(*field >> 1 ^ (*field & 1).wrapping_neg()),
        };
    }

    fn u32(self, field: &mut u32, other: u32) {
        *field = match self {
            Turn::Relative => {
                let distance = field.wrapping_sub(other) as i32;
                (distance << 1 ^ distance >> 31) as u32
            }
            Turn::Absolute => other.wrapping_add(*field >> 1 ^ (*field & 1).wrapping_neg()),
        };
    }

    /// Converts the fields that are close to others: positions received and sent, smallest round-trip times, and ages,
    /// which count from the last traffic.
    fn apply(self, image: &mut Image, nic: Option<&mut NicState>) {
        self.u32(&mut image.rcv_adv, image.rcv_nxt);
        self.u32(&mut image.max_window, image.snd_wnd);
        let Some(nic) = nic else { return };
        let age = nic.recovery.sent_age.unwrap_or(0);
        let Congestion { epoch_age, round_min, delay_min, min_rtt_age, .. } = &mut nic.congestion;
        image.sent_ago.iter_mut().for_each(|field| self.u32(field, age as u32));
        epoch_age.iter_mut().for_each(|field| self.u64(field, age));
        self.u64(&mut nic.receiving.silent_for, age);
        self.u32(min_rtt_age, age as u32);
        self.u32(round_min, image.min_rtt);
        self.u32(delay_min, image.min_rtt);
        nic.recovery.last_echo.iter_mut().for_each(|field| self.u32(field, image.ts_clock));
        nic.newest.iter_mut().for_each(|newest| {
            self.u32(&mut newest.age, age as u32);
            self.u32(&mut newest.rtt, image.min_rtt);
        });
    }
}

fn write_plain(image: &Image, nic: Option<&NicState>) -> Result<Plain, ImageError> {
    let mut plain = [0; MAX_ENCODED];
    let mut writer = Writer::new(&mut plain);
    image.write_fields(&mut writer)?;
    nic.copied().write(&mut writer)?;
    Ok(plain)
}

/// The fields of a usual idle connection, as [`Turn::Relative`]: everything is acknowledged, and nothing was ever lost.
fn usual(flow: Flow, snd_una: u32, rcv_nxt: u32, nic: bool) -> Result<Plain, ImageError> {
    let sent_ago = nic.then_some(0);
    let ends = Image { rcv_nxt, rcv_adv: rcv_nxt, sent_ago, ..Image::open(flow) };
    let mut image = Image { snd_una, snd_nxt: snd_una, snd_end: snd_una, snd_wl1: rcv_nxt, ..ends };
    let mut nic = nic.then(|| NicState {
        sending: Sending { small_end: snd_una, ..Sending::default() },
        receiving: Receiving { last_ack: rcv_nxt, ts_known: true, ..Receiving::default() },
        congestion: Congestion {
            round_end: snd_una,
            epoch_age: Some(0),
            round_min: image.min_rtt,
            delay_min: image.min_rtt,
            ..Congestion::default()
        },
        recovery: Recovery {
            high_seq: snd_una,
            usage_end: snd_una,
            last_echo: Some(image.ts_clock),
            sent_age: Some(0),
            ..Recovery::default()
        },
        newest: Some(Newest { end: snd_una, rtt: image.min_rtt, ..Newest::default() }),
        ..NicState::default()
    });
    Turn::Relative.apply(&mut image, nic.as_mut());
    write_plain(&image, nic.as_ref())
}

impl Image {
    /// Writes the short form of the image, and of the NIC's own state if it is given, into `out`. Returns its length in
    /// bytes.
    ///
    /// # Errors
    /// [`ImageError::Truncated`] if `out` is too short; [`MAX_SHORT`] bytes are enough.
    pub fn shorten(&self, nic: Option<&NicState>, out: &mut [u8]) -> Result<usize, ImageError> {
        let (mut image, mut nic) = (*self, nic.copied());
        Turn::Relative.apply(&mut image, nic.as_mut());
        let mut plain = write_plain(&image, nic.as_ref())?;
        let sum = codec::digest(&plain);
        for (byte, usual) in plain.iter_mut().zip(usual(self.flow, self.snd_una, self.rcv_nxt, nic.is_some())?) {
            *byte ^= usual;
        }
        let mut writer = Writer::new(out);
        self.snd_una.write(&mut writer)?;
        self.rcv_nxt.write(&mut writer)?;
        sum.write(&mut writer)?;
        nic.is_some().write(&mut writer)?;
        for groups in plain.chunks(GROUPS) {
            mask(groups.chunks(GROUP).map(|group| group != [0; GROUP])).write(&mut writer)?;
            for group in groups.chunks(GROUP).filter(|group| *group != [0; GROUP]) {
                mask(group.iter().map(|byte| *byte != 0)).write(&mut writer)?;
                group.iter().filter(|byte| **byte != 0).try_for_each(|byte| byte.write(&mut writer))?;
            }
        }
        let zeros = writer.written().iter().rev().take_while(|byte| **byte == 0).count();
        // Masks that are left out at the end are zero.
        Ok(writer.length() - zeros.min(writer.length() - BASE))
    }

    /// Reads the short form of an image of the connection with this 4-tuple, and checks it as [`Image::decode_with`]
    /// does.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn lengthen(bytes: &[u8], flow: Flow) -> Result<(Image, Option<NicState>), ImageError> {
        let mut reader = Reader::new(bytes);
        let (snd_una, rcv_nxt, sum) = (Field::read(&mut reader)?, Field::read(&mut reader)?, u32::read(&mut reader)?);
        let nic = bool::read(&mut reader)?;
        let mut plain = usual(flow, snd_una, rcv_nxt, nic)?;
        for groups in plain.chunks_mut(GROUPS) {
            let present = if reader.position() < bytes.len() { u8::read(&mut reader)? } else { 0 };
            for (_, group) in groups.chunks_mut(GROUP).enumerate().filter(|(at, _)| present >> at & 1 != 0) {
                let differs = u8::read(&mut reader)?;
                for (_, byte) in group.iter_mut().enumerate().filter(|(at, _)| differs >> at & 1 != 0) {
                    *byte ^= u8::read(&mut reader)?;
                }
            }
        }
        if sum != codec::digest(&plain) {
            return Err(ImageError::Digest);
        }
        let mut reader = Reader::new(&plain);
        let mut image = Image::read_fields(&mut reader)?;
        let mut nic: Option<NicState> = Field::read(&mut reader)?;
        Turn::Absolute.apply(&mut image, nic.as_mut());
        image.check()?;
        nic.map_or(Ok(()), |nic| nic.check(&image))?;
        Ok((image, nic))
    }
}

/// A bit for each of eight, the first one lowest.
fn mask(set: impl Iterator<Item = bool>) -> u8 {
    set.enumerate().fold(0, |mask, (at, set)| mask | u8::from(set) << at)
}
