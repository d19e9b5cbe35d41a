//! A session for messages: commands to the NIC's data half, its events, and the change to another NIC after one has
//! died.

use crate::shared::Shared;
use baton_abi::layout::session;
use baton_protocol::program::{Messages, Opening};
use baton_records::{SLOTS, SessionMemory, begin, pop, push};
use baton_ring::{Consumer, Producer, must_ring};
use baton_rmpp::{Command, Event};
use baton_shm::RingWords;
use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::Ordering;

/// Microseconds after which the agent is asked again about a host whose route was not known.
const RETRY: u64 = 100_000;

/// A program's session for messages.
pub struct Link {
    shared: Shared,
    memory: SessionMemory,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    /// The number of the NIC that is in use: see [`baton_records`].
    starts: u32,
    /// The agent has given the session to another NIC, and the command that begins its use has found no room in the
    /// ring yet.
    renewing: bool,
    published: bool,
    /// Hosts that this NIC may send to, and those whose route was not known, with the time to ask again.
    reached: HashSet<IpAddr>,
    unreached: Vec<(IpAddr, u64)>,
    /// Hosts to which the NIC cannot send: this host itself, and those behind other devices.
    refused: HashSet<IpAddr>,
    /// Packets that earlier NICs have received and sent.
    packets: [u64; session::PACKETS_WORDS],
}

impl Link {
    /// Opens a session for messages with the agent that listens at `path`. The NIC takes the packets that come to
    /// `socket`.
    ///
    /// # Errors
    /// With the reason, if there is no agent or it refuses.
    pub fn connect(path: &Path, messages: Messages, socket: BorrowedFd<'_>) -> io::Result<Link> {
        let opening = Opening { messages: Some(messages), ..Opening::alone() };
        let shared = Shared::connect_for_messages(path, opening, socket)?;
        let memory = shared.memory().clone();
        Ok(Link {
            commands: Producer::new(memory.ring(session::COMMANDS)),
            events: Consumer::new(memory.ring(session::EVENTS)),
            memory: SessionMemory::new(memory),
            shared,
            starts: 0,
            renewing: false,
            published: false,
            reached: HashSet::new(),
            unreached: Vec::new(),
            refused: HashSet::new(),
            packets: [0; session::PACKETS_WORDS],
        })
    }

    /// The session's memory, which the NIC can reach.
    pub fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    /// The doorbell's descriptor, which is readable when the NIC has rung.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.shared.bell().as_fd()
    }

    /// Clears the doorbell.
    pub fn clear_bell(&self) {
        self.shared.clear_bell();
    }

    /// Announces that the program is going to sleep. False if it must not: an event waits, or there is another NIC.
    pub fn prepare_sleep(&self) -> bool {
        self.shared.count_sleeper();
        !self.events.has_message() && self.starts_now() == self.starts && !self.renewing
    }

    /// Undoes [`Link::prepare_sleep`].
    pub fn end_sleep(&self) {
        self.shared.uncount_sleeper();
    }

    fn starts_now(&self) -> u32 {
        self.memory.region().word32(session::NIC_STARTS).load(Ordering::Acquire)
    }

    /// Begins to use another NIC, if the agent has started one. Returns true when that NIC is in use: it has no state
    /// yet, and the last one no longer touches the session's memory. Unread events of the last NIC are dropped.
    pub fn renew(&mut self) -> bool {
        let starts = self.starts_now();
        if starts != self.starts {
            let last = self.packets_of_this_nic();
            self.packets = std::array::from_fn(|at| self.packets[at] + last[at]);
            self.memory.region().words(session::PACKETS, session::PACKETS_WORDS).iter().for_each(|word| {
                word.store(0, Ordering::Relaxed);
            });
            self.events.skip_all();
            self.starts = starts;
            self.renewing = true;
            self.reached.clear();
            self.unreached.clear();
            self.refused.clear();
        }
        if !self.renewing || push(&mut self.commands, &begin(starts)).is_err() {
            return false;
        }
        self.renewing = false;
        self.published = true;
        true
    }

    fn packets_of_this_nic(&self) -> [u64; session::PACKETS_WORDS] {
        let words = self.memory.region().words(session::PACKETS, session::PACKETS_WORDS);
        std::array::from_fn(|at| words[at].load(Ordering::Relaxed))
    }

    /// Packets that NICs have received and sent, data packets that they have placed, and packets that they have
    /// dropped.
    pub fn packets(&self) -> [u64; session::PACKETS_WORDS] {
        let now = self.packets_of_this_nic();
        std::array::from_fn(|at| self.packets[at] + now[at])
    }

    /// Number of messages of which the NIC in use has state.
    pub fn messages(&self) -> u64 {
        self.memory.region().words(session::MESSAGES, 1)[0].load(Ordering::Relaxed)
    }

    /// The number of the NIC in use.
    pub fn starts(&self) -> u32 {
        self.starts
    }

    /// Whether a command can be pushed.
    pub fn has_room(&mut self) -> bool {
        self.starts > 0 && !self.renewing && self.commands.has_room(SLOTS)
    }

    /// Sends a command, which the NIC sees after [`Link::publish`]. Call it only if [`Link::has_room`].
    pub fn push(&mut self, command: &Command, now: u64) {
        // A host that is addressed by MAC address (port 0) needs no route.
        if let Command::SetPeer { address, .. } | Command::Control { to: address, .. } = command
            && address.port != 0
        {
            self.leads_to(SocketAddr::from(*address).ip(), now);
        }
        self.published |= push(&mut self.commands, &command.to_words()).is_ok();
    }

    /// Makes the commands visible to the NIC, and wakes it if it sleeps.
    pub fn publish(&mut self) {
        if std::mem::take(&mut self.published) {
            self.commands.publish();
            if must_ring(self.memory.region().word32(session::NIC_SLEEPING)) {
                self.shared.bell().ring();
            }
        }
    }

    /// Asks the agent to let the NIC send to a host, unless it may already. False if the NIC cannot send to it. While
    /// the route is not known yet, packets are lost, and the agent is asked again later.
    pub fn leads_to(&mut self, host: IpAddr, now: u64) -> bool {
        if self.reached.contains(&host) || self.unreached.iter().any(|(other, _)| *other == host) {
            return true;
        }
        if self.refused.contains(&host) || self.reached.len() + self.unreached.len() + self.refused.len() >= session::MOST_HOSTS {
            return false;
        }
        self.reach(host, now)
    }

    fn reach(&mut self, host: IpAddr, now: u64) -> bool {
        match self.shared.reach(host) {
            Ok(()) => _ = self.reached.insert(host),
            Err(error) if error.kind() == io::ErrorKind::HostUnreachable => {
                self.refused.insert(host);
                return false;
            }
            Err(_) => self.unreached.push((host, now + RETRY)),
        }
        true
    }

    /// Asks again about hosts whose route was not known. Returns those whose route still is not: a packet that the
    /// kernel sends to them may make it resolve the neighbour.
    pub fn retry(&mut self, now: u64) -> Vec<IpAddr> {
        let (due, later) = std::mem::take(&mut self.unreached).into_iter().partition::<Vec<_>, _>(|(_, at)| *at <= now);
        self.unreached = later;
        due.iter().for_each(|(host, _)| _ = self.reach(*host, now));
        self.unreached.iter().filter(|(_, at)| *at == now + RETRY).map(|(host, _)| *host).collect()
    }

    /// When to call [`Link::retry`] next.
    pub fn next_retry(&self) -> Option<u64> {
        self.unreached.iter().map(|(_, at)| *at).min()
    }

    /// Takes the NIC's next event.
    ///
    /// # Errors
    /// If the NIC's ring makes no sense.
    pub fn poll_event(&mut self) -> io::Result<Option<Event>> {
        if self.starts_now() != self.starts || self.renewing {
            return Ok(None);
        }
        let record = pop(&mut self.events).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        self.events.release();
        match record.map(|record| Event::from_words(&record)) {
            None => Ok(None),
            Some(Some(event)) => Ok(Some(event)),
            Some(None) => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Whether keeper and agent have ended: there will be no NIC any more.
    pub fn has_ended(&self) -> bool {
        self.shared.line.is_hung_up()
    }

    /// The descriptor that hangs up when keeper and agent end.
    pub fn hangs_up(&self) -> BorrowedFd<'_> {
        self.shared.hangs_up()
    }
}
