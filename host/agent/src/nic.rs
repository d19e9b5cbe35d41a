//! The NIC process as the agent sees it: its start, its commands, its notifications and its end.

use crate::answers::After;
use crate::connection::Memory;
use crate::ground::Shape;
use crate::host_tcp::{HostTcp, Shared};
use crate::journal;
use crate::nic_requests::{Answered, Requests};
use crate::owned::OwnedNic;
use crate::sampler::Sampler;
use crate::session::OpenSession;
use anyhow::{Context, Result, bail};
use baton_abi::layout::{RING_MESSAGES, nic, session as session_layout};
use baton_abi::resource::pages;
use baton_abi::{Announcement, Cid, Control, Message, Operation, RESET_PEER, Resource};
use baton_core::{FreeSlots, Gate, Notice};
use baton_linux::control::Channel;
use baton_linux::events::{Doorbell, monotonic_micros};
use baton_linux::{process, settings, starter};
use baton_moves::{Inbox, Refusal, Room};
use baton_offloads::Offloads;
use baton_protocol::address::OwnAddress;
use baton_protocol::nic::{NicSettings, ToAgent, ToNic};
use baton_protocol::program::Opening;
use baton_recovery::pages_of;
use baton_ring::{Consumer, Producer, must_ring};
use baton_shm::{Pulse, Region, RingWords};
use baton_supervision::Sample;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time that a NIC may take to start.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(10);

/// Why a request to a NIC that has ended fails.
pub(crate) const GONE: &str = "the NIC has died";

/// Time for which the answer to a command is looked for before its move goes on in a later round, in microseconds: a
/// NIC that has nothing else to do answers sooner.
const GLANCE: u64 = 50;

/// Commands that an action of a move sends at most.
const COMMANDS: u64 = 2;

/// Time after which commands that found the ring full are tried again.
const LATE: Duration = Duration::from_micros(100);

/// The devices and memory of one NIC, which outlive any one NIC process.
pub(crate) struct Hardware {
    pub host: OwnedFd,
    /// If the NIC has an owner, the connection to that.
    pub wire: OwnedFd,
    /// See [`baton_protocol::nic::NicSettings::card`].
    pub card: Vec<OwnedFd>,
    pub memory: Arc<Region>,
    pub nic_bell: Doorbell,
    pub agent_bell: Doorbell,
}

/// The NIC's process: a child, or the owner's.
enum Process {
    Child(Child),
    Owned(OwnedNic),
}

/// How a NIC is to drop a connection, in the address field of [`Control::Cancel`], and whether it has been asked.
struct Dropping {
    how: u32,
    asked: bool,
}

pub(crate) struct NicProcess {
    process: Process,
    sampler: Sampler,
    requests: Requests<After>,
    /// Answers to requests, with what is to be done with them.
    answered: VecDeque<(After, Answered)>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    memory: Arc<Region>,
    bell: Doorbell,
    settings: NicSettings,
    /// Addresses that are to be its own, and microseconds between two probes for them.
    own_addresses: Vec<OwnAddress>,
    between_probes: u64,
    /// Present once a session has asked for partial offload.
    host_tcp: Option<HostTcp>,
    /// Answers and notifications that have not been handled.
    pub inbox: Inbox,
    /// Connections without a move that the NIC drops. Their slots are free once it has answered.
    dropping: BTreeMap<u32, Dropping>,
    /// Commands that found the ring full and must not be lost: of each kind the last one for a connection. See
    /// [`NicProcess::post_in_time`].
    late: BTreeMap<(u32, u16), Message>,
    /// Sessions that end on the NIC, in the order in which it answers, and those that have ended there.
    detaching: VecDeque<u32>,
    detached: Vec<u32>,
    /// What it has room for, as announced.
    pub room: Room,
    /// Who may take a slot.
    pub gate: Gate,
    free: FreeSlots,
    /// The process has been ended: it gets no more commands.
    ended: bool,
}

/// All slots of a NIC as free, whatever an earlier agent had in them.
fn free_slots(memory: &Region, nic: usize, slots: u32) -> FreeSlots {
    let used = journal::slots_used(memory, slots);
    FreeSlots::new(nic, slots, (0..used).map(|slot| journal::next_name(memory, nic, slot)))
}

/// Takes a free slot. Its next cid is noted at once: the next agent would give this one away a second time if it found
/// no entry of the journal that has it.
fn take_free(free: &mut FreeSlots, memory: &Region) -> Option<Cid> {
    let used = free.used();
    let cid = free.take()?;
    if free.used() > used {
        journal::note_slots_used(memory, free.used());
    }
    journal::note_next_name(memory, cid.next_generation());
    Some(cid)
}

impl Process {
    /// Ends it, and waits until it is gone.
    fn end(&mut self) {
        match self {
            Process::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Process::Owned(nic) => nic.end(),
        }
    }
}

/// Takes the answers about listeners in their order: of each listener the last one counts, and the last NIC may have
/// left that it serves one no longer.
fn take_listening(answered: &mut VecDeque<(After, Answered)>) -> VecDeque<(After, Answered)> {
    let of_listener = |(after, _): &(After, Answered)| matches!(after, After::Listen(_) | After::StopListening(..));
    let (taken, left) = std::mem::take(answered).into_iter().partition(of_listener);
    *answered = left;
    taken
}

/// Waits until a NIC process is ready. Returns the addresses of its own, and microseconds between two probes for one.
fn await_start(channel: &Channel) -> Result<(Vec<OwnAddress>, u64)> {
    let receive = || match channel.receive_within::<ToAgent>(START_LIMIT) {
        Ok((message, _)) => Ok(message),
        Err(error) => bail!("the NIC process did not start ({error})"),
    };
    let own = match receive()? {
        ToAgent::OwnAddresses { addresses, between_probes } => (addresses, between_probes),
        other => bail!("the NIC process says {other:?} instead of its addresses"),
    };
    match receive()? {
        ToAgent::Ready => Ok(own),
        other => bail!("the NIC process says {other:?} instead of being ready"),
    }
}

/// Starts a NIC process as a child, and returns it and its control connection.
fn start_child(hardware: &Hardware, shape: &Shape, settings: &NicSettings) -> Result<(Child, Channel)> {
    let (ours, theirs) = Channel::pair()?;
    settings::send(&ours, baton_protocol::VERSION, settings)?;
    let memory_fd = hardware.memory.fd().context("NIC memory is shared memory")?;
    let mut descriptors = vec![
        hardware.host.as_fd(),
        hardware.wire.as_fd(),
        memory_fd,
        hardware.nic_bell.as_fd(),
        hardware.agent_bell.as_fd(),
        theirs.as_fd(),
    ];
    if let Shape::Beside { injector, .. } = shape {
        descriptors.push(injector.as_fd());
    }
    descriptors.extend(hardware.card.iter().map(AsFd::as_fd));
    let child = starter::start("nic-process", &descriptors, true).context("starting the NIC process")?;
    drop(theirs);
    Ok((child, ours))
}

impl NicProcess {
    /// Starts a NIC on the hardware and waits until it is ready.
    pub fn start(hardware: &Hardware, shape: &Shape, settings: &NicSettings) -> Result<NicProcess> {
        // Commands that the last NIC left unread were meant for that NIC only.
        Consumer::new(hardware.memory.ring(nic::COMMANDS)).skip_all();
        (0..nic::MAX_WORKERS).for_each(|worker| Pulse::clear(&hardware.memory, nic::pulse(worker)));
        let (process, ours) = match settings.owned {
            true => OwnedNic::start(hardware, settings).map(|(nic, ours)| (Process::Owned(nic), ours))?,
            false => start_child(hardware, shape, settings).map(|(child, ours)| (Process::Child(child), ours))?,
        };
        let mut process = process;
        let (own_addresses, between_probes) = await_start(&ours).inspect_err(|_| process.end())?;
        let slots = settings.slots as u32;
        let mut nic = NicProcess {
            process,
            sampler: Sampler::default(),
            requests: Requests::new(ours),
            answered: VecDeque::new(),
            commands: Producer::new(hardware.memory.ring(nic::COMMANDS)),
            events: Consumer::new(hardware.memory.ring(nic::EVENTS)),
            memory: hardware.memory.clone(),
            bell: hardware.nic_bell.try_clone()?,
            settings: settings.clone(),
            host_tcp: None,
            inbox: Inbox::default(),
            dropping: BTreeMap::new(),
            late: BTreeMap::new(),
            detaching: VecDeque::new(),
            detached: Vec::new(),
            room: Room::default(),
            gate: Gate::default(),
            free: free_slots(&hardware.memory, settings.number, slots),
            ended: false,
            own_addresses,
            between_probes,
        };
        // What it has room for, behind what the last NIC has left in the ring.
        nic.receive();
        Ok(nic)
    }

    /// The settings with which it runs.
    pub fn settings(&self) -> &NicSettings {
        &self.settings
    }

    /// Its number among the agent's NICs.
    pub fn number(&self) -> usize {
        self.settings.number
    }

    pub fn process(&self) -> u32 {
        match &self.process {
            Process::Child(child) => child.id(),
            Process::Owned(nic) => nic.process(),
        }
    }

    /// Takes the samples that were due at `due`, of the process, if it can be seen here, and of the host's TCP. Each
    /// with the process's number.
    pub fn samples(&mut self, due: u64) -> Vec<(u32, Sample)> {
        let visible = match &self.process {
            Process::Child(child) => Some(child.id()),
            Process::Owned(nic) => nic.visible_process(),
        };
        let places = (0..self.settings.workers).map(nic::pulse);
        let own = visible.map(|process| (process, self.sampler.look(process, &self.memory, places, due)));
        own.into_iter().chain(self.host_tcp.as_mut().map(|host_tcp| host_tcp.sample(due))).collect()
    }

    /// Lets the process and the host's TCP go on if they are stopped (SIGSTOP). An owner sees to its NIC itself.
    pub fn resume(&self) {
        let child = match &self.process {
            Process::Child(child) => Some(child.id()),
            Process::Owned(_) => None,
        };
        for process in child.into_iter().chain(self.host_tcp.as_ref().map(HostTcp::process)) {
            // It may have ended, which is noticed elsewhere.
            let _ = process::resume(process);
        }
    }

    /// The control connection: readable when the process has died.
    pub fn channel_fd(&self) -> BorrowedFd<'_> {
        self.requests.channel().as_fd()
    }

    /// Whether the process has ended, or the host's TCP, without which a NIC is of no use that has lent it connections.
    pub fn is_dead(&mut self) -> bool {
        let nic_is_dead = match &mut self.process {
            Process::Child(child) => !matches!(child.try_wait(), Ok(None)),
            Process::Owned(_) => self.requests.channel().is_hung_up(),
        };
        if let Some(host_tcp) = self.host_tcp.take_if(|host_tcp| host_tcp.has_failed_to_start()) {
            let failed = |after| (after, Err("the host's TCP did not start".into()));
            self.answered.extend(host_tcp.end().into_iter().map(failed));
        }
        nic_is_dead || self.host_tcp.as_mut().is_some_and(HostTcp::is_dead)
    }

    /// Whether its own fault has ended it, or the agent ends it since it does not do what it must. False for an owner's
    /// NIC, of which that is not known.
    pub fn died_by_itself(&mut self) -> bool {
        let killed = |child: &mut Child| matches!(child.try_wait(), Ok(Some(status)) if process::is_killed(status));
        let nic_was_killed = match &mut self.process {
            Process::Child(child) => killed(child),
            Process::Owned(_) => false,
        };
        !nic_was_killed && !self.host_tcp.as_mut().is_some_and(HostTcp::was_killed)
    }

    /// Whether the agent has ended it.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Ends the process and the host's TCP, and waits until they are gone.
    pub fn end(&mut self) {
        self.ended = true;
        self.late.clear();
        self.inbox.nic_died();
        self.detached.extend(self.detaching.drain(..));
        for cid in std::mem::take(&mut self.dropping).into_keys() {
            self.give_slot(Cid(cid));
        }
        self.process.end();
        self.receive_answers();
        let lent = self.host_tcp.take().map(HostTcp::end).unwrap_or_default();
        let unanswered = self.requests.take_all().into_iter().chain(lent);
        self.answered.extend(unanswered.map(|after| (after, Err(GONE.into()))));
    }

    /// Takes a free slot for a connection that goes to the NIC, if that has announced room, and returns its cid.
    pub fn take_slot(&mut self) -> Option<Cid> {
        if !self.room.has_connections(1) || !self.room.has(Resource::Memory, 1) {
            return None;
        }
        let cid = take_free(&mut self.free, &self.memory)?;
        self.room.promise_connection(cid.slot());
        Some(cid)
    }

    /// Takes a free slot for a connection that the NIC is to make, and returns its cid.
    pub fn take_slot_to_grant(&mut self) -> Option<Cid> {
        take_free(&mut self.free, &self.memory)
    }

    /// Promises a connection memory on the NIC, instead of what it has there. False if the NIC has not announced room
    /// for it.
    pub fn promise_memory(&mut self, cid: Cid, memory: Memory) -> bool {
        self.room.promise_memory(cid.slot(), pages(memory.receive.1, memory.send.1))
    }

    /// Frees a slot.
    pub fn give_slot(&mut self, cid: Cid) {
        self.room.end(cid.slot());
        journal::note_next_name(&self.memory, self.free.give(cid));
    }

    /// Removes a slot from the free ones, because a connection has it already.
    pub fn withhold(&mut self, cid: Cid) {
        self.free.withhold(cid);
    }

    /// Takes over the free slots of the last NIC, with their cids, so that no cid is used twice, and who found none.
    pub fn inherit_slots(&mut self, last: &mut NicProcess) {
        self.free = std::mem::take(&mut last.free);
        self.gate.inherit(&mut last.gate);
        self.detached = std::mem::take(&mut last.detached);
        self.answered = std::mem::take(&mut last.answered);
    }

    /// Makes the NIC drop a connection that it has made; its frames are the kernel's. Its slot is free once that is
    /// done.
    pub fn drop_connection(&mut self, cid: Cid) {
        self.drop_by(cid, 0);
    }

    /// As [`NicProcess::drop_connection`], of one that nobody will have: its peer is reset.
    pub fn reset_connection(&mut self, cid: Cid) {
        self.drop_by(cid, RESET_PEER);
    }

    fn drop_by(&mut self, cid: Cid, how: u32) {
        if self.ended {
            return self.give_slot(cid);
        }
        self.dropping.insert(cid.0, Dropping { how, asked: false });
        self.ask_to_drop();
    }

    /// Sends what found the ring of commands full.
    fn ask_to_drop(&mut self) {
        let mut dropping = std::mem::take(&mut self.dropping);
        for (cid, one) in dropping.iter_mut().filter(|(_, one)| !one.asked) {
            one.asked = self.post(Message::control(Operation::NicControl, Control::Cancel, Cid(*cid), one.how, 0)).is_ok();
        }
        self.dropping = dropping;
    }

    /// Makes the NIC forget a session. Its number is free once [`NicProcess::take_detached`] has it.
    ///
    /// # Errors
    /// [`Refusal::NoRoom`] if the ring is full.
    pub fn detach(&mut self, session: u32) -> Result<(), Refusal> {
        match self.post(Message::control(Operation::NicControl, Control::Detach, Cid(0), session, 0)) {
            Err(Refusal::NicGone) => self.detached.push(session),
            Err(refusal) => return Err(refusal),
            Ok(()) => self.detaching.push_back(session),
        }
        if let Some(host_tcp) = &mut self.host_tcp {
            host_tcp.detach(session);
        }
        Ok(())
    }

    /// Whether the NIC still has to forget a session of this number.
    pub fn is_detaching(&self, session: u32) -> bool {
        self.detaching.contains(&session)
    }

    /// Takes a session that the NIC has forgotten.
    pub fn take_detached(&mut self) -> Option<u32> {
        self.detached.pop()
    }

    /// The addresses that its settings say are its own: those of its owner's, if it has one.
    pub fn own_addresses(&self) -> &[OwnAddress] {
        &self.own_addresses
    }

    /// Microseconds between two probes for them.
    pub fn between_probes(&self) -> u64 {
        self.between_probes
    }

    /// Makes these addresses the NIC's own, at this MAC address.
    pub fn set_addresses(&mut self, mac: [u8; 6], addresses: Vec<IpAddr>) {
        let after = After::Report("the NIC does not have its addresses");
        self.request(ToNic::Addresses { mac, addresses }, &[], Some(after));
    }

    /// Starts forwarding frames.
    pub fn let_frames_flow(&mut self) {
        self.request(ToNic::Start, &[], None);
    }

    /// Records that these offloads are in force.
    pub fn has_set(&mut self, offloads: &Offloads) {
        self.settings.offloads = *offloads;
    }

    /// Sends a request on the control connection. What follows the answer, if there is one, is done when it is there.
    pub fn request(&mut self, message: ToNic, descriptors: &[BorrowedFd<'_>], after: Option<After>) {
        if self.ended {
            return self.answered.extend(after.map(|after| (after, Err(GONE.into()))));
        }
        match self.requests.send(message, descriptors, after) {
            Ok(true) => self.wake(),
            Ok(false) => {}
            Err(after) => self.answered.extend(after.map(|after| (after, Err(GONE.into())))),
        }
    }

    /// Makes the NIC look at its control connection.
    fn wake(&self) {
        self.memory.word32(nic::CHANNEL).fetch_add(1, Ordering::AcqRel);
        self.bell.ring();
    }

    /// Whether it has so many requests to answer that it gets no more from programs and tools.
    pub fn is_behind(&self) -> bool {
        self.requests.is_full()
    }

    /// Reads the answers that are there, and sends what has waited for them.
    fn receive_answers(&mut self) {
        while let Some(answered) = self.requests.receive() {
            self.answered.push_back(answered);
        }
        if self.requests.flush() {
            self.wake();
        }
        if let Some(host_tcp) = &mut self.host_tcp {
            host_tcp.receive_answers(&mut self.answered);
        }
    }

    /// Takes the next answer to a request, with what is to be done with it.
    pub fn take_answered(&mut self) -> Option<(After, Answered)> {
        self.answered.pop_front()
    }

    /// Takes those of them that say whether it serves listeners; see [`take_listening`].
    pub fn take_listening(&mut self) -> VecDeque<(After, Answered)> {
        take_listening(&mut self.answered)
    }

    /// Whether there are answers for [`NicProcess::take_answered`].
    pub fn has_answered(&self) -> bool {
        !self.answered.is_empty()
    }

    /// When the next request is late, in microseconds of the monotonic clock.
    pub fn late_at(&self) -> Option<u64> {
        [self.requests.late_at(), self.host_tcp.as_ref().and_then(HostTcp::late_at)].into_iter().flatten().min()
    }

    /// What is to be done with answers that have become late.
    pub fn become_late(&mut self, now: u64) -> impl Iterator<Item = &mut After> {
        let of_host_tcp = self.host_tcp.iter_mut().flat_map(move |host_tcp| host_tcp.become_late(now));
        self.requests.become_late(now).chain(of_host_tcp)
    }

    /// Whether it has still to answer a request about a session, so that it is not asked to forget that yet.
    pub fn is_attaching(&self, session: u32) -> bool {
        let of_session = |after: &After| after.session() == Some(session);
        self.requests.awaits(of_session) || self.host_tcp.as_ref().is_some_and(|host_tcp| host_tcp.awaits(of_session))
    }

    /// Gives a session to the NIC: its memory, and its endpoint if it is for messages. `name` is the session's.
    ///
    /// # Errors
    /// If the session lacks something.
    pub fn attach(&mut self, (session, name): (u32, u64), open: &OpenSession, opening: &Opening) -> Result<()> {
        let memory = open.memory.fd().context("session memory is shared memory")?;
        // The program can write this word, too, and harms only itself.
        let next = open.memory.word32(session_layout::NIC_STARTS).load(Ordering::Acquire).wrapping_add(1);
        let messages = opening.messages.clone().map(|messages| (messages, next));
        let further = self.number().checked_sub(1).map(|at| open.further.get(at).context("the session has no doorbell for it"));
        let further = further.transpose()?.map(AsFd::as_fd);
        let descriptors: Vec<BorrowedFd<'_>> = [memory, open.bell.as_fd()].into_iter().chain(further).collect();
        let after = After::Attach { session, name, starts: messages.is_some().then_some(next) };
        self.request(ToNic::Attach { session, messages }, &descriptors, Some(after));
        Ok(())
    }

    /// Begins to make the NIC keep only the fast path of a session's connections: gives the session to the host's TCP,
    /// which is started if there is none.
    ///
    /// # Errors
    /// Why the NIC cannot.
    pub fn lend(&mut self, session: (u32, u64), open: &OpenSession) -> Result<()> {
        if let Some(why) = self.lacks_fast_path() {
            bail!("{why}");
        }
        if self.host_tcp.is_none() {
            let shared = Shared::new(self.settings.slots)?;
            self.request(ToNic::HostTcp, &shared.descriptors()?, Some(After::Report("the NIC has no host's TCP")));
            self.host_tcp = Some(HostTcp::start(&shared, &self.memory, &self.bell, &self.settings)?);
        }
        self.host_tcp.as_mut().map_or(Ok(()), |host_tcp| host_tcp.attach(session, open))
    }

    /// Makes the NIC keep only the fast path of a session's connections, which the host's TCP has.
    pub fn keep_fast_path(&mut self, (session, name): (u32, u64)) {
        self.request(ToNic::FastPath(session), &[], Some(After::FastPath { session, name }));
    }

    /// Why the NIC cannot keep only the fast path of connections, if it cannot.
    pub fn lacks_fast_path(&self) -> Option<&'static str> {
        (self.settings.workers > 1).then_some("partial offload needs a NIC with one worker")
    }

    /// The host's TCP, if there is one.
    pub fn host_tcp(&self) -> Option<&HostTcp> {
        self.host_tcp.as_ref()
    }

    /// Sends a command without waiting for its answer, which is among the notifications.
    ///
    /// # Errors
    /// [`Refusal::NicGone`] if the NIC has died, [`Refusal::NoRoom`] if its ring is full.
    pub fn post(&mut self, message: Message) -> Result<(), Refusal> {
        if self.ended {
            return Err(Refusal::NicGone);
        }
        self.send_late();
        if !self.late.is_empty() {
            return Err(Refusal::NoRoom);
        }
        self.push(message)
    }

    /// As [`NicProcess::post`], but if the ring is full the command is sent when it has room, unless another one of its
    /// kind for the connection comes before. Commands that are posted meanwhile find no room. For values of
    /// a connection of which the last one counts.
    ///
    /// # Errors
    /// [`Refusal::NicGone`] if the NIC has died.
    pub fn post_in_time(&mut self, message: Message) -> Result<(), Refusal> {
        match self.post(message) {
            Err(Refusal::NoRoom) => {
                self.late.insert((message.cid.0, message.kind), message);
                Ok(())
            }
            other => other,
        }
    }

    /// Time until commands are sent that found the ring full, if there are any.
    pub fn late_wait(&self) -> Option<Duration> {
        (!self.late.is_empty()).then_some(LATE)
    }

    fn send_late(&mut self) {
        while let Some((key, message)) = self.late.pop_first() {
            if self.push(message).is_err() {
                self.late.insert(key, message);
                return;
            }
        }
    }

    fn push(&mut self, message: Message) -> Result<(), Refusal> {
        if self.commands.push(message.to_words()).is_err() {
            return Err(Refusal::NoRoom);
        }
        self.commands.publish();
        self.room.sent(&message, || pages_of(&self.memory, message.cid.slot()));
        if must_ring(self.memory.word32(nic::SLEEPING)) {
            self.bell.ring();
        }
        Ok(())
    }

    /// Whether the ring has room for all commands of an action, or there is no ring any more.
    pub fn has_room(&mut self) -> bool {
        self.ended || self.late.is_empty() && self.commands.has_room(COMMANDS)
    }

    /// As [`NicProcess::post`], within what the NIC has announced.
    pub fn post_within(&mut self, command: Message) -> Result<(), Refusal> {
        self.post(self.room.name(command))
    }

    /// Sends a command whose answer [`NicProcess::inbox`] returns as one, within what the NIC has announced. See
    /// [`NicProcess::post`] for the errors.
    pub fn ask(&mut self, command: Message) -> Result<(), Refusal> {
        self.post_within(command)?;
        self.inbox.expect(&command);
        Ok(())
    }

    /// Looks for the answer to a command about this cid for a moment.
    pub fn glance(&mut self, cid: Cid) -> Option<Result<(), Refusal>> {
        let deadline = monotonic_micros() + GLANCE;
        loop {
            self.receive();
            let answer = self.inbox.take_answer(cid);
            if answer.is_some() || monotonic_micros() > deadline {
                return answer;
            }
            std::hint::spin_loop();
        }
    }

    fn next_event(&mut self) -> Option<Message> {
        loop {
            let message = journal::take_message(&mut self.events, &self.memory, (self.settings.number, self.settings.slots))?;
            if message.operation == Operation::OsResource {
                self.note_announcement(&message);
            } else if !self.is_own(&message) {
                return Some(message);
            }
        }
    }

    fn note_announcement(&mut self, message: &Message) {
        if let Some(announcement) = Announcement::from_message(message) {
            self.room.note(&announcement);
        }
    }

    /// Handles the answers to commands that no connection of the agent's has sent.
    fn is_own(&mut self, message: &Message) -> bool {
        let answers = matches!(Control::from_number(message.kind), Some(Control::Done | Control::Refused));
        if message.operation != Operation::OsControl || !answers {
            return false;
        }
        if message.length == Control::Detach as u32 {
            self.detached.extend(self.detaching.pop_front());
            return true;
        }
        // Refused: the NIC had nothing of it any more.
        let cid = message.cid;
        let dropped = message.length == Control::Cancel as u32 && self.dropping.remove(&cid.0).is_some();
        // It may have been dropped twice, and another connection may have the slot by now.
        let next = journal::next_name(&self.memory, cid.nic(), cid.slot());
        if dropped && (next == cid || next == cid.next_generation()) {
            self.give_slot(cid);
        }
        dropped
    }

    /// Moves the NIC's messages into the inbox, at most as many as its ring holds.
    pub fn receive(&mut self) {
        for _ in 0..RING_MESSAGES {
            let Some(message) = self.next_event() else { break };
            self.inbox.add(message);
        }
        self.receive_answers();
        if !self.ended {
            self.send_late();
        }
        if self.dropping.values().any(|one| !one.asked) {
            self.ask_to_drop();
        }
    }

    /// Drops notifications about a session, so that they do not apply to the next one of this number.
    pub fn forget_session(&mut self, session: u32) {
        self.inbox.retain(|message| Notice::of(message) != Some(Notice::CutOff(session)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener was taken from a NIC, which has died before it answered, and the next one is to serve it: its answer
    /// is the last one.
    #[test]
    fn answers_about_listeners_are_taken_in_their_order() {
        let all = [After::Report("another"), After::StopListening(1, Vec::new()), After::HostTcpReady, After::Listen(1)];
        let mut answered: VecDeque<(After, Answered)> = all.into_iter().map(|after| (after, Ok(()))).collect();
        let taken: Vec<After> = take_listening(&mut answered).into_iter().map(|(after, _)| after).collect();
        assert!(matches!(taken[..], [After::StopListening(1, _), After::Listen(1)]));
        assert_eq!(answered.len(), 2);
    }

    /// An agent that dies before it has journaled what it has given a slot: the next one gives no cid twice.
    #[test]
    fn no_agent_gives_the_cid_of_another() {
        let memory = Region::private(nic::bytes(2).next_multiple_of(4096)).unwrap();
        let mut given = Vec::new();
        for _ in 0..3 {
            let mut free = free_slots(&memory, 1, 2);
            let mut take = || take_free(&mut free, &memory);
            given.extend([take(), take()].map(|cid| cid.expect("a slot").0));
            assert!(take().is_none());
        }
        given.sort_unstable();
        given.dedup();
        assert_eq!(given.len(), 6);
    }
}
