//! When a connection that is wanted on the NIC is tried there again.

/// Microseconds until the first try after a refusal; twice as long until the next one, and so on.
pub const FIRST_RETRY: u64 = 20_000;
/// Most microseconds between two tries.
pub const LONGEST_RETRY: u64 = 60_000_000;

/// The tries of one connection. Few bytes, since there may be very many connections.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Retry {
    /// When the next one is due; 0 if none is.
    due: u64,
    /// Refusals in a row.
    refused: u8,
}

impl Retry {
    /// Whether a try is to come.
    pub fn is_planned(&self) -> bool {
        self.due != 0
    }

    /// Whether no try is due, and the last one was not refused.
    pub fn is_clear(&self) -> bool {
        *self == Retry::default()
    }

    /// The connection is where it is wanted.
    pub fn clear(&mut self) {
        *self = Retry::default();
    }

    /// Notes a refusal, and returns the microseconds until the next try, at most `longest`.
    pub fn refused(&mut self, longest: u64) -> u64 {
        let wait = FIRST_RETRY.checked_shl(self.refused.into()).unwrap_or(u64::MAX).min(longest).min(LONGEST_RETRY);
        self.refused = self.refused.saturating_add(1).min(32);
        wait
    }

    /// Notes that a try is due at this time. False if an earlier one is due anyway.
    pub fn plan(&mut self, at: u64) -> bool {
        let earlier = self.due == 0 || at < self.due;
        if earlier {
            self.due = at.max(1);
        }
        earlier
    }

    /// Takes the try that was planned for this time. False if it was replaced by an earlier one, or is of no use any
    /// more.
    pub fn take(&mut self, at: u64) -> bool {
        let planned = self.due == at.max(1);
        if planned {
            self.due = 0;
        }
        planned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_a_minute_and_begins_anew_once_the_connection_is_there() {
        let mut retry = Retry::default();
        let waits: [u64; 14] = core::array::from_fn(|_| retry.refused(u64::MAX) / 1000);
        assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10_240, 20_480, 40_960, 60_000, 60_000]);
        (0..300).for_each(|_| assert_eq!(retry.refused(u64::MAX), LONGEST_RETRY));
        assert_eq!(retry.refused(1_000_000), 1_000_000, "a cause that may pass at any moment");
        retry.clear();
        assert_eq!(retry.refused(u64::MAX), FIRST_RETRY);
    }

    #[test]
    fn of_several_tries_the_earliest_takes_place() {
        let mut retry = Retry::default();
        assert!(retry.plan(500) && !retry.plan(700) && retry.plan(300));
        assert!(!retry.take(500), "it was replaced");
        assert!(retry.take(300) && !retry.take(300) && retry.is_clear());
    }
}
