//! Connections of programs that do not know of Baton, held by an attacher's session. The agent has a descriptor of one
//! only while it is moved and the program is stopped, so that closing a socket has its usual effect.

use crate::agent::Agent;
use crate::calls::{self, check_unlocked, outsider};
use crate::connection::{Asker, Connection};
use crate::session::Session;
use baton_core::Stage;
use baton_handoff::examine;
use baton_linux::foreign::Foreign;
use baton_linux::{diagnosis, process, socket};
use baton_moves::Refusal;
use baton_protocol::program::{Place, Reply};
use baton_wire::Flow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Most attachers listed in one answer.
const ATTACHERS: usize = 256;

impl Session {
    /// Takes a descriptor that its attacher has lent.
    pub(crate) fn note(&mut self, number: u32, fd: Option<Foreign>) {
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
pub(crate) fn stand_in(connection: &Connection, abort: bool) -> io::Result<Foreign> {
    let fd = Foreign::from(socket::stream(connection.local().is_ipv6(), 0)?);
    if abort {
        socket::reset_on_close(fd.as_fd())?;
    }
    Ok(fd)
}

impl Agent {
    /// Checks that an attacher's user may have a connection moved: socket and process are that user's. What is
    /// registered by an attacher is not held by a descriptor, and everybody can say to be one.
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

    /// Moves a connection while its program is stopped, which waits for the answer: the move takes place at once, or
    /// not at all.
    pub(crate) fn move_attached(&mut self, session: u32, number: u32, to: Place, fd: Option<Foreign>, asker: Asker) {
        self.lent(session, number, fd);
        if let Some((reply, _)) = self.request_move(session, number, to, asker) {
            self.answer(asker.0, asker.1, reply, &[]);
        }
        self.return_descriptor(session, number);
    }

    /// Restores a connection whose socket its program has closed into a socket of the agent's, which the kernel then
    /// closes as it would have closed the program's.
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

    /// Resets a connection whose attacher has ended without bringing it back: the last data of program and NIC is lost,
    /// and both ends see a reset.
    pub(crate) fn leave_attached(&mut self, session: u32, number: u32) {
        let _ = self.close_attached(session, number, true, 0);
    }
}
