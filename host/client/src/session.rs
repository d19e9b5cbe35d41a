//! A session with the agent, and the socket operations over it.

use crate::connection::{Block, Connection, Offload};
use crate::protocol::{Answer, Ask, Place, Reply, Request, VERSION};
use baton_abi::layout::{Owner, block, session as at};
use baton_abi::{Control, Message, Operation};
use baton_kernel::control::Channel;
use baton_kernel::events::{Doorbell, Poller, Trigger};
use baton_kernel::socket;
use baton_ring::{Consumer, Producer, Region, RingWords, go_to_sleep, needs_doorbell, wake_up};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A connection's number in its session.
pub type ConnectionId = u32;

const BELL: u64 = u64::MAX;
const WATCHED: u64 = u64::MAX - 1;

/// A program's session with the agent. It belongs to one thread.
#[derive(Debug)]
pub struct Session {
    number: u32,
    channel: Channel,
    memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    nic_bell: Doorbell,
    bell: Doorbell,
    poller: Poller,
    connections: Vec<Option<Connection>>,
    by_cid: HashMap<u32, ConnectionId>,
    ready: Vec<ConnectionId>,
    moves_seen: u32,
    next_tag: u32,
    tokens: Vec<u64>,
}

fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

fn protocol_error(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the agent's answer makes no sense: {what}"))
}

impl Session {
    /// Opens a session with the agent that listens at `path`.
    ///
    /// # Errors
    /// If nobody listens there, or the agent is of another version.
    pub fn connect(path: &Path) -> io::Result<Session> {
        let channel = Channel::connect(path).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!(
                    "no agent at {} ({error}); is Baton running, and is that the path that it listens at (BATON_SOCKET)?",
                    path.display()
                ),
            )
        })?;
        channel.send(&Request { tag: 0, body: Ask::Open { version: VERSION } }, &[])?;
        let (answer, descriptors): (Answer, Vec<OwnedFd>) = channel.receive()?;
        let number = match answer.body {
            Reply::Opened { session } => session,
            Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("not an opened session")),
        };
        let Ok([memory, nic_bell, bell]) = <[OwnedFd; 3]>::try_from(descriptors) else {
            return Err(protocol_error("descriptors are missing"));
        };
        let memory = Arc::new(Region::map(memory)?);
        let bell = Doorbell::from_fd(bell);
        let poller = Poller::new()?;
        poller.add(bell.as_fd(), BELL, Trigger::Readable)?;
        Ok(Session {
            number,
            channel,
            commands: Producer::new(memory.ring(at::COMMANDS)),
            events: Consumer::new(memory.ring(at::EVENTS)),
            memory,
            nic_bell: Doorbell::from_fd(nic_bell),
            bell,
            poller,
            connections: Vec::new(),
            by_cid: HashMap::new(),
            ready: Vec::new(),
            moves_seen: 0,
            next_tag: 1,
            tokens: Vec::new(),
        })
    }

    /// The session's number, as tools show it.
    pub fn number(&self) -> u32 {
        self.number
    }

    fn ask(&mut self, body: Ask, descriptor: Option<&OwnedFd>) -> io::Result<Reply> {
        let descriptors: Vec<_> = descriptor.map(AsFd::as_fd).into_iter().collect();
        loop {
            let tag = self.next_tag;
            self.next_tag = self.next_tag.wrapping_add(1).max(1);
            let known = self.memory.word32(at::AGENT_STARTS).load(std::sync::atomic::Ordering::Acquire);
            self.channel.send(&Request { tag, body: body.clone() }, &descriptors)?;
            if let Some(reply) = self.await_answer(tag, known)? {
                return Ok(reply);
            }
        }
    }

    /// The answer, or None if the agent has died with the question.
    fn await_answer(&self, tag: u32, known: u32) -> io::Result<Option<Reply>> {
        loop {
            let (answer, _): (Answer, _) = self.channel.receive()?;
            match answer.body {
                Reply::Restarted { starts } if starts.wrapping_sub(known) as i32 > 0 => return Ok(None),
                // News of an earlier death, or the answer to a question that was asked again since.
                Reply::Restarted { .. } => {}
                body if answer.tag == tag => return Ok(Some(body)),
                _ => {}
            }
        }
    }

    /// Takes charge of a connected TCP socket, which stays in the kernel until it is moved. The descriptor must not block.
    ///
    /// # Errors
    /// With the reason, if it is no connection that could ever be moved; the descriptor is closed then.
    pub fn adopt(&mut self, fd: OwnedFd) -> io::Result<ConnectionId> {
        let reply = self.ask(Ask::Register, Some(&fd))?;
        let id = match reply {
            Reply::Registered { connection } => connection,
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => return Err(io::Error::other(reason)),
            _ => return Err(protocol_error("not a registration")),
        };
        self.poller.add(fd.as_fd(), u64::from(id), Trigger::Edge)?;
        let block = Block::new(self.memory.clone(), id);
        let moves = block.load(block::MOVES);
        let connection = Connection { fd, block, moves, offload: Offload::default(), error: None, ready: false };
        if self.connections.len() <= id as usize {
            self.connections.resize_with(id as usize + 1, || None);
        }
        self.connections[id as usize] = Some(connection);
        self.mark_ready(id);
        Ok(id)
    }

    /// Moves a connection and waits until it is there.
    ///
    /// # Errors
    /// `WouldBlock` with the reason if trying again may help, `Other` with the reason if not; it stays where it was.
    pub fn move_to(&mut self, id: ConnectionId, to: Place) -> io::Result<()> {
        match self.ask(Ask::Move { connection: id, to }, None)? {
            Reply::Done => {
                self.look_at_moves();
                Ok(())
            }
            Reply::Stayed { reason, transient: true } => Err(io::Error::new(io::ErrorKind::WouldBlock, reason)),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("not a move")),
        }
    }

    /// Where a connection is; None while it moves.
    pub fn place(&self, id: ConnectionId) -> Option<Place> {
        let connection = self.connections.get(id as usize)?.as_ref()?;
        match Owner::from_number(connection.block.load(block::OWNER)) {
            Owner::Kernel => Some(Place::Kernel),
            Owner::Nic => Some(Place::Nic),
            Owner::Moving | Owner::Nobody => None,
        }
    }

    /// Gives the descriptor back to the program; the connection is in the kernel and no longer Baton's.
    ///
    /// # Errors
    /// If the agent is gone; the descriptor is lost then.
    pub fn release(&mut self, id: ConnectionId) -> io::Result<OwnedFd> {
        let reply = self.ask(Ask::Forget { connection: id }, None)?;
        let connection = self.connections.get_mut(id as usize).and_then(Option::take).ok_or(io::ErrorKind::NotFound)?;
        self.by_cid.remove(&connection.offload.cid.0);
        let _ = self.poller.remove(connection.fd.as_fd());
        match reply {
            Reply::Done => Ok(connection.fd),
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => Err(io::Error::other(reason)),
            _ => Err(protocol_error("not a release")),
        }
    }

    /// Closes a connection as close(2) would.
    ///
    /// # Errors
    /// As [`Session::release`].
    pub fn close(&mut self, id: ConnectionId) -> io::Result<()> {
        self.release(id).map(drop)
    }

    /// Ends [`Session::poll`] when another descriptor, such as a listener, becomes readable.
    ///
    /// # Errors
    /// The system's.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.poller.add(fd, WATCHED, Trigger::Readable)
    }

    fn mark_ready(&mut self, id: ConnectionId) {
        if let Some(Some(connection)) = self.connections.get_mut(id as usize)
            && !connection.ready
        {
            connection.ready = true;
            self.ready.push(id);
        }
    }

    /// Runs `operation` while the owner of the connection cannot change.
    fn within<T>(
        &mut self,
        id: ConnectionId,
        operation: impl FnOnce(&mut Session, &mut Connection, Owner) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut connection = self.connections.get_mut(id as usize).and_then(Option::take).ok_or(io::ErrorKind::NotFound)?;
        let result = match connection.block.enter() {
            None => Err(would_block()),
            Some(owner) => {
                let before = connection.offload.cid;
                connection.refresh();
                if connection.offload.cid != before {
                    self.by_cid.remove(&before.0);
                    self.by_cid.insert(connection.offload.cid.0, id);
                }
                let result = operation(self, &mut connection, owner);
                connection.block.leave();
                result
            }
        };
        self.connections[id as usize] = Some(connection);
        result
    }

    /// Queues bytes for sending, as many as there is room for.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room or the connection is being moved, else what the connection ended with.
    pub fn send(&mut self, id: ConnectionId, bytes: &[u8]) -> io::Result<usize> {
        self.drain_events();
        self.within(id, |session, connection, owner| match owner {
            Owner::Nic => session.send_to_nic(connection, bytes),
            _ => socket::send(connection.fd.as_fd(), bytes),
        })
    }

    fn send_to_nic(&mut self, connection: &mut Connection, bytes: &[u8]) -> io::Result<usize> {
        if let Some(error) = connection.error {
            return Err(io::Error::from_raw_os_error(if error == 0 { 32 } else { error as i32 }));
        }
        let offload = &mut connection.offload;
        if offload.shut {
            return Err(io::Error::from_raw_os_error(32));
        }
        let used = offload.queued.wrapping_sub(offload.acked);
        let room = (offload.send_mask + 1).saturating_sub(used) as usize;
        let length = bytes.len().min(room);
        if length == 0 && !bytes.is_empty() || !self.commands.has_room(2) {
            return Err(would_block());
        }
        let offset = offload.queued & offload.send_mask;
        let (first, second) = bytes[..length].split_at(length.min((offload.send_mask + 1 - offset) as usize));
        for (offset, piece) in [(offset, first), (0, second)] {
            if piece.is_empty() {
                continue;
            }
            let address = offload.send_base + offset as usize;
            self.memory.write(address, piece).map_err(|_| protocol_error("send memory"))?;
            let message = Message::new(Operation::NicSend, offload.cid, address as u32, piece.len() as u32);
            let _ = self.commands.push(message.to_words());
        }
        offload.queued = offload.queued.wrapping_add(length as u32);
        connection.block.store(block::QUEUED_SEQ, offload.queued);
        self.ring_nic();
        Ok(length)
    }

    fn ring_nic(&mut self) {
        self.commands.publish();
        if needs_doorbell(self.memory.word32(at::NIC_SLEEPING)) {
            self.nic_bell.ring();
        }
    }

    /// Receives bytes; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if nothing waits or the connection is being moved, else what the connection ended with.
    pub fn receive(&mut self, id: ConnectionId, out: &mut [u8]) -> io::Result<usize> {
        self.drain_events();
        self.within(id, |session, connection, owner| match owner {
            Owner::Nic => session.receive_from_nic(connection, out),
            _ => socket::receive(connection.fd.as_fd(), out),
        })
    }

    fn receive_from_nic(&mut self, connection: &mut Connection, out: &mut [u8]) -> io::Result<usize> {
        let offload = &mut connection.offload;
        let waiting = offload.received.wrapping_sub(offload.read) as usize;
        let length = out.len().min(waiting);
        if length == 0 {
            return match connection.error {
                Some(error) if error != 0 => Err(io::Error::from_raw_os_error(error as i32)),
                Some(_) => Ok(0),
                None if offload.fin => Ok(0),
                None => Err(would_block()),
            };
        }
        if !self.commands.has_room(1) {
            return Err(would_block());
        }
        let offset = offload.read & offload.receive_mask;
        let until_end = (offload.receive_mask + 1 - offset) as usize;
        let (first, second) = out[..length].split_at_mut(length.min(until_end));
        let damaged = |_| protocol_error("receive memory");
        self.memory.read(offload.receive_base + offset as usize, first).map_err(damaged)?;
        self.memory.read(offload.receive_base, second).map_err(damaged)?;
        offload.read = offload.read.wrapping_add(length as u32);
        connection.block.store(block::READ_SEQ, offload.read);
        let _ = self.commands.push(Message::new(Operation::NicRecvd, offload.cid, 0, length as u32).to_words());
        self.ring_nic();
        Ok(length)
    }

    /// Shuts the sending side down.
    ///
    /// # Errors
    /// `WouldBlock` while the connection is being moved, else the system's.
    pub fn shutdown(&mut self, id: ConnectionId) -> io::Result<()> {
        self.within(id, |session, connection, owner| match owner {
            Owner::Nic => {
                connection.offload.shut = true;
                let flags = connection.block.load(block::FLAGS);
                connection.block.store(block::FLAGS, flags | 2);
                session.control(connection, Control::Shutdown, 0, 0)
            }
            _ => socket::shutdown_write(connection.fd.as_fd()),
        })
    }

    fn control(&mut self, connection: &Connection, control: Control, address: u32, length: u32) -> io::Result<()> {
        let message = Message::control(Operation::NicControl, control, connection.offload.cid, address, length);
        self.commands.push(message.to_words()).map_err(|_| would_block())?;
        self.ring_nic();
        Ok(())
    }

    /// Sets a socket option. It takes effect wherever the connection is, and goes with it when it moves.
    ///
    /// # Errors
    /// `WouldBlock` while the connection is being moved, else the system's.
    pub fn set_option(&mut self, id: ConnectionId, level: i32, option: i32, value: i32) -> io::Result<()> {
        self.within(id, |session, connection, owner| {
            let fd = connection.fd.as_fd();
            // SO_KEEPALIVE would make the shell speak: the NIC keeps alive, the agent remembers.
            let keepalive = (level, option) == (1, 9);
            if owner != Owner::Nic {
                return socket::set(fd, level, option, value);
            }
            if keepalive {
                let flags = connection.block.load(block::FLAGS);
                connection.block.store(block::FLAGS, if value != 0 { flags | 4 } else { flags & !4 });
            } else {
                socket::set(fd, level, option, value)?;
            }
            let get = |option| socket::get(connection.fd.as_fd(), 6, option).map(|value| value as u32);
            match (level, option) {
                (6, 1) => session.control(connection, Control::NoDelay, value as u32, 0),
                (6, 3) => session.control(connection, Control::Cork, value as u32, 0),
                (6, 18) => session.control(connection, Control::UserTimeout, value as u32, 0),
                (1, 9) | (6, 4..=6) => {
                    let on = connection.block.load(block::FLAGS) & 4 != 0;
                    let (idle, interval, count) = (get(4)?, get(5)?, get(6)?);
                    session.control(connection, Control::KeepAlive, idle | u32::from(on) << 31, interval | count << 16)
                }
                _ => Ok(()),
            }
        })
    }

    /// Reads an integer socket option, as the program set it.
    ///
    /// # Errors
    /// The system's.
    pub fn option(&mut self, id: ConnectionId, level: i32, option: i32) -> io::Result<i32> {
        self.within(id, |_, connection, owner| {
            if owner == Owner::Nic && (level, option) == (1, 9) {
                return Ok(i32::from(connection.block.load(block::FLAGS) & 4 != 0));
            }
            socket::get(connection.fd.as_fd(), level, option)
        })
    }

    /// Takes in what the NIC has told.
    fn drain_events(&mut self) {
        let mut any = false;
        while let Some(words) = self.events.pop() {
            any = true;
            if let Some(message) = Message::from_words(words) {
                self.on_event(&message);
            }
        }
        if any {
            self.events.release();
        }
    }

    fn on_event(&mut self, message: &Message) {
        let id = match self.by_cid.get(&message.cid.0) {
            Some(id) => *id,
            None => {
                // The first news since a move: find out whose it is.
                self.refresh_names();
                let Some(id) = self.by_cid.get(&message.cid.0) else { return };
                *id
            }
        };
        let Some(Some(connection)) = self.connections.get_mut(id as usize) else { return };
        let offload = &mut connection.offload;
        if offload.cid != message.cid {
            return;
        }
        match message.operation {
            Operation::OsRecv => offload.received = offload.received.wrapping_add(message.length),
            Operation::OsAck => offload.acked = offload.acked.wrapping_add(message.length),
            Operation::OsControl => match Control::from_number(message.kind) {
                Some(Control::Fin) => offload.fin = true,
                Some(Control::Closed) => connection.error = Some(message.address),
                _ => return,
            },
            _ => return,
        }
        self.mark_ready(id);
    }

    /// Learns the names that connections got by moving.
    fn refresh_names(&mut self) {
        for (id, slot) in self.connections.iter_mut().enumerate() {
            if let Some(connection) = slot
                && connection.block.load(block::MOVES) != connection.moves
            {
                self.by_cid.remove(&connection.offload.cid.0);
                connection.refresh();
                self.by_cid.insert(connection.offload.cid.0, id as u32);
            }
        }
    }

    /// Connections that have moved may be readable and writable: their old readiness says nothing.
    fn look_at_moves(&mut self) {
        let moves = self.memory.word32(at::MOVES).load(std::sync::atomic::Ordering::Acquire);
        if moves == self.moves_seen {
            return;
        }
        self.moves_seen = moves;
        for id in 0..self.connections.len() as u32 {
            let Some(Some(connection)) = self.connections.get(id as usize) else { continue };
            if connection.block.load(block::MOVES) != connection.moves {
                self.mark_ready(id);
            }
        }
    }

    /// Waits up to `timeout` for connections that may have become readable or writable, and appends them to `ready`. Each must then be
    /// used until it would block, as with edge-triggered epoll. A zero time-out only looks.
    ///
    /// # Errors
    /// The system's.
    pub fn poll(&mut self, timeout: Option<Duration>, ready: &mut Vec<ConnectionId>) -> io::Result<()> {
        self.drain_events();
        self.look_at_moves();
        let flag_at = at::PROGRAM_SLEEPING;
        let sleeps = self.ready.is_empty() && timeout != Some(Duration::ZERO);
        if sleeps {
            go_to_sleep(self.memory.word32(flag_at));
        }
        let limit = if sleeps && !self.events.has_message() { timeout } else { Some(Duration::ZERO) };
        let mut tokens = std::mem::take(&mut self.tokens);
        let waited = self.poller.wait(limit, &mut tokens);
        if sleeps {
            wake_up(self.memory.word32(flag_at));
        }
        for token in tokens.drain(..) {
            match token {
                BELL => self.bell.clear(),
                WATCHED => {}
                connection => self.mark_ready(connection as u32),
            }
        }
        self.tokens = tokens;
        waited?;
        self.drain_events();
        self.look_at_moves();
        for id in self.ready.drain(..) {
            if let Some(Some(connection)) = self.connections.get_mut(id as usize) {
                connection.ready = false;
                ready.push(id);
            }
        }
        Ok(())
    }
}
