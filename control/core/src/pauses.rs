//! Pauses before the agent repeats a request that an attacher or the kernel has not carried out.

/// First and longest pause before an attacher that does not read its messages is sent them again, in microseconds. It
/// doubles while the attacher reads nothing.
const FIRST_PAUSE: u64 = 1_000;
const LONGEST_PAUSE: u64 = 200_000;

/// The next try to send messages to an attacher.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pause {
    due: u64,
    pause: u64,
}

impl Pause {
    /// The first try has failed at `now`.
    pub fn begin(now: u64) -> Pause {
        Pause { due: now + FIRST_PAUSE, pause: FIRST_PAUSE }
    }

    /// When the next try is due.
    pub fn due(self) -> u64 {
        self.due
    }

    /// Records a try at `now`. `reads`: the attacher has read something since the last one.
    pub fn tried(&mut self, reads: bool, now: u64) {
        self.pause = if reads { FIRST_PAUSE } else { (2 * self.pause).min(LONGEST_PAUSE) };
        self.due = now + self.pause;
    }
}

/// How long an import that the kernel refuses is repeated before the connection counts as lost; the second limit is for
/// a connection whose program has ended. Then the shortest and longest pause between two tries. All in microseconds.
const LIMIT: u64 = 60_000_000;
const LIMIT_WITHOUT_PROGRAM: u64 = 2_000_000;
const SHORTEST: u64 = 1_000;
const LONGEST: u64 = 200_000;

/// A connection whose import the kernel has refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    since: u64,
    again_at: u64,
}

impl Refused {
    /// Records a refusal at `now`, after earlier ones `before`. None: the import is not tried again. `waits`: a program
    /// waits for the connection.
    pub fn again(before: Option<Refused>, waits: bool, now: u64) -> Option<Refused> {
        let since = before.map_or(now, |before| before.since);
        let (lasts, limit) = (now.saturating_sub(since), if waits { LIMIT } else { LIMIT_WITHOUT_PROGRAM });
        (lasts < limit).then_some(Refused { since, again_at: now + lasts.clamp(SHORTEST, LONGEST) })
    }

    /// Whether it is too early for the next try.
    pub fn is_recent(self, now: u64) -> bool {
        now < self.again_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attacher_that_reads_nothing_is_tried_ever_more_rarely() {
        let (mut pause, mut now) = (Pause::begin(0), 0);
        for wait in [1, 2, 4, 8, 16, 32, 64, 128, 200, 200] {
            assert_eq!(pause.due(), now + wait * 1_000);
            now = pause.due();
            pause.tried(false, now);
        }
        pause.tried(true, now);
        assert_eq!(pause.due(), now + FIRST_PAUSE);
    }

    #[test]
    fn a_kernel_that_refuses_is_asked_for_as_long_as_a_program_waits() {
        for (waits, limit) in [(true, LIMIT), (false, LIMIT_WITHOUT_PROGRAM)] {
            let (mut refused, mut now, mut asked) = (None, 5_000_000, 0);
            let first = now;
            while let Some(again) = Refused::again(refused, waits, now) {
                assert!(again.is_recent(now) && again.is_recent(now + SHORTEST - 1) && !again.is_recent(now + LONGEST));
                (refused, asked) = (Some(again), asked + 1);
                now = again.again_at;
            }
            assert!(now - first >= limit && now - first < limit + LONGEST, "{waits}: {}", now - first);
            assert!(asked > limit / LONGEST && asked < 2 * limit / LONGEST, "{asked}");
        }
    }
}
