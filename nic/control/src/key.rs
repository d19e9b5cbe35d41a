//! The Toeplitz key of receive-side scaling, if none is configured.

use baton_protocol::nic::NicSettings;
use baton_rss::{KEY_BYTES, Key};

/// A key that others cannot guess, derived from the lookup's key without revealing that (splitmix64).
pub(crate) fn random(settings: &NicSettings) -> Key {
    let mut key = [0; KEY_BYTES];
    for (at, bytes) in key.chunks_mut(8).enumerate() {
        let mut word = settings.hash_key[at % 4].wrapping_add((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.copy_from_slice(&(word ^ word >> 31).to_le_bytes());
    }
    Key(key)
}
