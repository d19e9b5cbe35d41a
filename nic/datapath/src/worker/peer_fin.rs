//! Handling of a connection whose peer has sent its FIN (the paper on connection handoff, Figure 6 (6)).

use super::Worker;
use baton_abi::layout::Counter;
use baton_abi::{Cid, Message, Operation, RestoreCause};
use baton_device::Device;

/// Called when the peer's FIN has come in order, or a connection has come whose FIN was received before. If the setting
/// says so, asks the host to take the connection back, which frees its slot and memory.
#[cold]
pub(super) fn came<H: Device, W: Device>(worker: &mut Worker<H, W>, cid: Cid) {
    if worker.settings.return_at_fin {
        worker.counters.add(Counter::PeerFins, 1);
        worker.send_to_agent(Message::new(Operation::OsRestore, cid, RestoreCause::PeerFin as u32, 0));
    }
}
