//! Streams: TCP connections that carry the data of long messages between two data halves on hosts. Their format is in
//! [`baton_wire::rmpp::stream`]; this module decides which runs are written, and where received bytes go. The caller
//! has the sockets.
//!
//! A stream has one direction. The receiver of a long message offers it in its CTS; the sender opens it, and uses it
//! once a CTS says that the receiver reads it. A peer that does not read or open streams gets packets. Nothing depends
//! on a stream: when one ends, the receiver clears again the data that has not come.

use super::{Data, Peer};
use crate::counters::Drop;
use crate::interface::Event;
use crate::memory::Region;
use crate::queue::take_first;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use baton_wire::Endpoint;
use baton_wire::rmpp::stream::{GREETING, Greeting, MAX_STREAMED, RUN, RunHeader};
use baton_wire::rmpp::{Cts, Header, Kind, MAX_CLEARED, Offer};
use core::hash::Hasher;
use siphasher::sip::SipHasher24;

/// A stream that was opened is given up after this many CTS in a row that offer a stream but do not name this one.
const MOST_UNANSWERED: u8 = 64;
/// After a stream has ended by itself, this many offers are ignored; the number doubles with each such end in a row, up
/// to 1024 times.
const PAUSE: u32 = 2;
/// How often the listener is polled for each offer: a peer that takes the offer connects at once.
const LOOKS: u32 = 256;
/// Most packets of a run while other messages to the same peer wait.
const TURN: u32 = MAX_CLEARED as u32;
/// A run that was sent unasked and whose RTS has not come is dropped after its message was looked for this many times
/// while other messages waited behind the run.
const MOST_LOOKS: u8 = 32;
/// Most CTS that wait until the streams have been read.
const MOST_DEFERRED: usize = 64;
/// Most events that the bytes of a run cause: a message's progress, that all of its data has come, its END.
const MOST_EVENTS: usize = 4;

/// Settings of streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamConfig {
    /// TCP port at which streams are accepted, at our own address; not 0.
    pub port: u16,
    /// Key from which the peers' keys are made. It must be random.
    pub secret: [u64; 2],
    /// If at least this many bytes follow the RTS's, a message's data comes by a stream.
    pub least: u64,
}

/// Names a stream: the peer at its other end, and the number that the opener has given it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamId {
    /// Number of the peer.
    pub peer: u16,
    /// Number of the stream.
    pub number: u32,
}

/// What the caller has to do with sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamOrder {
    /// Open a stream to this address, from our own, and write the greeting.
    Open(StreamId, Endpoint, [u8; GREETING]),
    /// Close a stream that we have opened.
    CloseOutgoing(StreamId),
    /// Close a stream that the peer has opened.
    CloseIncoming(StreamId),
}

/// What the next bytes of a stream are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Intake {
    /// They belong to the header of a run, of which this many bytes are missing: pass them to [`Data::stream_header`].
    Header(usize),
    /// They are a part of a message: read them into this region of the memory, and then call [`Data::stream_placed`].
    Place(Region),
    /// This many bytes are not wanted: read and forget them, and then call [`Data::stream_placed`].
    Discard(u64),
    /// Leave them until there is room for events, or until the RTS of a run that was sent unasked has come: so look for
    /// packets.
    Wait,
    /// Leave them until a receive wants their message; nothing else waits behind them.
    Hold,
}

/// The next bytes to be written to a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outflow {
    /// The header of the run, and how much of it has been written.
    pub header: ([u8; RUN], usize),
    /// The bytes that follow it.
    pub region: Region,
}

/// A run that is being sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    handle: u32,
    header: [u8; RUN],
    /// Bytes of the header that have been written.
    written: usize,
    region: Region,
}

/// The stream to a peer.
#[derive(Debug, Default)]
struct Outgoing {
    /// Its number; 0: there is none.
    number: u32,
    /// The peer reads the stream.
    confirmed: bool,
    /// CTS in a row that have not named the stream.
    unanswered: u8,
    /// How often in a row the stream has ended, and how many further offers are ignored.
    ends: u8,
    pause: u32,
    /// How many runs in a row were sent unasked and not taken, and for how many further messages nothing is sent
    /// unasked.
    refused: u8,
    asking: u32,
    /// Messages with data to send; they take turns.
    queue: VecDeque<u32>,
    run: Option<Sent>,
    /// It is in the list of streams with something to send.
    ready: bool,
}

/// A run that is being received. Places are bytes behind the RTS's.
#[derive(Clone, Copy, Debug)]
struct Received {
    header: RunHeader,
    at: u64,
    end: u64,
    /// The run carries an RSM, which has not been reported yet.
    asks: bool,
    /// The run was cleared. A run of a message that has ended is not wanted, and stays so.
    wanted: bool,
    /// If the run was sent unasked and its message is not known yet: how often the message was looked for.
    unknown: Option<u8>,
}

/// The stream from a peer.
#[derive(Debug)]
struct Incoming {
    /// Its number; 0: there is none.
    number: u32,
    header: [u8; RUN],
    /// Bytes of the header that have come.
    have: usize,
    run: Option<Received>,
    /// Messages whose data comes by this stream.
    awaited: u32,
    /// Number and handle of the messages whose first run may have been sent unasked and has not come.
    unasked: VecDeque<(u32, u32)>,
    /// The last message whose run was sent unasked and dropped.
    dropped: Option<u32>,
    /// Bytes of runs that have come so far.
    bytes: u64,
}

impl Incoming {
    fn new(number: u32) -> Incoming {
        Incoming { number, header: [0; RUN], have: 0, run: None, awaited: 0, unasked: VecDeque::new(), dropped: None, bytes: 0 }
    }
}

/// The streams of an endpoint, by number of their peer.
pub(super) struct Streams {
    config: StreamConfig,
    outgoing: Box<[Outgoing]>,
    incoming: Box<[Incoming]>,
    last_number: u32,
    /// Peers whose stream has something to send.
    ready: VecDeque<u16>,
    orders: VecDeque<StreamOrder>,
    /// Messages whose CTS waits, since it need not be sent if all of their data has come unasked.
    deferred: VecDeque<u32>,
    /// Messages whose data comes by a stream.
    awaited: u32,
    /// How often the listener is still to be polled for a stream that was offered.
    offered: u32,
}

impl Streams {
    pub fn new(config: StreamConfig, peers: u16) -> Streams {
        Streams {
            config,
            outgoing: (0..peers).map(|_| Outgoing::default()).collect(),
            incoming: (0..peers).map(|_| Incoming::new(0)).collect(),
            last_number: 0,
            ready: VecDeque::with_capacity(peers.into()),
            orders: VecDeque::new(),
            deferred: VecDeque::new(),
            awaited: 0,
            offered: 0,
        }
    }

    /// The key that a greeting of a peer must contain. Only this endpoint and the peer know it, and each association
    /// has its own.
    fn key(&self, peer: &Peer) -> u64 {
        let mut hasher = SipHasher24::new_with_keys(self.config.secret[0], self.config.secret[1]);
        hasher.write(&peer.address.address);
        hasher.write_u16(peer.address.port);
        hasher.write_u16(peer.endpoint);
        hasher.write_u32(peer.local);
        hasher.write_u32(peer.remote);
        hasher.finish()
    }

    /// The stream from a peer by which a message's data comes, with `rest` bytes behind its RTS's; 0 for none.
    pub fn carries(&self, peer: u16, rest: u64) -> u32 {
        if rest >= self.config.least { self.incoming[usize::from(peer)].number } else { 0 }
    }

    /// The content of a CTS to a peer. Only the CTS of a long message offers a stream.
    pub fn cts(&mut self, number: u16, peer: &Peer, handle: u32, rest: u64, stream: u32) -> Cts {
        let long = rest >= self.config.least;
        let offer = long.then(|| Offer { port: self.config.port, peer: number, key: self.key(peer) });
        if long && stream == 0 {
            self.offered = LOOKS;
        }
        Cts { handle, offer, stream }
    }

    /// Counts one message more or less whose data comes by the stream of a peer, if that is the current stream.
    pub fn await_message(&mut self, peer: u16, stream: u32, more: bool) {
        let incoming = &mut self.incoming[usize::from(peer)];
        if stream != 0 && incoming.number == stream {
            let count = |count: u32| if more { count + 1 } else { count.saturating_sub(1) };
            incoming.awaited = count(incoming.awaited);
            self.awaited = count(self.awaited);
        }
    }

    /// The number of the stream by which the data that a CTS clears is sent; 0 for none. Opens a stream if the CTS
    /// offers one.
    pub fn answer(&mut self, number: u16, peer: &Peer, cts: &Cts, endpoint: u16, address: &Endpoint) -> u32 {
        let Some(offer) = cts.offer else { return 0 };
        let at = usize::from(number);
        let out = &mut self.outgoing[at];
        if out.number == 0 {
            if out.pause > 0 {
                out.pause -= 1;
                return 0;
            }
            self.last_number = self.last_number.wrapping_add(1).max(1);
            out.number = self.last_number;
            let greeting = Greeting {
                endpoints: [endpoint, peer.endpoint],
                incarnations: [peer.local, peer.remote],
                stream: out.number,
                peer: offer.peer,
                key: offer.key,
                address: *address,
            };
            let to = Endpoint { address: peer.address.address, port: offer.port };
            self.orders.push_back(StreamOrder::Open(StreamId { peer: number, number: out.number }, to, greeting.emit()));
            return 0;
        }
        if cts.stream == out.number {
            (out.confirmed, out.unanswered, out.ends) = (true, 0, 0);
            return out.number;
        }
        out.unanswered += 1;
        // The CTS may be an earlier one that comes late. Otherwise a peer that does not name the stream any more has
        // lost it.
        if out.unanswered >= if out.confirmed { 4 } else { MOST_UNANSWERED } {
            self.end_outgoing(at, true);
        }
        0
    }

    /// The stream by which the first packets of a message are sent unasked, if the peer reads it and it has nothing
    /// else to send.
    pub fn may_send_unasked(&mut self, peer: u16, rest: u64) -> Option<u32> {
        let out = &mut self.outgoing[usize::from(peer)];
        if !out.confirmed || rest < self.config.least || out.ready {
            return None;
        }
        if out.asking > 0 {
            out.asking -= 1;
            return None;
        }
        Some(out.number)
    }

    /// Notes whether the peer has taken a run that was sent unasked. A peer that drops such runs, since it posts its
    /// receives late, is for a while sent nothing unasked.
    pub fn note_unasked(&mut self, peer: u16, taken: bool) {
        let out = &mut self.outgoing[usize::from(peer)];
        if taken {
            out.refused = 0;
        } else {
            out.asking = PAUSE << out.refused.min(10);
            out.refused = out.refused.saturating_add(1);
        }
    }

    /// Accepts the run of a message that may have been sent unasked. Returns false if it has come already and was
    /// dropped.
    pub fn take_unasked(&mut self, peer: u16, number: u32, handle: u32) -> bool {
        let incoming = &mut self.incoming[usize::from(peer)];
        // Runs that are sent unasked come in the messages' order.
        let dropped = incoming.dropped.is_some_and(|last| (number.wrapping_sub(last) as i32) <= 0);
        if !dropped {
            incoming.unasked.push_back((number, handle));
        }
        !dropped
    }

    /// Makes the CTS of a message wait for [`Data::send_deferred`]. Returns false if there is no room for it to wait.
    pub fn defer(&mut self, handle: u32) -> bool {
        let room = self.deferred.len() < MOST_DEFERRED;
        if room {
            self.deferred.push_back(handle);
        }
        room
    }

    /// The next message whose CTS has waited.
    pub fn deferred(&mut self) -> Option<u32> {
        take_first(&mut self.deferred)
    }

    /// Notes that a message has ended, or that its data comes in another way: its run that was sent unasked is not
    /// expected any more.
    pub fn forget_unasked(&mut self, peer: u16, handle: u32) {
        self.incoming[usize::from(peer)].unasked.retain(|(_, other)| *other != handle);
    }

    /// Queues a message with something to send by the stream to a peer.
    pub fn queue(&mut self, peer: u16, stream: u32, handle: u32) {
        let out = &mut self.outgoing[usize::from(peer)];
        if out.number == stream && !out.queue.contains(&handle) {
            out.queue.push_back(handle);
            if !core::mem::replace(&mut out.ready, true) {
                self.ready.push_back(peer);
            }
        }
    }

    /// Ends the stream to a peer. If this side did not want it to end, some offers are ignored afterwards (`pause`).
    fn end_outgoing(&mut self, at: usize, pause: bool) {
        let out = &mut self.outgoing[at];
        let number = core::mem::take(&mut out.number);
        if number == 0 {
            return;
        }
        if pause {
            out.pause = PAUSE << out.ends.min(10);
            out.ends = out.ends.saturating_add(1);
        }
        (out.confirmed, out.unanswered, out.run) = (false, 0, None);
        out.queue.clear();
        if core::mem::take(&mut out.ready) {
            self.ready.retain(|peer| usize::from(*peer) != at);
        }
        self.orders.push_back(StreamOrder::CloseOutgoing(StreamId { peer: at as u16, number }));
    }
}

impl Data {
    /// The next thing that the caller has to do with sockets.
    pub fn poll_stream(&mut self) -> Option<StreamOrder> {
        take_first(&mut self.streams.as_mut()?.orders)
    }

    /// The next stream with something to send, in turn.
    pub fn next_to_write(&mut self) -> Option<StreamId> {
        let streams = self.streams.as_mut()?;
        let peer = streams.ready.pop_front()?;
        streams.ready.push_back(peer);
        Some(StreamId { peer, number: streams.outgoing[usize::from(peer)].number })
    }

    /// Streams with something to send.
    pub fn streams_to_write(&self) -> usize {
        self.streams.as_ref().map_or(0, |streams| streams.ready.len())
    }

    /// Messages whose data comes by a stream.
    pub fn streamed_messages(&self) -> u32 {
        self.streams.as_ref().map_or(0, |streams| streams.awaited)
    }

    /// Whether the data of a message comes by this stream.
    pub fn awaits_stream(&self, stream: StreamId) -> bool {
        self.incoming(stream).is_some_and(|incoming| incoming.awaited > 0 || incoming.run.is_some())
    }

    /// Whether a stream has wanted bytes that can be read without another packet or more bytes arriving: then the
    /// program must not sleep.
    pub fn has_unread(&self) -> bool {
        let waits = |incoming: &Incoming| incoming.awaited > 0 && incoming.run.is_some_and(|run| run.unknown.is_some());
        let streams = self.streams.as_ref().filter(|streams| streams.awaited > 0);
        streams.is_some_and(|streams| !streams.deferred.is_empty() || streams.incoming.iter().any(waits))
    }

    /// Whether a peer may be opening a stream. It is asked so often, in vain, for an offer.
    pub fn expects_stream(&mut self) -> bool {
        let Some(streams) = &mut self.streams else { return false };
        streams.offered = streams.offered.saturating_sub(1);
        streams.offered > 0
    }

    fn incoming(&self, stream: StreamId) -> Option<&Incoming> {
        let incoming = self.streams.as_ref()?.incoming.get(usize::from(stream.peer))?;
        (stream.number != 0 && incoming.number == stream.number).then_some(incoming)
    }

    /// Forgets the streams from and to a peer, whose association has ended.
    pub(super) fn drop_streams(&mut self, peer: u16) {
        // Its messages have been released before.
        self.forget_incoming(usize::from(peer));
        if let Some(streams) = &mut self.streams {
            streams.end_outgoing(usize::from(peer), false);
            let out = &mut streams.outgoing[usize::from(peer)];
            (out.ends, out.pause) = (0, 0);
        }
    }

    /// The next bytes to be written to a stream; None if there are none. The caller then calls
    /// [`Data::stream_written`].
    pub fn outflow(&mut self, stream: StreamId) -> Option<Outflow> {
        let streams = self.streams.as_mut()?;
        let out = streams.outgoing.get_mut(usize::from(stream.peer)).filter(|out| out.number == stream.number)?;
        if let Some(run) = &out.run {
            if self.sending.knows(run.handle) {
                return Some(Outflow { header: (run.header, run.written), region: run.region });
            }
            // The message's memory may not be read any more, and the run can neither be finished nor left.
            streams.end_outgoing(usize::from(stream.peer), false);
            return None;
        }
        let peer = self.peers.get(usize::from(stream.peer)).copied().flatten()?;
        while let Some(handle) = take_first(&mut out.queue) {
            let most = if out.queue.is_empty() { MAX_STREAMED.into() } else { TURN };
            let Some((header, region)) = self.sending.next_run(handle, stream.number, most) else { continue };
            let header = RunHeader { incarnations: [peer.local, peer.remote], stream: stream.number, ..header }.emit();
            out.run = Some(Sent { handle, header, written: 0, region });
            return Some(Outflow { header: (header, 0), region });
        }
        out.ready = false;
        streams.ready.retain(|peer| *peer != stream.peer);
        None
    }

    /// Notes that this many of the bytes that [`Data::outflow`] gave have been written.
    pub fn stream_written(&mut self, stream: StreamId, bytes: usize) {
        let Some(streams) = &mut self.streams else { return };
        let out = streams.outgoing.get_mut(usize::from(stream.peer)).filter(|out| out.number == stream.number);
        let Some((out, run)) = out.and_then(|out| out.run.take().map(|run| (out, run))) else { return };
        let of_header = bytes.min(RUN - run.written);
        let of_message = ((bytes - of_header) as u64).min(run.region.length);
        let region = Region { offset: run.region.offset.saturating_add(of_message), length: run.region.length - of_message };
        self.counters.streamed[1] += of_message;
        if region.length > 0 || run.written + of_header < RUN {
            out.run = Some(Sent { written: run.written + of_header, region, ..run });
        } else if self.sending.has_run(run.handle, stream.number) && !out.queue.contains(&run.handle) {
            out.queue.push_back(run.handle);
        }
    }

    /// The socket of a stream that we have opened, or were to open, has failed.
    pub fn outgoing_ended(&mut self, stream: StreamId) {
        if let Some(streams) = &mut self.streams
            && stream.number != 0
            && streams.outgoing.get(usize::from(stream.peer)).is_some_and(|out| out.number == stream.number)
        {
            streams.end_outgoing(stream.peer.into(), true);
            self.counters.streams_ended += 1;
        }
    }

    /// Accepts a stream that was opened from `from` with this greeting. It replaces an earlier stream of the peer.
    ///
    /// # Errors
    /// The reason why the stream must be closed.
    pub fn accept_stream(&mut self, from: &[u8; 16], greeting: &[u8; GREETING]) -> Result<StreamId, Drop> {
        let accepted = self.check_greeting(from, greeting);
        match accepted {
            Err(reason) => self.counters.drop(reason),
            Ok(StreamId { peer, number }) => {
                self.end_incoming(peer.into());
                if let Some(streams) = &mut self.streams {
                    streams.incoming[usize::from(peer)] = Incoming::new(number);
                    streams.offered = 0;
                }
                self.counters.streams += 1;
            }
        }
        accepted
    }

    fn check_greeting(&mut self, from: &[u8; 16], greeting: &[u8; GREETING]) -> Result<StreamId, Drop> {
        let greeting = Greeting::parse(greeting).map_err(|refusal| {
            self.counters.refused[refusal as usize] += 1;
            Drop::Stranger
        })?;
        let streams = self.streams.as_ref().ok_or(Drop::Stranger)?;
        let peer = self.peers.get(usize::from(greeting.peer)).copied().flatten().ok_or(Drop::Stranger)?;
        let Greeting { endpoints: [source, destination], incarnations: [remote, local], .. } = greeting;
        if destination != self.config.endpoint {
            return Err(Drop::Endpoint);
        }
        let name = (peer.address, peer.endpoint) == (greeting.address, source) && peer.address.address == *from;
        if !name || (peer.local, peer.remote) != (local, remote) || greeting.key != streams.key(&peer) {
            return Err(Drop::Stranger);
        }
        // A number that is in use would make two streams one.
        if streams.incoming[usize::from(greeting.peer)].number == greeting.stream {
            return Err(Drop::Duplicate);
        }
        Ok(StreamId { peer: greeting.peer, number: greeting.stream })
    }

    /// A stream from a peer has ended.
    pub fn incoming_ended(&mut self, stream: StreamId) {
        if self.incoming(stream).is_some() {
            self.end_incoming(stream.peer.into());
            self.counters.streams_ended += 1;
        }
    }

    /// Ends the stream from a peer, and clears again the data that has not come by it.
    pub(super) fn end_incoming(&mut self, at: usize) {
        let Some(Incoming { number, awaited, .. }) = self.forget_incoming(at) else { return };
        if awaited > 0 {
            self.clear_by_packets(at, number);
        }
    }

    /// Forgets the stream from a peer, and orders its socket to be closed.
    fn forget_incoming(&mut self, at: usize) -> Option<Incoming> {
        let streams = self.streams.as_mut()?;
        let incoming = core::mem::replace(streams.incoming.get_mut(at)?, Incoming::new(0));
        if incoming.number == 0 {
            return None;
        }
        streams.awaited -= incoming.awaited;
        streams.orders.push_back(StreamOrder::CloseIncoming(StreamId { peer: at as u16, number: incoming.number }));
        Some(incoming)
    }

    /// What the caller has to do with the next bytes of a stream. None if the stream is not, or no longer, known here
    /// and must be closed.
    pub fn intake(&mut self, stream: StreamId) -> Option<Intake> {
        let incoming = self.incoming(stream)?;
        let Some(run) = incoming.run else { return Some(Intake::Header(RUN - incoming.have)) };
        if self.events.len() + MOST_EVENTS >= self.config.events.into() || self.control.len() >= self.config.events.into() {
            return Some(Intake::Wait);
        }
        if let Some(looks) = run.unknown {
            return self.find_unasked(stream, looks);
        }
        let rest = run.end - run.at;
        let place = if run.wanted { self.receiving.place(stream, &run.header) } else { None };
        let Some(place) = place else { return Some(Intake::Discard(rest)) };
        let (begin, end) = (run.at.max(place.from), run.end.min(place.region.length));
        Some(if run.at < begin {
            // This part has come by packets already.
            Intake::Discard(begin.min(run.end) - run.at)
        } else if begin >= end {
            Intake::Discard(rest)
        } else {
            Intake::Place(Region { offset: place.region.offset.saturating_add(begin), length: end - begin })
        })
    }

    /// Takes bytes of a header, at most as many as [`Intake::Header`] said. An invalid header ends the stream.
    pub fn stream_header(&mut self, stream: StreamId, bytes: &[u8]) {
        let Some(streams) = self.streams.as_mut().filter(|_| stream.number != 0) else { return };
        let incoming = streams.incoming.get_mut(usize::from(stream.peer)).filter(|incoming| incoming.number == stream.number);
        let Some(incoming) = incoming else { return };
        let end = incoming.have + bytes.len();
        let Some(room) = incoming.header.get_mut(incoming.have..end) else { return };
        room.copy_from_slice(bytes);
        incoming.have = end;
        if end < RUN {
            return;
        }
        incoming.have = 0;
        let outcome = match RunHeader::parse(&incoming.header) {
            Ok(header) => self.begin_run(stream, &header),
            Err(refusal) => {
                self.counters.refused[refusal as usize] += 1;
                Err(Drop::Stranger)
            }
        };
        if let Err(reason) = outcome {
            self.counters.drop(reason);
            self.incoming_ended(stream);
        }
    }

    /// Checks a run against the cleared packets. A run of a message that has ended is read and forgotten: its sender
    /// did not know of the end yet.
    fn begin_run(&mut self, stream: StreamId, header: &RunHeader) -> Result<(), Drop> {
        let peer = self.peers.get(usize::from(stream.peer)).copied().flatten().ok_or(Drop::Stranger)?;
        if header.stream != stream.number || header.incarnations != [peer.remote, peer.local] {
            return Err(Drop::Stranger);
        }
        self.counters.runs += 1;
        if header.handle == 0 {
            let run =
                Received { header: *header, at: 0, end: header.length.into(), asks: false, wanted: false, unknown: Some(0) };
            self.set_run(stream, run);
            return Ok(());
        }
        self.enter_run(stream, header)
    }

    /// Begins to receive a run whose message is known by its handle.
    fn enter_run(&mut self, stream: StreamId, header: &RunHeader) -> Result<(), Drop> {
        let begin = self.receiving.check_run(stream, header)?;
        let wanted = begin.is_some();
        if !wanted {
            self.counters.drop(Drop::NoMessage);
        }
        let at = begin.unwrap_or(0);
        let end = at + u64::from(header.length);
        self.set_run(stream, Received { header: *header, at, end, asks: header.more.is_some(), wanted, unknown: None });
        Ok(())
    }

    fn set_run(&mut self, stream: StreamId, run: Received) {
        if let Some(streams) = &mut self.streams {
            streams.incoming[usize::from(stream.peer)].run = Some(run);
        }
    }

    /// Looks for the message of a run that was sent unasked. The message's RTS was sent before the run, but by another
    /// route, so it may come later; or it may not have been matched yet. The run is dropped if other messages would
    /// have to wait for that.
    fn find_unasked(&mut self, stream: StreamId, looks: u8) -> Option<Intake> {
        let incoming = self.streams.as_mut()?.incoming.get_mut(usize::from(stream.peer))?;
        let run = incoming.run.as_mut()?;
        let number = run.header.message;
        if let Some(at) = incoming.unasked.iter().position(|(message, _)| *message == number) {
            let (_, handle) = incoming.unasked.remove(at)?;
            // If more has been cleared already, the run's request for more (RSM) needs no answer.
            let end = u32::from(run.header.count);
            let more = run.header.more.filter(|_| self.receiving.limit(handle) == Some(end));
            let header = RunHeader { handle, more, ..run.header };
            self.counters.unasked[0] += 1;
            if run.header.end
                && let Some(streams) = &mut self.streams
            {
                streams.deferred.retain(|other| *other != handle);
            }
            if let Err(reason) = self.enter_run(stream, &header) {
                self.counters.drop(reason);
                self.incoming_ended(stream);
                return None;
            }
        } else if incoming.awaited == 0 {
            return Some(Intake::Hold);
        } else if looks < MOST_LOOKS {
            run.unknown = Some(looks + 1);
            return Some(Intake::Wait);
        } else {
            run.unknown = None;
            incoming.dropped = Some(number);
            self.counters.unasked[1] += 1;
        }
        self.intake(stream)
    }

    /// So many bytes, no more than [`Data::intake`] said, have been read: to where they belong, or to be forgotten.
    pub fn stream_placed(&mut self, stream: StreamId, bytes: u64) {
        let Some(streams) = self.streams.as_mut().filter(|_| stream.number != 0) else { return };
        let incoming = streams.incoming.get_mut(usize::from(stream.peer)).filter(|incoming| incoming.number == stream.number);
        let Some((run, total)) = incoming.and_then(|incoming| Some((incoming.run.as_mut()?, &mut incoming.bytes))) else {
            return;
        };
        run.at = (run.at + bytes).min(run.end);
        *total += bytes;
        let (now, done) = (*run, run.at == run.end);
        self.counters.streamed[0] += bytes;
        let Some(peer) = self.peers.get(usize::from(stream.peer)).copied().flatten() else { return };
        let message = if now.wanted { self.receiving.of_run(stream, &now.header) } else { None };
        let Some(message) = message else { return self.end_run(stream, done) };
        let end = if done { now.header.first + u32::from(now.header.count) } else { (now.at / message.fragment()) as u32 };
        let placed = message.advance(now.header.first, end);
        let more = now.header.more.filter(|more| now.asks && message.has_placed(*more));
        let complete = message.is_complete();
        self.counters.placed += u64::from(placed);
        let (handle, number) = (now.header.handle, now.header.message);
        if more.is_some()
            && let Some(run) = self.streams.as_mut().and_then(|streams| streams.incoming[usize::from(stream.peer)].run.as_mut())
        {
            run.asks = false;
        }
        self.take_up_placed(handle, more.is_some(), placed > 0, &peer);
        if done && now.header.end && complete {
            // All of the data has come, so the run stands for the sender's END, which would say nothing else.
            let mut header = Header::new(Kind::End, [peer.endpoint, self.config.endpoint], [peer.remote, peer.local]);
            (header.message, header.grant, header.handle) = (number, now.header.grant, handle);
            header.packet = now.header.first + u32::from(now.header.count);
            self.events.push_back(Event::Control { from: peer.address, header });
        }
        self.end_run(stream, done);
    }

    fn end_run(&mut self, stream: StreamId, done: bool) {
        if let Some(streams) = self.streams.as_mut().filter(|_| done) {
            streams.incoming[usize::from(stream.peer)].run = None;
        }
    }

    /// Clears again each message from a peer whose stream has ended, from the first byte that has not come: the rest
    /// comes as packets.
    fn clear_by_packets(&mut self, at: usize, stream: u32) {
        let Some(peer) = self.peers.get(at).copied().flatten() else { return };
        let handles: Vec<u32> = self.receiving.of_stream(at as u16, stream).collect();
        for handle in handles {
            self.clear_again(handle, &peer);
        }
    }

    /// State of the stream from a peer: whether a run of this message that brings packet `base` is coming in, and how
    /// many bytes of runs have come in all.
    pub(super) fn arriving(&self, peer: u16, handle: u32, base: u32) -> (bool, u64) {
        let Some(incoming) = self.streams.as_ref().and_then(|streams| streams.incoming.get(usize::from(peer))) else {
            return (false, 0);
        };
        let brings = |run: &Received| run.wanted && run.header.handle == handle && run.header.first <= base;
        (incoming.run.as_ref().is_some_and(brings), incoming.bytes)
    }
}
