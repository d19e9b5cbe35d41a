//! What NICs say by their message rings.

use super::Agent;
use crate::connection::Wants;
use crate::journal;
use baton_abi::{Cid, Message};
use baton_core::Notice;
use baton_moves::{Arrived, Event};

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
        let Some(notice) = Notice::of(message) else { return };
        let found = self.find(message.cid);
        match (notice, found) {
            (Notice::CutOff(session), _) => self.cut_off.push((session, "its command ring makes no sense")),
            (Notice::Made { listener, by_cookie }, _) => self.made(message.cid, listener, by_cookie),
            (Notice::Addresses, _) => self.addresses_changed(),
            (Notice::NotGranted, _) => self.not_granted(message.cid),
            (Notice::Opened, None) => self.drop_made(message.cid),
            (_, None) => {}
            (Notice::Opened, Some((session, number))) => self.opened(session, number),
            (Notice::NotOpened(error), Some((session, number))) => self.fail_opening(session, number, error),
            (Notice::OpensNone, Some((session, number))) => self.open_in_kernel(session, number),
            (Notice::Leaves { why, for_good }, Some((session, number))) => {
                if let Some(connection) = self.connection(session, number) {
                    connection.stays |= for_good;
                }
                self.return_soon(session, number, why);
            }
            (Notice::Ended, Some((session, number))) => self.drive(session, number, Event::Ended),
            (Notice::Larger(receive, send), Some((session, number))) => {
                if let Some(connection) = self.connection(session, number) {
                    connection.extra().wants = Wants::Larger(receive, send);
                }
                self.drive(session, number, Event::Grow);
            }
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
