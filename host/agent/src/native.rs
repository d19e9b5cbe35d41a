//! What the kernel alone serves, for `baton ls`: programs, and connections that never were the agent's.

use crate::agent::Agent;
use crate::counts::Counted;
use crate::texts::shortened;
use baton_linux::process;
use baton_protocol::native::Native;
use baton_protocol::program::{Opening, VERSION, Withdrawn};

/// Most programs and reasons that a list names; the oldest is dropped.
const MOST: usize = 16;

impl Agent {
    /// Records why a session's program, or a connection of its, is served natively. `program` names it if its session
    /// does not.
    pub(crate) fn note_native(&mut self, number: u32, program: Option<&str>, why: &Native) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        let (process, program) = (session.process, program.unwrap_or(&session.opening.program).to_owned());
        note(self, number, (process, &program), why);
    }
}

/// The same of a connection that was to be registered: with an attacher it is that of process `of`.
pub(crate) fn note_unfit(agent: &mut Agent, number: u32, of: Option<u32>, why: &Native) {
    match of.filter(|_| agent.is_attacher(number)) {
        Some(of) => note(agent, number, (of, &process::name(of).unwrap_or_default()), why),
        None => agent.note_native(number, None, why),
    }
}

/// Notes once that a program's library is of another version: it asks again every second. `program` is empty where its
/// request cannot be read.
pub(crate) fn note_version(agent: &mut Agent, number: u32, program: &str) {
    let Some(Some(session)) = agent.sessions.get(number as usize) else { return };
    let (process, why) = (session.process, Native::OtherVersion);
    let (identity, reason) = (process::identity(process).unwrap_or_default(), shortened(&why.to_string()));
    let known = &agent.statistics.withdrawn;
    if known.iter().any(|one| (one.process, one.identity, &one.reason) == (process, identity, &reason)) {
        return;
    }
    let program = if program.is_empty() { process::name(process).unwrap_or_default() } else { program.to_owned() };
    note(agent, number, (process, &program), &why);
}

/// Why a session of another version is not opened, which is noted.
pub(crate) fn refuse_version(agent: &mut Agent, number: u32, opening: &Opening) -> String {
    note_version(agent, number, &opening.program);
    format!("this agent speaks version {VERSION}, the program version {}", opening.version)
}

fn note(agent: &mut Agent, number: u32, (process, program): (u32, &str), why: &Native) {
    let Some(Some(session)) = agent.sessions.get(number as usize) else { return };
    let noted = Withdrawn {
        process,
        identity: process::identity(process).unwrap_or_default(),
        program: shortened(program),
        reason: shortened(&why.to_string()),
        connections: u64::from(why.is_of_connections()),
    };
    agent.counts.note(session.user, &noted.program, Counted::Refused, &noted.reason);
    let list = &mut agent.statistics.withdrawn;
    let same =
        |known: &&mut Withdrawn| (known.process, known.identity, &known.reason) == (noted.process, noted.identity, &noted.reason);
    if let Some(known) = list.iter_mut().find(same) {
        known.connections += noted.connections;
        return;
    }
    if list.len() >= MOST {
        list.pop_front();
    }
    list.push_back(noted);
}
