//! The agent's commands: the steps of a move on the NIC.

use super::frames::needs_kernel;
use super::{Worker, peer_fin, room};
use crate::custody::{Custody, Refusal, Slot};
use crate::growth::{Growth, largest_window};
use crate::offloaded::{Memory, Offloaded};
use crate::partial::Path;
use baton_abi::layout::{Counter, RING_MESSAGES, nic, scratch, slot as at};
use baton_abi::{Cid, Control, LOST_QUEUE, Message, Operation, RESET_PEER};
use baton_device::{Checksum, Device};
use baton_image::{Image, MAX_ENCODED};
use baton_recovery::Replay;
use baton_shm::Pooled;
use baton_tcp::seq::{at_or_before, before};
use baton_tcp::{Connection, Events, Instant, Segment, State};
use baton_wire::{Flags, Flow, FlowKey, TcpFrame};
use core::sync::atomic::Ordering;

/// Most batches of frames that are received before connections are given up, if the device cannot say how many wait.
const MAX_DRAIN_BATCHES: usize = 256;

/// Most frames that a round's commands may send or receive. The remaining commands run in the next round.
const MOST_FRAMES: u64 = 1024;

/// Smallest MTU of IPv4 in bytes (RFC 791 section 3.2).
const MIN_MTU: u32 = 68;

/// Microseconds for which a program that has sent counts as one that answers: as long as acknowledgements are delayed.
const LATELY: u32 = 40_000;

/// The counter of the agent's commands with this operation.
fn of_agent(operation: Operation) -> Counter {
    match operation {
        Operation::NicHandoff => Counter::AgentHandoff,
        Operation::NicRestore => Counter::AgentRestore,
        Operation::NicForward => Counter::AgentForward,
        _ => Counter::AgentControl,
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Runs the commands that wait in the agent's ring, as far as that is not too much for a round. Returns whether
    /// there was any.
    #[inline(never)]
    pub(super) fn poll_commands(&mut self, now: Instant) -> bool {
        let mut worked = false;
        self.is_drained = false;
        let (mut begun, mut was_drained) = (self.frames(), false);
        for _ in 0..self.agent.commands.waiting().min(RING_MESSAGES as u64) {
            // Frames that waited on the wire do not count: they are received once, for all commands.
            if std::mem::replace(&mut was_drained, self.is_drained) != self.is_drained {
                begun = self.frames();
            }
            if self.frames().wrapping_sub(begun) >= MOST_FRAMES {
                break;
            }
            let Some(words) = self.agent.commands.pop() else { break };
            self.agent.commands.release();
            worked = true;
            let Some(message) = Message::from_words(words) else {
                self.counters.add(Counter::BadMessages, 1);
                continue;
            };
            let admitted = room::admits(self, &message);
            self.counters.add(of_agent(message.operation), 1);
            match self.crossbar {
                _ if !admitted => room::refuse(self, &message),
                None => self.run_command(&message, now),
                Some(_) => self.route_command(&message, now),
            }
        }
        worked
    }

    /// Runs a command and answers it.
    pub(super) fn run_command(&mut self, message: &Message, now: Instant) {
        if self.host_tcp.is_some() && self.waits_for_return(message) {
            return;
        }
        if self.occupant_is(message.cid) {
            self.wake_connection(message.cid.slot());
        }
        let (control, value) = match self.on_command(message, now) {
            Ok(value) => (Control::Done, value),
            Err(refusal) => (Control::Refused, refusal as u32),
        };
        self.count_connections();
        // The answer says that the kernel has received everything that the command sends it.
        self.to_kernel.device.settle();
        self.send_to_agent(Message::control(Operation::OsControl, control, message.cid, value, u32::from(message.kind)));
        if control == Control::Refused {
            room::uncharge_unless_occupied(self, message.cid);
        }
        if room::serves_agent(self) {
            room::advertise(self, false);
        }
    }

    /// Updates the counter of offloaded connections.
    pub(super) fn count_connections(&mut self) {
        self.counters.set(Counter::Connections, self.connections.count);
        self.has_extras |= self.has_many();
        if let Some(crossbar) = &self.crossbar {
            crossbar.peers.set_connections(self.connections.count);
        }
    }

    fn on_command(&mut self, message: &Message, now: Instant) -> Result<u32, Refusal> {
        let cid = message.cid;
        if cid.slot() as usize >= self.connections.slots.len() {
            return Err(Refusal::BadCommand);
        }
        match (message.operation, Control::from_number(message.kind)) {
            (Operation::NicHandoff, _) => self.handoff(cid, now),
            (Operation::NicRestore, _) => self.restore(cid, now),
            (Operation::NicForward, _) => self.forwarded(cid, message.address, message.length),
            (Operation::NicControl, Some(Control::Mirror)) => self.mirror(cid, now),
            (Operation::NicControl, Some(Control::Steal)) => self.steal(cid),
            (Operation::NicControl, Some(Control::Release)) => self.release(cid, now),
            (Operation::NicControl, Some(Control::Cancel)) => self.cancel(cid, message.address, now),
            (Operation::NicControl, Some(Control::Mtu)) => self.set_mtu(cid, message.address, now),
            (Operation::NicControl, Some(Control::Resume)) => self.resume(cid, Cid(message.address), now),
            (Operation::NicControl, Some(Control::Interface)) => self.set_interface(cid, message.address),
            (Operation::NicControl, Some(Control::Grant)) => self.grant(cid, message.address),
            (Operation::NicControl, Some(Control::Connect)) => self.connect(cid, message.address, now),
            (Operation::NicControl, Some(Control::Abort)) => self.abort(cid, now),
            (Operation::NicControl, Some(Control::Close)) => self.close(cid, message.address, now),
            (Operation::NicControl, Some(Control::Detach)) => self.detach(message.address),
            _ => Err(Refusal::BadCommand),
        }
    }

    /// The slot of a cid.
    pub(super) fn occupant(&mut self, cid: Cid) -> Result<&mut Slot, Refusal> {
        let checked = !cfg!(feature = "sabotage-skip-generation");
        self.connections.slots[cid.slot() as usize].as_mut().filter(|slot| !checked || slot.cid == cid).ok_or(Refusal::NotYours)
    }

    /// Whether the connection with this cid is here.
    fn occupant_is(&self, cid: Cid) -> bool {
        matches!(self.connections.slots.get(cid.slot() as usize), Some(Some(slot)) if slot.cid == cid)
    }

    /// Begins to copy a connection's frames.
    fn mirror(&mut self, cid: Cid, now: Instant) -> Result<u32, Refusal> {
        let index = cid.slot();
        if self.connections.slots[index as usize].is_some() {
            return Err(Refusal::WrongState);
        }
        let flow = self.read_flow(index);
        let key = FlowKey::from(&flow);
        if self.connections.overlaps(&key) {
            return Err(Refusal::AlreadyHere);
        }
        // Everything that the NIC has acknowledged for the kernel must be acknowledged by the kernel first.
        if !self.end_active_ack(&key) {
            return Err(Refusal::NotYet);
        }
        // From now on its frames go to the kernel without aggregation, so its open aggregate must go first.
        self.to_kernel.flush_connection(&key, &self.counters, now.0);
        self.connections.slots[index as usize] = Some(Slot::new(key, cid, Custody::Mirrored));
        self.connections.lookup.insert(&key, index);
        self.connections.count += 1;
        Ok(0)
    }

    /// The flow in a slot.
    pub(super) fn read_flow(&self, index: u32) -> Flow {
        let mut bytes = [0u8; Flow::BYTES];
        // Cannot fail: the region was made with as many slots as the worker has.
        let _ = self.nic_memory.read(nic::slot(index) + at::FLOW, &mut bytes);
        Flow::from_bytes(&bytes)
    }

    /// Ends the mirroring: frames are held from now on. Returns 1 if mirrored frames were dropped, else 0.
    fn steal(&mut self, cid: Cid) -> Result<u32, Refusal> {
        let slot = self.occupant(cid)?;
        match slot.custody {
            Custody::Mirrored => {
                slot.custody = Custody::Held;
                slot.held.mark_stolen();
                Ok(u32::from(slot.held.overflowed()))
            }
            _ => Err(Refusal::WrongState),
        }
    }

    /// The handoff parameters in a slot.
    pub(super) fn parameters(&self, index: u32) -> [u32; 6] {
        let base = nic::slot(index) + at::PARAMETERS;
        core::array::from_fn(|word| self.nic_memory.word32(base + 4 * word).load(Ordering::Acquire))
    }

    /// `nic_handoff`: makes a running connection from the image in the slot.
    fn handoff(&mut self, cid: Cid, now: Instant) -> Result<u32, Refusal> {
        let index = cid.slot();
        let [session, receive_base, receive_size, send_base, send_size, block] = self.parameters(index);
        let memory = Memory { receive_base, receive_size, send_base, send_size, block };
        let mut bytes = [0u8; MAX_ENCODED];
        let _ = self.nic_memory.read(nic::scratch(index) + scratch::IMAGE, &mut bytes);
        let (image, nic) = Image::decode_with(&bytes).map_err(|_| Refusal::BadImage)?;
        let most = self.limits(index);
        let attached = self.programs.sessions.get(session as usize).and_then(Option::as_ref).ok_or(Refusal::UnknownSession)?;
        let (session_memory, fast_path) = (attached.memory.clone(), attached.fast_path && self.host_tcp.is_some());
        for word in [at::LENT, at::DORMANT] {
            self.nic_memory.word32(nic::slot(index) + word).store(0, Ordering::Relaxed);
        }
        let (nic_memory, quick_ack, processor) = (self.nic_memory.clone(), self.settings.quick_ack, self.processor);
        let slot = self.occupant(cid)?;
        if !matches!(slot.custody, Custody::Held) {
            return Err(Refusal::WrongState);
        }
        if image.flow != slot.flow() {
            return Err(Refusal::BadImage);
        }
        if !memory.fits(&session_memory) || !memory.holds(&image) {
            return Err(Refusal::BadMemory);
        }
        let tcp = Connection::from_image(&image, nic.as_ref(), receive_size, now);
        let offloaded = Offloaded::new(tcp, &image, memory, session, session_memory, nic_memory, index);
        let mut offloaded = offloaded.ok_or(Refusal::BadMemory)?;
        // A kernel does not say whether a program answers what comes; one that has sent lately does.
        let answers = nic.is_none() && image.sent_ago.is_none_or(|ago| ago < LATELY);
        if quick_ack || answers {
            offloaded.tcp.set_quick_ack(quick_ack);
        }
        offloaded.growth = Growth::new(memory, most, offloaded.flags_of_block());
        if let Some(most) = largest_window(most) {
            offloaded.tcp.limit_window(most);
        }
        let fin_received = offloaded.tcp.fin_received();
        offloaded.publish(now);
        offloaded.publish_processor(processor);
        offloaded.path = if fast_path { Path::Fast } else { Path::Whole };
        slot.custody = Custody::Active(Pooled::new(offloaded));
        if fin_received {
            peer_fin::came(self, cid);
        }
        self.run_held(index, now);
        self.lend_unless_quiet(index, now);
        Ok(0)
    }

    /// Processes the held frames. A segment that the kernel had received before the steal is not answered as a
    /// duplicate. What looks like one but cannot be the peer's is dropped.
    pub(super) fn run_held(&mut self, index: u32, now: Instant) {
        self.note_awake(index);
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        let (mut events, mut cause) = (Events::empty(), None);
        for frame in slot.held.take() {
            let Ok(parsed) = TcpFrame::parse(frame.bytes(), frame.interface) else { continue };
            let mut segment = Segment::from(&parsed);
            if let Some(found) = needs_kernel(&segment, &offloaded.tcp) {
                slot.held.push(&parsed, &frame);
                cause = cause.or(Some(found));
                continue;
            }
            let known = at_or_before(segment.end(), offloaded.tcp.rcv_nxt()) && segment.end() != segment.seq;
            if known {
                let learned = offloaded.tcp.learn_timestamp(&segment, now);
                if !learned || !before(offloaded.tcp.snd_una(), segment.ack) {
                    continue;
                }
                segment.seq = offloaded.tcp.rcv_nxt();
                segment.length = 0;
                segment.flags = Flags::ACK;
            }
            let received = offloaded.tcp.input(&segment, now);
            if received.place > 0 {
                let payload = &parsed.payload(frame.bytes())[received.skip as usize..][..received.place as usize];
                offloaded.receive.write(received.place_seq, payload);
            }
            offloaded.note(&received);
            events |= received.events;
        }
        self.output.send_all(offloaded, &self.counters, now);
        if let Some(cause) = cause {
            let cid = slot.cid;
            self.send_to_agent(Message::new(Operation::OsRestore, cid, cause as u32, 0));
        }
        self.follow_up(index, events);
    }

    /// `nic_restore`: runs all commands that the program has queued so far, stops the connection, and writes its image
    /// to the slot.
    fn restore(&mut self, cid: Cid, now: Instant) -> Result<u32, Refusal> {
        let session = match &self.occupant(cid)?.custody {
            // A connection that has ended has no image. Its end is reported to the agent when its program has been sent
            // its last events.
            Custody::Active(offloaded) if offloaded.tcp.state() == State::Closed => return Err(Refusal::Ended),
            Custody::Active(offloaded) => offloaded.session as usize,
            _ => return Err(Refusal::WrongState),
        };
        let index = cid.slot();
        // The commands that the program has queued must not lend the connection now.
        self.set_path(index, Path::Fast, Path::Pinned);
        self.drain_session(session, now);
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return Err(Refusal::NotYours) };
        let custody = std::mem::replace(&mut slot.custody, Custody::Held);
        let Custody::Active(mut offloaded) = custody else { return Err(Refusal::WrongState) };
        if offloaded.fetches {
            // The program is kept out of the connection, and its queued bytes move with the connection.
            offloaded.take_queued();
        }
        let image = offloaded.tcp.to_image(&offloaded.image, now);
        offloaded.publish(now);
        let mut bytes = [0u8; MAX_ENCODED];
        let nic = offloaded.tcp.nic_state(now);
        let encoded = image.as_ref().map(|image| image.encode_with(Some(&nic), &mut bytes));
        if !matches!(encoded, Some(Ok(_))) {
            slot.custody = Custody::Active(offloaded);
            self.set_path(index, Path::Pinned, Path::Fast);
            return Err(Refusal::WrongState);
        }
        let _ = self.nic_memory.write(nic::scratch(index) + scratch::IMAGE, &bytes);
        let read = offloaded.tcp.rcv_read();
        offloaded.receive.gather(read);
        offloaded.gather_sends();
        slot.custody = Custody::Leaving(offloaded);
        if cfg!(feature = "sabotage-lose-steal") {
            self.remove_slot(cid);
        }
        Ok(0)
    }

    /// Releases a connection that the kernel has imported: sends the kernel the replay and the frames held since.
    fn release(&mut self, cid: Cid, now: Instant) -> Result<u32, Refusal> {
        self.drain_wire(now);
        let slot = self.occupant(cid)?;
        let Custody::Leaving(_) = slot.custody else { return Err(Refusal::WrongState) };
        let Some(mut slot) = room::free_slot(self, cid) else { return Err(Refusal::NotYours) };
        let Custody::Leaving(offloaded) = &slot.custody else { return Err(Refusal::WrongState) };
        offloaded.unpublish();
        if let Some(image) = offloaded.tcp.to_image(&offloaded.image, now) {
            let ranges: Vec<(u32, u32)> = offloaded.tcp.out_of_order().collect();
            let replay = Replay { image: &image, ranges: &ranges, fin_behind_hole: offloaded.tcp.fin_behind_hole() };
            let (sent, dropped) = replay.send(&mut self.to_kernel.device, |seq, out| offloaded.receive.read(seq, out));
            self.counters.add(Counter::HostSent, sent);
            self.counters.add(Counter::Dropped, dropped);
        }
        for mut frame in slot.held.take() {
            // The checksum was verified, but the kernel only trusts its own devices, so its state stays as it was
            // received.
            let sent = self.to_kernel.device.transmit(&mut frame);
            self.counters.add(if sent { Counter::HostSent } else { Counter::Dropped }, 1);
        }
        Ok(0)
    }

    /// Cancels a move to the NIC, or removes a dead connection. `how`: see [`Control::Cancel`].
    fn cancel(&mut self, cid: Cid, how: u32, now: Instant) -> Result<u32, Refusal> {
        self.drain_wire(now);
        self.occupant(cid)?;
        let Some(mut slot) = room::free_slot(self, cid) else { return Err(Refusal::NotYours) };
        let flow = slot.flow();
        match slot.custody {
            // The recovery record remains until the agent has recorded the connection's end, since the agent may die
            // before.
            Custody::Active(offloaded) => self.keep_closed(offloaded, flow, now),
            Custody::Leaving(_) | Custody::Lent(_) | Custody::Dormant(_) | Custody::Mirrored | Custody::Opening(_) => {}
            Custody::Held if how == RESET_PEER => self.reset_made(cid, now),
            Custody::Held => {
                if how != LOST_QUEUE {
                    slot.held.drop_mirrored();
                }
                for mut frame in slot.held.take() {
                    self.to_kernel.device.transmit(&mut frame);
                }
            }
        }
        Ok(0)
    }

    /// Beside the kernel: receives the frames that wait at this NIC's sockets, since the kernel did not get those of a
    /// connection that the NIC is about to give up. The agent has directed later frames to the kernel before it sent
    /// the commands of this round, so once is enough for all of them. Not before [`Worker::start`]: the waiting frames
    /// are received then, after the commands that hold connections and grant slots.
    fn drain_wire(&mut self, now: Instant) {
        if !self.started || !self.settings.beside || std::mem::replace(&mut self.is_drained, true) {
            return;
        }
        let (_, come) = self.output.wire.device.taken_and_come();
        for _ in 0..MAX_DRAIN_BATCHES {
            self.turn = self.settings.batch;
            let (taken, _) = self.output.wire.device.taken_and_come();
            if taken >= come || !self.poll_wire(now) {
                return;
            }
        }
    }

    /// Removes a connection from its slot, which another worker may get.
    pub(super) fn remove_slot(&mut self, cid: Cid) -> Option<Slot> {
        let slot = self.connections.slots[cid.slot() as usize].take()?;
        let slots = &self.connections.slots;
        let key_of = |other: u32| slots[other as usize].as_ref().map_or(slot.key(), Slot::key);
        self.connections.lookup.remove(&slot.key(), cid.slot(), key_of);
        self.programs.dirty.retain(|index| *index != cid.slot());
        self.connections.count -= 1;
        Some(slot)
    }

    /// `nic_forward`: holds a frame that reached the host during the handoff, or drops it, as those from the wire.
    fn forwarded(&mut self, cid: Cid, address: u32, length: u32) -> Result<u32, Refusal> {
        let (address, length) = (address as usize, length as usize);
        if address.saturating_add(length) > nic::FORWARD_BYTES {
            return Err(Refusal::BadCommand);
        }
        if !matches!(self.occupant(cid)?.custody, Custody::Held) {
            return Err(Refusal::WrongState);
        }
        let mut frame = baton_device::Frame::with_capacity(length);
        frame.set_length(length);
        let _ = self.nic_memory.read(nic::forward(self.connections.slots.len()) + address, frame.bytes_mut());
        frame.checksum = Checksum::Verified;
        let drops = self.settings.drop_during_moves;
        let slot = self.occupant(cid)?;
        let flow = slot.flow();
        // The kernel has received the frame for this connection, so it came by the connection's device.
        let parsed = TcpFrame::parse(frame.bytes(), flow.device).map_err(|_| Refusal::BadCommand)?;
        if parsed.flow != flow {
            return Err(Refusal::BadCommand);
        }
        if drops || !slot.held.push(&parsed, &frame) {
            self.counters.add(Counter::Dropped, 1);
        }
        Ok(0)
    }

    /// Sets the path MTU of a connection.
    fn set_mtu(&mut self, cid: Cid, mtu: u32, now: Instant) -> Result<u32, Refusal> {
        let Custody::Active(offloaded) = &mut self.occupant(cid)?.custody else { return Err(Refusal::WrongState) };
        if mtu < MIN_MTU {
            return Err(Refusal::BadCommand);
        }
        offloaded.set_mtu(mtu);
        offloaded.tcp.on_mtu_change(mtu, now);
        let index = cid.slot();
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return Err(Refusal::NotYours) };
        if let Custody::Active(offloaded) = &mut slot.custody {
            self.output.send_all(offloaded, &self.counters, now);
        }
        self.follow_up(index, Events::empty());
        Ok(0)
    }

    /// Sets the interface that a connection's frames leave through. Without an interface its segments are lost, as in a
    /// kernel without a route, and are retransmitted after a time-out.
    fn set_interface(&mut self, cid: Cid, interface: u32) -> Result<u32, Refusal> {
        let Custody::Active(offloaded) = &mut self.occupant(cid)?.custody else { return Err(Refusal::WrongState) };
        offloaded.set_interface(interface);
        Ok(0)
    }

    /// Removes a session.
    fn detach(&mut self, session: u32) -> Result<u32, Refusal> {
        let here = self.programs.sessions.get(session as usize).is_some_and(Option::is_some);
        let elsewhere = self.programs.message_ports.iter().any(|(_, id)| *id == session);
        self.forget_session(session);
        if here || elsewhere { Ok(0) } else { Err(Refusal::UnknownSession) }
    }

    /// Sends a connection's request for memory to the agent.
    #[cold]
    #[inline(never)]
    pub(super) fn request_memory(&mut self, index: u32) {
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if let Some((receive, send)) = offloaded.growth.take_request() {
            let message = Message::control(Operation::OsControl, Control::Grow, slot.cid, receive, send);
            self.send_to_agent(message);
        }
    }

    /// The limits of receive and send memory in a slot's parameters.
    pub(super) fn limits(&self, index: u32) -> [u32; 2] {
        let base = nic::slot(index) + at::LIMITS;
        core::array::from_fn(|word| self.nic_memory.word32(base + 4 * word).load(Ordering::Acquire))
    }

    /// Resumes a stopped connection in other memory and with another cid, so that the program can distinguish events
    /// whose effect the agent has already written to the block from later ones.
    pub(super) fn resume(&mut self, cid: Cid, next: Cid, now: Instant) -> Result<u32, Refusal> {
        let index = cid.slot();
        let [_, receive_base, receive_size, send_base, send_size, block] = self.parameters(index);
        let memory = Memory { receive_base, receive_size, send_base, send_size, block };
        let limits = self.limits(index);
        let read = self.nic_memory.word32(nic::slot(index) + at::READ).load(Ordering::Acquire);
        if next.slot() != index {
            return Err(Refusal::BadCommand);
        }
        let slot = self.occupant(cid)?;
        let Custody::Leaving(offloaded) = &mut slot.custody else { return Err(Refusal::WrongState) };
        let Some(image) = offloaded.tcp.to_image(&offloaded.image, now) else { return Err(Refusal::WrongState) };
        if !memory.fits(&offloaded.session_memory) || !memory.holds(&image) || !offloaded.move_into(memory, limits, &image) {
            return Err(Refusal::BadMemory);
        }
        // The program's `nic_recvd` lags behind what it has read. A program that gives a wrong number harms only
        // itself.
        let before = offloaded.tcp.rcv_read();
        let _ = offloaded.tcp.consumed(read.wrapping_sub(before));
        offloaded.tcp.shrink();
        let Custody::Leaving(offloaded) = std::mem::replace(&mut slot.custody, Custody::Held) else {
            return Err(Refusal::WrongState);
        };
        slot.custody = Custody::Active(offloaded);
        slot.cid = next;
        // It was removed from the list of slots with events while it was stopped.
        slot.dirty = false;
        self.run_held(index, now);
        self.set_path(index, Path::Pinned, Path::Fast);
        self.lend_unless_quiet(index, now);
        Ok(0)
    }
}
