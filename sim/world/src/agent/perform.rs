//! Performs the actions that the machine of `baton-moves` asks for, on the modelled kernel and the real worker.

use super::Agent;
use super::connection::{Connection, Growing};
use crate::journal::{Entry, Memory, OnNic};
use crate::keeper::Until;
use crate::machine::Machine;
use crate::port::{Fuse, Lane, Port};
use crate::trace::Trace;
use baton_abi::layout::{Owner, block, nic, slot};
use baton_abi::resource::pages;
use baton_abi::{Cid, Control, LOST_QUEUE, Message, Operation};
use baton_image::{Image, NicState, Stay};
use baton_moves::{Action, Outcome, Phase, Refusal, Source, Step};
use baton_recovery::{
    Progress, Replay, empty_memory, image_at_death, read_image, read_image_with, read_ranges, read_record, unpublish, write_image,
};
use baton_shm::{Circle, Region};
use std::sync::atomic::Ordering;

/// Initial size of send and of receive memory in bytes.
const BEGINNING: u32 = 1 << 16;
/// Greatest size in bytes.
const MOST: u32 = 1 << 19;

fn damaged(what: &'static str) -> Refusal {
    Refusal::Lost(what, "damaged".into())
}

/// One action of one connection.
pub(super) struct Performer<'a> {
    pub agent: &'a mut Agent,
    pub connection: &'a mut Connection,
    pub machine: &'a mut Machine,
    pub trace: &'a mut Trace,
}

impl Performer<'_> {
    pub fn perform(&mut self, action: &Action) -> Outcome {
        if action.asks_nic() && !self.agent.nic.has_room() {
            return Outcome::NotYet;
        }
        match action {
            Action::Reserve => self.reserve().into(),
            Action::Mirror => self.ask(action, Control::Mirror, 0),
            Action::Cover => done_if(self.is_covered()),
            Action::Acknowledge => done_if(self.acknowledge()),
            Action::Leave => done_if(self.connection.block.is_left()),
            Action::Steal => self.steal(),
            Action::Note(phase) => self.note(*phase).into(),
            Action::Export => self.export().into(),
            Action::Copy => self.copy().into(),
            Action::Purge => self.machine.kernel.purge(self.connection.descriptor).into(),
            Action::HandOff => self.hand_off(),
            Action::Check => if self.machine.kernel.routed { Ok(()) } else { Err(Refusal::NoRoute) }.into(),
            Action::Rest => self.rest(),
            Action::Import(source) => self.import(*source),
            Action::Release => self.ask(action, Control::Release, 0),
            Action::Replay => self.replay(),
            Action::Cancel | Action::End => self.ask(action, Control::Cancel, 0),
            Action::Finish | Action::FinishAnew => self.finish().into(),
            Action::Enlarge => self.enlarge().into(),
            Action::Grow => self.grow().into(),
            Action::Resume => self.resume(),
            Action::StealAgain => self.steal_again(),
            other => {
                self.give_back(other);
                Outcome::Done
            }
        }
    }

    /// Completes an action that has sent the NIC a command, now that the NIC has answered.
    pub fn answered(&mut self, action: &Action, answer: Result<(), Refusal>) -> Outcome {
        match (action, &answer) {
            (Action::Resume, Ok(())) => self.shrink(),
            (Action::End, _) => self.end(),
            (Action::Release, Err(Refusal::NicGone)) => return answer.into(),
            _ => {}
        }
        match action {
            Action::End | Action::Release | Action::Cancel | Action::Replay | Action::StealAgain => Outcome::Done,
            _ => answer.into(),
        }
    }

    /// Performs the actions that cannot be refused.
    fn give_back(&mut self, action: &Action) {
        match action {
            Action::KeepOut => self.connection.block.set_owner(Owner::Moving),
            Action::LetIn(owner) => self.let_in(*owner),
            Action::Abandon => self.machine.kernel.abandon(self.connection.descriptor),
            Action::Clear => self.clear(),
            Action::GiveMemory => self.give_memory(),
            Action::Free => {
                self.give_memory();
                self.give_slot();
            }
            Action::Shrink => self.shrink(),
            Action::GiveUp => self.give_up(),
            Action::EndNic => self.machine.kill_nic(self.trace),
            _ => {}
        }
    }

    fn cid(&self) -> Result<Cid, Refusal> {
        self.connection.cid.ok_or(Refusal::NoRoom)
    }

    /// Sends the NIC the command of an action.
    fn send(&mut self, action: &Action, command: Message) -> Outcome {
        match self.agent.nic.ask(self.machine, command) {
            Ok(()) => Outcome::Sent,
            Err(Refusal::NoRoom) => Outcome::NotYet,
            Err(refusal) => self.answered(action, Err(refusal)),
        }
    }

    /// Sends the NIC a control command about the connection.
    fn ask(&mut self, action: &Action, control: Control, value: u32) -> Outcome {
        match self.connection.cid {
            Some(cid) => self.send(action, Message::control(Operation::NicControl, control, cid, value, 0)),
            None => self.answered(action, Err(Refusal::NoRoom)),
        }
    }

    /// The offset of the connection's slot.
    fn slot(&self) -> Result<usize, Refusal> {
        Ok(nic::slot(self.cid()?.slot()))
    }

    fn reserve(&mut self) -> Result<(), Refusal> {
        self.machine.kernel.examine(self.connection.descriptor, self.machine.now)?;
        let shared = self.machine.kernel.socket(self.connection.descriptor).holders() > 1;
        if shared && self.connection.until == Until::Alone {
            return Err(Refusal::Shared);
        }
        let cid = self.agent.nic.take_slot().ok_or(Refusal::NoRoom)?;
        self.connection.cid = Some(cid);
        let (base, memory) = (self.slot()?, &self.machine.card().memory);
        let _ = memory.write(base + slot::FLOW, &self.connection.flow.to_bytes());
        memory.word32(base + slot::COVERED).store(0, Ordering::Release);
        unpublish(memory, cid.slot());
        Ok(())
    }

    fn is_covered(&mut self) -> bool {
        let Ok(base) = self.slot() else { return false };
        let covered = self.machine.card().memory.word32(base + slot::COVERED).load(Ordering::Acquire) == 1;
        covered || !self.machine.kernel.has_disorder(self.connection.descriptor)
    }

    fn acknowledge(&mut self) -> bool {
        self.connection.block.set_owner(Owner::Moving);
        let left = self.connection.block.is_left();
        if left {
            self.machine.kernel.acknowledge(self.connection.descriptor, self.machine.now);
        }
        self.hand_to_kernel();
        left
    }

    fn hand_to_kernel(&mut self) {
        self.connection.moves += 1;
        self.connection.block.store(block::MOVES, self.connection.moves);
        self.connection.block.set_owner(Owner::Kernel);
    }

    fn let_in(&mut self, owner: Owner) {
        match owner {
            Owner::Kernel => self.hand_to_kernel(),
            owner => self.connection.block.set_owner(owner),
        }
    }

    fn steal(&mut self) -> Outcome {
        match self.machine.kernel.examine(self.connection.descriptor, self.machine.now) {
            Ok(()) => self.ask(&Action::Steal, Control::Steal, 0),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn note(&mut self, phase: Phase) -> Result<(), Refusal> {
        let (cid, now) = (self.cid()?, self.machine.now.0);
        match phase {
            Phase::Reading if self.connection.machine.step() == Step::Recorded => {
                self.machine.card().journal.entry(cid).ok_or(Refusal::NoRoom)?.phase = phase;
            }
            Phase::Reading => {
                let entry = Entry { phase, connection: self.connection.number, cid, on_nic: None };
                self.machine.card().note(entry);
            }
            Phase::Copied => {
                let on_nic = self.connection.on_nic.as_mut().ok_or(Refusal::Filter)?;
                on_nic.handed_off_at = now;
                let on_nic = Some(on_nic.clone());
                let entry = self.machine.card().journal.entry(cid).ok_or(Refusal::NoRoom)?;
                (entry.phase, entry.on_nic) = (phase, on_nic);
            }
            Phase::Sending => {
                let image = self.connection.image.ok_or(Refusal::NoRoom)?;
                let _ = write_image(&self.machine.card().memory, cid, &image, None);
                self.machine.card().journal.entry(cid).ok_or(Refusal::NoRoom)?.phase = phase;
            }
        }
        Ok(())
    }

    fn export(&mut self) -> Result<(), Refusal> {
        let image = self.machine.kernel.export(self.connection.descriptor, self.machine.now)?;
        self.connection.exported = Some(image);
        Ok(())
    }

    /// Copies the bytes of both queues into session memory.
    fn copy(&mut self) -> Result<(), Refusal> {
        let mut image = self.connection.exported.ok_or(Refusal::NoRoom)?;
        let retransmitted = self.machine.kernel.retransmitted(self.connection.descriptor);
        let stay = self.connection.stay.as_deref();
        let nic = stay.and_then(|stay| stay.complete(&mut image, retransmitted, self.machine.now.0));
        self.connection.nic = nic.map(Box::new);
        if self.machine.card().memory_short {
            return Err(Refusal::NoRoom);
        }
        let window = image.rcv_adv.wrapping_sub(image.rcv_nxt) + image.unread + (1 << image.rcv_wscale);
        let heap = &mut self.agent.heaps[self.connection.session as usize];
        let receive = heap.take(window.max(BEGINNING).next_power_of_two()).ok_or(Refusal::NoRoom)?;
        let Some(send) = heap.take(image.send_queue().max(BEGINNING).next_power_of_two()) else {
            heap.give(receive);
            return Err(Refusal::NoRoom);
        };
        let memory = Memory { receive, send };
        if !self.promise(memory) {
            let heap = &mut self.agent.heaps[self.connection.session as usize];
            [receive, send].into_iter().for_each(|block| heap.give(block));
            return Err(Refusal::Full);
        }
        self.connection.on_nic = Some(OnNic { image, memory, handed_off_at: 0 });
        let (unread, unacknowledged) = self.machine.kernel.queues(self.connection.descriptor);
        self.circle(receive)?.write(image.read_seq(), &unread);
        self.circle(send)?.write(image.snd_una, &unacknowledged);
        Ok(())
    }

    /// Promises the connection memory on the NIC. False if that has not announced room.
    fn promise(&mut self, memory: Memory) -> bool {
        let slot = self.connection.cid.map(Cid::slot);
        slot.is_some_and(|slot| self.agent.nic.room.promise_memory(slot, pages(memory.receive.1, memory.send.1)))
    }

    fn circle(&self, (offset, size): (u32, u32)) -> Result<Circle, Refusal> {
        self.connection.block.memory.circle(offset, size).ok_or(Refusal::NoRoom)
    }

    fn hand_off(&mut self) -> Outcome {
        match self.prepare_handoff() {
            Ok(cid) => self.send(&Action::HandOff, Message::new(Operation::NicHandoff, cid, 0, 0)),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn prepare_handoff(&mut self) -> Result<Cid, Refusal> {
        let cid = self.cid()?;
        self.connection.moves += 1;
        let on_nic = self.connection.on_nic.clone().ok_or(Refusal::NoRoom)?;
        let (base, memory) = (nic::slot(cid.slot()), self.machine.card().memory.clone());
        for (at, most) in [MOST | slot::MAY_GROW, MOST].into_iter().enumerate() {
            memory.word32(base + slot::LIMITS + 4 * at).store(most, Ordering::Release);
        }
        self.write_parameters(on_nic.memory, base);
        let nic = self.connection.nic.take();
        self.connection.stay = None;
        write_image(&memory, cid, &on_nic.image, nic.as_deref()).map_err(|_| Refusal::NoRoom)?;
        let (image, b) = (&on_nic.image, &self.connection.block);
        b.store(block::READ_SEQ, image.read_seq());
        write_block(self.connection, image, on_nic.memory, cid);
        b.store(block::FLAGS, u32::from(image.state.fin_received()) | u32::from(image.state.fin_queued()) << 1);
        b.store(block::MOVES, self.connection.moves);
        if !self.machine.card().handed_off.insert(cid.0) {
            self.machine.failure = Some(format!("cid {} of host {} is used twice", cid.0, self.machine.number));
        }
        Ok(cid)
    }

    fn write_parameters(&mut self, Memory { receive, send }: Memory, base: usize) {
        let parameters = [self.connection.session, receive.0, receive.1, send.0, send.1, self.connection.number];
        for (at, value) in parameters.into_iter().enumerate() {
            self.machine.card().memory.word32(base + slot::PARAMETERS + 4 * at).store(value, Ordering::Release);
        }
    }

    fn rest(&mut self) -> Outcome {
        match self.cid() {
            Ok(cid) => self.send(&Action::Rest, Message::new(Operation::NicRestore, cid, 0, 0)),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn import(&mut self, source: Source) -> Outcome {
        let image = match source {
            Source::Exported => self.connection.on_nic.as_ref().map(|on_nic| (on_nic.image, None)).ok_or(Refusal::NoRoom),
            Source::Rested => self.image_at_rest(),
            Source::Record => self.image_of_record().map(|image| (image, None)),
        };
        let imported = image.and_then(|(image, nic)| self.import_image(image, nic).map(|()| image));
        match imported {
            Ok(image) if source != Source::Exported && image.state.fin_acknowledged() => Outcome::DoneFinAcknowledged,
            other => other.map(|_| ()).into(),
        }
    }

    fn progress(&self) -> Progress {
        Progress::of(&self.connection.block.memory, self.connection.number)
    }

    fn image_at_rest(&mut self) -> Result<(Image, Option<NicState>), Refusal> {
        let cid = self.cid()?;
        // A NIC that writes an invalid image must not continue.
        let (image, nic) = read_image_with(&self.machine.card().memory, cid).map_err(|_| Refusal::NicGone)?;
        let unread = self.progress().unread(image.read_seq().wrapping_add(image.unread), image.unread);
        Ok((Image { unread, ..image }, nic))
    }

    fn image_of_record(&mut self) -> Result<Image, Refusal> {
        let base = self.slot()?;
        let on_nic = self.connection.on_nic.as_ref().ok_or_else(|| damaged("journal"))?;
        let (now, progress) = (self.machine.now.0, self.progress());
        let image = match read_record(&self.machine.card().memory, base) {
            None => on_nic.image,
            Some(record) => {
                let elapsed = now - on_nic.handed_off_at;
                image_at_death(&on_nic.image, on_nic.memory.send.1, elapsed, &record, &progress)
                    .ok_or_else(|| damaged("record"))?
            }
        };
        image.check().map_err(|_| damaged("record"))?;
        Ok(image)
    }

    fn import_image(&mut self, image: Image, nic: Option<NicState>) -> Result<(), Refusal> {
        self.connection.image = Some(image);
        self.connection.stay = Some(Box::new(Stay::new(image, nic, self.machine.now.0)));
        let memory = self.connection.on_nic.as_ref().ok_or_else(|| damaged("its memory"))?.memory;
        if image.unread > memory.receive.1 || image.send_queue() > memory.send.1 {
            return Err(damaged("queues"));
        }
        let mut unread = vec![0; image.unread as usize];
        self.circle(memory.receive)?.read(image.read_seq(), &mut unread);
        let unacknowledged = self.unacknowledged(memory, &image)?;
        self.machine.kernel.import(self.connection.descriptor, &image, &unread, &unacknowledged, self.machine.now)
    }

    fn unacknowledged(&self, memory: Memory, image: &Image) -> Result<Vec<u8>, Refusal> {
        let mut bytes = vec![0; image.send_queue() as usize];
        self.circle(memory.send)?.read(image.snd_una, &mut bytes);
        Ok(bytes)
    }

    /// Replays to the kernel, in place of a NIC that has died, what that NIC held out of order.
    fn replay(&mut self) -> Outcome {
        if let (Some(image), Ok(cid), Some(memory)) = (self.connection.image, self.cid(), self.memory())
            && let Ok(receive) = self.circle(memory.receive)
        {
            let nic_memory = &self.machine.card().memory;
            let ranges = ranges_of(nic_memory, cid).unwrap_or_default();
            let outgoing = self.machine.to_kernel.clone();
            let mut kernel = Port { incoming: Lane::new(0), outgoing, fuse: Fuse::default() };
            let replay = Replay { image: &image, ranges: &ranges, fin_behind_hole: None };
            replay.send(&mut kernel, |seq, out| receive.read(seq, out));
        }
        // The NIC passes the frames that it holds to the kernel, mirrored ones too, and holds no more.
        self.ask(&Action::Replay, Control::Cancel, LOST_QUEUE)
    }

    fn memory(&self) -> Option<Memory> {
        Some(self.connection.on_nic.as_ref()?.memory)
    }

    fn finish(&mut self) -> Result<(), Refusal> {
        let (Some(image), Some(memory)) = (self.connection.image, self.memory()) else { return Err(damaged("import")) };
        let unacknowledged = self.unacknowledged(memory, &image)?;
        self.machine.kernel.finish(self.connection.descriptor, &image, &unacknowledged);
        Ok(())
    }

    fn steal_again(&mut self) -> Outcome {
        let Some(next) = self.connection.cid.map(Cid::next_generation) else { return Outcome::Done };
        self.connection.cid = Some(next);
        let mirror = Message::control(Operation::NicControl, Control::Mirror, next, 0, 0);
        let _ = self.agent.nic.post(self.machine, mirror);
        self.ask(&Action::StealAgain, Control::Steal, 0)
    }

    fn clear(&mut self) {
        if let Some(cid) = self.connection.cid {
            let card = self.machine.card();
            // Before the entry goes, which the next agent would know the cid from.
            card.journal.next_cids.insert(cid.slot(), cid.next_generation());
            card.journal.entries.remove(&cid.slot());
            unpublish(&card.memory, cid.slot());
        }
    }

    fn give_memory(&mut self) {
        if let Some(OnNic { memory, .. }) = self.connection.on_nic.take() {
            let heap = &mut self.agent.heaps[self.connection.session as usize];
            heap.give(memory.receive);
            heap.give(memory.send);
        }
    }

    fn give_slot(&mut self) {
        if let Some(cid) = self.connection.cid.take() {
            self.agent.nic.give_slot(&mut self.machine.card().journal, cid);
        }
    }

    /// Releases a connection that has ended on the NIC, which has dropped it; its memory stays until the program has
    /// read it.
    fn end(&mut self) {
        self.clear();
        self.give_slot();
        self.machine.kernel.end(self.connection.descriptor);
        if let Some(on_nic) = self.connection.on_nic.take() {
            self.agent.ended.insert(self.connection.number, on_nic.memory);
        }
    }

    fn give_up(&mut self) {
        self.connection.block.set_owner(Owner::Nic);
        if let Some(cid) = self.connection.cid {
            let _ =
                self.agent.nic.post(self.machine, Message::control(Operation::NicControl, Control::Cancel, cid, LOST_QUEUE, 0));
            self.agent.nic.inbox.stop_waiting(cid);
        }
        self.clear();
        self.give_slot();
        self.machine.kernel.end(self.connection.descriptor);
        self.give_memory();
        self.connection.lost = true;
    }

    fn enlarge(&mut self) -> Result<(), Refusal> {
        let cid = self.cid()?;
        let old = self.connection.on_nic.as_ref().ok_or(Refusal::NoRoom)?.memory;
        let Some((receive, send)) = self.connection.wants else {
            self.connection.growing = Some(Growing { cid, unused: [None; 2], larger: old });
            return Ok(());
        };
        if self.machine.card().memory_short {
            return Err(Refusal::NoRoom);
        }
        let heap = &mut self.agent.heaps[self.connection.session as usize];
        let mut larger = |old: u32, wanted: u32| {
            let size = wanted.min(MOST).next_power_of_two();
            if size > old { heap.take(size) } else { None }
        };
        let unused = [larger(old.receive.1, receive), larger(old.send.1, send)];
        if unused == [None; 2] {
            return Err(Refusal::NoRoom);
        }
        let larger = Memory { receive: unused[0].unwrap_or(old.receive), send: unused[1].unwrap_or(old.send) };
        if !self.promise(larger) {
            let heap = &mut self.agent.heaps[self.connection.session as usize];
            unused.into_iter().flatten().for_each(|block| heap.give(block));
            return Err(Refusal::Full);
        }
        self.connection.growing = Some(Growing { cid, unused, larger });
        Ok(())
    }

    fn shrink(&mut self) {
        if let Some(cid) = self.connection.cid {
            self.agent.nic.room.keep_memory(cid.slot());
        }
        if let Some(growing) = self.connection.growing.take() {
            let heap = &mut self.agent.heaps[self.connection.session as usize];
            growing.unused.into_iter().flatten().for_each(|block| heap.give(block));
        }
    }

    /// Copies the contents of the old memory, and records where the larger one is.
    fn grow(&mut self) -> Result<(), Refusal> {
        let (cid, base) = (self.cid()?, self.slot()?);
        let image = read_image(&self.machine.card().memory, cid).map_err(|_| Refusal::NicGone)?;
        let old = self.connection.on_nic.as_ref().ok_or(Refusal::NicGone)?.memory;
        let new = self.connection.growing.as_ref().ok_or(Refusal::NicGone)?.larger;
        if new == old {
            self.overwrite_empty(cid, &image, old)?;
        }
        self.copy_over(cid, &image, old, new)?;
        let next = cid.next_generation();
        let entry = self.machine.card().journal.entry(cid).ok_or(Refusal::NicGone)?;
        entry.cid = next;
        if let Some(on_nic) = &mut entry.on_nic {
            on_nic.memory = new;
        }
        self.connection.cid = Some(next);
        if let (Some(growing), Some(on_nic)) = (&mut self.connection.growing, &mut self.connection.on_nic) {
            on_nic.memory = new;
            growing.unused = [(old.receive != new.receive).then_some(old.receive), (old.send != new.send).then_some(old.send)];
        }
        // Queued messages with the old cid are about the same connection.
        self.agent.nic.inbox.rename(cid, next);
        self.write_parameters(new, base);
        let b = self.connection.block.clone();
        self.machine.card().memory.word32(base + slot::READ).store(b.load(block::READ_SEQ), Ordering::Release);
        write_block(self.connection, &image, new, next);
        let fins = u32::from(image.state.fin_received()) | u32::from(image.state.fin_queued()) << 1;
        b.store(block::FLAGS, b.load(block::FLAGS) & !3 | fins);
        self.connection.moves += 1;
        b.store(block::MOVES, self.connection.moves);
        Ok(())
    }

    /// Overwrites empty memory and the slot's scratch: their pages may have gone back to the system.
    fn overwrite_empty(&mut self, cid: Cid, image: &Image, memory: Memory) -> Result<(), Refusal> {
        let progress = self.progress();
        let nic_memory = &self.machine.card().memory;
        let ranges = ranges_of(nic_memory, cid);
        if ranges.as_ref().is_none_or(Vec::is_empty) {
            let _ = nic_memory.write(nic::scratch(cid.slot()), &[0; nic::SCRATCH_BYTES]);
        }
        let unread = progress.unread(image.read_seq().wrapping_add(image.unread), image.unread);
        let (receive, send) = empty_memory(image, unread, ranges.as_deref());
        for place in [receive.then_some(memory.receive), send.then_some(memory.send)].into_iter().flatten() {
            self.circle(place)?.write(0, &vec![0; place.1 as usize]);
        }
        Ok(())
    }

    fn copy_over(&mut self, cid: Cid, image: &Image, old: Memory, new: Memory) -> Result<(), Refusal> {
        let copy = |from: Circle, to: Circle, seq: u32, length: u32| {
            let mut bytes = vec![0; length as usize];
            from.read(seq, &mut bytes);
            to.write(seq, &bytes);
        };
        if new.receive != old.receive {
            copy(self.circle(old.receive)?, self.circle(new.receive)?, image.read_seq(), image.unread);
            let ranges = ranges_of(&self.machine.card().memory, cid).unwrap_or_default();
            for (left, right) in ranges {
                copy(self.circle(old.receive)?, self.circle(new.receive)?, left, right.wrapping_sub(left).min(old.receive.1));
            }
        }
        if new.send != old.send {
            copy(self.circle(old.send)?, self.circle(new.send)?, image.snd_una, image.send_queue());
        }
        Ok(())
    }

    fn resume(&mut self) -> Outcome {
        let (Some(next), Some(growing)) = (self.connection.cid, &self.connection.growing) else {
            return Outcome::Refused(Refusal::NicGone);
        };
        let command = Message::control(Operation::NicControl, Control::Resume, growing.cid, next.0, 0);
        self.send(&Action::Resume, command)
    }
}

fn done_if(done: bool) -> Outcome {
    if done { Outcome::Done } else { Outcome::NotYet }
}

/// Writes cid, memory and sequence numbers of the connection into its block.
fn write_block(connection: &Connection, image: &Image, memory: Memory, cid: Cid) {
    let b = &connection.block;
    b.store(block::CID, cid.0);
    b.store(block::RECEIVE_BASE, memory.receive.0);
    b.store(block::RECEIVE_SIZE, memory.receive.1);
    b.store(block::SEND_BASE, memory.send.0);
    b.store(block::SEND_SIZE, memory.send.1);
    b.store(block::RECEIVE_SEQ, image.rcv_nxt.wrapping_sub(u32::from(image.state.fin_received())));
    b.store(block::ACKED_SEQ, if image.state.fin_acknowledged() { image.snd_end } else { image.snd_una });
    b.store(block::QUEUED_SEQ, image.snd_end);
}

/// What the NIC has received out of order. None if it never published a record.
fn ranges_of(nic_memory: &Region, cid: Cid) -> Option<Vec<(u32, u32)>> {
    let record = read_record(nic_memory, nic::slot(cid.slot()))?;
    Some(read_ranges(nic_memory, cid.slot(), &record))
}
