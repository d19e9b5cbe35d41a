//! Copies the bytes of one connection between the program's socket and the NIC.

use crate::ME;
use crate::unfit::Unfit;
use baton_abi::layout::Owner;
use baton_client::{Connection, Shared};
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_steering::SocketBypass;
use baton_wire::Flow;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Most unread bytes in the program's receive queue, which has no other limit.
const UNREAD: u64 = 1 << 17;
/// Most sent bytes for which the NIC had no room. A connection that exceeds this is better in the kernel, where the
/// program has to wait.
const BACKLOG: usize = 4 << 20;
/// Bytes that are copied at a time.
pub(crate) const PIECE: usize = 1 << 16;

/// A program's connection.
#[derive(Debug)]
pub(crate) struct Entry {
    pub connection: Arc<Connection>,
    pub process: u32,
    /// The descriptor's number in that process.
    pub fd: i32,
    pub inode: u64,
    pub cookie: u64,
    pub flow: Flow,
    /// Set while it is on the NIC.
    pub joined: Option<Joined>,
    /// Bytes that the program has sent and for which the NIC had no room.
    pub stash: Vec<u8>,
    /// Why it was left in the kernel, if that was reported to the agent.
    pub declined: Option<Unfit>,
    /// The program has shut down its sending side.
    pub shut: bool,
    /// The program has closed it; true if the kernel had reset it by then.
    pub closed: Option<bool>,
    /// Bytes that the program had sent and read on it at the last check.
    pub carried: u64,
}

/// A program's socket in the map of sockets, with its engine.
#[derive(Debug)]
pub(crate) struct Joined {
    pub engine: TcpStream,
    pub engine_flow: Flow,
    /// The engine's peer. Nothing is ever sent to it, but the engine must be connected.
    _sink: TcpStream,
    /// Bytes put into the program's queue, and bytes of these that were reported to the NIC as read.
    pushed: u64,
    accounted: u64,
    /// The program may have sent something. Set when the engine becomes readable, which is reported once.
    pub sent: bool,
}

impl Joined {
    /// Makes an engine.
    pub fn new() -> io::Result<Joined> {
        let (engine, sink) = connected()?;
        engine.set_nonblocking(true)?;
        let _ = socket::set(engine.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 20);
        let engine_flow = Flow { local: engine.local_addr()?.into(), remote: engine.peer_addr()?.into(), device: 0 };
        Ok(Joined { engine, engine_flow, _sink: sink, pushed: 0, accounted: 0, sent: true })
    }
}

/// How many times an engine's connection is made again, each time at another port, and the time limit for each.
const ATTEMPTS: u32 = 5;
const PATIENCE: Duration = Duration::from_millis(200);

/// Makes the two ends of a connection. Any process of this host may connect to the listener meanwhile, and if very many
/// do, the kernel has no room for this connection.
fn connected() -> io::Result<(TcpStream, TcpStream)> {
    let attempt = || -> io::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let one = TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE)?;
        let other = accept_from(&listener, &one)?;
        Ok((one, other))
    };
    (1..ATTEMPTS).find_map(|_| attempt().ok()).map_or_else(attempt, Ok)
}

/// Accepts the connection of `socket`, which has come or comes at once. Another process of this host may have connected
/// first: if its connection were taken for the engine's, the kernel would reset the engine.
fn accept_from(listener: &TcpListener, socket: &TcpStream) -> io::Result<TcpStream> {
    let wanted = socket.local_addr()?;
    // Waits: the kernel may have dropped it, which only the other end notices.
    let limit = [PATIENCE.as_secs() as i64, PATIENCE.subsec_micros().into()].map(i64::to_ne_bytes).concat();
    socket::set_bytes(listener.as_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, &limit)?;
    let deadline = monotonic_micros() + PATIENCE.as_micros() as u64;
    loop {
        let (accepted, from) = listener.accept()?;
        if from == wanted {
            return Ok(accepted);
        }
        if monotonic_micros() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Shortest time in microseconds between two checks of the connections' traffic in the kernel, and the least ratio of
/// that time to a check's duration.
const LOOK: u64 = 100_000;
const PART: u64 = 100;

/// Reports the connections' traffic in the kernel to the agent, which decides by it which of them belong on the NIC.
#[derive(Default)]
pub(crate) struct Counting {
    /// Time of the next check, in microseconds of the monotonic clock.
    due: u64,
}

impl Counting {
    /// Makes the check, if it is due.
    pub fn count<'a>(&mut self, entries: impl Iterator<Item = &'a mut Entry>, bypass: &SocketBypass) {
        let begun = monotonic_micros();
        if begun < self.due {
            return;
        }
        for entry in entries {
            let carried = bypass.carried_by(entry.cookie);
            // A move resets the counter.
            let more = carried.saturating_sub(std::mem::replace(&mut entry.carried, carried)) as u32;
            // While the NIC has the connection, the NIC writes this word.
            if more != 0 && entry.joined.is_none() && entry.connection.owner() == Owner::Kernel {
                entry.connection.count_in_kernel(more);
            }
        }
        let now = monotonic_micros();
        self.due = now + LOOK.max(PART * now.saturating_sub(begun));
    }
}

/// What to do with a connection after its bytes have been copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    GoesOn,
    /// The peer has sent its FIN, and all of its bytes are in the program's queue or on the NIC.
    AtEnd,
    /// The program sends faster than the NIC accepts.
    TooMuch,
    /// The connection has ended on the NIC.
    Ended,
}

impl Entry {
    /// Copies as many bytes as possible, in both directions.
    pub fn carry(&mut self, shared: &Shared, bypass: &SocketBypass, piece: &mut [u8]) -> io::Result<Next> {
        let Some(joined) = &mut self.joined else { return Ok(Next::GoesOn) };
        let Some(entered) = shared.enter(&self.connection, ME) else { return Ok(Next::GoesOn) };
        if entered.owner != Owner::Nic {
            return Ok(Next::GoesOn);
        }
        if self.connection.ended().is_some() {
            return Ok(Next::Ended);
        }
        let at_end = joined.push(&self.connection, shared, piece, bypass.read_by(self.cookie))?;
        let backlog = pull(joined, &mut self.stash, &self.connection, shared, piece)?;
        Ok(match (at_end, backlog > BACKLOG) {
            (_, true) => Next::TooMuch,
            (true, _) => Next::AtEnd,
            _ => Next::GoesOn,
        })
    }

    /// Copies the remaining bytes when the program is stopped or has closed the socket: afterwards all sent bytes are
    /// in session memory or in the stash, and all reads are accounted for. `unread`: bytes in its queue, if it still
    /// has one.
    pub fn settle(&mut self, shared: &Shared, bypass: &SocketBypass, piece: &mut [u8], unread: Option<u32>) -> io::Result<()> {
        let Some(joined) = &mut self.joined else { return Ok(()) };
        let entered = shared.enter(&self.connection, ME);
        let mine = entered.as_ref().is_some_and(|entered| entered.owner == Owner::Nic);
        if mine {
            joined.sent = true;
            pull(joined, &mut self.stash, &self.connection, shared, piece)?;
        }
        while let Some(got) = later(socket::receive(joined.engine.as_fd(), piece))? {
            self.stash.extend_from_slice(&piece[..got]);
        }
        let read = unread.map_or_else(|| bypass.read_by(self.cookie), |unread| joined.pushed.saturating_sub(unread.into()));
        let length = read.min(joined.pushed).saturating_sub(joined.accounted) as u32;
        joined.accounted += u64::from(length);
        if mine { shared.consume(&self.connection, ME, length) } else { shared.note_read(&self.connection, length) }
    }

    /// Whether all bytes that the program has sent are in session memory.
    pub fn is_drained(&self) -> bool {
        let engine = self.joined.as_ref().map_or(0, |joined| queued(joined.engine.as_fd()));
        self.stash.is_empty() && engine == 0
    }
}

impl Joined {
    /// Copies into the program's queue. Returns whether the peer's FIN is next.
    fn push(&mut self, connection: &Connection, shared: &Shared, piece: &mut [u8], read: u64) -> io::Result<bool> {
        let read = read.min(self.pushed);
        if read > self.accounted {
            shared.consume(connection, ME, (read - self.accounted) as u32)?;
            self.accounted = read;
        }
        loop {
            let readiness = shared.readiness(connection, ME);
            let outstanding = self.pushed - self.accounted;
            let new = u64::from(readiness.unread).saturating_sub(outstanding);
            if new == 0 {
                return Ok(readiness.fin);
            }
            let length = new.min(UNREAD.saturating_sub(outstanding)).min(piece.len() as u64) as usize;
            if length == 0 {
                return Ok(false);
            }
            let Some(length) = later(shared.peek(connection, ME, outstanding as u32, &mut piece[..length]))? else {
                return Ok(false);
            };
            let Some(sent) = later(socket::send(self.engine.as_fd(), &piece[..length]))? else { return Ok(false) };
            self.pushed += sent as u64;
        }
    }
}

/// Copies from the program to the NIC. Returns the bytes for which the NIC has no room.
fn pull(
    joined: &mut Joined,
    stash: &mut Vec<u8>,
    connection: &Connection,
    shared: &Shared,
    piece: &mut [u8],
) -> io::Result<usize> {
    let most = piece.len();
    while joined.sent || !stash.is_empty() {
        let engine = joined.engine.as_fd();
        let room = shared.readiness(connection, ME).room as usize;
        if !stash.is_empty() {
            match later(shared.send(connection, ME, stash))? {
                Some(sent) => drop(stash.drain(..sent)),
                None => return Ok(stash.len() + queued(engine)),
            }
            continue;
        }
        if room == 0 {
            return Ok(queued(engine));
        }
        let asked = room.min(most);
        let got = later(socket::receive(engine, &mut piece[..asked]))?.unwrap_or(0);
        // A read that returns fewer bytes than requested has emptied the queue; epoll reports later bytes.
        joined.sent = got == asked;
        let sent = later(shared.send(connection, ME, &piece[..got]))?.unwrap_or(0);
        stash.extend_from_slice(&piece[sent..got]);
    }
    Ok(0)
}

fn queued(engine: BorrowedFd<'_>) -> usize {
    socket::queue_bytes(engine, socket::SIOCINQ).unwrap_or(0) as usize
}

/// None if the call would block, or transferred nothing.
fn later(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(0) => Ok(None),
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process's connection is not taken for the engine's.
    #[test]
    fn an_engine_has_its_own_peer() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let connect = || TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        let (stranger, engine) = (connect(), connect());
        let sink = accept_from(&listener, &engine).expect("a connection");
        assert_eq!(sink.peer_addr().expect("a peer"), engine.local_addr().expect("an address"));
        drop(stranger);
    }

    /// The kernel has dropped the engine's connection for lack of room: it is given up after a limited time.
    #[test]
    fn an_engine_that_does_not_come_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let connect = || TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        let engine = connect();
        drop(listener.accept().expect("what is not there"));
        let _strangers = [(); 50].map(|()| connect());
        accept_from(&listener, &engine).expect_err("strangers alone have come");
    }
}
