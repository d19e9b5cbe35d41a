//! A program at one end of a connection: it sends a known stream, checks the one that it receives, sleeps, shuts down,
//! closes.

use crate::agent::{Agent, Answer, Request};
use crate::block::Block;
use crate::client::{Client, View};
use crate::fork::{Fork, Holder};
use crate::keeper::{Kept, Until};
use crate::kernel::{Descriptor, Errno};
use crate::machine::Machine;
use crate::trace::{Happening, Trace};
use baton_abi::layout::{Owner, block};
use baton_sim::{Rng, stream};
use baton_tcp::State;
use baton_wire::{Endpoint, Flow};

/// Time of the first and of the longest pause before an operation that would block is repeated, microseconds.
const FIRST_PAUSE: u64 = 100;
const LONGEST_PAUSE: u64 = 20_000;
/// Longest duration of an operation, microseconds: while its thread runs, and if the thread loses its processor to many
/// others.
const LONGEST_OPERATION: u64 = 3_000;
const LONGEST_ABSENCE: u64 = 300_000;

/// What a child's number with the agent is greater by than its parent's.
const CHILDREN: u32 = 100;

/// How a program gets its connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Opening {
    Connect(Endpoint),
    Accept(u16),
}

/// What a program does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub opening: Opening,
    /// Bytes that it sends, and bytes that it expects.
    pub sends: u64,
    pub expects: u64,
    /// Key of the stream that it sends, and of its peer's.
    pub key: u64,
    pub peer_key: u64,
    /// Most bytes of an operation.
    pub chunk: u64,
    /// Longest pause after an operation, microseconds.
    pub think: u64,
    /// Bytes sent and received after which it resets the connection.
    pub aborts_at: Option<u64>,
    pub fork: Option<Fork>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Opening,
    Registering,
    Open,
    /// It is about to fork: its connection is to be in the kernel.
    Forking,
    /// It has forked, and goes on with its connection.
    Allowing,
    Forgetting,
    Closed,
}

/// An operation that takes time: which, and at whose it was begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Send,
    Receive,
    Shutdown,
}

/// A program.
pub(crate) struct Program {
    pub host: usize,
    /// Number of its connection, in all of the world.
    pub number: u32,
    /// Number of its connection with the agent and in its session: a child has its own.
    pub registration: u32,
    pub session: u32,
    plan: Plan,
    life: Life,
    pub descriptor: Option<Descriptor>,
    pub flow: Option<Flow>,
    pub block: Option<Block>,
    pub view: Option<View>,
    pub sent: u64,
    pub received: u64,
    shut: bool,
    at_end: bool,
    aborting: bool,
    pub error: Option<Errno>,
    inside: Option<(Call, Owner)>,
    /// The request that waits for its answer, and the agent that was asked.
    asked: Option<(Request, u32)>,
    /// The fork that it has still to make.
    forks: Option<Fork>,
    /// It is the child, and has inherited its connection.
    inherits: bool,
    /// The other process that has its socket.
    pub other: Option<Holder>,
    pub wake: u64,
    pause: u64,
    rng: Rng,
}

/// What a program works with on its host.
pub(crate) struct Hosted<'a> {
    pub machine: &'a mut Machine,
    pub agent: Option<&'a mut Agent>,
    /// Number of the host's agents so far.
    pub generation: u32,
    pub client: Option<&'a mut Client>,
    pub trace: &'a mut Trace,
}

impl Hosted<'_> {
    /// Asks the agent, unless it is the one that was asked already.
    pub fn ask(&mut self, number: u32, request: Request, asked: &mut u32) {
        if let Some(agent) = &mut self.agent
            && *asked != self.generation
            && agent.is_announced()
        {
            *asked = self.generation;
            agent.request(number, request);
        }
    }

    /// Takes the agent's answer about a connection.
    pub fn take_answer(&mut self, number: u32, wanted: impl Fn(&Answer) -> bool) -> Option<Answer> {
        let answers = &mut self.agent.as_mut()?.answers;
        let at = answers.iter().position(|(other, answer)| *other == number && wanted(answer))?;
        Some(answers.remove(at).1)
    }
}

impl Program {
    pub fn new(host: usize, number: u32, session: u32, plan: Plan, seed: u64) -> Program {
        let mut rng = Rng::new(seed);
        Program {
            host,
            number,
            registration: number,
            session,
            plan,
            life: Life::Opening,
            descriptor: None,
            flow: None,
            block: None,
            view: None,
            sent: 0,
            received: 0,
            shut: false,
            at_end: false,
            aborting: false,
            error: None,
            inside: None,
            asked: None,
            forks: plan.fork,
            inherits: false,
            other: None,
            wake: rng.below(10_000),
            pause: FIRST_PAUSE,
            rng,
        }
    }

    pub fn is_closed(&self) -> bool {
        self.life == Life::Closed && self.other.is_none()
    }

    pub fn is_open(&self) -> bool {
        self.life == Life::Open
    }

    /// Whether it resets its connection at some time.
    pub fn aborts(&self) -> bool {
        self.plan.aborts_at.is_some()
    }

    /// Whether its host's kernel may answer its peer with a RST.
    pub fn may_reset(&self) -> bool {
        self.is_closed()
    }

    /// When it does something next, microseconds.
    pub fn next(&self) -> u64 {
        self.wake.min(self.other.as_ref().map_or(u64::MAX, Holder::wake))
    }

    /// Runs the program. Returns a failure that it has found.
    pub fn run(&mut self, mut hosted: Hosted<'_>) -> Result<(), String> {
        let now = hosted.machine.now.0;
        if self.other.as_mut().is_some_and(|other| other.close(&mut hosted)) {
            self.other = None;
        }
        if self.wake > now {
            return Ok(());
        }
        let session = self.session;
        self.take_answer(&mut hosted);
        if self.session != session {
            // A child, which goes on with a session of its own.
            self.wake = now + 1;
            return Ok(());
        }
        match self.life {
            Life::Opening => self.open(&mut hosted),
            Life::Registering | Life::Forgetting | Life::Forking | Life::Allowing => {
                self.repeat_request(&mut hosted);
                self.sleep(now);
            }
            Life::Open => self.operate(&mut hosted)?,
            Life::Closed => self.wake = u64::MAX,
        }
        Ok(())
    }

    fn sleep(&mut self, now: u64) {
        self.wake = now + self.pause;
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }

    fn go_on(&mut self, now: u64) {
        self.pause = FIRST_PAUSE;
        self.wake = now + 1 + self.rng.below(self.plan.think);
    }

    fn open(&mut self, hosted: &mut Hosted<'_>) {
        let machine = &mut *hosted.machine;
        let now = machine.now;
        if self.descriptor.is_none() {
            self.descriptor = match self.plan.opening {
                Opening::Connect(remote) => Some(machine.kernel.connect(remote, machine.config, now)),
                Opening::Accept(port) => machine.kernel.accept(port),
            };
        }
        let Some(descriptor) = self.descriptor else { return self.sleep(now.0) };
        let socket = machine.kernel.socket(descriptor);
        // What a child has inherited was open, whatever it is now.
        if socket.state() == State::Closed && !self.inherits {
            self.error = Some(Errno::TimedOut);
            return self.close(hosted);
        }
        if !socket.is_established() && !self.inherits {
            return self.sleep(now.0);
        }
        let flow = socket.flow();
        self.flow = Some(flow);
        self.go_on(now.0);
        match &hosted.client {
            Some(_) => {
                let until = if self.inherits { Until::Alone } else { Until::Now };
                self.register(descriptor, flow, until, hosted);
            }
            None => self.life = Life::Open,
        }
    }

    fn register(&mut self, descriptor: Descriptor, flow: Flow, until: Until, hosted: &Hosted<'_>) {
        let Some(client) = &hosted.client else { return };
        let block = Block { memory: client.memory.clone(), number: self.registration };
        self.view = Some(View::new(block.clone()));
        self.block = Some(block);
        self.life = Life::Registering;
        self.asked = Some((Request::Register(Kept { session: self.session, descriptor, flow, until }), u32::MAX));
    }

    /// Asks an agent that has not been asked yet.
    fn repeat_request(&mut self, hosted: &mut Hosted<'_>) {
        if let Some((request, asked)) = &mut self.asked {
            hosted.ask(self.registration, *request, asked);
        }
    }

    fn take_answer(&mut self, hosted: &mut Hosted<'_>) {
        let Some(answer) = hosted.take_answer(self.registration, |_| true) else { return };
        match (answer, self.life) {
            (Answer::Registered, Life::Registering) | (Answer::Allowed, Life::Allowing) => self.reopen(),
            (Answer::Forgotten { lost }, Life::Forgetting) => {
                self.asked = None;
                if lost {
                    self.error = self.error.or(Some(Errno::Reset));
                }
                self.close(hosted);
            }
            (Answer::GivenBack(Some(true)), Life::Forking) => self.fork(hosted),
            (Answer::GivenBack(Some(false)), Life::Forking) => self.asked = Some((Request::GiveBack, u32::MAX)),
            (Answer::GivenBack(None), Life::Forking) => {
                // It has ended: a child would find nothing in its socket.
                self.forks = None;
                self.reopen();
            }
            _ => {}
        }
    }

    fn reopen(&mut self) {
        (self.life, self.asked, self.pause) = (Life::Open, None, FIRST_PAUSE);
    }

    /// Begins to fork: like the library, it wants its connection in the kernel before.
    fn begin_fork(&mut self, hosted: &mut Hosted<'_>) {
        if self.block.is_none() {
            return self.fork(hosted);
        }
        self.life = Life::Forking;
        self.asked = Some((Request::GiveBack, u32::MAX));
        self.repeat_request(hosted);
        self.go_on(hosted.machine.now.0);
    }

    /// Forks, now that the kernel has the connection.
    fn fork(&mut self, hosted: &mut Hosted<'_>) {
        let (Some(descriptor), Some(fork)) = (self.descriptor, self.forks.take()) else { return };
        self.note(hosted, "forks after", self.sent + self.received);
        let until = hosted.machine.now.0 + fork.lasts;
        match (fork.heir, self.block.is_some()) {
            (Some(session), true) => {
                self.other = Some(Holder::new(descriptor, Some(self.registration), until, hosted));
                (self.registration, self.session) = (self.registration + CHILDREN, session);
                (self.life, self.asked, self.block, self.view) = (Life::Opening, None, None, None);
                // The child registers the connection in the next step, with its own session.
                self.inherits = true;
            }
            (_, registered) => {
                self.other = Some(Holder::new(descriptor, None, until, hosted));
                if registered {
                    (self.life, self.asked) = (Life::Allowing, Some((Request::Allow, u32::MAX)));
                } else {
                    self.reopen();
                }
            }
        }
    }

    fn close(&mut self, hosted: &mut Hosted<'_>) {
        if let Some(descriptor) = self.descriptor {
            hosted.machine.kernel.socket(descriptor).close(self.aborting);
        }
        self.life = Life::Closed;
        self.wake = u64::MAX;
        let did = Happening::Program { connection: self.number, did: "closes after", amount: self.received };
        hosted.trace.note(hosted.machine.now.0, self.host, &did);
    }

    /// The end of what it wants with the connection.
    fn finish(&mut self, hosted: &mut Hosted<'_>) {
        if self.block.is_some() {
            self.life = Life::Forgetting;
            self.asked = Some((Request::Forget, u32::MAX));
            self.repeat_request(hosted);
            self.go_on(hosted.machine.now.0);
        } else {
            self.close(hosted);
        }
    }

    fn operate(&mut self, hosted: &mut Hosted<'_>) -> Result<(), String> {
        let now = hosted.machine.now.0;
        if let Some((call, owner)) = self.inside.take() {
            let done = self.call(call, owner, hosted);
            self.leave();
            return done;
        }
        let past = self.plan.aborts_at.is_some_and(|at| self.sent + self.received >= at);
        if past || self.error.is_some() || self.shut && self.at_end {
            self.aborting = past;
            self.finish(hosted);
            return Ok(());
        }
        if self.forks.is_some_and(|fork| self.sent + self.received >= fork.at) {
            self.begin_fork(hosted);
            return Ok(());
        }
        let Some(call) = self.choose() else {
            self.sleep(now);
            return Ok(());
        };
        let Some(owner) = self.enter() else {
            self.sleep(now);
            return Ok(());
        };
        if self.block.is_some() && self.rng.chance(60_000) {
            // It is inside the operation for a while.
            self.inside = Some((call, owner));
            let longest = if self.rng.chance(20_000) { LONGEST_ABSENCE } else { LONGEST_OPERATION };
            self.wake = now + self.rng.below(longest);
            return Ok(());
        }
        let done = self.call(call, owner, hosted);
        self.leave();
        done
    }

    fn choose(&mut self) -> Option<Call> {
        let sends = self.sent < self.plan.sends;
        let reads = !self.at_end;
        match (sends, reads) {
            (true, true) => Some(if self.rng.chance(500_000) { Call::Send } else { Call::Receive }),
            (true, false) => Some(Call::Send),
            (false, _) if !self.shut => Some(Call::Shutdown),
            (false, true) => Some(Call::Receive),
            (false, false) => None,
        }
    }

    /// Enters an operation: who owns the connection. None while it moves.
    fn enter(&mut self) -> Option<Owner> {
        let Some(block) = &self.block else { return Some(Owner::Kernel) };
        block.store(block::BUSY, 1);
        match block.owner() {
            Owner::Moving => {
                self.leave();
                None
            }
            owner => Some(owner),
        }
    }

    fn leave(&self) {
        if let Some(block) = &self.block {
            block.store(block::BUSY, 0);
        }
    }

    fn call(&mut self, call: Call, owner: Owner, hosted: &mut Hosted<'_>) -> Result<(), String> {
        let now = hosted.machine.now.0;
        if owner == Owner::Nic
            && let Some(view) = &mut self.view
        {
            view.enter();
        }
        let done = match call {
            Call::Send => self.send(owner, hosted),
            Call::Receive => self.receive(owner, hosted)?,
            Call::Shutdown => self.shutdown(owner, hosted),
        };
        match done {
            Ok(()) => self.go_on(now),
            Err(Errno::WouldBlock) => self.sleep(now),
            Err(error) => {
                self.error = Some(error);
                self.go_on(now);
            }
        }
        Ok(())
    }

    fn send(&mut self, owner: Owner, hosted: &mut Hosted<'_>) -> Result<(), Errno> {
        let length = (1 + self.rng.below(self.plan.chunk)).min(self.plan.sends - self.sent);
        let mut bytes = vec![0; length as usize];
        stream::fill(self.plan.key, self.sent, &mut bytes);
        let sent = match (owner, &mut self.view, &mut hosted.client, self.descriptor) {
            (Owner::Nic, Some(view), Some(client), _) => client.send(view, &bytes)?,
            (_, _, _, Some(descriptor)) => hosted.machine.kernel.socket(descriptor).send(&bytes)?,
            _ => return Err(Errno::WouldBlock),
        };
        self.sent += sent as u64;
        self.note(hosted, "sends", sent as u64);
        Ok(())
    }

    /// Receives and checks bytes. The outer error is a failure of the world.
    fn receive(&mut self, owner: Owner, hosted: &mut Hosted<'_>) -> Result<Result<(), Errno>, String> {
        let mut bytes = vec![0; 1 + self.rng.below(self.plan.chunk) as usize];
        let read = match (owner, &mut self.view, &mut hosted.client, self.descriptor) {
            (Owner::Nic, Some(view), Some(client), _) => client.receive(view, &mut bytes),
            (_, _, _, Some(descriptor)) => hosted.machine.kernel.socket(descriptor).receive(&mut bytes),
            _ => return Ok(Err(Errno::WouldBlock)),
        };
        let length = match read {
            Ok(length) => length,
            Err(error) => return Ok(Err(error)),
        };
        let wrong = stream::mismatches(self.plan.peer_key, self.received, &bytes[..length]);
        if wrong > 0 {
            return Err(format!(
                "connection {}: {wrong} of {length} bytes at {} of its stream are wrong",
                self.number, self.received
            ));
        }
        self.received += length as u64;
        if self.received > self.plan.expects {
            return Err(format!("connection {}: it has received more than its peer sent", self.number));
        }
        self.at_end = length == 0;
        self.note(hosted, if length == 0 { "is at the end after" } else { "receives" }, length as u64);
        Ok(Ok(()))
    }

    fn shutdown(&mut self, owner: Owner, hosted: &mut Hosted<'_>) -> Result<(), Errno> {
        match (owner, &mut self.view, &mut hosted.client, self.descriptor) {
            (Owner::Nic, Some(view), Some(client), _) => {
                if !client.shutdown(view) {
                    return Err(Errno::WouldBlock);
                }
            }
            (_, _, _, Some(descriptor)) => hosted.machine.kernel.socket(descriptor).shutdown(),
            _ => return Err(Errno::WouldBlock),
        }
        self.shut = true;
        self.note(hosted, "shuts down after", self.sent);
        Ok(())
    }

    fn note(&self, hosted: &mut Hosted<'_>, did: &str, amount: u64) {
        let (now, connection) = (hosted.machine.now.0, self.number);
        hosted.trace.note(now, self.host, &Happening::Program { connection, did, amount });
    }

    /// What is wrong with the end of its connection. `reset`: its peer has reset it.
    pub fn check_end(&self, reset: bool) -> Option<String> {
        let whole = self.received == self.plan.expects && self.sent == self.plan.sends && self.error.is_none();
        if whole || self.aborting || reset {
            return None;
        }
        let Plan { sends, expects, .. } = self.plan;
        Some(format!(
            "connection {}: sent {} of {sends} bytes, received {} of {expects}, error {:?}",
            self.number, self.sent, self.received, self.error
        ))
    }

    /// Where it stands, for the message of a failure.
    pub fn standing(&self) -> String {
        let owner = self.block.as_ref().map(Block::owner);
        format!(
            "connection {} on host {}: {:?}, owner {owner:?}, sent {} of {}, received {} of {}, shut {}, at end {}",
            self.number,
            self.host,
            self.life,
            self.sent,
            self.plan.sends,
            self.received,
            self.plan.expects,
            self.shut,
            self.at_end
        )
    }
}
