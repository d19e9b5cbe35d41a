//! Between the agent and the NIC process that it starts: descriptors, settings, requests.

use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};

fn one() -> usize {
    1
}

/// The emulated link in front of the wire, the same both ways. Times in microseconds, probabilities in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSettings {
    /// Bits per second, 0 for no limit.
    pub rate: u64,
    /// One-way delay.
    pub delay: u64,
    /// Bytes of buffer.
    pub buffer: u64,
    /// Frames lost.
    pub loss: u32,
    /// Frames held back by `hold`.
    pub reorder: u32,
    /// How long.
    pub hold: u64,
    /// Frames doubled.
    pub duplicate: u32,
    /// Frames damaged.
    pub corrupt: u32,
    /// Only what the NIC sends is lost, held back, doubled or damaged; what it receives is merely delayed.
    pub one_way: bool,
    /// Seed of the faults.
    pub seed: u64,
}

/// What a NIC process is told when it starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NicSettings {
    /// Connections that it can hold.
    pub slots: usize,
    /// Workers, each a thread with queues of its own. Beside the kernel there is one.
    #[serde(default = "one")]
    pub workers: usize,
    /// Cores that they are bound to; those for whom there is none are not.
    #[serde(default)]
    pub cores: Vec<usize>,
    /// The host's interface and the wire have a queue for each worker, and registers that say which frame goes to which. Without them the
    /// first worker takes every frame, and gives those of the others to them.
    #[serde(default)]
    pub card: bool,
    /// One thread writes to the kernel what all workers have for it, each in turn; else each worker does so itself. Its core is the one behind
    /// the workers', if there is one. Not beside the kernel, where there is one worker.
    #[serde(default)]
    pub copy_engine: bool,
    /// Microseconds that it polls without work before it sleeps.
    pub spin: u64,
    /// The wire takes frames of up to 64 KB.
    pub segmentation: bool,
    /// What it does for the kernel's own connections; not beside the kernel, where their frames never come here.
    #[serde(default)]
    pub offloads: Offloads,
    /// Frames that come during a move are dropped, not kept for the connection's next owner.
    #[serde(default)]
    pub drop_during_moves: bool,
    /// The NIC hears and speaks on the kernel's own devices, instead of sitting between the kernel and the wire.
    #[serde(default)]
    pub beside: bool,
    /// The emulated link.
    pub link: LinkSettings,
    /// Key of the lookup table.
    pub hash_key: [u64; 4],
}

impl NicSettings {
    /// Descriptors of a card with several queues: its registers, then, for each worker but the first, a queue of the host's interface and one
    /// of the wire's.
    pub fn card_descriptors(&self) -> usize {
        if self.card { 1 + 2 * (self.workers - 1) } else { 0 }
    }
}

/// Descriptors that a NIC process inherits from its agent, and an agent from its keeper, in this order from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Descriptor {
    /// The TAP that is the kernel's interface; beside the kernel, the packet socket that hears what it sends.
    Host = 3,
    /// The wire; beside the kernel, the packet socket on all devices.
    Wire = 4,
    /// NIC memory.
    Memory = 5,
    /// The NIC's doorbell.
    NicBell = 6,
    /// The agent's doorbell.
    AgentBell = 7,
    /// The control connection to whoever started the process.
    Channel = 8,
    /// Beside the kernel: the TAP through which it is given frames. Else the first of a card's, see [`NicSettings::card_descriptors`].
    Injector = 9,
}

/// How the source address of a frame for the injector begins: the interface's index follows. As in baton_steering.
pub const INJECT: [u8; 2] = [0x02, 0xba];

/// What the agent sends over the control connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToNic {
    /// A session; its memory and the program's doorbell come along.
    Attach {
        /// Its number.
        session: u32,
    },
    /// Frames may flow.
    Start,
    /// Other offloads from now on.
    Offloads(Box<Offloads>),
}

/// What the NIC answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// It is ready.
    Ready,
    /// The session is attached.
    Attached,
    /// The offloads are as they were asked for.
    Set,
    /// It is not, because.
    Failed(String),
}
