//! One worker's connections to the others of its NIC: rings with one producer and one consumer between any two workers,
//! the owner of each bucket, and the cross-worker calls. No locks.

use crate::captures::CaptureSettings;
use crate::custody::Slot;
use crate::listeners::ListenerSettings;
use crate::messages::MessageEndpoint;
use crate::offloaded::Pending;
use crate::resources::Charges;
use baton_abi::{Cid, Message};
use baton_device::Frame;
use baton_ring::{go_to_sleep, needs_doorbell, wake_up};
use baton_rss::{BUCKETS, From, Key, Move, NIBBLES, Table, Toeplitz};
use baton_shm::Region;
use baton_wire::frame::Link;
use baton_wire::{Endpoint, FlowKey};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rtrb::{Consumer, Producer, RingBuffer};
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// The number of the front worker, which alone serves the rings of agent and programs and decides which worker owns
/// which bucket.
pub(crate) const FRONT: usize = 0;

/// Number of calls that a ring holds.
const RING_CALLS: usize = 1024;

/// Largest number of frames held for a bucket that is moving; further ones are dropped, as by any full queue.
const MAX_HELD_FRAMES: usize = 4096;

/// A cross-worker call: work that one worker sends to another.
pub(crate) enum Call {
    /// Process a frame of this bucket, from the wire or from the kernel.
    Frame(u8, From, Frame),
    /// To the front worker, which alone has the handshakes with listeners' clients: process a segment to a listener
    /// if it is part of one.
    Handshake(Frame),
    /// Process a segment that is part of no handshake.
    NoHandshake(u8, Frame),
    /// Add a connection of this bucket that has been made for a listener.
    Made(u8, Box<Slot>),
    /// To the front worker: its connection with this 4-tuple has been added.
    Added(FlowKey),
    /// A listener has been added or changed, or is gone.
    Listen(Box<ListenerSettings>),
    StopListening(u32),
    /// A UDP socket receives at these addresses and ports, from this peer only if there is one; without any it is gone.
    DatagramsAt(u32, Vec<Endpoint>, Option<Endpoint>),
    /// To the front worker: a frame from the wire with a datagram for a UDP socket.
    Datagram(Frame),
    /// Whether the NIC has addresses of its own.
    Addresses(bool),
    /// To the front worker: a frame from the wire that may be about one of these addresses.
    Resolution(Frame),
    /// Run the agent's command for a connection in this bucket.
    Command(u8, Message),
    /// Run the message of a session's program for a connection in this bucket.
    ProgramMessage(u8, u32, Message),
    /// To the front worker: events of a connection for its session's program.
    Events(u32, Cid, Pending),
    /// To the front worker: a message for the agent.
    Agent(Message),
    /// A session has been added, or has ended.
    Attach(u32, Arc<Region>),
    Detach(u32),
    /// A session for messages has been added, whose packets and rings the worker [`Peers::owner_of_messages`] handles.
    AttachMessages(u32, Arc<Region>, Box<MessageEndpoint>),
    /// To a session's worker: its session may send to a host by this way, or not at all.
    Reach(u32, [u8; 16], Option<Link>),
    /// To a session's worker: a frame from the wire that carries a packet for it.
    Packet(u32, Frame),
    /// Begin to receive frames.
    Start,
    /// Change the offloads.
    Offloads(Box<crate::worker::WorkerOffloads>),
    /// Begin or end a capture.
    Capture(CaptureSettings, Arc<Region>),
    EndCapture(u32),
    /// Change the hash key. Every bucket is the front worker's at this moment.
    HashKey(Box<Key>),
    /// A bucket is about to move: send no more of its frames and calls to the old owner.
    Pause(Move),
    /// To the old owner: this worker will send nothing more of the bucket.
    Paused(Move),
    /// The bucket's connections. They go through the front worker, so that their events stay in order.
    HandOver(Move, Box<BucketContents>),
    /// The bucket has its new owner.
    Moved(Move),
}

impl Call {
    /// Whether it carries a frame, which may be lost as in any full queue.
    pub fn is_frame(&self) -> bool {
        matches!(self, Call::Frame(..) | Call::Handshake(..) | Call::NoHandshake(..) | Call::Datagram(..) | Call::Resolution(..))
    }
}

/// The connections of a bucket.
pub(crate) struct BucketContents {
    /// Offloaded connections.
    pub slots: Vec<Slot>,
    /// Connections of the kernel's with active acknowledgements.
    pub acknowledged: Vec<baton_active_ack::AckEntry>,
}

/// The owner of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BucketOwner {
    /// This worker.
    Mine,
    /// Another worker.
    Other(usize),
    /// The bucket is moving; its calls are held here.
    Moving,
}

/// The registers of a network card that distributes frames by itself: the indirection table, then the tables of its
/// Toeplitz hash, in words of 4 bytes.
#[derive(Clone)]
pub struct Registers(Arc<Region>);

impl Registers {
    /// Bytes of the registers.
    pub const BYTES: usize = 4 * (BUCKETS + 16 * NIBBLES);

    /// Makes the registers over memory. None if it is too short.
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

/// The state that all workers share.
struct Shared {
    /// The sleep flag of each worker.
    sleeping: Vec<AtomicU32>,
    /// Number of offloaded connections of each worker.
    connections: Vec<AtomicU64>,
    /// Number of frames of each bucket that each worker has ever processed.
    loads: Vec<[AtomicU64; BUCKETS]>,
    /// What the slots hold of the NIC's resources: those of the first worker that joined.
    charges: OnceLock<Arc<Charges>>,
}

/// The ring to another worker, and the calls that found it full.
struct Outbox {
    ring: Producer<Call>,
    overflow: VecDeque<Call>,
    /// A call was sent since the last check of the worker's doorbell.
    unsignalled: bool,
}

/// A bucket that is about to leave this worker.
pub(crate) struct Leaving {
    pub which: Move,
    /// Number of workers that may still send calls of this bucket.
    awaiting: usize,
    /// When the card was switched, in microseconds: from then on the bucket's frames no longer arrive here, except
    /// those in this worker's queues.
    pub switched: Option<u64>,
    /// For each queue (wire, host), since the switch: frames taken, and whether it was found empty.
    pub taken: [(usize, bool); 2],
}

/// A worker's connections to the others.
pub struct Peers {
    me: usize,
    inboxes: Vec<Option<Consumer<Call>>>,
    outboxes: Vec<Option<Outbox>>,
    shared: Arc<Shared>,
    registers: Option<Registers>,
    hash: Toeplitz,
    table: Table,
    moving: Vec<Option<Vec<Call>>>,
    pub(crate) leaving: Vec<Leaving>,
    next_inbox: usize,
}

/// Connects `workers` workers with each other. Every bucket is worker 0's at first. With `registers` the card delivers
/// each frame to the worker that the table gives; without them all frames arrive at worker 0.
pub fn crossbar(workers: usize, key: &Key, registers: Option<Registers>) -> Vec<Peers> {
    let workers = workers.clamp(1, baton_rss::MOST_WORKERS);
    let shared = Arc::new(Shared {
        sleeping: (0..workers).map(|_| AtomicU32::new(0)).collect(),
        connections: (0..workers).map(|_| AtomicU64::new(0)).collect(),
        loads: (0..workers).map(|_| [const { AtomicU64::new(0) }; BUCKETS]).collect(),
        charges: OnceLock::new(),
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
        moving: (0..BUCKETS).map(|_| None).collect(),
        leaving: Vec::new(),
        next_inbox: 0,
    });
    let mut peers: Vec<Peers> = peers.collect();
    for from in 0..workers {
        for to in (0..workers).filter(|to| *to != from) {
            let (producer, consumer) = RingBuffer::new(RING_CALLS);
            peers[from].outboxes[to] = Some(Outbox { ring: producer, overflow: VecDeque::new(), unsignalled: false });
            peers[to].inboxes[from] = Some(consumer);
        }
    }
    peers
}

/// The worker, of so many, that handles the packets and rings of a session for messages.
pub fn owner_of_messages(session: u32, workers: usize) -> usize {
    session as usize % workers
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

    /// The worker that handles the packets and rings of session `id`, if it is one for messages. That worker never
    /// changes, since a session has one data half for all of its peers.
    pub(crate) fn owner_of_messages(&self, id: u32) -> usize {
        owner_of_messages(id, self.workers())
    }

    /// The numbers of all other workers.
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

    pub(crate) fn owner(&self, bucket: u8) -> BucketOwner {
        let at = usize::from(bucket) % BUCKETS;
        if self.moving[at].is_some() {
            return BucketOwner::Moving;
        }
        match usize::from(self.table[at]) {
            owner if owner == self.me => BucketOwner::Mine,
            owner => BucketOwner::Other(owner),
        }
    }

    /// Sends a call to another worker, behind all earlier calls.
    pub(crate) fn send(&mut self, to: usize, call: Call) {
        let Some(Some(outbox)) = self.outboxes.get_mut(to) else { return };
        outbox.unsignalled = true;
        outbox.overflow.push_back(call);
        outbox.flush();
    }

    /// Whether droppable traffic (frames, coalescable events) may still be queued for worker `to`; commands always may.
    pub(crate) fn has_room(&self, to: usize) -> bool {
        self.outboxes[to].as_ref().is_some_and(|outbox| outbox.overflow.is_empty() && outbox.ring.slots() > 0)
    }

    /// Takes the next call from the other workers, in turn.
    pub(crate) fn receive(&mut self) -> Option<Call> {
        for _ in 0..self.inboxes.len() {
            let at = self.next_inbox;
            self.next_inbox = (at + 1) % self.inboxes.len();
            if let Some(inbox) = &mut self.inboxes[at]
                && let Ok(call) = inbox.pop()
            {
                return Some(call);
            }
        }
        None
    }

    /// Moves calls that found their ring full to the rings. Returns whether some remain: then the worker takes no new
    /// work from the devices and rings.
    pub(crate) fn flush_overflow(&mut self) -> bool {
        self.outboxes.iter_mut().flatten().fold(false, |overflowing, outbox| {
            outbox.flush();
            overflowing | !outbox.overflow.is_empty()
        })
    }

    /// Holds a call for a bucket that is moving. False if the bucket does not move, or there is no room for another
    /// frame.
    pub(crate) fn hold(&mut self, bucket: u8, call: Call) -> bool {
        let Some(held) = &mut self.moving[usize::from(bucket) % BUCKETS] else { return false };
        if call.is_frame() && held.len() >= MAX_HELD_FRAMES {
            return false;
        }
        // A new connection is put before its frames, of which some may be held already: the segment that completed its
        // handshake came to the front worker through another worker.
        let at = if matches!(call, Call::Made(..)) { 0 } else { held.len() };
        held.insert(at, call);
        true
    }

    /// Counts a frame of a bucket.
    pub(crate) fn count(&self, bucket: u8) {
        let word = &self.shared.loads[self.me][usize::from(bucket) % BUCKETS];
        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Number of frames of each bucket so far, of all workers.
    pub(crate) fn loads(&self) -> [u64; BUCKETS] {
        let of = |bucket: usize| self.shared.loads.iter().map(|row| row[bucket].load(Ordering::Relaxed)).sum();
        core::array::from_fn(of)
    }

    pub(crate) fn set_connections(&self, count: u64) {
        self.shared.connections[self.me].store(count, Ordering::Release);
    }

    /// The shared counts of what the slots use: `own`, if this worker is the first that joins.
    pub(crate) fn share_charges(&self, own: &Arc<Charges>) -> Arc<Charges> {
        self.shared.charges.get_or_init(|| own.clone()).clone()
    }

    /// Number of offloaded connections of all workers.
    pub(crate) fn connections(&self) -> u64 {
        self.shared.connections.iter().map(|count| count.load(Ordering::Acquire)).sum()
    }

    /// Holds calls of a bucket from now on, and notifies its owner.
    pub(crate) fn pause(&mut self, which: Move) {
        if usize::from(which.from) == self.me {
            self.leaving_index(which);
            return;
        }
        self.moving[usize::from(which.bucket)] = Some(Vec::new());
        self.send(usize::from(which.from), Call::Paused(which));
    }

    /// Notes that another worker holds the calls of a bucket that leaves this one.
    pub(crate) fn paused(&mut self, which: Move) {
        let at = self.leaving_index(which);
        self.leaving[at].awaiting -= 1;
    }

    /// Index in `leaving` of a bucket, which is added if it is new.
    fn leaving_index(&mut self, which: Move) -> usize {
        if let Some(at) = self.leaving.iter().position(|leaving| leaving.which == which) {
            return at;
        }
        let awaiting = self.workers() - 1;
        self.leaving.push(Leaving { which, awaiting, switched: None, taken: [(0, false); 2] });
        self.leaving.len() - 1
    }

    /// Switches the card for the buckets that all workers have paused: their frames go to the new owner from now on.
    pub(crate) fn switch(&mut self, now: u64) {
        for leaving in self.leaving.iter_mut().filter(|leaving| leaving.awaiting == 0 && leaving.switched.is_none()) {
            if let Some(registers) = &self.registers {
                registers.set(leaving.which.bucket, leaving.which.to);
            }
            leaving.switched = Some(now);
        }
    }

    /// Sets the new owner of a bucket, and returns the calls that were held for it.
    pub(crate) fn moved(&mut self, which: Move) -> Vec<Call> {
        let at = usize::from(which.bucket);
        self.table[at] = which.to;
        self.moving[at].take().unwrap_or_default()
    }

    /// Changes the hash key.
    pub(crate) fn set_key(&mut self, key: &Key) {
        self.hash = Toeplitz::new(key);
        if let Some(registers) = self.registers.as_ref().filter(|_| self.me == FRONT) {
            registers.set_hash(&self.hash);
        }
    }

    /// Whether the card distributes the frames.
    pub(crate) fn has_registers(&self) -> bool {
        self.registers.is_some()
    }

    /// Calls `ring` for each worker that sleeps and was sent calls.
    pub(crate) fn doorbells(&mut self, mut ring: impl FnMut(usize)) {
        for (to, outbox) in self.outboxes.iter_mut().enumerate() {
            if let Some(outbox) = outbox
                && std::mem::take(&mut outbox.unsignalled)
                && needs_doorbell(&self.shared.sleeping[to])
            {
                ring(to);
            }
        }
    }

    /// Announces that the worker is going to sleep. False if it must not, since calls wait.
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
        while let Some(call) = self.overflow.pop_front() {
            if let Err(rtrb::PushError::Full(call)) = self.ring.push(call) {
                return self.overflow.push_front(call);
            }
        }
    }
}
