//! The worker's connection to the agent.

use super::Worker;
use crate::backlog::Backlog;
use crate::peers::{Call, FRONT};
use baton_abi::Message;
use baton_abi::layout::nic;
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
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Sends a message to the agent, through the front worker if this is another one.
    pub(super) fn send_to_agent(&mut self, message: Message) {
        if let Some(crossbar) = &mut self.crossbar
            && !crossbar.peers.is_front()
        {
            return crossbar.peers.send(FRONT, Call::Agent(message));
        }
        let full = !self.agent.backlog.is_empty() || self.agent.events.push(message.to_words()).is_err();
        if full && !cfg!(feature = "sabotage-lose-message") {
            self.agent.backlog.add(message);
        }
        self.agent.events.publish();
        self.agent.unsignalled = true;
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
