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

    /// Microseconds since `earlier`, 0 if that lies ahead.
    #[inline]
    pub const fn since(self, earlier: Instant) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The moment in whole milliseconds, the unit of the timestamp clock.
    #[inline]
    pub const fn millis(self) -> u32 {
        (self.0 / 1000) as u32
    }
}
