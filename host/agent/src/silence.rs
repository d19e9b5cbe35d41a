//! Connections in the kernel whose peer is silent. The kernel takes no time that has run, and with its first time-outs,
//! which it chooses anew, TCP_USER_TIMEOUT would last some seconds longer. So such a connection goes to the NIC when
//! its time is over: the NIC knows how long its peer has been silent, and ends it.

use crate::agent::Agent;
use crate::connection::Connection;
use baton_core::Stage;
use baton_linux::events::monotonic_micros;
use baton_moves::{Conclusion, Refusal};

/// Microseconds after which it is tried again to end a connection on the NIC.
const AGAIN: u64 = 100_000;

impl Connection {
    /// Whether it goes to the NIC only to end there.
    pub fn is_overdue(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.overdue)
    }
}

impl Agent {
    /// Has a connection in the kernel looked at when the time of its silent peer is over, if it has such a limit.
    pub(crate) fn watch_silence(&mut self, session: u32, number: u32) {
        let now = monotonic_micros();
        let Some(connection) = self.connection(session, number) else { return };
        let in_kernel = connection.stage() == Stage::Kernel && !connection.stays;
        let over = connection.stay().and_then(|stay| stay.gives_up_at()).filter(|at| in_kernel && *at > now);
        if let Some(at) = over {
            self.look_again(session, number, at - now);
        }
    }

    /// Begins the last move of a connection in the kernel whose time is over. Returns whether it has.
    pub(crate) fn end_silence(&mut self, session: u32, number: u32) -> bool {
        let (now, attacher) = (monotonic_micros(), self.is_attacher(session));
        let Some(connection) = self.connection(session, number) else { return false };
        let waits = !attacher && !connection.stays && connection.stage() == Stage::Kernel;
        let over = connection.stay().and_then(|stay| stay.gives_up_at()).is_some_and(|at| at <= now);
        if waits && over {
            connection.extra().overdue = true;
            self.begin_offload(session, number, None);
        }
        waits && over
    }

    /// The end of such a move. If the peer has answered after all, the connection returns to where it was.
    pub(crate) fn follow_silence(&mut self, session: u32, number: u32, conclusion: &Conclusion) {
        let Some(connection) = self.connection(session, number) else { return };
        if !connection.is_overdue() {
            return self.watch_silence(session, number);
        }
        connection.extra().overdue = false;
        match conclusion {
            Conclusion::Moved if connection.stage() == Stage::Nic && !connection.wanted => {
                connection.extra().must_return = Some("its peer answers again");
                self.look_again(session, number, AGAIN);
            }
            Conclusion::Stays(Refusal::Answered) => connection.forget_stay(),
            Conclusion::Stays(refusal) if refusal.is_transient() => self.look_again(session, number, AGAIN),
            _ => {}
        }
    }
}
