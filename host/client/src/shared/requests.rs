//! Requests to the agent and their answers.

use super::events::Change;
use super::{RELAXED, Shared, would_block};
use crate::connection::Connection;
use crate::ending::ended;
use baton_abi::layout::session as at;
use baton_abi::{Cid, Control, Message, Operation};
use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_linux::process::Undisturbed;
use baton_protocol::native::Native;
use baton_protocol::program::{Answer, Ask, Detail, MAY_WITHDRAW, Place, Reply, Request, Rings, Until};
use baton_ring::Token;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Time that a program waits for an agent that does not take up its request. After that, calls that return at once
/// without Baton continue without the agent.
pub const LIMIT: Duration = Duration::from_millis(800);

/// Time that a close waits for its local port to be free. It may pass in vain: to close on the NIC takes a round trip.
pub const PORT_LIMIT: Duration = Duration::from_millis(50);

/// Linux's error number for too many open files.
const EMFILE: i32 = 24;

/// Microseconds for which an agent that has not answered is not waited for again.
const SILENCE: u64 = 5_000_000;

/// Most requests of [`give_back_each`] that are unanswered at the same time. The queues of the control connection have
/// room for more.
const AT_ONCE: usize = 32;

/// How long a request's answer is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    /// Without limit: the program cannot continue without the answer.
    Endless,
    /// If the agent has not taken up the request after [`LIMIT`], the request is withdrawn: the error is `TimedOut`,
    /// and nothing was done.
    Withdraw,
    /// As `Withdraw`, but `ResourceBusy` at once if another thread waits for an answer: among hundreds of threads on
    /// few processors each would wait for all others.
    WithdrawUnlessBusy,
    /// After [`LIMIT`] the error is `TimedOut`, and the agent will carry out the request later.
    Leave,
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the agent does not answer")
}

pub(super) fn protocol_error(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("unexpected answer from the agent: {what} (are program and Baton of the same version?)"),
    )
}

impl Shared {
    pub(super) fn tag(&self) -> u32 {
        // Tag 0 is for requests whose answer is ignored.
        (self.next_tag.fetch_add(1, RELAXED) & !MAY_WITHDRAW).max(1)
    }

    /// Asks the agent for something, and waits for the answer.
    pub(super) fn ask(&self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
        self.ask_for_descriptors(body, descriptor.as_slice(), Patience::Endless).map(|(reply, _)| reply)
    }

    /// As `ask`, for a request that is withdrawn if the agent does not take it up.
    fn ask_or_withdraw(&self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
        self.ask_for_descriptors(body, descriptor.as_slice(), Patience::Withdraw).map(|(reply, _)| reply)
    }

    /// As `ask`, for a request that the agent may carry out later.
    fn ask_or_leave(&self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
        self.ask_for_descriptors(body, descriptor.as_slice(), Patience::Leave).map(|(reply, _)| reply)
    }

    /// As `ask`, for an answer that brings descriptors.
    fn ask_for_descriptors(
        &self,
        body: &Ask,
        descriptors: &[BorrowedFd<'_>],
        patience: Patience,
    ) -> io::Result<(Reply, Vec<OwnedFd>)> {
        // Signals are blocked: a handler that closes a socket would ask the agent, too, and wait for this lock.
        let _undisturbed = Undisturbed::begin();
        let channel = match self.channel.try_lock() {
            Ok(channel) => channel,
            Err(TryLockError::WouldBlock) if patience == Patience::WithdrawUnlessBusy => {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            _ => self.channel.lock().unwrap_or_else(PoisonError::into_inner),
        };
        let answered = self.ask_over(&channel, body, descriptors, patience);
        drop(channel);
        self.send_unsent_unless_busy();
        answered
    }

    /// Asks over the control connection, whose lock the caller holds.
    fn ask_over(
        &self,
        channel: &Channel,
        body: &Ask,
        descriptors: &[BorrowedFd<'_>],
        patience: Patience,
    ) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let asked = self.memory.word32(at::ASKED);
        loop {
            if self.has_ended() {
                return Err(ended());
            }
            self.send_unsent(channel, patience)?;
            if patience != Patience::Endless && self.is_silent(channel) {
                if patience == Patience::Leave {
                    self.send_later(channel, Request { tag: 0, body: body.clone() });
                }
                return Err(timed_out());
            }
            let withdraws = matches!(patience, Patience::Withdraw | Patience::WithdrawUnlessBusy);
            let tag = if withdraws { self.tag() | MAY_WITHDRAW } else { self.tag() };
            asked.store(if withdraws { tag } else { 0 }, Ordering::Release);
            let known = self.memory.word32(at::AGENT_STARTS).load(Ordering::Acquire);
            let request = Request { tag, body: body.clone() };
            match patience {
                Patience::Endless => channel.send(&request, descriptors)?,
                _ => match channel.try_send(&request, descriptors) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.note_silence();
                        continue;
                    }
                    sent => sent?,
                },
            }
            let is_lost = || self.memory.word32(at::AGENT_STARTS).load(Ordering::Acquire).wrapping_sub(known) as i32 > 0;
            let answered = match await_answer(channel, tag, is_lost, (patience != Patience::Endless).then_some(LIMIT)) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    if self.withdraw(tag) || patience == Patience::Leave {
                        self.note_silence();
                        return Err(error);
                    }
                    // The agent has taken the request up, so its answer will come.
                    await_answer(channel, tag, is_lost, None)
                }
                answered => answered,
            };
            if let Some(answered) = answered? {
                self.silent_until.store(0, Ordering::Release);
                if matches!(answered.0, Reply::Accepted { .. }) {
                    // Shows later agents that this connection was received and need not be given again. Another
                    // thread's request can only come later.
                    self.memory.word32(at::GIVEN).store(0, Ordering::Release);
                }
                return Ok(answered);
            }
        }
    }

    /// Whether the agent, after a time-out, has still not answered and is not to be waited for.
    fn is_silent(&self, channel: &Channel) -> bool {
        if monotonic_micros() >= self.silent_until.load(Ordering::Acquire) {
            return false;
        }
        match channel.try_receive::<Answer>() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
            // A late answer, or the connection's end: the agent is asked again.
            _ => {
                self.silent_until.store(0, Ordering::Release);
                false
            }
        }
    }

    /// A tag for a request that may be withdrawn, for the one thread that uses this session's [`Shared::channel`]. One
    /// request at a time.
    pub fn begin_withdrawable(&self) -> u32 {
        let tag = self.tag() | MAY_WITHDRAW;
        self.memory.word32(at::ASKED).store(tag, Ordering::Release);
        tag
    }

    /// Withdraws a request, unless the agent has taken it up. Returns whether it is withdrawn: nothing will be done
    /// then.
    pub fn withdraw(&self, tag: u32) -> bool {
        self.memory.word32(at::ASKED).compare_exchange(tag, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn note_silence(&self) {
        self.silent_until.store(monotonic_micros() + SILENCE, Ordering::Release);
    }

    /// Sends a request without waiting for its answer, now or before the next request.
    fn send_later(&self, channel: &Channel, request: Request) {
        let mut unsent = self.unsent();
        if !unsent.is_empty() || channel.try_send(&request, &[]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            unsent.push_back(request);
        }
    }

    fn unsent(&self) -> MutexGuard<'_, VecDeque<Request>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the queued requests without an answer, unless another thread has the control connection: that thread does
    /// this after its answer. Requests that find no room are sent before the next request.
    fn send_unsent_unless_busy(&self) {
        loop {
            let waiting = self.unsent().len();
            let Some(channel) = (waiting > 0).then(|| self.channel.try_lock().ok()).flatten() else { return };
            let sent = self.send_unsent(&channel, Patience::Leave);
            drop(channel);
            if sent.is_err() || self.unsent().len() >= waiting {
                return;
            }
        }
    }

    /// Sends the requests that have found no room before.
    fn send_unsent(&self, channel: &Channel, patience: Patience) -> io::Result<()> {
        let mut unsent = self.unsent();
        while let Some(request) = unsent.front() {
            match patience {
                Patience::Endless => channel.send(request, &[])?,
                _ if channel.try_send(request, &[]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) => {
                    self.note_silence();
                    return Ok(());
                }
                _ => {}
            }
            unsent.pop_front();
        }
        Ok(())
    }

    /// Registers a connected TCP socket with the agent; it stays in the kernel until it is moved. `inherited`: other
    /// processes may hold the same socket. From now on no thread may wait inside the kernel for that socket while the
    /// connection can be moved.
    ///
    /// # Errors
    /// With the reason, if this connection can never be moved.
    pub fn register(&self, fd: BorrowedFd<'_>, inherited: bool) -> io::Result<Arc<Connection>> {
        let connection = self.unregistered();
        self.register_as(&connection, fd, inherited, 1)?;
        Ok(connection)
    }

    /// A connection that is not registered yet. If threads may still use a closed connection, the program never frees
    /// these objects, and lets each represent one connection after another.
    pub fn unregistered(&self) -> Arc<Connection> {
        Arc::new(Connection::unregistered(self.memory.clone(), self.patient))
    }

    /// As [`Shared::register`], for a connection from [`Shared::unregistered`] that represents no other now.
    ///
    /// # Errors
    /// See there; `ResourceBusy` if another thread waits for the agent's answer now.
    pub fn register_as(&self, connection: &Arc<Connection>, fd: BorrowedFd<'_>, inherited: bool, token: Token) -> io::Result<()> {
        self.take_on(connection, &Ask::Register { inherited, process: None }, Patience::WithdrawUnlessBusy, fd, token)
    }

    /// Asks the agent to manage a connection, and then makes `connection` represent it. The agent may move it at once,
    /// and another thread may read the NIC's first events for it before its number is known here: they are kept and
    /// counted.
    fn take_on(
        &self,
        connection: &Arc<Connection>,
        ask: &Ask,
        patience: Patience,
        fd: BorrowedFd<'_>,
        token: Token,
    ) -> io::Result<()> {
        self.begin_accepting();
        let taken = match self.ask_for_descriptors(ask, &[fd], patience).map(|(reply, _)| reply) {
            Ok(Reply::Registered { connection: number }) => {
                self.take_charge(connection, number);
                Ok(())
            }
            Ok(Reply::Stayed { reason, transient: true }) => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Ok(Reply::Stayed { reason, .. } | Reply::Failed { reason }) => Err(io::Error::other(reason)),
            Ok(_) => Err(protocol_error("the agent did not take the connection on")),
            Err(error) => Err(error),
        };
        self.end_accepting(taken.is_ok().then(|| connection.clone()), token);
        taken
    }

    /// Makes a connection from [`Shared::unregistered`] represent the one that was registered under this number.
    pub fn take_charge(&self, connection: &Arc<Connection>, number: u32) {
        self.represent(connection, number);
        if connection.has_moved() {
            self.early.store(true, Ordering::Release);
        }
    }

    pub(super) fn represent(&self, connection: &Arc<Connection>, number: u32) {
        connection.set_number(number);
        self.changes.add(Change::Joins(connection.clone()));
        if self.has_ended() {
            connection.fail();
        }
    }

    /// Asks the agent to give a UDP socket's datagrams to the NIC; `bell` is the end of a doorbell that the NIC rings.
    /// Returns the socket's number. Called again when the socket was connected or its options have changed.
    ///
    /// # Errors
    /// With the reason, if only the kernel can serve the socket: `WouldBlock` if trying again later may help.
    pub fn take_datagrams(&self, fd: BorrowedFd<'_>, bell: BorrowedFd<'_>, rings: Rings) -> io::Result<u32> {
        match self.ask_for_descriptors(&Ask::Datagrams { rings }, &[fd, bell], Patience::Withdraw)?.0 {
            Reply::Datagrams { socket } => Ok(socket),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the NIC does not have the socket")),
        }
    }

    /// Bytes of the longest IP packet that the NIC sends from a UDP socket to a host.
    ///
    /// # Errors
    /// With the reason, if only the kernel can send there: `WouldBlock` if that may soon change.
    pub fn datagram_way(&self, socket: u32, host: IpAddr) -> io::Result<u32> {
        match self.ask_or_withdraw(&Ask::Way { socket, host }, None)? {
            Reply::Way { mtu } => Ok(mtu),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("there is no way")),
        }
    }

    /// Gives a UDP socket to the kernel, with `replay` also its unread datagrams.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn end_datagrams(&self, socket: u32, replay: bool) -> io::Result<()> {
        self.ask_or_leave(&Ask::EndDatagrams { socket, replay }, None).map(drop)
    }

    /// Notifies the NIC that a UDP socket has datagrams to send, or wants its doorbell rung.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    pub fn announce_datagrams(&self, socket: u32, token: Token) -> io::Result<()> {
        let message = Message::control(Operation::NicControl, Control::Datagrams, Cid(0), socket, 0);
        // UDP sockets are always on the first NIC.
        let Some(mut commands) = self.first.commands.lock(token) else { return Err(would_block()) };
        commands.push(message.to_words()).map_err(|_| would_block())?;
        commands.publish();
        drop(commands);
        self.first.ring_nic();
        Ok(())
    }

    /// Asks the agent to let the NIC make the connections of a listening socket. Returns the listener's number and its
    /// queue: a socket with a byte for each connection that waits to be accepted. A thread that has read a byte calls
    /// [`Shared::accept`]. Called again when the socket's options have changed.
    ///
    /// # Errors
    /// With the reason, if only the kernel can make its connections now.
    pub fn listen(&self, fd: BorrowedFd<'_>) -> io::Result<(u32, OwnedFd)> {
        match self.ask_for_descriptors(&Ask::Listen, &[fd], Patience::Withdraw)? {
            (Reply::Listening { listener }, mut queue) => {
                queue.pop().map(|queue| (listener, queue)).ok_or_else(|| protocol_error("the listener's queue is missing"))
            }
            (Reply::Stayed { reason, .. } | Reply::Failed { reason }, _) => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the socket does not listen")),
        }
    }

    /// Takes the next connection that the NIC has made for a listener. None if none waits. `begin` gets its descriptor,
    /// and returns the object from [`Shared::unregistered`] that is to represent it.
    ///
    /// # Errors
    /// If the agent has ended, or this session has no such listener.
    pub fn accept(&self, listener: u32, token: Token, begin: impl FnOnce(OwnedFd) -> Arc<Connection>) -> io::Result<Option<()>> {
        self.begin_accepting();
        let accepted = self.take_made(listener).map(|taken| {
            taken.map(|(number, fd)| {
                let connection = begin(fd);
                self.represent(&connection, number);
                connection
            })
        });
        self.end_accepting(accepted.as_ref().ok().cloned().flatten(), token);
        accepted.map(|accepted| accepted.map(|_| ()))
    }

    fn take_made(&self, listener: u32) -> io::Result<Option<(u32, OwnedFd)>> {
        match self.ask_for_descriptors(&Ask::Accept { listener }, &[], Patience::Endless)? {
            (Reply::Accepted { connection }, mut descriptors) => match descriptors.pop() {
                Some(fd) => Ok(Some((connection, fd))),
                None => {
                    close_unseen(self, connection);
                    Err(io::Error::from_raw_os_error(EMFILE))
                }
            },
            (Reply::Stayed { .. }, _) => Ok(None),
            (Reply::Failed { reason }, _) => Err(io::Error::other(reason)),
            _ => Err(protocol_error("no connection was accepted")),
        }
    }

    /// Makes the NIC open a connection from an unconnected socket, known as `connection` from [`Shared::unregistered`]
    /// from then on. Returns before it is open: until then nothing can be sent or received, and
    /// [`Connection::is_opening`] is true.
    ///
    /// # Errors
    /// With the reason, if only the kernel can open it; nothing has been done then, but the socket may be bound.
    pub fn open_connection(
        &self,
        connection: &Arc<Connection>,
        fd: BorrowedFd<'_>,
        peer: SocketAddr,
        token: Token,
    ) -> io::Result<()> {
        self.take_on(connection, &Ask::Connect { peer }, Patience::Withdraw, fd, token)
    }

    /// Ends this session's part in a listener.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn stop_listening(&self, listener: u32) -> io::Result<()> {
        self.ask_or_leave(&Ask::StopListening { listener }, None).map(drop)
    }

    /// Moves a connection and waits until the move is done.
    ///
    /// # Errors
    /// `WouldBlock` with the reason if trying again may help, `Other` with the reason if not; the connection stays
    /// where it was.
    pub fn move_to(&self, connection: u32, to: Place) -> io::Result<()> {
        match self.ask(&Ask::Move { connection, to }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the connection was not moved")),
        }
    }

    /// Requests a move without waiting for it. If another thread has the control connection, that thread sends the
    /// request.
    pub fn suggest(&self, connection: u32, to: Place) {
        let _undisturbed = Undisturbed::begin();
        // If the agent dies with the request, the next agent reads this bit.
        let (word, bit) = (self.memory.word32(at::WISHES + (connection / 32 * 4) as usize), 1 << (connection % 32));
        match to {
            Place::Nic => word.fetch_or(bit, Ordering::AcqRel),
            Place::Kernel => word.fetch_and(!bit, Ordering::AcqRel),
        };
        self.unsent().push_back(Request { tag: 0, body: Ask::Move { connection, to } });
        self.send_unsent_unless_busy();
    }

    /// Restores a connection to the kernel, with the reason, and when it may move again.
    ///
    /// # Errors
    /// If the agent has ended, or the connection cannot be in the kernel now.
    pub fn give_back(&self, connection: u32, reason: &str, until: Until) -> io::Result<()> {
        match self.ask(&Ask::GiveBack { connection, reason: reason.into(), until }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the connection was not moved")),
        }
    }

    /// Makes the agent forget a connection, which is then in the kernel, with no descriptor outside of the program. An
    /// agent that does not answer forgets it later, and has its descriptor until then.
    ///
    /// `within`: how long to wait for agent and keeper to close theirs (not at the limit of descriptors), or zero.
    /// After [`LIMIT`] in vain the agent counts as silent. Returns false if they were waited for in vain.
    ///
    /// # Errors
    /// If the agent has ended, or the connection cannot be in the kernel now.
    pub fn forget(&self, connection: &Connection, within: Duration) -> io::Result<bool> {
        let (ours, theirs) = (!within.is_zero()).then(Channel::pair).and_then(Result::ok).unzip();
        // Before the agent can give its number to another one.
        connection.note_closed(true);
        let moves = connection.begin_leaving();
        let body = Ask::Forget { connection: connection.number() };
        let reply = self.ask_or_leave(&body, theirs.as_ref().map(AsFd::as_fd));
        let kept = matches!(reply, Ok(Reply::Stayed { .. } | Reply::Failed { .. }));
        if kept {
            connection.note_closed(false);
            connection.stay(moves);
        }
        self.let_go(connection);
        if self.has_ended() || reply.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            return Ok(false);
        }
        match reply? {
            Reply::Done => {}
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("the connection was not released")),
        }
        drop(theirs);
        let Some(ours) = ours else { return Ok(true) };
        let _undisturbed = Undisturbed::begin();
        // Waits for the end of the connection; no message comes. After a time-out the agent counts as silent, so that a
        // program that closes many connections does not wait each time for a keeper that is stopped.
        let ended = ours.receive_message_within::<()>(within);
        let in_vain = ended.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        if in_vain && within >= LIMIT {
            self.note_silence();
        }
        Ok(!in_vain)
    }

    /// Removes a connection that the agent has forgotten from the session.
    pub fn let_go(&self, connection: &Connection) {
        let address = std::ptr::from_ref(connection) as usize;
        self.changes.add(Change::Leaves(address, connection.number(), connection.cid()));
    }

    /// In a session for messages: lets the NIC send to a host.
    ///
    /// # Errors
    /// `HostUnreachable` if the NIC has no way to it; otherwise trying again may help.
    pub(crate) fn reach(&self, host: IpAddr) -> io::Result<()> {
        match self.ask(&Ask::Reach { host }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } => Err(io::Error::new(io::ErrorKind::HostUnreachable, reason)),
            Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the way to a host is missing")),
        }
    }

    /// State of a connection that is on the NIC.
    ///
    /// # Errors
    /// If the agent has ended, or the connection is not on the NIC.
    pub fn detail(&self, connection: u32) -> io::Result<Detail> {
        match self.ask_or_withdraw(&Ask::Detail { connection }, None)? {
            Reply::Detail(detail) => Ok(detail),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the connection's state is missing")),
        }
    }

    /// Reports to the agent that the program exits, and waits for the answer, a second at most.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn say_goodbye(&self) -> io::Result<()> {
        self.ask_or_leave(&Ask::Goodbye, None).map(|_| ())
    }

    /// Reports to the agent that the program runs on without Baton, and why; waits for the answer, a second at most.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn report_withdrawal(&self, why: Native) -> io::Result<()> {
        self.ask_or_leave(&Ask::Withdraw { why }, None).map(|_| ())
    }

    /// Reports to the agent why the kernel alone serves the program, or a connection of its; waits as
    /// [`Shared::report_withdrawal`].
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn report_native(&self, why: Native) -> io::Result<()> {
        self.ask_or_leave(&Ask::Native { program: None, why }, None).map(|_| ())
    }
}

/// Records how many bytes per second a connection has to carry to be on the NIC (0: any traffic), before its move is
/// suggested. This and later agents read the word.
pub fn note_hot_from(shared: &Shared, connection: u32, bytes: u32) {
    shared.memory.word32(at::hot_from(connection)).store(bytes, Ordering::Release);
}

/// As [`Shared::give_back`] for each of these connections, several at a time, since a program that forks may have very
/// many. Returns those that could not be restored.
///
/// # Errors
/// If the agent has ended.
pub fn give_back_each(shared: &Shared, connections: &[u32], reason: &str, until: Until) -> io::Result<Vec<u32>> {
    let _undisturbed = Undisturbed::begin();
    let channel = shared.channel.lock().unwrap_or_else(PoisonError::into_inner);
    let stay = give_back_over(shared, &channel, connections, (reason, until));
    drop(channel);
    shared.send_unsent_unless_busy();
    stay
}

/// As [`give_back_each`], over the control connection, whose lock the caller holds.
fn give_back_over(
    shared: &Shared,
    channel: &Channel,
    connections: &[u32],
    (reason, until): (&str, Until),
) -> io::Result<Vec<u32>> {
    let starts = || shared.memory.word32(at::AGENT_STARTS).load(Ordering::Acquire);
    let send = |connection: u32| -> io::Result<u32> {
        let tag = shared.tag();
        let body = Ask::GiveBack { connection, reason: reason.into(), until };
        channel.send(&Request { tag, body }, &[])?;
        Ok(tag)
    };
    if shared.has_ended() {
        return Err(ended());
    }
    shared.memory.word32(at::ASKED).store(0, Ordering::Release);
    shared.send_unsent(channel, Patience::Endless)?;
    let mut left = connections.iter().copied();
    let (mut asked, mut stay): (Vec<(u32, u32)>, Vec<u32>) = (Vec::new(), Vec::new());
    let mut known = starts();
    loop {
        for connection in left.by_ref().take(AT_ONCE - asked.len()) {
            asked.push((send(connection)?, connection));
        }
        if asked.is_empty() {
            return Ok(stay);
        }
        let mut take = |answer: Answer| {
            let Some(at) = asked.iter().position(|(tag, _)| *tag == answer.tag) else { return };
            let (_, connection) = asked.swap_remove(at);
            if !matches!(answer.body, Reply::Done) {
                stay.push(connection);
            }
        };
        take(channel.receive::<Answer>()?.0);
        let now = starts();
        if now.wrapping_sub(known) as i32 > 0 {
            // The agent has died. Its last answers have all arrived: take them, and send the other requests again.
            while let Ok((answer, _)) = channel.try_receive::<Answer>() {
                take(answer);
            }
            known = now;
            for (tag, connection) in &mut asked {
                *tag = send(*connection)?;
            }
        }
    }
}

/// Closes an accepted connection whose descriptor the program could not receive, since it had reached its limit.
#[cold]
fn close_unseen(shared: &Shared, number: u32) {
    let unseen = shared.unregistered();
    unseen.set_number(number);
    unseen.note_closed(true);
    let _ = shared.ask_or_leave(&Ask::Forget { connection: number }, None);
}

/// Receives the answer to request `tag`. None if the agent died before it answered: `is_lost` reads from session memory
/// whether it has, and is called after each message. The next agent sends a message, so that this wakes up, unless
/// another one is unread.
fn await_answer(
    channel: &Channel,
    tag: u32,
    is_lost: impl Fn() -> bool,
    limit: Option<Duration>,
) -> io::Result<Option<(Reply, Vec<OwnedFd>)>> {
    loop {
        let (answer, descriptors): (Answer, _) = match limit {
            Some(limit) => channel.receive_within(limit)?,
            None => channel.receive()?,
        };
        if answer.tag == tag {
            return Ok(Some((answer.body, descriptors)));
        }
        // Any other message reports an earlier death, or answers a request that was repeated since.
        if is_lost() {
            return Ok(answered_before(channel, tag));
        }
    }
}

/// The answer to request `tag`, if it is among the unread messages: the agent may have answered before it died.
fn answered_before(channel: &Channel, tag: u32) -> Option<(Reply, Vec<OwnedFd>)> {
    while let Ok((answer, descriptors)) = channel.try_receive::<Answer>() {
        if answer.tag == tag {
            return Some((answer.body, descriptors));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::Listener;
    use super::*;
    use baton_linux::bell::SessionBell;

    /// The agent may die before it reads a suggestion, whose answer no thread waits for: the next agent finds it in
    /// session memory.
    #[test]
    fn a_suggestion_is_noted_for_the_next_agent() {
        let memory = Arc::new(baton_shm::Region::private(at::HEAP).expect("memory"));
        let shared = Shared::on(memory.clone());
        let wish = || memory.word32(at::WISHES + 4).load(Ordering::Acquire);
        shared.suggest(33, Place::Nic);
        assert_eq!(wish(), 1 << 1);
        shared.suggest(33, Place::Kernel);
        assert_eq!(wish(), 0);
        note_hot_from(&shared, 33, 5000);
        let hot_from = |number| memory.word32(at::hot_from(number)).load(Ordering::Acquire);
        assert_eq!([32, 33, 34].map(hot_from), [0, 5000, 0]);
    }

    /// An agent gives an accepted connection again as long as the program has not recorded that it has received it.
    #[test]
    fn an_accepted_connection_is_noted_as_received() {
        let memory = Arc::new(baton_shm::Region::private(at::HEAP).expect("memory"));
        let (channel, agent) = Channel::pair().expect("a channel");
        let (bell, other) = SessionBell::pair().expect("a doorbell");
        let shared = Shared::new(0, Arc::new(channel), memory.clone(), bell, Vec::new(), Listener(Box::new(|_| {})));
        let given = || memory.word32(at::GIVEN).load(Ordering::Acquire);
        let answering = std::thread::spawn(move || {
            for body in [Reply::Stayed { reason: "none waits".into(), transient: true }, Reply::Accepted { connection: 3 }] {
                let (request, _): (Request, _) = agent.receive().expect("a request");
                assert!(matches!(request.body, Ask::Accept { listener: 1 }));
                agent.send(&Answer { tag: request.tag, body }, &[other.as_fd()]).expect("sent");
            }
        });
        memory.word32(at::GIVEN).store(4, Ordering::Release);
        assert!(shared.accept(1, 1, |_| shared.unregistered()).expect("an answer").is_none());
        assert_eq!(given(), 4, "it has not come");
        let mut number = None;
        let accepted = shared.accept(1, 1, |_| {
            number = Some(given());
            shared.unregistered()
        });
        assert!(accepted.expect("an answer").is_some());
        assert_eq!(number, Some(0), "it is noted before anything else is done");
        answering.join().expect("two requests");
    }

    /// While the report of an agent's death is unread, later agents send none. A program that reads it checks whether
    /// more agents have died.
    #[test]
    fn any_message_shows_that_an_agent_has_died_with_a_request() {
        let (program, agent) = Channel::pair().expect("a channel");
        let send = |tag, body| agent.send(&Answer { tag, body }, &[]).expect("sent");
        let answered = |lost: bool| await_answer(&program, 7, || lost, Some(Duration::ZERO)).map(|answer| answer.is_some());
        send(0, Reply::Restarted { starts: 1 });
        assert_eq!(answered(false).expect_err("it waits on").kind(), io::ErrorKind::TimedOut);
        send(0, Reply::Restarted { starts: 1 });
        assert!(!answered(true).expect("the end of the wait"));
        send(6, Reply::Done);
        assert!(!answered(true).expect("the end of the wait"));
        send(0, Reply::Restarted { starts: 1 });
        send(7, Reply::Done);
        assert!(answered(true).expect("an answer that was sent before the agent died"));
        send(7, Reply::Done);
        assert!(answered(true).expect("the answer"));
    }

    /// Many connections are given back, several at a time. The agent answers in another order, and dies with most of
    /// the first requests: they come again.
    #[test]
    fn many_connections_are_given_back_at_once() {
        const ALL: u32 = 3 * AT_ONCE as u32;
        const STAYS: u32 = 7;
        let memory = Arc::new(baton_shm::Region::private(at::HEAP).expect("memory"));
        let (channel, agent) = Channel::pair().expect("a channel");
        let (bell, _other) = SessionBell::pair().expect("a doorbell");
        let shared = Shared::new(0, Arc::new(channel), memory.clone(), bell, Vec::new(), Listener(Box::new(|_| {})));
        let answering = std::thread::spawn(move || {
            let send = |tag, body| agent.send(&Answer { tag, body }, &[]).expect("sent");
            let mut asked = Vec::new();
            let mut note = |request: &Request| {
                let Ask::GiveBack { connection, until: Until::Alone, .. } = request.body else { panic!("{request:?}") };
                asked.push(connection);
                connection
            };
            let first: Vec<Request> = (0..AT_ONCE)
                .map(|_| agent.receive_within(Duration::from_secs(60)).expect("a request without an answer to the first").0)
                .collect();
            let last = &first[AT_ONCE - 1];
            note(last);
            send(last.tag, Reply::Done);
            memory.word32(at::AGENT_STARTS).store(1, Ordering::Release);
            send(0, Reply::Restarted { starts: 1 });
            while let Ok((request, _)) = agent.receive::<Request>() {
                let stays = note(&request) == STAYS;
                send(request.tag, if stays { Reply::Failed { reason: "no route".into() } } else { Reply::Done });
            }
            asked
        });
        let connections: Vec<u32> = (0..ALL).collect();
        let stay = give_back_each(&shared, &connections, "fork", Until::Alone).expect("the answers");
        assert_eq!(stay, [STAYS]);
        drop(shared);
        let mut asked = answering.join().expect("the requests");
        asked.sort_unstable();
        asked.dedup();
        assert_eq!(asked, connections);
    }
}
