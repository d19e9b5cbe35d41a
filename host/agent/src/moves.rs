//! Which move is worked on when. Programs' requests come first; the moves that are under way, wanted or due get a slice of each round of
//! the agent's loop, so that nobody waits longer than that for an answer, however many connections there are.
//!
//! A move never waits for a program: one whose program is inside an operation on the connection is *quiescing* (a part of its stage), and
//! is looked at again in a later round.

use crate::agent::Agent;
use crate::back::{self, Failure};
use crate::connection::{Asker, Connection, Leaving, Stage, Then};
use crate::forth;
use baton_abi::layout::Owner;
use baton_handoff::examine::Stay;
use baton_linux::events::monotonic_micros;
use baton_protocol::program::{Place, Reply, Until};
use std::collections::VecDeque;
use std::time::Duration;

/// Microseconds of a round that each kind of work on moves may take. A move that has begun is finished.
pub(crate) const SLICE: u64 = 500;

/// Microseconds that a program may take to leave an operation on a connection that is to be moved.
const QUIESCE_LIMIT: u64 = 20_000;

/// Microseconds between two looks at moves that wait for their program, or for the NIC's copy.
const LOOK: u64 = 100;

/// Microseconds without a request after which moves that programs have suggested are made, and after which they are made all the same.
const IDLE: u64 = 200;
const OVERDUE: u64 = 10_000;

/// A connection: session, number, and serial number, since the others are used again.
pub(crate) type Key = (u32, u32, u64);

/// What is to be done about moves.
#[derive(Default)]
pub(crate) struct Moves {
    /// Moves that have begun and wait for something.
    under_way: VecDeque<Key>,
    /// Moves to the NIC that programs have suggested, with the time of that.
    suggested: VecDeque<(Key, u64)>,
    /// Connections that have to leave the NIC, and why.
    returning: VecDeque<(Key, &'static str)>,
    /// When a program asked for something last.
    pub last_request: u64,
}

impl Moves {
    /// How long the loop may sleep as far as moves are concerned.
    pub fn wait(&self) -> Option<Duration> {
        let micros = match () {
            () if !self.returning.is_empty() => 0,
            () if !self.suggested.is_empty() => LOOK.min(IDLE),
            () if !self.under_way.is_empty() => LOOK,
            () => return None,
        };
        Some(Duration::from_micros(micros))
    }
}

/// The connection that a key still names.
pub(crate) fn named(sessions: &mut [Option<crate::session::Session>], (session, number, serial): Key) -> Option<&mut Connection> {
    let connection = sessions.get_mut(session as usize)?.as_mut()?.connections.get_mut(number as usize)?.as_mut()?;
    (connection.serial == serial).then_some(connection)
}

impl Agent {
    /// A slice of each kind of work.
    pub(crate) fn work_on_moves(&mut self) {
        self.advance_moves();
        self.return_connections();
        self.begin_suggested();
        self.flip();
    }

    /// Goes over the moves that wait, at most once over each.
    fn advance_moves(&mut self) {
        let end = monotonic_micros() + SLICE;
        for _ in 0..self.moves.under_way.len() {
            let Some(key) = self.moves.under_way.pop_front() else { return };
            if !self.advance_move(key) {
                self.moves.under_way.push_back(key);
            } else if let Some(connection) = named(&mut self.sessions, key) {
                connection.under_way = false;
            }
            if monotonic_micros() >= end {
                return;
            }
        }
    }

    /// A move has begun: goes on with it as far as it can now, and later from there.
    pub(crate) fn begun(&mut self, key: Key) {
        if !self.advance_move(key)
            && let Some(connection) = named(&mut self.sessions, key)
            && !std::mem::replace(&mut connection.under_way, true)
        {
            self.moves.under_way.push_back(key);
        }
    }

    /// Whether nothing of the move waits any more.
    pub(crate) fn advance_move(&mut self, key: Key) -> bool {
        self.attend(key.0);
        match named(&mut self.sessions, key).map(|connection| &connection.stage) {
            Some(Stage::Mirroring { .. }) => self.advance_mirrored(key),
            Some(Stage::Nic(on_nic)) if on_nic.leaving.is_some() => self.advance_leaving(key),
            _ => true,
        }
    }

    /// Whether a move to the NIC is over, one way or the other.
    fn advance_mirrored(&mut self, key: Key) -> bool {
        let (session, number, _) = key;
        let patience = self.settings.patience;
        let nic_memory = self.hardware.memory.clone();
        let Some((mut ground, entry)) = self.split(session) else { return true };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return true };
        let Stage::Mirroring { since, cid, asked, quiescing, .. } = connection.stage else { return true };
        let now = monotonic_micros();
        let left = match quiescing {
            Some(_) => connection.block.is_left(),
            None if !forth::covered(&nic_memory, connection, cid) => {
                if now - since <= patience {
                    if !asked
                        && now - since > forth::QUIET
                        && let Some(open) = &entry.open
                    {
                        forth::ask_for_sack_blocks(open, connection);
                    }
                    return false;
                }
                let askers = forth::take_askers(connection);
                forth::call_off(&mut ground, connection, cid);
                self.conclude(session, number, Err(Stay::OutOfOrder), askers);
                return true;
            }
            None => connection.block.keep_out(),
        };
        if left || !connection.waits_for_program() {
            let askers = forth::take_askers(connection);
            let Some(open) = entry.open.as_mut() else { return true };
            let result = forth::complete(&mut ground, open, session, connection, cid);
            self.conclude(session, number, result, askers);
            return true;
        }
        let deadline = quiescing.unwrap_or(now + QUIESCE_LIMIT);
        if let Stage::Mirroring { quiescing, .. } = &mut connection.stage {
            *quiescing = Some(deadline);
        }
        if now < deadline {
            return false;
        }
        let askers = forth::take_askers(connection);
        forth::call_off(&mut ground, connection, cid);
        self.conclude(session, number, Err(Stay::Busy), askers);
        true
    }

    /// Whether a move back is over that waited for its program.
    fn advance_leaving(&mut self, key: Key) -> bool {
        let (session, number, _) = key;
        let Some(connection) = named(&mut self.sessions, key) else { return true };
        let left = connection.block.is_left() || !connection.waits_for_program();
        let Stage::Nic(on_nic) = &mut connection.stage else { return true };
        let Some(leaving) = &on_nic.leaving else { return true };
        let late = monotonic_micros() >= leaving.deadline;
        if !left && !late {
            return false;
        }
        // A program that has closed it, and stays inside an operation all the same, harms itself.
        let goes = left || leaving.then.iter().any(|then| matches!(then, Then::Forget(_)));
        let Some(Leaving { askers, then, .. }) = on_nic.leaving.take() else { return true };
        if goes {
            self.complete_return(session, number, askers);
        } else {
            connection.block.set_owner(Owner::Nic);
            self.conclude(session, number, Err(Stay::Busy), askers);
        }
        self.go_on(session, number, then, goes);
        true
    }

    /// A move back has been made, or its program did not leave in time: does what was to be done then.
    pub(crate) fn go_on(&mut self, session: u32, number: u32, then: Vec<Then>, made: bool) {
        for then in then {
            let (asker, tag) = then.asker();
            let reply = if made { self.settle(session, number, then) } else { Some(self.finish(session, number, then)) };
            if let Some(reply) = reply {
                self.answer(asker, tag, reply, &[]);
            }
        }
    }

    /// A program suggests a move to the NIC: it is made when there is time for it.
    pub(crate) fn suggest(&mut self, session: u32, number: u32) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        connection.wanted = true;
        if !std::mem::replace(&mut connection.suggested, true) {
            let key = (session, number, connection.serial);
            self.moves.suggested.push_back((key, monotonic_micros()));
        }
    }

    fn begin_suggested(&mut self) {
        let begun = monotonic_micros();
        let mut now = begun;
        while now < begun + SLICE
            && let Some((key, since)) = self.moves.suggested.front().copied()
        {
            let idle = now.saturating_sub(self.moves.last_request) >= IDLE;
            // While programs ask one thing after another, what has waited long gets a move a round.
            if !idle && (now != begun || now.saturating_sub(since) < OVERDUE) {
                return;
            }
            self.moves.suggested.pop_front();
            let wanted = |connection: &mut Connection| std::mem::take(&mut connection.suggested) && connection.wanted;
            if named(&mut self.sessions, key).is_some_and(wanted) {
                let (session, number, _) = key;
                // Nobody waits for the answer.
                let _ = self.request_move(session, number, Place::Nic, (session, 0));
            }
            now = monotonic_micros();
        }
    }

    /// A connection has to leave the NIC as soon as there is time for it.
    pub(crate) fn return_soon(&mut self, session: u32, number: u32, why: &'static str) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        connection.must_return = Some(why);
        let key = (session, number, connection.serial);
        self.moves.returning.push_back((key, why));
    }

    fn return_connections(&mut self) {
        let end = monotonic_micros() + SLICE;
        while let Some((key, why)) = self.moves.returning.pop_front() {
            let here = named(&mut self.sessions, key).is_some_and(|connection| matches!(connection.stage, Stage::Nic(_)));
            if here {
                self.must_return(key.0, key.1, why);
            }
            if monotonic_micros() >= end {
                return;
            }
        }
    }

    /// Moves a connection back to the kernel and answers those who asked for it, perhaps later.
    pub(crate) fn move_back(&mut self, session: u32, number: u32, askers: Vec<Asker>) {
        let _ = self.begin_return(session, number, askers, None);
    }

    /// Begins a move back. Gives `then` back if that is to be done now: the move is over.
    fn begin_return(&mut self, session: u32, number: u32, askers: Vec<Asker>, then: Option<Then>) -> Option<Then> {
        let Some((mut ground, entry)) = self.split(session) else { return then };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return then };
        let key = (session, number, connection.serial);
        match &mut connection.stage {
            Stage::Nic(on_nic) => {
                if let Some(leaving) = &mut on_nic.leaving {
                    leaving.askers.extend(askers);
                    leaving.then.extend(then);
                    // Its program may have left by now. If not, it is in the list already.
                    self.advance_move(key);
                    return None;
                }
            }
            _ => return then,
        }
        if let Err(stay) = back::check(&mut ground, connection) {
            self.conclude(session, number, Err(stay), askers);
            return then;
        }
        if connection.block.keep_out() || !connection.waits_for_program() {
            self.complete_return(session, number, askers);
            return then;
        }
        if let Stage::Nic(on_nic) = &mut connection.stage {
            let (deadline, then) = (monotonic_micros() + QUIESCE_LIMIT, then.into_iter().collect());
            on_nic.leaving = Some(Leaving { deadline, askers, then });
            self.begun(key);
        }
        None
    }

    /// The program is kept out: the connection goes back now.
    fn complete_return(&mut self, session: u32, number: u32, askers: Vec<Asker>) {
        let Some((mut ground, entry)) = self.split(session) else { return };
        let (Some(open), Some(Some(connection))) = (entry.open.as_mut(), entry.connections.get_mut(number as usize)) else {
            return;
        };
        let flow = connection.flow;
        let result = match back::complete(&mut ground, open, connection) {
            Ok(()) => Ok(()),
            Err(Failure::Stays(stay)) => Err(stay),
            Err(Failure::NicGone) => match self.recover() {
                Ok(()) => Ok(()),
                Err(_) => Err(Stay::NicGone),
            },
            Err(Failure::Lost(error)) => {
                eprintln!("baton agent: {flow:?} is lost: {error}");
                self.statistics.failed_moves += 1;
                Err(Stay::Lost(error.step, error.error))
            }
        };
        self.conclude(session, number, result, askers);
    }

    /// Brings a connection into the kernel, and does `then`. The answer, or None if it comes later.
    pub(crate) fn settle(&mut self, session: u32, number: u32, then: Then) -> Option<Reply> {
        let then = self.bring_back(session, number, then)?;
        // The NIC refuses a connection that has just ended; its end is among what it has said since.
        self.hear_nic();
        let then = self.bring_back(session, number, then)?;
        Some(self.finish(session, number, then))
    }

    /// Whatever stage a connection is in: it is in the kernel afterwards, or has ended. `then`, unless that is done when it is.
    fn bring_back(&mut self, session: u32, number: u32, then: Then) -> Option<Then> {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return Some(then) };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return Some(then) };
        match &connection.stage {
            Stage::Kernel => {}
            Stage::Mirroring { .. } => self.call_off(session, number),
            Stage::Ended => {
                connection.stage = Stage::Kernel;
                if let Some(open) = entry.open.as_mut()
                    && let Some(memory) = open.ended.remove(&number)
                {
                    crate::memory::give(open, memory);
                }
            }
            Stage::Nic(_) => return self.begin_return(session, number, Vec::new(), Some(then)),
        }
        Some(then)
    }

    /// What was to be done when the connection is in the kernel; or it could not go there.
    fn finish(&mut self, session: u32, number: u32, then: Then) -> Reply {
        match then {
            Then::Forget(_) => self.finish_forgetting(session, number),
            Then::GiveBack { reason, until, .. } => self.finish_giving_back(session, number, reason, until),
        }
    }

    /// The program wants of a connection what only the kernel can do.
    pub(crate) fn give_back(&mut self, session: u32, number: u32, reason: String, until: Until, asker: Asker) -> Option<Reply> {
        let group = self.sessions.get(session as usize).and_then(Option::as_ref).map_or(0, |session| session.opening.group);
        if let Some(group) = self.groups.get(group).filter(|_| !reason.is_empty()) {
            group.gave_back(&reason);
        }
        self.settle(session, number, Then::GiveBack { asker, reason, until })
    }

    fn finish_giving_back(&mut self, session: u32, number: u32, reason: String, until: Until) -> Reply {
        let Some(Some(connection)) =
            self.sessions.get_mut(session as usize).and_then(Option::as_mut).and_then(|s| s.connections.get_mut(number as usize))
        else {
            return Reply::Done;
        };
        match until {
            Until::Again => {}
            Until::Alone => (connection.stays, connection.inherited) = (false, true),
            Until::Never => connection.stays = true,
        }
        if matches!(connection.stage, Stage::Nic(_)) {
            return Reply::Failed { reason: connection.reason.clone() };
        }
        if !reason.is_empty() {
            connection.reason = reason;
        }
        self.try_later(session, number);
        Reply::Done
    }

    /// Brings a connection back if need be, and forgets it. The answer, or None if it comes later.
    pub(crate) fn forget(&mut self, session: u32, number: u32, asker: Asker) -> Option<Reply> {
        self.settle(session, number, Then::Forget(asker))
    }

    /// Calls a move off that has only begun, and tells those who asked for it.
    pub(crate) fn call_off(&mut self, session: u32, number: u32) {
        let Some((mut ground, entry)) = self.split(session) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        let Stage::Mirroring { cid, .. } = connection.stage else { return };
        let askers = forth::take_askers(connection);
        forth::call_off(&mut ground, connection, cid);
        let reply = Reply::Stayed { reason: Stay::CalledOff.to_string(), transient: false };
        for (asker, tag) in askers {
            self.answer(asker, tag, reply.clone(), &[]);
        }
    }

    /// The NIC has died: moves back that waited for their programs are recoveries from now on.
    pub(crate) fn take_leaving(&mut self) -> Vec<(Key, Leaving)> {
        let sessions = &mut self.sessions;
        let leaving = self.moves.under_way.iter().filter_map(|key| match &mut named(sessions, *key)?.stage {
            Stage::Nic(on_nic) => Some((*key, on_nic.leaving.take()?)),
            _ => None,
        });
        leaving.collect()
    }

    /// After a recovery: who waited for those is answered; moves that had only begun are called off.
    pub(crate) fn give_up_moves(&mut self, leaving: Vec<(Key, Leaving)>) {
        for key in std::mem::take(&mut self.moves.under_way) {
            let Some(connection) = named(&mut self.sessions, key) else { continue };
            connection.under_way = false;
            if !matches!(connection.stage, Stage::Mirroring { .. }) {
                continue;
            }
            if let Stage::Mirroring { askers, cid, quiescing, .. } = std::mem::replace(&mut connection.stage, Stage::Kernel) {
                if quiescing.is_some() {
                    connection.block.set_owner(Owner::Kernel);
                }
                self.nic.give_slot(cid);
                self.conclude(key.0, key.1, Err(Stay::NicGone), askers);
            }
        }
        for ((session, number, _), Leaving { askers, then, .. }) in leaving {
            self.conclude(session, number, Ok(()), askers);
            self.go_on(session, number, then, true);
        }
    }
}
