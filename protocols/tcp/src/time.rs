//! Time as it is passed in: microseconds since an origin of the caller's choice.

/// A moment, in microseconds since the caller's origin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// Later than every moment: a timer that does not run.
    pub const NEVER: Instant = Instant(u64::MAX);

    /// The moment `micros` later.
    #[inline]
    #[must_use]
    pub const fn after(self, micros: u64) -> Instant {
        Instant(self.0.saturating_add(micros))
    }

    /// The moment `micros` earlier, no earlier than the origin.
    #[must_use]
    pub const fn ago(self, micros: u64) -> Instant {
        Instant(self.0.saturating_sub(micros))
    }

    /// Microseconds since `earlier`, 0 if that lies ahead.
    #[inline]
    pub const fn since(self, earlier: Instant) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Microseconds since `earlier`, at most 71 minutes.
    pub(crate) fn age(self, earlier: Instant) -> u32 {
        u32::try_from(self.since(earlier)).unwrap_or(u32::MAX)
    }

    /// Microseconds that are left of a timer that expires at this moment; `None` if it does not run.
    pub(crate) fn left(self, now: Instant) -> Option<u64> {
        (self != Instant::NEVER).then(|| self.since(now))
    }

    /// The time at which a timer with this much time left expires.
    pub(crate) fn when(self, left: Option<u64>) -> Instant {
        left.map_or(Instant::NEVER, |left| self.after(left))
    }

    /// The moment in whole milliseconds, the unit of the timestamp clock.
    #[inline]
    pub const fn millis(self) -> u32 {
        (self.0 / 1000) as u32
    }
}
