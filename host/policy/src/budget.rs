//! How many moves may be made for the sake of a better placement.

/// Moves a second while few connections are in the wrong place, and while many are: a load has changed.
const STEADY: u64 = 40;
const SHIFT: u64 = 160;

/// Moves that may be made now.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    /// In millionths of a move.
    saved: u64,
    /// When it was looked at last, in microseconds.
    looked: u64,
}

impl Budget {
    /// The moves that may be made at `now`. `many`: many connections are in the wrong place.
    pub fn moves(&mut self, now: u64, many: bool) -> usize {
        let rate = if many { SHIFT } else { STEADY };
        let earned = now.saturating_sub(self.looked).saturating_mul(rate);
        self.looked = now;
        // What is saved is that of a second at most.
        self.saved = self.saved.saturating_add(earned).min(rate * 1_000_000);
        (self.saved / 1_000_000) as usize
    }

    /// Notes that so many were made.
    pub fn spend(&mut self, moves: usize) {
        self.saved = self.saved.saturating_sub(moves as u64 * 1_000_000);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_a_second_are_bounded() {
        for (many, most) in [(false, STEADY), (true, SHIFT)] {
            let (mut budget, mut made) = (Budget::default(), 0);
            budget.moves(0, many);
            for now in (0..10_000_000).step_by(100_000) {
                let moves = budget.moves(now, many);
                budget.spend(moves);
                made += moves as u64;
            }
            assert!(made > 9 * most && made <= 10 * most, "{made}");
        }
    }

    #[test]
    fn what_is_not_used_is_not_saved_for_long() {
        let mut budget = Budget::default();
        assert_eq!(budget.moves(3_600_000_000, false), STEADY as usize);
    }
}
