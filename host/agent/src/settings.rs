//! What an agent is told when it starts.

use crate::step::Crash;
use baton_control::NicSettings;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Settings of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AgentSettings {
    /// Where programs find it.
    pub socket: PathBuf,
    /// Name of the kernel's interface behind the NIC.
    pub interface: String,
    /// Bytes of memory that a session may use.
    pub session_bytes: usize,
    /// Core that the agent runs on, if it is bound to one.
    pub core: Option<usize>,
    /// Microseconds that a move may wait for out-of-order data to be covered.
    pub patience: u64,
    /// For tests: who is killed after which step of a move.
    #[serde(default)]
    pub crash: Option<Crash>,
    /// The NIC's settings.
    pub nic: NicSettings,
}

/// Descriptors that an agent inherits from the keeper, in this order from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Descriptor {
    /// The TAP that is the kernel's interface.
    Host = 3,
    /// The wire.
    Wire = 4,
    /// NIC memory.
    Memory = 5,
    /// The NIC's doorbell.
    NicBell = 6,
    /// The agent's doorbell.
    AgentBell = 7,
    /// The connection to the keeper.
    Keeper = 8,
}
