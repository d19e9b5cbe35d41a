//! The agent's limit of processor time for moves at random.

/// The agent may use one part in this many of a processor for moves at random. It runs before programs, which need the
/// rest.
const PART: u64 = 5;

/// Most microseconds of processor time that it may save up while it is idle.
const MOST_SAVED: i64 = 5_000;

/// The agent's share of a processor for moves at random. Its other work is counted, too, but never put off.
#[derive(Default, Debug)]
pub struct Share {
    /// Microseconds of processor time that are left; negative if too many were used.
    saved: i64,
    /// The last check: time, and processor time used by then, in microseconds.
    looked: (u64, u64),
}

impl Share {
    /// Returns for how many microseconds no move at random may begin, at a time `now` by which `used` microseconds of
    /// processor time were used.
    pub fn wait(&mut self, now: u64, used: u64) -> u64 {
        let (then, before) = core::mem::replace(&mut self.looked, (now, used));
        let earned = (now.saturating_sub(then) / PART) as i64;
        self.saved = self.saved.saturating_add(earned).saturating_sub(used.saturating_sub(before) as i64).min(MOST_SAVED);
        self.left()
    }

    /// As [`Share::wait`], as of the last check.
    pub fn left(&self) -> u64 {
        self.saved.min(0).unsigned_abs() * PART
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_at_random_leave_programs_most_of_a_processor() {
        let mut share = Share::default();
        assert_eq!(share.wait(1_000_000, 0), 0, "it has saved some");
        // Moves of a millisecond each, one after another, whenever one may begin.
        let (mut now, mut used, mut made) = (1_000_000, 0, 0);
        while now < 3_000_000 {
            match share.wait(now, used) {
                0 => (now, used, made) = (now + 1_000, used + 1_000, made + 1),
                wait => now += wait.min(1_000),
            }
        }
        assert!((380..=410).contains(&made), "{made} moves of a millisecond in two seconds, of which it may have a fifth");
    }

    #[test]
    fn what_was_not_used_is_not_saved_for_ever() {
        let mut share = Share::default();
        share.wait(0, 0);
        assert_eq!(share.wait(3_600_000_000, 0), 0);
        assert!(share.wait(3_600_006_000, 6_000 + 1_200) > 0);
    }
}
