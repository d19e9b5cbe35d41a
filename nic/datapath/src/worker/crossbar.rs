//! Several workers: each dispatches what it receives to the worker that owns the frame's bucket, and buckets move
//! between workers without one frame overtaking another.
//!
//! A bucket moves in four steps. First all workers pause: they hold the bucket's frames and calls, and notify the old
//! owner that they will send no more of them. When all have done so the card is switched to the new owner, and the old
//! owner processes the frames in its own queues. Then the bucket's connections go to the new owner, through the front
//! worker. Last, all workers send the held frames and calls to the new owner.

use super::frames::on_gated_wire_frame;
use super::opening::ANY_DEVICE;
use super::{Worker, capture, end_capture};
use crate::balance::{Balance, Step};
use crate::custody::{Custody, Slot};
use crate::offloaded::Pending;
use crate::peers::{BucketContents, BucketOwner, Call, FRONT, Leaving, Peers};
use baton_abi::layout::Counter;
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::{Device, Frame};
use baton_rss::{From, Input, Key, Move};
use baton_tcp::{Events, Instant};
use baton_wire::{FlowKey, TcpFrame};
use std::collections::BTreeMap;

/// Largest number of calls run in one round.
const BATCH: usize = 256;

/// Microseconds after the switch of the card within which a frame may still arrive in the old queue.
const SWITCH_DELAY: u64 = 500;
/// Number of frames above the capacity of any queue (a TAP's: 500): when so many were taken, all frames that waited at
/// the switch are among them.
const QUEUE_FRAMES: usize = 1024;

/// The part of a worker that only exists if there are several.
pub(super) struct Crossbar {
    pub peers: Peers,
    front: Option<Front>,
}

/// The part that only the front worker has.
struct Front {
    /// The bucket of each slot's connection.
    buckets: Vec<u8>,
    /// Events of connections that other workers own, for which their programs' rings had no room, by slot.
    remote: BTreeMap<u32, RemoteEvents>,
    /// 4-tuples of connections that were made for listeners and that their buckets' owners have not yet added.
    unadded: Vec<FlowKey>,
    balance: Balance,
}

/// Events of a connection that another worker owns.
struct RemoteEvents {
    session: u32,
    cid: Cid,
    pending: Pending,
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Makes this one of several workers. To be called for worker 0 first, for all before any of them runs, and before
    /// sessions are attached.
    pub fn join(&mut self, peers: Peers, now: Instant) {
        self.counters.move_to(&self.nic_memory, peers.me());
        self.counters.set(Counter::Connections, 0);
        let front = || Front {
            buckets: vec![0; self.connections.slots.len()],
            remote: BTreeMap::new(),
            unadded: Vec::new(),
            balance: Balance::new(peers.workers(), now.0),
        };
        self.resources.charges = peers.share_charges(&self.resources.charges);
        let (me, workers) = (peers.me(), peers.workers());
        self.crossbar = Some(Box::new(Crossbar { front: peers.is_front().then(front), peers }));
        self.take_ack_buffers(me, workers, now);
    }

    /// Sets how connections are spread over the workers; `random` is the hash key if the settings have none. Only the
    /// front worker uses it.
    pub fn set_rss(&mut self, settings: &baton_rss::RssSettings, random: &Key) {
        if let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref_mut() {
            front.balance.set(settings, random);
        }
    }

    /// The indirection table, as far as this worker knows it.
    pub fn indirection(&self) -> Option<baton_rss::Table> {
        self.crossbar.as_ref().map(|crossbar| *crossbar.peers.table())
    }

    /// Sends a call to all other workers, if this is the front worker. `call` makes it anew for each.
    pub(super) fn broadcast(&mut self, call: impl Fn() -> Call) {
        if let Some(crossbar) = self.crossbar.as_mut().filter(|crossbar| crossbar.peers.is_front()) {
            for other in crossbar.peers.others() {
                crossbar.peers.send(other, call());
            }
        }
    }

    /// One round over all sources of work, for one of several workers. Returns whether there was any.
    pub fn poll_with_peers(&mut self, now: Instant) -> bool {
        if self.output.wire.is_gated() {
            self.begin_gated_round(now);
        }
        let mut worked = self.take_calls(now);
        let Some(crossbar) = &mut self.crossbar else { return worked };
        let (overflowing, front) = (crossbar.peers.flush_overflow(), crossbar.peers.is_front());
        if self.started && !overflowing {
            worked |= self.take_frames(From::Wire, now);
            worked |= self.take_frames(From::Host, now);
        }
        if front && !overflowing {
            worked |= self.poll_sessions(now);
            worked |= !self.datagrams.ready.is_empty() && self.poll_datagrams();
            worked |= self.agent.commands.has_message() && self.poll_commands(now);
        }
        if !overflowing && !self.programs.message_ports.is_empty() {
            worked |= self.poll_messages();
        }
        if self.due <= now.0 {
            worked |= self.poll_timers(now);
        }
        if front {
            if !self.agent.backlog.is_empty() {
                self.flush_backlog();
            }
            self.send_events(now);
            self.send_remote_events();
        } else {
            self.forward_events();
        }
        worked |= self.move_buckets(now);
        self.output.flush(&self.counters);
        worked
    }

    fn peers(&mut self) -> Option<&mut Peers> {
        self.crossbar.as_mut().map(|crossbar| &mut crossbar.peers)
    }

    fn take_calls(&mut self, now: Instant) -> bool {
        self.is_drained = false;
        for count in 0..BATCH {
            let Some(call) = self.peers().and_then(Peers::receive) else { return count > 0 };
            self.on_call(call, now);
        }
        true
    }

    fn on_call(&mut self, call: Call, now: Instant) {
        match call {
            // The worker that sent it may have hashed it with an older key.
            Call::Frame(_, from, frame) if self.is_front() => {
                let Some(crossbar) = &self.crossbar else { return };
                let bucket = bucket_of(&crossbar.peers, frame.bytes(), from);
                self.dispatch(bucket, Call::Frame(bucket, from, frame), now);
            }
            Call::Frame(bucket, ..)
            | Call::NoHandshake(bucket, _)
            | Call::Made(bucket, _)
            | Call::Command(bucket, _)
            | Call::ProgramMessage(bucket, ..) => self.dispatch(bucket, call, now),
            Call::Handshake(frame) => self.on_handshake(&frame, now),
            Call::Added(key) => self.note_added(key),
            Call::Listen(settings) => self.listen(*settings),
            Call::StopListening(id) => self.stop_listening(id),
            Call::DatagramsAt(id, endpoints, peer) => self.datagrams.note(id, &endpoints, peer),
            Call::Addresses(any) => self.note_addresses(any),
            Call::Resolution(frame) => self.on_resolution(&frame, now),
            Call::Datagram(frame) => self.on_datagram(&frame, now),
            Call::Events(session, cid, pending) => self.add_remote_events(session, cid, pending),
            Call::Agent(message) => self.relay_to_agent(message),
            Call::Attach(session, memory) => self.attach_here(session, memory),
            Call::Detach(session) => self.forget_session(session),
            Call::AttachMessages(session, memory, endpoint) => self.attach_messages_here(session, memory, *endpoint),
            Call::Reach(session, host, link) => _ = self.reach_here(session, host, link),
            Call::Packet(session, frame) => {
                self.frame.copy_from(&frame);
                self.on_packet(session, now);
            }
            Call::Start => self.start(now),
            Call::Offloads(set) => self.set_offloads(&set, now),
            Call::Capture(settings, memory) => _ = capture(self, settings, &memory),
            Call::EndCapture(id) => end_capture(self, id),
            Call::HashKey(key) => self.peers().into_iter().for_each(|peers| peers.set_key(&key)),
            Call::Pause(which) => self.peers().into_iter().for_each(|peers| peers.pause(which)),
            Call::Paused(which) => self.peers().into_iter().for_each(|peers| peers.paused(which)),
            Call::HandOver(which, contents) => self.on_hand_over(which, contents, now),
            Call::Moved(which) => self.on_moved(which, now),
        }
    }

    /// Runs a call here, sends it to the bucket's owner, or holds it while the bucket moves.
    fn dispatch(&mut self, bucket: u8, call: Call, now: Instant) {
        let Some(peers) = self.peers() else { return };
        match peers.owner(bucket) {
            BucketOwner::Mine => self.run_here(call, now),
            BucketOwner::Other(owner) => {
                // A full ring loses frames, and no other calls.
                if !call.is_frame() || peers.has_room(owner) {
                    peers.send(owner, call);
                } else {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
            BucketOwner::Moving => {
                if !peers.hold(bucket, call) {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
        }
    }

    /// Runs a call for a bucket of this worker.
    fn run_here(&mut self, call: Call, now: Instant) {
        match call {
            Call::Frame(bucket, from, frame) => {
                // Copied, since its buffer has no more room than its data needs, and a device may exchange this
                // worker's buffer.
                self.frame.copy_from(&frame);
                self.run_frame(bucket, from, now);
            }
            Call::NoHandshake(_, frame) => {
                self.frame.copy_from(&frame);
                self.look_up(false, now);
            }
            Call::Made(_, slot) => self.add_made(*slot),
            Call::Command(_, message) => self.run_command(&message, now),
            Call::ProgramMessage(_, session, message) => {
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
                if self.output.wire.is_gated() {
                    on_gated_wire_frame(self, now);
                } else {
                    self.on_wire_frame(now);
                }
            }
            From::Host => self.on_host_frame(now),
        }
    }

    /// Takes a batch of frames from one of this worker's own queues. Returns whether there was any.
    fn take_frames(&mut self, from: From, now: Instant) -> bool {
        let mut taken = 0;
        let mut empty = false;
        if from == From::Wire && !self.to_kernel.device.is_ready() {
            return true;
        }
        while taken < self.settings.batch && !empty {
            empty = !match from {
                From::Wire => self.output.wire.device.receive(&mut self.frame),
                From::Host => self.to_kernel.device.receive(&mut self.frame),
            };
            if !empty {
                taken += 1;
                if from == From::Host {
                    self.dispatch_frame(from, now);
                } else if self.output.wire.admits(&mut self.frame) {
                    self.dispatch_admitted(now);
                }
            }
        }
        let Some(peers) = self.peers() else { return taken > 0 };
        for leaving in &mut peers.leaving {
            if leaving.switched.is_some_and(|at| at + SWITCH_DELAY <= now.0) {
                let queue = &mut leaving.taken[usize::from(from == From::Host)];
                *queue = (queue.0 + taken, queue.1 | empty);
            }
        }
        taken > 0
    }

    /// Processes the frame from the wire in the worker's buffer, which the gate has let pass, here, or dispatches it:
    /// to the worker of its session for messages, or of its bucket.
    pub(super) fn dispatch_admitted(&mut self, now: Instant) {
        if self.programs.message_ports.is_empty() || !self.dispatch_packet(now) {
            self.dispatch_frame(From::Wire, now);
        }
    }

    /// Processes the frame in the worker's buffer here, or dispatches it.
    fn dispatch_frame(&mut self, from: From, now: Instant) {
        let Some(crossbar) = &self.crossbar else { return };
        let bucket = bucket_of(&crossbar.peers, self.frame.bytes(), from);
        if crossbar.peers.owner(bucket) == BucketOwner::Mine {
            return self.run_frame(bucket, from, now);
        }
        self.counters.add(Counter::Redirected, 1);
        self.dispatch(bucket, Call::Frame(bucket, from, self.frame.clone()), now);
    }

    /// Dispatches the agent's command to the worker that owns the connection.
    pub(super) fn route_command(&mut self, message: &Message, now: Instant) {
        let index = message.cid.slot();
        let inside = (index as usize) < self.connections.slots.len();
        if message.operation == Operation::NicControl && message.kind == Control::Detach as u16 {
            self.broadcast(|| Call::Detach(message.address));
            return self.run_command(message, now);
        }
        let is = |control| message.operation == Operation::NicControl && message.kind == control as u16;
        // The front worker makes listeners' connections.
        if !inside || is(Control::Grant) {
            return self.run_command(message, now);
        }
        if is(Control::Mirror) || is(Control::Connect) {
            let input = Input::of_flow(&self.read_flow(index));
            if let Some(Crossbar { peers, front: Some(front) }) = self.crossbar.as_deref_mut() {
                front.buckets[index as usize] = peers.hash().bucket_of(&input);
                front.remote.remove(&index);
            }
        }
        if message.operation == Operation::NicRestore {
            self.drain_session(self.parameters(index)[0] as usize, now);
        }
        let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref() else { return };
        let bucket = front.buckets[index as usize];
        self.dispatch(bucket, Call::Command(bucket, *message), now);
    }

    /// Dispatches a program's message to the worker that owns the connection. False if there is no such slot.
    pub(super) fn route_program_message(&mut self, session: usize, message: &Message, now: Instant) -> bool {
        let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref() else { return false };
        let Some(bucket) = front.buckets.get(message.cid.slot() as usize).copied() else { return false };
        self.dispatch(bucket, Call::ProgramMessage(bucket, session as u32, *message), now);
        true
    }

    /// In a worker other than the front worker: sends the front worker the segment to a listener that is being
    /// processed.
    pub(super) fn forward_handshake(&mut self) {
        let Some(crossbar) = &mut self.crossbar else { return };
        if crossbar.peers.has_room(FRONT) {
            crossbar.peers.send(FRONT, Call::Handshake(self.frame.clone()));
        } else {
            self.counters.add(Counter::Dropped, 1);
        }
    }

    /// In the front worker: processes a segment to a listener for another worker, or sends it back, behind the
    /// connection that an earlier segment has made.
    fn on_handshake(&mut self, frame: &Frame, now: Instant) {
        self.frame.copy_from(frame);
        let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.came_by()) else { return };
        let Some(Crossbar { peers, front: Some(front) }) = self.crossbar.as_deref() else { return };
        let bucket = bucket_of(peers, self.frame.bytes(), From::Wire);
        let key = FlowKey::from(&parsed.flow);
        let is_made = front.unadded.iter().any(|made| made.admits(&key));
        if is_made || !self.take_handshake(&parsed, now) {
            self.dispatch(bucket, Call::NoHandshake(bucket, self.frame.clone()), now);
        }
    }

    /// Gives a connection that has been made for a listener to the worker that owns its bucket. Until that worker has
    /// added it, its segments still come to the front worker.
    pub(super) fn place_made(&mut self, slot: Slot, now: Instant) {
        self.resources.charges.set(slot.cid.slot(), 0);
        let Some(Crossbar { peers, front: Some(front) }) = self.crossbar.as_deref_mut() else { return self.add_made(slot) };
        let bucket = peers.hash().bucket_of(&Input::of_flow(&slot.flow()));
        front.buckets[slot.cid.slot() as usize] = bucket;
        front.remote.remove(&slot.cid.slot());
        front.unadded.push(slot.key());
        self.dispatch(bucket, Call::Made(bucket, Box::new(slot)), now);
    }

    /// Adds a connection that has been made for a listener.
    fn add_made(&mut self, slot: Slot) {
        let (index, key) = (slot.cid.slot(), slot.key());
        if self.connections.overlaps(&key) {
            // A connection with the same addresses and ports, by another device, has come from the kernel meanwhile.
            // The agent's handoff of the new one will be refused.
            self.resources.charges.end(index);
            return self.forget_made(key);
        }
        self.connections.slots[index as usize] = Some(slot);
        self.connections.lookup.insert(&key, index);
        self.connections.count += 1;
        self.count_connections();
        self.forget_made(key);
    }

    /// From now on the front worker sends the segments of a connection that has been made to its owner.
    fn forget_made(&mut self, key: FlowKey) {
        match &mut self.crossbar {
            Some(crossbar) if !crossbar.peers.is_front() => crossbar.peers.send(FRONT, Call::Added(key)),
            _ => self.note_added(key),
        }
    }

    fn note_added(&mut self, key: FlowKey) {
        if let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref_mut() {
            front.unadded.retain(|other| *other != key);
        }
    }

    /// Sends the pending events of this worker's connections to the front worker, as far as there is room.
    fn forward_events(&mut self) {
        let Some(crossbar) = &mut self.crossbar else { return };
        while crossbar.peers.has_room(FRONT)
            && let Some(index) = self.programs.dirty.pop()
        {
            let Some(slot) = self.connections.slots[index as usize].as_mut() else { continue };
            slot.dirty = false;
            if let Some((session, pending)) = slot.take_events() {
                crossbar.peers.send(FRONT, Call::Events(session, slot.cid, pending));
            }
        }
        if !self.programs.ended.is_empty() {
            self.report_ended();
        }
    }

    /// Adds events of a connection that another worker owns.
    fn add_remote_events(&mut self, session: u32, cid: Cid, pending: Pending) {
        let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref_mut() else { return };
        let remote = front.remote.entry(cid.slot()).or_insert(RemoteEvents { session, cid, pending: Pending::default() });
        if remote.cid != cid {
            *remote = RemoteEvents { session, cid, pending: Pending::default() };
        }
        remote.pending.add(&pending);
    }

    /// Sends the events of other workers' connections to their programs, as far as the rings have room.
    fn send_remote_events(&mut self) {
        let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref_mut() else { return };
        let sessions = &mut self.programs.sessions;
        front.remote.retain(|_, remote| {
            let Some(Some(session)) = sessions.get_mut(remote.session as usize) else { return false };
            session.send(remote.cid, &mut remote.pending, &self.counters).is_err()
        });
    }

    /// Sends a message of another worker's to the agent.
    fn relay_to_agent(&mut self, message: Message) {
        self.send_to_agent(message);
        if matches!(Control::from_number(message.kind), Some(Control::Done | Control::Refused)) {
            super::room::advertise(self, false);
        }
    }

    /// Continues the moves of buckets that leave this worker, and begins new ones. Returns whether anything was done.
    fn move_buckets(&mut self, now: Instant) -> bool {
        let started = self.started;
        let Some(peers) = self.peers() else { return false };
        let mut worked = false;
        if !peers.leaving.is_empty() {
            peers.switch(now.0);
            // Without a card all frames arrive through the front worker, in order with its calls.
            let waits = started && peers.has_registers();
            let finished = |queue: &(usize, bool)| queue.1 || queue.0 >= QUEUE_FRAMES;
            let gone = |leaving: &Leaving| leaving.switched.is_some() && (!waits || leaving.taken.iter().all(finished));
            let (gone, stay) = std::mem::take(&mut peers.leaving).into_iter().partition(gone);
            peers.leaving = stay;
            for leaving in gone {
                self.hand_over(leaving.which, now);
                worked = true;
            }
        }
        worked | self.rebalance(now)
    }

    /// In the front worker: begins the moves that the balance asks for.
    fn rebalance(&mut self, now: Instant) -> bool {
        let Some(Crossbar { peers, front: Some(front) }) = self.crossbar.as_deref_mut() else { return false };
        let Some(step) = front.balance.next(now.0, peers.table(), || peers.loads()) else { return false };
        match step {
            Step::Moves(moves) => {
                for which in moves {
                    for other in peers.others().filter(|other| *other != usize::from(which.from)) {
                        peers.send(other, Call::Pause(which));
                    }
                    // The old owner learns of the move from the other workers' calls.
                    peers.pause(which);
                }
            }
            Step::Key(key) => {
                peers.set_key(&key);
                for slot in self.connections.slots.iter().flatten() {
                    front.buckets[slot.cid.slot() as usize] = peers.hash().bucket_of(&Input::of_flow(&slot.flow()));
                }
                self.broadcast(|| Call::HashKey(Box::new(key)));
            }
        }
        true
    }

    /// The old owner's last step: hands the bucket's connections over, when none of its queues has a frame of the
    /// bucket.
    fn hand_over(&mut self, which: Move, now: Instant) {
        self.to_kernel.flush(&self.counters, now.0);
        self.to_kernel.device.settle();
        let Some(peers) = self.crossbar.as_ref().map(|crossbar| &crossbar.peers) else { return };
        let its = |slot: &&Slot| peers.hash().bucket_of(&Input::of_flow(&slot.flow())) == which.bucket;
        let cids: Vec<Cid> = self.connections.slots.iter().flatten().filter(its).map(|slot| slot.cid).collect();
        let hash = baton_rss::Toeplitz::clone(peers.hash());
        // Dormant connections are woken here: the new owner may have forgotten their session by then, and they need it
        // to wake up.
        cids.iter().for_each(|cid| _ = self.wake_connection(cid.slot()));
        let slots = cids.into_iter().filter_map(|cid| self.remove_slot(cid)).collect();
        let acknowledged = self.take_acknowledged(|entry| hash.bucket_of(&Input::of_flow(entry.flow())) == which.bucket);
        let contents = Box::new(BucketContents { slots, acknowledged });
        self.count_connections();
        self.counters.add(Counter::Buckets, 1);
        let Some(peers) = self.peers() else { return };
        if peers.is_front() {
            return self.forward_hand_over(which, contents, now);
        }
        peers.send(FRONT, Call::HandOver(which, contents));
        self.on_moved(which, now);
    }

    /// Takes the connections of a bucket over, or forwards them in the front worker.
    fn on_hand_over(&mut self, which: Move, contents: Box<BucketContents>, now: Instant) {
        let Some(peers) = self.peers() else { return };
        if peers.is_front() {
            return self.forward_hand_over(which, contents, now);
        }
        self.insert_contents(*contents, now);
        self.on_moved(which, now);
    }

    /// In the front worker: sends the connections of a bucket to its new owner, which may be itself. All workers learn
    /// of the new owner from the front worker alone, so that they get it before the calls that the front worker sends
    /// for the bucket later.
    fn forward_hand_over(&mut self, which: Move, contents: Box<BucketContents>, now: Instant) {
        let Some(peers) = self.peers() else { return };
        let notified = peers.others().filter(|other| ![which.from, which.to].map(usize::from).contains(other));
        notified.for_each(|other| peers.send(other, Call::Moved(which)));
        if usize::from(which.to) == FRONT {
            self.insert_contents(*contents, now);
        } else {
            peers.send(usize::from(which.to), Call::HandOver(which, contents));
        }
        self.on_moved(which, now);
        if let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref_mut() {
            front.balance.done();
        }
    }

    /// Inserts the connections of a bucket.
    fn insert_contents(&mut self, contents: BucketContents, now: Instant) {
        self.adopt_acknowledged(contents.acknowledged, now);
        for mut slot in contents.slots {
            let index = slot.cid.slot();
            slot.scheduled = u64::MAX;
            slot.dirty = false;
            if let Custody::Active(offloaded) = &slot.custody {
                offloaded.publish_processor(self.processor);
            }
            if let Some(Crossbar { front: Some(front), .. }) = self.crossbar.as_deref_mut()
                && let Some(remote) = front.remote.remove(&index).filter(|remote| remote.cid == slot.cid)
            {
                slot.prepend_events(remote.pending);
            }
            self.connections.lookup.insert(&slot.key(), index);
            self.connections.slots[index as usize] = Some(slot);
            self.connections.count += 1;
            self.note_awake(index);
            self.follow_up(index, Events::empty());
            self.follow_opening(index);
        }
        self.count_connections();
    }

    /// Records a bucket's new owner, and dispatches the calls that were held for it.
    fn on_moved(&mut self, which: Move, now: Instant) {
        let held = self.peers().map(|peers| peers.moved(which)).unwrap_or_default();
        for call in held {
            self.dispatch(which.bucket, call, now);
        }
    }

    /// When a bucket that leaves, or the balance, needs this worker, in microseconds.
    pub(super) fn crossbar_due(&self) -> Option<u64> {
        let crossbar = self.crossbar.as_ref()?;
        let leaving = crossbar.peers.leaving.iter().filter_map(|leaving| leaving.switched).map(|at| at + SWITCH_DELAY).min();
        let balance = crossbar.front.as_ref().map(|front| front.balance.due());
        leaving.into_iter().chain(balance).min()
    }

    /// Calls `ring` for each other worker that sleeps and was sent calls.
    pub fn peer_doorbells(&mut self, ring: impl FnMut(usize)) {
        if let Some(peers) = self.peers() {
            peers.doorbells(ring);
        }
    }
}

/// The bucket of a frame. An ICMP message about a connection belongs to that connection's bucket, by whatever device it
/// came.
fn bucket_of(peers: &Peers, bytes: &[u8], from: From) -> u8 {
    let about = if from == From::Wire { crate::icmp::about(bytes, ANY_DEVICE) } else { None };
    match about {
        Some(about) => peers.hash().bucket_of(&Input::of_flow(&about.flow)),
        None => peers.hash().bucket(bytes, from),
    }
}
