//! Descriptors that attachers lend after the death of a NIC, or of an agent: the agent has none of their programs'
//! connections, and needs them to restore those.
//!
//! An attacher has to stop its programs first, and may never answer. So the connections of each attacher wait for that
//! attacher alone: the next NIC holds their frames, and everybody else's connections go on. Meanwhile an attacher can
//! lend, and say that its program has closed a socket; whatever else it asks for is refused.

use crate::agent::Agent;
use crate::attached::stand_in;
use crate::calls::{self, outsider};
use crate::connection::Connection;
use crate::journal;
use crate::session::{NOT_READING, Sent, Session};
use baton_abi::Cid;
use baton_core::Stage;
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::foreign::Foreign;
use baton_log::warning;
use baton_moves::{Event, Refusal, Step};
use baton_protocol::program::{Answer, Ask, Place, Reply};
use std::collections::{BTreeSet, HashSet};
use std::os::fd::AsFd;
use std::time::Duration;

/// Time that an attacher gets to stop its programs and lend the descriptors that were requested, in microseconds.
const PATIENCE: u64 = 3_000_000;

/// Time that calls on the sockets of attachers' programs may take, in microseconds: one of these may hold its socket.
const MOST_CALLING: u64 = 200_000;

/// Time between two looks at connections that are being restored, in microseconds.
const LOOK: u64 = 100;

/// Requests that are read from an attacher after its time is up, besides those that were waited for.
const MOST_LATE: usize = 1024;

/// What an attacher has been asked for.
pub(crate) struct Fetch {
    /// The NIC whose connections are restored; None for all.
    nic: Option<usize>,
    /// Connections whose descriptors have not come.
    missing: BTreeSet<u32>,
    /// Time until which they are waited for; then that until which the calls on their sockets are.
    until: u64,
    /// Its connections are being restored.
    restores: bool,
    /// The agent is new: the attacher has to repeat its requests afterwards.
    restarted: bool,
}

impl Session {
    /// Drops the descriptors of an attacher's programs, which then have their sockets alone again: after the recovery
    /// of that NIC's connections, or of all.
    fn take_back_descriptors(&mut self, nic: Option<usize>) {
        // A move from or to another NIC goes on.
        let elsewhere = |cid: Cid| nic.is_some_and(|nic| cid.nic() != nic);
        let moves = |connection: &Connection| connection.goal().is_some() && connection.cid.is_some_and(elsewhere);
        // What a call is made on comes back with that, and is dropped then.
        let returned = self.connections.iter_mut().flatten().filter(|connection| !moves(connection));
        returned.for_each(|connection| connection.fd = None);
    }
}

fn is_on(connection: &Connection, nic: Option<usize>) -> bool {
    connection.cid.is_some_and(|cid| nic.is_none_or(|nic| cid.nic() == nic))
}

impl Agent {
    /// Whether a session's attacher has been asked for descriptors.
    pub(crate) fn is_fetching(&self, session: u32) -> bool {
        self.sessions.get(session as usize).and_then(Option::as_ref).is_some_and(|session| session.fetch.is_some())
    }

    /// Requests the descriptors of connections that were being moved, according to a dead agent's journal. Nothing else
    /// can be done before they are there: there is no NIC yet that could hold their frames.
    pub(crate) fn fetch_what_was_moving(&mut self) {
        let mut moving = HashSet::new();
        for (nic, hardware) in self.hardware.iter().enumerate() {
            let slots = 0..journal::slots_used(&hardware.memory, self.settings.nic.slots as u32);
            let entries = slots.filter_map(|at| journal::read(&hardware.memory, nic, at));
            moving.extend(entries.map(|(_, entry)| (entry.session, entry.connection)));
        }
        self.fetch(None, |session, connection| moving.contains(&(session, connection.number())));
        self.await_lent();
        // What was lent is given back after the next NIC's start.
        self.forget_fetches();
    }

    /// Requests the descriptors of connections that a dead NIC had, which have to be restored to the kernel.
    pub(crate) fn fetch_what_was_on(&mut self, nic: usize) {
        self.fetch(Some(nic), |_, connection| connection.stage() == Stage::Nic && is_on(connection, Some(nic)));
    }

    /// Requests the descriptors of all connections that are on NICs, since the agent ends, and waits for them.
    pub(crate) fn fetch_all(&mut self) {
        self.fetch(None, |_, connection| connection.stage() == Stage::Nic && is_on(connection, None));
        self.await_lent();
        self.forget_fetches();
    }

    fn forget_fetches(&mut self) {
        self.moves.fetching.clear();
        self.sessions.iter_mut().flatten().for_each(|session| session.fetch = None);
    }

    fn fetch(&mut self, nic: Option<usize>, wanted: impl Fn(u32, &Connection) -> bool) {
        let until = monotonic_micros() + PATIENCE;
        for (at, session) in self.sessions.iter_mut().enumerate() {
            let Some(session) = session.as_mut().filter(|session| session.opening.attacher) else { continue };
            let its = session.connections.iter().flatten().filter(|connection| wanted(at as u32, connection));
            let mut missing: BTreeSet<u32> = its.filter(|connection| connection.fd.is_none()).map(Connection::number).collect();
            if !missing.is_empty() && !session.ends {
                let connections = missing.iter().copied().collect();
                if session.send(&Answer { tag: 0, body: Reply::Fetch { connections } }, &[]) == Sent::Full {
                    self.cut_off.push((at as u32, NOT_READING));
                }
            }
            // What another NIC had waits for what was asked for last.
            let before = session.fetch.take();
            let restarted = before.as_ref().is_some_and(|before| before.restarted);
            let nic = nic.filter(|nic| before.as_ref().is_none_or(|before| before.nic == Some(*nic)));
            missing.extend(before.into_iter().flat_map(|before| before.missing));
            session.fetch = Some(Box::new(Fetch { nic, missing, until, restores: false, restarted }));
            self.moves.fetching.push(at as u32);
        }
        self.moves.fetching.sort_unstable();
        self.moves.fetching.dedup();
    }

    /// Waits until what was asked for is there, or its time is up.
    fn await_lent(&mut self) {
        let Ok(poller) = Poller::new() else { return };
        for (at, session) in self.sessions.iter().enumerate() {
            if let Some(session) = session.as_ref().filter(|session| session.fetch.is_some()) {
                let _ = poller.add(session.channel.as_fd(), at as u64, Trigger::Readable);
            }
        }
        let mut readable = Vec::new();
        loop {
            let now = monotonic_micros();
            let waits = |session: &&Session| session.fetch.as_ref().is_some_and(|fetch| !fetch.is_over(session.ends, now));
            let Some(until) = self.sessions.iter().flatten().find(waits).and_then(|session| session.fetch.as_ref()) else {
                break;
            };
            let limit = Duration::from_micros(until.until - now);
            self.pulse.set_asleep(true);
            let waited = poller.wait(Some(limit), &mut readable);
            self.pulse.set_asleep(false);
            if waited.is_err() {
                break;
            }
            std::mem::take(&mut readable).into_iter().for_each(|session| _ = self.serve(session as u32));
        }
        for number in self.moves.fetching.clone() {
            self.read_late(number);
        }
    }

    /// Time until an attacher's connections are looked at again.
    pub(crate) fn fetch_wait(&self) -> Option<Duration> {
        let now = monotonic_micros();
        let wait = |number: &u32| {
            let session = self.sessions.get(*number as usize)?.as_ref()?;
            let fetch = session.fetch.as_ref()?;
            Some(match (fetch.restores, fetch.is_over(session.ends, now)) {
                (true, _) => LOOK,
                (false, true) => 0,
                (false, false) => fetch.until - now,
            })
        };
        self.moves.fetching.iter().filter_map(wait).min().map(Duration::from_micros)
    }

    /// Restores the connections of attachers that have lent what they were asked for, or whose time is up, and gives
    /// back what was lent when that is done.
    pub(crate) fn restore_lent(&mut self) {
        if self.moves.fetching.is_empty() {
            return;
        }
        let now = monotonic_micros();
        for number in self.moves.fetching.clone() {
            let Some(Some(session)) = self.sessions.get(number as usize) else { continue };
            let Some(fetch) = &session.fetch else { continue };
            if fetch.restores {
                self.go_on_restoring(number, now);
            } else if fetch.is_over(session.ends, now) {
                self.read_late(number);
                self.begin_restoring(number, now);
            }
        }
        let sessions = &self.sessions;
        let fetches =
            |number: &u32| sessions.get(*number as usize).and_then(Option::as_ref).is_some_and(|one| one.fetch.is_some());
        self.moves.fetching.retain(fetches);
    }

    /// Reads the requests that an attacher has sent in time, however much of it others have used up.
    fn read_late(&mut self, number: u32) {
        let missing = |agent: &Agent| {
            let session = agent.sessions.get(number as usize).and_then(Option::as_ref);
            session
                .filter(|session| !session.ends)
                .and_then(|session| session.fetch.as_ref())
                .map_or(0, |fetch| fetch.missing.len())
        };
        // The bound stops an endless stream of them.
        for _ in 0..missing(self) + MOST_LATE {
            if missing(self) == 0 || !self.serve(number) {
                break;
            }
        }
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        match missing(self) {
            0 => {}
            left => {
                warning!(
                    [session = number] "attacher {} has not lent {left} connections in time", session.process;
                    "let it go on if it is stopped (SIGCONT), or attach its program again"
                );
            }
        }
    }

    fn begin_restoring(&mut self, number: u32, now: u64) {
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
        let Some(fetch) = &mut session.fetch else { return };
        (fetch.restores, fetch.until) = (true, now + MOST_CALLING);
        let nic = fetch.nic;
        let its: Vec<u32> =
            session.connections.iter().flatten().filter(|connection| is_on(connection, nic)).map(Connection::number).collect();
        for connection in its {
            self.attend(number);
            self.drive(number, connection, Event::FramesFlow);
        }
        self.clear_attended();
        self.go_on_restoring(number, now);
    }

    /// Its programs stand still until this is over: what the NIC has to do is waited for, also if its ring has no room
    /// yet, and calls on their sockets for a while.
    fn go_on_restoring(&mut self, number: u32, now: u64) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        let Some(fetch) = &session.fetch else { return };
        let called = |connection: &Connection| connection.call().is_some() && now < fetch.until;
        let its = session.connections.iter().flatten().filter(|connection| is_on(connection, fetch.nic));
        let asks = |connection: &Connection| connection.awaits_answer() || connection.step() == Step::Barred;
        let busy: Vec<u32> = its.filter(|connection| asks(connection) || called(connection)).map(Connection::number).collect();
        if busy.is_empty() {
            return self.give_back_lent(number);
        }
        busy.into_iter().for_each(|connection| self.drive(number, connection, Event::Tick));
    }

    /// Gives borrowed descriptors back, so that the attacher's programs may continue.
    fn give_back_lent(&mut self, number: u32) {
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
        let fetch = session.fetch.take();
        if session.ends {
            return;
        }
        let closed = session.connections.iter().flatten().filter(|connection| connection.closed).map(Connection::number);
        for connection in closed.collect::<Vec<_>>() {
            let _ = self.forget(number, connection, (number, 0));
        }
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
        session.take_back_descriptors(fetch.as_ref().and_then(|fetch| fetch.nic));
        if fetch.is_some_and(|fetch| fetch.restarted) {
            self.let_program_in(number);
        } else if session.send(&Answer { tag: 0, body: Reply::Returned }, &[]) == Sent::Full {
            self.cut_off.push((number, NOT_READING));
        }
    }

    /// Notes that a session's attacher, which has been asked for descriptors, is let in when it has them back.
    pub(crate) fn is_let_in_later(&mut self, number: u32) -> bool {
        let session = self.sessions.get_mut(number as usize).and_then(Option::as_mut);
        let fetch = session.and_then(|session| session.fetch.as_mut());
        let Some(fetch) = fetch else { return false };
        fetch.restarted = true;
        true
    }

    /// Gives all borrowed descriptors back: the agent ends.
    pub(crate) fn give_back_all_lent(&mut self) {
        for number in 0..self.sessions.len() as u32 {
            if self.is_attacher(number) {
                self.give_back_lent(number);
            }
        }
    }

    /// Serves a request of an attacher that has been asked for descriptors.
    pub(crate) fn on_request_while_fetching(&mut self, number: u32, ask: &Ask, mut descriptors: Vec<Foreign>) -> Reply {
        let refused = Reply::Stayed { reason: Refusal::NicGone.to_string(), transient: true };
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return refused };
        let missing = |connection: &u32| session.fetch.as_ref().is_some_and(|fetch| fetch.missing.contains(connection));
        let connection = match ask {
            Ask::Lend { connection } => {
                session.note(*connection, descriptors.pop());
                *connection
            }
            // Its program has closed it: a socket of the agent's stands in, and is closed when the connection has been
            // restored into it.
            Ask::Closed { connection, abort } if missing(connection) => {
                if let Some(Some(entry)) = session.connections.get_mut(*connection as usize) {
                    calls::destroy(outsider(session.user, entry.process, None), entry, &self.diagnosis);
                    entry.fd = stand_in(entry, *abort).ok();
                    entry.closed = true;
                }
                *connection
            }
            // Tried when there is a NIC again.
            Ask::Move { connection, to: Place::Nic } => {
                if let Some(Some(entry)) = session.connections.get_mut(*connection as usize) {
                    entry.want(true);
                }
                self.try_later(number, *connection);
                return refused;
            }
            _ => return refused,
        };
        if let Some(fetch) = &mut session.fetch {
            fetch.missing.remove(&connection);
        }
        Reply::Done
    }
}

impl Fetch {
    /// Whether nothing more is waited for. `ends`: its attacher is gone.
    fn is_over(&self, ends: bool, now: u64) -> bool {
        self.missing.is_empty() || ends || now >= self.until
    }
}
