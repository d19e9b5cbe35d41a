//! Connections of programs that do not know of Baton, held by an attacher's session. The agent has a descriptor of one only while
//! it is moved and the program is stopped, so that closing a socket has its usual effect.

use crate::agent::Agent;
use crate::calls::{self, check_unlocked, outsider};
use crate::connection::{Asker, Connection, Stage};
use crate::journal;
use crate::session::{NOT_READING, Sent, Session};
use baton_abi::Cid;
use baton_handoff::examine;
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::foreign::Foreign;
use baton_linux::netlink::Netlink;
use baton_linux::report;
use baton_linux::{diagnosis, process, socket};
use baton_moves::Refusal;
use baton_protocol::program::{Answer, Ask, Place, Reply, Request};
use baton_wire::Flow;
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Requests that are read from an attacher after its time is up, besides those that were waited for.
const MOST_LATE: usize = 1024;

/// Most attachers listed in one answer.
const ATTACHERS: usize = 256;

/// Time that an attacher gets to stop its programs and lend the descriptors that were requested, in microseconds.
const PATIENCE: u64 = 3_000_000;

impl Session {
    /// Drops the descriptors of an attacher's programs, which then have their sockets alone again: after the recovery of that NIC's
    /// connections, or of all.
    pub(crate) fn take_back_descriptors(&mut self, nic: Option<usize>) {
        if self.opening.attacher {
            // A move from or to another NIC goes on.
            let elsewhere = |cid: Cid| nic.is_some_and(|nic| cid.nic() != nic);
            let moves = |connection: &Connection| connection.goal().is_some() && connection.cid.is_some_and(elsewhere);
            let returned = self.connections.iter_mut().flatten().filter(|connection| !moves(connection));
            returned.for_each(|connection| connection.fd = None);
        }
    }

    /// Waits until `deadline` for descriptors that have been asked for.
    fn lends(&mut self, connections: &[u32], deadline: u64, netlink: &Netlink) {
        let Ok(poller) = Poller::new() else { return };
        if poller.add(self.channel.as_fd(), 0, Trigger::Readable).is_err() {
            return;
        }
        let mut missing: BTreeSet<u32> = connections.iter().copied().collect();
        // Requests that arrived in time count, even if another attacher has used up the time; the bound stops an endless stream
        // of them.
        let mut late = connections.len() + MOST_LATE;
        while !missing.is_empty() && late > 0 {
            let now = monotonic_micros();
            late -= usize::from(now >= deadline);
            match self.channel.try_receive_foreign::<Request>() {
                Ok((Request { body: Ask::Lend { connection }, .. }, mut descriptors)) => {
                    self.note(connection, descriptors.pop());
                    missing.remove(&connection);
                }
                // Its program has closed it: a socket of the agent's stands in, and is closed when the connection has been
                // restored into it.
                Ok((Request { tag, body: Ask::Closed { connection, abort } }, _)) if missing.contains(&connection) => {
                    if let Some(Some(entry)) = self.connections.get_mut(connection as usize) {
                        calls::destroy(outsider(self.user, entry.process, None), entry, netlink);
                        entry.fd = stand_in(entry, abort).ok();
                        entry.closed = true;
                    }
                    if tag != 0 {
                        let _ = self.channel.try_send(&Answer { tag, body: Reply::Done }, &[]);
                    }
                    missing.remove(&connection);
                }
                // Any other request is refused for now.
                Ok((Request { tag, .. }, _)) => {
                    let body = Reply::Stayed { reason: Refusal::NicGone.to_string(), transient: true };
                    let _ = self.channel.try_send(&Answer { tag, body }, &[]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && now < deadline => {
                    let _ = poller.wait(Some(Duration::from_micros(deadline - now)), &mut Vec::new());
                }
                Err(_) => break,
            }
        }
        if !missing.is_empty() {
            report!("baton agent: attacher {} has not lent {} connections in time", self.process, missing.len());
        }
    }

    fn note(&mut self, number: u32, fd: Option<Foreign>) {
        if let Some(Some(connection)) = self.connections.get_mut(number as usize) {
            // A descriptor that is not this connection's socket is dropped.
            let user = outsider(self.user, connection.process, fd.as_ref().map(AsFd::as_fd));
            connection.fd = fd.filter(|fd| is_socket_of(user.is_some(), fd.as_fd(), connection));
        }
    }
}

/// Whether a descriptor is that of a connection's socket, whose lock may be `held`.
fn is_socket_of(held: bool, fd: BorrowedFd<'_>, connection: &Connection) -> bool {
    let its = || match held {
        false => connection.check_socket(fd).is_ok(),
        true => diagnosis::with_own(|netlink| Ok(check_unlocked(connection, fd, netlink).is_ok())).unwrap_or(false),
    };
    its() && socket::is_of_this_namespace(fd).unwrap_or(false)
}

/// Makes a socket in place of one that its program has closed.
fn stand_in(connection: &Connection, abort: bool) -> io::Result<Foreign> {
    let fd = Foreign::from(socket::stream(connection.local().is_ipv6(), 0)?);
    if abort {
        socket::reset_on_close(fd.as_fd())?;
    }
    Ok(fd)
}

impl Agent {
    /// Checks that an attacher's user may have a connection moved: socket and process are that user's. What is registered by an attacher
    /// is not held by a descriptor, and everybody can say to be one.
    ///
    /// # Errors
    /// [`Refusal::Foreign`], or that the kernel does not know the socket.
    pub(crate) fn may_attach(&self, user: u32, process: u32, flow: &Flow, cookie: u64) -> Result<(), Refusal> {
        if user == 0 || user == process::user() {
            return Ok(());
        }
        let described = diagnosis::describe(&self.diagnosis, flow, cookie);
        let of_socket = described.map_err(|error| examine::system("socket diagnosis", &error))?.routing.user;
        let of_process = process::user_of(process).map_err(|error| examine::system("/proc", &error))?;
        match [of_socket, of_process].into_iter().find(|other| *other != user) {
            Some(other) => Err(Refusal::Foreign(other)),
            None => Ok(()),
        }
    }

    pub(crate) fn is_attacher(&self, session: u32) -> bool {
        self.sessions.get(session as usize).and_then(Option::as_ref).is_some_and(|session| session.opening.attacher)
    }

    pub(crate) fn attachers(&self) -> Vec<(u32, String)> {
        let attachers = self.sessions.iter().flatten().filter(|session| session.opening.attacher).take(ATTACHERS);
        attachers.map(|session| (session.process, session.opening.program.clone())).collect()
    }

    /// Requests an attacher to move a connection.
    pub(crate) fn want(&mut self, session: u32, connection: u32, to: Place) {
        if let Some(Some(session)) = self.sessions.get(session as usize) {
            let _ = session.channel.try_send(&Answer { tag: 0, body: Reply::Wanted { connection, to } }, &[]);
        }
    }

    /// Stores a connection's descriptor while a move takes place; None drops it.
    pub(crate) fn lent(&mut self, session: u32, number: u32, fd: Option<Foreign>) {
        if let Some(Some(session)) = self.sessions.get_mut(session as usize)
            && session.opening.attacher
        {
            session.note(number, fd);
        }
    }

    /// Drops the descriptor of a connection that does not move any more: its program goes on.
    pub(crate) fn return_descriptor(&mut self, session: u32, number: u32) {
        if let Some(connection) = self.connection(session, number)
            && connection.attached
            && !connection.closed
            && connection.goal().is_none()
        {
            connection.fd = None;
        }
    }

    /// Moves a connection while its program is stopped, which waits for the answer: the move takes place at once, or not at all.
    pub(crate) fn move_attached(&mut self, session: u32, number: u32, to: Place, fd: Option<Foreign>, asker: Asker) {
        self.lent(session, number, fd);
        if let Some((reply, _)) = self.request_move(session, number, to, asker) {
            self.answer(asker.0, asker.1, reply, &[]);
        }
        self.return_descriptor(session, number);
    }

    /// Restores a connection whose socket its program has closed into a socket of the agent's, which the kernel then closes as it
    /// would have closed the program's.
    pub(crate) fn close_attached(&mut self, session: u32, number: u32, abort: bool, tag: u32) -> Option<Reply> {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return Some(Reply::Done) };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return Some(Reply::Done) };
        if connection.stage() == Stage::Nic {
            // The program's orphaned socket sends nothing: the NIC still has the connection's frames.
            calls::destroy(outsider(entry.user, connection.process, None), connection, &self.diagnosis);
            match stand_in(connection, abort) {
                Ok(fd) => connection.fd = Some(fd),
                Err(error) => return Some(Reply::Failed { reason: format!("no socket to close it in: {error}") }),
            }
        }
        // The removal does not wait for an attacher.
        self.forget(session, number, (session, tag))
    }

    /// Resets a connection whose attacher has ended without bringing it back: the last data of program and NIC is lost, and both
    /// ends see a reset.
    pub(crate) fn leave_attached(&mut self, session: u32, number: u32) {
        let _ = self.close_attached(session, number, true, 0);
    }

    /// Requests the descriptors of connections that were being moved, according to a dead agent's journal. They are needed before
    /// anything else is done.
    pub(crate) fn fetch_what_was_moving(&mut self) {
        let mut moving = HashSet::new();
        for (nic, hardware) in self.hardware.iter().enumerate() {
            let slots = 0..journal::slots_used(&hardware.memory, self.settings.nic.slots as u32);
            let entries = slots.filter_map(|at| journal::read(&hardware.memory, nic, at));
            moving.extend(entries.map(|(_, entry)| (entry.session, entry.connection)));
        }
        self.fetch(|session, connection| moving.contains(&(session, connection.number())));
    }

    /// Requests the descriptors of connections that a dead NIC had, or all, which have to be restored to the kernel.
    pub(crate) fn fetch_what_was_on(&mut self, nic: Option<usize>) {
        let its = |cid: Cid| nic.is_none_or(|nic| cid.nic() == nic);
        self.fetch(|_, connection| connection.stage() == Stage::Nic && connection.cid.is_some_and(its));
    }

    fn fetch(&mut self, wanted: impl Fn(u32, &Connection) -> bool) {
        let mut asked = Vec::new();
        for (at, session) in self.sessions.iter().enumerate() {
            let Some(session) = session.as_ref().filter(|session| session.opening.attacher) else { continue };
            let missing = session.connections.iter().flatten().filter(|entry| entry.fd.is_none() && wanted(at as u32, entry));
            let connections: Vec<u32> = missing.map(Connection::number).collect();
            if connections.is_empty() {
                continue;
            }
            match session.send(&Answer { tag: 0, body: Reply::Fetch { connections: connections.clone() } }, &[]) {
                Sent::Done => asked.push((at, connections)),
                Sent::Full => self.cut_off.push((at as u32, NOT_READING)),
            }
        }
        // All attachers have the same deadline, so that many who do not answer take no longer than one.
        let deadline = monotonic_micros() + PATIENCE;
        self.pulse.set_asleep(true);
        for (at, connections) in asked {
            if let Some(Some(session)) = self.sessions.get_mut(at) {
                session.lends(&connections, deadline, &self.diagnosis);
            }
        }
        self.pulse.set_asleep(false);
    }

    /// Gives borrowed descriptors back, so that attachers' programs may continue. See [`Session::take_back_descriptors`].
    pub(crate) fn return_what_was_lent(&mut self, nic: Option<usize>) {
        let all = self.sessions.iter().enumerate().flat_map(|(at, session)| {
            let connections = session.iter().flat_map(|session| session.connections.iter().flatten());
            connections.filter(|connection| connection.closed).map(move |connection| (at as u32, connection.number()))
        });
        for (session, number) in all.collect::<Vec<_>>() {
            let _ = self.forget(session, number, (session, 0));
        }
        for (number, session) in self.sessions.iter_mut().enumerate() {
            let Some(session) = session.as_mut().filter(|session| session.opening.attacher) else { continue };
            session.take_back_descriptors(nic);
            if session.send(&Answer { tag: 0, body: Reply::Returned }, &[]) == Sent::Full {
                self.cut_off.push((number as u32, NOT_READING));
            }
        }
    }
}
