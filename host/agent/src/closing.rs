//! Connections that the NIC closes.
//!
//! A program has closed a connection that the NIC has made: the NIC sends the FIN. The shell stays until the peer has
//! acknowledged it, with the agent's descriptor, so that the kernel can close the connection should the NIC or the
//! agent die. Then it is closed in silence, and the NIC alone waits for the peer's FIN and through TIME-WAIT. A
//! connection with SO_LINGER, or of a program that ends, moves to the kernel first.

use crate::agent::Agent;
use crate::connection::{Connection, Then};
use crate::events::CLOSED;
use baton_abi::layout::block;
use baton_abi::{Control, Message, Operation};
use baton_core::Stage;
use baton_linux::socket;
use baton_moves::{Goal, Step};
use baton_protocol::program::Place;

impl Connection {
    /// Whether the NIC may close it when it is not moving.
    fn is_closed_by_nic(&self) -> bool {
        let plain = self.made_by == Place::Nic && !self.attached && !self.abandoned && self.must_return().is_none();
        plain && !self.is_waited_for() && self.fd().is_ok_and(|fd| socket::lingers(fd).is_ok_and(|lingers| !lingers))
    }

    /// Whether the NIC may close it. Not while another thread is inside an operation: it is waited for on the way to
    /// the kernel.
    fn may_close_on_nic(&self) -> bool {
        self.step() == Step::Nic && self.goal().is_none() && self.block.is_left() && self.is_closed_by_nic()
    }

    /// Whether the NIC may close it as soon as its memory has grown.
    fn may_close_when_grown(&self) -> bool {
        let grows = matches!(self.goal(), Some(Goal::Enlarge | Goal::Grow | Goal::Stay));
        grows && !self.is_leaving() && self.is_closed_by_nic()
    }
}

impl Agent {
    /// Whether a connection that its program has closed is getting other memory, and the NIC may close it then: a
    /// program that has just filled its send memory often closes at once.
    pub(crate) fn closes_when_grown(&self, session: u32, number: u32) -> bool {
        !self.draining && self.connection_ref(session, number).is_some_and(Connection::may_close_when_grown)
    }

    /// Makes the NIC close a connection that its program has closed. Returns whether it does: then the connection is
    /// forgotten when the peer has acknowledged the FIN, or when it is in the kernel after all.
    pub(crate) fn close_on_nic(&mut self, session: u32, number: u32) -> bool {
        if self.draining {
            return false;
        }
        let Some(connection) = self.connection(session, number) else { return false };
        let (Some(cid), true) = (connection.cid, connection.may_close_on_nic()) else { return false };
        let read = connection.block.load(block::READ_SEQ);
        if self.nics[cid.nic()].post(Message::control(Operation::NicControl, Control::Close, cid, read, 0)).is_err() {
            return false;
        }
        let Some(connection) = self.connection(session, number) else { return false };
        connection.block.note_closed(true);
        connection.reason = CLOSED.into();
        connection.extra().waiting.then.push((Then::Forget((session, 0)), 0));
        true
    }

    /// Forgets the connections in the kernel that a dead agent's NIC was closing, or whose programs had closed them
    /// without that agent's knowledge; those that still move there are forgotten then.
    pub(crate) fn forget_what_was_closing(&mut self) {
        for (session, number) in self.all_connections() {
            let Some(connection) = self.connection(session, number) else { continue };
            if !connection.block.is_closed() {
                continue;
            }
            if connection.stage() == Stage::Nic {
                connection.extra().waiting.then.push((Then::Forget((session, 0)), 0));
            } else {
                let _ = self.settle(session, number, Then::Forget((session, 0)), 0);
            }
        }
    }
}
