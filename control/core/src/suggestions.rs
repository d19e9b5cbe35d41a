//! Moves to the NIC that programs have suggested. They are made when the agent is idle, or when they have waited for a
//! long time.

use alloc::collections::VecDeque;

/// Microseconds without a request after which suggested moves are made, and age from which they are made regardless.
const IDLE: u64 = 200;
const OVERDUE: u64 = 10_000;

/// Suggested moves, by keys of their connections, the oldest first.
#[derive(Default, Debug)]
pub struct Suggestions<K> {
    /// Each with the time of its suggestion.
    queue: VecDeque<(K, u64)>,
    /// Time of the last request.
    requested: u64,
}

impl<K> Suggestions<K> {
    /// A program has suggested a move.
    pub fn add(&mut self, key: K, now: u64) {
        self.queue.push_back((key, now));
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// A request has come, which is served before suggestions.
    pub fn note_request(&mut self, now: u64) {
        self.requested = now;
    }

    /// Takes the next move to make at `now`, in a round that began at `begun`. While requests keep coming, that is one
    /// overdue move per round.
    pub fn take(&mut self, begun: u64, now: u64) -> Option<K> {
        let (_, since) = self.queue.front()?;
        let idle = now.saturating_sub(self.requested) >= IDLE;
        let overdue = now == begun && now.saturating_sub(*since) >= OVERDUE;
        if idle || overdue { self.queue.pop_front().map(|(key, _)| key) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestions_wait_for_a_pause_between_requests() {
        let mut suggestions = Suggestions::default();
        suggestions.note_request(1_000);
        [7, 8].into_iter().for_each(|key| suggestions.add(key, 1_000));
        assert_eq!(suggestions.take(1_000 + IDLE - 1, 1_000 + IDLE - 1), None);
        suggestions.note_request(1_100);
        assert_eq!(suggestions.take(1_000 + IDLE, 1_000 + IDLE), None, "another request has come");
        let now = 1_100 + IDLE;
        assert_eq!([suggestions.take(now, now), suggestions.take(now, now + 5)], [Some(7), Some(8)]);
        assert!(suggestions.take(now, now).is_none() && suggestions.is_empty());
    }

    /// Each suggested move is made in the end, however many requests come.
    #[test]
    fn an_overdue_suggestion_is_made_in_each_round() {
        let mut suggestions = Suggestions::default();
        (0..3).for_each(|key| suggestions.add(key, 0));
        for (round, key) in (1..).zip(0..3) {
            let now = round * OVERDUE;
            suggestions.note_request(now);
            assert_eq!(suggestions.take(now, now), Some(key));
            assert_eq!(suggestions.take(now, now + 1), None, "requests come first");
        }
    }
}
