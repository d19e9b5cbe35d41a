//! State that outlives a table, and a NIC: counters, token buckets and flows, in words of memory that all workers
//! share. The memory belongs to the owner of the rules. New memory must be all zero.

use core::sync::atomic::{AtomicU64, Ordering};

/// Most rules of a table.
pub const RULES: usize = 1 << 14;
/// Number of slots for rules, each with counters and a token bucket: enough for two tables while one replaces the
/// other.
pub const SLOTS: usize = 2 * RULES;
/// Slot of the frames that no rule has decided about: they pass.
pub const UNMATCHED: usize = SLOTS;
/// Slot of the frames that are dropped because they cannot be judged: damaged frames, and fragments whose datagram's
/// first fragment is not known.
pub const UNREADABLE: usize = SLOTS + 1;
/// Number of flows that are kept.
pub const FLOWS: usize = 1 << 16;

/// Words of a slot: frames and bytes that matched, frames that a limit has dropped, the token bucket.
const SLOT: usize = 4;
/// Words of a flow, see `flows.rs`.
pub(crate) const FLOW: usize = 4;
/// First word of the flows.
pub(crate) const FIRST_FLOW: usize = (SLOTS + 2) * SLOT;

/// Number of words in all.
pub const WORDS: usize = FIRST_FLOW + FLOWS * FLOW;

/// The counters of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counted {
    /// Frames that the rule has matched. A frame that stands for several segments counts as that many.
    pub packets: u64,
    /// Bytes of those frames, Ethernet header included.
    pub bytes: u64,
    /// Frames among these that the rule's limit has dropped.
    pub over: u64,
}

/// The counters of a slot.
///
/// # Panics
/// If there is no such slot.
pub fn counted(words: &[AtomicU64], slot: usize) -> Counted {
    let [packets, bytes, over] = [0, 1, 2].map(|at| words[slot * SLOT + at].load(Ordering::Relaxed));
    Counted { packets, bytes, over }
}

/// Empties a slot for another rule.
///
/// # Panics
/// If there is no such slot.
pub fn clear(words: &[AtomicU64], slot: usize) {
    words[slot * SLOT..][..SLOT].iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

/// Counts frames that matched.
#[inline(always)]
pub(crate) fn count(words: &[AtomicU64], slot: usize, packets: u64, bytes: u64) {
    words[slot * SLOT].fetch_add(packets, Ordering::Relaxed);
    words[slot * SLOT + 1].fetch_add(bytes, Ordering::Relaxed);
}

/// Counts frames that the limit has dropped.
pub(crate) fn count_over(words: &[AtomicU64], slot: usize, packets: u64) {
    words[slot * SLOT + 2].fetch_add(packets, Ordering::Relaxed);
}

/// The token bucket of a slot.
pub(crate) fn bucket(words: &[AtomicU64], slot: usize) -> &AtomicU64 {
    &words[slot * SLOT + 3]
}
