//! The agent's loop: programs and tools ask, the NIC tells, moves go on.

use crate::adoption::Legacy;
use crate::back::{self, Failure};
use crate::cgroups::Cgroups;
use crate::changes::Watched;
use crate::connection::{Asker, Block, Connection, Stage};
use crate::flips::Schedule;
use crate::forth;
use crate::ground::{Ground, Shape};
use crate::group::{Group, Groups};
use crate::journal;
use crate::kept::Kept;
use crate::nic::{Hardware, NicProcess};
use crate::recovery::read_record;
use crate::session::{OpenSession, Session};
use crate::settings::AgentSettings;
use crate::step::Chaos;
use anyhow::{Context, Result};
use baton_abi::layout::{COUNTERS, Owner, block, nic};
use baton_abi::{Cid, Control, Operation};
use baton_client::protocol::{
    Answer, Ask, ConnectionInfo, Detail, Flip, Opening, Place, Reply, Request, Statistics, Until, VERSION,
};
use baton_control::Descriptor;
use baton_kernel::control::{Channel, Listener};
use baton_kernel::events::{Doorbell, Poller, Trigger, monotonic_micros};
use baton_kernel::examine::{self, Stay};
use baton_kernel::netlink::Netlink;
use baton_kernel::tcp_info::TcpInfo;
use baton_kernel::{diagnosis, interface, netlink, process, rtnetlink, shell, socket};
use baton_offloads::Offloads;
use baton_ring::Region;
use baton_steering::Steering;
use baton_wire::Flow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Connections in one answer.
const LISTED: usize = 128;

/// What the kernel says of a connection that it has.
fn kernel_detail(connection: &Connection, diagnosis: &Netlink) -> Option<Detail> {
    let fd = connection.fd.as_ref().map(AsFd::as_fd);
    let info = match fd {
        Some(fd) => TcpInfo::read(fd),
        None => diagnosis::information(diagnosis, &connection.flow),
    };
    let info = info.ok()?;
    let queue = |request| fd.and_then(|fd| socket::queue_bytes(fd, request).ok()).unwrap_or(0);
    let (queued, unsent) = (queue(socket::SIOCOUTQ), queue(socket::SIOCOUTQNSD));
    Some(Detail {
        state: info.state,
        srtt: info.rtt,
        cwnd: info.snd_cwnd,
        in_flight: queued.saturating_sub(unsent),
        unsent,
        unread: queue(socket::SIOCINQ),
        send_window: 0,
        retransmitted: info.total_retrans,
        mss: info.snd_mss,
    })
}

const LISTENER: u64 = u64::MAX;
const NIC_BELL: u64 = u64::MAX - 1;
const NIC_CHANNEL: u64 = u64::MAX - 2;
const KEEPER: u64 = u64::MAX - 3;
const ROUTES: u64 = u64::MAX - 4;
const RULES: u64 = u64::MAX - 5;

/// The first of the steering's descriptors that an agent beside the kernel inherits, behind those of [`Descriptor`].
pub const STEERING: i32 = Descriptor::Injector as i32 + 1;

pub(crate) struct Agent {
    pub settings: AgentSettings,
    pub hardware: Hardware,
    pub nic: NicProcess,
    pub sessions: Vec<Option<Session>>,
    /// Connections whose move waits for coverage.
    pub mirroring: Vec<(u32, u32)>,
    pub statistics: Statistics,
    pub(crate) chaos: Chaos,
    pub groups: Groups,
    pub schedule: Schedule,
    pub serials: u64,
    pub watched: Watched,
    pub cgroups: Cgroups,
    pub shape: Shape,
    keeper: Channel,
    routes: Netlink,
    pub diagnosis: Netlink,
    poller: Poller,
}

fn take(descriptor: Descriptor) -> Result<OwnedFd> {
    process::inherited(descriptor as i32)
        .with_context(|| format!("descriptor {descriptor:?}; the keeper starts this process, not a person"))
}

/// Runs an agent until the keeper is gone.
///
/// # Errors
/// If something that it needs is missing, with what.
pub fn run(mut settings: AgentSettings) -> Result<()> {
    if let Some(core) = settings.core {
        process::pin(0, core);
    }
    let hardware = Hardware {
        host: take(Descriptor::Host)?,
        wire: take(Descriptor::Wire)?,
        card: (0..settings.nic.card_descriptors() as i32)
            .map(|at| process::inherited(Descriptor::Injector as i32 + at).context("a descriptor of the card"))
            .collect::<Result<_>>()?,
        memory: Arc::new(Region::map(take(Descriptor::Memory)?)?),
        nic_bell: Doorbell::from_fd(take(Descriptor::NicBell)?),
        agent_bell: Doorbell::from_fd(take(Descriptor::AgentBell)?),
    };
    let keeper = Channel::from_fd(take(Descriptor::Channel)?);
    let routes = rtnetlink::open()?;
    let diagnosis = Netlink::open(netlink::SOCK_DIAG)?;
    let watched = Watched::open().context("listening to changes of routes")?;
    let legacy = Legacy::receive(&keeper)?;
    if let Some(offloads) = legacy.offloads() {
        settings.nic.offloads = offloads;
    }
    let shape = match &settings.interface {
        Some(name) => {
            let interface = rtnetlink::link(&routes, name).with_context(|| format!("the NIC's interface {name:?}"))?;
            Shape::Inline { interface }
        }
        None => {
            let inherited = |at| process::inherited(STEERING + at).context("a descriptor of the steering");
            let injector = take(Descriptor::Injector)?;
            let steering = Steering::from_fds([inherited(0)?, inherited(1)?, inherited(2)?]);
            Shape::Beside { steering, devices: legacy.devices(), injector }
        }
    };
    let nic = NicProcess::start(&hardware, &shape, &settings)?;
    let listener = Listener::bind(&settings.socket)?;
    let poller = Poller::new()?;
    poller.add(listener.as_fd(), LISTENER, Trigger::Readable)?;
    poller.add(hardware.agent_bell.as_fd(), NIC_BELL, Trigger::Readable)?;
    poller.add(keeper.as_fd(), KEEPER, Trigger::Readable)?;
    poller.add(nic.channel_fd(), NIC_CHANNEL, Trigger::Readable)?;
    poller.add(watched.routes.as_fd(), ROUTES, Trigger::Readable)?;
    if let Some(rules) = &watched.rules {
        poller.add(rules.as_fd(), RULES, Trigger::Readable)?;
    }
    let statistics = Statistics { nic_starts: 1, ..Statistics::default() };
    let sessions = Vec::new();
    let chaos = Chaos::new(settings.crash, hardware.memory.clone());
    let mirroring = Vec::new();
    let (groups, schedule) = (Groups::default(), Schedule::default());
    let mut agent = Agent {
        settings,
        hardware,
        nic,
        sessions,
        mirroring,
        statistics,
        chaos,
        groups,
        schedule,
        serials: 0,
        watched,
        cgroups: Cgroups::default(),
        shape,
        keeper,
        routes,
        diagnosis,
        poller,
    };
    agent.take_over(legacy)?;
    // The keeper hears that programs may come.
    agent.keep(&Kept::Ready, &[]);
    let result = agent.main_loop(&listener);
    agent.give_everything_back();
    result
}

impl Agent {
    fn main_loop(&mut self, listener: &Listener) -> Result<()> {
        let mut tokens = Vec::new();
        loop {
            let soon = (!self.mirroring.is_empty()).then_some(Duration::from_micros(200));
            let limit = [soon, self.schedule.wait(), self.cgroups.wait()].into_iter().flatten().min();
            self.poller.wait(limit, &mut tokens)?;
            for token in std::mem::take(&mut tokens) {
                match token {
                    LISTENER => self.admit(listener.accept()?)?,
                    NIC_BELL => self.hardware.agent_bell.clear(),
                    NIC_CHANNEL => {
                        if self.nic_is_dead() {
                            self.recover()?;
                        }
                    }
                    KEEPER => return Ok(()),
                    ROUTES => self.routes_changed(),
                    RULES => self.rules_changed(),
                    session => self.serve(session as u32),
                }
            }
            self.hear_nic();
            self.programs_changed();
            self.advance_moves();
            self.flip();
            if self.nic_is_dead() {
                self.recover()?;
            }
        }
    }

    fn admit(&mut self, channel: Channel) -> Result<()> {
        let number = self.sessions.iter().position(Option::is_none).unwrap_or(self.sessions.len());
        let session = Session::new(channel)?;
        self.watch(number as u32, &session)?;
        self.keep(&Kept::Session(number as u32), &[session.channel.as_fd()]);
        if number == self.sessions.len() {
            self.sessions.push(Some(session));
        } else {
            self.sessions[number] = Some(session);
        }
        Ok(())
    }

    /// Refuses what only this agent's user and root may do.
    fn only_ours(&self, number: u32, what: &str) -> Result<()> {
        let asker = self.sessions[number as usize].as_ref().map_or(u32::MAX, |session| session.user);
        if asker != 0 && asker != process::user() {
            anyhow::bail!("only this agent's user and root may {what}");
        }
        Ok(())
    }

    /// Somebody brings a client that came to another door.
    fn admit_another(&mut self, number: u32, channel: Channel) -> Result<()> {
        self.only_ours(number, "bring others")?;
        self.admit(channel)
    }

    /// Listens to a session.
    pub(crate) fn watch(&self, number: u32, session: &Session) -> Result<()> {
        Ok(self.poller.add(session.channel.as_fd(), u64::from(number), Trigger::Readable)?)
    }

    /// Gives the keeper something to hold for the next agent, or to drop.
    pub(crate) fn keep(&self, kept: &Kept, descriptors: &[BorrowedFd<'_>]) {
        if let Err(error) = self.keeper.send(kept, descriptors)
            // Without a keeper there is no next agent.
            && !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
        {
            eprintln!("baton agent: the keeper does not hear {kept:?} ({error}); it would be lost with this agent");
        }
    }

    /// One request of a session; its end, if the program is gone.
    fn serve(&mut self, number: u32) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        match session.channel.try_receive::<Request>() {
            Ok((request, descriptors)) => {
                let reply = self.on_request(number, request.tag, request.body, descriptors);
                if let Some((body, given)) = reply {
                    let given: Vec<BorrowedFd<'_>> = given.iter().map(AsFd::as_fd).collect();
                    self.answer(number, request.tag, body, &given);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let reason = "this request makes no sense to me; are both programs of the same version?".into();
                self.answer(number, 0, Reply::Failed { reason }, &[]);
            }
            Err(_) => self.end_session(number),
        }
    }

    pub(crate) fn answer(&mut self, number: u32, tag: u32, body: Reply, descriptors: &[BorrowedFd<'_>]) {
        if tag == 0 {
            return;
        }
        if let Some(Some(session)) = self.sessions.get(number as usize) {
            // A program that is gone is found out by its channel.
            // One that does not read its answers does not keep others waiting.
            let _ = session.channel.try_send(&Answer { tag, body }, descriptors);
        }
    }

    /// The answer, or None if it comes later.
    fn on_request(&mut self, number: u32, tag: u32, ask: Ask, mut descriptors: Vec<OwnedFd>) -> Option<(Reply, Vec<OwnedFd>)> {
        let failed = |reason: String| Some((Reply::Failed { reason }, Vec::new()));
        match ask {
            Ask::Open(Opening { version, .. }) if version != VERSION => {
                failed(format!("this agent speaks version {VERSION}, the program version {version}"))
            }
            Ask::Open(Opening { group, .. }) if group != 0 && !self.groups.has(group) => {
                failed("there is no such group; it was made with another agent".into())
            }
            Ask::Open(opening) => match self.open(number, &opening) {
                Ok(given) => Some((Reply::Opened { session: number }, given)),
                Err(error) => failed(format!("{error:#}")),
            },
            Ask::Admit => match descriptors.pop().map(|fd| self.admit_another(number, Channel::from_fd(fd))) {
                Some(Ok(())) => Some((Reply::Done, Vec::new())),
                Some(Err(error)) => failed(format!("{error:#}")),
                None => failed("there is no control connection".into()),
            },
            Ask::Group { flip } => Some((self.make_group(flip, descriptors.pop()), Vec::new())),
            Ask::Register { inherited, process } => match descriptors.pop() {
                Some(fd) => Some((self.register(number, fd, inherited, process), Vec::new())),
                None => failed("a registration needs a descriptor".into()),
            },
            Ask::Move { connection, to } if self.is_attacher(number) => {
                self.move_attached(number, connection, to, descriptors.pop(), (number, tag));
                None
            }
            Ask::Move { connection, to } => self.request_move(number, connection, to, (number, tag)),
            Ask::Lend { .. } => failed("nobody asked for it".into()),
            Ask::Closed { connection, abort } => Some((self.close_attached(number, connection, abort), Vec::new())),
            Ask::Attachers => Some((Reply::Attachers(self.attachers()), Vec::new())),
            Ask::MoveAny { session, connection, to } => {
                let attached = self.is_attacher(session);
                let asker = self.sessions[number as usize].as_ref().map_or(u32::MAX, |session| session.user);
                let owner = self.sessions.get(session as usize).and_then(Option::as_ref).map(|session| session.user);
                match owner {
                    Some(owner) if (asker == 0 || asker == owner) && attached => {
                        self.want(session, connection, to);
                        Some((Reply::Done, Vec::new()))
                    }
                    Some(owner) if asker == 0 || asker == owner => self.request_move(session, connection, to, (number, tag)),
                    Some(_) => failed("that connection belongs to another user".into()),
                    None => failed(format!("there is no session {session}")),
                }
            }
            Ask::Detail { connection } => Some((self.detail(number, connection), Vec::new())),
            Ask::GiveBack { connection, reason, until } => {
                self.lent(number, connection, descriptors.pop());
                let reply = self.give_back(number, connection, reason, until);
                self.lent(number, connection, None);
                Some((reply, Vec::new()))
            }
            Ask::Goodbye => {
                self.end_connections(number);
                Some((Reply::Done, Vec::new()))
            }
            Ask::Forget { connection } => Some((self.forget(number, connection), Vec::new())),
            Ask::List { from } => Some((Reply::Connections(self.list(from)), Vec::new())),
            Ask::Statistics => Some((Reply::Statistics(Box::new(self.count())), Vec::new())),
            Ask::Offloads => Some((Reply::Offloads(Box::new(self.settings.nic.offloads)), Vec::new())),
            Ask::SetOffloads(offloads) => match self.set_offloads(number, *offloads) {
                Ok(()) => Some((Reply::Done, Vec::new())),
                Err(error) => failed(format!("{error:#}")),
            },
        }
    }

    fn set_offloads(&mut self, number: u32, offloads: Offloads) -> Result<()> {
        self.only_ours(number, "change what the NIC does for the kernel")?;
        let elsewhere = Offloads { doorbells: self.settings.nic.offloads.doorbells, ..offloads };
        if matches!(self.shape, Shape::Beside { .. }) && elsewhere != self.settings.nic.offloads {
            anyhow::bail!(
                "this NIC is beside the kernel, whose frames go through its own devices: see ethtool -K and -C for those"
            );
        }
        if usize::from(offloads.rss.queues) > self.settings.nic.workers {
            anyhow::bail!(
                "queues={}: this NIC has {} (--workers, when it starts)",
                offloads.rss.queues,
                self.settings.nic.workers
            );
        }
        let large = self.settings.nic.segmentation || offloads.large_sends;
        if matches!(self.shape, Shape::Inline { .. }) {
            interface::set_large_sends(self.hardware.host.as_fd(), large).context("the interface's large sends")?;
        }
        self.nic.set_offloads(&offloads)?;
        self.settings.nic.offloads = offloads;
        self.keep(&Kept::Offloads(Box::new(offloads)), &[]);
        Ok(())
    }

    fn make_group(&mut self, flip: Option<Flip>, file: Option<OwnedFd>) -> Reply {
        let mut name = [0u8; 8];
        if let Err(error) = process::random(&mut name) {
            return Reply::Failed { reason: format!("no random numbers: {error}") };
        }
        let name = u64::from_ne_bytes(name).max(1);
        let kept: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        self.keep(&Kept::Group(name, flip), &kept);
        let mut group = Group::new(flip, file);
        if let Err(error) = group.write() {
            return Reply::Failed { reason: format!("the report's file cannot be written: {error}") };
        }
        self.groups.add(name, group);
        Reply::Grouped { group: name }
    }

    fn open(&mut self, number: u32, opening: &Opening) -> Result<Vec<OwnedFd>> {
        let bytes = self.settings.session_bytes;
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { anyhow::bail!("no session") };
        if session.open.is_some() {
            anyhow::bail!("the session is open already");
        }
        let open = OpenSession::new(bytes)?;
        self.nic.attach(number, &open.memory, &open.bell)?;
        let memory = open.memory.fd().context("session memory is shared memory")?.try_clone_to_owned()?;
        let given = vec![memory, self.hardware.nic_bell.try_clone()?.into(), open.bell.try_clone()?.into()];
        session.open = Some(open);
        session.opening.clone_from(opening);
        self.keep(&Kept::Memory(number, opening.clone()), &[given[0].as_fd(), given[2].as_fd()]);
        Ok(given)
    }

    fn register(&mut self, number: u32, fd: OwnedFd, inherited: bool, process: Option<u32>) -> Reply {
        let stays = |stay: Stay| Reply::Stayed { reason: stay.to_string(), transient: false };
        if let Err(stay) = examine::examine(fd.as_fd()) {
            return stays(stay);
        }
        let (Ok(local), Ok(peer)) = (socket::local_address(fd.as_fd()), socket::peer_address(fd.as_fd())) else {
            return stays(Stay::NotTcp);
        };
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return stays(Stay::NoRoom) };
        let Some(open) = &session.open else { return Reply::Failed { reason: "open the session first".into() } };
        let flow = Flow { local: local.into(), remote: peer.into() };
        // Asked again, since the agent that was asked first has died: one connection has one entry.
        if let Some(known) = session.connections.iter().flatten().find(|known| known.flow == flow) {
            return Reply::Registered { connection: known.number };
        }
        let place = session.connections.iter().position(Option::is_none).unwrap_or(session.connections.len());
        if place >= baton_abi::layout::session::MAX_CONNECTIONS {
            return stays(Stay::NoRoom);
        }
        let block = Block::new(open.memory.clone(), place as u32);
        block.store(block::BUSY, 0);
        block.store(block::MOVES, 0);
        block.set_owner(Owner::Kernel);
        self.serials += 1;
        let serial = self.serials;
        let Opening { group, attacher, .. } = session.opening;
        let process = process.filter(|_| attacher).unwrap_or(session.process);
        let connection = Connection {
            serial,
            inherited,
            process,
            attached: attacher,
            cgroup: self.cgroups.of(process),
            ..Connection::new(place as u32, Some(fd), flow, local, peer, block)
        };
        if place == session.connections.len() {
            session.connections.push(Some(connection));
        } else {
            session.connections[place] = Some(connection);
        }
        if attacher {
            self.lent(number, place as u32, None);
            self.keep(&Kept::Attached(number, place as u32, process, local, peer), &[]);
        } else if let Some(Some(connection)) = self.sessions[number as usize].as_ref().map(|session| &session.connections[place])
            && let Ok(fd) = connection.fd()
        {
            self.keep(&Kept::Connection(number, place as u32), &[fd]);
        }
        if let Some(group) = self.groups.get(group) {
            group.report.connections += 1;
            if let Some(after) = group.interval() {
                self.schedule.add(after, number, place as u32, serial);
            }
        }
        Reply::Registered { connection: place as u32 }
    }

    /// What a connection's record says.
    fn detail(&self, session: u32, number: u32) -> Reply {
        let connection = self.sessions.get(session as usize).and_then(Option::as_ref);
        let connection = connection.and_then(|session| session.connections.get(number as usize)?.as_ref());
        match connection.and_then(|connection| self.detail_of(connection)) {
            Some(detail) => Reply::Detail(detail),
            None => Reply::Failed { reason: "it is not on the NIC".into() },
        }
    }

    fn detail_of(&self, connection: &Connection) -> Option<Detail> {
        let Stage::Nic(on_nic) = &connection.stage else { return kernel_detail(connection, &self.diagnosis) };
        let record = read_record(&self.hardware.memory, nic::slot(on_nic.cid.slot()))?;
        Some(Detail {
            state: record.state,
            srtt: record.srtt,
            cwnd: record.cwnd,
            in_flight: record.snd_nxt.wrapping_sub(record.snd_una),
            unsent: connection.block.load(block::QUEUED_SEQ).wrapping_sub(record.snd_nxt),
            unread: record.rcv_nxt.wrapping_sub(connection.block.load(block::READ_SEQ)),
            send_window: record.snd_wnd,
            retransmitted: 0,
            mss: u32::from(on_nic.image.mss),
        })
    }

    /// The program wants of a connection what only the kernel can do.
    fn give_back(&mut self, session: u32, number: u32, reason: String, until: Until) -> Reply {
        let group = self.sessions.get(session as usize).and_then(Option::as_ref).map_or(0, |session| session.opening.group);
        if let Some(group) = self.groups.get(group).filter(|_| !reason.is_empty()) {
            *group.report.given_back.entry(reason.clone()).or_default() += 1;
        }
        self.bring_back(session, number);
        self.hear_nic();
        self.bring_back(session, number);
        let Some(Some(connection)) =
            self.sessions.get_mut(session as usize).and_then(Option::as_mut).and_then(|s| s.connections.get_mut(number as usize))
        else {
            return Reply::Done;
        };
        match until {
            Until::Again => {}
            Until::Alone => (connection.stays, connection.inherited) = (false, true),
            Until::Never => connection.stays = true,
        }
        if matches!(connection.stage, Stage::Nic(_)) {
            return Reply::Failed { reason: connection.reason.clone() };
        }
        if !reason.is_empty() {
            connection.reason = reason;
        }
        self.try_later(session, number);
        Reply::Done
    }

    /// What a move needs, and the session it is in.
    pub(crate) fn split(&mut self, session: u32) -> Option<(Ground<'_>, &mut Session)> {
        let session = self.sessions.get_mut(session as usize)?.as_mut()?;
        let ground = Ground {
            nic: &mut self.nic,
            nic_memory: &self.hardware.memory,
            host: &self.hardware.host,
            shape: &mut self.shape,
            keeper: &self.keeper,
            chaos: &self.chaos,
            routes: &self.routes,
            diagnosis: &self.diagnosis,
            process: session.process,
        };
        Some((ground, session))
    }

    pub(crate) fn request_move(&mut self, session: u32, number: u32, to: Place, asker: Asker) -> Option<(Reply, Vec<OwnedFd>)> {
        let Some((mut ground, entry)) = self.split(session) else {
            return Some((Reply::Failed { reason: format!("there is no session {session}") }, Vec::new()));
        };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else {
            return Some((Reply::Failed { reason: format!("session {session} has no connection {number}") }, Vec::new()));
        };
        connection.wanted = to == Place::Nic;
        match (&mut connection.stage, to) {
            (Stage::Kernel, Place::Kernel) | (Stage::Nic(_), Place::Nic) => return Some((Reply::Done, Vec::new())),
            (Stage::Ended(_), _) => {
                return Some((Reply::Stayed { reason: "it has ended".into(), transient: false }, Vec::new()));
            }
            (Stage::Mirroring { askers, .. }, Place::Nic) => askers.push(asker),
            (Stage::Mirroring { .. }, Place::Kernel) => {
                self.call_off(session, number);
                return Some((Reply::Done, Vec::new()));
            }
            (Stage::Kernel, Place::Nic) if connection.stays => {
                let reason = format!("it stays in the kernel: {}", connection.reason);
                return Some((Reply::Stayed { reason, transient: false }, Vec::new()));
            }
            (Stage::Kernel, Place::Nic) => match forth::begin(&mut ground, connection, vec![asker]) {
                Ok(()) => {
                    self.mirroring.push((session, number));
                    self.advance_moves();
                }
                Err(stay) => self.conclude(session, number, Err(stay), vec![asker]),
            },
            (Stage::Nic(_), Place::Kernel) => self.move_back(session, number, vec![asker]),
        }
        None
    }

    /// Moves a connection back to the kernel and answers those who asked for it.
    pub(crate) fn move_back(&mut self, session: u32, number: u32, askers: Vec<Asker>) {
        let Some((mut ground, entry)) = self.split(session) else { return };
        let (Some(open), Some(Some(connection))) = (entry.open.as_mut(), entry.connections.get_mut(number as usize)) else {
            return;
        };
        let flow = connection.flow;
        let result = match back::complete(&mut ground, open, connection) {
            Ok(()) => Ok(()),
            Err(Failure::Stays(stay)) => Err(stay),
            Err(Failure::NicGone) => match self.recover() {
                Ok(()) => Ok(()),
                Err(_) => Err(Stay::NicGone),
            },
            Err(Failure::Lost(error)) => {
                eprintln!("baton agent: {flow:?} is lost: {error}");
                self.statistics.failed_moves += 1;
                Err(Stay::Lost(error.step, error.error))
            }
        };
        self.conclude(session, number, result, askers);
    }

    /// Counts a move and answers those who asked for it.
    pub(crate) fn conclude(&mut self, session: u32, number: u32, result: Result<(), Stay>, askers: Vec<Asker>) {
        let reply = match &result {
            Ok(()) => {
                self.statistics.moves += 1;
                Reply::Done
            }
            Err(stay) => {
                let transient = matches!(
                    stay,
                    Stay::OutOfOrder | Stay::Acknowledged | Stay::Busy | Stay::NoNeighbour | Stay::NoRoom | Stay::NicGone
                );
                if transient {
                    self.statistics.deferred += 1;
                }
                Reply::Stayed { reason: stay.to_string(), transient }
            }
        };
        if let Some(Some(session)) = self.sessions.get_mut(session as usize)
            && let Some(Some(connection)) = session.connections.get_mut(number as usize)
        {
            let group = self.groups.get(session.opening.group);
            match &result {
                Ok(()) => {
                    connection.made += 1;
                    connection.since = monotonic_micros();
                    let usual = if askers.is_empty() { "at random" } else { "asked to" };
                    connection.reason = connection.must_return.take().unwrap_or(usual).into();
                    group.into_iter().for_each(|group| group.report.moves += 1);
                }
                Err(stay) => {
                    connection.reason = stay.to_string();
                    group.into_iter().for_each(|group| group.stayed(stay));
                }
            }
        }
        for (asker, tag) in askers {
            self.answer(asker, tag, reply.clone(), &[]);
        }
    }

    /// Brings a connection back if need be, and forgets it.
    pub(crate) fn forget(&mut self, session: u32, number: u32) -> Reply {
        self.bring_back(session, number);
        // The NIC refuses a connection that has just ended; its end is among what it has said since.
        self.hear_nic();
        self.bring_back(session, number);
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return Reply::Done };
        let Some(connection) = entry.connections.get_mut(number as usize).and_then(Option::take) else {
            // Forgotten already, at the request of somebody whose answer was lost.
            return Reply::Done;
        };
        connection.block.set_owner(Owner::Nobody);
        if let Some(group) = self.groups.get(entry.opening.group) {
            group.forgotten(&connection);
        }
        self.keep(&Kept::Forgotten(session, number), &[]);
        if connection.place() == Place::Nic {
            return Reply::Failed { reason: connection.reason };
        }
        Reply::Done
    }

    /// Calls a move off that has only begun, and tells those who asked for it.
    fn call_off(&mut self, session: u32, number: u32) {
        let Some((mut ground, entry)) = self.split(session) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        let Stage::Mirroring { cid, .. } = connection.stage else { return };
        let askers = forth::take_askers(connection);
        forth::call_off(&mut ground, connection, cid);
        let reply = Reply::Stayed { reason: Stay::CalledOff.to_string(), transient: false };
        for (asker, tag) in askers {
            self.answer(asker, tag, reply.clone(), &[]);
        }
    }

    /// Whatever stage a connection is in: it is in the kernel afterwards, or has ended.
    fn bring_back(&mut self, session: u32, number: u32) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        match &connection.stage {
            Stage::Kernel => {}
            Stage::Mirroring { .. } => self.call_off(session, number),
            Stage::Ended(_) => {
                connection.stage = Stage::Kernel;
                if let Some(open) = entry.open.as_mut()
                    && let Some(at) = open.ended.iter().position(|(ended, _)| *ended == number)
                {
                    let (_, memory) = open.ended.swap_remove(at);
                    forth::give_memory(open, memory);
                }
            }
            Stage::Nic(_) => self.move_back(session, number, Vec::new()),
        }
    }

    /// What the NIC has said by itself: it wants to give a connection back, or one has ended.
    fn hear_nic(&mut self) {
        self.nic.listen();
        while let Some(message) = self.nic.inbox.pop_front() {
            let Some((session, number)) = self.find(message.cid) else { continue };
            match (message.operation, Control::from_number(message.kind)) {
                (Operation::OsRestore, _) => self.must_return(session, number, "its peer has ended it"),
                (Operation::OsControl, Some(Control::Closed)) => self.end_connection(session, number),
                _ => {}
            }
        }
    }

    fn find(&self, cid: Cid) -> Option<(u32, u32)> {
        self.sessions.iter().enumerate().find_map(|(at, session)| {
            let found = session.as_ref()?.connections.iter().flatten().find(|connection| connection.cid() == Some(cid))?;
            Some((at as u32, found.number))
        })
    }

    /// A connection has ended on the NIC: its slot is free, its memory stays until the program has read what is in it.
    fn end_connection(&mut self, session: u32, number: u32) {
        let Some((mut ground, entry)) = self.split(session) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        let Stage::Nic(on_nic) = &connection.stage else { return };
        let cid = on_nic.cid;
        ground.cancel(cid, &connection.flow, false);
        journal::clear(ground.nic_memory, cid);
        ground.nic.give_slot(cid);
        let _ = match &connection.fd {
            Some(fd) => shell::end(fd.as_fd()),
            None => diagnosis::destroy(ground.diagnosis, &connection.flow),
        };
        let ended = std::mem::replace(&mut connection.stage, Stage::Ended(cid));
        if let (Stage::Nic(on_nic), Some(open)) = (ended, entry.open.as_mut()) {
            open.ended.push((number, on_nic.memory));
        }
    }

    /// A program is gone: its connections are the kernel's, which closes them as it would have.
    fn end_session(&mut self, number: u32) {
        self.end_connections(number);
        if !self.sessions.get(number as usize).is_some_and(Option::is_some) {
            return;
        }
        if let Some(session) = self.sessions[number as usize].take() {
            let _ = self.poller.remove(session.channel.as_fd());
            self.keep(&Kept::Ended(number), &[]);
            if session.open.is_some() {
                let _ = self.nic.control(Control::Detach, Cid(0), number);
            }
        }
    }

    /// All of a session's connections are forgotten, and its group's report says so.
    fn end_connections(&mut self, number: u32) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        let Opening { group, attacher, .. } = session.opening;
        for connection in 0..session.connections.len() as u32 {
            let entry =
                self.sessions[number as usize].as_ref().and_then(|session| session.connections[connection as usize].as_ref());
            if let Some(entry) = entry {
                entry.block.store(block::BUSY, 0);
                if attacher {
                    self.leave_attached(number, connection);
                } else {
                    self.forget(number, connection);
                }
            }
        }
        self.groups.write(group);
    }

    fn give_everything_back(&mut self) {
        for number in 0..self.sessions.len() as u32 {
            self.end_session(number);
        }
        self.nic.end();
    }

    /// After a NIC's death: the next one, with the sessions attached. Frames do not flow yet.
    pub(crate) fn start_next_nic(&mut self) -> Result<()> {
        let mut next = NicProcess::start(&self.hardware, &self.shape, &self.settings)?;
        next.inherit_slots(&mut self.nic);
        for (number, session) in self.sessions.iter().enumerate() {
            if let Some(Session { open: Some(open), .. }) = session {
                next.attach(number as u32, &open.memory, &open.bell)?;
            }
        }
        self.poller.add(next.channel_fd(), NIC_CHANNEL, Trigger::Readable)?;
        self.nic = next;
        self.statistics.nic_starts += 1;
        Ok(())
    }

    /// Moves that were waiting when the NIC died are called off.
    pub(crate) fn give_up_mirrors(&mut self) {
        for (session, number) in std::mem::take(&mut self.mirroring) {
            let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { continue };
            let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { continue };
            if let Stage::Mirroring { askers, cid, .. } = std::mem::replace(&mut connection.stage, Stage::Kernel) {
                self.nic.give_slot(cid);
                self.conclude(session, number, Err(Stay::NicGone), askers);
            }
        }
    }

    fn list(&self, from: (u32, u32)) -> Vec<ConnectionInfo> {
        let mut list = Vec::new();
        for (at, session) in self.sessions.iter().enumerate() {
            let Some(session) = session else { continue };
            for connection in session.connections.iter().flatten() {
                if (at as u32, connection.number) < from || list.len() >= LISTED {
                    continue;
                }
                list.push(ConnectionInfo {
                    session: at as u32,
                    connection: connection.number,
                    process: connection.process,
                    program: session.opening.program.clone(),
                    local: connection.local.to_string(),
                    peer: connection.peer.to_string(),
                    place: connection.place(),
                    moves: connection.made,
                    for_us: monotonic_micros() - connection.since,
                    detail: self.detail_of(connection).unwrap_or_default(),
                    reason: connection.reason.clone(),
                });
            }
        }
        list
    }

    fn count(&mut self) -> Statistics {
        let of = |worker| {
            let words = self.hardware.memory.words(nic::counters(worker), COUNTERS);
            words.iter().map(|word| word.load(Ordering::Relaxed)).collect::<Vec<u64>>()
        };
        self.statistics.workers = (0..self.settings.nic.workers).map(of).collect();
        let sum = |at: usize| self.statistics.workers.iter().map(|worker| worker[at]).sum();
        self.statistics.counters = (0..COUNTERS).map(sum).collect();
        self.statistics.nic_process = self.nic.process();
        self.statistics.agent_process = std::process::id();
        self.statistics.sessions = self.sessions.iter().flatten().count() as u32;
        self.statistics.clone()
    }
}
