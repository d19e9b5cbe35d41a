//! A program's side of the interface, for any number of threads: the session with the agent, and the operations on a connection
//! while the NIC has it. No operation waits for the network.

use crate::connection::{Connection, Entered, Inside, Readiness};
use crate::ending::{Ending, ended};
use baton_abi::layout::session as at;
use baton_abi::layout::{Owner, block};
use baton_abi::{Cid, Control, MORE, Message, Operation, add_length, counts_bytes};
use baton_linux::bell::SessionBell;
use baton_linux::control::Channel;
use baton_linux::process::Undisturbed;
use baton_protocol::program::{Answer, Ask, Detail, Opening, Place, Reply, Request, Until};
use baton_ring::{Consumer, Lock, Producer, Token, count_sleeper, needs_doorbell, uncount_sleeper};
use baton_shm::{MovableWords, Region, RingWords};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

const RELAXED: Ordering = Ordering::Relaxed;
/// How often a connection's numbers are read again because it has moved meanwhile. A thread that holds the lock of the session's
/// events and was interrupted by a signal cannot refresh the connection, and must not try for ever.
const READINESS_ATTEMPTS: u32 = 8;

/// A session with the agent.
#[derive(Debug)]
pub struct Shared {
    /// Its number, as tools show it.
    pub number: u32,
    memory: Arc<Region>,
    channel: Mutex<Arc<Channel>>,
    /// The same connection, for threads that only check whether it is hung up.
    pub(crate) line: Arc<Channel>,
    pub(crate) ending: Ending,
    commands: Lock<Producer<RingWords>>,
    pub(crate) events: Lock<Events>,
    pub(crate) connections: RwLock<Connections>,
    bell: SessionBell,
    next_tag: AtomicU32,
    moves_seen: AtomicU32,
    nic_sleeping: MovableWords<1>,
    moves: MovableWords<1>,
    /// A connection had moved before the program knew its number.
    early: AtomicBool,
    pub(crate) listener: Listener,
}

/// Called with the number of each connection that may have become readable or writable. It is called with the session's events
/// locked, so it must not call the session.
pub struct Listener(pub Box<dyn Fn(u32) + Send + Sync>);

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

/// Connections by number.
pub(crate) type Connections = Vec<Option<Arc<Connection>>>;

#[derive(Debug)]
pub(crate) struct Events {
    ring: Consumer<RingWords>,
    /// Numbers of the connections that the NIC's slots had when they were last looked up.
    by_slot: Vec<Option<u32>>,
    /// Numbers by cid, for a connection whose slot's entry in `by_slot` is still another's.
    by_cid: HashMap<u32, u32, BuildHasherDefault<DefaultHasher>>,
    /// Connections that were between two owners when they were last checked.
    between: Vec<u32>,
}

fn protocol_error(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("unexpected answer from the agent: {what} (are program and Baton of the same version?)"),
    )
}

fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

fn broken_pipe() -> io::Error {
    io::Error::from_raw_os_error(32)
}

impl Shared {
    /// Opens a session with the agent that listens at `path`.
    ///
    /// # Errors
    /// If no agent listens there, or it is of another version.
    pub fn connect(path: &Path, opening: Opening, listener: Listener) -> io::Result<Shared> {
        Self::connect_with(path, opening, listener, Ok)
    }

    /// As [`Shared::connect`]; each of the session's descriptors is passed through `renumber`, in the order of
    /// [`Shared::descriptors`].
    ///
    /// # Errors
    /// See there.
    pub fn connect_with(
        path: &Path,
        opening: Opening,
        listener: Listener,
        renumber: impl FnMut(OwnedFd) -> io::Result<OwnedFd>,
    ) -> io::Result<Shared> {
        Self::open(path, opening, None, listener, renumber)
    }

    /// Opens a session for messages, whose packets come to `socket`.
    ///
    /// # Errors
    /// If no agent listens at `path`, or it refuses; with the reason.
    pub(crate) fn connect_for_messages(path: &Path, opening: Opening, socket: BorrowedFd<'_>) -> io::Result<Shared> {
        Self::open(path, opening, Some(socket), Listener(Box::new(|_| {})), Ok)
    }

    fn open(
        path: &Path,
        opening: Opening,
        socket: Option<BorrowedFd<'_>>,
        listener: Listener,
        mut renumber: impl FnMut(OwnedFd) -> io::Result<OwnedFd>,
    ) -> io::Result<Shared> {
        let channel = Channel::connect(path).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!(
                    "no agent at {} ({error}): start Baton (baton up), or set BATON_SOCKET to the path of its socket",
                    path.display()
                ),
            )
        })?;
        let channel = Arc::new(Channel::from_fd(renumber(channel.into())?));
        let given: Vec<BorrowedFd<'_>> = socket.into_iter().collect();
        channel.send(&Request { tag: 1, body: Ask::Open(opening) }, &given)?;
        let (answer, descriptors): (Answer, Vec<OwnedFd>) = channel.receive()?;
        let number = match answer.body {
            Reply::Opened { session } => session,
            Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("the session was not opened")),
        };
        let descriptors = descriptors.into_iter().map(renumber).collect::<io::Result<Vec<_>>>()?;
        let Ok([memory, bell]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            return Err(protocol_error("descriptors are missing"));
        };
        let memory = Arc::new(Region::map(memory)?);
        Ok(Shared::new(number, channel, memory, SessionBell::from_fd(bell), listener))
    }

    fn new(number: u32, channel: Arc<Channel>, memory: Arc<Region>, bell: SessionBell, listener: Listener) -> Shared {
        Shared {
            number,
            line: channel.clone(),
            ending: Ending::default(),
            channel: Mutex::new(channel),
            commands: Lock::new(Producer::new(memory.ring(at::COMMANDS))),
            events: Lock::new(Events::new(&memory)),
            nic_sleeping: MovableWords::new(memory.clone(), at::NIC_SLEEPING),
            moves: MovableWords::new(memory.clone(), at::MOVES),
            memory,
            connections: RwLock::default(),
            bell,
            next_tag: AtomicU32::new(2),
            moves_seen: AtomicU32::new(0),
            early: AtomicBool::new(false),
            listener,
        }
    }

    /// A session on private memory, without an agent.
    #[cfg(test)]
    fn on(memory: Arc<Region>) -> Shared {
        let (channel, _) = Channel::pair().expect("two sockets");
        let (bell, _) = SessionBell::pair().expect("two sockets");
        Shared::new(0, Arc::new(channel), memory, bell, Listener(Box::new(|_| {})))
    }

    /// All descriptors of the session.
    pub fn descriptors(&self) -> [i32; 3] {
        use std::os::fd::AsRawFd;
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).as_fd().as_raw_fd();
        let memory = self.memory.fd().map_or(-1, |fd| fd.as_raw_fd());
        [channel, memory, self.bell.as_fd().as_raw_fd()]
    }

    fn tag(&self) -> u32 {
        // Tag 0 is for requests whose answer is ignored.
        self.next_tag.fetch_add(1, RELAXED).max(1)
    }

    fn ask(&self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
        // A signal handler of the program's may close a socket, which asks the agent, too.
        let _undisturbed = Undisturbed::begin();
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if self.has_ended() {
                return Err(ended());
            }
            let tag = self.tag();
            let known = self.memory.word32(at::AGENT_STARTS).load(Ordering::Acquire);
            channel.send(&Request { tag, body: body.clone() }, &descriptors)?;
            if let Some(reply) = await_answer(&channel, tag, known)? {
                return Ok(reply);
            }
        }
    }

    /// Registers a connected TCP socket with the agent; it stays in the kernel until it is moved. `inherited`: other processes
    /// may hold the same socket. From now on no thread may wait inside the kernel for that socket while the connection can be
    /// moved.
    ///
    /// # Errors
    /// With the reason, if this connection can never be moved.
    pub fn register(&self, fd: BorrowedFd<'_>, inherited: bool) -> io::Result<Arc<Connection>> {
        let connection = self.unregistered();
        self.register_as(&connection, fd, inherited)?;
        Ok(connection)
    }

    /// A connection that is not registered yet. A program whose threads may be late with a closed connection keeps these for
    /// ever, and lets each represent one connection after another.
    pub fn unregistered(&self) -> Arc<Connection> {
        Arc::new(Connection::unregistered(self.memory.clone()))
    }

    /// As [`Shared::register`], for a connection from [`Shared::unregistered`] that represents no other now.
    ///
    /// # Errors
    /// See there.
    pub fn register_as(&self, connection: &Arc<Connection>, fd: BorrowedFd<'_>, inherited: bool) -> io::Result<()> {
        let number = match self.ask(&Ask::Register { inherited, process: None }, Some(fd))? {
            Reply::Registered { connection } => connection,
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("the connection was not registered")),
        };
        self.take_charge(connection, number);
        Ok(())
    }

    /// Makes a connection from [`Shared::unregistered`] represent the one that was registered under this number.
    pub fn take_charge(&self, connection: &Arc<Connection>, number: u32) {
        connection.set_number(number);
        let mut connections = self.connections.write().unwrap_or_else(PoisonError::into_inner);
        if connections.len() <= number as usize {
            connections.resize_with(number as usize + 1, || None);
        }
        connections[number as usize] = Some(connection.clone());
        drop(connections);
        if connection.has_moved() {
            self.early.store(true, Ordering::Release);
        }
        if self.has_ended() {
            connection.fail();
        }
    }

    /// Moves a connection and waits until the move is done.
    ///
    /// # Errors
    /// `WouldBlock` with the reason if trying again may help, `Other` with the reason if not; the connection stays where it was.
    pub fn move_to(&self, connection: u32, to: Place) -> io::Result<()> {
        match self.ask(&Ask::Move { connection, to }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the connection was not moved")),
        }
    }

    /// Requests a move without waiting for it.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn suggest(&self, connection: u32, to: Place) -> io::Result<()> {
        let _undisturbed = Undisturbed::begin();
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_ended() {
            return Err(ended());
        }
        channel.send(&Request { tag: 0, body: Ask::Move { connection, to } }, &[])
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

    /// Makes the agent forget a connection, which is then in the kernel and the program's alone.
    ///
    /// # Errors
    /// If the agent has ended, or the connection cannot be in the kernel now.
    pub fn forget(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let reply = self.ask(&Ask::Forget { connection: connection.number() }, None);
        self.let_go(connection, token);
        if self.has_ended() {
            return Ok(());
        }
        match reply? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the connection was not released")),
        }
    }

    /// Forgets a connection that the agent has forgotten.
    pub fn let_go(&self, connection: &Connection, token: Token) {
        let mut connections = self.connections.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = connections.get_mut(connection.number() as usize)
            && place.as_ref().is_some_and(|known| std::ptr::eq(&**known, connection))
        {
            *place = None;
        }
        drop(connections);
        if let Some(mut events) = self.events.lock(token) {
            events.forget(connection);
        }
    }

    /// The control connection, for a session whose agent sends messages without a request. No other thread may send requests
    /// then.
    pub fn channel(&self) -> &Mutex<Arc<Channel>> {
        &self.channel
    }

    /// In a session for messages: lets the NIC send to a host.
    ///
    /// # Errors
    /// `WouldBlock` if trying again may help, else the reason.
    pub(crate) fn reach(&self, host: IpAddr) -> io::Result<()> {
        match self.ask(&Ask::Reach { host }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the way to a host is missing")),
        }
    }

    /// State of a connection that is on the NIC.
    ///
    /// # Errors
    /// If the agent has ended, or the connection is not on the NIC.
    pub fn detail(&self, connection: u32) -> io::Result<Detail> {
        match self.ask(&Ask::Detail { connection }, None)? {
            Reply::Detail(detail) => Ok(detail),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("the connection's state is missing")),
        }
    }

    /// Reports to the agent that the program exits, and waits for the answer.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn say_goodbye(&self) -> io::Result<()> {
        self.ask(&Ask::Goodbye, None).map(|_| ())
    }

    /// Enters an operation on a connection. None while it is being moved (see [`Connection::wait_until_settled`]), or if this
    /// thread is inside already.
    #[inline(always)]
    pub fn enter<'a>(&self, connection: &'a Connection, token: Token) -> Option<Entered<'a>> {
        let entered = connection.enter(token)?;
        if connection.has_moved() {
            self.note_move(connection, token);
        }
        Some(entered)
    }

    /// What can be done with a connection that the NIC has, as of its last move.
    #[inline]
    pub fn readiness(&self, connection: &Connection, token: Token) -> Readiness {
        for _ in 0..READINESS_ATTEMPTS {
            if connection.has_moved() && connection.owner() != Owner::Moving {
                self.note_move(connection, token);
            }
            let before = connection.moves.load(Ordering::Acquire);
            let readiness = connection.readiness();
            fence(Ordering::Acquire);
            // Another thread may refresh the connection after a move meanwhile: numbers from before and after it do not fit
            // together.
            if connection.moves.load(RELAXED) == before && (!connection.has_moved() || connection.owner() == Owner::Moving) {
                return readiness;
            }
        }
        connection.readiness()
    }

    #[cold]
    fn note_move(&self, connection: &Connection, token: Token) {
        if let Some(mut events) = self.events.lock(token)
            && connection.has_moved()
        {
            refresh(&mut events, connection);
            // Other threads, too, must check it anew.
            self.listener.0(connection.number());
        }
    }

    /// Queues bytes for sending, as many as there is room for. Returns how many. The caller has entered the connection, which is
    /// on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room, else the error that ended the connection.
    #[inline]
    pub fn send(&self, connection: &Connection, token: Token, bytes: &[u8]) -> io::Result<usize> {
        self.send_pieces(connection, token, bytes.len(), std::iter::once(bytes))
    }

    /// As [`Shared::send`], for `total` bytes in pieces, which leave as if they were one.
    ///
    /// # Errors
    /// See there.
    pub fn send_pieces<'a>(
        &self,
        connection: &Connection,
        token: Token,
        total: usize,
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        if connection.stopped.load(RELAXED) {
            return Err(self.send_error(connection));
        }
        let mut length = total.min(connection.room() as usize);
        if length < total {
            self.catch_up(token);
            length = total.min(connection.room() as usize);
            if length == 0 {
                return Err(would_block());
            }
        }
        if length == 0 {
            return Ok(0);
        }
        let memory = &connection.send_memory;
        let queued = connection.queued.load(RELAXED);
        let mut left = length;
        for piece in pieces {
            let piece = &piece[..piece.len().min(left)];
            memory.write(queued.wrapping_add((length - left) as u32), piece);
            left -= piece.len();
        }
        let (length, end) = (length as u32, queued.wrapping_add(length as u32));
        let first = length.min(memory.length() - (queued & (memory.length() - 1)));
        let Some(mut commands) = self.commands.lock(token) else { return Err(would_block()) };
        if !commands.has_room(2) {
            return Err(would_block());
        }
        let mut push = |seq: u32, length: u32, more: u16| {
            let message = Message::new(Operation::NicSend, connection.cid(), memory.offset_of(seq), length);
            let _ = commands.push(Message { kind: more, ..message }.to_words());
        };
        if first < length {
            // Around the end of send memory: two messages, but the NIC sends the bytes as one piece.
            push(queued, first, MORE);
            push(queued.wrapping_add(first), length - first, 0);
        } else {
            push(queued, length, 0);
        }
        connection.note_queued(connection.inside(), end);
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(length as usize)
    }

    /// Fast path of [`Shared::enter`], [`Shared::send`] and leaving: the NIC has the connection, no other thread is inside, and
    /// there is room for all bytes. False, with nothing sent, in any other case.
    #[inline(always)]
    pub fn send_at_once(&self, connection: &Connection, token: Token, bytes: &[u8]) -> bool {
        let Some(block) = connection.step_in(token) else { return false };
        let done = self.put_at_once(connection, block, token, bytes);
        block.step_out();
        // Contains a full barrier, which a mover that waits for this operation to end needs, too.
        self.ring_nic();
        block.wake_mover();
        done
    }

    #[inline(always)]
    fn put_at_once(&self, connection: &Connection, block: Inside<'_>, token: Token, bytes: &[u8]) -> bool {
        if connection.stopped.load(RELAXED) || bytes.len() > connection.room() as usize {
            return false;
        }
        let queued = connection.queued.load(RELAXED);
        let Some(address) = connection.send_memory.write_straight(queued, bytes) else { return false };
        let message = Message::new(Operation::NicSend, connection.cid(), address, bytes.len() as u32);
        let Some(mut commands) = self.commands.lock(token) else { return false };
        let pushed = commands.push(message.to_words()).is_ok();
        if pushed {
            connection.note_queued(block, queued.wrapping_add(bytes.len() as u32));
            commands.publish();
        }
        pushed
    }

    /// Fast path of [`Shared::enter`], [`Shared::receive`] and leaving: bytes have arrived. 0, with nothing received, in any
    /// other case.
    #[inline(always)]
    pub fn receive_at_once(&self, connection: &Connection, token: Token, out: &mut [u8]) -> usize {
        let Some(block) = connection.step_in(token) else { return 0 };
        let done = self.take_at_once(connection, block, token, out);
        block.step_out();
        fence(Ordering::SeqCst);
        block.wake_mover();
        done
    }

    #[inline(always)]
    fn take_at_once(&self, connection: &Connection, block: Inside<'_>, token: Token, out: &mut [u8]) -> usize {
        let read = connection.read.load(RELAXED);
        let mut unread = connection.received.load(RELAXED).wrapping_sub(read) as usize;
        if out.len() > unread {
            self.catch_up(token);
            unread = connection.received.load(RELAXED).wrapping_sub(read) as usize;
        }
        let length = out.len().min(unread);
        if length == 0 {
            return 0;
        }
        let (end, out) = (read.wrapping_add(length as u32), &mut out[..length]);
        if should_report(connection, end) || !connection.receive_memory.read_straight(read, out) {
            return self.take_and_report(connection, block, token, out);
        }
        connection.note_read(block, end);
        length
    }

    /// The requested bytes have all arrived, but they may wrap around the end of receive memory, or the NIC must get a message
    /// that they are read.
    #[inline(never)]
    fn take_and_report(&self, connection: &Connection, block: Inside<'_>, token: Token, out: &mut [u8]) -> usize {
        let read = connection.read.load(RELAXED);
        let end = read.wrapping_add(out.len() as u32);
        connection.receive_memory.read(read, out);
        if should_report(connection, end) && self.report_read(connection, token, end).is_err() {
            return 0;
        }
        connection.note_read(block, end);
        out.len()
    }

    /// `nic_recvd`: reports that the program has read up to `read`.
    fn report_read(&self, connection: &Connection, token: Token, read: u32) -> io::Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        let length = read.wrapping_sub(connection.reported_read.load(RELAXED));
        let message = Message::new(Operation::NicRecvd, connection.cid(), 0, length);
        let Some(mut commands) = self.commands.lock(token) else { return Err(would_block()) };
        commands.push(message.to_words()).map_err(|_| would_block())?;
        connection.note_reported(read);
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(())
    }

    #[cold]
    fn send_error(&self, connection: &Connection) -> io::Error {
        match connection.take_error() {
            0 => broken_pipe(),
            error => io::Error::from_raw_os_error(error as i32),
        }
    }

    #[inline(always)]
    fn ring_nic(&self) {
        if needs_doorbell(&self.nic_sleeping[0]) {
            self.bell.ring();
        }
    }

    /// Bytes that can be received now after the first `skip` unread ones, at most `wanted`; 0 at the end of the stream, or if
    /// none are wanted. The caller has entered the connection, which is on the NIC.
    #[inline(always)]
    fn unread(&self, connection: &Connection, token: Token, skip: u32, wanted: usize) -> io::Result<usize> {
        let known = connection.received.load(RELAXED).wrapping_sub(connection.read.load(RELAXED)).saturating_sub(skip);
        if (known as usize) < wanted {
            return self.unread_after_all(connection, token, skip, wanted);
        }
        Ok(wanted)
    }

    #[inline(never)]
    fn unread_after_all(&self, connection: &Connection, token: Token, skip: u32, wanted: usize) -> io::Result<usize> {
        self.catch_up(token);
        loop {
            // In this order: other threads handle the NIC's events, too, and the end comes after the last byte.
            let over = connection.is_over();
            let unread = connection.received.load(RELAXED).wrapping_sub(connection.read.load(RELAXED)).saturating_sub(skip);
            if unread > 0 {
                return Ok(wanted.min(unread as usize));
            }
            if over {
                return match connection.take_error() {
                    0 => Ok(0),
                    error => Err(io::Error::from_raw_os_error(error as i32)),
                };
            }
            if !connection.is_over() {
                return Err(would_block());
            }
        }
    }

    /// Receives bytes. Returns how many; 0 at the end of the stream. The caller has entered the connection, which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if none have arrived, else the error that ended the connection.
    #[inline(always)]
    pub fn receive(&self, connection: &Connection, token: Token, out: &mut [u8]) -> io::Result<usize> {
        let length = self.unread(connection, token, 0, out.len())?;
        if length == 0 {
            return Ok(0);
        }
        let read = connection.read.load(RELAXED);
        connection.receive_memory.read(read, &mut out[..length]);
        self.consume(connection, token, length as u32)?;
        Ok(length)
    }

    /// Marks bytes as read that [`Shared::peek`] has returned. The caller has entered the connection, which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    #[inline(always)]
    pub fn consume(&self, connection: &Connection, token: Token, length: u32) -> io::Result<()> {
        let read = connection.read.load(RELAXED).wrapping_add(length);
        if should_report(connection, read) {
            self.report_read(connection, token, read)?;
        }
        connection.note_read(connection.inside(), read);
        Ok(())
    }

    /// As [`Shared::consume`], for a connection that is being moved, by the process that restores it.
    ///
    /// # Errors
    /// None.
    pub fn note_read(&self, connection: &Connection, length: u32) -> io::Result<()> {
        connection.note_read(connection.inside(), connection.read.load(RELAXED).wrapping_add(length));
        Ok(())
    }

    /// As [`Shared::receive`], but drops the bytes.
    ///
    /// # Errors
    /// See there.
    pub fn skip(&self, connection: &Connection, token: Token, most: usize) -> io::Result<usize> {
        let mut nowhere = vec![0; self.unread(connection, token, 0, most)?.max(1)];
        self.receive(connection, token, &mut nowhere)
    }

    /// As [`Shared::receive`], from `skip` bytes after the first unread one, and the bytes stay unread.
    ///
    /// # Errors
    /// See there.
    pub fn peek(&self, connection: &Connection, token: Token, skip: u32, out: &mut [u8]) -> io::Result<usize> {
        let length = self.unread(connection, token, skip, out.len())?;
        if length == 0 {
            return Ok(0);
        }
        let from = connection.read.load(RELAXED).wrapping_add(skip);
        connection.receive_memory.read(from, &mut out[..length]);
        Ok(length)
    }

    /// `nic_post`: makes the bytes after those that buffers were posted for, or the first unread ones, go to this place in
    /// session memory. The caller has entered the connection, which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    pub(crate) fn post(&self, connection: &Connection, token: Token, address: u32, length: u32) -> io::Result<()> {
        self.report_all_read(connection, token)?;
        let Some(mut commands) = self.commands.lock(token) else { return Err(would_block()) };
        commands
            .push(Message::new(Operation::NicPost, connection.cid(), address, length).to_words())
            .map_err(|_| would_block())?;
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(())
    }

    /// Reports to the NIC how far the program has read, however little that is.
    pub(crate) fn report_all_read(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let read = connection.read.load(RELAXED);
        if read == connection.reported_read.load(RELAXED) { Ok(()) } else { self.report_read(connection, token, read) }
    }

    pub(crate) fn memory(&self) -> &Arc<Region> {
        &self.memory
    }

    /// Shuts down the sending side. The caller has entered the connection, which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full, `ResourceBusy` in a signal handler that interrupted another command.
    pub fn shutdown(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let message = Message::control(Operation::NicControl, Control::Shutdown, connection.cid(), 0, 0);
        let Some(mut commands) = self.commands.lock(token) else { return Err(io::ErrorKind::ResourceBusy.into()) };
        commands.push(message.to_words()).map_err(|_| would_block())?;
        // Only once there was room for the command, and before the NIC can act on it: after the NIC's death only the flag is
        // left.
        connection.set_shut(true);
        connection.set_flag(block::FLAG_SHUT_DOWN, true);
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(())
    }

    fn control(&self, connection: &Connection, token: Token, control: Control, address: u32, length: u32) -> io::Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        let message = Message::control(Operation::NicControl, control, connection.cid(), address, length);
        let Some(mut commands) = self.commands.lock(token) else { return Err(io::ErrorKind::ResourceBusy.into()) };
        commands.push(message.to_words()).map_err(|_| would_block())?;
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(())
    }

    /// Reports to the NIC, if it acts on the option, that a socket option has been set on the descriptor of a connection that it
    /// has. SO_KEEPALIVE must not be set on the descriptor, since the shell would send probes; its value is `keepalive`.
    ///
    /// # Errors
    /// As [`Shared::shutdown`], else the failed system call's.
    pub fn option_was_set(
        &self,
        connection: &Connection,
        token: Token,
        fd: BorrowedFd<'_>,
        (level, option): (i32, i32),
        value: i32,
    ) -> io::Result<()> {
        let get = |option| baton_linux::socket::get(fd, 6, option).map(|value| value as u32);
        match (level, option) {
            (6, 1) => self.control(connection, token, Control::NoDelay, value as u32, 0),
            (6, 3) => self.control(connection, token, Control::Cork, value as u32, 0),
            (6, 18) => self.control(connection, token, Control::UserTimeout, value as u32, 0),
            (1, 9) | (6, 4..=6) => {
                if (level, option) == (1, 9) {
                    connection.set_flag(block::FLAG_KEEPALIVE, value != 0);
                }
                let on = connection.keepalive();
                let (idle, interval, count) = (get(4)?, get(5)?, get(6)?);
                let (first, second) = (idle | u32::from(on) << 31, interval | count << 16);
                self.control(connection, token, Control::KeepAlive, first, second)
            }
            _ => Ok(()),
        }
    }

    /// Whether there are events of the NIC's or moves that [`Shared::catch_up`] has not handled.
    #[inline(always)]
    pub fn has_events(&self, token: Token) -> bool {
        self.has_moved() || self.events.lock(token).is_some_and(|events| events.ring.has_message())
    }

    #[inline(always)]
    fn has_moved(&self) -> bool {
        self.moves[0].load(Ordering::Acquire) != self.moves_seen.load(RELAXED) || self.early.load(RELAXED)
    }

    /// Handles the NIC's events; the listener is called for each connection that they concern.
    #[inline(never)]
    pub fn catch_up(&self, token: Token) {
        let Some(mut events) = self.events.lock(token) else { return };
        if self.has_moved() {
            self.check_moves(&mut events, &self.connections.read().unwrap_or_else(PoisonError::into_inner));
        }
        if !events.ring.has_message() {
            return;
        }
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        // Several in a row for one connection cause one call.
        let mut last = None;
        while let Some([first, mut second]) = events.ring.pop() {
            if counts_bytes(first) {
                events.ring.pop_like(first, |more| second = add_length(second, more));
            }
            let about =
                Message::from_words([first, second]).and_then(|message| self.on_event(&mut events, &connections, &message));
            if let (Some(number), true) = (last, last != about) {
                self.listener.0(number);
            }
            last = about;
        }
        if let Some(number) = last {
            self.listener.0(number);
        }
        events.ring.release();
    }

    #[inline]
    fn on_event(&self, events: &mut Events, connections: &Connections, message: &Message) -> Option<u32> {
        let mut connection = events.find(connections, message.cid);
        if connection.is_none() {
            // The first event since a move, or since the slot's previous occupant was looked up: find out whose it is.
            self.refresh_cids(events, connections);
            connection = events.search(connections, message.cid);
        }
        let connection = connection?;
        let add = |to: &AtomicU32| to.store(to.load(RELAXED).wrapping_add(message.length), RELAXED);
        match message.operation {
            Operation::OsRecv => add(&connection.received),
            Operation::OsAck => add(&connection.room_ends),
            Operation::OsControl => match Control::from_number(message.kind) {
                Some(Control::Posted) => {
                    connection.posted.lock().unwrap_or_else(PoisonError::into_inner).push_back(message.address);
                }
                Some(Control::Fin) => connection.fin.store(true, Ordering::Release),
                Some(Control::Closed) => connection.set_ended(message.address),
                _ => return None,
            },
            _ => return None,
        }
        Some(connection.number())
    }

    /// Learns the cids that connections got by moving.
    #[cold]
    fn refresh_cids(&self, events: &mut Events, connections: &Connections) {
        if self.has_moved() {
            self.check_moves(events, connections);
        }
        for number in std::mem::take(&mut events.between) {
            self.check_move(events, connections, number, true);
        }
    }

    /// Handles moves: a connection that has moved may be readable and writable, whatever it was before.
    #[cold]
    fn check_moves(&self, events: &mut Events, connections: &Connections) {
        let early = self.early.swap(false, Ordering::AcqRel);
        let (seen, moves) = (self.moves_seen.load(RELAXED), self.moves[0].load(Ordering::Acquire));
        self.moves_seen.store(moves, RELAXED);
        let missed = moves.wrapping_sub(seen);
        let entry = |at: u32| {
            let entry = seen.wrapping_add(at) % at::MOVED_ENTRIES;
            self.memory.word32(at::MOVED + 4 * entry as usize).load(Ordering::Acquire)
        };
        let mut moved: Vec<u32> = (0..missed.min(at::MOVED_ENTRIES)).map(entry).collect();
        // Entries that were overwritten while they were read do not count.
        let overtaken = self.moves[0].load(Ordering::Acquire).wrapping_sub(seen) >= at::MOVED_ENTRIES;
        if early || overtaken || moved.contains(&at::ANY) {
            events.between.clear();
            (0..connections.len() as u32).for_each(|number| self.check_move(events, connections, number, false));
            return;
        }
        moved.append(&mut events.between);
        moved.into_iter().for_each(|number| self.check_move(events, connections, number, false));
    }

    /// Checks a connection that may have moved. One that is between two owners is checked later, unless `now`; one that a thread
    /// is using is refreshed when it is entered next.
    fn check_move(&self, events: &mut Events, connections: &Connections, number: u32, now: bool) {
        let Some(Some(connection)) = connections.get(number as usize) else { return };
        if !connection.has_moved() {
            return;
        }
        if !now && connection.owner() == Owner::Moving {
            if !events.between.contains(&number) {
                events.between.push(number);
            }
            return;
        }
        refresh(events, connection);
        self.listener.0(number);
    }

    /// The doorbell, which rings when there are events while a thread sleeps.
    pub fn bell(&self) -> &SessionBell {
        &self.bell
    }

    /// Counts a thread that is about to sleep. If it then calls [`Shared::has_events`], which returns false, it is woken by the
    /// doorbell.
    pub fn count_sleeper(&self) {
        count_sleeper(self.memory.word32(at::PROGRAM_SLEEPING));
    }

    /// Undoes [`Shared::count_sleeper`].
    pub fn uncount_sleeper(&self) {
        uncount_sleeper(self.memory.word32(at::PROGRAM_SLEEPING));
    }
}

/// Whether the NIC should get a message that the program has read up to `read`: a small part of the memory opens no window.
/// Whoever takes the connection over next reads the block.
#[inline(always)]
fn should_report(connection: &Connection, read: u32) -> bool {
    read.wrapping_sub(connection.report_at.load(RELAXED)) as i32 >= 0
}

impl Events {
    fn new(memory: &Arc<Region>) -> Events {
        let ring = Consumer::new(memory.ring(at::EVENTS));
        Events { ring, by_slot: Vec::new(), by_cid: HashMap::default(), between: Vec::new() }
    }

    #[inline]
    fn find<'a>(&self, connections: &'a Connections, cid: Cid) -> Option<&'a Connection> {
        let number = (*self.by_slot.get(cid.slot() as usize)?)?;
        connections.get(number as usize)?.as_deref().filter(|connection| connection.cid() == cid)
    }

    #[cold]
    fn search<'a>(&mut self, connections: &'a Connections, cid: Cid) -> Option<&'a Connection> {
        let number = *self.by_cid.get(&cid.0)?;
        let found = connections.get(number as usize)?.as_deref().filter(|connection| connection.cid() == cid)?;
        self.note(found);
        Some(found)
    }

    fn forget(&mut self, connection: &Connection) {
        let cid = connection.cid().0;
        if self.by_cid.get(&cid) == Some(&connection.number()) {
            self.by_cid.remove(&cid);
        }
        if let Some(known) = self.by_slot.get_mut(connection.cid().slot() as usize)
            && *known == Some(connection.number())
        {
            *known = None;
        }
    }

    fn note(&mut self, connection: &Connection) {
        let slot = connection.cid().slot() as usize;
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, None);
        }
        self.by_slot[slot] = Some(connection.number());
        self.by_cid.insert(connection.cid().0, connection.number());
    }
}

pub(crate) fn refresh(events: &mut Events, connection: &Connection) {
    events.forget(connection);
    connection.refresh();
    events.note(connection);
}

/// Receives the answer; None if the agent has died with the request.
fn await_answer(channel: &Channel, tag: u32, known: u32) -> io::Result<Option<Reply>> {
    loop {
        let (answer, _): (Answer, _) = channel.receive()?;
        match answer.body {
            Reply::Restarted { starts } if starts.wrapping_sub(known) as i32 > 0 => return Ok(None),
            // Reports an earlier death, or answers a request that was repeated since.
            Reply::Restarted { .. } => {}
            body if answer.tag == tag => return Ok(Some(body)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection may have moved before its program knows the number under which it was registered.
    #[test]
    fn an_early_move_is_seen() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = Connection::unregistered(memory.clone());
        connection.set_number(3);
        assert!(!connection.has_moved());
        memory.word32(at::block(3) + block::MOVES).store(1, RELAXED);
        connection.set_number(3);
        assert!(connection.has_moved());
    }

    /// With no room in the ring the connection is not shut down, and a later attempt shuts it down.
    #[test]
    fn shutting_down_waits_for_room() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        let shared = Shared::on(memory);
        let connection = shared.unregistered();
        connection.set_number(0);
        let filler = Message::control(Operation::NicControl, Control::NoDelay, Cid::new(0, 1), 0, 0);
        {
            let mut commands = shared.commands.lock(1).unwrap();
            while commands.push(filler.to_words()).is_ok() {}
            commands.publish();
        }
        let refused = shared.shutdown(&connection, 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert!(!shared.readiness(&connection, 1).shut);
        while nic.pop().is_some() {}
        nic.release();
        shared.shutdown(&connection, 1).unwrap();
        assert!(shared.readiness(&connection, 1).shut);
        let sent = Message::from_words(nic.pop().unwrap()).unwrap();
        assert_eq!((sent.operation, sent.kind), (Operation::NicControl, Control::Shutdown as u16));
    }

    /// A connection that has left the NIC is checked later than the next one in its slot: the next one's events still reach it.
    #[test]
    fn slots_are_reused() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = |number, cid: Cid| {
            let connection = Connection::unregistered(memory.clone());
            connection.set_number(number);
            memory.word32(at::block(number) + block::CID).store(cid.0, RELAXED);
            connection.refresh();
            Some(Arc::new(connection))
        };
        let (first, next) = (Cid::new(5, 1), Cid::new(5, 2));
        let connections = vec![connection(0, first), connection(1, next)];
        let mut events = Events::new(&memory);
        let number = |found: Option<&Connection>| found.map(Connection::number);
        for late in [1, 0] {
            events.note(connections[late].as_ref().unwrap());
        }
        assert_eq!(number(events.find(&connections, next)), None);
        assert_eq!(number(events.search(&connections, next)), Some(1));
        assert_eq!(number(events.find(&connections, next)), Some(1));
        assert_eq!(number(events.search(&connections, Cid::new(5, 3))), None);
    }
}
