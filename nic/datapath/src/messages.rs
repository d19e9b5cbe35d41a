//! A session's messages (RMPP): the data half, or its receiving part, between the session's rings and the wire. The
//! policy half runs in the program.

use baton_abi::layout::session;
use baton_records::{SLOTS, SessionMemory, Torn, begins, pop, push};
use baton_ring::{Consumer, Producer};
use baton_rmpp::{Command, Data, DataConfig, Disposition, Run};
use baton_shm::{Region, RingWords};
use baton_wire::Endpoint;
use baton_wire::frame::Link;
use baton_wire::rmpp;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of commands taken from one session before the next one gets its turn.
const COMMANDS: usize = 64;

/// Most hosts that a session may send to.
const MAX_HOPS: usize = 8192;

/// The endpoint of a session for messages.
#[derive(Clone, Copy, Debug)]
pub struct MessageEndpoint {
    /// Which halves the NIC has, the address and the sizes.
    pub data: DataConfig,
    /// The number of this NIC for the session: see [`baton_records`].
    pub starts: u32,
}

/// The messages of one session.
pub(crate) struct Messages {
    endpoint: MessageEndpoint,
    memory: SessionMemory,
    /// None until the program has begun to use this NIC.
    data: Option<Data>,
    /// The routes to the hosts that the agent has allowed.
    hops: BTreeMap<[u8; 16], Link>,
}

/// The result of a round over a session's commands.
pub(crate) struct Round {
    /// There were commands.
    pub worked: bool,
    /// Records that hold no command.
    pub bad: u64,
}

impl Messages {
    pub fn new(endpoint: MessageEndpoint, memory: Arc<Region>) -> Messages {
        Messages { endpoint, memory: SessionMemory::new(memory), data: None, hops: BTreeMap::new() }
    }

    /// Address at which packets are received.
    pub fn address(&self) -> Endpoint {
        self.endpoint.data.address
    }

    /// Allows packets to a host by `link`; with None packets to it are dropped. False if there are too many hosts
    /// already.
    pub fn reach(&mut self, host: [u8; 16], link: Option<Link>) -> bool {
        let Some(link) = link else {
            self.hops.remove(&host);
            return true;
        };
        let room = self.hops.len() < MAX_HOPS || self.hops.contains_key(&host);
        if room {
            self.hops.insert(host, link);
        }
        room
    }

    /// The link header for an endpoint. With raw Ethernet it consists of the two MAC addresses; multicast frames are
    /// not sent.
    pub fn link_to(&self, remote: &Endpoint) -> Option<Link> {
        const GROUP: u8 = 1;
        let local = self.address();
        if local.port == 0 {
            let single = remote.port == 0 && remote.address[0] & GROUP == 0;
            let mac = |endpoint: &Endpoint| endpoint.address.first_chunk().copied().unwrap_or_default();
            return single.then(|| Link { source: mac(&local), destination: mac(remote), ..Link::default() });
        }
        self.hops.get(&remote.address).filter(|_| remote.is_v4() == local.is_v4()).copied()
    }

    /// Runs a batch of the program's commands.
    ///
    /// # Errors
    /// [`Torn`] if the ring makes no sense.
    pub fn run_commands(&mut self, commands: &mut Consumer<RingWords>) -> Result<Round, Torn> {
        let mut round = Round { worked: false, bad: 0 };
        for _ in 0..COMMANDS {
            if !self.takes_commands() {
                break;
            }
            let Some(record) = pop(commands)? else {
                if commands.is_corrupt() {
                    return Err(Torn);
                }
                break;
            };
            round.worked = true;
            if let Some(starts) = begins(&record) {
                // Only once for each NIC, since the tables are allocated here.
                if starts == self.endpoint.starts && self.data.is_none() {
                    self.data = Some(Data::new(self.endpoint.data));
                }
            } else if let Some(data) = &mut self.data {
                match Command::from_words(&record) {
                    Some(command) => data.handle_command(&command),
                    None => round.bad += 1,
                }
            }
        }
        if round.worked {
            commands.release();
        }
        Ok(round)
    }

    /// Whether there is room for the effects of a command. If not, the program is leaving its events unread.
    pub fn takes_commands(&self) -> bool {
        self.data.as_ref().is_none_or(Data::has_room)
    }

    /// Handles the packet in a datagram, or all of them if a device on the way has left a run of datagrams in one
    /// piece. False if the datagram is for the kernel. Before the program has begun to use this NIC packets are
    /// dropped: their sender sends them again.
    pub fn receive(&mut self, from: &Endpoint, datagram: &[u8]) -> bool {
        let Some(data) = &mut self.data else { return true };
        if self.endpoint.data.address.port == 0 {
            // What follows the packet in an Ethernet frame is padding.
            return data.input(from, datagram, &mut self.memory) == Disposition::Done;
        }
        let mut rest = datagram;
        loop {
            // A remainder that is too short for a header is refused as a whole.
            let length = rmpp::packet_length(rest).unwrap_or(rest.len()).min(rest.len());
            let (packet, behind) = rest.split_at(length);
            let disposition = data.input(from, packet, &mut self.memory);
            if behind.is_empty() {
                // Only a datagram that holds nothing else can go to the kernel.
                return disposition == Disposition::Done || length < datagram.len();
            }
            rest = behind;
        }
    }

    /// Whether something is to be sent, or an event waits for room in the ring.
    pub fn has_work(&self, events: &mut Producer<RingWords>) -> bool {
        self.data.as_ref().is_some_and(|data| data.has_transmit() || data.has_event() && events.has_room(SLOTS))
    }

    /// Writes the next packets for one address into `out`, `most` at most.
    pub fn transmit(&mut self, out: &mut [u8], most: usize) -> Option<Run> {
        self.data.as_mut()?.poll_run(&self.memory, out, most)
    }

    /// Sends the events to the program, as far as the ring has room. Returns how many.
    pub fn send_events(&mut self, events: &mut Producer<RingWords>) -> u64 {
        let Some(data) = &mut self.data else { return 0 };
        let mut sent = 0;
        while data.has_event()
            && events.has_room(SLOTS)
            && let Some(event) = data.poll_event()
            && push(events, &event.to_words()).is_ok()
        {
            sent += 1;
        }
        if sent > 0 {
            events.publish();
        }
        sent
    }

    /// Bytes of packet that a frame carries.
    pub fn packet(&self) -> usize {
        self.endpoint.data.packet.into()
    }

    /// Shows the program the counters.
    pub fn publish_counters(&self) {
        let Some(data) = &self.data else { return };
        let counters = data.counters();
        let lost = counters.refused.iter().chain(&counters.dropped).sum();
        let words = self.memory.region().words(session::PACKETS, session::PACKETS_WORDS);
        for (word, value) in words.iter().zip([counters.received, counters.sent, counters.placed, lost]) {
            word.store(value, Ordering::Relaxed);
        }
        let (incoming, outgoing) = data.messages();
        self.memory.region().words(session::MESSAGES, 1)[0].store((incoming + outgoing) as u64, Ordering::Relaxed);
    }
}
