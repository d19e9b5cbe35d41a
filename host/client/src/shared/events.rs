//! Events of the NIC: which connections they are for, and moves.

use super::{Connections, RELAXED, Shared};
use crate::connection::Connection;
use baton_abi::layout::Owner;
use baton_abi::layout::{RING_MESSAGES, nic::MAX_NICS, session as at};
use baton_abi::{Cid, Control, Message, Operation, add_length, counts_bytes};
use baton_linux::process::Undisturbed;
use baton_ring::{Consumer, LockGuard, Token, was_rung};
use baton_shm::{Region, RingWords};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

#[derive(Debug)]
pub(crate) struct Events {
    /// A ring for each NIC.
    rings: Vec<Consumer<RingWords>>,
    /// The session's connections, but for [`Changes`].
    pub(crate) connections: Connections,
    changes: Receiver<Change>,
    /// For each NIC: cid and number of the connection that was noted last for each of its slots. [`NOBODY`] if none
    /// was.
    by_slot: [Vec<(Cid, u32)>; MAX_NICS],
    /// Numbers by cid of connections that were noted, and whose slot's entry in `by_slot` is another's now: one that
    /// has left the slot may be noted after the one that has come there.
    displaced: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>>,
    /// Connections that were between two owners when they were last checked.
    pub(super) between: Vec<u32>,
    /// Events of connections that are not known yet, while any thread is accepting one ([`Changes`]).
    unclaimed: Vec<Message>,
    /// Answers to posted buffers that have not been handled yet, by the number of the connection: the first sequence
    /// number that the NIC puts into each.
    pub(crate) posted: BTreeMap<u32, VecDeque<u32>>,
}

/// Connections that were added to the session or removed from it. A queue without a lock: the thread that locks the
/// events next applies it. So adding one never waits for a thread that holds a lock and has lost its processor.
#[derive(Debug)]
pub(crate) struct Changes {
    any: AtomicBool,
    list: Sender<Change>,
    /// Number of threads that are accepting a connection that the NIC has made, or registering one. Its first events
    /// may be read before its number is known; they are kept until then.
    accepting: AtomicU32,
}

#[derive(Debug)]
pub(super) enum Change {
    Joins(Arc<Connection>),
    /// The one at this address in memory leaves, which has this number and cid.
    Leaves(usize, u32, Cid),
    /// A thread has accepted or registered this one, or has failed to.
    Accepted(Option<Arc<Connection>>),
}

impl Changes {
    /// Those of a session, and where its events get them from.
    pub(super) fn new() -> (Changes, Receiver<Change>) {
        let (list, taken) = mpsc::channel();
        (Changes { any: AtomicBool::new(false), list, accepting: AtomicU32::new(0) }, taken)
    }

    pub(super) fn add(&self, change: Change) {
        // A signal handler that came in between would wait for this one, to take its own.
        let _undisturbed = Undisturbed::begin();
        // It fails only where the session's events have gone.
        let _ = self.list.send(change);
        self.any.store(true, Ordering::Release);
    }

    #[inline(always)]
    fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }
}

/// The entry of a slot for which no connection is noted. No connection has this cid.
const NOBODY: (Cid, u32) = (Cid(0), u32::MAX);

/// Most events that are kept for connections that are being accepted: more than a ring holds.
const MOST_UNCLAIMED: usize = 2 * RING_MESSAGES;

/// The lock of the session's events, with the connections for which the listener has to be called. It is called after
/// the lock is released: it wakes threads, which may need the lock and may get this thread's processor at once. Events
/// that other threads left to this one are handled then, too.
pub(crate) struct LockedEvents<'a> {
    shared: &'a Shared,
    token: Token,
    /// None only while this is dropped.
    guard: Option<LockGuard<'a, Events>>,
    concerned: Concerned,
}

/// Rounds in which a thread handles events that others left to it or that arrived meanwhile. After that other threads
/// wait for the lock instead of leaving their events, so that one of them takes over.
const MOST_ROUNDS: u32 = 64;

/// Most connections for which the listener is called after one release of the lock.
const MOST_CONCERNED: usize = 32;

/// Connections that may have become readable or writable.
struct Concerned {
    numbers: [u32; MOST_CONCERNED],
    count: usize,
}

impl Concerned {
    fn tell(&mut self, shared: &Shared) {
        let count = std::mem::take(&mut self.count);
        self.numbers[..count].iter().for_each(|number| shared.listener.0(*number));
    }
}

impl Deref for LockedEvents<'_> {
    type Target = Events;
    #[inline(always)]
    fn deref(&self) -> &Events {
        self.guard.as_deref().expect("it is there until this is dropped")
    }
}

impl DerefMut for LockedEvents<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Events {
        self.guard.as_deref_mut().expect("it is there until this is dropped")
    }
}

impl LockedEvents<'_> {
    /// Notes that a connection may have become readable or writable.
    #[inline]
    pub fn concern(&mut self, number: u32) {
        if self.concerned.count == MOST_CONCERNED {
            self.concerned.tell(self.shared);
        }
        self.concerned.numbers[self.concerned.count] = number;
        self.concerned.count += 1;
    }

    /// Whether the list of connections has room for at most one more.
    #[inline]
    fn is_full(&self) -> bool {
        self.concerned.count >= MOST_CONCERNED - 1
    }

    #[cold]
    fn apply_changes(&mut self) {
        self.shared.changes.any.store(false, Ordering::SeqCst);
        while let Ok(change) = self.changes.try_recv() {
            match change {
                Change::Joins(connection) => {
                    let number = connection.number() as usize;
                    if self.connections.len() <= number {
                        self.connections.resize_with(number + 1, || None);
                    }
                    self.connections[number] = Some(connection);
                }
                Change::Leaves(address, number, cid) => {
                    if let Some(place) = self.connections.get_mut(number as usize)
                        && place.as_ref().is_some_and(|known| Arc::as_ptr(known) as usize == address)
                    {
                        *place = None;
                    }
                    self.forget(number, cid);
                }
                Change::Accepted(connection) => {
                    connection.iter().for_each(|connection| self.claim(connection));
                    if self.shared.changes.accepting.fetch_sub(1, Ordering::SeqCst) == 1 {
                        self.unclaimed.clear();
                    }
                }
            }
        }
    }

    /// Gives a connection that was accepted the events that were kept for it.
    fn claim(&mut self, connection: &Connection) {
        // Another thread may have come across it already, and have counted events of it since.
        if connection.has_moved() {
            refresh(self, connection);
        }
        let cid = connection.cid();
        let claimed: Vec<Message> = self.unclaimed.extract_if(.., |message| message.cid == cid).collect();
        let connections = std::mem::take(&mut self.connections);
        for message in claimed {
            self.on_event(&connections, &message);
        }
        self.connections = connections;
        self.concern(connection.number());
    }

    /// Handles events until there are none, or enough connections are concerned.
    fn handle(&mut self) {
        let connections = std::mem::take(&mut self.connections);
        if self.shared.has_moved() {
            self.check_moves(&connections);
        }
        for nic in 0..self.rings.len() {
            self.read_ring(&connections, nic);
        }
        self.connections = connections;
    }

    /// Handles the events of one NIC.
    fn read_ring(&mut self, connections: &Connections, nic: usize) {
        // Several in a row for one connection count once.
        let mut last = None;
        while !self.is_full()
            && let Some([first, mut second]) = self.rings[nic].pop()
        {
            if counts_bytes(first) {
                self.rings[nic].pop_like(first, |more| {
                    second = add_length(second, more);
                    true
                });
            }
            let about = Message::from_words([first, second]).and_then(|message| self.on_event(connections, &message));
            if let (Some(number), true) = (last, last != about) {
                self.concern(number);
            }
            last = about;
        }
        if let Some(number) = last {
            self.concern(number);
        }
        self.rings[nic].release();
    }

    #[inline]
    fn on_event(&mut self, connections: &Connections, message: &Message) -> Option<u32> {
        let mut connection = self.find(connections, message.cid);
        if connection.is_none() {
            // The first event since a move, or since the slot's previous occupant was looked up: find out whose it is.
            self.refresh_cids(connections);
            connection = self.search(connections, message.cid);
        }
        let Some(connection) = connection else {
            if self.shared.changes.accepting.load(Ordering::SeqCst) > 0 {
                // The older ones are more likely to be of connections that have left the NIC.
                if self.unclaimed.len() >= MOST_UNCLAIMED {
                    self.unclaimed.drain(..MOST_UNCLAIMED / 2);
                }
                self.unclaimed.push(*message);
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
                    self.posted.entry(connection.number()).or_default().push_back(message.address);
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

    /// Learns the cids that connections got by moving.
    #[cold]
    fn refresh_cids(&mut self, connections: &Connections) {
        if self.shared.has_moved() {
            self.check_moves(connections);
        }
        for number in std::mem::take(&mut self.between) {
            self.check_move(connections, number, true);
        }
    }

    /// Handles moves: a connection that has moved may be readable and writable, whatever it was before.
    #[cold]
    fn check_moves(&mut self, connections: &Connections) {
        let early = self.shared.early.swap(false, Ordering::AcqRel);
        let (seen, moves) = (self.shared.moves_seen.load(RELAXED), self.shared.moves.words()[0].load(Ordering::Acquire));
        self.shared.moves_seen.store(moves, RELAXED);
        let missed = moves.wrapping_sub(seen);
        let entry = |at: u32| {
            let entry = seen.wrapping_add(at) % at::MOVED_ENTRIES;
            self.shared.memory.word32(at::MOVED + 4 * entry as usize).load(Ordering::Acquire)
        };
        let mut moved: Vec<u32> = (0..missed.min(at::MOVED_ENTRIES)).map(entry).collect();
        // Entries that were overwritten while they were read do not count.
        let overtaken = self.shared.moves.words()[0].load(Ordering::Acquire).wrapping_sub(seen) >= at::MOVED_ENTRIES;
        if early || overtaken || moved.contains(&at::ANY) {
            self.between.clear();
            (0..connections.len() as u32).for_each(|number| self.check_move(connections, number, false));
            return;
        }
        moved.append(&mut self.between);
        moved.into_iter().for_each(|number| self.check_move(connections, number, false));
    }

    /// Checks a connection that may have moved. One that is between two owners is checked later, unless `now`; one that
    /// a thread is using is refreshed when it is entered next.
    fn check_move(&mut self, connections: &Connections, number: u32, now: bool) {
        let Some(Some(connection)) = connections.get(number as usize) else { return };
        if !connection.has_moved() {
            return;
        }
        if !now && connection.owner() == Owner::Moving {
            if !self.between.contains(&number) {
                self.between.push(number);
            }
            return;
        }
        refresh(self, connection);
        self.concern(number);
    }

    /// Frees the events, and tells whom something concerns. Whether other threads have left something.
    #[inline(always)]
    fn unlock(&mut self) -> bool {
        let left = self.guard.take().is_some_and(LockGuard::unlock);
        if self.concerned.count > 0 {
            self.concerned.tell(self.shared);
        }
        left
    }
}

impl Drop for LockedEvents<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.unlock() {
            self.shared.catch_up(self.token);
        }
    }
}

impl Shared {
    /// Locks the events. None if this thread has them locked, and runs a signal handler now.
    #[inline]
    pub(crate) fn lock_events(&self, token: Token) -> Option<LockedEvents<'_>> {
        self.events.lock(token).map(|guard| self.locked(guard, token))
    }

    #[inline(always)]
    fn locked<'a>(&'a self, guard: LockGuard<'a, Events>, token: Token) -> LockedEvents<'a> {
        let concerned = Concerned { numbers: [0; MOST_CONCERNED], count: 0 };
        let mut events = LockedEvents { shared: self, token, guard: Some(guard), concerned };
        if self.changes.any() {
            events.apply_changes();
        }
        events
    }

    #[cold]
    pub(super) fn note_move(&self, connection: &Connection, token: Token) {
        if let Some(mut events) = self.lock_events(token)
            && connection.has_moved()
        {
            refresh(&mut events, connection);
            // Other threads, too, must check it anew.
            events.concern(connection.number());
        }
    }

    /// Whether there are events of the NIC's or moves that nobody handles: a thread that does so now goes on with those
    /// that are there.
    #[inline(always)]
    pub fn has_events(&self, token: Token) -> bool {
        self.has_moved() || self.events.lock_or_leave(token).is_some_and(|guard| self.locked(guard, token).has_message())
    }

    #[inline(always)]
    pub(super) fn has_moved(&self) -> bool {
        self.moves.words()[0].load(Ordering::Acquire) != self.moves_seen.load(RELAXED) || self.early.load(RELAXED)
    }

    /// Handles the NIC's events, or leaves them to a thread that does so now; the listener is called for each
    /// connection that they concern.
    #[inline(never)]
    pub fn catch_up(&self, token: Token) {
        for round in 0u32.. {
            let guard = match round {
                0 if self.tired.load(RELAXED) => self.events.lock(token),
                ..MOST_ROUNDS => self.events.lock_or_leave(token),
                // Others wait for the events by now. One of them goes on.
                _ => {
                    self.tired.store(true, RELAXED);
                    std::thread::yield_now();
                    self.events.try_lock(token)
                }
            };
            let Some(guard) = guard else { break };
            if round == 0 {
                self.tired.store(false, RELAXED);
            }
            let has_more = if self.has_moved() || guard.has_message() || self.changes.any() {
                let mut events = self.locked(guard, token);
                events.handle();
                // What does not fit into the list of those that are told is handled after they are.
                events.is_full() | events.unlock()
            } else {
                guard.unlock()
            };
            if !has_more {
                break;
            }
        }
    }

    /// Begins to accept a connection that the NIC has made, or to register one; [`Shared::end_accepting`] follows.
    /// Until then events of connections that are not known are kept.
    pub(super) fn begin_accepting(&self) {
        self.changes.accepting.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends what [`Shared::begin_accepting`] began. The connection, if one was accepted, is known by its number now: it
    /// gets the events that were kept for it.
    pub(super) fn end_accepting(&self, connection: Option<Arc<Connection>>, token: Token) {
        self.changes.add(Change::Accepted(connection));
        self.catch_up(token);
    }
}

impl Events {
    /// Those of a session that this many NICs serve.
    pub(super) fn new(memory: &Arc<Region>, nics: usize, changes: Receiver<Change>) -> Events {
        let rings = (0..nics).map(|nic| Consumer::new(memory.ring(at::area(nic) + at::EVENTS))).collect();
        Events {
            rings,
            connections: Vec::new(),
            changes,
            by_slot: Default::default(),
            displaced: HashMap::default(),
            between: Vec::new(),
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

    fn forget(&mut self, number: u32, cid: Cid) {
        let noted = (cid, number);
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
    events.forget(connection.number(), connection.cid());
    events.posted.remove(&connection.number());
    connection.refresh();
    events.note(connection);
}
