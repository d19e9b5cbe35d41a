//! Calls on programs' sockets that wait for the socket's lock. A program holds it as long as it likes: by a system call
//! on the socket that waits for memory which a FUSE server or userfaultfd does not deliver, say. So these calls are
//! made by threads of their own, one for a user ([`foreign::call_for`]), and the loop goes on when they have returned.
//!
//! A connection's descriptor is away while a call is made on its socket, and nothing happens to the connection
//! meanwhile: events of its move wait. Root's programs and those of the agent's own user are trusted: calls on their
//! sockets are made by the loop, which is faster.

use crate::adoption::accept_what_was_held;
use crate::agent::Agent;
use crate::connection::{Asker, Connection};
use crate::moves::named;
use baton_core::Key;
use baton_handoff::examine::system;
use baton_linux::events::{Doorbell, monotonic_micros};
use baton_linux::foreign::{self, Foreign};
use baton_linux::netlink::Netlink;
use baton_linux::{diagnosis, process, socket};
use baton_moves::{Event, Outcome, Refusal};
use baton_protocol::program::Reply;
use baton_wire::Flow;
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Time after which a call is reported as stuck, in microseconds.
const SLOW: u64 = 100_000;

/// What the loop does when a call has returned.
pub(crate) type Completion = Box<dyn FnOnce(&mut Agent) + Send>;

/// Calls that are made elsewhere.
#[derive(Clone)]
pub(crate) struct Calls {
    returned: Arc<Mutex<Vec<Completion>>>,
    bell: Arc<Doorbell>,
}

impl Calls {
    /// None is made yet.
    pub fn new() -> io::Result<Calls> {
        Ok(Calls { returned: Arc::default(), bell: Arc::new(Doorbell::new()?) })
    }

    /// Readable when a call has returned.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Has calls made on a socket that a user's program may hold. What the loop drops when they have returned is that
    /// user's: what was sent as a socket may be a file that does not close.
    pub fn make(&self, user: u32, act: impl FnOnce() -> Completion + Send + 'static) {
        let this = self.clone();
        foreign::call_for(user, move || {
            let completion = act();
            this.complete(Box::new(move |agent| {
                let _user = foreign::on_behalf_of(user);
                completion(agent);
            }));
        });
    }

    /// Has the loop do something, from any thread.
    pub fn complete(&self, completion: Completion) {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).push(completion);
        self.bell.ring();
    }

    fn take(&self) -> Vec<Completion> {
        self.bell.clear();
        std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A call that is made for a connection's move.
pub(crate) struct Call {
    since: u64,
    begun: Arc<AtomicBool>,
    /// What has happened to the connection meanwhile.
    put_off: VecDeque<Event>,
}

impl Call {
    /// A call, and what is set when it begins.
    pub fn new() -> (Call, Arc<AtomicBool>) {
        let begun = Arc::new(AtomicBool::new(false));
        (Call { since: monotonic_micros(), begun: begun.clone(), put_off: VecDeque::new() }, begun)
    }

    /// Keeps an event until the call has returned. That time passes means nothing to a move that waits for it; nor does
    /// it that the program asks for the same again.
    pub fn put_off(&mut self, event: Event) {
        if !matches!(event, Event::Tick | Event::Excused) && self.put_off.back() != Some(&event) {
            self.put_off.push_back(event);
        }
    }

    /// Why its connection's move does not go on, if it takes long.
    pub fn trouble(&self, now: u64) -> Option<&'static str> {
        if now.saturating_sub(self.since) < SLOW {
            return None;
        }
        Some(match self.begun.load(Ordering::Relaxed) {
            true => "its socket does not answer: its program holds it",
            false => "it waits for another socket of its user's, which does not answer",
        })
    }
}

/// Why an action has not been performed.
pub(crate) enum Stop {
    /// It is performed elsewhere.
    Later,
    Refused(Refusal),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Stop {
        Stop::Refused(refusal)
    }
}

impl From<Stop> for Outcome {
    fn from(stop: Stop) -> Outcome {
        match stop {
            Stop::Later => Outcome::Later,
            Stop::Refused(refusal) => Outcome::Refused(refusal),
        }
    }
}

/// The outcome of an action.
pub(crate) fn outcome(result: Result<(), Stop>) -> Outcome {
    result.map_or_else(Outcome::from, |()| Outcome::Done)
}

/// The user whose programs may hold a socket's lock against the agent; None if that can only be those that may end it,
/// too. `session` is the user who opened the session, `process` the one that has the socket: it may have given up its
/// rights since.
pub(crate) fn outsider(session: u32, process: u32, socket: Option<BorrowedFd<'_>>) -> Option<u32> {
    let ours = |user: u32| user == 0 || user == process::user();
    if !ours(session) {
        return Some(session);
    }
    match process::user_of(process) {
        Ok(user) => Some(user).filter(|user| !ours(*user)),
        // It has ended. Others may have its sockets.
        Err(_) => Some(socket.and_then(|socket| socket::owner(socket).ok()).unwrap_or(session)),
    }
}

/// Checks as [`Connection::check_socket`], without waiting for the socket's lock.
///
/// # Errors
/// The same.
pub(crate) fn check_unlocked(
    connection: &Connection,
    fd: BorrowedFd<'_>,
    netlink: &Netlink,
) -> Result<diagnosis::Described, Refusal> {
    if socket::cookie(fd).ok() != Some(connection.cookie) {
        return Err(Refusal::Swapped);
    }
    diagnosis::describe(netlink, &flow_of(connection, Some(fd)), connection.cookie).map_err(|error| match error.raw_os_error() {
        Some(ESTALE) => Refusal::Swapped,
        Some(ENOENT) => Refusal::Closed("socket diagnosis"),
        _ => system("socket diagnosis", &error),
    })
}

/// The connection's flow as socket diagnosis knows it: with the device that its socket is bound to now.
pub(crate) fn flow_of(connection: &Connection, fd: Option<BorrowedFd<'_>>) -> Flow {
    let device = fd.and_then(|fd| socket::device(fd).ok());
    connection.flow.by(device.unwrap_or(connection.flow.device))
}

fn stayed(refusal: &Refusal) -> Reply {
    Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() }
}

/// Linux's error numbers for a socket that is not there, and for another one in its place.
const ENOENT: i32 = 2;
const ESTALE: i32 = 116;

/// Destroys a connection in the kernel, whoever has its socket: that waits for the lock, too.
pub(crate) fn destroy(outsider: Option<u32>, connection: &Connection, netlink: &Netlink) {
    let fd = connection.fd.as_ref().map(AsFd::as_fd);
    let (flow, cookie) = (flow_of(connection, fd), Some(connection.cookie));
    match outsider {
        None => _ = diagnosis::destroy(netlink, &flow, cookie),
        Some(user) => foreign::call_for(user, move || {
            let _ = diagnosis::with_own(|netlink| diagnosis::destroy(netlink, &flow, cookie));
        }),
    }
}

impl Agent {
    /// Has calls made on a socket that a session's program has sent with a request, and goes on with what they return,
    /// if the session is still there. `process` has the socket, if it is not the session's own program. Returns the
    /// answer to the request, or None if it comes later.
    pub(crate) fn on_sent<T: Send + 'static>(
        &mut self,
        (number, tag): Asker,
        (fd, process): (Foreign, Option<u32>),
        calls: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static,
        then: impl FnOnce(&mut Agent, Foreign, T) -> Option<Reply> + Send + 'static,
    ) -> Option<Reply> {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return Some(stayed(&Refusal::NoRoom)) };
        let (user, name) = (session.user, session.name);
        let Some(user) = outsider(user, process.unwrap_or(session.process), Some(fd.as_fd())) else {
            let result = calls(fd.as_fd());
            return then(self, fd, result);
        };
        if foreign::has_many_calls(user) {
            return Some(stayed(&Refusal::Held));
        }
        self.calls.make(user, move || -> Completion {
            let result = calls(fd.as_fd());
            Box::new(move |agent| {
                if agent.named_session((number, name)).is_some_and(|session| !session.ends) {
                    agent.attend(number);
                    if let Some(reply) = then(agent, fd, result) {
                        agent.answer(number, tag, reply, &[]);
                    }
                }
            })
        });
        None
    }

    /// Has calls made on a socket of a session that is no connection's. It stays where it is meanwhile.
    pub(crate) fn on_shared<T: Send + 'static>(
        &mut self,
        number: u32,
        fd: &Arc<Foreign>,
        calls: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static,
        then: impl FnOnce(&mut Agent, T) + Send + 'static,
    ) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        let name = session.name;
        let Some(user) = outsider(session.user, session.process, Some(fd.as_fd())) else {
            let result = calls(fd.as_fd());
            return then(self, result);
        };
        let fd = fd.clone();
        self.calls.make(user, move || -> Completion {
            let result = calls(fd.as_fd());
            drop(fd);
            Box::new(move |agent| {
                if agent.named_session((number, name)).is_some_and(|session| !session.ends) {
                    agent.attend(number);
                    then(agent, result);
                }
            })
        });
    }

    /// Has calls made on the socket of a connection that does not move, and goes on with what they return. Until then
    /// nothing happens to the connection: see [`Agent::is_called`]. Requests that wait for it are served afterwards.
    pub(crate) fn on_resting<T: Send + 'static>(
        &mut self,
        session: u32,
        number: u32,
        calls: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static,
        then: impl FnOnce(&mut Agent, u32, u32, T) + Send + 'static,
    ) -> Result<(), Refusal> {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return Err(Refusal::Ended) };
        let user = entry.user;
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return Err(Refusal::Ended) };
        let Some(fd) = connection.fd.take() else { return Err(Refusal::Elsewhere) };
        let Some(user) = outsider(user, connection.process, Some(fd.as_fd())) else {
            let result = calls(fd.as_fd());
            connection.fd = Some(fd);
            then(self, session, number, result);
            return Ok(());
        };
        let key = (session, number, connection.serial);
        let (call, begun) = Call::new();
        connection.extra().call = Some(Box::new(call));
        self.calls.make(user, move || -> Completion {
            begun.store(true, Ordering::Relaxed);
            let result = calls(fd.as_fd());
            Box::new(move |agent| agent.called_at_rest(key, fd, |agent| then(agent, session, number, result)))
        });
        Ok(())
    }

    fn called_at_rest(&mut self, key: Key, fd: Foreign, then: impl FnOnce(&mut Agent)) {
        let (session, number, _) = key;
        let Some(connection) = named(&mut self.sessions, key) else { return };
        connection.fd = Some(fd);
        let Some(call) = connection.extra().call.take() else { return };
        let waiting = std::mem::take(&mut connection.extra().waiting.then);
        self.attend(session);
        then(self);
        for event in call.put_off {
            if named(&mut self.sessions, key).is_some() {
                self.drive(session, number, event);
            }
        }
        self.go_on(session, number, waiting, true);
    }

    /// Goes on with what waited for calls that have returned.
    pub(crate) fn finish_calls(&mut self) {
        for completion in self.calls.take() {
            completion(self);
            self.clear_attended();
            self.handle_nic_messages();
        }
        accept_what_was_held(self);
    }

    /// Goes on with a connection's move.
    pub(crate) fn called(&mut self, key: Key, fd: Foreign, result: Box<dyn Any + Send>) {
        let Some(connection) = named(&mut self.sessions, key) else { return };
        connection.fd = Some(fd);
        let Some(call) = connection.extra().call.take() else { return };
        let (session, number, _) = key;
        self.attend(session);
        let mut put_off = call.put_off;
        let mut first = put_off.pop_front();
        self.run_machine(session, number, |machine, performer| {
            performer.returns(result);
            machine.complete(&mut first, performer);
        });
        for event in first.into_iter().chain(put_off) {
            if named(&mut self.sessions, key).is_some() {
                self.drive(session, number, event);
            }
        }
    }

    /// Gives a connection its descriptor back, after a call that nothing waits for.
    pub(crate) fn called_last(&mut self, key: Key, fd: Foreign) {
        if let Some(connection) = named(&mut self.sessions, key)
            && connection.fd.is_none()
            && !(connection.attached && connection.goal().is_none())
        {
            connection.fd = Some(fd);
        }
    }

    /// Whether nothing may happen to a connection, since a call is made on its socket.
    pub(crate) fn is_called(&mut self, session: u32, number: u32) -> bool {
        self.connection(session, number).is_some_and(|connection| connection.call().is_some())
    }
}
