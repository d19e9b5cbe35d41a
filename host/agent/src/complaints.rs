//! Lines of the log that clients can cause at will: few of them, and none again and again.

/// Shortest time between two lines, and before the same line is repeated, in microseconds.
const BETWEEN: u64 = 1_000_000;
const SAME: u64 = 600_000_000;
/// Number of lines that are remembered. Of more, the oldest may be repeated sooner.
const REMEMBERED: usize = 32;

/// The lines that were logged last, and when, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Complaints {
    logged: Vec<(u64, String)>,
}

impl Complaints {
    /// Whether `line` is to be logged at `now`, a time in microseconds. If so, it counts as logged.
    pub fn admit(&mut self, line: &str, now: u64) -> bool {
        let is_recent = |at: u64, within: u64| now.saturating_sub(at) < within;
        if self.logged.last().is_some_and(|&(at, _)| is_recent(at, BETWEEN))
            || self.logged.iter().any(|(at, logged)| is_recent(*at, SAME) && logged == line)
        {
            return false;
        }
        self.logged.retain(|(_, logged)| logged != line);
        if self.logged.len() == REMEMBERED {
            self.logged.remove(0);
        }
        self.logged.push((now, line.to_owned()));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_not_repeated_for_ten_minutes() {
        let mut complaints = Complaints::default();
        assert!(complaints.admit("a", 5));
        assert!(!complaints.admit("a", 5 + BETWEEN));
        assert!(complaints.admit("b", 5 + BETWEEN), "another line");
        assert!(!complaints.admit("c", 6 + BETWEEN), "too soon");
        assert!(!complaints.admit("a", 4 + SAME) && complaints.admit("a", 5 + SAME));
    }

    #[test]
    fn a_flood_of_lines_is_bounded() {
        let mut complaints = Complaints::default();
        let logged = (0..1_000_000).filter(|number| complaints.admit(&number.to_string(), number * 100)).count();
        assert_eq!((logged, complaints.logged.len()), (100, REMEMBERED));
    }
}
