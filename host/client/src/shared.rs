//! A program's side of the interface, for any number of threads: the session with the agent, and what can be done with a connection
//! while the NIC has it. Nothing here waits for the network.

use crate::connection::{Connection, Entered, Inside, Readiness};
use crate::protocol::{Answer, Ask, Detail, Opening, Place, Reply, Request, Until};
use baton_abi::layout::Owner;
use baton_abi::layout::session as at;
use baton_abi::{Cid, Control, MORE, Message, Operation, add_length, counts_bytes};
use baton_kernel::control::Channel;
use baton_kernel::events::Doorbell;
use baton_kernel::process::Undisturbed;
use baton_ring::{
    Consumer, Lock, MovableWords, Producer, Region, RingWords, Token, count_sleeper, needs_doorbell, uncount_sleeper,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

const RELAXED: Ordering = Ordering::Relaxed;

/// A session with the agent.
#[derive(Debug)]
pub struct Shared {
    /// Its number, as tools show it.
    pub number: u32,
    memory: Arc<Region>,
    channel: Mutex<Channel>,
    commands: Lock<Producer<RingWords>>,
    events: Lock<Events>,
    connections: RwLock<Connections>,
    nic_bell: Doorbell,
    bell: Doorbell,
    next_tag: AtomicU32,
    moves_seen: AtomicU32,
    nic_sleeping: MovableWords<1>,
    moves: MovableWords<1>,
    listener: Listener,
}

/// Hears of each connection that may have become readable or writable. It is called with the session's events locked, so it must not
/// call the session.
pub struct Listener(pub Box<dyn Fn(u32) + Send + Sync>);

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

/// By number.
type Connections = Vec<Option<Arc<Connection>>>;

#[derive(Debug)]
struct Events {
    ring: Consumer<RingWords>,
    /// Numbers of the connections that were last known in the NIC's slots.
    by_slot: Vec<Option<u32>>,
}

fn protocol_error(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the agent's answer makes no sense: {what}"))
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
    /// If nobody listens there, or the agent is of another version.
    pub fn connect(path: &Path, opening: Opening, listener: Listener) -> io::Result<Shared> {
        Self::connect_above(path, opening, listener, 0)
    }

    /// As [`Shared::connect`], with all descriptors of the session numbered from `lowest` on, out of the program's way.
    ///
    /// # Errors
    /// See there.
    pub fn connect_above(path: &Path, opening: Opening, listener: Listener, lowest: i32) -> io::Result<Shared> {
        let channel = Channel::connect(path).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!(
                    "no agent at {} ({error}); is Baton running, and is that the path that it listens at (BATON_SOCKET)?",
                    path.display()
                ),
            )
        })?;
        let lift = |fd: OwnedFd| if lowest > 0 { baton_kernel::process::lift(fd, lowest) } else { Ok(fd) };
        let channel = Channel::from_fd(lift(channel.into())?);
        channel.send(&Request { tag: 1, body: Ask::Open(opening) }, &[])?;
        let (answer, descriptors): (Answer, Vec<OwnedFd>) = channel.receive()?;
        let number = match answer.body {
            Reply::Opened { session } => session,
            Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("not an opened session")),
        };
        let descriptors = descriptors.into_iter().map(lift).collect::<io::Result<Vec<_>>>()?;
        let Ok([memory, nic_bell, bell]) = <[OwnedFd; 3]>::try_from(descriptors) else {
            return Err(protocol_error("descriptors are missing"));
        };
        let memory = Arc::new(Region::map(memory)?);
        Ok(Shared {
            number,
            channel: Mutex::new(channel),
            commands: Lock::new(Producer::new(memory.ring(at::COMMANDS))),
            events: Lock::new(Events { ring: Consumer::new(memory.ring(at::EVENTS)), by_slot: Vec::new() }),
            nic_sleeping: MovableWords::new(memory.clone(), at::NIC_SLEEPING),
            moves: MovableWords::new(memory.clone(), at::MOVES),
            memory,
            connections: RwLock::default(),
            nic_bell: Doorbell::from_fd(nic_bell),
            bell: Doorbell::from_fd(bell),
            next_tag: AtomicU32::new(2),
            moves_seen: AtomicU32::new(0),
            listener,
        })
    }

    /// Every descriptor that the session has.
    pub fn descriptors(&self) -> [i32; 4] {
        use std::os::fd::AsRawFd;
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).as_fd().as_raw_fd();
        let memory = self.memory.fd().map_or(-1, |fd| fd.as_raw_fd());
        [channel, memory, self.nic_bell.as_fd().as_raw_fd(), self.bell.as_fd().as_raw_fd()]
    }

    fn tag(&self) -> u32 {
        // Nobody waits for an answer with tag 0.
        self.next_tag.fetch_add(1, RELAXED).max(1)
    }

    fn ask(&self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
        // A handler of the program's may close a socket, which asks, too.
        let _undisturbed = Undisturbed::begin();
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let tag = self.tag();
            let known = self.memory.word32(at::AGENT_STARTS).load(Ordering::Acquire);
            channel.send(&Request { tag, body: body.clone() }, &descriptors)?;
            if let Some(reply) = await_answer(&channel, tag, known)? {
                return Ok(reply);
            }
        }
    }

    /// Takes charge of a connected TCP socket, which stays in the kernel until it is moved. `inherited`: other processes may hold the
    /// same socket. From now on nobody may wait inside the kernel for that socket while the connection can be moved.
    ///
    /// # Errors
    /// With the reason, if it is no connection that could ever be moved.
    pub fn register(&self, fd: BorrowedFd<'_>, inherited: bool) -> io::Result<Arc<Connection>> {
        let connection = self.unnamed();
        self.register_as(&connection, fd, inherited)?;
        Ok(connection)
    }

    /// What will stand for one connection after another: a program whose threads may be late with a closed connection keeps these.
    pub fn unnamed(&self) -> Arc<Connection> {
        Arc::new(Connection::unnamed(self.memory.clone()))
    }

    /// As [`Shared::register`], under what [`Shared::unnamed`] gave and stands for no other connection now.
    ///
    /// # Errors
    /// See there.
    pub fn register_as(&self, connection: &Arc<Connection>, fd: BorrowedFd<'_>, inherited: bool) -> io::Result<()> {
        let number = match self.ask(&Ask::Register { inherited, process: None }, Some(fd))? {
            Reply::Registered { connection } => connection,
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("not a registration")),
        };
        self.take_charge(connection, number);
        Ok(())
    }

    /// What [`Shared::unnamed`] gave stands for the connection that was registered under this number.
    pub fn take_charge(&self, connection: &Arc<Connection>, number: u32) {
        connection.rename(number);
        let mut connections = self.connections.write().unwrap_or_else(PoisonError::into_inner);
        if connections.len() <= number as usize {
            connections.resize_with(number as usize + 1, || None);
        }
        connections[number as usize] = Some(connection.clone());
    }

    /// Moves a connection and waits until it is there.
    ///
    /// # Errors
    /// `WouldBlock` with the reason if trying again may help, `Other` with the reason if not; it stays where it was.
    pub fn move_to(&self, connection: u32, to: Place) -> io::Result<()> {
        match self.ask(&Ask::Move { connection, to }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("not a move")),
        }
    }

    /// Asks for a move and does not wait for it.
    ///
    /// # Errors
    /// If the agent is gone.
    pub fn suggest(&self, connection: u32, to: Place) -> io::Result<()> {
        let _undisturbed = Undisturbed::begin();
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        channel.send(&Request { tag: 0, body: Ask::Move { connection, to } }, &[])
    }

    /// Brings a connection into the kernel, and says why, and when it may move again.
    ///
    /// # Errors
    /// If the agent is gone, or the connection cannot be in the kernel now.
    pub fn give_back(&self, connection: u32, reason: &str, until: Until) -> io::Result<()> {
        match self.ask(&Ask::GiveBack { connection, reason: reason.into(), until }, None)? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("not a move")),
        }
    }

    /// The connection is the program's alone again, in the kernel.
    ///
    /// # Errors
    /// If the agent is gone, or the connection cannot be in the kernel now.
    pub fn forget(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let reply = self.ask(&Ask::Forget { connection: connection.number() }, None);
        self.let_go(connection, token);
        match reply? {
            Reply::Done => Ok(()),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("not a release")),
        }
    }

    /// The agent has forgotten a connection.
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

    /// The control connection, for a session whose agent says things unasked. Nothing else may ask the agent then.
    pub fn channel(&self) -> &Mutex<Channel> {
        &self.channel
    }

    /// What agent and NIC know of a connection that is on the NIC.
    ///
    /// # Errors
    /// If the agent is gone, or does not know it there.
    pub fn detail(&self, connection: u32) -> io::Result<Detail> {
        match self.ask(&Ask::Detail { connection }, None)? {
            Reply::Detail(detail) => Ok(detail),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("not a connection's detail")),
        }
    }

    /// Tells the agent that the program ends, and waits until it has taken note.
    ///
    /// # Errors
    /// If the agent is gone.
    pub fn say_goodbye(&self) -> io::Result<()> {
        self.ask(&Ask::Goodbye, None).map(|_| ())
    }

    /// Enters an operation on a connection. None while it is being moved (see [`Connection::wait_until_settled`]), or if this thread is
    /// inside already.
    #[inline(always)]
    pub fn enter<'a>(&self, connection: &'a Connection, token: Token) -> Option<Entered<'a>> {
        let entered = connection.enter(token)?;
        if connection.has_moved() {
            self.note_move(connection, token);
        }
        Some(entered)
    }

    /// What can be done with a connection that the NIC has; not what could be done before its last move.
    #[inline]
    pub fn readiness(&self, connection: &Connection, token: Token) -> Readiness {
        if connection.has_moved() && connection.owner() != Owner::Moving {
            self.note_move(connection, token);
        }
        connection.readiness()
    }

    #[cold]
    fn note_move(&self, connection: &Connection, token: Token) {
        if let Some(mut events) = self.events.lock(token)
            && connection.has_moved()
        {
            refresh(&mut events, connection);
            // Others, too, have to look at it anew.
            self.listener.0(connection.number());
        }
    }

    /// Queues bytes for sending, as many as there is room for. The connection must be entered, and the NIC's.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room, else what the connection ended with.
    #[inline]
    pub fn send(&self, connection: &Connection, token: Token, bytes: &[u8]) -> io::Result<usize> {
        self.send_pieces(connection, token, bytes.len(), std::iter::once(bytes))
    }

    /// As [`Shared::send`], of `total` bytes in pieces, which leave as if they were one.
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
            let message = Message::new(Operation::NicSend, connection.name(), memory.offset_of(seq), length);
            let _ = commands.push(Message { kind: more, ..message }.to_words());
        };
        if first < length {
            // Around the memory's end: the NIC hears of two pieces, but sends them as one.
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

    /// [`Shared::enter`], [`Shared::send`] and leaving, in the plainest case: the NIC has the connection, nobody is in the way, and all
    /// bytes go at once. False, and nothing has been sent, in any other.
    #[inline(always)]
    pub fn send_at_once(&self, connection: &Connection, token: Token, bytes: &[u8]) -> bool {
        let Some(block) = connection.step_in(token) else { return false };
        let done = self.put_at_once(connection, block, token, bytes);
        block.step_out();
        // A full barrier, for whoever waits for this operation to end, too.
        self.ring_nic();
        block.tell_mover();
        done
    }

    #[inline(always)]
    fn put_at_once(&self, connection: &Connection, block: Inside<'_>, token: Token, bytes: &[u8]) -> bool {
        if connection.stopped.load(RELAXED) || bytes.len() > connection.room() as usize {
            return false;
        }
        let queued = connection.queued.load(RELAXED);
        let Some(address) = connection.send_memory.write_straight(queued, bytes) else { return false };
        let message = Message::new(Operation::NicSend, connection.name(), address, bytes.len() as u32);
        let Some(mut commands) = self.commands.lock(token) else { return false };
        let pushed = commands.push(message.to_words()).is_ok();
        if pushed {
            connection.note_queued(block, queued.wrapping_add(bytes.len() as u32));
            commands.publish();
        }
        pushed
    }

    /// [`Shared::enter`], [`Shared::receive`] and leaving, in the plainest case: something is there.
    /// 0, and nothing has been received, in any other.
    #[inline(always)]
    pub fn receive_at_once(&self, connection: &Connection, token: Token, out: &mut [u8]) -> usize {
        let Some(block) = connection.step_in(token) else { return 0 };
        let done = self.take_at_once(connection, block, token, out);
        block.step_out();
        fence(Ordering::SeqCst);
        block.tell_mover();
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
        if is_worth_telling(connection, end) || !connection.receive_memory.read_straight(read, out) {
            return self.take_and_tell(connection, block, token, out);
        }
        connection.note_read(block, end);
        length
    }

    /// The bytes that follow are all there, but they may go around, or the NIC has to hear that they are read.
    #[inline(never)]
    fn take_and_tell(&self, connection: &Connection, block: Inside<'_>, token: Token, out: &mut [u8]) -> usize {
        let read = connection.read.load(RELAXED);
        let end = read.wrapping_add(out.len() as u32);
        connection.receive_memory.read(read, out);
        if is_worth_telling(connection, end) && self.tell_read(connection, token, end).is_err() {
            return 0;
        }
        connection.note_read(block, end);
        out.len()
    }

    /// `nic_recvd`: the program has read up to here.
    fn tell_read(&self, connection: &Connection, token: Token, read: u32) -> io::Result<()> {
        let length = read.wrapping_sub(connection.told_read.load(RELAXED));
        let message = Message::new(Operation::NicRecvd, connection.name(), 0, length);
        let Some(mut commands) = self.commands.lock(token) else { return Err(would_block()) };
        commands.push(message.to_words()).map_err(|_| would_block())?;
        connection.note_told(read);
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
            self.nic_bell.ring();
        }
    }

    /// Bytes that can be received now, if fewer than are wanted of what is known so far: after the NIC's news. The connection must be
    /// entered, and the NIC's.
    #[inline(always)]
    fn unread(&self, connection: &Connection, token: Token, wanted: usize) -> u32 {
        let unread = || connection.received.load(RELAXED).wrapping_sub(connection.read.load(RELAXED));
        if (unread() as usize) < wanted {
            self.catch_up(token);
        }
        unread()
    }

    /// Receives bytes; 0 at the end of the stream. The connection must be entered, and the NIC's.
    ///
    /// # Errors
    /// `WouldBlock` if nothing waits, else what the connection ended with.
    #[inline(always)]
    pub fn receive(&self, connection: &Connection, token: Token, out: &mut [u8]) -> io::Result<usize> {
        let length = out.len().min(self.unread(connection, token, out.len()) as usize);
        if length == 0 {
            return self.nothing(connection, out.is_empty());
        }
        let read = connection.read.load(RELAXED);
        connection.receive_memory.read(read, &mut out[..length]);
        self.consume(connection, token, length as u32)?;
        Ok(length)
    }

    /// Takes bytes as read that [`Shared::peek`] has shown. The connection must be entered, and the NIC's.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    #[inline(always)]
    pub fn consume(&self, connection: &Connection, token: Token, length: u32) -> io::Result<()> {
        let read = connection.read.load(RELAXED).wrapping_add(length);
        if is_worth_telling(connection, read) {
            self.tell_read(connection, token, read)?;
        }
        connection.note_read(connection.inside(), read);
        Ok(())
    }

    /// As [`Shared::consume`], of a connection that is being moved, for whoever brings it back.
    ///
    /// # Errors
    /// None.
    pub fn note_read(&self, connection: &Connection, length: u32) -> io::Result<()> {
        connection.note_read(connection.inside(), connection.read.load(RELAXED).wrapping_add(length));
        Ok(())
    }

    /// As [`Shared::receive`], but the bytes are thrown away.
    ///
    /// # Errors
    /// See there.
    pub fn skip(&self, connection: &Connection, token: Token, most: usize) -> io::Result<usize> {
        let mut nowhere = vec![0; most.min(self.unread(connection, token, most) as usize).max(1)];
        self.receive(connection, token, &mut nowhere)
    }

    /// As [`Shared::receive`], from `skip` bytes behind the first unread one, and the bytes stay unread.
    ///
    /// # Errors
    /// See there.
    pub fn peek(&self, connection: &Connection, token: Token, skip: u32, out: &mut [u8]) -> io::Result<usize> {
        let length = out.len().min(self.unread(connection, token, skip as usize + out.len()).saturating_sub(skip) as usize);
        if length == 0 {
            return self.nothing(connection, out.is_empty());
        }
        let from = connection.read.load(RELAXED).wrapping_add(skip);
        connection.receive_memory.read(from, &mut out[..length]);
        Ok(length)
    }

    #[cold]
    fn nothing(&self, connection: &Connection, asked_for_nothing: bool) -> io::Result<usize> {
        if asked_for_nothing {
            return Ok(0);
        }
        match connection.take_error() {
            0 if connection.fin.load(RELAXED) || connection.ended().is_some() => Ok(0),
            0 => Err(would_block()),
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }

    /// `nic_post`: the bytes that follow those that buffers were posted for, or the first unread ones, go to this place in session memory.
    /// The connection must be entered, and the NIC's.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    pub(crate) fn post(&self, connection: &Connection, token: Token, address: u32, length: u32) -> io::Result<()> {
        self.tell_all(connection, token)?;
        let Some(mut commands) = self.commands.lock(token) else { return Err(would_block()) };
        commands
            .push(Message::new(Operation::NicPost, connection.name(), address, length).to_words())
            .map_err(|_| would_block())?;
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(())
    }

    /// The NIC hears how far the program has read, however little that is.
    pub(crate) fn tell_all(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let read = connection.read.load(RELAXED);
        if read == connection.told_read.load(RELAXED) { Ok(()) } else { self.tell_read(connection, token, read) }
    }

    pub(crate) fn memory(&self) -> &Arc<Region> {
        &self.memory
    }

    /// Shuts the sending side down. The connection must be entered, and the NIC's.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    pub fn shutdown(&self, connection: &Connection, token: Token) -> io::Result<()> {
        connection.set_shut(true);
        connection.set_flag(2, true);
        self.control(connection, token, Control::Shutdown, 0, 0)
    }

    fn control(&self, connection: &Connection, token: Token, control: Control, address: u32, length: u32) -> io::Result<()> {
        let message = Message::control(Operation::NicControl, control, connection.name(), address, length);
        let Some(mut commands) = self.commands.lock(token) else { return Err(would_block()) };
        commands.push(message.to_words()).map_err(|_| would_block())?;
        commands.publish();
        drop(commands);
        self.ring_nic();
        Ok(())
    }

    /// A socket option has been set on the descriptor of a connection that the NIC has: the NIC hears of it, as far as it acts on it.
    /// SO_KEEPALIVE must not be set on the descriptor: it would make the shell speak; its value is `keepalive`.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full, else the system's.
    pub fn option_was_set(
        &self,
        connection: &Connection,
        token: Token,
        fd: BorrowedFd<'_>,
        (level, option): (i32, i32),
        value: i32,
    ) -> io::Result<()> {
        let get = |option| baton_kernel::socket::get(fd, 6, option).map(|value| value as u32);
        match (level, option) {
            (6, 1) => self.control(connection, token, Control::NoDelay, value as u32, 0),
            (6, 3) => self.control(connection, token, Control::Cork, value as u32, 0),
            (6, 18) => self.control(connection, token, Control::UserTimeout, value as u32, 0),
            (1, 9) | (6, 4..=6) => {
                if (level, option) == (1, 9) {
                    connection.set_flag(4, value != 0);
                }
                let on = connection.keepalive();
                let (idle, interval, count) = (get(4)?, get(5)?, get(6)?);
                let (first, second) = (idle | u32::from(on) << 31, interval | count << 16);
                self.control(connection, token, Control::KeepAlive, first, second)
            }
            _ => Ok(()),
        }
    }

    /// Whether the NIC has told anything, or something has moved, that [`Shared::catch_up`] has not taken in.
    #[inline(always)]
    pub fn has_news(&self, token: Token) -> bool {
        self.has_moved() || self.events.lock(token).is_some_and(|events| events.ring.has_message())
    }

    #[inline(always)]
    fn has_moved(&self) -> bool {
        self.moves[0].load(Ordering::Acquire) != self.moves_seen.load(RELAXED)
    }

    /// Takes in what the NIC has told; the listener hears of each connection that it was about.
    #[inline(never)]
    pub fn catch_up(&self, token: Token) {
        let Some(mut events) = self.events.lock(token) else { return };
        if self.has_moved() {
            self.look_at_moves(&mut events);
        }
        if !events.ring.has_message() {
            return;
        }
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        // Several in a row about one connection are one piece of news.
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
            // The first news since a move, or since an earlier tenant of the slot was looked at last: find out whose it is.
            self.refresh_names(events, connections);
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
                Some(Control::Fin) => connection.fin.store(true, RELAXED),
                Some(Control::Closed) => connection.set_ended(message.address),
                _ => return None,
            },
            _ => return None,
        }
        Some(connection.number())
    }

    /// Learns the names that connections got by moving.
    #[cold]
    fn refresh_names(&self, events: &mut Events, connections: &Connections) {
        for connection in connections.iter().flatten().filter(|connection| connection.has_moved()) {
            refresh(events, connection);
            self.listener.0(connection.number());
        }
    }

    /// Connections that have moved may be readable and writable: their old readiness says nothing.
    #[cold]
    fn look_at_moves(&self, events: &mut Events) {
        let moves = self.moves[0].load(Ordering::Acquire);
        self.moves_seen.store(moves, RELAXED);
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        for connection in connections.iter().flatten() {
            // One that a thread is using refreshes when it is entered next.
            if connection.has_moved() && connection.owner() != Owner::Moving {
                refresh(events, connection);
                self.listener.0(connection.number());
            }
        }
    }

    /// Rings when there is news while somebody sleeps.
    pub fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// Somebody is going to sleep: whoever asks for [`Shared::has_news`] after this, and finds none, is woken by the bell.
    pub fn count_sleeper(&self) {
        count_sleeper(self.memory.word32(at::PROGRAM_SLEEPING));
    }

    /// Somebody is awake again.
    pub fn uncount_sleeper(&self) {
        uncount_sleeper(self.memory.word32(at::PROGRAM_SLEEPING));
    }
}

/// Whether the NIC should hear that the program has read up to here: room that is a small part of the whole opens no window. Where the
/// connection goes next looks into the block.
#[inline(always)]
fn is_worth_telling(connection: &Connection, read: u32) -> bool {
    read.wrapping_sub(connection.tell_at.load(RELAXED)) as i32 >= 0
}

impl Events {
    #[inline]
    fn find<'a>(&self, connections: &'a Connections, cid: Cid) -> Option<&'a Connection> {
        let number = (*self.by_slot.get(cid.slot() as usize)?)?;
        connections.get(number as usize)?.as_deref().filter(|connection| connection.name() == cid)
    }

    #[cold]
    fn search<'a>(&mut self, connections: &'a Connections, cid: Cid) -> Option<&'a Connection> {
        let found = connections.iter().flatten().find(|connection| connection.name() == cid)?;
        self.note(found);
        Some(found)
    }

    fn forget(&mut self, connection: &Connection) {
        if let Some(known) = self.by_slot.get_mut(connection.name().slot() as usize)
            && *known == Some(connection.number())
        {
            *known = None;
        }
    }

    fn note(&mut self, connection: &Connection) {
        let slot = connection.name().slot() as usize;
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, None);
        }
        self.by_slot[slot] = Some(connection.number());
    }
}

fn refresh(events: &mut Events, connection: &Connection) {
    events.forget(connection);
    connection.refresh();
    events.note(connection);
}

/// The answer, or None if the agent has died with the question.
fn await_answer(channel: &Channel, tag: u32, known: u32) -> io::Result<Option<Reply>> {
    loop {
        let (answer, _): (Answer, _) = channel.receive()?;
        match answer.body {
            Reply::Restarted { starts } if starts.wrapping_sub(known) as i32 > 0 => return Ok(None),
            // News of an earlier death, or the answer to a question that was asked again since.
            Reply::Restarted { .. } => {}
            body if answer.tag == tag => return Ok(Some(body)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::block;

    /// A connection may have moved before its program knows the number under which it was registered.
    #[test]
    fn an_early_move_is_seen() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = Connection::unnamed(memory.clone());
        connection.rename(3);
        assert!(!connection.has_moved());
        memory.word32(at::block(3) + block::MOVES).store(1, RELAXED);
        connection.rename(3);
        assert!(connection.has_moved());
    }

    /// A connection that has left the NIC is looked at later than the next one in its slot: the next one's news still find it.
    #[test]
    fn slots_change_their_tenants() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = |number, cid: Cid| {
            let connection = Connection::unnamed(memory.clone());
            connection.rename(number);
            memory.word32(at::block(number) + block::CID).store(cid.0, RELAXED);
            connection.refresh();
            Some(Arc::new(connection))
        };
        let (first, next) = (Cid::new(5, 1), Cid::new(5, 2));
        let connections = vec![connection(0, first), connection(1, next)];
        let mut events = Events { ring: Consumer::new(memory.ring(at::EVENTS)), by_slot: Vec::new() };
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
