//! What a long measurement is doing, on standard error.

use baton_linux::events::monotonic_micros;
use std::cell::Cell;
use std::fmt::Display;
use std::io::{IsTerminal, stderr};

/// Least microseconds between two lines where none can be replaced.
const PAUSE: u64 = 10_000_000;
/// Microseconds in which a count is not shown again.
const MOMENT: u64 = 100_000;

/// A line that says what is being measured and how far it is. On a terminal the next one replaces it, and it is removed
/// at the end. Elsewhere it is a line of its own, at most every ten seconds.
pub struct StatusLine {
    live: bool,
    /// When a line was shown last, in microseconds; None before the first, and after one was removed.
    shown: Cell<Option<u64>>,
}

impl StatusLine {
    /// Shows nothing yet.
    pub fn new() -> StatusLine {
        StatusLine { live: stderr().is_terminal(), shown: Cell::new(None) }
    }

    /// Shows a line, which should be shorter than a terminal is wide.
    pub fn show(&self, line: impl Display) {
        if let Some(text) = self.text(line, monotonic_micros()) {
            eprint!("{text}");
        }
    }

    /// As [`StatusLine::show`], for a count that rises often: nothing if a line was shown a moment ago.
    pub fn update(&self, line: impl Display) {
        if self.shown.get().is_none_or(|shown| monotonic_micros() - shown >= MOMENT) {
            self.show(line);
        }
    }

    /// What is written at `now` to show a line, if anything is.
    fn text(&self, line: impl Display, now: u64) -> Option<String> {
        let text = match self.live {
            true => format!("\r{line}\x1b[K"),
            false if self.shown.get().is_none_or(|shown| now - shown >= PAUSE) => format!("{line}\n"),
            false => return None,
        };
        self.shown.set(Some(now));
        Some(text)
    }

    /// Removes the line, so that something else can be printed.
    pub fn clear(&self) {
        if self.live && self.shown.take().is_some() {
            eprint!("\r\x1b[K");
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_replaced_on_a_terminal_and_few_elsewhere() {
        let shown = |live, times: [u64; 4]| {
            let status = StatusLine { live, shown: Cell::new(None) };
            let text: String = times.into_iter().filter_map(|now| status.text(now, now)).collect();
            // What the test would remove itself at the end.
            status.shown.set(None);
            text
        };
        let times = [5, 6, PAUSE + 4, PAUSE + 5];
        assert_eq!(shown(true, times), "\r5\x1b[K\r6\x1b[K\r10000004\x1b[K\r10000005\x1b[K");
        assert_eq!(shown(false, times), "5\n10000005\n");
    }
}
