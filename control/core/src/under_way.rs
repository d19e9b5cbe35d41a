//! Moves that have begun and wait for something, in the order in which they are looked at.

use alloc::collections::VecDeque;

/// Time between two looks at a move that goes on soon, in microseconds.
pub const LOOK: u64 = 100;

/// Time between two looks at a move that is held up, in microseconds: its program may be stopped, or never say that it
/// has left.
const SELDOM: u64 = 10_000;

/// Moves that wait, by names of their connections that are never used twice, each in one of two queues.
#[derive(Default, Debug)]
pub struct UnderWay<K> {
    /// Those that go on soon.
    moves: VecDeque<K>,
    /// Those that are held up by their programs, each with the time of the next look.
    held_up: VecDeque<(u64, K)>,
    /// The next look is at one of those, if one is due.
    turns: bool,
    /// How many of each queue are to be looked at in this round still: those that were there, and due, when it began.
    left: usize,
    left_held_up: usize,
}

impl<K: Copy> UnderWay<K> {
    /// Adds a move that has been looked at now.
    pub fn add(&mut self, key: K, is_held_up: bool, now: u64) {
        if is_held_up {
            self.held_up.push_back((now + SELDOM, key));
        } else {
            self.moves.push_back(key);
        }
    }

    /// Begins a round, in which each move that is to be looked at now is looked at once. One that is added again during
    /// the round waits for the next, however many others are looked at meanwhile.
    pub fn begin_round(&mut self, now: u64) {
        if cfg!(feature = "sabotage-lose-move") {
            self.moves.pop_back();
        }
        self.left = self.moves.len();
        self.left_held_up = self.held_up.iter().take_while(|(due, _)| *due <= now).count();
    }

    /// Takes the next move that is to be looked at in this round: from both queues in turn, so that however many are
    /// held up, they do not hold up others.
    pub fn take(&mut self) -> Option<K> {
        self.turns = !self.turns;
        if self.left_held_up > 0 && (self.turns || self.left == 0) {
            self.left_held_up -= 1;
            return self.held_up.pop_front().map(|(_, key)| key);
        }
        self.left = self.left.checked_sub(1)?;
        self.moves.pop_front()
    }

    /// Number of moves that go on soon.
    pub fn count(&self) -> usize {
        self.moves.len()
    }

    /// When a move that is held up is looked at next.
    pub fn due(&self) -> Option<u64> {
        self.held_up.front().map(|(due, _)| *due)
    }

    /// Those that go on soon.
    pub fn soon(&self) -> impl Iterator<Item = K> {
        self.moves.iter().copied()
    }

    /// All of them.
    pub fn keys(&self) -> impl Iterator<Item = K> {
        self.soon().chain(self.held_up.iter().map(|(_, key)| *key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    type Key = (u32, u32, u64);

    #[test]
    fn what_is_held_up_is_looked_at_seldom_and_in_turn_with_others() {
        let mut under_way = UnderWay::<Key>::default();
        for serial in 0..3 {
            under_way.add((1, 1, serial), true, serial);
            under_way.add((2, 2, serial), false, serial);
        }
        assert_eq!(under_way.count(), 3);
        assert_eq!(under_way.due(), Some(SELDOM));
        under_way.begin_round(3);
        assert_eq!([(); 3].map(|()| under_way.take()), [0, 1, 2].map(|serial| Some((2, 2, serial))));
        assert_eq!((under_way.take(), under_way.count()), (None, 0));
        (0..3).for_each(|serial| under_way.add((2, 2, serial), false, 3));
        // The third one is not due yet.
        under_way.begin_round(SELDOM + 1);
        let taken: Vec<u32> = core::iter::from_fn(|| under_way.take()).map(|(session, ..)| session).collect();
        assert_eq!(taken, [1, 2, 1, 2, 2]);
        assert_eq!(under_way.keys().collect::<Vec<_>>(), [(1, 1, 2)]);
    }

    /// A thousand moves that are held up do not make the one beside them be looked at hundreds of times in a round.
    #[test]
    fn each_move_is_looked_at_once_in_a_round() {
        let mut under_way = UnderWay::<Key>::default();
        (0..1000).for_each(|serial| under_way.add((1, 1, serial), true, 0));
        under_way.add((2, 2, 0), false, 0);
        for round in 1..=2 {
            let (now, mut looks) = (round * SELDOM, [0; 2]);
            under_way.begin_round(now);
            while let Some((session, number, serial)) = under_way.take() {
                looks[session as usize - 1] += 1;
                // It waits still.
                under_way.add((session, number, serial), session == 1, now);
            }
            assert_eq!(looks, [1000, 1], "round {round}");
        }
    }
}
