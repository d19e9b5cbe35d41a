//! The sockets of streams: TCP connections by which the data of long messages comes and goes (docs/reference/rmpp.md).
//! The program's buffers are written from and read into without a copy. Nothing here is waited for: what a socket does
//! not take now it is given again.

use crate::arena::{Arena, Buffer};
use baton_linux::events::{Poller, Trigger};
use baton_linux::stream::{Listener, Moved, Stream};
use baton_rmpp::{Data, Intake, Memory, Region, StreamId, StreamOrder};
use baton_wire::Endpoint;
use baton_wire::rmpp::stream::{GREETING, RUN};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Sockets that are looked at in a round, of those that something is expected of.
const SOCKETS: usize = 4;
/// Reads or writes of one socket in a round, and bytes of one of them.
const PIECES: usize = 4;
const PIECE: u64 = 1 << 20;
/// Bytes that are copied at a time where a buffer is not in one piece.
const SCRATCH: usize = 1 << 16;
/// Rounds after which all sockets are looked at, and the listener while a peer may be opening a stream.
const ROUNDS: u32 = 1024;
const ROUNDS_OFFERED: u32 = 8;
/// Connections whose greeting has not come.
const STRANGERS: usize = 16;

/// A connection whose greeting has not come as a whole.
struct Stranger {
    socket: Stream,
    from: Endpoint,
    greeting: [u8; GREETING],
    have: usize,
}

/// A stream that we have opened.
struct Outgoing {
    id: StreamId,
    socket: Stream,
    /// What is to be written of the greeting.
    greeting: Option<[u8; GREETING]>,
}

/// Streams of an endpoint.
pub struct Streams {
    listener: Listener,
    strangers: Vec<Stranger>,
    incoming: Vec<(StreamId, Stream)>,
    outgoing: Vec<Outgoing>,
    /// Watches all sockets.
    poller: Poller,
    /// Whose turn it is.
    turn: usize,
    rounds: u32,
    /// All sockets are to be looked at.
    look: bool,
    /// Something was left, for which no poller wakes anybody.
    unfinished: bool,
    scratch: Vec<u8>,
    tokens: Vec<u64>,
}

impl Streams {
    /// Accepts streams at the address of an endpoint.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn new(address: SocketAddr) -> io::Result<Streams> {
        let listener = Listener::bind(address)?;
        let poller = Poller::new()?;
        poller.add(listener.as_fd(), 0, Trigger::Edge)?;
        Ok(Streams {
            listener,
            strangers: Vec::new(),
            incoming: Vec::new(),
            outgoing: Vec::new(),
            poller,
            turn: 0,
            rounds: 0,
            look: false,
            unfinished: false,
            scratch: vec![0; SCRATCH],
            tokens: Vec::new(),
        })
    }

    /// Port at which they are accepted.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn port(&self) -> io::Result<u16> {
        self.listener.port()
    }

    /// The descriptor that is readable when a sleeping program is to look at its streams: [`Streams::wake`] follows.
    pub fn poller(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    /// Makes the next round look at all sockets.
    pub fn wake(&mut self) {
        self.tokens.clear();
        // Which of them it was does not matter.
        let _ = self.poller.wait(Some(Duration::ZERO), &mut self.tokens);
        self.look = true;
    }

    /// Whether the program may sleep until something comes. If not, all sockets are looked at in the next round.
    pub fn may_sleep(&mut self, data: &Data) -> bool {
        let idle = !std::mem::take(&mut self.unfinished) && !data.has_unread();
        self.look |= !idle;
        idle
    }

    /// Reads what has come, and writes what could not be before. Returns whether there was anything.
    pub fn receive<B: Buffer>(&mut self, data: &mut Data, memory: &mut Arena<B>) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        let whole = self.rounds.is_multiple_of(ROUNDS) || self.look;
        let due = whole || !self.strangers.is_empty() || self.rounds.is_multiple_of(ROUNDS_OFFERED) && data.expects_stream();
        self.look = false;
        let mut any = data.streams_to_write() > 0 && self.transmit(data, memory);
        if !due && data.streamed_messages() == 0 {
            return any;
        }
        if due {
            any |= self.admit(data);
        }
        let (count, mut looked) = (self.incoming.len(), 0);
        for _ in 0..count {
            if looked == SOCKETS && !whole {
                break;
            }
            self.turn = if self.turn + 1 < self.incoming.len() { self.turn + 1 } else { 0 };
            let Some((id, _)) = self.incoming.get(self.turn) else { break };
            if whole || data.awaits_stream(*id) {
                any |= self.read(self.turn, data, memory);
                looked += 1;
            }
        }
        data.send_deferred();
        self.obey(data);
        any
    }

    /// Reads from one stream. Returns whether there was anything.
    fn read<B: Buffer>(&mut self, at: usize, data: &mut Data, memory: &mut Arena<B>) -> bool {
        let (id, socket) = &self.incoming[at];
        let mut any = false;
        for _ in 0..PIECES {
            let mut header = [0; RUN];
            let (room, intake) = match data.intake(*id) {
                None => break,
                Some(Intake::Wait) => {
                    self.unfinished = true;
                    return any;
                }
                Some(Intake::Hold) => return any,
                Some(intake @ Intake::Header(missing)) => (&mut header[..missing], intake),
                Some(Intake::Discard(bytes)) => (&mut self.scratch[..bytes.min(SCRATCH as u64) as usize], Intake::Discard(bytes)),
                Some(Intake::Place(region)) => {
                    let region = Region { length: region.length.min(PIECE), ..region };
                    match memory.piece_mut(&region) {
                        Some(piece) => (piece, Intake::Place(region)),
                        // A buffer in several parts: it goes by a copy.
                        None => (&mut self.scratch[..region.length.min(SCRATCH as u64) as usize], Intake::Place(region)),
                    }
                }
            };
            let wanted = room.len();
            match socket.read(room) {
                Moved::Nothing => return any,
                Moved::Ended => {
                    data.incoming_ended(*id);
                    return true;
                }
                Moved::Bytes(bytes) => {
                    match intake {
                        Intake::Header(_) => data.stream_header(*id, &header[..bytes]),
                        Intake::Place(region) if memory.piece_mut(&region).is_none() => {
                            // A region that does not exist was given by the program itself; its bytes are lost with it.
                            memory.write(region.offset, &self.scratch[..bytes]);
                            data.stream_placed(*id, bytes as u64);
                        }
                        _ => data.stream_placed(*id, bytes as u64),
                    }
                    any = true;
                    // The kernel has given all that there is.
                    if bytes < wanted {
                        return any;
                    }
                }
            }
            // What has come is for the policy, or for the program, first.
            if data.has_event() {
                break;
            }
        }
        self.unfinished = true;
        any
    }

    /// Writes what there is to write, as far as the sockets take it. Returns whether anything was written.
    pub fn transmit<B: Buffer>(&mut self, data: &mut Data, memory: &Arena<B>) -> bool {
        self.obey(data);
        let mut any = false;
        for _ in 0..data.streams_to_write().min(SOCKETS) {
            let Some(id) = data.next_to_write() else { break };
            any |= self.write(id, data, memory);
        }
        self.unfinished |= data.streams_to_write() > SOCKETS;
        self.obey(data);
        any
    }

    /// Writes to one stream. Returns whether it took anything.
    fn write<B: Buffer>(&mut self, id: StreamId, data: &mut Data, memory: &Arena<B>) -> bool {
        let Some(at) = self.outgoing.iter().position(|outgoing| outgoing.id == id) else {
            data.outgoing_ended(id);
            return false;
        };
        if !self.greet(at, data) {
            return false;
        }
        let mut any = false;
        for _ in 0..PIECES {
            let Some(outflow) = data.outflow(id) else { return any };
            let (header, region) = (&outflow.header.0[outflow.header.1..], outflow.region);
            let region = Region { length: region.length.min(PIECE), ..region };
            let piece = match memory.piece(&region) {
                Some(piece) => piece,
                None => {
                    let part = &mut self.scratch[..region.length.min(SCRATCH as u64) as usize];
                    if !memory.read(region.offset, part) {
                        // The program gave a region that it does not have.
                        data.outgoing_ended(id);
                        return any;
                    }
                    &*part
                }
            };
            match self.outgoing[at].socket.write(header, piece) {
                Moved::Nothing => return any,
                Moved::Ended => {
                    data.outgoing_ended(id);
                    return true;
                }
                Moved::Bytes(bytes) => {
                    data.stream_written(id, bytes);
                    any = true;
                    // The socket is full; it wakes a sleeping program when it is not.
                    if bytes < header.len() + piece.len() {
                        return any;
                    }
                }
            }
        }
        self.unfinished = true;
        any
    }

    /// Writes the greeting of a stream that we open. Whether it has been written.
    fn greet(&mut self, at: usize, data: &mut Data) -> bool {
        let Outgoing { id, socket, greeting } = &mut self.outgoing[at];
        let Some(bytes) = greeting else { return true };
        match socket.write(&*bytes, &[]) {
            Moved::Bytes(GREETING) => {
                *greeting = None;
                true
            }
            Moved::Nothing => false,
            // An empty socket takes a few bytes at once.
            Moved::Bytes(_) | Moved::Ended => {
                data.outgoing_ended(*id);
                false
            }
        }
    }

    /// Accepts connections, reads greetings, and writes those of streams that are being opened. Returns whether there
    /// was anything.
    fn admit(&mut self, data: &mut Data) -> bool {
        let mut any = false;
        for at in 0..self.outgoing.len() {
            if self.outgoing[at].greeting.is_some() {
                any |= self.greet(at, data);
            }
        }
        while self.strangers.len() < STRANGERS
            && let Some((socket, from)) = self.listener.accept()
        {
            any = true;
            // Without being watched it would be forgotten while the program sleeps.
            if self.poller.add(socket.as_fd(), 0, Trigger::Edge).is_ok() {
                self.strangers.push(Stranger { socket, from: from.into(), greeting: [0; GREETING], have: 0 });
            }
        }
        if self.strangers.len() == STRANGERS {
            // The oldest has had its time.
            self.strangers.remove(0);
            self.unfinished = true;
        }
        let mut at = 0;
        while let Some(stranger) = self.strangers.get_mut(at) {
            match stranger.socket.read(&mut stranger.greeting[stranger.have..]) {
                Moved::Nothing => at += 1,
                Moved::Ended => drop(self.strangers.remove(at)),
                Moved::Bytes(bytes) => {
                    any = true;
                    stranger.have += bytes;
                    if stranger.have == GREETING {
                        let Stranger { socket, from, greeting, .. } = self.strangers.remove(at);
                        if let Ok(id) = data.accept_stream(&from.address, &greeting) {
                            self.incoming.push((id, socket));
                        }
                    }
                }
            }
        }
        any
    }

    /// Opens and closes sockets as the protocol says. A socket that is closed leaves the poller.
    fn obey(&mut self, data: &mut Data) {
        while let Some(order) = data.poll_stream() {
            match order {
                StreamOrder::Open(id, to, greeting) => match self.open(id, to, greeting) {
                    Ok(()) => {}
                    Err(_) => data.outgoing_ended(id),
                },
                StreamOrder::CloseOutgoing(id) => self.outgoing.retain(|outgoing| outgoing.id != id),
                StreamOrder::CloseIncoming(id) => self.incoming.retain(|(other, _)| *other != id),
            }
        }
    }

    fn open(&mut self, id: StreamId, to: Endpoint, greeting: [u8; GREETING]) -> io::Result<()> {
        // From the address that the peer knows us by.
        let socket = Stream::connect(self.listener.ip()?, to.into())?;
        self.poller.add(socket.as_fd(), 0, Trigger::Edge)?;
        self.outgoing.push(Outgoing { id, socket, greeting: Some(greeting) });
        self.look = true;
        Ok(())
    }
}

#[cfg(test)]
impl Streams {
    /// Breaks every stream, as a network that goes away does.
    pub fn break_all(&self) {
        let sockets = self.incoming.iter().map(|(_, socket)| socket).chain(self.outgoing.iter().map(|outgoing| &outgoing.socket));
        sockets.for_each(|socket| socket.abort());
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{self, exchange};
    use crate::{Endpoint, Settings};
    use baton_linux::namespace::Namespace;

    fn endpoint(stream: bool) -> Endpoint<Vec<u8>> {
        testing::with(&Settings { packet: 8000, stream, ..Settings::default() })
    }

    /// Bytes that the first end has received by streams, and streams that have ended.
    fn streamed(ends: &[Endpoint<Vec<u8>>; 2]) -> (u64, u64) {
        let counters = ends[0].counters();
        (counters.streamed[0], counters.streams_ended)
    }

    #[test]
    fn long_messages_come_by_streams_that_open_break_and_are_replaced() {
        let host = Namespace::new().unwrap();
        host.run(|| {
            let mut ends = [endpoint(true), endpoint(true)];
            exchange(&mut ends, 1000, |_| ());
            assert_eq!(streamed(&ends), (0, 0));
            for _ in 0..4 {
                exchange(&mut ends, 1_000_000, |_| ());
            }
            let (before, ended) = streamed(&ends);
            assert!(before > 10_000_000 && ended == 0, "{before} {ended}");
            let mut rounds = 0;
            for _ in 0..4 {
                exchange(&mut ends, 1_000_000, |ends| {
                    rounds += 1;
                    if rounds % 20 == 0 {
                        ends[rounds % 2].streams().break_all();
                    }
                });
            }
            assert!(streamed(&ends).1 > 0);
            let (before, _) = streamed(&ends);
            // A stream that has ended by itself is not opened again at once.
            for _ in 0..30 {
                exchange(&mut ends, 300_000, |_| ());
            }
            assert!(streamed(&ends).0 > before + 5_000_000);
            for mut ends in [[endpoint(true), endpoint(false)], [endpoint(false), endpoint(true)]] {
                exchange(&mut ends, 1_000_000, |_| ());
                assert_eq!(streamed(&ends), (0, 0), "packets do");
            }
            Ok(())
        })
        .unwrap();
    }
}
