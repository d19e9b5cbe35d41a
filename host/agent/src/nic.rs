//! The NIC process as the agent sees it: its start, its commands, its notifications and its end.

use crate::ground::Shape;
use crate::host_tcp::{HostTcp, Shared};
use crate::journal;
use crate::owned::OwnedNic;
use crate::session::OpenSession;
use anyhow::{Context, Result, bail};
use baton_abi::layout::{RING_MESSAGES, nic, session as session_layout};
use baton_abi::{Cid, Control, Message, Operation};
use baton_linux::control::Channel;
use baton_linux::events::{Doorbell, monotonic_micros};
use baton_linux::process;
use baton_linux::report;
use baton_moves::{Inbox, Refusal};
use baton_offloads::Offloads;
use baton_protocol::address::OwnAddress;
use baton_protocol::nic::{Hop, Listen, NicSettings, ToAgent, ToNic};
use baton_protocol::program::Opening;
use baton_ring::{Consumer, Producer, must_ring};
use baton_shm::{Region, RingWords};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Time for which the answer to a command is looked for before its move goes on in a later round, in microseconds: a NIC that has
/// nothing else to do answers sooner.
const GLANCE: u64 = 50;

/// Commands that an action of a move sends at most.
const COMMANDS: u64 = 2;

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

/// Returns the session that a message ends because its program broke the interface's rules, if it is such a message.
pub(crate) fn cut_off(message: &Message) -> Option<u32> {
    let about = (message.operation, Control::from_number(message.kind));
    matches!(about, (Operation::OsControl, Some(Control::Detach))).then_some(message.address)
}

/// The NIC's process: a child, or the owner's.
enum Process {
    Child(Child),
    Owned(OwnedNic),
}

pub(crate) struct NicProcess {
    process: Process,
    channel: Channel,
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
    /// Connections without a move that the NIC drops. Their slots are free once it has answered; false: it has not been asked yet.
    dropping: BTreeMap<u32, bool>,
    /// Sessions that end on the NIC, in the order in which it answers, and those that have ended there.
    detaching: VecDeque<u32>,
    detached: Vec<u32>,
    /// Number of connections that it has room for, as advertised.
    pub room: u32,
    free: FreeSlots,
    /// The process has been ended: it gets no more commands.
    ended: bool,
}

/// Slots without a connection. The memory of slots that never had one is not touched.
#[derive(Default)]
struct FreeSlots {
    /// Number of their NIC.
    nic: usize,
    /// Free slots that had a connection, with the cid of their next one.
    names: BTreeMap<u32, Cid>,
    /// The first slot that never had a connection, and the number of slots.
    fresh: u32,
    slots: u32,
}

impl FreeSlots {
    /// Returns all slots as free, whatever an earlier agent had in them.
    fn read(memory: &Region, nic: usize, slots: u32) -> FreeSlots {
        let fresh = journal::slots_used(memory, slots);
        let names = (0..fresh).map(|slot| (slot, journal::next_name(memory, nic, slot))).collect();
        FreeSlots { nic, names, fresh, slots }
    }

    fn take(&mut self, memory: &Region) -> Option<Cid> {
        if let Some((_, name)) = self.names.pop_last() {
            return Some(name);
        }
        if self.fresh == self.slots {
            return None;
        }
        self.fresh += 1;
        journal::note_slots_used(memory, self.fresh);
        Some(Cid::new(self.fresh - 1, 1).on(self.nic))
    }
}

/// Starts a NIC process as a child, and returns it and its control connection.
fn start_child(hardware: &Hardware, shape: &Shape, settings: &NicSettings) -> Result<(Child, Channel)> {
    let (ours, theirs) = Channel::pair()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("nic-process");
    baton_protocol::send_settings(&ours, settings)?;
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
    process::inherit(&mut command, &descriptors, true);
    process::with_sharing_priority(&mut command);
    let child = command.spawn().context("starting the NIC process")?;
    drop(theirs);
    Ok((child, ours))
}

impl NicProcess {
    /// Starts a NIC on the hardware and waits until it is ready.
    pub fn start(hardware: &Hardware, shape: &Shape, settings: &NicSettings) -> Result<NicProcess> {
        // Commands that the last NIC left unread were meant for that NIC only.
        Consumer::new(hardware.memory.ring(nic::COMMANDS)).skip_all();
        let (process, ours) = match settings.owned {
            true => OwnedNic::start(hardware, settings).map(|(nic, ours)| (Process::Owned(nic), ours))?,
            false => start_child(hardware, shape, settings).map(|(child, ours)| (Process::Child(child), ours))?,
        };
        let (own_addresses, between_probes) = match ours.receive::<ToAgent>() {
            Ok((ToAgent::OwnAddresses { addresses, between_probes }, _)) => (addresses, between_probes),
            Ok((other, _)) => bail!("the NIC process says {other:?} instead of its addresses"),
            Err(error) => bail!("the NIC process did not start ({error})"),
        };
        match ours.receive::<ToAgent>() {
            Ok((ToAgent::Ready, _)) => {}
            Ok((other, _)) => bail!("the NIC process says {other:?} instead of being ready"),
            Err(error) => bail!("the NIC process did not start ({error})"),
        }
        let slots = settings.slots as u32;
        Ok(NicProcess {
            process,
            channel: ours,
            commands: Producer::new(hardware.memory.ring(nic::COMMANDS)),
            events: Consumer::new(hardware.memory.ring(nic::EVENTS)),
            memory: hardware.memory.clone(),
            bell: hardware.nic_bell.try_clone()?,
            settings: settings.clone(),
            host_tcp: None,
            inbox: Inbox::default(),
            dropping: BTreeMap::new(),
            detaching: VecDeque::new(),
            detached: Vec::new(),
            room: slots,
            free: FreeSlots::read(&hardware.memory, settings.number, slots),
            ended: false,
            own_addresses,
            between_probes,
        })
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

    /// The control connection: readable when the process has died.
    pub fn channel_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether the process has ended, or the host's TCP, without which a NIC is of no use that has lent it connections.
    pub fn is_dead(&mut self) -> bool {
        let nic_is_dead = match &mut self.process {
            Process::Child(child) => !matches!(child.try_wait(), Ok(None)),
            Process::Owned(_) => self.channel.is_hung_up(),
        };
        nic_is_dead || self.host_tcp.as_mut().is_some_and(HostTcp::is_dead)
    }

    /// Ends the process and the host's TCP, and waits until they are gone.
    pub fn end(&mut self) {
        self.ended = true;
        self.inbox.nic_died();
        self.detached.extend(self.detaching.drain(..));
        for cid in std::mem::take(&mut self.dropping).into_keys() {
            self.give_slot(Cid(cid));
        }
        if let Some(host_tcp) = &mut self.host_tcp {
            host_tcp.end();
        }
        match &mut self.process {
            Process::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Process::Owned(nic) => nic.end(),
        }
    }

    /// Takes a free slot, if the NIC advertised room, and returns its cid.
    pub fn take_slot(&mut self) -> Option<Cid> {
        if self.room == 0 { None } else { self.free.take(&self.memory) }
    }

    /// Frees a slot.
    pub fn give_slot(&mut self, cid: Cid) {
        journal::note_next_name(&self.memory, cid.next_generation());
        self.free.names.insert(cid.slot(), cid.next_generation());
    }

    /// Removes a slot from the free ones, because a connection has it already.
    pub fn withhold(&mut self, cid: Cid) {
        self.free.names.remove(&cid.slot());
    }

    /// Takes over the free slots of the last NIC, with their cids, so that no cid is used twice.
    pub fn inherit_slots(&mut self, last: &mut NicProcess) {
        self.free = std::mem::take(&mut last.free);
        self.detached = std::mem::take(&mut last.detached);
    }

    /// Makes the NIC drop a connection that it has made; its frames are the kernel's. Its slot is free once that is done.
    pub fn drop_connection(&mut self, cid: Cid) {
        if self.ended {
            return self.give_slot(cid);
        }
        self.dropping.insert(cid.0, false);
        self.ask_to_drop();
    }

    /// Sends what found the ring of commands full.
    fn ask_to_drop(&mut self) {
        let mut dropping = std::mem::take(&mut self.dropping);
        for (cid, asked) in dropping.iter_mut().filter(|(_, asked)| !**asked) {
            *asked = self.post(Message::control(Operation::NicControl, Control::Cancel, Cid(*cid), 0, 0)).is_ok();
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
        if let Some(host_tcp) = &self.host_tcp {
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
    ///
    /// # Errors
    /// That it has died.
    pub fn set_addresses(&mut self, mac: [u8; 6], addresses: Vec<IpAddr>) -> Result<()> {
        self.send(&ToNic::Addresses { mac, addresses }, &[])?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Set => Ok(()),
            other => bail!("the NIC did not take its addresses: {other:?}"),
        }
    }

    /// Starts forwarding frames.
    pub fn let_frames_flow(&mut self) -> Result<()> {
        self.send(&ToNic::Start, &[])
    }

    /// Sets the offloads for the kernel's connections. Waits until they are in force, so that repeated calls do not outrun the
    /// NIC.
    pub fn set_offloads(&mut self, offloads: &Offloads) -> Result<()> {
        self.send(&ToNic::Offloads(Box::new(*offloads)), &[])?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Set => {
                self.settings.offloads = *offloads;
                Ok(())
            }
            other => bail!("the NIC did not change its offloads: {other:?}"),
        }
    }

    fn send(&mut self, message: &ToNic, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        self.channel.send(message, descriptors)?;
        self.memory.word32(nic::CHANNEL).fetch_add(1, Ordering::AcqRel);
        self.bell.ring();
        Ok(())
    }

    /// Gives a session to the NIC: its memory, and its endpoint if it is for messages.
    pub fn attach(&mut self, session: u32, open: &OpenSession, opening: &Opening) -> Result<()> {
        let memory = open.memory.fd().context("session memory is shared memory")?;
        let starts = open.memory.word32(session_layout::NIC_STARTS);
        // The program can write this word, too, and harms only itself.
        let next = starts.load(Ordering::Acquire).wrapping_add(1);
        let messages = opening.messages.clone().map(|messages| (messages, next));
        let further = self.number().checked_sub(1).map(|at| open.further.get(at).context("the session has no doorbell for it"));
        let further = further.transpose()?.map(AsFd::as_fd);
        let descriptors: Vec<BorrowedFd<'_>> = [memory, open.bell.as_fd()].into_iter().chain(further).collect();
        self.send(&ToNic::Attach { session, messages }, &descriptors)?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Attached if opening.messages.is_none() => {
                if opening.fast_path
                    && let Err(error) = self.keep_fast_path(session, open)
                {
                    report!("baton agent: the NIC has all of session {session}'s connections: {error:#}");
                }
                Ok(())
            }
            ToAgent::Attached => {
                starts.store(next, Ordering::Release);
                open.bell.ring();
                Ok(())
            }
            other => bail!("the NIC did not attach the session: {other:?}"),
        }
    }

    /// Makes the NIC keep only the fast path of a session's connections. Starts the host's TCP if there is none.
    fn keep_fast_path(&mut self, session: u32, open: &OpenSession) -> Result<()> {
        if let Some(why) = self.lacks_fast_path() {
            bail!("{why}");
        }
        if self.host_tcp.is_none() {
            let shared = Shared::new(self.settings.slots)?;
            self.send(&ToNic::HostTcp, &shared.descriptors()?)?;
            self.await_attached()?;
            self.host_tcp = Some(HostTcp::start(&shared, &self.memory, &self.bell, &self.settings)?);
        }
        if let Some(host_tcp) = &self.host_tcp {
            host_tcp.attach(session, open)?;
        }
        self.send(&ToNic::FastPath(session), &[])?;
        self.await_attached()
    }

    fn await_attached(&mut self) -> Result<()> {
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Attached => Ok(()),
            ToAgent::Failed(reason) => bail!("{reason}"),
            other => bail!("unexpected answer from the NIC: {other:?}"),
        }
    }

    /// Why the NIC cannot keep only the fast path of connections, if it cannot.
    pub fn lacks_fast_path(&self) -> Option<&'static str> {
        (self.settings.workers > 1).then_some("partial offload needs a NIC with one worker")
    }

    /// The host's TCP, if there is one.
    pub fn host_tcp(&self) -> Option<&HostTcp> {
        self.host_tcp.as_ref()
    }

    /// Sets the way of a session for messages to a host; None while there is none.
    ///
    /// # Errors
    /// Why the NIC refuses, or that it has died.
    pub fn reach(&mut self, session: u32, host: IpAddr, hop: Option<Hop>) -> Result<()> {
        self.send(&ToNic::Reach { session, host, hop }, &[])?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Reached => Ok(()),
            ToAgent::Failed(reason) => bail!("{reason}"),
            other => bail!("the NIC did not take the way to {host}: {other:?}"),
        }
    }

    /// Makes the NIC serve a listener.
    ///
    /// # Errors
    /// That it has died.
    pub fn listen(&mut self, listen: Listen) -> Result<()> {
        self.send_and_wait(&ToNic::Listen(listen))
    }

    /// Makes the NIC serve a listener no longer.
    ///
    /// # Errors
    /// That it has died.
    pub fn stop_listening(&mut self, id: u32) -> Result<()> {
        self.send_and_wait(&ToNic::StopListening(id))
    }

    /// Makes the NIC serve a UDP socket, in this way from now on; `bell` is the doorbell that it rings for the program.
    ///
    /// # Errors
    /// Why it does not, or that it has died.
    pub fn serve_datagrams(&mut self, message: &ToNic, bell: Option<BorrowedFd<'_>>) -> Result<()> {
        self.send(message, bell.as_slice())?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Served => Ok(()),
            ToAgent::Failed(reason) => bail!("{reason}"),
            other => bail!("unexpected answer from the NIC: {other:?}"),
        }
    }

    fn send_and_wait(&mut self, message: &ToNic) -> Result<()> {
        self.send(message, &[])?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Listening => Ok(()),
            other => bail!("unexpected answer from the NIC: {other:?}"),
        }
    }

    /// Sends a command without waiting for its answer, which is among the notifications.
    ///
    /// # Errors
    /// [`Refusal::NicGone`] if the NIC has died, [`Refusal::NoRoom`] if its ring is full.
    pub fn post(&mut self, message: Message) -> Result<(), Refusal> {
        if self.ended {
            return Err(Refusal::NicGone);
        }
        if self.commands.push(message.to_words()).is_err() {
            return Err(Refusal::NoRoom);
        }
        self.commands.publish();
        if must_ring(self.memory.word32(nic::SLEEPING)) {
            self.bell.ring();
        }
        Ok(())
    }

    /// Whether the ring has room for all commands of an action, or there is no ring any more.
    pub fn has_room(&mut self) -> bool {
        self.ended || self.commands.has_room(COMMANDS)
    }

    /// Sends a command whose answer [`NicProcess::inbox`] returns as one. See [`NicProcess::post`] for the errors.
    pub fn ask(&mut self, command: Message) -> Result<(), Refusal> {
        self.post(command)?;
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
            let words = self.events.pop()?;
            self.events.release();
            match Message::from_words(words) {
                Some(Message { operation: Operation::OsResource, length, .. }) => self.room = length,
                Some(message) if self.is_own(&message) => {}
                Some(message) => return Some(message),
                None => {}
            }
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
        let dropped = message.length == Control::Cancel as u32 && self.dropping.remove(&message.cid.0).is_some();
        if dropped {
            self.give_slot(message.cid);
        }
        dropped
    }

    /// Moves the NIC's messages into the inbox, at most as many as its ring holds.
    pub fn receive(&mut self) {
        for _ in 0..RING_MESSAGES {
            let Some(message) = self.next_event() else { break };
            self.inbox.add(message);
        }
        if self.dropping.values().any(|asked| !asked) {
            self.ask_to_drop();
        }
    }

    /// Drops notifications about a session, so that they do not apply to the next one of this number.
    pub fn forget_session(&mut self, session: u32) {
        self.inbox.retain(|message| cut_off(message) != Some(session));
    }
}
