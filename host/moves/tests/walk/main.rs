//! Walks the machine over a model of kernel, NIC, program and journal: every death after every action, every pair of
//! deaths, and random schedules of refusals, deaths, time-outs and traffic.

mod model;

use baton_abi::layout::Owner;
use baton_moves::{
    ANSWER_LIMIT, Action, Barrier, Conclusion, Custody, Death, Event, Fate, Move, Outcome, Phase, Refusal, Source, Step,
};
use model::{Slot, Socket, World};
use proptest::prelude::*;
use std::collections::VecDeque;

const PATIENCE: u64 = 500_000;
/// Microseconds between two looks.
const LOOK: u64 = 100;

/// Who dies after which action, counted from the first of all.
type Deaths = Vec<(usize, Death)>;

/// When the next NIC holds the frames of a connection whose NIC has died.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hold {
    /// Before frames flow: the agent waits for the answer.
    InTime,
    /// After that: the ring had no room for the command, or the connection's events were put off.
    NoRoom,
    /// After that: the command had not been answered.
    Unanswered,
}

impl Hold {
    const ALL: [Hold; 3] = [Hold::InTime, Hold::NoRoom, Hold::Unanswered];
}

/// One connection, its world, and what goes wrong.
struct Rig {
    world: World,
    machine: Move,
    now: u64,
    actions: usize,
    deaths: Deaths,
    /// A byte for each action: what goes wrong, and what traffic there is. None when it is used up.
    schedule: VecDeque<u8>,
    agent_died: bool,
    hold: Hold,
    /// Whether the events have come that the present NIC is there, and that frames flow at it. Each comes once for a
    /// NIC, whatever the machine waits for then.
    started: bool,
    flows: bool,
    /// The command that the NIC has not answered, and its outcome if it has been carried out already.
    sent: Option<(Action, Option<Outcome>)>,
    lost: bool,
    conclusions: Vec<Conclusion>,
    /// The step after which somebody died last, and the actions since.
    last_death: Option<(Step, Death)>,
    since_death: Vec<Action>,
}

/// What a world may refuse, and with what.
fn refusal_of(action: &Action) -> Option<Refusal> {
    Some(match action {
        Action::Reserve | Action::Check => Refusal::NoRoute,
        Action::Mirror => Refusal::Acknowledged,
        Action::Steal | Action::HandOff | Action::Rest | Action::Resume => Refusal::Refused(1),
        Action::Note(Phase::Reading | Phase::Copied) => Refusal::Filter,
        Action::Export => Refusal::Unsettled,
        Action::Copy | Action::Enlarge => Refusal::NoRoom,
        Action::Purge => Refusal::System("reconnect", "no".into()),
        _ => return None,
    })
}

impl Rig {
    fn new(deaths: &[(usize, Death)], schedule: &[u8]) -> Rig {
        Rig {
            world: World::new(),
            machine: Move::new(),
            now: 1,
            actions: 0,
            deaths: deaths.to_vec(),
            schedule: schedule.iter().copied().collect(),
            agent_died: false,
            hold: Hold::InTime,
            started: true,
            flows: true,
            sent: None,
            lost: false,
            conclusions: Vec::new(),
            last_death: None,
            since_death: Vec::new(),
        }
    }

    /// Feeds an event, and performs what comes of it until something has to be waited for or the agent dies.
    fn feed(&mut self, event: Event) {
        let mut next = self.machine.on(event, self.now);
        while let Some(action) = next {
            let fault = self.schedule.pop_front().unwrap_or(255);
            let outcome = self.perform(&action, fault);
            self.since_death.push(action.clone());
            if let Action::Conclude(conclusion) = &action {
                self.conclusions.push(conclusion.clone());
            }
            next = self.machine.on(Event::Outcome(outcome), self.now);
            self.check();
            self.world.traffic(fault % 2 == 1);
            self.check();
            self.die(fault);
            self.actions += 1;
            if self.agent_died {
                return;
            }
        }
    }

    /// Checks the world, unless the NIC is ahead of the machine.
    fn check(&self) {
        self.world.check_senders(self.machine.step());
        if !matches!(self.sent, Some((_, Some(_)))) {
            self.world.check(self.machine.step(), self.lost);
        }
    }

    /// The NIC gets a command, and carries it out at once or just before it answers.
    fn send(&mut self, action: &Action, at_once: bool) -> Outcome {
        let outcome = at_once.then(|| self.world.perform(action));
        self.sent = Some((action.clone(), outcome));
        Outcome::Sent
    }

    /// The NIC answers the command that it was sent. If it `hangs`, it does not.
    fn answer(&mut self, hangs: bool) {
        if hangs {
            self.now += ANSWER_LIMIT;
            return self.feed(Event::Tick);
        }
        let (action, outcome) = self.sent.take().expect("what is awaited has been sent");
        let outcome = outcome.unwrap_or_else(|| self.world.perform(&action));
        self.feed(Event::Outcome(outcome));
    }

    fn perform(&mut self, action: &Action, fault: u8) -> Outcome {
        match (fault, action) {
            (_, Action::StealAgain) if self.hold == Hold::NoRoom && !self.flows => return Outcome::NotYet,
            (_, Action::StealAgain) if self.hold == Hold::Unanswered => return self.send(action, false),
            (0..48, Action::Cover | Action::Acknowledge | Action::StealAgain) => return Outcome::NotYet,
            (0..48, Action::KeepOut) => self.world.inside = u32::from(fault) * 10,
            (0..24, action) => {
                if let Some(refusal) = refusal_of(action) {
                    if *action == Action::Purge {
                        self.world.socket = Socket::Shell;
                    }
                    return Outcome::Refused(refusal);
                }
            }
            // Steering follows the NIC's answer when frames are to go there, and comes first when they are to leave it.
            (72..84, Action::Steal | Action::HandOff | Action::Rest | Action::Resume | Action::StealAgain)
            | (72..84, Action::Release | Action::Replay | Action::Cancel)
                if self.world.nic_lives =>
            {
                return self.send(action, true);
            }
            (84..96, Action::Mirror | Action::Steal | Action::HandOff | Action::Rest | Action::Resume | Action::StealAgain)
                if self.world.nic_lives =>
            {
                return self.send(action, false);
            }
            _ => {}
        }
        self.world.perform(action)
    }

    fn die(&mut self, fault: u8) {
        let planned = self.deaths.iter().find(|(at, _)| *at == self.actions).map(|(_, death)| *death);
        let death = match fault {
            48..60 => Some(Death::Nic),
            60..72 => Some(Death::Agent),
            _ => planned,
        };
        let Some(death) = death else { return };
        self.sent = None;
        match death {
            Death::Nic => self.world.kill_nic(),
            Death::Agent => {
                self.world.kill_agent();
                self.agent_died = true;
            }
        }
        (self.last_death, self.since_death) = (Some((self.machine.step(), death)), Vec::new());
    }

    /// The next agent reads the journal.
    fn adopt(&mut self) {
        (self.agent_died, self.started, self.flows) = (false, false, false);
        match self.world.journal {
            Some((phase, _)) => {
                self.machine = Move::adopted(phase, self.world.fin_acknowledged && phase == Phase::Sending);
                // What the agent before has left of the owner word and of the map of flows is not known.
                (self.world.owner, self.world.custody) = (self.machine.step().owner(), self.machine.step().custody());
                if let (Phase::Reading, Socket::Live(streams)) = (phase, self.world.socket) {
                    self.world.socket = Socket::Read(streams);
                }
                if phase == Phase::Copied {
                    self.feed(Event::NicDied);
                } else {
                    self.feed(Event::Tick);
                }
            }
            None => {
                // It is in the kernel, whatever had been begun: see the last lines of a takeover.
                self.machine = Move::new();
                (self.world.owner, self.world.custody) = (Owner::Kernel, Custody::Kernel);
            }
        }
    }

    /// Everything that is under way goes on to its end.
    fn settle(&mut self) {
        for _ in 0..20_000 {
            if self.agent_died {
                self.adopt();
            } else if !self.world.nic_lives {
                self.sent = None;
                self.nic_died();
            } else if !self.started {
                self.nic_started();
            } else if !self.flows && self.frames_may_flow() {
                self.frames_flow();
            } else if self.machine.awaits().is_some() {
                self.feed(Event::Tick);
                let hangs = self.schedule.pop_front().is_some_and(|fault| fault < 40);
                self.answer(hangs);
            } else if self.machine.waits() {
                self.now += LOOK;
                self.feed(Event::Tick);
            } else {
                self.world.check(self.machine.step(), self.lost);
                self.world.check_rest(self.machine.step());
                return;
            }
        }
        panic!("the move does not end: {:?}, {:?}", self.machine, &self.world.done[self.world.done.len() - 20..]);
    }

    /// The machine learns of the NIC's death, and the next one starts, unless the agent dies.
    fn nic_died(&mut self) {
        (self.started, self.flows) = (false, false);
        self.feed(Event::NicDied);
        assert!(self.agent_died || self.machine.barrier() != Some(Barrier::Dead), "its NIC is dead");
        if !self.agent_died {
            self.world.nic_lives = true;
        }
    }

    fn nic_started(&mut self) {
        self.started = true;
        self.feed(Event::NicStarted);
    }

    fn frames_flow(&mut self) {
        self.flows = true;
        self.feed(Event::FramesFlow);
    }

    /// Whether the agent lets frames flow now. It may do so whatever the machine waits for, when other connections have
    /// their answers.
    fn frames_may_flow(&mut self) -> bool {
        let waits = self.machine.awaits().is_some() || self.machine.waits();
        let late = self.hold != Hold::InTime && self.machine.step() == Step::Barred;
        !waits || late || self.schedule.pop_front().is_some_and(|fault| fault < 128)
    }

    fn go(&mut self, event: Event) {
        self.feed(event);
        self.settle();
    }
}

const OFFLOAD: Event = Event::Offload { patience: PATIENCE };
const RESTORE: Event = Event::Restore { forced: false };

/// To the NIC, to more memory, and back; and if somebody died, all of it once more.
fn walk(deaths: &[(usize, Death)], fin_acknowledged: bool, hold: Hold) -> Rig {
    let mut rig = Rig::new(deaths, &[]);
    (rig.world.fin_acknowledged, rig.hold) = (fin_acknowledged, hold);
    loop {
        for event in [OFFLOAD, Event::Grow, RESTORE] {
            rig.go(event);
        }
        assert_eq!(rig.machine.step(), Step::Kernel);
        if rig.last_death.take().is_none() {
            return rig;
        }
    }
}

#[test]
fn a_walk_without_faults_visits_the_steps_in_order() {
    for fin_acknowledged in [false, true] {
        let rig = walk(&[], fin_acknowledged, Hold::InTime);
        assert_eq!(rig.conclusions, [Conclusion::Moved, Conclusion::Grown, Conclusion::Moved]);
        let at = |action: Action| rig.world.done.iter().position(|done| *done == action).expect("it is done");
        assert_eq!(at(Action::Finish) < at(Action::Release), fin_acknowledged);
        assert!(at(Action::Note(Phase::Copied)) < at(Action::Purge), "what cannot be undone is written down before");
        assert!(rig.world.finished);
    }
}

/// What the table of fates says of a death is what happens.
fn check_fate(rig: &Rig) {
    let Some((step, death)) = rig.last_death else { return };
    let has = |source| rig.since_death.contains(&Action::Import(source));
    let growing = step == Step::Rested && rig.since_death.contains(&Action::Grow);
    match step.fate(death) {
        Fate::Undone => assert!(!has(Source::Exported) && !has(Source::Record), "{step:?}, {death:?}: {:?}", rig.since_death),
        Fate::Recovered => assert!(has(Source::Record), "{step:?}, {death:?}: {:?}", rig.since_death),
        Fate::Continued => assert!(growing || !has(Source::Record), "{step:?}, {death:?}: {:?}", rig.since_death),
        Fate::Ended => panic!("it had not ended"),
    }
}

/// Every death after every action of an offload, a growth and a restore, and every pair of deaths, also during a
/// recovery; the next NIC holds the connection's frames in time, or late.
#[test]
fn every_death_and_every_pair_of_deaths_has_its_outcome() {
    let (mut one, mut two) = (0, 0);
    for (fin_acknowledged, hold) in [false, true].into_iter().flat_map(|fin| Hold::ALL.map(|hold| (fin, hold))) {
        for first in 0..walk(&[], fin_acknowledged, hold).actions {
            for death in [Death::Nic, Death::Agent] {
                let rig = walk(&[(first, death)], fin_acknowledged, hold);
                one += 1;
                for second in first + 1..rig.actions {
                    for other in [Death::Nic, Death::Agent] {
                        walk(&[(first, death), (second, other)], fin_acknowledged, hold);
                        two += 1;
                    }
                }
            }
        }
    }
    println!("{one} deaths and {two} pairs of deaths walked");
    assert!(one > 300 && two > 15_000, "{one} deaths, {two} pairs");
}

/// The event that frames flow comes once for each NIC, also to a connection that the NIC does not hold yet: that one
/// goes on when it is held. It says nothing of the NIC after that.
#[test]
fn a_connection_that_is_held_late_goes_on() {
    for hold in Hold::ALL {
        let mut rig = Rig::new(&[], &[]);
        rig.hold = hold;
        for _ in 0..2 {
            rig.go(OFFLOAD);
            rig.world.kill_nic();
            rig.nic_died();
            assert_eq!((rig.machine.step(), rig.machine.barrier()), (Step::Barred, Some(Barrier::Started)));
            // Of another NIC.
            rig.feed(Event::FramesFlow);
            rig.nic_started();
            let step = if hold == Hold::InTime { Step::Retaken } else { Step::Barred };
            assert_eq!((rig.machine.step(), rig.machine.barrier()), (step, Some(Barrier::Flow)), "{hold:?}");
            assert_eq!(rig.machine.waits(), hold != Hold::InTime, "{hold:?}: it is to go on by itself until it is held");
            rig.frames_flow();
            rig.settle();
            assert_eq!((rig.machine.step(), rig.machine.barrier()), (Step::Kernel, None), "{hold:?}");
        }
        let twice = [Conclusion::Moved, Conclusion::Recovered, Conclusion::Moved, Conclusion::Recovered];
        assert_eq!(rig.conclusions, twice, "{hold:?}");
    }
}

/// A NIC that dies before it answers a handoff may have acknowledged what it held.
#[test]
fn a_handoff_without_an_answer_is_recovered_from_the_record() {
    let mut rig = Rig::new(&[], &[]);
    rig.world.dies_in_handoff = true;
    rig.go(OFFLOAD);
    assert_eq!(rig.conclusions, [Conclusion::Recovered]);
    let has = |source| rig.world.done.contains(&Action::Import(source));
    assert!(has(Source::Record) && !has(Source::Exported), "{:?}", rig.world.done);
    rig.go(OFFLOAD);
    assert_eq!(rig.machine.step(), Step::Nic);
}

/// The table of fates, step by step, both ways.
#[test]
fn a_death_leads_to_its_fate() {
    let mut steps = std::collections::BTreeSet::new();
    for death in [Death::Nic, Death::Agent] {
        for at in 0..200 {
            let mut rig = Rig::new(&[(at, death)], &[]);
            for event in [OFFLOAD, RESTORE] {
                let before = rig.last_death;
                rig.go(event);
                if rig.last_death != before {
                    check_fate(&rig);
                    steps.insert(rig.last_death.expect("a death").0);
                    break;
                }
            }
        }
    }
    for step in Step::OF_A_MOVE {
        assert!(steps.contains(&step), "nobody died after {step:?}");
    }
}

#[test]
fn each_step_of_an_offload_has_an_inverse_that_leads_to_the_kernel() {
    for step in Step::ALL.iter().filter(|step| **step > Step::Kernel && **step < Step::HandedOff) {
        assert!(step.inverse().is_some(), "{step:?}");
    }
    // A refusal of any action leads back, and says why.
    for at in 0..40 {
        let mut schedule = vec![255u8; at];
        schedule.push(0);
        let mut rig = Rig::new(&[], &schedule);
        rig.go(OFFLOAD);
        match rig.machine.step() {
            Step::Kernel => assert!(matches!(rig.conclusions[..], [Conclusion::Stays(_)]), "{:?}", rig.conclusions),
            _ => assert_eq!(rig.conclusions, [Conclusion::Moved]),
        }
    }
}

#[test]
fn a_program_that_does_not_leave_is_busy_and_then_put_off() {
    let mut rig = Rig::new(&[], &[]);
    rig.feed(OFFLOAD);
    rig.settle();
    rig.world.inside = 1_000_000;
    rig.go(RESTORE);
    assert_eq!(rig.machine.step(), Step::Nic);
    assert_eq!(rig.conclusions, [Conclusion::Moved, Conclusion::Stays(Refusal::Busy)]);
    let put_off = rig.machine.put_off_for(rig.now);
    assert!(put_off > 0);
    assert_eq!([put_off - 1, put_off].map(|after| rig.machine.put_off_for(rig.now + after)), [1, 0]);
    // A close waits: the thread that is inside may still write to the connection's memory.
    rig.feed(Event::Restore { forced: true });
    assert!(!rig.machine.is_held_up(rig.now), "the program has its time");
    rig.now += 60_000_000;
    rig.feed(Event::Tick);
    assert_eq!((rig.machine.step(), rig.machine.is_held_up(rig.now)), (Step::Leaving, true));
    rig.world.inside = 0;
    rig.settle();
    assert_eq!((rig.machine.step(), rig.machine.is_held_up(rig.now)), (Step::Kernel, false));
    assert_eq!(rig.conclusions.last(), Some(&Conclusion::Moved));
    assert_eq!(rig.machine.put_off_for(rig.now), 0, "it has moved");
    rig.world.inside = 1_000_000;
    rig.go(OFFLOAD);
    assert_eq!(rig.machine.step(), Step::Kernel, "it is inside again");
    rig.world.inside = 0;
    rig.go(OFFLOAD);
    assert_eq!(rig.conclusions.last(), Some(&Conclusion::Stays(Refusal::Busy)), "it is put off");
}

#[test]
fn a_copy_that_does_not_cover_in_time_is_given_up_and_the_kernel_asked_once() {
    let mut rig = Rig::new(&[], &[]);
    rig.machine.on(OFFLOAD, rig.now);
    let mut asked = 0;
    let mut next = rig.machine.on(Event::Outcome(Outcome::Done), rig.now);
    for _ in 0..20_000 {
        next = match next {
            Some(Action::Cover) => rig.machine.on(Event::Outcome(Outcome::NotYet), rig.now),
            Some(Action::Acknowledge) => {
                asked += 1;
                rig.machine.on(Event::Outcome(Outcome::Done), rig.now)
            }
            Some(Action::Conclude(conclusion)) => {
                assert_eq!((conclusion, asked), (Conclusion::Stays(Refusal::OutOfOrder), 1));
                assert!(rig.now > PATIENCE);
                return;
            }
            Some(_) => rig.machine.on(Event::Outcome(Outcome::Done), rig.now),
            None => {
                rig.now += LOOK;
                rig.machine.on(Event::Tick, rig.now)
            }
        };
    }
    panic!("the move does not end");
}

#[test]
fn a_move_may_be_called_off_until_the_steal() {
    let mut rig = Rig::new(&[], &[]);
    rig.world.inside = 10;
    rig.feed(OFFLOAD);
    assert_eq!(rig.machine.step(), Step::Quiescing);
    rig.go(Event::CallOff(Refusal::CalledOff));
    assert_eq!((rig.machine.step(), rig.world.owner, rig.world.slot), (Step::Kernel, Owner::Kernel, Slot::Empty));
    assert_eq!(rig.conclusions, [Conclusion::Stays(Refusal::CalledOff)]);
}

/// A move back that is asked for while a growth waits for the program takes its place, and the memory is given back.
#[test]
fn a_restore_takes_the_place_of_a_growth() {
    let mut rig = Rig::new(&[], &[]);
    rig.go(OFFLOAD);
    rig.world.inside = 3;
    rig.feed(Event::Grow);
    assert_eq!((rig.machine.step(), rig.world.larger_is_taken), (Step::Leaving, true));
    rig.go(RESTORE);
    assert_eq!((rig.machine.step(), rig.world.larger_is_taken), (Step::Kernel, false));
    assert_eq!(rig.conclusions, [Conclusion::Moved, Conclusion::Moved]);
}

#[test]
fn what_ends_on_the_nic_is_the_programs_until_it_forgets_it() {
    for waiting in [false, true] {
        let mut rig = Rig::new(&[], &[]);
        rig.go(OFFLOAD);
        if waiting {
            rig.world.inside = 5;
            rig.feed(RESTORE);
        }
        rig.machine.on(Event::Ended, rig.now);
        // The streams have no holder any more: performed without the model's checks.
        let mut next = rig.machine.on(Event::Tick, rig.now);
        while let Some(action) = next {
            let outcome = rig.world.perform(&action);
            next = rig.machine.on(Event::Outcome(outcome), rig.now);
        }
        assert_eq!((rig.machine.step(), rig.world.owner, rig.world.slot_is_taken), (Step::Ended, Owner::Nic, false));
        assert_eq!(rig.world.done.last(), Some(&Action::Conclude(Conclusion::Stays(Refusal::Ended))));
        rig.machine.on(Event::NicDied, rig.now);
        assert_eq!(rig.machine.step(), Step::Ended);
        assert_eq!((rig.machine.on(Event::Forgotten, rig.now), rig.machine.step()), (None, Step::Kernel));
    }
}

/// A connection ends on the NIC while its move to the kernel finds no room for a command, or while a call is made on
/// its socket after the handoff. The NIC says so once.
#[test]
fn what_ends_while_its_move_waits_ends() {
    let (done, let_in) = (|| Event::Outcome(Outcome::Done), || Some(Action::LetIn(Owner::Nic)));
    let mut leaving = Move::resting_at(Step::Nic);
    let actions = [leaving.on(RESTORE, 0), leaving.on(done(), 0), leaving.on(done(), 0), leaving.on(done(), 0)];
    assert_eq!(actions, [Action::Check, Action::KeepOut, Action::Leave, Action::Rest].map(Some));
    assert_eq!(leaving.on(Event::Outcome(Outcome::NotYet), 0), None);
    let mut coming = Move::made(true);
    assert_eq!(coming.on(Event::Tick, 0), Some(Action::HandOff));
    assert_eq!((coming.on(Event::Outcome(Outcome::Later), 0), coming.on(done(), 0)), (None, let_in()));
    for mut machine in [leaving, coming] {
        assert_eq!((machine.on(Event::Ended, 0), machine.on(done(), 0)), (let_in(), Some(Action::End)));
        assert_eq!(machine.on(done(), 0), Some(Action::Conclude(Conclusion::Stays(Refusal::Ended))));
        assert_eq!((machine.on(done(), 0), machine.step()), (None, Step::Ended));
    }
}

/// A connection has ended on the NIC, which has no room to say so since its program does not read its events any more:
/// when that has closed it, it ends, and is not given up with a reset. A program that is there is to read its last
/// events first.
#[test]
fn what_its_program_has_closed_ends_although_the_nic_cannot_report_it() {
    for forced in [false, true] {
        let mut rig = Rig::new(&[], &[]);
        rig.go(OFFLOAD);
        let mut next = rig.machine.on(Event::Restore { forced }, rig.now);
        while let Some(action) = next {
            let outcome = match action {
                Action::Rest => Outcome::Refused(Refusal::Ended),
                // The streams have no holder any more: performed without the model's checks.
                action => rig.world.perform(&action),
            };
            next = rig.machine.on(Event::Outcome(outcome), rig.now);
        }
        let end = if forced { Step::Ended } else { Step::Nic };
        assert_eq!((rig.machine.step(), rig.world.owner, rig.world.slot_is_taken), (end, Owner::Nic, !forced));
        assert_eq!(rig.world.done.last(), Some(&Action::Conclude(Conclusion::Stays(Refusal::Ended))));
    }
}

/// The kernel refuses an import although everything had been checked: the connection is lost, and nothing is left
/// behind.
#[test]
fn a_lost_connection_leaves_nothing_behind() {
    for recovering in [false, true] {
        let mut rig = Rig::new(&[], &[]);
        rig.go(OFFLOAD);
        rig.lost = true;
        let mut event = RESTORE;
        if recovering {
            rig.world.kill_nic();
            rig.feed(Event::NicDied);
            rig.world.nic_lives = true;
            rig.feed(Event::NicStarted);
            event = Event::FramesFlow;
        }
        let mut next = rig.machine.on(event, rig.now);
        while let Some(action) = next {
            let refused = matches!(action, Action::Import(_)).then(|| Refusal::Lost("reconnect", "no".into()));
            let outcome = match refused {
                Some(refusal) => {
                    rig.world.socket = Socket::Gone;
                    Outcome::Refused(refusal)
                }
                None => rig.world.perform(&action),
            };
            next = rig.machine.on(Event::Outcome(outcome), rig.now);
        }
        let lost = Conclusion::Lost(Refusal::Lost("reconnect", "no".into()), recovering);
        assert_eq!(rig.world.done.last(), Some(&Action::Conclude(lost)));
        rig.world.check_rest(rig.machine.step());
        assert_eq!((rig.world.owner, rig.world.custody), (Owner::Kernel, Custody::Kernel));
        assert!(!rig.world.done.contains(&Action::Finish), "there is nothing that could speak");
    }
}

/// A NIC that takes its time, and carries a command out at once or just before it answers.
#[test]
fn an_answer_that_comes_late_changes_nothing() {
    for slow in [72, 84] {
        let mut rig = Rig::new(&[], &[slow; 200]);
        for (event, step) in [(OFFLOAD, Step::Nic), (Event::Grow, Step::Nic), (RESTORE, Step::Kernel)] {
            rig.go(event);
            assert_eq!(rig.machine.step(), step);
        }
        assert_eq!(rig.conclusions, [Conclusion::Moved, Conclusion::Grown, Conclusion::Moved]);
    }
}

/// A NIC that does not answer a command, whichever, has its time, and counts as dead then.
#[test]
fn a_nic_that_does_not_answer_is_ended() {
    for slow in [72, 84] {
        for at in 0..40 {
            // Until the command with this number, every one is answered.
            let mut schedule = vec![255u8; at];
            schedule.push(slow);
            let mut rig = Rig::new(&[], &schedule);
            let mut ended = false;
            for event in [OFFLOAD, Event::Grow, RESTORE] {
                rig.feed(event);
                if rig.machine.awaits().is_some() {
                    rig.now += ANSWER_LIMIT - 1;
                    rig.feed(Event::Tick);
                    assert!(rig.machine.awaits().is_some() && !ended, "it has its time");
                    rig.now += 1;
                    rig.feed(Event::Tick);
                    assert_eq!(rig.machine.barrier(), Some(Barrier::Dead));
                    ended = true;
                }
                rig.settle();
            }
            assert_eq!(rig.machine.step(), Step::Kernel);
            assert_eq!(rig.world.done.contains(&Action::EndNic), ended);
        }
    }
}

/// A move back that is asked for while the NIC has a command of a growth or of an offload follows that.
#[test]
fn a_restore_follows_what_cannot_turn_around() {
    for (event, at, awaited) in [(Event::Grow, 3, Action::Rest), (Event::Grow, 5, Action::Resume), (OFFLOAD, 11, Action::HandOff)]
    {
        let mut rig = Rig::new(&[], &[]);
        if event == Event::Grow {
            rig.go(OFFLOAD);
        }
        rig.schedule = vec![255u8; at].into_iter().chain([84]).collect();
        rig.feed(event);
        assert_eq!(rig.machine.awaits(), Some(&awaited));
        rig.go(Event::Restore { forced: true });
        assert_eq!(rig.machine.step(), Step::Kernel, "after {awaited:?}");
        assert_eq!(rig.conclusions.last(), Some(&Conclusion::Moved));
    }
}

/// Whoever calls a move off while the NIC has a command of it waits for the answer.
#[test]
fn a_move_that_is_called_off_takes_back_what_the_nic_was_asked() {
    let mut rig = Rig::new(&[], &[255, 84]);
    rig.feed(OFFLOAD);
    assert_eq!(rig.machine.awaits(), Some(&Action::Mirror));
    rig.feed(Event::CallOff(Refusal::CalledOff));
    assert_eq!((rig.machine.step(), rig.world.slot), (Step::Reserved, Slot::Empty));
    rig.settle();
    assert_eq!((rig.machine.step(), rig.world.slot), (Step::Kernel, Slot::Empty));
    assert!(rig.world.done.contains(&Action::Mirror) && rig.world.done.contains(&Action::Cancel));
    assert_eq!(rig.conclusions, [Conclusion::Stays(Refusal::CalledOff)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever goes wrong, in whatever order: no byte is lost, kernel and NIC never both send, every move ends, and
    /// nothing is left behind.
    #[test]
    fn random_schedules(
        schedule in prop::collection::vec(any::<u8>(), 0..300),
        events in prop::collection::vec(0u8..5, 1..12),
        fin_acknowledged: bool,
    ) {
        let mut rig = Rig::new(&[], &schedule);
        rig.world.fin_acknowledged = fin_acknowledged;
        for event in events {
            let event = match event {
                0 | 1 => OFFLOAD,
                2 => RESTORE,
                3 => Event::Restore { forced: true },
                _ => Event::Grow,
            };
            // Not all of it is waited for.
            rig.feed(event.clone());
            if event != Event::Grow || rig.agent_died || !rig.world.nic_lives {
                rig.settle();
            }
        }
        rig.settle();
        rig.schedule.clear();
        rig.world.inside = 0;
        rig.now += 60_000_000;
        rig.go(Event::Restore { forced: true });
        prop_assert_eq!(rig.machine.step(), Step::Kernel);
        rig.go(OFFLOAD);
        prop_assert_eq!(rig.machine.step(), Step::Nic);
    }
}

/// A world whose actions take time.
struct Slow {
    world: World,
    now: std::cell::Cell<u64>,
    steps: Vec<Step>,
}

impl baton_moves::World for Slow {
    fn perform(&mut self, action: &Action) -> Outcome {
        self.now.set(self.now.get() + 15_000);
        self.world.perform(action)
    }

    fn answered(&mut self, action: &Action, _: Result<(), Refusal>) -> Outcome {
        panic!("{action:?} has not been sent");
    }

    fn now(&self) -> u64 {
        self.now.get()
    }

    fn reached(&mut self, step: Step) {
        self.steps.push(step);
    }
}

/// What comes before a program is kept out does not count against its time to leave.
#[test]
fn a_program_has_all_of_its_time_however_long_the_rest_takes() {
    let mut slow = Slow { world: World::new(), now: std::cell::Cell::new(1), steps: Vec::new() };
    slow.world.inside = 1;
    let mut machine = Move::new();
    machine.run(OFFLOAD, &mut slow);
    assert_eq!(machine.step(), Step::Quiescing);
    machine.run(Event::Tick, &mut slow);
    assert_eq!(machine.step(), Step::Nic);
    let expected: Vec<Step> = Step::ALL.iter().copied().filter(|step| *step > Step::Kernel && *step <= Step::Nic).collect();
    assert_eq!(slow.steps, expected);
}
