//! A session that belongs to one thread.

use crate::buffer::{Buffer, Filled, Posts, Store};
use crate::connection::Connection;
use crate::sent::{Sends, Table};
use crate::shared::{Listener, Received, Shared};
use baton_abi::layout::Owner;
use baton_linux::events::{Poller, Trigger};
use baton_linux::{socket, topology};
use baton_protocol::program::{Opening, Place, Until};
use baton_ring::Token;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A connection's number in its session.
pub type ConnectionId = u32;

const BELL: u64 = u64::MAX;
const WATCHED: u64 = u64::MAX - 1;
const END: u64 = u64::MAX - 2;

/// Token of the one thread that uses the session.
const ME: Token = 1;
/// Level and number of SO_INCOMING_CPU.
const SO_INCOMING_CPU: (i32, i32) = (1, 49);

#[derive(Debug)]
struct Adopted {
    fd: OwnedFd,
    connection: Arc<Connection>,
    /// Whether the connection is in the list of those that may be ready.
    ready: bool,
}

const _: () = assert!(size_of::<Option<Adopted>>() <= 16);

/// A program's session with the agent. It belongs to one thread.
#[derive(Debug)]
pub struct Session {
    shared: Shared,
    /// Partial offload: buffers cannot be posted, since NIC and host's TCP would both write to them.
    fast_path: bool,
    changed: Arc<Mutex<Vec<ConnectionId>>>,
    poller: Poller,
    connections: Vec<Option<Adopted>>,
    ready: Vec<ConnectionId>,
    tokens: Vec<u64>,
    /// Polls since the last look at the descriptors.
    unlooked: u32,
    store: Store,
    /// Posted buffers for the bytes that arrive next, of the few connections that have any.
    posts: BTreeMap<ConnectionId, Posts>,
    /// Sends from buffers, of the few connections that have any; and those of released connections that the NIC may
    /// still be sending.
    sends: BTreeMap<ConnectionId, Sends>,
    kept: Vec<(Arc<Connection>, Sends)>,
    table: Table,
}

/// Most polls in a row that return connections on the NIC without checking the descriptors (of connections in the
/// kernel, watched ones, and the agent's), since that costs a system call.
const MOST_UNLOOKED: u32 = 8;

/// Ignores `WouldBlock`, for an operation that is repeated later.
fn later(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        other => other,
    }
}

fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

impl Session {
    /// Opens a session with the agent that listens at `path`.
    ///
    /// # Errors
    /// If no agent listens there, or it is of another version.
    pub fn connect(path: &Path) -> io::Result<Session> {
        Session::open(path, Opening::alone())
    }

    /// As [`Session::connect`], with partial offload: the NIC runs only the fast path of the session's connections, if
    /// it can.
    ///
    /// # Errors
    /// As [`Session::connect`].
    pub fn connect_for_fast_path(path: &Path) -> io::Result<Session> {
        Session::open(path, Opening { fast_path: true, ..Opening::alone() })
    }

    fn open(path: &Path, opening: Opening) -> io::Result<Session> {
        let changed = Arc::new(Mutex::new(Vec::new()));
        let sink = changed.clone();
        let listener = Listener(Box::new(move |number| sink.lock().unwrap_or_else(PoisonError::into_inner).push(number)));
        let fast_path = opening.fast_path;
        let shared = Shared::connect(path, opening, listener)?;
        let poller = Poller::new()?;
        poller.add(shared.bell().as_fd(), BELL, Trigger::Readable)?;
        poller.add(shared.hangs_up(), END, Trigger::HangUp)?;
        let store = Store::new(&shared);
        Ok(Session {
            shared,
            fast_path,
            changed,
            poller,
            connections: Vec::new(),
            ready: Vec::new(),
            tokens: Vec::new(),
            unlooked: 0,
            store,
            posts: BTreeMap::new(),
            sends: BTreeMap::new(),
            kept: Vec::new(),
            table: Table::default(),
        })
    }

    /// The session's number, as tools show it.
    pub fn number(&self) -> u32 {
        self.shared.number
    }

    /// Adopts a connected TCP socket, which stays in the kernel until it is moved. The descriptor must be non-blocking.
    ///
    /// # Errors
    /// As [`Session::try_adopt`]; the descriptor is closed then.
    pub fn adopt(&mut self, fd: OwnedFd) -> io::Result<ConnectionId> {
        self.try_adopt(fd).map_err(|(error, _)| error)
    }

    /// As [`Session::adopt`], for a connection that the program continues to use in the kernel if it is not adopted.
    ///
    /// # Errors
    /// The descriptor, and why: `TimedOut`, `WouldBlock` or `ResourceBusy` if trying again may help (for example, the
    /// agent does not answer because a NIC has died), anything else if this connection can never be moved.
    pub fn try_adopt(&mut self, fd: OwnedFd) -> Result<ConnectionId, (io::Error, OwnedFd)> {
        let connection = match self.shared.register(fd.as_fd(), false) {
            Ok(connection) => connection,
            Err(error) => return Err((error, fd)),
        };
        let id = connection.number();
        self.table.clear(self.shared.memory(), id);
        if let Err(error) = self.poller.add(fd.as_fd(), u64::from(id), Trigger::Edge) {
            let _ = self.shared.forget(&connection, Duration::ZERO);
            return Err((error, fd));
        }
        if self.connections.len() <= id as usize {
            self.connections.resize_with(id as usize + 1, || None);
        }
        self.connections[id as usize] = Some(Adopted { fd, connection, ready: false });
        self.mark_ready(id);
        Ok(id)
    }

    /// Moves a connection and waits until the move is done.
    ///
    /// # Errors
    /// `WouldBlock` with the reason if trying again may help, `Other` with the reason if not; the connection stays
    /// where it was.
    pub fn move_to(&mut self, id: ConnectionId, to: Place) -> io::Result<()> {
        self.shared.move_to(id, to)?;
        self.shared.catch_up(ME);
        Ok(())
    }

    /// Where a connection is; None during a move.
    pub fn place(&self, id: ConnectionId) -> Option<Place> {
        match self.adopted(id).ok()?.connection.owner() {
            Owner::Kernel | Owner::Nobody => Some(Place::Kernel),
            Owner::Nic => Some(Place::Nic),
            Owner::Moving => None,
        }
    }

    fn adopted(&self, id: ConnectionId) -> io::Result<&Adopted> {
        Self::adopted_of(&self.connections, id)
    }

    /// Returns the descriptor to the program; the connection is in the kernel and no longer Baton's.
    ///
    /// # Errors
    /// If the agent has ended; the descriptor is lost then.
    pub fn release(&mut self, id: ConnectionId) -> io::Result<OwnedFd> {
        let adopted = self.connections.get_mut(id as usize).and_then(Option::take).ok_or(io::ErrorKind::NotFound)?;
        self.posts.remove(&id);
        let released = self.shared.forget(&adopted.connection, Duration::ZERO);
        let sends = self.sends.remove(&id).filter(Sends::any);
        self.kept.extend(sends.map(|sends| (adopted.connection.clone(), sends)));
        // The NIC no longer reads the buffers of connections that have left it.
        self.kept.retain(|(connection, _)| ![Owner::Kernel, Owner::Nobody].contains(&connection.owner()));
        let _ = self.poller.remove(adopted.fd.as_fd());
        released.map(|_| adopted.fd)
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
    /// The failed system call's.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.poller.add(fd, WATCHED, Trigger::Readable)
    }

    /// Handles the end of agent and keeper: connections that were on the NIC are lost, and their peers are reset.
    fn end(&mut self) {
        let _ = self.poller.remove(self.shared.hangs_up());
        if self.shared.notice_end(ME) {
            let adopted = self.connections.iter().flatten();
            for lost in adopted.filter(|adopted| self.shared.has_lost(&adopted.connection)) {
                let _ = socket::reset(lost.fd.as_fd());
            }
        }
    }

    fn mark_ready(&mut self, id: ConnectionId) {
        if let Some(Some(adopted)) = self.connections.get_mut(id as usize)
            && !adopted.ready
        {
            adopted.ready = true;
            self.ready.push(id);
        }
    }

    /// Queues bytes for sending, as many as there is room for. Returns how many.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room or the connection is being moved, else the error that ended the connection.
    pub fn send(&mut self, id: ConnectionId, bytes: &[u8]) -> io::Result<usize> {
        if !self.sends.is_empty() {
            self.release_sent(id)?;
        }
        let Adopted { fd, connection, .. } = self.adopted(id)?;
        if self.shared.send_at_once(connection, ME, bytes) {
            return Ok(bytes.len());
        }
        let entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner == Owner::Nic {
            return self.shared.send(connection, ME, bytes);
        }
        counted(connection, socket::send(fd.as_fd(), bytes))
    }

    /// Queues a part of a buffer for sending, as much as there is room for, without a copy by this program: while the
    /// connection is on the NIC, the NIC takes the bytes from the buffer, again if they are lost, until the peer has
    /// acknowledged them. They are copied in the kernel, and where the NIC cannot do that: if more than seven such
    /// parts are unacknowledged, with an interface that joins sends, and with partial offload. Returns how many bytes
    /// were queued: one part.
    ///
    /// The bytes must stay unchanged until [`Session::take_sent`] has counted the part: else the peer may get other
    /// bytes. That is the only consequence. The same buffer may be sent on many connections. Its memory is not used for
    /// anything else before all have sent it, even if it is dropped.
    ///
    /// # Errors
    /// `InvalidInput` if the range is empty or not in the buffer, else as [`Session::send`].
    pub fn send_buffer(&mut self, id: ConnectionId, buffer: &Buffer, range: Range<usize>) -> io::Result<usize> {
        if range.is_empty() || range.end > buffer.bytes().len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no such bytes in the buffer"));
        }
        let Adopted { fd, connection, .. } = Self::adopted_of(&self.connections, id)?;
        let sends = self.sends.entry(id).or_default();
        let entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner == Owner::Nic && !self.fast_path {
            let of = (&self.shared, &self.store, &mut self.table);
            return sends.send(of, connection, ME, buffer, range);
        }
        sends.release(&self.shared, &self.table, connection, ME);
        sends.send_in_kernel(buffer, range, |bytes| match entered.owner {
            Owner::Nic => self.shared.send(connection, ME, bytes),
            _ => counted(connection, socket::send(fd.as_fd(), bytes)),
        })
    }

    /// The number of parts queued by [`Session::send_buffer`], in their order, that are no longer needed since the last
    /// call of this: their bytes may now be changed. It does not wait.
    ///
    /// # Errors
    /// If there is no such connection.
    pub fn take_sent(&mut self, id: ConnectionId) -> io::Result<usize> {
        self.catch_up();
        self.release_sent(id)?;
        Ok(self.sends.get_mut(&id).map_or(0, Sends::take_done))
    }

    fn release_sent(&mut self, id: ConnectionId) -> io::Result<()> {
        let Adopted { connection, .. } = Self::adopted_of(&self.connections, id)?;
        if let Some(sends) = self.sends.get_mut(&id) {
            sends.release(&self.shared, &self.table, connection, ME);
        }
        Ok(())
    }

    /// Makes a buffer for [`Session::post`] and [`Session::send_buffer`], in memory that the NIC can reach.
    ///
    /// # Errors
    /// `InvalidInput` for no bytes or more than 2²⁸, `OutOfMemory` if the session has no room left for buffers.
    /// ([`Session::receive`] needs no buffers.)
    pub fn buffer(&self, length: usize) -> io::Result<Buffer> {
        self.store.buffer(length)
    }

    /// Posts a buffer: the bytes received next, after those for earlier buffers, go there. While the connection is on
    /// the NIC, the NIC puts them there itself (`nic_post` of the handoff paper), with no copy by this program; where
    /// it cannot, they are copied. [`Session::take_posted`] returns the buffer; until then [`Session::receive`] must
    /// not be used on the connection.
    ///
    /// # Errors
    /// If there is no such connection, or the session is one of partial offload, or the NIC's ring is full. In the last
    /// case the buffer is kept nevertheless.
    pub fn post(&mut self, id: ConnectionId, buffer: Buffer) -> io::Result<()> {
        if self.fast_path {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "no buffers can be posted in a session of partial offload"));
        }
        let Adopted { connection, .. } = Self::adopted_of(&self.connections, id)?;
        let posts = self.posts.entry(id).or_default();
        posts.add(buffer);
        match self.shared.enter(connection, ME) {
            Some(entered) if entered.owner == Owner::Nic => later(posts.sync(&self.shared, connection, ME)),
            _ => Ok(()),
        }
    }

    /// Returns the first posted buffer once it is full or the stream has ended.
    ///
    /// # Errors
    /// `WouldBlock` if that is not so yet or the connection is being moved, `InvalidInput` if nothing is posted, else
    /// the error that ended the connection.
    pub fn take_posted(&mut self, id: ConnectionId) -> io::Result<Filled> {
        let Adopted { fd, connection, .. } = Self::adopted_of(&self.connections, id)?;
        let posts = self.posts.get_mut(&id).ok_or(io::ErrorKind::InvalidInput)?;
        let entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner == Owner::Nic {
            posts.advance(&self.shared, connection, ME)
        } else {
            posts.advance_in_kernel(|out| counted(connection, socket::receive(fd.as_fd(), out)))
        }
    }

    fn adopted_of(connections: &[Option<Adopted>], id: ConnectionId) -> io::Result<&Adopted> {
        connections.get(id as usize).and_then(Option::as_ref).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Receives bytes. Returns how many; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if none have arrived or the connection is being moved, `InvalidInput` while buffers are posted,
    /// else the error that ended the connection.
    pub fn receive(&mut self, id: ConnectionId, out: &mut [u8]) -> io::Result<usize> {
        let Adopted { fd, connection, .. } = self.adopted(id)?;
        if !self.posts.is_empty() && self.posts.get(&id).is_some_and(|posts| !posts.is_empty()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "buffers are posted: received bytes go there, use take_posted",
            ));
        }
        let received = match self.shared.receive_at_once(connection, ME, out) {
            Received::All => out.len(),
            Received::Some(count) => count,
        };
        if received > 0 {
            return Ok(received);
        }
        let entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner == Owner::Nic {
            return self.shared.receive(connection, ME, out);
        }
        counted(connection, socket::receive(fd.as_fd(), out))
    }

    /// Shuts down the sending side.
    ///
    /// # Errors
    /// `WouldBlock` while the connection is being moved, else the failed system call's.
    pub fn shutdown(&mut self, id: ConnectionId) -> io::Result<()> {
        let Adopted { fd, connection, .. } = self.adopted(id)?;
        let entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner != Owner::Nic {
            return socket::shutdown_write(fd.as_fd());
        }
        if connection.ended().is_some() {
            // ENOTCONN, as in Linux (inet_shutdown).
            return Err(io::Error::from_raw_os_error(107));
        }
        self.shared.shutdown(connection, ME)
    }

    /// Sets a socket option. It takes effect wherever the connection is, and goes with it when it moves.
    ///
    /// # Errors
    /// `WouldBlock` while the connection is being moved, else the failed system call's.
    pub fn set_option(&mut self, id: ConnectionId, level: i32, option: i32, value: i32) -> io::Result<()> {
        let Adopted { fd, connection, .. } = self.adopted(id)?;
        let mut entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner == Owner::Nic && baton_handoff::unenforced::may_keep_in_kernel(level, option) {
            drop(entered);
            self.shared.give_back(connection.number(), "option", Until::Again)?;
            entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        }
        let on_nic = entered.owner == Owner::Nic;
        // SO_KEEPALIVE would make the shell send probes.
        if !on_nic || (level, option) != (1, 9) {
            socket::set(fd.as_fd(), level, option, value)?;
        }
        if !on_nic {
            return Ok(());
        }
        self.shared.option_was_set(connection, ME, fd.as_fd(), (level, option), value)
    }

    /// Reads an integer socket option, as the program set it.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn option(&mut self, id: ConnectionId, level: i32, option: i32) -> io::Result<i32> {
        let Adopted { fd, connection, .. } = self.adopted(id)?;
        let entered = self.shared.enter(connection, ME).ok_or_else(would_block)?;
        if entered.owner == Owner::Nic && (level, option) == (1, 9) {
            return Ok(i32::from(connection.keepalive()));
        }
        if entered.owner == Owner::Nic && (level, option) == SO_INCOMING_CPU {
            return Ok(connection.processor().map_or(-1, |processor| processor as i32));
        }
        socket::get(fd.as_fd(), level, option)
    }

    /// The processor that processes a connection's frames, wherever it is (SO_INCOMING_CPU): in the kernel, or on the
    /// NIC. It changes when the connection moves, also from one worker of the NIC to another. None until a frame has
    /// arrived.
    ///
    /// # Errors
    /// See [`Session::option`].
    pub fn processor(&mut self, id: ConnectionId) -> io::Result<Option<usize>> {
        Ok(self.option(id, SO_INCOMING_CPU.0, SO_INCOMING_CPU.1)?.try_into().ok())
    }

    /// The NUMA node of that processor. None if the system does not know.
    ///
    /// # Errors
    /// See [`Session::option`].
    pub fn node(&mut self, id: ConnectionId) -> io::Result<Option<usize>> {
        Ok(self.processor(id)?.and_then(topology::node_of_cpu))
    }

    /// Reads the NIC's events.
    fn catch_up(&mut self) {
        self.shared.catch_up(ME);
        let changed = std::mem::take(&mut *self.changed.lock().unwrap_or_else(PoisonError::into_inner));
        for id in changed {
            self.mark_ready(id);
        }
    }

    /// Waits up to `timeout` for connections that may have become readable or writable, and appends them to `ready`.
    /// Each must then be used until it would block, as with edge-triggered epoll. With a time-out of zero it does not
    /// wait.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn poll(&mut self, timeout: Option<Duration>, ready: &mut Vec<ConnectionId>) -> io::Result<()> {
        self.catch_up();
        if self.ready.is_empty() || self.unlooked >= MOST_UNLOOKED {
            self.look(timeout)?;
        } else {
            self.unlooked += 1;
        }
        for id in self.ready.drain(..) {
            if let Some(Some(adopted)) = self.connections.get_mut(id as usize) {
                adopted.ready = false;
                ready.push(id);
            }
        }
        Ok(())
    }

    /// Polls the descriptors, and waits for them if no connection is ready.
    fn look(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.unlooked = 0;
        let sleeps = self.ready.is_empty() && timeout != Some(Duration::ZERO);
        if sleeps {
            self.shared.count_sleeper();
        }
        let limit = if sleeps && !self.shared.has_events(ME) { timeout } else { Some(Duration::ZERO) };
        let mut tokens = std::mem::take(&mut self.tokens);
        let waited = self.poller.wait(limit, &mut tokens);
        if sleeps {
            self.shared.uncount_sleeper();
        }
        for token in tokens.drain(..) {
            match token {
                BELL => self.shared.clear_bell(),
                WATCHED => {}
                END => self.end(),
                connection => self.mark_ready(connection as u32),
            }
        }
        self.tokens = tokens;
        waited?;
        self.catch_up();
        Ok(())
    }
}

/// Counts bytes that the kernel has sent or received for a connection.
fn counted(connection: &Connection, done: io::Result<usize>) -> io::Result<usize> {
    if let Ok(bytes) = &done {
        connection.count_in_kernel(*bytes as u32);
    }
    done
}
