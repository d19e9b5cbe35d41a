//! Calls on the program's socket: by the loop, or elsewhere if its program may hold the socket's lock.

use super::Performer;
use super::restore::damaged;
use crate::calls::{self, Call, Completion, Stop, check_unlocked, outsider};
use baton_handoff::shell;
use baton_linux::tcp_info::TcpInfo;
use baton_moves::Refusal;
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

impl Performer<'_> {
    /// Takes what a call for the action that is performed once more has returned.
    pub fn returns(&mut self, result: Box<dyn Any + Send>) {
        self.result = Some(result);
    }

    /// The user whose programs may hold the socket's lock: see [`outsider`]. The same for a whole move.
    fn outsider(&mut self) -> Option<u32> {
        let (user, connection) = (self.ground.user, &*self.connection);
        let known = || outsider(user, connection.process, connection.fd.as_ref().map(AsFd::as_fd));
        *self.outsider.get_or_insert_with(known)
    }

    /// What the calls for an action on the program's socket return. They are made now, or elsewhere; then the action is
    /// performed again when they have returned, with their result instead of the calls: an action makes calls once.
    ///
    /// # Errors
    /// That it comes later, or that the agent does not have the socket.
    pub(super) fn on_socket<T: Send + 'static>(
        &mut self,
        calls: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static,
    ) -> Result<T, Stop> {
        if let Some(result) = self.result.take() {
            return result.downcast().map(|result| *result).map_err(|_| damaged("its move").into());
        }
        let Some(user) = self.outsider() else { return Ok(calls(self.fd()?)) };
        let Some(fd) = self.connection.fd.take() else { return Err(Refusal::Elsewhere.into()) };
        let key = (self.session, self.connection.number(), self.connection.serial);
        let (call, begun) = Call::new();
        self.connection.extra().call = Some(Box::new(call));
        self.ground.calls.make(user, move || -> Completion {
            begun.store(true, Ordering::Relaxed);
            let result = Box::new(calls(fd.as_fd()));
            Box::new(move |agent| agent.called(key, fd, result))
        });
        Err(Stop::Later)
    }

    /// Checks as [`crate::connection::Connection::own_fd`].
    ///
    /// # Errors
    /// The same.
    pub(super) fn own(&mut self) -> Result<(), Refusal> {
        match self.outsider() {
            None => self.connection.own_fd().map(drop),
            Some(_) => check_unlocked(self.connection, self.fd()?, self.ground.diagnosis).map(drop),
        }
    }

    /// Linux's number of the socket's state. None if it is unknown.
    pub(super) fn state(&mut self) -> Option<u8> {
        match self.outsider() {
            None => TcpInfo::read(self.fd().ok()?).ok().map(|info| info.state),
            Some(_) => check_unlocked(self.connection, self.fd().ok()?, self.ground.diagnosis).ok().map(|found| found.state),
        }
    }

    /// Closes the shell in silence, unless its program has put another connection in its place.
    pub(super) fn end_shell(&mut self) {
        let identity = self.connection.identity();
        let end = move |fd: BorrowedFd<'_>| {
            if identity.check(fd) != Err(Refusal::Swapped) {
                let _ = shell::end(fd);
            }
        };
        let Some(user) = self.outsider() else {
            self.fd().into_iter().for_each(end);
            return;
        };
        let Some(fd) = self.connection.fd.take() else { return };
        let key = (self.session, self.connection.number(), self.connection.serial);
        self.ground.calls.make(user, move || -> Completion {
            end(fd.as_fd());
            Box::new(move |agent| agent.called_last(key, fd))
        });
    }

    /// Destroys the connection in the kernel, whoever has its socket.
    pub(super) fn destroy(&mut self) {
        let outsider = self.outsider();
        calls::destroy(outsider, self.connection, self.ground.diagnosis);
    }
}
