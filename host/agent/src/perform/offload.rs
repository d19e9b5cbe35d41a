//! Actions of a move to the NIC.

use super::{Performer, hand_to_kernel, stand_still};
use crate::calls::Stop;
use crate::changes::{UNKNOWN, proved_beyond};
use crate::connection::{Connection, Exported, Handoff, Memory, OnNic};
use crate::journal::{self, Entry};
use crate::memory::{self, Limits};
use crate::predict::look_through;
use crate::record::{queues, unpublish, write_image};
use crate::way::Way;
use baton_abi::layout::{block, nic, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_handoff::examine::{self, system};
use baton_handoff::export::{self, Exporter};
use baton_handoff::shell::{self, Saved};
use baton_handoff::{send_buffer, unenforced};
use baton_image::{Image, Stay};
use baton_linux::conntrack;
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_linux::tcp_info::{OPTION_SACK, TcpInfo};
use baton_moves::{Action, Outcome, Phase, Refusal};
use baton_shm::Region;
use baton_steering::Steer;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

const SOL_SOCKET: i32 = 1;
const SO_MEMINFO: i32 = 55;

/// A refusal, with who has shut the receiving side down if that was this agent: the socket does not show it.
fn with_cause(connection: &Connection, refusal: Refusal) -> Refusal {
    let fin_lost = connection.extra.as_ref().is_some_and(|extra| extra.fin_lost);
    if fin_lost && refusal == Refusal::ReceivingShut { Refusal::FinLost } else { refusal }
}

impl Performer<'_> {
    /// Checks whether the connection may move, and by which device; then takes a slot.
    pub(super) fn reserve(&mut self) -> Result<(), Stop> {
        let tracked = self.may_move()?;
        let way = self.ground.way_of(self.connection)?;
        self.way = Some(way);
        self.ground.choose(way.path.nic as usize);
        self.connection.flow.device = way.device();
        if !self.ground.shape.claim(&self.connection.flow) {
            return Err(Refusal::Twin.into());
        }
        let key = key_of(self.session, self.connection);
        // One whose peer is silent goes there to end.
        let by_heat = self.connection.block.hot_from() > 0 && !self.connection.is_overdue();
        let nic = self.ground.nic();
        let admitted = nic.gate.admits(key, by_heat);
        let Some(cid) = admitted.then(|| nic.take_slot()).flatten() else {
            nic.gate.refuse(key, by_heat);
            self.ground.shape.give_up_claim(&self.connection.flow);
            let refusal = if by_heat && !admitted { Refusal::Cold } else { Refusal::Full };
            return Err(refusal.into());
        };
        self.connection.cid = Some(cid);
        if let Some(entry) = tracked {
            self.ground.tracker.note(cid, self.connection.serial, entry);
        }
        let base = nic::slot(cid.slot());
        let _ = self.ground.nic_memory.write(base + slot::FLOW, &self.connection.flow.to_bytes());
        journal::note_occupant(self.ground.nic_memory, cid, (self.session, self.connection.number()));
        self.ground.nic_memory.word32(base + slot::COVERED).store(0, Ordering::Release);
        // A record that is there is of an earlier occupant.
        unpublish(self.ground.nic_memory, cid.slot());
        Ok(())
    }

    /// Checks whether the connection may move. Returns the connection tracker's entry of it, if there is one.
    fn may_move(&mut self) -> Result<Option<conntrack::Entry>, Stop> {
        let namespace = self.ground.known.namespace().map_err(|error| system("SO_NETNS_COOKIE", &error))?;
        let flow = self.connection.flow;
        let seen = self.on_socket(move |fd| look_through(fd, namespace, &flow))?;
        let info = seen.map_err(|refusal| with_cause(self.connection, refusal))?;
        self.own()?;
        let port = flow.local.port;
        if !self.ground.known.may_bind(port) {
            return Err(Refusal::LowPort(port).into());
        }
        let connection = &mut *self.connection;
        if connection.unproved() == Some(UNKNOWN) {
            connection.extra().unproved = Some(proved_beyond(&info));
        }
        if let Some((acked, received)) = connection.unproved() {
            if info.bytes_acked <= acked && info.bytes_received <= received {
                return Err(Refusal::Unproved.into());
            }
            connection.extra().unproved = None;
        }
        if connection.is_overdue() && info.bytes_acked > 0 {
            return Err(Refusal::Answered.into());
        }
        self.ground.cgroups.let_go(connection.cgroup.as_ref(), connection.peer())?;
        let forked = connection.block.is_shared();
        if connection.inherited || forked {
            let key = key_of(self.session, connection);
            if forked {
                self.ground.forget_found(key);
            }
            self.ground.held_alone(key)?;
        }
        let netfilter = self.ground.tracker_of(connection.serial);
        let tracked = netfilter.and_then(|netfilter| conntrack::find(netfilter, &connection.flow).ok().flatten());
        if tracked.is_some_and(|entry| entry.translated) {
            return Err(Refusal::Translated.into());
        }
        Ok(tracked)
    }

    /// Makes the NIC copy the connection's frames; its flow is in the slot.
    pub(super) fn mirror(&mut self) -> Outcome {
        if self.way.is_none() {
            return Outcome::Refused(Refusal::NoRoute);
        }
        if let Err(refusal) = self.own() {
            return Outcome::Refused(refusal);
        }
        self.ask(Action::Mirror, Control::Mirror, 0)
    }

    /// The NIC copies what it is given of the connection.
    pub(super) fn mirrored(&mut self) -> Result<(), Refusal> {
        let owned = self.own();
        let way = self.way.as_ref().ok_or(Refusal::NoRoute)?;
        let steered = owned.and_then(|()| self.ground.shape.steer(&self.connection.flow, &way.path, Steer::Mirror));
        if let Err(refusal) = steered {
            self.cancel(false);
            return Err(refusal);
        }
        self.ground.shape.give_up_claim(&self.connection.flow);
        // Its segments will bypass the host's connection tracker.
        let state = self.state().unwrap_or(0);
        if let (Some(netfilter), Some(cid)) = (self.ground.guards.netfilter(), self.connection.cid) {
            self.ground.tracker.enter(netfilter, cid, self.connection.serial, &self.connection.flow, state);
        }
        Ok(())
    }

    /// Whether the NIC's copy covers all data that the kernel may hold out of order.
    pub(super) fn cover(&mut self) -> Outcome {
        let needs = match self.on_socket(needs_cover) {
            Ok(needs) => needs,
            Err(Stop::Later) => return Outcome::Later,
            Err(Stop::Refused(_)) => None,
        };
        let covered =
            |cid: Cid| self.ground.nic_memory.word32(nic::slot(cid.slot()) + slot::COVERED).load(Ordering::Acquire) == 1;
        match (needs, self.cid()) {
            (Some(false), Ok(_)) => Outcome::Done,
            (Some(true), Ok(cid)) if covered(cid) => Outcome::Done,
            _ => Outcome::NotYet,
        }
    }

    /// Makes the kernel send an acknowledgement: an idle connection sends none, and only its SACK blocks show what the
    /// kernel holds out of order. Not yet while its program is inside an operation.
    pub(super) fn acknowledge(&mut self) -> Outcome {
        if self.fd().is_err() {
            return Outcome::NotYet;
        }
        // It is kept out while the calls are made.
        let left = self.result.is_some() || self.connection.block.keep_out();
        if left && let Err(Stop::Later) = self.on_socket(shell::acknowledge) {
            return Outcome::Later;
        }
        hand_to_kernel(self.open, self.connection);
        super::done_if(left)
    }

    /// The connection stands still soon: asks the kernel for what is needed meanwhile, unless it has answered lately.
    pub(super) fn prepare_freeze(&mut self) {
        if self.ground.known.renew(self.ground.changes) {
            // A reason to refuse is found again at the steal.
            let _ = self.ground.way_of(self.connection);
        }
        self.ground.known.buffers();
        self.ground.known.retries();
        self.ground.known.slow_start_after_idle();
    }

    /// Diverts the connection's frames to the NIC alone. The program is kept out: the connection's blackout begins.
    pub(super) fn steal(&mut self) -> Outcome {
        match self.may_steal() {
            Ok(way) => {
                self.way = Some(way);
                stand_still(self.connection);
                self.ask(Action::Steal, Control::Steal, 0)
            }
            Err(stop) => stop.into(),
        }
    }

    fn may_steal(&mut self) -> Result<Way, Stop> {
        // Firewall, route or socket options may have changed since the move began, and the program may have forked.
        if self.connection.block.is_shared() {
            return Err(Refusal::Shared.into());
        }
        if self.connection.unproved().is_some() {
            return Err(Refusal::Unproved.into());
        }
        self.ground.cgroups.let_go(self.connection.cgroup.as_ref(), self.connection.peer())?;
        let way = self.ground.way_of(self.connection)?;
        if way.path.nic as usize != self.cid()?.nic() {
            return Err(Refusal::AnotherNic.into());
        }
        // It has the flow with which the move began.
        if way.device() != self.connection.flow.device {
            return Err(Refusal::Rebound.into());
        }
        let checked = self.on_socket(|fd| examine::check_receiving(fd).and_then(|()| unenforced::check(fd)))?;
        checked.map_err(|refusal| with_cause(self.connection, refusal))?;
        self.own()?;
        Ok(way)
    }

    /// The NIC holds what it is given of the connection.
    pub(super) fn stolen(&mut self) -> Result<(), Refusal> {
        self.own()?;
        let way = self.way.as_ref().ok_or(Refusal::NoRoute)?;
        self.ground.shape.steer(&self.connection.flow, &way.path, Steer::Steal)?;
        // Somebody else's connection may have the 4-tuple if the socket was disconnected meanwhile: its frames are
        // stolen no longer then.
        self.own()
    }

    /// Saves the socket's settings that the move changes, and writes them to the journal.
    pub(super) fn note_reading(&mut self, cid: Cid) -> Result<(), Stop> {
        let saved = self.on_socket(Saved::read)?.map_err(|_| Refusal::Filter)?;
        let entry = Entry::new(self.session, self.connection.number(), cid, saved);
        self.entry = Some(entry);
        Ok(self.write(Phase::Reading)?)
    }

    /// Writes the journal entry. One that is too long has a socket filter that is too long to be kept.
    fn write(&self, phase: Phase) -> Result<(), Refusal> {
        let entry = self.entry.as_ref().ok_or(Refusal::Filter)?;
        journal::write(self.ground.nic_memory, phase, entry).then_some(()).ok_or(Refusal::Filter)
    }

    pub(super) fn export(&mut self) -> Result<(), Stop> {
        if self.result.is_none() {
            self.own()?;
        }
        let (Some(entry), Some(way)) = (&self.entry, &self.way) else { return Err(Refusal::NoRoute.into()) };
        let (flow, link, saved) = (self.connection.flow, way.link, entry.saved.clone());
        self.exporter = Some(self.on_socket(move |fd| Exporter::begin(fd, flow, link, &saved))??);
        Ok(())
    }

    /// Undoes the export: the connection continues in the kernel.
    pub(super) fn abandon(&mut self) -> Result<(), Stop> {
        let (exporter, saved) = (self.exporter.take(), self.entry.as_ref().map(|entry| entry.saved.clone()));
        let undone = self.on_socket(move |fd| match (exporter, saved) {
            (Some(exporter), _) => exporter.abandon(fd),
            // The exporter was lost with an earlier agent.
            (None, Some(saved)) => export::undo(fd, &saved),
            (None, None) => Ok(()),
        });
        Ok(undone?.map_err(|error| system("TCP_REPAIR", &error))?)
    }

    /// Copies the bytes of both queues into session memory.
    pub(super) fn copy(&mut self) -> Result<(), Stop> {
        let memory = if self.result.is_none() { Some(self.prepare_copy()?) } else { None };
        let (exporter, region) = (self.exporter.take(), self.open.memory.clone());
        let (exporter, copied) = self.on_socket(move |fd| {
            let copied = match (&exporter, memory) {
                (Some(exporter), Some((memory, image))) => queues(&region, memory, &image)
                    .ok_or(Refusal::NoRoom)
                    .and_then(|(unread, unacknowledged)| exporter.copy_queues(fd, &unread, &unacknowledged)),
                _ => Err(Refusal::NoRoom),
            };
            (exporter, copied)
        })?;
        self.exporter = exporter;
        if copied.is_err() {
            self.give_memory();
        }
        Ok(copied?)
    }

    /// Takes memory for the queues' bytes. Returns it, and the image that says how many they are.
    fn prepare_copy(&mut self) -> Result<(Memory, Image), Refusal> {
        let (Some(exporter), Some(entry)) = (&self.exporter, &self.entry) else { return Err(Refusal::NoRoom) };
        let (retries, slow_start_after_idle) = (self.ground.known.retries(), self.ground.known.slow_start_after_idle());
        let mut image = Image { retries, slow_start_after_idle, ..*exporter.image() };
        if self.connection.attached {
            // The program's TCP_CORK and TCP_NODELAY are not seen while it is attached. It would also uncork the
            // socket; a segment sent early is better than one that is held for an uncorking that is not seen.
            (image.nodelay, image.cork) = (true, false);
        }
        let retransmitted = exporter.retransmitted();
        let stay = self.connection.stay();
        let nic = stay.and_then(|stay| stay.complete(&mut image, retransmitted, monotonic_micros()));
        let limits = Limits::of(self.connection.fd()?, self.ground.known);
        let cid = self.cid()?;
        let memory = memory::take(self.open, &image, limits).ok_or(Refusal::NoRoom)?;
        if !self.ground.nic().promise_memory(cid, memory) {
            memory::give(self.open, memory);
            let (key, by_heat) = (key_of(self.session, self.connection), self.connection.block.hot_from() > 0);
            self.ground.nic().gate.refuse(key, by_heat);
            return Err(Refusal::Full);
        }
        let window = limits.first_window(self.connection.fd().ok(), &image);
        limits.write(window, self.ground.nic_memory, cid);
        let exported = Exported { image, handed_off_at: monotonic_micros(), saved: entry.saved.clone() };
        let way = self.way.map(|way| self.ground.known.shared(way));
        let on_nic = OnNic::new(&image, memory, way).ok_or(Refusal::NoRoom)?;
        let carried = Some(exporter.carried());
        self.connection.enter_nic(on_nic, Handoff { exported, nic, carried });
        Ok((memory, image))
    }

    pub(super) fn note_copied(&mut self) -> Result<(), Refusal> {
        let (Some(entry), Some(on_nic)) = (self.entry.take(), &self.connection.on_nic) else { return Err(Refusal::Filter) };
        let memory = on_nic.memory();
        let Some(Handoff { exported, .. }) = self.connection.extra().handoff.as_deref_mut() else { return Err(Refusal::NoRoom) };
        exported.handed_off_at = monotonic_micros();
        self.entry = Some(entry.copied(&exported.image, memory, exported.handed_off_at));
        self.write(Phase::Copied)
    }

    pub(super) fn purge(&mut self) -> Result<(), Stop> {
        let exporter = self.exporter.take();
        let purged = self.on_socket(move |fd| exporter.map(|exporter| exporter.purge(fd)))?;
        let (saved, purged) = match purged.ok_or(Refusal::NoRoom)? {
            Ok(saved) => (saved, Ok(())),
            Err((saved, stay)) => (saved, Err(stay)),
        };
        if let Some(handoff) = self.connection.extra().handoff.as_deref_mut() {
            handoff.exported.saved = saved;
        }
        if purged.is_ok() {
            add_kernels_count(self.connection);
        }
        Ok(purged?)
    }

    pub(super) fn hand_off(&mut self) -> Outcome {
        match self.prepare_handoff() {
            Ok(cid) => self.send(&Action::HandOff, Message::new(Operation::NicHandoff, cid, 0, 0)),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn prepare_handoff(&mut self) -> Result<Cid, Refusal> {
        let cid = self.cid()?;
        self.connection.block.count_move();
        let on_nic = self.connection.on_nic.as_deref().ok_or(Refusal::NoRoom)?;
        write_down(self.ground.nic_memory, self.session, self.connection, cid, on_nic)?;
        self.connection.forget_stay();
        // The NIC may notify the program before the move is over. Noted any earlier, the program would look at its
        // block, find no move there, and not look again when that notification arrives.
        self.open.note_move(self.connection.number());
        Ok(cid)
    }

    /// The NIC has the connection.
    pub(super) fn handed_off(&mut self) -> Result<(), Stop> {
        if self.connection.attached {
            let _ = self.on_socket(shell::show_closing)?;
        }
        // From now on the journal has it.
        let nic_memory = self.ground.nic_memory;
        if let Some(cid) = self.connection.cid
            && journal::exported(nic_memory, cid).as_ref() == self.connection.handoff().map(|handoff| &handoff.exported)
        {
            self.connection.extra().handoff = None;
        }
        Ok(())
    }

    /// Restores the connection from the exported image: after the purge the only way to undo the move.
    pub(super) fn import_exported(&mut self) -> Result<(), Stop> {
        let on_nic = self.connection.on_nic.as_deref().ok_or(Refusal::NoRoom)?;
        let memory = on_nic.memory();
        let Exported { image, saved, .. } = self.connection.exported(self.ground.nic_memory).ok_or(Refusal::NoRoom)?;
        self.image = Some(image);
        self.connection.extra().stay = Some(Box::new(Stay::new(image, None, monotonic_micros())));
        self.import_with(memory, image, saved, false)
    }
}

/// What names a connection among all.
fn key_of(session: u32, connection: &Connection) -> (u32, u32, u64) {
    (session, connection.number(), connection.serial)
}

/// Adds to a connection's traffic what the kernel had counted. What was unread then counts again, behind the sequence
/// number at which the NIC's count begins.
fn add_kernels_count(connection: &mut Connection) {
    let Some(handoff) = connection.extra().handoff.as_deref_mut() else { return };
    if let Some((sent, received)) = handoff.carried.take() {
        let image = &handoff.exported.image;
        let unread = image.rcv_nxt.wrapping_sub(image.read_seq());
        connection.traffic = connection.traffic.plus(sent, received).without_received(unread);
    }
}

/// Whether the kernel may hold data of a socket's out of order. None if that is unknown.
fn needs_cover(fd: BorrowedFd<'_>) -> Option<bool> {
    let info = TcpInfo::read(fd).ok()?;
    // Nothing arrived out of order since the socket was (re)connected, or nothing that arrived could have been SACKed.
    if info.options & OPTION_SACK == 0 || info.rcv_ooopack == 0 {
        return Some(false);
    }
    // Receive memory beyond the receive queue's is the out-of-order queue's.
    let mut memory = [0u8; 36];
    let unread = socket::queue_bytes(fd, socket::SIOCINQ).unwrap_or(u32::MAX);
    let empty = unread == 0 && socket::get_bytes(fd, SOL_SOCKET, SO_MEMINFO, &mut memory).is_ok() && memory[..4] == [0; 4];
    Some(!empty)
}

/// Writes image and parameters into the connection's slot, for the NIC, and its memory and sequence numbers into its
/// block, for the program.
fn write_down(nic_memory: &Region, session: u32, connection: &Connection, cid: Cid, on_nic: &OnNic) -> Result<(), Refusal> {
    let base = nic::slot(cid.slot());
    let Some(Handoff { exported: Exported { image, saved, .. }, nic, .. }) = connection.handoff() else {
        return Err(Refusal::NoRoom);
    };
    let (place, Memory { receive, send }) = (on_nic.memory(), on_nic.memory());
    let parameters = [session, receive.0, receive.1, send.0, send.1, connection.number()];
    for (at, value) in parameters.into_iter().enumerate() {
        nic_memory.word32(base + slot::PARAMETERS + 4 * at).store(value, Ordering::Release);
    }
    write_image(nic_memory, cid, image, nic.as_ref()).map_err(|_| Refusal::NoRoom)?;
    let b = &connection.block;
    b.store(block::PROCESSOR, 0);
    b.store(block::READ_SEQ, image.read_seq());
    write_block(connection, image, place, cid);
    let flags = [
        (block::FLAG_FIN_RECEIVED, image.state.fin_received()),
        (block::FLAG_SHUT_DOWN, image.state.fin_queued()),
        (block::FLAG_KEEPALIVE, saved.keepalive()),
        (block::FLAG_CORK, saved.cork()),
        (block::FLAG_NODELAY, image.nodelay),
    ];
    let report = memory::report_bits(memory::largest_window(nic_memory, cid));
    let buffer = connection.fd().ok().and_then(|fd| send_buffer::of(fd).ok());
    let numbers = report | buffer.map_or(0, |buffer| block::queue_bits(memory::most_queued(&buffer)));
    b.set_flags(flags.into_iter().filter(|(_, on)| *on).fold(numbers, |all, (flag, _)| all | flag));
    // Written before the NIC runs, since its notifications make the program look for the connection.
    b.note_moves();
    Ok(())
}

/// Writes cid, memory and sequence numbers of the connection into its block.
pub(super) fn write_block(connection: &Connection, image: &Image, memory: Memory, cid: Cid) {
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
