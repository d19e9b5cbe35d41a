//! The memory that survives the NIC. It holds for each connection its 4-tuple, the sequence numbers, and the
//! acknowledged bytes.

use crate::entry::{AckEntry, Peer};
use baton_wire::Flow;

/// Bytes that can be held for a connection, a power of two. A byte lies at its sequence number modulo this.
pub const RING: usize = 256 << 10;

/// Bytes of a connection's buffer: a header and the ring of data.
pub const ENTRY_BYTES: usize = RING + HEADER;

const HEADER: usize = 4096;

/// Offsets in the header: whether the buffer is used; the range of sequence numbers held; the 4-tuple; the link
/// addresses; the peer's last acknowledgement, window and timestamps, with the window scale, the kernel's initial and
/// next sequence number.
const USED: usize = 0;
const RANGE: usize = 8;
const FLOW: usize = 64;
const MACS: usize = 104;
const PEER: usize = 120;

/// Memory that survives the NIC: buffers of [`ENTRY_BYTES`], one per connection.
pub trait Store {
    /// Number of buffers.
    fn buffers(&self) -> usize;

    /// Writes bytes into a buffer at offset `at`.
    fn write(&self, buffer: usize, at: usize, bytes: &[u8]);

    /// Reads bytes of a buffer at offset `at`.
    fn read(&self, buffer: usize, at: usize, out: &mut [u8]);

    /// Stores eight bytes atomically, after everything that was written before.
    fn publish(&self, buffer: usize, at: usize, word: u64);

    /// Whether a buffer holds data that an earlier NIC has acknowledged and the kernel has not.
    fn holds(&self, buffer: usize) -> bool
    where
        Self: Sized,
    {
        recover(self, buffer).is_some()
    }
}

/// Writes data into the ring of a buffer, from sequence number `seq` on.
pub(crate) fn write_data(store: &impl Store, buffer: usize, seq: u32, bytes: &[u8]) {
    let at = seq as usize % RING;
    let (first, rest) = bytes.split_at(bytes.len().min(RING - at));
    store.write(buffer, HEADER + at, first);
    store.write(buffer, HEADER, rest);
}

/// Reads data from the ring of a buffer, from sequence number `seq` on.
pub(crate) fn read_data(store: &impl Store, buffer: usize, seq: u32, out: &mut [u8]) {
    let at = seq as usize % RING;
    let middle = out.len().min(RING - at);
    let (first, rest) = out.split_at_mut(middle);
    store.read(buffer, HEADER + at, first);
    store.read(buffer, HEADER, rest);
}

/// Marks an entry's buffer as used, and writes its header.
pub(crate) fn claim(store: &impl Store, entry: &AckEntry) {
    store.write(entry.buffer, FLOW, &entry.flow.to_bytes());
    store.write(entry.buffer, MACS, &entry.link.source);
    store.write(entry.buffer, MACS + 6, &entry.link.destination);
    store_range(store, entry);
    store.publish(entry.buffer, USED, 1);
}

/// Marks a buffer as free.
pub(crate) fn release(store: &impl Store, buffer: usize) {
    store.publish(buffer, USED, 0);
}

/// Publishes the range of sequence numbers held. To be called before anything of a longer range is acknowledged.
pub(crate) fn store_range(store: &impl Store, entry: &AckEntry) {
    let Peer { ack, window, timestamps, .. } = entry.peer;
    let (value, echo) = entry.timestamps_again().unwrap_or_default();
    let mut bytes = [0; 24];
    bytes[..4].copy_from_slice(&ack.to_le_bytes());
    bytes[4..6].copy_from_slice(&window.to_le_bytes());
    bytes[6] = u8::from(timestamps.is_some());
    bytes[7] = entry.scale().map_or(0, |scale| scale + 1);
    bytes[8..12].copy_from_slice(&value.to_le_bytes());
    bytes[12..16].copy_from_slice(&echo.to_le_bytes());
    bytes[16..20].copy_from_slice(&entry.iss.to_le_bytes());
    bytes[20..].copy_from_slice(&entry.snd_nxt.to_le_bytes());
    store.write(entry.buffer, PEER, &bytes);
    store.publish(entry.buffer, RANGE, u64::from(entry.una) | u64::from(entry.next) << 32);
}

/// Reads the entry that an earlier NIC has left in a buffer, if it holds data that the kernel has not acknowledged.
pub(crate) fn recover(store: &impl Store, buffer: usize) -> Option<AckEntry> {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        store.read(buffer, at, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    if word(USED) != 1 {
        return None;
    }
    let range = word(RANGE);
    let (una, next) = (range as u32, (range >> 32) as u32);
    let (mut flow, mut macs, mut peer) = ([0; Flow::BYTES], [0; 12], [0; 24]);
    store.read(buffer, FLOW, &mut flow);
    store.read(buffer, MACS, &mut macs);
    store.read(buffer, PEER, &mut peer);
    if una == next || next.wrapping_sub(una) as usize > RING {
        return None;
    }
    let four = |at: usize| u32::from_le_bytes([peer[at], peer[at + 1], peer[at + 2], peer[at + 3]]);
    let mut entry = AckEntry::new(buffer, Flow::from_bytes(&flow));
    entry.link.source.copy_from_slice(&macs[..6]);
    entry.link.destination.copy_from_slice(&macs[6..]);
    entry.peer = Peer {
        ack: four(0),
        window: u16::from_le_bytes([peer[4], peer[5]]),
        timestamps: (peer[6] != 0).then(|| (four(8), four(12))),
        window_seq: una,
    };
    entry.ts_recent = four(8);
    // The peer may have got an acknowledgement of all of this data. The right edge of the window comes with the
    // kernel's next segment.
    (entry.una, entry.next, entry.acked, entry.rcv_adv) = (una, next, next, next);
    (entry.synchronized, entry.established) = (true, true);
    // These numbers are at most what the kernel has sent, and close to it; the kernel's next segment gives the true
    // number.
    (entry.iss, entry.snd_nxt) = (four(16), four(20));
    (entry.our_scale, entry.peer_scales) = (Some(peer[7].checked_sub(1)), Some(true));
    Some(entry)
}
