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

/// Slots that make a listener worth being served.
const FEW: usize = 16;

/// How many of those that are `left` of `all` a listener may have that has some (`has`) and has room for so many more.
/// One that would only get a few gets none: the kernel serves its clients then, whom the NIC would keep waiting.
pub fn of(left: usize, has: usize, room: usize, all: usize) -> usize {
    if has == 0 && left < room.min(FEW).min(all / 4) { 0 } else { left }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_gets_enough_or_none() {
        let of = |left, has, room| of(left, has, room, 4096);
        assert_eq!((of(15, 0, 128), of(16, 0, 128), of(1, 3, 128)), (0, 16, 1));
        assert_eq!((of(2, 0, 2), of(1, 0, 2)), (2, 0), "a short queue needs few");
        assert_eq!(super::of(1, 0, 128, 4), 1, "and so does a small NIC");
    }
}
