//! Events of the NIC: which connections they are for, and moves.

use super::{Connections, RELAXED, Shared};
use crate::connection::Connection;
use baton_abi::layout::Owner;
use baton_abi::layout::{RING_MESSAGES, nic::MAX_NICS, session as at};
use baton_abi::{Cid, Control, Message, Operation, add_length, counts_bytes};
use baton_ring::{Consumer, Token, was_rung};
use baton_shm::{Region, RingWords};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

#[derive(Debug)]
pub(crate) struct Events {
    /// A ring for each NIC.
    rings: Vec<Consumer<RingWords>>,
    /// For each NIC: cid and number of the connection that was noted last for each of its slots. [`NOBODY`] if none
    /// was.
    by_slot: [Vec<(Cid, u32)>; MAX_NICS],
    /// Numbers by cid of connections that were noted, and whose slot's entry in `by_slot` is another's now: one that
    /// has left the slot may be noted after the one that has come there.
    displaced: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>>,
    /// Connections that were between two owners when they were last checked.
    pub(super) between: Vec<u32>,
    /// Number of threads that are accepting a connection that the NIC has made. Its first events may be read before its
    /// number is known; they are kept here until then.
    accepting: u32,
    unclaimed: Vec<Message>,
    /// Answers to posted buffers that have not been handled yet, by the number of the connection: the first sequence
    /// number that the NIC puts into each.
    pub(crate) posted: BTreeMap<u32, VecDeque<u32>>,
}

/// The entry of a slot for which no connection is noted. No connection has this cid.
const NOBODY: (Cid, u32) = (Cid(0), u32::MAX);

/// Most events that are kept for connections that are being accepted: more than a ring holds.
const MOST_UNCLAIMED: usize = 2 * RING_MESSAGES;

impl Shared {
    #[cold]
    pub(super) fn note_move(&self, connection: &Connection, token: Token) {
        if let Some(mut events) = self.events.lock(token)
            && connection.has_moved()
        {
            refresh(&mut events, connection);
            // Other threads, too, must check it anew.
            self.listener.0(connection.number());
        }
    }

    /// Whether there are events of the NIC's or moves that [`Shared::catch_up`] has not handled.
    #[inline(always)]
    pub fn has_events(&self, token: Token) -> bool {
        self.has_moved() || self.events.lock(token).is_some_and(|events| events.has_message())
    }

    #[inline(always)]
    pub(super) fn has_moved(&self) -> bool {
        self.moves.words()[0].load(Ordering::Acquire) != self.moves_seen.load(RELAXED) || self.early.load(RELAXED)
    }

    /// Handles the NIC's events; the listener is called for each connection that they concern.
    #[inline(never)]
    pub fn catch_up(&self, token: Token) {
        let Some(mut events) = self.events.lock(token) else { return };
        if self.has_moved() {
            self.check_moves(&mut events, &self.connections.read().unwrap_or_else(PoisonError::into_inner));
        }
        if !events.has_message() {
            return;
        }
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        for nic in 0..events.rings.len() {
            self.read_ring(&mut events, &connections, nic);
        }
    }

    /// Handles the events of one NIC.
    fn read_ring(&self, events: &mut Events, connections: &Connections, nic: usize) {
        // Several in a row for one connection cause one call.
        let mut last = None;
        while let Some([first, mut second]) = events.rings[nic].pop() {
            if counts_bytes(first) {
                events.rings[nic].pop_like(first, |more| {
                    second = add_length(second, more);
                    true
                });
            }
            let about = Message::from_words([first, second]).and_then(|message| self.on_event(events, connections, &message));
            if let (Some(number), true) = (last, last != about) {
                self.listener.0(number);
            }
            last = about;
        }
        if let Some(number) = last {
            self.listener.0(number);
        }
        events.rings[nic].release();
    }

    #[inline]
    pub(super) fn on_event(&self, events: &mut Events, connections: &Connections, message: &Message) -> Option<u32> {
        let mut connection = events.find(connections, message.cid);
        if connection.is_none() {
            // The first event since a move, or since the slot's previous occupant was looked up: find out whose it is.
            self.refresh_cids(events, connections);
            connection = events.search(connections, message.cid);
        }
        let Some(connection) = connection else {
            if events.accepting > 0 {
                // The older ones are more likely to be of connections that have left the NIC.
                if events.unclaimed.len() >= MOST_UNCLAIMED {
                    events.unclaimed.drain(..MOST_UNCLAIMED / 2);
                }
                events.unclaimed.push(*message);
            }
            return None;
        };
        let add = |to: &AtomicU32| to.store(to.load(RELAXED).wrapping_add(message.length), RELAXED);
        match message.operation {
            Operation::OsRecv => {
                connection.prefetch_memory(message.length);
                add(&connection.received);
            }
            Operation::OsAck => add(&connection.room_ends),
            Operation::OsControl => match Control::from_number(message.kind) {
                Some(Control::Posted) => {
                    events.posted.entry(connection.number()).or_default().push_back(message.address);
                }
                Some(Control::Fin) => connection.fin.store(true, Ordering::Release),
                // Whoever waits for this reads the ring's index.
                Some(Control::Taken) => {}
                Some(Control::Closed) => connection.set_ended(message.address),
                _ => return None,
            },
            _ => return None,
        }
        Some(connection.number())
    }

    /// Begins to accept a connection that the NIC has made, or to register one; [`Shared::end_accepting`] follows.
    /// Until then events of connections that are not known are kept.
    pub(super) fn begin_accepting(&self, token: Token) {
        if let Some(mut events) = self.events.lock(token) {
            events.accepting += 1;
        }
    }

    /// Ends what [`Shared::begin_accepting`] began. The connection, if one was accepted, is known by its number now: it
    /// gets the events that were kept for it.
    pub(super) fn end_accepting(&self, connection: Option<&Connection>, token: Token) {
        let Some(mut events) = self.events.lock(token) else { return };
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = connection {
            // Another thread may have come across it already, and have counted events of it since.
            if connection.has_moved() {
                refresh(&mut events, connection);
            }
            let cid = connection.cid();
            let claimed: Vec<Message> = events.unclaimed.extract_if(.., |message| message.cid == cid).collect();
            for message in claimed {
                self.on_event(&mut events, &connections, &message);
            }
            self.listener.0(connection.number());
        }
        events.accepting = events.accepting.saturating_sub(1);
        if events.accepting == 0 {
            events.unclaimed.clear();
        }
    }

    /// Learns the cids that connections got by moving.
    #[cold]
    pub(super) fn refresh_cids(&self, events: &mut Events, connections: &Connections) {
        if self.has_moved() {
            self.check_moves(events, connections);
        }
        for number in std::mem::take(&mut events.between) {
            self.check_move(events, connections, number, true);
        }
    }

    /// Handles moves: a connection that has moved may be readable and writable, whatever it was before.
    #[cold]
    pub(super) fn check_moves(&self, events: &mut Events, connections: &Connections) {
        let early = self.early.swap(false, Ordering::AcqRel);
        let (seen, moves) = (self.moves_seen.load(RELAXED), self.moves.words()[0].load(Ordering::Acquire));
        self.moves_seen.store(moves, RELAXED);
        let missed = moves.wrapping_sub(seen);
        let entry = |at: u32| {
            let entry = seen.wrapping_add(at) % at::MOVED_ENTRIES;
            self.memory.word32(at::MOVED + 4 * entry as usize).load(Ordering::Acquire)
        };
        let mut moved: Vec<u32> = (0..missed.min(at::MOVED_ENTRIES)).map(entry).collect();
        // Entries that were overwritten while they were read do not count.
        let overtaken = self.moves.words()[0].load(Ordering::Acquire).wrapping_sub(seen) >= at::MOVED_ENTRIES;
        if early || overtaken || moved.contains(&at::ANY) {
            events.between.clear();
            (0..connections.len() as u32).for_each(|number| self.check_move(events, connections, number, false));
            return;
        }
        moved.append(&mut events.between);
        moved.into_iter().for_each(|number| self.check_move(events, connections, number, false));
    }

    /// Checks a connection that may have moved. One that is between two owners is checked later, unless `now`; one that
    /// a thread is using is refreshed when it is entered next.
    pub(super) fn check_move(&self, events: &mut Events, connections: &Connections, number: u32, now: bool) {
        let Some(Some(connection)) = connections.get(number as usize) else { return };
        if !connection.has_moved() {
            return;
        }
        if !now && connection.owner() == Owner::Moving {
            if !events.between.contains(&number) {
                events.between.push(number);
            }
            return;
        }
        refresh(events, connection);
        self.listener.0(number);
    }
}

impl Events {
    /// Those of a session that this many NICs serve.
    pub(super) fn new(memory: &Arc<Region>, nics: usize) -> Events {
        let rings = (0..nics).map(|nic| Consumer::new(memory.ring(at::area(nic) + at::EVENTS))).collect();
        Events {
            rings,
            by_slot: Default::default(),
            displaced: HashMap::default(),
            between: Vec::new(),
            accepting: 0,
            unclaimed: Vec::new(),
            posted: BTreeMap::new(),
        }
    }

    #[inline]
    fn has_message(&self) -> bool {
        self.rings.iter().any(Consumer::has_message)
    }

    #[inline]
    pub(super) fn find<'a>(&self, connections: &'a Connections, cid: Cid) -> Option<&'a Connection> {
        let (noted, number) = *self.by_slot[cid.nic()].get(cid.slot() as usize)?;
        // A connection that the NIC opens keeps its cid when it is open: numbers from before that are read anew first.
        let connection = connections.get(number as usize)?.as_deref().filter(|_| noted == cid)?;
        (connection.cid() == cid && !connection.has_moved()).then_some(connection)
    }

    #[cold]
    pub(super) fn search<'a>(&mut self, connections: &'a Connections, cid: Cid) -> Option<&'a Connection> {
        let noted = self.by_slot[cid.nic()].get(cid.slot() as usize).filter(|(noted, _)| *noted == cid);
        let number = noted.map(|(_, number)| *number).or_else(|| self.displaced.get(&cid.0).copied())?;
        let found = connections.get(number as usize)?.as_deref().filter(|connection| connection.cid() == cid)?;
        self.note(found);
        Some(found)
    }

    pub(super) fn forget(&mut self, connection: &Connection) {
        let cid = connection.cid();
        let noted = (cid, connection.number());
        if self.displaced.get(&cid.0) == Some(&noted.1) {
            self.displaced.remove(&cid.0);
        }
        if let Some(last) = self.by_slot[cid.nic()].get_mut(cid.slot() as usize)
            && *last == noted
        {
            *last = NOBODY;
        }
    }

    pub(super) fn note(&mut self, connection: &Connection) {
        let cid = connection.cid();
        if cid == NOBODY.0 {
            return;
        }
        let (by_slot, slot) = (&mut self.by_slot[cid.nic()], cid.slot() as usize);
        if by_slot.len() <= slot {
            by_slot.resize(slot + 1, NOBODY);
        }
        self.displaced.remove(&cid.0);
        let (last, number) = std::mem::replace(&mut by_slot[slot], (cid, connection.number()));
        if last != NOBODY.0 && last != cid {
            self.displaced.insert(last.0, number);
        }
    }
}

/// As [`Shared::catch_up`], for a thread that comes back from sleeping and may not sleep again. It clears a doorbell
/// that was rung, so that the doorbell is rung for other threads at the next event.
pub fn catch_up_for_others(shared: &Shared, token: Token) {
    if was_rung(shared.memory.word32(at::PROGRAM_SLEEPING)) {
        shared.clear_bell();
    }
    shared.catch_up(token);
}

pub(crate) fn refresh(events: &mut Events, connection: &Connection) {
    events.forget(connection);
    events.posted.remove(&connection.number());
    connection.refresh();
    events.note(connection);
}
