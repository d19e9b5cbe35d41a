//! Limits the lines that one call site writes: the first lines of a period are written, and then a line with the count
//! of the lines left out. While lines are left out in one period after another, the periods get longer.

use crate::level::Level;
use std::collections::BTreeMap;

/// Lines of a call site that are written in a period.
const MOST: u32 = 10;
/// The shortest and the longest period, in microseconds. A period that follows one in which lines were left out is
/// twice as long as that one.
const SHORTEST: u64 = 10_000_000;
const LONGEST: u64 = 600_000_000;
/// Characters of a line that are kept, to be shown with the count of lines left out.
const KEPT: usize = 300;

/// A call site: the file and the line in the source that write a log line. The state for each call site is bounded, and
/// so is the number of call sites.
pub(crate) type Site = (&'static str, u32);

/// Lines of a call site that were left out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LeftOut {
    pub site: Site,
    pub level: Level,
    pub count: u64,
    /// The last line that was written.
    pub like: String,
}

/// A period of a call site.
#[derive(Default, Debug)]
struct Period {
    ends: u64,
    length: u64,
    written: u32,
    left_out: u64,
    /// Of the last line that was written, in this period or an earlier one.
    level: Level,
    last: String,
}

impl Period {
    fn begin(&mut self, now: u64, length: u64) {
        (self.ends, self.length) = (now.saturating_add(length), length);
        (self.written, self.left_out) = (0, 0);
    }
}

/// How many lines were written and left out, by call site.
#[derive(Debug)]
pub(crate) struct Limiter {
    periods: BTreeMap<Site, Period>,
    next: u64,
}

impl Limiter {
    pub fn new() -> Limiter {
        Limiter { periods: BTreeMap::new(), next: u64::MAX }
    }

    /// When the first period ends that has left lines out, microseconds; `u64::MAX` if none has.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether a line of a call site may be written at `now`, microseconds. The line is counted as written or left out
    /// accordingly. The caller must have taken the counts of ended periods before.
    pub fn admits(&mut self, site: Site, now: u64) -> bool {
        let period = self.periods.entry(site).or_default();
        if now >= period.ends && period.left_out == 0 {
            period.begin(now, SHORTEST);
        }
        if period.written < MOST {
            period.written += 1;
            return true;
        }
        period.left_out += 1;
        self.next = self.next.min(period.ends);
        false
    }

    /// Keeps the text of a line that was admitted, to be shown with a later count.
    pub fn remember(&mut self, site: Site, level: Level, line: &str) {
        if let Some(period) = self.periods.get_mut(&site) {
            period.level = level;
            period.last.clear();
            period.last.extend(line.chars().take(KEPT));
        }
    }

    /// Takes the counts of the periods that have ended at `now`.
    pub fn take(&mut self, now: u64) -> Vec<LeftOut> {
        if now < self.next {
            return Vec::new();
        }
        self.next = u64::MAX;
        let mut taken = Vec::new();
        for (site, period) in &mut self.periods {
            if period.left_out == 0 {
                continue;
            }
            if now < period.ends {
                self.next = self.next.min(period.ends);
                continue;
            }
            taken.push(LeftOut { site: *site, level: period.level, count: period.left_out, like: period.last.clone() });
            period.begin(now, (2 * period.length).min(LONGEST));
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Site = ("here.rs", 1);
    const THERE: Site = ("here.rs", 2);

    /// Logs a line as a process does. Returns whether the line is written, and the counts that are due before it.
    fn log(limiter: &mut Limiter, site: Site, now: u64) -> (bool, Vec<LeftOut>) {
        let counted = limiter.take(now);
        let written = limiter.admits(site, now);
        if written {
            limiter.remember(site, Level::Warning, &format!("line at {now}"));
        }
        (written, counted)
    }

    #[test]
    fn the_first_lines_of_a_period_are_written_and_the_others_counted() {
        let mut limiter = Limiter::new();
        let written = (0..25).filter(|number| log(&mut limiter, HERE, 100 + number).0).count();
        assert_eq!((written, limiter.next()), (10, 100 + SHORTEST));
        assert!(log(&mut limiter, THERE, 200).0, "another call site");
        assert!(limiter.take(99 + SHORTEST).is_empty());
        let counted = LeftOut { site: HERE, level: Level::Warning, count: 15, like: "line at 109".into() };
        let (written, first) = log(&mut limiter, HERE, 100 + SHORTEST);
        assert_eq!((written, first), (true, vec![counted]));
        assert!(limiter.next() == u64::MAX && limiter.take(u64::MAX).is_empty());
    }

    /// Every line is written or counted, and the longer a flood lasts, the fewer are written.
    #[test]
    fn a_flood_without_end_is_counted_in_ever_longer_periods() {
        let mut limiter = Limiter::new();
        let (mut written, mut counts) = (0, Vec::new());
        // Ten milliseconds apart: twelve periods, each twice as long as the one before, until they last ten minutes.
        let lines = 400_000;
        for number in 0..lines {
            let (is_written, counted) = log(&mut limiter, HERE, number * 10_000);
            written += u64::from(is_written);
            counts.extend(counted.into_iter().map(|left_out| left_out.count));
        }
        counts.extend(limiter.take(u64::MAX).into_iter().map(|left_out| left_out.count));
        assert_eq!(written + counts.iter().sum::<u64>(), lines);
        assert_eq!(counts[..4], [990, 1_990, 3_990, 7_990]);
        assert_eq!(written, 10 * counts.len() as u64);
        assert_eq!(counts.len(), 12, "{counts:?}");
    }

    /// After a period without a flood the periods are short again.
    #[test]
    fn after_a_quiet_period_the_shortest_one_begins() {
        let mut limiter = Limiter::new();
        (0..11).for_each(|_| _ = log(&mut limiter, HERE, 0));
        assert_eq!(log(&mut limiter, HERE, SHORTEST).1.len(), 1);
        let later = SHORTEST + 2 * SHORTEST;
        let written = (0..11).filter(|_| log(&mut limiter, HERE, later).0).count();
        assert_eq!((written, limiter.next()), (10, later + SHORTEST));
    }

    #[test]
    fn what_is_kept_of_a_call_site_is_bounded() {
        let mut limiter = Limiter::new();
        (0..11).for_each(|_| _ = limiter.admits(HERE, 0));
        limiter.remember(HERE, Level::Error, &"ö".repeat(100_000));
        let counted = limiter.take(SHORTEST);
        assert_eq!((counted.len(), counted[0].count, counted[0].like.chars().count()), (1, 1, KEPT));
    }
}
