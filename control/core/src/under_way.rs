//! Moves that have begun and are waiting, in the order in which they are checked.

use alloc::collections::VecDeque;

/// Time between two checks of a move that will continue soon, in microseconds.
pub const LOOK: u64 = 100;

/// Time between two checks of a move that is held up, in microseconds: its program may be stopped, or never leave its
/// operation.
const SELDOM: u64 = 10_000;

/// Moves that wait, by keys of their connections that are never reused, each in one of two queues.
#[derive(Default, Debug)]
pub struct UnderWay<K> {
    /// Moves that will continue soon.
    moves: VecDeque<K>,
    /// Moves that are held up by their programs, each with the time of its next check.
    held_up: VecDeque<(u64, K)>,
    /// Whether the next check is of a held-up move, if one is due.
    turns: bool,
    /// How many moves of each queue are still to be checked in this round: those that were there, and due, when it
    /// began.
    left: usize,
    left_held_up: usize,
}

impl<K: Copy> UnderWay<K> {
    /// Adds a move that was just checked.
    pub fn add(&mut self, key: K, is_held_up: bool, now: u64) {
        if is_held_up {
            self.held_up.push_back((now + SELDOM, key));
        } else {
            self.moves.push_back(key);
        }
    }

    /// Begins a round, in which each move that is due is checked once. A move that is added again during the round
    /// waits for the next one.
    pub fn begin_round(&mut self, now: u64) {
        if cfg!(feature = "sabotage-lose-move") {
            self.moves.pop_back();
        }
        self.left = self.moves.len();
        self.left_held_up = self.held_up.iter().take_while(|(due, _)| *due <= now).count();
    }

    /// Takes the next move to check in this round, from both queues in turn, so that many held-up moves do not delay
    /// the others.
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

    /// When the next held-up move is checked.
    pub fn due(&self) -> Option<u64> {
        self.held_up.front().map(|(due, _)| *due)
    }

    /// Moves that will continue soon.
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

    /// Beside a thousand held-up moves another move is still checked only once per round.
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
