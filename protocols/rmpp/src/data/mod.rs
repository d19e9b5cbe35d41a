//! The data half: cuts messages into packets, places received data, answers CTS, notices gaps. It makes no decisions.
//!
//! Its state is made of fixed tables, and its work per packet does not depend on their sizes. It trusts neither the
//! network nor the policy: a command for a peer or message that it does not know is counted and dropped.

mod matching;
mod receive;
mod send;
mod stream;

use crate::counters::{Counters, Drop};
use crate::interface::{Command, Event, Half};
use crate::memory::Memory;
use crate::queue::take_first;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use baton_wire::Endpoint;
use baton_wire::rmpp::{self, Body, Cts, HEADER, Header, Kind, Packet, RTS_BODY, Refusal};
use matching::DataMatching;
use receive::Receiving;
use send::Sending;
use stream::Streams;

pub use matching::MatchConfig;
pub use stream::{Intake, Outflow, StreamConfig, StreamId, StreamOrder};

/// Which halves a [`Data`] has. Packets for a half that it does not have go to the other [`Data`]: see
/// [`Disposition::PassUp`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Halves {
    /// Places data, reads RTS and control packets.
    pub receiving: bool,
    /// Answers CTS with data, sends all packets.
    pub sending: bool,
}

impl Halves {
    /// Both halves.
    pub const BOTH: Halves = Halves { receiving: true, sending: true };
}

/// Sizes of the tables of a [`Data`], and the place of its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataConfig {
    /// Which halves it has.
    pub halves: Halves,
    /// Our address as peers see it. It goes into the CRC of every packet.
    pub address: Endpoint,
    /// Number of our endpoint.
    pub endpoint: u16,
    /// Peers.
    pub peers: u16,
    /// Most messages that are received at the same time.
    pub incoming: u16,
    /// Most messages that are sent at the same time.
    pub outgoing: u16,
    /// Offset of the buffers for RTS packets in the memory.
    pub buffers: u64,
    /// Number of these buffers.
    pub buffer_count: u16,
    /// Size of one such buffer in bytes.
    pub buffer_size: u16,
    /// Bytes of packet that a frame carries (see [`baton_wire::rmpp::Envelope::room`]).
    pub packet: u16,
    /// Events that may wait to be taken.
    pub events: u16,
    /// Present if it can match.
    pub matching: Option<MatchConfig>,
    /// Present if the data of long messages may be sent and received by streams, which needs both halves.
    pub streams: Option<StreamConfig>,
}

impl DataConfig {
    /// Writes the data that an RTS carries into a buffer.
    fn keep(&self, buffer: u16, first: &[u8], memory: &mut (impl Memory + ?Sized)) -> Result<(), Drop> {
        let offset = self.buffers + u64::from(buffer) * u64::from(self.buffer_size);
        if memory.write(offset, first) { Ok(()) } else { Err(Drop::Memory) }
    }
}

/// What was done with a received packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// It was used, or dropped and counted.
    Done,
    /// It is for a half that is somewhere else: the frame goes there.
    PassUp,
}

/// The data half's entry of a peer.
#[derive(Clone, Copy, Debug)]
struct Peer {
    address: Endpoint,
    endpoint: u16,
    local: u32,
    remote: u32,
    /// For matching: number of its next message, and the lowest that it may send again.
    next: u32,
    floor: u32,
}

impl Peer {
    /// Whether a packet is from this peer to us, in the current incarnation of both.
    fn sent(&self, from: &Endpoint, header: &Header) -> bool {
        self.address == *from && self.endpoint == header.source && self.local == header.to && self.remote == header.from
    }
}

/// Packets that are sent together, one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Address that they go to.
    pub to: Endpoint,
    /// Bytes of all of them.
    pub length: usize,
    /// Bytes of each but the last, which may be shorter.
    pub segment: usize,
    /// Their number, at least 1.
    pub packets: usize,
}

/// A packet that leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outbound {
    /// Address that it goes to.
    pub to: Endpoint,
    /// Its bytes.
    pub length: usize,
}

/// The data half, or one half of it.
pub struct Data {
    config: DataConfig,
    peers: Box<[Option<Peer>]>,
    receiving: Receiving,
    sending: Sending,
    /// Packets without data that wait to be sent: address, header, and the content of a CTS.
    control: VecDeque<(Endpoint, Header, Cts)>,
    events: VecDeque<Event>,
    /// Buffers for RTS packets.
    buffers: Vec<u16>,
    matching: Option<DataMatching>,
    streams: Option<Streams>,
    counters: Counters,
}

impl Data {
    /// A data half without peers, messages and buffers.
    pub fn new(config: DataConfig) -> Data {
        Data {
            peers: alloc::vec![None; config.peers.into()].into(),
            receiving: Receiving::new(config.incoming.into()),
            sending: Sending::new(config.outgoing.into()),
            control: VecDeque::with_capacity(config.events.into()),
            events: VecDeque::with_capacity(config.events.into()),
            buffers: Vec::with_capacity(config.buffer_count.into()),
            matching: config.matching.as_ref().map(|sizes| DataMatching::new(sizes, config.incoming.into())),
            streams: config.streams.map(|streams| Streams::new(streams, config.peers)),
            counters: Counters::default(),
            config,
        }
    }

    /// Counters so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Number of messages that it knows: received ones, and sent ones.
    pub fn messages(&self) -> (usize, usize) {
        (self.receiving.len(), self.sending.len())
    }

    /// Buffers for RTS packets that it has.
    pub fn buffers(&self) -> usize {
        self.buffers.len()
    }

    /// Whether there is room for the results of a command: an event, and a packet without data. If not, the command
    /// must wait.
    pub fn has_room(&self) -> bool {
        self.events.len() < self.config.events.into() && self.control.len() < self.config.events.into()
    }

    /// The next event for the policy.
    pub fn poll_event(&mut self) -> Option<Event> {
        take_first(&mut self.events)
    }

    /// Whether an event waits for the policy.
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether there is something to send.
    pub fn has_transmit(&self) -> bool {
        !self.control.is_empty() || self.sending.has_ready()
    }

    /// Carries out a command of the policy. Call it only if [`Data::has_room`]; commands for a half that this one does
    /// not have are dropped, but for [`Command::SetPeer`] and [`Command::DropPeer`], which concern both.
    pub fn handle_command(&mut self, command: &Command) {
        match *command {
            Command::SetPeer { peer, address, endpoint, local, remote, next, floor } => {
                self.set_peer(peer, Some(Peer { address, endpoint, local, remote, next, floor }));
            }
            Command::DropPeer { peer } => self.set_peer(peer, None),
            Command::PostBuffer { buffer } => {
                let room = self.buffers.len() < self.config.buffer_count.into();
                if buffer < self.config.buffer_count && room {
                    self.buffers.push(buffer);
                }
            }
            Command::Clear { .. } => self.clear(command),
            Command::Send { .. } => self.enter_send(command),
            Command::Resend { handle, floor, anew } => self.sending.resend(handle, floor, anew),
            Command::Release { handle, half, confirm } => {
                match half {
                    Half::Receiving => {
                        let released = self.receiving.release(handle);
                        if let (Some((peer, stream)), Some(streams)) = (released, &mut self.streams) {
                            streams.await_message(peer, stream, false);
                            streams.forget_unasked(peer, handle);
                        }
                    }
                    Half::Sending => self.sending.release(handle),
                }
                if confirm {
                    self.events.push_back(Event::Released { handle, half });
                }
            }
            Command::Control { to, header } => self.control.push_back((to, header, Cts::default())),
            Command::SetMatcher { .. }
            | Command::Post { .. }
            | Command::Cancel { .. }
            | Command::Unexpected { .. }
            | Command::Discard { .. }
            | Command::Place { .. }
            | Command::Credit { .. } => self.handle_match_command(command),
        }
    }

    fn set_peer(&mut self, number: u16, peer: Option<Peer>) {
        let Some(place) = self.peers.get_mut(usize::from(number)) else { return };
        let name = |peer: &Peer| (peer.address, peer.endpoint);
        let before = core::mem::replace(place, peer);
        let association = |peer: &Option<Peer>| peer.map(|peer| (peer.address, peer.endpoint, peer.local, peer.remote));
        let goes_on = association(&before) == association(&peer);
        if let Some(matching) = &mut self.matching {
            matching.set_peer(number, before.as_ref().map(name), peer.as_ref().map(name));
            // While the data half matches, it knows better than the policy which message comes next.
            if let (true, Some(before), Some(now)) = (matching.is_matching(), before, place)
                && (before.local, before.remote, name(&before)) == (now.local, now.remote, name(now))
            {
                (now.next, now.floor) = (before.next, before.floor);
            }
        }
        if !goes_on {
            self.drop_streams(number);
        }
    }

    /// Handles a packet that came from `from`.
    pub fn input(&mut self, from: &Endpoint, bytes: &[u8], memory: &mut (impl Memory + ?Sized)) -> Disposition {
        // Which half a packet is for is asked first, so that its CRC is checked only where it is used.
        let kind = bytes.get(1).and_then(|kind| Kind::from_number(*kind));
        let mine = if kind == Some(Kind::Cts) { self.config.halves.sending } else { self.config.halves.receiving };
        if !mine {
            return Disposition::PassUp;
        }
        self.counters.received += 1;
        let packet = match Packet::parse(bytes, from, &self.config.address) {
            Ok(packet) => packet,
            Err(refusal) => {
                self.counters.refused[refusal as usize] += 1;
                if refusal == Refusal::Version
                    && let Some((source, incarnation, hello)) = rmpp::of_other_version(bytes)
                    && let Err(reason) = self.report(Event::OtherVersion { from: *from, source, incarnation, hello })
                {
                    self.counters.drop(reason);
                }
                return Disposition::Done;
            }
        };
        let outcome = if packet.header.destination != self.config.endpoint {
            Err(Drop::Endpoint)
        } else {
            match packet.body {
                Body::Data(data) => self.receive_data(from, &packet.header, data, memory),
                Body::Cts(cts) => self.receive_cts(from, &packet.header, &cts),
                Body::Rts(rts, first) => self.receive_rts(from, &packet.header, rts, first, memory),
                Body::Empty => self.report(Event::Control { from: *from, header: packet.header }),
            }
        };
        if let Err(reason) = outcome {
            self.counters.drop(reason);
        }
        Disposition::Done
    }

    /// Queues an event that a packet caused. One place stays free for the answer to a command.
    fn report(&mut self, event: Event) -> Result<(), Drop> {
        if self.events.len() + 1 >= self.config.events.into() {
            return Err(Drop::NoRoom);
        }
        self.events.push_back(event);
        Ok(())
    }

    fn receive_rts(
        &mut self,
        from: &Endpoint,
        header: &Header,
        rts: rmpp::Rts,
        first: &[u8],
        memory: &mut (impl Memory + ?Sized),
    ) -> Result<(), Drop> {
        if first.len() > self.config.buffer_size.into() {
            return Err(Drop::Length);
        }
        if self.match_rts(from, header, rts, first, memory)? {
            return Ok(());
        }
        let buffer = *self.buffers.last().ok_or(Drop::NoBuffer)?;
        self.config.keep(buffer, first, memory)?;
        self.report(Event::Rts { from: *from, header: *header, rts, buffer, length: first.len() as u16 })?;
        self.buffers.pop();
        Ok(())
    }

    /// Writes the next packet into `out`, which has room for [`DataConfig::packet`] bytes. Packets without data come
    /// first; then messages take turns, one packet each.
    pub fn poll_transmit(&mut self, memory: &(impl Memory + ?Sized), out: &mut [u8]) -> Option<Outbound> {
        self.poll_run(memory, out, 1).map(|Run { to, length, .. }| Outbound { to, length })
    }

    /// Writes the next packets for one address into `out`, one behind the other: as many packets of one message as may
    /// be sent now, but at most `most`, and no more than fit into `out`. All have the same length except the last,
    /// which may be shorter: so a device can cut them (UDP segmentation). `out` has room for [`DataConfig::packet`]
    /// bytes at least.
    pub fn poll_run(&mut self, memory: &(impl Memory + ?Sized), out: &mut [u8], most: usize) -> Option<Run> {
        let run = match take_first(&mut self.control) {
            Some((to, header, cts)) => {
                let body = if header.kind == Kind::Cts { Body::Cts(cts) } else { Body::Empty };
                let written = rmpp::emit(&header, &body, out);
                rmpp::seal(&mut out[..written], &self.config.address, &to);
                Run { to, length: written, segment: written, packets: 1 }
            }
            None => self.transmit_message(memory, out, most)?,
        };
        self.counters.sent += run.packets as u64;
        Some(run)
    }
}

/// Bytes of message that fit into a data packet, for frames that carry `packet` bytes of packet.
pub const fn fragment(packet: u16) -> u16 {
    packet - HEADER as u16
}

/// Bytes of message that fit into an RTS packet.
pub const fn first_bytes(packet: u16) -> u16 {
    packet - (HEADER + RTS_BODY) as u16
}
