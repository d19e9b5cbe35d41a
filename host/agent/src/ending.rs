//! How an agent ends in order: every connection goes to the kernel, and whoever comes meanwhile is turned away. What cannot go to the kernel
//! is reset.

use crate::agent::Agent;
use crate::connection::Stage;
use crate::journal;
use crate::memory;
use baton_abi::layout::Owner;
use baton_handoff::shell;
use baton_linux::events::monotonic_micros;
use baton_protocol::keeper::Kept;
use std::os::fd::AsFd;
use std::time::Duration;

/// Microseconds that connections may take which cannot leave the NIC at once: a program is inside an operation, or data has been acknowledged
/// that the kernel does not have yet.
const PATIENCE: u64 = 1_000_000;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(2);

/// Why connections stay in the kernel while Baton ends.
const ENDING: &str = "Baton is ending";

impl Agent {
    /// The end has been asked for, but the program goes on: its connections go to the kernel now, or as soon as they can, and stay there.
    pub(crate) fn drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        self.keep(&Kept::Ending, &[]);
        for (session, number) in self.all_connections() {
            let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { continue };
            let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { continue };
            connection.stays = true;
            connection.reason = ENDING.into();
            match connection.stage {
                Stage::Nic(_) => self.must_return(session, number, ENDING),
                Stage::Mirroring { .. } => self.call_off(session, number),
                Stage::Kernel | Stage::Ended => {}
            }
        }
    }

    /// Gives everything back and ends the NIC.
    pub(crate) fn give_everything_back(&mut self) {
        self.fetch_what_was_on_the_nic();
        let deadline = monotonic_micros() + PATIENCE;
        let mut left = self.all_connections();
        while !left.is_empty() {
            left.retain(|(session, number)| {
                match self.stage(*session, *number) {
                    Some(Stage::Mirroring { .. }) => self.call_off(*session, *number),
                    // Begun, or gone on with: its program may have to leave it first.
                    Some(Stage::Nic(_)) => self.move_back(*session, *number, Vec::new()),
                    // One that has ended keeps what its program has not read.
                    Some(Stage::Kernel | Stage::Ended) | None => {}
                }
                self.hear_nic();
                self.is_on_nic(*session, *number)
            });
            if monotonic_micros() >= deadline {
                break;
            }
            if !left.is_empty() {
                std::thread::sleep(PAUSE);
            }
        }
        self.return_what_was_lent();
        for number in 0..self.sessions.len() as u32 {
            self.end_session(number, true);
        }
        self.nic.end();
    }

    fn all_connections(&self) -> Vec<(u32, u32)> {
        let sessions = self.sessions.iter().enumerate().filter_map(|(at, session)| Some((at as u32, session.as_ref()?)));
        sessions
            .flat_map(|(at, session)| session.connections.iter().flatten().map(move |connection| (at, connection.number)))
            .collect()
    }

    fn stage(&self, session: u32, number: u32) -> Option<&Stage> {
        let session = self.sessions.get(session as usize)?.as_ref()?;
        Some(&session.connections.get(number as usize)?.as_ref()?.stage)
    }

    fn is_on_nic(&self, session: u32, number: u32) -> bool {
        matches!(self.stage(session, number), Some(Stage::Nic(_)))
    }

    pub(crate) fn has_ended(&self, session: u32, number: u32) -> bool {
        matches!(self.stage(session, number), Some(Stage::Ended))
    }

    /// A connection that cannot go to the kernel is given up: nothing steals its frames any more, so its peer is reset by the kernel, and its
    /// slot and memory are free. Its program, if it still runs, finds it lost when its session ends.
    pub(crate) fn give_up(&mut self, session: u32, number: u32, ending: bool) {
        let Some((mut ground, entry)) = self.split(session) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        if !matches!(connection.stage, Stage::Nic(_)) {
            return;
        }
        let Stage::Nic(on_nic) = std::mem::replace(&mut connection.stage, Stage::Kernel) else { return };
        if on_nic.leaving.is_some() {
            connection.block.set_owner(Owner::Nic);
        }
        connection.given_up = true;
        eprintln!("baton agent: {} is given up: {}", connection.flow, connection.reason);
        ground.cancel(on_nic.cid, &connection.flow, true);
        journal::clear(ground.nic_memory, on_nic.cid);
        ground.nic.give_slot(on_nic.cid);
        // Its program, if it goes on, resets it.
        if let Some(fd) = connection.fd.as_ref().filter(|_| !ending) {
            let _ = shell::end(fd.as_fd());
        }
        // What lies unread in its memory a program that goes on without Baton reads still.
        if let Some(open) = entry.open.as_mut().filter(|_| !ending) {
            memory::give(open, on_nic.memory);
        }
    }
}
