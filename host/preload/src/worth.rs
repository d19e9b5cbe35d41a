//! Whether a connection that its rule gives to the NIC is worth the move now.
//!
//! A move costs about as much as some tens of requests, and closing a connection on the NIC costs a move back. So two things hold a
//! hand-over up:
//!
//! - *Patience.* Each listener, and each remote address that the program connects to, has a time that its short connections rarely
//!   outlive, learnt as they close. A connection younger than that stays in the kernel. The first few of a listener pay.
//! - *Pace.* Hand-overs, and the closing of what was handed over, take at most a ninth of the program's time: when a thousand
//!   connections are made at once they move one after the other, and the program goes on with its requests in between.
//!
//! Besides, a connection that alternates between requests and answers moves when it has just answered (or been answered), so that
//! nobody waits for it while it moves.

use crate::tcp::Origin;
use crate::wait;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

const RELAXED: Ordering = Ordering::Relaxed;

/// Microseconds: a connection that lived as long repays its moves.
const LONG: u64 = 1_000_000;

/// Patience is so many times the age at which short connections close.
const MARGIN: u64 = 4;

/// After a hand-over the program has the time to itself so many times as long as that took.
const PACE: u64 = 8;

/// Microseconds after which a thread that hands over counts as gone, and another may.
const LEASE: u64 = 20_000;

/// A connection on which nothing has been answered after so many microseconds, or bytes, has data that flow one way: any moment is as good.
const ONE_WAY: u64 = 50_000;
/// See [`ONE_WAY`].
const ONE_WAY_BYTES: u64 = 8192;

/// Listeners and remote addresses, by hash: two that share a place share their patience, which only delays. Place 0 learns nothing.
static PATIENCE: [AtomicU32; 256] = [const { AtomicU32::new(0) }; 256];

/// Microseconds of the monotonic clock before which no further connection is handed over.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// What the program has just done with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    Made,
    Sent,
    Received,
}

/// The age of a connection, and to whom it belongs.
#[derive(Default)]
pub(crate) struct Worth {
    /// Microseconds of the monotonic clock when it was made; 0 if that was not seen.
    since: AtomicU64,
    place: AtomicU8,
}

/// Where a listener's patience is: its socket lives for ever.
pub(crate) fn of_listener<T>(listener: Option<&'static T>) -> u8 {
    listener.map_or(0, |listener| place((std::ptr::from_ref(listener) as u64).to_ne_bytes()))
}

/// Where the patience of a remote address is.
pub(crate) fn of_peer(address: &[u8]) -> u8 {
    place(address.iter().copied())
}

/// FNV-1a, folded to 1..=255.
fn place(bytes: impl IntoIterator<Item = u8>) -> u8 {
    let hash =
        bytes.into_iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    ((hash ^ hash >> 32) % 255 + 1) as u8
}

impl Worth {
    /// A socket of which nothing is known.
    pub fn clear(&self) {
        self.since.store(0, RELAXED);
        self.place.store(0, RELAXED);
    }

    /// Its connection is being made.
    pub fn begin(&self, place: u8) {
        self.since.store(wait::now(), RELAXED);
        self.place.store(place, RELAXED);
    }

    /// It is closed: how long it lived tells about the next ones.
    pub fn end(&self) {
        let (since, place) = (self.since.swap(0, RELAXED), self.place.load(RELAXED));
        if since != 0 && place != 0 {
            let patience = &PATIENCE[usize::from(place)];
            patience.store(learn(patience.load(RELAXED), wait::now().saturating_sub(since)), RELAXED);
        }
    }

    /// Whether it is to be handed over now, which its rule wants. `answers`: how often it has sent after it had received; `bytes`: how many
    /// went either way.
    pub fn is_ripe(&self, origin: Origin, moment: Moment, answers: u32, bytes: u64) -> bool {
        let now = wait::now();
        let age = now.saturating_sub(self.since.load(RELAXED));
        now >= NEXT.load(RELAXED)
            && age >= u64::from(PATIENCE[usize::from(self.place.load(RELAXED))].load(RELAXED))
            && is_quiet(origin, moment, answers == 0 && (age >= ONE_WAY || bytes >= ONE_WAY_BYTES))
    }
}

/// Whether nobody waits for this side just now, as far as can be told.
fn is_quiet(origin: Origin, moment: Moment, one_way: bool) -> bool {
    match moment {
        Moment::Made => true,
        Moment::Sent => one_way || origin == Origin::Accepted,
        Moment::Received => one_way || origin == Origin::Connected,
    }
}

/// The next patience after a connection closed at this age. Both in microseconds.
fn learn(patience: u32, age: u64) -> u32 {
    if age >= LONG {
        return patience - patience / 8;
    }
    (patience - patience / 64).max((MARGIN * age).min(LONG) as u32)
}

/// A hand-over, or a part of its cost. The next one is due when this has been dropped for a while.
pub(crate) struct Turn(u64);

impl Turn {
    pub fn begin() -> Turn {
        let now = wait::now();
        NEXT.store(now + LEASE, RELAXED);
        Turn(now)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let now = wait::now();
        NEXT.store(now + PACE * now.saturating_sub(self.0), RELAXED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a thousand connections that close after one to three milliseconds, hardly one is older than the patience learnt before.
    #[test]
    fn short_connections_are_left_alone() {
        let (mut patience, mut moved) = (0, 0);
        for n in 0..1000u64 {
            let age = 1000 + n * 7919 % 2000;
            moved += u32::from(age >= u64::from(patience));
            patience = learn(patience, age);
        }
        assert!(moved <= 2, "{moved} of 1000");
    }

    /// Where connections live long the patience that a few short ones have left goes again, and never exceeds what a long one lives.
    #[test]
    fn long_connections_make_patience_forgotten() {
        let mut patience = (0..10).fold(0, |patience, _| learn(patience, 900_000));
        assert_eq!(u64::from(patience), LONG);
        for _ in 0..60 {
            patience = learn(patience, 60_000_000);
        }
        assert!(patience < 1000, "{patience}");
    }

    /// A request-response connection moves after an answer, one that only receives or only sends after a while.
    #[test]
    fn moves_wait_for_a_quiet_moment() {
        use Moment::{Made, Received, Sent};
        use Origin::{Accepted, Connected};
        assert!(is_quiet(Accepted, Made, false) && is_quiet(Accepted, Sent, false) && is_quiet(Connected, Received, false));
        assert!(!is_quiet(Accepted, Received, false) && !is_quiet(Connected, Sent, false));
        assert!(is_quiet(Accepted, Received, true) && is_quiet(Connected, Sent, true));
    }
}
