//! The NIC process: workers on cores of their own, without capabilities, controlled by the agent.
#![forbid(unsafe_code)]

mod copy;
mod emulated;
mod nic;
mod sandbox;
mod settings;

pub use emulated::EmulatedWire;
pub use nic::{Descriptor, ToAgent, ToNic, run};
pub use settings::{LinkSettings, NicSettings};
