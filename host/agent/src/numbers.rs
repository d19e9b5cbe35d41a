//! Numbers that programs name in their requests: of listeners and UDP sockets.
//!
//! A request may reach another agent than the one that has given its number: a program repeats what a dead agent has
//! not answered, and a thread of a program may still wait for its turn to ask. The number must then name what it named,
//! or nothing.

use baton_linux::process;
use std::collections::BTreeMap;

const MOST: u32 = i32::MAX as u32;

/// Gives numbers, from a random one on, so that the next agent does not give those that this one has given.
#[derive(Debug)]
pub(crate) struct Numbers {
    last: u32,
}

impl Numbers {
    pub fn new() -> Numbers {
        let mut last = [0; 4];
        // If the system has no random numbers, they begin at 1.
        let _ = process::random(&mut last);
        Numbers { last: u32::from_ne_bytes(last) }
    }

    /// The next number, which is neither 0 nor used.
    pub fn next(&mut self, is_used: impl Fn(u32) -> bool) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1) & MOST;
            if self.last != 0 && !is_used(self.last) {
                return self.last;
            }
        }
    }
}

/// The numbers of up to `most` entries for which `of` is true, in turn: those from `from` on, then those before it. And
/// where the next turn begins.
pub(crate) fn turn<T>(entries: &BTreeMap<u32, T>, from: u32, most: usize, of: impl Fn(&T) -> bool) -> (Vec<u32>, u32) {
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

    /// What another agent has given is given again only by chance: once in ten million runs of this test.
    #[test]
    fn agents_give_different_numbers() {
        let of_an_agent = || -> [u32; 100] {
            let mut numbers = Numbers::new();
            std::array::from_fn(|_| numbers.next(|_| false))
        };
        let (one, other) = (of_an_agent(), of_an_agent());
        assert!(one.iter().all(|number| !other.contains(number)), "{one:?} and {other:?}");
    }

    #[test]
    fn zero_and_used_numbers_are_left_out() {
        let mut numbers = Numbers { last: MOST - 2 };
        assert_eq!([(); 3].map(|()| numbers.next(|number| [MOST, 2].contains(&number))), [MOST - 1, 1, 3]);
    }
}
