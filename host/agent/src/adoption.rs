//! Takeover by a new agent after one that died: it takes sessions and connections from the keeper, moves that were
//! under way from the journal, and restores every connection to the kernel. The NIC has died with its agent. What the
//! NIC had made and no program has accepted, the next NIC holds. A program whose answer was lost with the connection
//! that it has accepted gets that connection again ([`accept`]).

use crate::agent::Agent;
use crate::block::Block;
use crate::calls::outsider;
use crate::connecting::ABORTED;
use crate::connection::{Asker, Carried, Connection, Memory};
use crate::events::AGENT_DIED;
use crate::fin::ReplayedFin;
use crate::group::{Group, Groups};
use crate::journal::{self, Entry, Made};
use crate::nic::Hardware;
use crate::perform::hand_to_kernel;
use crate::record::{read_image, unpublish};
use crate::session::{NOT_READING, OpenSession, Sent, Session};
use anyhow::{Context, Result};
use baton_abi::Cid;
use baton_abi::layout::{Owner, block, nic, session};
use baton_core::{Adopted, Stage, Users};
use baton_handoff::shell;
use baton_linux::bell::SessionBell;
use baton_linux::control::{Channel, PeerChannel};
use baton_linux::events::monotonic_micros;
use baton_linux::foreign::{self, Foreign};
use baton_linux::{diagnosis, socket};
use baton_log::{error, warning};
use baton_moves::{Event, Move, Phase};
use baton_offloads::Offloads;
use baton_protocol::address::OwnAddress;
use baton_protocol::events::What;
use baton_protocol::keeper::Kept;
use baton_protocol::program::{Reply, Request, Until};
use baton_shm::Region;
use baton_steering::messages_flow;
use baton_supervision::SHORTEST_WAIT;
use baton_wire::{Endpoint, Flow};
use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bound on the stale requests that are read from a control connection: more than one holds.
const MOST_WAITING: usize = 4096;

/// State that the keeper hands over.
#[derive(Default)]
pub(crate) struct Inherited(Vec<(Kept, Vec<OwnedFd>)>);

impl Inherited {
    /// Receives everything that the keeper holds.
    pub fn receive(keeper: &Channel) -> Result<Inherited> {
        let mut inherited = Inherited::default();
        loop {
            let (kept, descriptors) = keeper.receive::<Kept>().context("hearing from the keeper")?;
            if kept == Kept::Ready {
                return Ok(inherited);
            }
            inherited.0.push((kept, descriptors));
        }
    }

    /// Takes the devices to which the programs beside the kernel are attached, with their links.
    pub fn devices(&mut self) -> HashMap<u32, Vec<OwnedFd>> {
        let devices = self.0.iter_mut();
        devices
            .filter_map(|(kept, links)| if let Kept::Device(index) = kept { Some((*index, std::mem::take(links))) } else { None })
            .collect()
    }

    /// Whether shutdown was requested.
    pub fn draining(&self) -> bool {
        self.0.iter().any(|(kept, _)| *kept == Kept::Ending)
    }

    /// The offloads that a NIC was last set to do for the kernel.
    pub fn offloads(&self, nic: usize) -> Option<Offloads> {
        self.0.iter().find_map(|(kept, _)| match kept {
            Kept::Offloads(of, offloads) if *of == nic => Some(**offloads),
            _ => None,
        })
    }

    /// Moves the groups into `groups`.
    pub fn take_groups(&mut self, groups: &mut Groups, users: &mut Users) {
        for (kept, descriptors) in &mut self.0 {
            if let Kept::Group(name, user, flip) = kept {
                let mut group = Group::new(*user, *flip, descriptors.pop().map(Foreign::from));
                group.count_as(users);
                groups.add(*name, group);
            }
        }
    }

    /// Takes the addresses of the NIC's that the kernel has.
    pub fn take_addresses(&mut self) -> Vec<(OwnAddress, u32, Option<OwnedFd>)> {
        let taken = self.0.extract_if(.., |(kept, _)| matches!(kept, Kept::Address(..)));
        let address = |(kept, mut descriptors): (Kept, Vec<OwnedFd>)| match kept {
            Kept::Address(address, interface) => Some((address, interface, descriptors.pop())),
            _ => None,
        };
        taken.filter_map(address).collect()
    }

    /// Takes the listeners whose connections the NIC made.
    fn take_listeners(&mut self) -> Vec<(Kept, Vec<OwnedFd>)> {
        self.0.extract_if(.., |(kept, _)| matches!(kept, Kept::Listener(..))).collect()
    }

    /// Returns the sessions by number, with their connections in the kernel; those that cannot be taken over are left
    /// out. `journaled` are the ends of the connections that were between two owners.
    fn sessions(self, journaled: &Journaled) -> BTreeMap<u32, Session> {
        let (mut sessions, ends) = (BTreeMap::new(), OnceCell::new());
        for (kept, descriptors) in self.0 {
            let name = kept.clone();
            if let Err(error) = take_in(&mut sessions, kept, descriptors, &ends, journaled) {
                error!(
                    [] "{name:?} of the last agent is lost: {error:#}";
                    "start the program that it belongs to again"
                );
            }
        }
        sessions
    }
}

/// Addresses of connections and of their peers, by session and number.
type Journaled = HashMap<(u32, u32), (SocketAddr, SocketAddr)>;

/// The ends of the connections that are in the journals in the NICs' memories. The dead agent may have been making a
/// socket a shell, or a connection again: for a moment it has no peer.
fn journaled(hardware: &[Hardware], slots: u32) -> Journaled {
    let entries = hardware.iter().enumerate().flat_map(|(nic, hardware)| {
        let used = journal::slots_used(&hardware.memory, slots);
        (0..used).filter_map(move |at| journal::read(&hardware.memory, nic, at))
    });
    let ends = |flow: Flow| (address(flow.local, flow.device), address(flow.remote, flow.device));
    entries.filter_map(|(_, entry)| Some(((entry.session, entry.connection), ends(entry.flow?)))).collect()
}

/// The ends of all connections of the host, by their sockets' cookies; looked up when they are needed.
type Ends = OnceCell<HashMap<u64, (SocketAddr, SocketAddr)>>;

/// The address of a socket and its peer's, as far as it has them. Of one whose lock others may hold they are asked for
/// without it.
fn ends_of(fd: BorrowedFd<'_>, session: Option<&Session>, ends: &Ends) -> (Option<SocketAddr>, Option<SocketAddr>) {
    let held = session.is_some_and(|session| outsider(session.user, session.process, Some(fd)).is_some());
    if !held {
        return (socket::local_address(fd).ok(), socket::peer_address(fd).ok());
    }
    let all = ends.get_or_init(|| diagnosis::with_own(diagnosis::all_ends).unwrap_or_default());
    let found = socket::cookie(fd).ok().and_then(|cookie| all.get(&cookie));
    // One that has no connection any more needs no address.
    let local = found.map_or(SocketAddr::from(([0; 4], 0)), |(local, _)| *local);
    (Some(local), found.map(|(_, peer)| *peer))
}

/// Adds one of the things that the keeper holds to the sessions.
fn take_in(
    sessions: &mut BTreeMap<u32, Session>,
    kept: Kept,
    descriptors: Vec<OwnedFd>,
    ends: &Ends,
    journaled: &Journaled,
) -> Result<()> {
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().context("the keeper lost its descriptor");
    match kept {
        Kept::Session(number) => {
            let channel = PeerChannel::from_foreign(Foreign::from(next()?))?;
            sessions.insert(number, Session::new(channel)?);
        }
        Kept::Memory(number, opening) => {
            let memory = Arc::new(Region::map(next()?)?);
            let bell = SessionBell::from_fd(next()?);
            let socket = if opening.messages.is_some() { Some(Arc::new(Foreign::from(next()?))) } else { None };
            let further = descriptors.map(SessionBell::from_fd).collect();
            if let Some(session) = sessions.get_mut(&number) {
                session.open = Some(OpenSession { socket, further, ..OpenSession::with_memory(memory, bell) });
                session.opening = opening;
            }
        }
        Kept::Connection(of, number, until) => {
            let fd = Foreign::from(next()?);
            let names = ends_of(fd.as_fd(), sessions.get(&of), ends);
            let Some(session) = sessions.get_mut(&of) else { return Ok(()) };
            let process = session.process;
            let ends = match names {
                (Some(local), Some(peer)) => (local, peer),
                (local, _) => journaled.get(&(of, number)).copied().unwrap_or_else(|| ended_at(local)),
            };
            let connection = adopt(session, number, Some(fd), process, ends);
            if let Some(connection) = connection {
                (connection.stays, connection.inherited) = (until == Until::Never, until == Until::Alone);
            }
        }
        Kept::Attached(of, number, process, cookie, local, peer) => {
            if let Some(session) = sessions.get_mut(&of)
                && let Some(connection) = adopt(session, number, None, process, (local, peer))
            {
                connection.cookie = cookie;
            }
        }
        _ => {}
    }
    Ok(())
}

/// The ends of a connection that has ended, on the NIC or by a reset: it has no peer any more, and no frames of it are
/// sent. But its number, block and memory are its program's until that has closed it: nobody else may get them.
fn ended_at(local: Option<SocketAddr>) -> (SocketAddr, SocketAddr) {
    let local = local.unwrap_or_else(|| SocketAddr::from(([0; 4], 0)));
    (local, local)
}

/// An endpoint as a socket's address, of a connection by this device or, with 0, by any.
fn address(endpoint: Endpoint, device: u32) -> SocketAddr {
    let mut address = SocketAddr::from(endpoint);
    if let SocketAddr::V6(v6) = &mut address
        && v6.ip().is_unicast_link_local()
    {
        v6.set_scope_id(device);
    }
    address
}

fn adopt(
    session: &mut Session,
    number: u32,
    fd: Option<Foreign>,
    process: u32,
    (local, peer): (SocketAddr, SocketAddr),
) -> Option<&mut Connection> {
    let open = session.open.as_ref()?;
    let block = Block::new(open.memory.clone(), number);
    // That of one that is on a NIC is in the NIC's memory, too, as it was when it went there.
    let device = fd.as_ref().and_then(|fd| socket::device(fd.as_fd()).ok()).unwrap_or(0);
    let flow = Flow { local: local.into(), remote: peer.into(), device };
    let reason = AGENT_DIED.into();
    let mut connection =
        Connection { reason, process, attached: session.opening.attacher, ..Connection::new(fd, flow, local, peer, block) };
    connection.inherit_wish();
    session.connections.put(connection);
    session.connections.get_mut(number as usize)?.as_mut()
}

/// A connection that a program was given when it accepted one, and that it has not received.
enum Given {
    /// Its number and its descriptor.
    Again(u32, OwnedFd),
    /// A call is made on its socket: its descriptor is away.
    Held,
}

/// Looks for the connection that a session's program was given last when it accepted one, and has not received: an
/// agent has died with the answer, or has carried out a request that the program repeats. There is one at most, since a
/// program asks again only when it has the answer, or when that is lost. What it writes into its memory may name any
/// connection of its own, whose descriptor it has already.
fn given_before(agent: &mut Agent, session: u32) -> Option<Given> {
    let open = agent.sessions.get(session as usize)?.as_ref()?.open.as_ref()?;
    let number = open.given()?;
    let may_be_given = |one: &&Connection| !one.attached && !one.opening && !one.block.is_closed();
    let Some(connection) = agent.connection_ref(session, number).filter(may_be_given) else {
        // The agent died before the keeper had it: the client's next segment makes it anew, as from a SYN cookie.
        open.note_given(None);
        return None;
    };
    let Ok(fd) = connection.fd() else { return Some(Given::Held) };
    // Ours: an agent has made it. Where a program's memory names another one, the agent keeps that one's descriptor, so
    // that this is not the last.
    if let Ok(fd) = fd.try_clone_to_owned() {
        return Some(Given::Again(number, fd));
    }
    // No program will ever have it.
    open.note_given(None);
    connection.block.note_closed(true);
    let _ = agent.forget(session, number, (session, 0));
    None
}

/// Gives a session's program a connection of a listener: the one that it was given before and has not received,
/// whatever has become of the listener since, or the next one. None if the answer comes later.
pub(crate) fn accept(agent: &mut Agent, (session, tag): Asker, listener: u32) -> Option<(Reply, Vec<OwnedFd>)> {
    match given_before(agent, session) {
        None => Some(agent.accept_made(session, listener)),
        Some(Given::Again(connection, fd)) => Some((Reply::Accepted { connection }, vec![fd])),
        Some(Given::Held) => {
            // In place of an earlier one, whose answer the program does not wait for any more.
            let caller = agent.caller(session, tag);
            agent.listeners.repeated.insert(session, caller);
            None
        }
    }
}

/// Answers the requests that have waited for the descriptors of connections which were given before. Called when calls
/// on sockets have returned.
pub(crate) fn accept_what_was_held(agent: &mut Agent) {
    for (session, caller) in std::mem::take(&mut agent.listeners.repeated) {
        let name = caller.map_or(0, |(_, name, _)| name);
        if agent.named_session((session, name)).is_none_or(|session| session.ends) {
            continue;
        }
        agent.attend(session);
        match given_before(agent, session) {
            Some(Given::Again(connection, fd)) => agent.answer_caller(caller, Reply::Accepted { connection }, &[fd.as_fd()]),
            Some(Given::Held) => _ = agent.listeners.repeated.insert(session, caller),
            None => agent.answer_caller(caller, Reply::Stayed { reason: "it has gone".into(), transient: true }, &[]),
        }
        agent.clear_attended();
    }
}

/// Reserves the memory in which a connection's bytes are by the journal, until the connection gives it back. False if
/// it is none of the session's.
fn keep_memory(open: &mut OpenSession, connection: &mut Connection, entry: &Entry) -> bool {
    let of_session = entry.on_nic().filter(|(on_nic, _)| on_nic.memory().fits(&open.memory));
    let Some((on_nic, handoff)) = of_session else { return false };
    for (offset, size) in [on_nic.memory().receive, on_nic.memory().send] {
        let _ = open.heap.reserve(offset, size);
    }
    connection.enter_nic(on_nic, handoff);
    true
}

/// Clears the steering of what the dead agent's NICs had and nobody has any more: connections that they were opening,
/// or of which the keeper does not know, and listeners, some of which may be the kernel's now.
fn clear_steering(agent: &mut Agent) {
    let Agent { sessions, shape, listeners, .. } = agent;
    let connections = sessions.iter().flatten().flat_map(|session| session.connections.iter().flatten());
    let messages = sessions.iter().flatten().filter_map(|session| session.opening.messages.as_ref());
    let flows = connections.map(|connection| connection.flow);
    let owned: HashSet<Flow> = flows.chain(messages.map(|messages| messages_flow(messages.address.into()))).collect();
    let ends = listeners.ends();
    shape.keep_only(&owned, |local| ends.accept_at(local));
}

impl Agent {
    /// Takes over what a dead agent has left. Afterwards every connection is in the kernel, and every program can send
    /// requests again.
    pub(crate) fn take_over(&mut self, mut inherited: Inherited) -> Result<()> {
        inherited.take_groups(&mut self.groups, &mut self.users);
        self.begin_addresses(inherited.take_addresses());
        let listeners = inherited.take_listeners();
        for (number, mut session) in inherited.sessions(&journaled(&self.hardware, self.settings.nic.slots as u32)) {
            self.watch(number, &session)?;
            // An earlier agent may have had higher limits.
            let _ = self.users.connects(session.user, u64::MAX, 0);
            session.connections.count_as(self.users.take(session.user, 0));
            if session.open.is_some() {
                let _ = self.users.opens(session.user);
                self.groups.joined(session.opening.group);
            }
            self.sessions.put(number, session);
        }
        for (kept, descriptors) in listeners {
            let Kept::Listener(id, ..) = kept else { continue };
            if self.inherit_listener(kept, descriptors).is_none() {
                warning!(
                    [] "a listener of the last agent is lost: the kernel makes its connections";
                    "to have the NIC make them start its program again"
                );
                self.keep(&Kept::ListenerGone(id), &[]);
            }
        }
        self.schedule_again();
        self.fetch_what_was_moving();
        for nic in 0..self.nics.len() {
            self.resume_moves_of(nic);
        }
        for session in self.sessions.iter_mut().flatten() {
            session.keep_what_has_ended();
        }
        let any = self.sessions.iter().flatten().any(|session| session.open.is_some());
        clear_steering(self);
        for nic in 0..self.nics.len() {
            if any {
                self.replace_nic(nic)?;
            } else {
                self.give_addresses_to_nic();
                self.nics[nic].let_frames_flow();
            }
        }
        // A move that had come no further than mirroring leaves no entry.
        let connections = self.sessions.iter().flatten().flat_map(|session| session.connections.iter().flatten());
        let settled = connections.filter(|connection| connection.goal().is_none());
        settled.for_each(|connection| self.shape.unsteer(&connection.flow));
        self.forget_what_was_closing();
        self.let_programs_in();
        for (session, number) in self.all_connections() {
            if self.connection(session, number).is_some_and(|connection| connection.goes_by_itself(false)) {
                self.look_again(session, number, SHORTEST_WAIT);
            }
        }
        self.clear_attended();
        Ok(())
    }

    /// Continues the moves that are in the journal in a NIC's memory, and finds the connections that wait to be
    /// accepted.
    fn resume_moves_of(&mut self, nic: usize) {
        let memory = self.hardware[nic].memory.clone();
        for at in 0..journal::slots_used(&memory, self.settings.nic.slots as u32) {
            match journal::read(&memory, nic, at) {
                Some((phase, entry)) => {
                    self.attend(entry.session);
                    self.resume(phase, entry);
                }
                None => {
                    // A record that is there is of an earlier occupant.
                    unpublish(&memory, at);
                    if let Some(Made { cid, listener, by_cookie }) = journal::made(&memory, nic, at) {
                        self.made(cid, listener, by_cookie);
                    }
                }
            }
        }
    }

    /// Schedules the next random move of connections whose groups have them.
    fn schedule_again(&mut self) {
        for (at, session) in self.sessions.iter_mut().enumerate() {
            let Some(session) = session else { continue };
            self.hardware[0].memory.word32(nic::ATTENDED).store(at as u32 + 1, Ordering::Relaxed);
            for connection in session.connections.iter_mut().flatten() {
                self.serials += 1;
                connection.serial = self.serials;
                connection.cgroup = self.cgroups.of(connection.process);
                if let Some(after) = self.groups.get(session.opening.group).and_then(Group::interval) {
                    let key = (at as u32, connection.number(), connection.serial);
                    self.schedule.add(monotonic_micros().saturating_add(after), key);
                }
            }
        }
    }

    /// Continues a move from the phase in the journal. Connections that the NIC had wait for the next NIC.
    fn resume(&mut self, phase: Phase, entry: Entry) {
        let (cid, at) = (Cid(entry.cid), (entry.session, entry.connection));
        let memory = self.hardware[cid.nic()].memory.clone();
        let image = read_image(&memory, cid).ok();
        let finished = image.is_some_and(|image| image.state.fin_acknowledged());
        // Without its connection an entry is of no use, and must not be taken for one of a later connection that has
        // the same numbers.
        let session = self.sessions.get_mut(at.0 as usize).and_then(Option::as_mut);
        let Some(session) = session else { return journal::clear(&memory, cid) };
        let Some(open) = session.open.as_mut() else { return journal::clear(&memory, cid) };
        let Some(Some(connection)) = session.connections.get_mut(at.1 as usize) else { return journal::clear(&memory, cid) };
        connection.flow.device = entry.device();
        connection.events.note(monotonic_micros(), What::AgentDied, Some(cid.nic() as u8), None, 0);
        let Adopted { machine, keeps_memory, at_once } = Adopted::at(phase, finished);
        let has_memory = keeps_memory && keep_memory(open, connection, &entry);
        if phase == Phase::Copied {
            if !has_memory {
                return journal::clear(&memory, cid);
            }
        } else {
            connection.extra().carried = Some(Box::new(Carried { entry: Some(entry), ..Carried::default() }));
        }
        if phase == Phase::Sending {
            connection.expect_fin(image.and_then(ReplayedFin::of));
        }
        connection.set_machine(machine);
        connection.cid = Some(cid);
        // Its slot is taken until it has been restored.
        self.nics[cid.nic()].withhold(cid);
        if at_once {
            self.drive(at.0, at.1, Event::Tick);
        }
    }

    /// Reopens connections that a dead agent had closed to their programs, and notifies programs that their requests
    /// were lost.
    fn let_programs_in(&mut self) {
        for number in 0..self.sessions.len() as u32 {
            if !self.is_let_in_later(number) {
                self.let_program_in(number);
            }
        }
    }

    /// The same for one session.
    pub(crate) fn let_program_in(&mut self, number: u32) {
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
        if let Some(open) = &session.open {
            for connection in session.connections.iter_mut().flatten() {
                if connection.stage() == Stage::Kernel && connection.block.load(block::OWNER) != Owner::Kernel as u32 {
                    hand_to_kernel(open, connection);
                }
            }
        }
        // Programs repeat earlier requests: all that they sent before the count below. One that comes in between is
        // carried out and repeated. The bound keeps a program that goes on sending requests from being served before
        // others.
        for _ in 0..MOST_WAITING {
            if session.channel.try_receive_foreign::<Request>().is_err_and(|error| error.kind() != io::ErrorKind::InvalidData) {
                break;
            }
        }
        let mut starts = 1;
        if let Some(open) = &session.open {
            starts = open.memory.word32(session::AGENT_STARTS).fetch_add(1, Ordering::AcqRel) + 1;
            open.announce_move(session::ANY);
        }
        if session.report_restart(starts) == Sent::Full {
            self.cut_off.push((number, NOT_READING));
        }
    }
}

impl Session {
    /// Whether a connection is on the NIC according to its block. Without a journal entry it has ended there.
    fn has_ended(&self, number: u32) -> bool {
        let owner = |open: &OpenSession| Block::new(open.memory.clone(), number).load(block::OWNER);
        self.open.as_ref().is_some_and(|open| owner(open) == Owner::Nic as u32)
    }

    /// Reserves the memory of connections that had ended on the NIC, in which their programs have unread bytes. Only
    /// the program still knows where it is; its block is believed only as far as the memory is not another's.
    fn keep_what_has_ended(&mut self) {
        for number in 0..self.connections.len() as u32 {
            if !self.has_ended(number) {
                continue;
            }
            let (Some(open), Some(connection)) = (self.open.as_mut(), self.connections[number as usize].as_mut()) else {
                continue;
            };
            if connection.stage() != Stage::Kernel {
                continue;
            }
            let word = |field| connection.block.load(field);
            let receive = (word(block::RECEIVE_BASE), word(block::RECEIVE_SIZE));
            let send = (word(block::SEND_BASE), word(block::SEND_SIZE));
            if open.heap.reserve(receive.0, receive.1) {
                if open.heap.reserve(send.0, send.1) {
                    open.ended.insert(number, Memory { receive, send });
                } else {
                    open.heap.give(receive.0, receive.1);
                }
            }
            if word(block::FLAGS) & block::FLAG_OPENING != 0 {
                // Only the dead agent knew where to.
                connection.block.store(block::ERROR, ABORTED);
                connection.block.set_flags(0);
                connection.block.store(block::MOVES, word(block::MOVES).wrapping_add(1));
            }
            connection.set_machine(Move::ended());
            if let Some(fd) = &connection.fd {
                match outsider(self.user, self.process, Some(fd.as_fd())) {
                    None => _ = shell::end(fd.as_fd()),
                    Some(user) => {
                        if let Ok(fd) = Foreign::duplicate(fd.as_fd()) {
                            foreign::call_for(user, move || _ = shell::end(fd.as_fd()));
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;
    use baton_handoff::shell::Saved;
    use baton_image::Image;

    /// A next agent that looks elsewhere than the last one for the heap, or for a NIC's rings, slots and posted
    /// buffers, would write into what others have there: whoever moves them changes the version.
    #[test]
    fn a_layout_that_differs_is_another_versions() {
        use baton_abi::layout::scratch;
        let of_nic = (nic::COMMANDS, nic::SLOT_BYTES, scratch::POSTS, scratch::POSTS_BYTES);
        assert_eq!((baton_protocol::VERSION, session::HEAP, of_nic), (12, 1_687_552, (16_384, 448, 2816, 512)));
    }

    /// The bytes of a connection that a dead agent was moving are nobody else's until the connection gives their memory
    /// back.
    #[test]
    fn memory_with_bytes_is_kept() {
        const SIZE: u32 = 1 << 14;
        let (mut open, _) = OpenSession::new(4 * session::HEAP, 1).expect("memory");
        let all = open.heap.free_bytes();
        let [receive, send] = [(); 2].map(|()| open.heap.take(SIZE).expect("a block"));
        // As the next agent begins.
        [receive, send].into_iter().for_each(|(offset, size)| open.heap.give(offset, size));
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 1000), device: 0 };
        let block = Block::new(open.memory.clone(), 0);
        let mut connection = Connection::new(None, flow, flow.local.into(), flow.remote.into(), block);
        let entry = |memory| Entry::new(0, 0, Cid::new(1, 1), Saved::default()).copied(&Image::open(flow), memory, 1);
        assert!(!keep_memory(&mut open, &mut connection, &entry(Memory { receive: (0, SIZE), send })));
        assert_eq!(open.heap.free_bytes(), all, "it is not the session's");
        assert!(keep_memory(&mut open, &mut connection, &entry(Memory { receive, send })));
        assert_eq!(open.heap.free_bytes(), all - 2 * u64::from(SIZE));
        memory::give(&mut open, connection.leave_nic().expect("memory"));
        assert_eq!(open.heap.free_bytes(), all);
    }
}
