//! Actions of a move back to the kernel.

use super::{Performer, stand_still};
use crate::calls::Stop;
use crate::changes::prove_beyond;
use crate::connection::{Connection, Memory};
use crate::fin::{ReplayedFin, not_taken};
use crate::ground::Shape;
use crate::record::{queues, read_image_with, read_ranges, read_record, unread_by_program};
use baton_abi::layout::{block, nic};
use baton_abi::{Control, LOST_QUEUE, Message, Operation};
use baton_handoff::import::{self, ImportError, Importer};
use baton_handoff::shell::Saved;
use baton_image::{Image, NicState, Stay};
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_log::{error, info, warning};
use baton_moves::{Action, Outcome, Refusal};
use baton_recovery::Replay;
use std::io;
use std::os::fd::BorrowedFd;

/// Refusal of a connection of which `what` is missing or damaged.
pub(super) fn damaged(what: &'static str) -> Refusal {
    Refusal::from(ImportError { step: what, error: io::ErrorKind::InvalidData.into() })
}

/// Adds to a connection's traffic what it has carried on the NIC. The kernel counts what is unread as received once
/// more.
fn add_nics_count(connection: &mut Connection, image: &Image) {
    let read = image.read_seq();
    connection.count_to((image.rcv_nxt, image.snd_una));
    if let Some(on_nic) = &mut connection.on_nic {
        on_nic.idleness.recede(read);
        connection.traffic = connection.traffic.without_received(image.rcv_nxt.wrapping_sub(read));
    }
}

/// Why the connection must not go to the kernel: its socket does not have it any more (`ss --kill`). An import
/// would make it a connection again, before the next poll finds out ([`crate::looks`]). One that its program has
/// closed goes on as ever.
fn lost_socket(performer: &mut Performer<'_>) -> Option<Refusal> {
    let connection = &*performer.connection;
    if connection.growing().is_some() || !connection.waits_for_program() || connection.is_to_be_forgotten() {
        return None;
    }
    performer.own().err().filter(Refusal::is_of_lost_socket)
}

/// Shuts the kernel's socket down if its program has shut down receiving while the connection was on the NIC. If its
/// peer has reset it meanwhile that is what its program finds.
fn shut_receiving_if(shut: bool, fd: BorrowedFd<'_>) {
    if shut {
        let _ = socket::shutdown_read(fd);
    }
}

/// As [`lost_socket`], when the connection is about to go into its socket: also a NIC's death may come before the next
/// poll. Not where the socket has no peer for another reason: an agent that has died was making it a shell, or an
/// import has been tried.
fn lost_meanwhile(performer: &mut Performer<'_>) -> Option<Refusal> {
    let connection = &*performer.connection;
    let is_shell = connection.on_nic.as_deref().is_some_and(|on_nic| on_nic.way.is_some());
    let is_tried = connection.extra.as_deref().is_some_and(|extra| extra.refused.is_some());
    if is_shell && !is_tried { lost_socket(performer) } else { None }
}

impl Performer<'_> {
    /// Checks that the connection can be restored now. Without a route the import would close the socket for good, so
    /// it waits on the NIC. Other reasons that would keep it off the NIC do not keep it from the kernel.
    pub(super) fn check(&mut self) -> Result<(), Refusal> {
        self.fd()?;
        // The connection stands still soon, and needs the route once more then.
        self.ground.known.renew(self.ground.changes);
        self.route = Some(self.ground.route_of(self.connection)?);
        self.ground.cgroups.let_back(self.connection.cgroup.as_ref(), self.connection.peer())
    }

    /// Makes the NIC stop the connection, write its image and hold the frames that arrive.
    pub(super) fn rest(&mut self) -> Outcome {
        let Ok(cid) = self.cid() else { return Outcome::Refused(Refusal::NoRoom) };
        if let Some(refusal) = lost_socket(self) {
            return Outcome::Refused(refusal);
        }
        if self.connection.growing().is_none() {
            stand_still(self.connection);
        }
        // The replay has to arrive by a device from which the socket receives now.
        if self.connection.growing().is_none()
            && let Some((routing, route)) = self.route.take().or_else(|| self.ground.route_of(self.connection).ok())
            && let Some(on_nic) = &self.connection.on_nic
            && let Some(exported) = self.connection.exported(self.ground.nic_memory)
        {
            let before = exported.image.link.interface;
            let comes_by = self.ground.device_of_replay(before, &routing, &route);
            if comes_by != before || on_nic.muted {
                let _ = self.ground.nic().post(Message::control(Operation::NicControl, Control::Interface, cid, comes_by, 0));
            }
        }
        self.send(&Action::Rest, Message::new(Operation::NicRestore, cid, 0, 0))
    }

    pub(super) fn import_rested(&mut self) -> Result<(), Stop> {
        let (image, nic) = match read_image_with(self.ground.nic_memory, self.cid()?) {
            Ok(rested) => rested,
            Err(error) => {
                // A NIC that writes an invalid image must not continue.
                error!(
                    [nic = self.ground.chosen, connection = %self.connection.flow]
                    "the NIC's image of {} cannot be used: {error}", self.connection.flow;
                    "the next NIC takes over; send what `baton report` writes"
                );
                return Err(Refusal::NicGone.into());
            }
        };
        let unread = unread_by_program(self.connection, image.read_seq().wrapping_add(image.unread), image.unread);
        self.begin_import(Image { unread, ..image }, nic)
    }

    /// Makes the shell a connection again, from the NIC's image or from its record. `nic` is what only the NIC knows,
    /// which is kept.
    pub(super) fn begin_import(&mut self, image: Image, nic: Option<NicState>) -> Result<(), Stop> {
        match lost_meanwhile(self) {
            // Its program reads what it has not read, and its peer is reset, when it is destroyed once more.
            Some(Refusal::Closed(_)) => self.connection.extra().cut = true,
            Some(refusal) => return Err(refusal.into()),
            None => {}
        }
        self.image = Some(image);
        add_nics_count(self.connection, &image);
        self.connection.extra().stay = Some(Box::new(Stay::new(image, nic, monotonic_micros())));
        let memory = self.connection.on_nic.as_deref().ok_or_else(|| damaged("its memory"))?.memory();
        let flags = self.connection.block.load(block::FLAGS);
        let saved = self.connection.exported(self.ground.nic_memory).ok_or_else(|| damaged("journal"))?.saved;
        let saved = saved.with_programs(flags & block::FLAG_KEEPALIVE != 0, flags & block::FLAG_CORK != 0);
        let gone = |_| Refusal::from(ImportError { step: "its program's descriptor", error: io::ErrorKind::NotFound.into() });
        self.fd().map_err(gone)?;
        // What a dead NIC had in flight may be lost. Where bytes that are acknowledged in the kernel mean something to
        // the agent, one more would mislead it.
        let counts = self.connection.unproved().is_some() || image.user_timeout != 0;
        let measure = nic.is_none() && image.ts_recent != 0 && image.srtt != 0 && !counts;
        self.import_with(memory, image, saved, measure)
    }

    /// Imports an image, and the bytes that lie in this memory, into the kernel's socket. `measure` is
    /// [`Importer::begin`]'s.
    pub(super) fn import_with(&mut self, memory: Memory, image: Image, saved: Saved, measure: bool) -> Result<(), Stop> {
        let (region, local, peer) = (self.open.memory.clone(), self.connection.local(), self.connection.peer());
        let imported = self.on_socket(move |fd| {
            let (unread, unacknowledged) = queues(&region, memory, &image)
                .ok_or_else(|| ImportError { step: "queues", error: io::ErrorKind::InvalidData.into() })?;
            Importer::begin(fd, &image, (local, peer), &unread, &unacknowledged, &saved, measure)
        })?;
        self.keep_importer(imported)
    }

    /// Goes on when the calls of an import have returned.
    pub(super) fn imported(&mut self) -> Result<(), Stop> {
        let imported = self.on_socket(|_| Err(ImportError { step: "import", error: io::ErrorKind::InvalidData.into() }))?;
        self.keep_importer(imported)
    }

    fn keep_importer(&mut self, imported: Result<Importer, ImportError>) -> Result<(), Stop> {
        self.importer = Some(imported.map_err(Refusal::from)?);
        Ok(())
    }

    /// Makes the NIC release the connection and replay the held frames to the kernel.
    pub(super) fn release(&mut self) -> Outcome {
        self.replay_fin();
        self.ground.shape.unsteer(&self.connection.flow);
        self.ask(Action::Release, Control::Release, 0)
    }

    /// Replays to the kernel what an import does not carry, in place of a NIC that has died or has never run the
    /// connection: the data that the NIC held out of order, and a FIN.
    pub(super) fn replay(&mut self) -> Outcome {
        self.replay_fin();
        self.ground.shape.unsteer(&self.connection.flow);
        if let Some(image) = &self.image
            && let Err(error) = self.replay_from(image)
        {
            info!(
                [connection = %self.connection.flow]
                "what {} received out of order its peer has to send again: {error}", self.connection.flow
            );
        }
        // The NIC passes the frames that it holds to the kernel, mirrored ones too, and holds no more.
        self.ask(Action::Replay, Control::Cancel, LOST_QUEUE)
    }

    fn replay_from(&self, image: &Image) -> io::Result<()> {
        let (Some(cid), Some((offset, size))) = (self.connection.cid, self.receive_memory()) else { return Ok(()) };
        let base = nic::slot(cid.slot());
        let record = read_record(self.ground.nic_memory, base);
        let ranges = record.map(|record| read_ranges(self.ground.nic_memory, cid.slot(), &record)).unwrap_or_default();
        let Some(receive) = self.open.memory.circle(offset, size) else { return Ok(()) };
        let mut kernel = self.ground.shape.kernel(self.ground.host)?;
        let words = Replay { image, ranges: &ranges, fin_behind_hole: None };
        words.send(&mut kernel, |seq, out| receive.read(seq, out));
        Ok(())
    }

    /// Beside the kernel: sends it the peer's FIN, if there was one, before the steering lets it send and receive
    /// frames of the connection. A peer that has closed would reset a socket that does not know of the FIN yet, and
    /// whose FIN or data it gets again: the NIC may be slow to replay.
    fn replay_fin(&self) {
        if let (Shape::Beside { .. }, Some(fin)) = (&self.ground.shape, self.connection.fin()) {
            self.send_fin(&fin.image);
        }
    }

    fn send_fin(&self, image: &Image) {
        if let Ok(mut kernel) = self.ground.shape.kernel(self.ground.host) {
            Replay { image, ranges: &[], fin_behind_hole: None }.send(&mut kernel, |_, _| {});
        }
    }

    /// The kernel's socket gets the peer's FIN by the replay, if there was one.
    pub(super) fn expect_fin(&mut self) {
        let image = self.image.filter(|_| self.importer.is_some());
        self.connection.expect_fin(image.and_then(ReplayedFin::of));
    }

    /// Waits until the kernel's socket has the FIN that was replayed to it, if one was. The stream's end may have
    /// been reported to the program already, so it must find it; and the peer, whose FIN the NIC has acknowledged, will
    /// not send it again. If the kernel gets none in time (a rule of the firewall drops it), receiving is shut down:
    /// then the program reads the end, too, though the socket's state is another one. The journal has its entry until
    /// then: the next agent waits, too.
    pub(super) fn await_fin(&mut self) -> Outcome {
        let Some(&fin) = self.connection.fin() else { return Outcome::Done };
        let (now, is_called) = (monotonic_micros(), self.result.is_some());
        if !is_called && !ReplayedFin::is_missing(self.state()) {
            self.connection.expect_fin(None);
            return Outcome::Done;
        }
        if is_called || fin.is_late(now) {
            let shut = match self.on_socket(socket::shutdown_read) {
                Err(Stop::Later) => return Outcome::Later,
                Err(Stop::Refused(refusal)) => Err(refusal.to_string()),
                Ok(shut) => shut.map_err(|error| error.to_string()),
            };
            self.connection.extra().fin_lost = shut.is_ok();
            warning!(
                [connection = %self.connection.flow] "{}", not_taken(self.connection.flow, shut);
                "see that the firewall accepts what is established"
            );
            self.connection.expect_fin(None);
            return Outcome::Done;
        }
        if let Some(again) = fin.again(now) {
            self.send_fin(&fin.image);
            self.connection.expect_fin(Some(again));
        }
        Outcome::NotYet
    }

    fn receive_memory(&self) -> Option<(u32, u32)> {
        match (&self.connection.on_nic, &self.entry) {
            (Some(on_nic), _) => Some(on_nic.memory().receive),
            (None, Some(entry)) => Some(entry.memory().receive),
            (None, None) => None,
        }
    }

    /// Finishes the import: from here on the kernel sends for the connection.
    pub(super) fn finish(&mut self) -> Result<(), Stop> {
        let (Some(image), Some(on_nic)) = (self.image, &self.connection.on_nic) else { return Err(damaged("import").into()) };
        let (memory, region, importer) = (on_nic.memory(), self.open.memory.clone(), self.importer.take());
        let idle = self.connection.extra.as_ref().and_then(|extra| extra.stay.as_ref()).is_some_and(|stay| stay.is_idle());
        let shut = self.connection.block.is_receiving_shut();
        let finished = self.on_socket(move |fd| {
            let importer = importer.ok_or_else(|| damaged("import"))?;
            let (_, unacknowledged) = queues(&region, memory, &image).ok_or_else(|| damaged("queues"))?;
            importer.finish(fd, &unacknowledged, idle).map_err(Refusal::from)?;
            shut_receiving_if(shut, fd);
            Ok::<(), Refusal>(())
        });
        finished??;
        self.connection.block.note_receiving_shut();
        prove_beyond(self.connection, &image);
        if self.connection.extra.as_deref_mut().is_some_and(|extra| std::mem::take(&mut extra.cut)) {
            self.destroy();
        }
        Ok(())
    }

    /// Finishes the import of a connection that an earlier agent had restored; unsent bytes may be missing in the
    /// kernel.
    pub(super) fn finish_anew(&mut self) -> Result<(), Stop> {
        let (Some(image), Some(entry)) = (self.image, &self.entry) else { return Err(damaged("journal").into()) };
        let (memory, region, saved) = (entry.memory(), self.open.memory.clone(), entry.saved.clone());
        let shut = self.connection.block.is_receiving_shut();
        let finished = self.on_socket(move |fd| {
            let (_, unacknowledged) = queues(&region, memory, &image).ok_or_else(|| damaged("queues"))?;
            import::resume_sending(fd, &image, &unacknowledged, &saved).map_err(Refusal::from)?;
            shut_receiving_if(shut, fd);
            Ok::<(), Refusal>(())
        });
        finished??;
        self.connection.block.note_receiving_shut();
        prove_beyond(self.connection, &image);
        Ok(())
    }
}
