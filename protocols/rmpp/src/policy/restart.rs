//! A new data half replaces one that died. The policy knows which messages were acknowledged, so no message is lost or
//! delivered twice.

use super::Policy;
use super::messages::{ReceiveState, SendState};
use crate::data::Halves;
use crate::interface::{Command, Half};
use baton_wire::rmpp::MAX_CLEARED;

/// What has not been sent to a new data half yet: the next slot of each table; None when the table is done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Replay {
    pub(super) peers: Option<usize>,
    incoming: Option<usize>,
    outgoing: Option<usize>,
}

impl Policy {
    /// Notes that the halves given have died, and new ones without state have taken their place. The caller has dropped
    /// the events that they had reported, and their memory accesses have ended. The next commands enter peers and
    /// messages again: messages go on from what is known to have been placed.
    pub fn restart(&mut self, dead: Halves, now: u64) {
        let died = |half: Half| if half == Half::Receiving { dead.receiving } else { dead.sending };
        self.commands.retain(|command| command.half().is_none_or(|half| !died(half)));
        if dead.receiving {
            for buffer in 0..self.config.buffer_count {
                if self.posted_buffers.remove(buffer) {
                    self.free_buffers.push(buffer);
                }
            }
            self.replay.incoming = Some(0);
        }
        if dead.sending {
            self.replay.outgoing = Some(0);
        }
        self.replay.peers = Some(0);
        if dead.receiving {
            self.restart_matching();
        }
        // Messages that the dead halves were asked to release count as released.
        for slot in 0..self.incoming.slots() {
            if let Some(handle) = self.incoming.at(slot).filter(|_| dead.receiving) {
                self.on_released(handle, Half::Receiving, now);
            }
        }
        for slot in 0..self.outgoing.slots() {
            if let Some(handle) = self.outgoing.at(slot).filter(|_| dead.sending) {
                self.on_released(handle, Half::Sending, now);
            }
        }
    }

    /// A command as it is true now: numbers of a peer may have advanced since it was given.
    pub(super) fn brought_up_to_date(&self, command: Command) -> Command {
        match command {
            Command::SetPeer { peer, local, remote, .. } => {
                let now = &self.peers[usize::from(peer)];
                if now.is_open() && (now.local, now.remote) == (local, remote) { now.command(peer) } else { command }
            }
            other => other,
        }
    }

    /// The next command that enters a peer or message in a new data half.
    pub(super) fn poll_replay(&mut self) -> Option<Command> {
        while let Some(at) = self.replay.peers {
            self.replay.peers = (at + 1 < self.peers.len()).then_some(at + 1);
            let peer = &self.peers[at];
            if peer.is_open() {
                return Some(peer.command(at as u16));
            }
        }
        while let Some(slot) = self.replay.incoming {
            self.replay.incoming = (slot + 1 < self.incoming.slots()).then_some(slot + 1);
            let Some(handle) = self.incoming.at(slot) else { continue };
            let message = self.incoming.get(handle).filter(|message| message.state == ReceiveState::Receiving);
            if let Some((first, limit)) = message.map(|message| (message.placed, message.limit))
                && limit > first
            {
                return self.clear_command(handle, first, limit - first, MAX_CLEARED);
            }
        }
        while let Some(slot) = self.replay.outgoing {
            self.replay.outgoing = (slot + 1 < self.outgoing.slots()).then_some(slot + 1);
            let Some(handle) = self.outgoing.at(slot) else { continue };
            let sent = |state| matches!(state, SendState::Sent | SendState::Held);
            if self.outgoing.get(handle).is_some_and(|message| sent(message.state)) {
                return self.send_command(handle);
            }
        }
        None
    }
}
