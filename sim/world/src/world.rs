//! The world: hosts, network, programs, a clock that jumps to the next thing that happens, and what must hold of all of
//! it.

use crate::agent::{Agent, Request};
use crate::client::{Client, View};
use crate::exhaustive::Crash;
use crate::fault::{Fault, Halt, Scope};
use crate::keeper::Keeper;
use crate::machine::Machine;
use crate::network::Network;
use crate::program::{Hosted, Program};
use crate::scenario::{Offloads, Placed, SESSIONS, Scenario, address, host_of};
use crate::stop::{Remedy, Stop};
use crate::trace::{Happening, Trace};
use crate::watch::{About, Watch};
use baton_abi::Cid;
use baton_abi::layout::{COUNTERS, Counter, Owner, block, nic, session};
use baton_abi::resource::PAIRS;
use baton_sim::{Impairments, Rng};
use baton_tcp::Instant;
use baton_wire::TcpFrame;
use std::sync::atomic::Ordering;

/// Time after the last fault within which everything must have finished, microseconds: the longest retransmission
/// time-out is two minutes.
const PATIENCE: u64 = 600_000_000;
/// Time in which a keeper starts an agent, microseconds.
const AGENT_START: u64 = 20_000;
/// Microseconds that a NIC which is stopped with its agent goes on after it.
const LAG: u64 = 50_000;
/// Instants at the same time after which the world counts as stuck.
const MOST_INSTANTS: u32 = 100_000;

/// A host with its processes.
struct Host {
    machine: Machine,
    agent: Option<Agent>,
    keeper: Keeper,
    stop: Stop,
    clients: Vec<Client>,
    /// Number of agents so far, and when the next one starts.
    generation: u32,
    start_at: u64,
    /// Number of the agent's actions after which it, or its NIC, is killed.
    agent_dies_at: Option<u64>,
    nic_dies_at: Option<u64>,
    memory_returns_at: u64,
    network_returns_at: u64,
    /// Actions of the agents before, and after which of all a move was concluded.
    actions: u64,
    concluded: Vec<u64>,
}

/// What a run has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Faults of processes, memory and network: kills, full rings, cuts and so on.
    pub faults: u64,
    /// Frames that a link lost, held back, duplicated, damaged or had no room for.
    pub link_faults: u64,
    /// Connections.
    pub connections: u64,
    /// Bytes that programs received and checked.
    pub bytes: u64,
    /// Moves that were concluded, recoveries among them.
    pub moves: u64,
    /// Actions of agents.
    pub actions: u64,
    /// Agents and NICs that died.
    pub deaths: u64,
    /// Time that was simulated until all programs had finished, microseconds.
    pub simulated: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Counts) {
        // No `..`: a new field breaks this line until it is added.
        let Counts { faults, link_faults, connections, bytes, moves, actions, deaths, simulated } = more;
        self.faults += faults;
        self.link_faults += link_faults;
        self.connections += connections;
        self.bytes += bytes;
        self.moves += moves;
        self.actions += actions;
        self.deaths += deaths;
        self.simulated += simulated;
    }
}

pub(crate) struct World {
    now: u64,
    hosts: Vec<Host>,
    network: Network,
    programs: Vec<Program>,
    /// When each program's connection is to move next.
    moves_at: Vec<u64>,
    scenario: Scenario,
    next_fault: usize,
    calm: bool,
    rng: Rng,
    watch: Watch,
    pub trace: Trace,
    pub counts: Counts,
    pub failure: Option<String>,
}

impl World {
    pub fn new(scenario: Scenario, readable: bool) -> World {
        let seed = scenario.seed;
        let mut rng = Rng::new(seed ^ 0x0f0f_5555);
        let mut trace = Trace::new(readable);
        let hosts = scenario.hosts.iter().enumerate().map(|(at, nic)| Host::new(at, *nic, &scenario, &mut rng, &mut trace));
        let mut hosts: Vec<Host> = hosts.collect();
        let program = |(at, placed): (usize, &Placed)| {
            if let crate::program::Opening::Accept(port) = placed.plan.opening {
                hosts[placed.host].machine.kernel.listen(port);
            }
            Program::new(placed.host, at as u32, placed.session, placed.plan, rng.next_u64())
        };
        let programs: Vec<Program> = scenario.programs.iter().enumerate().map(program).collect();
        let moves_at = programs.iter().map(|_| if scenario.moves_every == 0 { u64::MAX } else { rng.below(20_000) }).collect();
        World {
            now: 0,
            network: Network::new(hosts.len(), scenario.impairments, seed),
            hosts,
            counts: Counts { connections: programs.len() as u64 / 2, ..Counts::default() },
            programs,
            moves_at,
            next_fault: 0,
            calm: false,
            rng,
            watch: Watch::default(),
            trace,
            failure: None,
            scenario,
        }
    }

    /// Runs until everything has finished, or something does not hold.
    pub fn run(&mut self) {
        let limit = self.scenario.end_of_faults + PATIENCE;
        let mut instants = 0;
        while self.failure.is_none() {
            self.run_instant();
            if self.is_over() {
                self.check_end();
                break;
            }
            let next = self.next();
            if next > limit {
                self.fail(format!("it does not finish: {}", self.standing()));
            }
            instants = if next > self.now { 0 } else { instants + 1 };
            if instants > MOST_INSTANTS {
                self.fail(format!("time stands still: {}", self.standing()));
            }
            self.now = self.now.max(next);
        }
        self.count();
    }

    fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    fn standing(&self) -> String {
        let open: Vec<String> = self.programs.iter().filter(|program| !program.is_closed()).map(Program::standing).collect();
        open.join("; ")
    }

    fn count(&mut self) {
        let link = self.network.counters();
        self.counts.link_faults =
            link.lost + link.overflowed + link.reordered + link.duplicated + link.corrupted + self.network.too_big;
        self.counts.bytes = self.programs.iter().map(|program| program.received).sum();
        for host in &mut self.hosts {
            if let Some(agent) = &host.agent {
                self.counts.moves += agent.moves;
                self.counts.actions += agent.actions - host.actions;
                (host.actions, host.concluded) = (agent.actions, agent.concluded.clone());
            }
        }
    }

    /// Everything that happens now.
    fn run_instant(&mut self) {
        self.change_weather();
        while let Some((to, frame)) = self.network.receive(self.now) {
            self.hosts[to].machine.from_wire.push(frame);
        }
        for at in 0..self.hosts.len() {
            self.run_host(at);
        }
        if self.counts.simulated == 0 && self.programs.iter().all(Program::is_closed) {
            self.counts.simulated = self.now.max(1);
        }
    }

    /// When something happens next.
    fn next(&self) -> u64 {
        let faults = self.scenario.faults.get(self.next_fault).map_or(u64::MAX, |(at, _, _)| *at);
        let calm = if self.calm { u64::MAX } else { self.scenario.end_of_faults };
        let programs = self.programs.iter().map(Program::next).min().unwrap_or(u64::MAX);
        let moves = if self.calm { u64::MAX } else { self.moves_at.iter().copied().min().unwrap_or(u64::MAX) };
        let hosts = self.hosts.iter().map(Host::next).min().unwrap_or(u64::MAX);
        faults.min(calm).min(programs).min(moves).min(hosts).min(self.network.next_arrival())
    }

    /// Faults that are due; or the end of all faults.
    fn change_weather(&mut self) {
        while let Some((at, host, fault)) = self.scenario.faults.get(self.next_fault).copied()
            && at <= self.now
        {
            self.next_fault += 1;
            self.strike(host, fault);
        }
        if !self.calm && self.now >= self.scenario.end_of_faults {
            self.calm = true;
            let Impairments { rate, delay, .. } = self.scenario.impairments;
            self.network.set(Impairments { rate, delay, ..Impairments::default() }, self.scenario.seed);
            for at in 0..self.hosts.len() {
                self.network.cut(at, false);
                self.hosts[at].calm_down();
            }
            self.trace.note(self.now, 0, &Happening::Fault("no more faults"));
        }
    }

    fn strike(&mut self, at: usize, fault: Fault) {
        self.counts.faults += 1;
        self.trace.note(self.now, at, &Happening::Fault(&format!("{fault:?}")));
        let host = &mut self.hosts[at];
        host.machine.now = Instant(self.now);
        let actions = host.agent.as_ref().map_or(0, |agent| agent.actions);
        match fault {
            Fault::KillNic => host.machine.kill_nic(&mut self.trace),
            Fault::LightFuse(points) => host.machine.card().fuse.light(points),
            Fault::HaltNic(halt, time) => {
                if let Some(nic) = &mut host.machine.card().nic {
                    nic.halt(halt, self.now, self.now + time);
                }
            }
            Fault::Stop(scope, time) if host.agent.is_some() => {
                host.stop.begin(scope, self.now, time);
                if let Some(nic) = host.machine.card().nic.as_mut().filter(|_| scope != Scope::Agent) {
                    nic.halt(Halt::Stopped, self.now, self.now + time + LAG);
                }
            }
            Fault::Stop(..) => {}
            Fault::KillAgent => self.kill_agent(at),
            Fault::KillAgentAfter(more) => host.agent_dies_at = Some(actions + more),
            Fault::KillNicAfter(more) => host.nic_dies_at = Some(actions + more),
            Fault::DelayKeeper(delay) => host.keeper.delay = delay,
            Fault::FillRing => {
                if let Some(agent) = host.agent.as_mut().filter(|_| host.machine.has_nic() && !host.stop.holds(self.now)) {
                    agent.flood(&mut host.machine, &mut self.trace);
                }
            }
            Fault::ShortMemory(time) => {
                host.machine.card().memory_short = true;
                host.memory_returns_at = self.now + time;
            }
            Fault::Repeat => {
                if let Some(agent) = &host.agent {
                    let current = agent.cids();
                    host.clients.iter_mut().for_each(|client| client.repeat(&current));
                }
            }
            Fault::Scribble(words) => self.scribble(at, words),
            Fault::Cut(time) => {
                host.network_returns_at = self.now + time;
                self.network.cut(at, true);
            }
            Fault::Spread(table) => {
                if let Some(nic) = &mut host.machine.card().nic {
                    nic.spread(table);
                }
            }
            Fault::Mtu(mtu) => self.network.set_mtu(at, mtu),
        }
    }

    /// The program of the last session writes what it likes into its memory.
    fn scribble(&mut self, at: usize, words: u32) {
        let Some(client) = self.hosts[at].clients.last_mut() else { return };
        for _ in 0..words {
            let offset = self.rng.below((session::HEAP / 8) as u64) as usize * 8;
            // Its sleep flag and doorbells are its own affair, too, but the rings' indices are what hurts.
            client.memory.words(offset, 1)[0].store(self.rng.next_u64(), Ordering::Relaxed);
            client.push_words([self.rng.next_u64() & 0xff00_ffff_ffff_001f, self.rng.next_u64()]);
        }
    }

    fn kill_agent(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        host.machine.kill_nic(&mut self.trace);
        let Some(agent) = host.agent.take() else { return };
        host.stop = Stop::new();
        self.counts.moves += agent.moves;
        self.counts.actions += agent.actions - host.actions;
        (host.actions, host.concluded) = (agent.actions, agent.concluded);
        self.trace.note(self.now, at, &Happening::Life("the agent dies"));
        host.start_at = self.now.max(host.keeper.complete_at()) + 1 + self.rng.below(AGENT_START);
        (host.agent_dies_at, host.nic_dies_at) = (None, None);
    }

    fn run_host(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let had_nic = host.machine.has_nic();
        host.machine.now = Instant(self.now);
        host.keeper.run(self.now);
        host.recover_from_faults(self.now, at, &mut self.network);
        if host.agent.is_none() && host.start_at <= self.now {
            host.generation += 1;
            host.start_at = u64::MAX;
            let seed = self.rng.next_u64();
            let mut agent = Agent::start(&mut host.machine, &host.keeper, seed, &mut self.trace);
            (agent.actions, agent.concluded) = (host.actions, std::mem::take(&mut host.concluded));
            host.agent = Some(agent);
            host.stop = Stop::new();
        }
        self.watch_agent(at);
        self.run_programs(at);
        self.request_moves(at);
        let host = &mut self.hosts[at];
        if let Some(agent) = host.agent.as_mut().filter(|_| !host.stop.holds(self.now)) {
            agent.run(&mut host.machine, &mut host.keeper, &mut self.trace);
        }
        host.machine.run(&mut self.trace);
        self.kill_what_is_due(at);
        let died = had_nic && !self.hosts[at].machine.has_nic();
        self.transmit(at);
        if died {
            self.counts.deaths += 1;
            self.check_records(at);
        }
        self.check_host(at);
    }

    /// The keeper looks at the agent, and the agent goes on if it was stopped until now.
    fn watch_agent(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let since = host.stop.since(self.now);
        let remedy = host.stop.look(self.now);
        if let (Some(since), Some(agent)) = (since.filter(|_| !host.stop.holds(self.now)), &mut host.agent) {
            let resumed = matches!(remedy, Ok(Remedy::Resume));
            agent.goes_on(&mut host.machine, since, resumed);
            self.trace.note(self.now, at, &Happening::Life(if resumed { "the agent is resumed" } else { "the agent goes on" }));
        }
        match remedy {
            Ok(Remedy::End) => self.kill_agent(at),
            Ok(_) => {}
            Err(wrong) => self.fail(format!("the agent of host {at} {wrong}")),
        }
    }

    /// Kills what is to die after a number of actions.
    fn kill_what_is_due(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let Some(actions) = host.agent.as_ref().map(|agent| agent.actions) else { return };
        if host.nic_dies_at.is_some_and(|dies| actions >= dies) {
            host.nic_dies_at = None;
            host.machine.kill_nic(&mut self.trace);
        }
        if host.agent_dies_at.is_some_and(|dies| actions >= dies) {
            self.kill_agent(at);
        }
        self.crash(at, actions);
    }

    /// The crashes of an exhaustive run.
    fn crash(&mut self, at: usize, actions: u64) {
        let Some((after, crash)) = self.scenario.crashes.first().copied().filter(|_| at == 0) else { return };
        let host = &mut self.hosts[at];
        match crash {
            Crash::NicAtFrame if actions > 0 => host.machine.card().fuse.light(after as u32),
            Crash::Nic if actions >= after => host.machine.kill_nic(&mut self.trace),
            Crash::Agent if actions >= after => self.kill_agent(at),
            _ => return,
        }
        self.counts.faults += 1;
        self.scenario.crashes.remove(0);
    }

    /// After which actions of the first host's agents moves were concluded, and points that its NICs have passed.
    pub fn walked(&mut self) -> (Vec<u64>, u64) {
        let host = &mut self.hosts[0];
        (std::mem::take(&mut host.concluded), host.machine.card.as_ref().map_or(0, |card| card.fuse.passed()))
    }

    fn run_programs(&mut self, at: usize) {
        let Host { machine, agent, clients, generation, .. } = &mut self.hosts[at];
        for (number, client) in clients.iter_mut().enumerate() {
            let of = self.programs.iter_mut().filter(|program| program.host == at && program.session as usize == number);
            let mut views: Vec<&mut View> = of.filter_map(|program| program.view.as_mut()).collect();
            client.catch_up(&mut views);
        }
        for program in self.programs.iter_mut().filter(|program| program.host == at) {
            let client = clients.get_mut(program.session as usize);
            let hosted = Hosted { machine, agent: agent.as_mut(), generation: *generation, client, trace: &mut self.trace };
            if let Err(failure) = program.run(hosted) {
                self.failure.get_or_insert(failure);
            }
        }
    }

    /// Asks for moves of open connections, there and back in turn.
    fn request_moves(&mut self, at: usize) {
        for (program, due) in self.programs.iter().zip(&mut self.moves_at) {
            if program.host != at || *due > self.now || self.calm {
                continue;
            }
            *due = self.now + 1 + self.rng.below(2 * self.scenario.moves_every);
            if let Some(agent) = self.hosts[at].agent.as_mut().filter(|_| program.is_open()) {
                // The process that does not use the connection any more may have registered it, too.
                let other = program.other.as_ref().and_then(|other| other.registration).filter(|_| self.rng.chance(300_000));
                let number = other.unwrap_or(program.registration);
                let to = if agent.is_on_nic(number) { Request::Restore } else { Request::Offload };
                agent.request(number, to);
            }
        }
    }

    /// Puts the host's frames on the links, and checks them.
    fn transmit(&mut self, at: usize) {
        while let Some(frame) = self.hosts[at].machine.to_wire.pop() {
            let Ok(parsed) = TcpFrame::parse(frame.bytes(), 0) else { continue };
            self.check_segment(at, &parsed);
            let to = host_of(&parsed.flow.local.address);
            if let Some(answer) = self.network.send(at, frame, to, self.now) {
                self.hosts[at].machine.from_wire.push(answer);
            }
        }
    }

    fn check_segment(&mut self, at: usize, parsed: &TcpFrame) {
        let flow = parsed.flow.reversed();
        let sent = Happening::Sent {
            flow,
            seq: parsed.seq,
            ack: parsed.ack,
            flags: parsed.flags.0,
            window: parsed.window,
            length: parsed.payload_length as u32,
        };
        self.trace.note(self.now, at, &sent);
        let of = |program: &&Program| program.flow == Some(flow) && program.host == at;
        let program = self.programs.iter().find(of);
        let aborted = program.is_none_or(|program| self.programs[(program.number ^ 1) as usize].aborts() || program.aborts());
        let card = self.hosts[at].machine.card.as_ref();
        let block = program.and_then(|program| program.block.as_ref()).filter(|block| block.owner() == Owner::Nic);
        let on_nic = card.zip(block).map(|(card, block)| (&*card.memory, Cid(block.load(block::CID))));
        let may_reset = aborted || program.is_some_and(Program::may_reset);
        let wrong = self.watch.check(flow, parsed, &About { may_reset, on_nic });
        if let Some(wrong) = wrong {
            self.fail(format!("host {at}: {wrong}"));
        }
    }

    /// The records of a NIC that has just died.
    fn check_records(&mut self, at: usize) {
        let Some(card) = &self.hosts[at].machine.card else { return };
        let of_host = self.programs.iter().filter(|program| program.host == at);
        let wrong = of_host.filter_map(|program| {
            let (flow, block) = program.flow.zip(program.block.as_ref())?;
            let owned = block.owner() == Owner::Nic;
            owned.then(|| self.watch.check_record(flow, &card.memory, Cid(block.load(block::CID))))?
        });
        if let Some(wrong) = wrong.collect::<Vec<_>>().into_iter().next() {
            self.fail(format!("host {at}: {wrong}"));
        }
    }

    fn check_host(&mut self, at: usize) {
        let Offloads { room: [connections, _, pairs], workers, .. } = self.scenario.offloads;
        // Of several workers each counts at its own time.
        let most = if workers > 1 { u32::MAX } else { connections.min(pairs / PAIRS) };
        let host = &mut self.hosts[at];
        let lost = host.agent.as_ref().and_then(|agent| agent.lost.first().cloned());
        let card = host.machine.card.as_ref();
        let count = |of: Counter| {
            card.map_or(0, |card| card.memory.words(nic::counters(0), COUNTERS)[of as usize].load(Ordering::Relaxed))
        };
        let (exceeded, there) = (count(Counter::Exceeded), count(Counter::Connections));
        let exceeded = (exceeded > 0).then(|| format!("host {at}: its agent went beyond what the NIC had announced"));
        let crowd = (there > u64::from(most)).then(|| format!("host {at}: its NIC has {there} connections, and room for {most}"));
        let lost = lost.map(|lost| format!("host {at}: {lost}"));
        let neglected = host.agent.as_ref().and_then(Agent::neglected);
        let neglected = neglected.map(|one| format!("host {at}: connection {one} is wanted on the NIC, and not tried again"));
        let found = host.machine.failure.take().or(lost).or(exceeded).or(crowd).or(neglected);
        if let Some(found) = found {
            self.fail(found);
        }
    }

    /// Whether every program has finished, and nothing is under way any more.
    fn is_over(&self) -> bool {
        let idle = |host: &Host| {
            let agent = host.agent.as_ref();
            host.machine.card.is_none()
                || host.machine.has_nic() && agent.is_some_and(|agent| agent.is_announced() && agent.is_idle())
        };
        self.calm && self.programs.iter().all(Program::is_closed) && self.hosts.iter().all(idle)
    }

    /// What must hold at the end: all bytes have arrived, and nothing is taken that nobody uses.
    fn check_end(&mut self) {
        for at in 0..self.programs.len() {
            let (program, peer) = (&self.programs[at], &self.programs[at ^ 1]);
            if let Some(wrong) = program.check_end(peer.aborts()) {
                self.fail(wrong);
            }
        }
        for at in 0..self.hosts.len() {
            let host = &self.hosts[at];
            let (Some(agent), Some(card)) = (&host.agent, &host.machine.card) else { continue };
            let (slots, memory, connections) = agent.taken();
            let journal = card.journal.entries.len();
            if slots > 0 || memory || connections > 0 || journal > 0 {
                self.fail(format!(
                    "host {at} is left with {slots} slots, {connections} connections, {journal} entries, memory {memory}"
                ));
            }
        }
    }
}

impl Host {
    fn new(at: usize, nic: bool, scenario: &Scenario, rng: &mut Rng, trace: &mut Trace) -> Host {
        let sessions = nic.then_some(SESSIONS);
        let mut machine =
            Machine::new(at, address(at, scenario.ipv6), sessions, scenario.config, scenario.offloads, rng.next_u64());
        let clients = match &machine.card {
            Some(card) => card.sessions.iter().map(|memory| Client::new(memory.clone())).collect(),
            None => Vec::new(),
        };
        let keeper = Keeper::default();
        let agent = nic.then(|| Agent::start(&mut machine, &keeper, rng.next_u64(), trace));
        Host {
            machine,
            agent,
            keeper,
            stop: Stop::new(),
            clients,
            generation: 1,
            start_at: u64::MAX,
            agent_dies_at: None,
            nic_dies_at: None,
            memory_returns_at: u64::MAX,
            network_returns_at: u64::MAX,
            actions: 0,
            concluded: Vec::new(),
        }
    }

    fn next(&self) -> u64 {
        let now = self.machine.now.0;
        let agent = match &self.agent {
            None => self.start_at,
            Some(_) if self.stop.holds(now) => u64::MAX,
            Some(agent) => agent.next_due(&self.machine),
        };
        agent.min(self.stop.next(now)).min(self.machine.next_timeout()).min(self.memory_returns_at).min(self.network_returns_at)
    }

    /// Faults that last for a time end.
    fn recover_from_faults(&mut self, now: u64, at: usize, network: &mut Network) {
        if self.memory_returns_at <= now {
            self.memory_returns_at = u64::MAX;
            self.machine.card().memory_short = false;
        }
        if self.network_returns_at <= now {
            self.network_returns_at = u64::MAX;
            network.cut(at, false);
        }
    }

    /// No more faults: what was to come does not come.
    fn calm_down(&mut self) {
        (self.agent_dies_at, self.nic_dies_at) = (None, None);
        (self.memory_returns_at, self.network_returns_at) = (u64::MAX, u64::MAX);
        self.keeper.delay = 0;
        if let Some(card) = &mut self.machine.card {
            card.memory_short = false;
            card.fuse.put_out();
        }
    }
}
