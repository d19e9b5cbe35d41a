//! What crosses the boundary of a connection: segments in, segments out, and what happened.

use baton_wire::frame::Header;
use baton_wire::{Acknowledgement, Flags, Plain, TcpFrame, TcpOptions};
use bitflags::bitflags;

/// A received segment's header; its payload stays with the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: Flags,
    /// Window field, unscaled.
    pub window: u16,
    /// Options.
    pub options: TcpOptions,
    /// The packet was marked Congestion Experienced (RFC 3168).
    pub congestion_experienced: bool,
    /// Bytes of payload.
    pub length: u32,
}

impl Segment {
    /// Sequence number behind the segment, SYN and FIN counted.
    #[inline]
    pub fn end(&self) -> u32 {
        let controls = u32::from(self.flags.contains(Flags::SYN)) + u32::from(self.flags.contains(Flags::FIN));
        self.seq.wrapping_add(self.length).wrapping_add(controls)
    }

    /// The fields of a plain segment.
    #[inline(always)]
    pub fn plain(&self) -> Plain {
        let Segment { seq, ack, flags, window, ref options, length, .. } = *self;
        Plain { seq, ack, window, timestamps: options.timestamps, length, pushed: flags.contains(Flags::PSH) }
    }
}

impl From<&Plain> for Segment {
    fn from(plain: &Plain) -> Self {
        Segment {
            seq: plain.seq,
            ack: plain.ack,
            flags: if plain.pushed { Flags::ACK | Flags::PSH } else { Flags::ACK },
            window: plain.window,
            options: TcpOptions { timestamps: plain.timestamps, ..TcpOptions::default() },
            congestion_experienced: false,
            length: plain.length,
        }
    }
}

impl From<&TcpFrame> for Segment {
    #[inline]
    fn from(frame: &TcpFrame) -> Self {
        Segment {
            seq: frame.seq,
            ack: frame.ack,
            flags: frame.flags,
            window: frame.window,
            options: frame.options,
            congestion_experienced: frame.ecn == 3,
            length: frame.payload_length as u32,
        }
    }
}

/// What the caller must do with a segment that was passed to [`crate::Connection::input`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes at the front of the payload to skip.
    pub skip: u32,
    /// Bytes behind those to put into receive memory, before the next call of [`crate::Connection::poll_transmit`].
    pub place: u32,
    /// Sequence number of the first byte to place.
    pub place_seq: u32,
    /// Bytes that became readable in order.
    pub delivered: u32,
    /// Bytes of send memory that the peer has acknowledged.
    pub acked: u32,
    /// What else happened.
    pub events: Events,
}

/// The result for a segment that was the expected one: all of its payload became readable.
#[derive(Clone, Copy, Debug)]
pub struct Predicted {
    /// Bytes of send memory that the peer has acknowledged.
    pub acked: u32,
    /// What else happened.
    pub events: Events,
    /// The acknowledgement, if nothing else has to be sent; otherwise the caller must call
    /// [`crate::Connection::poll_transmit`].
    pub acknowledgement: Option<Acknowledgement>,
}

impl Predicted {
    /// Whether the program has to be notified of anything but its payload.
    #[inline(always)]
    pub fn concerns_program(&self) -> bool {
        self.acked | u32::from(self.events.bits()) != 0
    }
}

bitflags! {
    /// What happened to a connection.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Events: u8 {
        /// The handshake has completed.
        const ESTABLISHED = 1;
        /// The peer's FIN came in order.
        const FIN = 2;
        /// The connection ended without error.
        const CLOSED = 4;
        /// The connection ended with an error; [`crate::Connection::end_reason`] says which.
        const ABORTED = 8;
        /// The connection reached TIME-WAIT.
        const TIME_WAIT = 16;
        /// Our FIN was acknowledged.
        const FIN_ACKED = 32;
    }
}

/// A segment to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transmit {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: Flags,
    /// Window field, already scaled down.
    pub window: u16,
    /// Options.
    pub options: TcpOptions,
    /// Bytes of send memory from `seq` on.
    pub length: u32,
    /// Payload bytes per segment when `length` exceeds one segment and the device has to cut it; else 0.
    pub segment_size: u16,
    /// ECN field of the IP header.
    pub ecn: u8,
}

impl Transmit {
    /// The fields of its headers, with this IPv4 identification.
    #[inline(always)]
    pub fn header(&self, ident: u16) -> Header<'_> {
        let Transmit { seq, ack, flags, window, ref options, ecn, .. } = *self;
        Header { seq, ack, flags, window, options, ecn, ident }
    }
}
