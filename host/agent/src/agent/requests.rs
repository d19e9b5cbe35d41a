//! Handles the requests of programs, attachers and tools.

use super::Agent;
use super::listing::{LISTED_IN_ALL, Listing};
use crate::adoption;
use crate::answers::{After, NO_ANSWER};
use crate::block::Block;
use crate::connection::{Asker, Connection, Then};
use crate::gain;
use crate::ground::Shape;
use crate::group::Group;
use crate::identity::Identity;
use crate::listening;
use crate::memory;
use crate::moves::MANY_WAITING;
use crate::native;
use crate::nic::NicProcess;
use crate::session::{NOT_READING, Sent, Session};
use crate::texts::shortened;
use anyhow::{Context, Result};
use baton_abi::layout::Owner;
use baton_core::Stage;
use baton_handoff::examine;
use baton_linux::control::PeerChannel;
use baton_linux::events::monotonic_micros;
use baton_linux::foreign::{self, Foreign};
use baton_linux::{device_frames, interface, process, socket};
use baton_moves::{Refusal, Step};
use baton_offloads::Offloads;
use baton_protocol::keeper::Kept;
use baton_protocol::native::Native;
use baton_protocol::nic::{Capture, ToNic};
use baton_protocol::program::{Answer, Ask, Flip, Opening, Place, Reply, Request, Until, VERSION};
use baton_wire::Flow;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bound above all process numbers (Linux, PID_MAX_LIMIT).
const NO_PROCESS: u32 = 1 << 22;

/// File descriptors that registrations leave for clients, besides the agent's reserve.
const FOR_CLIENTS: u64 = 16;

/// What a registration says of a connection.
#[derive(Clone, Copy)]
struct Registration {
    /// Other processes may hold its socket.
    inherited: bool,
    /// The process that has it, of an attacher.
    process: Option<u32>,
}

/// Examines a socket that is to be registered. Returns the ends of its connection.
fn look_at(fd: BorrowedFd<'_>, namespace: u64) -> Result<(SocketAddr, SocketAddr), Refusal> {
    examine::examine(fd, namespace)?;
    match (socket::local_address(fd), socket::peer_address(fd)) {
        (Ok(local), Ok(peer)) => Ok((local, peer)),
        _ => Err(Refusal::NotTcp),
    }
}

fn stayed(refusal: &Refusal) -> Reply {
    Reply::Stayed { reason: refusal.to_string(), transient: false }
}

/// Fails unless a client has the rights of root or of this agent's user. `what` names the refused request.
pub(super) fn only_ours(rights: Option<u32>, what: &str) -> Result<()> {
    if rights != Some(0) && rights != Some(process::user()) {
        anyhow::bail!("only this agent's user and root may {what}");
    }
    Ok(())
}

/// A session's user, its program, and its connections in the kernel and on NICs.
fn present(session: &Session) -> (u32, &str, u32, u32) {
    let connections = session.connections.iter().flatten();
    let (all, nic) = connections.fold((0, 0), |(all, nic), one| (all + 1, nic + u32::from(one.place() == Place::Nic)));
    (session.user, &session.opening.program, all - nic, nic)
}

/// What is counted of programs, from this place in the list on.
fn counted(agent: &mut Agent, from: u32) -> Reply {
    agent.counts.note_connections(agent.sessions.iter().flatten().map(present));
    Reply::Counts(agent.counts.list(from, LISTED_IN_ALL))
}

/// The answer to a request that has begun, or has not: None if it comes later.
fn begun(begun: Result<()>) -> Option<(Reply, Vec<OwnedFd>)> {
    begun.err().map(|error| (Reply::Failed { reason: format!("{error:#}") }, Vec::new()))
}

/// Forgets a connection for its program, and closes the descriptor that came with the request after the socket's.
fn forget(agent: &mut Agent, asker: Asker, number: u32, closed: Option<Foreign>) -> Option<Reply> {
    // Its program notes first that it is closed. If that is not noted, another connection has got the number since: an
    // agent that takes over forgets what is closed by itself, and the request for it may wait for its turn meanwhile.
    if agent.connection_ref(asker.0, number).is_some_and(|other| !other.attached && !other.block.is_closed()) {
        return Some(Reply::Done);
    }
    if let (Some(closed), Some(connection)) = (closed, agent.connection(asker.0, number)) {
        connection.extra().closed = Some(closed);
    }
    agent.forget(asker.0, number, asker)
}

/// Restores the connection with this number of which a child of vfork(2) has sent the socket's descriptor: of the
/// session of its parent, or, since a child of vfork(2) can have one itself, of another one before that.
fn inherit(agent: &mut Agent, asker: Asker, connection: u32, fd: Option<Foreign>) -> Option<(Reply, Vec<OwnedFd>)> {
    const GENERATIONS: usize = 8;
    // Of anything else it is not asked what it is: a file's server may never answer.
    let inode = fd.filter(Foreign::is_socket).and_then(|fd| socket::inode(fd.as_fd()).ok());
    let child = agent.sessions.get(asker.0 as usize).and_then(Option::as_ref).map(|session| session.process);
    let (Some(inode), Some(child)) = (inode, child) else { return Some((Reply::Done, Vec::new())) };
    let ancestors: Vec<_> =
        std::iter::successors(process::parent(child), |&one| process::parent(one)).take(GENERATIONS).collect();
    let is_it = |connection: &Connection| {
        !connection.attached && connection.fd().is_ok_and(|fd| socket::inode(fd).is_ok_and(|other| other == inode))
    };
    let has_it = |session: &Session| {
        ancestors.contains(&session.process)
            && session.connections.get(connection as usize).and_then(Option::as_ref).is_some_and(is_it)
    };
    let reply = match agent.sessions.iter().position(|session| session.as_ref().is_some_and(has_it)) {
        Some(session) => agent.give_back(session as u32, connection, "exec".into(), Until::Alone, asker)?,
        None => Reply::Done,
    };
    Some((reply, Vec::new()))
}

/// Ends what Baton does for a program that runs on without it.
fn withdraw(agent: &mut Agent, number: u32, why: &Native) {
    agent.note_native(number, None, why);
    agent.end_connections(number, false);
    listening::end_those_of(agent, number);
}

/// Gives a client the frames that pass the wires. The answer comes when all NICs have answered.
fn capture(agent: &mut Agent, (number, tag): Asker, bytes: Option<u32>, kernel: bool) -> Result<()> {
    if agent.rights_of(number) != Some(0) {
        anyhow::bail!("only root may look at frames: they are all users'");
    }
    let beside = matches!(agent.shape, Shape::Beside { .. });
    let devices = if kernel && beside { Some(device_frames::open().context("a packet socket")?) } else { None };
    // Beside the kernel its frames do not pass the NICs.
    let wanted = Capture { id: 0, bytes, kernel: kernel && !beside };
    let room = (agent.nics.len(), baton_capture::bytes(agent.settings.nic.workers));
    let id = agent.captures.begin((number, tag), wanted, room, devices).map_err(anyhow::Error::msg)?;
    for (at, nic) in agent.nics.iter_mut().enumerate() {
        for (request, memory) in agent.captures.requests(at, Some(id)) {
            nic.request(request, &[memory], Some(After::Capture(id)));
        }
    }
    Ok(())
}

impl Agent {
    /// Serves one request of a session, or ends the session if its program is gone. Returns whether there was one.
    pub(crate) fn serve(&mut self, number: u32) -> bool {
        self.attend(number);
        let Some(session) = self.sessions.get(number as usize).and_then(Option::as_ref).filter(|session| !session.ends) else {
            return false;
        };
        if foreign::is_stuck(session.user) {
            // What it sends next is not received, so that it need not be closed either.
            self.cut_off.push((number, foreign::STUCK));
            return false;
        }
        let _user = foreign::on_behalf_of(session.user);
        match session.channel.try_receive_foreign::<Request>() {
            Ok((request, _)) if session.has_withdrawn(request.tag) => {
                // The program sees that the agent is there again.
                self.answer(number, request.tag, Reply::Failed { reason: "it was withdrawn".into() }, &[]);
            }
            Ok((request, descriptors)) if session.fetch.is_some() => {
                let reply = self.on_request_while_fetching(number, &request.body, descriptors);
                self.answer(number, request.tag, reply, &[]);
            }
            Ok((request, descriptors)) => {
                let reply = self.on_request(number, request.tag, request.body, descriptors);
                self.moves.suggested.note_request(monotonic_micros());
                if let Some((body, given)) = reply {
                    let given: Vec<BorrowedFd<'_>> = given.iter().map(AsFd::as_fd).collect();
                    self.answer(number, request.tag, body, &given);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                // Whatever its tag is: it is not known, but a program that waits for an answer must get one.
                let reason = "the agent cannot read this request: are program and agent of the same version of Baton?".into();
                let is_open = session.open.is_some() || session.begun.is_some();
                if session.send(&Answer { tag: 0, body: Reply::Failed { reason } }, &[]) == Sent::Full {
                    self.cut_off.push((number, NOT_READING));
                }
                if !is_open {
                    native::note_version(self, number, "");
                }
            }
            Err(_) => {
                self.end_session(number, false);
                return false;
            }
        }
        true
    }

    pub(crate) fn answer(&mut self, number: u32, tag: u32, body: Reply, descriptors: &[BorrowedFd<'_>]) {
        if tag == 0 {
            return;
        }
        if let Some(Some(session)) = self.sessions.get(number as usize)
            && session.send(&Answer { tag, body }, descriptors) == Sent::Full
        {
            self.cut_off.push((number, NOT_READING));
        }
    }

    /// Runs a request. Returns the answer, or None if it comes later.
    pub(crate) fn on_request(
        &mut self,
        number: u32,
        tag: u32,
        ask: Ask,
        descriptors: Vec<Foreign>,
    ) -> Option<(Reply, Vec<OwnedFd>)> {
        let failed = |reason: String| Some((Reply::Failed { reason }, Vec::new()));
        let (ask, mut descriptors) = match self.when_attached((number, tag), ask, descriptors) {
            Ok(request) => request,
            Err(reply) => return reply.map(|reply| (reply, Vec::new())),
        };
        match ask {
            Ask::Open(opening) if opening.version != VERSION => failed(native::refuse_version(self, number, &opening)),
            Ask::Open(opening) => self.open((number, tag), opening, descriptors.pop()).map(|reply| (reply, Vec::new())),
            Ask::Admit => match descriptors
                .pop()
                .and_then(|fd| PeerChannel::from_foreign(fd).ok())
                .map(|channel| self.admit_another(number, channel))
            {
                Some(Ok(true)) => Some((Reply::Done, Vec::new())),
                Some(Ok(false)) => failed("its user may have no other connection to this agent".into()),
                Some(Err(error)) => failed(format!("{error:#}")),
                None => failed("there is no control connection".into()),
            },
            Ask::Group { flip } => Some((self.make_group(number, flip, descriptors.pop()), Vec::new())),
            Ask::Register { process: Some(0 | NO_PROCESS..), .. } => failed("that is no process number".into()),
            Ask::Register { inherited, process } => match descriptors.pop() {
                Some(fd) => {
                    self.register((number, tag), fd, Registration { inherited, process }).map(|reply| (reply, Vec::new()))
                }
                None => failed("a registration needs a descriptor".into()),
            },
            Ask::Move { connection, to } if self.is_attacher(number) => {
                self.move_attached(number, connection, to, descriptors.pop(), (number, tag));
                None
            }
            Ask::Move { connection, to: Place::Nic } if tag == 0 => {
                self.suggest(number, connection);
                None
            }
            Ask::Move { connection, to } => self.request_move(number, connection, to, (number, tag)),
            Ask::Lend { .. } => failed("nobody asked for it".into()),
            Ask::Closed { .. } if !self.is_attacher(number) => failed("only an attacher says so".into()),
            Ask::Closed { connection, abort } => {
                self.close_attached(number, connection, abort, tag).map(|reply| (reply, Vec::new()))
            }
            Ask::Listen
            | Ask::Accept { .. }
            | Ask::Connect { .. }
            | Ask::StopListening { .. }
            | Ask::Datagrams { .. }
            | Ask::Way { .. }
            | Ask::EndDatagrams { .. }
                if !self.may_listen(number) =>
            {
                failed("the NIC makes no connections for this session".into())
            }
            Ask::KeepsFastPath => Some((
                match self.nics[0].lacks_fast_path() {
                    None => Reply::Done,
                    Some(why) => Reply::Stayed { reason: why.into(), transient: false },
                },
                Vec::new(),
            )),
            Ask::MakesConnections => Some((
                match self.can_open() {
                    Ok(()) => Reply::Done,
                    Err(refusal) => Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() },
                },
                Vec::new(),
            )),
            Ask::Listen | Ask::Datagrams { .. } | Ask::Way { .. } | Ask::Reach { .. }
                if self.nics.iter().any(NicProcess::is_behind) =>
            {
                Some((Reply::Stayed { reason: NO_ANSWER.into(), transient: true }, Vec::new()))
            }
            Ask::Listen => match descriptors.pop() {
                Some(fd) => self.listen((number, tag), fd).map(|reply| (reply, Vec::new())),
                None => failed("which socket? its descriptor is missing".into()),
            },
            Ask::Accept { listener } => adoption::accept(self, (number, tag), listener),
            Ask::Connect { peer } => match descriptors.pop() {
                Some(fd) => self.connect((number, tag), fd, peer).map(|reply| (reply, Vec::new())),
                None => failed("which socket? its descriptor is missing".into()),
            },
            Ask::StopListening { listener } => {
                self.stop_listening(number, Some(listener));
                Some((Reply::Done, Vec::new()))
            }
            Ask::Datagrams { rings } => self.take_datagrams((number, tag), rings, descriptors).map(|reply| (reply, Vec::new())),
            Ask::Way { socket, host } => self.find_datagram_way(number, tag, socket, host).map(|reply| (reply, Vec::new())),
            Ask::EndDatagrams { socket, replay } => {
                self.end_datagrams(number, Some(socket), replay, Some(tag)).map(|reply| (reply, Vec::new()))
            }
            Ask::Reach { host } => self.reach(number, tag, host).map(|reply| (reply, Vec::new())),
            Ask::Attachers => Some((Reply::Attachers(self.attachers()), Vec::new())),
            Ask::MoveAny { nic: Some(nic), .. } if nic as usize >= self.nics.len() => failed(self.no_such_nic(nic)),
            Ask::MoveAny { session, connection, to, nic } => {
                let attached = self.is_attacher(session);
                let asker = self.rights_of(number);
                let owner = self.sessions.get(session as usize).and_then(Option::as_ref).map(|session| session.user);
                let may = |owner| session == number || asker == Some(0) || asker == Some(owner);
                match owner {
                    Some(owner) if may(owner) && attached => Some((self.want_at(session, connection, to, nic), Vec::new())),
                    Some(owner) if may(owner) => self.request_move_to(session, connection, to, nic, (number, tag)),
                    Some(_) => failed("that connection belongs to another user".into()),
                    None => failed(format!("there is no session {session}")),
                }
            }
            Ask::Detail { connection } => Some((Listing(self).detail(number, connection), Vec::new())),
            Ask::GiveBack { connection, reason, until } => {
                self.lent(number, connection, descriptors.pop());
                let reply = self.give_back(number, connection, shortened(&reason), until, (number, tag));
                self.return_descriptor(number, connection);
                reply.map(|reply| (reply, Vec::new()))
            }
            Ask::Withdraw { why } => {
                withdraw(self, number, &why);
                self.answer_when_written(number, tag).map(|reply| (reply, Vec::new()))
            }
            Ask::Native { program, why } => {
                self.note_native(number, program.as_deref(), &why);
                Some((Reply::Done, Vec::new()))
            }
            Ask::Inherit { connection } => inherit(self, (number, tag), connection, descriptors.pop()),
            Ask::Goodbye => {
                self.end_connections(number, false);
                self.answer_when_written(number, tag).map(|reply| (reply, Vec::new()))
            }
            Ask::Forget { connection } => {
                forget(self, (number, tag), connection, descriptors.pop()).map(|reply| (reply, Vec::new()))
            }
            Ask::List { from } => Some((Reply::Connections(Listing(self).list(from)), Vec::new())),
            Ask::Describe { connections } => Some((Reply::Connections(Listing(self).describe(&connections)), Vec::new())),
            Ask::Traffic { from } => Some((Reply::Traffic(Listing(self).traffic(from)), Vec::new())),
            Ask::Events { connections } => Some((Reply::Events(Listing(self).events(&connections)), Vec::new())),
            Ask::Counts { from } => Some((counted(self, from), Vec::new())),
            Ask::Statistics => Some((Reply::Statistics(Box::new(Listing(self).count())), Vec::new())),
            Ask::Gain => Some((gain::reply(self.moves.gain.as_ref()), Vec::new())),
            Ask::Offloads { nic } => match self.nics.get(nic as usize) {
                Some(nic) => Some((Reply::Offloads(Box::new(nic.settings().offloads)), Vec::new())),
                None => failed(self.no_such_nic(nic)),
            },
            Ask::Addresses { settled } => self.ask_for_addresses((number, tag), settled).map(|reply| (reply, Vec::new())),
            Ask::Capture { bytes, kernel } => begun(capture(self, (number, tag), bytes, kernel)),
            Ask::SetOffloads { nic, offloads } => begun(self.set_offloads(number, tag, nic, *offloads)),
        }
    }

    /// The user with whose rights a client asks for what concerns others. None: it has only a program's rights, over
    /// its own session. A program keeps its session when it changes its user or its root directory, and nobody is to
    /// find more there than the program has.
    pub(crate) fn rights_of(&self, number: u32) -> Option<u32> {
        let session = self.sessions.get(number as usize)?.as_ref()?;
        (session.open.is_none() || session.opening.attacher).then_some(session.user)
    }

    fn no_such_nic(&self, nic: u32) -> String {
        match self.nics.len() {
            1 => format!("there is no NIC {nic}, only NIC 0 (`--nics` of `baton up` or `baton run` makes more)"),
            nics => format!("there is no NIC {nic}: this Baton has NICs 0 to {}", nics - 1),
        }
    }

    /// Sets a NIC's offloads. The answer comes when they are in force, so that repeated requests do not outrun the NIC.
    fn set_offloads(&mut self, number: u32, tag: u32, nic: u32, offloads: Offloads) -> Result<()> {
        only_ours(self.rights_of(number), "change what the NIC does for the kernel")?;
        offloads.check().map_err(anyhow::Error::msg)?;
        let Some(now) = self.nics.get(nic as usize).map(|nic| nic.settings().offloads) else {
            anyhow::bail!(self.no_such_nic(nic))
        };
        let Offloads { doorbells, limits, during_moves, peer_fin, route_change, .. } = now;
        let elsewhere = Offloads { doorbells, limits, during_moves, peer_fin, route_change, ..offloads };
        if matches!(self.shape, Shape::Beside { .. }) && elsewhere != now {
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
            interface::set_large_sends(self.hardware[0].host.as_fd(), large).context("the interface's large sends")?;
        }
        let (offloads, caller) = (Box::new(offloads), self.caller(number, tag));
        self.nics[nic as usize].request(ToNic::Offloads(offloads.clone()), &[], Some(After::Offloads(offloads, caller)));
        Ok(())
    }

    /// Answers a session that ends when its group's report has been written. Returns the answer if there is no such
    /// file.
    fn answer_when_written(&mut self, number: u32, tag: u32) -> Option<Reply> {
        let group = self.sessions.get(number as usize).and_then(Option::as_ref).map_or(0, |session| session.opening.group);
        if !self.groups.get(group).is_some_and(|group| group.has_file()) {
            return Some(Reply::Done);
        }
        let (calls, caller) = (self.calls.clone(), self.caller(number, tag));
        let answer = move || calls.complete(Box::new(move |agent| agent.answer_caller(caller, Reply::Done, &[])));
        self.groups.write(group, Some(Box::new(answer)));
        None
    }

    fn make_group(&mut self, number: u32, flip: Option<Flip>, file: Option<Foreign>) -> Reply {
        if let Some(Err(reason)) = flip.map(|flip| flip.check()) {
            return Reply::Failed { reason };
        }
        // Anything else could hold the other end of this session's connection, which would then never end.
        if file.as_ref().is_some_and(|file| !file.has_path()) {
            return Reply::Failed { reason: "a report's file is no file in a file system".into() };
        }
        let mut name = [0u8; 8];
        if let Err(error) = process::random(&mut name) {
            return Reply::Failed { reason: format!("no random numbers: {error}") };
        }
        let name = u64::from_ne_bytes(name).max(1);
        if let Some(Err(why)) = file.as_ref().map(|file| self.has_room_for(Some(number), file.as_fd(), FOR_CLIENTS)) {
            return Reply::Failed { reason: format!("a report's file: {why}") };
        }
        let user = self.user_of(number);
        match self.groups.make_room(user, self.users.groups(user)) {
            Ok(ended) => ended.into_iter().for_each(|name| self.keep(&Kept::GroupEnded(name), &[])),
            Err(reason) => return Reply::Failed { reason },
        }
        let kept: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        self.keep(&Kept::Group(name, user, flip), &kept);
        let mut group = Group::new(user, flip, file);
        group.count_as(&mut self.users);
        group.write(None);
        self.groups.add(name, group);
        Reply::Grouped { group: name }
    }

    /// Registers a connection. Returns the answer, or None if it comes later: when its socket has been looked at.
    fn register(&mut self, (number, tag): Asker, fd: Foreign, registration: Registration) -> Option<Reply> {
        let stays = |refusal: Refusal| Some(stayed(&refusal));
        let namespace = self.known.namespace().map_err(|error| examine::system("SO_NETNS_COOKIE", &error));
        let namespace = match self.has_room_for(Some(number), fd.as_fd(), FOR_CLIENTS).and(namespace) {
            Ok(namespace) => namespace,
            Err(refusal) => {
                native::note_unfit(self, number, registration.process, &Native::Refused(refusal.to_string()));
                return stays(refusal);
            }
        };
        let attaches = self.is_attacher(number);
        let process = registration.process.filter(|_| attaches);
        self.on_sent(
            (number, tag),
            (fd, process),
            move |fd| look_at(fd, namespace),
            move |agent, fd, looked| Some(agent.enter(number, fd, looked, registration)),
        )
    }

    /// Enters a connection into its session, whose socket has been looked at.
    fn enter(
        &mut self,
        number: u32,
        fd: Foreign,
        looked: Result<(SocketAddr, SocketAddr), Refusal>,
        Registration { inherited, process }: Registration,
    ) -> Reply {
        let stays = |refusal: Refusal| stayed(&refusal);
        let (local, peer) = match looked {
            Ok(ends) => ends,
            Err(refusal) => {
                if !refusal.is_transient() {
                    native::note_unfit(self, number, process, &Native::Refused(refusal.to_string()));
                }
                return stays(refusal);
            }
        };
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return stays(Refusal::NoRoom) };
        if session.open.is_none() {
            return Reply::Failed { reason: "open the session first".into() };
        }
        if session.opening.messages.is_some() {
            return Reply::Failed { reason: "this session is for messages, open another one for connections".into() };
        }
        let device = socket::device(fd.as_fd()).unwrap_or(0);
        let flow = Flow { local: local.into(), remote: peer.into(), device };
        let Opening { attacher, .. } = session.opening;
        let (user, process) = (session.user, process.filter(|_| attacher).unwrap_or(session.process));
        if attacher {
            let cookie = socket::cookie(fd.as_fd()).unwrap_or_default();
            if let Err(refusal) = self.may_attach(user, process, &flow, cookie) {
                return stays(refusal);
            }
        }
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return stays(Refusal::NoRoom) };
        let Some(open) = &mut session.open else { return stays(Refusal::NoRoom) };
        // Before a number of it is given to another connection.
        memory::give_what_was_left(open);
        // A repeated request, since the first one's agent died: one connection has one entry. Another connection may
        // have the same addresses and ports by another device.
        let identity = Identity { cookie: socket::cookie(fd.as_fd()).unwrap_or_default(), ends: (local, peer) };
        // One that its program has closed is not meant: its number goes to another connection soon.
        let is_known = |known: &&Connection| known.identity().is(&identity) && !known.block.is_closed();
        if let Some(known) = session.connections.with_ends(&flow).find(is_known) {
            return Reply::Registered { connection: known.number() };
        }
        let Some(place) = session.connections.vacant(&open.memory) else { return stays(Refusal::NoRoom) };
        let block = Block::new(open.memory.clone(), place);
        block.begin(Owner::Kernel);
        self.serials += 1;
        let serial = self.serials;
        let mut connection = Connection {
            serial,
            inherited,
            process,
            stays: self.draining,
            attached: attacher,
            cgroup: self.cgroups.of(process),
            ..Connection::new(Some(fd), flow, local, peer, block)
        };
        let cookie = connection.cookie;
        connection.want(false);
        session.connections.put(connection);
        if attacher {
            self.lent(number, place, None);
            self.keep(&Kept::Attached(number, place, process, cookie, local, peer), &[]);
        } else {
            self.keep_connection(number, place);
        }
        self.note_registered(number, place, serial);
        Reply::Registered { connection: place }
    }

    /// Has the keeper hold a connection for the next agent, and when it may be offloaded.
    pub(crate) fn keep_connection(&self, session: u32, number: u32) {
        let found = self.sessions.get(session as usize).and_then(Option::as_ref);
        let found = found.and_then(|session| session.connections.get(number as usize)?.as_ref());
        let Some(connection) = found.filter(|connection| !connection.attached) else { return };
        let until = match (connection.stays, connection.inherited) {
            (true, _) => Until::Never,
            (false, true) => Until::Alone,
            (false, false) => Until::Again,
        };
        if let Ok(fd) = connection.fd() {
            self.keep(&Kept::Connection(session, number, until), &[fd]);
        }
    }

    /// Counts a connection in its session's group, and schedules its first random move if the group has them.
    pub(crate) fn note_registered(&mut self, session: u32, number: u32, serial: u64) {
        let group = self.sessions.get(session as usize).and_then(Option::as_ref).map_or(0, |session| session.opening.group);
        if let Some(group) = self.groups.get(group) {
            group.report.connections += 1;
            if let Some(after) = group.interval() {
                self.schedule.add(monotonic_micros().saturating_add(after), (session, number, serial));
            }
        }
    }

    fn may_listen(&self, session: u32) -> bool {
        self.sessions.get(session as usize).and_then(Option::as_ref).is_some_and(Session::may_listen)
    }

    /// As [`Agent::request_move`], to this NIC, or back to the one that the connection's route leads to.
    fn request_move_to(
        &mut self,
        session: u32,
        number: u32,
        to: Place,
        nic: Option<u32>,
        asker: Asker,
    ) -> Option<(Reply, Vec<OwnedFd>)> {
        let of = self.nic_of(session, number);
        if let Some(connection) = self.connection(session, number) {
            connection.asked_nic = nic.and_then(|nic| u8::try_from(nic).ok());
            let is_elsewhere = nic.is_some_and(|nic| of != Some(nic as usize));
            if to == Place::Nic {
                connection.block.need_not_be_hot();
            }
            if to == Place::Nic && is_elsewhere && connection.stage() == Stage::Nic && !connection.opening {
                let reply = self.settle(session, number, Then::Offload(asker), 0);
                return reply.map(|reply| (reply, Vec::new()));
            }
        }
        self.request_move(session, number, to, asker)
    }

    /// Requests an attacher to move a connection, to this NIC if one is named.
    fn want_at(&mut self, session: u32, number: u32, to: Place, nic: Option<u32>) -> Reply {
        let of = self.nic_of(session, number);
        if let Some(connection) = self.connection(session, number) {
            let is_elsewhere = nic.is_some_and(|nic| of != Some(nic as usize));
            if to == Place::Nic && is_elsewhere && connection.stage() == Stage::Nic {
                let reason = "it is on another NIC, and belongs to an attached program: move it to the kernel first".into();
                return Reply::Stayed { reason, transient: false };
            }
            connection.asked_nic = nic.and_then(|nic| u8::try_from(nic).ok());
            if to == Place::Nic {
                connection.block.need_not_be_hot();
            }
        }
        self.want(session, number, to);
        Reply::Done
    }

    pub(crate) fn request_move(&mut self, session: u32, number: u32, to: Place, asker: Asker) -> Option<(Reply, Vec<OwnedFd>)> {
        if self.sessions.get(session as usize).is_none_or(Option::is_none) {
            return Some((Reply::Failed { reason: format!("there is no session {session}") }, Vec::new()));
        }
        if self.has_many_waiting(session, number) {
            return Some((Reply::Stayed { reason: MANY_WAITING.into(), transient: true }, Vec::new()));
        }
        let Some(connection) = self.connection(session, number) else {
            return Some((Reply::Failed { reason: format!("session {session} has no connection {number}") }, Vec::new()));
        };
        connection.want(to == Place::Nic);
        match (connection.stage(), to) {
            // A mere suggestion does not outweigh the reason for which it leaves.
            (Stage::Nic | Stage::Offloading, Place::Nic) if connection.is_leaving() && asker.1 != 0 => {
                connection.extra().waiting.again.push(asker);
            }
            (Stage::Kernel, Place::Kernel) | (Stage::Nic, Place::Nic) => return Some((Reply::Done, Vec::new())),
            (Stage::Ended, _) => {
                return Some((Reply::Stayed { reason: Refusal::Ended.to_string(), transient: false }, Vec::new()));
            }
            (Stage::Offloading, Place::Nic) => connection.extra().waiting.askers.push(asker),
            (Stage::Offloading, Place::Kernel) if connection.step() < Step::Stolen => {
                self.call_off(session, number);
                return Some((Reply::Done, Vec::new()));
            }
            (Stage::Kernel, Place::Nic) if connection.stays => {
                let reason = format!("it stays in the kernel: {}", connection.reason);
                return Some((Reply::Stayed { reason, transient: false }, Vec::new()));
            }
            (Stage::Kernel, Place::Nic) => self.begin_offload(session, number, Some(asker)),
            // What cannot be called off any more is restored when it is there.
            (Stage::Nic | Stage::Offloading, Place::Kernel) => self.begin_restore(session, number, Some(asker)),
        }
        None
    }
}
