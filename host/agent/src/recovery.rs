//! Recovery after a NIC's death: every connection that it had is restored to the kernel, from its record, its block and
//! its memory.

use crate::agent::Agent;
use crate::connection::{Asker, Connection};
use crate::events::{KILLS_NIC, NIC_DIED};
use crate::ground::Shape;
use crate::nic::NicProcess;
use baton_backends::VnetDevice;
use baton_core::{Recovery, Stage};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_linux::events::monotonic_micros;
use baton_log::{error, info, warning};
use baton_moves::Event;
use baton_protocol::events::What;
use baton_supervision::Cause;
use baton_wire::{Flow, TcpFrame};
use std::collections::HashSet;

/// Bound on the stale frames that are read: more than a TAP's queue holds.
const MOST_STALE_FRAMES: usize = 8192;

impl Agent {
    /// Recovers from the death of each NIC that has died. With `while_kept` not if the keeper has ended as well: then
    /// another NIC is only wanted for connections that the dead one had, which [`Agent::give_everything_back`] sees to.
    /// Returns false if that is so.
    pub(crate) fn recover_from_deaths(&mut self, while_kept: bool) -> anyhow::Result<bool> {
        for nic in 0..self.nics.len() {
            if self.nics[nic].is_dead() {
                if while_kept && self.keeper.is_hung_up() {
                    return Ok(false);
                }
                self.recover(nic)?;
            }
        }
        Ok(true)
    }

    /// Starts the next NIC in place of a dead one, so that other traffic flows again, and restores the last one's
    /// connections to the kernel. Until then their shells neither receive nor send, so no peer gets segments that the
    /// connection itself did not send. A connection whose program does not leave an operation is waited for by itself,
    /// without delaying the others. The connections of other NICs go on.
    pub(crate) fn recover(&mut self, nic: usize) -> anyhow::Result<()> {
        self.note_death(nic);
        self.replace_nic(nic)
    }

    /// The same of a NIC that this agent ends since the connections are the last agent's.
    pub(crate) fn replace_nic(&mut self, nic: usize) -> anyhow::Result<()> {
        let mut next = None;
        for step in Recovery::STEPS {
            match step {
                Recovery::EndNic => self.nics[nic].end(),
                Recovery::ForgetCommands => {
                    let open = self.sessions.iter().flatten().filter_map(|session| session.open.as_ref());
                    open.for_each(|open| open.forget_commands(nic));
                    // Connections that it has made may be in the ring still.
                    self.handle_nic_messages();
                    self.open_in_kernel_instead_of(nic);
                }
                Recovery::StartNic => {
                    self.start_next_nic(nic)?;
                    next = Some(self.nics[nic].process());
                }
                Recovery::AwaitAnswers => {
                    self.await_answers(nic);
                    if Some(self.nics[nic].process()) != next {
                        // It did not answer a connection in time, and was ended for that. The recovery from its end has
                        // done the rest for the NIC after it, which serves listeners and has frames by now.
                        return Ok(());
                    }
                    self.listen_again(nic);
                    self.follow_datagrams();
                }
                Recovery::DropStaleFrames => {
                    if let Err(error) = self.drop_stale_frames() {
                        info!([nic = nic] "frames of the kernel's may be among those that go out: {error:#}");
                    }
                }
                Recovery::LetFramesFlow => {
                    self.give_addresses_to_nic();
                    self.nics[nic].let_frames_flow();
                    // The connections of attachers follow as soon as these have lent their descriptors.
                    self.fetch_what_was_on(nic);
                }
                Recovery::TellDeath | Recovery::TellStart | Recovery::TellFlow => {}
            }
            if let Some(event) = step.event() {
                self.drive_all(nic, &event);
            }
        }
        self.clear_attended();
        self.restore_lent();
        Ok(())
    }

    /// Notes a NIC's death, and what it had, in its crash loop.
    fn note_death(&mut self, nic: usize) {
        let by_itself = self.nics[nic].died_by_itself();
        let hung = |cause: Cause| format!("it hung: {cause}");
        let (kind, why) = match self.watch.cause(nic) {
            Some(cause @ Cause::Stopped) => ("stopped", hung(cause)),
            Some(cause @ Cause::Spins(_)) => ("spun", hung(cause)),
            Some(cause @ Cause::Stuck(_)) => ("stuck", hung(cause)),
            None if self.nics[nic].is_ended() => ("ended", "it did not do what it must, and was ended".into()),
            None if by_itself => ("crashed", "it crashed".into()),
            None => ("killed", "somebody killed it, or its host's TCP".into()),
        };
        self.counts.note_death(nic, kind);
        // Where this agent has ended it, it has said so.
        if matches!(kind, "crashed" | "killed") {
            let process = self.nics[nic].process();
            warning!(
                [nic = nic] "NIC {nic} (process {process}) has died: {why}";
                "the next one takes over; if it comes again, send what `baton report` writes"
            );
        }
        let (now, why) = (monotonic_micros(), self.reasons.shared(&why));
        let mut present = Vec::new();
        for (session, number) in self.all_connections() {
            let moves = matches!(self.stage(session, number), Some(Stage::Nic | Stage::Offloading));
            if moves
                && self.nic_of(session, number) == Some(nic)
                && let Some(connection) = self.connection(session, number)
            {
                connection.extra().nic_that_died = nic as u8;
                connection.extra().began = now;
                connection.events.note(now, What::NicDied, Some(nic as u8), Some(why.clone()), 0);
                present.push((connection.serial, (session, number)));
            }
        }
        let serials = present.iter().map(|(serial, _)| *serial);
        let Some(guilty) = self.watch.died(nic, now, by_itself, serials) else { return };
        let Some((_, (session, number))) = present.into_iter().find(|(serial, _)| *serial == guilty) else { return };
        if let Some(connection) = self.connection(session, number) {
            error!(
                [nic = nic, connection = %connection.flow, session = session]
                "{} stays in the kernel: {KILLS_NIC}", connection.flow;
                "send what `baton report` writes"
            );
            connection.stays = true;
            connection.kills_nic = true;
            self.keep_connection(session, number);
        }
    }

    /// Counts a connection that was recovered after its NIC or agent died, or `lost`. If anybody `awaited` its move to
    /// the kernel, answers them.
    pub(crate) fn note_recovery(&mut self, session: u32, number: u32, lost: bool, askers: Vec<Asker>, awaited: bool) {
        if let Some(connection) = self.connection(session, number) {
            connection.reason = if connection.kills_nic { KILLS_NIC } else { NIC_DIED }.into();
        }
        if lost {
            self.statistics.lost += 1;
            let name = self.sessions.get(session as usize).and_then(Option::as_ref).map_or(0, |entry| entry.opening.group);
            self.groups.get(name).into_iter().for_each(|group| group.report.resets += 1);
        } else {
            self.statistics.recovered += 1;
        }
        if awaited || !askers.is_empty() {
            self.note_end(session, number, Ok(()), askers);
        }
    }

    /// Waits until the next NIC of this number has answered its commands about the last one's connections. This is part
    /// of its start: before frames flow it has to hold those. One that does not answer in time is ended, and recovered
    /// from, meanwhile.
    fn await_answers(&mut self, nic: usize) {
        let next = self.nics[nic].process();
        for (session, number) in self.all_connections() {
            let its = |connection: &Connection| connection.cid.is_some_and(|cid| cid.nic() == nic);
            let due = |connection: &&mut Connection| its(connection) && connection.awaits_answer();
            let is_next = |nic: &mut NicProcess| nic.process() == next && !nic.is_dead();
            while self.connection(session, number).filter(due).is_some() && is_next(&mut self.nics[nic]) {
                self.pulse.beat();
                self.handle_nic_messages();
                self.finish_calls();
                self.drive(session, number, Event::Tick);
                std::thread::yield_now();
            }
        }
    }

    /// Passes an event to all connections that are on a NIC, or on their way there. To those of an attacher that has
    /// been asked for their descriptors, frames flow later.
    fn drive_all(&mut self, nic: usize, event: &Event) {
        for (session, number) in self.all_connections() {
            let moves = matches!(self.stage(session, number), Some(Stage::Nic | Stage::Offloading));
            let waits = *event == Event::FramesFlow && self.is_fetching(session);
            if moves && !waits && self.nic_of(session, number) == Some(nic) {
                self.attend(session);
                self.drive(session, number, event.clone());
            }
        }
    }

    /// Handles frames that the kernel sent while there was no NIC. Those of connections that may have been between two
    /// owners just then are dropped: they may lie beyond the sequence numbers that were read, and the kernel, restored
    /// from those, would reject acknowledgements of them. All others are sent.
    fn drop_stale_frames(&mut self) -> anyhow::Result<()> {
        if matches!(self.shape, Shape::Beside { .. }) {
            // Beside the kernel its frames do not pass the NIC.
            return Ok(());
        }
        // Order of the card's descriptors: its registers, then the host's and the wire's queues in turn.
        let hardware = &self.hardware[0];
        let further = hardware.card.iter().skip(1).step_by(2);
        // With an owner the wire is not this host's: what was sent while there was no NIC is lost, as on a wire that
        // was unplugged.
        let wire = (!self.settings.nic.owned).then(|| hardware.wire.try_clone()).transpose()?;
        let mut wire = wire.map(|wire| VnetDevice::new(wire, false));
        let connections = self.sessions.iter().flatten().flat_map(|session| session.connections.iter().flatten());
        let ours: HashSet<Flow> = connections.map(|connection| connection.flow).collect();
        let mut frame = Frame::with_capacity(MAX_FRAME);
        for queue in further.chain([&hardware.host]) {
            let mut kernel = VnetDevice::new(queue.try_clone()?, false);
            for _ in 0..MOST_STALE_FRAMES {
                if !kernel.receive(&mut frame) {
                    break;
                }
                if !TcpFrame::parse(frame.bytes(), 0).is_ok_and(|parsed| ours.contains(&parsed.flow.reversed()))
                    && let Some(wire) = &mut wire
                {
                    wire.transmit(&mut frame);
                }
            }
        }
        Ok(())
    }
}
