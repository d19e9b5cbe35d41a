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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::mpsc::{self, Receiver, Sender};

/// What the lock of a session's events protects.
#[derive(Debug)]
pub(crate) struct Events {
    /// A ring for each NIC.
    rings: Vec<Consumer<RingWords>>,
    pub(crate) known: Known,
    changes: Receiver<Change>,
    /// Connections that were between two owners when they were last checked.
    pub(super) between: Vec<u32>,
    /// Events of connections that are not known yet, while any thread is accepting one ([`Changes`]).
    unclaimed: Vec<Message>,
    /// Answers to posted buffers that have not been handled yet, by the number of the connection: the first sequence
    /// number that the NIC puts into each.
    pub(crate) posted: BTreeMap<u32, VecDeque<u32>>,
}

/// The session's connections, but for [`Changes`], and what the NICs call them.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) connections: Connections,
    /// For each NIC: cid and number of the connection that was noted last for each of its slots. [`NOBODY`] if none
    /// was.
    by_slot: [Vec<(Cid, u32)>; MAX_NICS],
    /// Numbers by cid of connections that were noted, and whose slot's entry in `by_slot` is another's now: one that
    /// has left the slot may be noted after the one that has come there.
    displaced: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>>,
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

/// Rounds in which a thread handles events that others left to it or that arrived meanwhile. After that other threads
/// wait for the lock instead of leaving their events, so that one of them takes over.
const MOST_ROUNDS: u32 = 64;

/// Most connections for which the listener is called after one release of the lock.
const MOST_CONCERNED: usize = 32;

/// A thread's time with the session's events, which it has locked, and the connections that it has found to be readable
/// or writable perhaps. The listener is called for these after the lock is released: it wakes threads, which may need
/// the lock and may get this thread's processor at once.
pub(crate) struct Round<'a> {
    shared: &'a Shared,
    pub(crate) events: &'a mut Events,
    concerned: [u32; MOST_CONCERNED],
    count: usize,
}

impl Round<'_> {
    /// Notes that a connection may have become readable or writable.
    #[inline]
    pub fn concern(&mut self, number: u32) {
        if self.count == MOST_CONCERNED {
            self.tell();
        }
        self.concerned[self.count] = number;
        self.count += 1;
    }

    #[cold]
    fn tell(&mut self) {
        let count = std::mem::take(&mut self.count);
        tell(self.shared, &self.concerned[..count]);
    }

    /// Whether the list of connections has room for at most one more.
    #[inline]
    fn is_full(&self) -> bool {
        self.count >= MOST_CONCERNED - 1
    }

    #[cold]
    fn apply_changes(&mut self) {
        self.shared.changes.any.store(false, Ordering::SeqCst);
        while let Ok(change) = self.events.changes.try_recv() {
            match change {
                Change::Joins(connection) => self.events.known.add(connection),
                Change::Leaves(address, number, cid) => self.events.known.remove(address, number, cid),
                Change::Accepted(connection) => {
                    connection.iter().for_each(|connection| self.claim(connection));
                    if self.shared.changes.accepting.fetch_sub(1, Ordering::SeqCst) == 1 {
                        self.events.unclaimed.clear();
                    }
                }
            }
        }
    }

    /// Gives a connection that was accepted the events that were kept for it.
    fn claim(&mut self, connection: &Connection) {
        // Another thread may have come across it already, and have counted events of it since.
        if connection.has_moved() {
            self.refresh(connection);
        }
        let cid = connection.cid();
        let claimed: Vec<Message> = self.events.unclaimed.extract_if(.., |message| message.cid == cid).collect();
        for message in claimed {
            self.on_event(&message);
        }
        self.concern(connection.number());
    }

    /// Handles events until there are none, or enough connections are concerned. Whether they are.
    #[inline(always)]
    pub(super) fn handle(&mut self) -> bool {
        if self.shared.has_moved() {
            self.check_moves();
        }
        for nic in 0..self.events.rings.len() {
            if self.events.rings[nic].has_message() {
                self.read_ring(nic);
            }
        }
        self.is_full()
    }

    /// Handles the events of one NIC.
    fn read_ring(&mut self, nic: usize) {
        // Several in a row for one connection count once.
        let mut last = None;
        while !self.is_full() {
            let ring = &mut self.events.rings[nic];
            let Some([first, mut second]) = ring.pop() else { break };
            if counts_bytes(first) {
                ring.pop_like(first, |more| {
                    second = add_length(second, more);
                    true
                });
            }
            let about = Message::from_words([first, second]).and_then(|message| self.on_event(&message));
            if let (Some(number), true) = (last, last != about) {
                self.concern(number);
            }
            last = about;
        }
        if let Some(number) = last {
            self.concern(number);
        }
        self.events.rings[nic].release();
    }

    #[inline(always)]
    fn on_event(&mut self, message: &Message) -> Option<u32> {
        let mut connection = self.events.known.find(message.cid);
        if connection.is_none() {
            // The first event since a move, or since the slot's previous occupant was looked up: find out whose it is.
            self.refresh_cids();
            connection = self.events.known.search(message.cid);
        }
        let Some(connection) = connection else {
            // It may be gone since: the others wait all the same.
            if message.operation == Operation::OsControl && message.kind == Control::Taken as u16 {
                self.concern_who_found_it_full(message.cid.nic());
            }
            self.keep(message);
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
                    self.events.posted.entry(connection.number()).or_default().push_back(message.address);
                }
                Some(Control::Fin) => connection.fin.store(true, Ordering::Release),
                // Whoever waits for this reads the ring's index.
                Some(Control::Taken) => {
                    let number = connection.number();
                    self.concern_who_found_it_full(message.cid.nic());
                    return Some(number);
                }
                Some(Control::Closed) => connection.set_ended(message.address),
                _ => return None,
            },
            _ => return None,
        }
        Some(connection.number())
    }

    /// The NIC has read messages. If its ring was full, and is not any more, each of its connections may go on: the
    /// event is only for the one of which it has read last.
    #[cold]
    fn concern_who_found_it_full(&mut self, nic: usize) {
        let shared = self.shared;
        let Some(lane) = [&shared.first].into_iter().chain(&shared.further).nth(nic) else { return };
        // Who notes that after this looks at the ring once more.
        fence(Ordering::SeqCst);
        let full_until = lane.full_until.load(RELAXED);
        if full_until == 0 {
            return;
        }
        let read = Consumer::<RingWords>::new(shared.memory.ring(at::area(nic) + at::COMMANDS)).position();
        if (read.wrapping_sub(full_until) as i64) < 0 {
            // Another event comes when it has read that far.
            return;
        }
        let _ = lane.full_until.compare_exchange(full_until, 0, RELAXED, RELAXED);
        let is_of = |connection: &&Arc<Connection>| connection.cid().nic() == nic;
        let all: Vec<u32> = self.events.known.connections.iter().flatten().filter(is_of).map(|one| one.number()).collect();
        all.into_iter().for_each(|number| self.concern(number));
    }

    /// Keeps an event of a connection that is not known, if a thread is accepting one.
    #[cold]
    fn keep(&mut self, message: &Message) {
        let unclaimed = &mut self.events.unclaimed;
        if self.shared.changes.accepting.load(Ordering::SeqCst) > 0 {
            // The older ones are more likely to be of connections that have left the NIC.
            if unclaimed.len() >= MOST_UNCLAIMED {
                unclaimed.drain(..MOST_UNCLAIMED / 2);
            }
            unclaimed.push(*message);
        }
    }

    /// Reads a connection's numbers anew, and what its NIC calls it, unless its program has closed it, or it has ended
    /// where it was.
    pub fn refresh(&mut self, connection: &Connection) {
        let earlier = connection.cid();
        if connection.refresh() {
            self.events.known.forget(connection.number(), earlier);
            self.events.posted.remove(&connection.number());
            self.events.known.note(connection);
        }
    }

    /// Learns the cids that connections got by moving.
    #[cold]
    fn refresh_cids(&mut self) {
        if self.shared.has_moved() {
            self.check_moves();
        }
        for number in std::mem::take(&mut self.events.between) {
            self.check_move(number, true);
        }
    }

    /// Handles moves: a connection that has moved may be readable and writable, whatever it was before.
    #[cold]
    fn check_moves(&mut self) {
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
            self.events.between.clear();
            (0..self.events.known.connections.len() as u32).for_each(|number| self.check_move(number, false));
            return;
        }
        moved.append(&mut self.events.between);
        moved.into_iter().for_each(|number| self.check_move(number, false));
    }

    /// Checks a connection that may have moved. One that is between two owners is checked later, unless `now`; one that
    /// a thread is using is refreshed when it is entered next.
    fn check_move(&mut self, number: u32, now: bool) {
        let Some(Some(connection)) = self.events.known.connections.get(number as usize) else { return };
        if !connection.has_moved() {
            return;
        }
        if !now && connection.owner() == Owner::Moving {
            if !self.events.between.contains(&number) {
                self.events.between.push(number);
            }
            return;
        }
        let connection = connection.clone();
        self.refresh(&connection);
        self.concern(number);
    }
}

impl Shared {
    /// Does something with the events locked, then calls the listener for the connections that were noted. None, with
    /// nothing done, if this thread has them locked, and runs a signal handler now.
    pub(crate) fn with_events<T>(&self, token: Token, what: impl FnOnce(&mut Round<'_>) -> T) -> Option<T> {
        let (done, left) = round(self, self.events.lock(token)?, what);
        if left {
            self.catch_up(token);
        }
        Some(done)
    }

    #[cold]
    pub(super) fn note_move(&self, connection: &Connection, token: Token) {
        self.with_events(token, |round| {
            if connection.has_moved() {
                round.refresh(connection);
                // Other threads, too, must check it anew.
                round.concern(connection.number());
            }
            if connection.has_moved() && connection.ended().is_none() {
                // It has ended on the NIC, which has said how by now.
                round.handle();
            }
        });
    }

    /// Whether there are events of the NIC's or moves that nobody handles: a thread that does so now goes on with those
    /// that are there.
    #[inline(always)]
    pub fn has_events(&self, token: Token) -> bool {
        self.has_moved() || self.events.lock_or_leave(token).is_some_and(|guard| look(self, guard, token))
    }

    #[inline(always)]
    pub(super) fn has_moved(&self) -> bool {
        self.moves.words()[0].load(Ordering::Acquire) != self.moves_seen.load(RELAXED) || self.early.load(RELAXED)
    }

    /// Handles the NIC's events, or leaves them to a thread that does so now; the listener is called for each
    /// connection that they concern.
    #[inline(never)]
    pub fn catch_up(&self, token: Token) {
        catch_up_here(self, token);
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

/// [`Shared::catch_up`], as a part of its caller.
#[inline(always)]
pub(super) fn catch_up_here(shared: &Shared, token: Token) {
    let guard = if shared.tired.load(RELAXED) { take_over(shared, token) } else { shared.events.lock_or_leave(token) };
    if guard.is_some_and(|guard| handle(shared, guard)) {
        go_on(shared, token);
    }
}

/// Does something with the events locked, and tells the listener of the connections that were noted. Also returns
/// whether other threads have left something to this one.
#[inline(always)]
fn round<T>(shared: &Shared, mut guard: LockGuard<'_, Events>, what: impl FnOnce(&mut Round<'_>) -> T) -> (T, bool) {
    let mut round = Round { shared, events: &mut guard, concerned: [0; MOST_CONCERNED], count: 0 };
    if shared.changes.any() {
        round.apply_changes();
    }
    let done = what(&mut round);
    let Round { concerned, count, .. } = &round;
    let left = guard.unlock();
    tell(shared, &concerned[..*count]);
    (done, left)
}

#[inline(always)]
fn tell(shared: &Shared, concerned: &[u32]) {
    concerned.iter().for_each(|number| shared.listener.0(*number));
}

/// Whether there are events of the NIC's.
fn look(shared: &Shared, guard: LockGuard<'_, Events>, token: Token) -> bool {
    let (has_message, left) = round(shared, guard, |round| round.events.has_message());
    if left {
        shared.catch_up(token);
    }
    has_message
}

/// Waits for the lock of the events, which a thread is about to give up that has handled them for others for long.
#[cold]
fn take_over(shared: &Shared, token: Token) -> Option<LockGuard<'_, Events>> {
    let guard = shared.events.lock(token)?;
    shared.tired.store(false, RELAXED);
    Some(guard)
}

/// Handles events. Whether there may be more: what does not fit into the list of those that are told is handled after
/// they are.
#[inline(always)]
fn handle(shared: &Shared, guard: LockGuard<'_, Events>) -> bool {
    let (is_full, left) = round(shared, guard, |round| round.handle());
    is_full | left
}

/// Further rounds of [`Shared::catch_up`].
#[cold]
fn go_on(shared: &Shared, token: Token) {
    for round in 1u32.. {
        let guard = if round < MOST_ROUNDS {
            shared.events.lock_or_leave(token)
        } else {
            shared.tired.store(true, RELAXED);
            std::thread::yield_now();
            // Others wait for the events by now. One of them goes on.
            shared.events.try_lock(token)
        };
        if !guard.is_some_and(|guard| handle(shared, guard)) {
            break;
        }
    }
}

impl Events {
    /// Those of a session that this many NICs serve.
    pub(super) fn new(memory: &Arc<Region>, nics: usize, changes: Receiver<Change>) -> Events {
        let rings = (0..nics).map(|nic| Consumer::new(memory.ring(at::area(nic) + at::EVENTS))).collect();
        Events { rings, known: Known::default(), changes, between: Vec::new(), unclaimed: Vec::new(), posted: BTreeMap::new() }
    }

    #[inline]
    fn has_message(&self) -> bool {
        self.rings.iter().any(Consumer::has_message)
    }
}

impl Known {
    fn add(&mut self, connection: Arc<Connection>) {
        let number = connection.number() as usize;
        if self.connections.len() <= number {
            self.connections.resize_with(number + 1, || None);
        }
        self.connections[number] = Some(connection);
    }

    fn remove(&mut self, address: usize, number: u32, cid: Cid) {
        if let Some(place) = self.connections.get_mut(number as usize)
            && place.as_ref().is_some_and(|known| Arc::as_ptr(known) as usize == address)
        {
            *place = None;
        }
        self.forget(number, cid);
    }

    /// The connection that was noted last for the slot, if this is what its NIC calls it.
    #[inline(always)]
    pub(super) fn find(&self, cid: Cid) -> Option<&Connection> {
        let (noted, number) = *self.by_slot[cid.nic()].get(cid.slot() as usize)?;
        // A connection that the NIC opens keeps its cid when it is open: numbers from before that are read anew first.
        if noted != cid {
            return None;
        }
        let connection = self.connections.get(number as usize)?.as_deref()?;
        (connection.cid() == cid && !connection.has_moved()).then_some(connection)
    }

    #[cold]
    pub(super) fn search(&mut self, cid: Cid) -> Option<&Connection> {
        let noted = self.by_slot[cid.nic()].get(cid.slot() as usize).filter(|(noted, _)| *noted == cid);
        let number = noted.map(|(_, number)| *number).or_else(|| self.displaced.get(&cid.0).copied())?;
        let found = self.connections.get(number as usize)?.clone().filter(|connection| connection.cid() == cid)?;
        self.note(&found);
        self.connections[number as usize].as_deref()
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

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::block;
    use baton_ring::Producer;

    /// Linux's number of a time-out.
    const ETIMEDOUT: u32 = 110;

    /// A program that only sends has room for long, and reads no events as long as it has. It learns that its
    /// connection has ended nevertheless, and has what was received before.
    #[test]
    fn who_only_sends_learns_of_the_end() {
        let memory = Arc::new(Region::private(at::HEAP + (1 << 16)).unwrap());
        let mut nic = Producer::<RingWords>::new(memory.ring(at::EVENTS));
        let set = |field, value: u32| memory.word32(at::block(0) + field).store(value, RELAXED);
        let (shared, cid) = (Shared::on(memory.clone()), Cid::new(5, 1));
        let connection = shared.unregistered();
        shared.represent(&connection, 0);
        for (base, size, place) in [(block::RECEIVE_BASE, block::RECEIVE_SIZE, 0), (block::SEND_BASE, block::SEND_SIZE, 4096)] {
            set(base, at::HEAP as u32 + place);
            set(size, 4096);
        }
        set(block::OWNER, Owner::Nic as u32);
        set(block::CID, cid.0);
        set(block::MOVES, 1);
        memory.word32(at::MOVES).store(1, Ordering::Release);
        assert_eq!(shared.enter(&connection, 1).map(|entered| entered.owner), Some(Owner::Nic));
        assert!(shared.send_at_once(&connection, 1, b"one"));
        let told = [
            Message::new(Operation::OsRecv, cid, 0, 7),
            Message::control(Operation::OsControl, Control::Closed, cid, ETIMEDOUT, 0),
        ];
        told.iter().for_each(|message| nic.push(message.to_words()).unwrap());
        nic.publish();
        set(block::ERROR, block::told(2));
        set(block::MOVES, 2);
        memory.word32(at::MOVED + 4).store(0, RELAXED);
        memory.word32(at::MOVES).store(2, Ordering::Release);
        assert!(!shared.send_at_once(&connection, 1, b"two"), "it has ended");
        let entered = shared.enter(&connection, 1).expect("nobody is inside");
        let error = shared.send(&connection, 1, b"two").expect_err("it has ended");
        assert_eq!((entered.owner, error.raw_os_error()), (Owner::Nic, Some(ETIMEDOUT as i32)));
        drop(entered);
        assert_eq!(shared.readiness(&connection, 1).unread, 7);
    }

    /// The agent is about to note that a connection has ended, of which the program has not noticed yet that the NIC
    /// has it: that is noticed first, and what the NIC has told counts.
    #[test]
    fn an_end_that_is_half_noted_hides_no_handoff() {
        let memory = Arc::new(Region::private(at::HEAP + (1 << 16)).unwrap());
        let mut nic = Producer::<RingWords>::new(memory.ring(at::EVENTS));
        let set = |field, value: u32| memory.word32(at::block(0) + field).store(value, RELAXED);
        let (shared, cid) = (Shared::on(memory.clone()), Cid::new(5, 1));
        let connection = shared.unregistered();
        shared.represent(&connection, 0);
        shared.catch_up(1);
        set(block::OWNER, Owner::Nic as u32);
        set(block::CID, cid.0);
        set(block::MOVES, 1);
        memory.word32(at::MOVES).store(1, Ordering::Release);
        let told = [
            Message::new(Operation::OsRecv, cid, 0, 7),
            Message::control(Operation::OsControl, Control::Closed, cid, ETIMEDOUT, 0),
        ];
        told.iter().for_each(|message| nic.push(message.to_words()).unwrap());
        nic.publish();
        set(block::ERROR, block::told(2));
        shared.catch_up(1);
        assert_eq!((connection.received.load(RELAXED), connection.ended()), (7, Some(ETIMEDOUT)));
        set(block::MOVES, 2);
        memory.word32(at::MOVES).store(2, Ordering::Release);
        shared.catch_up(1);
        assert_eq!((connection.received.load(RELAXED), connection.has_moved()), (7, false));
    }
}
