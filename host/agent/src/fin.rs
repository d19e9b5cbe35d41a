//! The peer's FIN, which an import does not carry: it is replayed to the kernel's socket.

use baton_image::Image;
use baton_linux::events::monotonic_micros;
use std::fmt::Display;

/// Microseconds after which a FIN that has not arrived is replayed again, at first (it doubles), and after which it is
/// waited for no longer. On a busy machine the kernel's packet threads may wait for a processor for two seconds.
const AGAIN: u64 = 10_000;
const LIMIT: u64 = 5_000_000;

/// Linux's numbers of the states in which no FIN has come: ESTABLISHED, FIN-WAIT-1, FIN-WAIT-2.
const WITHOUT: [u8; 3] = [1, 4, 5];

/// A FIN that was replayed to the kernel's socket, which has not been seen to have it.
#[derive(Clone, Copy)]
pub(crate) struct ReplayedFin {
    /// The image that the kernel has imported.
    pub image: Image,
    /// When it is replayed again, in microseconds of the monotonic clock: a device or a rule may have dropped it.
    again_at: u64,
    until: u64,
}

impl ReplayedFin {
    /// The FIN of a connection that is restored from this image, if its peer has sent one.
    pub fn of(image: Image) -> Option<ReplayedFin> {
        let now = monotonic_micros();
        image.state.fin_received().then_some(ReplayedFin { image, again_at: now + AGAIN, until: now + LIMIT })
    }

    /// Whether a socket in this state does not have it. None: the state is unknown.
    pub fn is_missing(state: Option<u8>) -> bool {
        state.is_some_and(|state| WITHOUT.contains(&state))
    }

    /// Whether it is waited for no longer.
    pub fn is_late(&self, now: u64) -> bool {
        now >= self.until
    }

    /// The same FIN, if it is to be replayed again now: the next time after a pause as long as it has been waited for.
    pub fn again(self, now: u64) -> Option<ReplayedFin> {
        let waited = (now + LIMIT).saturating_sub(self.until);
        (now >= self.again_at).then_some(ReplayedFin { again_at: now + waited.max(AGAIN), ..self })
    }
}

/// For the log: the kernel's socket has not got a connection's FIN in time, and its receiving side was shut down, or
/// why it was not.
pub(crate) fn not_taken(flow: impl Display, shut: Result<(), impl Display>) -> String {
    let instead = match shut {
        Ok(()) => "receiving is shut down".into(),
        Err(why) => format!("receiving could not be shut down: {why}"),
    };
    format!("{flow}: the kernel did not take the peer's FIN; {instead}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_says_whether_receiving_is_shut_down() {
        let said = |shut: Result<(), &str>| not_taken("a connection", shut);
        assert_eq!(said(Ok(())), "a connection: the kernel did not take the peer's FIN; receiving is shut down");
        assert!(said(Err("not connected")).ends_with("FIN; receiving could not be shut down: not connected"));
    }
}
