//! Listening sockets whose connections the NIC makes, and these connections until a program accepts them.
//!
//! The program's listening socket stays the kernel's, so that the port is taken there, and the kernel serves clients
//! whenever the NIC does not. The NIC makes connections in slots that it was granted: as many as the accept queue has
//! room for. Programs learn of them by a socket, from which they read one byte for each connection before they ask for
//! it ([`Ask::Accept`]); several processes may share a listener, and its queue.

mod granting;
mod share;
#[cfg(test)]
mod tests;
mod unaccepted;

pub(crate) use self::unaccepted::{end_all, end_those_of};

use self::unaccepted::Fate;
use crate::agent::Agent;
use crate::answers::{After, Caller, NO_ANSWER};
use crate::block::Block;
use crate::connection::{Asker, Connection, Exported, Handoff, OnNic};
use crate::ground::Ground;
use crate::journal::{self, Entry, Made};
use crate::listened::Steered;
use crate::memory::{self, Limits};
use crate::nic::NicProcess;
use crate::nic_requests::Answered;
use crate::numbers::{Numbers, turn};
use crate::record::read_image;
use crate::session::Session;
use crate::way::Way;
use baton_abi::layout::Owner;
use baton_abi::{Cid, Control, Message, Operation};
use baton_core::Taken;
use baton_handoff::examine::system;
use baton_handoff::listening::Listening;
use baton_handoff::{export, shell};
use baton_image::Image;
use baton_linux::events::monotonic_micros;
use baton_linux::foreign::Foreign;
use baton_linux::netlink::Netlink;
use baton_linux::{diagnosis, rtnetlink};
use baton_log::{error, info, warning};
use baton_moves::{Event, Move, Phase, Refusal, Step};
use baton_protocol::keeper::Kept;
use baton_protocol::nic::{Listen, ToNic};
use baton_protocol::program::{Place, Reply, Until};
use baton_steering::Steer;
use baton_wire::Flow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

#[cfg(doc)]
use baton_protocol::program::Ask;

/// Longest accept queue of a listener on the NIC.
const MOST_WAITING: usize = 128;

/// Time to live of the answers to SYNs, until the connection has a socket (Linux's default).
const TTL: u8 = 64;

/// A connection that the NIC has made, and that no program has accepted.
struct Waiting {
    cid: Cid,
    image: Image,
}

/// A program that waits until a listener is served.
struct Waits {
    caller: Caller,
    /// Its session has no part in the listener yet: it has no queue. Otherwise the socket's options have changed.
    joins: bool,
}

/// A listener.
struct Listener {
    listening: Listening,
    limits: Limits,
    /// The agent's end of the queue's socket, and the programs'.
    ours: UnixStream,
    theirs: OwnedFd,
    /// These two descriptors, counted as those of the user who had the listener first.
    _taken: Taken,
    /// The sessions that may accept; and when the last one left, microseconds of the monotonic clock.
    sessions: BTreeSet<u32>,
    left_at: u64,
    /// Slots in which the NIC may make connections.
    granted: Vec<Cid>,
    /// It may have fewer than its accept queue has room for: its NIC had no slot, or no room for the command, or has
    /// refused one.
    lacks_slots: bool,
    waiting: VecDeque<Waiting>,
    /// The NICs that are to serve it, and those that do.
    wanted: BTreeSet<usize>,
    served: BTreeSet<usize>,
    /// The control groups of its programs.
    groups: Vec<crate::cgroups::Name>,
    /// Requests about it that each NIC has not answered.
    unanswered: BTreeMap<usize, u32>,
    /// Programs that wait until it is served.
    waits: Vec<Waits>,
    /// Where, and by which NIC; and where it is to be as soon as the NICs have answered.
    steered: Steered,
    next_steered: Steered,
}

impl Listener {
    fn new(listening: Listening, limits: Limits, ours: UnixStream, theirs: OwnedFd) -> Listener {
        Listener {
            listening,
            limits,
            ours,
            theirs,
            _taken: Taken::default(),
            sessions: BTreeSet::new(),
            left_at: 0,
            granted: Vec::new(),
            lacks_slots: false,
            waiting: VecDeque::new(),
            wanted: BTreeSet::new(),
            served: BTreeSet::new(),
            unanswered: BTreeMap::new(),
            waits: Vec::new(),
            groups: Vec::new(),
            steered: Steered::new(),
            next_steered: Steered::new(),
        }
    }

    /// Whether a NIC has answered all requests about it.
    fn has_answer(&self, nic: usize) -> bool {
        self.unanswered.get(&nic).is_none_or(|count| *count == 0)
    }

    /// Whether a connection with this cid waits to be accepted.
    fn has_waiting(&self, cid: Cid) -> bool {
        self.waiting.iter().any(|waiting| waiting.cid == cid)
    }

    /// Counts a request.
    fn asks(&mut self, nic: usize) {
        *self.unanswered.entry(nic).or_default() += 1;
    }

    /// Counts an answer.
    fn hears(&mut self, nic: usize) {
        self.unanswered.entry(nic).and_modify(|count| *count = count.saturating_sub(1));
    }
}

/// The listeners by number.
pub(crate) struct Listeners {
    by_id: BTreeMap<u32, Listener>,
    numbers: Numbers,
    /// Slots that were granted to a NIC which has been asked to serve a listener no longer, and has not answered.
    revoked: BTreeSet<u32>,
    /// The listener with which the next turn of those that lack slots begins.
    lacking_from: u32,
    /// Requests for a connection that wait for the descriptor of the one that was given before, by session: see
    /// [`crate::adoption::accept`].
    pub repeated: BTreeMap<u32, Caller>,
}

impl Listeners {
    pub fn new() -> Listeners {
        Listeners {
            by_id: BTreeMap::new(),
            numbers: Numbers::new(),
            revoked: BTreeSet::new(),
            lacking_from: 0,
            repeated: BTreeMap::new(),
        }
    }

    /// [`share::left`]. A connection that no program has accepted counts: its listener gets a slot again when one does.
    fn left(&self, nics: usize, slots: usize) -> Vec<usize> {
        let granted = self.by_id.values().flat_map(|listener| &listener.granted).copied();
        let made = self.by_id.values().flat_map(|listener| &listener.waiting).map(|waiting| waiting.cid);
        let taken = granted.chain(made).chain(self.revoked.iter().map(|cid| Cid(*cid)));
        // Few have less than that, whatever they have: it is not counted for each connection.
        let most = self.by_id.len() * MOST_WAITING + self.revoked.len();
        share::left(nics, slots, taken.map(|cid| cid.nic()).take(if most > slots / 4 { usize::MAX } else { 0 }))
    }
}

fn stayed(refusal: &Refusal) -> Reply {
    Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() }
}

impl Agent {
    /// Makes the NIC serve a listening socket for a session's program. None if the answer comes when it does.
    pub(crate) fn listen(&mut self, asker: Asker, fd: Foreign) -> Option<Reply> {
        self.on_sent(asker, (fd, None), Listening::read, move |agent, fd, read| {
            let refusal = read.and_then(|listening| agent.begin_listening(asker, fd.as_fd(), listening)).err()?;
            let session = agent.sessions.get(asker.0 as usize).and_then(Option::as_ref);
            let program = session.map_or("", |session| &session.opening.program);
            info!([session = asker.0] "the kernel makes the connections of a listener of {program}: {refusal}");
            Some(stayed(&refusal))
        })
    }

    fn begin_listening(&mut self, (session, tag): Asker, fd: BorrowedFd<'_>, listening: Listening) -> Result<(), Refusal> {
        self.can_open()?;
        let limits = Limits::of(fd, &mut self.known);
        let known = self.listeners.by_id.iter().find(|(_, listener)| listener.listening.cookie == listening.cookie);
        let id = match known.map(|(id, _)| *id) {
            Some(id) => id,
            None => {
                self.has_room_for(Some(session), fd, 2)?;
                let its = self.listeners.by_id.values().filter(|listener| listener.sessions.contains(&session));
                if its.count() >= share::MAX_LISTENERS {
                    return Err(Refusal::NoRoom);
                }
                // Ours: programs may only read from their end, so that no descriptors can be in either queue.
                let (ours, theirs) = UnixStream::pair().map_err(|error| system("socketpair", &error))?;
                ours.set_nonblocking(true).map_err(|error| system("fcntl", &error))?;
                ours.shutdown(Shutdown::Read).map_err(|error| system("shutdown", &error))?;
                let user = self.user_of(session);
                let taken = self.users.take(user, 2);
                let listener = Listener { _taken: taken, ..Listener::new(listening.clone(), limits, ours, theirs.into()) };
                let Listeners { by_id, numbers, .. } = &mut self.listeners;
                let id = numbers.next(|id| by_id.contains_key(&id));
                by_id.insert(id, listener);
                id
            }
        };
        let Some(listener) = self.listeners.by_id.get_mut(&id) else { return Err(Refusal::NoRoom) };
        (listener.listening, listener.limits) = (listening, limits);
        unaccepted::recount_if_unhad(listener);
        let joins = listener.sessions.insert(session);
        if let Err(refusal) = self.serve_listener(id) {
            if joins {
                self.stop_listening(session, Some(id));
            }
            return Err(refusal);
        }
        let waits = Waits { caller: self.caller(session, tag), joins };
        self.listeners.by_id.entry(id).and_modify(|listener| listener.waits.push(waits));
        self.keep_listener(id);
        Ok(())
    }

    /// Handles a NIC's answer to the request to serve a listener; None when it is late. When all have answered, clients
    /// come to the NICs, and the programs that wait for that are answered.
    pub(crate) fn listener_answered(&mut self, id: u32, nic: usize, answer: Option<Answered>) {
        let Some(listener) = self.listeners.by_id.get_mut(&id) else { return };
        let Some(answer) = answer else {
            return self.refuse_waiting(id, &Reply::Stayed { reason: NO_ANSWER.into(), transient: true });
        };
        listener.hears(nic);
        // A later request decides: the next NIC has got one, or the listener was taken from this one.
        if !listener.has_answer(nic) || !listener.wanted.contains(&nic) {
            return;
        }
        if answer.is_err() {
            return self.withdraw(id);
        }
        listener.served.insert(nic);
        if !listener.wanted.iter().all(|nic| listener.has_answer(*nic)) {
            return;
        }
        let next = listener.next_steered.clone();
        if let Err(refusal) = self.shape.serve(&listener.steered, &next) {
            info!([nic = nic] "the kernel makes the connections of a listener: {refusal}");
            return self.withdraw(id);
        }
        listener.steered = next;
        granting::grant(self, id);
        self.answer_waiting(id);
    }

    /// Gives the programs that wait for a listener its queue.
    fn answer_waiting(&mut self, id: u32) {
        let Some(listener) = self.listeners.by_id.get_mut(&id) else { return };
        let theirs = match listener.theirs.try_clone() {
            Ok(theirs) => theirs,
            Err(error) => return self.refuse_waiting(id, &stayed(&system("dup", &error))),
        };
        let waits = std::mem::take(&mut listener.waits);
        self.keep_listener(id);
        for waits in waits {
            self.answer_caller(waits.caller, Reply::Listening { listener: id }, &[theirs.as_fd()]);
        }
    }

    /// Refuses the programs that wait for a listener. One that has a queue keeps its part: what the NIC makes, now or
    /// later, it accepts. One that has none would never accept it, so it gets no part, and may ask again.
    fn refuse_waiting(&mut self, id: u32, reply: &Reply) {
        let Some(listener) = self.listeners.by_id.get_mut(&id) else { return };
        for Waits { caller, joins } in std::mem::take(&mut listener.waits) {
            if let Some((session, name, _)) = caller
                && joins
                && self.named_session((session, name)).is_some()
            {
                self.stop_listening(session, Some(id));
            }
            self.answer_caller(caller, reply.clone(), &[]);
        }
    }

    /// Handles a NIC's answer to the request to serve a listener no longer: it makes no more connections in these
    /// slots.
    pub(crate) fn stopped_listening(&mut self, id: u32, nic: usize, slots: Vec<Cid>) {
        if let Some(listener) = self.listeners.by_id.get_mut(&id) {
            listener.hears(nic);
        }
        // Those that it has made before may be in the ring still.
        self.handle_nic_messages();
        for cid in slots {
            if self.listeners.revoked.remove(&cid.0) {
                self.nics[nic].give_slot(cid);
            }
        }
        unaccepted::end_if_over(self, id);
    }

    /// Has the keeper hold a listener for the next agent, as it is now, if a program has its queue. One that waits for
    /// that asks the next agent again, and might not get it there either: then clients must come to the kernel.
    fn keep_listener(&self, id: u32) {
        let Some(listener) = self.listeners.by_id.get(&id) else { return };
        let Ok(written) = postcard::to_stdvec(&(&listener.listening, listener.limits)) else { return };
        let waits = |session: &u32| {
            let names = |waits: &Waits| waits.joins && waits.caller.is_some_and(|(caller, ..)| caller == *session);
            listener.waits.iter().any(names)
        };
        let sessions: Vec<u32> = listener.sessions.iter().copied().filter(|session| !waits(session)).collect();
        if sessions.is_empty() {
            return self.keep(&Kept::ListenerGone(id), &[]);
        }
        self.keep(&Kept::Listener(id, sessions, written), &[listener.ours.as_fd(), listener.theirs.as_fd()]);
    }

    /// Takes over a dead agent's listener. None if no session has it any more. The journal has the connections that
    /// wait to be accepted.
    pub(crate) fn inherit_listener(&mut self, kept: Kept, descriptors: Vec<OwnedFd>) -> Option<()> {
        let Kept::Listener(id, sessions, written) = kept else { return None };
        let (listening, limits) = postcard::from_bytes(&written).ok()?;
        let [ours, theirs] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
        let exists = |session: &u32| self.sessions.get(*session as usize).is_some_and(Option::is_some);
        let sessions: BTreeSet<u32> = sessions.into_iter().filter(exists).collect();
        let user = self.user_of(*sessions.first()?);
        let taken = self.users.take(user, 2);
        let listener = Listener { sessions, _taken: taken, ..Listener::new(listening, limits, ours.into(), theirs) };
        self.listeners.by_id.insert(id, listener);
        Some(())
    }

    /// Whether this NIC can make connections at all now.
    pub(crate) fn can_open(&mut self) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::CalledOff);
        }
        self.guards.pass_openings()
    }

    /// Describes a listener to the NICs, each of which serves the addresses of its devices from its answer on.
    fn serve_listener(&mut self, id: u32) -> Result<(), Refusal> {
        let mtu = self.shape.mtu_of_listeners(&self.routes)?;
        let own = rtnetlink::addresses_of_links(&self.routes).map_err(|error| system("RTM_GETADDR", &error))?;
        // One that no session has would be accepted from by nobody.
        let is_had = |listener: &&mut Listener| !listener.sessions.is_empty();
        let Some(listener) = self.listeners.by_id.get_mut(&id).filter(is_had) else { return Ok(()) };
        let programs = listener.sessions.iter().filter_map(|session| self.sessions.get(*session as usize)?.as_ref());
        listener.groups = programs.filter_map(|program| self.cgroups.of(program.process)).collect();
        listener.groups.iter().try_for_each(|group| self.cgroups.let_listen(group))?;
        let (listening, port) = (&listener.listening, listener.listening.local.port());
        let own = own.into_iter().filter(|(_, address)| listening.accepts(*address));
        let now: Steered =
            own.map(|(device, address)| (SocketAddr::new(address, port), self.shape.nic_of(device) as u32)).collect();
        if now.is_empty() {
            return Err(Refusal::OtherInterface(0));
        }
        let receive_limit = listener.limits.receive;
        for nic in 0..self.nics.len() {
            let addresses: Vec<SocketAddr> =
                now.iter().filter(|(_, of)| **of == nic as u32).map(|(address, _)| *address).collect();
            if addresses.is_empty() {
                self.stop_serving(id, nic);
                continue;
            }
            let listen = Listen { id, addresses, receive_limit, mtu, ttl: TTL };
            self.nics[nic].request(ToNic::Listen(listen), &[], Some(After::Listen(id)));
            let Some(listener) = self.listeners.by_id.get_mut(&id) else { return Ok(()) };
            listener.asks(nic);
            listener.wanted.insert(nic);
        }
        self.listeners.by_id.entry(id).and_modify(|listener| listener.next_steered = now);
        self.looks.begin_sockets();
        Ok(())
    }

    /// Whether the socket of a listener listens still. The agent has no descriptor of it, which would keep it open.
    fn still_listens(&self, id: u32) -> bool {
        let Some(listener) = self.listeners.by_id.get(&id) else { return false };
        diagnosis::is_listening(&self.diagnosis, listener.listening.local, listener.listening.cookie).unwrap_or(true)
    }

    /// Polls up to `most` listeners: a program that closes one is to say so, but need not, and another socket may
    /// listen at its port then. One that no session has any more may be another process's, which has not waited for it
    /// yet. Returns where the next poll begins, and whether there are any.
    pub(crate) fn look_at_listeners(&mut self, from: u32, most: usize) -> (u32, bool) {
        let (ids, next) = turn(&self.listeners.by_id, from, most, |_| true);
        for id in ids {
            if !self.still_listens(id) {
                self.end_listener(id);
            }
            unaccepted::end_if_over(self, id);
        }
        granting::grant_what_is_missing(self);
        (next, !self.listeners.by_id.is_empty())
    }

    /// Ends a listener for all its sessions. What no program has accepted is reset.
    fn end_listener(&mut self, id: u32) {
        self.keep(&Kept::ListenerGone(id), &[]);
        self.withdraw(id);
        let removed = self.listeners.by_id.remove(&id);
        removed.into_iter().flat_map(|listener| listener.waiting).for_each(|waiting| unaccepted::reset(self, &waiting));
    }

    /// Handles the NIC's refusal of a slot for a listener.
    pub(crate) fn not_granted(&mut self, cid: Cid) {
        if self.listeners.revoked.remove(&cid.0) {
            return self.nics[cid.nic()].give_slot(cid);
        }
        for listener in self.listeners.by_id.values_mut() {
            if let Some(at) = listener.granted.iter().position(|granted| *granted == cid) {
                listener.granted.swap_remove(at);
                listener.lacks_slots = true;
                return self.nics[cid.nic()].give_slot(cid);
            }
        }
    }

    /// Handles the NIC's message that it has made a connection, or what the last agent has noted of that.
    pub(crate) fn made(&mut self, cid: Cid, id: u32, by_cookie: bool) {
        self.listeners.revoked.remove(&cid.0);
        let image = read_image(&self.hardware[cid.nic()].memory, cid).ok();
        let listener = self.listeners.by_id.get_mut(&id);
        if listener.as_ref().is_some_and(|listener| listener.has_waiting(cid)) {
            // It was noted when this agent took the message, too.
            return;
        }
        // An agent that has died may have granted it.
        self.nics[cid.nic()].withhold(cid);
        let diagnosis = &self.diagnosis;
        let kernel_has = |flow: &Flow| diagnosis::state_and_holder(diagnosis, flow).is_ok();
        let fate = unaccepted::fate(image.as_ref(), by_cookie, listener.is_some(), kernel_has);
        if let Some(listener) = listener {
            listener.granted.retain(|granted| *granted != cid);
            listener.lacks_slots |= image.is_none();
        }
        let Some(image) = image else { return unaccepted::refuse(self, cid) };
        match fate {
            Fate::Kernels => return unaccepted::leave_to_kernel(self, cid, id),
            Fate::Nobodys => return unaccepted::reset(self, &Waiting { cid, image }),
            Fate::Waits => {}
        }
        if let Err(refusal) = self.shape.keep_made(&image.flow, image.link.interface, cid.nic()) {
            warning!(
                [nic = cid.nic(), connection = %image.flow] "a connection that the NIC has made is dropped: {refusal}";
                "its client has to connect again"
            );
            return unaccepted::leave_to_kernel(self, cid, id);
        }
        let Some(listener) = self.listeners.by_id.get_mut(&id) else { return };
        journal::note_made(&self.hardware[cid.nic()].memory, Made { cid, listener: id, by_cookie: false });
        listener.waiting.push_back(Waiting { cid, image });
        unaccepted::announce(listener, 1);
    }

    /// Drops a connection that the NIC has made: its frames are the kernel's.
    pub(crate) fn drop_made(&mut self, cid: Cid) {
        self.nics[cid.nic()].drop_connection(cid);
    }

    /// Gives a session's program the next connection of a listener; see [`crate::adoption::accept`].
    pub(crate) fn accept_made(&mut self, session: u32, id: u32) -> (Reply, Vec<OwnedFd>) {
        // It may be in the ring still.
        self.handle_nic_messages();
        let listener = self.listeners.by_id.get_mut(&id).filter(|listener| listener.sessions.contains(&session));
        let Some(listener) = listener else {
            return (Reply::Failed { reason: format!("there is no listener {id}") }, Vec::new());
        };
        let (listening, limits) = (listener.listening.clone(), listener.limits);
        if !listener.waiting.is_empty() && !self.still_listens(id) {
            // Clients of whoever listens there now.
            self.end_listener(id);
            return (Reply::Failed { reason: format!("listener {id} has been closed") }, Vec::new());
        }
        let Some(listener) = self.listeners.by_id.get_mut(&id) else {
            return (Reply::Failed { reason: format!("there is no listener {id}") }, Vec::new());
        };
        let Some(waiting) = listener.waiting.pop_front() else {
            return (Reply::Stayed { reason: "no connection waits".into(), transient: true }, Vec::new());
        };
        let accepted = self.take_in(session, &listening, limits, &waiting);
        if accepted.is_err() {
            unaccepted::reset(self, &waiting);
        }
        granting::grant(self, id);
        match accepted {
            Ok((connection, fd)) => {
                self.drive(session, connection, Event::Tick);
                if let Some(connection) = self.connection(session, connection) {
                    connection.reason = "the NIC made it".into();
                }
                (Reply::Accepted { connection }, vec![fd])
            }
            Err(refusal) => (Reply::Stayed { reason: refusal.to_string(), transient: true }, Vec::new()),
        }
    }

    /// Makes the shell of a connection that the NIC has made, and registers the connection. Its machine hands it off.
    fn take_in(
        &mut self,
        session: u32,
        listening: &Listening,
        limits: Limits,
        waiting: &Waiting,
    ) -> Result<(u32, OwnedFd), Refusal> {
        let image = waiting.image;
        let shown = |endpoint: baton_wire::Endpoint| listening.shown(endpoint.into());
        let (local, peer) = (shown(image.flow.local), shown(image.flow.remote));
        let fd = Foreign::from(listening.socket().map_err(|error| system("socket", &error))?);
        let saved = make_shell(&self.diagnosis, fd.as_fd(), (local, peer), &image)?;
        // Ours: the agent has made it, and keeps another descriptor of it.
        let theirs = fd.as_fd().try_clone_to_owned().map_err(|error| system("dup", &error))?;
        let connection = self.new_connection(session, fd, local, peer)?;
        let (number, serial) = (connection.number(), connection.serial);
        let (_, entry) = self.split(session).ok_or(Refusal::NoRoom)?;
        entry.connections.put(Connection { cid: Some(waiting.cid), ..connection });
        if let Err(refusal) = self.prepare_handoff(session, number, image, saved, limits) {
            let Some((_, entry)) = self.split(session) else { return Err(refusal) };
            entry.connections.remove(number);
            return Err(refusal);
        }
        // First, so that each agent to which the connection is known finds this, too.
        if let Some(Some(Session { open: Some(open), .. })) = self.sessions.get(session as usize) {
            open.note_given(Some(number));
        }
        self.keep(&Kept::Connection(session, number, Until::Again), &[theirs.as_fd()]);
        self.note_registered(session, number, serial);
        // The first step that its move is seen to have made.
        if let Some((mut ground, _)) = self.split_at(session, number) {
            ground.passed(Step::Purged);
        }
        Ok((number, theirs))
    }

    /// A connection that the NIC makes, with a block that its program cannot use yet.
    pub(crate) fn new_connection(
        &mut self,
        session: u32,
        fd: Foreign,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<Connection, Refusal> {
        // Whatever its user has: the client of one that is accepted would be reset.
        self.has_room_for(None, fd.as_fd(), 0)?;
        self.serials += 1;
        let (serial, draining) = (self.serials, self.draining);
        let entry = self.sessions.get_mut(session as usize).and_then(Option::as_mut).ok_or(Refusal::NoRoom)?;
        let process = entry.process;
        let open = entry.open.as_mut().ok_or(Refusal::NoRoom)?;
        memory::give_what_was_left(open);
        let number = entry.connections.vacant(&open.memory).ok_or(Refusal::NoRoom)?;
        let block = Block::new(open.memory.clone(), number);
        block.begin(Owner::Moving);
        // Sockets that are bound to a device, and link-local addresses, are the kernel's.
        let flow = Flow { local: local.into(), remote: peer.into(), device: 0 };
        let cgroup = self.cgroups.of(process);
        let made_by = Place::Nic;
        let mut connection = Connection {
            serial,
            process,
            cgroup,
            made_by,
            stays: draining,
            ..Connection::new(Some(fd), flow, local, peer, block)
        };
        // As if its rule had asked for it.
        connection.want(true);
        Ok(connection)
    }

    /// Prepares the handoff of a connection that the NIC has made and whose shell is there: its memory, its image, the
    /// journal. The kernel gets it instead if the NIC may not have it.
    pub(crate) fn prepare_handoff(
        &mut self,
        session: u32,
        number: u32,
        image: Image,
        saved: shell::Saved,
        limits: Limits,
    ) -> Result<(), Refusal> {
        let draining = self.draining;
        let (mut ground, entry) = self.split_at(session, number).ok_or(Refusal::NoRoom)?;
        let open = entry.open.as_mut().ok_or(Refusal::NoRoom)?;
        let connection = entry.connections.get_mut(number as usize).and_then(Option::as_mut).ok_or(Refusal::Ended)?;
        let cid = connection.cid.ok_or(Refusal::NoRoom)?;
        let mut way = ground.way_of_made(connection, &image);
        if let Ok(way) = &mut way {
            // The NIC that has made it, even if its frames leave by another one's device.
            way.path.nic = cid.nic() as u32;
        }
        if let Ok(way) = &way {
            ground.shape.steer(&connection.flow, &way.path, Steer::Steal)?;
        }
        let image = adapt(connection, image, &saved, way.as_ref().ok())?;
        let (retries, slow_start_after_idle) = (ground.known.retries(), ground.known.slow_start_after_idle());
        let image = Image { retries, slow_start_after_idle, ..image };
        let memory = memory::take(open, &image, limits).ok_or(Refusal::NoRoom)?;
        if !ground.nics.get_mut(cid.nic()).is_some_and(|nic| nic.promise_memory(cid, memory)) {
            memory::give(open, memory);
            return Err(Refusal::NoRoom);
        }
        let handed_off_at = monotonic_micros();
        let journalled = Entry::new(session, number, cid, saved.clone()).copied(&image, memory, handed_off_at);
        if !journal::write(ground.nic_memory, Phase::Copied, &journalled) {
            memory::give(open, memory);
            return Err(Refusal::Filter);
        }
        connection.block.set_owner(Owner::Moving);
        connection.set_machine(Move::made(way.is_ok() && !draining));
        let way = way.ok().map(|way| ground.known.shared(way));
        let window = limits.first_window(connection.fd().ok(), &image);
        limits.write(window, ground.nic_memory, cid);
        let on_nic = OnNic::new(&image, memory, way).ok_or(Refusal::NoRoom)?;
        connection.enter_nic(on_nic, Handoff::new(Exported { image, handed_off_at, saved }));
        Ok(())
    }

    /// Ends a session's part in a listener, or in all of them. With the last one the kernel gets the clients; what the
    /// NIC has made waits for another process that has the socket, as in the kernel's queue.
    pub(crate) fn stop_listening(&mut self, session: u32, only: Option<u32>) {
        let ids: Vec<u32> = self.listeners.by_id.keys().copied().filter(|id| only.is_none_or(|only| only == *id)).collect();
        for id in ids {
            let Some(listener) = self.listeners.by_id.get_mut(&id) else { continue };
            let left = unaccepted::leave(listener, session);
            if left && !listener.sessions.is_empty() {
                self.keep_listener(id);
            } else if left {
                listener.left_at = monotonic_micros();
                self.keep(&Kept::ListenerGone(id), &[]);
                self.withdraw(id);
                unaccepted::end_if_over(self, id);
            }
        }
    }

    /// Makes a NIC serve a listener no longer. Connections that have been made can still be accepted.
    fn stop_serving(&mut self, id: u32, nic: usize) {
        let Some(listener) = self.listeners.by_id.get_mut(&id).filter(|listener| listener.wanted.contains(&nic)) else { return };
        listener.wanted.remove(&nic);
        listener.served.remove(&nic);
        let slots: Vec<Cid> = listener.granted.extract_if(.., |cid| cid.nic() == nic).collect();
        listener.asks(nic);
        self.listeners.revoked.extend(slots.iter().map(|cid| cid.0));
        self.nics[nic].request(ToNic::StopListening(id), &[], Some(After::StopListening(id, slots)));
    }

    /// Takes a listener from the NICs: the kernel gets its clients. Connections that have been made can still be
    /// accepted.
    fn withdraw(&mut self, id: u32) {
        for nic in 0..self.nics.len() {
            self.stop_serving(id, nic);
        }
        let Some(listener) = self.listeners.by_id.get_mut(&id) else { return };
        let steered = std::mem::take(&mut listener.steered);
        listener.next_steered.clear();
        if let Err(refusal) = self.shape.serve(&steered, &Steered::new()) {
            error!(
                [] "clients of a listener are still kept from the kernel: {refusal}";
                "restart Baton, so that the kernel has them"
            );
        }
        if self.listeners.by_id.values().all(|listener| listener.steered.is_empty()) {
            self.shape.serve_none();
        }
        self.refuse_waiting(id, &stayed(&Refusal::NicGone));
    }

    /// Takes all listeners from the NICs, for good.
    pub(crate) fn withdraw_all(&mut self) {
        for id in self.listeners.by_id.keys().copied().collect::<Vec<_>>() {
            self.withdraw(id);
            unaccepted::end_if_over(self, id);
        }
    }

    /// Examines all listeners anew, since the host's addresses or rules have changed: those that the NIC cannot serve
    /// any more are the kernel's until it can.
    pub(crate) fn follow_listeners(&mut self) {
        let can = self.can_open();
        for id in self.listeners.by_id.keys().copied().collect::<Vec<_>>() {
            let served = can.clone().and_then(|()| self.serve_listener(id));
            self.looks.unread.note(&served, monotonic_micros());
            if served.is_err() {
                self.withdraw(id);
            }
        }
    }

    /// Gives the listeners to the next NIC of this number, with slots, before frames flow. Connections that wait to be
    /// accepted are held there again.
    pub(crate) fn listen_again(&mut self, nic: usize) {
        for id in self.listeners.by_id.keys().copied().collect::<Vec<_>>() {
            let Some(listener) = self.listeners.by_id.get_mut(&id) else { continue };
            listener.served.remove(&nic);
            listener.wanted.remove(&nic);
            listener.granted.extract_if(.., |cid| cid.nic() == nic).for_each(|cid| self.nics[nic].give_slot(cid));
            let mut held = VecDeque::new();
            for one in std::mem::take(&mut listener.waiting) {
                let command = |control| Message::control(Operation::NicControl, control, one.cid, 0, 0);
                let next = &mut self.nics[nic];
                // No frame flows yet. The NIC refuses the handoff of one that it does not hold.
                let holds =
                    |next: &mut NicProcess| next.post(command(Control::Mirror)).and_then(|()| next.post(command(Control::Steal)));
                if one.cid.nic() != nic || holds(next).is_ok() {
                    held.push_back(one);
                } else {
                    unaccepted::reset(self, &one);
                }
            }
            if let Some(listener) = self.listeners.by_id.get_mut(&id) {
                listener.waiting = held;
            }
            let served = self.can_open().and_then(|()| self.serve_listener(id));
            self.looks.unread.note(&served, monotonic_micros());
            if let Err(refusal) = served {
                info!([nic = nic] "the NIC does not serve a listener any more, the kernel does: {refusal}");
                self.withdraw(id);
            }
        }
        unaccepted::await_slots(self, nic);
    }
}

impl Ground<'_> {
    /// The way of a connection that the NIC has made. The kernel may not know the next hop's link address, since it has
    /// exchanged nothing with it: then that from which the NIC was sent the first frames counts.
    fn way_of_made(&mut self, connection: &Connection, image: &Image) -> Result<Way, Refusal> {
        match self.way_of(connection) {
            Err(Refusal::NoNeighbour) => {
                let (_, route) = self.route_of(connection)?;
                let hop = route.gateway.unwrap_or(connection.peer().ip().to_canonical());
                let learnt = rtnetlink::learn_neighbour(self.routes, route.interface, hop, image.link.destination);
                learnt.map_err(|error| system("RTM_NEWNEIGH", &error))?;
                self.way_of(connection)
            }
            found => found,
        }
    }
}

/// Turns a socket into the shell of a connection that the NIC has made. One with the same 4-tuple that the kernel waits
/// out (TIME-WAIT) gives way: the new one's sequence numbers and timestamps lie behind its (RFC 6191).
pub(crate) fn make_shell(
    diagnosis: &Netlink,
    fd: BorrowedFd<'_>,
    (local, peer): (SocketAddr, SocketAddr),
    image: &Image,
) -> Result<shell::Saved, Refusal> {
    const TIME_WAIT: u8 = 6;
    let make = || shell::make(fd, local, peer, image.snd_nxt, image.rcv_nxt);
    match make() {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            let waits = diagnosis::state_and_holder(diagnosis, &image.flow).is_ok_and(|(state, _)| state == TIME_WAIT);
            if waits && diagnosis::destroy(diagnosis, &image.flow, None).is_ok() { make() } else { Err(error) }
        }
        made => made,
    }
    .map_err(|error| system("connect", &error))
}

/// The image of a connection that the NIC has made, with what its socket and its way decide.
fn adapt(connection: &Connection, mut image: Image, saved: &shell::Saved, way: Option<&Way>) -> Result<Image, Refusal> {
    export::take_options(connection.fd()?, saved, &mut image).map_err(|error| system("getsockopt", &error))?;
    if let Some(way) = way {
        image.link = way.link;
        image.mtu = way.mtu;
    }
    Ok(image)
}
