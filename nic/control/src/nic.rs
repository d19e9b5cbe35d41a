//! The NIC process: the threads of its workers, and the first worker's service of the agent and the programs.

use crate::company::Company;
use crate::copy::{CopyEngine, Host};
use crate::heap::{self, Trimmer};
use crate::key;
use crate::line::Line;
use crate::rest::{Idle, NAP, Rest};
use crate::rules::{self, Rules};
use crate::sandbox;
use anyhow::{Context, Result};
use baton_abi::layout::{self, Counter, nic};
use baton_abi::resource::{PAGE, PAIRS};
use baton_backends::{BesideKernel, Kernel, PacketDevice, VnetDevice, Wire};
use baton_datagrams::Place;
use baton_datapath::{
    AddressSettings, CaptureSettings, DatagramSettings, DatagramWay, ListenerSettings, MessageEndpoint, Peers, Registers, Worker,
    WorkerSettings, capture as begin_capture, crossbar, end_capture, owner_of_messages,
};
use baton_linux::bell::SessionBell;
use baton_linux::control::Channel;
use baton_linux::events::{Doorbell, Poller, Trigger, monotonic_micros, monotonic_nanos};
use baton_linux::{process, settings, topology};
use baton_log::error;
use baton_protocol::address::OwnAddress;
use baton_protocol::nic as protocol;
use baton_protocol::nic::{Capture, DatagramSocket, Descriptor, Hop, Listen, NicSettings, ToAgent, ToNic};
use baton_protocol::program::Messages;
use baton_rmpp::{DataConfig, Halves, MatchConfig};
use baton_shm::{Pulse, Region};
use baton_tcp::Instant;
use baton_wire::Endpoint;
use baton_wire::frame::Link;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

type NicWorker = Worker<Host, Line>;

/// One worker and its thread's state.
struct Runner {
    worker: NicWorker,
    /// The worker's number, and whether there are others.
    me: usize,
    several: bool,
    /// Decides whether a worker without work polls, naps or sleeps.
    rest: Rest,
    memory: Arc<Region>,
    /// The worker's sign of life, once it runs.
    pulse: Option<Pulse>,
    poller: Poller,
    /// Descriptors of the devices, if this worker receives from them.
    devices: Option<[OwnedFd; 2]>,
    /// The doorbells of all workers.
    bells: Arc<Vec<Doorbell>>,
    /// The doorbells of the sessions whose rings this worker reads.
    program_bells: HashMap<u32, ProgramBell>,
    /// In the first worker: the doorbells of UDP sockets, by their numbers.
    datagram_bells: HashMap<u32, SessionBell>,
    /// Doorbells of new sessions, from the first worker.
    new_bells: Receiver<(u32, ProgramBell)>,
    /// Present if the worker was not given a processor, and may move to that of a program.
    company: Option<Company>,
    busy_nanos: u64,
    doorbell_nanos: u64,
    /// Requests walks of the heap; and the number of dormant connections at the last request, lowered when connections
    /// have woken up since.
    trimmer: Trimmer,
    trimmed_at: u64,
    /// Present if the NIC has an owner.
    rules: Option<Arc<Rules>>,
    /// Present in the first worker.
    front: Option<Front>,
}

/// The doorbells of a session.
struct ProgramBell {
    /// Wakes the program.
    program: SessionBell,
    /// Rings when the program wakes this NIC. None for the first NIC, where `program` is both.
    nic: Option<SessionBell>,
}

impl ProgramBell {
    /// The doorbell that the program rings.
    fn heard(&self) -> &SessionBell {
        self.nic.as_ref().unwrap_or(&self.program)
    }
}

/// The first worker's connections to the agent and the other workers.
struct Front {
    channel: Channel,
    agent_bell: Doorbell,
    /// Doorbell of the host's TCP, if there is one.
    host_tcp_bell: Option<Doorbell>,
    /// For each worker, the sender for the doorbells of its sessions.
    bells_to: Vec<Sender<(u32, ProgramBell)>>,
    /// Value of the agent's message count ([`nic::CHANNEL`]) when the channel was last read.
    channel_seen: u32,
    random_key: baton_rss::Key,
    /// Key of the hash by which messages are matched.
    match_key: [u64; 4],
    /// The addresses that may be the NIC's own, and the microseconds between probes for them.
    addresses: Vec<OwnAddress>,
    between_probes: u64,
}

impl Front {
    /// The settings for the worker of those addresses that the agent asks for and the NIC's settings allow.
    fn own_addresses(&self, mac: [u8; 6], asked: &[IpAddr]) -> AddressSettings {
        let allowed = self.addresses.iter().map(|own| own.address).filter(|address| asked.contains(address));
        AddressSettings {
            mac,
            addresses: allowed.collect(),
            between_probes: self.between_probes,
            // The clock makes the delays differ after each start, the key from one NIC to another.
            seed: self.match_key[3] ^ monotonic_nanos(),
        }
    }
}

/// Events that a data half keeps while the program's ring is full.
const EVENTS: u16 = 1024;
/// Number of connections that have become dormant since the last walk after which the heap is trimmed again, although
/// other connections are awake.
const MANY_DORMANT: u64 = 256;

/// Poller tokens of the worker's doorbell and of the control connection.
const BELL: u64 = 2;
const CHANNEL: u64 = 3;
/// Poller token of session 0's doorbell; the others follow.
const SESSIONS: u64 = 16;

pub(crate) fn take_number(number: i32) -> Result<OwnedFd> {
    process::inherited(number)
        .with_context(|| format!("descriptor {number} is missing: this process is started by the Baton agent, not by hand"))
}

fn take(descriptor: Descriptor) -> Result<OwnedFd> {
    take_number(descriptor as i32)
}

/// The devices of one worker.
struct Devices {
    host: Kernel,
    wire: Wire,
}

/// Makes the devices of all workers, and the card's registers if it has any.
fn devices(settings: &NicSettings) -> Result<(Vec<Devices>, Option<Registers>)> {
    let (host, wire) = (take(Descriptor::Host)?, take(Descriptor::Wire)?);
    if settings.beside {
        let plain = host.try_clone()?;
        let host = PacketDevice::new(host, false).over_ring().context("the ring of the kernel's frames")?;
        let host = Kernel::Beside(BesideKernel::new(host, take(Descriptor::Injector)?));
        let wire = PacketDevice::new(wire, settings.segmentation).over_rings(plain).context("the wire's rings")?;
        let wire = Wire::Beside(wire);
        return Ok((vec![Devices { host, wire }], None));
    }
    let device = |fd| VnetDevice::new(fd, settings.segmentation);
    let mut numbers = Descriptor::Injector as i32..;
    let mut next = || take_number(numbers.next().unwrap_or_default());
    let registers = if settings.card {
        Registers::new(Arc::new(Region::map_fixed(next()?, Registers::BYTES).context("the card's registers")?))
    } else {
        None
    };
    let mut others = Vec::new();
    for _ in 1..settings.workers {
        let (host, wire) = if settings.card {
            (device(next()?), device(next()?))
        } else {
            (device(host.try_clone()?).send_only(), device(wire.try_clone()?).send_only())
        };
        others.push(Devices { host: Kernel::Inline(host), wire: Wire::Inline(wire) });
    }
    let first = Devices { host: Kernel::Inline(device(host)), wire: Wire::Inline(device(wire)) };
    Ok(([first].into_iter().chain(others).collect(), registers))
}

/// Runs the NIC process until the agent ends.
///
/// # Errors
/// If a descriptor is missing or a system call fails.
pub fn run() -> Result<()> {
    let channel = Channel::from_fd(take(Descriptor::Channel)?);
    // Over the control connection and not as arguments, which every user can read: the lookup's key must stay secret.
    let settings = settings::receive::<NicSettings>(&channel, baton_protocol::VERSION);
    let settings = &settings.context("receiving the settings from the agent")?;
    let (devices, registers) = devices(settings)?;
    let memory = Arc::new(Region::map(take(Descriptor::Memory)?)?);
    nic::many_slots(settings.slots).for_each(|slots| memory.advise_huge(slots));
    let first_bell = Doorbell::from_fd(take(Descriptor::NicBell)?);
    let agent_bell = Doorbell::from_fd(take(Descriptor::AgentBell)?);
    // Signals that end processes are the agent's to handle; this process ends with it.
    process::signal_descriptor(&process::ENDING)?;
    process::raise_descriptor_limit();
    let owner = if settings.owned {
        let at = settings.owner_descriptors();
        let memory = Region::map(take_number(at + 1)?).context("the filter's memory")?;
        Some((Channel::from_fd(take_number(at)?), Arc::new(memory)))
    } else {
        None
    };
    // The kernel must not lengthen naps (timer slack).
    process::wake_in_time();
    // Read before the sandbox, which denies files.
    let nodes: Vec<Option<usize>> =
        (0..devices.len()).map(|worker| settings.cores.get(worker).and_then(|core| topology::node_of_cpu(*core))).collect();
    sandbox::drop_rights()?;

    let other_bells = (1..devices.len()).map(|_| Doorbell::new()).collect::<std::io::Result<Vec<_>>>()?;
    let bells: Arc<Vec<Doorbell>> = Arc::new([first_bell].into_iter().chain(other_bells).collect());
    let random_key = key::random(settings);
    let channel_seen = memory.word32(nic::CHANNEL).load(Ordering::Acquire);
    let (bells_to, new_bells): (Vec<_>, Vec<_>) = (0..devices.len()).map(|_| mpsc::channel()).unzip();
    let mut front = Some(Front {
        channel,
        agent_bell,
        host_tcp_bell: None,
        bells_to,
        channel_seen,
        random_key,
        match_key: settings.hash_key,
        addresses: settings.addresses.clone(),
        between_probes: settings.between_probes,
    });
    let mut peers: Vec<Option<Peers>> = match devices.len() {
        1 => vec![None],
        several => crossbar(several, &random_key, registers).into_iter().map(Some).collect(),
    };
    let (kernels, wires): (Vec<Kernel>, Vec<Wire>) = devices.into_iter().map(|devices| (devices.host, devices.wire)).unzip();
    let hosts = if settings.copy_engine && !settings.beside {
        let (mut engine, hosts) = CopyEngine::between(kernels, settings.segmentation, settings.spin)?;
        let core = settings.cores.get(hosts.len()).copied();
        start_thread("baton copy engine", move || engine.run(core))?;
        hosts
    } else {
        kernels.into_iter().map(|kernel| Host::Direct(kernel, 0)).collect()
    };
    if let Some(node) = nodes[0] {
        // Memory of the near node is faster; a failure is harmless.
        let _ = memory.prefer_node(node);
    }
    let rules = match owner {
        None => None,
        Some((owner, memory)) => {
            let rules = Arc::new(Rules::new(&memory, hosts.len()));
            let (shared, bells) = (rules.clone(), bells.clone());
            start_thread(FILTER_THREAD, move || rules::serve(&owner, &shared, &bells))?;
            // No frame may pass before the first rules have arrived.
            rules.wait_for_first();
            Some(rules)
        }
    };
    let (trimmer, asked) = Trimmer::new();
    start_thread(HEAP_THREAD, move || heap::trim(&asked))?;
    let mut runners = Vec::new();
    for (me, ((host, wire), new_bells)) in hosts.into_iter().zip(wires).zip(new_bells).enumerate() {
        process::prefer_memory(nodes[me]);
        let (memory, bells) = ((&memory, &trimmer), (&bells, new_bells));
        let mut runner = Runner::new(settings, me, (host, wire), peers[me].take(), memory, bells, front.take())?;
        runner.rules = rules.clone();
        runners.push(runner);
    }
    process::prefer_memory(None);
    let others = runners.split_off(1);
    for mut runner in others {
        let core = settings.cores.get(runner.me).copied();
        start_thread("baton worker", move || {
            if let Some(core) = core {
                process::pin(0, core);
            }
            runner.main_loop()
        })?;
    }
    let mut first = runners.remove(0);
    if let Some(core) = settings.cores.first() {
        process::pin(0, *core);
    }
    sandbox::restrict_system_calls()?;
    first.worker.set_rss(&settings.offloads.rss, &random_key);
    if let Some(front) = &first.front {
        let (addresses, between_probes) = (front.addresses.clone(), front.between_probes);
        front.channel.send(&ToAgent::OwnAddresses { addresses, between_probes }, &[])?;
        front.channel.send(&ToAgent::Ready, &[])?;
    }
    first.main_loop()
}

/// Names of threads that do not handle frames.
const FILTER_THREAD: &str = "baton filter";
const HEAP_THREAD: &str = "baton heap";

/// Whether a thread of a NIC's process with this name handles frames, so that programs should run near it.
pub fn handles_frames(name: &str) -> bool {
    ![FILTER_THREAD, HEAP_THREAD].contains(&name)
}

/// Starts a thread whose end ends the process.
fn start_thread(name: &'static str, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let (begins, begun) = mpsc::channel();
    let work = move || {
        let _exit = ExitOnDrop;
        let _ = begins.send(());
        if let Err(error) = work() {
            error!(
                [] "{name}: {error:#}";
                "the agent starts the next NIC; if it comes again, send what `baton report` writes"
            );
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work).with_context(|| format!("starting the thread {name:?}"))?;
    // From then on the thread has its name.
    let _ = begun.recv();
    Ok(())
}

/// Ends the process when it is dropped: a NIC without one of its threads cannot work, and the agent starts another.
struct ExitOnDrop;

impl Drop for ExitOnDrop {
    fn drop(&mut self) {
        std::process::exit(101);
    }
}

impl Runner {
    fn new(
        settings: &NicSettings,
        me: usize,
        (host, wire): (Host, Wire),
        peers: Option<Peers>,
        (memory, trimmer): (&Arc<Region>, &Trimmer),
        (bells, new_bells): (&Arc<Vec<Doorbell>>, Receiver<(u32, ProgramBell)>),
        front: Option<Front>,
    ) -> Result<Runner> {
        let poller = Poller::new()?;
        let receives = settings.card || me == 0;
        let devices = if receives { Some([host.fd().try_clone_to_owned()?, wire.fd().try_clone_to_owned()?]) } else { None };
        poller.add(bells[me].as_fd(), BELL, Trigger::Readable)?;
        if let Some(front) = &front {
            poller.add(front.channel.as_fd(), CHANNEL, Trigger::Readable)?;
        }
        let wire = Line::new(wire, &settings.link, me);
        let worker_settings = WorkerSettings {
            nic: settings.number,
            slots: settings.slots,
            hash_key: settings.hash_key,
            drop_during_moves: settings.offloads.during_moves == baton_offloads::DuringMoves::Drop,
            return_at_fin: settings.offloads.peer_fin == baton_offloads::PeerFin::Return,
            lro: baton_lro::LroSettings { hash_key: settings.hash_key, ..settings.offloads.lro },
            moderation: settings.offloads.moderation,
            doorbells: settings.offloads.doorbells,
            active_ack: settings.offloads.active_ack,
            closed: settings.owned,
            beside: settings.beside,
            limits: limits(&settings.offloads.limits),
            ..WorkerSettings::default()
        };
        let now = Instant(monotonic_micros());
        let mut worker = Worker::new(host, wire, memory.clone(), worker_settings, now);
        let several = peers.is_some();
        let processors = process::allowed_cpus().iter().max().map_or(0, |most| most + 1);
        if let Some(peers) = peers {
            worker.join(peers, now);
        }
        if front.is_some() {
            worker.review(now, 0);
        }
        Ok(Runner {
            worker,
            me,
            several,
            rest: Rest::new(settings.spin, now.0),
            memory: memory.clone(),
            pulse: None,
            poller,
            devices,
            bells: bells.clone(),
            program_bells: HashMap::new(),
            datagram_bells: HashMap::new(),
            new_bells,
            company: (!several && settings.cores.is_empty()).then(|| Company::new(processors)),
            busy_nanos: 0,
            doorbell_nanos: 0,
            trimmer: trimmer.clone(),
            trimmed_at: 0,
            rules: None,
            front,
        })
    }

    /// Polls the worker, and sleeps while there is no work. The clock is read once per round.
    fn main_loop(&mut self) -> Result<()> {
        let mut worked = false;
        let mut last = monotonic_nanos();
        self.pulse = Some(Pulse::begin(self.memory.clone(), nic::pulse(self.me), process::thread()));
        loop {
            let started = monotonic_nanos();
            if worked {
                self.busy_nanos += started - last;
            }
            last = started;
            let now = Instant(started / 1000);
            if let Some(rules) = &self.rules
                && let Some(gate) = rules.changed(self.me)
            {
                self.worker.set_gate(gate);
            }
            self.worker.wire().tick(now.0);
            worked = if self.several { self.worker.poll_with_peers(now) } else { self.worker.poll(now) };
            self.ring_doorbells(now);
            if let Some(pulse) = &mut self.pulse {
                pulse.beat();
            }
            if self.front.is_some() {
                self.worker.review(now, self.busy_nanos);
                self.serve_new_messages()?;
            }
            self.take_new_bells()?;
            if worked {
                self.rest.worked(now.0);
                self.worker.set_processor(process::current_cpu());
                self.publish_counters();
                continue;
            }
            match self.rest.idle(now.0, self.worker.frames()) {
                Idle::Poll => {}
                Idle::Nap => std::thread::sleep(Duration::from_micros(self.until_due(now).min(NAP))),
                Idle::Sleep if self.worker.prepare_sleep() => self.sleep(now)?,
                Idle::Sleep => {}
            }
        }
    }

    /// Microseconds until something is due, a second at most.
    fn until_due(&mut self, now: Instant) -> u64 {
        let next = [self.worker.next_timeout(), self.worker.wire().next_arrival()].into_iter().flatten().min();
        next.map_or(1_000_000, |at| at.saturating_sub(now.0)).min(1_000_000)
    }

    /// When many connections have become dormant, or the last one, requests that the heap pages which they used while
    /// awake go back to the system.
    fn trim_heap(&mut self) {
        let (dormant, others) = self.worker.dormant();
        self.trimmed_at = self.trimmed_at.min(dormant);
        if dormant - self.trimmed_at >= if others { MANY_DORMANT } else { 1 } {
            self.trimmed_at = dormant;
            self.trimmer.ask();
        }
    }

    /// Sleeps until something is due, or the worker is woken.
    fn sleep(&mut self, now: Instant) -> Result<()> {
        self.trim_heap();
        let mut tokens = Vec::new();
        let limit = Some(Duration::from_micros(self.until_due(now)));
        self.show_asleep(true);
        let waited = match &self.devices {
            Some([host, wire]) => self.poller.wait_or([host.as_fd(), wire.as_fd()], limit, &mut tokens),
            None => self.poller.wait(limit, &mut tokens),
        };
        self.show_asleep(false);
        self.worker.end_sleep();
        self.bells[self.me].clear();
        waited?;
        for token in tokens {
            match token {
                CHANNEL => self.serve_channel()?,
                SESSIONS.. => self.clear_doorbell((token - SESSIONS) as u32),
                _ => {}
            }
        }
        self.rest.worked(monotonic_micros());
        Ok(())
    }

    fn show_asleep(&self, asleep: bool) {
        self.pulse.iter().for_each(|pulse| pulse.set_asleep(asleep));
    }

    /// Rings the doorbells of the programs, the agent and the other workers that sleep and have messages.
    fn ring_doorbells(&mut self, now: Instant) {
        let (bells, nanos) = (&self.program_bells, &mut self.doorbell_nanos);
        let (company, frames, mut moves_to) = (&mut self.company, self.worker.frames(), None);
        let agent = self.worker.doorbells(now, |session, processor| {
            if let (Some(company), Some(processor)) = (company.as_mut(), processor) {
                moves_to = company.woke(processor, process::current_cpu(), frames, now.0).or(moves_to);
            }
            if let Some(bell) = bells.get(&session) {
                let started = monotonic_nanos();
                bell.program.ring();
                *nanos += monotonic_nanos() - started;
            }
        });
        if let Some(processor) = moves_to {
            // A failure is harmless.
            process::move_to(processor);
        }
        let sockets = &self.datagram_bells;
        self.worker.datagram_doorbells(|socket| sockets.get(&socket).into_iter().for_each(SessionBell::ring));
        if let Some(front) = self.front.as_ref().filter(|_| agent) {
            front.agent_bell.ring();
        }
        if self.worker.must_wake_host_tcp()
            && let Some(bell) = self.front.as_ref().and_then(|front| front.host_tcp_bell.as_ref())
        {
            bell.ring();
        }
        if self.several {
            let bells = &self.bells;
            self.worker.peer_doorbells(|worker| bells[worker].ring());
        }
    }

    /// Clears a session's doorbell. The messages are in the session's ring.
    fn clear_doorbell(&mut self, session: u32) {
        if let Some(bell) = self.program_bells.get(&session) {
            bell.heard().clear();
        }
    }

    /// Adds the doorbells of new sessions to those that wake this worker.
    fn take_new_bells(&mut self) -> Result<()> {
        while let Ok((session, bell)) = self.new_bells.try_recv() {
            self.poller.add(bell.heard().as_fd(), SESSIONS + u64::from(session), Trigger::Readable)?;
            if let Some(last) = self.program_bells.insert(session, bell) {
                let _ = self.poller.remove(last.heard().as_fd());
            }
        }
        Ok(())
    }

    /// Copies the counters of this thread (not the datapath's) to NIC memory.
    fn publish_counters(&mut self) {
        let words = self.memory.words(nic::counters(self.me), baton_abi::layout::COUNTERS);
        words[Counter::BusyNanoseconds as usize].store(self.busy_nanos, Ordering::Relaxed);
        words[Counter::DoorbellNanoseconds as usize].store(self.doorbell_nanos, Ordering::Relaxed);
        let host = self.worker.host();
        let ([nanos, syns_first], failed) = (host.write_statistics(), host.failed());
        words[Counter::InterruptNanoseconds as usize].store(nanos, Ordering::Relaxed);
        words[Counter::SynPrioritized as usize].store(syns_first, Ordering::Relaxed);
        self.worker.count_lost(failed);
        let [out, back] = self.worker.wire().counters();
        words[Counter::LinkLost as usize].store(out.lost + back.lost, Ordering::Relaxed);
        words[Counter::LinkOverflowed as usize].store(out.overflowed + back.overflowed, Ordering::Relaxed);
    }

    /// Serves the control connection if the agent has sent a message.
    fn serve_new_messages(&mut self) -> Result<()> {
        let sent = self.memory.word32(nic::CHANNEL).load(Ordering::Acquire);
        match &mut self.front {
            Some(front) if front.channel_seen != sent => {
                front.channel_seen = sent;
                self.serve_channel()
            }
            _ => Ok(()),
        }
    }

    /// Serves all messages on the control connection. Ends the process when the agent has closed it.
    fn serve_channel(&mut self) -> Result<()> {
        let Some(front) = &mut self.front else { return Ok(()) };
        loop {
            match front.channel.try_receive::<ToNic>() {
                Ok((ToNic::Attach { session, messages }, descriptors)) => {
                    let reader = messages.as_ref().map_or(0, |_| owner_of_messages(session, front.bells_to.len()));
                    let attached = session_memory(&front.bells_to[reader], session, descriptors);
                    let attached =
                        attached.and_then(|memory| attach(&mut self.worker, session, memory, messages, front.match_key));
                    let answer = match attached {
                        Ok(()) => ToAgent::Attached,
                        Err(error) => ToAgent::Failed(format!("{error:#}")),
                    };
                    front.channel.send(&answer, &[])?;
                }
                Ok((ToNic::Reach { session, host, hop }, _)) => {
                    let way = hop.as_ref().map(link);
                    let answer = match self.worker.reach(session, Endpoint::from(SocketAddr::new(host, 0)).address, way) {
                        true => ToAgent::Reached,
                        false => ToAgent::Failed("the session sends to too many hosts".into()),
                    };
                    front.channel.send(&answer, &[])?;
                }
                Ok((ToNic::Listen(listen), _)) => {
                    self.worker.listen(listener(&listen));
                    front.channel.send(&ToAgent::Listening, &[])?;
                }
                Ok((ToNic::StopListening(id), _)) => {
                    self.worker.stop_listening(id);
                    front.channel.send(&ToAgent::Listening, &[])?;
                }
                Ok((ToNic::HostTcp, descriptors)) => {
                    let answer = match <[OwnedFd; 2]>::try_from(descriptors) {
                        Ok([memory, bell]) => {
                            self.worker.set_host_tcp(Arc::new(Region::map(memory)?));
                            front.host_tcp_bell = Some(Doorbell::from_fd(bell));
                            ToAgent::Attached
                        }
                        Err(_) => ToAgent::Failed("a host's TCP needs two descriptors: its memory and its doorbell".into()),
                    };
                    front.channel.send(&answer, &[])?;
                }
                Ok((ToNic::FastPath(session), _)) => {
                    let answer = match self.worker.keep_fast_path(session) {
                        true => ToAgent::Attached,
                        false => ToAgent::Failed("there is no host's TCP, or no such session".into()),
                    };
                    front.channel.send(&answer, &[])?;
                }
                Ok((ToNic::Detach(_), _)) => {}
                Ok((ToNic::Datagrams(socket), descriptors)) => {
                    let id = socket.id;
                    let added = self.worker.add_datagrams(datagram_settings(&socket));
                    if let Some(bell) = descriptors.into_iter().next().filter(|_| added) {
                        self.datagram_bells.insert(id, SessionBell::from_fd(bell));
                    }
                    front.channel.send(&done(added, "the socket's rings are not in its session's memory"), &[])?;
                }
                Ok((ToNic::DatagramWay { id, host, way }, _)) => {
                    let host = Endpoint::from(SocketAddr::new(host, 0)).address;
                    let set = self.worker.set_datagram_way(id, host, way.as_ref().map(datagram_way));
                    front.channel.send(&done(set, "the socket sends to too many hosts"), &[])?;
                }
                Ok((ToNic::EndDatagrams { id, replay }, _)) => {
                    self.worker.end_datagrams(id, replay);
                    self.datagram_bells.remove(&id);
                    front.channel.send(&ToAgent::Served, &[])?;
                }
                Ok((ToNic::Addresses { mac, addresses }, _)) => {
                    self.worker.set_addresses(&front.own_addresses(mac, &addresses), Instant(monotonic_micros()));
                    front.channel.send(&ToAgent::Set, &[])?;
                }
                Ok((ToNic::Start, _)) => self.worker.start(Instant(monotonic_micros())),
                Ok((ToNic::Offloads(set), _)) => {
                    self.worker.set_offloads(&worker_offloads(&set), Instant(monotonic_micros()));
                    self.worker.set_rss(&set.rss, &front.random_key);
                    front.channel.send(&ToAgent::Set, &[])?;
                }
                Ok((ToNic::Capture(wanted), descriptors)) => {
                    let answer = capture(&mut self.worker, &wanted, descriptors);
                    front.channel.send(&answer, &[])?;
                }
                Ok((ToNic::EndCapture(id), _)) => end_capture(&mut self.worker, id),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(_) => std::process::exit(0),
            }
        }
    }
}

/// The part of the offloads that each worker gets.
fn worker_offloads(set: &baton_offloads::Offloads) -> baton_datapath::WorkerOffloads {
    baton_datapath::WorkerOffloads {
        lro: set.lro,
        moderation: set.moderation,
        doorbells: set.doorbells,
        active_ack: set.active_ack,
        limits: limits(&set.limits),
        drop_during_moves: set.during_moves == baton_offloads::DuringMoves::Drop,
        return_at_fin: set.peer_fin == baton_offloads::PeerFin::Return,
    }
}

const _: () = assert!(baton_offloads::MOST_PAIRS == baton_offloads::MOST_CONNECTIONS * PAIRS as u64);

/// The NIC's limits in the form of the datapath.
fn limits(set: &baton_offloads::Limits) -> baton_datapath::Limits {
    baton_datapath::Limits {
        connections: set.connections.unwrap_or(u32::MAX),
        pages: set.memory.map_or(u32::MAX, |bytes| u32::try_from(bytes / u64::from(PAGE)).unwrap_or(u32::MAX)),
        pairs: set.pairs.unwrap_or(u32::MAX),
        processor: set.processor.map_or(100, u32::from),
    }
}

/// A listener's settings in the form of the datapath.
fn listener(listen: &Listen) -> ListenerSettings {
    ListenerSettings {
        id: listen.id,
        endpoints: listen.addresses.iter().map(|address| Endpoint::from(*address)).collect(),
        receive_limit: listen.receive_limit,
        mtu: listen.mtu,
        ttl: listen.ttl,
    }
}

fn done(is_done: bool, otherwise: &str) -> ToAgent {
    if is_done { ToAgent::Served } else { ToAgent::Failed(otherwise.into()) }
}

/// Begins a capture of frames.
fn capture(worker: &mut NicWorker, wanted: &Capture, descriptors: Vec<OwnedFd>) -> ToAgent {
    let &Capture { id, bytes, kernel } = wanted;
    let Some(memory) = descriptors.into_iter().next() else { return ToAgent::Failed("a capture needs its memory".into()) };
    match Region::map(memory) {
        Ok(memory) => {
            memory.exclude_from_dumps(0);
            done(begin_capture(worker, CaptureSettings { id, bytes, kernel }, &Arc::new(memory)), "too many captures")
        }
        Err(error) => ToAgent::Failed(format!("mapping a capture's memory: {error}")),
    }
}

/// A UDP socket's settings in the form of the datapath.
fn datagram_settings(socket: &DatagramSocket) -> DatagramSettings {
    let rings = socket.rings;
    DatagramSettings {
        id: socket.id,
        session: socket.session,
        place: Place { base: rings.base, receive: rings.receive, send: rings.send },
        limit: socket.limit,
        endpoints: socket.addresses.iter().map(|address| Endpoint::from(*address)).collect(),
        peer: socket.peer.map(Endpoint::from),
        host: socket.host,
    }
}

fn datagram_way(way: &protocol::DatagramWay) -> DatagramWay {
    let source = Endpoint::from(SocketAddr::new(way.source, 0)).address;
    DatagramWay { source, link: link(&way.hop), mtu: way.mtu }
}

/// The header that frames for a host get.
fn link(hop: &Hop) -> Link {
    Link { source: hop.source, destination: hop.destination, ttl: hop.ttl, tos: 0, flow_label: 0, interface: hop.interface }
}

/// Gives a session to the worker: one for connections, or for messages.
fn attach(
    worker: &mut NicWorker,
    session: u32,
    memory: Arc<Region>,
    messages: Option<(Messages, u32)>,
    hash_key: [u64; 4],
) -> Result<()> {
    let Some((settings, starts)) = messages else {
        worker.attach(session, memory);
        return Ok(());
    };
    settings.check(layout::session::HEAP as u64, memory.len() as u64).map_err(anyhow::Error::msg)?;
    let data = DataConfig {
        halves: Halves { receiving: settings.receiving, sending: settings.sending },
        address: settings.address.into(),
        endpoint: settings.endpoint,
        peers: settings.peers,
        incoming: settings.incoming,
        outgoing: settings.outgoing,
        buffers: settings.buffers,
        buffer_count: settings.buffer_count,
        buffer_size: settings.buffer_size,
        packet: settings.packet,
        events: EVENTS,
        matching: (settings.posted > 0).then_some(MatchConfig {
            posted: settings.posted,
            unexpected: settings.unexpected,
            receives: settings.receives,
            hash_key,
        }),
        streams: None,
    };
    worker.attach_messages(session, memory, MessageEndpoint { data, starts });
    Ok(())
}

/// Maps a session's memory, and sends its doorbells to the worker that reads its ring.
fn session_memory(reader: &Sender<(u32, ProgramBell)>, session: u32, descriptors: Vec<OwnedFd>) -> Result<Arc<Region>> {
    let mut descriptors = descriptors.into_iter();
    let (Some(memory), Some(program)) = (descriptors.next(), descriptors.next()) else {
        anyhow::bail!("a session needs its memory and its doorbell");
    };
    let memory = Arc::new(Region::map(memory)?);
    memory.exclude_from_dumps(layout::session::HEAP);
    let bell = ProgramBell { program: SessionBell::from_fd(program), nic: descriptors.next().map(SessionBell::from_fd) };
    reader.send((session, bell)).context("the worker has ended")?;
    Ok(memory)
}
