//! Scheduling of moves. Programs' requests come first; moves that are under way, suggested or due get a slice of each
//! round of the agent's loop, which bounds the time that a request waits, however many connections there are.
//!
//! A move never waits for a program or for the NIC: if the program is inside an operation on the connection, or the NIC
//! has not answered, the move is resumed in a later round.

use crate::agent::Agent;
use crate::attaching::ForDevices;
use crate::connection::{Asker, Connection, Then, Waiting, record};
use crate::flips::place;
use crate::gain::{Found, Gains};
use crate::journal;
use crate::memory;
use crate::nic::NicProcess;
use crate::perform::Performer;
use crate::record::read_record;
use crate::settings::Choose;
use crate::wanted::Requests;
use baton_abi::Cid;
use baton_abi::layout::nic::MAX_NICS;
use baton_abi::layout::{block, nic};
use baton_core::{ATTEMPTS, Key, LOOK, Placement, Settle, Stage, Suggestions, UnderWay, settle};
use baton_linux::events::monotonic_micros;
use baton_log::{error, warning};
use baton_moves::{ANSWER_LIMIT, Barrier, Conclusion, Event, Goal, Move, Refusal};
use baton_policy::Side;
use baton_protocol::program::{Measured, Place, Reply, Until};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Share of a round for each kind of work on moves, in microseconds. A move that has begun is finished.
pub(crate) const SLICE: u64 = 500;

/// Why a request is refused that would wait with too many others.
pub(crate) const MANY_WAITING: &str = "too many requests wait for its move";

/// What is to be settled again: the connection, what to do with it, and the number of attempts.
pub(crate) struct PutOff(Key, Then, u8);

/// Queues of moves.
#[derive(Default)]
pub(crate) struct Moves {
    under_way: UnderWay<Key>,
    /// Moves to the NIC that programs have suggested.
    pub suggested: Suggestions<Key>,
    /// Connections that have to leave the NIC, each with the reason.
    returning: VecDeque<(Key, &'static str)>,
    /// Sessions whose attachers have been asked for descriptors.
    pub fetching: Vec<u32>,
    /// Who goes to each NIC that is full.
    pub placements: [Placement; MAX_NICS],
    /// Who goes to the NIC by what was measured, if it is chosen by that.
    pub gain: Option<Gains>,
    /// Moves that attachers have not been asked for yet, by session.
    pub unsent: BTreeMap<u32, Requests>,
    /// Moves and requests that are queued until the programs are attached to the host's devices.
    pub for_devices: ForDevices,
    /// The NIC's messages are being handled; and what was to be settled again meanwhile. It is done when all messages
    /// are handled: inside, the answers about many connections would each be handled inside the one before.
    pub handling: bool,
    pub put_off: Vec<PutOff>,
}

impl Moves {
    /// Without any.
    pub fn new(choose: Choose, measured: &[Measured]) -> Moves {
        Moves { gain: Gains::chosen(choose, measured), ..Moves::default() }
    }

    /// Whether one move at most is under way, but for those that their programs hold up, and none has to be begun.
    pub fn is_quiet(&self) -> bool {
        self.under_way.count() <= 1 && self.returning.is_empty() && self.suggested.is_empty()
    }

    /// Number of moves that have begun and wait for something, but for those that their programs hold up.
    pub fn under_way(&self) -> usize {
        self.under_way.count()
    }

    /// Time that the loop may sleep as far as moves are concerned. None without a limit.
    pub fn wait(&self) -> Option<Duration> {
        let micros = match () {
            () if !self.returning.is_empty() => 0,
            () if !self.suggested.is_empty() || self.under_way.count() > 0 => LOOK,
            () => {
                let due = self.placements.iter().filter_map(Placement::due).chain(self.under_way.due()).min();
                let wait = due.map(|due| Duration::from_micros(due.saturating_sub(monotonic_micros())));
                return wait.into_iter().chain(self.gain.as_ref().map(Gains::wait)).min();
            }
        };
        Some(Duration::from_micros(micros))
    }
}

/// Returns the connection of a key, if it still exists.
pub(crate) fn named(sessions: &mut [Option<crate::session::Session>], (session, number, serial): Key) -> Option<&mut Connection> {
    let connection = sessions.get_mut(session as usize)?.as_mut()?.connections.get_mut(number as usize)?.as_mut()?;
    (connection.serial == serial).then_some(connection)
}

/// Whether a connection that has ended on its NIC is on its way from there: it has ended for the agent as soon as the
/// NIC has answered. A restore that is refused until then has not failed.
fn is_ending(connection: &Connection) -> bool {
    connection.goal() == Some(Goal::End)
}

/// Notes until when a program needs a connection in the kernel. What the program says when its processes share the
/// connection no more does not end a stay that has another cause: the NIC dies of it, or Baton ends.
fn stay_until(connection: &mut Connection, until: Until, draining: bool) {
    match until {
        Until::Again => {}
        Until::Alone => (connection.stays, connection.inherited) = (connection.kills_nic || draining, true),
        Until::Never => connection.stays = true,
    }
}

/// Records the end of a move that began then, microseconds of the monotonic clock.
fn record_end(agent: &mut Agent, (session, number): (u32, u32), conclusion: &Conclusion, began: u64) {
    if let Some(Some(entry)) = agent.sessions.get_mut(session as usize)
        && let Some(Some(connection)) = entry.connections.get_mut(number as usize)
    {
        let program = (entry.user, entry.opening.program.as_str());
        record(connection, program, (&mut agent.counts, &mut agent.reasons), conclusion, (began, monotonic_micros()));
    }
}

/// Why a connection leaves the NIC when its class is to be in the kernel.
const RETURNS_BY_GAIN: &str = "its class is in the kernel now (baton nic gain)";

/// Measures classes of connections in both places, and moves each to where it is better served.
fn place_by_gain(agent: &mut Agent) {
    let now = monotonic_micros();
    let Some(mut gain) = agent.moves.gain.take() else { return };
    if gain.is_due(now) {
        let found = find(agent, &mut gain);
        let host_tcp = agent.nics.iter().filter_map(|nic| Some(nic.host_tcp()?.process()));
        let nics: Vec<u32> = agent.nics.iter().map(NicProcess::process).chain(host_tcp).collect();
        for (session, number, _) in gain.look(&found, &nics, now) {
            agent.return_soon(session, number, RETURNS_BY_GAIN);
        }
        let mut texts = BTreeMap::new();
        for Found { key, class, side, .. } in found {
            let settled = texts.entry(class).or_insert_with(|| gain.settled(class)).as_ref();
            if let Some((_, why)) = settled.filter(|(home, _)| *home == side)
                && let Some(connection) = named(&mut agent.sessions, key)
                && connection.reason != *why
            {
                connection.reason = why.clone().into();
            }
        }
    }
    let coming = std::mem::take(&mut gain.coming);
    agent.moves.gain = Some(gain);
    let left = come_by_gain(agent, coming);
    if let Some(gain) = &mut agent.moves.gain {
        gain.coming = left;
    }
}

/// Begins moves to the NIC, for a slice of the round. Returns those that are left.
fn come_by_gain(agent: &mut Agent, mut coming: VecDeque<Key>) -> VecDeque<Key> {
    let end = monotonic_micros() + SLICE;
    while let Some(key) = coming.pop_front() {
        if let Some(connection) = named(&mut agent.sessions, key).filter(|connection| connection.stage() == Stage::Kernel) {
            connection.by_gain = true;
            agent.attend(key.0);
            agent.begin_unasked(key.0, key.1, false);
        }
        if monotonic_micros() >= end {
            break;
        }
    }
    coming
}

/// The connections that are placed by what was measured: all that are wanted on the NIC whatever they carry, and may be
/// in both places. An attached program's stand still for each move.
fn find(agent: &Agent, gain: &mut Gains) -> Vec<Found> {
    let mut found = Vec::new();
    for (number, session) in agent.sessions.iter().enumerate() {
        let Some(session) = session.as_ref().filter(|session| session.open.is_some()) else { continue };
        let program = gain.program(&session.opening.program);
        for connection in session.connections.iter().flatten() {
            let ends = connection.closed || connection.opening || connection.abandoned;
            let by_heat = connection.block.hot_from() > 0;
            let (wanted, stage) = (connection.goes_by_itself(false) && !by_heat, connection.stage());
            if ends || !wanted || connection.attached || connection.made_by == Place::Nic || stage == Stage::Ended {
                continue;
            }
            let moves = connection.goal().is_some() || connection.must_return().is_some();
            let record = |cid: Cid| read_record(&agent.hardware.get(cid.nic())?.memory, nic::slot(cid.slot()));
            let (side, carried) = match stage {
                Stage::Nic => {
                    let record = connection.cid.and_then(record);
                    (Side::Nic, record.map(|record| record.snd_una.wrapping_add(record.rcv_nxt)))
                }
                _ => (Side::Kernel, Some(connection.block.load(block::TRAFFIC))),
            };
            found.push(Found {
                key: (number as u32, connection.number(), connection.serial),
                class: gain.class(&connection.flow, session.user, program),
                process: connection.process,
                side,
                carried: carried.filter(|_| !moves),
            });
        }
    }
    found
}

/// Why a connection may not go to the NIC, by what was measured of its class; None if it may.
fn refused_by_gain(agent: &mut Agent, session: u32, number: u32) -> Option<Refusal> {
    let gain = agent.moves.gain.as_mut()?;
    let session = agent.sessions.get(session as usize)?.as_ref()?;
    let connection = session.connections.get(number as usize)?.as_ref()?;
    if connection.attached || connection.made_by == Place::Nic || connection.block.hot_from() > 0 {
        return None;
    }
    let program = gain.program(&session.opening.program);
    let class = gain.class(&connection.flow, session.user, program);
    gain.refuses(class).map(Refusal::Placed)
}

/// Extends the time within which NICs have to answer by the time that this process did not run: if somebody has stopped
/// all of Baton, or the machine, the NICs did not run either.
pub(crate) fn excuse_what_was_missed(agent: &mut Agent) {
    let missed = agent.watch.take_missed(monotonic_micros());
    if missed == 0 {
        return;
    }
    for key in agent.moves.under_way.keys() {
        let extra = named(&mut agent.sessions, key).and_then(|connection| connection.extra.as_mut());
        if let Some(machine) = extra.and_then(|extra| extra.machine.as_deref_mut()) {
            machine.excuse(missed);
        }
    }
}

impl Agent {
    /// Does a slice of each kind of work on moves.
    pub(crate) fn work_on_moves(&mut self) {
        self.restore_lent();
        self.send_unsent();
        self.advance_moves();
        self.return_connections();
        self.begin_suggested();
        place(self);
        place_by_gain(self);
        self.flip();
        self.begin_search();
    }

    /// Passes an event to a connection's state machine and performs its actions until it has to wait for something.
    pub(crate) fn drive(&mut self, session: u32, number: u32, event: Event) {
        if let Some(call) = self.connection(session, number).and_then(|connection| connection.extra.as_mut()?.call.as_mut()) {
            return call.put_off(event);
        }
        self.run_machine(session, number, |machine, performer| machine.run(event, performer));
    }

    /// Runs something with a connection's state machine and what performs its actions.
    pub(crate) fn run_machine(&mut self, session: u32, number: u32, run: impl FnOnce(&mut Move, &mut Performer<'_>)) {
        let Some((ground, entry)) = self.split(session) else { return };
        let (Some(open), Some(Some(connection))) = (entry.open.as_mut(), entry.connections.get_mut(number as usize)) else {
            return;
        };
        let mut machine = connection.machine();
        let rests = machine.goal().is_none();
        let began = connection.extra.as_ref().map(|extra| extra.began).filter(|began| !rests && *began != 0);
        let began = began.unwrap_or_else(monotonic_micros);
        let mut performer = Performer::new(ground, open, session, connection);
        performer.began = began;
        run(&mut machine, &mut performer);
        let concluded = performer.concluded.take();
        if machine.goal().is_some() {
            performer.pause();
        }
        if !open.released.is_empty() {
            self.looks.returns.note(session);
        }
        let Some(connection) = self.connection(session, number) else { return };
        if machine.goal().is_some() {
            connection.extra().began = began;
        }
        let now = monotonic_micros();
        let is_held_up = machine.is_held_up(now);
        connection.set_machine(machine);
        let key = (session, number, connection.serial);
        // What a call is made for goes on when that has returned.
        let waits = connection.waits() && connection.call().is_none();
        // A NIC that must not continue counts as dead: the connection waits for the recovery of what that NIC had.
        let must_recover = connection.cid.filter(|_| connection.barrier() == Some(Barrier::Dead)).map(Cid::nic);
        if waits && !std::mem::replace(&mut connection.under_way, true) {
            self.moves.under_way.add(key, is_held_up, now);
        }
        if let Some(conclusion) = concluded {
            record_end(self, (session, number), &conclusion, began);
            self.conclude(session, number, conclusion);
        }
        if let Some(connection) = self.connection(session, number) {
            connection.drop_empty_extra();
        }
        if let Some(nic) = must_recover
            && let Err(error) = self.recover(nic)
        {
            // The start is retried at the end of this round.
            warning!(
                [nic = nic] "the next NIC does not start: {error:#}";
                "it is tried again; free memory, processes or descriptors if the error names them"
            );
        }
    }

    /// Passes the NIC's answer to the connection that has the slot of this cid.
    pub(crate) fn on_answer(&mut self, cid: Cid, answer: Result<(), Refusal>) {
        let Some(hardware) = self.hardware.get(cid.nic()) else { return };
        let Some((session, number)) = journal::occupant(&hardware.memory, self.settings.nic.slots, cid) else { return };
        let of_slot = |connection: &&mut Connection| connection.cid.is_some_and(|its| its.slot() == cid.slot());
        if self.connection(session, number).filter(of_slot).is_some() {
            self.attend(session);
            self.drive(session, number, Event::Answered(answer));
        }
    }

    pub(crate) fn connection(&mut self, session: u32, number: u32) -> Option<&mut Connection> {
        self.sessions.get_mut(session as usize)?.as_mut()?.connections.get_mut(number as usize)?.as_mut()
    }

    pub(crate) fn connection_ref(&self, session: u32, number: u32) -> Option<&Connection> {
        self.sessions.get(session as usize)?.as_ref()?.connections.get(number as usize)?.as_ref()
    }

    /// Number of the NIC that has a connection, or is to get it.
    pub(crate) fn nic_of(&self, session: u32, number: u32) -> Option<usize> {
        self.connection_ref(session, number)?.cid.map(Cid::nic)
    }

    pub(crate) fn stage(&self, session: u32, number: u32) -> Option<Stage> {
        Some(self.connection_ref(session, number)?.stage())
    }

    /// Advances the moves that wait, each at most once.
    fn advance_moves(&mut self) {
        let end = monotonic_micros() + SLICE;
        self.moves.under_way.begin_round(monotonic_micros());
        loop {
            excuse_what_was_missed(self);
            let Some(key) = self.moves.under_way.take() else { return };
            if let Some(connection) = named(&mut self.sessions, key) {
                connection.under_way = false;
                let nic = connection.cid.filter(|_| connection.awaits_answer()).map(Cid::nic);
                let excused = nic.is_some_and(|nic| self.watch.excuses(nic, monotonic_micros(), ANSWER_LIMIT));
                self.attend(key.0);
                self.drive(key.0, key.1, if excused { Event::Excused } else { Event::Tick });
                // A connection that stands still waits for no other's preparations.
                self.handle_nic_messages();
            }
            if monotonic_micros() >= end {
                return;
            }
        }
    }

    /// Begins a move to the NIC.
    pub(crate) fn begin_offload(&mut self, session: u32, number: u32, asker: Option<Asker>) {
        let patience = self.settings.patience;
        let Some(connection) = self.connection(session, number) else { return };
        // An attacher's program stands still: out-of-order data in the kernel is not waited for.
        let patience = if connection.attached { 0 } else { patience };
        if connection.opening {
            let moved = Err(Refusal::State("SYN-SENT"));
            return self.note_end(session, number, moved, asker.into_iter().collect());
        }
        if connection.stays {
            // Its program has taken it back for good while the move waited: for a device, say.
            return self.note_end(session, number, Err(Refusal::CalledOff), asker.into_iter().collect());
        }
        if let Some(refusal) = refused_by_gain(self, session, number) {
            record_end(self, (session, number), &Conclusion::Stays(refusal.clone()), monotonic_micros());
            return self.note_end(session, number, Err(refusal), asker.into_iter().collect());
        }
        let Some(connection) = self.connection(session, number) else { return };
        if !connection.attached && self.awaits_devices() {
            return self.move_when_attached(session, number, asker.into_iter().collect());
        }
        let Some(connection) = self.connection(session, number) else { return };
        if let Some(asker) = asker {
            connection.extra().waiting.askers.push(asker);
        }
        self.drive(session, number, Event::Offload { patience });
    }

    /// Begins a move to the kernel, or continues one whose program may have left its operation by now.
    pub(crate) fn begin_restore(&mut self, session: u32, number: u32, asker: Option<Asker>) {
        let Some(connection) = self.connection(session, number) else { return };
        if let Some(asker) = asker {
            connection.extra().waiting.askers.push(asker);
        }
        self.drive(session, number, Event::Restore { forced: false });
    }

    /// Queues a move to the NIC that a program suggested; it is made when the agent is idle or it is overdue.
    pub(crate) fn suggest(&mut self, session: u32, number: u32) {
        let Some(connection) = self.connection(session, number) else { return };
        connection.want(true);
        if !std::mem::replace(&mut connection.suggested, true) {
            let key = (session, number, connection.serial);
            self.moves.suggested.add(key, monotonic_micros());
        }
    }

    fn begin_suggested(&mut self) {
        let begun = monotonic_micros();
        let mut now = begun;
        while now < begun + SLICE
            && let Some(key) = self.moves.suggested.take(begun, now)
        {
            let wanted = |connection: &mut Connection| std::mem::take(&mut connection.suggested) && connection.is_wanted();
            if named(&mut self.sessions, key).is_some_and(wanted) {
                let (session, number, _) = key;
                if let Some(wait) = self.kept_away_for(session, number) {
                    self.look_again(session, number, wait);
                    continue;
                }
                // Tag 0: no answer is sent.
                let _ = self.request_move(session, number, Place::Nic, (session, 0));
            }
            now = monotonic_micros();
        }
    }

    /// Queues a connection that has to leave the NIC, with the reason.
    pub(crate) fn return_soon(&mut self, session: u32, number: u32, why: &'static str) {
        let Some(connection) = self.connection(session, number) else { return };
        connection.extra().must_return = Some(why);
        let key = (session, number, connection.serial);
        self.moves.returning.push_back((key, why));
    }

    fn return_connections(&mut self) {
        let end = monotonic_micros() + SLICE;
        while let Some((key, why)) = self.moves.returning.pop_front() {
            let here = named(&mut self.sessions, key).is_some_and(|connection| connection.stage() == Stage::Nic);
            if here {
                self.must_return(key.0, key.1, why);
            }
            if monotonic_micros() >= end {
                return;
            }
        }
    }

    /// Concludes a move: counts it, answers those who asked for it, and does what was waiting for its end.
    pub(crate) fn conclude(&mut self, session: u32, number: u32, conclusion: Conclusion) {
        let must_return = self.connection(session, number).is_some_and(|connection| connection.must_return().is_some());
        if conclusion == Conclusion::Moved {
            self.catch_up(session, number);
        }
        self.looks.ways |=
            self.connection_ref(session, number).is_some_and(|one| one.on_nic.as_ref().is_some_and(|on_nic| on_nic.stale));
        self.draw_again(session, number);
        self.answer_askers(session, number, conclusion.clone());
        self.follow_conclusion(session, number, &conclusion, must_return);
        self.follow_silence(session, number, &conclusion);
        self.return_descriptor(session, number);
    }

    fn answer_askers(&mut self, session: u32, number: u32, conclusion: Conclusion) {
        let Some(connection) = self.connection(session, number) else { return };
        let (waiting, flow) = (connection.take_waiting(), connection.flow);
        let Waiting { askers, again, then } = waiting;
        match conclusion {
            // No request waits for a growth; those that arrived meanwhile wait for the next move.
            Conclusion::Grown if askers.is_empty() => {}
            Conclusion::Grown => connection.extra().waiting.askers = askers,
            Conclusion::Moved => self.note_end(session, number, Ok(()), askers),
            Conclusion::Recovered => self.note_recovery(session, number, false, askers, !then.is_empty()),
            Conclusion::Lost(refusal, recovering) => {
                error!(
                    [connection = %flow, session = session]
                    "{flow} is {}", refusal.to_string().trim_start_matches("it is ");
                    "its program has to connect again; `baton ls -e` shows its last events"
                );
                if recovering {
                    self.note_recovery(session, number, true, askers, !then.is_empty());
                } else {
                    self.statistics.failed_moves += 1;
                    self.note_end(session, number, Err(refusal), askers);
                }
            }
            Conclusion::Stays(refusal) if refusal.is_overtaken() => {
                let reply = Reply::Stayed { reason: refusal.to_string(), transient: false };
                askers.into_iter().for_each(|(asker, tag)| self.answer(asker, tag, reply.clone(), &[]));
            }
            // An attacher's program stands still: the attacher tries again later.
            Conclusion::Stays(Refusal::Attaching) if !connection.attached => self.move_when_attached(session, number, askers),
            Conclusion::Stays(Refusal::Searching) => self.move_when_searched(session, number, askers),
            Conclusion::Stays(refusal) => {
                let busy = refusal == Refusal::Busy;
                self.note_end(session, number, Err(refusal), askers);
                self.go_on(session, number, then, !busy);
                return self.ask_again(session, number, again);
            }
        }
        self.go_on(session, number, then, true);
        self.ask_again(session, number, again);
    }

    /// Whether so many requests wait for a connection's move, which may take as long as its program likes, that no more
    /// may.
    pub(crate) fn has_many_waiting(&self, session: u32, number: u32) -> bool {
        let extra = self.connection_ref(session, number).and_then(|connection| connection.extra.as_ref());
        extra.is_some_and(|extra| extra.waiting.is_full())
    }

    /// Moves a connection to the NIC for those who asked for that while it was on its way to the kernel.
    fn ask_again(&mut self, session: u32, number: u32, askers: Vec<Asker>) {
        for (asker, tag) in askers {
            if let Some((reply, _)) = self.request_move(session, number, Place::Nic, (asker, tag)) {
                self.answer(asker, tag, reply, &[]);
            }
        }
    }

    /// Does what waited for the end of a move. `again`: if the connection is not in the kernel, restoring it is tried
    /// once more.
    pub(crate) fn go_on(&mut self, session: u32, number: u32, then: Vec<(Then, u8)>, again: bool) {
        for (then, attempts) in then {
            let (asker, tag) = then.asker();
            let attempts = if again { attempts } else { ATTEMPTS };
            if let Some(reply) = self.settle(session, number, then, attempts) {
                self.answer(asker, tag, reply, &[]);
            }
        }
    }

    /// Restores a connection to the kernel, whatever stage it is in, and does `then`, after `attempts` earlier tries.
    /// Returns the answer, or None if it comes later or was sent.
    pub(crate) fn settle(&mut self, session: u32, number: u32, then: Then, attempts: u8) -> Option<Reply> {
        if attempts > 0 {
            if self.moves.handling
                && let Some(serial) = self.connection(session, number).map(|connection| connection.serial)
            {
                self.moves.put_off.push(PutOff((session, number, serial), then, attempts));
                return None;
            }
            // The NIC refuses a connection that has just ended; the notification of its end may be in the ring by now.
            self.handle_nic_messages();
        }
        self.settle_now(session, number, then, attempts)
    }

    /// Settles what was put off until the NIC's messages were handled, unless its connection has been removed
    /// meanwhile.
    pub(crate) fn settle_put_off(&mut self, PutOff(key, then, attempts): PutOff) {
        let (asker, tag) = then.asker();
        let here = named(&mut self.sessions, key).is_some();
        if let Some(reply) = if here { self.settle_now(key.0, key.1, then, attempts) } else { Some(Reply::Done) } {
            self.answer(asker, tag, reply, &[]);
        }
    }

    fn settle_now(&mut self, session: u32, number: u32, then: Then, attempts: u8) -> Option<Reply> {
        let opens = self.connection_ref(session, number).is_some_and(|connection| connection.opening);
        if (attempts >= ATTEMPTS || opens) && self.is_called(session, number) {
            return self.settle_later(session, number, then, attempts);
        }
        self.open_in_kernel_for(session, number, &then);
        if opens && self.is_called(session, number) {
            return self.settle_now(session, number, then, attempts);
        }
        let connection = self.connection_ref(session, number);
        let (stage, ends) = (connection.map(Connection::stage), connection.is_some_and(is_ending));
        match settle(stage, ends, matches!(then, Then::Forget(_)), attempts) {
            Settle::Operate => {}
            Settle::GiveUpUnread => self.forget_what_ended(session, number),
            Settle::Wait => return self.settle_later(session, number, then, attempts),
            Settle::CallOff => {
                self.settle_later(session, number, then, attempts);
                self.call_off(session, number);
                return None;
            }
            Settle::Restore { forced: true } if self.closes_when_grown(session, number) => {
                return self.settle_later(session, number, then, attempts);
            }
            Settle::Restore { forced: true } if self.close_on_nic(session, number) => return Some(Reply::Done),
            Settle::Restore { forced } => {
                self.settle_later(session, number, then, attempts + 1);
                self.drive(session, number, Event::Restore { forced });
                return None;
            }
        }
        self.finish(session, number, then)
    }

    /// Has `then` settled again when the move has ended that is under way, or begins. The answer comes then.
    fn settle_later(&mut self, session: u32, number: u32, then: Then, attempts: u8) -> Option<Reply> {
        if let Some(connection) = self.connection(session, number) {
            connection.extra().waiting.then.push((then, attempts));
        }
        None
    }

    /// Takes a connection that the NIC is opening from there: the kernel opens it, unless its program has closed it.
    fn open_in_kernel_for(&mut self, session: u32, number: u32, then: &Then) {
        let Some(connection) = self.connection(session, number).filter(|connection| connection.opening) else { return };
        if let (Then::Forget(_), Some(cid)) = (then, connection.cid) {
            connection.opening = false;
            connection.cid = None;
            let flow = connection.flow;
            self.drop_made(cid);
            self.shape.unsteer(&flow);
        } else {
            self.open_in_kernel(session, number);
        }
    }

    /// Frees the memory of a connection that ended on the NIC: its unread bytes are not wanted any more.
    fn forget_what_ended(&mut self, session: u32, number: u32) {
        self.drive(session, number, Event::Forgotten);
        if let Some(Some(entry)) = self.sessions.get_mut(session as usize)
            && let Some(open) = entry.open.as_mut()
            && let Some(memory) = open.ended.remove(&number)
        {
            memory::give_when_left(open, number, memory);
            self.looks.returns.note(session);
        }
    }

    /// Does `then`, now that the connection is in the kernel or could not be restored. Returns the answer, or None if
    /// it comes later.
    fn finish(&mut self, session: u32, number: u32, then: Then) -> Option<Reply> {
        match then {
            Then::Forget(_) => Some(self.finish_forgetting(session, number)),
            Then::GiveBack { reason, until, .. } => Some(self.finish_giving_back(session, number, reason, until)),
            Then::Offload(asker) => match self.connection(session, number) {
                // It could not leave its NIC.
                Some(connection) if connection.stage() == Stage::Nic => {
                    Some(Reply::Stayed { reason: connection.reason.to_string(), transient: true })
                }
                _ => self.request_move(session, number, Place::Nic, asker).map(|(reply, _)| reply),
            },
        }
    }

    /// Restores a connection because its program wants an operation that only the kernel can do.
    pub(crate) fn give_back(&mut self, session: u32, number: u32, reason: String, until: Until, asker: Asker) -> Option<Reply> {
        let group = self.sessions.get(session as usize).and_then(Option::as_ref).map_or(0, |session| session.opening.group);
        if let Some(group) = self.groups.get(group).filter(|_| !reason.is_empty()) {
            group.gave_back(&reason);
        }
        if self.has_many_waiting(session, number) {
            return Some(Reply::Failed { reason: MANY_WAITING.into() });
        }
        self.settle(session, number, Then::GiveBack { asker, reason, until }, 0)
    }

    fn finish_giving_back(&mut self, session: u32, number: u32, reason: String, until: Until) -> Reply {
        let draining = self.draining;
        let Some(connection) = self.connection(session, number) else { return Reply::Done };
        stay_until(connection, until, draining);
        if until != Until::Again {
            self.keep_connection(session, number);
            self.forget_search(session, number);
        }
        let Some(connection) = self.connection(session, number) else { return Reply::Done };
        if connection.stage() == Stage::Nic {
            return Reply::Failed { reason: connection.reason.to_string() };
        }
        if !reason.is_empty() {
            connection.reason = reason.into();
        }
        self.try_later(session, number);
        Reply::Done
    }

    /// Restores a connection if need be, and removes it. Returns the answer, or None if it comes later or was sent.
    pub(crate) fn forget(&mut self, session: u32, number: u32, asker: Asker) -> Option<Reply> {
        // An earlier one of these requests has removed it.
        if self.has_many_waiting(session, number)
            && self.connection_ref(session, number).is_some_and(Connection::is_to_be_forgotten)
        {
            return Some(Reply::Done);
        }
        self.settle(session, number, Then::Forget(asker), 0)
    }

    /// Cancels a move to the NIC that has not been handed off, and answers those who asked for it.
    pub(crate) fn call_off(&mut self, session: u32, number: u32) {
        self.drive(session, number, Event::CallOff(Refusal::CalledOff));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Block;
    use baton_abi::layout::session;
    use baton_moves::{Action, Outcome, Step};
    use baton_shm::Region;
    use baton_wire::{Endpoint, Flow};
    use std::sync::Arc;

    fn connection() -> Connection {
        let end = |host| Endpoint::v4([10, 0, 0, host], 80);
        let flow = Flow { local: end(1), remote: end(2), device: 0 };
        let block = Block::new(Arc::new(Region::private(session::HEAP).expect("memory")), 0);
        Connection::new(None, flow, flow.local.into(), flow.remote.into(), block)
    }

    /// Its program forks, and its processes share it no more.
    #[test]
    fn a_connection_of_which_the_nic_dies_stays_whatever_its_program_says() {
        let mut connection = connection();
        stay_until(&mut connection, Until::Never, false);
        stay_until(&mut connection, Until::Alone, false);
        assert!(!connection.stays && connection.inherited);
        stay_until(&mut connection, Until::Alone, true);
        assert!(connection.stays, "Baton ends");
        (connection.stays, connection.kills_nic) = (true, true);
        stay_until(&mut connection, Until::Alone, false);
        assert!(connection.stays);
    }

    /// A connection has ended on the NIC, which is slow to answer: requests to restore it wait for the answer.
    #[test]
    fn a_connection_is_ending_until_its_nic_has_answered() {
        let mut connection = connection();
        let mut machine = Move::resting_at(Step::Nic);
        connection.set_machine(machine.clone());
        assert!(!is_ending(&connection));
        assert_eq!(machine.on(Event::Ended, 1), Some(Action::End));
        for event in [Event::Outcome(Outcome::Sent), Event::Restore { forced: false }] {
            assert_eq!(machine.on(event, 2), None);
            connection.set_machine(machine.clone());
            assert!(is_ending(&connection) && connection.stage() == Stage::Nic);
        }
        let concluded = Action::Conclude(Conclusion::Stays(Refusal::Ended));
        assert_eq!(machine.on(Event::Answered(Ok(())), 3), Some(concluded));
        assert_eq!(machine.on(Event::Outcome(Outcome::Done), 3), None);
        connection.set_machine(machine);
        assert!(!is_ending(&connection) && connection.stage() == Stage::Ended);
    }
}
