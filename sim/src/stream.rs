//! A byte stream whose content is a function of position, so that any piece of it can be made and checked without
//! storing it.

/// The byte at `position` of the stream named `key`.
#[inline]
pub fn byte(key: u64, position: u64) -> u8 {
    let word = (position >> 3).wrapping_add(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (((word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)) >> (8 * (position & 7))) as u8
}

/// Fills `out` with the stream from `position` on.
pub fn fill(key: u64, position: u64, out: &mut [u8]) {
    for (at, slot) in out.iter_mut().enumerate() {
        *slot = byte(key, position + at as u64);
    }
}

/// How many bytes of `data` are not the stream's from `position` on.
pub fn mismatches(key: u64, position: u64, data: &[u8]) -> u64 {
    data.iter().enumerate().filter(|(at, value)| **value != byte(key, position + *at as u64)).count() as u64
}
