//! The machine of one connection.

use crate::action::{Action, Conclusion, Outcome, Source, World};
use crate::backoff::Backoff;
use crate::refusal::Refusal;
use crate::step::{Custody, Phase, Step};
use baton_abi::layout::Owner;

/// Microseconds that a program may take to leave an operation on a connection that is to move and can stay where it is.
pub const QUIESCE_LIMIT: u64 = 20_000;

/// Microseconds that it may take for a growth, which is asked for again: as long as copying what it sends or receives
/// takes.
pub const GROW_LIMIT: u64 = 1_000;

/// Microseconds of mirroring after which the kernel is made to send its SACK blocks: a connection without traffic sends
/// none by itself.
pub const QUIET: u64 = 5_000;

/// Microseconds after which a NIC that has not answered a command counts as dead.
pub const ANSWER_LIMIT: u64 = 2_000_000;

/// Where a connection is going.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Goal {
    /// To the NIC, or to stay there.
    Nic,
    /// To the kernel, if that can take it.
    Check,
    /// To the kernel, or to stay there.
    Kernel,
    /// Into larger memory, if there is any.
    Enlarge,
    /// Into larger memory.
    Grow,
    /// To stay on the NIC: a growth does not take place, and no answer is due.
    Stay,
    /// To its end on the NIC.
    End,
    /// To its end, since neither kernel nor NIC can take it.
    GiveUp,
}

/// What happens to all connections of a NIC that has died, in this order, and is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Barrier {
    /// The NIC, which must not go on, is dead: [`Event::NicDied`].
    Dead,
    /// The next NIC is there, and no frame flows yet: [`Event::NicStarted`].
    Started,
    /// Frames flow: [`Event::FramesFlow`]. It is waited for from the next NIC's start on, also while that NIC does not
    /// hold the connection's frames yet: the event comes once, and may come before the command has found room or its
    /// answer is there.
    Flow,
}

/// What happens to a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// It is to go to the NIC; how many microseconds its copy may take to cover what the kernel holds out of order.
    Offload {
        /// Microseconds.
        patience: u64,
    },
    /// It is to go to the kernel. Forced: it does not stay on the NIC if its program does not leave it in time, or if
    /// it has ended there.
    Restore {
        /// Its program has closed it.
        forced: bool,
    },
    /// It could use more memory on the NIC.
    Grow,
    /// Time has passed.
    Tick,
    /// The same, in which the NIC had no chance to answer: it gets its time again.
    Excused,
    /// A move to the NIC that has not reached the steal is given up, for this reason.
    CallOff(Refusal),
    /// It has ended on the NIC.
    Ended,
    /// Its program has forgotten it; what it had not read is gone.
    Forgotten,
    /// It cannot go to the kernel, and nobody waits for that any more.
    GiveUp,
    /// The NIC has died.
    NicDied,
    /// The next NIC is there, and no frame flows yet.
    NicStarted,
    /// Frames flow again. Connections whose NIC has died hold theirs.
    FramesFlow,
    /// What has come of the last action.
    Outcome(Outcome),
    /// The NIC's answer to the command that the last action has sent.
    Answered(Result<(), Refusal>),
}

/// A connection's place, and its move if one is under way. An event gives the next action; its outcome is the next
/// event. Other events come between the outcome of one action and the next action, or while [`Move::on`] has returned
/// none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Move {
    step: Step,
    goal: Option<Goal>,
    /// The action whose outcome is awaited.
    pending: Option<Action>,
    /// The NIC has been sent a command for that action: until when it has to answer, microseconds.
    answer_by: Option<u64>,
    /// The action to which the NIC has not answered in time. Its outcome is known once the NIC is dead.
    unanswered: Option<Action>,
    barrier: Option<Barrier>,
    /// What gives the frames to the kernel, and replays what it has missed.
    release: Action,
    /// Our FIN has been acknowledged: the kernel sends its own before the frames are released.
    fin_first: bool,
    /// The kernel has been finishing when its agent died.
    anew: bool,
    /// A growth has taken memory.
    enlarged: bool,
    /// It is to go to the kernel after what is under way, which cannot turn around any more.
    then_restore: bool,
    /// It is on its way to the kernel after a death.
    recovering: bool,
    /// It does not stay where it is if its program does not leave it in time.
    forced: bool,
    /// The kernel has been made to send its SACK blocks.
    asked: bool,
    /// When the mirror began, how long its copy may take, and by when the program has to have left; microseconds.
    since: u64,
    patience: u64,
    deadline: u64,
    /// Why the move turned around.
    because: Option<Refusal>,
    /// Why there is no connection any more.
    lost: Option<Refusal>,
    backoff: Backoff,
}

impl Default for Move {
    fn default() -> Move {
        Move::new()
    }
}

impl Move {
    /// Of a connection that is in the kernel.
    pub fn new() -> Move {
        Move {
            step: Step::Kernel,
            goal: None,
            pending: None,
            answer_by: None,
            unanswered: None,
            barrier: None,
            release: Action::Release,
            fin_first: false,
            anew: false,
            enlarged: false,
            then_restore: false,
            recovering: false,
            forced: false,
            asked: false,
            since: 0,
            patience: 0,
            deadline: 0,
            because: None,
            lost: None,
            backoff: Backoff::default(),
        }
    }

    /// Of a connection whose agent has died, as the journal has it; `fin_acknowledged`: our FIN is, by the image in the
    /// slot. [`Event::Tick`] decides what is to be done, or for one that the NIC had [`Event::NicStarted`].
    pub fn adopted(phase: Phase, fin_acknowledged: bool) -> Move {
        Move {
            step: phase.resumes_at(),
            goal: Some(Goal::Kernel),
            recovering: phase != Phase::Reading,
            because: (phase == Phase::Reading).then_some(Refusal::NicGone),
            release: Action::Replay,
            fin_first: fin_acknowledged,
            anew: phase == Phase::Sending,
            ..Move::new()
        }
    }

    /// Of a connection that the NIC has made: its shell is there, the NIC holds its frames, and image and journal are
    /// written. [`Event::Tick`] hands it off, or, unless `to_nic`, lets the kernel have it.
    pub fn made(to_nic: bool) -> Move {
        let goal = if to_nic { Goal::Nic } else { Goal::Kernel };
        Move { step: Step::Purged, goal: Some(goal), ..Move::new() }
    }

    /// Of a connection that had ended on the NIC when its agent died.
    pub fn ended() -> Move {
        Move { step: Step::Ended, ..Move::new() }
    }

    /// At rest at this step: of [`Move::rests_at`].
    pub fn resting_at(step: Step) -> Move {
        Move { step, ..Move::new() }
    }

    /// The step at which it rests, if [`Move::resting_at`] that one goes on as this does: no move is under way, nothing
    /// is awaited, and none is put off. What is left of the last move is set anew when the next one begins.
    pub fn rests_at(&self) -> Option<Step> {
        let Move { step, since, patience, deadline, because, lost, asked, fin_first, .. } = self.clone();
        let left = Move { since, patience, deadline, because, lost, asked, fin_first, ..Move::resting_at(step) };
        (*self == left).then_some(step)
    }

    /// The last step that has been made.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Where it is going, if it is.
    pub fn goal(&self) -> Option<Goal> {
        self.goal
    }

    /// Whether it is on its way to the kernel, or goes there next.
    pub fn is_leaving(&self) -> bool {
        self.then_restore || matches!(self.goal, Some(Goal::Check | Goal::Kernel))
    }

    /// Whether a move is under way that goes on by itself: [`Event::Tick`] is due from time to time.
    pub fn waits(&self) -> bool {
        self.goal.is_some() && !self.is_stopped()
    }

    /// Whether it goes on only when something has happened to all connections of its NIC.
    fn is_stopped(&self) -> bool {
        match self.barrier {
            // The next NIC is to hold its frames before they flow, and otherwise as soon as it can.
            Some(Barrier::Flow) => self.step != Step::Barred,
            barrier => barrier.is_some(),
        }
    }

    /// Whether it waits for its program, which has had its time, and cannot stay where it is.
    pub fn is_held_up(&self, now: u64) -> bool {
        let waits = self.waits() && self.answer_by.is_none() && self.goal == Some(Goal::Kernel);
        let cannot_stay = self.step == Step::Retaken || self.step == Step::Leaving && self.forced;
        waits && cannot_stay && now >= self.deadline
    }

    /// What all connections of a NIC that has died wait for.
    pub fn barrier(&self) -> Option<Barrier> {
        self.barrier
    }

    /// The action for which the NIC has been sent a command that it has not answered.
    pub fn awaits(&self) -> Option<&Action> {
        self.pending.as_ref().filter(|_| self.answer_by.is_some())
    }

    /// Until when the NIC has to answer that command, microseconds.
    pub fn answer_due(&self) -> Option<u64> {
        self.answer_by
    }

    /// Gives the NIC `micros` microseconds more to answer the command under way. The agent calls it after it was
    /// stopped for that long, since its NIC may have been stopped with it.
    pub fn excuse(&mut self, micros: u64) {
        self.answer_by = self.answer_by.map(|limit| limit.saturating_add(micros));
    }

    /// For how many microseconds more no move of it is to be begun, since its program did not leave in time lately; 0
    /// if one may.
    pub fn put_off_for(&self, now: u64) -> u64 {
        self.backoff.rest(now)
    }

    /// Performs what an event brings about, until something has to be waited for.
    pub fn run(&mut self, event: Event, world: &mut impl World) {
        let mut next = match event {
            Event::Answered(answer) => {
                let Some(action) = self.awaits().cloned() else { return };
                let outcome = world.answered(&action, answer);
                self.take_outcome(outcome, world)
            }
            event => self.on(event, world.now()),
        };
        while let Some(action) = next {
            let outcome = world.perform(&action);
            next = self.take_outcome(outcome, world);
        }
    }

    /// Goes on after [`Outcome::Later`]: the action is performed once more, and finds what was done for it elsewhere.
    /// `meanwhile` is what has happened first since then; it is taken before the next action is performed, unless this
    /// one has the same outcome again.
    pub fn complete(&mut self, meanwhile: &mut Option<Event>, world: &mut impl World) {
        let Some(action) = self.pending.clone() else { return };
        let outcome = world.perform(&action);
        let again = outcome == Outcome::Later;
        let mut next = self.take_outcome(outcome, world);
        if !again && let Some(event) = meanwhile.take() {
            next = self.on(event, world.now());
        }
        while let Some(action) = next {
            let outcome = world.perform(&action);
            next = self.take_outcome(outcome, world);
        }
    }

    fn take_outcome(&mut self, outcome: Outcome, world: &mut impl World) -> Option<Action> {
        let before = self.step;
        let next = self.on(Event::Outcome(outcome), world.now());
        if self.step != before {
            world.reached(self.step);
        }
        next
    }

    /// The next action, at `now` in microseconds. None: something has to happen first.
    pub fn on(&mut self, event: Event, now: u64) -> Option<Action> {
        match event {
            Event::Answered(answer) if self.awaits().is_some() => return self.on(Event::Outcome(answer.into()), now),
            Event::Answered(_) => return None,
            Event::Outcome(Outcome::Sent) => {
                self.answer_by = Some(now + ANSWER_LIMIT);
                return None;
            }
            Event::Outcome(Outcome::Later) => {
                self.answer_by = None;
                return None;
            }
            Event::Outcome(outcome) => {
                self.answer_by = None;
                let action = self.pending.take()?;
                if !self.settle(action, outcome, now) {
                    return self.pending.clone();
                }
            }
            Event::Offload { patience } => self.begin_offload(patience, now),
            Event::Restore { forced } => self.begin_restore(forced, now),
            Event::Grow if self.is_idle_at(Step::Nic) => self.goal = Some(Goal::Enlarge),
            Event::CallOff(refusal) if self.goal == Some(Goal::Nic) && self.step < Step::Stolen => self.turn_around(refusal),
            // The NIC says so once. An answer of its that is awaited comes first.
            Event::Ended if self.answer_by.is_none() && self.step.custody() == Custody::Nic => self.goal = Some(Goal::End),
            Event::Forgotten if self.step == Step::Ended => *self = Move { backoff: self.backoff, ..Move::new() },
            Event::GiveUp if self.step.is_on_nic() => {
                (self.goal, self.barrier, self.answer_by) = (Some(Goal::GiveUp), None, None);
            }
            Event::NicDied => self.nic_died(),
            Event::Excused => self.answer_by = self.answer_by.map(|_| now + ANSWER_LIMIT),
            Event::NicStarted => self.pass(Barrier::Started),
            Event::FramesFlow => self.pass(Barrier::Flow),
            Event::Grow | Event::CallOff(_) | Event::Ended | Event::Forgotten | Event::GiveUp | Event::Tick => {}
        }
        if let Some(limit) = self.answer_by {
            if now < limit {
                return None;
            }
            (self.unanswered, self.answer_by) = (self.pending.take(), None);
            self.end_nic();
        } else {
            self.pending = self.choose();
        }
        self.pending.clone()
    }

    fn is_idle_at(&self, step: Step) -> bool {
        self.step == step && self.goal.is_none()
    }

    /// What was waited for has happened. A NIC's start is followed by the wait for its frames.
    fn pass(&mut self, barrier: Barrier) {
        if self.barrier == Some(barrier) {
            self.barrier = (barrier == Barrier::Started).then_some(Barrier::Flow);
        }
    }

    fn begin_offload(&mut self, patience: u64, now: u64) {
        if self.is_idle_at(Step::Kernel) {
            self.begin(Goal::Nic);
            self.patience = patience;
            if self.backoff.is_on(now) {
                self.turn_around(Refusal::Busy);
            }
        }
    }

    fn begin_restore(&mut self, forced: bool, now: u64) {
        if self.is_idle_at(Step::Nic) {
            self.begin(Goal::Check);
        } else if self.step == Step::Leaving && self.goal == Some(Goal::Grow) {
            // The program is kept out already.
            self.goal = Some(Goal::Check);
            self.deadline = now + QUIESCE_LIMIT;
        } else {
            let offloading = self.goal == Some(Goal::Nic) && self.step >= Step::Stolen;
            self.then_restore |= offloading || matches!(self.goal, Some(Goal::Grow | Goal::Stay));
        }
        self.forced |= forced;
    }

    fn begin(&mut self, goal: Goal) {
        self.goal = Some(goal);
        (self.because, self.lost) = (None, None);
        (self.asked, self.forced, self.fin_first, self.anew, self.recovering) = (false, false, false, false, false);
    }

    /// The move goes back to where it came from.
    fn turn_around(&mut self, refusal: Refusal) {
        let back = if self.step < Step::HandedOff { Goal::Kernel } else { Goal::Nic };
        (self.goal, self.because) = (Some(back), Some(refusal));
    }

    /// What the NIC had goes to the kernel; what it had not got yet stays there. What the NIC is not needed for goes
    /// on.
    fn nic_died(&mut self) {
        use Step::*;
        self.lose_answer();
        self.pass(Barrier::Dead);
        match self.step {
            // Nothing of it is left to be restored.
            _ if matches!(self.goal, Some(Goal::End | Goal::GiveUp)) => {}
            // It may be on its way back already, for another reason.
            Reserved | Mirrored | Covered | Quiescing | Quiesced if self.goal == Some(Goal::Kernel) => {}
            Reserved | Mirrored | Covered | Quiescing | Quiesced => self.turn_around(Refusal::NicGone),
            // It has come so far while calls were made elsewhere: the next NIC knows nothing of it.
            Stolen | Reading | Read | Copied | Recorded | Purged if self.goal == Some(Goal::Nic) => {
                self.turn_around(Refusal::NicGone);
            }
            HandedOff | Nic | Leaving | Left | Rested | Grown | Orphaned | Barred | Retaken | Vacated => {
                (self.step, self.goal, self.barrier) = (Orphaned, Some(Goal::Kernel), None);
                (self.because, self.lost, self.recovering, self.fin_first) = (None, None, true, false);
            }
            _ => {}
        }
    }

    /// The NIC will not answer any more. What is left of it shows whether it has done what it was asked; what only the
    /// NIC had to do is done.
    fn lose_answer(&mut self) {
        let sent = self.pending.take().filter(|_| self.answer_by.take().is_some());
        match self.unanswered.take().or(sent) {
            Some(Action::HandOff) => self.step = Step::HandedOff,
            Some(Action::Release) => self.release = Action::Replay,
            Some(action @ (Action::Cancel | Action::Replay)) => self.step = action.reaches(self.step),
            // The steps before the others lead on.
            _ => {}
        }
    }

    /// What is to be done next.
    fn choose(&mut self) -> Option<Action> {
        if self.is_stopped() {
            return None;
        }
        let goal = self.goal?;
        if self.enlarged && !matches!(goal, Goal::Enlarge | Goal::Grow) {
            return Some(Action::Shrink);
        }
        match goal {
            Goal::Nic => self.towards_nic(),
            Goal::Check => Some(Action::Check),
            Goal::Kernel => self.towards_kernel(),
            Goal::Enlarge => Some(Action::Enlarge),
            Goal::Grow | Goal::Stay if self.step == Step::Nic && !self.enlarged => Some(Action::Conclude(Conclusion::Grown)),
            Goal::Grow => Some(match self.step {
                Step::Rested => Action::Grow,
                step => step.inverse()?,
            }),
            Goal::Stay => self.towards_nic(),
            Goal::End => Some(match self.step {
                Step::Ended => Action::Conclude(Conclusion::Stays(Refusal::Ended)),
                // Its program is to see the end.
                Step::HandedOff | Step::Leaving | Step::Left => Action::LetIn(Owner::Nic),
                _ => Action::End,
            }),
            Goal::GiveUp => Some(match self.step {
                Step::Kernel => Action::Conclude(Conclusion::Stays(Refusal::Ended)),
                _ => Action::GiveUp,
            }),
        }
    }

    fn towards_nic(&mut self) -> Option<Action> {
        Some(match self.step {
            Step::Kernel => Action::Reserve,
            Step::Reserved => Action::Mirror,
            Step::Mirrored => Action::Cover,
            Step::Covered => Action::KeepOut,
            Step::Quiescing => Action::Leave,
            Step::Quiesced => Action::Steal,
            Step::Stolen => Action::Note(Phase::Reading),
            Step::Reading => Action::Export,
            Step::Read => Action::Copy,
            Step::Copied => Action::Note(Phase::Copied),
            Step::Recorded => Action::Purge,
            Step::Purged => Action::HandOff,
            Step::HandedOff | Step::Leaving | Step::Left => Action::LetIn(Owner::Nic),
            Step::Nic => Action::Conclude(match self.because.take() {
                Some(refusal) => Conclusion::Stays(refusal),
                None => Conclusion::Moved,
            }),
            // From every other step there is only the way to the kernel.
            _ => return self.towards_kernel(),
        })
    }

    fn towards_kernel(&mut self) -> Option<Action> {
        Some(match self.step {
            Step::Kernel => Action::Conclude(self.conclusion()),
            // The kernel's socket is lost, so it has nothing to send.
            Step::Purged | Step::Rested | Step::Vacated if self.lost.is_some() => self.release.clone(),
            Step::Sending if !self.fin_first => self.release.clone(),
            Step::Sending | Step::Released => {
                if self.anew {
                    Action::FinishAnew
                } else {
                    Action::Finish
                }
            }
            Step::Finished => self.release.clone(),
            step => step.inverse()?,
        })
    }

    fn conclusion(&mut self) -> Conclusion {
        let recovering = core::mem::take(&mut self.recovering);
        match (self.lost.take(), self.because.take()) {
            (Some(lost), _) => Conclusion::Lost(lost, recovering),
            (None, Some(refusal)) => Conclusion::Stays(refusal),
            (None, None) if recovering => Conclusion::Recovered,
            (None, None) => Conclusion::Moved,
        }
    }

    /// Takes an outcome in. False: what is pending is to be done, or waited for.
    fn settle(&mut self, action: Action, outcome: Outcome, now: u64) -> bool {
        match outcome {
            Outcome::Done => self.done(&action, now),
            Outcome::DoneFinAcknowledged => {
                self.fin_first = true;
                self.done(&action, now)
            }
            Outcome::NotYet => self.not_yet(&action, now),
            Outcome::Refused(refusal) => self.refused(&action, refusal),
            // Taken in before: the answer is the outcome, or what is done elsewhere.
            Outcome::Sent | Outcome::Later => false,
        }
    }

    fn done(&mut self, action: &Action, now: u64) -> bool {
        self.step = action.reaches(self.step);
        match action {
            Action::Mirror => self.since = now,
            Action::KeepOut => {
                let limit = if self.goal == Some(Goal::Grow) { GROW_LIMIT } else { QUIESCE_LIMIT };
                self.deadline = now + limit;
                if self.step == Step::Barred {
                    self.barrier = Some(Barrier::Started);
                }
            }
            Action::Acknowledge => {
                self.asked = true;
                return false;
            }
            Action::Check => self.goal = Some(Goal::Kernel),
            Action::Enlarge => (self.goal, self.enlarged) = (Some(Goal::Grow), true),
            Action::Resume | Action::Shrink => self.enlarged = false,
            Action::Import(source) => self.release = releases(*source),
            Action::EndNic => self.barrier = Some(Barrier::Dead),
            Action::Conclude(conclusion) => self.concluded(conclusion, now),
            _ => {}
        }
        true
    }

    fn concluded(&mut self, conclusion: &Conclusion, now: u64) {
        match conclusion {
            Conclusion::Moved => self.backoff.clear(),
            Conclusion::Stays(Refusal::Busy) => self.backoff.extend(now),
            _ => {}
        }
        self.goal = None;
        if core::mem::take(&mut self.then_restore) && self.step == Step::Nic {
            let forced = self.forced;
            self.begin(Goal::Check);
            self.forced = forced;
        }
    }

    fn not_yet(&mut self, action: &Action, now: u64) -> bool {
        match action {
            Action::Cover if now.saturating_sub(self.since) > self.patience => self.turn_around(Refusal::OutOfOrder),
            Action::Cover if !self.asked && now.saturating_sub(self.since) > QUIET => {
                self.pending = Some(Action::Acknowledge);
                return false;
            }
            Action::Leave if now >= self.deadline => return self.out_of_time(action, now),
            _ => return false,
        }
        true
    }

    /// The program has not left in time.
    fn out_of_time(&mut self, leave: &Action, now: u64) -> bool {
        match self.goal {
            // It cannot stay, since its NIC has died or its program has closed it. Nobody knows what a thread inside an
            // operation has done and will do: it may just get no processor, among hundreds that want one. What it adds
            // to the connection's memory later would be lost, or be in another connection's memory by then. So it is
            // waited for: it holds up nobody else, and the end of its program ends the wait.
            Some(Goal::Kernel) if self.step == Step::Retaken || self.forced => {
                return cfg!(feature = "sabotage-hurry") && self.done(leave, now);
            }
            // It is asked for again.
            Some(Goal::Grow) => self.goal = Some(Goal::Stay),
            _ => self.turn_around(Refusal::Busy),
        }
        true
    }

    fn refused(&mut self, action: &Action, refusal: Refusal) -> bool {
        match action {
            Action::Enlarge => self.goal = Some(Goal::Stay),
            // A NIC that does not answer, refuses what it must not, or writes images that nobody can read must not go
            // on.
            Action::Rest | Action::Import(Source::Rested) if refusal == Refusal::NicGone => return self.end_nic(),
            Action::Grow | Action::Resume => return self.end_nic(),
            // It may have died after it had run the connection and acknowledged data that only session memory has. Its
            // record shows that.
            Action::HandOff if refusal == Refusal::NicGone => {
                self.step = Step::HandedOff;
                return self.end_nic();
            }
            // Its program has closed it, and wants no more events: for those that have no room nobody would ever make
            // any.
            Action::Rest if self.forced && refusal == Refusal::Ended => self.goal = Some(Goal::End),
            Action::Rest if self.goal == Some(Goal::Grow) => self.goal = Some(Goal::Stay),
            Action::Rest | Action::Check => self.turn_around(refusal),
            Action::Import(source) => (self.lost, self.release) = (Some(refusal), releases(*source)),
            Action::Finish | Action::FinishAnew => {
                self.lost = Some(refusal);
                self.step = action.reaches(self.step);
            }
            Action::Release => self.release = Action::Replay,
            _ if self.goal == Some(Goal::Nic) => {
                if *action == Action::Purge {
                    // The socket may be anything: what was read goes in again.
                    self.step = Step::Purged;
                }
                self.turn_around(refusal);
            }
            // There is no way back from the way back.
            _ => self.step = action.reaches(self.step),
        }
        true
    }

    fn end_nic(&mut self) -> bool {
        self.pending = Some(Action::EndNic);
        false
    }
}

/// What gives frames to the kernel after an import.
fn releases(source: Source) -> Action {
    match source {
        Source::Rested => Action::Release,
        Source::Exported | Source::Record => Action::Replay,
    }
}
