//! How soon a program is bothered again that was inside an operation for too long.

/// Microseconds for which moves are put off after a first time-out; twice as long after the next one, and so on.
const FIRST: u64 = 20_000;
const MOST_DOUBLINGS: u32 = 9;

/// Time-outs of one connection's program in a row.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Backoff {
    times: u32,
    until: u64,
}

impl Backoff {
    /// Notes a time-out. While moves are put off already it changes nothing.
    pub fn extend(&mut self, now: u64) {
        if !self.is_on(now) {
            self.until = now + (FIRST << self.times);
            self.times = (self.times + 1).min(MOST_DOUBLINGS);
        }
    }

    /// A move has been made.
    pub fn clear(&mut self) {
        *self = Backoff::default();
    }

    /// Whether no move is to be begun now.
    pub fn is_on(&self, now: u64) -> bool {
        self.rest(now) > 0
    }

    /// For how many microseconds more no move is to be begun.
    pub fn rest(&self, now: u64) -> u64 {
        self.until.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_to_a_limit_and_ends_with_a_move() {
        let (mut backoff, mut now) = (Backoff::default(), 0);
        let mut pauses = alloc::vec::Vec::new();
        for _ in 0..12 {
            backoff.extend(now);
            backoff.extend(now);
            let begun = now;
            while backoff.is_on(now) {
                now += FIRST;
            }
            pauses.push((now - begun) / FIRST);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512]);
        backoff.clear();
        assert!(!backoff.is_on(now));
    }
}
