//! Handling of the NIC's events: finding their connections, and noticing moves.

use super::{Connections, RELAXED, Shared};
use crate::connection::Connection;
use baton_abi::layout::Owner;
use baton_abi::layout::{RING_MESSAGES, nic::MAX_NICS, session as at};
use baton_abi::{Cid, Control, Message, OF_ALL, Operation, add_length, counts_bytes};
use baton_linux::process::Undisturbed;
use baton_ring::{Consumer, LockGuard, Token, was_rung};
use baton_shm::{Region, RingWords};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::mpsc::{self, Receiver, Sender};

/// The state that the lock of a session's events protects.
#[derive(Debug)]
pub(crate) struct Events {
    /// A ring for each NIC.
    rings: Vec<Consumer<RingWords>>,
    pub(crate) known: Known,
    changes: Receiver<Change>,
    /// Connections that were being moved when they were last checked.
    pub(super) between: Vec<u32>,
    /// Events of connections that are not known yet, while any thread is accepting one ([`Changes`]).
    unclaimed: Vec<Message>,
    /// Answers to posted buffers that have not been handled yet, by the number of the connection: the first sequence
    /// number that the NIC puts into each.
    pub(crate) posted: BTreeMap<u32, VecDeque<u32>>,
}

/// The session's connections, without pending [`Changes`], and their cids.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) connections: Connections,
    /// For each NIC and each of its slots: cid and number of the connection that was last recorded there, [`NOBODY`] if
    /// none was.
    by_slot: [Vec<(Cid, u32)>; MAX_NICS],
    /// By cid, the numbers of recorded connections whose slot's entry in `by_slot` is another connection's now: the old
    /// connection of a slot may be recorded after the new one.
    displaced: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>>,
}

/// Connections that were added to the session or removed from it. A lock-free queue, which the next thread that locks
/// the events applies. So adding a connection never waits for a thread that holds the lock and has lost its processor.
#[derive(Debug)]
pub(crate) struct Changes {
    any: AtomicBool,
    list: Sender<Change>,
    /// Number of threads that are accepting a connection that the NIC has made, or registering one. Its first events
    /// may be read before its number is known, and are kept until then.
    accepting: AtomicU32,
}

#[derive(Debug)]
pub(super) enum Change {
    Joins(Arc<Connection>),
    /// The connection object at this address, with this number and cid, is removed.
    Leaves(usize, u32, Cid),
    /// A thread has accepted or registered this connection; None if it has failed to.
    Accepted(Option<Arc<Connection>>),
}

impl Changes {
    /// The queue of a session, and the receiving end for its [`Events`].
    pub(super) fn new() -> (Changes, Receiver<Change>) {
        let (list, taken) = mpsc::channel();
        (Changes { any: AtomicBool::new(false), list, accepting: AtomicU32::new(0) }, taken)
    }

    pub(super) fn add(&self, change: Change) {
        // A signal handler that interrupted this and locked the events would wait for this entry before its own.
        let _undisturbed = Undisturbed::begin();
        // This fails only if the session's events were dropped.
        let _ = self.list.send(change);
        self.any.store(true, Ordering::Release);
    }

    #[inline(always)]
    fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }
}

/// The entry of a slot for which no connection is recorded. No connection has this cid.
const NOBODY: (Cid, u32) = (Cid(0), u32::MAX);

/// Most events that are kept for connections that are being accepted: more than a ring holds.
const MOST_UNCLAIMED: usize = 2 * RING_MESSAGES;

/// Rounds in which a thread handles events that others left to it or that arrived meanwhile. After that other threads
/// wait for the lock instead of leaving their events, so that one of them takes over.
const MOST_ROUNDS: u32 = 64;

/// Most connections for which the listener is called after one release of the lock.
const MOST_CONCERNED: usize = 32;

/// The work of a thread that has locked the session's events, with the connections that it has found to be perhaps
/// readable or writable. The listener is called for these after the lock is released: it wakes threads, which may need
/// the lock and may get this thread's processor at once.
pub(crate) struct Round<'a> {
    shared: &'a Shared,
    pub(crate) events: &'a mut Events,
    concerned: [u32; MOST_CONCERNED],
    count: usize,
}

impl Round<'_> {
    /// Records that a connection may have become readable or writable.
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

    /// Handles the events that were kept for a connection that was just accepted.
    fn claim(&mut self, connection: &Connection) {
        // Refreshed only if it has moved: another thread may have done so already, and have counted events since.
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

    /// Handles events until there are none, or the list of concerned connections is full. Returns whether it is full.
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
        // Consecutive events of one connection concern it only once.
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
            // The first event since a move, or since the slot had another connection: search for the connection.
            self.refresh_cids();
            connection = self.events.known.search(message.cid);
        }
        let Some(connection) = connection else {
            // The connection may be gone, but others may wait for the same.
            if message.operation == Operation::OsControl && message.kind == Control::Taken as u16 {
                self.concern_other_waiters(message);
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
                // Threads that wait for this event read the ring's index.
                Some(Control::Taken) => {
                    let number = connection.number();
                    self.concern_other_waiters(message);
                    return Some(number);
                }
                Some(Control::Closed) => connection.set_ended(message.address),
                _ => return None,
            },
            _ => return None,
        }
        Some(connection.number())
    }

    /// The NIC has read commands. If its ring was full and no longer is, or the answer to another connection's command
    /// was lost, all of its connections may send again; the event itself names only the connection whose command was
    /// read last.
    #[cold]
    fn concern_other_waiters(&mut self, message: &Message) {
        let nic = message.cid.nic();
        if self.is_no_longer_full(nic) || message.address == OF_ALL {
            let is_of = |connection: &&Arc<Connection>| connection.cid().nic() == nic;
            let all: Vec<u32> = self.events.known.connections.iter().flatten().filter(is_of).map(|one| one.number()).collect();
            all.into_iter().for_each(|number| self.concern(number));
        }
    }

    /// Whether a NIC's ring was found full, and now is not.
    fn is_no_longer_full(&self, nic: usize) -> bool {
        let shared = self.shared;
        let Some(lane) = [&shared.first].into_iter().chain(&shared.further).nth(nic) else { return false };
        // A thread that sets `full_until` after this fence checks the ring once more.
        fence(Ordering::SeqCst);
        let full_until = lane.full_until.load(RELAXED);
        if full_until == 0 {
            return false;
        }
        let read = Consumer::<RingWords>::new(shared.memory.ring(at::area(nic) + at::COMMANDS)).position();
        if (read.wrapping_sub(full_until) as i64) < 0 {
            // The NIC sends another event when it has read that far.
            return false;
        }
        let _ = lane.full_until.compare_exchange(full_until, 0, RELAXED, RELAXED);
        true
    }

    /// Keeps an event of a connection that is not known, if a thread is accepting one.
    #[cold]
    fn keep(&mut self, message: &Message) {
        let unclaimed = &mut self.events.unclaimed;
        if self.shared.changes.accepting.load(Ordering::SeqCst) > 0 {
            // Older events are more likely to belong to connections that have left the NIC.
            if unclaimed.len() >= MOST_UNCLAIMED {
                unclaimed.drain(..MOST_UNCLAIMED / 2);
            }
            unclaimed.push(*message);
        }
    }

    /// Reads a connection's block and cid again, unless its program has closed it, or it has ended without a move.
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
        // If entries were overwritten while they were read, all connections are checked instead.
        let overtaken = self.shared.moves.words()[0].load(Ordering::Acquire).wrapping_sub(seen) >= at::MOVED_ENTRIES;
        if early || overtaken || moved.contains(&at::ANY) {
            self.events.between.clear();
            (0..self.events.known.connections.len() as u32).for_each(|number| self.check_move(number, false));
            return;
        }
        moved.append(&mut self.events.between);
        moved.into_iter().for_each(|number| self.check_move(number, false));
    }

    /// Checks a connection that may have moved. A connection that is being moved is checked later, unless `now`.
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
    /// Runs `what` with the events locked, then calls the listener for the connections that it has recorded. None,
    /// without running it, in a signal handler whose thread holds the lock.
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
                // Threads that wait for the connection must check it again.
                round.concern(connection.number());
            }
            if connection.has_moved() && connection.ended().is_none() {
                // Still marked as moved: the connection has ended on the NIC, and the event that says how is in the
                // ring.
                round.handle();
            }
        });
    }

    /// Whether there are NIC events or moves that no thread is handling. (A thread that is handling events also handles
    /// the new ones.)
    #[inline(always)]
    pub fn has_events(&self, token: Token) -> bool {
        self.has_moved() || self.events.lock_or_leave(token).is_some_and(|guard| look(self, guard, token))
    }

    #[inline(always)]
    pub(super) fn has_moved(&self) -> bool {
        self.moves.words()[0].load(Ordering::Acquire) != self.moves_seen.load(RELAXED) || self.early.load(RELAXED)
    }

    /// Handles the NIC's events, or leaves them to the thread that is handling events now; the listener is called for
    /// each connection that they concern.
    #[inline(never)]
    pub fn catch_up(&self, token: Token) {
        catch_up_here(self, token);
    }

    /// Begins to accept a connection that the NIC has made, or to register one; [`Shared::end_accepting`] follows.
    /// Until then events of connections that are not known are kept.
    pub(super) fn begin_accepting(&self) {
        self.changes.accepting.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends what [`Shared::begin_accepting`] began. If a connection was accepted, its number is known now, and the
    /// events that were kept for it are handled.
    pub(super) fn end_accepting(&self, connection: Option<Arc<Connection>>, token: Token) {
        self.changes.add(Change::Accepted(connection));
        self.catch_up(token);
    }
}

/// [`Shared::catch_up`], inlined into its caller.
#[inline(always)]
pub(super) fn catch_up_here(shared: &Shared, token: Token) {
    let guard = if shared.tired.load(RELAXED) { take_over(shared, token) } else { shared.events.lock_or_leave(token) };
    if guard.is_some_and(|guard| handle(shared, guard)) {
        go_on(shared, token);
    }
}

/// Runs `what` with the events locked, releases them, and calls the listener for the recorded connections. Also returns
/// whether other threads have left events to this one.
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

/// Waits for the lock of the events, to relieve a thread that has handled them for others for a long time.
#[cold]
fn take_over(shared: &Shared, token: Token) -> Option<LockGuard<'_, Events>> {
    let guard = shared.events.lock(token)?;
    shared.tired.store(false, RELAXED);
    Some(guard)
}

/// Handles events. Returns whether there may be more: if the list of concerned connections is full, the listener is
/// called before the next events are handled.
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
            // Because of `tired` other threads wait for the lock now; one of them takes over.
            shared.events.try_lock(token)
        };
        if !guard.is_some_and(|guard| handle(shared, guard)) {
            break;
        }
    }
}

impl Events {
    /// The events of a session that is served by this many NICs.
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

    /// The connection that was recorded last for the cid's slot, if it has this cid.
    #[inline(always)]
    pub(super) fn find(&self, cid: Cid) -> Option<&Connection> {
        let (noted, number) = *self.by_slot[cid.nic()].get(cid.slot() as usize)?;
        // A connection that the NIC opens has the same cid before and after it is established: if its numbers are from
        // before, they are read again first.
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

/// As [`Shared::catch_up`], for a thread that returns from a sleep and may not sleep again. Clears a doorbell that was
/// rung, so that the next event rings it for other threads.
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

    /// A program that only sends reads no events as long as it has room. It still learns that its connection has ended,
    /// and gets the bytes that were received before.
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
        let messages = [
            Message::new(Operation::OsRecv, cid, 0, 7),
            Message::control(Operation::OsControl, Control::Closed, cid, ETIMEDOUT, 0),
        ];
        messages.iter().for_each(|message| nic.push(message.to_words()).unwrap());
        nic.publish();
        set(block::ERROR, block::ended_on_nic(2));
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

    /// The agent is recording that a connection has ended, before the program has noticed that the connection is on the
    /// NIC: the program notices the handoff first, and the NIC's events count.
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
        let messages = [
            Message::new(Operation::OsRecv, cid, 0, 7),
            Message::control(Operation::OsControl, Control::Closed, cid, ETIMEDOUT, 0),
        ];
        messages.iter().for_each(|message| nic.push(message.to_words()).unwrap());
        nic.publish();
        set(block::ERROR, block::ended_on_nic(2));
        shared.catch_up(1);
        assert_eq!((connection.received.load(RELAXED), connection.ended()), (7, Some(ETIMEDOUT)));
        set(block::MOVES, 2);
        memory.word32(at::MOVES).store(2, Ordering::Release);
        shared.catch_up(1);
        assert_eq!((connection.received.load(RELAXED), connection.has_moved()), (7, false));
    }
}
