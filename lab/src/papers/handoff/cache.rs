//! A processor's data caches, as Table 1 describes them: which accesses hit where. Least recently used lines are
//! replaced; written lines cost nothing when they leave.

use super::memory::{LINE, Lines};

/// No line is in this place of a set.
const EMPTY: u64 = u64::MAX;

/// Where an access was served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    /// By the first level.
    First,
    /// By the second level.
    Second,
    /// By memory.
    Memory,
}

/// Size of a level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes.
    pub bytes: usize,
    /// Lines of a set.
    pub ways: usize,
}

/// One level: for each set its lines, the most recently used one first.
#[derive(Clone, Debug)]
struct Level {
    lines: Vec<u64>,
    ways: usize,
    sets: u64,
}

impl Level {
    fn new(geometry: Geometry) -> Level {
        let lines = geometry.bytes / LINE as usize;
        Level { lines: vec![EMPTY; lines], ways: geometry.ways, sets: (lines / geometry.ways) as u64 }
    }

    fn set(&mut self, line: u64) -> &mut [u64] {
        let first = (line % self.sets) as usize * self.ways;
        &mut self.lines[first..first + self.ways]
    }

    /// Makes a line the most recently used one of its set. None if it was there; else the least recently used one,
    /// which it has replaced, or [`EMPTY`].
    fn replace(&mut self, line: u64) -> Option<u64> {
        let set = self.set(line);
        // Shifts the more recently used lines behind it by one place; most lines are found in the first.
        let mut before = line;
        for place in set.iter_mut() {
            std::mem::swap(place, &mut before);
            if before == line {
                return None;
            }
        }
        Some(before)
    }

    /// Whether the line is there. It is now the most recently used one of its set.
    fn access(&mut self, line: u64) -> bool {
        self.replace(line).is_none()
    }

    /// Takes a line out. Whether it was there.
    fn remove(&mut self, line: u64) -> bool {
        let set = self.set(line);
        let Some(at) = set.iter().position(|other| *other == line) else { return false };
        set[at..].rotate_left(1);
        *set.last_mut().expect("a set has a line") = EMPTY;
        true
    }
}

/// How two levels work together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Levels {
    /// Each keeps what passes through it.
    Inclusive {
        /// A miss of the second level also fetches the line behind it.
        prefetches: bool,
    },
    /// The second has what the first has given up, and no line is in both.
    Exclusive,
}

/// Two levels of cache before memory.
#[derive(Clone, Debug)]
pub struct Caches {
    first: Level,
    second: Level,
    levels: Levels,
}

impl Caches {
    /// Empty caches.
    pub fn new(first: Geometry, second: Geometry, levels: Levels) -> Caches {
        Caches { first: Level::new(first), second: Level::new(second), levels }
    }

    /// The processor reads or writes a line.
    pub fn access(&mut self, line: u64) -> Served {
        let Some(victim) = self.first.replace(line) else { return Served::First };
        match self.levels {
            Levels::Exclusive => {
                let was_there = self.second.remove(line);
                if victim != EMPTY {
                    self.second.replace(victim);
                }
                if was_there { Served::Second } else { Served::Memory }
            }
            Levels::Inclusive { prefetches } => {
                if self.second.access(line) {
                    return Served::Second;
                }
                if prefetches {
                    self.second.access(line + 1);
                    // The line that was asked for is the more recent one.
                    self.second.access(line);
                }
                Served::Memory
            }
        }
    }

    /// A device writes these lines into memory: the processor's copies of them are void.
    pub fn overwritten(&mut self, lines: Lines) {
        for line in lines {
            self.first.remove(line);
            self.second.remove(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sets of two lines, then two sets of four.
    fn small(prefetches: bool) -> Caches {
        with(Levels::Inclusive { prefetches })
    }

    fn with(levels: Levels) -> Caches {
        Caches::new(Geometry { bytes: 256, ways: 2 }, Geometry { bytes: 512, ways: 4 }, levels)
    }

    fn served(caches: &mut Caches, lines: &[u64]) -> Vec<Served> {
        lines.iter().map(|line| caches.access(*line)).collect()
    }

    #[test]
    fn the_least_recently_used_line_of_a_set_is_replaced() {
        use Served::{First, Memory, Second};
        let mut caches = small(false);
        // Lines 0, 2, 4 fall into the same set of both levels.
        assert_eq!(served(&mut caches, &[0, 2, 0, 4, 0, 2]), [Memory, Memory, First, Memory, First, Second]);
        // Four more lines of the set push line 4 out of the second level, too.
        assert_eq!(served(&mut caches, &[6, 8, 10, 4]), [Memory; 4]);
        // Those of the other set are not touched by it.
        assert_eq!(served(&mut caches, &[1, 3, 1]), [Memory, Memory, First]);
    }

    #[test]
    fn a_miss_fetches_the_next_line_into_the_second_level() {
        use Served::{First, Memory, Second};
        assert_eq!(served(&mut small(true), &[0, 1, 2, 3, 0]), [Memory, Second, Memory, Second, First]);
        assert_eq!(served(&mut small(false), &[0, 1, 2, 3]), [Memory; 4]);
    }

    #[test]
    fn levels_that_exclude_each_other_hold_as_many_lines_as_both() {
        use Served::{First, Memory, Second};
        let mut caches = with(Levels::Exclusive);
        // Six lines of a set: two in the first level, four in the second.
        assert_eq!(served(&mut caches, &[0, 2, 4, 6, 8, 10]), [Memory; 6]);
        assert_eq!(served(&mut caches, &[0, 10, 2, 0]), [Second, First, Second, Second]);
        let mut inclusive = small(false);
        served(&mut inclusive, &[0, 2, 4, 6, 8, 10]);
        assert_eq!(served(&mut inclusive, &[0]), [Memory]);
    }

    #[test]
    fn what_a_device_writes_has_to_be_fetched_again() {
        use Served::{First, Memory};
        let mut caches = small(false);
        assert_eq!(served(&mut caches, &[0, 2, 0]), [Memory, Memory, First]);
        caches.overwritten(Lines::of(0, 64));
        assert_eq!(served(&mut caches, &[2, 0, 2]), [First, Memory, First]);
    }

    /// A working set as large as the second level misses once a line; a larger one, in order, each time.
    #[test]
    fn a_working_set_that_does_not_fit_misses_always() {
        let geometry = (Geometry { bytes: 64 << 10, ways: 2 }, Geometry { bytes: 256 << 10, ways: 16 });
        let misses = |lines: u64| {
            let mut caches = Caches::new(geometry.0, geometry.1, Levels::Inclusive { prefetches: false });
            let mut count = || (0..lines).filter(|line| caches.access(*line) == Served::Memory).count() as u64;
            (count(), count())
        };
        assert_eq!(misses(4096), (4096, 0));
        assert_eq!(misses(2 * 4096), (8192, 8192));
    }
}
