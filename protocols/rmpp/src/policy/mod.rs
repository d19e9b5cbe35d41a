//! The policy half. It decides which receive a message belongs to, how much of it is cleared, what is sent again, and
//! when a peer is dead.
//!
//! It is driven by the program's calls, the data half's [`Event`]s and the time, and answers with [`Command`]s and
//! [`Completion`]s. Each call makes a bounded number of commands; [`Policy::is_ready`] says whether there is room for
//! them.

mod arriving;
mod buffers;
mod commands;
mod messages;
mod offloaded;
mod peers;
mod receiving;
mod restart;
mod sending;
mod timers;

use crate::counters::Counters;
use crate::data::{DataConfig, Halves, MatchConfig};
use crate::handle;
use crate::interface::{Command, Event};
use crate::memory::{Memory, Region};
use crate::queue::take_first;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use baton_matching::{Criteria, Matching};
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, Kind, MAX_CLEARED};
use buffers::Buffers;
use commands::Commands;
use messages::{Incoming, Outgoings, Slab};
use peers::{Incarnations, Peer};
use timers::Timers;

/// Most commands that one call makes. The worst cases: a peer with full windows in both directions is given up, its
/// messages are released and its buffers posted again; or a whole window of held messages is matched.
const MOST_COMMANDS: usize = 512;
/// A call still begins an operation if this many further commands wait: so a caller that has asked [`Policy::is_ready`]
/// once may begin several operations.
const SEVERAL: usize = 16;

/// Settings and limits of an endpoint. Times are microseconds, sizes bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Number of our endpoint.
    pub endpoint: u16,
    /// Our first incarnation. It must be above every number that this endpoint has used before, modulo 2³²: from a
    /// clock, say.
    pub incarnation: u32,
    /// Key of the hash by which messages are matched. It must be random.
    pub hash_key: [u64; 4],
    /// Size in bytes of the memory in which regions lie.
    pub memory: u64,
    /// Peers.
    pub peers: u16,
    /// Messages that are sent or wait to be sent.
    pub sends: u16,
    /// Posted receives.
    pub receives: u16,
    /// Most incoming messages, unexpected ones included. It should be large enough for the unexpected messages of all
    /// peers: without room, messages of other peers have to wait, too.
    pub incoming: u16,
    /// Offset of the buffers for RTS packets.
    pub buffers: u64,
    /// Number of these buffers.
    pub buffer_count: u16,
    /// Size of one such buffer in bytes.
    pub buffer_size: u16,
    /// Buffers that unexpected messages of one peer may fill. Of further messages only the RTS's fields are kept.
    pub buffers_per_peer: u16,
    /// Bytes of packet that a frame carries.
    pub packet: u16,
    /// Most packets that one CTS clears: the paper's 16.
    pub grant: u16,
    /// Packets of a message that the data half may clear by itself, CTS by CTS, before it must ask: 0 if every CTS is
    /// the policy's, as in the paper.
    pub ahead: u32,
    /// Number of packets for which the NIC has buffers: the most packets, over all messages, that are cleared and have
    /// not come.
    pub nic_buffers: u32,
    /// Bytes of the program's memory that may be pinned for receiving: the most bytes that are cleared and have not
    /// come.
    pub pinned: u64,
    /// How many data packets before the last cleared one the RSM is sent: the paper's k (section 4.4), 0 to 127.
    pub early: u8,
    /// First time-out of an RTS, of an ACK, or of a CTS for 64 packets. It doubles up to 64 times as much.
    pub timeout: u64,
    /// How long a gap may be due to reordering.
    pub reordering: u64,
    /// How many CTS, ACK or BYE without progress are sent before a message or a farewell is given up.
    pub attempts: u8,
    /// Time without a packet from a peer after which it is asked whether it lives: a peer with unfinished messages, or
    /// an idle peer whose place other peers may need.
    pub keepalive: u64,
    /// Silence after which it is dead.
    pub dead: u64,
    /// Receives that a data half which matches has room for; 0 if the policy always matches.
    pub data_posted: u16,
    /// Unexpected messages that it has room for.
    pub data_unexpected: u16,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            endpoint: 0,
            incarnation: 1,
            hash_key: [1, 2, 3, 4],
            memory: 0,
            peers: 64,
            sends: 256,
            receives: 256,
            incoming: 256,
            buffers: 0,
            buffer_count: 64,
            buffer_size: 1500,
            buffers_per_peer: 16,
            packet: 1500,
            grant: 16,
            ahead: 0,
            nic_buffers: 256,
            pinned: 1 << 30,
            early: 0,
            timeout: 10_000,
            reordering: 1_000,
            attempts: 16,
            keepalive: 500_000,
            dead: 5_000_000,
            data_posted: 0,
            data_unexpected: 256,
        }
    }
}

/// Most packets that the data half may clear by itself: each may have a grant of its own, whose numbers wrap around.
pub const MAX_AHEAD: u32 = 4096;

/// Why a [`Config`] is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupError {
    /// A frame must carry at least 128 bytes of packet.
    Packet,
    /// A buffer is too small for the data that an RTS carries.
    BufferSize,
    /// There must be at least eight buffers.
    BufferCount,
    /// The buffers lie outside the memory.
    Memory,
    /// A CTS must clear 1 to 128 packets, `ahead` be 4096 at most; `early` must be below 128; there must be at least
    /// one NIC buffer and one packet pinned.
    Grant,
    /// Every limit must be above 0, every time-out too.
    Zero,
}

/// Which limit a call ran into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// [`Config::peers`].
    Peers,
    /// [`Config::sends`].
    Sends,
    /// [`Config::receives`].
    Receives,
    /// As many completions wait to be taken as there may be.
    Completions,
    /// Commands wait to be taken: see [`Policy::is_ready`].
    Commands,
    /// The region lies outside the memory, or the message is too long for its packets to be counted.
    Memory,
    /// There is no such peer, or it is being closed.
    NoPeer,
    /// There is no such message, or its sender has ended.
    NoMessage,
}

/// Why a message was not delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// The peer did not answer for [`Config::dead`].
    PeerDead,
    /// The peer has a new incarnation, so it has forgotten our messages.
    PeerRestarted,
    /// The peer was closed, by it or by us.
    PeerClosed,
    /// The peer gave this message up.
    Aborted,
    /// The peer lives, but the message made no progress in [`Config::attempts`] tries.
    NoProgress,
    /// The send or receive was cancelled.
    Cancelled,
    /// The peer uses another version of RMPP.
    OtherVersion,
}

/// Identifies a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerId(pub u16);

/// Identifies a posted receive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ReceiveId(u32);

/// Whether a completion is of a send or a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// A message that was sent.
    Send,
    /// A receive.
    Receive,
}

/// A message to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outgoing {
    /// Whom it is for.
    pub peer: PeerId,
    /// Context (communicator).
    pub context: u32,
    /// Tag.
    pub tag: u64,
    /// Passed to the receiver unread.
    pub data: u64,
    /// Where the message lies. Its bytes must not change until its completion.
    pub region: Region,
    /// The caller's name for it.
    pub token: u64,
}

/// A receive to post.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Sender; None for any.
    pub source: Option<PeerId>,
    /// Context (communicator).
    pub context: u32,
    /// Tag.
    pub tag: u64,
    /// Bits of the tag that are not compared.
    pub ignore: u64,
    /// Where the message goes.
    pub region: Region,
    /// The caller's name for it.
    pub token: u64,
}

/// Information on a delivered message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delivered {
    /// The peer.
    pub peer: PeerId,
    /// Tag.
    pub tag: u64,
    /// What the sender passed on.
    pub data: u64,
    /// Bytes of the message.
    pub length: u64,
    /// Bytes of the message that were delivered: fewer than its length if the receive was shorter. The sender does not
    /// learn this number: there it is 0.
    pub placed: u64,
}

/// The end of a send or receive. Each operation that was accepted gets exactly one completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The caller's name for it.
    pub token: u64,
    /// Send or receive.
    pub side: Side,
    /// The operation's result.
    pub result: Result<Delivered, Error>,
}

/// An unexpected message that was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Probed {
    /// Names the message if it was claimed.
    pub message: u32,
    /// Its sender.
    pub peer: PeerId,
    /// Its tag.
    pub tag: u64,
    /// What the sender passed on.
    pub data: u64,
    /// Its bytes.
    pub length: u64,
}

/// A receive that is posted or being filled.
#[derive(Clone, Copy, Debug, Default)]
struct Receive {
    token: u64,
    region: Region,
    /// Its place in the matching, while it waits there.
    posted: Option<baton_matching::PostedId>,
    /// The peer that it waits for, if that is a certain one.
    source: Option<u16>,
    /// The data half was asked to take the receive back; it then ends with this error.
    cancelling: Option<Error>,
}

/// The policy half of an endpoint.
pub struct Policy {
    config: Config,
    peers: Box<[Peer]>,
    /// Peers by address and endpoint.
    addresses: BTreeMap<(Endpoint, u16), u16>,
    incarnations: Incarnations,
    outgoing: Slab<Outgoings>,
    incoming: Slab<Incoming>,
    /// Incoming messages that came before one with a lower number.
    held: usize,
    receives: Slab<Receive>,
    matching: Matching,
    timers: Timers,
    commands: Commands,
    /// Among the commands is the ACK of a message whose sender waits for it.
    awaited: bool,
    completions: VecDeque<Completion>,
    /// Incoming messages that wait for NIC buffers or pinned memory before they can be cleared, in the order of their
    /// turns.
    waiting: VecDeque<u32>,
    /// Packets and bytes that are cleared and not known to have come.
    cleared_packets: u32,
    cleared_bytes: u64,
    /// Buffers for RTS packets that neither the data half nor a message uses, and buffers that the data half has.
    free_buffers: Vec<u16>,
    posted_buffers: Buffers,
    /// Peers and messages that a new data half does not have yet.
    replay: restart::Replay,
    /// Present if the data half can match.
    offloaded: Option<offloaded::Offloaded>,
    counters: Counters,
}

impl Policy {
    /// An endpoint without peers.
    ///
    /// # Errors
    /// A settings error.
    pub fn new(config: Config) -> Result<Policy, SetupError> {
        config.check()?;
        let (sends, incoming, receives) = (config.sends.into(), config.incoming.into(), usize::from(config.receives));
        // A receive that has matched keeps its place until its message is complete.
        let receives = receives + usize::from(config.incoming);
        Ok(Policy {
            peers: alloc::vec![Peer::default(); config.peers.into()].into(),
            addresses: BTreeMap::new(),
            incarnations: Incarnations::new(config.incarnation),
            outgoing: Slab::new(sends),
            incoming: Slab::new(incoming),
            held: 0,
            receives: Slab::new(receives.min(handle::SLOTS)),
            matching: Matching::new(config.receives.into(), incoming, config.hash_key),
            timers: Timers::new(sends + incoming + usize::from(config.peers)),
            commands: Commands::new(2 * MOST_COMMANDS),
            awaited: false,
            completions: VecDeque::with_capacity(sends + receives),
            waiting: VecDeque::with_capacity(incoming),
            cleared_packets: 0,
            cleared_bytes: 0,
            free_buffers: (0..config.buffer_count).rev().collect(),
            posted_buffers: Buffers::new(config.buffer_count),
            replay: restart::Replay::default(),
            offloaded: (config.data_posted > 0).then(offloaded::Offloaded::new),
            counters: Counters::default(),
            config,
        })
    }

    /// Counters so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Messages that are sent or wait, incoming messages, and posted receives.
    pub fn usage(&self) -> (usize, usize, usize) {
        (self.outgoing.len(), self.incoming.len() - self.lent().0, self.matching.posted())
    }

    /// Buffers for RTS packets that messages hold.
    pub fn buffers_held(&self) -> usize {
        usize::from(self.config.buffer_count) - self.posted_buffers.len() - self.free_buffers.len()
    }

    /// Packets and bytes that are cleared and not known to have come.
    pub fn cleared(&self) -> (u32, u64) {
        (self.cleared_packets, self.cleared_bytes)
    }

    /// Whether there is room for the commands that a call makes. If not, commands are to be taken first.
    pub fn is_ready(&self) -> bool {
        self.commands.len() <= MOST_COMMANDS
    }

    /// The next command for the data half. After [`Policy::restart`], commands come first that enter all peers and
    /// messages in the new data half.
    pub fn poll_command(&mut self) -> Option<Command> {
        if let Some(command) = self.poll_replay() {
            return Some(command);
        }
        if let Some(command) = self.poll_informing() {
            return Some(command);
        }
        if let Some(command) = self.commands.pop() {
            self.awaited &= !self.commands.is_empty();
            return Some(self.brought_up_to_date(command));
        }
        if let Some(buffer) = self.free_buffers.pop() {
            self.posted_buffers.insert(buffer);
            return Some(Command::PostBuffer { buffer });
        }
        self.poll_loan()
    }

    /// Whether there are commands, and all of them can wait some milliseconds: CLEANUPs, and ACKs of messages whose RTS
    /// carried all data. Meanwhile other commands may join them, and an RTS to the same peer may make the CLEANUPs
    /// unnecessary.
    pub fn is_patient(&self) -> bool {
        !self.awaited && !self.commands.is_empty() && self.commands.can_wait()
    }

    /// Whether no command waits.
    pub fn has_no_commands(&self) -> bool {
        self.commands.is_empty()
    }

    /// ACKs among the commands.
    pub fn acknowledgements(&self) -> usize {
        self.commands.acknowledgements()
    }

    /// The next completion.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        take_first(&mut self.completions)
    }

    /// When [`Policy::on_timeout`] is to be called.
    pub fn next_timeout(&self) -> Option<u64> {
        self.timers.next()
    }

    /// Does the work that is due at `now`.
    pub fn on_timeout(&mut self, now: u64) {
        self.consider_data(now);
        while self.is_ready()
            && let Some(timer) = self.timers.pop(now)
        {
            let (sends, incoming) = (usize::from(self.config.sends), usize::from(self.config.incoming));
            if timer < sends {
                self.send_timeout(timer, now);
            } else if timer < sends + incoming {
                self.receive_timeout(timer - sends, now);
            } else {
                self.peer_timeout(timer - sends - incoming, now);
            }
        }
    }

    /// Handles an event of the data half. Call it only if [`Policy::is_ready`].
    pub fn handle_event(&mut self, event: &Event, now: u64, memory: &mut (impl Memory + ?Sized)) {
        match event {
            Event::Rts { from, header, rts, buffer, length } => {
                // A data half that reports a buffer which it does not have is not believed.
                if *length > self.config.buffer_size || !self.posted_buffers.remove(*buffer) {
                    return;
                }
                self.on_rts(from, header, rts, (*buffer, *length), now, memory);
            }
            Event::Control { from, header } => self.on_control(from, header, now),
            Event::OtherVersion { from, source, incarnation, hello } => {
                self.on_other_version(from, (*source, *incarnation), *hello, now);
            }
            Event::More { handle, placed } => self.on_more(*handle, *placed, now),
            Event::Gap { handle, placed } => self.on_gap(*handle, *placed, now),
            Event::Placed { handle } => self.on_placed(*handle, now),
            Event::Released { handle, half } => self.on_released(*handle, *half, now),
            Event::Arrived(arrived) => self.on_arrived(arrived, now, memory),
            Event::Cancelled { receive } => self.on_cancelled(*receive),
            Event::Matcher(matcher) => self.on_matcher(*matcher),
        }
    }

    fn on_control(&mut self, from: &Endpoint, header: &Header, now: u64) {
        let outcome = match header.kind {
            Kind::Hello => {
                self.on_hello(from, header);
                Ok(())
            }
            Kind::Welcome => self.on_welcome(from, header, now),
            Kind::Reset => self.on_reset(from, header, now),
            _ => self.admit(from, header, now).map(|peer| self.on_peers_packet(peer, header, now)),
        };
        if let Err(reason) = outcome {
            self.counters.drop(reason);
        }
    }

    /// A packet of the current association with a peer.
    fn on_peers_packet(&mut self, peer: usize, header: &Header, now: u64) {
        match header.kind {
            Kind::Ack => self.on_ack(peer, header, now),
            Kind::Hold => self.on_hold(peer, header, now),
            Kind::End => self.on_end(peer, header, now),
            Kind::Cleanup => self.on_cleanup(peer, header),
            Kind::Ping => {
                self.advance_incoming_floor(peer, header.packet);
                self.control(peer, Kind::Pong, |_| ());
            }
            Kind::Bye => self.on_bye(peer, header, now),
            Kind::ByeAck => self.on_bye_ack(peer, now),
            // A Pong only says that the peer lives, which `admit` has noted; other kinds of packets come as events of
            // their own.
            _ => {}
        }
    }

    /// Sends a packet without a body to a peer; `fill` sets its fields.
    fn control(&mut self, peer: usize, kind: Kind, fill: impl FnOnce(&mut Header)) {
        let to = &self.peers[peer];
        let mut header = Header::new(kind, [self.config.endpoint, to.endpoint], [to.local, to.remote]);
        fill(&mut header);
        self.commands.push(Command::Control { to: to.address, header });
    }

    /// Whether another operation may begin: each needs room for its completion.
    fn check_room(&self) -> Result<(), Limit> {
        let operations = self.outgoing.len() + self.receives.len() + self.completions.len();
        if operations >= usize::from(self.config.sends) + usize::from(self.config.receives) + usize::from(self.config.incoming) {
            return Err(Limit::Completions);
        }
        if self.commands.len() <= MOST_COMMANDS + SEVERAL { Ok(()) } else { Err(Limit::Commands) }
    }

    /// Whether a region lies in the memory.
    fn check_region(&self, region: &Region) -> Result<(), Limit> {
        let end = region.offset.checked_add(region.length);
        if end.is_some_and(|end| end <= self.config.memory) { Ok(()) } else { Err(Limit::Memory) }
    }

    /// The time-out of a CTS for so many packets: on a slow link many take a while.
    fn clearance(&self, packets: u32) -> u64 {
        self.config.timeout * u64::from(packets.min(MAX_CLEARED.into()).div_ceil(64).max(1))
    }

    /// The time-out after so many attempts.
    fn backoff(&self, attempts: u8) -> u64 {
        self.config.timeout << attempts.min(6)
    }

    fn criteria(source: Option<PeerId>, context: u32, tag: u64, ignore: u64) -> Criteria {
        Criteria { source: source.map(|peer| peer.0.into()), context, tag, ignore }
    }
}

impl Config {
    /// Settings of a data half that fits a policy with these: `address` is our own, `events` the most that may wait to
    /// be taken.
    pub fn data(&self, halves: Halves, address: Endpoint, events: u16) -> DataConfig {
        DataConfig {
            halves,
            address,
            endpoint: self.endpoint,
            peers: self.peers,
            incoming: self.incoming,
            outgoing: self.sends,
            buffers: self.buffers,
            buffer_count: self.buffer_count,
            buffer_size: self.buffer_size,
            packet: self.packet,
            events,
            matching: (self.data_posted > 0 && halves.receiving).then(|| self.matching()),
            streams: None,
        }
    }

    fn matching(&self) -> MatchConfig {
        MatchConfig {
            posted: self.data_posted,
            unexpected: self.data_unexpected,
            receives: u32::from(self.receives) + u32::from(self.incoming),
            hash_key: self.hash_key,
        }
    }

    fn check(&self) -> Result<(), SetupError> {
        if self.packet < 128 {
            return Err(SetupError::Packet);
        }
        if self.buffer_size < crate::data::first_bytes(self.packet) {
            return Err(SetupError::BufferSize);
        }
        if self.buffer_count < 8 {
            return Err(SetupError::BufferCount);
        }
        let end = self.buffers.checked_add(u64::from(self.buffer_count) * u64::from(self.buffer_size));
        if end.is_none_or(|end| end > self.memory) {
            return Err(SetupError::Memory);
        }
        let fragment = u64::from(crate::data::fragment(self.packet));
        let grants = (1..=MAX_CLEARED).contains(&self.grant) && self.ahead <= MAX_AHEAD;
        if !grants || u16::from(self.early) >= MAX_CLEARED || self.nic_buffers == 0 || self.pinned < fragment {
            return Err(SetupError::Grant);
        }
        let limits = [self.peers, self.sends, self.receives, self.incoming, self.buffers_per_peer, self.attempts.into()];
        if limits.contains(&0) || [self.timeout, self.keepalive, self.dead].contains(&0) {
            return Err(SetupError::Zero);
        }
        Ok(())
    }
}
