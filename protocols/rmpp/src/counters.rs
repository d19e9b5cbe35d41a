//! Counters of packets, and of dropped packets by reason.

use baton_wire::rmpp::Refusal;

/// Why a packet that could be read, or a command, was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Drop {
    /// For an endpoint that is not ours.
    Endpoint,
    /// Of a message that has ended, or never was.
    NoMessage,
    /// From another peer, endpoint or incarnation than the message's.
    Stranger,
    /// Data of packets that were not cleared.
    NotCleared,
    /// A data packet of another length than its place in the message has.
    Length,
    /// Data that had been placed before, or another packet that says nothing new.
    Duplicate,
    /// A CTS that clears nothing of this message, or more than there is.
    ClearedTooMuch,
    /// A CTS that is older than one received before.
    OldGrant,
    /// An RTS for which no buffer was posted.
    NoBuffer,
    /// The queue of events was full.
    NoRoom,
    /// The region of a command lies outside the memory.
    Memory,
    /// From an incarnation that has been replaced.
    Stale,
    /// For an incarnation of ours that is not the current one.
    WrongIncarnation,
    /// No room for another peer.
    Peers,
    /// An RTS numbered beyond the window, or a floor above the numbers that were sent.
    Window,
    /// No room for another incoming message.
    Messages,
}

/// Counters of a half. Each only grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Packets received, refused ones included.
    pub received: u64,
    /// Packets sent.
    pub sent: u64,
    /// Data packets placed in memory, including those that came by a stream.
    pub placed: u64,
    /// Streams that peers have opened.
    pub streams: u64,
    /// Streams of either direction that have ended otherwise than with their association.
    pub streams_ended: u64,
    /// Runs received.
    pub runs: u64,
    /// Of these, runs that were sent unasked: the number that was taken, and the number that was dropped since no
    /// receive wanted them yet, or not all of their bytes.
    pub unasked: [u64; 2],
    /// Bytes of messages received and sent by streams.
    pub streamed: [u64; 2],
    /// Packets refused by the parser, by [`Refusal`].
    pub refused: [u64; Refusal::COUNT],
    /// Packets and commands dropped, by [`Drop`].
    pub dropped: [u64; Drop::COUNT],
}

impl Drop {
    /// Number of reasons.
    pub const COUNT: usize = 16;
}

impl Counters {
    /// How many packets were dropped for this reason.
    pub fn dropped(&self, reason: Drop) -> u64 {
        self.dropped[reason as usize]
    }

    /// Counts a dropped packet.
    pub(crate) fn drop(&mut self, reason: Drop) {
        self.dropped[reason as usize] += 1;
    }
}
