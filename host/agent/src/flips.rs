//! Moves without a request: random moves of connections in groups that have them, and tries of what did not move when
//! it was to: what is wanted on the NIC goes there again as soon as it can, whatever has brought it to the kernel or
//! kept it there; and moves by heat.

use crate::agent::Agent;
use crate::connection::{Connection, OnNic};
use crate::events::{GONE_COLD, SOCKET_GONE};
use crate::moves::{SLICE, named};
use crate::record::read_record;
use baton_abi::Resource;
use baton_abi::layout::{block, nic};
use baton_abi::resource::{PAGE, PAIRS, pages};
use baton_core::{Key, LATER, Next, Scene, Stage, Standing, Unasked, cannot_go, follow, unasked, wait_for_one};
use baton_linux::events::{monotonic_micros, thread_nanos};
use baton_moves::{Conclusion, Refusal};
use baton_offloads::WhenFull;
use baton_policy::{Demand, Place as At, Sample, WORTH};
use baton_protocol::program::Place;
use baton_supervision::LONGEST_RETRY;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Random moves that are under way at the same time at most. Each keeps its program out for as long as all of them
/// together take.
const AT_ONCE: usize = 16;

/// A connection that was moved at random is not moved so again before this many times as long as that took: with less,
/// a program whose threads seldom get a processor would find it moving each time.
const REST: u64 = 2;

/// Why a connection was not moved when its time had come. It is drawn again like any other, so it may be skipped more
/// than once.
const NO_TIME: &str = "more connections were to move than the agent has time for";

fn thread_micros() -> u64 {
    thread_nanos() / 1000
}

impl Agent {
    /// Makes the moves that are due.
    pub(crate) fn flip(&mut self) {
        let begun = monotonic_micros();
        while let Some((at, key)) = self.retries.take(begun) {
            self.attend(key.0);
            self.try_again(at, key);
            if monotonic_micros() >= begun + SLICE {
                break;
            }
        }
        if !self.schedule.is_due(begun) || self.share.wait(begun, thread_micros()) > 0 {
            return;
        }
        let mut now = begun;
        while let Some((_, (session, number, serial))) = self.schedule.take(begun) {
            if now < begun + SLICE && self.moves.under_way() < AT_ONCE {
                self.attend(session);
                self.flip_one(session, number, serial);
                now = monotonic_micros();
            } else {
                // Moves for which there is no time are skipped.
                self.flip_later(session, number, serial);
            }
        }
    }

    /// Time that the loop may sleep as far as random moves and retries are concerned.
    pub(crate) fn flips_wait(&self) -> Option<Duration> {
        let now = monotonic_micros();
        let flips = self.schedule.due().map(|at| at.saturating_sub(now).max(self.share.left()));
        let retries = self.retries.due().map(|at| at.saturating_sub(now));
        flips.into_iter().chain(retries).min().map(Duration::from_micros)
    }

    fn flip_later(&mut self, session: u32, number: u32, serial: u64) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        if connection.serial == serial
            && let Some(after) = self.groups.get(entry.opening.group).and_then(crate::group::Group::interval)
        {
            self.schedule.add(monotonic_micros().saturating_add(after), (session, number, serial));
            if connection.reason.is_empty() {
                connection.reason = NO_TIME.into();
            }
        }
    }

    /// Makes the random move that is due. The next one is drawn when it has ended.
    fn flip_one(&mut self, session: u32, number: u32, serial: u64) {
        let flips = self.group_of(session).is_some_and(|group| group.flip.is_some());
        if self.connection(session, number).is_none_or(|connection| connection.serial != serial) {
            return;
        }
        let (begun, attacher) = (monotonic_micros(), self.is_attacher(session));
        self.begin_unasked(session, number, flips);
        match self.connection(session, number) {
            Some(connection) if connection.stage() == Stage::Ended => {}
            Some(connection) if connection.goal().is_some() && !attacher => connection.extra().drawn = Some(begun),
            _ => self.draw(session, number, 0),
        }
    }

    /// Draws when a connection is moved at random next, if it is: in `rest` microseconds at the earliest.
    fn draw(&mut self, session: u32, number: u32, rest: u64) {
        let Some(Some(entry)) = self.sessions.get(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get(number as usize) else { return };
        if let Some(after) = self.groups.get(entry.opening.group).and_then(crate::group::Group::interval) {
            self.schedule.add(monotonic_micros().saturating_add(after.max(rest)), (session, number, connection.serial));
        }
    }

    /// Draws again for a connection whose move has ended, if that was due at random.
    pub(crate) fn draw_again(&mut self, session: u32, number: u32) {
        let drawn = self.connection(session, number).and_then(|connection| connection.extra.as_mut()?.drawn.take());
        if let Some(begun) = drawn {
            self.draw(session, number, REST * monotonic_micros().saturating_sub(begun));
        }
    }

    /// Makes the try that was planned for this time, unless it was replaced by another one.
    fn try_again(&mut self, at: u64, (session, number, serial): (u32, u32, u64)) {
        let flips = self.group_of(session).is_some_and(|group| group.flip.is_some());
        let attacher = self.is_attacher(session);
        let Some(connection) = self.connection(session, number).filter(|connection| connection.serial == serial) else { return };
        if connection.extra.as_mut().is_none_or(|extra| !extra.retry.take(at)) {
            return;
        }
        connection.drop_empty_extra();
        let (stage, may_go, must_return) =
            (connection.stage(), connection.goes_by_itself(flips), connection.must_return().is_some());
        let by_heat = stage == Stage::Kernel && connection.block.hot_from() > 0;
        let put_off = connection.put_off_for();
        if matches!(stage, Stage::Kernel | Stage::Nic) && put_off > 0 {
            return self.look_again(session, number, put_off.min(LATER));
        }
        // One that waits until it is hot enough is looked at, and goes when it is.
        let waits = by_heat && self.moves.placements.iter().any(|placement| placement.has(serial));
        if stage == Stage::Kernel
            && may_go
            && let Some(wait) = self.kept_away_for(session, number)
        {
            return self.look_again(session, number, wait);
        }
        if (!may_go || waits) && self.end_silence(session, number) {
            return;
        }
        if !waits {
            self.begin_unasked(session, number, flips);
        }
        self.watch_silence(session, number);
        // An attacher was asked for it, and may not do it.
        match stage {
            Stage::Kernel if attacher && may_go && !waits && !flips => self.ask_later(session, number, 0),
            Stage::Nic if attacher && must_return => self.ask_later(session, number, LATER),
            _ => {}
        }
    }

    /// Begins a move for which nobody has asked now, to wherever the connection is not and should be.
    pub(crate) fn begin_unasked(&mut self, session: u32, number: u32, flips: bool) {
        let Some(connection) = self.connection(session, number) else { return };
        match (unasked(&standing(connection, flips), flips), connection.attached) {
            (None, _) => {}
            (Some(Unasked::Offload), true) => self.want(session, number, Place::Nic),
            (Some(Unasked::Restore), true) => self.want(session, number, Place::Kernel),
            (Some(Unasked::Offload), false) => self.begin_offload(session, number, None),
            (Some(Unasked::Restore), false) => self.begin_restore(session, number, None),
        }
    }

    /// Microseconds for which a connection is kept away from the NIC that has died when it was there, if it is.
    pub(crate) fn kept_away_for(&mut self, session: u32, number: u32) -> Option<u64> {
        let connection = self.connection_ref(session, number)?;
        let (nic, serial) = (connection.extra.as_ref().map_or(0, |extra| extra.nic_that_died), connection.serial);
        self.watch.keeps_away(usize::from(nic), serial, monotonic_micros())
    }

    fn group_of(&mut self, session: u32) -> Option<&mut crate::group::Group> {
        let name = self.sessions.get(session as usize)?.as_ref()?.opening.group;
        self.groups.get(name)
    }

    /// Has a connection looked at again after this many microseconds, or earlier if that is planned already.
    pub(crate) fn look_again(&mut self, session: u32, number: u32, after: u64) {
        let at = monotonic_micros().saturating_add(after);
        let Some(connection) = self.connection(session, number) else { return };
        let serial = connection.serial;
        if connection.extra().retry.plan(at) {
            self.retries.add(at, (session, number, serial));
        }
    }

    /// Has an attacher asked again to move a connection, each time after twice as many microseconds, at least
    /// `shortest`.
    fn ask_later(&mut self, session: u32, number: u32, shortest: u64) {
        let Some(connection) = self.connection(session, number) else { return };
        let after = connection.extra().retry.refused(LONGEST_RETRY).max(shortest);
        self.look_again(session, number, after);
    }

    /// Schedules a try for a connection that has left the NIC although it is wanted there.
    pub(crate) fn try_later(&mut self, session: u32, number: u32) {
        if self.connection(session, number).is_some_and(|connection| connection.goes_by_itself(false)) {
            self.look_again(session, number, LATER);
        }
    }

    /// Does what follows the end of a move. `must_return`: the connection had to leave the NIC when it ended.
    pub(crate) fn follow_conclusion(&mut self, session: u32, number: u32, conclusion: &Conclusion, must_return: bool) {
        let Some(connection) = self.connection(session, number) else { return };
        if connection.attached && !must_return && *conclusion == Conclusion::Stays(Refusal::Attaching) {
            self.attach_devices();
        }
        let Some(connection) = self.connection(session, number) else { return };
        let (serial, standing) = (connection.serial, Standing { must_return, ..standing(connection, false) });
        if !must_return && cannot_go(conclusion, standing.stage) {
            // Where it waited it would be chosen again at each look, and use up the moves that others need.
            self.moves.placements.iter_mut().for_each(|placement| placement.forget(serial));
        }
        let next = follow(conclusion, &standing);
        match next {
            Next::Arrived => {
                if let Some(extra) = self.connection(session, number).and_then(|connection| connection.extra.as_mut()) {
                    extra.nic_that_died = 0;
                }
                self.moves.placements.iter_mut().for_each(|placement| placement.has_come(serial));
            }
            Next::Returned(_) => self.connection(session, number).into_iter().for_each(|connection| connection.onward = false),
            Next::Cut => _ = self.cut(session, number, SOCKET_GONE),
            // It is drawn.
            Next::Retry(_) if self.group_of(session).is_some_and(|group| group.flip.is_some()) => return,
            _ => {}
        }
        let wait = if next == Next::WhenLet { self.kept_away_for(session, number) } else { None };
        let Some(connection) = self.connection(session, number) else { return };
        if let Some(after) = next.after(&mut connection.extra().retry, wait) {
            self.look_again(session, number, after);
        }
    }

    /// Restores a connection that has to leave the NIC, now or as soon as possible.
    pub(crate) fn must_return(&mut self, session: u32, number: u32, why: &'static str) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        connection.extra().must_return = Some(why);
        if entry.opening.attacher {
            self.want(session, number, Place::Kernel);
            return self.ask_later(session, number, LATER);
        }
        self.begin_restore(session, number, None);
    }
}

/// A connection, as far as it counts for its next move. `flips`: its group has random moves.
fn standing(connection: &Connection, flips: bool) -> Standing {
    Standing {
        stage: connection.stage(),
        wanted: connection.goes_by_itself(flips),
        must_return: connection.must_return().is_some(),
        put_off: connection.put_off_for() > 0,
        attached: connection.attached,
        onward: connection.onward && !connection.stays,
    }
}

/// Why a connection leaves a NIC that is full: for another one, and since it has too many.
const COLDER: &str = "the NIC is full, and others carry more";
const TOO_MANY: &str = "the NIC has been given a lower limit, and others carry more";

/// Why one is reset instead, where that is set.
const DROPPED: &str = "the NIC has been given a lower limit, and others carry more (when-full=drop)";

/// Moves connections to and from NICs that are full, and those that have to be hot enough.
pub(crate) fn place(agent: &mut Agent) {
    for nic in 0..agent.nics.len() {
        let now = monotonic_micros();
        wait_for_one(&mut agent.moves.placements, nic, &agent.nics[nic].gate);
        if agent.moves.placements[nic].is_due(&mut agent.nics[nic].gate, now) {
            look_at(agent, nic, now);
        }
        // The NIC has promised nothing to those that attachers were asked for.
        let mut asked = agent.moves.placements[nic].asked(now);
        loop {
            let has_room = agent.nics[nic].room.has_connections(1 + asked);
            let Some(key) = agent.moves.placements[nic].next(has_room, now) else { break };
            if named(&mut agent.sessions, key).is_some_and(|connection| connection.stage() == Stage::Kernel) {
                if agent.is_attacher(key.0) {
                    agent.moves.placements[nic].note_asked(key.2);
                    asked += 1;
                }
                agent.attend(key.0);
                agent.begin_unasked(key.0, key.1, false);
            }
        }
    }
}

/// Decides which connections a NIC is to have of those that wait for room there, or until they are hot enough.
fn look_at(agent: &mut Agent, nic: usize, now: u64) {
    let known = samples(agent, nic, now);
    let (limits, room) = (agent.nics[nic].settings().offloads.limits, &agent.nics[nic].room);
    let by_pairs = limits.pairs.map_or(u32::MAX, |most| most / PAIRS);
    let most = limits.connections.unwrap_or(u32::MAX).min(by_pairs) as usize;
    let most_pages = limits.memory.map_or(u64::MAX, |bytes| bytes / u64::from(PAGE));
    let over = known.over(most, most_pages);
    // A connection that comes will have about as much memory as those that are there. With none there one may try.
    let usual = known.pages.checked_div(known.connections as u32).unwrap_or_else(|| room.free(Resource::Memory)).max(1);
    let free = room.free(Resource::Connections).min(room.free(Resource::Pairs) / PAIRS);
    let free = free.min(room.free(Resource::Memory) / usual) as usize;
    // While its processor is too busy nobody comes for whoever would leave.
    let is_full = known.is_full(most.min(agent.settings.nic.slots), most_pages, usual);
    let demand = Demand { over, free, swaps: is_full && limits.when_full == WhenFull::Coldest };
    let Known { samples, scene, keys, .. } = known;
    let choice = agent.moves.placements[nic].look(&mut agent.nics[nic].gate, &samples, scene, demand, now);
    agent.moves.placements[nic].looked(now, monotonic_micros());
    if over != (0, 0) && limits.when_full == WhenFull::Drop {
        for key in choice.leave.iter().filter_map(|serial| keys.get(serial)) {
            let is_first = agent.cut(key.0, key.1, DROPPED);
            agent.statistics.dropped += u64::from(is_first);
        }
        return explain(agent, &samples, &keys, &choice.short);
    }
    let why = if over == (0, 0) { COLDER } else { TOO_MANY };
    let leaving = choice.leave.iter().map(|serial| (serial, why));
    for (serial, why) in leaving.chain(choice.cold.iter().map(|serial| (serial, GONE_COLD))) {
        let Some(key) = keys.get(serial).copied() else { continue };
        agent.statistics.colder += u64::from(why == COLDER);
        agent.moves.placements[nic].note_leaving(key, now);
        agent.return_soon(key.0, key.1, why);
    }
    explain(agent, &samples, &keys, &choice.short);
}

/// Says of those that have to be hot enough, and wait, whether they are not or the NIC is full.
fn explain(agent: &mut Agent, samples: &[Sample], keys: &HashMap<u64, Key>, short: &[u64]) {
    let short: HashSet<u64> = short.iter().copied().collect();
    let (cold, full) = (Refusal::Cold.to_string(), Refusal::Full.to_string());
    for sample in samples.iter().filter(|sample| sample.place == At::Waits && sample.hot_from > 0) {
        let (was, is) = if short.contains(&sample.key) { (&cold, &full) } else { (&full, &cold) };
        if let Some(key) = keys.get(&sample.key)
            && let Some(connection) = named(&mut agent.sessions, *key)
            && connection.reason == *was
        {
            connection.reason = is.clone().into();
        }
    }
}

/// What is known of the connections of a NIC, and of those that wait for it.
#[derive(Default)]
struct Known {
    samples: Vec<Sample>,
    scene: Scene,
    /// By serial number, of those of which there are samples.
    keys: HashMap<u64, Key>,
    /// Of those on the NIC, and on their way there: how many, and their pages.
    connections: usize,
    pages: u32,
    /// The same of those that were to leave the NIC, for others or for any other reason, and have not for long.
    slow: (usize, u32),
}

impl Known {
    /// Connections and pages beyond these limits.
    fn over(&self, most: usize, most_pages: u64) -> (usize, u32) {
        (self.connections.saturating_sub(most), u64::from(self.pages).saturating_sub(most_pages) as u32)
    }

    /// Whether another connection, of so many pages, comes only if one leaves. While some leave nobody else has to, but
    /// their programs and attachers may take as long as they like: after a while they count as if they stayed.
    fn is_full(&self, most: usize, most_pages: u64, usual: u32) -> bool {
        let (slow, slow_pages) = self.slow;
        let pages = u64::from(self.pages) + u64::from(slow_pages) + u64::from(usual);
        self.connections + slow >= most || pages > most_pages
    }
}

/// Whose a connection is, and what a byte of it saves on the NIC as far as that was measured.
fn worth_of(agent: &Agent, (session, number, _): Key) -> (u32, u32) {
    let Some(Some(entry)) = agent.sessions.get(session as usize) else { return (0, WORTH) };
    let flow = entry.connections.get(number as usize).and_then(Option::as_ref).map(|connection| &connection.flow);
    let gain = agent.moves.gain.as_ref().zip(flow);
    (entry.user, gain.map_or(WORTH, |(gain, flow)| gain.worth(flow, entry.user, &entry.opening.program)))
}

fn samples(agent: &mut Agent, nic: usize, now: u64) -> Known {
    let (mut known, mut leaving) = (Known::default(), Vec::new());
    let memory = &agent.hardware[nic].memory;
    for (session, entry) in agent.sessions.iter().enumerate() {
        for connection in entry.iter().flat_map(|entry| entry.connections.iter().flatten()) {
            let Some(cid) = connection.cid.filter(|cid| cid.nic() == nic) else { continue };
            let hot_from = connection.block.hot_from();
            known.scene.by_heat |= hot_from > 0;
            let on_nic = connection.on_nic.as_deref().map(OnNic::memory);
            let pages = on_nic.map_or(0, |memory| pages(memory.receive.1, memory.send.1));
            if connection.is_leaving() || connection.must_return().is_some() {
                leaving.push(connection.serial);
                if agent.moves.placements[nic].leaves_slowly(connection.serial, now) {
                    known.slow = (known.slow.0 + 1, known.slow.1.saturating_add(pages));
                }
                continue;
            }
            known.connections += 1;
            known.pages = known.pages.saturating_add(pages);
            if connection.stage() == Stage::Nic && !connection.closed && !connection.opening {
                let record = read_record(memory, nic::slot(cid.slot()));
                let carried = record.map(|record| record.snd_una.wrapping_add(record.rcv_nxt));
                let key = (session as u32, connection.number(), connection.serial);
                let (user, worth) = worth_of(agent, key);
                known.samples.push(Sample { key: key.2, place: At::Nic, carried, pages, hot_from, worth, user });
                known.keys.insert(key.2, key);
                agent.moves.placements[nic].has_come(key.2);
            }
        }
    }
    agent.moves.placements[nic].note_still_leaving(&leaving, now);
    for key in agent.moves.placements[nic].waiting(now) {
        let (user, worth) = worth_of(agent, key);
        let connection = named(&mut agent.sessions, key).filter(|connection| connection.goes_by_itself(false));
        let hot_from = connection.as_ref().map_or(0, |connection| connection.block.hot_from());
        match connection.map(|connection| (connection.stage(), connection)) {
            Some((Stage::Kernel, connection)) => {
                let carried = Some(connection.block.load(block::TRAFFIC));
                known.samples.push(Sample { key: key.2, place: At::Waits, carried, pages: 0, hot_from, worth, user });
                known.keys.insert(key.2, key);
                known.scene.anybody_waits |= hot_from == 0;
            }
            Some((_, connection)) if connection.is_leaving() || connection.must_return().is_some() => {
                known.scene.anybody_waits |= hot_from == 0 && !agent.moves.placements[nic].leaves_slowly(key.2, now);
            }
            _ => agent.moves.placements[nic].forget(key.2),
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An attacher that does not bring back what has to leave a full NIC has its place, and no more.
    #[test]
    fn others_change_places_while_one_does_not_leave() {
        let known = Known { connections: 3, pages: 30, slow: (1, 10), ..Known::default() };
        assert!(known.is_full(4, u64::MAX, 10) && known.is_full(9, 49, 10));
        assert!(!known.is_full(5, u64::MAX, 10) && !known.is_full(9, 50, 10));
        // None of the others has to leave for it.
        assert_eq!((known.over(3, 30), known.over(2, 20)), ((0, 0), (1, 10)));
    }
}
