//! An endpoint for messages: the policy half in this process, and the data half in this process or on the NIC.

use super::carrier::Carrier;
use super::counted::Counted;
use super::link::Link;
use super::local::Local;
use baton_abi::layout::session;
use baton_linux::events::{Poller, Trigger};
use baton_protocol::program::Messages;
use baton_records::SessionMemory;
use baton_rmpp::{Command, Completion, Config, Half, Halves, Limit, Memory, Outgoing, PeerId, Policy, ReceiveId, Request};
use baton_shm::Region;
use baton_wire::Endpoint as Address;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Buffers for RTS packets.
const RTS_BUFFERS: u16 = 256;
/// Events that the data half in this process keeps for the policy.
const EVENTS: u16 = 4096;
/// Rounds that one call of [`Endpoint::progress`] does at most.
const ROUNDS: usize = 16;

const SOCKET: u64 = 0;
const BELL: u64 = 1;
const END: u64 = 2;
const WATCHED: u64 = 3;

/// Settings of an endpoint.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its address: of this host, and a port or 0.
    pub address: SocketAddr,
    /// Raw Ethernet frames at this device carry the packets, instead of UDP; then the address is the device's.
    pub ethernet: Option<String>,
    /// Which halves the NIC has. With none there is no session.
    pub on_nic: Halves,
    /// The agent's socket. Not used without a half on the NIC.
    pub agent: PathBuf,
    /// Bytes of RMPP packet in a frame.
    pub packet: u16,
    /// How many packets before the last cleared one the RSM is sent: the paper's k, 0 to 15.
    pub early: u8,
    /// Most packets that are cleared and have not arrived.
    pub nic_buffers: u32,
    /// Bytes of memory for messages. On a NIC it is part of the session's.
    pub memory: usize,
    /// Messages in each direction, and receives.
    pub messages: u16,
    /// Receives that the NIC is to have room for, so that it matches and answers by itself; 0 if this process always
    /// matches.
    pub posted_on_nic: u16,
    /// Random: the key of the hash by which messages are matched.
    pub hash_key: [u64; 4],
    /// A number above those of all earlier endpoints at this address, modulo 2³², for example from a clock.
    pub incarnation: u32,
}

/// Counters of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Packets received and sent, by this process and by NICs.
    pub packets: u64,
    /// Those of `packets` that NICs have received and sent.
    pub packets_on_nic: u64,
    /// Events that came from NICs.
    pub events: u64,
    /// Bytes that this process and the kernel have copied for it: into and out of the socket, packets, and memory.
    pub copied: u64,
    /// NICs that have died and were replaced.
    pub nic_deaths: u32,
}

/// An endpoint.
pub struct Endpoint {
    policy: Policy,
    local: Option<Local>,
    link: Option<Link>,
    on_nic: Halves,
    memory: Counted,
    socket: Carrier,
    poller: Poller,
    address: SocketAddr,
    /// Offset of the program's part of the memory, and its length in bytes.
    heap: [u64; 2],
    events: u64,
}

fn refused(what: impl std::fmt::Debug) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("the settings contradict each other: {what:?}"))
}

impl Endpoint {
    /// Makes an endpoint.
    ///
    /// # Errors
    /// With the reason, if the agent refuses or a system call fails.
    pub fn new(settings: &Settings) -> io::Result<Endpoint> {
        let socket = Carrier::bind(settings)?;
        let address = socket.address();
        let config = config(settings);
        let Halves { receiving, sending } = settings.on_nic;
        let link = match receiving || sending {
            true => {
                let ethernet = settings.ethernet.is_some();
                let messages = Messages { ethernet, ..request(&config, settings.on_nic, address) };
                Some(Link::connect(&settings.agent, messages, socket.as_fd())?)
            }
            false => None,
        };
        let memory = match &link {
            Some(link) => link.memory().clone(),
            None => SessionMemory::new(Arc::new(Region::private(config.memory as usize)?)),
        };
        if (memory.region().len() as u64) < config.memory {
            return Err(refused("the session's memory is smaller"));
        }
        let local = match receiving && sending {
            true => None,
            false => {
                let halves = Halves { receiving: !receiving, sending: !sending };
                Some(Local::new(config.data(halves, address.into(), EVENTS)))
            }
        };
        let poller = Poller::new()?;
        if local.is_some() {
            poller.add(socket.as_fd(), SOCKET, Trigger::Readable)?;
        }
        if let Some(link) = &link {
            poller.add(link.bell(), BELL, Trigger::Readable)?;
            poller.add(link.hangs_up(), END, Trigger::HangUp)?;
        }
        let policy = Policy::new(config).map_err(refused)?;
        let heap = [HEAP + buffers_bytes(&config), settings.memory as u64];
        let memory = Counted::new(memory);
        Ok(Endpoint { policy, local, link, on_nic: settings.on_nic, memory, socket, poller, address, heap, events: 0 })
    }

    /// Address at which it receives.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Offset of the memory for messages, and its length in bytes.
    pub fn heap(&self) -> [u64; 2] {
        self.heap
    }

    /// The memory, for the program's own accesses.
    pub fn memory(&mut self) -> &mut impl Memory {
        self.memory.memory()
    }

    /// The policy, for its counters.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The endpoint's counters.
    pub fn usage(&self) -> Usage {
        let (local, copied) = self.local.as_ref().map_or((0, 0), |local| (local.packets.iter().sum(), local.copied));
        let [received, sent, ..] = self.link.as_ref().map_or([0; session::PACKETS_WORDS], Link::packets);
        Usage {
            packets: local + received + sent,
            packets_on_nic: received + sent,
            events: self.events,
            copied: self.memory.copied() + copied,
            nic_deaths: self.link.as_ref().map_or(0, |link| link.starts().saturating_sub(1)),
        }
    }

    /// How many objects it holds for messages that have not ended: sends, incoming messages, receives, buffers for RTS
    /// packets, packets that are cleared, messages of the data half in this process, and of the NIC's. All are 0 when
    /// nothing is left.
    pub fn held(&self) -> [u64; 7] {
        let (sends, incoming, receives) = self.policy.usage();
        let (received, sent) = self.local.as_ref().map_or((0, 0), |local| local.data.messages());
        let counts = [sends, incoming, receives, self.policy.buffers_held(), self.policy.cleared().0 as usize, received + sent];
        let [a, b, c, d, e, f] = counts.map(|count| count as u64);
        [a, b, c, d, e, f, self.link.as_ref().map_or(0, Link::messages)]
    }

    /// The number of the peer at an address.
    ///
    /// # Errors
    /// The table of peers is full.
    pub fn peer(&mut self, address: SocketAddr) -> Result<PeerId, Limit> {
        self.policy.open(Address::from(address), 0)
    }

    /// Ends the association with a peer: what was sent to it is finished first, then a Bye is sent.
    pub fn close(&mut self, peer: PeerId, now: u64) {
        self.policy.close(peer, now);
        self.transmit(now);
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The limit that was reached.
    pub fn send(&mut self, outgoing: Outgoing, now: u64) -> Result<(), Limit> {
        self.policy.send(outgoing, now)?;
        self.transmit(now);
        Ok(())
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// The limit that was reached.
    pub fn receive(&mut self, request: Request, now: u64) -> Result<ReceiveId, Limit> {
        let id = self.policy.post(request, now, &mut self.memory)?;
        self.transmit(now);
        Ok(id)
    }

    /// Whether the NIC matches messages with receives, at this moment.
    pub fn matches_on_nic(&self) -> bool {
        self.policy.matches_in_data()
    }

    /// Cancels a receive; its completion says so. False if it has matched a message.
    pub fn cancel(&mut self, id: ReceiveId) -> bool {
        self.policy.cancel(id)
    }

    /// The next completion.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.policy.poll_completion()
    }

    /// Receives, answers and sends all that is pending. Returns whether there was anything.
    ///
    /// # Errors
    /// If the NIC's ring makes no sense, or keeper and agent have ended.
    pub fn progress(&mut self, now: u64) -> io::Result<bool> {
        let mut any = false;
        for _ in 0..ROUNDS {
            let mut moved = self.take_nic_events(now)?;
            if let Some(local) = &mut self.local {
                moved |= local.receive(&mut self.socket, &mut self.memory) > 0;
                while self.policy.is_ready()
                    && let Some(event) = local.data.poll_event()
                {
                    self.policy.handle_event(&event, now, &mut self.memory);
                    moved = true;
                }
            }
            self.policy.on_timeout(now);
            moved |= self.transmit(now);
            if !moved {
                break;
            }
            any = true;
        }
        Ok(any)
    }

    /// Takes the NIC's events. After a NIC's death the next one gets the state of all peers and messages.
    fn take_nic_events(&mut self, now: u64) -> io::Result<bool> {
        let Some(link) = &mut self.link else { return Ok(false) };
        let mut moved = link.renew();
        if moved {
            self.policy.restart(self.on_nic, now);
        }
        while self.policy.is_ready()
            && let Some(event) = link.poll_event()?
        {
            self.events += 1;
            self.policy.handle_event(&event, now, &mut self.memory);
            moved = true;
        }
        if link.next_retry().is_some_and(|at| at <= now) {
            let unreached = link.retry(now);
            self.socket.probe(&unreached);
        }
        Ok(moved)
    }

    /// Passes the policy's commands to the data half in this process or on the NIC, and sends packets. Returns whether
    /// there was anything.
    fn transmit(&mut self, now: u64) -> bool {
        let mut any = false;
        while self.has_room()
            && let Some(command) = self.policy.poll_command()
        {
            self.carry_out(&command, now);
            any = true;
        }
        if let Some(link) = &mut self.link {
            link.publish();
        }
        any | self.local.as_mut().is_some_and(|local| local.transmit(&mut self.socket, &self.memory) > 0)
    }

    fn has_room(&mut self) -> bool {
        self.local.as_ref().is_none_or(|local| local.data.has_room()) && self.link.as_mut().is_none_or(Link::has_room)
    }

    fn carry_out(&mut self, command: &Command, now: u64) {
        let on_nic = |half| if half == Half::Receiving { self.on_nic.receiving } else { self.on_nic.sending };
        if let Some(link) = &mut self.link
            && command.half().is_none_or(on_nic)
        {
            link.push(command, now);
        }
        if let Some(local) = &mut self.local
            && command.half().is_none_or(|half| !on_nic(half))
        {
            local.data.handle_command(command);
        }
    }

    /// Ends [`Endpoint::wait`] when another descriptor becomes readable.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.poller.add(fd, WATCHED, Trigger::Readable)
    }

    /// Sleeps until there is something to do, at most until `limit`, microseconds of the clock that `now` is of.
    ///
    /// # Errors
    /// The failed system call's, or `BrokenPipe` if keeper and agent have ended.
    pub fn wait(&mut self, now: u64, limit: u64) -> io::Result<()> {
        let retry = self.link.as_ref().and_then(Link::next_retry);
        let due = [self.policy.next_timeout(), retry].into_iter().flatten().fold(limit, u64::min);
        let awake = self.link.as_ref().is_some_and(|link| !link.prepare_sleep());
        let pause = if awake { 0 } else { due.saturating_sub(now) };
        let mut tokens = Vec::new();
        let waited = self.poller.wait(Some(Duration::from_micros(pause)), &mut tokens);
        if let Some(link) = &self.link {
            link.end_sleep();
            if tokens.contains(&BELL) {
                link.clear_bell();
            }
            if tokens.contains(&END) && link.has_ended() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        waited
    }
}

/// Unexpected messages that a NIC which matches keeps; with more, this process matches.
const UNEXPECTED_ON_NIC: u16 = 256;

/// Offset of the first byte of the memory that messages may use.
const HEAP: u64 = session::HEAP as u64;

fn buffers_bytes(config: &Config) -> u64 {
    (u64::from(config.buffer_count) * u64::from(config.buffer_size)).next_multiple_of(4096)
}

fn config(settings: &Settings) -> Config {
    let config = Config {
        incarnation: settings.incarnation,
        hash_key: settings.hash_key,
        sends: settings.messages,
        receives: settings.messages,
        incoming: settings.messages,
        buffers: HEAP,
        buffer_count: RTS_BUFFERS,
        buffer_size: settings.packet,
        packet: settings.packet,
        nic_buffers: settings.nic_buffers,
        early: settings.early,
        data_posted: if settings.on_nic.receiving { settings.posted_on_nic } else { 0 },
        data_unexpected: settings.messages.min(UNEXPECTED_ON_NIC),
        ..Config::default()
    };
    Config { memory: HEAP + buffers_bytes(&config) + settings.memory as u64, ..config }
}

/// The request to the agent for an endpoint with this configuration over a UDP socket at `address`, with these halves
/// on the NIC.
pub fn request(config: &Config, halves: Halves, address: SocketAddr) -> Messages {
    Messages {
        address,
        ethernet: false,
        endpoint: config.endpoint,
        receiving: halves.receiving,
        sending: halves.sending,
        peers: config.peers,
        incoming: config.incoming,
        outgoing: config.sends,
        buffers: config.buffers,
        buffer_count: config.buffer_count,
        buffer_size: config.buffer_size,
        packet: config.packet,
        posted: config.data_posted,
        unexpected: config.data_unexpected,
        receives: u32::from(config.receives) + u32::from(config.incoming),
    }
}
