//! The steps of a move. After each one a crash has one defined outcome; tests let the NIC die after every one of them.

use serde::{Deserialize, Serialize};

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
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Step; 9] = [
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

/// Lets the NIC die after a step, every second time that it is made, so that what follows can go on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chaos {
    pub after: Option<Step>,
    passed: u32,
}

impl Chaos {
    pub fn new(after: Option<Step>) -> Chaos {
        Chaos { after, passed: 0 }
    }

    /// Whether the NIC is to die now.
    pub fn strikes(&mut self, step: Step) -> bool {
        if self.after != Some(step) {
            return false;
        }
        self.passed += 1;
        self.passed % 2 == 1
    }
}
