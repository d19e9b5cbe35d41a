//! The NIC process: one worker on a core of its own, without capabilities, fed by the agent.
#![forbid(unsafe_code)]

mod emulated;
mod nic;

pub use emulated::EmulatedWire;
pub use nic::{Descriptor, LinkSettings, NicSettings, ToAgent, ToNic, run};
