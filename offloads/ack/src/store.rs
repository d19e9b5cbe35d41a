//! What survives the NIC: of each connection its name, how far it was acknowledged, and the bytes between.

use crate::entry::{Entry, Peer};
use baton_wire::Flow;

/// Bytes of a connection that can be held, a power of two: one lies at its sequence number modulo this.
pub const RING: usize = 256 << 10;

/// Bytes of a connection's place.
pub const ENTRY_BYTES: usize = RING + HEADER;

const HEADER: usize = 4096;

/// Offsets in the header.
const USED: usize = 0;
const RANGE: usize = 8;
const FLOW: usize = 64;
const MACS: usize = 104;
const PEER: usize = 120;

/// Memory that survives the NIC, a place of [`ENTRY_BYTES`] for each connection.
pub trait Store {
    /// Places that there are.
    fn places(&self) -> usize;

    /// Writes bytes in a place.
    fn write(&self, place: usize, at: usize, bytes: &[u8]);

    /// Reads bytes of a place.
    fn read(&self, place: usize, at: usize, out: &mut [u8]);

    /// Writes eight bytes at once, after all that was written before.
    fn publish(&self, place: usize, at: usize, word: u64);

    /// Whether a place holds what another NIC has acknowledged and the kernel has not.
    fn holds(&self, place: usize) -> bool
    where
        Self: Sized,
    {
        recover(self, place).is_some()
    }
}

/// Puts bytes where they belong.
pub(crate) fn put(store: &impl Store, place: usize, seq: u32, bytes: &[u8]) {
    let at = seq as usize % RING;
    let (first, rest) = bytes.split_at(bytes.len().min(RING - at));
    store.write(place, HEADER + at, first);
    store.write(place, HEADER, rest);
}

/// Takes bytes from there.
pub(crate) fn get(store: &impl Store, place: usize, seq: u32, out: &mut [u8]) {
    let at = seq as usize % RING;
    let middle = out.len().min(RING - at);
    let (first, rest) = out.split_at_mut(middle);
    store.read(place, HEADER + at, first);
    store.read(place, HEADER, rest);
}

/// A connection has this place.
pub(crate) fn claim(store: &impl Store, entry: &Entry) {
    store.write(entry.place, FLOW, &entry.flow.to_bytes());
    store.write(entry.place, MACS, &entry.link.source);
    store.write(entry.place, MACS + 6, &entry.link.destination);
    note_range(store, entry);
    store.publish(entry.place, USED, 1);
}

/// The place is free.
pub(crate) fn release(store: &impl Store, place: usize) {
    store.publish(place, USED, 0);
}

/// From where to where bytes are held. Before anything is acknowledged that they cover.
pub(crate) fn note_range(store: &impl Store, entry: &Entry) {
    let Peer { ack, window, timestamps } = entry.peer;
    let (value, echo) = timestamps.unwrap_or_default();
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&ack.to_le_bytes());
    bytes[4..6].copy_from_slice(&window.to_le_bytes());
    bytes[6] = u8::from(timestamps.is_some());
    bytes[7] = entry.scale().map_or(0, |scale| scale + 1);
    bytes[8..12].copy_from_slice(&value.to_le_bytes());
    bytes[12..].copy_from_slice(&echo.to_le_bytes());
    store.write(entry.place, PEER, &bytes);
    store.publish(entry.place, RANGE, u64::from(entry.una) | u64::from(entry.next) << 32);
}

/// What another NIC has left in a place, if there is something.
pub(crate) fn recover(store: &impl Store, place: usize) -> Option<Entry> {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        store.read(place, at, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    if word(USED) != 1 {
        return None;
    }
    let range = word(RANGE);
    let (una, next) = (range as u32, (range >> 32) as u32);
    let (mut flow, mut macs, mut peer) = ([0; 36], [0; 12], [0; 16]);
    store.read(place, FLOW, &mut flow);
    store.read(place, MACS, &mut macs);
    store.read(place, PEER, &mut peer);
    if una == next || next.wrapping_sub(una) as usize > RING {
        return None;
    }
    let four = |at: usize| u32::from_le_bytes([peer[at], peer[at + 1], peer[at + 2], peer[at + 3]]);
    let mut entry = Entry::new(place, Flow::from_bytes(&flow));
    entry.link.source.copy_from_slice(&macs[..6]);
    entry.link.destination.copy_from_slice(&macs[6..]);
    entry.peer = Peer {
        ack: four(0),
        window: u16::from_le_bytes([peer[4], peer[5]]),
        timestamps: (peer[6] != 0).then(|| (four(8), four(12))),
    };
    // The peer may have been told of all of it. The window's edge the kernel will say.
    (entry.una, entry.next, entry.acked, entry.edge, entry.known) = (una, next, next, next, true);
    // Not more than the kernel has sent, and near it; it will say.
    entry.snd_nxt = entry.peer.ack;
    (entry.our_scale, entry.peer_scales) = (Some(peer[7].checked_sub(1)), Some(true));
    Some(entry)
}
