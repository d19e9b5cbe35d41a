//! Performs the actions of one connection's move: those that the state machine in `baton-moves` requests of kernel,
//! NIC, program and journal.

mod growth;
mod offload;
mod recovery;
mod restore;
mod sockets;

use crate::calls::{Stop, outcome};
use crate::connection::{Carried, Connection};
use crate::ground::Ground;
use crate::idle::count_now;
use crate::journal::{self, Entry};
use crate::memory;
use crate::record::{read_image, unpublish};
use crate::session::OpenSession;
use crate::way::Way;
use baton_abi::layout::Owner;
use baton_abi::{Cid, Control, Message, Operation};
use baton_handoff::export::Exporter;
use baton_handoff::import::{self, Importer};
use baton_image::Image;
use baton_linux::events::monotonic_micros;
use baton_linux::route::{Route, Routing};
use baton_log::warning;
use baton_moves::{Action, Conclusion, Outcome, Phase, Refusal, Source, Step, World};
use std::any::Any;
use std::os::fd::BorrowedFd;

/// State of a connection's move while its machine runs, until it has to wait for something.
pub(crate) struct Performer<'a> {
    pub ground: Ground<'a>,
    pub open: &'a mut OpenSession,
    pub session: u32,
    pub connection: &'a mut Connection,
    /// Last step that was completed: the machine itself is taken out of the connection meanwhile.
    pub step: Step,
    /// How the move has ended, if it has.
    pub concluded: Option<Conclusion>,
    /// The action that failed last, and why.
    refused: Option<(Action, Refusal)>,
    way: Option<Way>,
    /// The route by which the kernel sends, looked up in this turn.
    route: Option<(Routing, Route)>,
    entry: Option<Entry>,
    exporter: Option<Exporter>,
    importer: Option<Importer>,
    /// The image from which the kernel's socket is restored.
    image: Option<Image>,
    /// What a call on the program's socket has returned for the action that is performed once more.
    result: Option<Box<dyn Any + Send>>,
    outsider: Option<Option<u32>>,
    /// When the move began, in microseconds of the monotonic clock.
    pub began: u64,
}

impl<'a> Performer<'a> {
    /// Makes the performer of one move.
    pub fn new(ground: Ground<'a>, open: &'a mut OpenSession, session: u32, connection: &'a mut Connection) -> Performer<'a> {
        let mut ground = ground;
        if let Some(cid) = connection.cid {
            ground.choose(cid.nic());
        }
        let step = connection.step();
        let Carried { way, entry, importer, image, exporter, outsider } = connection.take_carried();
        // Set for a connection that was in the kernel again when its agent died.
        let image = image.or_else(|| read_image(ground.nic_memory, Cid(entry.as_ref()?.cid)).ok());
        Performer {
            ground,
            open,
            session,
            connection,
            step,
            concluded: None,
            refused: None,
            way,
            route: None,
            entry,
            exporter,
            importer,
            image,
            result: None,
            outsider,
            began: 0,
        }
    }

    /// Leaves with the connection what its move goes on with once it need not wait any more.
    pub fn pause(self) {
        let Performer { connection, way, entry, importer, image, exporter, outsider, .. } = self;
        connection.extra().carried = Some(Box::new(Carried { way, entry, importer, image, exporter, outsider }));
    }

    /// Sends the NIC the command of an action, and looks for the answer for a moment if no other move waits meanwhile.
    fn send(&mut self, action: &Action, command: Message) -> Outcome {
        match self.ground.nic().ask(command) {
            Ok(()) if !self.ground.alone => Outcome::Sent,
            Ok(()) => match self.ground.nic().glance(command.cid) {
                Some(answer) => self.answered(action, answer),
                None => Outcome::Sent,
            },
            Err(Refusal::NoRoom) => Outcome::NotYet,
            Err(refusal) => self.answered(action, Err(refusal)),
        }
    }

    /// Sends a control command about the connection; see [`Performer::send`].
    fn ask(&mut self, action: Action, control: Control, value: u32) -> Outcome {
        match self.connection.cid {
            Some(cid) => self.send(&action, Message::control(Operation::NicControl, control, cid, value, 0)),
            None => self.answered(&action, Err(Refusal::NoRoom)),
        }
    }

    fn fd(&self) -> Result<BorrowedFd<'_>, Refusal> {
        self.connection.fd()
    }

    /// Returns the connection's cid. Called only for connections that have a slot on the NIC.
    fn cid(&self) -> Result<Cid, Refusal> {
        self.connection.cid.ok_or(Refusal::NoRoom)
    }

    fn note(&mut self, phase: Phase) -> Result<(), Stop> {
        let cid = self.cid()?;
        match phase {
            Phase::Reading if self.step == Step::Recorded => journal::reading(self.ground.nic_memory, cid),
            Phase::Reading => return self.note_reading(cid),
            Phase::Copied => return Ok(self.note_copied()?),
            Phase::Sending => {
                let image = self.image.as_ref().ok_or(Refusal::NoRoom)?;
                journal::sending(self.ground.nic_memory, cid, image);
            }
        }
        Ok(())
    }

    fn keep_out(&mut self) {
        if self.step == Step::Covered {
            self.prepare_freeze();
        }
        // Most operations end within a microsecond; the next action checks whether this one has.
        let _ = self.connection.block.keep_out();
    }

    /// Whether the program has left the operation that it was in. A program that requested the move itself is in none;
    /// one with an attacher did not request more memory.
    fn has_left(&self) -> bool {
        let asked = self.connection.growing().is_none() && !self.connection.waits_for_program();
        asked || self.connection.block.is_left()
    }

    fn let_in(&mut self, owner: Owner) {
        if owner == Owner::Kernel {
            hand_to_kernel(self.open, self.connection);
            return;
        }
        self.connection.block.set_owner(owner);
        if self.step == Step::HandedOff {
            self.open.announce_move(self.connection.number());
        }
    }

    /// Makes the NIC drop what it has of the connection, without waiting for its answer: what it is asked about the
    /// slot from now on it does afterwards. `forgotten`: the kernel has lost its out-of-order queue.
    fn cancel(&mut self, forgotten: bool) {
        self.ground.shape.unsteer(&self.connection.flow);
        if let Some(cid) = self.connection.cid {
            let command = Message::control(Operation::NicControl, Control::Cancel, cid, u32::from(forgotten), 0);
            let _ = self.ground.nic().post(command);
            self.ground.nic().inbox.stop_waiting(cid);
        }
    }

    /// Clears the journal entry, then invalidates the record. Only after that is the record ignored: should this agent
    /// die before, the next one starts from journal and record. The entry is also what the next agent knows the cid
    /// from: before it goes, the slot's next cid is noted. A cid that came twice would let events of its first use
    /// count for the second.
    fn clear(&mut self) {
        if let Some(cid) = self.connection.cid {
            journal::note_next_name(self.ground.nic_memory, cid.next_generation());
            journal::clear(self.ground.nic_memory, cid);
            unpublish(self.ground.nic_memory, cid.slot());
        }
    }

    fn give_memory(&mut self) {
        if let Some(memory) = self.connection.leave_nic() {
            memory::give(self.open, memory);
        }
    }

    fn give_slot(&mut self) {
        if let Some(cid) = self.connection.cid.take() {
            self.ground.nic().give_slot(cid);
            self.ground.shape.give_up_claim(&self.connection.flow);
        }
    }

    /// Releases a connection that has ended on the NIC, which has dropped it; its memory stays until the program has
    /// read it.
    fn end(&mut self) {
        if let Some(cid) = self.connection.cid {
            let netfilter = self.ground.guards.netfilter();
            self.ground.tracker.end(netfilter, cid, self.connection.serial, &self.connection.flow);
        }
        count_now(self.connection, self.ground.nic_memory);
        self.clear();
        self.give_slot();
        if self.connection.fd().is_ok() {
            self.end_shell();
        } else {
            self.destroy();
        }
        self.connection.block.note_end();
        self.open.announce_move(self.connection.number());
        if let Some(memory) = self.connection.leave_nic() {
            self.open.ended.insert(self.connection.number(), memory);
        }
    }

    /// Gives up a connection: its frames are no longer stolen, so the kernel resets its peer.
    fn give_up(&mut self) {
        // Its program finds it lost.
        self.connection.block.set_owner(Owner::Nic);
        self.cancel(true);
        count_now(self.connection, self.ground.nic_memory);
        self.clear();
        self.give_slot();
        if self.connection.outlives_agent {
            // The program resets the socket itself, and reads the unread bytes in the connection's memory.
            self.connection.leave_nic();
            return;
        }
        self.end_shell();
        self.give_memory();
    }
}

/// Notes that a connection stands still from now on for its move.
fn stand_still(connection: &mut Connection) {
    let extra = connection.extra();
    if extra.still_since == 0 {
        extra.still_since = monotonic_micros();
    }
}

impl World for Performer<'_> {
    fn perform(&mut self, action: &Action) -> Outcome {
        // An action that could send only some of its commands would be repeated.
        if action.asks_nic() && self.result.is_none() && !self.ground.nic().has_room() {
            return Outcome::NotYet;
        }
        let outcome = match action {
            Action::Mirror => self.mirror(),
            Action::HandOff if self.result.is_some() => outcome(self.handed_off()),
            Action::Cover => self.cover(),
            Action::Acknowledge => self.acknowledge(),
            Action::Leave => done_if(self.has_left()),
            Action::Steal => self.steal(),
            Action::HandOff => self.hand_off(),
            Action::Clear => match self.await_fin() {
                Outcome::Done => outcome(self.perform_on_host(action)),
                waits => waits,
            },
            Action::Rest => self.rest(),
            Action::Import(source) => self.import(*source),
            Action::Release => self.release(),
            Action::Replay => self.replay(),
            Action::Cancel => {
                self.ground.shape.unsteer(&self.connection.flow);
                self.ask(Action::Cancel, Control::Cancel, 0)
            }
            Action::End => {
                self.ground.shape.end(&self.connection.flow);
                self.ask(Action::End, Control::Cancel, 0)
            }
            Action::Resume => self.resume(),
            Action::StealAgain => self.steal_again(),
            Action::Conclude(conclusion) => {
                self.concluded = Some(conclusion.clone());
                Outcome::Done
            }
            other => outcome(self.perform_on_host(other)),
        };
        if let Outcome::Refused(refusal) = &outcome {
            self.refused = Some((action.clone(), refusal.clone()));
        }
        outcome
    }

    fn answered(&mut self, action: &Action, answer: Result<(), Refusal>) -> Outcome {
        let result: Result<(), Stop> = match (action, answer) {
            (Action::Mirror, Ok(())) => self.mirrored().map_err(Stop::from),
            (Action::Steal, Ok(())) => self.stolen().map_err(Stop::from),
            (Action::HandOff, Ok(())) => self.handed_off(),
            (Action::Resume, Ok(())) => {
                self.shrink();
                Ok(())
            }
            (Action::End, _) => {
                self.end();
                Ok(())
            }
            // Whatever the answer, the NIC has nothing of the connection any more.
            (Action::Release, Err(refusal)) if refusal != Refusal::NicGone => Ok(()),
            (Action::Cancel | Action::Replay | Action::StealAgain, _) => Ok(()),
            (_, answer) => answer.map_err(Stop::from),
        };
        if let Err(Stop::Refused(refusal)) = &result {
            self.refused = Some((action.clone(), refusal.clone()));
        }
        outcome(result)
    }

    fn now(&self) -> u64 {
        monotonic_micros()
    }

    fn reached(&mut self, step: Step) {
        self.step = step;
        self.ground.passed(step);
    }
}

impl Performer<'_> {
    /// Performs the actions that ask nothing of the NIC and are not repeated.
    fn perform_on_host(&mut self, action: &Action) -> Result<(), Stop> {
        match action {
            Action::Reserve => return self.reserve(),
            Action::KeepOut => self.keep_out(),
            Action::Note(phase) => return self.note(*phase),
            Action::Export => return self.export(),
            Action::Copy => return self.copy(),
            Action::Purge => return self.purge(),
            Action::LetIn(owner) => self.let_in(*owner),
            Action::Check => return Ok(self.check()?),
            Action::Finish => return self.finish(),
            Action::FinishAnew => return self.finish_anew(),
            Action::Abandon => return self.abandon(),
            Action::Enlarge => return Ok(self.enlarge()?),
            Action::Grow => return Ok(self.grow()?),
            other => self.give_back(other),
        }
        Ok(())
    }

    /// Performs the actions that cannot be refused: they release slot, memory, journal entry and NIC.
    fn give_back(&mut self, action: &Action) {
        match action {
            Action::Clear => self.clear(),
            Action::GiveMemory => self.give_memory(),
            Action::Free => {
                self.give_memory();
                self.give_slot();
            }
            Action::Shrink => self.shrink(),
            Action::GiveUp => self.give_up(),
            Action::EndNic => {
                let flow = self.connection.flow;
                match &self.refused {
                    Some((action, refusal)) => {
                        warning!(
                            [nic = self.ground.chosen, connection = %flow] "the NIC is ended: {action:?} of {flow}: {refusal}";
                            "the next one takes over; if it comes again, send what `baton report` writes"
                        );
                    }
                    None => {
                        warning!(
                            [nic = self.ground.chosen, connection = %flow]
                            "the NIC is ended: it has not answered a command about {flow}";
                            "the next one takes over; if it comes again, send what `baton report` writes"
                        );
                    }
                }
                self.ground.nic().end();
            }
            _ => {}
        }
    }

    fn import(&mut self, source: Source) -> Outcome {
        if self.result.is_none() && self.connection.was_refused_just_now(monotonic_micros()) {
            return Outcome::NotYet;
        }
        let imported = match source {
            _ if self.result.is_some() => self.imported(),
            Source::Exported => self.import_exported(),
            Source::Rested => self.import_rested(),
            Source::Record => self.import_record(),
        };
        let imported = match imported {
            Err(Stop::Later) => return Outcome::Later,
            Err(Stop::Refused(refusal)) => Err(refusal),
            Ok(()) => Ok(()),
        };
        if let Err(Refusal::Lost(import::RECONNECT, why)) = &imported
            && self.connection.tries_again(why, monotonic_micros())
        {
            return Outcome::NotYet;
        }
        self.connection.was_taken_back();
        self.expect_fin();
        match imported {
            // The image of an undone export has not changed since it was read.
            Ok(()) if source != Source::Exported && self.image.is_some_and(|image| image.state.fin_acknowledged()) => {
                Outcome::DoneFinAcknowledged
            }
            other => other.into(),
        }
    }
}

fn done_if(done: bool) -> Outcome {
    if done { Outcome::Done } else { Outcome::NotYet }
}

/// Gives the program access to the connection in the kernel, and notifies it.
pub(crate) fn hand_to_kernel(session: &OpenSession, connection: &mut Connection) {
    connection.block.count_move();
    connection.block.note_moves();
    connection.block.set_owner(Owner::Kernel);
    session.announce_move(connection.number());
}
