//! What NICs say by their message rings.

use super::Agent;
use crate::changes::ELSEWHERE;
use crate::connection::Wants;
use crate::journal;
use crate::nic::cut_off;
use baton_abi::{Cid, Control, Message, Operation, RestoreCause};
use baton_moves::{Arrived, Event};

/// Why a connection returns when its NIC is set to give it back then (`peer-fin=return`).
const PEER_FIN: &str = "its peer has sent its FIN";

impl Agent {
    /// Handles the NIC's messages: answers to commands, a broken command ring, a connection that it wants to restore,
    /// that has ended or that needs more memory.
    pub(crate) fn handle_nic_messages(&mut self) {
        let outermost = !std::mem::replace(&mut self.moves.handling, true);
        self.handle_arrived();
        while outermost && !self.moves.put_off.is_empty() {
            let put_off = std::mem::take(&mut self.moves.put_off);
            // By now the NIC may have notified the end of a connection that it has refused to restore.
            self.handle_arrived();
            put_off.into_iter().for_each(|put_off| self.settle_put_off(put_off));
        }
        self.moves.handling &= !outermost;
    }

    fn handle_arrived(&mut self) {
        for nic in 0..self.nics.len() {
            self.nics[nic].receive();
            while let Some(arrived) = self.nics[nic].inbox.pop() {
                match arrived {
                    Arrived::Answer(cid, answer) => self.on_answer(cid, answer),
                    // A NIC has nothing to say about the connections of others.
                    Arrived::Event(message) if message.cid != Cid(0) && message.cid.nic() != nic => {}
                    Arrived::Event(message) => self.on_nic_message(&message),
                }
            }
        }
    }

    fn on_nic_message(&mut self, message: &Message) {
        if let Some(session) = cut_off(message) {
            return self.cut_off.push((session, "its command ring makes no sense"));
        }
        let control = Control::from_number(message.kind);
        if (message.operation, control) == (Operation::OsControl, Some(Control::Made)) {
            return match (message.address, self.find(message.cid)) {
                (0, Some((session, number))) => self.opened(session, number),
                (0, None) => self.drop_made(message.cid),
                (listener, _) => self.made(message.cid, listener, message.length != 0),
            };
        }
        if (message.operation, control) == (Operation::OsControl, Some(Control::Addresses)) {
            return self.addresses_changed();
        }
        let refuses = |what| control == Some(Control::Refused) && message.length == what as u32;
        if message.operation == Operation::OsControl && refuses(Control::Grant) {
            return self.not_granted(message.cid);
        }
        let Some((session, number)) = self.find(message.cid) else { return };
        match (message.operation, control) {
            (Operation::OsRestore, _) if message.address == RestoreCause::Urgent as u32 => {
                self.return_soon(session, number, "urgent data from its peer");
            }
            (Operation::OsRestore, _) if message.address == RestoreCause::PeerFin as u32 => {
                if let Some(connection) = self.connection(session, number) {
                    // It is not tried again: its slot is for others.
                    connection.stays = true;
                }
                self.return_soon(session, number, PEER_FIN);
            }
            (Operation::OsRestore, _) => self.return_soon(session, number, "its peer has ended it"),
            (Operation::OsControl, Some(Control::NotMade)) => self.fail_opening(session, number, message.address),
            (Operation::OsControl, Some(Control::Closed)) => self.drive(session, number, Event::Ended),
            (Operation::OsControl, _) if refuses(Control::Connect) => self.open_in_kernel(session, number),
            (Operation::OsControl, _) if refuses(Control::Close) => {
                self.return_soon(session, number, "the NIC cannot close it");
            }
            (Operation::OsControl, _) if refuses(Control::Mtu) => self.return_soon(session, number, ELSEWHERE),
            (Operation::OsControl, Some(Control::Grow)) => {
                if let Some(connection) = self.connection(session, number) {
                    connection.extra().wants = Wants::Larger(message.address, message.length);
                }
                self.drive(session, number, Event::Grow);
            }
            _ => {}
        }
    }

    /// Finds session and number of the connection on the NIC with this cid, from the handoff parameters in its slot.
    fn find(&self, cid: Cid) -> Option<(u32, u32)> {
        let memory = &self.hardware.get(cid.nic())?.memory;
        let (session, number) = journal::occupant(memory, self.settings.nic.slots, cid)?;
        let found = self.sessions.get(session as usize)?.as_ref()?.connections.get(number as usize)?.as_ref()?;
        (found.cid == Some(cid)).then_some((session, number))
    }
}
