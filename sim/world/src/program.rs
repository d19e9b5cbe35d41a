//! A program at one end of a connection: it sends a known stream, checks the one that it receives, sleeps, shuts down, closes.

use crate::agent::{Agent, Answer, Request};
use crate::block::Block;
use crate::client::{Client, View};
use crate::keeper::Kept;
use crate::kernel::{Descriptor, Errno};
use crate::machine::Machine;
use crate::trace::{Happening, Trace};
use baton_abi::layout::{Owner, block};
use baton_sim::{Rng, stream};
use baton_tcp::State;
use baton_wire::Endpoint;

/// Time of the first and of the longest pause before an operation that would block is repeated, microseconds.
const FIRST_PAUSE: u64 = 100;
const LONGEST_PAUSE: u64 = 20_000;
/// An operation that takes time takes at most this, microseconds.
const LONGEST_OPERATION: u64 = 3_000;

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
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Opening,
    Registering,
    Open,
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
    pub session: u32,
    plan: Plan,
    life: Life,
    pub descriptor: Option<Descriptor>,
    pub flow: Option<baton_wire::Flow>,
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

impl Program {
    pub fn new(host: usize, number: u32, session: u32, plan: Plan, seed: u64) -> Program {
        let mut rng = Rng::new(seed);
        Program {
            host,
            number,
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
            wake: rng.below(10_000),
            pause: FIRST_PAUSE,
            rng,
        }
    }

    pub fn is_closed(&self) -> bool {
        self.life == Life::Closed
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
        self.life == Life::Closed
    }

    /// Runs the program. Returns a failure that it has found.
    pub fn run(&mut self, mut hosted: Hosted<'_>) -> Result<(), String> {
        let now = hosted.machine.now.0;
        if self.wake > now {
            return Ok(());
        }
        self.take_answer(&mut hosted);
        match self.life {
            Life::Opening => self.open(&mut hosted),
            Life::Registering | Life::Forgetting => {
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
        if socket.state() == State::Closed {
            self.error = Some(Errno::TimedOut);
            return self.close(hosted);
        }
        if !socket.is_established() {
            return self.sleep(now.0);
        }
        let flow = socket.flow();
        self.flow = Some(flow);
        self.go_on(now.0);
        match &hosted.client {
            Some(client) => {
                let block = Block { memory: client.memory.clone(), number: self.number };
                self.view = Some(View::new(block.clone()));
                self.block = Some(block);
                self.life = Life::Registering;
                self.asked = Some((Request::Register(Kept { session: self.session, descriptor, flow }), u32::MAX));
            }
            None => self.life = Life::Open,
        }
    }

    /// Asks an agent that has not been asked yet.
    fn repeat_request(&mut self, hosted: &mut Hosted<'_>) {
        if let (Some((request, asked)), Some(agent)) = (&mut self.asked, &mut hosted.agent)
            && *asked != hosted.generation
            && agent.is_announced()
        {
            *asked = hosted.generation;
            agent.request(self.number, *request);
        }
    }

    fn take_answer(&mut self, hosted: &mut Hosted<'_>) {
        let Some(agent) = &mut hosted.agent else { return };
        let Some(at) = agent.answers.iter().position(|(number, _)| *number == self.number) else { return };
        let (_, answer) = agent.answers.remove(at);
        match (answer, self.life) {
            (Answer::Registered, Life::Registering) => {
                (self.life, self.asked, self.pause) = (Life::Open, None, FIRST_PAUSE);
            }
            (Answer::Forgotten { lost }, Life::Forgetting) => {
                self.asked = None;
                if lost {
                    self.error = self.error.or(Some(Errno::Reset));
                }
                self.close(hosted);
            }
            _ => {}
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
            self.wake = now + self.rng.below(LONGEST_OPERATION);
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
