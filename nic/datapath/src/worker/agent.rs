//! The worker's connection to the agent.

use super::Worker;
use crate::backlog::Backlog;
use crate::peers::{Call, FRONT};
use baton_abi::layout::{Counter, host_tcp, nic};
use baton_abi::{FOR_AGENT, Message, Operation};
use baton_device::Device;
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use std::sync::Arc;

/// Least microseconds between two doorbells of the agent, if doorbells are moderated. An agent that waits for a move's
/// answer polls its ring for longer than that.
const APART: u64 = 20;

/// The agent's rings, which only the front worker uses.
pub(super) struct AgentLink {
    pub commands: Consumer<RingWords>,
    pub events: Producer<RingWords>,
    /// Messages that found the ring of events full.
    pub backlog: Backlog,
    /// Messages were sent for which the agent's doorbell has not been rung.
    unsignalled: bool,
    /// When the doorbell may be rung next, in microseconds, and whether ringing for unsignalled messages was put off
    /// until then.
    next_ring: u64,
    put_off: bool,
}

impl AgentLink {
    pub fn new(nic_memory: &Arc<Region>) -> AgentLink {
        let commands = Consumer::new(nic_memory.ring(nic::COMMANDS));
        let events = Producer::new(nic_memory.ring(nic::EVENTS));
        AgentLink::of(commands, events)
    }

    /// The link of the host's TCP, whose commands come from the NIC instead of the agent.
    pub fn of_host_tcp(shared: &Arc<Region>) -> AgentLink {
        let commands = Consumer::new(shared.ring(host_tcp::COMMANDS));
        let events = Producer::new(shared.ring(host_tcp::EVENTS));
        AgentLink::of(commands, events)
    }

    fn of(commands: Consumer<RingWords>, events: Producer<RingWords>) -> AgentLink {
        AgentLink { commands, events, backlog: Backlog::default(), unsignalled: false, next_ring: 0, put_off: false }
    }

    /// Sends a message, behind earlier ones for which the ring had no room.
    pub fn send(&mut self, message: Message) {
        let full = !self.backlog.is_empty() || self.events.push(message.to_words()).is_err();
        if full && !cfg!(feature = "sabotage-lose-message") {
            self.backlog.add(message);
        }
        self.events.publish();
        self.unsignalled = true;
    }

    /// Whether the agent's doorbell has to be rung at `now`, microseconds. `moderated`: not sooner than [`APART`] after
    /// the last time.
    #[inline]
    pub fn should_ring(&mut self, moderated: bool, now: u64) -> bool {
        self.put_off = self.unsignalled && moderated && now < self.next_ring;
        let rings = self.unsignalled && !self.put_off;
        if rings {
            (self.unsignalled, self.next_ring) = (false, now + APART);
        }
        rings
    }

    /// When to ring an agent's doorbell that was put off, in microseconds; None if none was.
    pub fn ring_due(&self) -> Option<u64> {
        self.put_off.then_some(self.next_ring)
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Sends a message to the agent, through the front worker if this is another one.
    pub(super) fn send_to_agent(&mut self, message: Message) {
        if self.lender.is_some() {
            return self.agent.send(Message { kind: message.kind | FOR_AGENT, ..message });
        }
        if let Some(crossbar) = &mut self.crossbar
            && !crossbar.peers.is_front()
        {
            return crossbar.peers.send(FRONT, Call::Agent(message));
        }
        match message.operation {
            Operation::OsControl => self.counters.add(Counter::ToAgentControl, 1),
            Operation::OsRestore => self.counters.add(Counter::ToAgentRestore, 1),
            _ => {}
        }
        self.agent.send(message);
        self.has_extras |= !self.agent.backlog.is_empty();
    }

    /// Sends the messages that found the agent's ring full, as far as it has room.
    #[cold]
    pub(super) fn flush_backlog(&mut self) {
        if self.agent.backlog.flush(&mut self.agent.events) {
            self.agent.events.publish();
            self.agent.unsignalled = true;
        }
    }
}
