//! Whether a connection that its rule allows to move is worth the move now.
//!
//! A move costs about as much as some tens of requests, and closing a connection on the NIC costs a move back. So two
//! things delay a hand-over to the agent:
//!
//! - *Patience.* Each listener, and each remote address that the program connects to, has a time that its short
//!   connections rarely outlive, learnt as they close. A connection younger than that stays in the kernel. The first
//!   few of a listener move too early.
//! - *Pace.* Hand-overs, and the closing of what was handed over, take at most a ninth of the program's time: when a
//!   thousand connections are made at once they move one after the other, and the program goes on with its requests in
//!   between.
//!
//! A connection that alternates between requests and answers moves when it has just answered (or been answered), so
//! that nobody waits for it while it moves.

use crate::tcp::Origin;
use crate::wait;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

const RELAXED: Ordering = Ordering::Relaxed;

/// Age in microseconds from which a connection repays its moves.
const LONG: u64 = 1_000_000;

/// Patience is this many times the age at which short connections close.
const MARGIN: u64 = 4;

/// After a hand-over, no other one begins for this many times as long as it took.
const PACE: u64 = 8;

/// Microseconds after which a thread that is handing over counts as lost, and another may begin.
const LEASE: u64 = 20_000;

/// Microseconds without an answer after which a connection's data counts as flowing one way: then any moment is as
/// good.
const ONE_WAY: u64 = 50_000;
/// Bytes without an answer after which a connection's data counts as flowing one way.
const ONE_WAY_BYTES: u64 = 8192;

/// Patience in microseconds of listeners and remote addresses, by hash. Two keys with the same hash share an entry;
/// that can only delay a move. Entry 0 is never changed.
static PATIENCE: [AtomicU32; 256] = [const { AtomicU32::new(0) }; 256];

/// Time (microseconds of the monotonic clock) before which no further connection is handed over.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// What the program has just done with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    Made,
    Sent,
    Received,
}

/// Age of a connection, and its entry in [`PATIENCE`].
#[derive(Default)]
pub(crate) struct Worth {
    /// Time (microseconds of the monotonic clock) when it was made; 0 if unknown.
    since: AtomicU64,
    place: AtomicU8,
}

/// Index of a listener's patience. Its address serves as the key: it is never freed.
pub(crate) fn of_listener<T>(listener: Option<&'static T>) -> u8 {
    listener.map_or(0, |listener| place((std::ptr::from_ref(listener) as u64).to_ne_bytes()))
}

/// Index of a remote address's patience.
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
    /// Resets the state, for a new socket.
    pub fn clear(&self) {
        self.since.store(0, RELAXED);
        self.place.store(0, RELAXED);
    }

    /// Records that the connection is being made.
    pub fn begin(&self, place: u8) {
        self.since.store(wait::now(), RELAXED);
        self.place.store(place, RELAXED);
    }

    /// Records that the connection was closed, and learns from its age.
    pub fn end(&self) {
        let (since, place) = (self.since.swap(0, RELAXED), self.place.load(RELAXED));
        if since != 0 && place != 0 {
            let patience = &PATIENCE[usize::from(place)];
            patience.store(learn(patience.load(RELAXED), wait::now().saturating_sub(since)), RELAXED);
        }
    }

    /// Whether to hand it over now, given that its rule allows it. `answers`: how often it has sent after it had
    /// received; `bytes`: sum of both directions.
    pub fn is_ripe(&self, origin: Origin, moment: Moment, answers: u32, bytes: u64) -> bool {
        let now = wait::now();
        let age = now.saturating_sub(self.since.load(RELAXED));
        now >= NEXT.load(RELAXED)
            && age >= u64::from(PATIENCE[usize::from(self.place.load(RELAXED))].load(RELAXED))
            && is_quiet(origin, moment, answers == 0 && (age >= ONE_WAY || bytes >= ONE_WAY_BYTES))
    }
}

/// Whether the peer, as far as can be seen, is not waiting for this side now.
fn is_quiet(origin: Origin, moment: Moment, one_way: bool) -> bool {
    match moment {
        Moment::Made => true,
        Moment::Sent => one_way || origin == Origin::Accepted,
        Moment::Received => one_way || origin == Origin::Connected,
    }
}

/// The patience after a connection closed at this age. Both in microseconds.
fn learn(patience: u32, age: u64) -> u32 {
    if age >= LONG {
        return patience - patience / 8;
    }
    (patience - patience / 64).max((MARGIN * age).min(LONG) as u32)
}

/// A hand-over, or a part of its cost. When it is dropped, the next one is delayed by [`PACE`] times its duration.
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

    /// Of a thousand connections that close after one to three milliseconds, hardly any is older than the patience
    /// learnt before.
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

    /// Long connections undo the patience that a few short ones have left, which never exceeds [`LONG`].
    #[test]
    fn long_connections_make_patience_forgotten() {
        let mut patience = (0..10).fold(0, |patience, _| learn(patience, 900_000));
        assert_eq!(u64::from(patience), LONG);
        for _ in 0..60 {
            patience = learn(patience, 60_000_000);
        }
        assert!(patience < 1000, "{patience}");
    }

    /// A request-response connection moves after an answer; one that only receives or only sends moves after a while.
    #[test]
    fn moves_wait_for_a_quiet_moment() {
        use Moment::{Made, Received, Sent};
        use Origin::{Accepted, Connected};
        assert!(is_quiet(Accepted, Made, false) && is_quiet(Accepted, Sent, false) && is_quiet(Connected, Received, false));
        assert!(!is_quiet(Accepted, Received, false) && !is_quiet(Connected, Sent, false));
        assert!(is_quiet(Accepted, Received, true) && is_quiet(Connected, Sent, true));
    }
}
