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

/// The agent's rings, which only the front worker uses.
pub(super) struct AgentLink {
    pub commands: Consumer<RingWords>,
    pub events: Producer<RingWords>,
    /// Messages that found the ring of events full.
    pub backlog: Backlog,
    /// Messages were sent since the agent's doorbell was last checked.
    pub unsignalled: bool,
}

impl AgentLink {
    pub fn new(nic_memory: &Arc<Region>) -> AgentLink {
        let commands = Consumer::new(nic_memory.ring(nic::COMMANDS));
        let events = Producer::new(nic_memory.ring(nic::EVENTS));
        AgentLink { commands, events, backlog: Backlog::default(), unsignalled: false }
    }

    /// The host's TCP has the NIC in the agent's place.
    pub fn of_host_tcp(shared: &Arc<Region>) -> AgentLink {
        let commands = Consumer::new(shared.ring(host_tcp::COMMANDS));
        let events = Producer::new(shared.ring(host_tcp::EVENTS));
        AgentLink { commands, events, backlog: Backlog::default(), unsignalled: false }
    }

    /// Sends a message, behind those that found the ring full.
    pub fn send(&mut self, message: Message) {
        let full = !self.backlog.is_empty() || self.events.push(message.to_words()).is_err();
        if full && !cfg!(feature = "sabotage-lose-message") {
            self.backlog.add(message);
        }
        self.events.publish();
        self.unsignalled = true;
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
