//! The workers of one NIC, as one of them sees the others: rings with a single producer and a single consumer between any two, whose
//! bucket is whose, and what is under way from one to another. No locks.

use crate::custody::Slot;
use crate::offloaded::Pending;
use baton_abi::{Cid, Message};
use baton_device::Frame;
use baton_ring::{go_to_sleep, needs_doorbell, wake_up};
use baton_rss::{BUCKETS, From, Key, Move, NIBBLES, Table, Toeplitz};
use baton_shm::Region;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rtrb::{Consumer, Producer, RingBuffer};
use std::collections::VecDeque;
use std::sync::Arc;

/// The worker that serves the agent's ring and the programs', and decides who gets which bucket.
pub(crate) const FRONT: usize = 0;

/// Parcels that a ring holds.
const DEPTH: usize = 1024;

/// Frames that wait for a bucket that is under way; what comes beyond is dropped, as by any full queue.
const HELD: usize = 4096;

/// What one worker gives another.
pub(crate) enum Parcel {
    /// A frame of a bucket's, from the wire or from the kernel.
    Frame(u8, From, Frame),
    /// The agent's command about a connection.
    Command(u8, Message),
    /// A session's message about a connection.
    Ask(u8, u32, Message),
    /// To the front: news for a session's program.
    Tell(u32, Cid, Pending),
    /// To the front: a message for the agent.
    Agent(Message),
    /// A session has come, or gone.
    Attach(u32, Arc<Region>),
    Detach(u32),
    /// Frames may flow.
    Start,
    /// Other offloads.
    Offloads(Box<crate::worker::Offloads>),
    /// Another hash key; every bucket is the front's just now.
    Key(Box<Key>),
    /// A bucket is about to change hands: nothing of it is sent to the old owner any more.
    Pause(Move),
    /// To the old owner: nothing more comes from here.
    Paused(Move),
    /// The bucket's connections, by way of the front, so that their news stays in order.
    Adopt(Move, Box<Contents>),
    /// The bucket has changed hands.
    Moved(Move),
}

/// What goes with a bucket.
pub(crate) struct Contents {
    /// Connections on the NIC.
    pub slots: Vec<Slot>,
    /// The kernel's, for which the NIC acknowledges.
    pub acknowledged: Vec<baton_active_ack::Entry>,
}

/// Whose a bucket is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Mine,
    Other(usize),
    /// On its way; what is for it waits here.
    UnderWay,
}

/// The registers of a card that distributes frames by itself: the indirection table, then the tables of its Toeplitz hash, words of
/// 4 bytes.
#[derive(Clone)]
pub struct Registers(Arc<Region>);

impl Registers {
    /// Bytes that they have.
    pub const BYTES: usize = 4 * (BUCKETS + 16 * NIBBLES);

    /// Over memory that has as many. None if it has not.
    pub fn new(memory: Arc<Region>) -> Option<Registers> {
        (memory.len() >= Self::BYTES).then_some(Registers(memory))
    }

    fn set(&self, bucket: u8, worker: u8) {
        self.0.word32(4 * usize::from(bucket)).store(u32::from(worker), Ordering::SeqCst);
    }

    fn set_hash(&self, hash: &Toeplitz) {
        for (at, word) in hash.tables().enumerate() {
            self.0.word32(4 * (BUCKETS + at)).store(word, Ordering::SeqCst);
        }
    }
}

/// What all workers see.
struct Shared {
    sleeping: Vec<AtomicU32>,
    /// Connections that each has.
    connections: Vec<AtomicU64>,
    /// Frames of each bucket that each worker has seen, ever.
    loads: Vec<[AtomicU64; BUCKETS]>,
}

/// A ring to another worker, and what found it full.
struct Outbox {
    ring: Producer<Parcel>,
    overflow: VecDeque<Parcel>,
    /// Something was put in that its doorbell has not been rung for.
    told: bool,
}

/// A bucket that is about to leave this worker.
pub(crate) struct Leaving {
    pub which: Move,
    /// Others that still may send something of it.
    missing: usize,
    /// Since when its frames come here no more, but for those that wait in this worker's queues.
    pub switched: Option<u64>,
    /// Frames taken from either queue since, and whether it was empty.
    pub taken: [(usize, bool); 2],
}

/// A worker's view of the others.
pub struct Peers {
    me: usize,
    inboxes: Vec<Option<Consumer<Parcel>>>,
    outboxes: Vec<Option<Outbox>>,
    shared: Arc<Shared>,
    registers: Option<Registers>,
    hash: Toeplitz,
    table: Table,
    under_way: Vec<Option<Vec<Parcel>>>,
    pub(crate) leaving: Vec<Leaving>,
    next_inbox: usize,
}

/// Peers for so many workers, every bucket the first one's. With `registers` frames come to the worker that the table names, without them all
/// to the first.
pub fn crossbar(workers: usize, key: &Key, registers: Option<Registers>) -> Vec<Peers> {
    let workers = workers.clamp(1, baton_rss::MOST_WORKERS);
    let shared = Arc::new(Shared {
        sleeping: (0..workers).map(|_| AtomicU32::new(0)).collect(),
        connections: (0..workers).map(|_| AtomicU64::new(0)).collect(),
        loads: (0..workers).map(|_| [const { AtomicU64::new(0) }; BUCKETS]).collect(),
    });
    if let Some(registers) = &registers {
        registers.set_hash(&Toeplitz::new(key));
        (0..BUCKETS).for_each(|bucket| registers.set(bucket as u8, FRONT as u8));
    }
    let peers = (0..workers).map(|me| Peers {
        me,
        inboxes: (0..workers).map(|_| None).collect(),
        outboxes: (0..workers).map(|_| None).collect(),
        shared: shared.clone(),
        registers: registers.clone(),
        hash: Toeplitz::new(key),
        table: [FRONT as u8; BUCKETS],
        under_way: (0..BUCKETS).map(|_| None).collect(),
        leaving: Vec::new(),
        next_inbox: 0,
    });
    let mut peers: Vec<Peers> = peers.collect();
    for from in 0..workers {
        for to in (0..workers).filter(|to| *to != from) {
            let (producer, consumer) = RingBuffer::new(DEPTH);
            peers[from].outboxes[to] = Some(Outbox { ring: producer, overflow: VecDeque::new(), told: false });
            peers[to].inboxes[from] = Some(consumer);
        }
    }
    peers
}

impl Peers {
    /// This worker's number.
    pub(crate) fn me(&self) -> usize {
        self.me
    }

    pub(crate) fn is_front(&self) -> bool {
        self.me == FRONT
    }

    pub(crate) fn workers(&self) -> usize {
        self.outboxes.len()
    }

    /// All others.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.workers()).filter(move |other| *other != me)
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    pub(crate) fn hash(&self) -> &Toeplitz {
        &self.hash
    }

    pub(crate) fn place(&self, bucket: u8) -> Place {
        let at = usize::from(bucket) % BUCKETS;
        if self.under_way[at].is_some() {
            return Place::UnderWay;
        }
        match usize::from(self.table[at]) {
            owner if owner == self.me => Place::Mine,
            owner => Place::Other(owner),
        }
    }

    /// Gives another worker something. It comes after all that it was given before.
    pub(crate) fn send(&mut self, to: usize, parcel: Parcel) {
        let Some(Some(outbox)) = self.outboxes.get_mut(to) else { return };
        outbox.told = true;
        outbox.overflow.push_back(parcel);
        outbox.flush();
    }

    /// Whether there is room for what can be done without: frames, and news that can wait.
    pub(crate) fn has_room(&self, to: usize) -> bool {
        self.outboxes[to].as_ref().is_some_and(|outbox| outbox.overflow.is_empty() && outbox.ring.slots() > 0)
    }

    /// What another worker has given, each in its turn.
    pub(crate) fn receive(&mut self) -> Option<Parcel> {
        for _ in 0..self.inboxes.len() {
            let at = self.next_inbox;
            self.next_inbox = (at + 1) % self.inboxes.len();
            if let Some(inbox) = &mut self.inboxes[at]
                && let Ok(parcel) = inbox.pop()
            {
                return Some(parcel);
            }
        }
        None
    }

    /// Puts into the rings what found them full. Whether something still does: then nothing more is begun.
    pub(crate) fn is_clogged(&mut self) -> bool {
        self.outboxes.iter_mut().flatten().fold(false, |clogged, outbox| {
            outbox.flush();
            clogged | !outbox.overflow.is_empty()
        })
    }

    /// Keeps something for a bucket that is under way. False if there is no room for another frame.
    pub(crate) fn hold(&mut self, bucket: u8, parcel: Parcel) -> bool {
        let Some(held) = &mut self.under_way[usize::from(bucket) % BUCKETS] else { return false };
        if matches!(parcel, Parcel::Frame(..)) && held.len() >= HELD {
            return false;
        }
        held.push(parcel);
        true
    }

    pub(crate) fn count(&self, bucket: u8) {
        let word = &self.shared.loads[self.me][usize::from(bucket) % BUCKETS];
        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Frames of each bucket so far, of all workers.
    pub(crate) fn loads(&self) -> [u64; BUCKETS] {
        let of = |bucket: usize| self.shared.loads.iter().map(|row| row[bucket].load(Ordering::Relaxed)).sum();
        core::array::from_fn(of)
    }

    pub(crate) fn set_connections(&self, count: u64) {
        self.shared.connections[self.me].store(count, Ordering::Release);
    }

    /// Of all workers.
    pub(crate) fn connections(&self) -> u64 {
        self.shared.connections.iter().map(|count| count.load(Ordering::Acquire)).sum()
    }

    /// Nothing of this bucket is given to its owner from here on.
    pub(crate) fn pause(&mut self, which: Move) {
        if usize::from(which.from) == self.me {
            self.entry(which);
            return;
        }
        self.under_way[usize::from(which.bucket)] = Some(Vec::new());
        self.send(usize::from(which.from), Parcel::Paused(which));
    }

    /// Another worker has paused.
    pub(crate) fn paused(&mut self, which: Move) {
        let at = self.entry(which);
        self.leaving[at].missing -= 1;
    }

    fn entry(&mut self, which: Move) -> usize {
        if let Some(at) = self.leaving.iter().position(|leaving| leaving.which == which) {
            return at;
        }
        let missing = self.workers() - 1;
        self.leaving.push(Leaving { which, missing, switched: None, taken: [(0, false); 2] });
        self.leaving.len() - 1
    }

    /// The card sends the frames of buckets that everybody has paused elsewhere from now on.
    pub(crate) fn switch(&mut self, now: u64) {
        for leaving in self.leaving.iter_mut().filter(|leaving| leaving.missing == 0 && leaving.switched.is_none()) {
            if let Some(registers) = &self.registers {
                registers.set(leaving.which.bucket, leaving.which.to);
            }
            leaving.switched = Some(now);
        }
    }

    /// The bucket has its new owner; what waited for it comes back.
    pub(crate) fn moved(&mut self, which: Move) -> Vec<Parcel> {
        let at = usize::from(which.bucket);
        self.table[at] = which.to;
        self.under_way[at].take().unwrap_or_default()
    }

    /// Hashes with another key from now on.
    pub(crate) fn set_key(&mut self, key: &Key) {
        self.hash = Toeplitz::new(key);
        if let Some(registers) = self.registers.as_ref().filter(|_| self.me == FRONT) {
            registers.set_hash(&self.hash);
        }
    }

    /// Whether the card distributes frames by itself.
    pub(crate) fn has_registers(&self) -> bool {
        self.registers.is_some()
    }

    /// Workers that were given something and sleep: the caller rings their doorbells.
    pub(crate) fn doorbells(&mut self, mut ring: impl FnMut(usize)) {
        for (to, outbox) in self.outboxes.iter_mut().enumerate() {
            if let Some(outbox) = outbox
                && std::mem::take(&mut outbox.told)
                && needs_doorbell(&self.shared.sleeping[to])
            {
                ring(to);
            }
        }
    }

    /// Announces that the worker is going to sleep. False if it must not.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        go_to_sleep(&self.shared.sleeping[self.me]);
        let unsent = self.outboxes.iter().flatten().any(|outbox| !outbox.overflow.is_empty());
        !unsent && self.inboxes.iter().flatten().all(Consumer::is_empty)
    }

    pub(crate) fn end_sleep(&self) {
        wake_up(&self.shared.sleeping[self.me]);
    }
}

impl Outbox {
    fn flush(&mut self) {
        while let Some(parcel) = self.overflow.pop_front() {
            if let Err(rtrb::PushError::Full(parcel)) = self.ring.push(parcel) {
                return self.overflow.push_front(parcel);
            }
        }
    }
}
