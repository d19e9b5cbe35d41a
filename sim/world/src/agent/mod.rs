//! The agent: one thing after another, as the real one. Each step is one action of a move, one message or one request,
//! and takes some time, in which kernel, NIC, programs and network go on.

mod connection;
mod link;
mod perform;
mod watch;

use crate::block::Block;
use crate::heap::Heap;
use crate::journal::Memory;
use crate::keeper::{Keeper, Kept, Until};
use crate::machine::Machine;
use crate::trace::{Happening, Trace};
use baton_abi::layout::{Owner, session};
use baton_abi::{Cid, Message};
use baton_core::{
    ATTEMPTS, Adopted, LATER, LOOK, Next, Notice, Recovery, Settle, Stage, Timers, Unasked, UnderWay, follow, settle, unasked,
};
use baton_moves::{ANSWER_LIMIT, Action, Arrived, Barrier, Conclusion, Event, Move, Outcome, Refusal};
use baton_recovery::{read_image, unpublish};
use baton_ring::Consumer;
use baton_shm::RingWords;
use baton_sim::Rng;
use connection::{Connection, Wish};
use link::NicLink;
use perform::Performer;
use std::collections::{BTreeMap, VecDeque};
use watch::Watch;

/// Microseconds of mirroring that the copy may take.
const PATIENCE: u64 = 500_000;
/// Longest time that a step of the agent takes, microseconds.
const MOST_STEP: u64 = 40;
/// Longest time for which an agent does nothing, microseconds.
const INATTENTION: u64 = 30_000;
/// Of a million deaths of NICs those that count as their own fault.
const BY_ITSELF: u32 = 100_000;
/// Time in which a NIC starts, microseconds.
const NIC_START: u64 = 3_000;

/// What a program asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request {
    Register(Kept),
    Offload,
    Restore,
    Forget,
    /// It is to be in the kernel, and to stay there: another process is about to have it, too.
    GiveBack,
    /// It may be offloaded again, once no other process has it.
    Allow,
}

/// What a program is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Registered,
    /// The connection is the program's alone. True: there is none any more.
    Forgotten {
        lost: bool,
    },
    /// The connection is in the kernel, or is not. None: it has ended.
    GivenBack(Option<bool>),
    Allowed,
}

/// Something to be done after what is being done.
enum Task {
    /// Passes an event to one connection.
    Drive(u32, Event),
    /// The same, if the connection is on the NIC or on its way there.
    DriveMoved(u32, Event),
    /// Makes a step of the recovery from the NIC's death.
    Recover(Recovery),
    /// The last of a takeover: programs get at what is in the kernel, and are notified that they have to repeat their
    /// requests.
    Announce,
}

/// The agent.
pub(crate) struct Agent {
    connections: BTreeMap<u32, Connection>,
    nic: NicLink,
    heaps: Vec<Heap>,
    /// Memory of connections that have ended on the NIC, whose programs have not read all.
    ended: BTreeMap<u32, Memory>,
    /// The next action of the move that is worked on.
    chain: Option<(u32, Action)>,
    tasks: VecDeque<Task>,
    /// Moves that wait for something.
    under_way: UnderWay<u32>,
    /// When connections that have to leave the NIC are restored again.
    retries: Timers<u32>,
    requests: VecDeque<(u32, Request)>,
    /// Requests are served: the takeover is over.
    announced: bool,
    pub answers: Vec<(u32, Answer)>,
    due: u64,
    watch: Watch,
    rng: Rng,
    /// Actions performed so far, by the agents before, too; and after which of them a move was concluded.
    pub actions: u64,
    pub concluded: Vec<u64>,
    /// Moves concluded by this agent.
    pub moves: u64,
    /// Connections that the kernel refused although everything had been checked.
    pub lost: Vec<String>,
}

impl Agent {
    /// Starts an agent, which takes over what the keeper and the journal hold.
    pub fn start(machine: &mut Machine, keeper: &Keeper, seed: u64, trace: &mut Trace) -> Agent {
        trace.note(machine.now.0, machine.number, &Happening::Life("an agent starts"));
        let card = machine.card();
        let heaps = card.sessions.iter().map(|session| Heap::new(session.len())).collect();
        let mut agent = Agent {
            connections: BTreeMap::new(),
            nic: NicLink::new(&card.memory, &card.journal),
            heaps,
            ended: BTreeMap::new(),
            chain: None,
            tasks: VecDeque::new(),
            under_way: UnderWay::default(),
            retries: Timers::default(),
            requests: VecDeque::new(),
            announced: false,
            answers: Vec::new(),
            due: machine.now.0,
            watch: Watch::new(machine.now.0),
            rng: Rng::new(seed),
            actions: 0,
            concluded: Vec::new(),
            moves: 0,
            lost: Vec::new(),
        };
        for (number, kept) in keeper.kept() {
            agent.add(machine, *number, kept);
        }
        agent.adopt(machine);
        agent
    }

    fn add(&mut self, machine: &mut Machine, number: u32, kept: &Kept) {
        let memory = machine.card().sessions[kept.session as usize].clone();
        self.connections.insert(number, Connection::new(number, kept, Block { memory, number }));
    }

    /// Takes moves that were under way from the journal. The NIC has died with the last agent.
    fn adopt(&mut self, machine: &mut Machine) {
        self.tasks.push_back(Task::Recover(Recovery::StartNic));
        let entries: Vec<_> = machine.card().journal.entries.values().cloned().collect();
        let noted: Vec<u32> = entries.iter().map(|entry| entry.cid.slot()).collect();
        for slot in (0..crate::nic::SLOTS as u32).filter(|slot| !noted.contains(slot)) {
            // A record that is there is of an earlier occupant.
            unpublish(&machine.card().memory, slot);
        }
        for entry in entries {
            let image = read_image(&machine.card().memory, entry.cid).ok();
            let Some(connection) = self.connections.get_mut(&entry.connection) else { continue };
            let finished = image.is_some_and(|image| image.state.fin_acknowledged());
            let adopted = Adopted::at(entry.phase, finished);
            (connection.machine, connection.cid) = (adopted.machine, Some(entry.cid));
            self.nic.withhold(entry.cid);
            if let Some(on_nic) = entry.on_nic.filter(|_| adopted.keeps_memory) {
                let heap = &mut self.heaps[connection.session as usize];
                heap.reserve(on_nic.memory.receive);
                heap.reserve(on_nic.memory.send);
                connection.on_nic = Some(on_nic);
            }
            if adopted.at_once {
                connection.image = image;
                self.tasks.push_back(Task::Drive(entry.connection, Event::Tick));
            }
        }
        self.keep_what_has_ended(machine);
        self.schedule_recovery();
        self.tasks.push_back(Task::Announce);
    }

    /// Connections that are the NIC's by their block, and have no entry in the journal, have ended there.
    fn keep_what_has_ended(&mut self, machine: &mut Machine) {
        use baton_abi::layout::block;
        for connection in self.connections.values_mut() {
            if connection.block.owner() != Owner::Nic || connection.stage() != Stage::Kernel {
                continue;
            }
            let word = |field| connection.block.load(field);
            let memory = Memory {
                receive: (word(block::RECEIVE_BASE), word(block::RECEIVE_SIZE)),
                send: (word(block::SEND_BASE), word(block::SEND_SIZE)),
            };
            let heap = &mut self.heaps[connection.session as usize];
            heap.reserve(memory.receive);
            heap.reserve(memory.send);
            self.ended.insert(connection.number, memory);
            connection.machine = Move::ended();
            machine.kernel.end(connection.descriptor);
        }
    }

    /// The steps of a recovery from the NIC's death.
    fn schedule_recovery(&mut self) {
        self.tasks.extend(Recovery::STEPS.map(Task::Recover));
    }

    /// Whether the next task is to wait until the NIC has answered, and it has not.
    fn is_held(&self) -> bool {
        let waits = matches!(self.tasks.front(), Some(Task::Recover(Recovery::AwaitAnswers)));
        waits && self.connections.values().any(|connection| connection.machine.answer_due().is_some())
    }

    /// Queues a request of a program's.
    pub fn request(&mut self, number: u32, request: Request) {
        self.requests.push_back((number, request));
    }

    /// Whether a connection is on the NIC, or was and is being restored.
    pub fn is_on_nic(&self, number: u32) -> bool {
        self.connections.get(&number).is_some_and(|connection| connection.stage() == Stage::Nic)
    }

    /// The cids of all connections that have one.
    pub fn cids(&self) -> Vec<Cid> {
        self.connections.values().filter_map(|connection| connection.cid).collect()
    }

    /// A connection that is wanted on the NIC and stays in the kernel: no move takes it there, and no try is to come.
    pub fn neglected(&self) -> Option<u32> {
        let stays =
            |one: &&Connection| one.stage() == Stage::Kernel && !one.retry.is_planned() && one.wish.is_none() && one.wanted;
        let rests = self.chain.is_none() && self.tasks.is_empty();
        self.connections.values().find(stays).filter(|_| rests).map(|one| one.number)
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        let settled = |connection: &Connection| connection.machine.goal().is_none();
        self.chain.is_none() && self.tasks.is_empty() && self.requests.is_empty() && self.connections.values().all(settled)
    }

    /// Slots, memory and connections that are still taken.
    pub fn taken(&self) -> (usize, bool, usize) {
        let memory = self.heaps.iter().any(|heap| !heap.is_empty());
        (crate::nic::SLOTS - self.nic.free_slots(), memory, self.connections.len())
    }

    /// When the agent has something to do next, microseconds.
    pub fn next_due(&self, machine: &Machine) -> u64 {
        let waits = self.is_held();
        let busy = self.chain.is_some() || !waits && !self.tasks.is_empty() || !machine.has_nic();
        if busy || self.nic.has_message() || self.announced && !waits && !self.requests.is_empty() {
            return self.due.max(machine.now.0);
        }
        let soon = self.due.max(machine.now.0);
        let retries = self.retries.due().map(|at| at.max(soon));
        let wishes = |connection: &Connection| connection.wish.is_some() && connection.machine.answer_due().is_none();
        let wishes = self.connections.values().any(wishes).then_some(soon);
        // One that waits for the NIC's answer has nothing to do before that is late.
        let due = |number: u32| {
            let machine = &self.connections.get(&number)?.machine;
            machine.waits().then(|| machine.answer_due().unwrap_or(soon))
        };
        let moves = self.under_way.soon().filter_map(due).chain(self.under_way.due().map(|due| due.max(soon)));
        retries.into_iter().chain(wishes).chain(moves).chain(self.watch.due(machine)).min().unwrap_or(u64::MAX)
    }

    /// Does the next step, if its time has come.
    pub fn run(&mut self, machine: &mut Machine, keeper: &mut Keeper, trace: &mut Trace) {
        let now = machine.now.0;
        if self.next_due(machine) > now {
            return;
        }
        self.due = now + 1 + self.rng.below(MOST_STEP);
        if let Some((number, action)) = self.chain.take() {
            return self.perform(number, &action, machine, trace);
        }
        let waits = self.is_held() && machine.has_nic();
        if let Some(task) = if waits { None } else { self.tasks.pop_front() } {
            return self.do_task(task, machine, trace);
        }
        if !machine.has_nic() {
            return self.schedule_recovery();
        }
        if self.sees_hang(machine) {
            return self.schedule_recovery();
        }
        self.nic.receive();
        match self.nic.inbox.pop() {
            Some(Arrived::Answer(cid, answer)) => return self.answered(cid, answer, machine, trace),
            Some(Arrived::Event(message)) => return self.on_message(&message, machine),
            None if waits => return self.tick_late(machine),
            None => {}
        }
        if let Some((number, request)) = self.requests.pop_front() {
            return self.serve(number, request, machine, keeper);
        }
        self.look(now);
        self.settle_requests(machine, keeper, trace);
    }

    /// Lets a move go on to which the NIC has not answered in time.
    fn tick_late(&mut self, machine: &mut Machine) {
        let now = machine.now.0;
        let late = |connection: &&Connection| connection.machine.answer_due().is_some_and(|due| due <= now);
        if let Some(number) = self.connections.values().find(late).map(|connection| connection.number) {
            self.drive(number, self.tick(now), machine);
        }
    }

    /// Lets the moves that wait go on, and restores what must return.
    fn look(&mut self, now: u64) {
        let tick = self.tick(now);
        self.under_way.begin_round(now);
        while let Some(number) = self.under_way.take() {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            if connection.machine.answer_due().is_some_and(|due| due > now) {
                self.under_way.add(number, false, now);
            } else {
                connection.under_way = false;
                self.tasks.push_back(Task::Drive(number, tick.clone()));
            }
        }
        while let Some((at, number)) = self.retries.take(now) {
            self.try_again(number, at, now);
        }
        self.due = self.due.max(now + LOOK);
    }

    /// Makes the try that was planned for this time, unless it was replaced by another one.
    fn try_again(&mut self, number: u32, at: u64, now: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if !connection.retry.take(at) {
            return;
        }
        let put_off = connection.machine.put_off_for(now);
        if put_off > 0 {
            return self.look_again(number, put_off.min(LATER), now);
        }
        match unasked(&connection.standing(now), false) {
            Some(Unasked::Restore) => self.tasks.push_back(Task::Drive(number, Event::Restore { forced: false })),
            // Its program is about to get the event that it is in the kernel.
            Some(Unasked::Offload) if connection.wish.is_some() => {}
            Some(Unasked::Offload) => match self.watch.decides.keeps_away(0, number.into(), now) {
                Some(wait) => self.look_again(number, wait, now),
                None => self.tasks.push_back(Task::Drive(number, Event::Offload { patience: PATIENCE })),
            },
            None => {}
        }
    }

    /// Has a connection looked at again after this many microseconds, or earlier if that is planned already.
    fn look_again(&mut self, number: u32, after: u64, now: u64) {
        if self.connections.get_mut(&number).is_some_and(|connection| connection.retry.plan(now + after)) {
            self.retries.add(now + after, number);
        }
    }

    fn do_task(&mut self, task: Task, machine: &mut Machine, trace: &mut Trace) {
        match task {
            Task::Drive(number, event) => self.drive(number, event, machine),
            Task::DriveMoved(number, event) => {
                if self.connections.get(&number).is_some_and(Connection::is_moved) {
                    self.drive(number, event, machine);
                }
            }
            Task::Recover(step) => self.recover(step, machine, trace),
            Task::Announce => self.announce(),
        }
    }

    fn recover(&mut self, step: Recovery, machine: &mut Machine, trace: &mut Trace) {
        if let Some(event) = step.event() {
            for number in self.connections.keys().rev() {
                self.tasks.push_front(Task::DriveMoved(*number, event.clone()));
            }
        }
        match step {
            Recovery::EndNic => {
                self.note_death(machine.now.0);
                machine.kill_nic(trace);
                self.nic.inbox.nic_died();
            }
            Recovery::StartNic => {
                machine.start_nic(trace);
                self.watch.started();
                self.nic.restarted();
                self.due += self.rng.below(NIC_START);
            }
            Recovery::ForgetCommands => {
                let sessions = &machine.card().sessions;
                sessions.iter().for_each(|memory| Consumer::<RingWords>::new(memory.ring(session::COMMANDS)).skip_all());
            }
            Recovery::DropStaleFrames => {
                let ours = self.connections.values().map(|connection| connection.flow).collect();
                machine.drop_stale_frames(&ours);
            }
            Recovery::LetFramesFlow => {
                let now = machine.now;
                if let Some(nic) = &mut machine.card().nic {
                    nic.let_frames_flow(now);
                }
            }
            // There is nothing to wait for any more, or it was said above.
            Recovery::AwaitAnswers | Recovery::TellDeath | Recovery::TellStart | Recovery::TellFlow => {}
        }
    }

    /// Notes the NIC's death, of which nobody knows why, unless it hung. A connection of which it dies stays in the
    /// kernel until somebody asks for it.
    fn note_death(&mut self, now: u64) {
        let had = self.connections.values().filter(|one| one.is_moved()).map(|one| u64::from(one.number));
        let guilty = self.watch.decides.died(0, now, self.rng.chance(BY_ITSELF), had);
        let guilty = self.connections.values_mut().find(|one| guilty == Some(u64::from(one.number)));
        guilty.into_iter().for_each(|one| one.wanted = false);
    }

    fn announce(&mut self) {
        for connection in self.connections.values_mut() {
            if connection.stage() == Stage::Kernel && connection.block.owner() != Owner::Kernel {
                connection.moves += 1;
                connection.block.store(baton_abi::layout::block::MOVES, connection.moves);
                connection.block.set_owner(Owner::Kernel);
            }
        }
        self.announced = true;
    }

    /// Whether programs are served.
    pub fn is_announced(&self) -> bool {
        self.announced
    }

    fn drive(&mut self, number: u32, event: Event, machine: &mut Machine) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let late = connection.machine.answer_due().is_some_and(|due| due <= machine.now.0);
        if late && machine.has_nic() && !machine.nic_has_been_halted() {
            let awaited = connection.machine.awaits();
            machine.failure = Some(format!("the NIC of host {} does not answer {awaited:?}", machine.number));
        }
        if late && event != Event::Excused && self.watch.has_run_since(connection.asked, machine.now.0) < ANSWER_LIMIT {
            let wrong = "is to be ended since it has not answered, but its agent was stopped, too";
            machine.failure = Some(format!("the NIC of host {} {wrong}", machine.number));
        }
        let next = connection.machine.on(event, machine.now.0);
        self.follow(number, next, machine.now.0);
    }

    /// Notes the next action of a move, or that it waits; or, if the NIC must not go on, recovers.
    fn follow(&mut self, number: u32, next: Option<Action>, now: u64) {
        if let Some(action) = next {
            self.chain = Some((number, action));
            return;
        }
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if let Some(step) = connection.machine.rests_at() {
            // As the agent does: of a machine at rest only the step is kept.
            connection.machine = Move::resting_at(step);
        }
        if connection.machine.waits() && !std::mem::replace(&mut connection.under_way, true) {
            self.under_way.add(number, connection.machine.is_held_up(now), now);
        }
        if connection.machine.barrier() == Some(Barrier::Dead) {
            let later = std::mem::take(&mut self.tasks);
            self.schedule_recovery();
            self.tasks.extend(later);
        }
    }

    fn perform(&mut self, number: u32, action: &Action, machine: &mut Machine, trace: &mut Trace) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        trace.explain(machine.now.0, machine.number, || format!("agent: connection {number}: {action:?}"));
        self.actions += 1;
        let outcome = Performer { agent: self, connection: &mut connection, machine, trace }.perform(action);
        self.take_outcome(connection, action, outcome, machine, trace);
    }

    /// Passes the NIC's answer to the connection whose move has asked.
    fn answered(&mut self, cid: Cid, answer: Result<(), Refusal>, machine: &mut Machine, trace: &mut Trace) {
        let of_slot = |connection: &&Connection| connection.cid.is_some_and(|its| its.slot() == cid.slot());
        let Some(number) = self.connections.values().find(of_slot).map(|connection| connection.number) else { return };
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let Some(action) = connection.machine.awaits().cloned() else {
            self.connections.insert(number, connection);
            return;
        };
        let outcome = Performer { agent: self, connection: &mut connection, machine, trace }.answered(&action, answer);
        self.take_outcome(connection, &action, outcome, machine, trace);
    }

    fn take_outcome(
        &mut self,
        mut connection: Connection,
        action: &Action,
        outcome: Outcome,
        machine: &Machine,
        trace: &mut Trace,
    ) {
        let number = connection.number;
        let before = connection.machine.step();
        if outcome == Outcome::Sent {
            connection.asked = self.watch.asked(machine.now.0);
        }
        let next = connection.machine.on(Event::Outcome(outcome), machine.now.0);
        let step = connection.machine.step();
        if step != before {
            trace.note(machine.now.0, machine.number, &Happening::Reached { connection: number, step });
        }
        self.connections.insert(number, connection);
        if let Action::Conclude(conclusion) = action {
            self.conclude(number, conclusion, machine.now.0);
        }
        self.follow(number, next, machine.now.0);
    }

    fn conclude(&mut self, number: u32, conclusion: &Conclusion, now: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        self.concluded.push(self.actions);
        let next = follow(conclusion, &connection.standing(now));
        (connection.exported, connection.image) = (None, None);
        match conclusion {
            Conclusion::Moved | Conclusion::Recovered => self.moves += 1,
            Conclusion::Lost(refusal, _) => {
                connection.lost = true;
                self.lost.push(format!("{}: {refusal}", connection.flow.local));
            }
            Conclusion::Stays(Refusal::Busy) => connection.wish = connection.wish.map(|(wish, _)| (wish, ATTEMPTS)),
            // After each growth the memory loses what nobody needs, as the pages of an idle connection do.
            Conclusion::Grown if connection.wants.take().is_some() => self.tasks.push_back(Task::Drive(number, Event::Grow)),
            // Somebody has to ask for it again.
            Conclusion::Stays(refusal) if refusal.is_for_good() || *refusal == Refusal::Full => connection.wanted = false,
            Conclusion::Stays(_) | Conclusion::Grown => {}
        }
        connection.must_return &= !matches!(next, Next::Returned(_));
        let wait = if next == Next::WhenLet { self.watch.decides.keeps_away(0, number.into(), now) } else { None };
        if let Some(after) = next.after(&mut connection.retry, wait) {
            self.look_again(number, after, now);
        }
    }

    /// Handles a message that the NIC sent by itself.
    fn on_message(&mut self, message: &Message, machine: &mut Machine) {
        let of = |connection: &&mut Connection| connection.cid == Some(message.cid);
        let Some(connection) = self.connections.values_mut().find(of) else { return };
        let number = connection.number;
        match Notice::of(message) {
            Some(Notice::Leaves { for_good, .. }) if connection.stage() == Stage::Nic => {
                connection.must_return = true;
                connection.wanted &= !for_good;
                self.drive(number, Event::Restore { forced: false }, machine);
            }
            Some(Notice::Ended) => self.drive(number, Event::Ended, machine),
            Some(Notice::Larger(receive, send)) => {
                connection.wants = Some((receive, send));
                self.drive(number, Event::Grow, machine);
            }
            _ => {}
        }
    }

    fn serve(&mut self, number: u32, request: Request, machine: &mut Machine, keeper: &mut Keeper) {
        match request {
            Request::Register(kept) => {
                if !self.connections.contains_key(&number) {
                    keeper.registered(number, kept, machine.now.0);
                    self.add(machine, number, &kept);
                    if let Some(connection) = self.connections.get_mut(&number) {
                        connection.block.set_owner(Owner::Kernel);
                    }
                }
                self.answers.push((number, Answer::Registered));
            }
            Request::Offload => {
                let Some(connection) = self.connections.get_mut(&number) else { return };
                if connection.until != Until::Never && !connection.machine.is_leaving() {
                    connection.wanted = true;
                    self.drive(number, Event::Offload { patience: PATIENCE }, machine);
                }
            }
            Request::Restore => {
                self.connections.get_mut(&number).into_iter().for_each(|connection| connection.wanted = false);
                self.drive(number, Event::Restore { forced: false }, machine);
            }
            Request::Forget => match self.connections.get_mut(&number) {
                Some(connection) => connection.wish = Some((Wish::Forget, 0)),
                // It was removed by an earlier request whose answer was lost.
                None => self.answers.push((number, Answer::Forgotten { lost: false })),
            },
            Request::GiveBack => match self.connections.get_mut(&number) {
                Some(connection) => connection.wish = Some((Wish::GiveBack, 0)),
                None => self.answers.push((number, Answer::GivenBack(None))),
            },
            Request::Allow => {
                self.set_until(number, Until::Alone, machine, keeper);
                self.look_again(number, LATER, machine.now.0);
                self.answers.push((number, Answer::Allowed));
            }
        }
    }

    /// Sets when a connection may be offloaded, for this agent and the next. It is, as soon as it may.
    fn set_until(&mut self, number: u32, until: Until, machine: &Machine, keeper: &mut Keeper) {
        if let Some(connection) = self.connections.get_mut(&number) {
            (connection.until, connection.wanted) = (until, until == Until::Alone);
            keeper.registered(number, connection.kept(), machine.now.0);
        }
    }

    /// Restores the connections for which their programs wait.
    fn settle_requests(&mut self, machine: &mut Machine, keeper: &mut Keeper, trace: &mut Trace) {
        for number in self.connections.keys().copied().collect::<Vec<_>>() {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            let (Some((wish, attempts)), stage) = (connection.wish, connection.stage()) else { continue };
            if stage == Stage::Nic && connection.machine.goal().is_some() {
                // The end of its move comes first.
                continue;
            }
            match settle(Some(stage), false, wish == Wish::Forget, attempts) {
                Settle::Operate => self.operate(number, wish, stage, machine, keeper, trace),
                Settle::GiveUpUnread => {
                    self.forget_what_ended(number, machine);
                    self.forgotten(number, machine, keeper, trace);
                }
                Settle::Wait => {}
                Settle::CallOff => self.tasks.push_back(Task::Drive(number, Event::CallOff(Refusal::CalledOff))),
                Settle::Restore { forced } => {
                    connection.wish = Some((wish, attempts + 1));
                    self.tasks.push_back(Task::Drive(number, Event::Restore { forced }));
                }
            }
        }
    }

    /// Does what a program wants of a connection that is in the kernel, has ended, or could not be restored.
    fn operate(&mut self, number: u32, wish: Wish, stage: Stage, machine: &mut Machine, keeper: &mut Keeper, trace: &mut Trace) {
        match (wish, stage) {
            (Wish::Forget, Stage::Nic) => self.tasks.push_back(Task::Drive(number, Event::GiveUp)),
            (Wish::Forget, _) => self.forgotten(number, machine, keeper, trace),
            (Wish::GiveBack, Stage::Nic) => self.answer_wish(number, Answer::GivenBack(Some(false))),
            (Wish::GiveBack, Stage::Ended) => self.answer_wish(number, Answer::GivenBack(None)),
            (Wish::GiveBack, _) => {
                self.set_until(number, Until::Never, machine, keeper);
                let lost = self.connections.get(&number).is_some_and(|connection| connection.lost);
                self.answer_wish(number, Answer::GivenBack((!lost).then_some(true)));
            }
        }
    }

    fn answer_wish(&mut self, number: u32, answer: Answer) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.wish = None;
        }
        self.answers.push((number, answer));
    }

    fn forget_what_ended(&mut self, number: u32, machine: &Machine) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.machine.on(Event::Forgotten, machine.now.0);
        let heap = &mut self.heaps[connection.session as usize];
        if let Some(memory) = self.ended.remove(&number) {
            heap.give(memory.receive);
            heap.give(memory.send);
        }
    }

    fn forgotten(&mut self, number: u32, machine: &Machine, keeper: &mut Keeper, trace: &mut Trace) {
        if let Some(connection) = self.connections.remove(&number) {
            trace.note(machine.now.0, machine.number, &Happening::Program { connection: number, did: "is forgotten", amount: 0 });
            keeper.forgotten(number, machine.now.0);
            connection.block.set_owner(Owner::Nobody);
            self.answers.push((number, Answer::Forgotten { lost: connection.lost }));
        }
    }

    /// Makes the NIC's ring to the agent full: the NIC refuses a burst of commands, and the agent does not look for a
    /// while.
    pub fn flood(&mut self, machine: &mut Machine, trace: &mut Trace) {
        self.nic.flood();
        machine.run_nic(trace);
        self.due = self.due.max(machine.now.0 + self.rng.below(INATTENTION));
    }
}
