//! The settings that a NIC process gets from the agent when it starts.

use baton_offloads::Offloads;
use baton_rss::Key;
use baton_sim::Impairments;
use serde::{Deserialize, Serialize};

fn one() -> usize {
    1
}

/// The emulated link in front of the wire, the same in both directions. Times are in microseconds, probabilities in parts per
/// million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSettings {
    /// Bits per second, 0 for no limit.
    pub rate: u64,
    /// Delay in each direction.
    pub delay: u64,
    /// Bytes of buffer in each direction.
    pub buffer: u64,
    /// Probability that a frame is lost.
    pub loss: u32,
    /// Probability that a frame is held back by `hold`, so that later ones overtake it.
    pub reorder: u32,
    /// How long such a frame is held back.
    pub hold: u64,
    /// Probability that a frame is duplicated.
    pub duplicate: u32,
    /// Probability that a bit of a frame is changed.
    pub corrupt: u32,
    /// Faults affect only what the NIC sends; what it receives is delayed and nothing else.
    pub one_way: bool,
    /// Seed of the random faults.
    pub seed: u64,
}

impl LinkSettings {
    /// The impairments of one direction.
    pub fn impairments(&self) -> Impairments {
        let LinkSettings { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt, one_way: _, seed: _ } = *self;
        Impairments { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt }
    }
}

/// The settings of a NIC process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NicSettings {
    /// Largest number of offloaded connections.
    pub slots: usize,
    /// Number of workers, each a thread with queues of its own. Beside the kernel there is one.
    #[serde(default = "one")]
    pub workers: usize,
    /// Cores that the workers are bound to, in order; workers without one are not bound.
    #[serde(default)]
    pub cores: Vec<usize>,
    /// The host's interface and the wire have a queue for each worker, and registers (an indirection table) that say which frame
    /// goes to which queue. Without them the first worker receives all frames and forwards those of the others.
    #[serde(default)]
    pub card: bool,
    /// One thread, the copy engine, writes the frames of all workers to the kernel, in turn; else each worker writes its own. The
    /// engine's core is the one after the workers' in `cores`, if there is one. Not used beside the kernel, where there is one
    /// worker.
    #[serde(default)]
    pub copy_engine: bool,
    /// Microseconds for which a worker polls without work before it sleeps.
    pub spin: u64,
    /// The wire accepts frames of up to 64 KB.
    pub segmentation: bool,
    /// The offloads for the kernel's own connections. Not used beside the kernel, where their frames do not pass through the NIC.
    #[serde(default)]
    pub offloads: Offloads,
    /// Frames that arrive during a move are dropped instead of kept for the connection's next owner.
    #[serde(default)]
    pub drop_during_moves: bool,
    /// The NIC receives and sends on the kernel's own network devices, instead of standing between the kernel and the wire.
    #[serde(default)]
    pub beside: bool,
    /// The emulated link.
    pub link: LinkSettings,
    /// Key of the hashes of lookup tables; random.
    pub hash_key: [u64; 4],
}

impl NicSettings {
    /// Number of descriptors for a card with several queues: its registers, then, for each worker but the first, a queue of the
    /// host's interface and one of the wire's.
    pub fn card_descriptors(&self) -> usize {
        if self.card { 1 + 2 * (self.workers - 1) } else { 0 }
    }

    /// A random key for receive-side scaling, derived from the lookup's key.
    pub(crate) fn random_key(&self) -> Key {
        let mut key = [0; baton_rss::KEY_BYTES];
        for (at, bytes) in key.chunks_mut(8).enumerate() {
            // splitmix64, so that neither key reveals the other.
            let mut word = self.hash_key[at % 4].wrapping_add((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.copy_from_slice(&(word ^ word >> 31).to_le_bytes());
        }
        Key(key)
    }
}
