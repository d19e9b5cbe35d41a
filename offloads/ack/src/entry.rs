//! What is known of one connection.

use baton_wire::frame::Link;
use baton_wire::{Flow, Name};

/// What the peer said last, for segments that are given to the kernel again.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Peer {
    pub ack: u32,
    pub window: u16,
    pub timestamps: Option<(u32, u32)>,
}

/// A connection, as it is seen from between the kernel and the wire. It can go to another worker.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where its bytes are held.
    pub(crate) place: usize,
    /// As the kernel sees it.
    pub(crate) flow: Flow,
    pub(crate) name: Name,
    /// Addresses of the kernel's frames, from its own.
    pub(crate) link: Link,
    /// Window scale that the kernel offered, and whether the peer did: None until the SYN was seen.
    pub(crate) our_scale: Option<Option<u8>>,
    pub(crate) peer_scales: Option<bool>,
    /// The kernel has acknowledged something: the numbers below are true.
    pub(crate) known: bool,
    /// First byte that the kernel has not acknowledged; the first that is not held; the first that the peer was not acknowledged.
    pub(crate) una: u32,
    pub(crate) next: u32,
    pub(crate) acked: u32,
    /// Right edge of the window that the kernel advertised.
    pub(crate) edge: u32,
    /// The kernel's next sequence number, timestamp, and whether it echoes congestion.
    pub(crate) snd_nxt: u32,
    pub(crate) value: Option<u32>,
    pub(crate) echoes: bool,
    /// Of the peer's timestamps the one to be echoed (RFC 7323 section 4.3).
    pub(crate) recent: u32,
    pub(crate) peer: Peer,
    /// Segments held since the last acknowledgement.
    pub(crate) waiting: u32,
    /// Acknowledgements of the kernel's that said nothing new while bytes were held.
    pub(crate) repeated: u32,
    /// When an acknowledgement is due; when the kernel is given what it has not acknowledged again, and how long is waited then.
    pub(crate) ack_due: u64,
    pub(crate) again_due: u64,
    pub(crate) patience: u64,
    /// Tick for which the wheel has it.
    pub(crate) scheduled: u64,
}

impl Entry {
    pub(crate) fn new(place: usize, flow: Flow) -> Entry {
        Entry {
            place,
            flow,
            name: Name::from(&flow),
            link: Link { ttl: 64, ..Link::default() },
            our_scale: None,
            peer_scales: None,
            known: false,
            una: 0,
            next: 0,
            acked: 0,
            edge: 0,
            snd_nxt: 0,
            value: None,
            echoes: false,
            recent: 0,
            peer: Peer::default(),
            waiting: 0,
            repeated: 0,
            ack_due: u64::MAX,
            again_due: u64::MAX,
            patience: 0,
            scheduled: u64::MAX,
        }
    }

    /// Its 4-tuple, as the kernel sees it.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// Whether something is held that the kernel has not acknowledged.
    pub(crate) fn holds(&self) -> bool {
        self.una != self.next
    }

    /// By how much the kernel's window fields are to be shifted; none if that is not known.
    pub(crate) fn scale(&self) -> Option<u8> {
        match (self.our_scale?, self.peer_scales?) {
            (Some(scale), true) => Some(scale),
            _ => Some(0),
        }
    }

    /// The window field that keeps the kernel's right edge with this acknowledgement: never beyond it.
    pub(crate) fn window_at(&self, ack: u32) -> u16 {
        let window = self.edge.wrapping_sub(ack);
        let window = if window > u32::MAX / 2 { 0 } else { window };
        (window >> self.scale().unwrap_or(0)).min(0xffff) as u16
    }

    pub(crate) fn due(&self) -> Option<u64> {
        Some(self.ack_due.min(self.again_due)).filter(|due| *due != u64::MAX)
    }
}
