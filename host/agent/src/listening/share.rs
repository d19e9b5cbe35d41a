//! What listeners may have together.

/// Most listeners of a session on the NIC: each takes two of the agent's descriptors.
pub const MAX_LISTENERS: usize = 1024;

/// How many more slots of each NIC, which has so many, listeners may have: together a quarter, since moves need some,
/// too. `taken` yields the NIC of each that they have.
pub fn left(nics: usize, slots: usize, taken: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut left = vec![slots.div_ceil(4); nics];
    for nic in taken {
        left.get_mut(nic).into_iter().for_each(|left| *left = left.saturating_sub(1));
    }
    left
}
