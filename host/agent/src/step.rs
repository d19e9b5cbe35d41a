//! The steps of a move. After each one a crash has one defined outcome; tests let the NIC die after every one of them.

use baton_abi::layout::nic;
use baton_shm::Region;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A step that has been made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// To the NIC: it copies the connection's frames. A crash: the connection stays in the kernel.
    Mirrored,
    /// The program is out of the connection. A crash: as before.
    Quiesced,
    /// The connection's frames go to the NIC alone. A crash: as before, and what was held is sent again by the peer.
    Stolen,
    /// Numbers and queues are read. A crash: as before.
    Read,
    /// The kernel's socket is a shell. A crash: what was read is put back.
    Purged,
    /// The NIC has it. A crash: restored from record and memory.
    HandedOff,
    /// Back: the NIC has written the image and holds what comes. A crash: the restore goes on.
    Rested,
    /// The kernel has numbers and queues. A crash: the agent says the peer's last words itself, and the kernel speaks.
    Imported,
    /// The NIC has let go. A crash: nothing is lost that the peer will not send again.
    Released,
    /// Not of a move but of a recovery: the kernel has numbers and queues again. A crash: the next agent starts from the record.
    Restored,
    /// Of a connection that gets more memory: its bytes are in both. A crash: restored from record and the new one.
    Grown,
}

impl Step {
    /// Those of a move there and back, in order.
    pub const OF_A_MOVE: [Step; 9] = [
        Step::Mirrored,
        Step::Quiesced,
        Step::Stolen,
        Step::Read,
        Step::Purged,
        Step::HandedOff,
        Step::Rested,
        Step::Imported,
        Step::Released,
    ];
}

/// For tests: who dies, and after which step of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Crash {
    /// The step.
    pub after: Step,
    /// The agent dies (and with it the NIC), not the NIC alone.
    pub agent: bool,
}

/// Lets the NIC or the agent die after a step, every second time that it is made, so that what follows can go on. The count is where
/// the next agent finds it.
#[derive(Clone, Debug)]
pub(crate) struct Chaos {
    crash: Option<Crash>,
    nic_memory: Arc<Region>,
}

impl Chaos {
    pub fn new(crash: Option<Crash>, nic_memory: Arc<Region>) -> Chaos {
        Chaos { crash, nic_memory }
    }

    /// Whether the NIC is to die now. The agent does so here.
    pub fn strikes(&self, step: Step) -> bool {
        let Some(crash) = self.crash.filter(|crash| crash.after == step) else { return false };
        let strikes = self.nic_memory.word32(nic::CHAOS).fetch_add(1, Ordering::AcqRel).is_multiple_of(2);
        if strikes && crash.agent {
            let _ = baton_linux::process::signal(std::process::id(), 9);
        }
        strikes && !crash.agent
    }
}
