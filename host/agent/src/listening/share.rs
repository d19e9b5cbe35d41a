//! What listeners may have together.

use std::collections::BTreeMap;

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

/// The numbers of up to `most` entries for which `of` is true, in turn: those from `from` on, then those before it. And
/// where the next turn begins.
pub fn turn<T>(entries: &BTreeMap<u32, T>, from: u32, most: usize, of: impl Fn(&T) -> bool) -> (Vec<u32>, u32) {
    let in_turn = entries.range(from..).chain(entries.range(..from)).filter(|(_, entry)| of(entry));
    let turn: Vec<u32> = in_turn.take(most).map(|(number, _)| *number).collect();
    let next = turn.last().map_or(0, |last| last.wrapping_add(1));
    (turn, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_turn() {
        let entries = BTreeMap::from([1, 4, 5, u32::MAX].map(|number| (number, number)));
        let all = |from, most| turn(&entries, from, most, |_| true);
        assert_eq!(all(0, 3), (vec![1, 4, 5], 6));
        assert_eq!(all(6, 3), (vec![u32::MAX, 1, 4], 5));
        assert_eq!(all(5, 9), (vec![5, u32::MAX, 1, 4], 5), "each once");
        assert_eq!(all(5, 2), (vec![5, u32::MAX], 0));
        assert_eq!(turn(&entries, 5, 2, |number| *number < 5), (vec![1, 4], 5), "only these");
        assert_eq!(turn(&BTreeMap::<u32, u32>::new(), 7, 3, |_| true), (vec![], 0));
    }

    #[test]
    fn a_listener_gets_enough_or_none() {
        let of = |left, has, room| of(left, has, room, 4096);
        assert_eq!((of(15, 0, 128), of(16, 0, 128), of(1, 3, 128)), (0, 16, 1));
        assert_eq!((of(2, 0, 2), of(1, 0, 2)), (2, 0), "a short queue needs few");
        assert_eq!(super::of(1, 0, 128, 4), 1, "and so does a small NIC");
    }
}
