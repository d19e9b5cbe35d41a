//! What the keeper holds for the next agent: descriptors, under names.

use baton_client::protocol::{Flip, Opening};
use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// What an agent tells the keeper, and the keeper the next agent. Descriptors come along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kept {
    /// From the agent: programs may come. From the keeper: that was all.
    Ready,
    /// A session: the control connection.
    Session(u32),
    /// Its memory, and the program's doorbell; how it was opened.
    Memory(u32, Opening),
    /// A group of sessions; the file for its report, if there is one.
    Group(u64, Option<Flip>),
    /// A connection of a session: session, number; its descriptor.
    Connection(u32, u32),
    /// A connection of an attacher: session, number, its program's process, its addresses. It comes without a descriptor.
    Attached(u32, u32, u32, SocketAddr, SocketAddr),
    /// The programs beside the kernel are at a device, by its index: their two links.
    Device(u32),
    /// What the NIC does for the kernel's own connections, in place of what it did before.
    Offloads(Box<Offloads>),
    /// The connection is the program's alone again.
    Forgotten(u32, u32),
    /// The session has ended, with all that is its.
    Ended(u32),
}

impl Kept {
    /// Whether this message makes the keeper drop what it holds as `held`.
    pub fn drops(&self, held: &Kept) -> bool {
        match (self, held) {
            (Kept::Forgotten(session, number), Kept::Connection(of, held) | Kept::Attached(of, held, ..)) => {
                (session, number) == (of, held)
            }
            (
                Kept::Ended(session),
                Kept::Session(of) | Kept::Memory(of, ..) | Kept::Connection(of, _) | Kept::Attached(of, ..),
            ) => session == of,
            (Kept::Offloads(_), Kept::Offloads(_)) => true,
            _ => false,
        }
    }

    /// Whether it comes with something to hold.
    pub fn holds(&self) -> bool {
        !matches!(self, Kept::Ready | Kept::Forgotten(..) | Kept::Ended(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_is_dropped_and_nothing_else() {
        let held = [
            Kept::Session(1),
            Kept::Memory(1, Opening::alone()),
            Kept::Connection(1, 2),
            Kept::Connection(2, 2),
            Kept::Session(2),
        ];
        let dropped = |by: Kept| held.iter().map(|held| by.drops(held)).collect::<Vec<_>>();
        assert_eq!(dropped(Kept::Forgotten(1, 2)), [false, false, true, false, false]);
        assert_eq!(dropped(Kept::Ended(2)), [false, false, false, true, true]);
        assert_eq!(dropped(Kept::Ready), [false; 5]);
    }
}
