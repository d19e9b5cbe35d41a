//! What the kernel alone serves, for `baton ls`: programs, and connections that never were the agent's.

use crate::agent::Agent;
use crate::counts::Counted;
use crate::texts::shortened;
use baton_linux::process;
use baton_protocol::native::Native;
use baton_protocol::program::Withdrawn;

/// Most programs and reasons that a list names; the oldest is dropped.
const MOST: usize = 16;

impl Agent {
    /// Records why a session's program, or a connection of its, is served natively. `program` names it if its session
    /// does not.
    pub(crate) fn note_native(&mut self, number: u32, program: Option<&str>, why: &Native) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        let program = program.unwrap_or(&session.opening.program);
        let noted = Withdrawn {
            process: session.process,
            identity: process::identity(session.process).unwrap_or_default(),
            program: shortened(program),
            reason: shortened(&why.to_string()),
            connections: u64::from(why.is_of_connections()),
        };
        self.counts.note(session.user, &noted.program, Counted::Refused, &noted.reason);
        let list = &mut self.statistics.withdrawn;
        let same = |known: &&mut Withdrawn| {
            (known.process, known.identity, &known.reason) == (noted.process, noted.identity, &noted.reason)
        };
        if let Some(known) = list.iter_mut().find(same) {
            known.connections += noted.connections;
            return;
        }
        if list.len() >= MOST {
            list.pop_front();
        }
        list.push_back(noted);
    }
}
