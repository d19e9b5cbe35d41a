//! Orderly shutdown of an agent: every connection is restored to the kernel, and clients that connect meanwhile are
//! rejected. Connections that cannot be restored are reset.

use crate::agent::Agent;
use crate::listening;
use crate::nic::NicProcess;
use baton_core::Stage;
use baton_linux::events::monotonic_micros;
use baton_log::error;
use baton_moves::Event;
use baton_protocol::keeper::Kept;
use std::time::Duration;

/// Time that connections get which cannot leave the NIC at once, in microseconds: a thread is inside an operation, and
/// may get no processor for a while, or the kernel does not have all data that was acknowledged.
const PATIENCE: u64 = 10_000_000;

/// Pause between two attempts to restore.
const PAUSE: Duration = Duration::from_millis(2);

/// Reason that is reported for connections that stay in the kernel while Baton ends.
const ENDING: &str = "Baton is ending";

impl Agent {
    /// Begins the shutdown while programs keep running: their connections are restored to the kernel now, or as soon as
    /// possible, and stay there.
    pub(crate) fn drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        self.keep(&Kept::Ending, &[]);
        self.withdraw_all();
        self.follow_datagrams();
        self.open_all_in_kernel();
        for (session, number) in self.all_connections() {
            let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { continue };
            let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { continue };
            connection.stays = true;
            connection.reason = ENDING.into();
            match connection.stage() {
                Stage::Nic => self.must_return(session, number, ENDING),
                Stage::Offloading => self.call_off(session, number),
                Stage::Kernel | Stage::Ended => {}
            }
        }
    }

    /// Restores all connections, ends all sessions, and ends the NIC.
    pub(crate) fn give_everything_back(&mut self) {
        self.fetch_all();
        self.open_all_in_kernel();
        let deadline = monotonic_micros() + PATIENCE;
        let mut left = self.all_connections();
        while !left.is_empty() {
            self.pulse.beat();
            left.retain(|(session, number)| {
                match self.stage(*session, *number) {
                    Some(Stage::Offloading) => {
                        self.call_off(*session, *number);
                        self.drive(*session, *number, Event::Tick);
                    }
                    // Begins or continues its move; its program may have to leave an operation first.
                    Some(Stage::Nic) => self.begin_restore(*session, *number, None),
                    // The memory of one that has ended keeps what its program has not read.
                    Some(Stage::Kernel | Stage::Ended) | None => {}
                }
                self.handle_nic_messages();
                self.finish_calls();
                let waits = self.awaits_nic(*session, *number) || self.is_called(*session, *number);
                waits || self.is_on_nic(*session, *number)
            });
            if left.is_empty() {
                break;
            }
            // A NIC that does not answer is ended, and its connections are recovered.
            if monotonic_micros() >= deadline && !left.iter().any(|(session, number)| self.awaits_nic(*session, *number)) {
                break;
            }
            if self.recover_from_deaths(false).is_err() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        self.give_back_all_lent();
        for number in 0..self.sessions.len() as u32 {
            self.end_session(number, true);
        }
        listening::end_all(self);
        self.nics.iter_mut().for_each(NicProcess::end);
        self.release_addresses();
        self.remove_sessions();
    }

    pub(crate) fn all_connections(&self) -> Vec<(u32, u32)> {
        let sessions = self.sessions.iter().enumerate().filter_map(|(at, session)| Some((at as u32, session.as_ref()?)));
        sessions
            .flat_map(|(at, session)| session.connections.iter().flatten().map(move |connection| (at, connection.number())))
            .collect()
    }

    fn is_on_nic(&self, session: u32, number: u32) -> bool {
        self.stage(session, number) == Some(Stage::Nic)
    }

    fn awaits_nic(&self, session: u32, number: u32) -> bool {
        let session = self.sessions.get(session as usize).and_then(Option::as_ref);
        let connection = session.and_then(|session| session.connections.get(number as usize)?.as_ref());
        connection.is_some_and(|connection| connection.awaits_answer())
    }

    /// Gives up a connection that cannot be restored: its frames are no longer stolen, so the kernel resets its peer,
    /// and its slot and memory are freed. Its program, if it still runs, finds it lost when its session ends.
    pub(crate) fn give_up(&mut self, session: u32, number: u32) {
        if !self.is_on_nic(session, number) {
            return;
        }
        if let Some(connection) = self.connection(session, number) {
            connection.given_up = true;
            error!(
                [connection = %connection.flow, session = session] "{} is given up: {}", connection.flow, connection.reason;
                "its program has to connect again; `baton ls -e` shows its last events"
            );
        }
        self.drive(session, number, Event::GiveUp);
    }
}
