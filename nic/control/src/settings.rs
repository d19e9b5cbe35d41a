//! What a NIC process is told when it starts.

use baton_offloads::Offloads;
use baton_rss::Key;
use baton_sim::Impairments;
use serde::{Deserialize, Serialize};

fn one() -> usize {
    1
}

/// The emulated link in front of the wire, the same both ways. Times in microseconds, probabilities in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSettings {
    /// Bits per second, 0 for no limit.
    pub rate: u64,
    /// One-way delay.
    pub delay: u64,
    /// Bytes of buffer.
    pub buffer: u64,
    /// Frames lost.
    pub loss: u32,
    /// Frames held back by `hold`.
    pub reorder: u32,
    /// How long.
    pub hold: u64,
    /// Frames doubled.
    pub duplicate: u32,
    /// Frames damaged.
    pub corrupt: u32,
    /// Only what the NIC sends is lost, held back, doubled or damaged; what it receives is merely delayed.
    pub one_way: bool,
    /// Seed of the faults.
    pub seed: u64,
}

impl LinkSettings {
    /// As the link wants them.
    pub fn impairments(&self) -> Impairments {
        let LinkSettings { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt, one_way: _, seed: _ } = *self;
        Impairments { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt }
    }
}

/// What a NIC process is told when it starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NicSettings {
    /// Connections that it can hold.
    pub slots: usize,
    /// Workers, each a thread with queues of its own. Beside the kernel there is one.
    #[serde(default = "one")]
    pub workers: usize,
    /// Cores that they are bound to; those for whom there is none are not.
    #[serde(default)]
    pub cores: Vec<usize>,
    /// The host's interface and the wire have a queue for each worker, and registers that say which frame goes to which. Without them the
    /// first worker takes every frame, and gives those of the others to them.
    #[serde(default)]
    pub card: bool,
    /// One thread writes to the kernel what all workers have for it, each in turn; else each worker does so itself. Its core is the one behind
    /// the workers', if there is one. Not beside the kernel, where there is one worker.
    #[serde(default)]
    pub copy_engine: bool,
    /// Microseconds that it polls without work before it sleeps.
    pub spin: u64,
    /// The wire takes frames of up to 64 KB.
    pub segmentation: bool,
    /// What it does for the kernel's own connections; not beside the kernel, where their frames never come here.
    #[serde(default)]
    pub offloads: Offloads,
    /// Frames that come during a move are dropped, not kept for the connection's next owner.
    #[serde(default)]
    pub drop_during_moves: bool,
    /// The NIC hears and speaks on the kernel's own devices, instead of sitting between the kernel and the wire.
    #[serde(default)]
    pub beside: bool,
    /// The emulated link.
    pub link: LinkSettings,
    /// Key of the lookup table.
    pub hash_key: [u64; 4],
}

impl NicSettings {
    /// Descriptors of a card with several queues: its registers, then, for each worker but the first, a queue of the host's interface and one
    /// of the wire's.
    pub fn card_descriptors(&self) -> usize {
        if self.card { 1 + 2 * (self.workers - 1) } else { 0 }
    }

    /// A hash key that nobody outside can guess, from the lookup's.
    pub(crate) fn random_key(&self) -> Key {
        let mut key = [0; baton_rss::KEY_BYTES];
        for (at, bytes) in key.chunks_mut(8).enumerate() {
            // splitmix64, so that the one tells nothing of the other.
            let mut word = self.hash_key[at % 4].wrapping_add((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.copy_from_slice(&(word ^ word >> 31).to_le_bytes());
        }
        Key(key)
    }
}
