//! A worker among others: what it gets goes to the bucket's owner, and buckets change hands without a frame overtaking another.
//!
//! A bucket moves in four steps. Everybody pauses: what comes for it is held, and the old owner is told that nothing more will come.
//! Once all have said so the card is switched, and the old owner finishes what waits in its own queues. Then the bucket's connections go to
//! the new owner, by way of the front, and everybody sends there what was held.

use crate::balance::{Balance, Step};
use crate::custody::Custody;
use crate::offloaded::Pending;
use crate::peers::{Contents, FRONT, Leaving, Parcel, Peers, Place};
use crate::worker::Worker;
use baton_abi::layout::Counter;
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::Device;
use baton_rss::{From, Input, Key, Move};
use baton_tcp::{Events, Instant};
use std::collections::BTreeMap;

/// Parcels taken in one round.
const BATCH: usize = 256;

/// Microseconds after the card was switched within which a frame may still come to the old queue; and frames that a queue holds at most (a
/// TAP's: 500), so that what is taken beyond them came later.
const LATE: u64 = 500;
const QUEUE: usize = 1024;

/// What a worker has besides, among others.
pub(crate) struct Among {
    pub peers: Peers,
    front: Option<Front>,
}

/// What only the front has.
struct Front {
    /// The bucket of each slot's connection.
    buckets: Vec<u8>,
    /// News of others' connections that their programs have had no room for.
    far: BTreeMap<u32, Far>,
    balance: Balance,
}

struct Far {
    session: u32,
    cid: Cid,
    pending: Pending,
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Makes this one of several workers, the first of them first, and all before any runs. Nothing may have been attached.
    pub fn join(&mut self, peers: Peers, now: Instant) {
        self.counters.move_to(&self.nic_memory, peers.me());
        self.counters.set(Counter::Connections, 0);
        let front =
            || Front { buckets: vec![0; self.slots.len()], far: BTreeMap::new(), balance: Balance::new(peers.workers(), now.0) };
        let (me, workers) = (peers.me(), peers.workers());
        self.among = Some(Box::new(Among { front: peers.is_front().then(front), peers }));
        self.take_places(me, workers, now);
    }

    /// Workers that connections are spread over, and how: the front's to say.
    pub fn set_rss(&mut self, settings: &baton_rss::Settings, random: &Key) {
        if let Some(Among { front: Some(front), .. }) = self.among.as_deref_mut() {
            front.balance.set(settings, random);
        }
    }

    /// Whose each bucket is, as far as this worker knows.
    pub fn indirection(&self) -> Option<baton_rss::Table> {
        self.among.as_ref().map(|among| *among.peers.table())
    }

    /// The front tells all others. The parcel is made anew for each.
    pub(crate) fn broadcast(&mut self, parcel: impl Fn() -> Parcel) {
        if let Some(among) = self.among.as_mut().filter(|among| among.peers.is_front()) {
            for other in among.peers.others() {
                among.peers.send(other, parcel());
            }
        }
    }

    /// One round over all sources, for a worker among others. Whether there was anything to do.
    pub fn poll_among(&mut self, now: Instant) -> bool {
        let mut worked = self.take_parcels(now);
        let Some(among) = &mut self.among else { return worked };
        let (clogged, front) = (among.peers.is_clogged(), among.peers.is_front());
        if self.started && !clogged {
            worked |= self.take_frames(From::Wire, now);
            worked |= self.take_frames(From::Host, now);
        }
        if front && !clogged {
            worked |= self.poll_sessions(now);
            worked |= self.commands.has_message() && self.poll_commands(now);
        }
        if self.due() <= now.0 {
            worked |= self.poll_timers(now);
        }
        if front {
            if !self.backlog.is_empty() {
                self.tell_the_rest();
            }
            self.tell_programs();
            self.tell_of_others();
        } else {
            self.tell_front();
        }
        worked | self.move_buckets(now)
    }

    fn peers(&mut self) -> Option<&mut Peers> {
        self.among.as_mut().map(|among| &mut among.peers)
    }

    fn take_parcels(&mut self, now: Instant) -> bool {
        for count in 0..BATCH {
            let Some(parcel) = self.peers().and_then(Peers::receive) else { return count > 0 };
            self.take_parcel(parcel, now);
        }
        true
    }

    fn take_parcel(&mut self, parcel: Parcel, now: Instant) {
        match parcel {
            // Who has passed it may have hashed it with an older key.
            Parcel::Frame(_, from, frame) if self.is_front() => {
                let Some(among) = &self.among else { return };
                let bucket = bucket_of(&among.peers, frame.bytes(), from);
                self.sort(bucket, Parcel::Frame(bucket, from, frame), now);
            }
            Parcel::Frame(bucket, ..) | Parcel::Command(bucket, _) | Parcel::Ask(bucket, ..) => self.sort(bucket, parcel, now),
            Parcel::Tell(session, cid, pending) => self.note_far(session, cid, pending),
            Parcel::Agent(message) => self.pass_to_agent(message),
            Parcel::Attach(session, memory) => self.attach_here(session, memory),
            Parcel::Detach(session) => drop(self.sessions.get_mut(session as usize).and_then(Option::take)),
            Parcel::Start => self.start(now),
            Parcel::Offloads(set) => self.set_offloads(&set, now),
            Parcel::Key(key) => self.peers().into_iter().for_each(|peers| peers.set_key(&key)),
            Parcel::Pause(which) => self.peers().into_iter().for_each(|peers| peers.pause(which)),
            Parcel::Paused(which) => self.peers().into_iter().for_each(|peers| peers.paused(which)),
            Parcel::Adopt(which, contents) => self.adopt(which, contents, now),
            Parcel::Moved(which) => self.moved(which, now),
        }
    }

    /// To the bucket's owner.
    fn sort(&mut self, bucket: u8, parcel: Parcel, now: Instant) {
        let Some(peers) = self.peers() else { return };
        match peers.place(bucket) {
            Place::Mine => self.run(parcel, now),
            Place::Other(owner) => {
                // Any queue that is full loses frames, and nothing else.
                if !matches!(parcel, Parcel::Frame(..)) || peers.has_room(owner) {
                    peers.send(owner, parcel);
                } else {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
            Place::UnderWay => {
                if !peers.hold(bucket, parcel) {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
        }
    }

    fn run(&mut self, parcel: Parcel, now: Instant) {
        match parcel {
            Parcel::Frame(bucket, from, frame) => {
                // Its buffer is as small as it is, and what this worker's becomes nobody knows.
                self.frame.copy_from(&frame);
                self.run_frame(bucket, from, now);
            }
            Parcel::Command(_, message) => self.run_command(&message, now),
            Parcel::Ask(_, session, message) => {
                let understood = self.on_program_message(session as usize, &message, now);
                self.counters.add(Counter::BadMessages, u64::from(!understood));
            }
            _ => {}
        }
    }

    fn run_frame(&mut self, bucket: u8, from: From, now: Instant) {
        match from {
            From::Wire => {
                self.peers().into_iter().for_each(|peers| peers.count(bucket));
                self.on_wire_frame(now);
            }
            From::Host => self.on_host_frame(now),
        }
    }

    /// A batch of frames from this worker's own queue.
    fn take_frames(&mut self, from: From, now: Instant) -> bool {
        let mut taken = 0;
        let mut empty = false;
        if from == From::Wire && !self.host.is_ready() {
            return true;
        }
        while taken < self.settings.batch && !empty {
            empty = !match from {
                From::Wire => self.output.wire.receive(&mut self.frame),
                From::Host => self.host.receive(&mut self.frame),
            };
            if !empty {
                taken += 1;
                self.sort_frame(from, now);
            }
        }
        let Some(peers) = self.peers() else { return taken > 0 };
        for leaving in &mut peers.leaving {
            if leaving.switched.is_some_and(|at| at + LATE <= now.0) {
                let queue = &mut leaving.taken[usize::from(from == From::Host)];
                *queue = (queue.0 + taken, queue.1 | empty);
            }
        }
        taken > 0
    }

    pub(crate) fn sort_frame(&mut self, from: From, now: Instant) {
        let Some(among) = &self.among else { return };
        let bucket = bucket_of(&among.peers, self.frame.bytes(), from);
        if among.peers.place(bucket) == Place::Mine {
            return self.run_frame(bucket, from, now);
        }
        self.counters.add(Counter::Passed, 1);
        self.sort(bucket, Parcel::Frame(bucket, from, self.frame.clone()), now);
    }

    /// The agent's command, to who has the connection.
    pub(crate) fn route_command(&mut self, message: &Message, now: Instant) {
        let index = message.cid.slot();
        let inside = (index as usize) < self.slots.len();
        if message.operation == Operation::NicControl && message.kind == Control::Detach as u16 {
            self.broadcast(|| Parcel::Detach(message.address));
            return self.run_command(message, now);
        }
        if !inside {
            return self.run_command(message, now);
        }
        if message.operation == Operation::NicControl && message.kind == Control::Mirror as u16 {
            let input = Input::of_flow(&self.read_flow(index));
            if let Some(Among { peers, front: Some(front) }) = self.among.as_deref_mut() {
                front.buckets[index as usize] = peers.hash().bucket_of(&input);
                front.far.remove(&index);
            }
        }
        if message.operation == Operation::NicRestore {
            self.hear_session_out(self.parameters(index)[0] as usize, now);
        }
        let Some(Among { front: Some(front), .. }) = self.among.as_deref() else { return };
        let bucket = front.buckets[index as usize];
        self.sort(bucket, Parcel::Command(bucket, *message), now);
    }

    /// A program's message, to who has the connection.
    pub(crate) fn route_ask(&mut self, session: usize, message: &Message, now: Instant) -> bool {
        let Some(Among { front: Some(front), .. }) = self.among.as_deref() else { return false };
        let Some(bucket) = front.buckets.get(message.cid.slot() as usize).copied() else { return false };
        self.sort(bucket, Parcel::Ask(bucket, session as u32, *message), now);
        true
    }

    /// News of this worker's connections, for the front to tell.
    fn tell_front(&mut self) {
        let Some(among) = &mut self.among else { return };
        while among.peers.has_room(FRONT) {
            let Some(index) = self.dirty.pop() else { return };
            let Some(slot) = self.slots[index as usize].as_mut() else { continue };
            slot.dirty = false;
            if let Some((session, pending)) = slot.take_news() {
                among.peers.send(FRONT, Parcel::Tell(session, slot.cid, pending));
            }
        }
    }

    fn note_far(&mut self, session: u32, cid: Cid, pending: Pending) {
        let Some(Among { front: Some(front), .. }) = self.among.as_deref_mut() else { return };
        let far = front.far.entry(cid.slot()).or_insert(Far { session, cid, pending: Pending::default() });
        if far.cid != cid {
            *far = Far { session, cid, pending: Pending::default() };
        }
        far.pending.add(&pending);
    }

    /// Tells programs of connections that other workers have.
    fn tell_of_others(&mut self) {
        let Some(Among { front: Some(front), .. }) = self.among.as_deref_mut() else { return };
        let sessions = &mut self.sessions;
        front.far.retain(|_, far| {
            let Some(Some(session)) = sessions.get_mut(far.session as usize) else { return false };
            session.tell(far.cid, &mut far.pending).is_err()
        });
    }

    fn pass_to_agent(&mut self, message: Message) {
        self.tell_agent(message);
        if matches!(Control::from_number(message.kind), Some(Control::Done | Control::Refused)) {
            self.advertise();
        }
    }

    /// What is to be done about buckets that leave, or that should.
    fn move_buckets(&mut self, now: Instant) -> bool {
        let started = self.started;
        let Some(peers) = self.peers() else { return false };
        let mut worked = false;
        if !peers.leaving.is_empty() {
            peers.switch(now.0);
            // Without a card's registers nothing comes but by way of the front.
            let waits = started && peers.has_registers();
            let finished = |queue: &(usize, bool)| queue.1 || queue.0 >= QUEUE;
            let gone = |leaving: &Leaving| leaving.switched.is_some() && (!waits || leaving.taken.iter().all(finished));
            let (gone, stay) = std::mem::take(&mut peers.leaving).into_iter().partition(gone);
            peers.leaving = stay;
            for leaving in gone {
                self.give_up(leaving.which, now);
                worked = true;
            }
        }
        worked | self.rebalance(now)
    }

    /// The front's: begins the moves that balance asks for.
    fn rebalance(&mut self, now: Instant) -> bool {
        let Some(Among { peers, front: Some(front) }) = self.among.as_deref_mut() else { return false };
        let Some(step) = front.balance.next(now.0, peers.table(), || peers.loads()) else { return false };
        match step {
            Step::Moves(moves) => {
                for which in moves {
                    for other in peers.others().filter(|other| *other != usize::from(which.from)) {
                        peers.send(other, Parcel::Pause(which));
                    }
                    // The old owner hears of it from everybody.
                    peers.pause(which);
                }
            }
            Step::Key(key) => {
                peers.set_key(&key);
                for slot in self.slots.iter().flatten() {
                    front.buckets[slot.cid.slot() as usize] = peers.hash().bucket_of(&Input::of_flow(&slot.flow));
                }
                self.broadcast(|| Parcel::Key(Box::new(key)));
            }
        }
        true
    }

    /// The old owner's last step: nothing of the bucket is here any more, in any queue.
    fn give_up(&mut self, which: Move, now: Instant) {
        self.flush_to_kernel(now);
        self.host.settle();
        let Some(peers) = self.among.as_ref().map(|among| &among.peers) else { return };
        let its = |flow| peers.hash().bucket_of(&Input::of_flow(flow)) == which.bucket;
        let cids: Vec<Cid> = self.slots.iter().flatten().filter(|slot| its(&slot.flow)).map(|slot| slot.cid).collect();
        let hash = baton_rss::Toeplitz::clone(peers.hash());
        let slots = cids.into_iter().filter_map(|cid| self.evict(cid)).collect();
        let acknowledged = self.take_acknowledged(|entry| hash.bucket_of(&Input::of_flow(entry.flow())) == which.bucket);
        let contents = Box::new(Contents { slots, acknowledged });
        self.count_connections();
        self.counters.add(Counter::Buckets, 1);
        let Some(peers) = self.peers() else { return };
        if peers.is_front() {
            return self.pass_on(which, contents, now);
        }
        peers.send(FRONT, Parcel::Adopt(which, contents));
        self.moved(which, now);
    }

    fn adopt(&mut self, which: Move, contents: Box<Contents>, now: Instant) {
        let Some(peers) = self.peers() else { return };
        if peers.is_front() {
            return self.pass_on(which, contents, now);
        }
        self.take_over(*contents, now);
        self.moved(which, now);
    }

    /// The front's part: connections for itself, or for another. Everybody hears of it from the front alone, so that what it says of the
    /// bucket next comes after.
    fn pass_on(&mut self, which: Move, contents: Box<Contents>, now: Instant) {
        let Some(peers) = self.peers() else { return };
        let told = peers.others().filter(|other| ![which.from, which.to].map(usize::from).contains(other));
        told.for_each(|other| peers.send(other, Parcel::Moved(which)));
        if usize::from(which.to) == FRONT {
            self.take_over(*contents, now);
        } else {
            peers.send(usize::from(which.to), Parcel::Adopt(which, contents));
        }
        self.moved(which, now);
        if let Some(Among { front: Some(front), .. }) = self.among.as_deref_mut() {
            front.balance.done();
        }
    }

    fn take_over(&mut self, contents: Contents, now: Instant) {
        self.adopt_acknowledged(contents.acknowledged, now);
        for mut slot in contents.slots {
            let index = slot.cid.slot();
            slot.scheduled = u64::MAX;
            slot.dirty = false;
            if let Custody::Active(offloaded) = &slot.custody {
                offloaded.tell_processor(self.processor);
            }
            if let Some(Among { front: Some(front), .. }) = self.among.as_deref_mut()
                && let Some(far) = front.far.remove(&index).filter(|far| far.cid == slot.cid)
            {
                slot.give_news(far.pending);
            }
            self.lookup.insert(&slot.name, index);
            self.slots[index as usize] = Some(slot);
            self.connections += 1;
            self.after(index, Events::empty());
        }
        self.count_connections();
    }

    fn moved(&mut self, which: Move, now: Instant) {
        let held = self.peers().map(|peers| peers.moved(which)).unwrap_or_default();
        for parcel in held {
            self.sort(which.bucket, parcel, now);
        }
    }

    /// When something of this file's wants the worker, in microseconds.
    pub(crate) fn among_due(&self) -> Option<u64> {
        let among = self.among.as_ref()?;
        let leaving = among.peers.leaving.iter().filter_map(|leaving| leaving.switched).map(|at| at + LATE).min();
        let balance = among.front.as_ref().map(|front| front.balance.due());
        leaving.into_iter().chain(balance).min()
    }

    /// Rings the doorbells of workers that were given something and sleep.
    pub fn peer_doorbells(&mut self, ring: impl FnMut(usize)) {
        if let Some(peers) = self.peers() {
            peers.doorbells(ring);
        }
    }
}

/// The bucket of a frame. What routers say of a connection has to come to it.
fn bucket_of(peers: &Peers, bytes: &[u8], from: From) -> u8 {
    let told = if from == From::Wire { crate::icmp::too_big(bytes) } else { None };
    match told {
        Some((flow, ..)) => peers.hash().bucket_of(&Input::of_flow(&flow)),
        None => peers.hash().bucket(bytes, from),
    }
}
