//! The state of one connection.

use crate::before;
use baton_wire::frame::Link;
use baton_wire::{Flow, FlowKey, TcpFrame};

/// Acknowledgement, window field and timestamps of the peer's last acceptable segment, for segments that are delivered
/// to the kernel again.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Peer {
    pub ack: u32,
    pub window: u16,
    pub timestamps: Option<(u32, u32)>,
    /// Sequence number of the segment that the window is from (SND.WL1).
    pub window_seq: u32,
}

/// A connection as seen between the kernel and the wire. It can be handed to another worker.
#[derive(Clone, Debug)]
pub struct AckEntry {
    /// Number of the buffer that holds its bytes.
    pub(crate) buffer: usize,
    /// The 4-tuple as the kernel sees it.
    pub(crate) flow: Flow,
    pub(crate) key: FlowKey,
    /// Link addresses, TTL and class of the kernel's frames, taken from one of them.
    pub(crate) link: Link,
    /// The kernel's initial sequence number, by which a repeated SYN or SYN-ACK differs from one of another connection.
    pub(crate) iss: u32,
    /// Window scale that the kernel offered, and whether the peer offered one; None until it is known.
    pub(crate) our_scale: Option<Option<u8>>,
    pub(crate) peer_scales: Option<bool>,
    /// The kernel has acknowledged something, so that the sequence numbers below are valid.
    pub(crate) synchronized: bool,
    /// The kernel has sent something after its SYN. Until then it may have no socket that keeps data: a listener whose
    /// queue is full ignores all that completes a handshake.
    pub(crate) established: bool,
    /// First sequence number that the kernel has not acknowledged.
    pub(crate) una: u32,
    /// First sequence number that is not held.
    pub(crate) next: u32,
    /// First sequence number that the peer has got no acknowledgement of.
    pub(crate) acked: u32,
    /// Right edge (sequence number) of the window that the kernel has advertised.
    pub(crate) rcv_adv: u32,
    /// The kernel's next sequence number.
    pub(crate) snd_nxt: u32,
    /// The kernel's last timestamp value.
    pub(crate) ts_value: Option<u32>,
    /// The kernel's last segment had ECE set (RFC 3168).
    pub(crate) ece: bool,
    /// The peer's timestamp to echo (TS.Recent, RFC 7323 section 4.3).
    pub(crate) ts_recent: u32,
    pub(crate) peer: Peer,
    /// Number of segments held since the last acknowledgement.
    pub(crate) segments_since_ack: u32,
    /// Number of duplicate acknowledgements of the kernel's while bytes were held, and whether they have brought a
    /// delivery since the kernel last acknowledged more: refused segments are answered by duplicates, too.
    pub(crate) duplicate_acks: u32,
    pub(crate) answered_duplicates: bool,
    /// When an acknowledgement is due, in microseconds; `u64::MAX` for never.
    pub(crate) ack_due: u64,
    /// When the kernel gets the bytes again that it has not acknowledged, in microseconds; `u64::MAX` for never.
    pub(crate) redelivery_due: u64,
    /// Microseconds from one such delivery to the next.
    pub(crate) redelivery_interval: u64,
    /// Tick of its entry in the timing wheel; `u64::MAX` without one.
    pub(crate) scheduled: u64,
}

impl AckEntry {
    pub(crate) fn new(buffer: usize, flow: Flow) -> AckEntry {
        AckEntry {
            buffer,
            flow,
            key: FlowKey::from(&flow),
            link: Link { ttl: 64, ..Link::default() },
            iss: 0,
            our_scale: None,
            peer_scales: None,
            synchronized: false,
            established: false,
            una: 0,
            next: 0,
            acked: 0,
            rcv_adv: 0,
            snd_nxt: 0,
            ts_value: None,
            ece: false,
            ts_recent: 0,
            peer: Peer::default(),
            segments_since_ack: 0,
            duplicate_acks: 0,
            answered_duplicates: false,
            ack_due: u64::MAX,
            redelivery_due: u64::MAX,
            redelivery_interval: 0,
            scheduled: u64::MAX,
        }
    }

    /// The 4-tuple as the kernel sees it.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// Whether the kernel will accept a segment of the peer's (RFC 9293 section 3.10.7.4, RFC 7323 section 5.3, RFC
    /// 5961 section 5): it is in the window, its timestamp is not old, and it acknowledges what the kernel has sent,
    /// and not less than before. The segment's content may be used only then, since any host can send segments with
    /// this 4-tuple.
    pub(crate) fn accepts(&self, parsed: &TcpFrame) -> bool {
        let end = parsed.seq.wrapping_add(parsed.payload_length as u32);
        let in_window = !before(self.rcv_adv, parsed.seq) && !before(end, self.una);
        let acknowledges = !before(self.snd_nxt, parsed.ack) && !before(parsed.ack, self.peer.ack);
        let old = match (self.peer.timestamps, parsed.options.timestamps) {
            (Some(_), Some((value, _))) => before(value, self.ts_recent),
            _ => false,
        };
        self.synchronized && in_window && acknowledges && !old
    }

    /// Notes the content of an acceptable segment of the peer's. RFC 9293 section 3.10.7.4 says when the window is
    /// taken from it.
    pub(crate) fn note_peer(&mut self, parsed: &TcpFrame) {
        let peer = &mut self.peer;
        let same_but_wider = parsed.seq == peer.window_seq && parsed.window > peer.window;
        if before(peer.ack, parsed.ack) || before(peer.window_seq, parsed.seq) || same_but_wider {
            (peer.window, peer.window_seq) = (parsed.window, parsed.seq);
        }
        peer.ack = parsed.ack;
        if peer.timestamps.is_some() && parsed.options.timestamps.is_some() {
            peer.timestamps = parsed.options.timestamps;
        }
    }

    /// The timestamps of a segment that is delivered to the kernel again: not older than the kernel's last echo.
    pub(crate) fn timestamps_again(&self) -> Option<(u32, u32)> {
        let newest = |value| if before(value, self.ts_recent) { self.ts_recent } else { value };
        self.peer.timestamps.map(|(value, echo)| (newest(value), echo))
    }

    /// Whether bytes are held that the kernel has not acknowledged.
    pub(crate) fn holds(&self) -> bool {
        self.una != self.next
    }

    /// The shift of the kernel's window fields (RFC 7323 section 2.2); None if it is not known.
    pub(crate) fn scale(&self) -> Option<u8> {
        match (self.our_scale?, self.peer_scales?) {
            (Some(scale), true) => Some(scale),
            _ => Some(0),
        }
    }

    /// The window field that, with the acknowledgement `ack`, keeps the kernel's right edge; rounded down by the scale,
    /// so that it never lies beyond.
    pub(crate) fn window_at(&self, ack: u32) -> u16 {
        let window = self.rcv_adv.wrapping_sub(ack);
        let window = if window > u32::MAX / 2 { 0 } else { window };
        (window >> self.scale().unwrap_or(0)).min(0xffff) as u16
    }

    /// When something is due, in microseconds.
    pub(crate) fn due(&self) -> Option<u64> {
        Some(self.ack_due.min(self.redelivery_due)).filter(|due| *due != u64::MAX)
    }
}
