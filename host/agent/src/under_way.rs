//! Moves that have begun and wait for something, in the order in which they are looked at.

use std::collections::VecDeque;
use std::time::Duration;

/// Time between two looks at a move that is held up, in microseconds: its program may be stopped, or never say that it
/// has left.
const SELDOM: u64 = 10_000;

/// Names a connection: session, number, and serial number, since session and number are reused.
type Key = (u32, u32, u64);

/// Moves that wait, each in one of two queues.
#[derive(Default)]
pub(crate) struct UnderWay {
    /// Those that go on soon.
    moves: VecDeque<Key>,
    /// Those that are held up by their programs, each with the time of the next look, in microseconds of the monotonic
    /// clock.
    held_up: VecDeque<(u64, Key)>,
    /// The next look is at one of those, if one is due.
    turns: bool,
    /// How many of each queue are to be looked at in this round still: those that were there, and due, when it began.
    left: usize,
    left_held_up: usize,
}

impl UnderWay {
    /// Adds a move that has been looked at now.
    pub fn add(&mut self, key: Key, is_held_up: bool, now: u64) {
        if is_held_up {
            self.held_up.push_back((now + SELDOM, key));
        } else {
            self.moves.push_back(key);
        }
    }

    /// Begins a round, in which each move that is to be looked at now is looked at once. One that is added again during
    /// the round waits for the next, however many others are looked at meanwhile.
    pub fn begin_round(&mut self, now: u64) {
        self.left = self.moves.len();
        self.left_held_up = self.held_up.iter().take_while(|(due, _)| *due <= now).count();
    }

    /// Takes the next move that is to be looked at in this round: from both queues in turn, so that however many are
    /// held up, they do not hold up others.
    pub fn take(&mut self) -> Option<Key> {
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

    /// Time until a move that is held up is looked at.
    pub fn wait(&self, now: u64) -> Option<Duration> {
        self.held_up.front().map(|(due, _)| Duration::from_micros(due.saturating_sub(now)))
    }

    /// All of them.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.moves.iter().copied().chain(self.held_up.iter().map(|(_, key)| *key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_up_is_looked_at_seldom_and_in_turn_with_others() {
        let mut under_way = UnderWay::default();
        for serial in 0..3 {
            under_way.add((1, 1, serial), true, serial);
            under_way.add((2, 2, serial), false, serial);
        }
        assert_eq!(under_way.count(), 3);
        assert_eq!(under_way.wait(1_000), Some(Duration::from_micros(SELDOM - 1_000)));
        under_way.begin_round(3);
        assert_eq!([(); 3].map(|()| under_way.take()), [0, 1, 2].map(|serial| Some((2, 2, serial))));
        assert_eq!((under_way.take(), under_way.count()), (None, 0));
        (0..3).for_each(|serial| under_way.add((2, 2, serial), false, 3));
        // The third one is not due yet.
        under_way.begin_round(SELDOM + 1);
        let taken: Vec<u32> = std::iter::from_fn(|| under_way.take()).map(|(session, ..)| session).collect();
        assert_eq!(taken, [1, 2, 1, 2, 2]);
        assert_eq!(under_way.keys().collect::<Vec<_>>(), [(1, 1, 2)]);
    }

    /// A thousand moves that are held up do not make the one beside them be looked at hundreds of times in a round.
    #[test]
    fn each_move_is_looked_at_once_in_a_round() {
        let mut under_way = UnderWay::default();
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
